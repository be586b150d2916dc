/* Sinkhorn of one row by one thread: what the coefficient kernels and the boundary's single pass share. Private to ops/mhc. */
#ifndef BRAID_OPS_MHC_SINKHORN_CUH
#define BRAID_OPS_MHC_SINKHORN_CUH

#include "ops/mhc/mhc_cuda.cuh"

/* exp(logit - row max) in place. */
template <int N> __device__ __forceinline__ void sinkhorn_start(float *m, int n)
{
#pragma unroll
    for (int i = 0; i < n; i++) {
        float most = m[i * n];
#pragma unroll
        for (int j = 1; j < n; j++)
            most = fmaxf(most, m[i * n + j]);
#pragma unroll
        for (int j = 0; j < n; j++)
            m[i * n + j] = expf(m[i * n + j] - most);
    }
}

/* Divisors are sums between eps and n + eps, so the fast reciprocal (2 ulp) has no special cases to lose; the exact one
 * branches for each of them and made the iterations several times slower. */
__device__ __forceinline__ float inverse_of(float by) { return __fdividef(1.0f, by); }

/* Element j of line i: of row i, or of column i. */
template <bool ROWS> __device__ __forceinline__ int in_line(int n, int i, int j) { return ROWS ? i * n + j : j * n + i; }

/* Divides all lines by their sums, in place. soft: the softmax of profile D, whose eps is on the entries and not on the
 * divisor. div: what each line was divided by, or NULL. */
template <int N, bool ROWS> __device__ __forceinline__ void divide_lines(float *m, int n, bool d, bool soft, float *div)
{
#pragma unroll
    for (int i = 0; i < n; i++) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < n; j++)
            sum += m[in_line<ROWS>(n, i, j)];
        float by = soft ? sum : d ? sum + (float)MHC_EPS : fmaxf(sum, (float)MHC_EPS);
        float inverse = inverse_of(by);
        if (div != NULL)
            div[i] = by;
#pragma unroll
        for (int j = 0; j < n; j++)
            m[in_line<ROWS>(n, i, j)] = m[in_line<ROWS>(n, i, j)] * inverse + (soft ? (float)MHC_EPS : 0.0f);
    }
}

template <int N> __device__ __forceinline__ void sinkhorn(float *m, int n, int iterations, bool d)
{
    sinkhorn_start<N>(m, n);
    for (int t = 0; t < iterations; t++) {
        divide_lines<N, true>(m, n, d, d && t == 0, NULL);
        divide_lines<N, false>(m, n, d, false, NULL);
    }
}

/* g becomes the gradient of what divide_lines divided, and m what it was. */
template <int N, bool ROWS> __device__ __forceinline__ void undo_lines(float *m, const float *div, float *g, int n, bool d, bool soft)
{
    float added = soft ? (float)MHC_EPS : 0.0f;
#pragma unroll
    for (int i = 0; i < n; i++) {
        float kappa = 0, by = div[i], inverse = inverse_of(by);
#pragma unroll
        for (int j = 0; j < n; j++)
            kappa += g[in_line<ROWS>(n, i, j)] * (m[in_line<ROWS>(n, i, j)] - added);
        if (!d && by == (float)MHC_EPS)
            kappa = 0; /* max(sum, eps) chose eps: a constant */
#pragma unroll
        for (int j = 0; j < n; j++) {
            int at = in_line<ROWS>(n, i, j);
            g[at] = (g[at] - kappa) * inverse;
            m[at] = (m[at] - added) * by;
        }
    }
}

/* Gradient of the logits in place of the gradient of the result. For 4 streams the divisors are kept and the matrix is
 * walked back by multiplying; otherwise, for want of room, every half step is made again from the start. */
template <int N> __device__ __forceinline__ void sinkhorn_gradient(const float *logits, float *g, int n, int iterations, bool d)
{
    constexpr int MAX = streams<N>::MAX, KEPT = N > 0 ? 32 : 1;
    float m[MAX * MAX], div[2 * KEPT][MAX];
#pragma unroll
    for (int i = 0; i < n * n; i++)
        m[i] = logits[i];
    sinkhorn_start<N>(m, n);
    if (N > 0 && iterations <= KEPT) {
        for (int t = 0; t < iterations; t++) {
            divide_lines<N, true>(m, n, d, d && t == 0, div[2 * t]);
            divide_lines<N, false>(m, n, d, false, div[2 * t + 1]);
        }
        for (int t = iterations - 1; t >= 0; t--) {
            undo_lines<N, false>(m, div[2 * t + 1], g, n, d, false);
            undo_lines<N, true>(m, div[2 * t], g, n, d, d && t == 0);
        }
    } else {
        for (int t = iterations - 1; t >= 0; t--) {
#pragma unroll
            for (int i = 0; i < n * n; i++)
                m[i] = logits[i];
            sinkhorn_start<N>(m, n);
            for (int k = 0; k <= t; k++) {
                divide_lines<N, true>(m, n, d, d && k == 0, div[0]);
                divide_lines<N, false>(m, n, d, false, div[1]);
            }
            undo_lines<N, false>(m, div[1], g, n, d, false);
            undo_lines<N, true>(m, div[0], g, n, d, d && t == 0);
        }
    }
    /* Not the walked-back matrix: its small entries have lost digits to eps. */
#pragma unroll
    for (int i = 0; i < n * n; i++)
        m[i] = logits[i];
    sinkhorn_start<N>(m, n);
#pragma unroll
    for (int i = 0; i < n * n; i++)
        g[i] *= m[i];
}

/* 4 streams, in the boundary: gradient of the logits q p scale + beta, from up, that of the result (NULL: zeros). */
__device__ __forceinline__ void res_gradient(const float *p, float q, float scale, const float *beta, const float *up, float (&g)[16], int iterations, bool d)
{
    float z[16];
#pragma unroll
    for (int k = 0; k < 16; k++)
        g[k] = up == NULL ? 0.0f : up[k];
    if (up == NULL)
        return;
#pragma unroll
    for (int k = 0; k < 16; k++)
        z[k] = q * p[k] * scale + beta[k];
    sinkhorn_gradient<4>(z, g, 4, iterations, d);
}

#endif
