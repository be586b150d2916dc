/* Declaration of the update plan; see optim.h. Order: hyper-parameters in, sums over the ends of a pipeline, sum of
 * squares of every gradient in table order, clip, AdamW, what layers bring along. Gradients are summed over ranks, and
 * weights gathered, by nodes of the training plan (layers/unit.h).
 *
 * Norm and AdamW are one node each for all parameters, since a GPU updates dozens of them in one launch: the node uses
 * the stretch of an arena that holds them all, and knows where each begins in it. */
#include "optim/optim_int.h"
#include "ops/adamw/adamw.h"
#include "ops/gradnorm/gradnorm.h"
#include "ops/ops.h"

#include <math.h>

struct clip_node {
    double max_norm;
    int64_t rank, ranks;
};

static int hyper_step(const struct step_ctx *c)
{
    struct dev *d = c->lane->dev;
    if (c->run->hyper == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "the update lacks its hyper-parameters");
    return d->vt->copy_in(d, c->t[0].data, c->run->hyper, tensor_bytes(&c->t[0]), c->lane->err);
}

struct tensor stretch_at(const struct tensor *t, const struct stretch *s, int64_t offset, enum dtype type, int64_t n)
{
    return offset < 0 ? (struct tensor){0}
                      : tensor_1d(t->data != NULL ? (char *)t->data + (offset - s->begin) : NULL, type, n);
}

static struct sqnorm_args norm_args(const struct update_node *n, const struct tensor *grads)
{
    for (int k = 0; k < n->n; k++)
        n->grads[k] = stretch_at(grads, &n->form[FORM_GRAD], n->list[k].grad, n->wide, n->list[k].elems);
    return (struct sqnorm_args){.x = n->grads[0], .more = n->grads + 1, .n_more = n->n - 1};
}

static int norm_step(const struct step_ctx *c)
{
    enum { GRAD, SUMS, WORK };
    const struct update_node *n = c->self;
    struct sqnorm_args a = norm_args(n, &c->t[GRAD]);
    a.out = tensor_1d((double *)c->t[SUMS].data + n->first_sum, DT_F64, n->n);
    a.work = c->t[WORK];
    return c->ops->sqnorm(c->lane, &a);
}

static int clip_step(const struct step_ctx *c)
{
    enum { SUMS, LOSS, OUT };
    const struct clip_node *n = c->self;
    struct clip_args a = {.sums = c->t[SUMS], .loss = c->t[LOSS], .out = c->t[OUT], .max_norm = n->max_norm};
    return c->ops->clip(c->lane, &a);
}

/* Norm of this rank's share alone, without a limit: the others need its sum of squares. */
static int clip_own_step(const struct step_ctx *c)
{
    enum { SUMS, LOSS, ALL };
    const struct clip_node *n = c->self;
    struct clip_args a = {.sums = c->t[SUMS], .loss = c->t[LOSS]};
    a.out = tensor_1d((double *)c->t[ALL].data + n->rank * CLIP_COUNT, DT_F64, CLIP_COUNT);
    return c->ops->clip(c->lane, &a);
}

static int clip_all_step(const struct step_ctx *c)
{
    enum { ALL, OUT };
    const struct clip_node *n = c->self;
    struct clip_args a = {.sums = tensor_1d((double *)c->t[ALL].data + CLIP_SUM, DT_F64, n->ranks),
                          .out = c->t[OUT],
                          .max_norm = n->max_norm};
    a.sums.stride[0] = CLIP_COUNT;
    return c->ops->clip(c->lane, &a);
}

static int update_step(const struct step_ctx *c)
{
    enum { GRAD, HYPER, SCALE, MASTER, PARAM, OPTIM };
    const struct update_node *n = c->self;
    int parts = 0;
    for (int k = 0; k < n->n; k++) {
        const struct trained *t = &n->list[k];
        bool copy = t->master >= 0;
        struct tensor param =
            stretch_at(&c->t[PARAM], &n->form[FORM_PARAM], t->param, copy ? n->real : n->wide, t->elems);
        struct adamw_part whole = {
            .p = copy ? stretch_at(&c->t[MASTER], &n->form[FORM_MASTER], t->master, n->wide, t->elems) : param,
            .g = stretch_at(&c->t[GRAD], &n->form[FORM_GRAD], t->grad, n->wide, t->elems),
            .m = stretch_at(&c->t[OPTIM], &n->form[FORM_OPTIM], t->optim, n->state, t->elems),
            .v = stretch_at(&c->t[OPTIM], &n->form[FORM_OPTIM], t->second, n->state, t->elems),
            .copy = copy ? param : (struct tensor){0},
            .decay = t->decay,
            .rate = t->rate};
        if (t->coded) {
            struct quantise_args codes = model_param_codes(n->m, t->index);
            whole.q = codes.q;
            whole.qs = codes.qs;
            whole.t = codes.t;
            whole.ts = codes.ts;
        }
        parts += split_parts(n, t, &whole, n->parts + parts);
    }
    struct adamw_args a = update_args(n, n->parts, parts, &c->t[HYPER], &c->t[SCALE]);
    return c->ops->adamw(c->lane, &a);
}

