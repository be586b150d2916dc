/* The boundary's large backward pass for 4 streams of bf16 on Hopper: the gradients dy and dh, x and f are read once, dx and df written
 * once. The stream y is not read: it is formed again from x and f.
 *
 * Blocks side by side own 256 channels of all streams each and keep their part of w in shared memory; a row of C / 256 blocks walks
 * down its tiles of 8 tokens. Two groups of 8 warps work on tiles of their own, each with two stages that a copier warp fills and
 * empties by bulk copies, so nothing but the sums over a block's channels for dcoef_in makes warps wait for each other.
 *   row_records   (a kernel before it, a thread per row) coefficients and their gradients: back through Sinkhorn and gates, dz, dp
 *   the pass      y again; g = dy + pre da + dp w + scale y, the whole gradient of the stream; dx, df, and sums for dcoef_in
 *   sum_ranks     (a kernel after it) those sums over the blocks of a row
 * w enters dp w as bf16, and dp as two halves: the error of rounding w is that of rounding dp w to bf16, which is what a
 * separate product would store. */
#include "ops/mhc/mhc_pass.cuh"

enum {
    /* A block starts with 96 for each of 640 threads, and that is all there is to share. */
    WORKER_REGISTERS = 104,
    HELPER_REGISTERS = 64,
    TOKENS = 8, /* of a tile */
    STAGES = 2, /* of a group */
    BLOCKS = CL_COLS / 64,
    MIXES = CL_N * CL_N + CL_N,                    /* sums for dpost, dres */
    LINES = TOKENS * CL_ROW,                       /* bytes of 64 channels of all tokens */
    FRAG = 32 * 24,                                /* bytes of 16 channels of w as an operand: depth 16, then depth 8 */
    W_BYTES = BLOCKS * CL_N * 4 * FRAG,
    RECORD = 12 + CL_LOGITS, /* words of a row's record; the last 4 keep rows in different banks */
};
/* Words of a record: pre; rstd, m (da = rstd (dh gain - m a)), scale of y, unused; then dp as bf16 [2][24], high and low. */
enum { REC_PRE = 0, REC_RSTD = 4, REC_M, REC_SCALE, REC_DP = 8 };

struct bwd_tile { /* a multiple of 1024 bytes, as swizzled tiles want */
    char x[CL_N * BLOCKS * LINES], dy[CL_N * BLOCKS * LINES], f[BLOCKS * LINES], dh[BLOCKS * LINES];
};
struct bwd_shared {
    struct bwd_tile tile[CL_GROUPS][STAGES];
    uint4 w[W_BYTES / 16];
    float coef[CL_GROUPS][STAGES][TOKENS][CL_LOGITS], record[CL_GROUPS][STAGES][TOKENS][RECORD];
    float mixes[CL_GROUPS][2][BLOCKS][TOKENS][MIXES]; /* used in turn */
    uint64_t w_here, full[CL_GROUPS][STAGES], done[CL_GROUPS][STAGES];
};

struct pass_bwd {
    const uint4 *operands;
    const float *records, *coef_in, *bias, *gain;
    float *mixes; /* [ranks, rows, MIXES] */
    int64_t rows, d;
    int tiles, ranks, lines;
    float one;
    bool profile_d, has_dy;
    struct drop_rule drop;
};

/* ---- before: operands and records ------------------------------------------------------------------------------------ */

/* Channel 8 piece + 2 t + e of a block of 64 is row g + 8 e of tile t, piece = piece_of(g): so that the lanes of a quarter warp
 * find their channels in different banks. */
__host__ __device__ __forceinline__ int piece_of(int g) { return g >> 1 | (g & 1) << 2; }

static __global__ void backward_operands(const float *w, int64_t stride, int64_t d, char *out, int64_t count)
{
    int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count)
        return;
    int lane = (int)(index % 32), g = lane / 4, q = lane % 4, t = (int)(index / 32 % 4), stream = (int)(index / 128 % CL_N);
    const float *from = w + stream * d + index / 512 * 64 + 8 * piece_of(g) + 2 * t;
    uint32_t r[6];
