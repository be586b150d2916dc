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
 * Streams and norms can be made again from what is kept: coefficients and core outputs never are dropped by
 * this file, so that a replay is one cheap pass without projections, or one for several layers (mhc_settle). */
#include "layers/joint_mhc_int.h"
#include "ops/mhc/mhc.h"

#include <stdlib.h>
#include <string.h>

/* ---- the boundary ------------------------------------------------------------------------------------------ */

static int boundary_fwd(const struct step_ctx *c)
{
    enum { X, F, COEF_IN, INFO, W, A_PRE, A_POST, A_RES, BETA, GAIN, STREAM, STAT, COEF, H, WORK };
    const struct joint *j = c->self;
    struct mhc_boundary_fwd_args a = {
        .x = c->t[X], .f = c->t[F], .coef_in = c->t[COEF_IN], .w = c->t[W], .a_pre = c->t[A_PRE], .a_post = c->t[A_POST],
        .a_res = c->t[A_RES], .beta = c->t[BETA], .gain = c->t[GAIN], .y = c->t[STREAM], .stat = c->t[STAT], .coef = c->t[COEF],
        .h = c->t[H], .work = c->t[WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[INFO]), .eps = j->eps, .zero_centered = j->zero_centered};
    return c->ops->mhc_boundary_fwd(c->lane, &a);
}

/* The norm again, from stream and coefficients; stat is read only. */
static int norm_replay(const struct step_ctx *c)
{
    enum { STREAM, COEF, STAT, GAIN, H, WORK };
    const struct joint *j = c->self;
    struct mhc_boundary_fwd_args a = {.x = c->t[STREAM], .gain = c->t[GAIN], .stat = c->t[STAT], .coef = c->t[COEF], .h = c->t[H],
                                      .work = c->t[WORK], .rule = j->rule, .eps = j->eps, .zero_centered = j->zero_centered, .reuse = true};
    return c->ops->mhc_boundary_fwd(c->lane, &a);
}

int mhc_combine_again(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    const struct tensor *coef = &c->t[COMBINE_COEF];
    struct mhc_combine_fwd_args a = {.x = c->t[COMBINE_X], .f = c->t[COMBINE_F], .post = post_of(j, coef), .res = res_of(j, coef),
                                     .y = c->t[COMBINE_STREAM], .rule = j->rule, .drop = drop_rule(j, &c->t[COMBINE_INFO])};
    return c->ops->mhc_combine_fwd(c->lane, &a);
}

/* The streams of several layers in a row again. */
struct rebuild {
    int n;
    const struct joint *j[MHC_REBUILD_LAYERS];
};
enum rebuild_use { REBUILD_X, REBUILD_INFO, REBUILD_LAYER, /* then for each layer: */ REBUILD_F = 0, REBUILD_COEF, REBUILD_STREAM, REBUILD_EACH };
_Static_assert(REBUILD_LAYER + REBUILD_EACH * MHC_REBUILD_LAYERS <= NODE_MAX_USES, "as many layers as a node can have uses for");
static int rebuild_fwd(const struct step_ctx *c)
{
    const struct rebuild *r = c->self;
    struct mhc_rebuild_args a = {.x = c->t[REBUILD_X], .layers = r->n, .rule = r->j[0]->rule, .drop = drop_rule(r->j[0], &c->t[REBUILD_INFO])};
    for (int l = 0; l < r->n; l++) {
        const struct tensor *t = &c->t[REBUILD_LAYER + REBUILD_EACH * l];
        a.layer[l] = (struct mhc_rebuild_layer){.f = t[REBUILD_F], .coef = t[REBUILD_COEF], .y = t[REBUILD_STREAM], .key = r->j[l]->key};
    }
    return c->ops->mhc_rebuild(c->lane, &a);
}

