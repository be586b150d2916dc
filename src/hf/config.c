/* config.json and our options: the rows of a family's fields, read and written. */
#include "hf/hf_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading JSON ---------------------------------------------------------------------------- */

int hf_json_open(struct hf_json *j, const char *folder, struct err *e)
{
    char *path = path_join(folder, "config.json"), *text = NULL;
    size_t len;
    json_error_t je;
    int st;
    *j = (struct hf_json){.label = folder};
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    TRY_OUT(file_read(path, HF_CONFIG_BYTES, &text, &len, e));
    j->root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(j->root)) {
        st = err_set(e, ST_CORRUPT, "%s: %s", path, j->root == NULL ? je.text : "not a JSON object");
        if (j->root == NULL)
            err_in(e, "line %d, column %d", je.line, je.column);
        goto out;
    }
    json_t *inner = json_object_get(j->root, "text_config");
    j->text = json_is_object(inner) ? inner : j->root;
out:
    free(text);
    free(path);
    return st;
}

void hf_json_close(struct hf_json *j)
{
    json_decref(j->root);
    *j = (struct hf_json){0};
}

json_t *hf_json_get(const struct hf_json *j, const char *name)
{
    json_t *v = json_object_get(j->text, name);
    return v == NULL || json_is_null(v) ? NULL : v;
}

int hf_refuse(const struct hf_json *j, const char *field, const char *why, struct err *e)
{
    char *text = json_dumps(json_object_get(j->text, field), JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(12));
    err_set(e, ST_UNSUPPORTED, "%s: config.json: %s = %.200s: %s", j->label, field, text ? text : "(absent)", why);
    free(text);
    return e != NULL ? (int)e->code : ST_UNSUPPORTED;
}

int hf_json_int(const struct hf_json *j, const char *name, int64_t absent, int64_t *out, struct err *e)
{
    json_t *v = hf_json_get(j, name);
    *out = absent;
    if (v == NULL)
        return ST_OK;
    if (!json_is_integer(v))
        return hf_refuse(j, name, "a whole number is expected", e);
    *out = json_integer_value(v);
    return ST_OK;
}

int hf_json_real(const struct hf_json *j, const char *name, double absent, double *out, struct err *e)
{
    json_t *v = hf_json_get(j, name);
    *out = absent;
    if (v == NULL)
        return ST_OK;
    if (!json_is_number(v))
        return hf_refuse(j, name, "a number is expected", e);
    *out = json_number_value(v);
    return ST_OK;
}

/* ---- setting options ------------------------------------------------------------------------- */

/* The folder defines the model: what the user gave beside it must say the same. */
int hf_set_text(const struct hf_json *j, struct config *c, const char *option, const char *value, struct err *e)
{
    struct config_origin from = config_source_of(c, option);
    bool given = from.source == CFG_FROM_COMMAND || (from.source == CFG_FROM_FILE && strcmp(from.label, j->label) != 0);
    struct buf before, after;
    char where[320];
    int st;
    if (!given)
        return config_set(c, option, value, j->label, e);
    config_source_text(c, option, where, sizeof where);
    buf_init(&before, 0);
    buf_init(&after, 0);
    const char *was = config_value_text(c, option, &before);
    TRY_OUT(config_set(c, option, value, j->label, e));
    const char *is = config_value_text(c, option, &after);
    if (was == NULL || is == NULL || strcmp(was, is) != 0)
        st = err_set(e, ST_CONFLICT, "%s = %.80s (%s), but %s makes it %.80s", option, was ? was : "?", where, j->label,
                     is ? is : "?");
out:
    buf_release(&before);
    buf_release(&after);
    return st;
}

int hf_set_int(const struct hf_json *j, struct config *c, const char *option, int64_t value, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return hf_set_text(j, c, option, text, e);
}

int hf_set_real(const struct hf_json *j, struct config *c, const char *option, double value, struct err *e)
{
    char text[40];
    snprintf(text, sizeof text, "%.17g", value);
    return hf_set_text(j, c, option, text, e);
}

/* ---- fields ---------------------------------------------------------------------------------- */

/* A field may have several names, "a|b": the first is written, each is read. */
static bool next_name(const char **names, char out[HF_NAME])
{
    const char *bar = strchr(*names, '|');
    size_t n = bar ? (size_t)(bar - *names) : strlen(*names);
    if (n == 0 || n >= HF_NAME)
        return false;
    memcpy(out, *names, n);
    out[n] = '\0';
    *names += n + (bar ? 1 : 0);
    return true;
}

static bool names_field(const struct hf_field *f, const char *name)
{
    char one[HF_NAME];
    for (const char *names = f->json; next_name(&names, one);)
        if (strcmp(one, name) == 0)
            return true;
    return false;
}

