/* The attention cores of DeepSeek-V4: compressed sparse attention, symbol 'C', heavily compressed attention, 'H', and
 * its sliding window alone, 'W' (symbols as in Megatron's hybrid patterns).
 *
 * Shapes: T rows, H heads, D = mla_v channels of a head, r = mla_rope of them rotary (the last ones, in pairs of
 * neighbours), Rq = rank of the query latent, m = tokens of an entry, E = seq / m entries, g groups of outputs of rank
 * Ro.
 *   ql   [T, Rq]   = norm(h Wqd^T);  q [T, H D] = ql Wqu^T, each head divided by its RMS, rotated
 *   kv   [T, D]    = norm(h Wkv^T), rotated: one head, key and value at once
 *   C, H: entry [B E, D] = norm(compress(h Wckv^T, h Wcgate^T + ape)), rotated at the position of its window's first
 *        token; C: windows overlap, both projections have 2 D channels (ops/compress)
 *   C:   I[t, j] = (Hi di)^-1/2 sum_h iw[t, h] relu(iq[t, h] . ik[j]), iq = ql Wi^T and ik an entry of a compressor of
 *        its own with di channels, both rotated; iw = h Ww^T. The dsa_indexer_topk entries of largest I of those that
 *        are complete are read; below that number all are
 *   o    [T, H D]  = attention(q, [kv of the last csa_window_size tokens | entries]) with a learned sink for each head,
 *        one softmax over all; then rotated back by the query's position, so that it depends on distances alone
 *   f    [T, d]    = (o's groups of H D / g channels, each by its own [Ro, H D / g]) Wo^T
 * Layers with entries rotate with csa_compress_rotary_base and model.rope_scaling, W layers with rope_base alone.
 * YaRN's factor on cos and sin is never applied.
 *
 * Keys are one array, tokens first, which `sparse` reads by lists (ops/keylist). The indexer is trained as that of D
 * (dsa.c): by a KL divergence from the attention that entries get, detached from all else, as in Megatron; transformers
 * gives it no gradient. Packed documents have windows of their own. Decoding caches the array of keys, the indexer's
 * entries, and projections of the tokens of windows that are not complete.
 *
 * Under tensor parallelism heads with their sinks and groups of outputs are divided; latents, keys, entries and the
 * indexer are made by every rank, so that all select the same entries. Attention that entries get beside the window is
 * no fixed share of a head's, so a rank's loss counts, row by row, by its share of it (index_mass): the mean of the
 * ranks' gradients is that for all heads. Under context parallelism a rank takes the last window of tokens and the
 * inputs of its first windows' entries from the rank before, and gathers entries of all ranks before. Parts are whole
 * entries, so an entry is made by the rank of its window's last token.
 *
 * Nodes: q_down, q_norm, q_up, q_unit, kv_proj, kv_norm, (kv_tail, kv_halo,) comp_kv, comp_gate, (comp_tail,
 * comp_halo,) comp_pool, (entry_rows,) keys, (index_q, index_w, index_comp_kv, index_comp_gate, index_comp_pool,
 * index_rows, select,) core, (index_loss, index_masses, index_mass,) o_group, proj. */
#include "layers/csa_int.h"
#include "ops/cache/cache.h"
#include "ops/headmm/headmm.h"
#include "ops/keylist/keylist.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/sparse/sparse.h"

#include <math.h>
#include <string.h>

/* ---- pieces ---------------------------------------------------------------------------------- */

static void fill_cos(struct tensor *host, const void *arg)
{
    struct tensor none = {0};
    none.dim[0] = host->dim[0];
    rope_tables(arg, host, &none);
}

static void fill_sin(struct tensor *host, const void *arg)
{
    struct tensor none = {0};
    none.dim[0] = host->dim[0];
    rope_tables(arg, &none, host);
}

static int declare_tables(struct build *b, const struct csa *c, struct csa_slots *s)
{
    struct rope_config *r = graph_own(b->g, sizeof *r);
    if (r == NULL)
        return ST_NOMEM;
    *r = rope_from_config(b->cfg, c->rope);
    if (c->ratio > 0)
        r->base = b->cfg->model.csa_compress_rotary_base;
    else
        r->scaling = ROPE_PLAIN;
    r->mscale = r->mscale_all_dim = 1; /* their quotient is 1 */
    TRY(rope_config_check(r, b->e));
    struct tensor shape = tensor_2d(NULL, b->dev->wide, max_i64(b->cfg->train.seq, b->cache_len), c->rope / 2);
    graph_scope(b->g, -1, c->ratio > 0 ? "csa_rope" : "window_rope");
    s->cos = build_table(b, "cos", shape, fill_cos, r);
    s->sin = build_table(b, "sin", shape, fill_sin, r);
    graph_scope(b->g, b->layer, "csa");
    return b->g->err.code;
}

void csa_rotate(struct build *b, int n, const struct csa_slots *s, slot_id pos, struct tensor x)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = x, .y = x, .cos = of(g, s->cos), .sin = of(g, s->sin), .pos = of(g, pos),
             .interleaved = true);
}

void csa_unrotate(struct build *b, int n, const struct csa_slots *s, slot_id pos, struct tensor dy)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = dy, .dx = dy, .cos = of(g, s->cos), .sin = of(g, s->sin), .pos = of(g, pos),
             .interleaved = true);
}

