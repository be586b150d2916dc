/* attention backward for Hopper: dk, dv and dq in one pass over the scores, the same bits every time, scratch linear in
 * the sequence.
 *
 * A block takes 128 keys of a kv head and walks over the tiles of rows that see them, last tile first, each for the
 * query heads that share the keys. Two groups of four warps own 64 keys each and keep dk and dv in registers; scores
 * and their gradients are computed transposed, so that both are left operands from registers. One warp brings tiles by
 * bulk copies. dq of a tile is summed over key blocks in fp32 in scratch memory, in the order of keys: each block waits
 * for its turn, so the sum has one order. The block of the diagonal is the last and rounds it. Where few kv heads have
 * many query heads, several blocks take some of these each, and dk and dv are summed in the same manner. Only two
 * threads ever wait for turns, and blocks are taken by ticket, first keys first, so the blocks that a block waits for
 * have begun before it and are a little ahead.
 *
 * Before: prepare_rows collects what tiles need by row (logarithm of the sum, sum of do * o, first key) and clears
 * turns. */
#include "ops/attention/attention_bwd_hopper.cuh"
#include "ops/cuda/hopper.cuh"

enum { WORKERS = 256 /* threads that multiply */, THREADS = 128 + WORKERS };
enum {
    DQ_FLOATS = 8192,
    PART_ALIGN = 256,
    ENOUGH_BLOCKS = 264 /* two for each multiprocessor of an H200 */
};

struct bwd_maps {
    CUtensorMap q, k, v, dout;
};

/* ---- shared memory --------------------------------------------------------------------------- */

/* Boxes of 64 channels or keys, as bulk copies with the 128-byte swizzle leave them. */
template <int D> struct bwd_pool {
    static constexpr int ROWS = TILE_ROWS<D>;
    bf16 k[D / 64][KEYS][64], v[D / 64][KEYS][64], q[2][D / 64][ROWS][64], dout[2][D / 64][ROWS][64];
    bf16 ds[2][KEYS / 64][ROWS][64];
    float dq[2][8][128][4]; /* of each group: registers of its threads */
    row_record<ROWS> rows[2];
    uint64_t k_full, v_full, kv_empty, q_full[2], q_empty[2], do_full[2], do_empty[2], dq_full, dq_empty, sum_full,
        turn_full, turn_empty, item_full, item_empty;
    int item;
};

/* The pool begins at a multiple of 1024. */
template <int D> constexpr int bwd_smem() { return (int)sizeof(bwd_pool<D>) + 1024; }

#if HOPPER_CODE

template <int D> __device__ __forceinline__ void init_barriers(bwd_pool<D> *s)
{
    barrier_init(&s->k_full, 1);
    barrier_init(&s->v_full, 1);
    barrier_init(&s->kv_empty, WORKERS);
    for (int i = 0; i < 2; i++) {
        barrier_init(&s->q_full[i], 1);
        barrier_init(&s->q_empty[i], WORKERS);
        barrier_init(&s->do_full[i], 1);
        barrier_init(&s->do_empty[i], WORKERS);
    }
    barrier_init(&s->dq_full, WORKERS);
    barrier_init(&s->dq_empty, 1);
    barrier_init(&s->sum_full, 1);
    barrier_init(&s->turn_full, 1);
    barrier_init(&s->turn_empty, 1);
    barrier_init(&s->item_full, 1);
    barrier_init(&s->item_empty, WORKERS + 2);
    barrier_init_done();
}
/* The item that the copying thread has drawn; the place for the next one is free after it. */
template <int D> __device__ __forceinline__ int next_item(bwd_pool<D> *s, uint32_t round)
{
    barrier_wait(&s->item_full, round & 1);
    int item = *(volatile int *)&s->item;
    barrier_arrive(&s->item_empty);
    return item;
}

/* ---- the copying thread ---------------------------------------------------------------------- */

template <int D, int ROWS>
__device__ __forceinline__ void load_boxes(bf16 (*dst)[ROWS][64], const CUtensorMap *map, int row, int head, int batch,
                                           uint64_t *bar)
{
#pragma unroll
    for (int i = 0; i < D / 64; i++)
        tma_load_4d(dst[i], map, i * 64, row, head, batch, bar);
}

