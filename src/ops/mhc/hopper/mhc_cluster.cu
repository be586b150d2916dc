/* The boundary forward for 4 streams of bf16 on Hopper in one pass: x and f are read once, y and h written once, by
 * clusters of C / 256 blocks. A block owns 256 channels of all streams and keeps its part of w in registers. A cluster
 * owns tiles of 16 tokens and walks over them: tile = cluster + k clusters. h needs sums over all channels, so the
 * blocks exchange them through each other's shared memory, while the tile waits in a ring of stages and later tiles are
 * worked on. Every token of a tile belongs to one block, which gets its sums from all and gives its gates to all.
 *
 * In a block, all roles are warps that wait for each other at barriers in shared memory only:
 *   loader     brings x, f and coefficients of tile k + STAGES, those of the tile after it into the cache, and sends h
 *              of tile k to memory
 *   workers    8 warps, 32 channels each: y = combine, rounded, in the place of x; products with w, Gram matrix of the
 *              streams; a record of sums for each warp and token
 *   sender     adds the records of the warps, in order, and sends each token's to its block, first what h needs; a tile
 *              later, takes the other products
 *   opener     of the block's tokens: adds what came from all blocks, in order of rank; gates `pre` and 1 / rms of h to
 *              all blocks
 *   closer     of the block's tokens, a batch at a time: the other coefficients (Sinkhorn), and all small numbers to
 *              memory
 *   finishers  4 warps, 4 tokens each: h from y of the stage, in the place of f; one of them sends y to memory before
 *
 * A tile is in a stage for about 16,000 cycles, of which workers have 3,700; the rest is waiting for others. So what is
 * short in instructions counts too, if all wait for it: no divisions in the loops, what h needs is sent first, loads of
 * several numbers are asked for together.
 *
 * In two passes (OPEN false; for channels that need more blocks than a cluster has) the same pass has clusters of a
 * part of the channels. Instead of opener, closer and finishers a gatherer writes the cluster's sums to memory; a small
 * kernel makes all coefficients and 1 / rms of them, and aggregate_rows (mhc_mix.cu) makes h.
 *
 * One exchange is enough: with G the Gram matrix of a token's streams, as they are stored, the sum of squares that rho
 * needs is its trace, and that of h = sum_i pre_i y_i is pre^T G pre. In fp32 the latter loses digits where h is small
 * beside the streams, but always fewer than the rounding of y has cost before (both grow: 1e-7 k^2 against 1e-4 k,
 * where h is smaller by k; beyond k = 1000 h has no digits left anyway).
 *
 * Why nothing is overwritten and nothing waits forever. Every barrier below has one round a tile (or one a tile of its
 * stage, slot, buffer of records or batch), and whatever arrives in a round (of warps, all threads) has waited for the
 * one before:
 *   full     loader and its bytes -> workers              formed   8 workers, y is in the stage -> finishers
 *   gated    openers of all blocks -> finishers           finished 4 finishers, h is in the stage and y read out -> loader
 *   summed   8 workers, records are written -> sender     taken    sender -> workers, may write records of the next tile but one
 *   batched  opener and sender -> closer                  closed   closer, batch is in registers -> opener and sender
 *   received, kept, credit: mhc_cluster.cuh; opener and sender are the receivers, of what h needs and of the rest, in
 *   the same slots
 * No waiter can miss a round: the next but one of any barrier needs an arrival that its waiters make, or make possible,
 * after they have seen this one. The gates of a stage need no credit: those of tile k + STAGES are made from sums of
 * workers, of every block, that waited for the stage, so for finishers that are done with tile k. A tile depends on
 * earlier tiles only (on a free stage, on room at the receivers), and all blocks of a cluster have the same tiles: so
 * the oldest tile that is not done can always run. Only a batch waits for a later tile: its last products are taken
 * after the sums of the next tile are sent, which does not need that batch.
 *
 * With dropout and in two passes one register is spilled (4 bytes): 208 are all a worker can have. */