static int boundary_bwd(const struct step_ctx *c)
{
    enum { DH, DSTREAM, DCOEF, STREAM, STAT, COEF, GAIN, W, A_PRE, A_POST, A_RES, BETA, X, F, COEF_IN, INFO, DX, DF, DCOEF_IN, DZ, DGAIN, PRODUCTS, READY, WORK };
    const struct joint *j = c->self;
    struct mhc_boundary_bwd_args a = {
        .dh = c->t[DH], .dy = c->t[DSTREAM], .dcoef = c->t[DCOEF], .y = c->t[STREAM], .stat = c->t[STAT], .coef = c->t[COEF],
        .gain = c->t[GAIN], .w = c->t[W], .a_pre = c->t[A_PRE], .a_post = c->t[A_POST], .a_res = c->t[A_RES], .beta = c->t[BETA],
        .x = c->t[X], .f = c->t[F], .coef_in = c->t[COEF_IN], .dx = c->t[DX], .df = c->t[DF], .dcoef_in = c->t[DCOEF_IN], .dz = c->t[DZ],
        .dgain = c->t[DGAIN], .products = c->t[PRODUCTS], .ready = c->t[READY], .work = c->t[WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[INFO]),
        .zero_centered = j->zero_centered, .acc_dgain = c->add[DGAIN]};
    return c->ops->mhc_boundary_bwd(c->lane, &a);
}

/* What of boundary_bwd needs no gradient of the sublayer that this joint opened. */
static int boundary_ready(const struct step_ctx *c)
{
    enum { DCOEF, STAT, COEF, W, A_PRE, A_POST, A_RES, BETA, READY };
    const struct joint *j = c->self;
    struct tensor streams = tensor_2d(NULL, c->ops->real, c->t[COEF].dim[0], c->t[W].dim[1]), one = tensor_2d(NULL, c->ops->real, streams.dim[0], streams.dim[1] / j->rule.streams);
    struct mhc_boundary_bwd_args a = {.dcoef = c->t[DCOEF], .stat = c->t[STAT], .coef = c->t[COEF], .w = c->t[W], .a_pre = c->t[A_PRE], .a_post = c->t[A_POST],
                                      .a_res = c->t[A_RES], .beta = c->t[BETA], .dx = streams, .f = one, .ready = c->t[READY], .rule = j->rule};
    return c->ops->mhc_boundary_ready(c->lane, &a);
}

static int boundary_dw(const struct step_ctx *c)
{
    enum { DZ, STAT, STREAM, PRODUCTS, A_PRE, A_POST, A_RES, DW, DA_PRE, DA_POST, DA_RES, DBETA, WORK };
    const struct joint *j = c->self;
    struct mhc_boundary_dw_args a = {.dz = c->t[DZ], .stat = c->t[STAT], .y = c->t[STREAM], .products = c->t[PRODUCTS], .a_pre = c->t[A_PRE],
                                     .a_post = c->t[A_POST], .a_res = c->t[A_RES], .dw = c->t[DW], .da_pre = c->t[DA_PRE], .da_post = c->t[DA_POST],
                                     .da_res = c->t[DA_RES], .dbeta = c->t[DBETA], .work = c->t[WORK], .rule = j->rule,
                                     .acc_dw = c->add[DW], .acc_params = c->add[DBETA]};
    return c->ops->mhc_boundary_dw(c->lane, &a);
}

enum health_use { HEALTH_PRODUCT_IN, HEALTH_PRODUCT, HEALTH_WORK, HEALTH_LAYER, /* then for each layer: */
                  HEALTH_COEF = 0, HEALTH_STREAM, HEALTH_OUT, HEALTH_EACH = HEALTH_OUT + MHC_HEALTH_ITEMS };
_Static_assert(HEALTH_LAYER + HEALTH_EACH * MHC_HEALTH_LAYERS <= NODE_MAX_USES, "as many layers as a node can have uses for");
static int health_fwd(const struct step_ctx *c)
{
    const struct joint *j = c->self; /* the last one */
    struct mhc_health_args a = {.layers = j->waiting, .comp_in = c->t[HEALTH_PRODUCT_IN], .comp = c->t[HEALTH_PRODUCT], .work = c->t[HEALTH_WORK],
                                .rule = j->rule, .acc_out = c->add[HEALTH_LAYER + HEALTH_OUT]};
    for (int l = 0; l < a.layers; l++) {
        const struct tensor *t = &c->t[HEALTH_LAYER + HEALTH_EACH * l];
        a.layer[l] = (struct mhc_health_layer){.coef = t[HEALTH_COEF], .y = t[HEALTH_STREAM]};
        memcpy(a.layer[l].out, &t[HEALTH_OUT], sizeof a.layer[l].out);
    }
    return c->ops->mhc_health(c->lane, &a);
}

/* ---- one stream to several ------------------------------------------------------------------------------------- */

