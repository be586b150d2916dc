/* The last boundary on the CPU: the chain of primitives; see mhc.h. There is one of it in a model. */
#include "ops/ops_cpu_int.h"

#define OP(name) CPU_NAME(name##_cpu)
#define WORK_OF(op, args) CPU_NAME(op##_work_cpu)(args)
#define HOST_CHAIN
#include "ops/mhc/mhc_final_int.h"
