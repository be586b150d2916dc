/* Derived values and cross-field rules: what a row of the option table cannot say by itself. */
#include "config/config_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool gated(const struct config *c)
{
    return c->model.act == CFG_ACT_SWIGLU || c->model.act == CFG_ACT_GEGLU ||
           c->model.act == CFG_ACT_QUICK_GEGLU;
}

/* ---- automatic values ----------------------------------------------------------------------- */

static void derived(struct config *c, const char *name)
{
    c->origin[option_index(option_find(name))] = (struct config_origin){.source = CFG_FROM_AUTO};
}

/* Derived before, perhaps from what has changed since. */
static bool was_derived(const struct config *c, const char *name)
{
    return config_source_of(c, name).source == CFG_FROM_AUTO;
}

static void derive_i64(struct config *c, const char *name, int64_t *field, int64_t value)
{
    if (*field == 0 || was_derived(c, name)) {
        *field = value;
        derived(c, name);
    }
}

static void derive_f64(struct config *c, const char *name, double *field, double value)
{
    if (*field == 0 || was_derived(c, name)) {
        *field = value;
        derived(c, name);
    }
}

void derive_values(struct config *c)
{
    struct config_model *m = &c->model;
    struct config_train *t = &c->train;
    derive_i64(c, "model.kv_heads", &m->kv_heads, m->heads);
    /* 0 is left for the rule to report when hidden does not divide. */
    derive_i64(c, "model.head_dim", &m->head_dim,
               m->hidden % m->heads == 0 ? m->hidden / m->heads : 0);
    derive_i64(c, "model.ffn", &m->ffn,
               gated(c) ? round_up(ceil_div(8 * m->hidden, 3), 32) : 4 * m->hidden);
    derive_i64(c, "model.expert_ffn", &m->expert_ffn, m->ffn);
    /* 0 is left for the rule to report when the width does not divide. */
    derive_i64(c, "model.gdn_value_heads", &m->gdn_value_heads,
               2 * m->hidden % m->gdn_value_dim == 0 ? 2 * m->hidden / m->gdn_value_dim : 0);
    derive_i64(c, "model.gdn_key_heads", &m->gdn_key_heads,
               m->gdn_value_heads % 2 == 0 ? m->gdn_value_heads / 2 : m->gdn_value_heads);
    derive_i64(c, "model.mamba_heads", &m->mamba_heads,
               2 * m->hidden % m->mamba_head_dim == 0 ? 2 * m->hidden / m->mamba_head_dim : 0);
    int64_t groups = 8;
    while (m->mamba_heads % groups != 0)
        groups /= 2;
    derive_i64(c, "model.mamba_groups", &m->mamba_groups, groups);
    if (m->head_dim > 0)
        derive_f64(c, "model.softmax_scale", &m->softmax_scale, 1.0 / sqrt((double)m->head_dim));
    if (m->mhc)
        derive_i64(c, "model.mhc_streams", &m->mhc_streams, 4);
    else if (was_derived(c, "model.mhc_streams"))
        m->mhc_streams = 0;
    derive_f64(c, "model.embed_init_std", &m->embed_init_std, m->init_std);
    /* A microbatch for every rank that shares the batch. */
    derive_i64(c, "train.global_batch", &t->global_batch, t->micro_batch * max_i64(c->parallel.ranks / max_i64(c->parallel.pp, 1), 1));
    derive_i64(c, "train.decay_steps", &t->decay_steps, t->steps);
    if (t->schedule == CFG_SCHEDULE_WSD)
        derive_i64(c, "train.wsd_steps", &t->wsd_steps, max_i64(t->decay_steps / 5, 1));
    else if (was_derived(c, "train.wsd_steps"))
        t->wsd_steps = 0;
    derive_i64(c, "run.threads", &c->run.threads, cpu_count());
}

static bool has_ratios(const struct config *c)
{
    return c->model.attn_ratio > 0 || c->model.mlp_ratio > 0;
}

static bool pattern_given(const struct config *c)
{
    enum config_source s = config_source_of(c, "model.pattern").source;
    return s != CFG_FROM_DEFAULT && s != CFG_FROM_AUTO;
}

enum { TRANSFORMER_LAYERS = CONFIG_PATTERN_MAX / 4 }; /* a layer is 4 characters */

