/* Derived values and cross-field rules: what a row of the option table cannot say by itself. */
#include "config/config_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool gated(const struct config *c)
{
    return c->model.act == CFG_ACT_SWIGLU || c->model.act == CFG_ACT_GEGLU || c->model.act == CFG_ACT_QUICK_GEGLU;
}

/* ---- automatic values ------------------------------------------------------------------------ */

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

/* Learned positions take the place of rotation; a rule refuses both together. */
static void derive_rope(struct config *c)
{
    bool learned = c->model.position == CFG_POSITION_LEARNED, ours = was_derived(c, "model.rope");
    if (!ours && !(learned && config_source_of(c, "model.rope").source == CFG_FROM_DEFAULT))
        return;
    c->model.rope = learned ? CFG_ROPE_NONE : CFG_ROPE_HALF;
    derived(c, "model.rope");
}

/* As Megatron: what a token takes of a group on average, and at most all of it. */
static int64_t automatic_group_best(const struct config_model *m)
{
    if (m->router_group_topk < 1 || m->router_groups < 1)
        return 0;
    return min_i64(max_i64(m->topk / m->router_group_topk, 1), max_i64(m->experts / m->router_groups, 1));
}

void derive_values(struct config *c)
{
    struct config_model *m = &c->model;
    struct config_train *t = &c->train;
    derive_i64(c, "model.kv_heads", &m->kv_heads, m->heads);
    /* 0 is left for the rule to report when hidden does not divide. */
    derive_i64(c, "model.head_dim", &m->head_dim, m->hidden % m->heads == 0 ? m->hidden / m->heads : 0);
    derive_i64(c, "model.ffn", &m->ffn, gated(c) ? round_up(ceil_div(8 * m->hidden, 3), 32) : 4 * m->hidden);
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
    if (m->mhc_norm_eps_inside)
        derive_f64(c, "model.mhc_norm_eps", &m->mhc_norm_eps, m->norm_eps);
    else if (was_derived(c, "model.mhc_norm_eps"))
        m->mhc_norm_eps = 0;
    derive_i64(c, "model.max_position", &m->max_position, t->seq);
    derive_i64(c, "model.router_group_best", &m->router_group_best, automatic_group_best(m));
    derive_rope(c);
    derive_f64(c, "lora.alpha", &c->lora.alpha, (double)c->lora.rank);
    derive_f64(c, "model.embed_init_std", &m->embed_init_std, m->init_std);
    /* A microbatch for every rank that shares the batch. */
    derive_i64(c, "train.global_batch", &t->global_batch,
               t->micro_batch * max_i64(c->parallel.ranks / (c->parallel.pp * c->parallel.tp * c->parallel.cp), 1));
    derive_i64(c, "train.decay_steps", &t->decay_steps, t->steps);
    if (t->schedule == CFG_SCHEDULE_WSD)
        derive_i64(c, "train.wsd_steps", &t->wsd_steps, max_i64(t->decay_steps / 5, 1));
    else if (was_derived(c, "train.wsd_steps"))
        t->wsd_steps = 0;
    derive_i64(c, "run.threads", &c->run.threads, cpu_count());
}

static bool has_ratios(const struct config *c) { return c->model.attn_ratio > 0 || c->model.mlp_ratio > 0; }

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
    bool experts = s != CFG_FROM_DEFAULT && s != CFG_FROM_AUTO;
    const char layer[] = {'[', core_transformer(KEY_PLACE_ATTENTION, false)->symbol,
                          core_transformer(KEY_PLACE_MLP, experts)->symbol, ']', '\0'};
    for (int64_t i = 0; i < c->model.layers; i++)
        memcpy(made + 4 * i, layer, sizeof layer);
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

/* ---- rules ----------------------------------------------------------------------------------- */

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
    bool differ =
        c->model.mtp_pattern[0] != '\0' && (have == NULL || text.text == NULL || strcmp(have, text.text) != 0);
    buf_release(&text);
    return differ;
}

static bool ratios_above_one(const struct config *c) { return c->model.attn_ratio + c->model.mlp_ratio > 1; }

static bool ratios_without_layers(const struct config *c) { return has_ratios(c) && c->model.layers == 0; }

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

static bool learned_and_rotary(const struct config *c)
{
    return c->model.position == CFG_POSITION_LEARNED && c->model.rope != CFG_ROPE_NONE;
}

static bool too_few_positions(const struct config *c)
{
    return c->model.position == CFG_POSITION_LEARNED && c->train.seq > c->model.max_position;
}

static bool norms_without_layer_norm(const struct config *c)
{
    return c->model.norm == CFG_NORM_LAYER && (c->model.mhc_streams > 0 || c->model.qk_norm != CFG_QK_NORM_OFF);
}

static bool streams_not_fp32(const struct config *c) { return c->model.fp32_residual && c->model.mhc_streams > 0; }

static bool batch_not_multiple(const struct config *c) { return c->train.global_batch % c->train.micro_batch != 0; }

