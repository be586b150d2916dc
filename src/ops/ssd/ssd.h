/* ssd: the state-space core of Mamba-2 (structured state-space duality). Per batch b and head h, in order of t, with a
 * state S of N x P:
 *   delta = clamp(softplus(dt + dt_bias), dt_min, dt_max)          dt_max 0: no upper bound
 *   S_t   = e^(delta A) S_(t-1) + delta B_t x_t^T,   A = -e^A_log
 *   y_t   = S_t^T C_t + D x_t
 * x, y [B, S, H, P]; dt [B, S, H] (before softplus); Bm, Cm [B, S, G, N], H % G == 0, head h reads group h / (H/G): all
 * real, strided (columns of wider rows). A_log, dt_bias [H] wide; D [H] wide, optional. softplus(x) is x above 20.
 * chunk, 1 to SSD_MAX_CHUNK: the fast versions work on chunks of this many rows (inside a chunk by matrix products); it
 * changes rounding, never the function.
 *   init [B, H, N, P] wide, optional: the state before row 0 (absent: zeros). start I64 [1] optional: when it holds 0 a
 * text begins here and init counts as zeros. final [B, H, N, P] wide, optional output: the state after the last row;
 * may be init. doc_start I32 [B, S] optional: row t begins a document when doc_start[b,t] == t; the state before it is
 * dropped. states [B, ceil(S/chunk), H, N, P] real, optional output: the state that enters each chunk; backward reads
 * it.
 *   backward: everything is recomputed from the inputs and `states`, which is taken as given. dfinal wide, optional
 * (absent: zeros). dx, ddt, dBm, dCm shaped like x, dt, Bm, Cm, overwritten; dinit wide, optional. dA_log, ddt_bias, dD
 * (present iff D is) [H], wide: sums over rows, then over the batch. dBm and dCm add the heads of a group in blocks of
 * SSD_HEADS, then the blocks, in order. Where delta was clamped no gradient reaches dt. No aliasing. */
#ifndef BRAID_OPS_SSD_H
#define BRAID_OPS_SSD_H

#include "ops/op.h"

enum { SSD_HEADS = 8, SSD_MAX_CHUNK = 1 << 20 };

#define SSD_FWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, x, IN, REAL, "b s h p")                                                                                      \
    T(op, dt, IN, REAL, "b s h")                                                                                       \
    T(op, A_log, IN, WIDE, "h")                                                                                        \
    T(op, dt_bias, IN, WIDE, "h")                                                                                      \
    T(op, D, OPT, WIDE, "h")                                                                                           \
    T(op, Bm, IN, REAL, "b s g n")                                                                                     \
    T(op, Cm, IN, REAL, "b s g n")                                                                                     \
    T(op, init, OPT, WIDE, "b h n p")                                                                                  \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, y, OUT, REAL, "b s h p")                                                                                     \
    T(op, states, OPT_SAVED, REAL, "b s/chunk h n p")                                                                  \
    T(op, final, OPT_OUT, WIDE, "b h n p")                                                                             \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, chunk, 128)                                                                                         \
    N(op, double, dt_min, 0)                                                                                           \
    N(op, double, dt_max, 0)
OP_ARGS(ssd_fwd, SSD_FWD_FIELDS);
#define SSD_BWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, dy, IN, REAL, "b s h p")                                                                                     \
    T(op, dfinal, OPT, WIDE, "b h n p")                                                                                \
    T(op, x, IN, REAL, "b s h p")                                                                                      \
    T(op, dt, IN, REAL, "b s h")                                                                                       \
    T(op, A_log, IN, WIDE, "h")                                                                                        \
    T(op, dt_bias, IN, WIDE, "h")                                                                                      \
    T(op, D, OPT, WIDE, "h")                                                                                           \
    T(op, Bm, IN, REAL, "b s g n")                                                                                     \
    T(op, Cm, IN, REAL, "b s g n")                                                                                     \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, states, IN, REAL, "b s/chunk h n p")                                                                         \
    T(op, dx, OUT, REAL, "b s h p")                                                                                    \
    T(op, ddt, OUT, REAL, "b s h")                                                                                     \
    T(op, dA_log, SUM, WIDE, "h")                                                                                      \
    T(op, ddt_bias, SUM, WIDE, "h")                                                                                    \
    T(op, dD, OPT_SUM, WIDE, "h @D")                                                                                   \
    T(op, dBm, OUT, REAL, "b s g n")                                                                                   \
    T(op, dCm, OUT, REAL, "b s g n")                                                                                   \
    T(op, dinit, OPT_OUT, WIDE, "b h n p")                                                                             \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, chunk, 128)                                                                                         \
    N(op, double, dt_min, 0)                                                                                           \
    N(op, double, dt_max, 0)
OP_ARGS(ssd_bwd, SSD_BWD_FIELDS);

#endif