/* As Megatron's --num-layers: attention and an MLP in each, or experts where their number is given. Prediction depths
 * without a pattern of their own are such layers, too, where there is room for them. */
static void transformer_pattern(const struct config *c, char made[CONFIG_RATIO_LAYERS + 1])
{
    enum config_source s = config_source_of(c, "model.experts").source;
    const char *layer = s == CFG_FROM_DEFAULT || s == CFG_FROM_AUTO ? "[*-]" : "[*E]";
    for (int64_t i = 0; i < c->model.layers; i++)
        memcpy(made + 4 * i, layer, 5);
    char *end = made + 4 * c->model.layers, depth[] = {'/', layer[1], layer[2], '\0'};
    if (c->model.mtp_pattern[0] != '\0' || 4 * c->model.layers + 3 * c->model.mtp_layers > CONFIG_RATIO_LAYERS)
        return;
    for (int64_t k = 0; k < c->model.mtp_layers; k++)
        memcpy(end + 3 * k, depth, sizeof depth);
}

/* The pattern that a number of layers means, by itself or with ratios, unless one is given. Impossible numbers are left
 * to the rules. */
static int derive_pattern(struct config *c, struct err *e)
{
    char made[CONFIG_RATIO_LAYERS + 1];
    const struct config_model *m = &c->model;
    const char *pattern = option_find("model.pattern")->def;
    if (pattern_given(c))
        return ST_OK;
    if (has_ratios(c)) {
        if (!config_ratio_pattern(m->layers, m->attn_ratio, m->mlp_ratio, made))
            return ST_OK;
        pattern = made;
    } else if (m->layers > 0 && m->layers <= TRANSFORMER_LAYERS) {
        transformer_pattern(c, made);
        pattern = made;
    } else if (!was_derived(c, "model.pattern")) {
        return ST_OK;
    }
    TRY(option_set(c, option_find("model.pattern"), pattern, config_source_of(c, "model.pattern"), e));
    derived(c, "model.pattern");
    return ST_OK;
}

static const char *depths_of(const struct config *c) { return strchr(c->model.pattern, '/'); }

/* "/X" as often as there are depths. */
static void add_depths(const struct config *c, struct buf *out)
{
    for (int64_t k = 0; k < c->model.mtp_layers; k++)
        buf_addf(out, "/%s", c->model.mtp_pattern);
}

/* A separate pattern of the prediction depths becomes part of the pattern, which is what is saved. Impossible
 * ones are left to the rules. */
int derive_depths(struct config *c, struct err *e)
{
    const struct config_model *m = &c->model;
    if (m->mtp_layers == 0 || m->mtp_pattern[0] == '\0' || strchr(m->mtp_pattern, '/') || depths_of(c))
        return ST_OK;
    struct buf text;
    bool given = pattern_given(c);
    buf_init(&text, 0);
    buf_add(&text, m->pattern);
    add_depths(c, &text);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = option_set(c, option_find("model.pattern"), text.text, config_source_of(c, "model.pattern"), e);
    buf_release(&text);
    if (st == ST_OK && !given)
        derived(c, "model.pattern");
    return st;
}

/* ---- rules ---------------------------------------------------------------------------------- */

static bool depths_without_layers(const struct config *c)
{
    return c->model.mtp_pattern[0] != '\0' && c->model.mtp_layers == 0;
}

static bool depths_without_pattern(const struct config *c)
{
    return c->model.mtp_layers > 0 && c->model.mtp_pattern[0] == '\0' && depths_of(c) == NULL;
}

static bool depth_of_depths(const struct config *c) { return strchr(c->model.mtp_pattern, '/') != NULL; }

static bool depths_said_twice(const struct config *c)
{
    struct buf text;
    buf_init(&text, 0);
    add_depths(c, &text);
    const char *have = depths_of(c);
    bool differ = c->model.mtp_pattern[0] != '\0' && (have == NULL || text.text == NULL || strcmp(have, text.text) != 0);
    buf_release(&text);
    return differ;
}

static bool ratios_above_one(const struct config *c)
{
    return c->model.attn_ratio + c->model.mlp_ratio > 1;
}

static bool ratios_without_layers(const struct config *c)
{
    return has_ratios(c) && c->model.layers == 0;
}

/* A plain Transformer of more layers than a pattern has room for. */
static bool too_many_layers(const struct config *c)
{
    return c->model.layers > TRANSFORMER_LAYERS && !has_ratios(c) && !pattern_given(c);
}

