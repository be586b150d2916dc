/* Reports of runs as pages: report.html holds its own styles and drawings and needs neither a network nor scripts. */
#ifndef BRAID_REPORT_H
#define BRAID_REPORT_H

#include "base/err.h"

/* Writes <run>/report.html anew, from metrics.jsonl and config.ini in the run's folder. */
int report_from_run(const char *run_dir, struct err *e);
/* One page that compares runs: loss by step, tokens and time, key numbers, options that differ. */
int report_compare(const char *const *run_dir, int n, const char *out_path, struct err *e);

#endif
