/* router backward on the GPU, and the small ones beside it: noise, jitter, bias. Backward: a block for each
 * ROUTER_BLOCK rows of a sequence, because the gradient of the balance losses by the scores is one vector for a
 * sequence; a warp for each token at a time. No sum crosses a token. */
#include "ops/router/router_row.cuh"
#include "ops/dropout/dropout.h"
#include "ops/router/router.h"

struct back_job {
    struct router_mode mode;
    const float *dprobs, *logits;
    const int32_t *idx;
    const double *dloss, *load;
    struct router_coef coef;
    int64_t dprobs_stride, logits_stride, dlogits_stride, rows;
    void *dlogits;
    bool balances;
};

/* Gradient of the losses by s of (sequence b, expert e): router_loss_slope of router_int.h. */
__device__ double slope_of_losses(const struct back_job &p, int64_t b, int e)
{
    int64_t n = p.mode.n, batch = p.rows / p.mode.seq;
    double rows = (double)p.rows, seq = (double)p.mode.seq, f = 0;
    for (int64_t i = 0; p.coef.aux != 0 && i < batch; i++)
        f += p.load[i * n + e];
    return (double)n / (double)p.mode.k *
           (p.coef.aux * f / (rows * rows) + p.coef.global_aux * p.load[batch * n + e] / (rows * rows) +
            p.coef.seq_aux * p.load[b * n + e] / (seq * seq * (double)batch));
}

/* dz from the gradients of the probabilities. */
template <int PER>
__device__ __forceinline__ void through_probs(const struct back_job &p, int64_t t, const struct router_soft &soft,
                                              const float s[PER], float dz[PER])
{
    int lane = threadIdx.x % 32, k = p.mode.k;
    struct router_chosen c;
    float g[ROUTER_CHOICES], value[ROUTER_CHOICES], dot = 0;
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++) {
        int j = lane + 32 * i, at = j < k ? p.idx[t * k + j] : 0, e = at < 0 ? -1 - at : at;
        bool there = j < k && e < p.mode.n;
        c.e[i] = there ? e : -1;
        g[i] = there && at >= 0 ? p.mode.scale * p.dprobs[t * p.dprobs_stride + j] : 0.0f;
    }
    router_probabilities(p.mode, p.logits + t * p.logits_stride, soft, &c);
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++)
        dot += g[i] * c.p[i];
    dot = warp_sum(dot);
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++) {
        if (p.mode.softmax_all)
            value[i] = c.p[i] * g[i];
        else if (p.mode.score == ROUTER_SOFTMAX)
            value[i] = c.p[i] * (g[i] - dot);
        else
            value[i] =
                (p.mode.normalises ? (g[i] - dot) / c.sum : g[i]) * router_slope_of(p.mode.score, c.z[i], c.s[i]);
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        dz[i] -= p.mode.softmax_all ? s[i] * dot : 0.0f;
    /* In order of choice: a table may name an expert twice. */
    for (int j = 0; j < k; j++) {
        int e = __shfl_sync(0xffffffffu, j < 32 ? c.e[0] : c.e[1], j % 32);
        float v = __shfl_sync(0xffffffffu, j < 32 ? value[0] : value[1], j % 32);
#pragma unroll
        for (int i = 0; i < PER; i++)
            dz[i] += lane + 32 * i == e ? v : 0.0f;
    }
}

template <int PER>
__device__ __forceinline__ void through_losses(const struct back_job &p, const struct router_soft &soft,
                                               const float z[PER], const float s[PER], const float *slope, float per_z,
                                               float dz[PER])
{
    int lane = threadIdx.x % 32;
    if (p.balances) {
        float all = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            all += s[i];
        float over = p.mode.score == ROUTER_SOFTMAX ? 1.0f : warp_sum(all) + 1e-20f;
#pragma unroll
        for (int i = 0; i < PER; i++)
            dot += lane + 32 * i < p.mode.n ? slope[lane + 32 * i] * s[i] / over : 0.0f;
        dot = warp_sum(dot);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (lane + 32 * i >= p.mode.n)
                continue;
            float from = slope[lane + 32 * i] - dot;
            dz[i] +=
                p.mode.score == ROUTER_SOFTMAX ? s[i] * from : from / over * router_slope_of(p.mode.score, z[i], s[i]);
        }
    }
    if (per_z != 0) {
        float lse = soft.most + logf(soft.sum);
#pragma unroll
        for (int i = 0; i < PER; i++)
            dz[i] += per_z * lse * (expf(z[i] - soft.most) / soft.sum);
    }
}

