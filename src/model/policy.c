/* Reading and applying recompute policies; see policy.h. */
#include "model/policy.h"

#include <stdlib.h>
#include <string.h>

/* ---- reading --------------------------------------------------------------------------------- */

/* NAME:N, only in the first N layers: the name is cut off there; otherwise every layer. */
static int read_layers(struct policy_word *w, struct err *e)
{
    char *colon = strchr(w->name, ':');
    w->layers = INT64_MAX;
    if (colon == NULL)
        return ST_OK;
    if (!parse_i64(colon + 1, &w->layers) || w->layers < 1)
        return err_set(e, ST_USAGE,
                       "plan.recompute: '%s' must end in a number of layers of at least 1, such as norm:12", w->name);
    *colon = '\0';
    return ST_OK;
}

static int read_words(struct policy *p, const char *text, struct err *e)
{
    for (const char *s = text; *s != '\0';) {
        size_t n = strcspn(s, ", ");
        if (n >= POLICY_NAME)
            return err_set(e, ST_USAGE, "plan.recompute: the name '%.60s...' is too long", s);
        if (n > 0) {
            TRY(mem_grow((void **)&p->words, &p->cap, (size_t)p->n_words + 1, sizeof *p->words, e));
            struct policy_word *w = &p->words[p->n_words++];
            *w = (struct policy_word){0};
            memcpy(w->name, s, n);
            TRY(read_layers(w, e));
        }
        s += n + (s[n] != '\0');
    }
    return ST_OK;
}

/* The word is there and means every layer. */
static bool has_word(const struct policy *p, const char *name)
{
    for (int i = 0; i < p->n_words; i++)
        if (p->words[i].layers == INT64_MAX && strcmp(p->words[i].name, name) == 0)
            return true;
    return false;
}

/* Some word may mean a stream, or everything. */
static bool may_drop_streams(const struct policy *p)
{
    bool may = has_word(p, "mhc") || has_word(p, "full");
    for (int i = 0; i < p->n_words; i++)
        may |= strchr(p->words[i].name, '*') != NULL || strstr(p->words[i].name, "joint.stream") != NULL;
    return may;
}

/* Without a number of layers, "mhc" makes a part of the model one block, as it does in Megatron. */
static struct stream_policy read_streams(const struct policy *p, const struct config *c, int n_layers)
{
    const char *block = c->plan.recompute_block;
    struct stream_policy s = {.stay = strcmp(block, "off") == 0 && !may_drop_streams(p)};
    s.by_unit = parse_i64(block, &s.every);
    if (strcmp(block, "auto") == 0)
        s.every = mhc_block_layers(c->model.mhc_streams, n_layers);
    else if (!s.by_unit)
        s.every = has_word(p, "mhc") ? INT64_MAX : 0;
    return s;
}

int policy_read(struct policy *p, const struct config *c, int n_layers, struct err *e)
{
    *p = (struct policy){0};
    bool standard = c->plan.recompute_granularity == CFG_GRANULARITY_SELECTIVE && c->plan.recompute[0] == '\0';
    if (c->plan.recompute_granularity == CFG_GRANULARITY_FULL)
        TRY(read_words(p, "full", e));
    TRY(read_words(p, standard ? "core_attn" : c->plan.recompute, e));
    p->streams = read_streams(p, c, n_layers);
    return ST_OK;
}

void policy_release(struct policy *p)
{
    free(p->words);
    *p = (struct policy){0};
}

/* ---- applying -------------------------------------------------------------------------------- */

int policy_drop(const struct policy_word *w, struct graph *g)
{
    const struct recompute_group *group;
    int matched = graph_drop(g, w->name, w->layers);
    for (int k = 0; (group = kind_recompute(w->name, k)) != NULL; k++)
        for (int i = 0; i < RECOMPUTE_MAX_MEMBERS && group->members[i] != NULL; i++)
            matched += graph_drop(g, group->members[i], w->layers);
    return matched;
}

int policy_unknown(const struct policy_word *w, const struct graph *g, struct err *e)
{
    struct buf names;
    buf_init(&names, 400);
    graph_droppable(g, &names);
    err_set(e, ST_USAGE, "plan.recompute: '%s' names no slot of this model that can be recomputed", w->name);
    err_hint(e, "valid here: %sfull, globs such as mlp.*, and Megatron's names such as core_attn",
             names.text ? names.text : "");
    buf_release(&names);
    return ST_USAGE;
}
