/* The Hopper helper header alone: products of small integers, exact in fp32, for all four pairs of operand majorness
 * and all widths, through bulk copies, mbarriers and wgmma; the left operand from registers, with the right one as 8 x
 * 8 matrices without swizzle; transposed matrices and sums by bulk copies. Prints "N passed, N failed" last. */
#include "ops/cuda/hopper.cuh"

#include <stdlib.h>
#include <string.h>

enum { M = 64, K = 192, BK = 64 };

template <int N, int A_MN, int B_MN>
__global__ void product(const __grid_constant__ CUtensorMap ma, const __grid_constant__ CUtensorMap mb, float *c)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1);
    __shared__ uint64_t full;
    char *a = (char *)(((uintptr_t)raw + 1023) / 1024 * 1024), *b = a + M * BK * 2;
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
    }
    __syncthreads();
    float d[N / 2];
    for (int k = 0; k < K; k += BK) {
        if (threadIdx.x == 0) {
            barrier_expect(&full, (M + N) * BK * 2);
            tma_load_2d(a, &ma, A_MN ? 0 : k, A_MN ? k : 0, &full);
            for (int i = 0; i < (B_MN ? N / 64 : 1); i++)
                tma_load_2d(b + i * BK * 128, &mb, B_MN ? i * 64 : k, B_MN ? k : 0, &full);
        }
        barrier_wait(&full, (uint32_t)(k / BK % 2));
        wgmma_hold(d);
        wgmma_begin();
        for (int i = 0; i < BK / 16; i++)
            wgmma<N, A_MN, B_MN>::run(d, wgmma_tile(a + i * (A_MN ? 2048 : 32), BK * 128, 1024),
                                      wgmma_tile(b + i * (B_MN ? 2048 : 32), BK * 128, 1024), k == 0 && i == 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(d);
        __syncthreads();
    }
    int w = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    for (int j = 0; j < N / 2; j++)
        c[(w * 16 + g + j / 2 % 2 * 8) * N + j / 4 * 8 + q * 2 + j % 2] = d[j];
#endif
}

/* The same with A from registers, K-major in memory, and B one row of 64 values at a time. The result leaves
 * transposed, through shared memory as bf16, and c through an addition by a bulk copy. */
template <int N>
__global__ void product_left(const bf16 *a, const __grid_constant__ CUtensorMap mb, float *c, bf16 *transposed)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1);
    __shared__ uint64_t full;
    char *b = (char *)(((uintptr_t)raw + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
    }
    __syncthreads();
    int w = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float d[N / 2];
    for (int k = 0; k < K; k += BK) {
        uint32_t left[BK / 4];
        if (threadIdx.x == 0) {
            barrier_expect(&full, N * BK * 2);
            for (int i = 0; i < N / 64; i++)
                tma_load_2d(b + i * BK * 128, &mb, i * 64, k, &full);
        }
        for (int i = 0; i < BK / 4; i++)
            left[i] = *(const uint32_t *)&a[(w * 16 + g + i % 2 * 8) * K + k + i / 4 * 16 + i / 2 % 2 * 8 + q * 2];
        barrier_wait(&full, (uint32_t)(k / BK % 2));
        wgmma_begin();
        for (int i = 0; i < BK / 16; i++)
            wgmma_left<N, 1>::run(d, left + 4 * i, wgmma_tile(b + i * 2048, BK * 128, 1024), k == 0 && i == 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(d);
        wgmma_hold_left(left);
        __syncthreads();
    }
    bf16 *rows = (bf16 *)b; /* [N][64] */
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t part[4];
        for (int i = 0; i < 4; i++) {
            __nv_bfloat162 p =
                __floats2bfloat162_rn(d[4 * (j + i / 2) + i % 2 * 2], d[4 * (j + i / 2) + i % 2 * 2 + 1]);
            part[i] = *(uint32_t *)&p;
        }
        store_matrices_t(smem_address(rows + ((j + lane / 16) * 8 + lane % 8) * 64 + w * 16 + lane / 8 % 2 * 8),
                         part[0], part[1], part[2], part[3]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < N * 64; i += 128)
        transposed[i] = rows[i];
    __syncthreads();
    float *sums = (float *)b; /* [N / 2][128] */
    for (int j = 0; j < N / 2; j++)
        sums[j * 128 + (int)threadIdx.x] = d[j];
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_add(c, sums, N * 64 * 4);
        bulk_commit();
        bulk_wait<0>();
    }
#endif
}

