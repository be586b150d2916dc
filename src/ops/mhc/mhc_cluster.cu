/* The boundary forward for 4 streams of bf16 on Hopper in one pass: x and f are read once, y and h written once, by clusters of C / 256 blocks.
 * A block owns 256 channels of all streams and keeps its part of w in registers. A cluster owns tiles of 16 tokens and walks over them: tile =
 * cluster + k clusters. h needs sums over all channels, so the blocks exchange them through each other's shared memory, while the tile waits in
 * a ring of stages and later tiles are worked on.
 *
 * In a block, all roles are warps that wait for each other at barriers in shared memory only:
 *   loader     brings x, f and coefficients of tile k + STAGES into its stage as soon as that is free
 *   workers    8 warps, 32 channels each: y = combine, rounded, in the place of x, and away to memory; products with w, Gram matrix of the
 *              streams; a record of sums for each warp and token
 *   sender     adds the records of the warps, in order; sends what h needs to all blocks, the other products to memory
 *   opener     adds what came from all blocks, in order of rank: gates `pre`, and 1 / rms of h
 *   finishers  4 warps, 64 channels each: h from y of the stage, in the place of f, and away to memory; then the stage is free
 * A small kernel makes the other coefficients afterwards (Sinkhorn), from the products in memory.
 *
 * Without clusters (OPEN false; for channels that need more blocks than a cluster has) the same pass ends at the sender, which sends all sums to memory;
 * the small kernel makes all coefficients and 1 / rms, and aggregate_rows (mhc_mix.cu) makes h.
 *
 * One exchange is enough: with G the Gram matrix of a token's streams, as they are stored, the sum of squares that rho needs is its trace, and that
 * of h = sum_i pre_i y_i is pre^T G pre. In fp32 the latter loses digits where h is small beside the streams, but always fewer than the rounding of y
 * has cost before (both grow: 1e-7 k^2 against 1e-4 k, where h is smaller by k; beyond k = 1000 h has no digits left anyway).
 *
 * Why nothing is overwritten or waits for ever. Every barrier below has one round a tile (or one a tile of its stage or slot), and who arrives in
 * a round has waited for the one before:
 *   full     loader and its bytes -> workers              formed   4 pairs of workers, y is in the stage -> finishers
 *   opened   opener, gates are in the stage -> finishers   free     4 pairs of workers, whose y is read out, and 4 finishers -> loader
 *   summed   8 workers, records are written -> sender     taken    sender -> workers, may write records of the next tile
 *   received, credit: mhc_cluster.cuh
 * Nobody can miss a round: the next but one of any barrier needs an arrival that its waiters make, or make possible, after they have seen this one.
 * The gates of a stage need no barrier of their own: those of tile k + STAGES are made from sums of workers that waited for the stage, so for
 * finishers that are done with tile k. A tile depends on earlier tiles only (on a free stage, on room at the receivers), and all blocks of a cluster have
 * the same tiles: so the oldest tile that is not done can always go on. */
#include "ops/mhc/mhc_cluster.cuh"
extern "C" {
#include "ops/mhc/mhc_choose.h"
}

enum {
    WORKERS = 8, /* warps */
    FINISHERS = 4,
    THREADS = 32 * (WORKERS + FINISHERS + 4),
    /* A block starts with 128 registers for each of 512 threads, and that is all there is to share. */
    WORKER_REGISTERS = 208,
    FINISHER_REGISTERS = 56,
    HELPER_REGISTERS = 40,
    STAGES = 4,
    TOKENS = 16,
    BOX = TOKENS * CL_N * CL_ROW,    /* bytes of 64 channels of all streams; a stream is TOKENS lines of it */
    STREAM_BYTES = TOKENS * CL_ROW,  /* and so many of f */
    BOXES = CL_COLS / 64,
    PAIRS = CL_N * (CL_N + 1) / 2,   /* of streams: entries of the Gram matrix, the diagonal first */
    SENT = 16,                       /* floats of a token for the exchange: products for pre, Gram matrix, zeros */
    KEPT = CL_LOGITS - CL_N,         /* products for memory */
    RECORD = SENT + KEPT,
    FOURS = RECORD / 4,
    SENT_BYTES = TOKENS * SENT * 4,  /* of a block and tile */
    ROOM_BYTES = 32 * SENT_BYTES,    /* receive room: 2 slots of 16 blocks, 4 of 8 */
    MOST_SLOTS = 4,
};
static_assert((int)MHC_CLUSTER_BLOCKS == (int)CLUSTER_MOST && (int)MHC_BLOCK_CHANNELS == (int)CL_COLS, "one rule for shapes");
static_assert(WORKERS * 32 == CL_COLS, "a worker has 32 channels");

