/* Writes a Megatron pair. Tokens stream to a temporary file beside PREFIX.bin; lengths and documents stay in memory
 * (4 and 8 bytes each) until close, which writes the .idx beside its place and renames both. A kill between the two
 * renames leaves a .bin without its .idx, and a temporary file that shows whose work that is: the next writer of the
 * same prefix removes both. */
#include "data/data_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WRITE_BUFFER = 1 << 20 };

struct out_file {
    int fd; /* -1: not open */
    char *path, *tmp;
    uint8_t *buffer;
    size_t used;
    int left; /* temporary files of a killed writer that were found */
};

struct token_writer {
    struct out_file bin, idx, loss; /* loss: of conversations, opened by the first mark */
    char *loss_path;
    int64_t n_tokens, n_loss;
    enum dtype dtype;
    bool replace;
    int64_t sequence_tokens; /* in the open sequence */
    int32_t *lengths;
    int64_t *doc_ends;
    size_t n_seqs, cap_seqs, n_docs, cap_docs;
};

enum dtype token_dtype_for_vocab(int64_t vocab)
{
    return vocab <= 256 ? DT_U8 : vocab < 65500 ? DT_U16 : DT_I32; /* 65500 is Megatron's limit */
}

static char *join_suffix(const char *prefix, const char *suffix)
{
    size_t a = strlen(prefix), b = strlen(suffix);
    char *text = malloc(a + b + 1);
    if (text != NULL) {
        memcpy(text, prefix, a);
        memcpy(text + a, suffix, b + 1);
    }
    return text;
}

