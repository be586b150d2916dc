/* The projection p = x w^T with rho for bf16 streams on Hopper, at the rate of memory: one pass over x, products by
 * wgmma.
 *
 * A cluster of SPLIT blocks owns up to 8 tiles of 64 rows, each block a SPLIT-th of the columns. In a block, four
 * groups of four warps have two tiles each, with a ring of boxes (64 rows x 64 columns) of their own: a group
 * multiplies a box, squares it meanwhile, and has it filled again. Four more warps bring w, chunk by chunk of 64
 * columns, as bf16 halves (24 rows of high ones, 24 of low ones) into a ring that all groups read. Sums stay in
 * registers. In the end every block sends the sums of its columns to the block of the cluster that has the rows, which
 * adds them in order of columns.
 *
 * Many rows to a block, because w comes from the second-level cache once for each cluster: 2.75 MB beside 29 MB of x
 * for 512 rows of 4 x 7168. Tensor cores round towards zero when they add, so their sums are taken out every FLUSH
 * chunks and added in fp32.
 *
 * Order of sums: chunks in order within a block, blocks in order; how many tiles a cluster has (by the size of the
 * device) changes no bits. */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/mhc/portable/mhc_cuda.cuh"

enum {
    LOGITS = 24,
    SPLIT = 2, /* blocks of a cluster */
    ROWS = 64,
    BOX = ROWS * 128, /* bytes */
    GROUPS = 4,
    MOST_TILES = 8, /* of a cluster, two to a group */
    DEPTH = 6,      /* boxes in the ring of a group */
    CHUNKS = 4,     /* of w in its ring */
    AHEAD = 3,      /* and in registers, on their way there */
    FLUSH = 8,
    MAKERS = 4, /* warps that bring w */
    WORKERS = GROUPS * 128,
    THREADS = WORKERS + MAKERS * 32,
    /* A block starts with 96 registers for each thread, and that is all there is to share. */
    WORKER_REGISTERS = 104,
    MAKER_REGISTERS = 64,
    RECORD = 28, /* floats of a row: products, sum of squares, unused */
};
struct ring_args {
    struct view w, p, rho;
    int64_t rows, k;
    int n, tiles, per_cluster; /* in tiles */
    float root_eps, root_less; /* rho: root of mean square + root_eps, less root_less */
};
struct ring_shared {
    char x[GROUPS][DEPTH][BOX];
    char w[CHUNKS][2 * LOGITS * 128];
    uint64_t full[GROUPS][DEPTH], made[CHUNKS], used[CHUNKS], asked, received;
};
/* In the place of x, when all of it is used up. */
struct ring_sums {
    float own[MOST_TILES * ROWS][RECORD], all[MOST_TILES * ROWS][RECORD]; /* all: by blocks, rows of this one */
};
static_assert(sizeof(struct ring_shared) <= 232448, "what a block of compute capability 9.0 has");
static_assert(sizeof(struct ring_sums) <= GROUPS * DEPTH * BOX, "the sums fit");
static_assert(MOST_TILES <= 2 * GROUPS && FLUSH % 2 == 0, "a group has two tiles at most, or takes chunks in pairs");

#if HOPPER_CODE

/* ---- w --------------------------------------------------------------------------------------- */

enum { PIECES = LOGITS * 16 / (MAKERS * 32) }; /* of 4 floats, of a chunk and thread */

/* Piece i of a thread: 4 columns of a row. */
INLINE int piece_row(int i) { return ((int)threadIdx.x - WORKERS) / 16 + i * (MAKERS * 2); }
INLINE int piece_column(void) { return (int)threadIdx.x % 16 * 4; }

INLINE void take_w(const struct ring_args &a, int chunk, int end, float4 (&v)[PIECES])
{
    int64_t column = (int64_t)chunk * 64 + piece_column();
    UNROLLED (i, PIECES) {
        const float *from = at<float>(a.w, piece_row(i)) + column;
        v[i] = make_float4(0, 0, 0, 0);
        if (chunk < end && piece_row(i) < a.n && column + 4 <= a.k)
            v[i] = *(const float4 *)from;
        else if (chunk < end && piece_row(i) < a.n && column < a.k)
            v[i] = make_float4(from[0], column + 1 < a.k ? from[1] : 0.0f, column + 2 < a.k ? from[2] : 0.0f, 0.0f);
    }
}