template <int D> __device__ __forceinline__ void bring(const bwd_job &j, const bwd_maps &maps, bwd_pool<D> *s)
{
    constexpr int ROWS = TILE_ROWS<D>, BOX = D * 2;
    uint32_t step = 0, blocks = 0;
    for (uint32_t round = 0;; round++) {
        int item = atomicAdd(j.ticket, 1);
        barrier_wait(&s->item_empty, (round & 1) ^ 1);
        *(volatile int *)&s->item = item;
        barrier_arrive(&s->item_full);
        if (item >= j.items)
            return;
        place p = place_of(j, item);
        walk at = walk_from(j, p);
        for (int x = 0, count = steps_of(j, p); x < count; x++, step++, at.next(j, p)) {
            uint32_t stage = step % 2, empty = (step / 2 & 1) ^ 1;
            barrier_wait(&s->q_empty[stage], empty);
            barrier_expect(&s->q_full[stage], ROWS * BOX + sizeof(row_record<ROWS>));
            load_boxes<D>(s->q[stage], &maps.q, at.m * ROWS, at.h, p.b, &s->q_full[stage]);
            bulk_load(&s->rows[stage], (const row_record<ROWS> *)j.records + tile_index(j, p.b, at.h, at.m),
                      sizeof(row_record<ROWS>), &s->q_full[stage]);
            if (x == 0) {
                barrier_wait(&s->kv_empty, (blocks++ & 1) ^ 1);
                barrier_expect(&s->k_full, KEYS * BOX);
                load_boxes<D>(s->k, &maps.k, p.n * KEYS, p.g, p.b, &s->k_full);
            }
            barrier_wait(&s->do_empty[stage], empty);
            barrier_expect(&s->do_full[stage], ROWS * BOX);
            load_boxes<D>(s->dout[stage], &maps.dout, at.m * ROWS, at.h, p.b, &s->do_full[stage]);
            if (x == 0) {
                barrier_expect(&s->v_full, KEYS * BOX);
                load_boxes<D>(s->v, &maps.v, p.n * KEYS, p.g, p.b, &s->v_full);
            }
        }
    }
}

/* ---- the threads that sum -------------------------------------------------------------------- */

/* Takes what the workers leave in s->dq to a sum in memory; as the last one, brings the sum to the workers instead.
 * before: who came before. */
template <int D>
__device__ __forceinline__ void sum_part(bwd_pool<D> *s, float *sum, int before, bool last, uint32_t given)
{
    if (last && before > 0) {
        barrier_expect(&s->sum_full, DQ_FLOATS * 4);
        bulk_load(s->dq, sum, DQ_FLOATS * 4, &s->sum_full);
    }
    barrier_wait(&s->dq_full, given & 1);
    if (!last) {
        if (before == 0)
            bulk_store(sum, s->dq, DQ_FLOATS * 4);
        else
            bulk_add(sum, &s->dq[0][0][0][0], DQ_FLOATS * 4);
        bulk_commit();
        bulk_wait_read<0>();
    }
    barrier_arrive(&s->dq_empty);
}

/* Another thread waits for turns, one tile ahead: each look at memory takes a while. */
template <int D, bool ANY_ORDER> __device__ __forceinline__ void watch_turns(const bwd_job &j, bwd_pool<D> *s)
{
    uint32_t steps = 0;
    for (uint32_t round = 0;; round++) {
        int item = next_item(s, round);
        if (item >= j.items)
            return;
        place p = place_of(j, item);
        walk at = walk_from(j, p);
        for (int count = steps_of(j, p); count > 0; count--, steps++, at.next(j, p)) {
            int before = p.n - first_block(j, p.b, at.m);
            barrier_wait(&s->turn_empty, (steps & 1) ^ 1);
            /* In any order: the first one stores and the last one reads the sum, so these two have their turns; those
             * between add their parts as they come. */
            bool between = ANY_ORDER && p.n != last_block(j, at.m);
            if (before > 0)
                turn_wait(&j.turn[tile_index(j, p.b, at.h, at.m)], between ? 1 : before);
            barrier_arrive(&s->turn_full);
        }
    }
}

