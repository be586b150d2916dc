/* permute: rows of tokens to rows of experts and back, along the maps of moeplan (T tokens, k
 * choices each, R rows). Each is the other's gradient. permute:   y[r] = x[src[r] / k], yprob[r] =
 * prob[src[r]]; rows with src -1 become 0. x [T, d], y [R, d] real, strided; src I32 [R]; prob [T,
 * k], yprob [R] wide, dense, optional together; row I32 [T, k] optional: the same map the other way
 * round, so that a device may read each token once. unpermute: y[t] (+)= base[t] + sum over j in order
 * of x[row[t, j]]; yprob[t, j] = xprob[row[t, j]], 0 where row is -1. x [R, d], y, base [T, d]
 * real, strided; row I32 [T, k]; base optional, y may be base; xprob [R], yprob [T, k] wide,
 * optional together. Of both, x and y may be absent: only the probabilities. Map entries must be in range: they
 * come from moeplan (a GPU takes those that are not for -1). */
#ifndef BRAID_OPS_PERMUTE_H
#define BRAID_OPS_PERMUTE_H

#include "ops/op.h"

enum { PERMUTE_MAX_K = 64 };

#define PERMUTE_FIELDS(T, N, S, op)                                                                                    \
    T(op, x, OPT, REAL, "rows d")                                                                                      \
    T(op, src, IN, I32, "places")                                                                                      \
    T(op, row, OPT, I32, "rows k !")                                                                                   \
    T(op, prob, OPT, WIDE, "rows k ! @yprob")                                                                          \
    T(op, y, OPT_OUT, REAL, "places d @x")                                                                             \
    T(op, yprob, OPT_OUT, WIDE, "places @prob")                                                                        \
    N(op, int64_t, k, 2)
OP_ARGS(permute, PERMUTE_FIELDS);
#define UNPERMUTE_FIELDS(T, N, S, op)                                                                                  \
    T(op, x, OPT, REAL, "places d")                                                                                    \
    T(op, row, IN, I32, "rows k !")                                                                                    \
    T(op, base, OPT_FIXED, REAL, "rows d &x")                                                                          \
    T(op, xprob, OPT, WIDE, "places")                                                                                  \
    T(op, y, OPT_SUM, REAL, "rows d @x")                                                                               \
    T(op, yprob, OPT_OUT, WIDE, "rows k ! @xprob")
OP_ARGS(unpermute, UNPERMUTE_FIELDS);

#endif
