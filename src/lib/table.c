/* The ops that the library calls, as tables like those of ops/ops_*.c. They name fewer ops, so that the linker leaves
 * out the kernels of all others. ops.def says which of them need scratch. */
#include "lib/lib_int.h"

#include <string.h>

/* An op is used if USE_<op> is defined; USED(op) is then YES, else NO. */
#define USE_mhc_project_fwd ~, YES
#define USE_mhc_project_bwd ~, YES
#define USE_mhc_gates_fwd ~, YES
#define USE_mhc_gates_bwd ~, YES
#define USE_mhc_sinkhorn_fwd ~, YES
#define USE_mhc_sinkhorn_bwd ~, YES
#define USE_mhc_aggregate_fwd ~, YES
#define USE_mhc_aggregate_bwd ~, YES
#define USE_mhc_combine_fwd ~, YES
#define USE_mhc_combine_bwd ~, YES
#define USE_mhc_boundary_fwd ~, YES
#define USE_mhc_boundary_bwd ~, YES
#define USE_mhc_boundary_dw ~, YES
#define USE_expert_up ~, YES
#define USE_expert_down_bwd ~, YES
#define USE_gmm_fwd ~, YES
#define USE_gmm_bwd ~, YES
#define USE_moeplan ~, YES
#define USE_permute ~, YES
#define USE_unpermute ~, YES
#define USE_ssd_fwd ~, YES
#define USE_ssd_bwd ~, YES
#define USE_gdn_fwd ~, YES
#define USE_gdn_bwd ~, YES
#define USE_router_fwd ~, YES
#define USE_router_bwd ~, YES
#define USE_xent ~, YES

#define SECOND_(first, second, ...) second
#define SECOND(...) SECOND_(__VA_ARGS__)
#define USED(op) SECOND(USE_##op, NO, ~)
#define KEEP_YES(...) __VA_ARGS__
#define KEEP_NO(...)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define IF_USED(op, ...) JOIN(KEEP_, USED(op))(__VA_ARGS__)

#define FORMS(op, suffix)                                                                                              \
    int op##_##suffix(struct lane *, const struct op##_args *);                                                        \
    int64_t op##_work_##suffix(const struct op##_args *);
#if defined(__x86_64__)
#define CPU_FORMS(op) FORMS(op, cpu_base) FORMS(op, cpu_avx2) FORMS(op, cpu_avx512)
#else
#define CPU_FORMS(op) FORMS(op, cpu_base)
#endif
#define ALIAS(name, op)
#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, FORMS(op, ref) CPU_FORMS(op) FORMS(op, cuda))
#include "ops/ops.def"
#undef OP

#define ENTRY_NONE(op, suffix)
#define ENTRY_RUN(op, suffix) .op = op##_##suffix,
#define ENTRY_WORK(op, suffix) .op = op##_##suffix, .op##_work = op##_work_##suffix,

#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, ENTRY_##on_ref(op, ref))
static const struct ops table_ref = {
    .name = "reference",
    .real = DT_F64,
#include "ops/ops.def"
};
#undef OP
#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, ENTRY_##on_cpu(op, cpu_base))
static const struct ops table_cpu_base = {
    .name = "cpu",
    .real = DT_F32,
#include "ops/ops.def"
};
#undef OP
#if defined(__x86_64__)
#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, ENTRY_##on_cpu(op, cpu_avx2))
static const struct ops table_cpu_avx2 = {
    .name = "cpu",
    .real = DT_F32,
#include "ops/ops.def"
};
#undef OP
#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, ENTRY_##on_cpu(op, cpu_avx512))
static const struct ops table_cpu_avx512 = {
    .name = "cpu",
    .real = DT_F32,
#include "ops/ops.def"
};
#undef OP
#endif

#ifdef BRAID_CUDA
bool mhc_boundary_products_cuda(const struct mhc_boundary_bwd_args *a);
int mhc_boundary_clusters_cuda(struct lane *l, int64_t channels, int64_t *blocks);
#define EXTRAS .mhc_boundary_products = mhc_boundary_products_cuda, .mhc_boundary_clusters = mhc_boundary_clusters_cuda
#define OP(op, on_ref, on_cpu, on_cuda) IF_USED(op, ENTRY_##on_cuda(op, cuda))
static const struct ops table_cuda_bf16 = {
    .name = "cuda bf16",
    .real = DT_BF16,
    EXTRAS,
#include "ops/ops.def"
};
static const struct ops table_cuda_f32 = {
    .name = "cuda fp32",
    .real = DT_F32,
    EXTRAS,
#include "ops/ops.def"
};
#undef OP
#endif

const struct ops *lib_ops(const struct dev *d)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return d->real == DT_BF16 ? &table_cuda_bf16 : &table_cuda_f32;
#endif
    if (d->kind == DEV_REF)
        return &table_ref;
    if (d->kind != DEV_CPU)
        return NULL;
#if defined(__x86_64__)
    const char *isa = cpu_isa();
    if (strcmp(isa, "avx512") == 0)
        return &table_cpu_avx512;
    if (strcmp(isa, "avx2") == 0)
        return &table_cpu_avx2;
#endif
    return &table_cpu_base;
}
