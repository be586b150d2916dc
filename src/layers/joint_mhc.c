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
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

/* ---- the boundary ------------------------------------------------------------------------------------------ */

enum {
    BOUNDARY_FWD_X, BOUNDARY_FWD_F, BOUNDARY_FWD_COEF_IN, BOUNDARY_FWD_INFO, BOUNDARY_FWD_W, BOUNDARY_FWD_A_PRE,
    BOUNDARY_FWD_A_POST, BOUNDARY_FWD_A_RES, BOUNDARY_FWD_BETA, BOUNDARY_FWD_GAIN, BOUNDARY_FWD_STREAM,
    BOUNDARY_FWD_STAT, BOUNDARY_FWD_COEF, BOUNDARY_FWD_H, BOUNDARY_FWD_WORK
};
static int boundary_fwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_boundary_fwd_args a = {
        .x = c->t[BOUNDARY_FWD_X], .f = c->t[BOUNDARY_FWD_F], .coef_in = c->t[BOUNDARY_FWD_COEF_IN], .w = c->t[BOUNDARY_FWD_W], .a_pre = c->t[BOUNDARY_FWD_A_PRE], .a_post = c->t[BOUNDARY_FWD_A_POST],
        .a_res = c->t[BOUNDARY_FWD_A_RES], .beta = c->t[BOUNDARY_FWD_BETA], .gain = c->t[BOUNDARY_FWD_GAIN], .y = c->t[BOUNDARY_FWD_STREAM], .stat = c->t[BOUNDARY_FWD_STAT], .coef = c->t[BOUNDARY_FWD_COEF],
        .h = c->t[BOUNDARY_FWD_H], .work = c->t[BOUNDARY_FWD_WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[BOUNDARY_FWD_INFO]), .eps = j->eps, .zero_centered = j->zero_centered};
    return c->ops->mhc_boundary_fwd(c->lane, &a);
}

/* The norm again, from stream and coefficients; stat is read only. */
enum { NORM_REPLAY_STREAM, NORM_REPLAY_COEF, NORM_REPLAY_STAT, NORM_REPLAY_GAIN, NORM_REPLAY_H, NORM_REPLAY_WORK };
static int norm_replay(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_boundary_fwd_args a = {.x = c->t[NORM_REPLAY_STREAM], .gain = c->t[NORM_REPLAY_GAIN], .stat = c->t[NORM_REPLAY_STAT], .coef = c->t[NORM_REPLAY_COEF], .h = c->t[NORM_REPLAY_H],
                                      .work = c->t[NORM_REPLAY_WORK], .rule = j->rule, .eps = j->eps, .zero_centered = j->zero_centered, .reuse = true};
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

enum {
    BOUNDARY_BWD_DH, BOUNDARY_BWD_DSTREAM, BOUNDARY_BWD_DCOEF, BOUNDARY_BWD_STREAM, BOUNDARY_BWD_STAT,
    BOUNDARY_BWD_COEF, BOUNDARY_BWD_GAIN, BOUNDARY_BWD_W, BOUNDARY_BWD_A_PRE, BOUNDARY_BWD_A_POST,
    BOUNDARY_BWD_A_RES, BOUNDARY_BWD_BETA, BOUNDARY_BWD_X, BOUNDARY_BWD_F, BOUNDARY_BWD_COEF_IN, BOUNDARY_BWD_INFO,
    BOUNDARY_BWD_DX, BOUNDARY_BWD_DF, BOUNDARY_BWD_DCOEF_IN, BOUNDARY_BWD_DZ, BOUNDARY_BWD_DGAIN,
    BOUNDARY_BWD_PRODUCTS, BOUNDARY_BWD_READY, BOUNDARY_BWD_WORK
};
static int boundary_bwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_boundary_bwd_args a = {
        .dh = c->t[BOUNDARY_BWD_DH], .dy = c->t[BOUNDARY_BWD_DSTREAM], .dcoef = c->t[BOUNDARY_BWD_DCOEF], .y = c->t[BOUNDARY_BWD_STREAM], .stat = c->t[BOUNDARY_BWD_STAT], .coef = c->t[BOUNDARY_BWD_COEF],
        .gain = c->t[BOUNDARY_BWD_GAIN], .w = c->t[BOUNDARY_BWD_W], .a_pre = c->t[BOUNDARY_BWD_A_PRE], .a_post = c->t[BOUNDARY_BWD_A_POST], .a_res = c->t[BOUNDARY_BWD_A_RES], .beta = c->t[BOUNDARY_BWD_BETA],
        .x = c->t[BOUNDARY_BWD_X], .f = c->t[BOUNDARY_BWD_F], .coef_in = c->t[BOUNDARY_BWD_COEF_IN], .dx = c->t[BOUNDARY_BWD_DX], .df = c->t[BOUNDARY_BWD_DF], .dcoef_in = c->t[BOUNDARY_BWD_DCOEF_IN], .dz = c->t[BOUNDARY_BWD_DZ],
        .dgain = c->t[BOUNDARY_BWD_DGAIN], .products = c->t[BOUNDARY_BWD_PRODUCTS], .ready = c->t[BOUNDARY_BWD_READY], .work = c->t[BOUNDARY_BWD_WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[BOUNDARY_BWD_INFO]),
        .zero_centered = j->zero_centered, .acc_dgain = c->add[BOUNDARY_BWD_DGAIN]};
    return c->ops->mhc_boundary_bwd(c->lane, &a);
}