struct cluster_fwd {
    const float *w, *coef_in, *bias, *gain, *a_pre, *a_post, *a_res, *beta;
    float *stat, *coef;
    float4 *kept; /* [tiles, ranks, kept_fours, TOKENS], tokens in order of columns */
    int64_t w_stride, stat_stride, coef_stride, rows, d;
    int tiles, ranks, clusters, slots, iterations;
    float one, eps;
    bool profile_d, round_bf16;
    struct drop_rule drop;
};

struct stage { /* a multiple of 1024 bytes, as swizzled tiles want */
    char x[BOXES * BOX], f[BOXES * STREAM_BYTES];
};
struct cluster_shared {
    struct stage stage[STAGES];
    float record[WORKERS][TOKENS][RECORD]; /* tokens in order of columns, here and below */
    float coef[STAGES][TOKENS][CL_LOGITS];
    float gate[STAGES][TOKENS][8]; /* pre, 1 / rms, unused */
    char room[ROOM_BYTES];         /* [slots][ranks][SENT / 4][TOKENS] of float4 */
    uint64_t full[STAGES], formed[STAGES], opened[STAGES], free[STAGES], summed, taken, received[MOST_SLOTS], credit[MOST_SLOTS];
};

static_assert(sizeof(struct cluster_shared) <= 232448, "what a block of compute capability 9.0 has");

/* What of a record goes to memory: its end. */
__host__ __device__ __forceinline__ constexpr int kept_fours(bool open) { return open ? KEPT / 4 : FOURS; }

