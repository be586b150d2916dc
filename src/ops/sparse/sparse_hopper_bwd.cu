/* sparse backward for Hopper, bf16; see sparse_hopper.cuh. For a chunk of queries of one sequence:
 *   dq_hopper    64 heads of a query: scores and do.v of 32 keys at a time, then dq in registers. The weights p and ds
 *                of every head and entry of the list go to scratch, rounded to bf16, as images of shared memory: 64
 *                entries of all heads in lines of 128 bytes, swizzled.
 *   add_hopper, sum_columns (sparse_hopper_add.cu)   what the queries add to keys
 *
 * What bounds dq_hopper: products of 64 x 32 with both operands in shared memory read 3 KB for 16 cycles of the tensor
 * cores. With what dq reads and the copies write, 32 keys of 576 channels are 294 KB of shared memory, 2300 cycles at
 * 128 bytes each, where the tensor cores need 1664 and the copies from the cache 1230 to 1540. */
#include "ops/sparse/sparse_hopper.cuh"

enum { DQ_KEYS = 32 };

/* ds: tile t in columns 32 (t % 2) of its lines. */
template <int D, int DV> struct dq_pool {
    bf16 q[D / 64][HOP_HEADS][64];
    bf16 d_o[DV / 64][HOP_HEADS][64];
    bf16 kv[2][D / 64][DQ_KEYS][64];
    bf16 ds[HOP_HEADS][64];
    uint32_t valid[2][2];
    uint64_t kv_full[2], kv_empty[2], ds_full[2];
};

#if HOPPER_CODE

/* ---- dq -------------------------------------------------------------------------------------- */

/* Where this thread's two heads stand in an image, and what they need. */
struct own_rows {
    float lse[2], delta[2];
    char *p[2], *ds[2]; /* lines of the first image */
    int row;
};
__device__ __forceinline__ own_rows rows_of_thread(const sparse_call<bf16> &c, const sparse_scratch &w, int b, int i,
                                                   int at_row, int first)
{
    own_rows r;
    r.row = threadIdx.x % GROUP / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = first + r.row + half * 8;
        int64_t line = (int64_t)at_row * w.heads * w.most + (int64_t)h * IMAGE_KEYS;
        r.lse[half] = h < c.heads ? *c.lse_at(b, h, i) * SPARSE_LOG2E : INFINITY; /* weights of no head are 0 */
        r.delta[half] = h < c.heads ? w.delta[((int64_t)b * c.rows + i) * c.heads + h] : 0.0f;
        r.p[half] = (char *)(w.p + line);
        r.ds[half] = (char *)(w.ds + line);
    }
    return r;
}

/* p and ds of a tile: to the images, and ds to shared memory. */
template <int D, int DV>
__device__ __forceinline__ void weigh(dq_pool<D, DV> *s, const own_rows &r, const float (&x)[DQ_KEYS / 2],
                                      const float (&dp)[DQ_KEYS / 2], int t, int64_t image, uint32_t valid, float scale)
{
    float ds[DQ_KEYS / 2];
    int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < DQ_KEYS / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float p[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int at = 4 * n + 2 * half + e;
                float power = exp2_fast(x[at] * (scale * SPARSE_LOG2E) - r.lse[half]);
                p[e] = valid >> (8 * n + column + e) & 1 ? power : 0.0f;
                ds[at] = p[e] * (dp[at] - r.delta[half]) * scale;
            }
            int64_t to = image + (((t % 2 * 4 + n) ^ (r.row & 7)) << 4) + column * 2;
            *(uint32_t *)(r.p[half] + to) = pack_bf16(p[0], p[1]);
            *(uint32_t *)(r.ds[half] + to) = pack_bf16(ds[4 * n + 2 * half], ds[4 * n + 2 * half + 1]);
        }
#pragma unroll
    for (int k = 0; k < DQ_KEYS; k += 16)
        store_16x16(s->ds, t % 2 * DQ_KEYS + k, ds + k / 2);
}