/* What of boundary_bwd needs no gradient of the sublayer that this joint opened. */
enum {
    BOUNDARY_READY_DCOEF, BOUNDARY_READY_STAT, BOUNDARY_READY_COEF, BOUNDARY_READY_W, BOUNDARY_READY_A_PRE,
    BOUNDARY_READY_A_POST, BOUNDARY_READY_A_RES, BOUNDARY_READY_BETA, BOUNDARY_READY_READY
};
static int boundary_ready(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct tensor streams = tensor_2d(NULL, c->ops->real, c->t[BOUNDARY_READY_COEF].dim[0], c->t[BOUNDARY_READY_W].dim[1]), one = tensor_2d(NULL, c->ops->real, streams.dim[0], streams.dim[1] / j->rule.streams);
    struct mhc_boundary_bwd_args a = {.dcoef = c->t[BOUNDARY_READY_DCOEF], .stat = c->t[BOUNDARY_READY_STAT], .coef = c->t[BOUNDARY_READY_COEF], .w = c->t[BOUNDARY_READY_W], .a_pre = c->t[BOUNDARY_READY_A_PRE], .a_post = c->t[BOUNDARY_READY_A_POST],
                                      .a_res = c->t[BOUNDARY_READY_A_RES], .beta = c->t[BOUNDARY_READY_BETA], .dx = streams, .f = one, .ready = c->t[BOUNDARY_READY_READY], .rule = j->rule};
    return c->ops->mhc_boundary_ready(c->lane, &a);
}

enum {
    BOUNDARY_DW_DZ, BOUNDARY_DW_STAT, BOUNDARY_DW_STREAM, BOUNDARY_DW_PRODUCTS, BOUNDARY_DW_A_PRE,
    BOUNDARY_DW_A_POST, BOUNDARY_DW_A_RES, BOUNDARY_DW_DW, BOUNDARY_DW_DA_PRE, BOUNDARY_DW_DA_POST,
    BOUNDARY_DW_DA_RES, BOUNDARY_DW_DBETA, BOUNDARY_DW_WORK
};
static int boundary_dw(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_boundary_dw_args a = {.dz = c->t[BOUNDARY_DW_DZ], .stat = c->t[BOUNDARY_DW_STAT], .y = c->t[BOUNDARY_DW_STREAM], .products = c->t[BOUNDARY_DW_PRODUCTS], .a_pre = c->t[BOUNDARY_DW_A_PRE],
                                     .a_post = c->t[BOUNDARY_DW_A_POST], .a_res = c->t[BOUNDARY_DW_A_RES], .dw = c->t[BOUNDARY_DW_DW], .da_pre = c->t[BOUNDARY_DW_DA_PRE], .da_post = c->t[BOUNDARY_DW_DA_POST],
                                     .da_res = c->t[BOUNDARY_DW_DA_RES], .dbeta = c->t[BOUNDARY_DW_DBETA], .work = c->t[BOUNDARY_DW_WORK], .rule = j->rule,
                                     .acc_dw = c->add[BOUNDARY_DW_DW],
                                     /* One flag for all: of those that are trained, which add or do not together. */
                                     .acc_params = c->add[BOUNDARY_DW_DA_PRE] || c->add[BOUNDARY_DW_DA_POST] || c->add[BOUNDARY_DW_DA_RES] ||
                                                   c->add[BOUNDARY_DW_DBETA]};
    return c->ops->mhc_boundary_dw(c->lane, &a);
}

