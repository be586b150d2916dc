/* Text files to parts that can be worked on independently: whole documents, pieces of long ones cut
 * where the tokenizer allows it, or lines of JSON. Parts come in order and their size is bounded
 * wherever a cut is possible. */
#include "data/data_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { PART_BYTES = 1 << 20, PART_MAX = 1 << 30 };

void text_reader_init(struct text_reader *r, const struct text_list *list, text_cut_fn *cut, const void *ctx)
{
    *r = (struct text_reader){.list = list, .cut = cut, .ctx = ctx};
}

void text_reader_release(struct text_reader *r)
{
    text_in_close(r->in);
    free(r->rest);
    r->in = NULL;
    r->rest = NULL;
}

void text_part_release(struct text_part *p)
{
    free(p->text);
    *p = (struct text_part){0};
}

int64_t text_reader_consumed(const struct text_reader *r)
{
    return r->done_bytes + (r->in != NULL ? text_in_consumed(r->in) : 0);
}

static int next_file(struct text_reader *r, struct err *e)
{
    const char *path = r->list->paths[r->file];
    TRY(text_in_open(&r->in, path, e));
    r->path = path;
    r->jsonl = text_is_jsonl(path);
    r->line = 1;
    r->n_rest = 0;
    return ST_OK;
}

static int part_reserve(struct text_part *p, size_t cap, struct err *e)
{
    if (cap <= p->cap)
        return ST_OK;
    uint8_t *text = realloc(p->text, cap);
    if (text == NULL)
        return err_set(e, ST_NOMEM, "out of memory for %zu bytes of text", cap);
    p->text = text;
    p->cap = cap;
    return ST_OK;
}

/* Where the bytes so far may end: 0 if more must be read. */
static size_t find_cut(const struct text_reader *r, const struct text_part *p)
{
    if (!r->jsonl)
        return r->cut(r->ctx, p->text, p->n);
    const uint8_t *end = memrchr(p->text, '\n', p->n);
    return end != NULL ? (size_t)(end - p->text) + 1 : 0;
}

/* Fills p to the next cut or the end of the file; *end: the file is done. */
static int fill_part(struct text_reader *r, struct text_part *p, bool *end, size_t *cut, struct err *e)
{
    size_t want = PART_BYTES;
    for (*cut = 0, *end = false; *cut == 0 && !*end; want *= 2) {
        if (want > PART_MAX) {
            err_set(e, ST_UNSUPPORTED, "%s: more than %d bytes without a place where this tokenizer allows a cut",
                    r->path, PART_MAX);
            return err_hint(e, "split the text into smaller files, or into lines of JSON");
        }
        size_t n;
        TRY(part_reserve(p, want, e));
        TRY(text_in_read(r->in, p->text + p->n, want - p->n, &n, e));
        p->n += n;
        *end = p->n < want;
        *cut = *end ? p->n : find_cut(r, p);
    }
    return ST_OK;
}

static int keep_rest(struct text_reader *r, const uint8_t *bytes, size_t n, struct err *e)
{
    if (n > r->cap_rest) {
        free(r->rest);
        r->cap_rest = 0;
        TRY(mem_array((void **)&r->rest, n, 1, e));
        r->cap_rest = n;
    }
    if (n > 0)
        memcpy(r->rest, bytes, n);
    r->n_rest = n;
    return ST_OK;
}

int text_reader_next(struct text_reader *r, struct text_part *p, bool *got, struct err *e)
{
    *got = false;
    if (r->in == NULL && r->file == r->list->n)
        return ST_OK;
    if (r->in == NULL)
        TRY(next_file(r, e));
    bool end;
    size_t cut;
    TRY(part_reserve(p, PART_BYTES, e));
    if (r->n_rest > p->cap)
        TRY(part_reserve(p, r->n_rest, e));
    memcpy(p->text, r->n_rest > 0 ? r->rest : p->text, r->n_rest);
    p->n = r->n_rest;
    r->n_rest = 0;
    TRY(fill_part(r, p, &end, &cut, e));
    p->path = r->path;
    p->line = r->line;
    p->jsonl = r->jsonl;
    p->ends_file = end;
    TRY(keep_rest(r, p->text + cut, p->n - cut, e));
    p->n = cut;
    for (const uint8_t *q = p->text, *stop = q + cut; r->jsonl && (q = memchr(q, '\n', (size_t)(stop - q))) != NULL;
         q++)
        r->line++;
    if (end) {
        r->done_bytes += text_in_consumed(r->in);
        text_in_close(r->in);
        r->in = NULL;
        r->file++;
    }
    *got = true;
    return ST_OK;
}

