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
    double scale[1 + MTP_MAX_DEPTHS] = {r->scale};
    if (c->t[SCALE].data != NULL && c->t[SCALE].dim[0] > 1 && r->mtp_scale == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "the batch lacks the loss scales of its MTP depths");
    for (int64_t k = 1; c->t[SCALE].data != NULL && k < c->t[SCALE].dim[0]; k++)
        scale[k] = r->mtp_scale[k - 1];
    TRY(copy_in(c, SCALE, scale));
    return copy_in(c, SHARE, &r->mb_share);
}

static void declare_batch(struct build *b, int64_t depths)
{
    struct graph *g = b->g;
    struct tensor ids = tensor_1d(NULL, DT_I32, b->rows);
    bool decode = b->mode == BUILD_DECODE;
    graph_scope(g, -1, "batch");
    b->in.token = graph_slot(g, "token", ids);
    b->in.pos = graph_slot(g, "pos", ids);
    b->in.label = decode ? NO_SLOT : graph_slot(g, "label", ids);
    b->in.doc_start = !decode && b->cfg->data.eod_mask ? graph_slot(g, "doc_start", ids) : NO_SLOT;
    const struct config_model *c = &b->cfg->model;
    bool draws = c->dropout > 0 || c->router_jitter > 0 || c->router_force_balance;
    b->in.info = training(b) && draws ? graph_slot(g, "info", tensor_1d(NULL, DT_I64, 4)) : NO_SLOT;
    b->in.start = decode ? graph_slot(g, "start", tensor_1d(NULL, DT_I64, 1)) : NO_SLOT;
    b->in.scale = training(b) ? graph_slot(g, "scale", tensor_1d(NULL, DT_F64, 1 + depths)) : NO_SLOT;
    b->in.mb_share = training(b) ? graph_slot(g, "mb_share", tensor_1d(NULL, DT_F64, 1)) : NO_SLOT;
    b->in.loss = decode ? NO_SLOT : build_state(b, "loss", tensor_1d(NULL, DT_F64, 2));
    int n = graph_node(g, "batch", LANE_COPY, NULL);
    GRAPH_PHASE(g, n, PH_FWD, batch_fwd, WRITES(b->in.token), WRITES(b->in.label), WRITES(b->in.pos), WRITES(b->in.doc_start),
                WRITES(b->in.info), WRITES(b->in.start), WRITES(b->in.scale), WRITES(b->in.mb_share));
    graph_host(g, n);
}

/* ---- joints and cores ------------------------------------------------------------------------------------ */

/* One part of the pattern: the main layers, or those of an MTP depth. */
struct part {
    const char *symbols;
    int n;
    const char *where;          /* keys are <where><index>. */
    const struct pattern *keys; /* main: which index a layer has in keys; NULL: its own */
    const char *final_norm;
};

static int ordinal(const char *symbols, int i)
{
    int n = 0;
    for (int k = 0; k <= i; k++)
        n += symbols[k] == symbols[i];
    return n;
}

static const struct joint_kind *joint_of(const struct build *b)
{
    return b->cfg->model.mhc_streams > 0 ? &joint_mhc : &joint_residual;
}

/* The part's symbols, each with a joint in front of it. */
static int declare_layers(struct build *b, const struct part *p, struct sublayer *sub)
{
    for (int i = 0; i < p->n; i++, b->layer++) {
        const struct core_kind *core = core_find(p->symbols[i]);
        struct sublayer next = {0};
        b->number = ordinal(p->symbols, i);
        snprintf(b->prefix, sizeof b->prefix, "%s%d.", p->where, p->keys ? pattern_layer_key_index(p->keys, i) : i);
        TRY(joint_of(b)->declare(b, sub, &next, core->norm_key, false));
        struct core_io io = {.h = next.h, .dh = next.dh, .df = next.df, .f = NO_SLOT};
        TRY(core->declare(b, &io));
        next.f = io.f;
        *sub = next;
    }
    return ST_OK;
}

/* A stack from the stream x to the normed output of its last joint. */
static int declare_part(struct build *b, const struct part *p, struct sublayer *sub)
{
    struct sublayer end = {0};
    TRY(declare_layers(b, p, sub));
    b->prefix[0] = '\0';
    TRY(joint_of(b)->declare(b, sub, &end, p->final_norm, true));
    *sub = end;
    return ST_OK;
}

static struct sublayer entry(slot_id x, slot_id dx, bool wide)
{
    return (struct sublayer){.x = x, .dx = dx, .f = NO_SLOT, .df = NO_SLOT, .h = NO_SLOT, .dh = NO_SLOT, .wide = wide};
}

