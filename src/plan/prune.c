/* Results and backward phases that lead to nothing. The gradient of a frozen parameter is unwanted; a phase that only
 * helps to make such gradients (all layers in front of the first trained one) is removed, and what it would have read
 * need not be saved. */
#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

/* A compute phase has no effect beyond its results. */
static bool removable(const struct node *n, enum phase_id ph)
{
    return (ph == PH_BWD || ph == PH_DW) && (n->lane == LANE_COMPUTE || n->lane == LANE_SIDE) && !n->host;
}

static bool reads(const struct use *u) { return u->mode == USE_READ || u->reads; }

/* How many phases read each slot; what cannot be removed counts as reading all it uses. */
static void count_readers(const struct graph *g, int *readers)
{
    for (int s = 0; s < g->n_slots; s++)
        readers[s] = 0;
    for (int n = 0; n < g->n_nodes; n++)
        for (int ph = 0; ph < PH_COUNT; ph++) {
            const struct phase *p = &g->nodes[n].phase[ph];
            for (int u = 0; p->fn != NULL && u < p->n_uses; u++)
                if (p->use[u].slot >= 0 && (reads(&p->use[u]) || !removable(&g->nodes[n], (enum phase_id)ph)))
                    readers[p->use[u].slot]++;
        }
}

/* Whatever it writes or adds to is dropped when the step ends, and nothing else reads it. */
static bool leads_nowhere(const struct graph *g, const struct phase *p, const int *readers)
{
    for (int u = 0; u < p->n_uses; u++) {
        const struct use *x = &p->use[u];
        if (x->slot >= 0 && x->mode != USE_READ && (g->slots[x->slot].arena >= 0 || readers[x->slot] > reads(x)))
            return false;
    }
    return true;
}

int graph_prune(struct graph *g, struct err *e)
{
    bool unwanted = false;
    int *readers = NULL;
    for (int s = 0; s < g->n_slots; s++)
        unwanted |= g->slots[s].unwanted;
    if (!unwanted)
        return ST_OK;
    TRY(mem_array((void **)&readers, (size_t)g->n_slots, sizeof *readers, e));
    for (bool again = true; again;) {
        again = false;
        count_readers(g, readers);
        for (int n = g->n_nodes - 1; n >= 0; n--)
            for (int ph = 0; ph < PH_COUNT; ph++) {
                struct phase *p = &g->nodes[n].phase[ph];
                if (p->fn == NULL || !removable(&g->nodes[n], (enum phase_id)ph) || !leads_nowhere(g, p, readers))
                    continue;
                p->fn = NULL;
                again = true;
            }
    }
    free(readers);
    return ST_OK;
}

/* ---- optional results ------------------------------------------------------------------------ */

void graph_optional(struct graph *g, slot_id slot)
{
    if (g->err.code == ST_OK && slot >= 0)
        g->slots[slot].optional = true;
}

static bool is_read(const struct graph *g, slot_id slot)
{
    for (int n = 0; n < g->n_nodes; n++)
        for (int ph = 0; ph < PH_COUNT; ph++) {
            const struct phase *p = &g->nodes[n].phase[ph];
            for (int u = 0; p->fn != NULL && u < p->n_uses; u++)
                if (p->use[u].slot == slot && reads(&p->use[u]))
                    return true;
        }
    return false;
}

/* Field i of the call becomes absent, if its op allows that. */
static void unbind(struct op_bound *call, int i)
{
    union {
        char bytes[OP_ARGS_BYTES];
        struct tensor align;
    } less;
    struct err why = {0};
    const struct op_arg *f = &call->op->args[call->field[i].field];
    memcpy(less.bytes, call->args, call->op->args_bytes);
    *(struct tensor *)(less.bytes + f->at) = (struct tensor){0};
    if (f->role != ARG_OOUT || call->op->check(less.bytes, &why) != ST_OK)
        return;
    memcpy(call->args, less.bytes, call->op->args_bytes);
    memmove(&call->field[i], &call->field[i + 1], (size_t)(call->n_fields - i - 1) * sizeof *call->field);
    call->n_fields--;
}

/* A use that no field of the phase is bound to any more stands for nothing. */
static void leave_out(struct phase *p, slot_id slot)
{
    for (int u = 0; u < p->n_uses; u++) {
        bool bound = false;
        if (p->use[u].slot != slot)
            continue;
        for (int k = 0; k < p->n_calls; k++) {
            for (int i = p->call[k].n_fields - 1; i >= 0; i--)
                if (p->call[k].field[i].use == u)
                    unbind(&p->call[k], i);
            for (int i = 0; i < p->call[k].n_fields; i++)
                bound |= p->call[k].field[i].use == u;
        }
        if (p->n_calls > 0 && !bound)
            p->use[u].slot = NO_SLOT;
    }
}

void graph_trim(struct graph *g)
{
    for (int s = 0; s < g->n_slots; s++)
        if (g->slots[s].optional && !is_read(g, s))
            for (int n = 0; n < g->n_nodes; n++)
                if (g->nodes[n].phase[PH_FWD].n_inplace == 0)
                    leave_out(&g->nodes[n].phase[PH_FWD], s);
}
