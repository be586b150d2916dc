/* The sparse attention core, symbol 'D': latent attention whose queries read a few keys each, which an indexer of small
 * heads selects (DeepSeek-V3.2).
 *
 * Shapes as in mla.c; Hi, di = indexer heads and their channels, K = dsa_indexer_topk.
 *   iq   [T, Hi di] = norm(h Wqd^T) Wi^T (or h Wi^T), ik [T, di] = LayerNorm(h Wk^T); the first r channels of both
 *        rotated
 *   iw   [T, Hi]    = h Ww^T
 *   I    [t, s]     = (Hi di)^-1/2 sum_h iw[t, h] relu(iq[t, h] . ik[s]);  idx [T, K] = the K largest of s <= t
 * A query reads the keys of idx. Where a sequence has more than K tokens, the up-projection of keys and values is
 * absorbed into queries and output, so that all heads read the same rows:
 *   keys [T, Rkv + r]   = [norm(latent) | rotary key]
 *   qa   [T, H (Rkv+r)] = per head [q's n times Wk | q's r rotated],  Wk [n, Rkv] the head's rows of Wkvu
 *   ol   [T, H Rkv]     = attention(qa, keys, keys' first Rkv channels) over idx;  o = ol Wv^T per head
 * Shorter sequences are computed by the nodes of dense latent attention: every key would be selected.
 *
 * The indexer is trained by its own loss, KL(attention of all heads || softmax(I)), over the selected or over all keys.
 * No gradient of it goes into h or the latent, and none of the model's loss into the indexer: selection has none. Its
 * backward phase computes loss and gradients together, after those of the layer above. Layers between those with an
 * indexer (dsa_indexer_topk_freq) take the lists of the last one.
 *
 * Under tensor parallelism heads are divided as in mla.c, and the indexer runs on every rank, so that all select the
 * same keys. It learns from the heads of its rank: the gradient of the loss is linear in the attention it learns from,
 * and each head's sums to 1, so that the mean over ranks is the gradient for all heads, and nothing travels. (The loss
 * itself, which the log shows, then is the mean of the ranks', somewhat above that of all heads together.) Under
 * context parallelism rows [latent | rotary key] and ik of the ranks before are gathered.
 *
 * Nodes: q_down, q_norm, q_up, kv_down, kv_norm, (kv_up or absorb), index_q, index_k, index_norm, index_w, select,
 * core, expand, index_loss, proj. Decoding caches keys and ik instead of what heads expand them to. */
#include "layers/mla_int.h"
#include "ops/cache/cache.h"
#include "ops/headmm/headmm.h"
#include "ops/indexer/indexer.h"
#include "ops/layernorm/layernorm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/sparse/sparse.h"

#include <math.h>
#include <string.h>

struct dsa {
    struct mla m;
    int64_t heads, dim, topk; /* of the indexer */
    double score_scale;
    bool sparse;  /* the longest sequence has more keys than are selected */
    bool selects; /* has an indexer that runs */
    bool indexer; /* has one at all: its parameters exist */
    bool learns;  /* and a loss for it */
};

struct dsa_slots {
    struct mla_slots m;
    slot_id keys, dkeys, qa, dqa, ol, dol;
    slot_id iq, diq, ikd, dikd, ik, dik, iw, diw, mean, rstd, idx;
    slot_id key_cache, index_cache;
    slot_id first; /* of this rank's tokens in a sequence; NO_SLOT: 0 */
    bool divided;  /* parallel.cp: then these exist */
    struct context_rows far_keys, far_index;
    struct weight up, k_norm, k_bias;
};

/* ---- views ----------------------------------------------------------------------------------- */

/* Rows as [B, S, ...]; those of a cache already are. */
static struct tensor rows(const struct dsa *d, struct tensor t) { return mla_batched(&d->m, t); }
/* Absorbed queries: [T, H, Rkv + r]; latent output: [T, H, Rkv]. */
static struct tensor absorbed(const struct dsa *d, struct tensor t)
{
    return mla_heads(t, d->m.heads, d->m.kv_rank + d->m.rope);
}
static struct tensor latent_out(const struct dsa *d, struct tensor t) { return mla_heads(t, d->m.heads, d->m.kv_rank); }
static struct tensor index_heads(const struct dsa *d, struct tensor t) { return mla_heads(t, d->heads, d->dim); }
/* Channels of q without position: [T, H, n]. */
static struct tensor plain_q(const struct dsa *d, struct tensor q)
{
    return mla_columns(mla_keyed(&d->m, q), 0, d->m.nope);
}

