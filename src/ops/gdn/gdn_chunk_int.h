/* What forward and backward of gdn on the CPU share: the layout of a chunk in scratch memory;
 * private to gdn_*_cpu.c, compiled once per instruction set.
 *
 * Inside a chunk, with s the running sum of g, D_ij = e^(s_i - s_j) for i >= j, w = sigmoid(beta),
 * q scaled by dk^-1/2 and S the state that enters:
 *   A_ij = w_i D_ij (k_i . k_j) for i > j;   (I + A) X = diag(w) (V - diag(e^s) K S)
 *   O = diag(e^s) Q S + tril(Q K^T * D) X;   S' = e^(s_end) S + (diag(e^(s_end - s)) K)^T X
 * which is the WY form with X for V' = U - W S. X is solved for by blocks of rows: neither
 * (I + A)^-1 nor W nor U is formed, and nothing is lost to their rounding.
 *
 * A unit of work is one key head of one sequence with all its value heads; it walks the chunks in
 * order (backward: in reverse) and owns all it writes. Products of q and k depend on the key head
 * alone and are made once per chunk. Square matrices are held transposed, [j][i] with the later
 * row i in the lanes, and only the blocks of BLOCK x BLOCK on and beyond the diagonal are ever
 * touched. Rows and channels are padded with zeros to whole blocks: a padded row has g 0 and w 0
 * and changes nothing. */
#ifndef BRAID_OPS_GDN_CHUNK_INT_H
#define BRAID_OPS_GDN_CHUNK_INT_H

#include "ops/cpu_tile.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 16 };
_Static_assert(BLOCK % VL == 0, "a block is whole vectors");

struct inputs {
    const struct tensor *q, *k, *v, *alpha, *beta, *A_log, *dt_bias, *doc_start;
    int64_t chunk;
    int64_t batch, rows, key_heads, heads, per_key; /* per_key: value heads of a key head */
    int64_t dk, dv, n_chunks;
    int64_t k_pad, v_pad, k_row, v_row,
        c_row;   /* padded widths; row strides in scratch, of k, v and chunk rows */
    float scale; /* of q */
};

static inline void inputs_sizes(struct inputs *in)
{
    in->batch = in->v->dim[0];
    in->rows = in->v->dim[1];
    in->heads = in->v->dim[2];
    in->dv = in->v->dim[3];
    in->key_heads = in->k->dim[2];
    in->dk = in->k->dim[3];
    in->per_key = in->key_heads > 0 ? in->heads / in->key_heads : 0;
    in->n_chunks = ceil_div(in->rows, in->chunk);
    /* One block more than needed: rows whose distance is a power of two would share cache sets. */
    in->k_pad = round_up(in->dk, BLOCK);
    in->v_pad = round_up(in->dv, BLOCK);
    in->k_row = in->k_pad + BLOCK;
    in->v_row = in->v_pad + BLOCK;
    in->c_row = round_up(min_i64(in->chunk, in->rows), BLOCK) + BLOCK;
    in->scale = in->dk > 0 ? 1.0f / sqrtf((float)in->dk) : 0.0f;
}

/* One chunk of one key head. */
struct chunk {
    int64_t batch, first, n, pad; /* rows, and rows padded to whole blocks */
    float *q, *k;                 /* [pad][k_row]: of unit length, q times scale */
    float *qt, *kt;               /* [dk][c_row], transposed */
    float *q_factor, *k_factor;   /* [pad]: what brought them to unit length */
    float *qk, *kk;               /* [pad][c_row]: [j][i] = q_i . k_j, k_i . k_j */
    int32_t
        *low; /* [pad]: first row of the chunk that this row's document shares; -1: began before */
    bool documents; /* some low is not -1 */
};
/* One value head in it. */
struct head {
    float *w;          /* [pad]: sigmoid(beta) */
    float *g, *slope;  /* [pad]: log decay; d g / d alpha */
    float *s, *s_rest; /* running sum of g as a high and a low part: their differences stay exact */
    float *from_start, *to_end; /* e^(s_i), e^(s_end - s_i); 0 where a document begins between */
    float decay;                /* e^(s_end) */
    float *m, *a;               /* [pad][c_row]: decayed qk; -A */
};

static inline int64_t chunk_floats(const struct inputs *in)
{
    int64_t c = in->c_row; /* covers pad, a multiple of VL like all row strides */
    return 2 * c * in->k_row + 2 * in->dk * c + 4 * c * c + 10 * c;
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
    k->low = (int32_t *)(void *)take(at, c);
    h->w = take(at, c);
    h->g = take(at, c);
    h->slope = take(at, c);
    h->s = take(at, c);
    h->s_rest = take(at, c);
    h->from_start = take(at, c);
    h->to_end = take(at, c);
    h->m = take(at, c * c);
    h->a = take(at, c * c);
}

