/* expert: argument checks, the composition, cost, descriptors, test samples and bench shapes; see expert.h. */
#include "ops/expert/expert_int.h"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
#include "ops/opdesc.h"

#include <math.h>

int expert_up_check(const struct expert_up_args *a, struct err *e)
{
    const char *op = "expert_up";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    CHECK_T(op, "y", &a->y, real, 2, a->x.dim[0], -1);
    int64_t rows = a->x.dim[0], f = a->y.dim[1], n = act_is_gated(a->rule.kind) ? 2 * f : f;
    CHECK_T(op, "w", &a->w, real, 3, -1, n, a->x.dim[1]);
    CHECK_T(op, "pre", &a->pre, real, 2, rows, n);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, a->w.dim[0] + 1);
    CHECK_OPT(op, "bias", &a->bias, wide, 2, a->w.dim[0], n);
    CHECK_OPT(op, "prob", &a->prob, wide, 1, rows);
    TRY(check_dense(op, "w", &a->w, e));
    return present(&a->bias) ? check_dense(op, "bias", &a->bias, e) : ST_OK;
}

int expert_down_bwd_check(const struct expert_down_bwd_args *a, struct err *e)
{
    const char *op = "expert_down_bwd";
    enum dtype real = a->dz.dtype, wide = wide_of(real);
    CHECK_T(op, "dz", &a->dz, real, 2, -1, -1);
    CHECK_T(op, "w", &a->w, real, 3, -1, a->dz.dim[1], -1);
    int64_t rows = a->dz.dim[0], experts = a->w.dim[0], f = a->w.dim[2], n = act_is_gated(a->rule.kind) ? 2 * f : f;
    CHECK_T(op, "pre", &a->pre, real, 2, rows, n);
    CHECK_T(op, "dpre", &a->dpre, real, 2, rows, n);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, experts + 1);
    CHECK_OPT(op, "y", &a->y, real, 2, rows, f);
    CHECK_OPT(op, "bias", &a->bias, wide, 2, experts, a->dz.dim[1]);
    CHECK_OPT(op, "prob", &a->prob, wide, 1, rows);
    TRY(check_dense(op, "w", &a->w, e));
    if (present(&a->prob))
        CHECK_T(op, "dprob", &a->dprob, wide, 1, rows);
    else if (present(&a->dprob))
        return err_set(e, ST_INVALID, "expert_down_bwd: dprob is given without prob");
    return check_work(op, &a->work, expert_down_bwd_work_by(a), e);
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

/* ---- the composition ----------------------------------------------------------------------------------------------------- */

int expert_up_by(const struct expert_parts *p, struct lane *l, const struct expert_up_args *a)
{
    TRY(expert_up_check(a, l->err));
    struct gmm_fwd_args product = {.x = a->x, .w = a->w, .bias = a->bias, .offset = a->offset, .y = a->pre};
    struct act_fwd_args act = {.x = a->pre, .prob = a->prob, .y = a->y, .rule = a->rule};
    TRY(p->gmm_fwd(l, &product));
    return p->act_fwd(l, &act);
}

int64_t expert_down_bwd_work_by(const struct expert_down_bwd_args *a)
{
    return a->dz.dim[0] * a->w.dim[2] * (int64_t)dtype_bytes(a->dz.dtype);
}

int expert_down_bwd_by(const struct expert_parts *p, struct lane *l, const struct expert_down_bwd_args *a)
{
    TRY(expert_down_bwd_check(a, l->err));
    struct tensor dy = tensor_2d(a->work.data, a->dz.dtype, a->dz.dim[0], a->w.dim[2]);
    struct gmm_bwd_args product = {.dy = a->dz, .w = a->w, .offset = a->offset, .dx = dy};
    struct act_fwd_args again = {.x = a->pre, .prob = a->prob, .y = a->y, .rule = a->rule};
    struct act_bwd_args act = {.dy = dy, .x = a->pre, .prob = a->prob, .dx = a->dpre, .dprob = a->dprob, .rule = a->rule};
    struct gmm_bwd_args scaled = {.dy = a->dz, .bias = a->bias, .offset = a->offset, .dprob = a->dprob, .acc_dprob = true};
    if (dy.dim[0] > 0 && dy.dim[1] > 0)
        TRY(p->gmm_bwd(l, &product));
    if (present(&a->y)) /* before pre may become dpre */
        TRY(p->act_fwd(l, &again));
    TRY(p->act_bwd(l, &act));
    return present(&a->bias) && present(&a->dprob) ? p->gmm_bwd(l, &scaled) : ST_OK;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"rows", 11}, {"in", 9}, {"f", 13}, {"experts", 3}, {"tail", 0}};
