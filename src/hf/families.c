/* The families of Hugging Face models that braid reads and writes: for each, which parameter of ours is made of which
 * tensors, and which option is which field of config.json. To add one: its rows here, its line in hf_families, and what
 * rows cannot say (the pattern of layers) in family_config.c.
 *
 * Letters of sizes: d hidden, H heads, G key-value heads, D head size, f MLP width, e expert width, s shared expert's width,
 * n r v latent attention's nope, rope and value channels, Q k its query and key-value rank, K L gated delta net's key and
 * value heads, a b their channels, p value heads of a key head. */
#include "hf/family_config_int.h"

static int64_t letter(const struct config_model *m, char c)
{
    switch (c) {
    case 'd': return m->hidden;
    case 'H': return m->heads;
    case 'G': return m->kv_heads;
    case 'D': return m->head_dim;
    case 'f': return m->ffn;
    case 'e': return m->expert_ffn;
    case 's': return m->shared_ffn;
    case 'n': return m->mla_nope;
    case 'r': return m->mla_rope;
    case 'v': return m->mla_v;
    case 'Q': return m->mla_q_rank;
    case 'k': return m->mla_kv_rank;
    case 'K': return m->gdn_key_heads;
    case 'L': return m->gdn_value_heads;
    case 'a': return m->gdn_key_dim;
    case 'b': return m->gdn_value_dim;
    case 'p': return m->gdn_key_heads > 0 ? m->gdn_value_heads / m->gdn_key_heads : 0;
    default: return c - '0'; /* a digit */
    }
}

int64_t hf_size(const struct config_model *m, const char *text)
{
    int64_t sum = 0, product = 1;
    for (const char *c = text; *c; c++) {
        if (*c == '+') {
            sum += product;
            product = 1;
        } else {
            product *= letter(m, *c);
        }
    }
    return sum + product;
}

/* ---- tensors -------------------------------------------------------------------------------------------------- */

#define ONE(our_key, their_name) {.key = (our_key), .part = {{.name = (their_name)}}}
#define END {.key = NULL}

static const struct hf_rule ends[] = {
    ONE("embedding.word_embeddings.weight", "@embed_tokens.weight"),
    ONE("decoder.final_layernorm.weight", "@norm.weight"),
    ONE("decoder.final_norm.weight", "@norm.weight"),
    ONE("output_layer.weight", "lm_head.weight"),
    END};

