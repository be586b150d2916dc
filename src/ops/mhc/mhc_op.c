/* Descriptors, test samples and bench shapes of the mhc primitives; see mhc.h. */
#include "ops/mhc/mhc_desc_int.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_leave_int.h"
#include "ops/ops.h"

#include <math.h>
#include <string.h>

const struct op_dim mhc_dims[2] = {{"rows", 5}, {"d", 9}};

/* ---- shapes by letter ---------------------------------------------------------------------------------- */

struct sizes {
    int64_t rows, n, d;
};

static struct tensor letter_shape(char letter, const struct sizes *s)
{
    int64_t n = s->n, logits = mhc_logits(n);
    switch (letter) {
    case 'K': return tensor_2d(NULL, DT_NONE, s->rows, n * s->d);
    case 'C': return tensor_2d(NULL, DT_NONE, s->rows, s->d);
    case 'N': return tensor_2d(NULL, DT_NONE, s->rows, logits);
    case 'S': return tensor_2d(NULL, DT_NONE, s->rows, logits + 2);
    case 'q': return tensor_2d(NULL, DT_NONE, s->rows, n + 2);
    case 'n': return tensor_2d(NULL, DT_NONE, s->rows, n);
    case 'm': return tensor_2d(NULL, DT_NONE, s->rows, n * n);
    case '1': return tensor_2d(NULL, DT_NONE, s->rows, 1);
    case 'W': return tensor_2d(NULL, DT_NONE, logits, n * s->d);
    case 'T': return tensor_2d(NULL, DT_NONE, n, n * s->d);
    case 'b': return tensor_1d(NULL, DT_NONE, logits);
    case 'v': return tensor_1d(NULL, DT_NONE, s->d);
    case 'g': return tensor_1d(NULL, DT_NONE, n);
    case 's': return tensor_1d(NULL, DT_NONE, 1);
    case 'i': return tensor_1d(NULL, DT_NONE, 4);
    case 'h': return tensor_2d(NULL, DT_NONE, MHC_HEALTH_ROWS, n * n);
    default: return tensor_1d(NULL, DT_NONE, 0);
    }
}

static bool is_input(const struct op_arg *a) { return a->role == ARG_IN || a->role == ARG_OPT; }

void mhc_sample_shapes(struct op_call *c, const char *letters)
{
    struct sizes s = {.rows = (int64_t)c->dim[0], .n = (int64_t)op_attr(c, "streams"), .d = (int64_t)c->dim[1]};
    for (int i = 0; i < c->desc->n_args; i++)
        if (is_input(&c->desc->args[i]))
            c->t[i] = letter_shape(letters[i], &s);
}

int mhc_infer_shapes(struct op_call *c, const char *letters, struct err *e)
{
    double streams = op_attr(c, "streams");
    if (!(streams >= 2 && streams <= MHC_MAX_STREAMS))
        return err_set(e, ST_INVALID, "%s: streams is %g, expected 2 to %d", c->desc->name, streams, MHC_MAX_STREAMS);
    struct sizes s = {.n = (int64_t)streams};
    enum dtype real = DT_NONE;
    for (int i = 0; i < c->desc->n_args; i++) {
        const struct tensor *t = &c->t[i];
        if (!is_input(&c->desc->args[i]) || t->rank == 0)
            continue;
        if (c->desc->args[i].type == ARG_REAL || (c->desc->args[i].type == ARG_WIDE && real == DT_NONE))
            real = t->dtype;
        if (strchr("KCNSnm1", letters[i]) != NULL)
            s.rows = t->dim[0];
        if (letters[i] == 'K' && t->rank == 2)
            s.d = t->dim[1] / s.n;
        else if (letters[i] == 'C' && t->rank == 2)
            s.d = t->dim[1];
    }
    for (int i = 0; i < c->desc->n_args; i++) {
        if (is_input(&c->desc->args[i]))
            continue;
        c->t[i] = letter_shape(letters[i], &s);
        c->t[i].dtype = op_arg_dtype(&c->desc->args[i], real);
    }
    return ST_OK;
}

