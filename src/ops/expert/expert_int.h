/* The op as a composition of gmm and act: what every back end can do, and all that most do. */
#ifndef BRAID_OPS_EXPERT_INT_H
#define BRAID_OPS_EXPERT_INT_H

#include "ops/check.h"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
#include "ops/op.h"

struct expert_parts {
    int (*gmm_fwd)(struct lane *, const struct gmm_fwd_args *);
    int (*gmm_bwd)(struct lane *, const struct gmm_bwd_args *);
    int (*act_fwd)(struct lane *, const struct act_fwd_args *);
    int (*act_bwd)(struct lane *, const struct act_bwd_args *);
};
int expert_up_by(const struct expert_parts *p, struct lane *l, const struct expert_up_args *a);
int expert_down_bwd_by(const struct expert_parts *p, struct lane *l, const struct expert_down_bwd_args *a);
/* Scratch of the composition: the gradient of the activation's output. */
int64_t expert_down_bwd_work_by(const struct expert_down_bwd_args *a);

#endif
