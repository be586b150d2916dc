/* braid generate: continue a prompt, streamed to the terminal. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid generate RUN_OR_CHECKPOINT [--generate.prompt=TEXT] [--generate.tokens=N] [--section.key=value ...]\n\n"
    "Sampling: generate.temperature (0: always the likeliest), top_k, top_p, seed. The same seed gives the same text.\n";
static const char own_options[] = "generate.* run.device run.threads";

struct job {
    struct config c;
    struct ckpt *from;
    struct dev dev;
    struct generator g;
    struct tokenizer tok;
    int32_t *prompt;
    struct candidate *scratch;
    bool noted; /* that ids are printed as numbers */
};

/* A model of token files may know ids that the tokenizer does not: they are printed as numbers. */
static int emit(struct job *j, int32_t id, struct err *e)
{
    uint8_t text[64];
    size_t n;
    struct err unknown = {0};
    if (j->tok.ops->decode(&j->tok, id, text, sizeof text, &n, &unknown) == ST_OK) {
        fwrite(text, 1, n < sizeof text ? n : sizeof text, stdout);
    } else {
        if (!j->noted)
            fprintf(stderr, "note: %s (tokenizer '%s'); such tokens are printed as <id>\n", unknown.msg, j->c.data.tokenizer);
        j->noted = true;
        printf("<%d>", (int)id);
    }
    return fflush(stdout) == 0 ? ST_OK : err_errno(e, "cannot write to standard output");
}

/* Text becomes ids of the tokenizer, which the embedding may lack when the model was trained on token files. */
static int check_prompt(const struct job *j, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (j->prompt[i] < 0 || j->prompt[i] >= j->c.model.vocab) {
            err_set(e, ST_USAGE, "the prompt needs token %d of tokenizer '%s', but the model has a vocabulary of %lld", (int)j->prompt[i],
                    j->c.data.tokenizer, (long long)j->c.model.vocab);
            return err_hint(e, "give another --generate.prompt, or the tokenizer of the training data: --data.tokenizer");
        }
    return ST_OK;
}

static int one_sample(struct job *j, size_t n_prompt, int64_t number, struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    struct sampler s = {.temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = (uint64_t)(o->seed + number)};
    struct tensor logits;
    generator_rewind(&j->g);
    fputs(o->prompt, stdout);
    TRY(generator_feed(&j->g, j->prompt, (int64_t)n_prompt, &logits, e));
    for (int64_t i = 0; i < o->tokens; i++) {
        int32_t id = sample_token(&s, &logits, j->c.model.vocab, (uint64_t)i, j->scratch);
        if (id == j->tok.eod)
            break;
        TRY(emit(j, id, e));
        if (i + 1 < o->tokens)
            TRY(generator_feed(&j->g, &id, 1, &logits, e));
    }
    putchar('\n');
    return ST_OK;
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    struct config_args args = {0};
    TRY(cmd_config(&j->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 1, e));
    TRY(cmd_open_checkpoint(&j->c, &args, &j->from, e));
    TRY(cmd_finish(&j->c, e));
    TRY(cmd_refuse_weights(&j->c, "braid generate", e));
    TRY(tokenizer_for(&j->c, &j->tok, e));
    const char *prompt = j->c.generate.prompt[0] ? j->c.generate.prompt : "\n";
    size_t n = strlen(prompt), n_ids = 0;
    TRY(mem_array((void **)&j->prompt, n, sizeof *j->prompt, e));
    TRY(mem_array((void **)&j->scratch, (size_t)j->c.model.vocab, sizeof *j->scratch, e));
    TRY(j->tok.ops->encode(&j->tok, (const uint8_t *)prompt, n, j->prompt, n, &n_ids, e));
    TRY(check_prompt(j, n_ids, e));
    TRY(device_open(&j->dev, &j->c, e));
    TRY(generator_open(&j->g, &j->c, &j->dev, j->from, (int64_t)n_ids + j->c.generate.tokens, e));
    for (int64_t k = 0; k < j->c.generate.samples; k++) {
        if (j->c.generate.samples > 1)
            printf("%s--- sample %lld ---\n", k ? "\n" : "", (long long)k + 1);
        TRY(one_sample(j, n_ids, k, e));
    }
    return ST_OK;
}

int cmd_generate(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct job j = {0};
    struct err e = {0};
    int code = cmd_exit(run(&j, argc, argv, &e), &e);
    generator_close(&j.g);
    if (j.tok.ops != NULL)
        tokenizer_close(&j.tok);
    ckpt_close(j.from);
    dev_close(&j.dev);
    config_release(&j.c);
    free(j.prompt);
    free(j.scratch);
    return code;
}
