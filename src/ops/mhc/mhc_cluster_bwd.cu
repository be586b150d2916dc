/* The boundary backward for 4 streams of bf16 on Hopper, all of it in one pass: dh, dy, x and f are read once, dx and df written once.
 *
 * A cluster of C / 256 blocks owns tiles of 8 tokens, each block 256 channels of all streams. Gradients of norm and gates need sums over all
 * channels of a token before any channel can be finished, so a tile stays in shared memory while the blocks exchange those sums. The
 * stream y_i = sum_j mix_ij x_j + post_i f is not read. With u = dh gain and a = sum_i pre_i y_i
 *   dpre_i = rstd (<y_i, u> - m <y_i, a>),  m = rstd^2 <a, u> / C      from 8 dots, with y as it was stored
 *   g_i = dy_i + pre_i rstd (u - m a) + (dp w)_i + scale y_i           the whole gradient of the stream
 * and in g all terms of x and f are one 4 x 5 matrix for a token: there y is not even formed, and what its rounding would change is less than what
 * rounding dx does.
 *
 * Roles, all of them walking over the same tiles and waiting on barriers only:
 *   copier     a thread: bulk loads into two rings (x, f, dh with the rows' records; dy, which is needed late), bulk stores
 *   dotters    4 warps: y and the dots on tensor cores, where tokens are the diagonal of (8 tokens) x (8 tokens); dgain, in registers from tile to tile
 *   sender     a warp: the block's dots to all blocks of the cluster
 *   closer     a warp: the sums of all blocks, dz of pre, the matrix
 *   finishers  8 warps, their part of w in registers: g, dx, df, sums over the block's channels for dcoef_in
 *   adder      a warp: those sums over the warps
 * Nobody is more than STAGES tiles ahead of the finishers of its block, and closers at most SLOTS; what senders may overwrite is what credits say
 * (mhc_cluster.cuh). Every wait is for something of the same tile or of an earlier one, so they all end; and whoever waits for a phase is needed
 * for the next one, so no phase is missed.
 * Before it, mhc_cluster_records.cu: all that is known of a row without the sums, with Sinkhorn's way back. After it, the sums over blocks.
 *
 * Sums for dcoef_in take g rounded to 11 bits (tf32); x and f have 8. w enters dp w as bf16, and dp as two halves, as in mhc_pass_bwd.cu. */
#include "ops/mhc/mhc_cluster_bwd.cuh"

enum {
    /* A block starts with 128 for each of 512 threads, and that is all there is to share. */
    FINISHER_REGISTERS = 176,
    DOTTER_REGISTERS = 120,
    HELPER_REGISTERS = 40,
    FINISHERS = 8, /* warps */
    DOTTERS = 4,
    THREADS = 32 * (FINISHERS + DOTTERS + 4),
    COPIER = FINISHERS + DOTTERS, /* these are warps, too */
    SENDER,
    CLOSER,
    ADDER,
    STAGES = 6, /* of x, f, dh */
    DY_STAGES = 3,
    SLOTS = 2,
    BLOCKS = CL_COLS / 64,
    LINES = TOKENS * CL_ROW,       /* bytes of 64 channels of all tokens */
    STREAMS_BYTES = CL_N * BLOCKS * LINES,
    MIXES = CL_N * CL_N + CL_N,    /* sums for dpost, dres */
    SENT = TOKENS * 2 * CL_N * 4,  /* bytes of a tile from block to block */
    FINISH = 28,
};
/* What a token's finishers need of the exchange: g_i += sum_j mix_ij x_j + f_i f + u_i u. With dropout u is first reduced by M times the share of f. */
enum { FIN_MIX = 0, FIN_F = 16, FIN_U = 20, FIN_M = 24 };

struct bwd_stage { /* multiples of 1024 bytes, as swizzled tiles want */
    char x[STREAMS_BYTES], f[BLOCKS * LINES], dh[BLOCKS * LINES];
};
struct bwd_shared {
    struct bwd_stage stage[STAGES];
    char dy[DY_STAGES][STREAMS_BYTES];
    float record[STAGES][TOKENS][RECORD], finish[SLOTS][TOKENS][FINISH];
    float2 dots[SLOTS][DOTTERS][CL_N][TOKENS]; /* with u, with rstd a */
    float received[SLOTS][CLUSTER_MOST][TOKENS][2 * CL_N];
    float mixes[FINISHERS][TOKENS][MIXES];
    float gain[CL_COLS];
    /* Who waits: dotters, closer and finishers for full; finishers for brought and ready; sender for dotted and credit; closer for received_here;
     * dotters for taken; copier and closer for done; adder for mixed; finishers for added. */
    uint64_t full[STAGES], brought[DY_STAGES], dotted[SLOTS], taken[SLOTS], received_here[SLOTS], credit[SLOTS], ready[SLOTS], done[STAGES], mixed, added;
};

static_assert(sizeof(struct bwd_shared) <= 227 * 1024, "more than a block of Hopper can have");

struct cluster_bwd {
    const float *records, *w, *gain;
    float *dz, *dgain, *mixes; /* dgain [clusters, d] or NULL; mixes [ranks, rows, MIXES] */
    int64_t w_stride, dz_stride, rows, d;
    int tiles, ranks, clusters;
    float one, per_channel; /* 1 / d */
    bool profile_d, has_dy;
    struct drop_rule drop;
};

