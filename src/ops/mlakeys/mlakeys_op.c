/* mlakeys: argument checks, cost, descriptors, test samples; see mlakeys.h. */
#include "ops/check.h"
#include "ops/mlakeys/mlakeys.h"
#include "ops/opdesc.h"

int mlakeys_fwd_check(const struct mlakeys_fwd_args *a, struct err *e)
{
    enum dtype real = a->kv.dtype;
    CHECK_T("mlakeys_fwd", "k", &a->k, real, 3, -1, -1, -1);
    CHECK_T("mlakeys_fwd", "shared", &a->shared, real, 2, a->k.dim[0], -1);
    CHECK_T("mlakeys_fwd", "kv", &a->kv, real, 3, a->k.dim[0], a->k.dim[1], -1);
    if (a->shared.dim[1] <= a->k.dim[2] && a->kv.dim[2] >= a->k.dim[2] - a->shared.dim[1])
        return ST_OK;
    return err_set(e, ST_INVALID, "mlakeys_fwd: keys of %lld cannot be made of %lld own and %lld shared channels", (long long)a->k.dim[2],
                   (long long)a->kv.dim[2], (long long)a->shared.dim[1]);
}

int mlakeys_bwd_check(const struct mlakeys_bwd_args *a, struct err *e)
{
    enum dtype real = a->dk.dtype;
    CHECK_T("mlakeys_bwd", "dk", &a->dk, real, 3, -1, -1, -1);
    if (a->nope < 0 || a->nope > a->dk.dim[2])
        return err_set(e, ST_INVALID, "mlakeys_bwd: nope is %lld, keys have %lld channels", (long long)a->nope, (long long)a->dk.dim[2]);
    CHECK_OPT("mlakeys_bwd", "dshared", &a->dshared, real, 2, a->dk.dim[0], a->dk.dim[2] - a->nope);
    CHECK_OPT("mlakeys_bwd", "dkv", &a->dkv, real, 3, a->dk.dim[0], a->dk.dim[1], -1);
    if (present(&a->dkv) && a->dkv.dim[2] < a->nope)
        return err_set(e, ST_INVALID, "mlakeys_bwd: dkv has %lld channels, nope is %lld", (long long)a->dkv.dim[2], (long long)a->nope);
    return ST_OK;
}

static const struct op_dim dims[] = {{"tokens", 5}, {"heads", 3}, {"nope", 6}, {"rope", 4}};

static struct tensor shape3(const struct op_call *c, int64_t last)
{
    return tensor_3d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[1], last);
}

enum { F_KV, F_SHARED, F_K };
static const struct op_arg fwd_args[] = {{.name = "kv"}, {.name = "shared"}, {.name = "k", .role = ARG_OUT}};

/* The descriptor's kv holds no value part, so that its gradient is complete. */
static void fwd_shapes(struct op_call *c)
{
    c->t[F_KV] = shape3(c, (int64_t)c->dim[2]);
    c->t[F_SHARED] = tensor_2d(NULL, DT_NONE, (int64_t)c->dim[0], (int64_t)c->dim[3]);
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    const struct tensor *kv = &c->t[F_KV];
    c->t[F_K] = tensor_3d(NULL, kv->dtype, kv->dim[0], kv->dim[1], kv->dim[2] + c->t[F_SHARED].dim[1]);
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct mlakeys_fwd_args a = {.kv = c->t[F_KV], .shared = c->t[F_SHARED], .k = c->t[F_K]};
    return ops->mlakeys_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.bytes = 2.0 * (double)tensor_bytes(&c->t[F_K])};
}

enum { B_DK, B_DKV, B_DSHARED };
static const struct op_arg bwd_args[] = {{.name = "dk"}, {.name = "dkv", .role = ARG_OOUT}, {.name = "dshared", .role = ARG_OOUT}};
static const struct op_attr bwd_attrs[] = {{.name = "nope", .value = 6}};

static void bwd_shapes(struct op_call *c) { c->t[B_DK] = shape3(c, (int64_t)(c->dim[2] + c->dim[3])); }

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    (void)e;
    const struct tensor *dk = &c->t[B_DK];
    int64_t nope = (int64_t)c->attr[0];
    c->t[B_DKV] = tensor_3d(NULL, dk->dtype, dk->dim[0], dk->dim[1], nope);
    c->t[B_DSHARED] = tensor_2d(NULL, dk->dtype, dk->dim[0], dk->dim[2] - nope);
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct mlakeys_bwd_args a = {.dk = c->t[B_DK], .dkv = c->t[B_DKV], .dshared = c->t[B_DSHARED], .nope = (int64_t)c->attr[0]};
    return ops->mlakeys_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = (double)tensor_elems(&c->t[B_DK]), .bytes = 2.0 * (double)tensor_bytes(&c->t[B_DK])};
}

static const struct op_sample samples[] = {{"tokens=5 heads=3 nope=6 rope=4"}, {"tokens=1 heads=1 nope=1 rope=1"}, {"tokens=0 heads=2"},
                                           {"tokens=33 heads=7 nope=16 rope=8 strided=1"}, {"tokens=4 heads=2 nope=0 rope=4"},
                                           {"tokens=37 heads=5 nope=128 rope=64"}, {"tokens=6 heads=2 nope=8 rope=8 no_dkv=1"},
                                           {"tokens=6 heads=2 nope=8 rope=8 no_dshared=1"}};
enum { BACKWARD_ONLY = 2 }; /* gradcheck wants every gradient of an input that is there */
static const struct op_sample bench[] = {{"tokens=4096 heads=8 nope=128 rope=64"}, {"tokens=16384 heads=16 nope=128 rope=64 gpu=1"}};

OP_TABLES(mlakeys_fwd, MLAKEYS_FWD_FIELDS);
const struct op_desc mlakeys_fwd_desc = {
    OP_IS(mlakeys_fwd), .summary = "keys of multi-latent attention from own and shared parts",
    OP_LIST(args, fwd_args), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .backward = "mlakeys_bwd", .tolerance = 1e-7,
    .samples = samples, .n_samples = countof(samples) - BACKWARD_ONLY, OP_LIST(bench, bench),
};
OP_TABLES(mlakeys_bwd, MLAKEYS_BWD_FIELDS);
const struct op_desc mlakeys_bwd_desc = {
    OP_IS(mlakeys_bwd), .summary = "gradient of mlakeys_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .tolerance = 1e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
