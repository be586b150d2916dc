/* rope, CUDA version; see rope.h.
 *
 * Fast path, 16-byte vectors: a head is cut into units of two vectors, which hold pairs that turn together: columns
 * u V and rd/2 + u V for halves, two neighbouring vectors where pairs are neighbours or pass unturned. A team of lanes
 * (a power of two) takes a head of a token; a thread does the same unit of several heads, so angles and gains are
 * loaded once for them. The norm needs sums over the team only.
 * Backward with gains: a block owns a fixed run of tokens, a thread's sums of dw stay in registers and meet at the
 * end; ops/cuda/sums.cuh adds those of all blocks. A position outside the tables turns by NaN. */
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
#include "ops/rope/rope.h"

struct rope_call {
    struct tensor x, y; /* read and written; backward: dy and dx */
    struct tensor in;   /* backward of the norm: x */
    const float *w, *cos, *sin;
    float *rstd; /* [tokens, heads], written forward, read backward */
    float *dw;   /* partial sums [blocks, d] */
    const int32_t *pos;
    int64_t tokens, heads, d, pairs, positions, cos_stride, sin_stride, rstd_stride, tokens_per_block;
    float eps, one;
    bool interleaved, back;
};

/* Columns of the two vectors of unit u. */
template <int V> __device__ __forceinline__ void unit_columns(const struct rope_call &a, int u, int *first, int *second)
{
    bool halves = !a.interleaved && u < (int)(a.pairs / V);
    *first = halves ? u * V : 2 * u * V;
    *second = halves ? (int)a.pairs + u * V : 2 * u * V + V;
}

/* Angles of unit u at a token: for halves V pairs (first[e], second[e]); for neighbours V/2 pairs in each vector. Units
 * that pass turn by 0. */
template <int V>
__device__ __forceinline__ void unit_angles(const struct rope_call &a, int64_t token, int u, float (&cosine)[V],
                                            float (&sine)[V])
{
#pragma unroll
    for (int e = 0; e < V; e++) {
        cosine[e] = 1;
        sine[e] = 0;
    }
    if (a.cos == NULL || u >= (int)(a.pairs / V))
        return;
    int64_t at = a.pos[token];
    if (at < 0 || at >= a.positions) {
#pragma unroll
        for (int e = 0; e < V; e++)
            cosine[e] = sine[e] = __int_as_float(0x7fffffff);
        return;
    }
    load_floats(a.cos + at * a.cos_stride + u * V, cosine);
    load_floats(a.sin + at * a.sin_stride + u * V, sine);
    if (a.back)
#pragma unroll
        for (int e = 0; e < V; e++)
            sine[e] = -sine[e];
}

template <int V, bool INTERLEAVED>
__device__ __forceinline__ void turn(float (&first)[V], float (&second)[V], const float (&cosine)[V],
                                     const float (&sine)[V])
{
    if constexpr (INTERLEAVED) {
#pragma unroll
        for (int k = 0; k < V / 2; k++) {
            float a = first[2 * k], b = first[2 * k + 1], c = second[2 * k], d = second[2 * k + 1];
            first[2 * k] = a * cosine[k] - b * sine[k];
            first[2 * k + 1] = b * cosine[k] + a * sine[k];
            second[2 * k] = c * cosine[V / 2 + k] - d * sine[V / 2 + k];
            second[2 * k + 1] = d * cosine[V / 2 + k] + c * sine[V / 2 + k];
        }
    } else {
#pragma unroll
        for (int e = 0; e < V; e++) {
            float a = first[e], b = second[e];
            first[e] = a * cosine[e] - b * sine[e];
            second[e] = b * cosine[e] + a * sine[e];
        }
    }
}

