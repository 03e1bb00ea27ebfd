/* A decoder layer in one call, or several of them: norm, queries, keys and values, attention, and the gated MLP, each added to the stream. */
#include "layers.h"

typedef struct {
    const void *weight;
    const float *bias;
    int64_t width, num_outputs;
    int32_t form;
} Weight;

typedef struct {
    Weight qkv, o, gate_up, down;
    const bfloat *input_gain, *mlp_gain, *q_gain, *k_gain;
    int64_t width, num_heads, num_kv_heads, head_size;
    float eps;
} Layer;

/* What one pass of it reads and writes: `scratch` holds, one behind the other, M rows of the normed input, of queries,
   keys and values, of mixed values, of the stream behind attention, and of the gated products. */
typedef struct {
    const bfloat *x;
    bfloat *y, *scratch;
    const bfloat *cosine, *sine;
    int64_t num_rows, rotated;
    const Attention *attention;
    int32_t num_threads;
} Pass;

static Product product(const Weight *w, const bfloat *x, const bfloat *residual, bfloat *y, int64_t num_rows) {
    Product p = {x, w->width, w->weight, w->form, w->bias, residual, y, num_rows, w->width, w->num_outputs, PLAIN};
    if (residual) p.kind = ADDED;
    return p;
}

/* One layer, by all threads of a team, from `x` to `y`; none goes on before it is done. */
static void run_layer(const Layer *l, const Pass *pass, const bfloat *x, bfloat *y, Attention a) {
    int64_t num_rows = pass->num_rows, of_qkv = l->qkv.num_outputs, of_heads = l->num_heads * l->head_size;
    bfloat *normed = pass->scratch, *qkv = normed + num_rows * l->width, *mixed = qkv + num_rows * of_qkv;
    bfloat *stream = mixed + num_rows * of_heads, *gated = stream + num_rows * l->width;
    Product to_qkv = product(&l->qkv, normed, 0, qkv, num_rows);
    Product to_stream = product(&l->o, mixed, x, stream, num_rows);
    Product to_gated = product(&l->gate_up, normed, 0, gated, num_rows);
    Product to_y = product(&l->down, gated, stream, y, num_rows);
    to_gated.kind = GATED;
    a.q = qkv, a.new_k = qkv + of_heads, a.new_v = a.new_k + l->num_kv_heads * l->head_size;
    a.q_stride = a.new_stride = of_qkv;
    a.y = mixed, a.num_heads = l->num_heads;
    norm_rows(x, l->width, l->input_gain, l->eps, normed, num_rows, l->width);
    multiply_rows(&to_qkv);
    turn_rows(
        qkv, num_rows, of_qkv, l->num_heads, l->num_kv_heads, l->head_size, pass->cosine, pass->sine, pass->rotated,
        l->q_gain, l->k_gain, l->eps);
    attend_rows(&a, pass->num_threads);
    multiply_rows(&to_stream);
    norm_rows(stream, l->width, l->mlp_gain, l->eps, normed, num_rows, l->width);
    multiply_rows(&to_gated);
    multiply_rows(&to_y);
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
