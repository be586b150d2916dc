/* Options: one struct of plain values, one table row per option (options.c), one text form (INI).
 *
 * A config is filled in this order; later sources override earlier ones:
 *
 *     config_init         every option gets its default
 *     config_parse_args   the INI file named on the command line, then --section.key overrides
 *     config_load_saved   on resume, eval, generate: the model as the checkpoint defines it
 *     config_finish       0 = "automatic" values become numbers; cross-field rules are checked
 *
 * Afterwards the struct is read directly: c->model.hidden. To add an option: add the field here, a
 * row in options.c, the name in tests/config/options.txt, and a rule in rules.c if it can clash. */
#ifndef BRAID_CONFIG_H
#define BRAID_CONFIG_H

#include "base/base.h"
#include "kind/transports.h"

/* Values of the enumerated options: C name and text are one list, so they cannot drift apart. */
#define CONFIG_ACT(X)                                                                                                  \
    X(CFG_ACT_SWIGLU, "swiglu")                                                                                        \
    X(CFG_ACT_GEGLU, "geglu")                                                                                          \
    X(CFG_ACT_QUICK_GEGLU, "quick_geglu")                                                                              \
    X(CFG_ACT_GELU, "gelu")                                                                                            \
    X(CFG_ACT_QUICK_GELU, "quick_gelu")                                                                                \
    X(CFG_ACT_RELU2, "relu2")                                                                                          \
    X(CFG_ACT_SILU, "silu")
#define CONFIG_SINK(X)                                                                                                 \
    X(CFG_SINK_NONE, "none")                                                                                           \
    X(CFG_SINK_OFF_BY_ONE, "off_by_one")                                                                               \
    X(CFG_SINK_LEARNABLE, "learnable")
#define CONFIG_NORM(X) X(CFG_NORM_RMS, "rms") X(CFG_NORM_LAYER, "layer")
#define CONFIG_QK_NORM(X) X(CFG_QK_NORM_OFF, "off") X(CFG_QK_NORM_HEAD, "on") X(CFG_QK_NORM_ROW, "row")
#define CONFIG_POSITION(X) X(CFG_POSITION_ROPE, "rope") X(CFG_POSITION_LEARNED, "learned")
#define CONFIG_ROPE(X) X(CFG_ROPE_NONE, "none") X(CFG_ROPE_HALF, "half") X(CFG_ROPE_INTERLEAVED, "interleaved")
#define CONFIG_ROPE_SCALING(X)                                                                                         \
    X(CFG_ROPE_SCALING_NONE, "none")                                                                                   \
    X(CFG_ROPE_SCALING_LINEAR, "linear")                                                                               \
    X(CFG_ROPE_SCALING_LLAMA3, "llama3")                                                                               \
    X(CFG_ROPE_SCALING_YARN, "yarn")
#define CONFIG_ROUTER(X)                                                                                               \
    X(CFG_ROUTER_SOFTMAX, "softmax")                                                                                   \
    X(CFG_ROUTER_SIGMOID, "sigmoid")                                                                                   \
    X(CFG_ROUTER_SQRTSOFTPLUS, "sqrtsoftplus")
#define CONFIG_DROP(X) X(CFG_DROP_PROBS, "probs") X(CFG_DROP_LATE, "position")
#define CONFIG_MAMBA_NORM(X) X(CFG_MAMBA_NORM_GROUP, "group") X(CFG_MAMBA_NORM_WHOLE, "whole")
#define CONFIG_MHC(X) X(CFG_MHC_D, "d") X(CFG_MHC_S, "s")
/* In the order of enum mhc_kernels. */
#define CONFIG_MHC_KERNELS(X)                                                                                          \
    X(CFG_MHC_KERNELS_AUTO, "auto")                                                                                    \
    X(CFG_MHC_KERNELS_BOUNDARY, "boundary") X(CFG_MHC_KERNELS_PRIMITIVE, "primitive") X(CFG_MHC_KERNELS_REF, "ref")
