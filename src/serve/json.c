/* JSON that the server writes: texts that may hold any bytes, errors, the list of models. */
#include "serve/serve.h"

#include <string.h>
#include <utf8proc.h>

size_t reply_character(const char *text, size_t n)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t got =
        n > 0 ? utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)(n < 4 ? n : 4), &c) : 0;
    return got > 0 && c >= 0 ? (size_t)got : 0;
}

void reply_string(struct buf *out, const char *text, size_t n)
{
    buf_add(out, "\"");
    for (size_t i = 0, size; i<n; i += size> 0 ? size : 1) {
        uint8_t c = (uint8_t)text[i];
        size = reply_character(text + i, n - i);
        if (size == 0)
            buf_add(out, "\xEF\xBF\xBD");
        else if (c == '"' || c == '\\')
            buf_addf(out, "\\%c", c);
        else if (c < 0x20 || c == 0x7F)
            buf_addf(out, "\\u%04x", c);
        else
            buf_add_n(out, text + i, size);
    }
    buf_add(out, "\"");
}

void reply_error(struct buf *out, int http_status, const struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    buf_add(&text, e->msg);
    if (e->hint[0])
        buf_addf(&text, " (%s)", e->hint);
    buf_add(out, "{\"error\": {\"message\": ");
    reply_string(out, text.text != NULL ? text.text : "", text.len);
    buf_addf(out, ", \"type\": \"%s\", \"code\": %d}}\n", http_status < 500 ? "invalid_request_error" : "server_error",
             http_status);
    buf_release(&text);
}

void reply_models(struct buf *out, const char *model, int64_t length)
{
    buf_add(out, "{\"object\": \"list\", \"data\": [{\"id\": ");
    reply_string(out, model, strlen(model));
    buf_addf(out, ", \"object\": \"model\", \"owned_by\": \"braid\", \"max_model_len\": %lld}]}\n", (long long)length);
}
