/* The boundary's large backward pass for 4 streams of bf16 on Hopper: the gradients dy and dh, x and f are read once,
 * dx and df written once. The stream y is not read: it is formed again from x and f.
 *
 * Blocks side by side own 256 channels of all streams each and keep their part of w in shared memory; a line of C / 256
 * blocks walks down its tiles of 8 tokens. Two groups of 8 warps work on tiles of their own, each with two stages,
 * which a helper thread fills and empties by bulk copies, one for a tensor's part of a tile: the time it takes to ask
 * for them counts. A group's warps meet once a tile; groups do not wait for each other.
 *   prepare_rows   what does not need sums over channels: back through Sinkhorn and the gates of post and res, dz, dp;
 *                  w as an operand. A step calls it long before (mhc_boundary_prepare), beside the backward pass of the
 *                  sublayer between
 *   reduction      (mhc_reduce.cu) sums over channels of norm and aggregate, and dw's rows of post and res, whose dp is
 *                  known by then
 *   close_records  the gates of pre
 *   the pass       y again; g = dy + pre da + dp w + scale y, the whole gradient of the stream; dx, df, and sums for
 *                  dcoef_in. dw's rows of pre: workers leave y in place of dy, and four helper warps multiply it by dp.
 *                  Some spare blocks add up what the reduction left by lines, and dz over rows
 *   finish_pass    sums for dcoef_in over the blocks of a line, and for dw over lines
 * w enters dp w as bf16, and dp as two halves: the error of rounding w is that of rounding dp w to bf16, which is what
 * a separate product would store. In dw y is what it is, bf16, and dp two halves.
 *
 * At the clock of a training step a tile's instructions fill most of the issue slots that memory leaves time for, so
 * workers spare them: products start from dy and scale y, pre comes divided by the norm's rms, bias and dropout have
 * kernels of their own. Of the registers some addresses are spilled:
 * 24 bytes, with dropout 76 (profile D: 44). */
#include "ops/mhc/hopper/mhc_reduce.cuh"

enum {
    /* A block starts with 96 for each of 640 threads, and that is all there is to share. */
    WORKER_REGISTERS = 104,
    HELPER_REGISTERS = 64,
    TOKENS = 8, /* of a tile */
    STAGES = 2, /* of a group */
    BLOCKS = CL_COLS / 64,
    HELPERS_BARRIER = 1 + CL_GROUPS,    /* its number: groups have those before */
    DONE_BARRIER = HELPERS_BARRIER + 1, /* the first of those of the stages */
    DONE_THREADS = CL_GROUP_THREADS + CL_THREADS - CL_WORKERS,
    MIXES = MHC_MIXES,
    LINES = TOKENS * CL_ROW, /* bytes of 64 channels of all tokens */
    FRAG = MHC_FRAG,
    W_BYTES = BLOCKS * CL_N * 4 * FRAG,
    RECORD = MHC_RECORD,
};
struct bwd_tile { /* each a multiple of 1024 bytes, as swizzled tiles want */
    char x[BLOCKS][CL_N][LINES], dy[BLOCKS][CL_N][LINES], f[BLOCKS][LINES], dh[BLOCKS][LINES];
};
struct bwd_rows { /* what belongs to the tokens of a tile */
    float coef[TOKENS][CL_LOGITS], record[TOKENS][RECORD], mixes[BLOCKS][TOKENS][MIXES];
    uint64_t full, unused;
};
struct bwd_shared {
    struct bwd_tile tile[CL_GROUPS][STAGES];
    uint4 w[W_BYTES / 16];
    float gain[CL_COLS]; /* as dh is multiplied by it */
    struct bwd_rows rows[CL_GROUPS][STAGES];
    uint64_t w_here;
};
static_assert(sizeof(struct bwd_rows) % 16 == 0, "bulk copies, and loads of 16 bytes");
static_assert(sizeof(struct bwd_shared) <= 227 * 1024, "shared memory of a block");

/* What the reduction pass left by lines: dgain, and dw's rows of post and res. Either may be NULL. */
struct reduced_sums {
    const float *dgain_parts, *dw_parts;
    float *dgain;
    struct view products;
    int64_t d;
    int lines;
    bool acc_dgain;
};
/* What the parameters' gradients sum over rows: dz, and dz p / (rho + eps). dz may be NULL. */
struct row_sums {
    const float *dz, *p;
    int64_t dz_stride, p_stride;
    double *parts; /* [MHC_SPARE, 2, N] */
};
struct pass_bwd {
    const uint4 *operands;
    const float *records, *coef_in, *bias;
    struct norm_args norm;
    float *mixes;  /* [ranks, rows, MIXES] */
    float *dw_pre; /* [lines, 4, K] or NULL */
    int64_t rows, d;
    int tiles, ranks, lines;
    bool has_dy;
    struct drop_rule drop;
    struct reduced_sums reduced;
    struct row_sums sums;
};

