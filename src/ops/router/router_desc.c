/* router: descriptors, test samples and bench shapes; see router.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/router/router.h"
#include "ops/router/router_int.h"

static const struct op_dim dims[] = {{"rows", 12}, {"experts", 8}, {"bias", 0}, {"hashed", 0}};
enum { D_ROWS, D_E, D_BIAS, D_HASHED };
enum { VOCAB = 11 };

/* The first attributes are those of the rule, for both directions. */
enum {
    A_K,
    A_SCORE,
    A_PRE,
    A_NORM,
    A_GROUPS,
    A_GROUP_TOPK,
    A_SCALE,
    A_CAPACITY,
    A_LATE,
    A_AUX,
    A_SEQ_AUX,
    A_GLOBAL_AUX,
    A_Z,
    A_SEQ,
    A_ACC_STAT,
    A_ACC_TALLY,
    A_ACC_GLOBAL,
    A_HASHED = A_ACC_STAT
};
#define RULE_ATTRS                                                                                 \
    {.name = "k", .value = 2}, {.name = "score", .value = 0}, {.name = "pre_softmax", .value = 0}, {.name = "norm", .value = 1}, {.name = "groups", .value = 0}, {.name = "group_topk", .value = 0},     \
        {.name = "scale", .value = 1}, {.name = "capacity", .value = 0}, {.name = "drop_late", .value = 0}, {.name = "aux", .value = 0}, {.name = "seq_aux", .value = 0},               \
        {.name = "global_aux", .value = 0}, {.name = "z", .value = 0},                                                               \
    {.name = "seq", .value = 4}
static const struct op_attr fwd_attrs[] = {
    RULE_ATTRS, {.name = "acc_stat", .value = 0}, {.name = "acc_tally", .value = 0}, {.name = "acc_global", .value = 0}};
static const struct op_attr bwd_attrs[] = {RULE_ATTRS, {.name = "hashed", .value = 0}};

static struct router_rule rule_of(const struct op_call *c)
{
    const double *a = c->attr;
    return (struct router_rule){.score = (enum router_score)a[A_SCORE],
                                .pre_softmax = a[A_PRE] != 0,
                                .norm = a[A_NORM] != 0,
                                .groups = (int64_t)a[A_GROUPS],
                                .group_topk = (int64_t)a[A_GROUP_TOPK],
                                .scale = a[A_SCALE],
                                .capacity = a[A_CAPACITY],
                                .drop_late = a[A_LATE] != 0,
                                .coef = {a[A_AUX], a[A_SEQ_AUX], a[A_GLOBAL_AUX], a[A_Z]},
                                .seq = (int64_t)a[A_SEQ]};
}

/* A different order of E well separated values for each row, so that neither rounding nor the steps
 * of gradcheck change which are the largest. */
