/* Private to log/: writer of TensorBoard event files: a stream of checksummed records, each a protobuf Event,
 * written by hand because only six message types are needed. */
#ifndef BRAID_TENSORBOARD_INT_H
#define BRAID_TENSORBOARD_INT_H

#include "log/log_int.h"

struct tb_writer {
    struct sink file;
    struct buf summary, event; /* reused, so that a step allocates nothing */
    bool had_files;            /* the folder held event files of an earlier run */
};

/* Makes dir if needed and a new file in it, named so that it sorts after all earlier ones. */
int tb_open(struct tb_writer *w, const char *dir, double wall, struct err *e);
/* Tells readers to forget everything at `step` and after it, from files before this one. */
int tb_restart_at(struct tb_writer *w, int64_t step, double wall, struct err *e);
/* One event with any number of scalars: begin, add, end. */
void tb_begin(struct tb_writer *w);
void tb_add_scalar(struct tb_writer *w, const char *tag, double value);
int tb_end(struct tb_writer *w, int64_t step, double wall, struct err *e);
/* Text is shown as it is, in a fixed-width font. */
int tb_text(struct tb_writer *w, const char *tag, const char *text, int64_t step, double wall, struct err *e);
int tb_close(struct tb_writer *w, struct err *e);

uint32_t crc32c(const void *bytes, size_t n);

#endif
