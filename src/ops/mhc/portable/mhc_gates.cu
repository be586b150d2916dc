/* Gates of 4 streams without the Sinkhorn, and the backward pass, for aligned rows: eight lanes to a row, of which six
 * have four logits each, so that all that is read and written lies side by side.
 *
 * Gradients of alphas and beta are sums over all rows, but the primitive has no scratch for partial ones. They lie in
 * the first rows of dp meanwhile: a first launch leaves them there (GROUP rows for the sums of a block of rows), and in
 * the second the block that owns these rows adds them before it writes dp. */
#include "ops/mhc/portable/mhc_cuda.cuh"

enum {
    N = 4,
    LOGITS = N * (N + 2),
    LANES = 8, /* of a row */
    THREADS = 1024,
    ROWS = THREADS / LANES,
    RUNS = 32, /* rows of a block at once, in the sums */
    SUM_THREADS = LOGITS * RUNS,
    SUMS = 2 * LOGITS, /* of dz by logit, of dz dz/dalpha by logit */
    GROUP = 2,         /* rows of dp that hold as many floats */
    MOST_BLOCKS = 128,
    AT_ONCE = 8,
    RANGES = THREADS / SUMS,
};
static_assert(GROUP * LOGITS == SUMS, "the sums of a block fill their rows");

struct gates_call {
    const float *p, *rho, *alpha[3], *beta;
    struct view pre, post, logits; /* or their gradients; data NULL: zeros */
    int64_t p_stride, rho_stride, rows;
    struct view dp, dz; /* dz may be absent */
    float *drho;
    int64_t drho_stride;
    bool profile_d, round_bf16;
};
struct gates_sums {
    float *dalpha[3], *dbeta;
    int blocks; /* 0: no sums */
    bool add;
};

/* The four values of lane g, of a row of pre, post or logits. */
__device__ __forceinline__ float *four_of(const struct gates_call &a, int g, int64_t row)
{
    const struct view *v = g == 0 ? &a.pre : g == 1 ? &a.post : &a.logits;
    return v->data == NULL ? NULL : at<float>(*v, row) + (g < 2 ? 0 : 4 * (g - 2));
}
__device__ __forceinline__ float alpha_of(const struct gates_call &a, int g)
{
    return *(g == 0 ? a.alpha[0] : g == 1 ? a.alpha[1] : a.alpha[2]);
}

/* ---- forward --------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) gate_rows(const __grid_constant__ struct gates_call a)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
    int g = (int)threadIdx.x % LANES;
    if (row >= a.rows || 4 * g >= LOGITS)
        return;
    float p[4], out[4], rho = a.rho[row * a.rho_stride], by = alpha_of(a, g), scale = g == 1 ? 2.0f : 1.0f,
                        more = g == 0 && a.profile_d ? (float)MHC_EPS : 0.0f;
    load_floats(a.p + row * a.p_stride + 4 * g, p);
    float q = 1.0f / (rho + (float)MHC_EPS);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        /* by all lanes: they would wait for each other */
        float z = q * p[e] * by + a.beta[4 * g + e], sig = maybe_bf16(a.round_bf16, scale * precise_sigmoid(z) + more);
        out[e] = g < 2 ? sig : z;
    }
    store_floats(four_of(a, g, row), out);
}

/* ---- backward: sums over rows, first half ---------------------------------------------------- */

/* Sum i of block b, in dp. */
__device__ __forceinline__ float *sum_at(const struct gates_call &a, int b, int i)
{
    return at<float>(a.dp, (int64_t)b * GROUP + i / LOGITS) + i % LOGITS;
}