#define CONFIG_OPTIM_STATE(X) X(CFG_OPTIM_STATE_FP32, "fp32") X(CFG_OPTIM_STATE_BF16, "bf16")
#define CONFIG_OPTIM_OFFLOAD(X)                                                                                        \
    X(CFG_OPTIM_OFFLOAD_OFF, "off") X(CFG_OPTIM_OFFLOAD_MOMENTS, "moments") X(CFG_OPTIM_OFFLOAD_ALL, "all")
#define CONFIG_GRANULARITY(X)                                                                                          \
    X(CFG_GRANULARITY_NONE, "none") X(CFG_GRANULARITY_SELECTIVE, "selective") X(CFG_GRANULARITY_FULL, "full")
#define CONFIG_INIT_SCALE(X)                                                                                           \
    X(CFG_INIT_SCALE_AUTO, "auto")                                                                                     \
    X(CFG_INIT_SCALE_GPT, "gpt")                                                                                       \
    X(CFG_INIT_SCALE_HYBRID, "hybrid")                                                                                 \
    X(CFG_INIT_SCALE_NONE, "none")
#define CONFIG_SCHEDULE(X)                                                                                             \
    X(CFG_SCHEDULE_CONSTANT, "constant")                                                                               \
    X(CFG_SCHEDULE_LINEAR, "linear")                                                                                   \
    X(CFG_SCHEDULE_COSINE, "cosine")                                                                                   \
    X(CFG_SCHEDULE_WSD, "wsd")
#define CONFIG_WSD_STYLE(X)                                                                                            \
    X(CFG_WSD_LINEAR, "linear")                                                                                        \
    X(CFG_WSD_COSINE, "cosine")                                                                                        \
    X(CFG_WSD_EXPONENTIAL, "exponential")                                                                              \
    X(CFG_WSD_MINUS_SQRT, "minus_sqrt")
#define CONFIG_NONFINITE(X) X(CFG_NONFINITE_STOP, "stop") X(CFG_NONFINITE_SKIP, "skip")
#define CONFIG_DEVICE(X) X(CFG_DEVICE_CPU, "cpu") X(CFG_DEVICE_REF, "ref") X(CFG_DEVICE_CUDA, "cuda")
#define CONFIG_TRANSPORT(X, id, name) X(CFG_COMM_##id, #name)
#define CONFIG_COMM(X) X(CFG_COMM_AUTO, "auto") TRANSPORTS(CONFIG_TRANSPORT, X)
#define CONFIG_OVERLAP(X)                                                                                              \
    X(CFG_OVERLAP_NONE, "none") X(CFG_OVERLAP_EP, "ep") X(CFG_OVERLAP_DW, "dw") X(CFG_OVERLAP_TP, "tp")
#define CONFIG_REDUCE(X) X(CFG_REDUCE_FP32, "fp32") X(CFG_REDUCE_BF16, "bf16")
#define CONFIG_CP_COMM(X) X(CFG_CP_COMM_GATHER, "gather") X(CFG_CP_COMM_RING, "ring")
#define CONFIG_EP_FP8(X) X(CFG_EP_FP8_OFF, "off") X(CFG_EP_FP8_DISPATCH, "dispatch") X(CFG_EP_FP8_BOTH, "both")
#define CONFIG_LOOP(X) X(CFG_LOOP_EP, "ep") X(CFG_LOOP_DP, "dp") X(CFG_LOOP_TP, "tp")
#define CONFIG_FUSED(X) X(CFG_FUSED_AUTO, "auto") X(CFG_FUSED_ON, "on") X(CFG_FUSED_OFF, "off")
#define CONFIG_PRECISION(X) X(CFG_PRECISION_BF16, "bf16") X(CFG_PRECISION_FP32, "fp32") X(CFG_PRECISION_FP8, "fp8")
#define CONFIG_FP8_RECIPE(X) X(CFG_FP8_BLOCKWISE, "blockwise") X(CFG_FP8_TENSOR, "tensor") X(CFG_FP8_MX, "mxfp8")
#define CONFIG_FP8_GRAD(X) X(CFG_FP8_GRAD_E4M3, "e4m3") X(CFG_FP8_GRAD_E5M2, "e5m2")
#define CONFIG_RESUME(X) X(CFG_RESUME_AUTO, "auto") X(CFG_RESUME_NEVER, "never") X(CFG_RESUME_MUST, "must")

