/* Groups of parameters, [group.NAME]: unlike options their number is the user's. The values of a group are rows of a
 * small option table whose offsets are in struct config_group, so that parsing, bounds and messages are those of
 * options. */
#include "config/config_int.h"

#include <ctype.h>
#include <string.h>

static const char *const freeze_values[] = {
#define VALUE_TEXT(id, text) text,
    CONFIG_FREEZE(VALUE_TEXT) NULL};

#define GROUP(field, kind, default_text, row_flags, ...)                                                               \
    {                                                                                                                  \
        .name = "group.NAME." #field, .type = (kind), .offset = offsetof(struct config_group, field),                  \
        .def = default_text, .flags = (row_flags), __VA_ARGS__                                                         \
    }

/* clang-format off */
const struct option group_options[] = {
    GROUP(match, OPT_STRING, "", OPT_MODEL, .help =
        "Globs over checkpoint names of parameters (decoder.layers.0.mlp.linear_fc1.weight; `braid plan --params=on` "
        "lists them), separated by commas: output_layer.*, *layernorm*. One that matches nothing is an error."),
    GROUP(lr, OPT_REAL, "1", OPT_RUN | OPT_INHERIT, .min = 0, .max = 1e6, .help =
        "Factor of the learning rate for these parameters."),
    GROUP(weight_decay, OPT_REAL, "-1", OPT_RUN | OPT_INHERIT, .min = -1, .max = 1e3, .help =
        "Weight decay of all parameters of the group, vectors included; -1: as without the group, "
        "train.weight_decay for matrices and none for vectors."),
    GROUP(freeze, OPT_ENUM, "auto", OPT_MODEL, .values = freeze_values, .help =
        "on: the parameters keep their values; they get no gradient, no moments and no fp32 master weights, and the "
        "products that would make their gradients are left out. off: they are trained, also beside LoRA. auto: "
        "trained, or with LoRA, frozen."),
};
/* clang-format on */
const int config_n_group_options = countof(group_options);

/* ---- names ----------------------------------------------------------------------------------- */

bool group_named(const char *text) { return str_starts(text, GROUP_SECTION "."); }

/* The NAME of "group.NAME" or "group.NAME.key", and what stands behind it ("" or ".key"). */
static int name_of(const char *text, char name[CONFIG_GROUP_NAME], const char **rest, struct err *e)
{
    const char *first = text + strlen(GROUP_SECTION ".");
    size_t n = strcspn(first, ".");
    bool good = n > 0 && n < CONFIG_GROUP_NAME;
    for (size_t i = 0; i < n && good; i++)
        good = isalnum((unsigned char)first[i]) || first[i] == '_' || first[i] == '-';
    if (!good) {
        err_set(e, ST_USAGE, "'%.80s' names no group of parameters", text);
        return err_hint(
            e,
            "a group is written [group.NAME], or --group.NAME.match=GLOBS; NAME has up to %d letters, digits, - and _",
            CONFIG_GROUP_NAME - 1);
    }
    memcpy(name, first, n);
    name[n] = '\0';
    *rest = first + n;
    return ST_OK;
}

int group_key(const char *key, const struct option **out, struct err *e)
{
    const size_t skip = strlen("group.NAME.");
    for (int i = 0; i < config_n_group_options; i++)
        if (strcmp(group_options[i].name + skip, key) == 0) {
            *out = &group_options[i];
            return ST_OK;
        }
    err_set(e, ST_USAGE, "a group of parameters has no option '%.64s'", key);
    return err_hint(e, "the options of a group are match, lr, weight_decay and freeze");
}

static struct config_group *find_group(struct config *c, const char *name)
{
    for (int i = 0; i < c->n_groups; i++)
        if (strcmp(c->group[i].name, name) == 0)
            return &c->group[i];
    return NULL;
}

static int add_group(struct config *c, const char *name, struct config_group **out, struct err *e)
{
    if (c->n_groups == CONFIG_MAX_GROUPS)
        return err_set(e, ST_USAGE, "group.%s: there are %d groups of parameters already, the most there can be", name,
                       CONFIG_MAX_GROUPS);
    struct config_group *g = &c->group[c->n_groups];
    *g = (struct config_group){.name = arena_strdup(&c->strings, name)};
    if (g->name == NULL)
        return err_set(e, ST_NOMEM, "no memory for group %s", name);
    for (int i = 0; i < config_n_group_options; i++)
        TRY(option_store(c, g, &group_options[i], group_options[i].def,
                         (struct config_origin){.source = CFG_FROM_DEFAULT}, e));
    c->n_groups++;
    *out = g;
    return ST_OK;
}

int group_set(struct config *c, const char *full, const char *text, struct config_origin origin, struct err *e)
{
    char name[CONFIG_GROUP_NAME], shown[160];
    const char *rest = "";
    const struct option *row = NULL;
    TRY(name_of(full, name, &rest, e));
    if (rest[0] != '\0')
        TRY(group_key(rest + 1, &row, e));
    struct config_group *g = find_group(c, name);
    if (g == NULL)
        TRY(add_group(c, name, &g, e));
    if (row == NULL)
        return ST_OK;
    snprintf(shown, sizeof shown, "%s", full);
    struct option named = *row; /* messages name the group */
    named.name = shown;
    return option_store(c, g, &named, text, origin, e);
}

