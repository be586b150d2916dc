/* Advice for a name that is no option: the option other programs call by that name, a plain answer for what is not
 * built, or the nearest name. Reached only when no option has the name, so a row that has become one does no harm. */
#include "config/config_int.h"

#include <ctype.h>
#include <string.h>

/* Names are compared without section, in lower case, - and _ alike. */
struct synonym {
    const char *word, *option[2];
};
/* clang-format off */
static const struct synonym synonyms[] = {
    {"learning_rate", {"train.lr"}},
    {"fsdp", {"parallel.zero"}},
    {"use_torch_fsdp2", {"parallel.zero"}},
    {"use_megatron_fsdp", {"parallel.zero"}},
    {"zero_stage", {"parallel.zero"}},
    {"max_lr", {"train.lr"}},
    {"base_lr", {"train.lr"}},
    {"lr_min", {"train.min_lr"}},
    {"min_learning_rate", {"train.min_lr"}},
    {"batch", {"train.micro_batch", "train.global_batch"}},
    {"batch_size", {"train.micro_batch", "train.global_batch"}},
    {"per_device_train_batch_size", {"train.micro_batch"}},
    {"device_batch_size", {"train.micro_batch"}},
    {"total_batch_size", {"train.global_batch"}},
    {"gradient_accumulation_steps", {"train.global_batch", "train.micro_batch"}},
    {"grad_accum", {"train.global_batch", "train.micro_batch"}},
    {"seq_len", {"train.seq"}},
    {"sequence_length", {"train.seq"}},
    {"block_size", {"train.seq"}},
    {"context_length", {"train.seq"}},
    {"ctx_len", {"train.seq"}},
    {"n_ctx", {"train.seq"}},
    {"n_positions", {"model.max_position", "train.seq"}},
    {"max_position_embeddings", {"model.max_position", "train.seq"}},
    {"max_seq_len", {"train.seq"}},
    {"max_steps", {"train.steps"}},
    {"max_iters", {"train.steps"}},
    {"iters", {"train.steps"}},
    {"iterations", {"train.steps"}},
    {"num_iterations", {"train.steps"}},
    {"num_steps", {"train.steps"}},
    {"n_steps", {"train.steps"}},
    {"warmup_steps", {"train.warmup"}},
    {"warmup_iters", {"train.warmup"}},
    {"lr_warmup", {"train.warmup"}},
    {"lr_warmup_steps", {"train.warmup"}},
    {"lr_scheduler", {"train.schedule"}},
    {"lr_scheduler_type", {"train.schedule"}},
    {"scheduler", {"train.schedule"}},
    {"decay", {"train.weight_decay"}},
    {"wd", {"train.weight_decay"}},
    {"grad_clip", {"train.clip"}},
    {"max_grad_norm", {"train.clip"}},
    {"gradient_clipping", {"train.clip"}},
    {"adam_epsilon", {"train.eps"}},
    {"eval_interval", {"train.eval_every"}},
    {"eval_steps", {"train.eval_every"}},
    {"eval_iters", {"train.eval_batches"}},
    {"log_interval", {"train.log_every"}},
    {"logging_steps", {"train.log_every"}},
    {"n_layer", {"model.layers", "model.pattern"}},
    {"n_layers", {"model.layers", "model.pattern"}},
    {"num_layers", {"model.layers", "model.pattern"}},
    {"num_hidden_layers", {"model.layers", "model.pattern"}},
    {"depth", {"model.layers", "model.pattern"}},
    {"n_embd", {"model.hidden"}},
    {"d_model", {"model.hidden"}},
    {"dim", {"model.hidden"}},
    {"width", {"model.hidden"}},
    {"embed_dim", {"model.hidden"}},
    {"hidden_size", {"model.hidden"}},
    {"n_head", {"model.heads"}},
    {"n_heads", {"model.heads"}},
    {"num_heads", {"model.heads"}},
    {"num_attention_heads", {"model.heads"}},
    {"n_kv_heads", {"model.kv_heads"}},
    {"num_kv_heads", {"model.kv_heads"}},
    {"num_key_value_heads", {"model.kv_heads"}},
    {"group_query_attention", {"model.kv_heads"}},
    {"d_head", {"model.head_dim"}},
    {"d_ff", {"model.ffn"}},
    {"ffn_dim", {"model.ffn"}},
    {"intermediate_size", {"model.ffn"}},
    {"vocab_size", {"model.vocab"}},
    {"activation", {"model.act"}},
    {"hidden_act", {"model.act"}},
    {"rms_norm_eps", {"model.norm_eps"}},
    {"rope_theta", {"model.rope_base"}},
    {"position_embedding_type", {"model.position", "model.rope"}},
    {"learned_positions", {"model.position"}},
    {"normalization", {"model.norm"}},
    {"layernorm", {"model.norm"}},
    {"attention_bias", {"model.attn_bias"}},
    {"sliding_window", {"model.attn_window"}},
    {"window_size", {"model.attn_window"}},
    {"tie_word_embeddings", {"model.tied"}},
    {"n_experts", {"model.experts"}},
    {"num_local_experts", {"model.experts"}},
    {"num_experts_per_tok", {"model.topk"}},
    {"moe_intermediate_size", {"model.expert_ffn"}},
    {"moe_layer_freq", {"model.pattern"}},
    {"multi_latent_attention", {"model.pattern"}},
    {"attn_pdrop", {"model.attention_dropout"}},
    {"lora_r", {"lora.rank"}},
    {"lora_dim", {"lora.rank"}},
    {"lora_alpha", {"lora.alpha"}},
    {"target_modules", {"lora.targets"}},
    {"lora_target_modules", {"lora.targets"}},
    {"data", {"data.train"}},
    {"data_dir", {"data.train"}},
    {"dataset", {"data.train"}},
    {"train_data", {"data.train"}},
    {"train_data_path", {"data.train"}},
    {"input", {"data.train"}},
    {"val", {"data.valid"}},
    {"valid_data_path", {"data.valid"}},
    {"validation", {"data.valid"}},
    {"tokenizer_path", {"data.tokenizer"}},
    {"tokenizer_type", {"data.tokenizer"}},
    {"chat_template", {"data.chat"}},
    {"assistant_only_loss", {"data.loss_roles"}},
    {"train_on_inputs", {"data.loss_roles"}},
    {"reset_attention_mask", {"data.eod_mask"}},
    {"reset_position_ids", {"data.eod_mask"}},
    {"out", {"run.dir"}},
    {"out_dir", {"run.dir"}},
    {"output", {"run.dir"}},
    {"output_dir", {"run.dir"}},
    {"tensorboard_dir", {"run.tensorboard"}},
    {"gpu", {"run.device"}},
    {"cuda", {"run.device"}},
    {"num_threads", {"run.threads"}},
    {"save_steps", {"run.save_every"}},
    {"save_total_limit", {"run.keep"}},
    {"resume_from_checkpoint", {"run.resume"}},
    {"init_from", {"run.load"}},
    {"checkpoint", {"run.load"}},
    {"dtype", {"gpu.precision"}},
    {"bf16", {"gpu.precision"}},
    {"fp8", {"gpu.precision"}},
    {"fp8_format", {"gpu.precision", "gpu.fp8_grad"}},
    {"gradient_checkpointing", {"plan.recompute"}},
    {"activation_checkpointing", {"plan.recompute"}},
    {"cpu_offloading", {"plan.offload"}},
    {"optimizer_cpu_offload", {"optim.offload"}},
    {"offload_optimizer", {"optim.offload"}},
    {"activation_offloading", {"plan.offload"}},
    {"min_offloaded_tensor_size", {"plan.offload_min"}},
    {"cuda_graph_impl", {"plan.graphs"}},
    {"enable_cuda_graph", {"plan.graphs"}},
    {"world_size", {"parallel.ranks"}},
    {"nproc_per_node", {"parallel.ranks"}},
    {"tp_size", {"parallel.tp"}},
    {"tensor_parallel", {"parallel.tp"}},
    {"tensor_parallel_size", {"parallel.tp"}},
    {"context_parallel", {"parallel.cp"}},
    {"pipeline_parallel_size", {"parallel.pp"}},
    {"num_virtual_stages_per_pipeline_rank", {"parallel.vpp"}},
    {"num_layers_per_virtual_pipeline_stage", {"parallel.vpp"}},
    {"expert_parallel_size", {"parallel.ep"}},
    {"expert_tensor_parallel_degree", {"parallel.etp"}},
    {"distributed_backend", {"parallel.comm"}},
    {"distributed_timeout_minutes", {"parallel.timeout"}},
    {"prompt", {"generate.prompt"}},
    {"max_new_tokens", {"generate.tokens"}},
    {"max_tokens", {"generate.tokens"}},
    {"num_samples", {"generate.samples"}},
    {"temp", {"generate.temperature"}},
};

