/* What the .cu files and ops_cuda.c include beside contracts, which have the prototypes. It does not see the list of
 * ops. */
#ifndef BRAID_OPS_CUDA_INT_H
#define BRAID_OPS_CUDA_INT_H

#include "ops/mhc/mhc.h"
#include "ops/op.h"

bool mhc_boundary_products_cuda(const struct mhc_boundary_bwd_args *a);
int mhc_boundary_clusters_cuda(struct lane *l, int64_t channels, int64_t *blocks);
int mhc_boundary_prepare_cuda(struct lane *l, const struct mhc_boundary_bwd_args *a);
int64_t mhc_boundary_prepare_bytes_cuda(const struct mhc_boundary_bwd_args *a);

#endif
