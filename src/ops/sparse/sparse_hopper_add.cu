/* sparse backward for Hopper, what queries add to keys; see sparse_hopper_bwd.cu, which leaves the weights p and ds of
 * a chunk in scratch:
 *   add_hopper    one query, a slice of channels: what it adds to its keys, ds^T q + p^T do, all heads summed, 64
 *                 entries at a time. Queries' slices stay in shared memory, the images of p and ds come by bulk copies.
 *   sum_columns   a warp for each key: what the queries of the chunk add to it, in order
 *
 * What a query adds to a key is rounded to bf16 before it is summed in fp32. The weights it is made of were rounded to
 * bf16 already, so this makes its error larger by less than half, and it halves what is the largest traffic to memory:
 * for 65,536 queries with lists of 2048 and 576 channels 155 GB, written once and read once. */
#include "ops/sparse/sparse_hopper.cuh"

enum { STAGES = 3, ADD_THREADS = 3 * GROUP, SUM_WARPS = 8 };

/* Channels of a slice: as many as a group can hold for 64 keys, in parts of equal size. */
template <int D> static constexpr int SLICE_BLOCKS = D % 192 == 0 ? 3 : 4;

template <int BLOCKS, int HEADS> struct add_pool {
    bf16 q[BLOCKS][HEADS][64], d_o[BLOCKS][HEADS][64];
    bf16 image[STAGES][2][HEADS][64]; /* ds and p: a line for each head */
    uint64_t full[STAGES], empty[STAGES];
};

#if HOPPER_CODE

/* One thread: images of ds and p of 64 entries. */
template <int BLOCKS, int HEADS>
__device__ __forceinline__ void bring_images(add_pool<BLOCKS, HEADS> *s, const sparse_scratch &w, int row)
{
    int64_t image = (int64_t)w.heads * IMAGE_KEYS, at = (int64_t)row * w.heads * w.most;
    for (int t = 0; t < w.most / IMAGE_KEYS; t++) {
        int stage = t % STAGES;
        barrier_wait(&s->empty[stage], (uint32_t)(t / STAGES & 1) ^ 1);
        barrier_expect(&s->full[stage], (uint32_t)image * 4);
        bulk_load(s->image[stage][0], w.ds + at + t * image, (uint32_t)image * 2, &s->full[stage]);
        bulk_load(s->image[stage][1], w.p + at + t * image, (uint32_t)image * 2, &s->full[stage]);
    }
}

/* acc [64 entries, N channels] += image^T times rows of heads. */
template <int N, int HEADS>
__device__ __forceinline__ void add_heads(float (&acc)[N / 2], const bf16 (*image)[64], const bf16 (*rows)[HEADS][64],
                                          bool first)
{
    uint64_t a = wgmma_tile(image, 1024, 1024), b = wgmma_tile(rows, HEADS * 128, 1024);
#pragma unroll
    for (int x = 0; x < HEADS / 16; x++)
        wgmma<N, 1, 1>::run(acc, tile_at(a, x * 2048), tile_at(b, x * 2048), first && x == 0);
}

/* Every second tile of 64 entries. VALUES: blocks of the slice that values have. */
template <int BLOCKS, int VALUES, int HEADS>
__device__ __forceinline__ void add_group(add_pool<BLOCKS, HEADS> *s, const sparse_scratch &w, int row, int width,
                                          int channel, int turn)
{
    int lane = threadIdx.x % 32, entry = threadIdx.x % GROUP / 32 * 16 + lane / 4;
    for (int t = turn; t < w.most / IMAGE_KEYS; t += 2) {
        float acc[BLOCKS * 32];
        int stage = t % STAGES;
        barrier_wait(&s->full[stage], (uint32_t)(t / STAGES) & 1);
        wgmma_begin();
        add_heads<BLOCKS * 64, HEADS>(acc, s->image[stage][0], s->q, true);
        add_heads<VALUES * 64, HEADS>(*(float(*)[VALUES * 32]) acc, s->image[stage][1], s->d_o, false);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(acc);
        barrier_arrive(&s->empty[stage]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            bf16 *to = w.add_narrow + ((int64_t)row * w.most + t * IMAGE_KEYS + entry + half * 8) * width + channel +
                       lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < BLOCKS * 8; n++)
                *(uint32_t *)(to + n * 8) = pack_bf16(acc[4 * n + 2 * half], acc[4 * n + 2 * half + 1]);
        }
    }
}

