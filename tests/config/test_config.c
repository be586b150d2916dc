/* config/: the option table, values, rules, saved configs, help and docs. */
#include "support.h"
#include "ops/rope/rope.h"

#include "config/config_int.h"

static struct config fresh(void)
{
    struct config c;
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    return c;
}

static void set(struct config *c, const char *name, const char *value)
{
    struct err e = {0};
    assert_ok(config_set(c, name, value, NULL, &e), &e);
}

static void assert_same_values(const struct config *a, const struct config *b)
{
    for (int i = 0; i < config_n_options; i++)
        if (!option_equal(a, b, &config_options[i]))
            fail_msg("%s differs", config_options[i].name);
}

/* Growth of the option list is a decision: whoever adds a row adds a line here. */
static void option_names_are_the_frozen_list(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf names;
    buf_init(&names, 0);
    for (int i = 0; i < config_option_count(); i++)
        buf_addf(&names, "%s\n", config_option_name(i));
    assert_null(config_option_name(config_option_count()));
    char *frozen;
    size_t len;
    assert_ok(file_read("tests/config/options.txt", 1 << 16, &frozen, &len, &e), &e);
    assert_string_equal(names.text, frozen);
    free(frozen);
    buf_release(&names);
}

static void every_row_is_complete_and_unique(void **state)
{
    (void)state;
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        char section[32];
        snprintf(section, sizeof section, "%.*s", (int)option_section_len(o), o->name);
        assert_true(config_has_section(section));
        assert_true(strlen(o->help) >= 10 && str_ends(o->help, "."));
        assert_int_equal(!!(o->flags & OPT_MODEL) + !!(o->flags & OPT_RUN), 1);
        assert_true((o->type == OPT_ENUM) == (o->values != NULL));
        assert_true((o->type != OPT_INT && o->type != OPT_REAL) || o->min < o->max);
        for (int k = 0; k < i; k++) {
            assert_string_not_equal(o->name, config_options[k].name);
            assert_true(o->offset != config_options[k].offset);
            for (int a = 0; a < CONFIG_MAX_ALIASES && o->alias[a].name; a++)
                for (int b = 0; b < CONFIG_MAX_ALIASES && config_options[k].alias[b].name; b++)
                    /* --seed sets both seeds, as Megatron's does */
                    assert_true(strcmp(o->alias[a].name, config_options[k].alias[b].name) != 0 ||
                                strcmp(o->alias[a].name, "seed") == 0);
        }
    }
}

static void defaults_come_from_the_table(void **state)
{
    (void)state;
    struct config c = fresh();
    assert_string_equal(c.model.pattern, "*-*-");
    assert_int_equal(c.model.hidden, 320);
    assert_int_equal(c.model.act, CFG_ACT_SWIGLU);
    assert_int_equal(c.train.wsd_style, CFG_WSD_MINUS_SQRT);
    assert_true(c.model.tied && !c.model.bias && c.run.report);
    assert_true(c.train.beta2 == 0.95 && c.model.norm_eps == 1e-5);
    assert_string_equal(c.data.tokenizer, "bytes");
    assert_int_equal(c.data.seed, 1234);
    assert_int_equal(config_source_of(&c, "model.hidden").source, CFG_FROM_DEFAULT);
    config_release(&c);
}

static void values_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *name, *value, *message;
    } bad[] = {
        {"model.hidden", "0", "out of range"},
        {"model.hidden", "65537", "out of range"},
        {"model.hidden", "wide", "not an integer"},
        {"model.hidden", "", "(empty)"},
        {"model.hidden", "3.5", "not an integer"},
        {"train.lr", "-1", "out of range"},
        {"train.lr", "nan", "not a number"},
        {"train.beta1", "1", "0 to below 1"},
        {"train.eps", "0", "above 0 to 1"},
        {"model.dropout", "1", "out of range"},
        {"model.act", "swish", "swiglu | geglu"},
        {"model.kv_heads", "-1", "0 = heads"},
        {"model.tied", "maybe", "neither on nor off"},
        {"data.seed", "9007199254740992", "out of range"},
        {"model.hiden", "3", "model.hidden"},
        {"hidden", "3", "no option"},
    };
    struct config c = fresh();
    struct err e = {0};
    for (int i = 0; i < countof(bad); i++)
        assert_fails(config_set(&c, bad[i].name, bad[i].value, NULL, &e), ST_USAGE, &e, bad[i].message);
    struct config untouched = fresh();
    assert_same_values(&c, &untouched);
    set(&c, "train.steps", "20k");
    assert_int_equal(c.train.steps, 20000);
    set(&c, "train.schedule", "WSD");
    assert_int_equal(c.train.schedule, CFG_SCHEDULE_WSD);
    set(&c, "model.attn_sink", "off-by-one");
    assert_int_equal(c.model.attn_sink, CFG_SINK_OFF_BY_ONE);
    set(&c, "train.beta1", "0");
    char *long_text = calloc(CONFIG_MAX_STRING + 2, 1);
    memset(long_text, 'a', CONFIG_MAX_STRING + 1);
    assert_fails(config_set(&c, "data.train", long_text, "x.ini", &e), ST_USAGE, &e, "65536");
    free(long_text);
    config_release(&untouched);
    config_release(&c);
}