enum { KIND, CLAMP, ALPHA, SHIFT, INTERLEAVE };
static const struct op_attr attrs[] = {{.name = "kind", .value = ACT_SWIGLU}, {.name = "clamp", .value = 0}, {.name = "alpha", .value = 1.702}, {.name = "shift", .value = 0}, {.name = "interleave", .value = 0}};

static int64_t dim(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

static struct act_rule pack_rule(const struct op_call *c)
{
    int kind = c->attr[KIND] >= ACT_SWIGLU && c->attr[KIND] <= ACT_SILU ? (int)c->attr[KIND] : -1;
    double interleave = c->attr[INTERLEAVE];
    return (struct act_rule){.kind = (enum act_kind)kind,
                             .clamp = c->attr[CLAMP],
                             .alpha = c->attr[ALPHA],
                             .offset = c->attr[SHIFT],
                             .interleave = interleave >= 0 && interleave < 1e9 ? (int64_t)interleave : -1};
}
static int64_t wide_dim(const struct op_call *c) { return act_is_gated(pack_rule(c).kind) ? 2 * dim(c, 2) : dim(c, 2); }

/* Uneven ranges: every third expert is empty, the last takes what is left but the tail. */
static void fill_offsets(const struct op_call *c, struct tensor *host, uint64_t key)
{
    int32_t *at = host->data;
    int64_t n = host->dim[0] - 1, rows = dim(c, 0) - dim(c, 4), used = 0, mean = rows / n;
    at[0] = 0;
    for (int64_t x = 0; x < n; x++) {
        int64_t left = rows - used, some = min_i64(left, mean + (int64_t)rng_below(key, (uint64_t)x, (uint64_t)mean + 2));
        used += x == n - 1 ? left : x % 3 == 1 ? 0 : some;
        at[x + 1] = (int32_t)used;
    }
}

/* Saved inputs of the activation stay off the edges of clamp and relu, where slopes jump. */
static void fill_pre(const struct op_call *c, struct tensor *host, uint64_t key)
{
    double clamp = c->attr[CLAMP], gap = 0.02;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        double v = 2 * rng_normal(key, (uint64_t)i);
        const double edges[] = {0, clamp, -clamp};
        for (int k = 0; k < countof(edges); k++)
            v = fabs(v - edges[k]) < gap ? edges[k] + gap : v;
        tensor_set(host, i, (double)(float)v);
    }
}

enum { U_X, U_W, U_BIAS, U_PROB, U_OFFSET, U_PRE, U_Y };
static const struct op_arg up_args[] = {
    {.name = "x"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "offset", .type = ARG_I32},
    {.name = "pre", .role = ARG_OUT},
    {.name = "y", .role = ARG_OUT},
};

static void up_shapes(struct op_call *c)
{
    c->t[U_X] = tensor_2d(NULL, DT_NONE, dim(c, 0), dim(c, 1));
    c->t[U_W] = tensor_3d(NULL, DT_NONE, dim(c, 3), wide_dim(c), dim(c, 1));
    c->t[U_BIAS] = tensor_2d(NULL, DT_NONE, dim(c, 3), wide_dim(c));
    c->t[U_PROB] = tensor_1d(NULL, DT_NONE, dim(c, 0));
    c->t[U_OFFSET] = tensor_1d(NULL, DT_NONE, dim(c, 3) + 1);
}

static bool up_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (arg == U_OFFSET)
        fill_offsets(c, host, key);
    return arg == U_OFFSET;
}

static int up_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    bool gated = act_is_gated(pack_rule(c).kind);
    int64_t n = c->t[U_W].dim[1];
    if (c->t[U_X].rank != 2 || c->t[U_W].rank != 3 || (gated && n % 2 != 0))
        return err_set(e, ST_INVALID, "expert_up: x must be [rows, in], w [experts, n, in], n even for gated kinds");
    c->t[U_PRE] = tensor_2d(NULL, c->t[U_X].dtype, c->t[U_X].dim[0], n);
    c->t[U_Y] = tensor_2d(NULL, c->t[U_X].dtype, c->t[U_X].dim[0], gated ? n / 2 : n);
    return ST_OK;
}

