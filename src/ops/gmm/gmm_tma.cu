/* Grouped products by bulk copies and wgmma (gmm_tma.cuh): the kernel, its launches, tensor maps, sums of the probability's gradient. */
#include "ops/gmm/gmm_ring.cuh"

/* ---- the kernel -------------------------------------------------------------------------------------------------------- */

template <int PRODUCT, int AFTER, int KIND, int FORM>
__global__ void __launch_bounds__(BLOCK, 1)
    tma_product(const __grid_constant__ struct gmm_maps m, const __grid_constant__ struct gmm_tma_job j)
{
#if HOPPER_CODE
    typedef form<AFTER, KIND, FORM> F;
    DYNAMIC_SHARED(char, shared, 1024);
    uint64_t *full = (uint64_t *)(shared + F::RING + F::OUT), *empty = full + F::STAGES;
    int rank = F::PEERS == 1 ? 0 : (int)cluster_rank(), first = (int)blockIdx.x / F::PEERS, stride = (int)gridDim.x / F::PEERS;
    struct gmm_table t = gmm_table_make<PRODUCT, F::FIND_M, F::FIND_N>(j.g, (int *)(shared + F::BYTES));
    if (threadIdx.x == 0) {
        if (smem_address(shared) % 1024 != 0)
            __trap();
        for (int s = 0; s < F::STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, F::OWN ? 4 : 8 * F::PEERS); /* warps that read a stage */
        }
        barrier_init_done();
        *(int *)(empty + F::STAGES) = t.total;
        tma_prefetch(&m.a);
        tma_prefetch(&m.b);
    }
    __syncthreads();
    if (F::PEERS > 1)
        cluster_sync(); /* nobody copies to a block whose barriers are not ready */
    /* Read again where it is needed: a register less to keep through the products. */
    const volatile int *total = (const volatile int *)(empty + F::STAGES);
    int role = threadIdx.x / GROUP;
    if (role == 0) {
        registers_down<F::COPY_REGS>();
        if (threadIdx.x == 0) {
            uint32_t step = 0;
            for (int tile = first; tile < *total; tile += stride) {
                struct gmm_at at = tile_at<PRODUCT, F>(j.g, t, tile, rank);
                int steps = steps_of(at), all = steps > 0 ? steps + F::LENT : 0;
                for (int k = 0; k < all; k++, step++) {
                    uint32_t s = step % F::STAGES;
                    barrier_wait_bounded(empty + s, (step / F::STAGES & 1) ^ 1);
                    if (F::LENDS && k >= steps) {
                        lend_stage<AFTER, F>(&m.pre, j.g, at, k - steps, shared + s * F::STAGE, full + s);
                        continue;
                    }
                    copy_step<PRODUCT, AFTER, F>(&m.a, &m.b, j.g, at, k, rank, shared + s * F::STAGE, full + s);
                    if constexpr (AFTER == GMM_SUMS || AFTER == GMM_DACT)
                        if (AFTER == GMM_DACT || j.g.acc)
                            prefetch_step<AFTER, F>(AFTER == GMM_DACT ? &m.pre : &m.c, j.g, at, steps - k);
                }
            }
        }
    } else {
        registers_up<F::REGS>();
        int group = role - 1, own = 0;
        bool owed = false;
        char *boxes = shared + F::RING + group * 2 * BOX_BYTES;
        uint32_t step = 0;
        /* Where the next tile is takes a while to find: that goes on beside the last products, if registers allow. */
        constexpr bool EARLY = !F::OWN && (AFTER != GMM_DACT || (F::LENDS && KIND != GMM_CLAMPED_GATE));
        struct gmm_at next = tile_at<PRODUCT, F>(j.g, t, first, rank);
        for (int tile = first; tile < *total; tile += stride, own ^= 1) {
            struct gmm_at at = EARLY ? next : tile_at<PRODUCT, F>(j.g, t, tile, rank);
            int steps = steps_of(at);
            if (F::LENDS && PRODUCT != GMM_WEIGHT && steps > 0 && at.m_valid <= group_row<F>(group)) {
                pass_tile<F>(full, empty, step, steps + F::LENT, owed);
                step += (uint32_t)(steps + F::LENT);
                if (EARLY && tile + stride < *total)
                    next = tile_at<PRODUCT, F>(j.g, t, tile + stride, rank);
                continue;
            }
            if (!F::OWN || own == group) {
                float c[F::BN / 2], prob[2];
                struct saved s;
                if (AFTER == GMM_ACT || AFTER == GMM_DACT)
                    row_probs<F>(prob, j.g, at, group);
                if (F::OWN && tile != first)
                    turn_wait(group);
                auto last = [&] {
                    if (AFTER == GMM_DACT && !F::LENDS)
                        saved_fetch<F>(&s, j, at, 0, group);
                    if (EARLY && tile + stride < *total)
                        next = tile_at<PRODUCT, F>(j.g, t, tile + stride, rank);
                };
                multiply_tile<PRODUCT, F>(c, shared, full, empty, step, steps, at.depth, group, tile + stride < *total, owed, last);
                if constexpr (F::LENDS) {
                    ring_store<AFTER, KIND, F>(m, j, at, c, prob, group, boxes, shared, full, empty, step + (uint32_t)steps, owed);
                    step += steps > 0 ? F::LENT : 0;
                } else if constexpr (AFTER == GMM_STORE)
                    store_rows<F>(&m.c, j.g, at, c, group, boxes);
                else if constexpr (AFTER == GMM_ACT)
                    store_act<KIND, F>(m, j, at, c, prob, group, boxes);
                else if constexpr (AFTER == GMM_DACT)
                    store_dact<KIND, F>(j, at, c, prob, &s, group, boxes);
                else if (!j.g.acc)
                    store_sums<false, F>(&m.c, at, c, group, boxes);
                else if (steps > 0)
                    store_sums<true, F>(&m.c, at, c, group, boxes);
            }
            step += (uint32_t)steps;
        }
        if ((F::LENDS && threadIdx.x % 32 == 0) || (!F::LENDS && AFTER != GMM_DACT && threadIdx.x % GROUP == 0))
            bulk_wait<0>();
    }
    if (F::PEERS > 1) {
        __syncthreads();
        cluster_sync(); /* the other block may still copy to this one */
    }
