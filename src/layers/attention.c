/* The self-attention core, symbol '*': causal grouped-query attention with RoPE.
 *
 * Shapes: T = batch * seq rows, H query heads, G kv heads, D head size.
 *   qkv  [T, (H(+H) + 2G) D] = h Wqkv^T + b      sections [q | gate? | k | v] (disk: by kv group)
 *   qk   [T, (H + G) D]      = rope(norm(q, k))  only with q/k norm, of each head or of all heads of a row; without
 *                                                it q and k are rotated in place, inside the node that wrote them
 *   o    [T, H D], lse       = attention(q, k, v)
 *   og   [T, H D]            = o * sigmoid(gate) only with the output gate
 *   f    [T, hidden]         = og Wo^T + b
 * Tensor parallelism divides heads, each with the kv head it reads. Where there are fewer kv heads than ranks, R of
 * them share one: each projects D / R channels of its key and value, and they gather them,
 *   part [T, 2 D / R], kv [T, 2 D] = [k | v]     nodes kv_parts and kv
 * so that no rank holds a copy of another's weights.
 * Nodes: qkv, core, proj. core's backward writes the gradient of the whole qkv row: gate first, then
 * attention, then rotation and norm undone in place.
 * With parallel.cp a row is [k | v] for other ranks in between, and core's queries see the rows of all tokens up to
 * their own:
 *   kv_own [T, 2 G D]        = k, v
 *   kv_all [B seen, 2 G D]   = those of the ranks up to this one (context.h)
 * Nodes: qkv, kv_own, kv, core, proj. core's backward writes dq (with the gate) and dkv_all; that of kv_own puts the
 * row of dqkv together and undoes rotation and norm. With parallel.cp_comm=ring: attention_ring.c. */
#include "layers/attention_int.h"
#include "layers/shard.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache.h"
#include "ops/colsum/colsum.h"
#include "ops/dropout/dropout.h"
#include "ops/gate/gate.h"
#include "ops/gemm/gemm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

#include <math.h>
#include <string.h>

/* Keys or values of gathered rows: [B, seen, G, D]. */
static struct tensor gathered(const struct attention *m, const struct context_rows *r, struct tensor rows, int which)
{
    struct tensor part = attn_heads_of(m, rows, which * m->kv_heads * m->dim, m->kv_heads);
    return tensor_split_first(&part, m->batch, r->seen);
}

/* ---- declaration ----------------------------------------------------------------------------- */

/* Sizes on one of so many ranks that share the heads. */
static void set_sizes(const struct build *b, struct attention *m, int64_t ranks)
{
    const struct config_model *c = &b->cfg->model;
    int64_t number = b->number;
    *m = (struct attention){.batch = b->batch,
                            .seq = b->seq,
                            .heads = c->heads / ranks,
                            .kv_heads = c->kv_heads / ranks,
                            .kv_ranks = 1,
                            .dim = c->head_dim,
                            .scale = c->softmax_scale,
                            .eps = c->norm_eps,
                            .qk_norm = c->qk_norm != CFG_QK_NORM_OFF,
                            .row_norm = c->qk_norm == CFG_QK_NORM_ROW,
                            .zero_centered = c->norm_zero_centered,
                            .sink_zero = c->attn_sink == CFG_SINK_OFF_BY_ONE,
                            .interleaved = c->rope == CFG_ROPE_INTERLEAVED};
    bool full = c->attn_window_skip > 0 && number % c->attn_window_skip == 0;
    m->window = full ? 0 : c->attn_window;
    m->rope = c->rope != CFG_ROPE_NONE && !(c->no_rope_freq > 0 && number % c->no_rope_freq == 0);
    int64_t q = m->heads * m->dim, kv = m->kv_heads * m->dim;
    m->gate_at = c->attn_gate ? q : -1;
    m->k_at = c->attn_gate ? 2 * q : q;
    m->v_at = m->k_at + kv;
    m->width = m->v_at + kv;
    if (ranks <= c->kv_heads || ranks % c->kv_heads != 0)
        return;
    m->kv_heads = 1;
    m->kv_ranks = ranks / c->kv_heads;
    m->part = m->dim / m->kv_ranks;
    m->width = m->k_at; /* of queries and gates alone */
    m->k_at = 0;
    m->v_at = m->dim;
}

static struct row_layout by_group(const struct attention *m)
{
    int64_t per_group = m->heads / m->kv_heads * m->dim;
    struct row_layout r = {.groups = m->kv_heads};
    r.rows[r.n_sections++] = per_group;
    if (m->gate_at >= 0)
        r.rows[r.n_sections++] = per_group;
    r.rows[r.n_sections++] = m->dim;
    r.rows[r.n_sections++] = m->dim;
    return r;
}

static void fill_rope(struct tensor *host, const void *arg, bool want_cos)
{
    struct tensor other = *host;
    other.data = NULL;
    rope_tables(arg, want_cos ? host : &other, want_cos ? &other : host);
}
static void fill_cos(struct tensor *host, const void *arg) { fill_rope(host, arg, true); }
static void fill_sin(struct tensor *host, const void *arg) { fill_rope(host, arg, false); }

