/* Repeats in a layer pattern, written out before anything else reads it: [*-]x32, (M-)x3, Mx4. Parentheses hold any
 * part of a pattern and may be nested. An x without a number behind it is left for the pattern's
 * own parser to refuse. */
#include "config/config_int.h"

#include <ctype.h>
#include <string.h>

enum { MAX_DEPTH = 16 };

struct expansion {
    const char *text;
    size_t at; /* the next character of text */
    char *out;
    size_t n; /* characters of out */
    struct err *e;
};

static int refuse(const struct expansion *x, size_t at, const char *what)
{
    err_set(x->e, ST_USAGE, "model.pattern: %s at position %zu of '%.200s'", what, at + 1, x->text);
    return at < 200 ? err_hint(x->e, "%.200s\n        %*s^", x->text, (int)at, "") : ST_USAGE;
}

static int put(struct expansion *x, const char *from, size_t n)
{
    if (x->n + n > CONFIG_PATTERN_MAX)
        return refuse(x, x->at > 0 ? x->at - 1 : 0,
                      "with its repeats written out, the pattern has more than 4096 characters");
    memcpy(x->out + x->n, from, n);
    x->n += n;
    return ST_OK;
}

/* "x32" behind what was written from out[start] on. */
static int repeat(struct expansion *x, size_t start)
{
    const char *p = x->text + x->at;
    int64_t times = 0;
    if (*p != 'x' || !isdigit((unsigned char)p[1]))
        return ST_OK;
    size_t at = x->at++;
    for (; isdigit((unsigned char)x->text[x->at]); x->at++)
        times = min_i64(times * 10 + (x->text[x->at] - '0'), 1 << 20);
    if (times == 0)
        return refuse(x, at, "a part cannot be repeated 0 times");
    size_t n = x->n - start;
    for (int64_t k = 1; k < times && n > 0; k++)
        TRY(put(x, x->out + start, n));
    return ST_OK;
}

/* Up to the closing parenthesis, or the end. Brackets are text here: what is wrong with them the
 * pattern's parser says. */
static int sequence(struct expansion *x, bool inside, size_t open, int depth)
{
    size_t group = x->n; /* where the last [ is in out */
    for (;;) {
        char ch = x->text[x->at];
        size_t start = x->n, at = x->at;
        if (ch == '\0')
            return inside ? refuse(x, open, "'(' without a matching ')'") : ST_OK;
        if (ch == ')')
            return inside ? ST_OK : refuse(x, at, "this ')' was not opened");
        if (ch == 'x' && isdigit((unsigned char)x->text[at + 1]))
            return refuse(x, at, "there is nothing in front of this repeat");
        x->at++;
        if (ch == '(') {
            if (depth == MAX_DEPTH)
                return refuse(x, at, "parentheses are nested too deep");
            TRY(sequence(x, true, at, depth + 1));
            x->at++;
        } else {
            TRY(put(x, &ch, 1));
        }
        group = ch == '[' ? start : group;
        if (strchr("[|/", ch) == NULL)
            TRY(repeat(x, ch == ']' ? group : start));
    }
}

int config_expand_pattern(const char *text, char out[CONFIG_PATTERN_MAX + 1], struct err *e)
{
    struct err local = {0};
    struct expansion x = {.text = text, .out = out, .e = e ? e : &local};
    TRY(sequence(&x, false, 0, 0));
    out[x.n] = '\0';
    return ST_OK;
}

static int expand_option(struct config *c, const char *name, const char *text, struct err *e)
{
    char out[CONFIG_PATTERN_MAX + 1];
    if (strpbrk(text, "()x") == NULL)
        return ST_OK;
    TRY(config_expand_pattern(text, out, e));
    return option_set(c, option_find(name), out, config_source_of(c, name), e);
}

int expand_patterns(struct config *c, struct err *e)
{
    TRY(expand_option(c, "model.pattern", c->model.pattern, e));
    return expand_option(c, "model.mtp_pattern", c->model.mtp_pattern, e);
}
