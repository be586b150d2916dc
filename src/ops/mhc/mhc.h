/* mhc: manifold hyper-connections. The residual stream is n streams of C channels; every sublayer reads a
 * mix of them (pre), writes into all of them (post), and passes them on through a doubly stochastic
 * matrix (res). The mixing coefficients are a function of the streams themselves.
 *
 * Sizes: rows tokens, n streams, K = n C, N = n^2 + 2n. Tensors [rows, K] and [rows, C] are real, all others wide.
 *   x, y    [rows, K]   streams, stream index major, channel minor
 *   f, h    [rows, C]   a sublayer's output; its normed input
 *   w       [N, K]      rows: n pre, n post, n^2 res (row-major over i, j)
 *   coef    [rows, N]   pre | post | res, the same order
 *   stat    [rows, N+2] p | rho | rstd: what the backward pass needs beside coef
 *
 * Two profiles that do not mix: D (DeepSeek-V4, for new training) and S (the first Megatron form).
 *                   D                                       S
 *   pre             sigmoid(z) + eps                        sigmoid(z)
 *   post            2 sigmoid(z)                            2 sigmoid(z)
 *   res starts at   row softmax + eps                       exp(max(logit - row max, MHC_S_LEAST))
 *   divisors        sum + eps (not in the softmax)          max(sum, eps)
 *   order           column, then (row, column) T-1 times    (row, column) T times
 *   applied as      out_i = sum_j res[j][i] x_j             out_i = sum_j res[i][j] x_j
 * eps is MHC_EPS everywhere, whatever the profile. root_eps > 0 (DeepSeek-V4 and GLM as others load them) has it inside
 * the root instead: p is divided by sqrt(mean x^2 + root_eps). Then rho is that root less eps, so that rho + eps is
 * what divides in both forms; the derivative of rho has the divisor K (rho + mhc_root_less).
 * Why MHC_S_LEAST: in fp32 exp(-104) is 0, and a column of zeros stays one, where the iterations should make its sum 1.
 * What is cut off there moves with the row's maximum, which has its gradient.
 *
 * Primitives, each the inverse order of the next in backward:
 *   project    p = x w^T, rho = sqrt(mean x^2)
 *   gates      z = p * A / (rho + eps) + beta, A = a_pre, a_post or a_res by row; pre, post, logits
 *   sinkhorn   res from logits, T iterations; backward recomputes the iterates
 *   aggregate  a = sum_i pre_i x_i
 *   combine    y_i = mix_i + dropout(post_i (f + bias)), one mask over [rows, K]: channel i C + c
 *   expand     y_i = x;   contract   mean over streams, or learned gates (profile D's head)
 * and the fused boundary between two sublayers: combine of the one before, project, gates, sinkhorn,
 * aggregate and rmsnorm of the one after. It equals the chain of primitives (bit for bit on ref).
 *
 * round_bf16: coefficients are rounded to bf16 before use, as Megatron does; gradients pass straight.
 * Parameter gradients are summed over fixed blocks of rows, blocks in order.
 */
#ifndef BRAID_OPS_MHC_H
#define BRAID_OPS_MHC_H

#include "ops/op.h"
#include "ops/dropout/dropout.h"

#define MHC_EPS 1e-6
#define MHC_S_LEAST (-80.0)
#define MHC_S_START 1.8048513878454153e-35 /* exp(MHC_S_LEAST) */
enum {
    MHC_MAX_STREAMS = 16,
    MHC_MAX_ITERATIONS = 128,
    MHC_BLOCK = 64,        /* rows summed together in gradients of vectors */
    MHC_MAX_PARTIALS = 32, /* of the gradient of w */
    MHC_HEALTH_ROWS = 64,  /* rows the health op reads */
};

