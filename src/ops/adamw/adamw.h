/* adamw: one decoupled-weight-decay Adam update of one parameter, in place.
 *   p, g, m, v [n] real dense. hyper F64 [8] on the device: [0] lr, [1] 1 - beta1^t, [2] 1 - beta2^t.
 *   scale F64 [4] from clip: [1] gradient coefficient, [2] skip if nonzero: nothing is written.
 *   g' = g * scale[1]; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *   p -= lr * ( (m / hyper[1]) / (sqrt(v / hyper[2]) + eps) + decay * p ). */
#ifndef BRAID_OPS_ADAMW_H
#define BRAID_OPS_ADAMW_H

#include "dev/dev.h"

struct adamw_args {
    struct tensor p, g, m, v, hyper, scale;
    double beta1, beta2, eps, decay;
};
int adamw_check(const struct adamw_args *a, struct err *e);

#endif
