/* What the files of DeepSeek-V4's attention share: csa.c (the layer kinds C, H and W), csa_index.c (compressors and the
 * indexer) and csa_part.c (what ranks that divide sequences exchange). The maths with its legend of shapes is in csa.c.
 * */
#ifndef BRAID_LAYERS_CSA_INT_H
#define BRAID_LAYERS_CSA_INT_H

#include "layers/context.h"
#include "layers/layer.h"

struct csa {
    int64_t batch, seq, heads, width, rope, q_rank, window; /* heads of this rank */
    int64_t ratio;                                          /* tokens of an entry; 0: no entries */
    int64_t entries;                                        /* rows of entries of a sequence that this plan computes */
    /* Rows of the array of keys, of a sequence: tokens, then entries. Decoding, those of the cache. */
    int64_t key_tokens, key_entries;
    int64_t seen; /* most entries that a query sees */
    int64_t groups, o_rank;
    int64_t all_heads, all_groups; /* of all ranks: parameters have these */
    bool divided;                  /* parallel.cp: this plan has a part of every sequence */
    int64_t start;                 /* its first token */
    int64_t window_rows, before;   /* tokens that windows reach back beyond it; those that there are */
    double eps, latent_eps, scale, score_scale;
    bool overlap, zero_centered;
    int64_t index_heads, index_dim, topk;
    bool indexer; /* has one: its parameters exist */
    bool selects; /* there are more entries than it keeps */
    bool learns;
};

struct csa_slots {
    slot_id cos, sin;
    slot_id q_in;             /* the normed query latent */
    slot_id qp, dqp, q, dq;   /* queries before and after their norm */
    slot_id kv, dkv;          /* rotated keys of tokens */
    slot_id entry, dentry;    /* rotated entries */
    slot_id at;               /* their positions */
    slot_id keys, dkeys;      /* both; where there are no entries: kv, dkv */
    slot_id key_cache;        /* decoding, in place of keys */
    slot_id iq, diq, iw, diw; /* of the indexer */
    slot_id ik, dik, index_cache;
    slot_id first;                    /* of this rank's tokens in a sequence; NO_SLOT: 0 */
    struct context_rows entries, iks; /* divided: entries of all ranks, of attention and indexer */
    slot_id sel, list;                /* entries that the indexer selects, keys of a query */
    slot_id o, d_o, lse;
};

/* ---- views */

static inline struct tensor csa_split(struct tensor t, int64_t a, int64_t b) { return tensor_split_last(&t, a, b); }
static inline struct tensor csa_columns(struct tensor t, int64_t first, int64_t n) { return tensor_cols(&t, first, n); }
/* Rows of tokens as [B, S, ...]; rows of entries as [B, E, ...]. */
static inline struct tensor csa_rows(const struct csa *c, struct tensor t)
{
    return tensor_split_first(&t, c->batch, c->seq);
}
static inline struct tensor csa_entries(const struct csa *c, struct tensor t)
{
    return tensor_split_first(&t, c->batch, c->entries);
}
/* Entries up to this rank's last one: those of the ranks before, too. */
static inline struct tensor csa_seen_entries(const struct csa *c, struct tensor t)
{
    return tensor_split_first(&t, c->batch, c->seen);
}
/* [T, heads, width] and its last r channels, which are rotated. */
static inline struct tensor csa_heads(struct tensor t, int64_t heads) { return csa_split(t, heads, t.dim[1] / heads); }
static inline struct tensor csa_rotary(const struct csa *c, struct tensor t, int64_t heads)
{
    struct tensor h = csa_heads(t, heads);
    return csa_columns(h, h.dim[2] - c->rope, c->rope);
}
static inline struct tensor csa_documents(const struct csa *c, const struct build *b)
{
    struct tensor t = of(b->g, b->in.doc_start);
    return t.data ? csa_rows(c, t) : t;
}
static inline struct tensor csa_positions(const struct csa *c, const struct build *b)
{
    return csa_rows(c, of(b->g, b->in.pos));
}

/* ---- declarations */

/* Forward: x rotated in place by +position; backward: the gradient rotated back in place. pos: a slot of positions. */
void csa_rotate(struct build *b, int n, const struct csa_slots *s, slot_id pos, struct tensor x);
void csa_unrotate(struct build *b, int n, const struct csa_slots *s, slot_id pos, struct tensor dy);
/* dx NO_SLOT: no gradient goes into x. */
struct csa_linear {
    const char *name, *key;
    slot_id x, y, dy, dx;
    int64_t in, out;      /* of this rank */
    int64_t heads;        /* of all ranks, which tensor parallelism divides; 0: every rank has all of the matrix */
    enum split_grad grad; /* then */
    bool plain;           /* neither FP8 codes nor adapters */
};
int csa_linear_forward(struct build *b, const struct csa_linear *d, struct linear *l);
void csa_linear_declare(struct build *b, const struct csa_linear *d);
struct weight csa_gain(struct build *b, const struct csa *c, const char *key, int64_t n, enum split_grad grad);
/* Entries of the attention's compressor. */
void csa_compressor(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io);
/* The indexer's queries, keys and weights; then the entries that it selects. */
void csa_indexer(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io);
void csa_select(struct build *b, const struct csa *c, struct csa_slots *s);
/* Entries that queries may see: of all ranks, where they divide sequences. */
struct tensor csa_all_entries(const struct csa *c, const struct build *b, const struct csa_slots *s);
/* Its loss and gradients, and what selection keeps of the attention; after attention itself. */
void csa_index_loss(struct build *b, const struct csa *c, const struct csa_slots *s);

/* ---- parts of sequences (csa_part.c) */

/* What this rank has under parallel.cp. */
void csa_divide(const struct build *b, struct csa *c);
int64_t csa_past_rows(const struct csa *c); /* tokens in front of an entry that it is made of, at most */
/* The last `rows` rows of every sequence go to the next rank: slots, then the nodes "<name>_tail" and "<name>_halo". */
struct csa_edge {
    struct context_edge edge;
    int64_t rows;
    const char *name;
};
struct csa_edge csa_edge_slots(struct build *b, const char *name, int64_t rows, int64_t width, bool trained);
/* Slots side by side in the rows that travel: x from column `first` on, dx its gradient. turn: the first of the last
 * rows becomes row `turn` of those that travel, row 0 follows the last one. */
struct csa_columns_of {
    slot_id x, dx;
    int64_t first;
};
void csa_edge_declare(struct build *b, const struct csa_edge *e, const struct csa_columns_of *x, int n_x, int64_t turn);

#endif