/* What others have and braid does not, and what to use instead. */
struct not_built {
    const char *word, *what, *instead;
};
#define ADAMW "the optimizer is AdamW: train.beta1, train.beta2, train.eps and train.weight_decay set it"
#define TYPES "gpu.precision is bf16, fp32 or fp8, with fp32 master weights and moments"
#define MEMORY "plan.offload moves activations to host memory, and plan.recompute drops and recomputes them"
#define STEPS "train.steps counts optimizer steps; data is reshuffled in each epoch by itself"
#define LOGS "a run folder has metrics.jsonl, TensorBoard events and report.html"
static const struct not_built missing[] = {
    {"fp16", "training in fp16", TYPES},
    {"fp4", "training in fp4", TYPES},
    {"fp4_format", "training in fp4", TYPES},
    {"loss_scale", "loss scaling, which bf16 and fp32 do not need", TYPES},
    {"initial_loss_scale", "loss scaling, which bf16 and fp32 do not need", TYPES},
    {"optimizer", "a choice of optimizers", ADAMW},
    {"optim", "a choice of optimizers", ADAMW},
    {"muon", "the optimizer Muon", ADAMW},
    {"sgd_momentum", "plain SGD", ADAMW},
    {"ema", "an average of weights (EMA)", ADAMW},
    {"cpu_offload", "offloading of weights to host memory", MEMORY},
    {"wandb", "logging to Weights & Biases", LOGS},
    {"wandb_project", "logging to Weights & Biases", LOGS},
    {"epochs", "a count of epochs", STEPS},
    {"num_epochs", "a count of epochs", STEPS},
    {"num_train_epochs", "a count of epochs", STEPS},
    {"train_samples", "a length in samples", "train.steps counts optimizer steps of train.global_batch samples each"},
    {"rampup_batch_size", "a batch that grows", "train.global_batch is the same in every step"},
};

