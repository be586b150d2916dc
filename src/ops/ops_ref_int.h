/* Prototypes of the reference ops; only ops_ref.c and the <op>_ref.c files include this. */
#ifndef BRAID_OPS_REF_INT_H
#define BRAID_OPS_REF_INT_H

#include "ops/check.h"
#include "ops/ops.h"

int init_ref(struct lane *l, const struct init_args *a);
int gemm_ref(struct lane *l, const struct gemm_args *a);
int rmsnorm_fwd_ref(struct lane *l, const struct rmsnorm_fwd_args *a);
int rmsnorm_bwd_ref(struct lane *l, const struct rmsnorm_bwd_args *a);
int addnorm_fwd_ref(struct lane *l, const struct addnorm_fwd_args *a);
int addnorm_bwd_ref(struct lane *l, const struct addnorm_bwd_args *a);
int rope_fwd_ref(struct lane *l, const struct rope_fwd_args *a);
int rope_bwd_ref(struct lane *l, const struct rope_bwd_args *a);
int attention_fwd_ref(struct lane *l, const struct attention_fwd_args *a);
int attention_bwd_ref(struct lane *l, const struct attention_bwd_args *a);
int act_fwd_ref(struct lane *l, const struct act_fwd_args *a);
int act_bwd_ref(struct lane *l, const struct act_bwd_args *a);
int gate_fwd_ref(struct lane *l, const struct gate_fwd_args *a);
int gate_bwd_ref(struct lane *l, const struct gate_bwd_args *a);
int embed_fwd_ref(struct lane *l, const struct embed_fwd_args *a);
int embed_bwd_ref(struct lane *l, const struct embed_bwd_args *a);
int dropout_ref(struct lane *l, const struct dropout_args *a);
int xent_ref(struct lane *l, const struct xent_args *a);
int64_t xent_work_ref(const struct xent_args *a);
int colsum_ref(struct lane *l, const struct colsum_args *a);
int cache_store_ref(struct lane *l, const struct cache_store_args *a);
int shift_ref(struct lane *l, const struct shift_args *a);
int mlakeys_fwd_ref(struct lane *l, const struct mlakeys_fwd_args *a);
int mlakeys_bwd_ref(struct lane *l, const struct mlakeys_bwd_args *a);
int conv1d_fwd_ref(struct lane *l, const struct conv1d_fwd_args *a);
int conv1d_bwd_ref(struct lane *l, const struct conv1d_bwd_args *a);
int ssd_fwd_ref(struct lane *l, const struct ssd_fwd_args *a);
int64_t ssd_fwd_work_ref(const struct ssd_fwd_args *a);
int ssd_bwd_ref(struct lane *l, const struct ssd_bwd_args *a);
int64_t ssd_bwd_work_ref(const struct ssd_bwd_args *a);
int gdn_fwd_ref(struct lane *l, const struct gdn_fwd_args *a);
int64_t gdn_fwd_work_ref(const struct gdn_fwd_args *a);
int gdn_bwd_ref(struct lane *l, const struct gdn_bwd_args *a);
int64_t gdn_bwd_work_ref(const struct gdn_bwd_args *a);
int gatednorm_fwd_ref(struct lane *l, const struct gatednorm_fwd_args *a);
int gatednorm_bwd_ref(struct lane *l, const struct gatednorm_bwd_args *a);
int router_fwd_ref(struct lane *l, const struct router_fwd_args *a);
int router_bwd_ref(struct lane *l, const struct router_bwd_args *a);
int router_noise_ref(struct lane *l, const struct router_noise_args *a);
int router_jitter_ref(struct lane *l, const struct router_jitter_args *a);
int router_bias_ref(struct lane *l, const struct router_bias_args *a);
int moeplan_ref(struct lane *l, const struct moeplan_args *a);
int epsend_ref(struct lane *l, const struct epsend_args *a);
int eprecv_ref(struct lane *l, const struct eprecv_args *a);
int permute_ref(struct lane *l, const struct permute_args *a);
int unpermute_ref(struct lane *l, const struct unpermute_args *a);
int gmm_fwd_ref(struct lane *l, const struct gmm_fwd_args *a);
int gmm_bwd_ref(struct lane *l, const struct gmm_bwd_args *a);
int expert_up_ref(struct lane *l, const struct expert_up_args *a);
int expert_down_bwd_ref(struct lane *l, const struct expert_down_bwd_args *a);
int64_t expert_down_bwd_work_ref(const struct expert_down_bwd_args *a);
int64_t router_fwd_work_ref(const struct router_fwd_args *a);
int mhc_project_fwd_ref(struct lane *l, const struct mhc_project_fwd_args *a);
int mhc_project_bwd_ref(struct lane *l, const struct mhc_project_bwd_args *a);
int mhc_gates_fwd_ref(struct lane *l, const struct mhc_gates_fwd_args *a);
int mhc_gates_bwd_ref(struct lane *l, const struct mhc_gates_bwd_args *a);
int mhc_sinkhorn_fwd_ref(struct lane *l, const struct mhc_sinkhorn_fwd_args *a);
int mhc_sinkhorn_bwd_ref(struct lane *l, const struct mhc_sinkhorn_bwd_args *a);
int mhc_aggregate_fwd_ref(struct lane *l, const struct mhc_aggregate_fwd_args *a);
int mhc_aggregate_bwd_ref(struct lane *l, const struct mhc_aggregate_bwd_args *a);
int mhc_combine_fwd_ref(struct lane *l, const struct mhc_combine_fwd_args *a);
int mhc_combine_bwd_ref(struct lane *l, const struct mhc_combine_bwd_args *a);
int mhc_expand_fwd_ref(struct lane *l, const struct mhc_expand_fwd_args *a);
int mhc_expand_bwd_ref(struct lane *l, const struct mhc_expand_bwd_args *a);
int mhc_contract_fwd_ref(struct lane *l, const struct mhc_contract_fwd_args *a);
int mhc_contract_bwd_ref(struct lane *l, const struct mhc_contract_bwd_args *a);
int mhc_boundary_fwd_ref(struct lane *l, const struct mhc_boundary_fwd_args *a);
int64_t mhc_boundary_fwd_work_ref(const struct mhc_boundary_fwd_args *a);
int mhc_boundary_bwd_ref(struct lane *l, const struct mhc_boundary_bwd_args *a);
int64_t mhc_boundary_bwd_work_ref(const struct mhc_boundary_bwd_args *a);
int mhc_boundary_dw_ref(struct lane *l, const struct mhc_boundary_dw_args *a);
int mhc_leave_fwd_ref(struct lane *l, const struct mhc_leave_fwd_args *a);
int64_t mhc_leave_fwd_work_ref(const struct mhc_leave_fwd_args *a);
int mhc_leave_bwd_ref(struct lane *l, const struct mhc_leave_bwd_args *a);
int64_t mhc_leave_bwd_work_ref(const struct mhc_leave_bwd_args *a);
int mhc_rebuild_ref(struct lane *l, const struct mhc_rebuild_args *a);
int mhc_health_ref(struct lane *l, const struct mhc_health_args *a);
int adamw_ref(struct lane *l, const struct adamw_args *a);
int sqnorm_ref(struct lane *l, const struct sqnorm_args *a);
int clip_ref(struct lane *l, const struct clip_args *a);

#endif
