/* What moves streams: combine, aggregate (with the norm behind it), expand, the mean, and the backward pass through
 * them. A block takes one row, or a fixed run of rows where sums over channels follow; a thread takes the same channels
 * of all streams, so outputs may lie where inputs did. */
#include "ops/mhc/portable/mhc_cuda.cuh"

/* Coefficients of a row: in registers for 4 streams, otherwise read where they are used. */
template <int N> struct mixer {
    float v[N > 0 ? N *N : 1];
    const float *res;
};
template <int N> INLINE mixer<N> mixer_of(const float *res, bool profile_d)
{
    struct mixer<N> m;
    m.res = res;
    if constexpr (N > 0)
        UNROLLED (i, N)
            UNROLLED (j, N)
                m.v[i * N + j] = profile_d ? res[j * N + i] : res[i * N + j];
    return m;
}
template <int N> INLINE float mix(const struct mixer<N> &m, bool profile_d, int n, int i, int j)
{
    if constexpr (N > 0)
        return m.v[i * N + j];
    else
        return m.res[mix_at(profile_d, n, i, j)];
}
template <int N> struct gates {
    float v[N > 0 ? N : 1];
    const float *from;
};
template <int N> INLINE gates<N> gates_of(const float *from)
{
    struct gates<N> g;
    g.from = from;
    if constexpr (N > 0)
        UNROLLED (i, N)
            g.v[i] = from[i];
    return g;
}
template <int N> INLINE float gate(const struct gates<N> &g, int i)
{
    if constexpr (N > 0)
        return g.v[i];
    else
        return g.from[i];
}

/* f + bias of VEC channels. */
template <typename T, int VEC> INLINE void take_biased(const T *f, const float *bias, int64_t c, float (&v)[VEC])
{
    load_floats(f + c, v);
    if (bias != NULL) {
        float b[VEC];
        load_floats(bias + c, b);
        UNROLLED (e, VEC)
            v[e] += b[e];
    }
}

/* ---- combine --------------------------------------------------------------------------------- */

template <typename T, int N, int VEC, bool DROP>
static __global__ void __launch_bounds__(MHC_THREADS) combine_rows(const __grid_constant__ struct combine_args a)
{
    __shared__ float scratch[MHC_THREADS / 32];
    int64_t row = blockIdx.x;
    int n = streams<N>::count(a.rule.n);
    bool profile_d = a.rule.profile_d;
    const T *x = at<T>(a.x, row), *f = at<T>(a.f, row);
    T *y = at<T>(a.y, row);
    struct mixer<N> m = mixer_of<N>(at<float>(a.res, row), profile_d);
    struct gates<N> post = gates_of<N>(at<float>(a.post, row));
    struct draw_place drop = {};
    if (DROP)
        drop = drop_row_of(a.drop, row);
    float square = 0;
#pragma unroll 2
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
        float in[streams<N>::MAX][VEC], add[VEC];
        UNROLLED (j, n)
            load_floats(x + j * a.d + c, in[j]);
        take_biased(f, a.bias, c, add);
        UNROLLED (i, n) {
            float out[VEC], factor[VEC];
            if (DROP)
                drop_factors(a.drop, drop, i * a.d + c, factor);
            UNROLLED (e, VEC) {
                out[e] = __fmul_rn(mix(m, profile_d, n, i, 0), in[0][e]);
#pragma unroll
                for (int j = 1; j < n; j++)
                    out[e] = fmaf(mix(m, profile_d, n, i, j), in[j][e], out[e]);
                out[e] = add_dropped<DROP>(out[e], gate(post, i), add[e], DROP ? factor[e] : 1.0f);
            }
            /* The stored numbers are what the projection and every later reader sees. */
            if constexpr (VEC == 1) {
                T stored = from_float<T>(out[0]);
                y[i * a.d + c] = stored;
                square += to_float(stored) * to_float(stored);
            } else {
                uint4 stored = repack<T>(out);
                store_raw(y + i * a.d + c, stored);
                unpack<T>(stored, out);
                UNROLLED (e, VEC)
                    square += out[e] * out[e];
            }
        }
    }
    if (a.rho.data == NULL)
        return;
    square = row_sum(square, scratch);
    if (threadIdx.x == 0)
        *at<float>(a.rho, row) = sqrtf(square / (float)max(n * a.d, (int64_t)1) + a.rule.root_eps) - a.rule.root_less;
}

