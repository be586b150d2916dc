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
 *   res starts at   row softmax + eps                       exp(logit - row max)
 *   divisors        sum + eps (not in the softmax)          max(sum, eps)
 *   order           column, then (row, column) T-1 times    (row, column) T times
 *   applied as      out_i = sum_j res[j][i] x_j             out_i = sum_j res[i][j] x_j
 * eps is MHC_EPS everywhere, whatever the profile.
 *
 * Primitives, each the inverse order of the next in backward:
 *   project    p = x w^T, rho = sqrt(mean x^2)
 *   gates      z = p * A / (rho + eps) + beta, A = a_pre, a_post or a_res by row; pre, post, logits
 *   sinkhorn   res from logits, T iterations; backward makes the iterates again
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
enum {
    MHC_MAX_STREAMS = 16,
    MHC_MAX_ITERATIONS = 128,
    MHC_BLOCK = 64,       /* rows summed together in gradients of vectors */
    MHC_MAX_PARTIALS = 32, /* of the gradient of w */
    MHC_HEALTH_ROWS = 64, /* rows the health op looks at */
};

enum mhc_profile { MHC_D, MHC_S };
/* What a GPU runs the boundary with: mhc_choose.h. Host devices have one kind only. */
enum mhc_kernels { MHC_KERNELS_AUTO, MHC_KERNELS_BOUNDARY, MHC_KERNELS_PRIMITIVE, MHC_KERNELS_REF };
struct mhc_rule {
    int64_t streams; /* 2 to MHC_MAX_STREAMS */
    enum mhc_profile profile;
    int64_t iterations; /* 1 to MHC_MAX_ITERATIONS */
    bool round_bf16;
    enum mhc_kernels kernels;
    /* On a GPU, and for shapes that have them: the boundary forward in one pass of clusters, even if few of them run at once (mhc_choose.h); in two passes. */
    bool single_pass, ring;
};
static inline int64_t mhc_logits(int64_t streams) { return streams * streams + 2 * streams; }

/* p [rows, N], rho [rows, 1]. w may have any number of rows. */
struct mhc_project_fwd_args {
    struct tensor x, w, p, rho;
};
/* dx (+)= dp w + (drho / (K rho)) x, the second term 0 where rho is; dw optional. */
struct mhc_project_bwd_args {
    struct tensor dp, drho, x, w, rho, dx, dw, work;
    bool acc_dx, acc_dw;
};

/* a_pre, a_post, a_res [1]; beta [N]; pre, post [rows, n]; logits [rows, n^2]. */
struct mhc_gates_fwd_args {
    struct tensor p, rho, a_pre, a_post, a_res, beta, pre, post, logits;
    struct mhc_rule rule;
};
/* dpre, dpost, dlogits: absent ones count as 0. dz [rows, N] optional: the gradient of z. Parameter gradients: all or
 * none; acc_params for all. */
struct mhc_gates_bwd_args {
    struct tensor dpre, dpost, dlogits, p, rho, a_pre, a_post, a_res, beta;
    struct tensor dp, drho, dz, da_pre, da_post, da_res, dbeta;
    struct mhc_rule rule;
    bool acc_params;
};

/* logits, res [rows, n^2]; res may be logits. */
struct mhc_sinkhorn_fwd_args {
    struct tensor logits, res;
    struct mhc_rule rule;
};
/* dlogits may be dres. */
struct mhc_sinkhorn_bwd_args {
    struct tensor dres, logits, dlogits;
    struct mhc_rule rule;
};

/* pre [rows, n], a [rows, C]. */
struct mhc_aggregate_fwd_args {
    struct tensor x, pre, a;
};
struct mhc_aggregate_bwd_args {
    struct tensor da, x, pre, dx, dpre;
    bool acc_dx;
};

/* f [rows, C], bias [C] optional, post [rows, n], res [rows, n^2]; y may be x. */
struct mhc_combine_fwd_args {
    struct tensor x, f, bias, post, res, y;
    struct mhc_rule rule;
    struct dropout_rule drop;
};
/* dx may be dy. dbias optional. */
struct mhc_combine_bwd_args {
    struct tensor dy, x, f, bias, post, res, dx, df, dpost, dres, dbias, work;
    struct mhc_rule rule;
    struct dropout_rule drop;
    bool acc_dbias;
};

#define MHC_EXPAND_FWD_FIELDS(T, N, S, op) \
    T(op, x, IN, REAL, "rows d")           \
    T(op, y, OUT, REAL, "rows streams*d")
