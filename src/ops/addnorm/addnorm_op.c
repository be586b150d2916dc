/* addnorm: argument checks, cost, descriptors, test samples and bench shapes; see addnorm.h. */
#include "ops/check.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"
#include "ops/opdesc.h"

#include <string.h>

/* The mask applies to tensors like `like`. */
static int drop_check(const char *op, const struct dropout_rule *r, const struct tensor *like,
                      struct err *e)
{
    struct dropout_args d = {.x = *like, .y = *like, .rule = *r};
    int st = dropout_check(&d, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

static int refuse_if(const char *op, bool wrong, const char *what, struct err *e)
{
    return wrong ? err_set(e, ST_INVALID, "%s: %s", op, what) : ST_OK;
}

int addnorm_fwd_check(const struct addnorm_fwd_args *a, struct err *e)
{
    const char *op = "addnorm_fwd";
    enum dtype real = a->x.dtype;
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    bool closes = present(&a->f), opens = present(&a->y);
    TRY(refuse_if(op, closes != present(&a->s), "f and s must be given together or not at all", e));
    TRY(refuse_if(op, !closes && present(&a->bias), "bias is given without f", e));
    TRY(refuse_if(op, !opens && (present(&a->w) || present(&a->rstd)),
                  "w or rstd is given without y", e));
    CHECK_OPT(op, "f", &a->f, real, 2, rows, d);
    CHECK_OPT(op, "s", &a->s, real, 2, rows, d);
    CHECK_OPT(op, "bias", &a->bias, wide_of(real), 1, d);
    CHECK_OPT(op, "w", &a->w, wide_of(real), 1, d);
    CHECK_OPT(op, "y", &a->y, real, 2, rows, d);
    if (opens)
        CHECK_T(op, "rstd", &a->rstd, wide_of(real), 1, rows);
    return closes ? drop_check(op, &a->drop, &a->x, e) : ST_OK;
}

int addnorm_bwd_check(const struct addnorm_bwd_args *a, struct err *e)
{
    const char *op = "addnorm_bwd";
    enum dtype real = a->dx.dtype;
    CHECK_T(op, "dx", &a->dx, real, 2, -1, -1);
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1];
    TRY(refuse_if(op, !present(&a->dy) && present(&a->w), "w is given without dy", e));
    TRY(refuse_if(op, present(&a->dw) && !present(&a->w), "dw is given without w", e));
    CHECK_OPT(op, "dy", &a->dy, real, 2, rows, d);
    if (present(&a->dy)) {
        CHECK_T(op, "s", &a->s, real, 2, rows, d);
        CHECK_T(op, "rstd", &a->rstd, wide_of(real), 1, rows);
    }
    CHECK_OPT(op, "ds", &a->ds, real, 2, rows, d);
    CHECK_OPT(op, "df", &a->df, real, 2, rows, d);
    CHECK_OPT(op, "w", &a->w, wide_of(real), 1, d);
    CHECK_OPT(op, "dw", &a->dw, wide_of(real), 1, d);
    CHECK_OPT(op, "dbias", &a->dbias, wide_of(real), 1, d);
    return present(&a->df) || present(&a->dbias) ? drop_check(op, &a->drop, &a->dx, e) : ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"d", 33}};

static struct tensor x_shape(const struct op_call *c)
{
    return tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
}

static struct dropout_rule pack_drop(const struct op_call *c, int info)
{
    double seq = op_attr(c, "seq"), key = op_attr(c, "key");
    return (struct dropout_rule){.p = op_attr(c, "p"),
                                 .key = key >= 0 && key < 1e15 ? (uint64_t)key : 0,
                                 .seq = seq >= 1 && seq < 1e15 ? (int64_t)seq : 0,
                                 .info = c->t[info]};
}