/* The parameter and, where y is a slot, the forward phase. */
int csa_linear_forward(struct build *b, const struct csa_linear *d, struct linear *l)
{
    int64_t all = d->heads > 0 ? d->out * b->mesh->tp : d->out;
    struct param p = param_matrix(d->key, all, d->in, b->cfg->model.init_std);
    if (d->heads > 0)
        param_split(&p, 0, UNIT_HEADS, d->heads);
    else
        param_replicate(&p, d->grad);
    *l = (struct linear){.x = d->x,
                         .y = d->y,
                         .dy = d->dy,
                         .dx = d->dx,
                         .w = d->plain ? build_weight(b, &p) : build_linear_weight(b, &p),
                         .bias = no_weight(),
                         .in = d->in,
                         .out = d->out,
                         .plain = d->plain};
    return d->y != NO_SLOT ? linear_forward(b, d->name, l) : -1;
}

void csa_linear_declare(struct build *b, const struct csa_linear *d)
{
    struct linear l;
    int n = csa_linear_forward(b, d, &l);
    if (d->dy != NO_SLOT)
        linear_backward(b, n, &l);
    else if (training(b))
        graph_again(b->g, n, d->y);
}

struct weight csa_gain(struct build *b, const struct csa *c, const char *key, int64_t n, enum split_grad grad)
{
    struct param p = param_vector(key, n, c->zero_centered ? INIT_ZERO : INIT_ONE);
    param_replicate(&p, grad);
    return build_weight(b, &p);
}

/* y = norm(x) with a gain, rotated where y is a key. */
struct normed {
    const char *name, *key;
    slot_id x, dx, y, dy;
    bool rotated;
};
static void declare_normed(struct build *b, const struct csa *c, const struct csa_slots *s, const struct normed *d)
{
    struct graph *g = b->g;
    char text[32];
    struct tensor x = of(g, d->x);
    double elems = (double)tensor_elems(&x), size = (double)dtype_bytes(b->dev->real);
    snprintf(text, sizeof text, "%s_rstd", d->name);
    struct weight w = csa_gain(b, c, d->key, x.dim[1], GRAD_OVER_HEADS);
    slot_id rstd = graph_slot(g, text, tensor_1d(NULL, b->dev->wide, b->rows));
    int n = graph_node(g, d->name, LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = x, .w = of(g, w.w), .y = of(g, d->y), .rstd = of(g, rstd),
             .eps = c->latent_eps, .zero_centered = c->zero_centered);
    if (d->rotated)
        csa_rotate(b, n, s, b->in.pos, csa_rotary(c, of(g, d->y), 1));
    graph_cost(g, n, PH_FWD, 4 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, d->y);
    if (d->rotated)
        csa_unrotate(b, n, s, b->in.pos, csa_rotary(c, of(g, d->dy), 1));
    GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = of(g, d->dy), .x = x, .w = of(g, w.w), .rstd = of(g, rstd),
             .dx = of(g, d->dx), .dw = of(g, w.dw), .zero_centered = c->zero_centered);
    graph_cost(g, n, PH_BWD, 9 * elems, 3 * elems * size);
}

/* ---- queries and keys ------------------------------------------------------------------------ */

static void declare_unit(struct build *b, const struct csa *c, const struct csa_slots *s)
{
    struct graph *g = b->g;
    slot_id rstd = graph_slot(g, "q_rstd", tensor_1d(NULL, b->dev->wide, b->rows * c->heads));
    double elems = (double)(b->rows * c->heads * c->width), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "q_unit", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = csa_heads(of(g, s->qp), c->heads), .y = csa_heads(of(g, s->q), c->heads),
             .rstd = of(g, rstd), .eps = c->eps);
    csa_rotate(b, n, s, b->in.pos, csa_rotary(c, of(g, s->q), c->heads));
    graph_cost(g, n, PH_FWD, 4 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, s->q);
    csa_unrotate(b, n, s, b->in.pos, csa_rotary(c, of(g, s->dq), c->heads));
    GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = csa_heads(of(g, s->dq), c->heads), .x = csa_heads(of(g, s->qp), c->heads),
             .rstd = of(g, rstd), .dx = csa_heads(of(g, s->dqp), c->heads));
    graph_cost(g, n, PH_BWD, 8 * elems, 3 * elems * size);
}

static void declare_query(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io)
{
    int64_t wide = c->heads * c->width;
    slot_id down = build_real(b, "q_down", b->rows, c->q_rank), ddown = build_grad(b, "dq_down", b->rows, c->q_rank),
            dlatent = build_grad(b, "dq_latent", b->rows, c->q_rank);
    s->q_in = build_real(b, "q_latent", b->rows, c->q_rank);
    s->qp = build_real(b, "q_up", b->rows, wide);
    s->dqp = build_grad(b, "dq_up", b->rows, wide);
    s->q = build_real(b, "q", b->rows, wide);
    s->dq = build_grad(b, "dq", b->rows, wide);
    csa_linear_declare(b, &(struct csa_linear){.name = "q_down",
                                               .key = "self_attention.linear_q_down_proj.weight",
                                               .x = io->h,
                                               .y = down,
                                               .dy = ddown,
                                               .dx = io->dh,
                                               .in = b->cfg->model.hidden,
                                               .out = c->q_rank,
                                               .grad = GRAD_OVER_HEADS});
    declare_normed(b, c, s,
                   &(struct normed){.name = "q_norm",
                                    .key = "self_attention.q_layernorm.weight",
                                    .x = down,
                                    .dx = ddown,
                                    .y = s->q_in,
                                    .dy = dlatent});
    csa_linear_declare(b, &(struct csa_linear){.name = "q_up",
                                               .key = "self_attention.linear_q_up_proj.weight",
                                               .x = s->q_in,
                                               .y = s->qp,
                                               .dy = s->dqp,
                                               .dx = dlatent,
                                               .in = c->q_rank,
                                               .out = wide,
                                               .heads = c->all_heads});
    declare_unit(b, c, s);
}

