/* gdn: argument checks, cost, descriptors, test samples and bench shapes; see gdn.h. */
#include "ops/check.h"
#include "ops/gdn/gdn.h"
#include "ops/opdesc.h"

#include <math.h>

struct common {
    const struct tensor *q, *k, *v, *alpha, *beta, *A_log, *dt_bias, *doc_start;
    int64_t chunk;
};

static int check_common(const char *op, const struct common *a, struct err *e)
{
    enum dtype real = a->v->dtype;
    CHECK_T(op, "v", a->v, real, 4, -1, -1, -1, -1);
    CHECK_T(op, "k", a->k, real, 4, a->v->dim[0], a->v->dim[1], -1, -1);
    int64_t b = a->v->dim[0], s = a->v->dim[1], h = a->v->dim[2], kh = a->k->dim[2];
    if ((h > 0 || kh > 0) && (kh == 0 || h == 0 || h % kh != 0))
        return err_set(e, ST_INVALID, "%s: %lld value heads are no multiple of %lld key heads", op,
                       (long long)h, (long long)kh);
    CHECK_T(op, "q", a->q, real, 4, b, s, kh, a->k->dim[3]);
    CHECK_T(op, "alpha", a->alpha, real, 3, b, s, h);
    CHECK_T(op, "beta", a->beta, real, 3, b, s, h);
    CHECK_T(op, "A_log", a->A_log, wide_of(real), 1, h);
    CHECK_T(op, "dt_bias", a->dt_bias, wide_of(real), 1, h);
    CHECK_OPT(op, "doc_start", a->doc_start, DT_I32, 2, b, s);
    if (a->chunk < 1 || a->chunk > GDN_MAX_CHUNK)
        return err_set(e, ST_INVALID, "%s: chunk is %lld, expected 1 to %d", op,
                       (long long)a->chunk, GDN_MAX_CHUNK);
    return ST_OK;
}

int gdn_fwd_check(const struct gdn_fwd_args *a, struct err *e)
{
    const char *op = "gdn_fwd";
    enum dtype real = a->v.dtype;
    TRY(check_common(op,
                     &(struct common){&a->q, &a->k, &a->v, &a->alpha, &a->beta, &a->A_log,
                                      &a->dt_bias, &a->doc_start, a->chunk},
                     e));
    int64_t b = a->v.dim[0], s = a->v.dim[1], h = a->v.dim[2], dv = a->v.dim[3], dk = a->k.dim[3];
    CHECK_T(op, "o", &a->o, real, 4, b, s, h, dv);
    CHECK_OPT(op, "init", &a->init, wide_of(real), 4, b, h, dk, dv);
    CHECK_OPT(op, "start", &a->start, DT_I64, 1, 1);
    CHECK_OPT(op, "final", &a->final, wide_of(real), 4, b, h, dk, dv);
    CHECK_OPT(op, "states", &a->states, real, 5, b, ceil_div(s, a->chunk), h, dk, dv);
    return ST_OK;
}

int gdn_bwd_check(const struct gdn_bwd_args *a, struct err *e)
{
    const char *op = "gdn_bwd";
    enum dtype real = a->v.dtype;
    TRY(check_common(op,
                     &(struct common){&a->q, &a->k, &a->v, &a->alpha, &a->beta, &a->A_log,
                                      &a->dt_bias, &a->doc_start, a->chunk},
                     e));
    int64_t b = a->v.dim[0], s = a->v.dim[1], h = a->v.dim[2], dv = a->v.dim[3], kh = a->k.dim[2],
            dk = a->k.dim[3];
    CHECK_T(op, "do", &a->d_o, real, 4, b, s, h, dv);
    CHECK_OPT(op, "dfinal", &a->dfinal, wide_of(real), 4, b, h, dk, dv);
    CHECK_T(op, "states", &a->states, real, 5, b, ceil_div(s, a->chunk), h, dk, dv);
    CHECK_T(op, "dq", &a->dq, real, 4, b, s, kh, dk);
    CHECK_T(op, "dk", &a->dk, real, 4, b, s, kh, dk);
    CHECK_T(op, "dv", &a->dv, real, 4, b, s, h, dv);
    CHECK_T(op, "dalpha", &a->dalpha, real, 3, b, s, h);
    CHECK_T(op, "dbeta", &a->dbeta, real, 3, b, s, h);
    CHECK_T(op, "dA_log", &a->dA_log, wide_of(real), 1, h);
    CHECK_T(op, "ddt_bias", &a->ddt_bias, wide_of(real), 1, h);
    CHECK_OPT(op, "dinit", &a->dinit, wide_of(real), 4, b, h, dk, dv);
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

enum { BATCH, S, HK, HV, DK, DV };
static const struct op_dim dims[] = {{"b", 2},  {"s", 7},  {"hk", 2},
                                      {"hv", 4}, {"dk", 6}, {"dv", 5}};

static int64_t size_of(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }
static struct tensor rows_like(const struct op_call *c, int heads, int width)
{
    return tensor_4d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, S), size_of(c, heads),
                     size_of(c, width));
}
static struct tensor gate_like(const struct op_call *c)
{
    return tensor_3d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, S), size_of(c, HV));
}
static struct tensor state_like(const struct op_call *c)
{
    return tensor_4d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, HV), size_of(c, DK),
                     size_of(c, DV));
}
static struct tensor states_like(enum dtype dtype, const struct tensor *v, const struct tensor *k,
                                 double chunk)
{
    int64_t q = chunk >= 1 && chunk <= GDN_MAX_CHUNK ? (int64_t)chunk : 1;
    return tensor_shape(
        dtype, 5,
        (const int64_t[]){v->dim[0], ceil_div(v->dim[1], q), v->dim[2], k->dim[3], v->dim[3]});
}

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

