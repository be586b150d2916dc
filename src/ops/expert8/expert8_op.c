/* expert8: argument checks, the composition, cost, descriptors, test samples and bench shapes; see expert8.h. */
#include "ops/expert8/expert8_int.h"
#include "ops/act/act_desc.h"
#include "ops/opshape.h"
#include "tensor/f8.h"

#include <math.h>
#include <string.h>

int expert8_up_check(const struct expert8_up_args *a, struct err *e)
{
    enum dtype wide = a->xs.dtype, real = a->pre.dtype;
    TRY(gmm8_operands_check("expert8_up", &a->x, &a->xs, &a->w, &a->ws, &a->offset, wide, a->block, a->square, false,
                            e));
    int64_t rows = a->x.dim[0], experts = a->offset.dim[0] - 1, n = gmm8_rows(&a->w, &a->offset, false);
    CHECK_T("expert8_up", "pre", &a->pre, wide_of(real) == wide ? real : wide, 2, rows, n);
    CHECK_OPT("expert8_up", "bias", &a->bias, wide, 2, experts, n);
    CHECK_OPT("expert8_up", "prob", &a->prob, wide, 1, rows);
    TRY(f8_check("expert8_up", "q", &a->q, &a->qs, wide, a->block, false, e));
    CHECK_T("expert8_up", "q", &a->q, DT_F8_E4M3, 2, rows, -1);
    if (a->q.dim[1] * act_gate(a->rule.kind) != n)
        return err_set(e, ST_INVALID, "expert8_up: %lld columns of q for %lld of pre", (long long)a->q.dim[1],
                       (long long)n);
    struct tensor y = tensor_2d(a->pre.data, real, rows, a->q.dim[1]);
    TRY(act_fwd_check(&(struct act_fwd_args){.x = a->pre, .prob = a->prob, .y = y, .rule = a->rule}, e));
    return present(&a->bias) ? check_dense("expert8_up", "bias", &a->bias, e) : ST_OK;
}

int expert8_down_bwd_check(const struct expert8_down_bwd_args *a, struct err *e)
{
    enum dtype wide = a->dzs.dtype, real = a->pre.dtype;
    TRY(gmm8_operands_check("expert8_down_bwd", &a->dz, &a->dzs, &a->w, &a->ws, &a->offset, wide, a->block, a->square,
                            true, e));
    int64_t rows = a->dz.dim[0], f = a->w.dim[0], n = f * act_gate(a->rule.kind);
    CHECK_T("expert8_down_bwd", "pre", &a->pre, wide_of(real) == wide ? real : wide, 2, rows, n);
    CHECK_T("expert8_down_bwd", "dpre", &a->dpre, real, 2, rows, n);
    CHECK_OPT("expert8_down_bwd", "y", &a->y, real, 2, rows, f);
    struct tensor dy = tensor_2d(a->pre.data, real, rows, f);
    return act_bwd_check(
        &(struct act_bwd_args){
            .dy = dy, .x = a->pre, .prob = a->prob, .dx = a->dpre, .dprob = a->dprob, .rule = a->rule},
        e);
}

/* ---- the composition: values of the activation or of its gradient, then scratch of the parts - */

static int64_t values_bytes(int64_t rows, int64_t f, enum dtype real)
{
    return round_up(rows * f * (int64_t)dtype_bytes(real), DEV_ALIGN);
}
static struct tensor after(const struct tensor *work, int64_t at, int64_t bytes)
{
    return bytes > 0 ? tensor_1d((char *)work->data + at, DT_U8, bytes) : (struct tensor){0};
}

static struct gmm8_args up_product(const struct expert8_up_args *a)
{
    return (struct gmm8_args){.x = a->x,
                              .xs = a->xs,
                              .w = a->w,
                              .ws = a->ws,
                              .bias = a->bias,
                              .offset = a->offset,
                              .y = a->pre,
                              .block = a->block,
                              .square = a->square};
}
static struct quantise_args up_codes(const struct expert8_up_args *a)
{
    return (struct quantise_args){.x = {.dtype = a->pre.dtype}, .q = a->q, .qs = a->qs, .block = a->block};
}

