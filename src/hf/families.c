/* The families of Hugging Face models that braid reads and writes: for each, which parameter of ours is made of which
 * tensors, and which option is which field of config.json. To add one: its rows here, its line in hf_families, and what
 * rows cannot say (the pattern of layers) in family_config.c.
 *
 * Letters of sizes: d hidden, H heads, G key-value heads, D head size, f MLP width, e expert width, s shared expert's
 * width, n r v latent attention's nope, rope and value channels, Q k its query and key-value rank, K L gated delta
 * net's key and value heads, a b their channels, p value heads of a key head. */
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

/* ---- tensors --------------------------------------------------------------------------------- */

#define ONE(our_key, their_name)                                                                                       \
    {                                                                                                                  \
        .key = (our_key), .part = { {.name = (their_name)} }                                                           \
    }
#define END                                                                                                            \
    {                                                                                                                  \
        .key = NULL                                                                                                    \
    }

static const struct hf_rule ends[] = {ONE("embedding.word_embeddings.weight", "@embed_tokens.weight"),
                                      ONE("decoder.final_layernorm.weight", "@norm.weight"),
                                      ONE("decoder.final_norm.weight", "@norm.weight"),
                                      ONE("output_layer.weight", "lm_head.weight"), END};

static const struct hf_rule norms[] = {ONE("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                                       ONE("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
                                       ONE("input_layernorm.weight", "input_layernorm.weight"),
                                       ONE("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
                                       ONE("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
                                       END};

#define QKV(what)                                                                                                      \
    {                                                                                                                  \
        .key = "self_attention.linear_qkv." what, .groups = "G", .part = {                                             \
            {.name = "self_attn.q_proj." what, .rows = "HD"},                                                          \
            {.name = "self_attn.k_proj." what, .rows = "GD"},                                                          \
            {.name = "self_attn.v_proj." what, .rows = "GD"}                                                           \
        }                                                                                                              \
    }
static const struct hf_rule attention[] = {QKV("weight"),
                                           QKV("bias"),
                                           ONE("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
                                           ONE("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
                                           ONE("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
                                           ONE("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
                                           ONE("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
                                           END};

/* q_proj of a gated attention holds D rows of the query, then D rows of the gate, for each head. */
static const struct hf_rule gated_attention[] = {
    {.key = "self_attention.linear_qkv.weight",
     .groups = "G",
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

#define INDEXER(our, theirs) ONE("self_attention.core_attention.indexer." our, "self_attn.indexer." theirs)
static const struct hf_rule indexer[] = {INDEXER("linear_wq_b.weight", "wq_b.weight"),
                                         INDEXER("linear_wk.weight", "wk.weight"),
                                         INDEXER("k_norm.weight", "k_norm.weight"),
                                         INDEXER("k_norm.bias", "k_norm.bias"),
                                         INDEXER("linear_weights_proj.weight", "weights_proj.weight"),
                                         END};

#define GLU(our, theirs, width, what)                                                                                  \
    {                                                                                                                  \
        .key = our ".linear_fc1." what, .part = {                                                                      \
            {.name = theirs ".gate_proj." what, .rows = width},                                                        \
            {.name = theirs ".up_proj." what, .rows = width}                                                           \
        }                                                                                                              \
    }
static const struct hf_rule glu[] = {GLU("mlp", "mlp", "f", "weight"), GLU("mlp", "mlp", "f", "bias"),
                                     ONE("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
                                     ONE("mlp.linear_fc2.bias", "mlp.down_proj.bias"), END};

/* One tensor for each expert and matrix; newer folders have all experts in one. */
static const struct hf_rule experts[] = {
    ONE("mlp.router.weight", "mlp.gate.weight"),
    {.key = "mlp.router.expert_bias", .flags = HF_KEEP_F32, .part = {{.name = "mlp.gate.e_score_correction_bias"}}},
    {.key = "mlp.experts.linear_fc1.weight",
     .part = {{.name = "mlp.experts.{e}.gate_proj.weight", .rows = "e"},
              {.name = "mlp.experts.{e}.up_proj.weight", .rows = "e"}}},
    ONE("mlp.experts.linear_fc2.weight", "mlp.experts.{e}.down_proj.weight"),
    {.key = "mlp.experts.linear_fc1.weight", .flags = HF_FUSED, .part = {{.name = "mlp.experts.gate_up_proj"}}},
    {.key = "mlp.experts.linear_fc2.weight", .flags = HF_FUSED, .part = {{.name = "mlp.experts.down_proj"}}},
    GLU("mlp.shared_experts", "mlp.shared_experts", "s", "weight"),
    ONE("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
    END};

static const struct hf_rule qwen_shared[] = {
    GLU("mlp.shared_experts", "mlp.shared_expert", "s", "weight"),
    ONE("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"),
    ONE("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"), END};

static const struct hf_rule mixtral_experts[] = {
    ONE("mlp.router.weight", "block_sparse_moe.gate.weight"),
    {.key = "mlp.experts.linear_fc1.weight",
     .part = {{.name = "block_sparse_moe.experts.{e}.w1.weight", .rows = "e"},
              {.name = "block_sparse_moe.experts.{e}.w3.weight", .rows = "e"}}},
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

#define MAMBA(theirs)                                                                                                  \
    ONE("mixer.in_proj.weight", theirs ".in_proj.weight"), ONE("mixer.conv1d.weight", theirs ".conv1d.weight"),        \
        ONE("mixer.conv1d.bias", theirs ".conv1d.bias"),                                                               \
        {.key = "mixer.A_log", .flags = HF_KEEP_F32, .part = {{.name = theirs ".A_log"}}},                             \
        {.key = "mixer.D", .flags = HF_KEEP_F32, .part = {{.name = theirs ".D"}}},                                     \
        {.key = "mixer.dt_bias", .flags = HF_KEEP_F32, .part = {{.name = theirs ".dt_bias"}}},                         \
        ONE("mixer.norm.weight", theirs ".norm.weight"), ONE("mixer.out_proj.weight", theirs ".out_proj.weight")

static const struct hf_rule mamba2_rules[] = {ONE("embedding.word_embeddings.weight", "@embeddings.weight"),
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
    {.key = "self_attention.linear_qkv.weight",
     .groups = "G",
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

/* Weights of GPT-2's linear layers are [in, out]; q, k and v are one tensor. */
#define CONV1D(our_key, their_name)                                                                                    \
    {                                                                                                                  \
        .key = (our_key), .flags = HF_TRANSPOSED, .part = { {.name = (their_name)} }                                   \
    }
#define GPT2_QKV(what, how)                                                                                            \
    {                                                                                                                  \
        .key = "self_attention.linear_qkv." what, .groups = "G", .flags = (how), .part = {                             \
            {.name = "attn.c_attn." what, .rows = "HD", .stride = "3HD"},                                              \
            {.name = "attn.c_attn." what, .rows = "HD", .stride = "3HD", .offset = "HD"},                              \
            {.name = "attn.c_attn." what, .rows = "HD", .stride = "3HD", .offset = "2HD"}                              \
        }                                                                                                              \
    }
static const struct hf_rule gpt2_rules[] = {ONE("embedding.word_embeddings.weight", "@wte.weight"),
                                            ONE("embedding.position_embeddings.weight", "@wpe.weight"),
                                            ONE("decoder.final_layernorm.weight", "@ln_f.weight"),
                                            ONE("decoder.final_layernorm.bias", "@ln_f.bias"),
                                            ONE("output_layer.weight", "lm_head.weight"),
                                            ONE("self_attention.linear_qkv.layer_norm_weight", "ln_1.weight"),
                                            ONE("self_attention.linear_qkv.layer_norm_bias", "ln_1.bias"),
                                            GPT2_QKV("weight", HF_TRANSPOSED),
                                            GPT2_QKV("bias", 0),
                                            CONV1D("self_attention.linear_proj.weight", "attn.c_proj.weight"),
                                            ONE("self_attention.linear_proj.bias", "attn.c_proj.bias"),
                                            ONE("mlp.linear_fc1.layer_norm_weight", "ln_2.weight"),
                                            ONE("mlp.linear_fc1.layer_norm_bias", "ln_2.bias"),
                                            CONV1D("mlp.linear_fc1.weight", "mlp.c_fc.weight"),
                                            ONE("mlp.linear_fc1.bias", "mlp.c_fc.bias"),
                                            CONV1D("mlp.linear_fc2.weight", "mlp.c_proj.weight"),
                                            ONE("mlp.linear_fc2.bias", "mlp.c_proj.bias"),
                                            END};

/* All experts in one tensor, [in, out] unless it is MXFP4; gate and up take turns. */
#define GPT_OSS_UP(our_what, their_name, how)                                                                          \
    {                                                                                                                  \
        .key = "mlp.experts.linear_fc1." our_what, .flags = HF_FUSED | (how), .part = {                                \
            {.name = (their_name), .rows = "e", .chunk = "1", .stride = "2"},                                          \
            {.name = (their_name), .rows = "e", .chunk = "1", .stride = "2", .offset = "1"}                            \
        }                                                                                                              \
    }
static const struct hf_rule gpt_oss_rules[] = {
    ONE("mlp.router.weight", "mlp.router.weight"),
    ONE("mlp.router.bias", "mlp.router.bias"),
    GPT_OSS_UP("weight", "mlp.experts.gate_up_proj", HF_TRANSPOSED),
    GPT_OSS_UP("bias", "mlp.experts.gate_up_proj_bias", 0),
    {.key = "mlp.experts.linear_fc2.weight",
     .flags = HF_FUSED | HF_TRANSPOSED,
     .part = {{.name = "mlp.experts.down_proj"}}},
    {.key = "mlp.experts.linear_fc2.bias", .flags = HF_FUSED, .part = {{.name = "mlp.experts.down_proj_bias"}}},
    END};

/* A depth of DeepSeek's prediction is one more layer of the model. */
static const struct hf_rule deepseek_prediction[] = {
    ONE("mtp.enorm.weight", "enorm.weight"), ONE("mtp.hnorm.weight", "hnorm.weight"),
    ONE("mtp.eh_proj.weight", "eh_proj.weight"), ONE("mtp.final_layernorm.weight", "shared_head.norm.weight"), END};

static const struct hf_copy deepseek_copies[] = {{"embedding.word_embeddings.weight", "embed_tokens.weight"},
                                                 {"output_layer.weight", "shared_head.head.weight"},
                                                 {NULL, NULL}};

static const struct hf_rule qwen_prediction[] = {ONE("mtp.enorm.weight", "/mtp.pre_fc_norm_embedding.weight"),
                                                 ONE("mtp.hnorm.weight", "/mtp.pre_fc_norm_hidden.weight"),
                                                 ONE("mtp.eh_proj.weight", "/mtp.fc.weight"),
                                                 ONE("mtp.final_layernorm.weight", "/mtp.norm.weight"), END};

/* DeepSeek-V4 under the names of its release, which transformers reads; where save_pretrained of transformers writes
 * another, that one is read too. */
#define F32_ONE(our_key, their_name)                                                                                   \
    {                                                                                                                  \
        .key = (our_key), .flags = HF_KEEP_F32, .part = { {.name = (their_name)} }                                     \
    }
#define HC_SCALE(our_key, their_name, at)                                                                              \
    {                                                                                                                  \
        .key = (our_key), .flags = HF_KEEP_F32, .part = {                                                              \
            {.name = (their_name), .rows = "1", .chunk = "1", .stride = "3", .offset = (at)}                           \
        }                                                                                                              \
    }
#define HC(our, theirs)                                                                                                \
    F32_ONE(our ".mapping_proj.weight", theirs "_fn"), F32_ONE(our ".bias", theirs "_base"),                           \
        HC_SCALE(our ".alpha_pre", theirs "_scale", "0"), HC_SCALE(our ".alpha_post", theirs "_scale", "1"),           \
        HC_SCALE(our ".alpha_res", theirs "_scale", "2")
static const struct hf_rule deepseek_v4_ends[] = {ONE("embedding.word_embeddings.weight", "@embed.weight"),
                                                  ONE("embedding.word_embeddings.weight", "@embed_tokens.weight"),
                                                  ONE("decoder.final_layernorm.weight", "@norm.weight"),
                                                  ONE("output_layer.weight", "head.weight"),
                                                  F32_ONE("decoder.hc_head_fn", "@hc_head_fn"),
                                                  F32_ONE("decoder.hc_head_base", "@hc_head_base"),
                                                  F32_ONE("decoder.hc_head_scale", "@hc_head_scale"),
                                                  F32_ONE("decoder.hc_head_fn", "@hc_head.hc_fn"),
                                                  F32_ONE("decoder.hc_head_base", "@hc_head.hc_base"),
                                                  F32_ONE("decoder.hc_head_scale", "@hc_head.hc_scale"),
                                                  HC("self_attention_hyper_connection", "hc_attn"),
                                                  HC("mlp_hyper_connection", "hc_ffn"),
                                                  END};

#define V4(our, theirs) ONE("self_attention." our, "attn." theirs)
#define V4_CORE(our, theirs) V4("core_attention." our, theirs)
static const struct hf_rule compressed_attention[] = {
    ONE("input_layernorm.weight", "attn_norm.weight"),
    V4("linear_q_down_proj.weight", "wq_a.weight"),
    V4("q_layernorm.weight", "q_norm.weight"),
    V4("linear_q_up_proj.weight", "wq_b.weight"),
    V4("linear_kv_proj.weight", "wkv.weight"),
    V4("kv_layernorm.weight", "kv_norm.weight"),
    V4("kv_layernorm.weight", "norm.weight"),
    F32_ONE("self_attention.core_attention.attn_sink", "attn.attn_sink"),
    V4("linear_o_group_proj", "wo_a.weight"),
    V4("linear_proj.weight", "wo_b.weight"),
    V4_CORE("compressor.linear_wkv.weight", "compressor.wkv.weight"),
    V4_CORE("compressor.linear_wgate.weight", "compressor.wgate.weight"),
    F32_ONE("self_attention.core_attention.compressor.ape", "attn.compressor.ape"),
    V4_CORE("compressor.norm.weight", "compressor.norm.weight"),
    V4_CORE("indexer.linear_wq_b.weight", "indexer.wq_b.weight"),
    V4_CORE("indexer.linear_weights_proj.weight", "indexer.weights_proj.weight"),
    V4_CORE("indexer.compressor.linear_wkv.weight", "indexer.compressor.wkv.weight"),
    V4_CORE("indexer.compressor.linear_wgate.weight", "indexer.compressor.wgate.weight"),
    F32_ONE("self_attention.core_attention.indexer.compressor.ape", "attn.indexer.compressor.ape"),
    V4_CORE("indexer.compressor.norm.weight", "indexer.compressor.norm.weight"),
    END};

static const struct hf_rule deepseek_v4_experts[] = {
    ONE("pre_mlp_layernorm.weight", "ffn_norm.weight"),
    ONE("mlp.router.weight", "ffn.gate.weight"),
    F32_ONE("mlp.router.expert_bias", "ffn.gate.bias"),
    {.key = "mlp.router.tid2eid", .flags = HF_INTEGERS, .part = {{.name = "ffn.gate.tid2eid"}}},
    {.key = "mlp.experts.linear_fc1.weight",
     .part = {{.name = "ffn.experts.{e}.w1.weight", .rows = "e"}, {.name = "ffn.experts.{e}.w3.weight", .rows = "e"}}},
    ONE("mlp.experts.linear_fc2.weight", "ffn.experts.{e}.w2.weight"),
    {.key = "mlp.shared_experts.linear_fc1.weight",
     .part = {{.name = "ffn.shared_experts.w1.weight", .rows = "s"},
              {.name = "ffn.shared_experts.w3.weight", .rows = "s"}}},
    ONE("mlp.shared_experts.linear_fc2.weight", "ffn.shared_experts.w2.weight"),
    END};

/* Its depths take the streams, so embedding and streams have a projection each, and a depth contracts its own. */
static const struct hf_rule deepseek_v4_prediction[] = {ONE("mtp.enorm.weight", "enorm.weight"),
                                                        ONE("mtp.hnorm.weight", "hnorm.weight"),
                                                        ONE("mtp.e_proj.weight", "e_proj.weight"),
                                                        ONE("mtp.h_proj.weight", "h_proj.weight"),
                                                        ONE("mtp.final_layernorm.weight", "norm.weight"),
                                                        F32_ONE("mtp.hc_head_fn", "hc_head_fn"),
                                                        F32_ONE("mtp.hc_head_base", "hc_head_base"),
                                                        F32_ONE("mtp.hc_head_scale", "hc_head_scale"),
                                                        END};

/* ---- fields ---------------------------------------------------------------------------------- */

#define LAST                                                                                                           \
    {                                                                                                                  \
        .json = NULL                                                                                                   \
    }
/* How a model was trained, not what it is. */
#define NOT_DROPPED "dropout is not imported; --model.dropout and --model.attention_dropout set it"

static const struct hf_field harmless[] = {
    {"architectures|model_type|transformers_version|_name_or_path|auto_map|dtype|torch_dtype|use_cache|bos_token_id|"
     "eos_token_id|"
     "pad_token_id|pretraining_tp|output_router_logits|router_aux_loss_coef|max_position_embeddings|attn_"
     "implementation|"
     "quantization_config|num_logits_to_keep|return_dict|output_hidden_states|output_attentions|is_decoder|"
     "num_hidden_layers|rope_parameters|rope_scaling|rope_theta|partial_rotary_factor|ep_size|aux_loss_alpha|seq_aux|_"
     "attn_implementation_autoset",
     HF_IGNORED, NULL, NULL},
    LAST};

static const struct hf_field basics[] = {{"hidden_size", HF_INT, "model.hidden", NULL},
                                         {"vocab_size", HF_INT, "model.vocab", NULL},
                                         {"tie_word_embeddings", HF_BOOL, "model.tied", "off"},
                                         {"initializer_range", HF_REAL, "model.init_std", "0.02"},
                                         LAST};

static const struct hf_field transformer[] = {{"num_attention_heads", HF_INT, "model.heads", NULL},
                                              {"num_key_value_heads", HF_INT, "model.kv_heads", "0"},
                                              {"attention_dropout", HF_NOTED, NULL, NOT_DROPPED},
                                              {"hidden_act", HF_FIXED, NULL, "\"silu\""},
                                              LAST};
/* What a folder that leaves the field out means is its class's default, and classes differ. */
static const struct hf_field eps_1e6[] = {{"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-6"}, LAST};
static const struct hf_field eps_1e5[] = {{"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-5"}, LAST};

static const struct hf_field own_head_dim[] = {{"head_dim", HF_INT, "model.head_dim", "0"}, LAST};
static const struct hf_field no_bias[] = {
    {"attention_bias", HF_ABSENT, NULL, NULL}, {"mlp_bias", HF_ABSENT, NULL, NULL}, LAST};
static const struct hf_field attention_bias[] = {{"attention_bias", HF_BOOL, "model.attn_bias", "off"}, LAST};
static const struct hf_field mlp_bias[] = {{"mlp_bias", HF_BOOL, "model.mlp_bias", "off"}, LAST};
static const struct hf_field no_mlp_bias[] = {{"mlp_bias", HF_ABSENT, NULL, NULL}, LAST};
static const struct hf_field mlp_width[] = {{"intermediate_size", HF_INT, "model.ffn", NULL}, LAST};

static const struct hf_field mistral_fields[] = {{"sliding_window", HF_INT_OR_NULL, "model.attn_window", "4096"},
                                                 {"layer_types", HF_IGNORED, NULL, NULL}, /* read by family_config.c */
                                                 LAST};
/* Layers of Qwen slide only where use_sliding_window says so; then layer_types name them. */
static const struct hf_field no_window[] = {{"use_sliding_window", HF_ABSENT, NULL, NULL},
                                            {"sliding_window|max_window_layers|layer_types", HF_IGNORED, NULL, NULL},
                                            LAST};

static const struct hf_field moe_fields[] = {
    {"num_experts_per_tok", HF_INT, "model.topk", NULL},
    {"decoder_sparse_step|mlp_only_layers|norm_topk_prob", HF_IGNORED, NULL, NULL}, /* read by family_config.c */
    LAST};
static const struct hf_field qwen_moe_fields[] = {{"num_experts|num_local_experts", HF_INT, "model.experts", NULL},
                                                  {"moe_intermediate_size", HF_INT, "model.expert_ffn", NULL},
                                                  LAST};
static const struct hf_field mixtral_fields[] = {{"num_local_experts", HF_INT, "model.experts", NULL},
                                                 {"intermediate_size", HF_INT, "model.expert_ffn", NULL},
                                                 {"sliding_window", HF_INT_OR_NULL, "model.attn_window", "0"},
                                                 {"router_jitter_noise", HF_IGNORED, NULL, NULL}, /* training only */
                                                 LAST};
static const struct hf_field olmoe_fields[] = {{"num_experts|num_local_experts", HF_INT, "model.experts", NULL},
                                               {"intermediate_size", HF_INT, "model.expert_ffn", NULL},
                                               {"clip_qkv", HF_ABSENT, NULL, NULL},
                                               LAST};
static const struct hf_field gpt_oss_fields[] = {{"num_local_experts|num_experts", HF_INT, "model.experts", NULL},
                                                 {"num_experts_per_tok|experts_per_token", HF_INT, "model.topk", NULL},
                                                 {"intermediate_size", HF_INT, "model.expert_ffn", NULL},
                                                 {"attention_bias", HF_BOOL, "model.attn_bias", "on"},
                                                 {"sliding_window", HF_INT_OR_NULL, "model.attn_window", "128"},
                                                 {"swiglu_limit", HF_REAL, "model.act_clamp", "7"},
                                                 {"swiglu_alpha", HF_REAL, "model.act_alpha", "1.702"},
                                                 {"layer_types|initial_context_length", HF_IGNORED, NULL, NULL},
                                                 LAST};
static const struct hf_field gpt2_fields[] = {
    {"n_embd|hidden_size", HF_INT, "model.hidden", NULL},
    {"n_head|num_attention_heads", HF_INT, "model.heads", NULL},
    {"n_positions|max_position_embeddings", HF_INT, "model.max_position", NULL},
    {"n_inner", HF_INT, "model.ffn", "0"},
    {"vocab_size", HF_INT, "model.vocab", NULL},
    {"tie_word_embeddings", HF_BOOL, "model.tied", "on"},
    {"initializer_range", HF_REAL, "model.init_std", "0.02"},
    {"layer_norm_epsilon", HF_REAL, "model.norm_eps", "1e-5"},
    {"activation_function", HF_FIXED, NULL, "\"gelu_new\""},
    {"scale_attn_weights", HF_FIXED, NULL, "true"},
    {"scale_attn_by_inverse_layer_idx|add_cross_attention", HF_ABSENT, NULL, NULL},
    {"resid_pdrop|embd_pdrop|attn_pdrop", HF_NOTED, NULL, NOT_DROPPED},
    {"n_layer|n_ctx|reorder_and_upcast_attn|summary_type|summary_use_proj|summary_activation|summary_proj_to_labels|"
     "summary_first_dropout|"
     "task_specific_params|gradient_checkpointing",
     HF_IGNORED, NULL, NULL},
    LAST};
static const struct hf_field qwen_next_fields[] = {
    {"shared_expert_intermediate_size", HF_INT, "model.shared_ffn", NULL},
    {"linear_num_key_heads", HF_INT, "model.gdn_key_heads", NULL},
    {"linear_num_value_heads", HF_INT, "model.gdn_value_heads", NULL},
    {"linear_key_head_dim", HF_INT, "model.gdn_key_dim", NULL},
    {"linear_value_head_dim", HF_INT, "model.gdn_value_dim", NULL},
    {"linear_conv_kernel_dim", HF_INT, "model.gdn_conv", NULL},
    {"layer_types|full_attention_interval|num_nextn_predict_layers", HF_IGNORED, NULL, NULL},
    LAST};
static const struct hf_field deepseek_fields[] = {
    {"n_routed_experts", HF_INT, "model.experts", NULL},
    {"moe_intermediate_size", HF_INT, "model.expert_ffn", NULL},
    {"n_group", HF_INT, "model.router_groups", "8"},
    {"topk_group", HF_INT, "model.router_group_topk", "4"},
    {"routed_scaling_factor", HF_REAL, "model.router_scale", "2.5"},
    {"norm_topk_prob", HF_BOOL, "model.router_norm", "on"},
    {"q_lora_rank", HF_INT_OR_NULL, "model.mla_q_rank", "0"},
    {"kv_lora_rank", HF_INT, "model.mla_kv_rank", NULL},
    {"qk_nope_head_dim", HF_INT, "model.mla_nope", NULL},
    {"qk_rope_head_dim", HF_INT, "model.mla_rope", NULL},
    {"v_head_dim", HF_INT, "model.mla_v", NULL},
    {"scoring_func", HF_FIXED, NULL, "\"sigmoid\""},
    {"topk_method", HF_FIXED, NULL, "\"noaux_tc\""},
    {"moe_layer_freq", HF_FIXED, NULL, "1"},
    {"head_dim|qk_head_dim|first_k_dense_replace|n_shared_experts|num_nextn_predict_layers|num_key_value_heads",
     HF_IGNORED, NULL, NULL},
    LAST};
static const struct hf_field deepseek_v3_fields[] = {{"rope_interleave", HF_FIXED, NULL, "true"}, LAST};
static const struct hf_field deepseek_v32_fields[] = {
    {"index_n_heads", HF_INT, "model.dsa_indexer_n_heads", "64"},
    {"index_head_dim", HF_INT, "model.dsa_indexer_head_dim", "128"},
    {"index_topk", HF_INT, "model.dsa_indexer_topk", "2048"},
    {"layer_types|mlp_layer_types|num_local_experts", HF_IGNORED, NULL, NULL}, /* read by family_config.c */
    LAST};
static const struct hf_field deepseek_v4_fields[] = {
    {"num_attention_heads", HF_INT, "model.heads", NULL},
    {"num_key_value_heads", HF_FIXED, NULL, "1"},
    {"attention_dropout", HF_NOTED, NULL, NOT_DROPPED},
    {"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-6"},
    {"hidden_act", HF_FIXED, NULL, "\"silu\""},
    {"head_dim", HF_INT, "model.mla_v", "512"},
    {"q_lora_rank", HF_INT, "model.mla_q_rank", "1024"},
    {"o_groups", HF_INT, "model.o_groups", "8"},
    {"o_lora_rank", HF_INT, "model.o_lora_rank", "1024"},
    {"sliding_window", HF_INT, "model.csa_window_size", "128"},
    {"index_n_heads", HF_INT, "model.dsa_indexer_n_heads", "64"},
    {"index_head_dim", HF_INT, "model.dsa_indexer_head_dim", "128"},
    {"index_topk", HF_INT, "model.dsa_indexer_topk", "512"},
    {"n_routed_experts|num_local_experts", HF_INT, "model.experts", "256"},
    {"num_experts_per_tok", HF_INT, "model.topk", "6"},
    {"moe_intermediate_size|intermediate_size", HF_INT, "model.expert_ffn", "2048"},
    {"n_shared_experts", HF_FIXED, NULL, "1"},
    {"scoring_func", HF_FIXED, NULL, "\"sqrtsoftplus\""},
    {"topk_method", HF_FIXED, NULL, "\"noaux_tc\""},
    {"norm_topk_prob", HF_FIXED, NULL, "true"},
    {"routed_scaling_factor", HF_REAL, "model.router_scale", "1.5"},
    {"swiglu_limit", HF_REAL, "model.act_clamp", "10"},
    {"hc_mult", HF_INT, "model.mhc_streams", "4"},
    {"hc_sinkhorn_iters", HF_INT, "model.mhc_iterations", "20"},
    {"hc_eps", HF_FIXED, NULL, "1e-6"},
    {"layer_types|mlp_layer_types|compress_rates|compress_rate_csa|compress_rate_hca|compress_ratios|num_hash_layers|"
     "compress_rope_theta|qk_rope_head_dim|num_nextn_predict_layers|expert_dtype|router_jitter_noise",
     HF_IGNORED, NULL, NULL}, /* read by deepseek_v4.c, or how it was trained and stored */
    LAST};
static const struct hf_field deepseek_transformer[] = {{"num_attention_heads", HF_INT, "model.heads", NULL},
                                                       {"attention_dropout", HF_NOTED, NULL, NOT_DROPPED},
                                                       {"rms_norm_eps", HF_REAL, "model.norm_eps", "1e-6"},
                                                       {"hidden_act", HF_FIXED, NULL, "\"silu\""},
                                                       LAST};

static const struct hf_field mamba2_fields[] = {{"layer_norm_epsilon", HF_REAL, "model.norm_eps", "1e-5"},
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
                                                {"expand|residual_in_fp32|rescale_prenorm_residual|time_step_rank|time_"
                                                 "step_min|time_step_max|time_step_floor|time_step_limit",
                                                 HF_IGNORED, NULL, NULL},
                                                LAST};

static const struct hf_field nemotron_fields[] = {
    {"num_attention_heads", HF_INT, "model.heads", NULL},
    {"num_key_value_heads", HF_INT, "model.kv_heads", "0"},
    {"head_dim", HF_INT, "model.head_dim", "0"},
    {"attention_dropout|hidden_dropout", HF_NOTED, NULL, NOT_DROPPED},
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
    {"hybrid_override_pattern|layers_block_type|n_shared_experts|expand|mamba_expand|mamba_ssm_cache_dtype|residual_in_"
     "fp32|"
     "rescale_prenorm_residual|time_step_max|time_step_floor|time_step_limit|time_step_rank|sliding_window|moe_shared_"
     "expert_overlap|"
     "num_nextn_predict_layers|mtp_hybrid_override_pattern|mtp_layers_block_type|use_mamba_kernels|mamba_dt_init_floor",
     HF_IGNORED, NULL, NULL},
    LAST};

static const struct hf_field bamba_fields[] = {{"mamba_n_heads", HF_INT, "model.mamba_heads", NULL},
                                               {"mamba_d_head", HF_INT, "model.mamba_head_dim", NULL},
                                               {"mamba_d_state", HF_INT, "model.mamba_state", NULL},
                                               {"mamba_n_groups", HF_INT, "model.mamba_groups", NULL},
                                               {"mamba_d_conv", HF_INT, "model.mamba_conv", "4"},
                                               {"mamba_chunk_size", HF_INT, "model.mamba_chunk", "256"},
                                               {"mamba_conv_bias", HF_FIXED, NULL, "true"},
                                               {"mamba_proj_bias", HF_ABSENT, NULL, NULL},
                                               {"z_loss_coefficient|mamba_expand|attn_layer_indices|time_step_limit|"
                                                "time_step_min|time_step_max|time_step_floor|head_dim",
                                                HF_IGNORED, NULL, NULL},
                                               LAST};

/* ---- families -------------------------------------------------------------------------------- */

#define RULES(name, ...) static const struct hf_rule *const name[] = {__VA_ARGS__, NULL}
#define FIELDS(name, ...) static const struct hf_field *const name[] = {__VA_ARGS__, NULL}
#define ROOTS                                                                                                          \
    {                                                                                                                  \
        "model.", "model.language_model.", "language_model.model."                                                     \
    }

RULES(dense_tensors, ends, norms, attention, glu);
FIELDS(llama_config, harmless, basics, transformer, eps_1e6, own_head_dim, attention_bias, mlp_bias, mlp_width);
FIELDS(mistral_config, harmless, basics, transformer, eps_1e6, own_head_dim, mlp_width, mistral_fields);
FIELDS(qwen2_config, harmless, basics, transformer, eps_1e6, mlp_width, no_window);
FIELDS(qwen3_config, harmless, basics, transformer, eps_1e6, own_head_dim, attention_bias, no_mlp_bias, mlp_width,
       no_window);

RULES(moe_tensors, ends, norms, attention, glu, experts);
FIELDS(qwen3_moe_config, harmless, basics, transformer, eps_1e6, own_head_dim, attention_bias, no_mlp_bias, mlp_width,
       no_window, moe_fields, qwen_moe_fields);
RULES(mixtral_tensors, ends, norms, attention, mixtral_experts, experts);
FIELDS(mixtral_config, harmless, basics, transformer, eps_1e5, own_head_dim, moe_fields, mixtral_fields);
RULES(qwen3_next_tensors, ends, norms, gated_attention, delta_net, glu, qwen_shared, experts, qwen_prediction);
FIELDS(qwen3_next_config, harmless, basics, transformer, eps_1e6, own_head_dim, no_bias, mlp_width, moe_fields,
       qwen_moe_fields, qwen_next_fields);
RULES(deepseek_tensors, ends, norms, latent_attention, glu, experts, deepseek_prediction);
FIELDS(deepseek_config, harmless, basics, deepseek_transformer, no_bias, mlp_width, deepseek_fields, deepseek_v3_fields,
       moe_fields);
RULES(deepseek_v32_tensors, ends, norms, latent_attention, indexer, glu, experts, deepseek_prediction);
FIELDS(deepseek_v32_config, harmless, basics, deepseek_transformer, no_bias, mlp_width, deepseek_fields,
       deepseek_v32_fields, moe_fields);
RULES(deepseek_v4_tensors, deepseek_v4_ends, compressed_attention, deepseek_v4_experts, deepseek_v4_prediction);
FIELDS(deepseek_v4_config, harmless, basics, deepseek_v4_fields, no_bias);
RULES(mamba2_tensors, mamba2_rules);
FIELDS(mamba2_config, harmless, basics, mamba2_fields);
RULES(nemotron_tensors, mamba2_rules, nemotron_rules);
FIELDS(nemotron_config, harmless, basics, nemotron_fields);
RULES(bamba_tensors, bamba_rules, attention);
FIELDS(bamba_config, harmless, basics, transformer, eps_1e5, no_bias, mlp_width, bamba_fields);

RULES(gpt2_tensors, gpt2_rules);
FIELDS(gpt2_config, gpt2_fields, harmless);
RULES(olmoe_tensors, ends, norms, attention, experts);
FIELDS(olmoe_config, harmless, basics, transformer, eps_1e5, own_head_dim, attention_bias, moe_fields, olmoe_fields);
RULES(gpt_oss_tensors, ends, norms, attention, gpt_oss_rules);
FIELDS(gpt_oss_config, harmless, basics, transformer, eps_1e5, own_head_dim, gpt_oss_fields);

#define FAMILY(name, class) .model_type = #name, .architecture = class
#define TABLES(tensors_, config_, hook)                                                                                \
    .rules = (tensors_), .fields = (config_), .read = hook##_read, .write = hook##_write
#define IN_LAYERS .roots = ROOTS, .layers = "layers."
#define IN_BACKBONE .roots = {"backbone.", "model."}, .layers = "layers."

static const struct hf_family llama = {FAMILY(llama, "LlamaForCausalLM"), IN_LAYERS,
                                       TABLES(dense_tensors, llama_config, dense)};
static const struct hf_family mistral = {FAMILY(mistral, "MistralForCausalLM"), IN_LAYERS,
                                         TABLES(dense_tensors, mistral_config, mistral)};
static const struct hf_family qwen2 = {FAMILY(qwen2, "Qwen2ForCausalLM"), IN_LAYERS,
                                       TABLES(dense_tensors, qwen2_config, qwen2)};
static const struct hf_family qwen3 = {FAMILY(qwen3, "Qwen3ForCausalLM"), IN_LAYERS,
                                       TABLES(dense_tensors, qwen3_config, qwen3)};
static const struct hf_family qwen3_moe = {FAMILY(qwen3_moe, "Qwen3MoeForCausalLM"), IN_LAYERS,
                                           .mtp_layers = "mtp.layers.",
                                           TABLES(moe_tensors, qwen3_moe_config, qwen3_moe)};
static const struct hf_family mixtral = {FAMILY(mixtral, "MixtralForCausalLM"), IN_LAYERS,
                                         TABLES(mixtral_tensors, mixtral_config, mixtral)};
static const struct hf_family qwen3_next = {FAMILY(qwen3_next, "Qwen3NextForCausalLM"), IN_LAYERS,
                                            .mtp_layers = "mtp.layers.", .depth = "*E",
                                            TABLES(qwen3_next_tensors, qwen3_next_config, qwen3_next)};
static const struct hf_family deepseek_v3 = {FAMILY(deepseek_v3, "DeepseekV3ForCausalLM"), IN_LAYERS, .depth = "+E",
                                             .copies = deepseek_copies,
                                             TABLES(deepseek_tensors, deepseek_config, deepseek)};
static const struct hf_family deepseek_v32 = {FAMILY(deepseek_v32, "DeepseekV32ForCausalLM"), IN_LAYERS, .depth = "DE",
                                              .copies = deepseek_copies,
                                              TABLES(deepseek_v32_tensors, deepseek_v32_config, deepseek_v32)};
static const struct hf_family deepseek_v4 = {FAMILY(deepseek_v4, "DeepseekV4ForCausalLM"),
                                             .roots = {"", "model."},
                                             .layers = "layers.",
                                             .mtp_layers = "mtp.",
                                             .depth = "WE",
                                             .own_names = true,
                                             TABLES(deepseek_v4_tensors, deepseek_v4_config, deepseek_v4)};
static const struct hf_family mamba2 = {FAMILY(mamba2, "Mamba2ForCausalLM"), IN_BACKBONE,
                                        TABLES(mamba2_tensors, mamba2_config, mamba2)};
static const struct hf_family nemotron_h = {FAMILY(nemotron_h, "NemotronHForCausalLM"), IN_BACKBONE,
                                            .mtp_layers = "mtp.layers.",
                                            TABLES(nemotron_tensors, nemotron_config, nemotron)};
static const struct hf_family bamba = {FAMILY(bamba, "BambaForCausalLM"), IN_LAYERS,
                                       TABLES(bamba_tensors, bamba_config, bamba)};
static const struct hf_family gpt2 = {FAMILY(gpt2, "GPT2LMHeadModel"), .roots = {"transformer.", ""}, .layers = "h.",
                                      TABLES(gpt2_tensors, gpt2_config, gpt2)};
static const struct hf_family olmoe = {FAMILY(olmoe, "OlmoeForCausalLM"), IN_LAYERS,
                                       TABLES(olmoe_tensors, olmoe_config, olmoe)};
static const struct hf_family gpt_oss = {FAMILY(gpt_oss, "GptOssForCausalLM"), IN_LAYERS,
                                         TABLES(gpt_oss_tensors, gpt_oss_config, gpt_oss)};

/* In the order in which an export tries them: what many programs read comes first. */
const struct hf_family *const hf_families[] = {
    &llama,        &mistral,     &qwen2,   &qwen3,  &mixtral, &qwen3_moe,  &olmoe, &qwen3_next, &deepseek_v3,
    &deepseek_v32, &deepseek_v4, &gpt_oss, &mamba2, &bamba,   &nemotron_h, &gpt2,  NULL};
