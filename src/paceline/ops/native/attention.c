/* Attention of a batch over keys in blocks, and over the batch's own new rows, in one call.

   Positions below `length` of a request are read from its blocks, those from there on are its new rows. Row t of
   request b sees positions lows[b, t] to highs[b, t] - 1 and no other, to the bit: nothing else is multiplied by 0.
   Scores are summed along the head, weights by position modulo 16, values by position: a row's bits are its own,
   whatever its neighbours, and wherever its keys lie. M key/value heads, G query heads for each of them. */
#include "layers.h"

#define VALUE_TILE 4

/* Where a head's keys and values at positions least to most - 1 lie: one walk over the blocks, without a division. */
static void find_rows(
    const Attention *a, int64_t request, int64_t head, int64_t least, int64_t most, const bfloat **keys,
    const bfloat **values) {
    const int32_t *blocks = a->table + a->slots[request] * a->table_stride;
    int64_t length = a->lengths[request], until = most < length ? most : length, position = least;
    int64_t index = position / a->block_size, inside = position % a->block_size;
    for (; position < until; index++, inside = 0) {
        int64_t at = head * a->head_stride + (blocks[index] * a->block_size + inside) * a->head_size;
        for (; inside < a->block_size && position < until; inside++, position++, at += a->head_size) {
            keys[position] = a->keys + at;
            values[position] = a->values + at;
        }
    }
    for (; position < most; position++) {
        int64_t at = (request * a->num_rows + position - length) * a->new_stride + head * a->head_size;
        keys[position] = a->new_k + at;
        values[position] = a->new_v + at;
    }
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

/* Pairs of channels of the keys at positions first to first + 15, [H / 2, 16, 2]; zeros outside low to high - 1. */
static void gather_keys(
    const bfloat *const *keys, int64_t num_pairs, int64_t first, int64_t low, int64_t high, uint32_t *pairs) {
    const bfloat *at[LANES];
    for (int i = 0; i < LANES; i++) {
        int64_t position = first + i;
        at[i] = position >= low && position < high ? keys[position] : 0;
    }
    int64_t pair = 0;
    for (; pair + LANES <= num_pairs; pair += LANES) {
        __m512i r[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) r[i] = at[i] ? _mm512_loadu_si512(at[i] + 2 * pair) : _mm512_setzero_si512();
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) _mm512_storeu_si512(pairs + (pair + i) * LANES, r[i]);
    }
    for (; pair < num_pairs; pair++) {
        for (int i = 0; i < LANES; i++) {
            uint32_t both = 0;
            if (at[i]) memcpy(&both, at[i] + 2 * pair, sizeof both);
            pairs[pair * LANES + i] = both;
        }
    }
}

ALWAYS_INLINE __m512 dot(const bfloat *q, const uint32_t *pairs, int64_t num_pairs) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        int32_t both;
        memcpy(&both, q + 2 * pair, sizeof both);
        __m512bh keys = (__m512bh)_mm512_loadu_si512(pairs + pair * LANES);
        total = _mm512_dpbf16_ps(total, keys, (__m512bh)_mm512_set1_epi32(both));
    }
    return total;
}

/* Four rows at a time: one row alone is a chain in which each sum waits for the one before. */
ALWAYS_INLINE void dots(const bfloat *const *q, const uint32_t *pairs, int64_t num_pairs, __m512 *totals) {
    __m512 t[4];
    for (int i = 0; i < 4; i++) t[i] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        __m512bh keys = (__m512bh)_mm512_loadu_si512(pairs + pair * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int32_t both;
            memcpy(&both, q[i] + 2 * pair, sizeof both);
            t[i] = _mm512_dpbf16_ps(t[i], keys, (__m512bh)_mm512_set1_epi32(both));
        }
    }
    for (int i = 0; i < 4; i++) totals[i] = t[i];
}

