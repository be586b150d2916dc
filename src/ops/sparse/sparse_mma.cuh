/* Tiles of the tensor-core kernels of sparse attention: 64 heads of one query against 32 keys of its list. Rows in
 * shared memory have a pitch of 8 channels more than they hold, so that the rows of a matrix load lie in different
 * banks. */
#ifndef BRAID_OPS_SPARSE_MMA_CUH
#define BRAID_OPS_SPARSE_MMA_CUH

#include "ops/cuda/mma.cuh"
#include "ops/sparse/sparse_cuda.cuh"

enum { MMA_THREADS = 256, MMA_HEADS = 64, MMA_KEYS = 32, MMA_PAD = 8, SCORE_PITCH = MMA_KEYS + 4 };
enum { WEIGHT_PITCH = MMA_KEYS + MMA_PAD };
#define SPARSE_LOG2E 1.4426950408889634f
#define SPARSE_LN2 0.6931471805599453f

/* Rows of heads first .. first + 63 of a query; heads that do not exist are zeros. */
template <int WIDTH>
__device__ __forceinline__ void load_heads(bf16 *to, const rows_view<bf16> &from, int b, int i, int first, int heads)
{
    constexpr int PACKS = WIDTH / 8;
    for (int x = threadIdx.x; x < MMA_HEADS * PACKS; x += MMA_THREADS) {
        int h = x / PACKS, at = x % PACKS * 8;
        bool valid = first + h < heads;
        copy_async16(to + h * (WIDTH + MMA_PAD) + at, from.at(b, i, valid ? first + h : 0) + at, valid);
    }
}

/* Keys of 32 entries of a list, zeros for those that are none; which keys they are goes to `keys`. */
template <int WIDTH>
__device__ __forceinline__ void gather_keys(bf16 *to, int *keys, const sparse_call<bf16> &c, int b, const int32_t *list,
                                            int first)
{
    constexpr int PACKS = WIDTH / 8;
    for (int x = threadIdx.x; x < MMA_KEYS * PACKS; x += MMA_THREADS) {
        int r = x / PACKS, at = x % PACKS * 8;
        int key = first + r < c.most ? key_of(list[first + r], c.keys) : -1;
        copy_async16(to + r * (WIDTH + MMA_PAD) + at, c.kv.at(b, max(key, 0), 0) + at, key >= 0);
    }
    if (threadIdx.x < MMA_KEYS)
        keys[threadIdx.x] = first + threadIdx.x < c.most ? key_of(list[first + threadIdx.x], c.keys) : -1;
    copies_commit();
}

/* out[16 rows][8 N keys] of rows `row` of x times keys `key` .. of y, over WIDTH channels, as fp32 in shared memory. */
template <int WIDTH, int PITCH_X, int PITCH_Y, int N>
__device__ __forceinline__ void score_tile(float *out, const bf16 *x, int row, const bf16 *y, int key)
{
    float acc[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] = 0.0f;
#pragma unroll 4
    for (int k = 0; k < WIDTH; k += 16) {
        uint32_t a[4], b[4];
        frag_a(a, x + row * PITCH_X + k, PITCH_X);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            frag_b(b, y + (key + n * 8) * PITCH_Y + k, PITCH_Y);
            mma_bf16(acc[n], a, b[0], b[1]);
            mma_bf16(acc[n + 1], a, b[2], b[3]);
        }
    }
    int lane = threadIdx.x % 32, r = row + lane / 4, col = key + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(float2 *)(out + (r + half * 8) * SCORE_PITCH + col + n * 8) =
                make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
}

/* acc[N][4] += A (16 x 16, in registers) times the channels col .. col + 8 N of 16 rows of y. */
template <int N, int PITCH>
__device__ __forceinline__ void add_channels(float (*acc)[4], const uint32_t *a, const bf16 *y, int col)
{
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        frag_b_t(b, y + col + n * 8, PITCH);
        mma_bf16(acc[n], a, b[0], b[1]);
        mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
}

#endif
