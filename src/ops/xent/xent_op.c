/* xent: argument checks, chunk rule, cost, descriptors, test samples and bench shapes; see xent.h.
 */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/xent/xent.h"
#include "ops/xent/xent_int.h"

#include <math.h>

static int check_gradients(const struct xent_args *a, struct err *e)
{
    enum dtype real = a->h.dtype;
    int64_t rows = a->h.dim[0], d = a->h.dim[1], vocab = a->w.dim[0];
    if (present(&a->dh) != present(&a->dw))
        return err_set(e, ST_INVALID, "xent: dh and dw come together, but %s is missing",
                       present(&a->dh) ? "dw" : "dh");
    if (present(&a->dbias) && (!present(&a->bias) || !present(&a->dh)))
        return err_set(e, ST_INVALID, "xent: dbias is given without %s",
                       present(&a->bias) ? "dh and dw" : "bias");
    if (!present(&a->dh))
        return ST_OK;
    CHECK_T("xent", "dh", &a->dh, real, 2, rows, d);
    CHECK_T("xent", "dw", &a->dw, wide_of(real), 2, vocab, d);
    CHECK_T("xent", "scale", &a->scale, DT_F64, 1, 1);
    if (present(&a->bias))
        CHECK_T("xent", "dbias", &a->dbias, wide_of(real), 1, vocab);
    return ST_OK;
}

int xent_check(const struct xent_args *a, struct err *e)
{
    enum dtype real = a->h.dtype;
    CHECK_T("xent", "h", &a->h, real, 2, -1, -1);
    CHECK_T("xent", "w", &a->w, real, 2, -1, a->h.dim[1]);
    CHECK_OPT("xent", "bias", &a->bias, wide_of(real), 1, a->w.dim[0]);
    CHECK_T("xent", "label", &a->label, DT_I32, 1, a->h.dim[0]);
    CHECK_T("xent", "loss", &a->loss, DT_F64, 1, 2);
    CHECK_OPT("xent", "nll", &a->nll, wide_of(real), 1, a->h.dim[0]);
    CHECK_OPT("xent", "logits", &a->logits, real, 2, a->h.dim[0], a->w.dim[0]);
    if (a->chunk < 0)
        return err_set(e, ST_INVALID, "xent: chunk is %lld, expected 0 (automatic) or more",
                       (long long)a->chunk);
    if (!(a->z_loss >= 0 && isfinite(a->z_loss)))
        return err_set(e, ST_INVALID, "xent: z_loss is %g, expected 0 or more", a->z_loss);
    return check_gradients(a, e);
}

int xent_label_check(const struct xent_args *a, struct err *e)
{
    const int32_t *label = a->label.data;
    int64_t n = a->h.dim[0], vocab = a->w.dim[0];
    for (int64_t r = 0; r < n; r++)
        if (label[r] < -1 || label[r] >= vocab) {
            err_set(e, ST_INVALID, "xent: label[%lld] is %d, outside the vocabulary of %lld",
                    (long long)r, (int)label[r], (long long)vocab);
            return err_hint(
                e, "-1 marks a position to ignore; was the data tokenised with another tokenizer?");
        }
    return ST_OK;
}

