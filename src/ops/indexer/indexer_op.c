/* indexer: argument checks, cost, descriptors, test samples and bench shapes; see indexer.h. */
#include "ops/check.h"
#include "ops/indexer/indexer.h"
#include "ops/opshape.h"

#include <math.h>

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_keys(const char *op, int64_t queries, int64_t keys, int64_t ratio, struct err *e)
{
    if (queries >= INT32_MAX || keys >= INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld queries and %lld keys, each must be below 2^31 - 1", op,
                       (long long)queries, (long long)keys);
    if (ratio < 1)
        return err_set(e, ST_INVALID, "%s: ratio is %lld, expected 1 or more", op, (long long)ratio);
    return ST_OK;
}

static int check_groups(const char *op, const struct tensor *mq, const struct tensor *mk, struct err *e)
{
    if (mk->dim[2] == 0 ? mq->dim[2] == 0 : mq->dim[2] % mk->dim[2] == 0)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: %lld query heads cannot share %lld key heads evenly", op, (long long)mq->dim[2],
                   (long long)mk->dim[2]);
}

int index_topk_check(const struct index_topk_args *a, struct err *e)
{
    TRY(op_check_fields(&index_topk_desc, a, e));
    if (a->topk < 0 || a->topk >= INT32_MAX)
        return err_set(e, ST_INVALID, "index_topk: topk is %lld, expected 0 to 2^31 - 2", (long long)a->topk);
    return check_keys("index_topk", a->q.dim[1], a->k.dim[1], a->ratio, e);
}

int index_loss_check(const struct index_loss_args *a, struct err *e)
{
    TRY(op_check_fields(&index_loss_desc, a, e));
    TRY(check_groups("index_loss", &a->mq, &a->mk, e));
    if (a->mass.rank > 0 && (a->rank < 0 || a->rank >= a->ranks))
        return err_set(e, ST_INVALID, "index_loss: rank %lld of %lld whose mass is given", (long long)a->rank,
                       (long long)a->ranks);
    return check_keys("index_loss", a->q.dim[1], a->k.dim[1], a->ratio, e);
}

int index_mass_check(const struct index_mass_args *a, struct err *e)
{
    TRY(op_check_fields(&index_mass_desc, a, e));
    TRY(check_groups("index_mass", &a->mq, &a->mk, e));
    return check_keys("index_mass", a->mq.dim[1], a->mk.dim[1], a->ratio, e);
}

int index_recall_check(const struct index_recall_args *a, struct err *e)
{
    TRY(op_check_fields(&index_recall_desc, a, e));
    TRY(check_groups("index_recall", &a->mq, &a->mk, e));
    if (a->every < 1)
        return err_set(e, ST_INVALID, "index_recall: every is %lld, expected 1 or more", (long long)a->every);
    return check_keys("index_recall", a->mq.dim[1], a->mk.dim[1], a->ratio, e);
}

/* ---- samples --------------------------------------------------------------------------------- */

enum { BATCH, S, SKV, H, D, MH };
static const struct op_dim dims[] = {{"b", 2}, {"s", 7},  {"skv", 0}, {"h", 2},
                                     {"d", 5}, {"mh", 2}, {"mg", 1},  {"md", 4}};

static void keys_unless_named(struct op_call *c)
{
    if (op_has_dim(c->desc, "skv") && c->dim[SKV] == 0)
        c->dim[SKV] = c->dim[S];
}

/* Scores of a query differ by more than any device rounds: channel 0 of key j is a number of its own with seven
 * significant bits, all other channels are the same for all keys, and weights and channel 0 of queries are positive.
 * Of `same` keys that follow each other in that order all channels are the same, so that every device finds their
 * scores equal. */
static bool fill_separated(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    int64_t n = cols_of(t), n_keys = (int64_t)c->dim[SKV];
    bool k = op_arg_is(c, arg, "k"), q = op_arg_is(c, arg, "q"), w = op_arg_is(c, arg, "w");
    for (int64_t i = 0; w && i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(float)(0.5 + rng_uniform(key, (uint64_t)i)));
    for (int64_t r = 0; (k || q) && r < rows_of(t); r++)
        for (int64_t x = 0; x < n; x++) {
            double v = 0.05 * rng_normal(key, (uint64_t)(k ? x : r * n + x));
            if (q && x == 0)
                v = 1 + 0.5 * rng_uniform(key, (uint64_t)(r * n));
            if (k && x == 0) {
                int64_t at = (r % n_keys * 37 + r / n_keys) % max_i64(1, n_keys); /* 37: no factor of most sizes */
                at /= max_i64(1, (int64_t)op_attr(c, "same"));
                v = ldexp(1 + (double)(at % 128) / 128, (int)(at / 128));
            }
            tensor_set(t, r * n + x, (double)(float)v);
        }
    return w || k || q;
}

