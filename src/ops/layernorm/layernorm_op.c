/* layernorm: cost, descriptors, test samples and bench shapes; see layernorm.h. */
#include "ops/check.h"
#include "ops/layernorm/layernorm.h"
#include "ops/opshape.h"

OP_CHECK(layernorm_fwd)
OP_CHECK(layernorm_bwd)

static const struct op_dim dims[] = {{"rows", 5}, {"d", 33}};

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(layernorm_fwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 7 * n, .bytes = 2 * n * size};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(layernorm_bwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 14 * n, .bytes = (3 + (a->dres.rank > 0)) * n * size};
}

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
