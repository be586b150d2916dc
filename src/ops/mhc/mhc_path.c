/* The choice between kernels of the mhc boundary; see mhc_path.h. */
#include "ops/mhc/mhc_path.h"

const struct mhc_device mhc_some_hopper = {.hopper = true, .multiprocessors = 1, .in_clusters = 1},
                        mhc_some_gpu = {.multiprocessors = 1};

/* Why the fused kernels do not take a shape; NULL: they do. */
static const char *not_fused(const struct mhc_shape *s, const struct mhc_device *d)
{
    if (!d->hopper)
        return "not a Hopper GPU, or gpu.portable";
    if (s->real != DT_BF16)
        return "fused kernels take bf16";
    if (s->streams != 4)
        return "fused kernels take 4 streams";
    if (s->channels <= 0 || s->channels % MHC_BLOCK_CHANNELS != 0)
        return "fused kernels take model.hidden in multiples of 256";
    if (!s->aligned || !s->w_aligned)
        return "fused kernels take rows that are aligned to 16 bytes and have no gaps";
    return s->closes ? NULL
                     : "a boundary that closes no sublayer, or sums a gradient of its bias, has no fused kernels";
}

bool mhc_may_cluster(const struct mhc_shape *s)
{
    return s->maps && not_fused(s, &mhc_some_hopper) == NULL && s->channels / MHC_BLOCK_CHANNELS <= MHC_CLUSTER_BLOCKS;
}

/* Which of the fused kernels take the shape. An H200 runs 7 clusters of 16 blocks on its 132 multiprocessors: 85 %. */
static struct mhc_choice fused_path(const struct mhc_shape *s, const struct mhc_device *d)
{
    static const char passes[] = "fused, Hopper's bulk copies";
    if (!s->maps)
        return (struct mhc_choice){MHC_PATH_PASS, passes,
                                   "clusters are for a forward boundary that makes coefficients and norm"};
    if (!mhc_may_cluster(s))
        return (struct mhc_choice){MHC_PATH_PASS, passes, "clusters take model.hidden up to 4096"};
    if (10 * d->in_clusters < 8 * d->multiprocessors)
        return (struct mhc_choice){MHC_PATH_PASS, passes,
                                   "clusters of this width leave more than a fifth of the GPU idle"};
    return (struct mhc_choice){MHC_PATH_CLUSTER, "fused, one pass of Hopper's clusters",
                               "clusters of this width fill the GPU"};
}

struct mhc_choice mhc_path_of(const struct mhc_shape *s, const struct mhc_device *d)
{
    const char *why = not_fused(s, d);
    if (s->kernels == MHC_KERNELS_PRIMITIVE)
        return (struct mhc_choice){MHC_PATH_ROWS, "separate kernels", "mhc.kernels = primitive"};
    if (s->kernels == MHC_KERNELS_REF)
        return (struct mhc_choice){MHC_PATH_PLAIN, "plain kernels", "mhc.kernels = ref"};
    if (why == NULL)
        return fused_path(s, d);
    /* What no GPU has fused kernels for is refused where they were asked for; what this one has none for is not. The
     * first boundary of a model closes nothing: it does without, whatever was asked for. */
    if (s->kernels == MHC_KERNELS_BOUNDARY && s->closes && (s->real != DT_BF16 || s->streams != 4))
        return (struct mhc_choice){MHC_PATH_NONE, "none", not_fused(s, &mhc_some_hopper)};
    return (struct mhc_choice){MHC_PATH_ROWS, "separate kernels", why};
}

int mhc_refuse_path(const struct mhc_shape *s, const struct mhc_choice *c, struct err *e)
{
    if (c->path != MHC_PATH_NONE)
        return ST_OK;
    err_set(e, ST_UNSUPPORTED,
            "mhc.kernels = boundary: there is no fused kernel for %lld streams of %lld channels of %s: %s",
            (long long)s->streams, (long long)s->channels, dtype_name(s->real), c->why);
    return err_hint(e, "mhc.kernels = auto takes what there is");
}
