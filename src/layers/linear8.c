/* Linear layers in FP8 (gpu.precision=fp8): which weights have codes, the codes of activations, and the three products.
 *
 *   forward   y  = x W^T     x by rows of 128,         W by squares of 128 x 128
 *   backward  dx = dy W      dy by rows of 128,        the transpose of W by squares
 *   dw        dW += dy^T x   transposes of both, by 128 tokens
 * Codes of x and of its transpose are made in one pass when x is; the transpose is what is saved for dw, a byte a
 * number instead of two. Where x, or what it is the norm of, is kept in any case, the transpose's codes are made of it
 * in the backward pass instead. Codes of W are made once a step, by the update (optim.c) or after it (model_quantise).
 * The gradient passes through rounding unchanged.
 *
 * Under tensor parallelism a weight has codes if what ranks hold of each of its sections is whole scale blocks, and if
 * its output's gradient is not a part of a sum (down projections of latent attention, which all ranks compute). Then
 * the codes of a rank's part, of its input and of its gradient are those of the whole tensors, and all products but the
 * sums over ranks are those of one rank.
 *
 * Where ranks share weights out (parallel.zero), each makes codes of the rows that it updates, and codes travel
 * (codes_travel(), model/codes.c): after the update, or where ranks keep shards of weights only (parallel.zero = 3)
 * with their unit, for every use. Codes of the transpose are made of those that came. By a recipe whose scales are not
 * those of the transpose, values travel instead, and each rank makes the codes of all. */
#include "layers/layer.h"
#include "layers/unit.h"
#include "ops/gemm8/gemm8.h"
#include "ops/norm8/norm8.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"
#include "ops/shard8/shard8.h"

#include <string.h>

struct known_codes {
    slot_id x;
    struct code_slots codes;
    struct known_codes *next;
};

struct code_rule code_rule(const struct config *cfg)
{
    static const struct {
        int64_t block;
        bool square;
    } by_recipe[] = {[CFG_FP8_BLOCKWISE] = {128, true}, [CFG_FP8_TENSOR] = {0, false}, [CFG_FP8_MX] = {32, false}};
    int recipe = cfg->gpu.fp8_recipe;
    return (struct code_rule){.block = by_recipe[recipe].block,
                              .square = by_recipe[recipe].square,
                              .grad = cfg->gpu.fp8_grad == CFG_FP8_GRAD_E5M2 ? DT_F8_E5M2 : DT_F8_E4M3};
}

/* ---- weights --------------------------------------------------------------------------------- */

/* GPUs multiply codes whose rows are multiples of 16 bytes; other devices keep to it, so that the model is the same. */
enum { LEAST_MULTIPLE = 16 };
/* Scale blocks of one expert's matrix must not reach into the next one's, whichever experts a rank has. */
enum { EXPERT_MULTIPLE = 128 };

static bool kept(const char *globs, const char *key)
{
    char word[192];
    for (const char *p = globs; *p != '\0';) {
        size_t n = strcspn(p, ", ");
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        p += n + (p[n] != '\0');
        if (n > 0 && str_glob(word, key))
            return true;
    }
    return false;
}

/* Do tensor-parallel ranks get whole blocks of scales? Gradients of what every rank makes for its own heads are parts
 * of a sum, which must not be rounded one by one. */
static bool whole_blocks(const struct build *b, const struct param *p)
{
    bool all = b->mesh->tp == 1 || p->split.how != SPLIT_NONE || p->split.grad != GRAD_OVER_HEADS;
    int64_t block = max_i64(1, code_rule(b->cfg).block) * b->mesh->tp;
    for (int i = 0; b->mesh->tp > 1 && !p->expert && p->split.how == SPLIT_DIM && i < p->split.n_sections; i++)
        all &= p->split.section[i].size % block == 0;
    return all;
}

static bool in_codes(const struct build *b, const struct param *p)
{
    char key[192];
    int64_t least = p->expert ? EXPERT_MULTIPLE : LEAST_MULTIPLE;
    snprintf(key, sizeof key, "%s%s", b->prefix, p->key);
    return b->cfg->gpu.precision == CFG_PRECISION_FP8 && p->dim[p->rank - 2] % least == 0 &&
           p->dim[p->rank - 1] % least == 0 && whole_blocks(b, p) && !kept(b->cfg->gpu.fp8_keep, key);
}

