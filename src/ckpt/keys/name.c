/* Names of tensors, taken apart: the layer's number, the expert's, the part's, and the rest in one
 * spelling. All spellings that Megatron and its exporters write meet here. */
#include "ckpt/keys/keys_int.h"

#include <string.h>

/* ---- pieces of text -------------------------------------------------------------------------- */

static bool skip(const char **s, const char *prefix)
{
    if (!str_starts(*s, prefix))
        return false;
    *s += strlen(prefix);
    return true;
}

/* A number as Megatron prints it: no sign, no leading zero. */
static bool take_number(const char **s, int *out)
{
    const char *p = *s;
    int n = 0;
    if (*p < '0' || *p > '9' || (p[0] == '0' && p[1] >= '0' && p[1] <= '9'))
        return false;
    for (; *p >= '0' && *p <= '9'; p++) {
        n = n * 10 + (*p - '0');
        if (n >= KEY_MAX_LAYER)
            return false;
    }
    *s = p;
    *out = n;
    return true;
}

static bool take_index(const char **s, int *out) /* "17." */
{
    const char *p = *s;
    if (!take_number(&p, out) || *p != '.')
        return false;
    *s = p + 1;
    return true;
}

bool key_ignored(const char *key)
{
    const char *at = strstr(key, "_extra_state");
    if (at == NULL || (at != key && at[-1] != '.'))
        return false;
    at += strlen("_extra_state");
    return at[strspn(at, "0123456789")] == '\0';
}

/* ---- experts and parts ----------------------------------------------------------------------- */

/* weight [E, ...], weight7, local_experts.7.weight and experts.7.weight are one parameter's. */
static int parse_expert(struct arena *a, const char *rest, struct key_name *out, struct err *e)
{
    skip(&rest, "experts.");
    if (skip(&rest, "local_experts.") || (rest[0] >= '0' && rest[0] <= '9'))
        if (!take_index(&rest, &out->expert))
            return ST_OK; /* unknown spelling: the leaf stays as it is */
    size_t n = strlen(rest);
    const char *dot = strrchr(rest, '.'), *last = dot ? dot + 1 : rest;
    size_t stem = strcspn(last, "0123456789");
    const char *digits = last + stem;
    bool named = (stem == 6 && strncmp(last, "weight", 6) == 0) || (stem == 4 && strncmp(last, "bias", 4) == 0);
    if (named && *digits != '\0') {
        int index;
        const char *p = digits;
        if (out->expert != WHOLE || !take_number(&p, &index) || *p != '\0')
            return ST_OK;
        out->expert = index;
        n = (size_t)(digits - rest);
    }
    out->leaf = arena_printf(a, "mlp.experts.%.*s", (int)n, rest);
    return out->leaf ? ST_OK : err_set(e, ST_NOMEM, "out of memory reading keys");
}

/* The split of this leaf, and the kind that defines it; NULL: it is stored whole. */
const struct key_split *key_split_of(const char *leaf, const struct core_kind **kind)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < cores[i]->keys.n_splits; k++)
            if (strcmp(cores[i]->keys.splits[k].leaf, leaf) == 0) {
                *kind = cores[i];
                return &cores[i]->keys.splits[k];
            }
    return NULL;
}

/* "mixer.in_proj.weight.dt" is the part dt of mixer.in_proj.weight. */
static void parse_part(struct key_name *out)
{
    char leaf[96];
    const struct core_kind *kind;
    const char *dot = strrchr(out->leaf, '.');
    if (dot == NULL || (size_t)(dot - out->leaf) >= sizeof leaf)
        return;
    snprintf(leaf, sizeof leaf, "%.*s", (int)(dot - out->leaf), out->leaf);
    const struct key_split *s = key_split_of(leaf, &kind);
    for (int k = 0; s != NULL && k < KEY_MAX_PARTS && s->parts[k] != NULL; k++)
        if (strcmp(dot + 1, s->parts[k]) == 0) {
            out->leaf = s->leaf;
            out->part = k;
            return;
        }
}

int key_parts(const char *leaf, int part)
{
    const struct core_kind *kind;
    const struct key_split *s = key_split_of(leaf, &kind);
    int n = 0;
    while (s != NULL && n < KEY_MAX_PARTS && s->parts[n] != NULL)
        n++;
    return part < n ? n : 0;
}

/* ---- whole keys ------------------------------------------------------------------------------ */

