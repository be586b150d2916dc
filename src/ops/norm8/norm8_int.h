/* norm8 by way of numbers in `work`, which every device has. */
#ifndef BRAID_OPS_NORM8_INT_H
#define BRAID_OPS_NORM8_INT_H

#include "ops/norm8/norm8.h"
#include "ops/quantise/quantise.h"

/* The values in front of the scratch of quantise. */
static inline int64_t norm8_values_bytes(const struct tensor *x)
{
    return round_up(x->dim[0] * x->dim[1] * (int64_t)dtype_bytes(x->dtype), DEV_ALIGN);
}
/* The call that makes codes of them. */
static inline struct quantise_args norm8_quantise(const struct norm8_args *a)
{
    struct quantise_args q = {0};
    q.x = tensor_2d(a->work.data != NULL ? a->work.data : a->x.data, a->x.dtype, a->x.dim[0], a->x.dim[1]);
    q.q = a->q;
    q.qs = a->qs;
    q.t = a->t;
    q.ts = a->ts;
    q.block = a->block;
    return q;
}

#endif
