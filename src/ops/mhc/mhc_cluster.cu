/* The boundary forward for 4 streams of bf16 on Hopper in one pass: x and f are read once, y and h written once, by clusters of C / 256 blocks.
 * A block owns 256 channels of all streams and keeps its part of w in registers. A cluster owns tiles of 16 tokens and walks over them: tile =
 * cluster + k clusters. h needs sums over all channels, so the blocks exchange them through each other's shared memory, while the tile waits in
 * a ring of stages and later tiles are worked on. Every token of a tile belongs to one block, which gets its sums from all and gives its gates to all.
 *
 * In a block, all roles are warps that wait for each other at barriers in shared memory only:
 *   loader     brings x, f and coefficients of tile k + STAGES, and sends h of tile k to memory
 *   workers    8 warps, 32 channels each: y = combine, rounded, in the place of x; products with w, Gram matrix of the streams; a record of sums for
 *              each warp and token
 *   sender     adds the records of the warps, in order, and sends each token's to its block; a tile later, takes the products that h does not need
 *   opener     of the block's tokens: adds what came from all blocks, in order of rank; gates `pre` and 1 / rms of h to all blocks
 *   closer     of the block's tokens, a batch at a time: the other coefficients (Sinkhorn), and all small numbers to memory
 *   finishers  4 warps, 4 tokens each: h from y of the stage, in the place of f; one of them sends y to memory before
 *
 * In two passes (OPEN false; for channels that need more blocks than a cluster has) the same pass has clusters of a part of the channels. Instead of
 * opener, closer and finishers a gatherer writes the cluster's sums to memory; a small kernel makes all coefficients and 1 / rms of them, and
 * aggregate_rows (mhc_mix.cu) makes h.
 *
 * One exchange is enough: with G the Gram matrix of a token's streams, as they are stored, the sum of squares that rho needs is its trace, and that
 * of h = sum_i pre_i y_i is pre^T G pre. In fp32 the latter loses digits where h is small beside the streams, but always fewer than the rounding of y
 * has cost before (both grow: 1e-7 k^2 against 1e-4 k, where h is smaller by k; beyond k = 1000 h has no digits left anyway).
 *
 * Why nothing is overwritten or waits for ever. Every barrier below has one round a tile (or one a tile of its stage, slot, buffer of records or batch),
 * and who arrives in a round has waited for the one before:
 *   full     loader and its bytes -> workers              formed   8 workers, y is in the stage -> finishers
 *   gated    openers of all blocks -> finishers           finished 4 finishers, h is in the stage and y read out -> loader
 *   summed   8 workers, records are written -> sender     taken    sender -> workers, may write records of the next tile but one
 *   batched  opener and sender -> closer                  closed   closer, batch is in registers -> opener and sender
 *   received, credit: mhc_cluster.cuh; opener and sender are the receivers
 * Nobody can miss a round: the next but one of any barrier needs an arrival that its waiters make, or make possible, after they have seen this one.
 * The gates of a stage need no credit: those of tile k + STAGES are made from sums of workers, of every block, that waited for the stage, so for
 * finishers that are done with tile k. A tile depends on earlier tiles only (on a free stage, on room at the receivers), and all blocks of a cluster have
 * the same tiles: so the oldest tile that is not done can always go on. Only a batch waits for a later tile: its last products are taken after the sums of
 * the next tile are sent, for which nobody needs that batch. */
#include "ops/mhc/mhc_cluster_rows.cuh"
extern "C" {
#include "ops/mhc/mhc_choose.h"
}

