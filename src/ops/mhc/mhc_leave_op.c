/* Checks, descriptors, test samples and bench shapes of the last boundary; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_leave_int.h"

/* What all devices keep of the gates. */
static int gates_check(const char *op, const struct tensor *stat, const struct tensor *coef, enum dtype wide, int64_t rows, int64_t n, struct err *e)
{
    CHECK_T(op, "stat", stat, wide, 2, rows, n + 2);
    CHECK_T(op, "coef", coef, wide, 2, rows, n);
    return ST_OK;
}

int mhc_leave_fwd_check(const struct mhc_leave_fwd_args *a, struct err *e)
{
    const char *op = "mhc_leave_fwd";
    enum dtype real = a->y.dtype, wide = wide_of(real);
    int64_t n = a->rule.streams;
    if (n < 2 || n > MHC_MAX_STREAMS)
        return err_set(e, ST_INVALID, "%s: %lld streams, expected 2 to %d", op, (long long)n, MHC_MAX_STREAMS);
    CHECK_T(op, "y", &a->y, real, 2, -1, -1);
    int64_t rows = a->y.dim[0], d = a->y.dim[1] / n;
    CHECK_T(op, "h", &a->h, real, 2, rows, d);
    CHECK_OPT(op, "gain", &a->gain, wide, 1, d);
    TRY(gates_check(op, &a->stat, &a->coef, wide, rows, n, e));
    if (a->reuse)
        return ST_OK;
    CHECK_T(op, "coef_in", &a->coef_in, wide, 2, rows, mhc_logits(n));
    struct mhc_combine_fwd_args combine = leave_combine(a);
    struct mhc_contract_fwd_args contract = leave_contract(a, &a->h);
    int st = mhc_combine_fwd_check(&combine, e);
    if (st == ST_OK)
        st = mhc_contract_fwd_check(&contract, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

int mhc_leave_bwd_check(const struct mhc_leave_bwd_args *a, struct err *e)
{
    const char *op = "mhc_leave_bwd";
    enum dtype real = a->dx.dtype, wide = wide_of(real);
    int64_t n = a->rule.streams;
    if (n < 2 || n > MHC_MAX_STREAMS)
        return err_set(e, ST_INVALID, "%s: %lld streams, expected 2 to %d", op, (long long)n, MHC_MAX_STREAMS);
    CHECK_T(op, "dx", &a->dx, real, 2, -1, -1);
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1], d = k / n;
    CHECK_T(op, "dh", &a->dh, real, 2, rows, d);
    CHECK_T(op, "y", &a->y, real, 2, rows, k);
    CHECK_T(op, "coef_in", &a->coef_in, wide, 2, rows, mhc_logits(n));
    CHECK_T(op, "dcoef_in", &a->dcoef_in, wide, 2, rows, mhc_logits(n));
    CHECK_OPT(op, "gain", &a->gain, wide, 1, d);
    CHECK_OPT(op, "dgain", &a->dgain, wide, 1, d);
    if (present(&a->gain) != present(&a->dgain))
        return err_set(e, ST_INVALID, "%s: dgain and gain must be given together or not at all", op);
    TRY(gates_check(op, &a->stat, &a->coef, wide, rows, n, e));
    struct mhc_contract_bwd_args contract = leave_contract_bwd(a);
    struct mhc_combine_bwd_args combine = leave_combine_bwd(a);
    int st = mhc_contract_bwd_check(&contract, e);
    if (st == ST_OK)
        st = mhc_combine_bwd_check(&combine, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------------------------------- */

static double streams_of(const struct op_call *c) { return op_attr(c, "streams"); }

static const struct op_arg mhc_leave_fwd_arg_list[] = {IN(x), IN(f), WIN(coef_in), INFO, WIN(w), WIN(base), WIN(scale), WOPT(gain),
                                                       MADE(y), WMADE(stat), WMADE(coef), OUT(h), WORK};
static const struct op_attr mhc_leave_fwd_attrs[] = {MHC_RULE_ATTRS, MHC_DROP_ATTRS, {.name = "primitive", .value = 0}, {.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}};
static struct mhc_leave_fwd_args mhc_leave_fwd_pack(const struct op_call *c)
{
    return (struct mhc_leave_fwd_args){.x = T(x), .f = T(f), .coef_in = T(coef_in), .w = T(w), .base = T(base), .scale = T(scale), .gain = T(gain),
                                       .y = T(y), .stat = T(stat), .coef = T(coef), .h = T(h), .work = T(work), .rule = mhc_pack_rule(c),
                                       .drop = mhc_pack_drop(c, mhc_arg(c, "info")), .eps = op_attr(c, "eps"), .zero_centered = FLAG(zero_centered)};
}
MHC_FUNCTIONS(mhc_leave_fwd, "KCNiTgsvKqnC.", 4 * streams_of(c) + 8)
MHC_INFER_WORK(mhc_leave_fwd, "KCNiTgsvKqnC.")

static const struct op_arg mhc_leave_bwd_arg_list[] = {IN(dh), WIN(stat), WIN(w), WIN(base), WIN(scale), WOPT(gain), IN(x), IN(f), WIN(coef_in), INFO,
                                                       OPT(y) /* made from those */, WIN(coef) /* and this from stat */, OUT(dx), OUT(df),
                                                       WOUT(dcoef_in), WOOUT(dgain), WOUT(dw), WOUT(dbase), WOUT(dscale), WORK};
static const struct op_attr mhc_leave_bwd_attrs[] = {MHC_RULE_ATTRS, MHC_DROP_ATTRS, {.name = "primitive", .value = 0}, {.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}, {.name = "acc_params", .value = 0}, {.name = "acc_dgain", .value = 0}};
static struct mhc_leave_bwd_args mhc_leave_bwd_pack(const struct op_call *c)
{
    return (struct mhc_leave_bwd_args){.dh = T(dh), .y = T(y), .stat = T(stat), .coef = T(coef), .gain = T(gain), .w = T(w), .base = T(base), .scale = T(scale),
                                       .x = T(x), .f = T(f), .coef_in = T(coef_in), .dx = T(dx), .df = T(df), .dcoef_in = T(dcoef_in), .dgain = T(dgain),
                                       .dw = T(dw), .dbase = T(dbase), .dscale = T(dscale), .work = T(work), .rule = mhc_pack_rule(c),
                                       .drop = mhc_pack_drop(c, mhc_arg(c, "info")), .eps = op_attr(c, "eps"), .zero_centered = FLAG(zero_centered),
                                       .acc_params = FLAG(acc_params), .acc_dgain = FLAG(acc_dgain)};
}
MHC_FUNCTIONS(mhc_leave_bwd, "CqTgsvKCNiKnKCNvTgs.", 8 * streams_of(c) + 20)
MHC_INFER_WORK(mhc_leave_bwd, "CqTgsvKCNiKnKCNvTgs.")

static const struct op_sample samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=17 d=33 streams=3 no_gain=1 no_dgain=1"},
    {"rows=33 d=20 streams=8 strided=1 zero_centered=1"},
    {"rows=70 d=16 eps=1e-3 p=0.25 seq=5"},
    {"rows=66 d=64 profile=1"},
    {"rows=37 d=256 gpu=1"},
    {"rows=33 d=1024 eps=1e-2 zero_centered=1 gpu=1"},
    {"rows=600 d=2048 gpu=1"},
    {"rows=21 d=512 no_gain=1 no_dgain=1 p=0.25 seq=5 gpu=1"},
    {"rows=37 d=256 primitive=1 gpu=1"},
    /* backward only */
    {"rows=401 d=5 acc_params=1 acc_dgain=1"},
    {"rows=0 d=8 acc_params=1 acc_dgain=1"},
    {"rows=300 d=256 acc_params=1 acc_dgain=1 gpu=1"},
};
enum { BACKWARD_ONLY = 3 };
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=16384 d=2048 gpu=1"}};

/* In bf16 the streams are rounded before they are projected, as in mhc_boundary_fwd; backward what is left of them and its gradient, before sums that cancel. */
MHC_DESC_ROUNDED(mhc_leave_fwd, "the last mHC boundary: combine, contract by learned gates, norm", "mhc_leave_bwd", 2e-5, 2e-2, samples,
                 countof(samples) - BACKWARD_ONLY, bench);
MHC_DESC_ROUNDED(mhc_leave_bwd, "gradients of mhc_leave_fwd, those of its parameters included", NULL, 5e-5, 1e-2, samples, countof(samples), bench);
