/* Batches: rows of tokens, labels, positions and document starts for one microbatch. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

int batch_alloc(struct batch *b, int64_t rows, int64_t seq, struct err *e)
{
    *b = (struct batch){.rows = rows, .seq = seq};
    int64_t cells;
    if (rows < 1 || seq < 1 || !i64_mul(rows, seq, &cells) || cells > INT64_MAX / 8)
        return err_set(e, ST_INVALID, "a batch of %lld rows of %lld tokens", (long long)rows, (long long)seq);
    int32_t **arrays[] = {&b->tokens, &b->labels, &b->pos, &b->doc_start};
    int st;
    for (int i = 0; i < countof(arrays); i++)
        TRY_OUT(mem_array((void **)arrays[i], (size_t)cells, sizeof(int32_t), e));
    TRY_OUT(mem_array((void **)&b->row_buf, (size_t)seq + 1, sizeof(int32_t), e));
    TRY_OUT(mem_array((void **)&b->mark_buf, (size_t)seq + 1, 1, e));
    b->part = (struct batch_part){.seq = seq,
                                  .tokens = b->tokens,
                                  .labels = b->labels,
                                  .pos = b->pos,
                                  .doc_start = b->doc_start,
                                  .doc_local = b->doc_start};
    return ST_OK;
out:
    batch_release(b);
    return st;
}

void batch_release(struct batch *b)
{
    free(b->tokens);
    free(b->labels);
    free(b->pos);
    free(b->doc_start);
    free(b->row_buf);
    free(b->mark_buf);
    free(b->part_buf);
    *b = (struct batch){0};
}

int batch_divide(struct batch *b, int64_t parts, int64_t which, int depths, struct err *e)
{
    enum { OWN = 5, NEXT = 3 };
    if (parts <= 1)
        return ST_OK;
    if (b->seq % parts != 0 || which < 0 || which >= parts || depths < 0)
        return err_set(e, ST_INVALID, "part %lld of %lld of a sample of %lld tokens", (long long)which,
                       (long long)parts, (long long)b->seq);
    int64_t seq = b->seq / parts, cells = b->rows * seq;
    TRY(mem_array((void **)&b->part_buf, (size_t)(cells * (OWN + NEXT * depths)), sizeof(int32_t), e));
    int32_t *at = b->part_buf;
    struct batch_part *p = &b->part;
    *p = (struct batch_part){.seq = seq, .first = which * seq, .depths = depths};
    int32_t **own[OWN] = {&p->tokens, &p->labels, &p->pos, &p->doc_start, &p->doc_local};
    for (int i = 0; i < OWN; i++, at += cells)
        *own[i] = at;
    int32_t **next[NEXT] = {&p->next_tokens, &p->next_labels, &p->next_pos};
    for (int i = 0; i < NEXT; i++, at += cells * depths)
        *next[i] = at;
    return ST_OK;
}

/* What depth k of multi-token prediction has at place i: ids from k + 1 places on, as long as that is one document.
 * They are shifted before the sample is cut, so that a part's last places see the next part's first ones. */
static void cut_next(struct batch *b, int64_t row, int64_t to, int64_t i, int k)
{
    struct batch_part *p = &b->part;
    int64_t at = row * b->seq + i, from = at + k + 1, out = k * b->rows * p->seq + to;
    bool inside = i + k + 1 < b->seq && b->doc_start[from] == b->doc_start[at];
    p->next_tokens[out] = inside ? b->tokens[from] : 0;
    p->next_labels[out] = inside ? b->labels[from] : -1;
    p->next_pos[out] = inside ? b->pos[from] : 0;
}

void batch_cut(struct batch *b)
{
    struct batch_part *p = &b->part;
    if (b->part_buf == NULL)
        return;
    for (int64_t row = 0; row < b->rows; row++)
        for (int64_t t = 0; t < p->seq; t++) {
            int64_t to = row * p->seq + t, from = row * b->seq + p->first + t;
            p->tokens[to] = b->tokens[from];
            p->labels[to] = b->labels[from];
            p->pos[to] = b->pos[from];
            p->doc_start[to] = b->doc_start[from];
            p->doc_local[to] = b->doc_start[from] - (int32_t)p->first;
            for (int k = 0; k < p->depths; k++)
                cut_next(b, row, to, p->first + t, k);
        }
}