static void declare_kv(struct build *b, const struct csa *c, struct csa_slots *s, const struct core_io *io)
{
    slot_id down = build_real(b, "kv_in", b->rows, c->width), ddown = build_grad(b, "dkv_in", b->rows, c->width);
    s->kv = build_real(b, "kv", b->rows, c->width);
    s->dkv = build_grad(b, "dkv", b->rows, c->width);
    csa_linear_declare(b, &(struct csa_linear){.name = "kv_proj",
                                               .key = "self_attention.linear_kv_proj.weight",
                                               .x = io->h,
                                               .y = down,
                                               .dy = ddown,
                                               .dx = io->dh,
                                               .in = b->cfg->model.hidden,
                                               .out = c->width,
                                               .grad = GRAD_OVER_HEADS});
    declare_normed(b, c, s,
                   &(struct normed){.name = "kv_norm",
                                    .key = "self_attention.kv_layernorm.weight",
                                    .x = down,
                                    .dx = ddown,
                                    .y = s->kv,
                                    .dy = s->dkv,
                                    .rotated = true});
}

/* Rows [first, first + n) of every sequence of the array of keys [B, tokens + entries, D]. */
static struct tensor key_part(const struct csa *c, struct tensor keys, int64_t first, int64_t n)
{
    struct tensor t = keys;
    t.rank = 3;
    t.dim[0] = c->batch;
    t.dim[1] = n;
    t.dim[2] = c->width;
    t.stride[0] = (c->key_tokens + c->key_entries) * c->width;
    t.stride[1] = c->width;
    t.stride[2] = 1;
    t.data = (char *)keys.data + first * c->width * (int64_t)dtype_bytes(keys.dtype);
    return t;
}
/* Sequences as heads: what the rope op copies without tables. */
static struct tensor sequences_last(struct tensor t)
{
    struct tensor v = t;
    v.dim[0] = t.dim[1];
    v.dim[1] = t.dim[0];
    v.stride[0] = t.stride[1];
    v.stride[1] = t.stride[0];
    return v;
}

/* Rows of a slot that become rows [first, first + n) of every sequence of keys. */
struct key_piece {
    slot_id x, dx;
    int64_t first, n;
};
static void declare_key_piece(struct build *b, const struct csa *c, const struct csa_slots *s, int n,
                              const struct key_piece *p)
{
    struct graph *g = b->g;
    if (p->n == 0 || g->err.code != ST_OK)
        return;
    struct tensor x = of(g, p->x), dx = of(g, p->dx);
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = sequences_last(tensor_split_first(&x, c->batch, p->n)),
             .y = sequences_last(key_part(c, of(g, s->keys), p->first, p->n)));
    if (training(b))
        GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = sequences_last(key_part(c, of(g, s->dkeys), p->first, p->n)),
                 .dx = sequences_last(tensor_split_first(&dx, c->batch, p->n)));
}

/* Tokens and entries in one array; in front of the tokens those of the rank before that windows reach. */
static void declare_keys(struct build *b, const struct csa *c, struct csa_slots *s)
{
    struct graph *g = b->g;
    int64_t rows = c->batch * (c->key_tokens + c->key_entries), size = (int64_t)dtype_bytes(b->dev->real);
    double bytes = 2 * (double)(rows * c->width) * (double)size;
    struct csa_edge e = csa_edge_slots(b, "kv", c->window_rows, c->width, true);
    csa_edge_declare(b, &e, &(struct csa_columns_of){.x = s->kv, .dx = s->dkv}, 1, 0);
    if (c->entries == 0 && c->before == 0) {
        s->keys = s->kv;
        s->dkeys = s->dkv;
        return;
    }
    s->keys = build_real(b, "keys", rows, c->width);
    s->dkeys = build_grad(b, "dkeys", rows, c->width);
    slot_id entry = c->divided ? s->entries.all : s->entry, dentry = c->divided ? s->entries.dall : s->dentry;
    const struct key_piece pieces[] = {{e.edge.halo, e.edge.dhalo, 0, c->before},
                                       {s->kv, s->dkv, c->before, c->seq},
                                       {entry, dentry, c->key_tokens, c->key_entries}};
    int n = graph_node(g, "keys", LANE_COMPUTE, NULL);
    for (int i = 0; i < countof(pieces); i++)
        declare_key_piece(b, c, s, n, &pieces[i]);
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    graph_again(g, n, s->keys);
    graph_cost(g, n, PH_BWD, 0, bytes);
}