int64_t expert8_up_work_by(const struct expert8_parts *p, const struct expert8_up_args *a)
{
    struct gmm8_args product = up_product(a);
    struct quantise_args codes = up_codes(a);
    int64_t product_work = p->gmm8_work != NULL ? p->gmm8_work(&product) : 0,
            codes_work = p->quantise_work != NULL ? p->quantise_work(&codes) : 0;
    return values_bytes(a->q.dim[0], a->q.dim[1], a->pre.dtype) + max_i64(product_work, codes_work);
}

int expert8_up_by(const struct expert8_parts *p, struct lane *l, const struct expert8_up_args *a)
{
    TRY(expert8_up_check(a, l->err));
    TRY(check_work("expert8_up", &a->work, expert8_up_work_by(p, a), l->err));
    int64_t rows = a->q.dim[0], f = a->q.dim[1], at = values_bytes(rows, f, a->pre.dtype);
    struct gmm8_args product = up_product(a);
    struct quantise_args codes = up_codes(a);
    struct tensor y = tensor_2d(a->work.data != NULL ? a->work.data : a->pre.data, a->pre.dtype, rows, f);
    product.work = after(&a->work, at, p->gmm8_work != NULL ? p->gmm8_work(&product) : 0);
    codes.work = after(&a->work, at, p->quantise_work != NULL ? p->quantise_work(&codes) : 0);
    codes.x = y;
    TRY(p->gmm8(l, &product));
    TRY(p->act_fwd(l, &(struct act_fwd_args){.x = a->pre, .prob = a->prob, .y = y, .rule = a->rule}));
    return p->quantise(l, &codes);
}

static struct gmm8_args down_product(const struct expert8_down_bwd_args *a, void *values)
{
    return (struct gmm8_args){.x = a->dz,
                              .xs = a->dzs,
                              .w = a->w,
                              .ws = a->ws,
                              .offset = a->offset,
                              .y = tensor_2d(values, a->pre.dtype, a->dz.dim[0], a->w.dim[0]),
                              .block = a->block,
                              .square = a->square,
                              .turned = true};
}

int64_t expert8_down_bwd_work_by(const struct expert8_parts *p, const struct expert8_down_bwd_args *a)
{
    struct gmm8_args product = down_product(a, NULL);
    return values_bytes(a->dz.dim[0], a->w.dim[0], a->pre.dtype) + (p->gmm8_work != NULL ? p->gmm8_work(&product) : 0);
}

int expert8_down_bwd_by(const struct expert8_parts *p, struct lane *l, const struct expert8_down_bwd_args *a)
{
    TRY(expert8_down_bwd_check(a, l->err));
    TRY(check_work("expert8_down_bwd", &a->work, expert8_down_bwd_work_by(p, a), l->err));
    struct gmm8_args product = down_product(a, a->work.data != NULL ? a->work.data : a->pre.data);
    product.work = after(&a->work, values_bytes(a->dz.dim[0], a->w.dim[0], a->pre.dtype),
                         p->gmm8_work != NULL ? p->gmm8_work(&product) : 0);
    TRY(p->gmm8(l, &product));
    if (present(&a->y)) /* before pre may become dpre */
        TRY(p->act_fwd(l, &(struct act_fwd_args){.x = a->pre, .prob = a->prob, .y = a->y, .rule = a->rule}));
    return p->act_bwd(
        l, &(struct act_bwd_args){
               .dy = product.y, .x = a->pre, .prob = a->prob, .dx = a->dpre, .dprob = a->dprob, .rule = a->rule});
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 11}, {"in", 9}, {"f", 13}, {"experts", 3}, {"tail", 0}};

static int64_t dim(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }
static struct tensor *arg(struct op_call *c, const char *name) { return &c->t[op_arg_index(c->desc, name)]; }
static int64_t gates(const struct op_call *c) { return act_gate((enum act_kind)op_attr(c, "kind")); }