/* rho of the streams as they are. */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) rho_rows(const __grid_constant__ struct combine_args a)
{
    __shared__ float scratch[MHC_THREADS / 32];
    int64_t row = blockIdx.x, k = streams<N>::count(a.rule.n) * a.d;
    const T *x = at<T>(a.x, row);
    float square = 0;
#pragma unroll 4
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < k; c += (int64_t)blockDim.x * VEC) {
        float v[VEC];
        load_floats(x + c, v);
        UNROLLED (e, VEC)
            square += v[e] * v[e];
    }
    square = row_sum(square, scratch);
    if (threadIdx.x == 0)
        *at<float>(a.rho, row) = sqrtf(square / (float)max(k, (int64_t)1) + a.rule.root_eps) - a.rule.root_less;
}

int mhc_combine_rows(struct lane *l, const struct combine_args *a, enum dtype real, bool aligned)
{
    unsigned grid = (unsigned)a->rows;
    MHC_DISPATCH(real, a->rule.n, aligned && whole_vectors(a->d, real), T, N, VEC, {
        unsigned threads = mhc_threads(a->d, VEC);
        if (a->f.data == NULL)
            LAUNCH(l, (rho_rows<T, N, VEC>), grid, threads, 0, *a);
        else if (a->drop.info == NULL)
            LAUNCH(l, (combine_rows<T, N, VEC, false>), grid, threads, 0, *a);
        else
            LAUNCH(l, (combine_rows<T, N, VEC, true>), grid, threads, 0, *a);
    });
    return ST_OK;
}

extern "C" int mhc_combine_fwd_cuda(struct lane *l, const struct mhc_combine_fwd_args *c)
{
    TRY(mhc_combine_fwd_check(c, l->err));
    struct combine_args a = {.x = view_of(&c->x),
                             .f = view_of(&c->f),
                             .y = view_of(&c->y),
                             .post = view_of(&c->post),
                             .res = view_of(&c->res),
                             .bias = floats(&c->bias),
                             .rows = c->x.dim[0],
                             .d = c->f.dim[1],
                             .rule = rule_of(c->rule),
                             .drop = drop_rule_of(&c->drop)};
    return mhc_combine_rows(l, &a, c->x.dtype,
                            aligned16(&c->x) && aligned16(&c->f) && aligned16(&c->y) && pointer16(a.bias));
}

/* ---- aggregate ------------------------------------------------------------------------------- */

INLINE float stream_weight(const struct weight_args &w, int64_t row, int i)
{
    if (w.pre.data != NULL)
        return number_at(w.pre, row, i);
    if (w.m.data != NULL)
        return precise_sigmoid(number_at(w.m, row, i) * number_at(w.rstd, row, 0) * *w.scale + w.base[i]) + w.eps;
    return w.same;
}

/* Weights of a row; for any number of streams in shared memory, but there is no limit on them if all are the same. */
template <int N> struct weights {
    float v[N > 0 ? N : 1];
    bool same;
};
template <int N> INLINE weights<N> weights_of(const struct weight_args &w, int64_t row, int n, float *shared)
{
    struct weights<N> out;
    out.same = w.pre.data == NULL && w.m.data == NULL;
    if constexpr (N > 0) {
        UNROLLED (i, N)
            out.v[i] = stream_weight(w, row, i);
    } else {
        out.v[0] = w.same;
        if (!out.same) {
            if ((int)threadIdx.x < n && (int)threadIdx.x < MHC_MAX_STREAMS)
                shared[threadIdx.x] = stream_weight(w, row, (int)threadIdx.x);
            __syncthreads();
        }
    }
    return out;
}
template <int N> INLINE float weight(const struct weights<N> &w, const float *shared, int i)
{
    if constexpr (N > 0)
        return w.v[i];
    else
        return w.same ? w.v[0] : shared[i];
}

template <typename T, int N, int VEC>
INLINE void aggregate(const T *x, int64_t step, int n, const struct weights<N> &w, const float *shared, int64_t c,
                      float (&out)[VEC])
{
    if constexpr (N > 0) {
        struct packed in[N];
        UNROLLED (i, N)
            in[i] = load_packed<T, VEC>(x + i * step + c);
        UNROLLED (e, VEC)
            out[e] = 0;
        UNROLLED (i, N) {
            float v[VEC];
            unpack_to<T>(in[i], v);
            UNROLLED (e, VEC)
                out[e] = fmaf(w.v[i], v[e], out[e]);
        }
    } else {
        out[0] = 0;
        for (int i = 0; i < n; i++)
            out[0] += weight<N>(w, shared, i) * to_float(x[i * step + c]);
    }
}