static int declare_tables(struct build *b, struct attention_slots *s)
{
    const struct config_model *c = &b->cfg->model;
    bool yarn = c->rope_scaling == CFG_ROPE_SCALING_YARN; /* Megatron's YaRN ignores the percentage */
    int64_t dim = yarn ? c->head_dim : (int64_t)((double)c->head_dim * c->rope_percent);
    struct rope_config *r = graph_own(b->g, sizeof *r);
    if (r == NULL)
        return ST_NOMEM;
    *r = rope_from_config(b->cfg, dim);
    TRY(rope_config_check(r, b->e));
    int64_t positions = max_i64(b->cfg->train.seq, b->cache_len);
    struct tensor shape = tensor_2d(NULL, b->dev->wide, positions, dim / 2);
    graph_scope(b->g, -1, "rope");
    s->cos = build_table(b, "cos", shape, fill_cos, r);
    s->sin = build_table(b, "sin", shape, fill_sin, r);
    graph_scope(b->g, b->layer, "attn");
    return b->g->err.code;
}

/* Sections q, gate, k, v; a rank takes whole groups of query heads with the keys and values they read, or channels of
 * one where it shares it. */
static void split_rows(const struct attention *m, struct param *p, int64_t ranks)
{
    bool shared = ranks > m->kv_heads && ranks % m->kv_heads == 0;
    enum split_unit unit = shared ? UNIT_CHANNELS : UNIT_GROUPS;
    int64_t units = shared ? m->kv_heads * m->dim : m->kv_heads;
    param_split_section(p, 0, m->heads * m->dim, UNIT_HEADS, m->heads);
    if (m->gate_at >= 0)
        param_split_section(p, 0, m->heads * m->dim, UNIT_HEADS, m->heads);
    param_split_section(p, 0, m->kv_heads * m->dim, unit, units);
    param_split_section(p, 0, m->kv_heads * m->dim, unit, units);
}

static void declare_params(struct build *b, const struct attention *m, struct attention_slots *s, struct weight *wqkv,
                           struct weight *bqkv, struct weight *wo, struct weight *bo)
{
    const struct config_model *c = &b->cfg->model;
    enum init_kind gain = c->norm_zero_centered ? INIT_ZERO : INIT_ONE;
    struct param p = param_matrix("self_attention.linear_qkv.weight", m->width, c->hidden, c->init_std);
    struct param pb = param_vector("self_attention.linear_qkv.bias", m->width, INIT_ZERO);
    struct param o = param_matrix("self_attention.linear_proj.weight", c->hidden, m->heads * m->dim, output_std(b));
    struct param ob = param_vector("self_attention.linear_proj.bias", c->hidden, INIT_ZERO);
    struct param qn = param_vector("self_attention.q_layernorm.weight", m->row_norm ? m->heads * m->dim : m->dim, gain);
    struct param kn =
        param_vector("self_attention.k_layernorm.weight", m->row_norm ? m->kv_heads * m->dim : m->dim, gain);
    struct param sink = param_vector("self_attention.core_attention.softmax_offset", m->heads, INIT_ZERO);
    p.rows = pb.rows = by_group(m);
    split_rows(m, &p, b->mesh->tp);
    split_rows(m, &pb, b->mesh->tp);
    param_split(&o, 1, UNIT_HEADS, m->heads);
    param_split(&sink, 0, UNIT_HEADS, m->heads);
    param_replicate(&ob, GRAD_OVER_TOKENS);
    if (m->row_norm) { /* a gain of its own for every head */
        param_split(&qn, 0, UNIT_HEADS, m->heads);
        param_split(&kn, 0, UNIT_GROUPS, m->kv_heads);
    } else {
        param_replicate(&qn, GRAD_OVER_HEADS);
        param_replicate(&kn, GRAD_OVER_HEADS);
    }
    bool shared = b->mesh->tp > m->kv_heads; /* two products, which take no codes */
    *wqkv = shared ? build_weight(b, &p) : build_linear_weight(b, &p);
    *bqkv = c->qkv_bias || c->attn_bias || c->bias ? build_weight(b, &pb) : no_weight();
    *wo = build_linear_weight(b, &o);
    *bo = c->attn_bias || c->bias ? build_weight(b, &ob) : no_weight();
    s->q_norm = m->qk_norm ? build_weight(b, &qn) : no_weight();
    s->k_norm = m->qk_norm ? build_weight(b, &kn) : no_weight();
    s->sink = c->attn_sink == CFG_SINK_LEARNABLE ? build_weight(b, &sink) : no_weight();
}

static struct tensor shaped4(const struct build *b, int64_t n, int64_t heads, int64_t dim)
{
    return tensor_4d(NULL, b->dev->real, b->batch, n, heads, dim);
}

static slot_id declare_rstd(struct build *b, const struct attention *m, const char *name, int64_t heads)
{
    return m->row_norm ? graph_slot(b->g, name, tensor_1d(NULL, b->dev->wide, b->rows))
                       : build_wide(b, name, b->rows, heads);
}

