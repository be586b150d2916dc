/* Private to train/: the tensors of a checkpoint, whole, on the ranks that write them. Every rank has the list of all
 * (on paper: of a model as one rank has it) and works out the same distribution: a tensor goes to one of the ranks that
 * hold a part of it, so that all write about as much. The parts travel in rounds; a round begins when all ranks are
 * done with the one before, which bounds the memory, and any rank's error ends it for all. */
#ifndef BRAID_TRAIN_PIECES_INT_H
#define BRAID_TRAIN_PIECES_INT_H

#include "train/reshard_int.h"
#include "train/train.h"

struct piece_of { /* parameter of the full table, and enum what */
    int index, what;
};
struct pieces {
    struct trainer *t;
    struct full_table full;
    struct ckpt_item *items; /* every tensor; part: the rank that writes it; without data */
    int n;
    /* private */
    struct piece_of *of;
    struct arena keys;
    uint8_t *holds;             /* [world][n] */
    int *round;                 /* [n] in which each item travels */
    int *order, *round_at;      /* items by round, and where each round begins there */
    int n_rounds, begun, taken; /* taken: items of this rank, in the order of writing */
    int writers;
    bool spread;
    bool broken; /* a message could not be sent: another rank waits for it, until it sees that this one has ended */
};
/* Collective, as all that follow. writers: the first so many ranks write. spread: of ranks that hold copies of a
 * parameter different ones answer for it, so that all have something to write; else always the first. */
int pieces_open(struct pieces *s, struct trainer *t, int writers, bool spread, struct err *e);
void pieces_close(struct pieces *s);
/* Fills whole (of the item's shape and type) with item i, which this rank writes. A rank takes its items in the order
 * of ckpt_item_order, each once. */
int pieces_fetch(struct pieces *s, int i, const struct tensor *whole, struct err *e);
/* Takes part in what others fetch after this rank has all of its own, or could not go on (st). The worst status of all
 * ranks, with its message. */
int pieces_end(struct pieces *s, int st, struct err *e);
/* fn for every item of this rank, in the order of writing, then pieces_end. */
typedef int (*piece_fn)(void *ctx, int i, struct err *e);
int pieces_visit(struct pieces *s, piece_fn fn, void *ctx, struct err *e);

#endif
