/* attention: argument checks, cost, descriptors, test samples and bench shapes; see attention.h. */
#include "ops/check.h"
#include "ops/attention/attention.h"
#include "ops/opshape.h"

/* What shapes cannot say, for both directions. */
static int check_common(const char *op, const struct tensor *q, const struct tensor *k, const struct tensor *sink,
                        bool sink_zero, int64_t window, const struct dropout_rule *drop, int64_t before, int64_t after,
                        struct err *e)
{
    if (before < 0 || after < 0 || before >= INT32_MAX || after >= INT32_MAX || before + k->dim[1] + after >= INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld keys before and %lld after these %lld, expected 0 to 2^31 - 2 in all",
                       op, (long long)before, (long long)after, (long long)k->dim[1]);
    if (drop->p > 0 && before % 4 != 0)
        return err_set(e, ST_INVALID, "%s: dropout needs a multiple of 4 keys before the first, not %lld", op,
                       (long long)before);
    if (!(drop->p >= 0 && drop->p < 1))
        return err_set(e, ST_INVALID, "%s: p is %g, expected 0 <= p < 1", op, drop->p);
    if (drop->p > 0 && !present(&drop->info))
        return err_set(e, ST_INVALID, "%s: dropout needs info, the step and the first sample", op);
    if (k->dim[2] == 0 ? q->dim[2] != 0 : q->dim[2] % k->dim[2] != 0)
        return err_set(e, ST_INVALID, "%s: %lld query heads cannot share %lld kv heads evenly", op,
                       (long long)q->dim[2], (long long)k->dim[2]);
    if (k->dim[1] >= INT32_MAX || q->dim[1] >= INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld queries and %lld keys, each must be below 2^31 - 1", op,
                       (long long)q->dim[1], (long long)k->dim[1]);
    if (window < 0 || window > INT32_MAX)
        return err_set(e, ST_INVALID, "%s: window is %lld, expected 0 (none) to %d", op, (long long)window, INT32_MAX);
    if (present(sink) && sink_zero)
        return err_set(e, ST_INVALID, "%s: sink and sink_zero exclude each other", op);
    return ST_OK;
}

/* The library compares positions as fp32. */
const char *attention_not_library(const struct tensor *q, const struct tensor *k, const struct tensor *v)
{
    enum { SHORTEST = 64, LONGEST = 1 << 23, WIDEST = 256 };
    if (q->dtype != DT_BF16)
        return "cuDNN takes bf16";
    if (q->dim[3] % 8 != 0 || v->dim[3] % 8 != 0 || q->dim[3] > WIDEST || v->dim[3] > WIDEST)
        return "cuDNN takes heads of at most 256 channels, in multiples of 8";
    if (q->dim[1] != k->dim[1] || q->dim[1] < SHORTEST || q->dim[1] > LONGEST)
        return "cuDNN is called for sequences of 64 to 8388608 tokens";
    return tensor_elems(q) > 0 && tensor_elems(v) > 0 ? NULL : "there is nothing to do";
}

const char *attention_not_hopper(const struct tensor *q, const struct tensor *k, const struct tensor *v)
{
    enum { WIDEST = 128 };
    if (q->dtype != DT_BF16)
        return "the backward kernel for Hopper takes bf16";
    if (q->dim[3] % 8 != 0 || v->dim[3] % 8 != 0 || q->dim[3] > WIDEST || v->dim[3] > WIDEST)
        return "the backward kernel for Hopper takes heads of at most 128 channels, in multiples of 8";
    if (k->dim[1] < q->dim[1])
        return "the backward kernel for Hopper takes as many keys as queries at least";
    return tensor_elems(q) > 0 && tensor_elems(v) > 0 ? NULL : "there is nothing to do";
}

int attention_fwd_check(const struct attention_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&attention_fwd_desc, a, e));
    if (present(&a->start) && (a->before != 0 || a->after != 0))
        return err_set(e, ST_INVALID, "attention_fwd: start and a block of keys (before, after) exclude each other");
    return check_common("attention_fwd", &a->q, &a->k, &a->sink, a->sink_zero, a->window, &a->drop, a->before, a->after,
                        e);
}

