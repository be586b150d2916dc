/* The command line: --section.key=value, Megatron's names, a command's own words, positionals. */
#include "config/config_int.h"

#include <string.h>

enum { CONFIG_MAX_LATER = 64 };

/* One option-like word, taken apart. */
struct word {
    char name[96];     /* without dashes and =value */
    const char *value; /* behind =, or NULL */
};

struct parsing {
    struct config *c;
    int argc;
    char *const *argv;
    struct config_args *args;
    bool apply; /* first pass checks and collects, second pass sets */
    bool seen[CONFIG_MAX_OPTIONS];
    struct flag_use later[CONFIG_MAX_LATER]; /* flags whose meaning depends on other options */
    int n_later;
    struct err *e;
};

/* ---- names ----------------------------------------------------------------------------------- */

static const struct option_alias *find_alias(const struct option *o, const char *name)
{
    for (int i = 0; i < CONFIG_MAX_ALIASES && o->alias[i].name != NULL; i++)
        if (strcmp(o->alias[i].name, name) == 0)
            return &o->alias[i];
    return NULL;
}

static int unknown_option(const struct parsing *p, const char *name)
{
    const char *extra[32];
    int n = 0;
    for (; n < p->args->n_extra && n < countof(extra); n++)
        extra[n] = p->args->extra[n].name;
    err_set(p->e, ST_USAGE, "unknown option --%.64s", name);
    return suggest_option(name, "--", extra, n, p->e);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* The next word as a value, or NULL: a word with two dashes is an option, never a value. */
static const char *take_value(struct parsing *p, int *at)
{
    if (*at + 1 >= p->argc || str_starts(p->argv[*at + 1], "--"))
        return NULL;
    return p->argv[++*at];
}

static int need_value(const struct parsing *p, const char *name)
{
    err_set(p->e, ST_USAGE, "--%.64s needs a value", name);
    return err_hint(p->e, "write --%.64s=VALUE", name);
}

/* All words up to the next option or INI file, joined by spaces. */
static int take_words(struct parsing *p, int *at, struct buf *out)
{
    while (*at + 1 < p->argc && !str_starts(p->argv[*at + 1], "--") && !str_ends(p->argv[*at + 1], ".ini"))
        buf_addf(out, "%s%s", out->len ? " " : "", p->argv[++*at]);
    return buf_check(out, p->e);
}

static int set_once(struct parsing *p, const struct option *o, const char *written, const char *value)
{
    bool *seen = &p->seen[option_index(o)];
    if (!p->apply) {
        if (*seen) {
            err_set(p->e, ST_USAGE, "%s is given twice on the command line", o->name);
            return err_hint(p->e, "the second time as --%.64s; keep one of the two", written);
        }
        *seen = true;
        return ST_OK;
    }
    return option_set(p->c, o, value, (struct config_origin){.source = CFG_FROM_COMMAND}, p->e);
}

/* --section.key */
static int take_option(struct parsing *p, const struct option *o, const struct word *w, int *at)
{
    const char *value = w->value;
    if (value == NULL && (o->type == OPT_BOOL || option_has_choice(o, "on"))) {
        bool ignored;
        const char *next = *at + 1 < p->argc ? p->argv[*at + 1] : "";
        bool follows = parse_bool(next, &ignored) || option_has_choice(o, next);
        value = follows ? p->argv[++*at] : "on";
    } else if (value == NULL) {
        value = take_value(p, at);
        if (value == NULL)
            return need_value(p, w->name);
    }
    return set_once(p, o, w->name, value);
}

/* --megatron-name; one name may stand for several options (--seed). */
static int take_alias(struct parsing *p, const struct word *w, int *at, bool *found)
{
    int st = ST_OK;
    const char *value = w->value;
    struct buf words;
    buf_init(&words, CONFIG_MAX_STRING);
    *found = false;
    for (int i = 0; i < config_n_options && st == ST_OK; i++) {
        const struct option *o = &config_options[i];
        const struct option_alias *a = find_alias(o, w->name);
        if (a == NULL)
            continue;
        *found = true;
        if (a->value != NULL && w->value != NULL) {
            st = err_set(p->e, ST_USAGE, "--%s takes no value; it means --%s=%s", a->name, o->name, a->value);
            break;
        }
        if (a->value == NULL && value == NULL) {
            if (o->flags & OPT_WORDS) {
                TRY_OUT(take_words(p, at, &words));
                value = words.len > 0 ? words.text : NULL;
            } else {
                value = take_value(p, at);
            }
            if (value == NULL) {
                st = need_value(p, w->name);
                break;
            }
        }
        st = set_once(p, o, w->name, a->value ? a->value : value);
    }
out:
    buf_release(&words);
    return st;
}

/* --group.NAME.key */
static int take_group(struct parsing *p, const struct word *w, int *at)
{
    int start = *at;
    size_t n = strlen(w->name);
    const char *value = w->value ? w->value : take_value(p, at);
    if (value == NULL)
        return need_value(p, w->name);
    for (int i = 0; i < start && !p->apply; i++)
        if (str_starts(p->argv[i], "--") && strncmp(p->argv[i] + 2, w->name, n) == 0 &&
            (p->argv[i][2 + n] == '\0' || p->argv[i][2 + n] == '='))
            return err_set(p->e, ST_USAGE, "--%s is given twice on the command line", w->name);
    if (strchr(w->name + strlen(GROUP_SECTION "."), '.') == NULL) {
        err_set(p->e, ST_USAGE, "--%s says nothing about the group", w->name);
        return err_hint(p->e, "write --%s.match=GLOBS, and lr, weight_decay or freeze beside it", w->name);
    }
    return p->apply ? group_set(p->c, w->name, value, (struct config_origin){.source = CFG_FROM_COMMAND}, p->e) : ST_OK;
}

static int take_extra(struct parsing *p, const struct word *w, int *at, bool *found)
{
    *found = false;
    for (int i = 0; i < p->args->n_extra; i++) {
        struct config_extra *x = &p->args->extra[i];
        if (strcmp(x->name, w->name) != 0)
            continue;
        *found = true;
        const char *value = w->value ? w->value : x->alone ? x->alone : take_value(p, at);
        if (value == NULL)
            return need_value(p, w->name);
        if (!p->apply && x->value != NULL)
            return err_set(p->e, ST_USAGE, "--%s is given twice", x->name);
        x->value = value;
        return ST_OK;
    }
    return ST_OK;
}

/* What a flag with this value does. */
static int apply_flag(struct parsing *p, const struct flag *f, const struct word *w, const char *value)
{
    struct config_args *a = p->args;
    switch (f->how) {
    case FLAG_TAKEN: return ST_OK;
    case FLAG_NOTED:
        if (p->apply && a->n_notes < countof(a->notes))
            a->notes[a->n_notes++] = (struct config_note){f->name, f->text};
        return ST_OK;
    case FLAG_REFUSED: return flag_refuse(f, w->name, value, p->e);
    case FLAG_SETS: return set_once(p, option_find(f->option), w->name, f->to);
    default: break;
    }
    if (!p->apply)
        return f->option != NULL && f->how != FLAG_MOVES ? set_once(p, option_find(f->option), w->name, "") : ST_OK;
    if (p->n_later == countof(p->later))
        return err_set(p->e, ST_USAGE, "too many flags of Megatron's on the command line, from --%.64s on", w->name);
    p->later[p->n_later++] = (struct flag_use){f, value ? value : ""};
    return ST_OK;
}

/* A flag of Megatron's that is no option's other name. */
static int take_flag(struct parsing *p, const struct word *w, int *at, bool *found)
{
    const struct flag *first = flag_find(w->name), *row;
    const char *value = w->value;
    struct buf words;
    int st = ST_OK;
    *found = first != NULL;
    if (first == NULL)
        return ST_OK;
    if (first->value == NULL && value != NULL)
        return err_set(p->e, ST_USAGE, "--%s takes no value", w->name);
    if (first->value == NULL)
        return apply_flag(p, first, w, NULL);
    buf_init(&words, CONFIG_MAX_STRING);
    if (value == NULL && flag_takes_words(first)) {
        TRY_OUT(take_words(p, at, &words));
        row = flag_row(first, words.len > 0 ? words.text : NULL);
        if (row != NULL && row->value[0] != '*') /* outlives the words */
            st = apply_flag(p, row, w, row->value);
        else if (row != NULL)
            st = apply_flag(p, row, w, words.text);
        goto out;
    }
    value = value != NULL ? value : take_value(p, at);
    if (value == NULL) {
        st = need_value(p, w->name);
        goto out;
    }
    row = flag_row(first, value);
    if (row != NULL)
        st = apply_flag(p, row, w, value);
    else
        st = err_set(p->e, ST_USAGE, "--%s %.64s is not in braid; docs/MEGATRON.md lists the values it has", w->name,
                     value);
out:
    buf_release(&words);
    return st;
}

/* ---- words ----------------------------------------------------------------------------------- */

static int take_positional(struct parsing *p, const char *word)
{
    struct config_args *a = p->args;
    if (p->apply)
        return ST_OK;
    if (a->ini == NULL && str_ends(word, ".ini")) {
        a->ini = word;
        return ST_OK;
    }
    if (a->n_positional == countof(a->positional))
        return err_set(p->e, ST_USAGE, "too many words on the command line, from '%.64s' on", word);
    a->positional[a->n_positional++] = word;
    return ST_OK;
}

static int take_word(struct parsing *p, int *at)
{
    const char *arg = p->argv[*at] + 2;
    struct word w = {.value = strchr(arg, '=')};
    size_t n = w.value ? (size_t)(w.value - arg) : strlen(arg);
    if (n >= sizeof w.name)
        return unknown_option(p, arg);
    memcpy(w.name, arg, n);
    if (w.value != NULL)
        w.value++;
    if (strcmp(w.name, "help") == 0) {
        p->args->help = true;
        p->args->help_section = w.value;
        return ST_OK;
    }
    bool found;
    TRY(take_extra(p, &w, at, &found));
    if (found)
        return ST_OK;
    const struct option *o = option_find(w.name);
    if (o != NULL)
        return take_option(p, o, &w, at);
    if (group_named(w.name))
        return take_group(p, &w, at);
    TRY(take_alias(p, &w, at, &found));
    if (found)
        return ST_OK;
    TRY(take_flag(p, &w, at, &found));
    return found ? ST_OK : unknown_option(p, w.name);
}

static int walk(struct parsing *p)
{
    bool options = true;
    for (int at = 0; at < p->argc; at++) {
        const char *arg = p->argv[at];
        if (options && strcmp(arg, "--") == 0)
            options = false;
        else if (options && str_starts(arg, "--"))
            TRY(take_word(p, &at));
        else if (options && strcmp(arg, "-h") == 0)
            p->args->help = true;
        else if (options && arg[0] == '-' && arg[1] != '\0') {
            err_set(p->e, ST_USAGE, "unknown option %.64s", arg);
            return err_hint(p->e, "options start with two dashes: -%.64s, or --section.key=value", arg);
        } else
            TRY(take_positional(p, arg));
    }
    return ST_OK;
}

int config_parse_args(struct config *c, int argc, char *const *argv, struct config_args *args, struct err *e)
{
    struct err local = {0};
    struct parsing p = {.c = c, .argc = argc, .argv = argv, .args = args, .e = e ? e : &local};
    args->ini = args->help_section = NULL;
    args->n_positional = 0;
    args->n_notes = 0;
    args->help = false;
    for (int i = 0; i < args->n_extra; i++)
        args->extra[i].value = NULL;
    TRY(walk(&p));
    if (args->help)
        return ST_OK;
    if (args->ini != NULL)
        TRY(config_read_ini(c, args->ini, p.e));
    p.apply = true;
    TRY(walk(&p));
    return flags_resolve(c, p.later, p.n_later, p.e);
}
