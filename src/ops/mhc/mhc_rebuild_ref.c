/* Streams of several sublayers recomputed, reference: combine after combine; see mhc.h. */
#include "ops/mhc/mhc_rebuild_int.h"
#include "ops/mhc/mhc.h"
#include "ops/ops_ref_int.h"

int mhc_rebuild_ref(struct lane *l, const struct mhc_rebuild_args *a)
{
    TRY(mhc_rebuild_check(a, l->err));
    for (int k = 0; k < a->layers; k++) {
        struct mhc_combine_fwd_args c = mhc_rebuild_combine(a, k);
        TRY(mhc_combine_fwd_ref(l, &c));
    }
    return ST_OK;
}