/* Copy n rows of `width` floats and clear up to `pad` rows of `wide`. */
static inline void pack_rows(float *out, int64_t out_row, const float *in, int64_t in_row,
                             int64_t n, int64_t width, int64_t pad, int64_t wide)
{
    for (int64_t i = 0; i < pad; i++) {
        int64_t have = i < n ? width : 0;
        if (have > 0)
            memcpy(out + i * out_row, in + i * in_row, (size_t)have * sizeof(float));
        memset(out + i * out_row + have, 0, (size_t)(wide - have) * sizeof(float));
    }
}

static inline float length_factor(const float *x, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += x[c] * x[c];
    return 1.0f / sqrtf(sum + (float)GDN_EPS);
}

/* out = rows of `in`, each times its factor. */
static inline void scale_rows(float *out, const float *in, int64_t row, const float *factor,
                              int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c += VL)
            *(vec *)(out + i * row + c) = *(const vec *)(in + i * row + c) * factor[i];
}

/* Rows of q or k of unit length, times scale; and their transpose. */
static inline void load_unit(const struct inputs *in, const struct chunk *k, const struct tensor *t,
                             int64_t head, float scale, float *out, float *out_t, float *factor)
{
    int64_t row = in->k_row;
    pack_rows(out, row, head_at(t, k->batch, k->first, head), t->stride[1], k->n, in->dk, k->pad,
              in->k_pad);
    for (int64_t i = 0; i < k->pad; i++) {
        factor[i] = length_factor(out + i * row, in->k_pad);
        for (int64_t c = 0; c < in->k_pad; c += VL)
            *(vec *)(out + i * row + c) *= factor[i] * scale;
    }
    transpose(out_t, in->c_row, out, row, k->pad, in->dk, 1.0f);
}

static inline void find_documents(const struct inputs *in, struct chunk *k)
{
    int32_t low = -1;
    k->documents = false;
    for (int64_t i = 0; i < k->pad; i++) {
        if (i < k->n && present(in->doc_start)) {
            const int32_t *doc =
                (const int32_t *)in->doc_start->data + k->batch * in->doc_start->stride[0];
            if (doc[k->first + i] == k->first + i)
                low = (int32_t)i;
        }
        k->low[i] = low;
        k->documents = k->documents || low >= 0;
    }
}

/* out[j][i] = rows[j] . columns[:, i] for the blocks on and beyond the diagonal. */
static inline void multiply_triangle(const struct inputs *in, int64_t pad, float *out,
                                     const float *rows, int64_t row, const float *columns,
                                     int64_t depth)
{
    for (int64_t lane = 0; lane < pad; lane += PANEL) {
        int64_t cols = min_i64(PANEL, pad - lane);
        multiply(&(struct product){.a = rows,
                                   .a_row = row,
                                   .a_step = 1,
                                   .b = columns + lane,
                                   .b_row = in->c_row,
                                   .out = out + lane,
                                   .out_row = in->c_row,
                                   .rows = round_up(lane + cols, BLOCK),
                                   .cols = cols,
                                   .depth = depth});
    }
}

