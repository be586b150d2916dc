/* The flags of Megatron's run scripts: each of the usual ones with what it does here. docs/MEGATRON.md holds the table
 * of the others; `test_megatron --write docs/MEGATRON.md` renews it. */
#include "support.h"

#include "config/config_int.h"

enum { MAX_WORDS = 8 };

/* Words of a script, and the option they set, "" (accepted, sets nothing), or a part of the answer
 * if they are refused. */
struct usual {
    const char *words, *option, *value, *refused;
};
#define SETS(words, option, value)                                                                                     \
    {                                                                                                                  \
        words, option, value, NULL                                                                                     \
    }
#define TAKEN(words)                                                                                                   \
    {                                                                                                                  \
        words, "", "", NULL                                                                                            \
    }
#define REFUSED(words, why)                                                                                            \
    {                                                                                                                  \
        words, NULL, NULL, why                                                                                         \
    }

/* What pretraining scripts of GPT, mixture-of-experts and Mamba models give, one row per flag. */
static const struct usual usual[] = {
    SETS("--num-layers 4", "model.layers", "4"),
    SETS("--hidden-size 64", "model.hidden", "64"),
    SETS("--ffn-hidden-size 96", "model.ffn", "96"),
    SETS("--num-attention-heads 4", "model.heads", "4"),
    SETS("--group-query-attention --num-query-groups 2", "model.kv_heads", "2"),
    SETS("--kv-channels 16", "model.head_dim", "16"),
    SETS("--seq-length 128", "train.seq", "128"),
    SETS("--max-position-embeddings 128", "model.max_position", "128"),
    TAKEN("--position-embedding-type rope"),
    SETS("--rotary-base 500000", "model.rope_base", "500000"),
    SETS("--rotary-percent 0.5", "model.rope_percent", "0.5"),
    TAKEN("--use-rotary-position-embeddings"),
    TAKEN("--no-position-embedding"),
    SETS("--swiglu", "model.act", "swiglu"),
    SETS("--squared-relu", "model.act", "relu2"),
    SETS("--normalization RMSNorm", "model.norm", "rms"),
    SETS("--normalization LayerNorm", "model.norm", "layer"),
    SETS("--norm-epsilon 1e-6", "model.norm_eps", "1e-06"),
    SETS("--qk-layernorm", "model.qk_norm", "on"),
    SETS("--disable-bias-linear", "model.bias", "off"),
    SETS("--add-qkv-bias", "model.qkv_bias", "on"),
    SETS("--untie-embeddings-and-output-weights", "model.tied", "off"),
    SETS("--init-method-std 0.01", "model.init_std", "0.01"),
    SETS("--attention-dropout 0.1", "model.attention_dropout", "0.1"),
    SETS("--hidden-dropout 0.1", "model.dropout", "0.1"),
    SETS("--fp32-residual-connection", "model.fp32_residual", "on"),
    SETS("--make-vocab-size-divisible-by 128", "model.vocab_multiple", "128"),
    SETS("--hybrid-layer-pattern M-M*", "model.pattern", "M-M*"),
    SETS("--mamba-state-dim 64", "model.mamba_state", "64"),
    TAKEN("--use-mcore-models"),
    TAKEN("--transformer-impl transformer_engine"),
    TAKEN("--attention-backend fused"),
    SETS("--micro-batch-size 2", "train.micro_batch", "2"),
    SETS("--global-batch-size 8", "train.global_batch", "8"),
    SETS("--train-iters 100", "train.steps", "100"),
    SETS("--train-samples 800 --global-batch-size 8", "train.steps", "100"),
    SETS("--lr 3e-4", "train.lr", "0.0003"),
    SETS("--min-lr 3e-5", "train.min_lr", "3e-05"),
    SETS("--lr-decay-style cosine", "train.schedule", "cosine"),
    SETS("--lr-decay-iters 90", "train.decay_steps", "90"),
    SETS("--lr-warmup-iters 10", "train.warmup", "10"),
    SETS("--lr-warmup-fraction .01 --train-iters 500", "train.warmup", "5"),
    SETS("--lr-warmup-samples 80 --global-batch-size 8", "train.warmup", "10"),
    SETS("--weight-decay 0.1", "train.weight_decay", "0.1"),
    SETS("--adam-beta1 0.9", "train.beta1", "0.9"),
    SETS("--adam-beta2 0.95", "train.beta2", "0.95"),
    SETS("--clip-grad 1.0", "train.clip", "1"),
    SETS("--bf16", "gpu.precision", "bf16"),
    SETS("--bf16 --fp8-format e4m3", "gpu.precision", "fp8"),
    SETS("--fp8-format e4m3 --fp8-recipe tensorwise", "gpu.fp8_recipe", "tensor"),
    SETS("--fp8-format e4m3 --fp8-param-gather", "gpu.precision", "fp8"),
    SETS("--seed 7", "data.seed", "7"),
    SETS("--data-path 1 a 2 b", "data.train", "1 a 2 b"),
    SETS("--split 99,1,0", "data.split", "99,1,0"),
    TAKEN("--data-cache-path cache"),
    TAKEN("--tokenizer-type HuggingFaceTokenizer"),
    SETS("--tokenizer-type NullTokenizer --vocab-size 1000", "model.vocab", "1000"),
    SETS("--tokenizer-model tokenizer.json", "data.tokenizer", "tokenizer.json"),
    TAKEN("--num-workers 2"),
    SETS("--save runs/a", "run.dir", "runs/a"),
    SETS("--load runs/b", "run.load", "runs/b"),
    SETS("--save-interval 10", "run.save_every", "10"),
    SETS("--async-save", "run.async_save", "on"),
    SETS("--log-interval 5", "train.log_every", "5"),
    SETS("--eval-interval 50", "train.eval_every", "50"),
    SETS("--eval-iters 4", "train.eval_batches", "4"),
    TAKEN("--tensorboard-dir tb"),
    TAKEN("--log-throughput"),
    TAKEN("--ckpt-format torch_dist"),
    TAKEN("--dist-ckpt-strictness raise_unexpected"),
    TAKEN("--no-load-optim"),
    TAKEN("--no-load-rng"),
    SETS("--exit-duration-in-mins 230", "run.minutes", "230"),
    SETS("--distributed-timeout-minutes 30", "parallel.timeout", "1800"),
    SETS("--tensor-model-parallel-size 2", "parallel.tp", "2"),
    SETS("--context-parallel-size 2", "parallel.cp", "2"),
    SETS("--expert-tensor-parallel-size 2", "parallel.etp", "2"),
    SETS("--moe-dispatch-fwd-dtype mxfp8", "parallel.ep_fp8", "dispatch"),
    SETS("--pipeline-model-parallel-size 2", "parallel.pp", "2"),
    SETS("--num-virtual-stages-per-pipeline-rank 2", "parallel.vpp", "2"),
    SETS("--decoder-first-pipeline-num-layers 3 --hybrid-layer-pattern M-M*", "parallel.first_layers", "3"),
    SETS("--decoder-last-pipeline-num-layers 3 --num-layers 8", "parallel.last_layers", "6"),
    TAKEN("--account-for-embedding-in-pipeline-split"),
    TAKEN("--sequence-parallel"),
    SETS("--use-distributed-optimizer", "parallel.zero", "1"),
    TAKEN("--overlap-grad-reduce"),
    TAKEN("--overlap-param-gather"),
    TAKEN("--accumulate-allreduce-grads-in-fp32"),
    SETS("--recompute-granularity full", "plan.recompute_granularity", "full"),
    SETS("--recompute-activations", "plan.recompute_granularity", "selective"),
    TAKEN("--cross-entropy-loss-fusion"),
    TAKEN("--use-transformer-engine-op-fuser"),
    SETS("--num-experts 16", "model.experts", "16"),
    SETS("--expert-model-parallel-size 4", "parallel.ep", "4"),
    SETS("--moe-router-topk 4", "model.topk", "4"),
    SETS("--moe-ffn-hidden-size 32", "model.expert_ffn", "32"),
    SETS("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2", "model.aux_loss", "0.01"),
    SETS("--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss", "model.seq_aux_loss", "0.01"),
    SETS("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", "model.aux_loss", "0"),
    TAKEN("--moe-grouped-gemm"),
    TAKEN("--moe-token-dispatcher-type alltoall"),
    TAKEN("--moe-permute-fusion"),
    TAKEN("--moe-router-dtype fp32"),
    TAKEN("--moe-single-grouped-weight"),
    TAKEN("--moe-single-grouped-bias"),
    SETS("--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.5", "model.router_capacity", "1.5"),
    SETS("--overlap-moe-expert-parallel-comm", "parallel.overlap", "ep"),
    SETS("--overlap-dispatch-backward-with-experts-wgrad", "parallel.overlap", "dw"),
    SETS("--delay-wgrad-compute", "plan.delay_dw", "on"),
    SETS("--mtp-num-layers 1", "model.mtp_layers", "1"),
    SETS("--multi-latent-attention --hybrid-layer-pattern [+-][+E]", "model.pattern", "[+-][+E]"),
    SETS("--position-embedding-type none", "model.rope", "none"),
    SETS("--position-embedding-type learned_absolute", "model.position", "learned"),
    SETS("--reset-attention-mask --reset-position-ids --eod-mask-loss", "data.eod_mask", "on"),
    TAKEN("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"),
};

