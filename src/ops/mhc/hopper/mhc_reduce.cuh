/* What the kernels of the boundary's backward pass share: records of rows, and what runs before and after it. Private
 * to ops/mhc. */
#ifndef BRAID_OPS_MHC_REDUCE_CUH
#define BRAID_OPS_MHC_REDUCE_CUH

#include "ops/mhc/hopper/mhc_pass.cuh"

enum {
    MHC_RECORD = 12 + CL_LOGITS,    /* words of a row's record; the last 4 keep rows in different banks */
    MHC_REDUCE_DOTS = 2 * CL_N,     /* sums of a row: <y_i, u>, then <y_i, a> */
    MHC_MIXES = CL_N * CL_N + CL_N, /* sums for dpost, dres */
    MHC_SPARE = 4,                  /* blocks of the pass, for multiprocessors that it leaves idle */
    MHC_FRAG = 32 * 24,             /* bytes of 16 channels of w as an operand: depth 16, then depth 8 */
};
/* Words of a record: pre / rms; 1 / rms, m, scale of y, unused; then dp as bf16 [2][24], high and low. With weights pre
 * / rms the aggregate is the normed one, a, and the stream's gradient through it is pre / rms (dh gain - m a). */
enum { REC_PRE = 0, REC_RSTD = 4, REC_M, REC_SCALE, REC_DP = 8 };

/* Channel 8 piece + 2 t + e of a block of 64 is row g + 8 e of tile t, piece = piece_of(g): so that the lanes of a
 * quarter warp find their channels in different banks. */
__host__ __device__ __forceinline__ int piece_of(int g) { return g >> 1 | (g & 1) << 2; }

INLINE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
/* The sum of this element of all parts, in order. */
INLINE float sum_of(const float *part, int parts, int64_t stride)
{
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < parts; i++)
        sum += part[i * stride];
    return sum;
}

/* ---- rows: mhc_records.cu -------------------------------------------------------------------- */

/* All of the records but m, scale and dp of pre, of which the reduction pass comes first; dz but for pre. And w as the
 * left operand of dp w. */
int mhc_prepare_rows(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records, uint4 *operands,
                     struct view dz);
/* dz_ready [rows, N] or NULL: where mhc_prepare_rows left dz, if not in its place. */
int mhc_close_records(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records, const float *dots,
                      const float *dz_ready);
/* dcoef_in from mixes [ranks, rows, MHC_MIXES]; products' rows of pre from dw_parts [lines, 4, k], and its last row
 * from row_parts [MHC_SPARE, 2, N]. */
struct mhc_after_pass {
    const float *mixes, *dw_parts; /* dw_parts may be NULL: no products */
    const double *row_parts;
    struct view dcoef, products;
    int64_t rows, k;
    int ranks, lines;
};
int mhc_finish_pass(struct lane *l, const struct mhc_after_pass *a);

/* ---- the reduction pass: mhc_reduce.cu ------------------------------------------------------- */

/* dots [ranks, rows, MHC_REDUCE_DOTS] by blocks of 256 channels; dgain [lines, d] or NULL; dw [lines, 20, K] or NULL.
 * records: pre, rstd, and dp with zeros for pre. */
struct mhc_reduce_args {
    struct tensor y, dh;
    const float *records;
    float *dots, *dgain, *dw;
    struct norm_args norm;
};
int64_t mhc_reduce_lines(int64_t rows, int64_t d);
int mhc_reduce(struct lane *l, const struct mhc_reduce_args *a);

#endif
