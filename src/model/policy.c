/* Reading and applying policies of activations; see policy.h. */
#include "model/policy.h"

#include <stdlib.h>
#include <string.h>

/* ---- reading --------------------------------------------------------------------------------- */

static const char *option_of(const struct policy_word *w) { return w->offload ? "plan.offload" : "plan.recompute"; }

/* NAME:N, only in the first N layers: the name is cut off there; otherwise every layer. */
static int read_layers(struct policy_word *w, struct err *e)
{
    char *colon = strchr(w->name, ':');
    w->layers = INT64_MAX;
    if (colon == NULL)
        return ST_OK;
    if (!parse_i64(colon + 1, &w->layers) || w->layers < 1)
        return err_set(e, ST_USAGE, "%s: '%s' must end in a number of layers of at least 1, such as norm:12",
                       option_of(w), w->name);
    *colon = '\0';
    return ST_OK;
}

static int read_words(struct policy *p, const char *text, bool offload, struct err *e)
{
    for (const char *s = text; *s != '\0';) {
        size_t n = strcspn(s, ", ");
        struct policy_word empty = {.offload = offload};
        if (n >= POLICY_NAME)
            return err_set(e, ST_USAGE, "%s: the name '%.60s...' is too long", option_of(&empty), s);
        if (n > 0) {
            TRY(mem_grow((void **)&p->words, &p->cap, (size_t)p->n_words + 1, sizeof *p->words, e));
            struct policy_word *w = &p->words[p->n_words++];
            *w = empty;
            memcpy(w->name, s, n);
            TRY(read_layers(w, e));
        }
        s += n + (s[n] != '\0');
    }
    return ST_OK;
}

/* Text that is there, but has nothing in it ("," or " "), was meant to name something. */
static int read_option(struct policy *p, const char *text, bool offload, struct err *e)
{
    int before = p->n_words;
    TRY(read_words(p, text, offload, e));
    if (text[0] == '\0' || p->n_words > before)
        return ST_OK;
    struct policy_word w = {.offload = offload};
    err_set(e, ST_USAGE, "%s: '%.60s' names nothing", option_of(&w), text);
    return err_hint(e, "write names with commas between them, such as %s, or leave %s out",
                    offload ? "joint.stream,mlp.*" : "norm,mlp.*", option_of(&w));
}

/* The word is there, to recompute, and means every layer. */
static bool has_word(const struct policy *p, const char *name)
{
    for (int i = 0; i < p->n_words; i++)
        if (!p->words[i].offload && p->words[i].layers == INT64_MAX && strcmp(p->words[i].name, name) == 0)
            return true;
    return false;
}

/* Some word may mean a stream, or everything; any word of plan.offload may. */
static bool may_drop_streams(const struct policy *p)
{
    bool may = has_word(p, "mhc") || has_word(p, "full");
    for (int i = 0; i < p->n_words; i++)
        may |= p->words[i].offload || strchr(p->words[i].name, '*') != NULL ||
               strstr(p->words[i].name, "joint.stream") != NULL;
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
        TRY(read_words(p, "full", false, e));
    TRY(read_option(p, standard ? "core_attn" : c->plan.recompute, false, e));
    TRY(read_option(p, c->plan.offload, true, e));
    p->streams = read_streams(p, c, n_layers);
    return ST_OK;
}

void policy_release(struct policy *p)
{
    free(p->words);
    *p = (struct policy){0};
}

/* ---- applying -------------------------------------------------------------------------------- */

static int mark(const struct policy_word *w, const char *name, const char *beside, struct graph *g)
{
    return w->offload ? graph_offload(g, name, beside, w->layers) : graph_drop(g, name, w->layers);
}

