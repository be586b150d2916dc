/* What programs that time kernels on a GPU share: errors end them, and random data. */
#ifndef BRAID_TESTS_GPU_BENCH_CUH
#define BRAID_TESTS_GPU_BENCH_CUH

#include "ops/cuda/kernel.cuh"

#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_ != cudaSuccess) {                                                                                       \
            printf("not ok %s: %s\n", #call, cudaGetErrorString(e_));                                                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Roughly normal numbers from a counter. */
static __device__ float noise(uint64_t i, uint64_t seed)
{
    float sum = 0;
    for (int k = 0; k < 4; k++) {
        uint64_t z = (i * 4 + k + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
        z ^= z >> 31;
        z *= 0x94d049bb133111ebull;
        z ^= z >> 29;
        sum += (float)(z & 0xffffff) / 16777216.0f - 0.5f;
    }
    return sum * 1.7f;
}
/* mean + scale * noise. */
template <typename T> static __global__ void fill(T *p, int64_t n, float scale, float mean, uint64_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        p[i] = from_float<T>(mean + scale * noise((uint64_t)i, seed));
}

/* The GPU and its first lane; without one that is said, and false. */
static inline bool open_gpu(struct dev *dev, struct lane *lane, struct err *e, const struct dev_gpu *want)
{
    if (dev_open_gpu(dev, want, 1, e) != ST_OK) {
        printf("not ok no GPU: %s\n", e->msg);
        return false;
    }
    lane->dev = dev;
    lane->err = e;
    return true;
}

#endif
