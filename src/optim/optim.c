/* Declaration of the update plan; see optim.h. Order: hyper-parameters in, sum of squares of every
 * gradient in table order, clip, then one AdamW node per parameter. */
#include "optim/optim.h"

#include <math.h>

struct norm_node {
    int index;
};
struct update_node {
    double beta1, beta2, eps, decay;
};
struct clip_node {
    double max_norm;
};

static int hyper_step(const struct step_ctx *c)
{
    struct dev *d = c->lane->dev;
    if (c->run->hyper == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "the update lacks its hyper-parameters");
    return d->vt->copy_in(d, c->t[0].data, c->run->hyper, tensor_bytes(&c->t[0]), c->lane->err);
}

static struct tensor flat(const struct tensor *t) { return tensor_1d(t->data, t->dtype, tensor_elems(t)); }

static int norm_step(const struct step_ctx *c)
{
    enum { GRAD, SUMS, WORK };
    const struct norm_node *n = c->self;
    struct sqnorm_args a = {.x = flat(&c->t[GRAD]), .out = tensor_rows(&c->t[SUMS], n->index, 1), .work = c->t[WORK]};
    return c->ops->sqnorm(c->lane, &a);
}

static int clip_step(const struct step_ctx *c)
{
    enum { SUMS, LOSS, OUT };
    const struct clip_node *n = c->self;
    struct clip_args a = {.sums = c->t[SUMS], .loss = c->t[LOSS], .out = c->t[OUT], .max_norm = n->max_norm};
    return c->ops->clip(c->lane, &a);
}

static int update_step(const struct step_ctx *c)
{
    enum { GRAD, HYPER, SCALE, P, M, V, COPY };
    const struct update_node *n = c->self;
    struct adamw_args a = {.p = flat(&c->t[P]), .g = flat(&c->t[GRAD]), .m = flat(&c->t[M]), .v = flat(&c->t[V]), .hyper = c->t[HYPER],
                           .scale = c->t[SCALE], .beta1 = n->beta1, .beta2 = n->beta2, .eps = n->eps, .decay = n->decay};
    if (c->t[COPY].data != NULL)
        a.copy = flat(&c->t[COPY]);
    return c->ops->adamw(c->lane, &a);
}

static struct tensor param_shape(const struct model *m, int k)
{
    return tensor_shape(m->dev->wide, m->params.list[k].p.rank, m->params.list[k].p.dim);
}

static int declare_norms(struct optim *o, struct model *m, const slot_id *grad, slot_id sums)
{
    struct graph *g = &o->g;
    for (int k = 0; k < m->params.n; k++) {
        if (m->params.list[k].p.buffer)
            continue;
        struct tensor shape = param_shape(m, k);
        struct sqnorm_args a = {.x = flat(&shape)};
        struct norm_node *n = graph_own(g, sizeof *n);
        if (n == NULL)
            return ST_NOMEM;
        n->index = k;
        int64_t work_bytes = m->ops->sqnorm_work ? m->ops->sqnorm_work(&a) : 0;
        slot_id work = work_bytes > 0 ? graph_slot(g, "norm_work", tensor_1d(NULL, DT_U8, work_bytes)) : NO_SLOT;
        int node = graph_node(g, "norm", LANE_COMPUTE, n);
        GRAPH_PHASE(g, node, PH_FWD, norm_step, READS(grad[k]), ADDS(sums), WRITES(work));
        graph_cost(g, node, PH_FWD, 2 * (double)param_elems(&m->params.list[k].p), (double)tensor_bytes(&shape));
    }
    return g->err.code;
}

static int declare_updates(struct optim *o, struct model *m, const slot_id *grad, slot_id hyper)
{
    struct graph *g = &o->g;
    const struct config_train *t = &m->cfg->train;
    for (int k = 0; k < m->params.n; k++) {
        struct param_entry *row = &m->params.list[k];
        if (row->p.buffer)
            continue;
        struct tensor shape = param_shape(m, k);
        struct update_node *n = graph_own(g, sizeof *n);
        if (n == NULL)
            return ST_NOMEM;
        *n = (struct update_node){t->beta1, t->beta2, t->eps, row->p.decay ? t->weight_decay : 0};
        int64_t bytes = round_up(tensor_bytes(&shape), DEV_ALIGN);
        row->optim_offset = memory_reserve(&m->mem, ARENA_OPTIM, 2 * bytes);
        bool master = row->master_offset >= 0;
        struct tensor narrow = tensor_shape(m->dev->real, row->p.rank, row->p.dim);
        slot_id p = graph_persistent(g, row->p.key, shape, master ? ARENA_MASTER : ARENA_PARAM, master ? row->master_offset : row->offset);
        slot_id copy = master ? graph_persistent(g, "copy", narrow, ARENA_PARAM, row->offset) : NO_SLOT;
        slot_id m1 = graph_persistent(g, "exp_avg", shape, ARENA_OPTIM, row->optim_offset);
        slot_id m2 = graph_persistent(g, "exp_avg_sq", shape, ARENA_OPTIM, row->optim_offset + bytes);
        int node = graph_node(g, "adamw", LANE_COMPUTE, n);
        GRAPH_PHASE(g, node, PH_FWD, update_step, READS(grad[k]), READS(hyper), READS(o->clip), ADDS(p), ADDS(m1), ADDS(m2), ADDS(copy));
        graph_cost(g, node, PH_FWD, 12 * (double)param_elems(&row->p), 7 * (double)tensor_bytes(&shape));
    }
    return g->err.code;
}

