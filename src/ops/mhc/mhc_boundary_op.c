/* Argument checks, descriptors, test samples and bench shapes of the mhc boundary; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"

#include <math.h>

#define T(name) (*mhc_arg(c, #name))
#define FLAG(name) (op_attr(c, #name) != 0)
static double mapping_flops(const struct op_call *c) { return 2 * mhc_streams(c) * (mhc_streams(c) + 2); }

/* ---- checks ---------------------------------------------------------------------------------- */

int mhc_boundary_fwd_check(const struct mhc_boundary_fwd_args *a, struct err *e)
{
    const char *op = "mhc_boundary_fwd";
    TRY(mhc_rule_check(op, &a->rule, e));
    bool closes = present(&a->f), enters = mhc_is_first_fwd(a);
    int64_t n = a->rule.streams, k = (enters ? n : 1) * a->x.dim[1];
    TRY(mhc_width_check(op, k, n, e));
    TRY(op_check_fields(&mhc_boundary_fwd_desc, a, e));
    TRY(mhc_refuse_if(op, closes && !present(&a->y), "tensor y is missing, f is given", e));
    TRY(mhc_refuse_if(op, enters && a->reuse, "nothing can be reused where a stream enters", e));
    TRY(mhc_refuse_if(op, !a->reuse && (!present(&a->h) || !present(&a->w)), "h or w is missing", e));
    struct tensor like = present(&a->f) ? a->f : present(&a->h) ? a->h : a->x;
    TRY(mhc_refuse_if(op, (closes || present(&a->h)) && k != n * like.dim[1],
                      "x has not as many channels as the streams, or as one that enters", e));
    return closes ? mhc_drop_check(op, &a->drop, &a->x, e) : ST_OK;
}

int mhc_boundary_bwd_check(const struct mhc_boundary_bwd_args *a, struct err *e)
{
    const char *op = "mhc_boundary_bwd";
    TRY(mhc_rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams, rows = a->dh.dim[0], width = (mhc_is_first_bwd(a) ? 1 : n) * a->dh.dim[1];
    TRY(mhc_width_check(op, a->y.dim[1], n, e));
    TRY(op_check_fields(&mhc_boundary_bwd_desc, a, e));
    CHECK_T(op, "dx", &a->dx, a->dh.dtype, 2, rows, width);
    CHECK_OPT(op, "x", &a->x, a->dh.dtype, 2, rows, width);
    CHECK_OPT(op, "ready", &a->ready, DT_U8, 1, -1);
    return present(&a->f) ? mhc_drop_check(op, &a->drop, &a->dx, e) : ST_OK;
}

int mhc_boundary_prepare_check(const struct mhc_boundary_bwd_args *a, struct err *e)
{
    TRY(mhc_rule_check("mhc_boundary_prepare", &a->rule, e));
    TRY(mhc_width_check("mhc_boundary_prepare", a->dx.dim[1], a->rule.streams, e));
    TRY(op_check_fields(&mhc_boundary_prepare_desc, a, e));
    CHECK_T("mhc_boundary_prepare", "ready", &a->ready, DT_U8, 1, -1);
    return ST_OK;
}

int mhc_boundary_dw_check(const struct mhc_boundary_dw_args *a, struct err *e)
{
    TRY(mhc_rule_check("mhc_boundary_dw", &a->rule, e));
    return op_check_fields(&mhc_boundary_dw_desc, a, e);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* One stream enters instead of all: x has its width. */
static void x_shape(struct op_call *c)
{
    struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    if (x->rank > 0)
        *x = tensor_2d(NULL, DT_NONE, (int64_t)op_dim(c, "rows"),
                       (int64_t)(op_dim(c, "d") * (FLAG(enters) ? 1 : mhc_streams(c))));
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(mhc_infer(c, ops, e));
    if (T(f).rank == 0 && !FLAG(enters))
        c->t[op_arg_index(c->desc, "y")] = (struct tensor){0};
    return ST_OK;
}

#define FWD_ATTRS(op) MHC_BOUNDARY(op) OP_ATTR_EXTRA("enters", 0)
MHC_RULED(mhc_boundary_fwd, MHC_BOUNDARY_FWD_FIELDS, DROPOUT_INFO, FWD_ATTRS, mapping_flops(c) + 2 * mhc_streams(c) + 8)

/* The norm again, from a stream and what was kept of it: mhc_boundary_fwd with reuse, as the planner sees it. */
#define AGAIN_FIELDS(op)                                                                                               \
    OP_FIELD_IN(op, "x", x, IN, REAL, "rows streams*d")                                                                \
    OP_FIELD_IN(op, "coef", coef, IN, WIDE, "rows logits")                                                             \
    OP_FIELD_IN(op, "gain", gain, OPT, WIDE, "d")                                                                      \
    OP_FIELD_IN(op, "stat", stat, FIXED, WIDE, "rows logits+2")                                                        \
    OP_FIELD_IN(op, "h", h, OUT, REAL, "rows d")                                                                       \
    OP_FIELD_IN(op, "work", work, WORK, U8, "")
static const struct op_arg mhc_boundary_again_fields[] = {AGAIN_FIELDS(mhc_boundary_fwd)};
static void again(const struct op_call *c, void *args)
{
    (void)c;
    ((struct mhc_boundary_fwd_args *)args)->reuse = true;
}
static void again_cost(const struct op_call *c, struct op_cost *out) { mhc_cost(c, 3, out); }
/* The norm's 1 / rms is that of the weighted streams: a device may read it instead of summing. */
static bool again_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (!op_arg_is(c, arg, "stat"))
        return mhc_sample_fill(c, arg, host, key);
    int64_t n = (int64_t)mhc_streams(c), k = T(x).dim[1], d = k / n, logits = T(coef).dim[1], cols = host->dim[1];
    for (int64_t r = 0; r < host->dim[0]; r++) {
        double square = 0;
        for (int64_t at = 0; at < d; at++) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++)
                sum += tensor_get(&T(coef), r * logits + i) * tensor_get(&T(x), r * k + i * d + at);
            square += sum * sum;
        }
        for (int64_t i = 0; i < cols; i++)
            tensor_set(host, r * cols + i, i < cols - 1 ? 0 : 1 / sqrt(square / (double)d + op_attr(c, "eps")));
    }
    return true;
}

