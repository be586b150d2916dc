/* What reads an option: which kinds of layers, and which other options must be on. An option that the user set and that
 * nobody reads is reported (config_unused); one that a layer ought to read and cannot is refused (config_refused).
 *
 * One row for every option that not every model reads; an option without a row always counts. The rows of one kind of
 * layer stand together, so that they can move to the definition of that kind. tests/train/test_uses.c walks all options
 * over all kinds and compares what is said here with what the model does. */
#include "config/config_int.h"

#include <string.h>

struct option_use {
    const char *name;
    const char *layers;                   /* symbols of the kinds that read it; NULL: does not depend on layers */
    const char *refused;                  /* symbols of the kinds that cannot do what it says; may be NULL */
    bool (*read)(const struct config *c); /* false: something it needs is off; may be NULL */
    const char *needs;                    /* what that is */
};

/* ---- conditions
 * ------------------------------------------------------------------------------------------------------ */

static bool has_layer(const struct config *c, const char *symbols)
{
    return strpbrk(c->model.pattern, symbols) != NULL;
}

/* Layers of this kind in one part of the pattern: those of a prediction depth count from 1 again. */
static int64_t most_layers(const struct config *c, char symbol)
{
    int64_t most = 0, n = 0;
    for (const char *p = c->model.pattern; *p != '\0'; p++) {
        n = *p == '/' ? 0 : n + (*p == symbol);
        most = max_i64(most, n);
    }
    return most;
}

/* Physical layers in front of the first with experts; those of prediction depths are never hashed. */
static bool hash_reaches(const struct config *c)
{
    int64_t layer = 0;
    for (const char *p = c->model.pattern; *p != '\0' && *p != '/'; p++) {
        if (*p == 'E')
            return layer < c->model.router_hash_layers;
        layer += strchr("[]|", *p) == NULL;
    }
    return false;
}

/* A pattern that is given has its own number of layers and of depths; the same number beside it is no contradiction. */
static bool layers_read(const struct config *c)
{
    enum config_source s = config_source_of(c, "model.pattern").source;
    int64_t layers = 0, units = 0; /* units: a group counts once, as Megatron's layer does */
    bool inside = false;
    for (const char *p = c->model.pattern; *p != '\0' && *p != '/'; p++) {
        layers += strchr("[]|", *p) == NULL;
        units += *p == '[' || (strchr("[]|", *p) == NULL && !inside);
        inside = *p == '[' || (*p != ']' && inside);
    }
    return s == CFG_FROM_DEFAULT || s == CFG_FROM_AUTO || layers == c->model.layers || units == c->model.layers;
}

static bool depths_read(const struct config *c)
{
    int64_t depths = 0;
    for (const char *p = c->model.pattern; *p != '\0'; p++)
        depths += *p == '/';
    return depths == c->model.mtp_layers;
}

/* A layer with experts chooses them by its router. */
static bool router_chooses(const struct config *c)
{
    int64_t layer = 0;
    bool depth = false;
    for (const char *p = c->model.pattern; *p != '\0'; p++) {
        depth |= *p == '/';
        if (*p == 'E' && (depth || layer >= c->model.router_hash_layers))
            return true;
        layer += strchr("[]|/", *p) == NULL;
    }
    return false;
}