template <int D, int DV>
__device__ __forceinline__ void weight_group(dq_pool<D, DV> *s, const sparse_call<bf16> &c, const sparse_scratch &w,
                                             int b, int i, int at_row, int first)
{
    own_rows r = rows_of_thread(c, w, b, i, at_row, first);
    for (int t = 0; t < w.most / DQ_KEYS; t++) {
        float x[DQ_KEYS / 2], dp[DQ_KEYS / 2];
        barrier_wait(&s->kv_full[t % 2], (uint32_t)(t / 2) & 1);
        wgmma_begin();
        score_product<D / 64, DQ_KEYS, HOP_HEADS>(x, s->q[0][0], s->kv[t % 2]);
        score_product<DV / 64, DQ_KEYS, HOP_HEADS>(dp, s->d_o[0][0], s->kv[t % 2]);
        wgmma_commit();
        uint32_t valid = s->valid[t % 2][0] | s->valid[t % 2][1] << 16;
        wgmma_wait<0>();
        wgmma_hold(x);
        wgmma_hold(dp);
        /* The columns of tile t - 2 are free: its keys were given back before these came. */
        weigh<D, DV>(s, r, x, dp, t, (int64_t)(t / 2) * w.heads * (IMAGE_KEYS * 2), valid, c.scale);
        fence_async_proxy();
        barrier_arrive(&s->ds_full[t % 2]);
    }
}

/* BLOCKS blocks of 64 channels of dq, from FROM on: products of at most 128 channels. */
template <int D, int DV, int FROM, int BLOCKS>
__device__ __forceinline__ void dq_group(dq_pool<D, DV> *s, const sparse_call<bf16> &c, const sparse_scratch &w, int b,
                                         int i, int first)
{
    constexpr int PAIRS = BLOCKS / 2, ONE = BLOCKS % 2;
    float two[PAIRS > 0 ? PAIRS : 1][64], one[32];
#pragma unroll
    for (int x = 0; x < PAIRS; x++)
        clear_sums(two[x]);
    clear_sums(one);
    for (int t = 0; t < w.most / DQ_KEYS; t++) {
        const bf16(*keys)[DQ_KEYS][64] = s->kv[t % 2] + FROM;
        barrier_wait(&s->ds_full[t % 2], (uint32_t)(t / 2) & 1);
        wgmma_begin();
#pragma unroll
        for (int x = 0; x < PAIRS; x++)
            add_product<128, DQ_KEYS>(two[x], s->ds, t % 2 * DQ_KEYS, keys + 2 * x);
        if (ONE)
            add_product<64, DQ_KEYS>(one, s->ds, t % 2 * DQ_KEYS, keys + 2 * PAIRS);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < PAIRS; x++)
            wgmma_hold(two[x]);
        wgmma_hold(one);
        barrier_arrive(&s->kv_empty[t % 2]);
    }
#pragma unroll
    for (int x = 0; x < PAIRS; x++)
        store_rows<128>(two[x], c.dq, b, i, first, c.heads, (FROM + 2 * x) * 64, 1.0f, 1.0f);
    if (ONE)
        store_rows<64>(one, c.dq, b, i, first, c.heads, (FROM + 2 * PAIRS) * 64, 1.0f, 1.0f);
}

template <int D, int DV>
__device__ __forceinline__ void bring_rows(dq_pool<D, DV> *s, const sparse_call<bf16> &c, int b, int i, int first)
{
    int thread = threadIdx.x - GROUP;
    bring_heads<HOP_HEADS, D / 64, HOP_THREADS - GROUP>(s->q, c.q, b, i, first, c.heads, 0, thread);
    bring_heads<HOP_HEADS, DV / 64, HOP_THREADS - GROUP>(s->d_o, c.dout, b, i, first, c.heads, 0, thread);
    heads_are_there();
}

#endif /* HOPPER_CODE */

