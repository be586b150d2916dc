/* Prototypes of the reference ops; only ops_ref.c and the <op>_ref.c files include this. */
#ifndef BRAID_OPS_REF_INT_H
#define BRAID_OPS_REF_INT_H

#include "ops/check.h"
#include "ops/ops.h"

#define PROTOTYPE_NONE(name)
#define PROTOTYPE_RUN(name) int name##_ref(struct lane *l, const struct name##_args *a);
#define PROTOTYPE_WORK(name) PROTOTYPE_RUN(name) int64_t name##_work_ref(const struct name##_args *a);
#define OP(name, ref, cpu, cuda) PROTOTYPE_##ref(name)
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS
#undef PROTOTYPE_NONE
#undef PROTOTYPE_RUN
#undef PROTOTYPE_WORK

#endif