static void fill_logits(struct tensor *t, uint64_t key)
{
    int64_t n = t->dim[1];
    for (int64_t r = 0; r < t->dim[0]; r++) {
        int64_t order[ROUTER_MAX_EXPERTS];
        for (int64_t e = 0; e < n; e++)
            order[e] = e;
        for (int64_t e = n - 1; e > 0; e--) {
            int64_t other = (int64_t)rng_below(key, (uint64_t)(r * n + e), (uint64_t)e + 1),
                    swap = order[e];
            order[e] = order[other];
            order[other] = swap;
        }
        for (int64_t e = 0; e < n; e++) {
            double noise = 0.8 * (rng_uniform(key + 1, (uint64_t)(r * n + e)) - 0.5);
            tensor_set(t, r * n + e,
                       (double)(float)(5 * (((double)order[e] + 0.5 + noise) / (double)n - 0.5)));
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

enum {
    F_LOGITS,
    F_BIAS,
    F_TOKEN,
    F_TABLE,
    F_PROBS,
    F_IDX,
    F_LOAD,
    F_LOSS,
    F_STAT,
    F_TALLY,
    F_GLOBAL,
    F_WORK
};
static const struct op_arg fwd_args[] = {
    {.name = "logits", .type = ARG_WIDE},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE, .no_grad = true},
    {.name = "token", .role = ARG_OPT, .type = ARG_I32},
    {.name = "table", .role = ARG_OPT, .type = ARG_I32},
    {.name = "probs", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "idx", .role = ARG_OUT, .type = ARG_I32},
    {.name = "load", .role = ARG_OOUT, .type = ARG_F64},
    {.name = "loss", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "stat", .role = ARG_OOUT, .type = ARG_F64},
    {.name = "tally", .role = ARG_OOUT, .type = ARG_F64},
    {.name = "global", .role = ARG_OOUT, .type = ARG_F64},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};

static void fwd_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[D_ROWS], n = (int64_t)c->dim[D_E];
    c->t[F_LOGITS] = tensor_2d(NULL, DT_NONE, rows, n);
    if (c->dim[D_BIAS] != 0)
        c->t[F_BIAS] = tensor_1d(NULL, DT_NONE, n);
    if (c->dim[D_HASHED] == 1)
        c->t[F_TOKEN] = tensor_1d(NULL, DT_NONE, rows);
    if (c->dim[D_HASHED] != 0) /* 2: a table without tokens, a row for each */
        c->t[F_TABLE] = tensor_2d(NULL, DT_NONE, c->dim[D_HASHED] == 1 ? VOCAB : rows, (int64_t)c->attr[A_K]);
}

static bool fwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int64_t n = c->t[F_LOGITS].dim[1], k = (int64_t)c->attr[A_K];
    if (arg == F_LOGITS)
        fill_logits(host, key);
    for (int64_t i = 0; arg == F_BIAS && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)(float)(0.3 * rng_normal(key, (uint64_t)i)));
    for (int64_t i = 0; arg == F_TOKEN && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)rng_below(key, (uint64_t)i, VOCAB);
    for (int64_t i = 0; arg == F_TABLE && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)((3 * (i / k) + i % k) % n);
    return arg == F_LOGITS || arg == F_BIAS || arg == F_TOKEN || arg == F_TABLE;
}

static struct router_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct router_fwd_args){.logits = c->t[F_LOGITS],
                                    .bias = c->t[F_BIAS],
                                    .token = c->t[F_TOKEN],
                                    .table = c->t[F_TABLE],
                                    .probs = c->t[F_PROBS],
                                    .idx = c->t[F_IDX],
                                    .load = c->t[F_LOAD],
                                    .loss = c->t[F_LOSS],
                                    .stat = c->t[F_STAT],
                                    .tally = c->t[F_TALLY],
                                    .global = c->t[F_GLOBAL],
                                    .work = c->t[F_WORK],
                                    .rule = rule_of(c),
                                    .acc_stat = c->attr[A_ACC_STAT] != 0,
                                    .acc_tally = c->attr[A_ACC_TALLY] != 0,
                                    .acc_global = c->attr[A_ACC_GLOBAL] != 0};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    int64_t rows = c->t[F_LOGITS].dim[0], n = c->t[F_LOGITS].dim[1], k = (int64_t)c->attr[A_K],
            seq = (int64_t)c->attr[A_SEQ];
    if (c->t[F_LOGITS].rank != 2 || seq < 1)
        return err_set(e, ST_INVALID,
                       "router_fwd: logits must have rank 2, and seq must be at least 1");
    c->t[F_PROBS] = tensor_2d(NULL, c->t[F_LOGITS].dtype, rows, k);
    c->t[F_IDX] = tensor_2d(NULL, DT_I32, rows, k);
    c->t[F_LOAD] = tensor_2d(NULL, DT_F64, rows / seq + 1, n);
    c->t[F_LOSS] = tensor_1d(NULL, c->t[F_LOGITS].dtype, 1);
    c->t[F_STAT] = tensor_1d(NULL, DT_F64, ROUTER_STATS);
    c->t[F_TALLY] = tensor_1d(NULL, DT_F64, n);
    c->t[F_GLOBAL] = tensor_1d(NULL, DT_F64, n + 1);
    struct router_fwd_args a = fwd_pack(c);
    c->t[F_WORK] = tensor_1d(NULL, DT_U8, ops->router_fwd_work ? ops->router_fwd_work(&a) : 0);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct router_fwd_args a = fwd_pack(c);
    return ops->router_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_LOGITS]), chosen = (double)tensor_elems(&c->t[F_PROBS]);
    double size = (double)dtype_bytes(c->t[F_LOGITS].dtype);
    *out = (struct op_cost){.flops = 8 * n, .bytes = n * size + chosen * (size + 4)};
}

/* ---- backward -------------------------------------------------------------------------------- */