#define CONFIG_LOAD_ALLOW(X)                                                                                           \
    X(CFG_LOAD_ALLOW_NONE, "none")                                                                                     \
    X(CFG_LOAD_ALLOW_MISSING, "missing") X(CFG_LOAD_ALLOW_UNEXPECTED, "unexpected") X(CFG_LOAD_ALLOW_BOTH, "both")

#define CONFIG_FREEZE(X) X(CFG_FREEZE_AUTO, "auto") X(CFG_FREEZE_ON, "on") X(CFG_FREEZE_OFF, "off")

#define CONFIG_ENUM_ID(id, text) id,
enum config_act { CONFIG_ACT(CONFIG_ENUM_ID) };
enum config_sink { CONFIG_SINK(CONFIG_ENUM_ID) };
enum config_norm { CONFIG_NORM(CONFIG_ENUM_ID) };
enum config_qk_norm { CONFIG_QK_NORM(CONFIG_ENUM_ID) };
enum config_position { CONFIG_POSITION(CONFIG_ENUM_ID) };
enum config_rope { CONFIG_ROPE(CONFIG_ENUM_ID) };
enum config_rope_scaling { CONFIG_ROPE_SCALING(CONFIG_ENUM_ID) };
enum config_router { CONFIG_ROUTER(CONFIG_ENUM_ID) };
enum config_drop { CONFIG_DROP(CONFIG_ENUM_ID) };
enum config_mamba_norm { CONFIG_MAMBA_NORM(CONFIG_ENUM_ID) };
enum config_mhc { CONFIG_MHC(CONFIG_ENUM_ID) };
enum config_mhc_kernels { CONFIG_MHC_KERNELS(CONFIG_ENUM_ID) };
enum config_optim_offload { CONFIG_OPTIM_OFFLOAD(CONFIG_ENUM_ID) };
enum config_optim_state { CONFIG_OPTIM_STATE(CONFIG_ENUM_ID) };
enum config_granularity { CONFIG_GRANULARITY(CONFIG_ENUM_ID) };
enum config_init_scale { CONFIG_INIT_SCALE(CONFIG_ENUM_ID) };
enum config_schedule { CONFIG_SCHEDULE(CONFIG_ENUM_ID) };
enum config_wsd_style { CONFIG_WSD_STYLE(CONFIG_ENUM_ID) };
enum config_nonfinite { CONFIG_NONFINITE(CONFIG_ENUM_ID) };
enum config_device { CONFIG_DEVICE(CONFIG_ENUM_ID) };
enum config_comm { CONFIG_COMM(CONFIG_ENUM_ID) };
enum config_overlap { CONFIG_OVERLAP(CONFIG_ENUM_ID) };
enum config_reduce { CONFIG_REDUCE(CONFIG_ENUM_ID) };
enum config_cp_comm { CONFIG_CP_COMM(CONFIG_ENUM_ID) };
enum config_ep_fp8 { CONFIG_EP_FP8(CONFIG_ENUM_ID) };
enum config_loop { CONFIG_LOOP(CONFIG_ENUM_ID) };
enum config_fused { CONFIG_FUSED(CONFIG_ENUM_ID) };
enum config_precision { CONFIG_PRECISION(CONFIG_ENUM_ID) };
enum config_fp8_recipe { CONFIG_FP8_RECIPE(CONFIG_ENUM_ID) };
enum config_fp8_grad { CONFIG_FP8_GRAD(CONFIG_ENUM_ID) };
enum config_resume { CONFIG_RESUME(CONFIG_ENUM_ID) };
enum config_load_allow { CONFIG_LOAD_ALLOW(CONFIG_ENUM_ID) };
enum config_freeze { CONFIG_FREEZE(CONFIG_ENUM_ID) };

