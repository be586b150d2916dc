/* Descriptors, test samples and bench shapes of the mhc boundary and of the health numbers; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/mhc/mhc.h"

static double streams_of(const struct op_call *c) { return op_attr(c, "streams"); }
static double mapping_flops(const struct op_call *c) { return 2 * streams_of(c) * (streams_of(c) + 2); }

/* ---- forward ------------------------------------------------------------------------------------------ */

static const struct op_arg mhc_boundary_fwd_arg_list[] = {
    IN(x), OPT(f), WOPT(bias), WOPT(coef_in), INFO, WIN(w), WIN(a_pre), WIN(a_post), WIN(a_res), WIN(beta), WOPT(gain),
    OOUT(y), WMADE(stat), WOUT(coef), OUT(h), WORK};
static const struct op_attr mhc_boundary_fwd_attrs[] = {MHC_RULE_ATTRS, MHC_BOUNDARY_ATTRS, MHC_DROP_ATTRS, {.name = "eps", .value = 1e-5}, {.name = "zero_centered", .value = 0}, {.name = "enters", .value = 0}};
static struct mhc_boundary_fwd_args mhc_boundary_fwd_pack(const struct op_call *c)
{
    return (struct mhc_boundary_fwd_args){
        .x = T(x), .f = T(f), .bias = T(bias), .coef_in = T(coef_in), .w = T(w), .a_pre = T(a_pre), .a_post = T(a_post), .a_res = T(a_res),
        .beta = T(beta), .gain = T(gain), .y = T(y), .stat = T(stat), .coef = T(coef), .h = T(h), .work = T(work), .rule = mhc_pack_rule(c),
        .drop = mhc_pack_drop(c, mhc_arg(c, "info")), .eps = op_attr(c, "eps"), .zero_centered = FLAG(zero_centered)};
}
/* One stream enters instead of all: x has its width. */
static const char *fwd_letters(const struct op_call *c) { return FLAG(enters) ? "CCvNiWsssbvKSNC." : "KCvNiWsssbvKSNC."; }
MHC_FUNCTIONS(mhc_boundary_fwd, fwd_letters(c), mapping_flops(c) + 2 * streams_of(c) + 8)

static int mhc_boundary_fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(mhc_infer_shapes(c, fwd_letters(c), e));
    if (T(f).rank == 0 && !FLAG(enters))
        c->t[op_arg_index(c->desc, "y")] = (struct tensor){0};
    struct mhc_boundary_fwd_args a = mhc_boundary_fwd_pack(c);
    c->t[c->desc->n_args - 1] = tensor_1d(NULL, DT_U8, ops->mhc_boundary_fwd_work ? ops->mhc_boundary_fwd_work(&a) : 0);
    return ST_OK;
}

/* ---- backward: both halves, so that gradcheck sees every gradient ---------------------------------------- */

static const struct op_arg mhc_boundary_bwd_arg_list[] = {
    IN(dh), OPT(dy), WOPT(dcoef), WIN(stat), WIN(coef), WOPT(gain), WIN(w), WIN(a_pre), WIN(a_post), WIN(a_res), WIN(beta),
    IN(x), OPT(f), WOPT(bias), WOPT(coef_in), INFO, OPT(y) /* made from those */, OUT(dx), OOUT(df), WOOUT(dcoef_in), WOOUT(dgain), WOOUT(dbias), WOUT(dz),
    WOUT(dw), WOUT(da_pre), WOUT(da_post), WOUT(da_res), WOUT(dbeta), WORK};
static const struct op_attr mhc_boundary_bwd_attrs[] = {MHC_RULE_ATTRS, MHC_BOUNDARY_ATTRS, MHC_DROP_ATTRS, {.name = "zero_centered", .value = 0}, {.name = "acc_dgain", .value = 0}, {.name = "acc_dbias", .value = 0}, {.name = "acc_dw", .value = 0}, {.name = "products", .value = 0}, {.name = "ready", .value = 0}, {.name = "enters", .value = 0}};
static const char *bwd_letters(const struct op_call *c) { return FLAG(enters) ? "CKNSNvWsssbCCvNiKCCNvvNWsssb." : "CKNSNvWsssbKCvNiKKCNvvNWsssb."; }