/* The up-projection by heads: [H, n + v, Rkv], and its rows of keys or values. */
static struct tensor up_heads(const struct dsa *d, struct tensor w)
{
    return tensor_split_first(&w, d->m.heads, d->m.nope + d->m.v);
}
static struct tensor up_rows(const struct dsa *d, struct tensor w, int64_t first, int64_t n)
{
    struct tensor t = up_heads(d, w);
    t.data = (char *)t.data + first * t.stride[1] * (int64_t)dtype_bytes(t.dtype);
    t.dim[1] = n;
    return t;
}

/* ---- which layers have an indexer ------------------------------------------------------------ */

/* The layer whose lists this one reads, both counted from 1 among the D layers of their part; upstream's rule. */
static int64_t source_of(const struct config_model *c, int64_t number)
{
    int64_t first = max_i64(1, c->dsa_indexer_skip_topk_offset);
    return number <= first ? number : number - (number - first) % c->dsa_indexer_topk_freq;
}

static bool in_prediction(const struct build *b) { return strncmp(b->prefix, "mtp.", 4) == 0; }

static int find_shared(struct build *b, const struct config_model *c, struct dsa_slots *s)
{
    int64_t source = source_of(c, b->number);
    if (b->shared_index.number == source && b->shared_index.chunk == b->g->chunk && source > 0) {
        s->idx = b->shared_index.idx;
        return ST_OK;
    }
    err_set(b->e, ST_USAGE,
            "model.dsa_indexer_topk_freq: D layer %d shares the keys that D layer %lld selects, which is in another "
            "pipeline stage or chunk",
            b->number, (long long)source);
    return err_hint(b->e, "cut the model ('|' in model.pattern) in front of a layer with an indexer of its own");
}

/* ---- keys and queries for all heads at once -------------------------------------------------- */

static void absorbed_slots(struct build *b, const struct dsa *d, struct dsa_slots *s)
{
    int64_t key = d->m.kv_rank + d->m.rope, heads = d->m.heads;
    if (s->divided)
        s->far_keys = context_rows(b, "keys", key);
    s->keys = s->divided ? s->far_keys.own : build_real(b, "keys", b->rows, key);
    s->qa = build_real(b, "q_absorbed", b->rows, heads * key);
    s->ol = build_real(b, "o_latent", b->rows, heads * d->m.kv_rank);
    s->dkeys = s->divided ? s->far_keys.down : build_grad(b, "dkeys", b->rows, key);
    s->dqa = build_grad(b, "dq_absorbed", b->rows, heads * key);
    s->dol = build_grad(b, "do_latent", b->rows, heads * d->m.kv_rank);
    struct tensor cache = tensor_4d(NULL, b->dev->real, b->batch, b->cache_len, 1, key);
    s->key_cache = b->mode == BUILD_DECODE ? build_table(b, "key_cache", cache, NULL, NULL) : NO_SLOT;
}

/* [norm(latent) | rotary key] from the down-projection. */
static void declare_keys(struct build *b, const struct dsa *d, struct dsa_slots *s, const struct core_io *io)
{
    struct graph *g = b->g;
    const struct mla *m = &d->m;
    struct linear down = mla_down(b, m, &s->m, io);
    linear_declare(b, "kv_down", &down);
    struct param p = param_vector(MLA_LATENT_NORM, m->kv_rank, m->zero_centered ? INIT_ZERO : INIT_ONE);
    param_replicate(&p, GRAD_OVER_HEADS);
    struct weight w = build_weight(b, &p);
    slot_id rstd = graph_slot(g, "kv_norm_rstd", tensor_1d(NULL, b->dev->wide, b->rows));
    double elems = (double)(b->rows * (m->kv_rank + m->rope)), size = (double)dtype_bytes(b->dev->real);
    struct tensor x = mla_columns(of(g, s->m.kvd), 0, m->kv_rank);
    int n = graph_node(g, "kv_norm", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = x, .w = of(g, w.w), .y = mla_columns(of(g, s->keys), 0, m->kv_rank),
             .rstd = of(g, rstd), .eps = m->eps, .zero_centered = m->zero_centered);
    mla_rotate(b, n, &s->m, mla_heads(mla_shared_key(m, of(g, s->m.kvd)), 1, m->rope),
               mla_heads(mla_shared_key(m, of(g, s->keys)), 1, m->rope));
    graph_cost(g, n, PH_FWD, 5 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, s->keys);
    GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = mla_columns(of(g, s->dkeys), 0, m->kv_rank), .x = x, .w = of(g, w.w),
             .rstd = of(g, rstd), .dx = mla_columns(of(g, s->m.dkvd), 0, m->kv_rank), .dw = of(g, w.dw),
             .zero_centered = m->zero_centered);
    mla_unrotate(b, n, &s->m, mla_heads(mla_shared_key(m, of(g, s->dkeys)), 1, m->rope),
                 mla_heads(mla_shared_key(m, of(g, s->m.dkvd)), 1, m->rope));
    graph_cost(g, n, PH_BWD, 10 * elems, 3 * elems * size);
}

