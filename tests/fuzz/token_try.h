/* What the fuzzers of tokenizer files share: a file that was accepted must encode any text without
 * harm. */
#ifndef BRAID_FUZZ_TOKEN_TRY_H
#define BRAID_FUZZ_TOKEN_TRY_H

#include "token/token_int.h"

#include <stdlib.h>

static inline void encode_something(struct token_model *m, const uint8_t *data, size_t size)
{
    static const char plain[] = "Hello  world, it's 12345\n\n<s> \xe2\x96\x81x \xe4\xb8\x80\xcc\x81 \xff\xfe";
    struct tokenizer t = {.eod = -1, .model = m, .vocab = m->vocab.n};
    struct token_encoder *c;
    struct token_ids ids = {0};
    struct err e;
    if (token_encoder_open(&c, &t, &e) != ST_OK)
        return;
    (void)token_encode(c, plain, sizeof plain - 1, TOKEN_SPECIAL | TOKEN_TEMPLATE, &ids, &e);
    (void)token_encode(c, data, size < 4096 ? size : 4096, TOKEN_SPECIAL, &ids, &e);
    for (size_t i = 0; i < ids.n; i++) {
        uint8_t out[16];
        size_t n;
        if (ids.ids[i] < 0 || ids.ids[i] >= t.vocab ||
            tokenizer_decode(&t, ids.ids[i], out, sizeof out, &n, &e) != ST_OK)
            abort();
    }
    (void)token_cut(&t, data, size);
    (void)token_model_hash(m);
    free(ids.ids);
    token_encoder_close(c);
}

/* A fuzzer: `read` fills the model m from data and size, or sets e. */
#define FUZZ_TOKENIZER(read)                                                                                           \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);                                                      \
    int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)                                                       \
    {                                                                                                                  \
        struct token_model *m = calloc(1, sizeof *m);                                                                  \
        struct err e;                                                                                                  \
        if (m == NULL)                                                                                                 \
            return 0;                                                                                                  \
        if ((read) == ST_OK)                                                                                           \
            encode_something(m, data, size);                                                                           \
        token_model_release(m);                                                                                        \
        return 0;                                                                                                      \
    }

#endif