/* The stream is x itself where nothing closed and nothing entered. */
static struct tensor stream_of(const struct op_call *c) { return T(f).rank > 0 || FLAG(enters) ? T(y) : T(x); }

static struct mhc_boundary_bwd_args mhc_boundary_bwd_pack(const struct op_call *c)
{
    struct mhc_boundary_bwd_args a = {
        .dh = T(dh), .dy = T(dy), .dcoef = T(dcoef), .y = stream_of(c), .stat = T(stat), .coef = T(coef), .gain = T(gain), .w = T(w),
        .a_pre = T(a_pre), .a_post = T(a_post), .a_res = T(a_res), .beta = T(beta), .f = T(f), .bias = T(bias), .coef_in = T(coef_in),
        .dx = T(dx), .df = T(df), .dcoef_in = T(dcoef_in), .dz = T(dz), .dgain = T(dgain), .dbias = T(dbias), .work = T(work),
        .rule = mhc_pack_rule(c), .drop = mhc_pack_drop(c, mhc_arg(c, "info")), .zero_centered = FLAG(zero_centered),
        .acc_dgain = FLAG(acc_dgain), .acc_dbias = FLAG(acc_dbias)};
    if (T(f).rank > 0 || FLAG(enters))
        a.x = T(x);
    if (FLAG(products))
        a.products = tensor_2d(NULL, T(dw).dtype, T(dw).dim[0] + 1, T(dw).dim[1]);
    return a;
}

static struct mhc_boundary_dw_args params_pack(const struct op_call *c)
{
    return (struct mhc_boundary_dw_args){
        .dz = T(dz), .stat = T(stat), .y = stream_of(c), .a_pre = T(a_pre), .a_post = T(a_post), .a_res = T(a_res), .dw = T(dw),
        .da_pre = T(da_pre), .da_post = T(da_post), .da_res = T(da_res), .dbeta = T(dbeta), .work = T(work), .rule = mhc_pack_rule(c),
        .acc_dw = FLAG(acc_dw), .acc_params = FLAG(acc_dw)};
}

/* What is asked for to be made before, if the device does that. */
static int64_t ready_bytes(const struct op_call *c, const struct ops *ops, const struct mhc_boundary_bwd_args *a)
{
    return FLAG(ready) && ops->mhc_boundary_ready_bytes != NULL ? ops->mhc_boundary_ready_bytes(a) : 0;
}

static void mhc_boundary_bwd_shapes(struct op_call *c) { mhc_sample_shapes(c, bwd_letters(c)); }

static int mhc_boundary_bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(mhc_infer_shapes(c, bwd_letters(c), e));
    struct mhc_boundary_bwd_args a = mhc_boundary_bwd_pack(c);
    struct mhc_boundary_dw_args p = params_pack(c);
    int64_t ready = round_up(ready_bytes(c, ops, &a), 256); /* work: work, ready, products */
    if (ready > 0)
        a.ready = tensor_1d(NULL, DT_U8, ready);
    int64_t first = ops->mhc_boundary_bwd_work ? ops->mhc_boundary_bwd_work(&a) : 0;
    int64_t second = ops->mhc_boundary_dw_work ? ops->mhc_boundary_dw_work(&p) : 0;
    c->t[c->desc->n_args - 1] = tensor_1d(NULL, DT_U8, round_up(max_i64(first, second), 256) + ready + tensor_bytes(&a.products));
    return ST_OK;
}

static int mhc_boundary_bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct mhc_boundary_bwd_args a = mhc_boundary_bwd_pack(c);
    struct mhc_boundary_dw_args p = params_pack(c);
    if (FLAG(products)) { /* at the end of work */
        a.work.dim[0] -= tensor_bytes(&a.products);
        a.products.data = (char *)a.work.data + a.work.dim[0];
        p.products = a.products;
        p.work = a.work;
    }
    int64_t ready = round_up(ready_bytes(c, ops, &a), 256);
    if (ready > 0) {
        a.work.dim[0] -= ready;
        a.ready = tensor_1d((char *)a.work.data + a.work.dim[0], DT_U8, ready);
        p.work = a.work;
        TRY(ops->mhc_boundary_ready(lane, &a));
    }
    TRY(ops->mhc_boundary_bwd(lane, &a));
    return ops->mhc_boundary_dw(lane, &p);
}

