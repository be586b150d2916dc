/* rope: argument checks, cost, descriptors, test samples and bench shapes; see rope.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/rope/rope.h"

#include <math.h>

static int check_tables(const char *op, const struct tensor *x, const struct tensor *cos_table, struct err *e)
{
    if (!present(cos_table) || 2 * cos_table->dim[1] <= x->dim[2])
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: the tables rotate %lld channels but a head has %lld", op,
                   (long long)(2 * cos_table->dim[1]), (long long)x->dim[2]);
}

int rope_fwd_check(const struct rope_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&rope_fwd_desc, a, e));
    return check_tables("rope_fwd", &a->x, &a->cos, e);
}

int rope_bwd_check(const struct rope_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&rope_bwd_desc, a, e));
    return check_tables("rope_bwd", &a->dy, &a->cos, e);
}

int rope_positions_check(const char *op, const struct tensor *pos, const struct tensor *cos_table, struct err *e)
{
    if (!present(cos_table))
        return ST_OK;
    const int32_t *p = pos->data;
    int64_t positions = cos_table->dim[0];
    for (int64_t t = 0; t < pos->dim[0]; t++)
        if (p[t] < 0 || p[t] >= positions)
            return err_set(e, ST_INVALID, "%s: pos[%lld] is %d, the tables have positions 0 to %lld", op, (long long)t,
                           p[t], (long long)positions - 1);
    return ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

enum { TOKENS, HEADS, WIDTH, ROTATED, POSITIONS, HALF };
static const struct op_dim dims[] = {{"tokens", 5}, {"heads", 3},      {"d", 16},
                                     {"rd", 16},    {"positions", 11}, {"half", 0}};

static void halve(struct op_call *c) { c->dim[HALF] = floor(c->dim[ROTATED] / 2); }

static int64_t dim_of(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

/* Tables are N(0,1) like the rest: the op does not need cos^2 + sin^2 = 1, nor should its test. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (c->desc->args[arg].type != ARG_I32)
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++)
        ((int32_t *)t->data)[i] = (int32_t)rng_below(key, (uint64_t)i, (uint64_t)dim_of(c, POSITIONS));
    return true;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(rope_fwd, a, c);
    double n = (double)tensor_elems(&a->x), size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = (a->w.rank > 0 ? 7 : 3) * n, .bytes = 2 * n * size};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(rope_bwd, a, c);
    double n = (double)tensor_elems(&a->dy), size = (double)dtype_bytes(a->dy.dtype);
    bool norm = a->w.rank > 0;
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
    OP_IS(rope_fwd),        .sample_dims = halve, .summary = "per-head norm and rotary position embedding",
    OP_LIST(dims, dims),    .cost = fwd_cost,     .sample_fill = fill,
    .backward = "rope_bwd", .tolerance = 2e-6,    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(rope_bwd, ROPE_BWD_FIELDS);
const struct op_desc rope_bwd_desc = {
    OP_IS(rope_bwd),     .sample_dims = halve,      .summary = "gradient of rope_fwd",
    OP_LIST(dims, dims), .cost = bwd_cost,          .sample_fill = fill,
    .tolerance = 5e-6,   OP_LIST(samples, samples), OP_LIST(bench, bench),
};
