/* embed: y[t] = w[token[t]].   token I32 [rows], w [V, d] real dense, y [rows, d] real.
 * backward: dw [V, d] wide, dense: dw[v] (+)= sum over t with token[t] = v of dy[t], in order of t.
 * part: w holds rows [first, first + V) of a larger table; tokens of other rows give zeros and no gradient.
 * Otherwise a token outside [0, V) is an error (the data reader has checked; this is the last line). A GPU cannot
 * refuse: there the row of y becomes NaN, so that the loss tells. */
#ifndef BRAID_OPS_EMBED_H
#define BRAID_OPS_EMBED_H

#include "ops/op.h"

#define EMBED_FWD_FIELDS(T, N, S, op)                                                                                  \
    T(op, token, IN, I32, "rows")                                                                                      \
    T(op, w, IN, REAL, "vocab d !")                                                                                    \
    T(op, y, OUT, REAL, "rows d")                                                                                      \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, bool, part, 0)
OP_ARGS(embed_fwd, EMBED_FWD_FIELDS);
#define EMBED_BWD_FIELDS(T, N, S, op)                                                                                  \
    T(op, token, IN, I32, "rows")                                                                                      \
    T(op, dy, IN, REAL, "rows d")                                                                                      \
    T(op, dw, SUM, WIDE, "vocab d !")                                                                                  \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, bool, part, 0)
OP_ARGS(embed_bwd, EMBED_BWD_FIELDS);

#endif