enum {
    WORKERS = 8, /* warps */
    FINISHERS = 4,
    FINISHER_TOKENS = 4,
    THREADS = 32 * (WORKERS + FINISHERS + 4),
    /* A block starts with 128 registers for each of 512 threads, and that is all there is to share. */
    WORKER_REGISTERS = 208,
    FINISHER_REGISTERS = 40,
    HELPER_REGISTERS = 56,
    STAGES = 4,
    TOKENS = 16,
    TOKEN_BYTES = CL_COLS * 2,           /* of a stream and token: lines of 64 channels */
    STREAM_BYTES = TOKENS * TOKEN_BYTES, /* of a tile */
    LINES = CL_COLS / 64,
    PAIRS = CL_N * (CL_N + 1) / 2, /* of streams: entries of the Gram matrix, the diagonal first */
    SLOTS = 4,
    ROOM_BYTES = SLOTS * 2 * 15 * RECORD * 4, /* receive room: 15 blocks need most, two tokens of each */
    BATCH = CL_LOGITS + CL_N + 4,             /* floats that a lane of the closer has */
    GATE_BYTES = 32,                          /* of a token: pre, 1 / rms, unused */
};
static_assert(FINISHERS * FINISHER_TOKENS == TOKENS, "every token is finished");
static_assert((int)MHC_CLUSTER_BLOCKS == (int)CLUSTER_MOST && (int)MHC_BLOCK_CHANNELS == (int)CL_COLS, "one rule for shapes");
static_assert(WORKERS * 32 == CL_COLS, "a worker has 32 channels");

struct stage { /* a multiple of 1024 bytes, as swizzled tiles want */
    char x[CL_N * STREAM_BYTES], f[STREAM_BYTES];
};
struct cluster_shared {
    struct stage stage[STAGES];
    float record[2][WORKERS][TOKENS][RECORD];
    float coef[STAGES][TOKENS][CL_LOGITS];
    float gate[STAGES][TOKENS][GATE_BYTES / 4]; /* as they come from the blocks that open the tokens */
    float open[TOKENS][GATE_BYTES / 4];         /* of the tokens that this block opens */
    float batch[32][BATCH];                     /* and closes, one to a lane: products, the KEPT first; pre, rho, 1 / rms, unused */
    char room[ROOM_BYTES];                      /* slots: [ranks][tokens_of][FOURS] of float4 */
    uint64_t full[STAGES], formed[STAGES], gated[STAGES], finished[STAGES], summed[2], taken[2], received[SLOTS], credit[SLOTS], batched, closed;
};

static_assert(sizeof(struct cluster_shared) <= 232448, "what a block of compute capability 9.0 has");

/* Tokens t of a tile belong to block t % ranks, which opens and closes them: so many at most. */
__host__ __device__ __forceinline__ int tokens_of(const struct cluster_fwd &a) { return (TOKENS + a.ranks - 1) / a.ranks; }

#if HOPPER_CODE

/* In a slot of the receive room: what a block sends of token j of those of the receiver. */
__device__ __forceinline__ int sums_at(const struct cluster_fwd &a, int rank, int j, int v) { return ((rank * tokens_of(a) + j) * FOURS + v) * 16; }
/* What comes to a block for a tile. */
__device__ __forceinline__ uint32_t bytes_of(const struct cluster_fwd &a, int rank) { return (uint32_t)(a.ranks * ((TOKENS - 1 - rank + a.ranks) / a.ranks) * RECORD * 4); }

/* The k-th tile of this line of blocks, if below a.tiles. */
__device__ __forceinline__ int tile_of(const struct cluster_fwd &a, int k) { return (int)blockIdx.x / (a.ranks * a.parts) + k * a.lines; }

/* Where 16-byte piece `piece` of a line of a token stands in a stream. */
__device__ __forceinline__ int in_stream(int token, int line, int piece) { return in_tile(token * LINES + line, piece); }

/* ---- loader: one thread ----------------------------------------------------------------------------------- */

template <bool OPEN>
static __device__ __forceinline__ void load(const struct cluster_fwd &a, struct cluster_shared *s, int slice, const CUtensorMap *x, const CUtensorMap *f, const CUtensorMap *to_h)
{
    for (int k = 0, tile; tile_of(a, k - STAGES) < a.tiles; k++) {
        int at = k % STAGES, row = (tile = tile_of(a, k)) * TOKENS;
        struct stage *st = &s->stage[at];
        if (k >= STAGES)
            barrier_wait_bounded(&s->finished[at], round_before(k, STAGES));
        if (k >= STAGES && OPEN) { /* h has the place of f */
            tma_store_slice(to_h, slice * LINES, tile_of(a, k - STAGES) * TOKENS, st->f);
            bulk_commit();
        }
        if (tile < a.tiles) {
            uint32_t coef = (uint32_t)min(a.rows - row, (int64_t)TOKENS) * (CL_LOGITS * 4);
            barrier_expect(&s->full[at], sizeof *st + coef);
            tma_load_slice(st->x, x, slice * LINES, row, &s->full[at]);
            bulk_load(s->coef[at], a.coef_in + (int64_t)row * CL_LOGITS, coef, &s->full[at]);
            if (OPEN)
                bulk_wait_read<0>();
            tma_load_slice(st->f, f, slice * LINES, row, &s->full[at]);
        }
    }
    bulk_wait<0>();
}