/* Forward, and backward without gains. TEAM lanes a head, HEADS heads a thread. */
template <typename T, int TEAM, int HEADS, bool INTERLEAVED, bool NORM>
static __global__ void __launch_bounds__(256) rope_rows(const __grid_constant__ struct rope_call a)
{
    constexpr int V = pack<T>::N;
    unsigned groups = (unsigned)((a.heads + HEADS - 1) / HEADS), item = (blockIdx.x * 256u + threadIdx.x) / TEAM;
    int u = threadIdx.x % TEAM;
    int64_t token = item / groups, head0 = (int64_t)(item % groups) * HEADS;
    bool live = token < a.tokens && u < (int)(a.d / (2 * V));
    int c1, c2;
    unit_columns<V>(a, u, &c1, &c2);
    const T *x = (const T *)a.x.data + token * a.x.stride[0] + head0 * a.x.stride[1];
    T *y = (T *)a.y.data + token * a.y.stride[0] + head0 * a.y.stride[1];
    uint4 raw1[HEADS], raw2[HEADS];
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
        bool have = live && head0 + j < a.heads;
        raw1[j] = have ? load_raw(x + j * a.x.stride[1] + c1) : zero_raw();
        raw2[j] = have ? load_raw(x + j * a.x.stride[1] + c2) : zero_raw();
    }
    float cosine[V], sine[V], g1[V] = {}, g2[V] = {}, sum[HEADS];
    unit_angles<V>(a, live ? token : 0, live ? u : (int)a.d, cosine, sine);
    if (NORM) {
        if (live) {
            load_floats(a.w + c1, g1);
            load_floats(a.w + c2, g2);
        }
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            float v1[V], v2[V];
            unpack<T>(raw1[j], v1);
            unpack<T>(raw2[j], v2);
            sum[j] = 0;
#pragma unroll
            for (int e = 0; e < V; e++)
                sum[j] += v1[e] * v1[e] + v2[e] * v2[e];
        }
        team_sum<TEAM, HEADS>(sum, NULL);
    }
#pragma unroll
    for (int j = 0; j < HEADS; j++) {
        float v1[V], v2[V];
        unpack<T>(raw1[j], v1);
        unpack<T>(raw2[j], v2);
        if (NORM) {
            float rstd = rsqrtf(sum[j] / (float)a.d + a.eps);
            if (u == 0 && live && head0 + j < a.heads)
                a.rstd[token * a.rstd_stride + head0 + j] = rstd;
#pragma unroll
            for (int e = 0; e < V; e++) {
                v1[e] *= rstd * (g1[e] + a.one);
                v2[e] *= rstd * (g2[e] + a.one);
            }
        }
        turn<V, INTERLEAVED>(v1, v2, cosine, sine);
        if (live && head0 + j < a.heads) {
            store_floats(y + j * a.y.stride[1] + c1, v1);
            store_floats(y + j * a.y.stride[1] + c2, v2);
        }
    }
}

/* Backward with gains: x is dy, y is dx, in is x. */
template <typename T, int TEAM, int HEADS, bool INTERLEAVED>
static __global__ void __launch_bounds__(256, 2) rope_norm_bwd_rows(const __grid_constant__ struct rope_call a)
{
    constexpr int V = pack<T>::N, TEAMS = 256 / TEAM;
    __shared__ float shared[8][TEAM * 2 * V];
    int u = threadIdx.x % TEAM, team = threadIdx.x / TEAM, groups = (int)((a.heads + HEADS - 1) / HEADS);
    bool mine = u < (int)(a.d / (2 * V));
    int64_t first = blockIdx.x * a.tokens_per_block, tokens = min(a.tokens - first, a.tokens_per_block),
            items = tokens * groups;
    int c1, c2;
    unit_columns<V>(a, u, &c1, &c2);
    float g1[V] = {}, g2[V] = {}, sum1[V] = {}, sum2[V] = {};
    if (mine) {
        load_floats(a.w + c1, g1);
        load_floats(a.w + c2, g2);
    }
#pragma unroll
    for (int e = 0; e < V; e++) {
        g1[e] += a.one;
        g2[e] += a.one;
    }
    for (int64_t base = 0; base < items; base += TEAMS) {
        unsigned item = (unsigned)(base + team);
        int64_t token = first + item / groups, head0 = (int64_t)(item % groups) * HEADS;
        bool live = mine && base + team < items;
        uint4 d1[HEADS], d2[HEADS], x1[HEADS], x2[HEADS];
        float rstd[HEADS], dot[HEADS];
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            bool have = live && head0 + j < a.heads;
            const T *dy = (const T *)a.x.data + token * a.x.stride[0] + (head0 + j) * a.x.stride[1];
            const T *x = (const T *)a.in.data + token * a.in.stride[0] + (head0 + j) * a.in.stride[1];
            d1[j] = have ? load_raw(dy + c1) : zero_raw();
            d2[j] = have ? load_raw(dy + c2) : zero_raw();
            x1[j] = have ? load_raw(x + c1) : zero_raw();
            x2[j] = have ? load_raw(x + c2) : zero_raw();
            rstd[j] = have ? a.rstd[token * a.rstd_stride + head0 + j] : 0.0f;
        }
        float cosine[V], sine[V];
        unit_angles<V>(a, live ? token : 0, live ? u : (int)a.d, cosine, sine);
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            float p[V], q[V], v[V];
            unpack<T>(d1[j], p);
            unpack<T>(d2[j], q);
            turn<V, INTERLEAVED>(p, q, cosine, sine);
            unpack<T>(x1[j], v);
            dot[j] = 0;
#pragma unroll
            for (int e = 0; e < V; e++)
                dot[j] += p[e] * g1[e] * v[e];
            unpack<T>(x2[j], v);
#pragma unroll
            for (int e = 0; e < V; e++)
                dot[j] += q[e] * g2[e] * v[e];
        }
        team_sum<TEAM, HEADS>(dot, NULL);
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            float p[V], q[V], v[V], pull = rstd[j] * rstd[j] * rstd[j] * dot[j] / (float)a.d;
            T *dx = (T *)a.y.data + token * a.y.stride[0] + (head0 + j) * a.y.stride[1];
            unpack<T>(d1[j], p);
            unpack<T>(d2[j], q);
            turn<V, INTERLEAVED>(p, q, cosine, sine);
            unpack<T>(x1[j], v);
