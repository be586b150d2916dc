/* The n-stream joint: manifold hyper-connections (ops/mhc). Shapes: T rows, n streams of C channels, K = n C,
 * N = n^2 + 2n.
 *
 *   stream  [T, K]    all streams; the embedding enters the first joint and becomes each of them, the last contracts them.
 *                     Multi-token prediction takes them from before the contraction and hands its own stack
 *                     streams again, so there nothing is expanded
 *   coef    [T, N]    pre | post | res of the sublayer this joint opens; closed with them one joint later
 *   stat    [T, N+2]  projections, root mean square, the norm's rstd
 *   norm    [T, C]    normed input of the next core
 * One fused node per joint: combine of the sublayer before, then projection, gates, Sinkhorn, aggregate and
 * norm of the one after. Backward in the opposite direction: dstream is the mix part of a stream's gradient,
 * written by the joint after it; the joint's own backward adds the rest, in one pass.
 *
 * Streams and norms can be recomputed from what is kept: coefficients and core outputs never are dropped by
 * this file, so that a replay is one cheap pass without projections, or one for several layers (mhc_settle). */
#include "layers/joint_mhc_int.h"
#include "dev/cuda.h"
#include "layers/shard.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_path.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

/* ---- recompute by blocks --------------------------------------------------------------------- */

int64_t mhc_block_layers(int64_t streams, int64_t layers)
{
    int64_t best = 1, least = INT64_MAX;
    for (int64_t r = 1; r <= layers; r++) {
        int64_t cost = streams * ceil_div(layers, r) + (streams + 2) * r;
        best = cost < least ? r : best;
        least = cost < least ? cost : least;
    }
    return best;
}

/* The stream in front of every r-th layer of a part (of every r-th group, where the pattern is grouped: a group is what
 * Megatron calls a layer) is kept, and so is the last combine; those between are replayed, which the planner does for a
 * whole block at once because each needs the one before it. */
static void drop_stream(struct build *b, slot_id stream, int index, bool last)
{
    int64_t r = b->streams.every;
    bool begins = r > 0 && (b->streams.by_unit ? b->unit_start && b->unit % r == 0 : index % r == 0);
    if (training(b) && b->g->err.code == ST_OK && r > 0 && !last && !begins)
        b->g->slots[stream].dropped = true;
}

/* ---- declaration ----------------------------------------------------------------------------- */

static struct joint *sizes(struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    struct joint *j = graph_own(b->g, sizeof *j);
    if (j == NULL)
        return NULL;
    char site[64];
    snprintf(site, sizeof site, "dropout.joint.%d", b->layer);
    *j = (struct joint){.rule = {.streams = c->mhc_streams,
                                 .profile = c->mhc_profile == CFG_MHC_S ? MHC_S : MHC_D,
                                 .iterations = c->mhc_iterations,
                                 .round_bf16 = c->mhc_bf16_coef,
                                 .root_eps = c->mhc_norm_eps_inside ? c->mhc_norm_eps : 0,
                                 .kernels = (enum mhc_kernels)b->cfg->mhc.kernels},
                        .eps = c->norm_eps,
                        .zero_centered = c->norm_zero_centered,
                        .seq = b->seq,
                        .first = shard_first_row(b),
                        .dropout = training(b) ? c->dropout : 0,
                        .key = rng_key((uint64_t)b->cfg->run.seed, site)};
    return j;
}

static struct weight small(struct build *b, const char *module, const char *name, int64_t n, enum init_kind init,
                           double value)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", module, name);
    struct param p = param_vector(key, n, init);
    p.init_a = value;
    param_replicate(&p, GRAD_OVER_TOKENS);
    return build_weight(b, &p);
}

/* Attention-like layers and MLP-like ones keep their mapping under different names, as Megatron does; a
 * Mamba layer, which may share a group with attention, under the name of its hybrid layers. A second layer
 * of a kind in one group ([G*], [-E]), which Megatron does not have, gets a name of its own. */
static void mapping_module(const struct build *b, char *module, size_t size)
{
    static const char *const names[] = {[KEY_PLACE_ALONE] = "hyper_connection",
                                        [KEY_PLACE_ATTENTION] = "self_attention_hyper_connection",
                                        [KEY_PLACE_MLP] = "mlp_hyper_connection"};
    char key[192];
    snprintf(module, size, "%s", names[b->core->keys.place]);
    snprintf(key, sizeof key, "%s%s.mapping_proj.weight", b->prefix, module);
    int taken = param_find(b->params, key);
    if (taken >= 0 && b->params->list[taken].p.layer != b->layer)
        snprintf(module + strlen(module), size - strlen(module), "_2");
}

