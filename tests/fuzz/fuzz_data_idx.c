/* Fuzzes the Megatron index: whatever the bytes, checks either refuse them or every token that the
 * index names can be read. The first two bytes give the size of .bin, the rest is the .idx. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Samples over an accepted source must stay inside it, whatever the split. */
static void read_samples(const struct source *s)
{
    static const char *const splits[] = {NULL, "90,10", "1,1,1"};
    struct err e;
    int32_t tokens[6];
    for (int i = 0; i < countof(splits); i++) {
        struct part part;
        struct samples samples;
        for (int which = DATA_TRAIN; which <= DATA_TEST; which++) {
            if (part_make(&part, s, splits[i], (enum data_part)which, &e) != ST_OK ||
                samples_open(&samples, s, &part, 5, 7, 1234, &e) != ST_OK)
                continue;
            for (int64_t k = 0; k < samples.n && k < 64; k++)
                (void)samples_get(&samples, k, 1000, tokens, NULL, &e);
            samples_close(&samples);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    uint16_t bin_size;
    memcpy(&bin_size, data, 2);
    /* Copies of their exact size, so that the sanitizer sees a step past the end. */
    uint8_t *idx = malloc(size - 2 + 1), *bin = malloc((size_t)bin_size + 1);
    char name[] = "fuzz";
    struct err e;
    if (idx != NULL && bin != NULL) {
        idx = realloc(memcpy(idx, data + 2, size - 2), size > 2 ? size - 2 : 1);
        memset(bin, 7, (size_t)bin_size + 1);
        struct source s = {
            .path = name, .idx = {.data = idx, .size = size - 2}, .bin = {.data = bin, .size = bin_size}};
        if (source_check_idx(&s, &e) == ST_OK && s.n_seqs < 4096)
            read_samples(&s);
        free(s.lengths);
    }
    free(idx);
    free(bin);
    return 0;
}