static int expand_fwd(const struct step_ctx *c)
{
    struct mhc_expand_fwd_args a = {.x = c->t[0], .y = c->t[1]};
    return c->ops->mhc_expand_fwd(c->lane, &a);
}

static int expand_bwd(const struct step_ctx *c)
{
    struct mhc_expand_bwd_args a = {.dy = c->t[0], .dx = c->t[1]};
    return c->ops->mhc_expand_bwd(c->lane, &a);
}

/* ---- recompute by blocks ------------------------------------------------------------------------------------------ */

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
 * whole block at once because each needs the one before it. Without a number of layers, "mhc" makes a part one block,
 * as it does in Megatron. */
static void drop_stream(struct build *b, slot_id stream, int index, bool last)
{
    const char *text = b->cfg->plan.recompute_block;
    int64_t r = 0;
    bool given = parse_i64(text, &r);
    if (strcmp(text, "auto") == 0)
        r = mhc_block_layers(b->cfg->model.mhc_streams, b->n_layers);
    else if (!given)
        r = str_has_word(b->cfg->plan.recompute, "mhc") ? INT64_MAX : 0;
    bool begins = given ? r > 0 && b->unit_start && b->unit % r == 0 : r > 0 && index % r == 0;
    if (training(b) && b->g->err.code == ST_OK && r > 0 && !last && !begins)
        b->g->slots[stream].dropped = true;
}

/* ---- declaration ------------------------------------------------------------------------------------------------ */

static struct joint *sizes(struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    struct joint *j = graph_own(b->g, sizeof *j);
    if (j == NULL)
        return NULL;
    char site[64];
    snprintf(site, sizeof site, "dropout.joint.%d", b->layer);
    *j = (struct joint){.rule = {.streams = c->mhc_streams, .profile = c->mhc_profile == CFG_MHC_S ? MHC_S : MHC_D,
                                 .iterations = c->mhc_iterations, .round_bf16 = c->mhc_bf16_coef, .kernels = (enum mhc_kernels)b->cfg->mhc.kernels},
                        .eps = c->norm_eps, .zero_centered = c->norm_zero_centered, .seq = b->seq,
                        .dropout = training(b) ? c->dropout : 0, .key = rng_key((uint64_t)b->cfg->run.seed, site)};
    return j;
}

static struct weight small(struct build *b, const char *module, const char *name, int64_t n, enum init_kind init, double value)
{
    char key[96];
    snprintf(key, sizeof key, "%s.%s", module, name);
    struct param p = param_vector(key, n, init);
    p.init_a = value;
    return build_weight(b, &p);
}

/* Attention-like layers and MLP-like ones keep their mapping under different names, as Megatron does; a
 * Mamba layer, which may share a group with attention, under the name of its hybrid layers. A second layer
 * of a kind in one group ([G*], [-E]), which Megatron does not have, gets a name of its own. */
static void mapping_module(const struct build *b, const char *norm_key, char *module, size_t size)
{
    bool mlp = str_starts(norm_key, "mlp.") || str_starts(norm_key, "pre_mlp_layernorm");
    bool mixer = str_starts(norm_key, "mixer.");
    char key[192];
    snprintf(module, size, "%s", mlp ? "mlp_hyper_connection" : mixer ? "hyper_connection" : "self_attention_hyper_connection");
    snprintf(key, sizeof key, "%s%s.mapping_proj.weight", b->prefix, module);
    int taken = param_find(b->params, key);
    if (taken >= 0 && b->params->list[taken].p.layer != b->layer)
        snprintf(module + strlen(module), size - strlen(module), "_2");
}

static struct mapping declare_mapping(struct build *b, const char *norm_key)
{
    const struct config_model *c = &b->cfg->model;
    int64_t n = mhc_logits(c->mhc_streams);
    char module[64], key[96];
    mapping_module(b, norm_key, module, sizeof module);
    snprintf(key, sizeof key, "%s.mapping_proj.weight", module);
    struct param w = mhc_matrix(key, n, c->mhc_streams * c->hidden);
    struct mapping m = {.w = build_weight(b, &w)};
    m.a_pre = small(b, module, "alpha_pre", 1, INIT_CONST, c->mhc_gating);
    m.a_post = small(b, module, "alpha_post", 1, INIT_CONST, c->mhc_gating);
    m.a_res = small(b, module, "alpha_res", 1, INIT_CONST, c->mhc_gating);
    m.beta = small(b, module, "bias", n, INIT_ZERO, 0);
    return m;
}

