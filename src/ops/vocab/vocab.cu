/* vocab on the GPU: a block for each row; loss terms go to a table of rows and are summed in a fixed order. */
#include "ops/cuda/loss_sum.cuh"
#include "ops/vocab/vocab.h"

enum { THREADS = 256 };

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    row_stats(const __grid_constant__ struct tensor z, const int32_t *label, int64_t first, float *stats)
{
    __shared__ float scratch[THREADS / 32];
    int64_t row = blockIdx.x, n = z.dim[1];
    const T *from = row_at<T>(z, row);
    float max = -INFINITY, sum = 0;
    for (int64_t v = threadIdx.x; v < n; v += THREADS)
        max = fmaxf(max, to_float(from[v]));
    max = block_max<THREADS>(max, scratch);
    for (int64_t v = threadIdx.x; v < n; v += THREADS)
        sum += expf(to_float(from[v]) - max);
    sum = block_sum<THREADS>(sum, scratch);
    if (threadIdx.x != 0)
        return;
    int64_t id = label[row], at = id - first;
    stats[row * VOCAB_STATS + VOCAB_MAX] = max;
    stats[row * VOCAB_STATS + VOCAB_SUM] = sum;
    stats[row * VOCAB_STATS + VOCAB_TARGET] = id >= 0 && at >= 0 && at < n ? to_float(from[at]) : 0.0f;
}

extern "C" int vocab_stats_cuda(struct lane *l, const struct vocab_stats_args *a)
{
    TRY(vocab_stats_check(a, l->err));
    int64_t rows = a->z.dim[0];
    if (rows == 0)
        return ST_OK;
    BY_REAL(a->z.dtype, T,
            LAUNCH(l, row_stats<T>, (unsigned)rows, THREADS, 0, a->z, (const int32_t *)a->label.data, a->first,
                   (float *)a->stats.data));
    return ST_OK;
}

struct loss_rows {
    struct tensor z, dz;
    const float *all;
    const int32_t *label;
    const double *scale;
    float *nll;
    int64_t ranks, rows, first, vocab;
    float z_loss;
};

/* The same on every thread of the block. A label outside the vocabulary gives NaN: a GPU cannot refuse. */
__device__ __forceinline__ float lse_of(const struct loss_rows &p, int64_t row, float *nll)
{
    float max = -INFINITY, sum = 0, target = 0;
    for (int64_t k = 0; k < p.ranks; k++)
        max = fmaxf(max, p.all[(k * p.rows + row) * VOCAB_STATS + VOCAB_MAX]);
    for (int64_t k = 0; k < p.ranks; k++) {
        const float *s = p.all + (k * p.rows + row) * VOCAB_STATS;
        sum += s[VOCAB_SUM] * expf(s[VOCAB_MAX] - max);
        target += s[VOCAB_TARGET];
    }
    bool known = p.label[row] >= -1 && (p.vocab == 0 || p.label[row] < p.vocab);
    *nll = known ? max - target + logf(sum) : __int_as_float(0x7fffffff);
    return max + logf(sum);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) row_losses(const __grid_constant__ struct loss_rows p)
{
    int64_t row = blockIdx.x, n = p.z.dim[1], at = p.label[row] - p.first;
    bool counts = p.label[row] >= 0;
    float nll = 0, lse = lse_of(p, row, &nll);
    if (threadIdx.x == 0)
        p.nll[row] = counts || isnan(nll) ? nll : 0.0f;
    if (p.dz.data == NULL)
        return;
    float scale = counts ? (float)*p.scale : 0.0f, k = scale * (1.0f + 2.0f * p.z_loss * lse);
    const T *from = row_at<T>(p.z, row);
    T *to = row_at<T>(p.dz, row);
    for (int64_t v = threadIdx.x; v < n; v += THREADS) {
        float d = counts ? k * expf(to_float(from[v]) - lse) : 0.0f;
        to[v] = from_float<T>(counts && v == at ? d - scale : d);
    }
}

extern "C" int64_t vocab_loss_work_cuda(const struct vocab_loss_args *a)
{
    return a->z.dim[0] * (int64_t)sizeof(float);
}

extern "C" int vocab_loss_cuda(struct lane *l, const struct vocab_loss_args *a)
{
    TRY(vocab_loss_check(a, l->err));
    TRY(check_work("vocab_loss", &a->work, vocab_loss_work_cuda(a), l->err));
    int64_t rows = a->z.dim[0];
    struct loss_rows p = {a->z,
                          a->dz,
                          (const float *)a->all.data,
                          (const int32_t *)a->label.data,
                          (const double *)a->scale.data,
                          (float *)a->work.data,
                          a->all.dim[0],
                          rows,
                          a->first,
                          a->vocab,
                          (float)a->z_loss};
    if (rows > 0)
        BY_REAL(a->z.dtype, T, LAUNCH(l, row_losses<T>, (unsigned)rows, THREADS, 0, p));
    LAUNCH(l, sum_losses<THREADS>, 1, THREADS, 0, p.nll, p.label, rows, (double *)a->loss.data, a->acc_loss,
           (float *)NULL);
    return ST_OK;
}