/* pre from the sums of its products and of the Gram matrix' diagonal. */
static __device__ __forceinline__ float4 gates_of(const struct cluster_fwd &a, float4 p, float4 diagonal, float *rho)
{
    *rho = sqrtf((((diagonal.x + diagonal.y) + diagonal.z) + diagonal.w) / (float)(CL_N * a.d));
    float by = *a.a_pre / (*rho + (float)MHC_EPS), more = a.profile_d ? (float)MHC_EPS : 0.0f;
    return make_float4(maybe_bf16(a.round_bf16, precise_sigmoid(by * p.x + a.beta[0]) + more), maybe_bf16(a.round_bf16, precise_sigmoid(by * p.y + a.beta[1]) + more),
                       maybe_bf16(a.round_bf16, precise_sigmoid(by * p.z + a.beta[2]) + more), maybe_bf16(a.round_bf16, precise_sigmoid(by * p.w + a.beta[3]) + more));
}
/* The two parts of pre^T G pre. rest: entries 01, 02, 03, 12; last: 13, 23. */
static __device__ __forceinline__ float diagonal_part(float4 pre, float4 diagonal)
{
    return pre.x * pre.x * diagonal.x + pre.y * pre.y * diagonal.y + pre.z * pre.z * diagonal.z + pre.w * pre.w * diagonal.w;
}
static __device__ __forceinline__ float other_part(float4 pre, float4 rest, float4 last)
{
    return 2 * (pre.x * (pre.y * rest.x + pre.z * rest.y + pre.w * rest.z) + pre.y * (pre.z * rest.w + pre.w * last.x) + pre.z * pre.w * last.y);
}
static __device__ __forceinline__ float rstd_of(const struct cluster_fwd &a, float square)
{
    return rsqrtf((square < 0 ? 0 : square) / (float)a.d + a.eps); /* what is not a number stays so */
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

#if HOPPER_CODE

/* The k-th tile of this cluster, if below a.tiles. */
__device__ __forceinline__ int tile_of(const struct cluster_fwd &a, int k) { return (int)blockIdx.x / a.ranks + k * a.clusters; }

/* ---- loader: one thread ------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void load(const struct cluster_fwd &a, struct cluster_shared *s, int rank, const CUtensorMap *x, const CUtensorMap *f)
{
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES, row = tile * TOKENS;
        struct stage *st = &s->stage[at];
        uint32_t coef = (uint32_t)min(a.rows - row, (int64_t)TOKENS) * (CL_LOGITS * 4);
        if (k >= STAGES)
            barrier_wait_bounded(&s->free[at], round_before(k, STAGES));
        barrier_expect(&s->full[at], BOXES * (BOX + STREAM_BYTES) + coef);
        bulk_load(s->coef[at], a.coef_in + (int64_t)row * CL_LOGITS, coef, &s->full[at]);
#pragma unroll
        for (int b = 0; b < BOXES; b++) {
            int col = rank * CL_COLS + b * 64;
            parts_load(st->x + b * BOX, x, col, row, &s->full[at]);
            tma_load_2d(st->f + b * STREAM_BYTES, f, col, row, &s->full[at]);
        }
    }
}

/* ---- workers --------------------------------------------------------------------------------------------------------------- */

/* Bit 8 i + e: channel c + e of stream i is kept. */
static __device__ __forceinline__ uint32_t kept_channels(const struct cluster_fwd &a, int64_t row, int64_t c)
{
    struct drop_row at = drop_row_of(a.drop, row);
    uint32_t kept = 0;
#pragma unroll 1 /* registers */
    for (int i = 0; i < CL_N; i++) {
        float factor[8];
        uint32_t bits = 0;
        drop_factors(a.drop, at, i * a.d + c, factor);
#pragma unroll
        for (int e = 0; e < 8; e++)
            bits |= factor[e] != 0 ? 1u << e : 0u;
        kept |= bits << (8 * i);
    }
    return kept;
}

/* y of one token and 8 channels, as it is stored, also in registers: y[i] is stream i. x and f: the token's piece of stream 0 and of f. */
template <bool DROP>
static __device__ __forceinline__ void form(const struct cluster_fwd &a, char *x, const char *f, const float *coef, int64_t row, int64_t c, uint32_t (&y)[CL_N][4])
{
    uint32_t add[4], kept = DROP ? kept_channels(a, row, c) : 0;
    float post[CL_N], res[CL_N * CL_N], bias[8] = {};
#pragma unroll
    for (int i = 0; i < CL_N; i++)
        *(uint4 *)y[i] = load_raw(x + i * STREAM_BYTES);
    *(uint4 *)add = load_raw(f);
    load_floats(coef + CL_N, post);
    load_floats(coef + 2 * CL_N, res);
    if (a.bias != NULL)
        load_floats(a.bias + c, bias);
#pragma unroll
    for (int word = 0; word < 4; word++) {
        float in[CL_N][2], more[2];
        unpack2(add[word], more);
        if (a.bias != NULL) {
            more[0] += bias[2 * word];
            more[1] += bias[2 * word + 1];
        }
#pragma unroll
        for (int i = 0; i < CL_N; i++)
            unpack2(y[i][word], in[i]);
#pragma unroll
        for (int i = 0; i < CL_N; i++) {
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                v[e] = __fmul_rn(a.profile_d ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
                for (int k = 1; k < CL_N; k++)
                    v[e] = fmaf(a.profile_d ? res[k * CL_N + i] : res[i * CL_N + k], in[k][e], v[e]);
                float factor = DROP && (kept >> (8 * i + 2 * word + e) & 1) == 0 ? 0.0f : a.drop.kept;
                v[e] = add_dropped<DROP>(v[e], post[i], more[e], factor);
            }
            y[i][word] = pack2(v[0], v[1]);
        }
    }
#pragma unroll
    for (int i = 0; i < CL_N; i++)
        store_raw(x + i * STREAM_BYTES, *(const uint4 *)y[i]);
}

/* The rows of w as operands, split into high and low halves of bf16, 8 channels from c on of each stream: of the 48 rows of the products, 24 are
 * with high halves and 24 with low ones; a thread has rows g + 8 j. Values (row, 2 q + e) of step u are channel 4 u + e, those 8 further 4 u + 2 + e. */
static __device__ __forceinline__ void load_operands(const struct cluster_fwd &a, int g, int64_t c, uint32_t (&w)[CL_N][2][3][4])
{
#pragma unroll
    for (int i = 0; i < CL_N; i++)
#pragma unroll
        for (int j = 0; j < 3; j++) {
            float v[8];
            load_floats(a.w + (g + 8 * j) * a.w_stride + i * a.d + c, v);
#pragma unroll
            for (int k = 0; k < 4; k++) { /* channels 2 k and 2 k + 1 */
                float high[2] = {rounded<bf16>(v[2 * k]), rounded<bf16>(v[2 * k + 1])};
                int low = j + 3;
                w[i][k / 2][j / 2][k % 2 * 2 + j % 2] = pack2(high[0], high[1]);
                w[i][k / 2][low / 2][k % 2 * 2 + low % 2] = pack2(v[2 * k] - high[0], v[2 * k + 1] - high[1]);
            }
        }
}

/* Where product k stands in a record. */
__device__ __forceinline__ int place_of(int k) { return k < CL_N ? k : k + SENT - CL_N; }

/* Gram matrices of 8 tokens over the warp's channels, as products of all tokens with all, of which only the diagonal is wanted: rows g and g + 8
 * of product m are the first two streams of token g, its columns the third stream of all tokens. */
static __device__ __forceinline__ void multiply_streams(const uint32_t (&y)[CL_N][4], float (&gram)[PAIRS / 2][4])
{
    constexpr int pair[PAIRS / 2][3] = {{0, 1, 0}, {2, 3, 0}, {1, 2, 1}, {2, 3, 2}, {1, 3, 3}};
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int m = 0; m < PAIRS / 2; m++) {
            const uint32_t *first = y[pair[m][0]] + 2 * u, *second = y[pair[m][1]] + 2 * u, *by = y[pair[m][2]] + 2 * u, rows[4] = {first[0], second[0], first[1], second[1]};
            mma_bf16(gram[m], rows, by[0], by[1]);
        }
}

