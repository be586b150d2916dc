/* The time that a schedule takes, predicted without running it. Used by the tests of schedules and by sim/. */
#ifndef BRAID_PLAN_SIMULATE_H
#define BRAID_PLAN_SIMULATE_H

#include "plan/plan.h"

/* Tasks of several ranks on their lanes. A lane works in order; a task starts when its waits are done. */
enum sim_kind {
    SIM_WORK,
    SIM_SEND,  /* does not wait for its receiver */
    SIM_RECV,  /* ends when the send with its key has, and its own time is over */
    SIM_GROUP, /* all tasks with its key start together */
};
struct sim_task {
    int lane;
    enum sim_kind kind;
    int64_t key;
    double seconds;
    int n_waits, wait[STEP_MAX_WAITS]; /* earlier tasks of the same rank */
    int frame, phase;                  /* whose saved slots it uses (chunk * n_mb + mb), -1: none; enum phase_id */
    const char *name;
    bool works;               /* it computes, whatever its lane */
    double ready, start, end; /* found: when its rank alone would let it start, when it started, when it was done */
};
struct sim_rank {
    struct sim_task *task;
    int n;
    size_t cap;
    int n_frames;
    /* found */
    double busy[LANE_COUNT];
    double exposed[PH_COUNT]; /* seconds in which data was moved and nothing was computed, by phase */
    double idle;              /* seconds in which nothing was computed or moved: bubbles, latency */
    int peak_frames;          /* frames alive at the same time */
};
struct sim {
    struct sim_rank *rank;
    int n_ranks;
    bool in_list_order; /* one thing at a time, in the order of the list, as host devices run */
    double makespan;
};
int sim_open(struct sim *s, int n_ranks, struct err *e);
void sim_close(struct sim *s);
int sim_add(struct sim *s, int rank, const struct sim_task *t, struct err *e);
/* The units of stage o->pp_rank (which is its rank), each one task; seconds of a forward and of a backward unit. */
int sim_add_units(struct sim *s, const struct schedule_opts *o, const struct schedule_units *units, double forward,
                  double backward, struct err *e);
/* The steps of a plan; `seconds` gives the time of one. Cuts (ROLE_CUT_*) become messages between the stages,
 * dispatches and combines meet within ranks of the same group, messages of context parallelism within those of the same
 * line, rows of tensor-parallel ranks within the same team (-1: each alone). */
struct sim_place {
    int rank, pp, pp_rank, vpp, group, line, team;
};
typedef double (*sim_seconds)(const void *ctx, const struct plan *p, int step);
int sim_add_plan(struct sim *s, const struct sim_place *at, const struct plan *p, sim_seconds seconds, const void *ctx,
                 struct err *e);
/* Fills in the times and results of each rank; ranks that wait for each other in a cycle are an error that names
 * them. */
int sim_run(struct sim *s, struct err *e);

#endif
