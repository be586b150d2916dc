/* The mixture-of-experts core, symbol 'E': each token goes to k of E expert MLPs, and to a shared
 * one.
 *
 * Shapes: T rows, E experts, R = T k rows sorted by expert, d hidden, f expert width, w = 2f if
 * gated else f. shared  [T, d]   = fc2(act(fc1 h)) (* sigmoid(h gate^T))      only with shared_ffn
 *   logits  [T, E]   = (h * jitter) Wr^T + br
 *   probs   [T, k], idx [T, k]                                    ops/router
 *   offset [E + 1], row [T, k], src [R]                           ops/moeplan
 *   xp      [R, d]   = rows of h by expert; prow [R] their probabilities
 *   pre     [R, w]   = xp W1_e^T + b1_e;  act [R, f] = prow * act(pre)
 *   yp      [R, d]   = act W2_e^T + prow * b2_e
 *   f       [T, d]   = shared + sum of a token's rows of yp, in order of k
 * The probability enters before fc2, so the combine adds rows without weights and dprob = <dact,
 * act>.
 *
 * Gradients of h meet in this order: router, experts, shared. Backward phases run in reverse order
 * of declaration, so the nodes are declared shared first; `scatter`, which only adds the experts'
 * share, stands between shared and router. The router's gradient is complete before it: it needs
 * dprob from the experts. Counts, metrics and the expert bias are forward-only: the router is never
 * replayed. */
#include "layers/moe_int.h"
#include "layers/shard.h"
#include "ops/act/act.h"
#include "ops/moeplan/moeplan.h"
#include "ops/ops.h"
#include "ops/permute/permute.h"
#include "ops/router/router.h"

#include <string.h>

/* The update plan's step for the expert bias. */
enum { BIAS_TALLY, BIAS_BIAS, BIAS_USES };
static int bias_step(const struct step_ctx *c)
{
    const struct moe *m = c->self;
    struct router_bias_args a = {.tally = c->t[BIAS_TALLY], .bias = c->t[BIAS_BIAS], .rate = m->bias_rate};
    return c->ops->router_bias(c->lane, &a);
}

/* ---- sizes, state ---------------------------------------------------------------------------- */

static int sizes(struct build *b, struct moe *m)
{
    const struct config_model *c = &b->cfg->model;
    char site[64];
    bool decode = b->mode == BUILD_DECODE, in_stack = str_starts(b->prefix, "decoder.");
    *m = (struct moe){.experts = c->experts,
                      .local = c->experts / b->mesh->ep,
                      .batch_ranks = b->mesh->stage,
                      .k = c->topk,
                      .width = c->hidden,
                      .ffn = c->expert_ffn,
                      .vocab = padded_vocab(c),
                      .bias_rate = c->router_bias_rate,
                      .seq = b->seq,
                      .jitter = training(b) ? c->router_jitter : 0,
                      .hashed = in_stack && b->layer < c->router_hash_layers};
    m->shared_act = (struct act_rule){
        .kind = (enum act_kind)c->act, .clamp = c->act_clamp, .alpha = c->act_alpha, .offset = c->act_offset};
    m->act = m->shared_act;
    m->act.interleave = c->glu_interleave;
    m->wide = act_is_gated(m->act.kind) ? 2 * m->ffn : m->ffn;
    m->rule = (struct router_rule){.score = (enum router_score)c->router_score,
                                   .pre_softmax = c->router_pre_softmax,
                                   .norm = c->router_norm,
                                   .groups = c->router_group_topk > 0 ? c->router_groups : 0,
                                   .group_topk = c->router_group_topk,
                                   .group_best = c->router_group_best,
                                   .scale = c->router_scale,
                                   .capacity = decode ? 0 : c->router_capacity,
                                   .drop_late = c->router_drop == CFG_DROP_LATE,
                                   .seq = b->rows % b->seq == 0 ? b->seq : b->rows};
    if (training(b))
        m->rule.coef = (struct router_coef){c->aux_loss, c->seq_aux_loss, c->global_aux_loss, c->router_z_loss};
    snprintf(site, sizeof site, "router.jitter.%d", b->layer);
    m->jitter_key = rng_key((uint64_t)b->cfg->run.seed, site);
    snprintf(site, sizeof site, "router.noise.%d", b->layer);
    m->noise_key = rng_key((uint64_t)b->cfg->run.seed, site);
    if (b->rows > INT32_MAX / m->k)
        return err_set(&b->g->err, ST_INVALID,
                       "%lld tokens with %lld experts each are more rows than the 2147483647 a plan can hold",
                       (long long)b->rows, (long long)m->k);
    return ST_OK;
}

