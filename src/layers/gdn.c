/* The gated delta net core, symbol 'G'.
 *
 * Shapes: T = batch * seq rows, Hk key heads of dk channels, Hv value heads of dv, I = Hv dv.
 *   in     [T, 2 Hk dk + 2 I + 2 Hv] = h Win^T    sections [q | k | v | z | beta | alpha]
 *   qkv    [T, 2 Hk dk + I]  = silu(conv(q | k | v)), each channel by itself
 *   o      [T, I]            = gated delta rule of q, k, v, alpha, beta with A_log, dt_bias (ops/gdn)
 *   n      [T, I]            = RMSNorm(o) * w * silu(z) over each head, gains shared by the heads
 *   f      [T, hidden]       = n Wout^T
 * mixer_int.h has all but the rule. */
#include "layers/mixer_int.h"
#include "ops/gdn/gdn.h"

#include <math.h>
#include <string.h>

struct gdn {
    struct mixer m;
    int64_t key_heads, dk, dv;
    int64_t keys;              /* width of q, and of k */
    int64_t beta_at, alpha_at; /* first columns in in */
};

static void rule_fwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                     const struct mixer_slots *s)
{
    struct graph *g = b->g;
    const struct gdn *r = (const struct gdn *)m;
    struct tensor in = of(g, s->in), qkv = of(g, s->mixed);
    GRAPH_OP(g, n, PH_FWD, gdn_fwd, .q = mixer_heads(m, qkv, 0, r->key_heads, r->dk),
             .k = mixer_heads(m, qkv, r->keys, r->key_heads, r->dk),
             .v = mixer_heads(m, qkv, 2 * r->keys, m->heads, r->dv), .alpha = mixer_cols(m, in, r->alpha_at, m->heads),
             .beta = mixer_cols(m, in, r->beta_at, m->heads), .A_log = of(g, d->a_log.w),
             .dt_bias = of(g, d->dt_bias.w), .doc_start = mixer_docs(b), .start = of(g, b->in.start),
             .init = of(g, s->state.init), .final = of(g, s->state.final), .states = of(g, s->states),
             .o = mixer_heads(m, of(g, s->y), 0, m->heads, r->dv), .chunk = m->chunk);
}

static void rule_bwd(struct build *b, int n, const struct mixer *m, const struct mixer_decl *d,
                     const struct mixer_slots *s)
{
    struct graph *g = b->g;
    const struct gdn *r = (const struct gdn *)m;
    struct tensor in = of(g, s->in), qkv = of(g, s->mixed), dqkv = of(g, s->dmixed);
    int64_t k_at = r->keys, v_at = 2 * r->keys;
    GRAPH_OP(g, n, PH_BWD, gdn_bwd, .d_o = mixer_heads(m, of(g, s->dy), 0, m->heads, r->dv),
             .q = mixer_heads(m, qkv, 0, r->key_heads, r->dk), .k = mixer_heads(m, qkv, k_at, r->key_heads, r->dk),
             .v = mixer_heads(m, qkv, v_at, m->heads, r->dv), .alpha = mixer_cols(m, in, r->alpha_at, m->heads),
             .beta = mixer_cols(m, in, r->beta_at, m->heads), .A_log = of(g, d->a_log.w),
             .dt_bias = of(g, d->dt_bias.w), .doc_start = mixer_docs(b), .states = of(g, s->states),
             .dq = mixer_heads(m, dqkv, 0, r->key_heads, r->dk), .dk = mixer_heads(m, dqkv, k_at, r->key_heads, r->dk),
             .dv = mixer_heads(m, dqkv, v_at, m->heads, r->dv), .dalpha = mixer_drest(g, m, s, r->alpha_at, m->heads),
             .dbeta = mixer_drest(g, m, s, r->beta_at, m->heads), .dfinal = of(g, s->state.dfinal),
             .dinit = of(g, s->state.dinit), .dA_log = of(g, d->a_log.dw), .ddt_bias = of(g, d->dt_bias.dw),
             .chunk = m->chunk);
}

