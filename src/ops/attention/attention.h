/* attention: causal grouped-query attention, computed in blocks, never holding all scores.
 *   q [B, S, H, D], k [B, Skv, G, D], v [B, Skv, G, Dv], o [B, S, H, Dv] real, strided; H % G == 0,
 *   query head h reads kv head h / (H/G). lse [B, H, S] wide: log of the softmax denominator (with
 *   sink), written forward, read backward.
 *   Query i sits at absolute index s = start + i; start is I64 [1] if given (decoding with a cache,
 *   then keys beyond s are not valid memory to use), else Skv - S. It sees key j when
 *     j <= s,  j > s - window (window > 0 only),  j >= doc_start[b, i] (if given).
 *   k and v may be one block of a sequence's keys: `before` keys lie in front of it and `after` between its last one
 *   and the last query, elsewhere. Then key j is at absolute index before + j and query i at s = before + Skv + after -
 *   S + i; outputs are those of this block alone, and of blocks with a common lse (of all, given to backward with the o
 *   of all) the gradients add up. Not with start; before is a multiple of 4 where weights are dropped.
 *   doc_start I32 [B, S] optional: absolute index of the first token of this token's document.
 *   sink [H] wide optional: an extra logit that takes part in the softmax but has no value:
 *     p_j = e^l_j / (sum e^l + e^sink). sink_zero: a constant 0 logit instead (off by one); not
 * both. scale multiplies q.k before everything. A row that sees no key (start < 0, or Skv < S)
 * gives o = 0, lse = -inf or the sink. backward: delta = sum_d do*o; p = exp(scale q.k - lse); dv =
 * p^T do; ds = p*(do.v - delta) * scale; dq = ds k; dk = ds^T q, both summed over the query heads
 * of a group in order of head, then of query block. dsink [H] wide = -sum_rows exp(sink - lse) * delta.
 * start is not allowed (training only). dq, dk, dv shaped and strided like q, k, v (their own
 * strides), overwritten; no aliasing.
 * drop (training only, p 0: nothing): the weight of key j in the output of query i of head h is multiplied with 0 or 1
 * / (1 - p), after the softmax, and lse knows nothing of it. The mask is dropout.h's, for channel before + j at
 * position info[2] + i of sample info[1] + b, under a key of the head; drop.seq is not read. backward: dv = (m p)^T do,
 * ds = p*(m do.v - delta) * scale, m the same factors. */
#ifndef BRAID_OPS_ATTENTION_H
#define BRAID_OPS_ATTENTION_H

#include "ops/dropout/dropout.h"

#define ATTENTION_FWD_FIELDS(T, N, S, op)                                                                              \
    T(op, q, IN, REAL, "b s h d")                                                                                      \
    T(op, k, IN, REAL, "b skv g d")                                                                                    \
    T(op, v, IN, REAL, "b skv g dv")                                                                                   \
    T(op, sink, OPT, WIDE, "h")                                                                                        \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, o, OUT, REAL, "b s h dv")                                                                                    \
    T(op, lse, SAVED, WIDE, "b h s")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, scale, 0.3)                                                                                          \
    N(op, int64_t, window, 0)                                                                                          \
    N(op, int64_t, before, 0)                                                                                          \
    N(op, int64_t, after, 0)                                                                                           \
    N(op, bool, sink_zero, 0)                                                                                          \
    S(op, struct dropout_rule drop)
OP_ARGS(attention_fwd, ATTENTION_FWD_FIELDS);
#define ATTENTION_BWD_FIELDS(T, N, S, op)                                                                              \
    T(op, d_o, IN, REAL, "b s h dv")                                                                                   \
    T(op, q, IN, REAL, "b s h d")                                                                                      \
    T(op, k, IN, REAL, "b skv g d")                                                                                    \
    T(op, v, IN, REAL, "b skv g dv")                                                                                   \
    T(op, o, IN, REAL, "b s h dv")                                                                                     \
    T(op, lse, IN, WIDE, "b h s")                                                                                      \
    T(op, sink, OPT, WIDE, "h")                                                                                        \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, dq, OUT, REAL, "b s h d")                                                                                    \
    T(op, dk, OUT, REAL, "b skv g d")                                                                                  \
    T(op, dv, OUT, REAL, "b skv g dv")                                                                                 \
    T(op, dsink, OPT_SUM, WIDE, "h @sink")                                                                             \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, scale, 0.3)                                                                                          \
    N(op, int64_t, window, 0)                                                                                          \
    N(op, int64_t, before, 0)                                                                                          \
    N(op, int64_t, after, 0)                                                                                           \
    N(op, bool, sink_zero, 0)                                                                                          \
    S(op, struct dropout_rule drop)
OP_ARGS(attention_bwd, ATTENTION_BWD_FIELDS);
/* Heads drop independently of each other. */
HOST_DEVICE static inline uint64_t attention_drop_key(uint64_t key, int64_t head)
{
    return key + (uint64_t)head * 0x9E3779B97F4A7C15u;
}
/* Why cuDNN does not take calls of these shapes on a GPU; NULL: it does, where it is installed and nothing of doc_start
 * and start is given. */
OP_C const char *attention_not_library(const struct tensor *q, const struct tensor *k, const struct tensor *v);
/* The same of the backward kernel for Hopper GPUs, which takes documents; NULL: it does, where rows are aligned to 16
 * bytes. */
OP_C const char *attention_not_hopper(const struct tensor *q, const struct tensor *k, const struct tensor *v);
/* Index of the first query, counted from the first key of k: read from a->start (host memory), or Skv + after - S; an
 * error if the last query lies beyond the keys of a cache. */
int attention_start(const struct attention_fwd_args *a, int64_t *start, struct err *e);

#endif