template <int D> __device__ __forceinline__ void sum_up(const bwd_job &j, bwd_pool<D> *s)
{
    uint32_t steps = 0, given = 0;
    for (uint32_t round = 0;; round++) {
        int item = next_item(s, round);
        if (item >= j.items)
            return;
        place p = place_of(j, item);
        walk at = walk_from(j, p);
        for (int count = steps_of(j, p); count > 0; count--, steps++, given++, at.next(j, p)) {
            int before = p.n - first_block(j, p.b, at.m);
            bool last = p.n == last_block(j, at.m);
            int tile = tile_index(j, p.b, at.h, at.m);
            barrier_wait(&s->turn_full, steps & 1);
            barrier_arrive(&s->turn_empty);
            turn_taken();
            sum_part(s, j.dq_sum + (int64_t)tile * DQ_FLOATS, before, last, given);
            if (!last) {
                bulk_wait<0>();
                turn_pass(&j.turn[tile]);
            }
        }
        if (j.shares == 1 || p.empty())
            continue;
        int64_t block = ((int64_t)p.b * j.c.groups + p.g) * j.blocks + p.n;
        bool last = p.share == j.shares - 1;
        if (p.share > 0)
            turn_wait(&j.kv_turn[block], p.share);
        turn_taken();
        for (int part = 0; part < D / 32; part++, given++)
            sum_part(s, j.kv_sum + (block * (D / 32) + part) * DQ_FLOATS, p.share, last, given);
        if (!last) {
            bulk_wait<0>();
            turn_pass(&j.kv_turn[block]);
        }
    }
}

/* ---- the workers ----------------------------------------------------------------------------- */

/* Adds bytes to where a tile of wgmma begins. */
__device__ __forceinline__ uint64_t tile_plus(uint64_t tile, uint32_t bytes) { return tile + (bytes >> 4); }

/* out [64 keys, ROWS] = rows of x (k or v: this group's 64 keys) times rows of y (q or dout). */
template <int D, int ROWS>
__device__ __forceinline__ void transposed_scores(float (&out)[ROWS / 2], const bf16 (*x)[KEYS][64],
                                                  const bf16 (*y)[ROWS][64], int w)
{
    uint64_t a = wgmma_tile(x[0][w * 64], 1024, 1024), b = wgmma_tile(y, 1024, 1024);
    wgmma_begin();
    wgmma<ROWS, 0, 0>::start(out, a, b);
#pragma unroll
    for (int i = 1; i < D / 16; i++)
        wgmma<ROWS, 0, 0>::run(out, tile_plus(a, i / 4 * KEYS * 128 + i % 4 * 32),
                               tile_plus(b, i / 4 * ROWS * 128 + i % 4 * 32), 0);
    wgmma_commit();
}
/* sum [64 keys, D] += left (registers, transposed) times the rows of y. */
template <int D, int ROWS>
__device__ __forceinline__ void add_products(float (&sum)[D / 2], const uint32_t (&left)[ROWS / 4],
                                             const bf16 (*y)[ROWS][64], bool first)
{
    uint64_t b = wgmma_tile(y, ROWS * 128, 1024);
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        wgmma_left<D, 1>::run(sum, left + 4 * i, tile_plus(b, i * 2048), first && i == 0);
}

/* Probabilities from scores. */
template <int ROWS>
__device__ __forceinline__ void probabilities(float (&p)[ROWS / 2], const float (&scores)[ROWS / 2],
                                              const row_record<ROWS> *r, float scale, bool masked, int key, int s0)
{
    int q = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        float2 log2_sum = *(const float2 *)&r->log2_sum[n * 8 + q];
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[4 * n + e] = exp2_fast(scores[4 * n + e] * scale - (e % 2 ? log2_sum.y : log2_sum.x));
    }
    if (!masked)
        return;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        int2 lo = *(const int2 *)&r->lo[n * 8 + q];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int k = key + e / 2 * 8;
            if (k < (e % 2 ? lo.y : lo.x) || k > s0 + n * 8 + q + e % 2)
                p[4 * n + e] = 0;
        }
    }
}
/* Probabilities and their gradients p (dp - delta) as left operands. */
template <int ROWS>
__device__ __forceinline__ void to_left(uint32_t (&pl)[ROWS / 4], uint32_t (&dl)[ROWS / 4], const float (&p)[ROWS / 2],
                                        const float (&dp)[ROWS / 2], const row_record<ROWS> *r)
{
    int q = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
        float2 delta = *(const float2 *)&r->delta[n * 8 + q];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = p[4 * n + 2 * e], y = p[4 * n + 2 * e + 1];
            pl[2 * n + e] = pack2(x, y);
            dl[2 * n + e] = pack2(x * (dp[4 * n + 2 * e] - delta.x), y * (dp[4 * n + 2 * e + 1] - delta.y));
        }
    }
}
/* Left operands to shared memory, rows x keys. */
template <int ROWS> __device__ __forceinline__ void put_transposed(const uint32_t (&left)[ROWS / 4], bf16 (*out)[64])
{
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, r = lane % 8, chunk = warp * 2 + lane / 8 % 2;
    uint32_t at = smem_address(out) + (lane / 16 * 8 + r) * 128 + (chunk ^ r) * 16;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
        store_matrices_t(at + i * 2048, left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3]);
}

