/* sparse: argument checks, cost, descriptors, test samples and bench shapes; see sparse.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/sparse/sparse.h"

/* What shapes cannot say, for both directions. */
static int check_common(const char *op, const struct tensor *kv, const struct tensor *idx, int64_t dv, struct err *e)
{
    if (dv < 0 || dv > kv->dim[2])
        return err_set(e, ST_INVALID, "%s: dv is %lld, keys have %lld channels", op, (long long)dv,
                       (long long)kv->dim[2]);
    if (kv->dim[1] >= INT32_MAX || idx->dim[1] >= INT32_MAX || idx->dim[2] >= INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld queries, %lld keys and lists of %lld, each must be below 2^31 - 1", op,
                       (long long)idx->dim[1], (long long)kv->dim[1], (long long)idx->dim[2]);
    return ST_OK;
}

int sparse_fwd_check(const struct sparse_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&sparse_fwd_desc, a, e));
    return check_common("sparse_fwd", &a->kv, &a->idx, a->dv, e);
}

int sparse_bwd_check(const struct sparse_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&sparse_bwd_desc, a, e));
    return check_common("sparse_bwd", &a->kv, &a->idx, a->dv, e);
}

int sparse_check_list(const char *op, const struct tensor *idx, int64_t n_keys, struct err *e)
{
    for (int64_t r = 0; r < rows_of(idx); r++) {
        const int32_t *list = (const int32_t *)idx->data + row_offset(idx, r);
        for (int64_t k = 0; k < idx->dim[2]; k++)
            if (list[k] >= n_keys)
                return err_set(e, ST_INVALID, "%s: idx[%lld, %lld] is %d, there are %lld keys", op, (long long)r,
                               (long long)k, (int)list[k], (long long)n_keys);
    }
    return ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

enum { BATCH, S, SKV, H, D, K };
static const struct op_dim dims[] = {{"b", 2}, {"s", 5}, {"skv", 9}, {"h", 3}, {"d", 8}, {"k", 4}};

/* Lists of distinct keys in no order, with gaps: a stride that shares no factor with the number of keys. The first
 * query of a batch has no key at all, every fifth query few of them. */
static void fill_lists(const struct op_call *c, struct tensor *t, uint64_t key)
{
    int64_t n_keys = (int64_t)c->dim[SKV], n = t->dim[2], step = n_keys % 7 != 0 ? 7 : n_keys % 5 != 0 ? 5 : 1;
    for (int64_t r = 0; r < rows_of(t); r++) {
        int32_t *list = (int32_t *)t->data + row_offset(t, r);
        int64_t first = (int64_t)rng_below(key, (uint64_t)r, (uint64_t)max_i64(n_keys, 1));
        for (int64_t k = 0; k < n; k++) {
            bool none = k >= n_keys || (r % t->dim[1] == 0 && t->dim[1] > 1) || (r % 5 == 4 && k % 3 != 1);
            list[k] = none ? -1 : (int32_t)((first + k * step) % n_keys);
        }
    }
}

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (op_arg_is(c, arg, "idx")) {
        fill_lists(c, t, key);
        return true;
    }
    if (!op_arg_is(c, arg, "lse"))
        return false;
    for (int64_t i = 0; i < tensor_elems(t); i++) /* near the logarithm of a few keys */
        tensor_set(t, i, (double)(float)(3 + 0.5 * rng_normal(key, (uint64_t)i)));
    return true;
}

static double pairs_of(const struct tensor *idx, const struct tensor *q)
{
    return (double)tensor_elems(idx) * (double)q->dim[2];
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(sparse_fwd, a, c);
    *out =
        (struct op_cost){.flops = 2 * (double)(a->kv.dim[2] + a->dv) * pairs_of(&a->idx, &a->q), .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(sparse_bwd, a, c);
    *out = (struct op_cost){.flops = 2 * (double)(3 * a->kv.dim[2] + 2 * a->dv) * pairs_of(&a->idx, &a->q),
                            .bytes = op_bytes(c)};
}

static const struct op_sample samples[] = {
    {"no_sink=1"},
    {"b=1 s=1 skv=1 h=1 d=1 dv=1 k=1"},
    {"b=0"},
    {"s=0 no_sink=1"},
    {"h=0"},
    {"b=1 s=3 skv=6 k=0"},
    {"b=1 s=4 skv=5 h=2 d=7 dv=7 k=8 acc_dsink=1"}, /* more places than keys */
    {"b=2 s=9 skv=20 h=5 d=33 dv=20 k=11 acc_dsink=1"},
    {"b=1 s=37 skv=71 h=3 d=24 dv=16 k=33 no_sink=1 strided=1"},
    {"b=1 s=70 skv=130 h=4 d=40 dv=32 k=64 strided=1"},
    /* Past the tiles of a GPU. */
    {"b=2 s=6 skv=300 h=16 d=80 dv=64 k=130 scale=0.1 no_sink=1"},
    {"b=1 s=9 skv=200 h=20 d=160 dv=128 k=65 scale=0.08"},
    {"b=2 s=4 skv=50 h=70 d=160 dv=128 k=33 scale=0.08 no_sink=1"},
    {"b=1 s=3 skv=70 h=16 d=160 dv=128 k=100 scale=0.08 strided=1"},
    {"b=1 s=5 skv=90 h=64 d=576 dv=512 k=70 scale=0.04 no_sink=1"},
    {"b=1 s=3 skv=150 h=70 d=512 dv=512 k=129 scale=0.04"},
    /* Hopper's chunk of queries, and half tiles of keys and of heads. */
    {"b=2 s=5 skv=120 h=20 d=192 dv=128 k=97 scale=0.08"},
    {"b=1 s=100 skv=40 h=3 d=192 dv=128 k=9 scale=0.08 no_sink=1"},
    {"b=1 s=3 skv=300 h=128 d=192 dv=128 k=200 scale=0.08 strided=1"},
};
static const struct op_sample bench[] = {
    {"b=1 s=256 skv=512 h=8 d=80 dv=64 k=64 no_sink=1"},
    {"b=1 s=8192 skv=8192 h=128 d=576 dv=512 k=2048 scale=0.04 no_sink=1 gpu=1"},
    {"b=1 s=65536 skv=65536 h=128 d=576 dv=512 k=2048 scale=0.04 no_sink=1 gpu=1"},
    {"b=1 s=65536 skv=81920 h=64 d=512 dv=512 k=640 scale=0.044 gpu=1"}, /* compressed sparse attention */
};

OP_TABLES(sparse_fwd, SPARSE_FWD_FIELDS);
const struct op_desc sparse_fwd_desc = {
    OP_IS(sparse_fwd),         .summary = "attention of all heads over one list of keys for each query",
    OP_LIST(dims, dims),       .cost = fwd_cost,
    .sample_fill = fill,       .backward = "sparse_bwd",
    .tolerance = 5e-6,         .narrow = 1e-3, /* probabilities are rounded on the way */
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(sparse_bwd, SPARSE_BWD_FIELDS);
const struct op_desc sparse_bwd_desc = {
    OP_IS(sparse_bwd),     .summary = "gradient of sparse_fwd",
    OP_LIST(dims, dims),   .cost = bwd_cost,
    .sample_fill = fill,   .tolerance = 1e-5,
    .narrow = 2e-3,        OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
