/* compress: argument checks, cost, descriptors, test samples and bench shapes; see compress.h. */
#include "ops/check.h"
#include "ops/compress/compress.h"
#include "ops/opshape.h"

#include <string.h>

/* ---- checks ---------------------------------------------------------------------------------- */

/* Sizes that follow from x and from the op's numbers. */
static int64_t width_of(int64_t channels, bool overlap) { return overlap ? channels / 2 : channels; }
static int64_t kept_of(int64_t ratio, bool overlap) { return overlap ? 2 * ratio : ratio; }

static int check_sizes(const char *op, const struct tensor *x, int64_t ratio, bool overlap, struct err *e)
{
    if (ratio < 1 || ratio >= INT32_MAX / 2)
        return err_set(e, ST_INVALID, "%s: ratio is %lld, expected 1 to 2^30 - 2", op, (long long)ratio);
    if (x->dim[1] >= INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld tokens, there must be fewer than 2^31 - 1", op, (long long)x->dim[1]);
    if (overlap && x->dim[2] % 2 != 0)
        return err_set(e, ST_INVALID, "%s: x has %lld channels, with overlap they are two halves", op,
                       (long long)x->dim[2]);
    return ST_OK;
}

/* A part of a sequence begins where an entry does, and has the tokens before it at hand. */
static int check_part(const char *op, int64_t start, const struct tensor *past, int64_t ratio, struct err *e)
{
    if (start < 0 || start > INT32_MAX / 2 || start % ratio != 0)
        return err_set(e, ST_INVALID, "%s: start is %lld, expected a multiple of ratio, %lld", op, (long long)start,
                       (long long)ratio);
    if (start > 0 && past->rank == 0)
        return err_set(e, ST_INVALID, "%s: tokens from %lld on without the ones before them (past)", op,
                       (long long)start);
    return ST_OK;
}

int compress_fwd_check(const struct compress_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&compress_fwd_desc, a, e));
    TRY(check_sizes("compress_fwd", &a->x, a->ratio, a->overlap, e));
    return check_part("compress_fwd", a->start, &a->past, a->ratio, e);
}

int compress_bwd_check(const struct compress_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&compress_bwd_desc, a, e));
    TRY(check_sizes("compress_bwd", &a->x, a->ratio, a->overlap, e));
    return check_part("compress_bwd", a->start, &a->past, a->ratio, e);
}

int compress_step_check(const struct compress_step_args *a, struct err *e)
{
    TRY(op_check_fields(&compress_step_desc, a, e));
    return check_sizes("compress_step", &a->x, a->ratio, a->overlap, e);
}

int compress_start_check(int64_t start, int64_t n, struct err *e)
{
    if (start >= 0 && start <= INT32_MAX - n)
        return ST_OK;
    return err_set(e, ST_INVALID, "compress_step: start is %lld with %lld tokens, expected tokens of 0 to 2^31 - 1",
                   (long long)start, (long long)n);
}

static bool sizes(const struct tensor *x, int64_t ratio, bool overlap, bool step, const char *name, int64_t *out)
{
    if (x->rank != 3 || ratio < 1)
        return false;
    if (strcmp(name, "e") == 0)
        *out = step ? ceil_div(x->dim[1], ratio) : x->dim[1] / ratio;
    else if (strcmp(name, "d") == 0)
        *out = width_of(x->dim[2], overlap);
    else if (strcmp(name, "kept") == 0)
        *out = kept_of(ratio, overlap);
    else
        return false;
    return true;
}
static bool fwd_sizes(const void *args, const char *name, int64_t *out)
{
    const struct compress_fwd_args *a = args;
    return sizes(&a->x, a->ratio, a->overlap, false, name, out);
}
static bool bwd_sizes(const void *args, const char *name, int64_t *out)
{
    const struct compress_bwd_args *a = args;
    return sizes(&a->x, a->ratio, a->overlap, false, name, out);
}
static bool step_sizes(const void *args, const char *name, int64_t *out)
{
    const struct compress_step_args *a = args;
    return sizes(&a->x, a->ratio, a->overlap, true, name, out);
}

/* ---- samples --------------------------------------------------------------------------------- */

enum { BATCH, S, C, E, D, KEPT, AT };
static const struct op_dim dims[] = {{"b", 2}, {"s", 13}, {"c", 6}, {"e", 0}, {"d", 0}, {"kept", 0}, {"first", 5}};

