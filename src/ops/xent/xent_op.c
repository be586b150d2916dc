/* xent: argument checks, chunk rule, cost, descriptors, test samples and bench
 * shapes; see xent.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/xent/xent.h"
#include "ops/xent/xent_int.h"

#include <math.h>

int xent_check(const struct xent_args *a, struct err *e)
{
    TRY(op_check_fields(&xent_desc, a, e));
    if (a->chunk < 0)
        return err_set(e, ST_INVALID, "xent: chunk is %lld, expected 0 (automatic) or more", (long long)a->chunk);
    if (!(a->z_loss >= 0 && isfinite(a->z_loss)))
        return err_set(e, ST_INVALID, "xent: z_loss is %g, expected 0 or more", a->z_loss);
    if (!present(&a->dh) && (present(&a->dw) || present(&a->dbias)))
        return err_set(e, ST_INVALID, "xent: %s is given without dh", present(&a->dw) ? "dw" : "dbias");
    if (present(&a->dh) && present(&a->bias) && !present(&a->dbias))
        return err_set(e, ST_INVALID, "xent: tensor dbias is missing, bias is given");
    return ST_OK;
}

int xent_label_check(const struct xent_args *a, struct err *e)
{
    const int32_t *label = a->label.data;
    int64_t n = a->h.dim[0], vocab = a->w.dim[0];
    for (int64_t r = 0; r < n; r++)
        if (label[r] < -1 || label[r] >= vocab) {
            err_set(e, ST_INVALID, "xent: label[%lld] is %d, outside the vocabulary of %lld", (long long)r,
                    (int)label[r], (long long)vocab);
            return err_hint(e, "-1 marks a position to ignore; was the data tokenised with another tokenizer?");
        }
    return ST_OK;
}

int64_t xent_chunk(int64_t rows, int64_t d, int64_t vocab)
{
    int64_t parts = max_i64(1, ceil_div(vocab, max_i64(1, d))), want = ceil_div(rows, parts), chunk = XENT_CHUNK_MIN;
    while (chunk < want && chunk < XENT_CHUNK_MAX)
        chunk *= 2;
    return min_i64(chunk, rows);
}

int64_t xent_rows_at_once(const struct xent_args *a)
{
    int64_t rows = a->h.dim[0];
    return a->chunk > 0 ? min_i64(a->chunk, rows) : xent_chunk(rows, a->w.dim[1], a->w.dim[0]);
}

/* ---- descriptors: the loss alone, and loss with gradients ------------------------------------ */

static const struct op_dim dims[] = {{"rows", 7}, {"d", 9}, {"vocab", 13}};

static void leave_out(struct op_call *c, const char *name) { c->t[op_arg_index(c->desc, name)] = (struct tensor){0}; }

static int loss_only(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(op_infer_shapes(c, ops, e));
    leave_out(c, "dh");
    leave_out(c, "dw");
    leave_out(c, "dbias");
    return ST_OK;
}

static int with_gradients(struct op_call *c, const struct ops *ops, struct err *e)
{
    TRY(op_infer_shapes(c, ops, e));
    leave_out(c, "logits");
    return ST_OK;
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    OP_UNPACK(xent, a, c);
    int64_t vocab = a->w.dim[0];
    for (int64_t i = 0; (op_arg_is(c, arg, "dnll") || op_arg_is(c, arg, "scale")) && i < host->dim[0]; i++)
        tensor_set(host, i, 0.375);
    if (!op_arg_is(c, arg, "label"))
        return op_arg_is(c, arg, "dnll") || op_arg_is(c, arg, "scale");
    for (int64_t r = 0; r < host->dim[0]; r++)
        tensor_set(host, r, vocab > 0 && r % 5 != 3 ? (double)rng_below(key, (uint64_t)r, (uint64_t)vocab) : -1);
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(xent, a, c);
    double rows = (double)a->h.dim[0], d = (double)a->w.dim[1], vocab = (double)a->w.dim[0],
           size = (double)dtype_bytes(a->h.dtype);
    bool grads = a->dh.rank > 0;
    double moved = (grads ? 2 : 1) * (rows * d + vocab * d) + (a->logits.rank > 0 ? rows * vocab : 0);
    *out = (struct op_cost){.flops = (grads ? a->dw.rank > 0 ? 6 : 4 : 2) * rows * d * vocab,
                            .bytes = moved * size + 4 * rows};
}

