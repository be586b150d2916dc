/* Shapes of an op's tensors, from the text in its field list: checks of arguments, shapes of outputs, shapes of
 * samples.
 *
 *     "rows gate*f"   one word for each dimension: a number, a name, or two or three of them with + - * / between (from
 *                     left to right; / rounds up). A name is a size that the tensors of a call agree on, a number of
 *                     the op (chunk, k), or one that the descriptor works out (.number)
 *     "... d"         any leading dimensions, the same wherever they stand; "all" is their product
 *     "n|1" "*"       either size; any size
 *     "=w"            like field w
 *     "!"             contiguous
 *     "@w" "+w" "&w"  given if and only if w is; given if w is; only given if w is
 * An empty text leaves all of that to the op's own check. */
#ifndef BRAID_OPS_OPSHAPE_H
#define BRAID_OPS_OPSHAPE_H

#include "ops/opdesc.h"
#include "ops/ops.h"

/* Types, ranks, sizes and presence of all tensors of a call. */
int op_check_fields(const struct op_desc *d, const void *args, struct err *e);
/* The check of an op whose field list says everything. */
#define OP_CHECK(op)                                                                                                   \
    int op##_check(const struct op##_args *a, struct err *e) { return op_check_fields(&op##_desc, a, e); }
/* From shapes of inputs and attributes: check them, set shapes of outputs and scratch. */
int op_infer_shapes(struct op_call *c, const struct ops *ops, struct err *e);
/* Shapes of inputs from the dims of a sample. */
void op_sample_shapes(struct op_call *c);

#endif
