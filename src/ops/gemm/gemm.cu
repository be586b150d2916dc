/* gemm on the GPU: cuBLASLt (dev/cublas.c), and what it leaves: the bias in the wide type, and
 * products over nothing. */
#include "ops/cuda/kernel.cuh"
#include "ops/gemm/gemm.h"

template <typename T> __global__ void add_bias(T *c, int64_t stride, const float *bias, int64_t rows, int64_t cols)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    float b = bias[col];
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y)
        c[r * stride + col] = from_float<T>(to_float(c[r * stride + col]) + b);
}

template <typename T> __global__ void scale_rows(T *c, int64_t stride, float beta, int64_t rows, int64_t cols)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols)
        return;
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y)
        c[r * stride + col] = from_float<T>(beta == 0 ? 0.0f : beta * to_float(c[r * stride + col]));
}

static dim3 grid_over(int64_t rows, int64_t cols)
{
    return dim3((unsigned)ceil_div(cols, 256), (unsigned)min_i64(rows, 4096));
}

/* A matrix of one row may have any stride; the library wants a legal one. */
static int64_t leading(const struct tensor *t) { return t->dim[0] > 1 ? t->stride[0] : max_i64(t->dim[1], 1); }

extern "C" int gemm_cuda(struct lane *l, const struct gemm_args *a)
{
    TRY(gemm_check(a, l->err));
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[a->trans_a ? 0 : 1];
    if (m == 0 || n == 0)
        return ST_OK;
    if (k == 0 || a->alpha == 0) {
        BY_REAL(a->c.dtype, T,
                LAUNCH(l, scale_rows<T>, grid_over(m, n), 256, 0, (T *)a->c.data, a->c.stride[0],
                       a->acc_c ? 1.0f : 0.0f, m, n));
    } else {
        struct blas_call g = {};
        g.a = a->a.data;
        g.b = a->b.data;
        g.c = a->c.data;
        g.ab = a->a.dtype;
        g.c_type = a->c.dtype;
        g.trans_a = a->trans_a;
        g.trans_b = a->trans_b;
        g.m = m;
        g.n = n;
        g.k = k;
        g.lda = leading(&a->a);
        g.ldb = leading(&a->b);
        g.ldc = leading(&a->c);
        g.alpha = (float)a->alpha;
        g.beta = a->acc_c ? 1 : 0;
        TRY(blas_gemm(l, &g));
    }
    if (present(&a->bias))
        BY_REAL(a->c.dtype, T,
                LAUNCH(l, add_bias<T>, grid_over(m, n), 256, 0, (T *)a->c.data, a->c.stride[0],
                       (const float *)a->bias.data, m, n));
    return ST_OK;
}
