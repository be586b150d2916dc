/* Compressors and the indexer of DeepSeek-V4's attention; the maths is in csa.c.
 *
 * A compressor is the same for keys (D channels) and for the indexer (di channels): two projections, `compress`, a
 * norm, and rotation at the position of each window's first token. Nothing goes back from the indexer into what it
 * reads, and nothing of the model's loss into the indexer: its own loss (dsa.c has the same) trains it. */
#include "layers/csa_int.h"
#include "layers/shard.h"
#include "ops/cache/cache.h"
#include "ops/compress/compress.h"
#include "ops/indexer/indexer.h"
#include "ops/rmsnorm/rmsnorm.h"

/* One compressor: names of its slots and parameters, its width, what it makes. */
struct compressor {
    const char *scope, *prefix; /* of slots and nodes; of keys */
    int64_t width;
    slot_id entry, dentry, at;
    slot_id dx;           /* NO_SLOT: detached */
    enum split_grad grad; /* what a rank's gradient of the weights lacks */
    bool trained;
};

static const char *named(struct build *b, const char *scope, const char *name)
{
    char *out = graph_own(b->g, 64);
    if (out == NULL)
        return name;
    snprintf(out, 64, "%s_%s", scope, name);
    return out;
}

static const char *keyed(struct build *b, const char *prefix, const char *name)
{
    char *out = graph_own(b->g, 128);
    if (out == NULL)
        return name;
    snprintf(out, 128, "self_attention.core_attention.%s%s", prefix, name);
    return out;
}

/* Values and gates of tokens, or of what is added to the gates: channels of both windows with overlap. */
struct pooled {
    slot_id x, dx, z, dz, raw, draw, rstd;
    struct csa_edge past; /* divided: [x | z] of the last tokens before */
    struct weight ape, gain;
    int64_t channels;
};

static void pooled_slots(struct build *b, const struct csa *c, const struct compressor *k, struct pooled *p)
{
    int64_t rows = c->batch * c->entries;
    bool grads = k->trained;
    p->channels = (c->overlap ? 2 : 1) * k->width;
    p->x = build_real(b, named(b, k->scope, "kv"), b->rows, p->channels);
    p->z = build_real(b, named(b, k->scope, "gate"), b->rows, p->channels);
    p->raw = build_real(b, named(b, k->scope, "mean"), rows, k->width);
    p->rstd = graph_slot(b->g, named(b, k->scope, "rstd"), tensor_1d(NULL, b->dev->wide, rows));
    p->dx = grads ? build_grad(b, named(b, k->scope, "dkv"), b->rows, p->channels) : NO_SLOT;
    p->dz = grads ? build_grad(b, named(b, k->scope, "dgate"), b->rows, p->channels) : NO_SLOT;
    if (c->divided)
        p->past = csa_edge_slots(b, k->scope, csa_past_rows(c), 2 * p->channels, grads);
    p->draw = grads ? build_grad(b, named(b, k->scope, "dmean"), rows, k->width) : NO_SLOT;
}

/* [x | z] of the tokens before, or their gradient: [B, past rows, 2 C]. */
static struct tensor past_of(const struct build *b, const struct csa *c, slot_id s)
{
    struct tensor t = of(b->g, s);
    return c->divided && t.data != NULL ? tensor_split_first(&t, c->batch, csa_past_rows(c)) : (struct tensor){0};
}

