/* The fast CPU table, compiled once per instruction set; ops.c picks one at start. */
#include "ops/ops_cpu_int.h"

#define ENTRY_NONE(op)
#define ENTRY_RUN(op)  .op = CPU_NAME(op##_cpu),
#define ENTRY_WORK(op) ENTRY_RUN(op) .op##_work = CPU_NAME(op##_work_cpu),
#define OP(op, ref, cpu, cuda) ENTRY_##cpu(op)
#define ALIAS(name, op)
const struct ops CPU_NAME(ops_cpu) = {
    .name = "cpu",
    .real = DT_F32,
#include "ops/ops.def"
};
