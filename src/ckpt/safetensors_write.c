/* The safetensors writer: one pass, no copy of the tensors, a checksum on the way. Tensors go in
 * descending element size, so that each is aligned although the format allows no padding. */
#include "ckpt/ckpt_int.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { SINK_BYTES = 4 << 20, HEADER_MAX = 100000000, ALIGN = 8 };

/* Buffered, hashed output; rows in disk order arrive in small pieces. */
struct sink {
    int fd;
    const char *path;
    XXH3_state_t *hash;
    char *buffer;
    size_t used;
    int64_t bytes;
};

/* fd: of the file just created, or -1: it is created here. Either way it is closed by sink_close,
 * also after an error. */
static int sink_open(struct sink *s, const char *path, int fd, struct err *e)
{
    *s = (struct sink){.fd = fd, .path = path};
    TRY(mem_aligned((void **)&s->buffer, SINK_BYTES, 64, e));
    s->hash = XXH3_createState();
    if (s->hash == NULL || XXH3_64bits_reset(s->hash) != XXH_OK)
        return err_set(e, ST_NOMEM, "out of memory writing %s", path);
    if (fd < 0)
        fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    s->fd = fd;
    return fd < 0 ? err_errno(e, "cannot create %s", path) : ST_OK;
}

static int sink_emit(struct sink *s, const void *bytes, size_t n, struct err *e)
{
    if (XXH3_64bits_update(s->hash, bytes, n) != XXH_OK)
        return err_set(e, ST_INTERNAL, "cannot hash %s", s->path);
    s->bytes += (int64_t)n;
    return file_write_fd(s->fd, bytes, n, s->path, e);
}

static int sink_flush(struct sink *s, struct err *e)
{
    size_t n = s->used;
    s->used = 0;
    return n > 0 ? sink_emit(s, s->buffer, n, e) : ST_OK;
}

static int sink_put(struct sink *s, const void *bytes, size_t n, struct err *e)
{
    const char *p = bytes;
    if (n > SINK_BYTES - s->used)
        TRY(sink_flush(s, e));
    while (n >= SINK_BYTES) { /* large pieces need no buffer; hashed while still in the cache */
        TRY(sink_emit(s, p, SINK_BYTES, e));
        p += SINK_BYTES;
        n -= SINK_BYTES;
    }
    if (n > 0)
        memcpy(s->buffer + s->used, p, n);
    s->used += n;
    return ST_OK;
}

/* Ends the file whatever happened before: st is the status so far, and the result. */
static int sink_close(struct sink *s, int st, struct file_sum *sum, struct err *e)
{
    if (st == ST_OK)
        st = sink_flush(s, e);
    if (st == ST_OK && fsync(s->fd) != 0)
        st = err_errno(e, "cannot sync %s", s->path);
    if (s->fd >= 0 && close(s->fd) != 0 && st == ST_OK)
        st = err_errno(e, "cannot close %s", s->path);
    if (st == ST_OK)
        *sum = (struct file_sum){.bytes = s->bytes, .xxh3 = XXH3_64bits_digest(s->hash)};
    else if (s->fd >= 0)
        unlink(s->path);
    XXH3_freeState(s->hash);
    free(s->buffer);
    return st;
}

int st_item_order(const struct st_item *a, const struct st_item *b)
{
    size_t x = dtype_bytes(a->host.dtype), y = dtype_bytes(b->host.dtype);
    if (x != y)
        return x > y ? -1 : 1;
    return strcmp(a->name, b->name);
}

static int by_size_then_name(const void *a, const void *b)
{
    return st_item_order(*(const struct st_item *const *)a, *(const struct st_item *const *)b);
}

static int check_item(const struct st_item *item, bool fetched, int64_t *bytes, struct err *e)
{
    char name[NAME_TEXT], text[128];
    const struct tensor *t = &item->host;
    if (item->name == NULL || item->name[0] == '\0')
        return err_set(e, ST_INVALID, "a tensor to be written has no name");
    shown(item->name, name, sizeof name);
    if (t->rank < 0 || t->rank > TENSOR_MAX_RANK || !shape_bytes(t->dtype, t->rank, t->dim, bytes))
        return err_set(e, ST_INVALID, "tensor '%s' has an impossible shape or dtype", name);
    if (!tensor_is_dense(t) || (t->data == NULL && *bytes > 0 && !fetched))
        return err_set(e, ST_INVALID, "tensor '%s' (%s) is not a dense host tensor", name,
                       tensor_text(t, text, sizeof text));
    return check_rows(item->param, t, name, e);
}