/* ---- workers --------------------------------------------------------------------------------------------------------------- */

/* Bit 8 i + e: channel c + e of stream i is kept. */
static __device__ __forceinline__ uint32_t kept_channels(const struct cluster_fwd &a, int64_t row, int c)
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
static __device__ __forceinline__ void form(const struct cluster_fwd &a, char *x, const char *f, const float *coef, int64_t row, int c, uint32_t (&y)[CL_N][4])
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
static __device__ __forceinline__ void load_operands(const struct cluster_fwd &a, int g, int c, uint32_t (&w)[CL_N][2][3][4])
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

static __device__ __forceinline__ void multiply(const uint32_t (&w)[CL_N][2][3][4], const uint32_t (&y)[CL_N][4], float (&product)[3][4], float (&gram)[PAIRS / 2][4])
{
#pragma unroll
    for (int i = 0; i < CL_N; i++)
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int t = 0; t < 3; t++)
                mma_bf16(product[t], w[i][u][t], y[i][2 * u], y[i][2 * u + 1]);
    multiply_streams(y, gram);
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

template <bool DROP> static __device__ __forceinline__ void work(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int piece = in_stream(g, warp / 2, warp % 2 * 4 + q); /* 8 lanes read 2 tokens, which are in different halves of the banks */
    int c = rank * CL_COLS + warp * 32 + q * 8;
    uint32_t w[CL_N][2][3][4];
    load_operands(a, g, c, w);
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES;
        struct stage *st = &s->stage[at];
        char *x = st->x + piece, *f = st->f + piece;
        float (*record)[RECORD] = s->record[k % 2][warp];
        barrier_wait_bounded(&s->full[at], round_of(k, STAGES));
        if (k >= 2)
            barrier_wait_bounded(&s->taken[k % 2], round_before(k, 2));
        uint32_t y[2][CL_N][4];
        float gram[2][PAIRS / 2][4] = {}, product[2][3][4] = {};
        form<DROP>(a, x, f, s->coef[at][g], (int64_t)tile * TOKENS + g, c, y[0]);
        multiply(w, y[0], product[0], gram[0]);
        form<DROP>(a, x + 8 * TOKEN_BYTES, f + 8 * TOKEN_BYTES, s->coef[at][8 + g], (int64_t)tile * TOKENS + 8 + g, c, y[1]);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->formed[at]);
        write_records(record, product[0], gram[0], g, q);
        multiply(w, y[1], product[1], gram[1]);
        write_records(record + 8, product[1], gram[1], g, q);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->summed[k % 2]);
    }
}

/* ---- sender: one warp ------------------------------------------------------------------------------------------------------- */

/* Four sums over the blocks, in order of rank. */
static __device__ __forceinline__ float4 sum_ranks(const struct cluster_fwd &a, const struct cluster_shared *s, int k, int j, int v)
{
    const char *from = s->room + k % SLOTS * a.slot_bytes + sums_at(a, 0, j, v);
    int step = sums_at(a, 1, 0, 0);
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int r = 0; r < a.ranks; r++)
        sum = add4(sum, *(const float4 *)(from + r * step));
    return sum;
}

