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
 * whose permutation of q and k cancels in their product.
 * With parallel.cp rows [kv | rotary key] of all tokens up to the rank's last one are gathered (context.h: kv_all), and
 * k is made of them. */
#include "layers/mla_int.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache.h"
#include "ops/dropout/dropout.h"
#include "ops/gemm/gemm.h"
#include "ops/mlakeys/mlakeys.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

#include <math.h>
#include <string.h>

/* Keys without position and values of kv: [T, H, n + v]; the values of it: [B, S, H, v]. */
static struct tensor own(const struct mla *m, struct tensor kv) { return mla_heads(kv, m->heads, m->nope + m->v); }
static struct tensor values(const struct mla *m, struct tensor kv)
{
    return mla_by_sequence(m, mla_columns(own(m, kv), m->nope, m->v));
}

/* Gathered rows hold keys without position and values of every head, then the shared rotary key. */
static struct tensor far_kv(const struct mla *m, struct tensor rows)
{
    return mla_columns(rows, 0, m->heads * (m->nope + m->v));
}
static struct tensor far_key(const struct mla *m, struct tensor rows)
{
    return mla_columns(rows, m->heads * (m->nope + m->v), m->rope);
}

/* ---- declaration ----------------------------------------------------------------------------- */

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

int mla_tables(struct build *b, const char *scope, struct mla *m, struct mla_slots *s)
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
    graph_scope(b->g, b->layer, scope);
    return b->g->err.code;
}

void mla_rotate(struct build *b, int n, const struct mla_slots *s, struct tensor x, struct tensor y)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, rope_fwd, .x = x, .y = y, .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, b->in.pos), .interleaved = true);
}

void mla_unrotate(struct build *b, int n, const struct mla_slots *s, struct tensor dy, struct tensor dx)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, rope_bwd, .dy = dy, .dx = dx, .cos = of(g, s->cos), .sin = of(g, s->sin),
             .pos = of(g, b->in.pos), .interleaved = true);
}

/* A projection whose result (part of it) is rotated at once. */
static void declare_rotated(struct build *b, const char *name, const struct mla_slots *s, const struct linear *l,
                            struct tensor part)
{
    int n = linear_forward(b, name, l);
    mla_rotate(b, n, s, part, part);
    linear_backward(b, n, l);
}

static void declare_norm(struct build *b, const char *name, const struct mla *m, const struct mla_slots *s, slot_id x,
                         slot_id dx, slot_id y, slot_id dy, int64_t rank, const char *key, bool with_key)
{
    struct graph *g = b->g;
    char rstd_name[32];
    snprintf(rstd_name, sizeof rstd_name, "%s_rstd", name);
    struct param p = param_vector(key, rank, m->zero_centered ? INIT_ZERO : INIT_ONE);
    param_replicate(&p, GRAD_OVER_HEADS); /* every rank makes all latents; what its heads read gives its part */
    struct weight w = build_weight(b, &p);
    slot_id rstd = graph_slot(g, rstd_name, tensor_1d(NULL, b->dev->wide, b->rows));
    double elems = (double)(b->rows * rank), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, name, LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_fwd, .x = mla_columns(of(g, x), 0, rank), .w = of(g, w.w), .y = of(g, y),
             .rstd = of(g, rstd), .eps = m->eps, .zero_centered = m->zero_centered);
    graph_cost(g, n, PH_FWD, 4 * elems, 2 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, y);
    GRAPH_OP(g, n, PH_BWD, rmsnorm_bwd, .dy = of(g, dy), .x = mla_columns(of(g, x), 0, rank), .w = of(g, w.w),
             .rstd = of(g, rstd), .dx = mla_columns(of(g, dx), 0, rank), .dw = of(g, w.dw),
             .zero_centered = m->zero_centered);
    if (with_key) {
        /* The key's latent also carries the rotary key: its gradient is the sum over heads, turned back. */
        struct tensor part = mla_shared_key(m, of(g, dx));
        if (s->divided)
            GRAPH_OP(g, n, PH_BWD, dropout, .x = far_key(m, of(g, s->far.down)), .y = part);
        else
            GRAPH_OP(g, n, PH_BWD, mlakeys_bwd, .dk = mla_keyed(m, of(g, s->dk)), .dshared = part, .nope = m->nope);
        mla_unrotate(b, n, s, mla_heads(part, 1, m->rope), mla_heads(part, 1, m->rope));
    }
    graph_cost(g, n, PH_BWD, 9 * elems, 3 * elems * size);
}

