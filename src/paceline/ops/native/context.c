/* What a drafter keeps of committed positions, in one call: from the target's taps to keys and values in its planes.

   Each tap is normed, or taken as it is; side by side they are projected, normed, and projected to the keys and values
   of all layers at once. Keys are normed and turned, values scaled, and both stored. */
#include "layers.h"

typedef struct {
    Weight features, kv; /* outputs of the second: layers, then keys before values, then heads, then channels */
    const bfloat *tap_gains; /* [taps, width of one]; none: taps are not normed */
    const bfloat *feature_gain, *k_gains;
    int64_t num_taps, num_layers, num_heads, head_size;
    float eps, value_scale;
} Context;

/* What one pass reads and writes: `scratch` holds, one behind the other, M rows of the joined taps, of features, and of
   keys and values. The table has the cosines of a position, then its sines. */
typedef struct {
    const bfloat *const *taps;
    const int64_t *tap_strides, *positions, *stored_at;
    const float *table;
    int64_t num_rows, num_positions, half;
    bfloat *planes, *scratch;
    int64_t layer_stride, value_offset, head_stride;
    int32_t num_threads;
} ContextPass;

/* By all threads of a team, and none goes on before it is done. */
static void join_taps(const Context *c, const ContextPass *pass, bfloat *joined) {
    int64_t num_taps = c->num_taps, width = c->features.width / num_taps;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < pass->num_rows * num_taps; task++) {
        int64_t tap = task % num_taps;
        const bfloat *from = pass->taps[tap] + task / num_taps * pass->tap_strides[tap];
        if (c->tap_gains) norm_row(from, c->tap_gains + tap * width, c->eps, joined + task * width, width);
        else memcpy(joined + task * width, from, width * sizeof(bfloat));
    }
}

/* A row of the table as `turn_head` takes it. */
static void expand_turns(const float *table, int64_t half, bfloat *cosine, bfloat *sine) {
    for (int64_t at = 0; at < half; at += LANES) {
        __mmask16 lanes = first_lanes(half - at);
        __m512 c = _mm512_maskz_loadu_ps(lanes, table + at), s = _mm512_maskz_loadu_ps(lanes, table + half + at);
        store_narrow(cosine + at, lanes, c);
        store_narrow(cosine + half + at, lanes, c);
        store_narrow(sine + at, lanes, _mm512_sub_ps(_mm512_setzero_ps(), s));
        store_narrow(sine + half + at, lanes, s);
    }
}

static void scale_row(const bfloat *from, float scale, bfloat *to, int64_t width) {
    for (int64_t at = 0; at < width; at += LANES) {
        __mmask16 lanes = first_lanes(width - at);
        store_narrow(to + at, lanes, _mm512_mul_ps(load_wide(from + at, lanes), _mm512_set1_ps(scale)));
    }
}

/* By all threads of a team, and none goes on before it is done. */
static void store_rows(const Context *c, const ContextPass *pass, const bfloat *kv) {
    int64_t size = c->head_size, of_layer = 2 * c->num_heads * size;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < pass->num_rows * c->num_layers; task++) {
        int64_t row = task / c->num_layers, layer = task % c->num_layers, position = pass->positions[row];
        if (position >= pass->num_positions) position = pass->num_positions - 1;
        bfloat cosine[LARGEST_HEAD], sine[LARGEST_HEAD];
        expand_turns(pass->table + position * 2 * pass->half, pass->half, cosine, sine);
        const bfloat *k = kv + task * of_layer, *v = k + of_layer / 2, *gain = c->k_gains + layer * size;
        bfloat *to = pass->planes + layer * pass->layer_stride + pass->stored_at[row] * size;
        for (int64_t head = 0; head < c->num_heads; head++, k += size, v += size, to += pass->head_stride) {
            norm_row(k, gain, c->eps, to, size);
            turn_head(to, cosine, sine, 2 * pass->half);
            scale_row(v, c->value_scale, to + pass->value_offset, size);
        }
    }
}

/* Whether all rows have places in the planes, and positions that are not negative. */
static int32_t have_places(const Context *c, const ContextPass *pass) {
    int64_t num_places = pass->head_stride / c->head_size;
    for (int64_t row = 0; row < pass->num_rows; row++) {
        if (pass->positions[row] < 0 || pass->stored_at[row] < 0 || pass->stored_at[row] >= num_places) return 0;
    }
    return 1;
}

/* 0; 1 where nothing was written, as a row has no place or no position. */
int32_t paceline_write_context(const Context *c, const ContextPass *pass) {
    if (!have_places(c, pass)) return 1;
    int64_t num_rows = pass->num_rows, width = c->features.num_outputs;
    bfloat *joined = pass->scratch, *features = joined + num_rows * c->features.width;
    bfloat *kv = features + num_rows * width;
    Product to_features = product(&c->features, joined, 0, features, num_rows);
    Product to_kv = product(&c->kv, features, 0, kv, num_rows);
#pragma omp parallel num_threads(pass->num_threads)
    {
        join_taps(c, pass, joined);
        multiply_rows(&to_features);
        norm_rows(features, width, c->feature_gain, c->eps, features, num_rows, width);
        multiply_rows(&to_kv);
        store_rows(c, pass, kv);
    }
    return 0;
}
