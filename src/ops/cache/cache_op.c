/* cache_store: argument checks, cost, descriptor, test samples and bench shapes; see cache.h. */
#include "ops/check.h"
#include "ops/cache/cache.h"
#include "ops/opshape.h"

OP_CHECK(cache_store)

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"b", 2}, {"s", 3}, {"g", 2}, {"d", 8}, {"at", 4}};

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (!op_arg_is(c, arg, "start"))
        return false;
    tensor_set(host, 0, c->dim[4]);
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(cache_store, a, c);
    *out = (struct op_cost){.flops = 0, .bytes = 2 * (double)tensor_bytes(&a->x)};
}

static const struct op_sample samples[] = {
    {"b=2 s=3 g=2 d=8 at=4"},          {"b=1 s=1 g=1 d=1 at=15"},
    {"b=2 s=0 g=3 d=5 at=16"},         {"b=0 s=3 g=2 d=8"},
    {"b=3 s=16 g=2 d=17 at=0"},        {"b=2 s=5 g=3 d=7 at=2"},
    {"b=2 s=70 g=4 d=33 at=1 max=71"}, {"b=3 s=5 g=2 d=64 at=3"},
    {"b=2 s=3 g=2 d=8 at=23 ratio=4"}, {"b=2 s=3 g=1 d=8 at=7 strided=1"},
};
static const struct op_sample bench[] = {{"b=16 s=256 g=2 d=64 at=0 max=1024"}};

OP_TABLES_WITH(cache_store, CACHE_STORE_FIELDS, , OP_ATTR_EXTRA("max", 16));
const struct op_desc cache_store_desc = {
    OP_IS(cache_store),        .summary = "put new rows of keys or values into a decode cache",
    OP_LIST(dims, dims),       .cost = cost,
    .sample_fill = fill,       .tolerance = 0,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
