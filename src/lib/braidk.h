/* braidk: the kernels of the braid trainer as a C library, libbraidk.so. This header is all that a program needs.
 *
 * Every function returns BRAIDK_OK or one of the errors below, and then writes a sentence that names the argument and
 * the reason to err (err_bytes long, always terminated; NULL and 0: not wanted).
 *
 *   struct braidk *k;
 *   char why[512];
 *   if (braidk_open(0, &k, why, sizeof why) != BRAIDK_OK) ...              GPU 0; BRAIDK_HOST: this processor
 *   struct braidk_mhc_pre_args a = {.size = sizeof a, .x = ..., .h = ...};
 *   int64_t bytes;
 *   if (braidk_mhc_pre_work(k, &a, &bytes, why, sizeof why) != BRAIDK_OK) ...
 *   a.work = ... bytes of memory on the device, aligned to 256 bytes ...
 *   if (braidk_mhc_pre(k, &a, stream, why, sizeof why) != BRAIDK_OK) ...
 *
 * Rules
 * - A call of an op allocates nothing, waits for nothing, reads no device memory from the host and has no global state:
 *   it can be captured in a CUDA graph. It enqueues its work on the given stream (cudaStream_t; NULL: the default
 *   stream; ignored on the host, where the call returns when the work is done).
 * - A handle may be used by several threads and with several streams at once; each call needs a work buffer of its own.
 *   One handle serves one GPU; open one for each. The caller's current device is restored.
 * - The same arguments give the same bits: sums have an order that depends on shapes only.
 * - size is sizeof the struct. Structs grow at their end: callers that were built with an older header keep working.
 *   Members that are not set are zero: an absent tensor, or the default of a number.
 * - Tensors are row-major with a last stride of 1; stride is in elements. Outputs overlap nothing else.
 *
 * Types. "real" is the type of activations: F32 or BF16 on a GPU, F32 or F64 (slow, for checks) on the host. "wide" is
 * the type of parameters, coefficients, statistics and gradients of parameters: F64 beside F64, else F32. */
#ifndef BRAIDK_H
#define BRAIDK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BRAIDK_API __attribute__((visibility("default")))
#define BRAIDK_VERSION 1 /* of this interface: grows when structs grow or functions are added */

enum braidk_status {
    BRAIDK_OK = 0,
    BRAIDK_INVALID = 1,     /* an argument is wrong: the text names it */
    BRAIDK_UNSUPPORTED = 2, /* this build, GPU or driver cannot do it: the text says why */
    BRAIDK_NOMEM = 3,
    BRAIDK_FAILED = 4, /* CUDA or one of its libraries failed */
};
enum braidk_dtype { BRAIDK_NONE, BRAIDK_F32, BRAIDK_BF16, BRAIDK_F64, BRAIDK_I32, BRAIDK_I64, BRAIDK_U8 };
enum { BRAIDK_MAX_RANK = 5, BRAIDK_HOST = -1 };

/* rank 0: absent. */
struct braidk_tensor {
    void *data;
    int64_t shape[BRAIDK_MAX_RANK], stride[BRAIDK_MAX_RANK];
    int32_t rank, dtype;
};
/* bytes of memory that only the call uses; aligned to 256 bytes. */
struct braidk_work {
    void *data;
    int64_t bytes;
};

/* BRAIDK_VERSION of the library that is loaded, and a line about it: version, compiler, architectures. */
BRAIDK_API int braidk_version(void);
BRAIDK_API const char *braidk_build(void);
/* sizeof struct braidk_OP_args as the library knows it, 0: no such op. For bindings that lay out the structs
 * themselves. */
BRAIDK_API size_t braidk_args_bytes(const char *op);

struct braidk;
/* device: number of a GPU as CUDA counts them, or BRAIDK_HOST. This is where memory is allocated and cuBLASLt loaded.
 * */
BRAIDK_API int braidk_open(int device, struct braidk **out, char *err, size_t err_bytes);
BRAIDK_API void braidk_close(struct braidk *k);
/* "NVIDIA H200, Hopper kernels"; valid as long as the handle. */
BRAIDK_API const char *braidk_device(const struct braidk *k);