static int up_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct expert_up_args a = {.x = c->t[U_X],
                               .w = c->t[U_W],
                               .bias = c->t[U_BIAS],
                               .prob = c->t[U_PROB],
                               .offset = c->t[U_OFFSET],
                               .pre = c->t[U_PRE],
                               .y = c->t[U_Y],
                               .rule = pack_rule(c)};
    return ops->expert_up(lane, &a);
}

static void up_cost(const struct op_call *c, struct op_cost *out)
{
    double rows = (double)c->t[U_X].dim[0], in = (double)c->t[U_X].dim[1], n = (double)c->t[U_W].dim[1];
    *out = (struct op_cost){.flops = 2 * rows * in * n,
                            .bytes = (double)tensor_bytes(&c->t[U_X]) + (double)tensor_bytes(&c->t[U_W]) +
                                     (double)tensor_bytes(&c->t[U_PRE]) + (double)tensor_bytes(&c->t[U_Y])};
}

enum { D_DZ, D_W, D_BIAS, D_PRE, D_PROB, D_OFFSET, D_DPRE, D_Y, D_DPROB, D_WORK };
static const struct op_arg down_args[] = {
    {.name = "dz"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "pre"},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "offset", .type = ARG_I32},
    {.name = "dpre", .role = ARG_OUT},
    {.name = "y", .role = ARG_OOUT},
    {.name = "dprob", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};

static void down_shapes(struct op_call *c)
{
    c->t[D_DZ] = tensor_2d(NULL, DT_NONE, dim(c, 0), dim(c, 1));
    c->t[D_W] = tensor_3d(NULL, DT_NONE, dim(c, 3), dim(c, 1), dim(c, 2));
    c->t[D_BIAS] = tensor_2d(NULL, DT_NONE, dim(c, 3), dim(c, 1));
    c->t[D_PRE] = tensor_2d(NULL, DT_NONE, dim(c, 0), wide_dim(c));
    c->t[D_PROB] = tensor_1d(NULL, DT_NONE, dim(c, 0));
    c->t[D_OFFSET] = tensor_1d(NULL, DT_NONE, dim(c, 3) + 1);
}

static bool down_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (arg == D_OFFSET)
        fill_offsets(c, host, key);
    else if (arg == D_PRE)
        fill_pre(c, host, key);
    return arg == D_OFFSET || arg == D_PRE;
}

static struct expert_down_bwd_args pack_down(const struct op_call *c)
{
    return (struct expert_down_bwd_args){.dz = c->t[D_DZ],
                                         .w = c->t[D_W],
                                         .bias = c->t[D_BIAS],
                                         .pre = c->t[D_PRE],
                                         .prob = c->t[D_PROB],
                                         .offset = c->t[D_OFFSET],
                                         .dpre = c->t[D_DPRE],
                                         .y = c->t[D_Y],
                                         .dprob = c->t[D_DPROB],
                                         .work = c->t[D_WORK],
                                         .rule = pack_rule(c)};
}

static int down_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    enum dtype real = c->t[D_DZ].dtype;
    if (c->t[D_DZ].rank != 2 || c->t[D_W].rank != 3 || c->t[D_PRE].rank != 2)
        return err_set(e, ST_INVALID, "expert_down_bwd: dz and pre must have two dimensions, w three");
    c->t[D_DPRE] = tensor_shape(real, 2, c->t[D_PRE].dim);
    c->t[D_Y] = tensor_2d(NULL, real, c->t[D_DZ].dim[0], c->t[D_W].dim[2]);
    if (c->t[D_PROB].rank > 0)
        c->t[D_DPROB] = tensor_1d(NULL, wide_of(real), c->t[D_DZ].dim[0]);
    struct expert_down_bwd_args a = pack_down(c);
    c->t[D_WORK] = tensor_1d(NULL, DT_U8, ops->expert_down_bwd_work ? ops->expert_down_bwd_work(&a) : 0);
    return ST_OK;
}

static int down_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct expert_down_bwd_args a = pack_down(c);
    return ops->expert_down_bwd(lane, &a);
}

static void down_cost(const struct op_call *c, struct op_cost *out)
{
    double rows = (double)c->t[D_DZ].dim[0], in = (double)c->t[D_DZ].dim[1], f = (double)c->t[D_W].dim[2];
    *out = (struct op_cost){.flops = 2 * rows * in * f,
                            .bytes = (double)tensor_bytes(&c->t[D_DZ]) + (double)tensor_bytes(&c->t[D_W]) +
                                     2 * (double)tensor_bytes(&c->t[D_PRE]) + (double)tensor_bytes(&c->t[D_Y])};
}

