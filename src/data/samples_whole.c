/* Samples of conversations: each holds whole documents, as many of the shuffled order as fit, and is filled up with
 * tokens without loss. A document is never continued in another sample, where its beginning would be missing; one that
 * is longer than a sample loses its end. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

static int64_t room_for(const struct samples *s, int64_t doc)
{
    return min_i64(part_doc_len(&s->part, s->src, doc), s->seq + 1);
}

/* Lays out one epoch more: documents in an order of their own. */
static int add_epoch(struct samples *s, struct mt19937 *rng, size_t *cap_order, size_t *cap_starts, struct err *e)
{
    int64_t docs = s->part.n, used = 0;
    uint32_t *order;
    TRY(mem_grow((void **)&s->order, cap_order, (size_t)(s->n_order + docs), sizeof *s->order, e));
    order = s->order + s->n_order;
    for (int64_t i = 0; i < docs; i++)
        order[i] = (uint32_t)i;
    mt_shuffle(rng, order, docs);
    for (int64_t i = 0; i < docs; i++) {
        int64_t n = room_for(s, order[i]);
        s->cut += s->epochs == 0 && part_doc_len(&s->part, s->src, order[i]) > n;
        if (i == 0 || used + n > s->seq + 1) {
            TRY(mem_grow((void **)&s->starts, cap_starts, (size_t)s->n + 2, sizeof *s->starts, e));
            s->starts[s->n++].doc = s->n_order + i;
            used = 0;
        }
        used += n;
    }
    s->n_order += docs;
    s->starts[s->n].doc = s->n_order;
    s->epochs++;
    return ST_OK;
}

int samples_open_whole(struct samples *s, int64_t wanted, uint32_t seed, struct err *e)
{
    struct mt19937 rng;
    size_t cap_order = 0, cap_starts = 0;
    int st = ST_OK;
    if (s->part.n < 1 || s->part.n > UINT32_MAX || wanted > UINT32_MAX)
        return err_set(e, ST_INVALID,
                       "%s has %lld conversations here, and %lld samples are wanted: 1 to 2^32-1 are possible",
                       s->src->path, (long long)s->part.n, (long long)wanted);
    mt_seed(&rng, seed);
    do
        TRY_OUT(add_epoch(s, &rng, &cap_order, &cap_starts, e));
    while (s->n < wanted);
    s->n_first = s->n;
    TRY_OUT(mem_array((void **)&s->shuffle, (size_t)s->n, sizeof *s->shuffle, e));
    for (int64_t i = 0; i < s->n; i++)
        s->shuffle[i] = (uint32_t)i; /* the documents were shuffled: another shuffle would add nothing */
out:
    if (st != ST_OK)
        samples_close(s);
    return st;
}

int samples_get_whole(const struct samples *s, int64_t i, int64_t vocab, int32_t *tokens, uint8_t *marks, struct err *e)
{
    int64_t at = 0, end = s->seq + 1, k = s->shuffle[i];
    for (int64_t d = s->starts[k].doc; d < s->starts[k + 1].doc; d++) {
        int64_t doc = s->order[d], n = room_for(s, doc), head = doc == 0 ? s->part.head : 0;
        TRY(source_read(s->src, s->part.first + doc, head, n, vocab, tokens + at, e));
        if (marks != NULL) {
            TRY(source_read_loss(s->src, s->part.first + doc, head, n, marks + at, e));
            for (int64_t j = at; j < at + n; j++)
                marks[j] |= MARK_CHAT;
            marks[at] |= MARK_START;
        }
        at += n;
    }
    for (int64_t j = at; j < end; j++) {
        tokens[j] = 0;
        if (marks != NULL)
            marks[j] = MARK_CHAT | (j == at ? MARK_START : 0);
    }
    return ST_OK;
}