enum mhc_profile { MHC_D, MHC_S };
/* What a GPU runs the boundary with: mhc_path.h. Host devices have one kind only. */
enum mhc_kernels { MHC_KERNELS_AUTO, MHC_KERNELS_BOUNDARY, MHC_KERNELS_PRIMITIVE, MHC_KERNELS_REF };
struct mhc_rule {
    int64_t streams; /* 2 to MHC_MAX_STREAMS */
    enum mhc_profile profile;
    int64_t iterations; /* 1 to MHC_MAX_ITERATIONS */
    bool round_bf16;
    enum mhc_kernels kernels;
    double root_eps; /* 0: eps outside the root */
};
static inline double mhc_root_less(double root_eps) { return root_eps > 0 ? MHC_EPS : 0; }
/* Views of an op that planners bind fields to: forward boundaries with reuse, and the part of a backward one that can
 * be made before its turn. */
OP_C const struct op_desc mhc_boundary_again_desc, mhc_boundary_prepare_desc, mhc_final_again_desc;
static inline int64_t mhc_logits(int64_t streams) { return streams * streams + 2 * streams; }

/* w may have any number m of rows. */
#define MHC_PROJECT_FWD_FIELDS(T, N, S, op)                                                                            \
    T(op, x, IN, REAL, "rows k")                                                                                       \
    T(op, w, IN, WIDE, "m k")                                                                                          \
    T(op, p, OUT, WIDE, "rows m")                                                                                      \
    T(op, rho, OUT, WIDE, "rows 1")                                                                                    \
    N(op, double, root_eps, 0)
OP_ARGS(mhc_project_fwd, MHC_PROJECT_FWD_FIELDS);
/* dx (+)= dp w + (drho / (K (rho + mhc_root_less))) x, the second term 0 where rho is. */
#define MHC_PROJECT_BWD_FIELDS(T, N, S, op)                                                                            \
    T(op, dp, IN, WIDE, "rows m")                                                                                      \
    T(op, drho, IN, WIDE, "rows 1")                                                                                    \
    T(op, x, IN, REAL, "rows k")                                                                                       \
    T(op, w, IN, WIDE, "m k")                                                                                          \
    T(op, rho, IN, WIDE, "rows 1")                                                                                     \
    T(op, dx, SUM, REAL, "rows k")                                                                                     \
    T(op, dw, OPT_SUM, WIDE, "m k")                                                                                    \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, root_eps, 0)
OP_ARGS(mhc_project_bwd, MHC_PROJECT_BWD_FIELDS);

#define MHC_GATES_FWD_FIELDS(T, N, S, op)                                                                              \
    T(op, p, IN, WIDE, "rows logits")                                                                                  \
    T(op, rho, IN, WIDE, "rows 1")                                                                                     \
    T(op, a_pre, IN, WIDE, "1")                                                                                        \
    T(op, a_post, IN, WIDE, "1")                                                                                       \
    T(op, a_res, IN, WIDE, "1")                                                                                        \
    T(op, beta, IN, WIDE, "logits")                                                                                    \
    T(op, pre, OUT, WIDE, "rows streams")                                                                              \
    T(op, post, OUT, WIDE, "rows streams")                                                                             \
    T(op, logits, OUT, WIDE, "rows streams*streams")                                                                   \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_gates_fwd, MHC_GATES_FWD_FIELDS);
/* dpre, dpost, dlogits: absent ones count as 0. dz: the gradient of z. Gradients of parameters are all added to, or
 * none. */
