/* headmm, fast CPU version; see headmm.h. */
#include "ops/headmm/headmm_int.h"
#include "ops/ops_cpu_int.h"

int CPU_NAME(headmm_fwd_cpu)(struct lane *l, const struct headmm_fwd_args *a)
{
    TRY(headmm_fwd_check(a, l->err));
    return headmm_forward(l, a, CPU_NAME(gemm_cpu));
}

int CPU_NAME(headmm_bwd_cpu)(struct lane *l, const struct headmm_bwd_args *a)
{
    TRY(headmm_bwd_check(a, l->err));
    return headmm_backward(l, a, CPU_NAME(gemm_cpu));
}

int CPU_NAME(headmm_dw_cpu)(struct lane *l, const struct headmm_dw_args *a)
{
    TRY(headmm_dw_check(a, l->err));
    return headmm_weight(l, a, CPU_NAME(gemm_cpu));
}
