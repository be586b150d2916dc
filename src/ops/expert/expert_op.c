/* expert: argument checks, the composition, cost, descriptors, test samples and bench shapes; see expert.h. */
#include "ops/expert/expert_int.h"
#include "ops/act/act_desc.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
#include "ops/opshape.h"

#include <math.h>
#include <string.h>

OP_CHECK(expert_up)

int expert_down_bwd_check(const struct expert_down_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&expert_down_bwd_desc, a, e));
    return check_work("expert_down_bwd", &a->work, expert_down_bwd_work_by(a), e);
}

/* The kernels know the sigmoid family with a gate in halves, and the squared relu. */
const char *expert_not_fused(const struct act_rule *r)
{
    if (r->kind == ACT_RELU2)
        return NULL;
    if (r->kind != ACT_SWIGLU && r->kind != ACT_QUICK_GEGLU)
        return "the fused kernels know swiglu, quick_geglu and relu2 (model.act)";
    return r->interleave == 0 ? NULL : "the fused kernels take gate and up rows in halves (model.glu_interleave = 0)";
}

/* ---- the composition ------------------------------------------------------------------------- */

int expert_up_by(const struct expert_parts *p, struct lane *l, const struct expert_up_args *a)
{
    TRY(expert_up_check(a, l->err));
    struct gmm_fwd_args product = {.x = a->x, .w = a->w, .bias = a->bias, .offset = a->offset, .y = a->pre};
    struct act_fwd_args act = {.x = a->pre, .prob = a->prob, .y = a->y, .rule = a->rule};
    TRY(p->gmm_fwd(l, &product));
    return p->act_fwd(l, &act);
}

/* Never none: dy without rows still needs an address, as ops take NULL for an absent tensor. */
int64_t expert_down_bwd_work_by(const struct expert_down_bwd_args *a)
{
    return max_i64(a->dz.dim[0] * a->w.dim[2] * (int64_t)dtype_bytes(a->dz.dtype), 1);
}

int expert_down_bwd_by(const struct expert_parts *p, struct lane *l, const struct expert_down_bwd_args *a)
{
    TRY(expert_down_bwd_check(a, l->err));
    struct tensor dy = tensor_2d(a->work.data, a->dz.dtype, a->dz.dim[0], a->w.dim[2]);
    struct gmm_bwd_args product = {.dy = a->dz, .w = a->w, .offset = a->offset, .dx = dy};
    struct act_fwd_args again = {.x = a->pre, .prob = a->prob, .y = a->y, .rule = a->rule};
    struct act_bwd_args act = {
        .dy = dy, .x = a->pre, .prob = a->prob, .dx = a->dpre, .dprob = a->dprob, .rule = a->rule};
    struct gmm_bwd_args scaled = {
        .dy = a->dz, .bias = a->bias, .offset = a->offset, .dprob = a->dprob, .acc_dprob = true};
    if (dy.dim[0] > 0 && dy.dim[1] > 0)
        TRY(p->gmm_bwd(l, &product));
    if (present(&a->y)) /* before pre may become dpre */
        TRY(p->act_fwd(l, &again));
    TRY(p->act_bwd(l, &act));
    return present(&a->bias) && present(&a->dprob) ? p->gmm_bwd(l, &scaled) : ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 11}, {"in", 9}, {"f", 13}, {"experts", 3}, {"tail", 0}};

ACT_NUMBER(expert_up)
ACT_NUMBER(expert_down_bwd)

static bool up_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (op_arg_is(c, arg, "offset"))
        op_fill_ranges(host, (int64_t)(op_dim(c, "rows") - op_dim(c, "tail")), false, key);
    return op_arg_is(c, arg, "offset");
}

static void up_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(expert_up, a, c);
    double rows = (double)a->x.dim[0], in = (double)a->x.dim[1], n = (double)a->w.dim[1];
    *out = (struct op_cost){.flops = 2 * rows * in * n,
                            .bytes = (double)tensor_bytes(&a->x) + (double)tensor_bytes(&a->w) +
                                     (double)tensor_bytes(&a->pre) + (double)tensor_bytes(&a->y)};
}

static bool down_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (op_arg_is(c, arg, "offset"))
        op_fill_ranges(host, (int64_t)(op_dim(c, "rows") - op_dim(c, "tail")), false, key);
    else if (op_arg_is(c, arg, "pre"))
        act_fill_inputs(c, 0.02, host, key);
    return op_arg_is(c, arg, "offset") || op_arg_is(c, arg, "pre");
}

