/* ssd backward, CUDA: the last step of both paths, gradients of A_log, dt_bias and D from their
 * parts by piece. */
#include "ops/ssd/ssd.h"
#include "ops/ssd/ssd_cuda.cuh"

enum { HEADS = 32, SLICES = 8 };

struct sum_job {
    const float *from;
    float *to; /* NULL: not wanted */
    bool add;
};
struct sum_jobs {
    struct sum_job of[3];
};

/* Slice y adds the pieces of its share in order, then the slices are added in order. */
static __global__ void __launch_bounds__(HEADS *SLICES)
    sums_kernel(const __grid_constant__ struct sum_jobs jobs, int count, int heads)
{
    __shared__ float sum[SLICES][HEADS];
    const struct sum_job &job = jobs.of[blockIdx.y];
    int h = blockIdx.x * HEADS + threadIdx.x, each = (count + SLICES - 1) / SLICES;
    if (job.to == NULL)
        return;
    float s = 0;
#pragma unroll 8
    for (int k = threadIdx.y * each; h < heads && k < min(count, ((int)threadIdx.y + 1) * each); k++)
        s += job.from[(int64_t)k * heads + h];
    sum[threadIdx.y][threadIdx.x] = s;
    __syncthreads();
    if (threadIdx.y != 0 || h >= heads)
        return;
    s = sum[0][threadIdx.x];
    for (int k = 1; k < SLICES; k++)
        s += sum[k][threadIdx.x];
    job.to[h] = job.add ? job.to[h] + s : s;
}

int ssd_add_sums(struct lane *l, const struct ssd_shape *s, const struct ssd_sums *m, const struct ssd_bwd_args *a)
{
    struct sum_jobs jobs = {{{m->a_log, (float *)a->dA_log.data, a->acc_dA_log},
                             {m->dt_bias, (float *)a->ddt_bias.data, a->acc_ddt_bias},
                             {m->d, present(&a->D) ? (float *)a->dD.data : NULL, a->acc_dD}}};
    LAUNCH(l, sums_kernel, dim3((unsigned)ceil_div(s->heads, HEADS), 3), dim3(HEADS, SLICES), 0, jobs,
           s->batch * s->pieces, s->heads);
    return ST_OK;
}
