/* Gates, Sinkhorn and their gradients: one thread per row, everything in registers for 4 streams, but for the divisors
 * of Sinkhorn's iterations, which its gradient keeps in local memory (1 KB a thread: a register cannot be chosen by a
 * loop's counter). Copies for any number of streams have their arrays there. */
#include "ops/mhc/portable/mhc_sinkhorn.cuh"

/* The primitives of the gates for 4 streams of aligned rows: mhc_gates.cu. */
bool mhc_gates_fwd_can(const struct mhc_gates_fwd_args *g);
int mhc_gates_fwd(struct lane *l, const struct mhc_gates_fwd_args *g);
bool mhc_gates_bwd_can(const struct mhc_gates_bwd_args *g);
int mhc_gates_bwd(struct lane *l, const struct mhc_gates_bwd_args *g);

/* Which of pre, post and res a logit is for. */
INLINE int group_of(int n, int k) { return k < n ? 0 : k < 2 * n ? 1 : 2; }

/* ---- forward --------------------------------------------------------------------------------- */

template <int N> static __global__ void coefficients(struct coef_args a)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.rule.n), logits = n * n + 2 * n;
    if (row >= a.rows)
        return;
    float q = 1.0f / (number_at(a.rho, row, 0) + (float)MHC_EPS), m[MAX * MAX];
    float scale[3] = {*a.by.alpha[0], *a.by.alpha[1], *a.by.alpha[2]};
    bool round = a.rule.round_bf16;
    UNROLLED (k, logits) {
        float p = number_at(a.p, row, k) + number_or_zero(a.low, row, k);
        if (a.p_to.data != NULL)
            at<float>(a.p_to, row)[k] = p;
        float z = q * p * scale[group_of(n, k)] + a.by.beta[k];
        if (k < n)
            at<float>(a.pre, row)[k] =
                maybe_bf16(round, precise_sigmoid(z) + (a.rule.profile_d ? (float)MHC_EPS : 0.0f));
        else if (k < 2 * n)
            at<float>(a.post, row)[k - n] = maybe_bf16(round, 2 * precise_sigmoid(z));
        else
            m[k - 2 * n] = z;
    }
    if (a.sinkhorn)
        sinkhorn<N>(m, n, a.rule.iterations, a.rule.profile_d);
    UNROLLED (k, n * n)
        at<float>(a.res, row)[k] = maybe_bf16(round && a.sinkhorn, m[k]);
}

int mhc_coefficients(struct lane *l, const struct coef_args *a)
{
    LAUNCH(l, a->rule.n == 4 ? coefficients<4> : coefficients<0>, (unsigned)ceil_div(a->rows, 128), 128, 0, *a);
    return ST_OK;
}

extern "C" int mhc_gates_fwd_cuda(struct lane *l, const struct mhc_gates_fwd_args *g)
{
    TRY(mhc_gates_fwd_check(g, l->err));
    if (mhc_gates_fwd_can(g))
        return mhc_gates_fwd(l, g);
    struct coef_args a = {.p = view_of(&g->p),
                          .rho = view_of(&g->rho),
                          .pre = view_of(&g->pre),
                          .post = view_of(&g->post),
                          .res = view_of(&g->logits),
                          .by = gate_params_of(g),
                          .rows = g->p.dim[0],
                          .rule = rule_of(g->rule)};
    return mhc_coefficients(l, &a);
}

struct sinkhorn_args {
    struct view logits, res, dres, dlogits; /* forward: to res; backward: dres to dlogits */
    int64_t rows;
    struct rule_args rule;
};
template <int N> static __global__ void sinkhorn_rows(struct sinkhorn_args a)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.rule.n);
    float m[streams<N>::MAX * streams<N>::MAX];
    if (row >= a.rows)
        return;
    UNROLLED (k, n * n)
        m[k] = number_at(a.logits, row, k);
    sinkhorn<N>(m, n, a.rule.iterations, a.rule.profile_d);
    UNROLLED (k, n * n)
        at<float>(a.res, row)[k] = maybe_bf16(a.rule.round_bf16, m[k]);
}

