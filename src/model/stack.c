/* The stack: from pattern to a graph. Embedding, then joints and cores in turn, then the head; where the model is cut
 * into pipeline stages, the chunks of this rank, each between cuts. Numbers, keys, initial values and random sites are
 * those of the whole model, so none of them depends on where it is cut. */
#include "layers/context.h"
#include "layers/shard.h"
#include "layers/unit.h"
#include "model/model.h"

#include <string.h>

/* ---- the batch node: what the host hands in -------------------------------------------------- */

static int copy_in(const struct step_ctx *c, int use, const void *host)
{
    if (c->t[use].data == NULL)
        return ST_OK;
    struct dev *d = c->lane->dev;
    if (host == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "the batch lacks input %d", use);
    return d->vt->copy_in(d, c->t[use].data, host, tensor_bytes(&c->t[use]), c->lane->err);
}

/* Uses of the batch node. */
enum { TOKEN, LABEL, POS, DOC, INFO, START, SCALE, SHARE, DOC_LOCAL, NEXT, BATCH_USES = NEXT + 3 * MTP_MAX_DEPTHS };
static int next_use(int what, int depth) { return NEXT + what * MTP_MAX_DEPTHS + depth; }

/* Ids of the prediction depths, where they cannot be shifted here. */
static int copy_next(const struct step_ctx *c)
{
    const int32_t *const ids[] = {c->run->next_tokens, c->run->next_labels, c->run->next_pos};
    for (int i = 0; i < countof(ids); i++)
        for (int k = 0; k < MTP_MAX_DEPTHS; k++) {
            const struct tensor *t = &c->t[next_use(i, k)];
            if (t->data != NULL)
                TRY(copy_in(c, next_use(i, k), ids[i] != NULL ? ids[i] + k * tensor_elems(t) : NULL));
        }
    return ST_OK;
}

static int batch_fwd(const struct step_ctx *c)
{
    const struct run_info *r = c->run;
    const int64_t info[4] = {r->step, r->first_sample, r->first_pos, 0};
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
    TRY(copy_in(c, SHARE, &r->mb_share));
    TRY(copy_in(c, DOC_LOCAL, r->doc_local));
    return copy_next(c);
}

/* Something is drawn at random in training: dropout, or a layer of the pattern by itself. */
static bool draws(const struct config *c)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    bool any = c->model.dropout > 0;
    for (int i = 0; i < n; i++)
        any |= cores[i]->draws != NULL && core_in(cores[i], c->model.pattern) && cores[i]->draws(c);
    return any;
}

static slot_id depth_slot(struct graph *g, const char *name, int depth, struct tensor shape)
{
    char text[32];
    snprintf(text, sizeof text, "%s%d", name, depth);
    return graph_slot(g, text, shape);
}

/* What only a rank with a part of every sequence is given. */
static void declare_part_inputs(struct build *b, int64_t depths)
{
    struct graph *g = b->g;
    struct tensor ids = tensor_1d(NULL, DT_I32, all_rows(b));
    bool divided = context_divides(b), head = mesh_is_last(b->mesh, b->mesh->vpp - 1);
    b->in.doc_local = divided && b->in.doc_start != NO_SLOT ? graph_slot(g, "doc_local", ids) : NO_SLOT;
    for (int k = 0; k < MTP_MAX_DEPTHS; k++) {
        bool ahead = divided && head && k < depths;
        b->in.next_token[k] = ahead ? depth_slot(g, "next_token", k, ids) : NO_SLOT;
        b->in.next_label[k] = ahead ? depth_slot(g, "next_label", k, ids) : NO_SLOT;
        b->in.next_pos[k] = ahead ? depth_slot(g, "next_pos", k, ids) : NO_SLOT;
    }
}

