/* cache_store: put new rows of keys or values into a decode cache.
 *   x [B, S, G, D] real, strided; cache [B, max, G, D] real dense; start I64 [1]: row of the first.
 *   start + S <= max or it is an error. */
#ifndef BRAID_OPS_CACHE_H
#define BRAID_OPS_CACHE_H

#include "dev/dev.h"

struct cache_store_args {
    struct tensor x, cache, start;
};
int cache_store_check(const struct cache_store_args *a, struct err *e);

#endif
