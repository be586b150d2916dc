/* adamw: argument checks, cost, descriptor, test samples and bench shapes; see adamw.h. */
#include "ops/adamw/adamw_int.h"
#include "ops/adamw/adamw.h"
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ops.h"

#include <math.h>

static int check_codes(const struct adamw_part *a, enum dtype wide, struct err *e)
{
    if (present(&a->t) && !present(&a->q))
        return err_set(e, ST_INVALID, "adamw: codes t without codes q");
    if (!present(&a->q))
        return ST_OK;
    TRY(f8_check("adamw", "q", &a->q, &a->qs, wide, ADAMW_SQUARE, true, e));
    if (a->q.dtype != DT_F8_E4M3 || a->q.dim[0] * a->q.dim[1] != a->p.dim[0])
        return err_set(e, ST_INVALID, "adamw: codes q are %s [%lld, %lld], expected F8_E4M3 of %lld elements",
                       dtype_name(a->q.dtype), (long long)a->q.dim[0], (long long)a->q.dim[1], (long long)a->p.dim[0]);
    if (!present(&a->t))
        return ST_OK;
    TRY(f8_check("adamw", "t", &a->t, &a->ts, wide, ADAMW_SQUARE, true, e));
    CHECK_T("adamw", "t", &a->t, DT_F8_E4M3, 2, a->q.dim[1], a->q.dim[0]);
    return ST_OK;
}

static int check_part(const struct adamw_part *a, bool bf16, struct err *e)
{
    enum dtype wide = wide_of(a->p.dtype), state = bf16 && a->m.dtype == DT_BF16 ? DT_BF16 : wide;
    CHECK_T("adamw", "p", &a->p, wide, 1, -1);
    int64_t n = a->p.dim[0];
    CHECK_T("adamw", "g", &a->g, wide, 1, n);
    CHECK_T("adamw", "m", &a->m, state, 1, n);
    CHECK_T("adamw", "v", &a->v, state, 1, n);
    if (a->at.row < 0 || a->at.first < 0 || a->at.lead < 0 || a->at.step < 0)
        return err_set(e, ST_INVALID, "adamw: a part at %lld + %lld in rows of %lld, %lld apart",
                       (long long)a->at.first, (long long)a->at.lead, (long long)a->at.row, (long long)a->at.step);
    /* A narrower copy beside wide parameters, or one of the same type. */
    CHECK_OPT("adamw", "copy", &a->copy, wide_of(a->copy.dtype) == wide ? a->copy.dtype : wide, 1, n);
    if (!isfinite(a->decay) || !(a->rate >= 0 && isfinite(a->rate)))
        return err_set(e, ST_INVALID, "adamw: decay is %g and rate %g", a->decay, a->rate);
    return check_codes(a, wide, e);
}

int adamw_check(const struct adamw_args *a, struct err *e)
{
    if (a->n_more < 0 || (a->n_more > 0 && a->more == NULL))
        return err_set(e, ST_INVALID, "adamw: %d further parameters without a list of them", a->n_more);
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part part = adamw_part_at(a, k);
        TRY(check_part(&part, a->bf16, e));
        if (part.p.dtype != a->p.dtype || part.m.dtype != a->m.dtype)
            return err_set(e, ST_INVALID, "adamw: parameters of one call must have one type, and so must moments");
    }
    CHECK_T("adamw", "hyper", &a->hyper, DT_F64, 1, 8);
    CHECK_T("adamw", "scale", &a->scale, DT_F64, 1, 4);
    if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1))
        return err_set(e, ST_INVALID, "adamw: beta1 is %g and beta2 is %g, expected 0 <= beta < 1", a->beta1, a->beta2);
    if (!(a->eps > 0 && isfinite(a->eps)))
        return err_set(e, ST_INVALID, "adamw: eps is %g, expected more than 0", a->eps);
    return ST_OK;
}

int adamw_value_check(const struct adamw_args *a, struct err *e)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data;
    if (!isfinite(hyper[0]))
        return err_set(e, ST_NONFINITE, "adamw: the learning rate is %g", hyper[0]);
    if (!(hyper[1] > 0 && hyper[1] <= 1 && hyper[2] > 0 && hyper[2] <= 1)) {
        err_set(e, ST_INVALID, "adamw: bias corrections are %g and %g, expected 0 < 1 - beta^t <= 1", hyper[1],
                hyper[2]);
        return err_hint(e, "the step t counts from 1");
    }
    if (a->bf16 && !(hyper[3] >= 0 && hyper[3] < 0x1p53))
        return err_set(e, ST_INVALID, "adamw: the number of the update is %g", hyper[3]);
    if (!isfinite(scale[1]))
        return err_set(e, ST_NONFINITE, "adamw: the gradient coefficient is %g", scale[1]);
    return ST_OK;
}

/* ---- descriptor: p, m and v are updated in place, so they are outputs whose old values matter  */

/* step, lr, clip and skip are only for samples: they set what hyper and scale hold. parts: the elements are distributed
 * to so many parameters of one call. row: they are columns of a parameter with rows twice as long. */
