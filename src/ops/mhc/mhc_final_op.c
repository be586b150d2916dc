/* Argument checks, descriptors, test samples and bench shapes of the last boundary, of streams recomputed, and of the
 * health numbers; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/mhc/mhc_final_int.h"
#include "ops/mhc/mhc_rebuild_int.h"

/* ---- the last boundary ----------------------------------------------------------------------- */

int mhc_final_fwd_check(const struct mhc_final_fwd_args *a, struct err *e)
{
    const char *op = "mhc_final_fwd";
    TRY(mhc_rule_check(op, &a->rule, e));
    TRY(mhc_width_check(op, a->y.dim[1], a->rule.streams, e));
    TRY(op_check_fields(&mhc_final_fwd_desc, a, e));
    TRY(mhc_refuse_if(op, !a->reuse && !present(&a->x), "x is missing", e));
    return a->reuse ? ST_OK : mhc_drop_check(op, &a->drop, &a->y, e);
}

int mhc_final_bwd_check(const struct mhc_final_bwd_args *a, struct err *e)
{
    const char *op = "mhc_final_bwd";
    TRY(mhc_rule_check(op, &a->rule, e));
    TRY(mhc_width_check(op, a->dx.dim[1], a->rule.streams, e));
    TRY(op_check_fields(&mhc_final_bwd_desc, a, e));
    return mhc_drop_check(op, &a->drop, &a->dx, e);
}

MHC_RULED(mhc_final_fwd, MHC_FINAL_FWD_FIELDS, DROPOUT_INFO, MHC_BOUNDARY, 4 * mhc_streams(c) + 8)
MHC_RULED(mhc_final_bwd, MHC_FINAL_BWD_FIELDS, DROPOUT_INFO, MHC_BOUNDARY, 8 * mhc_streams(c) + 20)

/* The norm again: mhc_final_fwd with reuse, as the planner sees it. */
#define AGAIN_FIELDS(op)                                                                                               \
    OP_FIELD_IN(op, "y", y, IN, REAL, "rows streams*d")                                                                \
    OP_FIELD_IN(op, "coef", coef, IN, WIDE, "rows streams")                                                            \
    OP_FIELD_IN(op, "gain", gain, OPT, WIDE, "d")                                                                      \
    OP_FIELD_IN(op, "stat", stat, FIXED, WIDE, "rows streams+2")                                                       \
    OP_FIELD_IN(op, "h", h, OUT, REAL, "rows d")                                                                       \
    OP_FIELD_IN(op, "work", work, WORK, U8, "")
static const struct op_arg mhc_final_again_fields[] = {AGAIN_FIELDS(mhc_final_fwd)};

static const struct op_sample final_samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=17 d=33 streams=3 no_gain=1 no_dgain=1"},
    {"rows=33 d=20 streams=8 strided=1 zero_centered=1"},
    {"rows=70 d=16 eps=1e-3 p=0.25 seq=5"},
    {"rows=66 d=64 profile=1"},
    {"rows=37 d=256 gpu=1"},
    {"rows=33 d=1024 eps=1e-2 zero_centered=1 gpu=1"},
    {"rows=600 d=2048 gpu=1"},
    {"rows=21 d=512 no_gain=1 no_dgain=1 p=0.25 seq=5 gpu=1"},
    {"rows=37 d=256 kernels=2 gpu=1"},
    /* backward only */
    {"rows=401 d=5 acc_dw=1 acc_dbase=1 acc_dscale=1 acc_dgain=1"},
    {"rows=0 d=8 acc_dw=1 acc_dbase=1 acc_dscale=1 acc_dgain=1"},
    {"rows=300 d=256 acc_dw=1 acc_dbase=1 acc_dscale=1 acc_dgain=1 gpu=1"},
    {"rows=33 d=16 no_dw=1 no_dbase=1 no_dscale=1"},
    {"rows=33 d=256 no_dw=1 no_dbase=1 no_dscale=1 gpu=1"},
};
enum { BACKWARD_ONLY = 5 };
static const struct op_sample final_bench[] = {{"rows=4096 d=320"}, {"rows=16384 d=2048 gpu=1"}};

/* In bf16 the streams are rounded before they are projected, as in mhc_boundary_fwd; backward what is left of them and
 * its gradient, before sums that cancel. */
