/* Orders of steps, and the plain schedule every other one must equal bit for bit. */
#include "plan/plan.h"

#include <stdlib.h>

int order_add(struct order *o, int node, enum phase_id ph, int mb, struct err *e)
{
    TRY(mem_grow((void **)&o->list, &o->cap, (size_t)o->n + 1, sizeof *o->list, e));
    o->list[o->n++] = (struct step_ref){.node = node, .phase = ph, .mb = mb};
    return ST_OK;
}

void order_release(struct order *o)
{
    free(o->list);
    *o = (struct order){0};
}

/* dw of nodes [from, to) that have not run, in backward order. */
static int flush_dw(const struct graph *g, int from, int to, struct order *o, struct err *e)
{
    for (int n = to - 1; n >= from; n--)
        if (g->nodes[n].phase[PH_DW].fn != NULL)
            TRY(order_add(o, n, PH_DW, 0, e));
    return ST_OK;
}

int schedule_plain(const struct graph *g, bool delay_dw, struct order *o, struct err *e)
{
    for (int n = 0; n < g->n_nodes; n++)
        if (g->nodes[n].phase[PH_FWD].fn != NULL)
            TRY(order_add(o, n, PH_FWD, 0, e));
    int pending = g->n_nodes; /* nodes [n, pending) have run backward but not dw */
    for (int n = g->n_nodes - 1; n >= 0; n--) {
        if (g->nodes[n].phase[PH_BWD].fn != NULL)
            TRY(order_add(o, n, PH_BWD, 0, e));
        bool layer_ends = n == 0 || g->nodes[n - 1].layer != g->nodes[n].layer;
        if (!delay_dw || layer_ends) {
            TRY(flush_dw(g, n, pending, o, e));
            pending = n;
        }
    }
    return ST_OK;
}