/* The type of a field decides the type of its option: bool, int64_t, double, const char *, and int
 * for one of the enums above. Strings are never NULL and live as long as the config. Fields marked
 * (auto) accept 0 and hold the derived number after config_finish. */
struct config_model {
    const char *pattern; /* derived when layers and a ratio are given instead */
    int64_t layers;
    double attn_ratio, mlp_ratio;
    const char *mtp_pattern; /* already part of the pattern after config_finish */
    int64_t mtp_layers;
    int64_t hidden, heads, kv_heads, head_dim, ffn; /* kv_heads, head_dim, ffn: (auto) */
    int64_t vocab, vocab_multiple;                  /* vocab 0: set by config_set_auto once the tokenizer is known */
    int act;                                        /* enum config_act */
    double act_clamp, act_alpha, act_offset;
    int norm; /* enum config_norm */
    double norm_eps;
    bool norm_zero_centered;
    int qk_norm; /* enum config_qk_norm */
    bool attn_gate;
    int64_t attn_window, attn_window_skip;
    int attn_sink;        /* enum config_sink */
    double softmax_scale; /* (auto) */
    bool qkv_bias, attn_bias, mlp_bias, bias;
    int position;         /* enum config_position */
    int64_t max_position; /* (auto) */
    int rope;             /* enum config_rope */
    double rope_base, rope_percent;
    int rope_scaling; /* enum config_rope_scaling */
    double rope_factor;
    int64_t rope_original;
    double rope_low, rope_high, rope_beta_fast, rope_beta_slow, rope_mscale, rope_mscale_all_dim;
    bool rope_truncate;
    int64_t no_rope_freq;
    bool tied;
    double init_std, embed_init_std; /* embed_init_std: (auto) */
    int init_scale;                  /* enum config_init_scale */
    double dropout, attention_dropout;
    bool fp32_residual;
    double mtp_scale;
    int64_t mla_q_rank, mla_kv_rank, mla_nope, mla_rope, mla_v;
    double mla_norm_eps, mla_softmax_scale;
    /* sparse attention (D) */
    int64_t dsa_indexer_n_heads, dsa_indexer_head_dim, dsa_indexer_topk;
    int64_t dsa_indexer_topk_freq, dsa_indexer_skip_topk_offset;
    double dsa_indexer_loss_coeff, dsa_indexer_k_norm_epsilon;
    int64_t csa_window_size, compress_rate_csa, compress_rate_hca, o_groups, o_lora_rank;
    double csa_compress_rotary_base;
    bool dsa_indexer_use_sparse_loss, dsa_indexer_rope_interleaved, dsa_indexer_scoring_relu, dsa_dense_warmup;
    /* manifold hyper-connections */
    bool mhc;            /* short for mhc_streams = 4 */
    int64_t mhc_streams; /* 0: plain residual */
    int mhc_profile;     /* enum config_mhc */
    int64_t mhc_iterations;
    double mhc_gating;
    bool mhc_bf16_coef, mhc_norm_eps_inside;
    double mhc_norm_eps; /* (auto) */
    /* gated delta net; heads: (auto) */
    int64_t gdn_key_heads, gdn_value_heads, gdn_key_dim, gdn_value_dim, gdn_conv, gdn_chunk;
    /* Mamba-2 */
    int64_t mamba_heads, mamba_head_dim, mamba_state, mamba_groups, mamba_conv, mamba_chunk; /* heads, groups: (auto) */
    double mamba_dt_min, mamba_dt_max;
    int mamba_norm; /* enum config_mamba_norm */
    /* mixture of experts */
    int64_t experts, topk, expert_ffn, shared_ffn; /* expert_ffn: (auto) */
    bool shared_gate, expert_bias;
    int64_t glu_interleave;
    int router_score; /* enum config_router */
    bool router_pre_softmax, router_norm;
    int64_t router_groups, router_group_topk, router_group_best; /* router_group_best: (auto) */
    double router_scale;
    bool router_bias, router_linear_bias;
    double router_bias_rate;
    int64_t router_hash_layers;
    double aux_loss, seq_aux_loss, global_aux_loss, router_z_loss;
    double router_jitter, router_capacity;
    int router_drop; /* enum config_drop */
    bool router_force_balance;
};