static void extend(struct stretch *s, int64_t offset, int64_t bytes)
{
    bool empty = s->end <= s->begin;
    if (offset < 0)
        return;
    s->begin = empty ? offset : min_i64(s->begin, offset);
    s->end = empty ? offset + bytes : max_i64(s->end, offset + bytes);
}

static int new_node(struct optim *o, const struct model *m, int most, struct update_node *n, struct trained **list)
{
    const struct config_train *t = &m->cfg->train;
    *list = graph_own(&o->g, (size_t)most * sizeof **list);
    *n = (struct update_node){.m = m,
                              .beta1 = t->beta1,
                              .beta2 = t->beta2,
                              .eps = t->eps,
                              .wide = m->dev->wide,
                              .real = m->dev->real,
                              .state = optim_type(m),
                              .list = *list};
    n->grads = graph_own(&o->g, (size_t)most * sizeof *n->grads);
    return *list == NULL || n->grads == NULL ? ST_NOMEM : ST_OK;
}

/* Elements of s that lie before it in what is kept of the parameter. */
static int64_t skipped(const struct model *m, int k, struct shard s, enum kept_form form)
{
    return s.first - mesh_kept(&m->mesh, &m->params.list[k].p, form).first;
}

static bool trained(const struct model *m, int k) { return param_trained(&m->params.list[k].p); }

/* Is it trained, with codes that are kept? */
static bool has_codes(const struct model *m, int k) { return trained(m, k) && m->params.list[k].code_offset[0] >= 0; }

/* Does the update of this parameter make its codes? It has all of the matrix, and squares, whose scales need no more
 * than a tile of it, and moments that are not rounded; otherwise a node after the update makes them. */
static bool updates_codes(const struct model *m, int k)
{
    return has_codes(m, k) && shard_is_all(m, k) && m->cfg->optim.offload == CFG_OPTIM_OFFLOAD_OFF &&
           optim_type(m) == m->dev->wide && code_rule(m->cfg).square && code_rule(m->cfg).block == ADAMW_SQUARE;
}

/* The elements of s of a parameter. */
static struct trained part_of(const struct model *m, int k, struct shard s)
{
    const struct param_entry *row = &m->params.list[k];
    int64_t wide = (int64_t)dtype_bytes(m->dev->wide), real = (int64_t)dtype_bytes(m->dev->real);
    bool copy = row->master_offset >= 0;
    const struct config_group *group = row->p.group > 0 ? &m->cfg->group[row->p.group - 1] : NULL;
    bool own_decay = group != NULL && group->weight_decay >= 0;
    return (struct trained){.elems = s.n,
                            .grad = row->grad_offset + skipped(m, k, s, KEPT_GRADIENT) * wide,
                            .master = copy ? row->master_offset + skipped(m, k, s, KEPT_MASTER) * wide : -1,
                            .param = row->offset + skipped(m, k, s, KEPT_WEIGHT) * (copy ? real : wide),
                            .optim = row->optim_offset,
                            .second =
                                row->optim_offset + round_up(s.n * (int64_t)dtype_bytes(optim_type(m)), DEV_ALIGN),
                            .index = k,
                            .local = s.first,
                            .decay = own_decay      ? group->weight_decay
                                     : row->p.decay ? m->cfg->train.weight_decay
                                                    : 0,
                            .rate = group != NULL ? group->lr : 1};
}

static int64_t kept(const struct model *m, int k, enum kept_form form)
{
    return mesh_kept(&m->mesh, &m->params.list[k].p, form).n;
}