static void pool(struct build *b, const struct csa *c, const struct compressor *k, const struct pooled *p, int n)
{
    struct graph *g = b->g;
    struct tensor x = csa_rows(c, of(g, p->x)), z = csa_rows(c, of(g, p->z)), y = csa_entries(c, of(g, p->raw)),
                  at = csa_entries(c, of(g, k->at)), pos = csa_positions(c, b);
    if (b->mode != BUILD_DECODE) {
        GRAPH_OP(g, n, PH_FWD, compress_fwd, .x = x, .z = z, .ape = of(g, p->ape.w), .pos = pos,
                 .doc_start = csa_documents(c, b), .past = past_of(b, c, p->past.edge.halo), .y = y, .at = at,
                 .start = c->start, .ratio = c->ratio, .overlap = c->overlap);
        return;
    }
    struct tensor kept = tensor_3d(NULL, b->dev->real, c->batch, (c->overlap ? 2 : 1) * c->ratio, 2 * p->channels);
    slot_id past = build_table(b, named(b, k->scope, "past"), kept, NULL, NULL);
    GRAPH_OP(g, n, PH_FWD, compress_step, .x = x, .z = z, .ape = of(g, p->ape.w), .pos = pos,
             .start = of(g, b->in.start), .past = of(g, past), .y = y, .at = at, .ratio = c->ratio,
             .overlap = c->overlap);
}

/* Mean, norm, rotation. */
static void declare_pool(struct build *b, const struct csa *c, const struct csa_slots *s, const struct compressor *k,
                         const struct pooled *p)
{
    struct graph *g = b->g;
    double elems = (double)(b->rows * p->channels), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, named(b, k->scope, "pool"), LANE_COMPUTE, NULL);
    pool(b, c, k, p, n);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = of(g, p->raw), .w = of(g, p->gain.w), .y = of(g, k->entry),
             .rstd = of(g, p->rstd), .eps = c->eps, .zero_centered = c->zero_centered);
    csa_rotate(b, n, s, k->at, csa_rotary(c, of(g, k->entry), 1));
    graph_cost(g, n, PH_FWD, 8 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, k->entry);
    graph_again(g, n, p->raw);
    if (!k->trained)
        return;
    csa_unrotate(b, n, s, k->at, csa_rotary(c, of(g, k->dentry), 1));
    GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = of(g, k->dentry), .x = of(g, p->raw), .w = of(g, p->gain.w),
             .rstd = of(g, p->rstd), .dx = of(g, p->draw), .dw = of(g, p->gain.dw), .zero_centered = c->zero_centered);
    GRAPH_OP(g, n, PH_BWD, compress_bwd, .dy = csa_entries(c, of(g, p->draw)), .x = csa_rows(c, of(g, p->x)),
             .z = csa_rows(c, of(g, p->z)), .ape = of(g, p->ape.w), .doc_start = csa_documents(c, b),
             .past = past_of(b, c, p->past.edge.halo), .dx = csa_rows(c, of(g, p->dx)), .dz = csa_rows(c, of(g, p->dz)),
             .dpast = past_of(b, c, p->past.edge.dhalo), .dape = of(g, p->ape.dw), .start = c->start, .ratio = c->ratio,
             .overlap = c->overlap);
    graph_cost(g, n, PH_BWD, 16 * elems, 4 * elems * size);
}