/* A from registers, B as 8 x 8 matrices without swizzle, one step of 16 along K after the other: [K / 16][N / 8][2]. */
template <int N> __global__ void product_matrices(const bf16 *a, const bf16 *b, float *c)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1);
    bf16 *tile = (bf16 *)(((uintptr_t)raw + 1023) / 1024 * 1024);
    int w = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, q = (int)threadIdx.x % 4;
    for (int i = (int)threadIdx.x; i < N * K; i += 128) {
        int n = i / K, k = i % K;
        tile[k / 16 * 16 * N + n / 8 * 128 + k % 16 / 8 * 64 + n % 8 * 8 + k % 8] = b[i];
    }
    fence_async_proxy();
    __syncthreads();
    float d[N / 2];
    uint32_t left[K / 4];
    for (int i = 0; i < K / 4; i++)
        left[i] = *(const uint32_t *)&a[(w * 16 + g + i % 2 * 8) * K + i / 4 * 16 + i / 2 % 2 * 8 + q * 2];
    wgmma_begin();
    for (int i = 0; i < K / 16; i++)
        wgmma_left<N, 0>::run(d, left + 4 * i, wgmma_matrices(tile + i * 16 * N, 128, 256), i == 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    wgmma_hold_left(left);
    for (int j = 0; j < N / 2; j++)
        c[(w * 16 + g + j / 2 % 2 * 8) * N + j / 4 * 8 + q * 2 + j % 2] = d[j];
#endif
}

static int value(int i) { return (int)((uint32_t)i * 2654435761u >> 28) - 8; }

/* Element (r, c) of a matrix [rows, K] stored as it is (K-major) or transposed. */
static void fill(bf16 *p, int rows, bool transposed, int seed)
{
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < K; k++)
            p[transposed ? k * rows + r : r * K + k] = __float2bfloat16((float)value((r * K + k) * 3 + seed));
}

template <int N, int A_MN, int B_MN> static int check(struct lane *l)
{
    bf16 *a, *b;
    float *c;
    CUtensorMap ma, mb;
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&a, M * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&b, N * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&c, M * N * 4), "memory"));
    fill(a, M, A_MN, 1);
    fill(b, N, B_MN, 2);
    TRY(A_MN ? tensor_map_2d(l, &ma, a, K, M, M, BK) : tensor_map_2d(l, &ma, a, M, K, K, M));
    TRY(B_MN ? tensor_map_2d(l, &mb, b, K, N, N, BK) : tensor_map_2d(l, &mb, b, N, K, K, N));
    size_t smem = 1024 + (M + N) * BK * 2;
    NEEDS_SMEM(l, (product<N, A_MN, B_MN>), smem);
    LAUNCH(l, (product<N, A_MN, B_MN>), 1, 128, smem, ma, mb, c);
    TRY(cuda_status(l->err, (int)cudaDeviceSynchronize(), "product"));
    int wrong = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int sum = 0;
            for (int k = 0; k < K; k++)
                sum += value((i * K + k) * 3 + 1) * value((j * K + k) * 3 + 2);
            wrong += c[i * N + j] != (float)sum;
        }
    cudaFree(a);
    cudaFree(b);
    cudaFree(c);
    printf("%s wgmma 64x%d, A %s-major, B %s-major: %d wrong\n", wrong ? "not ok" : "ok", N, A_MN ? "MN" : "K",
           B_MN ? "MN" : "K", wrong);
    return wrong ? err_set(l->err, ST_INTERNAL, "%d wrong", wrong) : ST_OK;
}

