/* Text files to a trained vocabulary: batches of parts are handed to the trainer, which counts them
 * in parallel. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

enum { BATCH_PARTS = 64 };

struct batch_texts {
    struct text_part parts[BATCH_PARTS];
    struct token_text *texts;
    size_t n, cap;
    uint8_t *unpacked; /* texts of lines of JSON */
    size_t n_unpacked, cap_unpacked;
};

static int add_text(struct batch_texts *b, const void *bytes, size_t n, struct err *e)
{
    TRY(mem_grow((void **)&b->texts, &b->cap, b->n + 1, sizeof *b->texts, e));
    b->texts[b->n++] = (struct token_text){.bytes = bytes, .n = n};
    return ST_OK;
}

/* The texts lie one after the other in `unpacked`, which may move: their places are filled in
 * afterwards. */
static int add_line(void *ctx, const char *text, size_t n, struct err *e)
{
    struct batch_texts *b = ctx;
    if (b->n_unpacked + n > b->cap_unpacked) {
        size_t cap = b->cap_unpacked * 2 + n + (1 << 20);
        uint8_t *bytes = realloc(b->unpacked, cap);
        if (bytes == NULL)
            return err_set(e, ST_NOMEM, "out of memory for %zu bytes of text", cap);
        b->unpacked = bytes;
        b->cap_unpacked = cap;
    }
    memcpy(b->unpacked + b->n_unpacked, text, n);
    b->n_unpacked += n;
    return add_text(b, NULL, n, e);
}

static int add_part(struct batch_texts *b, const struct train_tokenizer_opts *o, struct text_part *p,
                    struct tokenize_stats *s, struct err *e)
{
    const char *field = o->field != NULL && o->field[0] != '\0' ? o->field : "text";
    struct jsonl_bad bad = {.skip = o->skip_bad};
    s->files += p->ends_file;
    if (!p->jsonl)
        return add_text(b, p->text, p->n, e);
    TRY(jsonl_each(p, field, &bad, add_line, b, e));
    if (bad.n > 0 && s->bad_lines == 0)
        snprintf(s->first_bad, sizeof s->first_bad, "%s, line %lld: %s", p->path, (long long)bad.first_line, bad.why);
    s->bad_lines += bad.n;
    return ST_OK;
}

static int count_batch(struct batch_texts *b, struct token_trainer *t, struct tokenize_stats *s, struct err *e)
{
    size_t at = 0;
    for (size_t i = 0; i < b->n; i++) {
        if (b->texts[i].bytes == NULL) {
            b->texts[i].bytes = b->unpacked + at;
            at += b->texts[i].n;
        }
        s->bytes += (int64_t)b->texts[i].n;
    }
    s->documents += (int64_t)b->n;
    int st = b->n > 0 ? token_trainer_add(t, b->texts, (int)b->n, e) : ST_OK;
    b->n = b->n_unpacked = 0;
    return st;
}

static int count_all(const struct train_tokenizer_opts *o, struct batch_texts *b, struct text_reader *r,
                     struct token_trainer *t, struct tokenize_stats *s, struct err *e)
{
    for (bool got = true; got && (o->max_bytes == 0 || s->bytes < o->max_bytes);) {
        for (int n = 0; n < BATCH_PARTS && got; n++) {
            TRY(text_reader_next(r, &b->parts[n], &got, e));
            if (got)
                TRY(add_part(b, o, &b->parts[n], s, e));
        }
        TRY(count_batch(b, t, s, e));
        s->consumed = text_reader_consumed(r);
        if (o->progress != NULL)
            o->progress(o->ctx, s);
    }
    return ST_OK;
}

static size_t cut_for_trainer(const void *trainer, const void *text, size_t n)
{
    return token_trainer_cut(trainer, text, n);
}

int data_train_tokenizer(const struct train_tokenizer_opts *o, const char *out_prefix, struct tokenize_stats *read,
                         struct token_train_stats *stats, struct err *e)
{
    struct text_list list = {0};
    struct text_reader reader = {0};
    struct token_trainer *t = NULL;
    struct batch_texts *b = NULL;
    *read = (struct tokenize_stats){0};
    int st;
    TRY_OUT(mem_array((void **)&b, 1, sizeof *b, e));
    TRY_OUT(text_list_inputs(o->in, o->n_in, &list, e));
    TRY_OUT(token_trainer_open(&t, &o->train, e));
    read->files_total = (int64_t)list.n;
    for (size_t i = 0; i < list.n; i++)
        read->consumed_total += list.sizes[i];
    text_reader_init(&reader, &list, cut_for_trainer, t);
    TRY_OUT(count_all(o, b, &reader, t, read, e));
    TRY_OUT(token_trainer_run(t, o->merges, o->ctx, e));
    TRY_OUT(token_trainer_write(t, out_prefix, e));
    *stats = token_trainer_stats(t);
out:
    for (int i = 0; b != NULL && i < BATCH_PARTS; i++)
        text_part_release(&b->parts[i]);
    if (b != NULL) {
        free(b->texts);
        free(b->unpacked);
    }
    free(b);
    text_reader_release(&reader);
    text_list_release(&list);
    token_trainer_close(t);
    return st;
}
