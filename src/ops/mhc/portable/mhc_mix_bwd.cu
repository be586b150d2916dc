/* The backward pass through norm, aggregate and combine. A block takes a fixed run of rows, one after the other; a
 * thread takes the same channels of all streams and all rows. Sums over channels are left per warp in shared memory and
 * finished for a group of rows at once, so that warps wait for each other once per group and not once per row. Sums
 * over rows (dgain, dbias) are one partial row per block.
 *
 * What lies in local memory: arrays of the copies for any number of streams, which are indexed by it; and with dropout
 * 12 bytes of spills of the bf16 copy for 4 streams that opens and closes, which would need more than the 128 registers
 * that two blocks to a multiprocessor leave. That one serves boundaries with a gradient of the bias or with channels
 * that no pass takes. Combine alone has none. */
#include "ops/mhc/portable/mhc_cuda.cuh"

enum { WARPS = MHC_THREADS / 32 };

/* Adds v to the block's partial sums of channels c .. c + VEC; the first row overwrites. */
template <int VEC> INLINE void add_partial(float *partial, bool start, const float (&v)[VEC])
{
    float sum[VEC] = {};
    if (!start)
        load_floats(partial, sum);
    UNROLLED (e, VEC)
        sum[e] += v[e];
    store_floats(partial, sum);
}

/* Leaves sum k of the warp in to[k]. */
template <int COUNT> INLINE void leave_sums(float (&v)[COUNT], float *to)
{
    float sum = warp_sums<COUNT>(v);
    int lane = (int)threadIdx.x % 32;
    if (lane % (32 / COUNT) == 0)
        to[lane / (32 / COUNT)] = sum;
}

/* ---- norm and aggregate ---------------------------------------------------------------------- */

template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS, N > 0 ? 3 : 1)
    norm_bwd_rows(const __grid_constant__ struct norm_bwd_args a)
{
    constexpr int MAX = streams<N>::MAX, GROUP = N > 0 ? 32 : 8;
    /* [0, n): <y_i, u>; [MAX, MAX + n): <y_i, a> */
    __shared__ float sums[GROUP][WARPS][2 * MAX];
    int n = streams<N>::count(a.n), warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t mine = (int64_t)threadIdx.x * VEC, first = blockIdx.x * a.rows_per_block,
            end = min(first + a.rows_per_block, a.rows);
    float dgain[VEC] = {}; /* of this thread's first channels; of others in memory */
    for (int64_t start = first; start < end; start += GROUP) {
        int count = (int)min(end - start, (int64_t)GROUP);
        for (int r = 0; r < count; r++) {
            int64_t row = start + r;
            const T *y = at<T>(a.y, row), *dh = at<T>(a.dh, row);
            const float *pre = at<float>(a.pre, row);
            float rstd = number_at(a.rstd, row, 0), with_u[MAX] = {}, with_a[MAX] = {};
            for (int64_t c = mine; c < a.d; c += (int64_t)blockDim.x * VEC) {
                struct packed in[MAX];
                float u[VEC], agg[VEC] = {}, dg[VEC], gain[VEC];
                UNROLLED (i, n)
                    in[i] = load_packed<T, VEC>(y + i * a.d + c);
                load_floats(dh + c, u);
                load_gain(a.norm, c, gain);
                UNROLLED (i, n) {
                    float v[VEC];
                    unpack_to<T>(in[i], v);
                    UNROLLED (e, VEC)
                        agg[e] += pre[i] * v[e];
                }
                UNROLLED (e, VEC) {
                    dg[e] = u[e] * agg[e] * rstd;
                    u[e] *= gain[e];
                }
                UNROLLED (i, n) {
                    float v[VEC];
                    unpack_to<T>(in[i], v);
                    UNROLLED (e, VEC) {
                        with_u[i] += v[e] * u[e];
                        with_a[i] += v[e] * agg[e];
                    }
                }
                if (c == mine) {
                    UNROLLED (e, VEC)
                        dgain[e] += dg[e];
                } else if (a.dgain != NULL) {
                    add_partial(a.dgain + blockIdx.x * a.d + c, row == first, dg);
                }
            }
            if constexpr (N > 0) {
                leave_sums<MAX>(with_u, sums[r][warp]);
                leave_sums<MAX>(with_a, sums[r][warp] + MAX);
            } else {
                for (int i = 0; i < n; i++) {
                    leave_warp_sum(with_u[i], &sums[r][warp][i]);
                    leave_warp_sum(with_a[i], &sums[r][warp][MAX + i]);
                }
            }
        }
        __syncthreads();
        if ((int)threadIdx.x < count) {
            int r = (int)threadIdx.x;
            int64_t row = start + r;
            float rstd = number_at(a.rstd, row, 0), dot = 0;
            for (int k = 0; k < 2 * MAX; k++) {
                float sum = 0;
                for (int w = 0; w < warps && k % MAX < n; w++)
                    sum += sums[r][w][k];
                sums[r][0][k] = sum;
                if (k < n)
                    dot += number_at(a.pre, row, k) * sum;
            }
            float m = rstd * rstd * dot / (float)max(a.d, (int64_t)1);
            a.m[row] = m;
            for (int i = 0; i < n; i++)
                a.dpre[row * n + i] = rstd * (sums[r][0][i] - m * sums[r][0][MAX + i]);
        }
        __syncthreads();
    }
    if (a.dgain != NULL && mine < a.d)
        store_floats(a.dgain + blockIdx.x * a.d + mine, dgain);
}