static double map_flops(const struct build *b, const struct dsa *d, int64_t width)
{
    return 2.0 * (double)b->rows * (double)(d->m.heads * width) * (double)d->m.kv_rank;
}

/* Queries in the latents' space. The weight's gradient is that of both its halves: an op that writes all of it. */
static void declare_absorb(struct build *b, const struct dsa *d, struct dsa_slots *s)
{
    struct graph *g = b->g;
    const struct mla *m = &d->m;
    s->up = mla_up_weight(b, m);
    struct tensor w = up_rows(d, of(g, s->up.w), 0, m->nope);
    int n = graph_node(g, "absorb", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, headmm_fwd, .x = plain_q(d, of(g, s->m.q)), .w = w,
             .y = mla_columns(absorbed(d, of(g, s->qa)), 0, m->kv_rank));
    mla_rotate(b, n, &s->m, mla_rotary(m, of(g, s->m.q)), mla_columns(absorbed(d, of(g, s->qa)), m->kv_rank, m->rope));
    graph_cost(g, n, PH_FWD, map_flops(b, d, m->nope), 0);
    if (!training(b))
        return;
    struct tensor dqa = mla_columns(absorbed(d, of(g, s->dqa)), 0, m->kv_rank);
    graph_again(g, n, s->qa);
    GRAPH_OP(g, n, PH_BWD, headmm_bwd, .dy = dqa, .x = plain_q(d, of(g, s->m.q)), .w = w,
             .dx = plain_q(d, of(g, s->m.dq)));
    mla_unrotate(b, n, &s->m, mla_columns(absorbed(d, of(g, s->dqa)), m->kv_rank, m->rope),
                 mla_rotary(m, of(g, s->m.dq)));
    graph_cost(g, n, PH_BWD, map_flops(b, d, m->nope), 0);
    GRAPH_OP(g, n, PH_DW, headmm_dw, .x = plain_q(d, of(g, s->m.q)), .dy = dqa,
             .x2 = mla_heads(of(g, s->m.d_o), m->heads, m->v), .dy2 = latent_out(d, of(g, s->ol)),
             .dw = up_heads(d, of(g, s->up.dw)));
    graph_cost(g, n, PH_DW, map_flops(b, d, m->nope + m->v), 0);
}

/* ---- the indexer ----------------------------------------------------------------------------- */

static void index_slots(struct build *b, const struct dsa *d, struct dsa_slots *s)
{
    struct tensor row = tensor_1d(NULL, b->dev->wide, b->rows);
    s->iq = build_real(b, "index_q", b->rows, d->heads * d->dim);
    s->ikd = build_real(b, "index_k_in", b->rows, d->dim);
    if (s->divided)
        s->far_index = context_rows(b, "index_k", d->dim);
    s->ik = s->divided ? s->far_index.own : build_real(b, "index_k", b->rows, d->dim);
    s->iw = build_wide(b, "index_w", b->rows, d->heads);
    s->mean = graph_slot(b->g, "index_mean", row);
    s->rstd = graph_slot(b->g, "index_rstd", row);
    s->diq = d->learns ? build_grad(b, "dindex_q", b->rows, d->heads * d->dim) : NO_SLOT;
    s->dikd = d->learns ? build_grad(b, "dindex_k_in", b->rows, d->dim) : NO_SLOT;
    s->dik = !d->learns ? NO_SLOT : s->divided ? s->far_index.down : build_grad(b, "dindex_k", b->rows, d->dim);
    s->diw = d->learns ? build_grad(b, "dindex_w", b->rows, d->heads) : NO_SLOT;
    struct tensor cache = tensor_4d(NULL, b->dev->real, b->batch, b->cache_len, 1, d->dim);
    s->index_cache = b->mode == BUILD_DECODE ? build_table(b, "index_cache", cache, NULL, NULL) : NO_SLOT;
}

