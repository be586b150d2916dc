/* Backward phases that lead to nothing. The gradient of a frozen parameter is unwanted; a phase that only helps to make
 * such gradients (all layers in front of the first trained one) is removed, and what it would have read need not be
 * saved. */
#include "plan/plan.h"

#include <stdlib.h>

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

/* Whatever it writes or adds to is dropped when the step ends, and nobody else reads it. */
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
