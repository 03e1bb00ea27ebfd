/* Attention of a batch over keys in blocks, and over the batch's own new rows, in one call.

   Positions below `length` of a request are read from its blocks, those from there on are its new rows. Row t of
   request b sees positions lows[b, t] to highs[b, t] - 1 and no other, to the bit: nothing else is multiplied by 0.
   Scores are summed along the head, weights by position modulo 16, values by position: a row's bits are its own,
   whatever its neighbours, and wherever its keys lie. M key/value heads, G query heads for each of them. */
#include "layers.h"

#define ROW_TILE 4   /* query rows that keys and values are read for at once */
#define GROUP_TILE 2 /* groups of keys that are scored at once */
#define SPAN 32      /* channels that fill a register */
#define SPAN_TILE 2  /* spans that are mixed at once */
#define AHEAD 64     /* positions from what is worked on to what is asked for from memory */
#define LINE 32      /* numbers that memory hands out at once */

ALWAYS_INLINE __mmask32 first_channels(int64_t count) {
    return count >= SPAN ? (__mmask32)0xFFFFFFFF : (__mmask32)((1ull << count) - 1);
}

ALWAYS_INLINE void store_pairs(bfloat *to, __mmask32 channels, __m512 even, __m512 odd) {
    __m512i lower = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_mask_storeu_epi16(to, channels, _mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)));
}

/* Asks for a row's numbers before they are needed, into the second cache: the processor by itself is late, and in the
   first cache as many would be in the way. */
ALWAYS_INLINE void fetch(const bfloat *row, int64_t count) {
    for (int64_t at = 0; at < count; at += LINE) _mm_prefetch((const char *)(row + at), _MM_HINT_T1);
}

ALWAYS_INLINE void step_through(const bfloat **rows, int64_t count, const bfloat *from, int64_t stride) {
    for (int64_t i = 0; i < count; i++) rows[i] = from + i * stride;
}

/* Where a head's keys and values at positions least to most - 1 lie: one walk over the blocks, without a division. */
static void find_rows(
    const Attention *a, int64_t request, int64_t head, int64_t least, int64_t most, const bfloat **keys,
    const bfloat **values) {
    const int32_t *blocks = a->table + a->slots[request] * a->table_stride;
    int64_t length = a->lengths[request], until = most < length ? most : length, position = least;
    int64_t index = position / a->block_size, inside = position % a->block_size;
    for (int64_t count; position < until; position += count, index++, inside = 0) {
        int64_t at = head * a->head_stride + (blocks[index] * a->block_size + inside) * a->head_size;
        count = a->block_size - inside < until - position ? a->block_size - inside : until - position;
        step_through(keys + position, count, a->keys + at, a->head_size);
        step_through(values + position, count, a->values + at, a->head_size);
    }
    if (position >= most) return;
    int64_t at = (request * a->num_rows + position - length) * a->new_stride + head * a->head_size;
    step_through(keys + position, most - position, a->new_k + at, a->new_stride);
    step_through(values + position, most - position, a->new_v + at, a->new_stride);
}

/* 16 registers of 16 pairs, rows for columns. */
ALWAYS_INLINE void transpose(__m512i *r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* Pairs of channels of the keys at positions first to first + 15, [H / 2, 16, 2]; zeros outside low to high - 1, and
   behind H up to whole registers. By itself, as 32 registers are just enough for it. */
static __attribute__((noinline)) void gather_keys(
    const bfloat *const *keys, int64_t num_pairs, int64_t first, int64_t low, int64_t high, uint32_t *pairs) {
    static const bfloat zeros[LARGEST_HEAD];
    const bfloat *some[LANES], *const *at = keys + first;
    if (first < low || first + LANES > high) {
        for (int64_t i = 0; i < LANES; i++) some[i] = first + i >= low && first + i < high ? at[i] : zeros;
        at = some;
    }
    for (int64_t pair = 0; pair < num_pairs; pair += LANES) {
        __mmask16 lanes = first_lanes(num_pairs - pair);
        __m512i r[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) r[i] = _mm512_maskz_loadu_epi32(lanes, at[i] + 2 * pair);
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) _mm512_storeu_si512(pairs + (pair + i) * LANES, r[i]);
    }
}

