/* conv1d: argument checks, cost, descriptors, test samples and bench shapes; see conv1d.h. */
#include "ops/check.h"
#include "ops/conv1d/conv1d.h"
#include "ops/opshape.h"

static int check_taps(const char *op, const struct tensor *w, struct err *e)
{
    if (w->dim[1] >= 1 && w->dim[1] <= CONV1D_MAX_WIDTH)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: w has %lld taps per channel, expected 1 to %d", op, (long long)w->dim[1],
                   CONV1D_MAX_WIDTH);
}

int conv1d_fwd_check(const struct conv1d_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&conv1d_fwd_desc, a, e));
    return check_taps("conv1d_fwd", &a->w, e);
}

int conv1d_bwd_check(const struct conv1d_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&conv1d_bwd_desc, a, e));
    return check_taps("conv1d_bwd", &a->w, e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"c", 5}, {"taps", 4}};

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    return op_fill_documents(c, arg, t, key, 0.1);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(conv1d_fwd, a, c);
    double n = (double)tensor_elems(&a->x), taps = (double)a->w.dim[1];
    *out = (struct op_cost){.flops = n * (2 * taps + (a->silu != 0 ? 4 : 0)), .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(conv1d_bwd, a, c);
    double n = (double)tensor_elems(&a->x), taps = (double)a->w.dim[1];
    *out = (struct op_cost){.flops = n * (a->silu != 0 ? 6 * taps + 8 : 4 * taps), .bytes = op_bytes(c)};
}

static const struct op_sample samples[] = {
    {"b=2 s=7 c=5"},
    {"b=1 s=1 c=1 taps=1 no_init=1 no_doc_start=1"},
    {"b=1 s=1 c=33 no_doc_start=1"},
    {"b=0 s=3"},
    {"b=2 s=0"},
    {"b=2 s=2 c=0"},
    {"b=2 s=3 c=17 silu=0 no_bias=1 no_start=1"},
    {"b=2 s=65 c=130 no_init=1 no_start=1 acc_dw=1 acc_dbias=1"},
    {"b=3 s=130 c=129 taps=2 no_doc_start=1 no_start=1 strided=1"},
    {"b=1 s=70 c=40 taps=7 acc_dbias=1 strided=1"},
    {"b=2 s=66 c=24 taps=16 no_final=1 no_bias=1"},
    {"b=2 s=9 c=12 silu=0 no_start=1"},
    {"b=2 s=64 c=256 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=2 s=259 c=136"},
    {"b=3 s=33 c=24 taps=3 strided=1"},
    {"b=1 s=2 c=16 no_doc_start=1"},
    {"b=2 s=40 c=8 taps=2 silu=0 acc_dw=1 acc_dbias=1"},
};
static const struct op_sample bench[] = {
    {"b=16 s=256 c=1280 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=1 s=4096 c=4096 no_init=1 no_doc_start=1 no_start=1 no_final=1"},
    {"b=4 s=4096 c=6144 no_init=1 no_doc_start=1 no_start=1 no_final=1 gpu=1"},
    {"b=4 s=4096 c=6144 no_init=1 no_start=1 no_final=1 gpu=1"},
};

OP_TABLES(conv1d_fwd, CONV1D_FWD_FIELDS);
const struct op_desc conv1d_fwd_desc = {
    OP_IS(conv1d_fwd),     .summary = "causal convolution of each channel, with bias, SiLU, documents and decode state",
    OP_LIST(dims, dims),   .cost = fwd_cost,
    .sample_fill = fill,   .backward = "conv1d_bwd",
    .tolerance = 2e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(conv1d_bwd, CONV1D_BWD_FIELDS);
const struct op_desc conv1d_bwd_desc = {
    OP_IS(conv1d_bwd),         .summary = "gradient of conv1d_fwd",
    OP_LIST(dims, dims),       .cost = bwd_cost,
    .sample_fill = fill,       .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
