/* What forward and backward of ssd on the CPU share: the layout of a chunk in scratch memory;
 * private to ssd_*_cpu.c, compiled once per instruction set.
 *
 * A unit of work is a block of up to SSD_HEADS heads of one group of one sequence; it walks the
 * chunks in order (backward: in reverse) and owns all it writes. Products of C and B depend on the
 * group alone and are made once per chunk; what the heads add is a decay, e^(s_i - s_j), where s is
 * the running sum of delta A inside the chunk. Square matrices are held transposed, [j][i] with the
 * later row i in the lanes, and only the blocks of BLOCK x BLOCK on and beyond the diagonal are
 * ever touched. Rows and channels are padded with zeros to whole vectors: a padded row has delta 0
 * and changes nothing. */
#ifndef BRAID_OPS_SSD_CHUNK_INT_H
#define BRAID_OPS_SSD_CHUNK_INT_H

#include "ops/cpu_tile.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 16 };
_Static_assert(BLOCK % VL == 0, "a block is whole vectors");

struct inputs {
    const struct tensor *x, *dt, *A_log, *dt_bias, *Bm, *Cm, *doc_start;
    int64_t chunk;
    float dt_min, dt_max;
    /* sizes */
    int64_t batch, rows, heads, p, groups, n;
    int64_t per_group, blocks,
        n_chunks; /* heads of a group; blocks of heads; chunks of a sequence */
    int64_t p_pad, p_row, n_row, q_row; /* padded channels; row strides in scratch */
};

static inline void inputs_sizes(struct inputs *in)
{
    in->batch = in->x->dim[0];
    in->rows = in->x->dim[1];
    in->heads = in->x->dim[2];
    in->p = in->x->dim[3];
    in->groups = in->Bm->dim[2];
    in->n = in->Bm->dim[3];
    in->per_group = in->groups > 0 ? in->heads / in->groups : 0;
    in->blocks = ceil_div(in->per_group, SSD_HEADS);
    in->n_chunks = ceil_div(in->rows, in->chunk);
    /* One vector more than needed: rows whose distance is a power of two would share cache sets. */
    in->p_pad = round_up(in->p, BLOCK);
    in->p_row = in->p_pad + BLOCK;
    in->n_row = round_up(in->n, BLOCK) + BLOCK;
    in->q_row = round_up(min_i64(in->chunk, in->rows), BLOCK) + BLOCK;
}

/* One chunk of one group. */
struct chunk {
    int64_t batch, first, n, pad; /* rows, and rows padded to whole blocks */
    float *b, *c;                 /* [pad][n_row] */
    float *ct;                    /* [n][q_row], transposed */
    float *g;                     /* [pad][q_row]: g[j][i] = C_i . B_j */
    int32_t
        *low; /* [pad]: first row of the chunk that this row's document shares; -1: began before */
    bool documents; /* some low is not -1 */
};
/* One head in it. */
struct head {
    float *delta, *slope; /* [pad]; slope: d delta / d dt, 0 where clamped (backward only) */
    float *s,
        *s_rest; /* running sum of delta A as a high and a low part: their differences stay exact */
    float *from_start; /* e^(s_i): how much of the incoming state row i sees */
    float *to_end;     /* e^(s_end - s_j): how much of row j the outgoing state holds */
    float decay, rate; /* e^(s_end); A */
};

static inline int64_t chunk_floats(const struct inputs *in)
{
    int64_t q = in->q_row; /* covers pad */
    return 2 * round_up(q * in->n_row, VL) + round_up(in->n * q, VL) + round_up(q * q, VL) +
           round_up(q, VL) + 6 * round_up(q, VL);
}

static inline void chunk_take(const struct inputs *in, struct chunk *k, struct head *h, float **at)
{
    int64_t q = in->q_row;
    k->b = take(at, q * in->n_row);
    k->c = take(at, q * in->n_row);
    k->ct = take(at, in->n * q);
    k->g = take(at, q * q);
    k->low = (int32_t *)(void *)take(at, q);
    h->delta = take(at, q);
    h->slope = take(at, q);
    h->s = take(at, q);
    h->s_rest = take(at, q);
    h->from_start = take(at, q);
    h->to_end = take(at, q);
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

/* Everything of a chunk that its heads share. */
static inline void chunk_load(const struct inputs *in, struct chunk *k, int64_t batch,
                              int64_t group, int64_t index)
{
    k->batch = batch;
    k->first = index * in->chunk;
    k->n = min_i64(in->chunk, in->rows - k->first);
    k->pad = round_up(k->n, BLOCK);
    pack_rows(k->b, in->n_row, head_at(in->Bm, batch, k->first, group), in->Bm->stride[1], k->n,
              in->n, k->pad, in->n);
    pack_rows(k->c, in->n_row, head_at(in->Cm, batch, k->first, group), in->Cm->stride[1], k->n,
              in->n, k->pad, in->n);
    transpose(k->ct, in->q_row, k->c, in->n_row, k->pad, in->n, 1.0f);
    find_documents(in, k);
    for (int64_t lane = 0; lane < k->pad; lane += PANEL) {
        int64_t cols = min_i64(PANEL, k->pad - lane);
        multiply(&(struct product){.a = k->b,
                                   .a_row = in->n_row,
                                   .a_step = 1,
                                   .b = k->ct + lane,
                                   .b_row = in->q_row,
                                   .out = k->g + lane,
                                   .out_row = in->q_row,
                                   .rows = round_up(lane + cols, BLOCK),
                                   .cols = cols,
                                   .depth = in->n});
    }
}

/* softplus, exact enough for small values too: ln(1 + e^x). */
static inline float delta_of(const struct inputs *in, float raw, float *slope)
{
    float soft = raw > 20.0f ? raw : log1pf(expf(raw));
    bool low = soft < in->dt_min;
    bool high = in->dt_max > 0 && soft > in->dt_max;
    *slope = low || high ? 0.0f : raw > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-raw));
    return low ? in->dt_min : high ? in->dt_max : soft;
}

static inline void head_load(const struct inputs *in, const struct chunk *k, struct head *h,
                             int64_t head)
{
    const float *dt = (const float *)in->dt->data + k->batch * in->dt->stride[0] +
                      k->first * in->dt->stride[1] + head;
    float bias = ((const float *)in->dt_bias->data)[head];
    h->rate = -expf(((const float *)in->A_log->data)[head]);
    double sum = 0;
    for (int64_t i = 0; i < k->pad; i++) {
        h->slope[i] = 0;
        h->delta[i] =
            i < k->n ? delta_of(in, dt[i * in->dt->stride[1]] + bias, &h->slope[i]) : 0.0f;
        sum += (double)h->delta[i] * (double)h->rate;
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

/* out = rows of `in`, each times its factor. */
static inline void scale_rows(float *out, const float *in, int64_t row, const float *factor,
                              int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c += VL)
            *(vec *)(out + i * row + c) = *(const vec *)(in + i * row + c) * factor[i];
}

/* The state of (batch, head) in a tensor [B, H, N, P]. */
static inline float *state_at(const struct tensor *t, int64_t b, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + head * t->stride[1];
}
/* The state that enters a chunk, in a tensor [B, chunks, H, N, P]. */
static inline float *entering(const struct tensor *t, int64_t b, int64_t index, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + index * t->stride[1] + head * t->stride[2];
}

#endif
