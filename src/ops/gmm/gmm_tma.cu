/* Grouped products by bulk copies and wgmma: launches of gmm_tma.cuh, tensor maps, sums of the probability's gradient. */
#include "ops/gmm/gmm_tma.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

/* [experts, rows, cols] with this stride between rows (elements), in boxes of 64 lines of 128 bytes. Outside reads as 0. */
static int box_map(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int64_t experts, int64_t rows, int64_t cols, int64_t stride)
{
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    TRY(cuda_status(l->err, (int)cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
                    "finding cuTensorMapEncodeTiled"));
    if (found != cudaDriverEntryPointSuccess || entry == NULL)
        return err_set(l->err, ST_UNSUPPORTED, "the driver lacks cuTensorMapEncodeTiled");
    cuuint64_t size = dtype_bytes(type);
    const cuuint64_t dims[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)experts};
    const cuuint64_t strides[2] = {(cuuint64_t)stride * size, (cuuint64_t)(stride * rows) * size};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / size), BOX, 1}, steps[3] = {1, 1, 1};
    CUresult code = ((encode_fn)entry)(map, type == DT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, (void *)data,
                                       dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? ST_OK
                                : err_set(l->err, ST_INTERNAL, "tensor map of [%lld, %lld, %lld] with stride %lld: driver error %d", (long long)experts,
                                          (long long)rows, (long long)cols, (long long)stride, (int)code);
}

/* Columns of pre. */
static int64_t pre_columns(const struct gmm_tma_job *j) { return (j->kind == GMM_RELU2 ? 1 : 2) * (int64_t)j->g.across; }

static int maps_make(struct lane *l, struct gmm_maps *m, const struct gmm_tma_job *j, enum gmm_product product)
{
    const struct gmm_job *g = &j->g;
    memset(m, 0, sizeof *m);
    if (product == GMM_WEIGHT) {
        TRY(box_map(l, &m->a, g->a, DT_BF16, 1, g->rows, g->down, g->lda));
        TRY(box_map(l, &m->b, g->b, DT_BF16, 1, g->rows, g->across, g->ldb));
        return box_map(l, &m->c, g->c, DT_F32, g->experts, g->down, g->across, g->ldc);
    }
    TRY(box_map(l, &m->a, g->a, DT_BF16, 1, g->rows, g->depth, g->lda));
    if (j->after == GMM_ACT || j->after == GMM_DACT)
        TRY(box_map(l, &m->pre, j->pre, DT_BF16, 1, g->rows, pre_columns(j), j->ldpre));
    if (j->after != GMM_DACT)
        TRY(box_map(l, &m->c, g->c, DT_BF16, 1, g->rows, g->across, g->ldc));
    return product == GMM_FORWARD ? box_map(l, &m->b, g->b, DT_BF16, g->experts, j->after == GMM_ACT ? pre_columns(j) : g->across, g->depth, g->ldb)
                                  : box_map(l, &m->b, g->b, DT_BF16, g->experts, g->depth, g->across, g->ldb);
}

template <int PRODUCT, int AFTER, int KIND, int FORM> static int launch(struct lane *l, const struct gmm_tma_job *j)
{
    typedef form<AFTER, KIND, FORM> F;
    struct gmm_maps m;
    TRY(maps_make(l, &m, j, (enum gmm_product)PRODUCT));
    int64_t down = PRODUCT == GMM_WEIGHT ? ceil_div(j->g.down, F::BM) * j->g.experts : ceil_div(j->g.rows, F::BM) + j->g.experts + 1;
    size_t shared = F::BYTES + gmm_table_bytes(j->g.experts);
    NEEDS_SMEM(l, (tma_product<PRODUCT, AFTER, KIND, FORM>), shared);
    LAUNCH(l, (tma_product<PRODUCT, AFTER, KIND, FORM>), (unsigned)min_i64(down * ceil_div(j->g.across, F::NT), cuda_of(l)->sm_budget), BLOCK, shared,
           m, *j);
    return ST_OK;
}

template <int PRODUCT, int AFTER, int KIND> static int by_form(struct lane *l, const struct gmm_tma_job *j, enum gmm_form f)
{
    return f == GMM_LOW ? launch<PRODUCT, AFTER, KIND, GMM_LOW>(l, j) : launch<PRODUCT, AFTER, KIND, GMM_WIDE>(l, j);
}
template <int PRODUCT, int AFTER> static int by_kind(struct lane *l, const struct gmm_tma_job *j, enum gmm_form f)
{
    switch (j->kind) {
    case GMM_RELU2: return by_form<PRODUCT, AFTER, GMM_RELU2>(l, j, f);
    case GMM_GATE: return by_form<PRODUCT, AFTER, GMM_GATE>(l, j, f);
    default: return by_form<PRODUCT, AFTER, GMM_CLAMPED_GATE>(l, j, f);
    }
}

extern "C" int gmm_tma(struct lane *l, const struct gmm_tma_job *job, enum gmm_product product, enum gmm_form f)
{
    struct gmm_tma_job j = *job;
    if (j.g.sweep == 0)
        j.g.sweep = gmm_form_sweep(f);
    switch (j.after) {
    case GMM_ACT: return by_kind<GMM_FORWARD, GMM_ACT>(l, &j, f);
    case GMM_DACT: return by_kind<GMM_INPUT, GMM_DACT>(l, &j, f);
    case GMM_SUMS: return launch<GMM_WEIGHT, GMM_SUMS, GMM_RELU2, GMM_WIDE>(l, &j);
    default: return product == GMM_FORWARD ? by_form<GMM_FORWARD, GMM_STORE, GMM_RELU2>(l, &j, f) : by_form<GMM_INPUT, GMM_STORE, GMM_RELU2>(l, &j, f);
    }
}

/* Bulk copies need something to copy, and the table of experts room beside the stages. */
extern "C" bool gmm_tma_fits(const struct lane *l, const struct gmm_tma_job *j)
{
    const struct gmm_job *g = &j->g;
    int64_t most = form<GMM_STORE, GMM_RELU2, GMM_WIDE>::BYTES;
    bool some = g->rows > 0 && g->across > 0 && (j->after == GMM_SUMS ? g->down : g->depth) > 0;
    return cuda_of(l)->hopper && some && most + (int64_t)gmm_table_bytes(g->experts) <= cuda_of(l)->smem_per_block;
}

/* dprob = the parts' sum, in order. */
static __global__ void __launch_bounds__(256) sum_parts(const float *part, float *dprob, int parts, int64_t rows)
{
    int64_t r = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (r >= rows)
        return;
    float sum = 0;
    for (int p = 0; p < parts; p++)
        sum += part[p * rows + r];
    dprob[r] = sum;
}

extern "C" int gmm_tma_dprob(struct lane *l, const struct gmm_tma_job *j, enum gmm_form f, float *dprob)
{
    LAUNCH(l, sum_parts, (unsigned)ceil_div(j->g.rows, 256), 256, 0, j->part, dprob, (int)ceil_div(j->g.across, gmm_form_size(f).n), j->g.rows);
    return ST_OK;
}
