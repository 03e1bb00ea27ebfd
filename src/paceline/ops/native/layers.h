/* What the parts of a layer look like to each other. */
#pragma once

#include "common.h"

enum { PLAIN, ADDED, GATED };
enum { PAIRS_OF_BFLOATS, CODES_4, CODES_8, INTEGERS_4, INTEGERS_8 }; /* forms of a weight */
#define LARGEST_QUANTIZED_WIDTH 16384

typedef struct {
    const bfloat *x;
    int64_t x_stride;
    const void *weight;
    int32_t form;
    const float *bias;
    const bfloat *residual;
    bfloat *y;
    int64_t num_rows, width, num_outputs;
    int32_t kind;
} Product;

typedef struct {
    const void *weight;
    const float *bias;
    int64_t width, num_outputs;
    int32_t form;
} Weight;

/* y = x W^T + b, with a residual + residual. */
ALWAYS_INLINE Product product(const Weight *w, const bfloat *x, const bfloat *residual, bfloat *y, int64_t num_rows) {
    Product p = {x, w->width, w->weight, w->form, w->bias, residual, y, num_rows, w->width, w->num_outputs, PLAIN};
    if (residual) p.kind = ADDED;
    return p;
}

#define LARGEST_HEAD 1024
#define QUERY_TILE 24 /* query rows that share a transposed group of keys */

typedef struct {
    const bfloat *q;
    int64_t q_stride;
    const bfloat *new_k, *new_v;
    int64_t new_stride;
    bfloat *keys, *values;
    int64_t head_stride;
    const int32_t *table;
    int64_t table_stride, block_size;
    const int64_t *slots, *lengths, *write_rows;
    const int32_t *lows, *highs;
    const float *sinks;
    bfloat *y;
    int64_t num_requests, num_rows, num_heads, num_kv_heads, head_size;
    float scale;
    float *scratch;
    int64_t scratch_stride; /* floats of one query row's weights: positions, filled up to whole groups. A thread has as
                               many as QUERY_TILE such rows, and pointers to keys and to values behind them. */
} Attention;

/* Not for whoever loads the library. */
#define INTERNAL __attribute__((visibility("hidden")))

INTERNAL void norm_rows(
    const bfloat *from, int64_t stride, const bfloat *gain, float eps, bfloat *to, int64_t num_rows, int64_t width);
INTERNAL void multiply_rows(const Product *p);
INTERNAL void multiply_quantized_rows(const Product *p, int64_t num_panels);
INTERNAL void multiply_integer_rows(const Product *p, int64_t num_panels);
INTERNAL void turn_rows(
    bfloat *rows, int64_t num_rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
    const bfloat *cosine, const bfloat *sine, int64_t rotated, const bfloat *q_gain, const bfloat *k_gain, float eps);
INTERNAL void convolve_rows(
    const bfloat *x, const float *base, const bfloat *delta, int64_t stride, const int64_t *offset,
    const bfloat *residual, bfloat *y, int64_t num_rows, int64_t width, int64_t num_groups, int64_t num_taps);
INTERNAL void attend_rows(const Attention *a, int32_t num_threads);
