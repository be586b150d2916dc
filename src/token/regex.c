/* Patterns without a splitter of their own: PCRE2 with its compiler, and limits on what one match
 * may cost. */
#include "token/token_int.h"

#include <stdlib.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum { MATCH_LIMIT = 10 * 1000 * 1000, DEPTH_LIMIT = 100 * 1000, HEAP_LIMIT_KIB = 64 << 10, PATTERN_MAX = 1 << 16 };

struct regex {
    pcre2_code *code;
    bool jit;
};
struct regex_match {
    pcre2_match_data *data;
    pcre2_match_context *context;
};

/* \s written out: PCRE2 counts U+180E as white space, the tokenizers' own engines do not. */
#define SPACES                                                                                                         \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"                        \
    "\\x{205f}\\x{3000}"

/* \w of Unicode's recommendation; PCRE2's leaves marks out. */
#define WORDS "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}"

/* An escape that is written out: its members, NULL: taken as it is. Negated ones inside a class
 * cannot be. */
static const char *members_of(char c, bool in_class)
{
    return c == 's' ? SPACES : c == 'w' ? WORDS : in_class ? NULL : c == 'S' ? SPACES : c == 'W' ? WORDS : NULL;
}

static void translate(const char *p, struct buf *out)
{
    bool in_class = false;
    for (; *p != '\0'; p++) {
        const char *members = *p == '\\' ? members_of(p[1], in_class) : NULL;
        if (members != NULL) {
            bool negated = p[1] == 'S' || p[1] == 'W';
            buf_addf(out, in_class ? "%s%s" : "[%s%s]", negated ? "^" : "", members);
            p++;
        } else if (*p == '\\' && p[1] != '\0') {
            buf_add_n(out, p++, 2);
        } else if (*p == '[' && !in_class) {
            in_class = true;
            buf_add_n(out, p, 1);
            if (p[1] == '^')
                buf_add_n(out, ++p, 1);
            if (p[1] == ']')
                buf_add_n(out, ++p, 1); /* a bracket in first place is a member */
        } else {
            in_class = in_class && *p != ']';
            buf_add_n(out, p, 1);
        }
    }
}

int regex_open(struct regex **out, const char *pattern, struct err *e)
{
    *out = NULL;
    if (strlen(pattern) > PATTERN_MAX)
        return err_set(e, ST_UNSUPPORTED, "a pattern of %zu characters; at most %d are supported", strlen(pattern),
                       PATTERN_MAX);
    struct buf text;
    buf_init(&text, 0);
    translate(pattern, &text);
    struct regex *r = calloc(1, sizeof *r);
    int st = buf_check(&text, e);
    if (r == NULL && st == ST_OK)
        st = err_set(e, ST_NOMEM, "out of memory for a pattern");
    if (st == ST_OK) {
        int code;
        PCRE2_SIZE at;
        r->code = pcre2_compile((PCRE2_SPTR)text.text, text.len, PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code,
                                &at, NULL);
        if (r->code == NULL) {
            PCRE2_UCHAR why[128] = "";
            pcre2_get_error_message(code, why, sizeof why);
            st = err_set(e, ST_CORRUPT, "the pattern '%.200s' is not a regular expression: %s", pattern,
                         (const char *)why);
        } else {
            r->jit = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0; /* without it matching is only slower */
        }
    }
    buf_release(&text);
    if (st != ST_OK) {
        regex_close(r);
        return st;
    }
    *out = r;
    return ST_OK;
}

void regex_close(struct regex *r)
{
    if (r == NULL)
        return;
    pcre2_code_free(r->code);
    free(r);
}

int regex_match_open(struct regex_match **out, const struct regex *r, struct err *e)
{
    struct regex_match *m = *out = calloc(1, sizeof *m);
    if (m != NULL) {
        m->data = pcre2_match_data_create_from_pattern(r->code, NULL);
        m->context = pcre2_match_context_create(NULL);
    }
    if (m == NULL || m->data == NULL || m->context == NULL) {
        regex_match_close(m);
        *out = NULL;
        return err_set(e, ST_NOMEM, "out of memory for a pattern");
    }
    (void)pcre2_set_match_limit(m->context, MATCH_LIMIT); /* these three cannot fail */
    (void)pcre2_set_depth_limit(m->context, DEPTH_LIMIT);
    (void)pcre2_set_heap_limit(m->context, HEAP_LIMIT_KIB);
    return ST_OK;
}

void regex_match_close(struct regex_match *m)
{
    if (m == NULL)
        return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    free(m);
}

int regex_find(const struct regex *r, struct regex_match *m, const uint8_t *text, size_t n, size_t from, size_t *start,
               size_t *end, struct err *e)
{
    int got = pcre2_match(r->code, text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, m->data, m->context);
    if (got == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter has no such limit */
        got = pcre2_match(r->code, text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY | PCRE2_NO_JIT, m->data,
                          m->context);
    if (got == PCRE2_ERROR_NOMATCH) {
        *start = *end = n;
        return ST_OK;
    }
    if (got < 0) {
        PCRE2_UCHAR why[128] = "";
        pcre2_get_error_message(got, why, sizeof why);
        err_set(e, ST_UNSUPPORTED, "the tokenizer's pattern fails at byte %zu of a text of %zu: %s", from, n,
                (const char *)why);
        return err_hint(e, "its regular expression needs too many attempts on this text");
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(m->data);
    *start = v[0];
    *end = v[1];
    if (*start < from || *end <= *start || *end > n) /* \K inside a lookaround can do that */
        return err_set(e, ST_UNSUPPORTED, "the tokenizer's pattern matches backwards at byte %zu", from);
    return ST_OK;
}
