/* Declared nodes, and the plan made of them.
 *
 * A layer declares *slots* (named tensors) and *nodes* (coarse pieces of work). A node has up to four
 * phases: forward, backward, weight gradient (dw) and replay. A phase is a list of op calls whose fields are bound to
 * slots by name (graph_op), or a step function with a list of the slots it uses (messages between ranks, the host); neither
 * reaches memory in any other way. plan_build() turns the declarations and an order into a flat list of steps with waits
 * between lanes and an address for every slot:
 *
 *     graph (slots, nodes) -> order (schedule_*.c) -> replays -> waits -> placement -> exec
 *
 * Rules the planner enforces
 * - An activation slot is written once per microbatch (USE_WRITE), or summed in declared order
 *   (USE_ADD: the first contribution writes, later ones add).
 * - What the backward half reads of what the forward half wrote is *saved*: it lives in the frame of
 *   its chunk and microbatch. All else is transient and shares one workspace. Nobody declares this; it follows.
 * - A slot with a replay may be dropped after the forward half and made again when first needed.
 * - Two slots may share memory only if every use of one happens-before the first of the other:
 *   order on a lane or a wait proves that, never position in the list.
 */
#ifndef BRAID_PLAN_H
#define BRAID_PLAN_H

#include "ops/opdesc.h"

/* ---- memory: arenas, sized first, allocated once --------------------------------------------- */

enum arena_id {
    ARENA_PARAM,  /* weights */
    ARENA_MASTER, /* the same in the wide type, where layers work with a narrower copy */
    ARENA_GRAD,   /* main gradients */
    ARENA_OPTIM,  /* optimizer state */
    ARENA_STATE,  /* tables, decode caches, scalars: persistent, neither weight nor gradient */
    ARENA_FRAME,  /* saved slots: a frame per chunk and microbatch in flight */
    ARENA_WORK,   /* transient slots */
    ARENA_COUNT,
};
const char *arena_name(enum arena_id a);

struct memory {
    int64_t planned[ARENA_COUNT];   /* bytes reserved so far */
    int64_t allocated[ARENA_COUNT]; /* bytes taken from the device by memory_commit */
    char *base[ARENA_COUNT];
    struct dev *dev;
};
/* Persistent room; returns its offset in the arena. */
int64_t memory_reserve(struct memory *m, enum arena_id a, int64_t bytes);
/* Frames and workspace are shared by all plans: the largest wins. */
void memory_reserve_max(struct memory *m, enum arena_id a, int64_t bytes);
/* Allocate everything, once. Refuses with the sizes when the device has less. */
int memory_commit(struct memory *m, struct dev *dev, struct err *e);
/* Frames and workspace again, at their new planned size; what they held is lost. All else must be as it was. */
int memory_renew(struct memory *m, struct err *e);
void memory_release(struct memory *m);

/* ---- declarations ------------------------------------------------------------------------------- */

enum lane_id {
    LANE_COMPUTE,
    LANE_SIDE, /* second compute queue: planning, Sinkhorn, split attention */
    LANE_COMM,
    LANE_COPY,
    LANE_COUNT,
};
const char *lane_name(int lane);

enum phase_id { PH_FWD, PH_BWD, PH_DW, PH_REPLAY, PH_COUNT };
const char *phase_name(enum phase_id p);

typedef int slot_id; /* -1: none; a use of it gives an absent tensor */
enum { NO_SLOT = -1 };

enum use_mode { USE_READ, USE_WRITE, USE_ADD };
struct use {
    slot_id slot;
    enum use_mode mode;
    bool overwrites; /* USE_ADD by an op that cannot add: it must be the first contribution */
    bool reads;      /* USE_ADD by an op that reads what is there: it must not be the first */
};
#define READS(s)  {.slot = (s), .mode = USE_READ}
#define WRITES(s) {.slot = (s), .mode = USE_WRITE}
#define ADDS(s)   {.slot = (s), .mode = USE_ADD}

/* What differs from run to run of one plan; the host fills it. */
struct run_info {
    int64_t step;        /* optimizer step, 0-based */
    int64_t first_sample; /* global index of the microbatch's first sample */
    bool first_mb;       /* first microbatch of the step: gradients are overwritten, not added to */
    int64_t start;       /* decoding: absolute position of the first token */
    double scale;        /* of the loss gradient: 1 / labels in the global batch */
    const double *mtp_scale; /* the same for each multi-token-prediction depth, if there are any */
    double mb_share;     /* 1 / microbatches of the step */
    const int32_t *tokens, *labels, *pos, *doc_start; /* host, one microbatch */
    const double *hyper; /* 8 values for the update: see ops/adamw */
};