static void declare_slots(struct build *b, const struct attention *m, struct attention_slots *s)
{
    int64_t o_cols = m->heads * m->dim;
    bool parts = m->kv_ranks > 1;
    s->qkv = build_real(b, "qkv", b->rows, m->width);
    s->qk = m->qk_norm ? build_real(b, "qk", b->rows, (m->heads + (parts ? 0 : m->kv_heads)) * m->dim) : NO_SLOT;
    s->part = parts ? build_real(b, "kv_part", b->rows, 2 * m->part) : NO_SLOT;
    s->dpart = parts ? build_grad(b, "dkv_part", b->rows, 2 * m->part) : NO_SLOT;
    s->row = parts ? build_real(b, "kv", b->rows, 2 * m->dim) : NO_SLOT;
    s->kn = parts && m->qk_norm ? build_real(b, "kn", b->rows, m->dim) : NO_SLOT;
    s->drow = parts ? build_grad(b, "dkv", b->rows, 2 * m->dim) : NO_SLOT;
    s->rstd_q = m->qk_norm ? declare_rstd(b, m, "rstd_q", m->heads) : NO_SLOT;
    s->rstd_k = m->qk_norm ? declare_rstd(b, m, "rstd_k", m->kv_heads) : NO_SLOT;
    s->o = build_real(b, "o", b->rows, o_cols);
    s->og = m->gate_at >= 0 ? build_real(b, "og", b->rows, o_cols) : NO_SLOT;
    s->lse = graph_slot(b->g, "lse", tensor_3d(NULL, b->dev->wide, b->batch, m->heads, b->seq));
    s->dqkv = build_grad(b, "dqkv", b->rows, m->width);
    s->dog = build_grad(b, "do", b->rows, o_cols);
    s->dout = m->gate_at >= 0 ? build_grad(b, "dout", b->rows, o_cols) : NO_SLOT;
    bool decode = b->mode == BUILD_DECODE;
    s->k_cache =
        decode ? build_table(b, "k_cache", shaped4(b, b->cache_len, m->kv_heads, m->dim), NULL, NULL) : NO_SLOT;
    s->v_cache =
        decode ? build_table(b, "v_cache", shaped4(b, b->cache_len, m->kv_heads, m->dim), NULL, NULL) : NO_SLOT;
    s->divided = context_divides(b);
    s->ring = s->divided && b->cfg->parallel.cp_comm == CFG_CP_COMM_RING;
    if (s->ring) {
        s->dq = build_grad(b, "dq", b->rows, o_cols);
    } else if (s->divided) {
        s->kv = context_rows(b, "kv", 2 * m->kv_heads * m->dim);
        s->dq = build_grad(b, "dq", b->rows, parts ? m->width : m->k_at);
    }
    s->pos = m->rope ? b->in.pos : NO_SLOT;
    s->doc_start = b->in.doc_start;
    s->start = b->in.start;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* All heads of a token as one row. */
static struct tensor whole_row(struct tensor t)
{
    t.rank = 2;
    t.dim[1] *= t.dim[2];
    t.stride[1] = 1;
    return t;
}

static void declare_rotation(struct graph *g, int n, const struct attention *m, const struct attention_slots *s,
                             struct tensor x, struct tensor y, slot_id norm, slot_id rstd)
{
    if (m->row_norm) {
        GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = whole_row(x), .w = of(g, norm), .y = whole_row(y), .rstd = of(g, rstd),
                 .eps = m->eps, .zero_centered = m->zero_centered);
        if (m->rope)
            GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = y, .y = y, .cos = of(g, s->cos), .sin = of(g, s->sin),
                     .pos = of(g, s->pos), .interleaved = m->interleaved);
        return;
    }
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = x, .y = y, .w = of(g, norm), .rstd = of(g, rstd), .cos = of(g, s->cos),
             .sin = of(g, s->sin), .pos = of(g, s->pos), .eps = m->eps, .zero_centered = m->zero_centered,
             .interleaved = m->interleaved);
}

/* ---- ranks that share a kv head -------------------------------------------------------------- */

