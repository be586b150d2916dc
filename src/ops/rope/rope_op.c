/* rope: argument checks, cost, descriptors, test samples and bench shapes; see rope.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/rope/rope.h"

/* Tables, positions and the number of rotated channels. */
static int check_tables(const char *op, const struct tensor *x, const struct tensor *cos_table,
                        const struct tensor *sin_table, const struct tensor *pos, struct err *e)
{
    if (!present(cos_table) && !present(sin_table))
        return ST_OK;
    CHECK_T(op, "cos", cos_table, wide_of(x->dtype), 2, -1, -1);
    CHECK_T(op, "sin", sin_table, wide_of(x->dtype), 2, cos_table->dim[0], cos_table->dim[1]);
    CHECK_T(op, "pos", pos, DT_I32, 1, x->dim[0]);
    if (2 * cos_table->dim[1] > x->dim[2])
        return err_set(e, ST_INVALID, "%s: the tables rotate %lld channels but a head has %lld", op,
                       (long long)(2 * cos_table->dim[1]), (long long)x->dim[2]);
    return ST_OK;
}

int rope_fwd_check(const struct rope_fwd_args *a, struct err *e)
{
    const char *op = "rope_fwd";
    enum dtype real = a->x.dtype;
    CHECK_T(op, "x", &a->x, real, 3, -1, -1, -1);
    TRY(check_tensor(op, "y", &a->y, real, 3, a->x.dim, e));
    CHECK_OPT(op, "w", &a->w, wide_of(real), 1, a->x.dim[2]);
    if (present(&a->w))
        CHECK_T(op, "rstd", &a->rstd, wide_of(real), 2, a->x.dim[0], a->x.dim[1]);
    return check_tables(op, &a->x, &a->cos, &a->sin, &a->pos, e);
}

int rope_bwd_check(const struct rope_bwd_args *a, struct err *e)
{
    const char *op = "rope_bwd";
    enum dtype real = a->dy.dtype;
    CHECK_T(op, "dy", &a->dy, real, 3, -1, -1, -1);
    TRY(check_tensor(op, "dx", &a->dx, real, 3, a->dy.dim, e));
    CHECK_OPT(op, "w", &a->w, wide_of(real), 1, a->dy.dim[2]);
    if (present(&a->w)) {
        TRY(check_tensor(op, "x", &a->x, real, 3, a->dy.dim, e));
        CHECK_T(op, "rstd", &a->rstd, wide_of(real), 2, a->dy.dim[0], a->dy.dim[1]);
        CHECK_T(op, "dw", &a->dw, wide_of(real), 1, a->dy.dim[2]);
    }
    return check_tables(op, &a->dy, &a->cos, &a->sin, &a->pos, e);
}

