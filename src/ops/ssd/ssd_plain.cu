/* ssd, CUDA, any shape: what the tensor-core path does not take (fp32 storage, few rows, wide heads or states). The
 * same formulas by pieces, one thread or warp per sum, everything between the kernels in fp32; see ssd_cuda.cuh. */
#include "ops/ssd/ssd_cuda.cuh"
#include "ops/ssd/ssd.h"

enum { THREADS = 256, WARPS = THREADS / 32, ROWS = SSD_PLAIN_ROWS, SQUARE = ROWS * (ROWS + 1) };

struct plain {
    struct ssd_shape s;
    struct ssd_rows r;
    struct rows_view x, bm, cm, dy; /* real */
    const float *A_log, *d;
    struct state_view states, e; /* fp32, by piece: before it; the gradient of the state after it */
};

/* ---- the running state: a thread owns one element -------------------------------------------- */

struct element {
    int b, h, n, p;
};
__device__ __forceinline__ bool element_of(const struct ssd_shape &s, struct element *e)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, size = (int64_t)s.n * s.p;
    e->p = (int)(at % s.p);
    e->n = (int)(at / s.p % s.n);
    e->h = (int)(at / size % s.heads);
    e->b = (int)(at / size / s.heads);
    return at < size * s.heads * s.batch;
}
static dim3 element_grid(const struct ssd_shape *s)
{
    return dim3((unsigned)ceil_div((int64_t)s->batch * s->heads * s->n * s->p, THREADS));
}
template <typename T>
__device__ __forceinline__ T *element_at(const struct state_view &v, const struct element &e, int u)
{
    return state_of<T>(v, e.b, u, e.h) + e.n * v.row + e.p;
}

/* given and by_chunk are real, by chunk; first and last fp32. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    plain_scan(const __grid_constant__ struct plain a, struct state_view first, const int64_t *start,
               struct state_view given, struct state_view by_chunk, struct state_view last)
{
    struct element e;
    if (!element_of(a.s, &e))
        return;
    int g = e.h / a.s.per_group;
    float state = first.data != NULL && !(start != NULL && *start == 0) ? *element_at<float>(first, e, 0) : 0.0f;
    float rate = -expf(a.A_log[e.h]);
    for (int u = 0; u < a.s.pieces; u++) {
        struct span sp = span_of(a.s, u);
        int c = u / a.s.per_chunk;
        bool opens = u % a.s.per_chunk == 0;
        if (given.data != NULL && opens)
            state = to_float(*element_at<T>(given, e, c));
        *element_at<float>(a.states, e, u) = state;
        if (by_chunk.data != NULL && opens)
            *element_at<T>(by_chunk, e, c) = from_float<T>(state);
        const float *delta = a.r.delta + rows_at(a.s, e.b, u, e.h);
        const int *low = a.r.low + ((int64_t)e.b * a.s.pieces + u) * a.s.pad;
        for (int i = 0; i < sp.n; i++) {
            float in = delta[i] * to_float(row_of<T>(a.bm, e.b, sp.first + i, g)[e.n]) *
                       to_float(row_of<T>(a.x, e.b, sp.first + i, e.h)[e.p]);
            state = (low[i] == i ? 0.0f : expf(delta[i] * rate) * state) + in;
        }
    }
    if (last.data != NULL)
        *element_at<float>(last, e, 0) = state;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    plain_scan_reverse(const __grid_constant__ struct plain a, struct state_view first, struct state_view last)
{
    struct element e;
    if (!element_of(a.s, &e))
        return;
    int g = e.h / a.s.per_group;
    float grad = first.data != NULL ? *element_at<float>(first, e, 0) : 0.0f, rate = -expf(a.A_log[e.h]);
    for (int u = a.s.pieces - 1; u >= 0; u--) {
        struct span sp = span_of(a.s, u);
        *element_at<float>(a.e, e, u) = grad;
        const float *delta = a.r.delta + rows_at(a.s, e.b, u, e.h);
        const int *low = a.r.low + ((int64_t)e.b * a.s.pieces + u) * a.s.pad;
        for (int i = sp.n - 1; i >= 0; i--) {
            grad += to_float(row_of<T>(a.cm, e.b, sp.first + i, g)[e.n]) *
                    to_float(row_of<T>(a.dy, e.b, sp.first + i, e.h)[e.p]);
            grad = low[i] == i ? 0.0f : expf(delta[i] * rate) * grad;
        }
    }
    if (last.data != NULL)
        *element_at<float>(last, e, 0) = grad;
}

/* ---- what a block knows of its piece and head ------------------------------------------------ */