/* Known and refused, each with its reason. */
static const struct usual refused[] = {
    REFUSED("--normalization ScaleNorm", "norms are RMSNorm or LayerNorm"),
    REFUSED("--position-embedding-type relative", "positions are rotary"),
    REFUSED("--group-query-attention", "--num-query-groups"),
    REFUSED("--fp16", "loss scaling"),
    REFUSED("--fp8-format hybrid", "gpu.fp8_grad=e5m2"),
    REFUSED("--fp8-recipe delayed", "of the step itself"),
    REFUSED("--fp8-margin 1", "gpu.fp8_recipe"),
    REFUSED("--fp4-format e2m1", "gpu.precision is bf16, fp32 or fp8"),
    REFUSED("--moe-apply-probs-on-input", "another function"),
    REFUSED("--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"),
    REFUSED("--account-for-embedding-in-pipeline-split --pipeline-model-parallel-size 2", "parallel.first_layers"),
    REFUSED("--dist-ckpt-strictness ignore_all", "run.load_allow"),
    REFUSED("--moe-layer-freq ([0]*3+[1]*58)", "--hybrid-layer-pattern"),
    REFUSED("--moe-router-load-balancing-type sinkhorn", "model.router_bias"),
    REFUSED("--moe-router-load-balancing-type aux_loss seq_aux_loss", "several losses"),
    REFUSED("--multi-latent-attention", "latent attention is +"),
    REFUSED("--rampup-batch-size 16 16 5859375", "the same in every step"),
    REFUSED("--optimizer muon", "AdamW"),
    REFUSED("--tokenizer-type NullTokenizer", "--vocab-size"),
    REFUSED("--tokenizer-type Llama2Tokenizer", "tokenizer.json"),
    REFUSED("--train-samples 800", "--global-batch-size"),
    REFUSED("--lr-warmup-fraction 2", "no number it can be"),
    REFUSED("--lr-warmup-samples x --global-batch-size 8", "no number it can be"),
    REFUSED("--train-samples 800 --train-iters 100", "given twice"),
    REFUSED("--softmax-type odd", "docs/MEGATRON.md lists the values"),
    REFUSED("--bf16 --gpu.precision=fp32", "unless fp8 or fp32"),
    REFUSED("--bf16=yes", "takes no value"),
    REFUSED("--normalization", "needs a value"),
};

