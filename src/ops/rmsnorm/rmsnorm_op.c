/* rmsnorm: argument checks, cost, descriptors, test samples and bench shapes; see rmsnorm.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/rmsnorm/rmsnorm.h"

static int check_rank(const char *op, const struct tensor *x, struct err *e)
{
    return x->rank <= 3 ? ST_OK : err_set(e, ST_INVALID, "%s: x has rank %d, expected 2 or 3", op, x->rank);
}

int rmsnorm_fwd_check(const struct rmsnorm_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&rmsnorm_fwd_desc, a, e));
    return check_rank("rmsnorm_fwd", &a->x, e);
}

int rmsnorm_bwd_check(const struct rmsnorm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&rmsnorm_bwd_desc, a, e));
    return check_rank("rmsnorm_bwd", &a->x, e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"heads", 0}, {"d", 33}};

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(rmsnorm_fwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 4 * n, .bytes = 2 * n * size};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(rmsnorm_bwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 9 * n, .bytes = (3 + (a->dres.rank > 0)) * n * size};
}

static const struct op_sample samples[] = {
    {"rows=5 d=33"},
    {"rows=1 d=1"},
    {"rows=0 d=8"},
    {"rows=65 d=64 zero_centered=1"},
    {"rows=129 d=17 no_w=1"},
    {"rows=7 heads=3 d=16"},
    {"rows=70 d=48 acc_dw=1 no_dres=1"},
    {"rows=33 d=264"},
    {"rows=9 d=2056 acc_dw=1"},
    {"rows=600 d=512"},
    {"rows=3 d=8200"},
    {"rows=5 d=2048 strided=1"},
    {"rows=1100 heads=3 d=128"},
};
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=16384 d=2048"}};

OP_TABLES(rmsnorm_fwd, RMSNORM_FWD_FIELDS);
const struct op_desc rmsnorm_fwd_desc = {
    OP_IS(rmsnorm_fwd),        .summary = "root-mean-square norm with gain",
    OP_LIST(dims, dims),       .cost = fwd_cost,
    .backward = "rmsnorm_bwd", .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(rmsnorm_bwd, RMSNORM_BWD_FIELDS);
const struct op_desc rmsnorm_bwd_desc = {
    OP_IS(rmsnorm_bwd),    .summary = "gradient of rmsnorm_fwd, plus a by-passing gradient",
    OP_LIST(dims, dims),   .cost = bwd_cost,
    .tolerance = 5e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
