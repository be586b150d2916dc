/* The last boundary, reference: the chain of primitives; see mhc.h. */
#include "ops/ops_ref_int.h"

#define OP(name) name##_ref
#define WORK_OF(op, args) ((void)(args), 0)
#define HOST_CHAIN
#include "ops/mhc/mhc_final_int.h"