/* Decoding: the same array, kept. An entry is stored again until its window is complete. */
static void declare_cache(struct build *b, const struct csa *c, struct csa_slots *s, int n)
{
    struct graph *g = b->g;
    struct tensor cache = tensor_3d(NULL, b->dev->real, c->batch, c->key_tokens + c->key_entries, c->width);
    s->key_cache = build_table(b, "key_cache", cache, NULL, NULL);
    struct tensor keys = of(g, s->key_cache);
    GRAPH_OP(g, n, PH_FWD, cache_store, .x = csa_split(csa_rows(c, of(g, s->kv)), 1, c->width),
             .cache = csa_split(key_part(c, keys, 0, c->key_tokens), 1, c->width), .start = of(g, b->in.start));
    if (c->entries > 0)
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = csa_split(csa_entries(c, of(g, s->entry)), 1, c->width),
                 .cache = csa_split(key_part(c, keys, c->key_tokens, c->key_entries), 1, c->width),
                 .start = of(g, b->in.start), .ratio = c->ratio);
}

/* ---- attention and output -------------------------------------------------------------------- */

/* Keys that a query reads at most. */
static int64_t most_entries(const struct csa *c) { return c->selects ? c->topk : c->seen; }
static int64_t window_of(const struct csa *c) { return min_i64(c->window, c->key_tokens); }

static void declare_list(struct build *b, const struct csa *c, const struct csa_slots *s, int n)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, keylist, .doc_start = csa_documents(c, b),
             .start = of(g, c->divided ? s->first : b->in.start),
             .sel = c->selects ? of(g, s->sel) : (struct tensor){0}, .idx = of(g, s->list), .batch = c->batch,
             .seq = c->seq, .window = window_of(c), .most = most_entries(c), .base = c->key_tokens,
             .origin = c->start - c->before, .entries = c->key_entries, .ratio = c->ratio);
}

/* The attention's output is kept as it is projected, rotated back; the backward pass of attention wants it before. */
static void core_backward(struct build *b, const struct csa *c, const struct csa_slots *s, int n, struct weight sink)
{
    struct graph *g = b->g;
    slot_id before = build_real(b, "o_before", b->rows, c->heads * c->width);
    struct tensor o = csa_heads(of(g, s->o), c->heads), back = csa_heads(of(g, before), c->heads),
                  grad = csa_rotary(c, of(g, s->d_o), c->heads);
    GRAPH_OP(g, n, PH_BWD, rope_fwd, .x = grad, .y = grad, .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, b->in.pos), .interleaved = true);
    if (c->width > c->rope)
        GRAPH_OP(g, n, PH_BWD, rope_fwd, .x = csa_columns(o, 0, c->width - c->rope),
                 .y = csa_columns(back, 0, c->width - c->rope));
    GRAPH_OP(g, n, PH_BWD, rope_fwd, .x = csa_rotary(c, of(g, s->o), c->heads),
             .y = csa_rotary(c, of(g, before), c->heads), .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, b->in.pos), .interleaved = true);
    GRAPH_OP(g, n, PH_BWD, sparse_bwd, .d_o = csa_rows(c, csa_heads(of(g, s->d_o), c->heads)),
             .q = csa_rows(c, csa_heads(of(g, s->q), c->heads)),
             .kv = key_part(c, of(g, s->keys), 0, c->key_tokens + c->key_entries), .idx = of(g, s->list),
             .sink = of(g, sink.w), .o = csa_rows(c, back), .lse = of(g, s->lse),
             .dq = csa_rows(c, csa_heads(of(g, s->dq), c->heads)),
             .dkv = key_part(c, of(g, s->dkeys), 0, c->key_tokens + c->key_entries), .dsink = of(g, sink.dw),
             .scale = c->scale, .dv = c->width);
}

static void declare_core(struct build *b, const struct csa *c, struct csa_slots *s)
{
    struct graph *g = b->g;
    int64_t most = window_of(c) + most_entries(c), all = c->key_tokens + c->key_entries;
    double flops = 4.0 * (double)b->rows * (double)most * (double)(c->heads * c->width);
    struct param p = param_vector("self_attention.core_attention.attn_sink", c->all_heads, INIT_ZERO);
    param_split(&p, 0, UNIT_HEADS, c->all_heads);
    struct weight sink = build_weight(b, &p);
    s->o = build_real(b, "o", b->rows, c->heads * c->width);
    s->d_o = build_grad(b, "do", b->rows, c->heads * c->width);
    s->lse = graph_slot(g, "lse", tensor_3d(NULL, b->dev->wide, c->batch, c->heads, c->seq));
    s->list = graph_slot(g, "list", tensor_3d(NULL, DT_I32, c->batch, c->seq, most));
    int n = graph_node(g, "core", LANE_COMPUTE, NULL);
    if (b->mode == BUILD_DECODE)
        declare_cache(b, c, s, n);
    declare_list(b, c, s, n);
    GRAPH_OP(g, n, PH_FWD, sparse_fwd, .q = csa_rows(c, csa_heads(of(g, s->q), c->heads)),
             .kv = key_part(c, of(g, b->mode == BUILD_DECODE ? s->key_cache : s->keys), 0, all), .idx = of(g, s->list),
             .sink = of(g, sink.w), .o = csa_rows(c, csa_heads(of(g, s->o), c->heads)), .lse = of(g, s->lse),
             .scale = c->scale, .dv = c->width);
    struct tensor o = csa_rotary(c, of(g, s->o), c->heads);
    GRAPH_OP(g, n, PH_FWD, rope_bwd, .dy = o, .dx = o, .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, b->in.pos), .interleaved = true);
    graph_cost(g, n, PH_FWD, flops, 0);
    if (!training(b))
        return;
    graph_again(g, n, s->list);
    graph_again(g, n, s->o);
    graph_again(g, n, s->lse);
    core_backward(b, c, s, n, sink);
    graph_cost(g, n, PH_BWD, 2.5 * flops, 0);
}

