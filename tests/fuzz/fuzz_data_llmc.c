/* Fuzzes llm.c shards: a shard is refused, or all of its tokens can be read. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char name[] = "fuzz";
    struct err e;
    int32_t tokens[64];
    uint8_t *copy = malloc(size ? size : 1); /* its exact size, for the sanitizer */
    if (copy == NULL)
        return 0;
    memcpy(copy, data, size);
    struct source_file file = {.path = name, .map = {.data = copy, .size = size}};
    struct source s = {.kind = SOURCE_LLMC, .path = name, .append_eod = -1, .files = &file, .n_files = 1, .n_seqs = 1};
    if (source_check_shard(&file, &e) == ST_OK)
        for (int64_t at = 0; at < file.n_tokens; at += 64)
            (void)source_read(&s, 0, at, min_i64(64, file.n_tokens - at), 50257, tokens, &e);
    free(copy);
    return 0;
}
