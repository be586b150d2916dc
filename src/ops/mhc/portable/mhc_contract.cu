/* n streams to one: the mean, or profile D's learned gates; see mhc.h. The gates need n products of length K per row: a
 * block takes a few rows at once, so that the matrix is read from the cache less often. */
#include "ops/mhc/portable/mhc_cuda.cuh"

template <int N> struct tile {
    static constexpr int ROWS = N > 0 ? 4 : 1; /* rows a block takes */
};

/* ---- forward --------------------------------------------------------------------------------- */

struct gate_args {
    struct view x, w, m, rstd;
    int64_t rows, d;
    int n;
    float eps;
};

/* m and rstd of ROWS rows. */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) gate_rows(const __grid_constant__ struct gate_args a)
{
    constexpr int ROWS = tile<N>::ROWS, MAX = streams<N>::MAX, SUMS = ROWS * (MAX + 1);
    __shared__ float sums[MHC_THREADS / 32][SUMS];
    int n = streams<N>::count(a.n), warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    int64_t first = (int64_t)blockIdx.x * ROWS, k = n * a.d;
    float with_w[ROWS][MAX] = {}, square[ROWS] = {};
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < k; c += (int64_t)blockDim.x * VEC) {
        float x[ROWS][VEC] = {};
        UNROLLED (r, ROWS)
            if (first + r < a.rows)
                load_floats(at<T>(a.x, first + r) + c, x[r]);
        UNROLLED (r, ROWS)
            UNROLLED (e, VEC)
                square[r] += x[r][e] * x[r][e];
        UNROLLED (i, n) {
            float w[VEC];
            load_floats(at<float>(a.w, i) + c, w);
            UNROLLED (r, ROWS)
                UNROLLED (e, VEC)
                    with_w[r][i] += x[r][e] * w[e];
        }
    }
    UNROLLED (r, ROWS) {
        for (int i = 0; i < n; i++)
            leave_warp_sum(with_w[r][i], &sums[warp][r * (MAX + 1) + i]);
        leave_warp_sum(square[r], &sums[warp][r * (MAX + 1) + MAX]);
    }
    __syncthreads();
    for (int t = (int)threadIdx.x; t < SUMS; t += (int)blockDim.x) {
        int64_t row = first + t / (MAX + 1);
        int i = t % (MAX + 1);
        float sum = 0;
        if (row >= a.rows || (i >= n && i < MAX))
            continue;
        for (int w = 0; w < warps; w++)
            sum += sums[w][t];
        if (i < n)
            at<float>(a.m, row)[i] = sum;
        else
            *at<float>(a.rstd, row) = 1.0f / sqrtf(sum / (float)max(k, (int64_t)1) + a.eps);
    }
}

int mhc_contract_gates(struct lane *l, const struct mhc_contract_fwd_args *c)
{
    struct gate_args g = {view_of(&c->x), view_of(&c->w), view_of(&c->m),   view_of(&c->rstd),
                          c->x.dim[0],    c->y.dim[1],    (int)c->w.dim[0], (float)c->eps};
    enum dtype real = c->x.dtype;
    MHC_DISPATCH(real, g.n, aligned16(&c->x) && aligned16(&c->w) && whole_vectors(g.d, real), T, N, VEC,
                 LAUNCH(l, (gate_rows<T, N, VEC>), (unsigned)ceil_div(g.rows, tile<N>::ROWS),
                        mhc_threads(g.n * g.d, VEC), 0, g));
    return ST_OK;
}

extern "C" int mhc_contract_fwd_cuda(struct lane *l, const struct mhc_contract_fwd_args *c)
{
    TRY(mhc_contract_fwd_check(c, l->err));
    if (!present(&c->w))
        return mhc_mean(l, &c->x, &c->y);
    TRY(mhc_contract_gates(l, c));
    struct aggregate_args a = {.x = view_of(&c->x),
                               .out = view_of(&c->y),
                               .weight = {.m = view_of(&c->m),
                                          .rstd = view_of(&c->rstd),
                                          .scale = floats(&c->scale),
                                          .base = floats(&c->base),
                                          .eps = (float)c->eps},
                               .rows = c->x.dim[0],
                               .d = c->y.dim[1],
                               .n = (int)c->w.dim[0]};
    return mhc_aggregate_rows(l, &a, c->x.dtype, aligned16(&c->x) && aligned16(&c->y));
}

