/* cache_store: argument checks, cost, descriptor, test samples and bench shapes; see cache.h. */
#include "ops/check.h"
#include "ops/cache/cache.h"
#include "ops/opdesc.h"

int cache_store_check(const struct cache_store_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    CHECK_T("cache_store", "x", &a->x, real, 4, -1, -1, -1, -1);
    CHECK_T("cache_store", "cache", &a->cache, real, 4, a->x.dim[0], -1, a->x.dim[2], a->x.dim[3]);
    CHECK_T("cache_store", "start", &a->start, DT_I64, 1, 1);
    return check_dense("cache_store", "cache", &a->cache, e);
}

/* ---- descriptor ---------------------------------------------------------------------------- */

enum { A_X, A_START, A_CACHE };
static const struct op_arg args[] = {
    {.name = "x"},
    {.name = "start", .type = ARG_I64, .no_grad = true},
    {.name = "cache", .role = ARG_OUT, .no_grad = true},
};
static const struct op_attr attrs[] = {{.name = "max", .value = 16}};
static const struct op_dim dims[] = {{"b", 2}, {"s", 3}, {"g", 2}, {"d", 8}, {"at", 4}};

static void shapes(struct op_call *c)
{
    c->t[A_X] = tensor_4d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1], (int64_t)c->dim[2],
                          (int64_t)c->dim[3]);
    c->t[A_START] = tensor_1d(NULL, DT_NONE, 1);
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (arg != A_START)
        return false;
    tensor_set(host, 0, c->dim[4]);
    return true;
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    const struct tensor *x = &c->t[A_X];
    if (x->rank != 4)
        return err_set(e, ST_INVALID, "cache_store: x has rank %d, expected 4", x->rank);
    if (!(c->attr[0] >= 0 && c->attr[0] < 1e15))
        return err_set(e, ST_INVALID, "cache_store: a cache of %g rows", c->attr[0]);
    c->t[A_CACHE] = tensor_4d(NULL, x->dtype, x->dim[0], (int64_t)c->attr[0], x->dim[2], x->dim[3]);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct cache_store_args a = {.x = c->t[A_X], .cache = c->t[A_CACHE], .start = c->t[A_START]};
    return ops->cache_store(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = 0, .bytes = 2 * (double)tensor_bytes(&c->t[A_X])};
}

static const struct op_sample samples[] = {
    {"b=2 s=3 g=2 d=8 at=4"},          {"b=1 s=1 g=1 d=1 at=15"},
    {"b=2 s=0 g=3 d=5 at=16"},         {"b=0 s=3 g=2 d=8"},
    {"b=3 s=16 g=2 d=17 at=0"},        {"b=2 s=5 g=3 d=7 at=2"},
    {"b=2 s=70 g=4 d=33 at=1 max=71"}, {"b=3 s=5 g=2 d=64 at=3"},
};
static const struct op_sample bench[] = {{"b=16 s=256 g=2 d=64 at=0 max=1024"}};

OP_TABLES(cache_store, CACHE_STORE_FIELDS);
const struct op_desc cache_store_desc = {
    OP_IS(cache_store),
    .summary = "put new rows of keys or values into a decode cache",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .sample_fill = fill,
    .tolerance = 0,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
