/* Every option over every kind of layer: it changes what is trained, or it is refused, or it is reported as having no
 * effect. What config/uses.c says is held against what a small model does in two steps: plan, parameters, losses,
 * everything that was trained. */
#include "train/run.h"

/* `with` is set in the model that is compared with, too: what the option needs to matter. @ stands for the kind. */
struct row {
    const char *name, *value, *with;
};

static const struct row rows[] = {
    {"model.layers", "3", ""},
    {"model.mtp_layers", "2", "model.pattern=@@/@"},
    {"model.hidden", "32", ""},
    {"model.heads", "4", ""},
    {"model.kv_heads", "1", ""},
    {"model.head_dim", "6", ""},
    {"model.ffn", "20", ""},
    {"model.ffn", "20", "model.expert_ffn=9"},
    {"model.vocab", "300", ""},
    {"model.vocab_multiple", "7", ""},
    {"model.act", "gelu", ""},
    {"model.act_clamp", "0.01", ""},
    {"model.act_alpha", "1.2", "model.act=quick_gelu"},
    {"model.act_offset", "0.5", ""},
    {"model.norm", "layer", ""},
    {"model.norm", "layer", "model.position=learned"},
    {"model.norm_eps", "0.01", ""},
    {"model.norm_eps", "0.01", "model.norm=layer"},
    {"model.norm_zero_centered", "on", ""},
    {"model.norm_zero_centered", "on", "model.norm=layer"},
    {"model.qk_norm", "on", ""},
    {"model.qk_norm", "row", ""},
    {"model.qk_norm", "row", "model.qk_norm=on"},
    {"model.qk_norm", "row", "model.norm=layer"},
    {"model.attn_gate", "on", ""},
    {"model.attn_window", "3", ""},
    {"model.attn_window_skip", "2", "model.attn_window=3"},
    {"model.attn_window_skip", "3", "model.attn_window=3"},
    {"model.attn_sink", "learnable", ""},
    {"model.attn_sink", "off_by_one", ""},
    {"model.softmax_scale", "0.7", ""},
    {"model.qkv_bias", "on", ""},
    {"model.qkv_bias", "on", "model.bias=on"},
    {"model.qkv_bias", "on", "model.attn_bias=on"},
    {"model.attn_bias", "on", ""},
    {"model.attn_bias", "on", "model.qkv_bias=on"},
    {"model.attn_bias", "on", "model.bias=on"},
    {"model.mlp_bias", "on", ""},
    {"model.mlp_bias", "on", "model.bias=on"},
    {"model.bias", "on", ""},
    {"model.position", "learned", ""},
    {"model.max_position", "64", "model.position=learned"},
    {"model.mhc_streams", "2", "model.norm=layer"},
    {"model.rope", "none", ""},
    {"model.rope", "interleaved", ""},
    {"model.rope_base", "100", ""},
    {"model.rope_base", "100", "model.rope=none"},
    {"model.rope_base", "100", "model.no_rope_freq=1"},
    {"model.rope_percent", "0.5", ""},
    {"model.rope_percent", "0.5", "model.rope=none"},
    {"model.rope_percent", "0.5", "model.rope_scaling=yarn model.rope_factor=4"},
    {"model.rope_scaling", "linear", ""},
    {"model.rope_scaling", "yarn", "model.rope_factor=2 model.rope_scaling=linear"},
    {"model.rope_factor", "4", "model.rope_scaling=linear model.rope_factor=2"},
    {"model.rope_original", "8", ""},
    {"model.rope_original", "8", "model.rope_scaling=linear model.rope_factor=2"},
    {"model.rope_original", "8", "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=64"},
    {"model.rope_low", "0.5", ""},
    {"model.rope_low", "0.5", "model.rope_scaling=llama3 model.rope_factor=4 model.rope_original=64"},
    {"model.rope_high", "2", ""},
    {"model.rope_high", "2", "model.rope_scaling=llama3 model.rope_factor=4 model.rope_original=64"},
    {"model.rope_beta_fast", "2", ""},
    {"model.rope_beta_fast", "2",
     "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=64 model.rope_base=100"},
    {"model.rope_beta_slow", "0.2", ""},
    {"model.rope_beta_slow", "0.2",
     "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=64 model.rope_base=100"},
    {"model.rope_mscale", "0.5", ""},
    {"model.rope_mscale", "0.5", "model.rope_scaling=yarn model.rope_factor=4 model.rope_mscale_all_dim=0.3"},
    {"model.rope_mscale_all_dim", "0.5", "model.rope_scaling=yarn model.rope_factor=4 model.rope_mscale=0.3"},
    {"model.rope_truncate", "off", ""},
    {"model.rope_truncate", "off",
     "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=64 model.rope_base=100"},
    {"model.no_rope_freq", "2", ""},
    {"model.no_rope_freq", "3", ""},
    {"model.no_rope_freq", "2", "model.rope=none"},
    {"model.tied", "off", ""},
    {"model.init_std", "0.1", ""},
    {"model.embed_init_std", "0.05", ""},
    {"model.init_scale", "none", ""},
    {"model.dropout", "0.1", ""},
    {"model.attention_dropout", "0.1", ""},
    {"model.fp32_residual", "on", ""}, /* of effect on a GPU only: tests/model/test_stream.c */
    {"model.mtp_scale", "0.5", ""},
    {"model.mtp_scale", "0.5", "model.pattern=@@/@"},
    {"model.mla_q_rank", "6", ""},
    {"model.mla_kv_rank", "10", ""},
    {"model.mla_nope", "5", ""},
    {"model.mla_rope", "6", ""},
    {"model.mla_v", "12", ""},
    {"model.mla_norm_eps", "0.001", ""},
    {"model.mla_softmax_scale", "0.7", ""},
    {"model.dsa_indexer_n_heads", "3", ""},
    {"model.dsa_indexer_head_dim", "12", ""},
    {"model.dsa_indexer_topk", "5", ""},
    {"model.dsa_indexer_topk_freq", "2", ""},
    {"model.dsa_indexer_skip_topk_offset", "2", ""},
    {"model.dsa_indexer_skip_topk_offset", "2", "model.dsa_indexer_topk_freq=2"},
    {"model.dsa_indexer_loss_coeff", "0.5", ""},
    {"model.dsa_indexer_use_sparse_loss", "on", ""},
    {"model.dsa_indexer_use_sparse_loss", "on", "model.dsa_dense_warmup=on"},
    {"model.dsa_dense_warmup", "on", ""},
    {"model.dsa_indexer_rope_interleaved", "on", ""},
    {"model.dsa_indexer_scoring_relu", "off", ""},
    {"model.dsa_indexer_k_norm_epsilon", "0.01", ""},
    {"model.csa_window_size", "3", ""},
    {"model.compress_rate_csa", "3", ""},
    {"model.compress_rate_hca", "5", ""},
    {"model.csa_compress_rotary_base", "500", ""},
    {"model.o_groups", "4", ""},
    {"model.o_lora_rank", "5", ""},
    {"model.mhc", "on", ""},
    {"model.mhc_streams", "2", ""},
    {"model.mhc_profile", "s", ""},
    {"model.mhc_profile", "s", "model.mhc_streams=2"},
    {"model.mhc_iterations", "3", "model.mhc_streams=2"},
    {"model.mhc_gating", "0.5", "model.mhc_streams=2"},
    {"model.mhc_bf16_coef", "on", "model.mhc_streams=2"},
    {"model.mhc_norm_eps_inside", "on", "model.mhc_streams=2"},
    {"model.mhc_norm_eps", "0.25", "model.mhc_streams=2 model.mhc_norm_eps_inside=on"},
    {"model.gdn_value_heads", "6", ""},
    {"model.gdn_key_heads", "4", ""},
    {"model.gdn_key_dim", "5", ""},
    {"model.gdn_value_dim", "6", ""},
    {"model.gdn_conv", "3", ""},
    {"model.gdn_chunk", "4", ""},
    {"model.mamba_heads", "6", ""},
    {"model.mamba_head_dim", "3", ""},
    {"model.mamba_state", "6", ""},
    {"model.mamba_groups", "1", ""},
    {"model.mamba_conv", "3", ""},
    {"model.mamba_chunk", "4", ""},
    {"model.mamba_dt_min", "0.5", ""},
    {"model.mamba_dt_max", "0.01", ""},
    {"model.mamba_norm", "whole", ""},
    {"model.mamba_norm", "whole", "model.mamba_groups=1"},
    {"model.experts", "6", ""},
    {"model.topk", "3", ""},
    {"model.expert_ffn", "9", ""},
    {"model.shared_ffn", "10", ""},
    {"model.shared_gate", "on", ""},
    {"model.shared_gate", "on", "model.shared_ffn=10"},
    {"model.expert_bias", "on", ""},
    {"model.glu_interleave", "2", ""},
    {"model.router_score", "sigmoid", ""},
    {"model.router_pre_softmax", "on", ""},
    {"model.router_pre_softmax", "on", "model.router_hash_layers=2"},
    {"model.router_norm", "off", ""},
    {"model.router_norm", "off", "model.router_score=sigmoid"},
    {"model.router_norm", "off", "model.router_score=sigmoid model.topk=1"},
    {"model.router_groups", "4", ""},
    {"model.router_groups", "2", "model.router_groups=4 model.router_group_topk=1"},
    {"model.router_group_topk", "2", "model.router_groups=4 model.router_group_topk=1"},
    {"model.router_group_topk", "2", "model.router_groups=4 model.router_group_topk=1 model.router_hash_layers=2"},
    {"model.router_group_best", "2", ""},
    {"model.router_group_best", "2", "model.experts=12 model.router_groups=4 model.router_group_topk=2"},
    {"model.router_linear_bias", "on", ""},
    {"model.router_scale", "2", ""},
    {"model.router_bias", "on", ""},
    {"model.router_bias", "on", "model.router_score=sigmoid"},
    {"model.router_bias", "on", "model.router_score=sigmoid model.router_hash_layers=2"},
    {"model.router_bias_rate", "0.1", ""},
    {"model.router_bias_rate", "0.1", "model.router_score=sigmoid model.router_bias=on"},
    {"model.router_bias_rate", "0.1", "model.router_score=sigmoid model.router_bias=on model.router_hash_layers=2"},
    {"model.router_hash_layers", "1", ""},
    {"model.router_hash_layers", "1", "model.pattern=-@"},
    {"model.router_hash_layers", "2", "model.pattern=-@"},
    {"model.aux_loss", "0.1", ""},
    {"model.seq_aux_loss", "0.1", ""},
    {"model.global_aux_loss", "0.1", ""},
    {"model.router_z_loss", "0.1", ""},
    {"model.router_jitter", "0.1", ""},
    {"model.router_capacity", "0.5", ""},
    {"model.router_drop", "position", ""},
    {"model.router_drop", "position", "model.router_capacity=0.5"},
    {"model.router_force_balance", "on", ""},
    {"train.seq", "12", ""},
    {"train.micro_batch", "1", ""},
    {"train.global_batch", "2", ""},
    {"train.lr", "0.01", ""},
    {"train.min_lr", "0.001", ""},
    {"train.min_lr", "0.001", "train.schedule=constant"},
    {"train.warmup", "2", ""},
    {"train.schedule", "linear", ""},
    {"train.decay_steps", "10", ""},
    {"train.decay_steps", "10", "train.schedule=constant"},
    {"train.wsd_steps", "4", ""},
    {"train.wsd_steps", "1", "train.steps=2 train.schedule=wsd train.wsd_steps=2"},
    {"train.wsd_style", "linear", ""},
    {"train.wsd_style", "linear", "train.steps=2 train.schedule=wsd train.wsd_steps=2"},
    {"train.beta1", "0.5", ""},
    {"train.beta2", "0.5", ""},
    {"train.eps", "0.01", ""},
    {"train.weight_decay", "0.5", ""},
    {"train.clip", "0.01", ""},
    {"train.loss_chunk", "5", ""},
    {"train.z_loss", "0.1", ""},
    {"data.seed", "5", ""},
    {"data.eod_mask", "on", ""},
    {"data.eod_mask", "on", "model.vocab=300 data.eod=on"},
    {"run.seed", "2", ""},
    {"plan.recompute", "full", ""},
    {"plan.recompute_granularity", "full", ""},
    {"plan.recompute_block", "1", ""},
    {"plan.recompute_block", "1", "model.mhc_streams=2"},
    {"plan.offload", "*", ""},
    {"plan.offload", "*", "plan.offload_min=0"},
    {"plan.offload_min", "0", ""},
    {"plan.offload_min", "0", "plan.offload=*"},
    {"plan.fused_experts", "on", ""},
    {"plan.delay_dw", "on", ""},
    {"mhc.kernels", "primitive", "model.mhc_streams=2"},
    {"mhc.rebuild", "off", ""},
    {"mhc.rebuild", "off", "model.mhc_streams=2"},
    {"mhc.rebuild", "off", "model.pattern=@@@@ model.mhc_streams=4 plan.recompute_block=4"},
    {"plan.graphs", "off", ""},
    {"plan.trace_steps", "5", ""},
    {"gpu.precision", "fp32", ""},
    {"gpu.fp8_recipe", "tensor", ""},
    {"gpu.fp8_grad", "e5m2", ""},
    {"gpu.fp8_keep", "*proj*", ""},
    {"gpu.portable", "on", ""},
    {"gpu.fast", "on", ""},
    {"gpu.gemm_table", "file", ""},
    {"gpu.index", "1", ""},
    {"gpu.sms", "10", ""},
    {"parallel.ep_capacity", "2", ""},
    {"parallel.ep_fp8", "dispatch", ""},
    {"parallel.cp_comm", "ring", ""},
    {"parallel.pp_group", "2", ""},
    {"parallel.first_layers", "2", ""},
    {"parallel.last_layers", "2", ""},
    {"parallel.overlap", "dw", ""},
    {"parallel.overlap", "tp", ""},
    {"parallel.loop_gbps", "5", ""},
    {"parallel.loop_us", "5", ""},
    {"lora.rank", "2", "model.shared_ffn=8"},
    {"lora.alpha", "3", "lora.rank=2 model.shared_ffn=8"},
    {"lora.alpha", "3", ""},
    {"lora.targets", "*layers.0.*", "lora.rank=2 model.shared_ffn=8"},
    {"lora.targets", "*layers.0.*", ""},
    {"parallel.loop_ranks", "4", ""},
    {"parallel.loop_axis", "dp", ""},
};