/* ---- mHC: manifold-constrained hyper-connections ------------------------------------------------
 * n residual streams of C channels, stream index major: K = n C, N = n^2 + 2n coefficients of a token, in the order pre
 * (n), post (n), comb (n^2, row-major). For each token, with z = (fn x) * scale / root + base and one scale for each of
 * the three groups:
 *     root                                                   sqrt(mean x^2) + 1e-6, or with root_eps > 0 instead
 *                                                            sqrt(mean x^2 + root_eps): DeepSeek-V4 and GLM
 *     profile D (DeepSeek-V4)                                profile S (first Megatron form)
 *     pre = sigmoid(z) + 1e-6                                pre = sigmoid(z)
 *     post = 2 sigmoid(z)                                    post = 2 sigmoid(z)
 *     comb: row softmax + 1e-6, then column and              comb: exp(z - row max), then rows and columns by
 *       (row, column) T - 1 times by sum + 1e-6                max(sum, 1e-6), T times
 *     y_i = post_i f + sum_j comb[j][i] x_j                  y_i = post_i f + sum_j comb[i][j] x_j
 *     h = sum_i pre_i x_i, and with norm its RMS norm        likewise
 * docs/GOLDEN.md has the formulas in full, and values to test against. */
enum { BRAIDK_MHC_D = 0, BRAIDK_MHC_S = 1 };
struct braidk_mhc {
    int32_t streams;    /* 2 to 16; Hopper's fused kernels take 4 */
    int32_t iterations; /* T, 1 to 128 */
    int32_t profile;    /* BRAIDK_MHC_D or BRAIDK_MHC_S */
    int32_t norm;       /* h is normalised, with norm_weight if that is given */
    double root_eps;    /* 0: epsilon outside the root */
    double norm_eps;    /* h / sqrt(mean h^2 + norm_eps) */
};

/* The input of a sublayer from the streams. stat is what the backward pass needs. */
struct braidk_mhc_pre_args {
    size_t size;
    struct braidk_tensor x, fn, base, scale, norm_weight; /* [rows, K] real; [N, K], [N], [3], [C] wide */
    struct braidk_tensor h, coef, stat;                   /* out: [rows, C] real; [rows, N], [rows, N + 2] wide */
    struct braidk_mhc mhc;
    struct braidk_work work;
};
/* From gradients of h and coef (absent: zeros; without norm its part for pre is ignored). Outputs are overwritten.
 * dnorm_weight is given if norm_weight is. */
struct braidk_mhc_pre_bwd_args {
    size_t size;
    struct braidk_tensor dh, dcoef;
    struct braidk_tensor x, fn, base, scale, norm_weight, coef, stat;
    struct braidk_tensor dx, dfn, dbase, dscale, dnorm_weight;
    struct braidk_mhc mhc;
    struct braidk_work work;
};
/* Back into the streams: y from x and the sublayer's output f. bias [C] wide, optional, is added to f. Of mhc only
 * streams and profile count. */
struct braidk_mhc_post_args {
    size_t size;
    struct braidk_tensor x, f, coef, bias;
    struct braidk_tensor y;
    struct braidk_mhc mhc;
    struct braidk_work work;
};
struct braidk_mhc_post_bwd_args {
    size_t size;
    struct braidk_tensor dy;
    struct braidk_tensor x, f, coef, bias;
    struct braidk_tensor dx, df, dcoef, dbias; /* dcoef has zeros for pre; dbias is given if bias is */
    struct braidk_mhc mhc;
    struct braidk_work work;
};
/* Both between two sublayers, in one pass over the streams on Hopper: y = post(x, f, coef_in), then h and coef =
 * pre(y). mhc.norm must be set. */
struct braidk_mhc_boundary_args {
    size_t size;
    struct braidk_tensor x, f, coef_in, bias;
    struct braidk_tensor fn, base, scale, norm_weight;
    struct braidk_tensor y, h, coef, stat;
    struct braidk_mhc mhc;
    struct braidk_work work;
};
struct braidk_mhc_boundary_bwd_args {
    size_t size;
    struct braidk_tensor dy, dh, dcoef; /* dy and dcoef may be absent: zeros */
    struct braidk_tensor x, f, coef_in, bias;
    struct braidk_tensor fn, base, scale, norm_weight, y, coef, stat;
    struct braidk_tensor dx, df, dcoef_in, dbias;
    struct braidk_tensor dfn, dbase, dscale, dnorm_weight;
    struct braidk_mhc mhc;
    struct braidk_work work;
};

/* ---- experts ------------------------------------------------------------------------------------
 * z = (prob * act(x W13_e^T)) W2_e^T for the rows of expert e, which are [offsets[e], offsets[e + 1]): offsets I32
 * [E + 1] on the device, rising from 0 to at most R. Rows past offsets[E] become 0. x [R, in], w13 [E, 2f (f without a
 * gate), in], w2 [E, out, f], pre [R, 2f] real; prob [R] wide, optional. */