static void declare_output(struct build *b, const struct csa *c, const struct csa_slots *s, const struct core_io *io)
{
    struct graph *g = b->g;
    int64_t out = c->groups * c->o_rank, in = c->heads * c->width / c->groups, hidden = b->cfg->model.hidden;
    slot_id y = build_real(b, "o_low", b->rows, out), dy = build_grad(b, "do_low", b->rows, out);
    int64_t all = c->all_groups * c->o_rank;
    struct param pa = param_matrix("self_attention.linear_o_group_proj", all, in, b->cfg->model.init_std),
                 pb = param_matrix("self_attention.linear_proj.weight", hidden, all, output_std(b));
    param_split(&pa, 0, UNIT_GROUPS, c->all_groups);
    param_split(&pb, 1, UNIT_GROUPS, c->all_groups);
    struct param bias = param_vector("self_attention.linear_proj.bias", hidden, INIT_ZERO);
    param_replicate(&bias, GRAD_OVER_TOKENS);
    /* the others have none, as in Megatron */
    struct weight wa = build_weight(b, &pa), wb = build_linear_weight(b, &pb),
                  bo = b->cfg->model.bias ? build_weight(b, &bias) : no_weight();
    struct tensor ww = of(g, wa.w), w = tensor_split_first(&ww, c->groups, c->o_rank),
                  x = csa_split(of(g, s->o), c->groups, in);
    double flops = 2.0 * (double)b->rows * (double)out * (double)in;
    int n = graph_node(g, "o_group", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, headmm_fwd, .x = x, .w = w, .y = csa_split(of(g, y), c->groups, c->o_rank), .trans = true);
    graph_cost(g, n, PH_FWD, flops, 0);
    if (training(b)) {
        struct tensor dw = of(g, wa.dw), d = csa_split(of(g, dy), c->groups, c->o_rank);
        graph_again(g, n, y);
        GRAPH_OP(g, n, PH_BWD, headmm_bwd, .dy = d, .x = x, .w = w, .dx = csa_split(of(g, s->d_o), c->groups, in),
                 .trans = true);
        graph_cost(g, n, PH_BWD, flops, 0);
        GRAPH_OP(g, n, PH_DW, headmm_bwd, .dy = d, .x = x, .w = w, .dw = tensor_split_first(&dw, c->groups, c->o_rank),
                 .trans = true);
        graph_cost(g, n, PH_DW, flops, 0);
    }
    linear_declare(
        b, "proj",
        &(struct linear){
            .x = y, .y = io->f, .dy = io->df, .dx = dy, .w = wb, .bias = bo, .in = out, .out = hidden, .summed = true});
}

/* ---- the kinds ------------------------------------------------------------------------------- */

/* ratio 0: a window alone. */
static struct csa sizes_of(const struct build *b, int64_t ratio, bool overlap)
{
    const struct config_model *m = &b->cfg->model;
    bool decode = b->mode == BUILD_DECODE;
    struct csa c = {.batch = b->batch,
                    .seq = b->seq,
                    .heads = m->heads / b->mesh->tp,
                    .all_heads = m->heads,
                    .width = m->mla_v,
                    .rope = m->mla_rope,
                    .q_rank = m->mla_q_rank,
                    .window = m->csa_window_size,
                    .ratio = ratio,
                    .overlap = overlap,
                    .groups = m->o_groups / b->mesh->tp,
                    .all_groups = m->o_groups,
                    .o_rank = m->o_lora_rank,
                    .eps = m->norm_eps,
                    .latent_eps = m->mla_norm_eps > 0 ? m->mla_norm_eps : m->norm_eps,
                    .zero_centered = m->norm_zero_centered,
                    .index_heads = m->dsa_indexer_n_heads,
                    .index_dim = m->dsa_indexer_head_dim,
                    .topk = m->dsa_indexer_topk,
                    .indexer = overlap};
    c.scale = m->mla_softmax_scale > 0 ? m->mla_softmax_scale : 1 / sqrt((double)c.width);
    c.score_scale = 1 / sqrt((double)(c.index_heads * c.index_dim));
    csa_divide(b, &c);
    c.key_tokens = decode ? b->cache_len : c.before + b->seq;
    if (ratio == 0)
        return c;
    c.seen = (decode ? b->cache_len : c.start + b->seq) / ratio;
    c.entries = (decode ? b->seq + ratio - 1 : b->seq) / ratio;
    c.key_entries = decode ? c.seen + 1 : c.seen;                                     /* one that is not complete */
    c.selects = c.indexer && (decode ? b->cache_len : b->whole_seq) / ratio > c.topk; /* on every rank or on none */
    c.learns = c.indexer && training(b) && c.entries > 0;
    return c;
}

