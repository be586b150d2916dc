/* plan_build(): the passes in order; binding addresses; totals. */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

static int count_microbatches(const struct order *o)
{
    int n = 1;
    for (int i = 0; i < o->n; i++)
        n = o->list[i].mb + 1 > n ? o->list[i].mb + 1 : n;
    return n;
}

int plan_build(struct plan *p, const char *name, const struct graph *g, const struct order *o, struct err *e)
{
    *p = (struct plan){.name = name, .g = g};
    TRY(graph_check(g, e));
    struct builder b = {.p = p, .g = g, .n_mb = count_microbatches(o), .e = e};
    p->n_mb = b.n_mb;
    size_t lives = (size_t)g->n_slots * (size_t)b.n_mb;
    int st;
    TRY_OUT(mem_array((void **)&b.original, lives, sizeof *b.original, e));
    TRY_OUT(mem_array((void **)&b.rebuilt, lives, sizeof *b.rebuilt, e));
    TRY_OUT(mem_array((void **)&b.owner, (size_t)g->n_slots + 1, sizeof *b.owner, e));
    TRY_OUT(mem_array((void **)&b.done, (size_t)g->n_nodes * PH_COUNT * (size_t)b.n_mb + 1, sizeof *b.done, e));
    TRY_OUT(mem_array((void **)&b.step_of, (size_t)o->n + 1, sizeof *b.step_of, e));
    memset(b.step_of, 0xFF, ((size_t)o->n + 1) * sizeof *b.step_of);
    memset(b.original, 0xFF, lives * sizeof *b.original);
    memset(b.owner, 0xFF, ((size_t)g->n_slots + 1) * sizeof *b.owner);
    memset(b.rebuilt, 0xFF, lives * sizeof *b.rebuilt);
    TRY_OUT(plan_expand(&b, o));
    TRY_OUT(plan_waits(&b));
    TRY_OUT(plan_place(&b));
out:
    free(b.original);
    free(b.rebuilt);
    free(b.owner);
    free(b.done);
    free(b.step_of);
    free(b.clock);
    if (st != ST_OK) {
        err_in(e, "planning '%s'", name);
        plan_release(p);
    }
    return st;
}

void plan_release(struct plan *p)
{
    free(p->steps);
    free(p->inst);
    arena_release(&p->lists);
    *p = (struct plan){0};
}

int plan_bind(struct plan *p, const struct memory *m, struct err *e)
{
    for (int i = 0; i < p->n_steps; i++) {
        struct step *s = &p->steps[i];
        for (int u = 0; u < step_phase(p, s)->n_uses; u++) {
            if (s->instance[u] < 0) {
                s->t[u] = (struct tensor){0};
                continue;
            }
            const struct instance *x = &p->inst[s->instance[u]];
            if (m->base[x->arena] == NULL || x->offset < 0 || x->offset + x->bytes > m->allocated[x->arena])
                return err_set(e, ST_INTERNAL, "plan '%s': slot %s lies outside arena %s (%lld + %lld of %lld)",
                               p->name, p->g->slots[x->slot].name, arena_name(x->arena), (long long)x->offset,
                               (long long)x->bytes, (long long)m->allocated[x->arena]);
            s->t[u] = p->g->slots[x->slot].shape;
            s->t[u].data = m->base[x->arena] + x->offset;
        }
    }
    return ST_OK;
}

double plan_flops(const struct plan *p)
{
    double sum = 0;
    for (int i = 0; i < p->n_steps; i++)
        sum += step_phase(p, &p->steps[i])->flops;
    return sum;
}