/* One block of numbers, each logged under a tag of its own. */
static slot_id declare_metrics(struct build *b, const struct moe *m)
{
    static const char *const tags[ROUTER_STATS] = {
        "router loss",   "router aux loss", "router seq aux loss", "router global aux loss",
        "router z loss", "expert load max", "expert load entropy", "expert dropped"};
    const struct router_coef *c = &m->rule.coef;
    bool on[ROUTER_STATS] = {router_balances(&m->rule) || c->z != 0,
                             c->aux != 0,
                             c->seq_aux != 0,
                             c->global_aux != 0,
                             c->z != 0,
                             true,
                             true,
                             m->rule.capacity > 0};
    struct metric_list *l = b->metrics;
    slot_id stat = build_state(b, "stat", tensor_1d(NULL, DT_F64, ROUTER_STATS));
    graph_sum(b->g, stat);
    for (int i = 0; i < ROUTER_STATS && stat != NO_SLOT; i++) {
        if (!on[i])
            continue;
        if (mem_grow((void **)&l->m, &l->cap, (size_t)l->n + 1, sizeof *l->m, &b->g->err) != ST_OK)
            return NO_SLOT;
        l->m[l->n++] = (struct metric){.tag = tags[i],
                                       .layer = b->layer,
                                       .n = 1,
                                       .objective = i == ROUTER_STAT_LOSS,
                                       .offset = b->g->slots[stat].offset + i * (int64_t)sizeof(double)};
    }
    return stat;
}

static void declare_state(struct build *b, const struct moe *m, struct moe_slots *s)
{
    s->load = s->stat = s->tally = s->global = NO_SLOT;
    if (!training(b))
        return;
    s->stat = declare_metrics(b, m);
    if (router_balances(&m->rule))
        s->load = graph_slot(b->g, "load", tensor_2d(NULL, DT_F64, b->rows / m->rule.seq + 1, m->experts));
    if (m->rule.coef.global_aux != 0)
        s->global = build_state(b, "global_load", tensor_1d(NULL, DT_F64, m->experts + 1));
    graph_sum(b->g, s->global);
    /* The bias of a frozen router keeps its values, too. */
    if (s->bias.w == NO_SLOT || s->router.param < 0 || b->params->list[s->router.param].p.frozen)
        return;
    struct tensor tally = tensor_1d(NULL, DT_F64, m->experts);
    s->tally = build_state(b, "tally", tally);
    graph_sum(b->g, s->tally);
    ep_declare_tally_sum(b, s->tally);
    if (b->g->err.code != ST_OK)
        return;
    build_update(
        b, &(struct update_decl){.name = graph_name(b->g, "expert_bias"),
                                 .fn = bias_step,
                                 .self = m,
                                 .n_uses = BIAS_USES,
                                 .use = {[BIAS_TALLY] = {tally, ARENA_STATE, b->g->slots[s->tally].offset, USE_READ},
                                         [BIAS_BIAS] = {tensor_1d(NULL, b->dev->wide, m->experts), ARENA_PARAM,
                                                        b->g->slots[s->bias.w].offset, USE_ADD}}});
}

/* Where the trainer wants to know the choices of each microbatch they stay in memory of their own, and where it
 * dictates them it finds room for that. A table of tokens leaves nothing to choose. */
static void declare_routes(struct build *b, const struct moe *m, struct moe_slots *s)
{
    const struct config_train *t = &b->cfg->train;
    struct tensor shape = tensor_2d(NULL, DT_I32, b->rows, m->k);
    bool open = training(b) && !m->hashed, record = open && t->record_routes[0] != '\0',
         replay = open && t->replay_routes[0] != '\0';
    struct route_list *l = b->routes;
    s->idx = record ? build_state(b, "idx", shape) : graph_slot(b->g, "idx", shape);
    s->given = replay ? build_state(b, "given_idx", shape) : NO_SLOT;
    if ((!record && !replay) || b->g->err.code != ST_OK ||
        mem_grow((void **)&l->s, &l->cap, (size_t)l->n + 1, sizeof *l->s, &b->g->err) != ST_OK)
        return;
    l->s[l->n++] = (struct route_site){.layer = b->layer,
                                       .k = m->k,
                                       .experts = m->experts,
                                       .chosen = record ? b->g->slots[s->idx].offset : -1,
                                       .given = replay ? b->g->slots[s->given].offset : -1};
}