/* What a joint begins with: a sublayer to close, one stream (the embedding) that becomes all of them, or streams as they are. */
enum start { CLOSES, ENTERS, OPENS };
static enum start start_of(const struct sublayer *prev) { return prev->f != NO_SLOT ? CLOSES : prev->wide ? OPENS : ENTERS; }

/* Shapes of a boundary, for the sizes of its scratch. */
static struct mhc_boundary_bwd_args boundary_shapes(const struct build *b, const struct joint *j, enum start start)
{
    enum dtype real = b->dev->real;
    int64_t d = b->cfg->model.hidden, n = mhc_logits(j->rule.streams), k = d * j->rule.streams;
    struct tensor wide = tensor_2d(NULL, real, b->rows, k), thin = tensor_2d(NULL, real, b->rows, d), coef = tensor_2d(NULL, b->dev->wide, b->rows, n);
    struct mhc_boundary_bwd_args a = {.dh = thin, .y = wide, .dx = wide, .coef = coef, .dz = coef, .w = tensor_2d(NULL, b->dev->wide, n, k),
                                      .dgain = tensor_1d(NULL, b->dev->wide, d), .rule = j->rule};
    if (start == CLOSES)
        a.f = thin;
    if (start == ENTERS)
        a.x = a.dx = thin;
    return a;
}

static slot_id fwd_work(struct build *b, const struct joint *j, const char *name, enum start start, bool reuse)
{
    struct mhc_boundary_bwd_args s = boundary_shapes(b, j, start == ENTERS ? ENTERS : CLOSES);
    struct mhc_boundary_fwd_args a = {.x = s.dx, .f = s.f, .y = s.y, .h = s.dh, .rule = j->rule, .reuse = reuse};
    return b->ops->mhc_boundary_fwd_work ? build_work(b, name, b->ops->mhc_boundary_fwd_work(&a)) : NO_SLOT;
}

static struct tensor products_shape(const struct mhc_boundary_bwd_args *a) { return tensor_2d(NULL, a->w.dtype, a->w.dim[0] + 1, a->w.dim[1]); }
/* Where the way back leaves products of the stream for the gradient of w, if the device does that. */
static slot_id products_slot(struct build *b, const struct joint *j, enum start start)
{
    struct mhc_boundary_bwd_args a = boundary_shapes(b, j, start);
    bool worth = b->ops->mhc_boundary_products != NULL && b->ops->mhc_boundary_products(&a);
    return worth ? build_wide_grad(b, "products", a.w.dim[0] + 1, a.w.dim[1]) : NO_SLOT;
}

/* Of what can be made before this joint's turn. */
static int64_t ready_bytes(const struct build *b, const struct joint *j, enum start start)
{
    struct mhc_boundary_bwd_args a = boundary_shapes(b, j, start);
    return b->ops->mhc_boundary_ready_bytes != NULL ? b->ops->mhc_boundary_ready_bytes(&a) : 0;
}

static slot_id bwd_work(struct build *b, const struct joint *j, enum start start, bool products)
{
    struct mhc_boundary_bwd_args a = boundary_shapes(b, j, start);
    if (products)
        a.products = products_shape(&a);
    if (ready_bytes(b, j, start) > 0)
        a.ready = tensor_1d(NULL, DT_U8, ready_bytes(b, j, start));
    return b->ops->mhc_boundary_bwd_work ? build_work(b, "bwd_work", b->ops->mhc_boundary_bwd_work(&a)) : NO_SLOT;
}

static slot_id dw_work(struct build *b, const struct joint *j, bool products)
{
    struct mhc_boundary_bwd_args s = boundary_shapes(b, j, CLOSES);
    struct mhc_boundary_dw_args a = {.dz = s.dz, .y = s.y, .dw = s.w, .rule = j->rule};
    if (products)
        a.products = products_shape(&s);
    return b->ops->mhc_boundary_dw_work ? build_work(b, "dw_work", b->ops->mhc_boundary_dw_work(&a)) : NO_SLOT;
}

static bool has_health(const struct build *b) { return training(b) && b->ops->mhc_health != NULL; }

static slot_id product_slot(struct build *b)
{
    int64_t n = b->cfg->model.mhc_streams;
    return graph_slot(b->g, "product", tensor_2d(NULL, b->dev->wide, MHC_HEALTH_ROWS, n * n));
}