/* The projection in two products: of queries and gates, and of this rank's channels of keys and values. */
static void declare_parts(struct build *b, const struct attention *m, const struct attention_slots *s,
                          const struct core_io *io, struct weight weight, struct weight bias)
{
    struct graph *g = b->g;
    int n = graph_node(g, "qkv", LANE_COMPUTE, NULL);
    struct tensor h = of(g, io->h), w = of(g, weight.w), dw = of(g, weight.dw), b1 = of(g, bias.w), db = of(g, bias.dw);
    int64_t d = b->cfg->model.hidden, q = m->width, kv = m->part;
    const struct linear half[] = {
        {io->h, s->qkv, s->dqkv, io->dh, weight, bias, d, q, .part = {{"q", q}, {"k", 0}, {"v", 0}}},
        {io->h, s->part, s->dpart, io->dh, weight, bias, d, 2 * kv, q, .part = {{"q", 0}, {"k", kv}, {"v", kv}}}};
    for (int i = 0; i < countof(half); i++) {
        GRAPH_OP(g, n, PH_FWD, gemm, .a = h, .b = tensor_rows(&w, half[i].first, half[i].out), .c = of(g, half[i].y),
                 .bias = b1.data != NULL ? tensor_rows(&b1, half[i].first, half[i].out) : b1, .trans_b = true,
                 .alpha = 1);
        lora_forward(b, n, &half[i], i == 0 ? "qkv" : "kv");
    }
    if (m->rope || m->qk_norm)
        declare_rotation(g, n, m, s, attn_raw_query(m, of(g, s->qkv)), attn_query(g, m, s), s->q_norm.w, s->rstd_q);
    double flops = 2 * (double)b->rows * (double)b->cfg->model.hidden * (double)(m->width + 2 * m->part);
    graph_cost(g, n, PH_FWD, flops, 0);
    if (!training(b))
        return;
    graph_again(g, n, s->qkv);
    graph_again(g, n, s->part);
    graph_again(g, n, s->qk);
    for (int i = 0; i < countof(half); i++) {
        struct tensor dy = of(g, half[i].dy);
        GRAPH_OP(g, n, PH_BWD, gemm, .a = dy, .b = tensor_rows(&w, half[i].first, half[i].out), .c = of(g, io->dh),
                 .alpha = 1);
        GRAPH_OP(g, n, PH_DW, gemm, .a = dy, .b = h, .c = tensor_rows(&dw, half[i].first, half[i].out), .trans_a = true,
                 .alpha = 1);
        if (db.data != NULL)
            GRAPH_OP(g, n, PH_DW, colsum, .x = dy, .out = tensor_rows(&db, half[i].first, half[i].out));
        lora_backward(b, n, &half[i]);
    }
    graph_cost(g, n, PH_BWD, flops, 0);
    graph_cost(g, n, PH_DW, flops, 0);
}

/* Channels of all ranks into the row [k | v], or those of its gradient apart again. */
static void move_channels(struct graph *g, int n, enum phase_id ph, const struct attention *m, int64_t rows,
                          struct tensor parts, struct tensor row)
{
    for (int64_t k = 0; k < 2 * m->kv_ranks; k++) {
        int64_t rank = k / 2, of_v = k % 2;
        struct tensor block = tensor_rows(&parts, rank * rows, rows),
                      part = tensor_cols(&block, of_v * m->part, m->part),
                      cols = tensor_cols(&row, of_v * m->dim + rank * m->part, m->part);
        if (ph == PH_FWD)
            GRAPH_OP(g, n, ph, dropout, .x = part, .y = cols);
        else
            GRAPH_OP(g, n, ph, dropout, .x = cols, .y = part);
    }
}

static void declare_shared_kv(struct build *b, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    struct gathered parts = shard_gather_kv(b, "kv_parts", s->part, s->dpart);
    int n = graph_node(g, "kv", LANE_COMPUTE, NULL);
    move_channels(g, n, PH_FWD, m, b->rows, of(g, parts.x), of(g, s->row));
    if (m->rope || m->qk_norm)
        declare_rotation(g, n, m, s, attn_raw_keys(m, of(g, s->row)), attn_keys(g, m, s), s->k_norm.w, s->rstd_k);
    if (!training(b))
        return;
    graph_again(g, n, s->row);
    graph_again(g, n, s->kn);
    move_channels(g, n, PH_BWD, m, b->rows, of(g, parts.dx), of(g, s->drow));
}

static void declare_qkv(struct build *b, const struct attention *m, const struct attention_slots *s,
                        const struct core_io *io, struct weight w, struct weight bias)
{
    struct graph *g = b->g;
    struct linear l = {.x = io->h,
                       .y = s->qkv,
                       .dy = s->dqkv,
                       .dx = io->dh,
                       .w = w,
                       .bias = bias,
                       .in = b->cfg->model.hidden,
                       .out = m->width,
                       .part = {{"q", m->k_at}, {"k", m->v_at - m->k_at}, {"v", m->width - m->v_at}}};
    int n = linear_forward(b, "qkv", &l);
    if (m->rope || m->qk_norm) {
        declare_rotation(g, n, m, s, attn_raw_query(m, of(g, s->qkv)), attn_query(g, m, s), s->q_norm.w, s->rstd_q);
        declare_rotation(g, n, m, s, attn_raw_keys(m, of(g, s->qkv)), attn_keys(g, m, s), s->k_norm.w, s->rstd_k);
    }
    linear_backward(b, n, &l);
    if (training(b))
        graph_again(g, n, s->qk);
}

static void declare_core_fwd(struct build *b, int n, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    struct tensor qkv = of(g, s->qkv), k = attn_batched(m, attn_keys(g, m, s)),
                  v = attn_values(m, attn_kv_row(g, m, s));
    if (s->k_cache != NO_SLOT) {
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = k, .cache = of(g, s->k_cache), .start = of(g, s->start));
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = v, .cache = of(g, s->v_cache), .start = of(g, s->start));
        k = of(g, s->k_cache);
        v = of(g, s->v_cache);
    }
    if (s->divided) {
        k = gathered(m, &s->kv, of(g, s->kv.all), 0);
        v = gathered(m, &s->kv, of(g, s->kv.all), 1);
    }
    GRAPH_OP(g, n, PH_FWD, attention_fwd, .q = attn_batched(m, attn_query(g, m, s)), .k = k, .v = v,
             .o = attn_heads(m, of(g, s->o)), .lse = of(g, s->lse), .sink = of(g, s->sink.w),
             .doc_start = attn_doc_view(g, m, s->doc_start), .start = of(g, s->start), .scale = m->scale,
             .window = m->window, .sink_zero = m->sink_zero, .drop = attention_dropout(b));
    if (m->gate_at >= 0)
        GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, s->o), .g = attn_gate(m, qkv), .y = of(g, s->og));
}