static void declare_slots(struct build *b, const struct moe *m, struct moe_slots *s)
{
    struct graph *g = b->g;
    int64_t rows = b->rows, slots = rows * m->k;
    bool noise = training(b) && b->cfg->model.router_force_balance;
    enum dtype wide = b->dev->wide;
    s->hj = m->jitter > 0 ? build_real(b, "jittered", rows, m->width) : NO_SLOT;
    s->dhj = m->jitter > 0 ? build_grad(b, "djittered", rows, m->width) : NO_SLOT;
    s->logits = build_wide(b, "logits", rows, m->experts);
    s->gate = noise ? build_wide(b, "gate", rows, m->experts) : s->logits;
    s->dlogits = build_grad(b, "dlogits", rows, m->experts);
    s->probs = build_wide(b, "probs", rows, m->k);
    s->dprobs = training(b) ? build_wide(b, "dprobs", rows, m->k) : NO_SLOT;
    declare_routes(b, m, s);
    s->ep = ep_declare_slots(b, &s->home, s->idx, m->experts, m->k, m->width);
    if (s->ep.on) {
        slots = s->ep.rows;
        s->offset = s->ep.offset;
    } else {
        s->offset = graph_slot(g, "offset", tensor_1d(NULL, DT_I32, m->experts + 1));
        s->home.row = s->home.prob_row = graph_slot(g, "row", tensor_2d(NULL, DT_I32, rows, m->k));
        s->home.src = s->home.prob_src = graph_slot(g, "src", tensor_1d(NULL, DT_I32, slots));
        s->home.k = m->k;
    }
    s->xp = build_real(b, "rows", slots, m->width);
    s->dxp = build_grad(b, "drows", slots, m->width);
    s->prow = graph_slot(g, "row_prob", tensor_1d(NULL, wide, slots));
    s->dprow = training(b) ? graph_slot(g, "drow_prob", tensor_1d(NULL, wide, slots)) : NO_SLOT;
    s->yp = build_real(b, "out_rows", slots, m->width);
    s->dyp = build_grad(b, "dout_rows", slots, m->width);
    if (!s->ep.on) {
        s->home.x = s->xp;
        s->home.dx = s->dxp;
        s->home.prob = s->prow;
        s->home.dprob = s->dprow;
        s->home.y = s->yp;
        s->home.dy = s->dyp;
    }
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static void declare_scatter(struct build *b, const struct moe_slots *s, const struct core_io *io)
{
    if (!training(b))
        return;
    struct graph *g = b->g;
    int n = graph_node(g, "scatter", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_BWD, unpermute, .x = of(g, s->home.dx), .row = of(g, s->home.row), .y = of(g, io->dh));
}

/* Tensor-parallel ranks that share one sequence have its loss in common; otherwise each has whole ones. */
static bool one_sequence(const struct build *b, const struct moe *m)
{
    return b->mesh->tp > 1 && b->batch == 1 && m->rule.coef.seq_aux != 0;
}

/* Where several ranks share a microbatch, losses have the load of all of them. */
static void declare_balance(struct build *b, const struct moe *m, const struct moe_slots *s)
{
    if (m->rule.coef.global_aux != 0)
        ep_declare_load_sum(b, s->load);
    if (m->rule.coef.aux != 0 || m->rule.coef.seq_aux != 0)
        ep_declare_sequence_sum(b, s->load, m->rule.coef.aux != 0 || one_sequence(b, m));
}

/* Weights of the losses in the backward pass of one rank, which counts its own rows only: a share of a microbatch that
 * several ranks divide, as mb_share says. What divides by the square of the rows and has the load of all of them is too
 * large by the number of ranks once more. The load of global_aux is a sum over the ranks of the stage. */
static struct router_coef shared_coef(const struct build *b, const struct moe *m)
{
    struct router_coef c = m->rule.coef;
    double parts = (double)b->mesh->cp, ranks = parts * (double)b->mesh->tp;
    c.aux /= ranks;
    c.seq_aux /= one_sequence(b, m) ? ranks : parts;
    c.global_aux /= (double)m->batch_ranks;
    return c;
}

static void declare_router(struct build *b, const struct moe *m, const struct moe_slots *s, const struct core_io *io)
{
    struct graph *g = b->g;
    bool jitters = s->hj != NO_SLOT;
    if (jitters) {
        int n = graph_node(g, "jitter", LANE_COMPUTE, NULL);
        struct router_jitter_args a = {.x = of(g, io->h),
                                       .info = of(g, b->in.info),
                                       .y = of(g, s->hj),
                                       .eps = m->jitter,
                                       .key = m->jitter_key,
                                       .seq = m->seq};
        graph_op(g, n, PH_FWD, &router_jitter_desc, &a);
        graph_again(g, n, s->hj);
        a.x = of(g, s->dhj);
        a.y = of(g, io->dh);
        graph_op(g, n, PH_BWD, &router_jitter_desc, &a);
    }
    linear_declare(b, "router",
                   &(struct linear){.x = jitters ? s->hj : io->h,
                                    .y = s->gate,
                                    .dy = s->dlogits,
                                    .dx = jitters ? s->dhj : io->dh,
                                    .w = s->router,
                                    .bias = s->router_bias,
                                    .in = m->width,
                                    .out = m->experts,
                                    .plain = true});
    if (s->gate != s->logits) { /* the gradient goes straight through to the real logits */
        int n = graph_node(g, "noise", LANE_COMPUTE, NULL);
        GRAPH_OP(g, n, PH_FWD, router_noise, .info = of(g, b->in.info), .logits = of(g, s->logits), .key = m->noise_key,
                 .seq = m->seq);
        graph_again(g, n, s->logits);
    }
    int n = graph_node(g, "select", LANE_COMPUTE, NULL);
    slot_id token = m->hashed ? b->in.token : NO_SLOT, table = m->hashed ? s->table.w : s->given;
    GRAPH_OP(g, n, PH_FWD, router_fwd, .logits = of(g, s->logits), .bias = of(g, s->bias.w),
             .token = shard_rows(b, of(g, token)), .table = of(g, table), .probs = of(g, s->probs),
             .idx = of(g, s->idx), .load = of(g, s->load), .stat = of(g, s->stat), .tally = of(g, s->tally),
             .global = of(g, s->global), .rule = m->rule);
    declare_balance(b, m, s);
    if (!training(b))
        return;
    struct router_rule rule = m->rule;
    rule.coef = shared_coef(b, m);
    GRAPH_OP(g, n, PH_BWD, unpermute, .row = of(g, s->home.prob_row), .xprob = of(g, s->home.dprob),
             .yprob = of(g, s->dprobs));
    GRAPH_OP(g, n, PH_BWD, router_bwd, .dprobs = of(g, s->dprobs), .dloss = of(g, b->in.mb_share),
             .logits = of(g, s->logits), .idx = of(g, s->idx), .load = of(g, s->load), .dlogits = of(g, s->dlogits),
             .rule = rule, .hashed = m->hashed);
}

static void declare_permute(struct build *b, const struct moe *m, const struct moe_slots *s, const struct core_io *io)
{
    struct graph *g = b->g;
    double bytes = 2.0 * (double)tensor_bytes(&g->slots[s->home.x].shape);
    int n;
    if (s->ep.on) {
        ep_declare_maps(b, &s->ep, &s->home);
    } else {
        n = graph_node(g, "plan", LANE_COMPUTE, NULL);
        GRAPH_OP(g, n, PH_FWD, moeplan, .idx = of(g, s->idx), .offset = of(g, s->offset), .row = of(g, s->home.row),
                 .src = of(g, s->home.src));
    }
    n = graph_node(g, "permute", LANE_COMPUTE, NULL);
    if (s->ep.on || experts8_fetch_x(b, &s->w1)) /* the probabilities alone */
        GRAPH_OP(g, n, PH_FWD, permute, .src = of(g, s->home.prob_src), .row = of(g, s->home.prob_row),
                 .prob = of(g, s->probs), .yprob = of(g, s->home.prob), .k = m->k);
    if (!s->ep.on && experts8_fetch_x(b, &s->w1))
        return; /* rows are fetched as codes */
    if (s->ep.on && s->ep.codes_there) {
        ep_declare_pack(b, n, &s->ep, &s->home, io->h);
        return;
    }
    slot_id prob = s->ep.on ? NO_SLOT : s->probs, sorted = s->ep.on ? NO_SLOT : s->home.prob;
    GRAPH_OP(g, n, PH_FWD, permute, .x = of(g, io->h), .src = of(g, s->home.src), .row = of(g, s->home.row),
             .prob = of(g, prob), .y = of(g, s->home.x), .yprob = of(g, sorted), .k = s->home.k);
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    /* The probabilities are kept. */
    GRAPH_OP(g, n, PH_REPLAY, permute, .x = of(g, io->h), .src = of(g, s->home.src), .row = of(g, s->home.row),
             .y = of(g, s->home.x), .k = s->home.k);
    graph_cost(g, n, PH_REPLAY, 0, bytes);
    graph_replay(g, s->home.x, n);
}

static void declare_experts(struct build *b, const struct moe *m, const struct moe_slots *s, const struct core_io *io)
{
    struct graph *g = b->g;
    bool fetch_x = !s->ep.on && experts8_fetch_x(b, &s->w1),
         fetch_dy = !s->ep.on && experts8_fetch_dy(b, &s->w1, &s->b2);
    experts_declare(b, &(struct experts){.offset = s->offset,
                                         .h = fetch_x ? io->h : NO_SLOT,
                                         .df = fetch_dy ? io->df : NO_SLOT,
                                         .src = fetch_x || fetch_dy ? s->home.src : NO_SLOT,
                                         .row = fetch_x || fetch_dy ? s->home.row : NO_SLOT,
                                         .k = m->k,
                                         .x = s->xp,
                                         .dx = s->dxp,
                                         .prob = s->prow,
                                         .dprob = s->dprow,
                                         .y = s->yp,
                                         .dy = s->dyp,
                                         .w1 = s->w1,
                                         .w2 = s->w2,
                                         .b1 = s->b1,
                                         .b2 = s->b2,
                                         .act = &m->act,
                                         .ffn = m->ffn,
                                         .wide = m->wide});
    if (s->ep.on)
        ep_declare_return(b, &s->ep, &s->home, s->yp, s->dyp);
    int n = graph_node(g, "combine", LANE_COMPUTE, NULL);
    double bytes = (double)tensor_bytes(&g->slots[s->home.y].shape);
    if (s->ep.on && s->ep.codes_back)
        ep_declare_unpack(b, n, &s->home);
    GRAPH_OP(g, n, PH_FWD, unpermute, .x = of(g, s->home.y), .row = of(g, s->home.row), .base = of(g, s->shared),
             .y = of(g, io->f));
    graph_cost(g, n, PH_FWD, 0, bytes);
    graph_inplace(g, n, PH_FWD, s->shared, io->f);
    if (!training(b) || fetch_dy)
        return;
    GRAPH_OP(g, n, PH_BWD, permute, .x = of(g, io->df), .src = of(g, s->home.src), .row = of(g, s->home.row),
             .y = of(g, s->home.dy), .k = s->home.k);
    graph_cost(g, n, PH_BWD, 0, bytes);
}

static int moe_declare(struct build *b, struct core_io *io)
{
    struct moe *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    struct moe_slots s;
    TRY(sizes(b, m));
    graph_scope(b->g, b->layer, "moe");
    moe_declare_params(b, m, &s);
    declare_slots(b, m, &s);
    declare_state(b, m, &s);
    io->f = build_real(b, "out", b->rows, m->width);
    graph_sum(b->g, io->dh);
    s.shared = shared_expert_declare(b, m->shared_act, io);
    if (b->g->err.code != ST_OK)
        return b->g->err.code;
    declare_scatter(b, &s, io);
    declare_router(b, m, &s, io);
    declare_permute(b, m, &s, io);
    if (s.ep.on)
        ep_declare_dispatch(b, &s.ep, &s.home,
                            &(struct ep_rows){.x = s.xp, .dx = s.dxp, .prob = s.prow, .dprob = s.dprow});
    declare_experts(b, m, &s, io);
    return b->g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

/* Physical layers in front of the first with experts; those of prediction depths are never hashed. */
static bool hash_reaches(const struct config *c)
{
    int64_t layer = 0;
    for (const char *p = c->model.pattern; *p != '\0' && *p != '/'; p++) {
        if (*p == 'E')
            return layer < c->model.router_hash_layers;
        layer += strchr("[]|", *p) == NULL;
    }
    return false;
}

/* A layer with experts chooses them by its router. */
static bool router_chooses(const struct config *c)
{
    int64_t layer = 0;
    bool depth = false;
    for (const char *p = c->model.pattern; *p != '\0'; p++) {
        depth |= *p == '/';
        if (*p == 'E' && (depth || layer >= c->model.router_hash_layers))
            return true;
        layer += strchr("[]|/", *p) == NULL;
    }
    return false;
}

static bool ffn_read(const struct config *c) { return config_source_of(c, "model.expert_ffn").source == CFG_FROM_AUTO; }
static bool norm_matters(const struct config *c)
{
    return c->model.router_score != CFG_ROUTER_SOFTMAX && c->model.topk > 1;
}

static bool groups_chosen(const struct config *c) { return c->model.router_group_topk > 0; }
static bool bias_moves(const struct config *c) { return c->model.router_bias && router_chooses(c); }
static bool drops(const struct config *c) { return c->model.router_capacity > 0; }
static bool experts_shared(const struct config *c)
{
    return c->parallel.ep > 1 || c->parallel.etp > 1 ||
           (c->parallel.comm == CFG_COMM_LOOP && c->parallel.loop_axis == CFG_LOOP_EP);
}

/* In FP8 experts have one way only; a glob of gpu.fp8_keep may leave them out of it. */
static bool experts_not_codes(const struct config *c)
{
    return c->gpu.precision != CFG_PRECISION_FP8 || c->gpu.fp8_keep[0] != '\0' || c->model.hidden % 128 != 0 ||
           c->model.expert_ffn % 128 != 0;
}

static bool ep_without_experts(const struct config *c)
{
    return (c->parallel.ep > 1 || c->parallel.etp > 1) && strchr(c->model.pattern, 'E') == NULL;
}
static bool experts_do_not_divide(const struct config *c) { return c->model.experts % max_i64(c->parallel.ep, 1) != 0; }
/* Gate and up rows that alternate in blocks stay together. */
static bool ffn_does_not_divide(const struct config *c)
{
    return c->model.expert_ffn % (max_i64(c->parallel.etp, 1) * max_i64(c->model.glu_interleave, 1)) != 0 &&
           c->parallel.etp > 1;
}
static bool codes_of_sums(const struct config *c)
{
    return c->parallel.etp > 1 && c->parallel.ep_fp8 == CFG_EP_FP8_BOTH;
}
/* Experts that have codes as a whole have them as slices, too: the same ones. */
static bool slices_within_blocks(const struct config *c)
{
    return c->parallel.etp > 1 && c->gpu.precision == CFG_PRECISION_FP8 && c->model.hidden % 128 == 0 &&
           c->model.expert_ffn % 128 == 0 && c->model.expert_ffn / c->parallel.etp % 128 != 0;
}
/* Ranks that divide the rows of a microbatch. */
static bool rows_divided(const struct config *c) { return c->parallel.tp > 1 && strchr(c->model.pattern, 'E') != NULL; }
static bool capacity_divided(const struct config *c) { return rows_divided(c) && c->model.router_capacity > 0; }
static bool noise_divided(const struct config *c)
{
    return rows_divided(c) && (c->model.router_jitter > 0 || c->model.router_force_balance);
}
static bool balances_divided(const struct config *c)
{
    return rows_divided(c) && c->model.aux_loss != 0 && c->model.seq_aux_loss != 0 && c->train.micro_batch > 1;
}
static bool sequences_divided(const struct config *c)
{
    return rows_divided(c) && c->model.seq_aux_loss != 0 && c->train.micro_batch > 1 &&
           c->train.micro_batch % c->parallel.tp != 0;
}
static bool routes_divided(const struct config *c) { return rows_divided(c) && c->train.replay_routes[0] != '\0'; }
static bool topk_above_experts(const struct config *c) { return c->model.topk > c->model.experts; }

/* The softmax over one chosen expert is 1, whatever the router says: it would never learn. */
static bool softmax_of_one(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->topk == 1 && m->experts > 1 && m->router_score == CFG_ROUTER_SOFTMAX && !m->router_pre_softmax;
}

static bool pre_softmax_without_softmax(const struct config *c)
{
    return c->model.router_pre_softmax && c->model.router_score != CFG_ROUTER_SOFTMAX;
}

static bool router_bias_with_softmax(const struct config *c)
{
    return c->model.router_bias && c->model.router_score == CFG_ROUTER_SOFTMAX;
}

static bool groups_do_not_fit(const struct config *c)
{
    const struct config_model *m = &c->model;
    if (m->router_groups == 0)
        return m->router_group_topk != 0;
    return m->experts % m->router_groups != 0 || m->router_group_topk > m->router_groups ||
           (m->router_group_topk > 0 && m->router_group_topk * (m->experts / m->router_groups) < m->topk);
}

static bool group_best_above_group(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->router_groups > 0 && m->router_group_topk > 0 && m->router_group_best > m->experts / m->router_groups;
}

static bool interleave_does_not_fit(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->glu_interleave != 0 && (!act_is_gated((enum act_kind)m->act) || m->expert_ffn % m->glu_interleave != 0);
}

static bool shared_gate_alone(const struct config *c) { return c->model.shared_gate && c->model.shared_ffn == 0; }

/* clang-format off */
static const struct option_use moe_uses[] = {
    {"model.ffn", ffn_read, "an MLP layer, or model.expert_ffn = 0"},
    {"model.act", NULL, NULL},
    {"model.act_clamp", NULL, NULL},
    {"model.act_alpha", NULL, NULL},
    {"model.act_offset", NULL, NULL},
    {"model.experts", NULL, NULL},
    {"model.topk", NULL, NULL},
    {"model.expert_ffn", NULL, NULL},
    {"model.shared_ffn", NULL, NULL},
    {"model.shared_gate", NULL, NULL},
    {"model.expert_bias", NULL, NULL},
    {"model.glu_interleave", NULL, NULL},
    {"model.router_score", NULL, NULL},
    {"model.router_pre_softmax", router_chooses, "a layer beyond model.router_hash_layers"},
    {"model.router_norm", norm_matters, "sigmoid or sqrtsoftplus as model.router_score, model.topk above 1"},
    {"model.router_groups", groups_chosen, "model.router_group_topk"},
    {"model.router_group_best", groups_chosen, "model.router_group_topk"},
    {"model.router_group_topk", router_chooses, "a layer beyond model.router_hash_layers"},
    {"model.router_scale", NULL, NULL},
    {"model.router_bias", router_chooses, "a layer beyond model.router_hash_layers"},
    {"model.router_linear_bias", NULL, NULL},
    {"model.router_bias_rate", bias_moves, "model.router_bias"},
    {"model.router_hash_layers", hash_reaches, "a layer with experts among the first so many layers"},
    {"model.aux_loss", NULL, NULL},
    {"model.seq_aux_loss", NULL, NULL},
    {"model.global_aux_loss", NULL, NULL},
    {"model.router_z_loss", NULL, NULL},
    {"model.router_jitter", NULL, NULL},
    {"model.router_capacity", NULL, NULL},
    {"model.router_drop", drops, "model.router_capacity"},
    {"model.router_force_balance", NULL, NULL},
    {"train.record_routes", router_chooses, "a layer beyond model.router_hash_layers"},
    {"train.replay_routes", router_chooses, "a layer beyond model.router_hash_layers"},
    {"plan.fused_experts", experts_not_codes, "experts that are not in FP8"},
    {"parallel.overlap", experts_shared,
     "parallel.ep or parallel.etp above 1, or parallel.tp above 1 with the value tp"},
    {"parallel.ep_capacity", experts_shared, "parallel.ep or parallel.etp above 1"},
    {"parallel.ep_fp8", experts_shared, "parallel.ep or parallel.etp above 1"},
};
static const struct rule moe_rules[] = {
    {"capacity-without-tp", capacity_divided,
     "model.router_capacity drops tokens by their rank among all tokens of a microbatch, which parallel.tp divides; "
     "use "
     "parallel.tp = 1",
     {"model.router_capacity", "parallel.tp"}},
    {"noise-without-tp", noise_divided,
     "random numbers of routers (model.router_jitter, model.router_force_balance) are not built for parallel.tp above "
     "1",
     {"model.router_jitter", "model.router_force_balance", "parallel.tp"}},
    {"two-balances-without-tp", balances_divided,
     "with parallel.tp above 1, model.aux_loss and model.seq_aux_loss are on together only with train.micro_batch = 1",
     {"model.aux_loss", "model.seq_aux_loss", "parallel.tp", "train.micro_batch"}},
    {"seq-aux-whole-sequences", sequences_divided,
     "model.seq_aux_loss is a loss of whole sequences: train.micro_batch must be 1 or a multiple of parallel.tp",
     {"model.seq_aux_loss", "train.micro_batch", "parallel.tp"}},
    {"routes-without-tp", routes_divided,
     "train.replay_routes has the choices of whole microbatches, which parallel.tp divides; use parallel.tp = 1",
     {"train.replay_routes", "parallel.tp"}},
    {"topk-within-experts", topk_above_experts,
     "model.topk must not be above model.experts",
     {"model.topk", "model.experts"}},
    {"ep-needs-experts", ep_without_experts,
     "parallel.ep and parallel.etp share the experts of a layer among ranks, and no layer of model.pattern has experts "
     "(E)",
     {"parallel.ep", "parallel.etp", "model.pattern"}},
    {"expert-ffn-over-ranks", ffn_does_not_divide,
     "parallel.etp ranks share each expert: model.expert_ffn must be a multiple of it (times model.glu_interleave)",
     {"model.expert_ffn", "parallel.etp", "model.glu_interleave"}},
    {"etp-returns-sums", codes_of_sums,
     "with parallel.etp above 1 outputs of experts are summed before they return, so they do not travel as codes; use "
     "parallel.ep_fp8 = dispatch",
     {"parallel.ep_fp8", "parallel.etp"}},
    {"etp-within-scale-blocks", slices_within_blocks,
     "slices of experts end where blocks of 128 FP8 codes do: model.expert_ffn / parallel.etp must be a multiple of "
     "128",
     {"model.expert_ffn", "parallel.etp", "gpu.precision"}},
    {"experts-over-ranks", experts_do_not_divide,
     "model.experts must be a multiple of parallel.ep, the ranks that share them",
     {"model.experts", "parallel.ep"}},
    {"one-expert-needs-pre-softmax", softmax_of_one,
     "with model.topk = 1 a softmax over the chosen expert is always 1: set model.router_pre_softmax",
     {"model.topk", "model.router_score", "model.router_pre_softmax"}},
    {"pre-softmax-needs-softmax", pre_softmax_without_softmax,
     "model.router_pre_softmax needs model.router_score = softmax",
     {"model.router_pre_softmax", "model.router_score"}},
    {"router-bias-needs-sigmoid", router_bias_with_softmax,
     "model.router_bias needs model.router_score = sigmoid or sqrtsoftplus",
     {"model.router_bias", "model.router_score"}},
    {"router-groups-fit", groups_do_not_fit,
     "router groups must divide the experts, and those a token may use must hold topk experts",
     {"model.router_groups", "model.router_group_topk", "model.experts", "model.topk"}},
    {"group-best-fits", group_best_above_group,
     "a group has experts / router_groups experts; model.router_group_best cannot be more",
     {"model.router_group_best", "model.router_groups", "model.experts"}},
    {"interleave-fits", interleave_does_not_fit,
     "model.glu_interleave needs a gated activation and must divide model.expert_ffn",
     {"model.glu_interleave", "model.act", "model.expert_ffn"}},
    {"shared-gate-needs-shared", shared_gate_alone,
     "model.shared_gate needs model.shared_ffn",
     {"model.shared_gate", "model.shared_ffn"}},
};
static const struct tiny_size moe_tiny[] = {
    {"model.ffn", 24, true}, {"model.experts", 8, true}, {"model.expert_ffn", 16, true},
    {"model.shared_ffn", 12, false}, {"model.glu_interleave", 4, false},
};
/* clang-format on */

/* Layers are counted over all kinds: up to the first with experts where the user's first one is hashed, else none. */
static int64_t tiny_hash_layers(const struct tiny_model *m)
{
    int64_t wanted = m->user->model.router_hash_layers, first = (int64_t)strcspn(m->user_symbols, "E");
    bool hashed = m->user_symbols[first] != '\0' && first < wanted;
    return hashed ? (int64_t)strcspn(m->symbols, "E") + 1 : 0;
}

static int moe_shrink(struct config *c, const struct tiny_model *m, struct err *e)
{
    const struct config_model *u = &m->user->model;
    bool grouped = u->router_group_topk > 0;
    TRY(config_set_i64(c, "model.topk", min_i64(u->topk, 4), e));
    TRY(config_set_i64(c, "model.router_groups", grouped ? 4 : 0, e));
    TRY(config_set_i64(c, "model.router_group_topk", grouped ? 2 : 0, e));
    TRY(config_set_i64(c, "model.router_hash_layers", tiny_hash_layers(m), e));
    if (u->global_aux_loss == 0)
        return ST_OK;
    /* The balance of one microbatch and that of a step cannot be compared at once: see struct verify. */
    TRY(config_set(c, "model.aux_loss", "0", NULL, e));
    return config_set(c, "model.router_capacity", "0", NULL, e);
}

static double moe_flops(const struct config *cfg, int64_t seq)
{
    (void)seq;
    const struct config_model *c = &cfg->model;
    return 4 * (double)c->hidden * (double)(c->expert_ffn * c->topk + c->shared_ffn) *
           (act_is_gated((enum act_kind)c->act) ? 1.5 : 1);
}

static bool moe_draws(const struct config *c) { return c->model.router_jitter > 0 || c->model.router_force_balance; }

const struct core_kind core_moe = {
    .symbol = 'E',
    .name = "experts",
    .title = "experts",
    .norm_key = "pre_mlp_layernorm.weight",
    .ends_group = true,
    .has_experts = true,
    .by_row = true,
    .options = {KIND_ROWS(uses, moe_uses), KIND_ROWS(rules, moe_rules), KIND_ROWS(tiny, moe_tiny),
                .shrink = moe_shrink},
    .keys = {.family = "expert",
             .place = KEY_PLACE_MLP,
             .transformer = true,
             .prefixes = {"mlp.", "pre_mlp_layernorm."}},
    .recompute = {{"moe_act", {"moe.act"}}, {"shared_experts", {"moe.shared*"}}},
    .flops = moe_flops,
    .sizes = moe_sizes,
    .kernels = moe_kernels,
    .draws = moe_draws,
    .divides_sequence = true,
    .declare = moe_declare,
};
