/* The list of all op descriptors. One line per op. */
#include "ops/opdesc.h"

#include <string.h>

extern const struct op_desc init_desc, gemm_desc, rmsnorm_fwd_desc, rmsnorm_bwd_desc, addnorm_fwd_desc,
    addnorm_bwd_desc, rope_fwd_desc, rope_bwd_desc, attention_fwd_desc, attention_bwd_desc,
    act_fwd_desc, act_bwd_desc, gate_fwd_desc, gate_bwd_desc, embed_fwd_desc, embed_bwd_desc,
    dropout_desc, xent_desc, xent_bwd_desc, colsum_desc, cache_store_desc, shift_desc, mlakeys_fwd_desc, mlakeys_bwd_desc, adamw_desc, sqnorm_desc,
    conv1d_fwd_desc, conv1d_bwd_desc, ssd_fwd_desc, ssd_bwd_desc, gatednorm_fwd_desc, gatednorm_bwd_desc,
    clip_desc, gdn_fwd_desc, gdn_bwd_desc;
extern const struct op_desc router_fwd_desc, router_bwd_desc, router_noise_desc, router_jitter_desc, router_bias_desc, moeplan_desc, epsend_desc, eprecv_desc,
    permute_desc, permute_bwd_desc, unpermute_desc, unpermute_bwd_desc, gmm_fwd_desc, gmm_bwd_desc, expert_up_desc, expert_down_bwd_desc;

extern const struct op_desc mhc_project_fwd_desc, mhc_project_bwd_desc, mhc_gates_fwd_desc, mhc_gates_bwd_desc, mhc_sinkhorn_fwd_desc, mhc_sinkhorn_bwd_desc, mhc_aggregate_fwd_desc, mhc_aggregate_bwd_desc, mhc_combine_fwd_desc, mhc_combine_bwd_desc, mhc_expand_fwd_desc, mhc_expand_bwd_desc, mhc_contract_fwd_desc, mhc_contract_bwd_desc, mhc_boundary_fwd_desc, mhc_boundary_bwd_desc, mhc_boundary_dw_desc, mhc_leave_fwd_desc, mhc_leave_bwd_desc, mhc_rebuild_desc, mhc_health_desc;

const struct op_desc *const *op_registry(int *n)
{
    static const struct op_desc *const all[] = {
        &init_desc, &gemm_desc,          &rmsnorm_fwd_desc,   &rmsnorm_bwd_desc, &addnorm_fwd_desc,
        &addnorm_bwd_desc,   &rope_fwd_desc,      &rope_bwd_desc,    &attention_fwd_desc,
        &attention_bwd_desc, &act_fwd_desc,       &act_bwd_desc,     &gate_fwd_desc,
        &gate_bwd_desc,      &embed_fwd_desc,     &embed_bwd_desc,   &dropout_desc,
        &xent_desc,          &xent_bwd_desc,      &colsum_desc,      &cache_store_desc,  &shift_desc, &mlakeys_fwd_desc, &mlakeys_bwd_desc,
        &adamw_desc,         &sqnorm_desc,        &clip_desc,
        &conv1d_fwd_desc,    &conv1d_bwd_desc,    &ssd_fwd_desc,     &ssd_bwd_desc,
        &gatednorm_fwd_desc, &gatednorm_bwd_desc,
        &gdn_fwd_desc,       &gdn_bwd_desc,
        &router_fwd_desc, &router_bwd_desc, &router_noise_desc, &router_jitter_desc, &router_bias_desc, &moeplan_desc,
        &epsend_desc, &eprecv_desc,
        &permute_desc, &permute_bwd_desc, &unpermute_desc, &unpermute_bwd_desc, &gmm_fwd_desc, &gmm_bwd_desc, &expert_up_desc, &expert_down_bwd_desc,
        &mhc_project_fwd_desc, &mhc_project_bwd_desc, &mhc_gates_fwd_desc, &mhc_gates_bwd_desc, &mhc_sinkhorn_fwd_desc, &mhc_sinkhorn_bwd_desc, &mhc_aggregate_fwd_desc, &mhc_aggregate_bwd_desc, &mhc_combine_fwd_desc, &mhc_combine_bwd_desc, &mhc_expand_fwd_desc, &mhc_expand_bwd_desc, &mhc_contract_fwd_desc, &mhc_contract_bwd_desc, &mhc_boundary_fwd_desc, &mhc_boundary_bwd_desc, &mhc_boundary_dw_desc, &mhc_leave_fwd_desc, &mhc_leave_bwd_desc, &mhc_rebuild_desc, &mhc_health_desc,
    };
    *n = countof(all);
    return all;
}

const struct op_desc *op_find(const char *name)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        if (all[i] != NULL && strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}
