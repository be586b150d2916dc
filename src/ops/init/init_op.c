/* init: descriptor, test samples and bench shapes; see init.h. */
#include "ops/check.h"
#include "ops/init/init.h"
#include "ops/opshape.h"

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    double kind = op_attr(c, "kind"), n = op_attr(c, "n");
    if (!(kind >= INIT_ZERO && kind <= INIT_DT_BIAS) || !(n >= 0 && n < 1e12))
        return err_set(e, ST_INVALID, "init: kind %g of %g values, expected 0 to %d and 0 or more", kind, n,
                       INIT_DT_BIAS);
    return op_infer_shapes(c, ops, e);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(init, a, c);
    *out = (struct op_cost){.flops = 40 * (double)a->y.dim[0],
                            .bytes = (double)tensor_bytes(&a->y) + (double)tensor_bytes(&a->copy)};
}

static const struct op_sample samples[] = {
    {"n=100"},
    {"n=0"},
    {"n=1 kind=0"},
    {"n=33 kind=1 no_copy=1"},
    {"n=1001 kind=3 a=-1 b=2 key=7"},
    {"n=65 kind=4 a=0.5"},
    {"n=257 kind=5 a=1 b=16"},
    {"n=64 kind=6 a=0.001 b=0.1"},
    {"n=4099 key=123456789"},
};
static const struct op_sample bench[] = {{"n=1048576"}};

OP_TABLES_WITH(init, INIT_FIELDS, , OP_ATTR_IN(init, int, "kind", kind, INIT_NORMAL) OP_ATTR_EXTRA("n", 100));
const struct op_desc init_desc = {
    OP_IS(init),           .summary = "initial values of a parameter, from its key",
    .infer = infer,        .cost = cost,
    .tolerance = 1e-7,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
