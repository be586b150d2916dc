/* braid train: a new run, or the continuation of one. */
#include "cmd/cmd.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid train [FILE.ini] [--section.key=value ...]\n\n"
    "Trains the configured model. With run.dir set, the folder receives config.ini, metrics.jsonl, TensorBoard events,\n"
    "report.html and checkpoints; the same command again continues the run from its newest checkpoint, bit for bit.\n"
    "SIGINT and SIGTERM save a checkpoint after the current step and stop.\n"
    "Several ranks: mpirun -np N braid train ..., or --parallel.ranks=N for threads of one process.\n";

/* What every rank of this process starts from. */
struct job {
    struct config c;
    struct cmd_ranks ranks;
    struct ckpt *from;
    bool warm; /* from gives the weights only */
};

/* The checkpoint to continue, if the run folder has one and run.resume allows. */
static int find_resume(struct config *c, bool speaks, struct ckpt **out, struct err *e)
{
    *out = NULL;
    if (c->run.dir[0] == '\0')
        return ST_OK;
    struct ckpt_info *list = NULL;
    int n = 0, complete = 0;
    char *saved = path_join(c->run.dir, "checkpoints"); /* not there yet if the run stopped before its first one */
    if (saved == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int listed = file_is_dir(saved) ? ckpt_list(c->run.dir, &list, &n, e) : ST_OK;
    free(saved);
    TRY(listed);
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
    if (c->run.resume == CFG_RESUME_NEVER) {
        err_set(e, ST_USAGE, "run.resume=never, but %s already holds %d checkpoint%s", c->run.dir, complete, complete == 1 ? "" : "s");
        return err_hint(e, "choose another run.dir, or continue this run with run.resume=auto");
    }
    TRY(ckpt_open(out, c->run.dir, e));
    struct buf changes;
    buf_init(&changes, 0);
    const char *text = ckpt_config_text(*out);
    int st = config_load_saved(c, text, strlen(text), ckpt_path(*out), CFG_SAVED_ALL, &changes, e);
    if (st == ST_OK && speaks)
        fprintf(stderr, "continuing %s at step %lld\n%s", c->run.dir, (long long)ckpt_step(*out), changes.text ? changes.text : "");
    buf_release(&changes);
    return st;
}

/* From before the first thread starts, so that all inherit it: a thread with these signals open would take
 * one and end the process at once. trainer_run asks for them between steps. */
static void hold_stop_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
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
    const struct mesh *m = &t->model.mesh;
    if (m->world > 1)
        fprintf(stderr, "%d ranks (%s): %d data-parallel, %d pipeline stages, experts over %d\n", m->world, comm_kind_name(world_kind(t->world)),
                m->dp, m->pp, m->ep);
    fprintf(stderr, "%s\nmodel %s: %s parameters%s, %s planned and allocated\n%s", t->dev.name, t->cfg->model.pattern,
            human_count((double)param_table_elems(&t->model.params), count, sizeof count), m->world > 1 ? " on this rank" : "",
            human_bytes((double)bytes, memory, sizeof memory), text.text ? text.text : "");
    buf_clear(&text);
    model_print_kernels(t->cfg, &t->dev, &text);
    fputs(text.text ? text.text : "", stderr);
    buf_release(&text);
}

/* Continuing takes everything from the checkpoint; a warm start takes the weights and begins at step 0. */
static int train(struct trainer *t, const struct rank_place *place, const struct job *j, struct err *e)
{
    const struct config *c = &j->c;
    if (place->world != NULL)
        TRY(world_same(place->world, "checkpoint", j->from != NULL ? ckpt_path(j->from) : "", e));
    TRY(trainer_open_on(t, c, place, j->warm ? NULL : j->from, true, e));
    if (j->warm)
        TRY(load_params(&t->model, j->from, e));
    if (j->from == NULL && c->run.load_weights[0] != '\0')
        TRY(cmd_take_weights(&t->model, e));
    if (!c->run.quiet && trainer_speaks(t))
        announce(t);
    if (t->step < c->train.steps)
        return trainer_run(t, e);
    if (trainer_speaks(t))
        fprintf(stderr, "nothing to do: %lld of %lld steps are done; raise train.steps to go on\n", (long long)t->step, (long long)c->train.steps);
    return ST_OK;
}

static int train_rank(const struct rank_place *place, void *ctx, struct err *e)
{
    struct trainer t = {0};
    int st = train(&t, place, ctx, e);
    trainer_close(&t);
    return st;
}

static int prepare(struct job *j, int argc, char **argv, struct err *e)
{
    struct config_args args = {0};
    struct config *c = &j->c;
    TRY(launch_detect(&j->ranks.launch, e)); /* first of all: who speaks depends on it */
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    TRY(cmd_count_ranks(c, &j->ranks, e));
    TRY(find_resume(c, cmd_speaks(&j->ranks), &j->from, e));
    j->warm = j->from == NULL && c->run.load[0] != '\0';
    if (j->warm) {
        TRY(ckpt_open(&j->from, c->run.load, e));
        const char *text = ckpt_config_text(j->from);
        TRY(config_load_saved(c, text, strlen(text), ckpt_path(j->from), CFG_SAVED_MODEL, NULL, e));
    }
    TRY(cmd_finish(c, e));
    if (cmd_speaks(&j->ranks))
        cmd_say_unused(c);
    if (c->run.dir[0] != '\0' && cmd_speaks(&j->ranks))
        TRY(file_make_dirs(c->run.dir, e));
    return ST_OK;
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    int st = prepare(j, argc, argv, e);
    if (st != ST_OK)
        return cmd_tell_ranks(st, e);
    hold_stop_signals();
    return cmd_run_ranks(&j->c, &j->ranks, train_rank, j, e);
}

int cmd_train(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, true))
        return 0;
    struct job j = {0};
    struct err e = {0};
    int st = run(&j, argc, argv, &e);
    int code = cmd_exit(st, &e);
    ckpt_close(j.from);
    config_release(&j.c);
    return code;
}
