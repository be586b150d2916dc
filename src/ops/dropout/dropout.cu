/* dropout, CUDA version; see dropout.h. Vectors distributed flat, one a thread: many threads with little each keep the
 * memory busiest. Without dropping it is a copy. */
#include "ops/cuda/rows.cuh"
#include "ops/dropout/dropout.h"

template <typename X, typename Y, int V, bool DROP>
static __global__ void __launch_bounds__(256)
    dropout_flat(const __grid_constant__ struct tensor x, const __grid_constant__ struct tensor y,
                 const __grid_constant__ struct drop_rule drop)
{
    unsigned vectors = (unsigned)(x.dim[1] / V);
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, total = x.dim[0] * vectors;
    if (i >= total)
        return;
    int64_t row = total < (1ll << 32) ? (int64_t)((unsigned)i / vectors) : i / vectors, at = (i - row * vectors) * V;
    float value[V];
    load_floats(row2<X>(x, row) + at, value);
    if (DROP) {
        float factor[V];
        drop_factors(drop, drop_row_of(drop, row), at, factor);
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] *= factor[e];
    }
    store_floats(row2<Y>(y, row) + at, value);
}

template <typename X, typename Y, int V> static int launch(struct lane *l, const struct dropout_args *a)
{
    struct drop_rule drop = drop_rule_of(&a->rule);
    unsigned grid = (unsigned)ceil_div(a->x.dim[0] * (a->x.dim[1] / V), 256);
    if (drop.info != NULL)
        LAUNCH(l, (dropout_flat<X, Y, V, true>), grid, 256, 0, a->x, a->y, drop);
    else
        LAUNCH(l, (dropout_flat<X, Y, V, false>), grid, 256, 0, a->x, a->y, drop);
    return ST_OK;
}

extern "C" int dropout_cuda(struct lane *l, const struct dropout_args *a)
{
    TRY(dropout_check(a, l->err));
    bool vectors = aligned16(&a->x) && aligned16(&a->y);
    if (a->x.dtype == DT_BF16 && a->y.dtype == DT_BF16)
        return vectors ? launch<bf16, bf16, 8>(l, a) : launch<bf16, bf16, 1>(l, a);
    if (a->x.dtype == DT_BF16)
        return vectors ? launch<bf16, float, 8>(l, a) : launch<bf16, float, 1>(l, a);
    if (a->y.dtype == DT_BF16)
        return vectors ? launch<float, bf16, 8>(l, a) : launch<float, bf16, 1>(l, a);
    return vectors ? launch<float, float, 4>(l, a) : launch<float, float, 1>(l, a);
}
