/* act: argument checks, cost, descriptors, test samples and bench shapes; see act.h. */
#include "ops/check.h"
#include "ops/act/act.h"
#include "ops/opdesc.h"

#include <math.h>
#include <string.h>

static int rule_check(const char *op, const struct act_rule *r, int64_t f, struct err *e)
{
    if ((int)r->kind < ACT_SWIGLU || r->kind > ACT_SILU)
        return err_set(e, ST_INVALID, "%s: kind %d is none of the seven", op, (int)r->kind);
    if (!(r->clamp >= 0) || !isfinite(r->clamp))
        return err_set(e, ST_INVALID, "%s: clamp is %g, expected 0 (none) or a positive bound", op,
                       r->clamp);
    if (r->interleave < 0 || (act_is_gated(r->kind) && r->interleave > 0 && f % r->interleave != 0))
        return err_set(e, ST_INVALID, "%s: interleave %lld does not divide the width %lld", op,
                       (long long)r->interleave, (long long)f);
    return ST_OK;
}

int act_fwd_check(const struct act_fwd_args *a, struct err *e)
{
    enum dtype real = a->y.dtype;
    CHECK_T("act_fwd", "y", &a->y, real, 2, -1, -1);
    int64_t rows = a->y.dim[0], f = a->y.dim[1];
    TRY(rule_check("act_fwd", &a->rule, f, e));
    CHECK_T("act_fwd", "x", &a->x, real, 2, rows, act_is_gated(a->rule.kind) ? 2 * f : f);
    CHECK_OPT("act_fwd", "prob", &a->prob, wide_of(real), 1, rows);
    return ST_OK;
}

int act_bwd_check(const struct act_bwd_args *a, struct err *e)
{
    enum dtype real = a->dy.dtype;
    CHECK_T("act_bwd", "dy", &a->dy, real, 2, -1, -1);
    int64_t rows = a->dy.dim[0], f = a->dy.dim[1], wide = act_is_gated(a->rule.kind) ? 2 * f : f;
    TRY(rule_check("act_bwd", &a->rule, f, e));
    CHECK_T("act_bwd", "x", &a->x, real, 2, rows, wide);
    CHECK_T("act_bwd", "dx", &a->dx, real, 2, rows, wide);
    CHECK_OPT("act_bwd", "prob", &a->prob, wide_of(real), 1, rows);
    if (present(&a->prob))
        CHECK_T("act_bwd", "dprob", &a->dprob, wide_of(real), 1, rows);
    else if (present(&a->dprob))
        return err_set(e, ST_INVALID, "act_bwd: dprob is given without prob");
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"f", 33}};
enum { KIND, CLAMP, ALPHA, OFFSET, INTERLEAVE };
static const struct op_attr attrs[] = {
    {.name = "kind", .value = ACT_SWIGLU}, {.name = "clamp", .value = 0}, {.name = "alpha", .value = 1.702}, {.name = "offset", .value = 0}, {.name = "interleave", .value = 0},
};

static struct act_rule pack_rule(const struct op_call *c)
{
    /* Anything that is no kind becomes -1, which the checks refuse. */
    int kind = c->attr[KIND] >= ACT_SWIGLU && c->attr[KIND] <= ACT_SILU ? (int)c->attr[KIND] : -1;
    double interleave = c->attr[INTERLEAVE];
    return (struct act_rule){.kind = (enum act_kind)kind,
                             .clamp = c->attr[CLAMP],
                             .alpha = c->attr[ALPHA],
                             .offset = c->attr[OFFSET],
                             .interleave =
                                 interleave >= 0 && interleave < 1e9 ? (int64_t)interleave : -1};
}

static struct tensor x_shape(const struct op_call *c)
{
    int64_t f = (int64_t)c->dim[1];
    return tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0],
                     act_is_gated(pack_rule(c).kind) ? 2 * f : f);
}