/* runs: false where no window can be complete, and only parameters are declared. */
static void declare_compressor(struct build *b, const struct csa *c, const struct csa_slots *s,
                               const struct compressor *k, const struct core_io *io, bool runs)
{
    struct pooled p = {.x = NO_SLOT, .dx = NO_SLOT, .z = NO_SLOT, .dz = NO_SLOT};
    p.past.edge = (struct context_edge){.tail = NO_SLOT, .halo = NO_SLOT, .dtail = NO_SLOT, .dhalo = NO_SLOT};
    p.channels = (c->overlap ? 2 : 1) * k->width;
    if (runs)
        pooled_slots(b, c, k, &p);
    int64_t hidden = b->cfg->model.hidden;
    const char *part[] = {"linear_wkv.weight", "linear_wgate.weight"}, *node[] = {"kv", "gate"};
    for (int i = 0; i < 2; i++) {
        struct csa_linear d = {.name = named(b, k->scope, node[i]),
                               .key = keyed(b, k->prefix, part[i]),
                               .x = io->h,
                               .y = i == 0 ? p.x : p.z,
                               .dy = i == 0 ? p.dx : p.dz,
                               .dx = k->dx,
                               .in = hidden,
                               .out = p.channels,
                               .grad = k->grad,
                               .plain = true};
        struct linear l;
        if (!runs) {
            d.y = NO_SLOT;
            (void)csa_linear_forward(b, &d, &l);
        } else {
            csa_linear_declare(b, &d);
        }
    }
    struct param ape = {
        .key = keyed(b, k->prefix, "ape"), .rank = 2, .dim = {c->ratio, p.channels}, .init = INIT_ZERO, .wide = true};
    param_replicate(&ape, k->grad);
    p.ape = build_weight(b, &ape);
    p.gain = csa_gain(b, c, keyed(b, k->prefix, "norm.weight"), k->width, k->grad);
    if (!runs)
        return;
    if (c->divided) { /* token t of those before is row t % rows, as ops/compress has it */
        const struct csa_columns_of rows[] = {{p.x, p.dx, 0}, {p.z, p.dz, p.channels}};
        csa_edge_declare(b, &p.past, rows, countof(rows), (c->start + c->seq) % csa_past_rows(c));
    }
    declare_pool(b, c, s, k, &p);
}

void csa_compressor(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io)
{
    int64_t rows = c->batch * c->entries;
    bool runs = c->entries > 0;
    if (runs) {
        if (c->divided)
            s->entries = context_rows_of(b, "entry", c->entries, c->width);
        s->entry = c->divided ? s->entries.own : build_real(b, "entry", rows, c->width);
        s->dentry = c->divided ? s->entries.down : build_grad(b, "dentry", rows, c->width);
        s->at = graph_slot(b->g, "entry_pos", tensor_1d(NULL, DT_I32, rows));
    }
    declare_compressor(b, c, s,
                       &(struct compressor){.scope = "comp",
                                            .prefix = "compressor.",
                                            .width = c->width,
                                            .entry = s->entry,
                                            .dentry = s->dentry,
                                            .at = s->at,
                                            .dx = io->dh,
                                            .grad = GRAD_OVER_HEADS,
                                            .trained = true},
                       io, runs);
    if (runs && c->divided)
        context_gather(b, "entry_rows", &s->entries);
}

/* ---- the indexer ----------------------------------------------------------------------------- */

static void index_slots(struct build *b, const struct csa *c, struct csa_slots *s)
{
    int64_t rows = c->batch * c->entries, wide = c->index_heads * c->index_dim;
    s->iq = build_real(b, "index_q", b->rows, wide);
    s->iw = build_wide(b, "index_w", b->rows, c->index_heads);
    if (c->divided)
        s->iks = context_rows_of(b, "index_k", c->entries, c->index_dim);
    s->ik = c->divided ? s->iks.own : build_real(b, "index_k", rows, c->index_dim);
    s->diq = c->learns ? build_grad(b, "dindex_q", b->rows, wide) : NO_SLOT;
    s->diw = c->learns ? build_grad(b, "dindex_w", b->rows, c->index_heads) : NO_SLOT;
    s->dik = !c->learns ? NO_SLOT : c->divided ? s->iks.down : build_grad(b, "dindex_k", rows, c->index_dim);
    struct tensor cache = tensor_4d(NULL, b->dev->real, c->batch, c->key_entries, 1, c->index_dim);
    s->index_cache = b->mode == BUILD_DECODE ? build_table(b, "index_cache", cache, NULL, NULL) : NO_SLOT;
}

/* A projection of the indexer. */
static void index_linear(struct build *b, const struct csa *c, const struct csa_slots *s, struct csa_linear d,
                         bool rotated, bool runs)
{
    struct linear l;
    d.plain = true;
    d.grad = GRAD_OF_LOSS;
    d.dx = NO_SLOT;
    d.y = runs ? d.y : NO_SLOT;
    int n = csa_linear_forward(b, &d, &l);
    if (!runs)
        return;
    if (rotated)
        csa_rotate(b, n, s, b->in.pos, csa_rotary(c, of(b->g, d.y), c->index_heads));
    if (d.dy != NO_SLOT)
        linear_backward(b, n, &l);
    else if (training(b))
        graph_again(b->g, n, d.y);
}

