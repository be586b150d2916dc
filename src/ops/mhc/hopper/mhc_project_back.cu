/* The backward pass through the projection for bf16 streams on Hopper, in one pass over x: dx = dp w + (drho / (K rho))
 * x, and dw = dp^T x from the same boxes.
 *
 * A block owns 256 columns and a range of rows, and walks over tiles of 64 rows. Four groups of four warps have 64
 * columns each, with a ring of boxes of their own: a group multiplies dp by its part of w, which stays in shared
 * memory, and x by dp; puts dx in the place of x, and sends it off. Four more warps split dp into halves, tile by tile.
 * It comes by bulk copies several tiles ahead, because every load stands in line behind the boxes that are under way:
 * with loads to registers two tiles ahead all waited for it (1280 us instead of 1040 at 32,768 x 7168).
 *
 * fp32 numbers are bf16 halves, high + low; of the four products of halves the smallest is left out, as everywhere.
 *   dp of a tile     lines of 24 high halves, 24 low ones
 *   w of 64 columns  24 lines of high halves, the same again, 24 of low ones, 8 of zeros: lines 0 to 47 meet all of dp,
 *                    the rest its first 32 values
 *
 * dw is summed over a range in the tensor cores, and over ranges in order; their number depends on the shape alone. */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/mhc/portable/mhc_cuda.cuh"

enum {
    LOGITS = 24,
    ROWS = 64,
    BOX = ROWS * 128, /* bytes */
    GROUPS = 4,
    COLUMNS = GROUPS * 64,
    DEPTH = 3,  /* boxes in the ring of a group: one is worked on, one on its way out */
    TILES = 3,  /* of dp in its ring, as halves */
    COMING = 8, /* and as it lies in memory, on their way there */
    AHEAD = 4,  /* tiles whose scales are on their way in registers */
    DP_BYTES = ROWS * LOGITS * 4,
    LINES = 3 * LOGITS + 8,
    WORKERS = GROUPS * 128,
    THREADS = WORKERS + 128,
    /* A block starts with 96 registers for each thread, and that is all there is to share. */
    WORKER_REGISTERS = 104,
    MAKER_REGISTERS = 64,
    BLOCKS_AT_ONCE = 132, /* of an H100 or H200; only to choose the number of ranges */
};
struct back_args {
    const float *dp, *drho, *rho; /* without gaps */
    struct view w;
    float *partial; /* of dw: [ranges, n, k] */
    int64_t rows, k;
    int n, tiles, per_range; /* in tiles */
    float root_less;         /* added to rho where it divides */
};
struct back_shared {
    char x[GROUPS][DEPTH][BOX];
    char w[GROUPS][LINES * 128];
    char dp[TILES][BOX];
    float coming[COMING][ROWS][LOGITS], scale[TILES][ROWS];
    uint64_t full[GROUPS][DEPTH], made[TILES], used[TILES], came[COMING];
};
static_assert(sizeof(struct back_shared) <= 232448, "what a block of compute capability 9.0 has");

#if HOPPER_CODE

/* Place of a value in a tile of lines of 64. */
INLINE int place(int line, int column) { return line * 128 + (((column / 8) ^ (line % 8)) << 4) + column % 8 * 2; }

/* ---- w, once --------------------------------------------------------------------------------- */

INLINE void fill_w(const struct back_args &a, struct back_shared *s, int64_t first)
{
    for (int i = (int)threadIdx.x; i < LOGITS * COLUMNS / 2; i += THREADS) {
        int row = i / (COLUMNS / 2), c = i % (COLUMNS / 2) * 2;
        const float *from = at<float>(a.w, row) + first + c;
        float v[2] = {row < a.n && first + c < a.k ? from[0] : 0.0f, row < a.n && first + c + 1 < a.k ? from[1] : 0.0f};
        float high[2] = {rounded<bf16>(v[0]), rounded<bf16>(v[1])};
        char *to = s->w[c / 64];
        *(uint32_t *)(to + place(row, c % 64)) = *(uint32_t *)(to + place(LOGITS + row, c % 64)) =
            pack_bf16(high[0], high[1]);
        *(uint32_t *)(to + place(2 * LOGITS + row, c % 64)) = pack_bf16(v[0] - high[0], v[1] - high[1]);
    }
    for (int i = (int)threadIdx.x; i < GROUPS * 8 * 32; i += THREADS)
        *(uint32_t *)(s->w[i / 256] + 3 * LOGITS * 128 + i % 256 * 4) = 0;
    fence_async_proxy();
}