/* Scores of up to 4 rows over up to 2 groups of keys: one row over one group is a chain in which each sum waits for the
   one before, and with 6 chains or more the processor never waits. */
ALWAYS_INLINE void dots(
    const bfloat *const *q, const uint32_t *pairs, int64_t num_pairs, float *scores, int64_t stride, const int num_rows,
    const int num_groups) {
    __m512 totals[ROW_TILE][GROUP_TILE];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
#pragma GCC unroll 2
        for (int g = 0; g < num_groups; g++) totals[r][g] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        __m512bh keys[GROUP_TILE];
#pragma GCC unroll 2
        for (int g = 0; g < num_groups; g++) {
            keys[g] = (__m512bh)_mm512_loadu_si512(pairs + (g * num_pairs + pair) * LANES);
        }
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            int32_t both;
            memcpy(&both, q[r] + 2 * pair, sizeof both);
            __m512bh query = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
            for (int g = 0; g < num_groups; g++) totals[r][g] = _mm512_dpbf16_ps(totals[r][g], keys[g], query);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) {
#pragma GCC unroll 2
        for (int g = 0; g < num_groups; g++) _mm512_storeu_ps(scores + r * stride + g * LANES, totals[r][g]);
    }
}

/* How many of the rows left are taken next: 4 while there are, but so that none comes to go alone. */
ALWAYS_INLINE int next_rows(int64_t left) {
    return left == 5 || left == 6 ? 3 : left < ROW_TILE ? (int)left : ROW_TILE;
}

ALWAYS_INLINE void score(
    const bfloat *const *q, int64_t count, const uint32_t *pairs, int64_t num_pairs, float *scores, int64_t stride,
    const int num_groups) {
    for (int64_t r = 0, next; r < count; r += next) {
        next = next_rows(count - r);
        float *to = scores + r * stride;
        if (next == 4) dots(q + r, pairs, num_pairs, to, stride, 4, num_groups);
        else if (next == 3) dots(q + r, pairs, num_pairs, to, stride, 3, num_groups);
        else if (next == 2) dots(q + r, pairs, num_pairs, to, stride, 2, num_groups);
        else dots(q + r, pairs, num_pairs, to, stride, 1, num_groups);
    }
}

/* Adds the weighted values of positions low to high - 1 to up to 4 rows, in up to 2 spans of 32 channels. A span's even
   channels come first in `mixed`, then its odd ones: the cheapest way to widen them. */
ALWAYS_INLINE void mix_spans(
    const bfloat *const *values, int64_t at, int64_t head_size, int64_t low, int64_t high, const float *const *weights,
    float (*mixed)[LARGEST_HEAD], const int num_rows, const int num_spans) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __mmask32 channels[SPAN_TILE];
    __m512 even[ROW_TILE][SPAN_TILE], odd[ROW_TILE][SPAN_TILE];
#pragma GCC unroll 2
    for (int s = 0; s < num_spans; s++) {
        channels[s] = first_channels(head_size - at - s * SPAN);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            even[r][s] = _mm512_loadu_ps(mixed[r] + at + s * SPAN);
            odd[r][s] = _mm512_loadu_ps(mixed[r] + at + s * SPAN + LANES);
        }
    }
    for (int64_t position = low; position < high; position++) {
        fetch(values[position + AHEAD < high ? position + AHEAD : high - 1] + at, num_spans * SPAN);
        __m512 first[SPAN_TILE], second[SPAN_TILE];
#pragma GCC unroll 2
        for (int s = 0; s < num_spans; s++) {
            __m512i both = _mm512_maskz_loadu_epi16(channels[s], values[position] + at + s * SPAN);
            first[s] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            second[s] = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
        }
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            __m512 weight = _mm512_set1_ps(weights[r][position]);
#pragma GCC unroll 2
            for (int s = 0; s < num_spans; s++) {
                even[r][s] = _mm512_fmadd_ps(weight, first[s], even[r][s]);
                odd[r][s] = _mm512_fmadd_ps(weight, second[s], odd[r][s]);
            }
        }
    }
