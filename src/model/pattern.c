/* The grammar of layer patterns: validation in a fixed order, then items, segments and numbers. */
#include "model/pattern.h"
#include "config/config.h"
#include "kind/kind.h"

#include <stdarg.h>
#include <string.h>

const char *pattern_error_name(enum pattern_error code)
{
    static const char *const names[PATTERN_ERRORS] = {
        [PATTERN_OK] = "ok",
        [PATTERN_LENGTH] = "E_LENGTH",
        [PATTERN_REPEAT] = "E_REPEAT",
        [PATTERN_SYMBOL] = "E_SYMBOL",
        [PATTERN_GROUP_OPEN] = "E_GROUP_OPEN",
        [PATTERN_GROUP_CLOSE] = "E_GROUP_CLOSE",
        [PATTERN_GROUP_EMPTY] = "E_GROUP_EMPTY",
        [PATTERN_GROUP_NEST] = "E_GROUP_NEST",
        [PATTERN_MOE_NOT_LAST] = "E_MOE_NOT_LAST",
        [PATTERN_ATTN_MIX] = "E_ATTN_MIX",
        [PATTERN_MTP_DIFFER] = "E_MTP_DIFFER",
        [PATTERN_MTP_GROUP] = "E_MTP_GROUP",
        [PATTERN_PIPE_FIRST_LAST] = "E_PIPE_FIRST_LAST",
        [PATTERN_VPP_NO_PIPE] = "E_VPP_NO_PIPE",
        [PATTERN_SEG_DIV] = "E_SEG_DIV",
        [PATTERN_SEG_RANGE] = "E_SEG_RANGE",
        [PATTERN_AUTO_DIV] = "E_AUTO_DIV",
        [PATTERN_AUTO_MIDDLE] = "E_AUTO_MIDDLE",
        [PATTERN_GROUP_SPLIT] = "E_GROUP_SPLIT",
        [PATTERN_PLACE] = "E_PLACE",
    };
    return (unsigned)code < PATTERN_ERRORS ? names[code] : "?";
}

/* ---- errors ---------------------------------------------------------------------------------- */

enum { SHOWN = 200, BEFORE = 120 }; /* bytes of a pattern in a message; of those, in front of the mark */

/* The part of the text round a position, one printable column per byte so that the mark fits.
 * Returns the column of the position. */
static int excerpt(const char *text, size_t at, char out[SHOWN + 8])
{
    size_t n = strlen(text), from = n > SHOWN && at > BEFORE ? at - BEFORE : 0, len = 0;
    size_t to = n - from > SHOWN ? from + SHOWN : n;
    if (from > 0)
        len = (size_t)snprintf(out, 4, "...");
    int column = (int)(len + at - from);
    for (size_t i = from; i < to; i++)
        out[len++] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    snprintf(out + len, 4, "%s", to < n ? "..." : "");
    return column;
}

int pattern_refuse(const char *text, size_t at, struct err *e, const char *fmt, ...)
{
    char what[240], shown[SHOWN + 8];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    int column = excerpt(text, at, shown);
    err_set(e, ST_USAGE, "model.pattern: %s at position %zu of '%s'", what, at + 1, shown);
    err_hint(e, "%s\n        %*s^", shown, column, "");
    return ST_USAGE;
}

static int refuse(struct pattern *p, enum pattern_error code, size_t at, struct err *e, const char *what)
{
    p->error = code;
    return pattern_refuse(p->text, at, e, "%s", what);
}

static int bad_symbol(struct pattern *p, size_t at, struct err *e)
{
    int n;
    char symbols[2 * KIND_MAX_CORES + 1] = "";
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++)
        snprintf(symbols + 2 * i, 3, "%c ", cores[i]->symbol);
    p->error = PATTERN_SYMBOL;
    return pattern_refuse(p->text, at, e, "this is not a valid layer symbol (%.*s)", 2 * n - 1, symbols);
}

/* ---- validation: positions [from, to) of p->text --------------------------------------------- */

static bool is_symbol(char c) { return c != '\0' && core_find(c) != NULL; }

/* The first of a set of characters, or `to`. */
static size_t find(const struct pattern *p, size_t from, size_t to, const char *set)
{
    size_t i = from;
    while (i < to && strchr(set, p->text[i]) == NULL)
        i++;
    return i;
}