#define MHC_GATES_BWD_FIELDS(T, N, S, op)                                                                              \
    T(op, dpre, OPT, WIDE, "rows streams")                                                                             \
    T(op, dpost, OPT, WIDE, "rows streams")                                                                            \
    T(op, dlogits, OPT, WIDE, "rows streams*streams")                                                                  \
    T(op, p, IN, WIDE, "rows logits")                                                                                  \
    T(op, rho, IN, WIDE, "rows 1")                                                                                     \
    T(op, a_pre, IN, WIDE, "1")                                                                                        \
    T(op, a_post, IN, WIDE, "1")                                                                                       \
    T(op, a_res, IN, WIDE, "1")                                                                                        \
    T(op, beta, IN, WIDE, "logits")                                                                                    \
    T(op, dp, OUT, WIDE, "rows logits")                                                                                \
    T(op, drho, OUT, WIDE, "rows 1")                                                                                   \
    T(op, dz, OPT_OUT, WIDE, "rows logits")                                                                            \
    T(op, da_pre, OPT_SUM, WIDE, "1 @dbeta")                                                                           \
    T(op, da_post, OPT_SUM, WIDE, "1 @dbeta")                                                                          \
    T(op, da_res, OPT_SUM, WIDE, "1 @dbeta")                                                                           \
    T(op, dbeta, OPT_SUM, WIDE, "logits")                                                                              \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_gates_bwd, MHC_GATES_BWD_FIELDS);

/* res may be logits. */
#define MHC_SINKHORN_FWD_FIELDS(T, N, S, op)                                                                           \
    T(op, logits, IN, WIDE, "rows streams*streams")                                                                    \
    T(op, res, OUT, WIDE, "rows streams*streams")                                                                      \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_sinkhorn_fwd, MHC_SINKHORN_FWD_FIELDS);
/* dlogits may be dres. */
#define MHC_SINKHORN_BWD_FIELDS(T, N, S, op)                                                                           \
    T(op, dres, IN, WIDE, "rows streams*streams")                                                                      \
    T(op, logits, IN, WIDE, "rows streams*streams")                                                                    \
    T(op, dlogits, OUT, WIDE, "rows streams*streams")                                                                  \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_sinkhorn_bwd, MHC_SINKHORN_BWD_FIELDS);

#define MHC_AGGREGATE_FWD_FIELDS(T, N, S, op)                                                                          \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, pre, IN, WIDE, "rows streams")                                                                               \
    T(op, a, OUT, REAL, "rows d")
OP_ARGS(mhc_aggregate_fwd, MHC_AGGREGATE_FWD_FIELDS);
#define MHC_AGGREGATE_BWD_FIELDS(T, N, S, op)                                                                          \
    T(op, da, IN, REAL, "rows d")                                                                                      \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, pre, IN, WIDE, "rows streams")                                                                               \
    T(op, dx, SUM, REAL, "rows streams*d")                                                                             \
    T(op, dpre, OUT, WIDE, "rows streams")
OP_ARGS(mhc_aggregate_bwd, MHC_AGGREGATE_BWD_FIELDS);

/* y may be x. */
#define MHC_COMBINE_FWD_FIELDS(T, N, S, op)                                                                            \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, f, IN, REAL, "rows d")                                                                                       \
    T(op, bias, OPT, WIDE, "d")                                                                                        \
    T(op, post, IN, WIDE, "rows streams")                                                                              \
    T(op, res, IN, WIDE, "rows streams*streams")                                                                       \
    T(op, y, OUT, REAL, "rows streams*d")                                                                              \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)
OP_ARGS(mhc_combine_fwd, MHC_COMBINE_FWD_FIELDS);
/* dx may be dy. dpre: zeros, because nothing here depends on pre. */
#define MHC_COMBINE_BWD_FIELDS(T, N, S, op)                                                                            \
    T(op, dy, IN, REAL, "rows streams*d")                                                                              \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, f, IN, REAL, "rows d")                                                                                       \
    T(op, bias, OPT, WIDE, "d")                                                                                        \
    T(op, post, IN, WIDE, "rows streams")                                                                              \
    T(op, res, IN, WIDE, "rows streams*streams")                                                                       \
    T(op, dx, OUT, REAL, "rows streams*d")                                                                             \
    T(op, df, OUT, REAL, "rows d")                                                                                     \
    T(op, dpre, OPT_OUT, WIDE, "rows streams")                                                                         \
    T(op, dpost, OUT, WIDE, "rows streams")                                                                            \
    T(op, dres, OUT, WIDE, "rows streams*streams")                                                                     \
    T(op, dbias, OPT_SUM, WIDE, "d")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)
