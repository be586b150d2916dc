/* cache_store: put new rows of keys or values into a decode cache.
 *   x [B, S, G, D], cache [B, max, G, D] real, strided; start I64 [1]: row of the first;
 *   with ratio > 1 a row stands for so many tokens and start counts these: row start / ratio. The last row must be
 *   below max or it is an error. */
#ifndef BRAID_OPS_CACHE_H
#define BRAID_OPS_CACHE_H

#include "ops/op.h"

#define CACHE_STORE_FIELDS(T, N, S, op)                                                                                \
    T(op, x, IN, REAL, "b s g d")                                                                                      \
    T(op, cache, STATE, REAL, "b max g d")                                                                             \
    T(op, start, FIXED, I64, "1")                                                                                      \
    N(op, int64_t, ratio, 1)
OP_ARGS(cache_store, CACHE_STORE_FIELDS);
/* The row that start[0] means. */
HOST_DEVICE static inline int64_t cache_row(int64_t start, int64_t ratio) { return ratio > 1 ? start / ratio : start; }

#endif
