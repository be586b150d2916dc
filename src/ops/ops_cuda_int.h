/* Prototypes of the CUDA launchers; ops_cuda.c and the .cu files include this. */
#ifndef BRAID_OPS_CUDA_INT_H
#define BRAID_OPS_CUDA_INT_H

#include "ops/ops.h"
#include "ops/mhc/mhc.h"

#define PROTOTYPE_NONE(name)
#define PROTOTYPE_RUN(name)  int name##_cuda(struct lane *l, const struct name##_args *a);
#define PROTOTYPE_WORK(name) PROTOTYPE_RUN(name) int64_t name##_work_cuda(const struct name##_args *a);
#define OP(name, ref, cpu, cuda) PROTOTYPE_##cuda(name)
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS
#undef PROTOTYPE_NONE
#undef PROTOTYPE_RUN
#undef PROTOTYPE_WORK
bool mhc_boundary_products_cuda(const struct mhc_boundary_bwd_args *a);
int mhc_boundary_ready_cuda(struct lane *l, const struct mhc_boundary_bwd_args *a);
int64_t mhc_boundary_ready_bytes_cuda(const struct mhc_boundary_bwd_args *a);

#endif
