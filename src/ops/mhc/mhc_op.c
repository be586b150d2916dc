/* Argument checks, descriptors, test samples and bench shapes of the mhc primitives; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/mhc/mhc_final_int.h"
#include "ops/ops.h"

#include <math.h>
#include <string.h>

/* ---- checks ---------------------------------------------------------------------------------- */

int mhc_rule_check(const char *op, const struct mhc_rule *r, struct err *e)
{
    if (r->streams < 2 || r->streams > MHC_MAX_STREAMS)
        return err_set(e, ST_INVALID, "%s: %lld streams, expected 2 to %d", op, (long long)r->streams, MHC_MAX_STREAMS);
    if (r->iterations < 1 || r->iterations > MHC_MAX_ITERATIONS)
        return err_set(e, ST_INVALID, "%s: %lld Sinkhorn iterations, expected 1 to %d", op, (long long)r->iterations,
                       MHC_MAX_ITERATIONS);
    if (r->profile != MHC_D && r->profile != MHC_S)
        return err_set(e, ST_INVALID, "%s: profile %d is neither D nor S", op, (int)r->profile);
    if (!(r->root_eps >= 0 && r->root_eps <= 1))
        return err_set(e, ST_INVALID, "%s: an epsilon of %g inside the root, expected 0 to 1", op, r->root_eps);
    return ST_OK;
}

int mhc_refuse_if(const char *op, bool wrong, const char *what, struct err *e)
{
    return wrong ? err_set(e, ST_INVALID, "%s: %s", op, what) : ST_OK;
}

int mhc_width_check(const char *op, int64_t k, int64_t n, struct err *e)
{
    if (n >= 1 && k % n == 0)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: the streams have %lld channels in all, not a multiple of %lld streams", op,
                   (long long)k, (long long)n);
}

