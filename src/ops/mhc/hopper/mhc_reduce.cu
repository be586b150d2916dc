/* One pass over the stream y before the boundary's large backward pass, for 4 streams of bf16 on Hopper: the sums over
 * channels that norm and aggregate need in their backward pass, dgain, and dw = dp^T y as far as dp is known without
 * those sums: rows of post and res. (Those of pre are left to the pass, which has y again.)
 *
 * Blocks side by side own 256 channels of all streams each; a line of C / 256 blocks walks down tiles of 16 tokens,
 * which bulk copies bring into a ring of stages. Every warp first takes one token for the dots, then 64 channels of one
 * stream and all 16 tokens for dw: y is the left operand of mma, transposed on the way from shared memory, and the sums
 * over all tokens of a line stay in registers. Warps never wait for each other, only for stages, which they fill in
 * turn. Sums of lines are added in order afterwards: their number depends on shapes only. */
#include "ops/mhc/hopper/mhc_reduce.cuh"

enum {
    TOKENS = 16, /* of a tile */
    STAGES = 5,
    BEHIND = 2, /* a stage is refilled when its tile is so many tiles back: then no wait is needed */
    BLOCKS = CL_COLS / 64,
    WARPS = CL_N * BLOCKS,
    THREADS = 32 * WARPS,
    LINES = TOKENS * CL_ROW, /* bytes of 64 channels of all tokens */
    TILES = CL_LOGITS / 8,   /* of 8 columns of dw's product */
    DOTS = MHC_REDUCE_DOTS,
};
static_assert(WARPS == TOKENS && 32 * 8 == CL_COLS, "a warp takes a token for the dots");
struct reduce_tile { /* a multiple of 1024 bytes, as swizzled tiles want */
    char y[BLOCKS * CL_N * LINES], dh[BLOCKS * LINES];
};
struct reduce_shared {
    struct reduce_tile tile[STAGES];
    float record[STAGES][TOKENS][MHC_RECORD];
    float gain[CL_COLS]; /* as dh is multiplied by it */
    uint64_t full[STAGES], used[STAGES];
};
static_assert(sizeof(struct reduce_shared) <= 227 * 1024, "shared memory of a block");

struct reduction {
    const float *records;
    float *dots, *dgain, *dw; /* dgain, dw may be NULL */
    struct norm_args norm;
    int64_t rows, d;
    int tiles, ranks, lines;
};

#if HOPPER_CODE

INLINE int tile_of(const struct reduction &a, int j) { return (int)blockIdx.x / a.ranks + j * a.lines; }

INLINE void load_tile(const struct reduction &a, struct reduce_shared *s, int j, int rank, const CUtensorMap *y,
                      const CUtensorMap *dh)
{
    int stage = j % STAGES, row = tile_of(a, j) * TOKENS, live = (int)min(a.rows - row, (int64_t)TOKENS);
    uint32_t record = (uint32_t)(live * MHC_RECORD * 4);
    uint64_t *bar = &s->full[stage];
    barrier_expect(bar, (uint32_t)sizeof(struct reduce_tile) + record);
    bulk_load(s->record[stage], a.records + (int64_t)row * MHC_RECORD, record, bar);
    tma_load_blocks(s->tile[stage].y, y, rank * BLOCKS, row, bar);
    tma_load_blocks(s->tile[stage].dh, dh, rank * BLOCKS, row, bar);
}

/* 8 sums over the warp: lane 4 i is left with number i. */
INLINE float sum_dots(float (&v)[DOTS], int lane)
{
#pragma unroll
    for (int half = DOTS / 2, bit = 16; half > 0; half /= 2, bit /= 2) {
        bool upper = (lane & bit) != 0;
        UNROLLED (i, half) {
            float keep = upper ? v[i + half] : v[i], send = upper ? v[i] : v[i + half];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, send, bit);
        }
    }
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], 2);
    return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

/* Values of one token, 8 channels a lane. */
INLINE void make_dots(const struct reduction &a, const struct reduce_shared *s, int token, int lane, int stage,
                      int64_t row, int rank, float (&dgain)[8])
{
    const struct reduce_tile *t = &s->tile[stage];
    const float *record = s->record[stage][token];
    int at = in_tile(token, lane % 8), block = lane / 8;
    float4 by = *(const float4 *)(record + REC_PRE);
    float pre[CL_N] = {by.x, by.y, by.z, by.w};
    uint4 y[CL_N];
    float u[8], agg[8] = {}, dots[DOTS] = {};
    UNROLLED (i, CL_N)
        y[i] = load_raw(t->y + (block * CL_N + i) * LINES + at);
    unpack<bf16>(load_raw(t->dh + block * LINES + at), u);
    add_streams(y, pre, agg);
    UNROLLED (e, 8)
        dgain[e] = fmaf(u[e], agg[e], dgain[e]);
    float gain[8];
    load_floats(s->gain + lane * 8, gain);
    UNROLLED (e, 8)
        u[e] *= gain[e];
    UNROLLED (i, CL_N) {
        float v[8];
        unpack<bf16>(y[i], v);
        UNROLLED (e, 8) {
            dots[i] = fmaf(v[e], u[e], dots[i]);
            dots[CL_N + i] = fmaf(v[e], agg[e], dots[CL_N + i]);
        }
    }
    float sum = sum_dots(dots, lane);
    if (lane % 4 == 0 && row < a.rows)
        a.dots[((int64_t)rank * a.rows + row) * DOTS + lane / 4] = sum;
}

