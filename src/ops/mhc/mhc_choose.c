/* The choice between kernels of the mhc boundary; see mhc_choose.h. */
#include "ops/mhc/mhc_choose.h"

enum mhc_way mhc_choose(enum mhc_kernels want, const struct mhc_shape *s)
{
    bool fast = s->real == DT_BF16 && s->streams == 4 && s->aligned && s->channels > 0;
    if (want == MHC_KERNELS_PRIMITIVE)
        return MHC_WAY_ROWS;
    if (want == MHC_KERNELS_REF)
        return MHC_WAY_PLAIN;
    if (fast && s->hopper && s->channels % 256 == 0)
        return MHC_WAY_PASS;
    if (fast && s->channels % 64 == 0)
        return MHC_WAY_SLICED;
    return want == MHC_KERNELS_BOUNDARY ? MHC_WAY_NONE : MHC_WAY_ROWS;
}

const char *mhc_way_name(enum mhc_way way)
{
    static const char *const names[] = {[MHC_WAY_NONE] = "none for this shape", [MHC_WAY_PASS] = "fused, Hopper's bulk copies", [MHC_WAY_SLICED] = "fused, portable",
                                        [MHC_WAY_ROWS] = "separate kernels", [MHC_WAY_PLAIN] = "plain kernels"};
    return names[way];
}
