/* Products with a weight that stays in the codes of its file.

   Blocks of 32 inputs share, for each output, a half-precision scale d and, with codes of 4 bits, a minimum m: a weight
   is d * q + m. Codes are whole numbers that bfloat16 holds exactly, so a block's pairs are multiplied as bare codes,
   and d and m join in float32, once per block: sum w x = d * sum q x + m * sum x. No weight is ever rounded.

   A panel of 32 outputs is one stream of blocks: 32 d, then with 4 bits 32 m, then codes of the first 16 outputs and of
   the others. A word of 16 bits holds codes of one input of a pair and one output, four pairs upwards from its lowest
   bits; a register of bytes holds two pairs, as signs and magnitudes. Each output is one chain over blocks, and each
   block a chain of its own, whatever the number of rows: a row's bits are its own. */
#include "products.h"

#define BLOCK 32
#define PAIRS (BLOCK / 2)
#define ROW_CHUNK 64
#define WIDE __attribute__((target("avx512vbmi")))

/* Bytes of a block: its scales, and the codes of 16 outputs. */
#define SCALE_BYTES(bits) ((bits) == 4 ? 4 * PANEL : 2 * PANEL)
#define HALF_BYTES(bits) (LANES * BLOCK * (bits) / 8)
#define BLOCK_BYTES(bits) (SCALE_BYTES(bits) + 2 * HALF_BYTES(bits))

typedef struct {
    __m512i words;            /* of codes of 4 bits, twice */
    __m512i low[2], high[2];  /* bytes of magnitudes of 7 bits */
} Tables;

static bfloat words[32];
static uint8_t low_bytes[128], high_bytes[128];

/* Once, as the library is loaded: whole numbers as bfloat16. */
__attribute__((constructor)) static void fill_tables(void) {
    for (int i = 0; i < 128; i++) {
        float wide = (float)i;
        uint32_t bits;
        memcpy(&bits, &wide, sizeof bits);
        low_bytes[i] = (uint8_t)(bits >> 16);
        high_bytes[i] = (uint8_t)(bits >> 24);
        if (i < 16) words[i] = words[i + 16] = (bfloat)(bits >> 16);
    }
}

ALWAYS_INLINE Tables load_tables(void) {
    Tables t = {_mm512_loadu_si512(words)};
    for (int i = 0; i < 2; i++) {
        t.low[i] = _mm512_loadu_si512(low_bytes + 64 * i);
        t.high[i] = _mm512_loadu_si512(high_bytes + 64 * i);
    }
    return t;
}

/* Two pairs of 16 outputs from codes of 8 bits. */
ALWAYS_INLINE WIDE void unpack_bytes(const Tables *t, __m512i codes, __m512i *first, __m512i *second) {
    __m512i low = _mm512_permutex2var_epi8(t->low[0], codes, t->low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], codes, t->high[1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8); /* high | (codes & sign) */
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* Adds a block to the totals of `num_rows` rows. */
ALWAYS_INLINE WIDE void add_block(
    const Tables *t, const uint8_t *from, const bfloat *x, int64_t x_stride, const float *sums, int64_t sums_stride,
    float (*totals)[PANEL], const int num_rows, const int bits) {
    __m512 parts[ROW_TILE][2];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) parts[r][0] = parts[r][1] = _mm512_setzero_ps();
    /* All of a block at once and in order: between the products they are late, and a second stream beside slows both. */
    for (int at = 0; at < BLOCK_BYTES(bits); at += 64) _mm_prefetch((const char *)from + AHEAD + at, _MM_HINT_T0);
    const int pairs_of_load = 16 / bits;
    for (int load = 0; load < PAIRS / pairs_of_load; load++) {
        __m512i codes[2], others[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            codes[h] = _mm512_loadu_si512(from + SCALE_BYTES(bits) + 64 * (2 * load + h));
            if (bits == 8) unpack_bytes(t, codes[h], &codes[h], &others[h]);
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs_of_load; pair++) {
            __m512bh w[2];
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                if (bits == 4) {
                    w[h] = (__m512bh)_mm512_permutexvar_epi16(codes[h], t->words);
                    codes[h] = _mm512_srli_epi16(codes[h], 4);
                } else {
                    w[h] = (__m512bh)(pair == 0 ? codes[h] : others[h]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                int32_t two;
                memcpy(&two, x + r * x_stride + 2 * (load * pairs_of_load + pair), sizeof two);
                __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                parts[r][0] = _mm512_dpbf16_ps(parts[r][0], w[0], both);
                parts[r][1] = _mm512_dpbf16_ps(parts[r][1], w[1], both);
            }
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const __m256i *scales = (const __m256i *)from + h;
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(scales)), m = d;
        if (bits == 4) m = _mm512_cvtph_ps(_mm256_loadu_si256(scales + 2));
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            __m512 total = _mm512_fmadd_ps(d, parts[r][h], _mm512_loadu_ps(totals[r] + h * LANES));
            if (bits == 4) total = _mm512_fmadd_ps(m, _mm512_set1_ps(sums[r * sums_stride]), total);
            _mm512_storeu_ps(totals[r] + h * LANES, total);
        }
    }
}

