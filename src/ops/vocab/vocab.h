/* vocab: cross entropy of logits whose vocabulary is divided over ranks. Each rank has z [rows, V], the logits of ids
 * [first, first + V) of `vocab`, real; label I32 [rows], of the whole vocabulary, -1: ignored. In two steps, between
 * which ranks exchange three numbers of every row:
 *   vocab_stats: stats [rows, 3] wide = { max z, sum exp(z - max), z[label] or 0 where another rank has the label }
 *   vocab_loss:  all [ranks, rows, 3] wide, the stats of every rank in order.
 *     lse = log sum exp z over all ranks, nll = lse - z[label], loss F64 [2] (+)= {sum nll, number of labels >= 0};
 *     the same on every rank.
 *     dz real, optional = scale[0] * (softmax * (1 + 2 z_loss lse) - onehot), zero rows where the label is ignored; it
 *     may be z. scale F64 [1], given if dz is.
 * A label outside [-1, vocab) is an error. */
#ifndef BRAID_OPS_VOCAB_H
#define BRAID_OPS_VOCAB_H

#include "ops/op.h"

#define VOCAB_STATS_FIELDS(T, N, S, op)                                                                                \
    T(op, z, IN, REAL, "rows v")                                                                                       \
    T(op, label, IN, I32, "rows")                                                                                      \
    T(op, stats, OUT, WIDE, "rows 3 !")                                                                                \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, int64_t, vocab, 0)
OP_ARGS(vocab_stats, VOCAB_STATS_FIELDS);
#define VOCAB_LOSS_FIELDS(T, N, S, op)                                                                                 \
    T(op, z, IN, REAL, "rows v")                                                                                       \
    T(op, all, IN, WIDE, "ranks rows 3 !")                                                                             \
    T(op, label, IN, I32, "rows")                                                                                      \
    T(op, scale, OPT, F64, "1 @dz")                                                                                    \
    T(op, loss, SUM, F64, "2")                                                                                         \
    T(op, dz, OPT_OUT, REAL, "rows v")                                                                                 \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, int64_t, vocab, 0)                                                                                           \
    N(op, double, z_loss, 0)
OP_ARGS(vocab_loss, VOCAB_LOSS_FIELDS);

enum { VOCAB_MAX, VOCAB_SUM, VOCAB_TARGET, VOCAB_STATS };

#endif
