/* INI files. inih splits lines into section, name and value; this file feeds it one checked line at
 * a time and gives values their meaning.
 *
 * inih by itself cuts lines at its buffer's length, truncates names and knows only ; as a comment
 * inside a line, all silently. So the reader below refuses what inih would mangle, strips comments
 * itself (quotes respected) and keeps the line number for messages. */
#include "config/config_int.h"

#include <ctype.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>

struct ini_reading {
    struct config *c;
    const char *text, *end;
    const char *label; /* in the config's arena: origins keep it */
    int line;
    const char *section;       /* of the table, or group.NAME in the config's arena; NULL before the first */
    bool indented;             /* the current line starts with a space or tab */
    const struct option *open; /* the option whose value may still be continued */
    int open_line;
    char group_name[160]; /* "group.NAME.key", where open is a row of group_options */
    struct buf value;
    int seen_line[CONFIG_MAX_OPTIONS];
    struct seen_group {
        char name[160];
        int line;
    } seen_group[CONFIG_MAX_GROUPS * 4]; /* keys of groups that were set, up to the first line 0 */
    struct err *e;
    int status;     /* first failure */
    int error_line; /* and its line */
};

#define FAIL(r, ...) fail_at((r), (r)->line, err_set((r)->e, ST_USAGE, __VA_ARGS__))

static int fail_at(struct ini_reading *r, int line, int status)
{
    if (r->status == ST_OK) {
        r->status = status;
        r->error_line = line;
    }
    return status;
}

/* ---- lines ----------------------------------------------------------------------------------- */

static bool blank(char ch) { return ch == ' ' || ch == '\t'; }

/* First character of the value in a "key = value" or continued line, or of the whole line. */
static const char *value_start(const char *line, const char *end, bool continued)
{
    const char *p = line;
    if (!continued) {
        while (p < end && *p != '=' && *p != ':')
            p++;
        p = p < end ? p + 1 : line;
    }
    while (p < end && blank(*p))
        p++;
    return p;
}

/* End of the line without its comment. A # or ; starts one at the line's start or after a blank,
 * but not inside a quoted value. */
static const char *without_comment(const char *line, const char *end, const char *value)
{
    const char *p = line;
    if (value < end && *value == '"') {
        p = value + 1;
        while (p < end && *p != '"')
            p += *p == '\\' && p + 1 < end ? 2 : 1;
    }
    for (; p < end; p++)
        if ((*p == '#' || *p == ';') && (p == line || blank(p[-1])))
            return p;
    return end;
}

static bool line_is_clean(struct ini_reading *r, const char *line, const char *end)
{
    for (const char *p = line; p < end; p++) {
        unsigned char ch = (unsigned char)*p;
        if ((ch < 0x20 && ch != '\t') || ch == 0x7f) {
            FAIL(r, "%s:%d: byte 0x%02x at column %d does not belong in a config file", r->label, r->line, ch,
                 (int)min_i64(p - line + 1, 1 << 20));
            err_hint(r->e, "it should be plain text; write \"\\x%02x\" in quotes if it is meant", ch);
            return false;
        }
    }
    return true;
}