/* ---- backward: both halves, so that gradcheck sees every gradient ---------------------------- */

/* The stream is x itself where nothing closed and nothing entered. */
static void bwd_stream(const struct op_call *c, void *args)
{
    struct mhc_boundary_bwd_args *a = args;
    if (T(f).rank == 0 && !FLAG(enters)) {
        a->y = T(x);
        a->x = (struct tensor){0};
    }
}

static struct mhc_boundary_dw_args dw_args(const struct op_call *c, const struct mhc_boundary_bwd_args *a)
{
    bool acc = FLAG(acc_params);
    return (struct mhc_boundary_dw_args){.dz = a->dz,
                                         .stat = a->stat,
                                         .y = a->y,
                                         .products = a->products,
                                         .a_pre = a->a_pre,
                                         .a_post = a->a_post,
                                         .a_res = a->a_res,
                                         .dw = T(dw),
                                         .da_pre = T(da_pre),
                                         .da_post = T(da_post),
                                         .da_res = T(da_res),
                                         .dbeta = T(dbeta),
                                         .work = a->work,
                                         .rule = a->rule,
                                         .acc_dw = acc,
                                         .acc_da_pre = acc,
                                         .acc_da_post = acc,
                                         .acc_da_res = acc,
                                         .acc_dbeta = acc};
}

/* The parts of work: scratch of both, ready, products. Sets the last two; returns the bytes of all. */
static int64_t divide_work(const struct op_call *c, const struct ops *ops, struct mhc_boundary_bwd_args *a)
{
    struct mhc_boundary_dw_args p = dw_args(c, a);
    int64_t ready =
        FLAG(ready) && ops->mhc_boundary_prepare_bytes != NULL ? round_up(ops->mhc_boundary_prepare_bytes(a), 256) : 0;
    if (FLAG(products))
        a->products = tensor_2d(NULL, T(dw).dtype, T(dw).dim[0] + 1, T(dw).dim[1]);
    if (ready > 0)
        a->ready = tensor_1d(NULL, DT_U8, ready);
    int64_t first = ops->mhc_boundary_bwd_work ? ops->mhc_boundary_bwd_work(a) : 0;
    int64_t second = ops->mhc_boundary_dw_work ? ops->mhc_boundary_dw_work(&p) : 0,
            scratch = round_up(max_i64(first, second), 256);
    if (a->work.data != NULL) {
        a->ready.data = ready > 0 ? (char *)a->work.data + scratch : NULL;
        a->products.data = FLAG(products) ? (char *)a->work.data + scratch + ready : NULL;
        a->work.dim[0] = scratch;
    }
    return scratch + ready + tensor_bytes(&a->products);
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(mhc_infer(c, ops, e));
    c->t[op_arg_index(c->desc, "products")] = (struct tensor){0}; /* in work, where asked for */
    struct tensor *dx = &c->t[op_arg_index(c->desc, "dx")];
    *dx = tensor_2d(NULL, ops->real, T(dh).dim[0], T(dh).dim[1] * (FLAG(enters) ? 1 : (int64_t)mhc_streams(c)));
    struct op_packed packed;
    op_call_pack(c, &packed);
    struct mhc_boundary_bwd_args *a = (struct mhc_boundary_bwd_args *)(void *)packed.bytes;
    c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, divide_work(c, ops, a));
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct op_packed packed;
    op_call_pack(c, &packed);
    struct mhc_boundary_bwd_args *a = (struct mhc_boundary_bwd_args *)(void *)packed.bytes;
    divide_work(c, ops, a);
    struct mhc_boundary_dw_args p = dw_args(c, a);
    if (present(&a->ready))
        TRY(ops->mhc_boundary_prepare(lane, a));
    TRY(ops->mhc_boundary_bwd(lane, a));
    return ops->mhc_boundary_dw(lane, &p);
}

