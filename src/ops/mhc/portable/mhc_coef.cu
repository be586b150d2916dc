/* Gates, Sinkhorn and their gradients: one thread per row, everything in registers for 4 streams, but for the divisors
 * of Sinkhorn's iterations, which its gradient keeps in local memory (1 KB a thread: a register cannot be chosen by a
 * loop's counter). Copies for any number of streams have their arrays there. */
#include "ops/mhc/portable/mhc_sinkhorn.cuh"

/* The primitives of the gates for 4 streams of aligned rows: mhc_gates.cu. */
bool mhc_gates_fwd_can(const struct mhc_gates_fwd_args *g);
int mhc_gates_fwd(struct lane *l, const struct mhc_gates_fwd_args *g);
bool mhc_gates_bwd_can(const struct mhc_gates_bwd_args *g);
int mhc_gates_bwd(struct lane *l, const struct mhc_gates_bwd_args *g);

/* ---- forward --------------------------------------------------------------------------------- */

template <int N> static __global__ void coefficients(struct coef_args a)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.n), logits = n * n + 2 * n;
    if (row >= a.rows)
        return;
    const float *hi = a.hi + row * a.p_stride, *lo = a.lo == NULL ? NULL : a.lo + row * a.p_stride;
    float *stat = a.stat == NULL ? NULL : a.stat + row * a.stat_stride;
    float rho = a.rho[row * a.rho_stride], q = 1.0f / (rho + (float)MHC_EPS), m[MAX * MAX];
    float scale[3] = {*a.a_pre, *a.a_post, *a.a_res};
#pragma unroll
    for (int k = 0; k < logits; k++) {
        float p = hi[k] + (lo == NULL ? 0.0f : lo[k]);
        if (stat != NULL)
            stat[k] = p;
        float z = q * p * scale[k < n ? 0 : k < 2 * n ? 1 : 2] + a.beta[k];
        if (k < n)
            a.pre[row * a.pre_stride + k] =
                maybe_bf16(a.round_bf16, precise_sigmoid(z) + (a.profile_d ? (float)MHC_EPS : 0.0f));
        else if (k < 2 * n)
            a.post[row * a.post_stride + k - n] = maybe_bf16(a.round_bf16, 2 * precise_sigmoid(z));
        else
            m[k - 2 * n] = z;
    }
    if (a.sinkhorn)
        sinkhorn<N>(m, n, a.iterations, a.profile_d);
#pragma unroll
    for (int k = 0; k < n * n; k++)
        a.res[row * a.res_stride + k] = a.sinkhorn ? maybe_bf16(a.round_bf16, m[k]) : m[k];
}

int mhc_coefficients(struct lane *l, const struct coef_args *a)
{
    unsigned grid = (unsigned)ceil_div(a->rows, 128);
    if (a->n == 4)
        LAUNCH(l, coefficients<4>, grid, 128, 0, *a);
    else
        LAUNCH(l, coefficients<0>, grid, 128, 0, *a);
    return ST_OK;
}

static struct coef_args rule_args(const struct mhc_rule *r, int64_t rows)
{
    struct coef_args a = {};
    a.rows = rows;
    a.n = (int)r->streams;
    a.iterations = (int)r->iterations;
    a.profile_d = r->profile == MHC_D;
    a.round_bf16 = r->round_bf16;
    return a;
}

extern "C" int mhc_gates_fwd_cuda(struct lane *l, const struct mhc_gates_fwd_args *g)
{
    TRY(mhc_gates_fwd_check(g, l->err));
    if (mhc_gates_fwd_can(g))
        return mhc_gates_fwd(l, g);
    struct coef_args a = rule_args(&g->rule, g->p.dim[0]);
    a.hi = floats(&g->p);
    a.p_stride = g->p.stride[0];
    a.rho = floats(&g->rho);
    a.rho_stride = g->rho.stride[0];
    a.a_pre = floats(&g->a_pre);
    a.a_post = floats(&g->a_post);
    a.a_res = floats(&g->a_res);
    a.beta = floats(&g->beta);
    a.pre = floats(&g->pre);
    a.post = floats(&g->post);
    a.res = floats(&g->logits);
    a.pre_stride = g->pre.stride[0];
    a.post_stride = g->post.stride[0];
    a.res_stride = g->logits.stride[0];
    return mhc_coefficients(l, &a);
}