#pragma unroll
    for (int k = 0; k < 6; k++) {
        const float *at = from + (8 * (k / 2) + 2 * q) * stride + k % 2;
        r[k] = pack_bf16(at[0], at[stride]);
    }
    char *to = out + index / 32 * FRAG;
    *(uint4 *)(to + lane * 16) = make_uint4(r[0], r[1], r[2], r[3]);
    *(uint2 *)(to + 512 + lane * 8) = make_uint2(r[4], r[5]);
}

static __global__ void __launch_bounds__(64) row_records(const __grid_constant__ struct record_args a)
{
    int64_t row = (int64_t)blockIdx.x * 64 + threadIdx.x;
    if (row >= a.rows)
        return;
    const float *p = a.stat + row * a.stat_stride, *up = a.dcoef == NULL ? NULL : a.dcoef + row * a.dcoef_stride;
    float rho = p[CL_LOGITS], q = 1.0f / (rho + (float)MHC_EPS), sum = 0, g[CL_N * CL_N], scale[3] = {*a.a_pre, *a.a_post, *a.a_res};
    float *record = a.records + row * RECORD, *dz = a.dz + row * a.dz_stride;
    res_gradient(p + 2 * CL_N, q, scale[2], a.beta + 2 * CL_N, up == NULL ? NULL : up + 2 * CL_N, g, a.iterations, a.profile_d);
    *(float4 *)(record + REC_PRE) = *(const float4 *)(a.coef + row * a.coef_stride);
    uint32_t split[CL_LOGITS];
    float dps[CL_LOGITS];
#pragma unroll
    for (int k = 0; k < CL_LOGITS; k++) {
        float by = scale[k < CL_N ? 0 : k < 2 * CL_N ? 1 : 2], v;
        if (k < 2 * CL_N) {
            float sig = precise_sigmoid(q * p[k] * by + a.beta[k]), dv = up == NULL ? 0.0f : up[k];
            v = (k < CL_N ? dv + a.dpre[row * CL_N + k] : 2 * dv) * sig * (1 - sig);
        } else {
            v = g[k - 2 * CL_N];
        }
        dz[k] = v;
        dps[k] = v * by * q;
        sum += v * by * p[k];
    }
#pragma unroll
    for (int k = 0; k < CL_LOGITS; k += 2) {
        uint2 pair = split_pair(dps[k], dps[k + 1]);
        split[k / 2] = pair.x;
        split[CL_LOGITS / 2 + k / 2] = pair.y;
    }
#pragma unroll
    for (int k = 0; k < CL_LOGITS; k += 4)
        *(uint4 *)(record + REC_DP + k) = make_uint4(split[k], split[k + 1], split[k + 2], split[k + 3]);
    *(float4 *)(record + REC_RSTD) = make_float4(p[CL_LOGITS + 1], a.m[row], rho == 0 ? 0.0f : -q * q * sum / ((float)a.k * rho), 0);
}

/* ---- the pass ----------------------------------------------------------------------------------------------------------- */

#if HOPPER_CODE

__device__ __forceinline__ int tile_of(const struct pass_bwd &a, int group, int j) { return (int)(blockIdx.x / a.ranks) + (CL_GROUPS * j + group) * a.lines; }
/* What a stage holds, by name. */
struct stage {
    char *x, *dy, *f, *dh;
    float (*coef)[CL_LOGITS], (*record)[RECORD];
};
__device__ __forceinline__ struct stage stage_of(struct bwd_shared *s, int group, int n)
{
    struct bwd_tile *t = &s->tile[group][n];
    struct stage st = {t->x, t->dy, t->f, t->dh, s->coef[group][n], s->record[group][n]};
    return st;
}

struct bwd_maps {
    const CUtensorMap *x, *dy, *f, *dh, *dx, *df;
};