/* ---- matching -------------------------------------------------------------------------------- */

bool config_globs_match(const char *globs, const char *name)
{
    char glob[512];
    for (const char *p = globs; *p != '\0';) {
        p += strspn(p, ", \t\n");
        size_t n = strcspn(p, ", \t\n");
        snprintf(glob, sizeof glob, "%.*s", (int)min_i64((int64_t)n, sizeof glob - 1), p);
        if (n > 0 && n < sizeof glob && str_glob(glob, name))
            return true;
        p += n;
    }
    return false;
}

int config_group_of(const struct config *c, const char *key)
{
    for (int i = c->n_groups - 1; i >= 0; i--)
        if (config_globs_match(c->group[i].match, key))
            return i;
    return -1;
}

/* ---- checks, saved configs ------------------------------------------------------------------- */

int groups_check(const struct config *c, struct err *e)
{
    for (int i = 0; i < c->n_groups; i++) {
        const struct config_group *g = &c->group[i];
        if (strspn(g->match, ", \t\n") == strlen(g->match)) {
            err_set(e, ST_USAGE, "group.%s.match is empty: the group has no parameters", g->name);
            return err_hint(e, "give globs over names of parameters, such as output_layer.*; `braid plan --params=on` "
                               "lists the names");
        }
        if (g->weight_decay < 0 && g->weight_decay != -1)
            return err_set(e, ST_USAGE, "group.%s.weight_decay is %g; it is 0 or more, or -1 for none of its own",
                           g->name, g->weight_decay);
        if (g->freeze == CFG_FREEZE_ON && (g->lr != 1 || g->weight_decay >= 0)) {
            err_set(e, ST_USAGE, "group.%s is frozen, but its %s is given: frozen parameters are not updated", g->name,
                    g->lr != 1 ? "lr" : "weight_decay");
            return err_hint(e, "leave one of the two out");
        }
    }
    return ST_OK;
}

void groups_write(const struct config *c, struct buf *out)
{
    for (int k = 0; k < c->n_groups; k++) {
        const struct config_group *g = &c->group[k];
        buf_addf(out, "\n[group.%s]\nmatch =%s", g->name, g->match[0] ? " " : "");
        write_string(out, g->match);
        buf_add(out, "\nlr = ");
        real_text(g->lr, out);
        buf_add(out, "\nweight_decay = ");
        real_text(g->weight_decay, out);
        buf_addf(out, "\nfreeze = %s\n", freeze_values[g->freeze]);
    }
}

static int other_groups(const struct config_group *mine, const struct config_group *saved, const char *label,
                        struct err *e)
{
    const struct config_group *g = mine != NULL ? mine : saved;
    bool both = mine != NULL && saved != NULL && strcmp(mine->name, saved->name) == 0,
         same_match = both && strcmp(mine->match, saved->match) == 0;
    const char *what = same_match ? "freeze" : "match", *now = !both        ? ""
                                                               : same_match ? freeze_values[mine->freeze]
                                                                            : mine->match;
    const char *then = !both ? "" : same_match ? freeze_values[saved->freeze] : saved->match;
    if (both)
        err_set(e, ST_CONFLICT, "group.%s.%s is %.160s, but the checkpoint %.160s was made with %.160s", g->name, what,
                now, label, then);
    else
        err_set(e, ST_CONFLICT, "group %s of parameters is %s the checkpoint %.160s", g->name,
                mine != NULL ? "not one of" : "missing here, but in", label);
    return err_hint(e, "which parameters are trained cannot change in a run: leave the groups out to take the "
                       "checkpoint's, or start a new "
                       "run from its weights with run.load");
}

int groups_load_saved(struct config *c, const struct config *saved, const char *label, struct buf *changes,
                      struct err *e)
{
    bool given = c->n_groups > 0;
    for (int i = 0; i < max_i64(c->n_groups, saved->n_groups); i++) {
        const struct config_group *was = i < saved->n_groups ? &saved->group[i] : NULL;
        struct config_group *now = given && i < c->n_groups ? &c->group[i] : NULL;
        if (given) {
            if (now == NULL || was == NULL || strcmp(now->name, was->name) != 0 ||
                strcmp(now->match, was->match) != 0 || now->freeze != was->freeze)
                return other_groups(now, was, label, e);
            if (changes != NULL && (now->lr != was->lr || now->weight_decay != was->weight_decay))
                buf_addf(changes, "group.%s: lr %g, weight_decay %g -> lr %g, weight_decay %g\n", now->name, was->lr,
                         was->weight_decay, now->lr, now->weight_decay);
            continue;
        }
        TRY(add_group(c, was->name, &now, e));
        const char *name = now->name;
        *now = *was;
        now->name = name;
        now->match = arena_strdup(&c->strings, was->match);
        if (now->match == NULL)
            return err_set(e, ST_NOMEM, "no memory for group %s", name);
    }
    return ST_OK;
}