bool codes_travel(const struct config *cfg)
{
    struct code_rule r = code_rule(cfg);
    return r.square || r.block == 0;
}

static struct weight weight_in(struct build *b, const struct param *decl, bool codes)
{
    struct param p = *decl;
    p.codes = codes;
    p.code_shards = codes && codes_travel(b->cfg);
    p.wide |= codes;
    return build_weight(b, &p);
}

struct weight build_linear_weight(struct build *b, const struct param *decl)
{
    return weight_in(b, decl, in_codes(b, decl));
}

void build_expert_weights(struct build *b, const struct param *p1, const struct param *p2, struct weight *w1,
                          struct weight *w2)
{
    bool codes = in_codes(b, p1) && in_codes(b, p2);
    *w1 = weight_in(b, p1, codes);
    *w2 = weight_in(b, p2, codes);
}

struct tensor code_maxima(const struct config *cfg, const struct mesh *m, const struct param *p, enum dtype wide)
{
    struct code_rule r = code_rule(cfg);
    int64_t cols = p->dim[p->rank - 1], piece = mesh_shard(m, p).piece / cols;
    return tensor_3d(NULL, wide, mesh_copies(m, p), shard8_down(piece, r.block), shard8_across(cols, r.block));
}

static slot_id code_slot(struct build *b, struct param_entry *row, int which, const char *what, struct tensor shape)
{
    char name[224];
    snprintf(name, sizeof name, "%s.%s", row->p.key, what);
    if (row->code_offset[which] < 0)
        row->code_offset[which] = memory_reserve(b->mem, ARENA_CODE, tensor_bytes(&shape));
    return graph_persistent(b->g, name, shape, ARENA_CODE, row->code_offset[which]);
}

/* A weight whose codes exist while its unit is used only: slots for them, in a scope of their own. */
struct passing {
    const char *scope;
    int layer;
    struct tensor matrix; /* its values, as a matrix */
};
static struct passing passing_begin(struct build *b, const struct param_entry *row, slot_id values)
{
    struct graph *g = b->g;
    struct passing p = {.scope = g->scope, .layer = g->layer};
    struct tensor x = of(g, values);
    p.matrix = tensor_2d(x.data, x.dtype, param_code_rows(&row->p), row->p.dim[row->p.rank - 1]);
    graph_scope(g, b->layer, "codes");
    return p;
}

static void passing_end(struct build *b, const struct passing *p)
{
    b->g->scope = p->scope;
    b->g->layer = p->layer;
}

static const char *code_name(const struct param_entry *row, const char *what, char name[224])
{
    snprintf(name, 224, "%s.%s", row->p.key, what);
    return name;
}

/* Codes of the transpose are made for the backward pass, whatever else is recomputed. */
static void transpose_later(struct build *b, const struct weight *w, int node, double bytes)
{
    struct graph *g = b->g;
    graph_cost(g, node, PH_REPLAY, 0, bytes);
    graph_replay(g, w->codes.t, node);
    if (g->err.code == ST_OK)
        g->slots[w->codes.t].dropped = g->slots[w->codes.t].weight = true;
}