/* Every trained parameter: what is updated here, with room for its moments. */
static int list_updated(struct optim *o, struct model *m, struct update_node *n)
{
    struct trained *list;
    int64_t wide = (int64_t)dtype_bytes(m->dev->wide), real = (int64_t)dtype_bytes(m->dev->real),
            state = (int64_t)dtype_bytes(optim_type(m));
    int parts = 0;
    TRY(new_node(o, m, m->params.n, n, &list));
    for (int k = 0; k < m->params.n; k++) {
        struct param_entry *row = &m->params.list[k];
        if (!trained(m, k))
            continue;
        struct shard s = shard_updated(m, k);
        int64_t moment = round_up(s.n * state, DEV_ALIGN);
        row->optim_offset = memory_reserve(&m->mem, ARENA_OPTIM, 2 * moment);
        extend(&n->form[FORM_GRAD], row->grad_offset, kept(m, k, KEPT_GRADIENT) * wide);
        extend(&n->form[FORM_MASTER], row->master_offset, kept(m, k, KEPT_MASTER) * wide);
        extend(&n->form[FORM_PARAM], row->offset, kept(m, k, KEPT_WEIGHT) * (row->master_offset >= 0 ? real : wide));
        if (s.n == 0)
            continue;
        extend(&n->form[FORM_OPTIM], row->optim_offset, 2 * moment);
        list[n->n] = part_of(m, k, s);
        list[n->n].coded = updates_codes(m, k);
        parts += split_parts(n, &list[n->n++], NULL, NULL);
    }
    n->parts = graph_own(&o->g, (size_t)(parts + 1) * sizeof *n->parts);
    return n->parts != NULL ? ST_OK : ST_NOMEM;
}

/* What this rank answers for in the norm: its shards, whoever updates them; of a weight that both ends of a pipeline
 * hold, the first one's. */
static int list_normed(struct optim *o, const struct model *m, const struct update_node *update, struct update_node *n)
{
    struct trained *list;
    TRY(new_node(o, m, m->params.n, n, &list));
    n->form[FORM_GRAD] = update->form[FORM_GRAD];
    for (int k = 0; k < m->params.n; k++) {
        struct shard s = shard_of(m, k);
        bool elsewhere = m->params.list[k].p.shared_ends && m->mesh.pp_rank > 0;
        if (trained(m, k) && s.n > 0 && !elsewhere)
            list[n->n++] = part_of(m, k, s);
    }
    return ST_OK;
}

slot_id stretch_slot(struct graph *g, const struct update_node *n, enum form form)
{
    static const char *const name[] = {"grads", "masters", "params", "moments"};
    static const enum arena_id arena[] = {ARENA_GRAD, ARENA_MASTER, ARENA_PARAM, ARENA_OPTIM};
    const struct stretch *s = &n->form[form];
    return s->end > s->begin
               ? graph_persistent(g, name[form], tensor_1d(NULL, DT_U8, s->end - s->begin), arena[form], s->begin)
               : NO_SLOT;
}

static double trained_elems(const struct update_node *n)
{
    double sum = 0;
    for (int k = 0; k < n->n; k++)
        sum += (double)n->list[k].elems;
    return sum;
}

static void declare_norm(struct optim *o, const struct model *m, const struct update_node *n, slot_id grads,
                         slot_id sums)
{
    struct graph *g = &o->g;
    struct tensor nowhere = {0};
    if (n->n == 0)
        return;
    struct sqnorm_args a = norm_args(n, &nowhere);
    int64_t work_bytes = m->ops->sqnorm_work ? m->ops->sqnorm_work(&a) : 0;
    slot_id work = work_bytes > 0 ? graph_slot(g, "norm_work", tensor_1d(NULL, DT_U8, work_bytes)) : NO_SLOT;
    int node = graph_node(g, "norm", LANE_COMPUTE, n);
    GRAPH_PHASE(g, node, PH_FWD, norm_step, READS(grads), ADDS(sums), WRITES(work));
    graph_cost(g, node, PH_FWD, 2 * trained_elems(n), trained_elems(n) * (double)dtype_bytes(n->wide));
}

/* Elements of the parameters whose codes are made in one of the ways. */
static double coded_elems(const struct model *m, bool (*made)(const struct model *m, int k))
{
    double elems = 0;
    for (int k = 0; k < m->params.n; k++)
        if (made(m, k))
            elems += (double)param_elems(&m->params.list[k].p);
    return elems;
}

/* The stretch that holds the codes of all trained parameters; NO_SLOT: there are none. */
static slot_id codes_slot(struct optim *o, const struct model *m)
{
    struct stretch codes = {0};
    for (int k = 0; k < m->params.n; k++) {
        const struct param_entry *row = &m->params.list[k];
        for (int i = 0; has_codes(m, k) && i < countof(row->code_offset); i++)
            extend(&codes, row->code_offset[i], 1);
    }
    return codes.end > codes.begin ? graph_persistent(&o->g, "codes", tensor_1d(NULL, DT_U8, codes.end - codes.begin),
                                                      ARENA_CODE, codes.begin)
                                   : NO_SLOT;
}

