/* What products share, whatever form their weight has. */
#pragma once

#include "layers.h"

#define PANEL 32
#define ROW_TILE 8
#define AHEAD 4096 /* bytes that are asked for before they are needed: pages end, and hardware stops there */

/* The sums of a row with 32 outputs of a panel, on their way out. */
ALWAYS_INLINE void finish(const Product *p, int64_t row, int64_t panel, __m512 low, __m512 high) {
    int64_t first = panel * PANEL;
    if (p->bias) {
        low = _mm512_add_ps(low, _mm512_loadu_ps(p->bias + first));
        high = _mm512_add_ps(high, _mm512_loadu_ps(p->bias + first + LANES));
    }
    if (p->kind == GATED) { /* the panel holds 16 gates, and the 16 values that they let pass */
        int64_t width = p->num_outputs / 2, at = panel * LANES;
        __m512 one = _mm512_set1_ps(1.0f);
        __m512 share = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), low)));
        store_narrow(p->y + row * width + at, first_lanes(width - at), _mm512_mul_ps(_mm512_div_ps(low, share), high));
        return;
    }
    int64_t left = p->num_outputs - first;
    __mmask16 lanes = first_lanes(left), high_lanes = left > LANES ? first_lanes(left - LANES) : 0;
    int64_t at = row * p->num_outputs + first;
    if (p->kind == ADDED) {
        low = _mm512_add_ps(low, load_wide(p->residual + at, lanes));
        high = _mm512_add_ps(high, load_wide(p->residual + at + LANES, high_lanes));
    }
    store_narrow(p->y + at, lanes, low);
    store_narrow(p->y + at + LANES, high_lanes, high);
}