#pragma GCC unroll 2
    for (int s = 0; s < num_spans; s++) {
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            _mm512_storeu_ps(mixed[r] + at + s * SPAN, even[r][s]);
            _mm512_storeu_ps(mixed[r] + at + s * SPAN + LANES, odd[r][s]);
        }
    }
}

ALWAYS_INLINE void mix(
    const bfloat *const *values, int64_t head_size, int64_t low, int64_t high, const float *const *weights,
    float (*mixed)[LARGEST_HEAD], const int num_rows) {
    if (low >= high) return;
    int64_t at = 0;
    for (; at + SPAN < head_size; at += SPAN_TILE * SPAN) {
        mix_spans(values, at, head_size, low, high, weights, mixed, num_rows, SPAN_TILE);
    }
    if (at < head_size) mix_spans(values, at, head_size, low, high, weights, mixed, num_rows, 1);
}

/* Scores to weights, in place, over whole groups; returns one over their sum. */
static float soften(float *scores, int64_t low, int64_t high, float scale, const float *sink) {
    int64_t begin = low / LANES * LANES;
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t at = begin; at < high; at += LANES) {
        __mmask16 seen = first_lanes(high - at) & (at < low ? (__mmask16)(0xFFFF << (low - at)) : 0xFFFF);
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(scale));
        x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
        _mm512_storeu_ps(scores + at, x);
        largest = _mm512_max_ps(largest, x);
    }
    float top = _mm512_reduce_max_ps(largest);
    if (sink && *sink > top) top = *sink;
    __m512 total = _mm512_setzero_ps();
    for (int64_t at = begin; at < high; at += LANES) {
        __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at), _mm512_set1_ps(top)));
        _mm512_storeu_ps(scores + at, weights);
        total = _mm512_add_ps(total, weights);
    }
    float sum = _mm512_reduce_add_ps(total);
    return 1.0f / (sink ? sum + expf(*sink - top) : sum);
}

/* Query rows of a key/value head, and what they see. */
typedef struct {
    const Attention *a;
    int64_t request, head, first, count; /* a row is (token, head of the group), tokens outside */
    const bfloat *q[QUERY_TILE];
    int64_t low[QUERY_TILE], high[QUERY_TILE], least, most;
    const bfloat **keys, **values; /* by position, from `least` to `most` - 1; the values lie right behind the keys */
    float *scores;                 /* `scratch_stride` from row to row */
} Tile;

static void find_tile(Tile *t, float *scratch) {
    const Attention *a = t->a;
    int64_t group = a->num_heads / a->num_kv_heads;
    t->least = INT64_MAX, t->most = 0;
    for (int64_t r = 0; r < t->count; r++) {
        int64_t token = t->request * a->num_rows + (t->first + r) / group;
        t->q[r] = a->q + token * a->q_stride + (t->head * group + (t->first + r) % group) * a->head_size;
        t->low[r] = a->lows[token], t->high[r] = a->highs[token];
        if (t->low[r] < t->least) t->least = t->low[r];
        if (t->high[r] > t->most) t->most = t->high[r];
    }
    t->scores = scratch;
    t->keys = (const bfloat **)(scratch + QUERY_TILE * a->scratch_stride);
    t->values = t->keys + (t->most - t->least);
    find_rows(a, t->request, t->head, t->least, t->most, t->keys, t->values);
}

/* Asks for the keys of some positions; behind the last ones come the values. Returns the position behind. Inline, for
   gcc leaves out a call that does nothing but ask. */