static void index_rotate(struct build *b, int n, const struct dsa_slots *s, struct tensor x)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = x, .y = x, .cos = of(g, s->m.cos), .sin = of(g, s->m.sin),
             .pos = of(g, b->in.pos), .interleaved = b->cfg->model.dsa_indexer_rope_interleaved);
}

static void index_unrotate(struct build *b, int n, const struct dsa_slots *s, struct tensor dy)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = dy, .dx = dy, .cos = of(g, s->m.cos), .sin = of(g, s->m.sin),
             .pos = of(g, b->in.pos), .interleaved = b->cfg->model.dsa_indexer_rope_interleaved);
}

/* A projection of the indexer, whose result (part of it) is rotated at once. Nothing goes back into what it reads. */
static void index_linear(struct build *b, const char *name, const struct dsa_slots *s, struct linear l, const char *key,
                         struct tensor rotated, bool runs)
{
    struct param p = param_matrix(key, l.out, l.in, b->cfg->model.init_std);
    param_replicate(&p, GRAD_OF_LOSS);
    l.w = build_weight(b, &p);
    l.bias = no_weight();
    l.dx = NO_SLOT;
    l.plain = true;
    if (!runs)
        return;
    int n = linear_forward(b, name, &l);
    if (rotated.data != NULL)
        index_rotate(b, n, s, rotated);
    if (l.dy != NO_SLOT)
        linear_backward(b, n, &l);
    else if (training(b))
        graph_again(b->g, n, l.y);
}

static void index_norm(struct build *b, const struct dsa *d, struct dsa_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    struct param gain = param_vector("self_attention.core_attention.indexer.k_norm.weight", d->dim, INIT_ONE);
    struct param bias = param_vector("self_attention.core_attention.indexer.k_norm.bias", d->dim, INIT_ZERO);
    param_replicate(&gain, GRAD_OF_LOSS);
    param_replicate(&bias, GRAD_OF_LOSS);
    s->k_norm = build_weight(b, &gain);
    s->k_bias = build_weight(b, &bias);
    if (!d->selects)
        return;
    double elems = (double)(b->rows * d->dim), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "index_norm", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, layernorm_fwd, .x = of(g, s->ikd), .w = of(g, s->k_norm.w), .b = of(g, s->k_bias.w),
             .y = of(g, s->ik), .mean = of(g, s->mean), .rstd = of(g, s->rstd),
             .eps = c->dsa_indexer_k_norm_epsilon > 0 ? c->dsa_indexer_k_norm_epsilon : c->norm_eps);
    index_rotate(b, n, s, mla_columns(mla_heads(of(g, s->ik), 1, d->dim), 0, d->m.rope));
    graph_cost(g, n, PH_FWD, 8 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, s->ik);
    if (!d->learns)
        return;
    index_unrotate(b, n, s, mla_columns(mla_heads(of(g, s->dik), 1, d->dim), 0, d->m.rope));
    GRAPH_OP(g, n, PH_BWD, layernorm_bwd, .dy = of(g, s->dik), .x = of(g, s->ikd), .w = of(g, s->k_norm.w),
             .mean = of(g, s->mean), .rstd = of(g, s->rstd), .dx = of(g, s->dikd), .dw = of(g, s->k_norm.dw),
             .db = of(g, s->k_bias.dw));
    graph_cost(g, n, PH_BWD, 12 * elems, 3 * elems * size);
}

static void declare_indexer(struct build *b, const struct dsa *d, struct dsa_slots *s, const struct core_io *io)
{
    int64_t hidden = b->cfg->model.hidden;
    if (d->selects)
        index_slots(b, d, s);
    struct tensor none = {0}, q = d->selects ? mla_columns(index_heads(d, of(b->g, s->iq)), 0, d->m.rope) : none;
    struct linear to_q = {.x = s->m.q_in,
                          .y = s->iq,
                          .dy = s->diq,
                          .in = d->m.q_rank > 0 ? d->m.q_rank : hidden,
                          .out = d->heads * d->dim};
    struct linear to_k = {.x = io->h, .y = s->ikd, .dy = s->dikd, .in = hidden, .out = d->dim};
    struct linear to_w = {.x = io->h, .y = s->iw, .dy = s->diw, .in = hidden, .out = d->heads};
    index_linear(b, "index_q", s, to_q, "self_attention.core_attention.indexer.linear_wq_b.weight", q, d->selects);
    index_linear(b, "index_k", s, to_k, "self_attention.core_attention.indexer.linear_wk.weight", none, d->selects);
    index_norm(b, d, s);
    if (d->selects && s->divided)
        context_gather(b, "index_rows", &s->far_index);
    index_linear(b, "index_w", s, to_w, "self_attention.core_attention.indexer.linear_weights_proj.weight", none,
                 d->selects);
}