int mhc_norm_bwd_rows(struct lane *l, const struct norm_bwd_args *a, enum dtype real, bool aligned)
{
    unsigned grid = (unsigned)ceil_div(a->rows, a->rows_per_block);
    MHC_DISPATCH(real, a->n, aligned && whole_vectors(a->d, real), T, N, VEC,
                 LAUNCH(l, (norm_bwd_rows<T, N, VEC>), grid, mhc_threads(a->d, VEC), 0, *a));
    return ST_OK;
}

/* ---- the stream's gradient, and combine ------------------------------------------------------ */

/* What is constant along a row, in registers for 4 streams. */
template <int N> struct row_coef {
    float pre[N > 0 ? N : 1], post[N > 0 ? N : 1], mix[N > 0 ? N *N : 1];
    const float *pre_at, *post_at, *res_at;
    float rstd, m, scale;
};
template <int N, bool OPENS, bool CLOSES> INLINE row_coef<N> row_coef_of(const struct mix_bwd_args &a, int64_t row)
{
    row_coef<N> k = {};
    if (OPENS) {
        k.pre_at = at<float>(a.pre, row);
        k.rstd = number_at(a.rstd, row, 0);
        k.m = a.m[row];
        k.scale = a.row_scale[row];
    }
    if (CLOSES) {
        k.post_at = at<float>(a.post, row);
        k.res_at = at<float>(a.res, row);
    }
    if constexpr (N > 0) {
        UNROLLED (i, N) {
            if (OPENS)
                k.pre[i] = k.pre_at[i];
            if (CLOSES) {
                k.post[i] = k.post_at[i];
                UNROLLED (j, N)
                    k.mix[i * N + j] = k.res_at[mix_at(a.rule.profile_d, N, i, j)];
            }
        }
    }
    return k;
}
template <int N> INLINE float pre_of(const struct row_coef<N> &k, int i)
{
    if constexpr (N > 0)
        return k.pre[i];
    else
        return k.pre_at[i];
}
/* KEPT_HERE: in registers; where both halves are at work they have no room. */
template <int N, bool KEPT_HERE> INLINE float post_of(const struct row_coef<N> &k, int i)
{
    if constexpr (N > 0 && KEPT_HERE)
        return k.post[i];
    else
        return k.post_at[i];
}
template <int N, bool KEPT_HERE> INLINE float mix_of(const struct row_coef<N> &k, bool profile_d, int n, int i, int j)
{
    if constexpr (N > 0 && KEPT_HERE)
        return k.mix[i * N + j];
    else
        return k.res_at[mix_at(profile_d, n, i, j)];
}

