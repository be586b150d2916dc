/* Baselines of benchmarks: reading, writing and comparing them; see baseline.h. One row a line, so that git shows what
 * changed. */
#include "log/baseline.h"

#include "log/log_int.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILE = 16 << 20, MAX_TEXT = 1000 };

void baseline_init(struct baseline *b)
{
    *b = (struct baseline){0};
    arena_init(&b->text);
}

void baseline_release(struct baseline *b)
{
    free(b->row);
    arena_release(&b->text);
    *b = (struct baseline){0};
}

int baseline_device(struct baseline *b, const char *device, struct err *e)
{
    b->device = arena_strdup(&b->text, device);
    return b->device != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory");
}

static struct baseline_row *find(const struct baseline *b, const struct baseline_row *like)
{
    for (int i = 0; i < b->n; i++)
        if (strcmp(b->row[i].what, like->what) == 0 && strcmp(b->row[i].shape, like->shape) == 0)
            return &b->row[i];
    return NULL;
}

int baseline_put(struct baseline *b, const struct baseline_row *row, struct err *e)
{
    struct baseline_row copy = {.what = arena_strdup(&b->text, row->what),
                                .shape = arena_strdup(&b->text, row->shape),
                                .us = row->us,
                                .bits = arena_strdup(&b->text, row->bits != NULL ? row->bits : "")};
    if (copy.what == NULL || copy.shape == NULL || copy.bits == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    struct baseline_row *old = find(b, row);
    if (old == NULL) {
        TRY(mem_grow((void **)&b->row, &b->cap, (size_t)b->n + 1, sizeof *b->row, e));
        old = &b->row[b->n++];
    }
    *old = copy;
    return ST_OK;
}

/* ---- files ----------------------------------------------------------------------------------- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s != NULL && strlen(s) <= MAX_TEXT ? s : NULL;
}

static int read_row(struct baseline *b, const json_t *v, size_t at, const char *label, struct err *e)
{
    const json_t *us = json_object_get(v, "us"), *bits = json_object_get(v, "bits");
    struct baseline_row row = {.what = text_of(v, "what"),
                               .shape = text_of(v, "shape"),
                               .us = json_number_value(us),
                               .bits = text_of(v, "bits")};
    if (row.what == NULL || row.shape == NULL || !json_is_number(us) || !(row.us > 0) || !isfinite(row.us) ||
        (bits != NULL && row.bits == NULL))
        return err_set(e, ST_CORRUPT, "%s: row %zu is not {\"what\": name, \"shape\": text, \"us\": positive number}",
                       label, at + 1);
    if (find(b, &row) != NULL)
        return err_set(e, ST_CORRUPT, "%s: row %zu: %s %s is there already", label, at + 1, row.what, row.shape);
    return baseline_put(b, &row, e);
}

static int read_root(struct baseline *b, const json_t *root, const char *label, struct err *e)
{
    const char *format = text_of(root, "format"), *device = text_of(root, "device");
    const json_t *rows = json_object_get(root, "rows"), *v;
    if (format == NULL || strcmp(format, "braid bench 1") != 0 || device == NULL || !json_is_array(rows)) {
        err_set(e, ST_CORRUPT, "%s is not a baseline of braid bench", label);
        return err_hint(e, "braid bench --record=FILE writes one");
    }
    TRY(baseline_device(b, device, e));
    size_t i;
    json_array_foreach(rows, i, v) TRY(read_row(b, v, i, label, e));
    return ST_OK;
}

int baseline_parse(struct baseline *b, const char *text, size_t n, const char *label, struct err *e)
{
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "%s: line %d: %s", label, why.line, why.text);
    int st = read_root(b, root, label, e);
    json_decref(root);
    return st;
}

int baseline_read(struct baseline *b, const char *path, struct err *e)
{
    char *text;
    size_t n;
    TRY(file_read(path, MAX_FILE, &text, &n, e));
    int st = baseline_parse(b, text, n, path, e);
    free(text);
    return st;
}

static int write_file(const struct baseline *b, const char *path, struct err *e)
{
    struct buf out;
    buf_init(&out, 0);
    buf_add(&out, "{\"format\":\"braid bench 1\",\"device\":");
    add_json_string(&out, b->device);
    buf_add(&out, ",\"rows\":[");
    for (int i = 0; i < b->n; i++) {
        const struct baseline_row *r = &b->row[i];
        buf_add(&out, i == 0 ? "\n{\"what\":" : ",\n{\"what\":");
        add_json_string(&out, r->what);
        buf_add(&out, ",\"shape\":");
        add_json_string(&out, r->shape);
        buf_addf(&out, ",\"us\":%.6g", r->us);
        if (r->bits[0] != '\0') {
            buf_add(&out, ",\"bits\":");
            add_json_string(&out, r->bits);
        }
        buf_add(&out, "}");
    }
    buf_add(&out, "\n]}\n");
    int st = buf_check(&out, e);
    if (st == ST_OK)
        st = file_write_atomic(path, out.text, out.len, e);
    buf_release(&out);
    return st;
}

int baseline_record(const struct baseline *now, const char *path, struct err *e)
{
    struct baseline file;
    bool exists;
    TRY(file_lookup(path, &exists, e));
    baseline_init(&file);
    int st = exists ? baseline_read(&file, path, e) : baseline_device(&file, now->device, e);
    if (st == ST_OK && strcmp(file.device, now->device) != 0) {
        st = err_set(e, ST_CONFLICT, "%s has the times of %s, and these are of %s", path, file.device, now->device);
        err_hint(e, "one file for each machine");
    }
    for (int i = 0; i < now->n && st == ST_OK; i++)
        st = baseline_put(&file, &now->row[i], e);
    if (st == ST_OK)
        st = write_file(&file, path, e);
    baseline_release(&file);
    return st;
}

/* ---- comparison ------------------------------------------------------------------------------ */

struct counts {
    int slower, faster, same, added, missing, bits;
};

static void compare_row(const struct baseline_row *old, const struct baseline_row *now, double percent,
                        struct counts *c, struct buf *out)
{
    double change = 100 * (now->us / old->us - 1);
    bool bits = old->bits[0] != '\0' && now->bits[0] != '\0' && strcmp(old->bits, now->bits) != 0;
    int *count = change > percent ? &c->slower : change < -percent ? &c->faster : &c->same;
    (*count)++;
    c->bits += bits;
    if (count != &c->same)
        buf_addf(out, "%-16s %-44s %10.1f %10.1f %+7.1f %%\n", now->what, now->shape, old->us, now->us, change);
    if (bits)
        buf_addf(out, "%-16s %-44s bits %s were %s\n", now->what, now->shape, now->bits, old->bits);
}

void baseline_compare(const struct baseline *old, const struct baseline *now, double percent, bool all, struct buf *out)
{
    struct counts c = {0};
    if (strcmp(old->device, now->device) != 0)
        buf_addf(out, "note: recorded on %s, and this is %s\n", old->device, now->device);
    buf_addf(out, "%-16s %-44s %10s %10s %9s\n", "changed", "shape", "was us", "now us", "change");
    for (int i = 0; i < now->n; i++) {
        const struct baseline_row *was = find(old, &now->row[i]);
        if (was != NULL)
            compare_row(was, &now->row[i], percent, &c, out);
        else
            buf_addf(out, "%-16s %-44s %10s %10.1f\n", now->row[i].what, now->row[i].shape, "new", now->row[i].us);
        c.added += was == NULL;
    }
    for (int i = 0; i < old->n && all; i++)
        if (strcmp(old->row[i].what, "train") != 0 && find(now, &old->row[i]) == NULL) {
            buf_addf(out, "%-16s %-44s %10.1f %10s\n", old->row[i].what, old->row[i].shape, old->row[i].us, "missing");
            c.missing++;
        }
    buf_addf(out, "%d compared: %d slower, %d faster, %d within %g %%; %d with other bits; %d new, %d missing\n",
             c.slower + c.faster + c.same, c.slower, c.faster, c.same, percent, c.bits, c.added, c.missing);
}