static struct mapping declare_mapping(struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    int64_t n = mhc_logits(c->mhc_streams);
    char module[64], key[96];
    mapping_module(b, module, sizeof module);
    snprintf(key, sizeof key, "%s.mapping_proj.weight", module);
    struct param w = mhc_matrix(key, n, c->mhc_streams * c->hidden);
    param_replicate(&w, GRAD_OVER_TOKENS);
    struct mapping m = {.w = build_weight(b, &w)};
    m.a_pre = small(b, module, "alpha_pre", 1, INIT_CONST, c->mhc_gating);
    m.a_post = small(b, module, "alpha_post", 1, INIT_CONST, c->mhc_gating);
    m.a_res = small(b, module, "alpha_res", 1, INIT_CONST, c->mhc_gating);
    m.beta = small(b, module, "bias", n, INIT_ZERO, 0);
    return m;
}

/* What a joint begins with: a sublayer to close, one stream (the embedding) that becomes all of them, or streams as
 * they are. */
enum start { CLOSES, ENTERS, OPENS };
static enum start start_of(const struct sublayer *prev)
{
    return prev->f != NO_SLOT ? CLOSES : prev->wide ? OPENS : ENTERS;
}

static bool has_health(const struct build *b) { return training(b) && b->ops->mhc_health != NULL; }

static slot_id product_slot(struct build *b)
{
    int64_t n = b->cfg->model.mhc_streams;
    return graph_slot(b->g, "product", tensor_2d(NULL, b->dev->wide, MHC_HEALTH_ROWS, n * n));
}

/* Joints whose health is asked for at once. A stream that is to be dropped should not live until then, and a cut waits
 * for nothing. */
static int health_layers(const struct build *b) { return b->streams.stay ? MHC_HEALTH_LAYERS : 1; }

/* Row and column sums, the gain of the product of all mixes so far, and how alike the streams are: of this joint and of
 * those that wait with it. Returns the new product. */
static slot_id declare_health(struct build *b, const struct joint *last, slot_id before)
{
    struct graph *g = b->g;
    slot_id product = product_slot(b);
    struct mhc_health_args a = {
        .layers = last->waiting, .comp_in = of(g, before), .comp = of(g, product), .rule = last->rule};
    const struct joint *j = last;
    for (int l = last->waiting - 1; l >= 0; l--, j = j->before) {
        a.layer[l] = (struct mhc_health_layer){.coef = of(g, j->coef), .y = of(g, j->stream)};
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            a.layer[l].out[i] = of(g, j->health[i]);
    }
    /* Not on the side lane: nothing waits for this node, so a stream it reads there could never be known to be
     * done with, and streams that are recomputed later would share no memory. */
    int node = graph_node(g, "health", LANE_COMPUTE, last);
    graph_op(g, node, PH_FWD, &mhc_health_desc, &a);
    graph_cost(g, node, PH_FWD, 0,
               (double)(MHC_HEALTH_ROWS * last->rule.streams * b->cfg->model.hidden * last->waiting) *
                   (double)dtype_bytes(b->dev->real));
    return product;
}

/* The last of the joints that wait when prev's sublayer is open; NULL: none. */
static const struct joint *waiting_joint(const struct build *b, const struct sublayer *prev)
{
    return has_health(b) && prev->aux[AUX_HEALTH] > 0 ? b->g->nodes[prev->aux[AUX_HEALTH] - 1].self : NULL;
}

/* Asks for what waits, where nothing more can join it; the product so far. */
static slot_id settle_health(struct build *b, const struct sublayer *prev)
{
    const struct joint *waiting = waiting_joint(b, prev);
    return waiting != NULL ? declare_health(b, waiting, prev->aux[AUX_PRODUCT]) : prev->aux[AUX_PRODUCT];
}