struct step_ctx {
    const struct ops *ops;
    struct lane *lane;
    const void *self;       /* the layer's own sizes */
    const struct tensor *t; /* by position in the phase's list of uses */
    const bool *add;        /* by position: add to it (true) or overwrite it */
    const struct phase *phase;
    const struct run_info *run;
    int mb;                 /* microbatch of the run this step belongs to: tags of messages */
};
typedef int (*step_fn)(const struct step_ctx *c);

enum { NODE_MAX_INPLACE = 2 };
/* A field of an op call, tied to a use of its phase. */
struct bound_field {
    int field, use;
    int64_t offset; /* bytes from the start of the slot: a view of it */
    bool adds;      /* an earlier call of the phase has written there: add to it */
    bool sums;      /* add to it if the step does (c->add) */
};
struct op_bound {
    const struct op_desc *op;
    void *args; /* numbers and shapes; addresses are filled in when it runs */
    struct bound_field *field;
    int n_fields;
};
struct phase {
    step_fn fn; /* NULL: this node has no such phase; graph_run_ops: the calls below */
    struct op_bound *call;
    int n_calls;
    size_t cap_calls;
    struct use *use;
    int n_uses;
    size_t cap_uses;
    slot_id work; /* scratch that the calls share, -1: none */
    /* The op allows output use b to be written over input use a, if a dies here. */
    int n_inplace;
    struct {
        int from, to;
    } inplace[NODE_MAX_INPLACE];
    double flops, bytes;
};
/* What schedules must know about a node of LANE_COMM. */
enum node_role {
    ROLE_NONE,
    ROLE_DISPATCH, /* rows to the ranks of their experts: an all-to-all; one or several nodes in a row */
    ROLE_COMBINE,  /* and back */
    ROLE_CUT_IN,   /* stream from the stage before (forward), its gradient to it (backward) */
    ROLE_CUT_OUT,  /* stream to the stage after, its gradient from it */
};
struct node {
    const char *name; /* "3.attn.qkv" */
    int layer;        /* physical, 0-based; -1: none */
    enum lane_id lane;
    const void *self;
    int chunk; /* which part of the model on this rank (virtual pipeline stage), 0-based */
    enum node_role role;
    bool host; /* takes values from the host (run_info): it runs before a captured plan, never inside */
    struct phase phase[PH_COUNT];
};
struct slot {
    const char *name; /* "3.attn.qkv" */
    const char *tag;  /* "attn.qkv": what recompute policies match */
    int layer;
    struct tensor shape; /* data NULL */
    int arena;           /* ARENA_* for persistent slots, -1 for activations */
    int64_t offset;      /* in that arena */
    int replay;          /* node whose PH_REPLAY phase makes it again, or -1 */
    bool dropped;        /* policy: not saved, replayed */
    bool sum;            /* has several contributions: the first writes, later ones add */
};

struct graph {
    struct arena text; /* names, the layers' own structs, op calls */
    const struct ops *ops; /* of the device the graph is for: op calls ask it for scratch */
    struct slot *slots;
    int n_slots;
    struct node *nodes;
    int n_nodes;
    size_t cap_slots, cap_nodes;
    int chunk;         /* of the nodes that follow */
    int layer;         /* current scope */
    const char *scope;
    struct err err; /* first failure; declarations after it are no-ops */
};
/* ops: of the device that runs it; NULL: a graph without op calls. */
void graph_init(struct graph *g, const struct ops *ops);
void graph_release(struct graph *g);
/* Names of what follows: "<layer>.<scope>.<name>"; layer -1: "<scope>.<name>". */
void graph_scope(struct graph *g, int layer, const char *scope);
slot_id graph_slot(struct graph *g, const char *name, struct tensor shape);
slot_id graph_persistent(struct graph *g, const char *name, struct tensor shape, enum arena_id arena, int64_t offset);
/* "<layer>.<scope>.<name>" of the current scope; NULL when out of memory. */
const char *graph_name(struct graph *g, const char *name);
/* Zeroed memory that lives as long as the graph, for a layer's sizes. */
void *graph_own(struct graph *g, size_t bytes);
int graph_node(struct graph *g, const char *name, enum lane_id lane, const void *self);
/* ---- op calls: fields bound to slots by name (bind.c) */

