/* Private to train/: communication between ranks outside of plans. With a single rank all of these return at once. */
#ifndef BRAID_TRAIN_RANKS_INT_H
#define BRAID_TRAIN_RANKS_INT_H

#include "train/train.h"

/* Summary of a step on one rank; after ranks_after_step, of all ranks. */
struct step_summary {
    double loss[1 + MTP_MAX_DEPTHS]; /* sums, main loss first; 0 where another stage has the head */
    double stop;                     /* enum stop_request; the largest counts */
    double saving;                   /* 1: files of a checkpoint are still being written */
};

/* trainer_save; note (may be NULL) gets what failed after the checkpoint was safe, on the rank that writes. */
int trainer_save_noting(struct trainer *t, struct err *note, struct err *e);
/* Waits for the checkpoint that threads write, where there is one, and logs it. Every rank calls it. */
int trainer_wait_for_save(struct trainer *t, struct err *e);

int ranks_open(struct trainer *t, struct err *e);
void ranks_close(struct ranks *r);
/* counts become sums over the ranks that share the batch. st: could this rank read its data? If one could not, every
 * rank gets its error, and t->data_failed is set. */
int ranks_sum_counts(struct trainer *t, int64_t *counts, int n, int st, struct err *e);
int ranks_after_step(struct trainer *t, struct step_summary *w, struct err *e);
/* *value becomes the largest of all ranks. */
int ranks_largest(struct trainer *t, const char *what, double *value, struct err *e);
/* The worst status of all ranks, with its message; a rank alone keeps its own. */
int ranks_agree(struct trainer *t, const char *what, int status, struct err *e);
/* all: the bytes of every rank, one after the other. */
int ranks_collect(struct trainer *t, const char *what, const void *mine, int64_t bytes, void *all, struct err *e);
/* What layers report: mean over microbatches and ranks, to the log of the one that has it. */
int ranks_report_metrics(struct trainer *t, struct err *e);

#endif