OP_ARGS(mhc_combine_bwd, MHC_COMBINE_BWD_FIELDS);

#define MHC_EXPAND_FWD_FIELDS(T, N, S, op)                                                                             \
    T(op, x, IN, REAL, "rows d")                                                                                       \
    T(op, y, OUT, REAL, "rows streams*d")
OP_ARGS(mhc_expand_fwd, MHC_EXPAND_FWD_FIELDS);
#define MHC_EXPAND_BWD_FIELDS(T, N, S, op)                                                                             \
    T(op, dy, IN, REAL, "rows streams*d")                                                                              \
    T(op, dx, OUT, REAL, "rows d")
OP_ARGS(mhc_expand_bwd, MHC_EXPAND_BWD_FIELDS);

/* Without w the mean over streams. With w:
 *   rstd = (mean x^2 + eps)^-1/2, m = x w^T, g_i = sigmoid(m_i rstd scale + base_i) + eps, y = sum g_i x_i.
 * m and rstd are kept for the backward pass. */
#define MHC_CONTRACT_FWD_FIELDS(T, N, S, op)                                                                           \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, w, OPT, WIDE, "streams streams*d")                                                                           \
    T(op, base, OPT, WIDE, "streams @w")                                                                               \
    T(op, scale, OPT, WIDE, "1 @w")                                                                                    \
    T(op, y, OUT, REAL, "rows d")                                                                                      \
    T(op, m, OPT_SAVED, WIDE, "rows streams @w")                                                                       \
    T(op, rstd, OPT_SAVED, WIDE, "rows 1 @w")                                                                          \
    N(op, double, eps, 1e-5)
OP_ARGS(mhc_contract_fwd, MHC_CONTRACT_FWD_FIELDS);
/* All gradients of parameters are added to if the flag of any of them is set. Absent: all frozen. */
#define MHC_CONTRACT_BWD_FIELDS(T, N, S, op)                                                                           \
    T(op, dy, IN, REAL, "rows d")                                                                                      \
    T(op, x, OPT, REAL, "rows streams*d +w")                                                                           \
    T(op, w, OPT, WIDE, "streams streams*d")                                                                           \
    T(op, base, OPT, WIDE, "streams @w")                                                                               \
    T(op, scale, OPT, WIDE, "1 @w")                                                                                    \
    T(op, m, OPT, WIDE, "rows streams @w")                                                                             \
    T(op, rstd, OPT, WIDE, "rows 1 @w")                                                                                \
    T(op, dx, SUM, REAL, "rows streams*d")                                                                             \
    T(op, dw, OPT_SUM, WIDE, "streams streams*d &w")                                                                   \
    T(op, dbase, OPT_SUM, WIDE, "streams @dw")                                                                         \
    T(op, dscale, OPT_SUM, WIDE, "1 @dw")                                                                              \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, eps, 1e-5)
OP_ARGS(mhc_contract_bwd, MHC_CONTRACT_BWD_FIELDS);
static inline bool mhc_contract_adds(const struct mhc_contract_bwd_args *a)
{
    return a->acc_dw || a->acc_dbase || a->acc_dscale;
}

/* f absent (then coef_in, bias too): nothing is closed. Without y x is the stream itself; with y x [rows, C] enters: it
 * becomes every stream of y first, as expand makes them. gain and eps as in rmsnorm. coef_in: the coefficients the
 * sublayer was opened with. reuse: coef and stat are inputs from an earlier run, and only y and h are recomputed, the
 * same bits; a device may take rstd from stat instead of summing again. h absent with reuse: close only. */
