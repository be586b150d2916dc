/* Check, descriptor, test samples and bench shapes of mhc_rebuild; see mhc.h. A call has as many layers as tensors f1, f2, ... are
 * given; layer k has key + k - 1. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_rebuild_int.h"

int mhc_rebuild_check(const struct mhc_rebuild_args *a, struct err *e)
{
    const char *op = "mhc_rebuild";
    if (a->layers < 1 || a->layers > MHC_REBUILD_LAYERS)
        return err_set(e, ST_INVALID, "%s: %d layers, expected 1 to %d", op, a->layers, MHC_REBUILD_LAYERS);
    if (!present(&a->layer[a->layers - 1].y))
        return err_set(e, ST_INVALID, "%s: y of layer %d, the last one, is absent: nothing would need that layer", op, a->layers);
    if (a->rule.streams < 2 || a->rule.streams > MHC_MAX_STREAMS)
        return err_set(e, ST_INVALID, "%s: %lld streams, expected 2 to %d", op, (long long)a->rule.streams, MHC_MAX_STREAMS);
    CHECK_T(op, "x", &a->x, a->x.dtype, 2, -1, -1);
    for (int l = 0; l < a->layers; l++) {
        char name[16];
        snprintf(name, sizeof name, "coef%d", l + 1);
        CHECK_T(op, name, &a->layer[l].coef, wide_of(a->x.dtype), 2, a->x.dim[0], mhc_logits(a->rule.streams));
        struct mhc_combine_fwd_args c = mhc_rebuild_combine(a, l);
        int st = mhc_combine_fwd_check(&c, e);
        if (st != ST_OK)
            return err_in(e, "%s, layer %d of %d", op, l + 1, a->layers), st;
    }
    return ST_OK;
}

/* x, then f, bias and coef of every layer, info, then every y. */
enum { X, FIRST, F = 0, BIAS, COEF, PER_LAYER, INFO_AT = FIRST + PER_LAYER * MHC_REBUILD_LAYERS, FIRST_Y };

#define FIRST_LAYER(k) IN(f##k), WOPT(bias##k), WIN(coef##k)
#define LAYER(k) OPT(f##k), WOPT(bias##k), WOPT(coef##k)
static const struct op_arg mhc_rebuild_arg_list[] = {IN(x), FIRST_LAYER(1), LAYER(2), LAYER(3), LAYER(4), LAYER(5), LAYER(6), LAYER(7), INFO,
                                                     OOUT(y1), OOUT(y2), OOUT(y3), OOUT(y4), OOUT(y5), OOUT(y6), OOUT(y7)};
_Static_assert(countof(mhc_rebuild_arg_list) == FIRST_Y + MHC_REBUILD_LAYERS, "one f, bias, coef and y for each layer");
static const char letters[] = "KCvNCvNCvNCvNCvNCvNCvNiKKKKKKK";
_Static_assert(sizeof letters - 1 == FIRST_Y + MHC_REBUILD_LAYERS, "a letter for each tensor");
static const struct op_attr mhc_rebuild_attrs[] = {MHC_RULE_ATTRS, MHC_DROP_ATTRS};
static const struct op_dim dims[] = {{"rows", 5}, {"d", 9}, {"layers", 3}, {"biases", 1}};

static int layers_of(const struct op_call *c)
{
    int n = 0;
    while (n < MHC_REBUILD_LAYERS && c->t[FIRST + PER_LAYER * n].rank > 0)
        n++;
    return n;
}

struct mhc_rebuild_args mhc_rebuild_pack(const struct op_call *c)
{
    struct mhc_rebuild_args a = {.x = c->t[X], .layers = layers_of(c), .rule = mhc_pack_rule(c), .drop = mhc_pack_drop(c, &c->t[INFO_AT])};
    for (int l = 0; l < a.layers; l++) {
        const struct tensor *t = &c->t[FIRST + PER_LAYER * l];
        a.layer[l] = (struct mhc_rebuild_layer){.f = t[F], .bias = t[BIAS], .coef = t[COEF], .y = c->t[FIRST_Y + l], .key = a.drop.key + (uint64_t)l};
    }
    return a;
}

static void mhc_rebuild_shapes(struct op_call *c)
{
    mhc_sample_shapes(c, letters);
    for (int l = 0; l < MHC_REBUILD_LAYERS; l++)
        for (int i = 0; i < PER_LAYER; i++)
            if (l >= (int)op_dim(c, "layers") || (i == BIAS && op_dim(c, "biases") == 0))
                c->t[FIRST + PER_LAYER * l + i] = (struct tensor){0};
}

static int mhc_rebuild_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    TRY(mhc_infer_shapes(c, letters, e));
    for (int l = layers_of(c); l < MHC_REBUILD_LAYERS; l++) {
        if (c->t[FIRST + PER_LAYER * l + F].rank > 0)
            return err_set(e, ST_INVALID, "%s: f%d is given, but f%d is not: layers have no gaps", c->desc->name, l + 1, layers_of(c) + 1);
        c->t[FIRST_Y + l] = (struct tensor){0};
    }
    return ST_OK;
}

static int mhc_rebuild_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct mhc_rebuild_args a = mhc_rebuild_pack(c);
    return ops->mhc_rebuild(lane, &a);
}

static void mhc_rebuild_cost(const struct op_call *c, struct op_cost *out)
{
    mhc_cost(c, layers_of(c) * (2 * op_attr(c, "streams") + 2), out);
}

static const struct op_sample samples[] = {
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
static const struct op_sample bench[] = {
    {"rows=1536 d=192 layers=4 biases=0"}, {"rows=2048 d=2048 layers=3 biases=0"}, {"rows=16384 d=2048 layers=4 gpu=1 biases=0"},
    {"rows=16384 d=2048 layers=7 gpu=1 biases=0"}, {"rows=8192 d=4096 layers=7 gpu=1 biases=0"}};

/* narrow: bf16 rounds the streams between layers, 1.1e-3 each, and the samples' mixing matrices let that grow. */
const struct op_desc mhc_rebuild_desc = {
    .name = "mhc_rebuild", .summary = "streams of several sublayers made again from their outputs and coefficients", OP_LIST(args, mhc_rebuild_arg_list),
    OP_LIST(attrs, mhc_rebuild_attrs), OP_LIST(dims, dims), .sample_shapes = mhc_rebuild_shapes, .sample_fill = mhc_sample_fill, .infer = mhc_rebuild_infer,
    .run = mhc_rebuild_run, .cost = mhc_rebuild_cost, .tolerance = 1e-5, .narrow = 5e-3, OP_LIST(samples, samples), OP_LIST(bench, bench)};
