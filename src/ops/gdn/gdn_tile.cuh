/* gdn on CUDA: shapes, tiles and fragments that its kernels share; private to gdn*.cu. Algebra as in gdn_chunk_int.h,
 * with q and k as they come (their lengths are row factors in fp32, so that their bf16 values stay exact) and w
 * inside the inverse:
 *   A_ij = w_i D_ij k^_i . k^_j (i > j),   T = (I + A)^-1 diag(w),   P_ij = D_ij q^_i . k^_j (i >= j)
 *   R = V - diag(e^s) K^ S,   X = T R,   O = diag(e^s) Q^ S + P X,   S' = e^(s_end) S + (diag(e^(s_end - s)) K^)^T X
 * and backwards, with E = dS':
 *   dX = P^T dO + diag(e^(s_end - s)) K^ E,   dV = T^T dX,
 *   E of the piece before = e^(s_end) E + (diag(e^s) Q^)^T dO - (diag(e^s) K^)^T dV
 *
 * Rows are taken in pieces of at most PIECE; a chunk longer than that is several. Of each piece and value head
 * `prepare` leaves T and P (block triangles in bf16; T in two parts that add to 16 bits) and the row factors. */
#ifndef BRAID_OPS_GDN_TILE_CUH
#define BRAID_OPS_GDN_TILE_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/cuda/walk.cuh"
#include "ops/gdn/gdn_mma.cuh"
#include "ops/gdn/gdn.h"

enum { MAX_WIDTH = 128, FEW_ROWS = 16 };

/* Sizes of the problem; the same for both directions. */
struct gdn_geom {
    int batch, rows, key_heads, heads, per_key, dk, dv; /* per_key: value heads of a key head */
    int chunk, per_chunk, n_chunks, n_pieces;           /* pieces of a whole chunk; of a sequence */
    float scale;                                        /* of q */
};

/* [B, S, H, D] or [B, S, H], unit stride last. */
template <typename T> struct gdn_view {
    T *data;
    int64_t b, s, h;
};
template <typename T>
__host__ __device__ __forceinline__ T *view_at(const gdn_view<T> &v, int64_t b, int64_t s, int64_t h)
{
    return v.data + b * v.b + s * v.s + h * v.h;
}
template <typename T> static inline gdn_view<T> view_of(const struct tensor *t)
{
    gdn_view<T> v = {(T *)t->data, t->stride[0], t->stride[1], t->stride[2]};
    return v;
}
/* A state per head, [B, Hv, dk, dv], or per chunk and head (s: stride of the chunk). Absent: data NULL. */
template <typename T> struct gdn_states {
    T *data;
    int64_t b, s, h, n;
};
template <typename T>
__host__ __device__ __forceinline__ T *state_at(const gdn_states<T> &v, int64_t b, int64_t s, int64_t h)
{
    return v.data + b * v.b + s * v.s + h * v.h;
}
static inline gdn_states<float> state_of(const struct tensor *t)
{
    gdn_states<float> v = {(float *)t->data, t->stride[0], 0, t->stride[1], t->stride[2]};
    return v;
}
template <typename T> static inline gdn_states<T> chunk_states_of(const struct tensor *t)
{
    gdn_states<T> v = {(T *)t->data, t->stride[0], t->stride[1], t->stride[2], t->stride[3]};
    return v;
}

/* The scalars every row of a head needs. */
template <typename T> struct gdn_gates {
    gdn_view<const T> alpha, beta;
    const float *A_log, *dt_bias;
    const int32_t *doc_start; /* or NULL */
    int64_t doc_stride;
};

struct piece {
    int first, n; /* rows */
};
__host__ __device__ __forceinline__ struct piece piece_at(const struct gdn_geom &g, int index)
{
    int part = index % g.per_chunk * PIECE, first = index / g.per_chunk * g.chunk + part;
    int n = g.chunk - part < PIECE ? g.chunk - part : PIECE;
    struct piece p = {first, g.rows - first < n ? g.rows - first : n};
    return p;
}
/* Which of [B, pieces, Hv]. */
__device__ __forceinline__ int64_t unit_of(const struct gdn_geom &g, int b, int index, int h)
{
    return ((int64_t)b * g.n_pieces + index) * g.heads + h;
}

/* ---- what prepare leaves --------------------------------------------------------------------- */

/* Blocks of a triangle as in walk.cuh: T in two parts, and P. The walk forward takes them by columns, the walk backward
 * transposed, by rows. */
enum { T_HIGH = 0, T_LOW = BLOCKS, P_AT = 2 * BLOCKS, UNIT_BLOCKS = 3 * BLOCKS };

/* Rows of PIECE floats: e^s times the factor of k, of q; e^(s_end - s) times that of k; e^(s_end) (first element);
 * then what only the gradient needs. */