/* Everything of a chunk that its value heads share. */
static inline void chunk_load(const struct inputs *in, struct chunk *k, int64_t batch,
                              int64_t key_head, int64_t index)
{
    k->batch = batch;
    k->first = index * in->chunk;
    k->n = min_i64(in->chunk, in->rows - k->first);
    k->pad = round_up(k->n, BLOCK);
    load_unit(in, k, in->q, key_head, in->scale, k->q, k->qt, k->q_factor);
    load_unit(in, k, in->k, key_head, 1.0f, k->k, k->kt, k->k_factor);
    find_documents(in, k);
    multiply_triangle(in, k->pad, k->qk, k->k, in->k_row, k->qt, in->dk);
    multiply_triangle(in, k->pad, k->kk, k->k, in->k_row, k->kt, in->dk);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/* ln(1 + e^x), exact enough for small values too. */
static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Lanes i .. i+VL-1 of row j: e^(s_i - s_j) where row i sees row j, else 0. */
static inline vec decay_lanes(const struct chunk *k, const struct head *h, int64_t j, int64_t i)
{
    vec d = (*(const vec *)(h->s + i) - h->s[j]) + (*(const vec *)(h->s_rest + i) - h->s_rest[j]);
    vec e = vec_exp(vec_choose(d < (vec){0}, d, (vec){0}));
    if (i < j) { /* the vector that crosses the diagonal */
        vec_mask lane;
        for (int v = 0; v < VL; v++)
            lane[v] = (int32_t)(i + v);
        e = vec_choose(lane >= (vec_mask){0} + (int32_t)j, e, (vec){0});
    }
    if (k->documents)
        e = vec_choose(*(const vec_mask *)(k->low + i) <= (vec_mask){0} + (int32_t)j, e, (vec){0});
    return e;
}

static inline void head_gates(const struct inputs *in, const struct chunk *k, struct head *h,
                              int64_t head)
{
    const float *alpha = head_at(in->alpha, k->batch, k->first, head);
    const float *beta = head_at(in->beta, k->batch, k->first, head);
    float bias = ((const float *)in->dt_bias->data)[head],
          rate = -expf(((const float *)in->A_log->data)[head]);
    double sum = 0;
    for (int64_t i = 0; i < k->pad; i++) {
        bool real = i < k->n;
        float raw = real ? alpha[i * in->alpha->stride[1]] + bias : 0.0f;
        h->g[i] = real ? rate * softplus(raw) : 0.0f;
        h->slope[i] = raw > 20.0f ? rate : rate * sigmoid(raw);
        h->w[i] = real ? sigmoid(beta[i * in->beta->stride[1]]) : 0.0f;
        sum += (double)h->g[i];
        h->s[i] = (float)sum;
        h->s_rest[i] = (float)(sum - (double)h->s[i]);
    }
    int32_t last = k->low[k->pad - 1];
    float end = h->s[k->pad - 1], end_rest = h->s_rest[k->pad - 1];
    for (int64_t i = 0; i < k->pad; i += VL) {
        vec s = *(const vec *)(h->s + i), rest = *(const vec *)(h->s_rest + i);
        *(vec *)(h->from_start + i) = vec_exp(s + rest);
        *(vec *)(h->to_end + i) = vec_exp((end - s) + (end_rest - rest));
    }
    for (int64_t i = 0; k->documents && i < k->pad; i++) {
        h->from_start[i] = k->low[i] < 0 ? h->from_start[i] : 0.0f;
        h->to_end[i] = i >= last ? h->to_end[i] : 0.0f;
    }
    h->decay = last < 0 ? expf(end + end_rest) : 0.0f;
}

/* Gates and square matrices of a head. */
static inline void head_load(const struct inputs *in, const struct chunk *k, struct head *h,
                             int64_t head)
{
    head_gates(in, k, h, head);
    for (int64_t j = 0; j < k->pad; j++) {
        for (int64_t i = j / BLOCK * BLOCK; i < k->pad; i += VL) {
            int64_t at = j * in->c_row + i;
            vec d = decay_lanes(k, h, j, i);
            *(vec *)(h->m + at) = *(const vec *)(k->qk + at) * d;
            *(vec *)(h->a + at) =
                (vec){0} - *(const vec *)(k->kk + at) * d * *(const vec *)(h->w + i);
        }
        h->a[j * in->c_row + j] = 0;
    }
}

/* What is written along the keys. On entry v holds V; on return x holds X, the solution, and v what
 * the state does not hold yet: V - diag(e^s) K S. state NULL: zeros. */
static inline void solve_values(const struct inputs *in, const struct chunk *k,
                                const struct head *h, const float *state, float *v, float *x)
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
                                   .rows = k->pad,
                                   .cols = wide,
                                   .depth = in->dk});
        for (int64_t i = 0; i < k->pad; i++)
            for (int64_t c = 0; c < wide; c += VL)
                *(vec *)(v + i * row + c) -= *(const vec *)(x + i * row + c) * h->from_start[i];
    }
    scale_rows(x, v, row, h->w, k->pad, wide);
    for (int64_t i = 0; i < k->pad; i += BLOCK) {
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

/* Copies `rows` rows of `cols` floats and clears up to `wide`. */
static inline void copy_rows(float *out, int64_t out_row, const float *in, int64_t in_row,
                             int64_t rows, int64_t cols, int64_t wide)
{
    pack_rows(out, out_row, in, in_row, rows, cols, rows, wide);
}

/* The state of (batch, head) in a tensor [B, H, dk, dv]. */
static inline float *state_at(const struct tensor *t, int64_t b, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + head * t->stride[1];
}
/* The state that enters a chunk, in a tensor [B, chunks, H, dk, dv]. */
static inline float *entering(const struct tensor *t, int64_t b, int64_t index, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + index * t->stride[1] + head * t->stride[2];
}

#endif