static void automatic_values_are_derived(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    assert_ok(config_finish(&c, &e), &e);
    assert_int_equal(c.model.kv_heads, 5);
    assert_int_equal(c.model.head_dim, 64);
    assert_int_equal(c.model.ffn, 864); /* 8/3 * 320 = 853.3 */
    assert_true(c.model.softmax_scale == 0.125);
    assert_true(c.model.embed_init_std == 0.02);
    assert_int_equal(c.train.global_batch, 16);
    assert_int_equal(c.train.decay_steps, 1000);
    assert_int_equal(c.train.wsd_steps, 0);
    assert_true(c.run.threads >= 1);
    assert_int_equal(c.model.vocab, 0);
    assert_ok(config_set_auto(&c, "model.vocab", 257, &e), &e);
    assert_int_equal(c.model.vocab, 257);
    assert_fails(config_set_auto(&c, "model.hidden", 8, &e), ST_INTERNAL, &e, "model.hidden");
    char from[64];
    assert_string_equal(config_source_text(&c, "model.ffn", from, sizeof from), "auto");
    /* A change of what they were derived from is followed; what the user set is kept. */
    set(&c, "train.steps", "50");
    set(&c, "train.schedule", "wsd");
    set(&c, "model.act", "relu2");
    set(&c, "model.head_dim", "16");
    assert_ok(config_finish(&c, &e), &e);
    assert_int_equal(c.train.decay_steps, 50);
    assert_int_equal(c.train.wsd_steps, 10);
    assert_int_equal(c.model.ffn, 1280);
    assert_int_equal(c.model.head_dim, 16);
    assert_true(c.model.softmax_scale == 0.25);
    set(&c, "train.schedule", "cosine");
    assert_ok(config_finish(&c, &e), &e);
    config_release(&c);
}