/* ---- the pass: copies ----------------------------------------------------------------------------------------------------- */

#if HOPPER_CODE

struct bwd_maps {
    const CUtensorMap *x, *dy, *f, *dh, *dx, *df;
};
/* A thread's block and its tiles: first, first + step, ... so many. */
struct walk {
    int rank, first, step, count;
};
__device__ __forceinline__ struct walk walk_of(const struct cluster_bwd &a)
{
    int cluster = (int)blockIdx.x / a.ranks;
    struct walk w = {(int)blockIdx.x % a.ranks, cluster, a.clusters, (a.tiles - cluster + a.clusters - 1) / a.clusters};
    return w;
}
__device__ __forceinline__ int tile_of(const struct walk &w, int k) { return w.first + k * w.step; }

static __device__ __forceinline__ void load_stage(const struct cluster_bwd &a, struct bwd_shared *s, const struct walk &w, int k, const struct bwd_maps &m)
{
    struct bwd_stage *st = &s->stage[k % STAGES];
    uint64_t *bar = &s->full[k % STAGES];
    int row = tile_of(w, k) * TOKENS;
    barrier_expect(bar, sizeof(struct bwd_stage) + sizeof s->record[0]);
    bulk_load(s->record[k % STAGES], a.records + (int64_t)row * RECORD, sizeof s->record[0], bar);
    for (int b = 0; b < BLOCKS; b++) {
        int col = w.rank * CL_COLS + b * 64;
        parts_load(st->x + b * CL_N * LINES, m.x, col, row, bar);
        tma_load_2d(st->f + b * LINES, m.f, col, row, bar);
        tma_load_2d(st->dh + b * LINES, m.dh, col, row, bar);
    }
}
static __device__ __forceinline__ void load_dy(struct bwd_shared *s, const struct walk &w, int k, const struct bwd_maps &m)
{
    uint64_t *bar = &s->brought[k % DY_STAGES];
    barrier_expect(bar, STREAMS_BYTES);
    for (int b = 0; b < BLOCKS; b++)
        parts_load(s->dy[k % DY_STAGES] + b * CL_N * LINES, m.dy, w.rank * CL_COLS + b * 64, tile_of(w, k) * TOKENS, bar);
}
static __device__ __forceinline__ void copy_tiles(const struct cluster_bwd &a, struct bwd_shared *s, const struct bwd_maps &m)
{
    struct walk w = walk_of(a);
    for (int k = 0; k < STAGES && k < w.count; k++) {
        load_stage(a, s, w, k, m);
        if (a.has_dy && k < DY_STAGES)
            load_dy(s, w, k, m);
    }
    for (int k = 0; k < w.count; k++) {
        struct bwd_stage *st = &s->stage[k % STAGES];
        barrier_wait_bounded(&s->done[k % STAGES], round_of(k, STAGES));
        if (a.has_dy && k + DY_STAGES < w.count)
            load_dy(s, w, k + DY_STAGES, m);
        for (int b = 0; b < BLOCKS; b++) {
            int col = w.rank * CL_COLS + b * 64;
            parts_store(m.dx, col, tile_of(w, k) * TOKENS, st->x + b * CL_N * LINES);
            tma_store_2d(m.df, col, tile_of(w, k) * TOKENS, st->f + b * LINES);
        }
        stores_read();
        if (k + STAGES < w.count)
            load_stage(a, s, w, k + STAGES, m);
    }
    bulk_wait<0>();
}

/* ---- the pass: dots --------------------------------------------------------------------------------------------------------- */

/* A worker thread: lane 4 token + q has 8 channels of its token, piece 2 q + half of 64. So the lanes of a quarter warp find their
 * channels in different banks, and 8 neighbouring columns of w are pairs of channels of four threads. */
struct place {
    int warp, lane, token, q;
};
__device__ __forceinline__ struct place place_of(int first_warp)
{
    int lane = (int)threadIdx.x % 32;
    struct place p = {(int)threadIdx.x / 32 - first_warp, lane, lane / 4, lane % 4};
    return p;
}
/* Channel of a block. */
__device__ __forceinline__ int channel_of(int block, int half, int q) { return block * 64 + 8 * (2 * q + half); }

/* Sums over the channels of 4 lanes, for 8 tokens: of v with the rows of `first` (acc[0], acc[1]) and of `second` (acc[2], acc[3]). A product with
 * 8 tokens on either side; only the diagonal has a meaning. */
template <int COUNT> __device__ __forceinline__ void dot_tokens(float (&acc)[4], const uint32_t (&first)[COUNT], const uint32_t (&second)[COUNT], const float (&v)[COUNT])
{
#pragma unroll
    for (int e = 0; e < COUNT; e += 2)
        mma_tf32(acc, first[e], second[e], first[e + 1], second[e + 1], __float_as_uint(v[e]), __float_as_uint(v[e + 1]));
}
/* The lane of a token that has its sums, and those. */
__device__ __forceinline__ bool on_diagonal(const struct place &p) { return p.q == p.token / 2; }
__device__ __forceinline__ float2 diagonal(const struct place &p, const float (&acc)[4])
{
    return p.token % 2 == 0 ? make_float2(acc[0], acc[2]) : make_float2(acc[1], acc[3]);
}

