/* cache_store, reference; see cache.h. */
#include "ops/ops_ref_int.h"
#include "ops/cache/cache.h"

int cache_store_ref(struct lane *l, const struct cache_store_args *a)
{
    TRY(cache_store_check(a, l->err));
    int64_t start = cache_row(*(const int64_t *)a->start.data, a->ratio), len = a->x.dim[1], max = a->cache.dim[1];
    if (start < 0 || start > max - len)
        return err_set(l->err, ST_INVALID, "cache_store: %lld rows from row %lld do not fit a cache of %lld rows",
                       (long long)len, (long long)start, (long long)max);
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t s = 0; s < len; s++)
            for (int64_t g = 0; g < a->x.dim[2]; g++)
                for (int64_t d = 0; d < a->x.dim[3]; d++) {
                    const int64_t *from = a->x.stride, *to = a->cache.stride;
                    ((double *)a->cache.data)[b * to[0] + (start + s) * to[1] + g * to[2] + d] =
                        ((const double *)a->x.data)[b * from[0] + s * from[1] + g * from[2] + d];
                }
    return ST_OK;
}
