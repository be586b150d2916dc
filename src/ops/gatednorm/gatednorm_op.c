/* gatednorm: argument checks, cost, descriptors, test samples and bench shapes; see gatednorm.h. */
#include "ops/check.h"
#include "ops/gatednorm/gatednorm.h"
#include "ops/opdesc.h"

static int check_common(const char *op, const struct tensor *x, const struct tensor *z,
                        const struct tensor *w, const struct tensor *rstd, int64_t group,
                        struct err *e)
{
    enum dtype real = x->dtype;
    CHECK_T(op, "x", x, real, 2, -1, -1);
    if (group < 1 || x->dim[1] % group != 0)
        return err_set(e, ST_INVALID, "%s: groups of %lld channels do not divide a width of %lld",
                       op, (long long)group, (long long)x->dim[1]);
    CHECK_T(op, "z", z, real, 2, x->dim[0], x->dim[1]);
    CHECK_T(op, "w", w, wide_of(real), 1, -1);
    if (w->dim[0] != x->dim[1] && w->dim[0] != group)
        return err_set(e, ST_INVALID,
                       "%s: w has %lld gains, expected one per channel (%lld) or per channel of a "
                       "group (%lld)",
                       op, (long long)w->dim[0], (long long)x->dim[1], (long long)group);
    CHECK_T(op, "rstd", rstd, wide_of(real), 2, x->dim[0], x->dim[1] / group);
    return ST_OK;
}

int gatednorm_fwd_check(const struct gatednorm_fwd_args *a, struct err *e)
{
    TRY(check_common("gatednorm_fwd", &a->x, &a->z, &a->w, &a->rstd, a->group, e));
    CHECK_T("gatednorm_fwd", "y", &a->y, a->x.dtype, 2, a->x.dim[0], a->x.dim[1]);
    return ST_OK;
}

