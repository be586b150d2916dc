/* Grouped products by bulk copies and wgmma (gmm_tma.cuh): the kernel, its launches, tensor maps, sums of the
 * probability's gradient. */
#include "ops/gmm/gmm_store.cuh"

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int PRODUCT, int AFTER, int KIND>
__global__ void __launch_bounds__(BLOCK, 1)
    tma_product(const __grid_constant__ struct gmm_maps m, const __grid_constant__ struct gmm_tma_job j)
{
#if HOPPER_CODE
    typedef form<AFTER, KIND> F;
    DYNAMIC_SHARED(char, shared, 1024);
    uint64_t *full = (uint64_t *)(shared + F::RING + F::OUT), *empty = full + F::STAGES;
    int first = (int)blockIdx.x, stride = (int)gridDim.x;
    struct gmm_table t = gmm_table_make<PRODUCT, F::BM, F::NT>(j.g, (int *)(shared + F::BYTES));
    if (threadIdx.x == 0) {
        if (smem_address(shared) % 1024 != 0)
            __trap();
        for (int s = 0; s < F::STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 8 * 32); /* threads of warps that read a stage */
        }
        barrier_init_done();
        *(int *)(empty + F::STAGES) = t.total;
        tma_prefetch(&m.a);
        tma_prefetch(&m.b);
    }
    __syncthreads();
    /* Read again where it is needed: a register less to keep through the products. */
    const volatile int *total = (const volatile int *)(empty + F::STAGES);
    int role = threadIdx.x / GROUP;
    if (role == 0) {
        registers_down<F::COPY_REGS>();
        if (threadIdx.x == 0) {
            uint32_t step = 0;
            for (int tile = first; tile < *total; tile += stride) {
                struct gmm_at at = tile_at<PRODUCT, F>(j.g, t, tile);
                int steps = steps_of(at), all = steps > 0 ? steps + F::LENT : 0;
                for (int k = 0; k < all; k++, step++) {
                    uint32_t s = step % F::STAGES;
                    barrier_wait_bounded(empty + s, (step / F::STAGES & 1) ^ 1);
                    if (k >= steps) {
                        lend_stage<AFTER, F>(&m.old, j.g, at, k - steps, shared + s * F::STAGE, full + s);
                        continue;
                    }
                    copy_step<PRODUCT, AFTER, F>(&m.a, &m.b, j.g, at, k, shared + s * F::STAGE, full + s);
                    if constexpr (AFTER == GMM_SUMS || AFTER == GMM_DACT)
                        if (AFTER == GMM_DACT || j.g.acc)
                            prefetch_step<AFTER, F>(&m.old, j.g, at, steps - k);
                }
            }
        }
    } else {
        registers_up<F::REGS>();
        int group = role - 1;
        bool owed = false;
        uint32_t step = 0;
        /* Where the next tile is takes a while to find: that goes on beside the last products, if registers allow. */
        constexpr bool EARLY = AFTER != GMM_DACT || KIND != GMM_CLAMPED_GATE;
        struct gmm_at next = tile_at<PRODUCT, F>(j.g, t, first);
        for (int tile = first; tile < *total; tile += stride) {
            struct gmm_at at = EARLY ? next : tile_at<PRODUCT, F>(j.g, t, tile);
            int steps = steps_of(at);
            if (PRODUCT != GMM_WEIGHT && steps > 0 && at.m_valid <= group_row(group)) {
                pass_tile<F>(full, empty, step, steps + F::LENT, owed);
                step += (uint32_t)(steps + F::LENT);
                if (EARLY && tile + stride < *total)
                    next = tile_at<PRODUCT, F>(j.g, t, tile + stride);
                continue;
            }
            float c[F::BN / 2], prob[2];
            if (AFTER == GMM_ACT || AFTER == GMM_DACT)
                row_probs<F>(prob, j.g, at, group);
            auto last = [&] {
                if (EARLY && tile + stride < *total)
                    next = tile_at<PRODUCT, F>(j.g, t, tile + stride);
            };
            multiply_tile<PRODUCT, F>(c, shared, full, empty, step, steps, at.depth, group, owed, last);
            store_tile<AFTER, KIND, F>(m, j, at, c, prob, group, shared + F::RING, shared, full, empty,
                                       step + (uint32_t)steps, owed);
            step += (uint32_t)(steps > 0 ? steps + F::LENT : 0);
        }
        if (threadIdx.x % 32 == 0)
            bulk_wait<0>();
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* A tensor of `rank` dimensions, the first of 128 bytes in a box; strides of the others in bytes.
 * Outside reads as 0. */
static int map_encode(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int rank,
                      const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box)
{
    static const cuuint32_t steps[4] = {1, 1, 1, 1};
    void *entry = NULL;
    TRY(cuda_tensor_maps(l, &entry));
    CUtensorMapDataType kind = type == DT_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                               : type == DT_F32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    CUresult code = ((encode_fn)entry)(map, kind, (cuuint32_t)rank, (void *)data, dims, strides, box, steps,
                                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS
               ? ST_OK
               : err_set(l->err, ST_INTERNAL,
                         "tensor map of %d dimensions, [%lld, %lld, ...] with stride %lld: driver error %d", rank,
                         (long long)dims[0], (long long)dims[1], (long long)strides[0], (int)code);
}
extern "C" int gmm_map_make(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int64_t experts,
                            int64_t rows, int64_t cols, int64_t stride, int lines)
{
    cuuint64_t size = dtype_bytes(type);
    const cuuint64_t dims[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)experts};
    const cuuint64_t strides[2] = {(cuuint64_t)stride * size, (cuuint64_t)(stride * rows) * size};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / size), (cuuint32_t)lines, 1};
    return map_encode(l, map, data, type, 3, dims, strides, box);
}
/* fp32 sums, their rows cut into lines of 32 columns, of which a strip has two; what is no whole line is left out. */
extern "C" int gmm_sums_map(struct lane *l, CUtensorMap *map, const struct gmm_job *g)
{
    const cuuint64_t dims[4] = {32, (cuuint64_t)g->across / 32, (cuuint64_t)g->down, (cuuint64_t)g->experts};
    const cuuint64_t strides[3] = {128, (cuuint64_t)g->ldc * 4, (cuuint64_t)g->ldc * (cuuint64_t)g->down * 4};
    const cuuint32_t box[4] = {32, 2, STRIP, 1};
    return dims[1] > 0 ? map_encode(l, map, g->c, DT_F32, 4, dims, strides, box) : ST_OK;
}