enum {
    ROW_KEY,
    ROW_QUERY,
    ROW_WRITE,
    ROW_DECAY,
    SCAN_ROWS,
    ROW_START = SCAN_ROWS, /* e^s, 0 once a document has begun */
    ROW_END,               /* e^(s_end - s), 0 before the last document */
    ROW_S,
    ROW_W,
    ROW_G,
    ROW_SLOPE, /* d g / d alpha */
    ROW_KF,
    ROW_QF,  /* factors to unit length; q's with the scale */
    ROW_LOW, /* first row of the piece that this row's document shares, as a float; -1: it began before */
    UNIT_ROWS
};

/* ---- fragments ------------------------------------------------------------------------------- */

/* From a tile with rows of LD elements. A: 16 rows, 16 columns as depth. */
template <int LD> __device__ __forceinline__ void load_a(uint32_t (&a)[4], const bf16 *tile, int row, int depth)
{
    int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
    load_matrices(a, tile + (row + (m & 1) * 8 + r) * LD + depth + (m >> 1) * 8);
}
/* Two B fragments (b[0..1] and b[2..3]): rows of the tile are columns of B. */
template <int LD> __device__ __forceinline__ void load_b(uint32_t (&b)[4], const bf16 *tile, int column, int depth)
{
    int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
    load_matrices(b, tile + (column + (m >> 1) * 8 + r) * LD + depth + (m & 1) * 8);
}
/* Two B fragments: rows of the tile are depth. */
template <int LD>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], const bf16 *tile, int depth, int column)
{
    int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
    load_matrices_t(b, tile + (depth + (m & 1) * 8 + r) * LD + column + (m >> 1) * 8);
}

/* Fragments of a block M of a block triangle. B whose columns are the rows of M: */
__device__ __forceinline__ void block_b_rows(uint32_t (&b)[4], const uint32_t *block)
{
    load_matrices(b, block + threadIdx.x % 32 * 4);
}
/* where matrix m of the lane's eight starts when 1 and 2 change places */
__device__ __forceinline__ const uint32_t *block_swapped(const uint32_t *block)
{
    int lane = threadIdx.x % 32, m = lane / 8;
    return block + ((m & 1) * 2 + (m >> 1)) * 32 + lane % 8 * 4;
}
/* B = M: */
__device__ __forceinline__ void block_b(uint32_t (&b)[4], const uint32_t *block)
{
    load_matrices_t(b, block_swapped(block));
}
/* A = M: */
__device__ __forceinline__ void block_a(uint32_t (&a)[4], const uint32_t *block)
{
    load_matrices(a, block_swapped(block));
}
/* A = M^T: */
__device__ __forceinline__ void block_a_trans(uint32_t (&a)[4], const uint32_t *block)
{
    load_matrices_t(a, block + threadIdx.x % 32 * 4);
}
/* `rows` rows of up to WIDTH elements, `n` of them real with `width` elements each, the rest zeros. */
template <int WIDTH>
__device__ __forceinline__ void load_rows(bf16 *tile, const bf16 *from, int64_t stride, int n, int width, int rows)
{
    const int per_row = WIDTH / 8;
    for (int i = (int)threadIdx.x; i < rows * per_row; i += (int)blockDim.x) {
        int r = i / per_row, c = i % per_row * 8;
        bool valid = r < n && c < width;
        copy_async16(tile + r * (WIDTH + 8) + c, valid ? from + r * stride + c : from, valid);
    }
}
/* n bytes, a multiple of 16. */
__device__ __forceinline__ void load_bytes(void *to, const void *from, int n)
{
    for (int i = (int)threadIdx.x * 16; i < n; i += (int)blockDim.x * 16)
        copy_async16((char *)to + i, (const char *)from + i, true);
}

/* ---- host side ------------------------------------------------------------------------------- */

static inline struct gdn_geom geom_of(const struct tensor *k, const struct tensor *v, int64_t chunk)
{
    struct gdn_geom g = {};
    g.batch = (int)v->dim[0];
    g.rows = (int)v->dim[1];
    g.heads = (int)v->dim[2];
    g.dv = (int)v->dim[3];
    g.key_heads = (int)k->dim[2];
    g.dk = (int)k->dim[3];
    g.per_key = g.key_heads > 0 ? g.heads / g.key_heads : 0;
    g.chunk = (int)chunk;
    g.per_chunk = (int)ceil_div(chunk, PIECE);
    g.n_chunks = (int)ceil_div(g.rows, chunk);
    if (g.n_chunks > 0)
        g.n_pieces = (g.n_chunks - 1) * g.per_chunk + (int)ceil_div(g.rows - (int64_t)(g.n_chunks - 1) * chunk, PIECE);
    g.scale = g.dk > 0 ? 1.0f / sqrtf((float)g.dk) : 0.0f;
    return g;
}
/* Shapes the tensor-core kernels take; their tensors must be aligned too. */
static inline bool geom_tiles(const struct gdn_geom *g, enum dtype real)
{
    return real == DT_BF16 && g->rows > FEW_ROWS && g->batch > 0 && g->heads > 0 && g->dk > 0 && g->dv > 0 &&
           g->dk % 8 == 0 && g->dv % 8 == 0 && g->dk <= MAX_WIDTH && g->dv <= MAX_WIDTH;
}
static inline int64_t geom_units(const struct gdn_geom *g) { return (int64_t)g->batch * g->n_pieces * g->heads; }
static inline int64_t blocks_bytes(const struct gdn_geom *g) { return geom_units(g) * UNIT_BLOCKS * BLOCK_WORDS * 4; }
static inline int64_t factors_bytes(const struct gdn_geom *g) { return geom_units(g) * UNIT_ROWS * PIECE * 4; }