static int out_open(struct out_file *f, const char *prefix, const char *suffix, struct err *e)
{
    f->path = join_suffix(prefix, suffix);
    f->buffer = malloc(WRITE_BUFFER);
    if (f->path == NULL || f->buffer == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s%s", prefix, suffix);
    f->left = file_temp_clean(NULL, f->path);
    char tmp[FILE_TEMP_MAX];
    int st = file_temp_open(f->path, tmp, &f->fd, e);
    if (st != ST_OK) {
        if (errno == ENOENT)
            err_hint(e, "its folder does not exist; create it, or name another");
        return st;
    }
    f->tmp = strdup(tmp);
    if (f->tmp != NULL)
        return ST_OK;
    unlink(tmp);
    return err_set(e, ST_NOMEM, "out of memory opening %s", f->path);
}

static int out_flush(struct out_file *f, struct err *e)
{
    size_t n = f->used;
    f->used = 0;
    return file_write_fd(f->fd, f->buffer, n, f->tmp, e);
}

static int out_add(struct out_file *f, const void *bytes, size_t n, struct err *e)
{
    if (f->used + n > WRITE_BUFFER)
        TRY(out_flush(f, e));
    memcpy(f->buffer + f->used, bytes, n); /* callers add single values */
    f->used += n;
    return ST_OK;
}

static int out_finish(struct out_file *f, struct err *e)
{
    TRY(out_flush(f, e));
    if (fsync(f->fd) != 0)
        return err_errno(e, "cannot sync %s", f->tmp);
    int fd = f->fd;
    f->fd = -1;
    return close(fd) == 0 ? ST_OK : err_errno(e, "cannot close %s", f->tmp);
}

/* Removes the temporary file unless it was renamed (tmp is NULL then). */
static void out_drop(struct out_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    if (f->tmp != NULL)
        unlink(f->tmp);
    free(f->tmp);
    free(f->path);
    free(f->buffer);
    *f = (struct out_file){.fd = -1};
}

static int out_rename(struct out_file *f, struct err *e)
{
    if (rename(f->tmp, f->path) != 0)
        return err_errno(e, "cannot rename %s to %s", f->tmp, f->path);
    free(f->tmp);
    f->tmp = NULL;
    return ST_OK;
}

int token_writer_open(struct token_writer **out, const char *prefix, enum dtype dtype, bool replace, struct err *e)
{
    *out = NULL;
    if (dtype != DT_U8 && dtype != DT_U16 && dtype != DT_I32)
        return err_set(e, ST_INVALID, "token files hold U8, U16 or I32, not %s", dtype_name(dtype));
    struct token_writer *w = calloc(1, sizeof *w);
    if (w == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s.bin", prefix);
    *w = (struct token_writer){.bin.fd = -1, .idx.fd = -1, .loss.fd = -1, .dtype = dtype, .replace = replace};
    int st;
    w->loss_path = join_suffix(prefix, ".loss");
    if (w->loss_path == NULL)
        TRY_OUT(err_set(e, ST_NOMEM, "out of memory opening %s.bin", prefix));
    TRY_OUT(out_open(&w->bin, prefix, ".bin", e));
    TRY_OUT(out_open(&w->idx, prefix, ".idx", e));
    bool has_bin, has_idx;
    TRY_OUT(file_lookup(w->bin.path, &has_bin, e));
    TRY_OUT(file_lookup(w->idx.path, &has_idx, e));
    bool half = w->idx.left > 0 && has_bin && !has_idx;
    const char *old = has_bin ? w->bin.path : has_idx ? w->idx.path : NULL;
    if (half && !replace) { /* killed between its two renames: of no use to anyone */
        if (unlink(w->bin.path) != 0)
            TRY_OUT(err_errno(e, "cannot remove %s, which a killed writer left", w->bin.path));
        old = NULL;
    }
    if (old != NULL && !replace)
        TRY_OUT(err_set(e, ST_CONFLICT, "%s exists already", old));
    *out = w;
    return ST_OK;
out:
    token_writer_abort(w);
    return st;
}

int token_writer_add(struct token_writer *w, const int32_t *ids, size_t n, struct err *e)
{
    static const int64_t limits[DT_COUNT] = {[DT_U8] = UINT8_MAX, [DT_U16] = UINT16_MAX, [DT_I32] = INT32_MAX};
    size_t item = dtype_bytes(w->dtype);
    if ((int64_t)n > INT32_MAX - w->sequence_tokens)
        return err_set(e, ST_UNSUPPORTED, "%s: a sequence of more than 2^31-1 tokens", w->bin.path);
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] > limits[w->dtype])
            return err_set(e, ST_INVALID, "%s: id %d does not fit type %s", w->bin.path, ids[i], dtype_name(w->dtype));
        TRY(out_add(&w->bin, &ids[i], item, e)); /* little-endian: the low bytes come first */
    }
    w->sequence_tokens += (int64_t)n;
    w->n_tokens += (int64_t)n;
    return ST_OK;
}

int token_writer_add_loss(struct token_writer *w, const uint8_t *loss, size_t n, struct err *e)
{
    if (w->loss.path == NULL) {
        char *dot = strrchr(w->loss_path, '.');
        *dot = '\0'; /* the prefix */
        int st = out_open(&w->loss, w->loss_path, ".loss", e);
        *dot = '.';
        TRY(st);
    }
    for (size_t i = 0; i < n; i++)
        TRY(out_add(&w->loss, &loss[i], 1, e));
    w->n_loss += (int64_t)n;
    return ST_OK;
}

int token_writer_end_sequence(struct token_writer *w, struct err *e)
{
    if (w->sequence_tokens == 0)
        return ST_OK;
    TRY(mem_grow((void **)&w->lengths, &w->cap_seqs, w->n_seqs + 1, sizeof *w->lengths, e));
    w->lengths[w->n_seqs++] = (int32_t)w->sequence_tokens;
    w->sequence_tokens = 0;
    return ST_OK;
}

int token_writer_end_document(struct token_writer *w, struct err *e)
{
    TRY(token_writer_end_sequence(w, e));
    TRY(mem_grow((void **)&w->doc_ends, &w->cap_docs, w->n_docs + 1, sizeof *w->doc_ends, e));
    w->doc_ends[w->n_docs++] = (int64_t)w->n_seqs;
    return ST_OK;
}