struct rule_case {
    const char *rule;
    const char *settings[12]; /* name, value, ... */
};
static const struct rule_case rule_cases[] = {
    {"mhc-two-streams", {"model.mhc_streams", "1"}},
    {"mhc-options-need-streams", {"model.mhc_iterations", "5"}},
    {"mhc-options-need-streams", {"model.mhc_norm_eps_inside", "on"}},
    {"mhc-norm-eps-inside", {"model.mhc_norm_eps", "1e-5", "model.mhc_streams", "4"}},
    {"recompute-block-format", {"plan.recompute_block", "two", "model.mhc_streams", "4"}},
    {"fit-format", {"plan.fit", "80KB"}},
    {"recompute-block-needs-streams", {"plan.recompute_block", "2"}},
    {"recompute-mhc-needs-streams", {"plan.recompute", "norm,mhc"}},
    {"recompute-mhc-needs-streams", {"mhc.kernels", "primitive"}},
    {"recompute-mhc-needs-streams", {"mhc.rebuild", "off"}},
    {"ratios-within-one", {"model.attn_ratio", "0.6", "model.mlp_ratio", "0.5", "model.layers", "8"}},
    {"pattern-or-ratios", {"model.pattern", "M*", "model.attn_ratio", "0.5", "model.layers", "4"}},
    {"pattern-or-ratios", {"model.pattern", "M*", "model.mlp_ratio", "0.5"}},
    {"ratios-need-layers", {"model.attn_ratio", "0.5"}},
    {"mtp-pattern-is-one-depth", {"model.mtp_pattern", "*-/*-", "model.mtp_layers", "2"}},
    {"mtp-pattern-needs-layers", {"model.mtp_pattern", "*-"}},
    {"mtp-layers-need-pattern", {"model.mtp_layers", "1"}},
    {"pattern-or-mtp-pattern", {"model.pattern", "M*/*-", "model.mtp_pattern", "*E", "model.mtp_layers", "1"}},
    {"pattern-or-mtp-pattern", {"model.pattern", "M*/*-", "model.mtp_pattern", "*-", "model.mtp_layers", "2"}},
    {"transformer-layers", {"model.layers", "1025"}},
    {"heads-divide-hidden", {"model.heads", "3"}},
    {"kv-heads-divide-heads", {"model.kv_heads", "2"}},
    {"kv-heads-divide-heads", {"model.kv_heads", "10"}},
    {"rotary-dim-even", {"model.head_dim", "33"}},
    {"rotary-dim-even", {"model.rope_percent", "0.01"}},
    {"window-skip-needs-window", {"model.attn_window_skip", "2"}},
    {"rope-options-need-rope", {"model.rope", "none", "model.no_rope_freq", "4"}},
    {"learned-or-rotary", {"model.position", "learned", "model.rope", "half"}},
    {"positions-hold-a-sequence", {"model.position", "learned", "model.max_position", "8"}},
    {"layer-norm-alone", {"model.norm", "layer", "model.qk_norm", "on"}},
    {"layer-norm-alone", {"model.norm", "layer", "model.mhc_streams", "2"}},
    {"fp32-residual-alone", {"model.fp32_residual", "on", "model.mhc_streams", "2"}},
    {"latent-needs-rope", {"model.rope", "none", "model.pattern", "+-"}},
    {"rotary-channels-even", {"model.mla_rope", "7", "model.pattern", "+-"}},
    {"rotary-channels-even", {"model.mla_rope", "7", "model.pattern", "W-", "model.mla_q_rank", "8"}},
    {"sparse-needs-rope", {"model.rope", "none", "model.pattern", "D-"}},
    {"indexer-holds-rope", {"model.dsa_indexer_head_dim", "32", "model.pattern", "D-"}},
    {"warmup-without-adapters", {"model.dsa_dense_warmup", "on", "model.pattern", "D-", "lora.rank", "4"}},
    {"compressed-needs-rope", {"model.rope", "none", "model.pattern", "W-", "model.mla_q_rank", "8"}},
    {"compressed-needs-latent", {"model.pattern", "W-"}},
    {"shared-head-holds-rope", {"model.mla_v", "62", "model.pattern", "W-", "model.mla_q_rank", "8"}},
    {"output-groups-divide", {"model.o_groups", "7", "model.pattern", "W-", "model.mla_q_rank", "8"}},
    {"entry-indexer-holds-rope", {"model.dsa_indexer_head_dim", "32", "model.pattern", "C", "model.mla_q_rank", "8"}},
    {"csa-fills-a-window", {"model.compress_rate_csa", "4096", "model.pattern", "C", "model.mla_q_rank", "8"}},
    {"packed-windows-have-entries",
     {"train.seq", "1025", "data.eod", "on", "data.eod_mask", "on", "model.pattern", "C", "model.mla_q_rank", "8"}},
    {"hca-fills-a-window", {"model.compress_rate_hca", "4096", "model.pattern", "H", "model.mla_q_rank", "8"}},
    {"compressed-heads-over-ranks",
     {"parallel.tp", "4", "model.o_groups", "2", "model.pattern", "W-", "model.mla_q_rank", "8"}},
    {"csa-parts-are-entries", {"parallel.cp", "8", "train.seq", "48", "model.pattern", "C", "model.mla_q_rank", "8"}},
    {"csa-parts-are-entries", {"parallel.cp", "8", "train.seq", "32", "model.pattern", "C", "model.mla_q_rank", "8"}},
    {"hca-parts-are-entries", {"parallel.cp", "2", "train.seq", "384", "model.pattern", "H", "model.mla_q_rank", "8"}},
    {"window-within-parts", {"parallel.cp", "4", "train.seq", "256", "model.pattern", "W", "model.mla_q_rank", "8"}},
    {"yarn-rotates-all", {"model.rope_scaling", "yarn", "model.rope_factor", "8", "model.rope_percent", "0.5"}},
    {"rope-factor-needs-scaling", {"model.rope_factor", "8"}},
    {"rope-scaling-needs-factor", {"model.rope_scaling", "linear"}},
    {"llama3-band", {"model.rope_scaling", "llama3", "model.rope_factor", "8", "model.rope_low", "4"}},
    {"yarn-band", {"model.rope_scaling", "yarn", "model.rope_factor", "8", "model.rope_beta_fast", "1"}},
    {"mscale-needs-yarn", {"model.rope_mscale", "1"}},
    {"clamp-and-offset-need-gate", {"model.act", "gelu", "model.act_clamp", "7"}},
    {"clamp-and-offset-need-gate", {"model.act", "silu", "model.act_offset", "1"}},
    {"alpha-needs-quick", {"model.act_alpha", "1.5"}},
    {"gdn-heads-fit", {"model.gdn_value_dim", "48", "model.pattern", "G"}},
    {"gdn-key-heads-divide", {"model.gdn_value_heads", "6", "model.gdn_key_heads", "4", "model.pattern", "*G"}},
    {"mamba-heads-fit", {"model.mamba_head_dim", "48", "model.pattern", "M"}},
    {"mamba-groups-divide-heads", {"model.mamba_groups", "4", "model.pattern", "*M"}},
    {"mamba-groups-divide-heads", {"model.mamba_heads", "6", "model.mamba_groups", "4", "model.pattern", "M"}},
    {"mamba-steps-ordered", {"model.mamba_dt_min", "2", "model.mamba_dt_max", "1"}},
    {"topk-within-experts", {"model.topk", "9"}},
    {"cp-divides-the-sequence", {"parallel.cp", "7"}},
    {"ring-keeps-its-output", {"parallel.cp_comm", "ring", "parallel.cp", "2", "plan.recompute", "norm core_attn"}},
    {"ring-drops-by-fours",
     {"parallel.cp_comm", "ring", "parallel.cp", "2", "train.seq", "12", "model.attention_dropout", "0.1"}},
    {"cp-without-capacity", {"model.router_capacity", "1.5", "parallel.cp", "2"}},
    {"cp-without-replayed-routes", {"train.replay_routes", "a", "parallel.cp", "2"}},
    {"mamba-parts-hold-the-taps", {"parallel.cp", "128", "train.seq", "256", "model.pattern", "*M"}},
    {"gdn-parts-hold-the-taps", {"parallel.cp", "128", "train.seq", "256", "model.pattern", "*G"}},
    {"ep-needs-experts", {"parallel.ep", "2"}},
    {"ep-needs-experts", {"parallel.etp", "2"}},
    {"expert-ffn-over-ranks", {"parallel.etp", "3", "model.expert_ffn", "64", "model.pattern", "*E"}},
    {"expert-ffn-over-ranks",
     {"parallel.etp", "2", "model.expert_ffn", "24", "model.glu_interleave", "8", "model.pattern", "*E"}},
    {"etp-returns-sums", {"parallel.ep_fp8", "both", "parallel.etp", "2", "model.pattern", "*E"}},
    {"etp-within-scale-blocks",
     {"parallel.etp", "2", "model.hidden", "640", "model.expert_ffn", "384", "gpu.precision", "fp8", "model.pattern",
      "*E"}},
    {"tensor-scale-without-tp", {"gpu.fp8_recipe", "tensor", "gpu.precision", "fp8", "parallel.tp", "2"}},
    {"row-norm-without-tp", {"parallel.tp", "2", "model.qk_norm", "row"}},
    {"mamba-norm-by-group-under-tp", {"parallel.tp", "2", "model.mamba_norm", "whole", "model.pattern", "M"}},
    {"capacity-without-tp", {"parallel.tp", "2", "model.router_capacity", "1", "model.pattern", "*E"}},
    {"noise-without-tp", {"parallel.tp", "2", "model.router_jitter", "0.1", "model.pattern", "*E"}},
    {"noise-without-tp", {"parallel.tp", "2", "model.router_force_balance", "on", "model.pattern", "*E"}},
    {"two-balances-without-tp",
     {"parallel.tp", "2", "model.aux_loss", "0.1", "model.seq_aux_loss", "0.1", "model.pattern", "*E",
      "train.micro_batch", "2"}},
    {"seq-aux-whole-sequences",
     {"parallel.tp", "2", "model.seq_aux_loss", "0.1", "train.micro_batch", "3", "model.pattern", "*E"}},
    {"routes-without-tp", {"parallel.tp", "2", "train.replay_routes", "r", "model.pattern", "*E"}},
    {"zero3-without-stages", {"parallel.zero", "3", "parallel.pp", "2"}},
    {"experts-over-ranks", {"parallel.ep", "3", "model.pattern", "*E"}},
    {"one-expert-needs-pre-softmax", {"model.topk", "1"}},
    {"pre-softmax-needs-softmax", {"model.router_pre_softmax", "on", "model.router_score", "sigmoid"}},
    {"router-bias-needs-sigmoid", {"model.router_bias", "on"}},
    {"router-groups-fit", {"model.router_groups", "3"}},
    {"router-groups-fit", {"model.router_group_topk", "1"}},
    {"router-groups-fit", {"model.router_groups", "8", "model.router_group_topk", "1"}},
    {"group-best-fits", {"model.router_groups", "4", "model.router_group_topk", "2", "model.router_group_best", "3"}},
    {"interleave-fits", {"model.glu_interleave", "5"}},
    {"interleave-fits", {"model.glu_interleave", "4", "model.act", "gelu"}},
    {"shared-gate-needs-shared", {"model.shared_gate", "on"}},
    {"global-batch-multiple", {"train.global_batch", "24"}},
    {"global-batch-multiple", {"train.global_batch", "8"}},
    {"microbatch-tokens", {"train.micro_batch", "65536", "train.seq", "32768"}},
    {"countable-sizes", {"train.micro_batch", "65536", "train.seq", "32767", "model.ffn", "1048576"}},
    {"countable-sizes",
     {"train.micro_batch", "65536", "train.seq", "32767", "model.mamba_heads", "65536", "model.mamba_head_dim", "4096",
      "model.mamba_state", "4096"}},
    {"min-lr-below-lr", {"train.min_lr", "2e-3"}},
    {"warmup-within-steps", {"train.warmup", "1001"}},
    {"warmup-within-steps", {"train.warmup", "500", "train.decay_steps", "400"}},
    {"wsd-options-need-wsd", {"train.wsd_steps", "10"}},
    {"wsd-options-need-wsd", {"train.wsd_style", "linear"}},
    {"wsd-fits", {"train.schedule", "wsd", "train.warmup", "900"}},
    {"fp8-tokens", {"gpu.precision", "fp8", "run.device", "cuda", "train.micro_batch", "1", "train.seq", "40"}},
    {"fp8-tokens",
     {"gpu.precision", "fp8", "run.device", "cuda", "train.micro_batch", "1", "train.seq", "48", "parallel.cp", "2"}},
    {"eval-needs-data", {"train.eval_every", "10"}},
    {"split-format", {"data.split", "99"}},
    {"split-format", {"data.split", "99,"}},
    {"split-format", {"data.split", "0,1"}},
    {"split-format", {"data.split", "9,-1"}},
    {"split-format", {"data.split", "9,1,1,1"}},
    {"split-format", {"data.split", "9 1"}},
    {"split-or-valid", {"data.split", "9,1", "data.valid", "v.txt"}},
    {"tokenizer-named", {"data.tokenizer", ""}},
    {"eod-mask-needs-eod", {"data.eod_mask", "on"}},
    {"saving-needs-dir", {"run.save_every", "10"}},
    {"saving-needs-dir", {"run.resume", "must"}},
    {"one-load", {"run.load", "a", "run.load_weights", "b"}},
    {"step-to-load", {"run.load_step", "10", "run.resume", "never"}},
    {"allow-needs-weights", {"run.load_allow", "both"}},
};