static __device__ __forceinline__ void load_tile(const struct pass_bwd &a, const struct stage &st, uint64_t *bar, int tile, int rank, const struct bwd_maps &m)
{
    int row = tile * TOKENS, live = (int)min(a.rows - row, (int64_t)TOKENS);
    uint32_t coef = (uint32_t)(live * CL_LOGITS * 4), record = (uint32_t)(live * RECORD * 4);
    barrier_expect(bar, (uint32_t)((a.has_dy ? 2 : 1) * CL_N * BLOCKS * LINES + 2 * BLOCKS * LINES) + coef + record);
    bulk_load(st.coef, a.coef_in + (int64_t)row * CL_LOGITS, coef, bar);
    bulk_load(st.record, a.records + (int64_t)row * RECORD, record, bar);
    for (int b = 0; b < BLOCKS; b++) {
        int col = rank * CL_COLS + b * 64;
        parts_load(st.x + b * CL_N * LINES, m.x, col, row, bar);
        tma_load_2d(st.f + b * LINES, m.f, col, row, bar);
        tma_load_2d(st.dh + b * LINES, m.dh, col, row, bar);
        if (a.has_dy)
            parts_load(st.dy + b * CL_N * LINES, m.dy, col, row, bar);
    }
}

static __device__ __forceinline__ void copy_tiles(const struct pass_bwd &a, struct bwd_shared *s, int group, int rank, const struct bwd_maps &m)
{
    for (int j = 0; j < STAGES && tile_of(a, group, j) < a.tiles; j++)
        load_tile(a, stage_of(s, group, j), &s->full[group][j], tile_of(a, group, j), rank, m);
    for (int j = 0, tile; (tile = tile_of(a, group, j)) < a.tiles; j++) {
        struct stage st = stage_of(s, group, j % STAGES);
        barrier_wait_bounded(&s->done[group][j % STAGES], j / STAGES & 1);
        for (int b = 0; b < BLOCKS; b++) {
            int col = rank * CL_COLS + b * 64;
            parts_store(m.dx, col, tile * TOKENS, st.x + b * CL_N * LINES);
            tma_store_2d(m.df, col, tile * TOKENS, st.f + b * LINES);
        }
        stores_read();
        int next = tile_of(a, group, j + STAGES);
        if (next < a.tiles)
            load_tile(a, st, &s->full[group][j % STAGES], next, rank, m);
    }
    bulk_wait<0>();
}

/* The place of a worker thread. */
struct worker {
    int group, rank, warp, lane, block, token, piece;
    int64_t c; /* channel of a stream */
};

/* 8 channels of y as stored, from x and f. */
template <bool DROP> static __device__ __forceinline__ void form_again(const struct pass_bwd &a, const struct worker &k, const struct stage &st, int at, int64_t row, uint4 (&y)[CL_N])
{
    float in[CL_N][8], add[8], post[CL_N], res[CL_N * CL_N];
#pragma unroll
    for (int i = 0; i < CL_N; i++)
        unpack<bf16>(load_raw(st.x + (k.block * CL_N + i) * LINES + at), in[i]);
    unpack<bf16>(load_raw(st.f + k.block * LINES + at), add);
    if (a.bias != NULL) {
        float bias[8];
        load_floats(a.bias + k.c, bias);
#pragma unroll
        for (int e = 0; e < 8; e++)
            add[e] += bias[e];
    }
    struct drop_row drop = {};
    if (DROP)
        drop = drop_row_of(a.drop, row);
    load_floats(st.coef[k.token] + CL_N, post);
    load_floats(st.coef[k.token] + 2 * CL_N, res);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float v[8], factor[8];
        if (DROP)
            drop_factors(a.drop, drop, i * a.d + k.c, factor);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            v[e] = __fmul_rn(a.profile_d ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
            for (int l = 1; l < CL_N; l++)
                v[e] = fmaf(a.profile_d ? res[l * CL_N + i] : res[i * CL_N + l], in[l][e], v[e]);
            v[e] = add_dropped<DROP>(v[e], post[i], add[e], DROP ? factor[e] : 1.0f);
        }
        y[i] = repack<bf16>(v);
    }
}