enum {
    BRAIDK_SWIGLU,
    BRAIDK_GEGLU,
    BRAIDK_QUICK_GEGLU,
    BRAIDK_GELU,
    BRAIDK_QUICK_GELU,
    BRAIDK_RELU2,
    BRAIDK_SILU,
};
struct braidk_act {
    int32_t kind;
    int32_t interleave;          /* 0: gate and up are halves; else blocks of so many rows alternate, gate first */
    double clamp, alpha, offset; /* clamp 0: none; alpha: of the quick kinds; offset: added to up */
};
struct braidk_expert_mlp_args {
    size_t size;
    struct braidk_tensor x, w13, w2, offsets, prob;
    struct braidk_tensor z, pre; /* out; pre is what the backward pass needs */
    struct braidk_act act;
    struct braidk_work work;
};
struct braidk_expert_mlp_bwd_args {
    size_t size;
    struct braidk_tensor dz;
    struct braidk_tensor x, w13, w2, offsets, prob, pre;
    struct braidk_tensor dx, dw13, dw2, dprob; /* dw13 and dw2 wide; dx, dw13 and dw2 may be absent; dprob with prob */
    struct braidk_act act;
    struct braidk_work work;
};

/* The same from tokens and back: x [T, in]; idx I32 [T, k] and probs [T, k] wide, the experts of each token (negative:
 * dropped) and their weights. z [T, out] = sum over j of probs * expert idx[t][j]. Rows are sorted by expert inside;
 * offsets I32 [E + 1], row I32 [T, k], src I32 [T k] and pre [T k, 2f] real are what the backward pass needs. Two runs
 * give the same bits: nothing is added atomically. */
struct braidk_moe_mlp_args {
    size_t size;
    struct braidk_tensor x, idx, probs, w13, w2;
    struct braidk_tensor z, offsets, row, src, pre; /* out */
    struct braidk_act act;
    struct braidk_work work;
};
struct braidk_moe_mlp_bwd_args {
    size_t size;
    struct braidk_tensor dz;
    struct braidk_tensor x, probs, w13, w2, offsets, row, src, pre;
    struct braidk_tensor dx, dprobs, dw13, dw2; /* dw13 and dw2 wide */
    struct braidk_act act;
    struct braidk_work work;
};

/* ---- scans --------------------------------------------------------------------------------------
 * ssd, the core of Mamba-2: with delta = softplus(dt + dt_bias) and A = -exp(A_log), in order of t,
 *     S_t = exp(delta A) S_(t-1) + delta B_t x_t^T,   y_t = S_t^T C_t + D x_t
 * x, y [batch, seq, H, P]; dt [batch, seq, H]; B, C [batch, seq, G, N], H a multiple of G: real. A_log, dt_bias, D [H]
 * wide, D optional. doc_start I32 [batch, seq], optional: a text begins where doc_start[b][t] == t, with a state of
 * zeros. states [batch, ceil(seq / chunk), H, N, P] real: what the backward pass needs. */
struct braidk_ssd_args {
    size_t size;
    struct braidk_tensor x, dt, A_log, dt_bias, D, B, C, doc_start;
    struct braidk_tensor y, states;
    int64_t chunk;
    struct braidk_work work;
};
struct braidk_ssd_bwd_args {
    size_t size;
    struct braidk_tensor dy;
    struct braidk_tensor x, dt, A_log, dt_bias, D, B, C, doc_start, states;
    struct braidk_tensor dx, ddt, dA_log, ddt_bias, dD, dB, dC;
    int64_t chunk;
    struct braidk_work work;
};
/* The gated delta rule, with q and k brought to unit length, decay g = -exp(A_log) softplus(alpha + dt_bias) and
 * w = sigmoid(beta):
 *     S~ = exp(g) S_(t-1),   S_t = S~ + k (w (v - S~^T k))^T,   o_t = S_t^T q / sqrt(dk)
 * q, k [batch, seq, Hk, dk]; v, o [batch, seq, Hv, dv], Hv a multiple of Hk; alpha, beta [batch, seq, Hv]: real. A_log,
 * dt_bias [Hv] wide. states [batch, ceil(seq / chunk), Hv, dk, dv] real. */