/* Coefficients of y as the operand A of products with x and f, whose depth is 8 tokens twice: a diagonal of high halves, one of low halves. Rows of a product
 * are 8 tokens of stream 2 pair, then of stream 2 pair + 1. */
struct mix_operands {
    uint32_t of[2][CL_N + 1][4]; /* [pair][x_0 .. x_3, f] */
};
static __device__ __forceinline__ void take_operands(const struct place &p, const float *record, struct mix_operands &m)
{
    /* To the half of a word where the token is, and nothing from lanes beside the diagonal. */
    unsigned low = !on_diagonal(p) ? 0x4444 : p.token % 2 == 0 ? 0x4410 : 0x1044, high = !on_diagonal(p) ? 0x4444 : p.token % 2 == 0 ? 0x4432 : 0x3244;
#pragma unroll
    for (int n = 0; n < CL_N + 1; n++) {
        uint4 raw = load_raw(record + REC_OPERANDS + 4 * n);
        uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t *to = m.of[(2 * n + e) / (CL_N + 1)][(2 * n + e) % (CL_N + 1)];
            to[0] = __byte_perm(words[2 * e], 0, low);
            to[1] = __byte_perm(words[2 * e], 0, high);
            to[2] = __byte_perm(words[2 * e + 1], 0, low);
            to[3] = __byte_perm(words[2 * e + 1], 0, high);
        }
    }
}

/* y of this lane's token and two channels, pair by pair: stream 2 pair, then stream 2 pair + 1; from x and f as operands B, with 8 tokens down and 8
 * channels across, each twice. */
template <bool DROP>
static __device__ __forceinline__ void form_streams(const struct mix_operands &m, const uint32_t (&x)[2 * CL_N], const uint32_t *f, float (&y)[2][4])
{
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            y[pair][e] = 0;
#pragma unroll
        for (int j = 0; j < CL_N; j++)
            mma_bf16(y[pair], m.of[pair][j], x[2 * j], x[2 * j + 1]);
        if (!DROP)
            mma_bf16(y[pair], m.of[pair][CL_N], f[0], f[1]);
    }
}
/* With dropout f is another one for each stream. c: the first of the two channels. */
static __device__ __forceinline__ void add_dropped_f(const struct cluster_bwd &a, const struct drop_row &drop, const float *record, uint32_t f, int64_t c, float (&y)[2][4])
{
    float v[2];
    unpack2(f, v);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float factor[4], post = record[REC_POST + i];
        drop_factors(a.drop, drop, i * a.d + (c & ~(int64_t)3), factor);
        y[i / 2][i % 2 * 2] = fmaf(post * v[0], c % 4 == 0 ? factor[0] : factor[2], y[i / 2][i % 2 * 2]);
        y[i / 2][i % 2 * 2 + 1] = fmaf(post * v[1], c % 4 == 0 ? factor[1] : factor[3], y[i / 2][i % 2 * 2 + 1]);
    }
}

/* Adds the dots of y, as it was stored, with u (rows of acc: 8 tokens) and with rstd a (8 more), over two channels a lane, u and a as two halves; and
 * what those give to dgain. */
static __device__ __forceinline__ void dot_streams(const float (&y)[2][4], const float4 &pre, uint32_t dh, float2 gain, float (&acc)[CL_N][4], float (&dgain)[2])
{
    float d[2], u[2], agg[2], held[CL_N][2];
    uint32_t stored[CL_N];
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        stored[i] = pack2(y[i / 2][i % 2 * 2], y[i / 2][i % 2 * 2 + 1]);
        unpack2(stored[i], held[i]);
    }
    unpack2(dh, d);
    u[0] = d[0] * gain.x;
    u[1] = d[1] * gain.y;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        agg[e] = fmaf(pre.w, held[3][e], fmaf(pre.z, held[2][e], fmaf(pre.y, held[1][e], pre.x * held[0][e])));
        dgain[e] = fmaf(d[e], agg[e], dgain[e]);
    }
    uint2 of_u = split_pair(u[0], u[1]);
    uint2 of_a = split_pair(agg[0], agg[1]);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        mma_bf16_k8(acc[i], of_u.x, of_a.x, stored[i]);
        mma_bf16_k8(acc[i], of_u.y, of_a.y, stored[i]);
    }
}

/* dgain of this block's tokens, in the order of tokens. */
static __device__ __forceinline__ void leave_dgain(const struct cluster_bwd &a, const struct walk &w, const struct place &p, float (&dgain)[8][2])
{
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int bit = 4; bit < 32; bit *= 2)
                dgain[piece][e] += __shfl_xor_sync(0xffffffffu, dgain[piece][e], bit);
        if (a.dgain != NULL && p.token == 0)
            *(float2 *)(a.dgain + w.first * a.d + w.rank * CL_COLS + p.warp * 64 + piece * 8 + 2 * p.q) = make_float2(dgain[piece][0], dgain[piece][1]);
    }
}