/* 32 registers to a thread's places in s->dq. */
__device__ __forceinline__ void put_registers(float *slot, const float *x)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        *(float4 *)(slot + i * 512) = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

/* dk or dv of some heads of a group to the summing thread; or, by the last of the blocks that share them, with the sum
 * of those before. */
template <int D>
__device__ __forceinline__ void give_keys(bwd_pool<D> *s, float (&x)[D / 2], bool last, uint32_t &given, uint32_t &sums,
                                          int w)
{
    float *slot = s->dq[w][0][threadIdx.x % 128];
#pragma unroll
    for (int part = 0; part < D / 64; part++, given++) {
        barrier_wait(&s->dq_empty, (given & 1) ^ 1);
        if (!last) {
            put_registers(slot, x + 32 * part);
            fence_async_proxy();
        } else {
            barrier_wait(&s->sum_full, sums++ & 1);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 sum = *(const float4 *)(slot + i * 512);
                x[32 * part + 4 * i] += sum.x;
                x[32 * part + 4 * i + 1] += sum.y;
                x[32 * part + 4 * i + 2] += sum.z;
                x[32 * part + 4 * i + 3] += sum.w;
            }
        }
        barrier_arrive(&s->dq_full);
    }
}

/* This block's part of dq to the summing thread; or, by the last block, with the sum of those before to dq. */
template <int D>
__device__ __forceinline__ void give_dq(const bwd_job &j, bwd_pool<D> *s, float (&dq)[32], const place &at, int h,
                                        int m, uint32_t given, uint32_t &sums, int w)
{
    int t = threadIdx.x % 128;
    float *slot = s->dq[w][0][t];
    barrier_wait(&s->dq_empty, (given & 1) ^ 1);
    if (at.n != last_block(j, m)) {
        put_registers(slot, dq);
        fence_async_proxy();
        barrier_arrive(&s->dq_full);
        return;
    }
    bool more = first_block(j, at.b, m) < at.n;
    if (more)
        barrier_wait(&s->sum_full, sums++ & 1);
    int row = m * TILE_ROWS<D> + t / 32 * 16 + t % 32 / 4 + (D == 64 ? w * 64 : 0),
        col = t % 4 * 2 + (D == 64 ? 0 : w * 64);
    bf16 *out = j.c.dq.at(at.b, h) + row * j.c.dq.row + col;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 v = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        if (more) {
            float4 sum = *(const float4 *)(slot + i * 512);
            v = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
        }
        if (col + i * 8 < j.c.width && row < j.c.rows)
            *(uint32_t *)(out + i * 8) = pack2(v.x * j.c.scale, v.y * j.c.scale);
        if (col + i * 8 < j.c.width && row + 8 < j.c.rows)
            *(uint32_t *)(out + 8 * j.c.dq.row + i * 8) = pack2(v.z * j.c.scale, v.w * j.c.scale);
    }
    barrier_arrive(&s->dq_full);
}

/* Results of a block of keys, straight from registers. */
template <int D>
__device__ __forceinline__ void store_keys(const heads_view<bf16> &out, const float (&x)[D / 2], int b, int g, int key,
                                           int keys, int width, float scale)
{
    int q = threadIdx.x % 4 * 2;
    bf16 *at = out.at(b, g) + key * out.row + q;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (key + half * 8 >= keys)
            continue;
        bf16 *row = at + half * 8 * out.row;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (n * 8 + q < width)
                *(uint32_t *)(row + n * 8) = pack2(x[4 * n + 2 * half] * scale, x[4 * n + 2 * half + 1] * scale);
    }
}

