/* cache_store, CUDA version; see cache.h. Rows that would not fit the cache are not stored: the host cannot see
 * `start`. */
#include "ops/cuda/rows.cuh"
#include "ops/cache/cache.h"

/* Elements of 16 bytes or of the tensor's type: a plain copy of E. */
template <typename E>
static __global__ void __launch_bounds__(256)
    store_rows(const E *x, E *cache, const int64_t *start, int64_t ratio, int64_t total, int64_t s, int64_t g,
               int64_t d, int64_t max, int64_t x0, int64_t x1, int64_t x2, int64_t y0, int64_t y1, int64_t y2)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, first = cache_row(*start, ratio);
    if (i >= total || first < 0 || first > max - s)
        return;
    int64_t c = i % d, head = i / d % g, row = i / (d * g) % s, b = i / (d * g * s);
    cache[b * y0 + (first + row) * y1 + head * y2 + c] = x[b * x0 + row * x1 + head * x2 + c];
}

template <typename E> static int launch(struct lane *l, const struct cache_store_args *a)
{
    int64_t unit = (int64_t)(sizeof(E) / dtype_bytes(a->x.dtype)), total = tensor_elems(&a->x) / unit;
    const int64_t *n = a->x.dim, *step = a->x.stride, *to = a->cache.stride;
    LAUNCH(l, store_rows<E>, (unsigned)ceil_div(total, 256), 256, 0, (const E *)a->x.data, (E *)a->cache.data,
           (const int64_t *)a->start.data, a->ratio, total, n[1], n[2], n[3] / unit, a->cache.dim[1], step[0] / unit,
           step[1] / unit, step[2] / unit, to[0] / unit, to[1] / unit, to[2] / unit);
    return ST_OK;
}

extern "C" int cache_store_cuda(struct lane *l, const struct cache_store_args *a)
{
    TRY(cache_store_check(a, l->err));
    if (aligned16(&a->x) && aligned16(&a->cache))
        return launch<uint4>(l, a);
    return a->x.dtype == DT_BF16 ? launch<uint16_t>(l, a) : launch<uint32_t>(l, a);
}