/* Shared: slope [n]. */
template <typename T, int PER, int WARPS> __global__ void __launch_bounds__(32 * WARPS) route_back(struct back_job p)
{
    DYNAMIC_SHARED(float, slope, 4);
    int n = p.mode.n, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct router_span span = router_span_of(p.mode, blockIdx.x);
    double dloss = p.dloss != NULL ? *p.dloss : 0;
    for (int e = threadIdx.x; p.balances && e < n; e += 32 * WARPS)
        slope[e] = (float)(dloss * slope_of_losses(p, span.seq, e));
    __syncthreads();
    float per_z = (float)(2 * p.coef.z * dloss / (double)p.rows);
    bool wants_scores = p.balances || p.mode.softmax_all;
    bool wants_soft = per_z != 0 || (p.mode.score == ROUTER_SOFTMAX && wants_scores);
    for (int64_t t = span.first + warp; t < span.end; t += WARPS) {
        float z[PER], s[PER], dz[PER];
        struct router_soft soft = {0, 1};
        router_load<PER>(p.logits + t * p.logits_stride, n, z);
        if (wants_soft)
            soft = router_softmax<PER>(z);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            s[i] = wants_scores ? router_score_of(p.mode.score, soft, z[i]) : 0.0f;
            dz[i] = 0;
        }
        through_probs<PER>(p, t, soft, s, dz);
        through_losses<PER>(p, soft, z, s, slope, per_z, dz);
        __syncwarp(); /* dlogits may be logits */
        T *out = (T *)p.dlogits + t * p.dlogits_stride;
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane + 32 * i < n)
                out[lane + 32 * i] = from_float<T>(dz[i]);
    }
}

extern "C" int router_bwd_cuda(struct lane *l, const struct router_bwd_args *a)
{
    TRY(router_bwd_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1];
    struct back_job p = {};
    p.mode = router_mode_of(&a->rule, a->hashed, n, a->idx.dim[1]);
    p.dprobs = (const float *)a->dprobs.data;
    p.logits = (const float *)a->logits.data;
    p.idx = (const int32_t *)a->idx.data;
    p.dloss = (const double *)a->dloss.data;
    p.load = (const double *)a->load.data;
    p.coef = a->rule.coef;
    p.dprobs_stride = a->dprobs.stride[0];
    p.logits_stride = a->logits.stride[0];
    p.dlogits_stride = a->dlogits.stride[0];
    p.rows = rows;
    p.dlogits = a->dlogits.data;
    p.balances = present(&a->dloss) && router_balances(&a->rule);
    unsigned blocks = (unsigned)router_blocks(rows, a->rule.seq);
    BY_REAL(a->dlogits.dtype, T, ROUTER_BY_EXPERTS(n, PER, WARPS, {
                LAUNCH(l, (route_back<T, PER, WARPS>), blocks, 32 * WARPS, (size_t)n * sizeof(float), p);
            }));
    return ST_OK;
}

/* ---- noise, jitter, bias --------------------------------------------------------------------- */

enum { THREADS = 256 };

__global__ void __launch_bounds__(THREADS)
    noise_kernel(const int64_t *info, float *logits, int64_t stride, int64_t rows, int64_t n, uint64_t key, int64_t seq)
{
    int64_t quads = (n + 3) / 4, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows * quads)
        return;
    int64_t t = i / quads, q = i % quads;
    double v[4];
    struct draw_place at = dropout_place(info, t, seq);
    router_normals(key, at.step, at.sample, at.pos, q, v);
    for (int j = 0; j < 4 && 4 * q + j < n; j++)
        logits[t * stride + 4 * q + j] = (float)v[j];
}

