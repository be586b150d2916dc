/* The boundary's large backward pass for 4 streams of bf16 on Hopper: the gradients dy and dh, x and f are read once, dx and df written
 * once. The stream y is not read: it is formed again from x and f.
 *
 * Blocks side by side own 256 channels of all streams each and keep their part of w in shared memory; a line of C / 256 blocks walks
 * down its tiles of 8 tokens. Two groups of 8 warps work on tiles of their own, each with two stages, which four helper warps fill and empty by bulk copies; so
 * nothing but the sums over a block's channels for dcoef_in makes warps wait for each other.
 *   prepare_rows   what does not need sums over channels: back through Sinkhorn and the gates of post and res, dz, dp; w as an operand
 *   the look       (mhc_look.cu) sums over channels of norm and aggregate, and dw's rows of post and res, whose dp is known by then
 *   close_records  the gates of pre
 *   the pass       y again; g = dy + pre da + dp w + scale y, the whole gradient of the stream; dx, df, and sums for dcoef_in. dw's rows of pre: workers leave y
 *                  in place of dy, and helpers multiply it by dp. Some spare blocks add up what the look left by lines
 *   finish_pass    sums for dcoef_in over the blocks of a line, and for dw over lines
 * w enters dp w as bf16, and dp as two halves: the error of rounding w is that of rounding dp w to bf16, which is what a
 * separate product would store. In dw y is what it is, bf16, and dp two halves. */
#include "ops/mhc/mhc_look.cuh"

enum {
    /* A block starts with 96 for each of 640 threads, and that is all there is to share. */
    WORKER_REGISTERS = 104,
    HELPER_REGISTERS = 64,
    TOKENS = 8, /* of a tile */
    STAGES = 2, /* of a group */
    BLOCKS = CL_COLS / 64,
    SPARE = 4,                       /* blocks, for multiprocessors that the pass leaves idle */
    HELPERS_BARRIER = 1 + CL_GROUPS, /* its number: groups have those before */
    MIXES = MHC_MIXES,
    LINES = TOKENS * CL_ROW,         /* bytes of 64 channels of all tokens */
    FRAG = MHC_FRAG,
    W_BYTES = BLOCKS * CL_N * 4 * FRAG,
    RECORD = MHC_RECORD,
};
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

/* What the look left by lines: dgain, and dw's rows of post and res. Either may be NULL. */
struct look_sums {
    const float *dgain_parts, *dw_parts;
    float *dgain, *products;
    int64_t d, products_stride;
    int lines;
    bool acc_dgain;
};
struct pass_bwd {
    const uint4 *operands;
    const float *records, *coef_in, *bias, *gain;
    float *mixes;  /* [ranks, rows, MIXES] */
    float *dw_pre; /* [lines, 4, K] or NULL */
    int64_t rows, d;
    int tiles, ranks, lines;
    float one;
    bool has_dy;
    struct drop_rule drop;
    struct look_sums look;
};

/* ---- the pass ----------------------------------------------------------------------------------------------------------- */

#if HOPPER_CODE

static __device__ void sum_look(const struct look_sums &a, int64_t first, int64_t step)
{
    int64_t k = CL_N * a.d;
    for (int64_t c = first; a.dgain_parts != NULL && c < a.d; c += step)
        a.dgain[c] = (a.acc_dgain ? a.dgain[c] : 0.0f) + sum_of(a.dgain_parts + c, a.lines, a.d);
    for (int64_t i = first; a.dw_parts != NULL && i < (CL_LOGITS - CL_N) * k; i += step)
        a.products[(CL_N + i / k) * a.products_stride + i % k] = sum_of(a.dw_parts + i, a.lines, (CL_LOGITS - CL_N) * k);
}

/* Tile n of this line of blocks; group n % CL_GROUPS works on it. */
__device__ __forceinline__ int tile_of(const struct pass_bwd &a, int n) { return (int)(blockIdx.x / a.ranks) + n * a.lines; }
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
static __device__ __forceinline__ void store_tile(const struct stage &st, int tile, int rank, const struct bwd_maps &m)
{
    int row = tile * TOKENS;
    for (int b = 0; b < BLOCKS; b++) {
        int col = rank * CL_COLS + b * 64;
        parts_store(m.dx, col, row, st.x + b * CL_N * LINES);
        tma_store_2d(m.df, col, row, st.f + b * LINES);
    }
    bulk_commit();
}

