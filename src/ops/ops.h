/* The op table. One op, one folder: <op>.h is the contract, <op>_ref.c the slow judge in double,
 * <op>_cpu.c the fast fp32 version, <op>.cu the CUDA one, <op>_op.c the descriptor that tests,
 * bench, gradcheck and `braid op` share.
 *
 * Add an op: 1. contract header with an args struct per direction; 2. ref, cpu; 3. a field here and
 * a line in ops_ref.c and ops_cpu.c; 4. descriptor in <op>_op.c, listed in registry.c. The tests,
 * `braid gradcheck`, `braid bench` and `braid op` then find it.
 *
 * Rules for every op
 * - All memory comes from the caller; no allocation. Scratch is the `work` tensor (U8, 1-D), at
 *   least as large as the op's _work function says for the same args. Its contents on entry are
 *   undefined.
 * - "real" means the device's type: F64 on ref, F32 on cpu, BF16 (or F32) on cuda. Tensors that need more than
 *   bf16 (statistics, coefficients, vectors of parameters, gradients of parameters) are "wide": F64 on ref, F32
 *   elsewhere. Contracts call a tensor real unless they say wide. Work happens in wide.
 * - Rows are the product of all dims but the last. Unless said otherwise tensors may be strided in
 *   all dims but the last, whose stride is 1.
 * - An optional tensor is absent when its data is NULL.
 * - Deterministic: the same args give the same bits, and the order of every sum depends on shapes
 *   only, never on the number of threads (GEMM: as OpenBLAS does for a given thread count).
 * - acc_x: true adds to x, false overwrites it (x need not be initialised).
 * - Zero-sized dims are legal and do nothing (accumulated outputs with acc false become zero).
 */
#ifndef BRAID_OPS_H
#define BRAID_OPS_H

#include "dev/dev.h"
#include "ops/act/act.h"
#include "ops/adamw/adamw.h"
#include "ops/addnorm/addnorm.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache.h"
#include "ops/colsum/colsum.h"
#include "ops/conv1d/conv1d.h"
#include "ops/dropout/dropout.h"
#include "ops/embed/embed.h"
#include "ops/expert/expert.h"
#include "ops/gate/gate.h"
#include "ops/gatednorm/gatednorm.h"
#include "ops/gdn/gdn.h"
#include "ops/gemm/gemm.h"
#include "ops/gmm/gmm.h"
#include "ops/gradnorm/gradnorm.h"
#include "ops/init/init.h"
#include "ops/mhc/mhc.h"
#include "ops/epplan/epplan.h"
#include "ops/moeplan/moeplan.h"
#include "ops/permute/permute.h"
#include "ops/mlakeys/mlakeys.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/shift/shift.h"
#include "ops/ssd/ssd.h"
#include "ops/router/router.h"
#include "ops/xent/xent.h"

/* NULL means unsupported on this device; the stack builder reports every gap before it allocates.
 * A _work entry that is NULL means no scratch is needed. */
struct ops {
    const char *name;
    enum dtype real;

    int (*gemm)(struct lane *, const struct gemm_args *);

    int (*rmsnorm_fwd)(struct lane *, const struct rmsnorm_fwd_args *);
    int (*rmsnorm_bwd)(struct lane *, const struct rmsnorm_bwd_args *);
    int64_t (*rmsnorm_bwd_work)(const struct rmsnorm_bwd_args *);

    int (*addnorm_fwd)(struct lane *, const struct addnorm_fwd_args *);
    int (*addnorm_bwd)(struct lane *, const struct addnorm_bwd_args *);
    int64_t (*addnorm_bwd_work)(const struct addnorm_bwd_args *);

    int (*rope_fwd)(struct lane *, const struct rope_fwd_args *);
    int (*rope_bwd)(struct lane *, const struct rope_bwd_args *);
    int64_t (*rope_bwd_work)(const struct rope_bwd_args *);

