/* Gate and up rows of experts: two halves, as braid stores them, or alternating blocks, as some programs
 * train and store them without saying so in the keys. */
#include "ckpt/keys/keys_int.h"

#include <string.h>

bool key_is_glu(const char *leaf)
{
    return strcmp(leaf, "mlp.experts.linear_fc1.weight") == 0 || strcmp(leaf, "mlp.experts.linear_fc1.bias") == 0;
}

int glu_check(const char *label, const char *key, int64_t rows, int64_t blocks, struct err *e)
{
    if (rows % 2 == 0 && rows / 2 % blocks == 0)
        return ST_OK;
    return err_set(e, ST_CONFLICT, "%s: %s has %lld rows: they cannot be gate and up rows in blocks of %lld", label,
                   key, (long long)rows, (long long)blocks);
}

/* Where row r of two halves is among blocks. */
static int64_t block_row(int64_t r, int64_t half, int64_t blocks)
{
    int64_t up = r >= half, j = r - up * half;
    return blocks == 0 ? r : j / blocks * 2 * blocks + up * blocks + j % blocks;
}

void glu_reorder(void *to, const void *from, const struct glu_rows *r)
{
    char *out = to;
    const char *in = from;
    for (int64_t k = 0; k < r->matrices; k++)
        for (int64_t row = 0; row < r->rows; row++) {
            int64_t source = k * r->rows + block_row(row, r->rows / 2, r->from);
            int64_t target = k * r->rows + block_row(row, r->rows / 2, r->to);
            memcpy(out + target * r->bytes, in + source * r->bytes, (size_t)r->bytes);
        }
}

int glu_parse(const char *label, const char *text, int64_t *out, struct err *e)
{
    enum { MOST = 1 << 20 };
    *out = 0;
    for (const char *p = text; p != NULL && (*p != '\0' || p == text); p++) {
        if (*p < '0' || *p > '9' || *out > MOST)
            return err_set(e, ST_INVALID, "%s: its metadata say %s is '%.40s', which is no number up to %d", label,
                           KEY_GLU_INTERLEAVE, text, MOST);
        *out = *out * 10 + (*p - '0');
    }
    return ST_OK;
}
