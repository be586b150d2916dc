/* braid eval: loss, perplexity and bits per byte of a checkpoint on validation data, or its accuracy on multiple-choice
 * tasks. */
#include "cmd/cmd.h"
#include "serve/serve.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid eval RUN_OR_CHECKPOINT [--data.valid=PATH] [--train.eval_batches=N|all] [--section.key=value ...]\n"
    "       braid eval RUN_OR_CHECKPOINT --tasks=FILE.jsonl [--out=FILE.jsonl] [--length=N] [--section.key=value "
    "...]\n\n"
    "The model's options come from the checkpoint; an override that conflicts with it is an error. Without data.valid "
    "the run's own\n"
    "validation data is used. train.eval_batches=all takes all of it.\n\n"
    "--tasks reads lines {\"context\": C, \"continuations\": [C, ...], \"label\": K}, where C is text or a list of "
    "token ids, and prints the\n"
    "share of lines whose continuation K the model finds likeliest: by log-likelihood (accuracy), and by "
    "log-likelihood for each byte\n"
    "(accuracy_norm). --out writes the log-likelihoods of each line. --length: the longest sequence in tokens, "
    "train.seq by default;\n"
    "longer contexts lose their beginning.\n";
static const char own_options[] = "data.valid data.split data.field data.tokenizer train.eval_batches "
                                  "train.micro_batch train.seq run.device run.threads";

/* Without data of its own, an evaluation takes the run's: the same files and the same split. */
static int inherit_data(struct config *c, const struct ckpt *from, struct err *e)
{
    static const char *const names[] = {"data.train", "data.valid", "data.split", "data.seed", "data.field"};
    struct config saved = {0};
    struct buf value;
    const char *text = ckpt_config_text(from);
    if (c->data.valid[0] != '\0' || c->data.train[0] != '\0')
        return ST_OK;
    buf_init(&value, 0);
    int st = config_init(&saved, e);
    if (st == ST_OK)
        st = config_load_saved(&saved, text, strlen(text), ckpt_path(from), CFG_SAVED_ALL, NULL, e);
    for (int i = 0; i < countof(names) && st == ST_OK; i++) {
        bool given = config_source_of(c, names[i]).source == CFG_FROM_COMMAND ||
                     config_source_of(c, names[i]).source == CFG_FROM_FILE;
        const char *v = given ? NULL : config_value_text(&saved, names[i], &value);
        st = v != NULL ? config_set(c, names[i], v, NULL, e) : ST_OK;
    }
    buf_release(&value);
    config_release(&saved);
    return st;
}

/* ---- tasks ----------------------------------------------------------------------------------- */

struct bar {
    double started, drawn;
    bool live;
};

static void draw(void *ctx, int64_t done, int64_t all)
{
    struct bar *b = ctx;
    double now = time_now(), every = b->live ? 0.2 : 30;
    if (now - b->drawn < every && done < all)
        return;
    b->drawn = now;
    double rate = now > b->started ? (double)done / (now - b->started) : 0;
    char left[32];
    fprintf(stderr, "%s%3.0f %%  %lld of %lld tokens, %.0f/s, %s left%s", b->live ? "\r" : "",
            100.0 * (double)done / (double)all, (long long)done, (long long)all, rate,
            human_time(rate > 0 ? (double)(all - done) / rate : 0, left, sizeof left), b->live ? "  " : "\n");
    if (b->live && done >= all)
        fputc('\n', stderr);
}