/* What a prediction depth reads of the stack before it: the output, or where there are several streams all of
 * them, from before their contraction. */
static void hand_on(struct mtp_io *io, const struct sublayer *end)
{
    io->h = end->wide ? end->x : end->h;
    io->dh = end->wide ? end->dx : end->dh;
}

static int declare_mtp(struct build *b, const struct pattern *p, const struct sublayer *main_end, struct model_plan *mp)
{
    struct mtp_io io = {.streams = main_end->wide ? b->cfg->model.mhc_streams : 1, .token = b->in.token, .label = b->in.label};
    hand_on(&io, main_end);
    for (int k = 0; k < p->n_mtp_depths; k++) {
        char where[64], norm[64], scope[32];
        TRY(mtp_declare(b, k, &io));
        snprintf(where, sizeof where, "mtp.layers.%d.mtp_model_layer.layers.", k);
        snprintf(norm, sizeof norm, "mtp.layers.%d.final_layernorm.weight", k);
        snprintf(scope, sizeof scope, "mtp%d.head", k);
        struct sublayer sub = entry(io.x, io.dx, main_end->wide);
        struct part part = {.symbols = p->mtp_symbols, .n = p->n_mtp_layers, .where = where, .final_norm = norm};
        TRY(declare_part(b, &part, &sub));
        b->layer++; /* the final joint's own number */
        graph_scope(b->g, -1, scope);
        mp->mtp_loss[mp->n_mtp++] = build_state(b, "loss", tensor_1d(NULL, DT_F64, 2));
        struct head_io head = {.scope = scope, .h = sub.h, .dh = sub.dh, .label = io.label, .loss = mp->mtp_loss[k], .scale_index = k + 1};
        TRY(head_declare(b, &head));
        hand_on(&io, &sub);
    }
    return ST_OK;
}

static int declare_stack(struct build *b, const struct pattern *p, struct model_plan *mp)
{
    slot_id x, dx;
    int depths = training(b) ? p->n_mtp_depths : 0;
    b->layer = -1;
    declare_batch(b, depths);
    TRY(embed_declare(b, "embed", b->in.token, &x, &dx));
    b->layer = 0;
    struct sublayer sub = entry(x, dx, false);
    struct part main_part = {.symbols = p->symbols, .n = p->n_layers, .where = "decoder.layers.", .keys = p,
                             .final_norm = pattern_final_norm_key(p)};
    TRY(declare_part(b, &main_part, &sub));
    b->layer++;
    struct head_io head = {.scope = "head", .h = sub.h, .dh = sub.dh, .label = b->in.label, .loss = b->in.loss};
    TRY(head_declare(b, &head));
    return depths > 0 ? declare_mtp(b, p, &sub, mp) : ST_OK;
}

/* ---- plans ------------------------------------------------------------------------------------------------ */

static int apply_recompute(struct graph *g, const struct config_plan *p, struct err *e)
{
    if (p->recompute_granularity == CFG_GRANULARITY_FULL)
        TRY(graph_recompute(g, "full", e));
    bool standard = p->recompute_granularity == CFG_GRANULARITY_SELECTIVE && p->recompute[0] == '\0';
    return graph_recompute(g, standard ? "core_attn" : p->recompute, e);
}

int model_plan_build(struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct err *e)
{
    *mp = (struct model_plan){.mode = o->mode, .batch = o->batch, .seq = o->seq, .cache_len = o->cache_len};
    graph_init(&mp->g);
    mp->built = true;
    struct build b = {.cfg = m->cfg, .dev = m->dev, .ops = m->ops, .mesh = &m->mesh, .mode = o->mode, .g = &mp->g, .mem = &m->mem,
                      .params = &m->params, .tables = &m->tables, .metrics = &m->metrics, .updates = &m->updates, .batch = o->batch, .seq = o->seq, .rows = o->batch * o->seq,
                      .cache_len = o->cache_len, .n_layers = m->pattern.n_layers, .want_logits = o->want_logits,
                      .logits = NO_SLOT, .e = e};
    if (declare_stack(&b, &m->pattern, mp) != ST_OK || mp->g.err.code != ST_OK) {
        if (mp->g.err.code != ST_OK)
            *e = mp->g.err;
        return e->code;
    }
    mp->loss = b.in.loss;
    mp->logits = b.logits;
    if (o->mode == BUILD_TRAIN)
        TRY(apply_recompute(&mp->g, &m->cfg->plan, e));
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