void attention_unrotate(struct graph *g, int n, const struct attention *m, const struct attention_slots *s,
                        struct tensor dy, struct tensor d, struct tensor x, const struct weight *norm, slot_id rstd)
{
    if (m->row_norm) {
        if (m->rope)
            GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = dy, .dx = d, .cos = of(g, s->cos), .sin = of(g, s->sin),
                     .pos = of(g, s->pos), .interleaved = m->interleaved);
        GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = whole_row(m->rope ? d : dy), .x = whole_row(x), .w = of(g, norm->w),
                 .rstd = of(g, rstd), .dx = whole_row(d), .dw = of(g, norm->dw), .zero_centered = m->zero_centered);
        return;
    }
    GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = dy, .dx = d, .x = m->qk_norm ? x : (struct tensor){0}, .w = of(g, norm->w),
             .rstd = of(g, rstd), .dw = of(g, norm->dw), .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, s->pos), .zero_centered = m->zero_centered, .interleaved = m->interleaved);
}

static void declare_core_bwd(struct build *b, int n, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    const struct context_rows *r = &s->kv;
    bool far = s->divided;
    struct tensor qkv = of(g, s->qkv), dqkv = of(g, far ? s->dq : s->dqkv), kv = attn_kv_row(g, m, s),
                  dkv = m->kv_ranks > 1 ? attn_dkv_row(g, m, s) : dqkv;
    if (m->gate_at >= 0)
        GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, s->dog), .x = of(g, s->o), .g = attn_gate(m, qkv),
                 .dx = of(g, s->dout), .dg = attn_gate(m, dqkv));
    GRAPH_OP(g, n, PH_BWD, attention_bwd, .d_o = attn_heads(m, of(g, m->gate_at >= 0 ? s->dout : s->dog)),
             .q = attn_batched(m, attn_query(g, m, s)),
             .k = far ? gathered(m, r, of(g, r->all), 0) : attn_batched(m, attn_keys(g, m, s)),
             .v = far ? gathered(m, r, of(g, r->all), 1) : attn_values(m, kv), .o = attn_heads(m, of(g, s->o)),
             .lse = of(g, s->lse), .sink = of(g, s->sink.w), .doc_start = attn_doc_view(g, m, s->doc_start),
             .dq = attn_batched(m, attn_raw_query(m, dqkv)),
             .dk = far ? gathered(m, r, of(g, r->dall), 0) : attn_batched(m, attn_raw_keys(m, dkv)),
             .dv = far ? gathered(m, r, of(g, r->dall), 1) : attn_values(m, dkv), .dsink = of(g, s->sink.dw),
             .scale = m->scale, .window = m->window, .sink_zero = m->sink_zero, .drop = attention_dropout(b));
    if (far || (!m->rope && !m->qk_norm))
        return;
    struct tensor dq = attn_raw_query(m, dqkv), dk = attn_raw_keys(m, dkv);
    attention_unrotate(g, n, m, s, dq, dq, attn_raw_query(m, qkv), &s->q_norm, s->rstd_q);
    attention_unrotate(g, n, m, s, dk, dk, attn_raw_keys(m, kv), &s->k_norm, s->rstd_k);
}

/* Rows for other ranks, from k and v; in the backward pass the row of dqkv, from dq and the sums of all ranks. */
static void declare_kv(struct build *b, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    struct tensor qkv = of(g, s->qkv), row = attn_kv_row(g, m, s), own = of(g, s->kv.own);
    int64_t kv = m->kv_heads * m->dim;
    double bytes = 2 * (double)dtype_bytes(b->dev->real) * (double)b->rows * (double)m->width;
    int n = graph_node(g, "kv_own", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = attn_keys(g, m, s), .y = attn_heads_of(m, own, 0, m->kv_heads)); /* copies */
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = attn_heads_of(m, row, m->v_at, m->kv_heads),
             .y = attn_heads_of(m, own, kv, m->kv_heads));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (training(b)) {
        struct tensor dq = of(g, s->dq), down = of(g, s->kv.down), dqkv = of(g, s->dqkv), drow = attn_dkv_row(g, m, s);
        graph_again(g, n, s->kv.own);
        attention_unrotate(g, n, m, s, attn_raw_query(m, dq), attn_raw_query(m, dqkv), attn_raw_query(m, qkv),
                           &s->q_norm, s->rstd_q);
        attention_unrotate(g, n, m, s, attn_heads_of(m, down, 0, m->kv_heads), attn_raw_keys(m, drow),
                           attn_raw_keys(m, row), &s->k_norm, s->rstd_k);
        GRAPH_OP(g, n, PH_BWD, dropout, .x = tensor_cols(&down, kv, kv), .y = tensor_cols(&drow, m->v_at, kv));
        if (m->gate_at >= 0)
            GRAPH_OP(g, n, PH_BWD, dropout, .x = attn_gate(m, dq), .y = attn_gate(m, dqkv));
        graph_cost(g, n, PH_BWD, 0, bytes);
    }
    context_gather(b, "kv", &s->kv);
}

