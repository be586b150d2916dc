/* gatednorm, CUDA version; see gatednorm.h.
 *
 * Fast path, groups of 4 to 256 vectors of 16 bytes (a power of two): neighbouring threads take neighbouring vectors,
 * so a group is a team of threads and its sums stay in a warp or in a few. A block covers 256 vectors of a row, or
 * several short rows side by side. Backward, it walks down a fixed run of rows with the sums of dw in registers; at the
 * end those of rows side by side, and of all groups where they share gains, meet in shared memory, and
 * ops/cuda/sums.cuh adds the blocks. Other shapes take the plain kernels, a block a run of rows. */
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
#include "ops/gatednorm/gatednorm.h"

enum { THREADS = 256 };

struct gatednorm {
    struct tensor x, z, y, dy, dx, dz;
    const float *w;
    float *rstd, *dw; /* dw: partial sums [blocks, n_w] */
    int64_t rows, d, group, n_w, rstd_stride, rows_per_block;
    float eps, one;
};

/* How a block lies on the tensor: `across` vectors of `beside` rows; `tiles` blocks cover a row. */
struct layout {
    int across, beside, tiles;
};
static __host__ __device__ __forceinline__ struct layout layout_of(int64_t d, int v)
{
    struct layout l;
    int64_t vectors = d / v;
    l.across = vectors < THREADS ? (int)(vectors > 0 ? vectors : 1) : THREADS;
    l.beside = THREADS / l.across;
    l.tiles = (int)((vectors + THREADS - 1) / THREADS);
    return l;
}

/* silu(z) and its slope. */
static __device__ __forceinline__ float silu(float z, float *slope)
{
    float s = quick_sigmoid(z);
    *slope = s * (1 + z * (1 - s));
    return z * s;
}

/* TT threads a group. R rows at a time, so that their loads overlap. */
template <typename T, int TT, bool NORM_FIRST>
static __global__ void __launch_bounds__(THREADS) gatednorm_fwd_tiles(const __grid_constant__ struct gatednorm a)
{
    constexpr int V = pack<T>::N, R = 2;
    __shared__ float scratch[THREADS / 32 * R];
    struct layout l = layout_of(a.d, V);
    int side = threadIdx.x / l.across;
    int64_t at = ((int64_t)(blockIdx.x % l.tiles) * THREADS + threadIdx.x % l.across) * V,
            first = (int64_t)(blockIdx.x / l.tiles) * (l.beside * R) + side;
    bool mine = at < a.d && side < l.beside;
    uint4 raw_x[R], raw_z[R];
#pragma unroll
    for (int j = 0; j < R; j++) {
        int64_t row = first + j * l.beside;
        bool live = mine && row < a.rows;
        raw_x[j] = live ? load_raw(row2<T>(a.x, row) + at) : zero_raw();
        raw_z[j] = live ? load_raw(row2<T>(a.z, row) + at) : zero_raw();
    }
    float gain[V] = {}, sum[R];
    if (mine)
        load_floats(a.w + at % a.n_w, gain);
#pragma unroll
    for (int j = 0; j < R; j++) {
        float x[V], z[V], slope;
        unpack<T>(raw_x[j], x);
        unpack<T>(raw_z[j], z);
        sum[j] = 0;
#pragma unroll
        for (int e = 0; e < V; e++) {
            float v = NORM_FIRST ? x[e] : x[e] * silu(z[e], &slope);
            sum[j] += v * v;
        }
    }
    team_sum<TT, R>(sum, scratch);
#pragma unroll
    for (int j = 0; j < R; j++) {
        int64_t row = first + j * l.beside;
        float x[V], z[V], slope, rstd = rsqrtf(sum[j] / (float)a.group + a.eps);
        if (!mine || row >= a.rows)
            continue;
        unpack<T>(raw_x[j], x);
        unpack<T>(raw_z[j], z);
#pragma unroll
        for (int e = 0; e < V; e++)
            x[e] *= silu(z[e], &slope) * rstd * (gain[e] + a.one);
        store_floats(row2<T>(a.y, row) + at, x);
        if (threadIdx.x % TT == 0)
            a.rstd[row * a.rstd_stride + at / a.group] = rstd;
    }
}

/* Gradients of one element; returns the contribution to dw. pull: rstd^3 / group times the sum of
 * u times the normed. */