/* A warp has 64 channels; a lane two channels of each piece of 8, of its token. */
template <bool DROP> static __device__ __forceinline__ void take_dots(const struct cluster_bwd &a, struct bwd_shared *s)
{
    struct walk w = walk_of(a);
    struct place p = place_of(FINISHERS);
    float dgain[8][2] = {};
    int row = p.lane % 8, matrix = p.lane / 16; /* whose address this lane gives to load_matrices_t, where two registers in a row get the same matrix */
    for (int k = 0; k < w.count; k++) {
        const struct bwd_stage *st = &s->stage[k % STAGES];
        const float *record = s->record[k % STAGES][p.token];
        /* Piece n of a line of a tile is where piece 0 is, but for these bits: n << 4. */
        uint32_t x = shared_address(st->x + (p.warp * CL_N + matrix) * LINES + in_tile(row, 0)), f = shared_address(st->f + p.warp * LINES + in_tile(row, 0));
        int own = (int)(st->f - (const char *)s) + p.warp * LINES + in_tile(p.token, 0) + 4 * p.q;
        float acc[CL_N][4] = {};
        uint32_t f_of[4];
        struct mix_operands m;
        struct drop_row drop = {};
        if (DROP)
            drop = drop_row_of(a.drop, (int64_t)tile_of(w, k) * TOKENS + p.token);
        barrier_wait_bounded(&s->full[k % STAGES], round_of(k, STAGES));
        take_operands(p, record, m);
        float4 pre = *(const float4 *)(record + REC_PRE);
#pragma unroll
        for (int piece = 0; piece < 8; piece++) {
            uint32_t x_of[2 * CL_N];
            float y[2][4];
            const char *here = (const char *)s + (own ^ piece << 4);
            int channel = p.warp * 64 + piece * 8 + 2 * p.q;
            if (!DROP && piece % 2 == 0)
                load_matrices_t(f_of, f ^ (uint32_t)(piece + matrix) << 4);
            load_matrices_t(x_of, x ^ (uint32_t)piece << 4);
            load_matrices_t(x_of + 4, (x ^ (uint32_t)piece << 4) + 2 * LINES);
            form_streams<DROP>(m, x_of, f_of + piece % 2 * 2, y);
            if (DROP)
                add_dropped_f(a, drop, record, *(const uint32_t *)here, (int64_t)w.rank * CL_COLS + channel, y);
            dot_streams(y, pre, *(const uint32_t *)(here + sizeof st->f), *(const float2 *)(s->gain + channel), acc, dgain[piece]);
        }
        if (k >= SLOTS)
            barrier_wait_bounded(&s->taken[k % SLOTS], round_before(k, SLOTS));
        if (on_diagonal(p)) {
#pragma unroll
            for (int i = 0; i < CL_N; i++)
                s->dots[k % SLOTS][p.warp][i][p.token] = diagonal(p, acc[i]);
        }
        __syncwarp();
        if (p.lane == 0)
            barrier_arrive(&s->dotted[k % SLOTS]);
    }
    leave_dgain(a, w, p, dgain);
}

/* ---- the pass: exchange ------------------------------------------------------------------------------------------------------ */