/* "for example --option=value; ...": with it, the config passes all rules. Without one the message itself has to say
 * all. */
static void follow_proposal(struct config *c, const char *rule, const char *hint)
{
    static const char start[] = "for example --";
    static const char *const free_of_it = "pattern-or-ratios mtp-pattern-is-one-depth pattern-or-mtp-pattern";
    char name[100], value[100];
    struct err e = {0};
    if (strncmp(hint, start, strlen(start)) != 0) {
        if (!str_has_word(free_of_it, rule))
            fail_msg("rule %s proposes nothing: %s", rule, hint);
        return;
    }
    assert_int_equal(sscanf(hint + strlen(start), "%99[^=]=%99[^;]", name, value), 2);
    set(c, name, strcmp(value, "''") == 0 ? "" : value);
    assert_ok(config_finish(c, &e), &e);
}

static void each_rule_is_enforced_and_named(void **state)
{
    (void)state;
    bool covered[128] = {false};
    int n_rules = 0;
    while (config_rule(n_rules) != NULL)
        n_rules++;
    assert_in_range(n_rules, 50, countof(covered));
    for (int i = 0; i < countof(rule_cases); i++) {
        struct config c = fresh();
        struct err e = {0};
        const char *const *s = rule_cases[i].settings;
        for (int k = 0; k + 1 < countof(rule_cases[i].settings) && s[k] != NULL; k += 2)
            set(&c, s[k], s[k + 1]);
        char hint[80];
        snprintf(hint, sizeof hint, "rule %s;", rule_cases[i].rule);
        assert_fails(config_finish(&c, &e), ST_USAGE, &e, hint);
        assert_non_null(strstr(e.msg, s[0])); /* the value at fault is named, with its origin */
        assert_non_null(strstr(e.msg, "from command line"));
        follow_proposal(&c, rule_cases[i].rule, e.hint);
        for (int k = 0; k < n_rules; k++)
            covered[k] |= strcmp(config_rule(k)->name, rule_cases[i].rule) == 0;
        config_release(&c);
    }
    /* Every kind that is built divides; these are for one that is added and does not. */
    static const char *const for_other_kinds = "tp-needs-layers-that-divide cp-needs-layers-that-divide";
    for (int k = 0; k < n_rules; k++)
        if (!covered[k] && !str_has_word(for_other_kinds, config_rule(k)->name))
            fail_msg("rule %s has no test", config_rule(k)->name);
}