/* The pattern of a saved config may be the one that its ratios made, with prediction depths behind it. */
static bool pattern_and_ratios(const struct config *c)
{
    char made[CONFIG_RATIO_LAYERS + 1];
    const struct config_model *m = &c->model;
    size_t n = m->mtp_pattern[0] != '\0' ? strcspn(m->pattern, "/") : strlen(m->pattern);
    return has_ratios(c) && pattern_given(c) &&
           !(config_ratio_pattern(m->layers, m->attn_ratio, m->mlp_ratio, made) && strlen(made) == n &&
             memcmp(made, m->pattern, n) == 0);
}

static bool has_attention(const struct config *c) { return strchr(c->model.pattern, '*') != NULL; }

static bool heads_do_not_divide_hidden(const struct config *c) { return has_attention(c) && c->model.head_dim == 0; }

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

static bool latent_without_rope(const struct config *c)
{
    return c->model.rope == CFG_ROPE_NONE && strchr(c->model.pattern, '+') != NULL;
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
    return c->model.rope_scaling == CFG_ROPE_SCALING_LLAMA3 &&
           !(c->model.rope_low < c->model.rope_high);
}

static bool yarn_band_empty(const struct config *c)
{
    return c->model.rope_scaling == CFG_ROPE_SCALING_YARN &&
           !(c->model.rope_beta_slow < c->model.rope_beta_fast);
}

static bool yarn_base_is_one(const struct config *c)
{
    return c->model.rope_scaling == CFG_ROPE_SCALING_YARN && !(c->model.rope_base > 1);
}

static bool mscale_without_yarn(const struct config *c)
{
    return c->model.rope_scaling != CFG_ROPE_SCALING_YARN &&
           (c->model.rope_mscale != 0 || c->model.rope_mscale_all_dim != 0);
}

static bool gate_options_without_gate(const struct config *c)
{
    return !gated(c) && (c->model.act_clamp != 0 || c->model.act_offset != 0);
}

static bool alpha_without_quick(const struct config *c)
{
    return c->model.act_alpha != 1.702 && c->model.act != CFG_ACT_QUICK_GELU &&
           c->model.act != CFG_ACT_QUICK_GEGLU;
}

static bool has_gdn(const struct config *c) { return strchr(c->model.pattern, 'G') != NULL; }

static bool gdn_heads_missing(const struct config *c)
{
    return has_gdn(c) && c->model.gdn_value_heads == 0;
}

static bool gdn_key_heads_do_not_divide(const struct config *c)
{
    const struct config_model *m = &c->model;
    return has_gdn(c) && m->gdn_value_heads > 0 && m->gdn_value_heads % m->gdn_key_heads != 0;
}

static bool has_mamba(const struct config *c) { return strchr(c->model.pattern, 'M') != NULL; }

static bool mamba_heads_missing(const struct config *c)
{
    return has_mamba(c) && c->model.mamba_heads == 0;
}

static bool mamba_groups_do_not_divide(const struct config *c)
{
    return has_mamba(c) && c->model.mamba_heads % c->model.mamba_groups != 0;
}

static bool mamba_steps_crossed(const struct config *c)
{
    return c->model.mamba_dt_max > 0 && c->model.mamba_dt_min > c->model.mamba_dt_max;
}

static bool ep_without_experts(const struct config *c) { return c->parallel.ep > 1 && strchr(c->model.pattern, 'E') == NULL; }

static bool experts_do_not_divide(const struct config *c) { return c->model.experts % max_i64(c->parallel.ep, 1) != 0; }

static bool topk_above_experts(const struct config *c)
{
    return c->model.topk > c->model.experts;
}

/* The softmax over one chosen expert is 1, whatever the router says: it would never learn. */
static bool softmax_of_one(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->topk == 1 && m->experts > 1 && m->router_score == CFG_ROUTER_SOFTMAX && !m->router_pre_softmax;
}

static bool pre_softmax_without_softmax(const struct config *c)
{
    return c->model.router_pre_softmax && c->model.router_score != CFG_ROUTER_SOFTMAX;
}

static bool router_bias_with_softmax(const struct config *c)
{
    return c->model.router_bias && c->model.router_score == CFG_ROUTER_SOFTMAX;
}