/* ---- the pass -------------------------------------------------------------------------------- */

#if HOPPER_CODE

/* 4 numbers a thread, with many loads under way: few threads do this beside a pass that keeps memory busy. */
static __device__ void add_reduced(const struct reduced_sums &a, int64_t first, int64_t step)
{
    int64_t k = CL_N * a.d, count = (CL_LOGITS - CL_N) * k;
    for (int64_t c = first; a.dgain_parts != NULL && c < a.d; c += step)
        a.dgain[c] = (a.acc_dgain ? a.dgain[c] : 0.0f) + sum_of(a.dgain_parts + c, a.lines, a.d);
    for (int64_t i = 4 * first; a.dw_parts != NULL && i < count; i += 4 * step) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (int l = 0; l < a.lines; l++)
            sum = add4(sum, *(const float4 *)(a.dw_parts + l * count + i));
        float *to = at<float>(a.products, CL_N + i / k) + i % k;
        to[0] = sum.x;
        to[1] = sum.y;
        to[2] = sum.z;
        to[3] = sum.w;
    }
}

/* By spare blocks, of which each warp takes every so many-th row: a lane for a logit. */
static __device__ void sum_rows(const struct row_sums &a, int64_t rows, int spare,
                                double (*part)[CL_THREADS / 32][CL_LOGITS])
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (lane < CL_LOGITS) {
        enum { BATCH = 8, STEP = MHC_SPARE * (CL_THREADS / 32) };
        double beta = 0, alpha = 0;
        for (int64_t first = spare * (CL_THREADS / 32) + warp; first < rows; first += BATCH * STEP) {
            float dz[BATCH], p[BATCH], rho[BATCH];
            UNROLLED (i, BATCH) {
                int64_t row = min(first + i * STEP, rows - 1);
                dz[i] = first + i * STEP < rows ? a.dz[row * a.dz_stride + lane] : 0.0f;
                p[i] = a.p[row * a.p_stride + lane];
                rho[i] = a.p[row * a.p_stride + CL_LOGITS];
            }
            UNROLLED (i, BATCH) {
                beta += (double)dz[i];
                alpha += (double)(dz[i] * p[i] / (rho[i] + (float)MHC_EPS));
            }
        }
        part[0][warp][lane] = beta;
        part[1][warp][lane] = alpha;
    }
    __syncthreads();
    int item = (int)threadIdx.x;
    if (item < 2 * CL_LOGITS) {
        double sum = 0;
        for (int w = 0; w < CL_THREADS / 32; w++)
            sum += part[item / CL_LOGITS][w][item % CL_LOGITS];
        a.parts[spare * 2 * CL_LOGITS + item] = sum;
    }
}

/* Tile n of this line of blocks; group n % CL_GROUPS works on it. */
INLINE int tile_of(const struct pass_bwd &a, int n) { return (int)(blockIdx.x / a.ranks) + n * a.lines; }
/* What a stage holds, by name. */
struct stage {
    struct bwd_tile *tile;
    struct bwd_rows *rows;
};
INLINE struct stage stage_of(struct bwd_shared *s, int group, int n)
{
    struct stage st = {&s->tile[group][n], &s->rows[group][n]};
    return st;
}

/* Workers of a group -> helpers: a tile is done. A stage is refilled only after its helpers have met there, so that no
 * thread arrives twice before. */
INLINE int done_barrier(int group, int n) { return DONE_BARRIER + group * STAGES + n; }

struct bwd_maps {
    const CUtensorMap *x, *dy, *f, *dh, *dx, *df;
};