static void legal_neighbours_of_the_rules_pass(void **state)
{
    (void)state;
    static const char *const settings[][8] = {
        {"model.pattern", "M[*-]|GE/*-"},
        {"model.pattern", "M**M", "model.attn_ratio", "0.5", "model.layers", "4"},
        {"model.pattern", "*-", "model.layers", "12"},
        {"model.pattern", "M*/*-/*-", "model.mtp_pattern", "*-", "model.mtp_layers", "2"},
        {"model.pattern", "M*/*-", "model.mtp_layers", "3"},
        {"model.layers", "4", "model.attn_ratio", "0.5", "model.mtp_pattern", "*", "model.mtp_layers", "1"},
        {"model.layers", "7", "model.mlp_ratio", "1"},
        {"model.heads", "3", "model.head_dim", "64"},
        {"model.rope", "none", "model.head_dim", "33"},
        {"model.rope_scaling", "yarn", "model.rope_factor", "40", "model.rope_mscale", "1"},
        {"model.rope_scaling", "llama3", "model.rope_factor", "8"},
        {"model.act", "quick_geglu", "model.act_alpha", "1.5", "model.act_offset", "1"},
        {"train.schedule", "wsd", "train.warmup", "800"},
        {"train.schedule", "constant", "train.warmup", "800", "train.decay_steps", "10"},
        {"data.split", "0.9,0.1,0", "train.eval_every", "5"},
        {"data.eod", "on", "data.eod_mask", "on"},
        {"model.attn_window", "128", "model.attn_window_skip", "2"},
        {"model.gdn_value_heads", "6", "model.gdn_key_heads", "4"},
        {"model.gdn_value_heads", "7", "model.pattern", "G"},
        {"model.mamba_head_dim", "48", "model.mamba_groups", "4"},
        {"model.mamba_dt_min", "1", "model.mamba_dt_max", "1", "model.pattern", "M"},
    };
    for (int i = 0; i < countof(settings); i++) {
        struct config c = fresh();
        struct err e = {0};
        for (int k = 0; k + 1 < countof(settings[i]) && settings[i][k] != NULL; k += 2)
            set(&c, settings[i][k], settings[i][k + 1]);
        assert_ok(config_finish(&c, &e), &e);
        config_release(&c);
    }
}