/* ---- Lines of JSON --------------------------------------------------------------------------- */

static const char *text_member(const json_t *root, const char *field, size_t *n, char *why, size_t size)
{
    const json_t *v = json_object_get(root, field);
    if (!json_is_object(root))
        snprintf(why, size, "not a JSON object");
    else if (v == NULL)
        snprintf(why, size, "no field \"%.60s\"", field);
    else if (!json_is_string(v))
        snprintf(why, size, "field \"%.60s\" is not a string", field);
    else {
        *n = json_string_length(v);
        return json_string_value(v);
    }
    return NULL;
}

/* Calls fn for every line that is not blank; *good false: the line is bad. */
typedef int (*line_fn)(void *ctx, const uint8_t *line, size_t n, bool *good, char *why, size_t size, struct err *e);
static int each_line(const struct text_part *p, struct jsonl_bad *bad, line_fn fn, void *ctx, struct err *e)
{
    int64_t line = p->line;
    size_t at = 0;
    for (size_t len; at < p->n; at += len + 1, line++) {
        const uint8_t *start = p->text + at, *end = memchr(start, '\n', p->n - at);
        len = end != NULL ? (size_t)(end - start) : p->n - at;
        size_t blank = 0;
        while (blank < len && (start[blank] == ' ' || start[blank] == '\t' || start[blank] == '\r'))
            blank++;
        if (blank == len)
            continue;
        char why[192];
        bool good = false;
        TRY(fn(ctx, start, len, &good, why, sizeof why, e));
        if (good)
            continue;
        if (bad->n++ == 0) {
            bad->first_line = line;
            snprintf(bad->why, sizeof bad->why, "%s", why);
        }
        if (!bad->skip) {
            err_set(e, ST_CORRUPT, "%s, line %lld: %s", p->path, (long long)line, why);
            return err_hint(e, "--data.field names the member that holds the text; `braid data tokenize --skip-bad` "
                               "leaves such lines out and counts them");
        }
    }
    return ST_OK;
}

struct object_ctx {
    jsonl_fn each;
    void *ctx;
};

static int object_line(void *ctx, const uint8_t *line, size_t n, bool *good, char *why, size_t size, struct err *e)
{
    /* some programs begin a file with it; joined files have several */
    static const uint8_t mark[] = {0xef, 0xbb, 0xbf};
    const struct object_ctx *c = ctx;
    json_error_t error;
    if (n >= sizeof mark && memcmp(line, mark, sizeof mark) == 0) {
        line += sizeof mark;
        n -= sizeof mark;
    }
    json_t *root = json_loadb((const char *)line, n, JSON_ALLOW_NUL, &error);
    if (root == NULL)
        snprintf(why, size, "column %d: %.150s", error.column, error.text);
    int st = root != NULL ? c->each(c->ctx, root, good, why, size, e) : ST_OK;
    json_decref(root);
    return st;
}

int jsonl_lines(const struct text_part *p, struct jsonl_bad *bad, jsonl_fn each, void *ctx, struct err *e)
{
    struct object_ctx c = {.each = each, .ctx = ctx};
    return each_line(p, bad, object_line, &c, e);
}

struct text_ctx {
    const char *field;
    int (*each)(void *ctx, const char *text, size_t n, struct err *e);
    void *ctx;
    uint8_t *scratch;
};

static int text_object(void *ctx, const json_t *root, bool *good, char *why, size_t size, struct err *e)
{
    const struct text_ctx *c = ctx;
    size_t n = 0;
    const char *text = text_member(root, c->field, &n, why, size);
    *good = text != NULL;
    return text != NULL ? c->each(c->ctx, text, n, e) : ST_OK;
}

static int text_line(void *ctx, const uint8_t *line, size_t n, bool *good, char *why, size_t size, struct err *e)
{
    const struct text_ctx *c = ctx;
    struct object_ctx parsed = {.each = text_object, .ctx = ctx};
    size_t len;
    *good = jsonl_text(line, n, c->field, c->scratch, &len);
    return *good ? c->each(c->ctx, (const char *)c->scratch, len, e)
                 : object_line(&parsed, line, n, good, why, size, e);
}

int jsonl_each(const struct text_part *p, const char *field, struct jsonl_bad *bad,
               int (*each)(void *ctx, const char *text, size_t n, struct err *e), void *ctx, struct err *e)
{
    struct text_ctx c = {.field = field, .each = each, .ctx = ctx};
    TRY(mem_aligned((void **)&c.scratch, p->n + 16, 16, e)); /* not cleared: texts fill it */
    int st = each_line(p, bad, text_line, &c, e);
    free(c.scratch);
    return st;
}