const struct op_desc mhc_final_fwd_desc = {
    OP_IS(mhc_final_fwd),
    MHC_ALL(mhc_final_fwd, "the last mHC boundary: combine, contract by learned gates, norm"),
    .number = mhc_final_fwd_number,
    .infer = mhc_infer,
    .backward = "mhc_final_bwd",
    .tolerance = 2e-5,
    .narrow = 2e-2,
    .samples = final_samples,
    .n_samples = countof(final_samples) - BACKWARD_ONLY,
    OP_LIST(bench, final_bench)};
const struct op_desc mhc_final_bwd_desc = {
    OP_IS(mhc_final_bwd),
    MHC_ALL(mhc_final_bwd, "gradients of mhc_final_fwd, those of its parameters included"),
    .number = mhc_final_bwd_number,
    .infer = mhc_infer,
    .tolerance = 5e-5,
    .narrow = 1e-2,
    OP_LIST(samples, final_samples),
    OP_LIST(bench, final_bench)};
/* For the planner alone: tests of replays run it. */
const struct op_desc mhc_final_again_desc = {OP_NAMED("mhc_final_again", mhc_final_again, mhc_final_fwd),
                                             .number = mhc_final_fwd_number};

/* ---- streams recomputed ---------------------------------------------------------------------- */

int mhc_rebuild_check(const struct mhc_rebuild_args *a, struct err *e)
{
    const char *op = "mhc_rebuild";
    if (a->layers < 1 || a->layers > MHC_REBUILD_LAYERS)
        return err_set(e, ST_INVALID, "%s: %d layers, expected 1 to %d", op, a->layers, MHC_REBUILD_LAYERS);
    if (!present(&a->layer[a->layers - 1].y))
        return err_set(e, ST_INVALID, "%s: y of layer %d, the last one, is absent: nothing would need that layer", op,
                       a->layers);
    TRY(mhc_rule_check(op, &a->rule, e));
    TRY(op_check_fields(&mhc_rebuild_desc, a, e));
    for (int l = 0; l < a->layers; l++) {
        if (!present(&a->layer[l].f) || !present(&a->layer[l].coef))
            return err_set(e, ST_INVALID, "%s: tensor f%d or coef%d is missing", op, l + 1, l + 1);
        struct mhc_combine_fwd_args c = mhc_rebuild_combine(a, l);
        int st = mhc_combine_fwd_check(&c, e);
        if (st != ST_OK)
            return err_in(e, "%s, layer %d of %d", op, l + 1, a->layers), st;
    }
    return ST_OK;
}