int attention_bwd_check(const struct attention_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&attention_bwd_desc, a, e));
    return check_common("attention_bwd", &a->q, &a->k, &a->sink, a->sink_zero, a->window, &a->drop, a->before, a->after,
                        e);
}

int attention_start(const struct attention_fwd_args *a, int64_t *start, struct err *e)
{
    int64_t n = a->q.dim[1], n_keys = a->k.dim[1];
    *start = present(&a->start) ? ((const int64_t *)a->start.data)[0] : n_keys + a->after - n;
    if (*start > n_keys + a->after - n)
        return err_set(e, ST_INVALID, "attention_fwd: start %lld + %lld queries is beyond the %lld keys of the cache",
                       (long long)*start, (long long)n, (long long)n_keys);
    *start = max_i64(*start, -n); /* further back no query sees a key either */
    return ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

enum { BATCH, S, SKV, H, G, D, DV };
static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"skv", 0}, {"h", 3}, {"g", 3}, {"d", 8}, {"dv", 0}};

/* skv and dv are s and d unless named. */
static int64_t dim_of(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

static void same_unless_named(struct op_call *c)
{
    c->dim[SKV] = c->dim[SKV] != 0 ? c->dim[SKV] : c->dim[S];
    c->dim[DV] = c->dim[DV] != 0 ? c->dim[DV] : c->dim[D];
}

/* Documents of random length; every token knows where its own began. */
static void fill_doc_start(const struct op_call *c, struct tensor *t, uint64_t key)
{
    int64_t before = (int64_t)op_attr(c, "before") + dim_of(c, SKV) + (int64_t)op_attr(c, "after") - dim_of(c, S);
    for (int64_t b = 0; b < t->dim[0]; b++) {
        int64_t first = 0;
        for (int64_t j = 0; j < before + t->dim[1]; j++) {
            if (rng_uniform(key, (uint64_t)(b * (before + t->dim[1]) + j)) < 0.05)
                first = j;
            if (j >= before)
                ((int32_t *)t->data)[b * t->stride[0] + j - before] = (int32_t)first;
        }
    }
}

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    switch (c->desc->args[arg].type) {
    case ARG_I32: fill_doc_start(c, t, key); return true;
    case ARG_I64:
        for (int64_t i = 0; i < tensor_elems(t); i++)
            ((int64_t *)t->data)[i] = op_arg_is(c, arg, "info") ? 3 + 2 * i : dim_of(c, SKV) - dim_of(c, S);
        return true;
    default: break;
    }
    if (c->desc->args[arg].role != ARG_IN || t->rank != 3)
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++) /* lse: near the logarithm of a few keys */
        tensor_set(t, i, (double)(float)(3 + 0.5 * rng_normal(key, (uint64_t)i)));
    return true;
}

