/* The self-attention core, symbol '*': causal grouped-query attention with RoPE.
 *
 * Shapes: T = batch * seq rows, H query heads, G kv heads, D head size.
 *   qkv  [T, (H(+H) + 2G) D] = h Wqkv^T + b      sections [q | gate? | k | v] (disk: by kv group)
 *   qk   [T, (H + G) D]      = rope(norm(q, k))  only with q/k norm; without it q and k are rotated
 *                                                in place, inside the node that wrote them
 *   o    [T, H D], lse       = attention(q, k, v)
 *   og   [T, H D]            = o * sigmoid(gate) only with the output gate
 *   f    [T, hidden]         = og Wo^T + b
 * Nodes: qkv, core, proj. core's backward writes the gradient of the whole qkv row: gate first, then
 * attention, then rotation and norm undone in place. */
#include "layers/layer.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache.h"
#include "ops/gate/gate.h"
#include "ops/gemm/gemm.h"
#include "ops/rope/rope.h"

#include <math.h>

struct attention {
    int64_t batch, seq, heads, kv_heads, dim, width; /* width of a qkv row */
    int64_t q_at, gate_at, k_at, v_at;               /* first columns; gate_at -1: none */
    int64_t window;
    double scale, eps;
    bool rope, interleaved, qk_norm, zero_centered, sink_zero;
};

struct attention_slots {
    slot_id qkv, qk, rstd_q, rstd_k, o, og, lse, dqkv, dog, dout;
    slot_id cos, sin, k_cache, v_cache, fwd_work, bwd_work, rope_work;
    struct weight q_norm, k_norm, sink;
};

/* ---- views into a row --------------------------------------------------------------------------------- */

/* [T, heads, D] */
static struct tensor heads_of(const struct attention *m, const struct tensor *row, int64_t col, int64_t heads)
{
    if (row->data == NULL)
        return (struct tensor){0};
    struct tensor part = tensor_cols(row, col, heads * m->dim);
    return tensor_split_last(&part, heads, m->dim);
}

/* [B, S, heads, D] */
static struct tensor batched(const struct attention *m, struct tensor t)
{
    return t.data == NULL ? t : tensor_split_first(&t, m->batch, m->seq);
}

/* q and k as attention reads them: from qk if there is one, else from qkv. */
static struct tensor query(const struct attention *m, const struct tensor *qkv, const struct tensor *qk)
{
    return qk->data ? heads_of(m, qk, 0, m->heads) : heads_of(m, qkv, m->q_at, m->heads);
}

static struct tensor keys(const struct attention *m, const struct tensor *qkv, const struct tensor *qk)
{
    return qk->data ? heads_of(m, qk, m->heads * m->dim, m->kv_heads) : heads_of(m, qkv, m->k_at, m->kv_heads);
}