/* Without the norm, where threads need not wait for each other, a block takes a row in one step if it can; with the
 * norm and 1 / rms known, in two. */
enum { WIDE_THREADS = 1024, GIVEN_THREADS = 512 };
static inline unsigned wide_threads(int64_t d, int vec, int most)
{
    int64_t pieces = max_i64(ceil_div(d, vec), 1);
    return (unsigned)round_up(ceil_div(pieces, ceil_div(pieces, most)), 32);
}

template <typename T, int N, int VEC, bool NORM>
static __global__ void __launch_bounds__(NORM ? (int)MHC_THREADS : (int)WIDE_THREADS)
    aggregate_rows(const __grid_constant__ struct aggregate_args a)
{
    __shared__ float scratch[MHC_THREADS / 32], shared[MHC_MAX_STREAMS];
    /* From the end: what was written last is still in the cache. */
    int64_t row = gridDim.x - 1 - blockIdx.x, first = (int64_t)threadIdx.x * VEC, step = (int64_t)blockDim.x * VEC;
    int n = streams<N>::count(a.n);
    int64_t between = a.equal ? 0 : a.d;
    const T *x = at<T>(a.x, row);
    T *out = at<T>(a.out, row);
    struct weights<N> w = weights_of<N>(a.weight, row, n, shared);
    float kept[VEC] = {}, square = 0; /* kept: the first channels of this thread, all there are up to 256 VEC */
    for (int64_t c = first; c < a.d && !(NORM && a.given); c += step) {
        float v[VEC];
        aggregate<T, N, VEC>(x, between, n, w, shared, c, v);
        if constexpr (NORM) {
            UNROLLED (e, VEC) {
                square += v[e] * v[e];
                kept[e] = c == first ? v[e] : kept[e];
            }
        } else {
            store_floats(out + c, v);
        }
    }
    if constexpr (NORM) {
        float rstd = a.given ? number_at(a.rstd, row, 0) : rsqrtf(row_sum(square, scratch) / (float)a.d + a.eps);
        if (threadIdx.x == 0 && !a.given)
            *at<float>(a.rstd, row) = rstd;
        for (int64_t c = first; c < a.d; c += step) {
            float v[VEC], gain[VEC];
            if (c == first && !a.given) {
                UNROLLED (e, VEC)
                    v[e] = kept[e];
            } else {
                aggregate<T, N, VEC>(x, between, n, w, shared, c, v);
            }
            load_gain(a.norm, c, gain);
            UNROLLED (e, VEC)
                v[e] *= rstd * gain[e];
            store_floats(out + c, v);
        }
    }
}

/* The same with 1 / rms given. */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(GIVEN_THREADS) scale_rows(const __grid_constant__ struct aggregate_args a)
{
    int64_t row = gridDim.x - 1 - blockIdx.x;
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
        float v[VEC], gain[VEC], rstd = number_at(a.rstd, row, 0);
        struct weights<N> w = weights_of<N>(a.weight, row, N, NULL);
        load_gain(a.norm, c, gain);
        aggregate<T, N, VEC>(at<T>(a.x, row), a.d, N, w, NULL, c, v);
        UNROLLED (e, VEC)
            v[e] *= rstd * gain[e];
        store_floats(at<T>(a.out, row) + c, v);
    }
}
template <typename T, int N, int VEC> static int scale(struct lane *l, const struct aggregate_args *a)
{
    if constexpr (N > 0)
        LAUNCH(l, (scale_rows<T, N, VEC>), (unsigned)a->rows, wide_threads(a->d, VEC, GIVEN_THREADS), 0, *a);
    return ST_OK;
}

int mhc_aggregate_rows(struct lane *l, const struct aggregate_args *a, enum dtype real, bool aligned)
{
    MHC_DISPATCH(real, a->n, aligned && whole_vectors(a->d, real), T, N, VEC, {
        if (a->normed && a->given && N > 0)
            return scale<T, N, VEC>(l, a);
        if (a->normed)
            LAUNCH(l, (aggregate_rows<T, N, VEC, true>), (unsigned)a->rows, mhc_threads(a->d, VEC), 0, *a);
        else
            LAUNCH(l, (aggregate_rows<T, N, VEC, false>), (unsigned)a->rows, wide_threads(a->d, VEC, WIDE_THREADS), 0,
                   *a);
    });
    return ST_OK;
}

