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

#define PROTOTYPE_NONE(name)
#define PROTOTYPE_RUN(name)  int CPU_NAME(name##_cpu)(struct lane *l, const struct name##_args *a);
#define PROTOTYPE_WORK(name) PROTOTYPE_RUN(name) int64_t CPU_NAME(name##_work_cpu)(const struct name##_args *a);
#define OP(name, ref, cpu, cuda) PROTOTYPE_##cpu(name)
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS
#undef PROTOTYPE_NONE
#undef PROTOTYPE_RUN
#undef PROTOTYPE_WORK

extern const struct ops CPU_NAME(ops_cpu);

#endif
