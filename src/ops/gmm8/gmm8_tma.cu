/* Grouped products of FP8 codes by bulk copies and wgmma (gmm8_tma.cuh): the kernel, its launches and tensor maps. */
#include "ops/gmm8/gmm8_feed.cuh"

/* ---- the kernel: tma_product of ops/gmm with other steps ------------------------------------- */

template <int AFTER, int KIND, enum dtype A>
__global__ void __launch_bounds__(BLOCK, 1)
    code_tiles(const __grid_constant__ struct gmm_maps m, const __grid_constant__ struct gmm8_job p)
{
#if HOPPER_CODE
    typedef form8<AFTER, KIND> F;
    constexpr int PRODUCT = AFTER == GMM_SUMS ? GMM_WEIGHT : GMM_FORWARD;
    const struct gmm_job &g = p.j.g;
    DYNAMIC_SHARED(char, shared, 1024);
    uint64_t *full = (uint64_t *)(shared + F::RING + F::OUT), *empty = full + F::STAGES;
    int first = (int)blockIdx.x, stride = (int)gridDim.x;
    struct gmm_table t = gmm_table_make<PRODUCT, F::BM, F::NT>(g, (int *)(shared + F::BYTES));
    if (threadIdx.x == 0) {
        if (smem_address(shared) % 1024 != 0)
            __trap();
        for (int s = 0; s < F::STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 8 * 32);
        }
        barrier_init_done();
        *(int *)(empty + F::STAGES) = t.total;
        tma_prefetch(&m.a);
        tma_prefetch(&m.b);
    }
    __syncthreads();
    const volatile int *total = (const volatile int *)(empty + F::STAGES);
    int role = threadIdx.x / GROUP;
    if (role == 0) {
        registers_down<F::COPY_REGS>();
        if (threadIdx.x == 0) {
            uint32_t step = 0;
            for (int tile = first; tile < *total; tile += stride) {
                struct gmm_at at = tile_at<PRODUCT, F>(g, t, tile);
                int steps = blocks_of<AFTER>(at), all = steps > 0 ? steps + F::LENT : 0;
                for (int k = 0; k < all; k++, step++) {
                    uint32_t s = step % F::STAGES;
                    barrier_wait_bounded(empty + s, (step / F::STAGES & 1) ^ 1);
                    if (k >= steps) {
                        lend_stage<AFTER, F>(&m.old, g, at, k - steps, shared + s * F::STAGE, full + s);
                        continue;
                    }
                    copy_codes<AFTER, F>(&m.a, &m.b, p, at, k, shared + s * F::STAGE, full + s);
                    if constexpr (AFTER == GMM_SUMS || AFTER == GMM_DACT)
                        if (AFTER == GMM_DACT || g.acc)
                            prefetch_step<AFTER, F>(&m.old, g, at, steps - k);
                }
            }
        }
    } else {
        registers_up<F::REGS>();
        int group = role - 1;
        bool owed = false;
        uint32_t step = 0;
        struct gmm_at next = tile_at<PRODUCT, F>(g, t, first);
        for (int tile = first; tile < *total; tile += stride) {
            struct gmm_at at = next;
            int steps = blocks_of<AFTER>(at);
            if (PRODUCT != GMM_WEIGHT && steps > 0 && at.m_valid <= group_row(group)) {
                pass_tile<F>(full, empty, step, steps + F::LENT, owed);
                step += (uint32_t)(steps + F::LENT);
                if (tile + stride < *total)
                    next = tile_at<PRODUCT, F>(g, t, tile + stride);
                continue;
            }
            float c[F::BN / 2], prob[2];
            if (AFTER == GMM_ACT || AFTER == GMM_DACT)
                row_probs<F>(prob, g, at, group);
            auto last = [&] {
                if (tile + stride < *total)
                    next = tile_at<PRODUCT, F>(g, t, tile + stride);
            };
            multiply_codes<AFTER, A, F>(c, shared, full, empty, step, steps, p, at, group, owed, last);
            step += (uint32_t)steps;
            char *out = shared + F::RING;
            if (at.depth <= 0) {
                codes_empty<AFTER, F>(p, at);
                continue;
            }
            if constexpr (AFTER == GMM_ACT) {
                owed = true;
                store_codes<KIND, F>(m, p, at, c, prob, group, out + group * 2 * BOX_BYTES, shared, full, step);
            } else if constexpr (AFTER == GMM_SUMS) {
                owed = true;
                if (g.acc)
                    store_lent_sums<true, F>(m, g, at, c, group, shared, full, empty, step);
                else
                    store_lent_sums<false, F>(m, g, at, c, group, shared, full, empty, step);
            } else {
                store_tile<AFTER, KIND, F>(m, p.j, at, c, prob, group, out, shared, full, empty, step, owed);
            }
            step += F::LENT;
        }
        if (threadIdx.x % 32 == 0)
            bulk_wait<0>();
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

static int code_maps(struct lane *l, struct gmm_maps *m, const struct gmm8_job *p)
{
    const struct gmm_job *g = &p->j.g;
    const enum dtype codes = DT_F8_E4M3; /* or E5M2: bytes */
    if (p->j.after == GMM_SUMS) {
        TRY(gmm_map_make(l, &m->a, g->a, codes, 1, g->down, g->rows, g->lda, BOX));
        TRY(gmm_map_make(l, &m->b, g->b, codes, 1, g->across, g->rows, g->ldb, BOX));
        TRY(gmm_map_make(l, &m->old, g->c, DT_F32, g->experts, g->down, g->across, g->ldc, BOX));
        return gmm_result_maps(l, m, &p->j);
    }
    TRY(gmm_map_make(l, &m->a, g->a, codes, 1, g->rows, g->depth, g->lda, BOX));
    int64_t across = p->j.after == GMM_ACT ? gmm_pre_columns(&p->j) : g->across;
    TRY(gmm_map_make(l, &m->b, g->b, codes, p->turned ? 1 : g->experts, across, p->b_cols, g->ldb, BOX));
    if (p->j.after == GMM_DACT)
        TRY(gmm_map_make(l, &m->old, p->j.pre, DT_BF16, 1, g->rows, gmm_pre_columns(&p->j), p->j.ldpre, BOX));
    if (p->j.after != GMM_ACT)
        return gmm_result_maps(l, m, &p->j);
    TRY(gmm_map_make(l, &m->strip[0], p->j.pre, DT_BF16, 1, g->rows, gmm_pre_columns(&p->j), p->j.ldpre, STRIP));
    return gmm_map_make(l, &m->strip[1], p->q, codes, 1, g->rows, g->across, g->across, STRIP);
}

template <int AFTER, int KIND, enum dtype A> static int launch(struct lane *l, const struct gmm8_job *p)
{
    typedef form8<AFTER, KIND> F;
    const struct gmm_job *g = &p->j.g;
    struct gmm_maps m = {};
    TRY(code_maps(l, &m, p));
    int64_t down =
        AFTER == GMM_SUMS ? ceil_div(g->down, F::BM) * g->experts : ceil_div(g->rows, F::BM) + g->experts + 1;
    unsigned blocks = (unsigned)min_i64(down * ceil_div(g->across, F::NT), cuda_of(l)->sm_budget);
    size_t shared = F::BYTES + gmm_table_bytes(g->experts);
    NEEDS_SMEM(l, (code_tiles<AFTER, KIND, A>), shared);
    LAUNCH(l, (code_tiles<AFTER, KIND, A>), blocks, BLOCK, shared, m, *p);
    return ST_OK;
}
template <int AFTER, enum dtype A> static int by_kind(struct lane *l, const struct gmm8_job *p)
{
    switch (p->j.kind) {
    case GMM_RELU2: return launch<AFTER, GMM_RELU2, A>(l, p);
    case GMM_GATE: return launch<AFTER, GMM_GATE, A>(l, p);
    default: return launch<AFTER, GMM_CLAMPED_GATE, A>(l, p);
    }
}

extern "C" int gmm8_tma(struct lane *l, const struct gmm8_job *job)
{
    struct gmm8_job p = *job;
    bool wide = p.a_type == DT_F8_E5M2;
    p.j.g.sweep = GMM_FORM_SWEEP;
    switch (p.j.after) {
    case GMM_ACT: return by_kind<GMM_ACT, DT_F8_E4M3>(l, &p);
    case GMM_DACT: return wide ? by_kind<GMM_DACT, DT_F8_E5M2>(l, &p) : by_kind<GMM_DACT, DT_F8_E4M3>(l, &p);
    case GMM_SUMS:
        return wide ? launch<GMM_SUMS, GMM_RELU2, DT_F8_E5M2>(l, &p) : launch<GMM_SUMS, GMM_RELU2, DT_F8_E4M3>(l, &p);
    default:
        return wide ? launch<GMM_STORE, GMM_RELU2, DT_F8_E5M2>(l, &p) : launch<GMM_STORE, GMM_RELU2, DT_F8_E4M3>(l, &p);
    }
}

extern "C" bool gmm8_tma_fits(const struct lane *l, const struct gmm8_job *p)
{
    const struct gmm_job *g = &p->j.g;
    int64_t most = form8<GMM_STORE, GMM_RELU2>::BYTES;
    bool sums = p->j.after == GMM_SUMS, some = g->rows > 0 && g->across > 0 && (sums ? g->down : g->depth) > 0;
    /* Depth in vectors of 16 codes, rows of scales in fours. */
    int64_t whole = sums ? 16 : p->j.after == GMM_ACT ? 4 : 1;
    bool blocks = g->across % 128 == 0 && (sums ? g->down : g->depth) % 128 == 0 && g->rows % whole == 0;
    bool codes = p->j.after != GMM_ACT || p->a_type == DT_F8_E4M3;
    return cuda_of(l)->hopper && some && blocks && codes &&
           most + (int64_t)gmm_table_bytes(g->experts) <= cuda_of(l)->smem_per_block;
}