/* Keys that no query sees. */
static __device__ __forceinline__ void clear_keys(const heads_view<bf16> &out, int b, int g, int n, int w, int keys,
                                                  int width)
{
#pragma unroll 1
    for (int x = threadIdx.x % 128; x < 64 * (width / 8); x += 128) {
        int key = n * KEYS + w * 64 + x / (width / 8);
        if (key < keys)
            *(uint4 *)(out.at(b, g) + key * out.row + x % (width / 8) * 8) = make_uint4(0, 0, 0, 0);
    }
}

/* dq [64, 64] of a group: its 64 rows, or its 64 channels, over all keys of the block. */
template <int D>
__device__ __forceinline__ void row_gradients(float (&dq)[32], const bwd_pool<D> *s, uint32_t stage, int w)
{
    constexpr int ROWS = TILE_ROWS<D>;
    uint64_t a = wgmma_tile(s->ds[stage][0][D == 64 ? w * 64 : 0], 1024, 1024),
             b = wgmma_tile(s->k[D == 64 ? 0 : w], 1024, 1024);
    wgmma<64, 0, 1>::start(dq, a, b);
#pragma unroll
    for (int i = 1; i < KEYS / 16; i++)
        wgmma<64, 0, 1>::run(dq, tile_plus(a, i / 4 * ROWS * 128 + i % 4 * 32), tile_plus(b, i * 2048), 0);
}

/* A tile: its scores are there, and those of the next one are computed on the way, unless it is the
 * last of the block. */
template <int D, bool LAST>
__device__ __forceinline__ void work_tile(const bwd_job &j, bwd_pool<D> *s, float (&dk)[D / 2], float (&dv)[D / 2],
                                          float (&scores)[TILE_ROWS<D> / 2], const place &at, int h, int m, bool first,
                                          uint32_t step, uint32_t given, uint32_t &sums, int w)
{
    constexpr int ROWS = TILE_ROWS<D>, HALVES = ROWS / 64;
    const uint32_t stage = step % 2;
    const row_record<ROWS> *r = &s->rows[stage];
    const int s0 = first_query(j) + m * ROWS, key0 = at.n * KEYS + w * 64,
              key = key0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float p[ROWS / 2], dp[ROWS / 2], dq[32];
    uint32_t pl[HALVES * 16], dl[HALVES * 16];
    barrier_wait(&s->do_full[stage], step / 2 & 1);
    transposed_scores<D>(dp, s->v, s->dout[stage], w);
    probabilities<ROWS>(p, scores, r, j.c.scale * LOG2E, key0 + 63 > s0 || key0 < r->most_lo, key, s0);
    wgmma_wait<0>();
    wgmma_hold(dp);
    wgmma_hold(p); /* not rounded earlier: registers are short */
    to_left<ROWS>(pl, dl, p, dp, r);
    wgmma_begin();
    add_products<D>(dv, pl, s->dout[stage], first);
    wgmma_commit();
    put_transposed<ROWS>(dl, s->ds[stage][w]);
    fence_async_proxy();
    named_barrier<1, WORKERS>();
    row_gradients<D>(dq, s, stage, w);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold_left(pl);
    barrier_arrive(&s->do_empty[stage]);
    add_products<D>(dk, dl, s->q[stage], first);
    wgmma_commit();
    if constexpr (!LAST) {
        barrier_wait(&s->q_full[stage ^ 1], (step + 1) / 2 & 1);
        transposed_scores<D>(scores, s->k, s->q[stage ^ 1], w);
        wgmma_wait<2>();
    } else {
        wgmma_wait<1>();
    }
    wgmma_hold(dq);
    give_dq(j, s, dq, at, h, m, given, sums, w);
    wgmma_wait<0>();
    wgmma_hold(scores);
    wgmma_hold_left(dl);
    barrier_arrive(&s->q_empty[stage]);
}

/* All tiles of a block of keys; dk and dv in registers. step: tiles before, of all blocks. */
template <int D>
__device__ __forceinline__ void work_block(const bwd_job &j, bwd_pool<D> *s, float (&dk)[D / 2], float (&dv)[D / 2],
                                           const place &at, uint32_t &step, uint32_t blocks, uint32_t &given,
                                           uint32_t &sums, int w)
{
    float scores[TILE_ROWS<D> / 2];
    barrier_wait(&s->k_full, blocks & 1);
    barrier_wait(&s->q_full[step % 2], step / 2 & 1);
    transposed_scores<D>(scores, s->k, s->q[step % 2], w);
    wgmma_wait<0>();
    wgmma_hold(scores);
    barrier_wait(&s->v_full, blocks & 1);
    walk to = walk_from(j, at);
    int count = steps_of(j, at);
    for (int x = 1; x < count; x++, to.next(j, at))
        work_tile<D, false>(j, s, dk, dv, scores, at, to.h, to.m, x == 1, step++, given++, sums, w);
    work_tile<D, true>(j, s, dk, dv, scores, at, to.h, to.m, count == 1, step++, given++, sums, w);
    wgmma_hold(dk);
    wgmma_hold(dv);
    barrier_arrive(&s->kv_empty);
}