static bool skip_reaches(const struct config *c) { return most_layers(c, '*') >= c->model.attn_window_skip; }
static bool no_rope_reaches(const struct config *c)
{
    return c->model.rope != CFG_ROPE_NONE && most_layers(c, '*') >= c->model.no_rope_freq;
}
/* Latent attention always rotates. */
static bool rotates(const struct config *c)
{
    return has_layer(c, "+") || (c->model.rope != CFG_ROPE_NONE && c->model.no_rope_freq != 1);
}
static bool rope_llama3(const struct config *c)
{
    return rotates(c) && c->model.rope_scaling == CFG_ROPE_SCALING_LLAMA3;
}
static bool rope_yarn(const struct config *c) { return rotates(c) && c->model.rope_scaling == CFG_ROPE_SCALING_YARN; }
static bool rope_stretched(const struct config *c) { return rope_llama3(c) || rope_yarn(c); }
static bool no_other_bias(const struct config *c) { return !c->model.bias; }
static bool ffn_read(const struct config *c)
{
    return has_layer(c, "-") || config_source_of(c, "model.expert_ffn").source == CFG_FROM_AUTO;
}
static bool has_depths(const struct config *c)
{
    const char *depth = strchr(c->model.pattern, '/');
    return depth != NULL && strspn(depth, "/") < strlen(depth);
}
static bool several_groups(const struct config *c) { return c->model.mamba_groups > 1; }
static bool norm_matters(const struct config *c)
{
    return c->model.router_score != CFG_ROUTER_SOFTMAX && c->model.topk > 1;
}
static bool groups_chosen(const struct config *c) { return c->model.router_group_topk > 0; }
static bool bias_moves(const struct config *c) { return c->model.router_bias && router_chooses(c); }
static bool drops(const struct config *c) { return c->model.router_capacity > 0; }
static bool pre_softmax_matters(const struct config *c) { return router_chooses(c); }
static bool decays(const struct config *c) { return c->train.schedule != CFG_SCHEDULE_CONSTANT; }
static bool skips(const struct config *c) { return c->train.nonfinite == CFG_NONFINITE_SKIP; }
static bool has_dir(const struct config *c) { return c->run.dir[0] != '\0'; }
static bool has_vocabulary(const struct config *c) { return strcmp(c->data.tokenizer, "bytes") != 0; }
static bool ends_documents(const struct config *c) { return has_vocabulary(c) && c->data.eod; }
static bool traces(const struct config *c) { return c->plan.trace[0] != '\0'; }
static bool on_gpu(const struct config *c) { return c->run.device == CFG_DEVICE_CUDA; }
static bool loops(const struct config *c) { return c->parallel.comm == CFG_COMM_LOOP; }
static bool experts_shared(const struct config *c) { return c->parallel.ep > 1 || loops(c); }
static bool virtual_stages(const struct config *c) { return c->parallel.pp > 1; }
static bool recomputes(const struct config *c)
{
    return c->plan.recompute[0] != '\0' || c->plan.recompute_granularity != CFG_GRANULARITY_NONE ||
           strcmp(c->plan.recompute_block, "off") != 0;
}

/* ---- the table
 * ------------------------------------------------------------------------------------------------------- */

