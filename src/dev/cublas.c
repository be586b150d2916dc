/* Dense products through cuBLASLt. One algorithm per shape, the library's first choice among those whose sums have a
 * fixed order, remembered; a workspace per lane, so that lanes do not share partial sums. */
#include "dev/cuda.h"
#include "dev/vendor.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

enum { WORKSPACE_BYTES = 64 << 20, MAX_PLANS = 4096 };

/* What decides the algorithm. Compared bytewise: no padding, always zeroed first. */
struct shape_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t ab, c_type, trans_a, trans_b, align_a, align_b, align_c, beta_is_zero;
};
struct blas_plan {
    struct shape_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
};
struct blas {
    void *lib;
    cublasLtHandle_t handle;
    void *workspace[CUDA_LANES];
    struct blas_plan *plan;
    int n_plans;
    size_t cap_plans;
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*destroy)(cublasLtHandle_t);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t, const void *,
                             cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                             const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType_t, uint64_t, uint64_t, int64_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*pref_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*pref_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t[], int *);
};

static int blas_status(struct err *e, cublasStatus_t code, const char *what)
{
    return code == CUBLAS_STATUS_SUCCESS ? ST_OK : err_set(e, ST_INTERNAL, "cuBLASLt: %s failed with status %d", what, (int)code);
}

static int find_functions(struct blas *b, struct err *e)
{
    const struct vendor_symbol list[] = {
        {"cublasLtCreate", (void **)&b->create},
        {"cublasLtDestroy", (void **)&b->destroy},
        {"cublasLtMatmul", (void **)&b->matmul},
        {"cublasLtMatmulDescCreate", (void **)&b->desc_create},
        {"cublasLtMatmulDescDestroy", (void **)&b->desc_destroy},
        {"cublasLtMatmulDescSetAttribute", (void **)&b->desc_set},
        {"cublasLtMatrixLayoutCreate", (void **)&b->layout_create},
        {"cublasLtMatrixLayoutDestroy", (void **)&b->layout_destroy},
        {"cublasLtMatmulPreferenceCreate", (void **)&b->pref_create},
        {"cublasLtMatmulPreferenceDestroy", (void **)&b->pref_destroy},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&b->pref_set},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&b->heuristic},
    };
    return vendor_find(b->lib, list, countof(list), e);
}

int blas_open(struct cuda_dev *c, struct err *e)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so", NULL};
    struct blas *b;
    TRY(mem_array((void **)&b, 1, sizeof *b, e));
    c->blas = b;
    if (vendor_open(&b->lib, names, e) != ST_OK)
        return err_hint(e, "cuBLAS comes with the CUDA toolkit; put its folder into LD_LIBRARY_PATH, or use run.device=cpu");
    TRY(find_functions(b, e));
    TRY(blas_status(e, b->create(&b->handle), "cublasLtCreate"));
    for (int l = 0; l < CUDA_LANES; l++)
        TRY(cuda_status(e, (int)cudaMalloc(&b->workspace[l], WORKSPACE_BYTES), "cudaMalloc of a cuBLASLt workspace"));
    return ST_OK;
}

static void plan_free(struct blas *b, struct blas_plan *p)
{
    if (p->desc != NULL)
        b->desc_destroy(p->desc);
    if (p->a != NULL)
        b->layout_destroy(p->a);
    if (p->b != NULL)
        b->layout_destroy(p->b);
    if (p->c != NULL)
        b->layout_destroy(p->c);
}

void blas_close(struct cuda_dev *c)
{
    struct blas *b = c->blas;
    if (b == NULL)
        return;
    for (int i = 0; i < b->n_plans; i++)
        plan_free(b, &b->plan[i]);
    free(b->plan);
    for (int l = 0; l < CUDA_LANES; l++)
        if (b->workspace[l] != NULL)
            cudaFree(b->workspace[l]);
    if (b->handle != NULL)
        b->destroy(b->handle);
    vendor_close(b->lib);
    free(b);
    c->blas = NULL;
}

static int32_t alignment(const void *p)
{
    uintptr_t at = (uintptr_t)p;
    int32_t a = 256;
    while (a > 1 && at % (uintptr_t)a != 0)
        a /= 2;
    return a;
}

