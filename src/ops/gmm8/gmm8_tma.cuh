/* The products of experts in FP8 on Hopper, as gmm8.cu and expert8.cu ask for them. The walk over tiles, the ring of
 * stages and the ways results leave are those of ops/gmm (gmm_tma.cuh); gmm8_feed.cuh has what codes need: all operands
 * K-major, a stage 128 deep, and scales. */
#ifndef BRAID_OPS_GMM8_TMA_CUH
#define BRAID_OPS_GMM8_TMA_CUH

#include "ops/gmm/gmm_tma.cuh"

/*          a                    b                                            c                 depth
 * STORE    x [row][k]           B_e [n][k], stacked or side by side (turned)  y [row][n]        k
 * ACT      the same             rows [gate | up]                              codes q, pre      k
 * DACT     dz [row][k]          B_e [f][k]                                    dpre, act         k
 * SUMS     dy^T [out][row]      x^T [in][row]                                 dw_e [out][in]    rows of the expert
 * In gmm_job down, across and depth are as there, lda and ldb bytes of a row of codes. */
struct gmm8_job {
    struct gmm_tma_job j;
    enum dtype a_type;            /* b is E4M3 */
    const float *as, *bs;         /* inverse scales as ops/quantise lays them out */
    int64_t as_stride, bs_stride; /* between blocks of k of a and (SUMS) b; between blocks of 128 rows of b */
    int as_row, bs_k;             /* 1, or 0 where a tensor has one scale, with strides of 0 */
    int b_cols;                   /* STORE, ACT, DACT: columns of all of b */
    bool turned;                  /* B_e are side by side: columns e * depth .. of rows that all share */
    uint8_t *q;                   /* ACT: codes [rows, f] of the activation, and their scales */
    float *qs;
    int64_t qs_stride;
};

/* Whether these kernels take the job: sizes in blocks of 128, rows in multiples of 16 (SUMS) or 4 (ACT); a scale for
 * 128 numbers or one for all, and bf16 results at 16 bytes, is for the caller to know. */
extern "C" bool gmm8_tma_fits(const struct lane *l, const struct gmm8_job *p);
extern "C" int gmm8_tma(struct lane *l, const struct gmm8_job *p);

#endif