/* dp of pre as the right operand of y^T dp: this lane's two tokens of logit lane / 4 % 4, high halves and low ones; zeros beyond the last row. */
static __device__ __forceinline__ uint2 load_dp_pre(const struct pass_bwd &a, const struct stage &st, int tile, int lane)
{
    int token = lane % 4 * 2;
    uint2 dp = make_uint2(0, 0);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const uint16_t *from = (const uint16_t *)(st.record[token + e] + REC_DP) + lane / 4 % CL_N;
        if (tile * TOKENS + token + e < a.rows) {
            dp.x |= (uint32_t)from[0] << 16 * e;
            dp.y |= (uint32_t)from[CL_LOGITS] << 16 * e;
        }
    }
    return dp;
}
/* Rows of pre of dw: y^T dp of a tile, for the 64 channels of this warp. Two streams share a product, one with k 0 - 7 and columns 0 - 3 (logits), the other with
 * the rest: acc [pair of streams][channels of 16]. High halves of dp, then low ones. */
static __device__ __forceinline__ void add_dw(const struct pass_bwd &a, const struct stage &st, int tile, int block, int lane, float (&acc)[CL_N / 2][4][4])
{
    uint2 dp = load_dp_pre(a, st, tile, lane);
    bool first = lane / 4 < CL_N;
#pragma unroll
    for (int i = 0; i < CL_N; i += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t y[4], z[4];
            int at = (block * CL_N + i) * LINES + in_tile(lane % 8, 4 * half + lane / 8);
            load_matrices_t(y, st.dy + at);
            load_matrices_t(z, st.dy + at + LINES);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                uint32_t both[4] = {y[2 * c], y[2 * c + 1], z[2 * c], z[2 * c + 1]};
                mma_bf16(acc[i / 2][2 * half + c], both, first ? dp.x : 0, first ? 0 : dp.x);
                mma_bf16(acc[i / 2][2 * half + c], both, first ? dp.y : 0, first ? 0 : dp.y);
            }
        }
}
static __device__ __forceinline__ void leave_dw(const struct pass_bwd &a, int rank, int warp, int lane, const float (&acc)[CL_N / 2][4][4])
{
    float *to = a.dw_pre + (int64_t)(blockIdx.x / a.ranks) * CL_N * CL_N * a.d + rank * CL_COLS + warp * 64 + lane / 4;
    int stream = lane % 4 / 2, logit = lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < CL_N; i += 2)
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                to[(logit + v % 2) * CL_N * a.d + (i + stream) * a.d + 16 * c + 8 * (v / 2)] = acc[i / 2][c][v];
}

/* By four warps: bring tiles, take them away, and multiply y, which the workers leave in place of dy. Tiles come in order, those of the groups in turn.
 * One thread copies whole tiles: memory likes lines that belong together to be asked for together (with each warp bringing its own 64 channels as soon as it
 * could, the pass was slower by 8 %). */
static __device__ __forceinline__ void help(const struct pass_bwd &a, struct bwd_shared *s, int rank, const struct bwd_maps &m)
{
    int block = (int)threadIdx.x / 32 - CL_WORKERS / 32, lane = (int)threadIdx.x % 32;
    bool copier = (int)threadIdx.x == CL_WORKERS;
    float acc[CL_N / 2][4][4] = {};
    for (int n = 0; copier && n < STAGES * CL_GROUPS && tile_of(a, n) < a.tiles; n++)
        load_tile(a, stage_of(s, n % CL_GROUPS, n / CL_GROUPS), &s->full[n % CL_GROUPS][n / CL_GROUPS], tile_of(a, n), rank, m);
    for (int n = 0, tile; (tile = tile_of(a, n)) < a.tiles; n++) {
        int group = n % CL_GROUPS, buffer = n / CL_GROUPS % STAGES, next = tile_of(a, n + STAGES * CL_GROUPS);
        struct stage st = stage_of(s, group, buffer);
        barrier_wait_bounded(&s->done[group][buffer], (uint32_t)(n / CL_GROUPS / STAGES) & 1);
        if (copier)
            store_tile(st, tile, rank, m);
        if (a.dw_pre != NULL) {
            add_dw(a, st, tile, block, lane, acc);
            named_barrier<HELPERS_BARRIER, CL_THREADS - CL_WORKERS>();
        }
        if (copier) {
            bulk_wait_read<0>();
            if (next < a.tiles)
                load_tile(a, st, &s->full[group][buffer], next, rank, m);
        }
    }
    if (a.dw_pre != NULL)
        leave_dw(a, rank, block, lane, acc);
    if (copier)
        bulk_wait<0>();
}

