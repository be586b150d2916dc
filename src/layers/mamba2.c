/* The Mamba-2 core, symbol 'M'.
 *
 * Shapes: T = batch * seq rows, H heads of P channels, I = H P inner width, G groups, N state size.
 *   zxbcdt [T, 2I + 2GN + H] = h Win^T             sections [z | x | B | C | dt]
 *   xbc    [T, I + 2GN]      = silu(conv(x | B | C) + bias), each channel by itself (ops/conv1d)
 *   y      [T, I]            = state-space core of x, B, C, dt with A_log, dt_bias, D (ops/ssd);
 *                              states: what enters each chunk, for the backward pass
 *   n      [T, I]            = RMSNorm(y * silu(z)) * w over each group, or over the whole width
 * (ops/gatednorm) f      [T, hidden]       = n Wout^T Nodes: in, conv, ssd, norm, out. The three in
 * the middle are undone by one backward phase (of conv), because together they write one row of
 * dzxbcdt: norm its z, ssd its dt, conv the rest. Decoding keeps the last rows of the convolution's
 * input and the state of each head. */
#include "layers/layer.h"

#include <math.h>

struct mamba {
    int64_t batch, seq, heads, dim, inner, groups, state, conv, chunk;
    int64_t mixed;       /* width of xbc */
    int64_t width;       /* of zxbcdt */
    int64_t x_at, dt_at; /* first columns in zxbcdt; z is at 0 */
    int64_t norm_group;  /* channels that share one mean square */
    double dt_min, dt_max;
};

/* A literal in Megatron and Mamba-2, whatever the model's other norms use. */
static const double norm_eps = 1e-5;

struct mamba_slots {
    slot_id zxbcdt, xbc, y, states, n, rstd;
    slot_id dzxbcdt, dxbc, dy, dn;
    slot_id conv_state, ssm_state, conv_work, ssd_work, bwd_work;
    struct weight w_in, conv_w, conv_b, dt_bias, a_log, d, norm, w_out;
};

/* ---- views
 * ------------------------------------------------------------------------------------------------
 */

/* Columns of a row matrix as [B, S, n]. */
static struct tensor batched(const struct mamba *m, const struct tensor *rows, int64_t first,
                             int64_t n)
{
    struct tensor part = tensor_cols(rows, first, n);
    return tensor_split_first(&part, m->batch, m->seq);
}

/* Columns of a row matrix as [B, S, a, b]. */
static struct tensor heads_of(const struct mamba *m, const struct tensor *rows, int64_t first,
                              int64_t a, int64_t b)
{
    struct tensor part = batched(m, rows, first, a * b);
    return tensor_split_last(&part, a, b);
}

static struct tensor taps(const struct mamba *m, const struct tensor *w)
{
    return tensor_2d(w->data, w->dtype, m->mixed, m->conv); /* stored [C, 1, W] */
}