/* ---- backward -------------------------------------------------------------------------------- */

struct contract_bwd {
    struct view dy, x, w, dx, m, rstd;
    const float *scale, *base;
    float *dgate;   /* [rows, n], then the gradient dv of what the sigmoid takes */
    float *dm;      /* [rows, n] */
    float *through; /* [rows]: the factor of x, through rstd */
    float *partial; /* [blocks, 2 n]: sums of dv and of dv m rstd over rows */
    float *dbase, *dscale;
    int64_t rows, rows_per_block, d;
    int n;
    float eps;
    bool acc_dx, acc_params;
};

/* A thread per row, from dgate = <dy, x_i>. */
static __global__ void gate_gradients(const __grid_constant__ struct contract_bwd a)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows)
        return;
    const float *m = at<float>(a.m, row);
    float rstd = *at<float>(a.rstd, row), scale = *a.scale, drstd = 0;
    for (int i = 0; i < a.n; i++) {
        float s = precise_sigmoid(m[i] * rstd * scale + a.base[i]), dv = a.dgate[row * a.n + i] * s * (1 - s);
        a.dgate[row * a.n + i] = dv;
        a.dm[row * a.n + i] = dv * scale * rstd;
        drstd += dv * scale * m[i];
    }
    a.through[row] = -drstd * rstd * rstd * rstd / (float)max(a.n * a.d, (int64_t)1);
}

/* Thread i < 2 n of a block: one sum over the block's rows, in order. */
static __global__ void gate_sums(const __grid_constant__ struct contract_bwd a)
{
    int t = (int)threadIdx.x, i = t % a.n;
    int64_t first = blockIdx.x * a.rows_per_block, end = min(first + a.rows_per_block, a.rows);
    if (t >= 2 * a.n)
        return;
    float sum = 0;
    for (int64_t row = first; row < end; row++)
        sum += a.dgate[row * a.n + i] * (t < a.n ? 1.0f : at<float>(a.m, row)[i] * *at<float>(a.rstd, row));
    a.partial[(int64_t)blockIdx.x * 2 * a.n + t] = sum;
}
static __global__ void gate_totals(const __grid_constant__ struct contract_bwd a, int64_t blocks)
{
    __shared__ double totals[2 * MHC_MAX_STREAMS];
    int t = (int)threadIdx.x;
    if (t < 2 * a.n) {
        double sum = 0;
        for (int64_t b = 0; b < blocks; b++)
            sum += (double)a.partial[b * 2 * a.n + t];
        totals[t] = sum;
        if (t < a.n)
            a.dbase[t] = (a.acc_params ? a.dbase[t] : 0.0f) + (float)sum;
    }
    __syncthreads();
    if (t == 0) {
        double sum = 0;
        for (int i = 0; i < a.n; i++)
            sum += totals[a.n + i];
        *a.dscale = (a.acc_params ? *a.dscale : 0.0f) + (float)sum;
    }
}

/* dx_i (+)= gate_i dy + sum_k dm_k w_k + through x_i */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) contract_dx(const __grid_constant__ struct contract_bwd a)
{
    constexpr int ROWS = tile<N>::ROWS, MAX = streams<N>::MAX;
    __shared__ float gate[ROWS][MAX], dm[ROWS][MAX];
    int n = streams<N>::count(a.n);
    int64_t first = (int64_t)blockIdx.x * ROWS, k = n * a.d;
    for (int t = (int)threadIdx.x; t < ROWS * n; t += (int)blockDim.x) {
        int64_t row = first + t / n;
        if (row < a.rows) {
            gate[t / n][t % n] =
                precise_sigmoid(at<float>(a.m, row)[t % n] * *at<float>(a.rstd, row) * *a.scale + a.base[t % n]) +
                a.eps;
            dm[t / n][t % n] = a.dm[row * n + t % n];
        }
    }
    __syncthreads();
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < k; c += (int64_t)blockDim.x * VEC) {
        int64_t i = c / a.d, channel = c % a.d;
        float sum[ROWS][VEC] = {};
        UNROLLED (j, n) {
            float w[VEC];
            load_floats(at<float>(a.w, j) + c, w);
            UNROLLED (r, ROWS)
                UNROLLED (e, VEC)
                    sum[r][e] += dm[r][j] * w[e];
        }
        UNROLLED (r, ROWS) {
            int64_t row = first + r;
            if (row >= a.rows)
                break;
            float dy[VEC], x[VEC], old[VEC] = {}, through = a.through[row];
            T *dx = at<T>(a.dx, row) + c;
            load_floats(at<T>(a.dy, row) + channel, dy);
            load_floats(at<T>(a.x, row) + c, x);
            if (a.acc_dx)
                load_floats(dx, old);
            UNROLLED (e, VEC)
                sum[r][e] += old[e] + gate[r][i] * dy[e] + through * x[e];
            store_floats(dx, sum[r]);
        }
    }
}