/* The block's own tokens of tile k, all but what h needs, for the closer. */
static __device__ __forceinline__ void take_kept(const struct cluster_fwd &a, struct cluster_shared *s, int k, int rank, int j, int v)
{
    int per = tokens_of(a), late = k % a.batch;
    exchange_wait(s->received, k, SLOTS);
    if (late == 0 && k > 0)
        barrier_wait_bounded(&s->closed, (uint32_t)(k / a.batch - 1) & 1);
#pragma unroll 1
    for (int i = (int)threadIdx.x % 32; i < per * (KEPT / 4);) {
        if (rank + j * a.ranks < TOKENS)
            *(float4 *)&s->batch[late * per + j][4 * v] = sum_ranks(a, s, k, j, SENT / 4 + v);
        i += 32;
        if (i < per * (KEPT / 4)) { /* divisions are slow, and most clusters need them once */
            j = i % per;
            v = i / per;
        }
    }
    exchange_credit(s->credit, k, SLOTS, a.ranks);
    if (threadIdx.x % 32 == 0 && (late + 1 == a.batch || tile_of(a, k + 1) >= a.tiles))
        barrier_arrive(&s->batched);
}

/* Adds what the warps have written, in order. A lane has 4 to 5 times four sums of token lane % 16, and sends them to the block whose token it is. */
template <bool OPEN> static __device__ __forceinline__ void send(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    constexpr int EACH = (FOURS + 1) / 2, LATER = 1; /* tiles: for what is sure to be there */
    int lane = (int)threadIdx.x % 32, token = lane % TOKENS, first = lane / TOKENS; /* first, first + 2, .. of the FOURS */
    int j = lane % tokens_of(a), v = lane / tokens_of(a);
    uint32_t to = (uint32_t)(token % a.ranks), bar = smem_address_in(s->received, to), room = smem_address_in(s->room + sums_at(a, rank, token / a.ranks, first), to);
    for (int k = 0; tile_of(a, k - (OPEN ? LATER : 0)) < a.tiles; k++) {
        if (tile_of(a, k) < a.tiles) {
            const float *record = s->record[k % 2][0][token];
            float4 sum[EACH];
            barrier_wait_bounded(&s->summed[k % 2], round_of(k, 2));
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int at = 4 * min(first + 2 * i, FOURS - 1);
                sum[i] = *(const float4 *)(record + at);
#pragma unroll
                for (int w = 1; w < WORKERS; w++)
                    sum[i] = add4(sum[i], *(const float4 *)(record + w * (TOKENS * RECORD) + at));
            }
            __syncwarp();
            if (lane == 0)
                barrier_arrive(&s->taken[k % 2]);
            exchange_wait_room(s->credit, k, SLOTS);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (first + 2 * i < FOURS)
                    cluster_send(room + (uint32_t)(k % SLOTS * a.slot_bytes + 2 * i * 16), sum[i], bar + (uint32_t)(k % SLOTS * 8));
        }
        if (OPEN && k >= LATER)
            take_kept(a, s, k - LATER, rank, j, v);
    }
}

/* Without OPEN, one warp: the cluster's sums of the block's tokens go to memory. */
static __device__ __forceinline__ void gather(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int per = tokens_of(a), part = (int)blockIdx.x / a.ranks % a.parts;
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        float4 *kept = a.kept + ((int64_t)tile * a.parts + part) * (FOURS * TOKENS);
        exchange_wait(s->received, k, SLOTS);
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < per * FOURS; i += 32)
            if (rank + i % per * a.ranks < TOKENS)
                kept[i / per * TOKENS + rank + i % per * a.ranks] = sum_ranks(a, s, k, i % per, i / per);
        exchange_taken(s->received, s->credit, k, SLOTS, a.ranks, bytes_of(a, rank));
    }
}

/* ---- opener: one warp ------------------------------------------------------------------------------------------------------- */

/* What a lane of the opener does for a token, `part` of 8. It has two of the sums: products for pre (parts 0 and 1), the Gram matrix' diagonal (2 and 3), its other
 * entries 01, 02; 03, 12; 13, 23. */