template <int N>
static __global__ void sinkhorn_rows(const float *logits, int64_t in_stride, float *res, int64_t out_stride,
                                     int64_t rows, int n_, int iterations, bool d, bool round_bf16)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(n_);
    float m[streams<N>::MAX * streams<N>::MAX];
    if (row >= rows)
        return;
#pragma unroll
    for (int k = 0; k < n * n; k++)
        m[k] = logits[row * in_stride + k];
    sinkhorn<N>(m, n, iterations, d);
#pragma unroll
    for (int k = 0; k < n * n; k++)
        res[row * out_stride + k] = maybe_bf16(round_bf16, m[k]);
}

extern "C" int mhc_sinkhorn_fwd_cuda(struct lane *l, const struct mhc_sinkhorn_fwd_args *a)
{
    TRY(mhc_sinkhorn_fwd_check(a, l->err));
    int64_t rows = a->logits.dim[0];
    unsigned grid = (unsigned)ceil_div(rows, 128);
    bool d = a->rule.profile == MHC_D;
    if (a->rule.streams == 4)
        LAUNCH(l, sinkhorn_rows<4>, grid, 128, 0, floats(&a->logits), a->logits.stride[0], floats(&a->res),
               a->res.stride[0], rows, 4, (int)a->rule.iterations, d, a->rule.round_bf16);
    else
        LAUNCH(l, sinkhorn_rows<0>, grid, 128, 0, floats(&a->logits), a->logits.stride[0], floats(&a->res),
               a->res.stride[0], rows, (int)a->rule.streams, (int)a->rule.iterations, d, a->rule.round_bf16);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

template <int N>
static __global__ void sinkhorn_bwd_rows(const float *dres, int64_t g_stride, const float *logits, int64_t in_stride,
                                         float *dlogits, int64_t out_stride, int64_t rows, int n_, int iterations,
                                         bool d)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(n_);
    float g[MAX * MAX], start[MAX * MAX];
    if (row >= rows)
        return;
#pragma unroll
    for (int k = 0; k < n * n; k++) {
        g[k] = dres[row * g_stride + k];
        start[k] = logits[row * in_stride + k];
    }
    sinkhorn_gradient<N>(start, g, n, iterations, d);
#pragma unroll
    for (int k = 0; k < n * n; k++)
        dlogits[row * out_stride + k] = g[k];
}

extern "C" int mhc_sinkhorn_bwd_cuda(struct lane *l, const struct mhc_sinkhorn_bwd_args *a)
{
    TRY(mhc_sinkhorn_bwd_check(a, l->err));
    int64_t rows = a->logits.dim[0];
    unsigned grid = (unsigned)ceil_div(rows, 64);
    bool d = a->rule.profile == MHC_D;
    if (a->rule.streams == 4)
        LAUNCH(l, sinkhorn_bwd_rows<4>, grid, 64, 0, floats(&a->dres), a->dres.stride[0], floats(&a->logits),
               a->logits.stride[0], floats(&a->dlogits), a->dlogits.stride[0], rows, 4, (int)a->rule.iterations, d);
    else
        LAUNCH(l, sinkhorn_bwd_rows<0>, grid, 64, 0, floats(&a->dres), a->dres.stride[0], floats(&a->logits),
               a->logits.stride[0], floats(&a->dlogits), a->dlogits.stride[0], rows, (int)a->rule.streams,
               (int)a->rule.iterations, d);
    return ST_OK;
}