/* The place of a worker thread. */
struct worker {
    int group, rank, warp, lane, block, token, piece, c; /* c: channel of a stream */
};

/* 8 channels of y as stored, from x and f. */
template <bool DROP, bool D> static __device__ __forceinline__ void form_again(const struct pass_bwd &a, const struct worker &k, const struct stage &st, int at, int row, uint4 (&y)[CL_N])
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
            v[e] = __fmul_rn(D ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
            for (int l = 1; l < CL_N; l++)
                v[e] = fmaf(D ? res[l * CL_N + i] : res[i * CL_N + l], in[l][e], v[e]);
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
    add_streams(y, weight, agg);
#pragma unroll
    for (int e = 0; e < 8; e++)
        da[e] = by.x * (da[e] - agg[e] * by.y);
}

/* One step of sums over the 8 lanes of a token: this lane goes on with one half of the numbers. */
template <int HALF, int COUNT> __device__ __forceinline__ void fold(float (&v)[COUNT], int lane, int bit)
{
    bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float keep = upper ? v[i + HALF] : v[i], send = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, send, bit);
    }
}
/* This lane is left with numbers 2 g and 2 g + 1 of 16, g = lane / 4, and number g / 2 of 4. */
__device__ __forceinline__ void token_sums(float (&of16)[CL_N * CL_N], float (&of4)[CL_N], int lane)
{
    fold<8>(of16, lane, 16);
    fold<4>(of16, lane, 8);
    fold<2>(of16, lane, 4);
    fold<2>(of4, lane, 16);
    fold<1>(of4, lane, 8);
    of4[0] += __shfl_xor_sync(0xffffffffu, of4[0], 4);
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
template <bool DROP, bool D>
static __device__ __forceinline__ void finish_tile(const struct pass_bwd &a, const struct worker &k, struct bwd_shared *s, const struct stage &st, int at, int buffer, int row, const uint4 (&y)[CL_N])
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
            if (a.dw_pre != NULL)
                store_raw(st.dy + (k.block * CL_N + i) * LINES + at, y[i]);
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
    float f[8], df[8] = {}, with_f[CL_N] = {}, with_x[CL_N * CL_N] = {};
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
            mix[i] = D ? res[j * CL_N + i] : res[i * CL_N + j];
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
    token_sums(with_x, with_f, k.lane);
    float *mixes = s->mixes[k.group][buffer][k.block][k.token];
    int g = k.lane / 4;
#pragma unroll
    for (int e = 0; e < 2; e++)
        mixes[CL_N + mix_at(D, CL_N, (2 * g + e) / CL_N, (2 * g + e) % CL_N)] = with_x[e];
    if (g % 2 == 0)
        mixes[g / 2] = with_f[0];
}

/* By one warp: sums for dcoef_in of a tile, over the blocks of channels. */
static __device__ __forceinline__ void leave_mixes(const struct pass_bwd &a, const struct bwd_shared *s, const struct worker &k, int buffer, int tile)
{
    for (int item = k.lane; item < TOKENS * MIXES / 4; item += 32) {
        int token = item / (MIXES / 4), v = item % (MIXES / 4) * 4;
        int64_t row = tile * TOKENS + token;
        float4 sum = *(const float4 *)&s->mixes[k.group][buffer][0][token][v];
#pragma unroll
        for (int b = 1; b < BLOCKS; b++)
            sum = add4(sum, *(const float4 *)&s->mixes[k.group][buffer][b][token][v]);
        if (row < a.rows)
            *(float4 *)(a.mixes + ((int64_t)k.rank * a.rows + row) * MIXES + v) = sum;
    }
}