static void a_written_config_reads_back_exactly(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    char awkward[1200];
    for (int i = 0; i < 1199; i++)
        awkward[i] = (char)(i % 255 + 1); /* every byte but NUL, quotes, ; and # among them */
    awkward[1199] = '\0';
    set(&c, "generate.prompt", awkward);
    set(&c, "data.train", " 0.3 a b # c ; d ");
    set(&c, "data.valid", "\"");
    set(&c, "plan.trace", "a;b#c\\");
    set(&c, "plan.recompute", "hidden = 3");
    set(&c, "train.lr", "0.1234567890123456789");
    set(&c, "train.eps", "5e-324");
    set(&c, "model.rope_percent", "0.5");
    assert_ok(config_finish(&c, &e), &e);
    for (int with_sources = 0; with_sources < 2; with_sources++) {
        struct buf text;
        buf_init(&text, 0);
        config_write(&c, &text, with_sources);
        assert_ok(buf_check(&text, &e), &e);
        struct config again = fresh();
        assert_ok(config_read_ini_text(&again, text.text, text.len, "saved", &e), &e);
        assert_int_equal(again.train.decay_steps, 0); /* derived run values stay automatic */
        assert_int_equal(again.model.ffn, 864);       /* derived model values are fixed */
        assert_ok(config_finish(&again, &e), &e);
        assert_same_values(&c, &again);
        config_release(&again);
        buf_release(&text);
    }
    config_release(&c);
}

