/* What the kernels of adamw share: the arithmetic of one element, and the rates that do not depend on it. */
#ifndef BRAID_OPS_ADAMW_CUH
#define BRAID_OPS_ADAMW_CUH

#include "ops/cuda/rows.cuh"
#include "ops/adamw/adamw.h"

struct adamw_common {
    const double *hyper, *scale;
    float beta1, beta2, eps, rest1, rest2; /* rest: 1 - beta */
};

/* What does not depend on the element. */
struct rates {
    float coef, step, v_fix, shrink, beta1, beta2, rest1, rest2, eps;
};

__device__ __forceinline__ struct rates rates_of(const struct adamw_common &a, float rate, float decay)
{
    float lr = rate * (float)a.hyper[0];
    return {(float)a.scale[1],
            lr / (float)a.hyper[1],
            1.0f / (float)a.hyper[2],
            lr * decay,
            a.beta1,
            a.beta2,
            a.rest1,
            a.rest2,
            a.eps};
}

__device__ __forceinline__ void update(const struct rates &r, float g, float *p, float *m, float *v)
{
    g *= r.coef;
    *m = r.beta1 * *m + r.rest1 * g;
    *v = r.beta2 * *v + r.rest2 * g * g;
    *p -= r.step * *m / (sqrtf(*v * r.v_fix) + r.eps) + r.shrink * *p;
}

/* The last part of a list that begins at or before this block; each knows the block that it begins with. */
template <typename P> __device__ __forceinline__ int part_of_block(const P *part, int parts, uint32_t block)
{
    int k = 0;
    for (int d = 32; d > 0; d >>= 1)
        if (k + d < parts && part[k + d].first_block <= block)
            k += d;
    return k;
}

/* Can this part be updated by adamw_coded? Its codes are made by a call of quantise otherwise. */
bool adamw_in_tiles(const struct adamw_part *p);
/* Updates those parts of the call that have codes and fit tiles (adamw_codes.cu). */
int adamw_coded(struct lane *l, const struct adamw_args *a, const struct adamw_common *common);

#endif