/* The slot as a tensor for an op's args, absent for NO_SLOT. Its data is no memory but says which slot it is, so that views
 * are made with the functions of tensor.h (tensor_cols, tensor_split_last). */
struct tensor of(const struct graph *g, slot_id slot);
/* Append a call of an op to a phase: GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, dy), .x = of(g, x), ...). Reading, writing or
 * adding follows from the field's role; scratch is declared here and shared by the calls of a phase. A required field that is not
 * bound, two fields written to one place and wrong shapes are errors that name the fields. */
void graph_op(struct graph *g, int node, enum phase_id ph, const struct op_desc *op, const void *args);
#define GRAPH_OP(g, node, ph, op, ...) graph_op(g, node, ph, &op##_desc, &(const struct op##_args){__VA_ARGS__})
/* Several nodes, or one in several microbatches, add to this slot; an op that cannot add must come first. Gradients of
 * parameters are sums without being told. */
void graph_sum(struct graph *g, slot_id slot);
/* The forward phase of the node, with its cost, can be run again to make the slot; NO_SLOT: nothing. */
void graph_again(struct graph *g, int node, slot_id slot);
int graph_run_ops(const struct step_ctx *c);

/* A step function finds tensors by position: an enum names the positions for both sides, GRAPH_PHASE(..., [X] = READS(x), [Y] = WRITES(y)). */
void graph_phase(struct graph *g, int node, enum phase_id ph, step_fn fn, const struct use *uses, int n);
#define GRAPH_PHASE(g, node, ph, fn, ...)                                        \
    graph_phase(g, node, ph, fn, (const struct use[]){__VA_ARGS__},             \
                (int)(sizeof((const struct use[]){__VA_ARGS__}) / sizeof(struct use)))
void graph_cost(struct graph *g, int node, enum phase_id ph, double flops, double bytes);
/* The op may write slot `to` over slot `from`, if that dies here. NO_SLOT: nothing. */
void graph_inplace(struct graph *g, int node, enum phase_id ph, slot_id from, slot_id to);
/* The node reads run_info. Such nodes depend on no other and come first. */
void graph_host(struct graph *g, int node);
void graph_role(struct graph *g, int node, enum node_role role);
/* slot can be made again by this node's PH_REPLAY phase. */
void graph_replay(struct graph *g, slot_id slot, int node);
int graph_check(const struct graph *g, struct err *e);

/* Recompute policy: a comma list of tags, globs, groups ("joint.*", "norm", "core_attn", "full"). Unknown
 * names are answered with the valid ones. "full" drops all but what must be kept between layers. */
int graph_recompute(struct graph *g, const char *policy, struct err *e);

/* ---- order ----------------------------------------------------------------------------------------------- */

struct step_ref {
    int node;
    enum phase_id phase;
    int mb; /* microbatch of the run, 0-based */
};
struct order {
    struct step_ref *list;
    int n;
    size_t cap;
};
int order_add(struct order *o, int node, enum phase_id ph, int mb, struct err *e);
void order_release(struct order *o);
/* The plain schedule: all forward phases, then backward phases in reverse, dw after its backward (or
 * after its layer's when delayed). */
int schedule_plain(const struct graph *g, bool delay_dw, struct order *o, struct err *e);

/* ---- schedules of a whole step ---------------------------------------------------------------------- */

enum overlap_kind {
    OVERLAP_NONE,
    OVERLAP_EP, /* forward of one microbatch against backward of another; all-to-alls of each hide behind the other */
    OVERLAP_DW, /* within a microbatch: weight gradients of experts under the backward of their dispatch */
};
struct schedule_opts {
    int pp, vpp, pp_rank; /* stages, chunks of each, this one; 0 counts as 1 */
    int n_mb;             /* microbatches of the step */
    int group;            /* microbatches that a chunk takes in a row when there are several chunks; 0: pp */
    enum overlap_kind overlap;
    bool delay_dw;     /* weight gradients after their layer, or in the gaps that overlap leaves */
    bool forward_only; /* evaluation */
};
/* Half of what one microbatch does in one chunk. */
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
/* Pure: what this stage does, in order: 1F1B, interleaved if vpp > 1. Refuses numbers that do not fit, naming the option. */
int schedule_units(const struct schedule_opts *o, struct schedule_units *out, struct err *e);
void schedule_units_release(struct schedule_units *s);
/* Forward units before the first backward one. */
int schedule_warmup(const struct schedule_opts *o);
/* The same as an order over the nodes of a graph (node.chunk); host nodes of all microbatches come first. With one microbatch and
 * one chunk this is schedule_plain. */