/* By lane 4 token + i: <y_i, u> and <y_i, rstd a> over the block's channels. */
static __device__ __forceinline__ float2 stream_dots(const struct bwd_shared *s, int slot, int token, int i)
{
    float2 sum = s->dots[slot][0][i][token];
#pragma unroll
    for (int d = 1; d < DOTTERS; d++) {
        float2 add = s->dots[slot][d][i][token];
        sum = make_float2(sum.x + add.x, sum.y + add.y);
    }
    return sum;
}
/* To all blocks: the dots of two streams from each pair of lanes, even lanes to even ranks. */
static __device__ __forceinline__ void send_dots(struct bwd_shared *s, const struct walk &w, int ranks, int slot, int token, int i, float2 v)
{
    float2 other = make_float2(__shfl_xor_sync(0xffffffffu, v.x, 1), __shfl_xor_sync(0xffffffffu, v.y, 1));
    float4 both = i % 2 == 0 ? make_float4(v.x, v.y, other.x, other.y) : make_float4(other.x, other.y, v.x, v.y);
    const float *to = &s->received[slot][w.rank][token][i / 2 * 4];
    for (int rank = i % 2; rank < ranks; rank += 2)
        cluster_send(smem_address_in(to, (uint32_t)rank), both, smem_address_in(&s->received_here[slot], (uint32_t)rank));
}
/* Over the streams of a token, the same bits for all four lanes. */
__device__ __forceinline__ float stream_sum(float v)
{
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
/* From the dots over all channels: dz of pre, returned; and what finishers need, with dp of pre in the record. */
template <bool DROP> static __device__ __forceinline__ float close_token(float *record, float *finish, float per_channel, int i, float2 dot)
{
    float pre = record[REC_PRE + i], post = record[REC_POST + i], rstd = record[REC_RSTD]; /* pre has rstd in it */
    float4 mix = *(const float4 *)(record + REC_MIX + CL_N * i);
    float m = stream_sum(pre * dot.x) * per_channel; /* m / rstd of above */
    float dz = fmaf(rstd * (dot.x - m * dot.y), record[REC_SLOPE + i], record[REC_BASE + i]), dp = dz * record[REC_BY];
    float scale = record[REC_RHO] * (record[REC_REST] + stream_sum(dz * record[REC_P + i])), of_a = -pre * m;
    *(float4 *)(finish + FIN_MIX + CL_N * i) = make_float4(fmaf(of_a, stream_sum(pre * mix.x), scale * mix.x), fmaf(of_a, stream_sum(pre * mix.y), scale * mix.y),
                                                           fmaf(of_a, stream_sum(pre * mix.z), scale * mix.z), fmaf(of_a, stream_sum(pre * mix.w), scale * mix.w));
    finish[FIN_F + i] = DROP ? scale * post : fmaf(of_a, stream_sum(pre * post), scale * post);
    finish[FIN_U + i] = pre;
    if (i == 0)
        finish[FIN_M] = m;
    float next = __shfl_xor_sync(0xffffffffu, dp, 1);
    if (i % 2 == 0)
        *(uint2 *)(record + REC_DP + i) = split_pair(dp, next);
    return dz;
}

static __device__ __forceinline__ void send_tiles(const struct cluster_bwd &a, struct bwd_shared *s)
{
    struct walk w = walk_of(a);
    int lane = (int)threadIdx.x % 32, token = lane / 4, i = lane % 4;
    for (int k = 0; k < w.count; k++) {
        int slot = k % SLOTS;
        barrier_wait_bounded(&s->dotted[slot], round_of(k, SLOTS));
        float2 own = stream_dots(s, slot, token, i);
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->taken[slot]);
        exchange_wait_room(s->credit, k, SLOTS);
        send_dots(s, w, a.ranks, slot, token, i, own);
    }
}
template <bool DROP> static __device__ __forceinline__ void close_tiles(const struct cluster_bwd &a, struct bwd_shared *s)
{
    struct walk w = walk_of(a);
    int lane = (int)threadIdx.x % 32, token = lane / 4, i = lane % 4;
    for (int k = 0; k < w.count; k++) {
        int slot = k % SLOTS;
        float2 dot = make_float2(0, 0);
        exchange_wait(s->received_here, k, SLOTS);
#pragma unroll 4
        for (int rank = 0; rank < a.ranks; rank++) {
            float2 add = *(const float2 *)&s->received[slot][rank][token][2 * i];
            dot = make_float2(dot.x + add.x, dot.y + add.y);
        }
        __syncwarp();
        exchange_taken(s->received_here, s->credit, k, SLOTS, a.ranks, (uint32_t)(a.ranks * SENT));
        barrier_wait_bounded(&s->full[k % STAGES], round_of(k, STAGES));
        if (k >= SLOTS) /* finish is free again */
            barrier_wait_bounded(&s->done[(k - SLOTS) % STAGES], round_of(k - SLOTS, STAGES));
        float dz = close_token<DROP>(s->record[k % STAGES][token], s->finish[slot][token], a.per_channel, i, dot);
        fence_async_proxy(); /* the next record comes by bulk copy */
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->ready[slot]);
        int tile = tile_of(w, k);
        int64_t row = (int64_t)tile * TOKENS + token;
        if (tile % a.ranks == w.rank && row < a.rows)
            a.dz[row * a.dz_stride + i] = dz;
    }
}

/* ---- the pass: everything that needs the exchange -------------------------------------------------------------------------- */

/* w as the operand B of a product with dp, 8 channels to a tile t: the rows of pre, post and res that this lane holds, of its column. */
struct own_w {
    uint32_t of[CL_N][4][3];
};
static __device__ __forceinline__ void load_w(const struct cluster_bwd &a, const struct walk &w, const struct place &p, struct own_w &own)
{
    int column = p.lane / 4, q = p.lane % 4;
    const float *from = a.w + 2 * q * a.w_stride + w.rank * CL_COLS + channel_of(p.warp / 2, p.warp % 2, column / 2) + column % 2;
#pragma unroll
    for (int i = 0; i < CL_N; i++)
#pragma unroll
        for (int part = 0; part < 3; part++) {
            const float *at = from + 8 * part * a.w_stride + i * a.d;
#pragma unroll
            for (int t = 0; t < 4; t++)
                own.of[i][t][part] = pack_bf16(at[2 * t], at[2 * t + a.w_stride]);
        }
}

/* What dropout left of f in each stream, as bits, 8 for each; and their sum in the aggregate. */
static __device__ __forceinline__ uint32_t drop_bits(const struct cluster_bwd &a, const float *record, int64_t row, int64_t c, const float (&f)[8], float (&sum)[8])
{
    struct drop_row drop = drop_row_of(a.drop, row);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float factor[8], share = record[REC_PRE + i] * record[REC_POST + i];
        drop_factors(a.drop, drop, i * a.d + c, factor);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            bits |= (factor[e] != 0 ? 1u : 0u) << (8 * i + e);
            sum[e] = fmaf(share, f[e] * factor[e], sum[e]);
        }
    }
    return bits;
}
template <bool DROP> __device__ __forceinline__ float factor_of(const struct cluster_bwd &a, uint32_t bits, int i, int e)
{
    return !DROP || (bits >> (8 * i + e) & 1) != 0 ? (DROP ? a.drop.kept : 1.0f) : 0.0f;
}

