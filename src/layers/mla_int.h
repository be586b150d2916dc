/* What the two cores of latent attention share: dense ('+', mla.c) and sparse ('D', dsa.c). The maths with its legend
 * of shapes is in mla.c. */
#ifndef BRAID_LAYERS_MLA_INT_H
#define BRAID_LAYERS_MLA_INT_H

#include "layers/context.h"
#include "layers/layer.h"

struct mla {
    int64_t batch, seq, heads, nope, rope, v, q_rank, kv_rank;
    int64_t all_heads; /* of all ranks: parameters have these */
    double scale, eps;
    bool zero_centered;
    bool plain_up; /* the up-projection of keys and values has neither FP8 codes nor adapters */
    bool absorbed; /* queries are not rotated in place: what reads them rotates */
};

struct mla_slots {
    slot_id q_in; /* input of the last query projection: the normed latent, or h */
    slot_id q, dq, kvd, dkvd, latent, dlatent, kv, dkv, k, dk, o, d_o, lse;
    slot_id cos, sin, k_cache, v_cache;
    bool divided; /* parallel.cp; then far exists */
    struct context_rows far;
};
#define MLA_LATENT_NORM "self_attention.linear_kv_up_proj.layer_norm_weight"

/* ---- views */

static inline struct tensor mla_heads(struct tensor t, int64_t heads, int64_t width)
{
    return tensor_split_last(&t, heads, width);
}
static inline struct tensor mla_columns(struct tensor t, int64_t first, int64_t n) { return tensor_cols(&t, first, n); }
static inline struct tensor mla_batched(const struct mla *m, struct tensor t)
{
    return tensor_split_first(&t, m->batch, m->seq);
}
/* The same of rows that may be more than a plan's own: keys of other ranks. */
static inline struct tensor mla_by_sequence(const struct mla *m, struct tensor t)
{
    return tensor_split_first(&t, m->batch, t.dim[0] / max_i64(m->batch, 1));
}
/* All heads of q or k: [T, H, n + r]; the rotary channels of every head of q: [T, H, r]. */
static inline struct tensor mla_keyed(const struct mla *m, struct tensor q)
{
    return mla_heads(q, m->heads, m->nope + m->rope);
}
static inline struct tensor mla_rotary(const struct mla *m, struct tensor q)
{
    return mla_columns(mla_keyed(m, q), m->nope, m->rope);
}
/* The shared rotary key: [T, r]. */
static inline struct tensor mla_shared_key(const struct mla *m, struct tensor kvd)
{
    return mla_columns(kvd, m->kv_rank, m->rope);
}
static inline struct tensor mla_outputs(const struct mla *m, struct tensor o)
{
    return mla_batched(m, mla_heads(o, m->heads, m->v));
}
static inline struct tensor mla_documents(const struct build *b)
{
    struct tensor t = of(b->g, b->in.doc_start);
    return t.data ? tensor_split_first(&t, b->batch, b->seq) : t;
}

/* ---- declarations, in this order */

struct mla mla_of(const struct build *b);
/* Tables of the rotation, shared by all layers; sets the scale, and the scope of what follows. */
int mla_tables(struct build *b, const char *scope, struct mla *m, struct mla_slots *s);
void mla_slots_of(struct build *b, const struct mla *m, struct mla_slots *s);
/* Queries: one projection, or down to a latent, norm, and up. Queries and keys both add to dh, in the backward pass
 * keys first. */
void mla_query(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io);
/* Keys and values of every head, and dense attention over them. */
void mla_expanded(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io);
void mla_output(struct build *b, const struct mla *m, const struct mla_slots *s, const struct core_io *io);
/* Parts of mla_expanded(): the projection to latent and rotary key, the weight of the one to all heads. */
struct linear mla_down(struct build *b, const struct mla *m, const struct mla_slots *s, const struct core_io *io);
struct weight mla_up_weight(struct build *b, const struct mla *m);
/* Forward: y = x rotated; backward: dx = dy rotated back. Neighbouring channels are pairs. */
void mla_rotate(struct build *b, int n, const struct mla_slots *s, struct tensor x, struct tensor y);
void mla_unrotate(struct build *b, int n, const struct mla_slots *s, struct tensor dy, struct tensor dx);

/* ---- options */

/* Forward FLOPs of a token's projections. */
double mla_linear_flops(const struct config *cfg);
/* clang-format off */
#define MLA_USES \
    {"model.heads", NULL, NULL}, \
    {"model.bias", NULL, NULL}, \
    ROPE_USES, \
    {"model.mla_q_rank", NULL, NULL}, \
    {"model.mla_kv_rank", NULL, NULL}, \
    {"model.mla_nope", NULL, NULL}, \
    {"model.mla_rope", NULL, NULL}, \
    {"model.mla_v", NULL, NULL}, \
    {"model.mla_norm_eps", NULL, NULL}, \
    {"model.mla_softmax_scale", NULL, NULL}
/* clang-format on */

#endif
