/* What a layer does to its rows between products: norms, rotary positions, the convolution of draft blocks. */
#include "layers.h"

/* Norms rows of `width`; those of `to` lie one behind the other. */
void paceline_norm(
    const bfloat *from, int64_t stride, const bfloat *gain, float eps, bfloat *to, int64_t num_rows, int64_t width,
    int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * width > 16384)
    for (int64_t row = 0; row < num_rows; row++) norm_row(from + row * stride, gain, eps, to + row * width, width);
}

/* Queries and keys of rows [queries, keys, values], in place: each head normed where there are gains, then turned.

   By all threads of a team, and none goes on before it is done. */
void turn_rows(
    bfloat *rows, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
    const bfloat *cosine, const bfloat *sine, int64_t rotated, const bfloat *q_gain, const bfloat *k_gain, float eps) {
    int64_t num_turned = num_heads + num_kv_heads;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_rows * num_turned; task++) {
        int64_t row = task / num_turned, index = task % num_turned;
        bfloat *head = rows + row * stride + index * head_size;
        if (q_gain) norm_row(head, index < num_heads ? q_gain : k_gain, eps, head, head_size);
        turn_head(head, cosine + row * rotated, sine + row * rotated, rotated);
    }
}

void paceline_turn_heads(
    bfloat *rows, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
    const bfloat *cosine, const bfloat *sine, int64_t rotated, const bfloat *q_gain, const bfloat *k_gain, float eps,
    int32_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 8)
    turn_rows(
        rows, num_rows, stride, num_heads, num_kv_heads, head_size, cosine, sine, rotated, q_gain, k_gain, eps);
}

/* y[r, c] = residual[r, c] + sum over taps t <= offset[r] of (base[t, c] + delta[r, t, c / size]) * x[r - t, c].

   `offset` is each row's index in its own block; none: all rows are one block. Rows of `delta` are `stride` apart. By
   all threads of a team, and none goes on before it is done. */
void convolve_rows(
    const bfloat *x, const float *base, const bfloat *delta, int64_t stride, const int64_t *offset,
    const bfloat *residual, bfloat *y, int64_t num_rows, int64_t width, int64_t num_groups, int64_t num_taps) {
    int64_t size = width / num_groups;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t reach = offset ? offset[row] : row;
        int64_t taps = num_taps < reach + 1 ? num_taps : reach + 1;
        for (int64_t group = 0; group < num_groups; group++) {
            for (int64_t inside = 0; inside < size; inside += LANES) {
                int64_t at = group * size + inside;
                __mmask16 lanes = first_lanes(size - inside);
                __m512 total = _mm512_setzero_ps();
                for (int64_t tap = 0; tap < taps; tap++) {
                    __m512 factor = _mm512_set1_ps(widen_one(delta[row * stride + tap * num_groups + group]));
                    factor = _mm512_add_ps(factor, _mm512_maskz_loadu_ps(lanes, base + tap * width + at));
                    total = _mm512_fmadd_ps(factor, load_wide(x + (row - tap) * width + at, lanes), total);
                }
                if (residual) total = _mm512_add_ps(total, load_wide(residual + row * width + at, lanes));
                store_narrow(y + row * width + at, lanes, total);
            }
        }
    }
}

void paceline_convolve(
    const bfloat *x, const float *base, const bfloat *delta, int64_t stride, const int64_t *offset,
    const bfloat *residual, bfloat *y, int64_t num_rows, int64_t width, int64_t num_groups, int64_t num_taps,
    int32_t num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows > 8)
    convolve_rows(x, base, delta, stride, offset, residual, y, num_rows, width, num_groups, num_taps);
}

ALWAYS_INLINE bfloat narrow_one(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0; /* NaN */
    return (bfloat)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

/* Cosines and signed sines of every channel, from rows of a table [P, 2, R / 2]; says 1 where a position has no row. */
int32_t paceline_turns(
    const float *table, const int64_t *positions, bfloat *cosines, bfloat *sines, int64_t num_rows,
    int64_t num_positions, int64_t half) {
    for (int64_t row = 0; row < num_rows; row++)
        if (positions[row] < -num_positions || positions[row] >= num_positions) return 1;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t position = positions[row] < 0 ? positions[row] + num_positions : positions[row];
        const float *from = table + position * 2 * half;
        for (int64_t i = 0; i < half; i++, cosines++, sines++) {
            cosines[0] = cosines[half] = narrow_one(from[i]);
            sines[half] = narrow_one(from[half + i]);
            sines[0] = sines[half] ^ 0x8000;
        }
        cosines += half, sines += half;
    }
    return 0;
}
