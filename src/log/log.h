/* What a training run tells its user: a progress line, metrics.jsonl, TensorBoard events and an
 * HTML report, all fed from one place.
 *
 * A record's step is the number of finished updates: the first update gives step 1, and a run that
 * resumes from a checkpoint of step N next logs N + 1.
 *
 * Logging never stops training. A sink that cannot write (disk full) is reported once, retried at
 * the next record, and the first failure is returned by log_close. After its tags have been seen
 * once, log_step allocates nothing but, every few seconds, the pages of the report. One thread uses
 * a log; in a distributed run, one rank. */
#ifndef BRAID_LOG_H
#define BRAID_LOG_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct train_log;

enum log_progress {
    LOG_PROGRESS_AUTO, /* in place on a terminal, plain lines elsewhere */
    LOG_PROGRESS_LINE,
    LOG_PROGRESS_PLAIN,
    LOG_PROGRESS_OFF,
};

struct log_opts {
    const char *run_dir; /* made if missing; NULL: progress only */
    int64_t total_steps; /* 0: not known */
    int64_t start_step;  /* updates already done */
    bool resume;         /* false: a new run; the log of an earlier one in the folder is set aside */
    int log_every;       /* plain lines: every so many steps; 0 counts as 1 */
    enum log_progress progress;
    FILE *out;                /* progress and notices; NULL: stderr */
    bool tensorboard, report; /* write <run>/tb/events.out.tfevents..., <run>/report.html */
    /* Shown in the report and as TensorBoard text; each may be NULL. */
    const char *title, *command, *config, *model, *machine;
    int64_t memory_bytes; /* planned; 0: not known */
};

struct step_record {
    int64_t step;
    double loss, lr;
    double grad_norm;    /* below 0: not known */
    int64_t tokens;      /* seen since the run began */
    double tokens_per_s; /* 0: not known */
    double mfu;          /* percent of the machine's peak; 0: not known */
    double elapsed;      /* seconds of training */
    bool skipped;        /* the update was not applied */
};

struct eval_record {
    int64_t step;
    double loss;          /* nats per token */
    double bits_per_byte; /* 0: not known */
};

enum log_event_kind {
    LOG_START, /* log_open writes START and RESUME itself */
    LOG_RESUME,
    LOG_CHECKPOINT,
    LOG_NONFINITE,
    LOG_STOP,
    LOG_NOTE,
    LOG_EVENT_KINDS,
};

int log_open(struct train_log **out, const struct log_opts *o, struct err *e);
/* An extra number of the coming step, such as log_scalar(log, "expert load/layer 3", 1.02). Tags with the same text
 * before the last '/' share a panel in the report. ST_INVALID when the tag is empty or too long or there are too many;
 * the number is then not logged. */
int log_scalar(struct train_log *log, const char *tag, double value);
void log_step(struct train_log *log, const struct step_record *r);
void log_eval(struct train_log *log, const struct eval_record *r);
/* Text that the model wrote, for the report. */
void log_sample(struct train_log *log, int64_t step, const char *text);
void log_event(struct train_log *log, enum log_event_kind kind, int64_t step, const char *fmt, ...) PRINTF_LIKE(4, 5);
/* The same without a line on the terminal. */
void log_record(struct train_log *log, enum log_event_kind kind, int64_t step, const char *fmt, ...) PRINTF_LIKE(4, 5);
/* The results of the run so far; values that are not known are NAN. */
struct log_result {
    int64_t steps, tokens, skipped;
    double seconds;
    double first_loss, loss; /* of the run's first steps and of its last ones */
    double val_loss, bits_per_byte;
};
struct log_result log_result(const struct train_log *log);
/* Ends a progress line drawn in place, so that something else may print. */
void log_break(struct train_log *log);
/* The loss so far as a curve of text; unicode draws with Braille dots. */
void log_print_curve(const struct train_log *log, FILE *out, bool unicode);
/* Writes the final report, frees everything (also on failure), returns the first failure of the
 * run's logging. NULL is allowed. */
int log_close(struct train_log *log, struct err *e);

double log_perplexity(double loss); /* exp(min(20, loss)), as Megatron prints it */

#endif