/* Gradient through the gates (and the Sinkhorn, if asked) of one row. */
template <int N> static __global__ void coefficients_bwd(struct coef_bwd_args a)
{
    constexpr int MAX = streams<N>::MAX;
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int n = streams<N>::count(a.n), logits = n * n + 2 * n;
    if (row >= a.rows)
        return;
    const float *p = a.p + row * a.p_stride;
    float rho = a.rho[row * a.rho_stride], q = 1.0f / (rho + (float)MHC_EPS), sum = 0;
    float scale[3] = {*a.a_pre, *a.a_post, *a.a_res};
    float g[MAX * MAX];
#pragma unroll
    for (int k = 0; k < n * n; k++)
        g[k] = a.dres == NULL ? 0.0f : a.dres[row * a.dres_stride + k];
    if (a.sinkhorn && a.dres != NULL) {
        float z[MAX * MAX];
#pragma unroll
        for (int k = 0; k < n * n; k++)
            z[k] = q * p[2 * n + k] * scale[2] + a.beta[2 * n + k];
        sinkhorn_gradient<N>(z, g, n, a.iterations, a.profile_d);
    }
#pragma unroll
    for (int k = 0; k < logits; k++) {
        float by = scale[k < n ? 0 : k < 2 * n ? 1 : 2], dz;
        if (k < 2 * n) {
            float s = precise_sigmoid(q * p[k] * by + a.beta[k]), up = 0;
            if (k < n)
                up = (a.dpre == NULL ? 0.0f : a.dpre[row * a.dpre_stride + k]) +
                     (a.dpre2 == NULL ? 0.0f : a.dpre2[row * a.dpre2_stride + k]);
            else
                up = a.dpost == NULL ? 0.0f : 2 * a.dpost[row * a.dpost_stride + k - n];
            dz = up * s * (1 - s);
        } else {
            dz = g[k - 2 * n];
        }
        float dp = dz * by * q;
        sum += dz * by * p[k];
        if (a.dz != NULL)
            a.dz[row * a.dz_stride + k] = dz;
        if (a.dp != NULL)
            a.dp[row * a.dp_stride + k] = dp;
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
    if (a.drho != NULL)
        a.drho[row * a.drho_stride] = -q * q * sum;
    if (a.row_scale != NULL)
        a.row_scale[row] = rho + a.root_less == 0 ? 0.0f : -q * q * sum / ((float)a.k * (rho + a.root_less));
}

int mhc_coefficients_bwd(struct lane *l, const struct coef_bwd_args *a)
{
    unsigned grid = (unsigned)ceil_div(a->rows, 64);
    if (a->n == 4)
        LAUNCH(l, coefficients_bwd<4>, grid, 64, 0, *a);
    else
        LAUNCH(l, coefficients_bwd<0>, grid, 64, 0, *a);
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
        float dz = a.dz[r * a.dz_stride + k];
        beta += dz;
        alpha += dz * a.p[r * a.p_stride + k] / (a.rho[r * a.rho_stride] + (float)MHC_EPS);
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
template <typename T>
static __device__ void sum_logits(const T *by_logit, int n, float *da_pre, float *da_post, float *da_res, bool add)
{
    int group = (int)threadIdx.x, from = group * n, to = group < 2 ? from + n : n * n + 2 * n;
    if (group > 2)
        return;
    double sum = 0;
    for (int i = from; i < to; i++)
        sum += (double)by_logit[i];
    float *out = group == 0 ? da_pre : group == 1 ? da_post : da_res;
    *out = (add ? *out : 0.0f) + (float)sum;
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
                a.dbeta[k] = (a.add ? a.dbeta[k] : 0.0f) + (float)sum;
            else
                totals[k] = sum;
        }
        __syncthreads();
    }
    if (a.sums == NULL)
        sum_logits(totals, a.n, a.da_pre, a.da_post, a.da_res, a.add);
}

