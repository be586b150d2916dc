/* Flags of a Megatron run script that are no option here: what each value means. Most ask for what braid does anyway
 * and are accepted; some set an option; the others are refused with the reason. Flags that are options under another
 * name are in the table of options (ALIAS and FLAG in options.c), which is asked first. */
#include "config/config_int.h"

#include <math.h>
#include <string.h>
#include <strings.h>

#define FUSED "fused kernels are chosen by themselves"
#define RUN_DIR "a run folder has metrics.jsonl, TensorBoard events and report.html"
#define FP32 "gradients and master weights are fp32"
#define STATE "optim.state is the type of both moments: fp32 or bf16, which --exp-avg-dtype sets"
#define SAVES "a checkpoint is one folder of safetensors, whatever ranks wrote it"
#define GROUPS                                                                                                         \
    "a [group.NAME] section with match = embedding.*, output_layer.* and a factor lr trains both ends at a rate of "   \
    "their own"
#define ADAMW "the optimizer is AdamW with one learning rate: train.lr, train.beta1, train.beta2, train.weight_decay"
#define NO_FP4 "gpu.precision is bf16, fp32 or fp8"
#define FP8 "gpu.precision = fp8 with gpu.fp8_recipe, fp8_grad and fp8_keep is what there is of FP8"
#define STAGES "stages are cut evenly, by parallel.first_layers and last_layers, or with | in model.pattern"

/* name, value ("*": any, "**": any number of words, NULL: a flag without one), ... */
#define IS(n, v, why)                                                                                                  \
    {                                                                                                                  \
        .name = (n), .value = (v), .text = (why)                                                                       \
    }
#define NOTED(n, v, why)                                                                                               \
    {                                                                                                                  \
        .name = (n), .value = (v), .text = (why), .how = FLAG_NOTED                                                    \
    }
#define NOT(n, v, why)                                                                                                 \
    {                                                                                                                  \
        .name = (n), .value = (v), .text = (why), .how = FLAG_REFUSED                                                  \
    }
#define SETS(n, v, o, to_value)                                                                                        \
    {                                                                                                                  \
        .name = (n), .value = (v), .option = (o), .to = (to_value), .how = FLAG_SETS                                   \
    }
#define AS(n, o, way)                                                                                                  \
    {                                                                                                                  \
        .name = (n), .value = "*", .option = (o), .how = (way)                                                         \
    }
#define IF(n, v, test, why)                                                                                            \
    {                                                                                                                  \
        .name = (n), .value = (v), .text = (why), .how = FLAG_HOLDS, .holds = (test)                                   \
    }
#define MOVES(n, v, o)                                                                                                 \
    {                                                                                                                  \
        .name = (n), .value = (v), .option = (o), .how = FLAG_MOVES                                                    \
    }

static bool kv_heads_given(const struct config *c) { return c->model.kv_heads > 0; }
static bool latent(const struct config *c) { return strpbrk(c->model.pattern, "+DCHW") != NULL; }
static bool compressed(const struct config *c) { return strpbrk(c->model.pattern, "CHW") != NULL; }
static bool sparse(const struct config *c) { return strchr(c->model.pattern, 'D') != NULL; }
static bool not_fp32(const struct config *c) { return c->gpu.precision != CFG_PRECISION_FP32; }
static bool state_fp32(const struct config *c) { return c->optim.state == CFG_OPTIM_STATE_FP32; }
static bool state_bf16(const struct config *c) { return c->optim.state == CFG_OPTIM_STATE_BF16; }
static bool one_stage(const struct config *c) { return c->parallel.pp == 1; }
static bool capacity_given(const struct config *c) { return c->model.router_capacity > 0; }
static bool deterministic(const struct config *c) { return !c->gpu.fast; }
static bool weights_given(const struct config *c) { return c->run.load[0] != '\0' || c->run.load_weights[0] != '\0'; }
static bool vocab_given(const struct config *c) { return c->model.vocab > 0; }
static bool documents(const struct config *c) { return config_separates(c); }

