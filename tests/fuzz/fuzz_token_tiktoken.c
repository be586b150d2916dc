/* Fuzzes the reader of tiktoken files: whatever the bytes, they are refused or give a tokenizer
 * that works. */
#include "token_try.h"

FUZZ_TOKENIZER(read_tiktoken(m, "fuzz", (const char *)data, size, "llama3", "<s> <|endoftext|>", &e))
