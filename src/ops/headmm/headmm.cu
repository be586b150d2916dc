/* headmm, CUDA version; see headmm.h. */
#include "ops/cuda/kernel.cuh"
#include "ops/headmm/headmm_int.h"

extern "C" int headmm_fwd_cuda(struct lane *l, const struct headmm_fwd_args *a)
{
    TRY(headmm_fwd_check(a, l->err));
    return headmm_forward(l, a, gemm_cuda);
}

extern "C" int headmm_bwd_cuda(struct lane *l, const struct headmm_bwd_args *a)
{
    TRY(headmm_bwd_check(a, l->err));
    return headmm_backward(l, a, gemm_cuda);
}

extern "C" int headmm_dw_cuda(struct lane *l, const struct headmm_dw_args *a)
{
    TRY(headmm_dw_check(a, l->err));
    return headmm_weight(l, a, gemm_cuda);
}