INLINE void load_tile(const struct pass_bwd &a, const struct stage &st, int tile, int rank, const struct bwd_maps &m)
{
    int row = tile * TOKENS, live = (int)min(a.rows - row, (int64_t)TOKENS);
    uint32_t coef = (uint32_t)(live * CL_LOGITS * 4), record = (uint32_t)(live * RECORD * 4);
    uint64_t *bar = &st.rows->full;
    int dy_row = a.has_dy ? row : a.tiles * TOKENS; /* outside: zeros */
    barrier_expect(bar, (uint32_t)sizeof(struct bwd_tile) + coef + record);
    bulk_load(st.rows->coef, a.coef_in + (int64_t)row * CL_LOGITS, coef, bar);
    bulk_load(st.rows->record, a.records + (int64_t)row * RECORD, record, bar);
    int line = rank * BLOCKS;
    tma_load_blocks(st.tile->x, m.x, line, row, bar);
    tma_load_blocks(st.tile->dy, m.dy, line, dy_row, bar);
    tma_load_blocks(st.tile->f, m.f, line, row, bar);
    tma_load_blocks(st.tile->dh, m.dh, line, row, bar);
}
INLINE void store_tile(const struct stage &st, int tile, int rank, const struct bwd_maps &m)
{
    int row = tile * TOKENS;
    tma_store_blocks(m.dx, rank * BLOCKS, row, st.tile->x);
    tma_store_blocks(m.df, rank * BLOCKS, row, st.tile->f);
    bulk_commit();
}

/* By one warp: sums for dcoef_in of a tile, over the blocks of channels. */
INLINE void leave_mixes(const struct pass_bwd &a, const struct bwd_rows *rows, int rank, int lane, int tile)
{
    for (int item = lane; item < TOKENS * MIXES / 4; item += 32) {
        int token = item / (MIXES / 4), v = item % (MIXES / 4) * 4;
        int64_t row = tile * TOKENS + token;
        float4 sum = *(const float4 *)&rows->mixes[0][token][v];
#pragma unroll
        for (int b = 1; b < BLOCKS; b++)
            sum = add4(sum, *(const float4 *)&rows->mixes[b][token][v]);
        if (row < a.rows)
            *(float4 *)(a.mixes + ((int64_t)rank * a.rows + row) * MIXES + v) = sum;
    }
}

/* dp of pre as the right operand of y^T dp: this lane's two tokens of logit lane / 4 % 4, high halves and low ones;
 * zeros beyond the last row. */
INLINE uint2 load_dp_pre(const struct pass_bwd &a, const struct stage &st, int tile, int lane)
{
    int token = lane % 4 * 2;
    uint2 dp = make_uint2(0, 0);
    UNROLLED (e, 2) {
        const uint16_t *from = (const uint16_t *)(st.rows->record[token + e] + REC_DP) + lane / 4 % CL_N;
        if (tile * TOKENS + token + e < a.rows) {
            dp.x |= (uint32_t)from[0] << 16 * e;
            dp.y |= (uint32_t)from[CL_LOGITS] << 16 * e;
        }
    }
    return dp;
}
/* Rows of pre of dw: y^T dp of a tile, for the 64 channels of this warp. Two streams share a product, one with k 0 - 7
 * and columns 0 - 3 (logits), the other with the rest: acc [pair of streams][channels of 16]. High halves of dp, then
 * low ones. */
INLINE void add_dw(const struct pass_bwd &a, const struct stage &st, int tile, int block, int lane,
                   float (&acc)[CL_N / 2][4][4])
{
    uint2 dp = load_dp_pre(a, st, tile, lane);
    bool first = lane / 4 < CL_N;
#pragma unroll
    for (int i = 0; i < CL_N; i += 2)
        UNROLLED (half, 2) {
            uint32_t y[4], z[4];
            const char *at = st.tile->dy[block][i] + in_tile(lane % 8, 4 * half + lane / 8);
            load_matrices_t(y, at);
            load_matrices_t(z, at + LINES);
            UNROLLED (c, 2) {
                uint32_t both[4] = {y[2 * c], y[2 * c + 1], z[2 * c], z[2 * c + 1]};
                mma_bf16(acc[i / 2][2 * half + c], both, first ? dp.x : 0, first ? 0 : dp.x);
                mma_bf16(acc[i / 2][2 * half + c], both, first ? dp.y : 0, first ? 0 : dp.y);
            }
        }
}
INLINE void leave_dw(const struct pass_bwd &a, int rank, int warp, int lane, const float (&acc)[CL_N / 2][4][4])
{
    float *to = a.dw_pre + (int64_t)(blockIdx.x / a.ranks) * CL_N * CL_N * a.d + rank * CL_COLS + warp * 64 + lane / 4;
    int stream = lane % 4 / 2, logit = lane % 2 * 2;
#pragma unroll
    for (int i = 0; i < CL_N; i += 2)
        UNROLLED (c, 4)
            UNROLLED (v, 4)
                to[(logit + v % 2) * CL_N * a.d + (i + stream) * a.d + 16 * c + 8 * (v / 2)] = acc[i / 2][c][v];
}