template <bool DROP, bool D> static __device__ __forceinline__ void work(const struct pass_bwd &a, struct bwd_shared *s, int group, int rank)
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
    k.c = rank * CL_COLS + k.block * 64 + k.piece * 8;
    int at = in_tile(k.token, k.piece);
    barrier_wait_bounded(&s->w_here, 0);
    for (int tile; (tile = tile_of(a, CL_GROUPS * j + group)) < a.tiles; j++) {
        int row = tile * TOKENS + k.token, buffer = j & 1;
        uint32_t parity = j >> 1 & 1;
        struct stage st = stage_of(s, group, buffer);
        uint4 y[CL_N];
        barrier_wait_bounded(&s->full[group][buffer], parity);
        form_again<DROP, D>(a, k, st, at, row, y);
        finish_tile<DROP, D>(a, k, s, st, at, buffer, row, y);
        /* Whoever sums up reads before the next barrier; the same place is written again after it. */
        group_barrier(group);
        if (k.warp == j % CL_WARPS)
            leave_mixes(a, s, k, buffer, tile);
    }
}

#endif /* HOPPER_CODE */

/* D: profile D. */
template <bool DROP, bool D>
static __global__ void __launch_bounds__(CL_THREADS, 1)
    boundary_bwd_pass(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap dh,
                      const __grid_constant__ CUtensorMap dx, const __grid_constant__ CUtensorMap df, const __grid_constant__ struct pass_bwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct bwd_shared *s = (struct bwd_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32, spare = (int)blockIdx.x - a.ranks * a.lines;
    if (spare >= 0) {
        sum_look(a.look, spare * CL_THREADS + (int)threadIdx.x, SPARE * CL_THREADS);
        return;
    }
    /* Coefficients beyond the last row stay what they were: zeros, or those of an earlier tile; x and f are zeros there, and so is y. */
    for (int i = (int)threadIdx.x; i < CL_GROUPS * STAGES * TOKENS * CL_LOGITS; i += CL_THREADS)
        (&s->coef[0][0][0][0])[i] = 0;
    fence_async_proxy();
    if (threadIdx.x == 0) {
        barrier_init(&s->w_here, 1);
        for (int g = 0; g < CL_GROUPS; g++)
            for (int i = 0; i < STAGES; i++) {
                barrier_init(&s->full[g][i], 1);
                barrier_init(&s->done[g][i], CL_WARPS);
            }
        barrier_init_done();
        barrier_expect(&s->w_here, W_BYTES);
        bulk_load(s->w, a.operands + (int64_t)rank * (W_BYTES / 16), W_BYTES, &s->w_here);
    }
    __syncthreads();
    struct bwd_maps m = {&x, &dy, &f, &dh, &dx, &df};
    if (warp < CL_WORKERS / 32) {
        registers_up<WORKER_REGISTERS>();
        work<DROP, D>(a, s, warp / CL_WARPS, rank);
    } else {
        registers_down<HELPER_REGISTERS>();
        help(a, s, rank, m);
    }
#endif
}

struct pass_work {
    uint4 *operands;
    float *records, *mixes, *dots, *dgain, *dw, *dw_pre;
};
static int64_t pass_lines(int64_t rows, int64_t d) { return min_i64(max_i64(CL_BLOCKS / (d / CL_COLS), 1), max_i64(ceil_div(rows, TOKENS), 1)); }
static int64_t divide(const struct mhc_boundary_bwd_args *b, void *base, struct pass_work *w)
{
    struct carve c = {(char *)base, 0};
    int64_t rows = b->dx.dim[0], k = b->dx.dim[1], d = k / CL_N, ranks = d / CL_COLS;
    *w = {};
    w->operands = (uint4 *)carve_bytes(&c, ranks * W_BYTES);
    w->records = carve_floats(&c, rows * RECORD);
    w->mixes = carve_floats(&c, ranks * rows * MIXES);
    w->dots = carve_floats(&c, ranks * rows * MHC_LOOK_DOTS);
    w->dgain = carve_floats(&c, mhc_look_lines(rows, d) * d);
    if (b->products.rank > 0) {
        w->dw = carve_floats(&c, mhc_look_lines(rows, d) * (CL_LOGITS - CL_N) * k);
        w->dw_pre = carve_floats(&c, pass_lines(rows, d) * CL_N * k);
    }
    return c.used;
}
int64_t mhc_boundary_bwd_pass_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct pass_work w;
    return divide(b, NULL, &w);
}

