/* conv1d, CUDA version; see conv1d.h.
 *
 * Fast path, 2 to 4 taps: a lane takes four channels, a warp a few rows of them, whose loads are all under way before
 * the first is used; rows a neighbour needs too come from the caches. Backward: a thread walks down a run of rows of
 * its four channels and loads a few rows ahead. Row t gives dpre (pre again from x), which adds to dw and dbias and to
 * dx of the rows it sees, all in registers; the few rows after the run that see its last ones are made once more. Sums
 * of runs meet in ops/cuda/sums.cuh. Other shapes take the plain kernels. */
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
#include "ops/conv1d/conv1d.h"

enum { V = 4, WARPS = 8, LONG_RUN = 256, SHORT_RUN = 64 }; /* channels of a lane; rows of a backward run */
enum { BWD_THREADS = 128, AHEAD = 4 };                     /* rows loaded at once */

struct conv {
    struct tensor x, y, init, dy, dx;
    const float *w, *bias;
    const int32_t *doc;
    const int64_t *start; /* NULL, or 0 in it: init counts as zeros */
    float *dw, *dbias;    /* partial sums [batch * blocks, C * taps] and [batch * blocks, C] */
    int64_t batch, rows, channels, taps, w_stride, doc_stride, run; /* run: rows of a backward run */
    bool silu, w_quads; /* w_quads: taps of a channel can be loaded in 16 bytes */
};

static __device__ __forceinline__ bool has_init(const struct conv &a)
{
    return a.init.data != NULL && !(a.start != NULL && *a.start == 0);
}

template <typename T> static __device__ __forceinline__ T *at_row(const struct tensor &t, int64_t b, int64_t r)
{
    return (T *)t.data + b * t.stride[0] + r * t.stride[1];
}

/* Channels c.. of row t of [init | x], t >= -(taps - 1). */
template <typename T, int N>
static __device__ __forceinline__ void input_at(const struct conv &a, bool init, int64_t b, int64_t t, int64_t c,
                                                float (&out)[N])
{
    if (t >= 0) {
        load_floats(at_row<const T>(a.x, b, t) + c, out);
    } else if (init) {
        load_floats(at_row<const T>(a.init, b, t + a.taps - 1) + c, out);
    } else {
#pragma unroll
        for (int e = 0; e < N; e++)
            out[e] = 0;
    }
}

static __device__ __forceinline__ int first_seen(const struct conv &a, int64_t b, int64_t t)
{
    return a.doc != NULL ? a.doc[b * a.doc_stride + t] : INT32_MIN;
}

/* Four channels as they lie in memory. */
template <typename T> struct quad;
template <> struct quad<float> {
    uint4 raw;
};
template <> struct quad<bf16> {
    uint2 raw;
};
template <typename T> static __device__ __forceinline__ quad<T> load_quad(const T *p)
{
    quad<T> q;
    q.raw = *(const decltype(q.raw) *)p;
    return q;
}
static __device__ __forceinline__ void quad_floats(const quad<float> &q, float *out) { unpack<float>(q.raw, out); }
static __device__ __forceinline__ void quad_floats(const quad<bf16> &q, float *out)
{
    unpack2(q.raw.x, out);
    unpack2(q.raw.y, out + 2);
}

/* Taps and bias of the channels c..c+3. */
template <int W>
static __device__ __forceinline__ void load_taps(const struct conv &a, int64_t c, float (&w)[W][V], float (&bias)[V])
{
#pragma unroll
    for (int e = 0; e < V; e++) {
        const float *from = a.w + (c + e) * a.w_stride;
        if (W == 4 && a.w_quads) {
            float4 taps = *(const float4 *)from;
            w[0][e] = taps.x;
            w[1 % W][e] = taps.y;
            w[2 % W][e] = taps.z;
            w[W - 1][e] = taps.w;
        } else {
#pragma unroll
            for (int k = 0; k < W; k++)
                w[k][e] = from[k];
        }
        bias[e] = a.bias != NULL ? a.bias[c + e] : 0.0f;
    }
}

