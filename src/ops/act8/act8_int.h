/* act8 by way of act and quantise, which every device has: the calls that it stands for, with the values in `work`. */
#ifndef BRAID_OPS_ACT8_INT_H
#define BRAID_OPS_ACT8_INT_H

#include "ops/act8/act8.h"
#include "ops/quantise/quantise.h"

/* The values in front of the scratch of quantise. */
static inline int64_t act8_values_bytes(const struct tensor *x, int64_t cols)
{
    return round_up(x->dim[0] * cols * (int64_t)dtype_bytes(x->dtype), DEV_ALIGN);
}
static inline struct tensor act8_values(const struct tensor *x, int64_t cols, void *work)
{
    return tensor_2d(work, x->dtype, x->dim[0], cols);
}

#define ACT8_QUANTISE(a, values)                                                                                       \
    {                                                                                                                  \
        .x = (values), .q = (a)->q, .qs = (a)->qs, .t = (a)->t, .ts = (a)->ts, .block = (a)->block                     \
    }

#endif