/* Written by habit in other programs' commands, and no option here because it is always so. */
static const char *const always[][2] = {
    {"use_flash_attn", "attention never holds the matrix of scores"},
    {"use_mcore_models", "there is one kind of model"},
    {"transformer_impl", "there is one implementation"},
    {"num_workers", "one thread prepares batches ahead"},
    {"compile", "plans are made at the start of every run"},
    {"overlap_grad_reduce", "buckets of gradients are sent as soon as the plan allows"},
    {"accumulate_allreduce_grads_in_fp32", "gradients are fp32"},
    {"sequence_parallel", "the residual stream is always divided where parallel.tp is above 1"},
    {"deterministic_mode", "runs are deterministic unless gpu.fast is on"},
    {"moe_grouped_gemm", "experts of a layer run as one grouped GEMM"},
    {"moe_token_dispatcher_type", "tokens are exchanged by all-to-all"},
    {"bias_swiglu_fusion", "fused kernels are chosen by themselves"},
    {"is_hybrid_model", "every pattern may mix kinds of layers"},
};

/* clang-format on */

/* ---- looking names up ------------------------------------------------------------------------ */

static bool same_word(const char *a, const char *b)
{
    for (;; a++, b++) {
        char x = *a == '-' ? '_' : (char)tolower((unsigned char)*a),
             y = *b == '-' ? '_' : (char)tolower((unsigned char)*b);
        if (x != y || x == '\0')
            return x == y;
    }
}

static const char *without_section(const char *name)
{
    const char *dot = strchr(name, '.');
    return dot != NULL ? dot + 1 : name;
}

static const struct synonym *find_synonym(const char *key)
{
    for (int i = 0; i < countof(synonyms); i++)
        if (same_word(synonyms[i].word, key))
            return &synonyms[i];
    return NULL;
}