/* clang-format off */
const struct flag config_flags[] = {
    /* ---- the model -------------------------------------------------------------------------- */
    SETS("normalization", "RMSNorm", "model.norm", "rms"),
    SETS("normalization", "LayerNorm", "model.norm", "layer"),
    NOT("normalization", "*", "norms are RMSNorm or LayerNorm (model.norm)"),
    IS("position-embedding-type", "rope", "model.rope is half unless --rotary-interleaved is given"),
    SETS("position-embedding-type", "none", "model.rope", "none"),
    SETS("position-embedding-type", "yarn", "model.rope_scaling", "yarn"),
    SETS("position-embedding-type", "learned_absolute", "model.position", "learned"),
    NOT("position-embedding-type", "*", "positions are rotary (model.rope), learned (model.position) or none"),
    IS("use-rotary-position-embeddings", NULL, "model.rope is half unless --rotary-interleaved is given"),
    IS("no-position-embedding", NULL, "there are no learned positions"),
    IS("rope-type", "rope", "model.rope is half unless --rotary-interleaved is given"),
    SETS("rope-type", "yarn", "model.rope_scaling", "yarn"),
    IS("rotary-seq-len-interpolation-factor", "1", "model.rope_scaling stretches rotary frequencies"),
    NOT("rotary-seq-len-interpolation-factor", "*", "--model.rope_scaling=linear and --model.rope_factor say the same"),
    IF("group-query-attention", NULL, kv_heads_given, "the number of groups is needed: --num-query-groups"),
    IF("multi-latent-attention", NULL, latent,
        "latent attention is + in --hybrid-layer-pattern, such as '[+-]x3[+E]x58'"),
    IF("experimental-attention-variant", "dsa", sparse,
        "sparse attention is D in --hybrid-layer-pattern, such as '[D-]x3[DE]x58'"),
    IF("experimental-attention-variant", "dsv4_hybrid", compressed,
        "compressed attention is C, H and W in --hybrid-layer-pattern, such as '[WE]x2[CE][HE]'"),
    NOT("experimental-attention-variant", "*",
        "--hybrid-layer-pattern says which layers there are: D, C, H, W, G, M, + or *"),
    IF("csa-compress-ratios", "*", compressed,
        "the symbols of --hybrid-layer-pattern say it: C is 4 (model.compress_rate_csa), H 128 "
        "(model.compress_rate_hca), W 0"),
    NOT("csa-dense-mode", NULL,
        "a model.dsa_indexer_topk of train.seq / 4 or more reads all entries, and the indexer is trained beside it"),
    NOTED("dsa-kernel-backend", "*", "there is one implementation for each device"),
    NOTED("dsa-indexer-rotate-activation", "*",
        "a rotation of all indexer queries and keys leaves their products as they are"),
    NOT("apply-residual-connection-post-layernorm", NULL, "norms stand in front of each layer"),
    NOT("init-method-xavier-uniform", NULL, "weights are initialised from a normal distribution: model.init_std"),
    SETS("openai-gelu", NULL, "model.act", "gelu"),
    SETS("softmax-type", "vanilla", "model.attn_sink", "none"),
    SETS("softmax-type", "off-by-one", "model.attn_sink", "off_by_one"),
    SETS("softmax-type", "learnable", "model.attn_sink", "learnable"),
    NOT("window-size", "*", "--model.attn_window says how many keys a query sees, itself included: 128 for '(127, 0)'"),
    IS("is-hybrid-model", NULL, "every pattern may mix kinds of layers"),
    IS("spec", "**", "the pattern says which layers there are"),
    IS("use-mcore-models", NULL, "there is one kind of model"),
    IS("transformer-impl", "*", "there is one implementation"),
    /* ---- experts ---------------------------------------------------------------------------- */
    IS("moe-layer-freq", "1", "--num-layers with --num-experts makes every MLP a mixture of experts"),
    NOT("moe-layer-freq", "*", "--hybrid-layer-pattern says which layers are which, such as '[*-]x3[*E]x58'"),
    IS("moe-grouped-gemm", NULL, "experts of a layer run as one grouped GEMM"),
    IS("moe-use-legacy-grouped-gemm", NULL, "experts of a layer run as one grouped GEMM"),
    IS("moe-token-dispatcher-type", "alltoall", "tokens are exchanged by all-to-all"),
    NOTED("moe-token-dispatcher-type", "*", "tokens are exchanged by all-to-all; results are the same"),
    NOTED("moe-enable-deepep", NULL, "tokens are exchanged by all-to-all; results are the same"),
    NOTED("moe-flex-dispatcher-backend", "*", "tokens are exchanged by all-to-all; results are the same"),
    SETS("cp-comm-type", "p2p", "parallel.cp_comm", "ring"),
    SETS("cp-comm-type", "all_gather", "parallel.cp_comm", "gather"),
    NOT("cp-comm-type", "*", "keys and values are gathered or travel in a ring (parallel.cp_comm), in all layers"),
    SETS("moe-dispatch-fwd-dtype", "bf16", "parallel.ep_fp8", "off"),
    SETS("moe-dispatch-fwd-dtype", "mxfp8", "parallel.ep_fp8", "dispatch"),
    IS("moe-combine-bwd-dtype", "bf16", "gradients travel as they are"),
    NOT("moe-combine-bwd-dtype", "*", "gradients of experts travel as they are; parallel.ep_fp8 is for forward"),
    IS("moe-single-grouped-weight", NULL, "experts of a layer are one tensor"),
    IS("moe-single-grouped-bias", NULL, "biases of the experts of a layer are one tensor"),
    IS("moe-permute-fusion", NULL, FUSED),
    IS("moe-router-fusion", NULL, FUSED),
    IS("moe-router-dtype", "fp32", "routers compute in fp32"),
    NOT("moe-router-dtype", "*", "routers compute in fp32"),
    IF("moe-pad-expert-input-to-capacity", NULL, capacity_given,
        "there is no capacity without --moe-expert-capacity-factor"),
    NOT("moe-apply-probs-on-input", NULL, "probabilities weigh what experts put out, which is another function"),
    IS("moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff is model.aux_loss"),
    MOVES("moe-router-load-balancing-type", "seq_aux_loss", "model.seq_aux_loss"),
    MOVES("moe-router-load-balancing-type", "global_aux_loss", "model.global_aux_loss"),
    MOVES("moe-router-load-balancing-type", "none", NULL),
    NOT("moe-router-load-balancing-type", "**",
        "tokens are balanced by losses (model.aux_loss, seq_aux_loss, global_aux_loss) or "
        "model.router_bias; several losses are given by these names"),
    NOTED("moe-shared-expert-overlap", NULL,
        "the schedule decides what runs beside the exchange; results are the same"),
    NOTED("moe-per-layer-logging", NULL, RUN_DIR),
    /* ---- precision and optimizer ------------------------------------------------------------ */
    IF("bf16", NULL, not_fp32, "gpu.precision is bf16 unless fp8 or fp32 is asked for"),
    NOT("fp16", NULL, "gpu.precision is bf16, fp32 or fp8; fp16 would need loss scaling"),
    SETS("fp8-format", "e4m3", "gpu.precision", "fp8"),
    NOT("fp8-format", "*", "for E5M2 gradients give --gpu.precision=fp8 --gpu.fp8_grad=e5m2"),
    SETS("fp8-recipe", "blockwise", "gpu.fp8_recipe", "blockwise"),
    SETS("fp8-recipe", "tensorwise", "gpu.fp8_recipe", "tensor"),
    SETS("fp8-recipe", "mxfp8", "gpu.fp8_recipe", "mxfp8"),
    NOT("fp8-recipe", "*", "scales are those of the step itself: blockwise, tensorwise or mxfp8"),
    NOTED("fp8-param-gather", NULL, "weights are gathered as codes, without a word, but with mxfp8 in fp32"),
    NOT("fp8-*", "**", FP8),
    NOT("fp4-*", "**", NO_FP4),
    IS("attention-softmax-in-fp32", NULL, "softmax is computed in fp32"),
    IS("accumulate-allreduce-grads-in-fp32", NULL, FP32),
    IS("main-grads-dtype", "fp32", FP32),
    NOT("main-grads-dtype", "*", FP32),
    IS("main-params-dtype", "fp32", FP32),
    NOT("main-params-dtype", "*", FP32),
    SETS("exp-avg-dtype", "fp32", "optim.state", "fp32"),
    SETS("exp-avg-dtype", "bf16", "optim.state", "bf16"),
    NOT("exp-avg-dtype", "*", STATE),
    IF("exp-avg-sq-dtype", "fp32", state_fp32, STATE),
    IF("exp-avg-sq-dtype", "bf16", state_bf16, STATE),
    NOT("exp-avg-sq-dtype", "*", STATE),
    IS("use-precision-aware-optimizer", NULL, "optim.state is the type of both moments"),
    IS("optimizer", "adam", ADAMW),
    NOT("optimizer", "*", ADAMW),
    NOT("decoupled-lr", "*", GROUPS),
    NOT("decoupled-min-lr", "*", GROUPS),
    IS("weight-decay-incr-style", "constant", "weight decay is the same in every step"),
    NOT("weight-decay-incr-style", "*", "weight decay is the same in every step"),
    IS("lr-warmup-init", "0", "the warm-up starts at 0"),
    NOT("lr-warmup-init", "*", "the warm-up starts at 0"),
    AS("train-samples", "train.steps", FLAG_SAMPLES),
    AS("lr-warmup-samples", "train.warmup", FLAG_SAMPLES),
    AS("lr-decay-samples", "train.decay_steps", FLAG_SAMPLES),
    AS("lr-wsd-decay-samples", "train.wsd_steps", FLAG_SAMPLES),
    AS("lr-warmup-fraction", "train.warmup", FLAG_FRACTION),
    NOT("rampup-batch-size", "**", "train.global_batch is the same in every step"),
    IS("override-opt_param-scheduler", NULL, "the schedule is the one that is given"),
    IS("calculate-per-token-loss", NULL, "losses are means over all labels of a batch"),
    IS("check-for-nan-in-loss-and-grad", NULL, "train.nonfinite=stop is the default"),
    NOT("no-check-for-nan-in-loss-and-grad", NULL,
        "what is not finite is found before the update; train.nonfinite=skip goes on"),
    /* ---- kernels ---------------------------------------------------------------------------- */
    IS("use-flash-attn", NULL, "attention never holds the matrix of scores"),
    IS("attention-backend", "*", "attention never holds the matrix of scores"),
    IS("use-transformer-engine-op-fuser", NULL, FUSED),
    IS("cross-entropy-loss-fusion", NULL, "the head never holds all logits"),
    IS("cross-entropy-fusion-impl", "*", "the head never holds all logits"),
    IS("no-masked-softmax-fusion", NULL, FUSED),
    IS("no-bias-gelu-fusion", NULL, FUSED),
    IS("no-bias-swiglu-fusion", NULL, FUSED),
    IS("no-bias-dropout-fusion", NULL, FUSED),
    IS("no-rope-fusion", NULL, FUSED),
    IS("no-gradient-accumulation-fusion", NULL, FUSED),
    IS("bias-swiglu-fusion", NULL, FUSED),
    IF("deterministic-mode", NULL, deterministic, "gpu.fast is on, which allows what is not the same from run to run"),
    SETS("cuda-graph-impl", "none", "plan.graphs", "off"),
    IS("cuda-graph-impl", "*", "plan.graphs is on unless it is switched off"),
    IS("enable-cuda-graph", NULL, "plan.graphs is on unless it is switched off"),
    IS("te-rng-tracker", NULL, "random numbers are functions of seed and place"),
    IS("use-te-rng-tracker", NULL, "random numbers are functions of seed and place"),
    /* ---- memory ----------------------------------------------------------------------------- */
    SETS("recompute-activations", NULL, "plan.recompute_granularity", "selective"),
    IS("fine-grained-activation-offloading", NULL, "plan.offload says what is offloaded"),
    NOTED("recompute-method", "*", "plan.recompute=full recomputes every layer; NAME:12 the first 12"),
    NOTED("recompute-num-layers", "*", "plan.recompute=full recomputes every layer; NAME:12 the first 12"),
    IS("distribute-saved-activations", NULL, "rows of the residual stream are divided over parallel.tp"),
    IS("manual-gc", NULL, "there is no garbage collector"),
    IS("manual-gc-interval", "*", "there is no garbage collector"),
    IS("empty-unused-memory-level", "*", "memory is allocated once"),
    /* ---- many ranks ------------------------------------------------------------------------- */
    IS("sequence-parallel", NULL, "the residual stream is always divided where parallel.tp is above 1"),
    NOTED("tp-comm-overlap", NULL,
          "parallel.overlap = tp hides rows behind another microbatch, for the memory of one more; results are the "
          "same"),
    IS("no-async-tensor-model-parallel-allreduce", NULL, "it changes when messages travel, not what is computed"),
    IS("use-megatron-fsdp", NULL, "--data-parallel-sharding-strategy says what is sharded"),
    SETS("use-torch-fsdp2", NULL, "parallel.zero", "3"),
    SETS("data-parallel-sharding-strategy", "no_shard", "parallel.zero", "0"),
    SETS("data-parallel-sharding-strategy", "optim", "parallel.zero", "1"),
    SETS("data-parallel-sharding-strategy", "optim_grads", "parallel.zero", "2"),
    SETS("data-parallel-sharding-strategy", "optim_grads_params", "parallel.zero", "3"),
    NOT("data-parallel-sharding-strategy", "*", "known: no_shard, optim, optim_grads, optim_grads_params"),
    IS("overlap-grad-reduce", NULL, "buckets of gradients are sent as soon as the plan allows"),
    IS("overlap-param-gather", NULL, "buckets of parameters are gathered as soon as the plan allows"),
    NOTED("ddp-bucket-size", "*", "parallel.bucket_mb is the size of a bucket in MB"),
    SETS("delay-wgrad-compute", NULL, "plan.delay_dw", "on"),
    SETS("overlap-dispatch-backward-with-experts-wgrad", NULL, "parallel.overlap", "dw"),
    AS("decoder-first-pipeline-num-layers", "parallel.first_layers", FLAG_LAYERS),
    AS("decoder-last-pipeline-num-layers", "parallel.last_layers", FLAG_LAYERS),
    IF("account-for-embedding-in-pipeline-split", NULL, one_stage, STAGES),
    IF("account-for-loss-in-pipeline-split", NULL, one_stage, STAGES),
    NOT("num-layers-per-virtual-pipeline-stage", "*",
        "parallel.vpp is the number of virtual stages of each stage, whatever layers they have"),
    NOT("pipeline-model-parallel-layout", "*", "| in --hybrid-layer-pattern cuts stages"),
    IS("distributed-backend", "*", "parallel.comm=auto takes NCCL between GPUs and what the launcher offers elsewhere"),
    AS("distributed-timeout-minutes", "parallel.timeout", FLAG_MINUTES),
    IS("local-rank", "*", "the launcher's variables say it"),
    IS("disable-gloo-process-groups", NULL, "there are none"),
    NOTED("high-priority-stream-groups", "**", "streams have no priorities that could be set"),
    /* ---- data ------------------------------------------------------------------------------- */
    IS("tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model is the path of its tokenizer.json"),
    IS("tokenizer-type", "TikTokenizer", "--tokenizer-model is the path of its file"),
    IF("tokenizer-type", "NullTokenizer", vocab_given, "the number of tokens is needed: --vocab-size"),
    NOT("tokenizer-type", "*",
        "a tokenizer is a tokenizer.json, a tiktoken file or GPT-2's encoder.json beside its vocab.bpe"),
    NOT("tiktoken-pattern", "*", "data.token_pattern names the pattern or is one"),
    NOT("vocab-file", "*", "--tokenizer-model takes GPT-2's encoder.json beside its vocab.bpe"),
    NOT("merge-file", "*", "--tokenizer-model takes GPT-2's encoder.json beside its vocab.bpe"),
    NOT("mock-data", NULL, "data must be given: --data-path"),
    NOT("per-split-data-args-path", "*", "data.train and data.valid say the same, blends included"),
    IS("data-cache-path", "*", "sample i is a function of i: there is nothing to cache"),
    IS("num-workers", "*", "one thread prepares batches ahead"),
    IS("num-dataset-builder-threads", "*", "there is no index to build"),
    IS("no-mmap-bin-files", NULL, "token files are mapped; what is read is the same"),
    IS("no-create-attention-mask-in-dataloader", NULL, "there is no mask in memory"),
    IS("dataloader-type", "single", "samples are taken in one order"),
    NOT("dataloader-type", "*", "samples are taken in one order, of which a resumed run continues the rest"),
    SETS("reset-attention-mask", NULL, "data.eod_mask", "on"),
    IF("reset-position-ids", NULL, documents,
        "documents are kept apart by --reset-attention-mask, which starts positions anew, too"),
    IF("eod-mask-loss", NULL, documents,
        "documents are kept apart by --reset-attention-mask, which leaves out their first labels, too"),
    /* ---- checkpoints ------------------------------------------------------------------------ */
    IS("dist-ckpt-strictness", "raise_all", "what is missing or left over is an error"),
    IS("dist-ckpt-strictness", "raise_unexpected", "what is missing is an error"),
    IS("dist-ckpt-strictness", "assume_ok_unexpected", "what is missing is an error"),
    NOT("dist-ckpt-strictness", "*",
        "loading never passes over anything; --run.load_weights with --run.load_allow names what to forgive"),
    NOTED("ckpt-format", "*", SAVES "; tools/megatron_dist.py makes torch_dist of it"),
    IS("use-dist-ckpt", NULL, SAVES),
    IS("dist-ckpt-optim-fully-reshardable", NULL, SAVES),
    IS("auto-detect-ckpt-format", NULL, SAVES),
    IS("ckpt-fully-parallel-save", NULL, SAVES),
    IS("ckpt-fully-parallel-load", NULL, SAVES),
    IS("ckpt-assume-constant-structure", NULL, SAVES),
    IS("use-persistent-ckpt-worker", NULL, SAVES),
    IF("finetune", NULL, weights_given, "the weights are needed: --load"),
    IS("no-load-optim", NULL, "run.load takes weights only; a resumed run takes all"),
    IS("no-load-rng", NULL, "random numbers are functions of seed and place"),
    IS("no-save-rng", NULL, "random numbers are functions of seed and place"),
    NOT("no-save-optim", NULL, "a checkpoint is whole; braid export writes weights alone"),
    IS("use-checkpoint-args", NULL, "a checkpoint knows its model"),
    SETS("exit-on-missing-checkpoint", NULL, "run.resume", "must"),
    NOTED("save-retain-interval", "*", "run.keep says how many checkpoints are kept"),
    IS("exit-signal-handler", NULL, "SIGTERM and SIGINT save and stop"),
    NOT("exit-interval", "*", "train.steps is the last step; run.minutes limits the time"),
    NOT("skip-train", NULL, "braid eval evaluates a checkpoint"),
    /* ---- logs ------------------------------------------------------------------------------- */
    NOTED("tensorboard-dir", "*", RUN_DIR),
    NOTED("wandb-project", "*", RUN_DIR),
    NOTED("wandb-exp-name", "*", RUN_DIR),
    NOTED("wandb-save-dir", "*", RUN_DIR),
    NOTED("wandb-entity", "*", RUN_DIR),
    IS("tensorboard-log-interval", "*", "train.log_every is the interval of every log"),
    IS("tensorboard-queue-size", "*", "events are written as they come"),
    IS("log-throughput", NULL, "tokens per second are logged"),
    IS("log-progress", NULL, "progress is logged"),
    IS("log-timers-to-tensorboard", NULL, "times are logged"),
    IS("log-memory-to-tensorboard", NULL, "braid plan prints the memory, to the byte"),
    IS("log-memory-interval", "*", "braid plan prints the memory, to the byte"),
    IS("log-validation-ppl-to-tensorboard", NULL, "validation losses are logged"),
    IS("log-learning-rate-to-tensorboard", NULL, "learning rates are logged"),
    IS("log-batch-size-to-tensorboard", NULL, "batches have one size"),
    IS("log-world-size-to-tensorboard", NULL, "the number of ranks is logged"),
    IS("log-loss-scale-to-tensorboard", NULL, "there is no loss scale"),
    NOTED("log-params-norm", NULL, "norms of parameters are not logged"),
    IS("timing-log-level", "*", "plan.trace records every step"),
    IS("timing-log-option", "*", "plan.trace records every step"),
    IS("logging-level", "*", "run.quiet is the one level"),
    IS("rerun-mode", "*", "runs are deterministic; braid verify repeats a step elsewhere"),
    NOTED("profile", NULL, "plan.trace=FILE records the first steps"),
    NOTED("use-pytorch-profiler", NULL, "plan.trace=FILE records the first steps"),
    IS("profile-step-start", "*", "plan.trace=FILE records the first steps"),
    IS("profile-step-end", "*", "plan.trace_steps says how many steps are recorded"),
    IS("profile-ranks", "**", "plan.trace=FILE records the first steps"),
};
/* clang-format on */
const int config_n_flags = countof(config_flags);

