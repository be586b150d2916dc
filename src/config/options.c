/* The option table: one row is parser, range check, help, manual and Megatron alias of one option.
 * Row order is the order of --help, docs/options.md and written configs. */
#include "config/config_int.h"
#include "config/values_int.h"

/* The field's C type is the option's type, so a row cannot disagree with the struct. */
#define TYPE_OF(field)                                                                                                 \
    _Generic(((struct config *)0)->field,                                                          \
        bool: OPT_BOOL,                                                                            \
        int64_t: OPT_INT,                                                                          \
        double: OPT_REAL,                                                                          \
        const char *: OPT_STRING,                                                                  \
        int: OPT_ENUM)
#define ROW(field, default_text, row_flags, ...)                                                                       \
    {                                                                                                                  \
        .name = #field, .type = TYPE_OF(field), .offset = offsetof(struct config, field), .def = default_text,         \
        .flags = (row_flags), __VA_ARGS__                                                                              \
    }
#define RANGE(lo, hi) .min = (lo), .max = (hi)
#define ONE_OF(list) .values = (list)
#define AUTO(text) .automatic = (text)
#define ALIAS(name) .alias = {{(name), NULL}}
#define FLAG(name, val) .alias = {{(name), (val)}}
#define HELP(text) .help = (text)

#define MAX_SEED 9007199254740991.0 /* 2^53 - 1: exact as a double, too */

