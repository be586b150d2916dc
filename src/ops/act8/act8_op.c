/* act8: argument checks, cost, descriptors, test samples and bench shapes; see act8.h. */
#include "ops/act8/act8_int.h"
#include "ops/act/act_desc.h"
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ops.h"
#include "tensor/f8.h"

#include <math.h>

/* The calls that it replaces check all but scratch; their values have no memory yet. */
int act8_fwd_check(const struct act8_fwd_args *a, struct err *e)
{
    int64_t gate = act_gate(a->rule.kind);
    if (a->x.data == NULL || a->x.rank != 2 || a->x.dim[1] % gate != 0)
        return err_set(
            e, ST_INVALID,
            "act8_fwd: tensor x is missing, has not two dimensions, or an odd number of columns for a gated kind");
    struct tensor y = tensor_2d(a->x.data, a->x.dtype, a->x.dim[0], a->x.dim[1] / gate);
    TRY(act_fwd_check(&(struct act_fwd_args){.x = a->x, .y = y, .rule = a->rule}, e));
    return quantise_check(&(struct quantise_args)ACT8_QUANTISE(a, y), e);
}

int act8_bwd_check(const struct act8_bwd_args *a, struct err *e)
{
    TRY(act_bwd_check(&(struct act_bwd_args){.dy = a->dy, .x = a->x, .dx = a->x, .rule = a->rule}, e));
    struct tensor dx = tensor_2d(a->x.data, a->x.dtype, a->x.dim[0], a->x.dim[1]);
    return quantise_check(&(struct quantise_args)ACT8_QUANTISE(a, dx), e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"f", 32}};

static int64_t columns(const struct op_call *c, bool back)
{
    bool gated = act_is_gated((enum act_kind)op_attr(c, "kind"));
    return (int64_t)op_dim(c, "f") * (back && gated ? 2 : 1);
}

static void shapes(struct op_call *c)
{
    int64_t rows = (int64_t)op_dim(c, "rows"), f = (int64_t)op_dim(c, "f");
    int dy = op_arg_index(c->desc, "dy");
    c->t[op_arg_index(c->desc, "x")] = tensor_2d(NULL, DT_NONE, rows, columns(c, true));
    if (dy >= 0)
        c->t[dy] = tensor_2d(NULL, DT_NONE, rows, f);
}

static int infer_codes(struct op_call *c, const struct ops *ops, bool back, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    if (x->rank != 2)
        return err_set(e, ST_INVALID, "%s: x has rank %d, expected 2", c->desc->name, x->rank);
    bool gated = act_is_gated((enum act_kind)op_attr(c, "kind"));
    int64_t rows = x->dim[0], cols = back || !gated ? x->dim[1] : x->dim[1] / 2, block = (int64_t)op_attr(c, "block");
    enum dtype type = op_attr(c, "e5m2") != 0 ? DT_F8_E5M2 : DT_F8_E4M3, wide = wide_of(ops->real);
    c->t[op_arg_index(c->desc, "q")] = tensor_2d(NULL, type, rows, cols);
    c->t[op_arg_index(c->desc, "qs")] = f8_scales(wide, rows, cols, block, false);
    c->t[op_arg_index(c->desc, "t")] = tensor_2d(NULL, type, cols, rows);
    c->t[op_arg_index(c->desc, "ts")] = f8_scales(wide, cols, rows, block, false);
    struct op_packed p;
    op_call_pack(c, &p);
    int64_t work = c->desc->work_bytes(ops, p.bytes);
    if (work > 0)
        c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, work);
    return ST_OK;
}
static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e) { return infer_codes(c, ops, false, e); }
static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e) { return infer_codes(c, ops, true, e); }

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(act8_fwd, a, c);
    double y = (double)tensor_elems(&a->q);
    *out = (struct op_cost){.flops = 16 * y, .bytes = (double)tensor_bytes(&a->x) + 2 * y};
}
static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(act8_bwd, a, c);
    double n = (double)tensor_elems(&a->x);
    *out =
        (struct op_cost){.flops = 16 * n, .bytes = (double)tensor_bytes(&a->x) + (double)tensor_bytes(&a->dy) + 2 * n};
}

static const struct op_sample samples[] = {
    {"rows=5 f=33 kind=0"},
    {"rows=0 f=16 kind=0"},
    {"rows=16 f=0 kind=0"},
    {"rows=128 f=128 kind=0"},
    {"rows=144 f=256 kind=0 clamp=1.5"},
    {"rows=272 f=128 kind=1"},
    {"rows=32 f=128 kind=2 offset=1 alpha=1.3"},
    {"rows=144 f=128 kind=3"},
    {"rows=16 f=384 kind=5"},
    {"rows=48 f=144 kind=6"},
    {"rows=40 f=64 kind=0 interleave=16"},
    {"rows=48 f=64 kind=0 block=32"},
    {"rows=48 f=80 kind=4 block=0"},
};
static const struct op_sample bench[] = {{"rows=4096 f=864 kind=0"}, {"rows=16384 f=5632 kind=0 gpu=1"}};

#define RULE_ATTRS(op) ACT_RULE_ATTRS(op, "offset") OP_ATTR_EXTRA("e5m2", 0)
/* A value next to a tie of two codes falls to either side, as devices compute the curve differently: 32 of 448. That
 * the codes are those of act followed by quantise, to the bit, is checked by tests/gpu/check_f8. */
#define CODES_TOLERANCE 0.075
#define CODES_NARROW 0.03

OP_TABLES_WITH(act8_fwd, ACT8_FWD_FIELDS, , RULE_ATTRS(act8_fwd));
const struct op_desc act8_fwd_desc = {
    OP_IS(act8_fwd),
    .summary = "the nonlinearity of an MLP, as FP8 codes",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = fwd_infer,
    .cost = fwd_cost,
    .tolerance = CODES_TOLERANCE,
    .narrow = CODES_NARROW,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(act8_bwd, ACT8_BWD_FIELDS, , RULE_ATTRS(act8_bwd));
const struct op_desc act8_bwd_desc = {
    OP_IS(act8_bwd),
    .summary = "gradient of act_fwd, as FP8 codes",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = bwd_infer,
    .cost = bwd_cost,
    .tolerance = CODES_TOLERANCE,
    .narrow = CODES_NARROW,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
