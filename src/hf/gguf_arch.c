/* Architectures of llama.cpp: names of tensors and keys, by the same kind of rules as families of transformers. */
#include "hf/gguf_arch_int.h"

#include <math.h>
#include <string.h>

/* ---- tensors --------------------------------------------------------------------------------- */

#define ONE(our_key, their_name)                                                                                       \
    {                                                                                                                  \
        .key = (our_key), .part = { {.name = (their_name)} }                                                           \
    }
#define END                                                                                                            \
    {                                                                                                                  \
        .key = NULL                                                                                                    \
    }

static const struct hf_rule common[] = {
    ONE("embedding.word_embeddings.weight", "@token_embd.weight"),
    ONE("decoder.final_layernorm.weight", "@output_norm.weight"),
    ONE("output_layer.weight", "@output.weight"),
    ONE("self_attention.linear_qkv.layer_norm_weight", "attn_norm.weight"),
    ONE("mlp.linear_fc1.layer_norm_weight", "ffn_norm.weight"),
    ONE("pre_mlp_layernorm.weight", "ffn_norm.weight"),
    ONE("self_attention.linear_proj.weight", "attn_output.weight"),
    ONE("self_attention.linear_proj.bias", "attn_output.bias"),
    ONE("self_attention.q_layernorm.weight", "attn_q_norm.weight"),
    ONE("self_attention.k_layernorm.weight", "attn_k_norm.weight"),
    {.key = "mlp.linear_fc1.weight",
     .part = {{.name = "ffn_gate.weight", .rows = "f"}, {.name = "ffn_up.weight", .rows = "f"}}},
    ONE("mlp.linear_fc2.weight", "ffn_down.weight"),
    ONE("mlp.router.weight", "ffn_gate_inp.weight"),
    {.key = "mlp.experts.linear_fc1.weight",
     .flags = HF_FUSED,
     .part = {{.name = "ffn_gate_exps.weight", .rows = "e"}, {.name = "ffn_up_exps.weight", .rows = "e"}}},
    {.key = "mlp.experts.linear_fc2.weight", .flags = HF_FUSED, .part = {{.name = "ffn_down_exps.weight"}}},
    END};

#define QKV(what, pair)                                                                                                \
    {                                                                                                                  \
        .key = "self_attention.linear_qkv." what, .groups = "G", .part = {                                             \
            {.name = "attn_q." what, .rows = "HD", .pairs = pair},                                                     \
            {.name = "attn_k." what, .rows = "GD", .pairs = pair},                                                     \
            {.name = "attn_v." what, .rows = "GD"}                                                                     \
        }                                                                                                              \
    }
static const struct hf_rule halves[] = {QKV("weight", NULL), QKV("bias", NULL), END};
/* llama.cpp rotates neighbouring channels of its llama architecture. */
static const struct hf_rule pairs[] = {QKV("weight", "D"), QKV("bias", "D"), END};

static const struct hf_rule *const by_halves[] = {common, halves, NULL};
static const struct hf_rule *const by_pairs[] = {common, pairs, NULL};