enum health_use { HEALTH_PRODUCT_IN, HEALTH_PRODUCT, HEALTH_WORK, HEALTH_LAYER, /* then for each layer: */
                  HEALTH_COEF = 0, HEALTH_STREAM, HEALTH_OUT, HEALTH_EACH = HEALTH_OUT + MHC_HEALTH_ITEMS };
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
 * whole block at once because each needs the one before it. */
static void drop_stream(struct build *b, slot_id stream, int index, bool last)
{
    int64_t r = b->streams.every;
    bool begins = r > 0 && (b->streams.by_unit ? b->unit_start && b->unit % r == 0 : index % r == 0);
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
    param_replicate(&p, GRAD_OVER_TOKENS);
    return build_weight(b, &p);
}

/* Attention-like layers and MLP-like ones keep their mapping under different names, as Megatron does; a
 * Mamba layer, which may share a group with attention, under the name of its hybrid layers. A second layer
 * of a kind in one group ([G*], [-E]), which Megatron does not have, gets a name of its own. */
static void mapping_module(const struct build *b, char *module, size_t size)
{
    static const char *const names[] = {[KEY_PLACE_ALONE] = "hyper_connection", [KEY_PLACE_ATTENTION] = "self_attention_hyper_connection",
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
static int health_layers(const struct build *b) { return b->streams.stay ? MHC_HEALTH_LAYERS : 1; }

/* Row and column sums, the gain of the product of all mixes so far, and how alike the streams are: of this joint and of those that wait with
 * it. Returns the new product. */
static slot_id declare_health(struct build *b, const struct joint *last, slot_id before)
{
    struct graph *g = b->g;
    struct use use[HEALTH_LAYER + HEALTH_EACH * MHC_HEALTH_LAYERS];
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
    GRAPH_PHASE(b->g, node, PH_REPLAY, mhc_combine_again, [COMBINE_X] = READS(prev->x), [COMBINE_F] = READS(prev->f),
                [COMBINE_COEF] = READS(prev->aux[AUX_COEF]), [COMBINE_INFO] = READS(p->info), [COMBINE_STREAM] = WRITES(p->stream));
    graph_cost(b->g, node, PH_REPLAY, 2 * wide * (double)(p->j->rule.streams + 1), 2.25 * wide * (double)dtype_bytes(b->dev->real));
    graph_replay(b->g, p->stream, node);
}

/* The streams of one: the first joint's again, or in front of a cut. */
static void declare_expand_replay(struct build *b, const struct parts *p, const struct sublayer *prev, int node)
{
    GRAPH_OP(b->g, node, PH_REPLAY, mhc_expand_fwd, .x = of(b->g, prev->x), .y = of(b->g, p->stream));
    graph_cost(b->g, node, PH_REPLAY, 0, (double)(b->rows * b->cfg->model.hidden * (p->j->rule.streams + 1)) * (double)dtype_bytes(b->dev->real));
    graph_replay(b->g, p->stream, node);
}

static void declare_replays(struct build *b, const struct parts *p, const struct sublayer *prev)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "replay_norm", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_REPLAY, norm_replay, [NORM_REPLAY_STREAM] = READS(p->stream),
                [NORM_REPLAY_COEF] = READS(p->coef), [NORM_REPLAY_STAT] = READS(p->stat),
                [NORM_REPLAY_GAIN] = READS(p->gain.w), [NORM_REPLAY_H] = WRITES(p->norm),
                [NORM_REPLAY_WORK] = WRITES(fwd_work(b, p->j, "replay_work", CLOSES, true)));
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
    GRAPH_OP(g, n, PH_FWD, mhc_expand_fwd, .x = of(g, prev->x), .y = of(g, p->stream));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    declare_expand_replay(b, p, prev, n);
    GRAPH_OP(g, n, PH_BWD, mhc_expand_bwd, .dy = of(g, dstream), .dx = of(g, prev->dx));
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
    GRAPH_PHASE(g, n, PH_FWD, boundary_fwd, [BOUNDARY_FWD_X] = READS(prev->x), [BOUNDARY_FWD_F] = READS(prev->f),
                [BOUNDARY_FWD_COEF_IN] = READS(coef_in), [BOUNDARY_FWD_INFO] = READS(p->info),
                [BOUNDARY_FWD_W] = READS(m->w.w), [BOUNDARY_FWD_A_PRE] = READS(m->a_pre.w),
                [BOUNDARY_FWD_A_POST] = READS(m->a_post.w), [BOUNDARY_FWD_A_RES] = READS(m->a_res.w),
                [BOUNDARY_FWD_BETA] = READS(m->beta.w), [BOUNDARY_FWD_GAIN] = READS(p->gain.w),
                [BOUNDARY_FWD_STREAM] = WRITES(made), [BOUNDARY_FWD_STAT] = WRITES(p->stat),
                [BOUNDARY_FWD_COEF] = WRITES(p->coef), [BOUNDARY_FWD_H] = WRITES(p->norm),
                [BOUNDARY_FWD_WORK] = WRITES(fwd_work(b, p->j, "fwd_work", start, false)));
    if (closes)
        graph_inplace(g, n, PH_FWD, prev->x, made); /* where nobody looks back: eval, decode */
    graph_cost(g, n, PH_FWD, map + mix + 4 * rows * k, 2.5 * rows * k * size);
    if (!training(b))
        return n;
    slot_id dz = build_wide_grad(b, "dz", b->rows, mhc_logits(p->j->rule.streams)), products = products_slot(b, p->j, start);
    bool multiplied = products != NO_SLOT;
    p->j->ready = build_work(b, "ready", ready_bytes(b, p->j, start));
    p->j->map = p->map;
    p->j->stat = p->stat;
    p->j->coef = p->coef;
    GRAPH_PHASE(g, n, PH_BWD, boundary_bwd, [BOUNDARY_BWD_DH] = READS(next->dh),
                [BOUNDARY_BWD_DSTREAM] = READS(next->dx), [BOUNDARY_BWD_DCOEF] = READS(next->aux[AUX_DCOEF]),
                [BOUNDARY_BWD_STREAM] = READS(p->stream), [BOUNDARY_BWD_STAT] = READS(p->stat),
                [BOUNDARY_BWD_COEF] = READS(p->coef), [BOUNDARY_BWD_GAIN] = READS(p->gain.w),
                [BOUNDARY_BWD_W] = READS(m->w.w), [BOUNDARY_BWD_A_PRE] = READS(m->a_pre.w),
                [BOUNDARY_BWD_A_POST] = READS(m->a_post.w), [BOUNDARY_BWD_A_RES] = READS(m->a_res.w),
                [BOUNDARY_BWD_BETA] = READS(m->beta.w), [BOUNDARY_BWD_X] = READS(start == OPENS ? NO_SLOT : prev->x),
                [BOUNDARY_BWD_F] = READS(prev->f), [BOUNDARY_BWD_COEF_IN] = READS(coef_in),
                [BOUNDARY_BWD_INFO] = READS(p->info), [BOUNDARY_BWD_DX] = WRITES(prev->dx),
                [BOUNDARY_BWD_DF] = WRITES(closes ? prev->df : NO_SLOT),
                [BOUNDARY_BWD_DCOEF_IN] = WRITES(closes ? prev->aux[AUX_DCOEF] : NO_SLOT),
                [BOUNDARY_BWD_DZ] = WRITES(dz), [BOUNDARY_BWD_DGAIN] = ADDS(p->gain.dw),
                [BOUNDARY_BWD_PRODUCTS] = WRITES(products), [BOUNDARY_BWD_READY] = READS(p->j->ready),
                [BOUNDARY_BWD_WORK] = WRITES(bwd_work(b, p->j, start, multiplied)));
    if (start != ENTERS)
        graph_inplace(g, n, PH_BWD, next->dx, prev->dx); /* the gradient that came in becomes the one that goes out */
    graph_cost(g, n, PH_BWD, (multiplied ? 2 : 1) * map + 2 * mix + 10 * rows * k, 5 * rows * k * size);
    GRAPH_PHASE(g, n, PH_DW, boundary_dw, [BOUNDARY_DW_DZ] = READS(dz), [BOUNDARY_DW_STAT] = READS(p->stat),
                [BOUNDARY_DW_STREAM] = READS(p->stream), [BOUNDARY_DW_PRODUCTS] = READS(products),
                [BOUNDARY_DW_A_PRE] = READS(m->a_pre.w), [BOUNDARY_DW_A_POST] = READS(m->a_post.w),
                [BOUNDARY_DW_A_RES] = READS(m->a_res.w), [BOUNDARY_DW_DW] = ADDS(m->w.dw),
                [BOUNDARY_DW_DA_PRE] = ADDS(m->a_pre.dw), [BOUNDARY_DW_DA_POST] = ADDS(m->a_post.dw),
                [BOUNDARY_DW_DA_RES] = ADDS(m->a_res.dw), [BOUNDARY_DW_DBETA] = ADDS(m->beta.dw),
                [BOUNDARY_DW_WORK] = WRITES(dw_work(b, p->j, multiplied)));
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
    GRAPH_PHASE(g, n, PH_BWD, boundary_ready, [BOUNDARY_READY_DCOEF] = READS(prev->aux[AUX_DCOEF]),
                [BOUNDARY_READY_STAT] = READS(j->stat), [BOUNDARY_READY_COEF] = READS(j->coef),
                [BOUNDARY_READY_W] = READS(m->w.w), [BOUNDARY_READY_A_PRE] = READS(m->a_pre.w),
                [BOUNDARY_READY_A_POST] = READS(m->a_post.w), [BOUNDARY_READY_A_RES] = READS(m->a_res.w),
                [BOUNDARY_READY_BETA] = READS(m->beta.w), [BOUNDARY_READY_READY] = WRITES(j->ready));
    graph_cost(g, n, PH_BWD, 0, (double)(b->rows * mhc_logits(j->rule.streams)) * 20);
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
    struct use use[REBUILD_LAYER + REBUILD_EACH * MHC_REBUILD_LAYERS];
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

/* ---- options -------------------------------------------------------------------------------------------------------- */

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
                                   m->mhc_bf16_coef);
}

