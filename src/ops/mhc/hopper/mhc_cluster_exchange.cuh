/* The boundary forward on Hopper: shared memory of a block, and those roles of mhc_cluster.cu that exchange sums with
 * other blocks. There is the design. */
#ifndef BRAID_OPS_MHC_CLUSTER_EXCHANGE_CUH
#define BRAID_OPS_MHC_CLUSTER_EXCHANGE_CUH

#include "ops/mhc/hopper/mhc_cluster_rows.cuh"
extern "C" {
#include "ops/mhc/mhc_path.h"
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
static_assert((int)MHC_CLUSTER_BLOCKS == (int)CLUSTER_MOST && (int)MHC_BLOCK_CHANNELS == (int)CL_COLS,
              "one rule for shapes");
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
    /* and closes, one to a lane: products, the KEPT first; pre, rho, 1 / rms, unused */
    float batch[32][BATCH];
    char room[ROOM_BYTES]; /* slots: [ranks][per][FOURS] of float4 */
    uint64_t full[STAGES], formed[STAGES], gated[STAGES], finished[STAGES], summed[2], taken[2], received[SLOTS],
        kept[SLOTS], credit[SLOTS], batched, closed;
    int first_tile; /* for roles that have no register to spare */
};
static_assert(sizeof(struct cluster_shared) <= 232448, "what a block of compute capability 9.0 has");

#if HOPPER_CODE

/* In a slot of the receive room: what a block sends of token j of those of the receiver. */
INLINE int sums_at(const struct cluster_fwd &a, int rank, int j, int v)
{
    return ((rank * a.per + j) * FOURS + v) * 16;
}
/* Records that come to a block for a tile. */
INLINE uint32_t records_of(const struct cluster_fwd &a, int rank)
{
    return (uint32_t)(a.ranks * ((TOKENS - 1 - rank + a.ranks) / a.ranks));
}

/* Tiles of this line of blocks: the first; the others are a.lines apart, as long as they are below a.tiles. Divisions
 * are slow, so that no role has one in its loop. */
INLINE int first_tile(const struct cluster_fwd &a) { return (int)blockIdx.x / (a.ranks * a.parts); }

/* The block of rank 0, by its place in the device's cluster. */
INLINE int first_rank(int rank) { return (int)cluster_rank() - rank; }

/* Where 16-byte piece `piece` of a line of a token stands in a stream. */
INLINE int in_stream(int token, int line, int piece) { return in_tile(token * LINES + line, piece); }

/* ---- sender: one warp ------------------------------------------------------------------------ */

/* Four sums over the blocks, in order of rank. */
INLINE float4 sum_ranks(const struct cluster_fwd &a, const struct cluster_shared *s, int k, int j, int v)
{
    const char *from = s->room + k % SLOTS * a.slot_bytes + sums_at(a, 0, j, v);
    int step = sums_at(a, 1, 0, 0);
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int r = 0; r < a.ranks; r++)
        sum = add4(sum, *(const float4 *)(from + r * step));
    return sum;
}

/* The block's own tokens of tile k, all but what h needs, for the closer: the late-th tile of batch n. */
INLINE void take_kept(const struct cluster_fwd &a, struct cluster_shared *s, int k, int late, int n, bool last,
                      int rank, uint32_t bytes, uint32_t credits, int j, int v)
{
    exchange_wait(s->kept, k, SLOTS);
    if (late == 0 && n > 0)
        barrier_wait_bounded(&s->closed, (uint32_t)(n - 1) & 1);
#pragma unroll 1
    for (int i = (int)threadIdx.x % 32; i < a.per * (KEPT / 4);) {
        if (rank + j * a.ranks < TOKENS)
            *(float4 *)&s->batch[late * a.per + j][4 * v] = sum_ranks(a, s, k, j, SENT / 4 + v);
        i += 32;
        if (i < a.per * (KEPT / 4)) { /* divisions are slow, and most clusters need them once */
            j = i % a.per;
            v = i / a.per;
        }
    }
    exchange_taken(s->kept, credits, k, SLOTS, a.ranks, bytes);
    if (late + 1 == a.batch || last)
        barrier_arrive(&s->batched);
}

/* Adds what the warps have written, in order. A lane has 4 to 5 times four sums of token lane % 16, and sends them to
 * the block whose token it is. */
