/* Runs as pages: report.html holds its own styles and drawings, needs no network and no
 * scripts. Also the loss curve as text for a terminal. */
#ifndef BRAID_REPORT_H
#define BRAID_REPORT_H

#include "log/log_int.h"

struct report_facts {
    const char *title, *command, *config, *model, *machine; /* each may be NULL */
    const char *status;   /* "running" (the page then loads itself again), "finished", "stopped",
                             "unfinished" */
    int64_t total_steps;  /* 0: not known */
    int64_t memory_bytes; /* planned; 0: not known */
};

int report_html(struct buf *out, const struct history *h, const struct report_facts *f,
                struct err *e);
/* Writes <run>/report.html anew, from metrics.jsonl and config.ini in the run's folder. */
int report_from_run(const char *run_dir, struct err *e);
/* One page that compares runs: loss by step, tokens and time, key numbers, options that differ. */
int report_compare(const char *const *run_dir, int n, const char *out_path, struct err *e);

struct curve {
    const double *step, *loss; /* rising steps; values that are not finite are left out */
    int n;
    const double *val_step, *val_loss;
    int n_val;
    int rows, cols; /* of the plotting area; 0: 12 by 72 */
    bool unicode;   /* Braille dots instead of asterisks */
};
void report_terminal_curve(FILE *out, const struct curve *c);
void report_history_curve(FILE *out, const struct history *h, bool unicode);

#endif