/* By four warps: bring tiles, take them away, and multiply y, which the workers leave in place of dy. Tiles come in
 * order, those of the groups in turn. One thread copies whole tiles: memory likes lines that belong together to be
 * requested together (with each warp bringing its own 64 channels as soon as it could, the pass was slower by 8 %). */
INLINE void help(const struct pass_bwd &a, struct bwd_shared *s, int rank, const struct bwd_maps &m)
{
    int block = (int)threadIdx.x / 32 - CL_WORKERS / 32, lane = (int)threadIdx.x % 32;
    bool copier = (int)threadIdx.x == CL_WORKERS;
    float acc[CL_N / 2][4][4] = {};
    for (int n = 0; copier && n < STAGES * CL_GROUPS && tile_of(a, n) < a.tiles; n++)
        load_tile(a, stage_of(s, n % CL_GROUPS, n / CL_GROUPS), tile_of(a, n), rank, m);
    for (int n = 0, tile; (tile = tile_of(a, n)) < a.tiles; n++) {
        struct stage st = stage_of(s, n % CL_GROUPS, n / CL_GROUPS % STAGES);
        int next = tile_of(a, n + STAGES * CL_GROUPS);
        named_barrier_of(done_barrier(n % CL_GROUPS, n / CL_GROUPS % STAGES), DONE_THREADS);
        if (copier)
            store_tile(st, tile, rank, m);
        if (a.dw_pre != NULL) {
            add_dw(a, st, tile, block, lane, acc);
            named_barrier<HELPERS_BARRIER, CL_THREADS - CL_WORKERS>();
        }
        if (copier) {
            bulk_wait_read<0>();
            if (next < a.tiles)
                load_tile(a, st, next, rank, m);
        }
    }
    if (a.dw_pre != NULL)
        leave_dw(a, rank, block, lane, acc);
    if (copier)
        bulk_wait<0>();
}

/* The place of a worker thread: one token and 8 channels of all streams. */
struct worker {
    int lane, c; /* c: channel of a stream */
    /* Where its parts are, in bytes. Of all that is shared, for the group's first stage: x (dy lies TILE_DY further), f
     * (dh TILE_DH further); its operands; its gain. Of a stage's rows: the rest. */
    int x, f, w, rest, gain, coef, record, dp, mixes;
};
/* The same for the stage at hand. */
struct own {
    char *x, *f, *rows;
};
INLINE const float *floats(const char *p) { return (const float *)p; }
enum { TILE_DY = BLOCKS * CL_N * LINES, TILE_DH = BLOCKS * LINES };

/* f as it was combined. */
template <bool EXTRA>
INLINE void load_f(const struct pass_bwd &a, const struct worker &k, const struct own &o, float (&f)[8])
{
    unpack<bf16>(load_raw(o.f), f);
    if (EXTRA && a.bias != NULL) {
        float bias[8];
        load_floats(a.bias + k.c, bias);
        UNROLLED (e, 8)
            f[e] += bias[e];
    }
}
INLINE float factor_of(const struct pass_bwd &a, uint32_t kept, int i, int e)
{
    return (kept >> (8 * i + e) & 1) != 0 ? a.drop.kept : 0.0f;
}

/* 8 channels of y as stored, from x and f. */
template <bool EXTRA, bool D>
INLINE void form_again(const struct pass_bwd &a, const struct worker &k, const struct own &o, uint32_t kept,
                       uint4 (&y)[CL_N])
{
    float in[CL_N][8], add[8], post[CL_N], res[CL_N * CL_N];
    UNROLLED (i, CL_N)
        unpack<bf16>(load_raw(o.x + i * LINES), in[i]);
    load_f<EXTRA>(a, k, o, add);
    load_floats(floats(o.rows + k.coef) + CL_N, post);
    load_floats(floats(o.rows + k.coef) + 2 * CL_N, res);
    UNROLLED (i, CL_N) {
        float v[8];
        UNROLLED (e, 8) {
            v[e] = __fmul_rn(D ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
            for (int l = 1; l < CL_N; l++)
                v[e] = fmaf(D ? res[l * CL_N + i] : res[i * CL_N + l], in[l][e], v[e]);
            if (EXTRA && a.drop.info != NULL)
                v[e] = add_dropped<true>(v[e], post[i], add[e], factor_of(a, kept, i, e));
            else
                v[e] = add_dropped<false>(v[e], post[i], add[e], 1.0f);
        }
        y[i] = repack<bf16>(v);
    }
}

/* Gradient of the aggregate, but for a factor of 1 / rms that weights have. */
INLINE void aggregate_gradient(const struct worker &k, const char *shared, const struct own &o,
                               const float (&weight)[CL_N], float m, const uint4 (&y)[CL_N], float (&da)[8])
{
    float gain[8], agg[8] = {};
    unpack<bf16>(load_raw(o.f + TILE_DH), da);
    load_floats(floats(shared + k.gain), gain);
    UNROLLED (e, 8)
        da[e] *= gain[e];
    add_streams(y, weight, agg);
    UNROLLED (e, 8)
        da[e] = fmaf(agg[e], -m, da[e]);
}

/* One step of sums over the 8 lanes of a token: this lane goes on with one half of the numbers. */
template <int HALF, int COUNT> INLINE void fold(float (&v)[COUNT], int lane, int bit)
{
    bool upper = (lane & bit) != 0;
    UNROLLED (i, HALF) {
        float keep = upper ? v[i + HALF] : v[i], send = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, send, bit);
    }
}
/* This lane is left with numbers 2 g and 2 g + 1 of 16, g = lane / 4, and number g / 2 of 4. */
INLINE void token_sums(float (&of16)[CL_N * CL_N], float (&of4)[CL_N], int lane)
{
    fold<8>(of16, lane, 16);
    fold<4>(of16, lane, 8);
    fold<2>(of16, lane, 4);
    fold<2>(of4, lane, 16);
    fold<1>(of4, lane, 8);
    of4[0] += __shfl_xor_sync(0xffffffffu, of4[0], 4);
}