/* What layers bring along, after the optimizer. */
static int declare_layer_updates(struct optim *o, struct model *m)
{
    struct graph *g = &o->g;
    for (int k = 0; k < m->updates.n; k++) {
        const struct update_decl *u = &m->updates.u[k];
        struct use uses[countof(u->use)];
        for (int i = 0; i < u->n_uses; i++)
            uses[i] = (struct use){graph_persistent(g, u->name, u->use[i].shape, u->use[i].arena, u->use[i].offset), u->use[i].mode};
        graph_phase(g, graph_node(g, u->name, LANE_COMPUTE, u->self), PH_FWD, u->fn, uses, u->n_uses);
    }
    return g->err.code;
}

static slot_id state(struct optim *o, struct model *m, const char *name, int64_t n)
{
    struct tensor shape = tensor_1d(NULL, DT_F64, n);
    return graph_persistent(&o->g, name, shape, ARENA_STATE, memory_reserve(&m->mem, ARENA_STATE, tensor_bytes(&shape)));
}

static int declare(struct optim *o, struct model *m, const struct model_plan *train)
{
    struct graph *g = &o->g;
    slot_id *grad = graph_own(g, (size_t)m->params.n * sizeof *grad);
    struct clip_node *clip = graph_own(g, sizeof *clip);
    if (grad == NULL || clip == NULL)
        return ST_NOMEM;
    clip->max_norm = m->cfg->train.clip;
    graph_scope(g, -1, "update");
    const struct slot *loss_slot = &train->g.slots[train->loss];
    slot_id hyper = state(o, m, "hyper", HYPER_COUNT), sums = state(o, m, "sums", m->params.n);
    slot_id loss = graph_persistent(g, "loss", loss_slot->shape, ARENA_STATE, loss_slot->offset);
    o->clip = state(o, m, "clip", CLIP_COUNT);
    for (int k = 0; k < m->params.n; k++)
        grad[k] = m->params.list[k].p.buffer ? NO_SLOT : graph_persistent(g, "grad", param_shape(m, k), ARENA_GRAD, m->params.list[k].grad_offset);
    int node = graph_node(g, "hyper", LANE_COPY, NULL);
    GRAPH_PHASE(g, node, PH_FWD, hyper_step, WRITES(hyper));
    graph_host(g, node);
    TRY(declare_norms(o, m, grad, sums));
    node = graph_node(g, "clip", LANE_COMPUTE, clip);
    GRAPH_PHASE(g, node, PH_FWD, clip_step, READS(sums), READS(loss), WRITES(o->clip));
    TRY(declare_updates(o, m, grad, hyper));
    return declare_layer_updates(o, m);
}

int optim_build(struct optim *o, struct model *m, const struct model_plan *train, struct err *e)
{
    const struct config_train *t = &m->cfg->train;
    *o = (struct optim){.built = true, .beta1 = t->beta1, .beta2 = t->beta2};
    o->schedule = (struct lr_schedule){.kind = (enum lr_kind)t->schedule, .wsd_style = (enum lr_wsd_style)t->wsd_style, .max = t->lr,
                                       .min = t->min_lr, .warmup = t->warmup, .decay = t->decay_steps, .wsd = t->wsd_steps};
    TRY(lr_schedule_check(&o->schedule, e));
    graph_init(&o->g);
    if (declare(o, m, train) != ST_OK) {
        *e = o->g.err;
        return e->code != ST_OK ? e->code : err_set(e, ST_NOMEM, "out of memory declaring the update");
    }
    struct order order = {0};
    int st = schedule_plain(&o->g, false, &order, e);
    if (st == ST_OK)
        st = plan_build(&o->p, "update", &o->g, &order, e);
    order_release(&order);
    if (st == ST_OK)
        memory_reserve_max(&m->mem, ARENA_WORK, o->p.work_bytes);
    return st;
}

void optim_release(struct optim *o)
{
    if (o->built) {
        plan_release(&o->p);
        graph_release(&o->g);
    }
    *o = (struct optim){0};
}

void optim_hyper(const struct optim *o, int64_t step, double hyper[HYPER_COUNT])
{
    for (int i = 0; i < HYPER_COUNT; i++)
        hyper[i] = 0;
    hyper[HYPER_LR] = lr_at(&o->schedule, step);
    hyper[HYPER_CORRECT1] = 1 - pow(o->beta1, (double)(step + 1));
    hyper[HYPER_CORRECT2] = 1 - pow(o->beta2, (double)(step + 1));
}

struct tensor optim_state(const struct model *m, int index, int which)
{
    struct tensor t = param_shape(m, index);
    t.data = m->mem.base[ARENA_OPTIM] + m->params.list[index].optim_offset + which * round_up(tensor_bytes(&t), DEV_ALIGN);
    return t;
}
