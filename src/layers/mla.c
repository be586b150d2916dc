/* The multi-latent attention core, symbol '+' (DeepSeek-V3 shapes).
 *
 * Shapes: T rows, H heads, n = channels without position, r = rotary channels, v = value channels,
 * Rq, Rkv = latent ranks.
 *   q    [T, H (n+r)] = norm(h Wqd^T) Wqu^T      (or h Wq^T when Rq = 0), last r of each head rotated
 *   kvd  [T, Rkv + r] = h Wkvd^T                 [latent | rotary key], the rotary key rotated
 *   kv   [T, H (n+v)] = norm(latent) Wkvu^T      per head [key without position | value]
 *   k    [T, H (n+r)] = per head [kv's n | the one rotary key]
 *   o    [T, H v]     = attention(q, k, v);  f = o Wo^T
 * Rotation pairs neighbouring channels (2c, 2c+1): the same scores as DeepSeek's de-interleaved form,
 * whose permutation of q and k cancels in their product. */
#include "layers/layer.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache.h"
#include "ops/gemm/gemm.h"
#include "ops/mlakeys/mlakeys.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

#include <math.h>

struct mla {
    int64_t batch, seq, heads, nope, rope, v, q_rank, kv_rank;
    double scale, eps;
    bool zero_centered;
};

struct mla_slots {
    slot_id q_in, dq_in; /* input of the last query projection: the normed latent, or h */
    slot_id q, dq, kvd, dkvd, latent, dlatent, kv, dkv, k, dk, o, d_o, lse, rstd;
    slot_id cos, sin, k_cache, v_cache, fwd_work, bwd_work, norm_work;
};

/* ---- views ------------------------------------------------------------------------------------------------ */

static struct tensor heads3(const struct tensor *t, int64_t heads, int64_t width)
{
    return tensor_split_last(t, heads, width);
}

static struct tensor batched(const struct mla *m, struct tensor t) { return tensor_split_first(&t, m->batch, m->seq); }

/* The rotary channels of every head of q: [T, H, r]. */
static struct tensor rotary(const struct mla *m, const struct tensor *q)
{
    struct tensor t = heads3(q, m->heads, m->nope + m->rope);
    return tensor_cols(&t, m->nope, m->rope);
}

/* The shared rotary key: [T, 1, r]. */
static struct tensor shared_key(const struct mla *m, const struct tensor *kvd)
{
    struct tensor t = tensor_cols(kvd, m->kv_rank, m->rope);
    return tensor_split_last(&t, 1, m->rope);
}

static struct tensor values(const struct mla *m, const struct tensor *kv)
{
    struct tensor t = heads3(kv, m->heads, m->nope + m->v);
    return tensor_cols(&t, m->nope, m->v);
}

/* ---- projections that also rotate ----------------------------------------------------------------------- */

enum { PF_X, PF_W, PF_COS, PF_SIN, PF_POS, PF_Y };

static int project_and_rotate(const struct step_ctx *c, struct tensor part)
{
    struct gemm_args a = {.a = c->t[PF_X], .b = c->t[PF_W], .c = c->t[PF_Y], .trans_b = true, .alpha = 1};
    struct rope_fwd_args r = {.x = part, .y = part, .cos = c->t[PF_COS], .sin = c->t[PF_SIN], .pos = c->t[PF_POS], .interleaved = true};
    TRY(c->ops->gemm(c->lane, &a));
    return c->ops->rope_fwd(c->lane, &r);
}

static int query_fwd(const struct step_ctx *c) { return project_and_rotate(c, rotary(c->self, &c->t[PF_Y])); }
static int latent_fwd(const struct step_ctx *c) { return project_and_rotate(c, shared_key(c->self, &c->t[PF_Y])); }

/* ---- norms of the latents --------------------------------------------------------------------------------- */

static int norm_fwd(const struct step_ctx *c)
{
    enum { X, W, Y, RSTD };
    const struct mla *m = c->self;
    struct tensor x = tensor_cols(&c->t[X], 0, c->t[Y].dim[1]);
    struct rmsnorm_fwd_args a = {.x = x, .w = c->t[W], .y = c->t[Y], .rstd = c->t[RSTD], .eps = m->eps, .zero_centered = m->zero_centered};
    return c->ops->rmsnorm_fwd(c->lane, &a);
}

enum { NB_DY, NB_X, NB_W, NB_RSTD, NB_DK, NB_COS, NB_SIN, NB_POS, NB_DX, NB_DW, NB_WORK };