extern "C" int mhc_sinkhorn_fwd_cuda(struct lane *l, const struct mhc_sinkhorn_fwd_args *s)
{
    TRY(mhc_sinkhorn_fwd_check(s, l->err));
    struct sinkhorn_args a = {
        .logits = view_of(&s->logits), .res = view_of(&s->res), .rows = s->logits.dim[0], .rule = rule_of(s->rule)};
    LAUNCH(l, a.rule.n == 4 ? sinkhorn_rows<4> : sinkhorn_rows<0>, (unsigned)ceil_div(a.rows, 128), 128, 0, a);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

template <int N> static __global__ void sinkhorn_bwd_rows(struct sinkhorn_args a)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.rule.n);
    float g[MAX * MAX], start[MAX * MAX];
    if (row >= a.rows)
        return;
    UNROLLED (k, n * n) {
        g[k] = number_at(a.dres, row, k);
        start[k] = number_at(a.logits, row, k);
    }
    sinkhorn_gradient<N>(start, g, n, a.rule.iterations, a.rule.profile_d);
    UNROLLED (k, n * n)
        at<float>(a.dlogits, row)[k] = g[k];
}

extern "C" int mhc_sinkhorn_bwd_cuda(struct lane *l, const struct mhc_sinkhorn_bwd_args *s)
{
    TRY(mhc_sinkhorn_bwd_check(s, l->err));
    struct sinkhorn_args a = {.logits = view_of(&s->logits),
                              .dres = view_of(&s->dres),
                              .dlogits = view_of(&s->dlogits),
                              .rows = s->logits.dim[0],
                              .rule = rule_of(s->rule)};
    LAUNCH(l, a.rule.n == 4 ? sinkhorn_bwd_rows<4> : sinkhorn_bwd_rows<0>, (unsigned)ceil_div(a.rows, 64), 64, 0, a);
    return ST_OK;
}

/* Gradient through the gates (and the Sinkhorn, if asked) of one row. */
template <int N> static __global__ void coefficients_bwd(struct coef_bwd_args a)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.rule.n), logits = n * n + 2 * n;
    if (row >= a.rows)
        return;
    const float *p = at<float>(a.p, row), *beta = a.by.beta;
    float rho = number_at(a.rho, row, 0), q = 1.0f / (rho + (float)MHC_EPS), sum = 0;
    float scale[3] = {*a.by.alpha[0], *a.by.alpha[1], *a.by.alpha[2]};
    float g[MAX * MAX];
    UNROLLED (k, n * n)
        g[k] = number_or_zero(a.dres, row, k);
    if (a.sinkhorn && a.dres.data != NULL) {
        float z[MAX * MAX];
        UNROLLED (k, n * n)
            z[k] = q * p[2 * n + k] * scale[2] + beta[2 * n + k];
        sinkhorn_gradient<N>(z, g, n, a.rule.iterations, a.rule.profile_d);
    }
    UNROLLED (k, logits) {
        float by = scale[group_of(n, k)], dz;
        if (k < 2 * n) {
            float s = precise_sigmoid(q * p[k] * by + beta[k]), up = 0;
            if (k < n)
                up = number_or_zero(a.dpre, row, k) + number_or_zero(a.dpre2, row, k);
            else
                up = 2 * number_or_zero(a.dpost, row, k - n);
            dz = up * s * (1 - s);
        } else {
            dz = g[k - 2 * n];
        }
        float dp = dz * by * q;
        sum += dz * by * p[k];
        if (a.dz.data != NULL)
            at<float>(a.dz, row)[k] = dz;
        if (a.dp.data != NULL)
            at<float>(a.dp, row)[k] = dp;
        if (a.split != NULL) {
            bf16 high = __float2bfloat16_rn(dp), low = __float2bfloat16_rn(dp - __bfloat162float(high));
            bf16 *out = a.split + row * 3 * a.split_width;
            out[k] = out[2 * a.split_width + k] = high;
            out[a.split_width + k] = low;
        }
    }
    for (int k = logits; a.split != NULL && k < a.split_width; k++)
        for (int part = 0; part < 3; part++)
            a.split[row * 3 * a.split_width + part * a.split_width + k] = __float2bfloat16_rn(0.0f);
    if (a.drho.data != NULL)
        *at<float>(a.drho, row) = -q * q * sum;
    if (a.row_scale != NULL)
        a.row_scale[row] = rho + a.rule.root_less == 0 ? 0.0f : -q * q * sum / ((float)a.k * (rho + a.rule.root_less));
}

int mhc_coefficients_bwd(struct lane *l, const struct coef_bwd_args *a)
{
    LAUNCH(l, a->rule.n == 4 ? coefficients_bwd<4> : coefficients_bwd<0>, (unsigned)ceil_div(a->rows, 64), 64, 0, *a);
    return ST_OK;
}