struct tile_in {
    float x[CL_N][8], f[8], u[8];
    uint32_t bits;
};
template <bool DROP>
static __device__ __forceinline__ void take_tile(const struct cluster_bwd &a, const struct bwd_shared *s, const struct bwd_stage *st, const float *record, const float *finish, int block,
                                                 int at, int64_t row, int channel, int64_t c, struct tile_in &v)
{
    float gain[8];
#pragma unroll
    for (int j = 0; j < CL_N; j++)
        unpack<bf16>(load_raw(st->x + (block * CL_N + j) * LINES + at), v.x[j]);
    unpack<bf16>(load_raw(st->f + block * LINES + at), v.f);
    unpack<bf16>(load_raw(st->dh + block * LINES + at), v.u);
    load_floats(s->gain + channel, gain);
#pragma unroll
    for (int e = 0; e < 8; e++)
        v.u[e] *= gain[e];
    v.bits = 0;
    if (DROP) {
        float sum[8] = {}, m = finish[FIN_M];
        v.bits = drop_bits(a, record, row, c, v.f, sum);
#pragma unroll
        for (int e = 0; e < 8; e++)
            v.u[e] = fmaf(-m, sum[e], v.u[e]);
    }
}

/* The gradient of stream i. */
template <bool DROP>
static __device__ __forceinline__ void stream_gradient(const struct cluster_bwd &a, const struct tile_in &v, const struct own_w &own, const uint32_t (&dp)[6], const float *finish, int i,
                                                       const uint4 &dy, float (&g)[8])
{
    float4 by = *(const float4 *)(finish + FIN_MIX + CL_N * i);
    float with_f = finish[FIN_F + i], with_u = finish[FIN_U + i], from[8];
    unpack<bf16>(dy, from);
#pragma unroll
    for (int t = 0; t < 4; t++) {
        float acc[4] = {from[2 * t], from[2 * t + 1], with_u * v.u[2 * t], with_u * v.u[2 * t + 1]}; /* with high halves of dp, with low ones */
        mma_bf16(acc, dp, own.of[i][t][0], own.of[i][t][1]);
        mma_bf16_k8(acc, dp[4], dp[5], own.of[i][t][2]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int e = 2 * t + h;
            float sum = fmaf(with_f, DROP ? v.f[e] * factor_of<DROP>(a, v.bits, i, e) : v.f[e], acc[h] + acc[2 + h]);
            g[e] = fmaf(by.w, v.x[3][e], fmaf(by.z, v.x[2][e], fmaf(by.y, v.x[1][e], fmaf(by.x, v.x[0][e], sum))));
        }
    }
}

/* dx and df, in place of x and f. */
template <bool DROP>
static __device__ __forceinline__ void leave_gradients(const struct cluster_bwd &a, struct bwd_stage *st, const struct tile_in &v, const float *record, int block, int at,
                                                       const float (&g)[CL_N][8])
{
    float df[8] = {}, dx[CL_N][8] = {}, post[CL_N];
    load_floats(record + REC_POST, post);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        float4 by = *(const float4 *)(record + REC_MIX + CL_N * i);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            df[e] = fmaf(post[i], DROP ? g[i][e] * factor_of<DROP>(a, v.bits, i, e) : g[i][e], df[e]);
            dx[0][e] = fmaf(by.x, g[i][e], dx[0][e]);
            dx[1][e] = fmaf(by.y, g[i][e], dx[1][e]);
            dx[2][e] = fmaf(by.z, g[i][e], dx[2][e]);
            dx[3][e] = fmaf(by.w, g[i][e], dx[3][e]);
        }
    }
    store_raw(st->f + block * LINES + at, repack<bf16>(df));
#pragma unroll
    for (int j = 0; j < CL_N; j++)
        store_raw(st->x + (block * CL_N + j) * LINES + at, repack<bf16>(dx[j]));
}

/* Sums of g_i x_j and g_i f over this warp's channels, [j][i] with f last. */
template <bool DROP>
static __device__ __forceinline__ void leave_sums(const struct cluster_bwd &a, const struct place &p, const struct tile_in &v, const float (&g)[CL_N][8], float *mixes)
{
    uint32_t r[CL_N][8];
#pragma unroll
    for (int i = 0; i < CL_N; i++)
#pragma unroll
        for (int e = 0; e < 8; e++)
            r[i][e] = tf32_of(g[i][e]);
#pragma unroll
    for (int j = 0; j <= CL_N; j++) {
        float low[4] = {}, high[4] = {};
        float2 of[2];
        if (!DROP || j < CL_N) {
            dot_tokens(low, r[0], r[1], j < CL_N ? v.x[j % CL_N] : v.f);
            dot_tokens(high, r[2], r[3], j < CL_N ? v.x[j % CL_N] : v.f);
            of[0] = diagonal(p, low);
            of[1] = diagonal(p, high);
        } else {
#pragma unroll
            for (int i = 0; i < CL_N; i++) { /* f is another one for each stream */
                float left[8], acc[4] = {};
#pragma unroll
                for (int e = 0; e < 8; e++)
                    left[e] = v.f[e] * factor_of<DROP>(a, v.bits, i, e);
                dot_tokens(acc, r[i], r[i], left);
                (i % 2 == 0 ? of[i / 2].x : of[i / 2].y) = diagonal(p, acc).x;
            }
        }
        if (on_diagonal(p))
            *(float4 *)(mixes + CL_N * j) = make_float4(of[0].x, of[0].y, of[1].x, of[1].y);
    }
}

