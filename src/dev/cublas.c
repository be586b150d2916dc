/* Dense products through cuBLASLt. One algorithm per shape, the library's first choice among those whose sums have a
 * fixed order, remembered; a workspace per lane, which the device owns.
 *
 * Another algorithm may be faster, and gives other bits. Where the run allows that (dev_gpu.fast), or names a file that
 * keeps the choices (dev_gpu.gemm_table), the library's first few are timed when a shape is first met, on its own
 * operands and with the result put aside. With a file, shapes found in it are not timed: runs with the same file give
 * the same bits. */
#include "dev/cuda.h"
#include "dev/vendor.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PLANS = 4096, MAX_CANDIDATES = 8 };

/* Timing: only products worth it, a bounded time for all of them, and only a gain that is more than noise. */
#define TUNE_LEAST_FLOPS 1e10
#define TUNE_SECONDS 4.0
#define TUNE_GAIN 0.985

/* What decides the algorithm. Compared bytewise: no padding, always zeroed first. */
struct shape_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t ab, c_type, trans_a, trans_b, align_a, align_b, align_c, beta_is_zero;
    int32_t b_type, a_scale, b_scale, unused; /* of FP8 codes */
};
struct blas_plan {
    struct shape_key key;
    bool refused; /* codes: the library has no kernel for them */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
};
/* A line of the file of choices. */
struct table_row {
    struct shape_key key;
    cublasLtMatmulAlgo_t algo;
};
struct blas {
    void *lib;
    cublasLtHandle_t handle;
    bool tunes;
    double tuned_seconds;
    cudaEvent_t begin, end;
    FILE *table; /* NULL: choices are not kept */
    struct table_row *row;
    int n_rows;
    size_t cap_rows;
    int64_t workspace; /* bytes */
    int32_t sms;       /* multiprocessors that a product may fill; 0 = all */
    struct blas_plan *plan;
    int n_plans;
    size_t cap_plans;
    size_t (*version)(void);
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*destroy)(cublasLtHandle_t);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t,
                             const void *, cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t,
                             void *, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *, size_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType_t, uint64_t, uint64_t, int64_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*pref_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*pref_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t[], int *);
};

static int blas_status(struct err *e, cublasStatus_t code, const char *what)
{
    return code == CUBLAS_STATUS_SUCCESS
               ? ST_OK
               : err_set(e, ST_INTERNAL, "cuBLASLt: %s failed with status %d", what, (int)code);
}

