/* ssd backward, CUDA: the last step of both paths, gradients of A_log, dt_bias and D from their parts by piece. */
#include "ops/ssd/ssd_cuda.cuh"
#include "ops/ssd/ssd.h"

enum { HEADS = 32, SLICES = 8 };

/* Slice y adds the pieces of its share in order, then the slices are added in order. */
static __global__ void __launch_bounds__(HEADS *SLICES)
    sums_kernel(const float *from, float *to, int count, int heads, bool add)
{
    __shared__ float sum[SLICES][HEADS];
    int h = blockIdx.x * HEADS + threadIdx.x, each = (count + SLICES - 1) / SLICES;
    float s = 0;
    for (int k = threadIdx.y * each; h < heads && k < min(count, ((int)threadIdx.y + 1) * each); k++)
        s += from[(int64_t)k * heads + h];
    sum[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y != 0 || h >= heads)
        return;
    s = sum[0][threadIdx.x];
    for (int k = 1; k < SLICES; k++)
        s += sum[k][threadIdx.x];
    to[h] = add ? to[h] + s : s;
}

static int add_one(struct lane *l, const struct ssd_shape *s, const float *from, const struct tensor *to, bool add)
{
    dim3 grid((unsigned)ceil_div(s->heads, HEADS));
    if (present(to))
        LAUNCH(l, sums_kernel, grid, dim3(HEADS, SLICES), 0, from, (float *)to->data, s->batch * s->pieces, s->heads, add);
    return ST_OK;
}

int ssd_add_sums(struct lane *l, const struct ssd_shape *s, const struct ssd_sums *m, const struct ssd_bwd_args *a)
{
    TRY(add_one(l, s, m->a_log, &a->dA_log, a->acc_dA_log));
    TRY(add_one(l, s, m->dt_bias, &a->ddt_bias, a->acc_ddt_bias));
    return present(&a->D) ? add_one(l, s, m->d, &a->dD, a->acc_dD) : ST_OK;
}
