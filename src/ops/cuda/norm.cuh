/* Root-mean-square norms with and without the residual add in front: the kernels of ops/rmsnorm and ops/addnorm.
 *
 * T is the type of what layers read and write, S that of the residual stream: the same, or float beside bf16.
 * Forward, 16-byte vectors of T: a team of 32 to 512 threads holds a row in registers, so every tensor is touched once.
 * Two vectors a thread and many threads keep the memory busier than the other way round.
 * The sum s is rounded to S before it is normed: the backward, and a replay from the kept stream, see the same numbers.
 * Backward: a block owns a fixed run of rows; a thread owns one vector of columns of them, and with it the partial sums
 * of dw and dbias in registers; sums.cuh adds those of all blocks. Rows that are not aligned, or longer than the teams
 * can hold, take the plain kernels at the end. */
#ifndef BRAID_OPS_CUDA_NORM_CUH
#define BRAID_OPS_CUDA_NORM_CUH

#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"

struct norm_fwd {
    struct tensor x, f, s, y; /* x, s of type S, f, y of type T; f, s, y may be absent */
    const float *w, *bias;
    float *rstd;
    int64_t rows, d;
    float eps, one; /* one: 1 if gains are 1 + w */
    struct drop_rule drop;
};

template <typename T, typename S, int TT, int K, bool DROP>
static __global__ void __launch_bounds__(TT < 128 ? 128 : TT) norm_fwd_rows(const __grid_constant__ struct norm_fwd a)
{
    constexpr int V = pack<T>::N, BLOCK = TT < 128 ? 128 : TT, TEAMS = BLOCK / TT;
    __shared__ float scratch[BLOCK / 32];
    int lane = threadIdx.x % TT;
    int64_t row = (int64_t)blockIdx.x * TEAMS + threadIdx.x / TT;
    bool live = row < a.rows;
    int vectors = live ? (int)(a.d / V) : 0;
    const S *x = live ? row2<S>(a.x, row) : NULL;
    in_registers<S, V> stream[K];
#pragma unroll
    for (int k = 0; k < K; k++) {
        int i = k * TT + lane;
        stream[k] = hold<S, V>(i < vectors ? x + (int64_t)i * V : NULL);
    }
    if (a.f.data != NULL) {
        const T *f = live ? row2<T>(a.f, row) : NULL;
        S *s = live ? row2<S>(a.s, row) : NULL;
        in_registers<T, V> add[K];
#pragma unroll
        for (int k = 0; k < K; k++) {
            int i = k * TT + lane;
            add[k] = hold<T, V>(i < vectors ? f + (int64_t)i * V : NULL);
        }
        struct draw_place at = {};
        if (DROP)
            at = drop_row_of(a.drop, row);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int i = k * TT + lane;
            if (i < vectors) {
                float bias[V] = {}, factor[V], v[V], out[V];
                if (a.bias != NULL)
                    load_floats(a.bias + i * V, bias);
                if (DROP)
                    drop_factors(a.drop, at, (int64_t)i * V, factor);
                unpack_held(add[k], v);
                unpack_held(stream[k], out);
#pragma unroll
                for (int e = 0; e < V; e++) {
                    float f_e = v[e] + bias[e];
                    out[e] += DROP ? f_e * factor[e] : f_e;
                }
                store_and_hold(s + (int64_t)i * V, out, stream[k]);
            }
        }
    }
    if (a.rstd == NULL)
        return;
    float sum[1] = {0};
#pragma unroll
    for (int k = 0; k < K; k++) {
        float v[V];
        unpack_held(stream[k], v);
#pragma unroll
        for (int e = 0; e < V; e++)
            sum[0] += v[e] * v[e];
    }
    team_sum<TT, 1>(sum, scratch);
    float rstd = rsqrtf(sum[0] / (float)a.d + a.eps);
    if (live && lane == 0)
        a.rstd[row] = rstd;
    if (a.y.data == NULL)
        return;
    T *y = live ? row2<T>(a.y, row) : NULL;
#pragma unroll
    for (int k = 0; k < K; k++) {
        int i = k * TT + lane;
        if (i < vectors) {
            float w[V], out[V];
            if (a.w != NULL)
                load_floats(a.w + i * V, w);
            unpack_held(stream[k], out);
#pragma unroll
            for (int e = 0; e < V; e++)
                out[e] *= rstd * (a.w != NULL ? w[e] + a.one : 1.0f);
            store_floats(y + (int64_t)i * V, out);
        }
    }
}