static struct tensor doc_view(const struct mamba *m, const struct tensor *doc)
{
    return doc->data ? tensor_2d(doc->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

/* ---- node conv
 * -------------------------------------------------------------------------------------------- */

enum { CF_ZXBCDT, CF_W, CF_BIAS, CF_DOC, CF_START, CF_XBC, CF_STATE, CF_WORK };

static int conv_fwd(const struct step_ctx *c)
{
    const struct mamba *m = c->self;
    struct conv1d_fwd_args a = {.x = batched(m, &c->t[CF_ZXBCDT], m->x_at, m->mixed),
                                .w = taps(m, &c->t[CF_W]),
                                .bias = c->t[CF_BIAS],
                                .doc_start = doc_view(m, &c->t[CF_DOC]),
                                .start = c->t[CF_START],
                                .init = c->t[CF_STATE],
                                .final = c->t[CF_STATE],
                                .y = batched(m, &c->t[CF_XBC], 0, m->mixed),
                                .work = c->t[CF_WORK],
                                .silu = true};
    return c->ops->conv1d_fwd(c->lane, &a);
}

/* ---- node ssd
 * --------------------------------------------------------------------------------------------- */

enum {
    SF_ZXBCDT,
    SF_XBC,
    SF_ALOG,
    SF_BIAS,
    SF_D,
    SF_DOC,
    SF_START,
    SF_Y,
    SF_STATES,
    SF_STATE,
    SF_WORK
};

static int ssd_fwd(const struct step_ctx *c)
{
    const struct mamba *m = c->self;
    const struct tensor *xbc = &c->t[SF_XBC];
    int64_t gn = m->groups * m->state;
    struct ssd_fwd_args a = {.x = heads_of(m, xbc, 0, m->heads, m->dim),
                             .Bm = heads_of(m, xbc, m->inner, m->groups, m->state),
                             .Cm = heads_of(m, xbc, m->inner + gn, m->groups, m->state),
                             .dt = batched(m, &c->t[SF_ZXBCDT], m->dt_at, m->heads),
                             .A_log = c->t[SF_ALOG],
                             .dt_bias = c->t[SF_BIAS],
                             .D = c->t[SF_D],
                             .doc_start = doc_view(m, &c->t[SF_DOC]),
                             .start = c->t[SF_START],
                             .init = c->t[SF_STATE],
                             .final = c->t[SF_STATE],
                             .states = c->t[SF_STATES],
                             .y = heads_of(m, &c->t[SF_Y], 0, m->heads, m->dim),
                             .work = c->t[SF_WORK],
                             .chunk = m->chunk,
                             .dt_min = m->dt_min,
                             .dt_max = m->dt_max};
    return c->ops->ssd_fwd(c->lane, &a);
}

/* ---- node norm
 * -------------------------------------------------------------------------------------------- */

enum { NF_Y, NF_ZXBCDT, NF_W, NF_N, NF_RSTD };

static int norm_fwd(const struct step_ctx *c)
{
    const struct mamba *m = c->self;
    struct gatednorm_fwd_args a = {.x = c->t[NF_Y],
                                   .z = tensor_cols(&c->t[NF_ZXBCDT], 0, m->inner),
                                   .w = c->t[NF_W],
                                   .y = c->t[NF_N],
                                   .rstd = c->t[NF_RSTD],
                                   .eps = norm_eps,
                                   .group = m->norm_group};
    return c->ops->gatednorm_fwd(c->lane, &a);
}

/* ---- backward of all three
 * -------------------------------------------------------------------------------- */

enum {
    MB_DN,
    MB_ZXBCDT,
    MB_XBC,
    MB_Y,
    MB_STATES,
    MB_RSTD,
    MB_NORM,
    MB_ALOG,
    MB_BIAS,
    MB_D,
    MB_CONVW,
    MB_CONVB,
    MB_DOC,
    MB_DZXBCDT,
    MB_DXBC,
    MB_DY,
    MB_DNORM,
    MB_DALOG,
    MB_DBIAS,
    MB_DD,
    MB_DCONVW,
    MB_DCONVB,
    MB_WORK
};

static int norm_bwd(const struct step_ctx *c, const struct mamba *m)
{
    struct gatednorm_bwd_args a = {.dy = c->t[MB_DN],
                                   .x = c->t[MB_Y],
                                   .z = tensor_cols(&c->t[MB_ZXBCDT], 0, m->inner),
                                   .w = c->t[MB_NORM],
                                   .rstd = c->t[MB_RSTD],
                                   .dx = c->t[MB_DY],
                                   .dz = tensor_cols(&c->t[MB_DZXBCDT], 0, m->inner),
                                   .dw = c->t[MB_DNORM],
                                   .work = c->t[MB_WORK],
                                   .group = m->norm_group,
                                   .acc_dw = c->add[MB_DNORM]};
    return c->ops->gatednorm_bwd(c->lane, &a);
}

static int ssd_bwd(const struct step_ctx *c, const struct mamba *m)
{
    const struct tensor *xbc = &c->t[MB_XBC], *dxbc = &c->t[MB_DXBC];
    int64_t b_at = m->inner, c_at = m->inner + m->groups * m->state;
    struct ssd_bwd_args a = {.dy = heads_of(m, &c->t[MB_DY], 0, m->heads, m->dim),
                             .x = heads_of(m, xbc, 0, m->heads, m->dim),
                             .dt = batched(m, &c->t[MB_ZXBCDT], m->dt_at, m->heads),
                             .A_log = c->t[MB_ALOG],
                             .dt_bias = c->t[MB_BIAS],
                             .D = c->t[MB_D],
                             .Bm = heads_of(m, xbc, b_at, m->groups, m->state),
                             .Cm = heads_of(m, xbc, c_at, m->groups, m->state),
                             .doc_start = doc_view(m, &c->t[MB_DOC]),
                             .states = c->t[MB_STATES],
                             .dx = heads_of(m, dxbc, 0, m->heads, m->dim),
                             .ddt = batched(m, &c->t[MB_DZXBCDT], m->dt_at, m->heads),
                             .dA_log = c->t[MB_DALOG],
                             .ddt_bias = c->t[MB_DBIAS],
                             .dD = c->t[MB_DD],
                             .dBm = heads_of(m, dxbc, b_at, m->groups, m->state),
                             .dCm = heads_of(m, dxbc, c_at, m->groups, m->state),
                             .work = c->t[MB_WORK],
                             .chunk = m->chunk,
                             .dt_min = m->dt_min,
                             .dt_max = m->dt_max,
                             .acc_dA_log = c->add[MB_DALOG],
                             .acc_ddt_bias = c->add[MB_DBIAS],
                             .acc_dD = c->add[MB_DD]};
    return c->ops->ssd_bwd(c->lane, &a);
}

static int conv_bwd(const struct step_ctx *c, const struct mamba *m)
{
    struct conv1d_bwd_args a = {.dy = batched(m, &c->t[MB_DXBC], 0, m->mixed),
                                .x = batched(m, &c->t[MB_ZXBCDT], m->x_at, m->mixed),
                                .w = taps(m, &c->t[MB_CONVW]),
                                .bias = c->t[MB_CONVB],
                                .doc_start = doc_view(m, &c->t[MB_DOC]),
                                .dx = batched(m, &c->t[MB_DZXBCDT], m->x_at, m->mixed),
                                .dw = taps(m, &c->t[MB_DCONVW]),
                                .dbias = c->t[MB_DCONVB],
                                .work = c->t[MB_WORK],
                                .silu = true,
                                .acc_dw = c->add[MB_DCONVW],
                                .acc_dbias = c->add[MB_DCONVB]};
    return c->ops->conv1d_bwd(c->lane, &a);
}

static int mixer_bwd(const struct step_ctx *c)
{
    TRY(norm_bwd(c, c->self));
    TRY(ssd_bwd(c, c->self));
    return conv_bwd(c, c->self);
}

/* ---- declaration
 * ------------------------------------------------------------------------------------------ */

static void sizes(const struct build *b, struct mamba *m)
{
    const struct config_model *c = &b->cfg->model;
    *m = (struct mamba){.batch = b->batch,
                        .seq = b->seq,
                        .heads = c->mamba_heads,
                        .dim = c->mamba_head_dim,
                        .inner = c->mamba_heads * c->mamba_head_dim,
                        .groups = c->mamba_groups,
                        .state = c->mamba_state,
                        .conv = c->mamba_conv,
                        .chunk = c->mamba_chunk,
                        .dt_min = c->mamba_dt_min,
                        .dt_max = c->mamba_dt_max};
    m->mixed = m->inner + 2 * m->groups * m->state;
    m->x_at = m->inner;
    m->dt_at = m->inner + m->mixed;
    m->width = m->dt_at + m->heads;
    m->norm_group = c->mamba_norm == CFG_MAMBA_NORM_WHOLE ? m->inner : m->inner / m->groups;
}

static void declare_params(struct build *b, const struct mamba *m, struct mamba_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    double bound = 1 / sqrt((double)m->conv); /* of the convolution: its fan-in is the taps */
    struct param in = param_matrix("mixer.in_proj.weight", m->width, c->hidden, c->init_std);
    struct param out = param_matrix("mixer.out_proj.weight", c->hidden, m->inner, output_std(b));
    struct param conv_w = {.key = "mixer.conv1d.weight",
                           .rank = 3,
                           .dim = {m->mixed, 1, m->conv},
                           .init = INIT_UNIFORM,
                           .init_a = -bound,
                           .init_b = bound,
                           .decay = true,
                           .wide = true};
    struct param conv_b = param_vector("mixer.conv1d.bias", m->mixed, INIT_UNIFORM);
    struct param dt_bias = param_vector("mixer.dt_bias", m->heads, INIT_DT_BIAS);
    struct param a_log = param_vector("mixer.A_log", m->heads, INIT_LOG_UNIFORM);
    struct param d = param_vector("mixer.D", m->heads, INIT_ONE),
                 norm = param_vector("mixer.norm.weight", m->inner, INIT_ONE);
    conv_b.init_a = -bound;
    conv_b.init_b = bound;
    dt_bias.init_a = 0.001;
    dt_bias.init_b = 0.1;
    a_log.init_a = 1;
    a_log.init_b = 16;
    s->w_in = build_weight(b, &in);
    s->conv_w = build_weight(b, &conv_w);
    s->conv_b = build_weight(b, &conv_b);
    s->dt_bias = build_weight(b, &dt_bias);
    s->a_log = build_weight(b, &a_log);
    s->d = build_weight(b, &d);
    s->norm = build_weight(b, &norm);
    s->w_out = build_weight(b, &out);
}

/* Shapes of the real calls, for the sizes of their scratch. */
static struct tensor shape4(const struct build *b, int64_t heads, int64_t dim)
{
    return tensor_4d(NULL, b->dev->real, b->batch, b->seq, heads, dim);
}

static void declare_work(struct build *b, const struct mamba *m, struct mamba_slots *s)
{
    const struct ops *ops = b->ops;
    enum dtype real = b->dev->real;
    struct tensor row = tensor_3d(NULL, real, b->batch, b->seq, m->mixed),
                  kernel = tensor_2d(NULL, b->dev->wide, m->mixed, m->conv);
    struct tensor inner = tensor_2d(NULL, real, b->rows, m->inner),
                  gains = tensor_1d(NULL, b->dev->wide, m->inner);
    struct conv1d_fwd_args cf = {.x = row, .w = kernel, .y = row};
    struct ssd_fwd_args sf = {
        .x = shape4(b, m->heads, m->dim), .Bm = shape4(b, m->groups, m->state), .chunk = m->chunk};
    sf.Cm = sf.Bm;
    s->conv_work =
        ops->conv1d_fwd_work ? build_work(b, "conv_work", ops->conv1d_fwd_work(&cf)) : NO_SLOT;
    s->ssd_work = ops->ssd_fwd_work ? build_work(b, "ssd_work", ops->ssd_fwd_work(&sf)) : NO_SLOT;
    s->bwd_work = NO_SLOT;
    if (!training(b))
        return;
    struct conv1d_bwd_args cb = {.dy = row, .x = row, .w = kernel};
    struct ssd_bwd_args sb = {.x = sf.x, .Bm = sf.Bm, .Cm = sf.Cm, .chunk = m->chunk};
    struct gatednorm_bwd_args nb = {.x = inner, .w = gains, .group = m->norm_group};
    int64_t bytes = ops->conv1d_bwd_work ? ops->conv1d_bwd_work(&cb) : 0;
    bytes = max_i64(bytes, ops->ssd_bwd_work ? ops->ssd_bwd_work(&sb) : 0);
    bytes = max_i64(bytes, ops->gatednorm_bwd_work ? ops->gatednorm_bwd_work(&nb) : 0);
    s->bwd_work = build_work(b, "bwd_work", bytes);
}

static void declare_slots(struct build *b, const struct mamba *m, struct mamba_slots *s)
{
    enum dtype real = b->dev->real;
    const int64_t states[] = {b->batch, ceil_div(b->seq, m->chunk), m->heads, m->state, m->dim};
    bool decode = b->mode == BUILD_DECODE;
    s->zxbcdt = build_real(b, "zxbcdt", b->rows, m->width);
    s->xbc = build_real(b, "xbc", b->rows, m->mixed);
    s->y = build_real(b, "y", b->rows, m->inner);
    s->states = training(b)
                    ? graph_slot(b->g, "states", tensor_shape(real, countof(states), states))
                    : NO_SLOT;
    s->n = build_real(b, "n", b->rows, m->inner);
    s->rstd = build_wide(b, "rstd", b->rows, m->inner / m->norm_group);
    s->dzxbcdt = build_grad(b, "dzxbcdt", b->rows, m->width);
    s->dxbc = build_grad(b, "dxbc", b->rows, m->mixed);
    s->dy = build_grad(b, "dy", b->rows, m->inner);
    s->dn = build_grad(b, "dn", b->rows, m->inner);
    struct tensor tail = tensor_3d(NULL, real, b->batch, m->conv - 1, m->mixed);
    struct tensor state = tensor_4d(NULL, b->dev->wide, b->batch, m->heads, m->state, m->dim);
    s->conv_state =
        decode && m->conv > 1 ? build_table(b, "conv_state", tail, NULL, NULL) : NO_SLOT;
    s->ssm_state = decode ? build_table(b, "ssm_state", state, NULL, NULL) : NO_SLOT;
    declare_work(b, m, s);
}

/* A node whose forward may be replayed to make the slots again. */
static int forward_node(struct build *b, const struct mamba *m, const char *name, step_fn fn,
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

/* What the chunked form needs per row, counted truthfully: causal halves of C B^T and of its
 * product with x, and the state in and out. The "model FLOPs" of model_flops_per_token follow
 * Megatron's formula instead. */
static double ssd_flops(const struct build *b, const struct mamba *m)
{
    double q = (double)min_i64(m->chunk, b->seq), inner = (double)m->inner, n = (double)m->state;
    return (double)b->rows * (q * (double)m->groups * n + q * inner + 4 * inner * n);
}

static void declare_mixer(struct build *b, const struct mamba *m, const struct mamba_slots *s)
{
    struct graph *g = b->g;
    double rows = (double)b->rows, inner = (double)m->inner, mixed = (double)m->mixed;
    double size = (double)dtype_bytes(b->dev->real), ssd = ssd_flops(b, m);
    double states = training(b) ? (double)tensor_elems(&g->slots[s->states].shape) : 0;
    const struct use conv[] = {READS(s->zxbcdt),       READS(s->conv_w.w),  READS(s->conv_b.w),
                               READS(b->in.doc_start), READS(b->in.start),  WRITES(s->xbc),
                               ADDS(s->conv_state),    WRITES(s->conv_work)};
    const struct use core[] = {READS(s->zxbcdt),    READS(s->xbc),      READS(s->a_log.w),
                               READS(s->dt_bias.w), READS(s->d.w),      READS(b->in.doc_start),
                               READS(b->in.start),  WRITES(s->y),       WRITES(s->states),
                               ADDS(s->ssm_state),  WRITES(s->ssd_work)};
    const struct use norm[] = {READS(s->y), READS(s->zxbcdt), READS(s->norm.w), WRITES(s->n),
                               WRITES(s->rstd)};
    int n = forward_node(b, m, "conv", conv_fwd, conv, countof(conv),
                         rows * mixed * (2 * (double)m->conv + 4), 2 * rows * mixed,
                         (const slot_id[]){s->xbc}, 1);
    forward_node(b, m, "ssd", ssd_fwd, core, countof(core), ssd, rows * (mixed + inner) + states,
                 (const slot_id[]){s->y, s->states}, 2);
    forward_node(b, m, "norm", norm_fwd, norm, countof(norm), 9 * rows * inner, 3 * rows * inner,
                 (const slot_id[]){s->n, s->rstd}, 2);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_BWD, mixer_bwd, READS(s->dn), READS(s->zxbcdt), READS(s->xbc), READS(s->y),
                READS(s->states), READS(s->rstd), READS(s->norm.w), READS(s->a_log.w),
                READS(s->dt_bias.w), READS(s->d.w), READS(s->conv_w.w), READS(s->conv_b.w),
                READS(b->in.doc_start), WRITES(s->dzxbcdt), WRITES(s->dxbc), WRITES(s->dy),
                ADDS(s->norm.dw), ADDS(s->a_log.dw), ADDS(s->dt_bias.dw), ADDS(s->d.dw),
                ADDS(s->conv_w.dw), ADDS(s->conv_b.dw), WRITES(s->bwd_work));
    graph_inplace(g, n, PH_BWD, MB_DN, MB_DY);
    graph_cost(g, n, PH_BWD, 2.2 * ssd + rows * (22 * inner + mixed * (6 * (double)m->conv + 8)),
               size * (rows * (5 * mixed + 8 * inner) + states));
}

static int mamba_declare(struct build *b, struct core_io *io)
{
    struct mamba *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    sizes(b, m);
    struct mamba_slots s;
    int64_t hidden = b->cfg->model.hidden;
    graph_scope(b->g, b->layer, "mamba");
    declare_params(b, m, &s);
    declare_slots(b, m, &s);
    io->f = build_real(b, "out", b->rows, hidden);
    if (b->g->err.code != ST_OK)
        return b->g->err.code;
    linear_declare(b, "in",
                   &(struct linear){.x = io->h,
                                    .y = s.zxbcdt,
                                    .dy = s.dzxbcdt,
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

const struct core_kind core_mamba2 = {.symbol = 'M',
                                      .name = "mamba2",
                                      .norm_key = "mixer.in_proj.layer_norm_weight",
                                      .declare = mamba_declare};
