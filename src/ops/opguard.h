/* What an op call must fulfil when its tensors and attributes come from outside (`braid op`).
 * Contracts check shapes and types on every call; what costs a pass over the data, or cannot be
 * wrong where our own code made it, is checked here: sizes and their products, attributes, and
 * tensors of indices. */
#ifndef BRAID_OPS_OPGUARD_H
#define BRAID_OPS_OPGUARD_H

#include "ops/opdesc.h"

/* Before infer: input shapes and attributes lie in bounds within which no size overflows. */
int op_guard_inputs(const struct op_call *c, struct err *e);
/* After infer: so do the sizes of outputs and scratch; bytes: of all tensors together. */
int op_guard_sizes(const struct op_call *c, int64_t *bytes, struct err *e);
/* Before run: entries of index tensors lead into the tensors they index. */
int op_guard_indices(const struct op_call *c, struct err *e);

#endif