int gatednorm_bwd_check(const struct gatednorm_bwd_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    TRY(check_common("gatednorm_bwd", &a->x, &a->z, &a->w, &a->rstd, a->group, e));
    CHECK_T("gatednorm_bwd", "dy", &a->dy, real, 2, a->x.dim[0], a->x.dim[1]);
    CHECK_T("gatednorm_bwd", "dx", &a->dx, real, 2, a->x.dim[0], a->x.dim[1]);
    CHECK_T("gatednorm_bwd", "dz", &a->dz, real, 2, a->x.dim[0], a->x.dim[1]);
    CHECK_T("gatednorm_bwd", "dw", &a->dw, wide_of(real), 1, a->w.dim[0]);
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

/* The attribute group is the size; shared: w holds one group's gains. */
static const struct op_dim dims[] = {{"rows", 5}, {"d", 24}, {"shared", 0}};

static struct tensor x_like(const struct op_call *c)
{
    return tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
}

static struct tensor w_like(const struct op_call *c)
{
    return tensor_1d(NULL, DT_NONE,
                     c->dim[2] != 0 ? (int64_t)op_attr(c, "group") : (int64_t)c->dim[1]);
}

static struct tensor rstd_like(const struct tensor *x, double group)
{
    return tensor_2d(NULL, wide_of(x->dtype), x->dim[0], group >= 1 ? x->dim[1] / (int64_t)group : 0);
}

static int check_shapes(const char *op, const struct tensor *x, const struct tensor *w,
                        double group, struct err *e)
{
    if (!(group >= 1 && group <= INT32_MAX))
        return err_set(e, ST_INVALID, "%s: group is %g, expected a number of channels", op, group);
    if (x->rank != 2 || w->rank != 1)
        return err_set(e, ST_INVALID, "%s: x must have rank 2 and w rank 1", op);
    return ST_OK;
}

/* Statistics are positive and near 1. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (arg != op_arg_index(c->desc, "rstd") || c->desc->args[arg].role != ARG_IN)
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(float)(0.5 + rng_uniform(key, (uint64_t)i)));
    return true;
}

enum { F_X, F_Z, F_W, F_Y, F_RSTD };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "z"},
    {.name = "w", .type = ARG_WIDE},
    {.name = "y", .role = ARG_OUT},
    {.name = "rstd", .role = ARG_OUT, .type = ARG_WIDE, .no_grad = true},
};
static const struct op_attr fwd_attrs[] = {
    {.name = "group", .value = 8}, {.name = "eps", .value = 1e-5}, {.name = "norm_first", .value = 0}, {.name = "zero_centered", .value = 0}};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = c->t[F_Z] = x_like(c);
    c->t[F_W] = w_like(c);
}

static struct gatednorm_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct gatednorm_fwd_args){.x = c->t[F_X],
                                       .z = c->t[F_Z],
                                       .w = c->t[F_W],
                                       .y = c->t[F_Y],
                                       .rstd = c->t[F_RSTD],
                                       .group = (int64_t)c->attr[0],
                                       .eps = c->attr[1],
                                       .norm_first = c->attr[2] != 0,
                                       .zero_centered = c->attr[3] != 0};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    TRY(check_shapes("gatednorm_fwd", &c->t[F_X], &c->t[F_W], c->attr[0], e));
    c->t[F_Y] = tensor_shape(c->t[F_X].dtype, 2, c->t[F_X].dim);
    c->t[F_RSTD] = rstd_like(&c->t[F_X], c->attr[0]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gatednorm_fwd_args a = fwd_pack(c);
    return ops->gatednorm_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_X]), size = (double)dtype_bytes(c->t[F_X].dtype);
    *out = (struct op_cost){.flops = 9 * n, .bytes = 3 * n * size};
}

enum { B_DY, B_X, B_Z, B_W, B_RSTD, B_DX, B_DZ, B_DW, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x"},
    {.name = "z"},
    {.name = "w", .type = ARG_WIDE},
    {.name = "rstd", .type = ARG_WIDE},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dz", .role = ARG_OUT},
    {.name = "dw", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {
    {.name = "group", .value = 8}, {.name = "norm_first", .value = 0}, {.name = "zero_centered", .value = 0}, {.name = "acc_dw", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = c->t[B_X] = c->t[B_Z] = x_like(c);
    c->t[B_W] = w_like(c);
    c->t[B_RSTD] = rstd_like(&c->t[B_X], c->attr[0]);
}

static struct gatednorm_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct gatednorm_bwd_args){.dy = c->t[B_DY],
                                       .x = c->t[B_X],
                                       .z = c->t[B_Z],
                                       .w = c->t[B_W],
                                       .rstd = c->t[B_RSTD],
                                       .dx = c->t[B_DX],
                                       .dz = c->t[B_DZ],
                                       .dw = c->t[B_DW],
                                       .work = c->t[B_WORK],
                                       .group = (int64_t)c->attr[0],
                                       .norm_first = c->attr[1] != 0,
                                       .zero_centered = c->attr[2] != 0,
                                       .acc_dw = c->attr[3] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(check_shapes("gatednorm_bwd", &c->t[B_X], &c->t[B_W], c->attr[0], e));
    c->t[B_DX] = c->t[B_DZ] = tensor_shape(c->t[B_X].dtype, 2, c->t[B_X].dim);
    c->t[B_DW] = tensor_1d(NULL, wide_of(c->t[B_X].dtype), c->t[B_W].dim[0]);
    struct gatednorm_bwd_args a = bwd_pack(c);
    c->t[B_WORK] =
        tensor_1d(NULL, DT_U8, ops->gatednorm_bwd_work ? ops->gatednorm_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gatednorm_bwd_args a = bwd_pack(c);
    return ops->gatednorm_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_X]), size = (double)dtype_bytes(c->t[B_X].dtype);
    *out = (struct op_cost){.flops = 22 * n, .bytes = 5 * n * size};
}

static const struct op_sample samples[] = {
    {"rows=5 d=24 group=8"},
    {"rows=1 d=1 group=1"},
    {"rows=0 d=8 group=4"},
    {"rows=3 d=0 group=4"},
    {"rows=65 d=66 group=33 zero_centered=1"},
    {"rows=70 d=48 group=48 acc_dw=1"},
    {"rows=7 d=51 group=17 norm_first=1 shared=1 strided=1"},
    {"rows=66 d=40 group=20 norm_first=1 zero_centered=1 acc_dw=1"},
    {"rows=130 d=96 group=16 shared=1 strided=1"},
    {"rows=67 d=256 group=64"},
    {"rows=33 d=2304 group=128 norm_first=1 shared=1 acc_dw=1"},
    {"rows=33 d=1024 group=512"},
    {"rows=9 d=4096 group=2048 norm_first=1"},
    {"rows=5 d=4608 group=4608"},
    {"rows=600 d=24 group=8 shared=1"},
};
static const struct op_sample bench[] = {{"rows=4096 d=1024 group=128"},
                                         {"rows=4096 d=4096 group=128 norm_first=1 shared=1"},
                                         {"rows=16384 d=4096 group=512 gpu=1"},
                                         {"rows=16384 d=4096 group=128 norm_first=1 shared=1 gpu=1"}};

OP_TABLES(gatednorm_fwd, GATEDNORM_FWD_FIELDS);
const struct op_desc gatednorm_fwd_desc = {
    OP_IS(gatednorm_fwd),
    .summary = "grouped RMSNorm with a SiLU gate before or after it",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "gatednorm_bwd",
    .tolerance = 3e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(gatednorm_bwd, GATEDNORM_BWD_FIELDS);
const struct op_desc gatednorm_bwd_desc = {
    OP_IS(gatednorm_bwd),
    .summary = "gradient of gatednorm_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
