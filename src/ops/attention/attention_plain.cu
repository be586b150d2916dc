/* attention for any type and any width, both directions; see attention_cuda.cuh. Plain FMAs in fp32, a warp for each
 * row: lanes take a key each for the scores, then a channel each for the sums. What the other kernels do not take comes
 * here: fp32 storage (tests), heads wider than 256. */
#include "ops/attention/attention_cuda.cuh"

enum { PLAIN_WARPS = 4, PLAIN_THREADS = PLAIN_WARPS * 32 };

template <typename T> __device__ __forceinline__ float dot(const T *x, const float *y, int n)
{
    float sum = 0;
    for (int c = 0; c < n; c++)
        sum += to_float(x[c]) * y[c];
    return sum;
}

/* A row into fp32 shared memory. */
template <typename T> __device__ __forceinline__ void take_row(float *dst, const T *src, int n)
{
    for (int c = threadIdx.x % 32; c < n; c += 32)
        dst[c] = to_float(src[c]);
}
__device__ __forceinline__ void clear_row(float *dst, int n)
{
    for (int c = threadIdx.x % 32; c < n; c += 32)
        dst[c] = 0;
}
template <typename T> __device__ __forceinline__ void put_row(T *dst, const float *src, int n, float scale)
{
    for (int c = threadIdx.x % 32; c < n; c += 32)
        dst[c] = from_float<T>(src[c] * scale);
}

/* dst += sum over the lanes that have one of weight * row; rows are one stride apart. Each lane owns its channels. */
template <typename T>
__device__ __forceinline__ void add_rows(float *dst, float weight, const T *first, int64_t stride, int count, int n)
{
    for (int x = 0; x < count; x++) {
        float w = __shfl_sync(0xffffffffu, weight, x);
        const T *row = first + x * stride;
        for (int c = threadIdx.x % 32; c < n; c += 32)
            dst[c] += w * to_float(row[c]);
    }
}

/* Row index of this warp, batch and head from it; rows of a head are adjacent in the grid. */
struct warp_row {
    int64_t row;
    int b, h, i;
};
__device__ __forceinline__ warp_row row_of_warp(int heads, int rows)
{
    warp_row w;
    w.row = (int64_t)blockIdx.x * PLAIN_WARPS + threadIdx.x / 32;
    w.i = (int)(w.row % rows);
    w.h = (int)(w.row / rows % heads);
    w.b = (int)(w.row / rows / heads);
    return w;
}

template <typename T> __global__ void __launch_bounds__(PLAIN_THREADS) fwd_plain(const attn_call<T> c)
{
    DYNAMIC_SHARED(float, plain_pool, 4);
    warp_row w = row_of_warp(c.heads, c.rows);
    if (w.b >= c.batch)
        return;
    float *q = plain_pool + threadIdx.x / 32 * (c.width + c.width_v), *o = q + c.width;
    int lane = threadIdx.x % 32, g = w.h / c.per_group;
    const T *k = c.k.at(w.b, g), *v = c.v.at(w.b, g);
    key_range seen = keys_seen(c, first_index(c), w.b, w.i);
    take_row(q, c.q.at(w.b, w.h) + w.i * c.q.row, c.width);
    clear_row(o, c.width_v);
    __syncwarp();
    bool has_sink = c.sink != NULL || c.sink_zero;
    float top = !has_sink ? -INFINITY : c.sink != NULL ? c.sink[w.h] : 0.0f, sum = has_sink ? 1.0f : 0.0f;
    for (int j = seen.lo; j <= seen.hi; j += 32) {
        int count = min(32, seen.hi - j + 1);
        float s = lane < count ? c.scale * dot(k + (j + lane) * c.k.row, q, c.width) : -INFINITY;
        float next = fmaxf(top, warp_max(s)), shrink = expf(top - next), p = expf(s - next);
        sum = sum * shrink + warp_sum(p);
        top = next;
        for (int ch = lane; ch < c.width_v; ch += 32)
            o[ch] *= shrink;
        if (c.drop_info != NULL)
            p *= drop_factor(drop_of(c, w.b, w.h), w.i, j + lane);
        add_rows(o, p, v + j * c.v.row, c.v.row, count, c.width_v);
    }
    put_row(c.o.at(w.b, w.h) + w.i * c.o.row, o, c.width_v, sum > 0 ? 1.0f / sum : 0.0f);
    if (lane == 0)
        c.lse[w.b * c.lse_batch + w.h * c.lse_head + w.i] = sum > 0 ? top + logf(sum) : -INFINITY;
}

template <typename T> __global__ void __launch_bounds__(PLAIN_THREADS) dq_plain(const attn_call<T> c)
{
    DYNAMIC_SHARED(float, plain_pool, 4);
    warp_row w = row_of_warp(c.heads, c.rows);
    if (w.b >= c.batch)
        return;
    float *q = plain_pool + threadIdx.x / 32 * (2 * c.width + c.width_v), *d_o = q + c.width, *dq = d_o + c.width_v;
    int lane = threadIdx.x % 32, g = w.h / c.per_group;
    const T *k = c.k.at(w.b, g), *v = c.v.at(w.b, g);
    key_range seen = keys_seen(c, first_index(c), w.b, w.i);
    take_row(q, c.q.at(w.b, w.h) + w.i * c.q.row, c.width);
    take_row(d_o, c.dout.at(w.b, w.h) + w.i * c.dout.row, c.width_v);
    clear_row(dq, c.width);
    __syncwarp();
    float lse = c.lse[w.b * c.lse_batch + w.h * c.lse_head + w.i], delta = c.delta[w.row];
    for (int j = seen.lo; j <= seen.hi; j += 32) {
        int count = min(32, seen.hi - j + 1);
        float ds = 0, kept = c.drop_info != NULL ? drop_factor(drop_of(c, w.b, w.h), w.i, j + lane) : 1.0f;
        if (lane < count)
            ds = expf(c.scale * dot(k + (j + lane) * c.k.row, q, c.width) - lse) *
                 (kept * dot(v + (j + lane) * c.v.row, d_o, c.width_v) - delta);
        add_rows(dq, ds, k + j * c.k.row, c.k.row, count, c.width);
    }
    put_row(c.dq.at(w.b, w.h) + w.i * c.dq.row, dq, c.width, c.scale);
}