static int declare(struct build *b, struct core_io *io, int64_t ratio, bool overlap)
{
    struct csa sizes = sizes_of(b, ratio, overlap), *c = &sizes;
    struct csa_slots s = {.entry = NO_SLOT,
                          .dentry = NO_SLOT,
                          .at = NO_SLOT,
                          .keys = NO_SLOT,
                          .iq = NO_SLOT,
                          .diq = NO_SLOT,
                          .iw = NO_SLOT,
                          .diw = NO_SLOT,
                          .ik = NO_SLOT,
                          .dik = NO_SLOT,
                          .index_cache = NO_SLOT,
                          .first = context_first(b),
                          .sel = NO_SLOT};
    TRY(declare_tables(b, c, &s));
    io->f = build_real(b, "out", b->rows, b->cfg->model.hidden);
    graph_sum(b->g, io->dh);
    declare_query(b, c, &s, io);
    declare_kv(b, c, &s, io);
    if (c->ratio > 0)
        csa_compressor(b, c, &s, io);
    if (b->mode != BUILD_DECODE)
        declare_keys(b, c, &s);
    if (c->indexer)
        csa_indexer(b, c, &s, io);
    if (c->selects)
        csa_select(b, c, &s);
    declare_core(b, c, &s);
    if (c->learns)
        csa_index_loss(b, c, &s);
    declare_output(b, c, &s, io);
    return b->g->err.code;
}

static int csa_declare(struct build *b, struct core_io *io)
{
    return declare(b, io, b->cfg->model.compress_rate_csa, true);
}
static int hca_declare(struct build *b, struct core_io *io)
{
    return declare(b, io, b->cfg->model.compress_rate_hca, false);
}
static int window_declare(struct build *b, struct core_io *io) { return declare(b, io, 0, false); }

/* ---- options --------------------------------------------------------------------------------- */

static bool has_any(const struct config *c) { return strpbrk(c->model.pattern, "CHW") != NULL; }
static bool has_csa(const struct config *c) { return strchr(c->model.pattern, 'C') != NULL; }
static bool has_hca(const struct config *c) { return strchr(c->model.pattern, 'H') != NULL; }

static bool without_rope(const struct config *c) { return has_any(c) && c->model.rope == CFG_ROPE_NONE; }
static bool without_latent(const struct config *c) { return has_any(c) && c->model.mla_q_rank == 0; }
static bool head_too_narrow(const struct config *c) { return has_any(c) && c->model.mla_v < c->model.mla_rope; }
static bool groups_uneven(const struct config *c)
{
    return has_any(c) && c->model.heads * c->model.mla_v % c->model.o_groups != 0;
}
static bool index_head_too_narrow(const struct config *c)
{
    return has_csa(c) && c->model.dsa_indexer_head_dim < c->model.mla_rope;
}
static bool heads_undivided(const struct config *c)
{
    int64_t ranks = c->parallel.tp;
    return has_any(c) && ranks > 1 && (c->model.heads % ranks != 0 || c->model.o_groups % ranks != 0);
}
static bool parts_without_window(const struct config *c)
{
    return has_any(c) && c->parallel.cp > 1 &&
           min_i64(c->model.csa_window_size, c->train.seq) - 1 > c->train.seq / c->parallel.cp;
}
/* A part is whole entries, and has all tokens that the first one of the next part is made of. */
static bool parts_uneven(const struct config *c, int64_t ratio, int64_t least)
{
    int64_t part = c->train.seq / max_i64(1, c->parallel.cp);
    return c->parallel.cp > 1 && (part % ratio != 0 || part < least * ratio);
}
static bool parts_split_csa(const struct config *c)
{
    return has_csa(c) && parts_uneven(c, c->model.compress_rate_csa, 2);
}
static bool parts_split_hca(const struct config *c)
{
    return has_hca(c) && parts_uneven(c, c->model.compress_rate_hca, 1);
}
static bool shorter_than_csa(const struct config *c) { return has_csa(c) && c->train.seq < c->model.compress_rate_csa; }
static bool shorter_than_hca(const struct config *c) { return has_hca(c) && c->train.seq < c->model.compress_rate_hca; }
/* A document's windows begin at its first token: one may end behind the last of the seq / rate entries. */
static bool packed_unevenly(const struct config *c)
{
    return config_separates(c) && ((has_csa(c) && c->train.seq % c->model.compress_rate_csa != 0) ||
                                   (has_hca(c) && c->train.seq % c->model.compress_rate_hca != 0));
}

/* clang-format off */
#define SHARED_USES \
    {"model.heads", NULL, NULL}, \
    {"model.bias", NULL, NULL}, \
    {"model.mla_q_rank", NULL, NULL}, \
    {"model.mla_v", NULL, NULL}, \
    {"model.mla_rope", NULL, NULL}, \
    {"model.mla_norm_eps", NULL, NULL}, \
    {"model.mla_softmax_scale", NULL, NULL}, \
    {"model.csa_window_size", NULL, NULL}, \
    {"model.o_groups", NULL, NULL}, \
    {"model.o_lora_rank", NULL, NULL}
