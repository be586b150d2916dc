/* The run: steps, evaluations, checkpoints, signals. Every rank walks the same loop; rank 0 logs and prints. */
#include "train/facts_int.h"
#include "base/stop.h"
#include "train/ranks_int.h"
#include "train/samples_int.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Stop signals are blocked here and, by the command, in every thread before it starts; they are asked for
 * between steps: no handler, no global, and no half-done step. */
static int pending_signal(void)
{
    sigset_t set;
    stop_signals(&set);
    const struct timespec now = {0};
    int sig = sigtimedwait(&set, NULL, &now);
    return sig > 0 ? sig : 0;
}

/* A signal may reach any rank; time is each one's own. What one wants all do, after the same step. */
static enum stop_request find_stop_request(struct trainer *t)
{
    if (trainer_saving(t) == SAVING_FAILED)
        return STOP_FAILED;
    if (pending_signal() != 0)
        return STOP_SIGNAL;
    return t->deadline > 0 && time_now() > t->deadline ? STOP_TIME : STOP_NOT;
}

static int open_log(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    struct buf config, model, command, machine;
    char title[256];
    buf_init(&config, 0);
    buf_init(&model, 0);
    buf_init(&command, 0);
    buf_init(&machine, 0);
    facts_command(&command);
    facts_machine(t, &machine);
    config_write(c, &config, true);
    model_print_stack(&t->model, &model);
    snprintf(title, sizeof title, "braid: %.200s", c->run.dir[0] ? c->run.dir : c->model.pattern);
    struct log_opts o = {.run_dir = c->run.dir[0] ? c->run.dir : NULL,
                         .total_steps = c->train.steps,
                         .start_step = t->step,
                         .resume = t->step > 0,
                         .log_every = (int)c->train.log_every,
                         .progress = c->run.quiet ? LOG_PROGRESS_OFF : LOG_PROGRESS_AUTO,
                         .tensorboard = c->run.tensorboard,
                         .report = c->run.report,
                         .title = title,
                         .config = config.text,
                         .model = model.text,
                         .command = command.text,
                         .machine = machine.text,
                         .memory_bytes = facts_memory(t)};
    int st = log_open(&t->log, &o, e);
    if (st == ST_OK && t->data_note != NULL)
        log_event(t->log, LOG_NOTE, t->step, "%s", t->data_note);
    if (st == ST_OK && c->run.dir[0] && config.text != NULL) {
        char *path = path_join(c->run.dir, "config.ini");
        st = path ? file_write_atomic(path, config.text, config.len, e) : err_set(e, ST_NOMEM, "out of memory");
        free(path);
    }
    buf_release(&config);
    buf_release(&model);
    buf_release(&command);
    buf_release(&machine);
    return st;
}

/* "step 60 (1.4 MiB): runs/a/checkpoints/step-00000060" */
static void saved_text(const struct trainer *t, int64_t step, char *out, size_t size)
{
    char **names, bytes[32];
    int n, at = snprintf(out, size, "%s/checkpoints/step-%08lld", t->cfg->run.dir, (long long)step);
    char *dir = at < (int)size ? strdup(out) : NULL;
    double total = 0;
    if (dir == NULL || file_list_dir(dir, &names, &n, NULL) != ST_OK) {
        snprintf(out, size, "step %lld", (long long)step);
        free(dir);
        return;
    }
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, names[i]);
        total += path != NULL ? (double)max_i64(file_size(path), 0) : 0;
        free(path);
    }
    snprintf(out, size, "step %lld (%s): %s", (long long)step, human_bytes(total, bytes, sizeof bytes), dir);
    file_free_list(names, n);
    free(dir);
}

/* A run that stops says so in one line, which names the checkpoint, too. */
static void log_saved(struct trainer *t, int64_t step, const struct err *note, bool stopping)
{
    char text[900];
    if (t->log == NULL)
        return;
    if (note->code != ST_OK)
        log_event(t->log, LOG_NOTE, step, "the checkpoint is saved, but: %s", note->msg);
    saved_text(t, step, text, sizeof text);
    if (stopping)
        log_record(t->log, LOG_CHECKPOINT, step, "saved %s", text);
    else
        log_event(t->log, LOG_CHECKPOINT, step, "saved %s", text);
}

int trainer_wait_for_save(struct trainer *t, struct err *e)
{
    struct err note = {0};
    int64_t step;
    int st = trainer_save_end(t, &step, &note, e);
    if (st == ST_OK && step >= 0)
        log_saved(t, step, &note, false);
    return st;
}