static int operand_maps(struct lane *l, struct gmm_maps *m, const struct gmm_tma_job *j, enum gmm_product product)
{
    const struct gmm_job *g = &j->g;
    if (product == GMM_WEIGHT) {
        TRY(gmm_map_make(l, &m->a, g->a, DT_BF16, 1, g->rows, g->down, g->lda, BOX));
        TRY(gmm_map_make(l, &m->b, g->b, DT_BF16, 1, g->rows, g->across, g->ldb, BOX));
        return gmm_map_make(l, &m->old, g->c, DT_F32, g->experts, g->down, g->across, g->ldc, BOX);
    }
    TRY(gmm_map_make(l, &m->a, g->a, DT_BF16, 1, g->rows, g->depth, g->lda, BOX));
    if (j->after == GMM_DACT)
        TRY(gmm_map_make(l, &m->old, j->pre, DT_BF16, 1, g->rows, gmm_pre_columns(j), j->ldpre, BOX));
    bool forward = product == GMM_FORWARD;
    int64_t across = j->after == GMM_ACT ? gmm_pre_columns(j) : g->across;
    return gmm_map_make(l, &m->b, g->b, DT_BF16, g->experts, forward ? across : g->depth, forward ? g->depth : across,
                        g->ldb, BOX);
}

/* Past the last column of c of STORE bulk copies leave out what there is not. */
extern "C" int gmm_result_maps(struct lane *l, struct gmm_maps *m, const struct gmm_tma_job *j)
{
    const struct gmm_job *g = &j->g;
    switch (j->after) {
    case GMM_SUMS: return gmm_sums_map(l, &m->strip[0], g);
    case GMM_STORE: return gmm_map_make(l, &m->strip[0], g->c, DT_BF16, 1, g->rows, g->across, g->ldc, STRIP);
    case GMM_ACT:
        TRY(gmm_map_make(l, &m->strip[0], j->pre, DT_BF16, 1, g->rows, gmm_pre_columns(j), j->ldpre, STRIP));
        return gmm_map_make(l, &m->strip[1], g->c, DT_BF16, 1, g->rows, g->across, g->ldc, STRIP);
    default:
        TRY(gmm_map_make(l, &m->strip[0], g->c, DT_BF16, 1, g->rows, gmm_pre_columns(j), g->ldc, STRIP));
        return j->act != NULL ? gmm_map_make(l, &m->strip[1], j->act, DT_BF16, 1, g->rows, g->across, j->ldact, STRIP)
                              : ST_OK;
    }
}

