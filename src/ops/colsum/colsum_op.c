/* colsum: argument checks, cost, descriptor, test samples and bench shapes; see colsum.h. */
#include "ops/check.h"
#include "ops/colsum/colsum.h"
#include "ops/opdesc.h"

int colsum_check(const struct colsum_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    CHECK_T("colsum", "x", &a->x, real, 2, -1, -1);
    CHECK_T("colsum", "out", &a->out, wide_of(real), 1, a->x.dim[1]);
    return ST_OK;
}

/* ---- descriptor ---------------------------------------------------------------------------- */

enum { A_X, A_OUT, A_WORK };
static const struct op_arg args[] = {
    {.name = "x"},
    {.name = "out", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr attrs[] = {{.name = "acc_out", .value = 0}};
static const struct op_dim dims[] = {{"rows", 5}, {"n", 33}};

static void shapes(struct op_call *c)
{
    c->t[A_X] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
}

static struct colsum_args pack(const struct op_call *c)
{
    return (struct colsum_args){
        .x = c->t[A_X], .out = c->t[A_OUT], .work = c->t[A_WORK], .acc_out = c->attr[0] != 0};
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    if (c->t[A_X].rank != 2)
        return err_set(e, ST_INVALID, "colsum: x has rank %d, expected 2", c->t[A_X].rank);
    c->t[A_OUT] = tensor_1d(NULL, wide_of(c->t[A_X].dtype), c->t[A_X].dim[1]);
    struct colsum_args a = pack(c);
    c->t[A_WORK] = tensor_1d(NULL, DT_U8, ops->colsum_work ? ops->colsum_work(&a) : 0);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct colsum_args a = pack(c);
    return ops->colsum(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[A_X]);
    *out = (struct op_cost){.flops = n, .bytes = n * (double)dtype_bytes(c->t[A_X].dtype)};
}

static const struct op_sample samples[] = {
    {"rows=5 n=33"},   {"rows=1 n=1"},
    {"rows=0 n=8"},    {"rows=0 n=8 acc_out=1"},
    {"rows=8 n=0"},    {"rows=64 n=16 acc_out=1"},
    {"rows=65 n=257"}, {"rows=300 n=301 acc_out=1 strided=1"},
    {"rows=600 n=264"}, {"rows=33000 n=8"},
};
static const struct op_sample bench[] = {{"rows=4096 n=320"}, {"rows=4096 n=1728"}, {"rows=16384 n=2048"}, {"rows=16384 n=8192 gpu=1"}};

OP_TABLES(colsum, COLSUM_FIELDS);
const struct op_desc colsum_desc = {
    OP_IS(colsum),
    .summary = "sum over rows: the gradient of a bias",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
