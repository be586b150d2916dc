/* braid train: a new run, or the continuation of one. */
#include "cmd/cmd.h"
#include "base/stop.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "usage: braid train [FILE.ini] [--init=HF_FOLDER] [--section.key=value ...]\n\n"
    "Trains the configured model. With run.dir set, the folder receives config.ini, metrics.jsonl, TensorBoard "
    "events,\n"
    "report.html and checkpoints; the same command again continues the run from its newest checkpoint, bit for bit.\n"
    "--init starts from a Hugging Face model: its folder gives the model's options and weights.\n"
    "SIGINT, SIGTERM and SIGHUP save a checkpoint after the current step and stop.\n"
    "Several ranks: mpirun -np N braid train ..., or --parallel.ranks=N for threads of one process.\n";
static const char own_options[] =
    "data.train data.valid data.split data.tokenizer model.pattern model.layers model.hidden model.heads "
    "train.steps train.seq train.micro_batch train.global_batch train.lr train.warmup train.schedule "
    "train.eval_every run.dir run.device run.threads run.resume run.save_every run.load_weights "
    "run.minutes run.quiet parallel.ranks parallel.pp parallel.ep";

/* What every rank of this process starts from. */
struct job {
    struct config c;
    struct cmd_ranks ranks;
    struct dir_lock *lock; /* of run.dir, in the process that writes there */
    struct ckpt *from;
    bool warm; /* from gives the weights only */
    struct startup_watch *watch;
};

/* The checkpoint to continue: the newest intact one of the run folder, or that of run.load_step. Damaged ones are
 * named, and where there are only such, that is an error: a run never starts over because its checkpoints cannot be
 * read. */
static int find_resume(struct config *c, bool is_rank0, struct ckpt **out, struct err *e)
{
    *out = NULL;
    if (c->run.dir[0] == '\0' && c->run.load_step >= 0)
        return err_set(e, ST_USAGE, "run.load_step=%lld continues a run, and run.dir is not set",
                       (long long)c->run.load_step);
    if (c->run.dir[0] == '\0' || c->run.resume == CFG_RESUME_NEVER)
        return ST_OK;
    struct buf damage, changes;
    buf_init(&damage, 0);
    buf_init(&changes, 0);
    int st = ckpt_open_intact(out, c->run.dir, c->run.load_step, &damage, e);
    if (st == ST_OK && *out == NULL && c->run.resume == CFG_RESUME_MUST) {
        st = err_set(e, ST_USAGE, "run.resume=must, but %s holds no checkpoint", c->run.dir);
        err_hint(e, "use run.resume=auto to start a new run there");
    }
    if (is_rank0 && damage.len > 0 && damage.text != NULL)
        fprintf(stderr, "warning: %s", damage.text);
    if (st == ST_OK && *out != NULL) {
        const char *text = ckpt_config_text(*out);
        st = config_load_saved(c, text, strlen(text), ckpt_path(*out), CFG_SAVED_ALL, &changes, e);
        if (st == ST_OK)
            st = tokenizer_of_checkpoint(c, *out, true, e);
        if (st == ST_OK)
            st = tokenizer_check_resume(c, *out, e);
        if (st == ST_OK && is_rank0)
            fprintf(stderr, "continuing %s at step %lld\n%s", c->run.dir, (long long)ckpt_step(*out),
                    changes.text ? changes.text : "");
    }
    buf_release(&changes);
    buf_release(&damage);
    return st;
}

/* Nobody else may write into the run folder from here on. */
static int lock_run(struct job *j, struct err *e)
{
    struct err note = {0};
    if (j->lock != NULL || j->c.run.dir[0] == '\0' || !cmd_is_rank0(&j->ranks))
        return ST_OK;
    TRY(dir_lock_take(&j->lock, j->c.run.dir, NULL, &note, e));
    if (note.msg[0] != '\0')
        fprintf(stderr, "note: %s\n", note.msg);
    return ST_OK;
}

/* From before the first thread starts, so that all inherit it: a thread with these signals open would take
 * one and end the process at once. trainer_run asks for them between steps. */
