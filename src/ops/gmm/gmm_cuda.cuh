/* What the GPU versions of gmm share: the product as a kernel sees it, and how a block finds its tile of the output
 * from the offsets on the device. */
#ifndef BRAID_OPS_GMM_CUDA_CUH
#define BRAID_OPS_GMM_CUDA_CUH

#include "ops/cuda/kernel.cuh"
extern "C" {
#include "ops/gmm/gmm_tile.h"
}

enum gmm_product { GMM_FORWARD, GMM_INPUT, GMM_WEIGHT };
enum { GMM_MAX_EXPERTS = 4096, GMM_SWEEP = 8 }; /* tiles down before the next column of tiles: what shares the cache */

/*            a                 b                    c                 down   across  depth
 * FORWARD    x [row][in]       w_e [out][in]        y [row][out]      rows   out     in
 * INPUT      dy [row][out]     w_e [out][in]        dx [row][in]      rows   in      out
 * WEIGHT     dy [row][out]     x [row][in]          dw_e [out][in]    out    in      rows */
struct gmm_job {
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc, b_expert, c_expert; /* in elements; 0 where all experts share the tensor */
    const float *bias, *prob;
    const int32_t *offset;
    int rows, experts, down, across, depth; /* down of WEIGHT, depth of the others */
    int sweep;                              /* tiles down before the next column of tiles; 0: GMM_SWEEP */
    bool acc;
};

/* In shared memory: first row of each expert and the end, then tiles before each expert (E is what no expert has). */
static inline size_t gmm_table_bytes(int64_t experts) { return (size_t)(2 * experts + 3) * sizeof(int); }

struct gmm_table {
    int *first, *tiles, total;
};

/* All threads of the block; ends with all of them knowing the table. Offsets that are no offsets are made some. */
template <int PRODUCT, int BM, int BN>
__device__ __forceinline__ struct gmm_table gmm_table_make(const struct gmm_job &p, int *shared)
{
    struct gmm_table t = {shared, shared + p.experts + 1, 0};
    for (int e = threadIdx.x; e <= p.experts; e += blockDim.x)
        t.first[e] = min(max(p.offset[e], 0), p.rows);
    __syncthreads();
    if (PRODUCT != GMM_WEIGHT && threadIdx.x < 32) {
        int lane = threadIdx.x, carry = 0;
        for (int e0 = 0; e0 <= p.experts; e0 += 32) {
            int e = e0 + lane, begin = e <= p.experts ? t.first[e] : 0, end = e < p.experts ? t.first[e + 1] : p.rows;
            int own = e <= p.experts ? (max(end - begin, 0) + BM - 1) / BM : 0, sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                int other = __shfl_up_sync(0xffffffffu, sum, d);
                sum += lane >= d ? other : 0;
            }
            if (e <= p.experts)
                t.tiles[e] = carry + sum - own;
            carry += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0)
            t.tiles[p.experts + 1] = carry;
    }
    __syncthreads();
    int across = (p.across + BN - 1) / BN;
    t.total = (PRODUCT == GMM_WEIGHT ? (p.down + BM - 1) / BM * p.experts : t.tiles[p.experts + 1]) * across;
    return t;
}

/* Where a tile lies. expert == experts: rows of no expert, depth 0. */
struct gmm_at {
    int expert, m, n;   /* first row and column in c (of WEIGHT: in c of the expert) */
    int m_valid, depth; /* rows of the tile that exist */
    int k_first;        /* WEIGHT: first row of a and b */
};

template <int PRODUCT, int BM, int BN>
__device__ __forceinline__ struct gmm_at gmm_find(const struct gmm_job &p, const struct gmm_table &t, int tile)
{
    struct gmm_at at;
    int across = (p.across + BN - 1) / BN;
    if (PRODUCT == GMM_WEIGHT) {
        int down = (p.down + BM - 1) / BM, inside = tile % (down * across), tall = p.sweep > 0 ? p.sweep : down;
        int above = inside / (tall * across) * tall, height = min(tall, down - above);
        at.expert = tile / (down * across);
        at.m = (above + inside % (tall * across) % height) * BM;
        at.n = inside % (tall * across) / height * BN;
        at.m_valid = min(BM, p.down - at.m);
        at.k_first = t.first[at.expert];
        at.depth = max(t.first[at.expert + 1] - at.k_first, 0);
        return at;
    }
    int tall = p.sweep > 0 ? p.sweep : GMM_SWEEP, down = t.tiles[p.experts + 1], sweep = tile / (tall * across),
        inside = tile % (tall * across);
    int height = min(tall, down - sweep * tall), m = sweep * tall + inside % height, low = 0, high = p.experts;
    while (low < high) {
        int middle = (low + high) / 2;
        if (t.tiles[middle + 1] <= m)
            low = middle + 1;
        else
            high = middle;
    }
    int end = low < p.experts ? t.first[low + 1] : p.rows;
    at.expert = low;
    at.m = t.first[low] + (m - t.tiles[low]) * BM;
    at.n = inside / height * BN;
    at.m_valid = min(BM, end - at.m);
    at.depth = low < p.experts ? p.depth : 0;
    at.k_first = 0;
    return at;
}

/* gmm_mma.cu: bf16 by tensor cores; all rows of a, b and c begin at 16 bytes. */
extern "C" int gmm_mma(struct lane *l, const struct gmm_job *p, enum gmm_product product);

#endif