#include "ops/mhc/hopper/mhc_cluster_exchange.cuh"

#if HOPPER_CODE

/* ---- loader: one thread ---------------------------------------------------------------------- */

/* x and coefficients of a tile; f comes where h may have to be read out before. */
INLINE void load_x(const struct cluster_fwd &a, struct cluster_shared *s, int at, int tile, int slice,
                   const CUtensorMap *x)
{
    int row = tile * TOKENS;
    uint32_t coef = (uint32_t)min(a.rows - row, (int64_t)TOKENS) * (CL_LOGITS * 4);
    barrier_expect(&s->full[at], sizeof s->stage[at] + coef);
    tma_load_slice(s->stage[at].x, x, slice * LINES, row, &s->full[at]);
    bulk_load(s->coef[at], a.coef_in + (int64_t)row * CL_LOGITS, coef, &s->full[at]);
}
INLINE void load_f(struct cluster_shared *s, int at, int tile, int slice, const CUtensorMap *f)
{
    tma_load_slice(s->stage[at].f, f, slice * LINES, tile * TOKENS, &s->full[at]);
}

/* Tiles from `from` to before `to`, for which no stage must become free. */
INLINE void load_first(const struct cluster_fwd &a, struct cluster_shared *s, int from, int to, int slice,
                       const CUtensorMap *x, const CUtensorMap *f)
{
    for (int k = from, tile = first_tile(a) + from * a.lines; k < to && tile < a.tiles; k++, tile += a.lines) {
        load_x(a, s, k, tile, slice, x);
        load_f(s, k, tile, slice, f);
    }
}

/* What is read when the next stage is free comes to the cache already: so the load takes less of a stage's life. (Two
 * tiles ahead was slower, three much so.) In two passes a stage is free soon enough. */
template <bool OPEN>
INLINE void prefetch_tile(const struct cluster_fwd &a, int tile, int slice, const CUtensorMap *x, const CUtensorMap *f)
{
    if (OPEN && tile < a.tiles) {
        tma_prefetch_slice(x, slice * LINES, tile * TOKENS);
        tma_prefetch_slice(f, slice * LINES, tile * TOKENS);
    }
}

template <bool OPEN>
INLINE void load(const struct cluster_fwd &a, struct cluster_shared *s, int slice, const CUtensorMap *x,
                 const CUtensorMap *f, const CUtensorMap *to_h)
{
    int done = first_tile(a); /* the tile whose stage is loaded anew */
    prefetch_tile<OPEN>(a, done + STAGES * a.lines, slice, x, f);
    for (int k = STAGES; done < a.tiles; k++, done += a.lines) {
        int at = k % STAGES, tile = done + STAGES * a.lines;
        barrier_wait_bounded(&s->finished[at], round_before(k, STAGES));
        if (OPEN) { /* h has the place of f */
            tma_store_slice(to_h, slice * LINES, done * TOKENS, s->stage[at].f);
            bulk_commit();
        }
        if (tile < a.tiles) {
            load_x(a, s, at, tile, slice, x);
            if (OPEN)
                bulk_wait_read<0>();
            load_f(s, at, tile, slice, f);
        }
        prefetch_tile<OPEN>(a, tile + a.lines, slice, x, f);
    }
    bulk_wait<0>();
}

/* ---- workers --------------------------------------------------------------------------------- */

/* y of one token and 8 channels, as it is stored, also in registers: y[i] is stream i. x and f: the token's piece of
 * stream 0 and of f. */
