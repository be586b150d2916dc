/* Chat templates: read from a file or from the table of names, checked, and found beside a tokenizer. */
#include "token/chat_int.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { TEMPLATE_MAX = 1 << 20, CONFIG_MAX = 64 << 20 };

/* ---- Reading --------------------------------------------------------------------------------- */

static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }

/* The text between quotes, without escapes; NULL: it does not end, or has an unknown escape. *end: behind it. */
static char *unquote(struct arena *a, const char *p, const char *stop, const char **end)
{
    char *out = arena_alloc(a, (size_t)(stop - p) + 1), *to = out;
    for (p++; out != NULL && p < stop && *p != '"'; p++) {
        if (*p != '\\') {
            *to++ = *p;
            continue;
        }
        const char *at = ++p < stop ? strchr("n\nt\tr\r\"\"\\\\", *p) : NULL;
        if (at == NULL || *at == '\0')
            return NULL;
        *to++ = at[1];
    }
    if (out == NULL || p >= stop)
        return NULL;
    *end = p + 1;
    return out;
}

static int bad_line(const char *where, int line, const char *what, struct err *e)
{
    err_set(e, ST_CORRUPT, "%s, line %d: %s", where, line, what);
    return err_hint(
        e, "a template file has lines such as: user = \"<|user|>\\n{content}\\n\"; docs/TOKENS.md lists the keys");
}

static int take_line(struct chat_template *t, const char *p, const char *stop, const char *where, int line,
                     struct err *e)
{
    const struct {
        const char *name, **text;
        bool *flag;
    } keys[] = {{"begin", &t->begin, NULL},
                {"system", &t->system, NULL},
                {"user", &t->user, NULL},
                {"system_user", &t->system_user, NULL},
                {"assistant", &t->assistant, NULL},
                {"tool", &t->tool, NULL},
                {"generation", &t->generation, NULL},
                {"stop", &t->stop, NULL},
                {"default_system", &t->default_system, NULL},
                {"trim", NULL, &t->trim},
                {"alternate", NULL, &t->alternate}};
    const char *name = p;
    while (p < stop && !is_blank(*p) && *p != '=')
        p++;
    size_t n = (size_t)(p - name);
    int k = 0;
    while (k < countof(keys) && (strlen(keys[k].name) != n || memcmp(keys[k].name, name, n) != 0))
        k++;
    while (p < stop && is_blank(*p))
        p++;
    if (k == countof(keys) || p == stop || *p++ != '=')
        return bad_line(where, line, k == countof(keys) ? "unknown key" : "there is no '='", e);
    while (p < stop && is_blank(*p))
        p++;
    while (stop > p && is_blank(stop[-1]))
        stop--;
    if (keys[k].flag != NULL) {
        bool on = stop - p == 2 && memcmp(p, "on", 2) == 0;
        if (!on && !(stop - p == 3 && memcmp(p, "off", 3) == 0))
            return bad_line(where, line, "this key takes on or off", e);
        *keys[k].flag = on;
        return ST_OK;
    }
    if (*keys[k].text != NULL)
        return bad_line(where, line, "the key is given twice", e);
    const char *end = stop;
    if (p == stop || *p != '"' || (*keys[k].text = unquote(&t->memory, p, stop, &end)) == NULL || end != stop)
        return bad_line(where, line, "the value is not one text in quotes with the escapes \\n \\t \\r \\\" \\\\", e);
    return ST_OK;
}

/* How often a placeholder occurs. */
static int occurs(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; p != NULL && (p = strstr(p, what)) != NULL; p += strlen(what))
        n++;
    return n;
}