template <typename T, typename ARGS> static inline gdn_gates<T> gates_of(const ARGS *a)
{
    gdn_gates<T> g = {};
    gdn_view<const T> alpha = {(const T *)a->alpha.data, a->alpha.stride[0], a->alpha.stride[1], 1};
    gdn_view<const T> beta = {(const T *)a->beta.data, a->beta.stride[0], a->beta.stride[1], 1};
    g.alpha = alpha;
    g.beta = beta;
    g.A_log = (const float *)a->A_log.data;
    g.dt_bias = (const float *)a->dt_bias.data;
    g.doc_start = (const int32_t *)a->doc_start.data;
    g.doc_stride = a->doc_start.stride[0];
    return g;
}

/* T, P (transposed: for the walk backward) and row factors of every piece and value head (gdn_prepare.cu). */
int gdn_prepare(struct lane *l, const struct gdn_geom *g, gdn_view<const bf16> q, gdn_view<const bf16> k,
                const gdn_gates<bf16> *gates, uint32_t *blocks, float *factors, bool transposed);

struct gdn_scan_args {
    struct gdn_geom g;
    gdn_view<const bf16> q, k, v;
    gdn_view<bf16> o; /* NULL data: only states are wanted */
    const uint32_t *blocks;
    const float *factors;
    gdn_states<float> init, final;
    const int64_t *start;
    gdn_states<bf16> states;       /* of each chunk: written; with `given` read, where a chunk begins */
    gdn_states<bf16> piece_states; /* of each piece: written with `given` */
    bool given;
};
/* Walks the pieces in order (gdn_fwd.cu). */
int gdn_scan(struct lane *l, const struct gdn_scan_args *a);
bool gdn_scan_fits(const struct lane *l, const struct gdn_geom *g); /* in shared memory; backwards too */

struct gdn_scan_bwd_args {
    struct gdn_geom g;
    gdn_view<const bf16> q, k, d_o;
    gdn_view<bf16> dv;
    const uint32_t *blocks; /* transposed */
    const float *factors;
    gdn_states<float> dfinal, dinit;
    gdn_states<bf16> gradients; /* of each piece: E that leaves it */
};

/* Both walks by wgmma and bulk copies (gdn_scan_hopper.cu), where gdn_scan_on_hopper says so. */
bool gdn_scan_on_hopper(const struct lane *l, const struct gdn_geom *g);
int gdn_scan_hopper(struct lane *l, const struct gdn_scan_args *a);
int gdn_scan_bwd_hopper(struct lane *l, const struct gdn_scan_bwd_args *a);

/* Everything but dV and dinit, from `gradients`, the E that leaves each piece, and dV (gdn_grad.cu). */
struct gdn_grad_args {
    struct gdn_geom g;
    gdn_view<const bf16> q, k, v, d_o, dv;
    gdn_view<bf16> dq, dk, dalpha, dbeta;
    const uint32_t *blocks; /* transposed */
    const float *factors;
    gdn_states<bf16> piece_states, gradients;
    float *sums; /* [B, pieces, Hv, 2]: of dA_log, ddt_bias */
};
int gdn_grad(struct lane *l, const struct gdn_grad_args *a);
bool gdn_grad_fits(const struct lane *l, const struct gdn_geom *g); /* in shared memory */

/* dA_log and ddt_bias from sums [n, heads, 2] (gdn_bwd.cu). */
int gdn_add_sums(struct lane *l, const struct gdn_bwd_args *a, const float *sums, int64_t n, int heads);

/* Plain kernels for every shape and type (gdn_plain.cu). */
int gdn_fwd_plain(struct lane *l, const struct gdn_fwd_args *a);
int64_t gdn_fwd_plain_work(const struct gdn_geom *g);
int gdn_bwd_plain(struct lane *l, const struct gdn_bwd_args *a);
int64_t gdn_bwd_plain_work(const struct gdn_geom *g);

#endif
