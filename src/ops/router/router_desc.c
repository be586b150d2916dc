/* router: descriptors, test samples and bench shapes; see router.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/router/router.h"
#include "ops/router/router_int.h"

static const struct op_dim dims[] = {{"rows", 12}, {"experts", 8}, {"bias", 0}, {"hashed", 0}, {"entries", 0}};
enum { D_ROWS, D_E, D_BIAS, D_HASHED, D_ENTRIES };

enum { VOCAB = 11 };

/* The numbers of the rule, for both directions. */
#define RULE_ATTRS(op)                                                                                                 \
    OP_ATTR_EXTRA("k", 2)                                                                                              \
    OP_ATTR_IN(op, int, "score", rule.score, 0)                                                                        \
    OP_ATTR_IN(op, bool, "pre_softmax", rule.pre_softmax, 0)                                                           \
    OP_ATTR_IN(op, bool, "norm", rule.norm, 1)                                                                         \
    OP_ATTR_IN(op, int64_t, "groups", rule.groups, 0)                                                                  \
    OP_ATTR_IN(op, int64_t, "group_topk", rule.group_topk, 0)                                                          \
    OP_ATTR_IN(op, int64_t, "group_best", rule.group_best, 0)                                                          \
    OP_ATTR_IN(op, double, "scale", rule.scale, 1)                                                                     \
    OP_ATTR_IN(op, double, "capacity", rule.capacity, 0)                                                               \
    OP_ATTR_IN(op, bool, "drop_late", rule.drop_late, 0)                                                               \
    OP_ATTR_IN(op, double, "aux", rule.coef.aux, 0)                                                                    \
    OP_ATTR_IN(op, double, "seq_aux", rule.coef.seq_aux, 0)                                                            \
    OP_ATTR_IN(op, double, "global_aux", rule.coef.global_aux, 0)                                                      \
    OP_ATTR_IN(op, double, "z", rule.coef.z, 0)                                                                        \
    OP_ATTR_IN(op, int64_t, "seq", rule.seq, 4)

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
            int64_t other = (int64_t)rng_below(key, (uint64_t)(r * n + e), (uint64_t)e + 1), swap = order[e];
            order[e] = order[other];
            order[other] = swap;
        }
        for (int64_t e = 0; e < n; e++) {
            double noise = 0.8 * (rng_uniform(key + 1, (uint64_t)(r * n + e)) - 0.5);
            tensor_set(t, r * n + e, (double)(float)(5 * (((double)order[e] + 0.5 + noise) / (double)n - 0.5)));
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* hashed 2: a table without tokens, a row for each. */
static void entries(struct op_call *c) { c->dim[D_ENTRIES] = c->dim[D_HASHED] == 1 ? VOCAB : c->dim[D_ROWS]; }

static void only_asked(struct op_call *c)
{
    const struct {
        const char *name;
        bool asked;
    } given[] = {{"bias", c->dim[D_BIAS] != 0}, {"token", c->dim[D_HASHED] == 1}, {"table", c->dim[D_HASHED] != 0}};
    for (int i = 0; i < countof(given); i++)
        if (!given[i].asked)
            c->t[op_arg_index(c->desc, given[i].name)] = (struct tensor){0};
}

static bool fwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    OP_UNPACK(router_fwd, a, c);
    int64_t n = a->logits.dim[1], k = (int64_t)op_attr(c, "k");
    if (op_arg_is(c, arg, "logits"))
        fill_logits(host, key);
    for (int64_t i = 0; op_arg_is(c, arg, "bias") && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)(float)(0.3 * rng_normal(key, (uint64_t)i)));
    for (int64_t i = 0; op_arg_is(c, arg, "token") && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)rng_below(key, (uint64_t)i, VOCAB);
    for (int64_t i = 0; op_arg_is(c, arg, "table") && i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = (int32_t)((3 * (i / k) + i % k) % n);
    return op_arg_is(c, arg, "logits") || op_arg_is(c, arg, "bias") || op_arg_is(c, arg, "token") ||
           op_arg_is(c, arg, "table");
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(router_fwd, a, c);
    double n = (double)tensor_elems(&a->logits), chosen = (double)tensor_elems(&a->probs);
    double size = (double)dtype_bytes(a->logits.dtype);
    *out = (struct op_cost){.flops = 8 * n, .bytes = n * size + chosen * (size + 4)};
}

/* ---- backward -------------------------------------------------------------------------------- */

static bool bwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    OP_UNPACK(router_bwd, a, c);
    int64_t n = a->logits.dim[1], k = a->idx.dim[1];
    if (op_arg_is(c, arg, "logits"))
        fill_logits(host, key);
    for (int64_t i = 0; op_arg_is(c, arg, "idx") && i < tensor_elems(host); i++) {
        int32_t expert = (int32_t)((5 * (i / k) + i % k) % n); /* k neighbours, every ninth choice dropped */
        ((int32_t *)host->data)[i] = a->rule.capacity > 0 && i % 9 == 4 ? -1 - expert : expert;
    }
    for (int64_t i = 0; op_arg_is(c, arg, "load") && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)rng_below(key, (uint64_t)i, 5));
    return op_arg_is(c, arg, "logits") || op_arg_is(c, arg, "idx") || op_arg_is(c, arg, "load");
}