static int find_functions(struct blas *b, struct err *e)
{
    const struct vendor_symbol list[] = {
        {"cublasLtGetVersion", (void **)&b->version},
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

/* ---- the file of choices: a line that names GPU and library, then a line for each shape ------ */

enum { KEY_NUMBERS = 17 };

static void key_numbers(const struct shape_key *k, int64_t n[KEY_NUMBERS])
{
    const int64_t all[KEY_NUMBERS] = {
        k->m,       k->n,       k->k,       k->lda,     k->ldb,          k->ldc,    k->ab,      k->c_type, k->trans_a,
        k->trans_b, k->align_a, k->align_b, k->align_c, k->beta_is_zero, k->b_type, k->a_scale, k->b_scale};
    memcpy(n, all, sizeof all);
}

static void key_from(struct shape_key *k, const int64_t n[KEY_NUMBERS])
{
    memset(k, 0, sizeof *k);
    int64_t *wide[] = {&k->m, &k->n, &k->k, &k->lda, &k->ldb, &k->ldc};
    int32_t *narrow[] = {&k->ab,      &k->c_type,       &k->trans_a, &k->trans_b, &k->align_a, &k->align_b,
                         &k->align_c, &k->beta_is_zero, &k->b_type,  &k->a_scale, &k->b_scale};
    for (int i = 0; i < KEY_NUMBERS; i++)
        if (i < countof(wide))
            *wide[i] = n[i];
        else
            *narrow[i - countof(wide)] = (int32_t)n[i];
}

static bool read_row(const char *line, struct table_row *row)
{
    int64_t n[KEY_NUMBERS];
    int used = 0;
    unsigned char *bytes = (unsigned char *)&row->algo;
    for (int i = 0; i < KEY_NUMBERS; i++, line += used) {
        long long v;
        if (sscanf(line, "%lld%n", &v, &used) != 1)
            return false;
        n[i] = v;
    }
    key_from(&row->key, n);
    while (*line == ' ')
        line++;
    for (size_t i = 0; i < sizeof row->algo; i++, line += 2) {
        unsigned v;
        if (sscanf(line, "%2x", &v) != 1)
            return false;
        bytes[i] = (unsigned char)v;
    }
    return true;
}

static int add_row(struct blas *b, const struct table_row *row, struct err *e)
{
    TRY(mem_grow((void **)&b->row, &b->cap_rows, (size_t)b->n_rows + 1, sizeof *b->row, e));
    b->row[b->n_rows++] = *row;
    return ST_OK;
}

/* us: of this algorithm, and of the library's first choice; for readers of the file. */
static int write_row(struct blas *b, const struct table_row *row, double us, double first_us, struct err *e)
{
    int64_t n[KEY_NUMBERS];
    const unsigned char *bytes = (const unsigned char *)&row->algo;
    key_numbers(&row->key, n);
    for (int i = 0; i < KEY_NUMBERS; i++)
        fprintf(b->table, "%lld ", (long long)n[i]);
    for (size_t i = 0; i < sizeof row->algo; i++)
        fprintf(b->table, "%02x", bytes[i]);
    fprintf(b->table, " %.1f us, first choice %.1f us\n", us, first_us);
    return fflush(b->table) == 0 ? ST_OK : err_set(e, ST_IO, "gpu.gemm_table: cannot write: %s", strerror(errno));
}

static int read_table(struct blas *b, const char *path, const char *head, struct err *e)
{
    char line[1024];
    if (fgets(line, sizeof line, b->table) == NULL) { /* new */
        fputs(head, b->table);
        return fflush(b->table) == 0 ? ST_OK : err_set(e, ST_IO, "%s: cannot write: %s", path, strerror(errno));
    }
    if (strcmp(line, head) != 0) {
        err_set(e, ST_INVALID, "%s: choices for %.200s cannot be used here: %.200s", path, line, head);
        return err_hint(e, "give gpu.gemm_table another file, which will be filled");
    }
    for (int n = 2; fgets(line, sizeof line, b->table) != NULL; n++) {
        struct table_row row;
        if (!read_row(line, &row))
            return err_set(e, ST_INVALID, "%s:%d: not a product and its algorithm", path, n);
        TRY(add_row(b, &row, e));
    }
    return ST_OK;
}

static int open_table(struct blas *b, const struct cuda_dev *c, struct err *e)
{
    const char *path = c->want.gemm_table;
    char head[256];
    b->tunes = c->want.fast;
    if (path == NULL || path[0] == '\0')
        return ST_OK;
    b->tunes = true;
    snprintf(head, sizeof head, "braid products 2, %s, %d SMs, cuBLASLt %zu\n", c->gpu_name, c->sm_budget,
             b->version());
    b->table = fopen(path, "a+");
    if (b->table == NULL)
        return err_set(e, ST_IO, "gpu.gemm_table: cannot open %s: %s", path, strerror(errno));
    rewind(b->table);
    return read_table(b, path, head, e);
}

int blas_open(struct cuda_dev *c, int64_t workspace, struct err *e)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so", NULL};
    struct blas *b;
    TRY(mem_array((void **)&b, 1, sizeof *b, e));
    c->blas = b;
    b->workspace = workspace;
    b->sms = c->sm_budget < c->sm_count ? c->sm_budget : 0;
    if (vendor_open(&b->lib, names, e) != ST_OK)
        return err_hint(
            e, "cuBLAS comes with the CUDA toolkit; put its folder into LD_LIBRARY_PATH, or use run.device=cpu");
    TRY(find_functions(b, e));
    TRY(blas_status(e, b->create(&b->handle), "cublasLtCreate"));
    TRY(cuda_status(e, (int)cudaEventCreate(&b->begin), "cudaEventCreate"));
    TRY(cuda_status(e, (int)cudaEventCreate(&b->end), "cudaEventCreate"));
    return open_table(b, c, e);
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
    free(b->row);
    if (b->table != NULL)
        fclose(b->table);
    if (b->begin != NULL)
        cudaEventDestroy(b->begin);
    if (b->end != NULL)
        cudaEventDestroy(b->end);
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
    k.b_type = (int32_t)g->b_type;
    k.a_scale = (int32_t)g->a_scale;
    k.b_scale = (int32_t)g->b_scale;
    return k;
}

static cudaDataType_t data_type(enum dtype t)
{
    return t == DT_BF16      ? CUDA_R_16BF
           : t == DT_F8_E4M3 ? CUDA_R_8F_E4M3
           : t == DT_F8_E5M2 ? CUDA_R_8F_E5M2
                             : CUDA_R_32F;
}

/* How the scales of codes lie; which of them is said before each call (set_scales). */
static int describe_scales(const struct blas *b, const struct blas_plan *p, struct err *e)
{
    static const int32_t mode[] = {[BLAS_SCALE_TENSOR] = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
                                   [BLAS_SCALE_ROWS] = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                                   [BLAS_SCALE_SQUARE] = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};
    const int32_t first = mode[p->key.b_scale], second = mode[p->key.a_scale];
    if (p->key.a_scale == BLAS_SCALE_NONE)
        return ST_OK;
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &first, sizeof first),
                    "scale mode of A"));
    return blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &second, sizeof second),
                       "scale mode of B");
}