template <bool OPEN> INLINE void send(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    constexpr int EACH = (FOURS + 1) / 2, LATER = 1; /* tiles: for what is sure to be there */
    /* first, first + 2, .. of the FOURS */
    int lane = (int)threadIdx.x % 32, token = lane % TOKENS, first = lane / TOKENS;
    int j = lane % a.per, v = lane / a.per;
    uint32_t to = (uint32_t)(first_rank(rank) + token % a.ranks), bar = smem_address_in(s->received, to),
             room = smem_address_in(s->room + sums_at(a, rank, token / a.ranks, first), to);
    uint32_t bytes = records_of(a, rank) * (KEPT * 4), credits = exchange_credits(s->credit, first_rank(rank), a.ranks);
    int late = 0, batches = 0;
    for (int k = 0, tile = first_tile(a); tile - (OPEN ? LATER : 0) * a.lines < a.tiles; k++, tile += a.lines) {
        if (tile < a.tiles) {
            const float *record = s->record[k % 2][0][token];
            float4 sum[EACH];
            barrier_wait_bounded(&s->summed[k % 2], round_of(k, 2));
            UNROLLED (part, 2) { /* what h needs goes first */
                constexpr int NEEDED = SENT / 8;
                int from = part == 0 ? 0 : NEEDED, until = part == 0 ? NEEDED : EACH;
#pragma unroll
                for (int i = from; i < until; i++) {
                    int at = 4 * min(first + 2 * i, FOURS - 1);
                    sum[i] = *(const float4 *)(record + at);
#pragma unroll
                    for (int w = 1; w < WORKERS; w++)
                        sum[i] = add4(sum[i], *(const float4 *)(record + w * (TOKENS * RECORD) + at));
                }
                if (part == 0)
                    exchange_wait_room(s->credit, k, SLOTS);
                else
                    barrier_arrive(&s->taken[k % 2]);
#pragma unroll
                for (int i = from; i < until; i++)
                    if (first + 2 * i < FOURS)
                        /* kept follows received in memory */
                        cluster_send(room + (uint32_t)(k % SLOTS * a.slot_bytes + 2 * i * 16), sum[i],
                                     bar + (uint32_t)((part * SLOTS + k % SLOTS) * 8));
            }
        }
        if (OPEN && k >= LATER) {
            take_kept(a, s, k - LATER, late, batches, tile + (1 - LATER) * a.lines >= a.tiles, rank, bytes, credits, j,
                      v);
            if (++late == a.batch) {
                late = 0;
                batches++;
            }
        }
    }
}

/* Without OPEN, one warp: the cluster's sums of the block's tokens go to memory. */
INLINE void gather(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int per = a.per, part = (int)blockIdx.x / a.ranks % a.parts;
    uint32_t records = records_of(a, rank), credits = exchange_credits(s->credit, first_rank(rank), a.ranks);
    for (int k = 0, tile = first_tile(a); tile < a.tiles; k++, tile += a.lines) {
        float4 *kept = a.kept + ((int64_t)tile * a.parts + part) * (FOURS * TOKENS);
        exchange_wait(s->received, k, SLOTS);
        exchange_wait(s->kept, k, SLOTS);
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < per * FOURS; i += 32)
            if (rank + i % per * a.ranks < TOKENS)
                kept[i / per * TOKENS + rank + i % per * a.ranks] = sum_ranks(a, s, k, i % per, i / per);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_expect(&s->kept[k % SLOTS], records * (KEPT * 4));
        exchange_taken(s->received, credits, k, SLOTS, a.ranks, records * (SENT * 4));
    }
}

/* ---- opener: one warp ------------------------------------------------------------------------ */

/* What a lane of the opener does for a token, `part` of 8. It has two of the sums: products for pre (parts 0 and 1),
 * the Gram matrix' diagonal (2 and 3), its other entries 01, 02; 03, 12; 13, 23. */
