/* Multi-token prediction: the entry of one depth.
 *
 *   ids_k   = ids_{k-1} shifted left, labels likewise; embedding and head are the main model's
 *   e       [T, d]   = E[ids_k]
 * With one residual stream:
 *   cat     [T, 2d]  = [ enorm(e) | hnorm(h_{k-1}) ]
 *   x       [T, d]   = cat W_eh^T          enters a stack of its own, with a final norm and a loss
 * With n streams, h_{k-1} [T, n d] being those before their contraction; each stream by itself, e for all:
 *   x_i     [T, d]   = enorm(e) W_e^T + hnorm(h_{k-1, i}) W_h^T
 * which are the streams of the depth's stack: nothing is expanded again.
 * backward: dcat = dx W_eh; de and the contribution to dh_{k-1} through the two norms. h_{k-1} has two readers: with
 * one stream the head (in the forward half) and this entry, else this entry and, after it, the contraction. */
#include "layers/layer.h"
#include "ops/gemm/gemm.h"
#include "ops/mhc/mhc.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/shift/shift.h"

struct entry {
    double eps;
    bool zero_centered;
    int64_t batch, seq, hidden, streams;
};

static struct tensor ids(const struct entry *m, const struct tensor *t)
{
    return t->data ? tensor_2d(t->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

/* Streams [T, n d] as n T rows of d. */
static struct tensor by_stream(const struct entry *m, const struct tensor *t)
{
    return tensor_2d(t->data, t->dtype, t->dim[0] * m->streams, m->hidden);
}

/* The normed embedding and hidden state: halves of one tensor, or a tensor each. */
static struct tensor normed_e(const struct entry *m, const struct tensor *e) { return m->streams > 1 ? *e : tensor_cols(e, 0, m->hidden); }
static struct tensor normed_h(const struct entry *m, const struct tensor *e, const struct tensor *h)
{
    return m->streams > 1 ? by_stream(m, h) : tensor_cols(e, m->hidden, m->hidden);
}

static int shift_fwd(const struct step_ctx *c)
{
    enum { TOKEN, LABEL, DOC, NEXT_TOKEN, NEXT_LABEL };
    const struct entry *m = c->self;
    struct shift_args t = {.x = ids(m, &c->t[TOKEN]), .doc_start = ids(m, &c->t[DOC]), .y = ids(m, &c->t[NEXT_TOKEN]), .fill = 0};
    struct shift_args l = {.x = ids(m, &c->t[LABEL]), .doc_start = ids(m, &c->t[DOC]), .y = ids(m, &c->t[NEXT_LABEL]), .fill = -1};
    TRY(c->ops->shift(c->lane, &t));
    return c->ops->shift(c->lane, &l);
}

static int norms_fwd(const struct step_ctx *c)
{
    enum { E, H, EW, HW, EN, HN, ERSTD, HRSTD };
    const struct entry *m = c->self;
    struct rmsnorm_fwd_args e = {.x = c->t[E], .w = c->t[EW], .y = normed_e(m, &c->t[EN]), .rstd = c->t[ERSTD],
                                 .eps = m->eps, .zero_centered = m->zero_centered};
    struct rmsnorm_fwd_args h = {.x = by_stream(m, &c->t[H]), .w = c->t[HW], .y = normed_h(m, &c->t[EN], &c->t[HN]), .rstd = c->t[HRSTD],
                                 .eps = m->eps, .zero_centered = m->zero_centered};
    TRY(c->ops->rmsnorm_fwd(c->lane, &e));
    return c->ops->rmsnorm_fwd(c->lane, &h);
}

static int norms_bwd(const struct step_ctx *c)
{
    enum { DEN, DHN, E, H, EW, HW, ERSTD, HRSTD, DE, DH, DEW, DHW, WORK };
    const struct entry *m = c->self;
    struct rmsnorm_bwd_args e = {.dy = normed_e(m, &c->t[DEN]), .x = c->t[E], .w = c->t[EW], .rstd = c->t[ERSTD],
                                 .dx = c->t[DE], .dw = c->t[DEW], .work = c->t[WORK], .zero_centered = m->zero_centered, .acc_dw = c->add[DEW]};
    struct rmsnorm_bwd_args h = {.dy = normed_h(m, &c->t[DEN], &c->t[DHN]), .x = by_stream(m, &c->t[H]), .w = c->t[HW], .rstd = c->t[HRSTD],
                                 .dx = by_stream(m, &c->t[DH]), .dw = c->t[DHW], .work = c->t[WORK], .zero_centered = m->zero_centered,
                                 .acc_dw = c->add[DHW]};
    if (c->add[DH])
        h.dres = h.dx; /* another reader's contribution is already there */
    TRY(c->ops->rmsnorm_bwd(c->lane, &e));
    return c->ops->rmsnorm_bwd(c->lane, &h);
}

/* ---- streams: each is projected, and the embedding's projection goes to all of them --------------------------- */

static int streams_fwd(const struct step_ctx *c)
{
    enum { EP, HN, W, X };
    const struct entry *m = c->self;
    struct mhc_expand_fwd_args e = {.x = c->t[EP], .y = c->t[X]};
    struct gemm_args h = {.a = by_stream(m, &c->t[HN]), .b = c->t[W], .c = by_stream(m, &c->t[X]), .trans_b = true, .alpha = 1, .acc_c = true};
    TRY(c->ops->mhc_expand_fwd(c->lane, &e));
    return c->ops->gemm(c->lane, &h);
}

static int streams_bwd(const struct step_ctx *c)
{
    enum { DX, W, DEP, DHN };
    const struct entry *m = c->self;
    struct mhc_expand_bwd_args e = {.dy = c->t[DX], .dx = c->t[DEP]};
    struct gemm_args h = {.a = by_stream(m, &c->t[DX]), .b = c->t[W], .c = by_stream(m, &c->t[DHN]), .alpha = 1};
    TRY(c->ops->mhc_expand_bwd(c->lane, &e));
    return c->ops->gemm(c->lane, &h);
}

static int streams_dw(const struct step_ctx *c)
{
    enum { DX, HN, DW };
    const struct entry *m = c->self;
    struct gemm_args a = {.a = by_stream(m, &c->t[DX]), .b = by_stream(m, &c->t[HN]), .c = c->t[DW], .trans_a = true, .alpha = 1,
                          .acc_c = c->add[DW]};
    return c->ops->gemm(c->lane, &a);
}

/* ---- declaration ------------------------------------------------------------------------------------------------ */

/* Normed embedding and hidden state with their gradients; with one stream en, den hold both and hn, dhn are absent. */
struct normed {
    slot_id en, den, hn, dhn;
};

static slot_id norm_work(struct build *b, const struct entry *m)
{
    struct rmsnorm_bwd_args a = {.x = tensor_2d(NULL, b->dev->real, b->rows * m->streams, m->hidden),
                                 .w = tensor_1d(NULL, b->dev->wide, m->hidden)};
    return b->ops->rmsnorm_bwd_work ? build_work(b, "norm_work", b->ops->rmsnorm_bwd_work(&a)) : NO_SLOT;
}

static void declare_norms(struct build *b, const struct entry *m, slot_id e, slot_id de, const struct mtp_io *io, const struct normed *y)
{
    struct graph *g = b->g;
    enum init_kind gain = b->cfg->model.norm_zero_centered ? INIT_ZERO : INIT_ONE;
    struct param pe = param_vector("enorm.weight", m->hidden, gain), ph = param_vector("hnorm.weight", m->hidden, gain);
    struct weight we = build_weight(b, &pe), wh = build_weight(b, &ph);
    slot_id er = graph_slot(g, "erstd", tensor_1d(NULL, b->dev->wide, b->rows));
    slot_id hr = graph_slot(g, "hrstd", tensor_1d(NULL, b->dev->wide, b->rows * m->streams));
    int n = graph_node(g, "norms", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, norms_fwd, READS(e), READS(io->h), READS(we.w), READS(wh.w), WRITES(y->en), WRITES(y->hn), WRITES(er), WRITES(hr));
    GRAPH_PHASE(g, n, PH_REPLAY, norms_fwd, READS(e), READS(io->h), READS(we.w), READS(wh.w), WRITES(y->en), WRITES(y->hn), WRITES(er), WRITES(hr));
    graph_replay(g, y->en, n);
    graph_replay(g, y->hn, n);
    GRAPH_PHASE(g, n, PH_BWD, norms_bwd, READS(y->den), READS(y->dhn), READS(e), READS(io->h), READS(we.w), READS(wh.w), READS(er), READS(hr),
                WRITES(de), ADDS(io->dh), ADDS(we.dw), ADDS(wh.dw), WRITES(norm_work(b, m)));
    double elems = 0.5 * (double)(b->rows * m->hidden * (1 + m->streams)), size = (double)dtype_bytes(b->dev->real);
    graph_cost(g, n, PH_FWD, 8 * elems, 4 * elems * size);
    graph_cost(g, n, PH_REPLAY, 8 * elems, 4 * elems * size);
    graph_cost(g, n, PH_BWD, 18 * elems, 6 * elems * size);
}

static void declare_eh_proj(struct build *b, const struct normed *y, struct mtp_io *io)
{
    int64_t d = b->cfg->model.hidden;
    struct param p = param_matrix("eh_proj.weight", d, 2 * d, b->cfg->model.init_std);
    io->x = build_real(b, "x", b->rows, d);
    io->dx = build_grad(b, "dx", b->rows, d);
    linear_declare(b, "eh_proj", &(struct linear){.x = y->en, .y = io->x, .dy = io->dx, .dx = y->den, .w = build_weight(b, &p), .bias = no_weight(),
                                                  .in = 2 * d, .out = d});
}

static void declare_streams(struct build *b, const struct entry *m, const struct normed *y, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = m->hidden, wide = m->streams * d;
    struct param pe = param_matrix("e_proj.weight", d, d, b->cfg->model.init_std), ph = param_matrix("h_proj.weight", d, d, b->cfg->model.init_std);
    slot_id ep = build_real(b, "e_proj", b->rows, d), dep = build_grad(b, "de_proj", b->rows, d);
    linear_declare(b, "e_proj", &(struct linear){.x = y->en, .y = ep, .dy = dep, .dx = y->den, .w = build_weight(b, &pe), .bias = no_weight(), .in = d, .out = d});
    struct weight w = build_weight(b, &ph);
    io->x = build_real(b, "stream", b->rows, wide);
    io->dx = build_grad(b, "dstream", b->rows, wide);
    double flops = 2 * (double)(b->rows * wide * d), bytes = 2 * (double)(b->rows * wide) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "h_proj", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, streams_fwd, READS(ep), READS(y->hn), READS(w.w), WRITES(io->x));
    GRAPH_PHASE(g, n, PH_REPLAY, streams_fwd, READS(ep), READS(y->hn), READS(w.w), WRITES(io->x));
    graph_replay(g, io->x, n);
    GRAPH_PHASE(g, n, PH_BWD, streams_bwd, READS(io->dx), READS(w.w), WRITES(dep), WRITES(y->dhn));
    GRAPH_PHASE(g, n, PH_DW, streams_dw, READS(io->dx), READS(y->hn), ADDS(w.dw));
    for (int ph_id = PH_FWD; ph_id < PH_COUNT; ph_id++)
        graph_cost(g, n, (enum phase_id)ph_id, flops, bytes);
}

int mtp_declare(struct build *b, int depth, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    struct entry *m = graph_own(g, sizeof *m);
    char scope[32];
    if (m == NULL)
        return ST_NOMEM;
    *m = (struct entry){.eps = b->cfg->model.norm_eps, .zero_centered = b->cfg->model.norm_zero_centered, .batch = b->batch, .seq = b->seq,
                        .hidden = d, .streams = io->streams};
    snprintf(scope, sizeof scope, "mtp%d", depth);
    graph_scope(g, -1, scope);
    struct tensor shape = tensor_1d(NULL, DT_I32, b->rows);
    slot_id token = graph_slot(g, "token", shape), label = graph_slot(g, "label", shape);
    int n = graph_node(g, "shift", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, shift_fwd, READS(io->token), READS(io->label), READS(b->in.doc_start), WRITES(token), WRITES(label));
    io->token = token;
    io->label = label;

    slot_id e, de;
    TRY(embed_declare(b, scope, token, &e, &de));
    graph_scope(g, -1, scope);
    snprintf(b->prefix, sizeof b->prefix, "mtp.layers.%d.", depth);
    bool wide = io->streams > 1;
    struct normed y = {.en = build_real(b, wide ? "en" : "cat", b->rows, wide ? d : 2 * d), .hn = NO_SLOT, .dhn = NO_SLOT};
    y.den = build_grad(b, wide ? "den" : "dcat", b->rows, wide ? d : 2 * d);
    if (wide) {
        y.hn = build_real(b, "hn", b->rows, io->streams * d);
        y.dhn = build_grad(b, "dhn", b->rows, io->streams * d);
    }
    declare_norms(b, m, e, de, io, &y);
    if (wide)
        declare_streams(b, m, &y, io);
    else
        declare_eh_proj(b, &y, io);
    return g->err.code;
}