static int declare_update(struct optim *o, const struct update_node *n, slot_id grads, slot_id param, slot_id hyper,
                          slot_id codes)
{
    struct graph *g = &o->g;
    if (n->n == 0)
        return ST_OK;
    if (o->streamed) {
        if (!o->masters_away)
            stretch_slot(g, n, FORM_MASTER);
        return declare_streamed_update(o, n, hyper);
    }
    slot_id master = stretch_slot(g, n, FORM_MASTER), moments = stretch_slot(g, n, FORM_OPTIM);
    double elems = trained_elems(n), copy = master != NO_SLOT ? (double)dtype_bytes(n->real) : 0;
    double coded = coded_elems(n->m, updates_codes);
    int node = graph_node(g, "adamw", LANE_COMPUTE, n);
    GRAPH_PHASE(g, node, PH_FWD, update_step, READS(grads), READS(hyper), READS(o->clip), ADDS(master), ADDS(param),
                ADDS(moments), ADDS(coded > 0 ? codes : NO_SLOT));
    graph_cost(g, node, PH_FWD, 12 * elems + 4 * coded,
               elems * (3 * (double)dtype_bytes(n->wide) + 4 * (double)dtype_bytes(n->state) + copy) + 2 * coded);
    return g->err.code;
}

/* Codes of new values that the update does not make itself, from all of each parameter, whoever updated it. */
static bool quantised_whole(const struct model *m, int k)
{
    return has_codes(m, k) && !updates_codes(m, k) && !model_shares_codes(m, k);
}
static int quantise_step(const struct step_ctx *c)
{
    const struct model *m = c->self;
    for (int k = 0; k < m->params.n; k++)
        if (quantised_whole(m, k))
            TRY(model_quantise_param(m, k, c->lane));
    return ST_OK;
}

static int declare_quantise(struct optim *o, const struct model *m, slot_id params, const struct stretch *s,
                            slot_id codes)
{
    struct graph *g = &o->g;
    double elems = coded_elems(m, quantised_whole);
    declare_shared_codes(o, m, params, codes);
    if (elems == 0)
        return g->err.code;
    declare_coded_gather(o, m, params, s);
    int node = graph_node(g, "quantise", LANE_COMPUTE, m);
    GRAPH_PHASE(g, node, PH_FWD, quantise_step, READS(params), ADDS(codes));
    graph_cost(g, node, PH_FWD, 4 * elems, elems * ((double)dtype_bytes(m->dev->wide) + 2));
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
            uses[i] =
                (struct use){.slot = graph_persistent(g, u->name, u->use[i].shape, u->use[i].arena, u->use[i].offset),
                             .mode = u->use[i].mode};
        graph_phase(g, graph_node(g, u->name, u->lane, u->self), PH_FWD, u->fn, uses, u->n_uses);
    }
    return g->err.code;
}

static slot_id state(struct optim *o, struct model *m, const char *name, int64_t n)
{
    struct tensor shape = tensor_1d(NULL, DT_F64, n);
    return graph_persistent(&o->g, name, shape, ARENA_STATE,
                            memory_reserve(&m->mem, ARENA_STATE, tensor_bytes(&shape)));
}

/* From all sums of squares to the decision. With several ranks each first sums up its own share, and a number of each
 * is all that travels; what is not finite on one is not finite on all. */
static int declare_clip(struct optim *o, struct model *m, const struct model_plan *train, slot_id sums)
{
    struct graph *g = &o->g;
    struct clip_node *clip = graph_own(g, sizeof *clip);
    if (clip == NULL)
        return ST_NOMEM;
    *clip = (struct clip_node){.max_norm = m->cfg->train.clip, .rank = m->mesh.rank, .ranks = m->mesh.world};
    const struct slot *from = train->loss != NO_SLOT ? &train->g.slots[train->loss] : NULL;
    slot_id loss = from != NULL ? graph_persistent(g, "loss", from->shape, ARENA_STATE, from->offset) : NO_SLOT;
    if (clip->ranks == 1) {
        GRAPH_PHASE(g, graph_node(g, "clip", LANE_COMPUTE, clip), PH_FWD, clip_step, READS(sums), READS(loss),
                    WRITES(o->clip));
        return g->err.code;
    }
    slot_id all = state(o, m, "all_sums", clip->ranks * CLIP_COUNT);
    GRAPH_PHASE(g, graph_node(g, "clip.own", LANE_COMPUTE, clip), PH_FWD, clip_own_step, READS(sums), READS(loss),
                WRITES(all));
    declare_share(o, m, "clip.share", all);
    GRAPH_PHASE(g, graph_node(g, "clip", LANE_COMPUTE, clip), PH_FWD, clip_all_step, READS(all), WRITES(o->clip));
    return g->err.code;
}