/* ---- gradients of alphas and beta ------------------------------------------------------------ */

/* A lane per logit; the warps of a block take its rows in turn. */
static __global__ void __launch_bounds__(256) param_sums(const __grid_constant__ struct param_sum_args a)
{
    __shared__ float parts[2][8][32];
    int logits = a.n * a.n + 2 * a.n, warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32,
        k = (int)blockIdx.x * 32 + lane;
    int64_t first = (int64_t)blockIdx.y * a.rows_per_block, end = min(first + a.rows_per_block, a.rows);
    float beta = 0, alpha = 0;
#pragma unroll 4
    for (int64_t r = first + warp; k < logits && r < end; r += 8) {
        float dz = number_at(a.dz, r, k);
        beta += dz;
        alpha += dz * number_at(a.p, r, k) / (number_at(a.rho, r, 0) + (float)MHC_EPS);
    }
    parts[0][warp][lane] = beta;
    parts[1][warp][lane] = alpha;
    __syncthreads();
    if (warp > 1 || k >= logits)
        return;
    float sum = 0;
    for (int w = 0; w < 8; w++)
        sum += parts[warp][w][lane];
    a.partial[((int64_t)blockIdx.y * 2 + warp) * logits + k] = sum;
}

/* The alphas from their sums by logits. */
template <typename T> static __device__ void sum_logits(const T *by_logit, int n, const struct param_gradients &to)
{
    int group = (int)threadIdx.x, from = group * n, end = group < 2 ? from + n : n * n + 2 * n;
    if (group > 2)
        return;
    double sum = 0;
    for (int i = from; i < end; i++)
        sum += (double)by_logit[i];
    float *out = group == 0 ? to.alpha[0] : group == 1 ? to.alpha[1] : to.alpha[2];
    *out = (to.add ? *out : 0.0f) + (float)sum;
}

/* 32 ranges of the partial sums, each in order, then the ranges in order. */
static __global__ void __launch_bounds__(1024) param_totals(const __grid_constant__ struct param_sum_args a, int blocks)
{
    __shared__ double ranges[2][32][32], totals[MHC_MAX_STREAMS * (MHC_MAX_STREAMS + 2)];
    int logits = a.n * a.n + 2 * a.n, lane = (int)threadIdx.x % 32, range = (int)threadIdx.x / 32;
    for (int first = 0; first < logits; first += 32) {
        int k = first + lane;
        double beta = 0, alpha = 0;
        for (int b = blocks * range / 32; k < logits && b < blocks * (range + 1) / 32; b++) {
            beta += (double)a.partial[((int64_t)b * 2) * logits + k];
            alpha += (double)a.partial[((int64_t)b * 2 + 1) * logits + k];
        }
        ranges[0][range][lane] = beta;
        ranges[1][range][lane] = alpha;
        __syncthreads();
        if (range < 2 && k < logits) {
            double sum = 0;
            for (int r = 0; r < 32; r++)
                sum += ranges[range][r][lane];
            if (a.sums != NULL)
                a.sums[range * logits + k] = (float)sum;
            else if (range == 0)
                a.to.beta[k] = (a.to.add ? a.to.beta[k] : 0.0f) + (float)sum;
            else
                totals[k] = sum;
        }
        __syncthreads();
    }
    if (a.sums == NULL)
        sum_logits(totals, a.n, a.to);
}

/* The first block: what is a sum over rows. Others: dw, 4 numbers a thread. */
enum { ADD_THREADS = 256 };
static __global__ void __launch_bounds__(ADD_THREADS) add_products(const __grid_constant__ struct add_products_args a)
{
    int logits = a.n * a.n + 2 * a.n;
    if (blockIdx.x == 0) {
        const float *sums = at<float>(a.products, logits);
        for (int k = (int)threadIdx.x; k < logits; k += ADD_THREADS)
            a.to.beta[k] = (a.to.add ? a.to.beta[k] : 0.0f) + sums[k];
        sum_logits(sums + logits, a.n, a.to);
        return;
    }
    int64_t per_row = (a.k + 4 * ADD_THREADS - 1) / (4 * ADD_THREADS), i = (blockIdx.x - 1) / per_row,
            first = (blockIdx.x - 1) % per_row * 4 * ADD_THREADS + threadIdx.x;
    const float *from = at<float>(a.products, i);
    float *to = at<float>(a.dw, i);
    UNROLLED (e, 4) {
        int64_t c = first + e * ADD_THREADS;
        if (c < a.k)
            to[c] = (a.add_dw ? to[c] : 0.0f) + from[c];
    }
}
int mhc_add_products(struct lane *l, const struct add_products_args *a)
{
    LAUNCH(l, add_products, (unsigned)(1 + mhc_logits(a->n) * ceil_div(a->k, 4 * ADD_THREADS)), ADD_THREADS, 0, *a);
    return ST_OK;
}