static int check_shapes(const char *op, const struct tensor *v, const struct tensor *k,
                        double chunk, struct err *e)
{
    if (!(chunk >= 1 && chunk <= GDN_MAX_CHUNK))
        return err_set(e, ST_INVALID, "%s: chunk is %g, expected 1 to %d", op, chunk,
                       GDN_MAX_CHUNK);
    if (v->rank != 4 || k->rank != 4)
        return err_set(e, ST_INVALID, "%s: v and k must have rank 4: batch, row, head, channel",
                       op);
    return ST_OK;
}

/* Counted by what the chunked form needs: causal halves of K K^T and Q K^T once per key head, of
 * the solve and of the product with its solution per value head; `states` products of a row with a
 * state. */
static double flops_of(const struct tensor *v, const struct tensor *k, double chunk, double pairs,
                       double halves, double states)
{
    double rows = (double)(v->dim[0] * v->dim[1]), q = fmin(chunk, (double)v->dim[1]);
    double keys = (double)(k->dim[2] * k->dim[3]), inner = (double)(v->dim[2] * v->dim[3]),
           dk = (double)k->dim[3];
    return rows * (pairs * q * keys + halves * q * inner + 2 * states * inner * dk);
}

enum {
    F_Q,
    F_K,
    F_V,
    F_ALPHA,
    F_BETA,
    F_ALOG,
    F_BIAS,
    F_INIT,
    F_DOC,
    F_START,
    F_O,
    F_STATES,
    F_FINAL,
    F_WORK
};
static const struct op_arg fwd_args[] = {
    {.name = "q"},
    {.name = "k"},
    {.name = "v"},
    {.name = "alpha"},
    {.name = "beta"},
    {.name = "A_log", .type = ARG_WIDE},
    {.name = "dt_bias", .type = ARG_WIDE},
    {.name = "init", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "start", .role = ARG_OPT, .type = ARG_I64},
    {.name = "o", .role = ARG_OUT},
    {.name = "states", .role = ARG_OOUT, .no_grad = true},
    {.name = "final", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr fwd_attrs[] = {{.name = "chunk", .value = 64}};

static void fwd_shapes(struct op_call *c)
{
    c->t[F_Q] = c->t[F_K] = rows_like(c, HK, DK);
    c->t[F_V] = rows_like(c, HV, DV);
    c->t[F_ALPHA] = c->t[F_BETA] = gate_like(c);
    c->t[F_ALOG] = c->t[F_BIAS] = tensor_1d(NULL, DT_NONE, size_of(c, HV));
    c->t[F_INIT] = state_like(c);
    c->t[F_DOC] = tensor_2d(NULL, DT_I32, size_of(c, BATCH), size_of(c, S));
    c->t[F_START] = tensor_1d(NULL, DT_I64, 1);
}

static struct gdn_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct gdn_fwd_args){.q = c->t[F_Q],
                                 .k = c->t[F_K],
                                 .v = c->t[F_V],
                                 .alpha = c->t[F_ALPHA],
                                 .beta = c->t[F_BETA],
                                 .A_log = c->t[F_ALOG],
                                 .dt_bias = c->t[F_BIAS],
                                 .init = c->t[F_INIT],
                                 .doc_start = c->t[F_DOC],
                                 .start = c->t[F_START],
                                 .o = c->t[F_O],
                                 .states = c->t[F_STATES],
                                 .final = c->t[F_FINAL],
                                 .work = c->t[F_WORK],
                                 .chunk = (int64_t)c->attr[0]};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *v = &c->t[F_V], *k = &c->t[F_K];
    TRY(check_shapes("gdn_fwd", v, k, c->attr[0], e));
    c->t[F_O] = tensor_shape(v->dtype, 4, v->dim);
    c->t[F_STATES] = states_like(v->dtype, v, k, c->attr[0]);
    c->t[F_FINAL] = tensor_4d(NULL, wide_of(v->dtype), v->dim[0], v->dim[2], k->dim[3], v->dim[3]);
    struct gdn_fwd_args a = fwd_pack(c);
    c->t[F_WORK] = tensor_1d(NULL, DT_U8, ops->gdn_fwd_work(&a));
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gdn_fwd_args a = fwd_pack(c);
    return ops->gdn_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = flops_of(&c->t[F_V], &c->t[F_K], c->attr[0], 2, 2, 3),
                            .bytes = op_bytes(c)};
}

