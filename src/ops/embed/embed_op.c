/* embed: argument checks, cost, descriptors, test samples and bench shapes; see embed.h. */
#include "ops/check.h"
#include "ops/embed/embed.h"
#include "ops/embed/embed_int.h"
#include "ops/opdesc.h"

int embed_fwd_check(const struct embed_fwd_args *a, struct err *e)
{
    enum dtype real = a->w.dtype;
    CHECK_T("embed_fwd", "token", &a->token, DT_I32, 1, -1);
    CHECK_T("embed_fwd", "w", &a->w, real, 2, -1, -1);
    TRY(check_dense("embed_fwd", "w", &a->w, e));
    CHECK_T("embed_fwd", "y", &a->y, real, 2, a->token.dim[0], a->w.dim[1]);
    return ST_OK;
}

int embed_bwd_check(const struct embed_bwd_args *a, struct err *e)
{
    enum dtype real = a->dy.dtype;
    CHECK_T("embed_bwd", "token", &a->token, DT_I32, 1, -1);
    CHECK_T("embed_bwd", "dy", &a->dy, real, 2, a->token.dim[0], -1);
    CHECK_T("embed_bwd", "dw", &a->dw, wide_of(real), 2, -1, a->dy.dim[1]);
    TRY(check_dense("embed_bwd", "dw", &a->dw, e));
    return ST_OK;
}

int embed_token_check(const char *op, const struct tensor *token, int64_t vocab, struct err *e)
{
    const int32_t *id = token->data;
    int64_t n = token->dim[0], bad = 0;
    for (int64_t t = 0; t < n; t++)
        bad += id[t] < 0 || id[t] >= vocab;
    for (int64_t t = 0; bad > 0 && t < n; t++)
        if (id[t] < 0 || id[t] >= vocab) {
            err_set(e, ST_INVALID, "%s: token[%lld] is %d, outside the vocabulary of %lld", op,
                    (long long)t, (int)id[t], (long long)vocab);
            return err_hint(e, "was the data tokenised with another tokenizer?");
        }
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

enum { DIM_ROWS, DIM_VOCAB, DIM_D };
static const struct op_dim dims[] = {{"rows", 7}, {"vocab", 11}, {"d", 33}};

static int64_t dim(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }

/* Few different tokens, so that rows of dw collect several summands. */
static bool fill_token(struct tensor *host, uint64_t key, int64_t vocab)
{
    int32_t *id = host->data;
    for (int64_t t = 0; t < host->dim[0]; t++) {
        uint64_t below = (uint64_t)(t % 3 == 0 ? vocab : (vocab + 3) / 4);
        id[t] = (int32_t)rng_below(key, (uint64_t)t, below);
    }
    return true;
}

enum { F_TOKEN, F_W, F_Y };
static const struct op_arg fwd_args[] = {
    {.name = "token", .type = ARG_I32},
    {.name = "w"},
    {.name = "y", .role = ARG_OUT},
};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_TOKEN] = tensor_1d(NULL, DT_NONE, dim(c, DIM_ROWS));
    c->t[F_W] = tensor_2d(NULL, DT_NONE, dim(c, DIM_VOCAB), dim(c, DIM_D));
}

static bool fwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    return arg == F_TOKEN && fill_token(host, key, c->t[F_W].dim[0]);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    c->t[F_Y] = tensor_2d(NULL, c->t[F_W].dtype, c->t[F_TOKEN].dim[0], c->t[F_W].dim[1]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct embed_fwd_args a = {.token = c->t[F_TOKEN], .w = c->t[F_W], .y = c->t[F_Y]};
    return ops->embed_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[F_Y]), size = (double)dtype_bytes(c->t[F_W].dtype);
    *out = (struct op_cost){.flops = 0, .bytes = 2 * n * size + 4 * (double)c->t[F_TOKEN].dim[0]};
}

/* w tells the backward only how many rows dw has; the op itself does not read it. */
enum { B_TOKEN, B_DY, B_W, B_DW, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "token", .type = ARG_I32},
    {.name = "dy"},
    {.name = "w"},
    {.name = "dw", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "acc_dw", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_TOKEN] = tensor_1d(NULL, DT_NONE, dim(c, DIM_ROWS));
    c->t[B_DY] = tensor_2d(NULL, DT_NONE, dim(c, DIM_ROWS), dim(c, DIM_D));
    c->t[B_W] = tensor_2d(NULL, DT_NONE, dim(c, DIM_VOCAB), dim(c, DIM_D));
}

static bool bwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    return arg == B_TOKEN && fill_token(host, key, c->t[B_W].dim[0]);
}

static struct embed_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct embed_bwd_args){.token = c->t[B_TOKEN],
                                   .dy = c->t[B_DY],
                                   .dw = c->t[B_DW],
                                   .work = c->t[B_WORK],
                                   .acc_dw = c->attr[0] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    c->t[B_DW] = tensor_2d(NULL, wide_of(c->t[B_DY].dtype), c->t[B_W].dim[0], c->t[B_W].dim[1]);
    struct embed_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->embed_bwd_work ? ops->embed_bwd_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct embed_bwd_args a = bwd_pack(c);
    return ops->embed_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)tensor_elems(&c->t[B_DY]), size = (double)dtype_bytes(c->t[B_DY].dtype);
    *out = (struct op_cost){.flops = n, .bytes = n * size + (double)tensor_bytes(&c->t[B_DW])};
}

static const struct op_sample samples[] = {
    {"rows=7 vocab=11 d=33"},
    {"rows=1 vocab=1 d=1"},
    {"rows=0 vocab=5 d=8"},
    {"rows=6 vocab=5 d=0"},
    {"rows=200 vocab=3 d=17 acc_dw=1"},
    {"rows=65 vocab=300 d=65"},
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
    OP_IS(embed_fwd),
    .summary = "rows of a table by token",
    OP_LIST(args, fwd_args), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fwd_fill,
    .backward = "embed_bwd",
    .tolerance = 1e-7,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(embed_bwd, EMBED_BWD_FIELDS);
const struct op_desc embed_bwd_desc = {
    OP_IS(embed_bwd),
    .summary = "gradient of embed_fwd: sums of rows by token",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = bwd_fill,
    .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
