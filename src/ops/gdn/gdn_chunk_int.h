/* What forward and backward of gdn on the CPU share: the layout of a chunk in scratch memory, beside what
 * all chunked scans share (cpu_chunk.h); private to gdn_*_cpu.c, compiled once per instruction set.
 *
 * Inside a chunk, with s the running sum of g, D_ij = e^(s_i - s_j) for i >= j, w = sigmoid(beta),
 * q scaled by dk^-1/2 and S the state that enters:
 *   A_ij = w_i D_ij (k_i . k_j) for i > j;   (I + A) X = diag(w) (V - diag(e^s) K S)
 *   O = diag(e^s) Q S + tril(Q K^T * D) X;   S' = e^(s_end) S + (diag(e^(s_end - s)) K)^T X
 * which is the WY form with X for V' = U - W S. X is solved for by blocks of rows: neither
 * (I + A)^-1 nor W nor U is formed, and nothing is lost to their rounding.
 *
 * A unit of work is one key head of one sequence with all its value heads; it walks the chunks in order (backward: in
 * reverse) and owns all it writes. Products of q and k depend on the key head alone and are made once per chunk. A
 * padded row has g 0 and w 0 and changes nothing. */
#ifndef BRAID_OPS_GDN_CHUNK_INT_H
#define BRAID_OPS_GDN_CHUNK_INT_H

#include "ops/cpu_chunk.h"
#include "ops/gdn/gdn.h"

struct inputs {
    const struct tensor *q, *k, *v, *alpha, *beta, *A_log, *dt_bias, *doc_start;
    int64_t chunk;
    int64_t batch, rows, key_heads, heads, per_key; /* per_key: value heads of a key head */
    int64_t dk, dv, n_chunks;
    int64_t k_pad, v_pad, k_row, v_row, c_row; /* padded widths; row strides in scratch, of k, v and chunk rows */
    float scale;                               /* of q */
};

/* Shape from the args of either direction. */
#define INPUTS_OF(args)                                                                                                \
    inputs_sizes((struct inputs){.q = &(args)->q,                                                                      \
                                 .k = &(args)->k,                                                                      \
                                 .v = &(args)->v,                                                                      \
                                 .alpha = &(args)->alpha,                                                              \
                                 .beta = &(args)->beta,                                                                \
                                 .A_log = &(args)->A_log,                                                              \
                                 .dt_bias = &(args)->dt_bias,                                                          \
                                 .doc_start = &(args)->doc_start,                                                      \
                                 .chunk = (args)->chunk})

static inline struct inputs inputs_sizes(struct inputs inputs)
{
    struct inputs *in = &inputs;
    in->batch = in->v->dim[0];
    in->rows = in->v->dim[1];
    in->heads = in->v->dim[2];
    in->dv = in->v->dim[3];
    in->key_heads = in->k->dim[2];
    in->dk = in->k->dim[3];
    in->per_key = in->key_heads > 0 ? in->heads / in->key_heads : 0;
    in->n_chunks = ceil_div(in->rows, max_i64(in->chunk, 1)); /* asked before sizes are checked, too */
    /* One block more than needed: rows whose distance is a power of two would share cache sets. */
    in->k_pad = round_up(in->dk, BLOCK);
    in->v_pad = round_up(in->dv, BLOCK);
    in->k_row = in->k_pad + BLOCK;
    in->v_row = in->v_pad + BLOCK;
    in->c_row = round_up(min_i64(in->chunk, in->rows), BLOCK) + BLOCK;
    in->scale = in->dk > 0 ? 1.0f / sqrtf((float)in->dk) : 0.0f;
    return inputs;
}

/* One chunk of one key head. */
struct chunk {
    struct chunk_rows r;
    float *q, *k;               /* [pad][k_row]: of unit length, q times scale */
    float *qt, *kt;             /* [dk][c_row], transposed */
    float *q_factor, *k_factor; /* [pad]: what brought them to unit length */
    float *qk, *kk;             /* [pad][c_row]: [j][i] = q_i . k_j, k_i . k_j */
};
/* One value head in it. */
struct head {
    float *w;         /* [pad]: sigmoid(beta) */
    float *g, *slope; /* [pad]: log decay; d g / d alpha */
    struct decay d;
    float *m, *a; /* [pad][c_row]: decayed qk; -A */
};

static inline int64_t chunk_floats(const struct inputs *in)
{
    int64_t c = in->c_row; /* covers pad, a multiple of VL like all row strides */
    return 2 * c * in->k_row + 2 * in->dk * c + 4 * c * c + (6 + DECAY_ARRAYS) * c;
}

static inline void chunk_take(const struct inputs *in, struct chunk *k, struct head *h, float **at)
{
    int64_t c = in->c_row;
    k->q = take(at, c * in->k_row);
    k->k = take(at, c * in->k_row);
    k->qt = take(at, in->dk * c);
    k->kt = take(at, in->dk * c);
    k->q_factor = take(at, c);
    k->k_factor = take(at, c);
    k->qk = take(at, c * c);
    k->kk = take(at, c * c);
    k->r.low = (int32_t *)(void *)take(at, c);
    h->w = take(at, c);
    h->g = take(at, c);
    h->slope = take(at, c);
    decay_take(&h->d, c, at);
    h->m = take(at, c * c);
    h->a = take(at, c * c);
}

static inline float length_factor(const float *x, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += x[c] * x[c];
    return 1.0f / sqrtf(sum + (float)GDN_EPS);
}

