/* gemm8 on the GPU: cuBLASLt (dev/cublas.c) where it has a kernel (compute capability 9.0, blocks of 128 or one scale,
 * sizes that are multiples of 16), else a plain kernel that decodes tiles to fp32; see gemm8.h. */
#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/gemm8/gemm8.h"
#include "ops/quantise/quantise.h"

enum { TILE = 64, DEPTH = 32 };

struct operand {
    const uint8_t *codes;
    const float *scales;
    int64_t rows, stride; /* stride of scales */
    int block;
    bool square, e5m2;
};
struct product {
    struct operand a, b;
    void *c;
    const float *bias;
    int64_t k, ldc;
    bool adds;
};

static __device__ __forceinline__ float decoded(const struct operand &o, int64_t k_all, int64_t r, int64_t k)
{
    if (r >= o.rows || k >= k_all)
        return 0;
    uint8_t code = o.codes[r * k_all + k];
    int64_t at = o.block == 0 ? 0 : o.square ? r / o.block * o.stride + k / o.block : k / o.block * o.stride + r;
    return f8_to_f32(code, o.e5m2 ? DT_F8_E5M2 : DT_F8_E4M3) * o.scales[at];
}

/* 16 x 16 threads, each with 4 x 4 results. */
template <typename T>
static __global__ void __launch_bounds__(256) multiply_codes(const __grid_constant__ struct product p)
{
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int64_t r0 = (int64_t)blockIdx.y * TILE, c0 = (int64_t)blockIdx.x * TILE;
    float sum[4][4] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            int r = i / DEPTH, k = i % DEPTH;
            a[k][r] = decoded(p.a, p.k, r0 + r, k0 + k);
            b[k][r] = decoded(p.b, p.k, c0 + r, k0 + k);
        }
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < DEPTH; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] += a[k][ty + 16 * i] * b[k][tx + 16 * j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            int64_t r = r0 + ty + 16 * i, col = c0 + tx + 16 * j;
            if (r >= p.a.rows || col >= p.b.rows)
                continue;
            T *c = (T *)p.c + r * p.ldc + col;
            *c = from_float<T>(sum[i][j] + (p.bias != NULL ? p.bias[col] : 0.0f) + (p.adds ? to_float(*c) : 0.0f));
        }
}

template <typename T>
static __global__ void add_bias8(T *c, int64_t stride, const float *bias, int64_t rows, int64_t cols)
{
    int64_t col = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t r = blockIdx.y; col < cols && r < rows; r += gridDim.y)
        c[r * stride + col] = from_float<T>(to_float(c[r * stride + col]) + bias[col]);
}

static struct operand operand_of(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square)
{
    struct operand o = {};
    o.codes = (const uint8_t *)codes->data;
    o.scales = (const float *)scales->data;
    o.rows = codes->dim[0];
    o.stride = f8_scale_stride(codes->dim[0], codes->dim[1], block, square);
    o.block = (int)block;
    o.square = square;
    o.e5m2 = codes->dtype == DT_F8_E5M2;
    return o;
}

static int plain(struct lane *l, const struct gemm8_args *a)
{
    struct product p = {};
    int64_t m = a->c.dim[0], n = a->c.dim[1];
    if (ceil_div(m, TILE) > 65535)
        return err_set(l->err, ST_UNSUPPORTED, "gemm8: %lld rows are more than one launch takes", (long long)m);
    p.a = operand_of(&a->a, &a->as, a->block, a->a_square);
    p.b = operand_of(&a->b, &a->bs, a->block, a->b_square);
    p.c = a->c.data;
    p.bias = (const float *)a->bias.data;
    p.k = a->a.dim[1];
    p.ldc = m > 1 ? a->c.stride[0] : n;
    p.adds = a->acc_c;
    dim3 grid((unsigned)ceil_div(n, TILE), (unsigned)ceil_div(m, TILE));
    BY_REAL(a->c.dtype, T, LAUNCH(l, multiply_codes<T>, grid, 256, 0, p));
    return ST_OK;
}

static enum blas_scale scale_mode(int64_t block, bool square)
{
    return block == 0 ? BLAS_SCALE_TENSOR : square ? BLAS_SCALE_SQUARE : BLAS_SCALE_ROWS;
}

/* *done false: not for the library. It has no product of two E5M2. */
static int library(struct lane *l, const struct gemm8_args *a, bool *done)
{
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[1], ldc = m > 1 ? a->c.stride[0] : n;
    const struct cuda_dev *d = cuda_of(l);
    bool fits = d->major == 9 && d->hopper && (a->block == 128 || a->block == 0) && k % 16 == 0 && n % 16 == 0 &&
                ldc % 16 == 0 && k > 0 && (a->a.dtype == DT_F8_E4M3 || a->b.dtype == DT_F8_E4M3);
    *done = false;
    if (!fits)
        return ST_OK;
    struct blas_call g = {};
    g.a = a->a.data;
    g.b = a->b.data;
    g.c = a->c.data;
    g.ab = a->a.dtype;
    g.b_type = a->b.dtype;
    g.c_type = a->c.dtype;
    g.a_scale = scale_mode(a->block, a->a_square);
    g.b_scale = scale_mode(a->block, a->b_square);
    g.a_scales = a->as.data;
    g.b_scales = a->bs.data;
    g.trans_b = true;
    g.m = m;
    g.n = n;
    g.k = k;
    g.lda = g.ldb = k;
    g.ldc = ldc;
    g.alpha = 1;
    g.beta = a->acc_c ? 1 : 0;
    TRY(blas_gemm8(l, &g, done));
    if (*done && present(&a->bias)) {
        dim3 grid((unsigned)ceil_div(n, 256), (unsigned)min_i64(m, 4096));
        BY_REAL(a->c.dtype, T,
                LAUNCH(l, add_bias8<T>, grid, 256, 0, (T *)a->c.data, ldc, (const float *)a->bias.data, m, n));
    }
    return ST_OK;
}

extern "C" int gemm8_cuda(struct lane *l, const struct gemm8_args *a)
{
    bool done = false;
    TRY(gemm8_check(a, l->err));
    if (a->c.dim[0] == 0 || a->c.dim[1] == 0)
        return ST_OK;
    TRY(library(l, a, &done));
    return done ? ST_OK : plain(l, a);
}
