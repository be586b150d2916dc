/* Which kernels run sparse attention and its indexer on a GPU, and why: a function of shapes and of the device, so that
 * it can be tested without a GPU. Launchers, sizes of scratch, the start of a run and tests all ask it. */
#ifndef BRAID_OPS_SPARSE_PATH_H
#define BRAID_OPS_SPARSE_PATH_H

#include "ops/op.h"

enum sparse_path {
    SPARSE_PATH_PLAIN,  /* any type and width: fused multiply-adds */
    SPARSE_PATH_CORES,  /* tensor cores by mma.sync, bf16 */
    SPARSE_PATH_HOPPER, /* wgmma, keys gathered by warps of their own */
};
struct sparse_device {
    bool hopper;            /* runs kernels for compute capability 9.0 */
    int64_t smem_per_block; /* bytes */
};
struct sparse_choice {
    enum sparse_path path;
    const char *kernels; /* their name */
    const char *why;     /* why no better ones; NULL: there are none */
};
/* A Hopper GPU on paper. */
OP_C const struct sparse_device sparse_some_hopper;

/* sparse_fwd, sparse_bwd: all rows can be read in 16-byte pieces if aligned. */
struct sparse_shape {
    enum dtype real;
    int64_t heads, width, values; /* channels of a key, and of a value */
    bool aligned;
};
OP_C struct sparse_choice sparse_path_of(const struct sparse_shape *s, const struct sparse_device *d);

/* Scores of the indexer. lists: of some keys only, else of all that a query sees. */
struct index_shape {
    enum dtype real;
    int64_t heads, width;
    bool aligned, lists;
};
OP_C struct sparse_choice index_path_of(const struct index_shape *s, const struct sparse_device *d);

#endif
