/* In place of dev/cublas.c and dev/cudnn.c: plain products with fp32 sums; no cuDNN, so attention takes braid's own
 * kernels. */
#include "dev/cuda.h"

#include <cuda_runtime_api.h>
#include <string.h>

int blas_open(struct cuda_dev *c, int64_t workspace, struct err *e)
{
    (void)workspace;
    (void)e;
    c->blas = NULL;
    return ST_OK;
}
void blas_close(struct cuda_dev *c) { (void)c; }

static float value_at(const void *p, enum dtype t, int64_t i)
{
    if (t == DT_F32)
        return ((const float *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}
static void set_at(void *p, enum dtype t, int64_t i, float v)
{
    uint32_t bits;
    if (t == DT_F32) {
        ((float *)p)[i] = v;
        return;
    }
    memcpy(&bits, &v, sizeof bits);
    bits = v != v ? 0x7fffu << 16 : bits + 0x7fff + (bits >> 16 & 1);
    ((uint16_t *)p)[i] = (uint16_t)(bits >> 16);
}

static cudaError_t multiply(void *argument)
{
    const struct blas_call *g = argument;
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) {
            double sum = 0;
            for (int64_t k = 0; k < g->k; k++)
                sum += (double)value_at(g->a, g->ab, g->trans_a ? k * g->lda + i : i * g->lda + k) *
                       (double)value_at(g->b, g->ab, g->trans_b ? j * g->ldb + k : k * g->ldb + j);
            float old = g->beta == 0 ? 0.0f : g->beta * value_at(g->c, g->c_type, i * g->ldc + j);
            set_at(g->c, g->c_type, i * g->ldc + j, g->alpha * (float)sum + old);
        }
    return cudaSuccess;
}
int blas_gemm(struct lane *l, const struct blas_call *g)
{
    return cuda_status(l->err, (int)emu_submit(multiply, g, sizeof *g), "a product");
}
/* Codes take braid's own kernel. */
int blas_gemm8(struct lane *l, const struct blas_call *g, bool *done)
{
    (void)l;
    (void)g;
    *done = false;
    return ST_OK;
}

int dnn_open(struct cuda_dev *c, struct err *e)
{
    (void)e;
    c->dnn = NULL;
    return ST_OK;
}
void dnn_close(struct cuda_dev *c) { (void)c; }
int64_t dnn_attention_fwd_bytes(const struct dnn_attention *a)
{
    (void)a;
    return 0;
}
int64_t dnn_attention_bwd_bytes(const struct dnn_attention *a)
{
    (void)a;
    return 0;
}
int dnn_attention_fwd(struct lane *l, const struct dnn_attention *a, bool *done)
{
    (void)l;
    (void)a;
    *done = false;
    return ST_OK;
}
int dnn_attention_bwd(struct lane *l, const struct dnn_attention *a, bool *done)
{
    (void)l;
    (void)a;
    *done = false;
    return ST_OK;
}