/* Rows of the embedding and of the head. */
static inline int64_t padded_vocab(const struct config_model *m) { return round_up(m->vocab, m->vocab_multiple); }

struct config_train {
    int64_t steps, seq, micro_batch, global_batch; /* global_batch: (auto) */
    double lr, min_lr;
    int64_t warmup;
    int schedule;                   /* enum config_schedule */
    int64_t decay_steps, wsd_steps; /* (auto); wsd_steps stays 0 unless the schedule is wsd */
    int wsd_style;                  /* enum config_wsd_style */
    double beta1, beta2, eps, weight_decay, clip;
    int nonfinite; /* enum config_nonfinite */
    int64_t nonfinite_limit;
    bool log_zeros;
    int64_t log_every, eval_every, eval_batches;
    int64_t loss_chunk; /* 0 = chosen by the head when the plan is made */
    double z_loss;
    const char *record_routes, *replay_routes; /* files, or empty */
};

struct config_data {
    const char *train, *valid, *split;
    int64_t seed;
    const char *tokenizer, *token_pattern, *token_special, *field, *eod_token;
    const char *chat, *loss_roles; /* chat: empty where text is not conversations */
    bool eod, eod_mask, accept_change;
};

struct config_run {
    const char *dir;
    int device;      /* enum config_device */
    int64_t threads; /* (auto) */
    int64_t seed;
    int resume; /* enum config_resume */
    int64_t load_step, save_every, save_ranks, keep;
    const char *load, *load_weights;
    int load_allow; /* enum config_load_allow */
    double minutes;
    bool async_save, tensorboard, report, quiet;
    int64_t sample_tokens;
};

struct config_plan {
    const char *recompute;
    int recompute_granularity;   /* enum config_granularity */
    const char *recompute_block; /* "off", "auto" or a number */
    const char *offload;
    const char *fit;     /* "off", "auto" or an amount of memory */
    int64_t offload_min; /* elements */
    int fused_experts;   /* enum config_fused */
    bool delay_dw, poison;
    int64_t random_lanes;
    bool sync, find_nan, graphs;
    const char *trace;
    int64_t trace_steps;
};

struct config_optim {
    int offload; /* enum config_optim_offload */
    int state;   /* enum config_optim_state */
    bool overlap;
};

struct config_mhc_run {
    int kernels;  /* enum config_mhc_kernels */
    bool rebuild; /* several layers in one replay */
};

struct config_parallel {
    int comm;                                /* enum config_comm */
    int64_t ranks, tp, cp, pp, vpp, ep, etp; /* ranks, vpp: (auto) */
    int cp_comm;                             /* enum config_cp_comm */
    int overlap;                             /* enum config_overlap */
    int64_t pp_group, first_layers, last_layers;
    int64_t zero; /* 0 .. 3 */
    int reduce;   /* enum config_reduce */
    int ep_fp8;   /* enum config_ep_fp8 */
    double bucket_mb, ep_capacity, timeout, loop_gbps, loop_us;
    int loop_axis; /* enum config_loop */
    int64_t loop_ranks, port;
    const char *secret;
};
struct config_gpu {
    int precision; /* enum config_precision */
    bool portable, fast;
    int64_t index, sms;
    const char *gemm_table;
    int fp8_recipe, fp8_grad; /* enum config_fp8_recipe, config_fp8_grad */
    const char *fp8_keep;     /* globs over keys of parameters, separated by commas */
};

struct config_lora {
    int64_t rank; /* 0: no adapters */
    double alpha; /* (auto) */
    const char *targets;
};