/* Root mean squares and their inverses are positive. info: step 3, the first sample's index beyond 32 bits. */
/* The stream that x, f and coef_in give: the backward pass may make it again instead of reading it. */
static void fill_stream(const struct op_call *c, struct tensor *y)
{
    struct mhc_rule r = mhc_pack_rule(c);
    struct dropout_rule drop = mhc_pack_drop(c, &T(info));
    int64_t n = r.streams, k = y->dim[1], d = k / n, logits = mhc_logits(n);
    double coef[MHC_MAX_STREAMS * (MHC_MAX_STREAMS + 2)], in[MHC_MAX_STREAMS];
    for (int64_t row = 0; row < y->dim[0]; row++) {
        int64_t step = drop.p > 0 ? (int64_t)tensor_get(&T(info), 0) : 0, sample = drop.p > 0 ? (int64_t)tensor_get(&T(info), 1) + row / drop.seq : 0;
        for (int64_t i = 0; i < logits; i++)
            coef[i] = tensor_get(&T(coef_in), row * logits + i);
        for (int64_t at = 0; at < d; at++) {
            double add = tensor_get(&T(f), row * d + at) + (T(bias).data ? tensor_get(&T(bias), at) : 0);
            for (int64_t j = 0; j < n; j++)
                in[j] = tensor_get(&T(x), row * k + j * d + at);
            for (int64_t i = 0; i < n; i++) {
                bool kept = !(drop.p > 0) || dropout_keep(drop.key, dropout_threshold(drop.p), step, sample, row % drop.seq, i * d + at);
                double sum = kept ? coef[n + i] * add / (1 - drop.p) : 0;
                for (int64_t j = 0; j < n; j++)
                    sum += coef[2 * n + (r.profile == MHC_D ? j * n + i : i * n + j)] * in[j];
                tensor_set(y, row * k + i * d + at, (double)(float)sum);
            }
        }
    }
}

bool mhc_sample_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    const double info[] = {3, 4294967296.0 + 11, 0, 0};
    const char *name = c->desc->args[arg].name;
    bool stat = strcmp(name, "stat") == 0;
    if (strcmp(name, "info") == 0) {
        for (int i = 0; i < countof(info); i++)
            tensor_set(host, i, info[i]);
        return true;
    }
    if (strcmp(name, "y") == 0 && c->desc->args[arg].role == ARG_OPT && op_attr(c, "enters") != 0) {
        int64_t k = host->dim[1], d = T(x).dim[1];
        for (int64_t i = 0, all = tensor_elems(host); i < all; i++)
            tensor_set(host, i, tensor_get(&T(x), i / k * d + i % k % d));
        return true;
    }
    if (strcmp(name, "y") == 0 && c->desc->args[arg].role == ARG_OPT && T(f).data != NULL) {
        fill_stream(c, host);
        return true;
    }
    if (strcmp(name, "coef") == 0 && is_input(&c->desc->args[arg]) && T(base).data != NULL) { /* the last boundary's gates follow from stat */
        for (int64_t i = 0, n = T(base).dim[0]; i < tensor_elems(host); i++)
            tensor_set(host, i, (double)(float)leave_gate(&T(stat), &T(base), &T(scale), op_attr(c, "eps"), i / n, i % n));
        return true;
    }
    if (!stat && strcmp(name, "rho") != 0 && strcmp(name, "rstd") != 0)
        return false;
    int64_t cols = host->dim[1];
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        double v = rng_normal(key, (uint64_t)i);
        tensor_set(host, i, (double)(float)(stat && i % cols < cols - 2 ? v : 0.5 + fabs(v)));
    }
    return true;
}

