/* conv1d: argument checks, cost, descriptors, test samples and bench shapes; see conv1d.h. */
#include "ops/check.h"
#include "ops/conv1d/conv1d.h"
#include "ops/opdesc.h"

static int check_common(const char *op, const struct tensor *x, const struct tensor *w,
                        const struct tensor *bias, const struct tensor *init,
                        const struct tensor *doc_start, struct err *e)
{
    enum dtype real = x->dtype;
    CHECK_T(op, "x", x, real, 3, -1, -1, -1);
    CHECK_T(op, "w", w, wide_of(real), 2, x->dim[2], -1);
    if (w->dim[1] < 1 || w->dim[1] > CONV1D_MAX_WIDTH)
        return err_set(e, ST_INVALID, "%s: w has %lld taps per channel, expected 1 to %d", op,
                       (long long)w->dim[1], CONV1D_MAX_WIDTH);
    CHECK_OPT(op, "bias", bias, wide_of(real), 1, x->dim[2]);
    CHECK_OPT(op, "init", init, real, 3, x->dim[0], w->dim[1] - 1, x->dim[2]);
    CHECK_OPT(op, "doc_start", doc_start, DT_I32, 2, x->dim[0], x->dim[1]);
    return ST_OK;
}

int conv1d_fwd_check(const struct conv1d_fwd_args *a, struct err *e)
{
    TRY(check_common("conv1d_fwd", &a->x, &a->w, &a->bias, &a->init, &a->doc_start, e));
    CHECK_T("conv1d_fwd", "y", &a->y, a->x.dtype, 3, a->x.dim[0], a->x.dim[1], a->x.dim[2]);
    CHECK_OPT("conv1d_fwd", "final", &a->final, a->x.dtype, 3, a->x.dim[0], a->w.dim[1] - 1,
              a->x.dim[2]);
    CHECK_OPT("conv1d_fwd", "start", &a->start, DT_I64, 1, 1);
    return ST_OK;
}

int conv1d_bwd_check(const struct conv1d_bwd_args *a, struct err *e)
{
    enum dtype real = a->x.dtype;
    const int64_t *d = a->x.dim;
    TRY(check_common("conv1d_bwd", &a->x, &a->w, &a->bias, &a->init, &a->doc_start, e));
    CHECK_T("conv1d_bwd", "dy", &a->dy, real, 3, d[0], d[1], d[2]);
    CHECK_T("conv1d_bwd", "dx", &a->dx, real, 3, d[0], d[1], d[2]);
    CHECK_T("conv1d_bwd", "dw", &a->dw, wide_of(real), 2, d[2], a->w.dim[1]);
    CHECK_OPT("conv1d_bwd", "dbias", &a->dbias, wide_of(real), 1, d[2]);
    CHECK_OPT("conv1d_bwd", "dinit", &a->dinit, real, 3, d[0], a->w.dim[1] - 1, d[2]);
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

enum { BATCH, S, C, WIDTH };
static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"c", 5}, {"taps", 4}};

static struct tensor rows_3d(const struct op_call *c, int64_t rows)
{
    return tensor_3d(NULL, DT_NONE, (int64_t)c->dim[BATCH], rows, (int64_t)c->dim[C]);
}

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    return op_fill_documents(c, arg, t, key, 0.1);
}

static int check_ranks(const char *op, const struct tensor *x, const struct tensor *w,
                       struct err *e)
{
    if (x->rank != 3 || w->rank != 2)
        return err_set(e, ST_INVALID,
                       "%s: x must have rank 3 (batch, row, channel) and w rank 2 (channel, tap)",
                       op);
    return ST_OK;
}

enum { F_X, F_W, F_BIAS, F_INIT, F_DOC, F_START, F_Y, F_FINAL, F_WORK };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "w", .type = ARG_WIDE},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "init", .role = ARG_OPT},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "start", .role = ARG_OPT, .type = ARG_I64},
    {.name = "y", .role = ARG_OUT},
    {.name = "final", .role = ARG_OOUT, .no_grad = true},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr fwd_attrs[] = {{.name = "silu", .value = 1}};

static void fwd_shapes(struct op_call *c)
{
    int64_t channels = (int64_t)c->dim[C], width = (int64_t)c->dim[WIDTH];
    c->t[F_X] = rows_3d(c, (int64_t)c->dim[S]);
    c->t[F_W] = tensor_2d(NULL, DT_NONE, channels, width);
    c->t[F_BIAS] = tensor_1d(NULL, DT_NONE, channels);
    c->t[F_INIT] = rows_3d(c, width - 1);
    c->t[F_DOC] = tensor_2d(NULL, DT_I32, (int64_t)c->dim[BATCH], (int64_t)c->dim[S]);
    c->t[F_START] = tensor_1d(NULL, DT_I64, 1);
}

static struct conv1d_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct conv1d_fwd_args){.x = c->t[F_X],
                                    .w = c->t[F_W],
                                    .bias = c->t[F_BIAS],
                                    .init = c->t[F_INIT],
                                    .doc_start = c->t[F_DOC],
                                    .start = c->t[F_START],
                                    .y = c->t[F_Y],
                                    .final = c->t[F_FINAL],
                                    .work = c->t[F_WORK],
                                    .silu = c->attr[0] != 0};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[F_X];
    TRY(check_ranks("conv1d_fwd", x, &c->t[F_W], e));
    c->t[F_Y] = tensor_shape(x->dtype, 3, x->dim);
    c->t[F_FINAL] =
        tensor_3d(NULL, x->dtype, x->dim[0], max_i64(0, c->t[F_W].dim[1] - 1), x->dim[2]);
    struct conv1d_fwd_args a = fwd_pack(c);
    c->t[F_WORK] = tensor_1d(NULL, DT_U8, ops->conv1d_fwd_work ? ops->conv1d_fwd_work(&a) : 0);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct conv1d_fwd_args a = fwd_pack(c);
    return ops->conv1d_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_X]), taps = (double)c->t[F_W].dim[1];
    *out =
        (struct op_cost){.flops = n * (2 * taps + (c->attr[0] != 0 ? 4 : 0)), .bytes = op_bytes(c)};
}

