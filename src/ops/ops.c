/* Which table serves a device. */
#include "ops/ops.h"

#include <stddef.h>
#include <string.h>

extern const struct ops ops_cpu_base;
#if defined(__x86_64__) && !defined(OPS_BASE_ONLY)
extern const struct ops ops_cpu_avx2, ops_cpu_avx512;
#endif

#ifdef BRAID_CUDA
extern const struct ops ops_cuda_bf16, ops_cuda_hopper, ops_cuda_f32;
#endif

const struct ops *ops_cpu_variant(int k)
{
    const struct ops *runs[3];
    int n = 0;
#if defined(__x86_64__) && !defined(OPS_BASE_ONLY)
    const char *isa = cpu_isa();
    if (strcmp(isa, "avx512") == 0)
        runs[n++] = &ops_cpu_avx512;
    if (strcmp(isa, "base") != 0)
        runs[n++] = &ops_cpu_avx2;
#endif
    runs[n++] = &ops_cpu_base;
    return k >= 0 && k < n ? runs[k] : NULL;
}

const struct ops *ops_for(const struct dev *d)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return d->real != DT_BF16 ? &ops_cuda_f32 : d->hopper ? &ops_cuda_hopper : &ops_cuda_bf16;
#endif
    return d->kind == DEV_REF ? &ops_ref : d->kind == DEV_CPU ? ops_cpu_variant(0) : NULL;
}