/* ---- dp -------------------------------------------------------------------------------------- */

INLINE void bring_dp(const struct back_args &a, struct back_shared *s, int t, int first)
{
    int64_t row = (int64_t)(first + t) * ROWS;
    uint32_t bytes = (uint32_t)min(a.rows - row, (int64_t)ROWS) * (LOGITS * 4);
    barrier_expect(&s->came[t % COMING], bytes);
    bulk_load(s->coming[t % COMING], a.dp + row * LOGITS, bytes, &s->came[t % COMING]);
}
/* rho and drho of row `thread`; 1 and 0 where there is none. */
INLINE float2 take_rho(const struct back_args &a, int thread, int t, int first, int count)
{
    int64_t row = (int64_t)(first + t) * ROWS + thread;
    bool there = t < count && thread < ROWS && row < a.rows;
    return make_float2(there ? a.rho[row] + a.root_less : 1.0f, there ? a.drho[row] : 0.0f);
}
/* Each of 96 threads has a pair of columns of every eighth row. */
INLINE void split_dp(const struct back_shared *s, char *tile, int t, int thread, int64_t left)
{
    int row = thread / (LOGITS / 2), c = thread % (LOGITS / 2) * 2;
    char *high = tile + place(row, c), *low = tile + place(row, LOGITS + c);
    if (row >= 8)
        return;
    UNROLLED (i, ROWS / 8) {
        float2 v = row + 8 * i < left ? *(const float2 *)&s->coming[t % COMING][row + 8 * i][c] : make_float2(0, 0);
        float2 h = make_float2(rounded<bf16>(v.x), rounded<bf16>(v.y));
        *(uint32_t *)(high + i * 1024) = pack_bf16(h.x, h.y);
        *(uint32_t *)(low + i * 1024) = pack_bf16(v.x - h.x, v.y - h.y);
    }
}
INLINE void make_dp(const struct back_args &a, struct back_shared *s, int first, int count)
{
    int thread = (int)threadIdx.x - WORKERS;
    float2 ahead[AHEAD];
    UNROLLED (u, AHEAD)
        ahead[u] = take_rho(a, thread, u, first, count);
    for (int base = 0; base < count; base += AHEAD)
        UNROLLED (u, AHEAD) {
            int t = base + u;
            if (t >= count)
                return;
            if (t >= TILES)
                barrier_wait_bounded(&s->used[t % TILES], (uint32_t)(t / TILES - 1) & 1);
            barrier_wait_bounded(&s->came[t % COMING], (uint32_t)(t / COMING) & 1);
            split_dp(s, s->dp[t % TILES], t, thread, a.rows - (int64_t)(first + t) * ROWS);
            if (thread < ROWS)
                s->scale[t % TILES][thread] = ahead[u].x == 0 ? 0.0f : ahead[u].y / ((float)a.k * ahead[u].x);
            ahead[u] = take_rho(a, thread, t + AHEAD, first, count);
            fence_async_proxy();
            named_barrier<1 + GROUPS, 128>(); /* what came is read */
            barrier_arrive(&s->made[t % TILES]);
            if (thread == 0 && t + COMING < count)
                bring_dp(a, s, t + COMING, first);
        }
}

/* ---- products -------------------------------------------------------------------------------- */

INLINE void bring(struct back_shared *s, int group, int t, int first, int column, const CUtensorMap *x)
{
    barrier_expect(&s->full[group][t % DEPTH], BOX);
    tma_load_2d(s->x[group][t % DEPTH], x, column, (first + t) * ROWS, &s->full[group][t % DEPTH]);
}

/* acc + scale x in the place of x; rows g and g + 8 of the warp's 16. */
INLINE void add_x(char *box, const float (&acc)[32], const float (&scale)[2])
{
    int thread = (int)threadIdx.x % 128, g = thread % 32 / 4, q = thread % 4;
    UNROLLED (half, 2) {
        int row = thread / 32 * 16 + g + 8 * half;
        UNROLLED (j, 8) {
            uint32_t *word = (uint32_t *)(box + place(row, 8 * j + 2 * q));
            float2 v = unpack_bf16(*word);
            *word = pack_bf16(fmaf(scale[half], v.x, acc[4 * j + 2 * half]),
                              fmaf(scale[half], v.y, acc[4 * j + 2 * half + 1]));
        }
    }
}