template <bool DROP>
INLINE void form(const struct cluster_fwd &a, char *x, const char *f, const float *coef, int64_t row, int c,
                 uint32_t (&y)[CL_N][4])
{
    uint32_t add[4], kept = DROP ? kept_channels(a.drop, a.d, row, c) : 0;
    float post[CL_N], res[CL_N * CL_N], bias[8] = {};
    UNROLLED (i, CL_N)
        *(uint4 *)y[i] = load_raw(x + i * STREAM_BYTES);
    *(uint4 *)add = load_raw(f);
    load_floats(coef + CL_N, post);
    load_floats(coef + 2 * CL_N, res);
    if (a.bias != NULL)
        load_floats(a.bias + c, bias);
    UNROLLED (word, 4) {
        float in[CL_N][2], more[2];
        unpack2(add[word], more);
        if (a.bias != NULL) {
            more[0] += bias[2 * word];
            more[1] += bias[2 * word + 1];
        }
        UNROLLED (i, CL_N)
            unpack2(y[i][word], in[i]);
        UNROLLED (i, CL_N) {
            float v[2];
            UNROLLED (e, 2) {
                v[e] = __fmul_rn(a.rule.profile_d ? res[i] : res[i * CL_N], in[0][e]);
#pragma unroll
                for (int k = 1; k < CL_N; k++)
                    v[e] = fmaf(a.rule.profile_d ? res[k * CL_N + i] : res[i * CL_N + k], in[k][e], v[e]);
                float factor = DROP && (kept >> (8 * i + 2 * word + e) & 1) == 0 ? 0.0f : a.drop.kept;
                v[e] = add_dropped<DROP>(v[e], post[i], more[e], factor);
            }
            y[i][word] = pack2(v[0], v[1]);
        }
    }
    UNROLLED (i, CL_N)
        store_raw(x + i * STREAM_BYTES, *(const uint4 *)y[i]);
}

/* The rows of w as operands, split into high and low halves of bf16, 8 channels from c on of each stream: of the 48
 * rows of the products, 24 are with high halves and 24 with low ones; a thread has rows g + 8 j. Values (row, 2 q + e)
 * of step u are channel 4 u + e, those 8 further 4 u + 2 + e. */
INLINE void load_operands(const struct cluster_fwd &a, int g, int c, uint32_t (&w)[CL_N][2][3][4])
{
    UNROLLED (i, CL_N)
        UNROLLED (j, 3) {
            float v[8];
            load_floats(at<float>(a.w, g + 8 * j) + i * a.d + c, v);
            UNROLLED (k, 4) { /* channels 2 k and 2 k + 1 */
                float high[2] = {rounded<bf16>(v[2 * k]), rounded<bf16>(v[2 * k + 1])};
                int low = j + 3;
                w[i][k / 2][j / 2][k % 2 * 2 + j % 2] = pack2(high[0], high[1]);
                w[i][k / 2][low / 2][k % 2 * 2 + low % 2] = pack2(v[2 * k] - high[0], v[2 * k + 1] - high[1]);
            }
        }
}

/* Where product k stands in a record. */
INLINE int place_of(int k) { return k < CL_N ? k : k + SENT - CL_N; }

/* Gram matrices of 8 tokens over the warp's channels, as products of all tokens with all, of which only the diagonal is
 * wanted: rows g and g + 8 of product m are the first two streams of token g, its columns the third stream of all
 * tokens. */
INLINE void multiply_streams(const uint32_t (&y)[CL_N][4], float (&gram)[PAIRS / 2][4])
{
    constexpr int pair[PAIRS / 2][3] = {{0, 1, 0}, {2, 3, 0}, {1, 2, 1}, {2, 3, 2}, {1, 3, 3}};
    UNROLLED (u, 2)
        UNROLLED (m, PAIRS / 2) {
            const uint32_t *first = y[pair[m][0]] + 2 * u, *second = y[pair[m][1]] + 2 * u, *by = y[pair[m][2]] + 2 * u,
                           rows[4] = {first[0], second[0], first[1], second[1]};
            mma_bf16(gram[m], rows, by[0], by[1]);
        }
}