template <int D> __device__ __forceinline__ void work(const bwd_job &j, bwd_pool<D> *s, int w)
{
    uint32_t step = 0, blocks = 0, given = 0, sums = 0;
    float dk[D / 2], dv[D / 2];
    for (uint32_t round = 0;; round++) {
        int item =
            __shfl_sync(0xffffffffu, next_item(s, round), 0); /* the compiler learns that the warp stays together */
        if (item >= j.items)
            return;
        place at = place_of(j, item);
        int key = at.n * KEYS + w * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        bool last = at.share == j.shares - 1;
        if (at.empty()) { /* then for all heads of the group */
            if (last) {
                clear_keys(j.c.dk, at.b, at.g, at.n, w, j.c.keys, j.c.width);
                clear_keys(j.c.dv, at.b, at.g, at.n, w, j.c.keys, j.c.width_v);
            }
            continue;
        }
        work_block<D>(j, s, dk, dv, at, step, blocks++, given, sums, w);
        if (j.shares > 1) {
            give_keys(s, dk, last, given, sums, w);
            give_keys(s, dv, last, given, sums, w);
        }
        if (!last)
            continue;
        store_keys<D>(j.c.dk, dk, at.b, at.g, key, j.c.keys, j.c.width, j.c.scale);
        store_keys<D>(j.c.dv, dv, at.b, at.g, key, j.c.keys, j.c.width_v, 1.0f);
    }
}

#endif /* HOPPER_CODE */

/* ANY_ORDER: sums of dq need not be the same twice (gpu.fast). */
template <int D, bool ANY_ORDER>
__global__ void __launch_bounds__(THREADS, 1)
    bwd_hopper(const __grid_constant__ bwd_job j, const __grid_constant__ bwd_maps maps)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1024);
    bwd_pool<D> *s = (bwd_pool<D> *)(raw + (1024 - smem_address(raw) % 1024) % 1024);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    if (role == 0) {
        registers_down<24>();
        if (threadIdx.x == 0)
            bring<D>(j, maps, s);
        else if (threadIdx.x == 32)
            sum_up<D>(j, s);
        else if (threadIdx.x == 64)
            watch_turns<D, ANY_ORDER>(j, s);
    } else {
        registers_up<240>();
        work<D>(j, s, role - 1);
    }
#endif
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* The parts of the scratch; a job without memory gives its size. */
struct bwd_layout {
    int64_t records, dq_sum, kv_sum, turn, kv_turn, ticket, dsink_part, tile_lo, last_tile, end;
};
static bwd_layout layout_of(int64_t batch, int64_t heads, int64_t groups, int64_t rows, int64_t keys, int64_t widest)
{
    int64_t tile = widest <= 64 ? 128 : 64, tiles = ceil_div(rows, tile), all = batch * heads * tiles;
    int64_t record = widest <= 64 ? (int64_t)sizeof(row_record<128>) : (int64_t)sizeof(row_record<64>);
    bwd_layout at = {};
    at.dq_sum = round_up(all * record, PART_ALIGN);
    int64_t shared = heads > groups ? batch * groups * ceil_div(keys, KEYS) : 0;
    at.kv_sum = at.dq_sum + all * DQ_FLOATS * 4;
    at.turn = at.kv_sum + shared * (widest <= 64 ? 2 : 4) * DQ_FLOATS * 4;
    at.kv_turn = at.turn + round_up(all * 4, PART_ALIGN);
    at.ticket = at.kv_turn + round_up(shared * 4, PART_ALIGN);
    at.dsink_part = at.ticket + PART_ALIGN;
    at.tile_lo = at.dsink_part + round_up(all * 4, PART_ALIGN);
    at.last_tile = at.tile_lo + round_up(batch * tiles * 4, PART_ALIGN);
    at.end = at.last_tile + round_up(batch * ceil_div(keys, KEYS) * 4, PART_ALIGN);
    return at;
}

