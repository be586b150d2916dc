/* The reference table: slow, obvious, double precision. */
#include "ops/ops_ref_int.h"

#define ENTRY_NONE(op)
#define ENTRY_RUN(op)  .op = op##_ref,
#define ENTRY_WORK(op) .op = op##_ref, .op##_work = op##_work_ref,
#define OP(op, ref, cpu, cuda) ENTRY_##ref(op)
#define ALIAS(name, op)
const struct ops ops_ref = {
    .name = "ref",
    .real = DT_F64,
#include "ops/ops.def"
};