/* Rows of q or k of unit length, times scale; and their transpose. */
static inline void load_unit(const struct inputs *in, const struct chunk *k, const struct tensor *t, int64_t head,
                             float scale, float *out, float *out_t, float *factor)
{
    int64_t row = in->k_row;
    pack_rows(out, row, head_at(t, k->r.batch, k->r.first, head), t->stride[1], k->r.n, in->dk, k->r.pad, in->k_pad);
    for (int64_t i = 0; i < k->r.pad; i++) {
        factor[i] = length_factor(out + i * row, in->k_pad);
        for (int64_t c = 0; c < in->k_pad; c += VL)
            *(vec *)(out + i * row + c) *= factor[i] * scale;
    }
    transpose(out_t, in->c_row, out, row, k->r.pad, in->dk, 1.0f);
}

/* Everything of a chunk that its value heads share. */
static inline void chunk_load(const struct inputs *in, struct chunk *k, int64_t batch, int64_t key_head, int64_t index)
{
    chunk_rows_set(&k->r, batch, index, in->chunk, in->rows, in->doc_start);
    load_unit(in, k, in->q, key_head, in->scale, k->q, k->qt, k->q_factor);
    load_unit(in, k, in->k, key_head, 1.0f, k->k, k->kt, k->k_factor);
    multiply_triangle(k->qk, in->c_row, k->r.pad, k->k, in->k_row, k->qt, in->dk);
    multiply_triangle(k->kk, in->c_row, k->r.pad, k->k, in->k_row, k->kt, in->dk);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/* ln(1 + e^x), exact enough for small values too. */
static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static inline void head_gates(const struct inputs *in, const struct chunk *k, struct head *h, int64_t head)
{
    const float *alpha = head_at(in->alpha, k->r.batch, k->r.first, head);
    const float *beta = head_at(in->beta, k->r.batch, k->r.first, head);
    float bias = ((const float *)in->dt_bias->data)[head], rate = -expf(((const float *)in->A_log->data)[head]);
    double sum = 0;
    for (int64_t i = 0; i < k->r.pad; i++) {
        bool real = i < k->r.n;
        float raw = real ? alpha[i * in->alpha->stride[1]] + bias : 0.0f;
        h->g[i] = real ? rate * softplus(raw) : 0.0f;
        h->slope[i] = raw > 20.0f ? rate : rate * sigmoid(raw);
        h->w[i] = real ? sigmoid(beta[i * in->beta->stride[1]]) : 0.0f;
        sum += (double)h->g[i];
        h->d.s[i] = (float)sum;
        h->d.s_rest[i] = (float)(sum - (double)h->d.s[i]);
    }
    decay_ends(&h->d, &k->r);
}

/* Gates and square matrices of a head. */
static inline void head_load(const struct inputs *in, const struct chunk *k, struct head *h, int64_t head)
{
    head_gates(in, k, h, head);
    for (int64_t j = 0; j < k->r.pad; j++) {
        for (int64_t i = j / BLOCK * BLOCK; i < k->r.pad; i += VL) {
            int64_t at = j * in->c_row + i;
            vec d = decay_lanes(&h->d, &k->r, j, i);
            *(vec *)(h->m + at) = *(const vec *)(k->qk + at) * d;
            *(vec *)(h->a + at) = (vec){0} - *(const vec *)(k->kk + at) * d * *(const vec *)(h->w + i);
        }
        h->a[j * in->c_row + j] = 0;
    }
}

/* What is written along the keys. On entry v holds V; on return x holds X, the solution, and v what
 * the state does not hold yet: V - diag(e^s) K S. state NULL: zeros. */
static inline void solve_values(const struct inputs *in, const struct chunk *k, const struct head *h,
                                const float *state, float *v, float *x)
{
    int64_t row = in->v_row, wide = in->v_pad;
    if (state != NULL) {
        multiply(&(struct product){.a = k->k,
                                   .a_row = in->k_row,
                                   .a_step = 1,
                                   .b = state,
                                   .b_row = row,
                                   .out = x,
                                   .out_row = row,
                                   .rows = k->r.pad,
                                   .cols = wide,
                                   .depth = in->dk});
        for (int64_t i = 0; i < k->r.pad; i++)
            for (int64_t c = 0; c < wide; c += VL)
                *(vec *)(v + i * row + c) -= *(const vec *)(x + i * row + c) * h->d.from_start[i];
    }
    scale_rows(x, v, row, h->w, k->r.pad, wide);
    for (int64_t i = 0; i < k->r.pad; i += BLOCK) {
        float *block = x + i * row;
        multiply(&(struct product){.a = h->a + i,
                                   .a_row = 1,
                                   .a_step = in->c_row,
                                   .b = x,
                                   .b_row = row,
                                   .out = block,
                                   .out_row = row,
                                   .rows = BLOCK,
                                   .cols = wide,
                                   .depth = i,
                                   .add = true});
        for (int64_t c = 0; c < wide; c += VL) {
            vec r[BLOCK];
            for (int n = 0; n < BLOCK; n++)
                r[n] = *(const vec *)(block + n * row + c);
            for (int j = 0; j < BLOCK; j++) {
                const float *a = h->a + (i + j) * in->c_row + i;
                for (int n = j + 1; n < BLOCK; n++)
                    r[n] += r[j] * a[n];
            }
            for (int n = 0; n < BLOCK; n++)
                *(vec *)(block + n * row + c) = r[n];
        }
    }
}

#endif