/* Adds the weighted values of positions low to high - 1 to up to 4 rows, 32 channels at a time. */
ALWAYS_INLINE void mix(
    const bfloat *const *values, int64_t head_size, int64_t low, int64_t high, const float *const *weights,
    float (*mixed)[LARGEST_HEAD], const int num_rows) {
    for (int64_t at = 0; low < high && at < head_size; at += 2 * LANES) {
        int64_t left = head_size - at;
        __mmask16 lanes = first_lanes(left), more = left > LANES ? first_lanes(left - LANES) : 0;
        __m512 one[VALUE_TILE], two[VALUE_TILE];
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            one[r] = _mm512_loadu_ps(mixed[r] + at);
            two[r] = _mm512_loadu_ps(mixed[r] + at + LANES);
        }
        for (int64_t position = low; position < high; position++) {
            const bfloat *v = values[position] + at;
            __m512 first = load_wide(v, lanes), second = load_wide(v + LANES, more);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                __m512 weight = _mm512_set1_ps(weights[r][position]);
                one[r] = _mm512_fmadd_ps(weight, first, one[r]);
                two[r] = _mm512_fmadd_ps(weight, second, two[r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            _mm512_storeu_ps(mixed[r] + at, one[r]);
            _mm512_storeu_ps(mixed[r] + at + LANES, two[r]);
        }
    }
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

/* Query rows first to first + count - 1 of a key/value head; a row is (token, head of the group), tokens outside. */
static void attend_tile(const Attention *a, int64_t request, int64_t head, int64_t first, int64_t count, float *scratch) {
    int64_t group = a->num_heads / a->num_kv_heads, num_pairs = a->head_size / 2;
    const bfloat *q[QUERY_TILE];
    int64_t low[QUERY_TILE], high[QUERY_TILE], least = INT64_MAX, most = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t token = request * a->num_rows + (first + r) / group;
        q[r] = a->q + token * a->q_stride + (head * group + (first + r) % group) * a->head_size;
        low[r] = a->lows[token], high[r] = a->highs[token];
        if (low[r] < least) least = low[r];
        if (high[r] > most) most = high[r];
    }
    const bfloat **keys = (const bfloat **)(scratch + QUERY_TILE * a->scratch_stride);
    const bfloat **values = keys + a->scratch_stride;
    find_rows(a, request, head, least, most, keys, values);
    uint32_t pairs[LARGEST_HEAD / 2 * LANES];
    for (int64_t at = least / LANES * LANES; at < most; at += LANES) {
        gather_keys(keys, num_pairs, at, least, most, pairs);
        int64_t r = 0;
        for (; r + 4 <= count; r += 4) {
            __m512 totals[4];
            dots(q + r, pairs, num_pairs, totals);
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(scratch + (r + i) * a->scratch_stride + at, totals[i]);
        }
        for (; r < count; r++) _mm512_storeu_ps(scratch + r * a->scratch_stride + at, dot(q[r], pairs, num_pairs));
    }
    for (int64_t r = 0; r < count; r += VALUE_TILE) {
        int num_rows = (int)(count - r < VALUE_TILE ? count - r : VALUE_TILE);
        const float *weights[VALUE_TILE];
        float inverse[VALUE_TILE];
        float mixed[VALUE_TILE][LARGEST_HEAD];
        int64_t begin = 0, end = INT64_MAX;
        for (int i = 0; i < num_rows; i++) {
            int64_t query_head = head * group + (first + r + i) % group;
            weights[i] = scratch + (r + i) * a->scratch_stride;
            inverse[i] = soften(
                (float *)weights[i], low[r + i], high[r + i], a->scale, a->sinks ? a->sinks + query_head : 0);
            if (low[r + i] > begin) begin = low[r + i];
            if (high[r + i] < end) end = high[r + i];
        }
        memset(mixed, 0, sizeof mixed);
        if (end < begin) end = begin;
        /* What all see is mixed for all at once, before and behind it each row goes alone: others may see NaN there. */
        for (int i = 0; i < num_rows; i++) {
            int64_t until = high[r + i] < begin ? high[r + i] : begin;
            mix(values, a->head_size, low[r + i], until, weights + i, mixed + i, 1);
        }
        if (num_rows == 4) mix(values, a->head_size, begin, end, weights, mixed, 4);
        else if (num_rows == 3) mix(values, a->head_size, begin, end, weights, mixed, 3);
        else if (num_rows == 2) mix(values, a->head_size, begin, end, weights, mixed, 2);
        else mix(values, a->head_size, begin, end, weights, mixed, 1);
        for (int i = 0; i < num_rows; i++) {
            int64_t from = low[r + i] > end ? low[r + i] : end;
            if (high[r + i] > begin) mix(values, a->head_size, from, high[r + i], weights + i, mixed + i, 1);
            int64_t token = request * a->num_rows + (first + r + i) / group;
            int64_t query_head = head * group + (first + r + i) % group;
            bfloat *y = a->y + (token * a->num_heads + query_head) * a->head_size;
            for (int64_t at = 0; at < a->head_size; at += LANES) {
                __m512 row = _mm512_mul_ps(_mm512_loadu_ps(mixed[i] + at), _mm512_set1_ps(inverse[i]));
                store_narrow(y + at, first_lanes(a->head_size - at), row);
            }
        }
    }
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

/* By all threads of a team, and none goes on before it is done. */
void attend_rows(const Attention *a, int32_t num_threads) {
    int64_t rows = a->num_heads / a->num_kv_heads * a->num_rows, num_tiles = (rows + QUERY_TILE - 1) / QUERY_TILE;
    int64_t num_tasks = a->num_requests * a->num_kv_heads * num_tiles;
#pragma omp for schedule(static, 1)
    for (int64_t thread = 0; thread < num_threads; thread++) {
        float *scratch = a->scratch + thread * (QUERY_TILE + 4) * a->scratch_stride;
        for (int64_t task = thread; task < num_tasks; task += num_threads) {
            int64_t tile = task % num_tiles, head = task / num_tiles % a->num_kv_heads;
            int64_t request = task / num_tiles / a->num_kv_heads, first = tile * QUERY_TILE;
            int64_t count = rows - first < QUERY_TILE ? rows - first : QUERY_TILE;
            attend_tile(a, request, head, first, count, scratch);
            if (tile == 0 && a->write_rows) keep_rows(a, request, head);
        }
    }
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
