/* headmm, reference; see headmm.h. */
#include "ops/headmm/headmm_int.h"
#include "ops/ops_ref_int.h"

int headmm_fwd_ref(struct lane *l, const struct headmm_fwd_args *a)
{
    TRY(headmm_fwd_check(a, l->err));
    return headmm_forward(l, a, gemm_ref);
}

int headmm_bwd_ref(struct lane *l, const struct headmm_bwd_args *a)
{
    TRY(headmm_bwd_check(a, l->err));
    return headmm_backward(l, a, gemm_ref);
}

int headmm_dw_ref(struct lane *l, const struct headmm_dw_args *a)
{
    TRY(headmm_dw_check(a, l->err));
    return headmm_weight(l, a, gemm_ref);
}
