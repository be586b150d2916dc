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
    int *rebuilt;  /* [slot * n_mb + mb] instance made by a replay, -1: none yet; persistent: 1 once mb wrote it */
    bool *done;    /* [(node * PH_COUNT + phase) * n_mb + mb] is in the list */
    int *owner;    /* [slot] persistent: microbatch that last wrote it, -1: none */
    int *step_of;  /* [entry of the order] its step */
    int *clock;    /* [step * LANE_COUNT + lane] highest position on that lane known to be done */
    struct err *e;
};

/* expand.c: steps and instances from the order, replays inserted. */
int plan_expand(struct builder *b, const struct order *o);
/* waits.c: dependencies, waits between lanes, clocks. */
int plan_waits(struct builder *b);
/* place.c: frames, workspace, host memory, in-place pairs. */
int plan_place(struct builder *b);

/* schedule_overlap.c: units of a schedule as nodes of a graph. A chunk's nodes, and where exchanges cut them. */
struct layer_cut {
    int in, core, out, end; /* first positions of the parts, in nodes[] */
};
struct chunk_cut {
    int *nodes; /* in declared order, without host nodes */
    int n_nodes;
    size_t cap_nodes;
    struct layer_cut *cut;
    int n_cuts;
    size_t cap_cuts;
};
struct cutter {
    const struct graph *g;
    struct schedule_opts o;
    struct chunk_cut *chunk; /* [vpp] */
    bool *grown;             /* [slot] scratch: backward of a chunk adds to it */
    struct order *out;
    struct err *e;
};
int cutter_open(struct cutter *c, const struct graph *g, const struct schedule_opts *o, struct order *out,
                struct err *e);
void cutter_close(struct cutter *c);
int cutter_forward(struct cutter *c, const struct schedule_unit *u);
int cutter_backward(struct cutter *c, const struct schedule_unit *u);
/* Forward unit f and backward unit b, of different microbatches, as one. */
int cutter_pair(struct cutter *c, const struct schedule_unit *f, const struct schedule_unit *b);

/* graph.c: does a name of a policy mean the slots with this tag? */
bool slot_name_matches(const char *name, const char *tag);

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