struct braidk_gated_delta_rule_args {
    size_t size;
    struct braidk_tensor q, k, v, alpha, beta, A_log, dt_bias, doc_start;
    struct braidk_tensor o, states;
    int64_t chunk;
    struct braidk_work work;
};
struct braidk_gated_delta_rule_bwd_args {
    size_t size;
    struct braidk_tensor d_o;
    struct braidk_tensor q, k, v, alpha, beta, A_log, dt_bias, doc_start, states;
    struct braidk_tensor dq, dk, dv, dalpha, dbeta, dA_log, ddt_bias;
    int64_t chunk;
    struct braidk_work work;
};

/* ---- router and loss ----------------------------------------------------------------------------
 * The k best of E experts for each token, by falling selection value, lowest index first among equals. logits [T, E]
 * wide; bias [E] wide, optional, changes the choice and no probability. probs [T, k] wide, idx I32 [T, k]. */
enum { BRAIDK_SOFTMAX, BRAIDK_SIGMOID, BRAIDK_SQRTSOFTPLUS };
struct braidk_router {
    int32_t score;              /* of BRAIDK_SOFTMAX and what follows */
    int32_t pre_softmax;        /* softmax over all experts, not over the chosen */
    int32_t norm;               /* other scores: probabilities of the chosen sum to 1 */
    int32_t groups, group_topk; /* only experts of the group_topk best of so many groups; 0: all */
    double scale;               /* of the probabilities; 0: 1 */
};
struct braidk_router_topk_args {
    size_t size;
    struct braidk_tensor logits, bias;
    struct braidk_tensor probs, idx;
    struct braidk_router router;
    struct braidk_work work;
};
struct braidk_router_topk_bwd_args {
    size_t size;
    struct braidk_tensor dprobs, logits, idx;
    struct braidk_tensor dlogits;
    struct braidk_router router;
    struct braidk_work work;
};
/* Linear layer and cross entropy together, in chunks of rows: the logits of all rows never exist. h [rows, d], w [V, d]
 * real; label I32 [rows], -1: ignored. loss F64 [2]: sum of the losses and number of labels. Gradients of scale * sum
 * of the losses (scale F64 [1] on the device): dh [rows, d] real, dw [V, d] wide, both optional. */
struct braidk_cross_entropy_args {
    size_t size;
    struct braidk_tensor h, w, label, scale;
    struct braidk_tensor loss, dh, dw;
    struct braidk_work work;
};

/* ---- calls --------------------------------------------------------------------------------------
 * For each op three functions:
 *   braidk_OP(k, args, stream, err, err_bytes)                enqueues the op
 *   braidk_OP_work(k, args, bytes, err, err_bytes)            how large work must be; tensors need no data yet
 *   braidk_OP_supported(k, args, why, why_bytes)              BRAIDK_OK, and in why which kernels will run and the
 *                                                             reason; else why there are none */
#define BRAIDK_OPS(OP)                                                                                                 \
    OP(mhc_pre)                                                                                                        \
    OP(mhc_pre_bwd)                                                                                                    \
    OP(mhc_post)                                                                                                       \
    OP(mhc_post_bwd)                                                                                                   \
    OP(mhc_boundary)                                                                                                   \
    OP(mhc_boundary_bwd)                                                                                               \
    OP(expert_mlp)                                                                                                     \
    OP(expert_mlp_bwd)                                                                                                 \
    OP(moe_mlp)                                                                                                        \
    OP(moe_mlp_bwd)                                                                                                    \
    OP(ssd)                                                                                                            \
    OP(ssd_bwd)                                                                                                        \
    OP(gated_delta_rule)                                                                                               \
    OP(gated_delta_rule_bwd)                                                                                           \
    OP(router_topk)                                                                                                    \
    OP(router_topk_bwd)                                                                                                \
    OP(cross_entropy)
#define BRAIDK_DECLARE(op)                                                                                             \
    BRAIDK_API int braidk_##op(struct braidk *k, const struct braidk_##op##_args *a, void *stream, char *err,          \
                               size_t err_bytes);                                                                      \
    BRAIDK_API int braidk_##op##_work(struct braidk *k, const struct braidk_##op##_args *a, int64_t *bytes, char *err, \
                                      size_t err_bytes);                                                               \
    BRAIDK_API int braidk_##op##_supported(struct braidk *k, const struct braidk_##op##_args *a, char *why,            \
                                           size_t why_bytes);
BRAIDK_OPS(BRAIDK_DECLARE)
#undef BRAIDK_DECLARE

#ifdef __cplusplus
}
#endif

#endif
