/* What is chosen from scores: the k best, and a walk through the candidates of a draft block. */
#include "common.h"

#define MOST_KEPT 64

/* The k best numbers of each row and their places, best first, of equal ones the first first; k at most MOST_KEPT. */
void paceline_top_k(
    const bfloat *from, int64_t stride, bfloat *values, int64_t *index, int64_t num_rows, int64_t width, int64_t k,
    int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 1)
    for (int64_t row = 0; row < num_rows; row++) {
        const bfloat *x = from + row * stride;
        float kept[MOST_KEPT];
        int64_t places[MOST_KEPT], num_kept = 0;
        for (int64_t at = 0; at < width; at += LANES) {
            __mmask16 lanes = first_lanes(width - at);
            __m512 here = load_wide(x + at, lanes);
            /* One that equals the last that is kept comes behind it. */
            if (num_kept == k) lanes = _mm512_mask_cmp_ps_mask(lanes, here, _mm512_set1_ps(kept[k - 1]), _CMP_GT_OQ);
            for (; lanes; lanes &= lanes - 1) {
                int64_t place = at + __builtin_ctz(lanes);
                float value = widen_one(x[place]);
                if (num_kept == k && !(value > kept[k - 1])) continue;
                int64_t to = num_kept < k ? num_kept++ : k - 1;
                for (; to > 0 && value > kept[to - 1]; to--) kept[to] = kept[to - 1], places[to] = places[to - 1];
                kept[to] = value, places[to] = place;
            }
        }
        for (int64_t i = 0; i < k; i++) index[row * k + i] = places[i], values[row * k + i] = x[places[i]];
    }
}

/* Greedy: at each position the best unary + successor . (predecessor of what was chosen before * projected); of equal
   ones the lowest id. B requests, K positions, C candidates, R ranks; tables are [V, R]. */
void paceline_walk(
    const bfloat *unary, const int64_t *candidates, const bfloat *projected, const bfloat *predecessors,
    const bfloat *successors, const int64_t *anchors, int64_t *ids, float *scores, int64_t num_requests,
    int64_t num_positions, int64_t num_candidates, int64_t rank, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_requests > 1)
    for (int64_t request = 0; request < num_requests; request++) {
        int64_t before = anchors[request];
        for (int64_t position = 0; position < num_positions; position++) {
            int64_t row = request * num_positions + position, chosen = INT64_MAX;
            float best = -INFINITY;
            for (int64_t c = 0; c < num_candidates; c++) {
                int64_t at = row * num_candidates + c, id = candidates[at];
                __m512 total = _mm512_setzero_ps();
                for (int64_t r = 0; r < rank; r += LANES) {
                    __mmask16 lanes = first_lanes(rank - r);
                    __m512 edge = _mm512_mul_ps(
                        load_wide(predecessors + before * rank + r, lanes), load_wide(projected + row * rank + r, lanes));
                    total = _mm512_fmadd_ps(load_wide(successors + id * rank + r, lanes), edge, total);
                }
                float score = widen_one(unary[at]) + _mm512_reduce_add_ps(total);
                scores[at] = score;
                if (!(score >= -INFINITY)) score = -INFINITY; /* an id is never picked from NaN */
                if (score > best || (score == best && id < chosen)) best = score, chosen = id;
            }
            ids[row] = before = chosen;
        }
    }
}