/* Gradient of the aggregate. */
static __device__ __forceinline__ void aggregate_gradient(const struct pass_bwd &a, const struct worker &k, const struct stage &st, int at, const uint4 (&y)[CL_N], float (&da)[8])
{
    float4 pre = *(const float4 *)(st.record[k.token] + REC_PRE), by = *(const float4 *)(st.record[k.token] + REC_RSTD);
    float weight[CL_N] = {pre.x, pre.y, pre.z, pre.w}, gain[8], agg[8] = {};
    unpack<bf16>(load_raw(st.dh + k.block * LINES + at), da);
    if (a.gain != NULL) {
        load_floats(a.gain + k.c, gain);
#pragma unroll
        for (int e = 0; e < 8; e++)
            da[e] *= gain[e] + a.one;
    }
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float v[8];
        unpack<bf16>(y[i], v);
#pragma unroll
        for (int e = 0; e < 8; e++)
            agg[e] = fmaf(weight[i], v[e], agg[e]);
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        da[e] = by.x * (da[e] - agg[e] * by.y);
}

/* Sums over the 8 lanes of a token; COUNT a power of two from 8 on: this lane is left with COUNT / 8, from COUNT / 8 * (lane / 4) on. */
template <int HALF, int COUNT> __device__ __forceinline__ void fold(float (&v)[COUNT], int lane, int bit)
{
    bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float keep = upper ? v[i + HALF] : v[i], send = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, send, bit);
    }
}
template <int COUNT> __device__ __forceinline__ void token_sums(float (&v)[COUNT], int lane)
{
    fold<COUNT / 2>(v, lane, 16);
    fold<COUNT / 4>(v, lane, 8);
    fold<COUNT / 8>(v, lane, 4);
}

/* dp of this lane's column of the product: token lane / 8 of this warp's 4, high halves in even columns. */
static __device__ __forceinline__ void load_dp(const struct stage &st, const struct worker &k, uint32_t (&b)[3])
{
    int token = k.warp / BLOCKS * 4 + k.lane / 8;
    const uint32_t *dp = (const uint32_t *)(st.record[token] + REC_DP) + ((k.lane / 4 & 1) != 0 ? CL_LOGITS / 2 : 0) + k.lane % 4;
#pragma unroll
    for (int i = 0; i < 3; i++)
        b[i] = dp[4 * i];
}

