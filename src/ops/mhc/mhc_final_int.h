/* The last boundary as a chain of primitives, and what its versions share; private to ops/mhc/mhc_final*. A version
 * defines OP(name), its function of an op, and WORK_OF(op, args), the bytes of scratch that one needs, and includes
 * this. It also defines HOST_CHAIN, if it is nothing but this chain, on tensors that the host can read; or TAKE_RSTD(l,
 * a, rstd), which copies the norm's 1 / rms out of stat. */
#ifndef BRAID_OPS_MHC_FINAL_INT_H
#define BRAID_OPS_MHC_FINAL_INT_H

#include "ops/check.h"
#include "ops/mhc/mhc.h"
#include "ops/op.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>

/* Its steps as calls of other ops. one: what is left of the streams, [rows, C]. In the backward pass its gradient has
 * the place of df, and that of the streams the place of dx. */
static inline struct mhc_combine_fwd_args final_combine(const struct mhc_final_fwd_args *a)
{
    int64_t n = a->rule.streams;
    struct mhc_combine_fwd_args c = {.x = a->x,
                                     .f = a->f,
                                     .post = tensor_cols(&a->coef_in, n, n),
                                     .res = tensor_cols(&a->coef_in, 2 * n, n * n),
                                     .y = a->y,
                                     .rule = a->rule,
                                     .drop = a->drop};
    return c;
}
static inline struct mhc_contract_fwd_args final_contract(const struct mhc_final_fwd_args *a, const struct tensor *one)
{
    int64_t n = a->rule.streams;
    struct mhc_contract_fwd_args c = {.x = a->y,
                                      .w = a->w,
                                      .base = a->base,
                                      .scale = a->scale,
                                      .y = *one,
                                      .m = tensor_cols(&a->stat, 0, n),
                                      .rstd = tensor_cols(&a->stat, n, 1),
                                      .eps = a->eps};
    return c;
}
/* Learned gates of one row. */
static inline double final_gate(const struct tensor *stat, const struct tensor *base, const struct tensor *scale,
                                double eps, int64_t row, int64_t i)
{
    int64_t n = base->dim[0], at = row * (n + 2);
    double z = tensor_get(stat, at + i) * tensor_get(stat, at + n) * tensor_get(scale, 0) + tensor_get(base, i);
    return 1 / (1 + exp(-z)) + eps;
}

/* The next part of scratch. */
static inline struct tensor final_part(const struct tensor *work, int64_t *used, enum dtype type, int64_t rows,
                                       int64_t cols)
{
    struct tensor t = tensor_2d(work->data ? (char *)work->data + *used : NULL, type, rows, cols);
    *used += round_up(tensor_bytes(&t), 64);
    return t;
}
#ifdef OP

struct final_scratch {
    struct tensor one, rstd, norm, contract, combine; /* the last three: scratch of those ops */
};

#ifdef HOST_CHAIN

#define TAKE_RSTD take_rstd
static int take_rstd(struct lane *l, const struct mhc_final_bwd_args *a, const struct tensor *rstd)
{
    (void)l;
    for (int64_t r = 0, n = a->rule.streams; r < a->dx.dim[0]; r++)
        tensor_set(rstd, r, tensor_get(&a->stat, r * (n + 2) + n + 1));
    return ST_OK;
}

static int64_t divide_fwd(const struct mhc_final_fwd_args *a, struct final_scratch *s)
{
    int64_t rows = a->y.dim[0], d = a->y.dim[1] / a->rule.streams, used = 0;
    s->one = final_part(&a->work, &used, a->y.dtype, rows, d);
    s->rstd = final_part(&a->work, &used, a->y.dtype, 1, rows);
    s->rstd = tensor_1d(s->rstd.data, a->y.dtype, rows);
    return used;
}

int64_t OP(mhc_final_fwd_work)(const struct mhc_final_fwd_args *a)
{
    struct final_scratch s;
    return divide_fwd(a, &s);
}