static void mhc_boundary_bwd_cost(const struct op_call *c, struct op_cost *out)
{
    mhc_cost(c, 2 * mapping_flops(c) + 6 * streams_of(c) + 14, out);
}

static const struct op_arg mhc_boundary_dw_arg_list[] = {WIN(dz), WIN(stat), IN(y), WIN(a_pre), WIN(a_post), WIN(a_res), WOUT(dw), WOUT(da_pre), WOUT(da_post), WOUT(da_res), WOUT(dbeta), WORK};
static const struct op_attr mhc_boundary_dw_attrs[] = {MHC_RULE_ATTRS, {.name = "acc_dw", .value = 0}};
static struct mhc_boundary_dw_args mhc_boundary_dw_pack(const struct op_call *c)
{
    struct mhc_boundary_dw_args a = params_pack(c);
    a.y = T(y);
    return a;
}
MHC_FUNCTIONS(mhc_boundary_dw, "NSKsssWsssb.", mapping_flops(c))
MHC_INFER_WORK(mhc_boundary_dw, "NSKsssWsssb.")

/* ---- health --------------------------------------------------------------------------------------------------- */

#define HEALTH(role_, n) {.name = #n, .role = role_, .type = ARG_F64}
#define HEALTH_OF(role_, k) HEALTH(role_, row_error##k), HEALTH(role_, column_error##k), HEALTH(role_, gain_forward##k), HEALTH(role_, gain_backward##k), HEALTH(role_, similarity##k)
#define FOUND(k) {T(row_error##k), T(column_error##k), T(gain_forward##k), T(gain_backward##k), T(similarity##k)}
/* As many mixes as are given. */
static const struct op_arg mhc_health_arg_list[] = {WIN(coef), IN(y), WOPT(coef2), OPT(y2), WOPT(coef3), OPT(y3), WOPT(comp_in), WOUT(comp),
                                                    HEALTH_OF(ARG_OUT, ), HEALTH_OF(ARG_OOUT, 2), HEALTH_OF(ARG_OOUT, 3), WORK};
static const struct op_attr mhc_health_attrs[] = {MHC_RULE_ATTRS, {.name = "acc_out", .value = 0}};
static struct mhc_health_args mhc_health_pack(const struct op_call *c)
{
    int layers = T(coef2).rank == 0 ? 1 : T(coef3).rank == 0 ? 2 : 3;
    return (struct mhc_health_args){.layer = {{T(coef), T(y), FOUND()}, {T(coef2), T(y2), FOUND(2)}, {T(coef3), T(y3), FOUND(3)}}, .layers = layers,
                                    .comp_in = T(comp_in), .comp = T(comp), .work = T(work), .rule = mhc_pack_rule(c), .acc_out = FLAG(acc_out)};
}
MHC_FUNCTIONS(mhc_health, "NKNKNKhhsssssssssssssss.", 1)
MHC_INFER_WORK(mhc_health, "NKNKNKhhsssssssssssssss.")
#define NO_MIX(k) "no_coef" #k "=1 no_y" #k "=1 no_row_error" #k "=1 no_column_error" #k "=1 no_gain_forward" #k "=1 no_gain_backward" #k "=1 no_similarity" #k "=1"
#define ONE_MIX NO_MIX(2) " " NO_MIX(3)
#define TWO_MIXES NO_MIX(3)

/* ---- samples ---------------------------------------------------------------------------------------------------- */

