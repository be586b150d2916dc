/* xent: the language-model head, linear layer and cross entropy together, in chunks of rows, so
 * that the logits of all tokens never exist.
 *   h [rows, d], w [V, d] real; label I32 [rows], -1: ignored (no loss, zero gradient).
 *   For each row: z = w h (+ bias [V] wide, optional), lse = log sum exp z, nll = lse - z[label];
 *   loss F64 [2] (+)= {sum nll, number of labels >= 0} over rows in order; with z_loss > 0 the
 *   gradient also gets that of z_loss * lse^2 (loss[0] stays the plain cross entropy).
 *   nll [rows] wide optional output (0 where ignored); logits [rows, V] real optional output, only
 *   for `braid grads` and tests.
 *   Gradients, optional, all three or none of dh and dw: of scale[0] * (sum nll + z_loss sum lse^2),
 *   scale F64 [1] (1 / number of labels in the global batch):
 *     dz = scale * (softmax - onehot);  dh = dz w;  dw (+)= dz^T h;  dbias (+)= sum dz (dw, dbias wide).
 *     dw may be absent: the weight is frozen.
 *   chunk: rows whose logits are held at once; 0 lets the op choose (xent_chunk). It groups the sums
 *   of dw and dbias, so it changes results by rounding only. A label outside [-1, V) is an error. */
#ifndef BRAID_OPS_XENT_H
#define BRAID_OPS_XENT_H

#include "ops/op.h"

#define XENT_FIELDS(T, N, S, op)                                                                                       \
    T(op, h, IN, REAL, "rows d")                                                                                       \
    T(op, w, IN, REAL, "vocab d")                                                                                      \
    T(op, bias, OPT, WIDE, "vocab")                                                                                    \
    T(op, label, IN, I32, "rows")                                                                                      \
    T(op, scale, OPT, F64, "1 +dh")                                                                                    \
    T(op, loss, SUM, F64, "2")                                                                                         \
    T(op, nll, OPT_OUT, WIDE, "rows")                                                                                  \
    T(op, logits, OPT_SAVED, REAL, "rows vocab")                                                                       \
    T(op, dh, OPT_OUT, REAL, "rows d")                                                                                 \
    T(op, dw, OPT_SUM, WIDE, "vocab d &dh")                                                                            \
    T(op, dbias, OPT_SUM, WIDE, "vocab &bias &dh")                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, z_loss, 0)                                                                                           \
    N(op, int64_t, chunk, 0)
OP_ARGS(xent, XENT_FIELDS);
/* Rows per chunk: next power of two of rows / ceil(V/d) (the scheme of Liger), but enough rows to keep the
 * GEMM fast and few enough to keep a small vocabulary's logits in cache. */
enum { XENT_CHUNK_MIN = 128, XENT_CHUNK_MAX = 1024 };
int64_t xent_chunk(int64_t rows, int64_t d, int64_t vocab);

#endif
