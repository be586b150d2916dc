/* Fuzzes the reader of tasks: whatever a line holds, it is refused or gives sequences that the model can be asked
 * about. */
#include "serve/serve_int.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VOCAB = 257, LENGTH = 24 };

static void check(const struct task *t)
{
    if (t->n < 1 || t->label < -1 || t->label >= t->n)
        abort();
    for (int k = 0; k < t->n; k++) {
        int64_t n = (int64_t)t->sequence[k].n, made = n - t->n_context[k];
        if (t->n_context[k] < 1 || made < 1 || made >= LENGTH || t->bytes[k] < 1)
            abort();
        for (int64_t i = 0; i < n; i++)
            if (t->sequence[k].ids[i] < 0 || t->sequence[k].ids[i] >= VOCAB)
                abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config c = {.model = {.vocab = VOCAB}};
    struct scorer s = {.cfg = &c, .length = LENGTH};
    struct task t = {.label = -1};
    struct err e = {0};
    if (tokenizer_open(&s.tok, "bytes", size % 2 == 0, &e) == ST_OK &&
        token_encoder_open(&s.encoder, &s.tok, &e) == ST_OK && scorer_find_prefix(&s, &e) == ST_OK &&
        task_read(&s, &t, (const char *)data, size, &e) == ST_OK)
        check(&t);
    task_release(&t);
    token_encoder_close(s.encoder);
    tokenizer_close(&s.tok);
    return 0;
}