/* Ascending lists with gaps, as index_topk makes them, of keys that the query sees. */
static void fill_lists(struct tensor *t, uint64_t key, int64_t start, int64_t ratio, int64_t n_keys)
{
    for (int64_t r = 0; r < rows_of(t); r++) {
        int32_t *list = (int32_t *)t->data + row_offset(t, r);
        int64_t end = index_visible(start + r % t->dim[1], 0, ratio, n_keys).end, n = 0;
        for (int64_t j = 0; j < end && n < t->dim[2]; j++)
            if (end - j <= t->dim[2] - n || rng_uniform(key, (uint64_t)(r * n_keys + j)) < 0.5)
                list[n++] = (int32_t)j;
        while (n < t->dim[2])
            list[n++] = -1;
    }
}

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    double rows = c->dim[BATCH] * c->dim[S];
    if (op_arg_is(c, arg, "idx") && c->desc->args[arg].role != ARG_OUT) {
        int at = op_arg_index(c->desc, "start");
        bool later = at >= 0 && c->t[at].rank > 0;
        fill_lists(t, key, later ? (int64_t)(c->dim[SKV] - c->dim[S]) : 0, (int64_t)op_attr(c, "ratio"),
                   (int64_t)op_dim(c, "skv"));
        return true;
    }
    if (op_arg_is(c, arg, "start")) {
        ((int64_t *)t->data)[0] = (int64_t)(c->dim[SKV] - c->dim[S]);
        return true;
    }
    if (op_arg_is(c, arg, "doc_start"))
        return op_fill_documents(c, arg, t, key, 0.1);
    bool mass = op_arg_is(c, arg, "mass") && c->desc->args[arg].role != ARG_OUT;
    for (int64_t i = 0; mass && i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(float)(0.1 + rng_uniform(key, (uint64_t)i)));
    if (mass)
        return true;
    bool scale = op_arg_is(c, arg, "scale"), dkl = op_arg_is(c, arg, "dkl"), lse = op_arg_is(c, arg, "lse");
    for (int64_t i = 0; (scale || dkl || lse) && i < tensor_elems(t); i++)
        tensor_set(t, i,
                   lse     ? (double)(float)(2 + 0.3 * rng_normal(key, (uint64_t)i))
                   : scale ? 0.375 * rows / op_attr(c, "coeff")
                           : 0.375);
    if (scale || dkl || lse)
        return true;
    return c->desc == &index_topk_desc && fill_separated(c, arg, t, key);
}

static double seen_pairs(int64_t batch, int64_t queries, int64_t keys, int64_t ratio)
{
    double pairs = 0;
    for (int64_t i = 0; i < queries; i++)
        pairs += (double)index_visible(i + (ratio == 1 ? keys - queries : 0), 0, ratio, keys).end;
    return pairs * (double)batch;
}

static void topk_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(index_topk, a, c);
    double pairs = seen_pairs(a->q.dim[0], a->q.dim[1], a->k.dim[1], a->ratio);
    *out = (struct op_cost){.flops = 2 * pairs * (double)(a->q.dim[2] * a->q.dim[3]), .bytes = op_bytes(c)};
}

static void loss_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(index_loss, a, c);
    double pairs =
        a->idx.rank > 0 ? (double)tensor_elems(&a->idx) : seen_pairs(a->q.dim[0], a->q.dim[1], a->k.dim[1], a->ratio);
    double own = (double)(a->q.dim[2] * a->q.dim[3]) * (a->dq.rank > 0 ? 3 : 1);
    *out = (struct op_cost){.flops = 2 * pairs * (own + (double)(a->mq.dim[2] * a->mq.dim[3])), .bytes = op_bytes(c)};
}

static void mass_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(index_mass, a, c);
    double pairs = a->idx.rank > 0 ? (double)tensor_elems(&a->idx)
                                   : seen_pairs(a->mq.dim[0], a->mq.dim[1], a->mk.dim[1], a->ratio);
    *out = (struct op_cost){.flops = 2 * pairs * (double)(a->mq.dim[2] * a->mq.dim[3]), .bytes = op_bytes(c)};
}

