/* Strings: a growable buffer with a declared maximum, strict number parsing, nearest-name search. */
#ifndef BRAID_BASE_STR_H
#define BRAID_BASE_STR_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Growable text. After the first failure (no memory, or past max) every call is a no-op and
 * failed stays set, so a writer checks once at the end. text is always a C string or NULL. */
struct buf {
    char *text;
    size_t len, cap, max; /* max 0: no limit */
    bool failed;
};
void buf_init(struct buf *b, size_t max);
void buf_release(struct buf *b);
void buf_clear(struct buf *b);
void buf_add(struct buf *b, const char *s);
void buf_add_n(struct buf *b, const void *bytes, size_t n);
void buf_addf(struct buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
int buf_check(const struct buf *b, struct err *e); /* ST_NOMEM if a write failed */

/* The whole string must be the number. Suffixes k, m, g (powers of 1000) and ki, mi, gi (of 1024) are accepted. */
bool parse_i64(const char *s, int64_t *out);
bool parse_f64(const char *s, double *out); /* finite only */
bool parse_bool(const char *s, bool *out);  /* on/off, true/false, yes/no, 1/0 */

/* The closest name by edit distance, or NULL when nothing is near. */
const char *nearest_name(const char *name, const char *const *names, int n);
bool str_starts(const char *s, const char *prefix);
bool str_ends(const char *s, const char *suffix);
/* Is word one of those in a list separated by commas or spaces? */
bool str_has_word(const char *list, const char *word);
/* '*' matches any run of characters. */
bool str_glob(const char *pattern, const char *s);

/* "1.50 GiB", "12.3 M": for people; written into out, which is returned. */
const char *human_bytes(double bytes, char *out, size_t size);
const char *human_count(double n, char *out, size_t size);
const char *human_time(double seconds, char *out, size_t size);

uint64_t hash64(const void *bytes, size_t n, uint64_t seed); /* XXH64: stable, names and checks */
uint64_t hash64_str(const char *s, uint64_t seed);

#endif
