/* The boundary forward for 4 streams of bf16 on Hopper: a pass that reads x and f and writes y, with the projection of y inside, a small
 * kernel for the coefficients, and the aggregate with its norm (mhc_mix.cu).
 *
 * In the pass, blocks side by side own 256 channels of all streams each, and keep their part of w in shared memory, as operands of
 * mma_bf16 (mhc_sliced.cu makes them); a line of C / 256 blocks walks down its tiles of 16 tokens. In a block
 *   copiers  bring x, f and coefficients of a tile (bulk copies) and take y and the tile's sums away
 *   workers  two groups of 8 warps, each with tiles of its own: y = combine, rounded, into the tile; products with w and the sum of
 *            squares over the block's channels.
 * Sums of the blocks of a line are added in order by the coefficients' kernel. */
#include "ops/mhc/mhc_pass.cuh"

enum {
    /* A block starts with 96 for each of 640 threads, and that is all there is to share. */
    WORKER_REGISTERS = 112,
    HELPER_REGISTERS = 32,
    TOKENS = 16, /* of a tile */
    SUMS = 28,   /* 24 projections, the sum of squares, 3 unused */
    X_BYTES = TOKENS * CL_N * CL_COLS * 2,
    F_BYTES = TOKENS * CL_COLS * 2,
    COEF_BYTES = TOKENS * CL_LOGITS * 4,
    W_BYTES = CL_COLS * CL_N * CL_LOGITS * 2 * 2,
};

struct pass_fwd {
    const uint4 *operands;
    const float *coef_in, *bias, *a_pre, *a_post, *a_res, *beta;
    float *stat, *coef, *sums; /* sums [tiles, ranks, TOKENS, SUMS] */
    int64_t stat_stride, coef_stride, rows, d;
    int tiles, ranks, lines, iterations;
    bool profile_d, round_bf16;
    struct drop_rule drop;
};

struct fwd_tile { /* a multiple of 1024 bytes, as swizzled tiles want */
    char x[X_BYTES], f[F_BYTES];
};
struct fwd_shared {
    struct fwd_tile tile[CL_GROUPS];
    uint4 w[W_BYTES / 16];
    float coef[CL_GROUPS][TOKENS][CL_LOGITS];
    float part[CL_GROUPS][CL_WARPS][TOKENS][SUMS];
    float sums[CL_GROUPS][2][TOKENS][SUMS]; /* used in turn */
    uint64_t w_here, full[CL_GROUPS], formed[CL_GROUPS], summed[CL_GROUPS];
};

#if HOPPER_CODE

__device__ __forceinline__ int line_of(const struct pass_fwd &a) { return (int)blockIdx.x / a.ranks; }
/* This line's tiles of a group: tile_of(0), tile_of(1), ... below a.tiles. */
__device__ __forceinline__ int tile_of(const struct pass_fwd &a, int group, int j) { return line_of(a) + (CL_GROUPS * j + group) * a.lines; }

static __device__ __forceinline__ void bring(const struct pass_fwd &a, struct fwd_shared *s, int group, int rank, int tile, const CUtensorMap *x, const CUtensorMap *f)
{
    struct fwd_tile *st = &s->tile[group];
    int row = tile * TOKENS, live = (int)min(a.rows - row, (int64_t)TOKENS);
    uint32_t coef = (uint32_t)(live * CL_LOGITS * 4);
    barrier_expect(&s->full[group], X_BYTES + F_BYTES + coef);
    bulk_load(s->coef[group], a.coef_in + (int64_t)row * CL_LOGITS, coef, &s->full[group]);
#pragma unroll
    for (int b = 0; b < CL_COLS / 64; b++) {
        int col = rank * CL_COLS + b * 64;
        tma_load_2d(st->x + b * (X_BYTES / 4), x, col, row * CL_N, &s->full[group]);
        tma_load_2d(st->f + b * (F_BYTES / 4), f, col, row, &s->full[group]);
    }
}

