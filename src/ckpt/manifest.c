/* The manifest: what a checkpoint holds, as JSON with a checksum over itself. Tensors name their
 * file, so a checkpoint written as several shards needs no other format.
 *
 *   {"format": "braid-checkpoint", "version": 1, "step": 100, "samples": 3200, "tokens": 819200,
 *    "seed": "1", "wall_seconds": 61.5, "saved_at": 1.7e9, "train": {"loss_ema": 3.25},
 *    "files": {"model.safetensors": {"bytes": 1234, "xxh3": "0123456789abcdef"}, ...},
 *    "tensors": {"model": {"<key>": {"dtype": "F32", "shape": [8, 4], "file": "<name>"}, ...},
 *                "optim": {...}},
 *    "data": [{"part": "train", "path": "<name>", "bytes": 1234, "xxh3": "<hex>"}, ...]      optional
 *    "checksum": "0123456789abcdef"}                    XXH3 of the rest, compact, keys sorted
 *
 * Values of "train" that JSON cannot write are the strings "nan", "inf" and "-inf". */
#include "ckpt/ckpt_int.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static const char *const section_names[CKPT_SECTIONS] = {"model", "optim"};

const char *ckpt_section_name(enum ckpt_section s) { return (unsigned)s < CKPT_SECTIONS ? section_names[s] : "?"; }

static int bad(struct err *e, const char *what, const char *name)
{
    char text[NAME_TEXT];
    return err_set(e, ST_CORRUPT, "%s%s%s", what, name ? ": " : "", name ? shown(name, text, sizeof text) : "");
}

/* ---- writing --------------------------------------------------------------------------------- */

static json_t *hex64(uint64_t v) { return json_sprintf("%016llx", (unsigned long long)v); }

