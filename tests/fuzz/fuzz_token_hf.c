/* Fuzzes the reader of tokenizer.json: whatever the bytes, they are refused or give a tokenizer
 * that works. */
#include "token_try.h"

FUZZ_TOKENIZER(read_hf(m, "fuzz", (const char *)data, size, &e))