/* Kinds by number as in act: 0 swiglu, 1 geglu, 2 quick_geglu, 5 relu2, 6 silu. In: the width of x and dz. */
/* tailed: said of samples with rows past offset[E], whose y is not defined by expert_down_bwd. */
#define SAMPLES(tailed)                                                                                             \
    {"rows=11"}, {"rows=0"}, {"rows=1 experts=1 in=1 f=1 kind=5"}, {"rows=30 experts=7 tail=6 clamp=1.5" tailed},       \
        {"rows=20 no_bias=1 experts=5 kind=1"}, {"rows=24 no_bias=1 no_prob=1 kind=2 clamp=2 shift=1 alpha=1.3"},       \
        {"rows=20 f=24 interleave=8"}, /* whole vectors from here: tensor cores, inside, at and past edges of tiles */ \
        {"rows=130 experts=1 in=64 f=128"}, {"rows=700 experts=5 in=136 f=264 tail=9" tailed},                         \
        {"rows=300 experts=4 in=88 f=72 no_bias=1"},                                                                   \
        {"rows=129 experts=2 in=200 f=136 kind=2 clamp=2 shift=1 no_bias=1"},                                          \
        {"rows=260 experts=3 in=72 f=320 kind=5 tail=3" tailed}, {"rows=40 experts=3 in=24 f=40 tail=40" tailed},       \
        {"rows=40 experts=9 in=64 f=64 interleave=32"}, {"rows=600 experts=5 in=264 f=520 tail=60 gpu=1" tailed},       \
        {"rows=500 experts=3 in=1032 f=264 kind=5 clamp=1.5 gpu=1"},                                                   \
        {"rows=2000 experts=300 in=64 f=128 kind=2 clamp=7 shift=1 gpu=1"}
static const struct op_sample up_samples[] = {SAMPLES("")};
static const struct op_sample down_samples[] = {SAMPLES(" no_y=1"), {"rows=150 experts=2 in=200 f=136 no_bias=1 no_y=1"}, {"rows=390 experts=3 in=72 f=264"}};
static const struct op_sample bench[] = {
    {"rows=8192 in=512 f=512 experts=8 no_bias=1"},
    {"rows=131072 in=2048 f=1024 experts=64 no_bias=1 gpu=1"},
    {"rows=131072 in=2048 f=768 experts=128 no_bias=1 gpu=1"},
    {"rows=32768 in=7168 f=2048 experts=4 no_bias=1 gpu=1"},
    {"rows=16384 in=2048 f=1024 experts=256 no_bias=1 gpu=1"},
};

OP_TABLES(expert_up, EXPERT_UP_FIELDS);
const struct op_desc expert_up_desc = {
    OP_IS(expert_up),
    .summary = "first matrix of experts, activation and probability",
    .args = up_args,
    .n_args = countof(up_args),
    .attrs = attrs,
    .n_attrs = countof(attrs),
    .dims = dims,
    .n_dims = countof(dims),
    .sample_shapes = up_shapes,
    .sample_fill = up_fill,
    .infer = up_infer,
    .run = up_run,
    .cost = up_cost,
    .tolerance = 4e-6,
    .narrow = 6e-3, /* the composition rounds pre before the activation */
    .samples = up_samples,
    .n_samples = countof(up_samples),
    .bench = bench,
    .n_bench = countof(bench),
};
OP_TABLES(expert_down_bwd, EXPERT_DOWN_BWD_FIELDS);
const struct op_desc expert_down_bwd_desc = {
    OP_IS(expert_down_bwd),
    .summary = "gradients through the second matrix of experts and the activation",
    .args = down_args,
    .n_args = countof(down_args),
    .attrs = attrs,
    .n_attrs = countof(attrs),
    .dims = dims,
    .n_dims = countof(dims),
    .sample_shapes = down_shapes,
    .sample_fill = down_fill,
    .infer = down_infer,
    .run = down_run,
    .cost = down_cost,
    .tolerance = 4e-6,
    .narrow = 6e-3, /* the composition rounds the gradient of the activation's output */
    .samples = down_samples,
    .n_samples = countof(down_samples),
    .bench = bench,
    .n_bench = countof(bench),
};