static int run_tasks(struct config *c, struct ckpt *from, const char *path, const char *out, const char *length,
                     struct err *e)
{
    struct bar bar = {.started = time_now(), .drawn = time_now(), .live = isatty(STDERR_FILENO) != 0};
    struct task_opts o = {.path = path, .out = out, .progress = c->run.quiet ? NULL : draw, .ctx = &bar};
    struct task_result r;
    struct scorer s = {0};
    int64_t n;
    static const char *const of_data[] = {"data.valid", "data.train", "data.split", "train.eval_batches"};
    for (int i = 0; i < countof(of_data); i++)
        if (config_source_of(c, of_data[i]).source == CFG_FROM_COMMAND)
            return err_set(e, ST_USAGE, "--%s has no effect on --tasks", of_data[i]);
    TRY(cmd_finish(c, e));
    TRY(cmd_refuse_weights(c, "braid eval", e));
    cmd_say_unread(c, "eval");
    TRY(cmd_length(c, length, &n, e));
    int st = scorer_open(&s, c, from, n, e);
    if (st == ST_OK)
        st = tasks_run(&s, &o, &r, e);
    scorer_close(&s);
    TRY(st);
    printf("checkpoint: %s\ntasks: %s\nlines: %lld\ncontinuations: %lld\ntokens: %lld\n", ckpt_path(from), path,
           (long long)r.lines, (long long)r.continuations, (long long)r.tokens);
    if (r.labelled < r.lines)
        printf("labelled: %lld\n", (long long)r.labelled);
    if (r.labelled > 0)
        printf("accuracy: %.6f\naccuracy_norm: %.6f\nlabel_logprob: %.6f\n", (double)r.right / (double)r.labelled,
               (double)r.right_norm / (double)r.labelled, r.logprob / (double)r.labelled);
    if (r.cut > 0)
        fprintf(stderr,
                "note: %lld of %lld sequences were longer than %lld tokens; their contexts lost their beginning\n",
                (long long)r.cut, (long long)r.continuations, (long long)n);
    return ST_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

static int run(struct config *c, int argc, char **argv, struct ckpt **from, struct trainer *t, struct err *e)
{
    struct config_extra extra[] = {{.name = "tasks"}, {.name = "out"}, {.name = "length"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    struct eval_result r;
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 1, e));
    TRY(cmd_open_checkpoint(c, &args, from, e));
    if (extra[0].value != NULL)
        return run_tasks(c, *from, extra[0].value, extra[1].value, extra[2].value, e);
    if (extra[1].value != NULL || extra[2].value != NULL)
        return err_set(e, ST_USAGE, "--out and --length belong to --tasks");
    TRY(inherit_data(c, *from, e));
    if (c->data.valid[0] == '\0' && c->data.split[0] == '\0') {
        err_set(e, ST_USAGE, "data.valid is not set: there is nothing to evaluate on");
        return err_hint(e, "give text or a token file: --data.valid=PATH");
    }
    /* The trainer wants training data too; for an evaluation the validation data stands in. */
    if (c->data.train[0] == '\0')
        TRY(config_set(c, "data.train", c->data.valid, NULL, e));
    TRY(cmd_finish(c, e));
    TRY(cmd_refuse_weights(c, "braid eval", e));
    cmd_say_unread(c, "eval");
    /* without the optimizer's state, which an imported or merged checkpoint lacks */
    TRY(trainer_open(t, c, NULL, true, e));
    TRY(load_params(&t->model, *from, e));
    TRY(trainer_eval(t, &r, e));
    if (r.failed) {
        *e = r.why;
        return e->code;
    }
    printf("checkpoint: %s\nstep: %lld\nloss: %.6f\nperplexity: %.4f\n", ckpt_path(*from), (long long)ckpt_step(*from),
           r.loss, log_perplexity(r.loss));
    printf("tokens: %lld of %lld (%.1f%%)\n", (long long)r.tokens, (long long)r.tokens_total,
           100.0 * (double)r.tokens / (double)max_i64(r.tokens_total, 1));
    if (r.bits_per_byte != 0)
        printf("bits_per_byte: %.6f\n", r.bits_per_byte);
    else if (r.why.code != ST_OK)
        fprintf(stderr, "note: bits_per_byte is left out: %s\n", r.why.msg);
    return ST_OK;
}

int cmd_eval(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct config c = {0};
    struct ckpt *from = NULL;
    struct trainer t = {0};
    struct err e = {0};
    int code = cmd_exit(run(&c, argc, argv, &from, &t, &e), &e);
    ckpt_close(from);
    trainer_close(&t);
    config_release(&c);
    return code;
}
