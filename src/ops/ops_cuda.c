/* The CUDA tables: the same launchers for bf16 and for fp32 storage. Built only where nvcc is. */
#include "ops/ops_cuda_int.h"

#define CUDA_OPS                                      \
    .rmsnorm_fwd = rmsnorm_fwd_cuda, .rmsnorm_bwd = rmsnorm_bwd_cuda, .rmsnorm_bwd_work = rmsnorm_bwd_work_cuda, \
    .addnorm_fwd = addnorm_fwd_cuda, .addnorm_bwd = addnorm_bwd_cuda, .addnorm_bwd_work = addnorm_bwd_work_cuda, \
    .rope_fwd = rope_fwd_cuda, .rope_bwd = rope_bwd_cuda, .rope_bwd_work = rope_bwd_work_cuda, \
    .act_fwd = act_fwd_cuda, .act_bwd = act_bwd_cuda, .gate_fwd = gate_fwd_cuda, .gate_bwd = gate_bwd_cuda, \
    .embed_fwd = embed_fwd_cuda, .embed_bwd = embed_bwd_cuda, .embed_bwd_work = embed_bwd_work_cuda, \
    .dropout = dropout_cuda, .colsum = colsum_cuda, .colsum_work = colsum_work_cuda, \
    .cache_store = cache_store_cuda, .shift = shift_cuda, .mlakeys_fwd = mlakeys_fwd_cuda, .mlakeys_bwd = mlakeys_bwd_cuda, \
    .conv1d_fwd = conv1d_fwd_cuda, .conv1d_fwd_work = conv1d_fwd_work_cuda, .conv1d_bwd = conv1d_bwd_cuda, .conv1d_bwd_work = conv1d_bwd_work_cuda, \
    .gatednorm_fwd = gatednorm_fwd_cuda, .gatednorm_bwd = gatednorm_bwd_cuda, .gatednorm_bwd_work = gatednorm_bwd_work_cuda, \
    .adamw = adamw_cuda, .sqnorm = sqnorm_cuda, .sqnorm_work = sqnorm_work_cuda, .clip = clip_cuda, \
    .gdn_fwd = gdn_fwd_cuda, .gdn_fwd_work = gdn_fwd_work_cuda, .gdn_bwd = gdn_bwd_cuda, .gdn_bwd_work = gdn_bwd_work_cuda, \
    .ssd_fwd = ssd_fwd_cuda, .ssd_fwd_work = ssd_fwd_work_cuda, .ssd_bwd = ssd_bwd_cuda, .ssd_bwd_work = ssd_bwd_work_cuda, \
    .attention_fwd = attention_fwd_cuda, .attention_fwd_work = attention_fwd_work_cuda, \
    .attention_bwd = attention_bwd_cuda, .attention_bwd_work = attention_bwd_work_cuda, \
    .router_fwd = router_fwd_cuda, .router_fwd_work = router_fwd_work_cuda, .router_bwd = router_bwd_cuda, \
    .router_noise = router_noise_cuda, .router_jitter = router_jitter_cuda, .router_bias = router_bias_cuda, \
    .epsend = epsend_cuda, .eprecv = eprecv_cuda, .moeplan = moeplan_cuda, .moeplan_work = moeplan_work_cuda, .permute = permute_cuda, .unpermute = unpermute_cuda, \
    .gmm_fwd = gmm_fwd_cuda, .gmm_bwd = gmm_bwd_cuda, .expert_up = expert_up_cuda, .expert_down_bwd = expert_down_bwd_cuda, \
    .expert_down_bwd_work = expert_down_bwd_work_cuda, \
    .mhc_project_fwd = mhc_project_fwd_cuda, .mhc_project_bwd = mhc_project_bwd_cuda, .mhc_project_bwd_work = mhc_project_bwd_work_cuda, \
    .mhc_gates_fwd = mhc_gates_fwd_cuda, .mhc_gates_bwd = mhc_gates_bwd_cuda, .mhc_sinkhorn_fwd = mhc_sinkhorn_fwd_cuda, \
    .mhc_sinkhorn_bwd = mhc_sinkhorn_bwd_cuda, .mhc_aggregate_fwd = mhc_aggregate_fwd_cuda, .mhc_aggregate_bwd = mhc_aggregate_bwd_cuda, \
    .mhc_combine_fwd = mhc_combine_fwd_cuda, .mhc_combine_bwd = mhc_combine_bwd_cuda, .mhc_combine_bwd_work = mhc_combine_bwd_work_cuda, \
    .mhc_expand_fwd = mhc_expand_fwd_cuda, .mhc_expand_bwd = mhc_expand_bwd_cuda, .mhc_contract_fwd = mhc_contract_fwd_cuda, \
    .mhc_contract_bwd = mhc_contract_bwd_cuda, .mhc_contract_bwd_work = mhc_contract_bwd_work_cuda, .mhc_boundary_fwd = mhc_boundary_fwd_cuda, \
    .mhc_boundary_fwd_work = mhc_boundary_fwd_work_cuda, .mhc_boundary_bwd = mhc_boundary_bwd_cuda, .mhc_boundary_bwd_work = mhc_boundary_bwd_work_cuda, \
    .mhc_boundary_products = mhc_boundary_products_cuda, .mhc_boundary_ready = mhc_boundary_ready_cuda, .mhc_boundary_ready_bytes = mhc_boundary_ready_bytes_cuda, \
    .mhc_boundary_dw = mhc_boundary_dw_cuda, .mhc_boundary_dw_work = mhc_boundary_dw_work_cuda, .mhc_leave_fwd = mhc_leave_fwd_cuda, .mhc_leave_fwd_work = mhc_leave_fwd_work_cuda, .mhc_leave_bwd = mhc_leave_bwd_cuda, \
    .mhc_leave_bwd_work = mhc_leave_bwd_work_cuda, .mhc_rebuild = mhc_rebuild_cuda, .mhc_health = mhc_health_cuda, .mhc_health_work = mhc_health_work_cuda, \
    .init = init_cuda, .gemm = gemm_cuda,                                \
    .xent = xent_cuda, .xent_work = xent_work_cuda

const struct ops ops_cuda_bf16 = {.name = "cuda bf16", .real = DT_BF16, CUDA_OPS};
const struct ops ops_cuda_f32 = {.name = "cuda fp32", .real = DT_F32, CUDA_OPS};
