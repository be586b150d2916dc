/* Declarations of slots and nodes; see graph.h. The first failure is kept and later calls do nothing, so
 * that layers read as a list of declarations, and graph_check() tells at the end. */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

const char *lane_name(int lane)
{
    static const char *const names[LANE_COUNT] = {"compute", "side", "comm", "copy", "update"};
    return lane >= 0 && lane < LANE_COUNT ? names[lane] : "?";
}

const char *phase_name(enum phase_id p)
{
    static const char *const names[PH_COUNT] = {"fwd", "bwd", "dw", "replay"};
    return (unsigned)p < PH_COUNT ? names[p] : "?";
}

void graph_init(struct graph *g, const struct ops *ops)
{
    *g = (struct graph){.layer = -1, .scope = "", .ops = ops};
    arena_init(&g->text);
}

void graph_release(struct graph *g)
{
    arena_release(&g->text);
    for (int n = 0; n < g->n_nodes; n++)
        for (enum phase_id ph = 0; ph < PH_COUNT; ph++) {
            free(g->nodes[n].phase[ph].use);
            free(g->nodes[n].phase[ph].call);
        }
    free(g->slots);
    free(g->nodes);
    *g = (struct graph){0};
}

void graph_scope(struct graph *g, int layer, const char *scope)
{
    g->layer = layer;
    g->scope = arena_strdup(&g->text, scope);
    if (g->scope == NULL)
        err_set(&g->err, ST_NOMEM, "out of memory declaring %s", scope);
}

void *graph_own(struct graph *g, size_t bytes)
{
    void *p = arena_alloc(&g->text, bytes);
    if (p == NULL)
        err_set(&g->err, ST_NOMEM, "out of memory declaring a layer");
    return p;
}

static const char *full_name(struct graph *g, const char *tag)
{
    const char *name = g->layer < 0 ? tag : arena_printf(&g->text, "%d.%s", g->layer, tag);
    if (name == NULL)
        err_set(&g->err, ST_NOMEM, "out of memory declaring %s", tag);
    return name;
}

static slot_id add_slot(struct graph *g, const char *name, struct tensor shape, int arena, int64_t offset)
{
    if (g->err.code != ST_OK ||
        mem_grow((void **)&g->slots, &g->cap_slots, (size_t)g->n_slots + 1, sizeof *g->slots, &g->err) != ST_OK)
        return NO_SLOT;
    const char *tag = g->scope[0] ? arena_printf(&g->text, "%s.%s", g->scope, name) : arena_strdup(&g->text, name);
    shape.data = NULL;
    g->slots[g->n_slots] = (struct slot){.tag = tag,
                                         .name = tag ? full_name(g, tag) : NULL,
                                         .layer = g->layer,
                                         .shape = shape,
                                         .arena = arena,
                                         .offset = offset,
                                         .replay = -1,
                                         .sum = arena == ARENA_GRAD};
    return g->n_slots++;
}

slot_id graph_slot(struct graph *g, const char *name, struct tensor shape) { return add_slot(g, name, shape, -1, 0); }

/* The same memory is the same slot: a tied embedding declared by two layers must meet in one place, or
 * its contributions would not be ordered. */
slot_id graph_persistent(struct graph *g, const char *name, struct tensor shape, enum arena_id arena, int64_t offset)
{
    for (int s = 0; s < g->n_slots; s++) {
        if (g->slots[s].arena != (int)arena || g->slots[s].offset != offset)
            continue;
        if (!tensor_same_shape(&g->slots[s].shape, &shape))
            err_set(&g->err, ST_INTERNAL, "slot %s shares its memory with %s but not its shape", name,
                    g->slots[s].name);
        return s;
    }
    return add_slot(g, name, shape, (int)arena, offset);
}

const char *graph_name(struct graph *g, const char *name)
{
    const char *tag = g->scope[0] ? arena_printf(&g->text, "%s.%s", g->scope, name) : name;
    return tag ? full_name(g, tag) : NULL;
}

int graph_node(struct graph *g, const char *name, enum lane_id lane, const void *self)
{
    if (g->err.code != ST_OK ||
        mem_grow((void **)&g->nodes, &g->cap_nodes, (size_t)g->n_nodes + 1, sizeof *g->nodes, &g->err) != ST_OK)
        return -1;
    const char *tag = g->scope[0] ? arena_printf(&g->text, "%s.%s", g->scope, name) : arena_strdup(&g->text, name);
    g->nodes[g->n_nodes] = (struct node){
        .name = tag ? full_name(g, tag) : NULL, .chunk = g->chunk, .layer = g->layer, .lane = lane, .self = self};
    return g->n_nodes++;
}

void graph_phase(struct graph *g, int node, enum phase_id ph, step_fn fn, const struct use *uses, int n)
{
    if (g->err.code != ST_OK || node < 0)
        return;
    struct phase *p = &g->nodes[node].phase[ph];
    if (p->fn != NULL)
        err_set(&g->err, ST_INTERNAL, "node %s, %s: declared twice", g->nodes[node].name, phase_name(ph));
    if (p->fn != NULL || mem_grow((void **)&p->use, &p->cap_uses, (size_t)n, sizeof *p->use, &g->err) != ST_OK)
        return;
    p->fn = fn;
    p->n_uses = n;
    memcpy(p->use, uses, (size_t)n * sizeof *uses);
}

