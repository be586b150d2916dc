/* The stack: from pattern to a graph. Embedding, then joints and cores in turn, then the head. */
#include "model/model.h"

#include <string.h>

/* ---- the batch node: what the host hands in ---------------------------------------------------------- */

struct batch {
    int64_t rows;
};

static int copy_in(const struct step_ctx *c, int use, const void *host)
{
    if (c->t[use].data == NULL)
        return ST_OK;
    struct dev *d = c->lane->dev;
    if (host == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "the batch lacks input %d", use);
    return d->vt->copy_in(d, c->t[use].data, host, tensor_bytes(&c->t[use]), c->lane->err);
}

static int batch_fwd(const struct step_ctx *c)
{
    enum { TOKEN, LABEL, POS, DOC, INFO, START, SCALE, SHARE };
    const struct run_info *r = c->run;
    const int64_t info[4] = {r->step, r->first_sample, 0, 0};
    TRY(copy_in(c, TOKEN, r->tokens));
    TRY(copy_in(c, LABEL, r->labels));
    TRY(copy_in(c, POS, r->pos));
    TRY(copy_in(c, DOC, r->doc_start));
    TRY(copy_in(c, INFO, info));
    TRY(copy_in(c, START, &r->start));
    TRY(copy_in(c, SCALE, &r->scale));
    return copy_in(c, SHARE, &r->mb_share);
}

static void declare_batch(struct build *b)
{
    struct graph *g = b->g;
    struct tensor ids = tensor_1d(NULL, DT_I32, b->rows);
    bool decode = b->mode == BUILD_DECODE;
    graph_scope(g, -1, "batch");
    b->in.token = graph_slot(g, "token", ids);
    b->in.pos = graph_slot(g, "pos", ids);
    b->in.label = decode ? NO_SLOT : graph_slot(g, "label", ids);
    b->in.doc_start = !decode && b->cfg->data.eod_mask ? graph_slot(g, "doc_start", ids) : NO_SLOT;
    b->in.info = training(b) && b->cfg->model.dropout > 0 ? graph_slot(g, "info", tensor_1d(NULL, DT_I64, 4)) : NO_SLOT;
    b->in.start = decode ? graph_slot(g, "start", tensor_1d(NULL, DT_I64, 1)) : NO_SLOT;
    b->in.scale = training(b) ? graph_slot(g, "scale", tensor_1d(NULL, DT_F64, 1)) : NO_SLOT;
    b->in.mb_share = training(b) ? graph_slot(g, "mb_share", tensor_1d(NULL, DT_F64, 1)) : NO_SLOT;
    b->in.loss = decode ? NO_SLOT : build_state(b, "loss", tensor_1d(NULL, DT_F64, 2));
    int n = graph_node(g, "batch", LANE_COPY, NULL);
    GRAPH_PHASE(g, n, PH_FWD, batch_fwd, WRITES(b->in.token), WRITES(b->in.label), WRITES(b->in.pos), WRITES(b->in.doc_start),
                WRITES(b->in.info), WRITES(b->in.start), WRITES(b->in.scale), WRITES(b->in.mb_share));
}

/* ---- joints and cores ------------------------------------------------------------------------------------ */

static int declare_layer(struct build *b, char symbol, const struct joint_kind *joint, struct sublayer *sub)
{
    const struct core_kind *core = core_find(symbol);
    struct sublayer next = {0};
    snprintf(b->prefix, sizeof b->prefix, "decoder.layers.%d.", b->layer);
    TRY(joint->declare(b, sub, &next, core->norm_key, false));
    struct core_io io = {.h = next.h, .dh = next.dh, .df = next.df, .f = NO_SLOT};
    TRY(core->declare(b, &io));
    next.f = io.f;
    *sub = next;
    return ST_OK;
}

static int declare_stack(struct build *b, const struct pattern *p)
{
    const struct joint_kind *joint = &joint_residual;
    struct sublayer sub = {.f = NO_SLOT, .df = NO_SLOT, .h = NO_SLOT, .dh = NO_SLOT};
    struct sublayer head = {0};
    b->layer = -1;
    declare_batch(b);
    TRY(embed_declare(b, &sub.x, &sub.dx));
    for (b->layer = 0; b->layer < p->n_layers; b->layer++)
        TRY(declare_layer(b, p->symbols[b->layer], joint, &sub));
    b->prefix[0] = '\0';
    TRY(joint->declare(b, &sub, &head, "decoder.final_norm.weight", true));
    return head_declare(b, head.h, head.dh);
}

/* ---- plans ------------------------------------------------------------------------------------------------ */

int model_plan_build(struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct err *e)
{
    *mp = (struct model_plan){.mode = o->mode, .batch = o->batch, .seq = o->seq, .cache_len = o->cache_len};
    graph_init(&mp->g);
    mp->built = true;
    struct build b = {.cfg = m->cfg, .dev = m->dev, .ops = m->ops, .mode = o->mode, .g = &mp->g, .mem = &m->mem,
                      .params = &m->params, .tables = &m->tables, .metrics = &m->metrics, .updates = &m->updates, .batch = o->batch, .seq = o->seq, .rows = o->batch * o->seq,
                      .cache_len = o->cache_len, .n_layers = m->pattern.n_layers, .want_logits = o->want_logits,
                      .logits = NO_SLOT, .e = e};
    if (declare_stack(&b, &m->pattern) != ST_OK || mp->g.err.code != ST_OK) {
        if (mp->g.err.code != ST_OK)
            *e = mp->g.err;
        return e->code;
    }
    mp->loss = b.in.loss;
    mp->logits = b.logits;
    if (o->mode == BUILD_TRAIN)
        TRY(graph_recompute(&mp->g, m->cfg->plan.recompute, e));
    struct order order = {0};
    int st = schedule_plain(&mp->g, m->cfg->plan.delay_dw, &order, e);
    if (st == ST_OK)
        st = plan_build(&mp->p, o->name, &mp->g, &order, e);
    order_release(&order);
    if (st != ST_OK)
        return st;
    memory_reserve_max(&m->mem, ARENA_FRAME, mp->p.frame_bytes);
    memory_reserve_max(&m->mem, ARENA_WORK, mp->p.work_bytes);
    return ST_OK;
}

void model_plan_release(struct model_plan *mp)
{
    if (mp->built) {
        plan_release(&mp->p);
        graph_release(&mp->g);
    }
    *mp = (struct model_plan){0};
}