/* A call has as many layers as tensors f1, f2, ... are given; layer k has key + k - 1. */
#define LAYER_IN(k, at, role)                                                                                          \
    OP_FIELD_IN(mhc_rebuild, "f" #k, layer[at].f, role, REAL, "rows d")                                                \
    OP_FIELD_IN(mhc_rebuild, "bias" #k, layer[at].bias, OPT, WIDE, "d")                                                \
    OP_FIELD_IN(mhc_rebuild, "coef" #k, layer[at].coef, role, WIDE, "rows logits")
#define LAYER_OUT(k, at) OP_FIELD_IN(mhc_rebuild, "y" #k, layer[at].y, OPT_OUT, REAL, "rows streams*d &f" #k)
static int given_layers(const struct op_call *c);
#define REBUILD_FIELDS(op)                                                                                             \
    LAYER_IN(1, 0, IN)                                                                                                 \
    LAYER_IN(2, 1, OPT)                                                                                                \
    LAYER_IN(3, 2, OPT)                                                                                                \
    LAYER_IN(4, 3, OPT)                                                                                                \
    LAYER_IN(5, 4, OPT)                                                                                                \
    LAYER_IN(6, 5, OPT)                                                                                                \
    LAYER_IN(7, 6, OPT)                                                                                                \
    DROPOUT_INFO(op)                                                                                                   \
    LAYER_OUT(1, 0) LAYER_OUT(2, 1) LAYER_OUT(3, 2) LAYER_OUT(4, 3) LAYER_OUT(5, 4) LAYER_OUT(6, 5) LAYER_OUT(7, 6)
MHC_RULED(mhc_rebuild, MHC_REBUILD_FIELDS, REBUILD_FIELDS, MHC_RULE_DROP, given_layers(c) * (2 * mhc_streams(c) + 2))
static const struct op_dim rebuild_dims[] = {{"rows", 5}, {"d", 9}, {"layers", 3}, {"biases", 1}};

static struct tensor *of_layer(struct op_call *c, const char *what, int layer)
{
    char name[16];
    snprintf(name, sizeof name, "%s%d", what, layer + 1);
    return &c->t[op_arg_index(c->desc, name)];
}
static int given_layers(const struct op_call *c)
{
    int n = 0;
    struct op_call copy = *c;
    while (n < MHC_REBUILD_LAYERS && of_layer(&copy, "f", n)->rank > 0)
        n++;
    return n;
}

static void rebuild_prepare(const struct op_call *c, void *args)
{
    struct mhc_rebuild_args *a = args;
    a->layers = given_layers(c);
    for (int l = 0; l < a->layers; l++)
        a->layer[l].key = a->drop.key + (uint64_t)l;
}

static void rebuild_shapes(struct op_call *c)
{
    for (int l = 0; l < MHC_REBUILD_LAYERS; l++) {
        if (l >= (int)op_dim(c, "layers"))
            *of_layer(c, "f", l) = *of_layer(c, "coef", l) = (struct tensor){0};
        if (l >= (int)op_dim(c, "layers") || op_dim(c, "biases") == 0)
            *of_layer(c, "bias", l) = (struct tensor){0};
    }
}

static int rebuild_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    for (int l = given_layers(c); l < MHC_REBUILD_LAYERS; l++)
        if (of_layer(c, "f", l)->rank > 0)
            return err_set(e, ST_INVALID, "%s: f%d is given, but f%d is not: layers have no gaps", c->desc->name, l + 1,
                           given_layers(c) + 1);
    return mhc_infer(c, ops, e);
}

static const struct op_sample rebuild_samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2 layers=1"},
    {"rows=0 d=8"},
    {"rows=7 d=16 streams=2 profile=1 layers=7"},
    {"rows=17 d=33 streams=3 layers=2 no_bias1=1"},
    {"rows=33 d=20 streams=8 layers=4 no_y1=1 no_y3=1"},
    {"rows=6 d=13 streams=16 profile=1 layers=5 no_y1=1 no_y2=1 no_y3=1 no_y4=1"},
    {"rows=66 d=64 p=0.25 seq=5 layers=7 no_bias2=1 no_bias4=1"},
    {"rows=70 d=67 streams=3 p=0.5 seq=3 profile=1"},
    {"rows=13 d=130 p=0.1 strided=1 layers=2"},
    {"rows=35 d=24 profile=1 strided=1 layers=6 no_y2=1"},
    {"rows=9 d=2056 layers=7 no_y5=1"},
    {"rows=3 d=1032 layers=4 p=0.1 biases=0"},
};
static const struct op_sample rebuild_bench[] = {{"rows=1536 d=192 layers=4 biases=0"},
                                                 {"rows=2048 d=2048 layers=3 biases=0"},
                                                 {"rows=16384 d=2048 layers=4 gpu=1 biases=0"},
                                                 {"rows=16384 d=2048 layers=7 gpu=1 biases=0"},
                                                 {"rows=8192 d=4096 layers=7 gpu=1 biases=0"}};

/* narrow: bf16 rounds the streams between layers, 1.1e-3 each, and the samples' mixing matrices let that grow. */
const struct op_desc mhc_rebuild_desc = {
    OP_IS(mhc_rebuild),
    .summary = "streams of several sublayers recomputed from their outputs and coefficients",
    .cost = mhc_rebuild_cost,
    .sample_fill = mhc_sample_fill,
    OP_LIST(dims, rebuild_dims),
    .number = mhc_rebuild_number,
    .sample_shapes = rebuild_shapes,
    .prepare = rebuild_prepare,
    .infer = rebuild_infer,
    .tolerance = 1e-5,
    .narrow = 5e-3,
    OP_LIST(samples, rebuild_samples),
    OP_LIST(bench, rebuild_bench)};

/* ---- health ---------------------------------------------------------------------------------- */

int mhc_health_check(const struct mhc_health_args *a, struct err *e)
{
    const char *op = "mhc_health";
    TRY(mhc_rule_check(op, &a->rule, e));
    TRY(mhc_refuse_if(op, a->layers < 1 || a->layers > MHC_HEALTH_LAYERS, "too many mixes at once, or none", e));
    for (int l = 0; l < a->layers; l++) {
        const struct mhc_health_layer *at = &a->layer[l];
        TRY(mhc_width_check(op, at->y.dim[1], a->rule.streams, e));
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            TRY(mhc_refuse_if(
                op,
                !present(&at->coef) || !present(&at->y) || !present(&at->out[i]) || at->acc[i] != a->layer[0].acc[0],
                "coef, y and every number of each mix must be given, and all numbers added to or none", e));
    }
    return op_check_fields(&mhc_health_desc, a, e);
}

_Static_assert(MHC_HEALTH_ROWS == 64, "the shape texts of mhc_health say so");
/* As many mixes as are given. */
#define MIX_IN(k, at, role)                                                                                            \
    OP_FIELD_IN(mhc_health, "coef" #k, layer[at].coef, role, WIDE, "rows logits")                                      \
    OP_FIELD_IN(mhc_health, "y" #k, layer[at].y, role, REAL, "rows streams*d")
#define NUMBER(name, k, at, i, role)                                                                                   \
    OP_SUM_IN(mhc_health, name #k, layer[at].out[i], layer[at].acc[i], role, F64, "1 &y" #k)
#define MIX_OUT(k, at, role)                                                                                           \
    NUMBER("row_error", k, at, MHC_ROW_ERROR, role)                                                                    \
    NUMBER("column_error", k, at, MHC_COLUMN_ERROR, role)                                                              \
    NUMBER("gain_forward", k, at, MHC_GAIN_FORWARD, role)                                                              \
    NUMBER("gain_backward", k, at, MHC_GAIN_BACKWARD, role) NUMBER("similarity", k, at, MHC_SIMILARITY, role)
#define HEALTH_ATTRS(op) MHC_RULE(op) OP_ATTR_EXTRA("acc_out", 0)
#define MIXES(op)                                                                                                      \
    MIX_IN(1, 0, IN)                                                                                                   \
    MIX_IN(2, 1, OPT) MIX_IN(3, 2, OPT) MIX_OUT(1, 0, SUM) MIX_OUT(2, 1, OPT_SUM) MIX_OUT(3, 2, OPT_SUM)
MHC_RULED(mhc_health, MHC_HEALTH_FIELDS, MIXES, HEALTH_ATTRS, 1)
static const struct op_dim health_dims[] = {{"rows", 5}, {"d", 9}, {"mixes", 3}};

static void health_shapes(struct op_call *c)
{
    for (int l = (int)op_dim(c, "mixes"); l < MHC_HEALTH_LAYERS; l++)
        *of_layer(c, "coef", l) = *of_layer(c, "y", l) = (struct tensor){0};
}

static void health_prepare(const struct op_call *c, void *args)
{
    struct mhc_health_args *a = args;
    for (a->layers = 0; a->layers < MHC_HEALTH_LAYERS && a->layer[a->layers].coef.rank > 0; a->layers++)
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            a->layer[a->layers].acc[i] = op_attr(c, "acc_out") != 0;
}

static const struct op_sample health_samples[] = {{"rows=5 d=9 mixes=1"},
                                                  {"rows=0 d=8 mixes=1 acc_out=1"},
                                                  {"rows=200 d=8 streams=3 profile=1 no_comp_in=1"},
                                                  {"rows=64 d=5 streams=8 mixes=2 acc_out=1"},
                                                  {"rows=130 d=264"},
                                                  {"rows=130 d=264 mixes=1 acc_out=1 no_comp_in=1"}};
const struct op_desc mhc_health_desc = {OP_IS(mhc_health),
                                        .summary = "row and column sums, gain and stream similarity of a mix",
                                        .cost = mhc_health_cost,
                                        .sample_fill = mhc_sample_fill,
                                        OP_LIST(dims, health_dims),
                                        .number = mhc_health_number,
                                        .sample_shapes = health_shapes,
                                        .prepare = health_prepare,
                                        .infer = mhc_infer,
                                        .tolerance = 1e-5,
                                        OP_LIST(samples, health_samples),
                                        OP_LIST(bench, final_bench)};
