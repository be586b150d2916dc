/* Texts made from the option table: resolved config, terminal help, docs/options.md. */
#include "config/config_int.h"

#include <ctype.h>
#include <string.h>

enum { PLAIN_MAX = 120, PIECE_MAX = 100, WRAP = 100 };

static bool in_section(const struct option *o, const struct section *s)
{
    size_t n = option_section_len(o);
    return strlen(s->name) == n && strncmp(o->name, s->name, n) == 0;
}

/* ---- resolved config ------------------------------------------------------------------------- */

/* Whether a string survives an INI file without quotes. */
static bool is_plain(const char *s)
{
    size_t n = strlen(s);
    if (n > PLAIN_MAX || s[0] == '"' || s[0] == ' ' || (n > 0 && s[n - 1] == ' '))
        return false;
    for (; *s != '\0'; s++)
        if (iscntrl((unsigned char)*s) || *s == '#' || *s == ';')
            return false;
    return true;
}

static void add_escaped(struct buf *out, char ch)
{
    static const char from[] = "\n\t\r\"\\", to[] = "ntr\"\\";
    const char *at = strchr(from, ch);
    if (at != NULL)
        buf_addf(out, "\\%c", to[at - from]);
    else if (iscntrl((unsigned char)ch) || ch == ';')
        buf_addf(out, "\\x%02x", (unsigned char)ch);
    else
        buf_add_n(out, &ch, 1);
}

/* Quoted, broken into indented pieces that join without a space. */
static void add_quoted(struct buf *out, const char *s)
{
    buf_add(out, "\"");
    size_t start = out->len;
    for (; *s != '\0'; s++) {
        /* not inside a UTF-8 character, unless the bytes are none */
        bool inside = ((unsigned char)*s & 0xc0) == 0x80 && out->len - start < PIECE_MAX + 4;
        if (out->len - start >= PIECE_MAX && !inside) {
            buf_add(out, "\"\n    \"");
            start = out->len;
        }
        add_escaped(out, *s);
    }
    buf_add(out, "\"");
}

static bool written_as_automatic(const struct config *c, const struct option *o)
{
    return (o->flags & OPT_RUN) && o->automatic != NULL &&
           c->origin[option_index(o)].source == CFG_FROM_AUTO;
}

static void add_source(const struct config *c, const struct option *o, struct buf *out)
{
    char from[300];
    config_source_text(c, o->name, from, sizeof from);
    for (char *p = from; *p != '\0'; p++)
        if (iscntrl((unsigned char)*p))
            *p = '?'; /* a file name may hold anything; a comment may not */
    enum config_source source = c->origin[option_index(o)].source;
    bool given = source != CFG_FROM_DEFAULT && source != CFG_FROM_AUTO;
    buf_addf(out, "  # %s%s", given ? "from " : "", from);
    if (written_as_automatic(c, o)) {
        buf_add(out, ": ");
        option_text(c, o, out);
    }
}

static void write_option(const struct config *c, const struct option *o, struct buf *out,
                         bool with_sources)
{
    struct buf text;
    buf_init(&text, 0);
    option_text(c, o, &text);
    buf_addf(out, "%s =%s", option_key(o), text.len > 0 ? " " : "");
    if (text.failed)
        out->failed = true;
    else if (written_as_automatic(c, o))
        buf_add(out, "0");
    else if (o->type == OPT_STRING && !is_plain(text.text))
        add_quoted(out, text.text);
    else
        buf_add(out, text.text);
    buf_release(&text);
    if (with_sources)
        add_source(c, o, out);
    buf_add(out, "\n");
}

void config_write(const struct config *c, struct buf *out, bool with_sources)
{
    for (int s = 0; s < config_n_sections; s++) {
        buf_addf(out, "%s[%s]\n", s ? "\n" : "", config_sections[s].name);
        for (int i = 0; i < config_n_options; i++)
            if (in_section(&config_options[i], &config_sections[s]))
                write_option(c, &config_options[i], out, with_sources);
    }
}

/* ---- help ------------------------------------------------------------------------------------ */

/* Words of text, at most WRAP columns wide; the first line indented by `indent`, later ones by `hang`. */
static void add_wrapped(struct buf *out, const char *text, int indent, int hang)
{
    int column = 0;
    while (*text != '\0') {
        int n = (int)strcspn(text, " ");
        if (column > 0 && column + 1 + n > WRAP) {
            buf_add(out, "\n");
            column = 0;
            indent = hang;
        }
        if (column == 0)
            buf_addf(out, "%*s", indent, "");
        else
            buf_add(out, " ");
        column += (column == 0 ? indent : 1) + n;
        buf_add_n(out, text, (size_t)n);
        text += n;
        text += strspn(text, " ");
    }
    buf_add(out, "\n");
}

static void add_default(const struct option *o, struct buf *out)
{
    if (o->automatic != NULL)
        buf_addf(out, "0 = %s", o->automatic);
    else if (o->type == OPT_STRING && o->def[0] == '\0')
        buf_add(out, "empty");
    else
        buf_add(out, o->def);
}