/* N rows of [init | x] from row t on, those past the end undefined. */
template <typename T, int N>
static __device__ __forceinline__ void load_rows(const struct conv &a, bool init, int64_t b, int t, int64_t c,
                                                 quad<T> (&out)[N])
{
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (t + k >= (int)a.rows)
            continue;
        if (t + k >= 0)
            out[k] = load_quad(at_row<const T>(a.x, b, t + k) + c);
        else if (init)
            out[k] = load_quad(at_row<const T>(a.init, b, t + k + a.taps - 1) + c);
        else
            out[k].raw = {};
    }
}

/* bias + sum of taps times the rows x[0..W-1] that row t sees. */
template <typename T, int W, bool DOC>
static __device__ __forceinline__ void convolve(const float (&w)[W][V], const float (&bias)[V], const quad<T> *x, int t,
                                                int sees, float (&pre)[V])
{
#pragma unroll
    for (int e = 0; e < V; e++)
        pre[e] = bias[e];
#pragma unroll
    for (int j = 0; j < W; j++)
        if (!DOC || t - (W - 1) + j >= sees) {
            float v[V];
            quad_floats(x[j], v);
#pragma unroll
            for (int e = 0; e < V; e++)
                pre[e] += w[j][e] * v[e];
        }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* DOC: there are documents, so a row may see less than all its taps. */
template <typename T, int W, int ROWS, bool DOC>
static __global__ void __launch_bounds__(32 * WARPS) conv_fwd_tiles(const __grid_constant__ struct conv a)
{
    unsigned tiles = (unsigned)((a.channels + 32 * V - 1) / (32 * V)),
             groups = (unsigned)((a.rows + ROWS * WARPS - 1) / (ROWS * WARPS));
    unsigned block = blockIdx.x / tiles;
    int64_t b = block / groups, c = ((int64_t)(blockIdx.x % tiles) * 32 + threadIdx.x % 32) * V;
    int first = ((int)(block % groups) * WARPS + threadIdx.x / 32) * ROWS, rows = (int)a.rows;
    if (c >= a.channels || first >= rows)
        return;
    quad<T> x[ROWS + W - 1];
    load_rows<T, ROWS + W - 1>(a, has_init(a), b, first - (W - 1), c, x);
    float w[W][V], bias[V];
    load_taps<W>(a, c, w, bias);
    T *y = at_row<T>(a.y, b, 0) + c;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        float pre[V];
        if (first + k >= rows)
            break;
        convolve<T, W, DOC>(w, bias, x + k, first + k, DOC ? first_seen(a, b, first + k) : 0, pre);
        if (a.silu)
#pragma unroll
            for (int e = 0; e < V; e++)
                pre[e] *= quick_sigmoid(pre[e]);
        store_floats(y + (first + k) * a.y.stride[1], pre);
    }
}

/* One output before the curve. */
template <typename T> static __device__ float pre_at(const struct conv &a, bool init, int64_t b, int64_t t, int64_t c)
{
    float sum = a.bias != NULL ? a.bias[c] : 0.0f, value[1];
    int64_t sees = first_seen(a, b, t);
    for (int64_t k = 0; k < a.taps; k++) {
        int64_t j = t - (a.taps - 1) + k;
        if (j >= sees) {
            input_at<T, 1>(a, init, b, j, c, value);
            sum += a.w[c * a.w_stride + k] * value[0];
        }
    }
    return sum;
}

template <typename T>
static __global__ void __launch_bounds__(256) conv_fwd_plain(const __grid_constant__ struct conv a)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.batch * a.rows * a.channels)
        return;
    int64_t c = i % a.channels, t = i / a.channels % a.rows, b = i / a.channels / a.rows;
    float pre = pre_at<T>(a, has_init(a), b, t, c);
    at_row<T>(a.y, b, t)[c] = from_float<T>(a.silu ? pre * quick_sigmoid(pre) : pre);
}