enum { B_DPROBS, B_DLOSS, B_LOGITS, B_IDX, B_LOAD, B_DLOGITS };
static const struct op_arg bwd_args[] = {
    {.name = "dprobs", .type = ARG_WIDE},
    {.name = "dloss", .role = ARG_OPT, .type = ARG_F64},
    {.name = "logits", .type = ARG_WIDE},
    {.name = "idx", .type = ARG_I32},
    {.name = "load", .role = ARG_OPT, .type = ARG_F64},
    {.name = "dlogits", .role = ARG_OUT},
};

static void bwd_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[D_ROWS], n = (int64_t)c->dim[D_E], k = (int64_t)c->attr[A_K],
            seq = (int64_t)c->attr[A_SEQ];
    c->t[B_DPROBS] = tensor_2d(NULL, DT_NONE, rows, k);
    c->t[B_DLOSS] = tensor_1d(NULL, DT_NONE, 1);
    c->t[B_LOGITS] = tensor_2d(NULL, DT_NONE, rows, n);
    c->t[B_IDX] = tensor_2d(NULL, DT_NONE, rows, k);
    c->t[B_LOAD] = tensor_2d(NULL, DT_NONE, rows / seq + 1, n);
}

static bool bwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int64_t n = c->t[B_LOGITS].dim[1], k = c->t[B_IDX].dim[1];
    if (arg == B_LOGITS)
        fill_logits(host, key);
    for (int64_t i = 0; arg == B_IDX && i < tensor_elems(host); i++) {
        int32_t expert =
            (int32_t)((5 * (i / k) + i % k) % n); /* k neighbours, every ninth choice dropped */
        ((int32_t *)host->data)[i] = c->attr[A_CAPACITY] > 0 && i % 9 == 4 ? -1 - expert : expert;
    }
    for (int64_t i = 0; arg == B_LOAD && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)rng_below(key, (uint64_t)i, 5));
    return arg == B_LOGITS || arg == B_IDX || arg == B_LOAD;
}

static struct router_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct router_bwd_args){.dprobs = c->t[B_DPROBS],
                                    .dloss = c->t[B_DLOSS],
                                    .logits = c->t[B_LOGITS],
                                    .idx = c->t[B_IDX],
                                    .load = c->t[B_LOAD],
                                    .dlogits = c->t[B_DLOGITS],
                                    .rule = rule_of(c),
                                    .hashed = c->attr[A_HASHED] == 1};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    c->t[B_DLOGITS] = tensor_shape(ops->real, c->t[B_LOGITS].rank, c->t[B_LOGITS].dim);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct router_bwd_args a = bwd_pack(c);
    return ops->router_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_LOGITS]),
           size = (double)dtype_bytes(c->t[B_LOGITS].dtype);
    *out = (struct op_cost){.flops = 16 * n, .bytes = 2 * n * size};
}