/* The part of add_hopper that depends on how many blocks of the slice values have. */
template <int BLOCKS, int VALUES, int HEADS>
__device__ __forceinline__ void multiply(add_pool<BLOCKS, HEADS> *s, const sparse_call<bf16> &c,
                                         const sparse_scratch &w, int b, int i, int row, int from)
{
    int thread = threadIdx.x - GROUP;
    bring_heads<HEADS, BLOCKS, RESULTS>(s->q, c.q, b, i, 0, c.heads, from, thread);
    bring_heads<HEADS, VALUES, RESULTS>(s->d_o, c.dout, b, i, 0, c.heads, from, thread);
    copies_commit();
    copies_wait<0>();
    fence_async_proxy();
    named_barrier<1, RESULTS>();
    add_group<BLOCKS, VALUES, HEADS>(s, w, row, c.width, from * 64, thread / GROUP);
}

#endif /* HOPPER_CODE */

template <int D, int DV, int HEADS>
__global__ void __launch_bounds__(ADD_THREADS, 1)
    add_hopper(const __grid_constant__ sparse_call<bf16> c, const __grid_constant__ sparse_scratch w, int b,
               int first_row)
{
#if HOPPER_CODE
    constexpr int BLOCKS = SLICE_BLOCKS<D>, SLICES = D / 64 / BLOCKS, LEFT = DV / 64 - (SLICES - 1) * BLOCKS;
    DYNAMIC_SHARED(char, raw, 1024);
    add_pool<BLOCKS, HEADS> *s = pool_at<add_pool<BLOCKS, HEADS>>(raw);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), slice = blockIdx.x % SLICES, row = blockIdx.x / SLICES,
        i = first_row + row;
    if (threadIdx.x == 0) {
        for (int x = 0; x < STAGES; x++) {
            barrier_init(&s->full[x], 1);
            barrier_init(&s->empty[x], GROUP);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (role == 0) {
        registers_down<24>();
        if (threadIdx.x == 0)
            bring_images<BLOCKS, HEADS>(s, w, row);
    } else {
        registers_up<240>();
        if (slice < SLICES - 1)
            multiply<BLOCKS, BLOCKS, HEADS>(s, c, w, b, i, row, slice * BLOCKS);
        else
            multiply<BLOCKS, LEFT, HEADS>(s, c, w, b, i, row, slice * BLOCKS);
    }
#endif
}

/* place[key][query of the chunk]: where the key stands in the query's list, -1: nowhere. */
static __global__ void __launch_bounds__(256) clear_columns(int4 *place, int64_t n)
{
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at < n)
        place[at] = make_int4(-1, -1, -1, -1);
}
/* Channels of a key that a lane sums: 16 bytes of bf16 at a time. */
template <int D> struct lane_sums {
    static constexpr int PACKS = D / 8, N = (PACKS + 31) / 32;
    float v[N][8];
};
template <int D> struct lane_packs {
    uint4 v[lane_sums<D>::N];
};
template <int D> __device__ __forceinline__ lane_packs<D> load_packs(const bf16 *row)
{
    lane_packs<D> p;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < lane_sums<D>::N; n++)
        p.v[n] = lane + n * 32 < lane_sums<D>::PACKS ? load_passing((const uint4 *)row + lane + n * 32)
                                                     : make_uint4(0, 0, 0, 0);
    return p;
}
template <int D> __device__ __forceinline__ void add_packs(lane_sums<D> &sum, const lane_packs<D> &p)
{
#pragma unroll
    for (int n = 0; n < lane_sums<D>::N; n++) {
        uint32_t word[4] = {p.v[n].x, p.v[n].y, p.v[n].z, p.v[n].w};
#pragma unroll
        for (int x = 0; x < 4; x++) {
            float2 two = unpack_bf16(word[x]);
            sum.v[n][2 * x] += two.x;
            sum.v[n][2 * x + 1] += two.y;
        }
    }
}
/* Sums of a key from memory, or 0; and back. */
template <int D> __device__ __forceinline__ void load_sums(lane_sums<D> &sum, const float *from, bool zero)
{
#pragma unroll
    for (int n = 0; n < lane_sums<D>::N; n++) {
        int pack = threadIdx.x % 32 + n * 32;
        bool there = !zero && pack < lane_sums<D>::PACKS;
#pragma unroll
        for (int x = 0; x < 8; x += 4) {
            float4 v = there ? *(const float4 *)(from + pack * 8 + x) : make_float4(0, 0, 0, 0);
            sum.v[n][x] = v.x;
            sum.v[n][x + 1] = v.y;
            sum.v[n][x + 2] = v.z;
            sum.v[n][x + 3] = v.w;
        }
    }
}
template <int D> __device__ __forceinline__ void store_sums(float *to, const lane_sums<D> &sum)
{
#pragma unroll
    for (int n = 0; n < lane_sums<D>::N; n++) {
        int pack = threadIdx.x % 32 + n * 32;
#pragma unroll
        for (int x = 0; x < 8; x += 4)
            if (pack < lane_sums<D>::PACKS)
                *(float4 *)(to + pack * 8 + x) =
                    make_float4(sum.v[n][x], sum.v[n][x + 1], sum.v[n][x + 2], sum.v[n][x + 3]);
    }
}

