/* Errors as values; see err.h. */
#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

int err_set(struct err *e, enum status code, const char *fmt, ...)
{
    if (e == NULL)
        return code;
    va_list ap;
    err_clear(e);
    e->code = code;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return code;
}

int err_hint(struct err *e, const char *fmt, ...)
{
    if (e == NULL)
        return ST_INTERNAL;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->hint, sizeof e->hint, fmt, ap);
    va_end(ap);
    return e->code;
}

int err_in(struct err *e, const char *fmt, ...)
{
    if (e == NULL)
        return ST_INTERNAL;
    size_t used = strlen(e->trail);
    if (used > 0 && used + 2 < sizeof e->trail) {
        memcpy(e->trail + used, "; ", 3);
        used += 2;
    }
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(e->trail + used, sizeof e->trail - used, fmt, ap);
    va_end(ap);
    return e->code;
}

int err_errno(struct err *e, const char *fmt, ...)
{
    if (e == NULL)
        return ST_IO;
    int saved = errno;
    va_list ap;
    err_clear(e);
    e->code = ST_IO;
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    size_t used = strlen(e->msg);
    snprintf(e->msg + used, sizeof e->msg - used, ": %s", strerror(saved));
    if (saved == ENOSPC || saved == EDQUOT)
        err_hint(e, "free some space or choose another folder; nothing already saved was touched");
    return ST_IO;
}

void err_clear(struct err *e)
{
    if (e != NULL) {
        e->code = ST_OK;
        e->msg[0] = e->hint[0] = e->trail[0] = '\0';
    }
}

void err_print(const struct err *e, FILE *out)
{
    fprintf(out, "braid: error: %s\n", e->msg[0] ? e->msg : status_name(e->code));
    if (e->trail[0])
        fprintf(out, "  while: %s\n", e->trail);
    if (e->hint[0])
        fprintf(out, "  hint: %s\n", e->hint);
}

const char *status_name(enum status s)
{
    static const char *const names[] = {
        [ST_OK] = "ok",
        [ST_USAGE] = "usage error",
        [ST_INVALID] = "invalid value",
        [ST_IO] = "input/output error",
        [ST_NOMEM] = "out of memory",
        [ST_CORRUPT] = "corrupt file",
        [ST_CONFLICT] = "conflict",
        [ST_UNSUPPORTED] = "unsupported",
        [ST_NONFINITE] = "non-finite value",
        [ST_INTERRUPTED] = "interrupted",
        [ST_PEER] = "another rank stopped",
        [ST_INTERNAL] = "internal error",
    };
    return (unsigned)s < (unsigned)countof(names) && names[s] ? names[s] : "unknown status";
}
