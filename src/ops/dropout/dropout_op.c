/* dropout: argument checks, cost, descriptors, test samples and bench shapes; see dropout.h. */
#include "ops/check.h"
#include "ops/dropout/dropout.h"
#include "ops/opdesc.h"

int dropout_check(const struct dropout_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    CHECK_T("dropout", "x", &a->x, real, 2, -1, -1);
    CHECK_T("dropout", "y", &a->y, real, 2, a->x.dim[0], a->x.dim[1]);
    const struct dropout_rule *r = &a->rule;
    if (!(r->p >= 0 && r->p < 1))
        return err_set(e, ST_INVALID, "dropout: p is %g, expected 0 <= p < 1", r->p);
    if (r->p == 0)
        return ST_OK;
    if (r->seq < 1)
        return err_set(e, ST_INVALID, "dropout: seq is %lld, expected at least 1",
                       (long long)r->seq);
    CHECK_T("dropout", "info", &r->info, DT_I64, 1, 4);
    return ST_OK;
}

/* ---- descriptor: no backward, as the op is its own; tests/ops/test_dropout.c checks that ----- */

enum { X, INFO, Y };
static const struct op_arg args[] = {
    {.name = "x"},
    {.name = "info", .type = ARG_I64},
    {.name = "y", .role = ARG_OUT},
};
static const struct op_dim dims[] = {{"rows", 6}, {"d", 33}};
enum { ATTR_P, ATTR_KEY, ATTR_SEQ };
static const struct op_attr attrs[] = {{.name = "p", .value = 0.1}, {.name = "key", .value = 12345}, {.name = "seq", .value = 4}};

static void shapes(struct op_call *c)
{
    c->t[X] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
    c->t[INFO] = tensor_1d(NULL, DT_NONE, 4);
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)c;
    (void)key;
    if (arg != INFO)
        return false;
    /* A sample index past 32 bits: its upper half must reach the draw. */
    int64_t *info = host->data;
    info[0] = 17;
    info[1] = (1ll << 33) + 5;
    info[2] = info[3] = 0;
    return true;
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[Y] = tensor_2d(NULL, c->t[X].dtype, c->t[X].dim[0], c->t[X].dim[1]);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct dropout_args a = {.x = c->t[X],
                             .y = c->t[Y],
                             .rule = {.p = c->attr[ATTR_P],
                                      .key = (uint64_t)c->attr[ATTR_KEY],
                                      .seq = (int64_t)c->attr[ATTR_SEQ],
                                      .info = c->t[INFO]}};
    return ops->dropout(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[X]), size = (double)dtype_bytes(c->t[X].dtype);
    *out = (struct op_cost){.flops = n, .bytes = 2 * n * size};
}

static const struct op_sample samples[] = {
    {"rows=6 d=33"},
    {"rows=1 d=1 seq=1"},
    {"rows=0 d=8"},
    {"rows=9 d=66 p=0.5 seq=3"},
    {"rows=13 d=64 p=0"},
    {"rows=5 d=129 p=0.999 key=987654321"},
    {"rows=70 d=65 p=0.25 seq=70"},
    {"rows=9 d=66 p=0.5 strided=1"},
    {"rows=37 d=264 seq=5"},
};
static const struct op_sample bench[] = {
    {"rows=4096 d=320 seq=256"},
    {"rows=16384 d=2048 seq=4096"},
};

OP_TABLES_AND(dropout, DROPOUT_FIELDS, OP_FIELD_IN(dropout, "info", rule.info, OPT, I64, "4"));
const struct op_desc dropout_desc = {
    OP_IS(dropout),
    .summary = "zero a random share of the channels, scale the rest",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .sample_fill = fill,
    .tolerance = 1e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