template <int D, int DV>
__global__ void __launch_bounds__(HOP_THREADS, 1)
    dq_hopper(const __grid_constant__ sparse_call<bf16> c, const __grid_constant__ sparse_scratch w, int b,
              int first_row)
{
#if HOPPER_CODE
    constexpr int BLOCKS = D / 64;
    DYNAMIC_SHARED(char, raw, 1024);
    dq_pool<D, DV> *s = pool_at<dq_pool<D, DV>>(raw);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), groups = w.heads / HOP_HEADS,
        first = blockIdx.x % groups * HOP_HEADS, at_row = blockIdx.x / groups, i = first_row + at_row;
    if (threadIdx.x == 0) {
        init_gather(s);
        barrier_init(&s->ds_full[0], GROUP);
        barrier_init(&s->ds_full[1], GROUP);
        barrier_init_done();
    }
    __syncthreads();
    if (role == 0) {
        registers_down<48>();
        gather_tiles<D, DQ_KEYS>(s, c, b, c.list(b, i), w.most / DQ_KEYS);
        return;
    }
    bring_rows<D, DV>(s, c, b, i, first);
    if (role == 1) {
        registers_down<104>();
        weight_group<D, DV>(s, c, w, b, i, at_row, first);
    } else if (role == 2) {
        registers_up<200>();
        dq_group<D, DV, 0, (BLOCKS + 1) / 2>(s, c, w, b, i, first);
    } else {
        registers_up<160>();
        dq_group<D, DV, (BLOCKS + 1) / 2, BLOCKS / 2>(s, c, w, b, i, first);
    }
#endif
}

/* ---- launchers ------------------------------------------------------------------------------- */

int64_t sparse_hopper_bytes(const struct sparse_bwd_args *a, void *work, sparse_scratch *out)
{
    enum { ALIGN = 256 };
    int64_t heads = round_up(a->q.dim[2], HOP_HEADS), most = round_up(a->idx.dim[2], IMAGE_KEYS);
    int64_t rows = min_i64(HOP_CHUNK, max_i64(1, a->q.dim[1])), at = 0;
    int64_t bytes[] = {a->q.dim[0] * a->q.dim[1] * a->q.dim[2] * 4,
                       rows * heads * most * 2,
                       rows * heads * most * 2,
                       rows * most * a->kv.dim[2] * 2,
                       a->kv.dim[1] * HOP_CHUNK * 4,
                       a->kv.dim[1] * a->kv.dim[2] * 4};
    char *part[countof(bytes)];
    for (int i = 0; i < countof(bytes); i++) {
        part[i] = (char *)work + at;
        at += round_up(bytes[i], ALIGN);
    }
    if (out == NULL)
        return at;
    *out = {};
    out->delta = (float *)part[0];
    out->p = (bf16 *)part[1];
    out->ds = (bf16 *)part[2];
    out->add_narrow = (bf16 *)part[3];
    out->place = (int32_t *)part[4];
    out->sum = (float *)part[5];
    out->heads = (int)heads;
    out->most = (int)most;
    return at;
}

template <int D, int DV>
static int run(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count)
{
    constexpr int SMEM = pool_bytes<dq_pool<D, DV>>();
    auto dq = dq_hopper<D, DV>;
    NEEDS_SMEM(l, dq, SMEM);
    LAUNCH(l, dq, (unsigned)(count * (w.heads / HOP_HEADS)), HOP_THREADS, SMEM, c, w, b, first);
    return sparse_add_hopper(l, c, w, b, first, count);
}

int sparse_bwd_hopper(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b)
{
    auto widths = c.width == 576 ? run<576, 512> : c.width == 512 ? run<512, 512> : run<192, 128>;
    for (int first = 0; first < c.rows; first += HOP_CHUNK)
        TRY(widths(l, c, w, b, first, min(HOP_CHUNK, c.rows - first)));
    return ST_OK;
}