/* clang-format off */
const struct option config_options[] = {
    /* ---- [model] -------------------------------------------------------------------------- */
    ROW(model.pattern, "*-*-", OPT_MODEL,
        .alias = {{"hybrid-layer-pattern", NULL}, {"hybrid-override-pattern", NULL}}, HELP(
        "Layers, one symbol each: M Mamba-2, G gated delta net, * attention, + latent attention, "
        "D sparse attention, C compressed sparse, H heavily compressed and W sliding window attention "
        "of DeepSeek-V4, - MLP, E mixture of experts. [ ] group layers, | cuts pipeline "
        "stages, / starts a multi-token-prediction part. A symbol, a group or a part in parentheses may be "
        "repeated: [*-]x32, (M-)x3.")),
    ROW(model.layers, "0", OPT_MODEL, RANGE(0, CONFIG_RATIO_LAYERS), ALIAS("num-layers"), HELP(
        "Alone: a Transformer of so many layers, [*-] each, or [*E] where model.experts is given. With attn_ratio or "
        "mlp_ratio: the layers of the pattern they make. A pattern that is given has its own number, whatever this "
        "says.")),
    ROW(model.attn_ratio, "0", OPT_MODEL, RANGE(0, 1), ALIAS("hybrid-attention-ratio"), HELP(
        "In place of a pattern: this share of the layers is attention, spread evenly, the rest Mamba-2.")),
    ROW(model.mlp_ratio, "0", OPT_MODEL, RANGE(0, 1), ALIAS("hybrid-mlp-ratio"), HELP(
        "In place of a pattern: this share of the layers is MLP, spread evenly.")),
    ROW(model.mtp_pattern, "", OPT_MODEL, ALIAS("mtp-hybrid-override-pattern"), HELP(
        "Layers of one multi-token-prediction depth, for a pattern without a / part: mtp_layers times "
        "/ and this is put behind it.")),
    ROW(model.mtp_layers, "0", OPT_MODEL, RANGE(0, 64), ALIAS("mtp-num-layers"), HELP(
        "Number of depths made from mtp_pattern, or of model.layers' kind where that makes the pattern. A pattern with "
        "/ parts has its own number, whatever this says.")),
    ROW(model.hidden, "320", OPT_MODEL, RANGE(1, 65536), ALIAS("hidden-size"), HELP(
        "Width of the residual stream.")),
    ROW(model.heads, "5", OPT_MODEL, RANGE(1, 4096), ALIAS("num-attention-heads"), HELP(
        "Query heads of an attention layer.")),
    ROW(model.kv_heads, "0", OPT_MODEL, RANGE(0, 4096), AUTO("heads"), ALIAS("num-query-groups"),
        HELP("Key and value heads; fewer than heads gives grouped-query attention, 1 multi-query. "
        "Must divide heads.")),
    ROW(model.head_dim, "0", OPT_MODEL, RANGE(0, 4096), AUTO("hidden / heads"),
        ALIAS("kv-channels"), HELP("Channels of one attention head.")),
    ROW(model.ffn, "0", OPT_MODEL, RANGE(0, 1 << 20),
        AUTO("8/3 hidden rounded up to a multiple of 32 if act is gated, else 4 hidden"),
        ALIAS("ffn-hidden-size"), HELP("Inner width of an MLP layer.")),
    ROW(model.vocab, "0", OPT_MODEL, RANGE(0, 16e6), AUTO("the tokenizer's size"),
        ALIAS("vocab-size"), HELP("Number of tokens the embedding and the head know.")),
    ROW(model.vocab_multiple, "1", OPT_MODEL, RANGE(1, 1 << 20),
        ALIAS("make-vocab-size-divisible-by"), HELP(
        "Round the vocabulary up to a multiple of this; the extra rows are trained like the rest.")),
    ROW(model.act, "swiglu", OPT_MODEL, ONE_OF(act_values),
        .alias = {{"swiglu", "swiglu"}, {"squared-relu", "relu2"}, {"quick-geglu", "quick_geglu"}},
        HELP("Activation of MLP layers. swiglu, geglu and quick_geglu are gated: act(gate) * up. "
        "relu2 is max(x, 0) squared.")),
    ROW(model.act_clamp, "0", OPT_MODEL, RANGE(0, 1e6), HELP(
        "Gated activations only: limit the gate from above and up from both sides to this; 0 = off.")),
    ROW(model.act_alpha, "1.702", OPT_MODEL | OPT_ABOVE, RANGE(0, 100), HELP(
        "The a in x * sigmoid(a x), for quick_gelu and quick_geglu.")),
    ROW(model.act_offset, "0", OPT_MODEL, RANGE(-100, 100), HELP(
        "Gated activations only: act(gate) * (up + this). 1 in gpt-oss.")),
    ROW(model.norm, "rms", OPT_MODEL, ONE_OF(norm_values), HELP(
        "Norm in front of each layer and of the head: rms is RMSNorm, layer is LayerNorm with a bias, as in GPT-2. The "
        "norms inside Mamba-2 layers stay RMSNorm.")),
    ROW(model.norm_eps, "1e-5", OPT_MODEL | OPT_ABOVE, RANGE(0, 1), ALIAS("norm-epsilon"), HELP(
        "Added to the mean square (RMSNorm) or the variance (LayerNorm).")),
    ROW(model.norm_zero_centered, "off", OPT_MODEL, FLAG("apply-layernorm-1p", "on"), HELP(
        "Store norm weights as their difference from 1, so that weight decay pulls them to 1.")),
    ROW(model.qk_norm, "off", OPT_MODEL, ONE_OF(qk_norm_values), FLAG("qk-layernorm", "on"), HELP(
        "RMSNorm of queries and keys before rotary embedding, which keeps attention logits small: on norms each head "
        "by itself, row all heads of a token together, as in OLMoE. Latent attention (+) always norms its latents "
        "instead.")),
    ROW(model.attn_gate, "off", OPT_MODEL, FLAG("attention-output-gate", "on"), HELP(
        "Multiply the attention output by a learned sigmoid gate, as Qwen3-Next does.")),
    ROW(model.attn_window, "0", OPT_MODEL, RANGE(0, 1 << 30), HELP(
        "Sliding window: how many keys a query sees, itself included. 0 = all earlier ones.")),
    ROW(model.attn_window_skip, "0", OPT_MODEL, RANGE(0, 4096), ALIAS("window-attn-skip-freq"),
        HELP("With attn_window: every k-th attention layer, counted from 1, sees all keys. "
        "0 = none does.")),
    ROW(model.attn_sink, "none", OPT_MODEL, ONE_OF(sink_values), HELP(
        "A logit added to each softmax that takes no value: off_by_one fixes it at 0, learnable "
        "trains one per head.")),
    ROW(model.softmax_scale, "0", OPT_MODEL, RANGE(0, 1e6), AUTO("head_dim^-0.5"), HELP(
        "Factor on attention logits.")),
    ROW(model.qkv_bias, "off", OPT_MODEL, FLAG("add-qkv-bias", "on"), HELP(
        "Bias on the query, key and value projection only, as in Qwen2.")),
    ROW(model.attn_bias, "off", OPT_MODEL, HELP(
        "Bias on the projections of attention (*): query, key, value and output. attention_bias in Hugging Face.")),
    ROW(model.mlp_bias, "off", OPT_MODEL, HELP(
        "Bias on the linear layers of MLPs (-). mlp_bias in Hugging Face.")),
    ROW(model.bias, "off", OPT_MODEL, FLAG("disable-bias-linear", "off"), HELP(
        "Bias on the linear layers of attention (*) and MLP (-), and on the output projection of latent attention (+) "
        "and compressed attention (C, H, W), as in "
        "Megatron. Experts have expert_bias; shared experts, Mamba-2 and gated delta nets have none.")),
    ROW(model.position, "rope", OPT_MODEL, ONE_OF(position_values), HELP(
        "How tokens know their position: rope rotates queries and keys as model.rope says, learned adds a trained "
        "vector for each position to the embedding, as in GPT-2, and rotates nothing.")),
    ROW(model.max_position, "0", OPT_MODEL, RANGE(0, 1 << 30), AUTO("train.seq"),
        ALIAS("max-position-embeddings"), HELP(
        "Number of learned positions. For models without them it is only written to exports, as "
        "max_position_embeddings.")),
    ROW(model.rope, "half", OPT_MODEL, ONE_OF(rope_values),
        FLAG("rotary-interleaved", "interleaved"), HELP(
        "Rotary position embedding: half rotates channel c with c + dim/2, interleaved rotates neighbours.")),
    ROW(model.rope_base, "10000", OPT_MODEL | OPT_ABOVE, RANGE(1, 1e12), ALIAS("rotary-base"), HELP(
        "Base of the rotary frequencies; larger suits longer contexts.")),
    ROW(model.rope_percent, "1", OPT_MODEL | OPT_ABOVE, RANGE(0, 1), ALIAS("rotary-percent"), HELP(
        "Share of each head's channels that is rotated; the rest carries no position. With yarn scaling it must be "
        "1.")),
    ROW(model.rope_scaling, "none", OPT_MODEL, ONE_OF(rope_scaling_values),
        FLAG("use-rope-scaling", "llama3"), HELP(
        "Stretch rotary frequencies for contexts longer than rope_original.")),
    ROW(model.rope_factor, "1", OPT_MODEL, RANGE(1, 1e6),
        .alias = {{"rope-scaling-factor", NULL}, {"rotary-scaling-factor", NULL}}, HELP(
        "How many times longer the context becomes by rope_scaling.")),
    ROW(model.rope_original, "4096", OPT_MODEL, RANGE(1, 1 << 30), HELP(
        "Context length before scaling, for llama3 and yarn.")),
    ROW(model.rope_low, "1", OPT_MODEL | OPT_ABOVE, RANGE(0, 1e6), HELP(
        "llama3 scaling: wavelengths above rope_original / this are stretched fully.")),
    ROW(model.rope_high, "4", OPT_MODEL | OPT_ABOVE, RANGE(0, 1e6), HELP(
        "llama3 scaling: wavelengths below rope_original / this are left alone.")),
    ROW(model.rope_beta_fast, "32", OPT_MODEL | OPT_ABOVE, RANGE(0, 1e6), HELP(
        "yarn scaling: channels with more turns than this over rope_original are left alone.")),
    ROW(model.rope_beta_slow, "1", OPT_MODEL | OPT_ABOVE, RANGE(0, 1e6), HELP(
        "yarn scaling: channels with fewer turns than this over rope_original are stretched fully.")),
    ROW(model.rope_mscale, "0", OPT_MODEL, RANGE(0, 1e3), ALIAS("mscale"), HELP(
        "yarn scaling: weight of the logarithmic attention factor. With rope_mscale_all_dim also "
        "0, the factor is 0.1 ln(rope_factor) + 1.")),
    ROW(model.rope_mscale_all_dim, "0", OPT_MODEL, RANGE(0, 1e3), ALIAS("mscale-all-dim"), HELP(
        "yarn scaling: weight in the factor that rope_mscale's is divided by.")),
    ROW(model.rope_truncate, "on", OPT_MODEL, HELP(
        "yarn scaling: round the channels between which frequencies change to whole numbers; off in gpt-oss.")),
    ROW(model.no_rope_freq, "0", OPT_MODEL, RANGE(0, 4096), ALIAS("no-rope-freq"), HELP(
        "Every k-th attention layer, counted from 1, has no rotary embedding. 0 = all have it.")),
    ROW(model.tied, "on", OPT_MODEL, FLAG("untie-embeddings-and-output-weights", "off"), HELP(
        "The output head is the embedding matrix instead of one of its own.")),
    ROW(model.init_std, "0.02", OPT_MODEL | OPT_ABOVE, RANGE(0, 10), ALIAS("init-method-std"), HELP(
        "Standard deviation of freshly initialised weight matrices.")),
    ROW(model.embed_init_std, "0", OPT_MODEL, RANGE(0, 10), AUTO("init_std"),
        ALIAS("embedding-init-method-std"), HELP(
        "Standard deviation of a freshly initialised embedding.")),
    ROW(model.init_scale, "auto", OPT_MODEL, ONE_OF(init_scale_values), HELP(
        "Initial scale of projections back into the residual stream, over L layers: hybrid divides "
        "init_std by sqrt(L), gpt by sqrt(2 L), none not at all. auto is hybrid.")),
    ROW(model.dropout, "0", OPT_RUN | OPT_INHERIT | OPT_BELOW, RANGE(0, 1), ALIAS("hidden-dropout"),
        HELP("Share of each layer's output, and of the embedding, dropped while training, as in Megatron; never while "
        "evaluating.")),
    ROW(model.attention_dropout, "0", OPT_RUN | OPT_INHERIT | OPT_BELOW, RANGE(0, 1), ALIAS("attention-dropout"), HELP(
        "Probability that an attention weight is dropped after the softmax, in training. On a GPU attention then runs "
        "on portable kernels.")),
    ROW(model.fp32_residual, "off", OPT_RUN | OPT_INHERIT, FLAG("fp32-residual-connection", "on"), HELP(
        "Keep the residual stream and its gradient in fp32 where layers compute in bf16 (run.device = cuda with "
        "gpu.precision = bf16 or fp8), so that adding a layer's output to it rounds nothing off. Takes twice the "
        "memory for the stream, kept once per layer, and twice the bytes between pipeline stages. Elsewhere the "
        "stream is fp32 or wider already.")),
    ROW(model.mtp_scale, "0.1", OPT_RUN | OPT_INHERIT, RANGE(0, 100), ALIAS("mtp-loss-scaling-factor"),
        HELP("Weight of the multi-token prediction losses together; each depth gets an equal share.")),
    ROW(model.mla_q_rank, "0", OPT_MODEL, RANGE(0, 65536), ALIAS("q-lora-rank"),
        HELP("Multi-latent attention (+): rank of the query latent; 0 projects queries directly. Compressed attention "
        "(C, H, W) always has one.")),
    ROW(model.mla_kv_rank, "512", OPT_MODEL, RANGE(1, 65536), ALIAS("kv-lora-rank"),
        HELP("Multi-latent attention: rank of the latent that keys and values share.")),
    ROW(model.mla_nope, "128", OPT_MODEL, RANGE(1, 4096), ALIAS("qk-head-dim"),
        HELP("Multi-latent attention: channels of a query or key head without position.")),
    ROW(model.mla_rope, "64", OPT_MODEL, RANGE(2, 4096), ALIAS("qk-pos-emb-head-dim"),
        HELP("Multi-latent attention: rotary channels of a head; even. All heads share one rotary key.")),
    ROW(model.mla_v, "128", OPT_MODEL, RANGE(1, 4096), ALIAS("v-head-dim"),
        HELP("Multi-latent attention: channels of a value head. Compressed attention (C, H, W): channels of a query "
        "head and "
        "of the one head that is key and value; the last model.mla_rope of them are rotary.")),
    ROW(model.mla_norm_eps, "0", OPT_MODEL, RANGE(0, 1),
        HELP("Epsilon of the two latent norms; 0 is model.norm_eps. DeepSeek-V3 in Hugging Face uses 1e-6.")),
    ROW(model.mla_softmax_scale, "0", OPT_MODEL, RANGE(0, 1000),
        HELP("Scale of the scores; 0 is (nope + rope)^-0.5, with YaRN's mscale_all_dim factor squared. Compressed "
        "attention (C, H, W): 0 is mla_v^-0.5.")),
    ROW(model.dsa_indexer_n_heads, "64", OPT_MODEL, RANGE(1, 4096), ALIAS("dsa-indexer-n-heads"),
        HELP("Sparse attention (D, C): heads of the indexer, whose scores select the keys of a query.")),
    ROW(model.dsa_indexer_head_dim, "128", OPT_MODEL, RANGE(2, 4096), ALIAS("dsa-indexer-head-dim"),
        HELP("Sparse attention: channels of an indexer head; the first model.mla_rope of them are rotary, with C the "
        "last.")),
    ROW(model.dsa_indexer_topk, "2048", OPT_MODEL, RANGE(1, 1048576), ALIAS("dsa-indexer-topk"),
        HELP("Sparse attention: keys (C: compressed entries) that a query reads, of those it may see. With D "
        "sequences up "
        "to this length are computed as latent attention (+) is, bit for bit.")),
    ROW(model.dsa_indexer_topk_freq, "1", OPT_MODEL, RANGE(1, 4096), ALIAS("dsa-indexer-topk-freq"),
        HELP("Sparse attention: every so many-th D layer has an indexer, those between reuse the keys it selected; 1: "
        "all have one.")),
    ROW(model.dsa_indexer_skip_topk_offset, "0", OPT_MODEL, RANGE(0, 4096), ALIAS("dsa-indexer-skip-topk-offset"),
        HELP("Sparse attention: the first so many D layers have indexers of their own whatever dsa_indexer_topk_freq "
        "says; the count of layers starts at the last of them.")),
    ROW(model.dsa_indexer_loss_coeff, "0.01", OPT_RUN | OPT_INHERIT, RANGE(1e-12, 1000),
        ALIAS("dsa-indexer-loss-coeff"),
        HELP("Sparse attention: weight of the indexer's loss, the KL divergence of its scores from the attention of "
        "all heads. It trains the indexer only. To keep an indexer as it is, freeze it by a group.")),
    ROW(model.dsa_indexer_use_sparse_loss, "off", OPT_RUN | OPT_INHERIT, FLAG("dsa-indexer-use-sparse-loss", "on"),
        HELP("Sparse attention: take the indexer's loss over the selected keys only. Off: over all keys that a query "
        "sees, whose cost grows with the square of the sequence.")),
    ROW(model.dsa_dense_warmup, "off", OPT_RUN | OPT_INHERIT,
        HELP("Sparse attention: first stage of training an indexer beside a trained model. Attention reads all keys, "
        "the indexer's loss is taken over all of them, and everything but the indexers is frozen (unless a group says "
        "freeze = off).")),
    ROW(model.dsa_indexer_rope_interleaved, "off", OPT_MODEL, FLAG("dsa-indexer-rope-interleaved", "on"),
        HELP("Sparse attention: rotary pairs of the indexer are neighbouring channels (GLM-5); off: halves "
        "(DeepSeek-V3.2).")),
    ROW(model.dsa_indexer_scoring_relu, "on", OPT_MODEL, HELP(
        "Sparse attention: negative products of an indexer head count as 0.")),
    ROW(model.dsa_indexer_k_norm_epsilon, "0", OPT_MODEL, RANGE(0, 1), ALIAS("dsa-indexer-k-norm-epsilon"),
        HELP("Sparse attention: epsilon of the LayerNorm of indexer keys; 0 is model.norm_eps. DeepSeek-V3.2 uses "
        "1e-6.")),
    ROW(model.csa_window_size, "128", OPT_MODEL, RANGE(1, 1 << 30), ALIAS("csa-window-size"),
        HELP("Compressed attention (C, H, W): tokens that a query reads as they are, itself included.")),
    ROW(model.compress_rate_csa, "4", OPT_MODEL, RANGE(1, 65536),
        HELP("Compressed sparse attention (C): tokens that an entry stands for; it also takes from as many before.")),
    ROW(model.compress_rate_hca, "128", OPT_MODEL, RANGE(1, 65536),
        HELP("Heavily compressed attention (H): tokens that an entry stands for.")),
    ROW(model.csa_compress_rotary_base, "160000", OPT_MODEL | OPT_ABOVE, RANGE(1, 1e12),
        ALIAS("csa-compress-rotary-base"), HELP(
        "Compressed attention (C, H): base of the rotary frequencies, which model.rope_scaling stretches; windows "
        "alone (W) take model.rope_base as it is. compress_rope_theta in Hugging Face.")),
    ROW(model.o_groups, "8", OPT_MODEL, RANGE(1, 4096), ALIAS("o-groups"),
        HELP("Compressed attention (C, H, W): groups of head outputs, each projected by a matrix of its own.")),
    ROW(model.o_lora_rank, "1024", OPT_MODEL, RANGE(1, 65536), ALIAS("o-lora-rank"),
        HELP("Compressed attention (C, H, W): channels that a group of outputs is projected to.")),
    ROW(model.mhc, "off", OPT_MODEL,
        .alias = {{"enable-hyper-connections", "on"}, {"enable-mhc-connections", "on"}}, HELP(
        "Manifold hyper-connections with 4 residual streams, unless mhc_streams gives another number.")),
    ROW(model.mhc_streams, "0", OPT_MODEL, RANGE(0, 16), AUTO("4 if mhc is on, else a plain residual"),
        .alias = {{"num-residual-streams", NULL}, {"mhc-num-residual-streams", NULL}}, HELP(
        "Parallel residual streams, 2 or more, mixed before and after each layer by learned doubly "
        "stochastic matrices. With n of them the memory of the residual stream, kept once per layer, and "
        "what pipeline stages send each other grow n-fold. plan.recompute_block gives memory back: one "
        "stream tensor is kept per block of layers instead of one per layer, for one more pass over the "
        "block's streams in the backward pass; braid plan shows both. What is sent stays n-fold.")),
    ROW(model.mhc_profile, "d", OPT_MODEL, ONE_OF(mhc_values), HELP(
        "Details of the mix: d as DeepSeek-V4 (softmax first, mix transposed, learned contraction), s as "
        "the first Megatron version (mean contraction). Weights of one mean nothing to the other.")),
    ROW(model.mhc_iterations, "20", OPT_MODEL, RANGE(1, 128), ALIAS("mhc-sinkhorn-iterations"), HELP(
        "Rounds of row and column normalisation that make the mixing matrix doubly stochastic.")),
    ROW(model.mhc_gating, "0.01", OPT_MODEL, RANGE(0, 100), ALIAS("mhc-init-gating-factor"), HELP(
        "Initial factor on what the mixing coefficients take from the streams; 0 starts them constant.")),
    ROW(model.mhc_bf16_coef, "off", OPT_MODEL, HELP(
        "Round mixing coefficients to bf16, as Megatron does; only to compare with it.")),
    ROW(model.mhc_norm_eps_inside, "off", OPT_MODEL, ALIAS("mhc-norm-eps-inside"), HELP(
        "Where the epsilon of the streams' root mean square is: on, x / sqrt(mean x^2 + mhc_norm_eps) as "
        "DeepSeek-V4 computes; off, x / (sqrt(mean x^2) + 1e-6) as Megatron does. They differ where streams "
        "are small.")),
    ROW(model.mhc_norm_eps, "0", OPT_MODEL, RANGE(0, 1), AUTO("norm_eps if mhc_norm_eps_inside is on"),
        ALIAS("mhc-norm-eps"), HELP(
        "The epsilon inside the root. Needs mhc_norm_eps_inside.")),
    ROW(model.gdn_value_heads, "0", OPT_MODEL, RANGE(0, 65536), AUTO("2 hidden / gdn_value_dim"),
        ALIAS("linear-num-value-heads"), HELP(
        "Value heads of a gated delta net (G); with gdn_value_dim they set its inner width.")),
    ROW(model.gdn_key_heads, "0", OPT_MODEL, RANGE(0, 65536), AUTO("half of gdn_value_heads if even, else all"),
        ALIAS("linear-num-key-heads"), HELP(
        "Query and key heads of a gated delta net, each shared by equally many value heads.")),
    ROW(model.gdn_key_dim, "128", OPT_MODEL, RANGE(1, 4096), ALIAS("linear-key-head-dim"), HELP(
        "Channels of a query or key head of a gated delta net.")),
    ROW(model.gdn_value_dim, "128", OPT_MODEL, RANGE(1, 4096), ALIAS("linear-value-head-dim"), HELP(
        "Channels of a value head of a gated delta net.")),
    ROW(model.gdn_conv, "4", OPT_MODEL, RANGE(1, 16), ALIAS("linear-conv-kernel-dim"), HELP(
        "Tokens that the convolution in front of a gated delta net sees, the present one included.")),
    ROW(model.gdn_chunk, "64", OPT_RUN | OPT_INHERIT, RANGE(1, 65536), HELP(
        "Tokens that a gated delta net works on at once. Changes speed, memory and rounding, not the model.")),
    ROW(model.mamba_heads, "0", OPT_MODEL, RANGE(0, 65536), AUTO("2 hidden / mamba_head_dim"),
        ALIAS("mamba-num-heads"), HELP("Heads of a Mamba-2 layer; with mamba_head_dim they set its inner width.")),
    ROW(model.mamba_head_dim, "64", OPT_MODEL, RANGE(1, 4096), ALIAS("mamba-head-dim"), HELP(
        "Channels of one Mamba-2 head.")),
    ROW(model.mamba_state, "128", OPT_MODEL, RANGE(1, 4096), ALIAS("mamba-state-dim"), HELP(
        "State of each Mamba-2 channel: how much a layer can remember.")),
    ROW(model.mamba_groups, "0", OPT_MODEL, RANGE(0, 4096),
        AUTO("8, or the largest power of two below that divides mamba_heads"),
        ALIAS("mamba-num-groups"), HELP(
        "Groups of Mamba-2 heads that share what is written to and read from the state. Must divide mamba_heads.")),
    ROW(model.mamba_conv, "4", OPT_MODEL, RANGE(1, 16), HELP(
        "Tokens that the convolution in front of the Mamba-2 state sees, the present one included.")),
    ROW(model.mamba_chunk, "128", OPT_RUN | OPT_INHERIT, RANGE(1, 65536), HELP(
        "Tokens that a Mamba-2 layer works on at once. Changes speed, memory and rounding, not the model.")),
    ROW(model.mamba_dt_min, "0", OPT_MODEL, RANGE(0, 1e6), HELP(
        "Smallest time step of a Mamba-2 head; 0.001 in Hugging Face Nemotron-H.")),
    ROW(model.mamba_dt_max, "0", OPT_MODEL, RANGE(0, 1e6), HELP(
        "Largest time step of a Mamba-2 head; 0 = no bound.")),
    ROW(model.mamba_norm, "group", OPT_MODEL, ONE_OF(mamba_norm_values), HELP(
        "What the norm behind the Mamba-2 gate averages over: each group, as mamba_ssm, Megatron and transformers do, "
        "or "
        "the whole inner width, as Mamba2 and Bamba of transformers before 5.23 did.")),
    ROW(model.experts, "8", OPT_MODEL, RANGE(1, 1024), ALIAS("num-experts"), HELP(
        "Experts of a mixture-of-experts layer.")),
    ROW(model.topk, "2", OPT_MODEL, RANGE(1, 64), ALIAS("moe-router-topk"), HELP(
        "Experts that each token goes to.")),
    ROW(model.expert_ffn, "0", OPT_MODEL, RANGE(0, 1 << 20), AUTO("ffn"),
        ALIAS("moe-ffn-hidden-size"), HELP("Inner width of one expert.")),
    ROW(model.shared_ffn, "0", OPT_MODEL, RANGE(0, 1 << 20),
        ALIAS("moe-shared-expert-intermediate-size"), HELP(
        "Inner width of a shared expert that sees every token; 0 = none.")),
    ROW(model.shared_gate, "off", OPT_MODEL, FLAG("moe-shared-expert-gate", "on"), HELP(
        "Multiply the shared expert's output by a learned sigmoid gate, as Qwen2-MoE does.")),
    ROW(model.expert_bias, "off", OPT_MODEL, HELP(
        "Biases on both linear layers of every expert, as in gpt-oss. The second is scaled by the "
        "routing probability.")),
    ROW(model.glu_interleave, "0", OPT_MODEL, RANGE(0, 1 << 20),
        ALIAS("moe-mlp-glu-interleave-size"), HELP(
        "Gate and up rows of an expert's first matrix alternate in blocks of this many instead of "
        "being two halves; 0 = halves. In memory only: checkpoints hold halves, and a file of weights "
        "that is interleaved says so (see braid ckpt convert).")),
    ROW(model.router_score, "softmax", OPT_MODEL, ONE_OF(router_values),
        ALIAS("moe-router-score-function"), HELP(
        "How router logits become scores. sigmoid is DeepSeek-V3's, sqrtsoftplus DeepSeek-V4's.")),
    ROW(model.router_pre_softmax, "off", OPT_MODEL, FLAG("moe-router-pre-softmax", "on"), HELP(
        "Softmax over all experts before the best are chosen, instead of over the chosen ones.")),
    ROW(model.router_norm, "on", OPT_MODEL, HELP(
        "Divide the chosen sigmoid or sqrtsoftplus scores by their sum. With softmax router_pre_softmax decides.")),
    ROW(model.router_groups, "0", OPT_MODEL, RANGE(0, 1024), ALIAS("moe-router-num-groups"), HELP(
        "Cut the experts into this many equal groups; a token then uses only router_group_topk of "
        "them. 0 = no groups.")),
    ROW(model.router_group_topk, "0", OPT_MODEL, RANGE(0, 64), ALIAS("moe-router-group-topk"), HELP(
        "Groups whose experts a token may use; 0 = all.")),
    ROW(model.router_group_best, "0", OPT_MODEL, RANGE(0, 64), AUTO("topk / router_group_topk, at least 1"), HELP(
        "A group scores the sum of this many of its best experts. Always 2 in Hugging Face's DeepSeek-V3.")),
    ROW(model.router_scale, "1", OPT_MODEL | OPT_ABOVE, RANGE(0, 1e4),
        ALIAS("moe-router-topk-scaling-factor"), HELP("Factor on the routing probabilities.")),
    ROW(model.router_bias, "off", OPT_MODEL, FLAG("moe-router-enable-expert-bias", "on"), HELP(
        "Balance without a loss: a bias per expert that only takes part in the choice and is moved "
        "after each step. Needs sigmoid or sqrtsoftplus.")),
    ROW(model.router_linear_bias, "off", OPT_MODEL, HELP(
        "A trained bias on the router's logits, as in gpt-oss.")),
    ROW(model.router_bias_rate, "1e-3", OPT_RUN | OPT_INHERIT, RANGE(0, 1),
        ALIAS("moe-router-bias-update-rate"), HELP("How far router_bias moves each step.")),
    ROW(model.router_hash_layers, "0", OPT_MODEL, RANGE(0, 4096), ALIAS("moe-n-hash-layers"), HELP(
        "Mixture-of-experts layers up to this number choose experts by a table of token ids; the router only weighs "
        "them. Layers of every kind count, from 1, as in Megatron; those of prediction depths are never meant. 0 = "
        "none.")),
    ROW(model.aux_loss, "0", OPT_RUN | OPT_INHERIT, RANGE(0, 1e3), ALIAS("moe-aux-loss-coeff"),
        HELP("Weight of the loss that spreads the tokens of a microbatch over the experts.")),
    ROW(model.seq_aux_loss, "0", OPT_RUN | OPT_INHERIT, RANGE(0, 1e3), HELP(
        "Weight of the loss that spreads the tokens of each sequence over the experts.")),
    ROW(model.global_aux_loss, "0", OPT_RUN | OPT_INHERIT, RANGE(0, 1e3), HELP(
        "Weight of the loss that spreads the tokens of a whole step over the experts: of all data-parallel ranks, and "
        "of the "
        "microbatches so far. Its gradient does not depend on how many ranks share the batch; Megatron's is smaller by "
        "that number, so multiply its weight by it to compare.")),
    ROW(model.router_z_loss, "0", OPT_RUN | OPT_INHERIT, RANGE(0, 1e3), ALIAS("moe-z-loss-coeff"),
        HELP("Weight of the mean squared log-sum-exp of the router logits, which keeps them small.")),
    ROW(model.router_jitter, "0", OPT_RUN | OPT_INHERIT | OPT_BELOW, RANGE(0, 1),
        ALIAS("moe-input-jitter-eps"), HELP(
        "Multiply the router's input by noise from 1 - this to 1 + this while training.")),
    ROW(model.router_capacity, "0", OPT_RUN | OPT_INHERIT, RANGE(0, 1e6),
        ALIAS("moe-expert-capacity-factor"), HELP(
        "An expert takes at most this many times its fair share of tokens; the rest is dropped. "
        "0 = nothing is dropped. Never while generating.")),
    ROW(model.router_drop, "probs", OPT_RUN | OPT_INHERIT, ONE_OF(drop_values),
        ALIAS("moe-token-drop-policy"), HELP(
        "Which tokens an expert keeps under router_capacity: those of largest probability, or those of the earliest "
        "positions, of all sequences alike.")),
    ROW(model.router_force_balance, "off", OPT_RUN | OPT_LOCAL,
        FLAG("moe-router-force-load-balancing", "on"), HELP(
        "Benchmarks only: random router logits while training, so that every expert gets its share.")),

    /* ---- [train] -------------------------------------------------------------------------- */
    ROW(train.steps, "1000", OPT_RUN, RANGE(1, 1e12), ALIAS("train-iters"), HELP(
        "Optimizer steps of the whole run, those before a resume included.")),
    ROW(train.seq, "256", OPT_RUN | OPT_INHERIT, RANGE(1, 16777216), ALIAS("seq-length"), HELP(
        "Tokens of one training sequence.")),
    ROW(train.micro_batch, "16", OPT_RUN, RANGE(1, 65536), ALIAS("micro-batch-size"), HELP(
        "Sequences worked on at once. Memory grows with it; results do not depend on it beyond rounding.")),
    ROW(train.global_batch, "0", OPT_RUN, RANGE(0, 16777216), AUTO("micro_batch of each rank"),
        ALIAS("global-batch-size"), HELP(
        "Sequences of one optimizer step; gradients of global_batch / micro_batch microbatches are "
        "accumulated, shared out among data-parallel ranks.")),
    ROW(train.lr, "1e-3", OPT_RUN, RANGE(0, 100), ALIAS("lr"), HELP(
        "Peak learning rate.")),
    ROW(train.min_lr, "0", OPT_RUN, RANGE(0, 100), ALIAS("min-lr"), HELP(
        "Learning rate at the end of the decay.")),
    ROW(train.warmup, "0", OPT_RUN, RANGE(0, 1e12), ALIAS("lr-warmup-iters"), HELP(
        "Steps over which the learning rate rises linearly to lr.")),
    ROW(train.schedule, "cosine", OPT_RUN, ONE_OF(schedule_values), ALIAS("lr-decay-style"), HELP(
        "Learning rate after the warm-up. wsd stays at lr and decays only over the last "
        "wsd_steps.")),
    ROW(train.decay_steps, "0", OPT_RUN, RANGE(0, 1e12), AUTO("steps"), ALIAS("lr-decay-iters"),
        HELP(
        "Step at which the learning rate reaches min_lr.")),
    ROW(train.wsd_steps, "0", OPT_RUN, RANGE(0, 1e12), AUTO("20% of decay_steps"),
        ALIAS("lr-wsd-decay-iters"), HELP("Length of the decay at the end of a wsd schedule.")),
    ROW(train.wsd_style, "minus_sqrt", OPT_RUN, ONE_OF(wsd_style_values),
        ALIAS("lr-wsd-decay-style"), HELP(
        "Shape of the wsd decay, x from 0 to 1: linear 1 - x, minus_sqrt 1 - sqrt(x), exponential "
        "2 * 0.5^x - 1, or cosine.")),
    ROW(train.beta1, "0.9", OPT_RUN | OPT_BELOW, RANGE(0, 1), ALIAS("adam-beta1"), HELP(
        "AdamW: memory of the gradient mean.")),
    ROW(train.beta2, "0.95", OPT_RUN | OPT_BELOW, RANGE(0, 1), ALIAS("adam-beta2"), HELP(
        "AdamW: memory of the squared gradient.")),
    ROW(train.eps, "1e-8", OPT_RUN | OPT_ABOVE, RANGE(0, 1), ALIAS("adam-eps"), HELP(
        "AdamW: added to the denominator.")),
    ROW(train.weight_decay, "0.1", OPT_RUN, RANGE(0, 100), ALIAS("weight-decay"), HELP(
        "Decoupled weight decay of matrices; vectors such as norms and biases are not decayed.")),
    ROW(train.clip, "1", OPT_RUN, RANGE(0, 1e9), ALIAS("clip-grad"), HELP(
        "Scale gradients down to this global norm when they are above it; 0 = off.")),
    ROW(train.nonfinite, "stop", OPT_RUN, ONE_OF(nonfinite_values), HELP(
        "What to do when loss or gradients are not finite: stop with an error before the update, "
        "or skip that update and go on.")),
    ROW(train.nonfinite_limit, "20", OPT_RUN, RANGE(0, 1e9), HELP(
        "With nonfinite = skip: steps in a row that may be skipped before the run stops with an error; 0 = any "
        "number.")),
    ROW(train.log_every, "1", OPT_RUN, RANGE(1, 1e12), ALIAS("log-interval"), HELP(
        "Steps between lines in the logs.")),
    ROW(train.log_zeros, "off", OPT_RUN, FLAG("log-num-zeros-in-grad", "on"), HELP(
        "Log the number of gradients that are exactly zero, as num-zeros. Gradients are copied to the host for it in "
        "every step.")),
    ROW(train.eval_every, "0", OPT_RUN, RANGE(0, 1e12), ALIAS("eval-interval"), HELP(
        "Steps between evaluations on validation data; 0 = never.")),
    ROW(train.eval_batches, "8", OPT_RUN | OPT_ALL, RANGE(0, 1e9), ALIAS("eval-iters"), HELP(
        "Microbatches of one evaluation, or all: every whole one of the validation data. They are the same each time, "
        "so "
        "results compare.")),
    ROW(train.loss_chunk, "0", OPT_RUN, RANGE(0, 1 << 30), AUTO("chosen by the plan"), HELP(
        "Rows of logits held at once in the head; less memory when smaller.")),
    ROW(train.z_loss, "0", OPT_RUN, RANGE(0, 1e3), HELP(
        "Weight of the squared log-sum-exp of the logits, added to the loss; 0 = off.")),
    ROW(train.record_routes, "", OPT_RUN | OPT_LOCAL, HELP(
        "Write the experts that every token goes to into this file.")),
    ROW(train.replay_routes, "", OPT_RUN | OPT_LOCAL, HELP(
        "Send tokens to the experts that another run wrote with train.record_routes; their weights come from this "
        "run's "
        "router. For comparing devices and precisions.")),

    /* ---- [data] --------------------------------------------------------------------------- */
    ROW(data.train, "", OPT_RUN | OPT_WORDS, .alias = {{"data-path", NULL}, {"train-data-path", NULL}}, HELP(
        "Training data: PATH, or WEIGHT PATH WEIGHT PATH ... for a blend. A path is a text file, lines "
        "of JSON (.jsonl), either of them compressed (.gz, .zst), a folder of such files, the prefix of "
        "a .bin/.idx pair, or an llm.c token shard. Text is tokenised once, into the run folder.")),
    ROW(data.valid, "", OPT_RUN | OPT_WORDS, ALIAS("valid-data-path"), HELP(
        "Validation data, written like data.train.")),
    ROW(data.split, "", OPT_RUN, ALIAS("split"), HELP(
        "Cut data.train into training and validation parts by weight: 99,1 keeps 1% for "
        "validation. A third part is left unused.")),
    ROW(data.seed, "1234", OPT_RUN, RANGE(0, MAX_SEED), ALIAS("seed"), HELP(
        "Seed of the sample order.")),
    ROW(data.tokenizer, "bytes", OPT_RUN | OPT_INHERIT, ALIAS("tokenizer-model"), HELP(
        "bytes: each byte is a token, no file needed; or a file: Hugging Face tokenizer.json (BPE), a "
        "tiktoken file, Mistral's tekken.json, or GPT-2's encoder.json beside its vocab.bpe.")),
    ROW(data.token_pattern, "", OPT_RUN | OPT_INHERIT, HELP(
        "Tiktoken files only: how text is split, as the name of a known pattern (gpt2, llama3, qwen2, cl100k, "
        "o200k, ...) or a regular expression. Empty: known from the number of tokens.")),
    ROW(data.token_special, "", OPT_RUN | OPT_INHERIT, HELP(
        "Tiktoken files only: special tokens separated by spaces; their ids follow the file's.")),
    ROW(data.field, "text", OPT_RUN, HELP(
        "Member of each line of JSON that holds the text.")),
    ROW(data.chat, "", OPT_RUN | OPT_INHERIT, HELP(
        "Lines of JSON are conversations ({\"messages\": [{\"role\", \"content\"}]}, or ShareGPT's), written by this "
        "chat template: chatml, qwen2.5, llama2, llama3, mistral, mistral-tekken, gemma, zephyr, deepseek, phi3, "
        "granite; a template file; or auto: what tokenizer_config.json beside the tokenizer holds. They are packed "
        "whole, and none sees another.")),
    ROW(data.loss_roles, "assistant", OPT_RUN | OPT_INHERIT, HELP(
        "Of conversations: whose messages are learned, as a list of system, user, assistant, tool; or all.")),
    ROW(data.eod, "off", OPT_MODEL, HELP(
        "Append an end-of-document token to each document of text. With bytes it is token 256, so "
        "the vocabulary grows to 257.")),
    ROW(data.eod_token, "", OPT_RUN | OPT_INHERIT, HELP(
        "Name of the end-of-document token. Empty: the first of the usual ones (<|endoftext|>, <|end_of_text|>, "
        "</s>, ...) that the tokenizer has.")),
    ROW(data.eod_mask, "off", OPT_RUN, HELP(
        "Attention, recurrent states and positions start anew at each document of a sequence, and the first token of a "
        "document, which nothing before it tells, is no label: Megatron's reset-attention-mask, reset-position-ids and "
        "eod-mask-loss together.")),
    ROW(data.accept_change, "off", OPT_RUN | OPT_LOCAL, HELP(
        "Continue a run although its data files hold other bytes than when the checkpoint was saved. The change is "
        "logged. Without it such a run is refused, since the steps would not be those of one run.")),

    /* ---- [run] ---------------------------------------------------------------------------- */
    ROW(run.dir, "", OPT_RUN | OPT_LOCAL, ALIAS("save"), HELP(
        "Run folder for logs, the resolved config and checkpoints. Empty: nothing is written.")),
    ROW(run.device, "cpu", OPT_RUN, ONE_OF(device_values), HELP(
        "Where the model runs. ref is slow, obvious code in double precision, to check the "
        "others.")),
    ROW(run.threads, "0", OPT_RUN, RANGE(0, 4096), AUTO("all cores"), HELP(
        "CPU threads.")),
    ROW(run.seed, "1", OPT_RUN, RANGE(0, MAX_SEED), ALIAS("seed"), HELP(
        "Seed of initial weights and dropout.")),
    ROW(run.resume, "auto", OPT_RUN | OPT_LOCAL, ONE_OF(resume_values), HELP(
        "auto continues from the newest intact checkpoint of run.dir, and refuses to start when there are only damaged "
        "ones; must also refuses when there is none; never starts over at step 0 and moves earlier checkpoints "
        "aside.")),
    ROW(run.load_step, "-1", OPT_RUN | OPT_LOCAL, RANGE(-1, 1e12), HELP(
        "Continue run.dir (train), or read the run folder that is named (eval, generate), from the checkpoint of this "
        "step; -1 = the newest. Training moves later checkpoints aside.")),
    ROW(run.save_every, "0", OPT_RUN, RANGE(0, 1e12), ALIAS("save-interval"), HELP(
        "Steps between checkpoints; 0 = only at the end or when stopped.")),
    ROW(run.async_save, "off", OPT_RUN, FLAG("async-save", "on"), HELP(
        "Write the checkpoints of run.save_every from a copy in host memory while training goes on: a step waits for "
        "the copy only, and each rank needs memory for the part of the checkpoint that it writes. One is written at a "
        "time; an error ends the run after the next step.")),
    ROW(run.save_ranks, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 1e6), HELP(
        "Ranks that write files of a checkpoint, the first so many; 0 = all, each about the same share. They must see "
        "run.dir as one folder: 1 lets rank 0 write everything where only it does.")),
    ROW(run.keep, "2", OPT_RUN, RANGE(0, 1e6), HELP(
        "Newest checkpoints kept in run.dir; 0 = all.")),
    ROW(run.load, "", OPT_RUN | OPT_LOCAL, ALIAS("load"), HELP(
        "Checkpoint folder to take the weights from when there is nothing to resume.")),
    ROW(run.load_weights, "", OPT_RUN | OPT_LOCAL, HELP(
        "Weights alone, from a checkpoint folder, a run folder or a .safetensors file, when there is nothing to "
        "resume. The model is the configured one; the file's keys may have any layout: a Transformer's, a flat "
        "or a grouped hybrid's, stacked layers, experts in one tensor or in many.")),
    ROW(run.load_allow, "none", OPT_RUN | OPT_LOCAL, ONE_OF(load_allow_values), HELP(
        "What run.load_weights forgives: parameters missing from the file, which keep their fresh values, "
        "tensors of the file that the model does not expect, or both.")),
    ROW(run.minutes, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 1e7), ALIAS("exit-duration-in-mins"), HELP(
        "Save and stop after this many minutes; 0 = no limit.")),
    ROW(run.tensorboard, "on", OPT_RUN, HELP(
        "Write TensorBoard event files into run.dir.")),
    ROW(run.report, "on", OPT_RUN, HELP(
        "Write a self-contained HTML report into run.dir.")),
    ROW(run.sample_tokens, "0", OPT_RUN, RANGE(0, 1e6), HELP(
        "Tokens of text to write at each evaluation and at the end, shown in the report: generate.prompt, continued as "
        "`braid generate` would, as far "
        "as train.seq reaches; the caches are part of the memory plan. 0: none. With several ranks none is written, "
        "which is noted.")),
    ROW(run.quiet, "off", OPT_RUN | OPT_LOCAL, HELP(
        "Print only errors and the final result.")),

    /* ---- [plan] --------------------------------------------------------------------------- */
    ROW(plan.recompute, "", OPT_RUN | OPT_WORDS, ALIAS("recompute-modules"), HELP(
        "Activations to recompute in the backward pass instead of keeping them: a comma list "
        "of slot names, of globs such as joint.*, of Megatron's names (core_attn, layernorm, mlp, "
        "moe, moe_act, shared_experts, mla_up_proj, mhc), or full. NAME:12 means the first 12 layers only. Results "
        "stay bit for "
        "bit the same.")),
    ROW(plan.recompute_granularity, "none", OPT_RUN, ONE_OF(granularity_values),
        ALIAS("recompute-granularity"), HELP(
        "full: as plan.recompute = full, in addition to its list. selective: the list of "
        "plan.recompute, core_attn if that is empty. none: that list alone.")),
    ROW(plan.recompute_block, "off", OPT_RUN, ALIAS("mhc-recompute-layer-num"), HELP(
        "With mhc_streams: keep the streams only in front of every so many layers and recompute those between, "
        "a block at a time, in the backward pass. off, a number of layers, or auto for the number that needs least "
        "memory. Where the pattern is grouped with [ ], the number counts groups, as Megatron's counts Transformer "
        "layers. Results stay bit for bit the same.")),
    ROW(plan.offload, "", OPT_RUN | OPT_WORDS, ALIAS("offload-modules"), HELP(
        "Activations that wait in host memory from their last use in the forward pass to the first in the backward "
        "pass: a comma list of slot names, of globs such as joint.stream or *, of Megatron's names (attn_norm, "
        "mlp_norm, qkv_linear, core_attn, attn_proj, expert_fc1, moe_act). NAME:12 means the first 12 layers only. "
        "What plan.recompute drops is recomputed, not offloaded. Copies run beside computing, as fast as the link to "
        "the "
        "host. Results stay bit for bit the same.")),
    ROW(plan.offload_min, "1048576", OPT_RUN, RANGE(0, 1e15), ALIAS("min-offloaded-tensor-size"), HELP(
        "plan.offload leaves slots of fewer elements on the device.")),
    ROW(plan.fit, "off", OPT_RUN, HELP(
        "Let the plan fit into so much memory of each GPU, such as 80GB or 74GiB; auto: into the GPU that is there. "
        "train.micro_batch, train.loss_chunk, plan.recompute, plan.recompute_block and plan.offload are chosen so that "
        "the predicted time of a step is least, whatever they were set to; train.global_batch stays. The choice is "
        "printed with the options that give it by hand, and a run that is continued with the same budget keeps it. "
        "Times "
        "follow from the stated rates of an H200, so that the same command always chooses the same plan.")),
    ROW(plan.fused_experts, "auto", OPT_RUN, ONE_OF(fused_values), HELP(
        "GEMMs and activations of experts in one op; the backward pass recomputes the activations and only "
        "their inputs are kept. auto: on a GPU. off: in "
        "separate steps, as plan.recompute states, which keep the activations too (moe.act).")),
    ROW(plan.delay_dw, "off", OPT_RUN, HELP(
        "Compute weight gradients in separate, later steps, so that they can overlap other work.")),
    ROW(plan.poison, "off", OPT_RUN, HELP(
        "Debugging: fill dead memory with NaN, so that a step reading it shows.")),
    ROW(plan.random_lanes, "0", OPT_RUN, RANGE(0, MAX_SEED), HELP(
        "Debugging: run steps in a random legal order drawn from this seed; 0 = off.")),
    ROW(plan.graphs, "on", OPT_RUN, HELP(
        "On a GPU, run each plan as one captured graph after its first run. Results are the same bit for bit.")),
    ROW(plan.sync, "off", OPT_RUN, HELP(
        "Debugging: wait for the device after each step, so that an error names its step.")),
    ROW(plan.find_nan, "off", OPT_RUN, HELP(
        "Debugging: check what each step wrote and stop at the first value that is not finite.")),
    ROW(plan.trace, "", OPT_RUN | OPT_LOCAL, HELP(
        "Write a trace of the first steps to this file, for Perfetto or chrome://tracing.")),
    ROW(plan.trace_steps, "3", OPT_RUN, RANGE(1, 10000), HELP(
        "Optimizer steps that plan.trace covers.")),

    /* ---- [optim] -------------------------------------------------------------------------- */
    ROW(optim.offload, "off", OPT_RUN, ONE_OF(optim_offload_values), FLAG("optimizer-cpu-offload", "all"), HELP(
        "Keep the moments of AdamW, or with all the fp32 master weights too, in host memory; the update streams them "
        "through the device in buckets, in both directions at once. A parameter then takes 8 or 12 bytes less "
        "of a GPU. "
        "Results stay bit for bit the same.")),
    ROW(optim.overlap, "on", OPT_RUN, FLAG("overlap-cpu-optimizer-d2h-h2d", "on"), HELP(
        "With optim.offload: the update runs beside the forward pass of the next step, whose layers wait for their own "
        "weights only. off: between the steps. Results are the same bit for bit. Not with FP8 codes of weights.")),
    ROW(optim.state, "fp32", OPT_RUN | OPT_INHERIT, ONE_OF(optim_state_values), HELP(
        "Type in which moments of AdamW are stored. bf16: half the memory, 4 bytes for each parameter less; rounded up "
        "or down at random, so that small changes are kept on average. The draws depend on run.seed, parameter, step "
        "and element alone: every mesh, and a resumed run, has the same. A checkpoint holds the moments as they are; a "
        "run with the other type loads it, and rounds to nearest once if it must.")),

    /* ---- [mhc] ---------------------------------------------------------------------------- */
    ROW(mhc.kernels, "auto", OPT_RUN, ONE_OF(mhc_kernels_values), FLAG("use-fused-mhc", "boundary"), HELP(
        "Kernels of hyper-connections on a GPU. boundary: fused from the combine of a layer to the norm of the next; "
        "separate ones where this GPU or model.hidden has none, and an error where no GPU has any (fp32, other than 4 "
        "streams). primitive: separate kernels. ref: the same without vectors, to compare with. auto: the fastest for "
        "the shape. The start of a run names what runs, and why. Host devices have fused ones only. Needs "
        "mhc_streams.")),
    ROW(mhc.rebuild, "on", OPT_RUN, HELP(
        "Recompute dropped streams for up to 7 layers at once: one kernel, which reads the output of each layer and "
        "no stream twice. off, and with kernels = primitive or ref: a kernel for each layer. Results and memory are "
        "the same. Needs mhc_streams.")),
    /* ---- [gpu] ---------------------------------------------------------------------------- */
    ROW(gpu.precision, "bf16", OPT_RUN, ONE_OF(precision_values), HELP(
        "With run.device=cuda: type of activations and of the weights that layers work with. Master weights, gradients "
        "and "
        "moments are fp32 either way; fp32 is slow and for tests. fp8, on every device: the three products of linear "
        "layers and experts take FP8 codes "
        "(the rest stays as it is: bf16 on a GPU); see docs/FP8.md.")),
    ROW(gpu.fp8_recipe, "blockwise", OPT_RUN, ONE_OF(fp8_recipe_values), HELP(
        "Scales of FP8 codes. blockwise: one for 128 numbers of a row, for 128 x 128 of a weight. tensor: one for a "
        "whole tensor. "
        "mxfp8: one for 32 numbers of a row; GPUs have no fast kernel for it here. Needs gpu.precision = fp8.")),
    ROW(gpu.fp8_grad, "e4m3", OPT_RUN, ONE_OF(fp8_grad_values), HELP(
        "Codes of gradients: e4m3 has more precision, e5m2 more range within a block. Needs gpu.precision = fp8.")),
    ROW(gpu.fp8_keep, "", OPT_RUN, HELP(
        "Linear layers and experts that stay as without FP8: globs over keys of their weights, such as "
        "decoder.layers.0.* or *mlp.experts*. Embedding, "
        "head, router, norms and the mapping of hyper-connections are not FP8 in any case.")),
    ROW(gpu.portable, "off", OPT_RUN, HELP(
        "Use the kernels for compute capability 8.0 even where better ones exist.")),
    ROW(gpu.fast, "off", OPT_RUN, FLAG("fast", "on"), HELP(
        "Allow what is not the same from run to run: the order of sums in the backward pass of attention, and "
        "algorithms of "
        "matrix products chosen by timing them at the start.")),
    ROW(gpu.gemm_table, "", OPT_RUN, HELP(
        "File that stores the algorithm of each GEMM. GEMMs it lacks are timed once and added; runs "
        "that use the same complete file give the same bits. Empty: the library's first choice.")),
    ROW(gpu.index, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 1023), HELP(
        "Which GPU of this machine.")),
    ROW(gpu.sms, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 1024), HELP(
        "Multiprocessors that GEMMs and the backward pass of attention may fill, to leave the others to "
        "communication; 0 = all. Measured results were the same bit for bit; cuBLASLt does not promise that.")),

    /* ---- [parallel] ----------------------------------------------------------------------- */
    ROW(parallel.comm, "auto", OPT_RUN | OPT_LOCAL, ONE_OF(comm_values), HELP(
        "How ranks reach each other. auto: from the launcher (mpirun, srun: mpi; torchrun's variables: tcp), with GPUs "
        "nccl, or ipc where ranks of one host share a GPU; without a launcher self, or threads where parallel.ranks is "
        "given. ipc: processes of one host that read each other's memory. loop: one rank whose messages to itself take "
        "what a link of parallel.loop_gbps would.")),
    ROW(parallel.ranks, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096), AUTO("from the launcher, else 1"), HELP(
        "Ranks of the run. Given without a launcher, they are threads of one process.")),
    ROW(parallel.tp, "1", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), ALIAS("tensor-model-parallel-size"), HELP(
        "Ranks that share every layer: each holds a slice of its weights and a share of the rows of the residual "
        "stream "
        "(sequence parallelism is always on).")),
    ROW(parallel.cp, "1", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), ALIAS("context-parallel-size"), HELP(
        "Ranks that share every sequence: each holds seq / cp of its tokens.")),
    ROW(parallel.cp_comm, "gather", OPT_RUN | OPT_LOCAL, ONE_OF(cp_comm_values), HELP(
        "How attention (*) reaches keys and values of the ranks before. gather: all of them at once. ring: one rank's "
        "at a time, which travels while the one before is used: memory for two ranks' keys instead of all, and "
        "nothing of them is kept for the backward pass. Latent and sparse attention gather.")),
    ROW(parallel.pp, "1", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), ALIAS("pipeline-model-parallel-size"), HELP(
        "Pipeline stages. | in model.pattern cuts the stack; without it, layers are distributed evenly.")),
    ROW(parallel.vpp, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096),
        AUTO("segments of the pattern / parallel.pp; 1 without stages"),
        ALIAS("num-virtual-stages-per-pipeline-rank"), HELP(
        "Virtual stages of each pipeline stage (interleaved schedule).")),
    ROW(parallel.first_layers, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096), AUTO("an even share"), HELP(
        "Layers of the first pipeline stage, as symbols of model.pattern without |; the stages between first and last "
        "share the "
        "rest evenly.")),
    ROW(parallel.last_layers, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096), AUTO("an even share"), HELP(
        "Layers of the last pipeline stage, as parallel.first_layers.")),
    ROW(parallel.pp_group, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096),
        ALIAS("microbatch-group-size-per-virtual-pipeline-stage"), HELP(
        "Microbatches that one virtual stage takes in a row; 0 = parallel.pp.")),
    ROW(parallel.ep, "1", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), ALIAS("expert-model-parallel-size"), HELP(
        "Ranks that share the experts of a layer: each holds experts / ep of them and tokens travel. The ranks "
        "of a stage, ranks / pp in all, are divided anew for experts, so ep may be larger than what shares the "
        "batch.")),
    ROW(parallel.etp, "1", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), ALIAS("expert-tensor-parallel-size"), HELP(
        "Ranks that share each expert of a layer, as parallel.tp does for other layers: each holds expert_ffn / etp of "
        "its channels. The ranks of a stage are etp * ep * (copies of the experts), etp fastest; etp need not be "
        "parallel.tp.")),
    ROW(parallel.overlap, "none", OPT_RUN | OPT_LOCAL, ONE_OF(overlap_values),
        FLAG("overlap-moe-expert-parallel-comm", "ep"), HELP(
        "ep: run the forward pass of one microbatch against the backward pass of another, so that the tokens of "
        "experts "
        "travel while the other computes; with pp > 1 it needs virtual stages. tp: the same, and rows that "
        "tensor-parallel ranks gather and scatter around every layer travel beside the other microbatch, too. dw: put "
        "the experts' weight gradients under the backward pass of the same microbatch's tokens. Results stay bit for "
        "bit the same.")),
    ROW(parallel.zero, "1", OPT_RUN | OPT_LOCAL | OPT_SWITCH, RANGE(0, 3), FLAG("use-distributed-optimizer", "1"), HELP(
        "What ranks that hold copies of a parameter shard among them (ZeRO stages). 0: nothing. 1: optimizer state and "
        "fp32 master weights; each "
        "rank updates its share. 2: also gradients, which are reduced after every microbatch. 3: also weights, which "
        "are gathered for each "
        "unit (bracket group or layer, embedding, head, experts) before use; not with pipeline stages. on and off are "
        "1 and 0.")),
    ROW(parallel.reduce, "fp32", OPT_RUN | OPT_LOCAL, ONE_OF(reduce_values), FLAG("grad-reduce-in-bf16", "bf16"), HELP(
        "How gradients travel between ranks that hold copies of a parameter. bf16: matrices rounded, half the bytes; "
        "sums are taken in fp32.")),
    ROW(parallel.bucket_mb, "40", OPT_RUN | OPT_LOCAL, RANGE(0.001, 1e6), HELP(
        "Gradients reduced in one message, in MB: the scratch memory of a reduction.")),
    ROW(parallel.ep_capacity, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 4096), HELP(
        "Rows one rank can send to another, and rows at the experts of a rank, as multiples of an even share. 0: "
        "enough "
        "for any routing. When a step or an evaluation needs more, buffers grow and it is repeated; nothing is "
        "dropped.")),
    ROW(parallel.ep_fp8, "off", OPT_RUN | OPT_LOCAL, ONE_OF(ep_fp8_values), HELP(
        "Rows that travel to experts of other ranks as FP8 codes (E4M3, a scale for 128 values), half the bytes of "
        "bf16. dispatch: forward, to the experts; both: also their outputs back. Gradients travel as they are.")),
    ROW(parallel.timeout, "600", OPT_RUN | OPT_LOCAL, RANGE(0, 1e6), HELP(
        "Seconds a rank waits for the others before it names those that did not come and stops; 0 = for ever.")),
    ROW(parallel.port, "0", OPT_RUN | OPT_LOCAL, RANGE(0, 65535), HELP(
        "parallel.comm=tcp: the port at which rank 0 listens. 0: MASTER_PORT; where that is taken, as by torchrun's "
        "agent, one of a few that "
        "all ranks work out from it.")),
    ROW(parallel.secret, "", OPT_RUN | OPT_LOCAL, HELP(
        "parallel.comm=tcp: a secret that every rank must know before it is let in, 16 bytes or more: env:NAME for a "
        "variable of the job's "
        "environment, or a file. Empty: anybody who reaches the port may take a rank's place. Messages themselves are "
        "neither encrypted nor "
        "signed.")),
    ROW(parallel.loop_gbps, "400", OPT_RUN | OPT_LOCAL, RANGE(0.001, 1e6), HELP(
        "parallel.comm=loop: GB/s of the link that is played.")),
    ROW(parallel.loop_us, "10", OPT_RUN | OPT_LOCAL, RANGE(0, 1e6), HELP(
        "parallel.comm=loop: microseconds until a message starts to arrive.")),
    ROW(parallel.loop_ranks, "8", OPT_RUN | OPT_LOCAL, RANGE(1, 4096), HELP(
        "parallel.comm=loop: the rank plays one of so many, of whose rows all but one share leave it.")),
    ROW(parallel.loop_axis, "ep", OPT_RUN | OPT_LOCAL, ONE_OF(loop_values), HELP(
        "parallel.comm=loop: what is played. ep: rows that go to experts and back; dp: gradients and weights that "
        "parallel.zero sends between copies; the rank keeps all of them, so memory is that of one rank; tp: rows in "
        "front of and behind every layer, which the rank computes whole, so give it the widths of one rank.")),

    /* ---- [lora] --------------------------------------------------------------------------- */
    ROW(lora.rank, "0", OPT_MODEL, RANGE(0, 65536), HELP(
        "Rank of the adapters: each linear layer that lora.targets names gets y = x W^T + alpha / rank (x A^T) B^T, A "
        "random, "
        "B zero at first. All other parameters are frozen, unless a [group.NAME] has freeze = off. 0: no adapters.")),
    ROW(lora.alpha, "0", OPT_MODEL, RANGE(0, 1e6), AUTO("lora.rank"), HELP(
        "The adapters' output is scaled by alpha / rank.")),
    ROW(lora.targets, "all-linear", OPT_MODEL, HELP(
        "Linear layers that get adapters, separated by commas: all-linear, module names of Hugging Face (q_proj, "
        "v_proj, down_proj) or of "
        "Megatron (linear_qkv, linear_qkv.q, linear_fc2), or globs over checkpoint names (decoder.layers.1*.mlp.*). "
        "Attention of every "
        "kind, MLPs, shared experts, Mamba-2 and gated delta net have them; routers, experts, embedding and head "
        "do not.")),
    /* ---- [generate] ----------------------------------------------------------------------- */
    ROW(generate.prompt, "", OPT_RUN, HELP(
        "Text to continue. Names of special tokens in it become those tokens.")),
    ROW(generate.prompt_file, "", OPT_RUN, HELP(
        "File with the text to continue; - reads standard input.")),
    ROW(generate.stop, "", OPT_RUN, HELP(
        "End a sample where this text appears, which is not printed. Several are separated by |.")),
    ROW(generate.special, "off", OPT_RUN, HELP(
        "Print special tokens by name, and go on after the end-of-document token.")),
    ROW(generate.tokens, "200", OPT_RUN, RANGE(1, 16777216), HELP(
        "Tokens to generate per sample.")),
    ROW(generate.temperature, "0.8", OPT_RUN, RANGE(0, 100), HELP(
        "Divides the logits: lower is safer, 0 always takes the likeliest token.")),
    ROW(generate.top_k, "0", OPT_RUN, RANGE(0, 16e6), HELP(
        "Draw only from the k likeliest tokens; 0 = from all.")),
    ROW(generate.top_p, "1", OPT_RUN | OPT_ABOVE, RANGE(0, 1), HELP(
        "Draw only from the likeliest tokens that together have this probability; 1 = from all.")),
    ROW(generate.seed, "1", OPT_RUN, RANGE(0, MAX_SEED), HELP(
        "Seed of the draws.")),
    ROW(generate.samples, "1", OPT_RUN, RANGE(1, 65536), HELP(
        "Number of independent continuations.")),
    ROW(generate.batch, "1", OPT_RUN, RANGE(1, 4096), HELP(
        "Continuations made side by side, which takes less time for each; their text appears when all of them are "
        "complete. Sums of matrix products may round differently than for one alone.")),
};
/* clang-format on */
const int config_n_options = countof(config_options);
_Static_assert(countof(config_options) <= CONFIG_MAX_OPTIONS, "raise CONFIG_MAX_OPTIONS");