template <bool NORM_FIRST>
static __device__ __forceinline__ float one_bwd(float dy, float x, float z, float gain, float rstd, float pull,
                                                float *dx, float *dz)
{
    float slope, gate = silu(z, &slope);
    if (NORM_FIRST) {
        *dx = rstd * dy * gate * gain - x * pull;
        *dz = dy * x * rstd * gain * slope;
        return dy * gate * x * rstd;
    }
    float v = x * gate, dv = rstd * dy * gain - v * pull;
    *dx = dv * gate;
    *dz = dv * x * slope;
    return dy * v * rstd;
}

template <typename T, int TT, bool NORM_FIRST>
static __global__ void __launch_bounds__(THREADS, 2) gatednorm_bwd_tiles(const __grid_constant__ struct gatednorm a)
{
    constexpr int V = pack<T>::N, R = 2;
    __shared__ float scratch[2][THREADS / 32 * R], shared[THREADS * V];
    struct layout l = layout_of(a.d, V);
    int side = threadIdx.x / l.across, tile = blockIdx.x % l.tiles;
    int64_t at = ((int64_t)tile * THREADS + threadIdx.x % l.across) * V, run = blockIdx.x / l.tiles;
    int64_t first = run * a.rows_per_block, end = min(a.rows, first + a.rows_per_block);
    bool mine = at < a.d && side < l.beside;
    float gain[V] = {}, acc[V] = {};
    if (mine) {
        load_floats(a.w + at % a.n_w, gain);
#pragma unroll
        for (int e = 0; e < V; e++)
            gain[e] += a.one;
    }
    int turn = 0;
    for (int64_t base = first; base < end; base += l.beside * R) {
        uint4 raw_dy[R], raw_x[R], raw_z[R];
        float rstd[R], dot[R];
#pragma unroll
        for (int j = 0; j < R; j++) {
            int64_t row = base + j * l.beside + side;
            bool live = mine && row < end;
            raw_dy[j] = live ? load_raw(row2<T>(a.dy, row) + at) : zero_raw();
            raw_x[j] = live ? load_raw(row2<T>(a.x, row) + at) : zero_raw();
            raw_z[j] = live ? load_raw(row2<T>(a.z, row) + at) : zero_raw();
            rstd[j] = live ? a.rstd[row * a.rstd_stride + at / a.group] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < R; j++) {
            float dy[V], x[V], z[V], slope;
            unpack<T>(raw_dy[j], dy);
            unpack<T>(raw_x[j], x);
            unpack<T>(raw_z[j], z);
            dot[j] = 0; /* either way u times what is normed is dy gain x silu(z) */
#pragma unroll
            for (int e = 0; e < V; e++)
                dot[j] += dy[e] * gain[e] * x[e] * silu(z[e], &slope);
        }
        team_sum<TT, R, false>(dot, scratch[turn ^= 1]);
#pragma unroll
        for (int j = 0; j < R; j++) {
            int64_t row = base + j * l.beside + side;
            float dy[V], x[V], z[V], pull = rstd[j] * rstd[j] * rstd[j] * dot[j] / (float)a.group;
            unpack<T>(raw_dy[j], dy);
            unpack<T>(raw_x[j], x);
            unpack<T>(raw_z[j], z);
#pragma unroll
            for (int e = 0; e < V; e++)
                acc[e] += one_bwd<NORM_FIRST>(dy[e], x[e], z[e], gain[e], rstd[j], pull, &x[e], &z[e]);
            if (mine && row < end) {
                store_floats(row2<T>(a.dx, row) + at, x);
                store_floats(row2<T>(a.dz, row) + at, z);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < V; e++)
        shared[e * THREADS + threadIdx.x] = acc[e]; /* threads without a column hold zeros */
    __syncthreads();
    bool together = a.n_w != a.d; /* groups share their gains */
    int step = together ? TT : l.across, n = together ? THREADS / TT : l.beside;
    if ((int)threadIdx.x >= step || !mine)
        return;
    float sum[V] = {};
    for (int k = 0; k < n; k++)
#pragma unroll
        for (int e = 0; e < V; e++)
            sum[e] += shared[e * THREADS + k * step + threadIdx.x];
    store_floats(a.dw + (together ? (int64_t)blockIdx.x * a.n_w + threadIdx.x * V : run * a.n_w + at), sum);
}

/* ---- any shape ------------------------------------------------------------------------------- */

template <typename T, bool NORM_FIRST>
static __global__ void __launch_bounds__(THREADS) gatednorm_fwd_plain(const __grid_constant__ struct gatednorm a)
{
    __shared__ float scratch[THREADS / 32];
    int64_t groups = a.d / a.group, row = blockIdx.x / groups, k = blockIdx.x % groups;
    const T *x = row2<T>(a.x, row), *z = row2<T>(a.z, row);
    T *y = row2<T>(a.y, row);
    float sum = 0, slope;
    for (int64_t c = k * a.group + threadIdx.x; c < (k + 1) * a.group; c += THREADS) {
        float v = to_float(x[c]) * (NORM_FIRST ? 1.0f : silu(to_float(z[c]), &slope));
        sum += v * v;
    }
    float rstd = rsqrtf(block_sum<THREADS>(sum, scratch) / (float)a.group + a.eps);
    if (threadIdx.x == 0)
        a.rstd[row * a.rstd_stride + k] = rstd;
    for (int64_t c = k * a.group + threadIdx.x; c < (k + 1) * a.group; c += THREADS)
        y[c] = from_float<T>(to_float(x[c]) * silu(to_float(z[c]), &slope) * rstd * (a.w[c % a.n_w] + a.one));
}

template <typename T, bool NORM_FIRST>
static __global__ void __launch_bounds__(THREADS) gatednorm_bwd_plain(const __grid_constant__ struct gatednorm a)
{
    __shared__ float scratch[THREADS / 32];
    int64_t first = blockIdx.x * a.rows_per_block, end = min(a.rows, first + a.rows_per_block);
    float *dw = a.dw + blockIdx.x * a.n_w;
    /* Column c belongs to thread (c % group) % THREADS throughout, so its sum has one owner. */
    for (int64_t c = 0; c < a.n_w; c += a.group)
        for (int64_t i = threadIdx.x; i < a.group; i += THREADS)
            dw[c + i] = 0;
    for (int64_t row = first; row < end; row++) {
        const T *dy = row2<T>(a.dy, row), *x = row2<T>(a.x, row), *z = row2<T>(a.z, row);
        T *dx = row2<T>(a.dx, row), *dz = row2<T>(a.dz, row);
        for (int64_t k = 0; k < a.d / a.group; k++) {
            float dot = 0, slope, rstd = a.rstd[row * a.rstd_stride + k];
            for (int64_t c = k * a.group + threadIdx.x; c < (k + 1) * a.group; c += THREADS)
                dot += to_float(dy[c]) * (a.w[c % a.n_w] + a.one) * to_float(x[c]) * silu(to_float(z[c]), &slope);
            dot = block_sum<THREADS>(dot, scratch);
            float pull = rstd * rstd * rstd * dot / (float)a.group, out_x, out_z;
            for (int64_t c = k * a.group + threadIdx.x; c < (k + 1) * a.group; c += THREADS) {
                dw[c % a.n_w] += one_bwd<NORM_FIRST>(to_float(dy[c]), to_float(x[c]), to_float(z[c]),
                                                     a.w[c % a.n_w] + a.one, rstd, pull, &out_x, &out_z);
                dx[c] = from_float<T>(out_x);
                dz[c] = from_float<T>(out_z);
            }
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static int64_t vector_of(enum dtype t) { return 16 / (int64_t)dtype_bytes(t); }

/* Runs of rows of the backward: by shape alone. */
static int64_t rows_per_block(const struct tensor *x)
{
    struct layout l = layout_of(x->dim[1], (int)vector_of(x->dtype));
    return round_up(max_i64(ceil_div(x->dim[0] * max_i64(l.tiles, 1), 256), 16), 4);
}
static int64_t runs_of(const struct tensor *x) { return ceil_div(x->dim[0], rows_per_block(x)); }

/* Threads of a group, or 0 where teams do not fit. */
static int team_of(const struct gatednorm *a, int v)
{
    const struct tensor *all[] = {&a->x, &a->z, &a->y, &a->dy, &a->dx, &a->dz};
    bool fit = a->d > 0 && a->group % v == 0 && pointer16(a->w) && pointer16(a->dw);
    for (int k = 0; k < countof(all); k++)
        fit = fit && absent_or_aligned16(all[k]);
    int64_t team = a->group / v;
    return fit && team >= 4 && team <= THREADS && (team & (team - 1)) == 0 ? (int)team : 0;
}

template <typename T, int TT, bool NORM_FIRST> static int launch_tiles(struct lane *l, const struct gatednorm *a)
{
    struct layout at = layout_of(a->d, pack<T>::N);
    if (a->dw != NULL)
        LAUNCH(l, (gatednorm_bwd_tiles<T, TT, NORM_FIRST>), (unsigned)(runs_of(&a->x) * at.tiles), THREADS, 0, *a);
    else
        LAUNCH(l, (gatednorm_fwd_tiles<T, TT, NORM_FIRST>), (unsigned)(ceil_div(a->rows, 2 * at.beside) * at.tiles),
               THREADS, 0, *a);
    return ST_OK;
}

template <typename T, bool NORM_FIRST> static int run_order(struct lane *l, const struct gatednorm *a)
{
    switch (team_of(a, pack<T>::N)) {
    case 4: return launch_tiles<T, 4, NORM_FIRST>(l, a);
    case 8: return launch_tiles<T, 8, NORM_FIRST>(l, a);
    case 16: return launch_tiles<T, 16, NORM_FIRST>(l, a);
    case 32: return launch_tiles<T, 32, NORM_FIRST>(l, a);
    case 64: return launch_tiles<T, 64, NORM_FIRST>(l, a);
    case 128: return launch_tiles<T, 128, NORM_FIRST>(l, a);
    case 256: return launch_tiles<T, 256, NORM_FIRST>(l, a);
    default: break;
    }
    if (a->dw != NULL)
        LAUNCH(l, (gatednorm_bwd_plain<T, NORM_FIRST>), (unsigned)runs_of(&a->x), THREADS, 0, *a);
    else
        LAUNCH(l, (gatednorm_fwd_plain<T, NORM_FIRST>), (unsigned)(a->rows * (a->d / a->group)), THREADS, 0, *a);
    return ST_OK;
}

static int run(struct lane *l, const struct gatednorm *a, bool norm_first)
{
    if (a->x.dtype == DT_BF16)
        return norm_first ? run_order<bf16, true>(l, a) : run_order<bf16, false>(l, a);
    return norm_first ? run_order<float, true>(l, a) : run_order<float, false>(l, a);
}

extern "C" int gatednorm_fwd_cuda(struct lane *l, const struct gatednorm_fwd_args *a)
{
    TRY(gatednorm_fwd_check(a, l->err));
    struct gatednorm n = {};
    n.x = a->x;
    n.z = a->z;
    n.y = a->y;
    n.w = (const float *)a->w.data;
    n.rstd = (float *)a->rstd.data;
    n.rstd_stride = a->rstd.stride[0];
    n.rows = a->x.dim[0];
    n.d = a->x.dim[1];
    n.group = a->group;
    n.n_w = max_i64(a->w.dim[0], 1);
    n.eps = (float)a->eps;
    n.one = a->zero_centered ? 1.0f : 0.0f;
    return run(l, &n, a->norm_first);
}

/* Blocks whose partial sums the backward leaves: the tiles of a row count apart where they share gains. */
static int64_t partials_of(const struct gatednorm_bwd_args *a)
{
    bool together = a->w.dim[0] != a->x.dim[1];
    return runs_of(&a->x) * (together ? max_i64(layout_of(a->x.dim[1], (int)vector_of(a->x.dtype)).tiles, 1) : 1);
}

extern "C" int64_t gatednorm_bwd_work_cuda(const struct gatednorm_bwd_args *a)
{
    return partials_of(a) * a->w.dim[0] * (int64_t)sizeof(float);
}

extern "C" int gatednorm_bwd_cuda(struct lane *l, const struct gatednorm_bwd_args *a)
{
    TRY(gatednorm_bwd_check(a, l->err));
    TRY(check_work("gatednorm_bwd", &a->work, gatednorm_bwd_work_cuda(a), l->err));
    struct gatednorm n = {};
    n.x = a->x;
    n.z = a->z;
    n.dy = a->dy;
    n.dx = a->dx;
    n.dz = a->dz;
    n.w = (const float *)a->w.data;
    n.rstd = (float *)a->rstd.data;
    n.rstd_stride = a->rstd.stride[0];
    n.dw = (float *)a->work.data;
    n.rows = a->x.dim[0];
    n.d = a->x.dim[1];
    n.group = a->group;
    n.n_w = max_i64(a->w.dim[0], 1);
    n.rows_per_block = rows_per_block(&a->x);
    n.one = a->zero_centered ? 1.0f : 0.0f;
    int64_t partials = team_of(&n, (int)vector_of(a->x.dtype)) > 0 ? partials_of(a) : runs_of(&a->x);
    if (n.rows > 0 && n.d > 0)
        TRY(run(l, &n, a->norm_first));
    return add_partials(l, n.dw, partials, a->w.dim[0], (float *)a->dw.data, a->w.dim[0], 0, a->acc_dw);
}
