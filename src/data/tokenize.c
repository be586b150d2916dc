/* Text files to a token file: one document per file, streamed, so that memory does not grow with
 * the text. */
#include "data/data_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    CHUNK = 1 << 20,
    PROGRESS_BYTES = 4 << 20,
    SEQUENCE_MAX = 1 << 30, /* a length is an int32: a longer document becomes several sequences */
    TEXT_FILES_MAX = 1 << 28,
};

struct job {
    const struct tokenize_opts *o;
    struct tokenize_stats *stats;
    struct token_writer *writer;
    uint8_t *bytes;
    int32_t *ids;
    size_t cap; /* of both */
    int64_t sequence, reported;
};

/* Up to cap bytes; fewer only at the end of the file. */
static int read_chunk(int fd, uint8_t *out, size_t cap, size_t *n, const char *path, struct err *e)
{
    for (*n = 0; *n < cap;) {
        ssize_t got = read(fd, out + *n, cap - *n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return err_errno(e, "cannot read %s", path);
        if (got == 0)
            break;
        *n += (size_t)got;
    }
    return ST_OK;
}

static int reserve(struct job *j, size_t cap, struct err *e)
{
    if (cap <= j->cap)
        return ST_OK;
    free(j->bytes);
    free(j->ids);
    j->ids = NULL;
    j->cap = 0;
    TRY(mem_array((void **)&j->bytes, cap, 1, e));
    TRY(mem_array((void **)&j->ids, cap, sizeof *j->ids, e));
    j->cap = cap;
    return ST_OK;
}

static int add_chunk(struct job *j, size_t n, struct err *e)
{
    const struct tokenizer *t = j->o->tokenizer;
    size_t n_ids = 0;
    TRY(t->ops->encode(t, j->bytes, n, j->ids, j->cap, &n_ids, e));
    if (j->sequence + (int64_t)n_ids > SEQUENCE_MAX) {
        TRY(token_writer_end_sequence(j->writer, e));
        j->sequence = 0;
    }
    TRY(token_writer_add(j->writer, j->ids, n_ids, e));
    j->sequence += (int64_t)n_ids;
    j->stats->bytes += (int64_t)n;
    j->stats->tokens += (int64_t)n_ids;
    if (j->o->progress != NULL && j->stats->bytes - j->reported >= PROGRESS_BYTES) {
        j->reported = j->stats->bytes;
        j->o->progress(j->o->progress_ctx, j->stats);
    }
    return ST_OK;
}

static int end_document(struct job *j, struct err *e)
{
    int32_t eod = j->o->tokenizer->eod;
    if (eod >= 0) {
        TRY(token_writer_add(j->writer, &eod, 1, e));
        j->stats->tokens++;
    }
    j->sequence = 0;
    j->stats->files++;
    j->stats->documents++;
    return token_writer_end_document(j->writer, e);
}

/* Bytes may be cut anywhere. Other tokenizers must see a document whole: cap grows to its size. */
static int add_document(struct job *j, const char *path, int64_t size, struct err *e)
{
    bool cut = j->o->tokenizer->is_bytes;
    if (!cut && size >= SEQUENCE_MAX)
        return err_set(e, ST_UNSUPPORTED, "%s: a document of %lld bytes, at most %d are supported",
                       path, (long long)size, SEQUENCE_MAX - 1);
    TRY(reserve(j, cut ? CHUNK : (size_t)size + 1, e));
    int64_t now, total = 0;
    int fd, st;
    TRY(file_open_regular(path, &fd, &now, e));
    size_t n;
    do {
        st = read_chunk(fd, j->bytes, j->cap, &n, path, e);
        total += (int64_t)n;
        if (st == ST_OK && !cut && n > (size_t)size)
            st = err_set(e, ST_IO, "%s grew while it was read", path);
        if (st == ST_OK && n > 0)
            st = add_chunk(j, n, e);
    } while (st == ST_OK && n == j->cap);
    if (st == ST_OK && total < size)
        st = err_set(e, ST_IO, "%s became shorter while it was read: %lld of %lld bytes", path, (long long)total, (long long)size);
    close(fd);
    return st == ST_OK ? end_document(j, e) : st;
}

static int list_inputs(const struct tokenize_opts *o, struct text_list *list, struct err *e)
{
    for (int i = 0; i < o->n_in; i++)
        TRY(text_list_add(list, o->in[i], TEXT_FILES_MAX, e));
    if (list->n > 0)
        return ST_OK;
    err_set(e, ST_INVALID, "no text to tokenize: %lld binary files, %lld empty, %lld others",
            (long long)list->binary, (long long)list->empty, (long long)list->other);
    return err_hint(e, "a file with a NUL byte in its first 8 KiB counts as binary; hidden files, "
                       "*.bin and *.idx in folders are left out");
}

int data_tokenize(const struct tokenize_opts *o, struct tokenize_stats *stats, struct err *e)
{
    struct text_list list = {0};
    struct job j = {.o = o, .stats = stats};
    *stats = (struct tokenize_stats){0};
    int st;
    TRY_OUT(list_inputs(o, &list, e)); /* before the outputs exist, lest they list themselves */
    stats->files_total = (int64_t)list.n;
    stats->skipped_binary = list.binary;
    stats->skipped_empty = list.empty;
    stats->skipped_other = list.other;
    enum dtype dtype = token_dtype_for_vocab(o->tokenizer->vocab);
    TRY_OUT(token_writer_open(&j.writer, o->out, dtype, o->replace, e));
    for (size_t i = 0; i < list.n; i++)
        TRY_OUT(add_document(&j, list.paths[i], list.sizes[i], e));
    struct token_writer *done = j.writer;
    j.writer = NULL;
    TRY_OUT(token_writer_close(done, e));
out:
    token_writer_abort(j.writer);
    text_list_release(&list);
    free(j.bytes);
    free(j.ids);
    return st;
}
