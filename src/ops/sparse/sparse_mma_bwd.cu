/* sparse backward on tensor cores, bf16; see sparse_mma.cuh. For a chunk of queries of one sequence:
 *   dq_mma     64 heads of a query: scores and do.v of 32 keys at a time, then dq in registers. The weights p and ds of
 *              every head and entry of the list go to scratch, rounded to bf16.
 *   add_mma    one query, 64 entries of its list: what it adds to those keys, ds^T q + p^T do, all heads summed
 *   sum_keys   a block for each key: what the queries of the chunk add to it, in order */
#include "ops/sparse/sparse_mma.cuh"

enum { ADD_KEYS = 64, ADD_HEADS = 32, ADD_PITCH = ADD_KEYS + MMA_PAD, SUM_THREADS = 160, CHUNK = 64 };

template <int D, int DV> struct dq_shared {
    bf16 q[MMA_HEADS * (D + MMA_PAD)];
    bf16 d_o[MMA_HEADS * (DV + MMA_PAD)];
    bf16 kv[MMA_KEYS * (D + MMA_PAD)];
    float s[MMA_HEADS * SCORE_PITCH], dp[MMA_HEADS * SCORE_PITCH];
    bf16 ds[MMA_HEADS * WEIGHT_PITCH];
    float lse[MMA_HEADS], delta[MMA_HEADS];
    int keys[MMA_KEYS];
};

/* p and ds of one tile: to scratch, and ds to shared memory. Four threads have a head. */
template <typename S>
__device__ __forceinline__ void weights_tile(S &m, float scale, bool head_exists, bf16 *p_out, bf16 *ds_out)
{
    int row = threadIdx.x / 4, from = threadIdx.x % 4 * 8;
    float p[8], ds[8];
#pragma unroll
    for (int x = 0; x < 8; x++) {
        float s = m.s[row * SCORE_PITCH + from + x] * scale * SPARSE_LOG2E - m.lse[row];
        p[x] = head_exists && m.keys[from + x] >= 0 ? exp2_fast(s) : 0.0f;
        ds[x] = p[x] * (m.dp[row * SCORE_PITCH + from + x] - m.delta[row]) * scale;
    }
    uint4 two[2] = {
        make_uint4(pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]), pack_bf16(p[6], p[7])),
        make_uint4(pack_bf16(ds[0], ds[1]), pack_bf16(ds[2], ds[3]), pack_bf16(ds[4], ds[5]), pack_bf16(ds[6], ds[7]))};
    *(uint4 *)(p_out + from) = two[0];
    *(uint4 *)(ds_out + from) = two[1];
    *(uint4 *)(m.ds + row * WEIGHT_PITCH + from) = two[1];
}

template <int D, int DV>
static __global__ void __launch_bounds__(MMA_THREADS, 1)
    dq_mma(const __grid_constant__ sparse_call<bf16> c, const __grid_constant__ sparse_scratch w, int b, int first_row)
{
    constexpr int PITCH = D + MMA_PAD, N = D / 16;
    DYNAMIC_SHARED(char, raw, 16);
    dq_shared<D, DV> &m = *(dq_shared<D, DV> *)raw;
    int groups = w.heads / MMA_HEADS, first = blockIdx.x % groups * MMA_HEADS, at_row = blockIdx.x / groups,
        i = first_row + at_row, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t *list = c.list(b, i);
    float acc[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] = 0.0f;
    load_heads<D>(m.q, c.q, b, i, first, c.heads);
    load_heads<DV>(m.d_o, c.dout, b, i, first, c.heads);
    if (threadIdx.x < MMA_HEADS) {
        int h = first + threadIdx.x;
        m.lse[threadIdx.x] = h < c.heads ? *c.lse_at(b, h, i) * SPARSE_LOG2E : 0.0f;
        m.delta[threadIdx.x] = h < c.heads ? w.delta[((int64_t)b * c.rows + i) * c.heads + h] : 0.0f;
    }
    int64_t out = ((int64_t)at_row * w.heads + first + threadIdx.x / 4) * w.most;
    for (int k = 0; k < w.most; k += MMA_KEYS) {
        gather_keys<D>(m.kv, m.keys, c, b, list, k);
        copies_wait<0>();
        __syncthreads();
        if (warp < 4)
            score_tile<D, PITCH, PITCH, 4>(m.s, m.q, warp * 16, m.kv, 0);
        else
            score_tile<DV, DV + MMA_PAD, PITCH, 4>(m.dp, m.d_o, (warp - 4) * 16, m.kv, 0);
        __syncthreads();
        weights_tile(m, c.scale, first + threadIdx.x / 4 < c.heads, w.p + out + k, w.ds + out + k);
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < MMA_KEYS; kk += 16) {
            uint32_t a[4];
            frag_a(a, m.ds + warp % 4 * 16 * WEIGHT_PITCH + kk, WEIGHT_PITCH);
            add_channels<N, PITCH>(acc, a, m.kv + kk * PITCH, warp / 4 * (D / 2));
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = first + warp % 4 * 16 + lane / 4 + half * 8;
        if (h >= c.heads)
            continue;
        bf16 *dq = c.dq.at(b, i, h) + warp / 4 * (D / 2) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; n++)
            *(uint32_t *)(dq + n * 8) = pack_bf16(acc[n][2 * half], acc[n][2 * half + 1]);
    }
}