static int aggregate_into(struct lane *l, const struct tensor *x, const struct tensor *out, const struct weight_args *w,
                          int64_t n)
{
    struct aggregate_args a = {
        .x = view_of(x), .out = view_of(out), .weight = *w, .rows = out->dim[0], .d = out->dim[1], .n = (int)n};
    return mhc_aggregate_rows(l, &a, x->dtype, aligned16(x) && aligned16(out));
}

static struct weight_args same_weights(float value) { return {.same = value}; }

extern "C" int mhc_aggregate_fwd_cuda(struct lane *l, const struct mhc_aggregate_fwd_args *a)
{
    TRY(mhc_aggregate_fwd_check(a, l->err));
    struct weight_args w = {.pre = view_of(&a->pre)};
    return aggregate_into(l, &a->x, &a->a, &w, a->pre.dim[1]);
}

extern "C" int mhc_expand_bwd_cuda(struct lane *l, const struct mhc_expand_bwd_args *a)
{
    TRY(mhc_expand_bwd_check(a, l->err));
    struct weight_args w = same_weights(1);
    return a->dx.dim[1] == 0 ? ST_OK : aggregate_into(l, &a->dy, &a->dx, &w, a->dy.dim[1] / a->dx.dim[1]);
}

/* ---- the other way: one to all streams ------------------------------------------------------- */

/* out_i (+)= weight_i one */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS)
    fan_rows(struct view one, struct view out, const __grid_constant__ struct weight_args by, int64_t d, int n_,
             bool add)
{
    __shared__ float shared[MHC_MAX_STREAMS];
    int64_t row = blockIdx.x;
    int n = streams<N>::count(n_);
    const T *from = at<T>(one, row);
    T *to = at<T>(out, row);
    struct weights<N> w = weights_of<N>(by, row, n, shared);
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < d; c += (int64_t)blockDim.x * VEC) {
        float v[VEC];
        load_floats(from + c, v);
        UNROLLED (i, n) {
            float sum[VEC] = {};
            if (add)
                load_floats(to + i * d + c, sum);
            UNROLLED (e, VEC)
                sum[e] += weight<N>(w, shared, i) * v[e];
            store_floats(to + i * d + c, sum);
        }
    }
}

static int fan_out(struct lane *l, const struct tensor *one, const struct tensor *out, const struct weight_args *w,
                   int64_t n, bool add)
{
    int64_t d = one->dim[1];
    MHC_DISPATCH(one->dtype, n, aligned16(one) && aligned16(out), T, N, VEC,
                 LAUNCH(l, (fan_rows<T, N, VEC>), (unsigned)one->dim[0], mhc_threads(d, VEC), 0, view_of(one),
                        view_of(out), *w, d, (int)n, add));
    return ST_OK;
}

int mhc_expand_mean(struct lane *l, const struct tensor *one, const struct tensor *out, bool add)
{
    int64_t n = one->dim[1] > 0 ? out->dim[1] / one->dim[1] : 0;
    struct weight_args w = same_weights(n > 0 ? (float)(1 / (double)n) : 0);
    return n > 0 ? fan_out(l, one, out, &w, n, add) : ST_OK;
}

int mhc_mean(struct lane *l, const struct tensor *x, const struct tensor *out)
{
    int64_t n = out->dim[1] > 0 ? x->dim[1] / out->dim[1] : 0;
    struct weight_args w = same_weights(n > 0 ? (float)(1 / (double)n) : 0);
    return n > 0 ? aggregate_into(l, x, out, &w, n) : ST_OK;
}

extern "C" int mhc_expand_fwd_cuda(struct lane *l, const struct mhc_expand_fwd_args *a)
{
    TRY(mhc_expand_fwd_check(a, l->err));
    struct weight_args w = same_weights(1);
    return a->x.dim[1] == 0 ? ST_OK : fan_out(l, &a->x, &a->y, &w, a->y.dim[1] / a->x.dim[1], false);
}

