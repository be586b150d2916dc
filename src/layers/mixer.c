/* The recurrent cores' common part; see mixer_int.h. */
#include "layers/mixer_int.h"
#include "ops/addnorm/addnorm.h"
#include "ops/conv1d/conv1d.h"
#include "ops/dropout/dropout.h"
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
    struct tensor t = of(b->g, b->in.doc_local);
    return t.data ? tensor_split_first(&t, b->batch, b->seq) : t;
}

static int64_t rest_cols(const struct mixer *m) { return m->width - m->mixed - m->inner; }

struct tensor mixer_drest(const struct graph *g, const struct mixer *m, const struct mixer_slots *s, int64_t first,
                          int64_t n)
{
    return s->divided ? mixer_cols(m, of(g, s->drest), first - (m->width - rest_cols(m)), n)
                      : mixer_cols(m, of(g, s->din), first, n);
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

/* What comes from the rank before, goes to the rank after, and their gradients. */
static void declare_part_slots(struct build *b, const struct mixer *m, struct mixer_slots *s, struct tensor state)
{
    struct graph *g = b->g;
    bool left = b->mesh->cp_rank > 0, right = b->mesh->cp_rank < b->mesh->cp - 1;
    int64_t rows = b->batch * (m->conv - 1);
    if (left)
        s->state.init = graph_slot(g, "state_in", state);
    if (right)
        s->state.final = graph_slot(g, "state_out", state);
    if (left && training(b))
        s->state.dinit = graph_slot(g, "dstate_in", state);
    if (right && training(b))
        s->state.dfinal = graph_slot(g, "dstate_out", state);
    s->dz = build_grad(b, "dz", b->rows, m->inner);
    s->drest = build_grad(b, "drest", b->rows, rest_cols(m));
    if (rows == 0)
        return;
    if (right) {
        s->edge.tail = build_real(b, "tail", rows, m->mixed);
        s->edge.dtail = build_grad(b, "dtail", rows, m->mixed);
    }
    if (left) {
        s->edge.halo = build_real(b, "halo", rows, m->mixed);
        s->edge.dhalo = build_grad(b, "dhalo", rows, m->mixed);
    }
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
    s->state = (struct context_state){.init = NO_SLOT, .final = NO_SLOT, .dinit = NO_SLOT, .dfinal = NO_SLOT};
    if (decode)
        s->state.init = s->state.final = build_table(b, d->state, state, NULL, NULL);
    s->edge = (struct context_edge){.tail = NO_SLOT, .halo = NO_SLOT, .dtail = NO_SLOT, .dhalo = NO_SLOT};
    s->divided = context_divides(b);
    if (s->divided)
        declare_part_slots(b, m, s, state);
}

/* Rows in front of the convolution's first one, or their gradient: [B, taps - 1, C]. */
static struct tensor edge_rows(const struct mixer *m, struct tensor t)
{
    return t.data ? tensor_split_first(&t, m->batch, m->conv - 1) : t;
}

/* The last rows of the convolution's input for the next rank; what it adds to their gradient. */
static void declare_tail(struct build *b, const struct mixer *m, const struct mixer_slots *s)
{
    struct graph *g = b->g;
    int64_t rows = m->conv - 1;
    if (rows == 0)
        return;
    int n = graph_node(g, "tail", LANE_COMPUTE, NULL);
    for (int64_t i = 0; s->edge.tail != NO_SLOT && i < m->batch; i++) {
        struct tensor in = of(g, s->in), tail = of(g, s->edge.tail), last = tensor_cols(&in, m->mixed_at, m->mixed);
        GRAPH_OP(g, n, PH_FWD, dropout, .x = tensor_rows(&last, (i + 1) * m->seq - rows, rows),
                 .y = tensor_rows(&tail, i * rows, rows)); /* copies */
        if (!training(b))
            continue;
        struct tensor din = of(g, s->din), more = of(g, s->edge.dtail), sum = tensor_cols(&din, m->mixed_at, m->mixed);
        sum = tensor_rows(&sum, (i + 1) * m->seq - rows, rows);
        GRAPH_OP(g, n, PH_BWD, addnorm_fwd, .x = sum, .f = tensor_rows(&more, i * rows, rows), .s = sum);
    }
    context_halo(b, "halo", &s->edge);
}

static void declare_conv(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                         const struct mixer_slots *s)
{
    struct graph *g = b->g;
    struct tensor init = s->divided ? edge_rows(m, of(g, s->edge.halo)) : of(g, s->conv_state);
    GRAPH_OP(g, n, PH_FWD, conv1d_fwd, .x = mixer_cols(m, of(g, s->in), m->mixed_at, m->mixed),
             .w = taps(m, of(g, d->conv_w.w)), .bias = of(g, d->conv_b.w), .doc_start = mixer_docs(b),
             .start = of(g, b->in.start), .init = init, .final = of(g, s->conv_state),
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

static void declare_norm_bwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                             const struct mixer_slots *s)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, gatednorm_bwd, .dy = of(g, s->dn), .x = of(g, s->y), .z = gate(m, of(g, s->in)),
             .w = of(g, d->norm.w), .rstd = of(g, s->rstd), .dx = of(g, s->dy),
             .dz = s->divided ? of(g, s->dz) : gate(m, of(g, s->din)), .dw = of(g, d->norm.dw), .group = m->norm_group,
             .norm_first = m->norm_first, .zero_centered = m->norm_zero_centered);
    graph_inplace(g, n, PH_BWD, s->dn, s->dy);
}