/* Indexer keys of all tokens that this rank's queries may see, and attention's: [B, Skv, ...]. */
static struct tensor all_index_keys(const struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    return mla_by_sequence(&d->m, of(b->g, s->divided ? s->far_index.all : s->ik));
}
static struct tensor all_keys(const struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    return mla_by_sequence(&d->m, of(b->g, s->divided ? s->far_keys.all : s->keys));
}

/* Indexer keys that a query may be compared with: those of the sequence, or of the cache. */
static struct tensor index_keys(const struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    struct tensor t = of(b->g, s->index_cache);
    return s->index_cache != NO_SLOT ? tensor_3d(t.data, t.dtype, b->batch, b->cache_len, d->dim)
                                     : all_index_keys(b, d, s);
}

static void declare_select(struct build *b, const struct dsa *d, struct dsa_slots *s)
{
    struct graph *g = b->g;
    s->idx = graph_slot(g, "idx", tensor_3d(NULL, DT_I32, b->batch, b->seq, d->topk));
    int n = graph_node(g, "select", LANE_COMPUTE, NULL);
    if (s->index_cache != NO_SLOT) {
        struct tensor x = rows(d, mla_heads(of(g, s->ik), 1, d->dim));
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = x, .cache = of(g, s->index_cache), .start = of(g, b->in.start));
    }
    GRAPH_OP(g, n, PH_FWD, index_topk, .q = rows(d, index_heads(d, of(g, s->iq))), .k = index_keys(b, d, s),
             .w = rows(d, of(g, s->iw)), .doc_start = mla_documents(b),
             .start = of(g, s->divided ? s->first : b->in.start), .idx = of(g, s->idx), .topk = d->topk, .ratio = 1,
             .relu = b->cfg->model.dsa_indexer_scoring_relu);
    graph_cost(g, n, PH_FWD, (double)b->rows * (double)(2 * context_seen(b) - b->seq) * (double)(d->heads * d->dim), 0);
    if (training(b))
        graph_again(g, n, s->idx);
}

/* ---- attention over lists of keys ------------------------------------------------------------ */

static void declare_core(struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    struct graph *g = b->g;
    const struct mla *m = &d->m;
    int64_t key = m->kv_rank + m->rope;
    double flops = 2.0 * (double)b->rows * (double)d->topk * (double)m->heads * (double)(key + m->kv_rank);
    struct tensor q = rows(d, absorbed(d, of(g, s->qa))), kv = all_keys(b, d, s),
                  o = rows(d, latent_out(d, of(g, s->ol)));
    int n = graph_node(g, "core", LANE_COMPUTE, NULL);
    if (s->key_cache != NO_SLOT) {
        struct tensor cache = of(g, s->key_cache);
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = rows(d, mla_heads(of(g, s->keys), 1, key)), .cache = cache,
                 .start = of(g, b->in.start));
        kv = tensor_3d(cache.data, cache.dtype, b->batch, b->cache_len, key);
    }
    GRAPH_OP(g, n, PH_FWD, sparse_fwd, .q = q, .kv = kv, .idx = of(g, s->idx), .o = o, .lse = of(g, s->m.lse),
             .scale = m->scale, .dv = m->kv_rank);
    graph_cost(g, n, PH_FWD, flops, 0);
    if (!training(b))
        return;
    graph_again(g, n, s->ol);
    graph_again(g, n, s->m.lse);
    GRAPH_OP(g, n, PH_BWD, sparse_bwd, .d_o = rows(d, latent_out(d, of(g, s->dol))), .q = q, .kv = kv,
             .idx = of(g, s->idx), .o = o, .lse = of(g, s->m.lse), .dq = rows(d, absorbed(d, of(g, s->dqa))),
             .dkv = mla_by_sequence(m, of(g, s->divided ? s->far_keys.dall : s->dkeys)), .scale = m->scale,
             .dv = m->kv_rank);
    graph_cost(g, n, PH_BWD, 2.5 * flops, 0);
}