/* Operands and records, and the look at the stream that they need and that needs them. */
static int prepare(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct pass_work *w, struct look_sums *sums)
{
    struct mhc_look_args look = {};
    look.y = b->y;
    look.dh = b->dh;
    look.records = w->records;
    look.gain = (const float *)b->gain.data;
    look.dots = w->dots;
    look.dgain = present(&b->dgain) ? w->dgain : NULL;
    look.dw = w->dw;
    look.one = b->zero_centered ? 1 : 0;
    sums->dgain_parts = look.dgain;
    sums->dw_parts = w->dw;
    sums->dgain = (float *)b->dgain.data;
    sums->acc_dgain = b->acc_dgain;
    sums->products = (float *)b->products.data;
    sums->products_stride = present(&b->products) ? b->products.stride[0] : 0;
    sums->d = b->dh.dim[1];
    sums->lines = (int)mhc_look_lines(b->dh.dim[0], b->dh.dim[1]);
    TRY(mhc_prepare_rows(l, b, w->records, w->operands));
    TRY(mhc_look(l, &look));
    return mhc_close_records(l, b, w->records, w->dots);
}
static int finish(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct pass_work *w, const struct pass_bwd *p)
{
    struct mhc_after_pass a = {};
    a.mixes = w->mixes;
    a.dw_parts = w->dw_pre;
    a.dcoef = (float *)b->dcoef_in.data;
    a.dcoef_stride = b->dcoef_in.stride[0];
    a.products = (float *)b->products.data;
    a.products_stride = present(&b->products) ? b->products.stride[0] : 0;
    a.rows = p->rows;
    a.k = CL_N * p->d;
    a.ranks = p->ranks;
    a.lines = p->lines;
    return mhc_finish_pass(l, &a);
}

struct pass_maps {
    CUtensorMap x, dy, f, dh, dx, df;
};
template <bool DROP, bool D> static int launch_pass(struct lane *l, const struct pass_maps &m, const struct pass_bwd &a)
{
    NEEDS_SMEM(l, (boundary_bwd_pass<DROP, D>), sizeof(struct bwd_shared));
    LAUNCH(l, (boundary_bwd_pass<DROP, D>), (unsigned)(a.ranks * a.lines + SPARE), CL_THREADS, sizeof(struct bwd_shared), m.x, m.dy, m.f, m.dh, m.dx, m.df, a);
    return ST_OK;
}

int mhc_boundary_bwd_pass(struct lane *l, const struct mhc_boundary_bwd_args *b, void *base)
{
    struct pass_work w;
    struct pass_bwd a = {};
    struct pass_maps m;
    int64_t rows = b->dx.dim[0], k = b->dx.dim[1], d = k / CL_N;
    divide(b, base, &w);
    TRY(prepare(l, b, &w, &a.look));
    a.operands = w.operands;
    a.records = w.records;
    a.coef_in = (const float *)b->coef_in.data;
    a.bias = (const float *)b->bias.data;
    a.gain = (const float *)b->gain.data;
    a.mixes = w.mixes;
    a.dw_pre = w.dw_pre;
    a.rows = rows;
    a.d = d;
    a.tiles = (int)ceil_div(rows, TOKENS);
    a.ranks = (int)(d / CL_COLS);
    a.lines = (int)pass_lines(rows, d);
    a.one = b->zero_centered ? 1 : 0;
    a.has_dy = present(&b->dy);
    a.drop = drop_rule_of(&b->drop);
    TRY(tensor_map_parts(l, &m.x, b->x.data, rows, CL_N, d, b->x.stride[0], TOKENS));
    TRY(tensor_map_parts(l, &m.dx, b->dx.data, rows, CL_N, d, b->dx.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &m.f, b->f.data, rows, d, b->f.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &m.df, b->df.data, rows, d, b->df.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &m.dh, b->dh.data, rows, d, b->dh.stride[0], TOKENS));
    m.dy = m.dx;
    if (a.has_dy)
        TRY(tensor_map_parts(l, &m.dy, b->dy.data, rows, CL_N, d, b->dy.stride[0], TOKENS));
    bool profile_d = b->rule.profile == MHC_D;
    if (a.drop.info != NULL)
        TRY((profile_d ? launch_pass<true, true>(l, m, a) : launch_pass<true, false>(l, m, a)));
    else
        TRY((profile_d ? launch_pass<false, true>(l, m, a) : launch_pass<false, false>(l, m, a)));
    return finish(l, b, &w, &a);
}
