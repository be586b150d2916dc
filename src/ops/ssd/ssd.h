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
 * text begins here and init counts as zeros. final [B, H, N, P] wide, optional output: the state after the last row; may be
 * init. doc_start I32 [B, S] optional: row t begins a document when doc_start[b,t] == t; the state before it is
 * dropped. states [B, ceil(S/chunk), H, N, P] real, optional output: the state that enters each chunk; backward reads it.
 *   backward: everything is made again from the inputs and `states`, which is taken as given. dfinal wide, optional
 * (absent: zeros). dx, ddt, dBm, dCm shaped like x, dt, Bm, Cm, overwritten; dinit wide, optional. dA_log, ddt_bias, dD
 * (present iff D is) [H], wide: sums over rows, then over the batch. dBm and dCm add the heads of a group in blocks of
 * SSD_HEADS, then the blocks, in order. Where delta was clamped no gradient reaches dt. No aliasing. */
#ifndef BRAID_OPS_SSD_H
#define BRAID_OPS_SSD_H

#include "dev/dev.h"

enum { SSD_HEADS = 8, SSD_MAX_CHUNK = 1 << 20 };

struct ssd_fwd_args {
    struct tensor x, dt, A_log, dt_bias, D, Bm, Cm, init, doc_start, start, y, states, final, work;
    int64_t chunk;
    double dt_min, dt_max;
};
struct ssd_bwd_args {
    struct tensor dy, dfinal, x, dt, A_log, dt_bias, D, Bm, Cm, doc_start, states;
    struct tensor dx, ddt, dA_log, ddt_bias, dD, dBm, dCm, dinit, work;
    int64_t chunk;
    double dt_min, dt_max;
    bool acc_dA_log, acc_ddt_bias, acc_dD;
};
int ssd_fwd_check(const struct ssd_fwd_args *a, struct err *e);
int ssd_bwd_check(const struct ssd_bwd_args *a, struct err *e);

#endif
