/* attention on the GPU: which kernels a call takes, and the small kernels beside them; see attention_cuda.cuh.
 *
 * cuDNN (dev/cudnn.c) takes causal calls in bf16, with or without a window or a sink, where it is installed and likes
 * the shape. Everything else, and every call it refuses, runs on kernels of ours; on Hopper they also take the backward
 * pass of heads of up to 128 channels. All write and read the same lse, so a forward pass of one and a backward pass of
 * the other fit together. fwd_kernels and bwd_kernels choose. */
#include "ops/attention/attention_cuda.cuh"
#include "ops/attention/attention.h"

/* ---- sums by row ----------------------------------------------------------------------------- */

/* delta[b][h][i] = sum of do * o: a warp for each row, rows in the order of memory. */
template <typename T> __global__ void __launch_bounds__(256) row_delta(const attn_call<T> c)
{
    int64_t r = ((int64_t)blockIdx.x * 256 + threadIdx.x) / 32;
    if (r >= (int64_t)c.batch * c.rows * c.heads)
        return;
    int h = (int)(r % c.heads), i = (int)(r / c.heads % c.rows), b = (int)(r / c.heads / c.rows),
        lane = threadIdx.x % 32;
    const T *d_o = c.dout.at(b, h) + i * c.dout.row, *o = c.o.at(b, h) + i * c.o.row;
    float sum = 0;
    if (c.aligned) {
        for (int x = lane * pack<T>::N; x < c.width_v; x += 32 * pack<T>::N) {
            pack<T> p = load16(d_o + x), q = load16(o + x);
#pragma unroll
            for (int e = 0; e < pack<T>::N; e++)
                sum += to_float(p.v[e]) * to_float(q.v[e]);
        }
    } else {
        for (int x = lane; x < c.width_v; x += 32)
            sum += to_float(d_o[x]) * to_float(o[x]);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        c.delta[((int64_t)b * c.heads + h) * c.rows + i] = sum;
}

/* dsink[h] = - sum over rows of exp(sink - lse) * delta: a block for each head. */
template <typename T> __global__ void __launch_bounds__(256) sum_dsink(const attn_call<T> c, float *dsink, bool acc)
{
    __shared__ float scratch[8];
    int h = blockIdx.x;
    float sum = 0, sink = c.sink[h];
    for (int b = 0; b < c.batch; b++) {
        const float *lse = c.lse + b * c.lse_batch + h * c.lse_head,
                    *delta = c.delta + ((int64_t)b * c.heads + h) * c.rows;
        for (int i = threadIdx.x; i < c.rows; i += 256)
            sum += expf(sink - lse[i]) * delta[i];
    }
    sum = block_sum<256>(sum, scratch);
    if (threadIdx.x == 0)
        dsink[h] = (acc ? dsink[h] : 0.0f) - sum;
}

/* ---- a sink added to what the library computed without it: o * e^lse / (e^lse + e^sink) ------ */

__device__ __forceinline__ float sink_of(const attn_call<bf16> &c, int h) { return c.sink != NULL ? c.sink[h] : 0.0f; }

/* A thread for 8 channels, in the order of memory. */
static __global__ void __launch_bounds__(256) scale_by_sink(const attn_call<bf16> c)
{
    int parts = c.width_v / 8;
    int64_t x = (int64_t)blockIdx.x * 256 + threadIdx.x, r = x / parts;
    if (r >= (int64_t)c.batch * c.rows * c.heads)
        return;
    int h = (int)(r % c.heads), i = (int)(r / c.heads % c.rows), b = (int)(r / c.heads / c.rows);
    float share = 1.0f / (1.0f + expf(sink_of(c, h) - c.lse[b * c.lse_batch + h * c.lse_head + i]));
    bf16 *o = c.o.at(b, h) + i * c.o.row + x % parts * 8;
    pack<bf16> v = load16(o);
#pragma unroll
    for (int e = 0; e < 8; e++)
        v.v[e] = __float2bfloat16_rn(to_float(v.v[e]) * share);
    store16(o, v);
}
static __global__ void __launch_bounds__(256) lse_with_sink(const attn_call<bf16> c)
{
    int64_t x = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (x >= (int64_t)c.batch * c.heads * c.rows)
        return;
    int i = (int)(x % c.rows), h = (int)(x / c.rows % c.heads), b = (int)(x / c.rows / c.heads);
    float *lse = c.lse + b * c.lse_batch + h * c.lse_head + i, sink = sink_of(c, h), most = fmaxf(*lse, sink);
    *lse = most + log1pf(expf(fminf(*lse, sink) - most));
}

static int add_sink(struct lane *l, const attn_call<bf16> &c)
{
    int64_t rows = (int64_t)c.batch * c.rows * c.heads;
    LAUNCH(l, scale_by_sink, (unsigned)ceil_div(rows * (c.width_v / 8), 256), 256, 0, c);
    LAUNCH(l, lse_with_sink, (unsigned)ceil_div(rows, 256), 256, 0, c);
    return ST_OK;
}

/* ---- a call as kernels see it ---------------------------------------------------------------- */

template <typename T> static heads_view<T> view_of(const struct tensor *t)
{
    heads_view<T> v = {(T *)t->data, t->stride[0], t->stride[1], t->stride[2]};
    return v;
}

template <typename T>
static attn_call<T> common_call(const struct tensor *q, const struct tensor *k, const struct tensor *v,
                                const struct tensor *o, const struct tensor *lse, const struct tensor *sink,
                                const struct tensor *doc, bool sink_zero, int64_t window, double scale,
                                const struct dropout_rule *drop, int64_t before, int64_t after)
{
    attn_call<T> c = {};
    c.drop_info = drop->p > 0 ? (const int64_t *)drop->info.data : NULL;
    c.drop_key = drop->key;
    c.drop_threshold = dropout_threshold(drop->p);
    c.drop_kept = (float)(1 / (1 - drop->p));
    c.q = view_of<T>(q);
    c.k = view_of<T>(k);
    c.v = view_of<T>(v);
    c.o = view_of<T>(o);
    c.lse = (float *)lse->data;
    c.lse_batch = lse->stride[0];
    c.lse_head = lse->stride[1];
    c.sink = (const float *)sink->data;
    c.doc = (const int32_t *)doc->data;
    c.doc_batch = doc->stride[0];
    c.batch = (int)q->dim[0];
    c.rows = (int)q->dim[1];
    c.heads = (int)q->dim[2];
    c.width = (int)q->dim[3];
    c.keys = (int)k->dim[1];
    c.groups = (int)k->dim[2];
    c.per_group = c.groups > 0 ? c.heads / c.groups : 0;
    c.width_v = (int)v->dim[3];
    c.window = (int)window;
    c.before = (int)before;
    c.after = (int)after;
    c.scale = (float)scale;
    c.sink_zero = sink_zero;
    c.aligned = aligned16(q) && aligned16(k) && aligned16(v) && aligned16(o);
    return c;
}

template <typename T> static attn_call<T> fwd_call(const struct attention_fwd_args *a)
{
    attn_call<T> c = common_call<T>(&a->q, &a->k, &a->v, &a->o, &a->lse, &a->sink, &a->doc_start, a->sink_zero,
                                    a->window, a->scale, &a->drop, a->before, a->after);
    c.start = (const int64_t *)a->start.data;
    return c;
}

template <typename T> static attn_call<T> bwd_call(const struct attention_bwd_args *a)
{
    attn_call<T> c = common_call<T>(&a->q, &a->k, &a->v, &a->o, &a->lse, &a->sink, &a->doc_start, a->sink_zero,
                                    a->window, a->scale, &a->drop, a->before, a->after);
    c.dout = view_of<T>(&a->d_o);
    c.dq = view_of<T>(&a->dq);
    c.dk = view_of<T>(&a->dk);
    c.dv = view_of<T>(&a->dv);
    c.delta = (float *)a->work.data;
    c.aligned = c.aligned && aligned16(&a->d_o) && aligned16(&a->dq) && aligned16(&a->dk) && aligned16(&a->dv);
    return c;
}

/* ---- the library ----------------------------------------------------------------------------- */

/* Known from shapes, before memory is given. */
static bool library_shape(const struct tensor *q, const struct tensor *k, const struct tensor *v)
{
    return attention_not_library(q, k, v) == NULL;
}

static struct dnn_attention library_call(const struct tensor *q, const struct tensor *k, const struct tensor *v,
                                         const struct tensor *o, const struct tensor *lse, double scale, int64_t window,
                                         const struct tensor *work)
{
    struct dnn_attention x = {};
    x.q = *q;
    x.k = *k;
    x.v = *v;
    x.o = *o;
    x.lse = *lse;
    x.scale = (float)scale;
    x.window = window < k->dim[1] ? (float)window : 0.0f; /* one that no key falls out of is none */
    x.work = work->data;
    x.work_bytes = work->data != NULL ? tensor_bytes(work) : 0;
    return x;
}

static int try_library_fwd(struct lane *l, const struct attention_fwd_args *a, bool *done)
{
    struct dnn_attention x = library_call(&a->q, &a->k, &a->v, &a->o, &a->lse, a->scale, a->window, &a->work);
    TRY(dnn_attention_fwd(l, &x, done));
    return *done && (present(&a->sink) || a->sink_zero) ? add_sink(l, fwd_call<bf16>(a)) : ST_OK;
}

template <typename T> static int sum_rows(struct lane *l, const struct attention_bwd_args *a, const attn_call<T> &c);

/* lse and o have the sink in them, which is all that dq, dk and dv need to know of it. */
static int try_library_bwd(struct lane *l, const struct attention_bwd_args *a, bool *done)
{
    struct dnn_attention x = library_call(&a->q, &a->k, &a->v, &a->o, &a->lse, a->scale, a->window, &a->work);
    x.dout = a->d_o;
    x.dq = a->dq;
    x.dk = a->dk;
    x.dv = a->dv;
    TRY(dnn_attention_bwd(l, &x, done));
    return *done && present(&a->sink) ? sum_rows(l, a, bwd_call<bf16>(a)) : ST_OK;
}

/* ---- the choice ------------------------------------------------------------------------------ */

/* What the library refuses goes to the tensor-core kernels, what they do not take to the plain ones. */
enum kernels { LIBRARY, HOPPER, TENSOR_CORES, PLAIN };

/* The library is twice as fast as our tensor-core kernels, but knows no documents, no cache and not
 * our random numbers. */
static enum kernels fwd_kernels(const struct attention_fwd_args *a)
{
    if (library_shape(&a->q, &a->k, &a->v) && !present(&a->doc_start) && !present(&a->start) && a->drop.p == 0 &&
        a->after == 0)
        return LIBRARY;
    return a->q.dtype == DT_BF16 && mma_fits(fwd_call<bf16>(a)) ? TENSOR_CORES : PLAIN;
}

/* On Hopper our kernel is faster than the library, deterministic or not, at every shape of tests/gpu/bench_attention.cu
 * that it takes, and needs no scratch of all pairs. The library's deterministic backward goes over all keys, window or
 * not: it takes about as long as our tensor-core kernels do at a window of a fifth of the rows. */
static enum kernels bwd_kernels(const struct lane *l, const struct attention_bwd_args *a)
{
    if (a->q.dtype != DT_BF16)
        return PLAIN;
    attn_call<bf16> c = bwd_call<bf16>(a);
    if (a->drop.p > 0 || a->after > 0)
        return mma_fits(c) ? TENSOR_CORES : PLAIN;
    if (cuda_of(l)->hopper && c.aligned && attention_not_hopper(&a->q, &a->k, &a->v) == NULL)
        return HOPPER;
    if (library_shape(&a->q, &a->k, &a->v) && !present(&a->doc_start) &&
        (a->window == 0 || a->window >= a->k.dim[1] / 5))
        return LIBRARY;
    return mma_fits(c) ? TENSOR_CORES : PLAIN;
}

/* ---- launchers ------------------------------------------------------------------------------- */

extern "C" int64_t attention_fwd_work_cuda(const struct attention_fwd_args *a)
{
    if (!library_shape(&a->q, &a->k, &a->v) || a->drop.p > 0 || a->after > 0)
        return 0;
    struct dnn_attention x = library_call(&a->q, &a->k, &a->v, &a->o, &a->lse, a->scale, a->window, &a->work);
    return dnn_attention_fwd_bytes(&x);
}

static int64_t delta_bytes(const struct attention_bwd_args *a) { return a->q.dim[0] * a->q.dim[1] * a->q.dim[2] * 4; }

/* On a GPU that is not Hopper the library is given what it likes, unless that is a lot: then it makes do with what the
 * Hopper kernel needs, or the tensor-core kernels run. */
extern "C" int64_t attention_bwd_work_cuda(const struct attention_bwd_args *a)
{
    const int64_t most = (int64_t)5 << 29;
    if (a->drop.p > 0 || a->after > 0)
        return delta_bytes(a);
    bool hopper = attention_not_hopper(&a->q, &a->k, &a->v) == NULL;
    int64_t own = hopper ? attention_bwd_hopper_bytes(a) : delta_bytes(a);
    if (!library_shape(&a->q, &a->k, &a->v))
        return own;
    struct dnn_attention x = library_call(&a->q, &a->k, &a->v, &a->o, &a->lse, a->scale, a->window, &a->work);
    int64_t library = dnn_attention_bwd_bytes(&x);
    return hopper && library > most ? own : max_i64(own, library);
}
/* The same on a Hopper GPU, where the library is not asked for the shapes that our kernel takes. */
extern "C" int64_t attention_bwd_work_hopper(const struct attention_bwd_args *a)
{
    bool own =
        a->q.dtype == DT_BF16 && a->drop.p == 0 && a->after == 0 && attention_not_hopper(&a->q, &a->k, &a->v) == NULL;
    return own ? attention_bwd_hopper_bytes(a) : attention_bwd_work_cuda(a);
}

extern "C" int attention_fwd_cuda(struct lane *l, const struct attention_fwd_args *a)
{
    bool done = false;
    TRY(attention_fwd_check(a, l->err));
    if (a->q.dim[0] == 0 || a->q.dim[1] == 0 || a->q.dim[2] == 0)
        return ST_OK;
    if (fwd_kernels(a) == LIBRARY)
        TRY(try_library_fwd(l, a, &done));
    if (done)
        return ST_OK;
    if (a->q.dtype != DT_BF16)
        return attention_fwd_plain(l, fwd_call<float>(a));
    attn_call<bf16> c = fwd_call<bf16>(a);
    return mma_fits(c) ? attention_fwd_mma(l, c) : attention_fwd_plain(l, c);
}

/* delta, and from it dsink. */
template <typename T> static int sum_rows(struct lane *l, const struct attention_bwd_args *a, const attn_call<T> &c)
{
    LAUNCH(l, row_delta<T>, (unsigned)ceil_div((int64_t)c.batch * c.rows * c.heads, 8), 256, 0, c);
    if (present(&a->sink))
        LAUNCH(l, sum_dsink<T>, (unsigned)c.heads, 256, 0, c, (float *)a->dsink.data, a->acc_dsink);
    return ST_OK;
}

extern "C" int attention_bwd_cuda(struct lane *l, const struct attention_bwd_args *a)
{
    bool done = false;
    TRY(attention_bwd_check(a, l->err));
    TRY(check_work("attention_bwd", &a->work, delta_bytes(a), l->err));
    enum kernels by = bwd_kernels(l, a);
    if (by == HOPPER)
        return attention_bwd_hopper(l, a, bwd_call<bf16>(a));
    if (by == LIBRARY)
        TRY(try_library_bwd(l, a, &done));
    if (done)
        return ST_OK;
    if (a->q.dtype != DT_BF16) {
        attn_call<float> c = bwd_call<float>(a);
        TRY(sum_rows(l, a, c));
        return attention_bwd_plain(l, c);
    }
    attn_call<bf16> c = bwd_call<bf16>(a);
    TRY(sum_rows(l, a, c));
    return mma_fits(c) ? attention_bwd_mma(l, c) : attention_bwd_plain(l, c);
}
