/* Normalisation of text before it is split: Unicode normal forms (utf8proc), a prefix, replacement
 * of a string. */
#include "token/token_int.h"

#include <stdlib.h>
#include <utf8proc.h>

void norm_release(struct norm *n)
{
    for (int i = 0; i < n->n; i++) {
        free(n->step[i].from);
        free(n->step[i].to);
    }
    n->n = 0;
}

static int map_part(const uint8_t *p, size_t n, utf8proc_option_t how, struct buf *out, struct err *e)
{
    utf8proc_uint8_t *text = NULL;
    utf8proc_ssize_t got = utf8proc_map(p, (utf8proc_ssize_t)n, &text, how);
    if (got < 0)
        return err_set(e, got == UTF8PROC_ERROR_NOMEM ? ST_NOMEM : ST_INTERNAL, "cannot normalise %zu bytes: %s", n,
                       utf8proc_errmsg(got));
    buf_add_n(out, text, (size_t)got);
    free(text);
    return ST_OK;
}

/* Characters below the limit are their own normal form and never combine with what comes before
 * them, so the text is cut there: a part is one such character and all that follow it at or above
 * the limit. */
static int normal_form(enum norm_kind kind, const uint8_t *p, const uint8_t *end, struct buf *out, bool *same,
                       struct err *e)
{
    static const int options[] = {
        [NORM_NFC] = UTF8PROC_COMPOSE | UTF8PROC_STABLE,
        [NORM_NFD] = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE,
        [NORM_NFKC] = UTF8PROC_COMPOSE | UTF8PROC_STABLE | UTF8PROC_COMPAT,
        [NORM_NFKD] = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | UTF8PROC_COMPAT,
    };
    const uint8_t limit = kind == NORM_NFC ? 0xCC : 0x80; /* first byte: U+0300, U+0080 */
    const uint8_t *plain = p, *last = p;
    *same = true;
    while (p < end) {
        if (*p < limit) {
            last = p;
            p += *p < 0x80 ? 1 : 2;
            continue;
        }
        const uint8_t *stop = p;
        while (stop < end && (*stop >= limit || (*stop & 0xC0) == 0x80))
            stop++;
        buf_add_n(out, plain, (size_t)(last - plain));
        TRY(map_part(last, (size_t)(stop - last), (utf8proc_option_t)options[kind], out, e));
        *same = false;
        plain = last = p = stop;
    }
    if (!*same)
        buf_add_n(out, plain, (size_t)(end - plain));
    return ST_OK;
}

static void replace_all(const struct norm_step *s, const uint8_t *p, const uint8_t *end, struct buf *out, bool *same)
{
    *same = true;
    while (p < end) {
        const uint8_t *hit = s->n_from > 0 ? memmem(p, (size_t)(end - p), s->from, s->n_from) : NULL;
        if (hit == NULL && *same)
            return;
        const uint8_t *stop = hit != NULL ? hit : end;
        buf_add_n(out, p, (size_t)(stop - p));
        if (hit != NULL)
            buf_add_n(out, s->to, s->n_to);
        *same = false;
        p = hit != NULL ? hit + s->n_from : end;
    }
}

int norm_apply(const struct norm *n, const uint8_t *text, size_t len, bool prepend, struct buf *out,
               struct buf *scratch, bool *same, struct err *e)
{
    *same = true;
    for (int i = 0; i < n->n && len > 0; i++) {
        const struct norm_step *s = &n->step[i];
        bool step_same = false;
        if (s->kind == NORM_PREPEND && !prepend)
            continue;
        buf_clear(scratch);
        if (s->kind == NORM_PREPEND) {
            buf_add_n(scratch, s->to, s->n_to);
            buf_add_n(scratch, text, len);
        } else if (s->kind == NORM_REPLACE) {
            replace_all(s, text, text + len, scratch, &step_same);
        } else {
            TRY(normal_form(s->kind, text, text + len, scratch, &step_same, e));
        }
        TRY(buf_check(scratch, e));
        if (step_same)
            continue;
        struct buf swap = *out;
        *out = *scratch;
        *scratch = swap;
        text = (const uint8_t *)out->text;
        len = out->len;
        *same = false;
    }
    return ST_OK;
}
