/* mlakeys: argument checks, cost, descriptors, test samples; see mlakeys.h. */
#include "ops/check.h"
#include "ops/mlakeys/mlakeys.h"
#include "ops/opshape.h"

int mlakeys_fwd_check(const struct mlakeys_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&mlakeys_fwd_desc, a, e));
    if (a->shared.dim[1] <= a->k.dim[2] && a->kv.dim[2] >= a->k.dim[2] - a->shared.dim[1])
        return ST_OK;
    return err_set(e, ST_INVALID, "mlakeys_fwd: keys of %lld cannot be made of %lld own and %lld shared channels",
                   (long long)a->k.dim[2], (long long)a->kv.dim[2], (long long)a->shared.dim[1]);
}

int mlakeys_bwd_check(const struct mlakeys_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&mlakeys_bwd_desc, a, e));
    if (a->nope < 0 || a->nope > a->dk.dim[2])
        return err_set(e, ST_INVALID, "mlakeys_bwd: nope is %lld, keys have %lld channels", (long long)a->nope,
                       (long long)a->dk.dim[2]);
    if (present(&a->dkv) && a->dkv.dim[2] < a->nope)
        return err_set(e, ST_INVALID, "mlakeys_bwd: dkv has %lld channels, nope is %lld", (long long)a->dkv.dim[2],
                       (long long)a->nope);
    return ST_OK;
}

static const struct op_dim dims[] = {{"tokens", 5}, {"heads", 3}, {"nope", 6}, {"rope", 4}};

/* The descriptor's kv holds no value part, so that its gradient is complete. */
static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(mlakeys_fwd, a, c);
    *out = (struct op_cost){.bytes = 2.0 * (double)tensor_bytes(&a->k)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(mlakeys_bwd, a, c);
    *out = (struct op_cost){.flops = (double)tensor_elems(&a->dk), .bytes = 2.0 * (double)tensor_bytes(&a->dk)};
}

static const struct op_sample samples[] = {{"tokens=5 heads=3 nope=6 rope=4"},
                                           {"tokens=1 heads=1 nope=1 rope=1"},
                                           {"tokens=0 heads=2"},
                                           {"tokens=33 heads=7 nope=16 rope=8 strided=1"},
                                           {"tokens=4 heads=2 nope=0 rope=4"},
                                           {"tokens=37 heads=5 nope=128 rope=64"},
                                           {"tokens=6 heads=2 nope=8 rope=8 no_dkv=1"},
                                           {"tokens=6 heads=2 nope=8 rope=8 no_dshared=1"}};
enum { BACKWARD_ONLY = 2 }; /* gradcheck wants every gradient of an input that is there */
static const struct op_sample bench[] = {{"tokens=4096 heads=8 nope=128 rope=64"},
                                         {"tokens=16384 heads=16 nope=128 rope=64 gpu=1"}};

OP_TABLES(mlakeys_fwd, MLAKEYS_FWD_FIELDS);
const struct op_desc mlakeys_fwd_desc = {
    OP_IS(mlakeys_fwd),        .summary = "keys of multi-latent attention from own and shared parts",
    OP_LIST(dims, dims),       .cost = fwd_cost,
    .backward = "mlakeys_bwd", .tolerance = 1e-7,
    .samples = samples,        .n_samples = countof(samples) - BACKWARD_ONLY,
    OP_LIST(bench, bench),
};
OP_TABLES(mlakeys_bwd, MLAKEYS_BWD_FIELDS);
const struct op_desc mlakeys_bwd_desc = {
    OP_IS(mlakeys_bwd),    .summary = "gradient of mlakeys_fwd",
    OP_LIST(dims, dims),   .cost = bwd_cost,
    .tolerance = 1e-6,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