/* Sums of 8 tokens into the warp's records. */
static __device__ __forceinline__ void write_records(float (*record)[RECORD], const float (&product)[3][4], const float (&gram)[PAIRS / 2][4], int g, int q)
{
    /* Rows of the products: 24 with high halves of w, then 24 with low ones. */
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float *to = record[2 * q + e];
        to[place_of(g)] = product[0][e] + product[1][2 + e];
        to[place_of(g + 8)] = product[0][2 + e] + product[2][e];
        to[place_of(g + 16)] = product[1][e] + product[2][2 + e];
    }
    if (q != g / 2)
        return;
    float first[PAIRS / 2], second[PAIRS / 2];
#pragma unroll
    for (int m = 0; m < PAIRS / 2; m++) {
        first[m] = g % 2 == 0 ? gram[m][0] : gram[m][1];
        second[m] = g % 2 == 0 ? gram[m][2] : gram[m][3];
    }
    float4 *to = (float4 *)record[g];
    to[1] = make_float4(first[0], first[2], first[3], second[4]);  /* 00, 11, 22, 33 */
    to[2] = make_float4(second[0], first[1], second[1], second[2]); /* 01, 02, 03, 12 */
    to[3] = make_float4(first[4], second[3], 0, 0);                 /* 13, 23 */
}

template <bool DROP> static __device__ __forceinline__ void work(const struct cluster_fwd &a, struct cluster_shared *s, int rank, const CUtensorMap *to_y)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4, box = warp / 2;
    int token = token_of(g), piece = in_tile(token, warp % 2 * 4 + q); /* and 8 tokens, so 8 lines, further */
    int64_t c = (int64_t)rank * CL_COLS + warp * 32 + q * 8;
    bool stores = warp % 2 == 0 && lane == 0;
    uint32_t w[CL_N][2][3][4];
    load_operands(a, g, c, w);
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES;
        struct stage *st = &s->stage[at];
        char *x = st->x + box * BOX + piece, *f = st->f + box * STREAM_BYTES + piece;
        barrier_wait_bounded(&s->full[at], round_of(k, STAGES));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t y[CL_N][4];
            float gram[PAIRS / 2][4] = {}, product[3][4] = {};
            form<DROP>(a, x + half * 8 * CL_ROW, f + half * 8 * CL_ROW, s->coef[at][8 * half + token], (int64_t)tile * TOKENS + 8 * half + token, c, y);
            if (half == 1) { /* all of the tile's y; both warps of a box, then one thread sends it off */
                fence_async_proxy();
                named_barrier_of(1 + box, 64);
                if (stores) {
                    parts_store(to_y, rank * CL_COLS + box * 64, tile * TOKENS, st->x + box * BOX);
                    bulk_commit();
                    barrier_arrive(&s->formed[at]);
                }
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < CL_N; i++)
#pragma unroll
                for (int u = 0; u < 2; u++)
