/* What the mhc kernels share: sizes, vectors, sums, and the launchers one file calls of another. Private to ops/mhc.
 *
 * Kernels are templates over the real type T, the number of streams N (0: any, up to MHC_MAX_STREAMS) and VEC, the
 * channels a thread takes at once (16 bytes, or 1 where rows are not aligned). A block works on one row at a time. */
#ifndef BRAID_OPS_MHC_CUDA_CUH
#define BRAID_OPS_MHC_CUDA_CUH

#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
extern "C" {
#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_path.h"
}

#define INLINE static __device__ __forceinline__
/* A loop over i from 0 to before n whose copies are all written out, so that arrays that i indexes stay in registers.
 * */
#define UNROLLED(i, n) _Pragma("unroll") for (int i = 0; i < (n); i++)

enum { MHC_THREADS = 256 };

template <int N> struct streams {
    static constexpr int MAX = N > 0 ? N : (int)MHC_MAX_STREAMS;
    INLINE int count(int n) { return N > 0 ? N : n; }
};

/* The fast copies of a kernel are for 4 streams of aligned bf16 or fp32 rows; one slow copy serves the rest. */
#define MHC_DISPATCH(dtype_, n_, aligned_, T, N, VEC, ...)                                                             \
    do {                                                                                                               \
        if ((n_) == 4 && (aligned_)) {                                                                                 \
            constexpr int N = 4;                                                                                       \
            if ((dtype_) == DT_BF16) {                                                                                 \
                typedef bf16 T;                                                                                        \
                constexpr int VEC = 8;                                                                                 \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                typedef float T;                                                                                       \
                constexpr int VEC = 4;                                                                                 \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        } else {                                                                                                       \
            constexpr int N = 0, VEC = 1;                                                                              \
            if ((dtype_) == DT_BF16) {                                                                                 \
                typedef bf16 T;                                                                                        \
                __VA_ARGS__;                                                                                           \
            } else {                                                                                                   \
                typedef float T;                                                                                       \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        }                                                                                                              \
    } while (0)

/* VEC channels as they lie in memory, so that many can be under way in few registers; a single one as a float. */
struct packed {
    uint4 raw;
};
template <typename T, int VEC> INLINE struct packed load_packed(const T *p)
{
    struct packed h = {};
    if constexpr (VEC == 1)
        h.raw.x = __float_as_uint(to_float(p[0]));
    else
        h.raw = load_raw(p);
    return h;
}
template <typename T, int VEC> INLINE void unpack_to(const struct packed &h, float (&v)[VEC])
{
    if constexpr (VEC == 1)
        v[0] = __uint_as_float(h.raw.x);
    else
        unpack<T>(h.raw, v);
}

/* Weight of input stream j in output stream i. */
INLINE int mix_at(bool profile_d, int n, int i, int j) { return profile_d ? j * n + i : i * n + j; }

INLINE float precise_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
INLINE float maybe_bf16(bool round, float v) { return round ? rounded<bf16>(v) : v; }

/* A step of warp_sums, and those after it until LAST values are left; as a template, because a loop is not unrolled as
 * far, and v goes to memory then. */
template <int HALF, int LAST, int COUNT> INLINE void fold_sums(float (&v)[COUNT])
{
    constexpr int BIT = 32 * HALF / COUNT;
    bool upper = (threadIdx.x & BIT) != 0;
    UNROLLED (i, HALF) {
        float keep = upper ? v[i + HALF] : v[i], send = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, send, BIT);
    }
    if constexpr (HALF > LAST)
        fold_sums<HALF / 2, LAST>(v);
}
/* Sums over a warp of COUNT values per thread at once, COUNT a power of two up to 32: lane k * (32 / COUNT) has sum k.
 * Each step halves the values a lane is responsible for, so all sums cost COUNT shuffles and not 5 COUNT. */
template <int COUNT> INLINE float warp_sums(float (&v)[COUNT])
{
    fold_sums<COUNT / 2, 1>(v);
    float sum = v[0];
#pragma unroll
    for (int bit = 16 / COUNT; bit > 0; bit /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    return sum;
}
/* The sum over a warp, left in shared memory by one lane. */
INLINE void leave_warp_sum(float v, float *to)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        *to = v;
}
/* Sum over the block, for all threads. scratch: MHC_THREADS / 32 floats, used once. */
INLINE float row_sum(float v, float *scratch)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++)
        sum += scratch[w];
    return sum;
}