/* A thread has a logit and every blocks * RUNS-th row. */
static __global__ void __launch_bounds__(SUM_THREADS) gate_partials(const __grid_constant__ struct gates_call a)
{
    __shared__ double run[RUNS][SUMS];
    int t = (int)threadIdx.x, k = t % LOGITS, step = (int)gridDim.x * RUNS;
    const struct view *v = k < N ? &a.pre : k < 2 * N ? &a.post : &a.logits;
    const float *up = (const float *)v->data + (k < N ? k : k < 2 * N ? k - N : k - 2 * N);
    float by = alpha_of(a, k / N), shift = a.beta[k];
    double beta = 0, alpha = 0;
    for (int64_t first = (int64_t)blockIdx.x * RUNS + t / LOGITS; v->data != NULL && first < a.rows;
         first += (int64_t)AT_ONCE * step) {
        float g[AT_ONCE], p[AT_ONCE], rho[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int64_t r = first + (int64_t)i * step;
            bool there = r < a.rows;
            g[i] = there ? up[r * v->stride] : 0.0f;
            p[i] = there ? a.p[r * a.p_stride + k] : 0.0f;
            rho[i] = there ? a.rho[r * a.rho_stride] : 1.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float q = 1.0f / (rho[i] + (float)MHC_EPS), dz = g[i];
            if (k < 2 * N) {
                float s = precise_sigmoid(q * p[i] * by + shift);
                dz *= (k < N ? 1.0f : 2.0f) * s * (1 - s);
            }
            beta += (double)dz;
            alpha += (double)(dz * p[i] * q);
        }
    }
    run[t / LOGITS][k] = beta;
    run[t / LOGITS][LOGITS + k] = alpha;
    __syncthreads();
    if (t >= SUMS)
        return;
    double sum = 0;
    for (int r = 0; r < RUNS; r++)
        sum += run[r][t];
    *sum_at(a, (int)blockIdx.x, t) = (float)sum;
}

/* ---- backward: the rest ---------------------------------------------------------------------- */

static __device__ __forceinline__ void add_sums(const struct gates_call &a, const struct gates_sums &s)
{
    __shared__ double part[RANGES][SUMS], total[SUMS];
    int t = (int)threadIdx.x, i = t % SUMS, range = t / SUMS;
    double sum = 0;
    if (range < RANGES) {
#pragma unroll 8
        for (int b = s.blocks * range / RANGES; b < s.blocks * (range + 1) / RANGES; b++)
            sum += (double)*sum_at(a, b, i);
        part[range][i] = sum;
    }
    __syncthreads();
    if (t < SUMS) {
        sum = 0;
        for (int r = 0; r < RANGES; r++)
            sum += part[r][t];
        total[t] = sum;
        if (t < LOGITS)
            s.dbeta[t] = (s.add ? s.dbeta[t] : 0.0f) + (float)sum;
    }
    __syncthreads();
    if (t < 3) {
        int from = t == 0 ? 0 : t == 1 ? N : 2 * N, to = t == 0 ? N : t == 1 ? 2 * N : LOGITS;
        float *out = t == 0 ? s.dalpha[0] : t == 1 ? s.dalpha[1] : s.dalpha[2];
        sum = 0;
        for (int k = from; k < to; k++)
            sum += total[LOGITS + k];
        *out = (s.add ? *out : 0.0f) + (float)sum;
    }
}

static __device__ __forceinline__ void gradient_of_row(const struct gates_call &a, int64_t row)
{
    int g = (int)threadIdx.x % LANES;
    bool there = row < a.rows && 4 * g < LOGITS;
    float p[4] = {}, dz[4] = {}, dp[4], sum = 0, q = 0;
    if (there) {
        const float *up = four_of(a, g, row);
        float by = alpha_of(a, g);
        q = 1.0f / (a.rho[row * a.rho_stride] + (float)MHC_EPS);
        load_floats(a.p + row * a.p_stride + 4 * g, p);
        if (up != NULL)
            load_floats(up, dz);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (g < 2) {
                float s = precise_sigmoid(q * p[e] * by + a.beta[4 * g + e]);
                dz[e] *= (g == 0 ? 1.0f : 2.0f) * s * (1 - s);
            }
            dp[e] = dz[e] * by * q;
            sum += dz[e] * by * p[e];
        }
        store_floats(at<float>(a.dp, row) + 4 * g, dp);
        if (a.dz.data != NULL)
            store_floats(at<float>(a.dz, row) + 4 * g, dz);
    }
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (there && g == 0)
        a.drho[row * a.drho_stride] = -q * q * sum;
}

