/* What the host versions of adamw share. */
#ifndef BRAID_OPS_ADAMW_INT_H
#define BRAID_OPS_ADAMW_INT_H

#include "ops/adamw/adamw.h"
#include "ops/quantise/quantise.h"

/* The call that makes the codes of a part after its update. */
static inline struct quantise_args adamw_quantise(const struct adamw_part *p)
{
    struct quantise_args a = {0};
    a.x = tensor_2d(p->p.data, p->p.dtype, p->q.dim[0], p->q.dim[1]);
    a.q = p->q;
    a.qs = p->qs;
    a.t = p->t;
    a.ts = p->ts;
    a.block = ADAMW_SQUARE;
    a.square = true;
    return a;
}

/* The numbers in hyper and scale must be usable, or an update would destroy the parameter without a
 * word. Host memory. */
int adamw_value_check(const struct adamw_args *a, struct err *e);

#endif