static int parse(struct config *c, const char *words, struct config_args *args, struct err *e)
{
    char text[256], *argv[MAX_WORDS], *rest = text;
    int n = 0;
    snprintf(text, sizeof text, "%s", words);
    for (char *word = strtok_r(rest, " ", &rest); word != NULL; word = strtok_r(rest, " ", &rest)) {
        assert_true(n < MAX_WORDS);
        argv[n++] = word;
    }
    return config_parse_args(c, n, argv, args, e);
}

static void assert_option(const struct config *c, const struct usual *u)
{
    struct buf text;
    buf_init(&text, 0);
    const char *is = config_value_text(c, u->option, &text);
    if (is == NULL || strcmp(is, u->value) != 0)
        fail_msg("%s: %s is %s, not %s", u->words, u->option, is ? is : "no option", u->value);
    buf_release(&text);
}

/* Accepted flags that set nothing leave every option as it was. */
static void assert_untouched(const struct config *c, const char *words)
{
    for (int i = 0; i < config_option_count(); i++)
        if (config_source_of(c, config_option_name(i)).source != CFG_FROM_DEFAULT)
            fail_msg("%s sets %s", words, config_option_name(i));
}

static void the_usual_flags_are_understood(void **state)
{
    (void)state;
    assert_true(countof(usual) >= 65);
    for (int i = 0; i < countof(usual); i++) {
        struct config c;
        struct config_args args = {0};
        struct err e = {0};
        assert_ok(config_init(&c, &e), &e);
        if (parse(&c, usual[i].words, &args, &e) != ST_OK)
            fail_msg("%s: %s", usual[i].words, e.msg);
        if (usual[i].option[0] != '\0')
            assert_option(&c, &usual[i]);
        else
            assert_untouched(&c, usual[i].words);
        config_release(&c);
    }
}