static struct shape_key key_of(const struct blas_call *g)
{
    struct shape_key k;
    memset(&k, 0, sizeof k);
    k.m = g->m;
    k.n = g->n;
    k.k = g->k;
    k.lda = g->lda;
    k.ldb = g->ldb;
    k.ldc = g->ldc;
    k.ab = (int32_t)g->ab;
    k.c_type = (int32_t)g->c_type;
    k.trans_a = g->trans_a;
    k.trans_b = g->trans_b;
    k.align_a = alignment(g->a);
    k.align_b = alignment(g->b);
    k.align_c = alignment(g->c);
    k.beta_is_zero = g->beta == 0;
    return k;
}

static cudaDataType_t data_type(enum dtype t) { return t == DT_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

/* The library is column-major: it computes C^T = op(B)^T op(A)^T, so our B is its A. */
static int describe(struct blas *b, struct blas_plan *p, struct err *e)
{
    const struct shape_key *k = &p->key;
    cublasOperation_t first = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType_t ab = data_type((enum dtype)k->ab), ct = data_type((enum dtype)k->c_type);
    TRY(blas_status(e, b->desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor"));
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "transpose of A"));
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "transpose of B"));
    uint64_t m = (uint64_t)k->m, n = (uint64_t)k->n, kk = (uint64_t)k->k;
    TRY(blas_status(e, b->layout_create(&p->a, ab, k->trans_b ? kk : n, k->trans_b ? n : kk, k->ldb), "layout of A"));
    TRY(blas_status(e, b->layout_create(&p->b, ab, k->trans_a ? m : kk, k->trans_a ? kk : m, k->lda), "layout of B"));
    return blas_status(e, b->layout_create(&p->c, ct, n, m, k->ldc), "layout of C");
}

static int choose(struct blas *b, struct blas_plan *p, struct err *e)
{
    cublasLtMatmulPreference_t pref = NULL;
    size_t room = WORKSPACE_BYTES;
    uint32_t align[3] = {(uint32_t)p->key.align_b, (uint32_t)p->key.align_a, (uint32_t)p->key.align_c};
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* partial sums in the workspace: a fixed order */
    cublasLtMatmulHeuristicResult_t best;
    int n = 0;
    TRY(blas_status(e, b->pref_create(&pref), "preference"));
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[0], sizeof align[0]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[1], sizeof align[1]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align[2], sizeof align[2]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[2], sizeof align[2]);
    cublasStatus_t code = b->heuristic(b->handle, p->desc, p->a, p->b, p->c, p->c, pref, 1, &best, &n);
    b->pref_destroy(pref);
    if (code != CUBLAS_STATUS_SUCCESS || n == 0)
        return err_set(e, ST_UNSUPPORTED, "cuBLASLt has no algorithm for m %lld, n %lld, k %lld, strides %lld %lld %lld (status %d)",
                       (long long)p->key.m, (long long)p->key.n, (long long)p->key.k, (long long)p->key.lda, (long long)p->key.ldb,
                       (long long)p->key.ldc, (int)code);
    p->algo = best.algo;
    return ST_OK;
}

static int plan_for(struct blas *b, const struct blas_call *g, struct blas_plan **out, struct err *e)
{
    struct shape_key key = key_of(g);
    for (int i = 0; i < b->n_plans; i++)
        if (memcmp(&b->plan[i].key, &key, sizeof key) == 0) {
            *out = &b->plan[i];
            return ST_OK;
        }
    if (b->n_plans >= MAX_PLANS)
        return err_set(e, ST_INTERNAL, "more than %d different products", MAX_PLANS);
    TRY(mem_grow((void **)&b->plan, &b->cap_plans, (size_t)b->n_plans + 1, sizeof *b->plan, e));
    struct blas_plan *p = &b->plan[b->n_plans];
    *p = (struct blas_plan){.key = key};
    int st = describe(b, p, e);
    if (st == ST_OK)
        st = choose(b, p, e);
    if (st != ST_OK) {
        plan_free(b, p);
        return st;
    }
    b->n_plans++;
    *out = p;
    return ST_OK;
}

int blas_gemm(struct lane *l, const struct blas_call *g)
{
    struct blas *b = cuda_of(l)->blas;
    struct blas_plan *p = NULL;
    if (g->m == 0 || g->n == 0)
        return ST_OK;
    TRY(plan_for(b, g, &p, l->err));
    cublasStatus_t code = b->matmul(b->handle, p->desc, &g->alpha, g->b, p->a, g->a, p->b, &g->beta, g->c, p->c, g->c, p->c, &p->algo,
                                    b->workspace[l->index], WORKSPACE_BYTES, (cudaStream_t)cuda_stream(l));
    return blas_status(l->err, code, "cublasLtMatmul");
}
