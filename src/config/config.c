/* Values of options: defaults, parsing with bounds, exact text, origins, saved configs. */
#include "config/config_int.h"

#include <math.h>
#include <string.h>
#include <strings.h>

static void *field(const struct config *c, const struct option *o) { return (char *)(uintptr_t)c + o->offset; }

int config_init(struct config *c, struct err *e)
{
    memset(c, 0, sizeof *c);
    arena_init(&c->strings);
    c->origin = arena_alloc(&c->strings, (size_t)config_n_options * sizeof *c->origin);
    if (c->origin == NULL)
        return err_set(e, ST_NOMEM, "no memory for %d option origins", config_n_options);
    for (int i = 0; i < config_n_options; i++) {
        struct config_origin none = {.source = CFG_FROM_DEFAULT};
        int st = option_set(c, &config_options[i], config_options[i].def, none, e);
        if (st != ST_OK) {
            config_release(c);
            return st;
        }
    }
    return ST_OK;
}

void config_release(struct config *c)
{
    arena_release(&c->strings);
    memset(c, 0, sizeof *c);
}

/* ---- one value ------------------------------------------------------------------------------- */

const char *option_type_name(const struct option *o)
{
    static const char *const names[] = {"on|off", "integer", "number", "text", "choice"};
    return names[o->type];
}

void real_text(double v, struct buf *out)
{
    char text[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        double back;
        if (parse_f64(text, &back) && back == v)
            break;
    }
    buf_add(out, text);
}

void option_range_text(const struct option *o, struct buf *out)
{
    if (o->type == OPT_ENUM) {
        for (int i = 0; o->values[i] != NULL; i++)
            buf_addf(out, "%s%s", i ? " | " : "", o->values[i]);
    } else if (o->type == OPT_INT || o->type == OPT_REAL) {
        if (o->flags & OPT_ABOVE)
            buf_add(out, "above ");
        if (o->type == OPT_INT)
            buf_addf(out, "%.0f", o->min);
        else
            real_text(o->min, out);
        buf_add(out, o->flags & OPT_BELOW ? " to below " : " to ");
        if (o->type == OPT_INT)
            buf_addf(out, "%.0f", o->max);
        else
            real_text(o->max, out);
    }
}

/* "demo.ini:3: " in front of a message, or nothing. */
static const char *origin_prefix(struct config_origin o, char *out, size_t size)
{
    char where[300];
    origin_text(o, where, sizeof where);
    snprintf(out, size, "%s%s", where, where[0] ? ": " : "");
    return out;
}

static int bad_value(const struct option *o, const char *text, struct config_origin origin, const char *problem,
                     struct err *e)
{
    char prefix[320];
    struct buf range;
    buf_init(&range, 400);
    option_range_text(o, &range);
    err_set(e, ST_USAGE, "%s%s = %.100s %s", origin_prefix(origin, prefix, sizeof prefix), o->name,
            text[0] ? text : "(empty)", problem);
    if (o->type == OPT_BOOL)
        err_hint(e, "on or off");
    else if (range.text != NULL)
        err_hint(e, "%s: %s%s%s%s", option_type_name(o), range.text, o->automatic ? " (0 = " : "",
                 o->automatic ? o->automatic : "", o->automatic ? ")" : "");
    buf_release(&range);
    return ST_USAGE;
}

static bool within(const struct option *o, double v)
{
    return !(v < o->min || v > o->max || ((o->flags & OPT_ABOVE) && v == o->min) ||
             ((o->flags & OPT_BELOW) && v == o->max));
}

/* Case does not matter and - counts as _, so that Megatron's spellings are taken. */
static int enum_index(const struct option *o, const char *text)
{
    for (int i = 0; o->values[i] != NULL; i++) {
        const char *a = text, *b = o->values[i];
        while (*a != '\0' && strncasecmp(*a == '-' ? "_" : a, b, 1) == 0)
            a++, b++;
        if (*a == '\0' && *b == '\0')
            return i;
    }
    return -1;
}

bool option_has_choice(const struct option *o, const char *text)
{
    return o->type == OPT_ENUM && enum_index(o, text) >= 0;
}

static int set_string(struct config *c, const char **to, const struct option *o, const char *text,
                      struct config_origin origin, struct err *e)
{
    char prefix[320];
    size_t n = strlen(text);
    if (n > CONFIG_MAX_STRING)
        return err_set(e, ST_USAGE, "%s%s is %zu bytes long, the limit is %d",
                       origin_prefix(origin, prefix, sizeof prefix), o->name, n, CONFIG_MAX_STRING);
    char *copy = arena_strdup(&c->strings, text);
    if (copy == NULL)
        return err_set(e, ST_NOMEM, "no memory for the value of %s", o->name);
    *to = copy;
    return ST_OK;
}