/* Joints whose health is asked for at once. A stream that is to be dropped should not live until then, and a cut waits for nothing. */
static int health_layers(const struct build *b)
{
    const char *dropped = b->cfg->plan.recompute;
    bool kept = strcmp(b->cfg->plan.recompute_block, "off") == 0 && !str_has_word(dropped, "mhc") && !str_has_word(dropped, "full") &&
                strchr(dropped, '*') == NULL && strstr(dropped, "joint.stream") == NULL;
    return kept ? MHC_HEALTH_LAYERS : 1;
}

/* Row and column sums, the gain of the product of all mixes so far, and how alike the streams are: of this joint and of those that wait with
 * it. Returns the new product. */
static slot_id declare_health(struct build *b, const struct joint *last, slot_id before)
{
    struct graph *g = b->g;
    struct use use[NODE_MAX_USES];
    slot_id product = product_slot(b);
    use[HEALTH_PRODUCT_IN] = (struct use)READS(before);
    use[HEALTH_PRODUCT] = (struct use)WRITES(product);
    struct mhc_health_args shape = {.layers = last->waiting, .rule = last->rule};
    use[HEALTH_WORK] = (struct use)WRITES(b->ops->mhc_health_work ? build_work(b, "health_work", b->ops->mhc_health_work(&shape)) : NO_SLOT);
    const struct joint *j = last;
    for (int l = last->waiting - 1; l >= 0; l--, j = j->before) {
        struct use *u = &use[HEALTH_LAYER + HEALTH_EACH * l];
        u[HEALTH_COEF] = (struct use)READS(j->coef);
        u[HEALTH_STREAM] = (struct use)READS(j->stream);
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            u[HEALTH_OUT + i] = (struct use)ADDS(j->health[i]);
    }
    /* Not on the side lane: nothing waits for this node, so a stream it reads there could never be known to be
     * done with, and streams that are made again later would share no memory. */
    int node = graph_node(g, "health", LANE_COMPUTE, last);
    graph_phase(g, node, PH_FWD, health_fwd, use, HEALTH_LAYER + HEALTH_EACH * last->waiting);
    graph_cost(g, node, PH_FWD, 0, (double)(MHC_HEALTH_ROWS * last->rule.streams * b->cfg->model.hidden * last->waiting) * (double)dtype_bytes(b->dev->real));
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

static void add_health(struct build *b, const struct parts *p, const struct sublayer *prev, struct sublayer *next, int node)
{
    next->aux[AUX_PRODUCT] = prev->aux[AUX_PRODUCT];
    next->aux[AUX_HEALTH] = 0;
    if (!has_health(b) || b->g->err.code != ST_OK)
        return;
    static const char *const tags[MHC_HEALTH_ITEMS] = {"mhc row error", "mhc column error", "mhc gain forward", "mhc gain backward", "mhc stream similarity"};
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

void mhc_declare_stream_replay(struct build *b, const struct parts *p, const struct sublayer *prev, int node)
{
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams);
    GRAPH_PHASE(b->g, node, PH_REPLAY, mhc_combine_again, READS(prev->x), READS(prev->f), READS(prev->aux[AUX_COEF]), READS(p->info), WRITES(p->stream));
    graph_cost(b->g, node, PH_REPLAY, 2 * wide * (double)(p->j->rule.streams + 1), 2.25 * wide * (double)dtype_bytes(b->dev->real));
    graph_replay(b->g, p->stream, node);
}

/* The streams of one: the first joint's again, or in front of a cut. */
static void declare_expand_replay(struct build *b, const struct parts *p, const struct sublayer *prev, int node)
{
    GRAPH_PHASE(b->g, node, PH_REPLAY, expand_fwd, READS(prev->x), WRITES(p->stream));
    graph_cost(b->g, node, PH_REPLAY, 0, (double)(b->rows * b->cfg->model.hidden * (p->j->rule.streams + 1)) * (double)dtype_bytes(b->dev->real));
    graph_replay(b->g, p->stream, node);
}

static void declare_replays(struct build *b, const struct parts *p, const struct sublayer *prev)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "replay_norm", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_REPLAY, norm_replay, READS(p->stream), READS(p->coef), READS(p->stat), READS(p->gain.w), WRITES(p->norm),
                WRITES(fwd_work(b, p->j, "replay_work", CLOSES, true)));
    graph_cost(g, n, PH_REPLAY, 3 * wide, 1.25 * wide * size);
    graph_replay(g, p->norm, n);
    if (start_of(prev) == OPENS)
        return; /* the stream is not this joint's */
    if (start_of(prev) == ENTERS)
        declare_expand_replay(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j));
    else
        mhc_declare_stream_replay(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j));
}