/* One block a row, element by element. */
template <typename T, typename S>
static __global__ void __launch_bounds__(256) norm_fwd_plain(const __grid_constant__ struct norm_fwd a)
{
    __shared__ float scratch[8];
    int64_t row = blockIdx.x;
    const S *x = row_ptr<S>(a.x, row), *from = x;
    float sum = 0;
    if (a.f.data != NULL) {
        const T *f = row_ptr<T>(a.f, row);
        S *s = row_ptr<S>(a.s, row);
        struct draw_place at = {};
        if (a.drop.info != NULL)
            at = drop_row_of(a.drop, row);
        for (int64_t c = threadIdx.x; c < a.d; c += 256) {
            float factor[1] = {1}, v = to_float(f[c]) + (a.bias != NULL ? a.bias[c] : 0.0f);
            if (a.drop.info != NULL)
                drop_factors(a.drop, at, c, factor);
            s[c] = from_float<S>(to_float(x[c]) + v * factor[0]);
        }
        from = s;
    }
    if (a.rstd == NULL)
        return;
    for (int64_t c = threadIdx.x; c < a.d; c += 256)
        sum += to_float(from[c]) * to_float(from[c]);
    sum = block_sum<256>(sum, scratch);
    float rstd = rsqrtf(sum / (float)a.d + a.eps);
    if (threadIdx.x == 0)
        a.rstd[row] = rstd;
    if (a.y.data == NULL)
        return;
    T *y = row_ptr<T>(a.y, row);
    for (int64_t c = threadIdx.x; c < a.d; c += 256)
        y[c] = from_float<T>(to_float(from[c]) * rstd * (a.w != NULL ? a.w[c] + a.one : 1.0f));
}

static inline bool norm_fwd_aligned(const struct norm_fwd *a)
{
    return aligned16(&a->x) && absent_or_aligned16(&a->f) && absent_or_aligned16(&a->s) && absent_or_aligned16(&a->y) &&
           pointer16(a->w) && pointer16(a->bias);
}

template <typename T, typename S, int TT, int K> static int norm_fwd_launch(struct lane *lane, const struct norm_fwd *a)
{
    constexpr int BLOCK = TT < 128 ? 128 : TT, TEAMS = BLOCK / TT;
    unsigned grid = (unsigned)ceil_div(a->rows, TEAMS);
    if (a->drop.info != NULL && a->f.data != NULL)
        LAUNCH(lane, (norm_fwd_rows<T, S, TT, K, true>), grid, BLOCK, 0, *a);
    else
        LAUNCH(lane, (norm_fwd_rows<T, S, TT, K, false>), grid, BLOCK, 0, *a);
    return ST_OK;
}

template <typename T, typename S = T> static int norm_fwd_run(struct lane *lane, struct norm_fwd *a)
{
    int64_t vectors = a->d / pack<T>::N;
    if (!as_rank2(&a->x) || !as_rank2(&a->y) || !norm_fwd_aligned(a) || vectors > 4096) {
        LAUNCH(lane, (norm_fwd_plain<T, S>), (unsigned)a->rows, 256, 0, *a);
        return ST_OK;
    }
    return vectors <= 32     ? norm_fwd_launch<T, S, 32, 1>(lane, a)
           : vectors <= 64   ? norm_fwd_launch<T, S, 32, 2>(lane, a)
           : vectors <= 128  ? norm_fwd_launch<T, S, 64, 2>(lane, a)
           : vectors <= 256  ? norm_fwd_launch<T, S, 128, 2>(lane, a)
           : vectors <= 512  ? norm_fwd_launch<T, S, 256, 2>(lane, a)
           : vectors <= 1024 ? norm_fwd_launch<T, S, 512, 2>(lane, a)
                             : norm_fwd_launch<T, S, 512, 8>(lane, a);
}

/* ---- backward -------------------------------------------------------------------------------- */

struct norm_bwd {
    struct tensor dy, s, ds, dx,
        df; /* dy, df of type T, the others of type S; all but dx may be absent; s is there iff dy is */
    const float *w, *rstd;
    float *dw, *dbias; /* partial sums [blocks, d], or NULL */
    int64_t rows, d, rows_per_block;
    float one;
    struct drop_rule drop;
};

/* Blocks, and rows of each: by the number of rows alone. 384 blocks of 256 threads fit a large GPU all at once. */
static inline int64_t norm_rows_per_block(int64_t rows) { return round_up(max_i64(ceil_div(rows, 384), 16), 4); }
static inline int64_t norm_blocks(int64_t rows) { return ceil_div(rows, norm_rows_per_block(rows)); }