int64_t xent_chunk(int64_t rows, int64_t d, int64_t vocab)
{
    int64_t parts = max_i64(1, ceil_div(vocab, max_i64(1, d))), want = ceil_div(rows, parts),
            chunk = XENT_CHUNK_MIN;
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

enum { DIM_ROWS, DIM_D, DIM_VOCAB };
static const struct op_dim dims[] = {{"rows", 7}, {"d", 9}, {"vocab", 13}};

/* Same positions in both descriptors up to LABEL. */
enum { H, W, BIAS, LABEL };
enum { F_LOSS = LABEL + 1, F_NLL, F_LOGITS, F_WORK };
static const struct op_arg fwd_args[] = {
    {.name = "h"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "label", .type = ARG_I32},
    {.name = "loss", .role = ARG_OUT, .type = ARG_F64},
    {.name = "nll", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "logits", .role = ARG_OOUT, .no_grad = true},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
enum { FWD_CHUNK, FWD_ACC_LOSS };
static const struct op_attr fwd_attrs[] = {{.name = "chunk", .value = 0}, {.name = "acc_loss", .value = 0}};

static void input_shapes(struct op_call *c)
{
    int64_t rows = (int64_t)c->dim[DIM_ROWS], d = (int64_t)c->dim[DIM_D],
            vocab = (int64_t)c->dim[DIM_VOCAB];
    c->t[H] = tensor_2d(NULL, DT_NONE, rows, d);
    c->t[W] = tensor_2d(NULL, DT_NONE, vocab, d);
    c->t[BIAS] = tensor_1d(NULL, DT_NONE, vocab);
    c->t[LABEL] = tensor_1d(NULL, DT_NONE, rows);
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int64_t vocab = c->t[W].dim[0];
    if (arg != LABEL)
        return false;
    for (int64_t r = 0; r < host->dim[0]; r++)
        tensor_set(host, r,
                   vocab > 0 && r % 5 != 3 ? (double)rng_below(key, (uint64_t)r, (uint64_t)vocab)
                                           : -1);
    return true;
}

static struct xent_args pack_inputs(const struct op_call *c)
{
    return (struct xent_args){.h = c->t[H], .w = c->t[W], .bias = c->t[BIAS], .label = c->t[LABEL]};
}

static struct xent_args fwd_pack(const struct op_call *c)
{
    struct xent_args a = pack_inputs(c);
    a.loss = c->t[F_LOSS];
    a.nll = c->t[F_NLL];
    a.logits = c->t[F_LOGITS];
    a.work = c->t[F_WORK];
    a.chunk = (int64_t)c->attr[FWD_CHUNK];
    a.acc_loss = c->attr[FWD_ACC_LOSS] != 0;
    return a;
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    int64_t rows = c->t[H].dim[0];
    c->t[F_LOSS] = tensor_1d(NULL, DT_F64, 2);
    c->t[F_NLL] = tensor_1d(NULL, wide_of(c->t[H].dtype), rows);
    c->t[F_LOGITS] = tensor_2d(NULL, c->t[H].dtype, rows, c->t[W].dim[0]);
    struct xent_args a = fwd_pack(c);
    c->t[F_WORK] = tensor_1d(NULL, DT_U8, ops->xent_work ? ops->xent_work(&a) : 0);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct xent_args a = fwd_pack(c);
    return ops->xent(lane, &a);
}

static void some_cost(const struct op_call *c, int gemms, double rows_moved, struct op_cost *out)
{
    double rows = (double)c->t[H].dim[0], d = (double)c->t[W].dim[1],
           vocab = (double)c->t[W].dim[0];
    double size = (double)dtype_bytes(c->t[H].dtype);
    *out =
        (struct op_cost){.flops = 2.0 * gemms * rows * d * vocab,
                         .bytes = (rows_moved + (gemms > 1 ? 2 : 1) * vocab * d) * size + 4 * rows};
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    double rows = (double)c->t[H].dim[0], logits = (double)tensor_elems(&c->t[F_LOGITS]);
    some_cost(c, 1, rows * (double)c->t[H].dim[1] + (c->t[F_LOGITS].rank > 0 ? logits : 0), out);
}

/* dnll is what the harness multiplies nll with: the op knows only one factor for all rows, scale,
 * so both are filled with the same number and the op does not see dnll. */
enum { B_DNLL = LABEL + 1, B_SCALE, B_LOSS, B_NLL, B_DH, B_DW, B_DBIAS, B_WORK };
static const struct op_arg bwd_args[] = {
    {.name = "h"},
    {.name = "w"},
    {.name = "bias", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "label", .type = ARG_I32},
    {.name = "dnll", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "scale", .type = ARG_F64},
    {.name = "loss", .role = ARG_OUT, .type = ARG_F64},
    {.name = "nll", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dh", .role = ARG_OUT},
    {.name = "dw", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "dbias", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
enum { BWD_CHUNK, BWD_Z_LOSS, BWD_ACC_LOSS, BWD_ACC_DW, BWD_ACC_DBIAS };
static const struct op_attr bwd_attrs[] = {
    {.name = "chunk", .value = 0}, {.name = "z_loss", .value = 0}, {.name = "acc_loss", .value = 0}, {.name = "acc_dw", .value = 0}, {.name = "acc_dbias", .value = 0},
};

static void bwd_shapes(struct op_call *c)
{
    input_shapes(c);
    c->t[B_DNLL] = tensor_1d(NULL, DT_NONE, (int64_t)c->dim[DIM_ROWS]);
    c->t[B_SCALE] = tensor_1d(NULL, DT_NONE, 1);
}

static bool bwd_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (arg != B_DNLL && arg != B_SCALE)
        return fill(c, arg, host, key);
    for (int64_t i = 0; i < host->dim[0]; i++)
        tensor_set(host, i, 0.375);
    return true;
}

static struct xent_args bwd_pack(const struct op_call *c)
{
    struct xent_args a = pack_inputs(c);
    a.scale = c->t[B_SCALE];
    a.loss = c->t[B_LOSS];
    a.nll = c->t[B_NLL];
    a.dh = c->t[B_DH];
    a.dw = c->t[B_DW];
    a.dbias = c->t[B_DBIAS];
    a.work = c->t[B_WORK];
    a.chunk = (int64_t)c->attr[BWD_CHUNK];
    a.z_loss = c->attr[BWD_Z_LOSS];
    a.acc_loss = c->attr[BWD_ACC_LOSS] != 0;
    a.acc_dw = c->attr[BWD_ACC_DW] != 0;
    a.acc_dbias = c->attr[BWD_ACC_DBIAS] != 0;
    return a;
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)e;
    enum dtype real = c->t[H].dtype;
    c->t[B_LOSS] = tensor_1d(NULL, DT_F64, 2);
    c->t[B_NLL] = tensor_1d(NULL, wide_of(real), c->t[H].dim[0]);
    c->t[B_DH] = tensor_2d(NULL, real, c->t[H].dim[0], c->t[H].dim[1]);
    c->t[B_DW] = tensor_2d(NULL, wide_of(real), c->t[W].dim[0], c->t[W].dim[1]);
    if (c->t[BIAS].rank > 0)
        c->t[B_DBIAS] = tensor_1d(NULL, wide_of(real), c->t[W].dim[0]);
    struct xent_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->xent_work ? ops->xent_work(&a) : 0);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct xent_args a = bwd_pack(c);
    return ops->xent(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    some_cost(c, 3, 2 * (double)tensor_elems(&c->t[H]), out);
}

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
    {"rows=6 d=8 vocab=16391 no_bias=1"}, /* more threads a row */
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
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = input_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "xent_bwd",
    .tolerance = 2e-6,
    .narrow = 8e-3, /* logits and their gradients are rounded on the way */
    OP_LIST(samples, fwd_samples), OP_LIST(bench, fwd_bench),
};
const struct op_desc xent_bwd_desc = {
    .name = "xent_bwd",
    .summary = "head and cross entropy in chunks of rows, loss and gradients",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = bwd_fill,
    .tolerance = 5e-6,
    .narrow = 8e-3, /* logits and their gradients are rounded on the way */
    OP_LIST(samples, bwd_samples), OP_LIST(bench, bwd_bench),
};