static struct tensor shape4(const struct build *b, int64_t n, int64_t heads, int64_t width)
{
    return tensor_4d(NULL, b->dev->real, b->batch, n, heads, width);
}

void mla_slots_of(struct build *b, const struct mla *m, struct mla_slots *s)
{
    int64_t qk = m->heads * (m->nope + m->rope), o = m->heads * m->v;
    s->q = build_real(b, "q", b->rows, qk);
    s->kvd = build_real(b, "kv_down", b->rows, m->kv_rank + m->rope);
    s->o = build_real(b, "o", b->rows, o);
    s->lse = graph_slot(b->g, "lse", tensor_3d(NULL, b->dev->wide, b->batch, m->heads, b->seq));
    s->dq = build_grad(b, "dq", b->rows, qk);
    s->dkvd = build_grad(b, "dkv_down", b->rows, m->kv_rank + m->rope);
    s->d_o = build_grad(b, "do", b->rows, o);
}

static void expanded_slots(struct build *b, const struct mla *m, struct mla_slots *s)
{
    int64_t qk = m->heads * (m->nope + m->rope), kv = m->heads * (m->nope + m->v);
    s->latent = build_real(b, "latent", b->rows, m->kv_rank);
    s->kv = build_real(b, "kv", b->rows, kv);
    s->divided = context_divides(b);
    if (s->divided)
        s->far = context_rows(b, "kv", kv + m->rope);
    int64_t keys = b->batch * context_seen(b);
    s->k = build_real(b, "k", keys, qk);
    s->dlatent = build_grad(b, "dlatent", b->rows, m->kv_rank);
    s->dkv = build_grad(b, "dkv", b->rows, kv);
    s->dk = build_grad(b, "dk", keys, qk);
    bool decode = b->mode == BUILD_DECODE;
    s->k_cache =
        decode ? build_table(b, "k_cache", shape4(b, b->cache_len, m->heads, m->nope + m->rope), NULL, NULL) : NO_SLOT;
    s->v_cache = decode ? build_table(b, "v_cache", shape4(b, b->cache_len, m->heads, m->v), NULL, NULL) : NO_SLOT;
}

/* Rows for other ranks; in the backward pass the gradient of kv, from the sums of all ranks. */
static void declare_far(struct build *b, const struct mla *m, const struct mla_slots *s)
{
    struct graph *g = b->g;
    struct tensor own_rows = of(g, s->far.own);
    double bytes = 2 * (double)dtype_bytes(b->dev->real) * (double)(b->rows * s->far.width);
    int n = graph_node(g, "kv_own", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, dropout, .x = of(g, s->kv), .y = far_kv(m, own_rows)); /* copies */
    GRAPH_OP(g, n, PH_FWD, dropout, .x = mla_shared_key(m, of(g, s->kvd)), .y = far_key(m, own_rows));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (training(b)) {
        graph_again(g, n, s->far.own);
        GRAPH_OP(g, n, PH_BWD, dropout, .x = far_kv(m, of(g, s->far.down)), .y = of(g, s->dkv));
        graph_cost(g, n, PH_BWD, 0, bytes);
    }
    context_gather(b, "kv_rows", &s->far);
}