#pragma unroll
                    for (int t = 0; t < 3; t++)
                        mma_bf16(product[t], w[i][u][t], y[i][2 * u], y[i][2 * u + 1]);
            multiply_streams(y, gram);
            if (half == 0 && k > 0)
                barrier_wait_bounded(&s->taken, (k - 1) & 1);
            write_records(&s->record[warp][8 * half], product, gram, g, q);
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->summed);
        if (stores) {
            bulk_wait_read<0>();
            barrier_arrive(&s->free[at]);
        }
        __syncwarp();
    }
    if (stores)
        bulk_wait<0>();
}

/* ---- sender: one warp ------------------------------------------------------------------------------------------------------- */

/* Four sums of a token, over the warps. */
__device__ __forceinline__ float4 sum_records(const struct cluster_shared *s, int column, int v)
{
    float4 sum = *(const float4 *)&s->record[0][column][4 * v];
#pragma unroll
    for (int w = 1; w < WORKERS; w++)
        sum = add4(sum, *(const float4 *)&s->record[w][column][4 * v]);
    return sum;
}
__device__ __forceinline__ int room_at(int slot, int ranks, int rank, int v, int column) { return (((slot * ranks + rank) * (SENT / 4) + v) * TOKENS + column) * 16; }

/* To all blocks of the cluster, this one too. */
static __device__ __forceinline__ void exchange(const struct cluster_fwd &a, struct cluster_shared *s, int k, int rank)
{
    int lane = (int)threadIdx.x % 32, slot = k % a.slots;
    float4 sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        sum[half] = sum_records(s, lane % 8 + 8 * half, lane / 8);
    exchange_wait_room(s->credit, k, a.slots);
    for (int i = 0, to = rank; i < a.ranks; i++, to = to + 1 < a.ranks ? to + 1 : 0) { /* not all to the same block at once */
        uint32_t bar = smem_address_in(&s->received[slot], (uint32_t)to);
        uint32_t room = smem_address_in(&s->room[room_at(slot, a.ranks, rank, lane / 8, lane % 8)], (uint32_t)to);
        cluster_send(room, sum[0], bar);
        cluster_send(room + 8 * 16, sum[1], bar);
    }
}

template <bool OPEN> static __device__ __forceinline__ void send(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    constexpr int COUNT = kept_fours(OPEN) * TOKENS, FIRST = FOURS - kept_fours(OPEN);
    int lane = (int)threadIdx.x % 32;
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        barrier_wait_bounded(&s->summed, k & 1);
        if (OPEN)
            exchange(a, s, k, rank);
        float4 *kept = a.kept + ((int64_t)tile * a.ranks + rank) * COUNT;
#pragma unroll 1
        for (int i = lane; i < COUNT; i += 32)
            kept[i] = sum_records(s, i % TOKENS, FIRST + i / TOKENS);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->taken);
    }
}

/* ---- opener: one warp, two lanes a token --------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void open_tokens(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int lane = (int)threadIdx.x % 32, column = lane % TOKENS, second = lane / TOKENS;
    uint32_t bytes = (uint32_t)(a.ranks * SENT_BYTES);
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES, slot = k % a.slots;
        float4 p = make_float4(0, 0, 0, 0), gram = p;
        exchange_wait(s->received, k, a.slots);
#pragma unroll 4
        for (int r = 0; r < a.ranks; r++) {
            p = add4(p, *(const float4 *)&s->room[room_at(slot, a.ranks, r, 2 * second, column)]);
            gram = add4(gram, *(const float4 *)&s->room[room_at(slot, a.ranks, r, 2 * second + 1, column)]);
        }
        exchange_taken(s->received, s->credit, k, a.slots, a.ranks, bytes);
        /* The first lane has the products and the diagonal, the second the rest of the Gram matrix. */
        float rho = 0;
        float4 pre = make_float4(0, 0, 0, 0);
        if (second == 0)
            pre = gates_of(a, p, gram, &rho);
        pre.x = __shfl_sync(0xffffffffu, pre.x, column);
        pre.y = __shfl_sync(0xffffffffu, pre.y, column);
        pre.z = __shfl_sync(0xffffffffu, pre.z, column);
        pre.w = __shfl_sync(0xffffffffu, pre.w, column);
        float square = second == 0 ? diagonal_part(pre, gram) : other_part(pre, p, gram);
        float rstd = rstd_of(a, square + __shfl_xor_sync(0xffffffffu, square, TOKENS));
        if (second == 0)
            *(float4 *)s->gate[at][column] = pre;
        else
            s->gate[at][column][CL_N] = rstd;
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->opened[at]);
        int64_t row = (int64_t)tile * TOKENS + token_of(column);
        if (rank != k % a.ranks || row >= a.rows) /* all blocks have the same numbers: they write in turn */
            continue;
        float *stat = a.stat + row * a.stat_stride;
        if (second == 0) {
            *(float4 *)(a.coef + row * a.coef_stride) = pre;
            stat[0] = p.x;
            stat[1] = p.y;
            stat[2] = p.z;
            stat[3] = p.w;
            stat[CL_LOGITS] = rho;
        } else {
            stat[CL_LOGITS + 1] = rstd;
        }
    }
}