/* The stream's gradient and everything that follows from it. */
template <bool DROP>
static __device__ __forceinline__ void finish_tile(const struct pass_bwd &a, const struct worker &k, struct bwd_shared *s, const struct stage &st, int at, int buffer, int64_t row, const uint4 (&y)[CL_N])
{
    float grad[CL_N][8];
    {
        float da[8], scale = st.record[k.token][REC_SCALE];
        uint32_t dp[3];
        load_dp(st, k, dp);
        aggregate_gradient(a, k, st, at, y, da);
#pragma unroll
        for (int i = 0; i < CL_N; i++) {
            float v[8], d[8], pre = st.record[k.token][REC_PRE + i];
            const char *w = (const char *)s->w + (k.block * CL_N + i) * 4 * FRAG;
            uint4 raw = a.has_dy ? load_raw(st.dy + (k.block * CL_N + i) * LINES + at) : zero_raw();
            unpack<bf16>(raw, d);
            unpack<bf16>(y[i], v);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                float acc[4] = {};
                uint4 by = *(const uint4 *)(w + t * FRAG + k.lane * 16);
                uint2 rest = *(const uint2 *)(w + t * FRAG + 512 + k.lane * 8);
                mma_bf16(acc, &by.x, dp[0], dp[1]);
                mma_bf16_k8(acc, rest.x, rest.y, dp[2]);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float sum = fmaf(pre, da[2 * t + e], d[2 * t + e]) + (acc[2 * e] + acc[2 * e + 1]);
                    grad[i][2 * t + e] = fmaf(scale, v[2 * t + e], sum);
                }
            }
        }
    }
    float f[8], df[8] = {}, with_f[8] = {}, with_x[CL_N * CL_N] = {};
    {
        float4 by = *(const float4 *)(st.coef[k.token] + CL_N);
        float post[CL_N] = {by.x, by.y, by.z, by.w};
        unpack<bf16>(load_raw(st.f + k.block * LINES + at), f);
        if (a.bias != NULL) {
            float bias[8];
            load_floats(a.bias + k.c, bias);
#pragma unroll
            for (int e = 0; e < 8; e++)
                f[e] += bias[e];
        }
        struct drop_row drop = {};
        if (DROP)
            drop = drop_row_of(a.drop, row);
#pragma unroll
        for (int i = 0; i < CL_N; i++) {
            float factor[8];
            if (DROP)
                drop_factors(a.drop, drop, i * a.d + k.c, factor);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float dropped = DROP ? grad[i][e] * factor[e] : grad[i][e];
                df[e] = fmaf(post[i], dropped, df[e]);
                with_f[i] = fmaf(dropped, f[e], with_f[i]);
            }
        }
        store_raw(st.f + k.block * LINES + at, repack<bf16>(df));
    }
#pragma unroll
    for (int j = 0; j < CL_N; j++) {
        float v[8], out[8] = {}, mix[CL_N];
        const float *res = st.coef[k.token] + 2 * CL_N;
#pragma unroll
        for (int i = 0; i < CL_N; i++)
            mix[i] = a.profile_d ? res[j * CL_N + i] : res[i * CL_N + j];
        char *place = st.x + (k.block * CL_N + j) * LINES + at;
        unpack<bf16>(load_raw(place), v);
#pragma unroll
        for (int i = 0; i < CL_N; i++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                with_x[i * CL_N + j] = fmaf(grad[i][e], v[e], with_x[i * CL_N + j]);
                out[e] = fmaf(mix[i], grad[i][e], out[e]);
            }
        store_raw(place, repack<bf16>(out));
    }
    fence_async_proxy();
    __syncwarp();
    if (k.lane == 0)
        barrier_arrive(&s->done[k.group][buffer]);
    token_sums<CL_N * CL_N>(with_x, k.lane);
    token_sums<8>(with_f, k.lane); /* the upper 4 are zeros */
    float *mixes = s->mixes[k.group][buffer][k.block][k.token];
    int g = k.lane / 4;
#pragma unroll
    for (int e = 0; e < 2; e++)
        mixes[CL_N + mix_at(a.profile_d, CL_N, (2 * g + e) / CL_N, (2 * g + e) % CL_N)] = with_x[e];
    if (g < CL_N)
        mixes[g] = with_f[0];
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

/* By one warp: sums for dcoef_in of a tile, over the blocks of channels. */
static __device__ __forceinline__ void leave_mixes(const struct pass_bwd &a, const struct bwd_shared *s, const struct worker &k, int buffer, int tile)
{
    for (int item = k.lane; item < TOKENS * MIXES / 4; item += 32) {
        int token = item / (MIXES / 4), v = item % (MIXES / 4) * 4;
        int64_t row = (int64_t)tile * TOKENS + token;
        float4 sum = *(const float4 *)&s->mixes[k.group][buffer][0][token][v];
#pragma unroll
        for (int b = 1; b < BLOCKS; b++)
            sum = add4(sum, *(const float4 *)&s->mixes[k.group][buffer][b][token][v]);
        if (row < a.rows)
            *(float4 *)(a.mixes + ((int64_t)k.rank * a.rows + row) * MIXES + v) = sum;
    }
}

