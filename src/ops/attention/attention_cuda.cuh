/* What the CUDA files of attention share: a call as kernels see it, and which keys a row may see. The files:
 *   attention.cu        launchers: the library (dev/cudnn.c) where it can, else tensor cores, else plain FMAs
 *   attention_fwd.cu    forward on tensor cores, bf16
 *   attention_bwd.cu    backward on tensor cores, bf16: one kernel for dk and dv, one for dq, no atomics
 *   attention_bwd_hopper.cu  backward with Hopper's instructions, bf16, up to 128 channels: one kernel for all
 *   attention_plain.cu  both directions for any type and width, a warp for each row */
#ifndef BRAID_OPS_ATTENTION_CUDA_CUH
#define BRAID_OPS_ATTENTION_CUDA_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/attention/attention.h"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* [batch][row][head][channel]; strides in elements. */
template <typename T> struct heads_view {
    T *data;
    int64_t batch, row, head;
    __device__ __forceinline__ T *at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

template <typename T> struct attn_call {
    heads_view<T> q, k, v, o, dout, dq, dk, dv;
    float *lse; /* [batch][head][row] */
    int64_t lse_batch, lse_head;
    float *delta; /* backward: sum of do * o, dense [batch][head][row] */
    const float *sink;
    const int32_t *doc;
    int64_t doc_batch;
    const int64_t *start;
    int batch, heads, groups, per_group, rows, keys, width, width_v, window;
    int before, after; /* keys in front of these, and between the last one and the last query */
    float scale;
    bool sink_zero;
    bool aligned;             /* every row of every tensor can be taken 16 bytes at a time */
    const int64_t *drop_info; /* NULL: no weights are dropped */
    uint64_t drop_key;
    uint32_t drop_threshold;
    float drop_kept; /* 1 / (1 - p) */
};

/* Dropout of one head of one sequence. */
struct head_drop {
    uint64_t key;
    int64_t step, sample, first; /* first: position of query 0 */
    uint32_t threshold;
    float kept;
    int before; /* a multiple of 4 */
};
template <typename T> __device__ __forceinline__ head_drop drop_of(const attn_call<T> &c, int b, int h)
{
    head_drop d = {attention_drop_key(c.drop_key, h),
                   c.drop_info[0],
                   c.drop_info[1] + b,
                   c.drop_info[2],
                   c.drop_threshold,
                   c.drop_kept,
                   c.before};
    return d;
}
__device__ __forceinline__ float drop_factor(const head_drop &d, int i, int j)
{
    return dropout_keep(d.key, d.threshold, d.step, d.sample, d.first + i, d.before + j) ? d.kept : 0.0f;
}
/* The same of keys j and j + 1, j even: they share a draw. */
__device__ __forceinline__ float2 drop_pair(const head_drop &d, int i, int j)
{
    philox4 x = dropout_draw(d.key, d.step, d.sample, d.first + i, d.before + j);
    bool upper = j % 4 != 0;
    uint32_t first = upper ? x.v[2] : x.v[0], second = upper ? x.v[3] : x.v[1];
    return make_float2(first >= d.threshold ? d.kept : 0.0f, second >= d.threshold ? d.kept : 0.0f);
}

/* Index of the first query, counted from the first key. What start says is device memory: kept where no key beyond the
 * last is touched. */
template <typename T> __device__ __forceinline__ int first_index(const attn_call<T> &c)
{
    int64_t most = (int64_t)c.keys + c.after - c.rows, at = c.start != NULL ? *c.start : most;
    return (int)max(min(at, most), -(int64_t)c.rows);
}

/* Keys lo .. hi are seen by query i; none if lo > hi. */
struct key_range {
    int lo, hi;
};
template <typename T> __device__ __forceinline__ key_range keys_seen(const attn_call<T> &c, int first, int b, int i)
{
    key_range r = {0, -1};
    if (i >= c.rows)
        return r;
    r.hi = first + i;
    if (c.window > 0 && r.hi >= c.window)
        r.lo = r.hi - c.window + 1;
    if (c.doc != NULL)
        r.lo = max(r.lo, c.doc[b * c.doc_batch + i] - c.before);
    r.hi = min(r.hi, c.keys - 1);
    return r;
}

/* Two values as neighbours in memory, x first. */
__device__ __forceinline__ uint32_t pack2(float x, float y)
{
    __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
    return *(uint32_t *)&p;
}

/* What the tensor-core kernels take; they look for the largest score before they scale. */
static inline bool mma_fits(const attn_call<bf16> &c)
{
    return c.width > 0 && c.width_v > 0 && c.width <= 256 && c.width_v <= 256 && c.scale > 0;
}
int attention_fwd_mma(struct lane *l, const attn_call<bf16> &c);
int attention_bwd_mma(struct lane *l, const attn_call<bf16> &c);
/* Hopper's own instructions, for what attention_not_hopper does not refuse, aligned. Scratch: from shapes alone. */
int64_t attention_bwd_hopper_bytes(const struct attention_bwd_args *a);
int attention_bwd_hopper(struct lane *l, const struct attention_bwd_args *a, const attn_call<bf16> &c);
int attention_fwd_plain(struct lane *l, const attn_call<bf16> &c);
int attention_fwd_plain(struct lane *l, const attn_call<float> &c);
int attention_bwd_plain(struct lane *l, const attn_call<bf16> &c);
int attention_bwd_plain(struct lane *l, const attn_call<float> &c);

#endif
