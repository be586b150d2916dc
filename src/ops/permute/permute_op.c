/* permute and unpermute: argument checks, cost, descriptors, test samples and bench shapes; see
 * permute.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/permute/permute.h"

int permute_check(const struct permute_args *a, struct err *e)
{
    const char *op = "permute";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    CHECK_T(op, "y", &a->y, real, 2, -1, a->x.dim[1]);
    CHECK_T(op, "src", &a->src, DT_I32, 1, a->y.dim[0]);
    if (a->k < 1)
        return err_set(e, ST_INVALID, "permute: k is %lld, expected at least 1", (long long)a->k);
    CHECK_OPT(op, "row", &a->row, DT_I32, 2, a->x.dim[0], a->k);
    if (present(&a->row))
        TRY(check_dense(op, "row", &a->row, e));
    if (present(&a->prob) || present(&a->yprob)) {
        CHECK_T(op, "prob", &a->prob, wide, 2, a->x.dim[0], a->k);
        CHECK_T(op, "yprob", &a->yprob, wide, 1, a->y.dim[0]);
        TRY(check_dense(op, "prob", &a->prob, e));
    }
    return ST_OK;
}

int unpermute_check(const struct unpermute_args *a, struct err *e)
{
    const char *op = "unpermute";
    enum dtype real = present(&a->x) ? a->x.dtype : a->xprob.dtype, wide = wide_of(real);
    CHECK_T(op, "row", &a->row, DT_I32, 2, -1, -1);
    int64_t rows = a->row.dim[0], k = a->row.dim[1];
    TRY(check_dense(op, "row", &a->row, e));
    if (k < 1 || k > PERMUTE_MAX_K)
        return err_set(e, ST_INVALID, "unpermute: k is %lld, expected 1 to %d", (long long)k,
                       PERMUTE_MAX_K);
    if (present(&a->x) || present(&a->y)) {
        CHECK_T(op, "x", &a->x, real, 2, -1, -1);
        CHECK_T(op, "y", &a->y, real, 2, rows, a->x.dim[1]);
        CHECK_OPT(op, "base", &a->base, real, 2, rows, a->x.dim[1]);
    }
    if (present(&a->xprob) || present(&a->yprob)) {
        CHECK_T(op, "xprob", &a->xprob, wide, 1, -1);
        CHECK_T(op, "yprob", &a->yprob, wide, 2, rows, k);
        TRY(check_dense(op, "yprob", &a->yprob, e));
    }
    return ST_OK;
}

/* ---- samples: maps of a fixed routing, so that both directions agree ------------------------- */

static const struct op_dim dims[] = {{"rows", 7}, {"d", 33}, {"experts", 4}, {"dropped", 0}};
static const struct op_attr attrs[] = {{.name = "k", .value = 2}, {.name = "acc_y", .value = 0}};
static const struct op_attr back_attrs[] = {{.name = "k", .value = 2}};

static int32_t expert_of(const struct op_call *c, int64_t choice)
{
    bool lost = c->dim[3] != 0 && choice % 5 == 2;
    return lost ? -1 : (int32_t)rng_below(99, (uint64_t)choice, (uint64_t)c->dim[2]);
}

/* Fills src (inverse true) or row by the definition: rank in the order by expert, then choice. */
static void fill_map(const struct op_call *c, struct tensor *host, bool inverse)
{
    int64_t n = tensor_elems(host);
    int32_t *map = host->data, rank = 0;
    for (int64_t i = 0; i < n; i++)
        map[i] = -1;
    for (int32_t x = 0; x < (int32_t)c->dim[2]; x++)
        for (int64_t i = 0; i < n; i++)
            if (expert_of(c, i) == x) {
                map[inverse ? rank : i] = inverse ? (int32_t)i : rank;
                rank++;
            }
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (c->desc->args[arg].type != ARG_I32)
        return false;
    fill_map(c, host, c->desc->args[arg].name[0] == 's');
    return true;
}

