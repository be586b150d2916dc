/* The gated delta net core, symbol 'G'.
 *
 * Shapes: T = batch * seq rows, Hk key heads of dk channels, Hv value heads of dv, I = Hv dv.
 *   in     [T, 2 Hk dk + 2 I + 2 Hv] = h Win^T    sections [q | k | v | z | beta | alpha]
 *   qkv    [T, 2 Hk dk + I]  = silu(conv(q | k | v)), each channel by itself (ops/conv1d)
 *   o      [T, I]            = gated delta rule of q, k, v, alpha, beta with A_log, dt_bias
 *                              (ops/gdn); states: what enters each chunk, for the backward pass
 *   n      [T, I]            = RMSNorm(o) * w * silu(z) over each head, gains shared by the heads
 *                              (ops/gatednorm)
 *   f      [T, hidden]       = n Wout^T
 * Nodes: in, conv, rule, norm, out. The three in the middle are undone by one backward phase (of
 * conv), because together they write one row of din: norm its z, rule its beta and alpha, conv the
 * rest. Decoding keeps the last rows of the convolution's input and the state of each head. */
#include "layers/layer.h"

#include <math.h>

struct gdn {
    int64_t batch, seq, key_heads, heads, dk, dv, inner, conv, chunk;
    int64_t keys;                    /* width of q, and of k */
    int64_t mixed;                   /* width of qkv */
    int64_t width;                   /* of in */
    int64_t z_at, beta_at, alpha_at; /* first columns in in; q is at 0 */
    double eps;
    bool zero_centered;
};

struct gdn_slots {
    slot_id in, qkv, o, states, n, rstd;
    slot_id din, dqkv, d_o, dn;
    slot_id conv_state, rule_state, conv_work, rule_work, bwd_work;
    struct weight w_in, conv_w, dt_bias, a_log, norm, w_out;
};

/* ---- views
 * ------------------------------------------------------------------------------------------------
 */

/* Columns of a row matrix as [B, S, n]. */
static struct tensor batched(const struct gdn *m, const struct tensor *rows, int64_t first,
                             int64_t n)
{
    struct tensor part = tensor_cols(rows, first, n);
    return tensor_split_first(&part, m->batch, m->seq);
}

/* Columns of a row matrix as [B, S, heads, dim]. */
static struct tensor heads_of(const struct gdn *m, const struct tensor *rows, int64_t first,
                              int64_t heads, int64_t dim)
{
    struct tensor part = batched(m, rows, first, heads * dim);
    return tensor_split_last(&part, heads, dim);
}

static struct tensor taps(const struct gdn *m, const struct tensor *w)
{
    return tensor_2d(w->data, w->dtype, m->mixed, m->conv); /* stored [C, 1, W] */
}

