/* norm8: argument checks, cost, descriptor, test samples and bench shapes; see norm8.h. */
#include "ops/norm8/norm8_int.h"
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ops.h"
#include "tensor/f8.h"

int norm8_check(const struct norm8_args *a, struct err *e)
{
    enum dtype wide = wide_of(a->x.dtype);
    CHECK_T("norm8", "x", &a->x, a->x.dtype, 2, -1, -1);
    CHECK_T("norm8", "rstd", &a->rstd, wide, 1, a->x.dim[0]);
    CHECK_OPT("norm8", "w", &a->w, wide, 1, a->x.dim[1]);
    struct quantise_args q = norm8_quantise(a); /* of values that may have no memory yet */
    q.x = a->x;
    return quantise_check(&q, e);
}

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"rows", 5}, {"d", 32}};

static void shapes(struct op_call *c)
{
    int64_t rows = (int64_t)op_dim(c, "rows"), d = (int64_t)op_dim(c, "d");
    c->t[op_arg_index(c->desc, "x")] = tensor_2d(NULL, DT_NONE, rows, d);
    c->t[op_arg_index(c->desc, "rstd")] = tensor_1d(NULL, DT_NONE, rows);
    c->t[op_arg_index(c->desc, "w")] = tensor_1d(NULL, DT_NONE, d);
}

/* only=1: q alone; only=2: t alone. */
static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    if (x->rank != 2)
        return err_set(e, ST_INVALID, "norm8: x has rank %d, expected 2", x->rank);
    int64_t rows = x->dim[0], d = x->dim[1], block = (int64_t)op_attr(c, "block");
    enum dtype wide = wide_of(ops->real);
    if (op_attr(c, "only") != 2) {
        c->t[op_arg_index(c->desc, "q")] = tensor_2d(NULL, DT_F8_E4M3, rows, d);
        c->t[op_arg_index(c->desc, "qs")] = f8_scales(wide, rows, d, block, false);
    }
    if (op_attr(c, "only") != 1) {
        c->t[op_arg_index(c->desc, "t")] = tensor_2d(NULL, DT_F8_E4M3, d, rows);
        c->t[op_arg_index(c->desc, "ts")] = f8_scales(wide, d, rows, block, false);
    }
    OP_UNPACK(norm8, a, c);
    int64_t work = ops->norm8_work != NULL ? ops->norm8_work(a) : 0;
    if (work > 0)
        c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, work);
    return ST_OK;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(norm8, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){
        .flops = 6 * n,
        .bytes = n * (double)(dtype_bytes(a->x.dtype) + (present(&a->q) ? 1 : 0) + (present(&a->t) ? 1 : 0))};
}

static const struct op_sample samples[] = {
    {"rows=5 d=33"},
    {"rows=0 d=16"},
    {"rows=16 d=0"},
    {"rows=128 d=128"},
    {"rows=144 d=272 zero_centered=1"},
    {"rows=144 d=272 only=1"},
    {"rows=272 d=144 only=2"},
    {"rows=48 d=256 no_w=1"},
    {"rows=21 d=48 no_w=1 block=32 strided=1"},
    {"rows=48 d=80 block=0"},
};
static const struct op_sample bench[] = {{"rows=4096 d=320"},
                                         {"rows=16384 d=2048 gpu=1"},
                                         {"rows=16384 d=2048 only=1 gpu=1"},
                                         {"rows=16384 d=2048 only=2 gpu=1"}};

OP_TABLES_WITH(norm8, NORM8_FIELDS, , OP_ATTR_EXTRA("only", 0));
/* A value next to a tie of two codes falls to either side, as devices round the norm differently: 32 of 448. That the
 * codes are those of addnorm followed by quantise, to the bit, is checked by tests/gpu/check_f8 and test_norm8. */
const struct op_desc norm8_desc = {
    OP_IS(norm8),
    .summary = "a norm whose statistics are known, as FP8 codes",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = infer,
    .cost = cost,
    .tolerance = 0.075,
    .narrow = 0.03,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
