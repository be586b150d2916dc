/* ssd: argument checks, cost, descriptors, test samples and bench shapes; see ssd.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ssd/ssd.h"

#include <math.h>

struct common {
    const struct tensor *x, *dt, *A_log, *dt_bias, *D, *Bm, *Cm, *doc_start;
    int64_t chunk;
    double dt_min, dt_max;
};

static int check_common(const char *op, const struct common *a, struct err *e)
{
    enum dtype real = a->x->dtype;
    CHECK_T(op, "x", a->x, real, 4, -1, -1, -1, -1);
    CHECK_T(op, "Bm", a->Bm, real, 4, a->x->dim[0], a->x->dim[1], -1, -1);
    int64_t b = a->x->dim[0], s = a->x->dim[1], h = a->x->dim[2], g = a->Bm->dim[2];
    if (h > 0 && (g == 0 || h % g != 0))
        return err_set(e, ST_INVALID, "%s: %lld heads are no multiple of %lld groups", op,
                       (long long)h, (long long)g);
    CHECK_T(op, "Cm", a->Cm, real, 4, b, s, g, a->Bm->dim[3]);
    CHECK_T(op, "dt", a->dt, real, 3, b, s, h);
    CHECK_T(op, "A_log", a->A_log, wide_of(real), 1, h);
    CHECK_T(op, "dt_bias", a->dt_bias, wide_of(real), 1, h);
    CHECK_OPT(op, "D", a->D, wide_of(real), 1, h);
    CHECK_OPT(op, "doc_start", a->doc_start, DT_I32, 2, b, s);
    if (a->chunk < 1 || a->chunk > SSD_MAX_CHUNK)
        return err_set(e, ST_INVALID, "%s: chunk is %lld, expected 1 to %d", op,
                       (long long)a->chunk, SSD_MAX_CHUNK);
    if (!(a->dt_min >= 0) || !(a->dt_max >= 0) || (a->dt_max > 0 && a->dt_min > a->dt_max))
        return err_set(e, ST_INVALID, "%s: the range of delta is %g to %g (0: none)", op, a->dt_min,
                       a->dt_max);
    return ST_OK;
}

int ssd_fwd_check(const struct ssd_fwd_args *a, struct err *e)
{
    const char *op = "ssd_fwd";
    enum dtype real = a->x.dtype;
    TRY(check_common(op,
                     &(struct common){&a->x, &a->dt, &a->A_log, &a->dt_bias, &a->D, &a->Bm, &a->Cm,
                                      &a->doc_start, a->chunk, a->dt_min, a->dt_max},
                     e));
    int64_t b = a->x.dim[0], s = a->x.dim[1], h = a->x.dim[2], p = a->x.dim[3], n = a->Bm.dim[3];
    CHECK_T(op, "y", &a->y, real, 4, b, s, h, p);
    CHECK_OPT(op, "init", &a->init, wide_of(real), 4, b, h, n, p);
    CHECK_OPT(op, "start", &a->start, DT_I64, 1, 1);
    CHECK_OPT(op, "final", &a->final, wide_of(real), 4, b, h, n, p);
    CHECK_OPT(op, "states", &a->states, real, 5, b, ceil_div(s, a->chunk), h, n, p);
    return ST_OK;
}

int ssd_bwd_check(const struct ssd_bwd_args *a, struct err *e)
{
    const char *op = "ssd_bwd";
    enum dtype real = a->x.dtype;
    TRY(check_common(op,
                     &(struct common){&a->x, &a->dt, &a->A_log, &a->dt_bias, &a->D, &a->Bm, &a->Cm,
                                      &a->doc_start, a->chunk, a->dt_min, a->dt_max},
                     e));
    int64_t b = a->x.dim[0], s = a->x.dim[1], h = a->x.dim[2], p = a->x.dim[3], g = a->Bm.dim[2],
            n = a->Bm.dim[3];
    CHECK_T(op, "dy", &a->dy, real, 4, b, s, h, p);
    CHECK_OPT(op, "dfinal", &a->dfinal, wide_of(real), 4, b, h, n, p);
    CHECK_T(op, "states", &a->states, real, 5, b, ceil_div(s, a->chunk), h, n, p);
    CHECK_T(op, "dx", &a->dx, real, 4, b, s, h, p);
    CHECK_T(op, "ddt", &a->ddt, real, 3, b, s, h);
    CHECK_T(op, "dA_log", &a->dA_log, wide_of(real), 1, h);
    CHECK_T(op, "ddt_bias", &a->ddt_bias, wide_of(real), 1, h);
    if (present(&a->D))
        CHECK_T(op, "dD", &a->dD, wide_of(real), 1, h);
    CHECK_T(op, "dBm", &a->dBm, real, 4, b, s, g, n);
    CHECK_T(op, "dCm", &a->dCm, real, 4, b, s, g, n);
    CHECK_OPT(op, "dinit", &a->dinit, wide_of(real), 4, b, h, n, p);
    return ST_OK;
}

/* ---- descriptors --------------------------------------------------------------------------- */