static bool recompute_mhc_without_streams(const struct config *c)
{
    return c->model.mhc_streams == 0 && (str_has_word(c->plan.recompute, "mhc") || c->mhc.kernels != CFG_MHC_KERNELS_AUTO || !c->mhc.rebuild);
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
     {"model.mhc_streams", "model.mhc_profile", "model.mhc_iterations", "model.mhc_gating"}},
    {"recompute-block-needs-streams", block_without_streams,
     "plan.recompute_block needs model.mhc_streams: a plain residual stream is not recomputed",
     {"plan.recompute_block", "model.mhc_streams"}},
    {"recompute-mhc-needs-streams", recompute_mhc_without_streams,
     "plan.recompute = mhc, mhc.kernels and mhc.rebuild need model.mhc_streams: there are no streams",
     {"plan.recompute", "mhc.kernels", "mhc.rebuild", "model.mhc_streams"}},
};
/* clang-format on */

const struct joint_kind joint_mhc = {
    .name = "mhc",
    .options = {KIND_ROWS(uses, mhc_uses), KIND_ROWS(rules, mhc_rules)},
    .recompute = {{"layernorm", {"norm"}}, {"mhc", {"joint.norm"}}}, /* mhc: and streams, which the joint drops itself, block by block */
    .chosen = has_streams,
    .declare = mhc_declare,
    .close = mhc_close,
    .arrive = mhc_arrive,
    .settle = mhc_settle,
};
