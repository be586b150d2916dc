/* gradnorm (sqnorm and clip): checks, cost, descriptors, samples and bench
 * shapes; see gradnorm.h. */
#include "ops/check.h"
#include "ops/gradnorm/gradnorm.h"
#include "ops/opshape.h"

#include <math.h>

int sqnorm_check(const struct sqnorm_args *a, struct err *e)
{
    if (a->n_more < 0 || (a->n_more > 0 && a->more == NULL))
        return err_set(e, ST_INVALID, "sqnorm: %d further tensors without a list of them", a->n_more);
    for (int k = 0; k <= a->n_more; k++)
        CHECK_T("sqnorm", "x", sqnorm_at(a, k), wide_of(a->x.dtype), 1, -1);
    CHECK_T("sqnorm", "out", &a->out, DT_F64, 1, 1 + a->n_more);
    return ST_OK;
}

int clip_check(const struct clip_args *a, struct err *e)
{
    struct tensor sums = a->sums;
    sums.stride[0] = 1;
    CHECK_T("clip", "sums", &sums, DT_F64, 1, -1);
    CHECK_OPT("clip", "loss", &a->loss, DT_F64, 1, 2);
    CHECK_T("clip", "out", &a->out, DT_F64, 1, 4);
    if (!(a->max_norm >= 0 && isfinite(a->max_norm)))
        return err_set(e, ST_INVALID, "clip: max_norm is %g, expected 0 (off) or more", a->max_norm);
    return ST_OK;
}

/* ---- sqnorm ---------------------------------------------------------------------------------- */

static const struct op_dim sqnorm_dims[] = {{"n", 33}};
enum { MAX_PARTS = 128 };

/* Attribute parts: tensors in one call, of equal size or nearly. */
static struct sqnorm_args sqnorm_of(const struct op_call *c, struct tensor *more)
{
    OP_UNPACK(sqnorm, whole, c);
    double asked = op_attr(c, "parts");
    int parts = asked >= 1 && asked <= MAX_PARTS ? (int)asked : 1;
    struct sqnorm_args a = *whole;
    for (int k = 0; k < parts; k++) {
        int64_t n = whole->x.dim[0], first = n * k / parts, count = n * (k + 1) / parts - first;
        struct tensor shape = tensor_1d(NULL, whole->x.dtype, count),
                      part = whole->x.data != NULL ? tensor_rows(&whole->x, first, count) : shape;
        *(k == 0 ? &a.x : &more[k - 1]) = part;
    }
    a.more = more;
    a.n_more = parts - 1;
    return a;
}

static int sqnorm_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    struct tensor more[MAX_PARTS];
    TRY(op_infer_shapes(c, ops, e));
    struct sqnorm_args a = sqnorm_of(c, more);
    c->t[op_arg_index(c->desc, "out")] = tensor_1d(NULL, DT_F64, 1 + a.n_more);
    c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, ops->sqnorm_work ? ops->sqnorm_work(&a) : 0);
    return ST_OK;
}

static int sqnorm_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct tensor more[MAX_PARTS];
    struct sqnorm_args a = sqnorm_of(c, more);
    return ops->sqnorm(lane, &a);
}

static void sqnorm_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(sqnorm, a, c);
    double n = (double)a->x.dim[0];
    *out = (struct op_cost){.flops = 2 * n, .bytes = n * (double)dtype_bytes(a->x.dtype)};
}

static const struct op_sample sqnorm_samples[] = {
    {"n=33"},
    {"n=0"},
    {"n=1"},
    {"n=4095"},
    {"n=4096"},
    {"n=4097"},
    {"n=100001"},
    {"n=20000 parts=3"},
    {"n=100001 parts=100"},
};
static const struct op_sample sqnorm_bench[] = {
    {"n=102400"}, {"n=16777216"}, {"n=16777216 parts=128"}, {"n=268435456 parts=96 gpu=1"}};

OP_TABLES_WITH(sqnorm, SQNORM_FIELDS, , OP_ATTR_EXTRA("parts", 1));
const struct op_desc sqnorm_desc = {
    OP_IS(sqnorm),
    .summary = "sum of squares, in double",
    OP_LIST(dims, sqnorm_dims),
    .infer = sqnorm_infer,
    .run = sqnorm_run,
    .cost = sqnorm_cost,
    .tolerance = 1e-13,
    OP_LIST(samples, sqnorm_samples),
    OP_LIST(bench, sqnorm_bench),
};

/* ---- clip ------------------------------------------------------------------------------------ */

static const struct op_dim clip_dims[] = {{"k", 5}};

static bool clip_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; op_arg_is(c, arg, "sums") && i < host->dim[0]; i++) {
        double z = rng_normal(key, (uint64_t)i);
        tensor_set(host, i, z * z);
    }
    return op_arg_is(c, arg, "sums");
}

static void clip_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(clip, a, c);
    double k = (double)a->sums.dim[0];
    *out = (struct op_cost){.flops = k, .bytes = 8 * (k + 4)};
}

static const struct op_sample clip_samples[] = {
    {"k=5"}, {"k=0"}, {"k=1 max_norm=0"}, {"k=100 no_loss=1"}, {"k=3 max_norm=1e6"},
};
static const struct op_sample clip_bench[] = {{"k=200"}};

OP_TABLES(clip, CLIP_FIELDS);
const struct op_desc clip_desc = {
    OP_IS(clip),
    .summary = "gradient norm, clip coefficient and skip flag",
    OP_LIST(dims, clip_dims),
    .cost = clip_cost,
    .sample_fill = clip_fill,
    .tolerance = 1e-15,
    OP_LIST(samples, clip_samples),
    OP_LIST(bench, clip_bench),
};