static int set_scales(const struct blas *b, const struct blas_plan *p, const struct blas_call *g, struct err *e)
{
    if (p->key.a_scale == BLAS_SCALE_NONE)
        return ST_OK;
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &g->b_scales, sizeof g->b_scales),
                    "scales of A"));
    return blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &g->a_scales, sizeof g->a_scales),
                       "scales of B");
}

/* The library is column-major: it computes C^T = op(B)^T op(A)^T, so our B is its A. */
static int describe(struct blas *b, struct blas_plan *p, struct err *e)
{
    const struct shape_key *k = &p->key;
    cublasOperation_t first = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cudaDataType_t ab = data_type((enum dtype)k->ab), ct = data_type((enum dtype)k->c_type);
    cudaDataType_t b_type = k->b_type == DT_NONE ? ab : data_type((enum dtype)k->b_type);
    TRY(blas_status(e, b->desc_create(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor"));
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "transpose of A"));
    TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "transpose of B"));
    if (b->sms > 0)
        TRY(blas_status(e, b->desc_set(p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &b->sms, sizeof b->sms),
                        "number of multiprocessors"));
    TRY(describe_scales(b, p, e));
    uint64_t m = (uint64_t)k->m, n = (uint64_t)k->n, kk = (uint64_t)k->k;
    TRY(blas_status(e, b->layout_create(&p->a, b_type, k->trans_b ? kk : n, k->trans_b ? n : kk, k->ldb),
                    "layout of A"));
    TRY(blas_status(e, b->layout_create(&p->b, ab, k->trans_a ? m : kk, k->trans_a ? kk : m, k->lda), "layout of B"));
    return blas_status(e, b->layout_create(&p->c, ct, n, m, k->ldc), "layout of C");
}

/* What the library proposes for a shape, best first. */
struct candidates {
    cublasLtMatmulHeuristicResult_t list[MAX_CANDIDATES];
    int n;
};

static int propose(struct blas *b, const struct blas_plan *p, int most, struct candidates *out, struct err *e)
{
    cublasLtMatmulPreference_t pref = NULL;
    size_t room = (size_t)b->workspace;
    uint32_t align[3] = {(uint32_t)p->key.align_b, (uint32_t)p->key.align_a, (uint32_t)p->key.align_c};
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* partial sums in the workspace: a fixed order */
    out->n = 0;
    TRY(blas_status(e, b->pref_create(&pref), "preference"));
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[0], sizeof align[0]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[1], sizeof align[1]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align[2], sizeof align[2]);
    b->pref_set(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[2], sizeof align[2]);
    cublasStatus_t code = b->heuristic(b->handle, p->desc, p->a, p->b, p->c, p->c, pref, most, out->list, &out->n);
    b->pref_destroy(pref);
    if (code != CUBLAS_STATUS_SUCCESS || out->n == 0)
        return err_set(e, ST_UNSUPPORTED,
                       "cuBLASLt has no algorithm for m %lld, n %lld, k %lld, strides %lld %lld %lld (status %d)",
                       (long long)p->key.m, (long long)p->key.n, (long long)p->key.k, (long long)p->key.lda,
                       (long long)p->key.ldb, (long long)p->key.ldc, (int)code);
    return ST_OK;
}

/* ---- timing ---------------------------------------------------------------------------------- */

static cublasStatus_t multiply(const struct blas *b, const struct blas_plan *p, const cublasLtMatmulAlgo_t *algo,
                               const struct blas_call *g, void *to, const struct lane *l)
{
    return b->matmul(b->handle, p->desc, &g->alpha, g->b, p->a, g->a, p->b, &g->beta, g->c, p->c, to, p->c, algo,
                     cuda_of(l)->workspace[l->index], (size_t)b->workspace, (cudaStream_t)cuda_stream(l));
}

/* Mean of several calls, in seconds; negative where the algorithm fails. */
static double seconds_of(const struct blas *b, const struct blas_plan *p, const cublasLtMatmulAlgo_t *algo,
                         const struct blas_call *g, void *to, const struct lane *l, int calls)
{
    float ms = -1;
    cudaStream_t stream = (cudaStream_t)cuda_stream(l);
    bool fine =
        multiply(b, p, algo, g, to, l) == CUBLAS_STATUS_SUCCESS && cudaEventRecord(b->begin, stream) == cudaSuccess;
    for (int i = 0; i < calls && fine; i++)
        fine = multiply(b, p, algo, g, to, l) == CUBLAS_STATUS_SUCCESS;
    fine = fine && cudaEventRecord(b->end, stream) == cudaSuccess && cudaEventSynchronize(b->end) == cudaSuccess &&
           cudaEventElapsedTime(&ms, b->begin, b->end) == cudaSuccess;
    return fine ? 1e-3 * (double)ms / calls : -1;
}