/* The first block has the rows that hold sums. */
static __global__ void __launch_bounds__(THREADS)
    gate_gradients(const __grid_constant__ struct gates_call a, const __grid_constant__ struct gates_sums s)
{
    int64_t held = (int64_t)s.blocks * GROUP, mine = threadIdx.x / LANES;
    if (s.blocks > 0 && blockIdx.x == 0) {
        add_sums(a, s);
        __syncthreads();
        for (int64_t first = 0; first < held; first += ROWS)
            gradient_of_row(a, first + mine < held ? first + mine : a.rows);
    } else {
        gradient_of_row(a, held + (int64_t)(blockIdx.x - (s.blocks > 0 ? 1 : 0)) * ROWS + mine);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool aligned_or_absent(const struct tensor *t) { return !present(t) || aligned16(t); }

bool mhc_gates_fwd_can(const struct mhc_gates_fwd_args *g)
{
    return g->rule.streams == N && g->p.dim[0] > 0 && aligned16(&g->p) && aligned16(&g->pre) && aligned16(&g->post) &&
           aligned16(&g->logits);
}
int mhc_gates_fwd(struct lane *l, const struct mhc_gates_fwd_args *g)
{
    struct gates_call a = {};
    a.p = floats(&g->p), a.rho = floats(&g->rho), a.beta = floats(&g->beta);
    a.alpha[0] = floats(&g->a_pre), a.alpha[1] = floats(&g->a_post), a.alpha[2] = floats(&g->a_res);
    a.p_stride = g->p.stride[0], a.rho_stride = g->rho.stride[0], a.rows = g->p.dim[0];
    a.pre = view_of(&g->pre), a.post = view_of(&g->post), a.logits = view_of(&g->logits);
    a.profile_d = g->rule.profile == MHC_D, a.round_bf16 = g->rule.round_bf16;
    LAUNCH(l, gate_rows, (unsigned)ceil_div(a.rows, ROWS), THREADS, 0, a);
    return ST_OK;
}

bool mhc_gates_bwd_can(const struct mhc_gates_bwd_args *g)
{
    return g->rule.streams == N && g->p.dim[0] >= (present(&g->dbeta) ? GROUP : 1) && g->dp.data != g->p.data &&
           aligned16(&g->p) && aligned16(&g->dp) && aligned_or_absent(&g->dz) && aligned_or_absent(&g->dpre) &&
           aligned_or_absent(&g->dpost) && aligned_or_absent(&g->dlogits);
}
int mhc_gates_bwd(struct lane *l, const struct mhc_gates_bwd_args *g)
{
    struct gates_call a = {};
    struct gates_sums s = {};
    a.p = floats(&g->p), a.rho = floats(&g->rho), a.beta = floats(&g->beta);
    a.alpha[0] = floats(&g->a_pre), a.alpha[1] = floats(&g->a_post), a.alpha[2] = floats(&g->a_res);
    a.p_stride = g->p.stride[0], a.rho_stride = g->rho.stride[0], a.rows = g->p.dim[0];
    a.pre = view_of(&g->dpre), a.post = view_of(&g->dpost), a.logits = view_of(&g->dlogits);
    a.dp = view_of(&g->dp), a.dz = view_of(&g->dz), a.drho = floats(&g->drho), a.drho_stride = g->drho.stride[0];
    if (present(&g->dbeta)) {
        s.dalpha[0] = floats(&g->da_pre), s.dalpha[1] = floats(&g->da_post), s.dalpha[2] = floats(&g->da_res),
        s.dbeta = floats(&g->dbeta);
        s.add = g->acc_dbeta;
        s.blocks = (int)min_i64(min_i64(MOST_BLOCKS, a.rows / GROUP), ceil_div(a.rows, RUNS));
        LAUNCH(l, gate_partials, (unsigned)s.blocks, SUM_THREADS, 0, a);
    }
    int64_t rest = a.rows - (int64_t)s.blocks * GROUP;
    LAUNCH(l, gate_gradients, (unsigned)(ceil_div(rest, ROWS) + (s.blocks > 0 ? 1 : 0)), THREADS, 0, a, s);
    return ST_OK;
}