OP_ARGS(mhc_expand_fwd, MHC_EXPAND_FWD_FIELDS);
#define MHC_EXPAND_BWD_FIELDS(T, N, S, op)  \
    T(op, dy, IN, REAL, "rows streams*d")   \
    T(op, dx, OUT, REAL, "rows d")
OP_ARGS(mhc_expand_bwd, MHC_EXPAND_BWD_FIELDS);

/* y [rows, C]. Without w the mean over streams. With w [n, K], base [n], scale [1]:
 *   rstd = (mean x^2 + eps)^-1/2, m = x w^T, g_i = sigmoid(m_i rstd scale + base_i) + eps, y = sum g_i x_i.
 * m [rows, n] and rstd [rows, 1] are kept for the backward pass. */
struct mhc_contract_fwd_args {
    struct tensor x, w, base, scale, y, m, rstd;
    double eps;
};
struct mhc_contract_bwd_args {
    struct tensor dy, x, w, base, scale, m, rstd, dx, dw, dbase, dscale, work;
    double eps;
    bool acc_dx, acc_params;
};

/* f absent (then coef_in, bias too): nothing is closed. Without y x is the stream itself; with y x [rows, C] enters: it becomes
 * every stream of y first, as expand makes them. reuse: coef and stat are
 * inputs from an earlier run, and only y and h are made again, the same bits; a device may take rstd from
 * stat instead of summing again. h absent with reuse: close only. gain [C] and eps as in rmsnorm. coef_in: the coefficients the sublayer was opened with. */
struct mhc_boundary_fwd_args {
    struct tensor x, f, bias, coef_in, w, a_pre, a_post, a_res, beta, gain, y, stat, coef, h, work;
    struct mhc_rule rule;
    struct dropout_rule drop;
    double eps;
    bool zero_centered, reuse;
};
/* dh; dy: gradient of y from further on (its mix part; absent: 0); dcoef [rows, N]: gradient of coef from
 * further on (absent: 0). y: the stream (x itself where f was absent). dx [rows, K] may be dy. x without f: it entered, and
 * dx [rows, C] is its gradient.
 * dgain iff gain. dcoef_in has zeros for pre. dz [rows, N]: gradient of the logits z, for boundary_dw.
 * products [N + 1, K], optional: where a device that looks at y anyway leaves what boundary_dw sums over rows: dp^T y (dp: the gradient of p), and in the last
 * row sums of dz (N numbers) and of dz p / (rho + eps) (N more). Given to both or to neither; worth giving where ops has mhc_boundary_products and it says
 * so. Others leave it alone, and boundary_dw reads y.
 * ready U8, optional: what mhc_boundary_ready has made of stat, coef, dcoef and parameters, which are known long before dh: the way back through
 * Sinkhorn. The same bits come out with it and without. */
struct mhc_boundary_bwd_args {
    struct tensor dh, dy, dcoef, y, stat, coef, gain, w, a_pre, a_post, a_res, beta;
    struct tensor x, f, bias, coef_in;
    struct tensor dx, df, dcoef_in, dz, dgain, dbias, products, ready, work;
    struct mhc_rule rule;
    struct dropout_rule drop;
    bool zero_centered, acc_dgain, acc_dbias;
};
static inline bool mhc_enters_fwd(const struct mhc_boundary_fwd_args *a) { return a->f.rank == 0 && a->y.rank > 0; }
static inline bool mhc_enters_bwd(const struct mhc_boundary_bwd_args *a) { return a->f.rank == 0 && a->x.rank > 0; }
/* Gradients of w, a_*, beta from dz. acc_params for all. */
struct mhc_boundary_dw_args {
    struct tensor dz, stat, y, products, a_pre, a_post, a_res, dw, da_pre, da_post, da_res, dbeta, work;
    struct mhc_rule rule;
    bool acc_dw, acc_params;
};

/* The last boundary: combine of the last sublayer, contract by learned gates, norm of what is left (gain [C] and eps as in rmsnorm).
 *   stat [rows, n+2]  m | rstd of contract | rstd of the norm        coef [rows, n]  gates
 * reuse: y, stat and coef are inputs, and only h is made again, the same bits. dcoef_in has zeros for pre; dgain iff gain. y in backward: as
 * forward made it. acc_params: for dw, dbase, dscale. */