/* A warp for each key: the query heads of its group in order, their rows in order. */
template <typename T> __global__ void __launch_bounds__(PLAIN_THREADS) dkdv_plain(const attn_call<T> c)
{
    DYNAMIC_SHARED(float, plain_pool, 4);
    warp_row w = row_of_warp(c.groups, c.keys);
    if (w.b >= c.batch)
        return;
    float *k = plain_pool + threadIdx.x / 32 * 2 * (c.width + c.width_v), *v = k + c.width, *dk = v + c.width_v,
          *dv = dk + c.width;
    int lane = threadIdx.x % 32, first = first_index(c), j = w.i;
    take_row(k, c.k.at(w.b, w.h) + j * c.k.row, c.width);
    take_row(v, c.v.at(w.b, w.h) + j * c.v.row, c.width_v);
    clear_row(dk, c.width);
    clear_row(dv, c.width_v);
    __syncwarp();
    int from = max(0, j - first), to = c.window > 0 ? (int)min((int64_t)c.rows, (int64_t)j + c.window - first) : c.rows;
    for (int h = w.h * c.per_group; h < (w.h + 1) * c.per_group; h++) {
        const T *q = c.q.at(w.b, h), *d_o = c.dout.at(w.b, h);
        const float *lse = c.lse + w.b * c.lse_batch + h * c.lse_head,
                    *delta = c.delta + ((int64_t)w.b * c.heads + h) * c.rows;
        for (int i = from; i < to; i += 32) {
            int count = min(32, to - i), mine = i + lane;
            float p = 0, ds = 0;
            if (lane < count) {
                key_range seen = keys_seen(c, first, w.b, mine);
                if (seen.lo <= j && j <= seen.hi) {
                    p = expf(c.scale * dot(q + mine * c.q.row, k, c.width) - lse[mine]);
                    float kept = c.drop_info != NULL ? drop_factor(drop_of(c, w.b, h), mine, j) : 1.0f;
                    ds = p * (kept * dot(d_o + mine * c.dout.row, v, c.width_v) - delta[mine]);
                    p *= kept;
                }
            }
            if (!__any_sync(0xffffffffu, p != 0 || ds != 0))
                continue;
            add_rows(dv, p, d_o + i * c.dout.row, c.dout.row, count, c.width_v);
            add_rows(dk, ds, q + i * c.q.row, c.q.row, count, c.width);
        }
    }
    put_row(c.dk.at(w.b, w.h) + j * c.dk.row, dk, c.width, c.scale);
    put_row(c.dv.at(w.b, w.h) + j * c.dv.row, dv, c.width_v, 1.0f);
}

static unsigned blocks(int64_t rows) { return (unsigned)ceil_div(rows, PLAIN_WARPS); }

static int check_width(struct lane *l, int64_t floats)
{
    int64_t have = cuda_of(l)->smem_per_block;
    if (floats * 4 * PLAIN_WARPS <= have)
        return ST_OK;
    err_set(l->err, ST_UNSUPPORTED, "attention: heads so wide need %lld bytes of shared memory, this GPU has %lld",
            (long long)floats * 4 * PLAIN_WARPS, (long long)have);
    return err_hint(l->err, "use more and narrower heads");
}

template <typename T> static int run_fwd(struct lane *l, const attn_call<T> &c)
{
    int floats = c.width + c.width_v, smem = floats * 4 * PLAIN_WARPS;
    TRY(check_width(l, floats));
    auto kernel = fwd_plain<T>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, blocks((int64_t)c.batch * c.heads * c.rows), PLAIN_THREADS, smem, c);
    return ST_OK;
}

template <typename T> static int run_bwd(struct lane *l, const attn_call<T> &c)
{
    int for_q = (2 * c.width + c.width_v) * 4 * PLAIN_WARPS, for_k = 2 * (c.width + c.width_v) * 4 * PLAIN_WARPS;
    TRY(check_width(l, 2 * (c.width + c.width_v)));
    auto dkdv = dkdv_plain<T>;
    auto dq = dq_plain<T>;
    NEEDS_SMEM(l, dkdv, for_k);
    NEEDS_SMEM(l, dq, for_q);
    LAUNCH(l, dkdv, blocks((int64_t)c.batch * c.groups * c.keys), PLAIN_THREADS, for_k, c);
    LAUNCH(l, dq, blocks((int64_t)c.batch * c.heads * c.rows), PLAIN_THREADS, for_q, c);
    return ST_OK;
}

int attention_fwd_plain(struct lane *l, const attn_call<bf16> &c) { return run_fwd(l, c); }
int attention_fwd_plain(struct lane *l, const attn_call<float> &c) { return run_fwd(l, c); }
int attention_bwd_plain(struct lane *l, const attn_call<bf16> &c) { return run_bwd(l, c); }
int attention_bwd_plain(struct lane *l, const attn_call<float> &c) { return run_bwd(l, c); }