/* ---- finding rows ---------------------------------------------------------------------------- */

static bool same_name(const char *row, const char *name)
{
    size_t n = strlen(row);
    return row[n - 1] == '*' ? strncmp(row, name, n - 1) == 0 : strcmp(row, name) == 0;
}

const struct flag *flag_find(const char *name)
{
    for (int i = 0; i < config_n_flags; i++)
        if (same_name(config_flags[i].name, name))
            return &config_flags[i];
    return NULL;
}

static bool same_value(const char *row, const char *value)
{
    double a, b;
    if (row == NULL || row[0] == '*' || strcasecmp(row, value) == 0)
        return true;
    return parse_f64(row, &a) && parse_f64(value, &b) && fabs(a - b) <= 0;
}

const struct flag *flag_row(const struct flag *first, const char *value)
{
    const struct flag *end = config_flags + config_n_flags;
    for (const struct flag *f = first; f < end && strcmp(f->name, first->name) == 0; f++)
        if (same_value(f->value, value ? value : ""))
            return f;
    return NULL;
}

bool flag_takes_words(const struct flag *first)
{
    const struct flag *end = config_flags + config_n_flags;
    for (const struct flag *f = first; f < end && strcmp(f->name, first->name) == 0; f++)
        if (f->value != NULL && strcmp(f->value, "**") == 0)
            return true;
    return false;
}

