/* act8, reference: act, then quantise; see act8.h. */
#include "ops/act8/act8_int.h"
#include "ops/ops_ref_int.h"

int64_t act8_fwd_work_ref(const struct act8_fwd_args *a)
{
    return act8_values_bytes(&a->x, a->x.dim[1] / act_gate(a->rule.kind));
}
int64_t act8_bwd_work_ref(const struct act8_bwd_args *a) { return act8_values_bytes(&a->x, a->x.dim[1]); }

int act8_fwd_ref(struct lane *l, const struct act8_fwd_args *a)
{
    TRY(act8_fwd_check(a, l->err));
    TRY(check_work("act8_fwd", &a->work, act8_fwd_work_ref(a), l->err));
    struct tensor y = act8_values(&a->x, a->x.dim[1] / act_gate(a->rule.kind), a->work.data);
    if (y.data == NULL)
        y.data = a->x.data; /* nothing to store */
    TRY(act_fwd_ref(l, &(struct act_fwd_args){.x = a->x, .y = y, .rule = a->rule}));
    return quantise_ref(l, &(struct quantise_args)ACT8_QUANTISE(a, y));
}

int act8_bwd_ref(struct lane *l, const struct act8_bwd_args *a)
{
    TRY(act8_bwd_check(a, l->err));
    TRY(check_work("act8_bwd", &a->work, act8_bwd_work_ref(a), l->err));
    struct tensor dx = act8_values(&a->x, a->x.dim[1], a->work.data);
    if (dx.data == NULL)
        dx.data = a->x.data;
    TRY(act_bwd_ref(l, &(struct act_bwd_args){.dy = a->dy, .x = a->x, .dx = dx, .rule = a->rule}));
    return quantise_ref(l, &(struct quantise_args)ACT8_QUANTISE(a, dx));
}
