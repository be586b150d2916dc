/* adamw: argument checks, cost, descriptor, test samples and bench shapes; see adamw.h. */
#include "ops/adamw/adamw_int.h"
#include "ops/adamw/adamw.h"
#include "ops/check.h"
#include "ops/opdesc.h"

#include <math.h>

static int check_part(const struct adamw_part *a, struct err *e)
{
    enum dtype wide = wide_of(a->p.dtype);
    CHECK_T("adamw", "p", &a->p, wide, 1, -1);
    int64_t n = a->p.dim[0];
    CHECK_T("adamw", "g", &a->g, wide, 1, n);
    CHECK_T("adamw", "m", &a->m, wide, 1, n);
    CHECK_T("adamw", "v", &a->v, wide, 1, n);
    /* A narrower copy beside wide parameters, or one of the same type. */
    CHECK_OPT("adamw", "copy", &a->copy, wide_of(a->copy.dtype) == wide ? a->copy.dtype : wide, 1, n);
    if (!isfinite(a->decay))
        return err_set(e, ST_INVALID, "adamw: decay is %g", a->decay);
    return ST_OK;
}

int adamw_check(const struct adamw_args *a, struct err *e)
{
    if (a->n_more < 0 || (a->n_more > 0 && a->more == NULL))
        return err_set(e, ST_INVALID, "adamw: %d further parameters without a list of them", a->n_more);
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part part = adamw_part_at(a, k);
        TRY(check_part(&part, e));
        if (part.p.dtype != a->p.dtype)
            return err_set(e, ST_INVALID, "adamw: parameters of one call must have one type");
    }
    CHECK_T("adamw", "hyper", &a->hyper, DT_F64, 1, 8);
    CHECK_T("adamw", "scale", &a->scale, DT_F64, 1, 4);
    if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1))
        return err_set(e, ST_INVALID, "adamw: beta1 is %g and beta2 is %g, expected 0 <= beta < 1",
                       a->beta1, a->beta2);
    if (!(a->eps > 0 && isfinite(a->eps)))
        return err_set(e, ST_INVALID, "adamw: eps is %g, expected more than 0", a->eps);
    return ST_OK;
}

int adamw_value_check(const struct adamw_args *a, struct err *e)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data;
    if (!isfinite(hyper[0]))
        return err_set(e, ST_NONFINITE, "adamw: the learning rate is %g", hyper[0]);
    if (!(hyper[1] > 0 && hyper[1] <= 1 && hyper[2] > 0 && hyper[2] <= 1)) {
        err_set(e, ST_INVALID,
                "adamw: bias corrections are %g and %g, expected 0 < 1 - beta^t <= 1", hyper[1],
                hyper[2]);
        return err_hint(e, "the step t counts from 1");
    }
    if (!isfinite(scale[1]))
        return err_set(e, ST_NONFINITE, "adamw: the gradient coefficient is %g", scale[1]);
    return ST_OK;
}

/* ---- descriptor: p, m and v are updated in place, so they are outputs whose old values matter ---- */

enum { G, HYPER, SCALE, P, M, V, COPY };
static const struct op_arg args[] = {
    {.name = "g", .type = ARG_WIDE},
    {.name = "hyper", .type = ARG_F64},
    {.name = "scale", .type = ARG_F64},
    {.name = "p", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "m", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "v", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "copy", .role = ARG_OOUT},
};
/* step, lr, clip and skip are only for samples: they set what hyper and scale hold. parts: the elements are dealt
 * out to so many parameters of one call. */
enum { DIM_N, DIM_STEP, DIM_LR, DIM_CLIP, DIM_SKIP, DIM_PARTS };
static const struct op_dim dims[] = {
    {"n", 33}, {"step", 3}, {"lr", 0.01}, {"clip", 1}, {"skip", 0}, {"parts", 1}};
enum { BETA1, BETA2, EPS, DECAY };
static const struct op_attr attrs[] = {
    {.name = "beta1", .value = 0.9}, {.name = "beta2", .value = 0.95}, {.name = "eps", .value = 1e-8}, {.name = "decay", .value = 0.1}};