/* The last rows of [init | x]; y holds them here. final may be init: ascending rows read at or ahead of where they
 * write. */
template <typename T> static __global__ void __launch_bounds__(256) conv_final(const __grid_constant__ struct conv a)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.batch * a.channels)
        return;
    int64_t c = i % a.channels, b = i / a.channels;
    bool init = has_init(a);
    for (int64_t k = 0; k < a.taps - 1; k++) {
        float value[1];
        input_at<T, 1>(a, init, b, a.rows - (a.taps - 1) + k, c, value);
        at_row<T>(a.y, b, k)[c] = from_float<T>(value[0]);
    }
}

static bool quads_fit(const struct conv *a, int64_t bytes)
{
    const struct tensor *all[] = {&a->x, &a->y, &a->init, &a->dy, &a->dx};
    bool fit = a->taps >= 2 && a->taps <= 4 && a->channels > 0 && a->rows < INT32_MAX / 2 &&
               a->batch * (a->rows + LONG_RUN) * ceil_div(a->channels, V) < (1ll << 31);
    for (int k = 0; k < countof(all); k++)
        fit = fit && (all[k]->data == NULL || aligned_to(all[k], bytes));
    return fit;
}

template <typename T, int W> static int fwd_tiles(struct lane *l, const struct conv *a)
{
    constexpr int ROWS = 32 / (int)sizeof(T);
    unsigned grid = (unsigned)(a->batch * ceil_div(a->rows, ROWS * WARPS) * ceil_div(a->channels, 32 * V));
    if (a->doc != NULL)
        LAUNCH(l, (conv_fwd_tiles<T, W, ROWS, true>), grid, 32 * WARPS, 0, *a);
    else
        LAUNCH(l, (conv_fwd_tiles<T, W, ROWS, false>), grid, 32 * WARPS, 0, *a);
    return ST_OK;
}

template <typename T> static int fwd_run(struct lane *l, const struct conv *a)
{
    if (!quads_fit(a, V * (int64_t)sizeof(T))) {
        LAUNCH(l, conv_fwd_plain<T>, (unsigned)ceil_div(a->batch * a->rows * a->channels, 256), 256, 0, *a);
        return ST_OK;
    }
    return a->taps == 4 ? fwd_tiles<T, 4>(l, a) : a->taps == 3 ? fwd_tiles<T, 3>(l, a) : fwd_tiles<T, 2>(l, a);
}

static struct conv conv_of(const struct tensor *x, const struct tensor *w, const struct tensor *bias,
                           const struct tensor *init, const struct tensor *doc, bool silu)
{
    struct conv c = {};
    c.x = *x;
    c.init = *init;
    c.w = (const float *)w->data;
    c.bias = (const float *)bias->data;
    c.doc = (const int32_t *)doc->data;
    c.batch = x->dim[0];
    c.rows = x->dim[1];
    c.channels = x->dim[2];
    c.taps = w->dim[1];
    c.w_stride = w->stride[0];
    c.doc_stride = doc->stride[0];
    c.silu = silu;
    c.w_quads = pointer16(w->data) && w->stride[0] % 4 == 0;
    return c;
}

extern "C" int64_t conv1d_fwd_work_cuda(const struct conv1d_fwd_args *a)
{
    (void)a;
    return 0;
}

