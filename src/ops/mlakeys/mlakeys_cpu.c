/* mlakeys, fast CPU version; see mlakeys.h. Copies and short sums: tokens in parallel. */
#include "ops/ops_cpu_int.h"
#include "ops/mlakeys/mlakeys.h"

#include <string.h>

int CPU_NAME(mlakeys_fwd_cpu)(struct lane *l, const struct mlakeys_fwd_args *a)
{
    TRY(mlakeys_fwd_check(a, l->err));
    int64_t tokens = a->k.dim[0], heads = a->k.dim[1], rope = a->shared.dim[1], nope = a->k.dim[2] - rope;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *shared = f32_row(&a->shared, t);
        for (int64_t h = 0; h < heads; h++) {
            float *k = f32_row(&a->k, t * heads + h);
            memcpy(k, f32_row(&a->kv, t * heads + h), (size_t)nope * sizeof *k);
            memcpy(k + nope, shared, (size_t)rope * sizeof *k);
        }
    }
    return ST_OK;
}

int CPU_NAME(mlakeys_bwd_cpu)(struct lane *l, const struct mlakeys_bwd_args *a)
{
    TRY(mlakeys_bwd_check(a, l->err));
    int64_t tokens = a->dk.dim[0], heads = a->dk.dim[1], rope = a->dk.dim[2] - a->nope;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        float *sum = present(&a->dshared) ? f32_row(&a->dshared, t) : NULL;
        for (int64_t c = 0; sum != NULL && c < rope; c++)
            sum[c] = 0;
        for (int64_t h = 0; h < heads; h++) {
            const float *dk = f32_row(&a->dk, t * heads + h);
            if (present(&a->dkv))
                memcpy(f32_row(&a->dkv, t * heads + h), dk, (size_t)a->nope * sizeof *dk);
            for (int64_t c = 0; sum != NULL && c < rope; c++)
                sum[c] += dk[a->nope + c];
        }
    }
    return ST_OK;
}