int config_synonym(int i, const char **word, const char **option)
{
    if (i < 0 || i >= countof(synonyms))
        return -1;
    *word = synonyms[i].word;
    option[0] = synonyms[i].option[0];
    option[1] = synonyms[i].option[1];
    return 0;
}

const char *config_not_built(int i) { return i >= 0 && i < countof(missing) ? missing[i].word : NULL; }

/* The option whose key is written alike, in whatever section. */
static const struct option *same_key(const char *key)
{
    for (int i = 0; i < config_n_options; i++)
        if (same_word(option_key(&config_options[i]), key))
            return &config_options[i];
    return NULL;
}

/* Keys of the section in `name`, if there is such a section. */
static const char *near_key(const char *name)
{
    const char *names[CONFIG_MAX_OPTIONS], *key = without_section(name);
    int n = 0;
    for (int i = 0; i < config_n_options; i++)
        if (strncmp(config_options[i].name, name, (size_t)(key - name)) == 0)
            names[n++] = option_key(&config_options[i]);
    const char *near = nearest_name(key, names, n);
    return near != NULL ? near - (key - name) : NULL; /* the whole name: keys are parts of it */
}

static const char *near_name(const char *name, const char *const *more, int n_more)
{
    const char *names[CONFIG_MAX_OPTIONS * (1 + CONFIG_MAX_ALIASES) + 32];
    int n = 0;
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        names[n++] = o->name;
        for (int k = 0; k < CONFIG_MAX_ALIASES && o->alias[k].name != NULL; k++)
            names[n++] = o->alias[k].name;
    }
    for (int i = 0; i < n_more && i < 32; i++)
        names[n++] = more[i];
    const char *near = nearest_name(name, names, n);
    if (near != NULL || strchr(name, '.') != NULL)
        return near;
    n = 0; /* a key without its section */
    for (int i = 0; i < config_n_options; i++)
        names[n++] = option_key(&config_options[i]);
    near = nearest_name(name, names, n);
    for (int i = 0; near != NULL && i < config_n_options; i++)
        if (option_key(&config_options[i]) == near)
            return config_options[i].name;
    return NULL;
}

/* ---- the answer ------------------------------------------------------------------------------ */

static bool say_known(const char *name, struct err *e)
{
    const char *key = without_section(name);
    for (int i = 0; i < countof(missing); i++)
        if (same_word(missing[i].word, key)) {
            const struct err before = *e;
            err_set(e, ST_USAGE, "%s: %s is not built", before.msg, missing[i].what);
            err_hint(e, "%s", missing[i].instead);
            return true;
        }
    for (int i = 0; i < countof(always); i++)
        if (same_word(always[i][0], key)) {
            err_hint(e, "leave it out: %s", always[i][1]);
            return true;
        }
    return false;
}

int suggest_option(const char *name, const char *dashes, const char *const *more, int n_more, struct err *e)
{
    const char *key = without_section(name);
    const struct option *o = same_key(key);
    bool bare = dashes == NULL;
    dashes = bare ? "" : dashes;
    if (o != NULL)
        return err_hint(e, "did you mean %s%s?", dashes, o->name);
    const struct synonym *s = find_synonym(key);
    if (s != NULL && s->option[1] != NULL)
        return err_hint(e, "it is called %s%s here, or %s%s; `braid help %s` explains both", dashes, s->option[0],
                        dashes, s->option[1], key);
    if (s != NULL)
        return err_hint(e, "it is called %s%s here", dashes, s->option[0]);
    if (say_known(name, e))
        return ST_USAGE;
    bool section = false;
    for (int i = 0; i < config_n_sections && key > name; i++)
        section |= strlen(config_sections[i].name) == (size_t)(key - name - 1) &&
                   strncmp(config_sections[i].name, name, (size_t)(key - name - 1)) == 0;
    const char *near = section ? near_key(name) : near_name(name, more, n_more);
    if (near != NULL)
        return err_hint(e, "did you mean %s%s?", dashes, section && bare ? without_section(near) : near);
    return section ? err_hint(e, "`braid help %.*s` lists the options of this section", (int)(key - name - 1), name)
                   : err_hint(e, "`braid help options` lists all options, `braid help WORD` those about something");
}
