/* The last boundary as a chain of primitives, and what its versions share; private to ops/mhc/mhc_final*. A host
 * version defines OP(name), its function of an op, and WORK_OF(op, args), the bytes of scratch that one needs, and
 * includes this. */
#ifndef BRAID_OPS_MHC_LEAVE_INT_H
#define BRAID_OPS_MHC_LEAVE_INT_H

#include "ops/check.h"
#include "ops/mhc/mhc.h"
#include "ops/op.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>

/* Its steps as calls of other ops. one: what is left of the streams, [rows, C]. In the backward pass its gradient has
 * the place of df, and that of the streams the place of dx. */
static inline struct mhc_combine_fwd_args leave_combine(const struct mhc_final_fwd_args *a)
{
    int64_t n = a->rule.streams;
    return (struct mhc_combine_fwd_args){.x = a->x,
                                         .f = a->f,
                                         .post = tensor_cols(&a->coef_in, n, n),
                                         .res = tensor_cols(&a->coef_in, 2 * n, n * n),
                                         .y = a->y,
                                         .rule = a->rule,
                                         .drop = a->drop};
}
static inline struct mhc_contract_fwd_args leave_contract(const struct mhc_final_fwd_args *a, const struct tensor *one)
{
    int64_t n = a->rule.streams;
    return (struct mhc_contract_fwd_args){.x = a->y,
                                          .w = a->w,
                                          .base = a->base,
                                          .scale = a->scale,
                                          .y = *one,
                                          .m = tensor_cols(&a->stat, 0, n),
                                          .rstd = tensor_cols(&a->stat, n, 1),
                                          .eps = a->eps};
}
static inline struct mhc_contract_bwd_args leave_contract_bwd(const struct mhc_final_bwd_args *a)
{
    int64_t n = a->rule.streams;
    return (struct mhc_contract_bwd_args){.dy = a->df,
                                          .x = a->y,
                                          .w = a->w,
                                          .base = a->base,
                                          .scale = a->scale,
                                          .m = tensor_cols(&a->stat, 0, n),
                                          .rstd = tensor_cols(&a->stat, n, 1),
                                          .dx = a->dx,
                                          .dw = a->dw,
                                          .dbase = a->dbase,
                                          .dscale = a->dscale,
                                          .eps = a->eps,
                                          .acc_dw = mhc_final_adds(a)};
}
static inline struct mhc_combine_bwd_args leave_combine_bwd(const struct mhc_final_bwd_args *a)
{
    int64_t n = a->rule.streams;
    return (struct mhc_combine_bwd_args){.dy = a->dx,
                                         .x = a->x,
                                         .f = a->f,
                                         .post = tensor_cols(&a->coef_in, n, n),
                                         .res = tensor_cols(&a->coef_in, 2 * n, n * n),
                                         .dx = a->dx,
                                         .df = a->df,
                                         .dpre = tensor_cols(&a->dcoef_in, 0, n),
                                         .dpost = tensor_cols(&a->dcoef_in, n, n),
                                         .dres = tensor_cols(&a->dcoef_in, 2 * n, n * n),
                                         .rule = a->rule,
                                         .drop = a->drop};
}
/* Learned gates of one row. */
static inline double leave_gate(const struct tensor *stat, const struct tensor *base, const struct tensor *scale,
                                double eps, int64_t row, int64_t i)
{
    int64_t n = base->dim[0], at = row * (n + 2);
    double z = tensor_get(stat, at + i) * tensor_get(stat, at + n) * tensor_get(scale, 0) + tensor_get(base, i);
    return 1 / (1 + exp(-z)) + eps;
}

/* The next part of scratch. */
static inline struct tensor leave_part(const struct tensor *work, int64_t *used, enum dtype type, int64_t rows,
                                       int64_t cols)
{
    struct tensor t = tensor_2d(work->data ? (char *)work->data + *used : NULL, type, rows, cols);
    *used += round_up(tensor_bytes(&t), 64);
    return t;
}
struct leave_scratch {
    struct tensor one, rstd, norm, contract, combine; /* the last three: scratch of those ops */
};

#ifdef OP

static int64_t divide_fwd(const struct mhc_final_fwd_args *a, struct leave_scratch *s)
{
    int64_t rows = a->y.dim[0], d = a->y.dim[1] / a->rule.streams, used = 0;
    s->one = leave_part(&a->work, &used, a->y.dtype, rows, d);
    s->rstd = leave_part(&a->work, &used, a->y.dtype, 1, rows);
    s->rstd = tensor_1d(s->rstd.data, a->y.dtype, rows);
    return used;
}

int64_t OP(mhc_final_fwd_work)(const struct mhc_final_fwd_args *a)
{
    struct leave_scratch s;
    return divide_fwd(a, &s);
}