static void what_is_not_here_is_refused_with_the_reason(void **state)
{
    (void)state;
    for (int i = 0; i < countof(refused); i++) {
        struct config c;
        struct config_args args = {0};
        struct err e = {0};
        assert_ok(config_init(&c, &e), &e);
        if (parse(&c, refused[i].words, &args, &e) != ST_USAGE)
            fail_msg("%s is not refused", refused[i].words);
        if (strstr(e.msg, refused[i].refused) == NULL && strstr(e.hint, refused[i].refused) == NULL)
            fail_msg("%s: '%s' does not say '%s'", refused[i].words, e.msg, refused[i].refused);
        config_release(&c);
    }
}

static void flags_without_effect_are_noted(void **state)
{
    (void)state;
    struct config c;
    struct config_args args = {0};
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    assert_ok(parse(&c, "--tensorboard-dir tb --log-throughput --save-retain-interval 5", &args, &e), &e);
    assert_int_equal(args.n_notes, 2);
    assert_string_equal(args.notes[0].flag, "tensorboard-dir");
    config_release(&c);
}

static void a_folder_to_save_to_and_load_from_is_one_run(void **state)
{
    (void)state;
    struct config c;
    struct config_args args = {0};
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    assert_ok(parse(&c, "--save runs/a --load runs/a", &args, &e), &e);
    assert_string_equal(c.run.dir, "runs/a");
    assert_string_equal(c.run.load, "");
    config_release(&c);
}

/* A row that an option's alias hides, or that names no option, would say something wrong. */
static void the_table_fits_the_options(void **state)
{
    (void)state;
    for (int i = 0; i < config_n_flags; i++) {
        const struct flag *f = &config_flags[i];
        assert_true(f->option == NULL || option_find(f->option) != NULL);
        assert_true(f->text != NULL || f->option != NULL || f->how == FLAG_MOVES);
        for (int o = 0; o < config_n_options; o++)
            for (int k = 0; k < CONFIG_MAX_ALIASES && config_options[o].alias[k].name != NULL; k++)
                if (strcmp(config_options[o].alias[k].name, f->name) == 0)
                    fail_msg("--%s is %s: its rows are never read", f->name, config_options[o].name);
    }
}

static const char begin[] = "<!-- flags: begin -->\n", end[] = "<!-- flags: end -->\n";

/* The document, with the current table between its marks. */
static void make_doc(const char *path, struct buf *out)
{
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    static char text[1 << 17];
    size_t n = fread(text, 1, sizeof text - 1, f);
    assert_int_equal(fclose(f), 0);
    text[n] = '\0';
    char *from = strstr(text, begin), *to = strstr(text, end);
    assert_true(from != NULL && to != NULL && from < to);
    buf_addf(out, "%.*s", (int)(from + strlen(begin) - text), text);
    config_write_flags(out);
    buf_add(out, to);
    assert_true(strlen(text) < sizeof text - 1);
}

static void the_document_is_up_to_date(void **state)
{
    (void)state;
    static char text[1 << 17];
    struct buf want;
    buf_init(&want, 0);
    make_doc("docs/MEGATRON.md", &want);
    FILE *f = fopen("docs/MEGATRON.md", "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    assert_int_equal(fclose(f), 0);
    if (strcmp(text, want.text) != 0)
        fail_msg("docs/MEGATRON.md is out of date: run this test with --write docs/MEGATRON.md");
    buf_release(&want);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        struct buf doc;
        buf_init(&doc, 0);
        make_doc(argv[2], &doc);
        FILE *f = fopen(argv[2], "w");
        return f == NULL || fputs(doc.text, f) < 0 || fclose(f) != 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_usual_flags_are_understood),
        cmocka_unit_test(what_is_not_here_is_refused_with_the_reason),
        cmocka_unit_test(flags_without_effect_are_noted),
        cmocka_unit_test(a_folder_to_save_to_and_load_from_is_one_run),
        cmocka_unit_test(the_table_fits_the_options),
        cmocka_unit_test(the_document_is_up_to_date),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