void csa_indexer(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io)
{
    bool runs = c->selects || c->learns;
    if (runs)
        index_slots(b, c, s);
    index_linear(b, c, s,
                 (struct csa_linear){.name = "index_q",
                                     .key = "self_attention.core_attention.indexer.linear_wq_b.weight",
                                     .x = s->q_in,
                                     .y = s->iq,
                                     .dy = s->diq,
                                     .in = c->q_rank,
                                     .out = c->index_heads * c->index_dim},
                 true, runs);
    index_linear(b, c, s,
                 (struct csa_linear){.name = "index_w",
                                     .key = "self_attention.core_attention.indexer.linear_weights_proj.weight",
                                     .x = io->h,
                                     .y = s->iw,
                                     .dy = s->diw,
                                     .in = b->cfg->model.hidden,
                                     .out = c->index_heads},
                 false, runs);
    slot_id at = runs ? graph_slot(b->g, "index_pos", tensor_1d(NULL, DT_I32, c->batch * c->entries)) : NO_SLOT;
    declare_compressor(b, c, s,
                       &(struct compressor){.scope = "index_comp",
                                            .prefix = "indexer.compressor.",
                                            .width = c->index_dim,
                                            .entry = s->ik,
                                            .dentry = s->dik,
                                            .at = at,
                                            .dx = NO_SLOT,
                                            .grad = GRAD_OF_LOSS,
                                            .trained = c->learns},
                       io, runs);
    if (runs && c->divided)
        context_gather(b, "index_rows", &s->iks);
}

static struct tensor index_heads(const struct csa *c, struct tensor t)
{
    return csa_rows(c, csa_split(t, c->index_heads, c->index_dim));
}

struct tensor csa_all_entries(const struct csa *c, const struct build *b, const struct csa_slots *s)
{
    return csa_seen_entries(c, of(b->g, c->divided ? s->entries.all : s->entry));
}
/* The indexer's keys in their place. */
static struct tensor all_index_keys(const struct csa *c, const struct build *b, const struct csa_slots *s)
{
    return csa_seen_entries(c, of(b->g, c->divided ? s->iks.all : s->ik));
}

void csa_select(struct build *b, const struct csa *c, struct csa_slots *s)
{
    struct graph *g = b->g;
    struct tensor k = s->index_cache != NO_SLOT ? csa_entries(c, of(g, s->ik)) : all_index_keys(c, b, s);
    s->sel = graph_slot(g, "selected", tensor_3d(NULL, DT_I32, c->batch, c->seq, c->topk));
    int n = graph_node(g, "select", LANE_COMPUTE, NULL);
    if (s->index_cache != NO_SLOT) {
        struct tensor cache = of(g, s->index_cache);
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = csa_split(k, 1, c->index_dim), .cache = cache,
                 .start = of(g, b->in.start), .ratio = c->ratio);
        k = tensor_3d(cache.data, cache.dtype, c->batch, c->key_entries, c->index_dim);
    }
    GRAPH_OP(g, n, PH_FWD, index_topk, .q = index_heads(c, of(g, s->iq)), .k = k, .w = csa_rows(c, of(g, s->iw)),
             .doc_start = csa_documents(c, b), .start = of(g, c->divided ? s->first : b->in.start),
             .idx = of(g, s->sel), .topk = c->topk, .ratio = c->ratio, .relu = b->cfg->model.dsa_indexer_scoring_relu);
    graph_cost(g, n, PH_FWD, (double)b->rows * (double)c->seen * (double)(c->index_heads * c->index_dim), 0);
    if (training(b))
        graph_again(g, n, s->sel);
}

