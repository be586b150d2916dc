/* embed: argument checks, cost, descriptors, test samples and bench shapes; see embed.h. */
#include "ops/check.h"
#include "ops/embed/embed.h"
#include "ops/embed/embed_int.h"
#include "ops/opshape.h"

OP_CHECK(embed_fwd)

OP_CHECK(embed_bwd)

int embed_token_check(const char *op, const struct tensor *token, int64_t vocab, bool part, struct err *e)
{
    const int32_t *id = token->data;
    int64_t n = token->dim[0], bad = 0;
    for (int64_t t = 0; t < n; t++)
        bad += id[t] < 0 || (!part && id[t] >= vocab);
    for (int64_t t = 0; bad > 0 && t < n; t++)
        if (id[t] < 0 || (!part && id[t] >= vocab)) {
            err_set(e, ST_INVALID, "%s: token[%lld] is %d, outside the vocabulary of %lld", op, (long long)t,
                    (int)id[t], (long long)vocab);
            return err_hint(e, "was the data tokenised with another tokenizer?");
        }
    return ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 7}, {"vocab", 11}, {"d", 33}};

/* Few different tokens, so that rows of dw collect several summands. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int64_t vocab = c->t[op_arg_index(c->desc, "w")].dim[0];
    if (!op_arg_is(c, arg, "token"))
        return false;
    int32_t *id = host->data;
    if (op_attr(c, "part") != 0)
        vocab *= 3; /* tokens in front of the part, of it and behind it */
    for (int64_t t = 0; t < host->dim[0]; t++) {
        uint64_t below = (uint64_t)(t % 3 == 0 ? vocab : (vocab + 3) / 4);
        id[t] = (int32_t)rng_below(key, (uint64_t)t, below);
    }
    return true;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(embed_fwd, a, c);
    double n = (double)tensor_elems(&a->y), size = (double)dtype_bytes(a->w.dtype);
    *out = (struct op_cost){.flops = 0, .bytes = 2 * n * size + 4 * (double)a->token.dim[0]};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(embed_bwd, a, c);
    double n = (double)tensor_elems(&a->dy), size = (double)dtype_bytes(a->dy.dtype);
    *out = (struct op_cost){.flops = n, .bytes = n * size + (double)tensor_bytes(&a->dw)};
}

static const struct op_sample samples[] = {
    {"rows=7 vocab=11 d=33"},
    {"rows=1 vocab=1 d=1"},
    {"rows=0 vocab=5 d=8"},
    {"rows=6 vocab=5 d=0"},
    {"rows=200 vocab=3 d=17 acc_dw=1"},
    {"rows=65 vocab=300 d=65"},
    {"rows=65 vocab=30 d=65 part=1 first=20"},
    {"rows=65 vocab=4 d=17 part=1 first=5 acc_dw=1"},
    {"rows=300 vocab=256 d=8 part=1 first=256"},
    {"rows=9 vocab=5 d=16 part=1 first=900"},
    {"rows=129 vocab=64 d=128 acc_dw=1"},
    {"rows=1025 vocab=257 d=40"},
    {"rows=2100 vocab=66000 d=8 acc_dw=1"},
    {"rows=300 vocab=1 d=264"},
};
static const struct op_sample bench[] = {
    {"rows=4096 vocab=256 d=320"},
    {"rows=4096 vocab=50304 d=768"},
    {"rows=16384 vocab=32768 d=2048 gpu=1"},
    {"rows=16384 vocab=32768 d=2048 acc_dw=1 gpu=1"},
};

OP_TABLES(embed_fwd, EMBED_FWD_FIELDS);
const struct op_desc embed_fwd_desc = {
    OP_IS(embed_fwd),      .summary = "rows of a table by token",
    OP_LIST(dims, dims),   .cost = fwd_cost,
    .sample_fill = fill,   .backward = "embed_bwd",
    .tolerance = 1e-7,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
/* w tells the backward only how many rows dw has; the op itself does not read it. */
OP_TABLES_WITH(embed_bwd, EMBED_BWD_FIELDS, OP_EXTRA("w", IN, REAL, "vocab d"), );
const struct op_desc embed_bwd_desc = {
    OP_IS(embed_bwd),          .summary = "gradient of embed_fwd: sums of rows by token",
    OP_LIST(dims, dims),       .cost = bwd_cost,
    .sample_fill = fill,       .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
