/* Products in whole numbers: weights in the codes of their file, rows rounded to 8 bits.

   Blocks of 32 inputs share, for each output, a half-precision scale d and, with codes of 4 bits, a minimum m: a weight
   is d * q + m. Of a row, the same 32 inputs share a scale s, their largest magnitude over 127, and x is s * k. Then
   sum w x = s * (d * sum q k + m * sum k), and both sums are whole numbers below 2^20: exact, in any order, four products
   an instruction. Only x is rounded, to within s / 2. Codes of 8 bits are stored 128 too large, as the instruction takes
   one factor without a sign; sum k takes that off again.

   A panel of 32 outputs is two streams of 16, each of blocks: 16 d, then with 4 bits 16 m, then codes. A word of 32 bits
   holds four inputs of one output, with 4 bits four more in the upper halves of its bytes. Each output is one chain over
   blocks, whatever the number of rows: a row's bits are its own. */
#include "products.h"

#define BLOCK 32
#define QUADS (BLOCK / 4)
#define VNNI __attribute__((target("avx512vnni")))
#define ROUNDED_BYTES 65536 /* of the rows that a thread rounds at once; a third more lies beside them on its stack */
#define MOST_ROWS 64

#define SCALE_BYTES(bits) ((bits) == 4 ? 4 * LANES : 2 * LANES)
#define CODE_BYTES(bits) (LANES * BLOCK * (bits) / 8)
#define BLOCK_BYTES(bits) (SCALE_BYTES(bits) + CODE_BYTES(bits))

/* Rows in whole numbers, and of each block the scale, and what its sum is worth. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *starts; /* what a sum begins with: what codes that are 128 too large give too much, negative */
    int64_t width, num_blocks;
} Rounded;

/* Adds a block to the totals of `num_rows` rows with 16 outputs. */
ALWAYS_INLINE VNNI void add_block(
    const uint8_t *from, const Rounded *x, int64_t block, __m512 *totals, const int num_rows, const int bits) {
    __m512i parts[ROW_TILE];
    const int8_t *codes = x->codes + block * BLOCK;
    for (int at = 0; at < BLOCK_BYTES(bits); at += 64) _mm_prefetch((const char *)from + AHEAD + at, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
        parts[r] = bits == 8 ? _mm512_set1_epi32(x->starts[r * x->num_blocks + block]) : _mm512_setzero_si512();
    const int quads_of_load = 8 / bits;
#pragma GCC unroll 8
    for (int load = 0; load < QUADS / quads_of_load; load++) {
        __m512i w = _mm512_loadu_si512(from + SCALE_BYTES(bits) + 64 * load);
#pragma GCC unroll 2
        for (int quad = 0; quad < quads_of_load; quad++) {
            __m512i four = w;
            if (bits == 4) {
                four = _mm512_and_si512(quad ? _mm512_srli_epi16(w, 4) : w, _mm512_set1_epi8(15));
            }
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                int32_t k;
                memcpy(&k, codes + r * x->width + 4 * (load * quads_of_load + quad), sizeof k);
                parts[r] = _mm512_dpbusd_epi32(parts[r], four, _mm512_set1_epi32(k));
            }
        }
    }
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)), m = d;
    if (bits == 4) m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from + 1));
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) {
        int64_t at = r * x->num_blocks + block;
        __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(parts[r]), _mm512_set1_ps(x->scales[at]));
        totals[r] = _mm512_fmadd_ps(d, part, totals[r]);
        if (bits == 4) totals[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->sums[at]), totals[r]);
    }
}

ALWAYS_INLINE VNNI void multiply(
    const Product *p, int64_t row, int64_t panel, const Rounded *x, const int num_rows, const int bits) {
    const uint8_t *from = (const uint8_t *)p->weight + panel * 2 * x->num_blocks * BLOCK_BYTES(bits);
    __m512 totals[2][ROW_TILE];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m512 sums[ROW_TILE];
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) sums[r] = _mm512_setzero_ps();
        for (int64_t block = 0; block < x->num_blocks; block++, from += BLOCK_BYTES(bits))
            add_block(from, x, block, sums, num_rows, bits);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) totals[h][r] = sums[r];
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) finish(p, row + r, panel, totals[0][r], totals[1][r]);
}

