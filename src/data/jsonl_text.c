/* The text in a line of JSON, for the lines that nearly all files have: an object whose members are texts, numbers,
 * true, false and null. It is taken out without building the object, several times as fast as a parser. Whatever is
 * unusual is left to the parser, which also knows what is wrong with a bad line: a line is accepted here only if it
 * would be there. */
#include "data/data_int.h"

#include <string.h>

struct scan {
    const uint8_t *p, *end;
    uint8_t *out; /* where texts are written, without escapes */
};

static void skip_blanks(struct scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\r' || *s->p == '\n'))
        s->p++;
}

static bool take(struct scan *s, uint8_t c)
{
    skip_blanks(s);
    if (s->p == s->end || *s->p != c)
        return false;
    s->p++;
    return true;
}

/* Is one of eight bytes below 0x20, a quote or a backslash? It may say so of bytes above 0x7F
 * behind such a one, too. */
static bool has_end(uint64_t x)
{
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t quote = x ^ (ones * '"'), slash = x ^ (ones * '\\');
    return (((x - ones * 0x20) | (quote - ones) | (slash - ones)) & ~x & tops) != 0;
}

static bool hex4(const uint8_t *p, const uint8_t *end, uint32_t *out)
{
    *out = 0;
    if (end - p < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        uint8_t c = p[i], low = c | 0x20;
        int digit = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
        if (digit < 0)
            return false;
        *out = *out << 4 | (uint32_t)digit;
    }
    return true;
}

static uint8_t *put_character(uint8_t *o, uint32_t c)
{
    if (c < 0x80) {
        *o++ = (uint8_t)c;
    } else if (c < 0x800) {
        *o++ = (uint8_t)(0xC0 | c >> 6);
        *o++ = (uint8_t)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *o++ = (uint8_t)(0xE0 | c >> 12);
        *o++ = (uint8_t)(0x80 | (c >> 6 & 63));
        *o++ = (uint8_t)(0x80 | (c & 63));
    } else {
        *o++ = (uint8_t)(0xF0 | c >> 18);
        *o++ = (uint8_t)(0x80 | (c >> 12 & 63));
        *o++ = (uint8_t)(0x80 | (c >> 6 & 63));
        *o++ = (uint8_t)(0x80 | (c & 63));
    }
    return o;
}

/* s->p is behind a backslash. */
static bool take_escape(struct scan *s, uint8_t **out)
{
    static const char letters[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    uint32_t c, low;
    if (s->p == s->end)
        return false;
    if (*s->p != 'u') {
        const char *at = *s->p != '\0' ? strchr(letters, *s->p) : NULL;
        if (at == NULL)
            return false;
        *(*out)++ = (uint8_t)bytes[at - letters];
        s->p++;
        return true;
    }
    if (!hex4(s->p + 1, s->end, &c) || (c >= 0xDC00 && c < 0xE000))
        return false;
    s->p += 5;
    if (c >= 0xD800 && c < 0xDC00) {
        if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u' || !hex4(s->p + 2, s->end, &low) || low < 0xDC00 ||
            low >= 0xE000)
            return false;
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        s->p += 6;
    }
    *out = put_character(*out, c);
    return true;
}

/* A text, written to s->out; *n is its length. What is written is never longer than what is read. */
static bool take_text(struct scan *s, size_t *n)
{
    uint8_t *o = s->out;
    if (!take(s, '"'))
        return false;
    while (s->p < s->end) {
        uint64_t word;
        while (s->end - s->p >= 8 && (memcpy(&word, s->p, 8), !has_end(word))) {
            memcpy(o, &word, 8);
            o += 8;
            s->p += 8;
        }
        if (s->p == s->end)
            return false;
        uint8_t c = *s->p++;
        if (c == '"') {
            *n = (size_t)(o - s->out);
            return token_utf8(s->out, *n) == *n;
        }
        if (c < 0x20 || (c == '\\' && !take_escape(s, &o)))
            return false;
        if (c != '\\')
            *o++ = c;
    }
    return false;
}

/* A number of few digits, or a word. */
static bool take_plain(struct scan *s)
{
    static const char *const words[] = {"true", "false", "null"};
    skip_blanks(s);
    for (int i = 0; i < countof(words); i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(s->end - s->p) >= n && memcmp(s->p, words[i], n) == 0) {
            s->p += n;
            return s->p == s->end || *s->p == ',' || *s->p == '}' || *s->p == ' ';
        }
    }
    const uint8_t *from = s->p, *digits;
    from += from < s->end && *from == '-';
    for (digits = s->p = from; s->p < s->end && *s->p >= '0' && *s->p <= '9';)
        s->p++;
    if (s->p == digits || s->p - digits > 15 || (*digits == '0' && s->p - digits > 1))
        return false;
    if (s->p < s->end && *s->p == '.') {
        for (digits = ++s->p; s->p < s->end && *s->p >= '0' && *s->p <= '9';)
            s->p++;
        if (s->p == digits || s->p - digits > 30)
            return false;
    }
    return s->p < s->end && (*s->p == ',' || *s->p == '}' || *s->p == ' ');
}

bool jsonl_text(const uint8_t *line, size_t n, const char *field, uint8_t *scratch, size_t *len)
{
    struct scan s = {.p = line, .end = line + n, .out = scratch};
    size_t n_field = strlen(field), n_key, n_text;
    bool found = false;
    if (!take(&s, '{'))
        return false;
    do {
        if (!take_text(&s, &n_key))
            return false;
        bool wanted = n_key == n_field && memcmp(s.out, field, n_key) == 0;
        if (!take(&s, ':') || (wanted && found))
            return false;
        skip_blanks(&s);
        if (wanted) {
            found = true;
            if (!take_text(&s, len))
                return false;
            s.out += *len; /* later texts go behind it */
        } else if (s.p < s.end && *s.p == '"' ? !take_text(&s, &n_text) : !take_plain(&s)) {
            return false;
        }
    } while (take(&s, ','));
    if (!take(&s, '}'))
        return false;
    skip_blanks(&s);
    return found && s.p == s.end;
}
