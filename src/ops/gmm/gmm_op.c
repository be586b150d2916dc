/* gmm: argument checks, cost, descriptors, test samples and bench shapes; see gmm.h. */
#include "ops/check.h"
#include "ops/gmm/gmm.h"
#include "ops/gmm/gmm_int.h"
#include "ops/opdesc.h"

int gmm_fwd_check(const struct gmm_fwd_args *a, struct err *e)
{
    const char *op = "gmm_fwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    CHECK_T(op, "w", &a->w, real, 3, -1, -1, a->x.dim[1]);
    CHECK_T(op, "y", &a->y, real, 2, a->x.dim[0], a->w.dim[1]);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, a->w.dim[0] + 1);
    CHECK_OPT(op, "bias", &a->bias, wide, 2, a->w.dim[0], a->w.dim[1]);
    CHECK_OPT(op, "prob", &a->prob, wide, 1, a->x.dim[0]);
    TRY(check_dense(op, "w", &a->w, e));
    return present(&a->bias) ? check_dense(op, "bias", &a->bias, e) : ST_OK;
}

int gmm_bwd_check(const struct gmm_bwd_args *a, struct err *e)
{
    const char *op = "gmm_bwd";
    enum dtype real = a->dy.dtype, wide = wide_of(real);
    CHECK_T(op, "dy", &a->dy, real, 2, -1, -1);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, -1);
    int64_t rows = a->dy.dim[0], out = a->dy.dim[1], experts = a->offset.dim[0] - 1;
    CHECK_OPT(op, "prob", &a->prob, wide, 1, rows);
    if (experts < 1)
        return err_set(e, ST_INVALID,
                       "gmm_bwd: offset needs an entry for each expert and one more");
    if (present(&a->dx)) {
        CHECK_T(op, "w", &a->w, real, 3, experts, out, -1);
        CHECK_T(op, "dx", &a->dx, real, 2, rows, a->w.dim[2]);
        TRY(check_dense(op, "w", &a->w, e));
    }
    if (present(&a->dw)) {
        CHECK_T(op, "x", &a->x, real, 2, rows, -1);
        CHECK_T(op, "dw", &a->dw, wide, 3, experts, out, a->x.dim[1]);
        TRY(check_dense(op, "dw", &a->dw, e));
    }
    if (present(&a->dbias)) {
        CHECK_T(op, "dbias", &a->dbias, wide, 2, experts, out);
        TRY(check_dense(op, "dbias", &a->dbias, e));
    }
    if (present(&a->dprob)) {
        CHECK_T(op, "bias", &a->bias, wide, 2, experts, out);
        CHECK_T(op, "dprob", &a->dprob, wide, 1, rows);
        TRY(check_dense(op, "bias", &a->bias, e));
    }
    return ST_OK;
}

int gmm_offset_check(const char *op, const struct tensor *offset, int64_t rows, struct err *e)
{
    const int32_t *at = offset->data;
    int64_t n = offset->dim[0] - 1;
    bool good = at[0] == 0 && at[n] <= rows;
    for (int64_t x = 0; x < n && good; x++)
        good = at[x] <= at[x + 1];
    return good ? ST_OK
                : err_set(e, ST_INVALID, "%s: offsets must rise from 0 to at most %lld rows", op,
                          (long long)rows);
}

/* ---- descriptors
 * --------------------------------------------------------------------------------------- */

static const struct op_dim dims[] = {
    {"rows", 11}, {"in", 9}, {"out", 13}, {"experts", 3}, {"tail", 0}, {"balanced", 0}};
static const struct op_attr bwd_attrs[] = {{.name = "acc_dw", .value = 0}, {.name = "acc_dbias", .value = 0}, {.name = "acc_dprob", .value = 0}};

