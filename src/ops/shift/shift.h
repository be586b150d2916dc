/* shift: ids one place to the left within each row, for multi-token prediction.
 *   x, y I32 [B, S]: y[b, t] = x[b, t + 1], and `fill` at the last position. y is not x.
 *   doc_start I32 [B, S] optional (index in the row of the first token of this token's document):
 *   the last token of a document gets `fill` too, so that nothing crosses documents. */
#ifndef BRAID_OPS_SHIFT_H
#define BRAID_OPS_SHIFT_H

#include "ops/op.h"

#define SHIFT_FIELDS(T, N, S, op)                                                                                      \
    T(op, x, IN, I32, "rows seq !")                                                                                    \
    T(op, doc_start, OPT, I32, "rows seq")                                                                             \
    T(op, y, OUT, I32, "rows seq !")                                                                                   \
    N(op, int64_t, fill, -1)
OP_ARGS(shift, SHIFT_FIELDS);

#endif