enum { BATCH, S, H, P, G, N };
static const struct op_dim dims[] = {{"b", 2}, {"s", 7}, {"h", 4}, {"p", 5}, {"g", 2}, {"n", 6}};

static int64_t size_of(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }
static struct tensor per_row(const struct op_call *c, int heads, int width)
{
    return tensor_4d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, S), size_of(c, heads),
                     size_of(c, width));
}
static struct tensor state_like(const struct op_call *c)
{
    return tensor_4d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, H), size_of(c, N), size_of(c, P));
}
static struct tensor states_like(enum dtype dtype, const struct tensor *x, const struct tensor *bm,
                                 double chunk)
{
    int64_t q = chunk >= 1 && chunk <= SSD_MAX_CHUNK ? (int64_t)chunk : 1;
    return tensor_shape(
        dtype, 5,
        (const int64_t[]){x->dim[0], ceil_div(x->dim[1], q), x->dim[2], bm->dim[3], x->dim[3]});
}

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

static int check_shapes(const char *op, const struct tensor *x, const struct tensor *bm,
                        double chunk, struct err *e)
{
    if (!(chunk >= 1 && chunk <= SSD_MAX_CHUNK))
        return err_set(e, ST_INVALID, "%s: chunk is %g, expected 1 to %d", op, chunk,
                       SSD_MAX_CHUNK);
    if (x->rank != 4 || bm->rank != 4)
        return err_set(e, ST_INVALID,
                       "%s: x and Bm must have rank 4: batch, row, head or group, channel", op);
    return ST_OK;
}

/* Counted by what the chunked form needs: per row, causal halves of C B^T (once per group) and of
 * its product with x, and the state in and out. */
static double flops_of(const struct tensor *x, const struct tensor *bm, double chunk)
{
    double rows = (double)(x->dim[0] * x->dim[1]), q = fmin(chunk, (double)x->dim[1]);
    double inner = (double)(x->dim[2] * x->dim[3]), n = (double)bm->dim[3];
    return rows * (q * (double)bm->dim[2] * n + q * inner + 4 * inner * n);
}

enum {
    F_X,
    F_DT,
    F_ALOG,
    F_BIAS,
    F_D,
    F_B,
    F_C,
    F_INIT,
    F_DOC,
    F_START,
    F_Y,
    F_STATES,
    F_FINAL,
    F_WORK
};
static const struct op_arg fwd_args[] = {
    {.name = "x"},
    {.name = "dt"},
    {.name = "A_log", .type = ARG_WIDE},
    {.name = "dt_bias", .type = ARG_WIDE},
    {.name = "D", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "Bm"},
    {.name = "Cm"},
    {.name = "init", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "start", .role = ARG_OPT, .type = ARG_I64},
    {.name = "y", .role = ARG_OUT},
    {.name = "states", .role = ARG_OOUT, .no_grad = true},
    {.name = "final", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr fwd_attrs[] = {{.name = "chunk", .value = 128}, {.name = "dt_min", .value = 0}, {.name = "dt_max", .value = 0}};

static void fwd_shapes(struct op_call *c)
{
    struct tensor per_head = tensor_1d(NULL, DT_NONE, size_of(c, H));
    c->t[F_X] = per_row(c, H, P);
    c->t[F_DT] = tensor_3d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, S), size_of(c, H));
    c->t[F_ALOG] = c->t[F_BIAS] = c->t[F_D] = per_head;
    c->t[F_B] = c->t[F_C] = per_row(c, G, N);
    c->t[F_INIT] = state_like(c);
    c->t[F_DOC] = tensor_2d(NULL, DT_I32, size_of(c, BATCH), size_of(c, S));
    c->t[F_START] = tensor_1d(NULL, DT_I64, 1);
}

