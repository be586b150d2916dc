/* The layer pattern: one symbol per physical layer; brackets group layers and change nothing else. */
#include "model/model.h"

#include <string.h>

static int bad(const char *text, size_t at, struct err *e, const char *what)
{
    err_set(e, ST_USAGE, "model.pattern: %s at position %zu of '%.200s'", what, at + 1, text);
    return err_hint(e, "%.200s\n        %*s^", text, (int)at, "");
}

int pattern_parse(struct pattern *p, const char *text, struct err *e)
{
    *p = (struct pattern){0};
    size_t n = strlen(text), open = 0;
    bool in_group = false;
    if (n > PATTERN_MAX)
        return err_set(e, ST_USAGE, "model.pattern has %zu characters, at most %d are allowed", n, PATTERN_MAX);
    for (size_t i = 0; i < n; i++) {
        const struct core_kind *k = core_find(text[i]);
        if (text[i] == '[') {
            if (in_group)
                return bad(text, i, e, "a group inside a group is not supported");
            in_group = true;
            open = i;
        } else if (text[i] == ']') {
            if (!in_group)
                return bad(text, i, e, "this ']' was not opened");
            if (i == open + 1)
                return bad(text, i, e, "a group cannot be empty");
            in_group = false;
        } else if (text[i] == '|' || text[i] == '/') {
            return bad(text, i, e, "pipeline segments and MTP depths have no builder yet,");
        } else if (k == NULL) {
            return bad(text, i, e, "this is not a valid layer symbol (M G * + D - E)");
        } else if (k->declare == NULL) {
            char what[96];
            snprintf(what, sizeof what, "there is no core yet for '%c' (%s)", text[i], k->name);
            return bad(text, i, e, what);
        } else {
            p->symbols[p->n_layers++] = text[i];
        }
    }
    if (in_group)
        return bad(text, open, e, "'[' without a matching ']'");
    if (p->n_layers == 0)
        return err_set(e, ST_USAGE, "model.pattern is empty: a model needs at least one layer");
    return ST_OK;
}