static int param_blocks(int64_t rows) { return (int)max_i64(1, min_i64(MHC_PARAM_BLOCKS, ceil_div(rows, 64))); }

int mhc_param_sums(struct lane *l, struct param_sum_args *a)
{
    int blocks = param_blocks(a->rows), logits = a->n * a->n + 2 * a->n;
    a->rows_per_block = ceil_div(max_i64(a->rows, 1), blocks);
    LAUNCH(l, param_sums, dim3((unsigned)ceil_div(logits, 32), (unsigned)blocks), 256, 0, *a);
    LAUNCH(l, param_totals, 1, 1024, 0, *a, blocks);
    return ST_OK;
}

/* dz of a gate, recomputed. */
INLINE float gate_dz(const struct param_sum_args &a, int64_t r, int k, float z)
{
    if (k >= 2 * a.n)
        return number_or_zero(a.dlogits, r, k - 2 * a.n);
    float s = precise_sigmoid(z);
    return (k < a.n ? number_or_zero(a.dpre, r, k) : 2 * number_or_zero(a.dpost, r, k - a.n)) * s * (1 - s);
}

/* The primitive has no scratch for partial sums: a block per sum, over all rows. Blocks 0 to N - 1 are dbeta, the last
 * three the alphas, which are sums over logits too. */
static __global__ void __launch_bounds__(256) gate_param_sums(const __grid_constant__ struct param_sum_args a)
{
    __shared__ double parts[256];
    int logits = a.n * a.n + 2 * a.n, sum = (int)blockIdx.x, group = sum - logits;
    bool beta = sum < logits;
    int from = beta ? sum : group * a.n, to = beta ? sum + 1 : group < 2 ? from + a.n : logits;
    double mine = 0;
    for (int k = from; k < to; k++) {
        float by = *a.by.alpha[group_of(a.n, k)];
        for (int64_t r = threadIdx.x; r < a.rows; r += 256) {
            float q = 1.0f / (number_at(a.rho, r, 0) + (float)MHC_EPS), p = number_at(a.p, r, k);
            float dz = gate_dz(a, r, k, q * p * by + a.by.beta[k]);
            mine += (double)(beta ? dz : dz * p * q);
        }
    }
    parts[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    double total = 0;
    for (int i = 0; i < 256; i++)
        total += parts[i];
    float *out = beta ? a.to.beta + sum : a.to.alpha[group];
    *out = (a.to.add ? *out : 0.0f) + (float)total;
}

extern "C" int mhc_gates_bwd_cuda(struct lane *l, const struct mhc_gates_bwd_args *g)
{
    TRY(mhc_gates_bwd_check(g, l->err));
    if (mhc_gates_bwd_can(g))
        return mhc_gates_bwd(l, g);
    struct coef_bwd_args a = {.p = view_of(&g->p),
                              .rho = view_of(&g->rho),
                              .dpre = view_of(&g->dpre),
                              .dpost = view_of(&g->dpost),
                              .dres = view_of(&g->dlogits),
                              .dz = view_of(&g->dz),
                              .dp = view_of(&g->dp),
                              .drho = view_of(&g->drho),
                              .by = gate_params_of(g),
                              .rows = g->p.dim[0],
                              .rule = rule_of(g->rule)};
    TRY(mhc_coefficients_bwd(l, &a));
    if (!present(&g->dbeta))
        return ST_OK;
    struct param_sum_args s = {.p = a.p,
                               .rho = a.rho,
                               .dpre = a.dpre,
                               .dpost = a.dpost,
                               .dlogits = a.dres,
                               .by = a.by,
                               .to = param_gradients_of(g, g->acc_dbeta),
                               .rows = a.rows,
                               .n = a.rule.n};
    LAUNCH(l, gate_param_sums, (unsigned)mhc_logits(g->rule.streams) + 3, 256, 0, s);
    return ST_OK;
}