static void add_health(struct build *b, const struct parts *p, const struct sublayer *prev, struct sublayer *next,
                       int node)
{
    next->aux[AUX_PRODUCT] = prev->aux[AUX_PRODUCT];
    next->aux[AUX_HEALTH] = 0;
    if (!has_health(b) || b->g->err.code != ST_OK)
        return;
    static const char *const tags[MHC_HEALTH_ITEMS] = {"mhc row error", "mhc column error", "mhc gain forward",
                                                       "mhc gain backward", "mhc stream similarity"};
    for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
        p->j->health[i] = build_metric(b, tags[i], 1);
    p->j->stream = p->stream;
    p->j->coef = p->coef;
    p->j->before = waiting_joint(b, prev);
    p->j->waiting = p->j->before != NULL ? p->j->before->waiting + 1 : 1;
    if (p->j->waiting == health_layers(b))
        next->aux[AUX_PRODUCT] = declare_health(b, p->j, prev->aux[AUX_PRODUCT]);
    else
        next->aux[AUX_HEALTH] = node + 1;
}

void mhc_declare_combine(struct build *b, const struct parts *p, const struct sublayer *prev, int node,
                         enum phase_id ph)
{
    struct tensor coef = of(b->g, prev->aux[AUX_COEF]);
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams);
    GRAPH_OP(b->g, node, ph, mhc_combine_fwd, .x = of(b->g, prev->x), .f = of(b->g, prev->f),
             .post = post_of(p->j, &coef), .res = res_of(p->j, &coef), .y = of(b->g, p->stream), .rule = p->j->rule,
             .drop = drop_rule(b->g, p));
    graph_cost(b->g, node, ph, 2 * wide * (double)(p->j->rule.streams + 1),
               2.25 * wide * (double)dtype_bytes(b->dev->real));
    if (ph == PH_REPLAY)
        graph_replay(b->g, p->stream, node);
}

/* The streams of one: the first joint's again, or in front of a cut. */
static void declare_expand_replay(struct build *b, const struct parts *p, const struct sublayer *prev, int node)
{
    GRAPH_OP(b->g, node, PH_REPLAY, mhc_expand_fwd, .x = of(b->g, prev->x), .y = of(b->g, p->stream));
    graph_cost(b->g, node, PH_REPLAY, 0,
               (double)(b->rows * b->cfg->model.hidden * (p->j->rule.streams + 1)) * (double)dtype_bytes(b->dev->real));
    graph_replay(b->g, p->stream, node);
}

static void declare_replays(struct build *b, const struct parts *p, const struct sublayer *prev)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams),
           size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "replay_norm", LANE_COMPUTE, p->j);
    const struct mhc_boundary_fwd_args again = {.x = of(g, p->stream),
                                                .gain = of(g, p->gain.w),
                                                .stat = of(g, p->stat),
                                                .coef = of(g, p->coef),
                                                .h = of(g, p->norm),
                                                .rule = p->j->rule,
                                                .eps = p->j->eps,
                                                .zero_centered = p->j->zero_centered,
                                                .reuse = true};
    graph_op(g, n, PH_REPLAY, &mhc_boundary_again_desc, &again);
    graph_cost(g, n, PH_REPLAY, 3 * wide, 1.25 * wide * size);
    graph_replay(g, p->norm, n);
    if (start_of(prev) == OPENS)
        return; /* the stream is not this joint's */
    if (start_of(prev) == ENTERS)
        declare_expand_replay(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j));
    else
        mhc_declare_combine(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j), PH_REPLAY);
}

/* In front of a cut that follows the embedding. */
static void declare_expand(struct build *b, const struct parts *p, const struct sublayer *prev, slot_id dstream)
{
    struct graph *g = b->g;
    double bytes =
        (double)(b->rows * b->cfg->model.hidden * (p->j->rule.streams + 1)) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "expand", LANE_COMPUTE, p->j);
    GRAPH_OP(g, n, PH_FWD, mhc_expand_fwd, .x = of(g, prev->x), .y = of(g, p->stream));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    declare_expand_replay(b, p, prev, n);
    GRAPH_OP(g, n, PH_BWD, mhc_expand_bwd, .dy = of(g, dstream), .dx = of(g, prev->dx));
    graph_cost(g, n, PH_BWD, bytes / (double)dtype_bytes(b->dev->real), bytes);
}

/* Nodes of the boundary: its backward pass, and the gradients of its parameters. Returns whether something of it can be
 * made before its turn. */