/* acc [channels of 16][logits of 8] += y^T dp of a tile: high halves of dp, then low ones. */
INLINE void multiply(const struct reduce_shared *s, int warp, int lane, int stage, float (&acc)[4][TILES][4])
{
    uint32_t b[TILES][4]; /* high, of tokens 0-7 and 8-15; low */
    int row = lane % 16, half = lane / 16;
    uint32_t y = shared_address(s->tile[stage].y + warp * LINES + in_tile(lane % 8 + half * 8, lane / 8 % 2));
    UNROLLED (t, TILES) {
        const bf16 *dp = (const bf16 *)(s->record[stage][row] + REC_DP);
        load_matrices_t(b[t], dp + half * CL_LOGITS + 8 * t);
    }
    UNROLLED (c, 4) {
        uint32_t v[4];
        /* two pieces further: pieces are exchanged by exclusive or, and tiles aligned */
        load_matrices_t(v, y ^ (uint32_t)c << 5);
        UNROLLED (t, TILES) {
            mma_bf16(acc[c][t], v, b[t][0], b[t][1]);
            mma_bf16(acc[c][t], v, b[t][2], b[t][3]);
        }
    }
}

INLINE void leave_dgain(const struct reduction &a, struct reduce_shared *s, int warp, int lane, int rank,
                        const float (&dgain)[8])
{
    float *parts = (float *)s->tile; /* [WARPS][CL_COLS], when all tiles are done with */
    __syncthreads();
    store_floats(parts + warp * CL_COLS + lane * 8, dgain);
    __syncthreads();
    if (threadIdx.x < CL_COLS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += parts[w * CL_COLS + threadIdx.x];
        a.dgain[(int64_t)(blockIdx.x / a.ranks) * a.d + rank * CL_COLS + threadIdx.x] = sum;
    }
}

/* Rows of post and res; those of pre are zeros and left out. */
INLINE void leave_dw(const struct reduction &a, int warp, int lane, int rank, const float (&acc)[4][TILES][4])
{
    int g = lane / 4, q = lane % 4;
    int64_t k = CL_N * a.d, column = warp % CL_N * a.d + rank * CL_COLS + warp / CL_N * 64;
    float *to = a.dw + (int64_t)(blockIdx.x / a.ranks) * (CL_LOGITS - CL_N) * k;
    UNROLLED (c, 4)
        UNROLLED (t, TILES)
            UNROLLED (v, 4) {
                int logit = 8 * t + 2 * q + v % 2;
                if (logit >= CL_N)
                    to[(logit - CL_N) * k + column + 16 * c + 8 * (v / 2) + g] = acc[c][t][v];
            }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    reduce_stream(const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap dh,
                  const __grid_constant__ struct reduction a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct reduce_shared *s = (struct reduce_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float acc[4][TILES][4] = {}, dgain[8] = {};
    /* In the last tile, records beyond the last row stay what they were: zeros, or those of an earlier tile; y is zero
     * there. */
    for (int i = (int)threadIdx.x; i < STAGES * TOKENS * MHC_RECORD; i += THREADS)
        (&s->record[0][0][0])[i] = 0;
    fence_async_proxy();
    if (threadIdx.x < CL_COLS)
        s->gain[threadIdx.x] = a.norm.gain == NULL ? 1.0f : a.norm.gain[rank * CL_COLS + threadIdx.x] + a.norm.one;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s->full[i], 1);
            barrier_init(&s->used[i], WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int j = 0; j < STAGES && tile_of(a, j) < a.tiles; j++)
            load_tile(a, s, j, rank, &y, &dh);
    for (int j = 0, tile; (tile = tile_of(a, j)) < a.tiles; j++) {
        int stage = j % STAGES;
        barrier_wait_bounded(&s->full[stage], (uint32_t)(j / STAGES) & 1);
        make_dots(a, s, warp, lane, stage, (int64_t)tile * TOKENS + warp, rank, dgain);
        if (a.dw != NULL)
            multiply(s, warp, lane, stage, acc);
        __syncwarp();
        if (lane == 0) {
            int back = j - BEHIND, next = back + STAGES;
            barrier_arrive(&s->used[stage]);
            if (warp == j % WARPS && back >= 0 && tile_of(a, next) < a.tiles) {
                barrier_wait_bounded(&s->used[back % STAGES], (uint32_t)(back / STAGES) & 1);
                load_tile(a, s, next, rank, &y, &dh);
            }
        }
    }
    if (a.dw != NULL)
        leave_dw(a, warp, lane, rank, acc);
    if (a.dgain != NULL)
        leave_dgain(a, s, warp, lane, rank, dgain);
#endif
}

int64_t mhc_reduce_lines(int64_t rows, int64_t d)
{
    return min_i64(max_i64(CL_BLOCKS / (d / CL_COLS), 1), max_i64(ceil_div(rows, TOKENS), 1));
}

int mhc_reduce(struct lane *l, const struct mhc_reduce_args *b)
{
    CUtensorMap y, dh;
    int64_t rows = b->y.dim[0], d = b->dh.dim[1];
    struct reduction a = {.records = b->records,
                          .dots = b->dots,
                          .dgain = b->dgain,
                          .dw = b->dw,
                          .norm = b->norm,
                          .rows = rows,
                          .d = d,
                          .tiles = (int)ceil_div(rows, TOKENS),
                          .ranks = (int)(d / CL_COLS),
                          .lines = (int)mhc_reduce_lines(rows, d)};
    TRY(tensor_map_blocks(l, &y, b->y.data, a.rows, CL_N, a.d, b->y.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_blocks(l, &dh, b->dh.data, a.rows, 1, a.d, b->dh.stride[0], TOKENS, CL_COLS));
    NEEDS_SMEM(l, reduce_stream, sizeof(struct reduce_shared));
    LAUNCH(l, reduce_stream, (unsigned)(a.ranks * a.lines), THREADS, sizeof(struct reduce_shared), y, dh, a);
    return ST_OK;
}