static void declare_core(struct build *b, const struct mla *m, const struct mla_slots *s)
{
    struct graph *g = b->g;
    bool far = s->divided;
    double flops = (double)b->rows * (double)(2 * context_seen(b) - b->seq) * (double)m->heads *
                   (double)(m->nope + m->rope + m->v);
    struct tensor kv = far ? far_kv(m, of(g, s->far.all)) : of(g, s->kv),
                  dkv = far ? far_kv(m, of(g, s->far.dall)) : of(g, s->dkv),
                  key = far ? far_key(m, of(g, s->far.all)) : mla_shared_key(m, of(g, s->kvd));
    struct tensor k = mla_by_sequence(m, mla_keyed(m, of(g, s->k))), v = values(m, kv),
                  q = mla_batched(m, mla_keyed(m, of(g, s->q)));
    int n = graph_node(g, "core", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, mlakeys_fwd, .kv = own(m, kv), .shared = key, .k = mla_keyed(m, of(g, s->k)));
    if (s->k_cache != NO_SLOT) {
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = k, .cache = of(g, s->k_cache), .start = of(g, b->in.start));
        GRAPH_OP(g, n, PH_FWD, cache_store, .x = v, .cache = of(g, s->v_cache), .start = of(g, b->in.start));
        k = of(g, s->k_cache);
        v = of(g, s->v_cache);
    }
    GRAPH_OP(g, n, PH_FWD, attention_fwd, .q = q, .k = k, .v = v, .o = mla_outputs(m, of(g, s->o)),
             .lse = of(g, s->lse), .doc_start = mla_documents(b), .start = of(g, b->in.start), .scale = m->scale,
             .drop = attention_dropout(b));
    graph_cost(g, n, PH_FWD, flops, 0);
    if (!training(b))
        return;
    graph_again(g, n, s->k);
    graph_again(g, n, s->o);
    graph_again(g, n, s->lse);
    GRAPH_OP(g, n, PH_BWD, attention_bwd, .d_o = mla_outputs(m, of(g, s->d_o)), .q = q, .k = k, .v = v,
             .o = mla_outputs(m, of(g, s->o)), .lse = of(g, s->lse), .doc_start = mla_documents(b),
             .dq = mla_batched(m, mla_keyed(m, of(g, s->dq))), .dk = mla_by_sequence(m, mla_keyed(m, of(g, s->dk))),
             .dv = values(m, dkv), .scale = m->scale, .drop = attention_dropout(b));
    GRAPH_OP(g, n, PH_BWD, mlakeys_bwd, .dk = mla_keyed(m, of(g, s->dk)), .dkv = own(m, dkv),
             .dshared = far ? far_key(m, of(g, s->far.dall)) : (struct tensor){0}, .nope = m->nope);
    struct tensor dq = mla_rotary(m, of(g, s->dq));
    mla_unrotate(b, n, s, dq, dq);
    graph_cost(g, n, PH_BWD, 2.5 * flops, 0);
}

/* The last projection of queries; all heads' rotary channels are rotated in place, or left to the caller. */
static void query_up(struct build *b, const char *name, const struct mla *m, const struct mla_slots *s,
                     const struct linear *l)
{
    if (m->absorbed)
        linear_declare(b, name, l);
    else
        declare_rotated(b, name, s, l, mla_rotary(m, of(b->g, s->q)));
}

void mla_query(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    int64_t d = c->hidden, head = m->nope + m->rope, wide = m->heads * head, all = m->all_heads * head;
    if (m->q_rank == 0) {
        struct param p = param_matrix("self_attention.linear_q_proj.weight", all, d, c->init_std);
        param_split(&p, 0, UNIT_HEADS, m->all_heads);
        struct linear l = {.x = io->h,
                           .y = s->q,
                           .dy = s->dq,
                           .dx = io->dh,
                           .w = build_linear_weight(b, &p),
                           .bias = no_weight(),
                           .in = d,
                           .out = wide};
        query_up(b, "q_proj", m, s, &l);
        s->q_in = io->h;
        return;
    }
    slot_id down = build_real(b, "q_down", b->rows, m->q_rank), ddown = build_grad(b, "dq_down", b->rows, m->q_rank);
    slot_id normed = build_real(b, "q_latent", b->rows, m->q_rank),
            dnormed = build_grad(b, "dq_latent", b->rows, m->q_rank);
    struct param pd = param_matrix("self_attention.linear_q_down_proj.weight", m->q_rank, d, c->init_std);
    struct param pu = param_matrix("self_attention.linear_q_up_proj.weight", all, m->q_rank, c->init_std);
    param_replicate(&pd, GRAD_OVER_HEADS);
    param_split(&pu, 0, UNIT_HEADS, m->all_heads);
    linear_declare(b, "q_down",
                   &(struct linear){.x = io->h,
                                    .y = down,
                                    .dy = ddown,
                                    .dx = io->dh,
                                    .w = build_linear_weight(b, &pd),
                                    .bias = no_weight(),
                                    .in = d,
                                    .out = m->q_rank});
    declare_norm(b, "q_norm", m, s, down, ddown, normed, dnormed, m->q_rank,
                 "self_attention.linear_q_up_proj.layer_norm_weight", false);
    struct linear up = {.x = normed,
                        .y = s->q,
                        .dy = s->dq,
                        .dx = dnormed,
                        .w = build_linear_weight(b, &pu),
                        .bias = no_weight(),
                        .in = m->q_rank,
                        .out = wide};
    query_up(b, "q_up", m, s, &up);
    s->q_in = normed;
}