/* The stream's gradient and everything that follows from it. */
template <bool EXTRA, bool D>
INLINE void finish_tile(const struct pass_bwd &a, const struct worker &k, const char *shared, const struct own &o,
                        uint32_t kept, int done, const uint4 (&y)[CL_N])
{
    float grad[CL_N][8];
    {
        const float *record = floats(o.rows + k.record);
        const uint32_t *dp = (const uint32_t *)(o.rows + k.dp);
        float4 by = *(const float4 *)(record + REC_PRE);
        float4 more = *(const float4 *)(record + REC_RSTD);
        float da[8], weight[CL_N] = {by.x, by.y, by.z, by.w}, scale = more.z;
        uint32_t right[3] = {dp[0], dp[4], dp[8]};
        aggregate_gradient(k, shared, o, weight, more.y, y, da);
        UNROLLED (i, CL_N) {
            float v[8], d[8];
            unpack<bf16>(load_raw(o.x + TILE_DY + i * LINES), d);
            unpack<bf16>(y[i], v);
            if (a.dw_pre != NULL)
                store_raw(o.x + TILE_DY + i * LINES, y[i]);
            UNROLLED (t, 4) {
                float acc[4] = {d[2 * t], scale * v[2 * t], d[2 * t + 1], scale * v[2 * t + 1]};
                uint4 left = *(const uint4 *)(shared + k.w + (4 * i + t) * FRAG);
                uint2 rest = *(const uint2 *)(shared + k.rest + (4 * i + t) * FRAG);
                mma_bf16(acc, &left.x, right[0], right[1]);
                mma_bf16_k8(acc, rest.x, rest.y, right[2]);
                UNROLLED (e, 2) {
                    grad[i][2 * t + e] = fmaf(weight[i], da[2 * t + e], acc[2 * e]) + acc[2 * e + 1];
                }
            }
        }
    }
    float f[8], df[8] = {}, with_f[CL_N] = {}, with_x[CL_N * CL_N] = {};
    {
        float post[CL_N];
        load_floats(floats(o.rows + k.coef) + CL_N, post);
        load_f<EXTRA>(a, k, o, f);
        UNROLLED (i, CL_N)
            UNROLLED (e, 8) {
                float dropped = EXTRA && a.drop.info != NULL ? grad[i][e] * factor_of(a, kept, i, e) : grad[i][e];
                df[e] = fmaf(post[i], dropped, df[e]);
                with_f[i] = fmaf(dropped, f[e], with_f[i]);
            }
        store_raw(o.f, repack<bf16>(df));
    }
    float res[CL_N * CL_N];
    load_floats(floats(o.rows + k.coef) + 2 * CL_N, res);
    UNROLLED (j, CL_N) {
        float v[8], out[8] = {}, mix[CL_N];
        UNROLLED (i, CL_N)
            mix[i] = D ? res[j * CL_N + i] : res[i * CL_N + j];
        char *place = o.x + j * LINES;
        unpack<bf16>(load_raw(place), v);
        UNROLLED (i, CL_N)
            UNROLLED (e, 8) {
                with_x[i * CL_N + j] = fmaf(grad[i][e], v[e], with_x[i * CL_N + j]);
                out[e] = fmaf(mix[i], grad[i][e], out[e]);
            }
        store_raw(place, repack<bf16>(out));
    }
    fence_async_proxy();
    named_barrier_arrive(done, DONE_THREADS);
    token_sums(with_x, with_f, k.lane);
    float *mixes = (float *)(o.rows + k.mixes);
    int g = k.lane / 4;
    if (D) {
        UNROLLED (e, 2)
            mixes[CL_N + mix_at(D, CL_N, (2 * g + e) / CL_N, (2 * g + e) % CL_N)] = with_x[e];
    } else {
        *(float2 *)(mixes + CL_N + 2 * g) = make_float2(with_x[0], with_x[1]);
    }
    if (g % 2 == 0)
        mixes[g / 2] = with_f[0];
}