static int check(struct chat_template *t, const char *where, struct err *e)
{
    const struct {
        const char *name, *text;
        int content, system;
    } texts[] = {{"begin", t->begin, 0, 0},
                 {"system", t->system, 1, 0},
                 {"user", t->user, 1, 0},
                 {"system_user", t->system_user, 1, 1},
                 {"assistant", t->assistant, 1, 0},
                 {"tool", t->tool, 1, 0},
                 {"generation", t->generation, 0, 0},
                 {"stop", t->stop, 0, 0}};
    for (int i = 0; i < countof(texts); i++)
        if (texts[i].text != NULL && (occurs(texts[i].text, "{content}") != texts[i].content ||
                                      occurs(texts[i].text, "{system}") != texts[i].system))
            return err_set(e, ST_CORRUPT, "%s: %s must hold {content} %s and {system} %s", where, texts[i].name,
                           texts[i].content ? "once" : "nowhere", texts[i].system ? "once" : "nowhere");
    if (t->user == NULL || t->assistant == NULL || t->stop == NULL || t->stop[0] == '\0')
        return err_set(e, ST_CORRUPT, "%s: a template needs user, assistant and stop", where);
    const char *content = strstr(t->assistant, "{content}");
    size_t before = (size_t)(content - t->assistant);
    if (strstr(content, t->stop) == NULL)
        return err_set(e, ST_CORRUPT, "%s: stop does not occur behind {content} in assistant", where);
    if (t->generation == NULL)
        t->generation = arena_strndup(&t->memory, t->assistant, before);
    if (t->generation == NULL)
        return err_set(e, ST_NOMEM, "out of memory reading %s", where);
    if (strlen(t->generation) > before || !str_starts(t->assistant, t->generation))
        return err_set(e, ST_CORRUPT, "%s: assistant does not begin with generation", where);
    t->hash = (uint64_t)(t->trim + 2 * t->alternate);
    for (int i = 0; i < countof(texts); i++)
        t->hash = hash64_str(texts[i].text != NULL ? texts[i].text : "\x01", t->hash);
    t->hash = hash64_str(t->default_system != NULL ? t->default_system : "\x01", hash64_str(t->generation, t->hash));
    return ST_OK;
}

int chat_template_parse(struct chat_template *t, const char *text, size_t n, const char *where, struct err *e)
{
    const char *end = text + n;
    int line = 1;
    *t = (struct chat_template){.stop_id = -1};
    arena_init(&t->memory);
    if (memchr(text, '\0', n) != NULL)
        return err_set(e, ST_CORRUPT, "%s holds a NUL byte: it is no template file", where);
    for (const char *p = text, *stop; p < end; p = stop + 1, line++) {
        stop = memchr(p, '\n', (size_t)(end - p));
        if (stop == NULL)
            stop = end;
        while (p < stop && is_blank(*p))
            p++;
        if (p < stop && *p != '#')
            TRY(take_line(t, p, stop, where, line, e));
    }
    return check(t, where, e);
}

const char *chat_hash_text(const struct chat_template *t, char out[17])
{
    snprintf(out, 17, "%016" PRIx64, t->hash);
    return out;
}

void chat_template_close(struct chat_template *t)
{
    arena_release(&t->memory);
    *t = (struct chat_template){.stop_id = -1};
}

/* ---- Finding --------------------------------------------------------------------------------- */

/* A file beside the tokenizer; *text NULL: there is none. */
static int read_beside(const struct tokenizer *tok, const char *name, char **text, size_t *n, struct err *e)
{
    const char *first = tokenizer_n_files(tok) > 0 ? tokenizer_file(tok, 0) : "";
    const char *slash = strrchr(first, '/');
    struct buf path;
    *text = NULL;
    if (first[0] == '\0')
        return ST_OK;
    buf_init(&path, 0);
    buf_addf(&path, "%.*s%s", slash != NULL ? (int)(slash - first + 1) : 0, first, name);
    int st = buf_check(&path, e);
    if (st == ST_OK && file_exists(path.text) && !file_is_dir(path.text))
        st = file_read(path.text, CONFIG_MAX, text, n, e);
    buf_release(&path);
    return st;
}