struct opener {
    float a_pre, beta; /* of stream part % 4 */
    uint32_t entries;  /* of the Gram matrix: row and column of the first sum, of the second, 2 bits each */
    float weight;      /* of both in pre^T G pre */
};
static __device__ __forceinline__ struct opener opener_of(const struct cluster_fwd &a)
{
    int part = (int)threadIdx.x % 8;
    struct opener o = {*a.a_pre, a.beta[part % CL_N], (uint32_t)(0x00ed9c84fa500000ull >> (8 * part)), part < 2 || part == 7 ? 0.0f : part < 4 ? 1.0f : 2.0f};
    return o;
}
/* Of four tokens, 8 lanes each: pre of stream part % 4, and 1 / rms. */
static __device__ __forceinline__ float2 open_tokens(const struct cluster_fwd &a, const struct opener &o, float2 sum, float *p, float *rho)
{
    int i = (int)threadIdx.x % 4;
    float4 diagonal = make_float4(__shfl_sync(~0u, sum.x, 2, 8), __shfl_sync(~0u, sum.y, 2, 8), __shfl_sync(~0u, sum.x, 3, 8), __shfl_sync(~0u, sum.y, 3, 8));
    float even = __shfl_sync(~0u, sum.x, i / 2, 8), odd = __shfl_sync(~0u, sum.y, i / 2, 8);
    *p = i % 2 == 0 ? even : odd;
    *rho = rho_of(a, diagonal);
    float pre = gate_of(a, o.a_pre, o.beta, *p, *rho);
    float x = __shfl_sync(~0u, pre, o.entries & 3, 8) * __shfl_sync(~0u, pre, o.entries >> 2 & 3, 8);
    float y = __shfl_sync(~0u, pre, o.entries >> 4 & 3, 8) * __shfl_sync(~0u, pre, o.entries >> 6 & 3, 8);
    float square = o.weight == 0 ? 0 : o.weight * (x * sum.x + y * sum.y);
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2)
        square += __shfl_xor_sync(~0u, square, bit);
    return make_float2(pre, rstd_of(a, square));
}
/* Gates go to all blocks in pieces of 16 bytes: first the tokens' pre, then their 1 / rms, ranks of each. A lane has two of them at most. */
struct piece {
    const float *from;
    uint32_t to, bar; /* of stage 0, in the block it goes to; 0: none */
};
static __device__ __forceinline__ struct piece piece_of(const struct cluster_fwd &a, struct cluster_shared *s, int rank, int i)
{
    int to = i % a.ranks, four = i / a.ranks % 2, j = i / a.ranks / 2, token = rank + j * a.ranks;
    struct piece p = {s->open[min(j, TOKENS - 1)] + 4 * four, 0, 0};
    if (token < TOKENS) {
        p.to = smem_address_in(&s->gate[0][token][4 * four], (uint32_t)to);
        p.bar = smem_address_in(s->gated, (uint32_t)to);
    }
    return p;
}
static __device__ __forceinline__ void send_piece(const struct piece &p, int at)
{
    if (p.bar != 0)
        cluster_send(p.to + (uint32_t)at * (TOKENS * GATE_BYTES), *(const float4 *)p.from, p.bar + (uint32_t)at * 8);
}

/* Two of the sums that h needs, over the blocks in order of rank. */
static __device__ __forceinline__ float2 sum_pair(const struct cluster_fwd &a, const struct cluster_shared *s, int k, int j, int part)
{
    const char *from = s->room + k % SLOTS * a.slot_bytes + sums_at(a, 0, j, 0) + part * 8;
    int step = sums_at(a, 1, 0, 0);
    float2 sum = make_float2(0, 0);
#pragma unroll 8
    for (int r = 0; r < a.ranks; r++) {
        float2 more = *(const float2 *)(from + r * step);
        sum.x += more.x;
        sum.y += more.y;
    }
    return sum;
}