/* Codes of a weight whose values are gathered for every use, made of them each time. */
static void passing_codes(struct build *b, const struct param_entry *row, struct weight *w)
{
    struct graph *g = b->g;
    struct code_rule r = code_rule(b->cfg);
    int64_t out = param_code_rows(&row->p), in = row->p.dim[row->p.rank - 1];
    char name[224];
    struct passing p = passing_begin(b, row, w->w);
    w->codes.q = graph_slot(g, code_name(row, "codes", name), tensor_2d(NULL, DT_F8_E4M3, out, in));
    w->codes.qs = graph_slot(g, code_name(row, "scales", name), f8_scales(b->dev->wide, out, in, r.block, r.square));
    if (training(b)) {
        w->codes.t = graph_slot(g, code_name(row, "codes_t", name), tensor_2d(NULL, DT_F8_E4M3, in, out));
        w->codes.ts =
            graph_slot(g, code_name(row, "scales_t", name), f8_scales(b->dev->wide, in, out, r.block, r.square));
    }
    int n = graph_node(g, code_name(row, "quantise", name), LANE_COMPUTE, NULL),
        back = training(b) ? graph_node(g, code_name(row, "quantise_t", name), LANE_COMPUTE, NULL) : -1;
    passing_end(b, &p);
    double elems = (double)(out * in), bytes = elems * (double)(dtype_bytes(b->dev->wide) + 1);
    GRAPH_OP(g, n, PH_FWD, quantise, .x = p.matrix, .q = of(g, w->codes.q), .qs = of(g, w->codes.qs), .block = r.block,
             .square = r.square);
    graph_cost(g, n, PH_FWD, 4 * elems, bytes);
    if (!training(b))
        return;
    GRAPH_OP(g, back, PH_REPLAY, quantise, .x = p.matrix, .t = of(g, w->codes.t), .ts = of(g, w->codes.ts),
             .block = r.block, .square = r.square);
    codes_again(b, n, &(struct code_slots){w->codes.q, w->codes.qs, NO_SLOT, NO_SLOT});
    transpose_later(b, w, back, bytes);
    graph_replay(g, w->codes.ts, back);
    const slot_id slots[] = {w->codes.q, w->codes.qs, w->codes.ts};
    for (int i = 0; g->err.code == ST_OK && i < countof(slots); i++)
        g->slots[slots[i]].dropped = g->slots[slots[i]].weight = true;
}

/* Codes that are gathered for every use, from what each rank keeps of them: the codes of its rows, and all scales. */
static void gathered_codes(struct build *b, struct param_entry *row, struct weight *w)
{
    struct graph *g = b->g;
    int64_t out = param_code_rows(&row->p), in = row->p.dim[row->p.rank - 1];
    char name[224];
    struct passing p = passing_begin(b, row, w->w);
    if (row->code_offset[0] < 0)
        row->code_offset[0] = memory_reserve(b->mem, ARENA_CODE, mesh_kept(b->mesh, &row->p, KEPT_CODES).n);
    w->codes.q = unit_codes(b, w->param, code_name(row, "codes", name), tensor_2d(NULL, DT_F8_E4M3, out, in));
    if (training(b)) {
        w->codes.t = graph_slot(g, code_name(row, "codes_t", name), tensor_2d(NULL, DT_F8_E4M3, in, out));
        int back = graph_node(g, code_name(row, "turn", name), LANE_COMPUTE, NULL);
        GRAPH_OP(g, back, PH_REPLAY, shard8_turn, .q = of(g, w->codes.q), .t = of(g, w->codes.t));
        transpose_later(b, w, back, 2 * (double)(out * in));
    }
    passing_end(b, &p);
}

void weight_codes(struct build *b, struct param_entry *row, struct weight *w)
{
    struct code_rule r = code_rule(b->cfg);
    int64_t out = param_code_rows(&row->p), in = row->p.dim[row->p.rank - 1];
    bool shares = row->p.code_shards && mesh_shards(b->mesh, &row->p, KEPT_WEIGHT);
    if (!shares && mesh_shards(b->mesh, &row->p, KEPT_WEIGHT)) {
        passing_codes(b, row, w);
        return;
    }
    struct quantise_args a = {.x = {.dtype = b->dev->wide}, .block = r.block, .square = r.square};
    struct tensor maxima = code_maxima(b->cfg, b->mesh, &row->p, b->dev->wide);
    int64_t work = shares ? tensor_bytes(&maxima) : b->ops->quantise_work != NULL ? b->ops->quantise_work(&a) : 0;
    if (row->code_work < 0)
        row->code_work = memory_reserve(b->mem, ARENA_CODE, work);
    bool gathered = shares && mesh_shards(b->mesh, &row->p, KEPT_CODES);
    if (gathered)
        gathered_codes(b, row, w);
    else
        w->codes.q = code_slot(b, row, 0, "codes", tensor_2d(NULL, DT_F8_E4M3, out, in));
    w->codes.qs = code_slot(b, row, 1, "scales", f8_scales(b->dev->wide, out, in, r.block, r.square));
    if (!training(b))
        return;
    if (!gathered)
        w->codes.t = code_slot(b, row, 2, "codes_t", tensor_2d(NULL, DT_F8_E4M3, in, out));
    w->codes.ts = code_slot(b, row, 3, "scales_t", f8_scales(b->dev->wide, in, out, r.block, r.square));
}

/* ---- activations ----------------------------------------------------------------------------- */

