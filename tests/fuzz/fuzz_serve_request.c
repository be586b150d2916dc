/* Fuzzes the reader of completions requests: whatever the bytes, they are refused or give a request
 * within its limits. */
#include "serve/serve.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VOCAB = 300, LENGTH = 40, TOKENS = 100 };

/* Bytes as ids, begun with an id of their own. */
static int encode(void *ctx, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e)
{
    (void)ctx;
    TRY(mem_grow((void **)&out->ids, &out->cap, n + 1, sizeof *out->ids, e));
    if (prefix)
        out->ids[out->n++] = VOCAB - 1;
    for (size_t i = 0; i < n; i++)
        out->ids[out->n++] = (uint8_t)text[i];
    return ST_OK;
}

static int encode_chat(void *ctx, const struct chat_list *l, struct token_ids *out, struct err *e)
{
    for (size_t i = 0; i < l->n; i++)
        TRY(encode(ctx, l->m[i].text, l->m[i].n, false, out, e));
    return ST_OK;
}

static void try_chat(const uint8_t *data, size_t size, const struct serve_limits *limits)
{
    struct completion_request r;
    struct chat_template chat = {.stop = "x", .stop_id = -1};
    struct err e = {0};
    if (request_read_chat(&r, (const char *)data, size, limits, VOCAB, &chat, encode_chat, NULL, &e) == ST_OK &&
        (r.n_prompts != 1 || r.prompts[0].n == 0 || (int64_t)r.prompts[0].n + r.max_tokens > LENGTH ||
         r.max_tokens < 0))
        abort();
    request_release(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct completion_request r;
    struct serve_limits limits = {
        .body_bytes = 1 << 20, .tokens = TOKENS, .length = LENGTH, .seconds = 1, .connections = 1};
    struct buf reply;
    struct err e = {0};
    buf_init(&reply, 1 << 20);
    int64_t sum = 0;
    if (request_read(&r, (const char *)data, size, &limits, VOCAB, encode, NULL, &e) == ST_OK) {
        for (int k = 0; k < r.n_prompts; k++) {
            sum += (int64_t)r.prompts[k].n + r.max_tokens;
            if (r.prompts[k].n == 0 || (int64_t)r.prompts[k].n + r.max_tokens > LENGTH)
                abort();
            for (size_t i = 0; i < r.prompts[k].n; i++)
                if (r.prompts[k].ids[i] < 0 || r.prompts[k].ids[i] >= VOCAB)
                    abort();
        }
        if (r.n_prompts < 1 || sum > TOKENS || r.n_top > SCORER_TOP || !(r.sampler.temperature >= 0))
            abort();
    } else {
        reply_error(&reply, 400, &e);
    }
    reply_string(&reply, (const char *)data, size);
    char *header = strndup((const char *)data, size);
    if (header != NULL)
        (void)serve_host_is_local(header, "127.0.0.1");
    free(header);
    buf_release(&reply);
    try_chat(data, size, &limits);
    request_release(&r);
    return 0;
}