/* In front of a cut that follows the embedding. */
static void declare_expand(struct build *b, const struct parts *p, const struct sublayer *prev, slot_id dstream)
{
    struct graph *g = b->g;
    double bytes = (double)(b->rows * b->cfg->model.hidden * (p->j->rule.streams + 1)) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "expand", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_FWD, expand_fwd, READS(prev->x), WRITES(p->stream));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    declare_expand_replay(b, p, prev, n);
    GRAPH_PHASE(g, n, PH_BWD, expand_bwd, READS(dstream), WRITES(prev->dx));
    graph_cost(g, n, PH_BWD, bytes / (double)dtype_bytes(b->dev->real), bytes);
}

static int declare_boundary(struct build *b, const struct parts *p, const struct sublayer *prev, const struct sublayer *next)
{
    struct graph *g = b->g;
    const struct mapping *m = &p->map;
    enum start start = start_of(prev);
    bool closes = start == CLOSES;
    double rows = (double)b->rows, k = (double)(b->cfg->model.hidden * p->j->rule.streams), size = (double)dtype_bytes(b->dev->real);
    double map = 2 * rows * k * (double)mhc_logits(p->j->rule.streams), mix = 2 * rows * k * (double)(p->j->rule.streams + 1);
    slot_id coef_in = closes ? prev->aux[AUX_COEF] : NO_SLOT, made = start == OPENS ? NO_SLOT : p->stream;
    int n = graph_node(g, "joint", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_FWD, boundary_fwd, READS(prev->x), READS(prev->f), READS(coef_in), READS(p->info), READS(m->w.w), READS(m->a_pre.w),
                READS(m->a_post.w), READS(m->a_res.w), READS(m->beta.w), READS(p->gain.w), WRITES(made), WRITES(p->stat),
                WRITES(p->coef), WRITES(p->norm), WRITES(fwd_work(b, p->j, "fwd_work", start, false)));
    if (closes)
        graph_inplace(g, n, PH_FWD, 0, 10); /* where nobody looks back: eval, decode */
    graph_cost(g, n, PH_FWD, map + mix + 4 * rows * k, 2.5 * rows * k * size);
    if (!training(b))
        return n;
    slot_id dz = build_wide_grad(b, "dz", b->rows, mhc_logits(p->j->rule.streams)), products = products_slot(b, p->j, start);
    bool multiplied = products != NO_SLOT;
    p->j->ready = build_work(b, "ready", ready_bytes(b, p->j, start));
    p->j->map = p->map;
    p->j->stat = p->stat;
    p->j->coef = p->coef;
    GRAPH_PHASE(g, n, PH_BWD, boundary_bwd, READS(next->dh), READS(next->dx), READS(next->aux[AUX_DCOEF]), READS(p->stream), READS(p->stat),
                READS(p->coef), READS(p->gain.w), READS(m->w.w), READS(m->a_pre.w), READS(m->a_post.w), READS(m->a_res.w),
                READS(m->beta.w), READS(start == OPENS ? NO_SLOT : prev->x), READS(prev->f), READS(coef_in), READS(p->info),
                WRITES(prev->dx), WRITES(closes ? prev->df : NO_SLOT), WRITES(closes ? prev->aux[AUX_DCOEF] : NO_SLOT),
                WRITES(dz), ADDS(p->gain.dw), WRITES(products), READS(p->j->ready), WRITES(bwd_work(b, p->j, start, multiplied)));
    if (start != ENTERS)
        graph_inplace(g, n, PH_BWD, 1, 16); /* the gradient that came in becomes the one that goes out */
    graph_cost(g, n, PH_BWD, (multiplied ? 2 : 1) * map + 2 * mix + 10 * rows * k, 5 * rows * k * size);
    GRAPH_PHASE(g, n, PH_DW, boundary_dw, READS(dz), READS(p->stat), READS(p->stream), READS(products), READS(m->a_pre.w), READS(m->a_post.w),
                READS(m->a_res.w), ADDS(m->w.dw), ADDS(m->a_pre.dw), ADDS(m->a_post.dw), ADDS(m->a_res.dw), ADDS(m->beta.dw), WRITES(dw_work(b, p->j, multiplied)));
    graph_cost(g, n, PH_DW, multiplied ? 0 : map, multiplied ? 12 * k * (double)mhc_logits(p->j->rule.streams) : rows * k * size);
    return n;
}

