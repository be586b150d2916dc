/* init: descriptor, test samples and bench shapes; see init.h. */
#include "ops/check.h"
#include "ops/init/init.h"
#include "ops/opdesc.h"

enum { Y, COPY };
static const struct op_arg args[] = {{.name = "y", .role = ARG_OUT, .type = ARG_WIDE}, {.name = "copy", .role = ARG_OOUT}};
enum { KIND, A, B, N, KEY };
static const struct op_attr attrs[] = {{.name = "kind", .value = INIT_NORMAL}, {.name = "a", .value = 0.02}, {.name = "b", .value = 1}, {.name = "n", .value = 100}, {.name = "key", .value = 1}};

static void shapes(struct op_call *c) { (void)c; }

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    double kind = c->attr[KIND], n = c->attr[N];
    if (!(kind >= INIT_ZERO && kind <= INIT_DT_BIAS) || !(n >= 0 && n < 1e12))
        return err_set(e, ST_INVALID, "init: kind %g of %g values, expected 0 to %d and 0 or more", kind, n, INIT_DT_BIAS);
    c->t[Y] = tensor_1d(NULL, wide_of(ops->real), (int64_t)n);
    c->t[COPY] = tensor_1d(NULL, ops->real, (int64_t)n);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct init_args a = {.y = c->t[Y], .copy = c->t[COPY], .kind = (enum init_kind)c->attr[KIND], .a = c->attr[A], .b = c->attr[B],
                          .key = (uint64_t)c->attr[KEY]};
    return ops->init(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = 40 * c->attr[N], .bytes = (double)tensor_bytes(&c->t[Y]) + (double)tensor_bytes(&c->t[COPY])};
}

static const struct op_sample samples[] = {
    {"n=100"}, {"n=0"}, {"n=1 kind=0"}, {"n=33 kind=1 no_copy=1"}, {"n=1001 kind=3 a=-1 b=2 key=7"}, {"n=65 kind=4 a=0.5"},
    {"n=257 kind=5 a=1 b=16"}, {"n=64 kind=6 a=0.001 b=0.1"}, {"n=4099 key=123456789"},
};
static const struct op_sample bench[] = {{"n=1048576"}};

OP_TABLES(init, INIT_FIELDS);
const struct op_desc init_desc = {
    OP_IS(init), .summary = "initial values of a parameter, from its key",
    OP_LIST(args, args), OP_LIST(attrs, attrs),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .tolerance = 1e-7,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
