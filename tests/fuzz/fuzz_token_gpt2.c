/* Fuzzes the reader of GPT-2 pairs: encoder.json up to the first NUL byte, then vocab.bpe. */
#include "token_try.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct token_model *m = calloc(1, sizeof *m);
    struct err e;
    if (m == NULL)
        return 0;
    const uint8_t *cut = memchr(data, 0, size);
    size_t n = cut != NULL ? (size_t)(cut - data) : size, skip = cut != NULL ? n + 1 : n;
    if (read_gpt2(m, "fuzz", (const char *)data, n, (const char *)data + skip, size - skip, &e) == ST_OK)
        encode_something(m, data, size);
    token_model_release(m);
    return 0;
}