struct weight mla_up_weight(struct build *b, const struct mla *m)
{
    struct param p = param_matrix("self_attention.linear_kv_up_proj.weight", m->all_heads * (m->nope + m->v),
                                  m->kv_rank, b->cfg->model.init_std);
    param_split(&p, 0, UNIT_HEADS, m->all_heads);
    return m->plain_up ? build_weight(b, &p) : build_linear_weight(b, &p);
}

struct linear mla_down(struct build *b, const struct mla *m, const struct mla_slots *s, const struct core_io *io)
{
    int64_t d = b->cfg->model.hidden;
    struct param p =
        param_matrix("self_attention.linear_kv_down_proj.weight", m->kv_rank + m->rope, d, b->cfg->model.init_std);
    param_replicate(&p, GRAD_OVER_HEADS);
    return (struct linear){.x = io->h,
                           .y = s->kvd,
                           .dy = s->dkvd,
                           .dx = io->dh,
                           .w = build_linear_weight(b, &p),
                           .bias = no_weight(),
                           .in = d,
                           .out = m->kv_rank + m->rope};
}

void mla_expanded(struct build *b, const struct mla *m, struct mla_slots *s, const struct core_io *io)
{
    expanded_slots(b, m, s);
    struct linear down = mla_down(b, m, s, io);
    declare_rotated(b, "kv_down", s, &down, mla_heads(mla_shared_key(m, of(b->g, s->kvd)), 1, m->rope));
    declare_norm(b, "kv_norm", m, s, s->kvd, s->dkvd, s->latent, s->dlatent, m->kv_rank, MLA_LATENT_NORM, true);
    linear_declare(b, "kv_up",
                   &(struct linear){.x = s->latent,
                                    .y = s->kv,
                                    .dy = s->dkv,
                                    .dx = s->dlatent,
                                    .w = mla_up_weight(b, m),
                                    .bias = no_weight(),
                                    .in = m->kv_rank,
                                    .out = m->heads * (m->nope + m->v),
                                    .plain = m->plain_up});
    if (s->divided)
        declare_far(b, m, s);
    declare_core(b, m, s);
}

void mla_output(struct build *b, const struct mla *m, const struct mla_slots *s, const struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct param p = param_matrix("self_attention.linear_proj.weight", c->hidden, m->all_heads * m->v, output_std(b));
    struct param pb = param_vector("self_attention.linear_proj.bias", c->hidden, INIT_ZERO);
    param_split(&p, 1, UNIT_HEADS, m->all_heads);
    param_replicate(&pb, GRAD_OVER_TOKENS);
    /* the others have none, as in Megatron */
    struct weight wo = build_linear_weight(b, &p), bo = c->bias ? build_weight(b, &pb) : no_weight();
    linear_declare(b, "proj",
                   &(struct linear){.x = s->o,
                                    .y = io->f,
                                    .dy = io->df,
                                    .dx = s->d_o,
                                    .w = wo,
                                    .bias = bo,
                                    .in = m->heads * m->v,
                                    .out = c->hidden,
                                    .summed = true,
                                    .x_kept = true});
}

struct mla mla_of(const struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    return (struct mla){.batch = b->batch,
                        .seq = b->seq,
                        .heads = c->heads / b->mesh->tp,
                        .all_heads = c->heads,
                        .nope = c->mla_nope,
                        .rope = c->mla_rope,
                        .v = c->mla_v,
                        .q_rank = c->mla_q_rank,
                        .kv_rank = c->mla_kv_rank,
                        .eps = c->mla_norm_eps > 0 ? c->mla_norm_eps : c->norm_eps,
                        .zero_centered = c->norm_zero_centered};
}