static const struct op_sample samples[] = {
    {"rows=12 experts=8"},
    {"rows=12 experts=8 no_loss=1 no_stat=1 no_tally=1 no_global=1 no_load=1"},
    {"rows=1 experts=1 k=1 seq=1 pre_softmax=1"},
    {"rows=0 experts=4"},
    {"rows=130 experts=16 k=4 seq=65 pre_softmax=1 scale=2.5 aux=0.7 z=0.3"},
    {"rows=12 experts=8 score=1 bias=1"},
    {"rows=12 experts=8 score=1 k=1 bias=1 z=1 scale=1.7"},
    {"rows=20 experts=16 k=4 score=1 bias=1 groups=4 group_topk=2 scale=2.5 seq_aux=0.9 seq=5"},
    {"rows=20 experts=16 k=4 score=1 norm=0 aux=0.4 seq=10"},
    {"rows=24 experts=12 k=3 score=2 aux=1 seq_aux=0.5 global_aux=0.25 z=0.1 seq=8 acc_stat=1 "
     "acc_tally=1 acc_global=1"},
    {"rows=16 experts=8 k=3 score=2 bias=1 groups=4 group_topk=3"},
    {"rows=16 experts=8 k=4 groups=4 group_topk=3 global_aux=1"},
    {"rows=16 experts=8 k=3 capacity=0.8 scale=1.5"},
    {"rows=16 experts=8 k=3 capacity=0.5 drop_late=1 score=1"},
    {"rows=16 experts=8 k=3 hashed=1 z=1"},
    {"rows=16 experts=8 k=3 hashed=1 score=1 seq_aux=1"},
    {"rows=16 experts=8 k=3 hashed=1 score=2"},
    {"rows=16 experts=8 k=3 hashed=2 aux=0.5"},
    {"rows=68 experts=16 k=4 hashed=2 score=1 bias=1 groups=4 group_topk=2 seq_aux=1 seq=34"},
    {"rows=16 experts=8 k=3 hashed=2 pre_softmax=1 capacity=0.8"},
    {"rows=12 experts=33 k=5 no_dloss=1 no_loss=1"},
    /* Every width of the GPU kernels, blocks that end inside a sequence, capacity over several blocks. */
    {"rows=132 experts=64 k=8 seq=66 aux=0.5 z=0.1"},
    {"rows=130 experts=128 k=8 seq=65 score=1 bias=1 groups=8 group_topk=4 seq_aux=0.3"},
    {"rows=12 experts=256 k=9 score=2 aux=1 z=1"},
    {"rows=8 experts=500 k=33 pre_softmax=1 global_aux=1"},
    {"rows=8 experts=1024 k=64 score=1 groups=32 group_topk=8 aux=1"},
    {"rows=400 experts=6 k=2 seq=200 capacity=0.6 aux=0.1"},
    {"rows=400 experts=6 k=2 seq=100 capacity=0.6 drop_late=1 score=1"},
};
static const struct op_sample bench[] = {
    {"rows=4096 experts=64 k=8 seq=1024 aux=0.01"},
    {"rows=16384 experts=64 k=8 seq=4096 aux=0.01 z=0.001 gpu=1"},
    {"rows=4096 experts=256 k=8 seq=1024 score=1 bias=1 groups=8 group_topk=4 seq_aux=0.01"},
    {"rows=16384 experts=256 k=8 seq=4096 score=1 bias=1 groups=8 group_topk=4 seq_aux=0.01 gpu=1"}};

OP_TABLES(router_fwd, ROUTER_FWD_FIELDS);
const struct op_desc router_fwd_desc = {
    OP_IS(router_fwd),
    .summary = "top-k experts and their probabilities, with balance and z losses",
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fwd_fill,
    .backward = "router_bwd",
    .tolerance = 3e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(router_bwd, ROUTER_BWD_FIELDS);
const struct op_desc router_bwd_desc = {
    OP_IS(router_bwd),
    .summary = "gradient of router_fwd with respect to the logits",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = bwd_fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};

/* ---- noise, jitter, bias --------------------------------------------------------------------- */

static const struct op_dim noise_dims[] = {{"rows", 6}, {"d", 33}};
static const struct op_attr noise_attrs[] = {
    {.name = "eps", .value = 0.1}, {.name = "key", .value = 12345}, {.name = "seq", .value = 4}, {.name = "acc_y", .value = 0}};

enum { N_X, N_INFO, N_Y };
static const struct op_arg jitter_args[] = {
    {.name = "x"}, {.name = "info", .type = ARG_I64}, {.name = "y", .role = ARG_OUT}};
enum { L_INFO, L_LOGITS };
static const struct op_arg noise_args[] = {{.name = "info", .type = ARG_I64},
                                           {.name = "logits", .role = ARG_OUT, .type = ARG_WIDE}};

static bool fill_info(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (c->desc->args[arg].type != ARG_I64)
        return false;
    const int64_t info[4] = {17, (1ll << 33) + 5, 0, 0};
    for (int i = 0; i < 4; i++)
        ((int64_t *)host->data)[i] = info[i];
    return true;
}

static void jitter_shapes(struct op_call *c)
{
    c->t[N_X] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1]);
    c->t[N_INFO] = tensor_1d(NULL, DT_NONE, 4);
}

static int jitter_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[N_Y] = tensor_shape(c->t[N_X].dtype, c->t[N_X].rank, c->t[N_X].dim);
    return ST_OK;
}

static int jitter_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct router_jitter_args a = {.x = c->t[N_X],
                                   .info = c->t[N_INFO],
                                   .y = c->t[N_Y],
                                   .eps = c->attr[0],
                                   .key = (uint64_t)c->attr[1],
                                   .seq = (int64_t)c->attr[2],
                                   .acc_y = c->attr[3] != 0};
    return ops->router_jitter(lane, &a);
}

static void jitter_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[N_X]);
    *out = (struct op_cost){.flops = 12 * n, .bytes = 2 * n * (double)dtype_bytes(c->t[N_X].dtype)};
}