#define BWD_FIELDS(op)                                                                                                 \
    DROPOUT_INFO(op)                                                                                                   \
    OP_EXTRA("dw", OUT, WIDE, "logits streams*d")                                                                      \
    OP_EXTRA("da_pre", OUT, WIDE, "1")                                                                                 \
    OP_EXTRA("da_post", OUT, WIDE, "1") OP_EXTRA("da_res", OUT, WIDE, "1") OP_EXTRA("dbeta", OUT, WIDE, "logits")
#define BWD_ATTRS(op)                                                                                                  \
    MHC_BOUNDARY(op)                                                                                                   \
    OP_ATTR_EXTRA("acc_params", 0) OP_ATTR_EXTRA("products", 0) OP_ATTR_EXTRA("ready", 0) OP_ATTR_EXTRA("enters", 0)
MHC_RULED(mhc_boundary_bwd, MHC_BOUNDARY_BWD_FIELDS, BWD_FIELDS, BWD_ATTRS,
          2 * mapping_flops(c) + 6 * mhc_streams(c) + 14)
MHC_RULED(mhc_boundary_dw, MHC_BOUNDARY_DW_FIELDS, MHC_NONE, MHC_RULE, mapping_flops(c))

/* products come from the backward half only. */
static int dw_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    c->t[op_arg_index(c->desc, "products")] = (struct tensor){0};
    return mhc_infer(c, ops, e);
}

/* ---- samples --------------------------------------------------------------------------------- */