struct opener {
    float a_pre, beta; /* of stream part % 4 */
    uint32_t entries;  /* of the Gram matrix: row and column of the first sum, of the second, 2 bits each */
    float weight;      /* of both in pre^T G pre */
};
INLINE struct opener opener_of(const struct cluster_fwd &a)
{
    int part = (int)threadIdx.x % 8;
    struct opener o = {*a.by.alpha[0], a.by.beta[part % CL_N], (uint32_t)(0x00ed9c84fa500000ull >> (8 * part)),
                       part < 2 || part == 7 ? 0.0f
                       : part < 4            ? 1.0f
                                             : 2.0f};
    return o;
}
/* Values of four tokens, 8 lanes each: pre of stream part % 4, and 1 / rms. */
INLINE float2 open_tokens(const struct cluster_fwd &a, const struct opener &o, float2 sum, float *p, float *rho)
{
    int i = (int)threadIdx.x % 4;
    float4 diagonal = make_float4(__shfl_sync(~0u, sum.x, 2, 8), __shfl_sync(~0u, sum.y, 2, 8),
                                  __shfl_sync(~0u, sum.x, 3, 8), __shfl_sync(~0u, sum.y, 3, 8));
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
/* Gates go to all blocks in pieces of 16 bytes: first the tokens' pre, then their 1 / rms, ranks of each. A lane has
 * two of them at most. */
struct piece {
    const float *from;
    uint32_t to, bar; /* of stage 0, in the block it goes to; 0: none */
};
INLINE struct piece piece_of(const struct cluster_fwd &a, struct cluster_shared *s, int rank, int i)
{
    int to = first_rank(rank) + i % a.ranks, four = i / a.ranks % 2, j = i / a.ranks / 2, token = rank + j * a.ranks;
    struct piece p = {s->open[min(j, TOKENS - 1)] + 4 * four, 0, 0};
    if (token < TOKENS) {
        p.to = smem_address_in(&s->gate[0][token][4 * four], (uint32_t)to);
        p.bar = smem_address_in(s->gated, (uint32_t)to);
    }
    return p;
}
INLINE void send_piece(const struct piece &p, int at)
{
    if (p.bar != 0)
        cluster_send(p.to + (uint32_t)at * (TOKENS * GATE_BYTES), *(const float4 *)p.from, p.bar + (uint32_t)at * 8);
}

/* Two of the sums that h needs, over the blocks in order of rank. */
INLINE float2 sum_pair(const struct cluster_fwd &a, const struct cluster_shared *s, int k, int j, int part)
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

INLINE void open_tiles(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int lane = (int)threadIdx.x % 32, part = lane % 8, per = a.per, late = 0, batches = 0;
    struct opener o = opener_of(a);
    struct piece piece[2] = {piece_of(a, s, rank, lane), piece_of(a, s, rank, lane + 32)};
    uint32_t bytes = records_of(a, rank) * (SENT * 4), credits = exchange_credits(s->credit, first_rank(rank), a.ranks);
    for (int k = 0, tile = first_tile(a); tile < a.tiles; k++, tile += a.lines) {
        exchange_wait(s->received, k, SLOTS);
        if (late == 0 && batches > 0)
            barrier_wait_bounded(&s->closed, (uint32_t)(batches - 1) & 1);
#pragma unroll 1
        for (int first = 0; first < per; first += 4) {
            int j = min(first + lane / 8, per - 1);
            float p, rho;
            float2 opened = open_tokens(a, o, sum_pair(a, s, k, j, part), &p, &rho);
            float *open = s->open[j], *batch = s->batch[late * per + j] + KEPT;
            bool own = first + lane / 8 < per; /* lanes without a token have another's numbers */
            if (own && part < CL_N) {
                open[part] = opened.x;
                batch[part] = p;
                batch[CL_N + part] = opened.x;
            } else if (own && part == CL_N) {
                open[CL_N] = opened.y;
                batch[2 * CL_N] = rho;
                batch[2 * CL_N + 1] = opened.y;
            }
        }
        __syncwarp();
        send_piece(piece[0], k % STAGES);
        send_piece(piece[1], k % STAGES);
        exchange_taken(s->received, credits, k, SLOTS, a.ranks, bytes); /* which is a __syncwarp, too */
        if (++late == a.batch || tile + a.lines >= a.tiles) {
            barrier_arrive(&s->batched);
            late = 0;
            batches++;
        }
    }
}

/* ---- closer: one warp ------------------------------------------------------------------------ */

/* The coefficients that h does not need, a lane to each of the block's tokens of as many tiles as
 * there are lanes for. */
INLINE void close_tiles(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int lane = (int)threadIdx.x % 32, per = a.per, token = rank + lane % per * a.ranks;
    int tile = first_tile(a), later = lane / per * a.lines;
    for (int n = 0; tile < a.tiles; tile += a.batch * a.lines, n++) {
        float4 product[KEPT / 4];
        int64_t row = (int64_t)(tile + later) * TOKENS + token;
        barrier_wait_bounded(&s->batched, (uint32_t)n & 1);
        UNROLLED (v, KEPT / 4)
            product[v] = *(const float4 *)&s->batch[lane][4 * v];
        float4 p = *(const float4 *)&s->batch[lane][KEPT], pre = *(const float4 *)&s->batch[lane][KEPT + CL_N];
        float2 norms = *(const float2 *)&s->batch[lane][KEPT + 2 * CL_N];
        barrier_arrive(&s->closed);
        if (lane < a.batch * per && token < TOKENS && row < a.rows) {
            write_opened(a, row, p, pre, norms.x, norms.y);
            make_coefficients(a, row, product, norms.x);
        }
        __syncwarp();
    }
}

#endif /* HOPPER_CODE */

#endif