static void recall_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(index_recall, a, c);
    double rows = (double)(a->mq.dim[0] * index_sampled(a->mq.dim[1], a->every));
    *out = (struct op_cost){.flops = 2 * rows * (double)(a->mk.dim[1] * a->mq.dim[2] * a->mq.dim[3]),
                            .bytes = op_bytes(c)};
}

static const struct op_sample topk_samples[] = {
    {"no_doc_start=1 no_start=1"},
    {"b=1 s=1 h=1 d=1 topk=1"},
    {"b=0"},
    {"s=0 no_start=1"},
    {"b=1 s=3 topk=0 no_start=1"},
    {"b=1 s=9 h=3 d=8 topk=20 no_doc_start=1"}, /* more places than keys */
    {"b=2 s=3 skv=50 h=3 d=9 topk=7 no_doc_start=1"},
    {"b=2 s=70 h=3 d=24 topk=16 no_start=1 strided=1"},
    {"b=1 s=90 skv=22 h=2 d=16 topk=5 ratio=4 no_doc_start=1 no_start=1"},
    {"b=2 s=90 skv=22 h=2 d=16 topk=5 ratio=4 no_start=1"},
    {"b=1 s=130 h=4 d=32 topk=33 relu=0 no_start=1"},
    {"b=1 s=5 skv=700 h=16 d=64 topk=129 no_doc_start=1"},
    {"b=1 s=200 h=64 d=128 topk=64 no_start=1 no_doc_start=1"},
    /* Tensor cores: few rows, documents, heads that fill no tile. */
    {"b=2 s=3 skv=150 h=20 d=64 topk=33 no_doc_start=1"},
    {"b=2 s=140 skv=35 h=6 d=64 topk=5 ratio=4 no_start=1"},
    {"b=1 s=70 h=7 d=128 topk=16 no_start=1 relu=0"},
    {"b=1 s=2 skv=8300 h=3 d=64 topk=40 no_doc_start=1"}, /* more keys than a block of Hopper's takes */
    /* Equal scores: some, and more than a GPU collects. */
    {"b=2 s=90 h=2 d=64 topk=20 same=16 no_start=1"},
    {"b=1 s=40 h=2 d=5 topk=30 same=40 no_start=1 no_doc_start=1"},
    {"b=1 s=2 skv=5000 h=2 d=64 topk=33 same=5000 no_doc_start=1"},
};
static const struct op_sample topk_bench[] = {
    {"b=1 s=512 h=4 d=32 topk=64 no_doc_start=1 no_start=1"},
    {"b=1 s=8192 h=64 d=128 topk=2048 no_doc_start=1 no_start=1 gpu=1"},
    {"b=1 s=65536 h=64 d=128 topk=2048 no_doc_start=1 no_start=1 gpu=1"},
};
static const struct op_sample loss_samples[] = {
    {"no_doc_start=1 no_idx=1 no_lse=1 no_mass=1"},
    {"b=1 s=1 h=1 d=1 mh=1 md=1 topk=1 no_lse=1 no_mass=1"},
    {"b=0 no_idx=1 no_mass=1"},
    {"s=0 no_mass=1"},
    {"b=1 s=6 h=3 d=7 mh=4 mg=4 md=5 topk=3 acc_loss=1 no_mass=1"},
    {"b=2 s=9 h=2 d=8 mh=3 mg=1 md=9 topk=4 no_lse=1 relu=0"},
    {"b=2 s=11 h=2 d=8 mh=2 mg=2 md=6 no_idx=1 coeff=0.1"},
    {"b=1 s=33 skv=8 h=2 d=6 mh=4 mg=1 md=6 topk=5 ratio=4 no_doc_start=1 no_start=1 no_mass=1"},
    {"b=2 s=33 skv=11 h=2 d=6 mh=4 mg=1 md=6 ratio=3 no_idx=1 ranks=3 rank=2"},
    {"b=1 s=37 h=5 d=16 mh=6 mg=1 md=24 topk=12 strided=1 ranks=1"},
    /* The second part of a sequence. */
    {"b=2 s=5 skv=13 h=2 d=6 mh=4 mg=2 md=6 topk=7 no_doc_start=1 no_mass=1"},
    {"b=2 s=5 skv=13 h=2 d=6 mh=3 md=6 no_idx=1 no_doc_start=1 no_mass=1"},
    /* Tensor cores. So many products that some lie at the kink of relu, where differences are not derivatives. */
    {"b=2 s=40 h=3 d=16 mh=70 mg=1 md=160 topk=37 softmax_scale=0.05 no_doc_start=1"},
    {"b=2 s=20 h=3 d=16 mh=70 mg=1 md=192 topk=37 softmax_scale=0.05 no_doc_start=1 no_mass=1"},
    {"b=2 s=90 h=20 d=64 mh=2 mg=1 md=8 topk=70 no_doc_start=1 ranks=4 rank=1"},
    {"b=1 s=80 h=5 d=128 mh=2 mg=2 md=8 no_idx=1 no_lse=1"},
    {"b=1 s=70 h=64 d=128 mh=2 mg=1 md=8 topk=65 relu=0 no_doc_start=1 no_mass=1"},
    {"b=1 s=12 h=2 d=8 mh=16 mg=1 md=576 topk=9 softmax_scale=0.03 no_mass=1"},
    /* All keys: several tiles of queries, documents, entries, denominators that nobody has, keys of their own for
     * heads. */
    {"b=2 s=150 skv=37 h=2 d=8 mh=5 mg=1 md=512 ratio=4 softmax_scale=0.03 no_idx=1 no_start=1 no_mass=1"},
    {"b=2 s=133 h=2 d=8 mh=3 mg=1 md=40 no_idx=1 no_lse=1 no_start=1 no_mass=1"},
    {"b=1 s=70 skv=200 h=2 d=8 mh=4 mg=2 md=192 softmax_scale=0.05 no_idx=1 no_doc_start=1 ranks=2 rank=1"},
};
enum { BACKWARD_ONLY = 9 }; /* of loss_samples */
static const struct op_sample loss_bench[] = {
    {"b=1 s=256 h=4 d=32 mh=8 mg=1 md=80 topk=64 no_doc_start=1 no_mass=1"},
    {"b=1 s=8192 h=64 d=128 mh=128 mg=1 md=576 topk=2048 no_doc_start=1 gpu=1 no_mass=1"},
    {"b=1 s=65536 h=64 d=128 mh=128 mg=1 md=576 topk=2048 no_doc_start=1 gpu=1 no_mass=1"},
    {"b=1 s=16384 skv=4096 h=64 d=128 mh=64 mg=1 md=512 ratio=4 no_idx=1 no_doc_start=1 no_start=1 gpu=1 no_mass=1"},
    {"b=1 s=4096 h=64 d=128 mh=128 mg=128 md=192 no_idx=1 no_doc_start=1 no_start=1 gpu=1 no_mass=1"},
};
static const struct op_sample mass_samples[] = {
    {"no_doc_start=1 no_idx=1"},
    {"b=1 s=1 mh=1 md=1 topk=1"},
    {"b=0"},
    {"s=0"},
    {"b=2 s=5 skv=13 mh=4 mg=2 md=6 topk=7 no_doc_start=1"}, /* the second part of a sequence */
    {"b=2 s=33 skv=11 mh=4 md=6 ratio=3 no_idx=1 no_start=1"},
    {"b=1 s=37 mh=6 mg=1 md=24 topk=12 strided=1"},
    {"b=2 s=40 mh=70 mg=1 md=160 topk=37 softmax_scale=0.05 no_doc_start=1"},
    {"b=1 s=12 mh=16 mg=1 md=512 topk=9 softmax_scale=0.03"},
    {"b=2 s=150 skv=37 mh=5 mg=1 md=512 ratio=4 softmax_scale=0.03 no_idx=1 no_start=1"},
};
static const struct op_sample mass_bench[] = {
    {"b=1 s=256 mh=8 mg=1 md=80 topk=64 no_doc_start=1"},
    {"b=1 s=8192 skv=2048 mh=16 mg=1 md=512 topk=512 ratio=4 no_doc_start=1 no_start=1 gpu=1"},
};
static const struct op_sample recall_samples[] = {
    {"no_doc_start=1"},
    {"b=1 s=1 mh=1 md=1 topk=1"},
    {"b=0"},
    {"s=0"},
    {"b=2 s=3 every=8 acc_recall=1"},
    {"b=2 s=20 skv=50 mh=3 md=7 topk=9 every=5 no_doc_start=1"}, /* the second part of a sequence */
    {"b=2 s=40 mh=6 mg=2 md=17 topk=9 every=5"},
    {"b=1 s=90 skv=22 mh=3 md=16 topk=5 ratio=4 no_doc_start=1 no_start=1"},
    {"b=2 s=90 skv=22 mh=3 md=16 topk=5 ratio=4 every=9 no_start=1"},
    {"b=1 s=130 mh=3 md=40 topk=50 every=16 strided=1"},
};
static const struct op_sample recall_bench[] = {
    {"b=1 s=512 mh=8 md=80 topk=64 every=64 no_doc_start=1"},
};