static void declare_core(struct build *b, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    /* Causal half of the two score matrices: with parallel.cp all keys before this rank's, too. */
    double pairs = (double)(b->batch * b->seq) * (double)(2 * context_seen(b) - b->seq);
    double flops = 2.0 * pairs * (double)(m->heads * m->dim);
    double bytes = (double)dtype_bytes(b->dev->real) * (double)b->rows * (double)(m->width + m->heads * m->dim);
    int n = graph_node(g, "core", LANE_COMPUTE, NULL);
    declare_core_fwd(b, n, m, s);
    graph_cost(g, n, PH_FWD, flops, bytes);
    if (!training(b))
        return;
    graph_again(g, n, s->o);
    graph_again(g, n, s->lse);
    graph_again(g, n, s->og);
    declare_core_bwd(b, n, m, s);
    graph_cost(g, n, PH_BWD, 2.5 * flops, 3 * bytes);
}

static int attention_declare(struct build *b, struct core_io *io)
{
    struct attention whole, sizes, *m = &sizes;
    set_sizes(b, &whole, 1);
    set_sizes(b, m, b->mesh->tp);
    struct attention_slots s = {.cos = NO_SLOT, .sin = NO_SLOT};
    struct weight wqkv, bqkv, wo, bo;
    graph_scope(b->g, b->layer, "attn");
    if (m->rope)
        TRY(declare_tables(b, &s));
    declare_params(b, &whole, &s, &wqkv, &bqkv, &wo, &bo);
    TRY(b->g->err.code);
    declare_slots(b, m, &s);
    io->f = build_real(b, "out", b->rows, b->cfg->model.hidden);
    if (m->kv_ranks > 1) {
        declare_parts(b, m, &s, io, wqkv, bqkv);
        declare_shared_kv(b, m, &s);
    } else {
        declare_qkv(b, m, &s, io, wqkv, bqkv);
    }
    if (s.divided && !s.ring)
        declare_kv(b, m, &s);
    if (s.ring)
        TRY(attention_ring(b, m, &s));
    else
        declare_core(b, m, &s);
    slot_id o = s.og != NO_SLOT ? s.og : s.o;
    linear_declare(b, "proj",
                   &(struct linear){.x = o,
                                    .y = io->f,
                                    .dy = io->df,
                                    .dx = s.dog,
                                    .w = wo,
                                    .bias = bo,
                                    .in = m->heads * m->dim,
                                    .out = b->cfg->model.hidden,
                                    .summed = true,
                                    .x_kept = s.og == NO_SLOT});
    return b->g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

/* Layers of this kind in one part of the pattern: those of a prediction depth count from 1 again. */
static int64_t most_layers(const struct config *c, char symbol)
{
    int64_t most = 0, n = 0;
    for (const char *p = c->model.pattern; *p != '\0'; p++) {
        n = *p == '/' ? 0 : n + (*p == symbol);
        most = max_i64(most, n);
    }
    return most;
}

static bool skip_reaches(const struct config *c) { return most_layers(c, '*') >= c->model.attn_window_skip; }
static bool no_rope_reaches(const struct config *c)
{
    return c->model.rope != CFG_ROPE_NONE && most_layers(c, '*') >= c->model.no_rope_freq;
}

bool rope_rotates(const struct config *c) { return c->model.rope != CFG_ROPE_NONE && c->model.no_rope_freq != 1; }
bool rope_is_llama3(const struct config *c)
{
    return rope_rotates(c) && c->model.rope_scaling == CFG_ROPE_SCALING_LLAMA3;
}
bool rope_is_yarn(const struct config *c) { return rope_rotates(c) && c->model.rope_scaling == CFG_ROPE_SCALING_YARN; }
bool rope_is_stretched(const struct config *c) { return rope_is_llama3(c) || rope_is_yarn(c); }
static bool no_other_bias(const struct config *c) { return !c->model.bias && !c->model.attn_bias; }
static bool not_all_biases(const struct config *c) { return !c->model.bias; }

static bool has_attention(const struct config *c) { return strchr(c->model.pattern, '*') != NULL; }
static bool heads_do_not_divide_hidden(const struct config *c) { return has_attention(c) && c->model.head_dim == 0; }
static bool sequence_divided(const struct config *c) { return c->parallel.cp > 1; }
static bool in_ring(const struct config *c)
{
    return has_attention(c) && sequence_divided(c) && c->parallel.cp_comm == CFG_CP_COMM_RING;
}
/* Four keys share a draw of random numbers. */
static bool ring_cuts_a_draw(const struct config *c)
{
    return in_ring(c) && c->model.attention_dropout > 0 && c->train.seq / c->parallel.cp % 4 != 0;
}
static bool ring_recomputed(const struct config *c)
{
    bool selective = c->plan.recompute_granularity == CFG_GRANULARITY_SELECTIVE && c->plan.recompute[0] == '\0';
    return in_ring(c) && (selective || str_has_word(c->plan.recompute, "core_attn"));
}
static bool row_norm_divided(const struct config *c)
{
    return has_attention(c) && c->parallel.tp > 1 && c->model.qk_norm == CFG_QK_NORM_ROW;
}
static bool kv_heads_do_not_divide_heads(const struct config *c)
{
    return has_attention(c) && c->model.heads % c->model.kv_heads != 0;
}

static int64_t rotary_dim(const struct config *c)
{
    return (int64_t)((double)c->model.head_dim * c->model.rope_percent);
}

static bool rotary_dim_odd_or_zero(const struct config *c)
{
    return has_attention(c) && c->model.rope != CFG_ROPE_NONE && (rotary_dim(c) % 2 != 0 || rotary_dim(c) == 0);
}

static bool window_skip_without_window(const struct config *c)
{
    return c->model.attn_window_skip != 0 && c->model.attn_window == 0;
}

static bool yarn_of_a_part(const struct config *c)
{
    return c->model.rope_scaling == CFG_ROPE_SCALING_YARN && c->model.rope_percent != 1;
}

static bool rope_options_without_rope(const struct config *c)
{
    return c->model.rope == CFG_ROPE_NONE &&
           (c->model.rope_scaling != CFG_ROPE_SCALING_NONE || c->model.no_rope_freq != 0);
}

static bool rope_factor_without_scaling(const struct config *c)
{
    return c->model.rope_factor > 1 && c->model.rope_scaling == CFG_ROPE_SCALING_NONE;
}

static bool rope_scaling_without_factor(const struct config *c)
{
    return c->model.rope_scaling != CFG_ROPE_SCALING_NONE && !(c->model.rope_factor > 1);
}

static bool llama3_band_empty(const struct config *c)
{
    return c->model.rope_scaling == CFG_ROPE_SCALING_LLAMA3 && !(c->model.rope_low < c->model.rope_high);
}

static bool yarn_band_empty(const struct config *c)
{
    return c->model.rope_scaling == CFG_ROPE_SCALING_YARN && !(c->model.rope_beta_slow < c->model.rope_beta_fast);
}

static bool mscale_without_yarn(const struct config *c)
{
    return c->model.rope_scaling != CFG_ROPE_SCALING_YARN &&
           (c->model.rope_mscale != 0 || c->model.rope_mscale_all_dim != 0);
}

/* clang-format off */
static const struct option_use attention_uses[] = {
    {"model.heads", NULL, NULL},
    {"model.kv_heads", NULL, NULL},
    {"model.head_dim", NULL, NULL},
    {"model.qk_norm", NULL, NULL},
    {"model.attn_gate", NULL, NULL},
    {"model.attn_window", NULL, NULL},
    {"model.attn_window_skip", skip_reaches, "as many attention layers as it counts to"},
    {"model.attn_sink", NULL, NULL},
    {"model.attention_dropout", NULL, NULL},
    {"model.softmax_scale", NULL, NULL},
    {"model.qkv_bias", no_other_bias, "model.bias and model.attn_bias = off, which give these biases too"},
    {"model.attn_bias", not_all_biases, "model.bias = off, which gives these biases too"},
    {"model.bias", NULL, NULL},
    {"model.rope", NULL, NULL},
    {"model.rope_percent", rope_rotates, ROPE_NEEDS},
    ROPE_USES,
    {"model.no_rope_freq", no_rope_reaches, "rotary embedding, and as many attention layers as it counts to"},
    {"parallel.cp_comm", sequence_divided, "parallel.cp above 1"},
};
static const struct rule attention_rules[] = {
    {"ring-drops-by-fours", ring_cuts_a_draw,
     "parallel.cp_comm = ring with model.attention_dropout needs train.seq / parallel.cp in multiples of 4, since four "
     "keys share a draw; use parallel.cp_comm = gather or another train.seq",
     {"parallel.cp_comm", "model.attention_dropout", "train.seq", "parallel.cp"}},
    {"ring-keeps-its-output", ring_recomputed,
     "parallel.cp_comm = ring keeps the output of attention, since computing it again would send every block once "
     "more: "
     "core_attn cannot be recomputed; use parallel.cp_comm = gather, or other names in plan.recompute",
     {"parallel.cp_comm", "plan.recompute", "plan.recompute_granularity"}},
    {"row-norm-without-tp", row_norm_divided,
     "model.qk_norm = row takes one norm over all heads, which parallel.tp divides; use parallel.tp = 1",
     {"model.qk_norm", "parallel.tp"}},
    {"heads-divide-hidden", heads_do_not_divide_hidden,
     "model.hidden must be a multiple of model.heads unless model.head_dim is set",
     {"model.hidden", "model.heads", "model.head_dim"}},
    {"kv-heads-divide-heads", kv_heads_do_not_divide_heads,
     "model.heads must be a multiple of model.kv_heads",
     {"model.heads", "model.kv_heads"}},
    {"rotary-dim-even", rotary_dim_odd_or_zero,
     "rotary embedding turns channels in pairs: head_dim * rope_percent must be even and not 0",
     {"model.head_dim", "model.rope_percent", "model.rope"}},
    {"window-skip-needs-window", window_skip_without_window,
     "model.attn_window_skip needs model.attn_window",
     {"model.attn_window_skip", "model.attn_window"}},
    {"rope-options-need-rope", rope_options_without_rope,
     "model.rope_scaling and model.no_rope_freq need rotary embedding",
     {"model.rope", "model.rope_scaling", "model.no_rope_freq"}},
    {"yarn-rotates-all", yarn_of_a_part,
     "yarn scaling rotates all channels of a head, as in Megatron: model.rope_percent must be 1",
     {"model.rope_scaling", "model.rope_percent"}},
    {"rope-factor-needs-scaling", rope_factor_without_scaling,
     "model.rope_factor above 1 needs model.rope_scaling",
     {"model.rope_factor", "model.rope_scaling"}},
    {"rope-scaling-needs-factor", rope_scaling_without_factor,
     "model.rope_scaling does nothing unless model.rope_factor is above 1",
     {"model.rope_scaling", "model.rope_factor"}},
    {"llama3-band", llama3_band_empty,
     "llama3 scaling needs model.rope_low below model.rope_high",
     {"model.rope_scaling", "model.rope_low", "model.rope_high"}},
    {"yarn-band", yarn_band_empty,
     "yarn scaling needs model.rope_beta_slow below model.rope_beta_fast",
     {"model.rope_scaling", "model.rope_beta_slow", "model.rope_beta_fast"}},
    {"mscale-needs-yarn", mscale_without_yarn,
     "model.rope_mscale and model.rope_mscale_all_dim belong to yarn scaling",
     {"model.rope_scaling", "model.rope_mscale", "model.rope_mscale_all_dim"}},
};
static const struct tiny_size attention_tiny[] = {
    {"model.heads", 4, true}, {"model.head_dim", 8, true}, {"model.attn_window", 7, false},
};
/* clang-format on */

/* Four heads, and as many kv heads as the user's model has for so many: all, one or some. */
static int attention_shrink(struct config *c, const struct tiny_model *m, struct err *e)
{
    const struct config_model *u = &m->user->model;
    return config_set_i64(c, "model.kv_heads", u->kv_heads == u->heads ? 4 : u->kv_heads == 1 ? 1 : 2, e);
}

/* Projections, then the causal half of scores and values. */
static double attention_flops(const struct config *cfg, int64_t seq)
{
    const struct config_model *c = &cfg->model;
    double d = (double)c->hidden, q = (double)(c->heads * c->head_dim), kv = (double)(c->kv_heads * c->head_dim);
    return 2 * d * (2 * q + 2 * kv + (c->attn_gate ? q : 0)) + 2 * (double)seq * q;
}

static struct kind_sizes attention_sizes(const struct config *c)
{
    double width = (double)c->model.heads * (double)c->model.head_dim;
    return (struct kind_sizes){.token = width, .weight = width * (double)c->model.hidden};
}

static void attention_kernels(const struct kernel_report *r)
{
    const struct config_model *c = &r->cfg->model;
    kernel_line_attention(r, &(struct attention_sizes){.what = "attention",
                                                       .width = c->head_dim,
                                                       .values = c->head_dim,
                                                       .keys = c->kv_heads,
                                                       .window = c->attn_window,
                                                       .ring = in_ring(r->cfg)});
    if (in_ring(r->cfg) && r->dev->kind == DEV_CUDA)
        kernel_line(r, "attention over blocks of other ranks",
                    r->dev->real == DT_BF16 && c->head_dim <= 256 ? "own kernels on tensor cores"
                                                                  : "own kernels without tensor cores",
                    "cuDNN and the kernel for Hopper take blocks that end with the queries");
}

const struct core_kind core_attention = {
    .symbol = '*',
    .name = "attention",
    .title = "attention",
    .norm_key = "self_attention.linear_qkv.layer_norm_weight",
    .excludes = "D+CHW", /* turns by the model's rotary table, they by their own */
    .excludes_message =
        "a pattern cannot hold both Attention and MLA/DSA layers ('*' beside 'D', '+', 'C', 'H' or 'W')",
    .options = {KIND_ROWS(uses, attention_uses), KIND_ROWS(rules, attention_rules), KIND_ROWS(tiny, attention_tiny),
                .shrink = attention_shrink},
    .keys = {.family = "attention",
             .place = KEY_PLACE_ATTENTION,
             .mixes = true,
             .transformer = true,
             .prefixes = {"self_attention.", "input_layernorm."}},
    .recompute = {{"core_attn", {"attn.o", "attn.lse"}}},
    .divides_sequence = true,
    .divides_weights = true,
    .draws = attention_draws,
    .flops = attention_flops,
    .sizes = attention_sizes,
    .kernels = attention_kernels,
    .declare = attention_declare,
};