template <bool DROP> static __device__ __forceinline__ void finish_tiles(const struct cluster_bwd &a, struct bwd_shared *s)
{
    struct walk w = walk_of(a);
    struct place p = place_of(0);
    struct own_w own;
    int block = p.warp / 2, half = p.warp % 2, at = in_tile(p.token, 2 * p.q + half), channel = channel_of(block, half, p.q);
    int64_t c = (int64_t)w.rank * CL_COLS + channel;
    load_w(a, w, p, own);
    for (int k = 0; k < w.count; k++) {
        struct bwd_stage *st = &s->stage[k % STAGES];
        const char *dy = s->dy[k % DY_STAGES];
        const float *record = s->record[k % STAGES][p.token], *finish = s->finish[k % SLOTS][p.token];
        struct tile_in v;
        float g[CL_N][8];
        barrier_wait_bounded(&s->full[k % STAGES], round_of(k, STAGES));
        barrier_wait_bounded(&s->ready[k % SLOTS], round_of(k, SLOTS));
        if (a.has_dy)
            barrier_wait_bounded(&s->brought[k % DY_STAGES], round_of(k, DY_STAGES));
        take_tile<DROP>(a, s, st, record, finish, block, at, (int64_t)tile_of(w, k) * TOKENS + p.token, channel, c, v);
        const uint2 *pairs = (const uint2 *)(record + REC_DP) + p.q;
        uint32_t dp[6] = {pairs[0].x, pairs[0].y, pairs[4].x, pairs[4].y, pairs[8].x, pairs[8].y};
#pragma unroll
        for (int i = 0; i < CL_N; i++)
            stream_gradient<DROP>(a, v, own, dp, finish, i, a.has_dy ? load_raw(dy + (block * CL_N + i) * LINES + at) : zero_raw(), g[i]);
        leave_gradients<DROP>(a, st, v, record, block, at, g);
        fence_async_proxy();
        __syncwarp();
        if (p.lane == 0)
            barrier_arrive(&s->done[k % STAGES]);
        if (k > 0)
            barrier_wait_bounded(&s->added, round_before(k, 1));
        leave_sums<DROP>(a, p, v, g, s->mixes[p.warp][p.token]);
        __syncwarp();
        if (p.lane == 0)
            barrier_arrive(&s->mixed);
    }
}

/* Sums for dcoef_in over the warps. */
static __device__ __forceinline__ void add_tiles(const struct cluster_bwd &a, struct bwd_shared *s)
{
    struct walk w = walk_of(a);
    int lane = (int)threadIdx.x % 32;
    for (int k = 0; k < w.count; k++) {
        barrier_wait_bounded(&s->mixed, round_of(k, 1));
        for (int item = lane; item < TOKENS * MIXES / 4; item += 32) {
            int token = item / (CL_N + 1), j = item % (CL_N + 1);
            int64_t row = (int64_t)tile_of(w, k) * TOKENS + token;
            float4 sum = *(const float4 *)&s->mixes[0][token][CL_N * j];
#pragma unroll
            for (int f = 1; f < FINISHERS; f++) {
                float4 add = *(const float4 *)&s->mixes[f][token][CL_N * j];
                sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
            }
            float *to = a.mixes + ((int64_t)w.rank * a.rows + row) * MIXES;
            if (row >= a.rows)
                continue;
            if (j == CL_N || a.profile_d) {
                *(float4 *)(to + (j == CL_N ? 0 : CL_N + CL_N * j)) = sum;
            } else {
                float of[CL_N] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
                for (int i = 0; i < CL_N; i++)
                    to[CL_N + CL_N * i + j] = of[i];
            }
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->added);
    }
}

static __device__ __forceinline__ void start(const struct cluster_bwd &a, struct bwd_shared *s)
{
    int rank = walk_of(a).rank;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s->full[i], 1);
            barrier_init(&s->done[i], FINISHERS);
        }
        for (int i = 0; i < DY_STAGES; i++)
            barrier_init(&s->brought[i], 1);
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(&s->dotted[i], DOTTERS);
            barrier_init(&s->taken[i], 1);
            barrier_init(&s->ready[i], 1);
        }
        barrier_init(&s->mixed, FINISHERS);
        barrier_init(&s->added, 1);
        exchange_init(s->received_here, s->credit, SLOTS, a.ranks, (uint32_t)(a.ranks * SENT));
    }
    for (int i = (int)threadIdx.x; i < CL_COLS; i += THREADS)
        s->gain[i] = a.gain == NULL ? 1.0f : a.gain[rank * CL_COLS + i] + a.one;
    __syncthreads();
    cluster_sync();
}

#endif /* HOPPER_CODE */

