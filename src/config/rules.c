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

static void derive(struct config *c)
{
    struct config_model *m = &c->model;
    struct config_train *t = &c->train;
    derive_i64(c, "model.kv_heads", &m->kv_heads, m->heads);
    /* 0 is left for the rule to report when hidden does not divide. */
    derive_i64(c, "model.head_dim", &m->head_dim,
               m->hidden % m->heads == 0 ? m->hidden / m->heads : 0);
    derive_i64(c, "model.ffn", &m->ffn,
               gated(c) ? round_up(ceil_div(8 * m->hidden, 3), 32) : 4 * m->hidden);
    if (m->head_dim > 0)
        derive_f64(c, "model.softmax_scale", &m->softmax_scale, 1.0 / sqrt((double)m->head_dim));
    derive_f64(c, "model.embed_init_std", &m->embed_init_std, m->init_std);
    derive_i64(c, "train.global_batch", &t->global_batch, t->micro_batch);
    derive_i64(c, "train.decay_steps", &t->decay_steps, t->steps);
    if (t->schedule == CFG_SCHEDULE_WSD)
        derive_i64(c, "train.wsd_steps", &t->wsd_steps, max_i64(t->decay_steps / 5, 1));
    else if (was_derived(c, "train.wsd_steps"))
        t->wsd_steps = 0;
    derive_i64(c, "run.threads", &c->run.threads, cpu_count());
}

/* ---- rules ---------------------------------------------------------------------------------- */

static bool pattern_has_stranger(const struct config *c)
{
    const char *p = c->model.pattern;
    return p[strspn(p, "MG*+D-E[]|/")] != '\0' || strpbrk(p, "MG*+D-E") == NULL;
}

static bool heads_do_not_divide_hidden(const struct config *c) { return c->model.head_dim == 0; }

static bool kv_heads_do_not_divide_heads(const struct config *c)
{
    return c->model.heads % c->model.kv_heads != 0;
}

static int64_t rotary_dim(const struct config *c)
{
    return (int64_t)((double)c->model.head_dim * c->model.rope_percent);
}

static bool rotary_dim_odd_or_zero(const struct config *c)
{
    return c->model.rope != CFG_ROPE_NONE && (rotary_dim(c) % 2 != 0 || rotary_dim(c) == 0);
}

static bool window_skip_without_window(const struct config *c)
{
    return c->model.attn_window_skip != 0 && c->model.attn_window == 0;
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

static bool batch_not_multiple(const struct config *c)
{
    return c->train.global_batch % c->train.micro_batch != 0;
}

static bool microbatch_too_large(const struct config *c)
{
    return c->train.micro_batch * c->train.seq > INT32_MAX; /* both bounded: no overflow */
}

static bool min_lr_above_lr(const struct config *c) { return c->train.min_lr > c->train.lr; }

static bool warmup_past_end(const struct config *c)
{
    return c->train.warmup > c->train.steps ||
           (c->train.schedule != CFG_SCHEDULE_CONSTANT && c->train.warmup > c->train.decay_steps);
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

/* clang-format off */
const struct rule config_rules[] = {
    {"pattern-symbols", pattern_has_stranger,
     "the pattern must be layer symbols M G * + D - E, with [ ] | / between them",
     {"model.pattern"}},
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
    {"global-batch-multiple", batch_not_multiple,
     "train.global_batch must be a multiple of train.micro_batch",
     {"train.global_batch", "train.micro_batch"}},
    {"microbatch-tokens", microbatch_too_large,
     "a microbatch may hold at most 2147483647 tokens",
     {"train.micro_batch", "train.seq"}},
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
    buf_release(&values);
    return err_hint(e, "rule %s; `braid help %.*s` explains these options", r->name,
                    (int)strcspn(r->options[0], "."), r->options[0]);
}

int config_finish(struct config *c, struct err *e)
{
    derive(c);
    for (int i = 0; i < config_n_rules; i++)
        if (config_rules[i].broken(c))
            return broken_rule(c, &config_rules[i], e);
    return ST_OK;
}