json_t *json_shape(int rank, const int64_t *dim)
{
    json_t *shape = json_array();
    for (int i = 0; shape != NULL && i < rank; i++)
        if (json_array_append_new(shape, json_integer(dim[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    return shape;
}

static int add_entry(json_t *root, const struct st_item *item, bool fetched, int64_t *at, struct err *e)
{
    int64_t bytes;
    char name[NAME_TEXT];
    TRY(check_item(item, fetched, &bytes, e));
    shown(item->name, name, sizeof name);
    if (bytes > INT64_MAX - *at)
        return err_set(e, ST_INVALID, "tensor '%s' makes the file too large", name);
    if (json_object_get(root, item->name) != NULL || strcmp(item->name, "__metadata__") == 0)
        return err_set(e, ST_CONFLICT, "tensor name '%s' is used twice or reserved", name);
    json_t *shape = json_shape(item->host.rank, item->host.dim);
    if (shape == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a safetensors header");
    json_t *info = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_name(item->host.dtype), "shape", shape,
                             "data_offsets", (json_int_t)*at, (json_int_t)(*at + bytes));
    if (info == NULL || json_object_set_new(root, item->name, info) != 0)
        return err_set(e, ST_INVALID, "tensor name '%s' is not UTF-8, or memory ran out", name);
    *at += bytes;
    return ST_OK;
}

static int add_metadata(json_t *root, const struct st_meta *meta, int n, struct err *e)
{
    if (n == 0)
        return ST_OK;
    json_t *map = json_object();
    if (json_object_set_new(root, "__metadata__", map) != 0)
        return err_set(e, ST_NOMEM, "out of memory for a safetensors header");
    for (int i = 0; i < n; i++)
        if (json_object_set_new(map, meta[i].key, json_string(meta[i].value)) != 0)
            return err_set(e, ST_INVALID, "metadata %d is not UTF-8, or memory ran out", i);
    return ST_OK;
}

/* Checks every item, so nothing is created on disk for a request that cannot be met. */
static int make_header(const struct st_item *const *items, int n, bool fetched, const struct st_meta *meta, int n_meta,
                       char **text, struct err *e)
{
    int64_t at = 0;
    int st = ST_OK;
    *text = NULL;
    json_t *root = json_object();
    if (root == NULL) {
        st = err_set(e, ST_NOMEM, "out of memory for a safetensors header");
        goto out;
    }
    TRY_OUT(add_metadata(root, meta, n_meta, e));
    for (int i = 0; i < n; i++)
        TRY_OUT(add_entry(root, items[i], fetched, &at, e));
    *text = json_dumps(root, JSON_COMPACT);
    if (*text == NULL)
        st = err_set(e, ST_NOMEM, "out of memory for a safetensors header");
    else if (strlen(*text) > HEADER_MAX - ALIGN)
        st = err_set(e, ST_INVALID, "%d tensors need a header larger than safetensors allows", n);
out:
    json_decref(root);
    return st;
}

static int put_header(struct sink *s, const char *text, struct err *e)
{
    size_t n = strlen(text), padded = (size_t)round_up((int64_t)n, ALIGN);
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)((uint64_t)padded >> 8 * i);
    TRY(sink_put(s, length, sizeof length, e));
    TRY(sink_put(s, text, n, e));
    return sink_put(s, "        ", padded - n, e);
}

static int put_tensor(struct sink *s, const struct st_item *item, struct err *e)
{
    const struct tensor *t = &item->host;
    int64_t bytes = tensor_bytes(t), rows = count_rows(item->param, t), mem_row;
    if (bytes == 0)
        return ST_OK;
    for (int64_t row = 0, run, row_bytes = bytes / rows; row < rows; row += run) {
        run = row_run(item->param, row, rows, &mem_row);
        TRY(sink_put(s, (const char *)t->data + mem_row * row_bytes, (size_t)(run * row_bytes), e));
    }
    return ST_OK;
}

static int write_all(struct sink *s, const char *header, const struct st_item *const *items, int n,
                     const struct ckpt_source *from, struct err *e)
{
    TRY(put_header(s, header, e));
    for (int i = 0; i < n; i++) {
        struct st_item item = *items[i];
        if (from != NULL)
            TRY(from->fetch(from->ctx, item.name, &item.host, e));
        TRY(put_tensor(s, &item, e));
    }
    return ST_OK;
}

int st_write_new(const char *path, const struct st_item *items, int n, const struct st_meta *meta, int n_meta,
                 struct file_sum *sum, struct err *e)
{
    return st_write_from(path, items, n, NULL, meta, n_meta, sum, e);
}

/* Into the file just created as fd, or with fd -1 into a new one. fd is closed in any case. */
static int write_to(int fd, const char *path, const struct st_item *items, int n, const struct ckpt_source *from,
                    const struct st_meta *meta, int n_meta, struct file_sum *sum, struct err *e)
{
    const struct st_item **order = NULL;
    char *header = NULL;
    struct sink s;
    int st;
    TRY_OUT(mem_array((void **)&order, (size_t)max_i64(n, 0), sizeof *order, e));
    for (int i = 0; i < n; i++) {
        order[i] = &items[i];
        if (items[i].name == NULL) {
            st = err_set(e, ST_INVALID, "tensor %d of %s has no name", i, path);
            goto out;
        }
    }
    qsort(order, (size_t)n, sizeof *order, by_size_then_name);
    TRY_OUT(make_header(order, n, from != NULL, meta, n_meta, &header, e));
    st = sink_open(&s, path, fd, e);
    fd = -1; /* the sink's now */
    if (st == ST_OK)
        st = write_all(&s, header, order, n, from, e);
    st = sink_close(&s, st, sum, e);
out:
    if (fd >= 0)
        close(fd);
    free(header);
    free(order);
    return st;
}

int st_write_from(const char *path, const struct st_item *items, int n, const struct ckpt_source *from,
                  const struct st_meta *meta, int n_meta, struct file_sum *sum, struct err *e)
{
    return write_to(-1, path, items, n, from, meta, n_meta, sum, e);
}

int st_write_stream(const char *path, const struct st_item *items, int n, const struct ckpt_source *from,
                    const struct st_meta *meta, int n_meta, struct err *e)
{
    struct file_sum sum;
    return st_write_from(path, items, n, from, meta, n_meta, &sum, e);
}

int bytes_write_new(const char *path, const void *bytes, size_t n, struct file_sum *sum, struct err *e)
{
    struct sink s;
    int st = sink_open(&s, path, -1, e);
    if (st == ST_OK)
        st = sink_put(&s, bytes, n, e);
    return sink_close(&s, st, sum, e);
}

int file_checksum(const char *path, struct file_sum *sum, struct err *e)
{
    XXH3_state_t *hash = XXH3_createState();
    char *buffer = NULL;
    ssize_t got = 0;
    int64_t size;
    int st = ST_OK, fd = -1;
    *sum = (struct file_sum){0};
    TRY_OUT(mem_aligned((void **)&buffer, SINK_BYTES, 64, e));
    if (hash == NULL || XXH3_64bits_reset(hash) != XXH_OK) {
        st = err_set(e, ST_NOMEM, "out of memory reading %s", path);
        goto out;
    }
    /* read() and not a map: an I/O error is then an error and not a signal. */
    TRY_OUT(file_open_regular(path, &fd, &size, e));
    while ((got = read(fd, buffer, SINK_BYTES)) > 0 || (got < 0 && errno == EINTR)) {
        if (got <= 0)
            continue;
        if (XXH3_64bits_update(hash, buffer, (size_t)got) != XXH_OK) {
            st = err_set(e, ST_INTERNAL, "cannot hash %s", path);
            goto out;
        }
        sum->bytes += got;
    }
    if (got < 0)
        st = err_errno(e, "cannot read %s", path);
    sum->xxh3 = XXH3_64bits_digest(hash);
out:
    if (fd >= 0)
        close(fd);
    XXH3_freeState(hash);
    free(buffer);
    return st;
}

/* What was written must be readable before it takes its final name. */
static int read_back(const char *path, int n, struct err *e)
{
    struct st_file *f;
    TRY(st_open(&f, path, e));
    int have = st_count(f);
    st_close(f);
    return have == n ? ST_OK
                     : err_set(e, ST_CORRUPT, "%s was written with %d tensors and reads back with %d", path, n, have);
}

int st_write_file(const char *path, const struct st_item *items, int n, const struct st_meta *meta, int n_meta,
                  struct err *e)
{
    char tmp[FILE_TEMP_MAX];
    struct file_sum sum;
    int fd;
    file_temp_clean(NULL, path);
    TRY(file_temp_open(path, tmp, &fd, e));
    int st = write_to(fd, tmp, items, n, NULL, meta, n_meta, &sum, e);
    if (st == ST_OK)
        st = read_back(tmp, n, e);
    if (st == ST_OK && rename(tmp, path) != 0)
        st = err_errno(e, "cannot rename %s to %s", tmp, path);
    if (st != ST_OK) {
        unlink(tmp);
        return st;
    }
    return file_sync_parent(path, e);
}
