/* Which kernels run a boundary between two sublayers on a GPU, and why: a function of shapes, of the device and of what
 * was asked for, so that it can be tested without a GPU. Launchers, sizes of scratch, the start of a run and tests all
 * ask it. Nothing falls back silently: the start of a run prints the reason, and to ask by name for what exists on no
 * GPU is an error. */
#ifndef BRAID_OPS_MHC_PATH_H
#define BRAID_OPS_MHC_PATH_H

#include "ops/mhc/mhc.h"

enum mhc_path {
    MHC_PATH_NONE, /* fused kernels were asked for, and there are none for this type or number of streams */
    /* Hopper: all of the forward boundary in one pass of clusters, whose blocks exchange sums (mhc_cluster.cu) */
    MHC_PATH_CLUSTER,
    /* Hopper: passes with bulk copies; forward with a second one for h (mhc_cluster.cu), backward (mhc_pass_bwd.cu) */
    MHC_PATH_PASS,
    MHC_PATH_ROWS,  /* any GPU: separate kernels, and a library's products */
    MHC_PATH_PLAIN, /* the same without vectors: for comparison */
};
struct mhc_shape {
    enum mhc_kernels kernels; /* what was asked for */
    enum dtype real;
    int64_t streams, channels;
    bool aligned;   /* rows and coefficients can be taken in 16-byte pieces, streams and coefficients have no gaps */
    bool w_aligned; /* and w can: Hopper's forward passes read it that way */
    bool closes;    /* a sublayer is closed, and no gradient of its bias is summed: others have separate kernels only */
    bool maps;      /* forward: coefficients and h are made, which clusters do on the way */
};
struct mhc_device {
    bool hopper; /* runs kernels for compute capability 9.0 */
    int64_t multiprocessors;
    /* blocks that run at once in clusters of channels / MHC_BLOCK_CHANNELS, as the device says; 0: none */
    int64_t in_clusters;
};
enum {
    MHC_BLOCK_CHANNELS = 256, /* of a block of Hopper's passes */
    MHC_CLUSTER_BLOCKS = 16,  /* at most */
};

struct mhc_choice {
    enum mhc_path path;
    const char *kernels; /* their name */
    const char *why;     /* a sentence */
};
struct mhc_choice mhc_path_of(const struct mhc_shape *s, const struct mhc_device *d);
/* Devices of which no more is known than that they are a Hopper GPU whose clusters fit, or another GPU: for sizes of
 * scratch, and for plans on paper. */
extern const struct mhc_device mhc_some_hopper, mhc_some_gpu;
/* Can the shape have clusters? Then in_clusters has to be looked up. */
bool mhc_may_cluster(const struct mhc_shape *s);
/* ST_UNSUPPORTED with the reason, where nothing serves the shape. */
int mhc_refuse_path(const struct mhc_shape *s, const struct mhc_choice *c, struct err *e);

#endif