/* The way back through Sinkhorn of the joint in front of prev's core: as soon as the joint behind it has its gradient, beside the core's own way back. */
static void declare_ready(struct build *b, const struct sublayer *prev)
{
    if (prev->f == NO_SLOT || prev->aux[AUX_READY] == 0 || b->g->err.code != ST_OK)
        return;
    struct graph *g = b->g;
    const struct joint *j = g->nodes[prev->aux[AUX_READY] - 1].self;
    const struct mapping *m = &j->map;
    int n = graph_node(g, "sinkhorn", LANE_SIDE, j);
    GRAPH_PHASE(g, n, PH_BWD, boundary_ready, READS(prev->aux[AUX_DCOEF]), READS(j->stat), READS(j->coef), READS(m->w.w), READS(m->a_pre.w), READS(m->a_post.w),
                READS(m->a_res.w), READS(m->beta.w), WRITES(j->ready));
    graph_cost(g, n, PH_BWD, 0, (double)(b->rows * mhc_logits(j->rule.streams)) * 20);
}

static int declare_open(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next, const char *norm_key)
{
    int64_t d = b->cfg->model.hidden, streams = p->j->rule.streams, logits = mhc_logits(streams);
    p->map = declare_mapping(b, norm_key);
    p->coef = build_wide(b, "coef", b->rows, logits);
    p->stat = build_wide(b, "stat", b->rows, logits + 2);
    next->x = p->stream;
    next->dx = build_grad(b, "dstream", b->rows, streams * d);
    next->df = build_grad(b, "df", b->rows, d);
    next->f = NO_SLOT;
    next->aux[AUX_COEF] = p->coef;
    next->aux[AUX_DCOEF] = build_wide_grad(b, "dcoef", b->rows, logits);
    int node = declare_boundary(b, p, prev, next);
    next->aux[AUX_READY] = training(b) && p->j->ready != NO_SLOT ? node + 1 : 0;
    add_health(b, p, prev, next, node);
    if (training(b))
        declare_replays(b, p, prev);
    return b->g->err.code;
}

