/* What the Hopper kernels of sparse attention share. A block has 64 heads of a query and four groups of four warps: one
 * gathers keys, one computes scores, two keep the results in registers. Tiles are blocks of 64 channels: lines of 128
 * bytes, a row each, with the 128-byte swizzle (hopper.cuh). Keys are rows that lie anywhere, so no bulk copy brings
 * them: threads ask for 16 bytes each (cp.async), and tell wgmma by a fence when theirs have come. Two pairs of warps
 * gather tiles in turns, each into a buffer of its own, so that one's copies are under way while the other's arrive. */
#ifndef BRAID_OPS_SPARSE_HOPPER_CUH
#define BRAID_OPS_SPARSE_HOPPER_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/sparse/sparse_cuda.cuh"

#define SPARSE_LOG2E 1.4426950408889634f
#define SPARSE_LN2 0.6931471805599453f

enum {
    GROUP = 128,         /* threads that issue wgmma together */
    HOP_THREADS = 512,   /* gather, scores, two of results */
    HOP_HEADS = 64,      /* rows of a product */
    PAIR = 64,           /* threads that gather a tile */
    RESULTS = 2 * GROUP, /* threads that hold results */
    IMAGE_KEYS = 64,     /* entries of an image of p or ds: [query][tile][head][64 entries] */
    HOP_CHUNK = 96,      /* queries of the backward pass at a time: scratch is not larger than sparse_mma_bwd.cu's */
};

/* What queries first .. first + count - 1 of a sequence add to keys, from the weights in scratch: to w.sum. */
int sparse_add_hopper(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count);

template <typename POOL> static constexpr int pool_bytes()
{
    static_assert(sizeof(POOL) + 1024 <= 227 * 1024, "shared memory of a block");
    return (int)sizeof(POOL) + 1024;
}

#if HOPPER_CODE

/* Bytes from the start of a block of 64 channels to 16 bytes of a row. */
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

/* A tile further along, by bytes. */
__device__ __forceinline__ uint64_t tile_at(uint64_t tile, int bytes) { return tile + (uint64_t)(bytes >> 4); }

/* Rows of heads first .. first + ROWS - 1 of a query by COUNT threads, channels from block `from` on; zeros for heads
 * that do not exist. */
template <int ROWS, int BLOCKS, int COUNT>
__device__ __forceinline__ void bring_heads(bf16 (*to)[ROWS][64], const rows_view<bf16> &view, int b, int i, int first,
                                            int heads, int from, int thread)
{
#pragma unroll 4
    for (int x = thread; x < ROWS * BLOCKS * 8; x += COUNT) {
        int row = x / (BLOCKS * 8), block = x / 8 % BLOCKS, chunk = x % 8;
        bool valid = first + row < heads;
        copy_async16((char *)to[block] + swizzled(row, chunk),
                     view.at(b, i, valid ? first + row : 0) + (from + block) * 64 + chunk * 8, valid);
    }
}

/* The entry of a list that this lane gathers: of the ROWS / 2 of its warp. */
template <int ROWS>
__device__ __forceinline__ int entry_of(const sparse_call<bf16> &c, const int32_t *list, int first, int warp)
{
    int lane = threadIdx.x % 32, n = first + warp * (ROWS / 2) + lane;
    return lane < ROWS / 2 && n < c.most ? key_of(list[n], c.keys) : -1;
}

/* Rows of the warp's entries: eight lanes have a row, which lies in one piece in memory. */
template <int D, int ROWS>
__device__ __forceinline__ void gather_rows(bf16 (*to)[ROWS][64], const sparse_call<bf16> &c, int b, int key, int warp)
{
    int chunk = threadIdx.x % 8, part = threadIdx.x % 32 / 8;
#pragma unroll 2
    for (int r = 0; r < ROWS / 2; r += 4) {
        int row = warp * (ROWS / 2) + r + part, from = __shfl_sync(0xffffffffu, key, r + part);
        const bf16 *source = c.kv.at(b, max(from, 0), 0) + chunk * 8;
        char *line = (char *)to[0] + swizzled(row, chunk);
#pragma unroll
        for (int x = 0; x < D / 64; x++)
            copy_async16(line + x * ROWS * 128, source + x * 64, from >= 0);
    }
}

/* The gathering warps: tile t goes to buffer t % 2. valid[t % 2] has a bit for each row that is a key, in one word for
 * each of the two warps. */
