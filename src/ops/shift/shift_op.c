/* shift: argument checks, cost, descriptor; see shift.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/shift/shift.h"

int shift_check(const struct shift_args *a, struct err *e)
{
    CHECK_T("shift", "x", &a->x, DT_I32, 2, -1, -1);
    CHECK_T("shift", "y", &a->y, DT_I32, 2, a->x.dim[0], a->x.dim[1]);
    CHECK_OPT("shift", "doc_start", &a->doc_start, DT_I32, 2, a->x.dim[0], a->x.dim[1]);
    TRY(check_dense("shift", "x", &a->x, e));
    return check_dense("shift", "y", &a->y, e);
}

enum { X, DOC, Y };
static const struct op_arg args[] = {
    {.name = "x", .type = ARG_I32},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "y", .role = ARG_OUT, .type = ARG_I32},
};
static const struct op_attr attrs[] = {{.name = "fill", .value = -1}};
static const struct op_dim dims[] = {{"rows", 3}, {"seq", 17}};

static void shapes(struct op_call *c)
{
    c->t[X] = c->t[DOC] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
}

/* Ids that differ everywhere, and two documents in each row. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    int64_t n = tensor_elems(host), seq = c->t[X].dim[1];
    for (int64_t i = 0; i < n; i++)
        tensor_set(host, i, arg == DOC ? (double)(i % seq >= seq / 2 ? seq / 2 : 0) : arg == X ? (double)i : -7.0);
    return true;
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[Y] = tensor_shape(DT_I32, 2, c->t[X].dim);
    return ST_OK;
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct shift_args a = {.x = c->t[X], .doc_start = c->t[DOC], .y = c->t[Y], .fill = (int64_t)c->attr[0]};
    return ops->shift(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.bytes = 2.0 * (double)tensor_bytes(&c->t[X])};
}

static const struct op_sample samples[] = {{"rows=3 seq=17"}, {"rows=2 seq=9 no_doc_start=1 fill=0"}, {"rows=1 seq=1"},
                                           {"rows=0 seq=4"}, {"rows=2 seq=0"}};
static const struct op_sample bench[] = {{"rows=16 seq=4096"}};

OP_TABLES(shift, SHIFT_FIELDS);
const struct op_desc shift_desc = {
    OP_IS(shift), .summary = "ids one place to the left within rows and documents",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .sample_fill = fill,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