/* What the others are about: none of it is read by a layer, and each has a test of its own. */
static const char *const elsewhere[] = {
    "plan.fit",
    "optim.offload", /* tests/sim/test_fit.c, tests/train/test_offload.c */
    "optim.overlap",
    "optim.state", /* tests/train/test_state.c */
    /* they say which layers there are */
    "model.pattern",
    "model.attn_ratio",
    "model.mlp_ratio",
    "model.mtp_pattern",
    /* when a run ends, evaluates, logs, stops; what it reads and writes */
    "train.steps",
    "train.nonfinite",
    "train.nonfinite_limit",
    "train.log_every",
    "train.log_zeros",
    "train.eval_every",
    "train.eval_batches",
    "train.record_routes",
    "train.replay_routes",
    "data.train",
    "data.valid",
    "data.split",
    "data.eod",
    "data.tokenizer",
    "data.token_pattern", /* tests/token and tests/cmd/test_tokens.sh */
    "data.token_special",
    "data.field",
    "data.chat", /* tests/train/test_chat.c */
    "data.loss_roles",
    "data.eod_token",
    "data.accept_change", /* tests/cmd/test_bad_day.sh */
    "run.load_step",
    "parallel.tp", /* tests/train/test_verify.c */
    "parallel.etp",
    "parallel.cp",   /* tests/train/test_context.c */
    "parallel.port", /* tests/comm/test_start.c */
    "parallel.secret",
    "generate.prompt_file",
    "generate.stop",
    "generate.special",
    "run.dir",
    "run.device",
    "run.threads",
    "run.resume",
    "run.save_every",
    "run.async_save", /* test_train.c, tests/cmd/test_async_save.sh */
    "run.save_ranks", /* test_ranks.c, tests/cmd/test_shards.sh */
    "run.keep",
    "run.load",
    "run.load_weights",
    "run.load_allow",
    "run.minutes",
    "run.tensorboard",
    "run.report",
    "run.sample_tokens",
    "run.quiet",
    /* how a plan is walked: the same bits */
    "plan.poison",
    "plan.random_lanes",
    "plan.sync",
    "plan.find_nan",
    "plan.trace",
    /* several ranks: tests/train/test_ranks.c, test_verify.c */
    "parallel.comm",
    "parallel.ranks",
    "parallel.pp",
    "parallel.vpp",
    "parallel.ep",
    "parallel.zero",
    "parallel.reduce",
    "parallel.bucket_mb",
    "parallel.timeout",
    /* braid generate */
    "generate.prompt",
    "generate.tokens",
    "generate.temperature",
    "generate.top_k",
    "generate.top_p",
    "generate.seed",
    "generate.samples",
    "generate.batch",
};

