/* Declared nodes, and the plan made of them.
 *
 * A layer declares *slots* (named tensors) and *nodes* (coarse pieces of work). A node has up to four
 * phases: forward, backward, weight gradient (dw) and replay. A phase is a list of op calls whose fields are bound to
 * slots by name (graph_op), or a step function with a list of the slots it uses (messages between ranks, the host);
 * neither reaches memory in any other way. plan_build() turns the declarations and an order into a flat list of steps
 * with waits between lanes and an address for every slot:
 *
 *     graph (slots, nodes) -> order (schedule_*.c) -> replays -> waits -> placement -> exec
 *
 * Rules the planner enforces
 * - An activation slot is written once per microbatch (USE_WRITE), or summed in declared order
 *   (USE_ADD: the first contribution writes, later ones add).
 * - What the backward half reads of what the forward half wrote is *saved*: it lives in the frame of
 *   its chunk and microbatch. All else is transient and shares one workspace. This is derived, not declared.
 * - A slot with a replay may be dropped after the forward half and recomputed when first needed. One that is dropped
 *   from the start needs no forward phase: its replay alone makes it.
 * - Two slots may share memory only if every use of one happens-before the first of the other:
 *   order on a lane or a wait proves that, never position in the list.
 */
#ifndef BRAID_PLAN_GRAPH_H
#define BRAID_PLAN_GRAPH_H

#include "ops/opdesc.h"
#include "plan/memory.h"