enum { DIM_N, DIM_STEP, DIM_LR, DIM_CLIP, DIM_SKIP, DIM_PARTS, DIM_ROW };
static const struct op_dim dims[] = {{"n", 33},   {"step", 3},  {"lr", 0.01}, {"clip", 1},
                                     {"skip", 0}, {"parts", 1}, {"row", 0}};

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    OP_UNPACK(adamw, a, c);
    double step = c->dim[DIM_STEP];
    double hyper[8] = {c->dim[DIM_LR], 1 - pow(a->beta1, step), 1 - pow(a->beta2, step), step - 1};
    double scale[4] = {1, c->dim[DIM_CLIP], c->dim[DIM_SKIP], 0};
    if (!op_arg_is(c, arg, "hyper") && !op_arg_is(c, arg, "scale") && !op_arg_is(c, arg, "v"))
        return false;
    for (int64_t i = 0; i < host->dim[0]; i++) {
        double z = rng_normal(key, (uint64_t)i);
        tensor_set(host, i,
                   op_arg_is(c, arg, "hyper")   ? hyper[i]
                   : op_arg_is(c, arg, "scale") ? scale[i]
                                                : (double)(float)(z * z));
    }
    return true;
}

enum { MAX_PARTS = 128 };

/* Elements [first, first + n) of a tensor; absent stays absent. */
static struct tensor piece(const struct tensor *t, int64_t first, int64_t n)
{
    return t->data != NULL ? tensor_rows(t, first, n) : *t;
}

static struct adamw_part part_of(const struct adamw_args *a, int64_t k, int64_t parts, double row)
{
    int64_t n = a->g.dim[0], first = n * k / parts, count = n * (k + 1) / parts - first;
    int64_t cols = row >= 1 && row < 1e9 ? (int64_t)row : 0;
    return (struct adamw_part){.p = piece(&a->p, first, count),
                               .g = piece(&a->g, first, count),
                               .m = piece(&a->m, first, count),
                               .v = piece(&a->v, first, count),
                               .copy = piece(&a->copy, first, count),
                               .decay = a->decay,
                               .rate = a->rate,
                               .at = {.key = 77, .first = cols, .lead = first, .row = cols, .step = 2 * cols}};
}

static int run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    OP_UNPACK(adamw, whole, c);
    double asked = c->dim[DIM_PARTS], row = c->dim[DIM_ROW];
    int parts = asked >= 1 && asked <= MAX_PARTS ? (int)asked : 1;
    struct adamw_part more[MAX_PARTS], first = part_of(whole, 0, parts, row);
    for (int k = 1; k < parts; k++)
        more[k - 1] = part_of(whole, k, parts, row);
    struct adamw_args a = *whole;
    a.p = first.p;
    a.g = first.g;
    a.m = first.m;
    a.v = first.v;
    a.copy = first.copy;
    a.at = first.at;
    a.more = more;
    a.n_more = parts - 1;
    return ops->adamw(lane, &a);
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(adamw, a, c);
    double n = (double)a->g.dim[0], size = (double)dtype_bytes(a->g.dtype);
    *out = (struct op_cost){.flops = 15 * n,
                            .bytes = 3 * n * size + 2 * (double)(tensor_bytes(&a->m) + tensor_bytes(&a->v)) +
                                     (double)tensor_bytes(&a->copy)};
}

#define FP32 " wide_m=1 wide_v=1"
static const struct op_sample samples[] = {
    {"n=33" FP32},
    {"n=1 step=1" FP32},
    {"n=0" FP32},
    {"n=4097 clip=0.25 step=1000" FP32},
    {"n=100 skip=1" FP32},
    {"n=65 decay=0 beta1=0 beta2=0 step=1" FP32},
    {"n=64 lr=0" FP32},
    {"n=20000 eps=0.001 beta2=0.999 step=1" FP32},
    {"n=4096 no_copy=1" FP32},
    {"n=8200 parts=3" FP32},
    {"n=100001 parts=100" FP32},
    {"n=300 parts=2 rate=0.25" FP32},
    {"n=40 rate=0" FP32},
    {"n=33 bf16=1"},
    {"n=4100 bf16=1 step=7 beta2=0.999"},
    {"n=515 bf16=1 parts=3 row=10"},
    {"n=64 bf16=1 skip=1"},
    {"n=0 bf16=1"},
};
static const struct op_sample bench[] = {{"n=102400" FP32},
                                         {"n=16777216" FP32},
                                         {"n=16777216 bf16=1"},
                                         {"n=16777216 parts=128" FP32},
                                         {"n=33554432 parts=16 gpu=1" FP32},
                                         {"n=33554432 parts=16 bf16=1 gpu=1"}};

OP_TABLES(adamw, ADAMW_FIELDS);
const struct op_desc adamw_desc = {
    OP_IS(adamw),
    .summary = "one AdamW update of a parameter, in place",
    OP_LIST(dims, dims),
    .run = run,
    .cost = cost,
    .sample_fill = fill,
    .tolerance = 2e-6,
    .narrow = 1e-3,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