enum { B_DY, B_X, B_W, B_BIAS, B_INIT, B_DOC, B_DX, B_DW, B_DBIAS, B_DINIT, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x"},
    {.name = "w", .type = ARG_WIDE},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "init", .role = ARG_OPT},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dw", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "dbias", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dinit", .role = ARG_OOUT},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "silu", .value = 1}, {.name = "acc_dw", .value = 0}, {.name = "acc_dbias", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    int64_t channels = (int64_t)c->dim[C], width = (int64_t)c->dim[WIDTH];
    c->t[B_DY] = c->t[B_X] = rows_3d(c, (int64_t)c->dim[S]);
    c->t[B_W] = tensor_2d(NULL, DT_NONE, channels, width);
    c->t[B_BIAS] = tensor_1d(NULL, DT_NONE, channels);
    c->t[B_INIT] = rows_3d(c, width - 1);
    c->t[B_DOC] = tensor_2d(NULL, DT_I32, (int64_t)c->dim[BATCH], (int64_t)c->dim[S]);
}

static struct conv1d_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct conv1d_bwd_args){.dy = c->t[B_DY],
                                    .x = c->t[B_X],
                                    .w = c->t[B_W],
                                    .bias = c->t[B_BIAS],
                                    .init = c->t[B_INIT],
                                    .doc_start = c->t[B_DOC],
                                    .dx = c->t[B_DX],
                                    .dw = c->t[B_DW],
                                    .dbias = c->t[B_DBIAS],
                                    .dinit = c->t[B_DINIT],
                                    .work = c->t[B_WORK],
                                    .silu = c->attr[0] != 0,
                                    .acc_dw = c->attr[1] != 0,
                                    .acc_dbias = c->attr[2] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[B_X], *w = &c->t[B_W];
    TRY(check_ranks("conv1d_bwd", x, w, e));
    c->t[B_DX] = tensor_shape(x->dtype, 3, x->dim);
    c->t[B_DW] = tensor_shape(wide_of(x->dtype), 2, w->dim);
    if (c->t[B_BIAS].rank > 0)
        c->t[B_DBIAS] = tensor_1d(NULL, wide_of(x->dtype), x->dim[2]);
    if (c->t[B_INIT].rank > 0)
        c->t[B_DINIT] = tensor_3d(NULL, x->dtype, x->dim[0], max_i64(0, w->dim[1] - 1), x->dim[2]);
    struct conv1d_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->conv1d_bwd_work ? ops->conv1d_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct conv1d_bwd_args a = bwd_pack(c);
    return ops->conv1d_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_X]), taps = (double)c->t[B_W].dim[1];
    *out = (struct op_cost){.flops = n * (c->attr[0] != 0 ? 6 * taps + 8 : 4 * taps),
                            .bytes = op_bytes(c)};
}

static const struct op_sample samples[] = {
    {"b=2 s=7 c=5"},
    {"b=1 s=1 c=1 taps=1 no_init=1 no_doc_start=1"},
    {"b=1 s=1 c=33 no_doc_start=1"},
    {"b=0 s=3"},
    {"b=2 s=0"},
    {"b=2 s=2 c=0"},
    {"b=2 s=3 c=17 silu=0 no_bias=1 no_start=1"},
    {"b=2 s=65 c=130 no_init=1 no_start=1 acc_dw=1 acc_dbias=1"},
    {"b=3 s=130 c=129 taps=2 no_doc_start=1 no_start=1 strided=1"},
    {"b=1 s=70 c=40 taps=7 acc_dbias=1 strided=1"},
    {"b=2 s=66 c=24 taps=16 no_final=1 no_bias=1"},
    {"b=2 s=9 c=12 silu=0 no_start=1"},
    {"b=2 s=64 c=256 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=2 s=259 c=136"},
    {"b=3 s=33 c=24 taps=3 strided=1"},
    {"b=1 s=2 c=16 no_doc_start=1"},
    {"b=2 s=40 c=8 taps=2 silu=0 acc_dw=1 acc_dbias=1"},
};
static const struct op_sample bench[] = {
    {"b=16 s=256 c=1280 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=1 s=4096 c=4096 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=4 s=4096 c=6144 no_init=1 no_doc_start=1 no_start=1 no_final=1 gpu=1"},
    {"b=4 s=4096 c=6144 no_init=1 no_start=1 no_final=1 gpu=1"},
};

OP_TABLES(conv1d_fwd, CONV1D_FWD_FIELDS);
const struct op_desc conv1d_fwd_desc = {
    OP_IS(conv1d_fwd),
    .summary = "causal convolution of each channel, with bias, SiLU, documents and decode state",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "conv1d_bwd",
    .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(conv1d_bwd, CONV1D_BWD_FIELDS);
const struct op_desc conv1d_bwd_desc = {
    OP_IS(conv1d_bwd),
    .summary = "gradient of conv1d_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