/* g_i of VEC channels from c on. */
template <typename T, int N, int VEC, bool OPENS>
INLINE void stream_gradient(const struct mix_bwd_args &a, const struct row_coef<N> &k, int64_t row, int64_t c, int n,
                            float (&g)[streams<N>::MAX][VEC])
{
    constexpr int MAX = streams<N>::MAX;
    struct packed dy[MAX] = {};
    if (a.dy.data != NULL)
        UNROLLED (i, n)
            dy[i] = load_packed<T, VEC>(at<T>(a.dy, row) + i * a.d + c);
    if constexpr (OPENS) {
        struct packed y[MAX], gw[MAX];
        float u[VEC], agg[VEC] = {}, gain[VEC];
        UNROLLED (i, n)
            y[i] = load_packed<T, VEC>(at<T>(a.y, row) + i * a.d + c);
        UNROLLED (i, n)
            gw[i] = load_packed<T, VEC>(at<T>(a.gw, row - a.first_row) + i * a.d + c);
        load_floats(at<T>(a.dh, row) + c, u);
        load_gain(a.norm, c, gain);
        UNROLLED (i, n) {
            unpack_to<T>(y[i], g[i]);
            UNROLLED (e, VEC)
                agg[e] += pre_of(k, i) * g[i][e];
        }
        UNROLLED (e, VEC)
            agg[e] = k.rstd * (u[e] * gain[e] - agg[e] * k.m); /* da */
        UNROLLED (i, n) {
            float v[VEC], w[VEC];
            unpack_to<T>(dy[i], v);
            unpack_to<T>(gw[i], w);
            UNROLLED (e, VEC)
                g[i][e] = v[e] + pre_of(k, i) * agg[e] + w[e] + k.scale * g[i][e];
        }
    } else {
        UNROLLED (i, n)
            unpack_to<T>(dy[i], g[i]);
    }
}