static bool microbatch_too_large(const struct config *c)
{
    return c->train.micro_batch * c->train.seq > INT32_MAX; /* both bounded: no overflow */
}

static double larger(double a, double b) { return a > b ? a : b; }
static void take_larger(struct kind_sizes *most, struct kind_sizes (*sizes)(const struct config *),
                        const struct config *c)
{
    struct kind_sizes s = sizes != NULL ? sizes(c) : (struct kind_sizes){0};
    most->token = larger(most->token, s.token);
    most->weight = larger(most->weight, s.weight);
}

/* Elements of the largest tensor that some layer kind may have, counted in double: sizes in bytes and sums over layers
 * and microbatches then fit 64 bits, and no layer needs a check of its own products. Options of kinds that the pattern
 * does not use have their defaults, which are small. */
static bool too_large_to_count(const struct config *c)
{
    const double limit = 0x1p50;
    double words = (double)c->model.vocab + (double)c->model.vocab_multiple, hidden = (double)c->model.hidden;
    struct kind_sizes most = {.token = larger(words, hidden), .weight = larger(words, hidden) * hidden};
    int cores, joints;
    const struct core_kind *const *core = core_kinds(&cores);
    const struct joint_kind *const *joint = joint_kinds(&joints);
    for (int i = 0; i < cores; i++)
        take_larger(&most, core[i]->sizes, c);
    for (int i = 0; i < joints; i++)
        take_larger(&most, joint[i]->sizes, c);
    return (double)(c->train.micro_batch * c->train.seq) * most.token > limit || most.weight > limit;
}

static bool fp8_tokens_odd(const struct config *c)
{
    return c->gpu.precision == CFG_PRECISION_FP8 && c->run.device == CFG_DEVICE_CUDA &&
           c->train.micro_batch * (c->train.seq / c->parallel.cp) / c->parallel.tp % 16 != 0;
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
    return c->train.schedule == CFG_SCHEDULE_WSD && c->train.warmup + c->train.wsd_steps > c->train.decay_steps;
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

static bool split_and_valid(const struct config *c) { return c->data.split[0] != '\0' && c->data.valid[0] != '\0'; }

static bool tokenizer_missing(const struct config *c) { return c->data.tokenizer[0] == '\0'; }

static bool eod_mask_without_eod(const struct config *c) { return c->data.eod_mask && !c->data.eod; }

static bool saving_nowhere(const struct config *c)
{
    return c->run.dir[0] == '\0' && (c->run.save_every != 0 || c->run.resume == CFG_RESUME_MUST);
}

static bool step_of_nothing(const struct config *c)
{
    return c->run.load_step >= 0 && c->run.resume == CFG_RESUME_NEVER;
}

static bool two_loads(const struct config *c) { return c->run.load[0] != '\0' && c->run.load_weights[0] != '\0'; }

static bool allow_without_weights(const struct config *c)
{
    return c->run.load_allow != CFG_LOAD_ALLOW_NONE && c->run.load_weights[0] == '\0';
}

/* "off", "auto" or a whole number from 1. */
static bool block_malformed(const struct config *c)
{
    int64_t n;
    const char *s = c->plan.recompute_block;
    return strcmp(s, "off") != 0 && strcmp(s, "auto") != 0 && !(parse_i64(s, &n) && n >= 1 && n <= 4096);
}

bool config_memory(const char *text, double *bytes)
{
    static const struct unit {
        const char *name;
        double bytes;
    } units[] = {{"", 1e9}, {"GB", 1e9}, {"GiB", 0x1p30}, {"MB", 1e6}, {"MiB", 0x1p20}, {"TB", 1e12}, {"TiB", 0x1p40}};
    char number[32];
    size_t n = strspn(text, "0123456789.");
    int u = 0;
    while (u < countof(units) && strcmp(text + n, units[u].name) != 0)
        u++;
    if (n == 0 || n >= sizeof number || u == countof(units))
        return false;
    memcpy(number, text, n);
    number[n] = '\0';
    if (!parse_f64(number, bytes) || !(*bytes > 0))
        return false;
    *bytes *= units[u].bytes;
    return *bytes <= 1e15;
}

static bool fit_malformed(const struct config *c)
{
    double bytes;
    const char *s = c->plan.fit;
    return strcmp(s, "off") != 0 && strcmp(s, "auto") != 0 && !config_memory(s, &bytes);
}

/* Every microbatch of every virtual stage would gather its weights anew. */
static bool zero3_with_stages(const struct config *c) { return c->parallel.zero > 2 && c->parallel.pp > 1; }

static bool chunks_uneven(const struct config *c) { return c->train.seq % c->parallel.cp != 0; }
static bool layers_need_the_sequence(const struct config *c)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    bool any = false;
    for (int i = 0; i < n; i++)
        any |= !cores[i]->divides_sequence && core_in(cores[i], c->model.pattern);
    return c->parallel.cp > 1 && any;
}
static bool layers_need_all_weights(const struct config *c)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    bool any = false;
    for (int i = 0; i < n; i++)
        any |= !cores[i]->divides_weights && !cores[i]->by_row && core_in(cores[i], c->model.pattern);
    return c->parallel.tp > 1 && any;
}
static bool routes_of_parts(const struct config *c) { return c->parallel.cp > 1 && c->train.replay_routes[0] != '\0'; }
static bool capacity_of_parts(const struct config *c) { return c->parallel.cp > 1 && c->model.router_capacity > 0; }
static bool one_scale_divided(const struct config *c)
{
    return c->parallel.tp > 1 && c->gpu.precision == CFG_PRECISION_FP8 && c->gpu.fp8_recipe == CFG_FP8_TENSOR;
}

