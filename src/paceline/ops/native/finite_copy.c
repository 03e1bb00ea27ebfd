/* Copies of weights that know whether everything that arrived is finite. */
#include "common.h"

#define PIECE 65536

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* As bits of float32. */
ALWAYS_INLINE __m512i read_lanes(const void *from, int32_t kind, int64_t at, __mmask16 lanes) {
    if (kind == FLOAT32) return _mm512_maskz_loadu_epi32(lanes, (const float *)from + at);
    __m256i halves = _mm256_maskz_loadu_epi16(lanes, (const uint16_t *)from + at);
    if (kind == BFLOAT16) return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    return _mm512_castps_si512(_mm512_cvtph_ps(halves));
}

/* The upper half, to nearest, ties to even. The instruction for it would turn the smallest numbers into zeros. */
ALWAYS_INLINE __m512i round_up(__m512i bits) {
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
}

/* Keeps the largest magnitude, as the bits behind the sign: those of infinity and NaN are above all others. */
ALWAYS_INLINE __m512i copy_lanes(
    const void *from, int32_t kind, void *to, int32_t to_kind, int64_t at, __mmask16 lanes, __m512i largest) {
    __m512i bits = read_lanes(from, kind, at, lanes);
    largest = _mm512_max_epu32(largest, _mm512_slli_epi32(bits, 1));
    if (to_kind == FLOAT32) {
        _mm512_mask_storeu_epi32((float *)to + at, lanes, bits);
    } else {
        __m512i upper = kind == BFLOAT16 ? bits : round_up(bits);
        _mm256_mask_storeu_epi16((bfloat *)to + at, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper, 16)));
    }
    return largest;
}

ALWAYS_INLINE uint32_t copy_piece(
    const void *from, int32_t kind, void *to, int32_t to_kind, int64_t at, int64_t end) {
    __m512i largest[4] = {0};
    for (; at + 4 * LANES <= end; at += 4 * LANES)
        for (int part = 0; part < 4; part++)
            largest[part] = copy_lanes(from, kind, to, to_kind, at + part * LANES, 0xFFFF, largest[part]);
    for (; at < end; at += LANES)
        largest[0] = copy_lanes(from, kind, to, to_kind, at, first_lanes(end - at), largest[0]);
    __m512i two = _mm512_max_epu32(largest[0], largest[1]), others = _mm512_max_epu32(largest[2], largest[3]);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(two, others));
}

/* Copies `count` numbers, rounding where `to_kind` is the narrower; `is_finite` speaks of what arrived. */
void paceline_copy_if_finite(
    const void *from, int32_t kind, void *to, int32_t to_kind, int64_t count, int32_t *is_finite,
    int32_t num_threads) {
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) reduction(max : largest) if (count > PIECE)
    for (int64_t at = 0; at < count; at += PIECE) {
        int64_t end = at + PIECE < count ? at + PIECE : count;
        uint32_t found;
        if (kind == FLOAT32 && to_kind == FLOAT32) found = copy_piece(from, FLOAT32, to, FLOAT32, at, end);
        else if (kind == FLOAT32) found = copy_piece(from, FLOAT32, to, BFLOAT16, at, end);
        else if (kind == BFLOAT16 && to_kind == FLOAT32) found = copy_piece(from, BFLOAT16, to, FLOAT32, at, end);
        else if (kind == BFLOAT16) found = copy_piece(from, BFLOAT16, to, BFLOAT16, at, end);
        else if (to_kind == FLOAT32) found = copy_piece(from, FLOAT16, to, FLOAT32, at, end);
        else found = copy_piece(from, FLOAT16, to, BFLOAT16, at, end);
        if (found > largest) largest = found;
    }
    /* From 0x7F7F8000 on, without a sign, a number rounds to an infinite bfloat. */
    *is_finite = largest < (to_kind == FLOAT32 ? 0xFF000000u : 0xFEFF0000u);
}
