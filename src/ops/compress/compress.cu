/* compress, CUDA version; see compress.h. A thread owns a channel of an entry (backward: of a block of entries, whose
 * share of dape it adds up in scratch), so that neighbouring threads read neighbouring channels and no sum is shared.
 * */
#include "ops/compress/compress.h"
#include "ops/cuda/kernel.cuh"

enum { THREADS = 128 };

/* Rows [batch][row][channel]; strides in elements. */
template <typename T> struct rows3 {
    T *data;
    int64_t batch, row;
    __device__ __forceinline__ T *at(int64_t b, int64_t i) const { return data + b * batch + i * row; }
};
template <typename T> static rows3<T> view3(const struct tensor *t)
{
    rows3<T> v = {(T *)t->data, t->stride[0], t->stride[1]};
    return v;
}

template <typename T> struct compress_call {
    rows3<T> x, z, past, y; /* y: dy in the backward pass */
    const float *ape;
    int64_t ape_row;
    const int32_t *doc, *pos;
    int64_t doc_batch, pos_batch;
    const int64_t *start; /* NULL in training: then `from` */
    int32_t *at;
    int64_t from, tokens, channels, entries, ratio, width, kept;
    bool overlap;
};

/* Token, channel and row of ape of place i of an entry. */
struct place {
    int64_t token, channel, row;
};
template <typename T>
__device__ __forceinline__ place place_of(const compress_call<T> &c, compress_window w, int64_t i, int64_t channel)
{
    bool both = c.overlap && w.before;
    place p;
    if (both && i < c.ratio) {
        p = {w.first - c.ratio + i, channel, i};
    } else {
        int64_t own = both ? i - c.ratio : i;
        p = {w.first + own, c.overlap ? c.width + channel : channel, own};
    }
    return p;
}
template <typename T> __device__ __forceinline__ int64_t places(const compress_call<T> &c, compress_window w)
{
    return c.overlap && w.before ? 2 * c.ratio : c.ratio;
}

template <typename T>
__device__ __forceinline__ float value_of(const compress_call<T> &c, int64_t b, place p, int64_t start)
{
    return to_float(p.token >= start ? c.x.at(b, p.token - start)[p.channel]
                                     : c.past.at(b, p.token % c.kept)[p.channel]);
}
template <typename T>
__device__ __forceinline__ float gate_of(const compress_call<T> &c, int64_t b, place p, int64_t start)
{
    float z = to_float(p.token >= start ? c.z.at(b, p.token - start)[p.channel]
                                        : c.past.at(b, p.token % c.kept)[c.channels + p.channel]);
    return z + c.ape[p.row * c.ape_row + p.channel];
}

/* The softmax of a channel of an entry, and what it makes of the values. */
struct mean {
    float top, sum, y;
};
template <typename T>
__device__ __forceinline__ mean mean_of(const compress_call<T> &c, compress_window w, int64_t b, int64_t channel,
                                        int64_t start)
{
    mean m = {-INFINITY, 0, 0};
    int64_t n = places(c, w);
    for (int64_t i = 0; i < n; i++)
        m.top = fmaxf(m.top, gate_of(c, b, place_of(c, w, i, channel), start));
    for (int64_t i = 0; i < n; i++) {
        place p = place_of(c, w, i, channel);
        float e = expf(gate_of(c, b, p, start) - m.top);
        m.sum += e;
        m.y += e * value_of(c, b, p, start);
    }
    m.y /= m.sum;
    return m;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) entries_of(const __grid_constant__ compress_call<T> c)
{
    int64_t r = blockIdx.x, b = r / c.entries, k = r % c.entries, channel = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    int64_t start = c.start != NULL ? *c.start : c.from, entry = start / c.ratio + k;
    compress_window w = c.start != NULL
                            ? compress_step_window(entry, c.ratio, start, c.tokens)
                            : compress_window_of(c.doc != NULL ? c.doc + b * c.doc_batch : NULL, start, entry, c.ratio);
    if (start < 0)
        w.first = -1;
    /* its last token is one of these, its first may not be */
    if (c.at != NULL && blockIdx.y == 0 && threadIdx.x == 0) {
        int64_t ahead = c.ratio - 1;
        c.at[r] = w.first < 0 ? 0 : (int32_t)(c.pos[b * c.pos_batch + w.first + ahead - start] - ahead);
    }
    if (channel < c.width)
        c.y.at(b, k)[channel] = from_float<T>(w.first < 0 ? 0.0f : mean_of(c, w, b, channel, start).y);
}