static bool declare_boundary_bwd(struct build *b, const struct parts *p, const struct sublayer *prev,
                                 const struct sublayer *next, int n)
{
    struct graph *g = b->g;
    const struct mapping *m = &p->map;
    enum start start = start_of(prev);
    bool closes = start == CLOSES;
    int64_t logits = mhc_logits(p->j->rule.streams), wide = b->cfg->model.hidden * p->j->rule.streams;
    double rows = (double)b->rows, k = (double)wide, size = (double)dtype_bytes(b->dev->real);
    double map = 2 * rows * k * (double)logits, mix = 2 * rows * k * (double)(p->j->rule.streams + 1);
    slot_id dz = build_wide_grad(b, "dz", b->rows, logits);
    struct mhc_boundary_bwd_args a = {.dh = of(g, next->dh),
                                      .dy = of(g, next->dx),
                                      .dcoef = of(g, next->aux[AUX_DCOEF]),
                                      .y = of(g, p->stream),
                                      .stat = of(g, p->stat),
                                      .coef = of(g, p->coef),
                                      .gain = of(g, p->gain.w),
                                      .w = of(g, m->w.w),
                                      .a_pre = of(g, m->a_pre.w),
                                      .a_post = of(g, m->a_post.w),
                                      .a_res = of(g, m->a_res.w),
                                      .beta = of(g, m->beta.w),
                                      .x = of(g, start == OPENS ? NO_SLOT : prev->x),
                                      .f = of(g, prev->f),
                                      .coef_in = of(g, closes ? prev->aux[AUX_COEF] : NO_SLOT),
                                      .dx = of(g, prev->dx),
                                      .df = of(g, closes ? prev->df : NO_SLOT),
                                      .dcoef_in = of(g, closes ? prev->aux[AUX_DCOEF] : NO_SLOT),
                                      .dz = of(g, dz),
                                      .dgain = of(g, p->gain.dw),
                                      .rule = p->j->rule,
                                      .drop = drop_rule(g, p),
                                      .zero_centered = p->j->zero_centered};
    /* Where the backward pass leaves products of the stream for the gradient of w, if the device does that and somebody
     * wants them. */
    bool trained = false;
    const slot_id gradients[] = {m->w.dw, m->a_pre.dw, m->a_post.dw, m->a_res.dw, m->beta.dw};
    for (int i = 0; i < countof(gradients); i++)
        trained |= gradients[i] != NO_SLOT && !g->slots[gradients[i]].unwanted;
    bool multiplied = trained && b->ops->mhc_boundary_products != NULL && b->ops->mhc_boundary_products(&a);
    int64_t ready = b->ops->mhc_boundary_prepare_bytes != NULL ? b->ops->mhc_boundary_prepare_bytes(&a) : 0;
    a.products = of(g, multiplied ? build_wide_grad(b, "products", logits + 1, wide) : NO_SLOT);
    a.ready = of(g, build_work(b, "ready", ready));
    graph_op(g, n, PH_BWD, &mhc_boundary_bwd_desc, &a);
    if (start != ENTERS)
        graph_inplace(g, n, PH_BWD, next->dx, prev->dx); /* the gradient that came in becomes the one that goes out */
    graph_cost(g, n, PH_BWD, (multiplied ? 2 : 1) * map + 2 * mix + 10 * rows * k, 5 * rows * k * size);
    GRAPH_OP(g, n, PH_DW, mhc_boundary_dw, .dz = a.dz, .stat = a.stat, .y = a.y, .products = a.products,
             .a_pre = a.a_pre, .a_post = a.a_post, .a_res = a.a_res, .dw = of(g, m->w.dw), .da_pre = of(g, m->a_pre.dw),
             .da_post = of(g, m->a_post.dw), .da_res = of(g, m->a_res.dw), .dbeta = of(g, m->beta.dw),
             .rule = p->j->rule);
    graph_cost(g, n, PH_DW, multiplied ? 0 : map, multiplied ? 12 * k * (double)logits : rows * k * size);
    return ready > 0;
}