int flag_refuse(const struct flag *f, const char *name, const char *value, struct err *e)
{
    bool has = value != NULL && value[0] != '\0';
    err_set(e, ST_USAGE, "--%.64s%s%.64s is not in braid, because %s", name, has ? " " : "", has ? value : "", f->text);
    return err_hint(e, "docs/MEGATRON.md lists Megatron's flags and what they mean here");
}

/* ---- what is known only when all flags are read ---------------------------------------------- */

static int set_number(struct config *c, const char *option, double value, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%.17g", value);
    return option_set(c, option_find(option), text, (struct config_origin){.source = CFG_FROM_COMMAND}, e);
}

/* The loss coefficient of the flag of that name belongs to another loss. */
static int move_loss(struct config *c, const struct flag *f, struct err *e)
{
    double given = c->model.aux_loss;
    if (config_source_of(c, "model.aux_loss").source != CFG_FROM_COMMAND)
        return ST_OK;
    TRY(set_number(c, "model.aux_loss", 0, e));
    if (f->option == NULL)
        return ST_OK;
    if (config_source_of(c, f->option).source == CFG_FROM_COMMAND)
        return err_set(e, ST_USAGE, "%s is given twice on the command line, once as --moe-aux-loss-coeff with --%s %s",
                       f->option, f->name, f->value);
    return set_number(c, f->option, given, e);
}

