/* Predicted time of a step of all ranks, without running it: every rank is planned without memory, its steps get times,
 * and the simulator (plan/simulate.h) lets them wait for each other. Times of computing are predicted for a stated
 * machine or measured on this one. */
#ifndef BRAID_TIMELINE_H
#define BRAID_TIMELINE_H

#include "plan/simulate.h"
#include "train/train.h"

/* What a prediction assumes. */
struct machine {
    double flops; /* FLOP/s that GEMMs reach */
    /* FLOP/s of attention over long sequences; over `ramp` tokens it reaches half of that */
    double attention, attention_back, attention_ramp;
    double bandwidth;        /* bytes/s of memory, read and written */
    double node;             /* seconds a node takes at least: launches */
    double link, link_delay; /* bytes/s out of one GPU to other machines; seconds until a message starts to arrive */
    double inner;            /* bytes/s between GPUs of one machine */
    int gpus;                /* of one machine */
    double host;             /* bytes/s between one GPU and pinned host memory, one way at a time */
    double beside;           /* computing takes this share longer while the link is busy */
    double memory;           /* bytes of one GPU */
};
struct machine machine_h200(void);
void machine_print(const struct machine *m, bool measured, struct buf *out);

/* Times of nodes on this machine, by name and phase. */
struct node_times;
/* Runs a few traced steps of one rank with the whole model (`alone`: a config of one rank, whose experts exchange rows
 * with themselves). */
int node_times_measure(struct node_times **out, const struct config *alone, struct err *e);
void node_times_close(struct node_times *t);
/* Seconds of a step, of whose work `share` is done; false where that node was not seen. */
bool node_times_get(const struct node_times *t, const struct plan *p, int step, double share, double *seconds);

/* What a task does; those from KIND_DISPATCH on move data. */
enum task_kind {
    KIND_FORWARD,
    KIND_BACKWARD,
    KIND_DW,
    KIND_REPLAY,
    KIND_UPDATE,
    KIND_DISPATCH,
    KIND_COMBINE,
    KIND_CUT,
    KIND_REDUCE,
    KIND_GATHER,
    KIND_CONTEXT,
    KIND_ROWS,    /* of the residual stream between tensor-parallel ranks */
    KIND_HOST,    /* offloaded slots to host memory and back */
    KIND_SUMMARY, /* counts, norms: a few numbers */
    KIND_COUNT,
};
const char *task_kind_name(enum task_kind k);

struct task_mark {
    enum task_kind kind;
    int mb, chunk;
};
/* One of the two halves of a step: all microbatches, or the update that follows when every rank is done. */
struct timeline_half {
    struct sim sim;
    struct task_mark **mark; /* of each rank's tasks */
    size_t *cap;
};
struct timeline_rank {
    struct trainer t;            /* planned, not run: names and shapes of the tasks */
    int64_t persistent, working; /* bytes of training: weights, gradients, moments; frames and workspace */
    int64_t host;                /* bytes of host memory */
    /* found: seconds */
    /* by kind, those that move data: while nothing was computed, in all */
    double exposed[KIND_COUNT], moved[KIND_COUNT];
    double bubble;
};
struct timeline {
    const struct config *cfg;
    struct machine machine;
    const struct node_times *times; /* or NULL */
    bool column;                    /* one rank of each stage stands for its stage */
    int n;
    struct timeline_rank *rank;
    struct timeline_half train, update;
    double seconds, tflops; /* of a step; model TFLOP/s of a GPU */
};
/* All ranks, or if they are many the first of each stage. */
int timeline_open(struct timeline *tl, const struct config *cfg, const struct machine *m,
                  const struct node_times *times, struct err *e);
void timeline_close(struct timeline *tl);
/* One half alone, for comparisons in which the other is known. */
int timeline_open_train(struct timeline *tl, const struct config *cfg, const struct machine *m, struct err *e);
int timeline_open_update(struct timeline *tl, const struct config *cfg, const struct machine *m, struct err *e);

/* Seconds of a step of a plan (`ctx` is a struct step_cost). */
struct step_cost {
    const struct machine *m;
    const struct node_times *times;
    const struct trainer *t;
    int64_t places, rows;       /* places in all buffers of this rank, and for rows at its experts */
    double filled, rows_filled; /* the share of them that an even routing fills */
    bool first_mb, last_mb; /* a run of the plan begins or ends a step: what is exchanged once per step counts then */
};
struct step_cost step_cost_of(const struct machine *m, const struct node_times *times, const struct trainer *t);
double step_seconds(const void *ctx, const struct plan *p, int step);
enum task_kind step_kind(const struct plan *p, int step);

/* ---- showing --------------------------------------------------------------------------------- */

/* Table by rank: time, exposed communication by kind, bubbles, memory. */
void timeline_print(const struct timeline *tl, struct buf *out);
void timeline_svg(const struct timeline *tl, struct buf *out);
void timeline_trace(const struct timeline *tl, struct buf *out); /* Perfetto */

/* The pattern cut into vpp segments for each of pp stages, so that the busiest stage has as little work as possible;
 * what follows the last layer counts for the last stage, whose last segment may be empty. extra: what a layer of
 * experts does beyond its FLOPs (of a token, forward). */
int timeline_cut_pattern(const struct config *cfg, int pp, int vpp, double extra, struct buf *out, struct err *e);
/* The seconds that `ranks` ranks, `stride` apart, take to send each other their shares of the bytes. */
double machine_exchange(const struct machine *m, int ranks, int stride, double bytes);

#endif
