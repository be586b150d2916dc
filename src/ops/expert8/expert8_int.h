/* expert8 as a composition of gmm8, act and quantise: what every back end can do. */
#ifndef BRAID_OPS_EXPERT8_INT_H
#define BRAID_OPS_EXPERT8_INT_H

#include "ops/check.h"
#include "ops/act/act.h"
#include "ops/expert8/expert8.h"
#include "ops/gmm8/gmm8.h"
#include "ops/quantise/quantise.h"

struct expert8_parts {
    int (*gmm8)(struct lane *, const struct gmm8_args *);
    int64_t (*gmm8_work)(const struct gmm8_args *); /* NULL: none */
    int (*act_fwd)(struct lane *, const struct act_fwd_args *);
    int (*act_bwd)(struct lane *, const struct act_bwd_args *);
    int (*quantise)(struct lane *, const struct quantise_args *);
    int64_t (*quantise_work)(const struct quantise_args *); /* NULL: none */
};
int expert8_up_by(const struct expert8_parts *p, struct lane *l, const struct expert8_up_args *a);
int expert8_down_bwd_by(const struct expert8_parts *p, struct lane *l, const struct expert8_down_bwd_args *a);
int64_t expert8_up_work_by(const struct expert8_parts *p, const struct expert8_up_args *a);
int64_t expert8_down_bwd_work_by(const struct expert8_parts *p, const struct expert8_down_bwd_args *a);

#endif