static bool groups_do_not_fit(const struct config *c)
{
    const struct config_model *m = &c->model;
    if (m->router_groups == 0)
        return m->router_group_topk != 0;
    return m->experts % m->router_groups != 0 || m->router_group_topk > m->router_groups ||
           (m->router_group_topk > 0 && m->router_group_topk * (m->experts / m->router_groups) < m->topk);
}

static bool interleave_does_not_fit(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->glu_interleave != 0 && (!gated(c) || m->expert_ffn % m->glu_interleave != 0);
}

static bool shared_gate_alone(const struct config *c)
{
    return c->model.shared_gate && c->model.shared_ffn == 0;
}

static bool batch_not_multiple(const struct config *c)
{
    return c->train.global_batch % c->train.micro_batch != 0;
}

static bool microbatch_too_large(const struct config *c)
{
    return c->train.micro_batch * c->train.seq > INT32_MAX; /* both bounded: no overflow */
}

static double larger(double a, double b) { return a > b ? a : b; }

/* Elements of the largest tensor that some layer kind may have, counted in double: sizes in bytes and sums over layers and
 * microbatches then fit 64 bits, and no layer needs a check of its own products. Options of kinds that the pattern does not
 * use have their defaults, which are small. */
static bool too_large_to_count(const struct config *c)
{
    const struct config_model *m = &c->model;
    const double most = 0x1p50;
    double rows = (double)(c->train.micro_batch * c->train.seq), hidden = (double)m->hidden;
    double heads = (double)m->heads, experts = (double)m->experts;
    double mla = heads * (double)(m->mla_nope + m->mla_rope + m->mla_v);
    double gdn = (double)m->gdn_value_heads * (double)m->gdn_key_dim * (double)m->gdn_value_dim;
    double mamba = (double)m->mamba_heads * (double)m->mamba_head_dim * (double)m->mamba_state;
    double width = larger(larger(2 * (double)m->ffn, heads * (double)m->head_dim), larger(mla, (double)m->vocab + (double)m->vocab_multiple));
    width = larger(width, larger(hidden * (double)(m->mhc_streams + 1) * (double)(m->mhc_streams + 1), (double)m->shared_ffn));
    width = larger(width, 2 * (double)m->topk * larger((double)m->expert_ffn, hidden));
    double state = larger(gdn / (double)m->gdn_chunk, mamba / (double)m->mamba_chunk);
    double weights = larger(width, experts * 2 * (double)m->expert_ffn) * larger(hidden, (double)m->mla_q_rank);
    return rows * larger(width, state) > most || weights > most;
}

static bool min_lr_above_lr(const struct config *c) { return c->train.min_lr > c->train.lr; }

static bool warmup_past_end(const struct config *c)
{
    return c->train.warmup > c->train.steps ||
           (c->train.schedule != CFG_SCHEDULE_CONSTANT && c->train.warmup >= c->train.decay_steps);
}

static bool wsd_options_without_wsd(const struct config *c)
{
    return c->train.schedule != CFG_SCHEDULE_WSD &&
           (c->train.wsd_steps != 0 || c->train.wsd_style != CFG_WSD_MINUS_SQRT);
}

static bool wsd_does_not_fit(const struct config *c)
{
    return c->train.schedule == CFG_SCHEDULE_WSD &&
           c->train.warmup + c->train.wsd_steps > c->train.decay_steps;
}

static bool eval_without_data(const struct config *c)
{
    return c->train.eval_every != 0 && c->data.valid[0] == '\0' && c->data.split[0] == '\0';
}

/* Two or three weights, none negative, the first (training) not zero. */
static bool split_malformed(const struct config *c)
{
    const char *s = c->data.split;
    if (s[0] == '\0')
        return false;
    int parts = 0;
    for (;;) {
        char *end;
        double w = strtod(s, &end);
        if (end == s || !isfinite(w) || w < 0 || (parts == 0 && w == 0) || ++parts > 3)
            return true;
        if (*end == '\0')
            return parts < 2;
        if (*end != ',')
            return true;
        s = end + 1;
    }
}

static bool split_and_valid(const struct config *c)
{
    return c->data.split[0] != '\0' && c->data.valid[0] != '\0';
}

static bool tokenizer_missing(const struct config *c) { return c->data.tokenizer[0] == '\0'; }

static bool eod_mask_without_eod(const struct config *c)
{
    return c->data.eod_mask && !c->data.eod;
}

