/* sqnorm and clip, CUDA version; see gradnorm.h. Blocks of SQNORM_BLOCK elements of up to PARTS tensors a launch are
 * summed in double, each by a fixed tree, into work; then a block for each tensor adds its partial sums, again in a
 * fixed order. Clip adds the sums of all tensors one after the other, as the reference does. */
#include "ops/cuda/rows.cuh"
#include "ops/gradnorm/gradnorm.h"

enum { PARTS = 128, THREADS = 256 };

struct norm_part {
    const float *x;
    int64_t n, first_block; /* first_block: of all tensors of the call, where its partial sums begin */
};
struct norm_call {
    struct norm_part part[PARTS];
    int parts;
    int64_t first_block; /* of this launch */
    double *partial, *out;
};

__device__ __forceinline__ double block_sum_f64(double x, double *scratch)
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++)
        sum += scratch[w];
    return sum;
}

static __global__ void __launch_bounds__(THREADS) sum_squares(const __grid_constant__ struct norm_call a)
{
    __shared__ double scratch[THREADS / 32];
    int64_t block = a.first_block + blockIdx.x;
    int k = 0;
    for (int d = 64; d > 0; d >>= 1)
        if (k + d < a.parts && a.part[k + d].first_block <= block)
            k += d;
    const float *x = a.part[k].x;
    int64_t first = (block - a.part[k].first_block) * SQNORM_BLOCK, end = min(a.part[k].n, first + SQNORM_BLOCK);
    double sum = 0;
    if ((uintptr_t)x % 16 == 0 && end - first == SQNORM_BLOCK) {
#pragma unroll
        for (int j = 0; j < SQNORM_BLOCK / (4 * THREADS); j++) {
            float v[4];
            load_floats(x + first + (j * THREADS + threadIdx.x) * 4, v);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum += (double)v[e] * (double)v[e];
        }
    } else {
        for (int64_t i = first + threadIdx.x; i < end; i += THREADS)
            sum += (double)x[i] * (double)x[i];
    }
    sum = block_sum_f64(sum, scratch);
    if (threadIdx.x == 0)
        a.partial[block] = sum;
}

/* One block a tensor. */
static __global__ void __launch_bounds__(1024) sum_blocks(const __grid_constant__ struct norm_call a)
{
    __shared__ double scratch[32];
    const struct norm_part &at = a.part[blockIdx.x];
    int64_t blocks = (at.n + SQNORM_BLOCK - 1) / SQNORM_BLOCK;
    const double *from = a.partial + at.first_block;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < blocks; i += 1024)
        sum += from[i];
    sum = block_sum_f64(sum, scratch);
    if (threadIdx.x == 0)
        a.out[blockIdx.x] = sum;
}

static int64_t blocks_of(const struct tensor *x) { return ceil_div(x->dim[0], SQNORM_BLOCK); }

extern "C" int64_t sqnorm_work_cuda(const struct sqnorm_args *a)
{
    int64_t blocks = 0;
    for (int k = 0; k <= a->n_more; k++)
        blocks += blocks_of(sqnorm_at(a, k));
    return blocks * (int64_t)sizeof(double);
}

extern "C" int sqnorm_cuda(struct lane *l, const struct sqnorm_args *a)
{
    TRY(sqnorm_check(a, l->err));
    TRY(check_work("sqnorm", &a->work, sqnorm_work_cuda(a), l->err));
    struct norm_call c = {};
    c.partial = (double *)a->work.data;
    c.out = (double *)a->out.data;
    int64_t block = 0;
    for (int k = 0; k <= a->n_more; k++) {
        const struct tensor *x = sqnorm_at(a, k);
        struct norm_part part = {(const float *)x->data, x->dim[0], block};
        c.part[c.parts++] = part;
        block += blocks_of(x);
        if (c.parts < PARTS && k < a->n_more)
            continue;
        LAUNCH(l, sum_squares, (unsigned)(block - c.first_block), THREADS, 0, c);
        LAUNCH(l, sum_blocks, (unsigned)c.parts, 1024, 0, c);
        c.out += c.parts;
        c.parts = 0;
        c.first_block = block;
    }
    return ST_OK;
}

/* ---- clip ------------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(256)
    clip_sums(const double *sums, int64_t n, int64_t stride, const double *loss, double *out, double max_norm)
{
    __shared__ double part[256];
    double total = 0;
    for (int64_t first = 0; first < n; first += 256) {
        int64_t i = first + threadIdx.x;
        int count = (int)min((int64_t)256, n - first);
        part[threadIdx.x] = i < n ? sums[i * stride] : 0.0;
        __syncthreads();
        if (threadIdx.x == 0)
#pragma unroll 8
            for (int k = 0; k < count; k++)
                total += part[k];
        __syncthreads();
    }
    if (threadIdx.x != 0)
        return;
    double norm = sqrt(total), coef = max_norm / (norm + 1e-6);
    bool fine = isfinite(norm) && (loss == NULL || (isfinite(loss[0]) && isfinite(loss[1])));
    out[0] = norm;
    out[1] = max_norm == 0 || coef > 1 ? 1.0 : coef;
    out[2] = fine ? 0.0 : 1.0;
    out[3] = fine ? total : nan("");
}

extern "C" int clip_cuda(struct lane *l, const struct clip_args *a)
{
    TRY(clip_check(a, l->err));
    LAUNCH(l, clip_sums, 1u, 256, 0, (const double *)a->sums.data, a->sums.dim[0], a->sums.stride[0],
           (const double *)a->loss.data, (double *)a->out.data, a->max_norm);
    return ST_OK;
}