template <bool EXTRA, bool D> INLINE void work(const struct pass_bwd &a, struct bwd_shared *s, int group, int rank)
{
    struct worker k = {};
    int thread = (int)threadIdx.x % CL_GROUP_THREADS, warp = thread / 32, block = warp % BLOCKS,
        first = warp / BLOCKS * 4, j = 0;
    k.lane = thread % 32;
    int token = first + k.lane % 4, piece = piece_of(k.lane / 4);
    k.c = rank * CL_COLS + block * 64 + piece * 8;
    k.x = (int)offsetof(struct bwd_shared, tile) + group * STAGES * (int)sizeof(struct bwd_tile) +
          block * CL_N * LINES + in_tile(token, piece);
    k.f = (int)offsetof(struct bwd_shared, tile) + group * STAGES * (int)sizeof(struct bwd_tile) +
          (int)offsetof(struct bwd_tile, f) + block * LINES + in_tile(token, piece);
    k.coef = (int)offsetof(struct bwd_rows, coef) + token * CL_LOGITS * 4;
    k.record = (int)offsetof(struct bwd_rows, record) + token * RECORD * 4;
    /* this lane's column of the product: token lane / 8 of this warp's 4, high halves in even columns */
    k.dp = (int)offsetof(struct bwd_rows, record) +
           ((first + k.lane / 8) * RECORD + REC_DP + ((k.lane / 4 & 1) != 0 ? CL_LOGITS / 2 : 0) + k.lane % 4) * 4;
    k.mixes = (int)offsetof(struct bwd_rows, mixes) + (block * TOKENS + token) * MIXES * 4;
    k.w = (int)offsetof(struct bwd_shared, w) + block * CL_N * 4 * FRAG + k.lane * 16;
    k.rest = (int)offsetof(struct bwd_shared, w) + block * CL_N * 4 * FRAG + 512 + k.lane * 8;
    k.gain = (int)offsetof(struct bwd_shared, gain) + (block * 64 + piece * 8) * 4;
    barrier_wait_bounded(&s->w_here, 0);
    for (int tile; (tile = tile_of(a, CL_GROUPS * j + group)) < a.tiles; j++) {
        struct bwd_rows *rows = &s->rows[group][j & 1];
        struct own o = {(char *)s + k.x + (j & 1) * (int)sizeof(struct bwd_tile),
                        (char *)s + k.f + (j & 1) * (int)sizeof(struct bwd_tile), (char *)rows};
        uint4 y[CL_N];
        barrier_wait_bounded(&rows->full, j >> 1 & 1);
        uint32_t kept = EXTRA && a.drop.info != NULL ? kept_channels(a.drop, a.d, tile * TOKENS + token, k.c) : 0;
        form_again<EXTRA, D>(a, k, o, kept, y);
        finish_tile<EXTRA, D>(a, k, (const char *)s, o, kept, done_barrier(group, j & 1), y);
        /* Whoever sums up reads before the next barrier; the same place is written again after it. And a group that
         * stays in step is done with its stage sooner. */
        group_barrier(group);
        if (warp == j % CL_WARPS)
            leave_mixes(a, rows, rank, k.lane, tile);
    }
}

#endif /* HOPPER_CODE */