int mhc_drop_check(const char *op, const struct dropout_rule *r, const struct tensor *like, struct err *e)
{
    struct dropout_args d = {.x = *like, .y = *like, .rule = *r};
    int st = dropout_check(&d, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

OP_CHECK(mhc_project_fwd)
OP_CHECK(mhc_project_bwd)

#define RULE_CHECK(op)                                                                                                 \
    int op##_check(const struct op##_args *a, struct err *e)                                                           \
    {                                                                                                                  \
        TRY(mhc_rule_check(#op, &a->rule, e));                                                                         \
        return op_check_fields(&op##_desc, a, e);                                                                      \
    }
RULE_CHECK(mhc_gates_fwd)
RULE_CHECK(mhc_sinkhorn_fwd)
RULE_CHECK(mhc_sinkhorn_bwd)

int mhc_gates_bwd_check(const struct mhc_gates_bwd_args *a, struct err *e)
{
    TRY(mhc_rule_check("mhc_gates_bwd", &a->rule, e));
    bool acc = a->acc_dbeta;
    TRY(mhc_refuse_if("mhc_gates_bwd", a->acc_da_pre != acc || a->acc_da_post != acc || a->acc_da_res != acc,
                      "da_pre, da_post, da_res and dbeta must be added to together or not at all", e));
    return op_check_fields(&mhc_gates_bwd_desc, a, e);
}

static int aggregate_check(const char *op, const struct tensor *x, const struct tensor *pre, struct err *e)
{
    if (!present(x) || !present(pre) || pre->rank != 2)
        return ST_OK; /* op_check_fields reports it */
    TRY(mhc_refuse_if(op, pre->dim[1] > MHC_MAX_STREAMS, "too many streams", e));
    return mhc_width_check(op, x->dim[1], pre->dim[1], e);
}

int mhc_aggregate_fwd_check(const struct mhc_aggregate_fwd_args *a, struct err *e)
{
    TRY(aggregate_check("mhc_aggregate_fwd", &a->x, &a->pre, e));
    return op_check_fields(&mhc_aggregate_fwd_desc, a, e);
}

int mhc_aggregate_bwd_check(const struct mhc_aggregate_bwd_args *a, struct err *e)
{
    TRY(aggregate_check("mhc_aggregate_bwd", &a->x, &a->pre, e));
    return op_check_fields(&mhc_aggregate_bwd_desc, a, e);
}

#define COMBINE_CHECK(op)                                                                                              \
    int op##_check(const struct op##_args *a, struct err *e)                                                           \
    {                                                                                                                  \
        TRY(mhc_rule_check(#op, &a->rule, e));                                                                         \
        TRY(mhc_width_check(#op, a->x.dim[1], a->rule.streams, e));                                                    \
        TRY(op_check_fields(&op##_desc, a, e));                                                                        \
        return mhc_drop_check(#op, &a->drop, &a->x, e);                                                                \
    }
COMBINE_CHECK(mhc_combine_fwd)
COMBINE_CHECK(mhc_combine_bwd)

static int fan_check(const char *op, const struct tensor *one, const struct tensor *many, struct err *e)
{
    return one->dim[1] == 0 ? mhc_refuse_if(op, many->dim[1] != 0, "widths differ", e)
                            : mhc_width_check(op, many->dim[1], one->dim[1], e);
}

int mhc_expand_fwd_check(const struct mhc_expand_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&mhc_expand_fwd_desc, a, e));
    return fan_check("mhc_expand_fwd", &a->x, &a->y, e);
}

int mhc_expand_bwd_check(const struct mhc_expand_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&mhc_expand_bwd_desc, a, e));
    return fan_check("mhc_expand_bwd", &a->dx, &a->dy, e);
}

int mhc_contract_fwd_check(const struct mhc_contract_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&mhc_contract_fwd_desc, a, e));
    TRY(mhc_refuse_if("mhc_contract_fwd", present(&a->w) && a->w.dim[0] > MHC_MAX_STREAMS, "too many streams", e));
    return fan_check("mhc_contract_fwd", &a->y, &a->x, e);
}

int mhc_contract_bwd_check(const struct mhc_contract_bwd_args *a, struct err *e)
{
    const char *op = "mhc_contract_bwd";
    TRY(op_check_fields(&mhc_contract_bwd_desc, a, e));
    TRY(mhc_refuse_if(op, present(&a->w) && a->w.dim[0] > MHC_MAX_STREAMS, "too many streams", e));
    return fan_check(op, &a->dy, &a->dx, e);
}

/* ---- what descriptors share ------------------------------------------------------------------ */

const struct op_dim mhc_dims[2] = {{"rows", 5}, {"d", 9}};

bool mhc_number(const struct mhc_rule *r, const char *name, int64_t *out)
{
    if (strcmp(name, "logits") != 0 || r->streams < 0 || r->streams > MHC_MAX_STREAMS)
        return false;
    *out = mhc_logits(r->streams);
    return true;
}

int mhc_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    double streams = mhc_streams(c);
    if (!(streams >= 2 && streams <= MHC_MAX_STREAMS))
        return err_set(e, ST_INVALID, "%s: streams is %g, expected 2 to %d", c->desc->name, streams, MHC_MAX_STREAMS);
    return op_infer_shapes(c, ops, e);
}

#define T(name) (*mhc_arg(c, #name))
static bool is_input(const struct op_arg *a) { return a->role == ARG_IN || a->role == ARG_OPT; }

/* Step 3, the first sample's index beyond 32 bits, rows that are a part of it. */
static const int64_t sample_info[] = {3, 4294967296 + 11, 40, 0};

/* The stream that x, f and coef_in give: the backward pass may recompute it instead of reading it. */
static void fill_stream(const struct op_call *c, struct tensor *y)
{
    struct dropout_rule drop = {.p = op_attr(c, "p"),
                                .key = (uint64_t)op_attr(c, "key"),
                                .seq = (int64_t)op_attr(c, "seq"),
                                .first = (int64_t)op_attr(c, "first")};
    bool profile_d = op_attr(c, "profile") == MHC_D;
    int64_t n = (int64_t)mhc_streams(c), k = y->dim[1], d = k / n, logits = mhc_logits(n);
    double coef[MHC_MAX_STREAMS * (MHC_MAX_STREAMS + 2)], in[MHC_MAX_STREAMS];
    for (int64_t row = 0; row < y->dim[0]; row++) {
        struct draw_place place = dropout_place(sample_info, row + drop.first, max_i64(drop.seq, 1));
        for (int64_t i = 0; i < logits; i++)
            coef[i] = tensor_get(&T(coef_in), row * logits + i);
        for (int64_t at = 0; at < d; at++) {
            double add = tensor_get(&T(f), row * d + at) + (T(bias).data ? tensor_get(&T(bias), at) : 0);
            for (int64_t j = 0; j < n; j++)
                in[j] = tensor_get(&T(x), row * k + j * d + at);
            for (int64_t i = 0; i < n; i++) {
                bool kept = !(drop.p > 0) || dropout_keep(drop.key, dropout_threshold(drop.p), place.step, place.sample,
                                                          place.pos, i * d + at);
                double sum = kept ? coef[n + i] * add / (1 - drop.p) : 0;
                for (int64_t j = 0; j < n; j++)
                    sum += coef[2 * n + (profile_d ? j * n + i : i * n + j)] * in[j];
                tensor_set(y, row * k + i * d + at, (double)(float)sum);
            }
        }
    }
}

/* Root mean squares and their inverses are positive. */
bool mhc_sample_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    const char *name = c->desc->args[arg].name;
    bool stat = strcmp(name, "stat") == 0;
    if (strcmp(name, "info") == 0) {
        for (int i = 0; i < countof(sample_info); i++)
            tensor_set(host, i, (double)sample_info[i]);
        return true;
    }
    bool given = strcmp(name, "y") == 0 && is_input(&c->desc->args[arg]) && T(x).data != NULL;
    if (given && op_attr(c, "enters") != 0) {
        int64_t k = host->dim[1], d = T(x).dim[1];
        for (int64_t i = 0, all = tensor_elems(host); i < all; i++)
            tensor_set(host, i, tensor_get(&T(x), i / k * d + i % k % d));
        return true;
    }
    if (given && T(f).data != NULL && T(coef_in).data != NULL) {
        fill_stream(c, host);
        return true;
    }
    /* the last boundary's gates follow from stat */
    if (strcmp(name, "coef") == 0 && is_input(&c->desc->args[arg]) && T(base).data && T(stat).data && T(scale).data) {
        for (int64_t i = 0, n = T(base).dim[0]; i < tensor_elems(host); i++)
            tensor_set(host, i,
                       (double)(float)final_gate(&T(stat), &T(base), &T(scale), op_attr(c, "eps"), i / n, i % n));
        return true;
    }
    bool logits = strcmp(name, "logits") == 0 && op_attr(c, "apart") != 0;
    if (!stat && !logits && strcmp(name, "rho") != 0 && strcmp(name, "rstd") != 0)
        return false;
    int64_t cols = host->dim[1];
    for (int64_t i = 0, n = logits ? tensor_elems(host) : 0, columns = (int64_t)mhc_streams(c); i < n; i++)
        tensor_set(host, i,
                   (double)(float)(rng_normal(key, (uint64_t)i) - op_attr(c, "apart") * (double)(i % columns)));
    if (logits)
        return true;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        double v = rng_normal(key, (uint64_t)i);
        tensor_set(host, i, (double)(float)(stat && i % cols < cols - 2 ? v : 0.5 + fabs(v)));
    }
    return true;
}

void mhc_cost(const struct op_call *c, double flops_per_element, struct op_cost *out)
{
    double largest = 0;
    *out = (struct op_cost){0};
    for (int i = 0; i < c->desc->n_args; i++) {
        if (c->t[i].rank == 0 || c->desc->args[i].role == ARG_WORK)
            continue;
        largest = fmax(largest, (double)tensor_elems(&c->t[i]));
        out->bytes += (double)tensor_bytes(&c->t[i]);
    }
    out->flops = largest * flops_per_element;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

/* Dims of a projection from those of the streams. */
static const struct op_dim project_dims[] = {{"rows", 5}, {"d", 9}, {"m", 0}, {"k", 0}};
static void project_sizes(struct op_call *c)
{
    double n = mhc_streams(c);
    op_call_set(c, "m", n * n + 2 * n);
    op_call_set(c, "k", n * op_dim(c, "d"));
}

MHC_TABLES(mhc_project_fwd, MHC_PROJECT_FWD_FIELDS, MHC_NONE, MHC_STREAMS,
           2 * mhc_streams(c) * (mhc_streams(c) + 2) + 2)
MHC_TABLES(mhc_project_bwd, MHC_PROJECT_BWD_FIELDS, MHC_NONE, MHC_STREAMS,
           4 * mhc_streams(c) * (mhc_streams(c) + 2) + 2)
MHC_RULED(mhc_gates_fwd, MHC_GATES_FWD_FIELDS, MHC_NONE, MHC_RULE, 8)
MHC_RULED(mhc_gates_bwd, MHC_GATES_BWD_FIELDS, MHC_NONE, MHC_RULE, 12)
/* apart: what a column of a sample's logits is below the one before it. */
#define SINKHORN_ATTRS(op) MHC_RULE(op) OP_ATTR_EXTRA("apart", 0)
MHC_RULED(mhc_sinkhorn_fwd, MHC_SINKHORN_FWD_FIELDS, MHC_NONE, SINKHORN_ATTRS, 4 * op_attr(c, "iterations"))
MHC_RULED(mhc_sinkhorn_bwd, MHC_SINKHORN_BWD_FIELDS, MHC_NONE, SINKHORN_ATTRS, 14 * op_attr(c, "iterations"))
MHC_TABLES(mhc_aggregate_fwd, MHC_AGGREGATE_FWD_FIELDS, MHC_NONE, MHC_STREAMS, 2)
MHC_TABLES(mhc_aggregate_bwd, MHC_AGGREGATE_BWD_FIELDS, MHC_NONE, MHC_STREAMS, 4)
MHC_RULED(mhc_combine_fwd, MHC_COMBINE_FWD_FIELDS, DROPOUT_INFO, MHC_RULE_DROP, 2 * mhc_streams(c) + 2)
MHC_RULED(mhc_combine_bwd, MHC_COMBINE_BWD_FIELDS, DROPOUT_INFO, MHC_RULE_DROP, 4 * mhc_streams(c) + 4)
MHC_TABLES(mhc_expand_fwd, MHC_EXPAND_FWD_FIELDS, MHC_NONE, MHC_STREAMS, 0)
MHC_TABLES(mhc_expand_bwd, MHC_EXPAND_BWD_FIELDS, MHC_NONE, MHC_STREAMS, 1)
MHC_TABLES(mhc_contract_fwd, MHC_CONTRACT_FWD_FIELDS, MHC_NONE, MHC_STREAMS, 2 * mhc_streams(c) + 4)
MHC_TABLES(mhc_contract_bwd, MHC_CONTRACT_BWD_FIELDS, MHC_NONE, MHC_STREAMS, 4 * mhc_streams(c) + 6)

/* One list for all primitives; what an op does not know it ignores. */
#define ACC_GATES "acc_da_pre=1 acc_da_post=1 acc_da_res=1 acc_dbeta=1"
#define ACC_LEARNED "acc_dw=1 acc_dbase=1 acc_dscale=1"
#define NO_GATES "no_w=1 no_base=1 no_scale=1 no_m=1 no_rstd=1 no_dw=1 no_dbase=1 no_dscale=1"
static const struct op_sample samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=7 d=16 streams=2 profile=1"},
    {"rows=17 d=33 streams=3"},
    {"rows=17 d=33 streams=3 profile=1 iterations=1"},
    {"rows=33 d=20 streams=8"},
    {"rows=6 d=13 streams=8 profile=1"},
    {"rows=9 d=65 streams=5 iterations=3 no_bias=1"},
    {"rows=66 d=64 iterations=1 p=0.25 seq=5"},
    {"rows=70 d=67 streams=3 p=0.5 seq=3 profile=1 no_bias=1"},
    {"rows=13 d=130 p=0.1 strided=1"},
    {"rows=35 d=24 profile=1 strided=1"},
    {"rows=4 d=40 iterations=128 streams=16"},
    {"rows=300 d=264 no_bias=1"},
    {"rows=70 d=520 streams=3 strided=1"},
    {"rows=19 d=33 root_eps=0.25"},
    {"rows=300 d=264 root_eps=0.25"},
    {"rows=9 d=3 profile=1 apart=60"},
    {"rows=9 d=3 streams=3 profile=1 apart=120"},
};
static const struct op_sample contract_samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=17 d=33 streams=3"},
    {"rows=33 d=20 streams=8 strided=1"},
    {"rows=70 d=16 eps=1e-3"},
    {"rows=6 d=648"},
    {"rows=19 d=33 " NO_GATES},
    {"rows=6 d=5 streams=3 strided=1 " NO_GATES},
    /* backward only */
    {"rows=401 d=5 " ACC_LEARNED},
    {"rows=23 d=17 streams=3 acc_dx=1"},
    {"rows=7 d=6 acc_dx=1 " NO_GATES},
    {"rows=33 d=16 no_dw=1 no_dbase=1 no_dscale=1"},
};
static const struct op_sample project_bwd_samples[] = {
    {"rows=5 d=9 acc_dx=1"},
    {"rows=5 d=9 root_eps=0.25"},
    {"rows=330 d=264 root_eps=0.25"},
    {"rows=0 d=8 acc_dw=1"},
    {"rows=193 d=17 acc_dw=1"},
    {"rows=401 d=33 streams=3 acc_dx=1 acc_dw=1 strided=1"},
    {"rows=35 d=24 streams=2 no_dw=1"},
    {"rows=7000 d=2 streams=2"},
    {"rows=330 d=264"},
    {"rows=1000 d=24 streams=3 acc_dw=1 strided=1"},
    {"rows=130 d=80 no_dw=1"},
};
static const struct op_sample gates_bwd_samples[] = {
    {"rows=33 " ACC_GATES},
    {"rows=700 profile=1 " ACC_GATES},
    {"rows=5 streams=3 no_dpost=1 no_dlogits=1 profile=1"},
    {"rows=5 no_dpre=1 no_dz=1 no_da_pre=1 no_da_post=1 no_da_res=1 no_dbeta=1"},
    {"rows=5 streams=8 no_dpre=1 no_dlogits=1 strided=1"},
};
static const struct op_sample aggregate_bwd_samples[] = {{"rows=5 d=9 acc_dx=1"},
                                                         {"rows=3 d=2056 acc_dx=1"},
                                                         {"rows=66 d=64 streams=3"},
                                                         {"rows=7 d=7 streams=8 strided=1 acc_dx=1"}};
static const struct op_sample combine_bwd_samples[] = {
    {"rows=5 d=9 acc_dbias=1"},
    {"rows=0 d=9"},
    {"rows=67 d=70 streams=3 p=0.25 profile=1 acc_dbias=1"},
    {"rows=130 d=17 streams=8 no_dbias=1 strided=1"},
    {"rows=130 d=129 p=0.1 seq=10 strided=1"},
    {"rows=2100 d=8 acc_dbias=1"},
    {"rows=9 d=2056 p=0.1 profile=1"},
};
static const struct op_sample sinkhorn_bwd_samples[] = {{"rows=5"},
                                                        {"rows=70 iterations=33"},
                                                        {"rows=70 profile=1 iterations=32"},
                                                        {"rows=33 streams=3 profile=1"},
                                                        {"rows=9 profile=1 apart=60"},
                                                        {"rows=9 profile=1 apart=60 iterations=40"},
                                                        {"rows=9 streams=3 profile=1 apart=60"},
                                                        {"rows=17 streams=8 iterations=2 strided=1"}};
static const struct op_sample expand_bwd_samples[] = {
    {"rows=5 d=9"}, {"rows=66 d=64 streams=3 strided=1"}, {"rows=0 d=3"}};
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=2048 d=2048"}, {"rows=16384 d=2048 gpu=1"}};

#define PRIMITIVE(op, text, back, tol, list)                                                                           \
    OP_IS(op), MHC_ALL(op, text), .infer = mhc_infer, .backward = back, .tolerance = tol, .samples = list,             \
                                  .n_samples = countof(list), OP_LIST(bench, bench)
const struct op_desc mhc_project_fwd_desc = {
    OP_IS(mhc_project_fwd),        .summary = "mHC logits and root mean square of the streams",
    .cost = mhc_project_fwd_cost,  .sample_fill = mhc_sample_fill,
    .sample_dims = project_sizes,  .infer = mhc_infer,
    .backward = "mhc_project_bwd", .tolerance = 5e-6,
    OP_LIST(dims, project_dims),   OP_LIST(samples, samples),
    OP_LIST(bench, bench)};
const struct op_desc mhc_project_bwd_desc = {OP_IS(mhc_project_bwd),
                                             .summary = "gradient of mhc_project_fwd",
                                             .cost = mhc_project_bwd_cost,
                                             .sample_fill = mhc_sample_fill,
                                             .sample_dims = project_sizes,
                                             .infer = mhc_infer,
                                             .tolerance = 1e-5,
                                             OP_LIST(dims, project_dims),
                                             OP_LIST(samples, project_bwd_samples),
                                             OP_LIST(bench, bench)};
const struct op_desc mhc_gates_fwd_desc = {
    PRIMITIVE(mhc_gates_fwd, "mHC gates and mixing logits", "mhc_gates_bwd", 5e-6, samples),
    .number = mhc_gates_fwd_number};
const struct op_desc mhc_gates_bwd_desc = {
    PRIMITIVE(mhc_gates_bwd, "gradient of mhc_gates_fwd", NULL, 1e-5, gates_bwd_samples),
    .number = mhc_gates_bwd_number};
const struct op_desc mhc_sinkhorn_fwd_desc = {
    PRIMITIVE(mhc_sinkhorn_fwd, "doubly stochastic matrix of mixing logits", "mhc_sinkhorn_bwd", 5e-6, samples),
    .number = mhc_sinkhorn_fwd_number};
const struct op_desc mhc_sinkhorn_bwd_desc = {
    PRIMITIVE(mhc_sinkhorn_bwd, "gradient of mhc_sinkhorn_fwd", NULL, 2e-5, sinkhorn_bwd_samples),
    .number = mhc_sinkhorn_bwd_number};
const struct op_desc mhc_aggregate_fwd_desc = {
    PRIMITIVE(mhc_aggregate_fwd, "weighted sum of the streams", "mhc_aggregate_bwd", 2e-6, samples)};
const struct op_desc mhc_aggregate_bwd_desc = {
    PRIMITIVE(mhc_aggregate_bwd, "gradient of mhc_aggregate_fwd", NULL, 5e-6, aggregate_bwd_samples)};
const struct op_desc mhc_combine_fwd_desc = {
    PRIMITIVE(mhc_combine_fwd, "mix the streams and add a sublayer's output to each", "mhc_combine_bwd", 2e-6, samples),
    .number = mhc_combine_fwd_number};
const struct op_desc mhc_combine_bwd_desc = {
    PRIMITIVE(mhc_combine_bwd, "gradient of mhc_combine_fwd", NULL, 5e-6, combine_bwd_samples),
    .number = mhc_combine_bwd_number};
const struct op_desc mhc_expand_fwd_desc = {
    PRIMITIVE(mhc_expand_fwd, "copy one stream to n", "mhc_expand_bwd", 1e-7, samples)};
const struct op_desc mhc_expand_bwd_desc = {
    PRIMITIVE(mhc_expand_bwd, "gradient of mhc_expand_fwd", NULL, 1e-6, expand_bwd_samples)};
const struct op_desc mhc_contract_fwd_desc = {OP_IS(mhc_contract_fwd),
                                              MHC_ALL(mhc_contract_fwd, "n streams to one: mean, or by learned gates"),
                                              .infer = mhc_infer,
                                              .backward = "mhc_contract_bwd",
                                              .tolerance = 5e-6,
                                              .samples = contract_samples,
                                              .n_samples = countof(contract_samples) - 4,
                                              OP_LIST(bench, bench)};
const struct op_desc mhc_contract_bwd_desc = {
    PRIMITIVE(mhc_contract_bwd, "gradient of mhc_contract_fwd", NULL, 1e-5, contract_samples)};