static struct tensor doc_view(const struct attention *m, const struct tensor *doc)
{
    return doc->data ? tensor_2d(doc->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

/* ---- node qkv ------------------------------------------------------------------------------------------- */

enum { QF_H, QF_W, QF_BIAS, QF_QN, QF_KN, QF_COS, QF_SIN, QF_POS, QF_QKV, QF_QK, QF_RQ, QF_RK };

static int rotate(const struct step_ctx *c, const struct attention *m, struct tensor x, struct tensor y, int norm, int rstd)
{
    struct rope_fwd_args a = {.x = x, .y = y, .w = c->t[norm], .rstd = c->t[rstd], .eps = m->eps,
                              .zero_centered = m->zero_centered, .interleaved = m->interleaved};
    if (m->rope) {
        a.cos = c->t[QF_COS];
        a.sin = c->t[QF_SIN];
        a.pos = c->t[QF_POS];
    }
    return c->ops->rope_fwd(c->lane, &a);
}

static int qkv_fwd(const struct step_ctx *c)
{
    const struct attention *m = c->self;
    const struct tensor *qkv = &c->t[QF_QKV], *qk = &c->t[QF_QK];
    struct gemm_args a = {.a = c->t[QF_H], .b = c->t[QF_W], .c = *qkv, .bias = c->t[QF_BIAS], .trans_b = true, .alpha = 1};
    TRY(c->ops->gemm(c->lane, &a));
    if (!m->rope && !m->qk_norm)
        return ST_OK;
    TRY(rotate(c, m, heads_of(m, qkv, m->q_at, m->heads), query(m, qkv, qk), QF_QN, QF_RQ));
    return rotate(c, m, heads_of(m, qkv, m->k_at, m->kv_heads), keys(m, qkv, qk), QF_KN, QF_RK);
}

/* ---- node core ------------------------------------------------------------------------------------------ */

enum { CF_QKV, CF_QK, CF_SINK, CF_DOC, CF_START, CF_O, CF_LSE, CF_OG, CF_KCACHE, CF_VCACHE, CF_WORK };

static int gate_output(const struct step_ctx *c, const struct attention *m)
{
    if (m->gate_at < 0)
        return ST_OK;
    struct gate_fwd_args g = {.x = c->t[CF_O], .g = tensor_cols(&c->t[CF_QKV], m->gate_at, m->heads * m->dim), .y = c->t[CF_OG]};
    return c->ops->gate_fwd(c->lane, &g);
}

static int core_fwd(const struct step_ctx *c)
{
    const struct attention *m = c->self;
    const struct tensor *qkv = &c->t[CF_QKV], *qk = &c->t[CF_QK];
    struct tensor k = batched(m, keys(m, qkv, qk)), v = batched(m, heads_of(m, qkv, m->v_at, m->kv_heads));
    struct tensor o = tensor_split_last(&c->t[CF_O], m->heads, m->dim);
    struct attention_fwd_args a = {
        .q = batched(m, query(m, qkv, qk)), .k = k, .v = v, .o = batched(m, o), .lse = c->t[CF_LSE], .sink = c->t[CF_SINK],
        .doc_start = doc_view(m, &c->t[CF_DOC]), .work = c->t[CF_WORK], .scale = m->scale, .window = m->window, .sink_zero = m->sink_zero};
    if (c->t[CF_KCACHE].data != NULL) {
        struct cache_store_args put_k = {.x = k, .cache = c->t[CF_KCACHE], .start = c->t[CF_START]};
        struct cache_store_args put_v = {.x = v, .cache = c->t[CF_VCACHE], .start = c->t[CF_START]};
        TRY(c->ops->cache_store(c->lane, &put_k));
        TRY(c->ops->cache_store(c->lane, &put_v));
        a.k = c->t[CF_KCACHE];
        a.v = c->t[CF_VCACHE];
        a.start = c->t[CF_START];
    }
    TRY(c->ops->attention_fwd(c->lane, &a));
    return gate_output(c, m);
}

enum { CB_DOG, CB_QKV, CB_QK, CB_O, CB_LSE, CB_SINK, CB_DOC, CB_QN, CB_KN, CB_RQ, CB_RK, CB_COS, CB_SIN, CB_POS,
       CB_DQKV, CB_DOUT, CB_DSINK, CB_DQN, CB_DKN, CB_WORK, CB_ROPEWORK };

static int unrotate(const struct step_ctx *c, const struct attention *m, struct tensor d, struct tensor x, int norm, int rstd, int dnorm)
{
    struct rope_bwd_args a = {.dy = d, .dx = d, .work = c->t[CB_ROPEWORK], .zero_centered = m->zero_centered,
                              .interleaved = m->interleaved, .acc_dw = c->add[dnorm]};
    if (m->qk_norm) {
        a.x = x;
        a.w = c->t[norm];
        a.rstd = c->t[rstd];
        a.dw = c->t[dnorm];
    }
    if (m->rope) {
        a.cos = c->t[CB_COS];
        a.sin = c->t[CB_SIN];
        a.pos = c->t[CB_POS];
    }
    return c->ops->rope_bwd(c->lane, &a);
}

static int core_bwd(const struct step_ctx *c)
{
    const struct attention *m = c->self;
    const struct tensor *qkv = &c->t[CB_QKV], *qk = &c->t[CB_QK], *dqkv = &c->t[CB_DQKV];
    struct tensor dout = c->t[CB_DOG];
    if (m->gate_at >= 0) {
        struct gate_bwd_args g = {.dy = c->t[CB_DOG], .x = c->t[CB_O], .g = tensor_cols(qkv, m->gate_at, m->heads * m->dim),
                                  .dx = c->t[CB_DOUT], .dg = tensor_cols(dqkv, m->gate_at, m->heads * m->dim)};
        TRY(c->ops->gate_bwd(c->lane, &g));
        dout = c->t[CB_DOUT];
    }
    struct tensor dq = heads_of(m, dqkv, m->q_at, m->heads), dk = heads_of(m, dqkv, m->k_at, m->kv_heads);
    struct tensor o = tensor_split_last(&c->t[CB_O], m->heads, m->dim), d_o = tensor_split_last(&dout, m->heads, m->dim);
    struct attention_bwd_args a = {
        .d_o = batched(m, d_o), .q = batched(m, query(m, qkv, qk)), .k = batched(m, keys(m, qkv, qk)),
        .v = batched(m, heads_of(m, qkv, m->v_at, m->kv_heads)), .o = batched(m, o), .lse = c->t[CB_LSE], .sink = c->t[CB_SINK],
        .doc_start = doc_view(m, &c->t[CB_DOC]), .dq = batched(m, dq), .dk = batched(m, dk),
        .dv = batched(m, heads_of(m, dqkv, m->v_at, m->kv_heads)), .dsink = c->t[CB_DSINK], .work = c->t[CB_WORK],
        .scale = m->scale, .window = m->window, .sink_zero = m->sink_zero, .acc_dsink = c->add[CB_DSINK]};
    TRY(c->ops->attention_bwd(c->lane, &a));
    if (!m->rope && !m->qk_norm)
        return ST_OK;
    TRY(unrotate(c, m, dq, heads_of(m, qkv, m->q_at, m->heads), CB_QN, CB_RQ, CB_DQN));
    return unrotate(c, m, dk, heads_of(m, qkv, m->k_at, m->kv_heads), CB_KN, CB_RK, CB_DKN);
}

/* ---- declaration ------------------------------------------------------------------------------------------ */

static void sizes(const struct build *b, struct attention *m)
{
    const struct config_model *c = &b->cfg->model;
    int64_t number = b->number;
    *m = (struct attention){.batch = b->batch, .seq = b->seq, .heads = c->heads, .kv_heads = c->kv_heads, .dim = c->head_dim,
                            .scale = c->softmax_scale, .eps = c->norm_eps, .qk_norm = c->qk_norm,
                            .zero_centered = c->norm_zero_centered, .sink_zero = c->attn_sink == CFG_SINK_OFF_BY_ONE,
                            .interleaved = c->rope == CFG_ROPE_INTERLEAVED};
    bool full = c->attn_window_skip > 0 && number % c->attn_window_skip == 0;
    m->window = full ? 0 : c->attn_window;
    m->rope = c->rope != CFG_ROPE_NONE && !(c->no_rope_freq > 0 && number % c->no_rope_freq == 0);
    int64_t q = m->heads * m->dim, kv = m->kv_heads * m->dim;
    m->gate_at = c->attn_gate ? q : -1;
    m->k_at = c->attn_gate ? 2 * q : q;
    m->v_at = m->k_at + kv;
    m->width = m->v_at + kv;
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

static void declare_params(struct build *b, const struct attention *m, struct attention_slots *s, struct weight *wqkv,
                           struct weight *bqkv, struct weight *wo, struct weight *bo)
{
    const struct config_model *c = &b->cfg->model;
    enum init_kind gain = c->norm_zero_centered ? INIT_ZERO : INIT_ONE;
    struct param p = param_matrix("self_attention.linear_qkv.weight", m->width, c->hidden, c->init_std);
    struct param pb = param_vector("self_attention.linear_qkv.bias", m->width, INIT_ZERO);
    struct param o = param_matrix("self_attention.linear_proj.weight", c->hidden, m->heads * m->dim, output_std(b));
    struct param ob = param_vector("self_attention.linear_proj.bias", c->hidden, INIT_ZERO);
    struct param qn = param_vector("self_attention.q_layernorm.weight", m->dim, gain);
    struct param kn = param_vector("self_attention.k_layernorm.weight", m->dim, gain);
    struct param sink = param_vector("self_attention.core_attention.softmax_offset", m->heads, INIT_ZERO);
    p.rows = pb.rows = by_group(m);
    *wqkv = build_weight(b, &p);
    *bqkv = c->qkv_bias || c->bias ? build_weight(b, &pb) : no_weight();
    *wo = build_weight(b, &o);
    *bo = c->bias ? build_weight(b, &ob) : no_weight();
    s->q_norm = m->qk_norm ? build_weight(b, &qn) : no_weight();
    s->k_norm = m->qk_norm ? build_weight(b, &kn) : no_weight();
    s->sink = c->attn_sink == CFG_SINK_LEARNABLE ? build_weight(b, &sink) : no_weight();
}

static struct tensor shaped4(const struct build *b, int64_t n, int64_t heads, int64_t dim)
{
    return tensor_4d(NULL, b->dev->real, b->batch, n, heads, dim);
}

/* Scratch sizes depend on the shapes of the real call. */
static void declare_work(struct build *b, const struct attention *m, struct attention_slots *s)
{
    int64_t kv = b->mode == BUILD_DECODE ? b->cache_len : b->seq;
    struct attention_fwd_args f = {.q = shaped4(b, b->seq, m->heads, m->dim), .k = shaped4(b, kv, m->kv_heads, m->dim),
                                   .v = shaped4(b, kv, m->kv_heads, m->dim), .o = shaped4(b, b->seq, m->heads, m->dim),
                                   .scale = m->scale, .window = m->window};
    if (s->sink.w != NO_SLOT)
        f.sink = tensor_1d(NULL, b->dev->wide, m->heads);
    s->fwd_work = b->ops->attention_fwd_work ? build_work(b, "fwd_work", b->ops->attention_fwd_work(&f)) : NO_SLOT;
    s->bwd_work = s->rope_work = NO_SLOT;
    if (!training(b))
        return;
    struct attention_bwd_args w = {.d_o = f.o, .q = f.q, .k = f.k, .v = f.v, .o = f.o, .dq = f.q, .dk = f.k, .dv = f.v,
                                   .sink = f.sink, .dsink = f.sink, .scale = m->scale, .window = m->window};
    s->bwd_work = b->ops->attention_bwd_work ? build_work(b, "bwd_work", b->ops->attention_bwd_work(&w)) : NO_SLOT;
    struct rope_bwd_args r = {.dy = tensor_3d(NULL, b->dev->real, b->rows, m->heads, m->dim)};
    r.x = r.dx = r.dy;
    r.w = r.dw = tensor_1d(NULL, b->dev->wide, m->dim);
    if (m->qk_norm && b->ops->rope_bwd_work)
        s->rope_work = build_work(b, "rope_work", b->ops->rope_bwd_work(&r));
}

static void declare_slots(struct build *b, const struct attention *m, struct attention_slots *s)
{
    int64_t o_cols = m->heads * m->dim;
    s->qkv = build_real(b, "qkv", b->rows, m->width);
    s->qk = m->qk_norm ? build_real(b, "qk", b->rows, (m->heads + m->kv_heads) * m->dim) : NO_SLOT;
    s->rstd_q = m->qk_norm ? build_wide(b, "rstd_q", b->rows, m->heads) : NO_SLOT;
    s->rstd_k = m->qk_norm ? build_wide(b, "rstd_k", b->rows, m->kv_heads) : NO_SLOT;
    s->o = build_real(b, "o", b->rows, o_cols);
    s->og = m->gate_at >= 0 ? build_real(b, "og", b->rows, o_cols) : NO_SLOT;
    s->lse = graph_slot(b->g, "lse", tensor_3d(NULL, b->dev->wide, b->batch, m->heads, b->seq));
    s->dqkv = build_grad(b, "dqkv", b->rows, m->width);
    s->dog = build_grad(b, "do", b->rows, o_cols);
    s->dout = m->gate_at >= 0 ? build_grad(b, "dout", b->rows, o_cols) : NO_SLOT;
    bool decode = b->mode == BUILD_DECODE;
    s->k_cache = decode ? build_table(b, "k_cache", shaped4(b, b->cache_len, m->kv_heads, m->dim), NULL, NULL) : NO_SLOT;
    s->v_cache = decode ? build_table(b, "v_cache", shaped4(b, b->cache_len, m->kv_heads, m->dim), NULL, NULL) : NO_SLOT;
    declare_work(b, m, s);
}

static void declare_qkv(struct build *b, const struct attention *m, const struct attention_slots *s, const struct core_io *io,
                        struct weight w, struct weight bias)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    struct linear l = {.x = io->h, .y = s->qkv, .dy = s->dqkv, .dx = io->dh, .w = w, .bias = bias, .in = d, .out = m->width};
    const struct use uses[] = {READS(io->h), READS(w.w), READS(bias.w), READS(s->q_norm.w), READS(s->k_norm.w), READS(s->cos),
                               READS(s->sin), READS(b->in.pos), WRITES(s->qkv), WRITES(s->qk), WRITES(s->rstd_q), WRITES(s->rstd_k)};
    int n = linear_declare_with(b, "qkv", &l, qkv_fwd, m, uses, countof(uses));
    if (training(b))
        graph_replay(g, s->qk, n);
}

static void declare_core(struct build *b, const struct attention *m, const struct attention_slots *s)
{
    struct graph *g = b->g;
    const struct use uses[] = {READS(s->qkv), READS(s->qk), READS(s->sink.w), READS(b->in.doc_start), READS(b->in.start), WRITES(s->o),
                               WRITES(s->lse), WRITES(s->og), ADDS(s->k_cache), ADDS(s->v_cache), WRITES(s->fwd_work)};
    /* Causal half of the two score matrices. */
    double flops = 2.0 * (double)(b->batch * b->seq * b->seq) * (double)(m->heads * m->dim);
    double bytes = (double)dtype_bytes(b->dev->real) * (double)b->rows * (double)(m->width + m->heads * m->dim);
    int n = graph_node(g, "core", LANE_COMPUTE, m);
    graph_phase(g, n, PH_FWD, core_fwd, uses, countof(uses));
    graph_cost(g, n, PH_FWD, flops, bytes);
    if (!training(b))
        return;
    graph_phase(g, n, PH_REPLAY, core_fwd, uses, countof(uses));
    graph_cost(g, n, PH_REPLAY, flops, bytes);
    graph_replay(g, s->o, n);
    graph_replay(g, s->lse, n);
    graph_replay(g, s->og, n);
    GRAPH_PHASE(g, n, PH_BWD, core_bwd, READS(s->dog), READS(s->qkv), READS(s->qk), READS(s->o), READS(s->lse), READS(s->sink.w),
                READS(b->in.doc_start), READS(s->q_norm.w), READS(s->k_norm.w), READS(s->rstd_q), READS(s->rstd_k), READS(s->cos),
                READS(s->sin), READS(b->in.pos), WRITES(s->dqkv), WRITES(s->dout), ADDS(s->sink.dw), ADDS(s->q_norm.dw),
                ADDS(s->k_norm.dw), WRITES(s->bwd_work), WRITES(s->rope_work));
    graph_cost(g, n, PH_BWD, 2.5 * flops, 3 * bytes);
}

static int attention_declare(struct build *b, struct core_io *io)
{
    struct attention *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    sizes(b, m);
    struct attention_slots s = {.cos = NO_SLOT, .sin = NO_SLOT};
    struct weight wqkv, bqkv, wo, bo;
    graph_scope(b->g, b->layer, "attn");
    if (m->rope)
        TRY(declare_tables(b, &s));
    declare_params(b, m, &s, &wqkv, &bqkv, &wo, &bo);
    declare_slots(b, m, &s);
    io->f = build_real(b, "out", b->rows, b->cfg->model.hidden);
    declare_qkv(b, m, &s, io, wqkv, bqkv);
    declare_core(b, m, &s);
    slot_id o = s.og != NO_SLOT ? s.og : s.o;
    linear_declare(b, "proj", &(struct linear){.x = o, .y = io->f, .dy = io->df, .dx = s.dog, .w = wo, .bias = bo,
                                               .in = m->heads * m->dim, .out = b->cfg->model.hidden});
    return b->g->err.code;
}

const struct core_kind core_attention = {
    .symbol = '*', .name = "attention", .norm_key = "self_attention.linear_qkv.layer_norm_weight", .declare = attention_declare};