#define ENTRY_USES \
    {"model.csa_compress_rotary_base", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_scaling", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_factor", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_original", rope_is_stretched, "model.rope_scaling = llama3 or yarn"}, \
    {"model.rope_low", rope_is_llama3, "model.rope_scaling = llama3"}, \
    {"model.rope_high", rope_is_llama3, "model.rope_scaling = llama3"}, \
    {"model.rope_beta_fast", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_beta_slow", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_truncate", rope_is_yarn, "model.rope_scaling = yarn"}
static const struct option_use csa_uses[] = {
    SHARED_USES,
    ENTRY_USES,
    {"model.compress_rate_csa", NULL, NULL},
    {"model.dsa_indexer_n_heads", NULL, NULL},
    {"model.dsa_indexer_head_dim", NULL, NULL},
    {"model.dsa_indexer_topk", NULL, NULL},
    {"model.dsa_indexer_loss_coeff", NULL, NULL},
    {"model.dsa_indexer_use_sparse_loss", NULL, NULL},
    {"model.dsa_indexer_scoring_relu", NULL, NULL},
};
static const struct option_use hca_uses[] = {
    SHARED_USES,
    ENTRY_USES,
    {"model.compress_rate_hca", NULL, NULL},
};
static const struct option_use window_uses[] = {
    SHARED_USES,
    {"model.rope_base", rope_rotates, ROPE_NEEDS},
};
static const struct rule csa_rules[] = {
    {"compressed-needs-rope", without_rope,
     "compressed attention (C, H, W) has rotary channels of its own: model.rope cannot be none",
     {"model.rope", "model.pattern", "model.mla_rope"}},
    {"compressed-needs-latent", without_latent,
     "queries of compressed attention (C, H, W) come from a latent: model.mla_q_rank must be 1 or more",
     {"model.mla_q_rank", "model.pattern"}},
    {"shared-head-holds-rope", head_too_narrow,
     "a head of compressed attention (C, H, W) has the rotary channels among its own: model.mla_v must be at least "
     "model.mla_rope",
     {"model.mla_v", "model.mla_rope"}},
    {"output-groups-divide", groups_uneven,
     "the outputs of all heads are projected in model.o_groups groups: it must divide model.heads * model.mla_v, as "
     "model.heads does",
     {"model.o_groups", "model.heads", "model.mla_v"}},
    {"entry-indexer-holds-rope", index_head_too_narrow,
     "an indexer head has the rotary channels among its own: model.dsa_indexer_head_dim must be at least "
     "model.mla_rope",
     {"model.dsa_indexer_head_dim", "model.mla_rope"}},
    {"csa-fills-a-window", shorter_than_csa,
     "no window of compressed sparse attention (C) is ever complete: train.seq must be at least "
     "model.compress_rate_csa",
     {"model.compress_rate_csa", "train.seq"}},
    {"hca-fills-a-window", shorter_than_hca,
     "no window of heavily compressed attention (H) is ever complete: train.seq must be at least "
     "model.compress_rate_hca",
     {"model.compress_rate_hca", "train.seq"}},
    {"packed-windows-have-entries", packed_unevenly,
     "with packed documents (data.eod_mask, data.chat) train.seq must be a multiple of the rates of "
     "compressed attention (C, H), or the last documents of a sequence would lack entries",
     {"train.seq", "model.compress_rate_csa", "model.compress_rate_hca", "data.eod_mask"}},
    {"compressed-heads-over-ranks", heads_undivided,
     "parallel.tp divides compressed attention (C, H, W) by heads and by groups of their outputs: it must divide "
     "model.heads and model.o_groups",
     {"parallel.tp", "model.heads", "model.o_groups"}},
    {"csa-parts-are-entries", parts_split_csa,
     "a rank's part of a sequence, train.seq / parallel.cp tokens, must be whole entries of compressed sparse "
     "attention "
     "(C), two or more: a multiple of model.compress_rate_csa",
     {"parallel.cp", "train.seq", "model.compress_rate_csa"}},
    {"hca-parts-are-entries", parts_split_hca,
     "a rank's part of a sequence, train.seq / parallel.cp tokens, must be whole entries of heavily compressed "
     "attention (H): a multiple of model.compress_rate_hca",
     {"parallel.cp", "train.seq", "model.compress_rate_hca"}},
    {"window-within-parts", parts_without_window,
     "a window of compressed attention (C, H, W) may reach into the part of the rank before, but not beyond it: "
     "model.csa_window_size must be at most train.seq / parallel.cp + 1",
     {"parallel.cp", "train.seq", "model.csa_window_size"}},
};
/* Sizes of all three; those of the indexer are D's. */
static const struct tiny_size csa_tiny[] = {
    {"model.heads", 4, true},             {"model.mla_q_rank", 10, false},    {"model.mla_v", 6, true},
    {"model.mla_rope", 4, true},          {"model.csa_window_size", 5, true}, {"model.compress_rate_csa", 2, true},
    {"model.compress_rate_hca", 4, true}, {"model.o_groups", 4, true},        {"model.o_lora_rank", 5, false},
    {"model.dsa_indexer_n_heads", 3, false}, {"model.dsa_indexer_head_dim", 6, true},
    {"model.dsa_indexer_topk", 3, true},
};
/* clang-format on */

/* Mean over the tokens of a sequence of min(most, tokens so far / ratio). */
static double mean_seen(double seq, double ratio, double most)
{
    double all = seq / ratio;
    return all <= most ? all / 2 : most * (1 - most / (2 * all));
}

/* Projections, the window and the entries that a query sees. ratio 0: no entries. */
static double flops_of(const struct config *cfg, int64_t seq, int64_t ratio, bool overlap)
{
    const struct config_model *m = &cfg->model;
    double d = (double)m->hidden, wide = (double)(m->heads * m->mla_v), rank = (double)m->mla_q_rank,
           head = (double)m->mla_v, s = (double)seq, out = (double)(m->o_groups * m->o_lora_rank);
    double linear = 2 * (d * rank + rank * wide + d * head + wide * (double)m->o_lora_rank + out * d);
    double pairs = mean_seen(s, 1, (double)m->csa_window_size), more = 0;
    if (ratio > 0) {
        double topk = overlap ? (double)m->dsa_indexer_topk : s, index = (double)m->dsa_indexer_head_dim;
        double heads = (double)m->dsa_indexer_n_heads;
        pairs += mean_seen(s, (double)ratio, topk);
        more = 4 * d * head * (overlap ? 2 : 1);
        if (overlap)
            more += 2 * (rank * heads * index + d * (4 * index + heads)) + s / (double)ratio * heads * index;
    }
    return linear + more + 4 * pairs * wide;
}
static double csa_flops(const struct config *c, int64_t seq)
{
    return flops_of(c, seq, c->model.compress_rate_csa, true);
}
static double hca_flops(const struct config *c, int64_t seq)
{
    return flops_of(c, seq, c->model.compress_rate_hca, false);
}
static double window_flops(const struct config *c, int64_t seq) { return flops_of(c, seq, 0, false); }

static struct kind_sizes csa_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double wide = (double)m->heads * (double)m->mla_v, out = (double)m->o_groups * (double)m->o_lora_rank,
           index = (double)m->dsa_indexer_n_heads * (double)m->dsa_indexer_head_dim, head = 2 * (double)m->mla_v,
           list = (double)m->csa_window_size + (double)m->dsa_indexer_topk + (double)c->train.seq,
           in = (double)max_i64(m->hidden, m->mla_q_rank);
    double rows = fmax(fmax(wide, index), fmax(out, head));
    return (struct kind_sizes){.token = fmax(rows, list), .weight = fmax(rows * in, wide * (double)m->o_lora_rank)};
}