static void declare_batch_node(struct build *b)
{
    const struct batch_slots *in = &b->in;
    struct use use[BATCH_USES] = {
        [TOKEN] = WRITES(in->token),   [LABEL] = WRITES(in->label),    [POS] = WRITES(in->pos),
        [DOC] = WRITES(in->doc_start), [INFO] = WRITES(in->info),      [START] = WRITES(in->start),
        [SCALE] = WRITES(in->scale),   [SHARE] = WRITES(in->mb_share), [DOC_LOCAL] = WRITES(in->doc_local)};
    for (int k = 0; k < MTP_MAX_DEPTHS; k++) {
        use[next_use(0, k)] = (struct use)WRITES(in->next_token[k]);
        use[next_use(1, k)] = (struct use)WRITES(in->next_label[k]);
        use[next_use(2, k)] = (struct use)WRITES(in->next_pos[k]);
    }
    int n = graph_node(b->g, "batch", LANE_COPY, NULL);
    graph_phase(b->g, n, PH_FWD, batch_fwd, use, BATCH_USES);
    graph_host(b->g, n);
}

static void declare_batch(struct build *b, int64_t depths)
{
    struct graph *g = b->g;
    struct tensor ids = tensor_1d(NULL, DT_I32, all_rows(b));
    bool decode = b->mode == BUILD_DECODE, head = mesh_is_last(b->mesh, b->mesh->vpp - 1);
    graph_scope(g, -1, "batch");
    b->in.token = graph_slot(g, "token", ids);
    b->in.pos = graph_slot(g, "pos", ids);
    b->in.label = decode || !head ? NO_SLOT : graph_slot(g, "label", ids);
    b->in.doc_start = !decode && config_separates(b->cfg) ? graph_slot(g, "doc_start", ids) : NO_SLOT;
    b->in.info = training(b) && draws(b->cfg) ? graph_slot(g, "info", tensor_1d(NULL, DT_I64, 4)) : NO_SLOT;
    b->in.start = decode ? graph_slot(g, "start", tensor_1d(NULL, DT_I64, 1)) : NO_SLOT;
    b->in.scale = training(b) && head ? graph_slot(g, "scale", tensor_1d(NULL, DT_F64, 1 + depths)) : NO_SLOT;
    b->in.mb_share = training(b) ? graph_slot(g, "mb_share", tensor_1d(NULL, DT_F64, 1)) : NO_SLOT;
    b->in.loss = decode || !head ? NO_SLOT : build_state(b, "loss", tensor_1d(NULL, DT_F64, 2));
    graph_sum(g, b->in.loss);
    declare_part_inputs(b, depths);
    declare_batch_node(b);
    if (b->in.doc_local == NO_SLOT)
        b->in.doc_local = b->in.doc_start;
}

/* ---- joints and cores ------------------------------------------------------------------------ */

/* One part of the pattern: the main layers, or those of an MTP depth. */
struct part {
    const char *symbols;
    int from, n;                /* layers of it to declare: the main part may be cut */
    const char *where;          /* keys are <where><index>. */
    const struct pattern *keys; /* main: which index a layer has in keys; NULL: its own */
    const struct pattern *groups;
    const char *final_norm;
};

static int ordinal(const char *symbols, int i)
{
    int n = 0;
    for (int k = 0; k <= i; k++)
        n += symbols[k] == symbols[i];
    return n;
}

/* Counted from where the part begins on this rank. A prediction depth of a grouped pattern is one unit. */
static void set_unit(struct build *b, const struct part *p, int i)
{
    const struct pattern *keys = p->keys;
    bool grouped = p->groups != NULL && p->groups->grouped;
    if (grouped && keys == NULL)
        b->unit = 0, b->unit_start = i == p->from;
    else if (grouped)
        b->unit = keys->item_of[i] - keys->item_of[p->from],
        b->unit_start = i == p->from || keys->item_of[i] != keys->item_of[i - 1];
    else
        b->unit = i - p->from, b->unit_start = true;
}