/* dnll is what the harness multiplies nll with: the op knows only one factor for all rows, scale,
 * so both are filled with the same number and the op does not see dnll. */
static const struct op_arg xent_bwd_fields[] = {XENT_FIELDS(OP_FIELD_, OP_NO_ATTR_, OP_NO_STRUCT_, xent)
                                                    OP_EXTRA("dnll", OPT, WIDE, "rows")};

/* Gradcheck runs the first list and sees the loss as nll; z_loss is no part of that, so it is
 * tested by the second. */
static const struct op_sample fwd_samples[] = {
    {"rows=7 d=9 vocab=13"},
    {"rows=1 d=1 vocab=1"},
    {"rows=0 d=8 vocab=5"},
    {"rows=9 d=0 vocab=4 chunk=2"},
    {"rows=33 d=17 vocab=31 chunk=1 no_bias=1"},
    {"rows=17 d=8 vocab=65 chunk=100 acc_loss=1"},
    {"rows=40 d=5 vocab=257"},
    {"rows=19 d=16 vocab=33 chunk=4 no_logits=1"},
    {"rows=11 d=12 vocab=18 chunk=5 strided=1"},
    {"rows=5 d=8 vocab=1025 no_logits=1"},
    {"rows=3 d=8 vocab=16391 no_bias=1"},
};
static const struct op_sample bwd_samples[] = {
    {"rows=7 d=9 vocab=13"},
    {"rows=1 d=1 vocab=1"},
    {"rows=0 d=8 vocab=5"},
    {"rows=0 d=8 vocab=5 acc_dw=1 acc_dbias=1"},
    {"rows=9 d=0 vocab=4 chunk=2"},
    {"rows=33 d=17 vocab=31 chunk=1 no_bias=1 z_loss=0.01"},
    {"rows=17 d=8 vocab=65 chunk=100 acc_loss=1 acc_dw=1 acc_dbias=1"},
    {"rows=40 d=5 vocab=1030 no_nll=1 z_loss=0.001 acc_dw=1"},
    {"rows=19 d=16 vocab=33 chunk=4 acc_dbias=1"},
    {"rows=11 d=12 vocab=18 chunk=5 strided=1"},
    {"rows=9 d=16 vocab=512 no_bias=1"}, /* a GPU's last row length for a warp: in fp32, in bf16 */
    {"rows=9 d=16 vocab=1024 no_bias=1"},
    {"rows=5 d=8 vocab=1025 z_loss=0.001"},
    {"rows=6 d=8 vocab=16391 no_bias=1"},                     /* more threads a row */
    {"rows=5 d=8 vocab=120003 no_bias=1 z_loss=0.001 gpu=1"}, /* more than its shared memory holds */
};
static const struct op_sample fwd_bench[] = {
    {"rows=4096 d=320 vocab=256 no_bias=1 no_logits=1"},
    {"rows=2048 d=768 vocab=50304 no_bias=1 no_logits=1"},
};
static const struct op_sample bwd_bench[] = {
    {"rows=4096 d=320 vocab=256 no_bias=1"},
    {"rows=2048 d=768 vocab=50304 no_bias=1"},
    {"rows=16384 d=2048 vocab=50304 no_bias=1"},
};

OP_TABLES(xent, XENT_FIELDS);
const struct op_desc xent_desc = {
    OP_IS(xent),
    .summary = "head and cross entropy in chunks of rows, loss only",
    OP_LIST(dims, dims),
    .infer = loss_only,
    .cost = cost,
    .sample_fill = fill,
    .backward = "xent_bwd",
    .tolerance = 2e-6,
    .narrow = 8e-3, /* logits and their gradients are rounded in between */
    OP_LIST(samples, fwd_samples),
    OP_LIST(bench, fwd_bench),
};
const struct op_desc xent_bwd_desc = {
    OP_NAMED("xent_bwd", xent_bwd, xent),
    .summary = "head and cross entropy in chunks of rows, loss and gradients",
    OP_LIST(dims, dims),
    .infer = with_gradients,
    .cost = cost,
    .sample_fill = fill,
    .tolerance = 5e-6,
    .narrow = 8e-3, /* logits and their gradients are rounded in between */
    OP_LIST(samples, bwd_samples),
    OP_LIST(bench, bwd_bench),
};