int option_store(struct config *c, void *base, const struct option *o, const char *text, struct config_origin origin,
                 struct err *e)
{
    void *to = (char *)base + o->offset;
    int64_t i;
    double d;
    bool on;
    switch (o->type) {
    case OPT_BOOL:
        if (!parse_bool(text, (bool *)to))
            return bad_value(o, text, origin, "is neither on nor off", e);
        break;
    case OPT_INT:
        if ((o->flags & OPT_ALL) && strcmp(text, "all") == 0)
            i = 0;
        else if ((o->flags & OPT_SWITCH) && !parse_i64(text, &i) && parse_bool(text, &on))
            i = on;
        else if (!parse_i64(text, &i))
            return bad_value(o, text, origin, "is not an integer", e);
        if (!within(o, (double)i))
            return bad_value(o, text, origin, "is out of range", e);
        *(int64_t *)to = i;
        break;
    case OPT_REAL:
        if (!parse_f64(text, &d))
            return bad_value(o, text, origin, "is not a number", e);
        if (!within(o, d))
            return bad_value(o, text, origin, "is out of range", e);
        *(double *)to = d;
        break;
    case OPT_ENUM: {
        int index = enum_index(o, text);
        if (index < 0 && parse_bool(text, &on)) /* true and yes where there is an on */
            index = enum_index(o, on ? "on" : "off");
        if (index < 0)
            return bad_value(o, text, origin, "is not one of the choices", e);
        *(int *)to = index;
        break;
    }
    case OPT_STRING: TRY(set_string(c, to, o, text, origin, e)); break;
    }
    return ST_OK;
}

int option_set(struct config *c, const struct option *o, const char *text, struct config_origin origin, struct err *e)
{
    TRY(option_store(c, c, o, text, origin, e));
    c->origin[option_index(o)] = origin;
    return ST_OK;
}

void option_text(const struct config *c, const struct option *o, struct buf *out) { option_text_of(c, o, out); }

void option_text_of(const void *base, const struct option *o, struct buf *out)
{
    const void *from = (const char *)base + o->offset;
    switch (o->type) {
    case OPT_BOOL: buf_add(out, *(const bool *)from ? "on" : "off"); break;
    case OPT_INT:
        if ((o->flags & OPT_ALL) && *(const int64_t *)from == 0)
            buf_add(out, "all");
        else
            buf_addf(out, "%lld", (long long)*(const int64_t *)from);
        break;
    case OPT_REAL: real_text(*(const double *)from, out); break;
    case OPT_ENUM: buf_add(out, o->values[*(const int *)from]); break;
    case OPT_STRING: buf_add(out, *(const char *const *)from); break;
    }
}

bool option_equal(const struct config *a, const struct config *b, const struct option *o)
{
    const void *x = field(a, o), *y = field(b, o);
    switch (o->type) {
    case OPT_BOOL: return *(const bool *)x == *(const bool *)y;
    case OPT_INT: return *(const int64_t *)x == *(const int64_t *)y;
    case OPT_REAL: return *(const double *)x == *(const double *)y;
    case OPT_ENUM: return *(const int *)x == *(const int *)y;
    case OPT_STRING: return strcmp(*(const char *const *)x, *(const char *const *)y) == 0;
    }
    return false;
}

bool option_is_automatic(const struct config *c, const struct option *o)
{
    if (o->automatic == NULL)
        return false;
    return o->type == OPT_INT ? *(int64_t *)field(c, o) == 0 : *(double *)field(c, o) == 0;
}

/* ---- by name --------------------------------------------------------------------------------- */

static int unknown_name(const char *name, struct err *e)
{
    err_set(e, ST_USAGE, "no option is called '%.64s'", name);
    return suggest_option(name, "", NULL, 0, e);
}

int config_set(struct config *c, const char *name, const char *value, const char *label, struct err *e)
{
    const struct option *o = option_find(name);
    if (o == NULL && !group_named(name))
        return unknown_name(name, e);
    struct config_origin origin = {.source = CFG_FROM_COMMAND};
    if (label != NULL) {
        origin.source = CFG_FROM_FILE;
        origin.label = arena_strdup(&c->strings, label);
    }
    return o == NULL ? group_set(c, name, value, origin, e) : option_set(c, o, value, origin, e);
}

int config_set_i64(struct config *c, const char *name, int64_t value, struct err *e)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return config_set(c, name, text, NULL, e);
}

int config_set_auto(struct config *c, const char *name, int64_t value, struct err *e)
{
    const struct option *o = option_find(name);
    if (o == NULL)
        return unknown_name(name, e);
    if (o->automatic == NULL || o->type != OPT_INT)
        return err_set(e, ST_INTERNAL, "%s has no automatic integer value", name);
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return option_set(c, o, text, (struct config_origin){.source = CFG_FROM_AUTO}, e);
}

const char *config_value_text(const struct config *c, const char *name, struct buf *out)
{
    const struct option *o = option_find(name);
    if (o == NULL)
        return NULL;
    buf_clear(out);
    option_text(c, o, out);
    return out->text;
}

struct config_origin config_source_of(const struct config *c, const char *name)
{
    const struct option *o = option_find(name);
    return o ? c->origin[option_index(o)] : (struct config_origin){.source = CFG_FROM_DEFAULT};
}

