/* expert on the CPU: the composition; products and activations there are fast already (see expert.h). */
#include "ops/expert/expert_int.h"
#include "ops/expert/expert.h"
#include "ops/ops_cpu_int.h"

static const struct expert_parts parts = {CPU_NAME(gmm_fwd_cpu), CPU_NAME(gmm_bwd_cpu), CPU_NAME(act_fwd_cpu),
                                          CPU_NAME(act_bwd_cpu)};

int CPU_NAME(expert_up_cpu)(struct lane *l, const struct expert_up_args *a) { return expert_up_by(&parts, l, a); }
int CPU_NAME(expert_down_bwd_cpu)(struct lane *l, const struct expert_down_bwd_args *a)
{
    return expert_down_bwd_by(&parts, l, a);
}
int64_t CPU_NAME(expert_down_bwd_work_cpu)(const struct expert_down_bwd_args *a) { return expert_down_bwd_work_by(a); }
