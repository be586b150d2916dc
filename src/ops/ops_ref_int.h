/* What every reference op includes beside its contract, which has the prototypes. It does not see the list of ops. */
#ifndef BRAID_OPS_REF_INT_H
#define BRAID_OPS_REF_INT_H

#include "ops/check.h"
#include "ops/op.h"

static inline double dot_f64(const double *x, const double *y, int64_t n)
{
    double sum = 0;
    for (int64_t c = 0; c < n; c++)
        sum += x[c] * y[c];
    return sum;
}

#endif
