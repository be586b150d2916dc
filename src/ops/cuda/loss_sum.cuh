/* The sum of a loss over rows, for xent and vocab. */
#ifndef BRAID_OPS_CUDA_LOSS_SUM_CUH
#define BRAID_OPS_CUDA_LOSS_SUM_CUH

#include "ops/cuda/kernel.cuh"

/* Loss and number of labelled rows, summed in double by one block: rows by thread, then threads by a tree, always the
 * same. nll_out: may be NULL. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS)
    sum_losses(const float *nll, const int32_t *label, int64_t rows, double *loss, bool add, float *nll_out)
{
    __shared__ double sums[THREADS], counts[THREADS];
    double s = 0, n = 0;
    for (int64_t r = threadIdx.x; r < rows; r += THREADS) {
        s += (double)nll[r];
        n += label[r] >= 0;
        if (nll_out != NULL)
            nll_out[r] = nll[r];
    }
    sums[threadIdx.x] = s;
    counts[threadIdx.x] = n;
    for (int d = THREADS / 2; d > 0; d /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < d) {
            sums[threadIdx.x] += sums[threadIdx.x + d];
            counts[threadIdx.x] += counts[threadIdx.x + d];
        }
    }
    if (threadIdx.x == 0) {
        loss[0] = (add ? loss[0] : 0) + sums[0];
        loss[1] = (add ? loss[1] : 0) + counts[0];
    }
}

#endif
