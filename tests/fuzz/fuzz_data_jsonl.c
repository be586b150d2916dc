/* Fuzzes lines of JSON, as text and as conversations, and the manifest of token files: the same bytes as each. */
#include "data/data_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int count(void *ctx, const char *text, size_t n, struct err *e)
{
    size_t *sum = ctx;
    for (size_t i = 0; i < n; i++)
        *sum += (uint8_t)text[i];
    (void)e;
    return ST_OK;
}

static int count_messages(void *ctx, const struct json_t *root, bool *good, char *why, size_t size, struct err *e)
{
    struct chat_list l;
    chat_list_init(&l);
    *good = chat_list_read(&l, root, "", why, size);
    for (size_t i = 0; *good && i < l.n; i++)
        (void)count(ctx, l.m[i].text, l.m[i].n, e);
    chat_list_release(&l);
    return ST_OK;
}

/* What is taken out without a parser is what the parser finds. */
static void compare(const uint8_t *line, size_t n)
{
    size_t len;
    uint8_t *scratch = malloc(n + 1);
    if (scratch != NULL && jsonl_text(line, n, "text", scratch, &len)) {
        json_t *root = json_loadb((const char *)line, n, JSON_ALLOW_NUL, NULL), *v = json_object_get(root, "text");
        if (!json_is_string(v) || json_string_length(v) != len || memcmp(json_string_value(v), scratch, len) != 0)
            abort();
        json_decref(root);
    }
    free(scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err e;
    struct jsonl_bad bad = {.skip = true};
    struct token_manifest m;
    size_t sum = 0;
    uint8_t *copy = malloc(size + 1);
    if (copy == NULL)
        return 0;
    if (size > 0)
        memcpy(copy, data, size);
    struct text_part p = {.text = copy, .n = size, .path = "fuzz", .line = 1, .jsonl = true};
    (void)jsonl_each(&p, "text", &bad, count, &sum, &e);
    compare(copy, size);
    (void)jsonl_lines(&p, &bad, count_messages, &sum, &e);
    (void)token_manifest_parse((const char *)copy, size, "fuzz", &m, &e);
    free(copy);
    return 0;
}