/* The group that opens at `open`; *close is where it ends. */
static int check_group(struct pattern *p, size_t open, size_t to, size_t *close, struct err *e)
{
    *close = find(p, open, to, "]");
    if (*close == to)
        return refuse(p, PATTERN_GROUP_OPEN, open, e, "'[' without a matching ']'");
    if (*close == open + 1)
        return refuse(p, PATTERN_GROUP_EMPTY, *close, e, "a group cannot be empty");
    size_t inner = find(p, open + 1, *close, "[");
    if (inner < *close)
        return refuse(p, PATTERN_GROUP_NEST, inner, e, "a group inside a group is not supported");
    for (size_t i = open + 1; i < *close; i++)
        if (!is_symbol(p->text[i]))
            return bad_symbol(p, i, e);
    for (size_t i = open + 1; i + 1 < *close; i++)
        if (core_find(p->text[i])->ends_group) {
            p->error = PATTERN_MOE_NOT_LAST;
            return pattern_refuse(p->text, i, e, "'%c' must be the last layer of its group", p->text[i]);
        }
    return ST_OK;
}

static int check_segment(struct pattern *p, size_t from, size_t to, struct err *e)
{
    for (size_t i = from; i < to; i++) {
        if (p->text[i] == '[')
            TRY(check_group(p, i, to, &i, e));
        else if (p->text[i] == ']')
            return refuse(p, PATTERN_GROUP_CLOSE, i, e, "this ']' was not opened");
        else if (!is_symbol(p->text[i]))
            return bad_symbol(p, i, e);
    }
    return ST_OK;
}

/* Kinds that exclude each other, in one part. */
static int check_mixing(struct pattern *p, size_t from, size_t to, struct err *e)
{
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++) {
        const char symbol[] = {cores[i]->symbol, '\0'};
        size_t own = find(p, from, to, symbol),
               other = cores[i]->excludes != NULL ? find(p, from, to, cores[i]->excludes) : to;
        if (own < to && other < to)
            return refuse(p, PATTERN_ATTN_MIX, own > other ? own : other, e, cores[i]->excludes_message);
    }
    return ST_OK;
}

/* ---- items, segments and numbers of what is valid -------------------------------------------- */

static void store_item(struct pattern *p, size_t from, size_t to, bool grouped)
{
    p->items[p->n_items] = (struct pattern_item){(uint16_t)p->n_layers, (uint16_t)(to - from), grouped};
    for (size_t i = from; i < to; i++) {
        p->symbols[p->n_layers] = p->text[i];
        p->item_of[p->n_layers] = (uint16_t)p->n_items;
        p->at[p->n_layers++] = (uint16_t)i;
    }
    p->n_items++;
    p->grouped |= grouped;
}

static void store_segment(struct pattern *p, size_t from, size_t to)
{
    struct pattern_segment *s = &p->segments[p->n_segments++];
    *s = (struct pattern_segment){.first_item = (uint16_t)p->n_items, .first_layer = (uint16_t)p->n_layers};
    for (size_t i = from; i < to; i++) {
        size_t close = p->text[i] == '[' ? find(p, i, to, "]") : i;
        if (close > i)
            store_item(p, i + 1, close, true);
        else
            store_item(p, i, i + 1, false);
        i = close;
    }
    s->n_items = (uint16_t)(p->n_items - s->first_item);
    s->n_layers = (uint16_t)(p->n_layers - s->first_layer);
}

/* ---- parts ----------------------------------------------------------------------------------- */

/* cuts: the characters that end a segment. */
static int parse_main(struct pattern *p, size_t to, const char *cuts, struct err *e)
{
    p->main_len = (int)to;
    for (size_t from = 0; from <= to; from++) {
        size_t end = find(p, from, to, cuts);
        TRY(check_segment(p, from, end, e));
        from = end;
    }
    TRY(check_mixing(p, 0, to, e));
    for (size_t from = 0; from <= to; from++) {
        size_t end = find(p, from, to, cuts);
        store_segment(p, from, end);
        from = end;
    }
    return ST_OK;
}

/* Every depth must be like the first; the mark goes to the first byte that is not. */
static int check_depths_alike(struct pattern *p, size_t first, size_t first_end, size_t to, struct err *e)
{
    p->n_mtp_depths = 1;
    for (size_t from = first_end + 1; from <= to; from++, p->n_mtp_depths++) {
        size_t end = find(p, from, to, "/"), n = 0;
        while (first + n < first_end && from + n < end && p->text[first + n] == p->text[from + n])
            n++;
        if (first + n < first_end || from + n < end)
            return refuse(p, PATTERN_MTP_DIFFER, from + n, e, "All MTP patterns must be identical; this one differs");
        from = end;
    }
    return ST_OK;
}

