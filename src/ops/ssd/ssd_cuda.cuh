/* What the CUDA files of ssd share: sizes, per-row numbers, tiles. See ssd.h for names.
 *
 * A chunk is cut into pieces of at most `pad` rows, and all matrix products are of pieces, so any chunk works. Per row
 * of a piece and head (ssd_prep writes them once): delta; s, the running sum of delta A inside the piece; from_start =
 * e^s_i, how much of the incoming state row i sees; to_end = e^(s_end - s_j), how much of row j the outgoing state
 * holds; low, the first row of the piece that this row's document shares (-1: it began before). Rows beyond the piece's
 * end have delta 0.
 *
 * Fast path: bf16, P <= SSD_P, N <= SSD_N, pieces of SSD_ROWS rows on tensor cores. All else takes the plain path
 * (pieces of SSD_PLAIN_ROWS rows, one thread per sum, fp32 between its kernels). */
#ifndef BRAID_OPS_SSD_CUDA_CUH
#define BRAID_OPS_SSD_CUDA_CUH

#include "ops/cuda/mma.cuh"
#include "ops/ssd/ssd.h"

enum { SSD_ROWS = 128, SSD_P = 64, SSD_N = 128, SSD_PLAIN_ROWS = 64, SSD_FEW_ROWS = 16 };
/* Row strides of tiles in shared memory: odd multiples of 16 bytes. */
enum { P_ROW = SSD_P + 8, N_ROW = SSD_N + 8, P_TILE = SSD_ROWS * P_ROW, N_TILE = SSD_ROWS * N_ROW };

struct ssd_shape {
    int batch, rows, heads, p, groups, n, per_group;
    int chunk, piece, per_chunk, pieces, pad;
    float dt_min, dt_max;
};

static inline bool ssd_is_fast(const struct tensor *x, const struct tensor *bm)
{
    return x->dtype == DT_BF16 && x->dim[1] >= SSD_FEW_ROWS && x->dim[2] >= 1 && x->dim[3] >= 1 && x->dim[3] <= SSD_P &&
           bm->dim[3] >= 1 && bm->dim[3] <= SSD_N;
}

static inline struct ssd_shape ssd_shape_of(const struct tensor *x, const struct tensor *bm, int64_t chunk,
                                            double dt_min, double dt_max, int pad)
{
    struct ssd_shape s;
    s.batch = (int)x->dim[0];
    s.rows = (int)x->dim[1];
    s.heads = (int)x->dim[2];
    s.p = (int)x->dim[3];
    s.groups = (int)bm->dim[2];
    s.n = (int)bm->dim[3];
    s.per_group = s.groups > 0 ? s.heads / s.groups : 0;
    s.chunk = (int)max_i64(1, min_i64(chunk, s.rows));
    s.pad = pad;
    s.per_chunk = (int)ceil_div(s.chunk, pad);
    s.piece = (int)ceil_div(s.chunk, s.per_chunk);
    int chunks = (int)ceil_div(s.rows, s.chunk), last = s.rows - (chunks - 1) * s.chunk;
    s.pieces = chunks > 0 ? (chunks - 1) * s.per_chunk + (int)ceil_div(last, s.piece) : 0;
    s.dt_min = (float)dt_min;
    s.dt_max = (float)dt_max;
    return s;
}

/* Rows [first, first + n) of piece u. */
struct span {
    int first, n;
};
__device__ __forceinline__ struct span span_of(const struct ssd_shape &s, int u)
{
    int c = u / s.per_chunk, first = c * s.chunk + u % s.per_chunk * s.piece;
    int end = min(s.rows, (c + 1) * s.chunk);
    struct span sp = {first, min(s.piece, end - first)};
    return sp;
}

/* A tensor [B, S, heads or groups, channels] or [B, S, heads]; strides in elements. */
struct rows_view {
    void *data;
    int64_t batch, row, head;
};
static inline struct rows_view rows_view_of(const struct tensor *t)
{
    struct rows_view v = {t->data, t->stride[0], t->stride[1], t->stride[2]};
    return v;
}
template <typename T> __device__ __forceinline__ T *row_of(const struct rows_view &v, int b, int t, int h)
{
    return (T *)v.data + b * v.batch + t * v.row + h * v.head;
}