static void declare_conv_bwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                             const struct mixer_slots *s)
{
    struct graph *g = b->g;
    struct tensor din = of(g, s->din);
    if (s->divided) { /* the other columns of din */
        GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, s->dz), .y = gate(m, din));
        GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, s->drest),
                 .y = tensor_cols(&din, m->width - rest_cols(m), rest_cols(m)));
    }
    GRAPH_OP(g, n, PH_BWD, conv1d_bwd, .dy = mixer_cols(m, of(g, s->dmixed), 0, m->mixed),
             .x = mixer_cols(m, of(g, s->in), m->mixed_at, m->mixed), .w = taps(m, of(g, d->conv_w.w)),
             .bias = of(g, d->conv_b.w), .init = edge_rows(m, of(g, s->edge.halo)), .doc_start = mixer_docs(b),
             .dx = mixer_cols(m, din, m->mixed_at, m->mixed), .dw = taps(m, of(g, d->conv_w.dw)),
             .dbias = of(g, d->conv_b.dw), .dinit = edge_rows(m, of(g, s->edge.dhalo)), .silu = true);
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
    if (s->divided)
        declare_tail(b, m, s);
    int conv =
        forward_node(b, "conv", declare_conv, m, d, s, rows * mixed * (2 * (double)m->conv + 4), 2 * rows * mixed);
    if (s->divided)
        context_passes(b, &s->state, true);
    int rule = forward_node(b, d->rule, m->rule_fwd, m, d, s, d->fwd_flops, rows * (mixed + inner) + states);
    if (s->divided)
        context_passes(b, &s->state, false);
    int norm = forward_node(b, "norm", declare_norm, m, d, s, 9 * rows * inner, 3 * rows * inner);
    if (!training(b))
        return;
    graph_again(g, conv, s->mixed);
    graph_again(g, rule, s->y);
    graph_again(g, rule, s->states);
    graph_again(g, norm, s->n);
    graph_again(g, norm, s->rstd);
    bool apart = s->divided; /* messages come between */
    declare_norm_bwd(b, apart ? norm : conv, m, d, s);
    m->rule_bwd(b, apart ? rule : conv, m, d, s);
    declare_conv_bwd(b, conv, m, d, s);
    double norm_flops = 22 * rows * inner, conv_flops = rows * mixed * (6 * (double)m->conv + 8);
    double norm_bytes = 5 * size * rows * inner, rule_bytes = size * (rows * (2 * mixed + 3 * inner) + states),
           conv_bytes = 3 * size * rows * mixed;
    if (apart) {
        graph_cost(g, norm, PH_BWD, norm_flops, norm_bytes);
        graph_cost(g, rule, PH_BWD, d->bwd_flops, rule_bytes);
        graph_cost(g, conv, PH_BWD, conv_flops, conv_bytes);
        return;
    }
    graph_cost(g, conv, PH_BWD, d->bwd_flops + norm_flops + conv_flops, norm_bytes + rule_bytes + conv_bytes);
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
