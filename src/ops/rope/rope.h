/* rope: per-head RMSNorm (optional) and rotary position embedding (optional), in one pass.
 *   x, y [tokens, heads, d] real, strided (parts of a fused qkv row); y may be x.
 *   w [d] wide, optional: u = x * rstd * gain per head as in rmsnorm, rstd [tokens, heads] wide, written;
 *   without w: u = x and rstd absent.
 *   cos, sin [positions, rd/2] wide, optional: the first rd channels are rotated by the row of
 *   pos[t]; the others pass. half: channel c pairs with c + rd/2; interleaved: 2c with 2c+1.
 *     u'_c = u_c cos - u_p sin,  u'_p = u_p cos + u_c sin
 *   pos I32 [tokens]; every value must be in [0, positions) (a GPU, which cannot refuse, makes the row
 *   NaN, so that the loss tells).
 * backward: rotate dy back, then the norm's backward. x and rstd only with w. dx may be dy.
 *   Without w and without tables both directions copy.
 *   dw [d] wide, iff w; summed over tokens in blocks of RMSNORM_BLOCK tokens, in order. */
#ifndef BRAID_OPS_ROPE_H
#define BRAID_OPS_ROPE_H

#include "ops/op.h"

#define ROPE_FWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, x, IN, REAL, "tokens heads d")                                                                               \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, cos, OPT_FIXED, WIDE, "positions half")                                                                      \
    T(op, sin, OPT_FIXED, WIDE, "positions half @cos")                                                                 \
    T(op, pos, OPT, I32, "tokens +cos")                                                                                \
    T(op, y, OUT, REAL, "tokens heads d")                                                                              \
    T(op, rstd, OPT_SAVED, WIDE, "tokens heads @w")                                                                    \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)                                                                                      \
    N(op, bool, interleaved, 0)
OP_ARGS(rope_fwd, ROPE_FWD_FIELDS);
#define ROPE_BWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, dy, IN, REAL, "tokens heads d")                                                                              \
    T(op, x, OPT, REAL, "tokens heads d +w")                                                                           \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, rstd, OPT, WIDE, "tokens heads +w")                                                                          \
    T(op, cos, OPT, WIDE, "positions half")                                                                            \
    T(op, sin, OPT, WIDE, "positions half @cos")                                                                       \
    T(op, pos, OPT, I32, "tokens +cos")                                                                                \
    T(op, dx, OUT, REAL, "tokens heads d")                                                                             \
    T(op, dw, OPT_SUM, WIDE, "d @w")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, zero_centered, 0)                                                                                      \
    N(op, bool, interleaved, 0)
OP_ARGS(rope_bwd, ROPE_BWD_FIELDS);
/* Host only: every pos must name a row of the tables. */
int rope_positions_check(const char *op, const struct tensor *pos, const struct tensor *cos_table, struct err *e);

/* Frequencies and tables, computed in double; pure functions. */
enum rope_scaling { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };
struct rope_config {
    int64_t dim; /* rotated channels, even */
    double base;
    enum rope_scaling scaling;
    double factor;
    int64_t original;                                    /* original context length: llama3, yarn */
    double low, high;                                    /* llama3 */
    double beta_fast, beta_slow, mscale, mscale_all_dim; /* yarn; both mscales 0: not set */
    bool exact;                                          /* yarn: the ends of the band of channels are not rounded */
};
int rope_config_check(const struct rope_config *c, struct err *e);
/* freq [dim/2]; returns the factor that multiplies cos and sin (1 except for yarn). Linear scaling
 * leaves the frequencies alone: rope_tables divides positions instead. */
double rope_frequencies(const struct rope_config *c, double *freq);
/* Fill host tables [positions, dim/2] of dtype F32 or F64. Linear scaling divides positions. */
void rope_tables(const struct rope_config *c, struct tensor *cos_table, struct tensor *sin_table);

#endif
