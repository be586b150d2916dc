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
    bool named = (stem == 6 && strncmp(last, "weight", 6) == 0) ||
                 (stem == 4 && strncmp(last, "bias", 4) == 0);
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

/* Stored in parts so that each can be cut among ranks; together they are the rows of one tensor. */
static const struct split {
    const char *leaf;
    const char *parts[6];
} splits[] = {
    {"mixer.in_proj.weight", {"z", "x", "B", "C", "dt"}},
    {"mixer.in_proj.bias", {"z", "x", "B", "C", "dt"}},
    {"mixer.conv1d.weight", {"x", "B", "C"}},
    {"mixer.conv1d.bias", {"x", "B", "C"}},
    {"self_attention.in_proj.weight", {"query", "key", "value", "z", "beta", "alpha"}},
    {"self_attention.conv1d.weight", {"query", "key", "value"}},
    {"self_attention.conv1d.bias", {"query", "key", "value"}},
};

static void parse_part(struct key_name *out)
{
    for (int i = 0; i < countof(splits); i++) {
        const char *rest = out->leaf;
        if (!skip(&rest, splits[i].leaf) || *rest != '.')
            continue;
        for (int k = 0; k < countof(splits[i].parts) && splits[i].parts[k] != NULL; k++)
            if (strcmp(rest + 1, splits[i].parts[k]) == 0) {
                out->leaf = splits[i].leaf;
                out->part = k;
                return;
            }
    }
}

int key_parts(const char *leaf, int part)
{
    int n = 0;
    for (int i = 0; i < countof(splits) && n == 0; i++)
        for (int k = 0; strcmp(splits[i].leaf, leaf) == 0 && k < countof(splits[i].parts); k++)
            n += splits[i].parts[k] != NULL;
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
    for (int i = 0; name->part != WHOLE && i < countof(splits); i++)
        if (strcmp(splits[i].leaf, leaf) == 0)
            snprintf(part, sizeof part, ".%s", splits[i].parts[name->part]);
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
    return family & (FAM_ATTN | FAM_GDN) ? HYPER_ATTENTION : family & FAM_MLPS ? HYPER_MLP : HYPER_ANY;
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

unsigned key_family(const char *leaf)
{
    static const struct {
        const char *prefix;
        unsigned family;
    } rows[] = {
        /* The gated delta net takes attention's place in a layer, with leaves of its own. */
        {"self_attention.in_proj.", FAM_GDN},
        {"self_attention.conv1d.", FAM_GDN},
        {"self_attention.A_log", FAM_GDN},
        {"self_attention.dt_bias", FAM_GDN},
        {"self_attention.out_norm.", FAM_GDN},
        {"self_attention.out_proj.", FAM_GDN},
        {"self_attention.", FAM_ATTN},
        {"input_layernorm.", FAM_ATTN},
        {"mixer.", FAM_MAMBA},
        {"mlp.linear_fc", FAM_DENSE},
        {"mlp.", FAM_MOE},
        {"pre_mlp_layernorm.", FAM_MOE},
        {"self_attention_hyper_connection", FAM_ATTN | FAM_GDN},
        {"hyper_connection.", FAM_MAMBA},
        {"mlp_hyper_connection", FAM_MLPS},
    };
    for (int i = 0; i < countof(rows); i++)
        if (str_starts(leaf, rows[i].prefix))
            return rows[i].family;
    return 0;
}

const char *family_name(unsigned family)
{
    static const char *const names[FAM_COUNT] = {"attention", "gated delta net", "Mamba",
                                                 "MLP",       "expert",          "unknown"};
    for (int i = 0; i < FAM_COUNT; i++)
        if (family & 1u << i)
            return names[i];
    return "no";
}

const char *families_text(unsigned set, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "%s", set == 0 ? "nothing" : "");
    for (int i = 0; i < FAM_COUNT; i++)
        if (set & 1u << i && n < size)
            n +=
                (size_t)snprintf(out + n, size - n, "%s%s", n ? " and " : "", family_name(1u << i));
    return out;
}