#define ACC_ALL "acc_dw=1 acc_da_pre=1 acc_da_post=1 acc_da_res=1 acc_dbeta=1"
#define OPEN_ONLY "no_f=1 no_bias=1 no_coef_in=1 no_y=1 no_dy=1 no_df=1 no_dcoef_in=1 no_dbias=1"
#define ENTERS "enters=1 no_f=1 no_bias=1 no_coef_in=1 no_df=1 no_dcoef_in=1 no_dbias=1"
static const struct op_sample samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=7 d=16 streams=2 profile=1 no_bias=1 no_dbias=1"},
    /* epsilon inside the root: on every path of kernels */
    {"rows=7 d=16 root_eps=0.25"},
    {"rows=19 d=33 streams=3 root_eps=0.25 " OPEN_ONLY},
    {"rows=23 d=20 root_eps=0.25 " ENTERS},
    {"rows=37 d=512 root_eps=0.25 no_bias=1 no_dbias=1 gpu=1 products=1"},
    {"rows=37 d=4352 root_eps=0.25 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=17 d=33 streams=3 iterations=1"},
    {"rows=33 d=20 streams=8 zero_centered=1"},
    {"rows=18 d=13 streams=8 profile=1 no_gain=1 no_dgain=1 p=0.25"},
    {"rows=66 d=64 p=0.25 seq=5 no_bias=1 no_dbias=1"},
    {"rows=66 d=64 p=0.25 seq=5 first=33 no_bias=1 no_dbias=1"},
    {"rows=70 d=67 streams=3 p=0.5 seq=3 profile=1"},
    {"rows=15 d=130 p=0.1 strided=1"},
    {"rows=35 d=24 profile=1 strided=1"},
    {"rows=6 d=10 streams=5"},
    {"rows=19 d=33 " OPEN_ONLY},
    {"rows=19 d=33 streams=3 profile=1 strided=1 " OPEN_ONLY},
    /* more rows than a block of the backward kernels takes; aligned rows of one, and of more than one vector a thread
     * */
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
    /* one pass of clusters of 1 to 16 blocks: no whole tile, one token more and less than one, tiles for several rounds
     * of the ring */
    {"rows=17 d=256 gpu=1"},
    {"rows=1 d=256 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=15 d=512 profile=1 zero_centered=1 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=16 d=768 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 p=0.1 seq=7 gpu=1"},
    {"rows=37 d=1024 p=0.25 seq=5 gpu=1"},
    {"rows=21000 d=256 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=100 d=512 no_bias=1 no_dbias=1 gpu=1"}, /* on few multiprocessors (check_ops --sms=2) */
    /* the same pass in lines of blocks that exchange nothing */
    {"rows=17 d=4352 p=0.25 seq=5 gpu=1"},
    {"rows=530 d=7168 no_bias=1 no_dbias=1 gpu=1"},
    {"rows=100 d=4352 no_bias=1 no_dbias=1 p=0.25 seq=5 gpu=1"},
    /* backward only */
    {"rows=130 d=20 acc_dgain=1 acc_dbias=1 acc_params=1"},
    {"rows=35 d=33 no_dcoef=1"},
    {"rows=35 d=33 no_dy=1 no_gain=1 no_dgain=1 acc_params=1 strided=1"},
    {"rows=0 d=8 acc_dgain=1 acc_dbias=1"},
    {"rows=35 d=64 no_dy=1 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 no_dcoef=1"},
    /* products left for dw: tiles for several rounds of the rings; what may be absent; many iterations; ways that make
     * them apart, or not at all */
    {"rows=1030 d=2048 no_bias=1 no_dbias=1 gpu=1 products=1"},
    {"rows=21 d=1024 profile=1 no_bias=1 no_dbias=1 p=0.25 seq=5 acc_dgain=1 acc_params=1 gpu=1 products=1"},
    {"rows=35 d=256 no_dy=1 no_gain=1 no_dgain=1 no_bias=1 no_dbias=1 no_dcoef=1 gpu=1 products=1"},
    {"rows=300 d=256 iterations=40 profile=1 zero_centered=1 no_bias=1 no_dbias=1 gpu=1 products=1"},
    {"rows=33 d=64 no_bias=1 no_dbias=1 products=1"},
    {"rows=300 d=256 acc_dgain=1 acc_params=1 gpu=1 products=1 " ENTERS},
    {"rows=35 d=24 no_dy=1 no_dcoef=1 products=1 " ENTERS},
    {"rows=19 d=33 streams=3 profile=1 strided=1 products=1 " OPEN_ONLY},
    /* the backward pass through Sinkhorn made before: with products and without, where it cannot be, and where it then
     * is not used */
    {"rows=300 d=512 acc_dgain=1 acc_params=1 no_bias=1 no_dbias=1 gpu=1 products=1 ready=1"},
    {"rows=67 d=256 profile=1 no_bias=1 no_dbias=1 no_dcoef=1 gpu=1 ready=1"},
    {"rows=33 d=64 no_bias=1 no_dbias=1 ready=1"},
    {"rows=33 d=256 no_bias=1 no_dbias=1 strided=1 gpu=1 products=1 ready=1"},
};
enum { BACKWARD_ONLY = 17 };
static const struct op_sample dw_samples[] = {{"rows=5 d=9"},
                                              {"rows=0 d=8"},
                                              {"rows=0 d=8 " ACC_ALL},
                                              {"rows=401 d=33 streams=3 " ACC_ALL},
                                              {"rows=193 d=20 streams=8 strided=1"}};
static const struct op_sample bench[] = {{"rows=1536 d=192 no_bias=1 no_dbias=1"},
                                         {"rows=4096 d=320 no_bias=1 no_dbias=1"},
                                         {"rows=2048 d=2048 no_bias=1 no_dbias=1"},
                                         {"rows=16384 d=2048 no_bias=1 no_dbias=1 gpu=1"},
                                         {"rows=8192 d=4096 no_bias=1 no_dbias=1 gpu=1"}};
static const struct op_sample small_bench[] = {{"rows=1536 d=192"}, {"rows=4096 d=320"}, {"rows=16384 d=2048 gpu=1"}};
static const struct op_sample again_samples[] = {{"rows=5 d=9"},
                                                 {"rows=0 d=8"},
                                                 {"rows=17 d=33 streams=3 no_gain=1"},
                                                 {"rows=35 d=24 strided=1 zero_centered=1"},
                                                 {"rows=70 d=64 eps=0.5"},
                                                 {"rows=9 d=2056"},
                                                 {"rows=600 d=2048 gpu=1"}};

