/* mlakeys, CUDA version; see mlakeys.h. Vectors of the keys distributed flat; the sum over heads is one thread's, in
 * order. */
#include "ops/cuda/rows.cuh"
#include "ops/mlakeys/mlakeys.h"

template <typename T> __device__ __forceinline__ T *head_at(const struct tensor &t, int64_t token, int64_t head)
{
    return (T *)t.data + token * t.stride[0] + head * t.stride[1];
}

template <typename T, int V>
static __global__ void __launch_bounds__(256)
    make_keys(const __grid_constant__ struct tensor kv, const __grid_constant__ struct tensor shared,
              const __grid_constant__ struct tensor k, int64_t nope)
{
    unsigned vectors = (unsigned)(k.dim[2] / V), heads = (unsigned)k.dim[1];
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= k.dim[0] * heads * vectors)
        return;
    int64_t row = i / vectors, token = row / heads, head = row - token * heads, at = (i - row * vectors) * V;
    float value[V];
    load_floats(at < nope ? head_at<const T>(kv, token, head) + at : row2<const T>(shared, token) + at - nope, value);
    store_floats(head_at<T>(k, token, head) + at, value);
}

template <typename T, int V>
static __global__ void __launch_bounds__(256)
    copy_own(const __grid_constant__ struct tensor dk, const __grid_constant__ struct tensor dkv, int64_t nope)
{
    unsigned vectors = (unsigned)(nope / V), heads = (unsigned)dk.dim[1];
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= dk.dim[0] * heads * vectors)
        return;
    int64_t row = i / vectors, token = row / heads, head = row - token * heads, at = (i - row * vectors) * V;
    float value[V];
    load_floats(head_at<const T>(dk, token, head) + at, value);
    store_floats(head_at<T>(dkv, token, head) + at, value);
}

template <typename T, int V>
static __global__ void __launch_bounds__(128)
    sum_shared(const __grid_constant__ struct tensor dk, const __grid_constant__ struct tensor dshared, int64_t nope)
{
    unsigned vectors = (unsigned)(dshared.dim[1] / V);
    int64_t i = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (i >= dk.dim[0] * vectors)
        return;
    int64_t token = i / vectors, at = (i - token * vectors) * V;
    float sum[V] = {};
#pragma unroll 8
    for (int64_t h = 0; h < dk.dim[1]; h++) {
        float value[V];
        load_floats(head_at<const T>(dk, token, h) + nope + at, value);
#pragma unroll
        for (int e = 0; e < V; e++)
            sum[e] += value[e];
    }
    store_floats(row2<T>(dshared, token) + at, sum);
}

/* Heads of t begin at multiples of 16 bytes; parts of them may be taken. */
static bool aligned_heads(const struct tensor *t)
{
    if (t->data == NULL)
        return true;
    int64_t n = 16 / (int64_t)dtype_bytes(t->dtype);
    bool fine = pointer16(t->data);
    for (int i = 0; i < t->rank - 1; i++)
        fine = fine && t->stride[i] % n == 0;
    return fine;
}

template <typename T, int V> static int fwd_launch(struct lane *l, const struct mlakeys_fwd_args *a)
{
    int64_t total = tensor_elems(&a->k) / V;
    LAUNCH(l, (make_keys<T, V>), (unsigned)ceil_div(total, 256), 256, 0, a->kv, a->shared, a->k,
           a->k.dim[2] - a->shared.dim[1]);
    return ST_OK;
}

template <typename T> static int fwd_run(struct lane *l, const struct mlakeys_fwd_args *a)
{
    constexpr int V = pack<T>::N;
    bool vectors = aligned_heads(&a->kv) && aligned_heads(&a->shared) && aligned_heads(&a->k) &&
                   a->shared.dim[1] % V == 0 && a->k.dim[2] % V == 0;
    return vectors ? fwd_launch<T, V>(l, a) : fwd_launch<T, 1>(l, a);
}

extern "C" int mlakeys_fwd_cuda(struct lane *l, const struct mlakeys_fwd_args *a)
{
    TRY(mlakeys_fwd_check(a, l->err));
    BY_REAL(a->k.dtype, T, return fwd_run<T>(l, a));
}

template <typename T, int V> static int bwd_launch(struct lane *l, const struct mlakeys_bwd_args *a)
{
    int64_t tokens = a->dk.dim[0], heads = a->dk.dim[1];
    if (present(&a->dkv))
        LAUNCH(l, (copy_own<T, V>), (unsigned)ceil_div(tokens * heads * (a->nope / V), 256), 256, 0, a->dk, a->dkv,
               a->nope);
    if (present(&a->dshared))
        LAUNCH(l, (sum_shared<T, V>), (unsigned)ceil_div(tokens * (a->dshared.dim[1] / V), 128), 128, 0, a->dk,
               a->dshared, a->nope);
    return ST_OK;
}

template <typename T> static int bwd_run(struct lane *l, const struct mlakeys_bwd_args *a)
{
    constexpr int V = pack<T>::N;
    bool vectors = aligned_heads(&a->dk) && aligned_heads(&a->dkv) && aligned_heads(&a->dshared) && a->nope % V == 0 &&
                   a->dk.dim[2] % V == 0;
    return vectors ? bwd_launch<T, V>(l, a) : bwd_launch<T, 1>(l, a);
}

extern "C" int mlakeys_bwd_cuda(struct lane *l, const struct mlakeys_bwd_args *a)
{
    TRY(mlakeys_bwd_check(a, l->err));
    BY_REAL(a->dk.dtype, T, return bwd_run<T>(l, a));
}