template <int D, int DV> struct add_stage {
    bf16 q[ADD_HEADS * (D + MMA_PAD)];
    bf16 d_o[ADD_HEADS * (DV + MMA_PAD)];
    bf16 p[ADD_HEADS * ADD_PITCH], ds[ADD_HEADS * ADD_PITCH];
};

template <int D, int DV>
__device__ __forceinline__ void load_stage(add_stage<D, DV> &to, const sparse_call<bf16> &c, const sparse_scratch &w,
                                           int b, int i, int64_t weights, int first)
{
    for (int x = threadIdx.x; x < ADD_HEADS * (D / 8); x += MMA_THREADS) {
        int h = x / (D / 8), at = x % (D / 8) * 8;
        bool valid = first + h < c.heads;
        copy_async16(to.q + h * (D + MMA_PAD) + at, c.q.at(b, i, valid ? first + h : 0) + at, valid);
    }
    for (int x = threadIdx.x; x < ADD_HEADS * (DV / 8); x += MMA_THREADS) {
        int h = x / (DV / 8), at = x % (DV / 8) * 8;
        bool valid = first + h < c.heads;
        copy_async16(to.d_o + h * (DV + MMA_PAD) + at, c.dout.at(b, i, valid ? first + h : 0) + at, valid);
    }
    for (int x = threadIdx.x; x < ADD_HEADS * (ADD_KEYS / 8); x += MMA_THREADS) {
        int h = x / (ADD_KEYS / 8), at = x % (ADD_KEYS / 8) * 8;
        int64_t from = weights + (int64_t)(first + h) * w.most + at;
        copy_async16(to.p + h * ADD_PITCH + at, w.p + from);
        copy_async16(to.ds + h * ADD_PITCH + at, w.ds + from);
    }
    copies_commit();
}