/* The symbols of all kinds that are built. */
struct symbols {
    char list[KIND_MAX_CORES + 1];
};
static struct symbols kinds(void)
{
    struct symbols s = {""};
    int n, at = 0;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        if (cores[i]->declare != NULL)
            s.list[at++] = cores[i]->symbol;
    assert_true(at >= 6);
    return s;
}

static const char base[] =
    "model.pattern=@@ model.hidden=16 model.heads=2 model.ffn=12 model.init_std=0.2 "
    "model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=8 model.mla_v=10 model.mla_q_rank=9 model.gdn_value_heads=4 "
    "model.csa_window_size=5 model.compress_rate_csa=2 model.compress_rate_hca=8 model.o_groups=2 model.o_lora_rank=6 "
    "model.csa_compress_rotary_base=100 "
    "model.dsa_indexer_n_heads=2 model.dsa_indexer_head_dim=10 model.dsa_indexer_topk=6 "
    "model.gdn_key_heads=2 "
    "model.gdn_key_dim=4 model.gdn_value_dim=4 model.gdn_chunk=8 model.mamba_heads=4 model.mamba_head_dim=4 "
    "model.mamba_state=4 model.mamba_groups=2 model.mamba_chunk=8 train.seq=16 train.micro_batch=2 "
    "train.global_batch=4 "
    "train.steps=40 run.threads=1 run.quiet=on run.tensorboard=off run.report=off";

