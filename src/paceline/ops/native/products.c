/* Matrix products of few rows with a weight that is read once, from end to end.

   A weight lies in panels of 32 outputs: [N / 32, K / 2, 32, 2], so that a thread reads its panels as one stream and
   one instruction multiplies a pair of inputs with 16 outputs. Each output is one chain of sums over K, whatever the
   number of rows: a row's bits are its own. M rows, K inputs, N outputs. */
#include "products.h"

ALWAYS_INLINE void multiply(const Product *p, int64_t row, int64_t panel, const int num_rows) {
    int64_t num_pairs = p->width / 2;
    const bfloat *weight = (const bfloat *)p->weight + panel * num_pairs * PANEL * 2;
    const bfloat *x = p->x + row * p->x_stride;
    __m512 low[ROW_TILE], high[ROW_TILE];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < num_pairs; pair++, weight += PANEL * 2) {
        _mm_prefetch((const char *)weight + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)weight + AHEAD + 64, _MM_HINT_T0);
        __m512bh w_low = (__m512bh)_mm512_loadu_si512(weight);
        __m512bh w_high = (__m512bh)_mm512_loadu_si512(weight + PANEL);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            int32_t two;
            memcpy(&two, x + r * p->x_stride + 2 * pair, sizeof two);
            __m512bh both = (__m512bh)_mm512_set1_epi32(two);
            low[r] = _mm512_dpbf16_ps(low[r], w_low, both);
            high[r] = _mm512_dpbf16_ps(high[r], w_high, both);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++) finish(p, row + r, panel, low[r], high[r]);
}

static void multiply_panel(const Product *p, int64_t panel) {
    int64_t row = 0;
    for (; row + ROW_TILE <= p->num_rows; row += ROW_TILE) multiply(p, row, panel, ROW_TILE);
    switch (p->num_rows - row) {
    case 1: multiply(p, row, panel, 1); break;
    case 2: multiply(p, row, panel, 2); break;
    case 3: multiply(p, row, panel, 3); break;
    case 4: multiply(p, row, panel, 4); break;
    case 5: multiply(p, row, panel, 5); break;
    case 6: multiply(p, row, panel, 6); break;
    case 7: multiply(p, row, panel, 7); break;
    }
}

/* By all threads of a team, and none goes on before it is done. */
void norm_rows(
    const bfloat *from, int64_t stride, const bfloat *gain, float eps, bfloat *to, int64_t num_rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) norm_row(from + row * stride, gain, eps, to + row * width, width);
}

/* The same. */
void multiply_rows(const Product *p) {
    int64_t num_outputs = p->num_outputs;
    int64_t num_panels = p->kind == GATED ? (num_outputs / 2 + LANES - 1) / LANES : (num_outputs + PANEL - 1) / PANEL;
    if (p->form != PAIRS_OF_BFLOATS) {
        if (p->form == CODES_4 || p->form == CODES_8) multiply_quantized_rows(p, num_panels);
        else multiply_integer_rows(p, num_panels);
#pragma omp barrier
        return;
    }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < num_panels; panel++) multiply_panel(p, panel);
}

/* y = x W^T + b, then nothing, or + residual, or silu(first half) * second half.

   With a gain, rows are normed first, into `normed` [M, K]. `y` is [M, N], or [M, N / 2] where it is gated. */
void paceline_product(
    const bfloat *x, int64_t x_stride, const void *weight, int32_t form, const float *bias, const bfloat *gain, float eps,
    bfloat *normed, const bfloat *residual, bfloat *y, int64_t num_rows, int64_t width, int64_t num_outputs,
    int32_t kind, int32_t num_threads) {
    Product p = {x, x_stride, weight, form, bias, residual, y, num_rows, width, num_outputs, kind};
    if (gain) p.x = normed, p.x_stride = width;
#pragma omp parallel num_threads(num_threads)
    {
        if (gain) norm_rows(x, x_stride, gain, eps, normed, num_rows, width);
        multiply_rows(&p);
    }
}