INLINE void write_halves(char *tile, const float4 (&v)[PIECES])
{
    UNROLLED (i, PIECES) {
        int row = piece_row(i), column = piece_column();
        char *to = tile + row * 128 + (((column / 8) ^ (row % 8)) << 4) + column % 8 * 2;
        float high[4] = {rounded<bf16>(v[i].x), rounded<bf16>(v[i].y), rounded<bf16>(v[i].z), rounded<bf16>(v[i].w)};
        *(uint2 *)to = make_uint2(pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3]));
        *(uint2 *)(to + LOGITS * 128) =
            make_uint2(pack_bf16(v[i].x - high[0], v[i].y - high[1]), pack_bf16(v[i].z - high[2], v[i].w - high[3]));
    }
}

INLINE void make_w(const struct ring_args &a, struct ring_shared *s, int first, int end)
{
    float4 ahead[AHEAD][PIECES]; /* a load waits behind the boxes that are under way */
    UNROLLED (u, AHEAD)
        take_w(a, first + u, end, ahead[u]);
    barrier_arrive(&s->asked); /* not before: boxes may come */
    for (int base = 0; base < end - first; base += AHEAD)
        UNROLLED (u, AHEAD) {
            int c = base + u;
            if (c >= end - first)
                return;
            if (c >= CHUNKS)
                barrier_wait_bounded(&s->used[c % CHUNKS], (uint32_t)(c / CHUNKS - 1) & 1);
            write_halves(s->w[c % CHUNKS], ahead[u]);
            take_w(a, first + c + AHEAD, end, ahead[u]);
            fence_async_proxy();
            barrier_arrive(&s->made[c % CHUNKS]);
        }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Half a row of a box, squared. */
INLINE float squares(const char *box)
{
    int row = (int)threadIdx.x % 128 / 2, half = (int)threadIdx.x % 2;
    float even = 0, odd = 0;
    UNROLLED (i, 4) {
        float v[8];
        unpack<bf16>(load_raw((const bf16 *)(box + row * 128 + (((half * 4 + i) ^ (row % 8)) << 4))), v);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            even = fmaf(v[e], v[e], even);
            odd = fmaf(v[e + 1], v[e + 1], odd);
        }
    }
    return even + odd;
}

struct items { /* of a group: boxes in order of chunks, then tiles */
    int first_chunk, chunks, first_tile, tiles, group;
};
template <int TILES> INLINE void bring(struct ring_shared *s, const struct items &m, int item, const CUtensorMap *x)
{
    uint64_t *full = &s->full[m.group][item % DEPTH];
    int chunk = item / TILES, tile = item % TILES;
    barrier_expect(full, BOX);
    tma_load_2d(s->x[m.group][item % DEPTH], x, (m.first_chunk + chunk) * 64, (m.first_tile + GROUPS * tile) * ROWS,
                full);
}

/* With one tile a group takes the boxes of two chunks at once: waiting for boxes, for products and for each other costs
 * the same for two (8192 x 4096: 83 us instead of 90). With two tiles there is work enough, and boxes are better filled
 * again one by one. */