int OP(mhc_final_fwd)(struct lane *l, const struct mhc_final_fwd_args *a)
{
    struct leave_scratch s;
    TRY(mhc_final_fwd_check(a, l->err));
    TRY(check_work("mhc_final_fwd", &a->work, divide_fwd(a, &s), l->err));
    int64_t rows = a->y.dim[0], n = a->rule.streams;
    if (rows == 0)
        return ST_OK;
    if (!a->reuse) {
        struct mhc_combine_fwd_args combine = leave_combine(a);
        struct mhc_contract_fwd_args contract = leave_contract(a, &s.one);
        TRY(OP(mhc_combine_fwd)(l, &combine));
        TRY(OP(mhc_contract_fwd)(l, &contract));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++)
                tensor_set(&a->coef, r * n + i, leave_gate(&a->stat, &a->base, &a->scale, a->eps, r, i));
    }
    struct mhc_aggregate_fwd_args aggregate = {.x = a->y, .pre = a->coef, .a = s.one};
    struct rmsnorm_fwd_args norm = {
        .x = s.one, .w = a->gain, .y = a->h, .rstd = s.rstd, .eps = a->eps, .zero_centered = a->zero_centered};
    TRY(OP(mhc_aggregate_fwd)(l, &aggregate));
    TRY(OP(rmsnorm_fwd)(l, &norm));
    for (int64_t r = 0; !a->reuse && r < rows; r++)
        tensor_set(&a->stat, r * (n + 2) + n + 1, tensor_get(&s.rstd, r));
    return ST_OK;
}

static struct rmsnorm_bwd_args norm_bwd(const struct mhc_final_bwd_args *a, const struct leave_scratch *s)
{
    return (struct rmsnorm_bwd_args){.dy = a->dh,
                                     .x = s->one,
                                     .w = a->gain,
                                     .rstd = s->rstd,
                                     .dx = a->df,
                                     .dw = a->dgain,
                                     .work = s->norm,
                                     .zero_centered = a->zero_centered,
                                     .acc_dw = a->acc_dgain};
}

static int64_t divide_bwd(const struct mhc_final_bwd_args *a, struct leave_scratch *s)
{
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1] / a->rule.streams, used = 0;
    *s = (struct leave_scratch){0};
    s->one = leave_part(&a->work, &used, a->dx.dtype, rows, d);
    s->rstd = leave_part(&a->work, &used, a->dx.dtype, 1, rows);
    s->rstd = tensor_1d(s->rstd.data, a->dx.dtype, rows);
    struct rmsnorm_bwd_args norm = norm_bwd(a, s);
    struct mhc_contract_bwd_args contract = leave_contract_bwd(a);
    struct mhc_combine_bwd_args combine = leave_combine_bwd(a);
    struct {
        struct tensor *t;
        int64_t bytes;
    } parts[] = {{&s->norm, WORK_OF(rmsnorm_bwd, &norm)},
                 {&s->contract, WORK_OF(mhc_contract_bwd, &contract)},
                 {&s->combine, WORK_OF(mhc_combine_bwd, &combine)}};
    for (int i = 0; i < countof(parts); i++) {
        *parts[i].t = leave_part(&a->work, &used, DT_U8, 1, parts[i].bytes);
        *parts[i].t = tensor_1d(parts[i].t->data, DT_U8, parts[i].bytes);
    }
    return used;
}

int64_t OP(mhc_final_bwd_work)(const struct mhc_final_bwd_args *a)
{
    struct leave_scratch s;
    return divide_bwd(a, &s);
}

int OP(mhc_final_bwd)(struct lane *l, const struct mhc_final_bwd_args *a)
{
    struct leave_scratch s;
    TRY(mhc_final_bwd_check(a, l->err));
    TRY(check_work("mhc_final_bwd", &a->work, divide_bwd(a, &s), l->err));
    int64_t rows = a->dx.dim[0], n = a->rule.streams;
    struct mhc_aggregate_fwd_args again = {.x = a->y, .pre = a->coef, .a = s.one};
    struct rmsnorm_bwd_args norm = norm_bwd(a, &s);
    struct mhc_contract_bwd_args contract = leave_contract_bwd(a);
    struct mhc_combine_bwd_args combine = leave_combine_bwd(a);
    contract.work = s.contract;
    combine.work = s.combine;
    for (int64_t r = 0; r < rows; r++)
        tensor_set(&s.rstd, r, tensor_get(&a->stat, r * (n + 2) + n + 1));
    TRY(OP(mhc_aggregate_fwd)(l, &again));
    TRY(OP(rmsnorm_bwd)(l, &norm));
    TRY(OP(mhc_contract_bwd)(l, &contract));
    return OP(mhc_combine_bwd)(l, &combine);
}

#endif

#endif