int64_t attention_bwd_hopper_bytes(const struct attention_bwd_args *a)
{
    return PART_ALIGN +
           layout_of(a->q.dim[0], a->q.dim[2], a->k.dim[2], a->q.dim[1], a->k.dim[1], max_i64(a->q.dim[3], a->v.dim[3]))
               .end;
}

/* How blocks are made and in what order they are taken.
 * A block takes all query heads of its group where that leaves blocks enough for an H200: a constant, so that the order
 * of sums depends on shapes alone. Units whose rows, keys and sums together about fill the cache are worked on side by
 * side: with fewer, blocks wait for turns; with more, sums leave the cache. Measured on an H200: b64 s1024 d64 in sets
 * of 32, 64 and 512 heads 282, 293 and 252 TFLOP/s, b4 s4096 d128 in sets of 4, 8, 16 and 64 heads 503, 499, 490 and
 * 377. */
static void share_heads(struct lane *l, bwd_job *j)
{
    const attn_call<bf16> &c = j->c;
    int64_t blocks = (int64_t)c.batch * c.groups * j->blocks;
    j->each = c.per_group;
    while (j->each > 1 && blocks * (c.per_group / j->each) < ENOUGH_BLOCKS)
        for (j->each--; c.per_group % j->each != 0; j->each--)
            ;
    j->shares = c.per_group / j->each;
    j->items = (int)(blocks * j->shares);
    int64_t units = (int64_t)c.batch * c.groups * j->shares, channels = c.width + c.width_v;
    int64_t bytes = units * (j->each * c.rows * (channels * 2 + c.width * 4) + c.keys * channels * 2);
    int64_t sets = min_i64(bytes / max_i64(1, cuda_of(l)->l2_bytes * 3 / 4), j->items / ENOUGH_BLOCKS);
    j->sets = (int)max_i64(1, min_i64(units, sets));
}

template <int D> static int run_bwd_hopper(struct lane *l, const struct attention_bwd_args *a, const bwd_job &j)
{
    bwd_maps maps;
    TRY(tensor_map_heads(l, &maps.q, &a->q, TILE_ROWS<D>));
    TRY(tensor_map_heads(l, &maps.k, &a->k, KEYS));
    TRY(tensor_map_heads(l, &maps.v, &a->v, KEYS));
    TRY(tensor_map_heads(l, &maps.dout, &a->d_o, TILE_ROWS<D>));
    TRY(attention_bwd_prepare(l, a, j));
    auto kernel = cuda_of(l)->want.fast ? bwd_hopper<D, true> : bwd_hopper<D, false>;
    int smem = bwd_smem<D>();
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, (unsigned)min_i64(cuda_of(l)->sm_budget, j.items), THREADS, smem, j, maps);
    return ST_OK;
}

int attention_bwd_hopper(struct lane *l, const struct attention_bwd_args *a, const attn_call<bf16> &c)
{
    TRY(check_work("attention_bwd", &a->work, attention_bwd_hopper_bytes(a), l->err));
    int widest = max(c.width, c.width_v);
    bwd_layout at = layout_of(c.batch, c.heads, c.groups, c.rows, c.keys, widest);
    char *base = (char *)(((uintptr_t)a->work.data + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN);
    bwd_job j = {};
    j.c = c;
    if (c.window >= c.keys)
        j.c.window = 0; /* one that no key falls out of is none */
    j.records = base;
    j.dq_sum = (float *)(base + at.dq_sum);
    j.kv_sum = (float *)(base + at.kv_sum);
    j.turn = (int *)(base + at.turn);
    j.kv_turn = (int *)(base + at.kv_turn);
    j.ticket = (int *)(base + at.ticket);
    j.dsink_part = (float *)(base + at.dsink_part);
    j.tile_lo = c.doc != NULL ? (int *)(base + at.tile_lo) : NULL;
    j.last_tile = c.doc != NULL ? (int *)(base + at.last_tile) : NULL;
    j.rows_of_tile = widest <= 64 ? 128 : 64;
    j.tiles = (int)ceil_div(c.rows, j.rows_of_tile);
    j.blocks = (int)ceil_div(c.keys, KEYS);
    share_heads(l, &j);
    return widest <= 64 ? run_bwd_hopper<64>(l, a, j) : run_bwd_hopper<128>(l, a, j);
}
