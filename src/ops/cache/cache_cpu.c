/* cache_store, fast CPU version; see cache.h. */
#include "ops/ops_cpu_int.h"
#include "ops/cache/cache.h"

#include <string.h>

int CPU_NAME(cache_store_cpu)(struct lane *l, const struct cache_store_args *a)
{
    TRY(cache_store_check(a, l->err));
    int64_t start = cache_row(*(const int64_t *)a->start.data, a->ratio), max = a->cache.dim[1];
    int64_t len = a->x.dim[1], groups = a->x.dim[2], d = a->x.dim[3];
    if (start < 0 || start > max - len)
        return err_set(l->err, ST_INVALID, "cache_store: %lld rows from row %lld do not fit a cache of %lld rows",
                       (long long)len, (long long)start, (long long)max);
    const int64_t *from = a->x.stride, *to = a->cache.stride;
#pragma omp parallel for collapse(2) schedule(static) if (tensor_elems(&a->x) > 16384)
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t s = 0; s < len; s++)
            for (int64_t g = 0; g < groups; g++)
                memcpy((float *)a->cache.data + b * to[0] + (start + s) * to[1] + g * to[2],
                       (const float *)a->x.data + b * from[0] + s * from[1] + g * from[2], (size_t)d * sizeof(float));
    return ST_OK;
}
