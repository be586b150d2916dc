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

void write_string(struct buf *out, const char *text)
{
    if (is_plain(text))
        buf_add(out, text);
    else
        add_quoted(out, text);
}

static bool written_as_automatic(const struct config *c, const struct option *o)
{
    return (o->flags & OPT_RUN) && o->automatic != NULL && c->origin[option_index(o)].source == CFG_FROM_AUTO;
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

static void write_option(const struct config *c, const struct option *o, struct buf *out, bool with_sources)
{
    struct buf text;
    buf_init(&text, 0);
    option_text(c, o, &text);
    buf_addf(out, "%s =%s", option_key(o), text.len > 0 ? " " : "");
    if (text.failed)
        out->failed = true;
    else if (written_as_automatic(c, o))
        buf_add(out, "0");
    else if (o->type == OPT_STRING)
        write_string(out, text.text ? text.text : "");
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
    groups_write(c, out);
}

/* ---- help ------------------------------------------------------------------------------------ */

/* Words of text, at most WRAP columns wide; the first line indented by `indent`, later ones by `hang`. used: columns
 * that the caller wrote on the first line already. */
static void add_wrapped(struct buf *out, const char *text, int indent, int hang, int used)
{
    int column = used;
    bool first = true;
    while (*text != '\0') {
        int n = (int)strcspn(text, " ");
        if (column > 0 && column + 1 + n > WRAP) {
            buf_add(out, "\n");
            column = 0;
            indent = hang;
        }
        if (column == 0)
            buf_addf(out, "%*s", indent, "");
        else if (!first)
            buf_add(out, " ");
        column += (column == 0 ? indent : first ? 0 : 1) + n;
        first = false;
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
        add_wrapped(out, facts.text, 2, 6, 0);
    add_wrapped(out, o->help, 6, 6, 0);
    buf_release(&facts);
}

static const char group_help[] =
    "Parameters that are trained in their own way, one section for each group; on the command line "
    "--group.NAME.key=value. "
    "Where globs of several groups match a parameter, the last of these groups has it.";

void config_help(struct buf *out, const char *section)
{
    if (section == NULL)
        add_wrapped(out,
                    "Options come from an INI file ([section], key = value) and from the command "
                    "line (--section.key=value), which wins. Integers take k, m, g and ki, mi, gi.",
                    0, 0, 0);
    for (int s = 0; s < config_n_sections; s++) {
        if (section != NULL && strcmp(section, config_sections[s].name) != 0)
            continue;
        buf_addf(out, "%s[%s]  ", section ? "" : "\n", config_sections[s].name);
        buf_addf(out, "%s\n", config_sections[s].help);
        for (int i = 0; i < config_n_options; i++)
            if (in_section(&config_options[i], &config_sections[s]))
                help_option(&config_options[i], out);
    }
    if (section != NULL && strcmp(section, GROUP_SECTION) != 0)
        return;
    buf_addf(out, "%s[group.NAME]\n", section ? "" : "\n");
    add_wrapped(out, group_help, 2, 2, 0);
    for (int i = 0; i < config_n_group_options; i++)
        help_option(&group_options[i], out);
}

/* One line for each option whose name matches one of the globs, in the order of the table: name, default, first
 * sentence. */
static void help_line(const struct option *o, struct buf *out)
{
    enum { NAME_WIDTH = 30 };
    struct buf head, text;
    buf_init(&head, 0);
    buf_init(&text, 0);
    const char *stop = strstr(o->help, ". ");
    while (stop != NULL && stop > o->help && stop[-1] == '.') /* "..." ends no sentence */
        stop = strstr(stop + 1, ". ");
    size_t n = stop != NULL ? (size_t)(stop - o->help) + 1 : strlen(o->help);
    buf_addf(&head, "  --%s=", o->name);
    add_default(o, &head);
    if (o->automatic != NULL || (o->type == OPT_STRING && o->def[0] == '\0')) {
        buf_clear(&head);
        buf_addf(&head, "  --%s", o->name);
    }
    buf_addf(&text, "%-*s ", NAME_WIDTH, head.text ? head.text : "");
    buf_add(out, text.text ? text.text : "");
    buf_clear(&text);
    buf_add_n(&text, o->help, n);
    if (o->type == OPT_ENUM) {
        buf_add(&text, " Choices: ");
        option_range_text(o, &text);
    }
    if (text.text != NULL)
        add_wrapped(out, text.text, 0, NAME_WIDTH + 1, head.len > NAME_WIDTH ? (int)head.len + 1 : NAME_WIDTH + 1);
    buf_release(&text);
    buf_release(&head);
}

void config_help_list(struct buf *out, const char *globs)
{
    for (int i = 0; i < config_n_options; i++) {
        char glob[80];
        size_t n;
        for (const char *p = globs; *p != '\0'; p += n) {
            p += strspn(p, " ");
            n = strcspn(p, " ");
            snprintf(glob, sizeof glob, "%.*s", (int)n, p);
            if (n > 0 && str_glob(glob, config_options[i].name)) {
                help_line(&config_options[i], out);
                break;
            }
        }
    }
}

static bool has_alias(const struct option *o, const char *word)
{
    for (int i = 0; i < CONFIG_MAX_ALIASES && o->alias[i].name != NULL; i++)
        if (strcmp(o->alias[i].name, word) == 0)
            return true;
    return false;
}

static void help_rules(const struct option *o, struct buf *out)
{
    const struct rule *r;
    for (int i = 0; (r = config_rule(i)) != NULL; i++)
        for (int k = 0; k < countof(r->options) && r->options[k] != NULL; k++)
            if (strcmp(r->options[k], o->name) == 0) {
                struct buf text;
                buf_init(&text, 0);
                buf_addf(&text, "rule: %s", r->message);
                if (text.text != NULL)
                    add_wrapped(out, text.text, 6, 6, 0);
                buf_release(&text);
            }
}

/* How well a word names an option: by its name or key or Megatron's name, by another program's name, or as a part. */
enum match { MATCH_NAME, MATCH_SYNONYM, MATCH_PART, MATCH_KINDS };

static bool matches(const struct option *o, const char *word, enum match kind)
{
    const char *name, *option[2];
    if (kind == MATCH_NAME)
        return strcmp(o->name, word) == 0 || strcmp(option_key(o), word) == 0 || has_alias(o, word);
    if (kind == MATCH_PART)
        return strlen(word) > 2 && (strstr(o->name, word) != NULL || strcasestr(o->help, word) != NULL);
    for (int i = 0; config_synonym(i, &name, option) == 0; i++)
        if (strcmp(name, word) == 0 &&
            (strcmp(option[0], o->name) == 0 || (option[1] != NULL && strcmp(option[1], o->name) == 0)))
            return true;
    return false;
}

int config_help_word(struct buf *out, const char *word, struct err *e)
{
    word += str_starts(word, "--") ? 2 : 0;
    for (int kind = 0; kind < MATCH_KINDS; kind++) {
        int found = 0;
        for (int i = 0; i < config_n_options; i++)
            if (matches(&config_options[i], word, (enum match)kind)) {
                help_option(&config_options[i], out);
                help_rules(&config_options[i], out);
                found++;
            }
        if (found > 0)
            return buf_check(out, e);
    }
    err_set(e, ST_USAGE, "there is no help on '%.64s'", word);
    return suggest_option(word, "--", NULL, 0, e);
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
    buf_addf(out, "| `%s` | %s | ", option_key(o), o->type == OPT_BOOL ? "on, off" : option_type_name(o));
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
    buf_add(out, "# Options\n\n"
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
    buf_addf(out, "\n## [group.NAME]\n\n%s\n\n", group_help);
    buf_add(out, "| option | type | default | range | Megatron | fixed | meaning |\n"
                 "|---|---|---|---|---|---|---|\n");
    for (int i = 0; i < config_n_group_options; i++)
        docs_option(&group_options[i], out);
    buf_add(out, "\n## Rules\n\nChecked after automatic values (0 = ...) are filled in.\n\n");
    const struct rule *r;
    for (int i = 0; (r = config_rule(i)) != NULL; i++) {
        buf_addf(out, "- `%s`: ", r->name);
        add_markdown(out, r->message);
        buf_add(out, "\n");
    }
}
