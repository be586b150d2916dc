/* epplan: argument checks, cost, descriptors, test samples; see epplan.h. */
#include "ops/check.h"
#include "ops/epplan/epplan.h"
#include "ops/opdesc.h"

static int check_slabs(const char *op, const struct tensor *count, const struct tensor *slabs, struct err *e)
{
    if (count->dim[0] < 1 || count->dim[1] < 1 || slabs->dim[0] % count->dim[0] != 0 || slabs->dim[0] > INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld places in slabs for %lld ranks of %lld experts each", op, (long long)slabs->dim[0],
                       (long long)count->dim[0], (long long)count->dim[1]);
    return ST_OK;
}

int epsend_check(const struct epsend_args *a, struct err *e)
{
    const char *op = "epsend";
    CHECK_T(op, "row", &a->row, DT_I32, 2, -1, -1);
    CHECK_T(op, "src", &a->src, DT_I32, 1, tensor_elems(&a->row));
    CHECK_T(op, "to", &a->to, DT_I32, 2, a->row.dim[0], a->row.dim[1]);
    CHECK_T(op, "count", &a->count, DT_I32, 2, -1, -1);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, tensor_elems(&a->count) + 1);
    CHECK_T(op, "from", &a->from, DT_I32, 1, -1);
    CHECK_T(op, "rows", &a->rows, DT_I32, 1, a->count.dim[0]);
    CHECK_T(op, "need", &a->need, DT_F64, 1, 1);
    TRY(check_dense(op, "row", &a->row, e));
    TRY(check_dense(op, "to", &a->to, e));
    TRY(check_dense(op, "count", &a->count, e));
    return check_slabs(op, &a->count, &a->from, e);
}

int eprecv_check(const struct eprecv_args *a, struct err *e)
{
    const char *op = "eprecv";
    CHECK_T(op, "count", &a->count, DT_I32, 2, -1, -1);
    CHECK_T(op, "offset", &a->offset, DT_I32, 1, a->count.dim[1] + 1);
    CHECK_T(op, "from", &a->from, DT_I32, 1, -1);
    CHECK_T(op, "to", &a->to, DT_I32, 2, a->from.dim[0], 1);
    CHECK_T(op, "rows", &a->rows, DT_I32, 1, a->count.dim[0]);
    TRY(check_dense(op, "count", &a->count, e));
    return check_slabs(op, &a->count, &a->from, e);
}

/* ---- epsend: samples start from rows that are already sorted by expert, as moeplan leaves them ------------------- */

enum { S_OFFSET, S_ROW, S_SRC, S_TO, S_FROM, S_COUNT, S_ROWS, S_NEED };
static const struct op_arg send_args[] = {
    {.name = "offset", .type = ARG_I32}, {.name = "row", .type = ARG_I32}, {.name = "src", .type = ARG_I32},
    {.name = "to", .role = ARG_OUT, .type = ARG_I32}, {.name = "from", .role = ARG_OUT, .type = ARG_I32},
    {.name = "count", .role = ARG_OUT, .type = ARG_I32}, {.name = "rows", .role = ARG_OUT, .type = ARG_I32},
    {.name = "need", .role = ARG_OUT, .type = ARG_F64},
};
static const struct op_dim send_dims[] = {{"rows", 9}, {"k", 2}, {"experts", 8}};
static const struct op_attr send_attrs[] = {{.name = "ranks", .value = 2}, {.name = "cap", .value = 18}};

static void send_shapes(struct op_call *c)
{
    int64_t t = (int64_t)c->dim[0], k = (int64_t)c->dim[1];
    c->t[S_OFFSET] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[2] + 1);
    c->t[S_ROW] = tensor_2d(NULL, DT_NONE, t, k);
    c->t[S_SRC] = tensor_1d(NULL, DT_NONE, t * k);
}

/* Uneven shares; every seventh row is dropped, at the end. Row i is choice i in reverse. */
static bool send_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int32_t *v = host->data;
    int64_t n = (int64_t)(c->dim[0] * c->dim[1]), kept = n - n / 7, experts = (int64_t)c->dim[2];
    (void)key;
    if (arg == S_OFFSET)
        for (int64_t x = 0; x <= experts; x++)
            v[x] = (int32_t)(kept * x * x / (experts * experts));
    for (int64_t i = 0; arg == S_ROW && i < n; i++)
        v[i] = n - 1 - i < kept ? (int32_t)(n - 1 - i) : -1;
    for (int64_t i = 0; arg == S_SRC && i < n; i++)
        v[i] = i < kept ? (int32_t)(n - 1 - i) : -1;
    return arg <= S_SRC;
}

static int send_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    int64_t ranks = (int64_t)c->attr[0], cap = (int64_t)c->attr[1], experts = c->t[S_OFFSET].dim[0] - 1;
    if (ranks < 1 || cap < 0 || experts < 1 || experts % ranks != 0)
        return err_set(e, ST_INVALID, "epsend: %lld experts on %lld ranks, slabs of %lld rows", (long long)experts, (long long)ranks,
                       (long long)cap);
    c->t[S_TO] = tensor_shape(DT_I32, c->t[S_ROW].rank, c->t[S_ROW].dim);
    c->t[S_FROM] = tensor_1d(NULL, DT_I32, ranks * cap);
    c->t[S_COUNT] = tensor_2d(NULL, DT_I32, ranks, experts / ranks);
    c->t[S_ROWS] = tensor_1d(NULL, DT_I32, ranks);
    c->t[S_NEED] = tensor_1d(NULL, DT_F64, 1);
    return ST_OK;
}