static struct tensor doc_view(const struct gdn *m, const struct tensor *doc)
{
    return doc->data ? tensor_2d(doc->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

/* ---- node conv
 * -------------------------------------------------------------------------------------------- */

enum { CF_IN, CF_W, CF_DOC, CF_START, CF_QKV, CF_STATE, CF_WORK };

static int conv_fwd(const struct step_ctx *c)
{
    const struct gdn *m = c->self;
    struct conv1d_fwd_args a = {.x = batched(m, &c->t[CF_IN], 0, m->mixed),
                                .w = taps(m, &c->t[CF_W]),
                                .doc_start = doc_view(m, &c->t[CF_DOC]),
                                .start = c->t[CF_START],
                                .init = c->t[CF_STATE],
                                .final = c->t[CF_STATE],
                                .y = batched(m, &c->t[CF_QKV], 0, m->mixed),
                                .work = c->t[CF_WORK],
                                .silu = true};
    return c->ops->conv1d_fwd(c->lane, &a);
}

/* ---- node rule
 * -------------------------------------------------------------------------------------------- */

enum { RF_IN, RF_QKV, RF_ALOG, RF_BIAS, RF_DOC, RF_START, RF_O, RF_STATES, RF_STATE, RF_WORK };

static int rule_fwd(const struct step_ctx *c)
{
    const struct gdn *m = c->self;
    const struct tensor *qkv = &c->t[RF_QKV];
    struct gdn_fwd_args a = {.q = heads_of(m, qkv, 0, m->key_heads, m->dk),
                             .k = heads_of(m, qkv, m->keys, m->key_heads, m->dk),
                             .v = heads_of(m, qkv, 2 * m->keys, m->heads, m->dv),
                             .alpha = batched(m, &c->t[RF_IN], m->alpha_at, m->heads),
                             .beta = batched(m, &c->t[RF_IN], m->beta_at, m->heads),
                             .A_log = c->t[RF_ALOG],
                             .dt_bias = c->t[RF_BIAS],
                             .doc_start = doc_view(m, &c->t[RF_DOC]),
                             .start = c->t[RF_START],
                             .init = c->t[RF_STATE],
                             .final = c->t[RF_STATE],
                             .states = c->t[RF_STATES],
                             .o = heads_of(m, &c->t[RF_O], 0, m->heads, m->dv),
                             .work = c->t[RF_WORK],
                             .chunk = m->chunk};
    return c->ops->gdn_fwd(c->lane, &a);
}

/* ---- node norm
 * -------------------------------------------------------------------------------------------- */

enum { NF_O, NF_IN, NF_W, NF_N, NF_RSTD };

static int norm_fwd(const struct step_ctx *c)
{
    const struct gdn *m = c->self;
    struct gatednorm_fwd_args a = {.x = c->t[NF_O],
                                   .z = tensor_cols(&c->t[NF_IN], m->z_at, m->inner),
                                   .w = c->t[NF_W],
                                   .y = c->t[NF_N],
                                   .rstd = c->t[NF_RSTD],
                                   .eps = m->eps,
                                   .group = m->dv,
                                   .norm_first = true,
                                   .zero_centered = m->zero_centered};
    return c->ops->gatednorm_fwd(c->lane, &a);
}

/* ---- backward of all three
 * -------------------------------------------------------------------------------- */

enum {
    MB_DN,
    MB_IN,
    MB_QKV,
    MB_O,
    MB_STATES,
    MB_RSTD,
    MB_NORM,
    MB_ALOG,
    MB_BIAS,
    MB_CONVW,
    MB_DOC,
    MB_DIN,
    MB_DQKV,
    MB_DO,
    MB_DNORM,
    MB_DALOG,
    MB_DBIAS,
    MB_DCONVW,
    MB_WORK
};

static int norm_bwd(const struct step_ctx *c, const struct gdn *m)
{
    struct gatednorm_bwd_args a = {.dy = c->t[MB_DN],
                                   .x = c->t[MB_O],
                                   .z = tensor_cols(&c->t[MB_IN], m->z_at, m->inner),
                                   .w = c->t[MB_NORM],
                                   .rstd = c->t[MB_RSTD],
                                   .dx = c->t[MB_DO],
                                   .dz = tensor_cols(&c->t[MB_DIN], m->z_at, m->inner),
                                   .dw = c->t[MB_DNORM],
                                   .work = c->t[MB_WORK],
                                   .group = m->dv,
                                   .norm_first = true,
                                   .zero_centered = m->zero_centered,
                                   .acc_dw = c->add[MB_DNORM]};
    return c->ops->gatednorm_bwd(c->lane, &a);
}

static int rule_bwd(const struct step_ctx *c, const struct gdn *m)
{
    const struct tensor *qkv = &c->t[MB_QKV], *dqkv = &c->t[MB_DQKV];
    int64_t k_at = m->keys, v_at = 2 * m->keys;
    struct gdn_bwd_args a = {.d_o = heads_of(m, &c->t[MB_DO], 0, m->heads, m->dv),
                             .q = heads_of(m, qkv, 0, m->key_heads, m->dk),
                             .k = heads_of(m, qkv, k_at, m->key_heads, m->dk),
                             .v = heads_of(m, qkv, v_at, m->heads, m->dv),
                             .alpha = batched(m, &c->t[MB_IN], m->alpha_at, m->heads),
                             .beta = batched(m, &c->t[MB_IN], m->beta_at, m->heads),
                             .A_log = c->t[MB_ALOG],
                             .dt_bias = c->t[MB_BIAS],
                             .doc_start = doc_view(m, &c->t[MB_DOC]),
                             .states = c->t[MB_STATES],
                             .dq = heads_of(m, dqkv, 0, m->key_heads, m->dk),
                             .dk = heads_of(m, dqkv, k_at, m->key_heads, m->dk),
                             .dv = heads_of(m, dqkv, v_at, m->heads, m->dv),
                             .dalpha = batched(m, &c->t[MB_DIN], m->alpha_at, m->heads),
                             .dbeta = batched(m, &c->t[MB_DIN], m->beta_at, m->heads),
                             .dA_log = c->t[MB_DALOG],
                             .ddt_bias = c->t[MB_DBIAS],
                             .work = c->t[MB_WORK],
                             .chunk = m->chunk,
                             .acc_dA_log = c->add[MB_DALOG],
                             .acc_ddt_bias = c->add[MB_DBIAS]};
    return c->ops->gdn_bwd(c->lane, &a);
}

static int conv_bwd(const struct step_ctx *c, const struct gdn *m)
{
    struct conv1d_bwd_args a = {.dy = batched(m, &c->t[MB_DQKV], 0, m->mixed),
                                .x = batched(m, &c->t[MB_IN], 0, m->mixed),
                                .w = taps(m, &c->t[MB_CONVW]),
                                .doc_start = doc_view(m, &c->t[MB_DOC]),
                                .dx = batched(m, &c->t[MB_DIN], 0, m->mixed),
                                .dw = taps(m, &c->t[MB_DCONVW]),
                                .work = c->t[MB_WORK],
                                .silu = true,
                                .acc_dw = c->add[MB_DCONVW]};
    return c->ops->conv1d_bwd(c->lane, &a);
}

static int mixer_bwd(const struct step_ctx *c)
{
    TRY(norm_bwd(c, c->self));
    TRY(rule_bwd(c, c->self));
    return conv_bwd(c, c->self);
}

/* ---- declaration
 * ------------------------------------------------------------------------------------------ */

static void sizes(const struct build *b, struct gdn *m)
{
    const struct config_model *c = &b->cfg->model;
    *m = (struct gdn){.batch = b->batch,
                      .seq = b->seq,
                      .key_heads = c->gdn_key_heads,
                      .heads = c->gdn_value_heads,
                      .dk = c->gdn_key_dim,
                      .dv = c->gdn_value_dim,
                      .conv = c->gdn_conv,
                      .chunk = c->gdn_chunk,
                      .eps = c->norm_eps,
                      .zero_centered = c->norm_zero_centered};
    m->inner = m->heads * m->dv;
    m->keys = m->key_heads * m->dk;
    m->mixed = 2 * m->keys + m->inner;
    m->z_at = m->mixed;
    m->beta_at = m->z_at + m->inner;
    m->alpha_at = m->beta_at + m->heads;
    m->width = m->alpha_at + m->heads;
}

static void declare_params(struct build *b, const struct gdn *m, struct gdn_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    double bound = 1 / sqrt((double)m->conv); /* of the convolution: its fan-in is the taps */
    struct param in =
        param_matrix("self_attention.in_proj.weight", m->width, c->hidden, c->init_std);
    struct param out =
        param_matrix("self_attention.out_proj.weight", c->hidden, m->inner, output_std(b));
    struct param conv_w = {.key = "self_attention.conv1d.weight",
                           .rank = 3,
                           .dim = {m->mixed, 1, m->conv},
                           .init = INIT_UNIFORM,
                           .init_a = -bound,
                           .init_b = bound,
                           .decay = true,
                           .wide = true};
    struct param dt_bias = param_vector("self_attention.dt_bias", m->heads, INIT_ONE);
    struct param a_log = param_vector("self_attention.A_log", m->heads, INIT_LOG_UNIFORM);
    struct param norm = param_vector("self_attention.out_norm.weight", m->dv,
                                     m->zero_centered ? INIT_ZERO : INIT_ONE);
    a_log.init_a = 1;
    a_log.init_b = 16;
    s->w_in = build_weight(b, &in);
    s->conv_w = build_weight(b, &conv_w);
    s->dt_bias = build_weight(b, &dt_bias);
    s->a_log = build_weight(b, &a_log);
    s->norm = build_weight(b, &norm);
    s->w_out = build_weight(b, &out);
}

/* Shapes of the real calls, for the sizes of their scratch. */
static void declare_work(struct build *b, const struct gdn *m, struct gdn_slots *s)
{
    const struct ops *ops = b->ops;
    enum dtype real = b->dev->real;
    struct tensor row = tensor_3d(NULL, real, b->batch, b->seq, m->mixed),
                  kernel = tensor_2d(NULL, b->dev->wide, m->mixed, m->conv);
    struct tensor inner = tensor_2d(NULL, real, b->rows, m->inner),
                  gains = tensor_1d(NULL, b->dev->wide, m->dv);
    struct tensor key = tensor_4d(NULL, real, b->batch, b->seq, m->key_heads, m->dk);
    struct tensor value = tensor_4d(NULL, real, b->batch, b->seq, m->heads, m->dv);
    struct conv1d_fwd_args cf = {.x = row, .w = kernel, .y = row};
    struct gdn_fwd_args rf = {.q = key, .k = key, .v = value, .chunk = m->chunk};
    s->conv_work =
        ops->conv1d_fwd_work ? build_work(b, "conv_work", ops->conv1d_fwd_work(&cf)) : NO_SLOT;
    s->rule_work = ops->gdn_fwd_work ? build_work(b, "rule_work", ops->gdn_fwd_work(&rf)) : NO_SLOT;
    s->bwd_work = NO_SLOT;
    if (!training(b))
        return;
    struct conv1d_bwd_args cb = {.dy = row, .x = row, .w = kernel};
    struct gdn_bwd_args rb = {.q = key, .k = key, .v = value, .chunk = m->chunk};
    struct gatednorm_bwd_args nb = {.x = inner, .w = gains, .group = m->dv, .norm_first = true};
    int64_t bytes = ops->conv1d_bwd_work ? ops->conv1d_bwd_work(&cb) : 0;
    bytes = max_i64(bytes, ops->gdn_bwd_work ? ops->gdn_bwd_work(&rb) : 0);
    bytes = max_i64(bytes, ops->gatednorm_bwd_work ? ops->gatednorm_bwd_work(&nb) : 0);
    s->bwd_work = build_work(b, "bwd_work", bytes);
}

static void declare_slots(struct build *b, const struct gdn *m, struct gdn_slots *s)
{
    enum dtype real = b->dev->real;
    const int64_t states[] = {b->batch, ceil_div(b->seq, m->chunk), m->heads, m->dk, m->dv};
    bool decode = b->mode == BUILD_DECODE;
    s->in = build_real(b, "in", b->rows, m->width);
    s->qkv = build_real(b, "qkv", b->rows, m->mixed);
    s->o = build_real(b, "o", b->rows, m->inner);
    s->states = training(b)
                    ? graph_slot(b->g, "states", tensor_shape(real, countof(states), states))
                    : NO_SLOT;
    s->n = build_real(b, "n", b->rows, m->inner);
    s->rstd = build_wide(b, "rstd", b->rows, m->heads);
    s->din = build_grad(b, "din", b->rows, m->width);
    s->dqkv = build_grad(b, "dqkv", b->rows, m->mixed);
    s->d_o = build_grad(b, "do", b->rows, m->inner);
    s->dn = build_grad(b, "dn", b->rows, m->inner);
    struct tensor tail = tensor_3d(NULL, real, b->batch, m->conv - 1, m->mixed);
    struct tensor state = tensor_4d(NULL, b->dev->wide, b->batch, m->heads, m->dk, m->dv);
    s->conv_state =
        decode && m->conv > 1 ? build_table(b, "conv_state", tail, NULL, NULL) : NO_SLOT;
    s->rule_state = decode ? build_table(b, "rule_state", state, NULL, NULL) : NO_SLOT;
    declare_work(b, m, s);
}

/* A node whose forward may be replayed to make the slots again. */
static int forward_node(struct build *b, const struct gdn *m, const char *name, step_fn fn,
                        const struct use *uses, int n_uses, double flops, double elems,
                        const slot_id *makes, int n_makes)
{
    struct graph *g = b->g;
    double bytes = elems * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, name, LANE_COMPUTE, m);
    graph_phase(g, n, PH_FWD, fn, uses, n_uses);
    graph_cost(g, n, PH_FWD, flops, bytes);
    if (!training(b))
        return n;
    graph_phase(g, n, PH_REPLAY, fn, uses, n_uses);
    graph_cost(g, n, PH_REPLAY, flops, bytes);
    for (int i = 0; i < n_makes; i++)
        graph_replay(g, makes[i], n);
    return n;
}

/* What the chunked form needs, counted truthfully (see ops/gdn); model_flops_per_token follows
 * Megatron instead. */
static double rule_flops(const struct build *b, const struct gdn *m, double pairs, double halves,
                         double states)
{
    double q = (double)min_i64(m->chunk, b->seq), inner = (double)m->inner;
    return (double)b->rows *
           (pairs * q * (double)m->keys + halves * q * inner + 2 * states * inner * (double)m->dk);
}

static void declare_mixer(struct build *b, const struct gdn *m, const struct gdn_slots *s)
{
    struct graph *g = b->g;
    double rows = (double)b->rows, inner = (double)m->inner, mixed = (double)m->mixed;
    double size = (double)dtype_bytes(b->dev->real);
    double states = training(b) ? (double)tensor_elems(&g->slots[s->states].shape) : 0;
    const struct use conv[] = {READS(s->in),        READS(s->conv_w.w), READS(b->in.doc_start),
                               READS(b->in.start),  WRITES(s->qkv),     ADDS(s->conv_state),
                               WRITES(s->conv_work)};
    const struct use rule[] = {READS(s->in),        READS(s->qkv),          READS(s->a_log.w),
                               READS(s->dt_bias.w), READS(b->in.doc_start), READS(b->in.start),
                               WRITES(s->o),        WRITES(s->states),      ADDS(s->rule_state),
                               WRITES(s->rule_work)};
    const struct use norm[] = {READS(s->o), READS(s->in), READS(s->norm.w), WRITES(s->n),
                               WRITES(s->rstd)};
    int n = forward_node(b, m, "conv", conv_fwd, conv, countof(conv),
                         rows * mixed * (2 * (double)m->conv + 4), 2 * rows * mixed,
                         (const slot_id[]){s->qkv}, 1);
    forward_node(b, m, "rule", rule_fwd, rule, countof(rule), rule_flops(b, m, 2, 2, 3),
                 rows * (mixed + inner) + states, (const slot_id[]){s->o, s->states}, 2);
    forward_node(b, m, "norm", norm_fwd, norm, countof(norm), 9 * rows * inner, 3 * rows * inner,
                 (const slot_id[]){s->n, s->rstd}, 2);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_BWD, mixer_bwd, READS(s->dn), READS(s->in), READS(s->qkv), READS(s->o),
                READS(s->states), READS(s->rstd), READS(s->norm.w), READS(s->a_log.w),
                READS(s->dt_bias.w), READS(s->conv_w.w), READS(b->in.doc_start), WRITES(s->din),
                WRITES(s->dqkv), WRITES(s->d_o), ADDS(s->norm.dw), ADDS(s->a_log.dw),
                ADDS(s->dt_bias.dw), ADDS(s->conv_w.dw), WRITES(s->bwd_work));
    graph_inplace(g, n, PH_BWD, MB_DN, MB_DO);
    graph_cost(g, n, PH_BWD,
               rule_flops(b, m, 6, 5, 7) + rows * (22 * inner + mixed * (6 * (double)m->conv + 8)),
               size * (rows * (5 * mixed + 8 * inner) + states));
}