static bool saving_nowhere(const struct config *c)
{
    return c->run.dir[0] == '\0' && (c->run.save_every != 0 || c->run.resume == CFG_RESUME_MUST);
}

static bool step_of_nothing(const struct config *c)
{
    return c->run.load_step >= 0 && c->run.resume == CFG_RESUME_NEVER;
}

static bool two_loads(const struct config *c)
{
    return c->run.load[0] != '\0' && c->run.load_weights[0] != '\0';
}

static bool allow_without_weights(const struct config *c)
{
    return c->run.load_allow != CFG_LOAD_ALLOW_NONE && c->run.load_weights[0] == '\0';
}

static bool one_stream(const struct config *c) { return c->model.mhc_streams == 1; }

static bool mhc_options_without_mhc(const struct config *c)
{
    const struct config_model *m = &c->model;
    return m->mhc_streams == 0 && (m->mhc_profile != CFG_MHC_D || m->mhc_iterations != 20 || m->mhc_gating != 0.01 ||
                                   m->mhc_bf16_coef);
}

/* "off", "auto" or a whole number from 1. */
static bool block_malformed(const struct config *c)
{
    int64_t n;
    const char *s = c->plan.recompute_block;
    return strcmp(s, "off") != 0 && strcmp(s, "auto") != 0 && !(parse_i64(s, &n) && n >= 1 && n <= 4096);
}

static bool recompute_mhc_without_streams(const struct config *c)
{
    return c->model.mhc_streams == 0 && (str_has_word(c->plan.recompute, "mhc") || c->mhc.kernels != CFG_MHC_KERNELS_AUTO || !c->mhc.rebuild);
}

static bool block_without_streams(const struct config *c)
{
    return strcmp(c->plan.recompute_block, "off") != 0 && c->model.mhc_streams == 0;
}