#pragma unroll
            for (int e = 0; e < V; e++) {
                sum1[e] += p[e] * v[e] * rstd[j];
                p[e] = rstd[j] * p[e] * g1[e] - v[e] * pull;
            }
            unpack<T>(x2[j], v);
#pragma unroll
            for (int e = 0; e < V; e++) {
                sum2[e] += q[e] * v[e] * rstd[j];
                q[e] = rstd[j] * q[e] * g2[e] - v[e] * pull;
            }
            if (live && head0 + j < a.heads) {
                store_floats(dx + c1, p);
                store_floats(dx + c2, q);
            }
        }
    }
    /* Teams of a warp by shuffles, then the warps in order. Lanes without a token of the last round added zeros. */
    float *to = a.dw + blockIdx.x * a.d;
#pragma unroll
    for (int e = 0; e < V; e++)
#pragma unroll
        for (int step = TEAM; step < 32; step <<= 1) {
            sum1[e] += __shfl_xor_sync(0xffffffffu, sum1[e], step);
            sum2[e] += __shfl_xor_sync(0xffffffffu, sum2[e], step);
        }
    if (threadIdx.x % 32 < TEAM && mine)
#pragma unroll
        for (int e = 0; e < V; e++) {
            shared[threadIdx.x / 32][c1 + e] = sum1[e];
            shared[threadIdx.x / 32][c2 + e] = sum2[e];
        }
    __syncthreads();
    for (int c = threadIdx.x; c < (int)a.d; c += 256) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < 8; w++)
            sum += shared[w][c];
        to[c] = sum;
    }
}

/* ---- any shape: a block a head of a token, pair by pair -------------------------------------- */

/* Column pair of item i: turned pairs first, then single columns (second = -1). */
__device__ __forceinline__ void item_columns(const struct rope_call &a, int64_t i, int64_t *first, int64_t *second)
{
    if (i < a.pairs) {
        *first = a.interleaved ? 2 * i : i;
        *second = a.interleaved ? 2 * i + 1 : i + a.pairs;
    } else {
        *first = a.pairs + i;
        *second = -1;
    }
}

/* Values of item i after the gain (forward) or before it (backward), turned. */
template <typename T>
__device__ __forceinline__ void item_values(const struct rope_call &a, const T *x, int64_t token, int64_t i, float rstd,
                                            int64_t *first, int64_t *second, float *p, float *q)
{
    item_columns(a, i, first, second);
    bool gains = !a.back && a.w != NULL;
    *p = to_float(x[*first]) * (gains ? rstd * (a.w[*first] + a.one) : 1.0f);
    *q = 0;
    if (*second < 0)
        return;
    *q = to_float(x[*second]) * (gains ? rstd * (a.w[*second] + a.one) : 1.0f);
    int64_t at = a.pos[token];
    bool inside = at >= 0 && at < a.positions;
    float nan = __int_as_float(0x7fffffff), c = inside ? a.cos[at * a.cos_stride + i] : nan,
          s = inside ? a.sin[at * a.sin_stride + i] : nan;
    s = a.back ? -s : s;
    float old = *p;
    *p = old * c - *q * s;
    *q = *q * c + old * s;
}