template <int PRODUCT, int AFTER, int KIND> static int launch(struct lane *l, const struct gmm_tma_job *j)
{
    typedef form<AFTER, KIND> F;
    struct gmm_maps m = {};
    TRY(operand_maps(l, &m, j, (enum gmm_product)PRODUCT));
    TRY(gmm_result_maps(l, &m, j));
    int64_t down = PRODUCT == GMM_WEIGHT ? ceil_div(j->g.down, F::BM) * j->g.experts
                                         : ceil_div(j->g.rows, F::BM) + j->g.experts + 1;
    unsigned blocks = (unsigned)min_i64(down * ceil_div(j->g.across, F::NT), cuda_of(l)->sm_budget);
    size_t shared = F::BYTES + gmm_table_bytes(j->g.experts);
    NEEDS_SMEM(l, (tma_product<PRODUCT, AFTER, KIND>), shared);
    LAUNCH(l, (tma_product<PRODUCT, AFTER, KIND>), blocks, BLOCK, shared, m, *j);
    return ST_OK;
}

template <int PRODUCT, int AFTER> static int by_kind(struct lane *l, const struct gmm_tma_job *j)
{
    switch (j->kind) {
    case GMM_RELU2: return launch<PRODUCT, AFTER, GMM_RELU2>(l, j);
    case GMM_GATE: return launch<PRODUCT, AFTER, GMM_GATE>(l, j);
    default: return launch<PRODUCT, AFTER, GMM_CLAMPED_GATE>(l, j);
    }
}

extern "C" int gmm_tma(struct lane *l, const struct gmm_tma_job *job, enum gmm_product product)
{
    struct gmm_tma_job j = *job;
    j.g.sweep = GMM_FORM_SWEEP;
    switch (j.after) {
    case GMM_ACT: return by_kind<GMM_FORWARD, GMM_ACT>(l, &j);
    case GMM_DACT: return by_kind<GMM_INPUT, GMM_DACT>(l, &j);
    case GMM_SUMS: return launch<GMM_WEIGHT, GMM_SUMS, GMM_RELU2>(l, &j);
    default:
        return product == GMM_FORWARD ? launch<GMM_FORWARD, GMM_STORE, GMM_RELU2>(l, &j)
                                      : launch<GMM_INPUT, GMM_STORE, GMM_RELU2>(l, &j);
    }
}

/* Bulk copies need something to copy, and the table of experts room beside the stages. */
extern "C" bool gmm_tma_fits(const struct lane *l, const struct gmm_tma_job *j)
{
    const struct gmm_job *g = &j->g;
    int64_t most = form<GMM_STORE, GMM_RELU2>::BYTES;
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

extern "C" int gmm_tma_dprob(struct lane *l, const struct gmm_tma_job *j, float *dprob)
{
    LAUNCH(l, sum_parts, (unsigned)ceil_div(j->g.rows, 256), 256, 0, j->part, dprob,
           (int)ceil_div(j->g.across, GMM_FORM_COLS), j->g.rows);
    return ST_OK;
}
