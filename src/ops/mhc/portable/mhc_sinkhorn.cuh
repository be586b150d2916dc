/* Sinkhorn of one row by one thread: what the coefficient kernels and the boundary's single pass share. Private to
 * ops/mhc. */
#ifndef BRAID_OPS_MHC_SINKHORN_CUH
#define BRAID_OPS_MHC_SINKHORN_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/mhc/portable/mhc_cuda.cuh"

/* exp(z) of a logit less its row's maximum. What is cut off is MHC_S_START itself and not the GPU's expf, which may
 * differ in the last bit from the compiler's: the backward pass knows by it what was cut off. */
INLINE float start_of(float z, bool d) { return d || z > (float)MHC_S_LEAST ? expf(z) : (float)MHC_S_START; }
/* A row of gradients of what the iterations started from becomes that of the logits. */
INLINE void row_to_logits(float *g, const float *start, int n, bool d)
{
    float cut = 0;
    UNROLLED (j, n) {
        bool off = !d && start[j] <= (float)MHC_S_START;
        g[j] *= start[j];
        cut += off ? g[j] : 0.0f;
        g[j] = off ? 0.0f : g[j];
    }
    UNROLLED (j, n)
        if (!d && start[j] == 1) { /* the largest, or the first of them */
            g[j] += cut;
            cut = 0;
        }
}

/* What the iterations start from, in place of the logits. */
template <int N> INLINE void sinkhorn_start(float *m, int n, bool d)
{
    UNROLLED (i, n) {
        float most = m[i * n];
#pragma unroll
        for (int j = 1; j < n; j++)
            most = fmaxf(most, m[i * n + j]);
        UNROLLED (j, n)
            m[i * n + j] = start_of(m[i * n + j] - most, d);
    }
}

/* Divisors are sums between eps and n + eps, so the fast reciprocal (2 ulp) has no special cases to lose; the exact one
 * branches for each of them and made the iterations several times slower. */
INLINE float inverse_of(float by) { return __fdividef(1.0f, by); }

/* Element j of line i: of row i, or of column i. */
template <bool ROWS> INLINE int in_line(int n, int i, int j) { return ROWS ? i * n + j : j * n + i; }

/* Divides all lines by their sums, in place. soft: the softmax of profile D, whose eps is on the entries and not on the
 * divisor. div: what each line was divided by, or NULL. */
template <int N, bool ROWS> INLINE void divide_lines(float *m, int n, bool d, bool soft, float *div)
{
    UNROLLED (i, n) {
        float sum = 0;
        UNROLLED (j, n)
            sum += m[in_line<ROWS>(n, i, j)];
        float by = soft ? sum : d ? sum + (float)MHC_EPS : fmaxf(sum, (float)MHC_EPS);
        float inverse = inverse_of(by);
        if (div != NULL)
            div[i] = by;
        UNROLLED (j, n)
            m[in_line<ROWS>(n, i, j)] = m[in_line<ROWS>(n, i, j)] * inverse + (soft ? (float)MHC_EPS : 0.0f);
    }
}

template <int N> INLINE void sinkhorn(float *m, int n, int iterations, bool d)
{
    sinkhorn_start<N>(m, n, d);
    for (int t = 0; t < iterations; t++) {
        divide_lines<N, true>(m, n, d, d && t == 0, NULL);
        divide_lines<N, false>(m, n, d, false, NULL);
    }
}

/* g becomes the gradient of what divide_lines divided, and m what it was. */
template <int N, bool ROWS> INLINE void undo_lines(float *m, const float *div, float *g, int n, bool d, bool soft)
{
    float added = soft ? (float)MHC_EPS : 0.0f;
    UNROLLED (i, n) {
        float kappa = 0, by = div[i], inverse = inverse_of(by);
        UNROLLED (j, n)
            kappa += g[in_line<ROWS>(n, i, j)] * (m[in_line<ROWS>(n, i, j)] - added);
        if (!d && by == (float)MHC_EPS)
            kappa = 0; /* max(sum, eps) chose eps: a constant */
        UNROLLED (j, n) {
            int at = in_line<ROWS>(n, i, j);
            g[at] = (g[at] - kappa) * inverse;
            m[at] = (m[at] - added) * by;
        }
    }
}

/* Gradient of the logits in place of the gradient of the result. For 4 streams the divisors are kept and the matrix is
 * walked back by multiplying; otherwise, for want of room, every half step is recomputed from the start. */