/* One dot product per block: rows and streams. */
template <typename T>
static __global__ void __launch_bounds__(128)
    stream_dots(struct view one, struct view streams, float *dots, int64_t stride, int64_t d)
{
    __shared__ float scratch[4];
    int64_t row = blockIdx.x;
    const T *p = at<T>(one, row), *q = at<T>(streams, row) + blockIdx.y * d;
    float sum = 0;
#pragma unroll 4
    for (int64_t c = threadIdx.x; c < d; c += 128)
        sum += to_float(p[c]) * to_float(q[c]);
    sum = block_sum<128>(sum, scratch);
    if (threadIdx.x == 0)
        dots[row * stride + blockIdx.y] = sum;
}

int mhc_stream_dots(struct lane *l, const struct tensor *one, const struct tensor *streams, float *dots, int64_t stride)
{
    int64_t d = one->dim[1];
    unsigned n = d > 0 ? (unsigned)(streams->dim[1] / d) : 0;
    BY_REAL(one->dtype, T,
            LAUNCH(l, stream_dots<T>, dim3((unsigned)one->dim[0], n), 128, 0, view_of(one), view_of(streams), dots,
                   stride, d));
    return ST_OK;
}

/* Both in one pass: dx_i (+)= pre_i da, dpre_i = <da, x_i>. */
struct aggregate_bwd {
    struct view da, x, dx, pre, dpre;
    int64_t d;
    bool add;
};
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) aggregate_bwd_rows(const __grid_constant__ struct aggregate_bwd a)
{
    __shared__ float sums[MHC_THREADS / 32][N];
    int64_t row = blockIdx.x;
    const T *da = at<T>(a.da, row), *x = at<T>(a.x, row);
    T *dx = at<T>(a.dx, row);
    float dots[N] = {};
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
        struct packed in[N], old[N] = {};
        float up[VEC];
        UNROLLED (i, N) {
            in[i] = load_packed<T, VEC>(x + i * a.d + c);
            if (a.add)
                old[i] = load_packed<T, VEC>(dx + i * a.d + c);
        }
        load_floats(da + c, up);
        UNROLLED (i, N) {
            float v[VEC], out[VEC], pre = number_at(a.pre, row, i);
            unpack_to<T>(in[i], v);
            unpack_to<T>(old[i], out);
            UNROLLED (e, VEC) {
                dots[i] += up[e] * v[e];
                out[e] += pre * up[e];
            }
            store_floats(dx + i * a.d + c, out);
        }
    }
    float sum = warp_sums<N>(dots);
    if (threadIdx.x % (32 / N) == 0)
        sums[threadIdx.x / 32][threadIdx.x % 32 / (32 / N)] = sum;
    __syncthreads();
    if (threadIdx.x >= N)
        return;
    sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++)
        sum += sums[w][threadIdx.x];
    at<float>(a.dpre, row)[threadIdx.x] = sum;
}

static int aggregate_bwd_4(struct lane *l, const struct mhc_aggregate_bwd_args *b)
{
    struct aggregate_bwd a = {view_of(&b->da),   view_of(&b->x), view_of(&b->dx), view_of(&b->pre),
                              view_of(&b->dpre), b->da.dim[1],   b->acc_dx};
    unsigned rows = (unsigned)b->da.dim[0];
    if (b->da.dtype == DT_BF16)
        LAUNCH(l, (aggregate_bwd_rows<bf16, 4, 8>), rows, mhc_threads(a.d, 8), 0, a);
    else
        LAUNCH(l, (aggregate_bwd_rows<float, 4, 4>), rows, mhc_threads(a.d, 4), 0, a);
    return ST_OK;
}

extern "C" int mhc_aggregate_bwd_cuda(struct lane *l, const struct mhc_aggregate_bwd_args *a)
{
    TRY(mhc_aggregate_bwd_check(a, l->err));
    if (a->pre.dim[1] == 4 && aligned16(&a->da) && aligned16(&a->x) && aligned16(&a->dx) &&
        whole_vectors(a->da.dim[1], a->da.dtype))
        return aggregate_bwd_4(l, a);
    struct weight_args w = {.pre = view_of(&a->pre)};
    TRY(mhc_stream_dots(l, &a->da, &a->x, floats(&a->dpre), a->dpre.stride[0]));
    return fan_out(l, &a->da, &a->dx, &w, a->pre.dim[1], a->acc_dx);
}
