/* gate: argument checks, cost, descriptors, test samples and bench shapes; see gate.h. */
#include "ops/check.h"
#include "ops/gate/gate.h"
#include "ops/opdesc.h"

#include <string.h>

/* g like x, or with a last dim of 1. */
static int gate_check(const char *op, const struct tensor *x, const struct tensor *g, struct err *e)
{
    int64_t any[TENSOR_MAX_RANK] = {-1, -1, -1, -1, -1}, dim[TENSOR_MAX_RANK];
    if (x->rank < 2 || x->rank > TENSOR_MAX_RANK)
        return err_set(e, ST_INVALID, "%s: x has rank %d, expected 2 to %d", op, x->rank,
                       TENSOR_MAX_RANK);
    TRY(check_tensor(op, "x", x, x->dtype, x->rank, any, e));
    memcpy(dim, x->dim, sizeof dim);
    if (g->rank == x->rank && g->dim[g->rank - 1] == 1)
        dim[x->rank - 1] = 1;
    return check_tensor(op, "g", g, x->dtype, x->rank, dim, e);
}

int gate_fwd_check(const struct gate_fwd_args *a, struct err *e)
{
    TRY(gate_check("gate_fwd", &a->x, &a->g, e));
    return check_tensor("gate_fwd", "y", &a->y, a->x.dtype, a->x.rank, a->x.dim, e);
}

int gate_bwd_check(const struct gate_bwd_args *a, struct err *e)
{
    TRY(gate_check("gate_bwd", &a->x, &a->g, e));
    TRY(check_tensor("gate_bwd", "dy", &a->dy, a->x.dtype, a->x.rank, a->x.dim, e));
    TRY(check_tensor("gate_bwd", "dx", &a->dx, a->x.dtype, a->x.rank, a->x.dim, e));
    return check_tensor("gate_bwd", "dg", &a->dg, a->x.dtype, a->x.rank, a->g.dim, e);
}

/* ---- descriptors --------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"heads", 0}, {"n", 33}, {"shared", 0}};

static struct tensor shape_of(const struct op_call *c, int64_t last)
{
    int64_t rows = (int64_t)c->dim[0], heads = (int64_t)c->dim[1];
    return heads > 0 ? tensor_3d(NULL, DT_NONE, rows, heads, last)
                     : tensor_2d(NULL, DT_NONE, rows, last);
}

static struct tensor x_shape(const struct op_call *c) { return shape_of(c, (int64_t)c->dim[2]); }
static struct tensor g_shape(const struct op_call *c)
{
    return shape_of(c, c->dim[3] != 0 ? 1 : (int64_t)c->dim[2]);
}

enum { F_X, F_G, F_Y };
static const struct op_arg fwd_args[] = {
    {.name = "x"}, {.name = "g"}, {.name = "y", .role = ARG_OUT}};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_X] = x_shape(c);
    c->t[F_G] = g_shape(c);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[F_Y] = tensor_shape(c->t[F_X].dtype, c->t[F_X].rank, c->t[F_X].dim);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gate_fwd_args a = {.x = c->t[F_X], .g = c->t[F_G], .y = c->t[F_Y]};
    return ops->gate_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_bytes(&c->t[F_X]), g = (double)tensor_bytes(&c->t[F_G]);
    *out = (struct op_cost){.flops = 10 * (double)tensor_elems(&c->t[F_X]), .bytes = 2 * n + g};
}

enum { B_DY, B_X, B_G, B_DX, B_DG };
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "x"},
    {.name = "g"},
    {.name = "dx", .role = ARG_OUT},
    {.name = "dg", .role = ARG_OUT},
};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DY] = c->t[B_X] = x_shape(c);
    c->t[B_G] = g_shape(c);
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[B_DX] = tensor_shape(c->t[B_X].dtype, c->t[B_X].rank, c->t[B_X].dim);
    c->t[B_DG] = tensor_shape(c->t[B_X].dtype, c->t[B_G].rank, c->t[B_G].dim);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gate_bwd_args a = {
        .dy = c->t[B_DY], .x = c->t[B_X], .g = c->t[B_G], .dx = c->t[B_DX], .dg = c->t[B_DG]};
    return ops->gate_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_bytes(&c->t[B_X]), g = (double)tensor_bytes(&c->t[B_G]);
    *out = (struct op_cost){.flops = 14 * (double)tensor_elems(&c->t[B_X]), .bytes = 3 * n + 2 * g};
}

static const struct op_sample samples[] = {
    {"rows=5 n=33"},
    {"rows=1 n=1"},
    {"rows=0 n=8"},
    {"rows=3 n=0"},
    {"rows=3 n=0 shared=1"},
    {"rows=7 n=65 shared=1"},
    {"rows=300 n=31 strided=1"},
    {"rows=70 heads=3 n=16 strided=1"},
    {"rows=129 heads=5 n=17 shared=1 strided=1"},
    {"rows=70 heads=3 n=64"},
    {"rows=33 n=1032"},
    {"rows=33 n=1032 shared=1"},
};
static const struct op_sample bench[] = {
    {"rows=4096 n=320"}, {"rows=4096 heads=5 n=64"}, {"rows=4096 n=864 shared=1"}, {"rows=16384 n=2048 gpu=1"},
    {"rows=16384 n=2048 shared=1 gpu=1"}};

OP_TABLES(gate_fwd, GATE_FWD_FIELDS);
const struct op_desc gate_fwd_desc = {
    OP_IS(gate_fwd),
    .summary = "x times the sigmoid of a gate",
    OP_LIST(args, fwd_args), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .backward = "gate_bwd",
    .tolerance = 2e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(gate_bwd, GATE_BWD_FIELDS);
const struct op_desc gate_bwd_desc = {
    OP_IS(gate_bwd),
    .summary = "gradient of gate_fwd",
    OP_LIST(args, bwd_args), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .tolerance = 3e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