/* Pairs of query and key that see each other, without documents. */
static double visible_pairs(const struct tensor *q, const struct tensor *k, int64_t window, int64_t after)
{
    double pairs = 0;
    int64_t start = k->dim[1] + after - q->dim[1];
    for (int64_t i = 0; i < q->dim[1]; i++) {
        int64_t first = window > 0 ? max_i64(0, start + i - window + 1) : 0, last = min_i64(start + i, k->dim[1] - 1);
        pairs += (double)max_i64(0, last - first + 1);
    }
    return pairs * (double)q->dim[0] * (double)q->dim[2];
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(attention_fwd, a, c);
    double width = (double)(a->q.dim[3] + a->v.dim[3]);
    double pairs = visible_pairs(&a->q, &a->k, a->window, a->after);
    *out = (struct op_cost){.flops = 2 * width * pairs, .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(attention_bwd, a, c);
    double width = (double)(3 * a->q.dim[3] + 2 * a->v.dim[3]);
    double pairs = visible_pairs(&a->q, &a->k, a->window, a->after);
    *out = (struct op_cost){.flops = 2 * width * pairs, .bytes = op_bytes(c)};
}

static const struct op_sample samples[] = {
    {"no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=1 h=1 g=1 d=1 no_doc_start=1"},
    {"b=0 s=3"},
    {"s=0 skv=4 no_doc_start=1"},
    {"h=0 g=0"},
    {"b=2 s=1 skv=9 h=6 g=2 d=16 dv=5"},
    {"b=1 s=4 skv=70 h=5 g=1 d=33 window=66"},
    {"b=1 s=5 h=5 g=1 d=16 sink_zero=1 no_sink=1"},
    {"b=1 s=65 h=3 g=1 d=16 no_sink=1 no_doc_start=1"},
    {"b=1 s=64 h=2 g=2 d=24 dv=40 no_doc_start=1 acc_dsink=1"},
    {"b=2 s=66 skv=131 h=3 g=3 d=17 dv=64 no_start=1 acc_dsink=1"},
    {"b=1 s=130 h=5 g=5 d=20 window=1 no_sink=1 no_doc_start=1"},
    {"b=1 s=140 h=2 g=1 d=32 window=33 no_sink=1 no_doc_start=1 strided=1"},
    {"b=2 s=97 h=6 g=2 d=64 window=40 strided=1"},
    {"b=1 s=200 h=3 g=1 d=64 no_sink=1 strided=1"},
    {"b=1 s=37 skv=20 h=2 g=2 d=8 no_doc_start=1 no_start=1"},
    {"b=1 s=33 skv=300 h=1 g=1 d=128 dv=48 sink_zero=1 no_sink=1 no_doc_start=1"},
    /* Past the tiles of a GPU: plain causal calls of every width a library may take, then what only
     * kernels of ours do. */
    {"b=2 s=200 h=4 g=4 d=64 scale=0.125 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=2 s=130 h=4 g=1 d=128 scale=0.088 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=129 h=2 g=1 d=192 dv=128 scale=0.07 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=70 h=2 g=2 d=256 scale=0.0625 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=131 h=2 g=1 d=192 dv=128 scale=0.07 no_sink=1"},
    {"b=1 s=129 h=2 g=2 d=200 dv=256 scale=0.0625 no_doc_start=1 window=65"},
    {"b=1 s=67 h=2 g=1 d=260 dv=70 scale=0.0625"},
    {"b=2 s=193 h=6 g=2 d=128 scale=0.088 window=64 no_doc_start=1 no_start=1"},
    {"b=2 s=193 h=6 g=2 d=128 scale=0.088 window=64 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=330 h=2 g=2 d=64 scale=0.125 window=129 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=200 h=2 g=1 d=192 dv=128 scale=0.07 window=1 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=3 skv=200 h=8 g=2 d=128 scale=0.088 no_sink=1 no_doc_start=1"},
    /* Several blocks of keys to a row and to a group; keys that no row sees. */
    {"b=1 s=390 h=4 g=2 d=128 scale=0.088 no_doc_start=1 no_start=1"},
    {"b=2 s=300 h=2 g=1 d=64 scale=0.125 no_start=1 strided=1"},
    {"b=1 s=40 skv=400 h=2 g=1 d=64 scale=0.125 window=30 no_sink=1 no_doc_start=1 no_start=1"},
    /* Dropout, also beside what hides keys, on a few queries and on several tiles. */
    {"b=1 s=5 h=2 g=1 d=8 p=0.25 no_start=1"},
    {"b=2 s=130 h=4 g=2 d=64 scale=0.125 p=0.5 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=200 h=2 g=1 d=128 scale=0.088 window=70 p=0.1 no_start=1 strided=1"},
    {"b=1 s=129 h=2 g=1 d=192 dv=128 scale=0.07 p=0.3 no_sink=1 no_start=1"},
    {"b=1 s=67 h=2 g=2 d=256 scale=0.0625 p=0.2 no_doc_start=1 no_start=1"},
    {"b=1 s=67 h=2 g=1 d=260 dv=70 scale=0.0625 p=0.2 no_start=1"},
    /* A block of the keys of a sequence: wholly before the queries, touched by a window or by documents, not reached.
     * */
    {"b=2 s=9 h=4 g=2 d=8 before=3 after=9 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=2 s=9 h=4 g=2 d=8 before=3 after=14 no_start=1"},
    {"b=1 s=5 h=2 g=1 d=16 before=20 no_start=1"},
    {"b=1 s=70 h=2 g=1 d=32 before=70 after=70 window=100 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=70 skv=33 h=2 g=1 d=32 after=30 window=64 no_start=1 strided=1"},
    {"b=1 s=64 h=2 g=2 d=24 before=128 after=128 window=65 no_sink=1 no_start=1"},
    {"b=2 s=130 h=4 g=2 d=64 scale=0.125 before=130 after=130 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=200 h=2 g=1 d=128 scale=0.088 before=200 no_sink=1 no_start=1"},
    {"b=1 s=200 h=2 g=1 d=128 scale=0.088 before=200 after=200 window=333 no_sink=1 no_start=1"},
    {"b=1 s=129 h=2 g=1 d=192 dv=128 scale=0.07 before=4 after=129 p=0.3 no_sink=1 no_start=1"},
    {"b=2 s=65 h=2 g=1 d=64 scale=0.125 before=8 after=65 p=0.2 no_sink=1 no_start=1"},
    {"b=1 s=67 h=2 g=1 d=260 dv=70 scale=0.0625 before=4 after=67 p=0.2 no_start=1"},
};
static const struct op_sample bench[] = {
    {"b=16 s=256 h=5 g=5 d=64 scale=0.125 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=4 s=1024 h=8 g=2 d=64 scale=0.125 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=4096 h=8 g=2 d=128 scale=0.088 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=1 s=4096 h=8 g=2 d=128 scale=0.088 window=512 no_sink=1 no_doc_start=1 no_start=1"},
    {"b=4 s=4096 h=16 g=16 d=128 scale=0.088 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=4 s=4096 h=16 g=4 d=128 scale=0.088 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=8 s=2048 h=16 g=16 d=64 scale=0.125 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=4 s=4096 h=16 g=4 d=128 scale=0.088 sink_zero=1 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=4 s=4096 h=16 g=4 d=128 scale=0.088 window=1024 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=4 s=4096 h=16 g=4 d=128 scale=0.088 window=1024 sink_zero=1 no_sink=1 no_doc_start=1 no_start=1 gpu=1"},
    {"b=1 s=65536 h=128 g=128 d=192 dv=128 scale=0.07 no_sink=1 no_doc_start=1 no_start=1 gpu=1"}, /* beside sparse */
};

#define DROP_ATTRS(op) OP_ATTR_IN(op, double, "p", drop.p, 0) OP_ATTR_IN(op, uint64_t, "key", drop.key, 77)
OP_TABLES_WITH(attention_fwd, ATTENTION_FWD_FIELDS, OP_FIELD_IN(attention_fwd, "info", drop.info, OPT_FIXED, I64, "4"),
               DROP_ATTRS(attention_fwd));
const struct op_desc attention_fwd_desc = {
    OP_IS(attention_fwd),
    .sample_dims = same_unless_named,
    .summary = "causal grouped-query attention with window, documents, sink and dropout",
    OP_LIST(dims, dims),
    .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "attention_bwd",
    .tolerance = 5e-6,
    .narrow = 1e-3,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(attention_bwd, ATTENTION_BWD_FIELDS, OP_FIELD_IN(attention_bwd, "info", drop.info, OPT_FIXED, I64, "4"),
               DROP_ATTRS(attention_bwd));
const struct op_desc attention_bwd_desc = {
    OP_IS(attention_bwd),
    .sample_dims = same_unless_named,
    .summary = "gradient of attention_fwd",
    OP_LIST(dims, dims),
    .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 1e-5,
    .narrow = 2e-3,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