static int mla_declare(struct build *b, struct core_io *io)
{
    struct mla m = mla_of(b);
    struct mla_slots s = {0};
    TRY(mla_tables(b, "mla", &m, &s));
    mla_slots_of(b, &m, &s);
    io->f = build_real(b, "out", b->rows, b->cfg->model.hidden);
    graph_sum(b->g, io->dh);
    mla_query(b, &m, &s, io);
    mla_expanded(b, &m, &s, io);
    mla_output(b, &m, &s, io);
    return b->g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool latent_without_rope(const struct config *c)
{
    return c->model.rope == CFG_ROPE_NONE && strchr(c->model.pattern, '+') != NULL;
}
static bool odd_rotary_channels(const struct config *c)
{
    return c->model.mla_rope % 2 != 0 && strpbrk(c->model.pattern, "+DCHW") != NULL;
}

/* clang-format off */
static const struct option_use mla_uses[] = {
    MLA_USES,
    {"model.attention_dropout", NULL, NULL},
};
static const struct rule mla_rules[] = {
    {"latent-needs-rope", latent_without_rope,
     "latent attention (+) has rotary channels of its own: model.rope cannot be none",
     {"model.rope", "model.pattern", "model.mla_rope"}},
    {"rotary-channels-even", odd_rotary_channels,
     "rotary embedding turns channels in pairs: model.mla_rope must be even",
     {"model.mla_rope", "model.pattern"}},
};
static const struct tiny_size mla_tiny[] = {
    {"model.heads", 4, true},        {"model.mla_kv_rank", 12, false}, {"model.mla_q_rank", 10, false},
    {"model.mla_nope", 6, false},    {"model.mla_rope", 4, false},     {"model.mla_v", 6, false},
};
/* clang-format on */

/* Latents, per-head projections and output; then the causal half of scores and values: Megatron's formula. */
double mla_linear_flops(const struct config *cfg)
{
    const struct config_model *c = &cfg->model;
    double d = (double)c->hidden, heads = (double)c->heads, qk = (double)(c->mla_nope + c->mla_rope),
           v = (double)c->mla_v;
    double rq = (double)c->mla_q_rank, rkv = (double)c->mla_kv_rank,
           query = rq > 0 ? rq * (d + heads * qk + 1) : d * heads * qk;
    double latent = rkv * (d + heads * ((double)c->mla_nope + v) + 1) + d * (double)c->mla_rope;
    return 2 * (query + latent + heads * v * d);
}

static double mla_flops(const struct config *c, int64_t seq)
{
    return mla_linear_flops(c) +
           (double)seq * (double)c->model.heads * (double)(c->model.mla_nope + c->model.mla_rope + c->model.mla_v);
}

static struct kind_sizes mla_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double width = (double)m->heads * (double)(m->mla_nope + m->mla_rope + m->mla_v);
    return (struct kind_sizes){.token = width, .weight = width * (double)max_i64(m->hidden, m->mla_q_rank)};
}

static void mla_kernels(const struct kernel_report *r)
{
    const struct config_model *c = &r->cfg->model;
    kernel_line_attention(
        r, &(struct attention_sizes){
               .what = "latent attention", .width = c->mla_nope + c->mla_rope, .values = c->mla_v, .keys = c->heads});
}

/* The latents are always normed and a part of every head always rotates, whatever model.qk_norm and model.rope say. */
const struct core_kind core_mla = {
    .symbol = '+',
    .name = "multi-latent attention",
    .title = "latent attention",
    .norm_key = "input_layernorm.weight",
    .options = {KIND_ROWS(uses, mla_uses), KIND_ROWS(rules, mla_rules), KIND_ROWS(tiny, mla_tiny),
                .refused = {"model.attn_gate", "model.attn_window", "model.attn_window_skip", "model.attn_sink",
                            "model.softmax_scale", "model.qkv_bias", "model.attn_bias", "model.rope_percent",
                            "model.no_rope_freq", "model.norm", "model.position"}},
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true},
    .recompute = {{"core_attn", {"mla.o", "mla.lse"}}, {"mla_up_proj", {"mla.q", "mla.kv", "mla.k"}}},
    .draws = attention_draws,
    .divides_sequence = true,
    .divides_weights = true,
    .flops = mla_flops,
    .sizes = mla_sizes,
    .kernels = mla_kernels,
    .declare = mla_declare,
};