template <int D, int DV>
static __global__ void __launch_bounds__(MMA_THREADS, 1)
    add_mma(const __grid_constant__ sparse_call<bf16> c, const __grid_constant__ sparse_scratch w, int b, int first_row)
{
    /* A warp has half of the channels of 16 keys; values have those of the first half and some of the second. */
    constexpr int N = D / 16, REST = (DV - D / 2) / 8, PITCH = D + MMA_PAD, PITCH_V = DV + MMA_PAD;
    DYNAMIC_SHARED(char, raw, 16);
    add_stage<D, DV> *stage = (add_stage<D, DV> *)raw;
    int key = blockIdx.x * ADD_KEYS, row = blockIdx.y, i = first_row + row, warp = threadIdx.x / 32,
        lane = threadIdx.x % 32, tile = warp % 4 * 16, side = warp / 4;
    int64_t weights = (int64_t)row * w.heads * w.most + key;
    float acc[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] = 0.0f;
    load_stage<D, DV>(stage[0], c, w, b, i, weights, 0);
    for (int h = 0, at = 0; h < w.heads; h += ADD_HEADS, at ^= 1) {
        if (h + ADD_HEADS < w.heads) {
            load_stage<D, DV>(stage[at ^ 1], c, w, b, i, weights, h + ADD_HEADS);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const add_stage<D, DV> &s = stage[at];
#pragma unroll
        for (int kk = 0; kk < ADD_HEADS; kk += 16) {
            uint32_t a[4];
            frag_a_t(a, s.ds + kk * ADD_PITCH + tile, ADD_PITCH);
            add_channels<N, PITCH>(acc, a, s.q + kk * PITCH, side * (D / 2));
            frag_a_t(a, s.p + kk * ADD_PITCH + tile, ADD_PITCH);
            if (side == 0)
                add_channels<N, PITCH_V>(acc, a, s.d_o + kk * PITCH_V, 0);
            else
                add_channels<REST, PITCH_V>(acc, a, s.d_o + kk * PITCH_V, D / 2);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float *out =
            w.add + ((int64_t)row * w.most + key + tile + lane / 4 + half * 8) * D + side * (D / 2) + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; n++)
            *(float2 *)(out + n * 8) = make_float2(acc[n][2 * half], acc[n][2 * half + 1]);
    }
}

static __global__ void __launch_bounds__(SUM_THREADS)
    sum_keys(const __grid_constant__ sparse_scratch w, int width, bool add)
{
    int64_t j = blockIdx.x;
    int lane = threadIdx.x % 32;
    bool mine = threadIdx.x * 4 < width;
    float4 *sum = (float4 *)(w.sum + j * width) + threadIdx.x;
    float4 total = mine && add ? *sum : make_float4(0, 0, 0, 0);
    for (int base = 0; base < CHUNK; base += 32) {
        int k = w.place[j * CHUNK + base + lane];
        unsigned there = __ballot_sync(0xffffffffu, k >= 0);
        while (there != 0) {
            int row = __ffs((int)there) - 1, at = __shfl_sync(0xffffffffu, k, row);
            there &= there - 1;
            if (!mine)
                continue;
            float4 v = ((const float4 *)(w.add + ((int64_t)(base + row) * w.most + at) * width))[threadIdx.x];
            total.x += v.x;
            total.y += v.y;
            total.z += v.z;
            total.w += v.w;
        }
    }
    if (mine)
        *sum = total;
}

/* ---- launchers ------------------------------------------------------------------------------- */

int64_t sparse_mma_bytes(const struct sparse_bwd_args *a, void *work, sparse_scratch *out)
{
    enum { ALIGN = 256 };
    int64_t heads = round_up(a->q.dim[2], MMA_HEADS), most = round_up(a->idx.dim[2], ADD_KEYS);
    int64_t rows = min_i64(CHUNK, max_i64(1, a->q.dim[1])), at = 0;
    int64_t bytes[] = {a->q.dim[0] * a->q.dim[1] * a->q.dim[2] * 4,
                       rows * heads * most * 2,
                       rows * heads * most * 2,
                       rows * most * a->kv.dim[2] * 4,
                       a->kv.dim[1] * CHUNK * 4,
                       a->kv.dim[1] * a->kv.dim[2] * 4};
    char *part[countof(bytes)];
    for (int i = 0; i < countof(bytes); i++) {
        part[i] = (char *)work + at;
        at += round_up(bytes[i], ALIGN);
    }
    if (out != NULL)
        *out = {(float *)part[0],   (bf16 *)part[1],  (bf16 *)part[2], (float *)part[3], NULL,
                (int32_t *)part[4], (float *)part[5], (int)heads,      (int)most};
    return at;
}

template <int D, int DV>
static int run(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count)
{
    auto dq = dq_mma<D, DV>;
    auto add = add_mma<D, DV>;
    NEEDS_SMEM(l, dq, sizeof(dq_shared<D, DV>));
    NEEDS_SMEM(l, add, 2 * sizeof(add_stage<D, DV>));
    LAUNCH(l, dq, (unsigned)(count * (w.heads / MMA_HEADS)), MMA_THREADS, sizeof(dq_shared<D, DV>), c, w, b, first);
    LAUNCH(l, add, dim3((unsigned)(w.most / ADD_KEYS), (unsigned)count), MMA_THREADS, 2 * sizeof(add_stage<D, DV>), c,
           w, b, first);
    return ST_OK;
}

int sparse_bwd_mma(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b)
{
    for (int first = 0; first < c.rows; first += CHUNK) {
        int count = min(CHUNK, c.rows - first);
        int64_t places = (int64_t)c.keys * CHUNK, entries = (int64_t)count * c.most;
        auto widths = c.width == 576 ? run<576, 512> : c.width == 512 ? run<512, 512> : run<160, 128>;
        TRY(widths(l, c, w, b, first, count));
        LAUNCH(l, fill_words<-1>, (unsigned)ceil_div(places, 256), 256, 0, w.place, places);
        LAUNCH(l, note_list_places<bf16>, (unsigned)ceil_div(entries, 256), 256, 0, c, b, first, count, w.place, CHUNK,
               1);
        LAUNCH(l, sum_keys, c.keys, SUM_THREADS, 0, w, c.width, first > 0);
    }
    return ST_OK;
}
