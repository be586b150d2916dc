/* gdn: argument checks, cost, descriptors, test samples and bench shapes; see gdn.h. */
#include "ops/check.h"
#include "ops/gdn/gdn.h"
#include "ops/opshape.h"

#include <math.h>

static int check_common(const char *op, const struct tensor *v, const struct tensor *k, int64_t chunk, struct err *e)
{
    int64_t h = v->dim[2], kh = k->dim[2];
    if ((h > 0 || kh > 0) && (kh == 0 || h == 0 || h % kh != 0))
        return err_set(e, ST_INVALID, "%s: %lld value heads are no multiple of %lld key heads", op, (long long)h,
                       (long long)kh);
    if (chunk < 1 || chunk > GDN_MAX_CHUNK)
        return err_set(e, ST_INVALID, "%s: chunk is %lld, expected 1 to %d", op, (long long)chunk, GDN_MAX_CHUNK);
    return ST_OK;
}

int gdn_fwd_check(const struct gdn_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&gdn_fwd_desc, a, e));
    return check_common("gdn_fwd", &a->v, &a->k, a->chunk, e);
}

int gdn_bwd_check(const struct gdn_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&gdn_bwd_desc, a, e));
    return check_common("gdn_bwd", &a->v, &a->k, a->chunk, e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"hk", 2}, {"hv", 4}, {"dk", 6}, {"dv", 5}};

/* Decay slow enough that a state outlives a chunk. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (arg == op_arg_index(c->desc, "A_log")) {
        for (int64_t i = 0; i < tensor_elems(t); i++)
            tensor_set(t, i, (double)(float)(rng_normal(key, (uint64_t)i) - 2.5));
        return true;
    }
    bool alone = (arg == op_arg_index(c->desc, "q") || arg == op_arg_index(c->desc, "k")) && t->dim[3] == 1;
    for (int64_t i = 0; alone && i < tensor_elems(t); i++) { /* the sign of a value near 0 has a huge gradient */
        double v = (double)(float)rng_normal(key, (uint64_t)i);
        tensor_set(t, i, v + (v < 0 ? -0.5 : 0.5));
    }
    return alone || op_fill_documents(c, arg, t, key, 0.06);
}

/* Counted by what the chunked form needs: causal halves of K K^T and Q K^T once per key head, of
 * the solve and of the product with its solution per value head; `states` products of a row with a
 * state. */
static double flops_of(const struct tensor *v, const struct tensor *k, double chunk, double pairs, double halves,
                       double states)
{
    double rows = (double)(v->dim[0] * v->dim[1]), q = fmin(chunk, (double)v->dim[1]);
    double keys = (double)(k->dim[2] * k->dim[3]), inner = (double)(v->dim[2] * v->dim[3]), dk = (double)k->dim[3];
    return rows * (pairs * q * keys + halves * q * inner + 2 * states * inner * dk);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gdn_fwd, a, c);
    *out = (struct op_cost){.flops = flops_of(&a->v, &a->k, (double)a->chunk, 2, 2, 3), .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gdn_bwd, a, c);
    *out = (struct op_cost){.flops = flops_of(&a->v, &a->k, (double)a->chunk, 6, 5, 7), .bytes = op_bytes(c)};
}

/* A final state that is not asked for has no gradient either: no_final goes with no_dfinal. */
static const struct op_sample samples[] = {
    {"b=2 s=7"},
    {"b=1 s=1 hk=1 hv=1 dk=3 dv=1 no_doc_start=1"},
    {"b=0 s=3"},
    {"b=2 s=0"},
    {"hk=0 hv=0"},
    {"b=1 s=5 dv=0"},
    {"b=2 s=9 hk=1 hv=2 dk=1 dv=4 chunk=4"},
    {"b=1 s=21 hk=1 hv=2 dk=1 dv=9 chunk=16 no_doc_start=1"},
    {"b=2 s=6 chunk=1"},
    {"b=1 s=18 hk=1 hv=2 chunk=1 no_doc_start=1 no_init=1"},
    {"b=1 s=3 hk=3 hv=3 dk=16 dv=8 no_init=1 no_final=1 no_dfinal=1"},
    {"b=1 s=33 hk=1 hv=4 dk=16 dv=16 chunk=16 no_doc_start=1 acc_dA_log=1"},
    {"b=2 s=40 hk=2 hv=2 dk=17 dv=8 chunk=17 no_init=1 no_start=1 strided=1"},
    {"b=1 s=65 hk=1 hv=4 dk=33 dv=20 chunk=64 acc_ddt_bias=1"},
    {"b=2 s=50 hk=1 hv=2 dk=24 dv=33 chunk=400 no_doc_start=1 no_final=1 no_dfinal=1 strided=1"},
    {"b=1 s=129 hk=1 hv=2 dk=32 dv=64 chunk=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
    {"b=1 s=300 hk=1 hv=4 dk=16 dv=16 chunk=64 no_init=1 no_start=1 no_final=1 no_dfinal=1"},
    {"b=1 s=140 hk=1 hv=1 dk=20 dv=48 chunk=64 strided=1"},
    /* tiles of the GPU: whole, one row past, widths inside a tile, more heads than warps, chunks of several pieces */
    {"b=2 s=129 hk=1 hv=2 dk=128 dv=128"},
    {"b=2 s=66 hk=1 hv=5 dk=72 dv=40 chunk=48"},
    {"b=1 s=230 hk=2 hv=2 dk=64 dv=128 chunk=100 no_start=1"},
    {"b=1 s=64 hk=1 hv=1 dk=128 dv=56 chunk=64 no_doc_start=1 no_init=1 no_final=1 no_dfinal=1"},
    {"b=1 s=17 hk=1 hv=3 dk=8 dv=8 chunk=5"},
};
static const struct op_sample bench[] = {
    {"b=16 s=256 hk=4 hv=4 dk=64 dv=64 no_init=1 no_doc_start=1 no_start=1 no_final=1 no_dfinal=1"},
    {"b=1 s=4096 hk=8 hv=16 dk=128 dv=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
    {"b=4 s=4096 hk=16 hv=32 dk=128 dv=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
};

OP_TABLES(gdn_fwd, GDN_FWD_FIELDS);
const struct op_desc gdn_fwd_desc = {
    OP_IS(gdn_fwd),
    .summary = "gated delta rule, in chunks",
    OP_LIST(dims, dims),
    .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "gdn_bwd",
    .tolerance = 5e-6,
    .narrow = 3e-3, /* S, R, X and P are rounded where they meet */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(gdn_bwd, GDN_BWD_FIELDS);
const struct op_desc gdn_bwd_desc = {
    OP_IS(gdn_bwd),
    .summary = "gradient of gdn_fwd",
    OP_LIST(dims, dims),
    .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 2e-5,
    .narrow = 8e-3, /* and so are E, dO, dV, and the gradients of the products */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
