/* One matrix product on all threads. OpenBLAS shares its packed panels between threads and waits for
 * them; cutting C into one range of rows (or columns) per thread and calling it single-threaded is
 * 8 to 20 % faster at the shapes of a layer. No sum is split, so an element does not depend on the cut.
 *
 * Large products are computed by gemm/sgemm_cpu.c instead, another 5 to 13 % faster at those shapes;
 * OpenBLAS keeps small ones and processors without wide vectors. */
#ifndef BRAID_OPS_CPU_GEMM_H
#define BRAID_OPS_CPU_GEMM_H

#include "base/mem.h"
#include "ops/ops_cpu_int.h"

#include <cblas.h>
#include <omp.h>

/* Row-major: c[m, n] = alpha * op(a) * op(b) + beta * c. Sizes fit an int. */
struct sgemm {
    bool trans_a, trans_b;
    int64_t m, n, k;
    const float *a, *b;
    int64_t lda, ldb, ldc;
    float *c;
    float alpha, beta;
};

#if defined(__AVX2__) && defined(__FMA__)
#define SGEMM_TILES 1
#else
#define SGEMM_TILES 0
#endif
void CPU_NAME(sgemm_tiles)(const struct sgemm *g);

/* Whether tiles are faster than OpenBLAS: for whole products only, never for one thread's part, so that
 * the choice, and with it the bits, do not depend on the number of threads. OpenBLAS has special kernels
 * for small products. Tiles fill the last columns up to 32. */
static inline bool sgemm_prefers_tiles(const struct sgemm *g)
{
    enum { LEAST = 64, LEAST_PRODUCT = 1 << 21, COLS = 32 };
    bool large = g->m >= LEAST && g->n >= LEAST && g->k >= LEAST && g->m * g->n >= ceil_div(LEAST_PRODUCT, g->k);
    return large && round_up(g->n, COLS) - g->n <= g->n / 16;
}

static inline void sgemm_blas(const struct sgemm *g)
{
    cblas_sgemm(CblasRowMajor, g->trans_a ? CblasTrans : CblasNoTrans, g->trans_b ? CblasTrans : CblasNoTrans,
                (blasint)g->m, (blasint)g->n, (blasint)g->k, g->alpha, g->a, (blasint)g->lda, g->b, (blasint)g->ldb,
                g->beta, g->c, (blasint)g->ldc);
}

static inline void sgemm_one(const struct sgemm *g, bool tiles)
{
    if (tiles)
        CPU_NAME(sgemm_tiles)(g);
    else
        sgemm_blas(g);
}

static inline struct sgemm sgemm_rows(struct sgemm g, int64_t first, int64_t n)
{
    g.a += first * (g.trans_a ? 1 : g.lda);
    g.c += first * g.ldc;
    g.m = n;
    return g;
}

static inline struct sgemm sgemm_cols(struct sgemm g, int64_t first, int64_t n)
{
    g.b += first * (g.trans_b ? g.ldb : 1);
    g.c += first;
    g.n = n;
    return g;
}

static inline void sgemm(const struct sgemm *g)
{
    enum { ALIGN = 16, LEAST = 32 }; /* rows or columns of a cut: whole kernel tiles, worth a thread */
    int parts = omp_get_max_threads();
    bool tiles = SGEMM_TILES && sgemm_prefers_tiles(g);
    bool by_rows = g->m >= (int64_t)LEAST * parts, by_cols = g->n >= (int64_t)LEAST * parts;
    if (parts == 1 || omp_in_parallel() || (!by_rows && !by_cols) || g->m * g->n * g->k < 1 << 18) {
        sgemm_one(g, tiles);
        return;
    }
    int64_t all = by_rows ? g->m : g->n, each = round_up(ceil_div(all, parts), ALIGN);
#pragma omp parallel for schedule(static, 1) num_threads(parts)
    for (int p = 0; p < parts; p++) {
        int64_t first = p * each, n = min_i64(each, all - first);
        struct sgemm part = by_rows ? sgemm_rows(*g, first, n) : sgemm_cols(*g, first, n);
        if (n > 0)
            sgemm_one(&part, tiles);
    }
}

#endif
