/* dw = dp^T y of the boundary for bf16 streams on Hopper, in one pass over y at the rate of memory: a block owns 256 columns of y and a range of rows,
 * a thread brings tiles of 64 rows by bulk copies, with dp as two bf16 halves beside them, and four warps multiply by wgmma. The sums of the ranges are added in
 * order. */
#include "ops/cuda/hopper.cuh"
#include "ops/mhc/mhc_cuda.cuh"

enum {
    LOGITS = 24,
    ROWS = 64,        /* of a tile */
    BOX = 64 * 64 * 2, /* bytes of 64 rows x 64 columns */
    BOXES = 4,
    COLUMNS = 64 * BOXES,
    STAGES = 5,
    THREADS = 128 + 32,
    MOST_BLOCKS = 128, /* one for each multiprocessor of an H100, but for a few */
};
struct outer_shared {
    char y[STAGES][BOXES][BOX], dp[STAGES][BOX];
    uint64_t full[STAGES], used[STAGES];
};
struct outer_pass {
    float *partial; /* [ranges, LOGITS, k] */
    int64_t k;
    int tiles, per_range; /* in tiles */
};

#if HOPPER_CODE

static __device__ __forceinline__ void bring_tiles(struct outer_shared *s, int first, int count, const CUtensorMap *y, const CUtensorMap *dp)
{
    for (int t = 0; t < count; t++) {
        int stage = t % STAGES, row = (first + t) * ROWS;
        if (t >= STAGES)
            barrier_wait_bounded(&s->used[stage], (uint32_t)(t / STAGES - 1) & 1);
        barrier_expect(&s->full[stage], (BOXES + 1) * BOX);
        tma_load_2d(s->dp[stage], dp, 0, row, &s->full[stage]);
        for (int b = 0; b < BOXES; b++)
            tma_load_2d(s->y[stage][b], y, (int)blockIdx.x * COLUMNS + b * 64, row, &s->full[stage]);
    }
}

static __device__ __forceinline__ void multiply_tiles(const struct outer_pass &a, struct outer_shared *s, int count)
{
    float acc[BOXES][32] = {};
    int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    for (int t = 0; t < count; t++) {
        int stage = t % STAGES;
        barrier_wait_bounded(&s->full[stage], (uint32_t)(t / STAGES) & 1);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
#pragma unroll
            for (int b = 0; b < BOXES; b++)
                wgmma<64, 1, 1>::run(acc[b], wgmma_tile(s->y[stage][b], BOX, 1024) + k * 2048 / 16, wgmma_tile(s->dp[stage], BOX, 1024) + k * 2048 / 16, 0);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < BOXES; b++)
            wgmma_hold(acc[b]);
        if (threadIdx.x % 32 == 0)
            barrier_arrive(&s->used[stage]);
    }
    /* Columns of a product: LOGITS with high halves, then LOGITS with low ones. */
#pragma unroll
    for (int b = 0; b < BOXES; b++)
#pragma unroll
        for (int j = 0; j < LOGITS / 2; j++) {
            int64_t column = (int64_t)blockIdx.x * COLUMNS + b * 64 + 16 * warp + g + 8 * (j / 2 % 2), i = 8 * (j / 4) + 2 * q + j % 2;
            if (column < a.k)
                a.partial[((int64_t)blockIdx.y * LOGITS + i) * a.k + column] = acc[b][j] + acc[b][j + LOGITS / 2];
        }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1) outer_tiles(const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap dp, const __grid_constant__ struct outer_pass a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct outer_shared *s = (struct outer_shared *)shared;
    int first = (int)blockIdx.y * a.per_range, count = min(a.per_range, a.tiles - first);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s->full[i], 1);
            barrier_init(&s->used[i], 4);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128)
        multiply_tiles(a, s, count);
    else if (threadIdx.x == 128)
        bring_tiles(s, first, count, &y, &dp);
#endif
}

static __global__ void add_ranges(const float *partial, int ranges, int64_t k, float *dw, int64_t stride, bool acc)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c >= k)
        return;
    float sum = 0;
    for (int r = 0; r < ranges; r++)
        sum += partial[(r * LOGITS + i) * k + c];
    dw[i * stride + c] = (acc ? dw[i * stride + c] : 0.0f) + sum;
}

static int64_t ranges_of(int64_t rows, int64_t k)
{
    int64_t tiles = max_i64(ceil_div(rows, ROWS), 1), most = max_i64(MOST_BLOCKS / ceil_div(k, COLUMNS), 1);
    return ceil_div(tiles, ceil_div(tiles, most));
}
int64_t mhc_outer_pass_bytes(int64_t rows, int64_t k) { return ranges_of(rows, k) * LOGITS * k * (int64_t)sizeof(float); }
bool mhc_outer_passes(struct lane *l, const struct outer_args *a)
{
    return a->one_pass && cuda_of(l)->hopper && a->y.dtype == DT_BF16 && a->dw.dim[0] == LOGITS && a->y.dim[0] > 0 && aligned16(&a->y);
}
int mhc_outer_pass(struct lane *l, const struct outer_args *a, const bf16 *dp, float *partial)
{
    struct outer_pass p = {};
    CUtensorMap y, halves;
    int64_t rows = a->y.dim[0], ranges = ranges_of(rows, a->y.dim[1]);
    p.partial = partial;
    p.k = a->y.dim[1];
    p.tiles = (int)ceil_div(rows, ROWS);
    p.per_range = (int)ceil_div(p.tiles, ranges);
    TRY(tensor_map_2d(l, &y, a->y.data, rows, p.k, a->y.stride[0], ROWS));
    TRY(tensor_map_2d(l, &halves, dp, rows, 2 * LOGITS, 2 * LOGITS, ROWS));
    NEEDS_SMEM(l, outer_tiles, sizeof(struct outer_shared));
    LAUNCH(l, outer_tiles, dim3((unsigned)ceil_div(p.k, COLUMNS), (unsigned)ranges), THREADS, sizeof(struct outer_shared), y, halves, p);
    LAUNCH(l, add_ranges, dim3((unsigned)ceil_div(p.k, 256), LOGITS), 256, 0, partial, (int)ranges, p.k, (float *)a->dw.data, a->dw.stride[0], a->acc);
    return ST_OK;
}
