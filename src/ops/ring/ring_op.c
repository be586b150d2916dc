/* ring_merge and ring_add: argument checks, cost, descriptors, test samples and bench shapes; see ring.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/ring/ring.h"

#include <math.h>

int ring_merge_check(const struct ring_merge_args *a, struct err *e)
{
    TRY(op_check_fields(&ring_merge_desc, a, e));
    if (a->acc_sum != a->acc_total)
        return err_set(e, ST_INVALID, "ring_merge: sum is %s and total is %s; both are",
                       a->acc_sum ? "added to" : "set", a->acc_total ? "added to" : "set");
    return ST_OK;
}

OP_CHECK(ring_add)

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim merge_dims[] = {{"b", 2}, {"s", 5}, {"h", 3}, {"dv", 8}, {"far", 0}};
static const struct op_dim add_dims[] = {{"rows", 5}, {"n", 33}};

/* Logarithms of the sums over a few keys; with far, one row in three sees nothing of the block. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (!op_arg_is(c, arg, "lse"))
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++)
        tensor_set(t, i,
                   op_dim(c, "far") != 0 && i % 3 == 0 ? -INFINITY
                                                       : (double)(float)(3 + 2 * rng_normal(key, (uint64_t)i)));
    return true;
}

static void merge_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(ring_merge, a, c);
    double n = (double)tensor_elems(&a->o);
    *out = (struct op_cost){.flops = 3 * n, .bytes = op_bytes(c) + (a->acc_sum ? (double)tensor_bytes(&a->sum) : 0)};
}

static void add_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(ring_add, a, c);
    *out = (struct op_cost){.flops = (double)tensor_elems(&a->x),
                            .bytes = op_bytes(c) + (a->acc_y ? (double)tensor_bytes(&a->y) : 0)};
}

static const struct op_sample merge_samples[] = {
    {"b=2 s=5 h=3 dv=8 no_y=1"},
    {"b=2 s=5 h=3 dv=8 acc_sum=1 acc_total=1 no_y=1"},
    {"b=1 s=1 h=1 dv=1 acc_sum=1 acc_total=1"},
    {"b=0 s=3"},
    {"s=0 acc_sum=1 acc_total=1"},
    {"h=0"},
    {"b=2 s=37 h=5 dv=20 far=1"},
    {"b=2 s=37 h=5 dv=20 far=1 acc_sum=1 acc_total=1"},
    {"b=1 s=70 h=4 dv=64 acc_sum=1 acc_total=1 strided=1"},
    {"b=2 s=130 h=6 dv=128 acc_sum=1 acc_total=1"},
    {"b=1 s=67 h=2 dv=33 acc_sum=1 acc_total=1"},
};
static const struct op_sample merge_bench[] = {{"b=1 s=4096 h=8 dv=128 acc_sum=1 acc_total=1"},
                                               {"b=1 s=16384 h=32 dv=128 acc_sum=1 acc_total=1 gpu=1"}};
static const struct op_sample add_samples[] = {
    {"rows=5 n=33"},
    {"rows=5 n=33 acc_y=1"},
    {"rows=1 n=1 acc_y=1"},
    {"rows=0 n=8"},
    {"rows=3 n=0 acc_y=1"},
    {"rows=70 n=64 acc_y=1 wide_y=1"},
    {"rows=70 n=64 wide_y=1"},
    {"rows=37 n=65 acc_y=1 wide_x=1"},
    {"rows=129 n=256 acc_y=1 wide_x=1 wide_y=1"},
    {"rows=300 n=72 acc_y=1 strided=1"},
    {"rows=300 n=72 acc_y=1 wide_y=1 strided=1"},
};
static const struct op_sample add_bench[] = {{"rows=4096 n=1024 acc_y=1"}, {"rows=16384 n=4096 acc_y=1 gpu=1"}};

OP_TABLES(ring_merge, RING_MERGE_FIELDS);
const struct op_desc ring_merge_desc = {
    OP_IS(ring_merge),
    .summary = "attention over one more block of keys joins that over the blocks before",
    OP_LIST(dims, merge_dims),
    .cost = merge_cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    OP_LIST(samples, merge_samples),
    OP_LIST(bench, merge_bench),
};
OP_TABLES(ring_add, RING_ADD_FIELDS);
const struct op_desc ring_add_desc = {
    OP_IS(ring_add),   .summary = "adds parts of a gradient", OP_LIST(dims, add_dims),   .cost = add_cost,
    .tolerance = 1e-6, OP_LIST(samples, add_samples),         OP_LIST(bench, add_bench),
};