/* Adds what the teams of a block have summed up, in their order, into the block's row of the partial sums. */
template <int V, int TT, int BLOCK>
__device__ __forceinline__ void store_team_sums(const float (&acc)[V], float *shared, float *to, int lane, bool mine)
{
    if constexpr (BLOCK == TT) {
        if (mine)
            store_floats(to + lane * V, acc);
    } else {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < V; e++)
            shared[e * BLOCK + threadIdx.x] = acc[e];
        __syncthreads();
        if (threadIdx.x < TT && mine) {
            float sum[V] = {};
            for (int team = 0; team < BLOCK / TT; team++)
#pragma unroll
                for (int e = 0; e < V; e++)
                    sum[e] += shared[e * BLOCK + team * TT + lane];
            store_floats(to + lane * V, sum);
        }
    }
}

/* EXTRA: there is a df, a dbias or dropout. */
template <typename T, typename S, int TT, bool EXTRA>
static __global__ void __launch_bounds__(TT < 256 ? 256 : TT, TT <= 256   ? (EXTRA || sizeof(S) > sizeof(T) ? 2 : 3)
                                                              : TT == 512 ? 2
                                                                          : 1)
    norm_bwd_rows(const __grid_constant__ struct norm_bwd a)
{
    constexpr int V = pack<T>::N, BLOCK = TT < 256 ? 256 : TT, TEAMS = BLOCK / TT, R = TT <= 256 ? 2 : 1;
    __shared__ float scratch[2][BLOCK / 32 * R];
    __shared__ float shared[TEAMS > 1 ? BLOCK * V : 1];
    int lane = threadIdx.x % TT, team = threadIdx.x / TT;
    bool mine = lane < (int)(a.d / V);
    int64_t first = blockIdx.x * a.rows_per_block, end = min(a.rows, first + a.rows_per_block), at = (int64_t)lane * V;
    float acc_w[V] = {}, acc_b[V] = {}, gain[V];
#pragma unroll
    for (int e = 0; e < V; e++)
        gain[e] = 1.0f;
    if (mine && a.w != NULL) {
        load_floats(a.w + at, gain);
#pragma unroll
        for (int e = 0; e < V; e++)
            gain[e] += a.one;
    }
    int turn = 0;
    for (int64_t base = first; base < end; base += TEAMS * R) {
        in_registers<T, V> dy[R];
        in_registers<S, V> s[R], ds[R];
        float dot[R], rstd[R];
#pragma unroll
        for (int j = 0; j < R; j++) {
            int64_t row = base + j * TEAMS + team;
            bool live = mine && row < end;
            dy[j] = hold<T, V>(live && a.dy.data != NULL ? row2<T>(a.dy, row) + at : NULL);
            s[j] = hold<S, V>(live && a.dy.data != NULL ? row2<S>(a.s, row) + at : NULL);
            ds[j] = hold<S, V>(live && a.ds.data != NULL ? row2<S>(a.ds, row) + at : NULL);
            rstd[j] = live && a.dy.data != NULL ? a.rstd[row] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < R; j++) {
            float g[V], x[V];
            unpack_held(dy[j], g);
            unpack_held(s[j], x);
            dot[j] = 0;
#pragma unroll
            for (int e = 0; e < V; e++)
                dot[j] += g[e] * gain[e] * x[e];
        }
        team_sum<TT, R, false>(dot, scratch[turn ^= 1]);
#pragma unroll
        for (int j = 0; j < R; j++) {
            int64_t row = base + j * TEAMS + team;
            float pull = rstd[j] * rstd[j] * rstd[j] * dot[j] / (float)a.d, g[V], x[V], out[V];
            unpack_held(dy[j], g);
            unpack_held(s[j], x);
            unpack_held(ds[j], out);
#pragma unroll
            for (int e = 0; e < V; e++) {
                acc_w[e] += g[e] * x[e] * rstd[j];
                out[e] += rstd[j] * g[e] * gain[e] - x[e] * pull;
            }
            if (mine && row < end) {
                store_floats(row2<S>(a.dx, row) + at, out);
                if (EXTRA) {
                    float factor[V];
                    if (a.drop.info != NULL) {
                        drop_factors(a.drop, drop_row_of(a.drop, row), at, factor);
#pragma unroll
                        for (int e = 0; e < V; e++)
                            out[e] *= factor[e];
                    }
#pragma unroll
                    for (int e = 0; e < V; e++)
                        acc_b[e] += out[e];
                    if (a.df.data != NULL)
                        store_floats(row2<T>(a.df, row) + at, out);
                }
            }
        }
    }
    if (a.dw != NULL)
        store_team_sums<V, TT, BLOCK>(acc_w, shared, a.dw + blockIdx.x * a.d, lane, mine);
    if (EXTRA && a.dbias != NULL)
        store_team_sums<V, TT, BLOCK>(acc_b, shared, a.dbias + blockIdx.x * a.d, lane, mine);
}