/* ---- finishers ---------------------------------------------------------------------------------------------------------------------- */

/* The same numbers as aggregate_rows (mhc_mix.cu) makes of given coefficients and 1 / rms, to the bit. */
static __device__ __forceinline__ void finish(const struct cluster_fwd &a, struct cluster_shared *s, int box, int rank, const CUtensorMap *to_h)
{
    int lane = (int)threadIdx.x % 32, piece = lane % 8, col = rank * CL_COLS + box * 64;
    float gain[8] = {};
    if (a.gain != NULL) {
        load_floats(a.gain + col + piece * 8, gain);
#pragma unroll
        for (int e = 0; e < 8; e++)
            gain[e] += a.one;
    }
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES;
        struct stage *st = &s->stage[at];
        barrier_wait_bounded(&s->formed[at], round_of(k, STAGES));
        barrier_wait_bounded(&s->opened[at], round_of(k, STAGES));
#pragma unroll 2
        for (int i = 0; i < TOKENS / 4; i++) {
            int token = lane / 8 + 4 * i, where = in_tile(token, piece);
            float pre[CL_N], v[8] = {}, rstd = s->gate[at][column_of(token)][CL_N];
            load_floats(s->gate[at][column_of(token)], pre);
#pragma unroll
            for (int j = 0; j < CL_N; j++) {
                float in[8];
                unpack<bf16>(load_raw(st->x + box * BOX + j * STREAM_BYTES + where), in);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    v[e] = fmaf(pre[j], in[e], v[e]);
            }
#pragma unroll
            for (int e = 0; e < 8; e++)
                v[e] = __fmul_rn(v[e], a.gain != NULL ? __fmul_rn(rstd, gain[e]) : rstd);
            store_raw(st->f + box * STREAM_BYTES + where, repack<bf16>(v));
        }
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(to_h, col, tile * TOKENS, st->f + box * STREAM_BYTES);
            bulk_commit();
            bulk_wait_read<0>();
            barrier_arrive(&s->free[at]);
        }
        __syncwarp();
    }
    if (lane == 0)
        bulk_wait<0>();
}

template <bool OPEN> static __device__ __forceinline__ void init_barriers(const struct cluster_fwd &a, struct cluster_shared *s)
{
    for (int i = 0; i < STAGES; i++) {
        barrier_init(&s->full[i], 1);
        barrier_init(&s->formed[i], BOXES);
        barrier_init(&s->opened[i], 1);
        barrier_init(&s->free[i], BOXES + (OPEN ? FINISHERS : 0));
    }
    barrier_init(&s->summed, WORKERS);
    barrier_init(&s->taken, 1);
    if (OPEN)
        exchange_init(s->received, s->credit, a.slots, a.ranks, (uint32_t)(a.ranks * SENT_BYTES));
    barrier_init_done();
}

#endif /* HOPPER_CODE */