ALWAYS_INLINE int64_t fetch_rows(const Tile *t, int64_t position, int64_t count) {
    int64_t until = position + count, end = 2 * t->most - t->least;
    for (; position < until && position < end; position++) fetch(t->keys[position], t->a->head_size);
    return position;
}

static void score_tile(const Tile *t) {
    int64_t num_pairs = t->a->head_size / 2, stride = t->a->scratch_stride;
    uint32_t pairs[GROUP_TILE * LARGEST_HEAD / 2 * LANES];
    int64_t asked = fetch_rows(t, t->least, AHEAD);
    for (int64_t at = t->least / LANES * LANES; at < t->most; at += GROUP_TILE * LANES) {
        int64_t num_groups = at + LANES < t->most ? GROUP_TILE : 1;
        /* A few rows now and then: with many at once the processor waits until memory has taken note of them. */
        for (int64_t g = 0; g < num_groups; g++) {
            asked = fetch_rows(t, asked, LANES / 2);
            gather_keys(t->keys, num_pairs, at + g * LANES, t->least, t->most, pairs + g * num_pairs * LANES);
        }
        asked = fetch_rows(t, asked, LANES / 2);
        if (num_groups == 2) score(t->q, t->count, pairs, num_pairs, t->scores + at, stride, 2);
        else score(t->q, t->count, pairs, num_pairs, t->scores + at, stride, 1);
        asked = fetch_rows(t, asked, LANES / 2);
    }
}

/* Rows r to r + num_rows - 1 of a tile, from scores to what goes on behind attention. */
static void mix_rows(const Tile *t, int64_t r, const int num_rows) {
    const Attention *a = t->a;
    int64_t group = a->num_heads / a->num_kv_heads, begin = 0, end = INT64_MAX;
    const int64_t *low = t->low + r, *high = t->high + r;
    const float *weights[ROW_TILE];
    float inverse[ROW_TILE], mixed[ROW_TILE][LARGEST_HEAD];
    bfloat *y[ROW_TILE];
    for (int i = 0; i < num_rows; i++) {
        int64_t token = t->request * a->num_rows + (t->first + r + i) / group;
        int64_t query_head = t->head * group + (t->first + r + i) % group;
        float *scores = t->scores + (r + i) * a->scratch_stride;
        inverse[i] = soften(scores, low[i], high[i], a->scale, a->sinks ? a->sinks + query_head : 0);
        weights[i] = scores, y[i] = a->y + (token * a->num_heads + query_head) * a->head_size;
        if (low[i] > begin) begin = low[i];
        if (high[i] < end) end = high[i];
        memset(mixed[i], 0, (a->head_size + SPAN - 1) / SPAN * SPAN * sizeof(float));
    }
    if (end < begin) end = begin;
    /* What all see is mixed for all at once, before and behind it each row goes alone: others may see NaN there. */
    for (int i = 0; i < num_rows; i++) {
        mix(t->values, a->head_size, low[i], high[i] < begin ? high[i] : begin, weights + i, mixed + i, 1);
    }
    if (num_rows == 4) mix(t->values, a->head_size, begin, end, weights, mixed, 4);
    else if (num_rows == 3) mix(t->values, a->head_size, begin, end, weights, mixed, 3);
    else if (num_rows == 2) mix(t->values, a->head_size, begin, end, weights, mixed, 2);
    else mix(t->values, a->head_size, begin, end, weights, mixed, 1);
    for (int i = 0; i < num_rows; i++) {
        if (high[i] > begin) {
            mix(t->values, a->head_size, low[i] > end ? low[i] : end, high[i], weights + i, mixed + i, 1);
        }
        for (int64_t at = 0; at < a->head_size; at += SPAN) {
            __m512 factor = _mm512_set1_ps(inverse[i]);
            __m512 even = _mm512_mul_ps(_mm512_loadu_ps(mixed[i] + at), factor);
            __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(mixed[i] + at + LANES), factor);
            store_pairs(y[i] + at, first_channels(a->head_size - at), even, odd);
        }
    }
}