static void parse_mtp(const char *rest, struct key_name *out)
{
    int depth, layer = NO_LAYER;
    if (!take_index(&rest, &depth))
        return;
    if (skip(&rest, "transformer_layer."))
        layer = NOT_NUMBERED;
    else if (skip(&rest, "mtp_model_layer.")) {
        layer = NOT_NUMBERED;
        const char *inner = rest;
        int index;
        if (skip(&inner, "layers.") && take_index(&inner, &index)) {
            layer = index;
            rest = inner;
        }
    }
    *out = (struct key_name){SCOPE_MTP, depth, layer, WHOLE, WHOLE, rest};
}

int key_parse(struct arena *a, const char *key, struct key_name *out, struct err *e)
{
    const char *rest = key;
    while (skip(&rest, "module."))
        ;
    if (str_starts(rest, "model.decoder.") || str_starts(rest, "model.embedding.") ||
        str_starts(rest, "model.output_layer.") || str_starts(rest, "model.mtp."))
        skip(&rest, "model.");
    *out = (struct key_name){SCOPE_PLAIN, 0, NO_LAYER, WHOLE, WHOLE, rest};
    if (skip(&rest, "decoder.final_layernorm.")) {
        out->leaf = arena_printf(a, "decoder.final_norm.%s", rest);
        return out->leaf ? ST_OK : err_set(e, ST_NOMEM, "out of memory reading keys");
    }
    if (skip(&rest, "mtp.layers."))
        parse_mtp(rest, out);
    else if (skip(&rest, "decoder.layers.")) {
        int layer = NOT_NUMBERED;
        if (rest[0] >= '0' && rest[0] <= '9' && !take_index(&rest, &layer))
            return ST_OK; /* no number of a layer: a plain name that nothing wants */
        *out = (struct key_name){SCOPE_LAYER, 0, layer, WHOLE, WHOLE, rest};
    }
    if (out->scope == SCOPE_PLAIN || out->layer == NO_LAYER)
        return ST_OK;
    skip(&out->leaf, "inner_layer."); /* inside the hyper-connections of a hybrid stack */
    rest = out->leaf;
    if (skip(&rest, "mlp.experts."))
        return parse_expert(a, rest, out, e);
    parse_part(out);
    return ST_OK;
}

/* What stands in front of the leaf. */
static void where_text(const struct key_name *name, char *out, size_t size)
{
    out[0] = '\0';
    if (name->scope == SCOPE_LAYER && name->layer == NOT_NUMBERED)
        snprintf(out, size, "decoder.layers.");
    else if (name->scope == SCOPE_LAYER)
        snprintf(out, size, "decoder.layers.%d.", name->layer);
    else if (name->scope == SCOPE_MTP && name->layer >= 0)
        snprintf(out, size, "mtp.layers.%d.mtp_model_layer.layers.%d.", name->depth, name->layer);
    else if (name->scope == SCOPE_MTP)
        snprintf(out, size, "mtp.layers.%d.%s", name->depth, name->layer == NOT_NUMBERED ? "transformer_layer." : "");
}

char *key_text(struct arena *a, const struct key_name *name, const struct key_spelling *how)
{
    char where[96], part[16] = "", expert[16] = "";
    const char *leaf = name->leaf, *norm = "decoder.final_norm.", *inner = "", *experts = "mlp.experts.", *rest;
    bool in_layer = name->scope != SCOPE_PLAIN && name->layer != NO_LAYER, second;
    where_text(name, where, sizeof where);
    if (name->scope == SCOPE_PLAIN && how->transformer && str_starts(leaf, norm)) {
        snprintf(where, sizeof where, "decoder.final_layernorm.");
        leaf += strlen(norm);
    }
    const struct core_kind *kind;
    const struct key_split *split = name->part != WHOLE ? key_split_of(leaf, &kind) : NULL;
    if (split != NULL)
        snprintf(part, sizeof part, ".%s", split->parts[name->part]);
    if (name->expert != WHOLE)
        snprintf(expert, sizeof expert, "%d", name->expert);
    if (how->wrapped && in_layer) {
        bool own = key_hyper(leaf, &second, &rest) != HYPER_NONE;
        inner = own ? "hyper_connection." : "inner_layer.";
        leaf = own ? rest : leaf;
    }
    if (how->distributed && in_layer && str_starts(leaf, experts)) {
        leaf += strlen(experts);
        return arena_printf(a, "%s%s%sexperts.%s%s%s", where, inner, experts, leaf, part, expert);
    }
    return arena_printf(a, "%s%s%s%s%s", where, inner, leaf, part, expert);
}

/* ---- hyper-connections ----------------------------------------------------------------------- */

static const char *const hyper_names[] = {[HYPER_ATTENTION] = "self_attention_hyper_connection",
                                          [HYPER_MLP] = "mlp_hyper_connection",
                                          [HYPER_ANY] = "hyper_connection"};

