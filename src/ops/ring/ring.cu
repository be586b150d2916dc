/* ring_merge and ring_add, CUDA version; see ring.h. */
#include "ops/cuda/rows.cuh"
#include "ops/ring/ring.h"

/* A warp for each row of each head, 4 channels of a lane at once where rows are aligned. */
template <typename T, int V>
static __global__ void __launch_bounds__(256) merge_rows(const __grid_constant__ struct ring_merge_args a)
{
    int64_t r = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, heads = a.o.dim[2], rows = a.o.dim[1];
    if (r >= a.o.dim[0] * rows * heads)
        return;
    int64_t h = r % heads, i = r / heads % rows, b = r / heads / rows;
    const T *o = (const T *)a.o.data + b * a.o.stride[0] + i * a.o.stride[1] + h * a.o.stride[2];
    float *sum = (float *)a.sum.data + b * a.sum.stride[0] + i * a.sum.stride[1] + h * a.sum.stride[2],
          *total = (float *)a.total.data + b * a.total.stride[0] + h * a.total.stride[1] + i * a.total.stride[2];
    T *y = a.y.data != NULL ? (T *)a.y.data + b * a.y.stride[0] + i * a.y.stride[1] + h * a.y.stride[2] : NULL;
    float lse = ((const float *)a.lse.data)[b * a.lse.stride[0] + h * a.lse.stride[1] + i * a.lse.stride[2]];
    float before = a.acc_total ? *total : -INFINITY, top = fmaxf(before, lse), all = top, old = 0, add = 0;
    if (top != -INFINITY) {
        all = top + logf(expf(before - top) + expf(lse - top));
        old = expf(before - all);
        add = expf(lse - all);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        *total = all;
#pragma unroll 2
    for (int64_t c = threadIdx.x % 32 * V; c < a.o.dim[3]; c += 32 * V) {
        float part[V], so_far[V];
        load_floats(o + c, part);
        if (old != 0)
            load_floats(sum + c, so_far);
#pragma unroll
        for (int e = 0; e < V; e++)
            part[e] = add * part[e] + (old != 0 ? old * so_far[e] : 0.0f);
        store_floats(sum + c, part);
        if (y != NULL)
            store_floats(y + c, part);
    }
}

template <typename T> static int merge(struct lane *l, const struct ring_merge_args *a)
{
    const int64_t size = (int64_t)sizeof(T);
    bool vectors =
        aligned_to(&a->o, 4 * size) && aligned_to(&a->sum, 16) && (a->y.data == NULL || aligned_to(&a->y, 4 * size));
    unsigned grid = (unsigned)ceil_div(a->o.dim[0] * a->o.dim[1] * a->o.dim[2], 8);
    if (vectors)
        LAUNCH(l, (merge_rows<T, 4>), grid, 256, 0, *a);
    else
        LAUNCH(l, (merge_rows<T, 1>), grid, 256, 0, *a);
    return ST_OK;
}

extern "C" int ring_merge_cuda(struct lane *l, const struct ring_merge_args *a)
{
    TRY(ring_merge_check(a, l->err));
    BY_REAL(a->o.dtype, T, return merge<T>(l, a));
}

/* Vectors distributed flat. */
template <typename X, typename Y, int V>
static __global__ void __launch_bounds__(256) add_flat(const __grid_constant__ struct ring_add_args a)
{
    int64_t vectors = a.x.dim[1] / V, i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.x.dim[0] * vectors)
        return;
    int64_t row = i / vectors, at = (i - row * vectors) * V;
    float x[V], y[V];
    load_floats(row2<X>(a.x, row) + at, x);
    if (a.acc_y)
        load_floats(row2<Y>(a.y, row) + at, y);
#pragma unroll
    for (int e = 0; e < V; e++)
        x[e] += a.acc_y ? y[e] : 0.0f;
    store_floats(row2<Y>(a.y, row) + at, x);
}

template <typename X, typename Y> static int add(struct lane *l, const struct ring_add_args *a)
{
    if (aligned_to(&a->x, 4 * (int64_t)sizeof(X)) && aligned_to(&a->y, 4 * (int64_t)sizeof(Y)))
        LAUNCH(l, (add_flat<X, Y, 4>), (unsigned)ceil_div(a->x.dim[0] * (a->x.dim[1] / 4), 256), 256, 0, *a);
    else
        LAUNCH(l, (add_flat<X, Y, 1>), (unsigned)ceil_div(a->x.dim[0] * a->x.dim[1], 256), 256, 0, *a);
    return ST_OK;
}

extern "C" int ring_add_cuda(struct lane *l, const struct ring_add_args *a)
{
    TRY(ring_add_check(a, l->err));
    if (a->x.dtype == DT_BF16)
        return a->y.dtype == DT_BF16 ? add<bf16, bf16>(l, a) : add<bf16, float>(l, a);
    return a->y.dtype == DT_BF16 ? add<float, bf16>(l, a) : add<float, float>(l, a);
}