static int norm_bwd(const struct step_ctx *c)
{
    const struct mla *m = c->self;
    int64_t rank = c->t[NB_DY].dim[1];
    struct rmsnorm_bwd_args a = {.dy = c->t[NB_DY], .x = tensor_cols(&c->t[NB_X], 0, rank), .w = c->t[NB_W], .rstd = c->t[NB_RSTD],
                                 .dx = tensor_cols(&c->t[NB_DX], 0, rank), .dw = c->t[NB_DW], .work = c->t[NB_WORK],
                                 .zero_centered = m->zero_centered, .acc_dw = c->add[NB_DW]};
    TRY(c->ops->rmsnorm_bwd(c->lane, &a));
    if (c->t[NB_DK].data == NULL)
        return ST_OK;
    /* The key's latent also carries the rotary key: its gradient is the sum over heads, turned back. */
    struct tensor part = shared_key(m, &c->t[NB_DX]);
    struct mlakeys_bwd_args k = {.dk = heads3(&c->t[NB_DK], m->heads, m->nope + m->rope),
                                 .dshared = tensor_cols(&c->t[NB_DX], m->kv_rank, m->rope), .nope = m->nope};
    struct rope_bwd_args r = {.dy = part, .dx = part, .cos = c->t[NB_COS], .sin = c->t[NB_SIN], .pos = c->t[NB_POS], .interleaved = true};
    TRY(c->ops->mlakeys_bwd(c->lane, &k));
    return c->ops->rope_bwd(c->lane, &r);
}

/* ---- core --------------------------------------------------------------------------------------------------- */

enum { CF_Q, CF_KVD, CF_KV, CF_DOC, CF_START, CF_K, CF_O, CF_LSE, CF_KCACHE, CF_VCACHE, CF_WORK };

static struct tensor doc_view(const struct mla *m, const struct tensor *doc)
{
    return doc->data ? tensor_2d(doc->data, DT_I32, m->batch, m->seq) : (struct tensor){0};
}

static int core_fwd(const struct step_ctx *c)
{
    const struct mla *m = c->self;
    struct tensor k = heads3(&c->t[CF_K], m->heads, m->nope + m->rope), v = values(m, &c->t[CF_KV]);
    struct mlakeys_fwd_args keys = {.kv = heads3(&c->t[CF_KV], m->heads, m->nope + m->v),
                                    .shared = tensor_cols(&c->t[CF_KVD], m->kv_rank, m->rope), .k = k};
    TRY(c->ops->mlakeys_fwd(c->lane, &keys));
    struct attention_fwd_args a = {.q = batched(m, heads3(&c->t[CF_Q], m->heads, m->nope + m->rope)), .k = batched(m, k), .v = batched(m, v),
                                   .o = batched(m, heads3(&c->t[CF_O], m->heads, m->v)), .lse = c->t[CF_LSE],
                                   .doc_start = doc_view(m, &c->t[CF_DOC]), .work = c->t[CF_WORK], .scale = m->scale};
    if (c->t[CF_KCACHE].data != NULL) {
        struct cache_store_args put_k = {.x = a.k, .cache = c->t[CF_KCACHE], .start = c->t[CF_START]};
        struct cache_store_args put_v = {.x = a.v, .cache = c->t[CF_VCACHE], .start = c->t[CF_START]};
        TRY(c->ops->cache_store(c->lane, &put_k));
        TRY(c->ops->cache_store(c->lane, &put_v));
        a.k = c->t[CF_KCACHE];
        a.v = c->t[CF_VCACHE];
        a.start = c->t[CF_START];
    }
    return c->ops->attention_fwd(c->lane, &a);
}

enum { CB_DO, CB_Q, CB_KV, CB_K, CB_O, CB_LSE, CB_DOC, CB_COS, CB_SIN, CB_POS, CB_DQ, CB_DK, CB_DKV, CB_WORK };