/* Slots for codes of an activation of this shape (direct), and of its transpose, named after `prefix`. */
static struct code_slots declare_codes(struct build *b, const char *prefix, struct tensor x, enum dtype type,
                                       bool direct, bool transpose)
{
    struct graph *g = b->g;
    int64_t rows = x.dim[0], cols = x.dim[1], block = code_rule(b->cfg).block;
    struct code_slots c = {NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT};
    char name[96];
#define NAMED(text) (snprintf(name, sizeof name, "%s" text, prefix), name)
    if (direct) {
        c.q = graph_slot(g, NAMED("codes"), tensor_2d(NULL, type, rows, cols));
        c.qs = graph_slot(g, NAMED("scales"), f8_scales(b->dev->wide, rows, cols, block, false));
    }
    if (transpose) {
        c.t = graph_slot(g, NAMED("codes_t"), tensor_2d(NULL, type, cols, rows));
        c.ts = graph_slot(g, NAMED("scales_t"), f8_scales(b->dev->wide, cols, rows, block, false));
    }
#undef NAMED
    return c;
}

static void declare_quantise(struct build *b, int node, enum phase_id ph, slot_id x, const struct code_slots *c)
{
    struct graph *g = b->g;
    GRAPH_OP(g, node, ph, quantise, .x = of(g, x), .q = of(g, c->q), .qs = of(g, c->qs), .t = of(g, c->t),
             .ts = of(g, c->ts), .block = code_rule(b->cfg).block);
}

static const struct code_slots no_codes = {NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT};

struct code_slots known_codes(const struct build *b, slot_id x)
{
    for (const struct known_codes *k = b->known_codes; k != NULL; k = k->next)
        if (k->x == x)
            return k->codes;
    return no_codes;
}

/* In the scope of the slot itself, so that recompute policies that name it mean its codes too. */
struct code_slots declare_known(struct build *b, slot_id x, enum dtype type)
{
    struct graph *g = b->g;
    struct known_codes *k = g->err.code == ST_OK && x != NO_SLOT ? graph_own(g, sizeof *k) : NULL;
    if (k == NULL)
        return no_codes;
    const char *scope = g->scope;
    int layer = g->layer;
    graph_scope(g, g->slots[x].layer, g->slots[x].tag);
    *k = (struct known_codes){
        .x = x, .codes = declare_codes(b, "", g->slots[x].shape, type, true, training(b)), .next = b->known_codes};
    b->known_codes = k;
    g->scope = scope;
    g->layer = layer;
    return k->codes;
}

void codes_again(struct build *b, int node, const struct code_slots *c)
{
    graph_again(b->g, node, c->q);
    graph_again(b->g, node, c->qs);
    graph_again(b->g, node, c->t);
    graph_again(b->g, node, c->ts);
}

/* ---- codes of what is kept ------------------------------------------------------------------- */

void declare_norm_source(struct build *b, struct known_norm source)
{
    struct graph *g = b->g;
    bool blocks = b->cfg->gpu.precision == CFG_PRECISION_FP8 && code_rule(b->cfg).block > 0;
    struct known_norm *k = g->err.code == ST_OK && blocks ? graph_own(g, sizeof *k) : NULL;
    if (k == NULL)
        return;
    *k = source;
    k->next = b->known_norms;
    b->known_norms = k;
    graph_optional(g, source.h);
}

static const struct known_norm *norm_of(const struct build *b, slot_id h)
{
    const struct known_norm *k = b->known_norms;
    while (k != NULL && k->h != h)
        k = k->next;
    return k;
}

/* Codes of an activation, or of the source that it is the norm of. */
static void declare_makes(struct build *b, int node, enum phase_id ph, slot_id x, const struct known_norm *norm,
                          const struct code_slots *c)
{
    struct graph *g = b->g;
    double elems = g->err.code == ST_OK ? (double)tensor_elems(&g->slots[x].shape) : 0;
    int codes = (c->q != NO_SLOT) + (c->t != NO_SLOT);
    if (norm != NULL)
        GRAPH_OP(g, node, ph, norm8, .x = of(g, norm->x), .rstd = of(g, norm->rstd), .w = of(g, norm->w),
                 .q = of(g, c->q), .qs = of(g, c->qs), .t = of(g, c->t), .ts = of(g, c->ts),
                 .block = code_rule(b->cfg).block, .zero_centered = norm->zero_centered);
    else
        declare_quantise(b, node, ph, x, c);
    graph_cost(g, node, ph, 4 * elems, elems * ((double)dtype_bytes(b->dev->real) + codes));
}