static void shared_kernels(const struct kernel_report *r, bool indexer)
{
    const struct config_model *m = &r->cfg->model;
    kernel_lines_sparse(r, &(struct sparse_sizes){.what = "window, entries",
                                                  .width = m->mla_v,
                                                  .values = m->mla_v,
                                                  .index_heads = indexer ? m->dsa_indexer_n_heads : 0,
                                                  .index_dim = m->dsa_indexer_head_dim});
}
static void csa_kernels(const struct kernel_report *r) { shared_kernels(r, true); }
static void window_kernels(const struct kernel_report *r) { shared_kernels(r, false); }

#define REFUSED                                                                                                        \
    "model.attn_gate", "model.attn_window", "model.attn_window_skip", "model.attn_sink", "model.softmax_scale",        \
        "model.qkv_bias", "model.attn_bias", "model.rope_percent", "model.no_rope_freq", "model.norm",                 \
        "model.position", "model.attention_dropout"
/* The rules, sizes and groups of all three are those of the first. */
const struct core_kind core_csa = {
    .symbol = 'C',
    .name = "compressed sparse attention",
    .title = "compressed sparse attention",
    .norm_key = "input_layernorm.weight",
    .options = {KIND_ROWS(uses, csa_uses), KIND_ROWS(rules, csa_rules), KIND_ROWS(tiny, csa_tiny),
                .refused = {REFUSED, "model.dsa_dense_warmup", "model.dsa_indexer_topk_freq"}},
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true},
    .recompute = {{"core_attn", {"csa.o", "csa.lse", "csa.list", "csa.keys"}},
                  {"mla_up_proj", {"csa.q", "csa.q_up", "csa.entry", "csa.o_low"}}},
    .divides_sequence = true,
    .divides_weights = true,
    .flops = csa_flops,
    .sizes = csa_sizes,
    .kernels = csa_kernels,
    .declare = csa_declare,
};
const struct core_kind core_hca = {
    .symbol = 'H',
    .name = "heavily compressed attention",
    .title = "heavily compressed attention",
    .norm_key = "input_layernorm.weight",
    .options = {KIND_ROWS(uses, hca_uses), KIND_ROWS(tiny, csa_tiny), .refused = {REFUSED}},
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true},
    .divides_sequence = true,
    .divides_weights = true,
    .flops = hca_flops,
    .sizes = csa_sizes,
    .kernels = window_kernels,
    .declare = hca_declare,
};
const struct core_kind core_window = {
    .symbol = 'W',
    .name = "sliding window attention",
    .title = "sliding window attention",
    .norm_key = "input_layernorm.weight",
    .options = {KIND_ROWS(uses, window_uses), KIND_ROWS(tiny, csa_tiny), .refused = {REFUSED}},
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true},
    .divides_sequence = true,
    .divides_weights = true,
    .flops = window_flops,
    .sizes = csa_sizes,
    .kernels = window_kernels,
    .declare = window_declare,
};
