/* ssd: argument checks, cost, descriptors, test samples and bench shapes; see ssd.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/ssd/ssd.h"

#include <math.h>

static int check_common(const char *op, const struct tensor *x, const struct tensor *bm, int64_t chunk, double dt_min,
                        double dt_max, struct err *e)
{
    int64_t h = x->dim[2], g = bm->dim[2];
    if (h > 0 && (g == 0 || h % g != 0))
        return err_set(e, ST_INVALID, "%s: %lld heads are no multiple of %lld groups", op, (long long)h, (long long)g);
    if (chunk < 1 || chunk > SSD_MAX_CHUNK)
        return err_set(e, ST_INVALID, "%s: chunk is %lld, expected 1 to %d", op, (long long)chunk, SSD_MAX_CHUNK);
    if (!(dt_min >= 0) || !(dt_max >= 0) || (dt_max > 0 && dt_min > dt_max))
        return err_set(e, ST_INVALID, "%s: the range of delta is %g to %g (0: none)", op, dt_min, dt_max);
    return ST_OK;
}

int ssd_fwd_check(const struct ssd_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&ssd_fwd_desc, a, e));
    return check_common("ssd_fwd", &a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, e);
}

int ssd_bwd_check(const struct ssd_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&ssd_bwd_desc, a, e));
    return check_common("ssd_bwd", &a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, e);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"h", 4}, {"p", 5}, {"g", 2}, {"n", 6}};

/* Decay slow enough that a state outlives a chunk. */
static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (arg == op_arg_index(c->desc, "A_log")) {
        for (int64_t i = 0; i < tensor_elems(t); i++)
            tensor_set(t, i, (double)(float)(rng_normal(key, (uint64_t)i) - 2.5));
        return true;
    }
    return op_fill_documents(c, arg, t, key, 0.06);
}

/* Counted by what the chunked form needs: per row, causal halves of C B^T (once per group) and of
 * its product with x, and the state in and out. */
static double flops_of(const struct tensor *x, const struct tensor *bm, double chunk)
{
    double rows = (double)(x->dim[0] * x->dim[1]), q = fmin(chunk, (double)x->dim[1]);
    double inner = (double)(x->dim[2] * x->dim[3]), n = (double)bm->dim[3];
    return rows * (q * (double)bm->dim[2] * n + q * inner + 4 * inner * n);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(ssd_fwd, a, c);
    *out = (struct op_cost){.flops = flops_of(&a->x, &a->Bm, (double)a->chunk), .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(ssd_bwd, a, c);
    double n = (double)a->Bm.dim[3], q = fmin((double)a->chunk, (double)a->x.dim[1]);
    double rows = (double)(a->x.dim[0] * a->x.dim[1]), inner = (double)(a->x.dim[2] * a->x.dim[3]);
    double flops = rows * (3 * q * (double)a->Bm.dim[2] * n + 2 * q * inner + 8 * inner * n);
    *out = (struct op_cost){.flops = flops, .bytes = op_bytes(c)};
}

/* A final state that is not asked for has no gradient either: no_final goes with no_dfinal. */
static const struct op_sample samples[] = {
    {"b=2 s=7"},
    {"b=1 s=1 h=1 p=1 g=1 n=1 no_doc_start=1"},
    {"b=0 s=3"},
    {"b=2 s=0"},
    {"h=0 g=0"},
    {"b=1 s=5 n=0"},
    {"b=2 s=6 chunk=1 dt_min=0.5 dt_max=1.2"},
    {"b=1 s=3 h=3 g=3 p=16 n=8 no_init=1 no_final=1 no_dfinal=1"},
    {"b=1 s=33 h=4 g=1 p=16 n=16 chunk=16 no_doc_start=1 acc_dA_log=1"},
    {"b=2 s=40 h=2 g=2 p=8 n=17 chunk=17 no_D=1 no_init=1 no_start=1 strided=1"},
    {"b=1 s=65 h=9 g=1 p=20 n=33 chunk=64 acc_ddt_bias=1 acc_dD=1"},
    {"b=2 s=50 h=2 g=1 p=33 n=24 chunk=400 no_doc_start=1 no_final=1 no_dfinal=1 strided=1"},
    {"b=1 s=129 h=2 g=1 p=64 n=32 chunk=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
    {"b=1 s=300 h=2 g=1 p=16 n=16 chunk=64 no_init=1 no_start=1 no_final=1 no_dfinal=1"},
    {"b=1 s=270 h=3 g=1 p=48 n=20 chunk=256 strided=1"},
    /* whole tiles of the GPU version and one past them, its several pieces of a chunk, two blocks of heads */
    {"b=1 s=257 h=4 g=2 p=64 n=128 chunk=128"},
    {"b=2 s=144 h=3 g=1 p=64 n=128 chunk=128 no_doc_start=1 no_start=1 acc_dA_log=1 acc_ddt_bias=1 acc_dD=1"},
    {"b=1 s=400 h=2 g=1 p=64 n=64 chunk=300 no_init=1 no_start=1"},
    {"b=1 s=200 h=10 g=1 p=40 n=72 chunk=64 no_D=1"},
    {"b=1 s=70 h=2 g=1 p=72 n=136 chunk=48"},
    {"b=3 s=1 h=4 g=2 p=64 n=128 no_doc_start=1"},
};
static const struct op_sample bench[] = {
    {"b=16 s=256 h=10 p=64 g=1 n=64 chunk=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
    {"b=1 s=4096 h=32 p=64 g=8 n=128 chunk=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1"},
    {"b=4 s=4096 h=64 p=64 g=8 n=128 chunk=128 no_init=1 no_doc_start=1 no_start=1 no_final=1 "
     "no_dfinal=1 gpu=1"},
};

OP_TABLES(ssd_fwd, SSD_FWD_FIELDS);
const struct op_desc ssd_fwd_desc = {
    OP_IS(ssd_fwd),
    .summary = "state-space core of Mamba-2, in chunks",
    OP_LIST(dims, dims),
    .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "ssd_bwd",
    .tolerance = 5e-6,
    .narrow = 3e-3, /* final: of inputs times decays, rounded for the tensor cores */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES(ssd_bwd, SSD_BWD_FIELDS);
const struct op_desc ssd_bwd_desc = {
    OP_IS(ssd_bwd),
    .summary = "gradient of ssd_fwd",
    OP_LIST(dims, dims),
    .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 2e-5,
    .narrow = 4e-3, /* sums over rows of such values partly cancel */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