#define MHC_BOUNDARY_FWD_FIELDS(T, N, S, op)                                                                           \
    T(op, x, IN, REAL, "rows *")                                                                                       \
    T(op, f, OPT, REAL, "rows d")                                                                                      \
    T(op, bias, OPT, WIDE, "d &f")                                                                                     \
    T(op, coef_in, OPT, WIDE, "rows logits @f")                                                                        \
    T(op, w, OPT, WIDE, "logits streams*d")                                                                            \
    T(op, a_pre, OPT, WIDE, "1 @w")                                                                                    \
    T(op, a_post, OPT, WIDE, "1 @w")                                                                                   \
    T(op, a_res, OPT, WIDE, "1 @w")                                                                                    \
    T(op, beta, OPT, WIDE, "logits @w")                                                                                \
    T(op, gain, OPT, WIDE, "d")                                                                                        \
    T(op, y, OPT_OUT, REAL, "rows streams*d")                                                                          \
    T(op, stat, OPT_SAVED, WIDE, "rows logits+2 @h")                                                                   \
    T(op, coef, OPT_OUT, WIDE, "rows logits @h")                                                                       \
    T(op, h, OPT_OUT, REAL, "rows d")                                                                                  \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)                                                                                    \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)                                                                                      \
    N(op, bool, reuse, 0)
OP_ARGS(mhc_boundary_fwd, MHC_BOUNDARY_FWD_FIELDS);
/* dy, dcoef: gradients of y and coef from later layers (of y the mix part; absent: 0).
 * y: the stream (x itself where f was absent). dx [rows, K] may be dy. x without f: it entered, and dx [rows, C] is its
 * gradient. dcoef_in has zeros for pre. dz: gradient of the logits z, for boundary_dw.
 * products: where a device that reads y in any case leaves what boundary_dw sums over rows: dp^T y (dp: the gradient of
 * p), and in the last row sums of dz (N numbers) and of dz p / (rho + eps) (N more). Given to both or to neither; worth
 * giving where ops has mhc_boundary_products and it returns true. Other devices ignore it, and boundary_dw reads y.
 * ready: what mhc_boundary_prepare has made of stat, coef, dcoef and parameters, which are known long before dh: the
 * backward pass through Sinkhorn. The results have the same bits with it and without. */
#define MHC_BOUNDARY_BWD_FIELDS(T, N, S, op)                                                                           \
    T(op, dh, IN, REAL, "rows d")                                                                                      \
    T(op, dy, OPT, REAL, "rows streams*d")                                                                             \
    T(op, dcoef, OPT, WIDE, "rows logits")                                                                             \
    T(op, stat, IN, WIDE, "rows logits+2")                                                                             \
    T(op, coef, IN, WIDE, "rows logits")                                                                               \
    T(op, gain, OPT, WIDE, "d")                                                                                        \
    T(op, w, IN, WIDE, "logits streams*d")                                                                             \
    T(op, a_pre, IN, WIDE, "1")                                                                                        \
    T(op, a_post, IN, WIDE, "1")                                                                                       \
    T(op, a_res, IN, WIDE, "1")                                                                                        \
    T(op, beta, IN, WIDE, "logits")                                                                                    \
    T(op, x, OPT, REAL, "rows * +f")                                                                                   \
    T(op, f, OPT, REAL, "rows d")                                                                                      \
    T(op, bias, OPT, WIDE, "d &f")                                                                                     \
    T(op, coef_in, OPT, WIDE, "rows logits @f")                                                                        \
    T(op, y, IN, REAL, "rows streams*d")                                                                               \
    T(op, dx, OUT, REAL, "")                                                                                           \
    T(op, df, OPT_OUT, REAL, "rows d @f")                                                                              \
    T(op, dcoef_in, OPT_OUT, WIDE, "rows logits @f")                                                                   \
    T(op, dz, OUT, WIDE, "rows logits")                                                                                \
    T(op, dgain, OPT_SUM, WIDE, "d @gain")                                                                             \
    T(op, dbias, OPT_SUM, WIDE, "d &f")                                                                                \
    T(op, products, OPT_OUT, WIDE, "logits+1 streams*d")                                                               \
    T(op, ready, OPT, U8, "")                                                                                          \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)                                                                                    \
    N(op, bool, zero_centered, 0)