/* The transpose's codes as a replay that every policy has: nothing makes them forward, nothing keeps them. */
static void declare_later(struct build *b, slot_id x, const struct known_norm *norm, const struct code_slots *c)
{
    struct graph *g = b->g;
    struct code_slots t = {.q = NO_SLOT, .qs = NO_SLOT, .t = c->t, .ts = c->ts};
    int n = graph_node(g, "quantise_t", LANE_COMPUTE, NULL);
    declare_makes(b, n, PH_REPLAY, x, norm, &t);
    graph_replay(g, c->t, n);
    graph_replay(g, c->ts, n);
    if (g->err.code == ST_OK)
        g->slots[c->t].dropped = g->slots[c->ts].dropped = true;
}

struct code_slots activation_codes(struct build *b, const struct linear *l)
{
    struct graph *g = b->g;
    slot_id x = l->x;
    struct code_slots c = known_codes(b, x);
    if (c.q != NO_SLOT)
        return c;
    c = declare_known(b, x, DT_F8_E4M3);
    if (c.q == NO_SLOT)
        return c;
    const char *scope = g->scope;
    int layer = g->layer;
    const struct known_norm *norm = norm_of(b, x);
    bool later = training(b) && (norm != NULL || l->x_kept);
    struct code_slots now = later ? (struct code_slots){.q = c.q, .qs = c.qs, .t = NO_SLOT, .ts = NO_SLOT} : c;
    graph_scope(g, g->slots[x].layer, g->slots[x].tag);
    int n = graph_node(g, "quantise", LANE_COMPUTE, NULL);
    declare_makes(b, n, PH_FWD, x, norm, &now);
    if (training(b))
        codes_again(b, n, &now);
    if (later)
        declare_later(b, x, norm, &c);
    g->scope = scope;
    g->layer = layer;
    return c;
}

/* ---- products -------------------------------------------------------------------------------- */

void linear8_forward(struct build *b, int n, const struct linear *l)
{
    struct graph *g = b->g;
    struct code_rule r = code_rule(b->cfg);
    struct code_slots x = activation_codes(b, l);
    bool adds_bias = !l->summed || b->mesh->tp_rank == 0; /* of a sum over ranks, the first */
    GRAPH_OP(g, n, PH_FWD, gemm8, .a = of(g, x.q), .as = of(g, x.qs), .b = of(g, l->w.codes.q),
             .bs = of(g, l->w.codes.qs), .c = of(g, l->y), .bias = adds_bias ? of(g, l->bias.w) : (struct tensor){0},
             .block = r.block, .b_square = r.square);
}

void linear8_backward(struct build *b, int n, const struct linear *l)
{
    struct graph *g = b->g;
    struct code_rule r = code_rule(b->cfg);
    struct code_slots x = activation_codes(b, l);
    char prefix[64];
    if (g->err.code != ST_OK || l->dy == NO_SLOT)
        return;
    struct code_slots dy = known_codes(b, l->dy);
    if (dy.q == NO_SLOT) { /* unless whoever makes dy makes its codes */
        const char *last = strrchr(g->nodes[n].name, '.');
        snprintf(prefix, sizeof prefix, "d%s_", last != NULL ? last + 1 : g->nodes[n].name);
        dy = declare_codes(b, prefix, g->slots[l->dy].shape, r.grad, l->dx != NO_SLOT, true);
        declare_quantise(b, n, PH_BWD, l->dy, &dy);
    }
    if (l->dx != NO_SLOT)
        GRAPH_OP(g, n, PH_BWD, gemm8, .a = of(g, dy.q), .as = of(g, dy.qs), .b = of(g, l->w.codes.t),
                 .bs = of(g, l->w.codes.ts), .c = of(g, l->dx), .block = r.block, .b_square = r.square);
    GRAPH_OP(g, n, PH_DW, gemm8, .a = of(g, dy.t), .as = of(g, dy.ts), .b = of(g, x.t), .bs = of(g, x.ts),
             .c = of(g, l->w.dw), .block = r.block);
}
