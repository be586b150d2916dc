/* Running a plan on a device, step by step or as a captured piece, and the trace of its steps. */
#ifndef BRAID_PLAN_EXEC_H
#define BRAID_PLAN_EXEC_H

#include "plan/plan.h"

struct trace;
/* A plan that a device runs as one captured piece; gradients overwritten or added to are two of them. */
struct captured {
    const struct plan *p;
    bool first_mb, last_mb;
    void *piece; /* NULL until the plan has run once step by step */
};
struct exec {
    struct dev *dev;
    const struct ops *ops;
    struct lane lane[LANE_COUNT];
    bool poison;           /* fill dead slots with NaN as soon as their last use is done */
    uint64_t random_lanes; /* nonzero: a random legal interleaving of the lanes, seeded */
    bool find_nan;         /* stop at the first step with a non-finite output */
    bool sync;             /* wait for the device after each step, so that a fault names its node */
    bool capture;          /* run plans as captured pieces where the device can */
    struct captured *captured;
    int n_captured;
    size_t cap_captured;
    struct trace *trace; /* or NULL */
    struct err err;      /* where ops put their messages */
    int *uses_left;      /* scratch for poison and random order, sized by exec_prepare */
    size_t cap_uses_left;
    int *lane_next;
    size_t cap_lane_next;
    bool *add; /* by use of the running step */
    size_t cap_add;
    uint64_t draws;
};
void exec_init(struct exec *x, struct dev *dev);
void exec_release(struct exec *x);
/* Scratch for this plan, so that exec_run never allocates. */
int exec_prepare(struct exec *x, const struct plan *p, struct err *e);
/* run: an array of one per microbatch of the plan (p->n_mb). run[0].first_mb counts for all of them: the first
 * contribution of the plan to a persistent sum overwrites it, later ones add. */
int exec_run(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e);

/* Chrome / Perfetto trace of steps: lanes as threads, waits as arguments. Memory for max_events is allocated at once;
 * later events are counted, not kept. */
int trace_open(struct trace **out, int max_events, struct err *e);
void trace_add(struct trace *t, const struct plan *p, int step, double begin, double end);
int trace_write(const struct trace *t, const char *path, struct err *e);
/* Time by node, whatever its layer, largest first: name and phase, calls, milliseconds, share, TFLOP/s. */
int trace_table(const struct trace *t, struct buf *out, struct err *e);
/* Event i, in the order they were kept; false past the last. */
struct trace_step {
    const struct plan *p;
    int step;
    double seconds;
};
bool trace_get(const struct trace *t, int i, struct trace_step *out);
void trace_close(struct trace *t);

#endif