static int gdn_declare(struct build *b, struct core_io *io)
{
    struct gdn *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    sizes(b, m);
    struct gdn_slots s;
    int64_t hidden = b->cfg->model.hidden;
    graph_scope(b->g, b->layer, "gdn");
    declare_params(b, m, &s);
    declare_slots(b, m, &s);
    io->f = build_real(b, "out", b->rows, hidden);
    if (b->g->err.code != ST_OK)
        return b->g->err.code;
    linear_declare(b, "in",
                   &(struct linear){.x = io->h,
                                    .y = s.in,
                                    .dy = s.din,
                                    .dx = io->dh,
                                    .w = s.w_in,
                                    .bias = no_weight(),
                                    .in = hidden,
                                    .out = m->width});
    declare_mixer(b, m, &s);
    linear_declare(b, "out",
                   &(struct linear){.x = s.n,
                                    .y = io->f,
                                    .dy = io->df,
                                    .dx = s.dn,
                                    .w = s.w_out,
                                    .bias = no_weight(),
                                    .in = m->inner,
                                    .out = hidden});
    return b->g->err.code;
}

const struct core_kind core_gdn = {.symbol = 'G',
                                   .name = "gated delta net",
                                   .norm_key = "self_attention.in_proj.layer_norm_weight",
                                   .declare = gdn_declare};