static int declare_boundary(struct build *b, const struct parts *p, const struct sublayer *prev, struct sublayer *next)
{
    struct graph *g = b->g;
    const struct mapping *m = &p->map;
    bool closes = start_of(prev) == CLOSES;
    double rows = (double)b->rows, k = (double)(b->cfg->model.hidden * p->j->rule.streams),
           size = (double)dtype_bytes(b->dev->real);
    double map = 2 * rows * k * (double)mhc_logits(p->j->rule.streams),
           mix = 2 * rows * k * (double)(p->j->rule.streams + 1);
    slot_id made = start_of(prev) == OPENS ? NO_SLOT : p->stream;
    int n = graph_node(g, "joint", LANE_COMPUTE, p->j);
    GRAPH_OP(g, n, PH_FWD, mhc_boundary_fwd, .x = of(g, prev->x), .f = of(g, prev->f),
             .coef_in = of(g, closes ? prev->aux[AUX_COEF] : NO_SLOT), .w = of(g, m->w.w), .a_pre = of(g, m->a_pre.w),
             .a_post = of(g, m->a_post.w), .a_res = of(g, m->a_res.w), .beta = of(g, m->beta.w),
             .gain = of(g, p->gain.w), .y = of(g, made), .stat = of(g, p->stat), .coef = of(g, p->coef),
             .h = of(g, p->norm), .rule = p->j->rule, .drop = drop_rule(g, p), .eps = p->j->eps,
             .zero_centered = p->j->zero_centered);
    if (closes)
        graph_inplace(g, n, PH_FWD, prev->x, made); /* where no backward step reads it: eval, decode */
    graph_cost(g, n, PH_FWD, map + mix + 4 * rows * k, 2.5 * rows * k * size);
    next->aux[AUX_READY] = training(b) && declare_boundary_bwd(b, p, prev, next, n) ? n + 1 : 0;
    return n;
}

/* The backward pass through Sinkhorn of the joint in front of prev's core: as soon as the joint behind it has its
 * gradient, beside the core's own backward pass. */
static void declare_ready(struct build *b, const struct sublayer *prev)
{
    if (prev->f == NO_SLOT || prev->aux[AUX_READY] == 0 || b->g->err.code != ST_OK)
        return;
    struct graph *g = b->g;
    const struct mhc_boundary_bwd_args *a = graph_call(g, prev->aux[AUX_READY] - 1, PH_BWD, &mhc_boundary_bwd_desc);
    if (a == NULL)
        return;
    struct mhc_boundary_bwd_args r = {.dcoef = a->dcoef,
                                      .stat = a->stat,
                                      .coef = a->coef,
                                      .w = a->w,
                                      .a_pre = a->a_pre,
                                      .a_post = a->a_post,
                                      .a_res = a->a_res,
                                      .beta = a->beta,
                                      .dx = a->y,
                                      .f = a->dh,
                                      .ready = a->ready,
                                      .rule = a->rule};
    r.dx.data = r.f.data = NULL; /* only shapes */
    int n = graph_node(g, "sinkhorn", LANE_SIDE, NULL);
    graph_op(g, n, PH_BWD, &mhc_boundary_prepare_desc, &r);
    graph_cost(g, n, PH_BWD, 0, (double)(b->rows * mhc_logits(a->rule.streams)) * 20);
}

static int declare_open(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next)
{
    int64_t d = b->cfg->model.hidden, streams = p->j->rule.streams, logits = mhc_logits(streams);
    p->map = declare_mapping(b);
    p->coef = build_wide(b, "coef", b->rows, logits);
    p->stat = build_wide(b, "stat", b->rows, logits + 2);
    next->x = p->stream;
    next->dx = build_grad(b, "dstream", b->rows, streams * d);
    next->df = build_grad(b, "df", b->rows, d);
    next->f = NO_SLOT;
    next->aux[AUX_COEF] = p->coef;
    next->aux[AUX_DCOEF] = build_wide_grad(b, "dcoef", b->rows, logits);
    int node = declare_boundary(b, p, prev, next);
    add_health(b, p, prev, next, node);
    if (training(b))
        declare_replays(b, p, prev);
    return b->g->err.code;
}