static json_t *field_value(const struct hf_json *j, const struct hf_field *f, char name[HF_NAME])
{
    for (const char *names = f->json; next_name(&names, name);) {
        json_t *v = hf_json_get(j, name);
        if (v != NULL)
            return v;
    }
    const char *first = f->json;
    next_name(&first, name);
    return NULL;
}

/* A field that is there and null: no value of a window or a rank, and of a switch what no class of transformers says.
 * */
static bool is_null(const struct hf_json *j, const struct hf_field *f)
{
    char name[HF_NAME];
    for (const char *names = f->json; next_name(&names, name);)
        if (json_is_null(json_object_get(j->text, name)))
            return true;
    return false;
}

/* One row, except for those that no option follows. */
static int read_option(const struct hf_json *j, const struct hf_field *f, struct config *c, struct err *e)
{
    char name[HF_NAME];
    json_t *v = field_value(j, f, name);
    if (v == NULL && f->text == NULL)
        return hf_refuse(j, name, "braid needs this field", e);
    if (v == NULL && f->kind == HF_INT_OR_NULL && is_null(j, f))
        return hf_set_int(j, c, f->option, 0, e);
    if (v == NULL && f->kind == HF_BOOL && is_null(j, f))
        return hf_refuse(j, name, "true or false is expected", e);
    if (v == NULL)
        return hf_set_text(j, c, f->option, f->text, e);
    switch (f->kind) {
    case HF_INT:
    case HF_INT_OR_NULL:
        return json_is_integer(v) ? hf_set_int(j, c, f->option, json_integer_value(v), e)
                                  : hf_refuse(j, name, "a whole number is expected", e);
    case HF_REAL:
        return json_is_number(v) ? hf_set_real(j, c, f->option, json_number_value(v), e)
                                 : hf_refuse(j, name, "a number is expected", e);
    case HF_BOOL:
        return json_is_boolean(v) ? hf_set_text(j, c, f->option, json_is_true(v) ? "on" : "off", e)
                                  : hf_refuse(j, name, "true or false is expected", e);
    default: return err_set(e, ST_INTERNAL, "field %s has an option and no kind that sets it", name);
    }
}

static bool says_no(json_t *v)
{
    return v == NULL || json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           ((json_is_array(v) || json_is_object(v)) && json_array_size(v) + json_object_size(v) == 0);
}

static int read_field(const struct hf_json *j, const struct hf_field *f, struct config *c, struct err *e)
{
    char name[HF_NAME];
    json_t *v;
    switch (f->kind) {
    case HF_IGNORED:
    case HF_NOTED: return ST_OK;
    case HF_ABSENT:
        for (const char *names = f->json; next_name(&names, name);)
            if (!says_no(hf_json_get(j, name)))
                return hf_refuse(j, name, "braid has nothing for it", e);
        return ST_OK;
    case HF_FIXED: break;
    default: return read_option(j, f, c, e);
    }
    v = field_value(j, f, name);
    if (v == NULL && strcmp(f->text, "true") == 0 && is_null(j, f))
        return hf_refuse(j, name, "true or false is expected", e);
    json_t *want = v ? json_loads(f->text, JSON_DECODE_ANY, NULL) : NULL;
    bool same = v == NULL || json_equal(v, want);
    json_decref(want);
    if (same)
        return ST_OK;
    hf_refuse(j, name, "braid has nothing for it", e);
    return err_hint(e, "it can only be %s", f->text);
}

static const struct hf_field *find_field(const struct hf_family *fam, const char *name)
{
    for (int i = 0; fam->fields[i] != NULL; i++)
        for (const struct hf_field *f = fam->fields[i]; f->json != NULL; f++)
            if (names_field(f, name))
                return f;
    return NULL;
}

int hf_max_position(const struct hf_json *j, int64_t *out, struct err *e)
{
    TRY(hf_json_int(j, "max_position_embeddings", 0, out, e));
    if (*out == 0)
        TRY(hf_json_int(j, "n_positions", 0, out, e));
    return *out >= 0 && *out <= 1 << 30 ? ST_OK
                                        : hf_refuse(j, "max_position_embeddings", "a number of tokens is expected", e);
}

static int read_positions(const struct hf_json *j, struct config *c, struct err *e)
{
    int64_t most;
    TRY(hf_max_position(j, &most, e));
    return most > 0 ? hf_set_int(j, c, "model.max_position", most, e) : ST_OK;
}

static void note_field(const struct hf_field *f, const char *name, json_t *value, struct buf *notes)
{
    if (says_no(value))
        return;
    if (f == NULL)
        buf_addf(notes, "config.json: field '%.60s' is not known to braid and was left aside\n", name);
    else if (f->kind == HF_NOTED)
        buf_addf(notes, "config.json: %.60s: %s\n", name, f->text);
}