/* clang-format off */
const struct rule config_rules[] = {
    {"ratios-within-one", ratios_above_one,
     "model.attn_ratio and model.mlp_ratio together must not be above 1",
     {"model.attn_ratio", "model.mlp_ratio"}},
    {"pattern-or-ratios", pattern_and_ratios,
     "give model.pattern, or model.layers and ratios to make one, not both",
     {"model.pattern", "model.attn_ratio", "model.mlp_ratio", "model.layers"}},
    {"mtp-pattern-is-one-depth", depth_of_depths,
     "model.mtp_pattern is one depth and has no / of its own",
     {"model.mtp_pattern", "model.mtp_layers"}},
    {"mtp-pattern-needs-layers", depths_without_layers,
     "model.mtp_pattern needs model.mtp_layers, the number of depths",
     {"model.mtp_pattern", "model.mtp_layers"}},
    {"mtp-layers-need-pattern", depths_without_pattern,
     "model.mtp_layers needs the layers of a depth: model.mtp_pattern, or / parts of model.pattern",
     {"model.mtp_layers", "model.mtp_pattern", "model.pattern"}},
    {"pattern-or-mtp-pattern", depths_said_twice,
     "give prediction depths in model.pattern or as model.mtp_pattern, not both",
     {"model.pattern", "model.mtp_pattern", "model.mtp_layers"}},
    {"ratios-need-layers", ratios_without_layers,
     "model.attn_ratio and model.mlp_ratio need model.layers",
     {"model.attn_ratio", "model.mlp_ratio", "model.layers"}},
    {"transformer-layers", too_many_layers,
     "model.layers alone makes a Transformer of at most 1024 layers",
     {"model.layers", "model.pattern", "model.attn_ratio", "model.mlp_ratio"}},
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
    {"latent-needs-rope", latent_without_rope,
     "latent attention (+) has rotary channels of its own: model.rope cannot be none",
     {"model.rope", "model.pattern", "model.mla_rope"}},
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
    {"yarn-base", yarn_base_is_one,
     "yarn scaling divides by the logarithm of model.rope_base, which must be above 1",
     {"model.rope_scaling", "model.rope_base"}},
    {"mscale-needs-yarn", mscale_without_yarn,
     "model.rope_mscale and model.rope_mscale_all_dim belong to yarn scaling",
     {"model.rope_scaling", "model.rope_mscale", "model.rope_mscale_all_dim"}},
    {"clamp-and-offset-need-gate", gate_options_without_gate,
     "model.act_clamp and model.act_offset need a gated activation",
     {"model.act", "model.act_clamp", "model.act_offset"}},
    {"alpha-needs-quick", alpha_without_quick,
     "model.act_alpha only matters to quick_gelu and quick_geglu",
     {"model.act", "model.act_alpha"}},
    {"gdn-heads-fit", gdn_heads_missing,
     "2 * model.hidden must be a multiple of model.gdn_value_dim unless model.gdn_value_heads is set",
     {"model.hidden", "model.gdn_value_dim", "model.gdn_value_heads"}},
    {"gdn-key-heads-divide", gdn_key_heads_do_not_divide,
     "model.gdn_value_heads must be a multiple of model.gdn_key_heads",
     {"model.gdn_value_heads", "model.gdn_key_heads", "model.hidden", "model.gdn_value_dim"}},
    {"mamba-heads-fit", mamba_heads_missing,
     "2 * model.hidden must be a multiple of model.mamba_head_dim unless model.mamba_heads is set",
     {"model.hidden", "model.mamba_head_dim", "model.mamba_heads"}},
    {"mamba-groups-divide-heads", mamba_groups_do_not_divide,
     "model.mamba_heads must be a multiple of model.mamba_groups",
     {"model.mamba_heads", "model.mamba_groups", "model.hidden", "model.mamba_head_dim"}},
    {"mamba-steps-ordered", mamba_steps_crossed,
     "model.mamba_dt_min must not be above model.mamba_dt_max",
     {"model.mamba_dt_min", "model.mamba_dt_max"}},
    {"topk-within-experts", topk_above_experts,
     "model.topk must not be above model.experts",
     {"model.topk", "model.experts"}},
    {"ep-needs-experts", ep_without_experts,
     "parallel.ep shares the experts of a layer among ranks, and no layer of model.pattern has experts (E)",
     {"parallel.ep", "model.pattern"}},
    {"experts-over-ranks", experts_do_not_divide,
     "model.experts must be a multiple of parallel.ep, the ranks that share them",
     {"model.experts", "parallel.ep"}},
    {"one-expert-needs-pre-softmax", softmax_of_one,
     "with model.topk = 1 a softmax over the chosen expert is always 1: set model.router_pre_softmax",
     {"model.topk", "model.router_score", "model.router_pre_softmax"}},
    {"pre-softmax-needs-softmax", pre_softmax_without_softmax,
     "model.router_pre_softmax needs model.router_score = softmax",
     {"model.router_pre_softmax", "model.router_score"}},
    {"router-bias-needs-sigmoid", router_bias_with_softmax,
     "model.router_bias needs model.router_score = sigmoid or sqrtsoftplus",
     {"model.router_bias", "model.router_score"}},
    {"router-groups-fit", groups_do_not_fit,
     "router groups must divide the experts, and those a token may use must hold topk experts",
     {"model.router_groups", "model.router_group_topk", "model.experts", "model.topk"}},
    {"interleave-fits", interleave_does_not_fit,
     "model.glu_interleave needs a gated activation and must divide model.expert_ffn",
     {"model.glu_interleave", "model.act", "model.expert_ffn"}},
    {"shared-gate-needs-shared", shared_gate_alone,
     "model.shared_gate needs model.shared_ffn",
     {"model.shared_gate", "model.shared_ffn"}},
    {"mhc-two-streams", one_stream,
     "model.mhc_streams must be 0 (plain residual) or at least 2: one stream has nothing to mix",
     {"model.mhc_streams"}},
    {"mhc-options-need-streams", mhc_options_without_mhc,
     "options of hyper-connections need model.mhc_streams",
     {"model.mhc_streams", "model.mhc_profile", "model.mhc_iterations", "model.mhc_gating"}},
    {"recompute-block-format", block_malformed,
     "plan.recompute_block must be off, auto or a number of layers from 1 to 4096",
     {"plan.recompute_block"}},
    {"recompute-block-needs-streams", block_without_streams,
     "plan.recompute_block needs model.mhc_streams: a plain residual stream is not recomputed",
     {"plan.recompute_block", "model.mhc_streams"}},
    {"recompute-mhc-needs-streams", recompute_mhc_without_streams,
     "plan.recompute = mhc, mhc.kernels and mhc.rebuild need model.mhc_streams: there are no streams",
     {"plan.recompute", "mhc.kernels", "mhc.rebuild", "model.mhc_streams"}},
    {"global-batch-multiple", batch_not_multiple,
     "train.global_batch must be a multiple of train.micro_batch",
     {"train.global_batch", "train.micro_batch"}},
    {"microbatch-tokens", microbatch_too_large,
     "a microbatch may hold at most 2147483647 tokens",
     {"train.micro_batch", "train.seq"}},
    {"countable-sizes", too_large_to_count,
     "a tensor of this model would have more than 2^50 elements",
     {"train.micro_batch", "train.seq", "model.hidden", "model.heads"}},
    {"min-lr-below-lr", min_lr_above_lr,
     "train.min_lr must not be above train.lr",
     {"train.min_lr", "train.lr"}},
    {"warmup-within-steps", warmup_past_end,
     "train.warmup must end before the steps and their decay do",
     {"train.warmup", "train.steps", "train.decay_steps"}},
    {"wsd-options-need-wsd", wsd_options_without_wsd,
     "train.wsd_steps and train.wsd_style need train.schedule = wsd",
     {"train.schedule", "train.wsd_steps", "train.wsd_style"}},
    {"wsd-fits", wsd_does_not_fit,
     "warm-up and wsd decay together are longer than the schedule",
     {"train.schedule", "train.warmup", "train.wsd_steps", "train.decay_steps"}},
    {"eval-needs-data", eval_without_data,
     "evaluation needs data.valid, or data.split to cut it from the training data",
     {"train.eval_every", "data.valid", "data.split"}},
    {"split-format", split_malformed,
     "data.split must be two or three weights such as 99,1 of which the first is not 0",
     {"data.split"}},
    {"split-or-valid", split_and_valid,
     "give data.split or data.valid, not both",
     {"data.split", "data.valid"}},
    {"tokenizer-named", tokenizer_missing,
     "data.tokenizer must be bytes or the path of a tokenizer.json",
     {"data.tokenizer"}},
    {"eod-mask-needs-eod", eod_mask_without_eod,
     "data.eod_mask needs data.eod, which marks where documents end",
     {"data.eod_mask", "data.eod"}},
    {"saving-needs-dir", saving_nowhere,
     "saving and resuming need run.dir",
     {"run.dir", "run.save_every", "run.resume"}},
    {"one-load", two_loads,
     "run.load takes the model and its weights, run.load_weights the weights alone: give one of them",
     {"run.load", "run.load_weights"}},
    {"step-to-load", step_of_nothing,
     "run.load_step continues from a checkpoint, run.resume=never does not: give one of them",
     {"run.load_step", "run.resume"}},
    {"allow-needs-weights", allow_without_weights,
     "run.load_allow needs run.load_weights",
     {"run.load_allow", "run.load_weights"}},
};
/* clang-format on */
const int config_n_rules = countof(config_rules);