/* chat_template is a text, or a list of named ones of which "default" counts. */
static const char *jinja_of(const json_t *root)
{
    const json_t *v = json_object_get(root, "chat_template"), *item;
    size_t i;
    if (json_is_string(v))
        return json_string_value(v);
    json_array_foreach(v, i, item)
    {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name != NULL && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(item, "template"));
    }
    return NULL;
}

static int recognise(const char *jinja, const char *file, const char **name, struct err *e)
{
    const char *like = NULL;
    *name = jinja != NULL ? chat_template_recognise(jinja, &like) : NULL;
    if (*name != NULL)
        return ST_OK;
    if (jinja == NULL)
        err_set(e, ST_INVALID, "data.chat=auto: no chat template was found beside the tokenizer");
    else
        err_set(e, ST_INVALID, "data.chat=auto: the chat template in %s is none of the known ones%s%s", file,
                like != NULL ? "; it resembles " : "", like != NULL ? like : "");
    return err_hint(e, "set data.chat to one of %s, or to a template file (docs/TOKENS.md)", chat_names_list());
}

static int find_auto(const struct tokenizer *tok, const char **name, const char **file, struct err *e)
{
    char *text;
    size_t n = 0;
    *file = "chat_template.jinja";
    TRY(read_beside(tok, *file, &text, &n, e));
    if (text != NULL) {
        int st = recognise(text, *file, name, e);
        free(text);
        return st;
    }
    *file = "tokenizer_config.json";
    TRY(read_beside(tok, *file, &text, &n, e));
    json_t *root = text != NULL ? json_loadb(text, n, 0, NULL) : NULL;
    int st = recognise(jinja_of(root), *file, name, e);
    json_decref(root);
    free(text);
    return st;
}

/* What the template writes must be tokens, or a reply could never end. Bytes have none: there its text does. */
static int fit_tokenizer(struct chat_template *t, const struct tokenizer *tok, struct err *e)
{
    if (tok->model == NULL)
        return ST_OK;
    const char *const needed[] = {t->stop, t->begin};
    for (int i = 0; i < countof(needed); i++) {
        size_t from, to;
        if (needed[i] == NULL || needed[i][0] == '\0' ||
            (tokenizer_next_special(tok, needed[i], strlen(needed[i]), &from, &to) >= 0 && from == 0))
            continue;
        err_set(e, ST_INVALID, "chat template %s needs the special token %s, which the tokenizer does not have",
                t->name, needed[i]);
        return err_hint(e,
                        "choose a template of this tokenizer (data.chat), or give it the token: data.token_special, or "
                        "--special-tokens of `braid data train-tokenizer`");
    }
    t->stop_id = tokenizer_find(tok, t->stop);
    return ST_OK;
}

int chat_template_open(struct chat_template *t, const char *name, const struct tokenizer *tok, struct err *e)
{
    const char *file = NULL, *text = NULL;
    char *read = NULL;
    size_t n = 0;
    *t = (struct chat_template){.stop_id = -1};
    if (strcmp(name, "auto") == 0)
        TRY(find_auto(tok, &name, &file, e));
    for (int i = 0; i < chat_n_named && text == NULL; i++)
        if (strcmp(chat_named[i].name, name) == 0)
            text = chat_named[i].text;
    if (text == NULL && !file_exists(name)) {
        err_set(e, ST_INVALID, "data.chat=%s is neither a known template nor a file", name);
        return err_hint(e, "known are auto, %s", chat_names_list());
    }
    if (text == NULL)
        TRY(file_read(name, TEMPLATE_MAX, &read, &n, e));
    int st = chat_template_parse(t, text != NULL ? text : read, text != NULL ? strlen(text) : n, name, e);
    free(read);
    snprintf(t->name, sizeof t->name, "%s", name);
    if (file != NULL)
        snprintf(t->found, sizeof t->found, "%s", file);
    return st == ST_OK ? fit_tokenizer(t, tok, e) : st;
}
