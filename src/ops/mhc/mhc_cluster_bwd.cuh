/* What the boundary's backward pass in clusters (mhc_cluster_bwd.cu) knows of a row beforehand: the record that mhc_cluster_records.cu makes of it.
 * Private to ops/mhc. */
#ifndef BRAID_OPS_MHC_CLUSTER_BWD_CUH
#define BRAID_OPS_MHC_CLUSTER_BWD_CUH

#include "ops/mhc/mhc_cluster.cuh"

enum {
    TOKENS = 8,  /* of a tile */
    RECORD = 84, /* words; an odd multiple of 4, so that tokens are in different banks */
};
/* Words of a row's record. dp: pairs of bf16, high and low halves in turn; those of pre come with the pass. */
enum {
    REC_PRE = 0, /* times rstd */
    REC_RSTD = 4,
    REC_REST, /* sum over post and res of dz scale p */
    REC_RHO,  /* with it, the factor of y: -q^2 / (K rho) */
    REC_BY,   /* a_pre q */
    REC_SLOPE = 8, /* of the gates of pre, and what came from further on times it */
    REC_BASE = 12,
    REC_P = 16, /* their p times a_pre */
    REC_POST = 20,
    REC_MIX = 24, /* [i][j], whatever the profile */
    REC_DP = 40,
    REC_OPERANDS = 64, /* [pair][j], f last: mix and post of two streams as pairs of bf16, high halves and low ones */
};

/* Records of all rows, with rows of zeros up to a whole tile; and dz but for pre. */
int mhc_cluster_records(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records);

#endif
