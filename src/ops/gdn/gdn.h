/* gdn: the gated delta rule, core of a gated delta net. Per batch b and value head h, in order of
 * t, with a state S of dk x dv, key head h / (Hv/Hk), and q, k of unit length,
 * x / sqrt(sum x^2 + GDN_EPS):
 *   g   = -e^A_log softplus(alpha + dt_bias),   w = sigmoid(beta)
 *   S~  = e^g S_(t-1);   S_t = S~ + k (w (v - S~^T k))^T;   o_t = dk^-1/2 S_t^T q
 *
 *   q, k [B, S, Hk, dk]; v, o [B, S, Hv, dv], Hv % Hk == 0; alpha, beta [B, S, Hv] as projected:
 *   all real, strided (columns of wider rows). A_log, dt_bias [Hv] wide. softplus(x) is x above 20.
 *   chunk, 1 to GDN_MAX_CHUNK: the fast versions work on chunks of this many rows (inside a chunk
 *   by matrix products and a triangular solve); it changes rounding, never the function.
 *   init [B, Hv, dk, dv] wide, optional: the state before row 0 (absent: zeros).
 *   start I64 [1] optional: when it holds 0 a text begins here and init counts as zeros.
 *   final [B, Hv, dk, dv] wide, optional output: the state after the last row; may be init.
 *   doc_start I32 [B, S] optional: row t begins a document when doc_start[b,t] == t; the state
 *   before it is dropped.
 *   states [B, ceil(S/chunk), Hv, dk, dv] optional output: the state that enters each chunk;
 *   backward reads it.
 *
 * backward: everything is recomputed from the inputs and `states`, which is taken as given.
 *   dfinal wide, optional (absent: zeros). dq, dk, dv, dalpha, dbeta shaped like their inputs,
 *   overwritten; dinit wide, optional. dq and dk add the value heads of a key head in order.
 *   dA_log, ddt_bias [Hv] wide: sums over chunks from the last to the first (rows of a chunk in order),
 *   then over the batch. No aliasing. */
#ifndef BRAID_OPS_GDN_H
#define BRAID_OPS_GDN_H

#include "ops/op.h"

enum { GDN_MAX_CHUNK = 1 << 16 };
#define GDN_EPS 1e-6

#define GDN_FWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, q, IN, REAL, "b s hk dk")                                                                                    \
    T(op, k, IN, REAL, "b s hk dk")                                                                                    \
    T(op, v, IN, REAL, "b s hv dv")                                                                                    \
    T(op, alpha, IN, REAL, "b s hv")                                                                                   \
    T(op, beta, IN, REAL, "b s hv")                                                                                    \
    T(op, A_log, IN, WIDE, "hv")                                                                                       \
    T(op, dt_bias, IN, WIDE, "hv")                                                                                     \
    T(op, init, OPT, WIDE, "b hv dk dv")                                                                               \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, o, OUT, REAL, "b s hv dv")                                                                                   \
    T(op, states, OPT_SAVED, REAL, "b s/chunk hv dk dv")                                                               \
    T(op, final, OPT_OUT, WIDE, "b hv dk dv")                                                                          \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, chunk, 64)
OP_ARGS(gdn_fwd, GDN_FWD_FIELDS);
#define GDN_BWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, d_o, IN, REAL, "b s hv dv")                                                                                  \
    T(op, dfinal, OPT, WIDE, "b hv dk dv")                                                                             \
    T(op, q, IN, REAL, "b s hk dk")                                                                                    \
    T(op, k, IN, REAL, "b s hk dk")                                                                                    \
    T(op, v, IN, REAL, "b s hv dv")                                                                                    \
    T(op, alpha, IN, REAL, "b s hv")                                                                                   \
    T(op, beta, IN, REAL, "b s hv")                                                                                    \
    T(op, A_log, IN, WIDE, "hv")                                                                                       \
    T(op, dt_bias, IN, WIDE, "hv")                                                                                     \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, states, IN, REAL, "b s/chunk hv dk dv")                                                                      \
    T(op, dq, OUT, REAL, "b s hk dk")                                                                                  \
    T(op, dk, OUT, REAL, "b s hk dk")                                                                                  \
    T(op, dv, OUT, REAL, "b s hv dv")                                                                                  \
    T(op, dalpha, OUT, REAL, "b s hv")                                                                                 \
    T(op, dbeta, OUT, REAL, "b s hv")                                                                                  \
    T(op, dA_log, SUM, WIDE, "hv")                                                                                     \
    T(op, ddt_bias, SUM, WIDE, "hv")                                                                                   \
    T(op, dinit, OPT_OUT, WIDE, "b hv dk dv")                                                                          \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, chunk, 64)
OP_ARGS(gdn_bwd, GDN_BWD_FIELDS);

#endif
