/* A decoder layer in one call, or several of them: norm, queries, keys and values, attention, and the gated MLP, each
   added to the stream; in a draft block that is convolved, with a convolution before and behind each sublayer. */
#include "layers.h"

/* Both sides of a sublayer: `projection` gives what a row adds to the taps of both, `base` has those of both. */
typedef struct {
    Weight projection;
    const float *base;
    int64_t num_taps; /* of a side; 0: there is none */
} Convolution;

typedef struct {
    Weight qkv, o, gate_up, down;
    Convolution around_attention, around_mlp;
    const bfloat *input_gain, *mlp_gain, *q_gain, *k_gain;
    int64_t width, num_heads, num_kv_heads, head_size;
    float eps;
} Layer;

/* What one pass of it reads and writes: `scratch` holds, one behind the other, M rows of the normed input, of queries,
   keys and values, of mixed values, of the stream behind attention, and of the gated products; then, of a layer with
   convolutions, of the convolved input and of what it adds to the taps. `offset` is as for `convolve_rows`. */
typedef struct {
    const bfloat *x;
    bfloat *y, *scratch;
    const bfloat *cosine, *sine;
    int64_t num_rows, rotated;
    const int64_t *offset;
    const Attention *attention;
    int32_t num_threads;
} Pass;

/* One side of a convolution, by all threads of a team; none goes on before it is done. */
static void convolve_side(
    const Convolution *c, int side, const bfloat *x, const bfloat *delta, const bfloat *residual, bfloat *y,
    const Pass *pass, int64_t width) {
    int64_t of_row = c->projection.num_outputs, of_side = of_row / 2, taps = c->num_taps;
    convolve_rows(
        x, c->base + side * taps * width, delta + side * of_side, of_row, pass->offset, residual, y, pass->num_rows,
        width, of_side / taps, taps);
}

/* A sublayer's input, normed, and where it is convolved then in `opened` and with `delta` for the other side. */
static const bfloat *open_sublayer(
    const Convolution *c, const bfloat *from, const bfloat *gain, float eps, bfloat *normed, bfloat *opened,
    bfloat *delta, const Pass *pass, int64_t width) {
    norm_rows(from, width, gain, eps, normed, pass->num_rows, width);
    if (!c->num_taps) return normed;
    Product to_delta = product(&c->projection, normed, 0, delta, pass->num_rows);
    multiply_rows(&to_delta);
    convolve_side(c, 0, normed, delta, 0, opened, pass, width);
    return opened;
}

/* A sublayer's last product, added to the stream, where it is convolved by way of `plain`. */
static void close_sublayer(
    const Convolution *c, const Weight *w, const bfloat *x, const bfloat *residual, bfloat *plain, const bfloat *delta,
    bfloat *y, const Pass *pass, int64_t width) {
    Product last = product(w, x, c->num_taps ? 0 : residual, c->num_taps ? plain : y, pass->num_rows);
    multiply_rows(&last);
    if (c->num_taps) convolve_side(c, 1, plain, delta, residual, y, pass, width);
}

/* One layer, by all threads of a team, from `x` to `y`; none goes on before it is done. */
static void run_layer(const Layer *l, const Pass *pass, const bfloat *x, bfloat *y, Attention a) {
    int64_t num_rows = pass->num_rows, width = l->width;
    int64_t of_qkv = l->qkv.num_outputs, of_heads = l->num_heads * l->head_size;
    bfloat *normed = pass->scratch, *qkv = normed + num_rows * width, *mixed = qkv + num_rows * of_qkv;
    bfloat *stream = mixed + num_rows * of_heads, *gated = stream + num_rows * width;
    bfloat *opened = gated + num_rows * l->down.width, *delta = opened + num_rows * width;
    const Convolution *first = &l->around_attention, *second = &l->around_mlp;
    a.q = qkv, a.new_k = qkv + of_heads, a.new_v = a.new_k + l->num_kv_heads * l->head_size;
    a.q_stride = a.new_stride = of_qkv;
    a.y = mixed, a.num_heads = l->num_heads;

    const bfloat *input = open_sublayer(first, x, l->input_gain, l->eps, normed, opened, delta, pass, width);
    Product to_qkv = product(&l->qkv, input, 0, qkv, num_rows);
    multiply_rows(&to_qkv);
    turn_rows(
        qkv, num_rows, of_qkv, l->num_heads, l->num_kv_heads, l->head_size, pass->cosine, pass->sine, pass->rotated,
        l->q_gain, l->k_gain, l->eps);
    attend_rows(&a, pass->num_threads);
    close_sublayer(first, &l->o, mixed, x, normed, delta, stream, pass, width);

    input = open_sublayer(second, stream, l->mlp_gain, l->eps, normed, opened, delta, pass, width);
    Product to_gated = product(&l->gate_up, input, 0, gated, num_rows);
    to_gated.kind = GATED;
    multiply_rows(&to_gated);
    close_sublayer(second, &l->down, gated, stream, normed, delta, y, pass, width);
}

void paceline_layer(const Layer *l, const Pass *pass) {
#pragma omp parallel num_threads(pass->num_threads)
    run_layer(l, pass, pass->x, pass->y, *pass->attention);
}

/* Layers one behind the other: `y` takes in the stream behind each. Their keys lie `key_stride` apart, and so do their
   values; the pass's attention is that of the first. */
void paceline_layers(const Layer *const *layers, int64_t num_layers, int64_t key_stride, const Pass *pass) {
#pragma omp parallel num_threads(pass->num_threads)
    for (int64_t i = 0; i < num_layers; i++) {
        int64_t size = pass->num_rows * layers[i]->width;
        Attention a = *pass->attention;
        a.keys += i * key_stride, a.values += i * key_stride;
        run_layer(layers[i], pass, i ? pass->y + (i - 1) * size : pass->x, pass->y + i * size, a);
    }
}