static __device__ __forceinline__ void copy_tiles(const struct pass_fwd &a, struct fwd_shared *s, int group, int rank, const CUtensorMap *x, const CUtensorMap *f,
                                                  const CUtensorMap *y)
{
    if (tile_of(a, group, 0) < a.tiles)
        bring(a, s, group, rank, tile_of(a, group, 0), x, f);
    barrier_arrive(&s->summed[group]);
    for (int j = 0, tile; (tile = tile_of(a, group, j)) < a.tiles; j++) {
        barrier_wait_bounded(&s->formed[group], j & 1);
#pragma unroll
        for (int b = 0; b < CL_COLS / 64; b++)
            tma_store_2d(y, rank * CL_COLS + b * 64, tile * TOKENS * CL_N, s->tile[group].x + b * (X_BYTES / 4));
        stores_read();
        if (tile_of(a, group, j + 1) < a.tiles)
            bring(a, s, group, rank, tile_of(a, group, j + 1), x, f);
        barrier_wait_bounded(&s->summed[group], j & 1);
        barrier_arrive(&s->summed[group]); /* the next phase cannot end before this one was seen */
        bulk_store(a.sums + ((int64_t)tile * a.ranks + rank) * TOKENS * SUMS, s->sums[group][j & 1], TOKENS * SUMS * 4);
    }
    bulk_commit();
    bulk_wait<0>();
}

/* y of token `token` and 8 channels, as it is stored. Returns the sum of its squares. */
template <bool DROP>
static __device__ __forceinline__ float form(const struct pass_fwd &a, struct fwd_tile *st, const float *coef, int token, int64_t row, int tile_x, int tile_f, int piece, int64_t c)
{
    float in[CL_N][8], add[8], square = 0;
#pragma unroll
    for (int i = 0; i < CL_N; i++)
        unpack<bf16>(load_raw(st->x + tile_x + in_tile(token * CL_N + i, piece)), in[i]);
    unpack<bf16>(load_raw(st->f + tile_f + in_tile(token, piece)), add);
    if (a.bias != NULL) {
        float bias[8];
        load_floats(a.bias + c, bias);
#pragma unroll
        for (int e = 0; e < 8; e++)
            add[e] += bias[e];
    }
    struct drop_row drop = {};
    if (DROP)
        drop = drop_row_of(a.drop, row);
    float post[CL_N], res[CL_N * CL_N];
    load_floats(coef + CL_N, post);
    load_floats(coef + 2 * CL_N, res);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float v[8], factor[8];
        if (DROP)
            drop_factors(a.drop, drop, i * a.d + c, factor);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            v[e] = __fmul_rn(a.profile_d ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
            for (int k = 1; k < CL_N; k++)
                v[e] = fmaf(a.profile_d ? res[k * CL_N + i] : res[i * CL_N + k], in[k][e], v[e]);
            v[e] = add_dropped<DROP>(v[e], post[i], add[e], DROP ? factor[e] : 1.0f);
        }
        uint4 out = repack<bf16>(v);
        store_raw(st->x + tile_x + in_tile(token * CL_N + i, piece), out);
        unpack<bf16>(out, v);
#pragma unroll
        for (int e = 0; e < 8; e++)
            square = fmaf(v[e], v[e], square);
    }
    return square;
}

template <bool DROP> static __device__ __forceinline__ void work(const struct pass_fwd &a, struct fwd_shared *s, int group, int rank)
{
    struct fwd_tile *st = &s->tile[group];
    int thread = (int)threadIdx.x % CL_GROUP_THREADS, warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4, j = 0;
    int tile_x = warp / 2 * (X_BYTES / 4), tile_f = warp / 2 * (F_BYTES / 4), piece = warp % 2 * 4 + q;
    int64_t c = (int64_t)rank * CL_COLS + warp * 32 + q * 8;
    const uint4 *w = s->w + warp * (CL_N * 2 * 3 * 32) + lane;
    barrier_wait_bounded(&s->w_here, 0);
    for (int tile; (tile = tile_of(a, group, j)) < a.tiles; j++) {
        int64_t row = (int64_t)tile * TOKENS + g; /* and 8 further */
        float square[2];
        barrier_wait_bounded(&s->full[group], j & 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            square[half] = form<DROP>(a, st, s->coef[group][g + 8 * half], g + 8 * half, row + 8 * half, tile_x, tile_f, piece, c);
            square[half] += __shfl_xor_sync(0xffffffffu, square[half], 1);
            square[half] += __shfl_xor_sync(0xffffffffu, square[half], 2);
        }
        /* Not kept in registers while the other half is formed. */
        uint4 y[2][CL_N];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < CL_N; i++)
                y[half][i] = load_again(st->x + tile_x + in_tile((g + 8 * half) * CL_N + i, piece));
        fence_async_proxy();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->formed[group]);
        float acc[2][3][4] = {};
