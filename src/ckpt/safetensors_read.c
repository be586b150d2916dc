/* The safetensors reader. The file is mapped and nothing in it is believed: the header's length is
 * bounded before it is parsed, every entry is checked before room is made for it, and together the
 * entries must cover the data exactly once. */
#include "ckpt/ckpt_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_MAX = 100000000, LENGTH_BYTES = 8 };
#define METADATA_KEY "__metadata__"

struct extent { /* one entry before it is published: sorting needs its offsets */
    const char *name;
    struct tensor view;
    int64_t begin, end;
};

struct st_file {
    struct file_map map; /* empty when the bytes are the caller's */
    struct st_entry *entries;
    int *by_name; /* indices of entries, sorted by name */
    struct st_meta *meta;
    int n, n_meta;
    struct arena strings;
};

static int corrupt(const char *label, const char *name, const char *what, struct err *e)
{
    char text[NAME_TEXT];
    int st = err_set(e, ST_CORRUPT, "%s: tensor '%s': %s", label, shown(name, text, sizeof text), what);
    err_hint(e, "the file is damaged or was not written as safetensors; fetch or write it again");
    return st;
}

/* The header as JSON, and where the data begins. */
static int parse_header(const uint8_t *bytes, size_t size, const char *label, json_t **root, size_t *data_begin,
                        struct err *e)
{
    uint64_t n = 0;
    char near[NAME_TEXT];
    const char *why = NULL;
    json_error_t je;
    *root = NULL;
    if (size < LENGTH_BYTES + 2)
        why = "too short for a header";
    for (int i = LENGTH_BYTES - 1; why == NULL && i >= 0; i--)
        n = n << 8 | bytes[i];
    if (why == NULL && n > HEADER_MAX)
        why = "its header claims more than 100000000 bytes";
    else if (why == NULL && n > size - LENGTH_BYTES)
        why = "its header is longer than the file (truncated?)";
    else if (why == NULL && (n < 2 || bytes[LENGTH_BYTES] != '{'))
        why = "its header is not a JSON object";
    if (why == NULL) {
        *root = json_loadb((const char *)bytes + LENGTH_BYTES, (size_t)n, JSON_REJECT_DUPLICATES, &je);
        if (*root == NULL && json_ran_out(&je))
            return err_set(e, ST_NOMEM, "out of memory reading the header of %s", label);
        if (*root == NULL)
            why = shown(je.text, near, sizeof near);
    }
    if (why != NULL) {
        err_set(e, ST_CORRUPT, "%s is not a valid safetensors file of %zu bytes: %s", label, size, why);
        err_hint(e, "the file is damaged or of another format; fetch or write it again");
        return ST_CORRUPT;
    }
    *data_begin = LENGTH_BYTES + (size_t)n;
    return ST_OK;
}

static bool get_i64(const json_t *array, size_t i, int64_t *out)
{
    const json_t *v = json_array_get(array, i);
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= 0;
}

static int parse_entry(struct extent *x, const char *label, const char *name, const json_t *info, int64_t data_bytes,
                       struct err *e)
{
    const json_t *shape = json_object_get(info, "shape");
    const json_t *offsets = json_object_get(info, "data_offsets");
    const char *type = json_string_value(json_object_get(info, "dtype"));
    int64_t dim[TENSOR_MAX_RANK] = {0}, bytes;
    char text[NAME_TEXT], type_text[32];
    if (type == NULL || !json_is_array(shape) || !json_is_array(offsets))
        return corrupt(label, name, "dtype, shape or data_offsets is missing", e);
    enum dtype dtype = dtype_from_name(type);
    if (dtype == DT_NONE)
        return err_set(e, ST_UNSUPPORTED, "%s: tensor '%s' has the unknown dtype '%s'", label,
                       shown(name, text, sizeof text), shown(type, type_text, sizeof type_text));
    size_t rank = json_array_size(shape);
    if (rank > TENSOR_MAX_RANK)
        return err_set(e, ST_UNSUPPORTED, "%s: tensor '%s' has %zu dimensions, more than %d", label,
                       shown(name, text, sizeof text), rank, TENSOR_MAX_RANK);
    for (size_t i = 0; i < rank; i++)
        if (!get_i64(shape, i, &dim[i]))
            return corrupt(label, name, "a dimension is not a whole number", e);
    if (!shape_bytes(dtype, (int)rank, dim, &bytes))
        return corrupt(label, name, "the shape overflows", e);
    if (json_array_size(offsets) != 2 || !get_i64(offsets, 0, &x->begin) || !get_i64(offsets, 1, &x->end) ||
        x->begin > x->end)
        return corrupt(label, name, "data_offsets are not two ascending numbers", e);
    if (x->end > data_bytes)
        return corrupt(label, name, "its data reach past the end of the file (truncated?)", e);
    if (x->end - x->begin != bytes)
        return corrupt(label, name, "its data_offsets disagree with its dtype and shape", e);
    x->name = name;
    x->view = tensor_shape(dtype, (int)rank, dim);
    return ST_OK;
}