int OP(mhc_final_fwd)(struct lane *l, const struct mhc_final_fwd_args *a)
{
    struct final_scratch s;
    TRY(mhc_final_fwd_check(a, l->err));
    TRY(check_work("mhc_final_fwd", &a->work, divide_fwd(a, &s), l->err));
    int64_t rows = a->y.dim[0], n = a->rule.streams;
    if (rows == 0)
        return ST_OK;
    if (!a->reuse) {
        struct mhc_combine_fwd_args combine = final_combine(a);
        struct mhc_contract_fwd_args contract = final_contract(a, &s.one);
        TRY(OP(mhc_combine_fwd)(l, &combine));
        TRY(OP(mhc_contract_fwd)(l, &contract));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < n; i++)
                tensor_set(&a->coef, r * n + i, final_gate(&a->stat, &a->base, &a->scale, a->eps, r, i));
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

#endif

/* The calls of the backward pass; work may be NULL. */
struct final_calls {
    struct rmsnorm_bwd_args norm;
    struct mhc_contract_bwd_args contract;
    struct mhc_combine_bwd_args combine;
};
static struct final_calls final_calls_of(const struct mhc_final_bwd_args *a, const struct final_scratch *s)
{
    int64_t n = a->rule.streams;
    struct final_calls b = {.norm = {.dy = a->dh,
                                     .x = s->one,
                                     .w = a->gain,
                                     .rstd = s->rstd,
                                     .dx = a->df,
                                     .dw = a->dgain,
                                     .acc_dw = a->acc_dgain,
                                     .work = s->norm,
                                     .zero_centered = a->zero_centered},
                            .contract = {.dy = a->df,
                                         .x = a->y,
                                         .w = a->w,
                                         .base = a->base,
                                         .scale = a->scale,
                                         .m = tensor_cols(&a->stat, 0, n),
                                         .rstd = tensor_cols(&a->stat, n, 1),
                                         .dx = a->dx,
                                         .dw = a->dw,
                                         .acc_dw = mhc_final_adds(a),
                                         .dbase = a->dbase,
                                         .dscale = a->dscale,
                                         .work = s->contract,
                                         .eps = a->eps},
                            .combine = {.dy = a->dx,
                                        .x = a->x,
                                        .f = a->f,
                                        .post = tensor_cols(&a->coef_in, n, n),
                                        .res = tensor_cols(&a->coef_in, 2 * n, n * n),
                                        .dx = a->dx,
                                        .df = a->df,
                                        .dpre = tensor_cols(&a->dcoef_in, 0, n),
                                        .dpost = tensor_cols(&a->dcoef_in, n, n),
                                        .dres = tensor_cols(&a->dcoef_in, 2 * n, n * n),
                                        .work = s->combine,
                                        .rule = a->rule,
                                        .drop = a->drop}};
    return b;
}

static int64_t divide_chain(const struct mhc_final_bwd_args *a, struct final_scratch *s)
{
    static const struct final_scratch nothing = {0};
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1] / a->rule.streams, used = 0;
    *s = nothing;
    s->one = final_part(&a->work, &used, a->dx.dtype, rows, d);
    s->rstd = final_part(&a->work, &used, a->stat.dtype, 1, rows);
    s->rstd = tensor_1d(s->rstd.data, a->stat.dtype, rows);
    struct final_calls b = final_calls_of(a, s);
    struct tensor *part[] = {&s->norm, &s->contract, &s->combine};
    int64_t bytes[] = {WORK_OF(rmsnorm_bwd, &b.norm), WORK_OF(mhc_contract_bwd, &b.contract),
                       WORK_OF(mhc_combine_bwd, &b.combine)};
    for (int i = 0; i < 3; i++) {
        *part[i] = final_part(&a->work, &used, DT_U8, 1, bytes[i]);
        *part[i] = tensor_1d(part[i]->data, DT_U8, bytes[i]);
    }
    return used;
}

static int final_by_chain(struct lane *l, const struct mhc_final_bwd_args *a)
{
    struct final_scratch s;
    divide_chain(a, &s);
    struct mhc_aggregate_fwd_args again = {.x = a->y, .pre = a->coef, .a = s.one};
    struct final_calls b = final_calls_of(a, &s);
    TRY(TAKE_RSTD(l, a, &s.rstd));
    TRY(OP(mhc_aggregate_fwd)(l, &again));
    TRY(OP(rmsnorm_bwd)(l, &b.norm));
    TRY(OP(mhc_contract_bwd)(l, &b.contract));
    return OP(mhc_combine_bwd)(l, &b.combine);
}

#ifdef HOST_CHAIN

int64_t OP(mhc_final_bwd_work)(const struct mhc_final_bwd_args *a)
{
    struct final_scratch s;
    return divide_chain(a, &s);
}

int OP(mhc_final_bwd)(struct lane *l, const struct mhc_final_bwd_args *a)
{
    TRY(mhc_final_bwd_check(a, l->err));
    TRY(check_work("mhc_final_bwd", &a->work, OP(mhc_final_bwd_work)(a), l->err));
    return final_by_chain(l, a);
}

#endif

#endif

#endif
