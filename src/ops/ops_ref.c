/* The reference table: slow, obvious, double precision. */
#include "ops/op.h"
#include "ops/ops.h"

/* Contracts have the prototypes; here none is included. */
#define OP(op, ref, cpu, cuda) OP_FORM_(op, op##_ref, op##_work_ref)
#define ALIAS(name, op)
#include "ops/ops.def"
#undef OP
#undef ALIAS

#define ENTRY_NONE(op)
#define ENTRY_RUN(op) .op = op##_ref,
#define ENTRY_WORK(op) .op = op##_ref, .op##_work = op##_work_ref,
#define OP(op, ref, cpu, cuda) ENTRY_##ref(op)
#define ALIAS(name, op)
const struct ops ops_ref = {
    .name = "ref",
    .real = DT_F64,
#include "ops/ops.def"
};