static int take_samples(struct config *c, const struct flag *f, double samples, struct err *e)
{
    if (c->train.global_batch > 0)
        return set_number(c, f->option, floor(samples / (double)c->train.global_batch), e);
    err_set(e, ST_USAGE, "--%s counts samples, and how many a step has is not known", f->name);
    return err_hint(e, "give --global-batch-size, or %s in steps", f->option);
}

static int resolve_one(struct config *c, const struct flag_use *u, struct err *e)
{
    const struct flag *f = u->flag;
    double v = 0;
    if (f->how == FLAG_HOLDS)
        return f->holds(c) ? ST_OK : flag_refuse(f, f->name, u->value, e);
    if (f->how == FLAG_MOVES)
        return move_loss(c, f, e);
    if (!parse_f64(u->value, &v) || !(v >= 0) || v > 9e15 || (f->how == FLAG_FRACTION && v > 1))
        return err_set(e, ST_USAGE, "--%s %.64s is no number it can be", f->name, u->value);
    if (f->how == FLAG_SAMPLES)
        return take_samples(c, f, v, e);
    if (f->how == FLAG_FRACTION)
        return set_number(c, f->option,
                          floor(v * (double)(c->train.decay_steps > 0 ? c->train.decay_steps : c->train.steps)), e);
    if (f->how == FLAG_LAYERS) /* a Transformer's layer is two symbols of the pattern */
        return set_number(c, f->option, v * (config_source_of(c, "model.pattern").source == CFG_FROM_DEFAULT ? 2 : 1),
                          e);
    return set_number(c, f->option, v * 60, e); /* FLAG_MINUTES */
}