static void hold_stop_signals(void)
{
    sigset_t set;
    stop_signals(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static int64_t allocated(const struct trainer *t) { return memory_total(&t->model.mem, t->model.mem.allocated, false); }

/* What each rank took, as `braid plan` lists it. Every rank calls it. */
static int memory_of_ranks(const struct trainer *t, struct buf *out, struct err *e)
{
    enum { NAMED = 16 };
    const struct mesh *m = &t->model.mesh;
    int64_t mine = allocated(t), *all = NULL;
    char text[32];
    if (m->world == 1)
        return ST_OK;
    TRY(mem_array((void **)&all, (size_t)m->world, sizeof *all, e));
    int st = comm_host_gather(m->all, "memory", &mine, (int64_t)sizeof mine, all, e);
    for (int r = 0; st == ST_OK && r < m->world && r < NAMED; r++)
        buf_addf(out, "%s%s", r == 0 ? "allocated by each rank: " : ", ",
                 human_bytes((double)all[r], text, sizeof text));
    buf_addf(out, "%s\n", m->world > NAMED ? ", ..." : "");
    free(all);
    return st;
}

static void announce(const struct trainer *t, const char *memory_of_all)
{
    struct buf text;
    struct err e = {0};
    char count[32], memory[32], mesh[160];
    int64_t bytes = allocated(t);
    buf_init(&text, 0);
    dataset_describe(t->train_data, &text);
    const struct mesh *m = &t->model.mesh;
    if (m->world > 1)
        fprintf(stderr, "%d ranks (%s): %s\n", m->world, comm_kind_name(world_kind(t->world)),
                mesh_text(m, mesh, sizeof mesh));
    if (m->world > 1 && world_note(t->world)[0] != '\0')
        fprintf(stderr, "%s\n", world_note(t->world));
    fprintf(stderr, "%s\nmodel %s: %s parameters%s, %s planned and allocated\n%s%s", t->dev.name, t->cfg->model.pattern,
            human_count((double)param_table_elems(&t->model.params), count, sizeof count),
            m->world > 1 ? " on this rank" : "", human_bytes((double)bytes, memory, sizeof memory), memory_of_all,
            text.text ? text.text : "");
    buf_clear(&text);
    model_print_kernels(t->cfg, &t->dev, &text);
    optim_print(&t->optim, &t->model, &text);
    if (groups_print(&t->model, &text, &e) != ST_OK)
        buf_addf(&text, "note: %s\n", e.msg);
    fputs(text.text ? text.text : "", stderr);
    if (t->cfg->run.dir[0] == '\0')
        fprintf(stderr, "no run folder: the model will not be saved; --run.dir=DIR keeps it\n");
    buf_release(&text);
}

/* Before the first step, in the process that writes: what a killed run left is completed or removed, and checkpoints
 * that are not of this run any more are moved aside. */
static int start_folder(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    char *to = NULL;
    int moved = 0;
    if (c->run.dir[0] == '\0' || !trainer_is_rank0(t))
        return ST_OK;
    ckpt_tidy(c->run.dir, t->step, (int)c->run.keep);
    if (c->run.resume != CFG_RESUME_NEVER && c->run.load_step < 0)
        return ST_OK;
    bool over = c->run.resume == CFG_RESUME_NEVER;
    int st = ckpt_set_aside(c->run.dir, over ? -1 : t->step, &to, &moved, e);
    if (moved > 0)
        fprintf(stderr, "moved %d %s checkpoint%s to %s\n", moved, over ? "earlier" : "later", moved == 1 ? "" : "s",
                to);
    free(to);
    return st;
}

/* Continuing takes everything from the checkpoint; a warm start takes the weights and begins at step 0. */
static int train(struct trainer *t, const struct rank_place *place, const struct job *j, struct err *e)
{
    const struct config *c = &j->c;
    if (place->world != NULL)
        TRY(world_same(place->world, "checkpoint", j->from != NULL ? ckpt_path(j->from) : "", e));
    TRY(trainer_open_on(t, c, place, j->warm ? NULL : j->from, true, e));
    t->lock = trainer_is_rank0(t) ? j->lock : NULL;
    TRY(trainer_identify_data(t, j->warm ? NULL : j->from, e));
    if (j->warm)
        TRY(load_base(&t->model, j->from, e));
    if (j->from == NULL && c->run.load_weights[0] != '\0')
        TRY(cmd_take_weights(&t->model, e));
    struct buf memory;
    buf_init(&memory, 0);
    int st = memory_of_ranks(t, &memory, e);
    if (st == ST_OK && !c->run.quiet && trainer_is_rank0(t))
        announce(t, memory.text ? memory.text : "");
    buf_release(&memory);
    TRY(st);
    TRY(start_folder(t, e));
    TRY(trainer_check_folder(t, e));
    startup_watch_end(j->watch); /* from here on the loop asks for signals */
    if (t->step < c->train.steps)
        return trainer_run(t, e);
    if (trainer_is_rank0(t))
        fprintf(stderr, "nothing to do: %lld of %lld steps are done; raise train.steps to go on\n", (long long)t->step,
                (long long)c->train.steps);
    return ST_OK;
}

static int train_rank(const struct rank_place *place, void *ctx, struct err *e)
{
    struct trainer t = {0};
    int st = train(&t, place, ctx, e);
    trainer_close(&t);
    return st;
}

/* A run that goes on keeps the plan it was started with: another size of microbatch would add up in another order. Only
 * another budget than before asks for another plan. */
static int fit(struct job *j, struct err *e)
{
    struct buf text;
    bool say = cmd_is_rank0(&j->ranks) && !j->c.run.quiet;
    bool kept = false;
    if (j->from != NULL && !j->warm)
        TRY(cmd_fit_again(&j->c, ckpt_config_text(j->from), ckpt_path(j->from), &kept, e));
    if (kept) {
        if (say)
            fprintf(stderr, "plan.fit=%s: the run goes on with the plan it was started with\n", j->c.plan.fit);
        return ST_OK;
    }
    buf_init(&text, 0);
    int st = cmd_fit(&j->c, j->ranks.launch.size, &text, e);
    if (st == ST_OK && say && text.text != NULL)
        fputs(text.text, stderr);
    buf_release(&text);
    return st;
}

static int prepare(struct job *j, int argc, char **argv, struct err *e)
{
    struct config_extra extra[] = {{.name = "init"}};
    struct config_args args = {.extra = extra, .n_extra = countof(extra)};
    struct config *c = &j->c;
    TRY(launch_detect(&j->ranks.launch, e)); /* first of all: whether this is rank 0 depends on it */
    TRY(cmd_config(c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    TRY(cmd_count_ranks(c, &j->ranks, e));
    if (cmd_is_rank0(&j->ranks))
        TRY(cmd_check_run_folder(c, e));
    if (c->run.dir[0] != '\0' && file_is_dir(c->run.dir)) /* a command that is refused makes no folder */
        TRY(lock_run(j, e));
    TRY(find_resume(c, cmd_is_rank0(&j->ranks), &j->from, e));
    if (j->from == NULL)
        TRY(cmd_options_of_run(c, &args, cmd_is_rank0(&j->ranks), e));
    if (j->from == NULL && extra[0].value != NULL)
        TRY(cmd_init_from(c, extra[0].value, cmd_is_rank0(&j->ranks), e));
    j->warm = j->from == NULL && c->run.load[0] != '\0';
    if (j->warm) {
        TRY(ckpt_open(&j->from, c->run.load, e));
        const char *text = ckpt_config_text(j->from);
        TRY(config_load_saved(c, text, strlen(text), ckpt_path(j->from), CFG_SAVED_MODEL, NULL, e));
    }
    TRY(cmd_finish(c, e));
    TRY(fit(j, e));
    if (cmd_is_rank0(&j->ranks))
        cmd_say_unused(c);
    TRY(cmd_check_run_in_data(c, e));
    if (c->run.dir[0] != '\0' && cmd_is_rank0(&j->ranks))
        TRY(file_make_dirs(c->run.dir, e));
    return lock_run(j, e);
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    int st = prepare(j, argc, argv, e);
    if (st != ST_OK)
        return cmd_tell_ranks(&j->c, st, e);
    hold_stop_signals();
    j->watch = startup_watch_begin();
    st = cmd_run_ranks(&j->c, &j->ranks, train_rank, j, e);
    startup_watch_close(j->watch);
    return st;
}

int cmd_train(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct job j = {0};
    struct err e = {0};
    int st = run(&j, argc, argv, &e);
    int code = cmd_exit(st, &e);
    if (j.c.run.dir != NULL && j.c.run.dir[0] != '\0' && (fflush(stdout) != 0 || ferror(stdout))) {
        clearerr(stdout); /* what matters is in the run folder: a terminal that went away is no failure of the run */
        fprintf(stderr, "note: the summary could not be written to standard output\n");
    }
    ckpt_close(j.from);
    dir_lock_release(j.lock);
    config_release(&j.c);
    return code;
}
