/* Prototypes of the fast CPU ops. Every *_cpu.c is compiled once per instruction set with ISA
 * defined (avx512, avx2 or base); CPU_NAME(f) is f_avx512 and so on. */
#ifndef BRAID_OPS_CPU_INT_H
#define BRAID_OPS_CPU_INT_H

#include "ops/check.h"
#include "ops/ops.h"

#ifndef ISA
#define ISA base /* only for editors and analysers; the Makefile always says */
#endif
#define CPU_PASTE2(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE2(name, isa)
#define CPU_NAME(name) CPU_PASTE(name, ISA)

int CPU_NAME(init_cpu)(struct lane *l, const struct init_args *a);
int CPU_NAME(gemm_cpu)(struct lane *l, const struct gemm_args *a);
int CPU_NAME(rmsnorm_fwd_cpu)(struct lane *l, const struct rmsnorm_fwd_args *a);
int CPU_NAME(rmsnorm_bwd_cpu)(struct lane *l, const struct rmsnorm_bwd_args *a);
int64_t CPU_NAME(rmsnorm_bwd_work_cpu)(const struct rmsnorm_bwd_args *a);
int CPU_NAME(addnorm_fwd_cpu)(struct lane *l, const struct addnorm_fwd_args *a);
int CPU_NAME(addnorm_bwd_cpu)(struct lane *l, const struct addnorm_bwd_args *a);
int64_t CPU_NAME(addnorm_bwd_work_cpu)(const struct addnorm_bwd_args *a);
int CPU_NAME(rope_fwd_cpu)(struct lane *l, const struct rope_fwd_args *a);
int CPU_NAME(rope_bwd_cpu)(struct lane *l, const struct rope_bwd_args *a);
int64_t CPU_NAME(rope_bwd_work_cpu)(const struct rope_bwd_args *a);
int CPU_NAME(attention_fwd_cpu)(struct lane *l, const struct attention_fwd_args *a);
int64_t CPU_NAME(attention_fwd_work_cpu)(const struct attention_fwd_args *a);
int CPU_NAME(attention_bwd_cpu)(struct lane *l, const struct attention_bwd_args *a);
int64_t CPU_NAME(attention_bwd_work_cpu)(const struct attention_bwd_args *a);
int CPU_NAME(act_fwd_cpu)(struct lane *l, const struct act_fwd_args *a);
int CPU_NAME(act_bwd_cpu)(struct lane *l, const struct act_bwd_args *a);
int CPU_NAME(gate_fwd_cpu)(struct lane *l, const struct gate_fwd_args *a);
int CPU_NAME(gate_bwd_cpu)(struct lane *l, const struct gate_bwd_args *a);
int CPU_NAME(embed_fwd_cpu)(struct lane *l, const struct embed_fwd_args *a);
int CPU_NAME(embed_bwd_cpu)(struct lane *l, const struct embed_bwd_args *a);
int64_t CPU_NAME(embed_bwd_work_cpu)(const struct embed_bwd_args *a);
int CPU_NAME(dropout_cpu)(struct lane *l, const struct dropout_args *a);
int CPU_NAME(xent_cpu)(struct lane *l, const struct xent_args *a);
int64_t CPU_NAME(xent_work_cpu)(const struct xent_args *a);
int CPU_NAME(colsum_cpu)(struct lane *l, const struct colsum_args *a);
int64_t CPU_NAME(colsum_work_cpu)(const struct colsum_args *a);
int CPU_NAME(cache_store_cpu)(struct lane *l, const struct cache_store_args *a);
int CPU_NAME(shift_cpu)(struct lane *l, const struct shift_args *a);
int CPU_NAME(mlakeys_fwd_cpu)(struct lane *l, const struct mlakeys_fwd_args *a);
int CPU_NAME(mlakeys_bwd_cpu)(struct lane *l, const struct mlakeys_bwd_args *a);
int CPU_NAME(conv1d_fwd_cpu)(struct lane *l, const struct conv1d_fwd_args *a);
int64_t CPU_NAME(conv1d_fwd_work_cpu)(const struct conv1d_fwd_args *a);
int CPU_NAME(conv1d_bwd_cpu)(struct lane *l, const struct conv1d_bwd_args *a);
int64_t CPU_NAME(conv1d_bwd_work_cpu)(const struct conv1d_bwd_args *a);
int CPU_NAME(ssd_fwd_cpu)(struct lane *l, const struct ssd_fwd_args *a);
int64_t CPU_NAME(ssd_fwd_work_cpu)(const struct ssd_fwd_args *a);
int CPU_NAME(ssd_bwd_cpu)(struct lane *l, const struct ssd_bwd_args *a);
int64_t CPU_NAME(ssd_bwd_work_cpu)(const struct ssd_bwd_args *a);
int CPU_NAME(gdn_fwd_cpu)(struct lane *l, const struct gdn_fwd_args *a);
int64_t CPU_NAME(gdn_fwd_work_cpu)(const struct gdn_fwd_args *a);
int CPU_NAME(gdn_bwd_cpu)(struct lane *l, const struct gdn_bwd_args *a);
int64_t CPU_NAME(gdn_bwd_work_cpu)(const struct gdn_bwd_args *a);
int CPU_NAME(gatednorm_fwd_cpu)(struct lane *l, const struct gatednorm_fwd_args *a);
int CPU_NAME(gatednorm_bwd_cpu)(struct lane *l, const struct gatednorm_bwd_args *a);
int64_t CPU_NAME(gatednorm_bwd_work_cpu)(const struct gatednorm_bwd_args *a);
int CPU_NAME(router_fwd_cpu)(struct lane *l, const struct router_fwd_args *a);
int CPU_NAME(router_bwd_cpu)(struct lane *l, const struct router_bwd_args *a);
int CPU_NAME(router_noise_cpu)(struct lane *l, const struct router_noise_args *a);
int CPU_NAME(router_jitter_cpu)(struct lane *l, const struct router_jitter_args *a);
int CPU_NAME(router_bias_cpu)(struct lane *l, const struct router_bias_args *a);
int CPU_NAME(moeplan_cpu)(struct lane *l, const struct moeplan_args *a);
int CPU_NAME(epsend_cpu)(struct lane *l, const struct epsend_args *a);
int CPU_NAME(eprecv_cpu)(struct lane *l, const struct eprecv_args *a);
int CPU_NAME(permute_cpu)(struct lane *l, const struct permute_args *a);
int CPU_NAME(unpermute_cpu)(struct lane *l, const struct unpermute_args *a);
int CPU_NAME(gmm_fwd_cpu)(struct lane *l, const struct gmm_fwd_args *a);
int CPU_NAME(gmm_bwd_cpu)(struct lane *l, const struct gmm_bwd_args *a);
int CPU_NAME(expert_up_cpu)(struct lane *l, const struct expert_up_args *a);
int CPU_NAME(expert_down_bwd_cpu)(struct lane *l, const struct expert_down_bwd_args *a);
int64_t CPU_NAME(expert_down_bwd_work_cpu)(const struct expert_down_bwd_args *a);
int64_t CPU_NAME(router_fwd_work_cpu)(const struct router_fwd_args *a);
int CPU_NAME(mhc_project_fwd_cpu)(struct lane *l, const struct mhc_project_fwd_args *a);
int CPU_NAME(mhc_project_bwd_cpu)(struct lane *l, const struct mhc_project_bwd_args *a);
int64_t CPU_NAME(mhc_project_bwd_work_cpu)(const struct mhc_project_bwd_args *a);
int CPU_NAME(mhc_gates_fwd_cpu)(struct lane *l, const struct mhc_gates_fwd_args *a);
int CPU_NAME(mhc_gates_bwd_cpu)(struct lane *l, const struct mhc_gates_bwd_args *a);
int CPU_NAME(mhc_sinkhorn_fwd_cpu)(struct lane *l, const struct mhc_sinkhorn_fwd_args *a);
int CPU_NAME(mhc_sinkhorn_bwd_cpu)(struct lane *l, const struct mhc_sinkhorn_bwd_args *a);
int CPU_NAME(mhc_aggregate_fwd_cpu)(struct lane *l, const struct mhc_aggregate_fwd_args *a);
int CPU_NAME(mhc_aggregate_bwd_cpu)(struct lane *l, const struct mhc_aggregate_bwd_args *a);
int CPU_NAME(mhc_combine_fwd_cpu)(struct lane *l, const struct mhc_combine_fwd_args *a);
int CPU_NAME(mhc_combine_bwd_cpu)(struct lane *l, const struct mhc_combine_bwd_args *a);
int64_t CPU_NAME(mhc_combine_bwd_work_cpu)(const struct mhc_combine_bwd_args *a);
int CPU_NAME(mhc_expand_fwd_cpu)(struct lane *l, const struct mhc_expand_fwd_args *a);
int CPU_NAME(mhc_expand_bwd_cpu)(struct lane *l, const struct mhc_expand_bwd_args *a);
int CPU_NAME(mhc_contract_fwd_cpu)(struct lane *l, const struct mhc_contract_fwd_args *a);
int CPU_NAME(mhc_contract_bwd_cpu)(struct lane *l, const struct mhc_contract_bwd_args *a);
int64_t CPU_NAME(mhc_contract_bwd_work_cpu)(const struct mhc_contract_bwd_args *a);
int CPU_NAME(mhc_boundary_fwd_cpu)(struct lane *l, const struct mhc_boundary_fwd_args *a);
int CPU_NAME(mhc_boundary_bwd_cpu)(struct lane *l, const struct mhc_boundary_bwd_args *a);
int64_t CPU_NAME(mhc_boundary_bwd_work_cpu)(const struct mhc_boundary_bwd_args *a);
int CPU_NAME(mhc_boundary_dw_cpu)(struct lane *l, const struct mhc_boundary_dw_args *a);
int64_t CPU_NAME(mhc_boundary_dw_work_cpu)(const struct mhc_boundary_dw_args *a);
int CPU_NAME(mhc_leave_fwd_cpu)(struct lane *l, const struct mhc_leave_fwd_args *a);
int64_t CPU_NAME(mhc_leave_fwd_work_cpu)(const struct mhc_leave_fwd_args *a);
int CPU_NAME(mhc_leave_bwd_cpu)(struct lane *l, const struct mhc_leave_bwd_args *a);
int64_t CPU_NAME(mhc_leave_bwd_work_cpu)(const struct mhc_leave_bwd_args *a);
int CPU_NAME(mhc_rebuild_cpu)(struct lane *l, const struct mhc_rebuild_args *a);
int CPU_NAME(mhc_health_cpu)(struct lane *l, const struct mhc_health_args *a);
int CPU_NAME(adamw_cpu)(struct lane *l, const struct adamw_args *a);
int CPU_NAME(sqnorm_cpu)(struct lane *l, const struct sqnorm_args *a);
int64_t CPU_NAME(sqnorm_work_cpu)(const struct sqnorm_args *a);
int CPU_NAME(clip_cpu)(struct lane *l, const struct clip_args *a);

extern const struct ops CPU_NAME(ops_cpu);

#endif