static void attend_tile(const Attention *a, int64_t request, int64_t head, int64_t first, int64_t count, float *scratch) {
    Tile t = {.a = a, .request = request, .head = head, .first = first, .count = count};
    find_tile(&t, scratch);
    score_tile(&t);
    for (int64_t r = 0, next; r < count; r += next) mix_rows(&t, r, (int)(next = next_rows(count - r)));
}

/* Puts the new rows of a head into the request's blocks. */
static void keep_rows(const Attention *a, int64_t request, int64_t head) {
    for (int64_t t = 0; t < a->num_rows; t++) {
        int64_t row = request * a->num_rows + t;
        int64_t from = row * a->new_stride + head * a->head_size;
        int64_t to = head * a->head_stride + a->write_rows[row] * a->head_size;
        memcpy(a->keys + to, a->new_k + from, a->head_size * sizeof(bfloat));
        memcpy(a->values + to, a->new_v + from, a->head_size * sizeof(bfloat));
    }
}

/* About what a row of a request costs: what the last of them see, and what is to do for any. */
static int64_t cost_of_row(const Attention *a, int64_t request) {
    int64_t token = request * a->num_rows, seen = a->highs[token + a->num_rows - 1] - a->lows[token];
    return 2 * LANES + (seen > 0 ? seen : 0);
}

/* How many of a head's rows begin before a cost is reached. */
static int64_t rows_before(int64_t cost, int64_t of_row, int64_t rows) {
    int64_t before = cost > 0 ? (cost + of_row - 1) / of_row : 0;
    return before < rows ? before : rows;
}

/* A thread's part of all rows, request by request and head by head. Parts cost about the same: a head's rows may belong
   to two threads, which then both read its keys, for few requests have too few heads to go round. */
static void attend_part(const Attention *a, int64_t thread, int64_t num_threads) {
    float *scratch = a->scratch + thread * (QUERY_TILE + 4) * a->scratch_stride;
    int64_t rows = a->num_heads / a->num_kv_heads * a->num_rows, total = 0, spent = 0;
    for (int64_t request = 0; request < a->num_requests; request++) {
        total += cost_of_row(a, request) * rows * a->num_kv_heads;
    }
    int64_t from = total * thread / num_threads, until = total * (thread + 1) / num_threads;
    for (int64_t request = 0; request < a->num_requests; request++) {
        int64_t of_row = cost_of_row(a, request);
        for (int64_t head = 0; head < a->num_kv_heads; head++, spent += of_row * rows) {
            int64_t first = rows_before(from - spent, of_row, rows), end = rows_before(until - spent, of_row, rows);
            if (first == 0 && end > 0 && a->write_rows) keep_rows(a, request, head);
            for (; first < end; first += QUERY_TILE) {
                attend_tile(a, request, head, first, end - first < QUERY_TILE ? end - first : QUERY_TILE, scratch);
            }
        }
    }
}

/* By all threads of a team, and none goes on before it is done. */
void attend_rows(const Attention *a, int32_t num_threads) {
#pragma omp for schedule(static, 1)
    for (int64_t thread = 0; thread < num_threads; thread++) attend_part(a, thread, num_threads);
}

void paceline_attend(const Attention *a, int32_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    attend_rows(a, num_threads);
}

/* The positions that rows see: those from `lows` on, up to `highs`. Behind a request's last row there are no keys. */
void paceline_seen_spans(
    const int64_t *starts, const int64_t *firsts, int32_t *lows, int32_t *highs, int64_t num_requests, int64_t num_rows,
    int64_t window, int32_t is_causal) {
    for (int64_t b = 0; b < num_requests; b++) {
        int64_t first = firsts && firsts[b] > 0 ? firsts[b] : 0, end = starts[b] + num_rows;
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t at = starts[b] + row, low = at - window + 1, high = is_causal ? at + 1 : at + window;
            lows[b * num_rows + row] = (int32_t)(low < first ? first : low);
            highs[b * num_rows + row] = (int32_t)(high > end ? end : high);
        }
    }
}