/* What the next calls need of these tokens. A call with more tokens than are kept keeps its last ones. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) keep_tokens(const __grid_constant__ compress_call<T> c, int64_t first)
{
    int64_t n = c.tokens - first, b = blockIdx.x / n, t = first + blockIdx.x % n, start = *c.start,
            channel = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    if (channel >= c.channels || start < 0)
        return;
    T *row = c.past.at(b, (start + t) % c.kept);
    row[channel] = c.x.at(b, t)[channel];
    row[c.channels + channel] = c.z.at(b, t)[channel];
}

template <typename T>
static compress_call<T> call_of(const struct tensor *x, const struct tensor *z, const struct tensor *ape,
                                const struct tensor *past, const struct tensor *y, int64_t ratio, bool overlap)
{
    compress_call<T> c = {};
    if (past->data != NULL) {
        c.past = view3<T>(past);
        c.kept = past->dim[1];
    }
    c.x = view3<T>(x);
    c.z = view3<T>(z);
    c.y = view3<T>(y);
    c.ape = (const float *)ape->data;
    c.ape_row = ape->stride[0];
    c.tokens = x->dim[1];
    c.channels = x->dim[2];
    c.entries = y->dim[1];
    c.width = y->dim[2];
    c.ratio = ratio;
    c.overlap = overlap;
    return c;
}

extern "C" int compress_fwd_cuda(struct lane *l, const struct compress_fwd_args *a)
{
    TRY(compress_fwd_check(a, l->err));
    dim3 grid((unsigned)rows_of(&a->y), (unsigned)ceil_div(a->y.dim[2], THREADS));
    BY_REAL(a->x.dtype, T, {
        compress_call<T> c = call_of<T>(&a->x, &a->z, &a->ape, &a->past, &a->y, a->ratio, a->overlap);
        c.from = a->start;
        c.doc = (const int32_t *)a->doc_start.data;
        c.doc_batch = present(&a->doc_start) ? a->doc_start.stride[0] : 0;
        c.pos = (const int32_t *)a->pos.data;
        c.pos_batch = present(&a->pos) ? a->pos.stride[0] : 0;
        c.at = (int32_t *)a->at.data;
        LAUNCH(l, entries_of<T>, grid, THREADS, 0, c);
    });
    return ST_OK;
}

extern "C" int compress_step_cuda(struct lane *l, const struct compress_step_args *a)
{
    TRY(compress_step_check(a, l->err));
    int64_t first = max_i64(0, a->x.dim[1] - a->past.dim[1]);
    dim3 grid((unsigned)rows_of(&a->y), (unsigned)ceil_div(a->y.dim[2], THREADS)),
        keep((unsigned)(a->x.dim[0] * (a->x.dim[1] - first)), (unsigned)ceil_div(a->x.dim[2], THREADS));
    BY_REAL(a->x.dtype, T, {
        compress_call<T> c = call_of<T>(&a->x, &a->z, &a->ape, &a->past, &a->y, a->ratio, a->overlap);
        c.start = (const int64_t *)a->start.data;
        c.pos = (const int32_t *)a->pos.data;
        c.pos_batch = present(&a->pos) ? a->pos.stride[0] : 0;
        c.at = (int32_t *)a->at.data;
        LAUNCH(l, entries_of<T>, grid, THREADS, 0, c);
        LAUNCH(l, keep_tokens<T>, keep, THREADS, 0, c, first);
    });
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

template <typename T>
static __global__ void __launch_bounds__(THREADS) clear_rows(rows3<T> dx, rows3<T> dz, int64_t tokens, int64_t channels)
{
    int64_t b = blockIdx.x / tokens, t = blockIdx.x % tokens, c = (int64_t)blockIdx.y * THREADS + threadIdx.x;
    if (c < channels)
        dx.at(b, t)[c] = dz.at(b, t)[c] = from_float<T>(0.0f);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    gradient_rows(const __grid_constant__ compress_call<T> c, rows3<T> dx, rows3<T> dz, rows3<T> dpast, float *partial,
                  int64_t total)
{
    int64_t channel = (int64_t)blockIdx.y * THREADS + threadIdx.x, size = c.ratio * c.channels,
            first = blockIdx.x * compress_block(c.ratio), end = min(total, first + compress_block(c.ratio));
    if (channel >= c.width)
        return;
    partial += blockIdx.x * size + channel;
    for (int64_t i = 0; i < c.ratio; i++) {
        partial[i * c.channels] = 0;
        if (c.overlap)
            partial[i * c.channels + c.width] = 0;
    }
    for (int64_t r = first; r < end; r++) {
        int64_t b = r / c.entries, j = r % c.entries;
        compress_window w =
            compress_window_of(c.doc != NULL ? c.doc + b * c.doc_batch : NULL, c.from, c.from / c.ratio + j, c.ratio);
        if (w.first < 0)
            continue;
        mean m = mean_of(c, w, b, channel, c.from);
        float dy = to_float(c.y.at(b, j)[channel]);
        int64_t n = places(c, w);
        for (int64_t i = 0; i < n; i++) {
            place p = place_of(c, w, i, channel);
            float g = expf(gate_of(c, b, p, c.from) - m.top) / m.sum * dy,
                  dgate = g * (value_of(c, b, p, c.from) - m.y);
            bool own = p.token >= c.from;
            T *to = own ? dx.at(b, p.token - c.from) : dpast.at(b, p.token % c.kept),
              *gate = own ? dz.at(b, p.token - c.from) : to + c.channels;
            to[p.channel] = from_float<T>(g);
            gate[p.channel] = from_float<T>(dgate);
            partial[p.row * c.channels + p.channel - channel] += dgate;
        }
    }
}

static __global__ void __launch_bounds__(THREADS)
    sum_partial(const float *partial, float *dape, int64_t row, int64_t channels, int64_t n, int64_t blocks, bool add)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n)
        return;
    dape += i / channels * row + i % channels;
    float sum = add ? *dape : 0.0f;
    for (int64_t k = 0; k < blocks; k++)
        sum += partial[k * n + i];
    *dape = sum;
}

static int64_t blocks_of(const struct compress_bwd_args *a)
{
    int64_t ratio = max_i64(1, a->ratio);
    return ceil_div(a->x.dim[0] * (a->x.dim[1] / ratio), compress_block(ratio));
}

extern "C" int64_t compress_bwd_work_cuda(const struct compress_bwd_args *a)
{
    return blocks_of(a) * max_i64(0, a->ratio) * a->x.dim[2] * (int64_t)sizeof(float);
}

extern "C" int compress_bwd_cuda(struct lane *l, const struct compress_bwd_args *a)
{
    TRY(compress_bwd_check(a, l->err));
    TRY(check_work("compress_bwd", &a->work, compress_bwd_work_cuda(a), l->err));
    int64_t blocks = blocks_of(a), n = tensor_elems(&a->dape);
    float *partial = (float *)a->work.data;
    dim3 clear((unsigned)rows_of(&a->x), (unsigned)ceil_div(a->x.dim[2], THREADS)),
        grid((unsigned)blocks, (unsigned)ceil_div(a->dy.dim[2], THREADS));
    BY_REAL(a->x.dtype, T, {
        compress_call<T> c = call_of<T>(&a->x, &a->z, &a->ape, &a->past, &a->dy, a->ratio, a->overlap);
        c.from = a->start;
        c.doc = (const int32_t *)a->doc_start.data;
        c.doc_batch = present(&a->doc_start) ? a->doc_start.stride[0] : 0;
        LAUNCH(l, clear_rows<T>, clear, THREADS, 0, view3<T>(&a->dx), view3<T>(&a->dz), a->x.dim[1], a->x.dim[2]);
        rows3<T> dpast = {};
        if (present(&a->dpast)) {
            dim3 early((unsigned)rows_of(&a->dpast), (unsigned)ceil_div(a->dpast.dim[2], THREADS));
            dpast = view3<T>(&a->dpast);
            LAUNCH(l, clear_rows<T>, early, THREADS, 0, dpast, dpast, a->dpast.dim[1], a->dpast.dim[2]);
        }
        LAUNCH(l, gradient_rows<T>, grid, THREADS, 0, c, view3<T>(&a->dx), view3<T>(&a->dz), dpast, partial,
               rows_of(&a->dy));
    });
    LAUNCH(l, sum_partial, (unsigned)ceil_div(n, THREADS), THREADS, 0, (const float *)partial, (float *)a->dape.data,
           a->dape.stride[0], a->dape.dim[1], n, blocks, a->acc_dape);
    return ST_OK;
}
