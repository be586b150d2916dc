/* The gated delta net core, symbol 'G'.
 *
 * Shapes: T = batch * seq rows, Hk key heads of dk channels, Hv value heads of dv, I = Hv dv.
 *   in     [T, 2 Hk dk + 2 I + 2 Hv] = h Win^T    sections [q | k | v | z | beta | alpha]
 *   qkv    [T, 2 Hk dk + I]  = silu(conv(q | k | v)), each channel by itself
 *   o      [T, I]            = gated delta rule of q, k, v, alpha, beta with A_log, dt_bias (ops/gdn)
 *   n      [T, I]            = RMSNorm(o) * w * silu(z) over each head, gains shared by the heads
 *   f      [T, hidden]       = n Wout^T
 * mixer.h has all but the rule. */
#include "layers/mixer.h"
#include "ops/gdn/gdn.h"

struct gdn {
    struct mixer m;
    int64_t key_heads, dk, dv;
    int64_t keys;              /* width of q, and of k */
    int64_t beta_at, alpha_at; /* first columns in in */
};

static int rule_fwd(const struct step_ctx *c)
{
    const struct gdn *g = c->self;
    const struct mixer *m = &g->m;
    const struct tensor *in = &c->t[RULE_IN], *qkv = &c->t[RULE_MIXED];
    struct gdn_fwd_args a = {.q = mixer_heads(m, qkv, 0, g->key_heads, g->dk),
                             .k = mixer_heads(m, qkv, g->keys, g->key_heads, g->dk),
                             .v = mixer_heads(m, qkv, 2 * g->keys, m->heads, g->dv),
                             .alpha = mixer_cols(m, in, g->alpha_at, m->heads),
                             .beta = mixer_cols(m, in, g->beta_at, m->heads),
                             .A_log = c->t[RULE_A_LOG],
                             .dt_bias = c->t[RULE_DT_BIAS],
                             .doc_start = mixer_docs(m, &c->t[RULE_DOC]),
                             .start = c->t[RULE_START],
                             .init = c->t[RULE_STATE],
                             .final = c->t[RULE_STATE],
                             .states = c->t[RULE_STATES],
                             .o = mixer_heads(m, &c->t[RULE_Y], 0, m->heads, g->dv),
                             .work = c->t[RULE_WORK],
                             .chunk = m->chunk};
    return c->ops->gdn_fwd(c->lane, &a);
}

static int rule_bwd(const struct step_ctx *c)
{
    const struct gdn *g = c->self;
    const struct mixer *m = &g->m;
    const struct tensor *in = &c->t[MIX_IN], *din = &c->t[MIX_DIN], *qkv = &c->t[MIX_MIXED], *dqkv = &c->t[MIX_DMIXED];
    int64_t k_at = g->keys, v_at = 2 * g->keys;
    struct gdn_bwd_args a = {.d_o = mixer_heads(m, &c->t[MIX_DY], 0, m->heads, g->dv),
                             .q = mixer_heads(m, qkv, 0, g->key_heads, g->dk),
                             .k = mixer_heads(m, qkv, k_at, g->key_heads, g->dk),
                             .v = mixer_heads(m, qkv, v_at, m->heads, g->dv),
                             .alpha = mixer_cols(m, in, g->alpha_at, m->heads),
                             .beta = mixer_cols(m, in, g->beta_at, m->heads),
                             .A_log = c->t[MIX_A_LOG],
                             .dt_bias = c->t[MIX_DT_BIAS],
                             .doc_start = mixer_docs(m, &c->t[MIX_DOC]),
                             .states = c->t[MIX_STATES],
                             .dq = mixer_heads(m, dqkv, 0, g->key_heads, g->dk),
                             .dk = mixer_heads(m, dqkv, k_at, g->key_heads, g->dk),
                             .dv = mixer_heads(m, dqkv, v_at, m->heads, g->dv),
                             .dalpha = mixer_cols(m, din, g->alpha_at, m->heads),
                             .dbeta = mixer_cols(m, din, g->beta_at, m->heads),
                             .dA_log = c->t[MIX_DA_LOG],
                             .ddt_bias = c->t[MIX_DDT_BIAS],
                             .work = c->t[MIX_WORK],
                             .chunk = m->chunk,
                             .acc_dA_log = c->add[MIX_DA_LOG],
                             .acc_ddt_bias = c->add[MIX_DDT_BIAS]};
    return c->ops->gdn_bwd(c->lane, &a);
}