/* clang-format off */
static const struct option_use uses[] = {
    /* attention * and latent attention + */
    {"model.heads", "*+", NULL, NULL, NULL},
    {"model.kv_heads", "*", NULL, NULL, NULL},
    {"model.head_dim", "*", NULL, NULL, NULL},
    {"model.qk_norm", "*", NULL, NULL, NULL}, /* the latents of + are always normed */
    {"model.attn_gate", "*", "+", NULL, NULL},
    {"model.attn_window", "*", "+", NULL, NULL},
    {"model.attn_window_skip", "*", "+", skip_reaches, "as many attention layers as it counts to"},
    {"model.attn_sink", "*", "+", NULL, NULL},
    {"model.softmax_scale", "*", "+", NULL, NULL}, /* + has mla_softmax_scale */
    {"model.qkv_bias", "*", "+", no_other_bias, "model.bias = off, which gives these biases too"},
    {"model.bias", "*-+", NULL, NULL, NULL},
    {"model.rope", "*", NULL, NULL, NULL},
    {"model.rope_base", "*+", NULL, rotates, "rotary embedding (model.rope, model.no_rope_freq)"},
    {"model.rope_percent", "*", "+", rotates, "rotary embedding (model.rope, model.no_rope_freq)"},
    {"model.rope_scaling", "*+", NULL, rotates, "rotary embedding (model.rope, model.no_rope_freq)"},
    {"model.rope_factor", "*+", NULL, rotates, "rotary embedding (model.rope, model.no_rope_freq)"},
    {"model.rope_original", "*+", NULL, rope_stretched, "model.rope_scaling = llama3 or yarn"},
    {"model.rope_low", "*+", NULL, rope_llama3, "model.rope_scaling = llama3"},
    {"model.rope_high", "*+", NULL, rope_llama3, "model.rope_scaling = llama3"},
    {"model.rope_beta_fast", "*+", NULL, rope_yarn, "model.rope_scaling = yarn"},
    {"model.rope_beta_slow", "*+", NULL, rope_yarn, "model.rope_scaling = yarn"},
    {"model.rope_mscale", "*+", NULL, rope_yarn, "model.rope_scaling = yarn"},
    {"model.rope_mscale_all_dim", "*+", NULL, rope_yarn, "model.rope_scaling = yarn"},
    {"model.no_rope_freq", "*", "+", no_rope_reaches, "rotary embedding, and as many attention layers as it counts to"},
    {"model.mla_q_rank", "+", NULL, NULL, NULL},
    {"model.mla_kv_rank", "+", NULL, NULL, NULL},
    {"model.mla_nope", "+", NULL, NULL, NULL},
    {"model.mla_rope", "+", NULL, NULL, NULL},
    {"model.mla_v", "+", NULL, NULL, NULL},
    {"model.mla_norm_eps", "+", NULL, NULL, NULL},
    {"model.mla_softmax_scale", "+", NULL, NULL, NULL},
    /* MLP - and experts E */
    {"model.ffn", "-E", NULL, ffn_read, "an MLP layer, or model.expert_ffn = 0"},
    {"model.act", "-E", NULL, NULL, NULL},
    {"model.act_clamp", "-E", NULL, NULL, NULL},
    {"model.act_alpha", "-E", NULL, NULL, NULL},
    {"model.act_offset", "-E", NULL, NULL, NULL},
    {"model.experts", "E", NULL, NULL, NULL},
    {"model.topk", "E", NULL, NULL, NULL},
    {"model.expert_ffn", "E", NULL, NULL, NULL},
    {"model.shared_ffn", "E", NULL, NULL, NULL},
    {"model.shared_gate", "E", NULL, NULL, NULL},
    {"model.expert_bias", "E", NULL, NULL, NULL},
    {"model.glu_interleave", "E", NULL, NULL, NULL},
    {"model.router_score", "E", NULL, NULL, NULL},
    {"model.router_pre_softmax", "E", NULL, pre_softmax_matters, "a layer beyond model.router_hash_layers"},
    {"model.router_norm", "E", NULL, norm_matters, "sigmoid or sqrtsoftplus as model.router_score, model.topk above 1"},
    {"model.router_groups", "E", NULL, groups_chosen, "model.router_group_topk"},
    {"model.router_group_topk", "E", NULL, router_chooses, "a layer beyond model.router_hash_layers"},
    {"model.router_scale", "E", NULL, NULL, NULL},
    {"model.router_bias", "E", NULL, router_chooses, "a layer beyond model.router_hash_layers"},
    {"model.router_bias_rate", "E", NULL, bias_moves, "model.router_bias"},
    {"model.router_hash_layers", "E", NULL, hash_reaches, "a layer with experts among the first so many layers"},
    {"model.aux_loss", "E", NULL, NULL, NULL},
    {"model.seq_aux_loss", "E", NULL, NULL, NULL},
    {"model.global_aux_loss", "E", NULL, NULL, NULL},
    {"model.router_z_loss", "E", NULL, NULL, NULL},
    {"model.router_jitter", "E", NULL, NULL, NULL},
    {"model.router_capacity", "E", NULL, NULL, NULL},
    {"model.router_drop", "E", NULL, drops, "model.router_capacity"},
    {"model.router_force_balance", "E", NULL, NULL, NULL},
    {"train.record_routes", "E", NULL, router_chooses, "a layer beyond model.router_hash_layers"},
    {"train.replay_routes", "E", NULL, router_chooses, "a layer beyond model.router_hash_layers"},
    {"plan.fused_experts", "E", NULL, NULL, NULL},
    {"parallel.overlap", "E", NULL, experts_shared, "parallel.ep above 1"},
    {"parallel.ep_capacity", "E", NULL, experts_shared, "parallel.ep above 1"},
    /* Mamba-2 M */
    {"model.mamba_heads", "M", NULL, NULL, NULL},
    {"model.mamba_head_dim", "M", NULL, NULL, NULL},
    {"model.mamba_state", "M", NULL, NULL, NULL},
    {"model.mamba_groups", "M", NULL, NULL, NULL},
    {"model.mamba_conv", "M", NULL, NULL, NULL},
    {"model.mamba_chunk", "M", NULL, NULL, NULL},
    {"model.mamba_dt_min", "M", NULL, NULL, NULL},
    {"model.mamba_dt_max", "M", NULL, NULL, NULL},
    {"model.mamba_norm", "M", NULL, several_groups, "model.mamba_groups above 1"},
    /* gated delta net G */
    {"model.gdn_value_heads", "G", NULL, NULL, NULL},
    {"model.gdn_key_heads", "G", NULL, NULL, NULL},
    {"model.gdn_key_dim", "G", NULL, NULL, NULL},
    {"model.gdn_value_dim", "G", NULL, NULL, NULL},
    {"model.gdn_conv", "G", NULL, NULL, NULL},
    {"model.gdn_chunk", "G", NULL, NULL, NULL},
    /* not about layers */
    {"model.layers", NULL, NULL, layers_read, "a pattern made from it: model.pattern has its own number of layers"},
    {"model.mtp_layers", NULL, NULL, depths_read, "model.mtp_pattern: model.pattern has its own number of depths"},
    {"model.mtp_scale", NULL, NULL, has_depths, "multi-token prediction (/ in model.pattern)"},
    {"train.min_lr", NULL, NULL, decays, "a train.schedule that decays"},
    {"train.decay_steps", NULL, NULL, decays, "a train.schedule that decays"},
    {"train.nonfinite_limit", NULL, NULL, skips, "train.nonfinite = skip"},
    {"data.token_pattern", NULL, NULL, has_vocabulary, "data.tokenizer to name a file"},
    {"data.token_special", NULL, NULL, has_vocabulary, "data.tokenizer to name a file"},
    {"data.eod_token", NULL, NULL, ends_documents, "data.tokenizer to name a file, and data.eod = on"},
    {"run.keep", NULL, NULL, has_dir, "run.dir"},
    {"plan.graphs", NULL, NULL, on_gpu, "run.device = cuda"},
    {"plan.trace_steps", NULL, NULL, traces, "plan.trace"},
    {"mhc.kernels", NULL, NULL, on_gpu, "run.device = cuda"},
    {"mhc.rebuild", NULL, NULL, recomputes, "plan.recompute or plan.recompute_block"},
    {"gpu.precision", NULL, NULL, on_gpu, "run.device = cuda"},
    {"gpu.portable", NULL, NULL, on_gpu, "run.device = cuda"},
    {"gpu.fast", NULL, NULL, on_gpu, "run.device = cuda"},
    {"gpu.gemm_table", NULL, NULL, on_gpu, "run.device = cuda"},
    {"gpu.index", NULL, NULL, on_gpu, "run.device = cuda"},
    {"gpu.sms", NULL, NULL, on_gpu, "run.device = cuda"},
    {"parallel.first_layers", NULL, NULL, virtual_stages, "parallel.pp above 1"},
    {"parallel.last_layers", NULL, NULL, virtual_stages, "parallel.pp above 1"},
    {"parallel.pp_group", NULL, NULL, virtual_stages, "parallel.pp above 1"},
    {"parallel.loop_gbps", NULL, NULL, loops, "parallel.comm = loop"},
    {"parallel.loop_us", NULL, NULL, loops, "parallel.comm = loop"},
    {"parallel.loop_ranks", NULL, NULL, loops, "parallel.comm = loop"},
};
/* clang-format on */