template <bool DROP>
static __global__ void __launch_bounds__(THREADS, 1)
    boundary_bwd_cluster(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap f, const __grid_constant__ CUtensorMap dh,
                         const __grid_constant__ CUtensorMap dx, const __grid_constant__ CUtensorMap df, const __grid_constant__ struct cluster_bwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct bwd_shared *s = (struct bwd_shared *)shared;
    int warp = (int)threadIdx.x / 32;
    start(a, s);
    if (warp < FINISHERS) {
        registers_up<FINISHER_REGISTERS>();
        finish_tiles<DROP>(a, s);
    } else if (warp < FINISHERS + DOTTERS) {
        registers_down<DOTTER_REGISTERS>();
        take_dots<DROP>(a, s);
    } else {
        registers_down<HELPER_REGISTERS>();
        struct bwd_maps m = {&x, &dy, &f, &dh, &dx, &df};
        if (warp == COPIER && threadIdx.x % 32 == 0)
            copy_tiles(a, s, m);
        if (warp == SENDER)
            send_tiles(a, s);
        if (warp == CLOSER)
            close_tiles<DROP>(a, s);
        if (warp == ADDER)
            add_tiles(a, s);
    }
    /* Others may still return credits to this block. */
    __syncwarp();
    cluster_sync();
#endif
}

/* ---- launches ------------------------------------------------------------------------------------------------------------ */

int mhc_boundary_bwd_cluster_blocks(struct lane *l, int64_t d, int64_t *blocks)
{
    int count = 0, ranks = (int)(d / CL_COLS);
    TRY(cluster_count(l, boundary_bwd_cluster<false>, ranks, THREADS, sizeof(struct bwd_shared), &count));
    *blocks = (int64_t)count * ranks;
    return ST_OK;
}

/* A function of shapes, because dgain is summed by clusters first. */
static int64_t cluster_grid(int64_t rows, int64_t d) { return min_i64(max_i64(CL_BLOCKS / (d / CL_COLS), 1), ceil_div(rows, TOKENS)); }

struct cluster_work {
    float *records, *mixes, *dgain;
};
static int64_t divide(const struct mhc_boundary_bwd_args *b, void *base, struct cluster_work *w)
{
    struct carve c = {(char *)base, 0};
    int64_t rows = b->dx.dim[0], d = b->dx.dim[1] / CL_N;
    w->records = carve_floats(&c, round_up(rows, TOKENS) * RECORD);
    w->mixes = carve_floats(&c, d / CL_COLS * rows * MIXES);
    w->dgain = carve_floats(&c, cluster_grid(rows, d) * d);
    return c.used;
}
int64_t mhc_boundary_bwd_cluster_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct cluster_work w;
    return divide(b, NULL, &w);
}

template <bool DROP> static int run_pass(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct cluster_bwd &a)
{
    CUtensorMap x, dy, f, dh, dx, df;
    int count = 0;
    TRY(cluster_count(l, boundary_bwd_cluster<DROP>, a.ranks, THREADS, sizeof(struct bwd_shared), &count));
    if (count == 0)
        return err_set(l->err, ST_UNSUPPORTED, "mhc boundary backward in a single pass: this GPU runs no cluster of %d blocks; try it without single_pass", a.ranks);
    TRY(tensor_map_parts(l, &x, b->x.data, a.rows, CL_N, a.d, b->x.stride[0], TOKENS));
    TRY(tensor_map_parts(l, &dx, b->dx.data, a.rows, CL_N, a.d, b->dx.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &f, b->f.data, a.rows, a.d, b->f.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &df, b->df.data, a.rows, a.d, b->df.stride[0], TOKENS));
    TRY(tensor_map_2d(l, &dh, b->dh.data, a.rows, a.d, b->dh.stride[0], TOKENS));
    dy = dx;
    if (a.has_dy)
        TRY(tensor_map_parts(l, &dy, b->dy.data, a.rows, CL_N, a.d, b->dy.stride[0], TOKENS));
    LAUNCH_CLUSTER(l, boundary_bwd_cluster<DROP>, (unsigned)(a.ranks * a.clusters), a.ranks, THREADS, sizeof(struct bwd_shared), x, dy, f, dh, dx, df, a);
    return ST_OK;
}

int mhc_boundary_bwd_cluster(struct lane *l, const struct mhc_boundary_bwd_args *b, void *base)
{
    struct cluster_work w;
    struct cluster_bwd a = {};
    divide(b, base, &w);
    TRY(mhc_cluster_records(l, b, w.records));
    a.records = w.records;
    a.w = (const float *)b->w.data;
    a.gain = (const float *)b->gain.data;
    a.dz = (float *)b->dz.data;
    a.dgain = present(&b->dgain) ? w.dgain : NULL;
    a.mixes = w.mixes;
    a.w_stride = b->w.stride[0];
    a.dz_stride = b->dz.stride[0];
    a.rows = b->dx.dim[0];
    a.d = b->dx.dim[1] / CL_N;
    a.tiles = (int)ceil_div(a.rows, TOKENS);
    a.ranks = (int)(a.d / CL_COLS);
    a.clusters = (int)cluster_grid(a.rows, a.d);
    a.one = b->zero_centered ? 1 : 0;
    a.per_channel = 1.0f / (float)a.d;
    a.profile_d = b->rule.profile == MHC_D;
    a.has_dy = present(&b->dy);
    a.drop = drop_rule_of(&b->drop);
    if (a.drop.info != NULL)
        TRY(run_pass<true>(l, b, a));
    else
        TRY(run_pass<false>(l, b, a));
    TRY(mhc_sum_mixes(l, w.mixes, a.ranks, a.rows, &b->dcoef_in));
    return a.dgain == NULL ? ST_OK : add_partials(l, a.dgain, a.clusters, a.d, (float *)b->dgain.data, a.d, 0, b->acc_dgain);
}