/* The first block: what is a sum over rows. Others: dw, 4 numbers a thread. */
enum { ADD_THREADS = 256 };
static __global__ void __launch_bounds__(ADD_THREADS) add_products(const __grid_constant__ struct add_products_args a)
{
    int logits = a.n * a.n + 2 * a.n;
    if (blockIdx.x == 0) {
        const float *sums = a.products + logits * a.products_stride;
        for (int k = (int)threadIdx.x; k < logits; k += ADD_THREADS)
            a.dbeta[k] = (a.add ? a.dbeta[k] : 0.0f) + sums[k];
        sum_logits(sums + logits, a.n, a.da_pre, a.da_post, a.da_res, a.add);
        return;
    }
    int64_t per_row = (a.k + 4 * ADD_THREADS - 1) / (4 * ADD_THREADS), i = (blockIdx.x - 1) / per_row,
            first = (blockIdx.x - 1) % per_row * 4 * ADD_THREADS + threadIdx.x;
    const float *from = a.products + i * a.products_stride;
    float *to = a.dw + i * a.dw_stride;
#pragma unroll
    for (int e = 0; e < 4; e++) {
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

/* The primitive has no scratch for partial sums: a block per sum, over all rows. Blocks 0 to N - 1 are dbeta, the last
 * three the alphas, which are sums over logits too. */
static __global__ void __launch_bounds__(256) gate_param_sums(const __grid_constant__ struct param_sum_args a)
{
    __shared__ double parts[256];
    int logits = a.n * a.n + 2 * a.n, sum = (int)blockIdx.x, group = sum - logits;
    bool beta = sum < logits;
    int from = beta         ? sum
               : group == 0 ? 0
               : group == 1 ? a.n
                            : 2 * a.n,
        to = beta         ? sum + 1
             : group == 0 ? a.n
             : group == 1 ? 2 * a.n
                          : logits;
    double mine = 0;
    for (int k = from; k < to; k++) {
        float by = k < a.n ? *a.a_pre : k < 2 * a.n ? *a.a_post : *a.a_res;
        for (int64_t r = threadIdx.x; r < a.rows; r += 256) {
            float q = 1.0f / (a.rho[r * a.rho_stride] + (float)MHC_EPS), p = a.p[r * a.p_stride + k];
            float dz = gate_dz(a, r, k, q * p * by + a.beta[k]);
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
    float *out = beta ? a.dbeta + sum : group == 0 ? a.da_pre : group == 1 ? a.da_post : a.da_res;
    *out = (a.add ? *out : 0.0f) + (float)total;
}

extern "C" int mhc_gates_bwd_cuda(struct lane *l, const struct mhc_gates_bwd_args *g)
{
    TRY(mhc_gates_bwd_check(g, l->err));
    if (mhc_gates_bwd_can(g))
        return mhc_gates_bwd(l, g);
    struct coef_bwd_args a = {.p = floats(&g->p),
                              .rho = floats(&g->rho),
                              .a_pre = floats(&g->a_pre),
                              .a_post = floats(&g->a_post),
                              .a_res = floats(&g->a_res),
                              .beta = floats(&g->beta),
                              .dpre = floats(&g->dpre),
                              .dpost = floats(&g->dpost),
                              .dres = floats(&g->dlogits),
                              .p_stride = g->p.stride[0],
                              .rho_stride = g->rho.stride[0],
                              .dpre_stride = g->dpre.stride[0],
                              .dpost_stride = g->dpost.stride[0],
                              .dres_stride = g->dlogits.stride[0],
                              .dz = floats(&g->dz),
                              .dp = floats(&g->dp),
                              .drho = floats(&g->drho),
                              .dz_stride = g->dz.stride[0],
                              .dp_stride = g->dp.stride[0],
                              .drho_stride = g->drho.stride[0],
                              .rows = g->p.dim[0],
                              .n = (int)g->rule.streams};
    TRY(mhc_coefficients_bwd(l, &a));
    if (!present(&g->dbeta))
        return ST_OK;
    struct param_sum_args s = {.p = a.p,
                               .rho = a.rho,
                               .p_stride = a.p_stride,
                               .rho_stride = a.rho_stride,
                               .a_pre = a.a_pre,
                               .a_post = a.a_post,
                               .a_res = a.a_res,
                               .beta = a.beta,
                               .dpre = a.dpre,
                               .dpost = a.dpost,
                               .dlogits = a.dres,
                               .dpre_stride = a.dpre_stride,
                               .dpost_stride = a.dpost_stride,
                               .dlogits_stride = a.dres_stride,
                               .da_pre = floats(&g->da_pre),
                               .da_post = floats(&g->da_post),
                               .da_res = floats(&g->da_res),
                               .dbeta = floats(&g->dbeta),
                               .rows = a.rows,
                               .n = a.n,
                               .add = g->acc_dbeta};
    LAUNCH(l, gate_param_sums, (unsigned)mhc_logits(g->rule.streams) + 3, 256, 0, s);
    return ST_OK;
}
