/* Orders, schedules and the plan made of a graph (graph.h): a flat list of steps with waits between lanes and an
 * address for every slot. exec.h runs it, simulate.h predicts its time. */
#ifndef BRAID_PLAN_H
#define BRAID_PLAN_H

#include "plan/graph.h"

/* ---- order ----------------------------------------------------------------------------------- */

struct step_ref {
    int node;
    enum phase_id phase;
    int mb;    /* microbatch of the run, 0-based */
    int after; /* orders: position + 1 of an earlier entry that must be done first, though no slot says so; 0: none */
    int after_copy; /* another such entry: what bounds the memory of copies to and from the host */
};
struct order {
    struct step_ref *list;
    int n;
    size_t cap;
};
int order_add(struct order *o, int node, enum phase_id ph, int mb, struct err *e);
void order_release(struct order *o);
/* Places gathers and reductions of units in an order that a schedule made (prefetch.c): weights of a unit are gathered
 * while the unit before it computes, and again for its backward; memory for gathered weights and for unreduced
 * gradients is that of two units. An order in which a gradient changes after its reduction is refused. */
int order_prefetch(const struct graph *g, struct order *o, struct err *e);
/* Offload (offload.c): slots that graph_offload() marked, that are saved and have at least min_elems elements are
 * copied to host memory when they are complete, and back while the layer before computes its backward pass. Call it
 * last: it adds nodes, slots and entries. */
struct offload_count {
    int named, slots;      /* marked; offloaded */
    int recomputed, small; /* of those that stay: dropped anyway; too small. The others are not saved */
    int64_t bytes;         /* offloaded, of one microbatch */
};
int order_offload(struct graph *g, struct order *o, int64_t min_elems, struct offload_count *count, struct err *e);
/* The plain schedule: all forward phases, then backward phases in reverse, dw after its backward (or
 * after its layer's when delayed). */
int schedule_plain(const struct graph *g, bool delay_dw, struct order *o, struct err *e);

/* ---- schedules of a whole step --------------------------------------------------------------- */

enum overlap_kind {
    OVERLAP_NONE,
    OVERLAP_EP, /* forward of one microbatch against backward of another; all-to-alls of each hide behind the other */
    OVERLAP_DW, /* within a microbatch: weight gradients of experts under the backward of their dispatch */
    OVERLAP_TP, /* as EP, and rows between tensor-parallel ranks hide too */
};
/* Does a schedule run two microbatches against each other? */
static inline bool overlap_pairs(enum overlap_kind k) { return k == OVERLAP_EP || k == OVERLAP_TP; }
struct schedule_opts {
    int pp, vpp, pp_rank; /* stages, chunks of each, this one; 0 counts as 1 */
    int n_mb;             /* microbatches of the step */
    int group;            /* microbatches that a chunk takes in a row when there are several chunks; 0: pp */
    enum overlap_kind overlap;
    bool delay_dw;     /* weight gradients after their layer, or in the gaps that overlap leaves */
    bool forward_only; /* evaluation */
};
/* The forward or the backward half of one microbatch in one chunk. */
struct schedule_unit {
    bool backward;
    bool paired; /* a forward unit that runs together with the backward unit behind it */
    int chunk, mb;
};
struct schedule_units {
    struct schedule_unit *u;
    int n;
    size_t cap;
};
/* Pure: the units of this stage in order: 1F1B, interleaved if vpp > 1. Refuses numbers that do not fit, naming the
 * option. */
int schedule_units(const struct schedule_opts *o, struct schedule_units *out, struct err *e);
void schedule_units_release(struct schedule_units *s);
/* Forward units before the first backward one. */
int schedule_warmup(const struct schedule_opts *o);
/* The same as an order over the nodes of a graph (node.chunk); host nodes of all microbatches come first. With one
 * microbatch and one chunk this is schedule_plain. */
int schedule_step(const struct graph *g, const struct schedule_opts *o, struct order *out, struct err *e);
/* Bits depend on the order of additions: do both orders add to every persistent slot in the same one? Names the first
 * that differs. */
int order_same_sums(const struct graph *g, const struct order *a, const struct order *b, struct err *e);

/* ---- plan ------------------------------------------------------------------------------------ */

enum { STEP_MAX_WAITS = LANE_COUNT };
struct step {
    struct step_ref ref;
    int lane, lane_pos;                /* position among the steps of its lane */
    int after, after_copy;             /* steps that must be done first beside those whose slots it uses, -1: none */
    int n_waits, wait[STEP_MAX_WAITS]; /* steps on other lanes that must be done */
    bool waited;                       /* some step waits for this one */
    /* By use. */
    int *instance;    /* -1: absent */
    bool *first;      /* USE_ADD: this is the first contribution of the plan */
    struct tensor *t; /* bound addresses */
};
/* One life of a slot: in a frame, in the workspace, or persistent. A dropped slot has two. */
struct instance {
    slot_id slot;
    int mb;
    enum arena_id arena;
    int64_t offset, bytes;
    int first_step, last_step; /* in list order, for display */
    int n_uses;                /* steps that use it: poison counts them down */
    int merged;                /* placed over this instance (in place), or -1 */
    bool rebuilt;              /* made by a replay */
    bool written;              /* some step so far writes it or adds to it */
};
struct plan {
    const char *name; /* "train", "eval", ... */
    const struct graph *g;
    struct step *steps;
    int n_steps;
    struct instance *inst;
    int n_inst;
    struct arena lists; /* of the steps */
    int n_mb;           /* microbatches of one run */
    int n_frames;       /* one per chunk and microbatch that saves anything */
    /* of all frames, which share room where one is done before another begins; of the workspace */
    int64_t frame_bytes, work_bytes;
    int64_t work_unshared_bytes;       /* if nothing were reused */
    int64_t host_bytes;                /* host memory: what is offloaded */
    int n_waits, n_replays, n_fetches; /* fetches: copies from host memory */
    bool uses_lane[LANE_COUNT];
};
int plan_build(struct plan *p, const char *name, const struct graph *g, const struct order *o, struct err *e);
void plan_release(struct plan *p);
/* Resolve every address; call after memory_commit. */
int plan_bind(struct plan *p, const struct memory *m, struct err *e);
double plan_flops(const struct plan *p); /* of one run */

/* ---- showing --------------------------------------------------------------------------------- */

/* Steps with lane, waits, slots and addresses. */
void plan_print_steps(const struct plan *p, struct buf *out);
/* Bytes by layer: those that are saved, and those that each recompute name would free. */
void plan_print_memory(const struct plan *p, struct buf *out);

#endif
