/* metrics.jsonl after a kill: steps that no checkpoint holds are trained again, so their old records are cut out before
 * the new ones are written. A reader then finds each step once, in order, and needs no rule. See log_int.h. */
#include "log/log_int.h"

#include <ctype.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct line {
    const char *text;
    size_t n; /* with its newline */
    bool whole;
};

static struct line next_line(const struct file_map *m, size_t at)
{
    const char *text = (const char *)m->data + at, *stop = memchr(text, '\n', m->size - at);
    return (struct line){text, stop != NULL ? (size_t)(stop - text) + 1 : m->size - at, stop != NULL};
}

/* What happened to the run stays told; a record that is named otherwise belongs to its step. */
static bool is_happening(const char *event)
{
    for (int kind = 0; kind < LOG_EVENT_KINDS; kind++)
        if (strcmp(event, event_name((enum log_event_kind)kind)) == 0)
            return true;
    return false;
}

/* A step or an evaluation of a later step. Damaged whole lines are kept: they are not ours to judge. */
static bool taken_back(const struct line *l, int64_t step)
{
    static const char begin[] = "{\"step\":";
    if (!l->whole)
        return true;
    const char *digits = l->text + sizeof begin - 1;
    if (l->n > sizeof begin && memcmp(l->text, begin, sizeof begin - 1) == 0 && isdigit((unsigned char)digits[0]) &&
        strtoll(digits, NULL, 10) <= step)
        return false; /* most lines; digits end at the newline at the latest */
    json_t *rec = json_loadb(l->text, l->n, JSON_REJECT_DUPLICATES, NULL);
    const json_t *at = json_object_get(rec, "step");
    const char *event = json_string_value(json_object_get(rec, "event"));
    bool later = json_is_integer(at) && json_integer_value(at) > step && !(event != NULL && is_happening(event));
    json_decref(rec);
    return later;
}

/* Beside the file, then in its place. */
static int write_kept(const struct file_map *m, const char *path, const char *part, int64_t step, struct err *e)
{
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return err_errno(e, "cannot create %s", part);
    int st = ST_OK;
    size_t from = 0;
    for (size_t at = 0; at <= m->size && st == ST_OK;) { /* stretches of kept lines in one write */
        struct line l = at < m->size ? next_line(m, at) : (struct line){0};
        bool cut = at == m->size || taken_back(&l, step);
        if (cut && at > from)
            st = file_write_fd(fd, m->data + from, at - from, part, e);
        if (at == m->size)
            break;
        at += l.n;
        from = cut ? at : from;
    }
    if (st == ST_OK && fsync(fd) != 0)
        st = err_errno(e, "cannot sync %s", part);
    if (close(fd) != 0 && st == ST_OK)
        st = err_errno(e, "cannot close %s", part);
    if (st == ST_OK && rename(part, path) != 0)
        st = err_errno(e, "cannot rename %s to %s", part, path);
    if (st != ST_OK)
        unlink(part);
    return st;
}

int metrics_set_aside(const char *path, char *to, size_t size, struct err *e)
{
    to[0] = '\0';
    if (file_size(path) <= 0)
        return ST_OK;
    size_t stem = strlen(path) - (str_ends(path, ".jsonl") ? strlen(".jsonl") : 0);
    for (int i = 1; i < 100000; i++) {
        snprintf(to, size, "%.*s.%d.jsonl", (int)stem, path, i);
        if (file_exists(to))
            continue;
        return rename(path, to) == 0 ? ST_OK : err_errno(e, "cannot rename %s to %s", path, to);
    }
    return err_set(e, ST_INVALID, "%s: there are too many logs of earlier starts beside it", path);
}

int metrics_trim(const char *path, int64_t step, int64_t *removed, struct err *e)
{
    struct file_map m;
    *removed = 0;
    if (!file_exists(path))
        return ST_OK;
    TRY(file_map_open(&m, path, e));
    for (size_t at = 0; at < m.size;) {
        struct line l = next_line(&m, at);
        *removed += taken_back(&l, step);
        at += l.n;
    }
    int st = ST_OK;
    size_t n = strlen(path) + sizeof ".tmp";
    char *part = malloc(n);
    if (part == NULL)
        st = err_set(e, ST_NOMEM, "no memory for a path of %zu bytes", n);
    else
        snprintf(part, n, "%s.tmp", path);
    if (st == ST_OK && *removed > 0)
        st = write_kept(&m, path, part, step, e);
    else if (st == ST_OK)
        unlink(part); /* what a kill while trimming left */
    free(part);
    file_map_close(&m);
    return st;
}