static const struct op_sample samples[] = {
    {"rows=7 d=33"},
    {"rows=0 d=8"},
    {"rows=1 d=1 k=1 experts=1"},
    {"rows=20 d=65 k=3 dropped=1"},
    {"rows=20 d=65 k=3 dropped=1 strided=1 no_prob=1 no_yprob=1 no_dyprob=1 no_dprob=1"},
    {"rows=9 d=64 k=4 experts=9 no_prob=1 no_yprob=1 no_dyprob=1 no_dprob=1"},
    {"rows=12 d=130 k=5 experts=3 no_base=1 acc_y=1 dropped=1"},
    {"rows=7 d=33 no_rowmap=1"},
    {"rows=21 d=264 k=9 dropped=1 no_rowmap=1"},
    {"rows=21 d=2072 k=17 experts=5 dropped=1 no_base=1"},
};
static const struct op_sample bench[] = {{"rows=1024 d=512 k=8 experts=64"},
                                         {"rows=1024 d=2048 k=2 experts=8"},
                                         {"rows=16384 d=2048 k=8 experts=64 no_prob=1 no_yprob=1 no_base=1 gpu=1"}};

/* ---- permute and its gradient ---------------------------------------------------------------- */

static int64_t k_of(const struct op_call *c) { return (int64_t)c->attr[0]; }

enum { P_X, P_SRC, P_ROW, P_PROB, P_Y, P_YPROB };
static const struct op_arg permute_args_list[] = {
    {.name = "x"},
    {.name = "src", .type = ARG_I32},
    {.name = "rowmap", .role = ARG_OPT, .type = ARG_I32},
    {.name = "prob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "y", .role = ARG_OUT},
    {.name = "yprob", .role = ARG_OOUT, .type = ARG_WIDE},
};

static void permute_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[0];
    c->t[P_X] = tensor_2d(NULL, DT_NONE, rows, (int64_t)c->dim[1]);
    c->t[P_SRC] = tensor_1d(NULL, DT_NONE, rows * k_of(c));
    c->t[P_ROW] = tensor_2d(NULL, DT_NONE, rows, k_of(c));
    c->t[P_PROB] = tensor_2d(NULL, DT_NONE, rows, k_of(c));
}

static int permute_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[P_Y] = tensor_2d(NULL, c->t[P_X].dtype, c->t[P_SRC].dim[0], c->t[P_X].dim[1]);
    c->t[P_YPROB] = tensor_1d(NULL, wide_of(c->t[P_X].dtype), c->t[P_SRC].dim[0]);
    return ST_OK;
}

static int permute_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct permute_args a = {.x = c->t[P_X],
                             .src = c->t[P_SRC],
                             .row = c->t[P_ROW],
                             .prob = c->t[P_PROB],
                             .y = c->t[P_Y],
                             .yprob = c->t[P_YPROB],
                             .k = k_of(c)};
    return ops->permute(lane, &a);
}

static void copy_cost(const struct op_call *c, struct op_cost *out)
{
    double tokens = op_dim(c, "rows"), rows = tokens * op_attr(c, "k"), d = op_dim(c, "d"),
           size = (double)dtype_bytes(c->t[0].dtype);
    *out = (struct op_cost){.flops = rows * d, .bytes = (tokens + rows) * d * size};
}

enum { Q_DY, Q_ROW, Q_DYPROB, Q_DX, Q_DPROB };
static const struct op_arg permute_bwd_args_list[] = {
    {.name = "dy"},
    {.name = "row", .type = ARG_I32},
    {.name = "dyprob", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dprob", .role = ARG_OOUT, .type = ARG_WIDE},
};

static void permute_bwd_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[0];
    c->t[Q_DY] = tensor_2d(NULL, DT_NONE, rows * k_of(c), (int64_t)c->dim[1]);
    c->t[Q_ROW] = tensor_2d(NULL, DT_NONE, rows, k_of(c));
    c->t[Q_DYPROB] = tensor_1d(NULL, DT_NONE, rows * k_of(c));
}

static int permute_bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[Q_DX] = tensor_2d(NULL, c->t[Q_DY].dtype, c->t[Q_ROW].dim[0], c->t[Q_DY].dim[1]);
    if (c->t[Q_DYPROB].rank > 0)
        c->t[Q_DPROB] = tensor_2d(NULL, wide_of(c->t[Q_DY].dtype), c->t[Q_ROW].dim[0], c->t[Q_ROW].dim[1]);
    return ST_OK;
}

static int permute_bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct unpermute_args a = {.x = c->t[Q_DY],
                               .row = c->t[Q_ROW],
                               .xprob = c->t[Q_DYPROB],
                               .y = c->t[Q_DX],
                               .yprob = c->t[Q_DPROB]};
    return ops->unpermute(lane, &a);
}

