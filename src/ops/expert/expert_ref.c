/* expert, reference: the composition; see expert.h. */
#include "ops/expert/expert_int.h"
#include "ops/expert/expert.h"
#include "ops/ops_ref_int.h"

static const struct expert_parts parts = {gmm_fwd_ref, gmm_bwd_ref, act_fwd_ref, act_bwd_ref};

int expert_up_ref(struct lane *l, const struct expert_up_args *a) { return expert_up_by(&parts, l, a); }
int expert_down_bwd_ref(struct lane *l, const struct expert_down_bwd_args *a)
{
    return expert_down_bwd_by(&parts, l, a);
}
int64_t expert_down_bwd_work_ref(const struct expert_down_bwd_args *a) { return expert_down_bwd_work_by(a); }