#define ARCH(name, rules_of, ...)                                                                                      \
    {                                                                                                                  \
        .family = {.model_type = (name), .roots = {""}, .layers = "blk.", .rules = (rules_of)}, .from = {              \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }
static const struct gguf_arch archs[] = {
    ARCH("llama", by_pairs, "llama", "mistral", "mixtral"),
    ARCH("qwen2", by_halves, "qwen2"),
    ARCH("qwen3", by_halves, "qwen3"),
    ARCH("qwen3moe", by_halves, "qwen3_moe"),
};

/* ---- which one ------------------------------------------------------------------------------- */

/* What a family of transformers can say and llama.cpp's code for it ignores. */
static int check(const struct gguf_arch *a, const struct config *c, struct err *e)
{
    const struct config_model *m = &c->model;
    const char *arch = a->family.model_type;
    bool experts = strchr(m->pattern, 'E') != NULL;
    if (m->attn_window > 0)
        return err_set(e, ST_UNSUPPORTED,
                       "llama.cpp's %s attends to all earlier tokens; this model has attn_window = %lld", arch,
                       (long long)m->attn_window);
    if (str_starts(arch, "qwen3") && (m->attn_bias || m->qkv_bias || m->bias))
        return err_set(e, ST_UNSUPPORTED, "llama.cpp's %s has no biases; this model's attention has", arch);
    if (experts && m->router_pre_softmax)
        return err_set(e, ST_UNSUPPORTED,
                       "llama.cpp's %s divides routing weights by their sum; this model has router_pre_softmax = on",
                       arch);
    if (experts && strchr(m->pattern, '-') != NULL)
        return err_set(e, ST_UNSUPPORTED,
                       "llama.cpp's %s has experts in every layer; this model's pattern has MLP layers too", arch);
    if (m->rope_scaling == CFG_ROPE_SCALING_YARN && !m->rope_truncate)
        return err_set(e, ST_UNSUPPORTED,
                       "llama.cpp's %s rounds the channels of yarn scaling; this model has rope_truncate = off", arch);
    if (m->rope_percent != 1)
        return err_set(e, ST_UNSUPPORTED, "llama.cpp's %s rotates whole heads; this model has rope_percent = %g", arch,
                       m->rope_percent);
    if (m->rope_scaling == CFG_ROPE_SCALING_LLAMA3 && m->head_dim / 2 > GGUF_MAX_ROPE)
        return err_set(e, ST_UNSUPPORTED, "heads of %lld channels are too wide", (long long)m->head_dim);
    return ST_OK;
}

int gguf_arch_of(const struct config *c, const struct gguf_arch **out, struct err *e)
{
    const char *family;
    int st = hf_family_of(c, NULL, &family, e);
    if (st != ST_OK)
        return err_in(e, "looking for an architecture that llama.cpp runs");
    for (int i = 0; i < countof(archs); i++)
        for (int k = 0; k < countof(archs[i].from) && archs[i].from[k] != NULL; k++)
            if (strcmp(archs[i].from[k], family) == 0) {
                *out = &archs[i];
                return check(&archs[i], c, e);
            }
    err_set(e, ST_UNSUPPORTED, "braid writes no GGUF of a %s model", family);
    return err_hint(e, "llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe models are written; --format=hf writes "
                       "this one for transformers");
}

/* ---- keys ------------------------------------------------------------------------------------ */

struct number {
    const char *name; /* behind the architecture */
    const char *option;
    bool real, experts;
};
static const struct number numbers[] = {
    {"embedding_length", "model.hidden", false, false},
    {"attention.head_count", "model.heads", false, false},
    {"attention.head_count_kv", "model.kv_heads", false, false},
    {"attention.key_length", "model.head_dim", false, false},
    {"attention.value_length", "model.head_dim", false, false},
    {"attention.layer_norm_rms_epsilon", "model.norm_eps", true, false},
    {"rope.dimension_count", "model.head_dim", false, false},
    {"rope.freq_base", "model.rope_base", true, false},
    {"vocab_size", "model.vocab", false, false},
    {"expert_count", "model.experts", false, true},
    {"expert_used_count", "model.topk", false, true},
    {"expert_feed_forward_length", "model.expert_ffn", false, true},
};

static int put_number(const char *arch, const struct number *n, const struct config *c, struct header *h, struct err *e)
{
    char name[128];
    double v;
    TRY(hf_number(c, n->option, &v, e));
    snprintf(name, sizeof name, "%s.%s", arch, n->name);
    if (n->real)
        gguf_f32(h, name, v);
    else
        gguf_u32(h, name, (int64_t)v);
    return ST_OK;
}

static int put_scaling(const char *arch, const struct config *c, struct header *h)
{
    const struct config_model *m = &c->model;
    char name[128];
    if (m->rope_scaling != CFG_ROPE_SCALING_LINEAR && m->rope_scaling != CFG_ROPE_SCALING_YARN)
        return ST_OK;
    snprintf(name, sizeof name, "%s.rope.scaling.type", arch);
    gguf_string(h, name, m->rope_scaling == CFG_ROPE_SCALING_LINEAR ? "linear" : "yarn");
    snprintf(name, sizeof name, "%s.rope.scaling.factor", arch);
    gguf_f32(h, name, m->rope_factor);
    if (m->rope_scaling == CFG_ROPE_SCALING_YARN) {
        snprintf(name, sizeof name, "%s.rope.scaling.original_context_length", arch);
        gguf_u32(h, name, m->rope_original);
    }
    return ST_OK;
}

int gguf_arch_keys(const struct gguf_arch *a, const struct config *c, struct header *h, struct err *e)
{
    const char *arch = a->family.model_type;
    bool experts = strchr(c->model.pattern, 'E') != NULL;
    char name[128];
    snprintf(name, sizeof name, "%s.block_count", arch);
    gguf_u32(h, name, hf_pattern_layers(c));
    snprintf(name, sizeof name, "%s.context_length", arch);
    gguf_u32(h, name, max_i64(c->model.max_position, c->train.seq));
    snprintf(name, sizeof name, "%s.feed_forward_length", arch);
    gguf_u32(h, name, experts ? c->model.expert_ffn : c->model.ffn);
    for (int i = 0; i < countof(numbers); i++)
        if (experts || !numbers[i].experts)
            TRY(put_number(arch, &numbers[i], c, h, e));
    return put_scaling(arch, c, h);
}

int64_t gguf_rope_divisors(const struct config *c, float out[GGUF_MAX_ROPE])
{
    const struct config_model *m = &c->model;
    if (m->rope_scaling != CFG_ROPE_SCALING_LLAMA3)
        return 0;
    for (int64_t i = 0; i < m->head_dim / 2; i++) {
        double frequency = pow(m->rope_base, -2.0 * (double)i / (double)m->head_dim), wave = 2 * acos(-1) / frequency;
        double low = (double)m->rope_original / m->rope_low, high = (double)m->rope_original / m->rope_high;
        double s = ((double)m->rope_original / wave - m->rope_low) / (m->rope_high - m->rope_low);
        out[i] = (float)(wave > low ? m->rope_factor : wave < high ? 1 : 1 / ((1 - s) / m->rope_factor + s));
    }
    return m->head_dim / 2;
}