static __device__ __forceinline__ void open_tiles(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int lane = (int)threadIdx.x % 32, part = lane % 8, per = tokens_of(a), late = 0, batches = 0;
    struct opener o = opener_of(a);
    struct piece piece[2] = {piece_of(a, s, rank, lane), piece_of(a, s, rank, lane + 32)};
    for (int k = 0; tile_of(a, k) < a.tiles; k++) {
        exchange_wait(s->received, k, SLOTS);
        if (late == 0 && batches > 0)
            barrier_wait_bounded(&s->closed, (uint32_t)(batches - 1) & 1);
#pragma unroll 1
        for (int first = 0; first < per; first += 4) {
            int j = min(first + lane / 8, per - 1);
            float p, rho;
            float2 opened = open_tokens(a, o, sum_pair(a, s, k, j, part), &p, &rho);
            float *open = s->open[j], *batch = s->batch[late * per + j] + KEPT;
            if (part < CL_N) { /* lanes without a token have another's numbers */
                open[part] = opened.x;
                batch[part] = p;
                batch[CL_N + part] = opened.x;
            } else if (part == CL_N) {
                open[CL_N] = opened.y;
                batch[2 * CL_N] = rho;
                batch[2 * CL_N + 1] = opened.y;
            }
        }
        exchange_taken(s->received, s->credit, k, SLOTS, a.ranks, bytes_of(a, rank)); /* which is a __syncwarp, too */
        send_piece(piece[0], k % STAGES);
        send_piece(piece[1], k % STAGES);
        __syncwarp();
        if (++late == a.batch || tile_of(a, k + 1) >= a.tiles) {
            if (lane == 0)
                barrier_arrive(&s->batched);
            late = 0;
            batches++;
        }
    }
}

/* ---- closer: one warp ------------------------------------------------------------------------------------------------------- */

/* The coefficients that h does not need, a lane to each of the block's tokens of as many tiles as there are lanes for. */
static __device__ __forceinline__ void close_tiles(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int lane = (int)threadIdx.x % 32, per = tokens_of(a), token = rank + lane % per * a.ranks;
    for (int first = 0, n = 0; tile_of(a, first) < a.tiles; first += a.batch, n++) {
        float4 product[KEPT / 4];
        int64_t row = (int64_t)tile_of(a, first + lane / per) * TOKENS + token;
        barrier_wait_bounded(&s->batched, (uint32_t)n & 1);
#pragma unroll
        for (int v = 0; v < KEPT / 4; v++)
            product[v] = *(const float4 *)&s->batch[lane][4 * v];
        float4 p = *(const float4 *)&s->batch[lane][KEPT], pre = *(const float4 *)&s->batch[lane][KEPT + CL_N];
        float2 norms = *(const float2 *)&s->batch[lane][KEPT + 2 * CL_N];
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->closed);
        if (lane < a.batch * per && token < TOKENS && row < a.rows) {
            write_opened(a, row, p, pre, norms.x, norms.y);
            make_coefficients(a, row, product, norms.x);
        }
        __syncwarp();
    }
}

/* ---- finishers ---------------------------------------------------------------------------------------------------------------------- */

