/* Units: layers whose weights are gathered, and whose gradients are reduced, together.
 *
 * Ranks that hold copies of a parameter divide it as parallel.zero says (comm.h, mesh_shards). Layers are always bound
 * to the whole parameter; where it is not kept whole, it is an activation slot that a node of its unit fills or
 * empties:
 *
 *   zero   weights                              gradients
 *   0      kept                                 kept; summed in place once per step, the sums go to all
 *   1      kept; gathered in place once a step  kept; summed in place once per step, each rank its own piece
 *   2      as 1                                 transient; summed into the kept shard after every microbatch
 *   3      transient; gathered before use       as 2
 *
 * Of weights whose FP8 codes travel (param.code_shards) each rank keeps the shard of values from level 1 on, and what
 * is gathered before use on level 3 is codes. On levels 1 and 2 they are gathered in the update (optim/shard.c).
 *
 * A unit is a bracket group or a layer of the pattern, the embedding, the head; the experts of a unit, and under tensor
 * parallelism what it does not divide, are exchanged by nodes of their own, since other ranks hold copies of them. A
 * parameter's gradient belongs to the unit that declares it first, and that unit's nodes come before all others that
 * use it; so in any backward order its reduction comes after the last contribution, which order_prefetch() checks. */
#ifndef BRAID_LAYERS_UNIT_H
#define BRAID_LAYERS_UNIT_H

#include "layers/layer.h"

struct units; /* private */
int units_open(struct units **out, struct err *e);
void units_close(struct units *u);
/* What is declared from here on belongs to a new unit: "<layer>.<scope>.gather" and so on. only_forward: all gradients
 * of it are made in the forward half (a head that is not tied), so they are reduced there too, after units_finish(). */
void unit_begin(struct build *b, int layer, const char *scope, bool only_forward);
/* The last unit ends; called after the last node of a chunk. */
void units_finish(struct build *b);

/* build_weight()'s two halves: the slots that layers are bound to. */
slot_id unit_weight(struct build *b, int index, const char *name);
/* The codes of a weight in place of its values, where ranks keep shards of them. */
slot_id unit_codes(struct build *b, int index, const char *name, struct tensor shape);
slot_id unit_gradient(struct build *b, int index, const char *name);

/* What a node with ROLE_GATHER or ROLE_REDUCE has as its own: for predictions of its time. */
struct unit_exchange {
    const char *what;
    const struct mesh *mesh; /* its groups are looked up when a step runs: a plan on paper has none */
    enum copy_group group;   /* the ranks that hold copies */
    bool once;               /* per step */
    bool collect;            /* sums go to all */
    int64_t most;            /* elements of a piece that are summed in one message */
    int n;
    struct unit_part {
        int64_t elems, piece, own; /* own: elements of this rank's piece */
        enum dtype type;
        bool bf16; /* parallel.reduce: rounded to travel; vectors and what is kept wide are not */
    } * part;
};

#endif
