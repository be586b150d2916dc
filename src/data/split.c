/* Splits: which sequences (or, for too few of them, which tokens) are train, valid and test. */
#include "data/data_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *part_name(enum data_part which)
{
    static const char *const names[] = {"train", "valid", "test"};
    return (unsigned)which < 3 ? names[which] : "unknown";
}

static int split_error(const char *text, struct err *e)
{
    err_set(e, ST_INVALID, "split '%.100s' is not one to three numbers >= 0 with a positive sum", text);
    return err_hint(e, "shares of train, valid and test, such as 99,1,0");
}

int split_parse(const char *text, double fraction[3], struct err *e)
{
    double value[3] = {0};
    char word[64];
    int n = 0;
    for (const char *p = text;; p++) {
        size_t len = strcspn(p, ",");
        while (len > 0 && *p == ' ') /* blanks around a number */
            p++, len--;
        size_t used = len;
        while (used > 0 && p[used - 1] == ' ')
            used--;
        if (n == 3 || used == 0 || used >= sizeof word)
            return split_error(text, e);
        memcpy(word, p, used);
        word[used] = '\0';
        if (!parse_f64(word, &value[n]) || value[n] < 0)
            return split_error(text, e);
        n++;
        p += len;
        if (*p == '\0')
            break;
    }
    double sum = value[0] + value[1] + value[2];
    if (!(sum > 0) || !isfinite(sum))
        return split_error(text, e);
    for (int i = 0; i < 3; i++)
        fraction[i] = value[i] / sum;
    return ST_OK;
}

void split_range(const double fraction[3], int i, int64_t n, int64_t *from, int64_t *to)
{
    double low = 0;
    for (int k = 0; k < i; k++)
        low += fraction[k];
    /* rint rounds halves to even, as Python's round does. */
    *from = min_i64((int64_t)rint(low * (double)n), n);
    *to = max_i64(*from, min_i64((int64_t)rint((low + fraction[i]) * (double)n), n));
}

int64_t part_doc_len(const struct part *p, const struct source *s, int64_t doc)
{
    int64_t len = source_seq_len(s, p->first + doc);
    if (doc == 0)
        len -= p->head;
    if (doc == p->n - 1)
        len -= p->tail;
    return len;
}

/* The part that holds tokens [from, to) of all sequences laid end to end. */
static struct part part_of_tokens(const struct source *s, int64_t from, int64_t to)
{
    struct part p = {.tokens = to - from};
    int64_t at = 0, i = 0;
    for (; i < s->n_seqs && at + source_seq_len(s, i) <= from; i++)
        at += source_seq_len(s, i);
    p.first = i;
    p.head = from - at;
    for (; i < s->n_seqs && at < to; i++)
        at += source_seq_len(s, i);
    p.n = i - p.first;
    p.tail = at - to;
    return p;
}

int part_make(struct part *p, const struct source *s, const char *split, enum data_part which, struct err *e)
{
    *p = (struct part){.n = s->n_seqs, .tokens = s->n_tokens};
    if (split == NULL || split[0] == '\0')
        return ST_OK;
    double fraction[3];
    TRY(split_parse(split, fraction, e));
    if (fraction[which] <= 0) {
        err_set(e, ST_INVALID, "split '%s' leaves nothing of %s for %s", split, s->path, part_name(which));
        return err_hint(e, "give it a share, or name a path of its own for it");
    }
    /* Whole sequences, unless that leaves a wanted part empty: then cut by tokens. The choice looks
     * at all parts, never at `which`, so that parts made apart from each other never overlap. */
    bool by_tokens = false;
    int64_t from, to;
    for (int i = 0; i < 3; i++) {
        split_range(fraction, i, s->n_seqs, &from, &to);
        by_tokens = by_tokens || (fraction[i] > 0 && from == to);
    }
    if (by_tokens) {
        split_range(fraction, (int)which, s->n_tokens, &from, &to);
        *p = part_of_tokens(s, from, to);
        return ST_OK;
    }
    split_range(fraction, (int)which, s->n_seqs, &from, &to);
    *p = (struct part){.first = from, .n = to - from};
    for (int64_t i = from; i < to; i++)
        p->tokens += source_seq_len(s, i);
    return ST_OK;
}
