/* The manifest: what a checkpoint holds, as JSON with a checksum over itself. Tensors name their
 * file, so a checkpoint written as several shards needs no other format.
 *
 *   {"format": "braid-checkpoint", "version": 1, "step": 100, "samples": 3200, "tokens": 819200,
 *    "seed": "1", "wall_seconds": 61.5, "saved_at": 1.7e9, "train": {"loss_ema": 3.25},
 *    "files": {"model.safetensors": {"bytes": 1234, "xxh3": "0123456789abcdef"}, ...},
 *    "tensors": {"model": {"<key>": {"dtype": "F32", "shape": [8, 4], "file": "<name>"}, ...},
 *                "optim": {...}},
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

const char *ckpt_section_name(enum ckpt_section s)
{
    return (unsigned)s < CKPT_SECTIONS ? section_names[s] : "?";
}

static int bad(struct err *e, const char *what, const char *name)
{
    char text[NAME_TEXT];
    return err_set(e, ST_CORRUPT, "%s%s%s", what, name ? ": " : "",
                   name ? shown(name, text, sizeof text) : "");
}

/* ---- writing -------------------------------------------------------------------------------- */

static json_t *hex64(uint64_t v) { return json_sprintf("%016llx", (unsigned long long)v); }

static json_t *number_json(double v)
{
    if (isfinite(v))
        return json_real(v);
    return json_string(isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
}

static json_t *files_json(const struct manifest *m)
{
    json_t *files = json_object();
    for (int i = 0; i < m->n_files; i++)
        json_object_set_new(files, m->files[i].name,
                            json_pack("{s:I, s:o}", "bytes", (json_int_t)m->files[i].sum.bytes,
                                      "xxh3", hex64(m->files[i].sum.xxh3)));
    return files;
}

static json_t *tensors_json(const struct manifest *m)
{
    json_t *sections = json_object();
    for (int i = 0; i < m->n_tensors; i++) {
        const struct manifest_tensor *t = &m->tensors[i];
        const char *name = section_names[t->section];
        json_t *section = json_object_get(sections, name), *shape = json_array();
        if (section == NULL)
            json_object_set_new(sections, name, section = json_object());
        for (int d = 0; d < t->rank; d++)
            json_array_append_new(shape, json_integer(t->dim[d]));
        json_object_set_new(section, t->key,
                            json_pack("{s:s, s:o, s:s}", "dtype", dtype_name(t->dtype), "shape",
                                      shape, "file", m->files[t->file].name));
    }
    return sections;
}

/* Of the document without its "checksum", in one canonical spelling. */
static int self_checksum(json_t *root, uint64_t *out, struct err *e)
{
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    if (text == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a manifest's checksum");
    *out = XXH3_64bits(text, strlen(text));
    free(text);
    return ST_OK;
}

/* json_object_set_new and json_pack fail quietly above; what is missing shows here. */
static bool all_present(json_t *root, const struct manifest *m)
{
    size_t tensors = 0;
    const char *name;
    json_t *section;
    json_object_foreach(json_object_get(root, "tensors"), name, section) tensors +=
        json_object_size(section);
    return tensors == (size_t)m->n_tensors &&
           json_object_size(json_object_get(root, "files")) == (size_t)m->n_files &&
           json_object_size(json_object_get(root, "train")) == (size_t)m->n_train;
}

int manifest_dump(const struct manifest *m, char **text, struct err *e)
{
    uint64_t sum;
    int st = ST_OK;
    json_t *train = json_object();
    *text = NULL;
    for (int i = 0; i < m->n_train; i++)
        json_object_set_new(train, m->train[i].name, number_json(m->train[i].value));
    const struct ckpt_counters *c = &m->counters;
    json_t *root = json_pack(
        "{s:s, s:i, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "format", MANIFEST_FORMAT,
        "version", MANIFEST_VERSION, "step", (json_int_t)m->step, "samples", (json_int_t)c->samples,
        "tokens", (json_int_t)c->tokens, "seed", json_sprintf("%llu", (unsigned long long)c->seed),
        "wall_seconds", number_json(c->wall_seconds), "saved_at", number_json(c->saved_at), "train",
        train, "files", files_json(m), "tensors", tensors_json(m));
    if (root == NULL || !all_present(root, m)) {
        st = err_set(e, ST_INVALID, "a key is used twice or is not UTF-8, or memory ran out");
        goto out;
    }
    TRY_OUT(self_checksum(root, &sum, e));
    json_object_set_new(root, "checksum", hex64(sum));
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

/* ---- reading -------------------------------------------------------------------------------- */

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
    snprintf(again, sizeof again, "%llu",
             (unsigned long long)*out); /* catches overflow and tails */
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
        return err_set(e, ST_UNSUPPORTED,
                       "its format version is %lld and this braid reads version %d",
                       (long long)version, MANIFEST_VERSION);
    if (!read_hex64(json_object_get(root, "checksum"), &said))
        return bad(e, "its checksum is missing", NULL);
    json_object_del(root, "checksum");
    TRY(self_checksum(root, &is, e));
    if (check_sum && said != is)
        return err_set(e, ST_CORRUPT, "its checksum is %016llx but it says %016llx",
                       (unsigned long long)is, (unsigned long long)said);
    return ST_OK;
}

static int read_counters(struct manifest *m, const json_t *root, struct err *e)
{
    struct ckpt_counters *c = &m->counters;
    if (!read_count(root, "step", &m->step) || !read_count(root, "samples", &c->samples) ||
        !read_count(root, "tokens", &c->tokens) ||
        !read_seed(json_object_get(root, "seed"), &c->seed) ||
        !read_number(json_object_get(root, "wall_seconds"), &c->wall_seconds) ||
        !read_number(json_object_get(root, "saved_at"), &c->saved_at))
        return bad(e, "a counter (step, samples, tokens, seed, times) is missing or no number",
                   NULL);
    return ST_OK;
}

static int read_train(struct manifest *m, json_t *train, struct err *e)
{
    const char *name;
    json_t *value;
    double v;
    if (!json_is_object(train))
        return bad(e, "'train' is not an object", NULL);
    json_object_foreach(train, name, value) if (!read_number(value, &v)) return bad(
        e, "a train value is not a number", name);
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
        if (!read_count(info, "bytes", &sum.bytes) ||
            !read_hex64(json_object_get(info, "xxh3"), &sum.xxh3))
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

static int read_tensor(struct manifest *m, struct manifest_tensor *t, const char *key,
                       const json_t *info, struct err *e)
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
    if (!json_is_object(root)) {
        st = err_set(e, ST_CORRUPT, "it is not a JSON object: %s",
                     root ? "another value" : shown(je.text, near, sizeof near));
        goto out;
    }
    TRY_OUT(check_identity(root, check_sum, e));
    TRY_OUT(read_counters(m, root, e));
    TRY_OUT(read_train(m, json_object_get(root, "train"), e));
    TRY_OUT(read_files(m, json_object_get(root, "files"), e));
    st = read_tensors(m, json_object_get(root, "tensors"), e);
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
    return bsearch(&wanted, m->tensors, (size_t)m->n_tensors, sizeof *m->tensors,
                   by_section_and_key);
}
