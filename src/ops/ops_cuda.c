/* The CUDA tables: the same launchers for bf16 and for fp32 storage, and for bf16 on Hopper, where some need less
 * scratch. Built only where nvcc is. */
#include "ops/ops.h"
#include "ops/ops_cuda_int.h"

/* Contracts have the prototypes; here none is included. */
#define OP(op, ref, cpu, cuda) OP_FORM_(op, op##_cuda, op##_work_cuda)
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS

#define ENTRY_NONE(op)
#define ENTRY_RUN(op) .op = op##_cuda,
#define ENTRY_WORK(op) .op = op##_cuda, .op##_work = op##_work_cuda,
#define OP(op, ref, cpu, cuda) ENTRY_##cuda(op)
#define ALIAS(name, op)
int64_t attention_bwd_work_hopper(const struct attention_bwd_args *a);
#define MHC_EXTRAS                                                                                                     \
    .mhc_boundary_products = mhc_boundary_products_cuda, .mhc_boundary_prepare = mhc_boundary_prepare_cuda,            \
    .mhc_boundary_clusters = mhc_boundary_clusters_cuda, .mhc_boundary_prepare_bytes = mhc_boundary_prepare_bytes_cuda

const struct ops ops_cuda_bf16 = {
    .name = "cuda bf16",
    .real = DT_BF16,
    MHC_EXTRAS,
#include "ops/ops.def"
};
/* What is sized for every GPU but a Hopper one. */
#define attention_bwd_work_cuda attention_bwd_work_hopper
const struct ops ops_cuda_hopper = {
    .name = "cuda bf16",
    .real = DT_BF16,
    MHC_EXTRAS,
#include "ops/ops.def"
};
#undef attention_bwd_work_cuda
const struct ops ops_cuda_f32 = {
    .name = "cuda fp32",
    .real = DT_F32,
    MHC_EXTRAS,
#include "ops/ops.def"
};
