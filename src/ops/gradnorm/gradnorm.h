/* sqnorm: out F64 [1] = sum x^2 over x [n] wide dense, accumulated in double in blocks of
 *   SQNORM_BLOCK elements, blocks in order. Non-finite input gives a non-finite sum.
 *   more: n_more further tensors of the same type (host memory, read during the call); then out is
 *   [1 + n_more], a sum for each. Same sums as from calls of their own, but fewer launches on a GPU.
 * clip: from the sums of squares of all parameters, sums F64 [k] with any stride, out F64 [4]:
 *   [0] norm = sqrt(sum), [1] coefficient min(1, max_norm / (norm + 1e-6)) (1 if max_norm 0),
 *   [2] 1 if norm is not finite or loss (F64 [2] optional) is not finite, else 0,
 *   [3] sum, or NaN where [2] is set: what a rank tells the others of its share. */
#ifndef BRAID_OPS_GRADNORM_H
#define BRAID_OPS_GRADNORM_H

#include "ops/op.h"

enum { SQNORM_BLOCK = 4096 };

#define SQNORM_FIELDS(T, N, S, op)                                                                                     \
    T(op, x, IN, WIDE, "n")                                                                                            \
    T(op, out, OUT, F64, "parts")                                                                                      \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int, n_more, 0)                                                                                              \
    S(op, const struct tensor *more)
OP_ARGS(sqnorm, SQNORM_FIELDS);
#define CLIP_FIELDS(T, N, S, op)                                                                                       \
    T(op, sums, IN, F64, "k")                                                                                          \
    T(op, loss, OPT, F64, "2")                                                                                         \
    T(op, out, OUT, F64, "4")                                                                                          \
    N(op, double, max_norm, 1)
OP_ARGS(clip, CLIP_FIELDS);
static inline const struct tensor *sqnorm_at(const struct sqnorm_args *a, int k)
{
    return k == 0 ? &a->x : &a->more[k - 1];
}

#endif