#define OPEN_ONLY "no_f=1 no_bias=1 no_coef_in=1 no_y=1 no_dy=1 no_df=1 no_dcoef_in=1 no_dbias=1"
#define ENTERS "enters=1 no_f=1 no_bias=1 no_coef_in=1 no_df=1 no_dcoef_in=1 no_dbias=1"
static const struct op_sample samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=7 d=16 streams=2 profile=1 no_bias=1 no_dbias=1"},
    {"rows=17 d=33 streams=3 iterations=1"},
    {"rows=33 d=20 streams=8 zero_centered=1"},
    {"rows=18 d=13 streams=8 profile=1 no_gain=1 no_dgain=1 p=0.25"},
    {"rows=66 d=64 p=0.25 seq=5 no_bias=1 no_dbias=1"},
    {"rows=70 d=67 streams=3 p=0.5 seq=3 profile=1"},
    {"rows=13 d=130 p=0.1 strided=1"},
    {"rows=35 d=24 profile=1 strided=1"},
    {"rows=6 d=10 streams=5"},
    {"rows=19 d=33 " OPEN_ONLY},
    {"rows=19 d=33 streams=3 profile=1 strided=1 " OPEN_ONLY},
    /* more rows than a block of the backward kernels takes; aligned rows of one, and of more than one vector a thread */
    {"rows=2100 d=8 no_bias=1 no_dbias=1"},
    {"rows=37 d=2056 p=0.1 seq=7"},
    {"rows=9 d=64"},
    {"rows=70 d=128 no_bias=1 no_dbias=1 p=0.1 seq=7"},
    {"rows=531 d=192 profile=1 no_bias=1 no_dbias=1"},
    {"rows=259 d=64 no_bias=1 no_dbias=1 strided=1"},
    {"rows=5 d=64 streams=16 iterations=2"},
    {"rows=21 d=40 " OPEN_ONLY},
    {"rows=19 d=33 eps=0.5 " ENTERS},
    {"rows=0 d=8 " ENTERS},
    {"rows=23 d=20 streams=3 profile=1 strided=1 zero_centered=1 eps=0.5 " ENTERS},
    {"rows=70 d=72 eps=0.5 " ENTERS},
    {"rows=530 d=2056 gpu=1 " ENTERS},
    {"rows=37 d=256 profile=1 no_gain=1 no_dgain=1 gpu=1 " ENTERS},
    /* the single pass: one block a cluster, and more; parts of a tile; several tiles a group of warps */
    {"rows=37 d=256 gpu=1"},
    {"rows=16 d=512 profile=1 zero_centered=1 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=9 d=1024 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 p=0.1 seq=7 gpu=1"},
    {"rows=4200 d=256 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=600 d=2048 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=150 d=4096 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=20 d=7168 no_bias=1 no_dbias=1 gpu=1"},
    /* one pass of clusters of 1 to 16 blocks: no whole tile, one token more and less than one, tiles for several rounds of the ring */
    {"rows=17 d=256 gpu=1 single_pass=1"},
    {"rows=1 d=256 no_bias=1 no_dbias=1 gpu=1 single_pass=1"},
    {"rows=15 d=512 profile=1 zero_centered=1 no_bias=1 no_dbias=1 gpu=1 single_pass=1"},
    {"rows=16 d=768 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 p=0.1 seq=7 gpu=1 single_pass=1"},
    {"rows=37 d=1024 p=0.25 seq=5 gpu=1 single_pass=1"},
    {"rows=600 d=2048 no_bias=1 no_dbias=1 gpu=1 single_pass=1"},
    {"rows=150 d=4096 no_bias=1 no_dbias=1 gpu=1 single_pass=1"},
    {"rows=21000 d=256 no_bias=1 no_dbias=1 gpu=1 single_pass=1"},
    {"rows=100 d=512 no_bias=1 no_dbias=1 gpu=1 single_pass=1"}, /* on few multiprocessors (check_ops --sms=2) */
    /* the same pass in lines of blocks that exchange nothing */
    {"rows=17 d=512 profile=1 p=0.25 seq=5 gpu=1 ring=1"},
    {"rows=530 d=7168 no_bias=1 no_dbias=1 gpu=1 ring=1"},
    {"rows=100 d=512 no_bias=1 no_dbias=1 p=0.25 seq=5 gpu=1 ring=1"},
    /* backward only */
    {"rows=130 d=20 acc_dgain=1 acc_dbias=1 acc_dw=1"},
    {"rows=35 d=33 no_dcoef=1"},
    {"rows=35 d=33 no_dy=1 no_gain=1 no_dgain=1 acc_dw=1 strided=1"},
    {"rows=0 d=8 acc_dgain=1 acc_dbias=1"},
    {"rows=35 d=64 no_dy=1 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 no_dcoef=1"},
    /* products left for dw: tiles for several rounds of the rings; what may be absent; many iterations; ways that make them apart, or not at all */
    {"rows=1030 d=2048 no_bias=1 no_dbias=1 gpu=1 products=1"},
    {"rows=21 d=1024 profile=1 no_bias=1 no_dbias=1 p=0.25 seq=5 acc_dgain=1 acc_dw=1 gpu=1 products=1"},
    {"rows=35 d=256 no_dy=1 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 no_dcoef=1 gpu=1 products=1"},
    {"rows=300 d=256 iterations=40 profile=1 zero_centered=1 no_bias=1 no_dbias=1 gpu=1 products=1"},
    {"rows=33 d=64 no_bias=1 no_dbias=1 products=1"},
    {"rows=300 d=256 acc_dgain=1 acc_dw=1 gpu=1 products=1 " ENTERS},
    {"rows=35 d=24 no_dy=1 no_dcoef=1 products=1 " ENTERS},
    {"rows=19 d=33 streams=3 profile=1 strided=1 products=1 " OPEN_ONLY},
    /* the way back through Sinkhorn made before: with products and without, where it cannot be, and where it then is not used */
    {"rows=300 d=512 acc_dgain=1 acc_dw=1 no_bias=1 no_dbias=1 gpu=1 products=1 ready=1"},
    {"rows=67 d=256 profile=1 no_bias=1 no_dbias=1 no_dcoef=1 gpu=1 ready=1"},
    {"rows=33 d=64 no_bias=1 no_dbias=1 ready=1"},
    {"rows=33 d=256 no_bias=1 no_dbias=1 strided=1 gpu=1 products=1 ready=1"},
};
enum { BACKWARD_ONLY = 17 };
static const struct op_sample dw_samples[] = {
    {"rows=5 d=9"}, {"rows=0 d=8"}, {"rows=0 d=8 acc_dw=1"}, {"rows=401 d=33 streams=3 acc_dw=1"}, {"rows=193 d=20 streams=8 strided=1"}};
