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
    struct view p, rho;
    struct view pre, post, logits; /* or their gradients; data NULL: zeros */
    struct view dp, drho, dz;      /* dz may be absent */
    struct gate_params by;
    int64_t rows;
    struct rule_args rule;
};
struct gates_sums {
    struct param_gradients to;
    int blocks; /* 0: no sums */
};

/* The four values of lane g, of a row of pre, post or logits. */
INLINE float *four_of(const struct gates_call &a, int g, int64_t row)
{
    const struct view *v = g == 0 ? &a.pre : g == 1 ? &a.post : &a.logits;
    return v->data == NULL ? NULL : at<float>(*v, row) + (g < 2 ? 0 : 4 * (g - 2));
}
INLINE float alpha_of(const struct gates_call &a, int g)
{
    return *(g == 0 ? a.by.alpha[0] : g == 1 ? a.by.alpha[1] : a.by.alpha[2]);
}

/* ---- forward --------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) gate_rows(const __grid_constant__ struct gates_call a)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
    int g = (int)threadIdx.x % LANES;
    if (row >= a.rows || 4 * g >= LOGITS)
        return;
    float p[4], out[4], rho = number_at(a.rho, row, 0), by = alpha_of(a, g), scale = g == 1 ? 2.0f : 1.0f,
                        more = g == 0 && a.rule.profile_d ? (float)MHC_EPS : 0.0f;
    load_floats(at<float>(a.p, row) + 4 * g, p);
    float q = 1.0f / (rho + (float)MHC_EPS);
    UNROLLED (e, 4) {
        /* by all lanes: they would wait for each other */
        float z = q * p[e] * by + a.by.beta[4 * g + e],
              sig = maybe_bf16(a.rule.round_bf16, scale * precise_sigmoid(z) + more);
        out[e] = g < 2 ? sig : z;
    }
    store_floats(four_of(a, g, row), out);
}

/* ---- backward: sums over rows, first half ---------------------------------------------------- */

/* Sum i of block b, in dp. */
INLINE float *sum_at(const struct gates_call &a, int b, int i)
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
    float by = alpha_of(a, k / N), shift = a.by.beta[k];
    double beta = 0, alpha = 0;
    for (int64_t first = (int64_t)blockIdx.x * RUNS + t / LOGITS; v->data != NULL && first < a.rows;
         first += (int64_t)AT_ONCE * step) {
        float g[AT_ONCE], p[AT_ONCE], rho[AT_ONCE];
        UNROLLED (i, AT_ONCE) {
            int64_t r = first + (int64_t)i * step;
            bool there = r < a.rows;
            g[i] = there ? up[r * v->stride] : 0.0f;
            p[i] = there ? number_at(a.p, r, k) : 0.0f;
            rho[i] = there ? number_at(a.rho, r, 0) : 1.0f;
        }
        UNROLLED (i, AT_ONCE) {
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

INLINE void add_sums(const struct gates_call &a, const struct gates_sums &s)
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
            s.to.beta[t] = (s.to.add ? s.to.beta[t] : 0.0f) + (float)sum;
    }
    __syncthreads();
    if (t < 3) {
        int from = t == 0 ? 0 : t == 1 ? N : 2 * N, to = t == 0 ? N : t == 1 ? 2 * N : LOGITS;
        float *out = t == 0 ? s.to.alpha[0] : t == 1 ? s.to.alpha[1] : s.to.alpha[2];
        sum = 0;
        for (int k = from; k < to; k++)
            sum += total[LOGITS + k];
        *out = (s.to.add ? *out : 0.0f) + (float)sum;
    }
}

INLINE void gradient_of_row(const struct gates_call &a, int64_t row)
{
    int g = (int)threadIdx.x % LANES;
    bool there = row < a.rows && 4 * g < LOGITS;
    float p[4] = {}, dz[4] = {}, dp[4], sum = 0, q = 0;
    if (there) {
        const float *up = four_of(a, g, row);
        float by = alpha_of(a, g);
        q = 1.0f / (number_at(a.rho, row, 0) + (float)MHC_EPS);
        load_floats(at<float>(a.p, row) + 4 * g, p);
        if (up != NULL)
            load_floats(up, dz);
        UNROLLED (e, 4) {
            if (g < 2) {
                float s = precise_sigmoid(q * p[e] * by + a.by.beta[4 * g + e]);
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
        *at<float>(a.drho, row) = -q * q * sum;
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

bool mhc_gates_fwd_can(const struct mhc_gates_fwd_args *g)
{
    return g->rule.streams == N && g->p.dim[0] > 0 && aligned16(&g->p) && aligned16(&g->pre) && aligned16(&g->post) &&
           aligned16(&g->logits);
}
int mhc_gates_fwd(struct lane *l, const struct mhc_gates_fwd_args *g)
{
    struct gates_call a = {.p = view_of(&g->p),
                           .rho = view_of(&g->rho),
                           .pre = view_of(&g->pre),
                           .post = view_of(&g->post),
                           .logits = view_of(&g->logits),
                           .by = gate_params_of(g),
                           .rows = g->p.dim[0],
                           .rule = rule_of(g->rule)};
    LAUNCH(l, gate_rows, (unsigned)ceil_div(a.rows, ROWS), THREADS, 0, a);
    return ST_OK;
}

bool mhc_gates_bwd_can(const struct mhc_gates_bwd_args *g)
{
    return g->rule.streams == N && g->p.dim[0] >= (present(&g->dbeta) ? GROUP : 1) && g->dp.data != g->p.data &&
           aligned16(&g->p) && aligned16(&g->dp) && absent_or_aligned16(&g->dz) && absent_or_aligned16(&g->dpre) &&
           absent_or_aligned16(&g->dpost) && absent_or_aligned16(&g->dlogits);
}
int mhc_gates_bwd(struct lane *l, const struct mhc_gates_bwd_args *g)
{
    struct gates_call a = {.p = view_of(&g->p),
                           .rho = view_of(&g->rho),
                           .pre = view_of(&g->dpre),
                           .post = view_of(&g->dpost),
                           .logits = view_of(&g->dlogits),
                           .dp = view_of(&g->dp),
                           .drho = view_of(&g->drho),
                           .dz = view_of(&g->dz),
                           .by = gate_params_of(g),
                           .rows = g->p.dim[0]};
    struct gates_sums s = {};
    if (present(&g->dbeta)) {
        s.to = param_gradients_of(g, g->acc_dbeta);
        s.blocks = (int)min_i64(min_i64(MOST_BLOCKS, a.rows / GROUP), ceil_div(a.rows, RUNS));
        LAUNCH(l, gate_partials, (unsigned)s.blocks, SUM_THREADS, 0, a);
    }
    int64_t rest = a.rows - (int64_t)s.blocks * GROUP;
    LAUNCH(l, gate_gradients, (unsigned)(ceil_div(rest, ROWS) + (s.blocks > 0 ? 1 : 0)), THREADS, 0, a, s);
    return ST_OK;
}
