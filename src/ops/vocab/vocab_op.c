/* vocab: argument checks, cost, descriptors, test samples and bench shapes; see vocab.h. */
#include "ops/vocab/vocab.h"
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/vocab/vocab_int.h"

#include <math.h>

OP_CHECK(vocab_stats)

int vocab_loss_check(const struct vocab_loss_args *a, struct err *e)
{
    TRY(op_check_fields(&vocab_loss_desc, a, e));
    if (!(a->z_loss >= 0 && isfinite(a->z_loss)))
        return err_set(e, ST_INVALID, "vocab_loss: z_loss is %g, expected 0 or more", a->z_loss);
    return ST_OK;
}

int vocab_label_check(const char *op, const struct tensor *label, int64_t vocab, struct err *e)
{
    const int32_t *id = label->data;
    for (int64_t r = 0; r < label->dim[0]; r++)
        if (id[r] < -1 || id[r] >= vocab) {
            err_set(e, ST_INVALID, "%s: label[%lld] is %d, outside the vocabulary of %lld", op, (long long)r,
                    (int)id[r], (long long)vocab);
            return err_hint(e, "-1 marks a position to ignore; was the data tokenised with another tokenizer?");
        }
    return ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim stats_dims[] = {{"rows", 5}, {"v", 13}};
static const struct op_dim loss_dims[] = {{"rows", 5}, {"v", 13}, {"ranks", 2}};

/* Labels in every part of the vocabulary, some of them ignored. */
static bool fill_label(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    uint64_t vocab = (uint64_t)op_attr(c, "vocab");
    if (!op_arg_is(c, arg, "label"))
        return false;
    for (int64_t r = 0; r < host->dim[0]; r++)
        tensor_set(host, r, r % 5 != 3 ? (double)rng_below(key, (uint64_t)r, vocab) : -1);
    return true;
}

/* Numbers that stats may hold: a maximum near those of z, a sum of at least one. */
static bool fill_loss(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (op_arg_is(c, arg, "scale"))
        tensor_set(host, 0, 0.375);
    for (int64_t i = 0; op_arg_is(c, arg, "all") && i < tensor_elems(host); i++) {
        double u = (double)rng_below(key, (uint64_t)i, 1000) / 1000;
        tensor_set(host, i, i % VOCAB_STATS == VOCAB_SUM ? 1 + 8 * u : 2 * u - 0.5);
    }
    return fill_label(c, arg, host, key) || op_arg_is(c, arg, "scale") || op_arg_is(c, arg, "all");
}

static void stats_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(vocab_stats, a, c);
    double n = (double)tensor_elems(&a->z);
    *out = (struct op_cost){.flops = 4 * n, .bytes = n * (double)dtype_bytes(a->z.dtype)};
}

static void loss_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(vocab_loss, a, c);
    double n = (double)tensor_elems(&a->z);
    *out = (struct op_cost){.flops = 5 * n, .bytes = 2 * n * (double)dtype_bytes(a->z.dtype)};
}

static const struct op_sample stats_samples[] = {
    {"rows=5 v=13 vocab=13"},
    {"rows=1 v=1 vocab=4 first=2"},
    {"rows=0 v=8 vocab=8"},
    {"rows=33 v=65 vocab=260 first=130"},
    {"rows=9 v=1030 vocab=3000 first=1000"},
    {"rows=3 v=16391 vocab=32782"},
};
static const struct op_sample loss_samples[] = {
    {"rows=5 v=13 ranks=2 vocab=26 first=13"},
    {"rows=1 v=1 ranks=1 vocab=1"},
    {"rows=0 v=8 ranks=2 vocab=16"},
    {"rows=33 v=65 ranks=4 vocab=260 first=130 z_loss=0.01"},
    {"rows=17 v=64 ranks=3 vocab=192 first=64 acc_loss=1 no_dz=1 no_scale=1"},
    {"rows=9 v=1030 ranks=8 vocab=8240 first=1030 acc_loss=1"},
    {"rows=3 v=16391 ranks=2 vocab=32782 first=16391"},
};
static const struct op_sample stats_bench[] = {{"rows=4096 v=16384 vocab=131072"}};
static const struct op_sample loss_bench[] = {{"rows=4096 v=16384 ranks=8 vocab=131072"}};

OP_TABLES(vocab_stats, VOCAB_STATS_FIELDS);
const struct op_desc vocab_stats_desc = {
    OP_IS(vocab_stats),
    .summary = "maximum, sum of exponentials and the label's logit of a part of the vocabulary",
    OP_LIST(dims, stats_dims),
    .cost = stats_cost,
    .sample_fill = fill_label,
    .tolerance = 5e-6,
    OP_LIST(samples, stats_samples),
    OP_LIST(bench, stats_bench),
};
OP_TABLES(vocab_loss, VOCAB_LOSS_FIELDS);
const struct op_desc vocab_loss_desc = {
    OP_IS(vocab_loss),
    .summary = "cross entropy and its gradient for a part of the vocabulary, from the stats of all ranks",
    OP_LIST(dims, loss_dims),
    .cost = loss_cost,
    .sample_fill = fill_loss,
    .tolerance = 5e-6,
    OP_LIST(samples, loss_samples),
    OP_LIST(bench, loss_bench),
};