/* ---- asking it
 * ------------------------------------------------------------------------------------------------------- */

static const char *kind_name(char symbol)
{
    static const struct {
        char symbol;
        const char *name;
    } kinds[] = {{'*', "attention (*)"}, {'+', "latent attention (+)"}, {'-', "MLP (-)"},
                 {'E', "experts (E)"},   {'M', "Mamba-2 (M)"},          {'G', "gated delta net (G)"}};
    for (int i = 0; i < countof(kinds); i++)
        if (kinds[i].symbol == symbol)
            return kinds[i].name;
    return "?";
}

/* A number written out that is the automatic one: configs of runs hold those. */
static bool is_automatic_value(const struct config *c, const struct option *o)
{
    struct config other;
    struct err e = {0};
    if (o->automatic == NULL || config_init(&other, &e) != ST_OK)
        return false;
    struct buf text;
    buf_init(&text, 0);
    int st = ST_OK;
    for (int i = 0; i < config_n_options && st == ST_OK; i++) {
        buf_clear(&text);
        option_text(c, &config_options[i], &text);
        st = option_set(&other, &config_options[i], text.text ? text.text : "", c->origin[i], &e);
    }
    if (st == ST_OK)
        st = option_set(&other, o, "0", (struct config_origin){.source = CFG_FROM_DEFAULT}, &e);
    if (st == ST_OK)
        derive_values(&other);
    bool same = st == ST_OK && option_equal(c, &other, o);
    buf_release(&text);
    config_release(&other);
    return same;
}