/* States by batch, piece (or chunk) and head: rows of n, P columns. */
struct state_view {
    void *data; /* NULL: absent */
    int64_t batch, piece, head, row;
};
static inline struct state_view state_view_of(const struct tensor *t)
{
    struct state_view v = {NULL, 0, 0, 0, 0};
    if (present(t) && t->rank == 4) {
        struct state_view w = {t->data, t->stride[0], 0, t->stride[1], t->stride[2]};
        v = w;
    } else if (present(t)) {
        struct state_view w = {t->data, t->stride[0], t->stride[1], t->stride[2], t->stride[3]};
        v = w;
    }
    return v;
}
template <typename T> __device__ __forceinline__ T *state_of(const struct state_view &v, int b, int u, int h)
{
    return (T *)v.data + b * v.batch + u * v.piece + h * v.head;
}
/* Dense states by piece in scratch memory, rows of `width` columns. */
static inline struct state_view pieces_view(void *data, const struct ssd_shape *s, int width)
{
    int64_t one = (int64_t)s->n * width;
    struct state_view v = {data, one * s->heads * s->pieces, one * s->heads, one, width};
    return v;
}

/* Parts of the scratch tensor, each on a boundary of 256 bytes; base NULL only counts. */
struct parts {
    char *base;
    int64_t used;
};
static inline void *part(struct parts *p, int64_t bytes)
{
    int64_t at = p->used;
    p->used += round_up(bytes, 256);
    return p->base != NULL ? p->base + at : NULL;
}

/* Per-row numbers, [batch, heads, pieces, pad]; decay (of a whole piece) without pad; low [batch, pieces, pad]. */
struct ssd_rows {
    float *delta, *slope, *from_start, *to_end, *decay;
    float *s;        /* fast path: in units of log 2 */
    double *s_exact; /* plain path: differences must keep fp32's accuracy */
    int *low;
};
static inline int64_t ssd_row_count(const struct ssd_shape *s)
{
    return (int64_t)s->batch * s->heads * s->pieces * s->pad;
}
static inline struct ssd_rows ssd_rows_take(struct parts *at, const struct ssd_shape *s, bool exact)
{
    int64_t bytes = ssd_row_count(s) * (int64_t)sizeof(float);
    struct ssd_rows r;
    r.delta = (float *)part(at, bytes);
    r.slope = (float *)part(at, bytes);
    r.from_start = (float *)part(at, bytes);
    r.to_end = (float *)part(at, bytes);
    r.decay = (float *)part(at, bytes / s->pad);
    r.s = exact ? NULL : (float *)part(at, bytes);
    r.s_exact = exact ? (double *)part(at, 2 * bytes) : NULL;
    r.low = (int *)part(at, (int64_t)s->batch * s->pieces * s->pad * (int64_t)sizeof(int));
    return r;
}
__device__ __forceinline__ int64_t rows_at(const struct ssd_shape &s, int b, int u, int h)
{
    return (((int64_t)b * s.heads + h) * s.pieces + u) * s.pad;
}

/* A tile of SSD_ROWS rows and WIDTH columns into shared memory, zeros beyond `rows` and `cols`. By asynchronous copies
 * where vec allows (then cols is a multiple of 8), which the caller commits. */