static int mhc_declare(struct build *b, const struct sublayer *prev, struct sublayer *next, const char *norm_key,
                       bool last)
{
    const struct config_model *c = &b->cfg->model;
    struct parts p = {.j = sizes(b)};
    if (p.j == NULL)
        return ST_NOMEM;
    if (b->dev->kind != DEV_CUDA &&
        (p.j->rule.kernels == MHC_KERNELS_PRIMITIVE || p.j->rule.kernels == MHC_KERNELS_REF))
        return err_set(b->e, ST_USAGE,
                       "mhc.kernels = primitive or ref needs a GPU: device '%s' has fused hyper-connections only",
                       b->ops->name);
    bool closes = prev->f != NO_SLOT;
    graph_scope(b->g, b->layer, "joint");
    declare_ready(b, prev);
    struct param gain = param_vector(norm_key, c->hidden, c->norm_zero_centered ? INIT_ZERO : INIT_ONE);
    param_replicate(&gain, GRAD_OVER_TOKENS);
    p.gain = build_weight(b, &gain);
    p.info = closes && p.j->dropout > 0 ? b->in.info : NO_SLOT;
    p.stream = prev->wide && !closes ? prev->x : build_real(b, "stream", b->rows, p.j->rule.streams * c->hidden);
    next->aux[AUX_INDEX] = closes ? prev->aux[AUX_INDEX] + 1 : 0;
    drop_stream(b, p.stream, next->aux[AUX_INDEX], last);
    p.norm = next->h = build_real(b, "norm", b->rows, c->hidden);
    next->dh = build_grad(b, "dnorm", b->rows, c->hidden);
    next->wide = true;
    if (!last)
        return declare_open(b, &p, prev, next);
    settle_health(b, prev);
    next->x = p.stream;
    next->f = next->df = NO_SLOT;
    return mhc_declare_last(b, &p, prev, next, norm_key);
}

/* In front of a cut all streams are closed, and all of them cross; an embedding alone is expanded here. */
static int mhc_close(struct build *b, const struct sublayer *prev, struct sublayer *next)
{
    bool closes = prev->f != NO_SLOT;
    *next = *prev;
    if (!closes && prev->wide)
        return ST_OK;
    struct parts p = {.j = sizes(b)};
    if (p.j == NULL)
        return ST_NOMEM;
    graph_scope(b->g, b->layer, "joint");
    declare_ready(b, prev);
    int64_t wide = p.j->rule.streams * b->cfg->model.hidden;
    p.info = closes && p.j->dropout > 0 ? b->in.info : NO_SLOT;
    p.stream = build_real(b, "stream", b->rows, wide);
    *next = sublayer_entry(p.stream, build_grad(b, "dstream", b->rows, wide), true);
    next->aux[AUX_CARRY] = settle_health(b, prev);
    if (closes)
        mhc_declare_close(b, &p, prev, next->dx);
    else
        declare_expand(b, &p, prev, next->dx);
    return b->g->err.code;
}

static void mhc_arrive(struct build *b, struct sublayer *entry)
{
    int64_t wide = b->cfg->model.mhc_streams * b->cfg->model.hidden;
    *entry = sublayer_entry(build_real(b, "stream", b->rows, wide), build_grad(b, "dstream", b->rows, wide), true);
    if (has_health(b) && b->layer > 0)
        entry->aux[AUX_PRODUCT] = product_slot(b);
}

/* ---- dropped streams of several layers by one replay ----------------------------------------- */

/* How layers are combined into this slot when it is recomputed; NULL: it is kept, or made in another way. */
static const struct mhc_combine_fwd_args *combine_of(const struct graph *g, slot_id s)
{
    return g->slots[s].dropped ? graph_call(g, g->slots[s].replay, PH_REPLAY, &mhc_combine_fwd_desc) : NULL;
}

/* Does `next` go on where `last` ended? One whose core's output is recomputed too cannot: that needs the stream before
 * it. */
static bool goes_on(const struct graph *g, const struct mhc_combine_fwd_args *last,
                    const struct mhc_combine_fwd_args *next)
{
    return next->x.data == last->y.data && !g->slots[graph_slot_of(&next->f)].dropped;
}

/* read[slot]: something after the forward half reads it. A stream that was closed in front of a cut is only sent. */
static void find_readers(const struct graph *g, bool *read)
{
    for (int n = 0; n < g->n_nodes; n++)
        for (enum phase_id ph = 0; ph < PH_COUNT; ph++) {
            const struct phase *p = &g->nodes[n].phase[ph];
            for (int u = 0; ph != PH_FWD && p->fn != NULL && u < p->n_uses; u++)
                if (p->use[u].slot >= 0 && p->use[u].mode == USE_READ)
                    read[p->use[u].slot] = true;
        }
}

