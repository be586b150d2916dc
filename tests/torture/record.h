/* The log of record.c: a record, then n_a bytes of a path, then n_b bytes of data (REC_RENAME, REC_LINK: of the new
 * path). */
#ifndef BRAID_TORTURE_RECORD_H
#define BRAID_TORTURE_RECORD_H

#include <stdint.h>

enum record_op { REC_OPEN, REC_CLOSE, REC_WRITE, REC_TRUNCATE, REC_SYNC, REC_RENAME, REC_MKDIR, REC_REMOVE, REC_LINK };
struct record {
    int32_t op, fd;
    int64_t at; /* offset or length; REC_OPEN: 1, the file was cut */
    uint64_t n_b;
    uint32_t n_a, unused;
};

#endif
