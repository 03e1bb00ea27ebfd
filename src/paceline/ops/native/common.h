/* bfloat16 rows in 512-bit registers: loading, storing and exp. Every file here is compiled into one library. */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bfloat;

#define LANES 16
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? (__mmask16)0xFFFF : (__mmask16)((1u << count) - 1);
}

ALWAYS_INLINE __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

ALWAYS_INLINE __m512 load_wide(const bfloat *from, __mmask16 lanes) {
    return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

ALWAYS_INLINE void store_narrow(bfloat *to, __mmask16 lanes, __m512 values) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
}

ALWAYS_INLINE float widen_one(bfloat half) {
    uint32_t bits = (uint32_t)half << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* exp to about 1e-7; 0 far below, infinity far above, NaN stays NaN. */
ALWAYS_INLINE __m512 exponential(__m512 x) {
    /* The operand that may be NaN comes second: min and max hand that one on. */
    __m512 within = _mm512_max_ps(_mm512_set1_ps(-120.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(within, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), within);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* One row of a root-mean-square norm, float32 inside, rounded once. `to` may be `from`. */
ALWAYS_INLINE void norm_row(const bfloat *from, const bfloat *gain, float eps, bfloat *to, int64_t width) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += LANES) {
        __m512 x = load_wide(from + at, first_lanes(width - at));
        total = _mm512_fmadd_ps(x, x, total);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(total) / (float)width + eps));
    for (int64_t at = 0; at < width; at += LANES) {
        __mmask16 lanes = first_lanes(width - at);
        __m512 x = _mm512_mul_ps(load_wide(from + at, lanes), scale);
        store_narrow(to + at, lanes, _mm512_mul_ps(x, load_wide(gain + at, lanes)));
    }
}

/* One head in place: x * cosine + partner(x) * sine over the first `rotated` channels, partners half of them apart. */
ALWAYS_INLINE void turn_head(bfloat *head, const bfloat *cosine, const bfloat *sine, int64_t rotated) {
    int64_t half = rotated / 2;
    for (int64_t at = 0; at < half; at += LANES) {
        __mmask16 lanes = first_lanes(half - at);
        __m512 first = load_wide(head + at, lanes), second = load_wide(head + half + at, lanes);
        __m512 y = _mm512_mul_ps(second, load_wide(sine + at, lanes));
        __m512 z = _mm512_mul_ps(first, load_wide(sine + half + at, lanes));
        y = _mm512_fmadd_ps(first, load_wide(cosine + at, lanes), y);
        z = _mm512_fmadd_ps(second, load_wide(cosine + half + at, lanes), z);
        store_narrow(head + at, lanes, y);
        store_narrow(head + half + at, lanes, z);
    }
}