enum key_hyper key_hyper(const char *leaf, bool *second, const char **rest)
{
    for (int k = HYPER_ATTENTION; k <= HYPER_ANY; k++) {
        const char *at = leaf;
        if (!skip(&at, hyper_names[k]))
            continue;
        *second = k != HYPER_ANY && skip(&at, "_2");
        if (*at != '.')
            continue;
        *rest = at + 1;
        return (enum key_hyper)k;
    }
    return HYPER_NONE;
}

enum key_hyper key_hyper_of(unsigned family)
{
    return family & families_at(KEY_PLACE_ATTENTION) ? HYPER_ATTENTION
           : family & families_at(KEY_PLACE_MLP)     ? HYPER_MLP
                                                     : HYPER_ANY;
}

char *key_hyper_leaf(struct arena *a, enum key_hyper class, bool second, const char *rest)
{
    return arena_printf(a, "%s%s.%s", hyper_names[class], second ? "_2" : "", rest);
}

static int order_int(int a, int b) { return a < b ? -1 : a > b; }

int key_order_place(const struct key_name *a, const struct key_name *b)
{
    int order = order_int((int)a->scope, (int)b->scope);
    order = order ? order : order_int(a->depth, b->depth);
    order = order ? order : order_int(a->layer, b->layer);
    return order ? order : strcmp(a->leaf, b->leaf);
}

int key_order(const struct key_name *a, const struct key_name *b)
{
    int order = key_order_place(a, b);
    order = order ? order : order_int(a->part, b->part);
    return order ? order : order_int(a->expert, b->expert);
}

/* ---- families -------------------------------------------------------------------------------- */

/* The bit of a family is the place of its first kind in the list. */
static unsigned family_bit(const struct core_kind *kind)
{
    int n, i = 0;
    const struct core_kind *const *cores = core_kinds(&n);
    while (i < n && !core_same_family(cores[i], kind))
        i++;
    return 1u << i;
}

unsigned family_of(char symbol)
{
    const struct core_kind *kind = core_find(symbol);
    return kind != NULL ? family_bit(kind) : FAM_OTHER;
}

static bool stands_alone(const struct kind_keys *k) { return k->place == KEY_PLACE_ALONE; }
static bool stands_for_attention(const struct kind_keys *k) { return k->place == KEY_PLACE_ATTENTION; }
static bool stands_for_mlp(const struct kind_keys *k) { return k->place == KEY_PLACE_MLP; }
static bool mixes(const struct kind_keys *k) { return k->mixes; }
static bool of_transformer(const struct kind_keys *k) { return k->transformer; }
static bool optional(const struct kind_keys *k) { return k->optional; }

static unsigned families_where(bool (*holds)(const struct kind_keys *))
{
    int n;
    unsigned set = 0;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        if (holds(&cores[i]->keys))
            set |= family_bit(cores[i]);
    return set;
}

unsigned families_at(enum key_place place)
{
    return families_where(place == KEY_PLACE_ATTENTION ? stands_for_attention
                          : place == KEY_PLACE_MLP     ? stands_for_mlp
                                                       : stands_alone);
}
unsigned families_mixing(void) { return families_where(mixes); }
unsigned families_of_transformer(void) { return families_where(of_transformer); }
unsigned families_optional(void) { return families_where(optional); }

unsigned key_family(const char *leaf)
{
    static const struct {
        const char *prefix;
        enum key_place place;
    } hyper[] = {
        {"self_attention_hyper_connection", KEY_PLACE_ATTENTION},
        {"hyper_connection.", KEY_PLACE_ALONE},
        {"mlp_hyper_connection", KEY_PLACE_MLP},
    };
    int n;
    unsigned family = 0;
    size_t longest = 0;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < KEY_MAX_PREFIXES && cores[i]->keys.prefixes[k] != NULL; k++) {
            const char *prefix = cores[i]->keys.prefixes[k];
            if (strlen(prefix) > longest && str_starts(leaf, prefix)) {
                longest = strlen(prefix);
                family = family_bit(cores[i]);
            }
        }
    for (int i = 0; family == 0 && i < countof(hyper); i++)
        if (str_starts(leaf, hyper[i].prefix))
            family = families_at(hyper[i].place);
    return family;
}

const char *family_name(unsigned family)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        if (family & 1u << i)
            return cores[i]->keys.family;
    return family & FAM_OTHER ? "unknown" : "no";
}

const char *families_text(unsigned set, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "%s", set == 0 ? "nothing" : "");
    for (int i = 0; i < FAM_COUNT; i++)
        if (set & 1u << i && n < size)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? " and " : "", family_name(1u << i));
    return out;
}