static const struct hf_rule norms[] = {
    ONE("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ONE("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    ONE("input_layernorm.weight", "input_layernorm.weight"),
    ONE("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ONE("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    END};

#define QKV(what)                                                                                             \
    {                                                                                                         \
        .key = "self_attention.linear_qkv." what, .groups = "G",                                              \
        .part = {{.name = "self_attn.q_proj." what, .rows = "HD"},                                            \
                 {.name = "self_attn.k_proj." what, .rows = "GD"},                                            \
                 {.name = "self_attn.v_proj." what, .rows = "GD"}}                                            \
    }
static const struct hf_rule attention[] = {
    QKV("weight"),
    QKV("bias"),
    ONE("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ONE("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    ONE("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ONE("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ONE("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    END};

/* q_proj of a gated attention holds D rows of the query, then D rows of the gate, for each head. */
static const struct hf_rule gated_attention[] = {
    {.key = "self_attention.linear_qkv.weight", .groups = "G",
     .part = {{.name = "self_attn.q_proj.weight", .rows = "HD", .chunk = "D", .stride = "2D"},
              {.name = "self_attn.q_proj.weight", .rows = "HD", .chunk = "D", .stride = "2D", .offset = "D"},
              {.name = "self_attn.k_proj.weight", .rows = "GD"},
              {.name = "self_attn.v_proj.weight", .rows = "GD"}}},
    ONE("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ONE("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ONE("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    END};

static const struct hf_rule latent_attention[] = {
    ONE("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    ONE("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    ONE("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    ONE("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    ONE("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ONE("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    ONE("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    ONE("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    END};

#define GLU(our, theirs, width, what)                                                                         \
    {                                                                                                         \
        .key = our ".linear_fc1." what,                                                                       \
        .part = {{.name = theirs ".gate_proj." what, .rows = width}, {.name = theirs ".up_proj." what, .rows = width}} \
    }
static const struct hf_rule glu[] = {
    GLU("mlp", "mlp", "f", "weight"),
    GLU("mlp", "mlp", "f", "bias"),
    ONE("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ONE("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
    END};

/* One tensor for each expert and matrix; newer folders have all experts in one. */
static const struct hf_rule experts[] = {
    ONE("mlp.router.weight", "mlp.gate.weight"),
    {.key = "mlp.router.expert_bias", .flags = HF_KEEP_F32, .part = {{.name = "mlp.gate.e_score_correction_bias"}}},
    {.key = "mlp.experts.linear_fc1.weight",
     .part = {{.name = "mlp.experts.{e}.gate_proj.weight", .rows = "e"}, {.name = "mlp.experts.{e}.up_proj.weight", .rows = "e"}}},
    ONE("mlp.experts.linear_fc2.weight", "mlp.experts.{e}.down_proj.weight"),
    {.key = "mlp.experts.linear_fc1.weight", .flags = HF_FUSED, .part = {{.name = "mlp.experts.gate_up_proj"}}},
    {.key = "mlp.experts.linear_fc2.weight", .flags = HF_FUSED, .part = {{.name = "mlp.experts.down_proj"}}},
    GLU("mlp.shared_experts", "mlp.shared_experts", "s", "weight"),
    ONE("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
    END};

static const struct hf_rule qwen_shared[] = {
    GLU("mlp.shared_experts", "mlp.shared_expert", "s", "weight"),
    ONE("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"),
    ONE("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    END};

static const struct hf_rule mixtral_experts[] = {
    ONE("mlp.router.weight", "block_sparse_moe.gate.weight"),
    {.key = "mlp.experts.linear_fc1.weight",
     .part = {{.name = "block_sparse_moe.experts.{e}.w1.weight", .rows = "e"}, {.name = "block_sparse_moe.experts.{e}.w3.weight", .rows = "e"}}},
    ONE("mlp.experts.linear_fc2.weight", "block_sparse_moe.experts.{e}.w2.weight"),
    END};

/* Sections q, k, v, z, beta, alpha of ours are mixed by key head in Qwen3-Next. */
#define QKVZ "linear_attn.in_proj_qkvz.weight"
#define BA "linear_attn.in_proj_ba.weight"
static const struct hf_rule delta_net[] = {
    {.key = "self_attention.in_proj.weight",
     .part = {{.name = QKVZ, .rows = "Ka", .chunk = "a", .stride = "2a+2pb"},
              {.name = QKVZ, .rows = "Ka", .chunk = "a", .stride = "2a+2pb", .offset = "a"},
              {.name = QKVZ, .rows = "Lb", .chunk = "pb", .stride = "2a+2pb", .offset = "2a"},
              {.name = QKVZ, .rows = "Lb", .chunk = "pb", .stride = "2a+2pb", .offset = "2a+pb"},
              {.name = BA, .rows = "L", .chunk = "p", .stride = "2p"},
              {.name = BA, .rows = "L", .chunk = "p", .stride = "2p", .offset = "p"}}},
    ONE("self_attention.conv1d.weight", "linear_attn.conv1d.weight"),
    {.key = "self_attention.A_log", .flags = HF_KEEP_F32, .part = {{.name = "linear_attn.A_log"}}},
    {.key = "self_attention.dt_bias", .flags = HF_KEEP_F32, .part = {{.name = "linear_attn.dt_bias"}}},
    {.key = "self_attention.out_norm.weight", .flags = HF_MINUS_ONE, .part = {{.name = "linear_attn.norm.weight"}}},
    ONE("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
    END};

#define MAMBA(theirs)                                                                                         \
    ONE("mixer.in_proj.weight", theirs ".in_proj.weight"), ONE("mixer.conv1d.weight", theirs ".conv1d.weight"), \
        ONE("mixer.conv1d.bias", theirs ".conv1d.bias"),                                                      \
        {.key = "mixer.A_log", .flags = HF_KEEP_F32, .part = {{.name = theirs ".A_log"}}},                    \
        {.key = "mixer.D", .flags = HF_KEEP_F32, .part = {{.name = theirs ".D"}}},                            \
        {.key = "mixer.dt_bias", .flags = HF_KEEP_F32, .part = {{.name = theirs ".dt_bias"}}},                \
        ONE("mixer.norm.weight", theirs ".norm.weight"), ONE("mixer.out_proj.weight", theirs ".out_proj.weight")

static const struct hf_rule mamba2_rules[] = {
    ONE("embedding.word_embeddings.weight", "@embeddings.weight"),
    ONE("embedding.word_embeddings.weight", "@embedding.weight"),
    ONE("decoder.final_norm.weight", "@norm_f.weight"),
    ONE("output_layer.weight", "lm_head.weight"),
    ONE("mixer.in_proj.layer_norm_weight", "norm.weight"),
    MAMBA("mixer"),
    END};

static const struct hf_rule nemotron_rules[] = {
    ONE("self_attention.linear_qkv.layer_norm_weight", "norm.weight"),
    ONE("mlp.linear_fc1.layer_norm_weight", "norm.weight"),
    ONE("pre_mlp_layernorm.weight", "norm.weight"),
    {.key = "self_attention.linear_qkv.weight", .groups = "G",
     .part = {{.name = "mixer.q_proj.weight", .rows = "HD"},
              {.name = "mixer.k_proj.weight", .rows = "GD"},
              {.name = "mixer.v_proj.weight", .rows = "GD"}}},
    ONE("self_attention.linear_proj.weight", "mixer.o_proj.weight"),
    ONE("mlp.linear_fc1.weight", "mixer.up_proj.weight"),
    ONE("mlp.linear_fc2.weight", "mixer.down_proj.weight"),
    ONE("mlp.router.weight", "mixer.gate.weight"),
    {.key = "mlp.router.expert_bias", .flags = HF_KEEP_F32, .part = {{.name = "mixer.gate.e_score_correction_bias"}}},
    ONE("mlp.experts.linear_fc1.weight", "mixer.experts.{e}.up_proj.weight"),
    ONE("mlp.experts.linear_fc2.weight", "mixer.experts.{e}.down_proj.weight"),
    ONE("mlp.shared_experts.linear_fc1.weight", "mixer.shared_experts.up_proj.weight"),
    ONE("mlp.shared_experts.linear_fc2.weight", "mixer.shared_experts.down_proj.weight"),
    END};

static const struct hf_rule bamba_rules[] = {
    ONE("embedding.word_embeddings.weight", "@embed_tokens.weight"),
    ONE("decoder.final_layernorm.weight", "@final_layernorm.weight"),
    ONE("output_layer.weight", "lm_head.weight"),
    ONE("mixer.in_proj.layer_norm_weight", "input_layernorm.weight"),
    ONE("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ONE("mlp.linear_fc1.layer_norm_weight", "pre_ff_layernorm.weight"),
    GLU("mlp", "feed_forward", "f", "weight"),
    ONE("mlp.linear_fc2.weight", "feed_forward.down_proj.weight"),
    MAMBA("mamba"),
    END};

/* A depth of DeepSeek's prediction is one more layer of the model. */
static const struct hf_rule deepseek_prediction[] = {
    ONE("mtp.enorm.weight", "enorm.weight"),
    ONE("mtp.hnorm.weight", "hnorm.weight"),
    ONE("mtp.eh_proj.weight", "eh_proj.weight"),
    ONE("mtp.final_layernorm.weight", "shared_head.norm.weight"),
    END};

/* ---- fields --------------------------------------------------------------------------------------------------- */

#define LAST {.json = NULL}

static const struct hf_field harmless[] = {
    {"architectures|model_type|transformers_version|_name_or_path|auto_map|dtype|torch_dtype|use_cache|bos_token_id|eos_token_id|"
     "pad_token_id|pretraining_tp|output_router_logits|router_aux_loss_coef|max_position_embeddings|attn_implementation|"
     "quantization_config|num_logits_to_keep|return_dict|output_hidden_states|output_attentions|is_decoder|"
     "num_hidden_layers|rope_parameters|rope_scaling|rope_theta|partial_rotary_factor|ep_size|aux_loss_alpha|seq_aux|_attn_implementation_autoset",
     HF_IGNORED, NULL, NULL},
    LAST};

static const struct hf_field basics[] = {
    {"hidden_size", HF_INT, "model.hidden", NULL},
    {"vocab_size", HF_INT, "model.vocab", NULL},
    {"tie_word_embeddings", HF_BOOL, "model.tied", "off"},
    {"initializer_range", HF_REAL, "model.init_std", "0.02"},
    LAST};

static const struct hf_field transformer[] = {
    {"num_attention_heads", HF_INT, "model.heads", NULL},
    {"num_key_value_heads", HF_INT, "model.kv_heads", "0"},
    {"attention_dropout", HF_ABSENT, NULL, NULL},
    {"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-6"},
    {"hidden_act", HF_FIXED, NULL, "\"silu\""},
    LAST};

static const struct hf_field own_head_dim[] = {{"head_dim", HF_INT, "model.head_dim", "0"}, LAST};
static const struct hf_field no_bias[] = {{"attention_bias", HF_ABSENT, NULL, NULL}, {"mlp_bias", HF_ABSENT, NULL, NULL}, LAST};
static const struct hf_field mlp_width[] = {{"intermediate_size", HF_INT, "model.ffn", NULL}, LAST};

static const struct hf_field mistral_fields[] = {{"sliding_window", HF_INT_OR_NULL, "model.attn_window", "0"}, LAST};
/* Layers of Qwen slide only where use_sliding_window says so; then layer_types name them. */
static const struct hf_field no_window[] = {
    {"use_sliding_window", HF_ABSENT, NULL, NULL}, {"sliding_window|max_window_layers|layer_types", HF_IGNORED, NULL, NULL}, LAST};

static const struct hf_field moe_fields[] = {
    {"num_experts_per_tok", HF_INT, "model.topk", NULL},
    {"decoder_sparse_step|mlp_only_layers|norm_topk_prob", HF_IGNORED, NULL, NULL}, /* read by family_config.c */
    LAST};
static const struct hf_field qwen_moe_fields[] = {
    {"num_experts|num_local_experts", HF_INT, "model.experts", NULL}, {"moe_intermediate_size", HF_INT, "model.expert_ffn", NULL}, LAST};
static const struct hf_field mixtral_fields[] = {
    {"num_local_experts", HF_INT, "model.experts", NULL},
    {"intermediate_size", HF_INT, "model.expert_ffn", NULL},
    {"sliding_window", HF_INT_OR_NULL, "model.attn_window", "0"},
    {"router_jitter_noise", HF_IGNORED, NULL, NULL}, /* training only */
    LAST};
static const struct hf_field qwen_next_fields[] = {
    {"shared_expert_intermediate_size", HF_INT, "model.shared_ffn", NULL},
    {"linear_num_key_heads", HF_INT, "model.gdn_key_heads", NULL},
    {"linear_num_value_heads", HF_INT, "model.gdn_value_heads", NULL},
    {"linear_key_head_dim", HF_INT, "model.gdn_key_dim", NULL},
    {"linear_value_head_dim", HF_INT, "model.gdn_value_dim", NULL},
    {"linear_conv_kernel_dim", HF_INT, "model.gdn_conv", NULL},
    {"layer_types|full_attention_interval", HF_IGNORED, NULL, NULL},
    LAST};
static const struct hf_field deepseek_fields[] = {
    {"n_routed_experts", HF_INT, "model.experts", NULL},
    {"moe_intermediate_size", HF_INT, "model.expert_ffn", NULL},
    {"n_group", HF_INT, "model.router_groups", "0"},
    {"topk_group", HF_INT, "model.router_group_topk", "0"},
    {"routed_scaling_factor", HF_REAL, "model.router_scale", "1"},
    {"norm_topk_prob", HF_BOOL, "model.router_norm", "on"},
    {"q_lora_rank", HF_INT_OR_NULL, "model.mla_q_rank", "0"},
    {"kv_lora_rank", HF_INT, "model.mla_kv_rank", NULL},
    {"qk_nope_head_dim", HF_INT, "model.mla_nope", NULL},
    {"qk_rope_head_dim", HF_INT, "model.mla_rope", NULL},
    {"v_head_dim", HF_INT, "model.mla_v", NULL},
    {"rope_interleave", HF_FIXED, NULL, "true"},
    {"scoring_func", HF_FIXED, NULL, "\"sigmoid\""},
    {"topk_method", HF_FIXED, NULL, "\"noaux_tc\""},
    {"moe_layer_freq", HF_FIXED, NULL, "1"},
    {"head_dim|qk_head_dim|first_k_dense_replace|n_shared_experts|num_nextn_predict_layers|num_key_value_heads", HF_IGNORED, NULL, NULL},
    LAST};
static const struct hf_field deepseek_transformer[] = {
    {"num_attention_heads", HF_INT, "model.heads", NULL},
    {"attention_dropout", HF_ABSENT, NULL, NULL},
    {"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-6"},
    {"hidden_act", HF_FIXED, NULL, "\"silu\""},
    LAST};

static const struct hf_field mamba2_fields[] = {
    {"layer_norm_epsilon", HF_REAL, "model.norm_eps", "1e-5"},
    {"num_heads", HF_INT, "model.mamba_heads", NULL},
    {"head_dim", HF_INT, "model.mamba_head_dim", NULL},
    {"state_size", HF_INT, "model.mamba_state", NULL},
    {"n_groups", HF_INT, "model.mamba_groups", NULL},
    {"conv_kernel", HF_INT, "model.mamba_conv", "4"},
    {"chunk_size", HF_INT, "model.mamba_chunk", "256"},
    {"hidden_act", HF_FIXED, NULL, "\"silu\""},
    {"use_bias", HF_ABSENT, NULL, NULL},
    {"use_conv_bias", HF_FIXED, NULL, "true"},
    {"rms_norm", HF_FIXED, NULL, "true"},
    {"expand|residual_in_fp32|rescale_prenorm_residual|time_step_rank|time_step_min|time_step_max|time_step_floor|time_step_limit",
     HF_IGNORED, NULL, NULL},
    LAST};

static const struct hf_field nemotron_fields[] = {
    {"num_attention_heads", HF_INT, "model.heads", NULL},
    {"num_key_value_heads", HF_INT, "model.kv_heads", "0"},
    {"head_dim", HF_INT, "model.head_dim", "0"},
    {"attention_dropout|hidden_dropout", HF_ABSENT, NULL, NULL},
    {"attention_bias|mlp_bias|use_bias|mamba_proj_bias|moe_latent_size", HF_ABSENT, NULL, NULL},
    {"use_conv_bias", HF_FIXED, NULL, "true"},
    {"layer_norm_epsilon|norm_eps|rms_norm_eps", HF_REAL, "model.norm_eps", "1e-5"},
    {"mlp_hidden_act", HF_FIXED, NULL, "\"relu2\""},
    {"mamba_hidden_act", HF_FIXED, NULL, "\"silu\""},
    {"intermediate_size", HF_INT, "model.ffn", "0"},
    {"mamba_num_heads", HF_INT, "model.mamba_heads", NULL},
    {"mamba_head_dim", HF_INT, "model.mamba_head_dim", NULL},
    {"ssm_state_size", HF_INT, "model.mamba_state", NULL},
    {"n_groups|mamba_n_groups", HF_INT, "model.mamba_groups", NULL},
    {"conv_kernel|mamba_d_conv", HF_INT, "model.mamba_conv", "4"},
    {"chunk_size|mamba_chunk_size", HF_INT, "model.mamba_chunk", "128"},
    {"time_step_min", HF_REAL, "model.mamba_dt_min", "0.001"},
    {"n_routed_experts", HF_INT, "model.experts", "8"},
    {"num_experts_per_tok", HF_INT, "model.topk", "2"},
    {"moe_intermediate_size", HF_INT, "model.expert_ffn", "0"},
    {"moe_shared_expert_intermediate_size", HF_INT, "model.shared_ffn", "0"},
    {"n_group", HF_INT, "model.router_groups", "0"},
    {"topk_group", HF_INT, "model.router_group_topk", "0"},
    {"routed_scaling_factor", HF_REAL, "model.router_scale", "1"},
    {"norm_topk_prob", HF_BOOL, "model.router_norm", "on"},
    {"hybrid_override_pattern|layers_block_type|n_shared_experts|expand|mamba_expand|mamba_ssm_cache_dtype|residual_in_fp32|"
     "rescale_prenorm_residual|time_step_max|time_step_floor|time_step_limit|time_step_rank|sliding_window|moe_shared_expert_overlap|"
     "num_nextn_predict_layers|mtp_hybrid_override_pattern|mtp_layers_block_type|use_mamba_kernels|mamba_dt_init_floor",
     HF_IGNORED, NULL, NULL},
    LAST};

static const struct hf_field bamba_fields[] = {
    {"mamba_n_heads", HF_INT, "model.mamba_heads", NULL},
    {"mamba_d_head", HF_INT, "model.mamba_head_dim", NULL},
    {"mamba_d_state", HF_INT, "model.mamba_state", NULL},
    {"mamba_n_groups", HF_INT, "model.mamba_groups", NULL},
    {"mamba_d_conv", HF_INT, "model.mamba_conv", "4"},
    {"mamba_chunk_size", HF_INT, "model.mamba_chunk", "256"},
    {"mamba_conv_bias", HF_FIXED, NULL, "true"},
    {"mamba_proj_bias", HF_ABSENT, NULL, NULL},
    {"z_loss_coefficient|mamba_expand|attn_layer_indices|time_step_limit|time_step_min|time_step_max|time_step_floor|head_dim",
     HF_IGNORED, NULL, NULL},
    LAST};

/* ---- families ------------------------------------------------------------------------------------------------- */

#define RULES(name, ...) static const struct hf_rule *const name[] = {__VA_ARGS__, NULL}
#define FIELDS(name, ...) static const struct hf_field *const name[] = {__VA_ARGS__, NULL}
#define ROOTS {"model.", "model.language_model.", "language_model.model."}

RULES(dense_tensors, ends, norms, attention, glu);
FIELDS(llama_config, harmless, basics, transformer, own_head_dim, no_bias, mlp_width);
FIELDS(mistral_config, harmless, basics, transformer, own_head_dim, mlp_width, mistral_fields);
FIELDS(qwen2_config, harmless, basics, transformer, mlp_width, no_window);
FIELDS(qwen3_config, harmless, basics, transformer, own_head_dim, no_bias, mlp_width, no_window);

RULES(moe_tensors, ends, norms, attention, glu, experts);
FIELDS(qwen3_moe_config, harmless, basics, transformer, own_head_dim, no_bias, mlp_width, no_window, moe_fields, qwen_moe_fields);
RULES(mixtral_tensors, ends, norms, attention, mixtral_experts, experts);
FIELDS(mixtral_config, harmless, basics, transformer, own_head_dim, moe_fields, mixtral_fields);
RULES(qwen3_next_tensors, ends, norms, gated_attention, delta_net, glu, qwen_shared, experts);
FIELDS(qwen3_next_config, harmless, basics, transformer, own_head_dim, no_bias, mlp_width, moe_fields, qwen_moe_fields, qwen_next_fields);
RULES(deepseek_tensors, ends, norms, latent_attention, glu, experts, deepseek_prediction);
FIELDS(deepseek_config, harmless, basics, deepseek_transformer, no_bias, mlp_width, deepseek_fields, moe_fields);
RULES(mamba2_tensors, mamba2_rules);
FIELDS(mamba2_config, harmless, basics, mamba2_fields);
RULES(nemotron_tensors, mamba2_rules, nemotron_rules);
FIELDS(nemotron_config, harmless, basics, nemotron_fields);
RULES(bamba_tensors, bamba_rules, attention);
FIELDS(bamba_config, harmless, basics, transformer, no_bias, mlp_width, bamba_fields);

static const struct hf_family llama = {"llama", "LlamaForCausalLM", ROOTS, "layers.", NULL, dense_tensors, llama_config, dense_read, dense_write};
static const struct hf_family mistral = {"mistral", "MistralForCausalLM", ROOTS, "layers.", NULL, dense_tensors, mistral_config, dense_read, dense_write};
static const struct hf_family qwen2 = {"qwen2", "Qwen2ForCausalLM", ROOTS, "layers.", NULL, dense_tensors, qwen2_config, qwen2_read, qwen2_write};
static const struct hf_family qwen3 = {"qwen3", "Qwen3ForCausalLM", ROOTS, "layers.", NULL, dense_tensors, qwen3_config, qwen3_read, qwen3_write};
static const struct hf_family qwen3_moe = {"qwen3_moe", "Qwen3MoeForCausalLM", ROOTS, "layers.", "mtp.layers.", moe_tensors, qwen3_moe_config,
                                           qwen3_moe_read, qwen3_moe_write};
static const struct hf_family mixtral = {"mixtral", "MixtralForCausalLM", ROOTS, "layers.", NULL, mixtral_tensors, mixtral_config, mixtral_read, mixtral_write};
static const struct hf_family qwen3_next = {"qwen3_next", "Qwen3NextForCausalLM", ROOTS, "layers.", "mtp.layers.", qwen3_next_tensors,
                                            qwen3_next_config, qwen3_next_read, qwen3_next_write};
static const struct hf_family deepseek_v3 = {"deepseek_v3", "DeepseekV3ForCausalLM", ROOTS, "layers.", NULL, deepseek_tensors, deepseek_config,
                                             deepseek_read, deepseek_write};
static const struct hf_family mamba2 = {"mamba2", "Mamba2ForCausalLM", {"backbone.", "model."}, "layers.", NULL, mamba2_tensors, mamba2_config, mamba2_read,
                                        mamba2_write};
static const struct hf_family nemotron_h = {"nemotron_h", "NemotronHForCausalLM", {"backbone.", "model."}, "layers.", "mtp.layers.", nemotron_tensors,
                                            nemotron_config, nemotron_read, nemotron_write};
static const struct hf_family bamba = {"bamba", "BambaForCausalLM", ROOTS, "layers.", NULL, bamba_tensors, bamba_config, bamba_read, bamba_write};

/* In the order in which an export tries them: what many programs read comes first. */
const struct hf_family *const hf_families[] = {&llama,      &mistral, &qwen2,      &qwen3, &mixtral, &qwen3_moe, &qwen3_next, &deepseek_v3,
                                               &mamba2,     &bamba,   &nemotron_h, NULL};