extern "C" int router_noise_cuda(struct lane *l, const struct router_noise_args *a)
{
    TRY(router_noise_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1];
    LAUNCH(l, noise_kernel, (unsigned)ceil_div(rows * ceil_div(n, 4), THREADS), THREADS, 0,
           (const int64_t *)a->info.data, (float *)a->logits.data, a->logits.stride[0], rows, n, a->key, a->seq);
    return ST_OK;
}

struct jitter_job {
    const void *x;
    void *y;
    const int64_t *info;
    int64_t x_stride, y_stride, rows, cols, seq; /* cols: groups of N elements in a row */
    uint64_t key;
    float eps;
    bool acc_y;
};

__device__ __forceinline__ float jitter_factor(float eps, uint32_t bits)
{
    return 1.0f + eps * (2.0f * (((float)bits + 0.5f) * 2.3283064365386963e-10f) - 1.0f);
}

/* N neighbouring elements for each thread: a whole number of draws, or 1. */
template <typename T, int N> __global__ void __launch_bounds__(THREADS) jitter_kernel(struct jitter_job p)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.rows * p.cols)
        return;
    int64_t t = i / p.cols, c = i % p.cols * N;
    struct draw_place at = dropout_place(p.info, t, p.seq);
    const T *x = (const T *)p.x + t * p.x_stride + c;
    T *y = (T *)p.y + t * p.y_stride + c;
    pack<T> in, old;
    if (N == 1)
        in.v[0] = *x;
    else
        in = load16(x);
    if (p.acc_y && N == 1)
        old.v[0] = *y;
    else if (p.acc_y)
        old = load16(y);
#pragma unroll
    for (int q = 0; q < N; q += 4) {
        struct philox4 r = dropout_draw(p.key, at.step, at.sample, at.pos, c + q);
        uint32_t only = c % 4 == 0 ? r.v[0] : c % 4 == 1 ? r.v[1] : c % 4 == 2 ? r.v[2] : r.v[3];
#pragma unroll
        for (int j = 0; j < 4 && q + j < N; j++) {
            float product = to_float(in.v[q + j]) * jitter_factor(p.eps, N == 1 ? only : r.v[j]);
            in.v[q + j] = from_float<T>((p.acc_y ? to_float(old.v[q + j]) : 0.0f) + product);
        }
    }
    if (N == 1)
        *y = in.v[0];
    else
        store16(y, in);
}

extern "C" int router_jitter_cuda(struct lane *l, const struct router_jitter_args *a)
{
    TRY(router_jitter_check(a, l->err));
    struct jitter_job p = {a->x.data,      a->y.data,      (const int64_t *)a->info.data,
                           a->x.stride[0], a->y.stride[0], a->x.dim[0],
                           a->x.dim[1],    a->seq,         a->key,
                           (float)a->eps,  a->acc_y};
    bool vec = aligned16(&a->x) && aligned16(&a->y);
    BY_REAL(a->x.dtype, T, {
        p.cols /= vec ? pack<T>::N : 1;
        unsigned blocks = (unsigned)ceil_div(p.rows * p.cols, THREADS);
        if (vec)
            LAUNCH(l, (jitter_kernel<T, pack<T>::N>), blocks, THREADS, 0, p);
        else
            LAUNCH(l, (jitter_kernel<T, 1>), blocks, THREADS, 0, p);
    });
    return ST_OK;
}

/* Counts are whole numbers, so their sum is exact in any order. One block. */
__global__ void __launch_bounds__(THREADS) bias_kernel(const double *tally, float *bias, int64_t n, double rate)
{
    __shared__ double part[THREADS / 32];
    double sum = 0;
    for (int64_t e = threadIdx.x; e < n; e += THREADS)
        sum += tally[e];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < THREADS / 32; w++)
        sum += part[w];
    for (int64_t e = threadIdx.x; e < n; e += THREADS)
        bias[e] = (float)((double)bias[e] + rate * router_sign(sum - tally[e] * (double)n));
}

extern "C" int router_bias_cuda(struct lane *l, const struct router_bias_args *a)
{
    TRY(router_bias_check(a, l->err));
    if (a->bias.dim[0] > 0)
        LAUNCH(l, bias_kernel, 1, THREADS, 0, (const double *)a->tally.data, (float *)a->bias.data, a->bias.dim[0],
               a->rate);
    return ST_OK;
}