INLINE void multiply(const uint32_t (&w)[CL_N][2][3][4], const uint32_t (&y)[CL_N][4], float (&product)[3][4],
                     float (&gram)[PAIRS / 2][4])
{
    UNROLLED (i, CL_N)
        UNROLLED (u, 2)
            UNROLLED (t, 3)
                mma_bf16(product[t], w[i][u][t], y[i][2 * u], y[i][2 * u + 1]);
    multiply_streams(y, gram);
}

/* Sums of 8 tokens into the warp's records. */
INLINE void write_records(float (*record)[RECORD], const float (&product)[3][4], const float (&gram)[PAIRS / 2][4],
                          int g, int q)
{
    /* Rows of the products: 24 with high halves of w, then 24 with low ones. */
    UNROLLED (e, 2) {
        float *to = record[2 * q + e];
        to[place_of(g)] = product[0][e] + product[1][2 + e];
        to[place_of(g + 8)] = product[0][2 + e] + product[2][e];
        to[place_of(g + 16)] = product[1][e] + product[2][2 + e];
    }
    if (q != g / 2)
        return;
    float first[PAIRS / 2], second[PAIRS / 2];
    UNROLLED (m, PAIRS / 2) {
        first[m] = g % 2 == 0 ? gram[m][0] : gram[m][1];
        second[m] = g % 2 == 0 ? gram[m][2] : gram[m][3];
    }
    float4 *to = (float4 *)record[g];
    to[1] = make_float4(first[0], first[2], first[3], second[4]);   /* 00, 11, 22, 33 */
    to[2] = make_float4(second[0], first[1], second[1], second[2]); /* 01, 02, 03, 12 */
    to[3] = make_float4(first[4], second[3], 0, 0);                 /* 13, 23 */
}

template <bool DROP> INLINE void work(const struct cluster_fwd &a, struct cluster_shared *s, int rank)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    /* 8 lanes read 2 tokens, which are in different halves of the banks */
    int piece = in_stream(g, warp / 2, warp % 2 * 4 + q);
    int c = rank * CL_COLS + warp * 32 + q * 8;
    uint32_t w[CL_N][2][3][4];
    load_operands(a, g, c, w);
    cluster_sync(); /* barriers are ready */
    for (int k = 0, tile; (tile = s->first_tile + k * a.lines) < a.tiles; k++) {
        int at = k % STAGES;
        struct stage *st = &s->stage[at];
        char *x = st->x + piece, *f = st->f + piece;
        float(*record)[RECORD] = s->record[k % 2][warp];
        barrier_wait_bounded(&s->full[at], round_of(k, STAGES));
        if (k >= 2)
            barrier_wait_bounded(&s->taken[k % 2], round_before(k, 2));
        uint32_t y[2][CL_N][4];
        float gram[2][PAIRS / 2][4] = {}, product[2][3][4] = {};
        form<DROP>(a, x, f, s->coef[at][g], (int64_t)tile * TOKENS + g, c, y[0]);
        multiply(w, y[0], product[0], gram[0]);
        form<DROP>(a, x + 8 * TOKEN_BYTES, f + 8 * TOKEN_BYTES, s->coef[at][8 + g], (int64_t)tile * TOKENS + 8 + g, c,
                   y[1]);
        fence_async_proxy();
        barrier_arrive(&s->formed[at]);
        write_records(record, product[0], gram[0], g, q);
        multiply(w, y[1], product[1], gram[1]);
        write_records(record + 8, product[1], gram[1], g, q);
        barrier_arrive(&s->summed[k % 2]);
    }
}

/* ---- finishers ------------------------------------------------------------------------------- */

INLINE void load_streams(const char *at, uint4 (&raw)[CL_N])
{
    UNROLLED (j, CL_N)
        raw[j] = load_raw(at + j * STREAM_BYTES);
}
/* h of a token and 8 channels, from its streams. The same numbers as aggregate_rows (mhc_mix.cu) makes of given
 * coefficients and 1 / rms, to the bit. */