/* Step 3, the first sample's index beyond 32 bits. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    const double info[] = {3, 4294967296.0 + 11, 0, 0};
    if (strcmp(c->desc->args[arg].name, "info") != 0)
        return false;
    for (int i = 0; i < countof(info); i++)
        tensor_set(host, i, info[i]);
    return true;
}

enum { F_X, F_F, F_BIAS, F_W, F_INFO, F_S, F_Y, F_RSTD };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "f", .role = ARG_OPT},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "w", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "info", .role = ARG_OPT, .type = ARG_I64},
    {.name = "s", .role = ARG_OOUT},
    {.name = "y", .role = ARG_OOUT},
    {.name = "rstd", .role = ARG_OOUT, .type = ARG_WIDE, .no_grad = true},
};
static const struct op_attr fwd_attrs[] = {
    {.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}, {.name = "p", .value = 0}, {.name = "key", .value = 77}, {.name = "seq", .value = 4}, {.name = "close_only", .value = 0},
};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = c->t[F_F] = x_shape(c);
    c->t[F_BIAS] = c->t[F_W] = tensor_1d(NULL, DT_NONE, c->t[F_X].dim[1]);
    c->t[F_INFO] = tensor_1d(NULL, DT_NONE, 4);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    const struct tensor *x = &c->t[F_X];
    TRY(refuse_if("addnorm_fwd", x->rank != 2, "x must have rank 2", e));
    if (c->t[F_F].rank > 0)
        c->t[F_S] = tensor_shape(x->dtype, 2, x->dim);
    if (op_attr(c, "close_only") == 0) {
        c->t[F_Y] = tensor_shape(x->dtype, 2, x->dim);
        c->t[F_RSTD] = tensor_1d(NULL, wide_of(x->dtype), x->dim[0]);
    }
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct addnorm_fwd_args a = {.x = c->t[F_X],
                                 .f = c->t[F_F],
                                 .bias = c->t[F_BIAS],
                                 .w = c->t[F_W],
                                 .s = c->t[F_S],
                                 .y = c->t[F_Y],
                                 .rstd = c->t[F_RSTD],
                                 .eps = op_attr(c, "eps"),
                                 .zero_centered = op_attr(c, "zero_centered") != 0,
                                 .drop = pack_drop(c, F_INFO)};
    return ops->addnorm_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_X]), bytes = (double)tensor_bytes(&c->t[F_X]);
    int tensors = 1 + 2 * (c->t[F_F].rank > 0) + (c->t[F_Y].rank > 0);
    *out = (struct op_cost){.flops = 6 * n, .bytes = tensors * bytes};
}

enum { B_DY, B_DS, B_S, B_X, B_W, B_RSTD, B_INFO, B_DX, B_DF, B_DW, B_DBIAS, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "dy", .role = ARG_OPT},
    {.name = "ds", .role = ARG_OPT},
    {.name = "s", .role = ARG_OPT},
    {.name = "x", .role = ARG_OPT}, /* stands for s where there was no f, hence no s */
    {.name = "w", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "rstd", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "info", .role = ARG_OPT, .type = ARG_I64},
    {.name = "dx", .role = ARG_OUT},
    {.name = "df", .role = ARG_OOUT},
    {.name = "dw", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dbias", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {
    {.name = "zero_centered", .value = 0}, {.name = "acc_dw", .value = 0}, {.name = "acc_dbias", .value = 0}, {.name = "p", .value = 0}, {.name = "key", .value = 77}, {.name = "seq", .value = 4},
};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = c->t[B_DS] = c->t[B_S] = c->t[B_X] = x_shape(c);
    c->t[B_W] = tensor_1d(NULL, DT_NONE, c->t[B_X].dim[1]);
    c->t[B_RSTD] = tensor_1d(NULL, DT_NONE, c->t[B_X].dim[0]);
    c->t[B_INFO] = tensor_1d(NULL, DT_NONE, 4);
}

static struct addnorm_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct addnorm_bwd_args){.dy = c->t[B_DY],
                                     .ds = c->t[B_DS],
                                     .s = c->t[B_S].rank > 0 ? c->t[B_S] : c->t[B_X],
                                     .w = c->t[B_W],
                                     .rstd = c->t[B_RSTD],
                                     .dx = c->t[B_DX],
                                     .df = c->t[B_DF],
                                     .dw = c->t[B_DW],
                                     .dbias = c->t[B_DBIAS],
                                     .work = c->t[B_WORK],
                                     .zero_centered = op_attr(c, "zero_centered") != 0,
                                     .acc_dw = op_attr(c, "acc_dw") != 0,
                                     .acc_dbias = op_attr(c, "acc_dbias") != 0,
                                     .drop = pack_drop(c, B_INFO)};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *like = c->t[B_DY].rank > 0 ? &c->t[B_DY] : &c->t[B_DS];
    TRY(refuse_if("addnorm_bwd", like->rank != 2, "dy or ds must be given, with rank 2", e));
    c->t[B_DX] = c->t[B_DF] = tensor_shape(like->dtype, 2, like->dim);
    if (c->t[B_W].rank > 0)
        c->t[B_DW] = tensor_1d(NULL, wide_of(like->dtype), like->dim[1]);
    c->t[B_DBIAS] = tensor_1d(NULL, wide_of(like->dtype), like->dim[1]);
    struct addnorm_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->addnorm_bwd_work ? ops->addnorm_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct addnorm_bwd_args a = bwd_pack(c);
    return ops->addnorm_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_DX]), bytes = (double)tensor_bytes(&c->t[B_DX]);
    int tensors = 1 + 2 * (c->t[B_DY].rank > 0) + (c->t[B_DS].rank > 0) + (c->t[B_DF].rank > 0);
    *out = (struct op_cost){.flops = 11 * n, .bytes = tensors * bytes};
}