enum {
    B_DO,
    B_DFINAL,
    B_Q,
    B_K,
    B_V,
    B_ALPHA,
    B_BETA,
    B_ALOG,
    B_BIAS,
    B_DOC,
    B_STATES,
    B_DQ,
    B_DK,
    B_DV,
    B_DALPHA,
    B_DBETA,
    B_DALOG,
    B_DBIAS,
    B_DINIT,
    B_WORK
};
static const struct op_arg bwd_args[] = {
    {.name = "do"},
    {.name = "dfinal", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "q"},
    {.name = "k"},
    {.name = "v"},
    {.name = "alpha"},
    {.name = "beta"},
    {.name = "A_log", .type = ARG_WIDE},
    {.name = "dt_bias", .type = ARG_WIDE},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "states"},
    {.name = "dq", .role = ARG_OUT},
    {.name = "dk", .role = ARG_OUT},
    {.name = "dv", .role = ARG_OUT},
    {.name = "dalpha", .role = ARG_OUT},
    {.name = "dbeta", .role = ARG_OUT},
    {.name = "dA_log", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "ddt_bias", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "dinit", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "chunk", .value = 64}, {.name = "acc_dA_log", .value = 0}, {.name = "acc_ddt_bias", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    c->t[B_DO] = c->t[B_V] = rows_like(c, HV, DV);
    c->t[B_Q] = c->t[B_K] = rows_like(c, HK, DK);
    c->t[B_DFINAL] = state_like(c);
    c->t[B_ALPHA] = c->t[B_BETA] = gate_like(c);
    c->t[B_ALOG] = c->t[B_BIAS] = tensor_1d(NULL, DT_NONE, size_of(c, HV));
    c->t[B_DOC] = tensor_2d(NULL, DT_I32, size_of(c, BATCH), size_of(c, S));
    c->t[B_STATES] = states_like(DT_NONE, &c->t[B_V], &c->t[B_K], c->attr[0]);
}

static struct gdn_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct gdn_bwd_args){.d_o = c->t[B_DO],
                                 .dfinal = c->t[B_DFINAL],
                                 .q = c->t[B_Q],
                                 .k = c->t[B_K],
                                 .v = c->t[B_V],
                                 .alpha = c->t[B_ALPHA],
                                 .beta = c->t[B_BETA],
                                 .A_log = c->t[B_ALOG],
                                 .dt_bias = c->t[B_BIAS],
                                 .doc_start = c->t[B_DOC],
                                 .states = c->t[B_STATES],
                                 .dq = c->t[B_DQ],
                                 .dk = c->t[B_DK],
                                 .dv = c->t[B_DV],
                                 .dalpha = c->t[B_DALPHA],
                                 .dbeta = c->t[B_DBETA],
                                 .dA_log = c->t[B_DALOG],
                                 .ddt_bias = c->t[B_DBIAS],
                                 .dinit = c->t[B_DINIT],
                                 .work = c->t[B_WORK],
                                 .chunk = (int64_t)c->attr[0],
                                 .acc_dA_log = c->attr[1] != 0,
                                 .acc_ddt_bias = c->attr[2] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *v = &c->t[B_V], *k = &c->t[B_K];
    TRY(check_shapes("gdn_bwd", v, k, c->attr[0], e));
    enum dtype real = v->dtype;
    c->t[B_DQ] = c->t[B_DK] = tensor_shape(real, 4, k->dim);
    c->t[B_DV] = tensor_shape(real, 4, v->dim);
    c->t[B_DALPHA] = c->t[B_DBETA] = tensor_3d(NULL, real, v->dim[0], v->dim[1], v->dim[2]);
    c->t[B_DALOG] = c->t[B_DBIAS] = tensor_1d(NULL, wide_of(real), v->dim[2]);
    c->t[B_DINIT] = tensor_4d(NULL, wide_of(real), v->dim[0], v->dim[2], k->dim[3], v->dim[3]);
    struct gdn_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->gdn_bwd_work(&a));
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct gdn_bwd_args a = bwd_pack(c);
    return ops->gdn_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = flops_of(&c->t[B_V], &c->t[B_K], c->attr[0], 6, 5, 7),
                            .bytes = op_bytes(c)};
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
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "gdn_bwd",
    .tolerance = 5e-6,
    .narrow = 3e-3, /* S, R, X and P are rounded where they meet */
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(gdn_bwd, GDN_BWD_FIELDS);
const struct op_desc gdn_bwd_desc = {
    OP_IS(gdn_bwd),
    .summary = "gradient of gdn_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 2e-5,
    .narrow = 8e-3, /* and so are E, dO, dV, and the gradients of the products */
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