static json_t *number_json(double v)
{
    if (isfinite(v))
        return json_real(v);
    return json_string(isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
}

/* Adds value (which it takes over, also on failure) under a key that must be new. */
static int add_new(json_t *object, const char *key, json_t *value, struct err *e)
{
    char text[NAME_TEXT];
    if (object == NULL || value == NULL) {
        json_decref(value);
        return err_set(e, ST_NOMEM, "out of memory for a manifest");
    }
    if (json_object_get(object, key) != NULL) {
        json_decref(value);
        return err_set(e, ST_INVALID, "the key '%s' is used twice", shown(key, text, sizeof text));
    }
    if (json_object_set_new(object, key, value) != 0)
        return err_set(e, ST_INVALID, "the key '%s' is not UTF-8, or memory ran out", shown(key, text, sizeof text));
    return ST_OK;
}

/* An object or array just made, owned by its parent. */
static int add_child(json_t *parent, const char *key, json_t *child, json_t **out, struct err *e)
{
    *out = child;
    return add_new(parent, key, child, e);
}

static int add_files(json_t *root, const struct manifest *m, struct err *e)
{
    json_t *files;
    TRY(add_child(root, "files", json_object(), &files, e));
    for (int i = 0; i < m->n_files; i++) {
        json_t *info;
        TRY(add_child(files, m->files[i].name, json_object(), &info, e));
        TRY(add_new(info, "bytes", json_integer(m->files[i].sum.bytes), e));
        TRY(add_new(info, "xxh3", hex64(m->files[i].sum.xxh3), e));
    }
    return ST_OK;
}

static int add_tensors(json_t *root, const struct manifest *m, struct err *e)
{
    json_t *sections, *section, *info;
    TRY(add_child(root, "tensors", json_object(), &sections, e));
    for (int i = 0; i < m->n_tensors; i++) {
        const struct manifest_tensor *t = &m->tensors[i];
        const char *name = section_names[t->section];
        section = json_object_get(sections, name);
        if (section == NULL)
            TRY(add_child(sections, name, json_object(), &section, e));
        TRY(add_child(section, t->key, json_object(), &info, e));
        TRY(add_new(info, "dtype", json_string(dtype_name(t->dtype)), e));
        TRY(add_new(info, "shape", json_shape(t->rank, t->dim), e));
        TRY(add_new(info, "file", json_string(m->files[t->file].name), e));
    }
    return ST_OK;
}

/* Paths need not be UTF-8, JSON must be; a path is for messages only. */
static json_t *path_json(const char *path)
{
    json_t *text = json_string(path);
    if (text != NULL)
        return text;
    char *plain = strdup(path);
    for (char *c = plain; c != NULL && *c != '\0'; c++)
        if ((unsigned char)*c >= 0x80)
            *c = '?';
    text = plain != NULL ? json_string(plain) : NULL;
    free(plain);
    return text;
}

static int add_data(json_t *root, const struct manifest *m, struct err *e)
{
    json_t *list;
    if (m->n_data == 0)
        return ST_OK;
    TRY(add_child(root, "data", json_array(), &list, e));
    for (int i = 0; i < m->n_data; i++) {
        const struct ckpt_data *d = &m->data[i];
        json_t *info = json_object();
        if (info == NULL || json_array_append_new(list, info) != 0)
            return err_set(e, ST_NOMEM, "out of memory for a manifest");
        TRY(add_new(info, "part", json_string(d->part), e));
        TRY(add_new(info, "path", path_json(d->file.path), e));
        TRY(add_new(info, "bytes", json_integer(d->file.bytes), e));
        TRY(add_new(info, "xxh3", hex64(d->file.xxh3), e));
    }
    return ST_OK;
}

static int add_counters(json_t *root, const struct manifest *m, struct err *e)
{
    const struct ckpt_counters *c = &m->counters;
    json_t *train;
    TRY(add_new(root, "format", json_string(MANIFEST_FORMAT), e));
    TRY(add_new(root, "version", json_integer(MANIFEST_VERSION), e));
    TRY(add_new(root, "step", json_integer(m->step), e));
    TRY(add_new(root, "samples", json_integer(c->samples), e));
    TRY(add_new(root, "tokens", json_integer(c->tokens), e));
    TRY(add_new(root, "seed", json_sprintf("%llu", (unsigned long long)c->seed), e));
    TRY(add_new(root, "wall_seconds", number_json(c->wall_seconds), e));
    TRY(add_new(root, "saved_at", number_json(c->saved_at), e));
    TRY(add_child(root, "train", json_object(), &train, e));
    for (int i = 0; i < m->n_train; i++)
        TRY(add_new(train, m->train[i].name, number_json(m->train[i].value), e));
    return ST_OK;
}

/* Checksum of the document without its "checksum", in one canonical spelling. */
static int self_checksum(json_t *root, uint64_t *out, struct err *e)
{
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a manifest's checksum");
    *out = XXH3_64bits(text, strlen(text));
    free(text);
    return ST_OK;
}

int manifest_dump(const struct manifest *m, char **text, struct err *e)
{
    uint64_t sum;
    int st;
    json_t *root = json_object();
    *text = NULL;
    if (root == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a manifest");
    TRY_OUT(add_counters(root, m, e));
    TRY_OUT(add_files(root, m, e));
    TRY_OUT(add_tensors(root, m, e));
    TRY_OUT(add_data(root, m, e));
    TRY_OUT(self_checksum(root, &sum, e));
    TRY_OUT(add_new(root, "checksum", hex64(sum), e));
    *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (*text == NULL)
        st = err_set(e, ST_NOMEM, "out of memory for a manifest");
    else if (strlen(*text) > MANIFEST_MAX_BYTES)
        st = err_set(e, ST_INVALID, "the manifest would be larger than readers accept");
out:
    json_decref(root);
    if (st != ST_OK) {
        free(*text);
        *text = NULL;
    }
    return st;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool read_hex64(const json_t *v, uint64_t *out)
{
    const char *s = json_string_value(v);
    char *end;
    if (s == NULL || strlen(s) != 16 || strspn(s, "0123456789abcdef") != 16)
        return false;
    *out = strtoull(s, &end, 16);
    return true;
}

static bool read_count(const json_t *root, const char *name, int64_t *out)
{
    const json_t *v = json_object_get(root, name);
    *out = json_integer_value(v);
    return json_is_integer(v) && *out >= 0;
}

static bool read_number(const json_t *v, double *out)
{
    const char *s = json_string_value(v);
    if (json_is_number(v)) {
        *out = json_number_value(v);
        return true;
    }
    if (s == NULL || (strcmp(s, "nan") != 0 && strcmp(s, "inf") != 0 && strcmp(s, "-inf") != 0))
        return false;
    *out = s[0] == 'n' ? (double)NAN : s[0] == 'i' ? (double)INFINITY : -(double)INFINITY;
    return true;
}

static bool read_seed(const json_t *v, uint64_t *out)
{
    const char *s = json_string_value(v);
    char again[32];
    if (s == NULL || s[0] < '0' || s[0] > '9' || strlen(s) > 20)
        return false;
    *out = strtoull(s, NULL, 10);
    snprintf(again, sizeof again, "%llu", (unsigned long long)*out); /* catches overflow and tails */
    return strcmp(s, again) == 0;
}

/* Before anything else is believed: ours, of a version we know, undamaged. */
static int check_identity(json_t *root, bool check_sum, struct err *e)
{
    char text[64];
    const char *format = json_string_value(json_object_get(root, "format"));
    int64_t version;
    uint64_t said, is;
    if (format == NULL || strcmp(format, MANIFEST_FORMAT) != 0)
        return err_set(e, ST_INVALID, "it is not a braid manifest (format '%s')",
                       format ? shown(format, text, sizeof text) : "none");
    if (!read_count(root, "version", &version) || version != MANIFEST_VERSION)
        return err_set(e, ST_UNSUPPORTED, "its format version is %lld and this braid reads version %d",
                       (long long)version, MANIFEST_VERSION);
    if (!read_hex64(json_object_get(root, "checksum"), &said))
        return bad(e, "its checksum is missing", NULL);
    json_object_del(root, "checksum");
    TRY(self_checksum(root, &is, e));
    if (check_sum && said != is)
        return err_set(e, ST_CORRUPT, "its checksum is %016llx but it says %016llx", (unsigned long long)is,
                       (unsigned long long)said);
    return ST_OK;
}

static int read_counters(struct manifest *m, const json_t *root, struct err *e)
{
    struct ckpt_counters *c = &m->counters;
    if (!read_count(root, "step", &m->step) || !read_count(root, "samples", &c->samples) ||
        !read_count(root, "tokens", &c->tokens) || !read_seed(json_object_get(root, "seed"), &c->seed) ||
        !read_number(json_object_get(root, "wall_seconds"), &c->wall_seconds) ||
        !read_number(json_object_get(root, "saved_at"), &c->saved_at))
        return bad(e, "a counter (step, samples, tokens, seed, times) is missing or no number", NULL);
    return ST_OK;
}

static int read_train(struct manifest *m, json_t *train, struct err *e)
{
    const char *name;
    json_t *value;
    double v;
    if (!json_is_object(train))
        return bad(e, "'train' is not an object", NULL);
    json_object_foreach(train, name, value) if (!read_number(value, &v)) return bad(e, "a train value is not a number",
                                                                                    name);
    m->train = arena_alloc(&m->memory, json_object_size(train) * sizeof *m->train);
    json_object_foreach(train, name, value)
    {
        const char *copy = arena_strdup(&m->memory, name);
        if (m->train == NULL || copy == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading a manifest");
        struct ckpt_number *out = &m->train[m->n_train++];
        out->name = copy;
        read_number(value, &out->value);
    }
    return ST_OK;
}

/* A plain name inside the checkpoint's own folder. */
static bool file_name_ok(const char *name)
{
    size_t n = strlen(name);
    if (n == 0 || n > 200 || name[0] == '.' || strcmp(name, MANIFEST_NAME) == 0)
        return false;
    for (const unsigned char *p = (const unsigned char *)name; *p; p++)
        if (*p == '/' || *p == '\\' || *p < 0x20 || *p == 0x7f)
            return false;
    return true;
}

static int by_file_name(const void *a, const void *b)
{
    return strcmp(((const struct manifest_file *)a)->name, ((const struct manifest_file *)b)->name);
}

static int read_files(struct manifest *m, json_t *files, struct err *e)
{
    const char *name;
    json_t *info;
    if (!json_is_object(files))
        return bad(e, "'files' is not an object", NULL);
    m->files = arena_alloc(&m->memory, json_object_size(files) * sizeof *m->files);
    json_object_foreach(files, name, info)
    {
        struct file_sum sum;
        if (!file_name_ok(name))
            return bad(e, "a file has a name that is not allowed", name);
        if (!read_count(info, "bytes", &sum.bytes) || !read_hex64(json_object_get(info, "xxh3"), &sum.xxh3))
            return bad(e, "a file lacks its size or checksum", name);
        const char *copy = arena_strdup(&m->memory, name);
        if (m->files == NULL || copy == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading a manifest");
        m->files[m->n_files++] = (struct manifest_file){.name = copy, .sum = sum};
    }
    if (m->n_files > 1)
        qsort(m->files, (size_t)m->n_files, sizeof *m->files, by_file_name);
    return ST_OK;
}

static int read_tensor(struct manifest *m, struct manifest_tensor *t, const char *key, const json_t *info,
                       struct err *e)
{
    const json_t *shape = json_object_get(info, "shape");
    const char *type = json_string_value(json_object_get(info, "dtype"));
    struct manifest_file wanted = {.name = json_string_value(json_object_get(info, "file"))}, *file;
    int64_t bytes;
    t->dtype = type ? dtype_from_name(type) : DT_NONE;
    if (t->dtype == DT_NONE || !json_is_array(shape) || json_array_size(shape) > TENSOR_MAX_RANK)
        return bad(e, "a tensor has no valid dtype or shape", key);
    t->rank = (int)json_array_size(shape);
    for (int i = 0; i < t->rank; i++) {
        const json_t *v = json_array_get(shape, (size_t)i);
        t->dim[i] = json_is_integer(v) ? json_integer_value(v) : -1;
    }
    if (!shape_bytes(t->dtype, t->rank, t->dim, &bytes))
        return bad(e, "a tensor has an impossible shape", key);
    file = wanted.name == NULL || m->n_files == 0
               ? NULL
               : bsearch(&wanted, m->files, (size_t)m->n_files, sizeof *m->files, by_file_name);
    if (file == NULL)
        return bad(e, "a tensor names a file that is not listed", key);
    t->file = (int)(file - m->files);
    t->key = arena_strdup(&m->memory, key);
    return t->key ? ST_OK : err_set(e, ST_NOMEM, "out of memory reading a manifest");
}

static int by_section_and_key(const void *a, const void *b)
{
    const struct manifest_tensor *x = a, *y = b;
    return x->section != y->section ? x->section - y->section : strcmp(x->key, y->key);
}

static int read_tensors(struct manifest *m, json_t *tensors, struct err *e)
{
    const char *name, *key;
    json_t *section, *info;
    size_t n = 0;
    if (!json_is_object(tensors))
        return bad(e, "'tensors' is not an object", NULL);
    json_object_foreach(tensors, name, section)
    {
        if (!json_is_object(section) || (strcmp(name, "model") != 0 && strcmp(name, "optim") != 0))
            return bad(e, "an unknown section of tensors", name);
        n += json_object_size(section);
    }
    m->tensors = arena_alloc(&m->memory, n * sizeof *m->tensors);
    if (m->tensors == NULL)
        return err_set(e, ST_NOMEM, "out of memory reading a manifest");
    for (int s = 0; s < CKPT_SECTIONS; s++) {
        json_object_foreach(json_object_get(tensors, section_names[s]), key, info)
        {
            m->tensors[m->n_tensors].section = s;
            TRY(read_tensor(m, &m->tensors[m->n_tensors], key, info, e));
            m->n_tensors++;
        }
    }
    if (m->n_tensors > 1)
        qsort(m->tensors, (size_t)m->n_tensors, sizeof *m->tensors, by_section_and_key);
    return ST_OK;
}

static int read_data(struct manifest *m, const json_t *list, struct err *e)
{
    if (list == NULL)
        return ST_OK;
    if (!json_is_array(list))
        return bad(e, "'data' is not a list", NULL);
    m->data = arena_alloc(&m->memory, json_array_size(list) * sizeof *m->data);
    if (m->data == NULL)
        return err_set(e, ST_NOMEM, "out of memory reading a manifest");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *info = json_array_get(list, i);
        const char *part = json_string_value(json_object_get(info, "part"));
        const char *path = json_string_value(json_object_get(info, "path"));
        struct ckpt_data d = {0};
        if (part == NULL || path == NULL || !read_count(info, "bytes", &d.file.bytes) ||
            !read_hex64(json_object_get(info, "xxh3"), &d.file.xxh3))
            return bad(e, "a data file lacks its part, path, size or checksum", path);
        d.part = arena_strdup(&m->memory, part);
        d.file.path = arena_strdup(&m->memory, path);
        if (d.part == NULL || d.file.path == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading a manifest");
        m->data[m->n_data++] = d;
    }
    return ST_OK;
}

int manifest_parse(struct manifest *m, const char *text, size_t n, bool check_sum, struct err *e)
{
    json_error_t je;
    char near[NAME_TEXT];
    int st;
    *m = (struct manifest){0};
    arena_init(&m->memory);
    if (n > MANIFEST_MAX_BYTES)
        return err_set(e, ST_CORRUPT, "it is larger than %d bytes", MANIFEST_MAX_BYTES);
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    if (root == NULL && json_ran_out(&je)) {
        st = err_set(e, ST_NOMEM, "out of memory reading a manifest");
        goto out;
    }
    if (!json_is_object(root)) {
        st = err_set(e, ST_CORRUPT, "it is not a JSON object: %s",
                     root ? "another value" : shown(je.text, near, sizeof near));
        goto out;
    }
    TRY_OUT(check_identity(root, check_sum, e));
    TRY_OUT(read_counters(m, root, e));
    TRY_OUT(read_train(m, json_object_get(root, "train"), e));
    TRY_OUT(read_files(m, json_object_get(root, "files"), e));
    TRY_OUT(read_tensors(m, json_object_get(root, "tensors"), e));
    st = read_data(m, json_object_get(root, "data"), e);
out:
    json_decref(root);
    if (st != ST_OK)
        manifest_release(m);
    return st;
}

void manifest_release(struct manifest *m)
{
    arena_release(&m->memory);
    *m = (struct manifest){0};
    arena_init(&m->memory);
}

const struct manifest_tensor *manifest_find(const struct manifest *m, const char *key, int section)
{
    struct manifest_tensor wanted = {.key = key, .section = section};
    if (m->n_tensors == 0)
        return NULL;
    return bsearch(&wanted, m->tensors, (size_t)m->n_tensors, sizeof *m->tensors, by_section_and_key);
}