/* ---- descriptors ----------------------------------------------------------------------------- */

static void leave_out(struct op_call *c, const char *name) { c->t[op_arg_index(c->desc, name)] = (struct tensor){0}; }

static int loss_only(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(op_infer_shapes(c, ops, e));
    leave_out(c, "dq");
    leave_out(c, "dk");
    leave_out(c, "dw");
    return ST_OK;
}

OP_TABLES_WITH(index_topk, INDEX_TOPK_FIELDS, , OP_ATTR_EXTRA("same", 1)); /* of samples only */
const struct op_desc index_topk_desc = {
    OP_IS(index_topk),
    .summary = "the keys of largest indexer score for each query",
    OP_LIST(dims, dims),
    .sample_dims = keys_unless_named,
    .cost = topk_cost,
    .sample_fill = fill,
    OP_LIST(samples, topk_samples),
    OP_LIST(bench, topk_bench),
};
/* Gradcheck sees the loss as kl; dkl is what it multiplies kl with. The op knows one factor for all rows, scale, so
 * both are filled to mean the same and the op does not see dkl. */
OP_TABLES_WITH(index_loss, INDEX_LOSS_FIELDS, , OP_ATTR_EXTRA("topk", 3));
static const struct op_arg index_loss_bwd_fields[] = {
    INDEX_LOSS_FIELDS(OP_FIELD_, OP_NO_ATTR_, OP_NO_STRUCT_, index_loss) OP_EXTRA("dkl", OPT, WIDE, "b s")};
