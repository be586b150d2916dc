/* rmsnorm, CUDA version; see rmsnorm.h. The kernels are those of the residual joint (ops/cuda/norm.cuh) with nothing to
 * add. */
#include "ops/cuda/norm.cuh"
#include "ops/rmsnorm/rmsnorm.h"

extern "C" int rmsnorm_fwd_cuda(struct lane *l, const struct rmsnorm_fwd_args *a)
{
    TRY(rmsnorm_fwd_check(a, l->err));
    struct norm_fwd n = {};
    n.x = a->x;
    n.y = a->y;
    n.w = (const float *)a->w.data;
    n.rstd = (float *)a->rstd.data;
    n.rows = rows_of(&a->x);
    n.d = cols_of(&a->x);
    n.eps = (float)a->eps;
    n.one = a->zero_centered ? 1.0f : 0.0f;
    BY_REAL(a->x.dtype, T, return norm_fwd_run<T>(l, &n));
}

extern "C" int64_t rmsnorm_bwd_work_cuda(const struct rmsnorm_bwd_args *a)
{
    return norm_blocks(rows_of(&a->x)) * cols_of(&a->x) * (int64_t)sizeof(float);
}

extern "C" int rmsnorm_bwd_cuda(struct lane *l, const struct rmsnorm_bwd_args *a)
{
    TRY(rmsnorm_bwd_check(a, l->err));
    bool sums = present(&a->dw);
    if (sums)
        TRY(check_work("rmsnorm_bwd", &a->work, rmsnorm_bwd_work_cuda(a), l->err));
    struct norm_bwd n = {};
    n.dy = a->dy;
    n.s = a->x;
    n.ds = a->dres;
    n.dx = a->dx;
    n.w = (const float *)a->w.data;
    n.rstd = (const float *)a->rstd.data;
    n.dw = sums ? (float *)a->work.data : NULL;
    n.rows = rows_of(&a->x);
    n.d = cols_of(&a->x);
    n.rows_per_block = norm_rows_per_block(n.rows);
    n.one = a->zero_centered ? 1.0f : 0.0f;
    if (a->x.dtype == DT_BF16)
        TRY(norm_bwd_run<bf16>(l, &n));
    else
        TRY(norm_bwd_run<float>(l, &n));
    return sums ? add_partials(l, n.dw, norm_blocks(n.rows), n.d, (float *)a->dw.data, n.d, 0, a->acc_dw) : ST_OK;
}