int flags_resolve(struct config *c, const struct flag_use *uses, int n, struct err *e)
{
    for (int round = 0; round < 2; round++) /* fractions are of what samples said */
        for (int i = 0; i < n; i++)
            if ((uses[i].flag->how == FLAG_FRACTION || uses[i].flag->how == FLAG_HOLDS) == (round == 1))
                TRY(resolve_one(c, &uses[i], e));
    /* --save and --load of one folder: a run continues there by itself. */
    bool given = config_source_of(c, "run.load").source == CFG_FROM_COMMAND;
    if (given && c->run.load[0] != '\0' && strcmp(c->run.load, c->run.dir) == 0)
        TRY(option_set(c, option_find("run.load"), "", (struct config_origin){.source = CFG_FROM_DEFAULT}, e));
    return ST_OK;
}

/* ---- documentation --------------------------------------------------------------------------- */

static void cell(struct buf *out, const char *text)
{
    for (; *text; text++)
        buf_addf(out, *text == '|' || *text == '*' ? "\\%c" : "%c", *text);
}

void config_write_flags(struct buf *out)
{
    static const char *const outcome[] = {[FLAG_TAKEN] = "accepted",
                                          [FLAG_NOTED] = "accepted with a note",
                                          [FLAG_REFUSED] = "refused",
                                          [FLAG_HOLDS] = "accepted if",
                                          [FLAG_SETS] = "sets",
                                          [FLAG_SAMPLES] = "sets, divided by the batch",
                                          [FLAG_FRACTION] = "sets, as a share of the steps",
                                          [FLAG_MINUTES] = "sets, in seconds",
                                          [FLAG_LAYERS] = "sets",
                                          [FLAG_MOVES] = "moves --moe-aux-loss-coeff"};
    buf_add(out, "| flag | value | outcome | because |\n|---|---|---|---|\n");
    for (int i = 0; i < config_n_flags; i++) {
        const struct flag *f = &config_flags[i];
        bool rest = i > 0 && strcmp(f[-1].name, f->name) == 0;
        buf_addf(out, "| `--%s` | ", f->name);
        cell(out, f->value == NULL ? "" : f->value[0] != '*' ? f->value : rest ? "any other" : "any");
        buf_addf(out, " | %s", outcome[f->how]);
        if (f->option != NULL)
            buf_addf(out, " `%s%s%s`", f->option, f->to ? " = " : "", f->to ? f->to : "");
        else if (f->how == FLAG_MOVES)
            buf_add(out, " to nowhere");
        buf_add(out, " | ");
        cell(out, f->text ? f->text : "");
        buf_add(out, " |\n");
    }
}
