/* Which kernels run the boundary between two sublayers on a GPU: a function of shapes and of what was asked for, so that it can be
 * tested without one. Nothing falls back silently: what was asked for by name and does not exist is an error. */
#ifndef BRAID_OPS_MHC_CHOOSE_H
#define BRAID_OPS_MHC_CHOOSE_H

#include "ops/mhc/mhc.h"

enum mhc_way {
    MHC_WAY_NONE,    /* fused kernels were asked for, and there are none for this shape */
    MHC_WAY_CLUSTER, /* Hopper's single forward pass, blocks that exchange sums: mhc_cluster.cu */
    MHC_WAY_PASS,    /* Hopper's passes with bulk copies: mhc_cluster.cu, mhc_pass_bwd.cu */
    MHC_WAY_SLICED,  /* products against w inside the large passes: mhc_sliced.cu */
    MHC_WAY_ROWS,    /* separate kernels, and a library's products */
    MHC_WAY_PLAIN,   /* the same without vectors: for comparison */
};
struct mhc_shape {
    enum dtype real;
    int64_t streams, channels;
    bool hopper;         /* the device runs kernels for compute capability 9.0 */
    bool aligned;        /* rows and coefficients can be taken in 16-byte pieces, streams and coefficients have no gaps */
    bool single_pass;    /* clusters were asked for */
    int64_t in_clusters; /* blocks that run at once in clusters of channels / 256, as the device says; 0: not looked up, or none */
    int64_t multiprocessors;
};

enum {
    MHC_BLOCK_CHANNELS = 256, /* of a block of Hopper's passes */
    MHC_CLUSTER_BLOCKS = 16,  /* at most */
};
/* Shapes that have a single pass: then in_clusters has to be looked up. */
bool mhc_cluster_shape(const struct mhc_shape *s);

enum mhc_way mhc_choose(enum mhc_kernels want, const struct mhc_shape *s);
/* In words, for the start of a run. */
const char *mhc_way_name(enum mhc_way way);

#endif
