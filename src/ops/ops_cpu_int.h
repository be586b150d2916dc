/* Prototypes of the fast CPU ops. Every *_cpu.c is compiled once per instruction set with ISA
 * defined (avx512, avx2 or base); CPU_NAME(f) is f_avx512 and so on. */
#ifndef BRAID_OPS_CPU_INT_H
#define BRAID_OPS_CPU_INT_H

#include "ops/check.h"
#include "ops/ops.h"

#ifndef ISA
#define ISA base /* only for editors and analysers; the Makefile always says */
#endif
#define CPU_PASTE2(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE2(name, isa)
#define CPU_NAME(name) CPU_PASTE(name, ISA)

int CPU_NAME(gemm_cpu)(struct lane *l, const struct gemm_args *a);
int CPU_NAME(rmsnorm_fwd_cpu)(struct lane *l, const struct rmsnorm_fwd_args *a);
int CPU_NAME(rmsnorm_bwd_cpu)(struct lane *l, const struct rmsnorm_bwd_args *a);
int64_t CPU_NAME(rmsnorm_bwd_work_cpu)(const struct rmsnorm_bwd_args *a);
int CPU_NAME(addnorm_fwd_cpu)(struct lane *l, const struct addnorm_fwd_args *a);
int CPU_NAME(addnorm_bwd_cpu)(struct lane *l, const struct addnorm_bwd_args *a);
int64_t CPU_NAME(addnorm_bwd_work_cpu)(const struct addnorm_bwd_args *a);
int CPU_NAME(rope_fwd_cpu)(struct lane *l, const struct rope_fwd_args *a);
int CPU_NAME(rope_bwd_cpu)(struct lane *l, const struct rope_bwd_args *a);
int64_t CPU_NAME(rope_bwd_work_cpu)(const struct rope_bwd_args *a);
int CPU_NAME(attention_fwd_cpu)(struct lane *l, const struct attention_fwd_args *a);
int64_t CPU_NAME(attention_fwd_work_cpu)(const struct attention_fwd_args *a);
int CPU_NAME(attention_bwd_cpu)(struct lane *l, const struct attention_bwd_args *a);
int64_t CPU_NAME(attention_bwd_work_cpu)(const struct attention_bwd_args *a);
int CPU_NAME(act_fwd_cpu)(struct lane *l, const struct act_fwd_args *a);
int CPU_NAME(act_bwd_cpu)(struct lane *l, const struct act_bwd_args *a);
int CPU_NAME(gate_fwd_cpu)(struct lane *l, const struct gate_fwd_args *a);
int CPU_NAME(gate_bwd_cpu)(struct lane *l, const struct gate_bwd_args *a);
int CPU_NAME(embed_fwd_cpu)(struct lane *l, const struct embed_fwd_args *a);
int CPU_NAME(embed_bwd_cpu)(struct lane *l, const struct embed_bwd_args *a);
int64_t CPU_NAME(embed_bwd_work_cpu)(const struct embed_bwd_args *a);
int CPU_NAME(dropout_cpu)(struct lane *l, const struct dropout_args *a);
int CPU_NAME(xent_cpu)(struct lane *l, const struct xent_args *a);
int64_t CPU_NAME(xent_work_cpu)(const struct xent_args *a);
int CPU_NAME(colsum_cpu)(struct lane *l, const struct colsum_args *a);
int64_t CPU_NAME(colsum_work_cpu)(const struct colsum_args *a);
int CPU_NAME(cache_store_cpu)(struct lane *l, const struct cache_store_args *a);
int CPU_NAME(adamw_cpu)(struct lane *l, const struct adamw_args *a);
int CPU_NAME(sqnorm_cpu)(struct lane *l, const struct sqnorm_args *a);
int64_t CPU_NAME(sqnorm_work_cpu)(const struct sqnorm_args *a);
int CPU_NAME(clip_cpu)(struct lane *l, const struct clip_args *a);

extern const struct ops CPU_NAME(ops_cpu);

#endif
