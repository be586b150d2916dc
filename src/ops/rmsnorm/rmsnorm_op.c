/* rmsnorm: argument checks, cost, descriptors, test samples and bench shapes; see rmsnorm.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/rmsnorm/rmsnorm.h"

int rmsnorm_fwd_check(const struct rmsnorm_fwd_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    const int64_t any[] = {-1, -1, -1};
    if (a->x.rank != 2 && a->x.rank != 3)
        return err_set(e, ST_INVALID, "rmsnorm_fwd: x has rank %d, expected 2 or 3", a->x.rank);
    TRY(check_tensor("rmsnorm_fwd", "x", &a->x, real, a->x.rank, any, e));
    TRY(check_tensor("rmsnorm_fwd", "y", &a->y, real, a->x.rank, a->x.dim, e));
    CHECK_OPT("rmsnorm_fwd", "w", &a->w, wide_of(real), 1, cols_of(&a->x));
    CHECK_T("rmsnorm_fwd", "rstd", &a->rstd, wide_of(real), 1, rows_of(&a->x));
    return ST_OK;
}

int rmsnorm_bwd_check(const struct rmsnorm_bwd_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    const int64_t any[] = {-1, -1, -1};
    if (a->x.rank != 2 && a->x.rank != 3)
        return err_set(e, ST_INVALID, "rmsnorm_bwd: x has rank %d, expected 2 or 3", a->x.rank);
    TRY(check_tensor("rmsnorm_bwd", "x", &a->x, real, a->x.rank, any, e));
    TRY(check_tensor("rmsnorm_bwd", "dy", &a->dy, real, a->x.rank, a->x.dim, e));
    TRY(check_tensor("rmsnorm_bwd", "dx", &a->dx, real, a->x.rank, a->x.dim, e));
    if (present(&a->dres))
        TRY(check_tensor("rmsnorm_bwd", "dres", &a->dres, real, a->x.rank, a->x.dim, e));
    CHECK_OPT("rmsnorm_bwd", "w", &a->w, wide_of(real), 1, cols_of(&a->x));
    CHECK_T("rmsnorm_bwd", "rstd", &a->rstd, wide_of(real), 1, rows_of(&a->x));
    if (present(&a->w))
        CHECK_T("rmsnorm_bwd", "dw", &a->dw, wide_of(real), 1, cols_of(&a->x));
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"heads", 0}, {"d", 33}};

static void x_like(struct op_call *c, int arg)
{
    int64_t rows = (int64_t)c->dim[0], heads = (int64_t)c->dim[1], d = (int64_t)c->dim[2];
    c->t[arg] = heads > 0 ? tensor_3d(NULL, DT_NONE, rows, heads, d) : tensor_2d(NULL, DT_NONE, rows, d);
}

enum { F_X, F_W, F_Y, F_RSTD };
static const struct op_arg fwd_args[] = {
    {.name = "x"}, {.name = "w", .role = ARG_OPT, .type = ARG_WIDE}, {.name = "y", .role = ARG_OUT},
    {.name = "rstd", .role = ARG_OUT, .type = ARG_WIDE, .no_grad = true},
};
static const struct op_attr fwd_attrs[] = {{.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}};

static void fwd_shapes(struct op_call *c)
{
    x_like(c, F_X);
    c->t[F_W] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[2]);
}

static struct rmsnorm_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct rmsnorm_fwd_args){.x = c->t[F_X], .w = c->t[F_W], .y = c->t[F_Y], .rstd = c->t[F_RSTD],
                                     .eps = c->attr[0], .zero_centered = c->attr[1] != 0};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[F_Y] = tensor_shape(c->t[F_X].dtype, c->t[F_X].rank, c->t[F_X].dim);
    c->t[F_RSTD] = tensor_1d(NULL, wide_of(c->t[F_X].dtype), rows_of(&c->t[F_X]));
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct rmsnorm_fwd_args a = fwd_pack(c);
    return ops->rmsnorm_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_X]), size = (double)dtype_bytes(c->t[F_X].dtype);
    *out = (struct op_cost){.flops = 4 * n, .bytes = 2 * n * size};
}

enum { B_DY, B_X, B_W, B_RSTD, B_DRES, B_DX, B_DW, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "dy"}, {.name = "x"}, {.name = "w", .role = ARG_OPT, .type = ARG_WIDE}, {.name = "rstd", .type = ARG_WIDE},
    {.name = "dres", .role = ARG_OPT}, {.name = "dx", .role = ARG_OUT},
    {.name = "dw", .role = ARG_OOUT, .type = ARG_WIDE}, {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "zero_centered", .value = 0}, {.name = "acc_dw", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    x_like(c, B_DY);
    x_like(c, B_X);
    x_like(c, B_DRES);
    c->t[B_W] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[2]);
    c->t[B_RSTD] = tensor_1d(NULL, DT_NONE, rows_of(&c->t[B_X]));
}

static struct rmsnorm_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct rmsnorm_bwd_args){
        .dy = c->t[B_DY], .x = c->t[B_X], .w = c->t[B_W], .rstd = c->t[B_RSTD], .dres = c->t[B_DRES],
        .dx = c->t[B_DX], .dw = c->t[B_DW], .work = c->t[B_WORK],
        .zero_centered = c->attr[0] != 0, .acc_dw = c->attr[1] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    c->t[B_DX] = tensor_shape(c->t[B_X].dtype, c->t[B_X].rank, c->t[B_X].dim);
    if (c->t[B_W].rank > 0)
        c->t[B_DW] = tensor_1d(NULL, wide_of(c->t[B_X].dtype), cols_of(&c->t[B_X]));
    struct rmsnorm_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->rmsnorm_bwd_work ? ops->rmsnorm_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct rmsnorm_bwd_args a = bwd_pack(c);
    return ops->rmsnorm_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_X]), size = (double)dtype_bytes(c->t[B_X].dtype);
    *out = (struct op_cost){.flops = 9 * n, .bytes = (3 + (c->t[B_DRES].rank > 0)) * n * size};
}

static const struct op_sample samples[] = {
    {"rows=5 d=33"}, {"rows=1 d=1"}, {"rows=0 d=8"}, {"rows=65 d=64 zero_centered=1"},
    {"rows=129 d=17 no_w=1"}, {"rows=7 heads=3 d=16"}, {"rows=70 d=48 acc_dw=1 no_dres=1"},
    {"rows=33 d=264"}, {"rows=9 d=2056 acc_dw=1"}, {"rows=600 d=512"}, {"rows=3 d=8200"}, {"rows=5 d=2048 strided=1"},
    {"rows=1100 heads=3 d=128"},
};
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=16384 d=2048"}};

OP_TABLES(rmsnorm_fwd, RMSNORM_FWD_FIELDS);
const struct op_desc rmsnorm_fwd_desc = {
    OP_IS(rmsnorm_fwd), .summary = "root-mean-square norm with gain",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .backward = "rmsnorm_bwd", .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(rmsnorm_bwd, RMSNORM_BWD_FIELDS);
const struct op_desc rmsnorm_bwd_desc = {
    OP_IS(rmsnorm_bwd), .summary = "gradient of rmsnorm_fwd, plus a by-passing gradient",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
