/* shift: argument checks, cost, descriptor; see shift.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/shift/shift.h"

OP_CHECK(shift)

static const struct op_dim dims[] = {{"rows", 3}, {"seq", 17}};

/* Ids that differ everywhere, and two documents in each row. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    OP_UNPACK(shift, a, c);
    (void)key;
    int64_t n = tensor_elems(host), seq = a->x.dim[1];
    for (int64_t i = 0; i < n; i++)
        tensor_set(host, i,
                   op_arg_is(c, arg, "doc_start") ? (double)(i % seq >= seq / 2 ? seq / 2 : 0)
                   : op_arg_is(c, arg, "x")       ? (double)i
                                                  : -7.0);
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(shift, a, c);
    *out = (struct op_cost){.bytes = 2.0 * (double)tensor_bytes(&a->x)};
}

static const struct op_sample samples[] = {
    {"rows=3 seq=17"}, {"rows=2 seq=9 no_doc_start=1 fill=0"}, {"rows=1 seq=1"}, {"rows=0 seq=4"}, {"rows=2 seq=0"}};
static const struct op_sample bench[] = {{"rows=16 seq=4096"}};

OP_TABLES(shift, SHIFT_FIELDS);
const struct op_desc shift_desc = {
    OP_IS(shift),          .summary = "ids one place to the left within rows and documents",
    OP_LIST(dims, dims),   .cost = cost,
    .sample_fill = fill,   OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
