/* shift: ids one place to the left within each row, for multi-token prediction.
 *   x, y I32 [B, S]: y[b, t] = x[b, t + 1], and `fill` at the last position. y is not x.
 *   doc_start I32 [B, S] optional (index in the row of the first token of this token's document):
 *   the last token of a document gets `fill` too, so that nothing crosses documents. */
#ifndef BRAID_OPS_SHIFT_H
#define BRAID_OPS_SHIFT_H

#include "dev/dev.h"

struct shift_args {
    struct tensor x, doc_start, y;
    int64_t fill;
};
int shift_check(const struct shift_args *a, struct err *e);

#endif
