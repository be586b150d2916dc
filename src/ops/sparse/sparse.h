/* sparse: attention of all heads over one list of keys for each query. Keys and values have one head, and a key's first
 * dv channels are its value: latent attention with its up-projections absorbed into queries and output (DeepSeek-V3.2),
 * or a shared key-value head (DeepSeek-V4).
 *   q [B, S, H, D], kv [B, Skv, D], o [B, S, H, dv] real, strided. idx I32 [B, S, K]: the keys of a query, each at most
 *   once; negative entries stand for none. sink [H] wide optional: an extra logit without a value.
 *   l_j = scale q.kv_j;  p_j = e^l_j / (sum e^l + e^sink);  o = sum_j p_j kv_j[0, dv).
 *   lse [B, H, S] wide: log of the denominator, for the backward pass. A query without keys gives o = 0 and lse = -inf,
 *   or the sink.
 * backward: delta = sum_c do*o; p = exp(l - lse); ds = p * (do.v - delta) * scale; dq = sum_j ds_j kv_j;
 *   dkv_j = sum ds q + p do (the latter in the first dv channels), over heads in order within a query, then over
 *   queries in order. dsink [H] wide = -sum_rows exp(sink - lse) * delta. dq, dkv are overwritten; no aliasing.
 * Sums over the keys of a query go in the order of its list. Hosts refuse an index of Skv or more, a GPU takes it for
 * none. Scratch grows with S and K, never with S * Skv. */
#ifndef BRAID_OPS_SPARSE_H
#define BRAID_OPS_SPARSE_H

#include "ops/op.h"

#define SPARSE_FWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, q, IN, REAL, "b s h d")                                                                                      \
    T(op, kv, IN, REAL, "b skv d")                                                                                     \
    T(op, idx, FIXED, I32, "b s k")                                                                                    \
    T(op, sink, OPT, WIDE, "h")                                                                                        \
    T(op, o, OUT, REAL, "b s h dv")                                                                                    \
    T(op, lse, SAVED, WIDE, "b h s")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, scale, 0.3)                                                                                          \
    N(op, int64_t, dv, 6)
OP_ARGS(sparse_fwd, SPARSE_FWD_FIELDS);
#define SPARSE_BWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, d_o, IN, REAL, "b s h dv")                                                                                   \
    T(op, q, IN, REAL, "b s h d")                                                                                      \
    T(op, kv, IN, REAL, "b skv d")                                                                                     \
    T(op, idx, FIXED, I32, "b s k")                                                                                    \
    T(op, sink, OPT, WIDE, "h")                                                                                        \
    T(op, o, IN, REAL, "b s h dv")                                                                                     \
    T(op, lse, IN, WIDE, "b h s")                                                                                      \
    T(op, dq, OUT, REAL, "b s h d")                                                                                    \
    T(op, dkv, OUT, REAL, "b skv d")                                                                                   \
    T(op, dsink, OPT_SUM, WIDE, "h @sink")                                                                             \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, scale, 0.3)                                                                                          \
    N(op, int64_t, dv, 6)
OP_ARGS(sparse_bwd, SPARSE_BWD_FIELDS);
/* An error if an entry of idx is not below the number of keys; host memory. */
int sparse_check_list(const char *op, const struct tensor *idx, int64_t n_keys, struct err *e);

#endif