static int mhc_declare(struct build *b, const struct sublayer *prev, struct sublayer *next, const char *norm_key, bool last)
{
    const struct config_model *c = &b->cfg->model;
    struct parts p = {.j = sizes(b)};
    if (p.j == NULL)
        return ST_NOMEM;
    if (b->ops->mhc_boundary_fwd == NULL)
        return err_set(b->e, ST_USAGE, "device '%s' has no hyper-connections (model.mhc_streams)", b->ops->name);
    if (b->dev->kind != DEV_CUDA && (p.j->rule.kernels == MHC_KERNELS_PRIMITIVE || p.j->rule.kernels == MHC_KERNELS_REF))
        return err_set(b->e, ST_USAGE, "mhc.kernels = primitive or ref needs a GPU: device '%s' has fused hyper-connections only", b->ops->name);
    bool closes = prev->f != NO_SLOT;
    graph_scope(b->g, b->layer, "joint");
    declare_ready(b, prev);
    struct param gain = param_vector(norm_key, c->hidden, c->norm_zero_centered ? INIT_ZERO : INIT_ONE);
    p.gain = build_weight(b, &gain);
    p.info = closes && p.j->dropout > 0 ? b->in.info : NO_SLOT;
    p.stream = prev->wide && !closes ? prev->x : build_real(b, "stream", b->rows, p.j->rule.streams * c->hidden);
    next->aux[AUX_INDEX] = closes ? prev->aux[AUX_INDEX] + 1 : 0;
    drop_stream(b, p.stream, next->aux[AUX_INDEX], last);
    p.norm = next->h = build_real(b, "norm", b->rows, c->hidden);
    next->dh = build_grad(b, "dnorm", b->rows, c->hidden);
    next->wide = true;
    if (!last)
        return declare_open(b, &p, prev, next, norm_key);
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
    if (b->ops->mhc_combine_fwd == NULL)
        return err_set(b->e, ST_USAGE, "device '%s' has no hyper-connections (model.mhc_streams)", b->ops->name);
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

/* ---- dropped streams of several layers by one replay ------------------------------------------------------------------- */

/* The node that combines layers into this slot when it is made again; -1: it is kept, or made in another way. */
static int combine_node(const struct graph *g, slot_id s)
{
    int node = g->slots[s].dropped ? g->slots[s].replay : -1;
    return node >= 0 && g->nodes[node].phase[PH_REPLAY].fn == mhc_combine_again ? node : -1;
}

static slot_id combine_slot(const struct graph *g, int node, enum combine_use use) { return g->nodes[node].phase[PH_REPLAY].use[use].slot; }

/* Does `node` go on where `last` ended? One whose core's output is made again too cannot: that needs the stream before it. */
static bool goes_on(const struct graph *g, int last, int node)
{
    return combine_slot(g, node, COMBINE_X) == combine_slot(g, last, COMBINE_STREAM) && !g->slots[combine_slot(g, node, COMBINE_F)].dropped;
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

static void join_replays(struct graph *g, const int *run, int n)
{
    struct use use[NODE_MAX_USES];
    struct rebuild *r = n > 1 ? graph_own(g, sizeof *r) : NULL;
    if (r == NULL)
        return;
    *r = (struct rebuild){.n = n};
    use[REBUILD_X] = (struct use)READS(combine_slot(g, run[0], COMBINE_X));
    use[REBUILD_INFO] = (struct use)READS(combine_slot(g, run[0], COMBINE_INFO));
    double flops = 0, stream = (double)tensor_bytes(&g->slots[combine_slot(g, run[0], COMBINE_STREAM)].shape), bytes = stream;
    for (int l = 0; l < n; l++) {
        struct use *u = &use[REBUILD_LAYER + REBUILD_EACH * l];
        u[REBUILD_F] = (struct use)READS(combine_slot(g, run[l], COMBINE_F));
        u[REBUILD_COEF] = (struct use)READS(combine_slot(g, run[l], COMBINE_COEF));
        u[REBUILD_STREAM] = (struct use)WRITES(combine_slot(g, run[l], COMBINE_STREAM));
        r->j[l] = g->nodes[run[l]].self;
        flops += g->nodes[run[l]].phase[PH_REPLAY].flops;
        bytes += stream * (1 + 1 / (double)r->j[l]->rule.streams);
    }
    int chunk = g->chunk, last = run[n - 1];
    g->chunk = g->nodes[last].chunk;
    graph_scope(g, g->nodes[last].layer, "joint");
    int node = graph_node(g, "rebuild", LANE_COMPUTE, r);
    g->chunk = chunk;
    graph_phase(g, node, PH_REPLAY, rebuild_fwd, use, REBUILD_LAYER + REBUILD_EACH * n);
    graph_cost(g, node, PH_REPLAY, flops, bytes);
    for (int l = 0; l < n; l++)
        graph_replay(g, combine_slot(g, run[l], COMBINE_STREAM), node);
}

/* The first reader of a block's dropped streams is the joint behind them, so all of them are made before any is done with, one by one or
 * together: what is joined here takes no more memory. Streams of a part are declared in the order in which they follow each other. */
static int mhc_settle(struct build *b)
{
    struct graph *g = b->g;
    bool *read = NULL;
    int run[MHC_REBUILD_LAYERS], n = 0, kernels = b->cfg->mhc.kernels;
    if (!b->cfg->mhc.rebuild || b->ops->mhc_rebuild == NULL || kernels == CFG_MHC_KERNELS_PRIMITIVE || kernels == CFG_MHC_KERNELS_REF)
        return ST_OK;
    TRY(mem_array((void **)&read, (size_t)g->n_slots + 1, sizeof *read, &g->err));
    find_readers(g, read);
    for (slot_id s = 0; s < g->n_slots; s++) {
        int node = combine_node(g, s);
        if (node < 0 || !read[s])
            continue;
        if (n == MHC_REBUILD_LAYERS || (n > 0 && !goes_on(g, run[n - 1], node))) {
            join_replays(g, run, n);
            n = 0;
        }
        run[n++] = node;
    }
    join_replays(g, run, n);
    free(read);
    return g->err.code;
}

const struct joint_kind joint_mhc = {.name = "mhc", .declare = mhc_declare, .close = mhc_close, .arrive = mhc_arrive, .settle = mhc_settle};