template <int N> static int check_left(struct lane *l)
{
    bf16 *a, *b, *transposed;
    float *c;
    CUtensorMap mb;
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&a, M * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&b, N * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&c, M * N * 4), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&transposed, M * N * 2), "memory"));
    fill(a, M, false, 1);
    fill(b, N, true, 2);
    for (int i = 0; i < M * N; i++)
        c[i] = 1000;
    TRY(tensor_map_2d(l, &mb, b, K, N, N, BK));
    size_t smem = 1024 + N * 64 * 4;
    NEEDS_SMEM(l, (product_left<N>), smem);
    LAUNCH(l, (product_left<N>), 1, 128, smem, a, mb, c, transposed);
    TRY(cuda_status(l->err, (int)cudaDeviceSynchronize(), "product_left"));
    int wrong = 0;
    for (int t = 0; t < 128; t++)
        for (int x = 0; x < N / 2; x++) {
            int i = t / 32 * 16 + t % 32 / 4 + x / 2 % 2 * 8, j = x / 4 * 8 + t % 4 * 2 + x % 2, sum = 0;
            for (int k = 0; k < K; k++)
                sum += value((i * K + k) * 3 + 1) * value((j * K + k) * 3 + 2);
            wrong += c[x * 128 + t] != (float)sum + 1000 ||
                     __bfloat162float(transposed[j * 64 + i]) != __bfloat162float(__float2bfloat16((float)sum));
        }
    cudaFree(a);
    cudaFree(b);
    cudaFree(c);
    cudaFree(transposed);
    printf("%s wgmma 64x%d, A from registers: %d wrong\n", wrong ? "not ok" : "ok", N, wrong);
    return wrong ? err_set(l->err, ST_INTERNAL, "%d wrong", wrong) : ST_OK;
}

template <int N> static int check_matrices(struct lane *l)
{
    bf16 *a, *b;
    float *c;
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&a, M * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&b, N * K * 2), "memory"));
    TRY(cuda_status(l->err, (int)cudaMallocManaged(&c, M * N * 4), "memory"));
    fill(a, M, false, 1);
    fill(b, N, false, 2);
    LAUNCH(l, product_matrices<N>, 1, 128, 1024 + N * K * 2, a, b, c);
    TRY(cuda_status(l->err, (int)cudaDeviceSynchronize(), "product_matrices"));
    int wrong = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int sum = 0;
            for (int k = 0; k < K; k++)
                sum += value((i * K + k) * 3 + 1) * value((j * K + k) * 3 + 2);
            wrong += c[i * N + j] != (float)sum;
        }
    cudaFree(a);
    cudaFree(b);
    cudaFree(c);
    printf("%s wgmma 64x%d, A from registers, B without swizzle: %d wrong\n", wrong ? "not ok" : "ok", N, wrong);
    return wrong ? err_set(l->err, ST_INTERNAL, "%d wrong", wrong) : ST_OK;
}

template <int N> static int check_width(struct lane *l)
{
    int failed = 0;
    failed += check<N, 0, 0>(l) != ST_OK;
    failed += check<N, 0, 1>(l) != ST_OK;
    failed += check<N, 1, 0>(l) != ST_OK;
    failed += check<N, 1, 1>(l) != ST_OK;
    return failed;
}

int main(void)
{
    struct dev dev;
    struct err e = {};
    struct dev_gpu want = {};
    if (dev_open_gpu(&dev, &want, 1, &e) != ST_OK || !((struct cuda_dev *)dev.impl)->hopper) {
        printf("not ok no Hopper GPU: %s\n0 passed, 1 failed\n", e.msg);
        return 1;
    }
    struct lane lane = {&dev, 0, &e, NULL};
    int failed = check_width<64>(&lane) + check_width<128>(&lane) + check_width<256>(&lane);
    failed += (check_left<64>(&lane) != ST_OK) + (check_left<128>(&lane) != ST_OK);
    failed += (check_matrices<16>(&lane) != ST_OK) + (check_matrices<32>(&lane) != ST_OK) +
              (check_matrices<48>(&lane) != ST_OK) + (check_matrices<64>(&lane) != ST_OK);
    if (e.code != ST_OK)
        printf("# %s\n", e.msg);
    dev_close(&dev);
    printf("%d passed, %d failed\n", 18 - failed, failed);
    return failed != 0;
}
