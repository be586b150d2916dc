/* Context parallelism (parallel.cp): ranks that divide every sequence. Rank r of them has tokens [r n, (r + 1) n) of
 * each, n = seq / cp: contiguous chunks, so that recurrent layers can hand their state from rank to rank.
 *
 * What works on single tokens needs nothing. Attention gathers the keys and values of the tokens up to the rank's last
 * one; their gradients are summed by the ranks that own them. A causal convolution takes the last rows of the rank
 * before it. A recurrent layer starts from the state that the rank before it ended with.
 *
 * All of it is collective: every rank has the same messages in the same order, whether it takes part in one or not, so
 * that other groups' messages cannot come between two halves of one. */
#ifndef BRAID_LAYERS_CONTEXT_H
#define BRAID_LAYERS_CONTEXT_H

#include "layers/layer.h"

/* This plan has a part of every sequence. Decoding never has. */
static inline bool context_divides(const struct build *b) { return b->mesh->cp > 1 && b->mode != BUILD_DECODE; }
/* Tokens of a sequence up to this rank's last one. */
static inline int64_t context_seen(const struct build *b)
{
    return context_divides(b) ? (b->mesh->cp_rank + 1) * b->seq : b->seq;
}

/* Rows that every rank makes of its own tokens and that the ranks after it read, too. */
struct context_rows {
    int64_t width, rows, seen; /* rows of a sequence that this rank makes; those up to its last one */
    slot_id own, all;          /* real [batch * rows, width], [batch * seen, width] */
    /* gradients: of own, with the contributions of all ranks; of all. NO_SLOT unless training */
    slot_id down, dall;
};
struct context_rows context_rows(struct build *b, const char *name, int64_t width);
/* The same with so many rows for a rank's part of a sequence, not one for each token. */
struct context_rows context_rows_of(struct build *b, const char *name, int64_t rows, int64_t width);
/* The index of this rank's first token in its sequence, I64 [1], for ops that ask for it; NO_SLOT where it has all. */
slot_id context_first(struct build *b);
/* The node that gathers (and in the backward pass sums): after the one that writes own, before those that read all. */
void context_gather(struct build *b, const char *name, const struct context_rows *r);

/* Rows for the next rank: FWD tail of the rank before becomes halo, BWD dhalo of the rank after becomes dtail. Absent
 * (NO_SLOT) where there is no such rank, and gradients unless training. */
struct context_edge {
    slot_id tail, halo, dtail, dhalo;
};
void context_halo(struct build *b, const char *name, const struct context_edge *e);
/* A state from rank to rank: FWD `final` of rank r becomes init of rank r + 1, BWD dinit of rank r + 1 becomes dfinal
 * of rank r. One node for each pair of neighbours; rank r declares what lies between, with context_passes() before and
 * after. Absent as above. */
struct context_state {
    slot_id init, final, dinit, dfinal;
};
void context_passes(struct build *b, const struct context_state *s, bool before);

#endif