static void sources_are_written_as_comments(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    static const char ini[] = "[model]\n\nhidden = 640\n";
    assert_ok(config_read_ini_text(&c, ini, strlen(ini), "d/a.ini", &e), &e);
    set(&c, "train.steps", "5");
    assert_ok(config_finish(&c, &e), &e);
    struct buf text;
    buf_init(&text, 0);
    config_write(&c, &text, true);
    assert_non_null(strstr(text.text, "hidden = 640  # from d/a.ini:3\n"));
    assert_non_null(strstr(text.text, "steps = 5  # from command line\n"));
    assert_non_null(strstr(text.text, "heads = 5  # default\n"));
    assert_non_null(strstr(text.text, "head_dim = 128  # auto\n"));
    assert_non_null(strstr(text.text, "decay_steps = 0  # auto: 5\n"));
    buf_release(&text);
    config_release(&c);
}

/* A finished config's text, as a checkpoint holds it. */
static struct buf saved_text(const char *const *settings)
{
    struct err e = {0};
    struct config c = fresh();
    for (int i = 0; settings[i] != NULL; i += 2)
        set(&c, settings[i], settings[i + 1]);
    assert_ok(config_finish(&c, &e), &e);
    struct buf text;
    buf_init(&text, 0);
    config_write(&c, &text, true);
    config_release(&c);
    return text;
}

static const char *const saved_settings[] = {
    "model.hidden",   "64",       "model.heads",       "4",   "train.lr", "5e-4", "train.steps", "100",
    "data.tokenizer", "tok.json", "train.seq",         "128", "run.dir",  "old",  "run.minutes", "3",
    "model.vocab",    "300",      "train.decay_steps", "80",  NULL};

