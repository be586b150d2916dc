/* embed: y[t] = w[token[t]].   token I32 [rows], w [V, d] real dense, y [rows, d] real.
 * backward: dw [V, d] wide, dense: dw[v] (+)= sum over t with token[t] = v of dy[t], in order of t.
 * A token outside [0, V) is an error (the data reader has checked; this is the last line). A GPU cannot
 * refuse: there the row of y becomes NaN, so that the loss tells. */
#ifndef BRAID_OPS_EMBED_H
#define BRAID_OPS_EMBED_H

#include "dev/dev.h"

struct embed_fwd_args {
    struct tensor token, w, y;
};
struct embed_bwd_args {
    struct tensor token, dy, dw, work;
    bool acc_dw;
};
int embed_fwd_check(const struct embed_fwd_args *a, struct err *e);
int embed_bwd_check(const struct embed_bwd_args *a, struct err *e);

#endif