/* ---- what a model does ----------------------------------------------------------------------- */

static uint64_t mixed(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static uint64_t plan_print_of(const struct model_plan *mp, uint64_t h)
{
    struct buf text;
    buf_init(&text, 0);
    plan_print_steps(&mp->p, &text);
    plan_print_memory(&mp->p, &text);
    h = mixed(h, text.text, text.len);
    buf_release(&text);
    return h;
}

static int behaviour(const struct config *c, uint64_t *out, struct err *e)
{
    struct trainer t = {0};
    uint64_t h = 0xcbf29ce484222325u;
    int st;
    TRY_OUT(trainer_open(&t, c, NULL, true, e));
    h = plan_print_of(&t.eval, plan_print_of(&t.train, h));
    for (int s = 0; s < 2; s++) {
        struct step_result r;
        TRY_OUT(trainer_step(&t, &r, e));
        h = mixed(mixed(h, &r.loss, sizeof r.loss), &r.grad_norm, sizeof r.grad_norm);
    }
    for (int k = 0; k < t.model.params.n; k++) {
        struct tensor p = model_param(&t.model, k);
        h = mixed(h, t.model.params.list[k].p.key, strlen(t.model.params.list[k].p.key));
        h = mixed(mixed(h, p.dim, sizeof p.dim), p.data, (size_t)tensor_bytes(&p));
    }
    *out = h;
out:
    trainer_close(&t);
    return st;
}

/* ---- one option ------------------------------------------------------------------------------ */

static void set_all(struct config *c, const char *options, char kind)
{
    char text[1024];
    struct err e = {0};
    snprintf(text, sizeof text, "%s", options);
    for (char *p = strchr(text, '@'); p != NULL; p = strchr(p, '@'))
        *p = kind;
    assert_ok(tiny_set(c, text, &e), &e);
}

/* Status of building and running it; *reported: config_unused names the option. */
static int try_config(const struct playground *pg, char kind, const struct row *r, bool with_option, uint64_t *print,
                      bool *reported, struct err *e)
{
    struct config c;
    struct buf lines;
    char wanted[80];
    int st;
    buf_init(&lines, 0);
    assert_ok(config_init(&c, e), e);
    set_all(&c, base, kind);
    set_all(&c, r->with, kind);
    TRY_OUT(config_set(&c, "data.train", pg->text, NULL, e));
    if (with_option)
        TRY_OUT(config_set(&c, r->name, r->value, NULL, e));
    TRY_OUT(config_complete(&c, e));
    snprintf(wanted, sizeof wanted, "\n%s = ", r->name);
    buf_add(&lines, "\n");
    config_unused(&c, &lines);
    *reported = lines.text != NULL && strstr(lines.text, wanted) != NULL;
    TRY_OUT(behaviour(&c, print, e));
out:
    buf_release(&lines);
    config_release(&c);
    return st;
}

struct tally {
    int changed, reported, refused;
    uint64_t plain; /* the kind's model without companions, once it ran */
};

static bool check(const struct playground *pg, char kind, const struct row *r, struct tally *n)
{
    uint64_t before = 0, after = 0;
    bool reported = false, unused;
    struct err e = {0};
    if (r->with[0] == '\0' && n->plain != 0) {
        before = n->plain;
    } else if (try_config(pg, kind, r, false, &before, &unused, &e) !=
               ST_OK) { /* what it goes with is already refused for this kind */
        assert_true(r->with[0] != '\0' && e.code == ST_USAGE);
        return true;
    }
    if (r->with[0] == '\0')
        n->plain = before;
    int st = try_config(pg, kind, r, true, &after, &reported, &e);
    if (st != ST_OK) {
        if (st != ST_USAGE)
            err_print(&e, stderr);
        n->refused++;
        return st == ST_USAGE;
    }
    bool changed = before != after;
    n->changed += changed;
    n->reported += reported;
    if (changed == reported)
        fprintf(stderr, "layer %c: %s=%s with '%s' %s\n", kind, r->name, r->value, r->with,
                changed ? "is reported as having no effect, and has one" : "has no effect, and nobody says so");
    return changed != reported;
}

static void every_option_counts_or_is_reported(void **state)
{
    (void)state;
    struct playground pg;
    struct tally n = {0};
    int wrong = 0;
    playground_open(&pg);
    struct symbols all = kinds();
    for (const char *kind = all.list; *kind != '\0'; kind++) {
        n.plain = 0;
        for (int i = 0; i < countof(rows); i++)
            wrong += !check(&pg, *kind, &rows[i], &n);
    }
    playground_close(&pg);
    assert_int_equal(wrong, 0);
    assert_true(n.changed > 200 && n.reported > 200 && n.refused > 30); /* each outcome is really seen */
}

static void every_option_is_in_one_of_the_lists(void **state)
{
    (void)state;
    int missing = 0;
    for (int i = 0; i < config_option_count(); i++) {
        int found = 0;
        for (int k = 0; k < countof(rows); k++)
            found += strcmp(rows[k].name, config_option_name(i)) == 0;
        for (int k = 0; k < countof(elsewhere); k++)
            found += strcmp(elsewhere[k], config_option_name(i)) == 0;
        if (found == 0)
            fprintf(stderr, "%s: add a row here, and where not every model reads it one in config/uses.c\n",
                    config_option_name(i));
        missing += found == 0;
    }
    assert_int_equal(missing, 0);
}

/* ---- who is told ----------------------------------------------------------------------------- */

/* A config that a run wrote holds every option with its number; reading it back must not look like a wish. */
static void written_configs_are_no_wishes(void **state)
{
    (void)state;
    struct symbols all = kinds();
    for (const char *kind = all.list; *kind != '\0'; kind++) {
        struct config c, again;
        struct buf text, lines;
        struct err e = {0};
        buf_init(&text, 0);
        buf_init(&lines, 0);
        assert_ok(config_init(&c, &e), &e);
        bool compressed = strchr("CHW", *kind) != NULL; /* these have no default rank of the latent */
        set_all(&c, compressed ? "model.pattern=@@ model.mla_q_rank=8" : "model.pattern=@@", *kind);
        assert_ok(config_complete(&c, &e), &e);
        config_write(&c, &text, false);
        assert_ok(config_init(&again, &e), &e);
        assert_ok(config_read_ini_text(&again, text.text, text.len, "config.ini", &e), &e);
        assert_ok(config_complete(&again, &e), &e);
        int n = config_unused(&again, &lines);
        if (n != 0)
            fail_msg("layer %c: %s", *kind, lines.text);
        buf_release(&text);
        buf_release(&lines);
        config_release(&c);
        config_release(&again);
    }
}

static void refusals_name_the_layer_and_the_option(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"model.attn_window=4", "latent attention (+) cannot do what model.attn_window = 4 says"},
        {"model.softmax_scale=0.5", "latent attention (+) cannot do what model.softmax_scale = 0.5 says"},
        {"model.no_rope_freq=2", "model.no_rope_freq = 2"},
        {"model.rope=none", "latent attention (+) has rotary channels"},
        {"parallel.ep=2", "no layer of model.pattern has experts"},
        {"parallel.etp=2", "no layer of model.pattern has experts"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        assert_ok(config_init(&c, &e), &e);
        assert_ok(tiny_set(&c, "model.pattern=+-", &e), &e);
        assert_ok(tiny_set(&c, cases[i][0], &e), &e);
        assert_fails(config_complete(&c, &e), ST_USAGE, &e, cases[i][1]);
        config_release(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_counts_or_is_reported),
        cmocka_unit_test(every_option_is_in_one_of_the_lists),
        cmocka_unit_test(written_configs_are_no_wishes),
        cmocka_unit_test(refusals_name_the_layer_and_the_option),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