INLINE void finish_token(char *to, const float *gate, const uint4 (&raw)[CL_N], const float (&gain)[8])
{
    float pre[CL_N], v[8] = {}, rstd = gate[CL_N];
    load_floats(gate, pre);
    UNROLLED (j, CL_N) {
        float in[8];
        unpack<bf16>(raw[j], in);
        UNROLLED (e, 8)
            v[e] = fmaf(pre[j], in[e], v[e]);
    }
    UNROLLED (e, 8)
        v[e] = __fmul_rn(v[e], __fmul_rn(rstd, gain[e]));
    store_raw(to, repack<bf16>(v));
}
INLINE char *token_at(struct stage *st, const int (&where)[2], int t)
{
    return st->x + where[t % 2] + t / 2 * (2 * TOKEN_BYTES);
}

/* One of them also sends y to memory; without OPEN that is all. */
template <bool OPEN>
INLINE void finish(const struct cluster_fwd &a, struct cluster_shared *s, int finisher, int slice,
                   const CUtensorMap *to_y)
{
    bool sends = threadIdx.x == 32 * WORKERS;
    float gain[8];
    int lane = (int)threadIdx.x % 32, first = finisher * FINISHER_TOKENS;
    /* the lane's piece of the first even token and the first odd one */
    const int where[2] = {in_stream(first, lane / 8, lane % 8), in_stream(first + 1, lane / 8, lane % 8)};
    if (OPEN)
        load_gain(a.norm, slice * CL_COLS + lane * 8, gain);
    for (int k = 0, tile; (tile = s->first_tile + k * a.lines) < a.tiles; k++) {
        int at = k % STAGES;
        barrier_wait_bounded(&s->formed[at], round_of(k, STAGES));
        if (sends) {
            tma_store_slice(to_y, slice * LINES, tile * TOKENS, s->stage[at].x);
            bulk_commit();
        }
        __syncwarp();
        if (OPEN) {
            struct stage *st = &s->stage[at];
            const float(*gate)[GATE_BYTES / 4] = s->gate[at] + first;
            uint4 raw[2][CL_N]; /* a token ahead */
            load_streams(token_at(st, where, 0), raw[0]);
            barrier_wait_bounded(&s->gated[at], round_of(k, STAGES));
            if (sends)
                barrier_expect(&s->gated[at], TOKENS * GATE_BYTES); /* of tile k + STAGES */
            __syncwarp();
            UNROLLED (t, FINISHER_TOKENS) {
                if (t + 1 < FINISHER_TOKENS)
                    load_streams(token_at(st, where, t + 1), raw[(t + 1) % 2]);
                finish_token(token_at(st, where, t) + CL_N * STREAM_BYTES, gate[t], raw[t % 2], gain); /* f follows x */
            }
            fence_async_proxy();
        }
        if (sends)
            bulk_wait_read<0>();
        barrier_arrive(&s->finished[at]);
    }
    if (sends)
        bulk_wait<0>();
}

template <bool OPEN> INLINE void init_barriers(const struct cluster_fwd &a, struct cluster_shared *s)
{
    for (int i = 0; i < STAGES; i++) {
        barrier_init(&s->full[i], 1);
        barrier_init(&s->formed[i], WORKERS * 32);
        barrier_init(&s->gated[i], 1);
        barrier_init(&s->finished[i], (OPEN ? FINISHERS : 1) * 32);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(&s->summed[i], WORKERS * 32);
        barrier_init(&s->taken[i], 32);
    }
    barrier_init(&s->batched, 2 * 32);
    barrier_init(&s->closed, 32);
    uint32_t records = records_of(a, (int)blockIdx.x % a.ranks);
    for (int i = 0; i < SLOTS; i++)
        barrier_init(&s->kept[i], 1);
    exchange_init(s->received, s->credit, SLOTS, OPEN ? 2 * a.ranks : a.ranks, records * (SENT * 4));
    for (int i = 0; i < STAGES; i++)
        barrier_expect(&s->gated[i], TOKENS * GATE_BYTES);
    for (int i = 0; i < SLOTS; i++)
        barrier_expect(&s->kept[i], records * (KEPT * 4));
}