static int64_t dim(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

/* Uneven ranges: every third expert is empty, the last takes what is left but the tail. Balanced: equal ones. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (c->desc->args[arg].type != ARG_I32)
        return false;
    int32_t *at = host->data;
    int64_t n = host->dim[0] - 1, rows = dim(c, 0) - dim(c, 4), used = 0;
    at[0] = 0;
    for (int64_t x = 0; x < n; x++) {
        int64_t left = rows - used, mean = rows / n;
        int64_t take =
            x == n - 1         ? left
            : c->dim[5] != 0 ? mean
            : x % 3 == 1
                ? 0
                : min_i64(left, mean + (int64_t)rng_below(key, (uint64_t)x, (uint64_t)mean + 2));
        used += take;
        at[x + 1] = (int32_t)used;
    }
    return true;
}

enum { F_X, F_W, F_BIAS, F_PROB, F_OFFSET, F_Y };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "offset", .type = ARG_I32},
    {.name = "y", .role = ARG_OUT},
};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = tensor_2d(NULL, DT_NONE, dim(c, 0), dim(c, 1));
    c->t[F_W] = tensor_3d(NULL, DT_NONE, dim(c, 3), dim(c, 2), dim(c, 1));
    c->t[F_BIAS] = tensor_2d(NULL, DT_NONE, dim(c, 3), dim(c, 2));
    c->t[F_PROB] = tensor_1d(NULL, DT_NONE, dim(c, 0));
    c->t[F_OFFSET] = tensor_1d(NULL, DT_NONE, dim(c, 3) + 1);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[F_Y] = tensor_2d(NULL, c->t[F_X].dtype, c->t[F_X].dim[0], c->t[F_W].dim[1]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gmm_fwd_args a = {.x = c->t[F_X],
                             .w = c->t[F_W],
                             .bias = c->t[F_BIAS],
                             .prob = c->t[F_PROB],
                             .offset = c->t[F_OFFSET],
                             .y = c->t[F_Y]};
    return ops->gmm_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double rows = c->dim[0], in = c->dim[1], width = c->dim[2],
           size = (double)dtype_bytes(c->t[F_X].dtype);
    *out = (struct op_cost){.flops = 2 * rows * in * width,
                            .bytes = size * (rows * (in + width) + c->dim[3] * in * width)};
}

enum { B_DY, B_X, B_W, B_BIAS, B_PROB, B_OFFSET, B_DX, B_DW, B_DBIAS, B_DPROB };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "offset", .type = ARG_I32},
    {.name = "dx", .role = ARG_OOUT},
    {.name = "dw", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dbias", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dprob", .role = ARG_OOUT, .type = ARG_WIDE},
};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = tensor_2d(NULL, DT_NONE, dim(c, 0), dim(c, 2));
    c->t[B_X] = tensor_2d(NULL, DT_NONE, dim(c, 0), dim(c, 1));
    c->t[B_W] = tensor_3d(NULL, DT_NONE, dim(c, 3), dim(c, 2), dim(c, 1));
    c->t[B_BIAS] = tensor_2d(NULL, DT_NONE, dim(c, 3), dim(c, 2));
    c->t[B_PROB] = tensor_1d(NULL, DT_NONE, dim(c, 0));
    c->t[B_OFFSET] = tensor_1d(NULL, DT_NONE, dim(c, 3) + 1);
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    enum dtype real = c->t[B_DY].dtype, wide = wide_of(real);
    c->t[B_DX] = tensor_shape(real, 2, c->t[B_X].dim);
    c->t[B_DW] = tensor_shape(wide, 3, c->t[B_W].dim);
    if (c->t[B_BIAS].rank > 0) {
        c->t[B_DBIAS] = tensor_shape(wide, 2, c->t[B_BIAS].dim);
        c->t[B_DPROB] = tensor_1d(NULL, wide, c->t[B_DY].dim[0]);
    }
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gmm_bwd_args a = {.dy = c->t[B_DY],
                             .x = c->t[B_X],
                             .w = c->t[B_W],
                             .bias = c->t[B_BIAS],
                             .prob = c->t[B_PROB],
                             .offset = c->t[B_OFFSET],
                             .dx = c->t[B_DX],
                             .dw = c->t[B_DW],
                             .dbias = c->t[B_DBIAS],
                             .dprob = c->t[B_DPROB],
                             .acc_dw = c->attr[0] != 0,
                             .acc_dbias = c->attr[1] != 0,
                             .acc_dprob = c->attr[2] != 0};
    return ops->gmm_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double rows = c->dim[0], in = c->dim[1], width = c->dim[2], weights = c->dim[3] * in * width,
           size = (double)dtype_bytes(c->t[B_DY].dtype), wide = (double)dtype_bytes(wide_of(c->t[B_DY].dtype));
    double dx = c->t[B_DX].rank > 0, dw = c->t[B_DW].rank > 0, passes = c->attr[0] != 0 ? 2 : 1;
    *out = (struct op_cost){.flops = 2 * rows * in * width * (dx + dw),
                            .bytes = (dx + dw) * size * rows * (in + width) + dx * size * weights + dw * passes * wide * weights};
}

static const struct op_sample samples[] = {
    {"rows=11"},
    {"rows=0"},
    {"rows=1 experts=1 in=1 out=1"},
    {"rows=600 experts=2 in=5 out=7 no_prob=1 no_dprob=1"},
    {"rows=30 experts=7 tail=6 acc_dw=1 acc_dbias=1 acc_dprob=1"},
    {"rows=20 no_bias=1 no_prob=1 no_dprob=1 experts=5"},
    {"rows=6 experts=16 no_bias=1 no_prob=1 no_dprob=1 acc_dw=1 in=33"},
    {"rows=20 in=17 out=260 tail=20"},
    {"rows=1060 experts=1 in=9 out=300 no_prob=1 no_dprob=1"}, /* several pieces of rows and columns */
    {"rows=70 experts=2 in=550 out=10 tail=3"},
    /* Whole vectors, so the tensor cores of a GPU take them: inside, at and past the edges of its tiles. */
    {"rows=700 experts=3 in=72 out=264 tail=9"},
    {"rows=130 experts=1 in=64 out=256 no_prob=1 no_dprob=1 acc_dw=1"},
    {"rows=40 experts=9 in=200 out=136 acc_dw=1 acc_dbias=1 acc_dprob=1"},
    {"rows=0 in=16 out=24"},
    {"rows=40 experts=3 in=24 out=40 tail=40"},
    {"rows=300 experts=4 in=88 out=72 no_bias=1 no_prob=1 no_dprob=1"},
    /* Its large tiles, forward, by input and by weight; then several of them for each multiprocessor. */
    {"rows=500 experts=3 in=136 out=2056 gpu=1"},
    {"rows=500 experts=3 in=2056 out=136 tail=9 acc_dw=1 gpu=1"},
    {"rows=1100 experts=5 in=72 out=4104 no_dx=1 gpu=1"},
    {"rows=1100 experts=2 in=520 out=1032 acc_dw=1 no_dx=1 no_bias=1 no_prob=1 no_dprob=1 gpu=1"},
};
static const struct op_sample bench[] = {{"rows=8192 in=512 out=1024 experts=8 no_bias=1"},
                                         {"rows=4096 in=512 out=512 experts=64 no_bias=1"},
                                         {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 gpu=1"},
                                         {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 gpu=1"},
                                         {"rows=131072 in=2048 out=2048 experts=64 no_bias=1 no_prob=1 gpu=1"}};
static const struct op_sample bwd_bench[] = {
    {"rows=8192 in=512 out=1024 experts=8 no_bias=1"},
    {"rows=4096 in=512 out=512 experts=64 no_bias=1"},
    {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 no_dw=1 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 no_dw=1 gpu=1"},
    {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 no_dx=1 acc_dw=1 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 no_dx=1 acc_dw=1 gpu=1"},
    {"rows=131072 in=2048 out=2048 experts=64 no_bias=1 no_prob=1 no_dx=1 acc_dw=1 gpu=1"},
};

OP_TABLES(gmm_fwd, GMM_FWD_FIELDS);
const struct op_desc gmm_fwd_desc = {
    OP_IS(gmm_fwd),
    .summary = "grouped linear: a weight matrix for each range of rows",
    .args = fwd_args,
    .n_args = countof(fwd_args),
    .dims = dims,
    .n_dims = countof(dims),
    .sample_shapes = fwd_shapes,
    .sample_fill = fill,
    .infer = fwd_infer,
    .run = fwd_run,
    .cost = fwd_cost,
    .backward = "gmm_bwd",
    .tolerance = 2e-6,
    .samples = samples,
    .n_samples = countof(samples),
    .bench = bench,
    .n_bench = countof(bench),
};
OP_TABLES(gmm_bwd, GMM_BWD_FIELDS);
const struct op_desc gmm_bwd_desc = {
    OP_IS(gmm_bwd),
    .summary = "gradients of gmm_fwd",
    .args = bwd_args,
    .n_args = countof(bwd_args),
    .attrs = bwd_attrs,
    .n_attrs = countof(bwd_attrs),
    .dims = dims,
    .n_dims = countof(dims),
    .sample_shapes = bwd_shapes,
    .sample_fill = fill,
    .infer = bwd_infer,
    .run = bwd_run,
    .cost = bwd_cost,
    .tolerance = 3e-6,
    .samples = samples,
    .n_samples = countof(samples),
    .bench = bwd_bench,
    .n_bench = countof(bwd_bench),
};
