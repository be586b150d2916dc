/* cache_store: put new rows of keys or values into a decode cache.
 *   x [B, S, G, D] real, strided; cache [B, max, G, D] real dense; start I64 [1]: row of the first.
 *   start + S <= max or it is an error. */
#ifndef BRAID_OPS_CACHE_H
#define BRAID_OPS_CACHE_H

#include "ops/op.h"

#define CACHE_STORE_FIELDS(T, N, S, op)                                                                                \
    T(op, x, IN, REAL, "b s g d")                                                                                      \
    T(op, cache, STATE, REAL, "b max g d !")                                                                           \
    T(op, start, FIXED, I64, "1")
OP_ARGS(cache_store, CACHE_STORE_FIELDS);

#endif