OP_TABLES(permute, PERMUTE_FIELDS);
const struct op_desc permute_desc = {
    OP_IS(permute),
    .summary = "copy token rows to the rows of their experts",
    OP_LIST(args, permute_args_list), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = permute_shapes, .infer = permute_infer, .run = permute_run, .cost = copy_cost,
    .sample_fill = fill,
    .backward = "permute_bwd",
    .tolerance = 1e-7,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
const struct op_desc permute_bwd_desc = {
    .name = "permute_bwd",
    .summary = "gradient of permute: unpermute",
    OP_LIST(args, permute_bwd_args_list), OP_LIST(attrs, back_attrs), OP_LIST(dims, dims),
    .sample_shapes = permute_bwd_shapes, .infer = permute_bwd_infer, .run = permute_bwd_run, .cost = copy_cost,
    .sample_fill = fill,
    .tolerance = 1e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};

/* ---- unpermute and its gradient -------------------------------------------------------------- */

enum { U_X, U_ROW, U_BASE, U_Y };
static const struct op_arg unpermute_args_list[] = {
    {.name = "x"},
    {.name = "row", .type = ARG_I32},
    {.name = "base", .role = ARG_OPT, .no_grad = true},
    {.name = "y", .role = ARG_OUT},
};

static void unpermute_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[0], d = (int64_t)c->dim[1];
    c->t[U_X] = tensor_2d(NULL, DT_NONE, rows * k_of(c), d);
    c->t[U_ROW] = tensor_2d(NULL, DT_NONE, rows, k_of(c));
    c->t[U_BASE] = tensor_2d(NULL, DT_NONE, rows, d);
}

static int unpermute_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[U_Y] = tensor_2d(NULL, c->t[U_X].dtype, c->t[U_ROW].dim[0], c->t[U_X].dim[1]);
    return ST_OK;
}

static int unpermute_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct unpermute_args a = {.x = c->t[U_X],
                               .row = c->t[U_ROW],
                               .base = c->t[U_BASE],
                               .y = c->t[U_Y],
                               .acc_y = c->attr[1] != 0};
    return ops->unpermute(lane, &a);
}

enum { V_DY, V_SRC, V_ROW, V_DX };
static const struct op_arg unpermute_bwd_args_list[] = {
    {.name = "dy"},
    {.name = "src", .type = ARG_I32},
    {.name = "rowmap", .role = ARG_OPT, .type = ARG_I32},
    {.name = "dx", .role = ARG_OUT},
};

static void unpermute_bwd_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[0];
    c->t[V_DY] = tensor_2d(NULL, DT_NONE, rows, (int64_t)c->dim[1]);
    c->t[V_SRC] = tensor_1d(NULL, DT_NONE, rows * k_of(c));
    c->t[V_ROW] = tensor_2d(NULL, DT_NONE, rows, k_of(c));
}

static int unpermute_bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[V_DX] = tensor_2d(NULL, c->t[V_DY].dtype, c->t[V_SRC].dim[0], c->t[V_DY].dim[1]);
    return ST_OK;
}

static int unpermute_bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct permute_args a = {.x = c->t[V_DY], .src = c->t[V_SRC], .row = c->t[V_ROW], .y = c->t[V_DX], .k = k_of(c)};
    return ops->permute(lane, &a);
}

OP_TABLES(unpermute, UNPERMUTE_FIELDS);
const struct op_desc unpermute_desc = {
    OP_IS(unpermute),
    .summary = "sum the expert rows of each token, in order of choice",
    OP_LIST(args, unpermute_args_list), OP_LIST(attrs, attrs), OP_LIST(dims, dims),
    .sample_shapes = unpermute_shapes, .infer = unpermute_infer, .run = unpermute_run, .cost = copy_cost,
    .sample_fill = fill,
    .backward = "unpermute_bwd",
    .tolerance = 1e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
const struct op_desc unpermute_bwd_desc = {
    .name = "unpermute_bwd",
    .summary = "gradient of unpermute: permute",
    OP_LIST(args, unpermute_bwd_args_list), OP_LIST(attrs, back_attrs), OP_LIST(dims, dims),
    .sample_shapes = unpermute_bwd_shapes, .infer = unpermute_bwd_infer, .run = unpermute_bwd_run, .cost = copy_cost,
    .sample_fill = fill,
    .tolerance = 1e-7,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
