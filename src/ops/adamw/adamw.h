/* adamw: one decoupled-weight-decay Adam update of one parameter, or of several, in place.
 *   p, g, m, v [n] wide dense. hyper F64 [8] on the device: [0] lr, [1] 1 - beta1^t, [2] 1 - beta2^t.
 *   scale F64 [4] from clip: [1] gradient coefficient, [2] skip if nonzero: nothing is written.
 *   copy [n] real dense, optional: p after the update, rounded; what the layers compute with.
 *   g' = g * scale[1]; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *   p -= lr * ( (m / hyper[1]) / (sqrt(v / hyper[2]) + eps) + decay * p ).
 * more: n_more further parameters (host memory, read during the call) with a decay of their own. Each is updated
 *   as by a call of its own, but a GPU needs one launch for dozens of them. */
#ifndef BRAID_OPS_ADAMW_H
#define BRAID_OPS_ADAMW_H

#include "dev/dev.h"

struct adamw_part {
    struct tensor p, g, m, v, copy;
    double decay;
};
struct adamw_args {
    struct tensor p, g, m, v, copy, hyper, scale;
    double beta1, beta2, eps, decay;
    const struct adamw_part *more;
    int n_more;
};
int adamw_check(const struct adamw_args *a, struct err *e);
/* Parameter k of the call, 0 <= k <= n_more. */
static inline struct adamw_part adamw_part_at(const struct adamw_args *a, int k)
{
    struct adamw_part first = {a->p, a->g, a->m, a->v, a->copy, a->decay};
    return k == 0 ? first : a->more[k - 1];
}

#endif