/* In bf16 the stream is rounded before it is projected: 2e-3 of p, and more of coefficients with large logits
 * (sqrt(K)):
 * 1.04e-2 was seen at 4352 channels, as much as of the separate kernels. */
const struct op_desc mhc_boundary_fwd_desc = {
    OP_IS(mhc_boundary_fwd),
    MHC_ALL(mhc_boundary_fwd, "mHC between two sublayers: combine, mapping, aggregate, norm"),
    .number = mhc_boundary_fwd_number,
    .sample_shapes = x_shape,
    .infer = fwd_infer,
    .backward = "mhc_boundary_bwd",
    .tolerance = 2e-5,
    .narrow = 1.5e-2,
    .samples = samples,
    .n_samples = countof(samples) - BACKWARD_ONLY,
    OP_LIST(bench, bench)};
const struct op_desc mhc_boundary_again_desc = {OP_NAMED("mhc_boundary_again", mhc_boundary_again, mhc_boundary_fwd),
                                                .summary = "the norm behind an mHC boundary recomputed from its stream",
                                                .cost = again_cost,
                                                .sample_fill = again_fill,
                                                OP_LIST(dims, mhc_dims),
                                                .number = mhc_boundary_fwd_number,
                                                .prepare = again,
                                                .infer = mhc_infer,
                                                .tolerance = 1e-5,
                                                OP_LIST(samples, again_samples),
                                                OP_LIST(bench, small_bench)};
/* In bf16 the projection's share of the stream's gradient may be rounded before it is added; sums
 * of it partly cancel. */
const struct op_desc mhc_boundary_bwd_desc = {
    OP_IS(mhc_boundary_bwd),
    MHC_ALL(mhc_boundary_bwd, "gradients of mhc_boundary_fwd, those of its parameters included"),
    .number = mhc_boundary_bwd_number,
    .sample_shapes = x_shape,
    .prepare = bwd_stream,
    .infer = bwd_infer,
    .run = bwd_run,
    .tolerance = 5e-5,
    .narrow = 4e-3,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench)};
const struct op_desc mhc_boundary_dw_desc = {OP_IS(mhc_boundary_dw),
                                             MHC_ALL(mhc_boundary_dw, "gradients of the mapping's parameters"),
                                             .number = mhc_boundary_dw_number,
                                             .infer = dw_infer,
                                             .tolerance = 1e-5,
                                             OP_LIST(samples, dw_samples),
                                             OP_LIST(bench, small_bench)};

/* The ready part, for the planner alone: no host has it, and samples of the backward half run it. */
#define PREPARE_FIELDS(op)                                                                                             \
    OP_FIELD_IN(op, "dcoef", dcoef, OPT, WIDE, "rows logits")                                                          \
    OP_FIELD_IN(op, "stat", stat, IN, WIDE, "rows logits+2")                                                           \
    OP_FIELD_IN(op, "coef", coef, IN, WIDE, "rows logits")                                                             \
    OP_FIELD_IN(op, "w", w, IN, WIDE, "logits streams*d")                                                              \
    OP_FIELD_IN(op, "a_pre", a_pre, IN, WIDE, "1")                                                                     \
    OP_FIELD_IN(op, "a_post", a_post, IN, WIDE, "1")                                                                   \
    OP_FIELD_IN(op, "a_res", a_res, IN, WIDE, "1")                                                                     \
    OP_FIELD_IN(op, "beta", beta, IN, WIDE, "logits")                                                                  \
    OP_FIELD_IN(op, "ready", ready, OUT, U8, "")
static const struct op_arg mhc_boundary_prepare_fields[] = {PREPARE_FIELDS(mhc_boundary_bwd)};
static int ready_check(const void *a, struct err *e) { return mhc_boundary_prepare_check(a, e); }
static bool ready_there(const struct ops *o) { return o->mhc_boundary_prepare != NULL; }
static int ready_call(const struct ops *o, struct lane *l, const void *a) { return o->mhc_boundary_prepare(l, a); }
static int64_t ready_work(const struct ops *o, const void *a) { return (void)o, (void)a, 0; }
const struct op_desc mhc_boundary_prepare_desc = {.name = "mhc_boundary_prepare",
                                                  OP_LIST(args, mhc_boundary_prepare_fields),
                                                  .attrs = mhc_boundary_bwd_attrs,
                                                  .n_attrs = countof(mhc_boundary_bwd_attrs) - 1,
                                                  .args_bytes = sizeof(struct mhc_boundary_bwd_args),
                                                  .check = ready_check,
                                                  .there = ready_there,
                                                  .call = ready_call,
                                                  .work_bytes = ready_work,
                                                  .number = mhc_boundary_bwd_number};
