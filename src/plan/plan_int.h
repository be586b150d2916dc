/* Private to plan/: what the passes of plan_build() hand to one another. */
#ifndef BRAID_PLAN_INT_H
#define BRAID_PLAN_INT_H

#include "plan/plan.h"

struct builder {
    struct plan *p;
    const struct graph *g;
    int n_mb;
    size_t cap_steps, cap_inst;
    int *original; /* [slot * n_mb + mb] instance of the forward (or only) life, -1: none yet */
    int *rebuilt;  /* [slot * n_mb + mb] instance made by a replay, -1: none yet */
    int *clock;    /* [step * LANE_COUNT + lane] highest position on that lane known to be done */
    struct err *e;
};

/* expand.c: steps and instances from the order, replays inserted. */
int plan_expand(struct builder *b, const struct order *o);
/* waits.c: dependencies, waits between lanes, clocks. */
int plan_waits(struct builder *b);
/* place.c: frames, workspace, in-place pairs. */
int plan_place(struct builder *b);

static inline const struct phase *step_phase(const struct plan *p, const struct step *s)
{
    return &p->g->nodes[s->ref.node].phase[s->ref.phase];
}

/* The buffer an instance lives in, when it was placed over another. */
static inline int root_of(const struct plan *p, int inst)
{
    while (p->inst[inst].merged >= 0)
        inst = p->inst[inst].merged;
    return inst;
}

#endif
