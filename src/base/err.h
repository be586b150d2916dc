/* Errors as values: every fallible function returns an enum status and fills a caller's struct err.
 * The message says what failed, where and with which values; the hint says what to try; the trail
 * says during which operations. No globals, no exit() below cmd/. */
#ifndef BRAID_BASE_ERR_H
#define BRAID_BASE_ERR_H

#include <stdio.h>

enum status {
    ST_OK = 0,
    ST_USAGE,       /* the command line or a config file is wrong */
    ST_INVALID,     /* an argument, shape or value is not acceptable */
    ST_IO,          /* the operating system refused; errno text is in the message */
    ST_NOMEM,       /* memory could not be allocated */
    ST_CORRUPT,     /* a file is damaged, truncated or not what it claims to be */
    ST_CONFLICT,    /* two sources disagree (config against checkpoint, key against key) */
    ST_UNSUPPORTED, /* a legal request this build or device cannot serve */
    ST_NONFINITE,   /* a NaN or infinity where none may be */
    ST_INTERRUPTED, /* stopped by a signal, state saved */
    ST_PEER,        /* another rank failed, ended or did not arrive in time */
    ST_INTERNAL,    /* our own bug */
    ST_SIGNED = -1, /* never used: makes the enum signed in every compiler, as functions return int */
};

struct err {
    enum status code;
    char msg[1024];
    char hint[512];
    char trail[512]; /* innermost context first, separated by "; " */
};

#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))

/* Each returns a status, so that "return err_set(...)" is one line. A NULL err is allowed. */
int err_set(struct err *e, enum status code, const char *fmt, ...) PRINTF_LIKE(3, 4);
int err_hint(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);  /* returns e->code */
int err_in(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);    /* returns e->code */
int err_errno(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3); /* ST_IO + strerror(errno) */
void err_clear(struct err *e);
void err_print(const struct err *e, FILE *out);
const char *status_name(enum status s);

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int try_status_ = (call);                                                                                      \
        if (try_status_ != ST_OK)                                                                                      \
            return try_status_;                                                                                        \
    } while (0)

/* For functions with an "out:" label and an int named st. */
#define TRY_OUT(call)                                                                                                  \
    do {                                                                                                               \
        st = (call);                                                                                                   \
        if (st != ST_OK)                                                                                               \
            goto out;                                                                                                  \
    } while (0)

#define countof(a) ((int)(sizeof(a) / sizeof((a)[0])))

#endif
