/* Prototypes of the reference ops; only ops_ref.c and the <op>_ref.c files include this. */
#ifndef BRAID_OPS_REF_INT_H
#define BRAID_OPS_REF_INT_H

#include "ops/check.h"
#include "ops/ops.h"

int gemm_ref(struct lane *l, const struct gemm_args *a);
int rmsnorm_fwd_ref(struct lane *l, const struct rmsnorm_fwd_args *a);
int rmsnorm_bwd_ref(struct lane *l, const struct rmsnorm_bwd_args *a);
int addnorm_fwd_ref(struct lane *l, const struct addnorm_fwd_args *a);
int addnorm_bwd_ref(struct lane *l, const struct addnorm_bwd_args *a);
int rope_fwd_ref(struct lane *l, const struct rope_fwd_args *a);
int rope_bwd_ref(struct lane *l, const struct rope_bwd_args *a);
int attention_fwd_ref(struct lane *l, const struct attention_fwd_args *a);
int attention_bwd_ref(struct lane *l, const struct attention_bwd_args *a);
int act_fwd_ref(struct lane *l, const struct act_fwd_args *a);
int act_bwd_ref(struct lane *l, const struct act_bwd_args *a);
int gate_fwd_ref(struct lane *l, const struct gate_fwd_args *a);
int gate_bwd_ref(struct lane *l, const struct gate_bwd_args *a);
int embed_fwd_ref(struct lane *l, const struct embed_fwd_args *a);
int embed_bwd_ref(struct lane *l, const struct embed_bwd_args *a);
int dropout_ref(struct lane *l, const struct dropout_args *a);
int xent_ref(struct lane *l, const struct xent_args *a);
int64_t xent_work_ref(const struct xent_args *a);
int colsum_ref(struct lane *l, const struct colsum_args *a);
int cache_store_ref(struct lane *l, const struct cache_store_args *a);
int adamw_ref(struct lane *l, const struct adamw_args *a);
int sqnorm_ref(struct lane *l, const struct sqnorm_args *a);
int clip_ref(struct lane *l, const struct clip_args *a);

#endif