const char *origin_text(struct config_origin o, char *out, size_t size)
{
    out[0] = '\0';
    if (o.source == CFG_FROM_FILE && o.line > 0)
        snprintf(out, size, "%s:%d", o.label ? o.label : "?", o.line);
    else if (o.source == CFG_FROM_FILE)
        snprintf(out, size, "%s", o.label ? o.label : "?");
    else if (o.source == CFG_FROM_CHECKPOINT)
        snprintf(out, size, "checkpoint %s", o.label ? o.label : "?");
    return out;
}

const char *config_source_text(const struct config *c, const char *name, char *out, size_t size)
{
    struct config_origin o = config_source_of(c, name);
    origin_text(o, out, size);
    if (out[0] == '\0')
        snprintf(out, size, "%s",
                 o.source == CFG_FROM_COMMAND ? "command line"
                 : o.source == CFG_FROM_AUTO  ? "auto"
                                              : "default");
    return out;
}

/* ---- saved configs --------------------------------------------------------------------------- */

/* About the model, an explicit "automatic" is no opinion: the checkpoint has the number. */
static bool user_set(const struct config *c, const struct option *o)
{
    enum config_source s = c->origin[option_index(o)].source;
    return (s == CFG_FROM_FILE || s == CFG_FROM_COMMAND) && !((o->flags & OPT_MODEL) && option_is_automatic(c, o));
}

static int conflict(const struct config *c, const struct config *saved, const struct option *o, const char *label,
                    struct err *e)
{
    struct buf mine, theirs;
    char from[320];
    buf_init(&mine, 0);
    buf_init(&theirs, 0);
    option_text(c, o, &mine);
    option_text(saved, o, &theirs);
    err_set(e, ST_CONFLICT, "%s is %.160s (%s), but the checkpoint %.160s was made with %.160s", o->name,
            mine.text ? mine.text : "?", config_source_text(c, o->name, from, sizeof from), label,
            theirs.text ? theirs.text : "?");
    buf_release(&mine);
    buf_release(&theirs);
    return err_hint(e, "the model cannot change once it exists: leave %s out, or start a new run", o->name);
}

static void report_change(const struct config *c, const struct config *saved, const struct option *o,
                          struct buf *changes)
{
    if (changes == NULL || option_equal(c, saved, o))
        return;
    buf_addf(changes, "%s: ", o->name);
    option_text(saved, o, changes);
    buf_add(changes, " -> ");
    option_text(c, o, changes);
    buf_add(changes, "\n");
}

static int take_saved(struct config *c, const struct config *saved, const struct option *o, const char *label,
                      struct err *e)
{
    struct buf text;
    buf_init(&text, 0);
    option_text(saved, o, &text);
    int st = buf_check(&text, e);
    struct config_origin origin = {.source = CFG_FROM_CHECKPOINT, .label = label};
    if (st == ST_OK)
        st = option_set(c, o, text.text ? text.text : "", origin, e);
    buf_release(&text);
    return st;
}

/* '|' says where a stack is cut for pipeline stages, not what it is. */
static bool same_pattern(const char *a, const char *b)
{
    for (;; a++, b++) {
        while (*a == '|')
            a++;
        while (*b == '|')
            b++;
        if (*a != *b || *a == '\0')
            return *a == *b;
    }
}

static bool same_model(const struct config *a, const struct config *b, const struct option *o)
{
    return option_equal(a, b, o) ||
           (strcmp(o->name, "model.pattern") == 0 && same_pattern(a->model.pattern, b->model.pattern));
}

int config_load_saved(struct config *c, const char *text, size_t len, const char *label, enum config_saved_mode mode,
                      struct buf *changes, struct err *e)
{
    struct config saved;
    TRY(config_init(&saved, e));
    int st;
    TRY_OUT(config_read_ini_text(&saved, text, len, label, e));
    TRY_OUT(expand_patterns(&saved, e));
    TRY_OUT(expand_patterns(c, e)); /* as the saved pattern was */
    TRY_OUT(derive_depths(c, e));
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        /* a base gets adapters */
        bool adapted = mode == CFG_SAVED_MODEL && saved.lora.rank == 0 && str_starts(o->name, "lora.");
        if ((o->flags & OPT_MODEL) && user_set(c, o) && !adapted && !same_model(c, &saved, o)) {
            st = conflict(c, &saved, o, label, e);
            goto out;
        }
    }
    const char *kept_label = arena_strdup(&c->strings, label);
    for (int i = 0; i < config_n_options; i++) {
        const struct option *o = &config_options[i];
        bool wanted = mode == CFG_SAVED_ALL || (o->flags & (OPT_MODEL | OPT_INHERIT));
        if ((o->flags & OPT_LOCAL) || !wanted)
            continue;
        if (user_set(c, o))
            report_change(c, &saved, o, changes);
        else
            TRY_OUT(take_saved(c, &saved, o, kept_label, e));
    }
    if (mode == CFG_SAVED_ALL)
        st = groups_load_saved(c, &saved, label, changes, e);
out:
    config_release(&saved);
    return st;
}
