/* The choice between kernels of the mhc boundary; see mhc_choose.h. */
#include "ops/mhc/mhc_choose.h"
#include "ops/mhc/mhc.h"

static bool fast(const struct mhc_shape *s) { return s->real == DT_BF16 && s->streams == 4 && s->aligned && s->channels > 0; }

bool mhc_cluster_shape(const struct mhc_shape *s)
{
    return fast(s) && s->hopper && s->channels % MHC_BLOCK_CHANNELS == 0 && s->channels / MHC_BLOCK_CHANNELS <= MHC_CLUSTER_BLOCKS;
}

enum mhc_way mhc_choose(enum mhc_kernels want, const struct mhc_shape *s)
{
    if (want == MHC_KERNELS_PRIMITIVE)
        return MHC_WAY_ROWS;
    if (want == MHC_KERNELS_REF)
        return MHC_WAY_PLAIN;
    if (s->single_pass && mhc_cluster_shape(s))
        return s->in_clusters > 0 ? MHC_WAY_CLUSTER : MHC_WAY_NONE;
    if (mhc_cluster_shape(s) && 10 * s->in_clusters >= 8 * s->multiprocessors) /* of 16 blocks, an H200 runs 7 on 132 multiprocessors */
        return MHC_WAY_CLUSTER;
    if (fast(s) && s->hopper && s->channels % MHC_BLOCK_CHANNELS == 0)
        return MHC_WAY_PASS;
    if (fast(s) && s->channels % 64 == 0)
        return MHC_WAY_SLICED;
    return want == MHC_KERNELS_BOUNDARY ? MHC_WAY_NONE : MHC_WAY_ROWS;
}

const char *mhc_way_name(enum mhc_way way)
{
    static const char *const names[] = {[MHC_WAY_NONE] = "none for this shape", [MHC_WAY_CLUSTER] = "fused, one pass of Hopper's clusters",
                                        [MHC_WAY_PASS] = "fused, Hopper's bulk copies", [MHC_WAY_SLICED] = "fused, portable",
                                        [MHC_WAY_ROWS] = "separate kernels", [MHC_WAY_PLAIN] = "plain kernels"};
    return names[way];
}
