/* What the files of the attention core share: attention.c, which has the maths and a legend of shapes, and
 * attention_ring.c, where blocks of keys travel round the ranks of parallel.cp. */
#ifndef BRAID_LAYERS_ATTENTION_INT_H
#define BRAID_LAYERS_ATTENTION_INT_H

#include "layers/context.h"

struct attention {
    int64_t batch, seq, heads, kv_heads, dim, width; /* width of a qkv row */
    int64_t q_at, gate_at, k_at, v_at;               /* first columns; gate_at -1: none */
    int64_t window;
    double scale, eps;
    bool rope, interleaved, zero_centered, sink_zero;
    bool qk_norm, row_norm; /* row_norm: of all heads together */
    /* Tensor-parallel ranks that share one kv head, and the channels of it that each projects; 1 and 0: heads are
     * whole. Otherwise keys and values are columns of kv, not of qkv. */
    int64_t kv_ranks, part;
};

struct attention_slots {
    slot_id row, drow, part, dpart, kn; /* where ranks share a kv head: [k | v], a rank's part of it, normed keys */
    slot_id qkv, qk, rstd_q, rstd_k, o, og, lse, dqkv, dog, dout;
    slot_id cos, sin, pos, doc_start, start, k_cache, v_cache;
    struct weight q_norm, k_norm, sink;
    bool divided; /* parallel.cp; then what follows exists */
    struct context_rows kv;
    bool ring;  /* and parallel.cp_comm=ring: then kv does not */
    slot_id dq; /* [T, q | gate?]; ring: [T, q] */
};

/* ---- views into a row ------------------------------------------------------------------------ */

/* [T, heads, D] */
static inline struct tensor attn_heads_of(const struct attention *m, struct tensor row, int64_t col, int64_t heads)
{
    struct tensor part = tensor_cols(&row, col, heads * m->dim);
    return tensor_split_last(&part, heads, m->dim);
}

/* [B, S, heads, D] */
static inline struct tensor attn_batched(const struct attention *m, struct tensor t)
{
    return tensor_split_first(&t, m->batch, m->seq);
}

/* q and k before norm and rotation, in a row of qkv or of its gradient. */
static inline struct tensor attn_raw_query(const struct attention *m, struct tensor qkv)
{
    return attn_heads_of(m, qkv, m->q_at, m->heads);
}
static inline struct tensor attn_raw_keys(const struct attention *m, struct tensor qkv)
{
    return attn_heads_of(m, qkv, m->k_at, m->kv_heads);
}
static inline struct tensor attn_values(const struct attention *m, struct tensor qkv)
{
    return attn_batched(m, attn_heads_of(m, qkv, m->v_at, m->kv_heads));
}
static inline struct tensor attn_gate(const struct attention *m, struct tensor qkv)
{
    return tensor_cols(&qkv, m->gate_at, m->heads * m->dim);
}
/* The row that keys and values are columns of, and its gradient. */
static inline struct tensor attn_kv_row(const struct graph *g, const struct attention *m,
                                        const struct attention_slots *s)
{
    return of(g, m->kv_ranks > 1 ? s->row : s->qkv);
}
static inline struct tensor attn_dkv_row(const struct graph *g, const struct attention *m,
                                         const struct attention_slots *s)
{
    return of(g, m->kv_ranks > 1 ? s->drow : s->dqkv);
}
static inline struct tensor attn_heads(const struct attention *m, struct tensor o)
{
    return attn_batched(m, tensor_split_last(&o, m->heads, m->dim));
}

/* q and k as attention reads them: from qk if there is one, else from qkv. */
static inline struct tensor attn_query(const struct graph *g, const struct attention *m,
                                       const struct attention_slots *s)
{
    return m->qk_norm ? attn_heads_of(m, of(g, s->qk), 0, m->heads) : attn_raw_query(m, of(g, s->qkv));
}

static inline struct tensor attn_keys(const struct graph *g, const struct attention *m, const struct attention_slots *s)
{
    if (m->qk_norm && m->kv_ranks > 1)
        return attn_heads_of(m, of(g, s->kn), 0, m->kv_heads);
    return m->qk_norm ? attn_heads_of(m, of(g, s->qk), m->heads * m->dim, m->kv_heads)
                      : attn_raw_keys(m, attn_kv_row(g, m, s));
}

static inline struct tensor attn_doc_view(const struct graph *g, const struct attention *m, slot_id doc)
{
    struct tensor t = of(g, doc);
    return t.data ? tensor_split_first(&t, m->batch, m->seq) : t;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Rotation and norm undone, from dy to d, which may be one. */
void attention_unrotate(struct graph *g, int n, const struct attention *m, const struct attention_slots *s,
                        struct tensor dy, struct tensor d, struct tensor x, const struct weight *norm, slot_id rstd);
/* All nodes between qkv and proj where blocks of keys travel round. */
int attention_ring(struct build *b, const struct attention *m, struct attention_slots *s);

#endif
