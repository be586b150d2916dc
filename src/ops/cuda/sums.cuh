/* The second half of sums over rows: partial sums of fixed blocks of rows, added in an order that depends on their
 * number alone. */
#ifndef BRAID_OPS_CUDA_SUMS_CUH
#define BRAID_OPS_CUDA_SUMS_CUH

#include "ops/cuda/kernel.cuh"

/* out[c] (+)= sum over k < count of partial[k, c]: 32 ranges of k, each in order, then a tree over the ranges. Element
 * c of the result is at out + c / inner * stride + c % inner. */
static __global__ void __launch_bounds__(1024)
    sum_partials(const float *partial, int64_t count, int64_t n, float *out, int64_t inner, int64_t stride, bool acc)
{
    __shared__ float ranges[32][33];
    int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x, end = count * (threadIdx.y + 1) / 32;
    float sum = 0;
    if (c < n) {
        int64_t k = count * threadIdx.y / 32;
        for (; k + 4 <= end; k += 4) {
            float a = partial[k * n + c], b = partial[(k + 1) * n + c], d = partial[(k + 2) * n + c],
                  e = partial[(k + 3) * n + c];
            sum = (((sum + a) + b) + d) + e;
        }
        for (; k < end; k++)
            sum += partial[k * n + c];
    }
    ranges[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(ranges[threadIdx.x][threadIdx.y]);
    c = (int64_t)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && c < n) {
        float *to = out + c / inner * stride + c % inner;
        *to = acc ? *to + sum : sum;
    }
}

static inline int add_partials(struct lane *lane, const float *partial, int64_t count, int64_t n, float *out,
                               int64_t inner, int64_t stride, bool acc)
{
    LAUNCH(lane, sum_partials, dim3((unsigned)((n + 31) / 32)), dim3(32, 32), 0, partial, count, n, out,
           inner > 0 ? inner : 1, stride, acc);
    return ST_OK;
}

#endif