#pragma unroll
        for (int i = 0; i < CL_N; i++)
#pragma unroll
            for (int u = 0; u < 2; u++)
#pragma unroll
                for (int t = 0; t < 3; t++) {
                    uint4 by = w[((i * 2 + u) * 3 + t) * 32];
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        mma_bf16(acc[half][t], &by.x, u == 0 ? y[half][i].x : y[half][i].z, u == 0 ? y[half][i].y : y[half][i].w);
                }
        if (j > 0)
            barrier_wait_bounded(&s->summed[group], (j - 1) & 1); /* the room is free again */
        /* Rows of the products: 24 with high halves of w, then 24 with low ones. */
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *to = s->part[group][warp][8 * half + 2 * q + e] + g;
                to[0] = acc[half][0][e] + acc[half][1][2 + e];
                to[8] = acc[half][0][2 + e] + acc[half][2][e];
                to[16] = acc[half][1][e] + acc[half][2][2 + e];
            }
            s->part[group][warp][8 * half + g][CL_LOGITS + q] = q == 0 ? square[half] : 0.0f;
        }
        group_barrier(group);
        if (warp < 4) {
            if (thread < TOKENS * SUMS / 4) {
                int token = thread / (SUMS / 4), v = thread % (SUMS / 4) * 4;
                float4 sum = *(const float4 *)&s->part[group][0][token][v];
#pragma unroll
                for (int k = 1; k < CL_WARPS; k++) {
                    float4 add = *(const float4 *)&s->part[group][k][token][v];
                    sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
                }
                *(float4 *)&s->sums[group][j & 1][token][v] = sum;
            }
            fence_async_proxy();
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&s->summed[group]);
        }
    }
}

#endif /* HOPPER_CODE */

