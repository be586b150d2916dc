/* gmm8 on the GPU for those beside it (ops/expert8): jobs of the fast kernels from arguments, and the plain kernel. */
#ifndef BRAID_OPS_GMM8_CUDA_CUH
#define BRAID_OPS_GMM8_CUDA_CUH

#include "ops/gmm8/gmm8.h"
#include "ops/gmm8/gmm8_tma.cuh"
#include "ops/quantise/quantise.h"

/* Operands and scales of rows x by matrices w, across columns of the result. *fits false: the scales are not in the
 * layout of the fast kernels. */
static inline struct gmm8_job gmm8_job_of(const struct tensor *x, const struct tensor *xs, const struct tensor *w,
                                          const struct tensor *ws, const struct tensor *offset, int64_t block,
                                          bool square, bool turned, int64_t across, bool *fits)
{
    struct gmm8_job p = {};
    struct gmm_job *g = &p.j.g;
    int64_t k = x->dim[1];
    g->a = x->data;
    g->lda = k;
    g->b = w->data;
    g->ldb = w->dim[1];
    g->offset = (const int32_t *)offset->data;
    g->experts = (int)(offset->dim[0] - 1);
    g->rows = (int)x->dim[0];
    g->across = (int)across;
    g->depth = (int)k;
    p.a_type = x->dtype;
    p.as = (const float *)xs->data;
    p.bs = (const float *)ws->data;
    p.turned = turned;
    p.b_cols = (int)w->dim[1];
    if (block == 128) {
        p.as_row = p.bs_k = 1;
        p.as_stride = f8_scale_stride(x->dim[0], k, block, false);
        p.bs_stride = f8_scale_stride(w->dim[0], w->dim[1], block, true);
    }
    int64_t most = max_i64(max_i64(x->dim[0], w->dim[0]), max_i64(w->dim[1], across));
    *fits = ((block == 128 && square) || block == 0) && most <= INT32_MAX / 2 && (uintptr_t)x->data % 16 == 0 &&
            (uintptr_t)w->data % 16 == 0;
    return p;
}

#endif
