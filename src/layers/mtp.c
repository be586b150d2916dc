/* Multi-token prediction: the entry of one depth.
 *
 *   ids_k   = ids_{k-1} shifted left, labels likewise; embedding and head are the main model's
 *   e       [T, d]   = E[ids_k]
 *   cat     [T, 2d]  = [ enorm(e) | hnorm(h_{k-1}) ]
 *   x       [T, d]   = cat W_eh^T          enters a stack of its own, with a final norm and a loss
 * backward: dcat = dx W_eh; de and the contribution to dh_{k-1} through the two norms. h_0 is read by the
 * head and by depth 1, h_k by its head and by depth k+1: their gradients add in that order. */
#include "layers/layer.h"

struct entry {
    double eps;
    bool zero_centered;
    int64_t batch, seq, hidden, fill;
};

static struct tensor ids(const struct entry *m, const struct tensor *t)
{
    return t->data ? tensor_2d(t->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
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
    enum { E, H, EW, HW, CAT, ERSTD, HRSTD };
    const struct entry *m = c->self;
    struct rmsnorm_fwd_args e = {.x = c->t[E], .w = c->t[EW], .y = tensor_cols(&c->t[CAT], 0, m->hidden), .rstd = c->t[ERSTD],
                                 .eps = m->eps, .zero_centered = m->zero_centered};
    struct rmsnorm_fwd_args h = {.x = c->t[H], .w = c->t[HW], .y = tensor_cols(&c->t[CAT], m->hidden, m->hidden), .rstd = c->t[HRSTD],
                                 .eps = m->eps, .zero_centered = m->zero_centered};
    TRY(c->ops->rmsnorm_fwd(c->lane, &e));
    return c->ops->rmsnorm_fwd(c->lane, &h);
}

static int norms_bwd(const struct step_ctx *c)
{
    enum { DCAT, E, H, EW, HW, ERSTD, HRSTD, DE, DH, DEW, DHW, WORK };
    const struct entry *m = c->self;
    struct rmsnorm_bwd_args e = {.dy = tensor_cols(&c->t[DCAT], 0, m->hidden), .x = c->t[E], .w = c->t[EW], .rstd = c->t[ERSTD],
                                 .dx = c->t[DE], .dw = c->t[DEW], .work = c->t[WORK], .zero_centered = m->zero_centered, .acc_dw = c->add[DEW]};
    struct rmsnorm_bwd_args h = {.dy = tensor_cols(&c->t[DCAT], m->hidden, m->hidden), .x = c->t[H], .w = c->t[HW], .rstd = c->t[HRSTD],
                                 .dx = c->t[DH], .dw = c->t[DHW], .work = c->t[WORK], .zero_centered = m->zero_centered, .acc_dw = c->add[DHW]};
    if (c->add[DH])
        h.dres = c->t[DH]; /* the head's contribution is already there */
    TRY(c->ops->rmsnorm_bwd(c->lane, &e));
    return c->ops->rmsnorm_bwd(c->lane, &h);
}

static slot_id norm_work(struct build *b)
{
    struct rmsnorm_bwd_args a = {.x = tensor_2d(NULL, b->dev->real, b->rows, b->cfg->model.hidden),
                                 .w = tensor_1d(NULL, b->dev->real, b->cfg->model.hidden)};
    return b->ops->rmsnorm_bwd_work ? build_work(b, "norm_work", b->ops->rmsnorm_bwd_work(&a)) : NO_SLOT;
}

static void declare_norms(struct build *b, const struct entry *m, slot_id e, slot_id de, const struct mtp_io *io, slot_id cat, slot_id dcat)
{
    struct graph *g = b->g;
    enum init_kind gain = b->cfg->model.norm_zero_centered ? INIT_ZERO : INIT_ONE;
    struct param pe = param_vector("enorm.weight", m->hidden, gain), ph = param_vector("hnorm.weight", m->hidden, gain);
    struct weight we = build_weight(b, &pe), wh = build_weight(b, &ph);
    slot_id er = graph_slot(g, "erstd", tensor_1d(NULL, b->dev->real, b->rows)), hr = graph_slot(g, "hrstd", tensor_1d(NULL, b->dev->real, b->rows));
    int n = graph_node(g, "norms", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, norms_fwd, READS(e), READS(io->h), READS(we.w), READS(wh.w), WRITES(cat), WRITES(er), WRITES(hr));
    GRAPH_PHASE(g, n, PH_REPLAY, norms_fwd, READS(e), READS(io->h), READS(we.w), READS(wh.w), WRITES(cat), WRITES(er), WRITES(hr));
    graph_replay(g, cat, n);
    GRAPH_PHASE(g, n, PH_BWD, norms_bwd, READS(dcat), READS(e), READS(io->h), READS(we.w), READS(wh.w), READS(er), READS(hr), WRITES(de),
                ADDS(io->dh), ADDS(we.dw), ADDS(wh.dw), WRITES(norm_work(b)));
    double elems = (double)(b->rows * m->hidden);
    graph_cost(g, n, PH_FWD, 8 * elems, 4 * elems * (double)dtype_bytes(b->dev->real));
    graph_cost(g, n, PH_BWD, 18 * elems, 6 * elems * (double)dtype_bytes(b->dev->real));
}

int mtp_declare(struct build *b, int depth, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    struct entry *m = graph_own(g, sizeof *m);
    char scope[32];
    if (m == NULL)
        return ST_NOMEM;
    *m = (struct entry){.eps = b->cfg->model.norm_eps, .zero_centered = b->cfg->model.norm_zero_centered, .batch = b->batch, .seq = b->seq, .hidden = d};
    snprintf(scope, sizeof scope, "mtp%d", depth);
    graph_scope(g, -1, scope);
    struct tensor shape = tensor_1d(NULL, DT_I32, b->rows);
    slot_id token = graph_slot(g, "token", shape), label = graph_slot(g, "label", shape);
    int n = graph_node(g, "shift", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, shift_fwd, READS(io->token), READS(io->label), READS(b->in.doc_start), WRITES(token), WRITES(label));
    io->token = token;
    io->label = label;

    slot_id e, de, cat, dcat;
    TRY(embed_declare(b, scope, token, &e, &de));
    graph_scope(g, -1, scope);
    snprintf(b->prefix, sizeof b->prefix, "mtp.layers.%d.", depth);
    cat = build_real(b, "cat", b->rows, 2 * d);
    dcat = build_grad(b, "dcat", b->rows, 2 * d);
    io->x = build_real(b, "x", b->rows, d);
    io->dx = build_grad(b, "dx", b->rows, d);
    declare_norms(b, m, e, de, io, cat, dcat);
    struct param p = param_matrix("eh_proj.weight", d, 2 * d, b->cfg->model.init_std);
    linear_declare(b, "eh_proj", &(struct linear){.x = cat, .y = io->x, .dy = io->dx, .dx = dcat, .w = build_weight(b, &p), .bias = no_weight(),
                                                  .in = 2 * d, .out = d});
    return g->err.code;
}
