/* Strings; see str.h. */
#include "base/str.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

void buf_init(struct buf *b, size_t max) { *b = (struct buf){.max = max}; }

void buf_release(struct buf *b)
{
    free(b->text);
    *b = (struct buf){0};
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    b->failed = false;
    if (b->text != NULL)
        b->text[0] = '\0';
}

static bool buf_reserve(struct buf *b, size_t extra)
{
    if (b->failed)
        return false;
    size_t need = b->len + extra + 1;
    if (need <= extra || (b->max != 0 && b->len + extra > b->max)) {
        b->failed = true;
        return false;
    }
    if (need > b->cap) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap < need)
            cap *= 2;
        char *grown = realloc(b->text, cap);
        if (grown == NULL) {
            b->failed = true;
            return false;
        }
        b->text = grown;
        b->cap = cap;
    }
    return true;
}

void buf_add_n(struct buf *b, const void *bytes, size_t n)
{
    if (!buf_reserve(b, n))
        return;
    if (n > 0)
        memcpy(b->text + b->len, bytes, n);
    b->len += n;
    b->text[b->len] = '\0';
}

void buf_add(struct buf *b, const char *s) { buf_add_n(b, s, strlen(s)); }

void buf_addf(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n >= 0 && buf_reserve(b, (size_t)n)) {
        vsnprintf(b->text + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

int buf_check(const struct buf *b, struct err *e)
{
    if (!b->failed)
        return ST_OK;
    return err_set(e, ST_NOMEM, "text buffer could not grow past %zu bytes (limit %zu)", b->len, b->max);
}

bool parse_i64(const char *s, int64_t *out)
{
    static const struct {
        const char *suffix;
        int64_t mul;
    } scale[] = {{"", 1},         {"k", 1000},     {"m", 1000000}, {"g", 1000000000},
                 {"ki", 1 << 10}, {"mi", 1 << 20}, {"gi", 1 << 30}};
    char *end;
    if (!isdigit((unsigned char)*s) && *s != '-' && *s != '+')
        return false;
    errno = 0;
    long long v = strtoll(s, &end, 10);
    if (end == s || errno != 0)
        return false;
    for (int i = 0; i < countof(scale); i++)
        if (strcasecmp(end, scale[i].suffix) == 0)
            return !__builtin_mul_overflow((int64_t)v, scale[i].mul, out);
    return false;
}

bool parse_f64(const char *s, double *out)
{
    char *end;
    if (*s == '\0' || isspace((unsigned char)*s))
        return false;
    double v = strtod(s, &end);
    if (end == s || *end != '\0' || !isfinite(v))
        return false;
    *out = v;
    return true;
}

bool parse_bool(const char *s, bool *out)
{
    static const char *const yes[] = {"on", "true", "yes", "1"}, *const no[] = {"off", "false", "no", "0"};
    for (int i = 0; i < countof(yes); i++) {
        if (strcasecmp(s, yes[i]) == 0 || strcasecmp(s, no[i]) == 0) {
            *out = strcasecmp(s, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

/* Characters to insert, delete, replace or exchange with a neighbour. */
static int edit_distance(const char *a, const char *b)
{
    enum { MAX = 64 };
    int rows[3][MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];
    int na = (int)strnlen(a, MAX), nb = (int)strnlen(b, MAX);
    for (int j = 0; j <= nb; j++)
        before[j] = last[j] = j;
    for (int i = 1; i <= na; i++) {
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = last[j - 1] + (a[i - 1] != b[j - 1]);
            if (last[j] + 1 < best)
                best = last[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            row[j] = best;
        }
        int *free_row = before;
        before = last;
        last = row;
        row = free_row;
    }
    return last[nb];
}

/* A wrong guess is worse than none, so at most a quarter of the characters may differ. */
const char *nearest_name(const char *name, const char *const *names, int n)
{
    const char *best = NULL;
    int n_chars = (int)strlen(name), best_distance = (n_chars < 4 ? 1 : n_chars / 4) + 1;
    for (int i = 0; i < n; i++) {
        int d = edit_distance(name, names[i]);
        if (d < best_distance) {
            best_distance = d;
            best = names[i];
        }
    }
    return best;
}

bool str_starts(const char *s, const char *prefix) { return strncmp(s, prefix, strlen(prefix)) == 0; }

bool str_ends(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && memcmp(s + n - m, suffix, m) == 0;
}

bool str_has_word(const char *list, const char *word)
{
    size_t want = strlen(word), n;
    for (const char *p = list; *p != '\0'; p += n) {
        p += strspn(p, ", ");
        n = strcspn(p, ", ");
        if (n == want && n > 0 && memcmp(p, word, n) == 0)
            return true;
    }
    return false;
}

bool str_glob(const char *pattern, const char *s)
{
    const char *star = NULL, *mark = NULL;
    while (*s != '\0') {
        if (*pattern == '*') {
            star = pattern++;
            mark = s;
        } else if (*pattern == *s) {
            pattern++;
            s++;
        } else if (star != NULL) {
            pattern = star + 1;
            s = ++mark;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == '\0';
}

const char *human_bytes(double bytes, char *out, size_t size)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int i = 0;
    while (bytes >= 1024 && i < countof(unit) - 1) {
        bytes /= 1024;
        i++;
    }
    snprintf(out, size, i == 0 ? "%.0f %s" : "%.2f %s", bytes, unit[i]);
    return out;
}

const char *human_count(double n, char *out, size_t size)
{
    static const char *const unit[] = {"", " K", " M", " G", " T", " P"};
    int i = 0;
    while (fabs(n) >= 1000 && i < countof(unit) - 1) {
        n /= 1000;
        i++;
    }
    snprintf(out, size, i == 0 ? "%.4g%s" : "%.2f%s", n, unit[i]);
    return out;
}

const char *human_time(double seconds, char *out, size_t size)
{
    if (!isfinite(seconds) || seconds < 60)
        snprintf(out, size, "%.1fs", seconds);
    else if (seconds < 3600)
        snprintf(out, size, "%dm%02ds", (int)seconds / 60, (int)seconds % 60);
    else
        snprintf(out, size, "%.0fh%02dm", floor(seconds / 3600), (int)fmod(seconds / 60, 60));
    return out;
}

uint64_t hash64(const void *bytes, size_t n, uint64_t seed) { return XXH64(bytes, n, seed); }
uint64_t hash64_str(const char *s, uint64_t seed) { return XXH64(s, strlen(s), seed); }