struct mhc_leave_fwd_args {
    struct tensor x, f, coef_in, w, base, scale, gain, y, stat, coef, h, work;
    struct mhc_rule rule;
    struct dropout_rule drop;
    double eps;
    bool zero_centered, reuse;
};
struct mhc_leave_bwd_args {
    struct tensor dh, y, stat, coef, gain, w, base, scale, x, f, coef_in;
    struct tensor dx, df, dcoef_in, dgain, dw, dbase, dscale, work;
    struct mhc_rule rule;
    struct dropout_rule drop;
    double eps;
    bool zero_centered, acc_params, acc_dgain;
};

/* The streams of several sublayers in a row made again, from what was kept of each: y_l = combine(y_(l-1), f_l), y_0 = x, for
 * l = 1 to layers. Every y has the bits that combine and the boundary store, rounded to the real type between layers
 * too; where a layer's y is absent, it is passed through and not stored. The last layer's y must be given. Outputs
 * overlap nothing. coef [rows, N]: what the layer was opened with. drop: for all layers, but with each layer's key. */
enum { MHC_REBUILD_LAYERS = 7 };
struct mhc_rebuild_layer {
    struct tensor f, bias, coef, y;
    uint64_t key;
};
struct mhc_rebuild_args {
    struct tensor x;
    struct mhc_rebuild_layer layer[MHC_REBUILD_LAYERS];
    int layers; /* 1 to MHC_REBUILD_LAYERS */
    struct mhc_rule rule;
    struct dropout_rule drop;
};

/* What to watch while training, on MHC_HEALTH_ROWS rows spread evenly, of one or several mixes in a row: comp [MHC_HEALTH_ROWS, n^2] is the
 * product of all mixing matrices so far (comp_in absent: the first). out[i] F64 [1] of each mix (+)=
 *   worst |row sum - 1|, worst |column sum - 1| of this mix, worst gain of the product forward (row sums)
 *   and backward (column sums), mean cosine between different streams of y. */
enum mhc_health_item { MHC_ROW_ERROR, MHC_COLUMN_ERROR, MHC_GAIN_FORWARD, MHC_GAIN_BACKWARD, MHC_SIMILARITY, MHC_HEALTH_ITEMS };
enum { MHC_HEALTH_LAYERS = 3 };
struct mhc_health_layer {
    struct tensor coef, y, out[MHC_HEALTH_ITEMS];
};
struct mhc_health_args {
    struct mhc_health_layer layer[MHC_HEALTH_LAYERS];
    int layers; /* 1 to MHC_HEALTH_LAYERS */
    struct tensor comp_in, comp, work;
    struct mhc_rule rule;
    bool acc_out;
};

int mhc_project_fwd_check(const struct mhc_project_fwd_args *a, struct err *e);
int mhc_project_bwd_check(const struct mhc_project_bwd_args *a, struct err *e);
int mhc_gates_fwd_check(const struct mhc_gates_fwd_args *a, struct err *e);
int mhc_gates_bwd_check(const struct mhc_gates_bwd_args *a, struct err *e);
int mhc_sinkhorn_fwd_check(const struct mhc_sinkhorn_fwd_args *a, struct err *e);
int mhc_sinkhorn_bwd_check(const struct mhc_sinkhorn_bwd_args *a, struct err *e);
int mhc_aggregate_fwd_check(const struct mhc_aggregate_fwd_args *a, struct err *e);
int mhc_aggregate_bwd_check(const struct mhc_aggregate_bwd_args *a, struct err *e);
int mhc_combine_fwd_check(const struct mhc_combine_fwd_args *a, struct err *e);
int mhc_combine_bwd_check(const struct mhc_combine_bwd_args *a, struct err *e);
int mhc_contract_fwd_check(const struct mhc_contract_fwd_args *a, struct err *e);
int mhc_contract_bwd_check(const struct mhc_contract_bwd_args *a, struct err *e);
int mhc_boundary_fwd_check(const struct mhc_boundary_fwd_args *a, struct err *e);
int mhc_boundary_bwd_check(const struct mhc_boundary_bwd_args *a, struct err *e);
/* Of dx and f only the shapes count, and nothing else of what the ready part does not read. */
int mhc_boundary_ready_check(const struct mhc_boundary_bwd_args *a, struct err *e);
int mhc_boundary_dw_check(const struct mhc_boundary_dw_args *a, struct err *e);
int mhc_leave_fwd_check(const struct mhc_leave_fwd_args *a, struct err *e);
int mhc_leave_bwd_check(const struct mhc_leave_bwd_args *a, struct err *e);
int mhc_rebuild_check(const struct mhc_rebuild_args *a, struct err *e);
int mhc_health_check(const struct mhc_health_args *a, struct err *e);

#endif