template <bool DW>
INLINE void work(const struct back_args &a, struct back_shared *s, int first, int count, const CUtensorMap *x,
                 const CUtensorMap *dx)
{
    int group = (int)threadIdx.x / 128, thread = (int)threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4,
        q = thread % 4;
    int64_t column = (int64_t)blockIdx.x * COLUMNS + group * 64;
    uint64_t w = wgmma_tile(s->w[group], BOX, 1024);
    float dw[2 * LOGITS / 2] = {};
    for (int t = 0; t < count; t++) {
        char *box = s->x[group][t % DEPTH], *dp = s->dp[t % TILES];
        float acc[32];
        barrier_wait_bounded(&s->made[t % TILES], (uint32_t)(t / TILES) & 1);
        barrier_wait_bounded(&s->full[group][t % DEPTH], (uint32_t)(t / DEPTH) & 1);
        wgmma_begin();
        UNROLLED (k, 5)
            wgmma<64, 0, 1>::run(acc, wgmma_tile(dp, 1024, 1024) + k % 3 * 2, w + k * 2048 / 16, k == 0);
        if (DW)
            UNROLLED (k, ROWS / 16)
                wgmma<2 * LOGITS, 1, 1>::run(dw, wgmma_tile(box, BOX, 1024) + k * 2048 / 16,
                                             wgmma_tile(dp, BOX, 1024) + k * 2048 / 16, 0);
        wgmma_commit();
        float scale[2] = {s->scale[t % TILES][warp * 16 + g], s->scale[t % TILES][warp * 16 + g + 8]};
        wgmma_wait<0>();
        wgmma_hold(acc);
        wgmma_hold(dw);
        barrier_arrive(&s->used[t % TILES]);
        add_x(box, acc, scale);
        fence_async_proxy();
        named_barrier_of(1 + group, 128);
        if (thread == 0) {
            tma_store_2d(dx, (int)column, (first + t) * ROWS, box);
            bulk_commit();
            bulk_wait_read<1>(); /* the box before is free */
            if (t > 0 && t - 1 + DEPTH < count)
                bring(s, group, t - 1 + DEPTH, first, (int)column, x);
        }
    }
    if (thread == 0)
        bulk_wait<0>();
    UNROLLED (j, (DW ? LOGITS / 2 : 0)) {
        int64_t c = column + warp * 16 + g + 8 * (j / 2 % 2);
        int i = 8 * (j / 4) + 2 * q + j % 2;
        if (c < a.k && i < a.n)
            a.partial[((int64_t)blockIdx.y * a.n + i) * a.k + c] = dw[j] + dw[j + LOGITS / 2];
    }
}

#endif

template <bool DW>
static __global__ void __launch_bounds__(THREADS, 1)
    project_back(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dx,
                 const __grid_constant__ struct back_args a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct back_shared *s = (struct back_shared *)shared;
    int first = (int)blockIdx.y * a.per_range, count = min(a.per_range, a.tiles - first);
    int64_t column = (int64_t)blockIdx.x * COLUMNS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * DEPTH; i++)
            barrier_init(&s->full[0][0] + i, 1);
        for (int i = 0; i < TILES; i++) {
            barrier_init(&s->made[i], 4 * 32);
            barrier_init(&s->used[i], 4 * GROUPS * 32);
        }
        for (int i = 0; i < COMING; i++)
            barrier_init(&s->came[i], 1);
        barrier_init_done();
        for (int t = 0; t < COMING && t < count; t++)
            bring_dp(a, s, t, first);
    }
    fill_w(a, s, column); /* before the boxes, which it would have to wait for */
    __syncthreads();
    if (threadIdx.x == 0)
        for (int t = 0; t < DEPTH && t < count; t++)
            for (int group = 0; group < GROUPS; group++)
                bring(s, group, t, first, (int)column + group * 64, &x);
    if (threadIdx.x >= WORKERS) {
        registers_down<MAKER_REGISTERS>();
        make_dp(a, s, first, count);
    } else {
        registers_up<WORKER_REGISTERS>();
        work<DW>(a, s, first, count, &x, &dx);
    }