int rope_positions_check(const char *op, const struct tensor *pos, const struct tensor *cos_table,
                         struct err *e)
{
    if (!present(cos_table))
        return ST_OK;
    const int32_t *p = pos->data;
    int64_t positions = cos_table->dim[0];
    for (int64_t t = 0; t < pos->dim[0]; t++)
        if (p[t] < 0 || p[t] >= positions)
            return err_set(e, ST_INVALID,
                           "%s: pos[%lld] is %d, the tables have positions 0 to %lld", op,
                           (long long)t, p[t], (long long)positions - 1);
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

enum { TOKENS, HEADS, WIDTH, ROTATED, POSITIONS };
static const struct op_dim dims[] = {
    {"tokens", 5}, {"heads", 3}, {"d", 16}, {"rd", 16}, {"positions", 11}};

static int64_t dim_of(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

static struct tensor x_like(const struct op_call *c)
{
    return tensor_3d(NULL, DT_NONE, dim_of(c, TOKENS), dim_of(c, HEADS), dim_of(c, WIDTH));
}

static struct tensor table_like(const struct op_call *c)
{
    return tensor_2d(NULL, DT_NONE, dim_of(c, POSITIONS), dim_of(c, ROTATED) / 2);
}

/* Tables are N(0,1) like the rest: the op does not need cos^2 + sin^2 = 1, nor should its test. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (c->desc->args[arg].type != ARG_I32)
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++)
        ((int32_t *)t->data)[i] =
            (int32_t)rng_below(key, (uint64_t)i, (uint64_t)dim_of(c, POSITIONS));
    return true;
}

enum { F_X, F_W, F_COS, F_SIN, F_POS, F_Y, F_RSTD };
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "w", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "cos", .role = ARG_OPT, .type = ARG_WIDE, .no_grad = true},
    {.name = "sin", .role = ARG_OPT, .type = ARG_WIDE, .no_grad = true},
    {.name = "pos", .role = ARG_OPT, .type = ARG_I32},
    {.name = "y", .role = ARG_OUT},
    {.name = "rstd", .role = ARG_OOUT, .type = ARG_WIDE, .no_grad = true},
};
static const struct op_attr fwd_attrs[] = {{.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}, {.name = "interleaved", .value = 0}};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = x_like(c);
    c->t[F_W] = tensor_1d(NULL, DT_NONE, dim_of(c, WIDTH));
    c->t[F_COS] = c->t[F_SIN] = table_like(c);
    c->t[F_POS] = tensor_1d(NULL, DT_I32, dim_of(c, TOKENS));
}

static struct rope_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct rope_fwd_args){.x = c->t[F_X],
                                  .w = c->t[F_W],
                                  .cos = c->t[F_COS],
                                  .sin = c->t[F_SIN],
                                  .pos = c->t[F_POS],
                                  .y = c->t[F_Y],
                                  .rstd = c->t[F_RSTD],
                                  .eps = c->attr[0],
                                  .zero_centered = c->attr[1] != 0,
                                  .interleaved = c->attr[2] != 0};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    const struct tensor *x = &c->t[F_X];
    if (x->rank != 3)
        return err_set(e, ST_INVALID, "rope_fwd: x has rank %d, expected 3: token, head, channel",
                       x->rank);
    c->t[F_Y] = tensor_shape(x->dtype, 3, x->dim);
    if (c->t[F_W].rank > 0)
        c->t[F_RSTD] = tensor_2d(NULL, wide_of(x->dtype), x->dim[0], x->dim[1]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct rope_fwd_args a = fwd_pack(c);
    return ops->rope_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_X]), size = (double)dtype_bytes(c->t[F_X].dtype);
    *out = (struct op_cost){.flops = (c->t[F_W].rank > 0 ? 7 : 3) * n, .bytes = 2 * n * size};
}

enum { B_DY, B_X, B_W, B_RSTD, B_COS, B_SIN, B_POS, B_DX, B_DW, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x", .role = ARG_OPT},
    {.name = "w", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "rstd", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "cos", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "sin", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "pos", .role = ARG_OPT, .type = ARG_I32},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dw", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "zero_centered", .value = 0}, {.name = "interleaved", .value = 0}, {.name = "acc_dw", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = c->t[B_X] = x_like(c);
    c->t[B_W] = tensor_1d(NULL, DT_NONE, dim_of(c, WIDTH));
    c->t[B_RSTD] = tensor_2d(NULL, DT_NONE, dim_of(c, TOKENS), dim_of(c, HEADS));
    c->t[B_COS] = c->t[B_SIN] = table_like(c);
    c->t[B_POS] = tensor_1d(NULL, DT_I32, dim_of(c, TOKENS));
}

static struct rope_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct rope_bwd_args){.dy = c->t[B_DY],
                                  .x = c->t[B_X],
                                  .w = c->t[B_W],
                                  .rstd = c->t[B_RSTD],
                                  .cos = c->t[B_COS],
                                  .sin = c->t[B_SIN],
                                  .pos = c->t[B_POS],
                                  .dx = c->t[B_DX],
                                  .dw = c->t[B_DW],
                                  .work = c->t[B_WORK],
                                  .zero_centered = c->attr[0] != 0,
                                  .interleaved = c->attr[1] != 0,
                                  .acc_dw = c->attr[2] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *dy = &c->t[B_DY];
    if (dy->rank != 3)
        return err_set(e, ST_INVALID, "rope_bwd: dy has rank %d, expected 3: token, head, channel",
                       dy->rank);
    c->t[B_DX] = tensor_shape(dy->dtype, 3, dy->dim);
    if (c->t[B_W].rank > 0)
        c->t[B_DW] = tensor_1d(NULL, wide_of(dy->dtype), dy->dim[2]);
    struct rope_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->rope_bwd_work ? ops->rope_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct rope_bwd_args a = bwd_pack(c);
    return ops->rope_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_DY]), size = (double)dtype_bytes(c->t[B_DY].dtype);
    bool norm = c->t[B_W].rank > 0;
    *out = (struct op_cost){.flops = (norm ? 12 : 3) * n, .bytes = (norm ? 3 : 2) * n * size};
}

static const struct op_sample samples[] = {
    {"tokens=5 heads=3 d=16 rd=16"},
    {"tokens=1 heads=1 d=2 rd=2 positions=1 no_w=1"},
    {"tokens=0 heads=2"},
    {"tokens=3 heads=0"},
    {"tokens=7 heads=2 d=33 rd=10 zero_centered=1"},
    {"tokens=65 heads=2 d=20 rd=12 interleaved=1 acc_dw=1"},
    {"tokens=9 heads=5 d=64 rd=64 no_w=1 strided=1"},
    {"tokens=9 heads=5 d=24 rd=6 no_w=1 interleaved=1 strided=1"},
    {"tokens=130 heads=3 d=17 no_cos=1 no_sin=1 no_pos=1 strided=1 zero_centered=1 acc_dw=1"},
    {"tokens=4 heads=2 d=5 no_cos=1 no_sin=1 no_pos=1 no_w=1"},
    {"tokens=67 heads=4 d=64 rd=32 strided=1 interleaved=1"},
    {"tokens=35 heads=5 d=128 rd=128 acc_dw=1"},
    {"tokens=35 heads=1 d=64 rd=64 no_w=1 interleaved=1"},
    {"tokens=33 heads=6 d=128 rd=64 interleaved=1"},
    {"tokens=19 heads=3 d=96 rd=32"},
    {"tokens=9 heads=9 d=256 rd=64 no_w=1"},
    {"tokens=9 heads=2 d=64 no_cos=1 no_sin=1 no_pos=1"},
    {"tokens=1030 heads=2 d=32 rd=32 zero_centered=1"},
};
static const struct op_sample bench[] = {
    {"tokens=4096 heads=10 d=64 rd=64 positions=256 no_w=1"},
    {"tokens=4096 heads=10 d=64 rd=64 positions=256"},
    {"tokens=8192 heads=16 d=128 rd=64 positions=4096 interleaved=1"},
    {"tokens=16384 heads=16 d=128 rd=128 positions=4096 no_w=1 gpu=1"},
    {"tokens=16384 heads=16 d=128 rd=128 positions=4096 gpu=1"},
};

OP_TABLES(rope_fwd, ROPE_FWD_FIELDS);
const struct op_desc rope_fwd_desc = {
    OP_IS(rope_fwd),
    .summary = "per-head norm and rotary position embedding",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "rope_bwd",
    .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(rope_bwd, ROPE_BWD_FIELDS);
const struct op_desc rope_bwd_desc = {
    OP_IS(rope_bwd),
    .summary = "gradient of rope_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