/* Queries of every sequence whose attention is looked at in full, for the metric. */
enum { RECALL_QUERIES = 16 };

/* The target is the attention that entries get beside the window and the sink: its denominator has all of them. */
void csa_index_loss(struct build *b, const struct csa *c, const struct csa_slots *s)
{
    const struct config_model *m = &b->cfg->model;
    struct graph *g = b->g;
    bool listed = c->selects && m->dsa_indexer_use_sparse_loss;
    struct tensor mq = csa_rows(c, csa_heads(of(g, s->q), c->heads)),
                  mk = csa_split(csa_all_entries(c, b, s), 1, c->width);
    int n = graph_node(g, "index_loss", LANE_COMPUTE, NULL);
    if (c->selects)
        GRAPH_OP(g, n, PH_FWD, index_recall, .mq = mq, .mk = mk, .idx = of(g, s->sel), .doc_start = csa_documents(c, b),
                 .start = of(g, s->first), .recall = of(g, build_metric(b, "indexer recall", 1)),
                 .softmax_scale = c->scale, .ratio = c->ratio, .every = max_i64(1, b->whole_seq / RECALL_QUERIES));
    slot_id loss = build_metric(b, "indexer loss", 1);
    if (loss != NO_SLOT) {
        struct metric *x = &b->metrics->m[b->metrics->n - 1];
        x->objective = true;
        x->only = ".indexer.";
    }
    int64_t ranks = b->mesh->tp;
    struct tensor row = tensor_2d(NULL, b->dev->wide, c->batch, c->seq),
                  rows = tensor_3d(NULL, b->dev->wide, ranks, c->batch, c->seq),
                  idx = listed ? of(g, s->sel) : (struct tensor){0};
    slot_id mass = ranks > 1 ? graph_slot(g, "index_mass", row) : NO_SLOT,
            masses = ranks > 1 ? graph_slot(g, "index_masses", rows) : NO_SLOT;
    GRAPH_OP(g, n, PH_BWD, index_loss, .q = index_heads(c, of(g, s->iq)), .k = all_index_keys(c, b, s),
             .w = csa_rows(c, of(g, s->iw)), .mq = mq, .mk = mk, .lse = of(g, s->lse), .mass = of(g, masses),
             .idx = idx, .doc_start = csa_documents(c, b), .start = of(g, s->first), .ranks = ranks,
             .rank = b->mesh->tp_rank, .scale = of(g, b->in.mb_share), .loss = of(g, loss),
             .dq = index_heads(c, of(g, s->diq)), .dk = csa_seen_entries(c, of(g, c->divided ? s->iks.dall : s->dik)),
             .dw = csa_rows(c, of(g, s->diw)), .coeff = m->dsa_indexer_loss_coeff, .score_scale = c->score_scale,
             .softmax_scale = c->scale, .ratio = c->ratio, .relu = m->dsa_indexer_scoring_relu);
    csa_unrotate(b, n, s, b->in.pos, csa_rotary(c, of(g, s->diq), c->index_heads));
    double keys = listed ? (double)c->topk : (double)c->seen / 2;
    graph_cost(g, n, PH_BWD,
               2 * (double)b->rows * keys * (double)(3 * c->index_heads * c->index_dim + c->heads * c->width), 0);
    if (ranks == 1 || !training(b))
        return;
    /* The backward phase runs from the last node to the first. */
    shard_collect(b, "index_masses", mass, masses);
    n = graph_node(g, "index_mass", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_BWD, index_mass, .mq = mq, .mk = mk, .lse = of(g, s->lse), .idx = idx,
             .doc_start = csa_documents(c, b), .start = of(g, s->first), .mass = of(g, mass), .softmax_scale = c->scale,
             .ratio = c->ratio);
    graph_cost(g, n, PH_BWD, 2 * (double)b->rows * keys * (double)(c->heads * c->width), 0);
}