/* stopping: the run ends after this checkpoint. Only one in the middle is written while training goes on. */
static int save_as(struct trainer *t, bool last, bool stopping, struct err *e)
{
    struct err note = {0};
    if (t->cfg->run.dir[0] == '\0')
        return ST_OK;
    if (t->cfg->run.async_save)
        TRY(trainer_wait_for_save(t, e));
    if (t->cfg->run.async_save && !last && !stopping)
        return trainer_save_begin(t, e);
    TRY(trainer_save_noting(t, &note, e));
    log_saved(t, t->step, &note, stopping);
    return ST_OK;
}

static int report_metrics(struct trainer *t, struct err *e)
{
    for (int k = 0; t->log != NULL && k < t->train.n_mtp; k++) {
        char tag[32];
        snprintf(tag, sizeof tag, "mtp loss/depth %d", k + 1);
        log_scalar(t->log, tag, t->mean_loss[k + 1]);
    }
    return ranks_report_metrics(t, e);
}

/* Zeros among the gradients of all ranks, as Megatron's --log-num-zeros-in-grad counts them. */
static int report_zeros(struct trainer *t, struct err *e)
{
    double zeros;
    if (!t->cfg->train.log_zeros)
        return ST_OK;
    TRY(trainer_count_zeros(t, &zeros, e));
    if (t->log != NULL)
        log_scalar(t->log, "num-zeros", zeros);
    return ST_OK;
}

static int report_step(struct trainer *t, const struct step_result *r, struct err *e)
{
    double flops = 3 * model_flops_per_token(t->cfg, &t->model.pattern, t->cfg->train.seq);
    double rate = (double)r->tokens / r->seconds, peak = t->peak_flops * t->model.mesh.world;
    struct step_record rec = {.step = t->step,
                              .loss = r->loss,
                              .lr = r->lr,
                              .grad_norm = r->grad_norm,
                              .tokens = t->tokens_seen,
                              .tokens_per_s = rate,
                              .mfu = peak > 0 ? 100 * rate * flops / peak : 0,
                              .elapsed = t->train_seconds,
                              .skipped = r->skipped};
    TRY(report_metrics(t, e));
    TRY(report_zeros(t, e));
    if (t->log == NULL)
        return ST_OK;
    log_step(t->log, &rec);
    if (r->skipped)
        log_event(t->log, LOG_NONFINITE, t->step, "step %lld skipped: loss or gradient is not finite",
                  (long long)t->step);
    return ST_OK;
}

static int eval_now(struct trainer *t, struct err *e)
{
    struct eval_result r;
    TRY(trainer_eval(t, &r, e));
    if (t->log == NULL)
        return ST_OK;
    bool *noted = r.failed ? &t->noted_eval : &t->noted_bits;
    if ((r.failed || r.bits_per_byte == 0) && !*noted && r.why.code != ST_OK) {
        log_event(t->log, LOG_NOTE, t->step, "%s left out: %s", r.failed ? "validation loss is" : "bits per byte are",
                  r.why.msg);
        *noted = true;
    }
    struct eval_record rec = {.step = t->step, .loss = r.loss, .bits_per_byte = r.bits_per_byte};
    if (!r.failed)
        log_eval(t->log, &rec);
    return ST_OK;
}

static bool every(int64_t step, int64_t period) { return period > 0 && step % period == 0; }

static int finish_trace(struct trainer *t, int64_t done, struct err *e)
{
    if (t->exec.trace == NULL || done < t->cfg->plan.trace_steps)
        return ST_OK;
    char path[4096];
    int rank = t->model.mesh.rank, n = rank == 0 ? snprintf(path, sizeof path, "%s", t->cfg->plan.trace)
                                                 : snprintf(path, sizeof path, "%s.%d", t->cfg->plan.trace, rank);
    t->exec.trace = NULL;
    if (n >= (int)sizeof path)
        return err_set(e, ST_USAGE, "plan.trace: the path is too long");
    return trace_write(t->trace, path, e);
}

static int stopped(struct trainer *t, enum stop_request why, struct err *e)
{
    const struct config *c = t->cfg;
    const char *reason = why == STOP_SIGNAL ? "" : " (run.minutes is up)";
    if (t->log != NULL)
        log_record(t->log, LOG_STOP, t->step, "stopped after step %lld: %s", (long long)t->step,
                   why == STOP_SIGNAL ? "signal" : "run.minutes is up");
    if (c->run.dir[0] == '\0')
        return err_set(e, ST_INTERRUPTED,
                       "stopped after step %lld of %lld%s; nothing was saved: there is no run folder (--run.dir=DIR)",
                       (long long)t->step, (long long)c->train.steps, reason);
    return err_set(e, ST_INTERRUPTED,
                   "stopped after step %lld of %lld%s; a checkpoint was saved, and the same command continues",
                   (long long)t->step, (long long)c->train.steps, reason);
}