static inline float *floats(const struct tensor *t) { return (float *)t->data; }
/* Rows of a tensor of rank 2. */
struct view {
    void *data;
    int64_t stride;
};
static inline struct view view_of(const struct tensor *t) { return {t->data, t->rank == 2 ? t->stride[0] : 0}; }
/* The same for fp32, from a column on; absent where the tensor is. */
static inline struct view view_at(const struct tensor *t, int64_t column)
{
    return {present(t) ? floats(t) + column : NULL, t->stride[0]};
}
template <typename T> INLINE T *at(const struct view &v, int64_t row) { return (T *)v.data + row * v.stride; }
INLINE float number_at(const struct view &v, int64_t row, int64_t i) { return at<float>(v, row)[i]; }
INLINE float number_or_zero(const struct view &v, int64_t row, int64_t i)
{
    return v.data == NULL ? 0.0f : number_at(v, row, i);
}

/* Parts that the arguments of many kernels have, and functions that make them of an op's. */
struct rule_args {
    int n, iterations;
    bool profile_d, round_bf16;
    float root_eps, root_less; /* rho: root of mean square + root_eps, less root_less */
};
static inline struct rule_args rule_of(const struct mhc_rule &r)
{
    return {(int)r.streams, (int)r.iterations, r.profile == MHC_D,
            r.round_bf16,   (float)r.root_eps, (float)mhc_root_less(r.root_eps)};
}
struct gate_params {
    const float *alpha[3], *beta; /* of pre, post, res */
};
template <typename A> static struct gate_params gate_params_of(const A *a)
{
    return {{floats(&a->a_pre), floats(&a->a_post), floats(&a->a_res)}, floats(&a->beta)};
}
struct norm_args { /* of h; gain may be NULL, one is added to it */
    const float *gain;
    float one;
};
template <typename A> static struct norm_args norm_of(const A *a)
{
    return {floats(&a->gain), a->zero_centered ? 1.0f : 0.0f};
}
template <int VEC> INLINE void load_gain(const struct norm_args &norm, int64_t c, float (&gain)[VEC])
{
    UNROLLED (e, VEC)
        gain[e] = 1;
    if (norm.gain != NULL) {
        load_floats(norm.gain + c, gain);
        UNROLLED (e, VEC)
            gain[e] += norm.one;
    }
}

/* Threads of a block that takes rows of d channels, vec at a time. */
static inline unsigned mhc_threads(int64_t d, int vec)
{
    return (unsigned)min_i64(MHC_THREADS, round_up(max_i64(ceil_div(d, vec), 1), 32));
}
/* Backward kernels give each block a fixed run of rows; the number of blocks depends on shapes alone. */
static inline int64_t mhc_rows_per_block(int64_t rows, int64_t d, enum dtype real)
{
    int64_t threads = mhc_threads(d, 16 / (int)dtype_bytes(real));
    return max_i64(ceil_div(rows, 512 * MHC_THREADS / threads), 4);
}
static inline int64_t mhc_row_blocks(int64_t rows, int64_t d, enum dtype real)
{
    return ceil_div(rows, mhc_rows_per_block(rows, d, real));
}
static inline bool whole_vectors(int64_t d, enum dtype real) { return d % (16 / (int64_t)dtype_bytes(real)) == 0; }

/* The next part of a work tensor; with base NULL only the bytes are counted. */
struct carve {
    char *base;
    int64_t used;
};
static inline void *carve_bytes(struct carve *c, int64_t bytes)
{
    void *p = c->base == NULL ? NULL : c->base + c->used;
    c->used += round_up(bytes, 256);
    return p;
}
static inline float *carve_floats(struct carve *c, int64_t n)
{
    return (float *)carve_bytes(c, n * (int64_t)sizeof(float));
}

/* ---- row kernels: mhc_mix.cu, mhc_mix_bwd.cu ------------------------------------------------- */

/* sum + post f, dropped: spelled out, and so is the sum of the mix, so that all combine kernels give the same bits. */
template <bool DROP> INLINE float add_dropped(float sum, float post, float f, float factor)
{
    return DROP ? fmaf(__fmul_rn(post, f), factor, sum) : fmaf(post, f, sum);
}

/* y = mix of x plus post f; rho = root mean square of the stored y, if wanted. f absent: only rho, of x. */
struct combine_args {
    struct view x, f, y, post, res, rho;
    const float *bias;
    int64_t rows, d;
    struct rule_args rule;
    struct drop_rule drop;
};
int mhc_combine_rows(struct lane *l, const struct combine_args *a, enum dtype real, bool aligned);