/* h of four tokens. The same numbers as aggregate_rows (mhc_mix.cu) makes of given coefficients and 1 / rms, to the bit. */
static __device__ __forceinline__ void finish_tokens(const struct cluster_fwd &a, struct stage *st, const float (*gate)[GATE_BYTES / 4], int first, const float (&gain)[8])
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll 2
    for (int t = first; t < first + FINISHER_TOKENS; t++) {
        int where = in_stream(t, lane / 8, lane % 8);
        float pre[CL_N], v[8] = {}, rstd = gate[t][CL_N];
        load_floats(gate[t], pre);
#pragma unroll
        for (int j = 0; j < CL_N; j++) {
            float in[8];
            unpack<bf16>(load_raw(st->x + j * STREAM_BYTES + where), in);
#pragma unroll
            for (int e = 0; e < 8; e++)
                v[e] = fmaf(pre[j], in[e], v[e]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            v[e] = __fmul_rn(v[e], __fmul_rn(rstd, gain[e]));
        store_raw(st->f + where, repack<bf16>(v));
    }
}

/* One of them also sends y to memory; without OPEN that is all. */
template <bool OPEN> static __device__ __forceinline__ void finish(const struct cluster_fwd &a, struct cluster_shared *s, int finisher, int slice, const CUtensorMap *to_y)
{
    bool sends = threadIdx.x == 32 * WORKERS;
    float gain[8];
#pragma unroll
    for (int e = 0; e < 8; e++)
        gain[e] = 1;
    if (OPEN && a.gain != NULL) {
        load_floats(a.gain + slice * CL_COLS + (int)threadIdx.x % 32 * 8, gain);
#pragma unroll
        for (int e = 0; e < 8; e++)
            gain[e] += a.one;
    }
    for (int k = 0, tile; (tile = tile_of(a, k)) < a.tiles; k++) {
        int at = k % STAGES;
        barrier_wait_bounded(&s->formed[at], round_of(k, STAGES));
        if (sends) {
            tma_store_slice(to_y, slice * LINES, tile * TOKENS, s->stage[at].x);
            bulk_commit();
        }
        __syncwarp();
        if (OPEN) {
            barrier_wait_bounded(&s->gated[at], round_of(k, STAGES));
            if (sends)
                barrier_expect(&s->gated[at], TOKENS * GATE_BYTES); /* of tile k + STAGES */
            __syncwarp();
            finish_tokens(a, &s->stage[at], s->gate[at], finisher * FINISHER_TOKENS, gain);
            fence_async_proxy();
            __syncwarp();
        }
        if (sends)
            bulk_wait_read<0>();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(&s->finished[at]);
    }
    if (sends)
        bulk_wait<0>();
}

template <bool OPEN> static __device__ __forceinline__ void init_barriers(const struct cluster_fwd &a, struct cluster_shared *s)
{
    for (int i = 0; i < STAGES; i++) {
        barrier_init(&s->full[i], 1);
        barrier_init(&s->formed[i], WORKERS);
        barrier_init(&s->gated[i], 1);
        barrier_init(&s->finished[i], OPEN ? FINISHERS : 1);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(&s->summed[i], WORKERS);
        barrier_init(&s->taken[i], 1);
    }
    barrier_init(&s->batched, 2);
    barrier_init(&s->closed, 1);
    exchange_init(s->received, s->credit, SLOTS, OPEN ? 2 * a.ranks : a.ranks, bytes_of(a, (int)blockIdx.x % a.ranks));
    for (int i = 0; i < STAGES; i++)
        barrier_expect(&s->gated[i], TOKENS * GATE_BYTES);
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
    int rank = (int)blockIdx.x % a.ranks, slice = (int)blockIdx.x % (a.ranks * a.parts), warp = (int)threadIdx.x / 32; /* rank: cluster_rank */
    if (threadIdx.x == 0)
        init_barriers<OPEN>(a, s);
    cluster_sync();
    if (warp < WORKERS) {
        registers_up<WORKER_REGISTERS>();
        work<DROP>(a, s, slice);
    } else if (warp < WORKERS + FINISHERS) {
        registers_down<FINISHER_REGISTERS>();
        if (OPEN || warp == WORKERS)
            finish<OPEN>(a, s, warp - WORKERS, slice, &y);
    } else {
        registers_down<HELPER_REGISTERS>();
        if (warp == WORKERS + FINISHERS)
            send<OPEN>(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 1 && OPEN)
            open_tiles(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 1)
            gather(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 2 && threadIdx.x % 32 == 0)
            load<OPEN>(a, s, slice, &x, &f, &h);
        else if (warp == WORKERS + FINISHERS + 3 && OPEN)
            close_tiles(a, s, rank);
    }
    __syncwarp();
    cluster_sync(); /* nobody leaves while others send to it */
#endif
}

/* After the pass without clusters, a thread per row: sums over the blocks, and all that closers and finishers make of them. */
static __global__ void __launch_bounds__(64) ring_coefficients(const __grid_constant__ struct cluster_fwd a)
{
    int64_t row = (int64_t)blockIdx.x * 64 + threadIdx.x;
    if (row >= a.rows)
        return;
    float4 sum[FOURS] = {};
    float a_pre = *a.a_pre;
    const float4 *from = a.kept + row / TOKENS * a.parts * (FOURS * TOKENS) + row % TOKENS;
#pragma unroll 2
    for (int r = 0; r < a.parts; r++)
#pragma unroll
        for (int v = 0; v < FOURS; v++)
            sum[v] = add4(sum[v], from[(r * FOURS + v) * TOKENS]);
    float rho = rho_of(a, sum[1]);
    float4 pre = make_float4(gate_of(a, a_pre, a.beta[0], sum[0].x, rho), gate_of(a, a_pre, a.beta[1], sum[0].y, rho), gate_of(a, a_pre, a.beta[2], sum[0].z, rho),
                             gate_of(a, a_pre, a.beta[3], sum[0].w, rho));
    write_opened(a, row, sum[0], pre, rho, rstd_of(a, diagonal_part(pre, sum[1]) + other_part(pre, sum[2], sum[3])));
    make_coefficients(a, row, sum + SENT / 4, rho);
}

/* ---- launch --------------------------------------------------------------------------------------------------------------------------- */

/* Blocks of a cluster: all of a line; or a few of them, so that clusters fill the device (7 were slower than 4 on an H200). */
static int ranks_of(int64_t d, bool open)
{
    int blocks = (int)(d / CL_COLS), ranks = open ? blocks : 4;
    while (blocks % ranks != 0)
        ranks--;
    return ranks;
}
/* What the clusters of a line leave in memory. */
int64_t mhc_boundary_cluster_bytes(int64_t rows, int64_t d) { return round_up(rows, TOKENS) * (d / CL_COLS / ranks_of(d, false)) * FOURS * 16; }

/* Of the kernel with dropout or that without, which is ready to be launched then. */
template <bool OPEN> static int clusters_of(struct lane *l, int64_t d, bool drops, int *count)
{
    int ranks = ranks_of(d, OPEN);
    return drops ? cluster_count(l, boundary_cluster<true, OPEN>, ranks, THREADS, sizeof(struct cluster_shared), count)
                 : cluster_count(l, boundary_cluster<false, OPEN>, ranks, THREADS, sizeof(struct cluster_shared), count);
}
int mhc_boundary_cluster_blocks(struct lane *l, int64_t d, int64_t *blocks)
{
    int count;
    TRY(clusters_of<true>(l, d, false, &count));
    *blocks = count * (d / CL_COLS);
    return ST_OK;
}

/* at_once: clusters that the device runs. */
static struct cluster_fwd args_of(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work, bool open, int at_once)
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
    a.ranks = ranks_of(a.d, open);
    a.parts = (int)(a.d / CL_COLS) / a.ranks;
    a.lines = (int)min_i64(max_i64(min_i64(at_once, cuda_of(l)->sm_budget / a.ranks) / a.parts, 1), a.tiles);
    a.slot_bytes = a.ranks * tokens_of(a) * RECORD * 4;
    a.batch = 32 / tokens_of(a);
    a.by_width = 1.0f / (float)(CL_N * a.d);
    a.by_channels = 1.0f / (float)a.d;
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
    TRY(tensor_map_slices(l, &m->x, b->x.data, rows, CL_N, d, k, TOKENS, CL_COLS));
    TRY(tensor_map_slices(l, &m->f, b->f.data, rows, 1, d, b->f.stride[0], TOKENS, CL_COLS));
    TRY(tensor_map_slices(l, &m->y, b->y.data, rows, CL_N, d, k, TOKENS, CL_COLS));
    return tensor_map_slices(l, &m->h, b->h.data, rows, 1, d, b->h.stride[0], TOKENS, CL_COLS);
}

template <bool OPEN> static int launch(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work, struct cluster_fwd *a)
{
    struct maps m;
    int at_once;
    TRY(clusters_of<OPEN>(l, b->x.dim[1] / CL_N, b->drop.p > 0, &at_once));
    TRY(make_maps(l, b, &m));
    *a = args_of(l, b, work, OPEN, at_once);
    unsigned grid = (unsigned)(a->ranks * a->parts * a->lines);
    if (a->drop.info != NULL)
        LAUNCH_CLUSTER(l, (boundary_cluster<true, OPEN>), grid, a->ranks, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, *a);
    else
        LAUNCH_CLUSTER(l, (boundary_cluster<false, OPEN>), grid, a->ranks, THREADS, sizeof(struct cluster_shared), m.x, m.f, m.y, m.h, *a);
    return ST_OK;
}

int mhc_boundary_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct cluster_fwd a;
    return launch<true>(l, b, work, &a);
}

int mhc_boundary_ring(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct cluster_fwd a;
    TRY(launch<false>(l, b, work, &a));
    LAUNCH(l, ring_coefficients, (unsigned)ceil_div(a.rows, 64), 64, 0, a);
    return ST_OK;
}