struct mhc_rule mhc_pack_rule(const struct op_call *c)
{
    double iterations = op_attr(c, "iterations");
    return (struct mhc_rule){.streams = (int64_t)op_attr(c, "streams"), .profile = op_attr(c, "profile") != 0 ? MHC_S : MHC_D,
                             .iterations = iterations >= 0 && iterations < 1e9 ? (int64_t)iterations : 0,
                             .round_bf16 = op_attr(c, "round_bf16") != 0, .single_pass = op_attr(c, "single_pass") != 0,
                             .ring = op_attr(c, "ring") != 0, .kernels = op_attr(c, "primitive") != 0 ? MHC_KERNELS_PRIMITIVE : MHC_KERNELS_AUTO};
}

struct dropout_rule mhc_pack_drop(const struct op_call *c, const struct tensor *info)
{
    double seq = op_attr(c, "seq"), key = op_attr(c, "key");
    return (struct dropout_rule){.p = op_attr(c, "p"), .key = key >= 0 && key < 1e15 ? (uint64_t)key : 0,
                                 .seq = seq >= 1 && seq < 1e15 ? (int64_t)seq : 0, .info = *info};
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

static double streams_of(const struct op_call *c) { return op_attr(c, "streams"); }

/* ---- project --------------------------------------------------------------------------------------------- */

static const struct op_arg mhc_project_fwd_arg_list[] = {IN(x), WIN(w), WOUT(p), WOUT(rho)};
static const struct op_attr mhc_project_fwd_attrs[] = {{.name = "streams", .value = 4}};
static struct mhc_project_fwd_args mhc_project_fwd_pack(const struct op_call *c)
{
    return (struct mhc_project_fwd_args){.x = T(x), .w = T(w), .p = T(p), .rho = T(rho)};
}
MHC_FUNCTIONS(mhc_project_fwd, "KWN1", 2 * streams_of(c) * (streams_of(c) + 2) + 2)
MHC_INFER(mhc_project_fwd, "KWN1")

static const struct op_arg mhc_project_bwd_arg_list[] = {WIN(dp), WIN(drho), IN(x), WIN(w), WIN(rho), OUT(dx), WOOUT(dw), WORK};
static const struct op_attr mhc_project_bwd_attrs[] = {{.name = "streams", .value = 4}, {.name = "acc_dx", .value = 0}, {.name = "acc_dw", .value = 0}};
static struct mhc_project_bwd_args mhc_project_bwd_pack(const struct op_call *c)
{
    return (struct mhc_project_bwd_args){.dp = T(dp), .drho = T(drho), .x = T(x), .w = T(w), .rho = T(rho), .dx = T(dx), .dw = T(dw),
                                         .work = T(work), .acc_dx = FLAG(acc_dx), .acc_dw = FLAG(acc_dw)};
}
MHC_FUNCTIONS(mhc_project_bwd, "N1KW1KW.", 4 * streams_of(c) * (streams_of(c) + 2) + 2)
MHC_INFER_WORK(mhc_project_bwd, "N1KW1KW.")

/* ---- gates ------------------------------------------------------------------------------------------------ */

static const struct op_arg mhc_gates_fwd_arg_list[] = {WIN(p), WIN(rho), WIN(a_pre), WIN(a_post), WIN(a_res), WIN(beta), WOUT(pre), WOUT(post), WOUT(logits)};
static const struct op_attr mhc_gates_fwd_attrs[] = {MHC_RULE_ATTRS};
static struct mhc_gates_fwd_args mhc_gates_fwd_pack(const struct op_call *c)
{
    return (struct mhc_gates_fwd_args){.p = T(p), .rho = T(rho), .a_pre = T(a_pre), .a_post = T(a_post), .a_res = T(a_res),
                                       .beta = T(beta), .pre = T(pre), .post = T(post), .logits = T(logits), .rule = mhc_pack_rule(c)};
}
MHC_FUNCTIONS(mhc_gates_fwd, "N1sssbnnm", 8)
MHC_INFER(mhc_gates_fwd, "N1sssbnnm")

static const struct op_arg mhc_gates_bwd_arg_list[] = {WOPT(dpre), WOPT(dpost), WOPT(dlogits), WIN(p), WIN(rho), WIN(a_pre), WIN(a_post), WIN(a_res), WIN(beta),
                                                       WOUT(dp), WOUT(drho), WOOUT(dz), WOOUT(da_pre), WOOUT(da_post), WOOUT(da_res), WOOUT(dbeta)};
static const struct op_attr mhc_gates_bwd_attrs[] = {MHC_RULE_ATTRS, {.name = "acc_params", .value = 0}};
static struct mhc_gates_bwd_args mhc_gates_bwd_pack(const struct op_call *c)
{
    return (struct mhc_gates_bwd_args){.dpre = T(dpre), .dpost = T(dpost), .dlogits = T(dlogits), .p = T(p), .rho = T(rho), .a_pre = T(a_pre),
                                       .a_post = T(a_post), .a_res = T(a_res), .beta = T(beta), .dp = T(dp), .drho = T(drho), .dz = T(dz),
                                       .da_pre = T(da_pre), .da_post = T(da_post), .da_res = T(da_res), .dbeta = T(dbeta),
                                       .rule = mhc_pack_rule(c), .acc_params = FLAG(acc_params)};
}
MHC_FUNCTIONS(mhc_gates_bwd, "nnmN1sssbN1Nsssb", 12)
MHC_INFER(mhc_gates_bwd, "nnmN1sssbN1Nsssb")

/* ---- sinkhorn ----------------------------------------------------------------------------------------------- */

static const struct op_arg mhc_sinkhorn_fwd_arg_list[] = {WIN(logits), WOUT(res)};
static const struct op_attr mhc_sinkhorn_fwd_attrs[] = {MHC_RULE_ATTRS};
static struct mhc_sinkhorn_fwd_args mhc_sinkhorn_fwd_pack(const struct op_call *c)
{
    return (struct mhc_sinkhorn_fwd_args){.logits = T(logits), .res = T(res), .rule = mhc_pack_rule(c)};
}
MHC_FUNCTIONS(mhc_sinkhorn_fwd, "mm", 4 * op_attr(c, "iterations"))
MHC_INFER(mhc_sinkhorn_fwd, "mm")

static const struct op_arg mhc_sinkhorn_bwd_arg_list[] = {WIN(dres), WIN(logits), WOUT(dlogits)};
static const struct op_attr mhc_sinkhorn_bwd_attrs[] = {MHC_RULE_ATTRS};
static struct mhc_sinkhorn_bwd_args mhc_sinkhorn_bwd_pack(const struct op_call *c)
{
    return (struct mhc_sinkhorn_bwd_args){.dres = T(dres), .logits = T(logits), .dlogits = T(dlogits), .rule = mhc_pack_rule(c)};
}
MHC_FUNCTIONS(mhc_sinkhorn_bwd, "mmm", 14 * op_attr(c, "iterations"))
MHC_INFER(mhc_sinkhorn_bwd, "mmm")

/* ---- aggregate ------------------------------------------------------------------------------------------------ */

static const struct op_arg mhc_aggregate_fwd_arg_list[] = {IN(x), WIN(pre), OUT(a)};
static const struct op_attr mhc_aggregate_fwd_attrs[] = {{.name = "streams", .value = 4}};
static struct mhc_aggregate_fwd_args mhc_aggregate_fwd_pack(const struct op_call *c)
{
    return (struct mhc_aggregate_fwd_args){.x = T(x), .pre = T(pre), .a = T(a)};
}
MHC_FUNCTIONS(mhc_aggregate_fwd, "KnC", 2)
MHC_INFER(mhc_aggregate_fwd, "KnC")

static const struct op_arg mhc_aggregate_bwd_arg_list[] = {IN(da), IN(x), WIN(pre), OUT(dx), WOUT(dpre)};
static const struct op_attr mhc_aggregate_bwd_attrs[] = {{.name = "streams", .value = 4}, {.name = "acc_dx", .value = 0}};
static struct mhc_aggregate_bwd_args mhc_aggregate_bwd_pack(const struct op_call *c)
{
    return (struct mhc_aggregate_bwd_args){.da = T(da), .x = T(x), .pre = T(pre), .dx = T(dx), .dpre = T(dpre), .acc_dx = FLAG(acc_dx)};
}
MHC_FUNCTIONS(mhc_aggregate_bwd, "CKnKn", 4)
MHC_INFER(mhc_aggregate_bwd, "CKnKn")

/* ---- combine --------------------------------------------------------------------------------------------------- */

static const struct op_arg mhc_combine_fwd_arg_list[] = {IN(x), IN(f), WOPT(bias), WIN(post), WIN(res), INFO, OUT(y)};
static const struct op_attr mhc_combine_fwd_attrs[] = {MHC_RULE_ATTRS, MHC_DROP_ATTRS};
static struct mhc_combine_fwd_args mhc_combine_fwd_pack(const struct op_call *c)
{
    return (struct mhc_combine_fwd_args){.x = T(x), .f = T(f), .bias = T(bias), .post = T(post), .res = T(res), .y = T(y),
                                         .rule = mhc_pack_rule(c), .drop = mhc_pack_drop(c, mhc_arg(c, "info"))};
}
MHC_FUNCTIONS(mhc_combine_fwd, "KCvnmiK", 2 * streams_of(c) + 2)
MHC_INFER(mhc_combine_fwd, "KCvnmiK")

static const struct op_arg mhc_combine_bwd_arg_list[] = {IN(dy), IN(x), IN(f), WOPT(bias), WIN(post), WIN(res), INFO, OUT(dx), OUT(df), WOUT(dpost), WOUT(dres), WOOUT(dbias), WORK};
static const struct op_attr mhc_combine_bwd_attrs[] = {MHC_RULE_ATTRS, MHC_DROP_ATTRS, {.name = "acc_dbias", .value = 0}};
static struct mhc_combine_bwd_args mhc_combine_bwd_pack(const struct op_call *c)
{
    return (struct mhc_combine_bwd_args){.dy = T(dy), .x = T(x), .f = T(f), .bias = T(bias), .post = T(post), .res = T(res), .dx = T(dx),
                                         .df = T(df), .dpost = T(dpost), .dres = T(dres), .dbias = T(dbias), .work = T(work),
                                         .rule = mhc_pack_rule(c), .drop = mhc_pack_drop(c, mhc_arg(c, "info")), .acc_dbias = FLAG(acc_dbias)};
}
MHC_FUNCTIONS(mhc_combine_bwd, "KKCvnmiKCnmv.", 4 * streams_of(c) + 4)
MHC_INFER_WORK(mhc_combine_bwd, "KKCvnmiKCnmv.")

/* ---- expand, contract -------------------------------------------------------------------------------------------- */

static void expand_cost(const struct op_call *c, struct op_cost *out) { mhc_cost(c, 0, out); }
static void sum_cost(const struct op_call *c, struct op_cost *out) { mhc_cost(c, 1, out); }

/* Attribute mean: no parameters, whatever the sample gives. */
static const struct op_arg mhc_contract_fwd_arg_list[] = {IN(x), WOPT(w), WOPT(base), WOPT(scale), OUT(y), {.name = "m", .role = ARG_OOUT, .no_grad = true, .type = ARG_WIDE},
                                                          {.name = "rstd", .role = ARG_OOUT, .no_grad = true, .type = ARG_WIDE}};
static const struct op_attr mhc_contract_fwd_attrs[] = {{.name = "streams", .value = 4}, {.name = "eps", .value = 1e-5}};
static struct mhc_contract_fwd_args mhc_contract_fwd_pack(const struct op_call *c)
{
    return (struct mhc_contract_fwd_args){.x = T(x), .w = T(w), .base = T(base), .scale = T(scale), .y = T(y), .m = T(m), .rstd = T(rstd),
                                          .eps = op_attr(c, "eps")};
}
MHC_FUNCTIONS(mhc_contract_fwd, "KTgsCn1", 2 * streams_of(c) + 4)
MHC_INFER(mhc_contract_fwd, "KTgsCn1")

static const struct op_arg mhc_contract_bwd_arg_list[] = {IN(dy), OPT(x), WOPT(w), WOPT(base), WOPT(scale), WOPT(m), WOPT(rstd), OUT(dx), WOOUT(dw), WOOUT(dbase), WOOUT(dscale), WORK};
static const struct op_attr mhc_contract_bwd_attrs[] = {{.name = "streams", .value = 4}, {.name = "eps", .value = 1e-5}, {.name = "acc_dx", .value = 0}, {.name = "acc_params", .value = 0}};
static struct mhc_contract_bwd_args mhc_contract_bwd_pack(const struct op_call *c)
{
    return (struct mhc_contract_bwd_args){.dy = T(dy), .x = T(x), .w = T(w), .base = T(base), .scale = T(scale), .m = T(m), .rstd = T(rstd),
                                          .dx = T(dx), .dw = T(dw), .dbase = T(dbase), .dscale = T(dscale), .work = T(work),
                                          .eps = op_attr(c, "eps"), .acc_dx = FLAG(acc_dx), .acc_params = FLAG(acc_params)};
}
MHC_FUNCTIONS(mhc_contract_bwd, "CKTgsn1KTgs.", 4 * streams_of(c) + 6)
MHC_INFER_WORK(mhc_contract_bwd, "CKTgsn1KTgs.")

/* ---- samples: one list for all primitives; what an op does not know it ignores ------------------------------------- */

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
};
static const struct op_sample contract_samples[] = {
    {"rows=5 d=9"},
    {"rows=1 d=1 streams=2"},
    {"rows=0 d=8"},
    {"rows=17 d=33 streams=3"},
    {"rows=33 d=20 streams=8 strided=1"},
    {"rows=70 d=16 eps=1e-3"},
    {"rows=6 d=648"},
    {"rows=19 d=33 no_w=1 no_base=1 no_scale=1 no_m=1 no_rstd=1 no_dw=1 no_dbase=1 no_dscale=1"},
    {"rows=6 d=5 streams=3 no_w=1 no_base=1 no_scale=1 no_m=1 no_rstd=1 no_dw=1 no_dbase=1 no_dscale=1 strided=1"},
    /* backward only */
    {"rows=401 d=5 acc_params=1"},
    {"rows=23 d=17 streams=3 acc_dx=1"},
    {"rows=7 d=6 acc_dx=1 no_w=1 no_base=1 no_scale=1 no_m=1 no_rstd=1 no_dw=1 no_dbase=1 no_dscale=1"},
};
static const struct op_sample project_bwd_samples[] = {
    {"rows=5 d=9 acc_dx=1"},
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
    {"rows=33 acc_params=1"},
    {"rows=700 acc_params=1 profile=1"},
    {"rows=5 streams=3 no_dpost=1 no_dlogits=1 profile=1"},
    {"rows=5 no_dpre=1 no_dz=1 no_da_pre=1 no_da_post=1 no_da_res=1 no_dbeta=1"},
    {"rows=5 streams=8 no_dpre=1 no_dlogits=1 strided=1"},
};
static const struct op_sample aggregate_bwd_samples[] = {{"rows=5 d=9 acc_dx=1"}, {"rows=3 d=2056 acc_dx=1"}, {"rows=66 d=64 streams=3"}, {"rows=7 d=7 streams=8 strided=1 acc_dx=1"}};
static const struct op_sample combine_bwd_samples[] = {
    {"rows=5 d=9 acc_dbias=1"},
    {"rows=0 d=9"},
    {"rows=67 d=70 streams=3 p=0.25 profile=1 acc_dbias=1"},
    {"rows=130 d=17 streams=8 no_dbias=1 strided=1"},
    {"rows=130 d=129 p=0.1 seq=10 strided=1"},
    {"rows=2100 d=8 acc_dbias=1"},
    {"rows=9 d=2056 p=0.1 profile=1"},
};
static const struct op_sample sinkhorn_bwd_samples[] = {{"rows=5"}, {"rows=70 iterations=33"}, {"rows=70 profile=1 iterations=32"}, {"rows=33 streams=3 profile=1"}, {"rows=17 streams=8 iterations=2 strided=1"}};
static const struct op_sample expand_bwd_samples[] = {{"rows=5 d=9"}, {"rows=66 d=64 streams=3 strided=1"}, {"rows=0 d=3"}};
static const struct op_sample bench[] = {{"rows=4096 d=320"}, {"rows=2048 d=2048"}, {"rows=16384 d=2048 gpu=1"}};