template <bool DROP> static __device__ __forceinline__ void work(const struct pass_bwd &a, struct bwd_shared *s, int group, int rank)
{
    struct worker k = {};
    int thread = (int)threadIdx.x % CL_GROUP_THREADS, j = 0;
    k.group = group;
    k.rank = rank;
    k.warp = thread / 32;
    k.lane = thread % 32;
    k.block = k.warp % BLOCKS;
    k.token = k.warp / BLOCKS * 4 + k.lane % 4;
    k.piece = piece_of(k.lane / 4);
    k.c = (int64_t)rank * CL_COLS + k.block * 64 + k.piece * 8;
    int at = in_tile(k.token, k.piece);
    barrier_wait_bounded(&s->w_here, 0);
    for (int tile; (tile = tile_of(a, group, j)) < a.tiles; j++) {
        int64_t row = (int64_t)tile * TOKENS + k.token;
        int buffer = j & 1;
        uint32_t parity = j >> 1 & 1;
        struct stage st = stage_of(s, group, buffer);
        uint4 y[CL_N];
        barrier_wait_bounded(&s->full[group][buffer], parity);
        form_again<DROP>(a, k, st, at, row, y);
        finish_tile<DROP>(a, k, s, st, at, buffer, row, y);
        /* Whoever sums up reads before the next barrier; the same place is written again after it. */
        group_barrier(group);
        if (k.warp == j % CL_WARPS)
            leave_mixes(a, s, k, buffer, tile);
    }
}

#endif /* HOPPER_CODE */

template <bool DROP>
static __global__ void __launch_bounds__(CL_THREADS, 1)
    boundary_bwd_pass(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap dh,
                      const __grid_constant__ CUtensorMap dx, const __grid_constant__ CUtensorMap df, const __grid_constant__ struct pass_bwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct bwd_shared *s = (struct bwd_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(&s->w_here, 1);
        for (int g = 0; g < CL_GROUPS; g++)
            for (int b = 0; b < 2; b++) {
                barrier_init(&s->full[g][b], 1);
                barrier_init(&s->done[g][b], CL_WARPS);
            }
        barrier_init_done();
        barrier_expect(&s->w_here, W_BYTES);
        bulk_load(s->w, a.operands + (int64_t)rank * (W_BYTES / 16), W_BYTES, &s->w_here);
    }
    __syncthreads();
    if (warp < CL_WORKERS / 32) {
        registers_up<WORKER_REGISTERS>();
        work<DROP>(a, s, warp / CL_WARPS, rank);
    } else {
        registers_down<HELPER_REGISTERS>();
        int helper = warp - CL_WORKERS / 32;
        struct bwd_maps m = {&x, &dy, &f, &dh, &dx, &df};
        if (helper < CL_GROUPS && threadIdx.x % 32 == 0)
            copy_tiles(a, s, helper, rank, m);
    }
#endif
}

/* ---- after ------------------------------------------------------------------------------------------------------------- */

/* dcoef_in: zeros for pre, then the sums over blocks in order. */
static __global__ void __launch_bounds__(256) sum_ranks(const float *mixes, int ranks, int64_t rows, float *dcoef, int64_t stride)
{
    int64_t index = (int64_t)blockIdx.x * 256 + threadIdx.x, row = index / 6;
    int v = (int)(index % 6);
    if (row >= rows)
        return;
    float4 sum = make_float4(0, 0, 0, 0);
    if (v > 0) {
#pragma unroll 8
        for (int r = 0; r < ranks; r++) {
            float4 add = *(const float4 *)(mixes + (r * rows + row) * MIXES + (v - 1) * 4);
            sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
        }
    }
    *(float4 *)(dcoef + row * stride + v * 4) = sum;
}
int mhc_sum_mixes(struct lane *l, const float *mixes, int ranks, int64_t rows, const struct tensor *dcoef)
{
    LAUNCH(l, sum_ranks, (unsigned)ceil_div(rows * 6, 256), 256, 0, mixes, ranks, rows, (float *)dcoef->data, dcoef->stride[0]);
    return ST_OK;
}