static void derived(struct op_call *c)
{
    int64_t ratio = max_i64(1, (int64_t)op_attr(c, "ratio"));
    bool overlap = op_attr(c, "overlap") != 0;
    c->dim[E] = (double)((int64_t)c->dim[S] / ratio);
    c->dim[D] = (double)width_of((int64_t)c->dim[C], overlap);
    c->dim[KEPT] = (double)kept_of(ratio, overlap);
}

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (op_arg_is(c, arg, "start")) {
        ((int64_t *)t->data)[0] = (int64_t)c->dim[AT];
        return true;
    }
    bool step = op_arg_index(c->desc, "start") >= 0;
    int64_t first = step ? (int64_t)c->dim[AT] : 0, before = step ? 0 : (int64_t)op_attr(c, "start");
    for (int64_t i = 0; op_arg_is(c, arg, "pos") && i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(first + i % max_i64(1, t->dim[1])));
    if (op_arg_is(c, arg, "pos"))
        return true;
    bool documents = op_fill_documents(c, arg, t, key, 0.1);
    for (int64_t i = 0; documents && before > 0 && i < tensor_elems(t); i++) { /* the first one began before */
        int32_t *doc = (int32_t *)t->data + row_offset(t, i / t->dim[1]) + i % t->dim[1];
        *doc = (int32_t)(*doc <= 0 ? max_i64(0, before - 5) : before + *doc);
    }
    return documents;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(compress_fwd, a, c);
    *out = (struct op_cost){.flops = 8 * (double)tensor_elems(&a->x), .bytes = op_bytes(c)};
}
static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(compress_bwd, a, c);
    *out = (struct op_cost){.flops = 16 * (double)tensor_elems(&a->x), .bytes = op_bytes(c)};
}
static void step_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(compress_step, a, c);
    *out = (struct op_cost){.flops = 8 * (double)tensor_elems(&a->x), .bytes = op_bytes(c)};
}

static const struct op_sample samples[] = {
    {"no_doc_start=1 no_past=1"},
    {"overlap=0 no_past=1"},
    {"b=1 s=1 c=2 ratio=1 no_pos=1 no_past=1"},
    {"b=1 s=3 c=2 no_doc_start=1 no_past=1"}, /* no window is complete */
    {"b=0 no_past=1"},
    {"s=0 no_doc_start=1 no_past=1"},
    {"c=0 no_pos=1 no_past=1"},
    {"b=3 s=29 c=10 ratio=3 acc_dape=1 no_past=1"},
    {"b=2 s=66 c=34 ratio=8 overlap=0 strided=1 no_past=1"},
    {"b=2 s=70 c=140 ratio=4 strided=1 acc_dape=1 no_pos=1 no_past=1"},
    {"b=1 s=300 c=6 ratio=2 no_doc_start=1 acc_dape=1 no_past=1"},
    {"b=2 s=280 c=70 ratio=40 overlap=0 no_doc_start=1 no_past=1"},
    {"b=1 s=150 c=64 ratio=40 overlap=1 no_past=1"},
    /* Parts of sequences. */
    {"start=8"},
    {"b=1 s=9 c=2 start=4 overlap=0"},
    {"b=3 s=29 c=10 ratio=3 start=9 acc_dape=1 strided=1"},
    {"b=2 s=24 c=70 ratio=4 start=12 no_doc_start=1"},
    {"b=2 s=90 c=34 ratio=40 overlap=0 start=40 no_pos=1"},
};
static const struct op_sample bench[] = {
    {"b=4 s=1024 c=256 no_doc_start=1 no_past=1"},
    {"b=1 s=65536 c=1024 no_doc_start=1 gpu=1 no_past=1"},
    {"b=1 s=65536 c=512 ratio=128 overlap=0 no_doc_start=1 gpu=1 no_past=1"},
};
static const struct op_sample step_samples[] = {
    {"first=0"},
    {"first=6"},
    {"b=1 s=1 c=2 first=3"},
    {"b=1 s=1 c=2 first=4"}, /* begins a window */
    {"b=3 s=1 c=6 first=15 no_pos=1"},
    {"b=0"},
    {"s=0"},
    {"b=2 s=3 c=70 ratio=8 overlap=0 first=5"},
    {"b=2 s=30 c=6 ratio=3 first=7 strided=1"},
    {"b=1 s=2 c=34 ratio=40 overlap=0 first=38"},
};
static const struct op_sample step_bench[] = {{"b=8 s=1 c=1024 first=1023"}};

/* ---- descriptors ----------------------------------------------------------------------------- */

OP_TABLES(compress_fwd, COMPRESS_FWD_FIELDS);
const struct op_desc compress_fwd_desc = {
    OP_IS(compress_fwd),   .summary = "gated mean of each channel over windows of tokens",
    OP_LIST(dims, dims),   .sample_dims = derived,
    .number = fwd_sizes,   .cost = fwd_cost,
    .sample_fill = fill,   .backward = "compress_bwd",
    .tolerance = 2e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(compress_bwd, COMPRESS_BWD_FIELDS);
const struct op_desc compress_bwd_desc = {
    OP_IS(compress_bwd),       .summary = "gradient of compress_fwd",
    OP_LIST(dims, dims),       .sample_dims = derived,
    .number = bwd_sizes,       .cost = bwd_cost,
    .sample_fill = fill,       .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(compress_step, COMPRESS_STEP_FIELDS);
const struct op_desc compress_step_desc = {
    OP_IS(compress_step),
    .summary = "compress_fwd while decoding, with the last tokens kept",
    OP_LIST(dims, dims),
    .sample_dims = derived,
    .number = step_sizes,
    .cost = step_cost,
    .sample_fill = fill,
    .tolerance = 2e-6,
    OP_LIST(samples, step_samples),
    OP_LIST(bench, step_bench),
};
