/* epplan on the GPU: every place of the buffers is computed on its own from the counts; nothing is counted twice,
 * nothing is added by atomics. */
#include "ops/cuda/kernel.cuh"
#include "ops/epplan/epplan.h"

enum { THREADS = 256 };

static unsigned grid_for(int64_t n) { return (unsigned)min_i64(max_i64(ceil_div(n, THREADS), 1), 132 * 16); }

__global__ void send_counts(const int32_t *offset, int ranks, int local, int64_t cap, int32_t *count, int32_t *rows,
                            double *need, bool acc)
{
    for (int x = threadIdx.x; x < ranks * local; x += THREADS)
        count[x] = offset[x + 1] - offset[x];
    for (int r = threadIdx.x; r < ranks; r += THREADS)
        rows[r] = (int32_t)min((int64_t)(offset[(r + 1) * local] - offset[r * local]), cap);
    if (threadIdx.x != 0)
        return;
    double most = acc ? *need : 0;
    for (int r = 0; r < ranks; r++)
        most = fmax(most, (double)(offset[(r + 1) * local] - offset[r * local]));
    *need = most;
}

/* Choice i, by its row of moeplan: the rank is found by halving. */
__global__ void send_to(const int32_t *offset, const int32_t *row, int64_t n, int ranks, int local, int64_t cap,
                        int32_t *to)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * THREADS) {
        int r = row[i], low = 0, high = ranks;
        while (high - low > 1) {
            int mid = (low + high) / 2;
            if (offset[mid * local] <= r)
                low = mid;
            else
                high = mid;
        }
        int64_t at = r - offset[low * local];
        to[i] = r < 0 || at >= cap ? -1 : (int32_t)(low * cap + at);
    }
}

__global__ void send_from(const int32_t *offset, const int32_t *src, int ranks, int local, int64_t cap, int32_t *from)
{
    int64_t n = ranks * cap;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n; at += (int64_t)gridDim.x * THREADS) {
        int r = (int)(at / cap), first = offset[r * local];
        int64_t i = at % cap;
        from[at] = i < offset[(r + 1) * local] - first ? src[first + i] : -1;
    }
}

extern "C" int epsend_cuda(struct lane *l, const struct epsend_args *a)
{
    TRY(epsend_check(a, l->err));
    int ranks = (int)a->count.dim[0], local = (int)a->count.dim[1];
    int64_t cap = a->from.dim[0] / ranks, n = tensor_elems(&a->row);
    const int32_t *offset = (const int32_t *)a->offset.data;
    LAUNCH(l, send_counts, 1, THREADS, 0, offset, ranks, local, cap, (int32_t *)a->count.data, (int32_t *)a->rows.data,
           (double *)a->need.data, a->acc_need);
    if (n > 0)
        LAUNCH(l, send_to, grid_for(n), THREADS, 0, offset, (const int32_t *)a->row.data, n, ranks, local, cap,
               (int32_t *)a->to.data);
    if (cap > 0)
        LAUNCH(l, send_from, grid_for(ranks * cap), THREADS, 0, offset, (const int32_t *)a->src.data, ranks, local, cap,
               (int32_t *)a->from.data);
    return ST_OK;
}

/* Rows of rank r for local experts before x, cut at cap. */
__device__ __forceinline__ int64_t before(const int32_t *count, int local, int64_t cap, int r, int x)
{
    int64_t sum = 0;
    for (int y = 0; y < x; y++)
        sum += max(count[r * local + y], 0);
    return min(sum, cap);
}

/* One block: start[x, r] = first row of local expert x from rank r. Ranks times local experts are
 * few thousand at most. */
__global__ void recv_offsets(const int32_t *count, int ranks, int local, int64_t cap, int32_t *offset, int32_t *rows)
{
    for (int r = threadIdx.x; r < ranks; r += THREADS)
        rows[r] = (int32_t)before(count, local, cap, r, local);
    for (int x = threadIdx.x; x <= local; x += THREADS) {
        int64_t sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += before(count, local, cap, r, x);
        offset[x] = (int32_t)sum;
    }
}

/* Place at of the buffers: the expert it belongs to by walking the rank's counts, then the rows in front of it. */
__global__ void recv_to(const int32_t *count, int ranks, int local, int64_t cap, int32_t *to)
{
    int64_t n = ranks * cap;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n; at += (int64_t)gridDim.x * THREADS) {
        int r = (int)(at / cap), x = 0;
        int64_t i = at % cap, first = 0;
        while (x < local && i >= first + max(count[r * local + x], 0))
            first += max(count[r * local + x++], 0);
        if (x == local) {
            to[at] = -1;
            continue;
        }
        int64_t row = i - first; /* among the rank's rows for x */
        for (int q = 0; q < ranks; q++)
            row += before(count, local, cap, q, q < r ? x + 1 : x);
        to[at] = (int32_t)row;
    }
}

__global__ void recv_clear(int64_t n, int32_t *from)
{
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n; at += (int64_t)gridDim.x * THREADS)
        from[at] = -1;
}

__global__ void recv_from(const int32_t *to, int64_t n, int32_t *from)
{
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n; at += (int64_t)gridDim.x * THREADS)
        if (to[at] >= 0)
            from[to[at]] = (int32_t)at;
}

extern "C" int eprecv_cuda(struct lane *l, const struct eprecv_args *a)
{
    TRY(eprecv_check(a, l->err));
    int ranks = (int)a->count.dim[0], local = (int)a->count.dim[1];
    int64_t n = a->from.dim[0], cap = n / ranks;
    const int32_t *count = (const int32_t *)a->count.data;
    LAUNCH(l, recv_offsets, 1, THREADS, 0, count, ranks, local, cap, (int32_t *)a->offset.data,
           (int32_t *)a->rows.data);
    if (n == 0)
        return ST_OK;
    LAUNCH(l, recv_to, grid_for(n), THREADS, 0, count, ranks, local, cap, (int32_t *)a->to.data);
    LAUNCH(l, recv_clear, grid_for(n), THREADS, 0, n, (int32_t *)a->from.data);
    LAUNCH(l, recv_from, grid_for(n), THREADS, 0, (const int32_t *)a->to.data, n, (int32_t *)a->from.data);
    return ST_OK;
}