static int declare(struct optim *o, struct model *m, const struct model_plan *train)
{
    struct graph *g = &o->g;
    struct update_node *update = graph_own(g, sizeof *update), *norm = graph_own(g, sizeof *norm);
    graph_scope(g, -1, "update");
    if (update == NULL || norm == NULL)
        return ST_NOMEM;
    TRY(list_updated(o, m, update));
    TRY(list_normed(o, m, update, norm));
    slot_id grads = stretch_slot(g, update, FORM_GRAD), params = stretch_slot(g, update, FORM_PARAM);
    slot_id hyper = state(o, m, "hyper", HYPER_COUNT), sums = state(o, m, "sums", max_i64(norm->n, 1));
    o->clip = state(o, m, "clip", CLIP_COUNT);
    int node = graph_node(g, "hyper", LANE_COPY, NULL);
    GRAPH_PHASE(g, node, PH_FWD, hyper_step, WRITES(hyper));
    graph_host(g, node);
    declare_ends(o, m, grads, &update->form[FORM_GRAD]);
    declare_norm(o, m, norm, grads, sums);
    TRY(declare_clip(o, m, train, sums));
    slot_id codes = codes_slot(o, m);
    o->update = update;
    o->hyper = hyper;
    TRY(declare_update(o, update, grads, params, hyper, codes));
    TRY(declare_quantise(o, m, params, &update->form[FORM_PARAM], codes));
    return declare_layer_updates(o, m);
}

const char *optim_alone(const struct optim *o, const struct model *m)
{
    if (!o->streamed || o->n_buckets == 0)
        return NULL;
    if (!m->cfg->optim.overlap)
        return "optim.overlap is off";
    for (int k = 0; k < m->params.n; k++)
        if (has_codes(m, k))
            return "FP8 codes are made of all weights after the update";
    return NULL;
}

/* Plans of a graph whose order is known: one, or two where state is streamed; and the one beside training. */
static int plan_update(struct optim *o, struct model *m, struct model_plan *train, const struct order *order,
                       struct err *e)
{
    struct order decide = {0}, apply = {0};
    int st;
    if (o->n_buckets == 0)
        return plan_build(&o->p, "update", &o->g, order, e);
    TRY_OUT(order_streamed_update(o, optim_alone(o, m) != NULL, order, &decide, &apply, e));
    TRY_OUT(plan_build(&o->p, "update", &o->g, &decide, e));
    TRY_OUT(plan_build(&o->apply, "update, streamed", &o->g, &apply, e));
    if (optim_alone(o, m) == NULL && train->order.n > 0)
        TRY_OUT(build_beside(o, m, train, e));
out:
    order_release(&decide);
    order_release(&apply);
    return st;
}

int optim_build(struct optim *o, struct model *m, struct model_plan *train, struct err *e)
{
    const struct config_train *t = &m->cfg->train;
    *o = (struct optim){.built = true,
                        .beta1 = t->beta1,
                        .beta2 = t->beta2,
                        .streamed = m->cfg->optim.offload != CFG_OPTIM_OFFLOAD_OFF,
                        .masters_away = m->cfg->optim.offload == CFG_OPTIM_OFFLOAD_ALL};
    o->schedule = (struct lr_schedule){.kind = (enum lr_kind)t->schedule,
                                       .wsd_style = (enum lr_wsd_style)t->wsd_style,
                                       .max = t->lr,
                                       .min = t->min_lr,
                                       .warmup = t->warmup,
                                       .decay = t->decay_steps,
                                       .wsd = t->wsd_steps};
    TRY(lr_schedule_check(&o->schedule, e));
    graph_init(&o->g, m->ops);
    if (declare(o, m, train) != ST_OK) {
        *e = o->g.err;
        return e->code != ST_OK ? e->code : err_set(e, ST_NOMEM, "out of memory declaring the update");
    }
    struct order order = {0};
    int st = schedule_plain(&o->g, false, &order, e);
    if (st == ST_OK)
        st = plan_update(o, m, train, &order, e);
    order_release(&order);
    memory_reserve_max(&m->mem, ARENA_WORK, max_i64(o->p.work_bytes, o->apply.work_bytes));
    return st;
}

void optim_release(struct optim *o)
{
    if (o->built) {
        plan_release(&o->p);
        plan_release(&o->apply);
        plan_release(&o->beside);
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
    hyper[HYPER_STEP] = (double)step;
}