static int core_bwd(const struct step_ctx *c)
{
    const struct mla *m = c->self;
    int64_t qk = m->nope + m->rope;
    struct tensor dk = heads3(&c->t[CB_DK], m->heads, qk);
    struct attention_bwd_args a = {
        .d_o = batched(m, heads3(&c->t[CB_DO], m->heads, m->v)), .q = batched(m, heads3(&c->t[CB_Q], m->heads, qk)),
        .k = batched(m, heads3(&c->t[CB_K], m->heads, qk)), .v = batched(m, values(m, &c->t[CB_KV])),
        .o = batched(m, heads3(&c->t[CB_O], m->heads, m->v)), .lse = c->t[CB_LSE], .doc_start = doc_view(m, &c->t[CB_DOC]),
        .dq = batched(m, heads3(&c->t[CB_DQ], m->heads, qk)), .dk = batched(m, dk), .dv = batched(m, values(m, &c->t[CB_DKV])),
        .work = c->t[CB_WORK], .scale = m->scale};
    TRY(c->ops->attention_bwd(c->lane, &a));
    struct mlakeys_bwd_args k = {.dk = dk, .dkv = heads3(&c->t[CB_DKV], m->heads, m->nope + m->v), .nope = m->nope};
    TRY(c->ops->mlakeys_bwd(c->lane, &k));
    struct tensor part = rotary(m, &c->t[CB_DQ]);
    struct rope_bwd_args r = {.dy = part, .dx = part, .cos = c->t[CB_COS], .sin = c->t[CB_SIN], .pos = c->t[CB_POS], .interleaved = true};
    return c->ops->rope_bwd(c->lane, &r);
}

/* ---- declaration ------------------------------------------------------------------------------------------ */

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

static int declare_tables(struct build *b, struct mla *m, struct mla_slots *s)
{
    struct rope_config *r = graph_own(b->g, sizeof *r);
    if (r == NULL)
        return ST_NOMEM;
    *r = rope_from_config(b->cfg, m->rope);
    TRY(rope_config_check(r, b->e));
    bool yarn = r->scaling == ROPE_YARN && r->factor > 1 && r->mscale_all_dim != 0;
    double ms = yarn ? 0.1 * r->mscale_all_dim * log(r->factor) + 1 : 1;
    double asked = b->cfg->model.mla_softmax_scale;
    m->scale = asked > 0 ? asked : ms * ms / sqrt((double)(m->nope + m->rope));
    struct tensor shape = tensor_2d(NULL, b->dev->wide, max_i64(b->cfg->train.seq, b->cache_len), m->rope / 2);
    graph_scope(b->g, -1, "mla_rope");
    s->cos = build_table(b, "cos", shape, fill_cos, r);
    s->sin = build_table(b, "sin", shape, fill_sin, r);
    graph_scope(b->g, b->layer, "mla");
    return b->g->err.code;
}

/* A linear node whose forward is replaced by one that also rotates. */
static void declare_rotated(struct build *b, const char *name, const struct mla *m, const struct mla_slots *s, const struct linear *l, step_fn fn)
{
    const struct use uses[] = {READS(l->x), READS(l->w.w), READS(s->cos), READS(s->sin), READS(b->in.pos), WRITES(l->y)};
    linear_declare_with(b, name, l, fn, m, uses, countof(uses));
}

static void declare_norm(struct build *b, const char *name, const struct mla *m, const struct mla_slots *s, slot_id x, slot_id dx, slot_id y,
                         slot_id dy, int64_t rank, const char *key, bool with_key)
{
    struct graph *g = b->g;
    char rstd_name[32], work_name[32];
    snprintf(rstd_name, sizeof rstd_name, "%s_rstd", name);
    snprintf(work_name, sizeof work_name, "%s_work", name);
    struct param p = param_vector(key, rank, m->zero_centered ? INIT_ZERO : INIT_ONE);
    struct weight w = build_weight(b, &p);
    slot_id rstd = graph_slot(g, rstd_name, tensor_1d(NULL, b->dev->wide, b->rows));
    double elems = (double)(b->rows * rank), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, name, LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, norm_fwd, READS(x), READS(w.w), WRITES(y), WRITES(rstd));
    graph_cost(g, n, PH_FWD, 4 * elems, 2 * elems * size);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_REPLAY, norm_fwd, READS(x), READS(w.w), WRITES(y), WRITES(rstd));
    graph_replay(g, y, n);
    struct rmsnorm_bwd_args a = {.x = tensor_2d(NULL, b->dev->real, b->rows, rank), .w = tensor_1d(NULL, b->dev->wide, rank)};
    slot_id work = b->ops->rmsnorm_bwd_work ? build_work(b, work_name, b->ops->rmsnorm_bwd_work(&a)) : NO_SLOT;
    slot_id none = NO_SLOT;
    GRAPH_PHASE(g, n, PH_BWD, norm_bwd, READS(dy), READS(x), READS(w.w), READS(rstd), READS(with_key ? s->dk : none), READS(with_key ? s->cos : none),
                READS(with_key ? s->sin : none), READS(with_key ? b->in.pos : none), WRITES(dx), ADDS(w.dw), WRITES(work));
    graph_cost(g, n, PH_BWD, 9 * elems, 3 * elems * size);
}