void graph_cost(struct graph *g, int node, enum phase_id ph, double flops, double bytes)
{
    if (g->err.code == ST_OK && node >= 0) {
        g->nodes[node].phase[ph].flops = flops;
        g->nodes[node].phase[ph].bytes = bytes;
    }
}

void graph_host(struct graph *g, int node)
{
    if (g->err.code == ST_OK && node >= 0)
        g->nodes[node].host = true;
}

void graph_role(struct graph *g, int node, enum node_role role)
{
    if (g->err.code == ST_OK && node >= 0)
        g->nodes[node].role = role;
}

static int use_of_slot(const struct phase *p, slot_id slot)
{
    for (int u = 0; u < p->n_uses; u++)
        if (p->use[u].slot == slot)
            return u;
    return -1;
}

void graph_inplace(struct graph *g, int node, enum phase_id ph, slot_id from, slot_id to)
{
    if (g->err.code != ST_OK || node < 0 || from < 0 || to < 0)
        return;
    struct phase *p = &g->nodes[node].phase[ph];
    int from_use = use_of_slot(p, from), to_use = use_of_slot(p, to);
    if (p->n_inplace == NODE_MAX_INPLACE || from_use < 0 || to_use < 0) {
        err_set(&g->err, ST_INTERNAL, "node %s, %s: slots %s and %s cannot be one", g->nodes[node].name, phase_name(ph),
                g->slots[from].name, g->slots[to].name);
        return;
    }
    p->inplace[p->n_inplace].from = from_use;
    p->inplace[p->n_inplace++].to = to_use;
}

void graph_replay(struct graph *g, slot_id slot, int node)
{
    if (g->err.code == ST_OK && slot >= 0 && node >= 0)
        g->slots[slot].replay = node;
}

int graph_check(const struct graph *g, struct err *e)
{
    if (g->err.code != ST_OK) {
        *e = g->err;
        return e->code;
    }
    for (int s = 0; s < g->n_slots; s++) {
        int node = g->slots[s].replay;
        if (node < 0)
            continue;
        const struct phase *p = &g->nodes[node].phase[PH_REPLAY];
        bool writes = false;
        for (int u = 0; u < p->n_uses; u++)
            writes |= p->use[u].slot == s && p->use[u].mode == USE_WRITE;
        if (p->fn == NULL || !writes)
            return err_set(e, ST_INTERNAL, "slot %s names node %s as its replay, which does not write it",
                           g->slots[s].name, g->nodes[node].name);
    }
    return ST_OK;
}

/* ---- what is recomputed ---------------------------------------------------------------------- */

/* The FP8 codes of a slot ("joint.norm.codes_t") are matched by the name of the slot. */
static const char *without_codes(const char *tag, char *out, size_t size)
{
    static const char *const parts[] = {".codes", ".scales", ".codes_t", ".scales_t"};
    size_t n = strlen(tag);
    for (int i = 0; i < countof(parts); i++) {
        size_t m = strlen(parts[i]);
        if (n > m && n - m < size && strcmp(tag + n - m, parts[i]) == 0) {
            memcpy(out, tag, n - m);
            out[n - m] = '\0';
            return out;
        }
    }
    return tag;
}

/* A name matches a tag as a glob, as a whole scope ("mlp"), or as the last part ("norm"). Streams between layers are
 * not part of "full": dropping them needs blocks. */
bool slot_name_matches(const char *name, const char *whole)
{
    char base[128];
    const char *tag = without_codes(whole, base, sizeof base);
    if (tag != whole && str_glob(name, whole))
        return true;
    size_t n = strlen(name);
    const char *dot = strrchr(tag, '.');
    if (strcmp(name, "full") == 0)
        return !str_glob("joint.stream*", tag);
    return str_glob(name, tag) || (strncmp(name, tag, n) == 0 && tag[n] == '.') ||
           (dot != NULL && strcmp(dot + 1, name) == 0);
}

int graph_drop(struct graph *g, const char *name, int64_t layers)
{
    int matched = 0;
    for (int s = 0; s < g->n_slots; s++) {
        struct slot *slot = &g->slots[s];
        if (slot->replay >= 0 && !slot->weight && slot->layer < layers && slot_name_matches(name, slot->tag)) {
            slot->dropped = true;
            matched++;
        }
    }
    return matched;
}

void graph_droppable(const struct graph *g, struct buf *out)
{
    for (int s = 0; s < g->n_slots; s++) {
        bool seen = g->slots[s].replay < 0 || g->slots[s].weight;
        for (int k = 0; k < s && !seen; k++)
            seen = g->slots[k].replay >= 0 && strcmp(g->slots[k].tag, g->slots[s].tag) == 0;
        if (!seen)
            buf_addf(out, "%s, ", g->slots[s].tag);
    }
}
