/* layernorm, CUDA version; see layernorm.h. Forward: a block walks a row three times, for the mean, the variance and
 * the result; the second and third time it comes from the cache. Backward: a block owns a fixed run of rows, a thread
 * of it fixed columns with their partial sums of dw and db; sums.cuh adds those of all blocks. T is the type of what
 * layers read and write, S that of the residual stream: the same, or float beside bf16. */
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
#include "ops/layernorm/layernorm.h"

enum { THREADS = 256 };

struct layer_fwd {
    struct tensor x, y;
    const float *w, *b;
    float *mean, *rstd;
    int64_t rows, d;
    float eps, one; /* one: 1 if gains are 1 + w */
};

template <typename T, typename S>
static __global__ void __launch_bounds__(THREADS) layer_fwd_rows(const __grid_constant__ struct layer_fwd a)
{
    __shared__ float scratch[THREADS / 32];
    int64_t row = blockIdx.x;
    const S *x = row_ptr<S>(a.x, row);
    T *y = row_ptr<T>(a.y, row);
    float sum = 0, squares = 0;
    for (int64_t c = threadIdx.x; c < a.d; c += THREADS)
        sum += to_float(x[c]);
    float mean = block_sum<THREADS>(sum, scratch) / (float)a.d;
    for (int64_t c = threadIdx.x; c < a.d; c += THREADS) {
        float v = to_float(x[c]) - mean;
        squares += v * v;
    }
    float rstd = rsqrtf(block_sum<THREADS>(squares, scratch) / (float)a.d + a.eps);
    if (threadIdx.x == 0) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
    for (int64_t c = threadIdx.x; c < a.d; c += THREADS) {
        float v = (to_float(x[c]) - mean) * rstd * (a.w != NULL ? a.w[c] + a.one : 1.0f);
        y[c] = from_float<T>(a.b != NULL ? v + a.b[c] : v);
    }
}

extern "C" int layernorm_fwd_cuda(struct lane *l, const struct layernorm_fwd_args *a)
{
    TRY(layernorm_fwd_check(a, l->err));
    struct layer_fwd n = {};
    n.x = a->x;
    n.y = a->y;
    n.w = (const float *)a->w.data;
    n.b = (const float *)a->b.data;
    n.mean = (float *)a->mean.data;
    n.rstd = (float *)a->rstd.data;
    n.rows = a->x.dim[0];
    n.d = a->x.dim[1];
    n.eps = (float)a->eps;
    n.one = a->zero_centered ? 1.0f : 0.0f;
    if (a->y.dtype != a->x.dtype)
        LAUNCH(l, (layer_fwd_rows<bf16, float>), (unsigned)n.rows, THREADS, 0, n);
    else
        BY_REAL(a->x.dtype, T, LAUNCH(l, (layer_fwd_rows<T, T>), (unsigned)n.rows, THREADS, 0, n));
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

struct layer_bwd {
    struct tensor dy, x, dres, dx; /* dres may be absent */
    const float *w, *mean, *rstd;
    float *dw, *db; /* partial sums [blocks, d], or NULL */
    int64_t rows, d, rows_per_block;
    float one;
};

/* Blocks, and rows of each: by the number of rows alone. */
static int64_t rows_per_block(int64_t rows) { return max_i64(ceil_div(rows, 512), 8); }
static int64_t blocks_of(int64_t rows) { return ceil_div(rows, rows_per_block(rows)); }

template <typename T, typename S>
static __global__ void __launch_bounds__(THREADS) layer_bwd_rows(const __grid_constant__ struct layer_bwd a)
{
    __shared__ float scratch[THREADS / 32];
    int64_t first = blockIdx.x * a.rows_per_block, end = min(a.rows, first + a.rows_per_block);
    float *dw = a.dw != NULL ? a.dw + blockIdx.x * a.d : NULL, *db = a.db != NULL ? a.db + blockIdx.x * a.d : NULL;
    for (int64_t c = threadIdx.x; c < a.d; c += THREADS) {
        if (dw != NULL)
            dw[c] = 0;
        if (db != NULL)
            db[c] = 0;
    }
    for (int64_t row = first; row < end; row++) {
        const T *dy = row_ptr<T>(a.dy, row);
        const S *x = row_ptr<S>(a.x, row), *dres = a.dres.data != NULL ? row_ptr<S>(a.dres, row) : NULL;
        S *dx = row_ptr<S>(a.dx, row);
        float mean = a.mean[row], rstd = a.rstd[row], u_sum = 0, ux_sum = 0;
        for (int64_t c = threadIdx.x; c < a.d; c += THREADS) {
            float g = to_float(dy[c]), xh = (to_float(x[c]) - mean) * rstd,
                  u = g * (a.w != NULL ? a.w[c] + a.one : 1.0f);
            u_sum += u;
            ux_sum += u * xh;
            if (dw != NULL) /* this thread's own column */
                dw[c] += g * xh;
            if (db != NULL)
                db[c] += g;
        }
        float mean_u = block_sum<THREADS>(u_sum, scratch) / (float)a.d,
              mean_ux = block_sum<THREADS>(ux_sum, scratch) / (float)a.d;
        for (int64_t c = threadIdx.x; c < a.d; c += THREADS) {
            float xh = (to_float(x[c]) - mean) * rstd, u = to_float(dy[c]) * (a.w != NULL ? a.w[c] + a.one : 1.0f);
            float v = rstd * (u - mean_u - xh * mean_ux);
            dx[c] = from_float<S>(dres != NULL ? v + to_float(dres[c]) : v);
        }
    }
}

extern "C" int64_t layernorm_bwd_work_cuda(const struct layernorm_bwd_args *a)
{
    int64_t sums = (a->dw.rank > 0) + (a->db.rank > 0);
    return sums * blocks_of(rows_of(&a->x)) * cols_of(&a->x) * (int64_t)sizeof(float);
}

extern "C" int layernorm_bwd_cuda(struct lane *l, const struct layernorm_bwd_args *a)
{
    TRY(layernorm_bwd_check(a, l->err));
    TRY(check_work("layernorm_bwd", &a->work, layernorm_bwd_work_cuda(a), l->err));
    int64_t blocks = blocks_of(a->x.dim[0]);
    float *work = (float *)a->work.data;
    bool sums_w = present(&a->dw), sums_b = present(&a->db);
    struct layer_bwd n = {};
    n.dy = a->dy;
    n.x = a->x;
    n.dres = a->dres;
    n.dx = a->dx;
    n.w = (const float *)a->w.data;
    n.mean = (const float *)a->mean.data;
    n.rstd = (const float *)a->rstd.data;
    n.rows = a->x.dim[0];
    n.d = a->x.dim[1];
    n.dw = sums_w ? work : NULL;
    n.db = sums_b ? work + (sums_w ? blocks * n.d : 0) : NULL;
    n.rows_per_block = rows_per_block(n.rows);
    n.one = a->zero_centered ? 1.0f : 0.0f;
    if (a->dy.dtype != a->x.dtype)
        LAUNCH(l, (layer_bwd_rows<bf16, float>), (unsigned)blocks, THREADS, 0, n);
    else
        BY_REAL(a->x.dtype, T, LAUNCH(l, (layer_bwd_rows<T, T>), (unsigned)blocks, THREADS, 0, n));
    if (sums_w)
        TRY(add_partials(l, n.dw, blocks, n.d, (float *)a->dw.data, n.d, 0, a->acc_dw));
    return sums_b ? add_partials(l, n.db, blocks, n.d, (float *)a->db.data, n.d, 0, a->acc_db) : ST_OK;
}