template <int TILES>
INLINE void work(struct ring_shared *s, const struct items &m, const CUtensorMap *x, float (&sum)[2][LOGITS / 2],
                 float (&square)[2])
{
    constexpr int AT_ONCE = TILES == 1 ? 2 : 1;
    float acc[TILES][LOGITS];
    bool leads = threadIdx.x % 128 == 0;
    int count = m.chunks * TILES, item = 0;
    for (int i = 0; leads && i < DEPTH && i < count; i++)
        bring<TILES>(s, m, i, x);
    for (int c = 0; c < m.chunks; c += AT_ONCE) {
        int boxes = min((int)AT_ONCE, m.chunks - c);
        bool last = (c + AT_ONCE) % FLUSH == 0 || c + AT_ONCE >= m.chunks;
        UNROLLED (t, TILES) {
            UNROLLED (b, AT_ONCE) {
                if (b >= boxes)
                    continue;
                int place = (item + b) % DEPTH;
                uint64_t by = wgmma_tile(s->w[(c + b) % CHUNKS], 1024, 1024),
                         box = wgmma_tile(s->x[m.group][place], 1024, 1024);
                if (t == 0)
                    barrier_wait_bounded(&s->made[(c + b) % CHUNKS], (uint32_t)((c + b) / CHUNKS) & 1);
                barrier_wait_bounded(&s->full[m.group][place], (uint32_t)((item + b) / DEPTH) & 1);
                wgmma_begin();
                UNROLLED (k, 4)
                    wgmma<2 * LOGITS, 0, 0>::run(acc[t], box + 2 * k, by + 2 * k, (c + b) % FLUSH == 0 && k == 0);
                wgmma_commit();
            }
            UNROLLED (b, AT_ONCE)
                if (b < boxes)
                    square[t] += squares(s->x[m.group][(item + b) % DEPTH]);
            wgmma_wait<0>();
            wgmma_hold(acc[t]);
            if (last)
                UNROLLED (j, LOGITS / 2)
                    sum[t][j] += acc[t][j] + acc[t][j + LOGITS / 2];
            named_barrier_of(1 + m.group, 128); /* the boxes are read */
            for (int b = 0; leads && b < boxes; b++)
                if (item + b + DEPTH < count)
                    bring<TILES>(s, m, item + b + DEPTH, x);
            item += boxes;
        }
        for (int b = 0; leads && b < boxes; b++)
            barrier_arrive(&s->used[(c + b) % CHUNKS]);
    }
}

INLINE void leave_sums(struct ring_sums *to, const struct items &m, const float (&sum)[2][LOGITS / 2],
                       const float (&square)[2])
{
    int thread = (int)threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4, q = thread % 4;
    UNROLLED (t, 2) {
        float(*own)[RECORD] = to->own + (m.group + GROUPS * t) * ROWS,
        both = square[t] + __shfl_xor_sync(0xffffffffu, square[t], 1);
        if (t >= m.tiles)
            continue;
        UNROLLED (j, LOGITS / 2)
            own[16 * warp + g + 8 * (j / 2 % 2)][8 * (j / 4) + 2 * q + j % 2] = sum[t][j];
        if (thread % 2 == 0)
            *(float4 *)&own[thread / 2][LOGITS] = make_float4(both, 0, 0, 0);
    }
}

/* ---- rows of the cluster, when every block has its sums -------------------------------------- */

INLINE void exchange(struct ring_sums *sums, uint64_t *received, int rows, int rank)
{
    int mine = rows / SPLIT;
    for (int i = (int)threadIdx.x; i < rows * (RECORD / 4); i += THREADS) {
        int row = i / (RECORD / 4), at = i % (RECORD / 4) * 4;
        uint32_t owner = (uint32_t)(row / mine);
        cluster_send(smem_address_in(&sums->all[rank * mine + row % mine][at], owner),
                     *(const float4 *)&sums->own[row][at], smem_address_in(received, owner));
    }
    barrier_wait_bounded(received, 0);
}