template <typename T, typename S>
static __global__ void __launch_bounds__(256) norm_bwd_plain(const __grid_constant__ struct norm_bwd a)
{
    __shared__ float scratch[8];
    int64_t first = blockIdx.x * a.rows_per_block, end = min(a.rows, first + a.rows_per_block);
    float *dw = a.dw != NULL ? a.dw + blockIdx.x * a.d : NULL,
          *dbias = a.dbias != NULL ? a.dbias + blockIdx.x * a.d : NULL;
    for (int64_t c = threadIdx.x; c < a.d; c += 256) {
        if (dw != NULL)
            dw[c] = 0;
        if (dbias != NULL)
            dbias[c] = 0;
    }
    for (int64_t row = first; row < end; row++) {
        const T *dy = a.dy.data != NULL ? row_ptr<T>(a.dy, row) : NULL;
        const S *s = dy != NULL ? row_ptr<S>(a.s, row) : NULL, *ds = a.ds.data != NULL ? row_ptr<S>(a.ds, row) : NULL;
        S *dx = row_ptr<S>(a.dx, row);
        T *df = a.df.data != NULL ? row_ptr<T>(a.df, row) : NULL;
        float dot = 0, rstd = dy != NULL ? a.rstd[row] : 0.0f;
        for (int64_t c = threadIdx.x; dy != NULL && c < a.d; c += 256)
            dot += to_float(dy[c]) * (a.w != NULL ? a.w[c] + a.one : 1.0f) * to_float(s[c]);
        dot = block_sum<256>(dot, scratch);
        float pull = rstd * rstd * rstd * dot / (float)a.d;
        struct draw_place at = {};
        if (a.drop.info != NULL)
            at = drop_row_of(a.drop, row);
        for (int64_t c = threadIdx.x; c < a.d; c += 256) {
            float out = ds != NULL ? to_float(ds[c]) : 0.0f, factor[1] = {1};
            if (dy != NULL) {
                float g = to_float(dy[c]), x = to_float(s[c]);
                out += rstd * g * (a.w != NULL ? a.w[c] + a.one : 1.0f) - x * pull;
                if (dw != NULL)
                    dw[c] += g * x * rstd;
            }
            dx[c] = from_float<S>(out);
            if (a.drop.info != NULL)
                drop_factors(a.drop, at, c, factor);
            if (df != NULL)
                df[c] = from_float<T>(out * factor[0]);
            if (dbias != NULL)
                dbias[c] += out * factor[0];
        }
    }
}

template <typename T, typename S, int TT>
static int norm_bwd_launch(struct lane *lane, const struct norm_bwd *a, bool extra)
{
    constexpr int BLOCK = TT < 256 ? 256 : TT;
    unsigned grid = (unsigned)norm_blocks(a->rows);
    if (extra)
        LAUNCH(lane, (norm_bwd_rows<T, S, TT, true>), grid, BLOCK, 0, *a);
    else
        LAUNCH(lane, (norm_bwd_rows<T, S, TT, false>), grid, BLOCK, 0, *a);
    return ST_OK;
}

template <typename T, typename S = T> static int norm_bwd_run(struct lane *lane, struct norm_bwd *a)
{
    int64_t vectors = a->d / pack<T>::N;
    bool extra = a->df.data != NULL || a->dbias != NULL;
    bool fits = as_rank2(&a->dy) && as_rank2(&a->s) && as_rank2(&a->ds) && as_rank2(&a->dx) &&
                absent_or_aligned16(&a->dy) && absent_or_aligned16(&a->s) && absent_or_aligned16(&a->ds) &&
                aligned16(&a->dx) && absent_or_aligned16(&a->df) && pointer16(a->w) && pointer16(a->dw) &&
                pointer16(a->dbias) && vectors <= 1024;
    if (!fits) {
        LAUNCH(lane, (norm_bwd_plain<T, S>), (unsigned)norm_blocks(a->rows), 256, 0, *a);
        return ST_OK;
    }
    return vectors <= 32    ? norm_bwd_launch<T, S, 32>(lane, a, extra)
           : vectors <= 64  ? norm_bwd_launch<T, S, 64>(lane, a, extra)
           : vectors <= 128 ? norm_bwd_launch<T, S, 128>(lane, a, extra)
           : vectors <= 256 ? norm_bwd_launch<T, S, 256>(lane, a, extra)
           : vectors <= 512 ? norm_bwd_launch<T, S, 512>(lane, a, extra)
                            : norm_bwd_launch<T, S, 1024>(lane, a, extra);
}

#endif