/* Latent outputs to values: each head by its rows of the up-projection. */
static void declare_expand(struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    struct graph *g = b->g;
    const struct mla *m = &d->m;
    struct tensor w = up_rows(d, of(g, s->up.w), m->nope, m->v), x = latent_out(d, of(g, s->ol));
    int n = graph_node(g, "expand", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, headmm_fwd, .x = x, .w = w, .y = mla_heads(of(g, s->m.o), m->heads, m->v), .trans = true);
    graph_cost(g, n, PH_FWD, map_flops(b, d, m->v), 0);
    if (!training(b))
        return;
    graph_again(g, n, s->m.o);
    GRAPH_OP(g, n, PH_BWD, headmm_bwd, .dy = mla_heads(of(g, s->m.d_o), m->heads, m->v), .x = x, .w = w,
             .dx = latent_out(d, of(g, s->dol)), .trans = true);
    graph_cost(g, n, PH_BWD, map_flops(b, d, m->v), 0);
}

/* Queries of every sequence whose attention is looked at in full, for the metric. */
enum { RECALL_QUERIES = 16 };

/* Queries and keys of the attention that the indexer learns from: absorbed, or of every head. */
static struct tensor main_queries(const struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    return d->sparse ? rows(d, absorbed(d, of(b->g, s->qa))) : rows(d, mla_keyed(&d->m, of(b->g, s->m.q)));
}
static struct tensor main_keys(const struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    struct tensor t = of(b->g, d->sparse ? s->divided ? s->far_keys.all : s->keys : s->m.k);
    return mla_by_sequence(&d->m, d->sparse ? mla_heads(t, 1, d->m.kv_rank + d->m.rope) : mla_keyed(&d->m, t));
}

static slot_id declare_loss_metric(struct build *b)
{
    slot_id loss = build_metric(b, "indexer loss", 1);
    if (loss != NO_SLOT) {
        struct metric *m = &b->metrics->m[b->metrics->n - 1];
        m->objective = true;
        m->only = ".indexer.";
    }
    return loss;
}

/* Which keys the loss goes over is the layer's stage: the selected ones, whose attention weights sum to 1 already; else
 * all that a query sees. */
static void declare_loss(struct build *b, const struct dsa *d, const struct dsa_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    bool listed = d->sparse && c->dsa_indexer_use_sparse_loss, known = listed || !d->sparse;
    struct tensor mq = main_queries(b, d, s), mk = main_keys(b, d, s);
    int n = graph_node(g, "index_loss", LANE_COMPUTE, NULL);
    if (s->idx != NO_SLOT)
        GRAPH_OP(g, n, PH_FWD, index_recall, .mq = mq, .mk = mk, .idx = of(g, s->idx), .doc_start = mla_documents(b),
                 .recall = of(g, build_metric(b, "indexer recall", 1)), .softmax_scale = d->m.scale, .ratio = 1,
                 .start = of(g, s->first), .every = max_i64(1, b->whole_seq / RECALL_QUERIES));
    if (!d->learns)
        return;
    GRAPH_OP(g, n, PH_BWD, index_loss, .q = rows(d, index_heads(d, of(g, s->iq))), .k = all_index_keys(b, d, s),
             .w = rows(d, of(g, s->iw)), .mq = mq, .mk = mk, .lse = known ? of(g, s->m.lse) : (struct tensor){0},
             .idx = listed ? of(g, s->idx) : (struct tensor){0}, .doc_start = mla_documents(b),
             .start = of(g, s->first), .scale = of(g, b->in.mb_share), .loss = of(g, declare_loss_metric(b)),
             .dq = rows(d, index_heads(d, of(g, s->diq))),
             .dk = mla_by_sequence(&d->m, of(g, s->divided ? s->far_index.dall : s->dik)), .dw = rows(d, of(g, s->diw)),
             .coeff = c->dsa_indexer_loss_coeff, .score_scale = d->score_scale, .softmax_scale = d->m.scale, .ratio = 1,
             .relu = c->dsa_indexer_scoring_relu);
    index_unrotate(b, n, s, mla_columns(index_heads(d, of(g, s->diq)), 0, d->m.rope));
    double keys = listed ? (double)d->topk : (double)context_seen(b) - (double)b->seq / 2;
    graph_cost(g, n, PH_BWD, 2 * (double)b->rows * keys * (double)(3 * d->heads * d->dim + d->m.heads * mq.dim[3]), 0);
}