template <typename T, int N, int VEC, bool OPENS, bool CLOSES, bool DROP>
static __global__ void __launch_bounds__(MHC_THREADS, N > 0 ? 2 : 1)
    mix_bwd_rows(const __grid_constant__ struct mix_bwd_args a)
{
    constexpr int MAX = streams<N>::MAX, GROUP = N > 0 ? 16 : 2, SUMS = CLOSES ? MAX * MAX + MAX : 1;
    /* [0, n n): <g_i, x_j>; [n n, n n + n): <dropped g_i, f> */
    __shared__ float sums[GROUP][WARPS][SUMS];
    DYNAMIC_SHARED(float, here, 16);
    float *dbias = a.dbias != NULL && a.sums_here ? here : a.dbias + blockIdx.x * a.d;
    int n = streams<N>::count(a.rule.n), warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t first = a.first_row + blockIdx.x * a.rows_per_block, end = min(first + a.rows_per_block, a.rows);
    for (int64_t start = first; start < end; start += GROUP) {
        int count = (int)min(end - start, (int64_t)GROUP);
        for (int r = 0; r < count; r++) {
            int64_t row = start + r;
            struct row_coef<N> k = row_coef_of<N, OPENS, CLOSES>(a, row);
            struct draw_place drop = {};
            if (DROP)
                drop = drop_row_of(a.drop, row);
            T *dx = at<T>(a.dx, row);
            float with_x[MAX * MAX] = {}, with_f[MAX] = {};
            for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
                float g[MAX][VEC];
                stream_gradient<T, N, VEC, OPENS>(a, k, row, c, n, g);
                if constexpr (!CLOSES) {
                    UNROLLED (i, n)
                        store_floats(dx + i * a.d + c, g[i]);
                    continue;
                }
                struct packed x[MAX];
                float f[VEC], df[VEC] = {};
                UNROLLED (j, n)
                    x[j] = load_packed<T, VEC>(at<T>(a.x, row) + j * a.d + c);
                load_floats(at<T>(a.f, row) + c, f);
                if (a.bias != NULL) {
                    float bias[VEC];
                    load_floats(a.bias + c, bias);
                    UNROLLED (e, VEC)
                        f[e] += bias[e];
                }
                UNROLLED (i, n) {
                    float factor[VEC], post = post_of<N, !OPENS>(k, i);
                    if (DROP)
                        drop_factors(a.drop, drop, i * a.d + c, factor);
                    UNROLLED (e, VEC) {
                        float dropped = DROP ? g[i][e] * factor[e] : g[i][e];
                        df[e] += post * dropped;
                        with_f[i] += dropped * f[e];
                    }
                }
                UNROLLED (j, n) {
                    float v[VEC], out[VEC] = {}, by[MAX];
                    unpack_to<T>(x[j], v);
                    UNROLLED (i, n)
                        by[i] = mix_of<N, !OPENS>(k, a.rule.profile_d, n, i, j);
                    UNROLLED (i, n)
                        UNROLLED (e, VEC) {
                            with_x[i * n + j] += g[i][e] * v[e];
                            out[e] += by[i] * g[i][e];
                        }
                    store_floats(dx + j * a.d + c, out);
                }
                store_floats(at<T>(a.df, row) + c, df);
                if (a.dbias != NULL)
                    add_partial(dbias + c, row == first, df);
            }
            if constexpr (CLOSES && N > 0) {
                leave_sums<MAX * MAX>(with_x, sums[r][warp]);
                leave_sums<MAX>(with_f, sums[r][warp] + MAX * MAX);
            } else if constexpr (CLOSES) {
                for (int i = 0; i < n * n; i++)
                    leave_warp_sum(with_x[i], &sums[r][warp][i]);
                for (int i = 0; i < n; i++)
                    leave_warp_sum(with_f[i], &sums[r][warp][n * n + i]);
            }
        }
        if constexpr (CLOSES) {
            __syncthreads();
            for (int t = (int)threadIdx.x; t < count * (n * n + n); t += (int)blockDim.x) {
                int r = t / (n * n + n), s = t % (n * n + n);
                int64_t row = start + r;
                float sum = 0;
                for (int w = 0; w < warps; w++)
                    sum += sums[r][w][s];
                if (s < n * n) {
                    at<float>(a.dres, row)[mix_at(a.rule.profile_d, n, s / n, s % n)] = sum;
                } else {
                    at<float>(a.dpost, row)[s - n * n] = sum;
                    if (a.dpre.data != NULL)
                        at<float>(a.dpre, row)[s - n * n] = 0;
                }
            }
            __syncthreads();
        }
    }
    if (CLOSES && a.dbias != NULL && a.sums_here)
        /* what this thread has summed */
        for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
            float sum[VEC];
            load_floats(here + c, sum);
            store_floats(a.dbias + blockIdx.x * a.d + c, sum);
        }
}

/* Combine alone: small blocks, so that one loads while another has its sums to finish (128 threads instead of 256: 5 %
 * less time at 7168 channels, 9 % at 2048), and few rows to a block where nothing is summed over rows. */
static unsigned combine_threads(int64_t d, int vec) { return (unsigned)min_i64(128, mhc_threads(d, vec)); }
static int64_t combine_rows_per_block(int64_t rows, int64_t d, enum dtype real, bool dbias)
{
    if (!dbias)
        return max_i64(2, min_i64(16, 8192 / max_i64(d, 1)));
    return max_i64(ceil_div(rows, 512 * MHC_THREADS / (int64_t)combine_threads(d, 16 / (int)dtype_bytes(real))), 4);
}
enum { MOST_SUMS_HERE = 32 << 10 }; /* bytes: four blocks have room */