/* D: profile D. */
template <bool EXTRA, bool D>
static __global__ void __launch_bounds__(CL_THREADS, 1)
    boundary_bwd_pass(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy,
                      const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap dh,
                      const __grid_constant__ CUtensorMap dx, const __grid_constant__ CUtensorMap df,
                      const __grid_constant__ struct pass_bwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct bwd_shared *s = (struct bwd_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32, spare = (int)blockIdx.x - a.ranks * a.lines;
    if (spare >= 0) {
        add_reduced(a.reduced, spare * CL_THREADS + (int)threadIdx.x, MHC_SPARE * CL_THREADS);
        if (a.sums.dz != NULL)
            sum_rows(a.sums, a.rows, spare, (double(*)[CL_THREADS / 32][CL_LOGITS]) shared);
        return;
    }
    /* Coefficients beyond the last row stay what they were: zeros, or those of an earlier tile; x and f are zeros
     * there, and so is y. */
    for (int i = (int)threadIdx.x; i < CL_GROUPS * STAGES * TOKENS * CL_LOGITS; i += CL_THREADS) {
        struct bwd_rows *rows = &s->rows[0][0] + i / (TOKENS * CL_LOGITS);
        (&rows->coef[0][0])[i % (TOKENS * CL_LOGITS)] = 0;
    }
    if (threadIdx.x < CL_COLS)
        s->gain[threadIdx.x] = a.norm.gain == NULL ? 1.0f : a.norm.gain[rank * CL_COLS + threadIdx.x] + a.norm.one;
    fence_async_proxy();
    if (threadIdx.x == 0) {
        barrier_init(&s->w_here, 1);
        for (int i = 0; i < CL_GROUPS * STAGES; i++) {
            struct bwd_rows *rows = &s->rows[0][0] + i;
            barrier_init(&rows->full, 1);
        }
        barrier_init_done();
        barrier_expect(&s->w_here, W_BYTES);
        bulk_load(s->w, a.operands + (int64_t)rank * (W_BYTES / 16), W_BYTES, &s->w_here);
    }
    __syncthreads();
    struct bwd_maps m = {&x, &dy, &f, &dh, &dx, &df};
    if (warp < CL_WORKERS / 32) {
        registers_up<WORKER_REGISTERS>();
        work<EXTRA, D>(a, s, warp / CL_WARPS, rank);
    } else {
        registers_down<HELPER_REGISTERS>();
        help(a, s, rank, m);
    }
#endif
}

struct pass_work {
    uint4 *operands;
    float *dz_ready; /* NULL: dz is written in its place */
    float *records, *mixes, *dots, *dgain, *dw, *dw_pre;
    double *row_parts;
};
static int64_t pass_lines(int64_t rows, int64_t d)
{
    return min_i64(max_i64(CL_BLOCKS / (d / CL_COLS), 1), max_i64(ceil_div(rows, TOKENS), 1));
}
static void divide_rows(const struct mhc_boundary_bwd_args *b, struct carve *c, struct pass_work *w)
{
    w->operands = (uint4 *)carve_bytes(c, b->dx.dim[1] / CL_N / CL_COLS * W_BYTES);
    w->records = carve_floats(c, b->dx.dim[0] * RECORD);
}
/* The part that can be made before dh is known: the same, and dz. */
static int64_t divide_ready(const struct mhc_boundary_bwd_args *b, struct pass_work *w)
{
    struct carve c = {(char *)b->ready.data, 0};
    divide_rows(b, &c, w);
    w->dz_ready = carve_floats(&c, b->dx.dim[0] * CL_LOGITS);
    return c.used;
}
int64_t mhc_boundary_bwd_pass_ready_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct pass_work w;
    return divide_ready(b, &w);
}
int mhc_boundary_bwd_pass_ready(struct lane *l, const struct mhc_boundary_bwd_args *b)
{
    struct pass_work w;
    divide_ready(b, &w);
    return mhc_prepare_rows(l, b, w.records, w.operands, {w.dz_ready, CL_LOGITS});
}

static int64_t divide(const struct mhc_boundary_bwd_args *b, void *base, struct pass_work *w)
{
    struct carve c = {(char *)base, 0};
    int64_t rows = b->dx.dim[0], k = b->dx.dim[1], d = k / CL_N, ranks = d / CL_COLS;
    *w = {};
    if (b->ready.rank > 0)
        divide_ready(b, w);
    else
        divide_rows(b, &c, w);
    w->mixes = carve_floats(&c, ranks * rows * MIXES);
    w->dots = carve_floats(&c, ranks * rows * MHC_REDUCE_DOTS);
    w->dgain = carve_floats(&c, mhc_reduce_lines(rows, d) * d);
    if (b->products.rank > 0) {
        w->dw = carve_floats(&c, mhc_reduce_lines(rows, d) * (CL_LOGITS - CL_N) * k);
        w->dw_pre = carve_floats(&c, pass_lines(rows, d) * CL_N * k);
        w->row_parts = (double *)carve_bytes(&c, MHC_SPARE * 2 * CL_LOGITS * (int64_t)sizeof(double));
    }
    return c.used;
}
int64_t mhc_boundary_bwd_pass_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct pass_work w;
    return divide(b, NULL, &w);
}

