/* The op table. One op, one folder: <op>.h is the contract, <op>_ref.c the slow reference in double,
 * <op>_cpu.c the fast fp32 version, <op>.cu the CUDA one, <op>_op.c the descriptor that tests,
 * bench, gradcheck and `braid op` share.
 *
 * Add an op: a folder and a line in ops.def; README.md has the steps. Its table is made from ops.def, so files that
 * include this header are recompiled when an op is added; op.h is enough to name a table.
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
 * - Zero-sized dims are legal and do nothing (accumulated outputs with acc
 * false become zero). */
#ifndef BRAID_OPS_H
#define BRAID_OPS_H

#include "ops/op.h"

/* Callers of an op include its contract; here the structs are only declared. */
#define OP(name, ref, cpu, cuda) struct name##_args;
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP

/* NULL means unsupported on this device; the stack builder reports every gap before it allocates.
 * A _work entry that is NULL means no scratch is needed. */
struct ops {
    const char *name;
    enum dtype real;

#define OP(name, ref, cpu, cuda)                                                                                       \
    int (*name)(struct lane *, const struct name##_args *);                                                            \
    int64_t (*name##_work)(const struct name##_args *);
#include "ops/ops.def"
#undef OP
#undef ALIAS
    bool (*mhc_boundary_products)(const struct mhc_boundary_bwd_args *); /* NULL: never */
    /* Blocks that run at once in clusters which together have so many channels, 0: none. NULL: no clusters. */
    int (*mhc_boundary_clusters)(struct lane *, int64_t channels, int64_t *blocks);
    int (*mhc_boundary_prepare)(struct lane *, const struct mhc_boundary_bwd_args *);
    /* of `ready`; NULL or 0: nothing is made before */
    int64_t (*mhc_boundary_prepare_bytes)(const struct mhc_boundary_bwd_args *);
};

extern const struct ops ops_ref;
/* Table k of the fast CPU variants this processor can run, best first; NULL past the last. */
const struct ops *ops_cpu_variant(int k);

#endif
