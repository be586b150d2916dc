/* What forward and backward of ssd on the CPU share: the layout of a chunk in scratch memory, beside what all chunked
 * scans share (cpu_chunk.h); private to ssd_*_cpu.c, compiled once per instruction set.
 *
 * A unit of work is a block of up to SSD_HEADS heads of one group of one sequence; it walks the chunks in order
 * (backward: in reverse) and owns all it writes. Products of C and B depend on the group alone and are made once per
 * chunk; what the heads add is a decay, with delta A for the log decay of a row: a padded row has delta 0 and changes
 * nothing. */
#ifndef BRAID_OPS_SSD_CHUNK_INT_H
#define BRAID_OPS_SSD_CHUNK_INT_H

#include "ops/cpu_chunk.h"
#include "ops/ssd/ssd.h"

struct inputs {
    const struct tensor *x, *dt, *A_log, *dt_bias, *Bm, *Cm, *doc_start;
    int64_t chunk;
    float dt_min, dt_max;
    /* sizes */
    int64_t batch, rows, heads, p, groups, n;
    int64_t per_group, blocks, n_chunks; /* heads of a group; blocks of heads; chunks of a sequence */
    int64_t p_pad, p_row, n_row, q_row;  /* padded channels; row strides in scratch */
};

/* Shape from the args of either direction. */
#define INPUTS_OF(args)                                                                                                \
    inputs_sizes((struct inputs){.x = &(args)->x,                                                                      \
                                 .dt = &(args)->dt,                                                                    \
                                 .A_log = &(args)->A_log,                                                              \
                                 .dt_bias = &(args)->dt_bias,                                                          \
                                 .Bm = &(args)->Bm,                                                                    \
                                 .Cm = &(args)->Cm,                                                                    \
                                 .doc_start = &(args)->doc_start,                                                      \
                                 .chunk = (args)->chunk,                                                               \
                                 .dt_min = (float)(args)->dt_min,                                                      \
                                 .dt_max = (float)(args)->dt_max})

static inline struct inputs inputs_sizes(struct inputs inputs)
{
    struct inputs *in = &inputs;
    in->batch = in->x->dim[0];
    in->rows = in->x->dim[1];
    in->heads = in->x->dim[2];
    in->p = in->x->dim[3];
    in->groups = in->Bm->dim[2];
    in->n = in->Bm->dim[3];
    in->per_group = in->groups > 0 ? in->heads / in->groups : 0;
    in->blocks = ceil_div(in->per_group, SSD_HEADS);
    in->n_chunks = ceil_div(in->rows, max_i64(in->chunk, 1)); /* asked before sizes are checked, too */
    /* One vector more than needed: rows whose distance is a power of two would share cache sets. */
    in->p_pad = round_up(in->p, BLOCK);
    in->p_row = in->p_pad + BLOCK;
    in->n_row = round_up(in->n, BLOCK) + BLOCK;
    in->q_row = round_up(min_i64(in->chunk, in->rows), BLOCK) + BLOCK;
    return inputs;
}

/* One chunk of one group. */
struct chunk {
    struct chunk_rows r;
    float *b, *c; /* [pad][n_row] */
    float *ct;    /* [n][q_row], transposed */
    float *g;     /* [pad][q_row]: g[j][i] = C_i . B_j */
};
/* One head in it. */
struct head {
    float *delta, *slope; /* [pad]; slope: d delta / d dt, 0 where clamped (backward only) */
    struct decay d;
    float rate; /* A */
};

static inline int64_t chunk_floats(const struct inputs *in)
{
    int64_t q = in->q_row; /* covers pad */
    return 2 * round_up(q * in->n_row, VL) + round_up(in->n * q, VL) + round_up(q * q, VL) +
           (3 + DECAY_ARRAYS) * round_up(q, VL);
}

static inline void chunk_take(const struct inputs *in, struct chunk *k, struct head *h, float **at)
{
    int64_t q = in->q_row;
    k->b = take(at, q * in->n_row);
    k->c = take(at, q * in->n_row);
    k->ct = take(at, in->n * q);
    k->g = take(at, q * q);
    k->r.low = (int32_t *)(void *)take(at, q);
    h->delta = take(at, q);
    h->slope = take(at, q);
    decay_take(&h->d, q, at);
}

/* Everything of a chunk that its heads share. */
static inline void chunk_load(const struct inputs *in, struct chunk *k, int64_t batch, int64_t group, int64_t index)
{
    chunk_rows_set(&k->r, batch, index, in->chunk, in->rows, in->doc_start);
    pack_rows(k->b, in->n_row, head_at(in->Bm, batch, k->r.first, group), in->Bm->stride[1], k->r.n, in->n, k->r.pad,
              in->n);
    pack_rows(k->c, in->n_row, head_at(in->Cm, batch, k->r.first, group), in->Cm->stride[1], k->r.n, in->n, k->r.pad,
              in->n);
    transpose(k->ct, in->q_row, k->c, in->n_row, k->r.pad, in->n, 1.0f);
    multiply_triangle(k->g, in->q_row, k->r.pad, k->b, in->n_row, k->ct, in->n);
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

static inline void head_load(const struct inputs *in, const struct chunk *k, struct head *h, int64_t head)
{
    const float *dt =
        (const float *)in->dt->data + k->r.batch * in->dt->stride[0] + k->r.first * in->dt->stride[1] + head;
    float bias = ((const float *)in->dt_bias->data)[head];
    h->rate = -expf(((const float *)in->A_log->data)[head]);
    double sum = 0;
    for (int64_t i = 0; i < k->r.pad; i++) {
        h->slope[i] = 0;
        h->delta[i] = i < k->r.n ? delta_of(in, dt[i * in->dt->stride[1]] + bias, &h->slope[i]) : 0.0f;
        sum += (double)h->delta[i] * (double)h->rate;
        h->d.s[i] = (float)sum;
        h->d.s_rest[i] = (float)(sum - (double)h->d.s[i]);
    }
    decay_ends(&h->d, &k->r);
}

#endif