/* The part's symbols, each with a joint in front of it. */
static int declare_layers(struct build *b, const struct part *p, struct sublayer *sub)
{
    for (int i = p->from; i < p->from + p->n; i++, b->layer++) {
        const struct core_kind *core = core_find(p->symbols[i]);
        struct sublayer next = {0};
        b->core = core;
        b->number = ordinal(p->symbols, i);
        set_unit(b, p, i);
        if (b->unit_start)
            unit_begin(b, b->layer, "unit", false);
        snprintf(b->prefix, sizeof b->prefix, "%s%d.", p->where, p->keys ? pattern_layer_key_index(p->keys, i) : i);
        TRY(joint_of(b->cfg)->declare(b, sub, &next, core->norm_key, false));
        struct core_io io = {.h = next.h, .dh = next.dh, .df = next.df, .f = NO_SLOT};
        struct shard_scope divided = {0};
        if (!core->by_row)
            divided = shard_begin(b, &io, true);
        TRY(core->declare(b, &io));
        shard_end(b, &divided, &io);
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
    TRY(joint_of(b->cfg)->declare(b, sub, &end, p->final_norm, true));
    *sub = end;
    return ST_OK;
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
    struct mtp_io io = {.streams = main_end->wide ? b->cfg->model.mhc_streams : 1,
                        .token = b->in.token,
                        .label = b->in.label,
                        .pos = b->in.pos};
    hand_on(&io, main_end);
    for (int k = 0; k < p->n_mtp_depths; k++) {
        char where[64], norm[64], scope[32];
        unit_begin(b, b->layer, "mtp", false);
        TRY(mtp_declare(b, k, &io));
        snprintf(where, sizeof where, "mtp.layers.%d.mtp_model_layer.layers.", k);
        snprintf(norm, sizeof norm, "mtp.layers.%d.final_layernorm.weight", k);
        snprintf(scope, sizeof scope, "mtp%d.head", k);
        struct sublayer sub = sublayer_entry(io.x, io.dx, main_end->wide);
        struct part part = {
            .symbols = p->mtp_symbols, .n = p->n_mtp_layers, .where = where, .groups = p, .final_norm = norm};
        TRY(declare_part(b, &part, &sub));
        b->layer++; /* the final joint's own number */
        graph_scope(b->g, -1, scope);
        mp->mtp_loss[k] = build_state(b, "loss", tensor_1d(NULL, DT_F64, 2));
        graph_sum(b->g, mp->mtp_loss[k]); /* of all microbatches */
        unit_begin(b, -1, scope, false);
        struct head_io head = {
            .scope = scope, .h = sub.h, .dh = sub.dh, .label = io.label, .loss = mp->mtp_loss[k], .scale_index = k + 1};
        TRY(head_declare(b, &head));
        hand_on(&io, &sub);
    }
    return ST_OK;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

int model_chunk(const struct pattern *p, const struct mesh *m, int v, struct model_chunk *out, struct err *e)
{
    *out = (struct model_chunk){.segment = v * m->pp + m->pp_rank,
                                .n_segments = m->pp * m->vpp,
                                .n = p->n_layers,
                                .first = mesh_is_first(m, v),
                                .last = mesh_is_last(m, v)};
    if (out->n_segments == 1) /* '|' without a pipeline says nothing */
        return ST_OK;
    if (p->n_segments != 1 && p->n_segments != out->n_segments) {
        err_set(e, ST_USAGE, "model.pattern has %d segments, but %d pipeline stages of %d chunks each take %d",
                p->n_segments, m->pp, m->vpp, out->n_segments);
        return err_hint(e, "put %d '|' into the pattern, or change parallel.pp or parallel.vpp", out->n_segments - 1);
    }
    struct pattern_place at = {.pp_rank = m->pp_rank,
                               .pp_size = m->pp,
                               .vp = m->vpp > 1 ? v : PATTERN_NOT_GIVEN,
                               .first_layers = m->first_layers > 0 ? m->first_layers : PATTERN_NOT_GIVEN,
                               .last_layers = m->last_layers > 0 ? m->last_layers : PATTERN_NOT_GIVEN};
    struct pattern_chunk chosen;
    TRY(pattern_choose(p, &at, &chosen, e));
    out->from = chosen.part.first_layer;
    out->n = chosen.part.n_layers;
    return ST_OK;
}

/* The closed stream goes to the next segment. */
static int declare_exit(struct build *b, const struct model_chunk *c, const struct sublayer *sub)
{
    struct sublayer closed;
    TRY(joint_of(b->cfg)->close(b, sub, &closed));
    return cut_out_declare(b, &(struct cut_place){.before = c->segment, .n_segments = c->n_segments}, &closed);
}

/* The final norm is applied here and nowhere else, whether the chunk has layers or not, and before anyone reads: the
 * head and the first prediction depth see the same tensor. */
static int declare_end(struct build *b, const struct pattern *p, struct sublayer *sub, struct model_plan *mp)
{
    struct sublayer end = {0};
    b->prefix[0] = '\0';
    TRY(joint_of(b->cfg)->declare(b, sub, &end, pattern_final_norm_key(p), true));
    b->layer++;
    unit_begin(b, -1, "head", !b->cfg->model.tied);
    struct head_io head = {.scope = "head", .h = end.h, .dh = end.dh, .label = b->in.label, .loss = b->in.loss};
    TRY(head_declare(b, &head));
    return mp->n_mtp > 0 ? declare_mtp(b, p, &end, mp) : ST_OK;
}

static int declare_chunk(struct build *b, const struct pattern *p, const struct model_chunk *c, struct model_plan *mp)
{
    struct sublayer sub;
    b->layer = c->from;
    if (c->first) {
        unit_begin(b, -1, "embed", false);
        slot_id x, dx;
        TRY(embed_declare(b, "embed", EMBED_STREAM, b->in.token, b->in.pos, &x, &dx));
        sub = sublayer_entry(x, dx, false);
    } else {
        TRY(cut_in_declare(b, &(struct cut_place){.before = c->segment - 1, .n_segments = c->n_segments},
                           joint_of(b->cfg), &sub));
        unit_begin(b, -1, "entry", false); /* a chunk begins with its cut */
    }
    struct part part = {
        .symbols = p->symbols, .from = c->from, .n = c->n, .where = "decoder.layers.", .keys = p, .groups = p};
    TRY(declare_layers(b, &part, &sub));
    TRY(c->last ? declare_end(b, p, &sub, mp) : declare_exit(b, c, &sub));
    units_finish(b);
    return ST_OK;
}

static int declare_stack(struct build *b, const struct pattern *p, struct model_plan *mp)
{
    mp->n_mtp = training(b) ? p->n_mtp_depths : 0;
    for (int k = 0; k < countof(mp->mtp_loss); k++)
        mp->mtp_loss[k] = NO_SLOT;
    b->layer = -1;
    declare_batch(b, mp->n_mtp);
    for (int v = 0; v < b->mesh->vpp; v++) {
        struct model_chunk c;
        TRY(model_chunk(p, b->mesh, v, &c, b->e));
        b->g->chunk = v;
        TRY(declare_chunk(b, p, &c, mp));
    }
    return ST_OK;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Tensor-parallel ranks divide the rows of a microbatch between them. */
static int check_rows(const struct model *m, const struct model_plan_opts *o, struct err *e)
{
    int64_t seq = o->mode == BUILD_DECODE ? o->seq : o->seq / m->mesh.cp, rows = o->batch * seq;
    int fewer = m->mesh.tp;
    if (rows % m->mesh.tp == 0)
        return ST_OK;
    while (rows % fewer != 0)
        fewer--;
    err_set(e, ST_USAGE, "the %lld tokens of a microbatch, %lld x %lld, cannot be shared by parallel.tp = %d ranks",
            (long long)rows, (long long)o->batch, (long long)seq, m->mesh.tp);
    return err_hint(e, "parallel.tp = %d divides them; with %d, train.seq must be a multiple of %d", fewer, m->mesh.tp,
                    m->mesh.tp * m->mesh.cp);
}

static int declare_plan(struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct err *e)
{
    *mp =
        (struct model_plan){.mode = o->mode, .batch = o->batch, .seq = o->seq, .cache_len = o->cache_len, .n_micro = 1};
    TRY(check_rows(m, o, e));
    graph_init(&mp->g, m->ops);
    mp->built = true;
    int64_t seq = o->mode == BUILD_DECODE ? o->seq : o->seq / m->mesh.cp;
    struct build b = {.cfg = m->cfg,
                      .dev = m->dev,
                      .ops = m->ops,
                      .mesh = &m->mesh,
                      .mode = o->mode,
                      .g = &mp->g,
                      .mem = &m->mem,
                      .params = &m->params,
                      .tables = &m->tables,
                      .metrics = &m->metrics,
                      .routes = &m->routes,
                      .updates = &m->updates,
                      .batch = o->batch,
                      .seq = seq,
                      .whole_seq = o->seq,
                      .rows = o->batch * seq / m->mesh.tp,
                      .cache_len = o->cache_len,
                      .n_layers = m->pattern.n_layers,
                      .n_depths = m->pattern.n_mtp_depths,
                      .want_logits = o->want_logits,
                      .logits = NO_SLOT,
                      .streams = m->policy.streams,
                      .e = e};
    TRY(units_open(&b.units, e));
    int st = declare_stack(&b, &m->pattern, mp);
    units_close(b.units);
    if (st != ST_OK || mp->g.err.code != ST_OK) {
        if (mp->g.err.code != ST_OK)
            *e = mp->g.err;
        return e->code;
    }
    mp->loss = b.in.loss;
    mp->logits = b.logits;
    return ST_OK;
}

static int on_whole(const struct model *m, const struct model_plan_opts *o, struct err *e);

static int apply_policy(const struct model *m, struct graph *g, const struct model_plan_opts *o, struct err *e)
{
    bool missing = false;
    for (int i = 0; i < m->policy.n_words; i++) {
        const struct policy_word *w = &m->policy.words[i];
        bool unknown = policy_mark(w, g) == 0;
        if (unknown && m->mesh.pp == 1)
            return policy_unknown(w, g, e);
        missing |= unknown;
    }
    return missing ? on_whole(m, o, e) : ST_OK;
}

static int settle_replays(const struct model *m, struct model_plan *mp, struct err *e)
{
    struct build b = {
        .cfg = m->cfg, .dev = m->dev, .ops = m->ops, .mesh = &m->mesh, .mode = mp->mode, .g = &mp->g, .e = e};
    const struct joint_kind *joint = joint_of(m->cfg);
    int st = joint->settle != NULL ? joint->settle(&b) : ST_OK;
    if (st != ST_OK)
        *e = mp->g.err;
    return st;
}

/* With a pipeline or overlap a training plan is a whole step. All else is one microbatch, in the plain order: every
 * chunk's forward, then every backward, which is free of deadlock over any number of stages. */
static int order_plan(const struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct order *out,
                      struct err *e)
{
    static const enum overlap_kind kinds[] = {[CFG_OVERLAP_NONE] = OVERLAP_NONE,
                                              [CFG_OVERLAP_EP] = OVERLAP_EP,
                                              [CFG_OVERLAP_DW] = OVERLAP_DW,
                                              [CFG_OVERLAP_TP] = OVERLAP_TP};
    const struct config_parallel *c = &m->cfg->parallel;
    const struct mesh *at = &m->mesh;
    bool overlaps = o->mode == BUILD_TRAIN && config_reads(m->cfg, "parallel.overlap"); /* is there what travels? */
    enum overlap_kind overlap = overlaps ? kinds[c->overlap] : OVERLAP_NONE;
    bool whole = o->mode == BUILD_TRAIN && o->n_micro > 1 && (at->pp > 1 || at->vpp > 1 || overlap_pairs(overlap));
    mp->n_micro = whole ? (int)o->n_micro : 1;
    if (!whole && overlap == OVERLAP_NONE)
        return schedule_plain(&mp->g, m->cfg->plan.delay_dw, out, e);
    struct schedule_opts s = {.pp = at->pp,
                              .vpp = at->vpp,
                              .pp_rank = at->pp_rank,
                              .n_mb = mp->n_micro,
                              .group = (int)c->pp_group,
                              .overlap = overlap,
                              .delay_dw = m->cfg->plan.delay_dw};
    return schedule_step(&mp->g, &s, out, e);
}

/* FP8 that reaches no layer, and a glob that keeps none, are mistakes. */
static int check_codes(const struct model *m, struct err *e)
{
    char word[192];
    bool some = false;
    for (int k = 0; k < m->params.n; k++)
        some |= m->params.list[k].p.codes;
    for (const char *p = m->cfg->gpu.fp8_keep; *p != '\0';) {
        size_t n = strcspn(p, ", ");
        bool found = n == 0;
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        p += n + (p[n] != '\0');
        for (int k = 0; k < m->params.n && !found; k++)
            found = m->params.list[k].p.rank >= 2 && str_glob(word, m->params.list[k].p.key);
        if (!found) {
            err_set(e, ST_USAGE, "gpu.fp8_keep: '%s' matches the key of no matrix of this model", word);
            return err_hint(e, "`braid plan CONFIG --params=on` lists the keys");
        }
    }
    if (some)
        return ST_OK;
    err_set(e, ST_USAGE, "gpu.precision = fp8, but no linear layer of this model can have it");
    return err_hint(e, "the sizes of a layer must be multiples of 16, those of experts of 128, and gpu.fp8_keep must "
                       "not name all of them");
}

static int codes_reach_layers(const struct model *m, const struct model_plan_opts *o, struct err *e)
{
    struct err part = {0};
    if (m->mesh.pp > 1 && check_codes(m, &part) != ST_OK)
        return on_whole(m, o, e);
    return m->mesh.pp > 1 ? ST_OK : check_codes(m, e);
}

static int offload(const struct model *m, struct graph *g, struct order *order, const struct model_plan_opts *o,
                   struct err *e)
{
    struct offload_count count;
    TRY(order_offload(g, order, m->cfg->plan.offload_min, &count, e));
    if (count.named == 0 || count.slots > 0)
        return ST_OK;
    return m->mesh.pp > 1 ? on_whole(m, o, e) : policy_moves_nothing(m->cfg, &count, e);
}

/* A stage of a pipeline may have none of the layers that a list means, and none whose sizes suit FP8. Then the whole
 * model decides: the same one without stages, planned on paper. */
static int on_whole(const struct model *m, const struct model_plan_opts *o, struct err *e)
{
    struct model whole;
    struct model_plan plan = {0};
    struct model_plan_opts opts = *o;
    int st = model_init(&whole, m->cfg, m->dev, e);
    whole.mesh.cp = m->mesh.cp; /* it brings slots of its own */
    whole.mesh.cp_rank = m->mesh.cp_rank;
    opts.n_micro = 1;
    if (st == ST_OK)
        st = model_plan_build(&whole, &plan, &opts, e);
    model_plan_release(&plan);
    model_release(&whole);
    return st;
}

int model_plan_build(struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct err *e)
{
    TRY(declare_plan(m, mp, o, e));
    graph_trim(&mp->g);
    if (m->cfg->gpu.precision == CFG_PRECISION_FP8 && o->mode == BUILD_TRAIN)
        TRY(codes_reach_layers(m, o, e));
    if (o->mode == BUILD_TRAIN) {
        TRY(apply_policy(m, &mp->g, o, e));
        TRY(settle_replays(m, mp, e));
        TRY(graph_prune(&mp->g, e));
    }
    struct order order = {0};
    int st = order_plan(m, mp, o, &order, e);
    if (st == ST_OK)
        st = order_prefetch(&mp->g, &order, e);
    if (st == ST_OK && o->mode == BUILD_TRAIN)
        st = offload(m, &mp->g, &order, o, e);
    if (st == ST_OK)
        st = plan_build(&mp->p, o->name, &mp->g, &order, e);
    if (st == ST_OK && o->mode == BUILD_TRAIN)
        mp->order = order;
    else
        order_release(&order);
    if (st != ST_OK)
        return st;
    memory_reserve_max(&m->mem, ARENA_FRAME, mp->p.frame_bytes);
    memory_reserve_max(&m->mem, ARENA_WORK, mp->p.work_bytes);
    memory_reserve_max(&m->mem, ARENA_HOST, mp->p.host_bytes);
    return ST_OK;
}

void model_plan_release(struct model_plan *mp)
{
    if (mp->built) {
        plan_release(&mp->p);
        order_release(&mp->order);
        graph_release(&mp->g);
    }
    *mp = (struct model_plan){0};
}