/* The fastest of the candidates, in two rounds so that a clock that changes meets all of them. The first is kept unless
 * another is clearly faster. to: room for the result. */
static int fastest(const struct blas *b, const struct blas_plan *p, const struct candidates *c,
                   const struct blas_call *g, void *to, const struct lane *l, double best[MAX_CANDIDATES])
{
    double flops = 2.0 * (double)g->m * (double)g->n * (double)g->k, want = 6e11 / flops;
    int calls = want < 3 ? 3 : want > 20 ? 20 : (int)want, chosen = 0;
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < c->n; i++) {
            double s = seconds_of(b, p, &c->list[i].algo, g, to, l, calls);
            if (s > 0 && (round == 0 || best[i] < 0 || s < best[i]))
                best[i] = s;
            else if (round == 0)
                best[i] = -1;
        }
    for (int i = 1; i < c->n; i++)
        if (best[i] > 0 && (best[chosen] < 0 || best[i] < best[chosen]))
            chosen = i;
    return best[0] > 0 && best[chosen] > TUNE_GAIN * best[0] ? 0 : chosen;
}

/* Not while a run is being captured, nor where there is no room to put results aside: then the first choice stands. */
static int tune(struct blas *b, const struct blas_plan *p, const struct candidates *c, const struct blas_call *g,
                const struct lane *l, int *chosen, double best[MAX_CANDIDATES])
{
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    void *to = NULL;
    size_t bytes = (size_t)(g->ldc * g->m) * dtype_bytes(g->c_type);
    *chosen = 0;
    best[0] = 0;
    if (cudaStreamIsCapturing((cudaStream_t)cuda_stream(l), &capturing) != cudaSuccess ||
        capturing != cudaStreamCaptureStatusNone)
        return ST_OK;
    if (cudaMalloc(&to, bytes) != cudaSuccess) {
        cudaGetLastError();
        return ST_OK;
    }
    double begin = time_now();
    *chosen = fastest(b, p, c, g, to, l, best);
    cudaFree(to);
    b->tuned_seconds += time_now() - begin;
    return ST_OK;
}

static bool from_table(const struct blas *b, struct blas_plan *p)
{
    for (int i = 0; i < b->n_rows; i++)
        if (memcmp(&b->row[i].key, &p->key, sizeof p->key) == 0) {
            p->algo = b->row[i].algo;
            return true;
        }
    return false;
}

static int choose(struct blas *b, struct blas_plan *p, const struct blas_call *g, const struct lane *l)
{
    struct candidates c;
    double best[MAX_CANDIDATES];
    int chosen = 0;
    if (from_table(b, p))
        return ST_OK;
    /* gpu.fast alone does not tune products of codes: of those that the library proposes the first is the fastest in a
     * whole step, and another that is faster in a short test may be slower there. */
    bool tunes = b->tunes && (b->table != NULL || g->a_scale == BLAS_SCALE_NONE);
    bool timed = tunes && b->tuned_seconds < TUNE_SECONDS &&
                 2.0 * (double)g->m * (double)g->n * (double)g->k >= TUNE_LEAST_FLOPS;
    TRY(propose(b, p, timed ? MAX_CANDIDATES : 1, &c, l->err));
    if (timed)
        TRY(tune(b, p, &c, g, l, &chosen, best));
    p->algo = c.list[chosen].algo;
    if (b->table == NULL)
        return ST_OK;
    struct table_row row = {.key = p->key, .algo = p->algo};
    TRY(add_row(b, &row, l->err));
    return write_row(b, &row, timed ? best[chosen] * 1e6 : 0, timed ? best[0] * 1e6 : 0, l->err);
}

static int plan_for(struct blas *b, const struct blas_call *g, struct blas_plan **out, const struct lane *l)
{
    struct err *e = l->err;
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
        st = set_scales(b, p, g, e);
    if (st == ST_OK)
        st = choose(b, p, g, l);
    if (st == ST_UNSUPPORTED && g->a_scale != BLAS_SCALE_NONE) {
        p->refused = true;
        err_clear(e);
        st = ST_OK;
    }
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
    TRY(plan_for(b, g, &p, l));
    return blas_status(l->err, multiply(b, p, &p->algo, g, g->c, l), "cublasLtMatmul");
}

int blas_gemm8(struct lane *l, const struct blas_call *g, bool *done)
{
    struct blas *b = cuda_of(l)->blas;
    struct blas_plan *p = NULL;
    TRY(plan_for(b, g, &p, l));
    *done = !p->refused;
    if (p->refused)
        return ST_OK;
    TRY(set_scales(b, p, g, l->err));
    return blas_status(l->err, multiply(b, p, &p->algo, g, g->c, l), "cublasLtMatmul");
}
