/* What the CUDA files of sparse share: a call as kernels see it.
 *   sparse.cu           launchers; kernels for any type and width: plain FMAs, a warp for each query and head
 *   sparse_mma*.cu      tensor cores, bf16
 *   sparse_hopper*.cu   the same for Hopper
 * sparse_path.h says which of them run. */
#ifndef BRAID_OPS_SPARSE_CUDA_CUH
#define BRAID_OPS_SPARSE_CUDA_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/sparse/sparse.h"
#include "ops/sparse/sparse_path.h"

/* [batch][row][head][channel]; strides in elements. Keys have no head. */
template <typename T> struct rows_view {
    T *data;
    int64_t batch, row, head;
    __device__ __forceinline__ T *at(int64_t b, int64_t i, int64_t h) const
    {
        return data + b * batch + i * row + h * head;
    }
};

template <typename T> struct sparse_call {
    rows_view<T> q, kv, o, dout, dq, dkv;
    const int32_t *idx;
    int64_t idx_batch, idx_row;
    float *lse;
    int64_t lse_batch, lse_head;
    const float *sink;
    float *dsink;
    int batch, rows, keys, heads, width, dv, most;
    float scale;
    bool acc_dsink;
    __device__ __forceinline__ const int32_t *list(int64_t b, int64_t i) const
    {
        return idx + b * idx_batch + i * idx_row;
    }
    __device__ __forceinline__ float *lse_at(int64_t b, int64_t h, int64_t i) const
    {
        return lse + b * lse_batch + h * lse_head + i;
    }
};

/* An entry of a list as a key, or -1. */
__device__ __forceinline__ int key_of(int32_t entry, int keys) { return entry >= 0 && entry < keys ? entry : -1; }

/* Where the key stands in a query's list, -1 where it does not: place[key * key_step + query of the chunk *
 * query_step], filled with -1 before. */
template <int VALUE> static __global__ void __launch_bounds__(256) fill_words(int32_t *to, int64_t n)
{
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at < n)
        to[at] = VALUE;
}
template <typename T>
static __global__ void __launch_bounds__(256)
    note_list_places(const __grid_constant__ sparse_call<T> c, int b, int first, int count, int32_t *place,
                     int64_t key_step, int64_t query_step)
{
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int row = (int)(at / c.most), k = (int)(at % c.most);
    if (row >= count)
        return;
    int j = key_of(c.list(b, first + row)[k], c.keys);
    if (j >= 0)
        place[j * key_step + row * query_step] = k;
}

/* Parts of the backward pass's scratch. A chunk of queries of one sequence goes through at a time. */
struct sparse_parts {
    int64_t chunk;                           /* queries */
    int64_t delta, pairs, place, sum, bytes; /* offsets; all of it */
};

static inline struct sparse_device sparse_device_of(struct lane *l)
{
    const struct cuda_dev *d = cuda_of(l);
    struct sparse_device out = {d->hopper, d->smem_per_block};
    return out;
}
static inline struct sparse_shape sparse_shape_of(const struct tensor *q, const struct tensor *kv, int64_t dv,
                                                  bool aligned)
{
    struct sparse_shape s = {q->dtype, q->dim[2], kv->dim[2], dv, aligned};
    return s;
}
int sparse_fwd_mma(struct lane *l, const sparse_call<bf16> &c);
int sparse_fwd_hopper(struct lane *l, const sparse_call<bf16> &c);

/* Scratch of the backward pass on tensor cores, for a chunk of queries: weights and their gradients
 * [query][head][entry], what queries add to keys [query][entry][channel], where keys stand in lists [key][query]; for a
 * sequence: delta of all rows, sums of keys. Heads and entries are rounded up to tiles. */
struct sparse_scratch {
    float *delta;
    bf16 *p, *ds;
    float *add;
    bf16 *add_narrow; /* Hopper's: rounded; the other one is NULL */
    int32_t *place;
    float *sum;
    int heads, most;
};
/* How much, and where its parts are; out: may be NULL. */
int64_t sparse_mma_bytes(const struct sparse_bwd_args *a, void *work, sparse_scratch *out);
int64_t sparse_hopper_bytes(const struct sparse_bwd_args *a, void *work, sparse_scratch *out);
/* dq of a sequence, and the gradient of its keys in w.sum. */
int sparse_bwd_mma(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b);
int sparse_bwd_hopper(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b);

/* Weights of the entries of count lists from query first on, summed over heads: out[query][pitch]. Reads q, kv, idx,
 * lse. */
int sparse_weights_mma(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out,
                       int64_t pitch);
int sparse_weights_hopper(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out,
                          int64_t pitch);

#endif