static const struct op_sample samples[] = {
    {"rows=5 d=33"},
    {"rows=1 d=1"},
    {"rows=0 d=8"},
    {"rows=3 d=0"},
    {"rows=65 d=64 zero_centered=1 no_bias=1 no_info=1"},
    {"rows=129 d=17 no_w=1 no_bias=1"},
    {"rows=70 d=48 strided=1"},
    {"rows=9 d=20 no_f=1 no_bias=1 no_ds=1"},
    {"rows=9 d=20 no_f=1 no_bias=1 no_ds=1 no_w=1 strided=1"},
    {"rows=9 d=21 close_only=1 no_w=1 no_dy=1 no_rstd=1"},
    {"rows=9 d=21 close_only=1 no_w=1 no_dy=1 no_rstd=1 no_bias=1 p=0.5 strided=1"},
    {"rows=12 d=65 p=0.25 seq=5"},
    {"rows=67 d=130 p=0.1 seq=3 no_bias=1 strided=1"},
    {"rows=10 d=7 p=0.5 seq=1 no_w=1 zero_centered=1 key=5"},
    {"rows=37 d=264 p=0.1 seq=5"},
    {"rows=9 d=2056 no_bias=1"},
    {"rows=600 d=512"},
    {"rows=3 d=8200 p=0.5"},
    /* Backward only: gradcheck wants every gradient of an input that is there. */
    {"rows=5 d=33 no_df=1 no_dbias=1"},
    {"rows=0 d=8 acc_dw=1 acc_dbias=1"},
    {"rows=64 d=16 no_dw=1 no_dbias=1"},
    {"rows=65 d=64 zero_centered=1 no_info=1 acc_dw=1"},
    {"rows=129 d=257 acc_dbias=1 no_df=1 strided=1"},
    {"rows=130 d=17 no_w=1 no_dbias=1 no_x=1"},
    {"rows=9 d=20 no_s=1 no_ds=1"},
    {"rows=9 d=20 no_ds=1 no_w=1 no_df=1 strided=1"},
    {"rows=9 d=21 no_dy=1 no_w=1 no_s=1 no_x=1 no_rstd=1 p=0.5 acc_dbias=1"},
    {"rows=67 d=130 p=0.1 seq=3 acc_dbias=1 acc_dw=1 strided=1"},
    {"rows=10 d=7 p=0.5 seq=1 no_w=1 key=5 no_dbias=1"},
    {"rows=66 d=300 no_df=1 p=0.3"},
};
enum { BACKWARD_ONLY = 12 };
static const struct op_sample bench[] = {
    {"rows=4096 d=320 no_bias=1"},
    {"rows=4096 d=320 p=0.1 seq=256"},
    {"rows=16384 d=2048 no_bias=1"},
};
static const struct op_sample bwd_bench[] = {
    {"rows=4096 d=320 no_df=1 no_dbias=1"},
    {"rows=4096 d=320 p=0.1 seq=256"},
    {"rows=16384 d=2048 no_df=1 no_dbias=1"},
};

OP_TABLES_AND(addnorm_fwd, ADDNORM_FWD_FIELDS, OP_FIELD_IN(addnorm_fwd, "info", drop.info, OPT, I64, "4"));
const struct op_desc addnorm_fwd_desc = {
    OP_IS(addnorm_fwd),
    .summary = "residual add with bias and dropout, then rmsnorm",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "addnorm_bwd",
    .tolerance = 2e-6,
    .narrow = 2e-3, /* the stream is rounded before it is normed */
    .samples = samples, .n_samples = countof(samples) - BACKWARD_ONLY, OP_LIST(bench, bench),
};
OP_TABLES_AND(addnorm_bwd, ADDNORM_BWD_FIELDS, OP_FIELD_IN(addnorm_bwd, "info", drop.info, OPT, I64, "4"));
const struct op_desc addnorm_bwd_desc = {
    OP_IS(addnorm_bwd),
    .summary = "gradient of addnorm_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bwd_bench),
};
