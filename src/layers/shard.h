/* Tensor parallelism with sequence parallelism, for layers.
 *
 * Ranks of a tensor-parallel group hold slices of the weights and, outside layers, each its share of the rows of a
 * microbatch: rank r has rows [r * T / tp, (r + 1) * T / tp) of T = batch * seq. Inside a layer that is divided by
 * heads or channels every rank has all rows:
 *
 *   h [T/tp] -- gather --> H [T] -- layer, its slice of the weights --> F [T], a part of the sum -- scatter --> f
 *   [T/tp]
 *
 * The backward pass reverses this: the gradient of f is gathered, the layer's slices give their part of the
 * gradient of H, and its sum is scattered. H is not kept for the weight gradients but gathered again.
 *
 * b->rows is the number of rows of what is being declared: of the stream, and between shard_begin() and shard_end()
 * those of the whole microbatch. Layers that treat every row by itself (mixtures of experts) stay outside. All of this
 * does nothing where parallel.tp is 1. */
#ifndef BRAID_LAYERS_SHARD_H
#define BRAID_LAYERS_SHARD_H

#include "layers/layer.h"

/* The slice of a parameter that this rank holds; refuses what is not declared, does not divide, or would be summed
 * though every rank has all of it. */
int shard_param(struct build *b, struct param *p);

/* Rows of the whole microbatch. */
static inline int64_t all_rows(const struct build *b) { return b->batch * b->seq; }
/* This rank's rows of a tensor of the whole microbatch, as a view; t itself where b->rows are all. */
struct tensor shard_rows(const struct build *b, struct tensor t);
/* The first of them. */
int64_t shard_first_row(const struct build *b);

/* Between the two, `io` has h and dh of all rows, and the layer creates f, of which it reads df, as a part of the sum;
 * after it io has this rank's rows of everything. */
struct shard_scope {
    struct core_io outside;
    bool on, whole;
};
/* whole: all of a layer is between, so that schedules may cut there; else a part of one. */
struct shard_scope shard_begin(struct build *b, struct core_io *io, bool whole);
void shard_end(struct build *b, const struct shard_scope *s, struct core_io *io);

/* x [rows, n] of every rank as one slot of all rows, in the scope of the layer; its gradient, if given (NO_SLOT: none),
 * is summed over ranks into dx. dx_sums: others add to dx as well. */
struct gathered {
    slot_id x, dx;
};
struct gathered shard_gather(struct build *b, const char *name, slot_id x, slot_id dx);
/* The same over the ranks that share one group of keys and values: their parts of its channels, one after the other. */
struct gathered shard_gather_kv(struct build *b, const char *name, slot_id x, slot_id dx);
/* The reverse: y [all rows, n], a part of a sum on every rank, becomes this rank's rows of it. The gradient of
 * those, dy, is gathered into dy_all (NO_SLOT: made elsewhere). */
void shard_scatter(struct build *b, const char *name, slot_id y_all, slot_id y, slot_id dy, slot_id dy_all);
/* In the backward phase: `part` of every rank, one after the other, becomes `all`. */
void shard_collect(struct build *b, const char *name, slot_id part, slot_id all);

#endif