static int write_idx(struct token_writer *w, struct err *e)
{
    static const uint8_t codes[DT_COUNT] = {[DT_U8] = 1, [DT_U16] = 8, [DT_I32] = 4};
    uint64_t version = 1, seqs = w->n_seqs, entries = w->n_docs + 1;
    struct out_file *f = &w->idx;
    TRY(out_add(f, "MMIDIDX\0", 9, e));
    TRY(out_add(f, &version, 8, e));
    TRY(out_add(f, &codes[w->dtype], 1, e));
    TRY(out_add(f, &seqs, 8, e));
    TRY(out_add(f, &entries, 8, e));
    for (size_t i = 0; i < w->n_seqs; i++)
        TRY(out_add(f, &w->lengths[i], 4, e));
    int64_t offset = 0;
    for (size_t i = 0; i < w->n_seqs; i++) {
        TRY(out_add(f, &offset, 8, e));
        offset += w->lengths[i] * (int64_t)dtype_bytes(w->dtype);
    }
    int64_t first = 0;
    TRY(out_add(f, &first, 8, e));
    for (size_t i = 0; i < w->n_docs; i++)
        TRY(out_add(f, &w->doc_ends[i], 8, e));
    return ST_OK;
}

int token_writer_close(struct token_writer *w, struct err *e)
{
    int st;
    if (w->sequence_tokens > 0 || (w->n_docs ? (size_t)w->doc_ends[w->n_docs - 1] : 0) < w->n_seqs)
        TRY_OUT(token_writer_end_document(w, e));
    TRY_OUT(out_finish(&w->bin, e));
    TRY_OUT(write_idx(w, e));
    TRY_OUT(out_finish(&w->idx, e));
    if (w->loss.path != NULL)
        TRY_OUT(out_finish(&w->loss, e));
    if (w->loss.path != NULL && w->n_loss != w->n_tokens)
        TRY_OUT(err_set(e, ST_INTERNAL, "%s: %lld marks for %lld tokens", w->loss_path, (long long)w->n_loss,
                        (long long)w->n_tokens));
    if (w->replace && unlink(w->idx.path) != 0 && errno != ENOENT)
        TRY_OUT(err_errno(e, "cannot replace %s", w->idx.path));
    /* Names reach the disk in any order unless they are synced: never a new .bin beside an old .idx, an .idx without
     * its .bin, or a .bin alone without the temporary name that tells whose it is. */
    TRY_OUT(file_sync_parent(w->bin.path, e));
    st = ST_OK;
    if (w->loss.path != NULL)
        st = out_rename(&w->loss, e);
    else if (unlink(w->loss_path) != 0 && errno != ENOENT)
        st = err_errno(e, "cannot remove %s", w->loss_path);
    if (st == ST_OK)
        st = out_rename(&w->bin, e);
    if (st != ST_OK) { /* marks without their tokens; those of an old pair went with its .idx */
        unlink(w->loss_path);
        goto out;
    }
    st = file_sync_parent(w->bin.path, e);
    if (st == ST_OK)
        st = out_rename(&w->idx, e);
    if (st == ST_OK)
        st = file_sync_parent(w->bin.path, e);
    if (st != ST_OK) { /* half a pair is of no use to anyone, nor one that may vanish */
        if (w->idx.tmp == NULL)
            unlink(w->idx.path);
        unlink(w->bin.path);
        unlink(w->loss_path);
    }
out:
    token_writer_abort(w);
    return st;
}

void token_writer_abort(struct token_writer *w)
{
    if (w == NULL)
        return;
    out_drop(&w->bin);
    out_drop(&w->idx);
    out_drop(&w->loss);
    free(w->loss_path);
    free(w->lengths);
    free(w->doc_ends);
    free(w);
}