template <int N> INLINE void sinkhorn_gradient(const float *logits, float *g, int n, int iterations, bool d)
{
    constexpr int MAX = streams<N>::MAX, KEPT = N > 0 ? 32 : 1;
    float m[MAX * MAX], div[2 * KEPT][MAX];
    UNROLLED (i, n * n)
        m[i] = logits[i];
    sinkhorn_start<N>(m, n, d);
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
            UNROLLED (i, n * n)
                m[i] = logits[i];
            sinkhorn_start<N>(m, n, d);
            for (int k = 0; k <= t; k++) {
                divide_lines<N, true>(m, n, d, d && k == 0, div[0]);
                divide_lines<N, false>(m, n, d, false, div[1]);
            }
            undo_lines<N, false>(m, div[1], g, n, d, false);
            undo_lines<N, true>(m, div[0], g, n, d, d && t == 0);
        }
    }
    /* Not the walked-back matrix: its small entries have lost digits to eps. */
    UNROLLED (i, n * n)
        m[i] = logits[i];
    sinkhorn_start<N>(m, n, d);
    UNROLLED (i, n)
        row_to_logits(g + i * n, m + i * n, n, d);
}

/* 4 streams by four lanes in a row, of which each has a row of the matrix: one thread for all of it leaves a GPU idle
 * where rows are few. A lane keeps the divisors of its row and of its column. */
INLINE float quad_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
/* As sinkhorn_start. */
INLINE void quad_start(float (&m)[4], bool d)
{
    float most = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    UNROLLED (j, 4)
        m[j] = start_of(m[j] - most, d);
}
INLINE float divisor(float sum, bool d, bool soft)
{
    return soft ? sum : d ? sum + (float)MHC_EPS : fmaxf(sum, (float)MHC_EPS);
}
/* Rows, then columns, divided by their sums. */
INLINE float2 quad_divide(float (&m)[4], int lane, bool d, bool soft)
{
    float row = divisor((m[0] + m[1]) + (m[2] + m[3]), d, soft), inverse = reciprocal_fast(row),
          added = soft ? (float)MHC_EPS : 0.0f, column = 0;
    UNROLLED (j, 4)
        m[j] = m[j] * inverse + added;
    UNROLLED (j, 4) {
        float by = divisor(quad_sum(m[j]), d, false);
        m[j] *= reciprocal_fast(by);
        column = lane == j ? by : column;
    }
    return make_float2(row, column);
}
/* The backward pass, as undo_lines. */
INLINE void quad_undo(float (&m)[4], float (&g)[4], float2 by, bool d, bool soft)
{
    float kappa = 0, added = soft ? (float)MHC_EPS : 0.0f, across = reciprocal_fast(by.y),
          inverse = reciprocal_fast(by.x);
    UNROLLED (j, 4) {
        float column = __shfl_sync(0xffffffffu, by.y, j, 4), sum = quad_sum(g[j] * m[j]);
        g[j] = (g[j] - (!d && column == (float)MHC_EPS ? 0.0f : sum)) * __shfl_sync(0xffffffffu, across, j, 4);
        m[j] = m[j] * column - added;
        kappa += g[j] * m[j];
    }
    if (!d && by.x == (float)MHC_EPS)
        kappa = 0;
    UNROLLED (j, 4) {
        g[j] = (g[j] - kappa) * inverse;
        m[j] *= by.x;
    }
}
/* z: this lane's row of logits; g: its row of the gradient of the result, which becomes that of the logits. kept: room
 * for the divisors of `room` iterations, `stride` apart; with more iterations every step is recomputed from the start.
 * All lanes of a warp come here. */
INLINE void quad_gradient(const float (&z)[4], float (&g)[4], int lane, int iterations, bool d, float2 *kept,
                          int stride, int room)
{
    float start[4] = {z[0], z[1], z[2], z[3]}, m[4];
    quad_start(start, d);
    UNROLLED (j, 4)
        m[j] = start[j];
    if (iterations <= room) {
        for (int t = 0; t < iterations; t++)
            kept[t * stride] = quad_divide(m, lane, d, d && t == 0);
        for (int t = iterations - 1; t >= 0; t--)
            quad_undo(m, g, kept[t * stride], d, d && t == 0);
    } else {
        for (int t = iterations - 1; t >= 0; t--) {
            float2 by = make_float2(0, 0);
            UNROLLED (j, 4)
                m[j] = start[j];
            for (int k = 0; k <= t; k++)
                by = quad_divide(m, lane, d, d && k == 0);
            quad_undo(m, g, by, d, d && t == 0);
        }
    }
    /* Not the walked-back matrix: its small entries have lost digits to eps. */
    row_to_logits(g, start, 4, d);
}

#endif