extern "C" int conv1d_fwd_cuda(struct lane *l, const struct conv1d_fwd_args *a)
{
    TRY(conv1d_fwd_check(a, l->err));
    struct conv c = conv_of(&a->x, &a->w, &a->bias, &a->init, &a->doc_start, a->silu), f = c;
    c.y = a->y;
    c.start = f.start = (const int64_t *)a->start.data;
    f.y = a->final;
    if (a->x.dtype == DT_BF16)
        TRY(fwd_run<bf16>(l, &c));
    else
        TRY(fwd_run<float>(l, &c));
    if (!present(&a->final) || c.taps < 2)
        return ST_OK;
    unsigned grid = (unsigned)ceil_div(c.batch * c.channels, 256);
    if (a->x.dtype == DT_BF16)
        LAUNCH(l, conv_final<bf16>, grid, 256, 0, f);
    else
        LAUNCH(l, conv_final<float>, grid, 256, 0, f);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dy times the slope of the curve. */
static __device__ __forceinline__ float through_curve(const struct conv &a, float dy, float pre)
{
    if (!a.silu)
        return dy;
    float s = quick_sigmoid(pre);
    return dy * s * (1 + pre * (1 - s));
}

/* State of one thread: four channels on their way down a run. */
template <typename T, int W> struct bwd_walk {
    float w[W][V], bias[V], dw[W][V], dbias[V];
    quad<T> x[AHEAD + W - 1];   /* the W - 1 rows before, then those being worked on */
    float dx[AHEAD + W - 1][V]; /* of the same rows */
};

/* Row t is number k of the group. own: its sums belong to this run. */
template <typename T, int W, bool DOC>
static __device__ __forceinline__ void bwd_row(const struct conv &a, bwd_walk<T, W> &s, const quad<T> &dy, int k, int t,
                                               int sees, bool own)
{
    float pre[V], d[V], counted[V]; /* counted: 0 where another run adds this row up */
    convolve<T, W, DOC>(s.w, s.bias, s.x + k, t, sees, pre);
    quad_floats(dy, d);
#pragma unroll
    for (int e = 0; e < V; e++) {
        d[e] = through_curve(a, d[e], pre[e]);
        counted[e] = own ? d[e] : 0.0f;
        s.dbias[e] += counted[e];
    }
#pragma unroll
    for (int j = 0; j < W; j++)
        if (!DOC || t - (W - 1) + j >= sees) {
            float v[V];
            quad_floats(s.x[k + j], v);
#pragma unroll
            for (int e = 0; e < V; e++) {
                s.dx[k + j][e] += s.w[j][e] * d[e];
                s.dw[j][e] += counted[e] * v[e];
            }
        }
}

template <typename T, int W, bool DOC>
static __global__ void __launch_bounds__(BWD_THREADS, sizeof(T) == 2 ? 4 : 3)
    conv_bwd_runs(const __grid_constant__ struct conv a)
{
    unsigned lanes = (unsigned)((a.channels + V - 1) / V), i = blockIdx.x * BWD_THREADS + threadIdx.x, run = i / lanes;
    int rows = (int)a.rows, runs = (int)((a.rows + a.run - 1) / a.run);
    int64_t b = run / (unsigned)runs, c = (int64_t)(i % lanes) * V;
    if (b >= a.batch)
        return;
    int begin = (int)(run % (unsigned)runs) * (int)a.run, end = min(rows, begin + (int)a.run);
    bool init = has_init(a);
    bwd_walk<T, W> s = {};
    quad<T> dy[AHEAD], next_dy[AHEAD] = {}, next_x[AHEAD] = {};
    quad<T> before[W - 1];
    load_taps<W>(a, c, s.w, s.bias);
    load_rows<T, W - 1>(a, init, b, begin - (W - 1), c, before);
    const T *x = at_row<const T>(a.x, b, 0) + c, *d_y = at_row<const T>(a.dy, b, 0) + c;
    T *d_x = at_row<T>(a.dx, b, 0) + c;
    const int64_t x_row = a.x.stride[1], dy_row = a.dy.stride[1], dx_row = a.dx.stride[1];
#pragma unroll
    for (int k = 0; k < W - 1; k++)
        s.x[k] = before[k];
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (begin + k < rows) {
            next_x[k] = load_quad(x + (begin + k) * x_row);
            next_dy[k] = load_quad(d_y + (begin + k) * dy_row);
        }
    int last = min(rows, end + W - 1); /* rows that see this run end before it */
    for (int t = begin; t < end + W - 1; t += AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            s.x[W - 1 + k] = next_x[k];
            dy[k] = next_dy[k];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (t + AHEAD + k < last) {
                next_x[k] = load_quad(x + (t + AHEAD + k) * x_row);
                next_dy[k] = load_quad(d_y + (t + AHEAD + k) * dy_row);
            }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (t + k < last)
                bwd_row<T, W, DOC>(a, s, dy[k], k, t + k, DOC ? first_seen(a, b, t + k) : 0, t + k < end);
            int done = t + k - (W - 1); /* no later row sees it */
            if (done >= begin && done < end)
                store_floats(d_x + done * dx_row, s.dx[k]);
        }
#pragma unroll
        for (int k = 0; k < AHEAD + W - 1; k++)
#pragma unroll
            for (int e = 0; e < V; e++)
                s.dx[k][e] = k < W - 1 ? s.dx[k + AHEAD < AHEAD + W - 1 ? k + AHEAD : 0][e] : 0.0f;
#pragma unroll
        for (int k = 0; k < W - 1; k++)
            s.x[k] = s.x[k + AHEAD];
    }
#pragma unroll
    for (int e = 0; e < V; e++) {
#pragma unroll
        for (int k = 0; k < W; k++)
            a.dw[((int64_t)run * a.channels + c + e) * W + k] = s.dw[k][e];
        a.dbias[(int64_t)run * a.channels + c + e] = s.dbias[e];
    }
}

