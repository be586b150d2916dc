/* Fuzzes the reader of tokenizer.json: whatever the bytes, they are refused or give a tokenizer
 * that works. */
#include "token_try.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct token_model *m = calloc(1, sizeof *m);
    struct err e;
    if (m == NULL)
        return 0;
    if (read_hf(m, "fuzz", (const char *)data, size, &e) == ST_OK)
        encode_something(m, data, size);
    token_model_release(m);
    return 0;
}