static void join_replays(struct graph *g, const struct mhc_combine_fwd_args *const *run, int n)
{
    if (n < 2)
        return;
    struct mhc_rebuild_args a = {.x = run[0]->x, .layers = n, .rule = run[0]->rule, .drop = run[0]->drop};
    int last = g->slots[graph_slot_of(&run[n - 1]->y)].replay;
    double flops = 0, stream = (double)tensor_bytes(&run[0]->y), bytes = stream;
    for (int l = 0; l < n; l++) {
        a.layer[l] = (struct mhc_rebuild_layer){
            .f = run[l]->f, .coef = of(g, graph_slot_of(&run[l]->post)), .y = run[l]->y, .key = run[l]->drop.key};
        flops += g->nodes[g->slots[graph_slot_of(&run[l]->y)].replay].phase[PH_REPLAY].flops;
        bytes += stream * (1 + 1 / (double)a.rule.streams);
    }
    int chunk = g->chunk;
    g->chunk = g->nodes[last].chunk;
    graph_scope(g, g->nodes[last].layer, "joint");
    int node = graph_node(g, "rebuild", LANE_COMPUTE, NULL);
    g->chunk = chunk;
    graph_op(g, node, PH_REPLAY, &mhc_rebuild_desc, &a);
    graph_cost(g, node, PH_REPLAY, flops, bytes);
    for (int l = 0; l < n; l++)
        graph_replay(g, graph_slot_of(&run[l]->y), node);
}

/* The first reader of a block's dropped streams is the joint behind them, so all of them are made before any is done
 * with, one by one or together: what is joined here takes no more memory. Streams of a part are declared in the order
 * in which they follow each other. */
