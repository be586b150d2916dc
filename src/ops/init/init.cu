/* init on the GPU: the formulas of init_host.c in double, one thread per value. */
#include "ops/cuda/kernel.cuh"
#include "ops/init/init.h"

__device__ double unit_draw(uint64_t key, int64_t i, int word)
{
    struct philox4 r = philox(key, (uint32_t)i, (uint32_t)((uint64_t)i >> 32), 0, 0);
    return u32_to_unit(r.v[word]);
}

__device__ double uniform_draw(uint64_t key, int64_t i) { return unit_draw(key, i / 4, (int)(i % 4)); }

template <typename C> __global__ void init_values(struct init_args a, int64_t n, C *copy)
{
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += (int64_t)gridDim.x * blockDim.x) {
        int64_t i = a.first + at;
        double v = 0, u;
        switch (a.kind) {
        case INIT_ZERO: v = 0; break;
        case INIT_ONE: v = 1; break;
        case INIT_CONST: v = a.a; break;
        case INIT_NORMAL: {
            int pair = (int)(i % 2) * 2;
            v = a.a * (sqrt(-2.0 * log(unit_draw(a.key, i / 2, pair))) *
                       cos(6.283185307179586 * unit_draw(a.key, i / 2, pair + 1)));
            break;
        }
        case INIT_UNIFORM: v = a.a + (a.b - a.a) * uniform_draw(a.key, i); break;
        case INIT_LOG_UNIFORM: v = log(a.a + (a.b - a.a) * uniform_draw(a.key, i)); break;
        case INIT_DT_BIAS:
            u = exp(log(a.a) + (log(a.b) - log(a.a)) * uniform_draw(a.key, i));
            u = u < 1e-4 ? 1e-4 : u;
            v = u + log(-expm1(-u));
            break;
        case INIT_HASH: ((int32_t *)a.y.data)[at] = (int32_t)((i / a.row + i % a.row) % a.n_values); continue;
        }
        ((float *)a.y.data)[at] = (float)v;
        if (copy != NULL)
            copy[at] = from_float<C>((float)v);
    }
}

extern "C" int init_cuda(struct lane *l, const struct init_args *a)
{
    TRY(init_check(a, l->err));
    int64_t n = a->y.dim[0];
    unsigned grid = (unsigned)min_i64(ceil_div(n, 256), 132 * 32);
    if (a->copy.dtype == DT_BF16)
        LAUNCH(l, init_values<bf16>, grid, 256, 0, *a, n, (bf16 *)a->copy.data);
    else
        LAUNCH(l, init_values<float>, grid, 256, 0, *a, n, (float *)a->copy.data);
    return ST_OK;
}