/* Sizes on one of so many ranks that share the heads. */
static void sizes(const struct build *b, struct gdn *g, int64_t ranks)
{
    const struct config_model *c = &b->cfg->model;
    int64_t key_heads = c->gdn_key_heads / ranks, heads = c->gdn_value_heads / ranks, keys = key_heads * c->gdn_key_dim,
            inner = heads * c->gdn_value_dim;
    *g = (struct gdn){.m = {.batch = b->batch,
                            .seq = b->seq,
                            .heads = heads,
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
                      .key_heads = key_heads,
                      .dk = c->gdn_key_dim,
                      .dv = c->gdn_value_dim,
                      .keys = keys};
    g->beta_at = g->m.z_at + inner;
    g->alpha_at = g->beta_at + g->m.heads;
    g->m.width = g->alpha_at + g->m.heads;
}

/* Sections query, key, value; of the projection in also z, beta, alpha. A rank takes key heads with the value heads
 * that read them. */
static void split_channels(const struct gdn *g, struct param *p, bool projection)
{
    const struct mixer *m = &g->m;
    param_split_section(p, 0, g->keys, UNIT_GROUPS, g->key_heads);
    param_split_section(p, 0, g->keys, UNIT_GROUPS, g->key_heads);
    param_split_section(p, 0, m->inner, UNIT_HEADS, m->heads);
    if (!projection)
        return;
    param_split_section(p, 0, m->inner, UNIT_HEADS, m->heads);
    param_split_section(p, 0, m->heads, UNIT_HEADS, m->heads);
    param_split_section(p, 0, m->heads, UNIT_HEADS, m->heads);
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
    split_channels(g, &in, true);
    split_channels(g, &conv_w, false);
    param_split(&out, 1, UNIT_HEADS, m->heads);
    param_split(&dt_bias, 0, UNIT_HEADS, m->heads);
    param_split(&a_log, 0, UNIT_HEADS, m->heads);
    param_replicate(&norm, GRAD_OVER_HEADS); /* one gain for all heads */
    d->w_in = build_linear_weight(b, &in);
    d->conv_w = build_weight(b, &conv_w);
    d->conv_b = no_weight();
    d->dt_bias = build_weight(b, &dt_bias);
    d->a_log = build_weight(b, &a_log);
    d->d = no_weight();
    d->norm = build_weight(b, &norm);
    d->w_out = build_linear_weight(b, &out);
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
    struct gdn whole, rule, *g = &rule;
    sizes(b, &whole, 1);
    sizes(b, g, b->mesh->tp);
    struct mixer_decl d = {.in = "in",
                           .mixed = "qkv",
                           .y = "o",
                           .state = "rule_state",
                           .rule = "rule",
                           .fwd_flops = rule_flops(b, g, 2, 2, 3),
                           .bwd_flops = rule_flops(b, g, 6, 5, 7)};
    graph_scope(b->g, b->layer, "gdn");
    declare_params(b, &whole, &d);
    return mixer_declare(b, &g->m, &d, io);
}

/* ---- options --------------------------------------------------------------------------------- */

static bool has_gdn(const struct config *c) { return strchr(c->model.pattern, 'G') != NULL; }
static bool gdn_heads_missing(const struct config *c) { return has_gdn(c) && c->model.gdn_value_heads == 0; }

static bool gdn_key_heads_do_not_divide(const struct config *c)
{
    const struct config_model *m = &c->model;
    return has_gdn(c) && m->gdn_value_heads > 0 && m->gdn_value_heads % m->gdn_key_heads != 0;
}

static bool gdn_parts_too_short(const struct config *c)
{
    return strchr(c->model.pattern, 'G') != NULL && c->parallel.cp > 1 &&
           c->train.seq / c->parallel.cp < c->model.gdn_conv - 1;
}

/* clang-format off */
static const struct option_use gdn_uses[] = {
    {"model.gdn_value_heads", NULL, NULL},
    {"model.gdn_key_heads", NULL, NULL},
    {"model.gdn_key_dim", NULL, NULL},
    {"model.gdn_value_dim", NULL, NULL},
    {"model.gdn_conv", NULL, NULL},
    {"model.gdn_chunk", NULL, NULL},
};
static const struct rule gdn_rules[] = {
    {"gdn-parts-hold-the-taps", gdn_parts_too_short,
     "each rank of parallel.cp takes the last model.gdn_conv - 1 rows of the one before it, so train.seq / parallel.cp "
     "must be that many at least",
     {"train.seq", "parallel.cp", "model.gdn_conv"}},
    {"gdn-heads-fit", gdn_heads_missing,
     "2 * model.hidden must be a multiple of model.gdn_value_dim unless model.gdn_value_heads is set",
     {"model.hidden", "model.gdn_value_dim", "model.gdn_value_heads"}},
    {"gdn-key-heads-divide", gdn_key_heads_do_not_divide,
     "model.gdn_value_heads must be a multiple of model.gdn_key_heads",
     {"model.gdn_value_heads", "model.gdn_key_heads", "model.hidden", "model.gdn_value_dim"}},
};
static const struct tiny_size gdn_tiny[] = {
    {"model.gdn_value_heads", 4, true}, {"model.gdn_key_heads", 2, true}, {"model.gdn_key_dim", 6, false},
    {"model.gdn_value_dim", 6, false},
    {"model.gdn_chunk", 8, false},
};
/* clang-format on */

/* In, convolution, the rule, out: Megatron's formula. */
static double gdn_flops(const struct config *cfg, int64_t seq)
{
    (void)seq;
    const struct config_model *c = &cfg->model;
    double d = (double)c->hidden, qk = (double)(c->gdn_key_heads * c->gdn_key_dim),
           v = (double)(c->gdn_value_heads * c->gdn_value_dim);
    double width = 2 * qk + 2 * v + 2 * (double)c->gdn_value_heads;
    return 2 * (d * width + (double)c->gdn_conv * (2 * qk + v) + 4 * v * (double)c->gdn_value_dim + d * v);
}

static const struct key_split gdn_splits[] = {
    {"self_attention.in_proj.weight", {"query", "key", "value", "z", "beta", "alpha"}},
    {"self_attention.conv1d.weight", {"query", "key", "value"}},
    {"self_attention.conv1d.bias", {"query", "key", "value"}},
};

static void gdn_part_rows(const struct config *c, const struct key_split *s, int64_t rows[KEY_MAX_PARTS])
{
    const struct config_model *m = &c->model;
    int64_t keys = m->gdn_key_heads * m->gdn_key_dim, values = m->gdn_value_heads * m->gdn_value_dim;
    const int64_t all[] = {keys, keys, values, values, m->gdn_value_heads, m->gdn_value_heads};
    for (int k = 0; k < KEY_MAX_PARTS && s->parts[k] != NULL; k++)
        rows[k] = all[k];
}

/* It takes attention's place in a layer, with keys of its own. */
/* The largest is a chunk's state. */
static struct kind_sizes gdn_sizes(const struct config *c)
{
    const struct config_model *m = &c->model;
    double values = (double)m->gdn_value_heads * (double)m->gdn_value_dim;
    return (struct kind_sizes){.token = values * fmax((double)m->gdn_key_dim / (double)m->gdn_chunk, 1),
                               .weight = values * (double)m->hidden};
}

const struct core_kind core_gdn = {
    .symbol = 'G',
    .name = "gated delta net",
    .title = "gated delta net",
    .norm_key = "self_attention.in_proj.layer_norm_weight",
    .options = {KIND_ROWS(uses, gdn_uses), KIND_ROWS(rules, gdn_rules), KIND_ROWS(tiny, gdn_tiny),
                .refused = {"model.norm"}},
    .keys = {.family = "gated delta net",
             .place = KEY_PLACE_ATTENTION,
             .mixes = true,
             .prefixes = {"self_attention.in_proj.", "self_attention.conv1d.", "self_attention.A_log",
                          "self_attention.dt_bias", "self_attention.out_norm.", "self_attention.out_proj."},
             KIND_ROWS(splits, gdn_splits),
             .part_rows = gdn_part_rows},
    .divides_sequence = true,
    .divides_weights = true,
    .flops = gdn_flops,
    .sizes = gdn_sizes,
    .declare = gdn_declare,
};
