/* Text made safe for JSON, HTML and protobuf; see log_int.h. Titles, tags and config texts come
 * from the user's files, so none of them is trusted to be UTF-8 or free of markup. */
#include "log/log_int.h"

#include <math.h>
#include <string.h>

/* Bytes of the UTF-8 sequence at s, or 0 when there is none (overlong, surrogate, cut short). */
static int utf8_length(const unsigned char *s)
{
    if (s[0] < 0x80)
        return 1;
    int n = s[0] >= 0xF0 && s[0] <= 0xF4 ? 4 : s[0] >= 0xE0 ? 3 : s[0] >= 0xC2 ? 2 : 0;
    if (n == 0 || s[0] > 0xF4)
        return 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) || (s[0] == 0xF0 && s[1] < 0x90) ||
        (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    return n;
}

/* Copies one character if it is longer than a byte or invalid; returns how many bytes it took. */
static int add_multibyte(struct buf *b, const char *s)
{
    int n = utf8_length((const unsigned char *)s);
    if (n == 0)
        buf_add(b, "\xEF\xBF\xBD");
    else
        buf_add_n(b, s, (size_t)n);
    return n == 0 ? 1 : n;
}

void add_utf8(struct buf *b, const char *s)
{
    while (*s != '\0')
        s += add_multibyte(b, s);
}

void add_json_string(struct buf *b, const char *s)
{
    buf_add(b, "\"");
    while (*s != '\0') {
        unsigned char c = (unsigned char)*s;
        if (c >= 0x80) {
            s += add_multibyte(b, s);
            continue;
        }
        if (c == '"' || c == '\\')
            buf_addf(b, "\\%c", c);
        else if (c == '\n')
            buf_add(b, "\\n");
        else if (c == '\t')
            buf_add(b, "\\t");
        else if (c < 0x20 || c == 0x7F)
            buf_addf(b, "\\u%04x", c);
        else
            buf_add_n(b, s, 1);
        s++;
    }
    buf_add(b, "\"");
}

void add_json_number(struct buf *b, double v, const char *fmt)
{
    if (isfinite(v))
        buf_addf(b, fmt, v);
    else
        buf_add(b, "null");
}

void add_html(struct buf *b, const char *s)
{
    while (*s != '\0') {
        unsigned char c = (unsigned char)*s;
        if (c >= 0x80) {
            s += add_multibyte(b, s);
            continue;
        }
        switch (c) {
        case '&': buf_add(b, "&amp;"); break;
        case '<': buf_add(b, "&lt;"); break;
        case '>': buf_add(b, "&gt;"); break;
        case '"': buf_add(b, "&quot;"); break;
        case '\'': buf_add(b, "&#39;"); break;
        default:
            if (c >= 0x20 || c == '\n' || c == '\t') /* other control bytes are not legal in HTML */
                buf_add_n(b, s, 1);
        }
        s++;
    }
}
