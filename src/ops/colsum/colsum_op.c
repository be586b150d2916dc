/* colsum: argument checks, cost, descriptor, test samples and bench shapes; see colsum.h. */
#include "ops/check.h"
#include "ops/colsum/colsum.h"
#include "ops/opshape.h"

OP_CHECK(colsum)

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"rows", 5}, {"n", 33}};

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(colsum, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){.flops = n, .bytes = n * (double)dtype_bytes(a->x.dtype)};
}

static const struct op_sample samples[] = {
    {"rows=5 n=33"},    {"rows=1 n=1"},
    {"rows=0 n=8"},     {"rows=0 n=8 acc_out=1"},
    {"rows=8 n=0"},     {"rows=64 n=16 acc_out=1"},
    {"rows=65 n=257"},  {"rows=300 n=301 acc_out=1 strided=1"},
    {"rows=600 n=264"}, {"rows=33000 n=8"},
};
static const struct op_sample bench[] = {
    {"rows=4096 n=320"}, {"rows=4096 n=1728"}, {"rows=16384 n=2048"}, {"rows=16384 n=8192 gpu=1"}};

OP_TABLES(colsum, COLSUM_FIELDS);
const struct op_desc colsum_desc = {
    OP_IS(colsum),         .summary = "sum over rows: the gradient of a bias",
    OP_LIST(dims, dims),   .cost = cost,
    .tolerance = 5e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