struct place {
    int b, u, h, g;
    struct span sp;
    int64_t at; /* of the per-row numbers */
    const int *low;
};
__device__ __forceinline__ struct place place_of(const struct plain &a)
{
    struct place k;
    int piece = blockIdx.x / a.s.heads;
    k.h = blockIdx.x % a.s.heads;
    k.g = k.h / a.s.per_group;
    k.b = piece / a.s.pieces;
    k.u = piece % a.s.pieces;
    k.sp = span_of(a.s, k.u);
    k.at = rows_at(a.s, k.b, k.u, k.h);
    k.low = a.r.low + (int64_t)piece * a.s.pad;
    return k;
}
template <typename T> __device__ __forceinline__ float dot(const T *x, const T *y, int n)
{
    float sum = 0;
    for (int k = 0; k < n; k++)
        sum += to_float(x[k]) * to_float(y[k]);
    return sum;
}
__device__ __forceinline__ float decay_between(const struct plain &a, const struct place &k, int i, int j)
{
    return expf((float)(a.r.s_exact[k.at + i] - a.r.s_exact[k.at + j]));
}
/* sum_n v[n] state[n][p] */
template <typename T>
__device__ __forceinline__ float through_state(const T *v, const float *state, int64_t row, int n, int p)
{
    float sum = 0;
    for (int k = 0; k < n; k++)
        sum += to_float(v[k]) * state[k * row + p];
    return sum;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS) plain_out(const __grid_constant__ struct plain a, struct rows_view y)
{
    __shared__ float m[SQUARE];
    struct place k = place_of(a);
    int rows = k.sp.n, first = k.sp.first;
    for (int at = threadIdx.x; at < rows * rows; at += THREADS) {
        int i = at / rows, j = at % rows;
        bool sees = j <= i && j >= k.low[i];
        m[i * (ROWS + 1) + j] =
            sees ? dot(row_of<T>(a.cm, k.b, first + i, k.g), row_of<T>(a.bm, k.b, first + j, k.g), a.s.n) *
                       decay_between(a, k, i, j) * a.r.delta[k.at + j]
                 : 0.0f;
    }
    __syncthreads();
    const float *state = state_of<float>(a.states, k.b, k.u, k.h);
    float d = a.d != NULL ? a.d[k.h] : 0.0f;
    for (int at = threadIdx.x; at < rows * a.s.p; at += THREADS) {
        int i = at / a.s.p, p = at % a.s.p;
        float sum = d * to_float(row_of<T>(a.x, k.b, first + i, k.h)[p]);
        sum += a.r.from_start[k.at + i] *
               through_state(row_of<T>(a.cm, k.b, first + i, k.g), state, a.states.row, a.s.n, p);
        for (int j = 0; j <= i; j++)
            sum += m[i * (ROWS + 1) + j] * to_float(row_of<T>(a.x, k.b, first + j, k.h)[p]);
        row_of<T>(y, k.b, first + i, k.h)[p] = from_float<T>(sum);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

struct plain_grads {
    struct rows_view dx, ddt;
    float *db, *dc; /* [batch, rows, heads, N] */
    struct ssd_sums sums;
};
/* L_ij = e^(s_i - s_j), G_ij = C_i . B_j, M_ij = dy_i . x_j. */
struct plain_shared {
    float gl[SQUARE], dg[SQUARE], pair[SQUARE]; /* G L; L delta M; G L delta M */
    float wx[ROWS], inject[ROWS], pass[ROWS], dd[ROWS], scratch[WARPS];
    double da[ROWS];
};

template <typename T> __device__ void squares(const struct plain &a, const struct place &k, struct plain_shared *sh)
{
    int rows = k.sp.n, first = k.sp.first;
    for (int at = threadIdx.x; at < rows * rows; at += THREADS) {
        int i = at / rows, j = at % rows, to = i * (ROWS + 1) + j;
        float g = 0, gl = 0, dg = 0;
        if (j <= i && j >= k.low[i]) {
            float l = decay_between(a, k, i, j);
            g = dot(row_of<T>(a.cm, k.b, first + i, k.g), row_of<T>(a.bm, k.b, first + j, k.g), a.s.n);
            gl = g * l;
            dg = l * a.r.delta[k.at + j] *
                 dot(row_of<T>(a.dy, k.b, first + i, k.h), row_of<T>(a.x, k.b, first + j, k.h), a.s.p);
        }
        sh->gl[to] = gl;
        sh->dg[to] = dg;
        sh->pair[to] = g * dg;
    }
}

/* dx of row j, and its scalar products. */
template <typename T>
__device__ void row_inputs(const struct plain &a, const struct place &k, struct plain_shared *sh,
                           const struct rows_view &out, int j)
{
    int lane = threadIdx.x % 32, rows = k.sp.n, first = k.sp.first;
    const T *x = row_of<T>(a.x, k.b, first + j, k.h), *dy = row_of<T>(a.dy, k.b, first + j, k.h),
            *bm = row_of<T>(a.bm, k.b, first + j, k.g);
    T *dx = row_of<T>(out, k.b, first + j, k.h);
    const float *e = state_of<float>(a.e, k.b, k.u, k.h);
    float delta = a.r.delta[k.at + j], to_end = a.r.to_end[k.at + j], d = a.d != NULL ? a.d[k.h] : 0.0f;
    float wx = 0, inject = 0, dd = 0;
    for (int p = lane; p < a.s.p; p += 32) {
        float leaving = to_end * through_state(bm, e, a.e.row, a.s.n, p), w = leaving, xp = to_float(x[p]),
              dyp = to_float(dy[p]);
        for (int i = j; i < rows; i++)
            w += sh->gl[i * (ROWS + 1) + j] * to_float(row_of<T>(a.dy, k.b, first + i, k.h)[p]);
        wx += w * xp;
        inject += leaving * xp;
        dd += dyp * xp;
        dx[p] = from_float<T>(delta * w + d * dyp);
    }
    wx = warp_sum(wx);
    inject = warp_sum(inject);
    dd = warp_sum(dd);
    if (lane == 0) {
        sh->wx[j] = wx;
        sh->inject[j] = delta * inject;
        sh->dd[j] = dd;
    }
}

/* This head's part of dB and dC of row j. */
template <typename T>
__device__ void row_groups(const struct plain &a, const struct place &k, struct plain_shared *sh,
                           const struct plain_grads &out, int j)
{
    int lane = threadIdx.x % 32, rows = k.sp.n, first = k.sp.first;
    const T *x = row_of<T>(a.x, k.b, first + j, k.h), *dy = row_of<T>(a.dy, k.b, first + j, k.h),
            *cm = row_of<T>(a.cm, k.b, first + j, k.g);
    const float *e = state_of<float>(a.e, k.b, k.u, k.h), *state = state_of<float>(a.states, k.b, k.u, k.h);
    float put = a.r.delta[k.at + j] * a.r.to_end[k.at + j], see = a.r.from_start[k.at + j], pass = 0;
    int64_t to = (((int64_t)k.b * a.s.rows + first + j) * a.s.heads + k.h) * a.s.n;
    for (int n = lane; n < a.s.n; n += 32) {
        float db = 0, dc = 0;
        for (int p = 0; p < a.s.p; p++) {
            db += to_float(x[p]) * e[n * a.e.row + p];
            dc += to_float(dy[p]) * state[n * a.states.row + p];
        }
        db *= put;
        dc *= see;
        pass += dc * to_float(cm[n]);
        for (int i = j; i < rows; i++)
            db += sh->dg[i * (ROWS + 1) + j] * to_float(row_of<T>(a.cm, k.b, first + i, k.g)[n]);
        for (int i = 0; i <= j; i++)
            dc += sh->dg[j * (ROWS + 1) + i] * to_float(row_of<T>(a.bm, k.b, first + i, k.g)[n]);
        out.db[to + n] = db;
        out.dc[to + n] = dc;
    }
    pass = warp_sum(pass);
    if (lane == 0)
        sh->pass[j] = pass;
}

/* da_k = sum_(i>=k, j<k) pair_ij + sum_(i>=k) pass_i + sum_(j<k) inject_j + through; then the gradients of dt and of
 * the head's scalars. The first sum is a running one over rows minus columns. */
template <typename T>
__device__ void step_gradients(const struct plain &a, const struct place &k, struct plain_shared *sh,
                               const struct plain_grads &out, float through)
{
    int rows = k.sp.n;
    double later = 0, earlier = 0, d_rate = 0, d_bias = 0, d_skip = 0, rate = -(double)expf(a.A_log[k.h]);
    for (int i = rows - 1; i >= 0; i--)
        sh->da[i] = later += sh->da[i] + (double)sh->pass[i];
    for (int i = 0; i < rows; i++) {
        double da = k.low[i] == i ? 0.0 : sh->da[i] + earlier + (double)through;
        double d = ((double)sh->wx[i] + rate * da) * (double)a.r.slope[k.at + i];
        earlier += (double)sh->inject[i];
        row_of<T>(out.ddt, k.b, k.sp.first + i, 0)[k.h] = from_float<T>((float)d);
        d_bias += d;
        d_rate += da * (double)a.r.delta[k.at + i];
        d_skip += (double)sh->dd[i];
    }
    int64_t to = ((int64_t)k.b * a.s.pieces + k.u) * a.s.heads + k.h;
    out.sums.a_log[to] = (float)(rate * d_rate);
    out.sums.dt_bias[to] = (float)d_bias;
    out.sums.d[to] = (float)d_skip;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    plain_bwd(const __grid_constant__ struct plain a, const __grid_constant__ struct plain_grads out)
{
    DYNAMIC_SHARED(char, shared, 16);
    struct plain_shared *sh = (struct plain_shared *)shared;
    struct place k = place_of(a);
    int rows = k.sp.n;
    squares<T>(a, k, sh);
    __syncthreads();
    for (int j = threadIdx.x / 32; j < rows; j += WARPS) {
        row_inputs<T>(a, k, sh, out.dx, j);
        row_groups<T>(a, k, sh, out, j);
    }
    float through = 0;
    const float *e = state_of<float>(a.e, k.b, k.u, k.h), *state = state_of<float>(a.states, k.b, k.u, k.h);
    for (int at = threadIdx.x; at < a.s.n * a.s.p; at += THREADS)
        through += e[at / a.s.p * a.e.row + at % a.s.p] * state[at / a.s.p * a.states.row + at % a.s.p];
    through = block_sum<THREADS>(through, sh->scratch) * a.r.decay[k.at / a.s.pad];
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        double sum = 0;
        for (int j = 0; j < i; j++)
            sum += (double)sh->pair[i * (ROWS + 1) + j];
        for (int j = i + 1; j < rows; j++)
            sum -= (double)sh->pair[j * (ROWS + 1) + i];
        sh->da[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        step_gradients<T>(a, k, sh, out, through);
}

/* Sums the heads of a group: blocks of SSD_HEADS, then the blocks. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    plain_group(struct ssd_shape s, const float *part_of, struct rows_view out)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (int64_t)s.batch * s.rows * s.groups * s.n)
        return;
    int n = (int)(at % s.n), g = (int)(at / s.n % s.groups);
    int64_t row = at / s.n / s.groups;
    float sum = 0;
    for (int h0 = 0; h0 < s.per_group; h0 += SSD_HEADS) {
        float block = 0;
        for (int h = h0; h < min(h0 + SSD_HEADS, s.per_group); h++)
            block += part_of[(row * s.heads + g * s.per_group + h) * s.n + n];
        sum += block;
    }
    row_of<T>(out, (int)(row / s.rows), (int)(row % s.rows), g)[n] = from_float<T>(sum);
}

/* ---- launchers ------------------------------------------------------------------------------- */

static float *take_states(struct parts *at, const struct ssd_shape *s)
{
    return (float *)part(at, (int64_t)s->batch * s->pieces * s->heads * s->n * s->p * (int64_t)sizeof(float));
}

static struct plain plain_fwd_of(struct parts *at, const struct ssd_fwd_args *a)
{
    struct plain k = {};
    k.s = ssd_shape_of(&a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, ROWS);
    k.r = ssd_rows_take(at, &k.s, true);
    k.x = rows_view_of(&a->x);
    k.bm = rows_view_of(&a->Bm);
    k.cm = rows_view_of(&a->Cm);
    k.A_log = (const float *)a->A_log.data;
    k.d = (const float *)a->D.data;
    k.states = pieces_view(take_states(at, &k.s), &k.s, k.s.p);
    return k;
}

int64_t ssd_plain_fwd_work(const struct ssd_fwd_args *a)
{
    struct parts at = {NULL, 0};
    plain_fwd_of(&at, a);
    return at.used;
}

int ssd_plain_fwd(struct lane *l, const struct ssd_fwd_args *a)
{
    struct parts at = {(char *)a->work.data, 0};
    struct plain k = plain_fwd_of(&at, a);
    struct ssd_inputs in = {&a->dt, &a->A_log, &a->dt_bias, &a->doc_start};
    struct state_view none = {};
    TRY(ssd_prep(l, &k.s, &in, &k.r));
    BY_REAL(a->x.dtype, T, {
        LAUNCH(l, plain_scan<T>, element_grid(&k.s), THREADS, 0, k, state_view_of(&a->init),
               (const int64_t *)a->start.data, none, state_view_of(&a->states), state_view_of(&a->final));
        LAUNCH(l, plain_out<T>, dim3((unsigned)(k.s.batch * k.s.pieces * k.s.heads)), THREADS, 0, k,
               rows_view_of(&a->y));
    });
    return ST_OK;
}

static struct plain plain_bwd_of(struct parts *at, const struct ssd_bwd_args *a, struct plain_grads *out)
{
    struct plain k = {};
    k.s = ssd_shape_of(&a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, ROWS);
    k.r = ssd_rows_take(at, &k.s, true);
    k.x = rows_view_of(&a->x);
    k.bm = rows_view_of(&a->Bm);
    k.cm = rows_view_of(&a->Cm);
    k.dy = rows_view_of(&a->dy);
    k.A_log = (const float *)a->A_log.data;
    k.d = (const float *)a->D.data;
    k.states = pieces_view(take_states(at, &k.s), &k.s, k.s.p);
    k.e = pieces_view(take_states(at, &k.s), &k.s, k.s.p);
    int64_t bytes = (int64_t)k.s.batch * k.s.rows * k.s.heads * k.s.n * (int64_t)sizeof(float);
    out->dx = rows_view_of(&a->dx);
    out->ddt = rows_view_of(&a->ddt);
    out->db = (float *)part(at, bytes);
    out->dc = (float *)part(at, bytes);
    out->sums = ssd_sums_take(at, &k.s);
    return k;
}

int64_t ssd_plain_bwd_work(const struct ssd_bwd_args *a)
{
    struct parts at = {NULL, 0};
    struct plain_grads out;
    plain_bwd_of(&at, a, &out);
    return at.used;
}

int ssd_plain_bwd(struct lane *l, const struct ssd_bwd_args *a)
{
    struct parts at = {(char *)a->work.data, 0};
    struct plain_grads out;
    struct plain k = plain_bwd_of(&at, a, &out);
    struct ssd_inputs in = {&a->dt, &a->A_log, &a->dt_bias, &a->doc_start};
    struct state_view none = {};
    int64_t groups = (int64_t)k.s.batch * k.s.rows * k.s.groups * k.s.n;
    dim3 sums((unsigned)ceil_div(groups, THREADS));
    TRY(ssd_prep(l, &k.s, &in, &k.r));
    BY_REAL(a->x.dtype, T, {
        LAUNCH(l, plain_scan<T>, element_grid(&k.s), THREADS, 0, k, none, nullptr, state_view_of(&a->states), none,
               none);
        LAUNCH(l, plain_scan_reverse<T>, element_grid(&k.s), THREADS, 0, k, state_view_of(&a->dfinal),
               state_view_of(&a->dinit));
        NEEDS_SMEM(l, plain_bwd<T>, sizeof(struct plain_shared));
        LAUNCH(l, plain_bwd<T>, dim3((unsigned)(k.s.batch * k.s.pieces * k.s.heads)), THREADS,
               sizeof(struct plain_shared), k, out);
        LAUNCH(l, plain_group<T>, sums, THREADS, 0, k.s, out.db, rows_view_of(&a->dBm));
        LAUNCH(l, plain_group<T>, sums, THREADS, 0, k.s, out.dc, rows_view_of(&a->dCm));
    });
    return ssd_add_sums(l, &k.s, &out.sums, a);
}