static void shapes(struct op_call *c)
{
    c->t[G] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[DIM_N]);
    c->t[HYPER] = tensor_1d(NULL, DT_NONE, 8);
    c->t[SCALE] = tensor_1d(NULL, DT_NONE, 4);
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    double step = c->dim[DIM_STEP];
    double hyper[8] = {c->dim[DIM_LR], 1 - pow(c->attr[BETA1], step),
                       1 - pow(c->attr[BETA2], step)};
    double scale[4] = {1, c->dim[DIM_CLIP], c->dim[DIM_SKIP], 0};
    if (arg != HYPER && arg != SCALE && arg != V)
        return false;
    for (int64_t i = 0; i < host->dim[0]; i++) {
        double z = rng_normal(key, (uint64_t)i);
        tensor_set(host, i,
                   arg == HYPER   ? hyper[i]
                   : arg == SCALE ? scale[i]
                                  : (double)(float)(z * z));
    }
    return true;
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    for (int i = P; i <= V; i++)
        c->t[i] = tensor_1d(NULL, c->t[G].dtype, c->t[G].dim[0]);
    c->t[COPY] = tensor_1d(NULL, ops->real, c->t[G].dim[0]);
    return ST_OK;
}

enum { MAX_PARTS = 128 };

/* Elements [first, first + n) of a tensor; absent stays absent. */
static struct tensor piece(const struct tensor *t, int64_t first, int64_t n)
{
    return t->data != NULL ? tensor_rows(t, first, n) : *t;
}

static struct adamw_part part_of(const struct op_call *c, int64_t k, int64_t parts)
{
    int64_t n = c->t[G].dim[0], first = n * k / parts, count = n * (k + 1) / parts - first;
    return (struct adamw_part){.p = piece(&c->t[P], first, count),
                               .g = piece(&c->t[G], first, count),
                               .m = piece(&c->t[M], first, count),
                               .v = piece(&c->t[V], first, count),
                               .copy = piece(&c->t[COPY], first, count),
                               .decay = c->attr[DECAY]};
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    double asked = c->dim[DIM_PARTS];
    int parts = asked >= 1 && asked <= MAX_PARTS ? (int)asked : 1;
    struct adamw_part more[MAX_PARTS], first = part_of(c, 0, parts);
    for (int k = 1; k < parts; k++)
        more[k - 1] = part_of(c, k, parts);
    struct adamw_args a = {.p = first.p,
                           .g = first.g,
                           .m = first.m,
                           .v = first.v,
                           .copy = first.copy,
                           .more = more,
                           .n_more = parts - 1,
                           .hyper = c->t[HYPER],
                           .scale = c->t[SCALE],
                           .beta1 = c->attr[BETA1],
                           .beta2 = c->attr[BETA2],
                           .eps = c->attr[EPS],
                           .decay = c->attr[DECAY]};
    return ops->adamw(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)c->t[G].dim[0], size = (double)dtype_bytes(c->t[G].dtype);
    *out = (struct op_cost){.flops = 15 * n, .bytes = 7 * n * size + (double)tensor_bytes(&c->t[COPY])};
}

static const struct op_sample samples[] = {
    {"n=33"},         {"n=1 step=1"},
    {"n=0"},          {"n=4097 clip=0.25 step=1000"},
    {"n=100 skip=1"}, {"n=65 decay=0 beta1=0 beta2=0 step=1"},
    {"n=64 lr=0"},    {"n=20000 eps=0.001 beta2=0.999 step=1"},
    {"n=4096 no_copy=1"}, {"n=8200 parts=3"},
    {"n=100001 parts=100"},
};
static const struct op_sample bench[] = {{"n=102400"}, {"n=16777216"}, {"n=16777216 parts=128"}, {"n=33554432 parts=16 gpu=1"}};

OP_TABLES(adamw, ADAMW_FIELDS);
const struct op_desc adamw_desc = {
    OP_IS(adamw),
    .summary = "one AdamW update of a parameter, in place",
    OP_LIST(args, args), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = shapes, .infer = infer, .run = run, .cost = cost,
    .sample_fill = fill,
    .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