template <bool DROP>
static __global__ void __launch_bounds__(CL_THREADS, 1)
    boundary_pass(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap y, const __grid_constant__ struct pass_fwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct fwd_shared *s = (struct fwd_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(&s->w_here, 1);
        for (int g = 0; g < CL_GROUPS; g++) {
            barrier_init(&s->full[g], 1);
            barrier_init(&s->formed[g], CL_WARPS);
            barrier_init(&s->summed[g], 4 + 1); /* warps that add, and the copier */
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
        int group = warp - CL_WORKERS / 32;
        if (group < CL_GROUPS && threadIdx.x % 32 == 0)
            copy_tiles(a, s, group, rank, &x, &f, &y);
    }
#endif
}

/* A thread per row: its sums over the blocks of the line, rho, gates and Sinkhorn. */
static __global__ void __launch_bounds__(64) pass_coefficients(const __grid_constant__ struct pass_fwd a)
{
    int64_t row = (int64_t)blockIdx.x * 64 + threadIdx.x;
    if (row >= a.rows)
        return;
    float p[SUMS] = {}, m[CL_N * CL_N], made[2 * CL_N], *stat = a.stat + row * a.stat_stride, *coef = a.coef + row * a.coef_stride;
    const float *from = a.sums + (row / TOKENS * a.ranks * TOKENS + row % TOKENS) * SUMS;
#pragma unroll 4
    for (int r = 0; r < a.ranks; r++) {
        float add[SUMS];
        load_floats(from + (int64_t)r * TOKENS * SUMS, add);
#pragma unroll
        for (int k = 0; k <= CL_LOGITS; k++)
            p[k] += add[k];
    }
    float rho = sqrtf(p[CL_LOGITS] / (float)(CL_N * a.d)), q = 1.0f / (rho + (float)MHC_EPS), scale[3] = {*a.a_pre, *a.a_post, *a.a_res};
#pragma unroll
    for (int k = 0; k < CL_LOGITS; k++) {
        stat[k] = p[k];
        float z = q * p[k] * scale[k < CL_N ? 0 : k < 2 * CL_N ? 1 : 2] + a.beta[k];
        if (k < 2 * CL_N)
            made[k] = maybe_bf16(a.round_bf16, k < CL_N ? precise_sigmoid(z) + (a.profile_d ? (float)MHC_EPS : 0.0f) : 2 * precise_sigmoid(z));
        else
            m[k - 2 * CL_N] = z;
    }
    stat[CL_LOGITS] = rho;
    sinkhorn<CL_N>(m, CL_N, a.iterations, a.profile_d);
#pragma unroll
    for (int k = 0; k < CL_N * CL_N; k++)
        m[k] = maybe_bf16(a.round_bf16, m[k]);
    store_floats(coef, made);
    store_floats(coef + 2 * CL_N, m);
}

struct pass_work {
    uint4 *operands;
    float *sums;
};
static int64_t divide(int64_t rows, int64_t d, void *base, struct pass_work *w)
{
    struct carve c = {(char *)base, 0};
    w->operands = (uint4 *)carve_bytes(&c, mhc_operand_bytes(d));
    w->sums = carve_floats(&c, round_up(rows, TOKENS) * (d / CL_COLS) * SUMS);
    return c.used;
}
int64_t mhc_boundary_pass_bytes(int64_t rows, int64_t d)
{
    struct pass_work w;
    return divide(rows, d, NULL, &w);
}

int mhc_boundary_pass(struct lane *l, const struct mhc_boundary_fwd_args *b, void *base)
{
    struct pass_fwd a = {};
    struct pass_work w;
    CUtensorMap x, f, y;
    int64_t rows = b->x.dim[0], k = b->x.dim[1];
    a.d = k / CL_N;
    divide(rows, a.d, base, &w);
    a.tiles = (int)ceil_div(rows, TOKENS);
    TRY(mhc_forward_operands(l, &b->w, a.d, w.operands));
    a.operands = w.operands;
    a.sums = w.sums;
    a.coef_in = (const float *)b->coef_in.data;
    a.bias = (const float *)b->bias.data;
    a.a_pre = (const float *)b->a_pre.data;
    a.a_post = (const float *)b->a_post.data;
    a.a_res = (const float *)b->a_res.data;
    a.beta = (const float *)b->beta.data;
    a.stat = (float *)b->stat.data;
    a.coef = (float *)b->coef.data;
    a.stat_stride = b->stat.stride[0];
    a.coef_stride = b->coef.stride[0];
    a.rows = rows;
    a.ranks = (int)(a.d / CL_COLS);
    a.lines = (int)min_i64(max_i64(CL_BLOCKS / a.ranks, 1), a.tiles);
    a.iterations = (int)b->rule.iterations;
    a.profile_d = b->rule.profile == MHC_D;
    a.round_bf16 = b->rule.round_bf16;
    a.drop = drop_rule_of(&b->drop);
    TRY(tensor_map_2d(l, &x, b->x.data, rows * CL_N, a.d, a.d, TOKENS * CL_N));
    TRY(tensor_map_2d(l, &f, b->f.data, rows, a.d, b->f.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &y, b->y.data, rows * CL_N, a.d, a.d, TOKENS * CL_N));
    unsigned grid = (unsigned)(a.ranks * a.lines);
    if (a.drop.info != NULL) {
        NEEDS_SMEM(l, boundary_pass<true>, sizeof(struct fwd_shared));
        LAUNCH(l, boundary_pass<true>, grid, CL_THREADS, sizeof(struct fwd_shared), x, f, y, a);
    } else {
        NEEDS_SMEM(l, boundary_pass<false>, sizeof(struct fwd_shared));
        LAUNCH(l, boundary_pass<false>, grid, CL_THREADS, sizeof(struct fwd_shared), x, f, y, a);
    }
    LAUNCH(l, pass_coefficients, (unsigned)ceil_div(rows, 64), 64, 0, a);
    return ST_OK;
}