static void up_shapes(struct op_call *c)
{
    int64_t rows = dim(c, 0), in = dim(c, 1), n = gates(c) * dim(c, 2), experts = dim(c, 3),
            block = (int64_t)op_attr(c, "block");
    *arg(c, "x") = tensor_2d(NULL, DT_NONE, rows, in);
    *arg(c, "xs") = f8_scales(DT_NONE, rows, in, block, false);
    *arg(c, "w") = tensor_2d(NULL, DT_NONE, experts * n, in);
    *arg(c, "ws") = f8_scales(DT_NONE, experts * n, in, block, op_attr(c, "square") != 0);
    *arg(c, "bias") = tensor_2d(NULL, DT_NONE, experts, n);
    *arg(c, "prob") = tensor_1d(NULL, DT_NONE, rows);
    *arg(c, "offset") = tensor_1d(NULL, DT_NONE, experts + 1);
}
static void down_shapes(struct op_call *c)
{
    int64_t rows = dim(c, 0), out = dim(c, 1), f = dim(c, 2), experts = dim(c, 3), block = (int64_t)op_attr(c, "block");
    *arg(c, "dz") = tensor_2d(NULL, DT_NONE, rows, out);
    *arg(c, "dzs") = f8_scales(DT_NONE, rows, out, block, false);
    *arg(c, "w") = tensor_2d(NULL, DT_NONE, f, experts * out);
    *arg(c, "ws") = f8_scales(DT_NONE, f, experts * out, block, op_attr(c, "square") != 0);
    *arg(c, "pre") = tensor_2d(NULL, DT_NONE, rows, gates(c) * f);
    *arg(c, "prob") = tensor_1d(NULL, DT_NONE, rows);
    *arg(c, "offset") = tensor_1d(NULL, DT_NONE, experts + 1);
}

static int up_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = arg(c, "x"), *w = arg(c, "w"), *offset = arg(c, "offset");
    if (x->rank != 2 || w->rank != 2 || offset->rank != 1 || offset->dim[0] < 2)
        return err_set(e, ST_INVALID, "expert8_up: x and w must have rank 2, offset rank 1 with two entries or more");
    int64_t n = gmm8_rows(w, offset, false), f = n / gates(c);
    *arg(c, "pre") = tensor_2d(NULL, ops->real, x->dim[0], n);
    *arg(c, "q") = tensor_2d(NULL, DT_F8_E4M3, x->dim[0], f);
    *arg(c, "qs") = f8_scales(wide_of(ops->real), x->dim[0], f, (int64_t)op_attr(c, "block"), false);
    return ST_OK;
}
static int down_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *pre = arg(c, "pre"), *w = arg(c, "w");
    if (pre->rank != 2 || w->rank != 2)
        return err_set(e, ST_INVALID, "expert8_down_bwd: pre and w must have rank 2");
    if (op_attr(c, "e5m2") != 0)
        arg(c, "dz")->dtype = DT_F8_E5M2;
    *arg(c, "dpre") = *pre;
    *arg(c, "y") = tensor_2d(NULL, ops->real, pre->dim[0], w->dim[0]);
    if (arg(c, "prob")->rank > 0)
        *arg(c, "dprob") = tensor_1d(NULL, wide_of(ops->real), pre->dim[0]);
    return ST_OK;
}

/* Codes of values round 1, scales that are powers of two: those of x and w together keep sums round 1. */
static bool fill(struct op_call *c, int which, struct tensor *host, uint64_t key)
{
    const char *name = c->desc->args[which].name;
    bool scale = strcmp(name, "xs") == 0 || strcmp(name, "dzs") == 0 || strcmp(name, "ws") == 0,
         codes = dtype_is_f8(host->dtype);
    int least = strcmp(name, "ws") == 0 ? -6 : -2;
    if (op_arg_is(c, which, "offset"))
        op_fill_ranges(host, dim(c, 0) - dim(c, 4), false, key);
    else if (op_arg_is(c, which, "pre"))
        act_fill_inputs(c, 0.02, host, key);
    for (int64_t i = 0, all = tensor_elems(host); (scale || codes) && i < all; i++)
        tensor_set(host, i,
                   scale ? ldexp(1, (int)rng_below(key, (uint64_t)i, 3) + least) : 2 * rng_normal(key, (uint64_t)i));
    return scale || codes || op_arg_is(c, which, "offset") || op_arg_is(c, which, "pre");
}

