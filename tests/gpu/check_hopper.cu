/* The Hopper helper header alone: products of small integers, exact in fp32, for all four pairs of operand majorness and
 * all widths, through bulk copies, mbarriers and wgmma. Prints "N passed, N failed" last. */
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
    printf("%s wgmma 64x%d, A %s-major, B %s-major: %d wrong\n", wrong ? "not ok" : "ok", N, A_MN ? "MN" : "K", B_MN ? "MN" : "K", wrong);
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
    if (e.code != ST_OK)
        printf("# %s\n", e.msg);
    dev_close(&dev);
    printf("%d passed, %d failed\n", 12 - failed, failed);
    return failed != 0;
}