struct config_generate {
    const char *prompt, *prompt_file, *stop;
    bool special;
    int64_t tokens;
    double temperature;
    int64_t top_k;
    double top_p;
    int64_t seed, samples, batch;
};

/* [group.NAME]: parameters that are trained in their own way. Where globs of several groups match a parameter, the last
 * of these groups has it. */
enum { CONFIG_MAX_GROUPS = 32, CONFIG_GROUP_NAME = 32 };
struct config_group {
    const char *name;
    const char *match;   /* globs over checkpoint names of parameters, separated by commas or spaces */
    double lr;           /* factor of the learning rate */
    double weight_decay; /* below 0: as without the group */
    int freeze;          /* enum config_freeze; auto: trained, but for the base weights of LoRA */
};

/* Where an option's value came from. */
enum config_source {
    CFG_FROM_DEFAULT,
    CFG_FROM_FILE,       /* label:line */
    CFG_FROM_COMMAND,    /* the command line */
    CFG_FROM_CHECKPOINT, /* label */
    CFG_FROM_AUTO,       /* derived from other options by config_finish or config_set_auto */
};
struct config_origin {
    enum config_source source;
    const char *label; /* file or checkpoint; NULL otherwise */
    int line;
};

struct config {
    struct config_model model;
    struct config_train train;
    struct config_data data;
    struct config_run run;
    struct config_plan plan;
    struct config_optim optim;
    struct config_mhc_run mhc;
    struct config_gpu gpu;
    struct config_parallel parallel;
    struct config_lora lora;
    struct config_generate generate;
    struct config_group group[CONFIG_MAX_GROUPS]; /* in the order in which they were first named */
    int n_groups;
    /* private */
    struct arena strings;
    struct config_origin *origin; /* one per option */
};

/* Do documents within a sequence see nothing of each other? Conversations never do. */
static inline bool config_separates(const struct config *c) { return c->data.eod_mask || c->data.chat[0] != '\0'; }

/* On an error the config holds a mixture of old and new values but may always be released. */
int config_init(struct config *c, struct err *e);
void config_release(struct config *c);

/* INI: [section], key = value, comments with # or ; at the start of a line or after a space. An
 * indented line continues the value above it. A string may be written "in quotes" with the escapes
 * \n \t \r \" \\ \xHH; quoted pieces on continued lines join without a space. 1 MiB at most. */
int config_read_ini(struct config *c, const char *path, struct err *e);
int config_read_ini_text(struct config *c, const char *text, size_t len, const char *label, struct err *e);

/* One option by name, as if given on the command line (label NULL) or in the file `label`. */
int config_set(struct config *c, const char *name, const char *value, const char *label, struct err *e);
int config_set_i64(struct config *c, const char *name, int64_t value, struct err *e);
/* A value only found at run time for an option left at 0 (model.vocab from the tokenizer). */
int config_set_auto(struct config *c, const char *name, int64_t value, struct err *e);

/* The group of a parameter with this checkpoint name: an index, or -1. */
int config_group_of(const struct config *c, const char *key);
/* Does one glob of a list, separated by commas or spaces, match? */
bool config_globs_match(const char *globs, const char *name);

/* What the command line holds beside options. */
struct config_extra { /* a "--name value" that belongs to one command, such as --out */
    const char *name, *help;
    const char *alone; /* the value of "--name" by itself; NULL: one must follow */
    const char *value; /* NULL until given; points into argv, or is alone */
};
struct config_args {
    struct config_extra *extra; /* in: may be NULL */
    int n_extra;
    const char *ini; /* out: the INI file that was read, or NULL */
    const char *positional[16];
    int n_positional;
    bool help;                /* --help or -h was given: nothing was read or set */
    const char *help_section; /* from --help=section, or NULL */
    struct config_note {
        const char *flag, *text;
    } notes[32]; /* flags of Megatron's that were accepted and have no effect here */
    int n_notes;
};
/* argv holds the words after the command's name: [FILE.ini] [--section.key=value | --section.key
 * value | --megatron-name value | --megatron-flag]... A bool alone means on. "--" ends options. An
 * option given twice is an error. The first positional word that ends in .ini is read as a file,
 * wherever it stands, before any override is applied. */