static struct tensor shape4(const struct build *b, int64_t n, int64_t heads, int64_t width)
{
    return tensor_4d(NULL, b->dev->real, b->batch, n, heads, width);
}

static void declare_work(struct build *b, const struct mla *m, struct mla_slots *s)
{
    int64_t keys = b->mode == BUILD_DECODE ? b->cache_len : b->seq, qk = m->nope + m->rope;
    struct attention_fwd_args f = {.q = shape4(b, b->seq, m->heads, qk), .k = shape4(b, keys, m->heads, qk), .v = shape4(b, keys, m->heads, m->v),
                                   .o = shape4(b, b->seq, m->heads, m->v), .scale = m->scale};
    struct attention_bwd_args w = {.d_o = f.o, .q = f.q, .k = f.k, .v = f.v, .o = f.o, .dq = f.q, .dk = f.k, .dv = f.v, .scale = m->scale};
    s->fwd_work = b->ops->attention_fwd_work ? build_work(b, "fwd_work", b->ops->attention_fwd_work(&f)) : NO_SLOT;
    s->bwd_work = training(b) && b->ops->attention_bwd_work ? build_work(b, "bwd_work", b->ops->attention_bwd_work(&w)) : NO_SLOT;
}

static void declare_slots(struct build *b, const struct mla *m, struct mla_slots *s)
{
    int64_t qk = m->heads * (m->nope + m->rope), kv = m->heads * (m->nope + m->v), o = m->heads * m->v;
    s->q = build_real(b, "q", b->rows, qk);
    s->kvd = build_real(b, "kv_down", b->rows, m->kv_rank + m->rope);
    s->latent = build_real(b, "latent", b->rows, m->kv_rank);
    s->kv = build_real(b, "kv", b->rows, kv);
    s->k = build_real(b, "k", b->rows, qk);
    s->o = build_real(b, "o", b->rows, o);
    s->lse = graph_slot(b->g, "lse", tensor_3d(NULL, b->dev->wide, b->batch, m->heads, b->seq));
    s->dq = build_grad(b, "dq", b->rows, qk);
    s->dkvd = build_grad(b, "dkv_down", b->rows, m->kv_rank + m->rope);
    s->dlatent = build_grad(b, "dlatent", b->rows, m->kv_rank);
    s->dkv = build_grad(b, "dkv", b->rows, kv);
    s->dk = build_grad(b, "dk", b->rows, qk);
    s->d_o = build_grad(b, "do", b->rows, o);
    bool decode = b->mode == BUILD_DECODE;
    s->k_cache = decode ? build_table(b, "k_cache", shape4(b, b->cache_len, m->heads, m->nope + m->rope), NULL, NULL) : NO_SLOT;
    s->v_cache = decode ? build_table(b, "v_cache", shape4(b, b->cache_len, m->heads, m->v), NULL, NULL) : NO_SLOT;
    declare_work(b, m, s);
}

static void declare_core(struct build *b, const struct mla *m, const struct mla_slots *s)
{
    struct graph *g = b->g;
    const struct use uses[] = {READS(s->q), READS(s->kvd), READS(s->kv), READS(b->in.doc_start), READS(b->in.start), WRITES(s->k), WRITES(s->o),
                               WRITES(s->lse), ADDS(s->k_cache), ADDS(s->v_cache), WRITES(s->fwd_work)};
    double flops = (double)b->rows * (double)b->seq * (double)m->heads * (double)(m->nope + m->rope + m->v);
    int n = graph_node(g, "core", LANE_COMPUTE, m);
    graph_phase(g, n, PH_FWD, core_fwd, uses, countof(uses));
    graph_cost(g, n, PH_FWD, flops, 0);
    if (!training(b))
        return;
    graph_phase(g, n, PH_REPLAY, core_fwd, uses, countof(uses));
    graph_cost(g, n, PH_REPLAY, flops, 0);
    graph_replay(g, s->k, n);
    graph_replay(g, s->o, n);
    graph_replay(g, s->lse, n);
    GRAPH_PHASE(g, n, PH_BWD, core_bwd, READS(s->d_o), READS(s->q), READS(s->kv), READS(s->k), READS(s->o), READS(s->lse), READS(b->in.doc_start),
                READS(s->cos), READS(s->sin), READS(b->in.pos), WRITES(s->dq), WRITES(s->dk), WRITES(s->dkv), WRITES(s->bwd_work));
    graph_cost(g, n, PH_BWD, 2.5 * flops, 0);
}

