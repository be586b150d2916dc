/* Recorded times of one machine, as `braid bench --record=FILE` writes them to bench/, and what
 * changed against them. */
#ifndef BRAID_LOG_BASELINE_H
#define BRAID_LOG_BASELINE_H

#include "base/base.h"

struct baseline_row {
    const char *what, *shape; /* an op and its shape, or "train" and the words of the command */
    double us;
    const char *bits; /* fingerprint of a training run's losses and norms; "": none */
};
struct baseline {
    const char *device; /* as the device names itself; NULL: no row yet */
    struct baseline_row *row;
    int n;
    size_t cap;
    struct arena text;
};
void baseline_init(struct baseline *b);
void baseline_release(struct baseline *b);
/* A file that is no baseline is an error that says where. */
int baseline_read(struct baseline *b, const char *path, struct err *e);
int baseline_parse(struct baseline *b, const char *text, size_t n, const char *label, struct err *e);
int baseline_device(struct baseline *b, const char *device, struct err *e);
/* Adds a row, or replaces the one with the same names. */
int baseline_put(struct baseline *b, const struct baseline_row *row, struct err *e);
/* Adds the rows to those that the file has already, which must be of the same device. */
int baseline_record(const struct baseline *now, const char *path, struct err *e);
/* Rows of `now` that differ from `old` by more than `percent`, those that are new, those whose bits differ, and a
 * summary. all:
 * rows that `old` has and `now` has not are named too. */
void baseline_compare(const struct baseline *old, const struct baseline *now, double percent, bool all,
                      struct buf *out);

#endif