#endif
}

static __global__ void add_ranges(const float *partial, int ranges, int n, int64_t k, float *dw, int64_t stride,
                                  bool acc)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c >= k)
        return;
    float sum = 0;
    for (int r = 0; r < ranges; r++)
        sum += partial[((int64_t)r * n + i) * k + c];
    dw[i * stride + c] = (acc ? dw[i * stride + c] : 0.0f) + sum;
}

/* As few ranges as fill all multiprocessors almost always. */
static int64_t ranges_of(int64_t rows, int64_t k)
{
    int64_t strips = ceil_div(k, COLUMNS), tiles = ceil_div(rows, ROWS), best = 1;
    double most = 0;
    for (int64_t waves = 1; waves <= 8 && most < 0.95; waves++) {
        int64_t ranges = max_i64(waves * BLOCKS_AT_ONCE / strips, 1);
        double full = (double)(ranges * strips) / (double)(round_up(ranges * strips, BLOCKS_AT_ONCE));
        if (full > most) {
            most = full;
            best = ranges;
        }
    }
    int64_t each = ceil_div(tiles, min_i64(best, tiles));
    return ceil_div(tiles, each);
}

/* bf16, 24 rows of w, whole vectors, dp, rho and drho without gaps, something to do; what is in dx is not needed. */
bool mhc_project_back_can(const struct lane *l, const struct mhc_project_bwd_args *b)
{
    return cuda_of(l)->hopper && !b->acc_dx && b->x.dtype == DT_BF16 && b->w.dim[0] == LOGITS && b->x.dim[0] > 0 &&
           b->x.dim[1] >= 64 && aligned16(&b->x) && aligned16(&b->dx) && aligned16(&b->dp) &&
           b->dp.stride[0] == LOGITS && b->rho.stride[0] == 1 && b->drho.stride[0] == 1;
}
int64_t mhc_project_back_bytes(const struct mhc_project_bwd_args *b)
{
    int64_t rows = b->x.dim[0], k = b->x.dim[1];
    return rows == 0 || k == 0 || b->x.dtype != DT_BF16 || b->dw.rank == 0
               ? 0
               : ranges_of(rows, k) * b->w.dim[0] * k * (int64_t)sizeof(float);
}

int mhc_project_back(struct lane *l, const struct mhc_project_bwd_args *b)
{
    CUtensorMap x, dx;
    int64_t rows = b->x.dim[0], k = b->x.dim[1], ranges = ranges_of(rows, k);
    struct back_args a = {.dp = floats(&b->dp),
                          .drho = floats(&b->drho),
                          .rho = floats(&b->rho),
                          .w = view_of(&b->w),
                          .partial = floats(&b->work),
                          .rows = rows,
                          .k = k,
                          .n = (int)b->w.dim[0],
                          .tiles = (int)ceil_div(rows, ROWS),
                          .root_less = (float)mhc_root_less(b->root_eps)};
    dim3 grid((unsigned)ceil_div(k, COLUMNS), (unsigned)ranges);
    a.per_range = (int)ceil_div(a.tiles, ranges);
    TRY(tensor_map_2d(l, &x, b->x.data, rows, k, b->x.stride[0], ROWS));
    TRY(tensor_map_2d(l, &dx, b->dx.data, rows, k, b->dx.stride[0], ROWS));
    if (!present(&b->dw)) {
        NEEDS_SMEM(l, project_back<false>, sizeof(struct back_shared));
        LAUNCH(l, project_back<false>, grid, THREADS, sizeof(struct back_shared), x, dx, a);
        return ST_OK;
    }
    NEEDS_SMEM(l, project_back<true>, sizeof(struct back_shared));
    LAUNCH(l, project_back<true>, grid, THREADS, sizeof(struct back_shared), x, dx, a);
    LAUNCH(l, add_ranges, dim3((unsigned)ceil_div(k, 256), (unsigned)a.n), 256, 0, a.partial, (int)ranges, a.n, k,
           floats(&b->dw), b->dw.stride[0], b->acc_dw);
    return ST_OK;
}