int hf_config_read(const struct hf_family *fam, const struct hf_json *j, struct config *c, struct buf *notes,
                   struct err *e)
{
    const char *name;
    json_t *value;
    for (int i = 0; fam->fields[i] != NULL; i++)
        for (const struct hf_field *f = fam->fields[i]; f->json != NULL; f++)
            TRY(read_field(j, f, c, e));
    TRY(fam->read(j, c, e));
    TRY(read_positions(j, c, e));
    if (notes != NULL)
        json_object_foreach(j->text, name, value) note_field(find_field(fam, name), name, value, notes);
    return ST_OK;
}

/* Sequences as long as the model's, unless the user says how long. */
static int default_seq(const struct hf_folder *f, struct config *c, struct buf *notes, struct err *e)
{
    int64_t most;
    TRY(hf_max_position(&f->json, &most, e));
    if (most == 0 || config_source_of(c, "train.seq").source != CFG_FROM_DEFAULT)
        return ST_OK;
    if (most > HF_DEFAULT_SEQ && notes != NULL)
        buf_addf(notes, "train.seq = %d; the model allows %lld tokens: --train.seq=N\n", HF_DEFAULT_SEQ,
                 (long long)most);
    return hf_set_int(&f->json, c, "train.seq", min_i64(most, HF_DEFAULT_SEQ), e);
}

int hf_options(struct hf_folder *f, struct config *c, struct buf *notes, struct err *e)
{
    TRY(hf_config_read(f->family, &f->json, c, notes, e));
    TRY(hf_add_predictions(f, c, e));
    return default_seq(f, c, notes, e);
}

/* ---- writing --------------------------------------------------------------------------------- */

int hf_put(json_t *object, const char *name, json_t *value, struct err *e)
{
    if (value == NULL || json_object_set_new(object, name, value) != 0)
        return err_set(e, ST_NOMEM, "out of memory for config.json");
    return ST_OK;
}

int hf_number(const struct config *c, const char *option, double *out, struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    const char *value = config_value_text(c, option, &text);
    bool known = value != NULL && parse_f64(value, out);
    buf_release(&text);
    return known ? ST_OK : err_set(e, ST_INTERNAL, "option %s is not a number", option);
}

static int write_field(const struct hf_field *f, const struct config *c, json_t *out, struct err *e)
{
    char name[HF_NAME];
    const char *names = f->json;
    int64_t whole;
    double real;
    bool on;
    int st = ST_OK;
    struct buf text;
    if (!next_name(&names, name) || f->kind == HF_ABSENT || f->kind == HF_IGNORED || f->kind == HF_NOTED)
        return ST_OK;
    if (f->kind == HF_FIXED)
        return hf_put(out, name, json_loads(f->text, JSON_DECODE_ANY, NULL), e);
    buf_init(&text, 0);
    const char *value = config_value_text(c, f->option, &text);
    if (value == NULL)
        st = err_set(e, ST_INTERNAL, "no option %s", f->option);
    else if (f->kind == HF_INT_OR_NULL && parse_i64(value, &whole) && whole == 0)
        st = hf_put(out, name, json_null(), e);
    else if ((f->kind == HF_INT || f->kind == HF_INT_OR_NULL) && parse_i64(value, &whole))
        st = hf_put(out, name, json_integer(whole), e);
    else if (f->kind == HF_REAL && parse_f64(value, &real))
        st = hf_put(out, name, json_real(real), e);
    else if (f->kind == HF_BOOL && parse_bool(value, &on))
        st = hf_put(out, name, json_boolean(on), e);
    else
        st = err_set(e, ST_INTERNAL, "option %s = '%s' is not of the kind that field %s has", f->option, value, name);
    buf_release(&text);
    return st;
}

int hf_config_write(const struct hf_family *fam, const struct config *c, enum dtype dtype, json_t **out, struct err *e)
{
    const char *word = dtype == DT_F32 ? "float32" : "bfloat16";
    json_t *o = json_object();
    int st;
    *out = NULL;
    TRY_OUT(hf_put(o, "architectures", json_pack("[s]", fam->architecture), e));
    TRY_OUT(hf_put(o, "model_type", json_string(fam->model_type), e));
    for (int i = 0; fam->fields[i] != NULL; i++)
        for (const struct hf_field *f = fam->fields[i]; f->json != NULL; f++)
            TRY_OUT(write_field(f, c, o, e));
    TRY_OUT(fam->write(c, o, e));
    TRY_OUT(hf_put(o, "dtype", json_string(word), e));
    TRY_OUT(hf_put(o, "torch_dtype", json_string(word), e)); /* what transformers 4 reads */
out:
    if (st != ST_OK) {
        json_decref(o);
        return st;
    }
    *out = o;
    return ST_OK;
}