/* What follows the first '/', which is in front of `first`. */
static int parse_depths(struct pattern *p, size_t first, size_t to, struct err *e)
{
    size_t end = find(p, first, to, "/");
    if (strspn(p->text + first, "/") == to - first)
        return ST_OK; /* separators alone mean no MTP */
    TRY(check_depths_alike(p, first, end, to, e));
    TRY(check_segment(p, first, end, e));
    TRY(check_mixing(p, first, end, e));
    size_t bracket = find(p, first, end, "[]");
    if (bracket < end)
        return refuse(p, PATTERN_MTP_GROUP, bracket, e,
                      "brackets here are not supported because each MTP depth is one unit already");
    p->mtp_at = (int)first;
    p->n_mtp_layers = (int)(end - first);
    memcpy(p->mtp_symbols, p->text + first, end - first);
    return ST_OK;
}

static int take_text(struct pattern *p, const char *text, size_t *n, struct err *e)
{
    memset(p, 0, sizeof *p);
    *n = text != NULL ? strlen(text) : 0;
    p->n_segments = text == NULL;
    if (*n > PATTERN_MAX) {
        p->error = PATTERN_LENGTH;
        return err_set(e, ST_USAGE, "model.pattern has %zu characters, at most %d are allowed", *n, PATTERN_MAX);
    }
    if (text != NULL && config_expand_pattern(text, p->text, e) != ST_OK) {
        p->error = PATTERN_REPEAT;
        return ST_USAGE;
    }
    *n = strlen(p->text);
    return ST_OK;
}

int pattern_parse(struct pattern *p, const char *text, struct err *e)
{
    size_t n;
    TRY(take_text(p, text, &n, e));
    if (text == NULL)
        return ST_OK;
    size_t main_end = find(p, 0, n, "/");
    p->has_main = main_end > 0 || n == 0;
    TRY(parse_main(p, main_end, "|", e));
    return main_end < n ? parse_depths(p, main_end + 1, n, e) : ST_OK;
}

int pattern_parse_segment(struct pattern *p, const char *text, struct err *e)
{
    size_t n;
    TRY(take_text(p, text, &n, e));
    p->has_main = text != NULL;
    return text != NULL ? parse_main(p, n, "", e) : ST_OK;
}

/* ---- counts and maps ------------------------------------------------------------------------- */

int pattern_map(const char *symbols, char symbol, int *layers)
{
    int n = 0;
    for (int i = 0; symbols[i] != '\0'; i++) {
        if (symbols[i] == symbol && layers != NULL)
            layers[n] = i;
        n += symbols[i] == symbol;
    }
    return n;
}

/* ---- checkpoint keys ------------------------------------------------------------------------- */

int pattern_layer_key_index(const struct pattern *p, int layer)
{
    return p->item_of[layer]; /* without groups each layer is an item */
}

void pattern_add_item(const struct pattern *p, int item, struct buf *out)
{
    const struct pattern_item *x = &p->items[item];
    buf_addf(out, x->grouped ? "[%.*s]" : "%.*s", (int)x->n, p->symbols + x->first);
}

const char *pattern_final_norm_key(const struct pattern *p)
{
    return p->grouped ? "decoder.final_layernorm.weight" : "decoder.final_norm.weight";
}

/* A layer of the item in front of layer l stores the same names. */
static bool stored_before(const struct pattern *p, const struct pattern_item *it, int l)
{
    const struct core_kind *own = core_find(p->symbols[l]);
    for (int k = it->first; k < l; k++)
        if (core_same_family(core_find(p->symbols[k]), own))
            return true;
    return false;
}

int pattern_check_keys(const struct pattern *p, struct err *e)
{
    for (int i = 0; i < p->n_items; i++) {
        const struct pattern_item *it = &p->items[i];
        for (int l = it->first; l < it->first + it->n; l++)
            if (stored_before(p, it, l))
                return pattern_refuse(p->text, p->at[l], e,
                                      "a group stores its layers under one number, so decoder.layers.%d would hold "
                                      "a second layer like '%c'",
                                      i, p->symbols[l]);
    }
    return ST_OK;
}