OP_ARGS(mhc_boundary_bwd, MHC_BOUNDARY_BWD_FIELDS);
static inline bool mhc_is_first_fwd(const struct mhc_boundary_fwd_args *a) { return a->f.rank == 0 && a->y.rank > 0; }
static inline bool mhc_is_first_bwd(const struct mhc_boundary_bwd_args *a) { return a->f.rank == 0 && a->x.rank > 0; }
/* The ready part takes the arguments of boundary_bwd. Of dx and f only the shapes count, and nothing else of what it
 * does not read. */
OP_C int mhc_boundary_prepare_check(const struct mhc_boundary_bwd_args *a, struct err *e);
/* Gradients of w, a_*, beta from dz. All of those beside dw are added to if the flag of any of them is set. */
#define MHC_BOUNDARY_DW_FIELDS(T, N, S, op)                                                                            \
    T(op, dz, IN, WIDE, "rows logits")                                                                                 \
    T(op, stat, IN, WIDE, "rows logits+2")                                                                             \
    T(op, y, IN, REAL, "rows streams*d")                                                                               \
    T(op, products, OPT_FIXED, WIDE, "logits+1 streams*d")                                                             \
    T(op, a_pre, IN, WIDE, "1")                                                                                        \
    T(op, a_post, IN, WIDE, "1")                                                                                       \
    T(op, a_res, IN, WIDE, "1")                                                                                        \
    T(op, dw, SUM, WIDE, "logits streams*d")                                                                           \
    T(op, da_pre, SUM, WIDE, "1")                                                                                      \
    T(op, da_post, SUM, WIDE, "1")                                                                                     \
    T(op, da_res, SUM, WIDE, "1")                                                                                      \
    T(op, dbeta, SUM, WIDE, "logits")                                                                                  \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_boundary_dw, MHC_BOUNDARY_DW_FIELDS);
static inline bool mhc_boundary_adds(const struct mhc_boundary_dw_args *a)
{
    return a->acc_da_pre || a->acc_da_post || a->acc_da_res || a->acc_dbeta;
}

/* The last boundary: combine of the last sublayer, contract by learned gates, norm of what is left (gain and eps as in
 * rmsnorm).
 *   stat [rows, n+2]  m | rstd of contract | rstd of the norm        coef [rows, n]  gates
 * reuse: y, stat and coef are inputs, and only h is recomputed, the same bits. */
#define MHC_FINAL_FWD_FIELDS(T, N, S, op)                                                                              \
    T(op, x, OPT, REAL, "rows streams*d")                                                                              \
    T(op, f, OPT, REAL, "rows d @x")                                                                                   \
    T(op, coef_in, OPT, WIDE, "rows logits @x")                                                                        \
    T(op, w, OPT, WIDE, "streams streams*d @x")                                                                        \
    T(op, base, OPT, WIDE, "streams @x")                                                                               \
    T(op, scale, OPT, WIDE, "1 @x")                                                                                    \
    T(op, gain, OPT, WIDE, "d")                                                                                        \
    T(op, y, SAVED, REAL, "rows streams*d")                                                                            \
    T(op, stat, SAVED, WIDE, "rows streams+2")                                                                         \
    T(op, coef, SAVED, WIDE, "rows streams")                                                                           \
    T(op, h, OUT, REAL, "rows d")                                                                                      \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)                                                                                    \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)                                                                                      \
    N(op, bool, reuse, 0)