static struct ssd_fwd_args fwd_pack(const struct op_call *c)
{
    return (struct ssd_fwd_args){.x = c->t[F_X],
                                 .dt = c->t[F_DT],
                                 .A_log = c->t[F_ALOG],
                                 .dt_bias = c->t[F_BIAS],
                                 .D = c->t[F_D],
                                 .Bm = c->t[F_B],
                                 .Cm = c->t[F_C],
                                 .init = c->t[F_INIT],
                                 .doc_start = c->t[F_DOC],
                                 .start = c->t[F_START],
                                 .y = c->t[F_Y],
                                 .states = c->t[F_STATES],
                                 .final = c->t[F_FINAL],
                                 .work = c->t[F_WORK],
                                 .chunk = (int64_t)c->attr[0],
                                 .dt_min = c->attr[1],
                                 .dt_max = c->attr[2]};
}

static int fwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[F_X], *bm = &c->t[F_B];
    TRY(check_shapes("ssd_fwd", x, bm, c->attr[0], e));
    c->t[F_Y] = tensor_shape(x->dtype, 4, x->dim);
    c->t[F_STATES] = states_like(x->dtype, x, bm, c->attr[0]);
    c->t[F_FINAL] = tensor_4d(NULL, wide_of(x->dtype), x->dim[0], x->dim[2], bm->dim[3], x->dim[3]);
    struct ssd_fwd_args a = fwd_pack(c);
    c->t[F_WORK] = tensor_1d(NULL, DT_U8, ops->ssd_fwd_work(&a));
    return ST_OK;
}

static int fwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct ssd_fwd_args a = fwd_pack(c);
    return ops->ssd_fwd(lane, &a);
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.flops = flops_of(&c->t[F_X], &c->t[F_B], c->attr[0]),
                            .bytes = op_bytes(c)};
}

enum {
    B_DY,
    B_DFINAL,
    B_X,
    B_DT,
    B_ALOG,
    B_BIAS,
    B_D,
    B_B,
    B_C,
    B_DOC,
    B_STATES,
    B_DX,
    B_DDT,
    B_DALOG,
    B_DBIAS,
    B_DD,
    B_DB,
    B_DC,
    B_DINIT,
    B_WORK
};
static const struct op_arg bwd_args[] = {
    {.name = "dy"},
    {.name = "dfinal", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "x"},
    {.name = "dt"},
    {.name = "A_log", .type = ARG_WIDE},
    {.name = "dt_bias", .type = ARG_WIDE},
    {.name = "D", .role = ARG_OPT, .type = ARG_WIDE},
    {.name = "Bm"},
    {.name = "Cm"},
    {.name = "doc_start", .role = ARG_OPT, .type = ARG_I32},
    {.name = "states"},
    {.name = "dx", .role = ARG_OUT},
    {.name = "ddt", .role = ARG_OUT},
    {.name = "dA_log", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "ddt_bias", .role = ARG_OUT, .type = ARG_WIDE},
    {.name = "dD", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "dBm", .role = ARG_OUT},
    {.name = "dCm", .role = ARG_OUT},
    {.name = "dinit", .role = ARG_OOUT, .type = ARG_WIDE},
    {.name = "work", .role = ARG_WORK, .type = ARG_U8},
};
static const struct op_attr bwd_attrs[] = {{.name = "chunk", .value = 128},    {.name = "dt_min", .value = 0},       {.name = "dt_max", .value = 0},
                                           {.name = "acc_dA_log", .value = 0}, {.name = "acc_ddt_bias", .value = 0}, {.name = "acc_dD", .value = 0}};

static void bwd_shapes(struct op_call *c)
{
    struct tensor per_head = tensor_1d(NULL, DT_NONE, size_of(c, H));
    c->t[B_DY] = c->t[B_X] = per_row(c, H, P);
    c->t[B_DFINAL] = state_like(c);
    c->t[B_DT] = tensor_3d(NULL, DT_NONE, size_of(c, BATCH), size_of(c, S), size_of(c, H));
    c->t[B_ALOG] = c->t[B_BIAS] = c->t[B_D] = per_head;
    c->t[B_B] = c->t[B_C] = per_row(c, G, N);
    c->t[B_DOC] = tensor_2d(NULL, DT_I32, size_of(c, BATCH), size_of(c, S));
    c->t[B_STATES] = states_like(DT_NONE, &c->t[B_X], &c->t[B_B], c->attr[0]);
}

