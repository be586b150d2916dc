/* The recurrent cores' common part; see mixer_int.h. */
#include "layers/mixer_int.h"
#include "ops/conv1d/conv1d.h"
#include "ops/gatednorm/gatednorm.h"

#include <math.h>
#include <stdio.h>

/* ---- views ----------------------------------------------------------------------------------- */

struct tensor mixer_cols(const struct mixer *m, struct tensor rows, int64_t first, int64_t n)
{
    struct tensor part = tensor_cols(&rows, first, n);
    return tensor_split_first(&part, m->batch, m->seq);
}

struct tensor mixer_heads(const struct mixer *m, struct tensor rows, int64_t first, int64_t heads, int64_t dim)
{
    struct tensor part = mixer_cols(m, rows, first, heads * dim);
    return tensor_split_last(&part, heads, dim);
}

struct tensor mixer_docs(const struct build *b)
{
    struct tensor t = of(b->g, b->in.doc_start);
    return t.data ? tensor_split_first(&t, b->batch, b->seq) : t;
}

static struct tensor taps(const struct mixer *m, struct tensor w)
{
    return tensor_2d(w.data, w.dtype, m->mixed, m->conv); /* stored [C, 1, W] */
}

static struct tensor gate(const struct mixer *m, struct tensor in) { return tensor_cols(&in, m->z_at, m->inner); }

/* ---- declaration ----------------------------------------------------------------------------- */

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
}

static void declare_conv(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                         const struct mixer_slots *s)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, conv1d_fwd, .x = mixer_cols(m, of(g, s->in), m->mixed_at, m->mixed),
             .w = taps(m, of(g, d->conv_w.w)), .bias = of(g, d->conv_b.w), .doc_start = mixer_docs(b),
             .start = of(g, b->in.start), .init = of(g, s->conv_state), .final = of(g, s->conv_state),
             .y = mixer_cols(m, of(g, s->mixed), 0, m->mixed), .silu = true);
}

static void declare_norm(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                         const struct mixer_slots *s)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, gatednorm_fwd, .x = of(g, s->y), .z = gate(m, of(g, s->in)), .w = of(g, d->norm.w),
             .y = of(g, s->n), .rstd = of(g, s->rstd), .eps = m->norm_eps, .group = m->norm_group,
             .norm_first = m->norm_first, .zero_centered = m->norm_zero_centered);
}

static void declare_bwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                        const struct mixer_slots *s)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, gatednorm_bwd, .dy = of(g, s->dn), .x = of(g, s->y), .z = gate(m, of(g, s->in)),
             .w = of(g, d->norm.w), .rstd = of(g, s->rstd), .dx = of(g, s->dy), .dz = gate(m, of(g, s->din)),
             .dw = of(g, d->norm.dw), .group = m->norm_group, .norm_first = m->norm_first,
             .zero_centered = m->norm_zero_centered);
    m->rule_bwd(b, n, m, d, s);
    GRAPH_OP(g, n, PH_BWD, conv1d_bwd, .dy = mixer_cols(m, of(g, s->dmixed), 0, m->mixed),
             .x = mixer_cols(m, of(g, s->in), m->mixed_at, m->mixed), .w = taps(m, of(g, d->conv_w.w)),
             .bias = of(g, d->conv_b.w), .doc_start = mixer_docs(b),
             .dx = mixer_cols(m, of(g, s->din), m->mixed_at, m->mixed), .dw = taps(m, of(g, d->conv_w.dw)),
             .dbias = of(g, d->conv_b.dw), .silu = true);
    graph_inplace(g, n, PH_BWD, s->dn, s->dy);
}

/* A node whose forward may be replayed to recompute the slots. */
static int forward_node(struct build *b, const char *name, mixer_rule declare, const struct mixer *m,
                        const struct mixer_decl *d, const struct mixer_slots *s, double flops, double elems)
{
    int n = graph_node(b->g, name, LANE_COMPUTE, NULL);
    declare(b, n, m, d, s);
    graph_cost(b->g, n, PH_FWD, flops, elems * (double)dtype_bytes(b->dev->real));
    return n;
}

static void declare_middle(struct build *b, const struct mixer *m, const struct mixer_decl *d,
                           const struct mixer_slots *s)
{
    struct graph *g = b->g;
    double rows = (double)b->rows, inner = (double)m->inner, mixed = (double)m->mixed;
    double size = (double)dtype_bytes(b->dev->real);
    double states = training(b) ? (double)tensor_elems(&g->slots[s->states].shape) : 0;
    int conv =
        forward_node(b, "conv", declare_conv, m, d, s, rows * mixed * (2 * (double)m->conv + 4), 2 * rows * mixed);
    int rule = forward_node(b, d->rule, m->rule_fwd, m, d, s, d->fwd_flops, rows * (mixed + inner) + states);
    int norm = forward_node(b, "norm", declare_norm, m, d, s, 9 * rows * inner, 3 * rows * inner);
    if (!training(b))
        return;
    graph_again(g, conv, s->mixed);
    graph_again(g, rule, s->y);
    graph_again(g, rule, s->states);
    graph_again(g, norm, s->n);
    graph_again(g, norm, s->rstd);
    declare_bwd(b, conv, m, d, s);
    graph_cost(g, conv, PH_BWD, d->bwd_flops + rows * (22 * inner + mixed * (6 * (double)m->conv + 8)),
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
    linear_declare(b, "in",
                   &(struct linear){.x = io->h,
                                    .y = s.in,
                                    .dy = s.din,
                                    .dx = io->dh,
                                    .w = d->w_in,
                                    .bias = no_weight(),
                                    .in = hidden,
                                    .out = m->width});
    declare_middle(b, m, d, &s);
    linear_declare(b, "out",
                   &(struct linear){.x = s.n,
                                    .y = io->f,
                                    .dy = io->df,
                                    .dx = s.dn,
                                    .w = d->w_out,
                                    .bias = no_weight(),
                                    .in = m->inner,
                                    .out = hidden});
    return b->g->err.code;
}
