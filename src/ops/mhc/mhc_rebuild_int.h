/* What the host versions of mhc_rebuild and its tests share: its layers as calls of combine. Private to
 * ops/mhc/mhc_rebuild*.c. */
#ifndef BRAID_OPS_MHC_REBUILD_INT_H
#define BRAID_OPS_MHC_REBUILD_INT_H

#include "ops/check.h"
#include "ops/mhc/mhc.h"
#include "ops/opdesc.h"

/* Where layer l (0-based) puts its streams: a y that is absent is made in the next one that is not, which is
 * overwritten in place. */
static inline const struct tensor *mhc_rebuild_place(const struct mhc_rebuild_args *a, int l)
{
    while (l + 1 < a->layers && !present(&a->layer[l].y))
        l++;
    return &a->layer[l].y;
}

static inline struct mhc_combine_fwd_args mhc_rebuild_combine(const struct mhc_rebuild_args *a, int l)
{
    const struct mhc_rebuild_layer *at = &a->layer[l];
    int64_t n = a->rule.streams;
    struct mhc_combine_fwd_args c = {.x = l > 0 ? *mhc_rebuild_place(a, l - 1) : a->x,
                                     .f = at->f,
                                     .bias = at->bias,
                                     .y = *mhc_rebuild_place(a, l),
                                     .post = tensor_cols(&at->coef, n, n),
                                     .res = tensor_cols(&at->coef, 2 * n, n * n),
                                     .rule = a->rule,
                                     .drop = a->drop};
    c.drop.key = at->key;
    return c;
}

#endif