template <int WIDTH, int THREADS>
__device__ __forceinline__ void load_tile(bf16 *tile, const bf16 *from, int64_t stride, int rows, int cols, bool vec)
{
    constexpr int PACKS = WIDTH / 8, STEP = THREADS / PACKS;
    static_assert(THREADS % PACKS == 0 && SSD_ROWS % STEP == 0, "whole rows in a round");
    if (vec) {
        int r = threadIdx.x / PACKS, c = threadIdx.x % PACKS * 8;
        const bf16 *p = from + r * stride + c;
        bf16 *to = tile + r * (WIDTH + 8) + c;
#pragma unroll
        for (int k = 0; k < SSD_ROWS / STEP; k++) {
            bool valid = r + k * STEP < rows && c < cols;
            copy_async16(to + k * STEP * (WIDTH + 8), valid ? p : from, valid);
            p += STEP * stride;
        }
        return;
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < SSD_ROWS * WIDTH; at += THREADS) {
        int r = at / WIDTH, c = at % WIDTH;
        tile[r * (WIDTH + 8) + c] = r < rows && c < cols ? from[r * stride + c] : from_float<bf16>(0.0f);
    }
}
/* `pad` per-row numbers (SSD_ROWS of them), by the threads first .. first + 31. */
template <typename T> __device__ __forceinline__ void load_numbers(T *to, const T *from, int first)
{
    int k = (int)threadIdx.x - first;
    if (k >= 0 && k < SSD_ROWS / 4)
        copy_async16(to + 4 * k, from + 4 * k, true);
}

/* Rounds the warp's 16 rows of sums to bf16 and stores them. upper and lower are rows g and g+8 of the lane (NULL: no
 * such row). Neighbouring lanes exchange halves so that a store is 8 bytes and four lanes fill 32. */
template <int TILES>
__device__ __forceinline__ void store_rows(const float (*acc)[4], bf16 *upper, bf16 *lower, int cols, bool vec)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < TILES; k += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bf16 *row = half == 0 ? upper : lower;
            uint32_t v0 = pack_bf16(acc[k][2 * half], acc[k][2 * half + 1]);
            uint32_t v1 = pack_bf16(acc[k + 1][2 * half], acc[k + 1][2 * half + 1]);
            if (vec) {
                uint32_t other = __shfl_xor_sync(0xffffffffu, t % 2 ? v0 : v1, 1);
                int c = (k + t % 2) * 8 + t / 2 * 4;
                if (row != NULL && c < cols)
                    *(uint2 *)(row + c) = t % 2 ? make_uint2(other, v1) : make_uint2(v0, other);
            } else if (row != NULL) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int c = (k + e / 2) * 8 + 2 * t + e % 2;
                    uint32_t v = e / 2 ? v1 : v0;
                    if (c < cols)
                        row[c] = __ushort_as_bfloat16((unsigned short)(e % 2 ? v >> 16 : v & 0xffffu));
                }
            }
        }
}

/* The sum over the four lanes that share a row. */
__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
/* Tiles of 16 rows by warp, so that the warps of one scheduler (w and w + 4) share the work of a triangle evenly. */
__device__ __forceinline__ int triangle_tile(int warp) { return warp < 4 ? warp : 11 - warp; }

/* ---- ssd_scan.cu ----------------------------------------------------------------------------- */

struct ssd_inputs {
    const struct tensor *dt, *A_log, *dt_bias, *doc_start;
};
int ssd_prep(struct lane *l, const struct ssd_shape *s, const struct ssd_inputs *in, const struct ssd_rows *r);

/* The running state over the pieces of a sequence, in fp32. Forward: S <- decay S + sum_j delta_j to_end_j v_j u_j^T
 * with u = x, v = B. Reverse, from the last piece: E <- decay E + sum_i from_start_i v_i u_i^T with u = dy, v = C. */
struct ssd_scan_args {
    struct ssd_shape s;
    struct ssd_rows r;
    struct rows_view u, v;
    struct state_view first;    /* fp32, optional: where it begins */
    const int64_t *start;       /* optional: 0 there counts as no `first` */
    struct state_view given;    /* bf16, by chunk, optional: what the state is at the chunk's first piece */
    struct state_view by_piece; /* bf16: the state before each piece is added, */
    int piece_cols;             /* and how many columns its rows take */
    bool piece_vec;
    struct state_view by_chunk; /* bf16, optional: of the first piece of each chunk */
    struct state_view last;     /* fp32, optional: where it ends */
    bool vec;
};
int ssd_scan(struct lane *l, const struct ssd_scan_args *a, bool reverse);