/* Copy a line for inih. A ; in quotes becomes an escape, as inih would end the value there. */
static bool copy_line(struct ini_reading *r, char *to, int size, const char *line, const char *end, const char *value)
{
    bool quoted = value < end && *value == '"';
    int n = 0, room = size - 3;
    for (const char *p = line; p < end; p++) {
        bool escape = quoted && p > value && *p == ';';
        if (n + (escape ? 4 : 1) > room) {
            FAIL(r, "%s:%d: the line is longer than %d bytes", r->label, r->line, room);
            err_hint(r->e, "continue a long value on the next line, indented");
            return false;
        }
        if (escape) {
            memcpy(to + n, "\\x3b", 4);
            n += 4;
        } else {
            to[n++] = *p;
        }
    }
    to[n] = '\0';
    return true;
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Store the value collected for the open option, if there is one. */
static bool close_value(struct ini_reading *r)
{
    const struct option *o = r->open;
    if (o == NULL)
        return true;
    r->open = NULL;
    struct config_origin origin = {CFG_FROM_FILE, r->label, r->open_line};
    int st = buf_check(&r->value, r->e);
    const char *text = r->value.text ? r->value.text : "";
    if (st == ST_OK)
        st = group_named(o->name) ? group_set(r->c, r->group_name, text, origin, r->e)
                                  : option_set(r->c, o, text, origin, r->e);
    if (st != ST_OK)
        fail_at(r, r->open_line, st);
    return st == ST_OK;
}

static int hex_digit(char ch)
{
    return ch >= '0' && ch <= '9'   ? ch - '0'
           : ch >= 'a' && ch <= 'f' ? ch - 'a' + 10
           : ch >= 'A' && ch <= 'F' ? ch - 'A' + 10
                                    : -1;
}

/* One escape at p (behind the backslash) into out; the characters used, or 0 when it is none. */
static int add_escape(const char *p, struct buf *out)
{
    static const char from[] = "ntr\"\\", to[] = "\n\t\r\"\\";
    const char *at = *p ? strchr(from, *p) : NULL;
    if (at != NULL) {
        buf_add_n(out, &to[at - from], 1);
        return 1;
    }
    if (*p != 'x' || hex_digit(p[1]) < 0 || hex_digit(p[2]) < 0)
        return 0;
    char byte = (char)(hex_digit(p[1]) * 16 + hex_digit(p[2]));
    buf_add_n(out, &byte, 1);
    return byte == '\0' ? 0 : 3;
}

/* "text" with its escapes, appended to the value. */
static bool add_quoted(struct ini_reading *r, const char *piece)
{
    const char *p = piece + 1;
    while (*p != '\0' && *p != '"') {
        if (*p != '\\') {
            buf_add_n(&r->value, p++, 1);
            continue;
        }
        int used = add_escape(p + 1, &r->value);
        if (used == 0) {
            FAIL(r, "%s:%d: unknown escape \\%.3s", r->label, r->line, p + 1);
            err_hint(r->e, "in quotes: \\n \\t \\r \\\" \\\\ and \\x01 to \\xff");
            return false;
        }
        p += 1 + used;
    }
    if (*p == '\0' || p[1] != '\0') {
        FAIL(r,
             *p == '\0' ? "%s:%d: the quoted value has no closing quote"
                        : "%s:%d: there is text behind the closing quote",
             r->label, r->line);
        return false;
    }
    return true;
}

static bool looks_like_pair(const char *piece)
{
    const char *p = piece;
    while (isalnum((unsigned char)*p) || *p == '_')
        p++;
    bool named = p > piece;
    while (blank(*p))
        p++;
    return named && *p == '=';
}

/* A piece of the open option's value: the text behind its =, or an indented line below it. */
static bool add_piece(struct ini_reading *r, const char *piece, bool first)
{
    const struct option *o = r->open;
    bool quoted = o->type == OPT_STRING && piece[0] == '"';
    if (!first && (o->type != OPT_STRING || (!quoted && looks_like_pair(piece)))) {
        FAIL(r, "%s:%d: the line is indented, so it would continue the value of %s", r->label, r->line, o->name);
        err_hint(r->e, "remove the indentation, or put a continued text in quotes");
        return false;
    }
    if (quoted) {
        if (!add_quoted(r, piece))
            return false;
    } else {
        if (!first && r->value.len > 0)
            buf_add(&r->value, " ");
        buf_add(&r->value, piece);
    }
    if (r->value.len > CONFIG_MAX_STRING || r->value.failed) {
        FAIL(r, "%s:%d: the value of %s is longer than %d bytes", r->label, r->line, o->name, CONFIG_MAX_STRING);
        return false;
    }
    return true;
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool unknown_section(struct ini_reading *r, const char *section)
{
    const char *names[16];
    int n = 0;
    for (; n < config_n_sections && n < countof(names); n++)
        names[n] = config_sections[n].name;
    FAIL(r, "%s:%d: no section is called [%.49s]", r->label, r->line, section);
    const char *near = nearest_name(section, names, n);
    if (near != NULL)
        err_hint(r->e, "did you mean [%s]?", near);
    else
        err_hint(r->e, "the sections are [model] [train] [data] [run] [plan] [mhc] [gpu] [parallel] [lora] [generate] "
                       "[group.NAME]");
    return false;
}

static bool unknown_key(struct ini_reading *r, const char *key)
{
    char name[160];
    FAIL(r, "%s:%d: [%s] has no option '%.64s'", r->label, r->line, r->section, key);
    snprintf(name, sizeof name, "%s.%.100s", r->section, key);
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        if (strcmp(option_key(o), key) == 0) {
            err_hint(r->e, "%s is an option of section [%.*s]", key, (int)option_section_len(o), o->name);
            return false;
        }
    }
    suggest_option(name, NULL, NULL, 0, r->e);
    return false;
}

/* The line in which this key of a group was set, 0: in none so far; NULL: there are too many. */
static int *seen_in_group(struct ini_reading *r, const char *name)
{
    for (int i = 0; i < countof(r->seen_group); i++) {
        struct seen_group *s = &r->seen_group[i];
        if (s->line == 0)
            snprintf(s->name, sizeof s->name, "%s", name);
        if (strcmp(s->name, name) == 0)
            return &s->line;
    }
    return NULL;
}

static bool begin_pair(struct ini_reading *r, const char *key)
{
    char name[160];
    if (r->section == NULL) {
        FAIL(r, "%s:%d: this line stands before any [section]", r->label, r->line);
        return false;
    }
    snprintf(name, sizeof name, "%s.%.100s", r->section, key);
    const struct option *o = option_find(name);
    if (group_named(name) && group_key(key, &o, r->e) != ST_OK) {
        fail_at(r, r->line, ST_USAGE);
        err_in(r->e, "%s:%d", r->label, r->line);
        return false;
    }
    if (o == NULL)
        return unknown_key(r, key);
    int *seen = group_named(name) ? seen_in_group(r, name) : &r->seen_line[option_index(o)];
    if (seen == NULL) {
        FAIL(r, "%s:%d: more than %d groups of parameters", r->label, r->line, CONFIG_MAX_GROUPS);
        return false;
    }
    if (*seen != 0) {
        FAIL(r, "%s:%d: %s was already set in line %d", r->label, r->line, name, *seen);
        err_hint(r->e, "keep one of the two lines");
        return false;
    }
    *seen = r->line;
    r->open = o;
    r->open_line = r->line;
    snprintf(r->group_name, sizeof r->group_name, "%s", name);
    buf_clear(&r->value);
    return true;
}

/* inih's handler: nonzero is success. inih's section is not used, as it may be truncated. */
static int take_pair(void *user, const char *section, const char *key, const char *value)
{
    struct ini_reading *r = user;
    (void)section;
    if (r->status != ST_OK)
        return 0;
    if (r->indented && r->open != NULL)
        return add_piece(r, value, false);
    return close_value(r) && begin_pair(r, key) && add_piece(r, value, true);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* A group is there from its first line on, whatever it holds. */
static bool begin_group(struct ini_reading *r, const char *name)
{
    int st = strchr(name + strlen(GROUP_SECTION "."), '.') == NULL
                 ? group_set(r->c, name, "", (struct config_origin){CFG_FROM_FILE, r->label, r->line}, r->e)
                 : err_set(r->e, ST_USAGE, "[%.63s] names no group of parameters: it is written [group.NAME]", name);
    r->section = st == ST_OK ? arena_strdup(&r->c->strings, name) : NULL;
    if (st == ST_OK && r->section == NULL)
        st = err_set(r->e, ST_NOMEM, "no memory to read %s", r->label);
    if (st != ST_OK) {
        fail_at(r, r->line, st);
        err_in(r->e, "%s:%d", r->label, r->line);
    }
    return st == ST_OK;
}

/* [name]. Done here because inih ignores text behind the bracket, and a section without keys. */
static bool begin_section(struct ini_reading *r, const char *first, const char *end)
{
    char name[64];
    if (end[-1] != ']') {
        FAIL(r, "%s:%d: a section is written [name] on a line of its own", r->label, r->line);
        return false;
    }
    first++;
    end--;
    while (first < end && blank(*first))
        first++;
    while (end > first && blank(end[-1]))
        end--;
    snprintf(name, sizeof name, "%.*s", (int)min_i64(end - first, 63), first);
    for (int i = 0; i < config_n_sections; i++) {
        if (strcmp(config_sections[i].name, name) == 0) {
            r->section = config_sections[i].name;
            return close_value(r);
        }
    }
    if (group_named(name))
        return close_value(r) && begin_group(r, name);
    return unknown_section(r, name);
}

/* inih's reader: the next line into to, or NULL at the end and after any failure. */
static char *next_line(char *to, int size, void *stream)
{
    struct ini_reading *r = stream;
    if (r->status != ST_OK || r->text >= r->end)
        return NULL;
    const char *line = r->text;
    const char *end = memchr(line, '\n', (size_t)(r->end - line));
    r->text = end ? end + 1 : r->end;
    end = end ? end : r->end;
    r->line++;
    if (r->line == 1 && end - line >= 3 && memcmp(line, "\xef\xbb\xbf", 3) == 0)
        line += 3; /* a byte order mark */
    if (end > line && end[-1] == '\r')
        end--;
    if (!line_is_clean(r, line, end))
        return NULL;
    r->indented = line < end && blank(*line);
    bool continued = r->indented && r->open != NULL;
    const char *value = value_start(line, end, continued);
    end = without_comment(line, end, value);
    while (end > line && blank(end[-1]))
        end--;
    const char *first = line;
    while (first < end && blank(*first))
        first++;
    if (first < end && *first == '[' && !continued && !begin_section(r, first, end))
        return NULL;
    return copy_line(r, to, size, line, end, value) ? to : NULL;
}

static int syntax_error(struct ini_reading *r, int line)
{
    err_set(r->e, ST_USAGE, "%s:%d: expected key = value or [section]", r->label, line);
    return err_hint(r->e, "comments start with #");
}

int config_read_ini_text(struct config *c, const char *text, size_t len, const char *label, struct err *e)
{
    struct err local = {0};
    struct ini_reading r = {.c = c, .text = text, .e = e ? e : &local};
    if (len == 0)
        return ST_OK;
    if (len > CONFIG_MAX_FILE)
        return err_set(e, ST_USAGE, "%s: %zu bytes are too many for a config file (limit %d)", label, len,
                       CONFIG_MAX_FILE);
    r.label = arena_strdup(&c->strings, label);
    if (r.label == NULL)
        return err_set(e, ST_NOMEM, "no memory to read %s", label);
    r.end = text + len;
    buf_init(&r.value, 2 * CONFIG_MAX_STRING);
    int line = ini_parse_stream(next_line, &r, take_pair, &r);
    if (line > 0 && (r.status == ST_OK || line < r.error_line))
        r.status = syntax_error(&r, line); /* inih could not split this line; it went on */
    else if (line < 0 && r.status == ST_OK)
        r.status = err_set(r.e, ST_NOMEM, "no memory to read %s", label);
    if (r.status == ST_OK)
        close_value(&r);
    buf_release(&r.value);
    return r.status;
}

int config_read_ini(struct config *c, const char *path, struct err *e)
{
    char *text;
    size_t len;
    TRY(file_read(path, CONFIG_MAX_FILE, &text, &len, e));
    int st = config_read_ini_text(c, text, len, path, e);
    free(text);
    return st;
}
