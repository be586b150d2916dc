/* The fast CPU table, compiled once per instruction set; ops.c picks one at start. */
#include "ops/op.h"
#include "ops/ops.h"

/* Contracts have the prototypes; here none is included. */
#define OP(op, ref, cpu, cuda) OP_FORM_(op, CPU_NAME(op##_cpu), CPU_NAME(op##_work_cpu))
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS

#define ENTRY_NONE(op)
#define ENTRY_RUN(op) .op = CPU_NAME(op##_cpu),
#define ENTRY_WORK(op) ENTRY_RUN(op).op##_work = CPU_NAME(op##_work_cpu),
#define OP(op, ref, cpu, cuda) ENTRY_##cpu(op)
#define ALIAS(name, op)
extern const struct ops CPU_NAME(ops_cpu); /* for ops.c, which names each variant */
const struct ops CPU_NAME(ops_cpu) = {
    .name = "cpu",
    .real = DT_F32,
#include "ops/ops.def"
};
