/* The recurrent cores' common part; see mixer.h. */
#include "layers/mixer.h"
#include "ops/conv1d/conv1d.h"
#include "ops/gatednorm/gatednorm.h"

#include <math.h>
#include <stdio.h>

/* ---- views ----------------------------------------------------------------------------------------------- */

struct tensor mixer_cols(const struct mixer *m, const struct tensor *rows, int64_t first, int64_t n)
{
    struct tensor part = tensor_cols(rows, first, n);
    return tensor_split_first(&part, m->batch, m->seq);
}

struct tensor mixer_heads(const struct mixer *m, const struct tensor *rows, int64_t first, int64_t heads, int64_t dim)
{
    struct tensor part = mixer_cols(m, rows, first, heads * dim);
    return tensor_split_last(&part, heads, dim);
}

struct tensor mixer_docs(const struct mixer *m, const struct tensor *doc)
{
    return doc->data ? tensor_2d(doc->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

static struct tensor taps(const struct mixer *m, const struct tensor *w)
{
    return tensor_2d(w->data, w->dtype, m->mixed, m->conv); /* stored [C, 1, W] */
}

/* ---- steps ----------------------------------------------------------------------------------------------- */

enum { CONV_IN, CONV_W, CONV_BIAS, CONV_DOC, CONV_START, CONV_MIXED, CONV_STATE, CONV_WORK };

static int conv_fwd(const struct step_ctx *c)
{
    const struct mixer *m = c->self;
    struct conv1d_fwd_args a = {.x = mixer_cols(m, &c->t[CONV_IN], m->mixed_at, m->mixed),
                                .w = taps(m, &c->t[CONV_W]),
                                .bias = c->t[CONV_BIAS],
                                .doc_start = mixer_docs(m, &c->t[CONV_DOC]),
                                .start = c->t[CONV_START],
                                .init = c->t[CONV_STATE],
                                .final = c->t[CONV_STATE],
                                .y = mixer_cols(m, &c->t[CONV_MIXED], 0, m->mixed),
                                .work = c->t[CONV_WORK],
                                .silu = true};
    return c->ops->conv1d_fwd(c->lane, &a);
}

enum { NORM_Y, NORM_IN, NORM_W, NORM_N, NORM_RSTD };

static int norm_fwd(const struct step_ctx *c)
{
    const struct mixer *m = c->self;
    struct gatednorm_fwd_args a = {.x = c->t[NORM_Y],
                                   .z = tensor_cols(&c->t[NORM_IN], m->z_at, m->inner),
                                   .w = c->t[NORM_W],
                                   .y = c->t[NORM_N],
                                   .rstd = c->t[NORM_RSTD],
                                   .eps = m->norm_eps,
                                   .group = m->norm_group,
                                   .norm_first = m->norm_first,
                                   .zero_centered = m->norm_zero_centered};
    return c->ops->gatednorm_fwd(c->lane, &a);
}

static int norm_bwd(const struct step_ctx *c, const struct mixer *m)
{
    struct gatednorm_bwd_args a = {.dy = c->t[MIX_DN],
                                   .x = c->t[MIX_Y],
                                   .z = tensor_cols(&c->t[MIX_IN], m->z_at, m->inner),
                                   .w = c->t[MIX_NORM],
                                   .rstd = c->t[MIX_RSTD],
                                   .dx = c->t[MIX_DY],
                                   .dz = tensor_cols(&c->t[MIX_DIN], m->z_at, m->inner),
                                   .dw = c->t[MIX_DNORM],
                                   .work = c->t[MIX_WORK],
                                   .group = m->norm_group,
                                   .norm_first = m->norm_first,
                                   .zero_centered = m->norm_zero_centered,
                                   .acc_dw = c->add[MIX_DNORM]};
    return c->ops->gatednorm_bwd(c->lane, &a);
}

static int conv_bwd(const struct step_ctx *c, const struct mixer *m)
{
    struct conv1d_bwd_args a = {.dy = mixer_cols(m, &c->t[MIX_DMIXED], 0, m->mixed),
                                .x = mixer_cols(m, &c->t[MIX_IN], m->mixed_at, m->mixed),
                                .w = taps(m, &c->t[MIX_CONV_W]),
                                .bias = c->t[MIX_CONV_B],
                                .doc_start = mixer_docs(m, &c->t[MIX_DOC]),
                                .dx = mixer_cols(m, &c->t[MIX_DIN], m->mixed_at, m->mixed),
                                .dw = taps(m, &c->t[MIX_DCONV_W]),
                                .dbias = c->t[MIX_DCONV_B],
                                .work = c->t[MIX_WORK],
                                .silu = true,
                                .acc_dw = c->add[MIX_DCONV_W],
                                .acc_dbias = c->add[MIX_DCONV_B]};
    return c->ops->conv1d_bwd(c->lane, &a);
}

static int mixer_bwd(const struct step_ctx *c)
{
    const struct mixer *m = c->self;
    TRY(norm_bwd(c, m));
    TRY(m->rule_bwd(c));
    return conv_bwd(c, m);
}

/* ---- declaration ----------------------------------------------------------------------------------------- */

struct param conv_param(const char *name, const struct mixer *m)
{
    double bound = 1 / sqrt((double)m->conv); /* its fan-in is the taps */
    return (struct param){.key = name,
                          .rank = 3,
                          .dim = {m->mixed, 1, m->conv},
                          .init = INIT_UNIFORM,
                          .init_a = -bound,
                          .init_b = bound,
                          .decay = true,
                          .wide = true};
}

struct mixer_slots {
    slot_id in, mixed, y, states, n, rstd;
    slot_id din, dmixed, dy, dn;
    slot_id conv_state, state, conv_work, rule_work, bwd_work;
};

/* Scratch, from the shapes of the real calls. */
static void declare_work(struct build *b, const struct mixer *m, const struct mixer_decl *d, struct mixer_slots *s)
{
    const struct ops *ops = b->ops;
    struct tensor row = tensor_3d(NULL, b->dev->real, b->batch, b->seq, m->mixed),
                  kernel = tensor_2d(NULL, b->dev->wide, m->mixed, m->conv);
    struct conv1d_fwd_args cf = {.x = row, .w = kernel, .y = row};
    char name[64];
    snprintf(name, sizeof name, "%s_work", d->rule);
    s->conv_work = build_work(b, "conv_work", ops->conv1d_fwd_work ? ops->conv1d_fwd_work(&cf) : 0);
    s->rule_work = build_work(b, name, d->fwd_work);
    s->bwd_work = NO_SLOT;
    if (!training(b))
        return;
    struct conv1d_bwd_args cb = {.dy = row, .x = row, .w = kernel};
    struct gatednorm_bwd_args nb = {.x = tensor_2d(NULL, b->dev->real, b->rows, m->inner),
                                    .w = b->g->slots[d->norm.w].shape,
                                    .group = m->norm_group,
                                    .norm_first = m->norm_first};
    int64_t bytes = max_i64(d->bwd_work, ops->conv1d_bwd_work ? ops->conv1d_bwd_work(&cb) : 0);
    bytes = max_i64(bytes, ops->gatednorm_bwd_work ? ops->gatednorm_bwd_work(&nb) : 0);
    s->bwd_work = build_work(b, "bwd_work", bytes);
}

static slot_id grad_of(struct build *b, const char *name, int64_t cols)
{
    char of[64];
    snprintf(of, sizeof of, "d%s", name);
    return build_grad(b, of, b->rows, cols);
}

static void declare_slots(struct build *b, const struct mixer *m, const struct mixer_decl *d, struct mixer_slots *s)
{
    enum dtype real = b->dev->real;
    const int64_t states[] = {b->batch, ceil_div(b->seq, m->chunk), m->heads, m->state_rows, m->state_cols};
    bool decode = b->mode == BUILD_DECODE;
    s->in = build_real(b, d->in, b->rows, m->width);
    s->mixed = build_real(b, d->mixed, b->rows, m->mixed);
    s->y = build_real(b, d->y, b->rows, m->inner);
    s->states = training(b) ? graph_slot(b->g, "states", tensor_shape(real, countof(states), states)) : NO_SLOT;
    s->n = build_real(b, "n", b->rows, m->inner);
    s->rstd = build_wide(b, "rstd", b->rows, m->inner / m->norm_group);
    s->din = grad_of(b, d->in, m->width);
    s->dmixed = grad_of(b, d->mixed, m->mixed);
    s->dy = grad_of(b, d->y, m->inner);
    s->dn = grad_of(b, "n", m->inner);
    struct tensor tail = tensor_3d(NULL, real, b->batch, m->conv - 1, m->mixed);
    struct tensor state = tensor_4d(NULL, b->dev->wide, b->batch, m->heads, m->state_rows, m->state_cols);
    s->conv_state = decode && m->conv > 1 ? build_table(b, "conv_state", tail, NULL, NULL) : NO_SLOT;
    s->state = decode ? build_table(b, d->state, state, NULL, NULL) : NO_SLOT;
    declare_work(b, m, d, s);
}

/* A node whose forward may be replayed to make the slots again. */
static int forward_node(struct build *b, const struct mixer *m, const char *name, step_fn fn, const struct use *uses, int n_uses,
                        double flops, double elems, const slot_id *makes, int n_makes)
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

static void declare_middle(struct build *b, const struct mixer *m, const struct mixer_decl *d, const struct mixer_slots *s)
{
    struct graph *g = b->g;
    double rows = (double)b->rows, inner = (double)m->inner, mixed = (double)m->mixed;
    double size = (double)dtype_bytes(b->dev->real);
    double states = training(b) ? (double)tensor_elems(&g->slots[s->states].shape) : 0;
    const struct use conv[] = {READS(s->in),       READS(d->conv_w.w), READS(d->conv_b.w),  READS(b->in.doc_start),
                               READS(b->in.start), WRITES(s->mixed),   ADDS(s->conv_state), WRITES(s->conv_work)};
    const struct use rule[] = {READS(s->in),           READS(s->mixed),    READS(d->a_log.w), READS(d->dt_bias.w), READS(d->d.w),
                               READS(b->in.doc_start), READS(b->in.start), WRITES(s->y),      WRITES(s->states),   ADDS(s->state),
                               WRITES(s->rule_work)};
    const struct use norm[] = {READS(s->y), READS(s->in), READS(d->norm.w), WRITES(s->n), WRITES(s->rstd)};
    int n = forward_node(b, m, "conv", conv_fwd, conv, countof(conv), rows * mixed * (2 * (double)m->conv + 4), 2 * rows * mixed,
                         (const slot_id[]){s->mixed}, 1);
    forward_node(b, m, d->rule, m->rule_fwd, rule, countof(rule), d->fwd_flops, rows * (mixed + inner) + states,
                 (const slot_id[]){s->y, s->states}, 2);
    forward_node(b, m, "norm", norm_fwd, norm, countof(norm), 9 * rows * inner, 3 * rows * inner,
                 (const slot_id[]){s->n, s->rstd}, 2);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_BWD, mixer_bwd, READS(s->dn), READS(s->in), READS(s->mixed), READS(s->y), READS(s->states),
                READS(s->rstd), READS(d->norm.w), READS(d->a_log.w), READS(d->dt_bias.w), READS(d->d.w), READS(d->conv_w.w),
                READS(d->conv_b.w), READS(b->in.doc_start), WRITES(s->din), WRITES(s->dmixed), WRITES(s->dy), ADDS(d->norm.dw),
                ADDS(d->a_log.dw), ADDS(d->dt_bias.dw), ADDS(d->d.dw), ADDS(d->conv_w.dw), ADDS(d->conv_b.dw),
                WRITES(s->bwd_work));
    graph_inplace(g, n, PH_BWD, MIX_DN, MIX_DY);
    graph_cost(g, n, PH_BWD, d->bwd_flops + rows * (22 * inner + mixed * (6 * (double)m->conv + 8)),
               size * (rows * (5 * mixed + 8 * inner) + states));
}

int mixer_declare(struct build *b, const struct mixer *m, const struct mixer_decl *d, struct core_io *io)
{
    int64_t hidden = b->cfg->model.hidden;
    struct mixer_slots s;
    if (b->g->err.code != ST_OK)
        return b->g->err.code;
    declare_slots(b, m, d, &s);
    io->f = build_real(b, "out", b->rows, hidden);
    if (b->g->err.code != ST_OK)
        return b->g->err.code;
    linear_declare(b, "in", &(struct linear){.x = io->h, .y = s.in, .dy = s.din, .dx = io->dh, .w = d->w_in,
                                             .bias = no_weight(), .in = hidden, .out = m->width});
    declare_middle(b, m, d, &s);
    linear_declare(b, "out", &(struct linear){.x = s.n, .y = io->f, .dy = io->df, .dx = s.dn, .w = d->w_out,
                                              .bias = no_weight(), .in = m->inner, .out = hidden});
    return b->g->err.code;
}
