/* layernorm: cost, descriptors, test samples and bench shapes; see layernorm.h. */
#include "ops/check.h"
#include "ops/layernorm/layernorm.h"
#include "ops/opshape.h"

OP_CHECK(layernorm_fwd)

int layernorm_bwd_check(const struct layernorm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&layernorm_bwd_desc, a, e));
    TRY(check_same_type("layernorm_bwd", "dx", &a->dx, "x", &a->x, e));
    return check_same_type("layernorm_bwd", "dres", &a->dres, "x", &a->x, e);
}

static const struct op_dim dims[] = {{"rows", 5}, {"d", 33}};

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(layernorm_fwd, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){.flops = 7 * n, .bytes = (double)(tensor_bytes(&a->x) + tensor_bytes(&a->y))};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(layernorm_bwd, a, c);
    double n = (double)tensor_elems(&a->x), stream = (double)tensor_bytes(&a->x), layer = (double)tensor_bytes(&a->dy);
    *out = (struct op_cost){.flops = 14 * n, .bytes = layer + (2 + (a->dres.rank > 0)) * stream};
}

/* The residual stream wider than what layers see. */
#define WIDE_STREAM " wide_x=1 wide_dres=1 wide_dx=1"
static const struct op_sample samples[] = {
    {"rows=5 d=33"},
    {"rows=1 d=2"},
    {"rows=0 d=8"},
    {"rows=65 d=64 zero_centered=1"},
    {"rows=129 d=17 no_w=1"},
    {"rows=66 d=40 no_b=1 no_db=1"},
    {"rows=9 d=21 no_w=1 no_b=1 no_db=1 no_dres=1"},
    {"rows=70 d=48 acc_dw=1 acc_db=1 no_dres=1"},
    {"rows=33 d=264"},
    {"rows=9 d=2056 acc_dw=1 acc_db=1"},
    {"rows=600 d=512"},
    {"rows=3 d=8200"},
    {"rows=5 d=2048 strided=1"},
    {"rows=33 d=264" WIDE_STREAM},
    {"rows=9 d=21 no_w=1 no_b=1 no_db=1 no_dres=1 strided=1" WIDE_STREAM},
    {"rows=70 d=48 zero_centered=1 acc_dw=1 acc_db=1" WIDE_STREAM},
    {"rows=0 d=8" WIDE_STREAM},
};
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=16384 d=2048"}};

OP_TABLES(layernorm_fwd, LAYERNORM_FWD_FIELDS);
const struct op_desc layernorm_fwd_desc = {
    OP_IS(layernorm_fwd),        .summary = "layer norm with gain and bias",
    OP_LIST(dims, dims),         .cost = fwd_cost,
    .backward = "layernorm_bwd", .tolerance = 2e-6,
    OP_LIST(samples, samples),   OP_LIST(bench, bench),
};
OP_TABLES(layernorm_bwd, LAYERNORM_BWD_FIELDS);
const struct op_desc layernorm_bwd_desc = {
    OP_IS(layernorm_bwd),  .summary = "gradient of layernorm_fwd, plus a by-passing gradient",
    OP_LIST(dims, dims),   .cost = bwd_cost,
    .tolerance = 5e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