static int64_t gate_rows_per_block(int64_t rows) { return max_i64(ceil_div(rows, 256), 64); }

/* Sets the parts of the work tensor; returns the bytes of all. */
static int64_t divide_work(struct contract_bwd *a, const struct mhc_contract_bwd_args *c, void **outer)
{
    struct carve v = {(char *)c->work.data, 0};
    int64_t rows = c->dx.dim[0], k = c->dx.dim[1], n = c->w.dim[0];
    a->dgate = carve_floats(&v, rows * n);
    a->dm = carve_floats(&v, rows * n);
    a->through = carve_floats(&v, rows);
    a->partial = carve_floats(&v, ceil_div(rows, gate_rows_per_block(rows)) * 2 * n);
    *outer = carve_bytes(&v, mhc_outer_bytes(rows, n, k, c->dx.dtype));
    return v.used;
}

extern "C" int64_t mhc_contract_bwd_work_cuda(const struct mhc_contract_bwd_args *c)
{
    struct contract_bwd a;
    void *outer;
    return c->w.rank == 0 ? 0 : divide_work(&a, c, &outer);
}

extern "C" int mhc_contract_bwd_cuda(struct lane *l, const struct mhc_contract_bwd_args *c)
{
    TRY(mhc_contract_bwd_check(c, l->err));
    TRY(check_work("mhc_contract_bwd", &c->work, mhc_contract_bwd_work_cuda(c), l->err));
    if (!present(&c->w))
        return mhc_expand_mean(l, &c->dy, &c->dx, c->acc_dx);
    struct contract_bwd a = {.dy = view_of(&c->dy),
                             .x = view_of(&c->x),
                             .w = view_of(&c->w),
                             .dx = view_of(&c->dx),
                             .m = view_of(&c->m),
                             .rstd = view_of(&c->rstd),
                             .scale = floats(&c->scale),
                             .base = floats(&c->base),
                             .dbase = floats(&c->dbase),
                             .dscale = floats(&c->dscale),
                             .rows = c->dx.dim[0],
                             .rows_per_block = gate_rows_per_block(c->dx.dim[0]),
                             .d = c->dy.dim[1],
                             .n = (int)c->w.dim[0],
                             .eps = (float)c->eps,
                             .acc_dx = c->acc_dx,
                             .acc_params = mhc_contract_adds(c)};
    void *outer;
    divide_work(&a, c, &outer);
    int64_t blocks = ceil_div(a.rows, a.rows_per_block);
    enum dtype real = c->dx.dtype;
    TRY(mhc_stream_dots(l, &c->dy, &c->x, a.dgate, a.n));
    LAUNCH(l, gate_gradients, (unsigned)ceil_div(a.rows, 128), 128, 0, a);
    if (present(&c->dw)) {
        LAUNCH(l, gate_sums, (unsigned)blocks, 32, 0, a);
        LAUNCH(l, gate_totals, 1, 32, 0, a, blocks);
        struct outer_args o = {.dp = {a.dm, a.n}, .y = c->x, .dw = c->dw, .acc = mhc_contract_adds(c)};
        TRY(mhc_outer(l, &o, outer));
    }
    bool aligned =
        aligned16(&c->dy) && aligned16(&c->x) && aligned16(&c->dx) && aligned16(&c->w) && whole_vectors(a.d, real);
    MHC_DISPATCH(real, a.n, aligned, T, N, VEC,
                 LAUNCH(l, (contract_dx<T, N, VEC>), (unsigned)ceil_div(a.rows, tile<N>::ROWS),
                        mhc_threads(a.n * a.d, VEC), 0, a));
    return ST_OK;
}