const struct op_desc index_loss_desc = {
    OP_IS(index_loss),          .summary = "distance of indexer scores from attention, loss only",
    OP_LIST(dims, dims),        .sample_dims = keys_unless_named,
    .infer = loss_only,         .cost = loss_cost,
    .sample_fill = fill,        .backward = "index_loss_bwd",
    .tolerance = 1e-5,          .narrow = 1e-2,
    .samples = loss_samples,    .n_samples = countof(loss_samples) - BACKWARD_ONLY,
    OP_LIST(bench, loss_bench),
};
const struct op_desc index_loss_bwd_desc = {
    OP_NAMED("index_loss_bwd", index_loss_bwd, index_loss),
    .summary = "distance of indexer scores from attention, loss and gradients",
    OP_LIST(dims, dims),
    .sample_dims = keys_unless_named,
    .cost = loss_cost,
    .sample_fill = fill,
    .tolerance = 2e-5,
    .narrow = 2e-2,
    OP_LIST(samples, loss_samples),
    OP_LIST(bench, loss_bench),
};
OP_TABLES_WITH(index_mass, INDEX_MASS_FIELDS, , OP_ATTR_EXTRA("topk", 3));
const struct op_desc index_mass_desc = {
    OP_IS(index_mass),
    .summary = "attention weights of a row's keys, added up over heads",
    OP_LIST(dims, dims),
    .sample_dims = keys_unless_named,
    .cost = mass_cost,
    .sample_fill = fill,
    .tolerance = 1e-5,
    .narrow = 1e-2,
    OP_LIST(samples, mass_samples),
    OP_LIST(bench, mass_bench),
};
OP_TABLES_WITH(index_recall, INDEX_RECALL_FIELDS, , OP_ATTR_EXTRA("topk", 3));
const struct op_desc index_recall_desc = {
    OP_IS(index_recall),
    .summary = "share of attention that lists of keys keep",
    OP_LIST(dims, dims),
    .sample_dims = keys_unless_named,
    .cost = recall_cost,
    .sample_fill = fill,
    .tolerance = 1e-5,
    .narrow = 1e-2,
    OP_LIST(samples, recall_samples),
    OP_LIST(bench, recall_bench),
};