static void eval_takes_the_model_from_the_checkpoint(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf text = saved_text(saved_settings);
    struct config c = fresh();
    set(&c, "model.heads", "4");    /* the same value: no conflict */
    set(&c, "model.kv_heads", "0"); /* automatic: no opinion */
    set(&c, "train.lr", "1e-2");
    assert_ok(config_load_saved(&c, text.text, text.len, "ck/100", CFG_SAVED_MODEL, NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_int_equal(c.model.hidden, 64);
    assert_int_equal(c.model.kv_heads, 4);
    assert_int_equal(c.model.vocab, 300);
    assert_string_equal(c.data.tokenizer, "tok.json"); /* inherited with the model */
    assert_int_equal(c.train.seq, 128);
    assert_int_equal(c.train.steps, 1000); /* run options are the user's */
    assert_true(c.train.lr == 1e-2);
    assert_string_equal(c.run.dir, "");
    char from[64];
    assert_string_equal(config_source_text(&c, "model.hidden", from, sizeof from), "checkpoint ck/100");
    config_release(&c);
    buf_release(&text);
}

static void resume_takes_what_the_user_did_not_set(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf text = saved_text(saved_settings), changes;
    struct config c = fresh();
    set(&c, "run.dir", "new");
    set(&c, "train.steps", "200");
    set(&c, "data.tokenizer", "moved/tok.json");
    set(&c, "train.decay_steps", "0"); /* automatic on purpose: follow the new steps */
    buf_init(&changes, 0);
    assert_ok(config_load_saved(&c, text.text, text.len, "ck", CFG_SAVED_ALL, &changes, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_int_equal(c.model.hidden, 64);
    assert_true(c.train.lr == 5e-4);
    assert_int_equal(c.train.steps, 200);
    assert_int_equal(c.train.decay_steps, 200);
    assert_string_equal(c.data.tokenizer, "moved/tok.json");
    assert_string_equal(c.run.dir, "new");
    assert_true(c.run.minutes == 0); /* belongs to one invocation */
    assert_string_equal(changes.text, "train.steps: 100 -> 200\n"
                                      "train.decay_steps: 80 -> 0\n"
                                      "data.tokenizer: tok.json -> moved/tok.json\n");
    buf_release(&changes);
    buf_release(&text);
    config_release(&c);
}

static void a_conflict_with_the_checkpoint_names_both_values(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf text = saved_text(saved_settings);
    for (int mode = CFG_SAVED_MODEL; mode <= CFG_SAVED_ALL; mode++) {
        struct config c = fresh(), before = fresh();
        set(&c, "model.hidden", "128");
        set(&before, "model.hidden", "128");
        assert_fails(config_load_saved(&c, text.text, text.len, "ck/100", (enum config_saved_mode)mode, NULL, &e),
                     ST_CONFLICT, &e, "model.hidden is 128 (command line)");
        assert_non_null(strstr(e.msg, "ck/100 was made with 64"));
        assert_same_values(&c, &before);
        config_release(&c);
        config_release(&before);
    }
    struct config c = fresh();
    static const char damaged[] = "[model]\nhidden = 64\nhid";
    assert_fails(config_load_saved(&c, damaged, strlen(damaged), "ck/100", CFG_SAVED_ALL, NULL, &e), ST_USAGE, &e,
                 "ck/100:3");
    assert_int_equal(c.model.hidden, 320);
    config_release(&c);
    buf_release(&text);
}

static void help_fits_the_screen_and_tells_all(void **state)
{
    (void)state;
    struct buf help, docs, part;
    buf_init(&help, 0);
    buf_init(&docs, 0);
    buf_init(&part, 0);
    config_help(&help, NULL);
    config_help(&part, "train");
    config_write_docs(&docs);
    for (const char *line = help.text; *line != '\0'; line += strcspn(line, "\n") + 1)
        assert_true(strcspn(line, "\n") <= 100);
    for (int i = 0; i < config_n_options; i++) {
        char needle[80];
        snprintf(needle, sizeof needle, "--%s=", config_options[i].name);
        assert_non_null(strstr(help.text, needle));
        snprintf(needle, sizeof needle, "| `%s` |", option_key(&config_options[i]));
        assert_non_null(strstr(docs.text, needle));
    }
    assert_non_null(strstr(help.text, "--model.hidden=integer [320] 1 to 65536; also --hidden-size"));
    assert_non_null(strstr(help.text, "[0 = heads]"));
    assert_non_null(strstr(part.text, "--train.lr="));
    assert_null(strstr(part.text, "--model.hidden="));
    assert_non_null(strstr(docs.text, "`eod-mask-needs-eod`"));
    buf_release(&help);
    buf_release(&docs);
    buf_release(&part);
}

static void shipped_configs_are_valid(void **state)
{
    (void)state;
    struct err e = {0};
    struct config demo = fresh(), speed = fresh(), tiny = fresh();
    assert_ok(config_read_ini(&demo, "configs/demo.ini", &e), &e);
    assert_ok(config_read_ini(&speed, "configs/speed-10m.ini", &e), &e);
    assert_ok(config_read_ini(&tiny, "configs/tiny.ini", &e), &e);
    assert_ok(config_finish(&demo, &e), &e);
    assert_ok(config_finish(&speed, &e), &e);
    assert_ok(config_finish(&tiny, &e), &e);
    assert_string_equal(demo.model.pattern, "[M-][*E][M-][*E]/*E");
    assert_string_equal(demo.data.split, "90,10");
    assert_int_equal(strlen(speed.model.pattern), 16);
    assert_int_equal(speed.model.ffn, 864);
    assert_false(speed.model.tied);
    assert_int_equal(tiny.model.kv_heads, 1);
    assert_int_equal(tiny.train.global_batch, 4);
    config_release(&demo);
    config_release(&speed);
    config_release(&tiny);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(option_names_are_the_frozen_list),
        cmocka_unit_test(every_row_is_complete_and_unique),
        cmocka_unit_test(defaults_come_from_the_table),
        cmocka_unit_test(values_are_checked),
        cmocka_unit_test(automatic_values_are_derived),
        cmocka_unit_test(each_rule_is_enforced_and_named),
        cmocka_unit_test(legal_neighbours_of_the_rules_pass),
        cmocka_unit_test(a_written_config_reads_back_exactly),
        cmocka_unit_test(sources_are_written_as_comments),
        cmocka_unit_test(eval_takes_the_model_from_the_checkpoint),
        cmocka_unit_test(resume_takes_what_the_user_did_not_set),
        cmocka_unit_test(a_conflict_with_the_checkpoint_names_both_values),
        cmocka_unit_test(help_fits_the_screen_and_tells_all),
        cmocka_unit_test(shipped_configs_are_valid),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
