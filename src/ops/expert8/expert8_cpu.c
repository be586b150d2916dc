/* expert8, fast CPU version: the composition; see expert8.h. */
#include "ops/expert8/expert8_int.h"
#include "ops/ops_cpu_int.h"

static const struct expert8_parts parts = {
    CPU_NAME(gmm8_cpu),    CPU_NAME(gmm8_work_cpu), CPU_NAME(act_fwd_cpu),
    CPU_NAME(act_bwd_cpu), CPU_NAME(quantise_cpu),  NULL,
};

int64_t CPU_NAME(expert8_up_work_cpu)(const struct expert8_up_args *a) { return expert8_up_work_by(&parts, a); }
int64_t CPU_NAME(expert8_down_bwd_work_cpu)(const struct expert8_down_bwd_args *a)
{
    return expert8_down_bwd_work_by(&parts, a);
}
int CPU_NAME(expert8_up_cpu)(struct lane *l, const struct expert8_up_args *a) { return expert8_up_by(&parts, l, a); }
int CPU_NAME(expert8_down_bwd_cpu)(struct lane *l, const struct expert8_down_bwd_args *a)
{
    return expert8_down_bwd_by(&parts, l, a);
}