static void down_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(expert_down_bwd, a, c);
    double rows = (double)a->dz.dim[0], in = (double)a->dz.dim[1], f = (double)a->w.dim[2];
    *out = (struct op_cost){.flops = 2 * rows * in * f,
                            .bytes = (double)tensor_bytes(&a->dz) + (double)tensor_bytes(&a->w) +
                                     2 * (double)tensor_bytes(&a->pre) + (double)tensor_bytes(&a->y)};
}

/* Kinds by number as in act: 0 swiglu, 1 geglu, 2 quick_geglu, 5 relu2, 6 silu. In: the width of x and dz. */
/* tailed: added to samples with rows past offset[E], whose y is not defined by expert_down_bwd. */
#define SAMPLES(tailed)                                                                                                \
    {"rows=11"}, {"rows=0"}, {"rows=1 experts=1 in=1 f=1 kind=5"}, {"rows=30 experts=7 tail=6 clamp=1.5" tailed},      \
        {"rows=20 no_bias=1 experts=5 kind=1"}, {"rows=24 no_bias=1 no_prob=1 kind=2 clamp=2 shift=1 alpha=1.3"},      \
        {"rows=20 f=24 interleave=8"}, /* whole vectors from here: tensor cores, inside, at and past edges of tiles */ \
        {"rows=130 experts=1 in=64 f=128"}, {"rows=700 experts=5 in=136 f=264 tail=9" tailed},                         \
        {"rows=300 experts=4 in=88 f=72 no_bias=1"},                                                                   \
        {"rows=129 experts=2 in=200 f=136 kind=2 clamp=2 shift=1 no_bias=1"},                                          \
        {"rows=260 experts=3 in=72 f=320 kind=5 tail=3" tailed}, {"rows=40 experts=3 in=24 f=40 tail=40" tailed},      \
        {"rows=40 experts=9 in=64 f=64 interleave=32"}, {"rows=600 experts=5 in=264 f=520 tail=60 gpu=1" tailed},      \
        {"rows=500 experts=3 in=1032 f=264 kind=5 clamp=1.5 gpu=1"},                                                   \
    {                                                                                                                  \
        "rows=2000 experts=300 in=64 f=128 kind=2 clamp=7 shift=1 gpu=1"                                               \
    }
static const struct op_sample up_samples[] = {SAMPLES("")};
static const struct op_sample down_samples[] = {
    SAMPLES(" no_y=1"), {"rows=150 experts=2 in=200 f=136 no_bias=1 no_y=1"}, {"rows=390 experts=3 in=72 f=264"}};
static const struct op_sample bench[] = {
    {"rows=8192 in=512 f=512 experts=8 no_bias=1"},
    {"rows=131072 in=2048 f=1024 experts=64 no_bias=1 gpu=1"},
    {"rows=131072 in=2048 f=768 experts=128 no_bias=1 gpu=1"},
    {"rows=32768 in=7168 f=2048 experts=4 no_bias=1 gpu=1"},
    {"rows=16384 in=2048 f=1024 experts=256 no_bias=1 gpu=1"},
};

OP_TABLES_WITH(expert_up, EXPERT_UP_FIELDS, , ACT_RULE_ATTRS(expert_up, "shift"));
const struct op_desc expert_up_desc = {
    OP_IS(expert_up),
    .number = expert_up_number,
    .summary = "first matrix of experts, activation and probability",
    .dims = dims,
    .n_dims = countof(dims),
    .sample_fill = up_fill,
    .cost = up_cost,
    .tolerance = 4e-6,
    .narrow = 6e-3, /* the composition rounds pre before the activation */
    .samples = up_samples,
    .n_samples = countof(up_samples),
    .bench = bench,
    .n_bench = countof(bench),
};
OP_TABLES_WITH(expert_down_bwd, EXPERT_DOWN_BWD_FIELDS, , ACT_RULE_ATTRS(expert_down_bwd, "shift"));
const struct op_desc expert_down_bwd_desc = {
    OP_IS(expert_down_bwd),
    .number = expert_down_bwd_number,
    .summary = "gradients through the second matrix of experts and the activation",
    .dims = dims,
    .n_dims = countof(dims),
    .sample_fill = down_fill,
    .cost = down_cost,
    .tolerance = 4e-6,
    .narrow = 6e-3, /* the composition rounds the gradient of the activation's output */
    .samples = down_samples,
    .n_samples = countof(down_samples),
    .bench = bench,
    .n_bench = countof(bench),
};
