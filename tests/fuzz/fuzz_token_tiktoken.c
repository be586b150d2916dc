/* Fuzzes the reader of tiktoken files: whatever the bytes, they are refused or give a tokenizer
 * that works. */
#include "token_try.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct token_model *m = calloc(1, sizeof *m);
    struct err e;
    if (m == NULL)
        return 0;
    if (read_tiktoken(m, "fuzz", (const char *)data, size, "llama3", "<s> <|endoftext|>", &e) == ST_OK)
        encode_something(m, data, size);
    token_model_release(m);
    return 0;
}