int schedule_step(const struct graph *g, const struct schedule_opts *o, struct order *out, struct err *e);
/* Bits depend on the order of additions: do both orders add to every persistent slot in the same one? Names the first that differs. */
int order_same_sums(const struct graph *g, const struct order *a, const struct order *b, struct err *e);

/* ---- plan ----------------------------------------------------------------------------------------------- */

enum { STEP_MAX_WAITS = LANE_COUNT };
struct step {
    struct step_ref ref;
    int lane, lane_pos; /* position among the steps of its lane */
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
};
struct plan {
    const char *name; /* "train", "eval", ... */
    const struct graph *g;
    struct step *steps;
    int n_steps;
    struct instance *inst;
    int n_inst;
    struct arena lists; /* of the steps */
    int n_mb; /* microbatches of one run */
    int n_frames; /* one per chunk and microbatch that saves anything */
    int64_t frame_bytes, work_bytes; /* of all frames, which share room where one is done before another begins; of the workspace */
    int64_t work_unshared_bytes; /* if nothing were reused */
    int n_waits, n_replays;
    bool uses_lane[LANE_COUNT];
};
int plan_build(struct plan *p, const char *name, const struct graph *g, const struct order *o, struct err *e);
void plan_release(struct plan *p);
/* Resolve every address; call after memory_commit. */
int plan_bind(struct plan *p, const struct memory *m, struct err *e);
double plan_flops(const struct plan *p); /* of one run */

/* ---- what a schedule takes, without running it ---------------------------------------------------------------- */

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
    double ready, start, end; /* found: when its rank alone would let it start, when it started, when it was done */
};
struct sim_rank {
    struct sim_task *task;
    int n;
    size_t cap;
    int n_frames;
    /* found */
    double busy[LANE_COUNT];
    double exposed[PH_COUNT]; /* seconds in which the comm lane moved data and nothing was computed, by phase */
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
int sim_add_units(struct sim *s, const struct schedule_opts *o, const struct schedule_units *units, double forward, double backward,
                  struct err *e);
/* The steps of a plan; `seconds` gives the time of one. Cuts (ROLE_CUT_*) become messages between the stages, dispatches and combines
 * meet within ranks of the same group (-1: each alone). */
struct sim_place {
    int rank, pp, pp_rank, vpp, group;
};
typedef double (*sim_seconds)(const void *ctx, const struct plan *p, int step);
int sim_add_plan(struct sim *s, const struct sim_place *at, const struct plan *p, sim_seconds seconds, const void *ctx, struct err *e);
/* Fills in times and what is found per rank; ranks that wait for each other in a circle are an error that names them. */
int sim_run(struct sim *s, struct err *e);

/* ---- running ----------------------------------------------------------------------------------------- */

struct trace;
/* A plan that a device runs as one captured piece; gradients overwritten or added to are two of them. */
struct captured {
    const struct plan *p;
    bool first_mb;
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
    struct trace *trace;   /* or NULL */
    struct err err;        /* where ops put their messages */
    int *uses_left;        /* scratch for poison and random order, sized by exec_prepare */
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
/* run: an array of one per microbatch of the plan (p->n_mb). run[0].first_mb counts for all of them: the first contribution of the
 * plan to a persistent sum overwrites it, later ones add. */
int exec_run(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e);

/* Chrome / Perfetto trace of steps: lanes as threads, waits as arguments. Room for max_events is taken
 * at once; later ones are counted, not kept. */
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

/* ---- showing --------------------------------------------------------------------------------------- */

/* Steps with lane, waits, slots and addresses. */
void plan_print_steps(const struct plan *p, struct buf *out);
/* Bytes by layer: saved now, and what each recompute name would give back. */
void plan_print_memory(const struct plan *p, struct buf *out);
void memory_print(const struct memory *m, struct buf *out);

#endif