/* What Megatron's names of offloaded modules mean here: the slots that such a module keeps of its input. */
static const struct {
    const char *name, *slot, *beside;
} modules[] = {
    {"attn_norm", "joint.stream", "attn.*"},
    {"attn_norm", "joint.stream", "mla.*"},
    {"attn_norm", "joint.stream", "dsa.*"},
    {"attn_norm", "joint.stream", "csa.*"},
    {"mlp_norm", "joint.stream", "mlp.*"},
    {"mlp_norm", "joint.stream", "moe.*"},
    {"qkv_linear", "joint.norm", "attn.*"},
    {"qkv_linear", "joint.norm", "mla.*"},
    {"qkv_linear", "joint.norm", "dsa.*"},
    {"qkv_linear", "joint.norm", "csa.*"},
    {"core_attn", "attn.qkv", NULL},
    {"core_attn", "attn.o", NULL},
    {"core_attn", "mla.q", NULL},
    {"core_attn", "mla.k", NULL},
    {"core_attn", "mla.kv", NULL},
    {"core_attn", "mla.o", NULL},
    {"core_attn", "dsa.q", NULL},
    {"core_attn", "dsa.k", NULL},
    {"core_attn", "dsa.kv", NULL},
    {"core_attn", "dsa.q_absorbed", NULL},
    {"core_attn", "dsa.keys", NULL},
    {"core_attn", "dsa.o_latent", NULL},
    {"core_attn", "dsa.o", NULL},
    {"core_attn", "csa.q", NULL},
    {"core_attn", "csa.kv", NULL},
    {"core_attn", "csa.keys", NULL},
    {"core_attn", "csa.o", NULL},
    {"attn_proj", "attn.o", NULL},
    {"attn_proj", "mla.o", NULL},
    {"attn_proj", "dsa.o", NULL},
    {"attn_proj", "csa.o_low", NULL},
    {"expert_fc1", "joint.norm", "moe.*"},
    {"moe_act", "moe.pre", NULL},
    {"mhc", "joint.stream", NULL},
};

int policy_mark(const struct policy_word *w, struct graph *g)
{
    const struct recompute_group *group;
    int matched = 0;
    bool module = false;
    for (int i = 0; w->offload && i < countof(modules); i++)
        if (strcmp(w->name, modules[i].name) == 0) {
            module = true;
            matched += mark(w, modules[i].slot, modules[i].beside, g);
        }
    if (module)
        return matched;
    matched = mark(w, w->name, NULL, g);
    for (int k = 0; (group = kind_recompute(w->name, k)) != NULL; k++)
        for (int i = 0; i < RECOMPUTE_MAX_MEMBERS && group->members[i] != NULL; i++)
            matched += mark(w, group->members[i], NULL, g);
    return matched;
}

int policy_unknown(const struct policy_word *w, const struct graph *g, struct err *e)
{
    struct buf names;
    char where[64] = "this model";
    buf_init(&names, 400);
    if (w->layers != INT64_MAX)
        snprintf(where, sizeof where, "the first %lld layers of this model", (long long)w->layers);
    if (w->offload) {
        err_set(e, ST_USAGE, "plan.offload: '%s' names no slot of %s", w->name, where);
        return err_hint(e, "`braid plan` lists the saved slots; valid are their names, globs such as joint.* or *, and "
                           "Megatron's names such as core_attn and mlp_norm");
    }
    graph_droppable(g, &names);
    err_set(e, ST_USAGE, "plan.recompute: '%s' names no slot of %s that can be recomputed", w->name, where);
    err_hint(e, "valid here: %sfull, globs such as mlp.*, and Megatron's names such as core_attn",
             names.text ? names.text : "");
    buf_release(&names);
    return ST_USAGE;
}

int policy_moves_nothing(const struct config *c, const struct offload_count *count, struct err *e)
{
    err_set(e, ST_USAGE,
            "plan.offload=%s moves nothing: of %d slots, %d are recomputed, %d have fewer than plan.offload_min=%lld "
            "elements and the others are not kept for the backward pass",
            c->plan.offload, count->named, count->recomputed, count->small, (long long)c->plan.offload_min);
    return err_hint(e, "`braid plan` lists the saved slots with their sizes");
}
