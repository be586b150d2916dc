/* Experts on several ranks: what moe.c asks of moe_ep.c. Private to layers/. */
#ifndef BRAID_LAYERS_MOE_EP_INT_H
#define BRAID_LAYERS_MOE_EP_INT_H

#include "layers/layer.h"

/* Slots where the tokens are: maps of the rows, the rows and what comes back. */
struct ep_home {
    slot_id offset;             /* of all experts: moeplan's */
    slot_id row, src;           /* maps that permute and unpermute use; with other ranks they lead into buffers */
    slot_id x, dx, prob, dprob; /* sent */
    slot_id y, dy;              /* returned */
};
/* Slots where the experts are, sorted by expert. */
struct ep_rows {
    slot_id x, dx, prob, dprob;
};
struct ep {
    bool on;
    int64_t ranks, cap, local;
    slot_id sorted_row, sorted_src;          /* moeplan's maps, from which the buffers' are made */
    slot_id count, rows;                     /* I32 [ranks, local], [ranks]: what leaves */
    slot_id rcount, rrows;                   /* what arrives */
    slot_id offset, to, from;                /* of the local experts, and between buffers and their rows */
    slot_id rx, drx, rprob, drprob, ry, dry; /* buffers at the experts */
    slot_id need;                            /* F64 [1], persistent: largest buffer of the step */
    const struct ep_node *node;
};

/* Slots; home->row and home->src become the maps into buffers. .on is false where all experts are here. */
struct ep ep_declare_slots(struct build *b, struct ep_home *home, int64_t experts, int64_t k, int64_t width);
/* Where rows go; the counts travel. */
void ep_declare_maps(struct build *b, const struct ep *ep, const struct ep_home *home);
/* Slabs to the experts' ranks and into the experts' order. */
void ep_declare_dispatch(struct build *b, const struct ep *ep, const struct ep_home *home, const struct ep_rows *rows);
/* And back. */
void ep_declare_return(struct build *b, const struct ep *ep, const struct ep_home *home, slot_id y, slot_id dy);

/* t [E] F64 (part of a slot), summed over the ranks that share the batch; returns without a node where there is one. */
void ep_declare_load_sum(struct build *b, slot_id load);
/* The load of each sequence, summed over the ranks that divide it (parallel.cp). */
void ep_declare_sequence_sum(struct build *b, slot_id load, bool rows);
/* The same for a persistent tally before the update's own step reads it. */
void ep_declare_tally_sum(struct build *b, slot_id tally);

#endif