OP_ARGS(mhc_final_fwd, MHC_FINAL_FWD_FIELDS);
/* dcoef_in has zeros for pre. y: as forward made it. Gradients of w, base and scale are added to if any of them is. */
#define MHC_FINAL_BWD_FIELDS(T, N, S, op)                                                                              \
    T(op, dh, IN, REAL, "rows d")                                                                                      \
    T(op, stat, IN, WIDE, "rows streams+2")                                                                            \
    T(op, w, IN, WIDE, "streams streams*d")                                                                            \
    T(op, base, IN, WIDE, "streams")                                                                                   \
    T(op, scale, IN, WIDE, "1")                                                                                        \
    T(op, gain, OPT, WIDE, "d")                                                                                        \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    T(op, f, IN, REAL, "rows d")                                                                                       \
    T(op, coef_in, IN, WIDE, "rows logits")                                                                            \
    T(op, y, IN, REAL, "rows streams*d")                                                                               \
    T(op, coef, IN, WIDE, "rows streams")                                                                              \
    T(op, dx, OUT, REAL, "rows streams*d")                                                                             \
    T(op, df, OUT, REAL, "rows d")                                                                                     \
    T(op, dcoef_in, OUT, WIDE, "rows logits")                                                                          \
    T(op, dgain, OPT_SUM, WIDE, "d @gain")                                                                             \
    T(op, dw, OPT_SUM, WIDE, "streams streams*d")                                                                      \
    T(op, dbase, OPT_SUM, WIDE, "streams @dw")                                                                         \
    T(op, dscale, OPT_SUM, WIDE, "1 @dw")                                                                              \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)                                                                                    \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)
OP_ARGS(mhc_final_bwd, MHC_FINAL_BWD_FIELDS);
static inline bool mhc_final_adds(const struct mhc_final_bwd_args *a)
{
    return a->acc_dw || a->acc_dbase || a->acc_dscale;
}

/* The streams of several sublayers in a row recomputed, from what was kept of each: y_l = combine(y_(l-1), f_l), y_0 =
 * x, for l = 1 to layers. Every y has the bits that combine and the boundary store, rounded to the real type between
 * layers too; where a layer's y is absent, it is passed through and not stored. The last layer's y must be given.
 * Outputs overlap nothing. coef [rows, N]: what the layer was opened with. drop: for all layers, but with each layer's
 * key. */
enum { MHC_REBUILD_LAYERS = 7 };
struct mhc_rebuild_layer {
    struct tensor f, bias, coef, y;
    uint64_t key;
};
#define MHC_REBUILD_FIELDS(T, N, S, op)                                                                                \
    T(op, x, IN, REAL, "rows streams*d")                                                                               \
    S(op, struct mhc_rebuild_layer layer[MHC_REBUILD_LAYERS])                                                          \
    S(op, int layers) /* 1 to MHC_REBUILD_LAYERS */                                                                    \
    S(op, struct mhc_rule rule)                                                                                        \
    S(op, struct dropout_rule drop)
OP_ARGS(mhc_rebuild, MHC_REBUILD_FIELDS);

/* What to watch while training, on MHC_HEALTH_ROWS rows spread evenly, of one or several mixes in a row: comp is the
 * product of all mixing matrices so far (comp_in absent: the first). out[i] F64 [1] of each mix (+)=
 *   worst |row sum - 1|, worst |column sum - 1| of this mix, worst gain of the product forward (row sums)
 *   and backward (column sums), mean cosine between different streams of y. */
enum mhc_health_item {
    MHC_ROW_ERROR,
    MHC_COLUMN_ERROR,
    MHC_GAIN_FORWARD,
    MHC_GAIN_BACKWARD,
    MHC_SIMILARITY,
    MHC_HEALTH_ITEMS
};
enum { MHC_HEALTH_LAYERS = 3 };
struct mhc_health_layer {
    struct tensor coef, y, out[MHC_HEALTH_ITEMS];
    bool acc[MHC_HEALTH_ITEMS];
};
#define MHC_HEALTH_FIELDS(T, N, S, op)                                                                                 \
    S(op, struct mhc_health_layer layer[MHC_HEALTH_LAYERS])                                                            \
    S(op, int layers) /* 1 to MHC_HEALTH_LAYERS */                                                                     \
    T(op, comp_in, OPT, WIDE, "64 streams*streams")                                                                    \
    T(op, comp, OUT, WIDE, "64 streams*streams")                                                                       \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct mhc_rule rule)
OP_ARGS(mhc_health, MHC_HEALTH_FIELDS);

#endif