/* Operands and records, and the reduction pass over the stream that they need and that needs them. */
static int prepare(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct pass_work *w,
                   struct reduced_sums *sums)
{
    struct mhc_reduce_args reduce = {.y = b->y,
                                     .dh = b->dh,
                                     .records = w->records,
                                     .dots = w->dots,
                                     .dgain = present(&b->dgain) ? w->dgain : NULL,
                                     .dw = w->dw,
                                     .norm = norm_of(b)};
    *sums = {.dgain_parts = reduce.dgain,
             .dw_parts = w->dw,
             .dgain = floats(&b->dgain),
             .products = view_of(&b->products),
             .d = b->dh.dim[1],
             .lines = (int)mhc_reduce_lines(b->dh.dim[0], b->dh.dim[1]),
             .acc_dgain = b->acc_dgain};
    if (w->dz_ready == NULL)
        TRY(mhc_prepare_rows(l, b, w->records, w->operands, view_of(&b->dz)));
    TRY(mhc_reduce(l, &reduce));
    return mhc_close_records(l, b, w->records, w->dots, w->dz_ready);
}
static int finish(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct pass_work *w,
                  const struct pass_bwd *p)
{
    struct mhc_after_pass a = {.mixes = w->mixes,
                               .dw_parts = w->dw_pre,
                               .row_parts = w->row_parts,
                               .dcoef = view_of(&b->dcoef_in),
                               .products = view_of(&b->products),
                               .rows = p->rows,
                               .k = CL_N * p->d,
                               .ranks = p->ranks,
                               .lines = p->lines};
    return mhc_finish_pass(l, &a);
}

struct pass_maps {
    CUtensorMap x, dy, f, dh, dx, df;
};
template <bool EXTRA, bool D>
static int launch_pass(struct lane *l, const struct pass_maps &m, const struct pass_bwd &a)
{
    NEEDS_SMEM(l, (boundary_bwd_pass<EXTRA, D>), sizeof(struct bwd_shared));
    LAUNCH(l, (boundary_bwd_pass<EXTRA, D>), (unsigned)(a.ranks * a.lines + MHC_SPARE), CL_THREADS,
           sizeof(struct bwd_shared), m.x, m.dy, m.f, m.dh, m.dx, m.df, a);
    return ST_OK;
}

int mhc_boundary_bwd_pass(struct lane *l, const struct mhc_boundary_bwd_args *b, void *base)
{
    struct pass_work w;
    struct pass_maps m;
    int64_t rows = b->dx.dim[0], k = b->dx.dim[1], d = k / CL_N;
    divide(b, base, &w);
    struct pass_bwd a = {.operands = w.operands,
                         .records = w.records,
                         .coef_in = floats(&b->coef_in),
                         .bias = floats(&b->bias),
                         .norm = norm_of(b),
                         .mixes = w.mixes,
                         .dw_pre = w.dw_pre,
                         .rows = rows,
                         .d = d,
                         .tiles = (int)ceil_div(rows, TOKENS),
                         .ranks = (int)(d / CL_COLS),
                         .lines = (int)pass_lines(rows, d),
                         .has_dy = present(&b->dy),
                         .drop = drop_rule_of(&b->drop)};
    TRY(prepare(l, b, &w, &a.reduced));
    if (present(&b->products))
        a.sums = {floats(&b->dz), floats(&b->stat), b->dz.stride[0], b->stat.stride[0], w.row_parts};
    TRY(tensor_map_blocks(l, &m.x, b->x.data, rows, CL_N, d, b->x.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_blocks(l, &m.dx, b->dx.data, rows, CL_N, d, b->dx.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_blocks(l, &m.f, b->f.data, rows, 1, d, b->f.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_blocks(l, &m.df, b->df.data, rows, 1, d, b->df.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_blocks(l, &m.dh, b->dh.data, rows, 1, d, b->dh.stride[0], TOKENS, CL_COLS));
    m.dy = m.dx;
    if (a.has_dy)
        TRY(tensor_map_blocks(l, &m.dy, b->dy.data, rows, CL_N, d, b->dy.stride[0], TOKENS, CL_COLS));
    bool profile_d = b->rule.profile == MHC_D;
    if (a.drop.info != NULL || a.bias != NULL)
        TRY((profile_d ? launch_pass<true, true>(l, m, a) : launch_pass<true, false>(l, m, a)));
    else
        TRY((profile_d ? launch_pass<false, true>(l, m, a) : launch_pass<false, false>(l, m, a)));
    return finish(l, b, &w, &a);
}