/* Samples say 2 where experts are dictated row by row: that is not hash routing. */
static void hash_routing(const struct op_call *c, void *args)
{
    ((struct router_bwd_args *)args)->hashed = op_attr(c, "hashed") == 1;
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(router_bwd, a, c);
    double n = (double)tensor_elems(&a->logits), size = (double)dtype_bytes(a->logits.dtype);
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
    {"rows=36 experts=24 k=6 score=1 bias=1 groups=4 group_topk=2 group_best=2"},
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

OP_TABLES_WITH(router_fwd, ROUTER_FWD_FIELDS, , RULE_ATTRS(router_fwd));
const struct op_desc router_fwd_desc = {
    OP_IS(router_fwd),           .summary = "top-k experts and their probabilities, with balance and z losses",
    OP_LIST(dims, dims),         .sample_dims = entries,
    .sample_shapes = only_asked, .cost = fwd_cost,
    .sample_fill = fwd_fill,     .backward = "router_bwd",
    .tolerance = 3e-6,           OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(router_bwd, ROUTER_BWD_FIELDS, , RULE_ATTRS(router_bwd));
const struct op_desc router_bwd_desc = {
    OP_IS(router_bwd),     .summary = "gradient of router_fwd with respect to the logits",
    OP_LIST(dims, dims),   .prepare = hash_routing,
    .cost = bwd_cost,      .sample_fill = bwd_fill,
    .tolerance = 5e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};

/* ---- noise, jitter, bias --------------------------------------------------------------------- */

static const struct op_dim noise_dims[] = {{"rows", 6}, {"d", 33}};

static bool fill_info(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (c->desc->args[arg].type != ARG_I64)
        return false;
    const int64_t info[4] = {17, (1ll << 33) + 5, 40, 0};
    for (int i = 0; i < 4; i++)
        ((int64_t *)host->data)[i] = info[i];
    return true;
}

static void jitter_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(router_jitter, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){.flops = 12 * n, .bytes = 2 * n * (double)dtype_bytes(a->x.dtype)};
}

static void noise_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(router_noise, a, c);
    double n = (double)tensor_elems(&a->logits);
    *out = (struct op_cost){.flops = 40 * n, .bytes = n * (double)dtype_bytes(a->logits.dtype)};
}

static const struct op_sample noise_samples[] = {
    {"rows=6 d=33"}, {"rows=0 d=4"}, {"rows=9 d=1 seq=3 acc_y=1"}, {"rows=3 d=130 strided=1"}};
static const struct op_sample noise_bench[] = {
    {"rows=4096 d=64"}, {"rows=4096 d=1024"}, {"rows=16384 d=2048 seq=4096 gpu=1"}};

OP_TABLES(router_jitter, ROUTER_JITTER_FIELDS);
const struct op_desc router_jitter_desc = {
    OP_IS(router_jitter),
    .summary = "multiply by uniform noise around 1; its own backward",
    OP_LIST(dims, noise_dims),
    .cost = jitter_cost,
    .sample_fill = fill_info,
    .tolerance = 1e-6,
    OP_LIST(samples, noise_samples),
    OP_LIST(bench, noise_bench),
};
OP_TABLES(router_noise, ROUTER_NOISE_FIELDS);
const struct op_desc router_noise_desc = {
    OP_IS(router_noise),
    .summary = "standard normal logits, for a balanced load",
    OP_LIST(dims, noise_dims),
    .cost = noise_cost,
    .sample_fill = fill_info,
    .tolerance = 1e-6,
    OP_LIST(samples, noise_samples),
    OP_LIST(bench, noise_bench),
};

static const struct op_dim bias_dims[] = {{"experts", 7}};

static bool bias_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    for (int64_t i = 0; op_arg_is(c, arg, "tally") && i < tensor_elems(host); i++)
        tensor_set(host, i, (double)rng_below(key, (uint64_t)i, 4));
    return op_arg_is(c, arg, "tally");
}

static void bias_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(router_bias, a, c);
    double n = (double)tensor_elems(&a->bias);
    *out = (struct op_cost){.flops = 3 * n, .bytes = 16 * n};
}

static const struct op_sample bias_samples[] = {{"experts=7"}, {"experts=1"}, {"experts=64 rate=0.5"}};
static const struct op_sample bias_bench[] = {{"experts=256"}};

OP_TABLES(router_bias, ROUTER_BIAS_FIELDS);
const struct op_desc router_bias_desc = {
    OP_IS(router_bias),
    .summary = "move the selection bias of each expert towards balance",
    OP_LIST(dims, bias_dims),
    .cost = bias_cost,
    .sample_fill = bias_fill,
    .tolerance = 1e-6,
    OP_LIST(samples, bias_samples),
    OP_LIST(bench, bias_bench),
};