static void noise_shapes(struct op_call *c) { c->t[L_INFO] = tensor_1d(NULL, DT_NONE, 4); }

static int noise_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    c->t[L_LOGITS] = tensor_2d(NULL, wide_of(ops->real), (int64_t)c->dim[0], (int64_t)c->dim[1]);
    return ST_OK;
}

static int noise_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct router_noise_args a = {.info = c->t[L_INFO],
                                  .logits = c->t[L_LOGITS],
                                  .key = (uint64_t)c->attr[1],
                                  .seq = (int64_t)c->attr[2]};
    return ops->router_noise(lane, &a);
}

static void noise_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[L_LOGITS]);
    *out =
        (struct op_cost){.flops = 40 * n, .bytes = n * (double)dtype_bytes(c->t[L_LOGITS].dtype)};
}

static const struct op_sample noise_samples[] = {
    {"rows=6 d=33"}, {"rows=0 d=4"}, {"rows=9 d=1 seq=3 acc_y=1"}, {"rows=3 d=130 strided=1"}};
static const struct op_sample noise_bench[] = {{"rows=4096 d=64"}, {"rows=4096 d=1024"}, {"rows=16384 d=2048 seq=4096 gpu=1"}};

OP_TABLES(router_jitter, ROUTER_JITTER_FIELDS);
const struct op_desc router_jitter_desc = {
    OP_IS(router_jitter),
    .summary = "multiply by uniform noise around 1; its own backward",
    OP_LIST(args, jitter_args), OP_LIST(attrs, noise_attrs), OP_LIST(dims, noise_dims),
    .sample_shapes = jitter_shapes, .infer = jitter_infer, .run = jitter_run, .cost = jitter_cost,
    .sample_fill = fill_info,
    .tolerance = 1e-6,
    OP_LIST(samples, noise_samples), OP_LIST(bench, noise_bench),
};
OP_TABLES(router_noise, ROUTER_NOISE_FIELDS);
const struct op_desc router_noise_desc = {
    OP_IS(router_noise),
    .summary = "standard normal logits, for a balanced load",
    OP_LIST(args, noise_args), OP_LIST(attrs, noise_attrs), OP_LIST(dims, noise_dims),
    .sample_shapes = noise_shapes, .infer = noise_infer, .run = noise_run, .cost = noise_cost,
    .sample_fill = fill_info,
    .tolerance = 1e-6,
    OP_LIST(samples, noise_samples), OP_LIST(bench, noise_bench),
};

enum { U_TALLY, U_BIAS };
static const struct op_arg bias_args[] = {{.name = "tally", .type = ARG_F64},
                                          {.name = "bias", .role = ARG_OUT, .type = ARG_WIDE}};
static const struct op_attr bias_attrs[] = {{.name = "rate", .value = 0.001}};
static const struct op_dim bias_dims[] = {{"experts", 7}};

static void bias_shapes(struct op_call *c)
{
    c->t[U_TALLY] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[0]);
}

static bool bias_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)c;
    for (int64_t i = 0; arg == U_TALLY && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)rng_below(key, (uint64_t)i, 4));
    return arg == U_TALLY;
}

static int bias_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    c->t[U_BIAS] = tensor_1d(NULL, wide_of(ops->real), c->t[U_TALLY].dim[0]);
    return ST_OK;
}

static int bias_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct router_bias_args a = {.tally = c->t[U_TALLY], .bias = c->t[U_BIAS], .rate = c->attr[0]};
    return ops->router_bias(lane, &a);
}

static void bias_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[U_BIAS]);
    *out = (struct op_cost){.flops = 3 * n, .bytes = 16 * n};
}

static const struct op_sample bias_samples[] = {
    {"experts=7"}, {"experts=1"}, {"experts=64 rate=0.5"}};
static const struct op_sample bias_bench[] = {{"experts=256"}};

OP_TABLES(router_bias, ROUTER_BIAS_FIELDS);
const struct op_desc router_bias_desc = {
    OP_IS(router_bias),
    .summary = "move the selection bias of each expert towards balance",
    OP_LIST(args, bias_args), OP_LIST(attrs, bias_attrs), OP_LIST(dims, bias_dims),
    .sample_shapes = bias_shapes, .infer = bias_infer, .run = bias_run, .cost = bias_cost,
    .sample_fill = bias_fill,
    .tolerance = 1e-6,
    OP_LIST(samples, bias_samples), OP_LIST(bench, bias_bench),
};