/* A key that no query of the chunk reads is left alone, but by the first chunk. Two rows are under way at a time. */
template <int D>
static __global__ void __launch_bounds__(SUM_WARPS * 32)
    sum_columns(const __grid_constant__ sparse_scratch w, int keys, bool add)
{
    int lane = threadIdx.x % 32;
    int64_t j = (int64_t)blockIdx.x * SUM_WARPS + threadIdx.x / 32;
    if (j >= keys)
        return;
    float *sum = w.sum + j * D;
    lane_sums<D> total;
    bool touched = !add;
    load_sums<D>(total, sum, true);
    for (int base = 0; base < HOP_CHUNK; base += 32) {
        int k = w.place[j * HOP_CHUNK + base + lane];
        unsigned there = __ballot_sync(0xffffffffu, k >= 0);
        if (there != 0 && !touched) {
            touched = true;
            load_sums<D>(total, sum, false);
        }
        const bf16 *rows = w.add_narrow + (int64_t)base * w.most * D;
        while (there != 0) {
            int one = __ffs((int)there) - 1, at = __shfl_sync(0xffffffffu, k, one);
            there &= there - 1;
            int two = there != 0 ? __ffs((int)there) - 1 : one, at_two = __shfl_sync(0xffffffffu, k, two);
            there &= there - 1;
            lane_packs<D> first = load_packs<D>(rows + ((int64_t)one * w.most + at) * D),
                          second = load_packs<D>(rows + ((int64_t)two * w.most + at_two) * D);
            add_packs<D>(total, first);
            if (two != one)
                add_packs<D>(total, second);
        }
    }
    if (touched)
        store_sums<D>(sum, total);
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <int D, int DV, int HEADS>
static int run_add(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count)
{
    constexpr int BLOCKS = SLICE_BLOCKS<D>, SMEM = pool_bytes<add_pool<BLOCKS, HEADS>>();
    auto add = add_hopper<D, DV, HEADS>;
    auto sum = sum_columns<D>;
    int64_t places = (int64_t)c.keys * (HOP_CHUNK / 4), entries = (int64_t)count * c.most;
    NEEDS_SMEM(l, add, SMEM);
    LAUNCH(l, add, (unsigned)(count * (D / 64 / BLOCKS)), ADD_THREADS, SMEM, c, w, b, first);
    LAUNCH(l, clear_columns, (unsigned)ceil_div(places, 256), 256, 0, (int4 *)w.place, places);
    LAUNCH(l, note_list_places<bf16>, (unsigned)ceil_div(entries, 256), 256, 0, c, b, first, count, w.place, HOP_CHUNK,
           1);
    LAUNCH(l, sum, (unsigned)ceil_div(c.keys, SUM_WARPS), SUM_WARPS * 32, 0, w, c.keys, first > 0);
    return ST_OK;
}

template <int D, int DV>
static int run(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count)
{
    return (w.heads == 64 ? run_add<D, DV, 64> : run_add<D, DV, 128>)(l, c, w, b, first, count);
}

int sparse_add_hopper(struct lane *l, const sparse_call<bf16> &c, const sparse_scratch &w, int b, int first, int count)
{
    auto widths = c.width == 576 ? run<576, 512> : c.width == 512 ? run<512, 512> : run<192, 128>;
    return widths(l, c, w, b, first, count);
}