/* clang-format off */
static const struct rule general_rules[] = {
    {"cp-divides-the-sequence", chunks_uneven,
     "train.seq must be a multiple of parallel.cp, the ranks that share a sequence",
     {"train.seq", "parallel.cp"}},
    {"cp-needs-layers-that-divide", layers_need_the_sequence,
     "parallel.cp divides sequences, and model.pattern has a layer that needs whole ones; use parallel.cp = 1",
     {"parallel.cp", "model.pattern"}},
    {"tp-needs-layers-that-divide", layers_need_all_weights,
     "parallel.tp divides layers, and model.pattern has one that does not divide; use parallel.tp = 1",
     {"parallel.tp", "model.pattern"}},
    {"cp-without-capacity", capacity_of_parts,
     "model.router_capacity drops tokens by comparing all of a microbatch, which parallel.cp divides; use "
     "router_capacity = 0 or parallel.cp = 1",
     {"model.router_capacity", "parallel.cp"}},
    {"cp-without-replayed-routes", routes_of_parts,
     "train.replay_routes reads the choices of whole sequences, which parallel.cp divides; use parallel.cp = 1",
     {"train.replay_routes", "parallel.cp"}},
    {"tensor-scale-without-tp", one_scale_divided,
     "gpu.fp8_recipe = tensor has one scale for a whole tensor, which parallel.tp divides; use gpu.fp8_recipe = "
     "blockwise or parallel.tp = 1",
     {"gpu.fp8_recipe", "parallel.tp"}},
    {"zero3-without-stages", zero3_with_stages,
     "parallel.zero = 3 gathers the weights of a stage anew for every microbatch in flight; with pipeline stages use "
     "parallel.zero = 2",
     {"parallel.zero", "parallel.pp"}},
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
    {"learned-or-rotary", learned_and_rotary,
     "learned positions take the place of rotary embedding: model.rope must be none",
     {"model.position", "model.rope"}},
    {"positions-hold-a-sequence", too_few_positions,
     "there must be a learned position for every token of a sequence: model.max_position is below train.seq",
     {"model.max_position", "train.seq", "model.position"}},
    {"layer-norm-alone", norms_without_layer_norm,
     "hyper-connections and q/k norms are built for RMSNorm: model.norm must be rms",
     {"model.norm", "model.mhc_streams", "model.qk_norm"}},
    {"fp32-residual-alone", streams_not_fp32,
     "the kernels of hyper-connections keep streams in the type of the layers: model.fp32_residual must be off",
     {"model.fp32_residual", "model.mhc_streams"}},
    {"recompute-block-format", block_malformed,
     "plan.recompute_block must be off, auto or a number of layers from 1 to 4096",
     {"plan.recompute_block"}},
    {"fit-format", fit_malformed,
     "plan.fit must be off, auto or an amount of memory such as 80GB, 74GiB or 900MiB",
     {"plan.fit"}},
    {"global-batch-multiple", batch_not_multiple,
     "train.global_batch must be a multiple of train.micro_batch",
     {"train.global_batch", "train.micro_batch"}},
    {"microbatch-tokens", microbatch_too_large,
     "a microbatch may hold at most 2147483647 tokens",
     {"train.micro_batch", "train.seq"}},
    {"countable-sizes", too_large_to_count,
     "a tensor of this model would have more than 2^50 elements",
     {"train.micro_batch", "train.seq", "model.hidden", "model.heads"}},
    {"fp8-tokens", fp8_tokens_odd,
     "gpu.precision = fp8 on a GPU needs train.micro_batch * train.seq / parallel.cp / parallel.tp in multiples of 16: "
     "tokens are summed over in codes",
     {"gpu.precision", "train.micro_batch", "train.seq", "parallel.cp"}},
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

const struct rule *config_rule(int i)
{
    struct kind_at at;
    if (i < countof(general_rules))
        return &general_rules[i];
    i -= countof(general_rules);
    for (int k = 0; kind_at(k, &at); i -= at.options->n_rules, k++)
        if (i < at.options->n_rules)
            return &at.options->rules[i];
    return NULL;
}

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
    TRY(groups_check(c, e));
    const struct rule *r;
    for (int i = 0; (r = config_rule(i)) != NULL; i++)
        if (r->broken(c))
            return broken_rule(c, r, e);
    return ST_OK;
}