/* Pre-activations wide enough for the clamp to bite, and off its edges (and relu2's), where central
 * differences mean nothing. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (strcmp(c->desc->args[arg].name, "x") != 0)
        return false;
    double clamp = c->attr[CLAMP], gap = 0.01;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        double v = 2 * rng_normal(key, (uint64_t)i);
        const double edges[] = {0, clamp, -clamp};
        for (int k = 0; k < countof(edges); k++)
            v = fabs(v - edges[k]) < gap ? edges[k] + gap : v;
        tensor_set(host, i, (double)(float)v);
    }
    return true;
}

enum { F_X, F_PROB, F_Y };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "y", .role = ARG_OUT},
};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = x_shape(c);
    c->t[F_PROB] = tensor_1d(NULL, DT_NONE, c->t[F_X].dim[0]);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    const struct tensor *x = &c->t[F_X];
    bool gated = act_is_gated(pack_rule(c).kind);
    if (x->rank != 2 || (gated && x->dim[1] % 2 != 0))
        return err_set(e, ST_INVALID, "act_fwd: x must be [rows, f], f even for gated kinds");
    c->t[F_Y] = tensor_2d(NULL, x->dtype, x->dim[0], gated ? x->dim[1] / 2 : x->dim[1]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct act_fwd_args a = {
        .x = c->t[F_X], .prob = c->t[F_PROB], .y = c->t[F_Y], .rule = pack_rule(c)};
    return ops->act_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = 12 * (double)tensor_elems(&c->t[F_Y]),
                            .bytes = (double)tensor_bytes(&c->t[F_X]) +
                                     (double)tensor_bytes(&c->t[F_Y])};
}

enum { B_DY, B_X, B_PROB, B_DX, B_DPROB };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x"},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dprob", .role = ARG_OOUT, .type = ARG_WIDE},
};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
    c->t[B_X] = x_shape(c);
    c->t[B_PROB] = tensor_1d(NULL, DT_NONE, c->t[B_X].dim[0]);
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[B_DX] = tensor_shape(c->t[B_X].dtype, c->t[B_X].rank, c->t[B_X].dim);
    if (c->t[B_PROB].rank > 0)
        c->t[B_DPROB] = tensor_shape(wide_of(c->t[B_X].dtype), c->t[B_PROB].rank, c->t[B_PROB].dim);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct act_bwd_args a = {.dy = c->t[B_DY],
                             .x = c->t[B_X],
                             .prob = c->t[B_PROB],
                             .dx = c->t[B_DX],
                             .dprob = c->t[B_DPROB],
                             .rule = pack_rule(c)};
    return ops->act_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = 20 * (double)tensor_elems(&c->t[B_DY]),
                            .bytes = 2 * (double)tensor_bytes(&c->t[B_X]) +
                                     (double)tensor_bytes(&c->t[B_DY])};
}

/* Kinds by number: 0 swiglu, 1 geglu, 2 quick_geglu, 3 gelu, 4 quick_gelu, 5 relu2, 6 silu. */
static const struct op_sample samples[] = {
    {"rows=5 f=33 kind=0 no_prob=1"},
    {"rows=5 f=33 kind=0 clamp=1.5"},
    {"rows=1 f=1 kind=0"},
    {"rows=0 f=8 kind=0"},
    {"rows=3 f=0 kind=0"},
    {"rows=7 f=17 kind=1"},
    {"rows=7 f=17 kind=1 clamp=2 offset=1 no_prob=1 strided=1"},
    {"rows=9 f=65 kind=2 clamp=1.5 offset=1 no_prob=1"},
    {"rows=130 f=48 kind=2 alpha=1.3 offset=0.5 interleave=16"},
    {"rows=4 f=12 kind=0 interleave=1 strided=1"},
    {"rows=4 f=66 kind=1 clamp=1 interleave=33"},
    {"rows=5 f=31 kind=3"},
    {"rows=5 f=31 kind=3 clamp=1 no_prob=1"},
    {"rows=5 f=129 kind=4 alpha=1.702 no_prob=1"},
    {"rows=5 f=16 kind=4 alpha=0.5 clamp=2"},
    {"rows=5 f=15 kind=5 no_prob=1"},
    {"rows=5 f=64 kind=5 clamp=1.5"},
    {"rows=5 f=63 kind=6 no_prob=1 strided=1"},
    {"rows=300 f=18 kind=6 clamp=1"},
    {"rows=37 f=1032 kind=0"},
    {"rows=65 f=264 kind=0 no_prob=1"},
    {"rows=33 f=64 kind=2 interleave=32 clamp=2 offset=1"},
    {"rows=9 f=40 kind=3"},
    {"rows=9 f=2048 kind=5"},
    {"rows=130 f=24 kind=1"},
};
static const struct op_sample bench[] = {
    {"rows=4096 f=864 kind=0 no_prob=1"},
    {"rows=4096 f=864 kind=2 clamp=7 offset=1"},
    {"rows=4096 f=1280 kind=3 no_prob=1"},
    {"rows=4096 f=1280 kind=5 no_prob=1"},
    {"rows=16384 f=5632 kind=0 no_prob=1 gpu=1"},
    {"rows=32768 f=1024 kind=0 gpu=1"},
};

OP_TABLES(act_fwd, ACT_FWD_FIELDS);
const struct op_desc act_fwd_desc = {
    OP_IS(act_fwd),
    .summary = "the nonlinearity of an MLP, gated or plain",
    OP_LIST(args, fwd_args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "act_bwd",
    .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(act_bwd, ACT_BWD_FIELDS);
const struct op_desc act_bwd_desc = {
    OP_IS(act_bwd),
    .summary = "gradient of act_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 3e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
