/* headmm is one matrix product for each head on every device; this is the list of them. */
#ifndef BRAID_OPS_HEADMM_INT_H
#define BRAID_OPS_HEADMM_INT_H

#include "ops/check.h"
#include "ops/gemm/gemm.h"
#include "ops/headmm/headmm.h"

typedef int (*headmm_gemm)(struct lane *, const struct gemm_args *);

/* Head h of x, y or their gradients: [T, width]; of w or dw: [rows, cols]. */
static inline struct tensor headmm_rows(const struct tensor *t, int64_t h)
{
    struct tensor v =
        tensor_2d((char *)t->data + h * t->stride[1] * (int64_t)dtype_bytes(t->dtype), t->dtype, t->dim[0], t->dim[2]);
    v.stride[0] = t->stride[0];
    return v;
}
static inline struct tensor headmm_matrix(const struct tensor *t, int64_t h)
{
    struct tensor v =
        tensor_2d((char *)t->data + h * t->stride[0] * (int64_t)dtype_bytes(t->dtype), t->dtype, t->dim[1], t->dim[2]);
    v.stride[0] = t->stride[1];
    return v;
}

static inline int headmm_forward(struct lane *l, const struct headmm_fwd_args *a, headmm_gemm gemm)
{
    for (int64_t h = 0; h < a->x.dim[1]; h++) {
        struct gemm_args g = {0};
        g.a = headmm_rows(&a->x, h);
        g.b = headmm_matrix(&a->w, h);
        g.c = headmm_rows(&a->y, h);
        g.trans_b = a->trans;
        g.alpha = 1;
        TRY(gemm(l, &g));
    }
    return ST_OK;
}

static inline int headmm_backward(struct lane *l, const struct headmm_bwd_args *a, headmm_gemm gemm)
{
    for (int64_t h = 0; h < a->x.dim[1]; h++) {
        struct tensor x = headmm_rows(&a->x, h), dy = headmm_rows(&a->dy, h);
        struct gemm_args g = {0};
        g.alpha = 1;
        g.a = dy;
        g.b = headmm_matrix(&a->w, h);
        g.trans_b = !a->trans;
        if (present(&a->dx)) {
            g.c = headmm_rows(&a->dx, h);
            TRY(gemm(l, &g));
        }
        if (!present(&a->dw))
            continue;
        g.a = a->trans ? dy : x;
        g.b = a->trans ? x : dy;
        g.c = headmm_matrix(&a->dw, h);
        g.trans_a = true;
        g.trans_b = false;
        g.acc_c = a->acc_dw;
        TRY(gemm(l, &g));
    }
    return ST_OK;
}

static inline int headmm_weight(struct lane *l, const struct headmm_dw_args *a, headmm_gemm gemm)
{
    for (int64_t h = 0; h < a->x.dim[1]; h++) {
        struct tensor dw = headmm_matrix(&a->dw, h);
        struct gemm_args g = {0};
        g.alpha = 1;
        g.trans_a = true;
        g.acc_c = a->acc_dw;
        g.a = headmm_rows(&a->x, h);
        g.b = headmm_rows(&a->dy, h);
        g.c = tensor_rows(&dw, 0, a->x.dim[2]);
        TRY(gemm(l, &g));
        g.a = headmm_rows(&a->x2, h);
        g.b = headmm_rows(&a->dy2, h);
        g.c = tensor_rows(&dw, a->x.dim[2], a->x2.dim[2]);
        TRY(gemm(l, &g));
    }
    return ST_OK;
}

#endif