#endif /* HOPPER_CODE */

template <bool DROP, bool OPEN>
static __global__ void __launch_bounds__(THREADS, 1)
    boundary_cluster(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap f,
                     const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap h,
                     const __grid_constant__ struct cluster_fwd a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct cluster_shared *s = (struct cluster_shared *)shared;
    int rank = (int)blockIdx.x % a.ranks, slice = (int)blockIdx.x % (a.ranks * a.parts), warp = (int)threadIdx.x / 32;
    bool loader = threadIdx.x == 32 * (WORKERS + FINISHERS + 2);
    if (loader) {
        s->first_tile = first_tile(a);
        init_barriers<OPEN>(a, s);
        load_first(a, s, 0, 1, slice, &x, &f);
    }
    __syncwarp(); /* every role waits for the barriers of the whole cluster, at its cluster_sync */
    if (warp < WORKERS) {
        registers_up<WORKER_REGISTERS>();
        work<DROP>(a, s, slice);
    } else if (warp < WORKERS + FINISHERS) {
        registers_down<FINISHER_REGISTERS>();
        cluster_sync();
        if (OPEN || warp == WORKERS)
            finish<OPEN>(a, s, warp - WORKERS, slice, &y);
    } else {
        registers_down<HELPER_REGISTERS>();
        cluster_sync();
        if (warp == WORKERS + FINISHERS)
            send<OPEN>(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 1 && OPEN)
            open_tiles(a, s, rank);
        else if (warp == WORKERS + FINISHERS + 1)
            gather(a, s, rank);
        else if (loader) {
            /* after w has been asked for, which would stand in line behind them */
            load_first(a, s, 1, STAGES, slice, &x, &f);
            load<OPEN>(a, s, slice, &x, &f, &h);
        } else if (warp == WORKERS + FINISHERS + 3 && OPEN)
            close_tiles(a, s, rank);
    }
    __syncwarp();
    cluster_sync(); /* no block leaves while others send to it */
#endif
}

/* After the pass, four lanes to a row: sums over the clusters, in order, and all that openers and closers make of them.
 * A lane has four of the sums that h needs, a row of the logits, and with the others the products for post. */