static void add_aliases(const struct option *o, const char *mark, struct buf *out)
{
    for (int i = 0; i < CONFIG_MAX_ALIASES && o->alias[i].name != NULL; i++) {
        buf_addf(out, "%s%s--%s%s", i ? ", " : "", mark, o->alias[i].name, mark);
        if (o->alias[i].value != NULL)
            buf_addf(out, " (= %s)", o->alias[i].value);
    }
}

static void help_option(const struct option *o, struct buf *out)
{
    struct buf facts;
    buf_init(&facts, 0);
    buf_addf(&facts, "--%s=", o->name);
    if (o->type == OPT_ENUM)
        for (int i = 0; o->values[i] != NULL; i++)
            buf_addf(&facts, "%s%s", i ? "|" : "", o->values[i]);
    else
        buf_add(&facts, option_type_name(o));
    buf_add(&facts, " [");
    add_default(o, &facts);
    buf_add(&facts, "]");
    if (o->type == OPT_INT || o->type == OPT_REAL) {
        buf_add(&facts, " ");
        option_range_text(o, &facts);
    }
    if (o->alias[0].name != NULL) {
        buf_add(&facts, "; also ");
        add_aliases(o, "", &facts);
    }
    if (facts.text != NULL)
        add_wrapped(out, facts.text, 2, 6);
    add_wrapped(out, o->help, 6, 6);
    buf_release(&facts);
}

void config_help(struct buf *out, const char *section)
{
    if (section == NULL)
        add_wrapped(out,
                    "Options come from an INI file ([section], key = value) and from the command "
                    "line (--section.key=value), which wins. Integers take k, m, g and ki, mi, gi.",
                    0, 0);
    for (int s = 0; s < config_n_sections; s++) {
        if (section != NULL && strcmp(section, config_sections[s].name) != 0)
            continue;
        buf_addf(out, "%s[%s]  ", section ? "" : "\n", config_sections[s].name);
        buf_addf(out, "%s\n", config_sections[s].help);
        for (int i = 0; i < config_n_options; i++)
            if (in_section(&config_options[i], &config_sections[s]))
                help_option(&config_options[i], out);
    }
}

/* ---- docs/options.md ------------------------------------------------------------------------- */

/* Table cells: | ends a cell, * and < and _ are markup. */
static void add_markdown(struct buf *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (strchr("|*_<[]\\`", *text) != NULL)
            buf_add(out, "\\");
        buf_add_n(out, text, 1);
    }
}

static const char *when_fixed(const struct option *o)
{
    return o->flags & OPT_MODEL     ? "by the checkpoint"
           : o->flags & OPT_INHERIT ? "no; the checkpoint's unless set"
           : o->flags & OPT_LOCAL   ? "no; each run its own"
                                    : "no";
}

static void docs_option(const struct option *o, struct buf *out)
{
    struct buf text;
    buf_init(&text, 0);
    buf_addf(out, "| `%s` | %s | ", option_key(o),
             o->type == OPT_BOOL ? "on, off" : option_type_name(o));
    add_default(o, &text);
    add_markdown(out, text.text ? text.text : "");
    buf_add(out, " | ");
    buf_clear(&text);
    option_range_text(o, &text);
    add_markdown(out, text.text ? text.text : "");
    buf_add(out, " | ");
    add_aliases(o, "`", out);
    buf_addf(out, " | %s | ", when_fixed(o));
    add_markdown(out, o->help);
    buf_add(out, " |\n");
    out->failed |= text.failed;
    buf_release(&text);
}

void config_write_docs(struct buf *out)
{
    buf_add(out,
            "# Options\n\n"
            "Made from the option table in `src/config/options.c`; do not edit.\n\n"
            "An option is set in an INI file (`[section]`, `key = value`) or on the command line\n"
            "(`--section.key=value`), which wins. Integers take the suffixes k, m, g (powers of\n"
            "1000) and ki, mi, gi (powers of 1024). Megatron's names are accepted on the command\n"
            "line where one is listed; those with (= value) take no argument.\n");
    for (int s = 0; s < config_n_sections; s++) {
        buf_addf(out, "\n## [%s]\n\n%s\n\n", config_sections[s].name, config_sections[s].help);
        buf_add(out, "| option | type | default | range | Megatron | fixed | meaning |\n"
                     "|---|---|---|---|---|---|---|\n");
        for (int i = 0; i < config_n_options; i++)
            if (in_section(&config_options[i], &config_sections[s]))
                docs_option(&config_options[i], out);
    }
    buf_add(out, "\n## Rules\n\nChecked after automatic values (0 = ...) are filled in.\n\n");
    for (int i = 0; i < config_n_rules; i++) {
        buf_addf(out, "- `%s`: ", config_rules[i].name);
        add_markdown(out, config_rules[i].message);
        buf_add(out, "\n");
    }
}