static struct ssd_bwd_args bwd_pack(const struct op_call *c)
{
    return (struct ssd_bwd_args){.dy = c->t[B_DY],
                                 .dfinal = c->t[B_DFINAL],
                                 .x = c->t[B_X],
                                 .dt = c->t[B_DT],
                                 .A_log = c->t[B_ALOG],
                                 .dt_bias = c->t[B_BIAS],
                                 .D = c->t[B_D],
                                 .Bm = c->t[B_B],
                                 .Cm = c->t[B_C],
                                 .doc_start = c->t[B_DOC],
                                 .states = c->t[B_STATES],
                                 .dx = c->t[B_DX],
                                 .ddt = c->t[B_DDT],
                                 .dA_log = c->t[B_DALOG],
                                 .ddt_bias = c->t[B_DBIAS],
                                 .dD = c->t[B_DD],
                                 .dBm = c->t[B_DB],
                                 .dCm = c->t[B_DC],
                                 .dinit = c->t[B_DINIT],
                                 .work = c->t[B_WORK],
                                 .chunk = (int64_t)c->attr[0],
                                 .dt_min = c->attr[1],
                                 .dt_max = c->attr[2],
                                 .acc_dA_log = c->attr[3] != 0,
                                 .acc_ddt_bias = c->attr[4] != 0,
                                 .acc_dD = c->attr[5] != 0};
}

static int bwd_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[B_X], *bm = &c->t[B_B];
    TRY(check_shapes("ssd_bwd", x, bm, c->attr[0], e));
    enum dtype real = x->dtype, wide_type = wide_of(real);
    c->t[B_DX] = tensor_shape(real, 4, x->dim);
    c->t[B_DDT] = tensor_3d(NULL, real, x->dim[0], x->dim[1], x->dim[2]);
    c->t[B_DALOG] = c->t[B_DBIAS] = tensor_1d(NULL, wide_type, x->dim[2]);
    if (c->t[B_D].rank > 0)
        c->t[B_DD] = tensor_1d(NULL, wide_type, x->dim[2]);
    c->t[B_DB] = c->t[B_DC] = tensor_shape(real, 4, bm->dim);
    c->t[B_DINIT] = tensor_4d(NULL, wide_type, x->dim[0], x->dim[2], bm->dim[3], x->dim[3]);
    struct ssd_bwd_args a = bwd_pack(c);
    c->t[B_WORK] = tensor_1d(NULL, DT_U8, ops->ssd_bwd_work(&a));
    return ST_OK;
}

static int bwd_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    struct ssd_bwd_args a = bwd_pack(c);
    return ops->ssd_bwd(lane, &a);
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    double n = (double)c->t[B_B].dim[3], q = fmin(c->attr[0], (double)c->t[B_X].dim[1]);
    double rows = (double)(c->t[B_X].dim[0] * c->t[B_X].dim[1]),
           inner = (double)(c->t[B_X].dim[2] * c->t[B_X].dim[3]);
    double flops = rows * (3 * q * (double)c->t[B_B].dim[2] * n + 2 * q * inner + 8 * inner * n);
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
    OP_LIST(args, fwd_args), OP_LIST(attrs, fwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = fwd_shapes, .infer = fwd_infer, .run = fwd_run, .cost = fwd_cost,
    .sample_fill = fill,
    .backward = "ssd_bwd",
    .tolerance = 5e-6,
    .narrow = 3e-3, /* final: of inputs times decays, rounded for the tensor cores */
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(ssd_bwd, SSD_BWD_FIELDS);
const struct op_desc ssd_bwd_desc = {
    OP_IS(ssd_bwd),
    .summary = "gradient of ssd_fwd",
    OP_LIST(args, bwd_args), OP_LIST(attrs, bwd_attrs), OP_LIST(dims, dims),
    .sample_shapes = bwd_shapes, .infer = bwd_infer, .run = bwd_run, .cost = bwd_cost,
    .sample_fill = fill,
    .tolerance = 2e-5,
    .narrow = 4e-3, /* sums over rows of such values partly cancel */
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