template <bool DROP, bool OPEN>
static __global__ void __launch_bounds__(THREADS, 1)
    boundary_cluster(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap y,
                     const __grid_constant__ CUtensorMap h, const __grid_constant__ struct cluster_fwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct cluster_shared *s = (struct cluster_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, warp = (int)threadIdx.x / 32; /* in a cluster: cluster_rank */
    if (threadIdx.x == 0)
        init_barriers<OPEN>(a, s);
    cluster_sync();
    if (warp < WORKERS) {
        registers_up<WORKER_REGISTERS>();
        work<DROP>(a, s, rank, &y);
    } else if (warp < WORKERS + FINISHERS) {
        registers_down<FINISHER_REGISTERS>();
        if (OPEN)
            finish(a, s, warp - WORKERS, rank, &h);
    } else {
        registers_down<HELPER_REGISTERS>();
        if (warp == WORKERS + FINISHERS)
            send<OPEN>(a, s, rank);
        else if (OPEN && warp == WORKERS + FINISHERS + 1)
            open_tokens(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 2 && threadIdx.x % 32 == 0)
            load(a, s, rank, &x, &f);
    }
    __syncwarp();
    cluster_sync(); /* nobody leaves while others send to it */
#endif
}

/* A thread per row: sums over the blocks, the other gates and Sinkhorn; without OPEN, all that the opener makes, too. */
template <bool OPEN> static __global__ void __launch_bounds__(64) cluster_coefficients(const __grid_constant__ struct cluster_fwd a)
{
    constexpr int COUNT = kept_fours(OPEN), FIRST = COUNT - KEPT / 4;
    int64_t row = (int64_t)blockIdx.x * 64 + threadIdx.x;
    if (row >= a.rows)
        return;
    float4 sum[COUNT] = {};
    float post[CL_N], m[CL_N * CL_N], *stat = a.stat + row * a.stat_stride, *coef = a.coef + row * a.coef_stride, rho;
    const float4 *from = a.kept + row / TOKENS * a.ranks * (COUNT * TOKENS) + column_of((int)(row % TOKENS));
#pragma unroll 2
    for (int r = 0; r < a.ranks; r++)
#pragma unroll
        for (int v = 0; v < COUNT; v++)
            sum[v] = add4(sum[v], from[(r * COUNT + v) * TOKENS]);
    if constexpr (OPEN) {
        rho = stat[CL_LOGITS];
    } else {
        float4 pre = gates_of(a, sum[0], sum[1], &rho);
        store_raw(coef, *(const uint4 *)&pre);
        stat[0] = sum[0].x;
        stat[1] = sum[0].y;
        stat[2] = sum[0].z;
        stat[3] = sum[0].w;
        stat[CL_LOGITS] = rho;
        stat[CL_LOGITS + 1] = rstd_of(a, diagonal_part(pre, sum[1]) + other_part(pre, sum[2], sum[3]));
    }
    float q = 1.0f / (rho + (float)MHC_EPS), by_post = q * *a.a_post, by_res = q * *a.a_res;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float4 four = sum[FIRST + k / 4];
        float p = k % 4 == 0 ? four.x : k % 4 == 1 ? four.y : k % 4 == 2 ? four.z : four.w, z = (k < CL_N ? by_post : by_res) * p + a.beta[CL_N + k];
        stat[CL_N + k] = p;
        if (k < CL_N)
            post[k] = maybe_bf16(a.round_bf16, 2 * precise_sigmoid(z));
        else
            m[k - CL_N] = z;
    }
    sinkhorn<CL_N>(m, CL_N, a.iterations, a.profile_d);
#pragma unroll
    for (int k = 0; k < CL_N * CL_N; k++)
        m[k] = maybe_bf16(a.round_bf16, m[k]);
    store_floats(coef + CL_N, post);
    store_floats(coef + 2 * CL_N, m);
}

/* ---- launch --------------------------------------------------------------------------------------------------------------------------- */

/* What one token of a block leaves in memory, in any case. */
int64_t mhc_boundary_cluster_bytes(int64_t rows, int64_t d) { return round_up(rows, TOKENS) * (d / CL_COLS) * kept_fours(false) * 16; }

/* Of the kernel with dropout or that without, which is ready to be launched then. */
static int clusters_of(struct lane *l, int64_t d, bool drops, int *count)
{
    int ranks = (int)(d / CL_COLS);
    return drops ? cluster_count(l, boundary_cluster<true, true>, ranks, THREADS, sizeof(struct cluster_shared), count)
                 : cluster_count(l, boundary_cluster<false, true>, ranks, THREADS, sizeof(struct cluster_shared), count);
}
int mhc_boundary_cluster_blocks(struct lane *l, int64_t d, int64_t *blocks)
{
    int count;
    TRY(clusters_of(l, d, false, &count));
    *blocks = count * (d / CL_COLS);
    return ST_OK;
}

