/* act8, fast CPU version: act, then quantise; see act8.h. */
#include "ops/act8/act8_int.h"
#include "ops/ops_cpu_int.h"

int64_t CPU_NAME(act8_fwd_work_cpu)(const struct act8_fwd_args *a)
{
    return act8_values_bytes(&a->x, a->x.dim[1] / act_gate(a->rule.kind));
}
int64_t CPU_NAME(act8_bwd_work_cpu)(const struct act8_bwd_args *a) { return act8_values_bytes(&a->x, a->x.dim[1]); }

int CPU_NAME(act8_fwd_cpu)(struct lane *l, const struct act8_fwd_args *a)
{
    TRY(act8_fwd_check(a, l->err));
    TRY(check_work("act8_fwd", &a->work, CPU_NAME(act8_fwd_work_cpu)(a), l->err));
    struct tensor y = act8_values(&a->x, a->x.dim[1] / act_gate(a->rule.kind), a->work.data);
    if (y.data == NULL)
        y.data = a->x.data; /* nothing to store */
    TRY(CPU_NAME(act_fwd_cpu)(l, &(struct act_fwd_args){.x = a->x, .y = y, .rule = a->rule}));
    return CPU_NAME(quantise_cpu)(l, &(struct quantise_args)ACT8_QUANTISE(a, y));
}

int CPU_NAME(act8_bwd_cpu)(struct lane *l, const struct act8_bwd_args *a)
{
    TRY(act8_bwd_check(a, l->err));
    TRY(check_work("act8_bwd", &a->work, CPU_NAME(act8_bwd_work_cpu)(a), l->err));
    struct tensor dx = act8_values(&a->x, a->x.dim[1], a->work.data);
    if (dx.data == NULL)
        dx.data = a->x.data;
    TRY(CPU_NAME(act_bwd_cpu)(l, &(struct act_bwd_args){.dy = a->dy, .x = a->x, .dx = dx, .rule = a->rule}));
    return CPU_NAME(quantise_cpu)(l, &(struct quantise_args)ACT8_QUANTISE(a, dx));
}