static int mhc_settle(struct build *b)
{
    struct graph *g = b->g;
    bool *read = NULL;
    const struct mhc_combine_fwd_args *run[MHC_REBUILD_LAYERS];
    int n = 0, kernels = b->cfg->mhc.kernels;
    if (!b->cfg->mhc.rebuild || b->ops->mhc_rebuild == NULL || kernels == CFG_MHC_KERNELS_PRIMITIVE ||
        kernels == CFG_MHC_KERNELS_REF)
        return ST_OK;
    TRY(mem_array((void **)&read, (size_t)g->n_slots + 1, sizeof *read, &g->err));
    find_readers(g, read);
    for (slot_id s = 0; s < g->n_slots; s++) {
        const struct mhc_combine_fwd_args *made = combine_of(g, s);
        if (made == NULL || !read[s])
            continue;
        if (n == MHC_REBUILD_LAYERS || (n > 0 && !goes_on(g, run[n - 1], made))) {
            join_replays(g, run, n);
            n = 0;
        }
        run[n++] = made;
    }
    join_replays(g, run, n);
    free(read);
    return g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool has_streams(const struct config *c) { return c->model.mhc_streams > 0; }
static bool on_gpu(const struct config *c) { return c->run.device == CFG_DEVICE_CUDA; }
static bool recomputes(const struct config *c)
{
    return c->plan.recompute[0] != '\0' || c->plan.recompute_granularity != CFG_GRANULARITY_NONE ||
           strcmp(c->plan.recompute_block, "off") != 0;
}

static bool one_stream(const struct config *c) { return c->model.mhc_streams == 1; }
static bool mhc_options_without_mhc(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->mhc_streams == 0 && (m->mhc_profile != CFG_MHC_D || m->mhc_iterations != 20 || m->mhc_gating != 0.01 ||
                                   m->mhc_bf16_coef || m->mhc_norm_eps_inside);
}
static bool eps_not_inside(const struct config *c)
{
    return c->model.mhc_norm_eps > 0 && !c->model.mhc_norm_eps_inside;
}

static bool recompute_mhc_without_streams(const struct config *c)
{
    return c->model.mhc_streams == 0 &&
           (str_has_word(c->plan.recompute, "mhc") || c->mhc.kernels != CFG_MHC_KERNELS_AUTO || !c->mhc.rebuild);
}

static bool block_without_streams(const struct config *c)
{
    return strcmp(c->plan.recompute_block, "off") != 0 && c->model.mhc_streams == 0;
}

/* clang-format off */
static const struct option_use mhc_uses[] = {
    {"mhc.kernels", on_gpu, "run.device = cuda"},
    {"mhc.rebuild", recomputes, "plan.recompute or plan.recompute_block"},
};
static const struct rule mhc_rules[] = {
    {"mhc-two-streams", one_stream,
     "model.mhc_streams must be 0 (plain residual) or at least 2: one stream has nothing to mix",
     {"model.mhc_streams"}},
    {"mhc-options-need-streams", mhc_options_without_mhc,
     "options of hyper-connections need model.mhc_streams",
     {"model.mhc_streams", "model.mhc_profile", "model.mhc_iterations", "model.mhc_norm_eps_inside"}},
    {"mhc-norm-eps-inside", eps_not_inside,
     "model.mhc_norm_eps is the epsilon inside the root: it needs model.mhc_norm_eps_inside = on",
     {"model.mhc_norm_eps", "model.mhc_norm_eps_inside"}},
    {"recompute-block-needs-streams", block_without_streams,
     "plan.recompute_block needs model.mhc_streams: a plain residual stream is not recomputed",
     {"plan.recompute_block", "model.mhc_streams"}},
    {"recompute-mhc-needs-streams", recompute_mhc_without_streams,
     "plan.recompute = mhc, mhc.kernels and mhc.rebuild need model.mhc_streams: there are no streams",
     {"plan.recompute", "mhc.kernels", "mhc.rebuild", "model.mhc_streams"}},
};
/* clang-format on */

static struct kind_sizes mhc_sizes(const struct config *c)
{
    double streams = (double)c->model.mhc_streams + 1, width = (double)c->model.hidden * streams * streams;
    return (struct kind_sizes){.token = width, .weight = width * (double)c->model.hidden};
}

/* Kernels of the boundary between two layers, forward, on this device; one on paper runs as many clusters as it
 * likes. */
static struct mhc_choice mhc_path(const struct kernel_report *r, struct mhc_shape *s)
{
    const struct cuda_dev *gpu = r->dev->impl;
    struct mhc_device there = r->hopper ? mhc_some_hopper : mhc_some_gpu;
    *s = (struct mhc_shape){.kernels = (enum mhc_kernels)r->cfg->mhc.kernels,
                            .real = r->dev->real,
                            .streams = r->cfg->model.mhc_streams,
                            .channels = r->cfg->model.hidden,
                            .aligned = true,
                            .w_aligned = true,
                            .closes = true,
                            .maps = true};
    const struct ops *ops = gpu != NULL && gpu->sm_count > 0 ? ops_for(r->dev) : NULL;
    if (ops != NULL && ops->mhc_boundary_clusters != NULL && r->hopper && mhc_may_cluster(s)) {
        struct err e = {0};
        struct lane lane = {.dev = (struct dev *)(uintptr_t)r->dev, .err = &e};
        there.multiprocessors = gpu->sm_count;
        if (ops->mhc_boundary_clusters(&lane, s->channels, &there.in_clusters) != ST_OK)
            there.in_clusters = 0; /* the first step will say what is wrong */
    }
    return mhc_path_of(s, &there);
}
static void mhc_kernels(const struct kernel_report *r)
{
    struct mhc_shape s;
    if (r->dev->kind != DEV_CUDA)
        return;
    struct mhc_choice c = mhc_path(r, &s);
    kernel_line(r, "hyper-connections", c.kernels, c.why);
}
static int mhc_check_kernels(const struct kernel_report *r, struct err *e)
{
    struct mhc_shape s;
    if (r->dev->kind != DEV_CUDA)
        return ST_OK;
    struct mhc_choice c = mhc_path(r, &s);
    return mhc_refuse_path(&s, &c, e) != ST_OK ? (e->code = ST_USAGE) : ST_OK;
}

const struct joint_kind joint_mhc = {
    .name = "mhc",
    .options = {KIND_ROWS(uses, mhc_uses), KIND_ROWS(rules, mhc_rules)},
    /* mhc: and streams, which the joint drops itself, block by block */
    .recompute = {{"layernorm", {"norm"}}, {"mhc", {"joint.norm"}}},
    .chosen = has_streams,
    .sizes = mhc_sizes,
    .kernels = mhc_kernels,
    .check_kernels = mhc_check_kernels,
    .declare = mhc_declare,
    .close = mhc_close,
    .arrive = mhc_arrive,
    .settle = mhc_settle,
};
