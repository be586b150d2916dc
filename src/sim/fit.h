/* Which plan is the fastest that fits into a given memory: recompute, offload, microbatch and chunk of the loss are
 * chosen, every candidate is planned as it would run and its time predicted (timeline.h). Nothing is allocated. */
#ifndef BRAID_FIT_H
#define BRAID_FIT_H

#include "sim/timeline.h"

/* A plan that was tried. */
enum { FIT_WORDS = 512 };
struct fit_row {
    int64_t micro_batch, loss_chunk; /* loss_chunk 0: chosen by the plan */
    char recompute[FIT_WORDS], offload[FIT_WORDS];
    bool blocks; /* plan.recompute_block = auto */
    /* found */
    int64_t bytes, host; /* of the fullest GPU; of host memory beside it */
    double seconds;      /* of a step, predicted */
    bool fits;
};
struct fit_opts {
    double budget;    /* bytes of one GPU */
    const char *name; /* of the budget, in a verdict: 80 GB */
    double host;      /* bytes of host memory that one GPU may use; 0: no limit */
    bool counts_host; /* the device is the host: what is offloaded counts as well */
    bool keep_micro;  /* train.micro_batch and train.loss_chunk stay as they are */
};
struct fit {
    struct fit_row *row; /* those that fit, fastest first */
    int n;
    size_t cap;
    struct fit_row as_given; /* the configuration as it is */
    struct fit_row smallest; /* what needs least memory of all that were tried */
    int tried;
};
int fit_search(struct fit *f, const struct config *c, const struct machine *m, const struct fit_opts *o, struct err *e);
void fit_release(struct fit *f);
/* A finished copy of a configuration, in which candidates can be set. */
int fit_copy_config(struct config *to, const struct config *c, struct err *e);
/* The options of a row, as on a command line; those that are the configuration's own are left out. */
void fit_options(const struct fit_row *r, const struct config *c, struct buf *out);
/* Sets them. train.global_batch stays. */
int fit_apply(const struct fit_row *r, struct config *c, struct err *e);
/* The choice, what else fits, and the options that select it by hand. */
void fit_print(const struct fit *f, const struct config *c, const struct fit_opts *o, struct buf *out);
/* One line: whether the configuration fits as it is; if not, the smallest change that makes it fit, or the smallest
 * memory. */
void fit_verdict(const struct fit *f, const struct config *c, const struct fit_opts *o, struct buf *out);

#endif