static void up_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(expert8_up, a, c);
    double pre = (double)tensor_elems(&a->pre);
    *out = (struct op_cost){.flops = 2 * pre * (double)a->x.dim[1],
                            .bytes = (double)tensor_elems(&a->x) + (double)tensor_elems(&a->w) +
                                     (double)tensor_bytes(&a->pre) + (double)tensor_elems(&a->q)};
}
static void down_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(expert8_down_bwd, a, c);
    *out = (struct op_cost){.flops = 2 * (double)tensor_elems(&a->dz) * (double)a->w.dim[0],
                            .bytes = (double)tensor_elems(&a->dz) + (double)tensor_elems(&a->w) +
                                     2 * (double)tensor_bytes(&a->pre) + (double)tensor_bytes(&a->y)};
}

/* tailed: added to samples with rows past offset[E], whose y depends on pre there; alone: to those without a bias. */
#define SAMPLES(tailed, alone)                                                                                         \
    {"rows=11"}, {"rows=0"}, {"rows=30 experts=7 tail=6 clamp=1.5 block=32 square=0" tailed},                          \
        {"rows=20 experts=5 kind=1" alone}, {"rows=24 no_prob=1 kind=2 clamp=2 shift=1 alpha=1.3" alone},              \
        {"rows=40 f=24 interleave=8 block=0 square=0"}, /* sizes of the fast kernel from here */                       \
        {"rows=144 experts=1 in=128 f=128"}, {"rows=36 experts=3 in=128 f=128"},                                       \
        {"rows=272 experts=5 in=128 f=128 tail=9" tailed}, {"rows=192 experts=4 in=128 f=384 kind=5" alone},           \
        {"rows=144 experts=3 in=256 f=128 kind=2 clamp=2 shift=1" alone},                                              \
        {"rows=48 experts=3 in=128 f=128 tail=48" tailed},                                                             \
    {                                                                                                                  \
        "rows=784 experts=9 in=512 f=384 tail=16 gpu=1" tailed                                                         \
    }
static const struct op_sample up_samples[] = {SAMPLES("", " no_bias=1")};
static const struct op_sample down_samples[] = {
    SAMPLES(" no_y=1", ""),
    {"rows=80 experts=2 in=256 f=384 e5m2=1"},
    {"rows=160 experts=3 in=128 f=256 block=0 square=0"},
};
static const struct op_sample bench[] = {
    {"rows=2048 in=256 f=256 experts=4"},
    {"rows=131072 in=2048 f=1024 experts=64 gpu=1"},
    {"rows=131072 in=2048 f=768 experts=128 gpu=1"},
    {"rows=32768 in=7168 f=2048 experts=4 gpu=1"},
};

OP_TABLES_WITH(expert8_up, EXPERT8_UP_FIELDS, , ACT_RULE_ATTRS(expert8_up, "shift"));
const struct op_desc expert8_up_desc = {
    OP_IS(expert8_up),     .summary = "first matrix of experts in FP8, activation and probability, as codes",
    OP_LIST(dims, dims),   .sample_shapes = up_shapes,
    .infer = up_infer,     .sample_fill = fill,
    .cost = up_cost,       .tolerance = 0.075, /* a value next to a tie of two codes falls to either side: 32 of 448 */
    .narrow = 0.03,        OP_LIST(samples, up_samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(expert8_down_bwd, EXPERT8_DOWN_BWD_FIELDS, ,
               ACT_RULE_ATTRS(expert8_down_bwd, "shift") OP_ATTR_EXTRA("e5m2", 0));
const struct op_desc expert8_down_bwd_desc = {
    OP_IS(expert8_down_bwd),
    .summary = "gradients through the second matrix of experts in FP8 and the activation",
    OP_LIST(dims, dims),
    .sample_shapes = down_shapes,
    .infer = down_infer,
    .sample_fill = fill,
    .cost = down_cost,
    .tolerance = 3e-5,
    .narrow = 6e-3, /* the composition rounds the gradient of the activation's output */
    OP_LIST(samples, down_samples),
    OP_LIST(bench, bench),
};