ALWAYS_INLINE WIDE void multiply(
    const Product *p, const Tables *t, int64_t row, int64_t panel, const float *sums, const int num_rows,
    const int bits) {
    int64_t num_blocks = p->width / BLOCK;
    const uint8_t *from = (const uint8_t *)p->weight + panel * num_blocks * BLOCK_BYTES(bits);
    const bfloat *x = p->x + row * p->x_stride;
    float totals[ROW_TILE][PANEL] __attribute__((aligned(64)));
    memset(totals, 0, num_rows * sizeof *totals);
    for (int64_t block = 0; block < num_blocks; block++) {
        add_block(
            t, from + block * BLOCK_BYTES(bits), x + block * BLOCK, p->x_stride, sums + block, num_blocks, totals,
            num_rows, bits);
        /* With more rows the registers are all needed for the parts: totals stay in memory. */
        if (num_rows > 4) __asm__ volatile("" ::: "memory");
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
        finish(p, row + r, panel, _mm512_load_ps(totals[r]), _mm512_load_ps(totals[r] + LANES));
}

ALWAYS_INLINE WIDE void multiply_panel(
    const Product *p, const Tables *t, int64_t first, int64_t last, int64_t panel, const float *sums, const int bits) {
    int64_t row = first, num_blocks = p->width / BLOCK;
#define TILE(n) multiply(p, t, row, panel, sums + (row - first) * num_blocks, n, bits)
    for (; row + ROW_TILE <= last; row += ROW_TILE) TILE(ROW_TILE);
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

static WIDE void multiply_panel_4(
    const Product *p, int64_t first, int64_t last, int64_t panel, const float *sums) {
    Tables tables = load_tables();
    multiply_panel(p, &tables, first, last, panel, sums, 4);
}

static WIDE void multiply_panel_8(const Product *p, int64_t first, int64_t last, int64_t panel) {
    Tables tables = load_tables();
    multiply_panel(p, &tables, first, last, panel, 0, 8);
}

/* Each block's sum of a row. */
static void sum_blocks(const bfloat *x, int64_t num_blocks, float *sums) {
    __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3F803F80);
    for (int64_t block = 0; block < num_blocks; block++) {
        __m512bh row = (__m512bh)_mm512_loadu_si512(x + block * BLOCK);
        sums[block] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), row, ones));
    }
}

/* By all threads of a team; each sums up the rows for itself, which is less than a wait for the others. */
void multiply_quantized_rows(const Product *p, int64_t num_panels) {
    int64_t num_blocks = p->width / BLOCK;
    float sums[ROW_CHUNK * LARGEST_QUANTIZED_WIDTH / BLOCK];
    for (int64_t first = 0; first < p->num_rows; first += ROW_CHUNK) {
        int64_t last = first + ROW_CHUNK < p->num_rows ? first + ROW_CHUNK : p->num_rows;
        if (p->form == CODES_4)
            for (int64_t row = first; row < last; row++)
                sum_blocks(p->x + row * p->x_stride, num_blocks, sums + (row - first) * num_blocks);
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < num_panels; panel++) {
            if (p->form == CODES_4) multiply_panel_4(p, first, last, panel, sums);
            else multiply_panel_8(p, first, last, panel);
        }
    }
}