template <typename T>
static __global__ void __launch_bounds__(128) rope_plain(const __grid_constant__ struct rope_call a)
{
    __shared__ float scratch[4];
    int64_t token = blockIdx.x / a.heads, head = blockIdx.x % a.heads, c1, c2;
    const T *x = (const T *)a.x.data + token * a.x.stride[0] + head * a.x.stride[1];
    T *y = (T *)a.y.data + token * a.y.stride[0] + head * a.y.stride[1];
    float rstd = 1, p, q;
    if (a.w != NULL) {
        float sum = 0;
        for (int64_t c = threadIdx.x; c < a.d; c += 128)
            sum += to_float(x[c]) * to_float(x[c]);
        rstd = rsqrtf(block_sum<128>(sum, scratch) / (float)a.d + a.eps);
        if (threadIdx.x == 0)
            a.rstd[token * a.rstd_stride + head] = rstd;
    }
    for (int64_t i = threadIdx.x; i < a.d - a.pairs; i += 128) {
        item_values<T>(a, x, token, i, rstd, &c1, &c2, &p, &q);
        y[c1] = from_float<T>(p);
        if (c2 >= 0)
            y[c2] = from_float<T>(q);
    }
}

template <typename T>
static __global__ void __launch_bounds__(128) rope_norm_bwd_plain(const __grid_constant__ struct rope_call a)
{
    __shared__ float scratch[4];
    float *dw = a.dw + blockIdx.x * a.d, p, q;
    int64_t first = blockIdx.x * a.tokens_per_block, end = min(a.tokens, first + a.tokens_per_block),
            items = a.d - a.pairs, c1, c2;
    for (int64_t i = threadIdx.x; i < items; i += 128) {
        item_columns(a, i, &c1, &c2);
        dw[c1] = 0;
        if (c2 >= 0)
            dw[c2] = 0;
    }
    for (int64_t row = first * a.heads; row < end * a.heads; row++) {
        int64_t token = row / a.heads, head = row % a.heads;
        const T *dy = (const T *)a.x.data + token * a.x.stride[0] + head * a.x.stride[1];
        const T *x = (const T *)a.in.data + token * a.in.stride[0] + head * a.in.stride[1];
        T *dx = (T *)a.y.data + token * a.y.stride[0] + head * a.y.stride[1];
        float rstd = a.rstd[token * a.rstd_stride + head], dot = 0;
        for (int64_t i = threadIdx.x; i < items; i += 128) {
            item_values<T>(a, dy, token, i, rstd, &c1, &c2, &p, &q);
            dot += p * (a.w[c1] + a.one) * to_float(x[c1]);
            if (c2 >= 0)
                dot += q * (a.w[c2] + a.one) * to_float(x[c2]);
        }
        dot = block_sum<128>(dot, scratch);
        float pull = rstd * rstd * rstd * dot / (float)a.d;
        for (int64_t i = threadIdx.x; i < items; i += 128) {
            item_values<T>(a, dy, token, i, rstd, &c1, &c2, &p, &q);
            float x1 = to_float(x[c1]), x2 = c2 >= 0 ? to_float(x[c2]) : 0.0f;
            dw[c1] += p * x1 * rstd;
            dx[c1] = from_float<T>(rstd * p * (a.w[c1] + a.one) - x1 * pull);
            if (c2 >= 0) {
                dw[c2] += q * x2 * rstd;
                dx[c2] = from_float<T>(rstd * q * (a.w[c2] + a.one) - x2 * pull);
            }
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T> static bool fits_units(const struct rope_call *a)
{
    constexpr int V = pack<T>::N;
    return aligned16(&a->x) && aligned16(&a->y) && absent_or_aligned16(&a->in) && pointer16(a->w) && pointer16(a->dw) &&
           pointer16(a->cos) && pointer16(a->sin) && a->cos_stride % 4 == 0 && a->sin_stride % 4 == 0 &&
           a->pairs % V == 0 && a->d % (2 * V) == 0 && a->d / (2 * V) <= 32 && a->d > 0 &&
           a->tokens * a->heads * 32 < (1ll << 31);
}

template <typename T, int TEAM, int HEADS, bool INTERLEAVED>
static int launch_rows(struct lane *lane, const struct rope_call *a)
{
    unsigned grid = (unsigned)ceil_div(a->tokens * ceil_div(a->heads, HEADS) * TEAM, 256);
    if (a->w != NULL && !a->back)
        LAUNCH(lane, (rope_rows<T, TEAM, HEADS, INTERLEAVED, true>), grid, 256, 0, *a);
    else
        LAUNCH(lane, (rope_rows<T, TEAM, HEADS, INTERLEAVED, false>), grid, 256, 0, *a);
    return ST_OK;
}

template <typename T, int TEAM>
static int launch_team(struct lane *lane, const struct rope_call *a, bool norm_bwd, unsigned blocks)
{
    if (norm_bwd) {
        if (a->interleaved)
            LAUNCH(lane, (rope_norm_bwd_rows<T, TEAM, 2, true>), blocks, 256, 0, *a);
        else
            LAUNCH(lane, (rope_norm_bwd_rows<T, TEAM, 2, false>), blocks, 256, 0, *a);
        return ST_OK;
    }
    if (a->heads >= 2)
        return a->interleaved ? launch_rows<T, TEAM, 2, true>(lane, a) : launch_rows<T, TEAM, 2, false>(lane, a);
    return a->interleaved ? launch_rows<T, TEAM, 1, true>(lane, a) : launch_rows<T, TEAM, 1, false>(lane, a);
}

static int64_t tokens_per_block(int64_t tokens) { return max_i64(ceil_div(tokens, 256), 4); }
static int64_t blocks_of(int64_t tokens) { return ceil_div(tokens, tokens_per_block(tokens)); }

template <typename T> static int rope_run(struct lane *lane, const struct rope_call *a, bool norm_bwd)
{
    int64_t units = a->d / (2 * pack<T>::N);
    unsigned blocks = (unsigned)blocks_of(a->tokens);
    if (fits_units<T>(a))
        return units <= 4    ? launch_team<T, 4>(lane, a, norm_bwd, blocks)
               : units <= 8  ? launch_team<T, 8>(lane, a, norm_bwd, blocks)
               : units <= 16 ? launch_team<T, 16>(lane, a, norm_bwd, blocks)
                             : launch_team<T, 32>(lane, a, norm_bwd, blocks);
    if (norm_bwd)
        LAUNCH(lane, rope_norm_bwd_plain<T>, blocks, 128, 0, *a);
    else
        LAUNCH(lane, rope_plain<T>, (unsigned)(a->tokens * a->heads), 128, 0, *a);
    return ST_OK;
}

static struct rope_call tables(const struct tensor *x, const struct tensor *cos_table, const struct tensor *sin_table,
                               const struct tensor *pos)
{
    struct rope_call c = {};
    c.tokens = x->dim[0];
    c.heads = x->dim[1];
    c.d = x->dim[2];
    if (present(cos_table)) {
        c.cos = (const float *)cos_table->data;
        c.sin = (const float *)sin_table->data;
        c.pos = (const int32_t *)pos->data;
        c.pairs = cos_table->dim[1];
        c.positions = cos_table->dim[0];
        c.cos_stride = cos_table->stride[0];
        c.sin_stride = sin_table->stride[0];
    }
    return c;
}

extern "C" int rope_fwd_cuda(struct lane *l, const struct rope_fwd_args *a)
{
    TRY(rope_fwd_check(a, l->err));
    struct rope_call c = tables(&a->x, &a->cos, &a->sin, &a->pos);
    c.x = a->x;
    c.y = a->y;
    c.w = (const float *)a->w.data;
    c.rstd = (float *)a->rstd.data;
    c.rstd_stride = a->rstd.stride[0];
    c.eps = (float)a->eps;
    c.one = a->zero_centered ? 1.0f : 0.0f;
    c.interleaved = a->interleaved;
    BY_REAL(a->x.dtype, T, return rope_run<T>(l, &c, false));
}

extern "C" int64_t rope_bwd_work_cuda(const struct rope_bwd_args *a)
{
    return a->w.rank > 0 ? blocks_of(a->dy.dim[0]) * a->dy.dim[2] * (int64_t)sizeof(float) : 0;
}

extern "C" int rope_bwd_cuda(struct lane *l, const struct rope_bwd_args *a)
{
    TRY(rope_bwd_check(a, l->err));
    bool norm = present(&a->w);
    if (norm)
        TRY(check_work("rope_bwd", &a->work, rope_bwd_work_cuda(a), l->err));
    struct rope_call c = tables(&a->dy, &a->cos, &a->sin, &a->pos);
    c.x = a->dy;
    c.y = a->dx;
    c.back = true;
    c.interleaved = a->interleaved;
    if (norm) {
        c.in = a->x;
        c.w = (const float *)a->w.data;
        c.rstd = (float *)a->rstd.data;
        c.rstd_stride = a->rstd.stride[0];
        c.dw = (float *)a->work.data;
        c.one = a->zero_centered ? 1.0f : 0.0f;
        c.tokens_per_block = tokens_per_block(c.tokens);
    }
    if (a->dy.dtype == DT_BF16)
        TRY(rope_run<bf16>(l, &c, norm));
    else
        TRY(rope_run<float>(l, &c, norm));
    return norm ? add_partials(l, c.dw, blocks_of(c.tokens), c.d, (float *)a->dw.data, c.d, 0, a->acc_dw) : ST_OK;
}