enum { QUAD_THREADS = 128 };
INLINE float pick(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
INLINE float4 quad_four(float4 v, int from)
{
    return make_float4(__shfl_sync(~0u, v.x, from, 4), __shfl_sync(~0u, v.y, from, 4), __shfl_sync(~0u, v.z, from, 4),
                       __shfl_sync(~0u, v.w, from, 4));
}
/* A lane's row of the Sinkhorn's result in place of its logits. */
INLINE void quad_sinkhorn(const struct cluster_fwd &a, float (&m)[CL_N], int lane)
{
    quad_start(m, a.rule.profile_d);
    for (int t = 0; t < a.rule.iterations; t++)
        quad_divide(m, lane, a.rule.profile_d, a.rule.profile_d && t == 0);
    UNROLLED (e, CL_N)
        m[e] = maybe_bf16(a.rule.round_bf16, m[e]);
}
static __global__ void __launch_bounds__(QUAD_THREADS) ring_coefficients(const __grid_constant__ struct cluster_fwd a)
{
    /* all lanes stay for the shuffles */
    int64_t asked = (int64_t)blockIdx.x * (QUAD_THREADS / 4) + threadIdx.x / 4, row = min(asked, a.rows - 1);
    int lane = (int)threadIdx.x % 4;
    float4 opens = make_float4(0, 0, 0, 0), post = opens, res = opens;
    const float4 *from = a.kept + row / TOKENS * a.parts * (FOURS * TOKENS) + row % TOKENS;
#pragma unroll 4
    for (int r = 0; r < a.parts; r++, from += FOURS * TOKENS) {
        opens = add4(opens, from[lane * TOKENS]);
        post = add4(post, from[SENT / 4 * TOKENS]);
        res = add4(res, from[(SENT / 4 + 1 + lane) * TOKENS]);
    }
    float4 p = quad_four(opens, 0), diagonal = quad_four(opens, 1), rest = quad_four(opens, 2),
           last = quad_four(opens, 3);
    float rho = rho_of(a, diagonal), gate = gate_of(a, *a.by.alpha[0], a.by.beta[lane], pick(p, lane), rho);
    float4 pre = make_float4(__shfl_sync(~0u, gate, 0, 4), __shfl_sync(~0u, gate, 1, 4), __shfl_sync(~0u, gate, 2, 4),
                             __shfl_sync(~0u, gate, 3, 4));
    float q = 1.0f / (rho + (float)MHC_EPS), by = q * *a.by.alpha[2];
    float m[CL_N] = {res.x, res.y, res.z, res.w};
    UNROLLED (e, CL_N)
        m[e] = by * m[e] + a.by.beta[(2 + lane) * CL_N + e];
    quad_sinkhorn(a, m, lane);
    if (asked >= a.rows)
        return;
    if (lane == 0)
        write_opened(a, row, p, pre, rho, rstd_of(a, diagonal_part(pre, diagonal) + other_part(pre, rest, last)));
    float *stat = at<float>(a.stat, row), *coef = at<float>(a.coef, row), product = pick(post, lane);
    stat[CL_N + lane] = product;
    coef[CL_N + lane] =
        maybe_bf16(a.rule.round_bf16, 2 * precise_sigmoid(q * *a.by.alpha[1] * product + a.by.beta[CL_N + lane]));
    float *logits = stat + 2 * CL_N + CL_N * lane;
    logits[0] = res.x;
    logits[1] = res.y;
    logits[2] = res.z;
    logits[3] = res.w;
    store_floats(coef + 2 * CL_N + CL_N * lane, m);
}

/* ---- launch ---------------------------------------------------------------------------------- */

/* Blocks of a cluster: all of a line; or a few of them, so that clusters fill the device (7 were slower than 4 on an
 * H200). */
static int ranks_of(int64_t d, bool open)
{
    int blocks = (int)(d / CL_COLS), ranks = open ? blocks : 4;
    while (blocks % ranks != 0)
        ranks--;
    return ranks;
}
/* Blocks are sent to in clusters of two and more only: where one has all the channels, two that have nothing to do with
 * each other are launched as one cluster. */
static int launched_together(int ranks) { return ranks == 1 ? 2 : ranks; }
/* What the clusters of a line leave in memory. */
int64_t mhc_boundary_cluster_bytes(int64_t rows, int64_t d)
{
    return round_up(rows, TOKENS) * (d / CL_COLS / ranks_of(d, false)) * FOURS * 16;
}

/* Prepares the kernel with dropout, or the one without, for its launch; once for a GPU. */
template <bool OPEN> static int clusters_of(struct lane *l, int64_t d, bool drops, int *count)
{
    int ranks = ranks_of(d, OPEN), blocks = launched_together(ranks);
    struct cuda_memo *memo = cuda_of(l)->memo;
    int *known = memo != NULL && blocks >= 1 && blocks <= CLUSTER_MOST ? &memo->clusters[OPEN][drops][blocks] : NULL;
    if (known != NULL && *known > 0)
        *count = *known - 1;
    else if (drops)
        TRY(cluster_count(l, boundary_cluster<true, OPEN>, blocks, THREADS, sizeof(struct cluster_shared), count));
    else
        TRY(cluster_count(l, boundary_cluster<false, OPEN>, blocks, THREADS, sizeof(struct cluster_shared), count));
    if (known != NULL)
        *known = *count + 1;
    *count *= blocks / ranks;
    return ST_OK;
}
extern "C" int mhc_boundary_clusters_cuda(struct lane *l, int64_t d, int64_t *blocks)
{
    int count;
    TRY(clusters_of<true>(l, d, false, &count));
    *blocks = count * (d / CL_COLS);
    return ST_OK;
}

/* at_once: clusters that the device runs. */
static struct cluster_fwd args_of(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work, bool open,
                                  int at_once)
{
    struct cluster_fwd a = {.coef_in = floats(&b->coef_in),
                            .bias = floats(&b->bias),
                            .w = view_of(&b->w),
                            .stat = view_of(&b->stat),
                            .coef = view_of(&b->coef),
                            .by = gate_params_of(b),
                            .norm = norm_of(b),
                            .kept = (float4 *)work,
                            .rows = b->x.dim[0],
                            .d = b->x.dim[1] / CL_N,
                            .eps = (float)b->eps,
                            .gate_eps = b->rule.profile == MHC_D ? (float)MHC_EPS : 0.0f,
                            .rule = rule_of(b->rule),
                            .drop = drop_rule_of(&b->drop)};
    a.tiles = (int)ceil_div(a.rows, TOKENS);
    a.ranks = ranks_of(a.d, open);
    a.parts = (int)(a.d / CL_COLS) / a.ranks;
    a.lines = (int)min_i64(max_i64(min_i64(at_once, cuda_of(l)->sm_budget / a.ranks) / a.parts, 1), a.tiles);
    a.lines += a.ranks * a.parts * a.lines % launched_together(a.ranks) != 0; /* the last one may have no tile */
    a.per = (TOKENS + a.ranks - 1) / a.ranks;
    a.slot_bytes = a.ranks * a.per * RECORD * 4;
    a.batch = 32 / a.per;
    a.by_width = 1.0f / (float)(CL_N * a.d);
    a.by_channels = 1.0f / (float)a.d;
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

template <bool OPEN>
static int launch(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work, bool leaves, struct cluster_fwd *a)
{
    struct maps m;
    int at_once;
    TRY(clusters_of<OPEN>(l, b->x.dim[1] / CL_N, b->drop.p > 0, &at_once));
    TRY(make_maps(l, b, &m));
    *a = args_of(l, b, work, OPEN, at_once);
    a->below = (float)b->rule.root_eps;
    a->less = (float)mhc_root_less(b->rule.root_eps);
    if (leaves) {
        a->below = a->gate_eps = a->eps;
        a->less = (float)MHC_EPS;
    }
    unsigned grid = (unsigned)(a->ranks * a->parts * a->lines), together = (unsigned)launched_together(a->ranks);
    if (a->drop.info != NULL)
        LAUNCH_CLUSTER(l, (boundary_cluster<true, OPEN>), grid, together, THREADS, sizeof(struct cluster_shared), m.x,
                       m.f, m.y, m.h, *a);
    else
        LAUNCH_CLUSTER(l, (boundary_cluster<false, OPEN>), grid, together, THREADS, sizeof(struct cluster_shared), m.x,
                       m.f, m.y, m.h, *a);
    return ST_OK;
}

int mhc_boundary_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct cluster_fwd a;
    return launch<true>(l, b, work, false, &a);
}

int mhc_final_cluster(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct cluster_fwd a;
    return launch<true>(l, b, work, true, &a);
}

int mhc_boundary_ring(struct lane *l, const struct mhc_boundary_fwd_args *b, void *work)
{
    struct cluster_fwd a;
    TRY(launch<false>(l, b, work, false, &a));
    LAUNCH(l, ring_coefficients, (unsigned)ceil_div(a.rows, QUAD_THREADS / 4), QUAD_THREADS, 0, a);
    return ST_OK;
}