INLINE void write_rows(const struct ring_args &a, const struct ring_sums *sums, int64_t first, int rows, int rank)
{
    int mine = rows / SPLIT;
    const float(*from)[RECORD] = sums->all;
    for (int i = (int)threadIdx.x; i < mine * (LOGITS + 1); i += THREADS) {
        int row = i / (LOGITS + 1), k = i % (LOGITS + 1);
        int64_t row_at = first + rank * mine + row;
        float sum = 0;
        UNROLLED (r, SPLIT)
            sum += from[r * mine + row][k];
        if (row_at >= a.rows)
            continue;
        if (k == LOGITS)
            *at<float>(a.rho, row_at) = sqrtf(sum / (float)a.k + a.root_eps) - a.root_less;
        else if (k < a.n)
            at<float>(a.p, row_at)[k] = sum;
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1)
    project_ring(const __grid_constant__ CUtensorMap x, const __grid_constant__ struct ring_args a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct ring_shared *s = (struct ring_shared *)shared;
    struct ring_sums *sums = (struct ring_sums *)shared;
    int rank = (int)cluster_rank(), first_tile = (int)blockIdx.x / SPLIT * a.per_cluster,
        tiles = min(a.per_cluster, a.tiles - first_tile);
    int chunks = (int)((a.k + 63) / 64), first = chunks * rank / SPLIT, end = chunks * (rank + 1) / SPLIT;
    struct items m = {first, end - first, first_tile, 0, (int)threadIdx.x / 128};
    m.first_tile += m.group;
    m.tiles = m.group < GROUPS ? max(0, (tiles - m.group + GROUPS - 1) / GROUPS) : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * DEPTH; i++)
            barrier_init(&s->full[0][0] + i, 1);
        for (int i = 0; i < CHUNKS; i++) {
            barrier_init(&s->made[i], MAKERS * 32);
            barrier_init(&s->used[i], (uint32_t)min(tiles, (int)GROUPS));
        }
        barrier_init(&s->asked, MAKERS * 32);
        barrier_init(&s->received, 1);
        barrier_init_done();
        barrier_expect(&s->received, (uint32_t)(tiles * ROWS * RECORD * 4));
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        registers_down<MAKER_REGISTERS>();
        make_w(a, s, first, end);
    } else {
        float sum[2][LOGITS / 2] = {}, square[2] = {};
        registers_up<WORKER_REGISTERS>();
        barrier_wait_bounded(&s->asked, 0);
        if (m.tiles == 2)
            work<2>(s, m, &x, sum, square);
        else if (m.tiles == 1)
            work<1>(s, m, &x, sum, square);
        named_barrier<1 + GROUPS, WORKERS>(); /* the boxes are used up */
        leave_sums(sums, m, sum, square);
    }
    cluster_sync(); /* those of the others too */
    exchange(sums, &s->received, tiles * ROWS, rank);
    write_rows(a, sums, (int64_t)first_tile * ROWS, tiles * ROWS, rank);
#endif
}

/* bf16, at most 24 rows of w, whole vectors, something to do. */
bool mhc_project_rings(const struct lane *l, const struct mhc_project_fwd_args *b)
{
    return cuda_of(l)->hopper && b->x.dtype == DT_BF16 && b->w.dim[0] <= LOGITS && b->x.dim[0] > 0 &&
           b->x.dim[1] >= 64 && aligned16(&b->x) && aligned16(&b->w);
}

int mhc_project_ring(struct lane *l, const struct mhc_project_fwd_args *b)
{
    CUtensorMap x;
    struct ring_args a = {.w = view_of(&b->w),
                          .p = view_of(&b->p),
                          .rho = view_of(&b->rho),
                          .rows = b->x.dim[0],
                          .k = b->x.dim[1],
                          .n = (int)b->w.dim[0],
                          .tiles = (int)ceil_div(b->x.dim[0], ROWS),
                          .root_eps = (float)b->root_eps,
                          .root_less = (float)mhc_root_less(b->root_eps)};
    int64_t at_once = max_i64(cuda_of(l)->sm_budget / SPLIT, 1);
    a.per_cluster = (int)min_i64(max_i64(ceil_div(a.tiles, at_once), 1), MOST_TILES);
    TRY(tensor_map_2d(l, &x, b->x.data, a.rows, a.k, b->x.stride[0], ROWS));
    NEEDS_SMEM(l, project_ring, sizeof(struct ring_shared));
    LAUNCH_CLUSTER(l, project_ring, (unsigned)(ceil_div(a.tiles, a.per_cluster) * SPLIT), SPLIT, THREADS,
                   sizeof(struct ring_shared), x, a);
    return ST_OK;
}
