/* The list of all op descriptors. One line per op. */
#include "ops/opdesc.h"

#include <string.h>

extern const struct op_desc gemm_desc, rmsnorm_fwd_desc, rmsnorm_bwd_desc, addnorm_fwd_desc,
    addnorm_bwd_desc, rope_fwd_desc, rope_bwd_desc, attention_fwd_desc, attention_bwd_desc,
    act_fwd_desc, act_bwd_desc, gate_fwd_desc, gate_bwd_desc, embed_fwd_desc, embed_bwd_desc,
    dropout_desc, xent_desc, xent_bwd_desc, colsum_desc, cache_store_desc, adamw_desc, sqnorm_desc,
    clip_desc;

const struct op_desc *const *op_registry(int *n)
{
    static const struct op_desc *const all[] = {
        &gemm_desc,          &rmsnorm_fwd_desc,   &rmsnorm_bwd_desc, &addnorm_fwd_desc,
        &addnorm_bwd_desc,   &rope_fwd_desc,      &rope_bwd_desc,    &attention_fwd_desc,
        &attention_bwd_desc, &act_fwd_desc,       &act_bwd_desc,     &gate_fwd_desc,
        &gate_bwd_desc,      &embed_fwd_desc,     &embed_bwd_desc,   &dropout_desc,
        &xent_desc,          &xent_bwd_desc,      &colsum_desc,      &cache_store_desc,
        &adamw_desc,         &sqnorm_desc,        &clip_desc,
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
