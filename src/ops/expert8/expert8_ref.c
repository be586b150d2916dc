/* expert8, reference: the composition; see expert8.h. */
#include "ops/expert8/expert8_int.h"
#include "ops/ops_ref_int.h"

static const struct expert8_parts parts = {
    gmm8_ref, gmm8_work_ref, act_fwd_ref, act_bwd_ref, quantise_ref, NULL,
};

int64_t expert8_up_work_ref(const struct expert8_up_args *a) { return expert8_up_work_by(&parts, a); }
int64_t expert8_down_bwd_work_ref(const struct expert8_down_bwd_args *a) { return expert8_down_bwd_work_by(&parts, a); }
int expert8_up_ref(struct lane *l, const struct expert8_up_args *a) { return expert8_up_by(&parts, l, a); }
int expert8_down_bwd_ref(struct lane *l, const struct expert8_down_bwd_args *a)
{
    return expert8_down_bwd_by(&parts, l, a);
}