    int (*attention_fwd)(struct lane *, const struct attention_fwd_args *);
    int64_t (*attention_fwd_work)(const struct attention_fwd_args *);
    int (*attention_bwd)(struct lane *, const struct attention_bwd_args *);
    int64_t (*attention_bwd_work)(const struct attention_bwd_args *);

    int (*act_fwd)(struct lane *, const struct act_fwd_args *);
    int (*act_bwd)(struct lane *, const struct act_bwd_args *);

    int (*gate_fwd)(struct lane *, const struct gate_fwd_args *);
    int (*gate_bwd)(struct lane *, const struct gate_bwd_args *);

    int (*embed_fwd)(struct lane *, const struct embed_fwd_args *);
    int (*embed_bwd)(struct lane *, const struct embed_bwd_args *);
    int64_t (*embed_bwd_work)(const struct embed_bwd_args *);

    int (*dropout)(struct lane *, const struct dropout_args *);

    int (*xent)(struct lane *, const struct xent_args *);
    int64_t (*xent_work)(const struct xent_args *);

    int (*colsum)(struct lane *, const struct colsum_args *);
    int64_t (*colsum_work)(const struct colsum_args *);

    int (*cache_store)(struct lane *, const struct cache_store_args *);
    int (*shift)(struct lane *, const struct shift_args *);

    int (*mlakeys_fwd)(struct lane *, const struct mlakeys_fwd_args *);
    int (*mlakeys_bwd)(struct lane *, const struct mlakeys_bwd_args *);

    int (*conv1d_fwd)(struct lane *, const struct conv1d_fwd_args *);
    int64_t (*conv1d_fwd_work)(const struct conv1d_fwd_args *);
    int (*conv1d_bwd)(struct lane *, const struct conv1d_bwd_args *);
    int64_t (*conv1d_bwd_work)(const struct conv1d_bwd_args *);

    int (*ssd_fwd)(struct lane *, const struct ssd_fwd_args *);
    int64_t (*ssd_fwd_work)(const struct ssd_fwd_args *);
    int (*ssd_bwd)(struct lane *, const struct ssd_bwd_args *);
    int64_t (*ssd_bwd_work)(const struct ssd_bwd_args *);

    int (*gdn_fwd)(struct lane *, const struct gdn_fwd_args *);
    int64_t (*gdn_fwd_work)(const struct gdn_fwd_args *);
    int (*gdn_bwd)(struct lane *, const struct gdn_bwd_args *);
    int64_t (*gdn_bwd_work)(const struct gdn_bwd_args *);

    int (*gatednorm_fwd)(struct lane *, const struct gatednorm_fwd_args *);
    int (*gatednorm_bwd)(struct lane *, const struct gatednorm_bwd_args *);
    int64_t (*gatednorm_bwd_work)(const struct gatednorm_bwd_args *);

    int (*router_fwd)(struct lane *, const struct router_fwd_args *);
    int64_t (*router_fwd_work)(const struct router_fwd_args *);
    int (*router_bwd)(struct lane *, const struct router_bwd_args *);
    int (*router_noise)(struct lane *, const struct router_noise_args *);
    int (*router_jitter)(struct lane *, const struct router_jitter_args *);
    int (*router_bias)(struct lane *, const struct router_bias_args *);
    int (*moeplan)(struct lane *, const struct moeplan_args *);
    int64_t (*moeplan_work)(const struct moeplan_args *);
    int (*epsend)(struct lane *, const struct epsend_args *);
    int (*eprecv)(struct lane *, const struct eprecv_args *);
    int (*permute)(struct lane *, const struct permute_args *);
    int (*unpermute)(struct lane *, const struct unpermute_args *);
    int (*gmm_fwd)(struct lane *, const struct gmm_fwd_args *);
    int (*gmm_bwd)(struct lane *, const struct gmm_bwd_args *);
    int (*expert_up)(struct lane *, const struct expert_up_args *);
    int (*expert_down_bwd)(struct lane *, const struct expert_down_bwd_args *);
    int64_t (*expert_down_bwd_work)(const struct expert_down_bwd_args *);

