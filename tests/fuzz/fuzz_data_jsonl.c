/* Fuzzes lines of JSON and the manifest of token files: the same bytes as either. */
#include "data/data_int.h"

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
    (void)token_manifest_parse((const char *)copy, size, "fuzz", &m, &e);
    free(copy);
    return 0;
}