/* at_once: lines of blocks that the device runs. */
static struct cluster_fwd args_of(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work, int at_once)
{
    struct cluster_fwd a = {};
    a.w = (const float *)b->w.data;
    a.w_stride = b->w.stride[0];
    a.kept = (float4 *)work;
    a.coef_in = (const float *)b->coef_in.data;
    a.bias = (const float *)b->bias.data;
    a.gain = (const float *)b->gain.data;
    a.a_pre = (const float *)b->a_pre.data;
    a.a_post = (const float *)b->a_post.data;
    a.a_res = (const float *)b->a_res.data;
    a.beta = (const float *)b->beta.data;
    a.stat = (float *)b->stat.data;
    a.coef = (float *)b->coef.data;
    a.stat_stride = b->stat.stride[0];
    a.coef_stride = b->coef.stride[0];
    a.rows = b->x.dim[0];
    a.d = b->x.dim[1] / CL_N;
    a.tiles = (int)ceil_div(a.rows, TOKENS);
    a.ranks = (int)(a.d / CL_COLS);
    a.clusters = (int)min_i64(max_i64(min_i64(at_once, cuda_of(l)->sm_budget / a.ranks), 1), a.tiles);
    a.slots = (int)min_i64(MOST_SLOTS, ROOM_BYTES / SENT_BYTES / a.ranks);
    a.iterations = (int)b->rule.iterations;
    a.one = b->zero_centered ? 1 : 0;
    a.eps = (float)b->eps;
    a.profile_d = b->rule.profile == MHC_D;
    a.round_bf16 = b->rule.round_bf16;
    a.drop = drop_rule_of(&b->drop);
    return a;
}
struct maps {
    CUtensorMap x, f, y, h;
};
static int make_maps(struct lane *l, const struct mhc_boundary_fwd_args *b, struct maps *m)
{
    int64_t rows = b->x.dim[0], k = b->x.dim[1], d = k / CL_N;
    TRY(tensor_map_parts(l, &m->x, b->x.data, rows, CL_N, d, k, TOKENS));
    TRY(tensor_map_2d(l, &m->f, b->f.data, rows, d, b->f.stride[0], TOKENS));
    TRY(tensor_map_parts(l, &m->y, b->y.data, rows, CL_N, d, k, TOKENS));
    return tensor_map_2d(l, &m->h, b->h.data, rows, d, b->h.stride[0], TOKENS);
}

int mhc_boundary_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct maps m;
    int at_once;
    TRY(clusters_of(l, b->x.dim[1] / CL_N, b->drop.p > 0, &at_once));
    TRY(make_maps(l, b, &m));
    struct cluster_fwd a = args_of(l, b, work, at_once);
    unsigned grid = (unsigned)(a.ranks * a.clusters);
    if (a.drop.info != NULL)
        LAUNCH_CLUSTER(l, (boundary_cluster<true, true>), grid, a.ranks, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, a);
    else
        LAUNCH_CLUSTER(l, (boundary_cluster<false, true>), grid, a.ranks, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, a);
    LAUNCH(l, cluster_coefficients<true>, (unsigned)ceil_div(a.rows, 64), 64, 0, a);
    return ST_OK;
}

int mhc_boundary_ring(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct maps m;
    TRY(make_maps(l, b, &m));
    struct cluster_fwd a = args_of(l, b, work, cuda_of(l)->sm_count);
    unsigned grid = (unsigned)(a.ranks * a.clusters);
    if (a.drop.info != NULL) {
        NEEDS_SMEM(l, (boundary_cluster<true, false>), sizeof(struct cluster_shared));
        LAUNCH(l, (boundary_cluster<true, false>), grid, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, a);
    } else {
        NEEDS_SMEM(l, (boundary_cluster<false, false>), sizeof(struct cluster_shared));
        LAUNCH(l, (boundary_cluster<false, false>), grid, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, a);
    }
    LAUNCH(l, cluster_coefficients<false>, (unsigned)ceil_div(a.rows, 64), 64, 0, a);
    return ST_OK;
}