static struct dsa sizes_of(const struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    int64_t longest = b->mode == BUILD_DECODE ? b->cache_len : b->whole_seq;
    struct dsa d = {.m = mla_of(b),
                    .heads = c->dsa_indexer_n_heads,
                    .dim = c->dsa_indexer_head_dim,
                    .topk = c->dsa_indexer_topk,
                    .indexer = in_prediction(b) || source_of(c, b->number) == b->number};
    bool fewer = longest > d.topk;
    d.score_scale = 1 / sqrt((double)(d.heads * d.dim));
    d.sparse = fewer && !c->dsa_dense_warmup;
    d.learns = d.indexer && training(b);
    d.selects = d.indexer && (fewer ? d.sparse || training(b) : d.learns);
    d.m.plain_up = true;
    d.m.absorbed = d.sparse;
    return d;
}

static int dsa_declare(struct build *b, struct core_io *io)
{
    struct dsa sizes = sizes_of(b), *d = &sizes;
    struct dsa_slots s = {.idx = NO_SLOT,
                          .index_cache = NO_SLOT,
                          .key_cache = NO_SLOT,
                          .iq = NO_SLOT,
                          .ikd = NO_SLOT,
                          .iw = NO_SLOT,
                          .diq = NO_SLOT,
                          .dikd = NO_SLOT,
                          .diw = NO_SLOT,
                          .divided = context_divides(b),
                          .first = context_first(b)};
    bool fewer = d->topk < (b->mode == BUILD_DECODE ? b->cache_len : b->whole_seq);
    TRY(mla_tables(b, "dsa", &d->m, &s.m));
    mla_slots_of(b, &d->m, &s.m);
    io->f = build_real(b, "out", b->rows, b->cfg->model.hidden);
    graph_sum(b->g, io->dh);
    mla_query(b, &d->m, &s.m, io);
    if (d->sparse) {
        absorbed_slots(b, d, &s);
        declare_keys(b, d, &s, io);
        if (s.divided)
            context_gather(b, "key_rows", &s.far_keys);
        declare_absorb(b, d, &s);
    } else {
        mla_expanded(b, &d->m, &s.m, io);
    }
    if (d->indexer)
        declare_indexer(b, d, &s, io);
    if (d->selects && fewer) {
        declare_select(b, d, &s);
        b->shared_index = (struct shared_index){.idx = s.idx, .number = b->number, .chunk = b->g->chunk};
    } else if (fewer && !d->indexer && (d->sparse || training(b))) {
        TRY(find_shared(b, &b->cfg->model, &s));
    }
    if (d->sparse) {
        declare_core(b, d, &s);
        declare_expand(b, d, &s);
    }
    if (training(b))
        declare_loss(b, d, &s);
    mla_output(b, &d->m, &s.m, io);
    return b->g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool has_sparse(const struct config *c) { return strchr(c->model.pattern, 'D') != NULL; }

static bool sparse_without_rope(const struct config *c) { return has_sparse(c) && c->model.rope == CFG_ROPE_NONE; }
static bool index_head_too_narrow(const struct config *c)
{
    return has_sparse(c) && c->model.dsa_indexer_head_dim < c->model.mla_rope;
}
static bool warmup_with_adapters(const struct config *c)
{
    return has_sparse(c) && c->model.dsa_dense_warmup && c->lora.rank > 0;
}
static bool shares(const struct config *c) { return c->model.dsa_indexer_topk_freq > 1; }
static bool not_warming_up(const struct config *c) { return !c->model.dsa_dense_warmup; }

/* clang-format off */
static const struct option_use dsa_uses[] = {
    MLA_USES,
    {"model.dsa_indexer_n_heads", NULL, NULL},
    {"model.dsa_indexer_head_dim", NULL, NULL},
    {"model.dsa_indexer_topk", NULL, NULL},
    {"model.dsa_indexer_topk_freq", NULL, NULL},
    {"model.dsa_indexer_skip_topk_offset", shares, "model.dsa_indexer_topk_freq above 1"},
    {"model.dsa_indexer_loss_coeff", NULL, NULL},
    {"model.dsa_indexer_use_sparse_loss", not_warming_up, "model.dsa_dense_warmup = off"},
    {"model.dsa_dense_warmup", NULL, NULL},
    {"model.dsa_indexer_rope_interleaved", NULL, NULL},
    {"model.dsa_indexer_scoring_relu", NULL, NULL},
    {"model.dsa_indexer_k_norm_epsilon", NULL, NULL},
};
static const struct rule dsa_rules[] = {
    {"sparse-needs-rope", sparse_without_rope,
     "sparse attention (D) has rotary channels of its own: model.rope cannot be none",
     {"model.rope", "model.pattern", "model.mla_rope"}},
    {"indexer-holds-rope", index_head_too_narrow,
     "an indexer head has the rotary channels among its own: model.dsa_indexer_head_dim must be at least "
     "model.mla_rope",
     {"model.dsa_indexer_head_dim", "model.mla_rope"}},
    {"warmup-without-adapters", warmup_with_adapters,
     "while indexers warm up all else is frozen, adapters would be trained by nothing",
     {"model.dsa_dense_warmup", "lora.rank"}},
};
static const struct tiny_size dsa_tiny[] = {
    {"model.dsa_indexer_n_heads", 3, false}, {"model.dsa_indexer_head_dim", 6, true},
    {"model.dsa_indexer_topk", 6, true},     {"model.dsa_indexer_topk_freq", 1, true},
    {"model.dsa_indexer_skip_topk_offset", 0, true},
};
/* clang-format on */

/* Dense up to topk tokens. Beyond, each query reads topk keys of latent width, and the indexer scores all of them. */
static double dsa_flops(const struct config *cfg, int64_t seq)
{
    const struct config_model *c = &cfg->model;
    double heads = (double)c->heads, index = (double)(c->dsa_indexer_n_heads * c->dsa_indexer_head_dim),
           d = (double)c->hidden, s = (double)seq, topk = (double)c->dsa_indexer_topk,
           rank = (double)(c->mla_q_rank > 0 ? c->mla_q_rank : c->hidden);
    double indexer = 2 * (rank * index + d * (double)(c->dsa_indexer_head_dim + c->dsa_indexer_n_heads)) + s * index;
    if (s <= topk || c->dsa_dense_warmup)
        return mla_linear_flops(cfg) + s * heads * (double)(c->mla_nope + c->mla_rope + c->mla_v) + indexer;
    double pairs = topk * (s - topk / 2) / s; /* the mean of min(topk, keys seen) */
    return mla_linear_flops(cfg) + 2 * pairs * heads * (double)(2 * c->mla_kv_rank + c->mla_rope) + indexer;
}

static struct kind_sizes dsa_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double queries = (double)m->heads * (double)(m->mla_kv_rank + m->mla_rope),
           index = (double)m->dsa_indexer_n_heads * (double)m->dsa_indexer_head_dim;
    double wide = fmax(fmax(queries, index), (double)m->dsa_indexer_topk);
    return (struct kind_sizes){.token = wide, .weight = index * (double)max_i64(m->hidden, m->mla_q_rank)};
}