/* Somebody gave it a value of its own; fresh holds the defaults. */
static bool is_set(const struct config *c, const struct config *fresh, const struct option *o)
{
    enum config_source s = c->origin[option_index(o)].source;
    return s != CFG_FROM_DEFAULT && s != CFG_FROM_AUTO && !option_equal(c, fresh, o) && !is_automatic_value(c, o);
}

/* The user did, not a checkpoint, whose author was told. */
static bool set_by_user(const struct config *c, const struct config *fresh, const struct option *o)
{
    return c->origin[option_index(o)].source != CFG_FROM_CHECKPOINT && is_set(c, fresh, o);
}

static void describe(const struct config *c, const struct option_use *u, struct buf *out)
{
    const struct option *o = option_find(u->name);
    char from[320];
    buf_addf(out, "%s = ", o->name);
    option_text(c, o, out);
    buf_addf(out, " (%s) has no effect: ", config_source_text(c, o->name, from, sizeof from));
    if (u->layers == NULL || has_layer(c, u->layers)) {
        buf_addf(out, "it needs %s\n", u->needs);
        return;
    }
    buf_addf(out, "model.pattern %.200s has no ", c->model.pattern);
    for (const char *s = u->layers; *s != '\0'; s++)
        buf_addf(out, "%s%s", s == u->layers ? "" : s[1] != '\0' ? ", " : " or ", kind_name(*s));
    buf_add(out, " layer\n");
}

static bool use_reads(const struct config *c, const struct option_use *u)
{
    return (u->layers == NULL || has_layer(c, u->layers)) && (u->read == NULL || u->read(c));
}

bool config_reads(const struct config *c, const char *name)
{
    for (int i = 0; i < countof(uses); i++)
        if (strcmp(uses[i].name, name) == 0)
            return use_reads(c, &uses[i]);
    return true;
}

int config_unused(const struct config *c, struct buf *out)
{
    int n = 0;
    struct config fresh;
    struct err e = {0};
    if (config_init(&fresh, &e) != ST_OK)
        return 0;
    for (int i = 0; i < countof(uses); i++) {
        const struct option_use *u = &uses[i];
        if (use_reads(c, u) || !set_by_user(c, &fresh, option_find(u->name)))
            continue;
        describe(c, u, out);
        n++;
    }
    config_release(&fresh);
    return n;
}

static int refuse(const struct config *c, const struct option *o, char symbol, struct err *e)
{
    struct buf text;
    char from[320];
    buf_init(&text, 0);
    option_text(c, o, &text);
    err_set(e, ST_USAGE, "%s cannot do what %s = %.100s says (%s; model.pattern = %.200s)", kind_name(symbol), o->name,
            text.text ? text.text : "", config_source_text(c, o->name, from, sizeof from), c->model.pattern);
    buf_release(&text);
    return err_hint(e, "leave %s out, or use other layers", o->name);
}

int config_refused(const struct config *c, struct err *e)
{
    struct config fresh = {0};
    int st = ST_OK;
    for (int i = 0; i < countof(uses) && st == ST_OK; i++) {
        const struct option_use *u = &uses[i];
        const char *at = u->refused != NULL ? strpbrk(c->model.pattern, u->refused) : NULL;
        if (at == NULL)
            continue;
        if (fresh.origin == NULL)
            st = config_init(&fresh, e);
        if (st == ST_OK && is_set(c, &fresh, option_find(u->name)))
            st = refuse(c, option_find(u->name), *at, e);
    }
    config_release(&fresh);
    return st;
}
