/* dropout: argument checks, cost, descriptors, test samples and bench shapes; see dropout.h. */
#include "ops/check.h"
#include "ops/dropout/dropout.h"
#include "ops/opshape.h"

int dropout_check(const struct dropout_args *a, struct err *e)
{
    const struct dropout_rule *r = &a->rule;
    TRY(op_check_fields(&dropout_desc, a, e));
    if (!(r->p >= 0 && r->p < 1))
        return err_set(e, ST_INVALID, "dropout: p is %g, expected 0 <= p < 1", r->p);
    if (r->p == 0)
        return ST_OK;
    if (r->first < 0)
        return err_set(e, ST_INVALID, "dropout: first is %lld, expected 0 or more", (long long)r->first);
    if (r->seq < 1)
        return err_set(e, ST_INVALID, "dropout: seq is %lld, expected at least 1", (long long)r->seq);
    CHECK_T("dropout", "info", &r->info, DT_I64, 1, 4);
    return ST_OK;
}

/* ---- descriptor: no backward, as the op is its own; tests/ops/test_dropout.c checks that ----- */

static const struct op_dim dims[] = {{"rows", 6}, {"d", 33}};

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (!op_arg_is(c, arg, "info"))
        return false;
    /* A sample index past 32 bits: its upper half must reach the draw. */
    int64_t *info = host->data;
    info[0] = 17;
    info[1] = (1ll << 33) + 5;
    info[2] = 40;
    info[3] = 0;
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(dropout, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){.flops = n, .bytes = (double)(tensor_bytes(&a->x) + tensor_bytes(&a->y))};
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
    {"rows=37 d=264 seq=5 first=18"},
    {"rows=37 d=264 seq=5 wide_y=1"},
    {"rows=9 d=66 p=0.5 wide_y=1 strided=1"},
    {"rows=13 d=64 p=0 wide_y=1"},
    {"rows=37 d=264 seq=5 wide_x=1"},
    {"rows=9 d=65 p=0.25 wide_x=1"},
    {"rows=13 d=64 p=0 wide_x=1"},
    {"rows=9 d=72 p=0.5 wide_x=1 wide_y=1"},
    {"rows=0 d=8 wide_y=1"},
};
static const struct op_sample bench[] = {
    {"rows=4096 d=320 seq=256"},
    {"rows=16384 d=2048 seq=4096"},
};

OP_TABLES_WITH(dropout, DROPOUT_FIELDS, OP_FIELD_IN(dropout, "info", rule.info, OPT, I64, "4"),
               OP_ATTR_IN(dropout, double, "p", rule.p, 0.1) OP_ATTR_IN(dropout, uint64_t, "key", rule.key, 12345)
                   OP_ATTR_IN(dropout, int64_t, "seq", rule.seq, 4)
                       OP_ATTR_IN(dropout, int64_t, "first", rule.first, 0));
const struct op_desc dropout_desc = {
    OP_IS(dropout),
    .summary = "zero a random share of the channels, scale the rest",
    OP_LIST(dims, dims),
    .cost = cost,
    .sample_fill = fill,
    .tolerance = 1e-6,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
