/* Private to log/: the parts a log is made of. */
#ifndef BRAID_LOG_INT_H
#define BRAID_LOG_INT_H

#include "base/base.h"
#include "log/log.h"

/* ---- escape.c: text from outside, made safe for its target ----------------------------------- */
/* Bytes that are not UTF-8 become U+FFFD. */
void add_json_string(struct buf *b, const char *s);             /* with its quotes */
void add_json_number(struct buf *b, double v, const char *fmt); /* null unless finite */
void add_html(struct buf *b, const char *s);
void add_utf8(struct buf *b, const char *s);

/* ---- sink.c: a file that only grows, by whole records ---------------------------------------- */
struct sink {
    int fd;       /* -1: closed */
    int64_t size; /* end of the last whole record */
    char *path;
    bool broken;  /* the file ends in half a record that could not be cut off */
    bool written; /* something was written by this sink */
};
int sink_open(struct sink *s, const char *path, int flags, struct err *e);
/* All of it or nothing: after a failed write the file is cut back to the last whole record. */
int sink_write(struct sink *s, const void *bytes, size_t n, struct err *e);
int sink_close(struct sink *s, struct err *e); /* syncs what was written */

/* ---- history.c: what the report draws, in bounded memory ------------------------------------- */

/* One or more consecutive values. n counts the finite ones; n 0 is a gap. */
struct hist_point {
    int64_t first, last; /* steps */
    double mean, low, high;
    int32_t n, bad;
};
/* When a series is full, neighbours are joined and every later point holds twice as many values. */
struct series {
    char *tag;
    struct hist_point *point;
    int count, cap;
    int32_t stride;
    double last, best; /* last value, finite or not; lowest finite value */
    int64_t last_step, best_step;
    double pending; /* given for the coming step (extras only) */
    bool has_pending;
};
int series_init(struct series *s, const char *tag, int cap, struct err *e);
void series_release(struct series *s);
void series_add(struct series *s, int64_t step, double v);

enum {
    MAIN_POINTS = 2000,
    EXTRA_POINTS = 400,
    MAX_EXTRAS = 4096,
    MAX_TAG = 200,
    MAX_EVENTS = 400,
    MAX_SAMPLES = 6,
    SAMPLE_TEXT = 2000,
};

enum hist_main {
    HIST_LOSS,
    HIST_LR,
    HIST_NORM,
    HIST_SPEED,
    HIST_MFU,
    HIST_VAL,
    HIST_BPB,
    HIST_TOKENS, /* seen up to this step */
    HIST_TIME,   /* seconds of training up to this step */
    HIST_MAIN_COUNT,
};
struct hist_event {
    enum log_event_kind kind;
    int64_t step;
    char text[160];
};
/* Text that the model wrote during the run. */
struct hist_sample {
    int64_t step;
    char text[SAMPLE_TEXT];
};
/* What the newest start or resume record says about the run; each may be NULL. */
struct hist_facts {
    char *command, *machine, *model;
    int64_t total_steps, memory_bytes; /* 0: not known */
};
struct history {
    struct series main[HIST_MAIN_COUNT];
    struct series *extra; /* MAX_EXTRAS places, made as tags appear */
    uint16_t *slot;       /* hash table of extras: index + 1 */
    int n_extra;
    struct hist_event event[MAX_EVENTS];
    int n_events;
    struct hist_sample sample[MAX_SAMPLES]; /* the newest */
    int n_samples;
    struct hist_facts facts; /* set by history_load only */
    int64_t n_checkpoints, n_skipped, n_nonfinite;
    int64_t last_step, tokens;
    double elapsed;
};
int history_init(struct history *h, struct err *e);
void history_release(struct history *h);
struct series *history_extra(struct history *h, const char *tag, bool make);
void history_step(struct history *h, const struct step_record *r);
void history_eval(struct history *h, const struct eval_record *r);
void history_event(struct history *h, enum log_event_kind kind, int64_t step, const char *text);
void history_sample(struct history *h, int64_t step, const char *text);
/* Read a metrics.jsonl, leaving out what a later start or resume record took back. Lines that are
 * not records (a line cut short by a kill) are counted in *ignored. A missing
 * file is an empty one. */
int history_load(struct history *h, const char *path, int64_t *ignored, struct err *e);
const char *event_name(enum log_event_kind kind);

/* ---- trim.c: a resume takes back what came after its checkpoint ------------------------------ */

/* Steps and evaluations beyond `step` are cut out of a metrics.jsonl, and a half line at its end; events stay. The file
 * is replaced whole, so a kill leaves the old or the new one. *removed counts records. A missing
 * file is an empty one. */
int metrics_trim(const char *path, int64_t step, int64_t *removed, struct err *e);
/* A new run in a folder that has a log: that becomes metrics.1.jsonl, or the next free number; to
 * gets its path, or "". */
int metrics_set_aside(const char *path, char *to, size_t size, struct err *e);

/* ---- watch.c: signs that a run does not learn ------------------------------------------------ */
struct watch {
    double first_loss; /* NAN: none yet */
    int above;         /* steps in a row with a loss far above it */
    bool told_loss, told_zero;
};
void watch_start(struct watch *w, double first_loss);
/* True when there is something new to tell, which is then in out. */
bool watch_step(struct watch *w, const struct step_record *r, char *out, size_t size);

/* ---- progress.c: the line on the terminal ---------------------------------------------------- */
struct progress {
    FILE *out;
    enum log_progress mode; /* never AUTO once initialised */
    int64_t total;
    int log_every;
    bool drawn;               /* an in-place line is on the screen */
    bool first;               /* nothing was shown yet */
    double drawn_at;          /* of the last redraw */
    double val;               /* last validation loss; NAN: none */
    double step_time, weight; /* smoothed seconds per step, and the bias of the smoothing */
    int64_t last_step;
    double last_elapsed;
};
void progress_init(struct progress *p, const struct log_opts *o);
void progress_step(struct progress *p, const struct step_record *r);
void progress_eval(struct progress *p, const struct eval_record *r);
/* A line of its own, above the progress line. */
void progress_note(struct progress *p, const char *fmt, ...) PRINTF_LIKE(2, 3);
void progress_break(struct progress *p);
/* The text of the line; without cr or newline. */
void progress_text(const struct progress *p, const struct step_record *r, char *out, size_t size);
const char *short_count(double n, char *out, size_t size); /* "12.3k" */

#endif