int batch_check_opts(const struct batch_opts *o, struct err *e)
{
    int64_t wide;
    if (o->micro_batch < 1 || o->global_batch < 1)
        return err_set(e, ST_INVALID, "batch sizes must be >= 1 (micro %lld, global %lld)", (long long)o->micro_batch,
                       (long long)o->global_batch);
    if (o->dp_size < 1 || o->dp_rank < 0 || o->dp_rank >= o->dp_size)
        return err_set(e, ST_INVALID, "data-parallel rank %lld of %lld", (long long)o->dp_rank, (long long)o->dp_size);
    if (!i64_mul(o->micro_batch, o->dp_size, &wide) || o->global_batch % wide != 0) {
        err_set(e, ST_INVALID, "global batch %lld is not a multiple of micro batch %lld times %lld data ranks",
                (long long)o->global_batch, (long long)o->micro_batch, (long long)o->dp_size);
        return err_hint(e, "change one of the three so that it divides");
    }
    if ((o->eod_mask || o->eod_mask_loss) && o->eod < 0) {
        err_set(e, ST_INVALID, "masking at document ends needs an end-of-document id");
        return err_hint(e, "use a tokenizer that has one (bytes with eod), or turn masking off");
    }
    return ST_OK;
}

int64_t batch_micros_per_step(const struct batch_opts *o) { return o->global_batch / (o->micro_batch * o->dp_size); }

/* A document begins after the eod of the one before: the eod itself still belongs to that one. Of conversations the
 * marks say where they begin and what is learned. */
static void fill_row(struct batch *b, int64_t row, const struct batch_opts *o)
{
    int64_t at = row * b->seq;
    const int32_t *ids = b->row_buf;
    const uint8_t *marks = b->mark_buf;
    int32_t start = 0;
    for (int64_t i = 0; i < b->seq; i++) {
        bool chat = (marks[i] & MARK_CHAT) != 0;
        if (chat ? (marks[i] & MARK_START) != 0 : o->eod_mask && i > 0 && ids[i - 1] == o->eod)
            start = (int32_t)i;
        bool ends = chat ? (marks[i + 1] & MARK_START) != 0 : o->eod_mask_loss && ids[i] == o->eod;
        b->tokens[at + i] = ids[i];
        b->labels[at + i] = ends || !(marks[i + 1] & MARK_LOSS) ? -1 : ids[i + 1];
        b->pos[at + i] = (int32_t)i - start;
        b->doc_start[at + i] = start;
    }
}

int batch_fill(struct batch *b, const struct dataset *ds, const struct batch_opts *o, int64_t step, int64_t micro,
               struct err *e)
{
    int64_t consumed;
    if (step < 0 || micro < 0 || micro >= batch_micros_per_step(o) || !i64_mul(step, o->global_batch, &consumed) ||
        consumed > INT64_MAX / 2)
        return err_set(e, ST_INVALID, "no microbatch %lld of step %lld", (long long)micro, (long long)step);
    if (b->rows != o->micro_batch || b->seq != dataset_seq(ds))
        return err_set(e, ST_INVALID, "batch buffers of [%lld, %lld], needed are [%lld, %lld]", (long long)b->rows,
                       (long long)b->seq, (long long)o->micro_batch, (long long)dataset_seq(ds));
    b->step = step;
    b->micro = micro;
    b->first_sample = consumed + micro * (o->micro_batch * o->dp_size) + o->dp_rank * o->micro_batch;
    for (int64_t row = 0; row < b->rows; row++) {
        TRY(dataset_get_marked(ds, b->first_sample + row, b->row_buf, b->mark_buf, e));
        fill_row(b, row, o);
    }
    batch_cut(b);
    return ST_OK;
}