static int send_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct epsend_args a = {.offset = c->t[S_OFFSET], .row = c->t[S_ROW], .src = c->t[S_SRC], .to = c->t[S_TO], .from = c->t[S_FROM],
                            .count = c->t[S_COUNT], .rows = c->t[S_ROWS], .need = c->t[S_NEED]};
    return ops->epsend(lane, &a);
}

static void send_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[S_ROW]) + (double)c->t[S_FROM].dim[0];
    *out = (struct op_cost){.flops = n, .bytes = 8 * n};
}

static const struct op_sample send_samples[] = {{"rows=9 k=2 cap=18"},
                                                {"rows=9 k=2 cap=3"},
                                                {"rows=0 k=1 cap=0"},
                                                {"rows=1 k=1 experts=1 ranks=1 cap=1"},
                                                {"rows=257 k=3 experts=12 ranks=4 cap=257"},
                                                {"rows=1000 k=8 experts=64 ranks=8 cap=1100"}};
static const struct op_sample send_bench[] = {{"rows=16384 k=8 experts=64 ranks=8 cap=24576"}};

OP_TABLES(epsend, EPSEND_FIELDS);
const struct op_desc epsend_desc = {
    OP_IS(epsend), .summary = "places of routed rows in the slabs that go to other ranks",
    OP_LIST(args, send_args), OP_LIST(attrs, send_attrs), OP_LIST(dims, send_dims),
    .sample_shapes = send_shapes, .infer = send_infer, .run = send_run, .cost = send_cost,
    .sample_fill = send_fill, .tolerance = 0,
    OP_LIST(samples, send_samples), OP_LIST(bench, send_bench),
};

/* ---- eprecv --------------------------------------------------------------------------------------------------------- */

enum { R_COUNT, R_OFFSET, R_FROM, R_TO, R_ROWS };
static const struct op_arg recv_args[] = {
    {.name = "count", .type = ARG_I32}, {.name = "offset", .role = ARG_OUT, .type = ARG_I32},
    {.name = "from", .role = ARG_OUT, .type = ARG_I32}, {.name = "to", .role = ARG_OUT, .type = ARG_I32},
    {.name = "rows", .role = ARG_OUT, .type = ARG_I32},
};
static const struct op_dim recv_dims[] = {{"ranks", 3}, {"experts", 4}, {"most", 5}};
static const struct op_attr recv_attrs[] = {{.name = "cap", .value = 20}};

static void recv_shapes(struct op_call *c) { c->t[R_COUNT] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]); }

static bool recv_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; arg == R_COUNT && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)rng_below(key, (uint64_t)i, (uint64_t)c->dim[2] + 1);
    return arg == R_COUNT;
}

static int recv_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    int64_t ranks = c->t[R_COUNT].dim[0], places = ranks * (int64_t)c->attr[0];
    if (c->attr[0] < 0)
        return err_set(e, ST_INVALID, "eprecv: slabs of %g rows", c->attr[0]);
    c->t[R_OFFSET] = tensor_1d(NULL, DT_I32, c->t[R_COUNT].dim[1] + 1);
    c->t[R_FROM] = tensor_1d(NULL, DT_I32, places);
    c->t[R_TO] = tensor_2d(NULL, DT_I32, places, 1);
    c->t[R_ROWS] = tensor_1d(NULL, DT_I32, ranks);
    return ST_OK;
}

static int recv_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct eprecv_args a = {.count = c->t[R_COUNT], .offset = c->t[R_OFFSET], .from = c->t[R_FROM], .to = c->t[R_TO], .rows = c->t[R_ROWS]};
    return ops->eprecv(lane, &a);
}

static void recv_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)c->t[R_FROM].dim[0];
    *out = (struct op_cost){.flops = n, .bytes = 8 * n};
}

static const struct op_sample recv_samples[] = {{"ranks=3 experts=4 most=5"},
                                                {"ranks=3 experts=4 most=5 cap=7"},
                                                {"ranks=1 experts=1 most=0 cap=0"},
                                                {"ranks=4 experts=3 most=80 cap=257"},
                                                {"ranks=8 experts=32 most=40 cap=1100"}};
static const struct op_sample recv_bench[] = {{"ranks=8 experts=8 most=4096 cap=24576"}};

OP_TABLES(eprecv, EPRECV_FIELDS);
const struct op_desc eprecv_desc = {
    OP_IS(eprecv), .summary = "received rows sorted by local expert: ranges and both maps",
    OP_LIST(args, recv_args), OP_LIST(attrs, recv_attrs), OP_LIST(dims, recv_dims),
    .sample_shapes = recv_shapes, .infer = recv_infer, .run = recv_run, .cost = recv_cost,
    .sample_fill = recv_fill, .tolerance = 0,
    OP_LIST(samples, recv_samples), OP_LIST(bench, recv_bench),
};
