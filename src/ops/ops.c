/* Which table serves a device. */
#include "ops/ops.h"

#include <stddef.h>
#include <string.h>

extern const struct ops ops_cpu_base;
#if defined(__x86_64__) && !defined(OPS_BASE_ONLY)
extern const struct ops ops_cpu_avx2, ops_cpu_avx512;
#endif

/* Fields by name; a descriptor that runs another op under its own name ("xent_bwd") has that name as its prefix. */
static const struct {
    const char *name;
    size_t at;
} entries[] = {
    {"gemm", offsetof(struct ops, gemm)},
    {"rmsnorm_fwd", offsetof(struct ops, rmsnorm_fwd)},
    {"rmsnorm_bwd", offsetof(struct ops, rmsnorm_bwd)},
    {"addnorm_fwd", offsetof(struct ops, addnorm_fwd)},
    {"addnorm_bwd", offsetof(struct ops, addnorm_bwd)},
    {"rope_fwd", offsetof(struct ops, rope_fwd)},
    {"rope_bwd", offsetof(struct ops, rope_bwd)},
    {"attention_fwd", offsetof(struct ops, attention_fwd)},
    {"attention_bwd", offsetof(struct ops, attention_bwd)},
    {"act_fwd", offsetof(struct ops, act_fwd)},
    {"act_bwd", offsetof(struct ops, act_bwd)},
    {"gate_fwd", offsetof(struct ops, gate_fwd)},
    {"gate_bwd", offsetof(struct ops, gate_bwd)},
    {"embed_fwd", offsetof(struct ops, embed_fwd)},
    {"embed_bwd", offsetof(struct ops, embed_bwd)},
    {"dropout", offsetof(struct ops, dropout)},
    {"xent", offsetof(struct ops, xent)},
    {"colsum", offsetof(struct ops, colsum)},
    {"cache_store", offsetof(struct ops, cache_store)},
    {"shift", offsetof(struct ops, shift)},
    {"mlakeys_fwd", offsetof(struct ops, mlakeys_fwd)},
    {"mlakeys_bwd", offsetof(struct ops, mlakeys_bwd)},
    {"conv1d_fwd", offsetof(struct ops, conv1d_fwd)},
    {"conv1d_bwd", offsetof(struct ops, conv1d_bwd)},
    {"ssd_fwd", offsetof(struct ops, ssd_fwd)},
    {"ssd_bwd", offsetof(struct ops, ssd_bwd)},
    {"gdn_fwd", offsetof(struct ops, gdn_fwd)},
    {"gdn_bwd", offsetof(struct ops, gdn_bwd)},
    {"gatednorm_fwd", offsetof(struct ops, gatednorm_fwd)},
    {"gatednorm_bwd", offsetof(struct ops, gatednorm_bwd)},
    {"router_fwd", offsetof(struct ops, router_fwd)},
    {"router_bwd", offsetof(struct ops, router_bwd)},
    {"router_noise", offsetof(struct ops, router_noise)},
    {"router_jitter", offsetof(struct ops, router_jitter)},
    {"router_bias", offsetof(struct ops, router_bias)},
    {"moeplan", offsetof(struct ops, moeplan)},
    {"epsend", offsetof(struct ops, epsend)},
    {"eprecv", offsetof(struct ops, eprecv)},
    {"permute", offsetof(struct ops, permute)},
    {"unpermute", offsetof(struct ops, unpermute)},
    {"gmm_fwd", offsetof(struct ops, gmm_fwd)},
    {"gmm_bwd", offsetof(struct ops, gmm_bwd)},
    {"expert_up", offsetof(struct ops, expert_up)},
    {"expert_down_bwd", offsetof(struct ops, expert_down_bwd)},
    {"mhc_project_fwd", offsetof(struct ops, mhc_project_fwd)},
    {"mhc_project_bwd", offsetof(struct ops, mhc_project_bwd)},
    {"mhc_gates_fwd", offsetof(struct ops, mhc_gates_fwd)},
    {"mhc_gates_bwd", offsetof(struct ops, mhc_gates_bwd)},
    {"mhc_sinkhorn_fwd", offsetof(struct ops, mhc_sinkhorn_fwd)},
    {"mhc_sinkhorn_bwd", offsetof(struct ops, mhc_sinkhorn_bwd)},
    {"mhc_aggregate_fwd", offsetof(struct ops, mhc_aggregate_fwd)},
    {"mhc_aggregate_bwd", offsetof(struct ops, mhc_aggregate_bwd)},
    {"mhc_combine_fwd", offsetof(struct ops, mhc_combine_fwd)},
    {"mhc_combine_bwd", offsetof(struct ops, mhc_combine_bwd)},
    {"mhc_expand_fwd", offsetof(struct ops, mhc_expand_fwd)},
    {"mhc_expand_bwd", offsetof(struct ops, mhc_expand_bwd)},
    {"mhc_contract_fwd", offsetof(struct ops, mhc_contract_fwd)},
    {"mhc_contract_bwd", offsetof(struct ops, mhc_contract_bwd)},
    {"mhc_boundary_fwd", offsetof(struct ops, mhc_boundary_fwd)},
    {"mhc_boundary_bwd", offsetof(struct ops, mhc_boundary_bwd)},
    {"mhc_boundary_dw", offsetof(struct ops, mhc_boundary_dw)},
    {"mhc_leave_fwd", offsetof(struct ops, mhc_leave_fwd)},
    {"mhc_leave_bwd", offsetof(struct ops, mhc_leave_bwd)},
    {"mhc_rebuild", offsetof(struct ops, mhc_rebuild)},
    {"mhc_health", offsetof(struct ops, mhc_health)},
    {"init", offsetof(struct ops, init)},
    {"adamw", offsetof(struct ops, adamw)},
    {"sqnorm", offsetof(struct ops, sqnorm)},
    {"clip", offsetof(struct ops, clip)},
};

bool ops_has(const struct ops *o, const char *name)
{
    size_t best = 0;
    bool has = false;
    for (int i = 0; i < countof(entries); i++) {
        size_t n = strlen(entries[i].name);
        if (n <= best || strncmp(name, entries[i].name, n) != 0 || (name[n] != '\0' && name[n] != '_'))
            continue;
        void *entry;
        memcpy(&entry, (const char *)o + entries[i].at, sizeof entry);
        best = n;
        has = entry != NULL;
    }
    return has;
}

#ifdef BRAID_CUDA
extern const struct ops ops_cuda_bf16, ops_cuda_f32;
#endif

const struct ops *ops_cpu_variant(int k)
{
    const struct ops *runs[3];
    int n = 0;
#if defined(__x86_64__) && !defined(OPS_BASE_ONLY)
    const char *isa = cpu_isa();
    if (strcmp(isa, "avx512") == 0)
        runs[n++] = &ops_cpu_avx512;
    if (strcmp(isa, "base") != 0)
        runs[n++] = &ops_cpu_avx2;
#endif
    runs[n++] = &ops_cpu_base;
    return k >= 0 && k < n ? runs[k] : NULL;
}

const struct ops *ops_for(const struct dev *d)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return d->real == DT_BF16 ? &ops_cuda_bf16 : &ops_cuda_f32;
#endif
    return d->kind == DEV_REF ? &ops_ref : d->kind == DEV_CPU ? ops_cpu_variant(0) : NULL;
}