/* "message (model.heads = 6 from a.ini:3, model.kv_heads = 4 from command line)" */
static int broken_rule(const struct config *c, const struct rule *r, struct err *e)
{
    struct buf values;
    buf_init(&values, 0);
    for (int i = 0; i < countof(r->options) && r->options[i] != NULL; i++) {
        char from[200];
        struct buf text;
        buf_init(&text, 0);
        config_value_text(c, r->options[i], &text);
        buf_addf(&values, "%s%s = %.100s from %s", i ? ", " : "", r->options[i],
                 text.text && text.text[0] ? text.text : "(empty)",
                 config_source_text(c, r->options[i], from, sizeof from));
        buf_release(&text);
    }
    err_set(e, ST_USAGE, "%s (%s)", r->message, values.text ? values.text : "");
    buf_clear(&values);
    bool found = e != NULL && propose_value(c, r, &values);
    err_hint(e, "%s%srule %s; `braid help %s` explains the option", found && values.text ? values.text : "",
             found ? "; " : "", r->name, r->options[0]);
    buf_release(&values);
    return ST_USAGE;
}

int config_finish(struct config *c, struct err *e)
{
    TRY(expand_patterns(c, e));
    TRY(derive_pattern(c, e));
    TRY(derive_depths(c, e));
    derive_values(c);
    TRY(config_refused(c, e));
    for (int i = 0; i < config_n_rules; i++)
        if (config_rules[i].broken(c))
            return broken_rule(c, &config_rules[i], e);
    return ST_OK;
}
