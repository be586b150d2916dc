/* moeplan: argument checks, cost, descriptor, test samples and bench shapes; see moeplan.h. */
#include "ops/check.h"
#include "ops/moeplan/moeplan.h"
#include "ops/opshape.h"

int moeplan_check(const struct moeplan_args *a, struct err *e)
{
    TRY(op_check_fields(&moeplan_desc, a, e));
    if (a->offset.dim[0] < 2 || tensor_elems(&a->idx) > INT32_MAX)
        return err_set(e, ST_INVALID, "moeplan: %lld choices among %lld experts", (long long)tensor_elems(&a->idx),
                       (long long)a->offset.dim[0] - 1);
    if (a->cut < 0 || (a->cut > 0 && !present(&a->need)))
        return err_set(e, ST_INVALID, "moeplan: cut is %lld%s", (long long)a->cut,
                       a->cut < 0 ? ", expected 0 or more" : " without need, which tells whether rows were left out");
    return ST_OK;
}

static const struct op_dim dims[] = {{"rows", 9}, {"k", 2}, {"dropped", 0}};

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; op_arg_is(c, arg, "idx") && i < tensor_elems(host); i++) {
        int32_t x = (int32_t)rng_below(key, (uint64_t)i, (uint64_t)op_attr(c, "experts"));
        ((int32_t *)host->data)[i] = c->dim[2] != 0 && i % 3 == 1 ? -1 - x : x;
    }
    return op_arg_is(c, arg, "idx");
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(moeplan, a, c);
    double n = (double)tensor_elems(&a->idx);
    *out = (struct op_cost){.flops = 3 * n, .bytes = 12 * n};
}

static const struct op_sample samples[] = {{"rows=9 k=2"},
                                           {"rows=0 k=2"},
                                           {"rows=1 k=1 experts=1"},
                                           {"rows=33 k=3 dropped=1 experts=7"},
                                           {"rows=3 k=2 experts=64"},
                                           {"rows=1025 k=1 experts=300"},
                                           {"rows=4100 k=8 experts=64 dropped=1"},
                                           {"rows=33 k=3 experts=7 cut=20"},
                                           {"rows=33 k=3 dropped=1 experts=7 cut=98 acc_need=1"},
                                           {"rows=700 k=4 experts=9 dropped=1 cut=100"},
                                           {"rows=9 k=2 no_need=1"},
                                           {"rows=2 k=2 cut=4"},
                                           {"rows=20000 k=7 experts=33"}};
static const struct op_sample bench[] = {
    {"rows=4096 k=8 experts=64"}, {"rows=16384 k=8 experts=64"}, {"rows=16384 k=8 experts=256"}};

OP_TABLES_WITH(moeplan, MOEPLAN_FIELDS, , OP_ATTR_EXTRA("experts", 5));
const struct op_desc moeplan_desc = {
    OP_IS(moeplan),
    .summary = "stable sort of tokens by expert: row ranges and both maps",
    OP_LIST(dims, dims),
    .cost = cost,
    .sample_fill = fill,
    .tolerance = 0,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