/* Parameters are those of the last finished step, on every rank, so they can be saved before the run ends. */
static int data_failed(struct trainer *t, int st, struct err *e)
{
    struct err late = {0};
    if (t->cfg->run.dir[0] == '\0' || t->step == 0)
        return st;
    if (save_as(t, true, false, &late) == ST_OK) {
        err_in(e, "reading data for step %lld; a checkpoint of step %lld was saved", (long long)t->step + 1,
               (long long)t->step);
        st = ranks_agree(t, "data", st, e); /* still the error of all ranks, after they have agreed on the checkpoint */
    } else
        err_in(e, "reading data for step %lld; saving step %lld failed too: %s", (long long)t->step + 1,
               (long long)t->step, late.msg);
    return st;
}

static int loop(struct trainer *t, struct err *e)
{
    const struct config *c = t->cfg;
    int64_t first = t->step;
    while (t->step < c->train.steps) {
        struct step_result r;
        int st = trainer_step(t, &r, e);
        if (st != ST_OK)
            return t->data_failed ? data_failed(t, st, e) : st;
        if (r.stop == STOP_FAILED)
            return trainer_wait_for_save(t, e);
        if (!r.saving)
            TRY(trainer_wait_for_save(t, e));
        TRY(report_step(t, &r, e));
        TRY(finish_trace(t, t->step - first, e));
        bool last = t->step == c->train.steps;
        bool eval = t->has_eval && c->train.eval_every > 0 && (last || every(t->step, c->train.eval_every));
        if (eval)
            TRY(eval_now(t, e));
        if (eval || last)
            samples_write(t);
        if (every(t->step, c->run.save_every) || last || r.stop != STOP_NOT)
            TRY(save_as(t, last, r.stop != STOP_NOT && !last, e));
        if (r.stop != STOP_NOT && !last)
            return stopped(t, r.stop, e);
    }
    return ST_OK;
}

/* What came of it, on stdout; with run.quiet one line. */
static void print_result(const struct trainer *t)
{
    const struct config *c = t->cfg;
    struct log_result r = log_result(t->log);
    char tokens[32], took[32];
    printf("%lld step%s, %s tokens in %s: loss %.4f (began at %.4f)", (long long)r.steps, r.steps == 1 ? "" : "s",
           human_count((double)r.tokens, tokens, sizeof tokens), human_time(r.seconds, took, sizeof took), r.loss,
           r.first_loss);
    if (!isnan(r.val_loss))
        printf(", validation %.4f", r.val_loss);
    if (!isnan(r.bits_per_byte))
        printf(" (%.4f bits/byte)", r.bits_per_byte);
    if (r.skipped > 0)
        printf(", %lld steps skipped", (long long)r.skipped);
    printf("%s\n", c->run.dir[0] ? "" : "; the model was not saved");
    if (r.steps >= 20 && r.loss >= r.first_loss)
        printf("the loss did not fall: try another train.lr or more steps\n");
    if (c->run.quiet || c->run.dir[0] == '\0')
        return;
    if (c->run.report)
        printf("report: %s/report.html\n", c->run.dir);
    printf("next:   braid generate %s --generate.prompt='...'\n", c->run.dir);
}

/* The run failed while a checkpoint was being written. Where all ranks have the same error they can complete it. */
static void end_save(struct trainer *t, int st, struct err *e)
{
    struct err late = {0};
    bool several = t->model.mesh.world > 1, together = !several || world_error_agreed(t->world);
    if (!together || t->saving == NULL) {
        trainer_save_drop(t);
        return;
    }
    if (trainer_wait_for_save(t, &late) != ST_OK)
        err_in(e, "an earlier checkpoint could not be written either: %s", late.msg);
    if (several)
        ranks_agree(t, "end", st, e);
}

int trainer_run(struct trainer *t, struct err *e)
{
    sigset_t set, before;
    stop_signals(&set);
    pthread_sigmask(SIG_BLOCK, &set, &before);
    t->stop_request = find_stop_request;
    t->deadline = t->cfg->run.minutes > 0 ? time_now() + 60 * t->cfg->run.minutes : 0;
    int st = trainer_is_rank0(t) ? open_log(t, e) : ST_OK;
    if (st == ST_OK)
        st = loop(t, e);
    if (st != ST_OK)
        end_save(t, st, e);
    if (st == ST_NONFINITE && t->log != NULL)
        log_record(t->log, LOG_NONFINITE, t->step, "%s", e->msg); /* the command prints it */
    struct err log_error = {0};
    if (t->log != NULL) {
        log_break(t->log);
        if (!t->cfg->run.quiet && st == ST_OK)
            log_print_curve(t->log, stderr, true);
        if (st == ST_OK)
            print_result(t);
        fflush(stdout);
    }
    int log_st = log_close(t->log, &log_error);
    t->log = NULL;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (st == ST_OK && log_st != ST_OK) {
        *e = log_error;
        return log_st;
    }
    return st;
}