/* Weights of the streams of a row: given, or learned gates of their projections m, or all the same. */
struct weight_args {
    struct view pre, m, rstd;
    const float *scale, *base;
    float eps, same;
};
/* out = sum of weighted streams; norm: times 1 / rms and gain. */
struct aggregate_args {
    struct view x, out, rstd;
    struct weight_args weight;
    int64_t rows, d;
    struct norm_args norm;
    float eps;
    int n;
    bool normed, given; /* given: rstd is an input */
    bool equal;         /* x is every stream */
};
int mhc_aggregate_rows(struct lane *l, const struct aggregate_args *a, enum dtype real, bool aligned);
/* out = mean of the streams of x; and back: every stream of out (+)= one / n. */
int mhc_mean(struct lane *l, const struct tensor *x, const struct tensor *out);
int mhc_expand_mean(struct lane *l, const struct tensor *one, const struct tensor *out, bool add);
/* dots[i] = <one, streams[i]> of each row. */
int mhc_stream_dots(struct lane *l, const struct tensor *one, const struct tensor *streams, float *dots,
                    int64_t stride);

/* Back through norm and aggregate as far as sums over channels go: dpre [rows, n]; m [rows], with which
 * da = rstd (u - a m), u = dh gain. dgain: partial sums [blocks, d] or NULL. */
struct norm_bwd_args {
    struct view dh, y, pre, rstd;
    float *dpre, *m, *dgain;
    int64_t rows, rows_per_block, d;
    struct norm_args norm;
    int n;
};
int mhc_norm_bwd_rows(struct lane *l, const struct norm_bwd_args *a, enum dtype real, bool aligned);

/* The gradient g of the stream, then back through combine. opens: g = dy + pre da + gw + row_scale y, else g = dy.
 * closes: dx = mix^T g and the rest, else dx = g. */
struct mix_bwd_args {
    struct view dy, dx, dh, y, gw, x, f, df;             /* dy may be absent */
    struct view pre, rstd, post, res, dpre, dpost, dres; /* dpre: zeros, if not absent */
    const float *m, *row_scale, *bias;
    struct norm_args norm;
    float *dbias;   /* partial sums [blocks, d] or NULL */
    bool sums_here; /* those of a block in its shared memory until its end: the launch has given it d floats */
    int64_t first_row, rows, rows_per_block, d; /* rows: the end */
    struct rule_args rule;
    bool opens, closes;
    struct drop_rule drop;
};
int mhc_mix_bwd_rows(struct lane *l, const struct mix_bwd_args *a, enum dtype real, bool aligned);

/* ---- Hopper's large passes: mhc_cluster.cu, mhc_pass_bwd.cu ---------------------------------- */

/* What mhc_path_of asks for; and its choice on this device, an error where there is none. */
struct mhc_shape mhc_shape_of(const struct mhc_rule *r, const struct tensor *stream, bool aligned, bool closes);
int mhc_path_on(struct lane *l, const struct mhc_shape *s, struct mhc_choice *out);
/* The coefficients' part of the boundary's backward pass, without what it leaves beside dz and dp. */
struct coef_bwd_args mhc_boundary_coef_bwd(const struct mhc_boundary_bwd_args *b, float *dpre, float *dp);
/* All of the boundary forward in one pass. */
int64_t mhc_boundary_cluster_bytes(int64_t rows, int64_t d);
int mhc_boundary_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work);
/* Everything but h, for any number of channels. */
int mhc_boundary_ring(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work);
/* All of the backward pass, without dbias. */
int64_t mhc_boundary_bwd_pass_bytes(const struct mhc_boundary_bwd_args *b);
/* What of it can be made before dh is known, to b->ready. */
int mhc_boundary_bwd_pass_ready(struct lane *l, const struct mhc_boundary_bwd_args *b);
int64_t mhc_boundary_bwd_pass_ready_bytes(const struct mhc_boundary_bwd_args *b);
int mhc_boundary_bwd_pass(struct lane *l, const struct mhc_boundary_bwd_args *b, void *work);

/* The same for a boundary that only contracts by learned gates (mhc_final.cu): its 1 / (rho + MHC_EPS) is contract's
 * rstd, and eps is added to gates. */
int mhc_final_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work);
/* m and rstd of contract's learned gates; of y only the width counts. */
int mhc_contract_gates(struct lane *l, const struct mhc_contract_fwd_args *c);

/* ---- the boundary that enters: mhc_first.cu -------------------------------------------------- */

