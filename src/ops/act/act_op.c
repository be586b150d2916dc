/* act: argument checks, cost, descriptors, test samples and bench shapes; see act.h. */
#include "ops/check.h"
#include "ops/act/act_desc.h"
#include "ops/opshape.h"

#include <math.h>
#include <string.h>

/* Before shapes are looked at: they depend on the kind. */
static int kind_check(const char *op, const struct act_rule *r, struct err *e)
{
    bool known = (int)r->kind >= ACT_SWIGLU && r->kind <= ACT_SILU;
    return known ? ST_OK : err_set(e, ST_INVALID, "%s: kind %d is none of the seven", op, (int)r->kind);
}

static int rule_check(const char *op, const struct act_rule *r, int64_t f, struct err *e)
{
    if (!(r->clamp >= 0) || !isfinite(r->clamp))
        return err_set(e, ST_INVALID, "%s: clamp is %g, expected 0 (none) or a positive bound", op, r->clamp);
    if (r->interleave < 0 || (act_is_gated(r->kind) && r->interleave > 0 && f % r->interleave != 0))
        return err_set(e, ST_INVALID, "%s: interleave %lld does not divide the width %lld", op,
                       (long long)r->interleave, (long long)f);
    return ST_OK;
}

int act_fwd_check(const struct act_fwd_args *a, struct err *e)
{
    TRY(kind_check("act_fwd", &a->rule, e));
    TRY(op_check_fields(&act_fwd_desc, a, e));
    return rule_check("act_fwd", &a->rule, a->y.dim[1], e);
}

int act_bwd_check(const struct act_bwd_args *a, struct err *e)
{
    TRY(kind_check("act_bwd", &a->rule, e));
    TRY(op_check_fields(&act_bwd_desc, a, e));
    return rule_check("act_bwd", &a->rule, a->dy.dim[1], e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"f", 33}};

ACT_NUMBER(act_fwd)
ACT_NUMBER(act_bwd)

void act_fill_inputs(const struct op_call *c, double gap, struct tensor *host, uint64_t key)
{
    double clamp = op_attr(c, "clamp");
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        double v = 2 * rng_normal(key, (uint64_t)i);
        const double edges[] = {0, clamp, -clamp};
        for (int k = 0; k < countof(edges); k++)
            v = fabs(v - edges[k]) < gap ? edges[k] + gap : v;
        tensor_set(host, i, (double)(float)v);
    }
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (op_arg_is(c, arg, "x"))
        act_fill_inputs(c, 0.01, host, key);
    return op_arg_is(c, arg, "x");
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(act_fwd, a, c);
    *out = (struct op_cost){.flops = 12 * (double)tensor_elems(&a->y),
                            .bytes = (double)tensor_bytes(&a->x) + (double)tensor_bytes(&a->y)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(act_bwd, a, c);
    *out = (struct op_cost){.flops = 20 * (double)tensor_elems(&a->dy),
                            .bytes = 2 * (double)tensor_bytes(&a->x) + (double)tensor_bytes(&a->dy)};
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
    {"rows=4096 f=864 kind=0 no_prob=1"},         {"rows=4096 f=864 kind=2 clamp=7 offset=1"},
    {"rows=4096 f=1280 kind=3 no_prob=1"},        {"rows=4096 f=1280 kind=5 no_prob=1"},
    {"rows=16384 f=5632 kind=0 no_prob=1 gpu=1"}, {"rows=32768 f=1024 kind=0 gpu=1"},
};

OP_TABLES_WITH(act_fwd, ACT_FWD_FIELDS, , ACT_RULE_ATTRS(act_fwd, "offset"));
const struct op_desc act_fwd_desc = {
    OP_IS(act_fwd),        .number = act_fwd_number, .summary = "the nonlinearity of an MLP, gated or plain",
    OP_LIST(dims, dims),   .cost = fwd_cost,         .sample_fill = fill,
    .backward = "act_bwd", .tolerance = 2e-6,        OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(act_bwd, ACT_BWD_FIELDS, , ACT_RULE_ATTRS(act_bwd, "offset"));
const struct op_desc act_bwd_desc = {
    OP_IS(act_bwd),      .number = act_bwd_number,  .summary = "gradient of act_fwd",
    OP_LIST(dims, dims), .cost = bwd_cost,          .sample_fill = fill,
    .tolerance = 3e-6,   OP_LIST(samples, samples), OP_LIST(bench, bench),
};