MHC_DESC(mhc_project_fwd, "mHC logits and root mean square of the streams", "mhc_project_bwd", 5e-6, samples, countof(samples), bench);
MHC_DESC(mhc_project_bwd, "gradient of mhc_project_fwd", NULL, 1e-5, project_bwd_samples, countof(project_bwd_samples), bench);
MHC_DESC(mhc_gates_fwd, "mHC gates and mixing logits", "mhc_gates_bwd", 5e-6, samples, countof(samples), bench);
MHC_DESC(mhc_gates_bwd, "gradient of mhc_gates_fwd", NULL, 1e-5, gates_bwd_samples, countof(gates_bwd_samples), bench);
MHC_DESC(mhc_sinkhorn_fwd, "doubly stochastic matrix of mixing logits", "mhc_sinkhorn_bwd", 5e-6, samples, countof(samples), bench);
MHC_DESC(mhc_sinkhorn_bwd, "gradient of mhc_sinkhorn_fwd", NULL, 2e-5, sinkhorn_bwd_samples, countof(sinkhorn_bwd_samples), bench);
MHC_DESC(mhc_aggregate_fwd, "weighted sum of the streams", "mhc_aggregate_bwd", 2e-6, samples, countof(samples), bench);
MHC_DESC(mhc_aggregate_bwd, "gradient of mhc_aggregate_fwd", NULL, 5e-6, aggregate_bwd_samples, countof(aggregate_bwd_samples), bench);
MHC_DESC(mhc_combine_fwd, "mix the streams and add a sublayer's output to each", "mhc_combine_bwd", 2e-6, samples, countof(samples), bench);
MHC_DESC(mhc_combine_bwd, "gradient of mhc_combine_fwd", NULL, 5e-6, combine_bwd_samples, countof(combine_bwd_samples), bench);
OP_FIELDS(mhc_expand_fwd, MHC_EXPAND_FWD_FIELDS, );
OP_ATTRS(mhc_expand_fwd, MHC_EXPAND_FWD_FIELDS, OP_ATTR_EXTRA("streams", 4));
OP_CALLS(mhc_expand_fwd);
const struct op_desc mhc_expand_fwd_desc = {
    OP_IS(mhc_expand_fwd), .summary = "copy one stream to n", OP_LIST(dims, mhc_dims), .cost = expand_cost,
    .backward = "mhc_expand_bwd", .tolerance = 1e-7, OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_FIELDS(mhc_expand_bwd, MHC_EXPAND_BWD_FIELDS, );
OP_ATTRS(mhc_expand_bwd, MHC_EXPAND_BWD_FIELDS, OP_ATTR_EXTRA("streams", 4));
OP_CALLS(mhc_expand_bwd);
const struct op_desc mhc_expand_bwd_desc = {
    OP_IS(mhc_expand_bwd), .summary = "gradient of mhc_expand_fwd", OP_LIST(dims, mhc_dims), .cost = sum_cost,
    .tolerance = 1e-6, OP_LIST(samples, expand_bwd_samples), OP_LIST(bench, bench),
};
MHC_DESC(mhc_contract_fwd, "n streams to one: mean, or by learned gates", "mhc_contract_bwd", 5e-6, contract_samples, countof(contract_samples) - 3, bench);
MHC_DESC(mhc_contract_bwd, "gradient of mhc_contract_fwd", NULL, 1e-5, contract_samples, countof(contract_samples), bench);