int64_t mhc_first_fwd_bytes(const struct mhc_boundary_fwd_args *b);
int mhc_first_fwd(struct lane *l, const struct mhc_boundary_fwd_args *b);
int64_t mhc_first_bwd_bytes(const struct mhc_boundary_bwd_args *b);
int mhc_first_bwd(struct lane *l, const struct mhc_boundary_bwd_args *b);

/* ---- products: mhc_project.cu ---------------------------------------------------------------- */

/* Products of bf16 streams with fp32 matrices: the matrix is split into bf16 halves, high + low, so that tensor cores
 * give 16 bits of its fraction. Rows are padded to a multiple of 8 with zeros, columns by unused ones. */
static inline int64_t split_rows(int64_t n) { return round_up(n, 8); }
static inline int64_t split_stride(int64_t k) { return round_up(k, 8); }
/* out: `parts` times split_rows(n) rows; parts 2: high, low; 3: high, high, low. */
int mhc_split_matrix(struct lane *l, const struct tensor *w, bf16 *out, int parts);

/* dw [n, k] (+)= dp^T y, dp [rows, n] fp32, times alpha / (rho + eps) by group if rho is given. */
struct outer_args {
    struct view dp, rho;
    const float *alpha[3];
    int streams;
    struct tensor y, dw;
    bool acc;
};
int64_t mhc_outer_bytes(int64_t rows, int64_t n, int64_t k, enum dtype real);
int mhc_outer(struct lane *l, const struct outer_args *a, void *work);

/* ---- coefficients: mhc_coef.cu --------------------------------------------------------------- */

struct coef_args {      /* gates and Sinkhorn of all rows */
    struct view p, low; /* low: absent, or added to p */
    struct view p_to;   /* where p is copied to; may be absent */
    struct view rho, pre, post, res;
    struct gate_params by;
    int64_t rows;
    struct rule_args rule;
    bool sinkhorn;
};
int mhc_coefficients(struct lane *l, const struct coef_args *a);
/* Scratch of the boundary, without the place of the products. */
struct coef_args mhc_boundary_coef(const struct mhc_boundary_fwd_args *b);

/* Back through Sinkhorn (sinkhorn true: dres is the gradient of its result, else of the logits) and gates. Absent
 * gradients are NULL. dpre and dpre2 add up. Outputs that are NULL are left out. */
struct coef_bwd_args {
    struct view p, rho, dpre, dpre2, dpost, dres, dz, dp, drho;
    struct gate_params by;
    float *row_scale; /* drho / (k (rho + root_less)) */
    bf16 *split;      /* dp as [high | low | high], each split_width wide, padded with zeros */
    int split_width;
    int64_t rows, k;
    struct rule_args rule;
    bool sinkhorn;
};
int mhc_coefficients_bwd(struct lane *l, const struct coef_bwd_args *a);

/* Sums over rows of dz (to dbeta) and dz p / (rho + eps) (to the alphas); or both to sums, for later. */
enum { MHC_PARAM_BLOCKS = 256 };
struct param_gradients {
    float *alpha[3], *beta;
    bool add;
};
template <typename A> static struct param_gradients param_gradients_of(const A *a, bool add)
{
    return {{floats(&a->da_pre), floats(&a->da_post), floats(&a->da_res)}, floats(&a->dbeta), add};
}
struct param_sum_args {
    struct view dz, p, rho;
    /* the primitive recomputes dz */
    struct view dpre, dpost, dlogits;
    struct gate_params by;
    float *partial; /* MHC_PARAM_BLOCKS x 2 x N */
    struct param_gradients to;
    float *sums; /* 2 x N or NULL */
    int64_t rows, rows_per_block;
    int n;
};
int mhc_param_sums(struct lane *l, struct param_sum_args *a);
static inline struct param_sum_args param_sums_of(const struct tensor *dz, const struct tensor *stat, int64_t streams,
                                                  float *partial)
{
    return {.dz = view_of(dz),
            .p = view_of(stat),
            .rho = view_at(stat, mhc_logits(streams)),
            .partial = partial,
            .rows = dz->dim[0],
            .n = (int)streams};
}

/* The same from the boundary's products [N + 1, k], whose last row has the sums; and dw [N, k] (+)= the rest. */
struct add_products_args {
    struct view products, dw;
    struct param_gradients to;
    int64_t k;
    int n;
    bool add_dw;
};
int mhc_add_products(struct lane *l, const struct add_products_args *a);

#endif