static const struct op_sample health_samples[] = {
    {"rows=5 d=9 " ONE_MIX}, {"rows=0 d=8 acc_out=1 " ONE_MIX}, {"rows=200 d=8 streams=3 profile=1 no_comp_in=1"}, {"rows=64 d=5 streams=8 acc_out=1 " TWO_MIXES},
    {"rows=130 d=264"}, {"rows=130 d=264 acc_out=1 no_comp_in=1 " ONE_MIX}};
static const struct op_sample bench[] = {
    {"rows=1536 d=192 no_bias=1 no_dbias=1"}, {"rows=4096 d=320 no_bias=1 no_dbias=1"}, {"rows=2048 d=2048 no_bias=1 no_dbias=1"},
    {"rows=16384 d=2048 no_bias=1 no_dbias=1 gpu=1"}, {"rows=8192 d=4096 no_bias=1 no_dbias=1 gpu=1"}};
static const struct op_sample small_bench[] = {{"rows=1536 d=192"}, {"rows=4096 d=320"}, {"rows=16384 d=2048 gpu=1"}};

/* In bf16 the stream is rounded before it is projected: 2e-3 of p, and more of coefficients with large logits (sqrt(K)). */
MHC_DESC_ROUNDED(mhc_boundary_fwd, "mHC between two sublayers: combine, mapping, aggregate, norm", "mhc_boundary_bwd", 2e-5, 1e-2, samples,
                 countof(samples) - BACKWARD_ONLY, bench);
/* In bf16 the projection's share of the stream's gradient may be rounded before it is added; sums of it partly cancel. */
MHC_DESC_ROUNDED(mhc_boundary_bwd, "gradients of mhc_boundary_fwd, those of its parameters included", NULL, 5e-5, 4e-3, samples,
                 countof(samples), bench);
MHC_DESC(mhc_boundary_dw, "gradients of the mapping's parameters", NULL, 1e-5, dw_samples, countof(dw_samples), small_bench);
MHC_DESC(mhc_health, "row and column sums, gain and stream similarity of a mix", NULL, 1e-5, health_samples, countof(health_samples), small_bench);