/* Sequences that are not longer than what is selected go through dense latent attention. */
static void dsa_kernels(const struct kernel_report *r)
{
    const struct config_model *c = &r->cfg->model;
    if (r->cfg->train.seq <= c->dsa_indexer_topk || c->dsa_dense_warmup)
        kernel_line_attention(r, &(struct attention_sizes){.what = "latent attention",
                                                           .width = c->mla_nope + c->mla_rope,
                                                           .values = c->mla_v,
                                                           .keys = c->heads});
    kernel_lines_sparse(r, &(struct sparse_sizes){.what = "sparse attention",
                                                  .width = c->mla_kv_rank + c->mla_rope,
                                                  .values = c->mla_kv_rank,
                                                  .index_heads = c->dsa_indexer_n_heads,
                                                  .index_dim = c->dsa_indexer_head_dim});
}

const struct core_kind core_dsa = {
    .symbol = 'D',
    .name = "sparse attention",
    .title = "sparse attention",
    .norm_key = "input_layernorm.weight",
    .options = {KIND_ROWS(uses, dsa_uses), KIND_ROWS(rules, dsa_rules), KIND_ROWS(tiny, dsa_tiny),
                .refused = {"model.attn_gate", "model.attn_window", "model.attn_window_skip", "model.attn_sink",
                            "model.softmax_scale", "model.qkv_bias", "model.attn_bias", "model.rope_percent",
                            "model.no_rope_freq", "model.norm", "model.position", "model.attention_dropout"}},
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true},
    .recompute = {{"core_attn", {"dsa.o", "dsa.lse", "dsa.o_latent"}},
                  {"mla_up_proj", {"dsa.q", "dsa.kv", "dsa.k", "dsa.q_absorbed"}}},
    .divides_sequence = true,
    .divides_weights = true,
    .flops = dsa_flops,
    .sizes = dsa_sizes,
    .kernels = dsa_kernels,
    .declare = dsa_declare,
};
