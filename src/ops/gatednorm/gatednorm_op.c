/* gatednorm: argument checks, cost, descriptors, test samples and bench shapes; see gatednorm.h. */
#include "ops/check.h"
#include "ops/gatednorm/gatednorm.h"
#include "ops/opshape.h"

static int check_groups(const char *op, const struct tensor *x, int64_t group, struct err *e)
{
    if (group >= 1 && x->dim[1] % group == 0)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: groups of %lld channels do not divide a width of %lld", op, (long long)group,
                   (long long)x->dim[1]);
}

int gatednorm_fwd_check(const struct gatednorm_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&gatednorm_fwd_desc, a, e));
    return check_groups("gatednorm_fwd", &a->x, a->group, e);
}

int gatednorm_bwd_check(const struct gatednorm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&gatednorm_bwd_desc, a, e));
    return check_groups("gatednorm_bwd", &a->x, a->group, e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

/* The attribute group is the size; shared: w holds one group's gains. */
static const struct op_dim dims[] = {{"rows", 5}, {"d", 24}, {"shared", 0}};

static void shared_gains(struct op_call *c)
{
    if (op_dim(c, "shared") != 0)
        c->t[op_arg_index(c->desc, "w")] = tensor_1d(NULL, DT_NONE, (int64_t)op_attr(c, "group"));
}

/* Statistics are positive and near 1. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (arg != op_arg_index(c->desc, "rstd") || c->desc->args[arg].role != ARG_IN)
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(float)(0.5 + rng_uniform(key, (uint64_t)i)));
    return true;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gatednorm_fwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 9 * n, .bytes = 3 * n * size};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gatednorm_bwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 22 * n, .bytes = 5 * n * size};
}

static const struct op_sample samples[] = {
    {"rows=5 d=24 group=8"},
    {"rows=1 d=1 group=1"},
    {"rows=0 d=8 group=4"},
    {"rows=3 d=0 group=4"},
    {"rows=65 d=66 group=33 zero_centered=1"},
    {"rows=70 d=48 group=48 acc_dw=1"},
    {"rows=7 d=51 group=17 norm_first=1 shared=1 strided=1"},
    {"rows=66 d=40 group=20 norm_first=1 zero_centered=1 acc_dw=1"},
    {"rows=130 d=96 group=16 shared=1 strided=1"},
    {"rows=67 d=256 group=64"},
    {"rows=33 d=2304 group=128 norm_first=1 shared=1 acc_dw=1"},
    {"rows=33 d=1024 group=512"},
    {"rows=9 d=4096 group=2048 norm_first=1"},
    {"rows=5 d=4608 group=4608"},
    {"rows=600 d=24 group=8 shared=1"},
};
static const struct op_sample bench[] = {{"rows=4096 d=1024 group=128"},
                                         {"rows=4096 d=4096 group=128 norm_first=1 shared=1"},
                                         {"rows=16384 d=4096 group=512 gpu=1"},
                                         {"rows=16384 d=4096 group=128 norm_first=1 shared=1 gpu=1"}};

OP_TABLES(gatednorm_fwd, GATEDNORM_FWD_FIELDS);
const struct op_desc gatednorm_fwd_desc = {
    OP_IS(gatednorm_fwd),
    .summary = "grouped RMSNorm with a SiLU gate before or after it",
    OP_LIST(dims, dims),
    .sample_shapes = shared_gains,
    .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "gatednorm_bwd",
    .tolerance = 3e-6,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(gatednorm_bwd, GATEDNORM_BWD_FIELDS);
const struct op_desc gatednorm_bwd_desc = {
    OP_IS(gatednorm_bwd),  .summary = "gradient of gatednorm_fwd",
    OP_LIST(dims, dims),   .sample_shapes = shared_gains,
    .cost = bwd_cost,      .sample_fill = fill,
    .tolerance = 5e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