enum lane_id {
    LANE_COMPUTE,
    LANE_SIDE, /* second compute queue: planning, Sinkhorn, split attention */
    LANE_COMM,
    LANE_COPY,
    LANE_UPDATE, /* optimizer state that passes through the device beside training: AdamW and copies to host memory */
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
#define READS(s)                                                                                                       \
    {                                                                                                                  \
        .slot = (s), .mode = USE_READ                                                                                  \
    }
#define WRITES(s)                                                                                                      \
    {                                                                                                                  \
        .slot = (s), .mode = USE_WRITE                                                                                 \
    }
#define ADDS(s)                                                                                                        \
    {                                                                                                                  \
        .slot = (s), .mode = USE_ADD                                                                                   \
    }

/* What differs from run to run of one plan; the host fills it. */
struct run_info {
    int64_t step;            /* optimizer step, 0-based */
    int64_t first_sample;    /* global index of the microbatch's first sample */
    bool first_mb;           /* first microbatch of the step: gradients are overwritten, not added to */
    bool last_mb;            /* last one: gradients that are reduced once per step are reduced now */
    int64_t start;           /* decoding: absolute position of the first token */
    double scale;            /* of the loss gradient: 1 / labels in the global batch */
    const double *mtp_scale; /* the same for each multi-token-prediction depth, if there are any */
    double mb_share;         /* 1 / microbatches of the step */
    const int32_t *tokens, *labels, *pos, *doc_start; /* host, one microbatch */
    /* Where ranks divide sequences: place of the first token in its sequence, documents counted from there, and the ids
     * of prediction depths (struct batch_part). */
    int64_t first_pos;
    const int32_t *doc_local, *next_tokens, *next_labels, *next_pos;
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
    int mb; /* microbatch of the run this step belongs to: tags of messages */
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
    /* weights of a unit of layers from the ranks that own pieces of them (forward; replay: again, for backward) */
    ROLE_GATHER,
    ROLE_REDUCE,   /* gradients of a unit to their owners, after the last contribution */
    ROLE_CONTEXT,  /* between ranks that divide sequences: keys and values, states, edges */
    ROLE_RING,     /* the same to the next of these ranks, or home: blocks of keys and values and their gradients */
    ROLE_OFFLOAD,  /* a saved slot to host memory (forward) and back (replay); made by order_offload() */
    ROLE_SHARD,    /* rows of the residual stream that tensor-parallel ranks gather, or sum and scatter */
    ROLE_ROWS_IN,  /* the same in front of a whole layer and */
    ROLE_ROWS_OUT, /* behind it: where schedules cut */
};
/* Between tensor-parallel ranks. */
static inline bool role_is_shard(enum node_role r)
{
    return r == ROLE_SHARD || r == ROLE_ROWS_IN || r == ROLE_ROWS_OUT;
}
struct node {
    const char *name; /* "3.attn.qkv" */
    int layer;        /* physical, 0-based; -1: none */
    enum lane_id lane;
    const void *self;
    int chunk; /* which part of the model on this rank (virtual pipeline stage), 0-based */
    enum node_role role;
    bool host;     /* takes values from the host (run_info): it runs before a captured plan, never inside */
    bool per_step; /* ROLE_GATHER, ROLE_REDUCE: in the first or last microbatch of a step only, not in each */
    struct phase phase[PH_COUNT];
};
struct slot {
    const char *name; /* "3.attn.qkv" */
    const char *tag;  /* "attn.qkv": recompute policies match it */
    int layer;
    struct tensor shape; /* data NULL */
    int arena;           /* ARENA_* for persistent slots, -1 for activations */
    int64_t offset;      /* in that arena */
    int replay;          /* node whose PH_REPLAY phase recomputes it, or -1 */
    bool dropped;        /* policy: not saved, replayed */
    bool sum;            /* has several contributions: the first writes, later ones add */
    bool unwanted;       /* the gradient of a frozen parameter: nobody reads it */
    bool optional;       /* left out where nobody reads it */
    bool weight;         /* a gathered weight, or gathered rows: its replay is another gather, which no policy names */
    bool offload;        /* policy: waits in host memory for the backward half, if it is saved */
    bool host;           /* lies in host memory: what is offloaded, while it waits */
};

struct graph {
    struct arena text;     /* names, the layers' own structs, op calls */
    const struct ops *ops; /* of the device the graph is for: op calls ask it for scratch */
    struct slot *slots;
    int n_slots;
    struct node *nodes;
    int n_nodes;
    size_t cap_slots, cap_nodes;
    int chunk; /* of the nodes that follow */
    int layer; /* current scope */
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
/* A result that nobody reads (the gradient of a frozen parameter). An op call with no other result is left out, and
 * where the result is optional, the op is not asked for it; otherwise it goes to the workspace. */
slot_id graph_unwanted(struct graph *g, const char *name, struct tensor shape);
/* A result that is made only if something reads it. graph_trim, called after all declarations: where nothing does,
 * forward calls whose op can leave it out do so. */
void graph_optional(struct graph *g, slot_id slot);
void graph_trim(struct graph *g);
/* Backward and weight-gradient phases that lead to nothing but unwanted results are removed, so that what they would
 * have read is not saved. Messages between ranks stay. */
int graph_prune(struct graph *g, struct err *e);
/* "<layer>.<scope>.<name>" of the current scope; NULL when out of memory. */
const char *graph_name(struct graph *g, const char *name);
/* Zeroed memory that lives as long as the graph, for a layer's sizes. */
void *graph_own(struct graph *g, size_t bytes);
int graph_node(struct graph *g, const char *name, enum lane_id lane, const void *self);
/* ---- op calls: fields bound to slots by name (bind.c) */

/* The slot as a tensor for an op's args, absent for NO_SLOT. Its data is not an address but identifies the slot, so
 * that views are made with the functions of tensor.h (tensor_cols, tensor_split_last). */
struct tensor of(const struct graph *g, slot_id slot);
/* Append a call of an op to a phase: GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, dy), .x = of(g, x), ...). Reading,
 * writing or adding follows from the field's role; scratch is declared here and shared by the calls of a phase. A
 * required field that is not bound, two fields written to one place and wrong shapes are errors
 * that name the fields. */
void graph_op(struct graph *g, int node, enum phase_id ph, const struct op_desc *op, const void *args);
#define GRAPH_OP(g, node, ph, op, ...) graph_op(g, node, ph, &op##_desc, &(const struct op##_args){__VA_ARGS__})
/* The args that a phase was declared with, if it is one call of this op, else NULL; which slot a tensor of them stands
 * for (NO_SLOT: none). */
const void *graph_call(const struct graph *g, int node, enum phase_id ph, const struct op_desc *op);
slot_id graph_slot_of(const struct tensor *t);
/* Several nodes, or one in several microbatches, add to this slot; an op that cannot add must come first. Gradients of
 * parameters are always such sums. */
void graph_sum(struct graph *g, slot_id slot);
/* The forward phase of the node, with its cost, can be run again to make the slot; NO_SLOT: nothing. */
void graph_again(struct graph *g, int node, slot_id slot);
int graph_run_ops(const struct step_ctx *c);

/* A step function finds tensors by position: an enum names the positions for both sides, GRAPH_PHASE(..., [X] =
 * READS(x), [Y] = WRITES(y)). */
void graph_phase(struct graph *g, int node, enum phase_id ph, step_fn fn, const struct use *uses, int n);
#define GRAPH_PHASE(g, node, ph, fn, ...)                                                                              \
    graph_phase(g, node, ph, fn, (const struct use[]){__VA_ARGS__},                                                    \
                (int)(sizeof((const struct use[]){__VA_ARGS__}) / sizeof(struct use)))
void graph_cost(struct graph *g, int node, enum phase_id ph, double flops, double bytes);
/* The op may write slot `to` over slot `from`, if that dies here. NO_SLOT: nothing. */
void graph_inplace(struct graph *g, int node, enum phase_id ph, slot_id from, slot_id to);
/* The node reads run_info. Such nodes depend on no other and come first. */
void graph_host(struct graph *g, int node);
void graph_role(struct graph *g, int node, enum node_role role);
/* slot can be recomputed by this node's PH_REPLAY phase. */
void graph_replay(struct graph *g, slot_id slot, int node);
int graph_check(const struct graph *g, struct err *e);

/* Marks the slots that a name means, in the first `layers` layers, to be dropped and recomputed; returns how many there
 * are. A name is a tag, a scope, the last part of a tag, a glob, or "full". */
int graph_drop(struct graph *g, const char *name, int64_t layers);
/* The tags of slots that can be recomputed, each followed by ", ". */
void graph_droppable(const struct graph *g, struct buf *out);
/* Marks the activations that a name means, in the first `layers` layers, to wait in host memory (order_offload);
 * returns how many there are. beside: only in layers that have a slot with a tag like this; NULL: in all. */
int graph_offload(struct graph *g, const char *name, const char *beside, int64_t layers);

#endif