struct pass_work {
    uint4 *operands;
    float *records, *mixes;
};
static int64_t divide(const struct mhc_boundary_bwd_args *b, void *base, struct pass_work *w)
{
    struct carve c = {(char *)base, 0};
    int64_t rows = b->dx.dim[0], d = b->dx.dim[1] / CL_N, ranks = d / CL_COLS;
    w->operands = (uint4 *)carve_bytes(&c, ranks * W_BYTES);
    w->records = carve_floats(&c, rows * RECORD);
    w->mixes = carve_floats(&c, ranks * rows * MIXES);
    return c.used;
}
int64_t mhc_boundary_bwd_pass_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct pass_work w;
    return divide(b, NULL, &w);
}

static int make_records(struct lane *l, const struct mhc_boundary_bwd_args *b, const float *dpre, const float *m, float *records)
{
    struct record_args a = record_args_of(b, records);
    a.dpre = dpre;
    a.m = m;
    LAUNCH(l, row_records, (unsigned)ceil_div(a.rows, 64), 64, 0, a);
    return ST_OK;
}

int mhc_boundary_bwd_pass(struct lane *l, const struct mhc_boundary_bwd_args *b, const float *dpre, const float *m, void *base)
{
    struct pass_work w;
    struct pass_bwd a = {};
    CUtensorMap x, dy, f, dh, dx, df;
    int64_t rows = b->dx.dim[0], k = b->dx.dim[1], d = k / CL_N, count = k / 64 * 128;
    divide(b, base, &w);
    LAUNCH(l, backward_operands, (unsigned)ceil_div(count, 256), 256, 0, (const float *)b->w.data, b->w.stride[0], d, (char *)w.operands, count);
    TRY(make_records(l, b, dpre, m, w.records));
    a.operands = w.operands;
    a.records = w.records;
    a.coef_in = (const float *)b->coef_in.data;
    a.bias = (const float *)b->bias.data;
    a.gain = (const float *)b->gain.data;
    a.mixes = w.mixes;
    a.rows = rows;
    a.d = d;
    a.tiles = (int)ceil_div(rows, TOKENS);
    a.ranks = (int)(d / CL_COLS);
    a.lines = (int)min_i64(max_i64(CL_BLOCKS / a.ranks, 1), a.tiles);
    a.one = b->zero_centered ? 1 : 0;
    a.profile_d = b->rule.profile == MHC_D;
    a.has_dy = present(&b->dy);
    a.drop = drop_rule_of(&b->drop);
    TRY(tensor_map_parts(l, &x, b->x.data, rows, CL_N, d, b->x.stride[0], TOKENS));
    TRY(tensor_map_parts(l, &dx, b->dx.data, rows, CL_N, d, b->dx.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &f, b->f.data, rows, d, b->f.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &df, b->df.data, rows, d, b->df.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &dh, b->dh.data, rows, d, b->dh.stride[0], TOKENS));
    dy = dx;
    if (a.has_dy)
        TRY(tensor_map_parts(l, &dy, b->dy.data, rows, CL_N, d, b->dy.stride[0], TOKENS));
    unsigned grid = (unsigned)(a.ranks * a.lines);
    if (a.drop.info != NULL) {
        NEEDS_SMEM(l, boundary_bwd_pass<true>, sizeof(struct bwd_shared));
        LAUNCH(l, boundary_bwd_pass<true>, grid, CL_THREADS, sizeof(struct bwd_shared), x, dy, f, dh, dx, df, a);
    } else {
        NEEDS_SMEM(l, boundary_bwd_pass<false>, sizeof(struct bwd_shared));
        LAUNCH(l, boundary_bwd_pass<false>, grid, CL_THREADS, sizeof(struct bwd_shared), x, dy, f, dh, dx, df, a);
    }
    return mhc_sum_mixes(l, w.mixes, a.ranks, rows, &b->dcoef_in);
}
