/* Experts on several ranks: what moe.c asks of moe_ep.c. Private to layers/. */
#ifndef BRAID_LAYERS_MOE_EP_INT_H
#define BRAID_LAYERS_MOE_EP_INT_H

#include "layers/layer.h"

/* Slots where the tokens are: maps of the rows and of their probabilities, the rows and what comes back. */
struct ep_home {
    slot_id row, src; /* of tokens, k entries each, as permute uses them; with other ranks into buffers */
    int64_t k;
    slot_id prob_row, prob_src; /* of the probabilities of all choices; the same maps where experts are here */
    slot_id x, dx, prob, dprob; /* sent */
    slot_id y, dy;              /* returned */
    slot_id y_codes;            /* as it travelled; NO_SLOT: y did */
};
/* Slots where the experts are, sorted by expert. */
struct ep_rows {
    slot_id x, dx, prob, dprob;
};
struct ep {
    bool on;
    bool codes_there, codes_back; /* rows travel as FP8 codes (ops/row8): x and rx are such, ry_codes and y_codes */
    int64_t ranks, etp;           /* that share the experts; that share each of them */
    int64_t cap, places;          /* rows of a buffer; of the buffers for all ranks */
    int64_t rows;                 /* places for rows at the experts */
    int64_t per, most;            /* choices of a row that travels; buffers a token may be in */
    int64_t group;                /* experts of each rank */
    bool whole;                   /* this rank has them all and simulates the others (loop) */
    slot_id idx;                  /* I32 [T, k]: the experts of each token */
    slot_id dest, dest_offset, dest_row, dest_src; /* their ranks, and moeplan's maps of those */
    slot_id leave, arrive;                         /* I32 [ranks]: rows of each buffer */
    slot_id sent, got;                             /* I32 [places, per]: choices of each row */
    slot_id offset, to, from;                      /* of the local experts, and between buffers and their rows */
    slot_id rx, drx, rprob, drprob, ry, dry;       /* buffers at the experts, of all ranks that share each of them */
    slot_id ry_codes;                              /* NO_SLOT: ry itself travels */
    slot_id dx_sum, dprob_sum, y_sum;              /* their sums over these ranks; NO_SLOT for one */
    slot_id need, expert_need;                     /* F64 [1], persistent: largest buffer of the step, most rows */
    const struct ep_node *node;
};

/* Slots; home->row, home->src and those of probabilities become the maps into buffers. .on is false where all experts
 * are here. */
struct ep ep_declare_slots(struct build *b, struct ep_home *home, slot_id idx, int64_t experts, int64_t k,
                           int64_t width);
/* Decides where rows go and exchanges the numbers of rows. */
void ep_declare_maps(struct build *b, const struct ep *ep, const struct ep_home *home);
/* Codes of the tokens h into the buffers, in the node n; values of what came back, in a node that reads them. */
void ep_declare_pack(struct build *b, int n, const struct ep *ep, const struct ep_home *home, slot_id h);
void ep_declare_unpack(struct build *b, int n, const struct ep_home *home);
/* Sends buffers to the experts' ranks and sorts their rows by expert. */
void ep_declare_dispatch(struct build *b, const struct ep *ep, const struct ep_home *home, const struct ep_rows *rows);
/* Returns the results to the ranks of the tokens. */
void ep_declare_return(struct build *b, const struct ep *ep, const struct ep_home *home, slot_id y, slot_id dy);

/* t [E] F64 (part of a slot), summed over the ranks that share the batch; returns without a node where there is one. */
void ep_declare_load_sum(struct build *b, slot_id load);
/* The load of each sequence, summed over the ranks that divide it (parallel.cp). */
void ep_declare_sequence_sum(struct build *b, slot_id load, bool rows);
/* The same for a persistent tally before the update's own step reads it. */
void ep_declare_tally_sum(struct build *b, slot_id tally);

#endif
