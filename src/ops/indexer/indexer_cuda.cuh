/* What the CUDA files of the indexer share: a call as kernels see it, and which keys a query sees. */
#ifndef BRAID_OPS_INDEXER_CUDA_CUH
#define BRAID_OPS_INDEXER_CUDA_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/indexer/indexer.h"

/* [batch][row][head][channel]; strides in elements. What has no heads has a stride of 0 there. */
template <typename T> struct index_rows {
    T *data;
    int64_t batch, row, head;
    __device__ __forceinline__ T *at(int64_t b, int64_t i, int64_t h) const
    {
        return data + b * batch + i * row + h * head;
    }
};
template <typename T> static index_rows<T> index_view(const struct tensor *t)
{
    index_rows<T> v = {(T *)t->data, t->stride[0], t->stride[1], t->rank == 4 ? t->stride[2] : 0};
    return v;
}

template <typename T> struct index_call {
    index_rows<T> q, k, mq, mk, dq, dk, dw;
    index_rows<float> w;
    const float *lse; /* NULL: that of the row's own keys */
    int64_t lse_batch, lse_head;
    const float *mass; /* of every rank; NULL: rows count once */
    int ranks, rank;
    const int32_t *idx; /* NULL: all keys that a row sees */
    int64_t idx_batch, idx_row;
    const int32_t *doc;
    int64_t doc_batch;
    const int64_t *start;
    int batch, rows, keys, heads, width, main_heads, per_group, main_width, most;
    int64_t ratio;
    float score_scale, softmax_scale;
    bool relu, by_key; /* by_key: scores of a range of keys stand where the key does, else from 0 on */
};

/* The keys that query i sees. */
template <typename T> __device__ __forceinline__ index_range row_seen(const index_call<T> &c, int64_t b, int64_t i)
{
    return index_visible((c.start != NULL ? *c.start : 0) + i, c.doc != NULL ? c.doc[b * c.doc_batch + i] : 0, c.ratio,
                         c.keys);
}

/* ---- tensor cores (indexer_mma.cu): bf16, 64 or 128 channels, at most 64 heads */

bool index_cores_fit(const struct tensor *q, const struct tensor *k);
/* Scores of count rows from row first (of all sequences) on, times scale: out[row][key], or [row][entry] with lists,
 * where an entry that is no key gets minus infinity. Chosen by index_path_of (ops/sparse/sparse_path.h) from the two
 * below. */
int index_scores(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out, int64_t pitch,
                 float scale);
int index_scores_mma(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out,
                     int64_t pitch, float scale);
/* Hopper (indexer_hopper.cu): no lists. */
int index_scores_hopper(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out,
                        int64_t pitch, float scale);
/* Where a key stands among those of a row of the chunk, -1: nowhere. Rows of a key are neighbours where rows have
 * lists, so that a warp reads 32 of them at once; keys of a row where rows have ranges, so that they are written
 * together. */
struct index_places {
    int32_t *data;
    int64_t row, key; /* strides */
    __device__ __forceinline__ int32_t *at(int64_t r, int64_t k) const { return data + r * row + k * key; }
};
/* Gradients of a chunk of rows from those of their scores, target[row][2 most]; what rows add to keys: add[row][most].
 * */
struct index_gradient {
    const float *target;
    float *add, *sum;
    index_places place;
    const double *scale;
    double factor;
};
int index_gradient_mma(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int64_t first, int count);
int index_sum_keys(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int count, bool keep);

/* Attention weights of the keys that count rows of sequence b see, row first on, summed over heads (indexer_ranges.cu):
 * out[row][n] of key first + n of the row's range, all of it. lse: scratch [heads, count] where c has none. */
bool index_ranges_fit(const struct tensor *mq, const struct tensor *mk);
int index_range_weights(struct lane *l, const index_call<bf16> &c, int b, int first, int count, float *out,
                        int64_t pitch, float *lse);

/* The keys of a row: entry n of a list, or key first + n. */
struct key_list {
    const int32_t *list;
    int first, count, keys;
    __device__ __forceinline__ int key(int n) const
    {
        if (list == NULL)
            return first + n;
        return list[n] >= 0 && list[n] < keys ? list[n] : -1;
    }
};
template <typename T> __device__ __forceinline__ key_list keys_of(const index_call<T> &c, int64_t b, int64_t i)
{
    key_list k = {NULL, 0, c.most, c.keys};
    if (c.idx != NULL) {
        k.list = c.idx + b * c.idx_batch + i * c.idx_row;
        return k;
    }
    index_range seen = row_seen(c, b, i);
    k.first = (int)seen.first;
    k.count = (int)max((int64_t)0, seen.end - seen.first);
    return k;
}

#endif
