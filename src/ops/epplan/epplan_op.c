/* epplan: argument checks, cost, descriptors, test samples; see epplan.h. */
#include "ops/check.h"
#include "ops/epplan/epplan.h"
#include "ops/opshape.h"

static int check_buffers(const char *op, const struct tensor *count, const struct tensor *buffers, struct err *e)
{
    if (count->dim[0] < 1 || count->dim[1] < 1 || buffers->dim[0] % count->dim[0] != 0 || buffers->dim[0] > INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld places in buffers for %lld ranks of %lld experts each", op,
                       (long long)buffers->dim[0], (long long)count->dim[0], (long long)count->dim[1]);
    return ST_OK;
}

int epsend_check(const struct epsend_args *a, struct err *e)
{
    TRY(op_check_fields(&epsend_desc, a, e));
    return check_buffers("epsend", &a->count, &a->from, e);
}

int eprecv_check(const struct eprecv_args *a, struct err *e)
{
    TRY(op_check_fields(&eprecv_desc, a, e));
    return check_buffers("eprecv", &a->count, &a->from, e);
}

/* ---- epsend: samples start from rows that are already sorted by expert, as moeplan leaves them  */

static const struct op_dim send_dims[] = {{"rows", 9}, {"k", 2}, {"experts", 8}, {"local", 0}};

static void share(struct op_call *c) { c->dim[3] = c->dim[2] / op_attr(c, "ranks"); }

/* Uneven shares; every seventh row is dropped, at the end. Row i is choice i in reverse. */
static bool send_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int32_t *v = host->data;
    int64_t n = (int64_t)(c->dim[0] * c->dim[1]), kept = n - n / 7, experts = (int64_t)c->dim[2];
    (void)key;
    if (op_arg_is(c, arg, "offset"))
        for (int64_t x = 0; x <= experts; x++)
            v[x] = (int32_t)(kept * x * x / (experts * experts));
    for (int64_t i = 0; op_arg_is(c, arg, "row") && i < n; i++)
        v[i] = n - 1 - i < kept ? (int32_t)(n - 1 - i) : -1;
    for (int64_t i = 0; op_arg_is(c, arg, "src") && i < n; i++)
        v[i] = i < kept ? (int32_t)(n - 1 - i) : -1;
    return op_arg_is(c, arg, "offset") || op_arg_is(c, arg, "row") || op_arg_is(c, arg, "src");
}

static void send_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(epsend, a, c);
    double n = (double)tensor_elems(&a->row) + (double)a->from.dim[0];
    *out = (struct op_cost){.flops = n, .bytes = 8 * n};
}

static const struct op_sample send_samples[] = {{"rows=9 k=2 cap=18"},
                                                {"rows=9 k=2 cap=3"},
                                                {"rows=0 k=1 cap=0"},
                                                {"rows=1 k=1 experts=1 ranks=1 cap=1"},
                                                {"rows=257 k=3 experts=12 ranks=4 cap=257"},
                                                {"rows=1000 k=8 experts=64 ranks=8 cap=1100"}};
static const struct op_sample send_bench[] = {{"rows=16384 k=8 experts=64 ranks=8 cap=24576"}};

OP_FIELDS(epsend, EPSEND_FIELDS, );
OP_ATTRS(epsend, EPSEND_FIELDS, OP_ATTR_EXTRA("ranks", 2) OP_ATTR_EXTRA("cap", 18));
OP_CALLS(epsend);
const struct op_desc epsend_desc = {
    OP_IS(epsend),
    .summary = "places of routed rows in the buffers that go to other ranks",
    OP_LIST(dims, send_dims),
    .sample_dims = share,
    .cost = send_cost,
    .sample_fill = send_fill,
    .tolerance = 0,
    OP_LIST(samples, send_samples),
    OP_LIST(bench, send_bench),
};

/* ---- eprecv ---------------------------------------------------------------------------------- */

static const struct op_dim recv_dims[] = {{"ranks", 3}, {"experts", 4}, {"most", 5}};

static bool recv_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; op_arg_is(c, arg, "count") && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)rng_below(key, (uint64_t)i, (uint64_t)c->dim[2] + 1);
    return op_arg_is(c, arg, "count");
}

static void recv_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(eprecv, a, c);
    double n = (double)a->from.dim[0];
    *out = (struct op_cost){.flops = n, .bytes = 8 * n};
}

static const struct op_sample recv_samples[] = {{"ranks=3 experts=4 most=5"},
                                                {"ranks=3 experts=4 most=5 cap=7"},
                                                {"ranks=1 experts=1 most=0 cap=0"},
                                                {"ranks=4 experts=3 most=80 cap=257"},
                                                {"ranks=8 experts=32 most=40 cap=1100"}};
static const struct op_sample recv_bench[] = {{"ranks=8 experts=8 most=4096 cap=24576"}};

OP_FIELDS(eprecv, EPRECV_FIELDS, );
OP_ATTRS(eprecv, EPRECV_FIELDS, OP_ATTR_EXTRA("cap", 20));
OP_CALLS(eprecv);
const struct op_desc eprecv_desc = {
    OP_IS(eprecv),
    .summary = "received rows sorted by local expert: ranges and both maps",
    OP_LIST(dims, recv_dims),
    .cost = recv_cost,
    .sample_fill = recv_fill,
    .tolerance = 0,
    OP_LIST(samples, recv_samples),
    OP_LIST(bench, recv_bench),
};