/* ---- ssd_scan_hopper.cu ---------------------------------------------------------------------- */

/* The reverse scan with v = cm, where ssd_scan_on_hopper says so. */
bool ssd_scan_on_hopper(const struct lane *l, const struct ssd_scan_args *a);
int ssd_scan_hopper(struct lane *l, const struct ssd_scan_args *a, const struct tensor *cm);

/* ---- ssd_fwd_hopper.cu ----------------------------------------------------------------------- */

bool ssd_fwd_on_hopper(const struct lane *l, const struct ssd_fwd_args *a);
int64_t ssd_fwd_hopper_work(const struct ssd_fwd_args *a);
int ssd_fwd_hopper(struct lane *l, const struct ssd_fwd_args *a);

/* ---- ssd_plain.cu ---------------------------------------------------------------------------- */

int64_t ssd_plain_fwd_work(const struct ssd_fwd_args *a);
int64_t ssd_plain_bwd_work(const struct ssd_bwd_args *a);
int ssd_plain_fwd(struct lane *l, const struct ssd_fwd_args *a);
int ssd_plain_bwd(struct lane *l, const struct ssd_bwd_args *a);

/* dA_log, ddt_bias, dD from sums by [batch, pieces, heads], in order (ssd_sums.cu). */
struct ssd_sums {
    float *a_log, *dt_bias, *d;
};
static inline struct ssd_sums ssd_sums_take(struct parts *at, const struct ssd_shape *s)
{
    int64_t bytes = (int64_t)s->batch * s->pieces * s->heads * (int64_t)sizeof(float);
    struct ssd_sums m;
    m.a_log = (float *)part(at, bytes);
    m.dt_bias = (float *)part(at, bytes);
    m.d = (float *)part(at, bytes);
    return m;
}
int ssd_add_sums(struct lane *l, const struct ssd_shape *s, const struct ssd_sums *m, const struct ssd_bwd_args *a);

/* ---- fast backward: ssd_bwd.cu calls ssd_dx.cu, then ssd_dbc.cu ---------------------------------
 * L_ij = e^(s_i - s_j), G_ij = C_i . B_j, M_ij = dy_i . x_j; S enters the piece, E is the gradient of what leaves it.
 *   w_j    = sum_(i>=j) G_ij L_ij dy_i + to_end_j E^T B_j       dx_j = delta_j w_j + D dy_j
 *   dG_ij  = L_ij delta_j M_ij, summed over the heads of a block before it meets B and C
 *   dC_i   = from_start_i S dy_i + sum_j dG_ij B_j              pass_i   = from_start_i C_i . S dy_i
 *   dB_j   = delta_j to_end_j E x_j + sum_i dG_ij C_i           inject_j = delta_j to_end_j B_j . E x_j
 *   da_k   = sum_(i>=k, j<k) dG_ij G_ij + sum_(i>=k) pass_i + sum_(j<k) inject_j + decay <E, S>
 * The double sum is a running one, from the last row, of (row sums - column sums) of the same fp32 products, so what
 * cancels there cancels exactly. */

struct ssd_grads {
    struct ssd_shape s;
    struct ssd_rows r;
    struct rows_view x, dy, bm, cm, dx, ddt, db, dc;
    struct state_view states, e; /* bf16, by piece */
    int state_cols;
    bool state_vec, vec;
    const float *A_log, *d;
    int blocks; /* of SSD_HEADS heads in a group */
    bf16 *dg;   /* [batch, pieces, groups, blocks, SSD_ROWS, SSD_ROWS]: dG of a block of heads, transposed */
    /* As delta of ssd_rows: w_j . x_j by what is inside the piece, row sums less column sums, pass, and w_j . x_j by
     * what leaves it, which is inject / delta. */
    float *wx, *diff, *pass, *wx_leaving;
    float *through; /* decay <E, S>: [batch, pieces, heads] */
    struct ssd_sums sums;
};
int ssd_dx(struct lane *l, const struct ssd_grads *g);
int ssd_dbc(struct lane *l, const struct ssd_grads *g);

#endif
