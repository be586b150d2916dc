/* addnorm, CUDA version; see addnorm.h. The kernels are in ops/cuda/norm.cuh. */
#include "ops/cuda/norm.cuh"
#include "ops/addnorm/addnorm.h"

/* A wide stream beside what layers read and write. */
static bool is_mixed(const struct tensor *stream, const struct tensor *a, const struct tensor *b)
{
    return (present(a) && a->dtype != stream->dtype) || (present(b) && b->dtype != stream->dtype);
}

extern "C" int addnorm_fwd_cuda(struct lane *l, const struct addnorm_fwd_args *a)
{
    TRY(addnorm_fwd_check(a, l->err));
    struct norm_fwd n = {};
    n.x = a->x;
    n.f = a->f;
    n.s = a->s;
    n.y = a->y;
    n.w = (const float *)a->w.data;
    n.bias = (const float *)a->bias.data;
    n.rstd = (float *)a->rstd.data;
    n.rows = a->x.dim[0];
    n.d = a->x.dim[1];
    n.eps = (float)a->eps;
    n.one = a->zero_centered ? 1.0f : 0.0f;
    n.drop = drop_rule_of(&a->drop);
    if (is_mixed(&a->x, &a->y, &a->f))
        return norm_fwd_run<bf16, float>(l, &n);
    BY_REAL(a->x.dtype, T, return norm_fwd_run<T>(l, &n));
}

extern "C" int64_t addnorm_bwd_work_cuda(const struct addnorm_bwd_args *a)
{
    int64_t sums = (a->dw.rank > 0) + (a->dbias.rank > 0);
    return sums * norm_blocks(a->dx.dim[0]) * a->dx.dim[1] * (int64_t)sizeof(float);
}

extern "C" int addnorm_bwd_cuda(struct lane *l, const struct addnorm_bwd_args *a)
{
    TRY(addnorm_bwd_check(a, l->err));
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1], blocks = norm_blocks(rows);
    bool sums_w = present(&a->dw), sums_b = present(&a->dbias);
    TRY(check_work("addnorm_bwd", &a->work, (sums_w + sums_b) * blocks * d * (int64_t)sizeof(float), l->err));
    float *work = (float *)a->work.data;
    struct norm_bwd n = {};
    n.dy = a->dy;
    n.s = a->s;
    n.ds = a->ds;
    n.dx = a->dx;
    n.df = a->df;
    n.w = (const float *)a->w.data;
    n.rstd = (const float *)a->rstd.data;
    n.dw = sums_w ? work : NULL;
    n.dbias = sums_b ? work + (sums_w ? blocks * d : 0) : NULL;
    n.rows = rows;
    n.d = d;
    n.rows_per_block = norm_rows_per_block(rows);
    n.one = a->zero_centered ? 1.0f : 0.0f;
    n.drop = drop_rule_of(&a->drop);
    if (is_mixed(&a->dx, &a->dy, &a->df))
        TRY((norm_bwd_run<bf16, float>(l, &n)));
    else if (a->dx.dtype == DT_BF16)
        TRY(norm_bwd_run<bf16>(l, &n));
    else
        TRY(norm_bwd_run<float>(l, &n));
    if (sums_w)
        TRY(add_partials(l, n.dw, blocks, d, (float *)a->dw.data, d, 0, a->acc_dw));
    return sums_b ? add_partials(l, n.dbias, blocks, d, (float *)a->dbias.data, d, 0, a->acc_dbias) : ST_OK;
}
