/* Streams of several sublayers recomputed on the CPU; see mhc.h. A row goes through all layers while its streams are in
 * the second-level cache, by the function that combine and the boundary use: so the bits are theirs. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_rebuild_int.h"

int CPU_NAME(mhc_rebuild_cpu)(struct lane *l, const struct mhc_rebuild_args *a)
{
    TRY(mhc_rebuild_check(a, l->err));
    struct mhc_combine_fwd_args c[MHC_REBUILD_LAYERS];
    for (int k = 0; k < a->layers; k++)
        c[k] = mhc_rebuild_combine(a, k);
    int64_t rows = a->x.dim[0];
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] * a->layers > 4096)
    for (int64_t r = 0; r < rows; r++)
        for (int k = 0; k < a->layers; k++)
            CPU_NAME(mhc_combine_row)(&c[k], r, row_of(&c[k].post, r), row_of(&c[k].res, r));
    return ST_OK;
}