int config_parse_args(struct config *c, int argc, char *const *argv, struct config_args *args, struct err *e);

/* Take options from a checkpoint's saved INI text, or from the config.ini of a run that has no checkpoint. Options that
 * define the model come from there; if the user set one of them to another value, that is ST_CONFLICT naming both, and
 * c is unchanged. Call it before config_finish. changes (may be NULL) gets a line per option the user overrides. */
enum config_saved_mode {
    CFG_SAVED_MODEL, /* eval, generate: the model, its tokenizer and sequence length */
    CFG_SAVED_ALL,   /* resume: also every other option that the user did not set */
};
int config_load_saved(struct config *c, const char *text, size_t len, const char *label, enum config_saved_mode mode,
                      struct buf *changes, struct err *e);

/* Megatron's old ratio arguments as a pattern: M with this share of '*' and of '-' spread evenly. False
 * if layers or the ratios are out of range. */
enum { CONFIG_RATIO_LAYERS = 4096 };
bool config_ratio_pattern(int64_t layers, double attn, double mlp, char out[CONFIG_RATIO_LAYERS + 1]);

/* A layer pattern with its repeats ([*-]x32, (M-)x3, Mx4) written out; config_finish does it to the options. */
enum { CONFIG_PATTERN_MAX = 4096 };
int config_expand_pattern(const char *text, char out[CONFIG_PATTERN_MAX + 1], struct err *e);

/* Derive the automatic values and check all rules. May be called again after a change. */
int config_finish(struct config *c, struct err *e);
/* An amount of memory: "80" or "80GB" (of 1e9 bytes), "74GiB", "900MiB"; also MB, TB, TiB. */
bool config_memory(const char *text, double *bytes);

/* Options that the user set and that nothing reads: a line for each, with the reason; returns how many. After
 * config_finish. */
int config_unused(const struct config *c, struct buf *out);
/* Options that one of the globs matches and the command line gave: a name a line; returns how many. */
int config_given(const struct config *c, const char *globs, struct buf *out);
/* Does anything in a model of these options read this one? After config_finish. */
bool config_reads(const struct config *c, const char *name);

/* INI text with every option; it reads back to the same config. Model values are written resolved;
 * run values that were derived are written as 0, so that they follow when a resume changes what
 * they were derived from. with_sources adds a comment to each line. Check the buffer when done. */
void config_write(const struct config *c, struct buf *out, bool with_sources);
void config_help(struct buf *out, const char *section); /* for a terminal; NULL: all sections */
/* One line for each option that a glob of the list (separated by spaces) matches. */
void config_help_list(struct buf *out, const char *globs);
/* The options that a word names: "train.lr", "lr", "learning_rate", or a part of names and texts. ST_USAGE if there is
 * none. */
int config_help_word(struct buf *out, const char *word, struct err *e);
bool config_has_section(const char *section);
void config_write_docs(struct buf *out);  /* docs/options.md */
void config_write_flags(struct buf *out); /* the table of flags in docs/MEGATRON.md */

/* Row i of the names that other programs give to options (option[1] may be NULL; -1: no such row), and of the names
 * that are answered with "not built" (NULL: no such row). */
int config_synonym(int i, const char **word, const char **option);
const char *config_not_built(int i);

int config_option_count(void);
const char *config_option_name(int i);
/* NULL (value) or CFG_FROM_DEFAULT (origin) for an unknown name. The value is unquoted text. */
const char *config_value_text(const struct config *c, const char *name, struct buf *out);
struct config_origin config_source_of(const struct config *c, const char *name);
/* "demo.ini:3", "command line", "default", "checkpoint X", "auto"; returns out. */
const char *config_source_text(const struct config *c, const char *name, char *out, size_t size);

#endif