ALWAYS_INLINE VNNI void multiply_panel(
    const Product *p, int64_t first, int64_t last, int64_t panel, const Rounded *x, const int bits) {
    Rounded here = *x;
    int64_t row = first;
#define TILE(n) multiply(p, row, panel, &here, n, bits)
    for (; row + ROW_TILE <= last; row += ROW_TILE) {
        TILE(ROW_TILE);
        here.codes += ROW_TILE * x->width;
        here.scales += ROW_TILE * x->num_blocks;
        here.sums += ROW_TILE * x->num_blocks;
        here.starts += ROW_TILE * x->num_blocks;
    }
    switch (last - row) {
    case 1: TILE(1); break;
    case 2: TILE(2); break;
    case 3: TILE(3); break;
    case 4: TILE(4); break;
    case 5: TILE(5); break;
    case 6: TILE(6); break;
    case 7: TILE(7); break;
    }
#undef TILE
}

static VNNI void multiply_panel_4(const Product *p, int64_t first, int64_t last, int64_t panel, const Rounded *x) {
    multiply_panel(p, first, last, panel, x, 4);
}

static VNNI void multiply_panel_8(const Product *p, int64_t first, int64_t last, int64_t panel, const Rounded *x) {
    multiply_panel(p, first, last, panel, x, 8);
}

/* Rounds a row, block by block. A NaN or an infinity makes its block's scale one, and so every sum over that block. */
static VNNI void round_row(
    const bfloat *x, int64_t num_blocks, int8_t *codes, float *scales, float *sums, int32_t *starts) {
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    for (int64_t block = 0; block < num_blocks; block++, x += BLOCK, codes += BLOCK) {
        /* Magnitudes of bfloat16 are ordered as whole numbers, NaN above all. */
        __m512i both = _mm512_and_si512(_mm512_loadu_si512(x), magnitude);
        __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
        __m128i most = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        most = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)));
        float largest = widen_one((bfloat)~_mm_extract_epi16(most, 0));
        float scale = largest / 127.0f, inverse = 127.0f / largest;
        if (!(inverse <= 3.4e38f)) inverse = 3.4e38f; /* all zeros, or next to it */
        __m512 by = _mm512_set1_ps(inverse);
        __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(load_wide(x, 0xFFFF), by));
        __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(load_wide(x + LANES, 0xFFFF), by));
        _mm_storeu_si128((__m128i *)codes, _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128((__m128i *)(codes + LANES), _mm512_cvtsepi32_epi8(second));
        int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
        scales[block] = scale;
        sums[block] = scale * (float)sum;
        starts[block] = -128 * sum;
    }
}

/* By all threads of a team; each rounds the rows for itself, which is less than a wait for the others. */
void multiply_integer_rows(const Product *p, int64_t num_panels) {
    int64_t num_blocks = p->width / BLOCK, most = ROUNDED_BYTES / p->width;
    if (most > MOST_ROWS) most = MOST_ROWS;
    int8_t codes[ROUNDED_BYTES];
    float scales[ROUNDED_BYTES / BLOCK], sums[ROUNDED_BYTES / BLOCK];
    int32_t starts[ROUNDED_BYTES / BLOCK];
    Rounded x = {codes, scales, sums, starts, p->width, num_blocks};
    for (int64_t first = 0; first < p->num_rows; first += most) {
        int64_t last = first + most < p->num_rows ? first + most : p->num_rows;
        for (int64_t row = first; row < last; row++) {
            int64_t at = (row - first) * num_blocks;
            round_row(p->x + row * p->x_stride, num_blocks, codes + at * BLOCK, scales + at, sums + at, starts + at);
        }
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < num_panels; panel++) {
            if (p->form == INTEGERS_4) multiply_panel_4(p, first, last, panel, &x);
            else multiply_panel_8(p, first, last, panel, &x);
        }
    }
}
