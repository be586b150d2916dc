/* Scores of the indexer on tensor cores, bf16; see indexer.h. A block takes one query and walks all keys that the query
 * sees, 64 at a time: heads are the rows of the product, so that relu, weights and the sum over heads happen in
 * registers. Keys come in by asynchronous copies, one tile ahead. */
#include "ops/cuda/mma.cuh"
#include "ops/indexer/indexer_cuda.cuh"

enum { SCORE_WARPS = 4, SCORE_THREADS = SCORE_WARPS * 32, TILE_KEYS = 64, PAD = 8 };

/* WIDTH: channels, a multiple of 16. MT: tiles of 16 heads that a warp keeps, for SCORE_WARPS * MT * 16 heads at most. */
template <int WIDTH>
__device__ __forceinline__ void load_keys(bf16 *to, const index_call<bf16> &c, int64_t b, int64_t first, int64_t end)
{
    constexpr int PACKS = WIDTH / 8;
    for (int x = threadIdx.x; x < TILE_KEYS * PACKS; x += SCORE_THREADS) {
        int r = x / PACKS, at = x % PACKS * 8;
        bool valid = first + r < end;
        copy_async16(to + r * (WIDTH + PAD) + at, c.k.at(b, valid ? first + r : 0, 0) + at, valid);
    }
    copies_commit();
}

template <int WIDTH, int MT>
static __global__ void __launch_bounds__(SCORE_THREADS)
    scores_mma(const __grid_constant__ index_call<bf16> c, int64_t first_row, float *scores)
{
    constexpr int PITCH = WIDTH + PAD, HEADS = SCORE_WARPS * MT * 16;
    DYNAMIC_SHARED(bf16, pool, 16);
    __shared__ float part[SCORE_WARPS][TILE_KEYS];
    bf16 *q = pool, *keys = pool + HEADS * PITCH; /* two tiles of keys */
    int64_t r = first_row + blockIdx.x, b = r / c.rows, i = r % c.rows, end = row_end(c, i),
            from = row_first(c, b, i) / TILE_KEYS * TILE_KEYS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (from >= end)
        return;
    load_keys<WIDTH>(keys, c, b, from, end);
    for (int x = threadIdx.x; x < HEADS * (WIDTH / 8); x += SCORE_THREADS) {
        int h = x / (WIDTH / 8), at = x % (WIDTH / 8) * 8;
        uint4 zero = make_uint4(0, 0, 0, 0);
        *(uint4 *)(q + h * PITCH + at) = h < c.heads ? *(const uint4 *)(c.q.at(b, i, h) + at) : zero;
    }
    __syncthreads();
    uint32_t a[MT][WIDTH / 16][4];
    float w[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
        int row = (warp * MT + m) * 16;
#pragma unroll
        for (int k = 0; k < WIDTH / 16; k++)
            frag_a(a[m][k], q + row * PITCH + k * 16, PITCH);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int h = row + lane / 4 + half * 8;
            w[m][half] = h < c.heads ? c.w.at(b, i, 0)[h] : 0.0f;
        }
    }
    float *out = scores + (int64_t)blockIdx.x * c.keys;
    for (int64_t first = from; first < end; first += TILE_KEYS) {
        bf16 *tile = keys + ((first - from) / TILE_KEYS % 2) * TILE_KEYS * PITCH,
             *next = keys + ((first - from) / TILE_KEYS + 1) % 2 * TILE_KEYS * PITCH;
        if (first + TILE_KEYS < end) {
            load_keys<WIDTH>(next, c, b, first + TILE_KEYS, end);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILE_KEYS; n += 16) {
            float sum[2][2] = {{0, 0}, {0, 0}}; /* columns 2t, 2t+1 of two tiles of 8 keys */
            uint32_t bk[WIDTH / 16][4];
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++)
                frag_b(bk[k], tile + n * PITCH + k * 16, PITCH);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float z[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
                for (int k = 0; k < WIDTH / 16; k++) {
                    mma_bf16(z[0], a[m][k], bk[k][0], bk[k][1]);
                    mma_bf16(z[1], a[m][k], bk[k][2], bk[k][3]);
                }
#pragma unroll
                for (int x = 0; x < 2; x++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum[x][e % 2] += w[m][e / 2] * (c.relu && z[x][e] < 0 ? 0.0f : z[x][e]);
            }
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int e = 0; e < 2; e++) { /* over the eight lanes that hold other heads of the same key */
                    float s = sum[x][e];
                    s += __shfl_xor_sync(0xffffffffu, s, 4);
                    s += __shfl_xor_sync(0xffffffffu, s, 8);
                    s += __shfl_xor_sync(0xffffffffu, s, 16);
                    if (lane < 4)
                        part[warp][n + x * 8 + lane * 2 + e] = s;
                }
        }
        __syncthreads();
        if (threadIdx.x < TILE_KEYS && first + threadIdx.x < end) {
            float s = 0;
#pragma unroll
            for (int x = 0; x < SCORE_WARPS; x++)
                s += part[x][threadIdx.x];
            out[first + threadIdx.x] = s;
        }
        __syncthreads();
    }
}

template <int WIDTH, int MT>
static int run(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *scores)
{
    int smem = (SCORE_WARPS * MT * 16 + 2 * TILE_KEYS) * (WIDTH + PAD) * 2;
    auto kernel = scores_mma<WIDTH, MT>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, count, SCORE_THREADS, smem, c, first, scores);
    return ST_OK;
}

bool index_scores_fit(const struct index_topk_args *a)
{
    return a->q.dtype == DT_BF16 && (a->q.dim[3] == 64 || a->q.dim[3] == 128) && a->q.dim[2] <= 64 &&
           aligned16(&a->q) && aligned16(&a->k);
}

int index_scores_mma(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *scores)
{
    return c.width == 64 ? run<64, 1>(l, c, first, count, scores) : run<128, 1>(l, c, first, count, scores);
}