template <int D, int ROWS, typename POOL>
__device__ __forceinline__ void gather_tiles(POOL *s, const sparse_call<bf16> &c, int b, const int32_t *list, int tiles)
{
    int warp = threadIdx.x / 32 % 2, turn = threadIdx.x / PAIR % 2;
    int key = entry_of<ROWS>(c, list, turn * ROWS, warp);
    for (int t = turn, round = 0; t < tiles; t += 2, round++) {
        barrier_wait(&s->kv_empty[turn], (uint32_t)(round & 1) ^ 1);
        gather_rows<D, ROWS>(s->kv[turn], c, b, key, warp);
        copies_commit();
        uint32_t votes = __ballot_sync(0xffffffffu, key >= 0);
        if (threadIdx.x % 32 == 0)
            s->valid[turn][warp] = votes;
        key = entry_of<ROWS>(c, list, (t + 2) * ROWS, warp);
        copies_wait<0>();
        fence_async_proxy();
        barrier_arrive(&s->kv_full[turn]);
    }
}

/* The threads that do not gather have brought rows by copies, and all of them may multiply with all of these. To be
 * called in one place of a kernel: with one for each role synccheck spoke of threads that part. */
__device__ __forceinline__ void heads_are_there(void)
{
    copies_commit();
    copies_wait<0>();
    fence_async_proxy();
    named_barrier<1, HOP_THREADS - GROUP>();
}

/* out [64 heads, KEYS] = heads times keys, over BLOCKS blocks of channels. ROWS: of which the heads are the first 64.
 * Not awaited. */
template <int BLOCKS, int KEYS, int ROWS>
__device__ __forceinline__ void score_product(float (&out)[KEYS / 2], const bf16 *heads, const bf16 (*keys)[KEYS][64])
{
    uint64_t a = wgmma_tile(heads, 1024, 1024), b = wgmma_tile(keys, 1024, 1024);
#pragma unroll
    for (int x = 0; x < BLOCKS * 4; x++)
        wgmma<KEYS, 0, 0>::run(out, tile_at(a, x / 4 * ROWS * 128 + x % 4 * 32),
                               tile_at(b, x / 4 * KEYS * 128 + x % 4 * 32), x == 0);
}

/* acc [64 heads, N channels] += weights [64 heads, KEYS] times keys; weights: K-major, from `column` on. */
template <int N, int KEYS>
__device__ __forceinline__ void add_product(float (&acc)[N / 2], const bf16 (*weights)[64], int column,
                                            const bf16 (*keys)[KEYS][64])
{
    uint64_t a = tile_at(wgmma_tile(weights, 1024, 1024), column * 2), b = wgmma_tile(keys, KEYS * 128, 1024);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma<N, 0, 1>::run(acc, tile_at(a, k * 32), tile_at(b, k * 2048), 0);
}

/* Registers of a product's 16 rows x 16 columns of this warp, rounded, to lines of 64 columns. x: the first of 8. */
__device__ __forceinline__ void store_16x16(bf16 (*to)[64], int column, const float *x)
{
    int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane % 16, chunk = column / 8 + lane / 16;
    store_matrices(smem_address(to) + (uint32_t)swizzled(row, chunk), pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                   pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

/* Registers of a product's 64 rows x N columns to memory, times factors of the two rows of this thread. */
template <int N>
__device__ __forceinline__ void store_rows(const float (&acc)[N / 2], const rows_view<bf16> &view, int b, int i,
                                           int first, int heads, int channel, float low, float high)
{
    int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = first + row + half * 8;
        float by = half == 0 ? low : high;
        if (h >= heads)
            continue;
        bf16 *to = view.at(b, i, h) + channel + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
            *(uint32_t *)(to + n * 8) = pack_bf16(acc[4 * n + 2 * half] * by, acc[4 * n + 2 * half + 1] * by);
    }
}

/* Beside those of its own that a pool has: gathered tiles. */
template <typename POOL> __device__ __forceinline__ void init_gather(POOL *s)
{
    for (int x = 0; x < 2; x++) {
        barrier_init(&s->kv_full[x], PAIR);
        barrier_init(&s->kv_empty[x], RESULTS);
    }
}

/* The pool of a block begins at a multiple of 1024. */
template <typename POOL> __device__ __forceinline__ POOL *pool_at(char *raw)
{
    return (POOL *)(raw + (1024 - smem_address(raw) % 1024) % 1024);
}

template <int N> __device__ __forceinline__ void clear_sums(float (&acc)[N])
{
#pragma unroll
    for (int x = 0; x < N; x++)
        acc[x] = 0.0f;
}

#endif /* HOPPER_CODE */

#endif
