/* gradnorm (sqnorm and clip): checks, cost, descriptors, samples and bench shapes; see gradnorm.h.
 */
#include "ops/check.h"
#include "ops/gradnorm/gradnorm.h"
#include "ops/opdesc.h"

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
        return err_set(e, ST_INVALID, "clip: max_norm is %g, expected 0 (off) or more",
                       a->max_norm);
    return ST_OK;
}

/* ---- sqnorm ---------------------------------------------------------------------------------- */

enum { S_X, S_OUT, S_WORK };
static const struct op_arg sqnorm_op_args[] = {
    {.name = "x", .type = ARG_WIDE},
    {.name = "out", .role = ARG_OUT, .type = ARG_F64},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr sqnorm_attrs[] = {{.name = "parts", .value = 1}}; /* tensors in one call, of equal size or nearly */
static const struct op_dim sqnorm_dims[] = {{"n", 33}};
enum { MAX_PARTS = 128 };

static void sqnorm_shapes(struct op_call *c)
{
    c->t[S_X] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[0]);
}

static int sqnorm_parts(const struct op_call *c)
{
    return c->attr[0] >= 1 && c->attr[0] <= MAX_PARTS ? (int)c->attr[0] : 1;
}

static struct tensor sqnorm_part(const struct op_call *c, int64_t k, int64_t parts)
{
    int64_t n = c->t[S_X].dim[0], first = n * k / parts, count = n * (k + 1) / parts - first;
    struct tensor shape = tensor_1d(NULL, c->t[S_X].dtype, count);
    return c->t[S_X].data != NULL ? tensor_rows(&c->t[S_X], first, count) : shape;
}

static struct sqnorm_args sqnorm_pack(const struct op_call *c, struct tensor *more)
{
    int parts = sqnorm_parts(c);
    for (int k = 1; k < parts; k++)
        more[k - 1] = sqnorm_part(c, k, parts);
    return (struct sqnorm_args){.x = sqnorm_part(c, 0, parts), .out = c->t[S_OUT], .work = c->t[S_WORK],
                                .more = more, .n_more = parts - 1};
}

static int sqnorm_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    struct tensor more[MAX_PARTS];
    c->t[S_OUT] = tensor_1d(NULL, DT_F64, sqnorm_parts(c));
    struct sqnorm_args a = sqnorm_pack(c, more);
    c->t[S_WORK] = tensor_1d(NULL, DT_U8, ops->sqnorm_work ? ops->sqnorm_work(&a) : 0);
    return ST_OK;
}

static int sqnorm_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct tensor more[MAX_PARTS];
    struct sqnorm_args a = sqnorm_pack(c, more);
    return ops->sqnorm(lane, &a);
}

static void sqnorm_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)c->t[S_X].dim[0];
    *out = (struct op_cost){.flops = 2 * n, .bytes = n * (double)dtype_bytes(c->t[S_X].dtype)};
}

static const struct op_sample sqnorm_samples[] = {
    {"n=33"}, {"n=0"}, {"n=1"}, {"n=4095"}, {"n=4096"}, {"n=4097"}, {"n=100001"},
    {"n=20000 parts=3"}, {"n=100001 parts=100"},
};
static const struct op_sample sqnorm_bench[] = {{"n=102400"}, {"n=16777216"}, {"n=16777216 parts=128"}, {"n=268435456 parts=96 gpu=1"}};

OP_TABLES(sqnorm, SQNORM_FIELDS);
const struct op_desc sqnorm_desc = {
    OP_IS(sqnorm),
    .summary = "sum of squares, in double",
    OP_LIST(args, sqnorm_op_args), OP_LIST(attrs, sqnorm_attrs), OP_LIST(dims, sqnorm_dims),
    .sample_shapes = sqnorm_shapes, .infer = sqnorm_infer, .run = sqnorm_run, .cost = sqnorm_cost,
    .tolerance = 1e-13,
    OP_LIST(samples, sqnorm_samples), OP_LIST(bench, sqnorm_bench),
};

/* ---- clip ------------------------------------------------------------------------------------ */

enum { C_SUMS, C_LOSS, C_OUT };
static const struct op_arg clip_op_args[] = {
    {.name = "sums", .type = ARG_F64},
    {.name = "loss", .role = ARG_OPT, .type = ARG_F64},
    {.name = "out", .role = ARG_OUT, .type = ARG_F64},
};
static const struct op_dim clip_dims[] = {{"k", 5}};
static const struct op_attr clip_attrs[] = {{.name = "max_norm", .value = 1}};

static void clip_shapes(struct op_call *c)
{
    c->t[C_SUMS] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[0]);
    c->t[C_LOSS] = tensor_1d(NULL, DT_NONE, 2);
}

static bool clip_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)c;
    for (int64_t i = 0; arg == C_SUMS && i < host->dim[0]; i++) {
        double z = rng_normal(key, (uint64_t)i);
        tensor_set(host, i, z * z);
    }
    return arg == C_SUMS;
}

static int clip_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[C_OUT] = tensor_1d(NULL, DT_F64, 4);
    return ST_OK;
}

static int clip_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct clip_args a = {
        .sums = c->t[C_SUMS], .loss = c->t[C_LOSS], .out = c->t[C_OUT], .max_norm = c->attr[0]};
    return ops->clip(lane, &a);
}

static void clip_cost(const struct op_call *c, struct op_cost *out)
{
    double k = (double)c->t[C_SUMS].dim[0];
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
    OP_LIST(args, clip_op_args), OP_LIST(attrs, clip_attrs), OP_LIST(dims, clip_dims),
    .sample_shapes = clip_shapes, .infer = clip_infer, .run = clip_run, .cost = clip_cost,
    .sample_fill = clip_fill,
    .tolerance = 1e-15,
    OP_LIST(samples, clip_samples), OP_LIST(bench, clip_bench),
};
