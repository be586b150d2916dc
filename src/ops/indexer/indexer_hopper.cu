/* Scores of the indexer for Hopper, bf16; see indexer.h. A block has four queries, 64 heads each, and walks over the
 * keys that any of them sees: keys are the rows of a product of 64 x 256 with both operands in shared memory, queries'
 * heads its columns. Queries stay, keys come by bulk copies, 128 at a time, and two groups of four warps have 64 of
 * them each. A column has one weight for all keys, so weights stay in registers, and relu, weighting and the sum over
 * heads are two instructions for each value; only four lanes have to meet for a sum.
 *
 * What bounds it: a value is 128 multiply-adds, 1/16 of a cycle of a multiprocessor's tensor cores, and two
 * instructions of a lane, 1/64 of a cycle of its four schedulers (the maximum runs at half rate, 1/64 of a cycle too).
 * So while one group multiplies, the other one is done with its sums after a quarter of the time, and the tensor cores
 * always have work: the bound is theirs. With one group alone it would be 80 % of that. Shared memory is read at 10 KB
 * for 128 cycles, 62 % of its rate. */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/indexer/indexer_cuda.cuh"

enum {
    QUERIES = 4,
    HEADS = 64,
    COLUMNS = QUERIES * HEADS,
    TILE = 128, /* keys of a copy */
    STAGES = 4,
    SPAN = 8192, /* keys of a block: so many blocks that the last ones do not matter */
    GROUP = 128, /* threads that issue wgmma together */
    WORKERS = 256,
    THREADS = GROUP + WORKERS,
};

template <int WIDTH> struct score_pool {
    bf16 q[WIDTH / 64][COLUMNS][64]; /* a line for each query and head, 128-byte swizzle */
    bf16 k[STAGES][WIDTH / 64][TILE][64];
    uint64_t full[STAGES], empty[STAGES];
};
template <int WIDTH> static constexpr int SCORE_SMEM = (int)sizeof(score_pool<WIDTH>) + 1024;

/* Where scores go: out[query - row][key], or from the query's first key on. */
struct score_out {
    float *data;
    int64_t pitch;
    float scale;
};

#if HOPPER_CODE

/* The keys that a block goes over: those that one of its queries sees, from a multiple of 8 on so that stores fill
 * sectors, cut to its span. */
struct key_span {
    int from, end;
};
__device__ __forceinline__ key_span span_of(const index_call<bf16> &c, int b, int i, int count)
{
    int64_t from = c.keys, end = 0;
    for (int q = 0; q < count; q++) {
        index_range seen = row_seen(c, b, i + q);
        from = min(from, seen.first);
        end = max(end, seen.end);
    }
    from = from / 8 * 8 + (int64_t)blockIdx.y * SPAN;
    key_span s = {(int)min(from, (int64_t)c.keys), (int)min(end, from + SPAN)};
    return s;
}

/* Heads and queries that do not exist are zeros. */
template <int WIDTH>
__device__ __forceinline__ void bring_queries(score_pool<WIDTH> *s, const index_call<bf16> &c, int b, int i, int count)
{
    constexpr int BLOCKS = WIDTH / 64;
#pragma unroll 4
    for (int x = threadIdx.x - GROUP; x < COLUMNS * BLOCKS * 8; x += WORKERS) {
        int row = x / (BLOCKS * 8), block = x / 8 % BLOCKS, chunk = x % 8, q = row / HEADS, h = row % HEADS;
        bool valid = q < count && h < c.heads;
        copy_async16((char *)s->q[block][row] + ((chunk ^ (row & 7)) << 4),
                     c.q.at(b, i + (valid ? q : 0), valid ? h : 0) + block * 64 + chunk * 8, valid);
    }
    copies_commit();
    copies_wait<0>();
    fence_async_proxy();
    named_barrier<1, WORKERS>();
}

template <int WIDTH>
__device__ __forceinline__ void bring_keys(score_pool<WIDTH> *s, const CUtensorMap *map, int b, key_span span)
{
    for (int key = span.from, t = 0; key < span.end; key += TILE, t++) {
        int stage = t % STAGES;
        barrier_wait(&s->empty[stage], (uint32_t)(t / STAGES & 1) ^ 1);
        barrier_expect(&s->full[stage], TILE * WIDTH * 2);
#pragma unroll
        for (int x = 0; x < WIDTH / 64; x++)
            tma_load_4d(s->k[stage][x], map, x * 64, key, 0, b, &s->full[stage]);
    }
}

/* Weights of this thread's 16 columns of each query. */
struct own_weights {
    float w[QUERIES][16];
};
__device__ __forceinline__ own_weights take_weights(const index_call<bf16> &c, int b, int i, int count)
{
    own_weights o;
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
#pragma unroll
        for (int x = 0; x < 16; x++) {
            int h = x / 2 * 8 + threadIdx.x % 4 * 2 + x % 2;
            o.w[q][x] = q < count && h < c.heads ? c.w.at(b, i + q, 0)[h] : 0.0f;
        }
    return o;
}

