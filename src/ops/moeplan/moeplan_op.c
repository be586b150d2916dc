/* moeplan: argument checks, cost, descriptor, test samples and bench shapes; see moeplan.h. */
#include "ops/check.h"
#include "ops/moeplan/moeplan.h"
#include "ops/opdesc.h"

int moeplan_check(const struct moeplan_args *a, struct err *e)
{
    const char *op = "moeplan";
    CHECK_T(op, "idx", &a->idx, DT_I32, 2, -1, -1);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, -1);
    CHECK_T(op, "row", &a->row, DT_I32, 2, a->idx.dim[0], a->idx.dim[1]);
    CHECK_T(op, "src", &a->src, DT_I32, 1, tensor_elems(&a->idx));
    TRY(check_dense(op, "idx", &a->idx, e));
    TRY(check_dense(op, "row", &a->row, e));
    if (a->offset.dim[0] < 2 || tensor_elems(&a->idx) > INT32_MAX)
        return err_set(e, ST_INVALID, "moeplan: %lld choices among %lld experts",
                       (long long)tensor_elems(&a->idx), (long long)a->offset.dim[0] - 1);
    return ST_OK;
}

enum { A_IDX, A_OFFSET, A_ROW, A_SRC, A_WORK };
static const struct op_arg args[] = {
    {.name = "idx", .type = ARG_I32},
    {.name = "offset", .role = ARG_OUT, .type = ARG_I32},
    {.name = "row", .role = ARG_OUT, .type = ARG_I32},
    {.name = "src", .role = ARG_OUT, .type = ARG_I32},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_dim dims[] = {{"rows", 9}, {"k", 2}, {"dropped", 0}};
static const struct op_attr attrs[] = {{.name = "experts", .value = 5}};

static void shapes(struct op_call *c)
{
    c->t[A_IDX] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; arg == A_IDX && i < tensor_elems(host); i++) {
        int32_t x = (int32_t)rng_below(key, (uint64_t)i, (uint64_t)c->attr[0]);
        ((int32_t *)host->data)[i] = c->dim[2] != 0 && i % 3 == 1 ? -1 - x : x;
    }
    return arg == A_IDX;
}

static struct moeplan_args pack_args(const struct op_call *c)
{
    return (struct moeplan_args){.idx = c->t[A_IDX], .offset = c->t[A_OFFSET], .row = c->t[A_ROW], .src = c->t[A_SRC], .work = c->t[A_WORK]};
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    int64_t n = tensor_elems(&c->t[A_IDX]);
    c->t[A_OFFSET] = tensor_1d(NULL, DT_I32, (int64_t)c->attr[0] + 1);
    c->t[A_ROW] = tensor_shape(DT_I32, c->t[A_IDX].rank, c->t[A_IDX].dim);
    c->t[A_SRC] = tensor_1d(NULL, DT_I32, n);
    struct moeplan_args a = pack_args(c);
    c->t[A_WORK] = tensor_1d(NULL, DT_U8, ops->moeplan_work ? ops->moeplan_work(&a) : 0);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct moeplan_args a = pack_args(c);
    return ops->moeplan(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[A_IDX]);
    *out = (struct op_cost){.flops = 3 * n, .bytes = 12 * n};
}

static const struct op_sample samples[] = {{"rows=9 k=2"},
                                           {"rows=0 k=2"},
                                           {"rows=1 k=1 experts=1"},
                                           {"rows=33 k=3 dropped=1 experts=7"},
                                           {"rows=3 k=2 experts=64"},
                                           {"rows=1025 k=1 experts=300"},
                                           {"rows=4100 k=8 experts=64 dropped=1"},
                                           {"rows=20000 k=7 experts=33"}};
static const struct op_sample bench[] = {{"rows=4096 k=8 experts=64"},
                                         {"rows=16384 k=8 experts=64"},
                                         {"rows=16384 k=8 experts=256"}};

OP_TABLES(moeplan, MOEPLAN_FIELDS);
const struct op_desc moeplan_desc = {
    OP_IS(moeplan),
    .summary = "stable sort of tokens by expert: row ranges and both maps",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .sample_fill = fill,
    .tolerance = 0,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