static void sizes(const struct build *b, struct gdn *g)
{
    const struct config_model *c = &b->cfg->model;
    int64_t keys = c->gdn_key_heads * c->gdn_key_dim, inner = c->gdn_value_heads * c->gdn_value_dim;
    *g = (struct gdn){.m = {.batch = b->batch,
                            .seq = b->seq,
                            .heads = c->gdn_value_heads,
                            .inner = inner,
                            .conv = c->gdn_conv,
                            .chunk = c->gdn_chunk,
                            .mixed = 2 * keys + inner,
                            .mixed_at = 0,
                            .z_at = 2 * keys + inner,
                            .state_rows = c->gdn_key_dim,
                            .state_cols = c->gdn_value_dim,
                            .norm_group = c->gdn_value_dim,
                            .norm_eps = c->norm_eps,
                            .norm_first = true,
                            .norm_zero_centered = c->norm_zero_centered,
                            .rule_fwd = rule_fwd,
                            .rule_bwd = rule_bwd},
                      .key_heads = c->gdn_key_heads,
                      .dk = c->gdn_key_dim,
                      .dv = c->gdn_value_dim,
                      .keys = keys};
    g->beta_at = g->m.z_at + inner;
    g->alpha_at = g->beta_at + g->m.heads;
    g->m.width = g->alpha_at + g->m.heads;
}

static void declare_params(struct build *b, const struct gdn *g, struct mixer_decl *d)
{
    const struct config_model *c = &b->cfg->model;
    const struct mixer *m = &g->m;
    struct param in = param_matrix("self_attention.in_proj.weight", m->width, c->hidden, c->init_std);
    struct param out = param_matrix("self_attention.out_proj.weight", c->hidden, m->inner, output_std(b));
    struct param conv_w = conv_param("self_attention.conv1d.weight", m);
    struct param dt_bias = param_vector("self_attention.dt_bias", m->heads, INIT_ONE);
    struct param a_log = param_vector("self_attention.A_log", m->heads, INIT_LOG_UNIFORM);
    struct param norm =
        param_vector("self_attention.out_norm.weight", g->dv, m->norm_zero_centered ? INIT_ZERO : INIT_ONE);
    a_log.init_a = 1;
    a_log.init_b = 16;
    d->w_in = build_weight(b, &in);
    d->conv_w = build_weight(b, &conv_w);
    d->conv_b = no_weight();
    d->dt_bias = build_weight(b, &dt_bias);
    d->a_log = build_weight(b, &a_log);
    d->d = no_weight();
    d->norm = build_weight(b, &norm);
    d->w_out = build_weight(b, &out);
}

/* What the chunked form needs, counted truthfully (see ops/gdn); model_flops_per_token follows
 * Megatron instead. */
static double rule_flops(const struct build *b, const struct gdn *g, double pairs, double halves, double states)
{
    double q = (double)min_i64(g->m.chunk, b->seq), inner = (double)g->m.inner;
    return (double)b->rows * (pairs * q * (double)g->keys + halves * q * inner + 2 * states * inner * (double)g->dk);
}

static int gdn_declare(struct build *b, struct core_io *io)
{
    const struct ops *ops = b->ops;
    struct gdn *g = graph_own(b->g, sizeof *g);
    if (g == NULL)
        return ST_NOMEM;
    sizes(b, g);
    struct tensor key = tensor_4d(NULL, b->dev->real, b->batch, b->seq, g->key_heads, g->dk);
    struct tensor value = tensor_4d(NULL, b->dev->real, b->batch, b->seq, g->m.heads, g->dv);
    struct gdn_fwd_args fwd = {.q = key, .k = key, .v = value, .chunk = g->m.chunk};
    struct gdn_bwd_args bwd = {.q = key, .k = key, .v = value, .chunk = g->m.chunk};
    struct mixer_decl d = {.in = "in",
                           .mixed = "qkv",
                           .y = "o",
                           .state = "rule_state",
                           .rule = "rule",
                           .fwd_work = ops->gdn_fwd_work ? ops->gdn_fwd_work(&fwd) : 0,
                           .bwd_work = ops->gdn_bwd_work ? ops->gdn_bwd_work(&bwd) : 0,
                           .fwd_flops = rule_flops(b, g, 2, 2, 3),
                           .bwd_flops = rule_flops(b, g, 6, 5, 7)};
    graph_scope(b->g, b->layer, "gdn");
    declare_params(b, g, &d);
    return mixer_declare(b, &g->m, &d, io);
}

const struct core_kind core_gdn = {.symbol = 'G',
                                   .name = "gated delta net",
                                   .norm_key = "self_attention.in_proj.layer_norm_weight",
                                   .declare = gdn_declare};