template <typename T, int N, int VEC> static int launch_mix_bwd(struct lane *l, const struct mix_bwd_args *a)
{
    unsigned grid = (unsigned)ceil_div(a->rows - a->first_row, a->rows_per_block),
             threads = a->opens ? mhc_threads(a->d, VEC) : combine_threads(a->d, VEC);
    unsigned room = a->sums_here ? (unsigned)(a->d * (int64_t)sizeof(float)) : 0;
    bool drop = a->drop.info != NULL;
    if (!a->closes)
        LAUNCH(l, (mix_bwd_rows<T, N, VEC, true, false, false>), grid, threads, 0, *a);
    else if (a->opens && drop)
        LAUNCH(l, (mix_bwd_rows<T, N, VEC, true, true, true>), grid, threads, room, *a);
    else if (a->opens)
        LAUNCH(l, (mix_bwd_rows<T, N, VEC, true, true, false>), grid, threads, room, *a);
    else if (drop)
        LAUNCH(l, (mix_bwd_rows<T, N, VEC, false, true, true>), grid, threads, room, *a);
    else
        LAUNCH(l, (mix_bwd_rows<T, N, VEC, false, true, false>), grid, threads, room, *a);
    return ST_OK;
}

int mhc_mix_bwd_rows(struct lane *l, const struct mix_bwd_args *a, enum dtype real, bool aligned)
{
    MHC_DISPATCH(real, a->rule.n, aligned && whole_vectors(a->d, real), T, N, VEC,
                 return (launch_mix_bwd<T, N, VEC>(l, a)));
}

/* ---- the primitive --------------------------------------------------------------------------- */

/* Rows of partial sums for dbias. */
static int64_t combine_blocks(int64_t rows, int64_t d, enum dtype real)
{
    return ceil_div(rows, combine_rows_per_block(rows, d, real, true));
}

extern "C" int64_t mhc_combine_bwd_work_cuda(const struct mhc_combine_bwd_args *a)
{
    int64_t d = a->df.dim[1];
    return a->dbias.rank == 0 ? 0 : combine_blocks(a->dx.dim[0], d, a->dx.dtype) * d * (int64_t)sizeof(float);
}

extern "C" int mhc_combine_bwd_cuda(struct lane *l, const struct mhc_combine_bwd_args *c)
{
    TRY(mhc_combine_bwd_check(c, l->err));
    TRY(check_work("mhc_combine_bwd", &c->work, mhc_combine_bwd_work_cuda(c), l->err));
    struct mix_bwd_args a = {.dy = view_of(&c->dy),
                             .dx = view_of(&c->dx),
                             .x = view_of(&c->x),
                             .f = view_of(&c->f),
                             .df = view_of(&c->df),
                             .post = view_of(&c->post),
                             .res = view_of(&c->res),
                             .dpre = view_of(&c->dpre),
                             .dpost = view_of(&c->dpost),
                             .dres = view_of(&c->dres),
                             .bias = floats(&c->bias),
                             .dbias = present(&c->dbias) ? floats(&c->work) : NULL,
                             .rows = c->dx.dim[0],
                             .d = c->df.dim[1],
                             .rule = rule_of(c->rule),
                             .closes = true,
                             .drop = drop_rule_of(&c->drop)};
    a.rows_per_block = combine_rows_per_block(a.rows, a.d, c->dx.dtype, a.dbias != NULL);
    a.sums_here = a.dbias != NULL && a.d * (int64_t)sizeof(float) <= MOST_SUMS_HERE;
    TRY(mhc_mix_bwd_rows(l, &a, c->dx.dtype,
                         aligned16(&c->dy) && aligned16(&c->dx) && aligned16(&c->x) && aligned16(&c->f) &&
                             aligned16(&c->df) && pointer16(a.bias) && pointer16(a.dbias)));
    return a.dbias == NULL ? ST_OK
                           : add_partials(l, a.dbias, combine_blocks(a.rows, a.d, c->dx.dtype), a.d, floats(&c->dbias),
                                          a.d, 0, c->acc_dbias);
}