    int (*mhc_project_fwd)(struct lane *, const struct mhc_project_fwd_args *);
    int (*mhc_project_bwd)(struct lane *, const struct mhc_project_bwd_args *);
    int64_t (*mhc_project_bwd_work)(const struct mhc_project_bwd_args *);
    int (*mhc_gates_fwd)(struct lane *, const struct mhc_gates_fwd_args *);
    int (*mhc_gates_bwd)(struct lane *, const struct mhc_gates_bwd_args *);
    int (*mhc_sinkhorn_fwd)(struct lane *, const struct mhc_sinkhorn_fwd_args *);
    int (*mhc_sinkhorn_bwd)(struct lane *, const struct mhc_sinkhorn_bwd_args *);
    int (*mhc_aggregate_fwd)(struct lane *, const struct mhc_aggregate_fwd_args *);
    int (*mhc_aggregate_bwd)(struct lane *, const struct mhc_aggregate_bwd_args *);
    int (*mhc_combine_fwd)(struct lane *, const struct mhc_combine_fwd_args *);
    int (*mhc_combine_bwd)(struct lane *, const struct mhc_combine_bwd_args *);
    int64_t (*mhc_combine_bwd_work)(const struct mhc_combine_bwd_args *);
    int (*mhc_expand_fwd)(struct lane *, const struct mhc_expand_fwd_args *);
    int (*mhc_expand_bwd)(struct lane *, const struct mhc_expand_bwd_args *);
    int (*mhc_contract_fwd)(struct lane *, const struct mhc_contract_fwd_args *);
    int (*mhc_contract_bwd)(struct lane *, const struct mhc_contract_bwd_args *);
    int64_t (*mhc_contract_bwd_work)(const struct mhc_contract_bwd_args *);
    int (*mhc_boundary_fwd)(struct lane *, const struct mhc_boundary_fwd_args *);
    int64_t (*mhc_boundary_fwd_work)(const struct mhc_boundary_fwd_args *);
    int (*mhc_boundary_bwd)(struct lane *, const struct mhc_boundary_bwd_args *);
    int64_t (*mhc_boundary_bwd_work)(const struct mhc_boundary_bwd_args *);
    bool (*mhc_boundary_products)(const struct mhc_boundary_bwd_args *); /* NULL: never */
    int (*mhc_boundary_ready)(struct lane *, const struct mhc_boundary_bwd_args *);
    int64_t (*mhc_boundary_ready_bytes)(const struct mhc_boundary_bwd_args *); /* of `ready`; NULL or 0: nothing is made before */
    int (*mhc_boundary_dw)(struct lane *, const struct mhc_boundary_dw_args *);
    int64_t (*mhc_boundary_dw_work)(const struct mhc_boundary_dw_args *);
    int (*mhc_leave_fwd)(struct lane *, const struct mhc_leave_fwd_args *);
    int64_t (*mhc_leave_fwd_work)(const struct mhc_leave_fwd_args *);
    int (*mhc_leave_bwd)(struct lane *, const struct mhc_leave_bwd_args *);
    int64_t (*mhc_leave_bwd_work)(const struct mhc_leave_bwd_args *);
    int (*mhc_rebuild)(struct lane *, const struct mhc_rebuild_args *);
    int (*mhc_health)(struct lane *, const struct mhc_health_args *);
    int64_t (*mhc_health_work)(const struct mhc_health_args *);

    int (*init)(struct lane *, const struct init_args *);
    int (*adamw)(struct lane *, const struct adamw_args *);
    int (*sqnorm)(struct lane *, const struct sqnorm_args *);
    int64_t (*sqnorm_work)(const struct sqnorm_args *);
    int (*clip)(struct lane *, const struct clip_args *);
};

extern const struct ops ops_ref;
/* The table of this device; on cpu the variant for the instruction set of this processor. */
const struct ops *ops_for(const struct dev *d);
/* Does the table have the op of this descriptor? */
bool ops_has(const struct ops *o, const char *name);
/* Table k of the fast CPU variants this processor can run, best first; NULL past the last. */
const struct ops *ops_cpu_variant(int k);

#endif