/* The sum over four lanes of the value of the query that is this lane's number among them. */
__device__ __forceinline__ float sum_of_query(const float *v)
{
    bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
    float even_part = high ? v[2] : v[0], odd_part = high ? v[3] : v[1];
    even_part += __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 2);
    odd_part += __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 2);
    float mine = odd ? odd_part : even_part, other = odd ? even_part : odd_part;
    return mine + __shfl_xor_sync(0xffffffffu, other, 1);
}

/* Scores of the 64 keys of a group from their products with all heads. */
__device__ __forceinline__ void reduce_tile(float *score, const float (&z)[COLUMNS / 2], const own_weights &o,
                                            float least)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum[QUERIES];
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
            sum[q] = 0.0f;
#pragma unroll
            for (int x = 0; x < 16; x++)
                sum[q] += o.w[q][x] * max_or_nan(z[32 * q + x / 2 * 4 + half * 2 + x % 2], least);
        }
        score[half] = sum_of_query(sum);
    }
}

template <int WIDTH>
__device__ __forceinline__ void score_keys(score_pool<WIDTH> *s, const index_call<bf16> &c, const score_out &out, int b,
                                           int i, int count, key_span span)
{
    int group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, mine = lane % 4,
        row = group * 64 + threadIdx.x % GROUP / 32 * 16 + lane / 4;
    float least = c.relu ? 0.0f : -INFINITY;
    index_range seen = row_seen(c, b, i + min(mine, count - 1));
    int first = (int)seen.first, end = mine < count ? (int)seen.end : first;
    float *to = out.data + (int64_t)(blockIdx.x * QUERIES + mine) * out.pitch - (c.by_key ? 0 : first);
    own_weights o = take_weights(c, b, i, count);
    bring_queries<WIDTH>(s, c, b, i, count);
    uint64_t queries = wgmma_tile(s->q, 1024, 1024);
    for (int key = span.from + row, t = 0; span.from + t * TILE < span.end; key += TILE, t++) {
        float z[COLUMNS / 2], score[2];
        int stage = t % STAGES;
        uint64_t keys = wgmma_tile(s->k[stage][0][group * 64], 1024, 1024);
        barrier_wait(&s->full[stage], (uint32_t)(t / STAGES) & 1);
        wgmma_begin();
#pragma unroll
        for (int x = 0; x < WIDTH / 16; x++)
            wgmma<COLUMNS, 0, 0>::run(z, keys + (uint64_t)(x / 4 * TILE * 8 + x % 4 * 2),
                                      queries + (uint64_t)(x / 4 * COLUMNS * 8 + x % 4 * 2), x == 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(z);
        barrier_arrive(&s->empty[stage]);
        reduce_tile(score, z, o, least);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (key + half * 8 >= first && key + half * 8 < end)
                to[key + half * 8] = score[half] * out.scale;
    }
}

#endif /* HOPPER_CODE */

template <int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    scores_hopper(const __grid_constant__ index_call<bf16> c, const __grid_constant__ CUtensorMap keys,
                  const __grid_constant__ score_out out, int b, int first, int end)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1024);
    score_pool<WIDTH> *s = (score_pool<WIDTH> *)(raw + (1024 - smem_address(raw) % 1024) % 1024);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), i = first + blockIdx.x * QUERIES,
        count = min(QUERIES, end - i);
    key_span span = span_of(c, b, i, count);
    if (span.from >= span.end)
        return;
    if (threadIdx.x == 0) {
        for (int x = 0; x < STAGES; x++) {
            barrier_init(&s->full[x], 1);
            barrier_init(&s->empty[x], WORKERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (role == 0) {
        registers_down<24>();
        if (threadIdx.x == 0)
            bring_keys<WIDTH>(s, &keys, b, span);
    } else {
        registers_up<240>();
        score_keys<WIDTH>(s, c, out, b, i, count, span);
    }
#endif
}

/* ---- launcher -------------------------------------------------------------------------------- */

template <int WIDTH>
static int run(struct lane *l, const index_call<bf16> &c, const CUtensorMap &keys, const score_out &out, int b,
               int first, int end)
{
    auto kernel = scores_hopper<WIDTH>;
    dim3 grid((unsigned)ceil_div(end - first, QUERIES), (unsigned)ceil_div(c.keys, SPAN));
    NEEDS_SMEM(l, kernel, SCORE_SMEM<WIDTH>);
    LAUNCH(l, kernel, grid, THREADS, SCORE_SMEM<WIDTH>, c, keys, out, b, first, end);
    return ST_OK;
}

/* A launch for each sequence that the rows belong to. */
int index_scores_hopper(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out,
                        int64_t pitch, float scale)
{
    struct tensor view = tensor_4d(c.k.data, DT_BF16, c.batch, c.keys, 1, c.width);
    CUtensorMap keys;
    view.stride[0] = c.k.batch;
    view.stride[1] = view.stride[2] = c.k.row;
    if (c.keys == 0)
        return ST_OK;
    TRY(tensor_map_heads(l, &keys, &view, TILE));
    for (int64_t done = 0; done < count;) {
        int b = (int)((first + done) / c.rows), i = (int)((first + done) % c.rows),
            end = (int)min_i64(c.rows, i + count - done);
        score_out to = {out + done * pitch, pitch, scale};
        TRY((c.width == 64 ? run<64> : run<128>)(l, c, keys, to, b, i, end));
        done += end - i;
    }
    return ST_OK;
}