/* Empty tensors share an offset with the next one and come first. */
static int by_extent(const void *a, const void *b)
{
    const struct extent *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int check_cover(const struct extent *x, int n, const char *label, int64_t data_bytes, struct err *e)
{
    int64_t at = 0;
    for (int i = 0; i < n; i++) {
        if (x[i].begin != at)
            return corrupt(label, x[i].name,
                           x[i].begin > at ? "a gap lies before its data" : "its data overlap another's", e);
        at = x[i].end;
    }
    if (at == data_bytes)
        return ST_OK;
    err_set(e, ST_CORRUPT, "%s: %lld bytes after the last tensor belong to none", label, (long long)(data_bytes - at));
    err_hint(e, "the file is damaged; fetch or write it again");
    return ST_CORRUPT;
}

static int read_metadata(struct st_file *f, json_t *meta, const char *label, struct err *e)
{
    const char *key;
    json_t *value;
    if (meta == NULL)
        return ST_OK;
    if (!json_is_object(meta))
        return err_set(e, ST_CORRUPT, "%s: " METADATA_KEY " is not an object", label);
    json_object_foreach(meta, key, value) if (!json_is_string(value)) return err_set(
        e, ST_CORRUPT, "%s: " METADATA_KEY " holds a value that is not a string", label);
    TRY(mem_array((void **)&f->meta, json_object_size(meta), sizeof *f->meta, e));
    json_object_foreach(meta, key, value)
    {
        struct st_meta *m = &f->meta[f->n_meta];
        m->key = arena_strdup(&f->strings, key);
        m->value = arena_strdup(&f->strings, json_string_value(value));
        if (m->key == NULL || m->value == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading %s", label);
        f->n_meta++;
    }
    return ST_OK;
}

static int name_order(const void *a, const void *b, void *entries)
{
    const struct st_entry *list = entries;
    return strcmp(list[*(const int *)a].name, list[*(const int *)b].name);
}

static int publish(struct st_file *f, const struct extent *x, int n, const uint8_t *data, const char *label,
                   struct err *e)
{
    TRY(mem_array((void **)&f->entries, (size_t)n, sizeof *f->entries, e));
    TRY(mem_array((void **)&f->by_name, (size_t)n, sizeof *f->by_name, e));
    for (int i = 0; i < n; i++) {
        f->entries[i].view = x[i].view;
        f->entries[i].view.data = (void *)(uintptr_t)(data + x[i].begin);
        f->entries[i].name = arena_strdup(&f->strings, x[i].name);
        if (f->entries[i].name == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading %s", label);
        f->by_name[i] = i;
    }
    f->n = n;
    qsort_r(f->by_name, (size_t)n, sizeof *f->by_name, name_order, f->entries);
    return ST_OK;
}

static int read_entries(struct st_file *f, json_t *root, const uint8_t *data, int64_t data_bytes, const char *label,
                        struct err *e)
{
    struct extent *x = NULL;
    const char *name;
    json_t *info;
    int n = 0, st;
    TRY(mem_array((void **)&x, json_object_size(root), sizeof *x, e));
    json_object_foreach(root, name, info)
    {
        if (strcmp(name, METADATA_KEY) == 0)
            continue;
        TRY_OUT(parse_entry(&x[n], label, name, info, data_bytes, e));
        n++;
    }
    qsort(x, (size_t)n, sizeof *x, by_extent);
    TRY_OUT(check_cover(x, n, label, data_bytes, e));
    st = publish(f, x, n, data, label, e);
out:
    free(x);
    return st;
}

int st_open_bytes(struct st_file **out, const void *bytes, size_t n, const char *label, struct err *e)
{
    struct st_file *f = NULL;
    json_t *root = NULL;
    size_t begin;
    int st;
    *out = NULL;
    TRY(mem_array((void **)&f, 1, sizeof *f, e));
    arena_init(&f->strings);
    TRY_OUT(parse_header(bytes, n, label, &root, &begin, e));
    TRY_OUT(read_entries(f, root, (const uint8_t *)bytes + begin, (int64_t)(n - begin), label, e));
    st = read_metadata(f, json_object_get(root, METADATA_KEY), label, e);
out:
    json_decref(root);
    if (st != ST_OK)
        st_close(f);
    else
        *out = f;
    return st;
}

int st_open(struct st_file **out, const char *path, struct err *e)
{
    struct file_map map;
    *out = NULL;
    TRY(file_map_open(&map, path, e));
    if (map.size == 0)
        return err_set(e, ST_CORRUPT, "%s is empty, not a safetensors file", path);
    int st = st_open_bytes(out, map.data, map.size, path, e);
    if (st != ST_OK)
        file_map_close(&map);
    else
        (*out)->map = map;
    return st;
}

void st_close(struct st_file *f)
{
    if (f == NULL)
        return;
    file_map_close(&f->map);
    arena_release(&f->strings);
    free(f->entries);
    free(f->by_name);
    free(f->meta);
    free(f);
}

int st_count(const struct st_file *f) { return f->n; }

const struct st_entry *st_entry(const struct st_file *f, int i) { return i >= 0 && i < f->n ? &f->entries[i] : NULL; }

const struct st_entry *st_find(const struct st_file *f, const char *name)
{
    int low = 0, high = f->n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        const struct st_entry *entry = &f->entries[f->by_name[mid]];
        int order = strcmp(name, entry->name);
        if (order == 0)
            return entry;
        if (order < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

const char *st_metadata(const struct st_file *f, const char *key)
{
    for (int i = 0; i < f->n_meta; i++)
        if (strcmp(f->meta[i].key, key) == 0)
            return f->meta[i].value;
    return NULL;
}

void st_forget(const struct st_file *f, const struct st_entry *entry)
{
    const uint8_t *at = entry->view.data;
    if (f->map.data != NULL && at >= f->map.data)
        file_map_forget(&f->map, (size_t)(at - f->map.data), (size_t)tensor_bytes(&entry->view));
}

int st_read(const struct st_entry *entry, const struct tensor *dst, struct err *e)
{
    char name[NAME_TEXT], have[128], want[128];
    shown(entry->name, name, sizeof name);
    tensor_text(&entry->view, have, sizeof have);
    tensor_text(dst, want, sizeof want);
    if (!tensor_same_shape(&entry->view, dst))
        return err_set(e, ST_INVALID, "tensor '%s' is %s in the file but %s is wanted", name, have, want);
    if (!tensor_is_dense(dst) || (dst->data == NULL && tensor_elems(dst) > 0))
        return err_set(e, ST_INVALID, "tensor '%s': the destination is not a dense host tensor", name);
    if (!dtype_converts(dst->dtype, entry->view.dtype))
        return err_set(e, ST_UNSUPPORTED, "tensor '%s': cannot convert %s to %s", name, have, want);
    int st = copy_rows_from_disk(dst, &entry->view, NULL, e);
    if (st != ST_OK)
        err_in(e, "reading tensor '%s'", name);
    return st;
}