/* Queries: one projection, or down to a latent, norm, and up. Both halves add to dh, keys first. */
static void declare_query(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    int64_t d = c->hidden, wide = m->heads * (m->nope + m->rope);
    if (m->q_rank == 0) {
        struct param p = param_matrix("self_attention.linear_q_proj.weight", wide, d, c->init_std);
        struct linear l = {.x = io->h, .y = s->q, .dy = s->dq, .dx = io->dh, .add_dx = true, .w = build_weight(b, &p), .bias = no_weight(), .in = d, .out = wide};
        declare_rotated(b, "q_proj", m, s, &l, query_fwd);
        return;
    }
    slot_id down = build_real(b, "q_down", b->rows, m->q_rank), ddown = build_grad(b, "dq_down", b->rows, m->q_rank);
    slot_id normed = build_real(b, "q_latent", b->rows, m->q_rank), dnormed = build_grad(b, "dq_latent", b->rows, m->q_rank);
    struct param pd = param_matrix("self_attention.linear_q_down_proj.weight", m->q_rank, d, c->init_std);
    struct param pu = param_matrix("self_attention.linear_q_up_proj.weight", wide, m->q_rank, c->init_std);
    linear_declare(b, "q_down", &(struct linear){.x = io->h, .y = down, .dy = ddown, .dx = io->dh, .add_dx = true, .w = build_weight(b, &pd),
                                                 .bias = no_weight(), .in = d, .out = m->q_rank});
    declare_norm(b, "q_norm", m, s, down, ddown, normed, dnormed, m->q_rank, "self_attention.linear_q_up_proj.layer_norm_weight", false);
    struct linear up = {.x = normed, .y = s->q, .dy = s->dq, .dx = dnormed, .w = build_weight(b, &pu), .bias = no_weight(), .in = m->q_rank, .out = wide};
    declare_rotated(b, "q_up", m, s, &up, query_fwd);
}

static void declare_keys(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    int64_t d = c->hidden, wide = m->heads * (m->nope + m->v);
    struct param pd = param_matrix("self_attention.linear_kv_down_proj.weight", m->kv_rank + m->rope, d, c->init_std);
    struct param pu = param_matrix("self_attention.linear_kv_up_proj.weight", wide, m->kv_rank, c->init_std);
    struct linear down = {.x = io->h, .y = s->kvd, .dy = s->dkvd, .dx = io->dh, .add_dx = true, .w = build_weight(b, &pd), .bias = no_weight(),
                          .in = d, .out = m->kv_rank + m->rope};
    declare_rotated(b, "kv_down", m, s, &down, latent_fwd);
    declare_norm(b, "kv_norm", m, s, s->kvd, s->dkvd, s->latent, s->dlatent, m->kv_rank, "self_attention.linear_kv_up_proj.layer_norm_weight", true);
    linear_declare(b, "kv_up", &(struct linear){.x = s->latent, .y = s->kv, .dy = s->dkv, .dx = s->dlatent, .w = build_weight(b, &pu),
                                                .bias = no_weight(), .in = m->kv_rank, .out = wide});
}

static int mla_declare(struct build *b, struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct mla *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    *m = (struct mla){.batch = b->batch, .seq = b->seq, .heads = c->heads, .nope = c->mla_nope, .rope = c->mla_rope, .v = c->mla_v,
                      .q_rank = c->mla_q_rank, .kv_rank = c->mla_kv_rank, .eps = c->mla_norm_eps > 0 ? c->mla_norm_eps : c->norm_eps,
                      .zero_centered = c->norm_zero_centered};
    struct mla_slots s = {0};
    TRY(declare_tables(b, m, &s));
    declare_slots(b, m, &s);
    io->f = build_real(b, "out", b->rows, c->hidden);
    declare_query(b, m, &s, io);
    declare_keys(b, m, &s, io);
    declare_core(b, m, &s);
    struct param p = param_matrix("self_attention.linear_proj.weight", c->hidden, m->heads * m->v, output_std(b));
    struct param pb = param_vector("self_attention.linear_proj.bias", c->hidden, INIT_ZERO);
    struct weight wo = build_weight(b, &p), bo = c->bias ? build_weight(b, &pb) : no_weight(); /* the others have none, as in Megatron */
    linear_declare(b, "proj", &(struct linear){.x = s.o, .y = io->f, .dy = io->df, .dx = s.d_o, .w = wo, .bias = bo,
                                               .in = m->heads * m->v, .out = c->hidden});
    return b->g->err.code;
}

const struct core_kind core_mla = {.symbol = '+', .name = "multi-latent attention", .norm_key = "input_layernorm.weight", .declare = mla_declare};
