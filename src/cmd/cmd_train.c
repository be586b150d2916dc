/* braid train: a new run, or the continuation of one. */
#include "cmd/cmd.h"

#include <string.h>

static const char usage[] =
    "usage: braid train [FILE.ini] [--section.key=value ...]\n\n"
    "Trains the configured model. With run.dir set, the folder receives config.ini, metrics.jsonl, TensorBoard events,\n"
    "report.html and checkpoints; the same command again continues the run from its newest checkpoint, bit for bit.\n"
    "SIGINT and SIGTERM save a checkpoint after the current step and stop.\n";

/* The checkpoint to continue, if the run folder has one and run.resume allows. */
static int find_resume(struct config *c, struct ckpt **out, struct err *e)
{
    *out = NULL;
    if (c->run.dir[0] == '\0' || c->run.resume == CFG_RESUME_NEVER)
        return ST_OK;
    struct ckpt_info *list = NULL;
    int n = 0, complete = 0;
    if (file_is_dir(c->run.dir))
        TRY(ckpt_list(c->run.dir, &list, &n, e));
    for (int i = 0; i < n; i++)
        complete += list[i].complete;
    int damaged = n - complete;
    ckpt_list_free(list, n);
    if (complete == 0 && c->run.resume == CFG_RESUME_MUST) {
        err_set(e, ST_USAGE, "run.resume=must, but %s holds no complete checkpoint (%d damaged)", c->run.dir, damaged);
        return err_hint(e, "use run.resume=auto to start a new run there");
    }
    if (complete == 0)
        return ST_OK;
    TRY(ckpt_open(out, c->run.dir, e));
    struct buf changes;
    buf_init(&changes, 0);
    const char *text = ckpt_config_text(*out);
    int st = config_load_saved(c, text, strlen(text), ckpt_path(*out), CFG_SAVED_ALL, &changes, e);
    if (st == ST_OK)
        fprintf(stderr, "continuing %s at step %lld\n%s", c->run.dir, (long long)ckpt_step(*out), changes.text ? changes.text : "");
    buf_release(&changes);
    return st;
}

static void announce(const struct trainer *t)
{
    struct buf text;
    char count[32], memory[32];
    int64_t bytes = 0;
    for (int a = 0; a < ARENA_COUNT; a++)
        bytes += t->model.mem.allocated[a];
    buf_init(&text, 0);
    dataset_describe(t->train_data, &text);
    fprintf(stderr, "%s\nmodel %s: %s parameters, %s planned and allocated\n%s", t->dev.name, t->cfg->model.pattern,
            human_count((double)param_table_elems(&t->model.params), count, sizeof count),
            human_bytes((double)bytes, memory, sizeof memory), text.text ? text.text : "");
    buf_release(&text);
}

static int run(struct config *c, int argc, char **argv, struct ckpt **from, struct trainer *t, struct err *e)
{
    struct config_args args = {0};
    TRY(cmd_config(c, argc, argv, &args, e));
    if (args.n_positional > 0)
        return err_set(e, ST_USAGE, "unexpected word '%s'", args.positional[0]);
    TRY(find_resume(c, from, e));
    bool warm = *from == NULL && c->run.load[0] != '\0';
    if (warm) {
        TRY(ckpt_open(from, c->run.load, e));
        const char *text = ckpt_config_text(*from);
        TRY(config_load_saved(c, text, strlen(text), ckpt_path(*from), CFG_SAVED_MODEL, NULL, e));
    }
    TRY(cmd_finish(c, e));
    if (c->run.dir[0] != '\0')
        TRY(file_make_dirs(c->run.dir, e));
    TRY(trainer_open(t, c, *from, true, e));
    ckpt_close(*from);
    *from = NULL;
    if (!c->run.quiet)
        announce(t);
    if (t->step >= c->train.steps) {
        fprintf(stderr, "nothing to do: %lld of %lld steps are done; raise train.steps to go on\n", (long long)t->step, (long long)c->train.steps);
        return ST_OK;
    }
    return trainer_run(t, e);
}

int cmd_train(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, true))
        return 0;
    struct config c = {0};
    struct ckpt *from = NULL;
    struct trainer t = {0};
    struct err e = {0};
    int st = run(&c, argc, argv, &from, &t, &e);
    int code = cmd_exit(st, &e);
    ckpt_close(from);
    trainer_close(&t);
    config_release(&c);
    return code;
}
