/* Tokenizers: the built-in one, whose ids are the bytes themselves, and the search by name. */
#include "data/data.h"

#include <string.h>

enum { BYTE_IDS = 256 };

static int bytes_encode(const struct tokenizer *t, const uint8_t *bytes, size_t n, int32_t *ids,
                        size_t cap, size_t *n_ids, struct err *e)
{
    (void)t;
    if (cap < n)
        return err_set(e, ST_INVALID, "%zu bytes do not fit %zu ids", n, cap);
    for (size_t i = 0; i < n; i++)
        ids[i] = bytes[i];
    *n_ids = n;
    return ST_OK;
}

static int bytes_decode(const struct tokenizer *t, int32_t id, uint8_t *out, size_t cap, size_t *n,
                        struct err *e)
{
    if (id < 0 || id >= t->vocab)
        return err_set(e, ST_INVALID, "token id %d is outside the vocabulary of %d", id, t->vocab);
    *n = id < BYTE_IDS ? 1 : 0;
    if (*n == 1 && cap >= 1)
        out[0] = (uint8_t)id;
    return ST_OK;
}

static void bytes_release(struct tokenizer *t) { (void)t; }

static const struct tokenizer_ops bytes_ops = {
    .name = "bytes",
    .encode = bytes_encode,
    .decode = bytes_decode,
    .release = bytes_release,
};

int tokenizer_open(struct tokenizer *t, const char *name, bool with_eod, struct err *e)
{
    *t = (struct tokenizer){.eod = -1};
    if (strcmp(name, bytes_ops.name) != 0) {
        err_set(e, ST_UNSUPPORTED, "unknown tokenizer '%s'", name);
        return err_hint(e, "the built-in tokenizer is 'bytes'");
    }
    t->ops = &bytes_ops;
    t->is_bytes = true;
    t->vocab = BYTE_IDS + (with_eod ? 1 : 0);
    t->eod = with_eod ? BYTE_IDS : -1;
    return ST_OK;
}

void tokenizer_close(struct tokenizer *t)
{
    if (t->ops != NULL)
        t->ops->release(t);
    *t = (struct tokenizer){.eod = -1};
}

int tokenizer_count_bytes(const struct tokenizer *t, const int32_t *ids, int64_t n, int64_t *bytes,
                          struct err *e)
{
    *bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        size_t len = 0;
        if (ids[i] < 0)
            continue;
        TRY(t->ops->decode(t, ids[i], NULL, 0, &len, e));
        *bytes += (int64_t)len;
    }
    return ST_OK;
}