#endif
}

/* ---- launches ----------------------------------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                              const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);

/* [experts, rows, cols] with this stride between rows (elements), in boxes of so many lines of 128 bytes. Outside reads as 0. */
static int map_make(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int64_t experts, int64_t rows, int64_t cols, int64_t stride, int lines)
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
    const cuuint32_t box[3] = {(cuuint32_t)(128 / size), (cuuint32_t)lines, 1}, steps[3] = {1, 1, 1};
    CUresult code = ((encode_fn)entry)(map, type == DT_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, (void *)data,
                                       dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? ST_OK
                                : err_set(l->err, ST_INTERNAL, "tensor map of [%lld, %lld, %lld] with stride %lld: driver error %d", (long long)experts,
                                          (long long)rows, (long long)cols, (long long)stride, (int)code);
}

static int box_map(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int64_t experts, int64_t rows, int64_t cols, int64_t stride)
{
    return map_make(l, map, data, type, experts, rows, cols, stride, BOX);
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

/* What RING stores. Past the last column of c of SUMS and STORE bulk copies leave out what there is not. */
static int strip_maps(struct lane *l, struct gmm_maps *m, const struct gmm_tma_job *j)
{
    const struct gmm_job *g = &j->g;
    switch (j->after) {
    case GMM_SUMS: return map_make(l, &m->strip[0], g->c, DT_F32, g->experts, g->down, g->across, g->ldc, STRIP);
    case GMM_STORE: return map_make(l, &m->strip[0], g->c, DT_BF16, 1, g->rows, g->across, g->ldc, STRIP);
    case GMM_ACT:
        TRY(map_make(l, &m->strip[0], j->pre, DT_BF16, 1, g->rows, pre_columns(j), j->ldpre, STRIP));
        return map_make(l, &m->strip[1], g->c, DT_BF16, 1, g->rows, g->across, g->ldc, STRIP);
    default:
        TRY(map_make(l, &m->strip[0], g->c, DT_BF16, 1, g->rows, pre_columns(j), g->ldc, STRIP));
        return j->act != NULL ? map_make(l, &m->strip[1], j->act, DT_BF16, 1, g->rows, g->across, j->ldact, STRIP) : ST_OK;
    }
}

template <int PRODUCT, int AFTER, int KIND, int FORM> static int launch(struct lane *l, const struct gmm_tma_job *j)
{
    typedef form<AFTER, KIND, FORM> F;
    struct gmm_maps m;
    TRY(maps_make(l, &m, j, (enum gmm_product)PRODUCT));
    if (F::LENDS)
        TRY(strip_maps(l, &m, j));
    int64_t down = PRODUCT == GMM_WEIGHT ? ceil_div(j->g.down, F::FIND_M) * j->g.experts : ceil_div(j->g.rows, F::FIND_M) + j->g.experts + 1;
    unsigned blocks = (unsigned)min_i64(down * ceil_div(j->g.across, F::FIND_N), cuda_of(l)->sm_budget / F::PEERS) * F::PEERS;
    size_t shared = F::BYTES + gmm_table_bytes(j->g.experts);
    NEEDS_SMEM(l, (tma_product<PRODUCT, AFTER, KIND, FORM>), shared);
    if (F::PEERS > 1)
        LAUNCH_CLUSTER(l, (tma_product<PRODUCT, AFTER, KIND, FORM>), blocks, F::PEERS, BLOCK, shared, m, *j);
    else
        LAUNCH(l, (tma_product<PRODUCT, AFTER, KIND, FORM>), blocks, BLOCK, shared, m, *j);
    return ST_OK;
}

template <int PRODUCT, int AFTER, int KIND> static int by_form(struct lane *l, const struct gmm_tma_job *j, enum gmm_form f)
{
    switch (f) {
    case GMM_LOW: return launch<PRODUCT, AFTER, KIND, GMM_LOW>(l, j);
    case GMM_RING: return launch<PRODUCT, AFTER, KIND, GMM_RING>(l, j);
    case GMM_PAIR: return launch<PRODUCT, AFTER, KIND, GMM_PAIR>(l, j);
    default: return launch<PRODUCT, AFTER, KIND, GMM_WIDE>(l, j);
    }
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
    if (f == GMM_PAIR && cuda_of(l)->sm_budget < 2)
        f = GMM_RING;
    if (j.g.sweep == 0)
        j.g.sweep = gmm_form_sweep(f, j.after);
    switch (j.after) {
    case GMM_ACT: return by_kind<GMM_FORWARD, GMM_ACT>(l, &j, f);
    case GMM_DACT: return by_kind<GMM_INPUT, GMM_DACT>(l, &j, f);
    case GMM_SUMS: /* rows are its depth: LOW has no meaning */
        return f == GMM_RING   ? launch<GMM_WEIGHT, GMM_SUMS, GMM_RELU2, GMM_RING>(l, &j)
               : f == GMM_PAIR ? launch<GMM_WEIGHT, GMM_SUMS, GMM_RELU2, GMM_PAIR>(l, &j)
                               : launch<GMM_WEIGHT, GMM_SUMS, GMM_RELU2, GMM_WIDE>(l, &j);
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