template <typename T> static __device__ float dpre_at(const struct conv &a, bool init, int64_t b, int64_t t, int64_t c)
{
    float pre = a.silu ? pre_at<T>(a, init, b, t, c) : 0.0f;
    return through_curve(a, to_float(at_row<const T>(a.dy, b, t)[c]), pre);
}

/* dx (and with y as dinit: rows before the first), element by element. */
template <typename T>
static __global__ void __launch_bounds__(256)
    conv_dx_plain(const __grid_constant__ struct conv a, int64_t first_row, int64_t rows)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.batch * rows * a.channels)
        return;
    int64_t c = i % a.channels, r = i / a.channels % rows, b = i / a.channels / rows, j = first_row + r;
    bool init = has_init(a);
    float sum = 0;
    for (int64_t t = max(j, (int64_t)0); t < min(a.rows, j + a.taps); t++)
        if (j >= first_seen(a, b, t))
            sum += a.w[c * a.w_stride + j - t + a.taps - 1] * dpre_at<T>(a, init, b, t, c);
    at_row<T>(a.dx, b, r)[c] = from_float<T>(sum);
}

/* A thread a channel of a run of rows. */
template <typename T> static __global__ void __launch_bounds__(128) conv_dw_plain(const __grid_constant__ struct conv a)
{
    int64_t i = (int64_t)blockIdx.x * 128 + threadIdx.x, groups = (a.rows + a.run - 1) / a.run;
    if (i >= a.batch * groups * a.channels)
        return;
    int64_t c = i % a.channels, block = i / a.channels, b = block / groups, first = block % groups * a.run;
    int64_t end = min(a.rows, first + a.run);
    bool init = has_init(a);
    float dw[CONV1D_MAX_WIDTH] = {}, dbias = 0;
    for (int64_t t = first; t < end; t++) {
        int64_t sees = first_seen(a, b, t);
        float d = dpre_at<T>(a, init, b, t, c), value[1];
        dbias += d;
#pragma unroll
        for (int k = 0; k < CONV1D_MAX_WIDTH; k++) {
            int64_t j = t - (a.taps - 1) + k;
            if (k < a.taps && j >= sees) {
                input_at<T, 1>(a, init, b, j, c, value);
                dw[k] += d * value[0];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < CONV1D_MAX_WIDTH; k++)
        if (k < a.taps)
            a.dw[(block * a.channels + c) * a.taps + k] = dw[k];
    a.dbias[block * a.channels + c] = dbias;
}

/* Long runs read fewer rows twice, but a GPU wants many threads. */
static int64_t run_rows(const struct tensor *x)
{
    return x->dim[0] * ceil_div(x->dim[1], LONG_RUN) * ceil_div(x->dim[2], V) >= 1 << 16 ? LONG_RUN : SHORT_RUN;
}
static int64_t row_blocks(const struct tensor *x) { return x->dim[0] * ceil_div(x->dim[1], run_rows(x)); }

extern "C" int64_t conv1d_bwd_work_cuda(const struct conv1d_bwd_args *a)
{
    return row_blocks(&a->x) * a->x.dim[2] * (a->w.dim[1] + 1) * (int64_t)sizeof(float);
}

template <typename T, int W> static int bwd_runs(struct lane *l, const struct conv *a, unsigned grid)
{
    if (a->doc != NULL)
        LAUNCH(l, (conv_bwd_runs<T, W, true>), grid, BWD_THREADS, 0, *a);
    else
        LAUNCH(l, (conv_bwd_runs<T, W, false>), grid, BWD_THREADS, 0, *a);
    return ST_OK;
}

template <typename T> static int bwd_run(struct lane *l, const struct conv *a, const struct tensor *dinit)
{
    int64_t blocks = row_blocks(&a->x);
    if (quads_fit(a, V * (int64_t)sizeof(T))) {
        unsigned grid = (unsigned)ceil_div(blocks * ceil_div(a->channels, V), BWD_THREADS);
        int st = a->taps == 4   ? bwd_runs<T, 4>(l, a, grid)
                 : a->taps == 3 ? bwd_runs<T, 3>(l, a, grid)
                                : bwd_runs<T, 2>(l, a, grid);
        TRY(st);
    } else {
        LAUNCH(l, conv_dw_plain<T>, (unsigned)ceil_div(blocks * a->channels, 128), 128, 0, *a);
        LAUNCH(l, conv_dx_plain<T>, (unsigned)ceil_div(a->batch * a->rows * a->channels, 256), 256, 0, *a, (int64_t)0,
               a->rows);
    }
    if (!present(dinit))
        return ST_OK;
    struct conv before = *a;
    before.dx = *dinit;
    LAUNCH(l, conv_dx_plain<T>, (unsigned)ceil_div(a->batch * (a->taps - 1) * a->channels, 256), 256, 0, before,
           1 - a->taps, a->taps - 1);
    return ST_OK;
}

extern "C" int conv1d_bwd_cuda(struct lane *l, const struct conv1d_bwd_args *a)
{
    TRY(conv1d_bwd_check(a, l->err));
    TRY(check_work("conv1d_bwd", &a->work, conv1d_bwd_work_cuda(a), l->err));
    int64_t blocks = row_blocks(&a->x), channels = a->x.dim[2], taps = a->w.dim[1];
    struct conv c = conv_of(&a->x, &a->w, &a->bias, &a->init, &a->doc_start, a->silu);
    c.dy = a->dy;
    c.dx = a->dx;
    c.run = run_rows(&a->x);
    c.dw = (float *)a->work.data;
    c.dbias = c.dw + blocks * channels * taps;
    if (a->x.dtype == DT_BF16)
        TRY(bwd_run<bf16>(l, &c, &a->dinit));
    else
        TRY(bwd_run<float>(l, &c, &a->dinit));
    TRY(add_partials(l, c.dw, blocks, channels * taps, (float *)a->dw.data, taps, a->dw.stride[0], a->acc_dw));
    return present(&a->dbias)
               ? add_partials(l, c.dbias, blocks, channels, (float *)a->dbias.data, channels, 0, a->acc_dbias)
               : ST_OK;
}
