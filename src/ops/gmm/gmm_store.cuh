/* Inside of gmm_tma.cu: what is done with a tile of sums. Pieces of 16 rows x 64 columns, by one warp; results leave through two
 * boxes of the group, or row by row where a tile is not whole. Activations and pieces are shared with gmm_ring.cuh. */
#ifndef BRAID_OPS_GMM_STORE_CUH
#define BRAID_OPS_GMM_STORE_CUH

#include "ops/gmm/gmm_feed.cuh"

#if HOPPER_CODE


/* A warp's words of a piece, as the accumulators' lanes hold them, to shared memory and from it: word[i][h] has two columns of
 * block i of eight, in row lane / 4 + 8 h. Rows have 128 bytes, their chunks of 16 permuted as bulk copies want it. */
__device__ __forceinline__ uint32_t words_at(const char *piece, int i)
{
    int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    return smem_address(piece) + (row + matrix % 2 * 8) * 128 + (((i + matrix / 2) ^ row) << 4);
}
/* N of the eight blocks, from block `first` on. */
template <int N> __device__ __forceinline__ void words_put(char *piece, const uint32_t (&word)[N][2], int first = 0)
{
#pragma unroll
    for (int i = 0; i < N; i += 2)
        store_matrices(words_at(piece, first + i), word[i][0], word[i][1], word[i + 1][0], word[i + 1][1]);
}
template <int N> __device__ __forceinline__ void words_get(uint32_t (&word)[N][2], const char *piece, int first = 0)
{
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        uint32_t r[4];
        load_matrices(r, words_at(piece, first + i));
        word[i][0] = r[0];
        word[i][1] = r[1];
        word[i + 1][0] = r[2];
        word[i + 1][1] = r[3];
    }
}
/* Rows of 128 bytes to or from memory: 16 bytes a lane. */
__device__ __forceinline__ void piece_store(const char *piece, bf16 *to, int64_t ld, int rows, int cols)
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        uint4 v = *(const uint4 *)(piece + r * 128 + ((chunk ^ (r % 8)) << 4));
        if (r < rows && chunk * 8 < cols)
            *(uint4 *)(to + r * ld + chunk * 8) = v;
    }
}
__device__ __forceinline__ void piece_fetch(uint4 (&v)[4], const bf16 *from, int64_t ld, int rows, int cols)
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        v[i] = make_uint4(0, 0, 0, 0);
        if (r < rows && chunk * 8 < cols)
            v[i] = load_passing(from + r * ld + chunk * 8);
    }
}
__device__ __forceinline__ void piece_fill(char *piece, const uint4 (&v)[4])
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        *(uint4 *)(piece + r * 128 + ((chunk ^ (r % 8)) << 4)) = v[i];
    }
}

/* Row of the tile where the group's rows begin, and this warp's. */
template <typename F> __device__ __forceinline__ int group_row(int group) { return F::OWN ? 0 : group * BOX; }
template <typename F> __device__ __forceinline__ int warp_row(int group) { return group_row<F>(group) + threadIdx.x % GROUP / 32 * 16; }

/* sums += prob * bias (prob may be NULL). halves: matrices of `across` columns in the tile. */
template <typename F>
__device__ __forceinline__ void add_bias(float (&c)[F::BN / 2], const float *bias, const float *prob, const struct gmm_at &at, int halves, int across,
                                         int group)
{
    int lane = threadIdx.x % 32, row = warp_row<F>(group) + lane / 4, half = F::BN / halves;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        factor[h] = prob != NULL && row + 8 * h < at.m_valid ? prob[at.m + row + 8 * h] : 1.0f;
#pragma unroll
    for (int i = 0; i < F::BN / 8; i++) {
        int n = at.n + i * 8 % half + 2 * (lane % 4);
        if (n < across) {
            const float *b = bias + ((int64_t)at.expert * halves + i * 8 / half) * across + n;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                c[4 * i + 2 * h] += factor[h] * b[0];
                c[4 * i + 2 * h + 1] += factor[h] * b[1];
            }
        }
    }
}

/* Where pieces go on their way to memory: this group's two boxes, in turn. */
struct way_out {
    char *boxes; /* of the group; a warp's piece is a quarter of a box */
    int group, next;
    bool whole; /* all rows of the group's tile exist: whole boxes go by bulk copy. Else warps store the rows there are. */
};
__device__ __forceinline__ struct way_out way_out(char *boxes, int group, bool whole)
{
    struct way_out w = {boxes, group, 0, whole};
    if (!whole) { /* bulk copies of the tile before may still read the boxes */
        if (threadIdx.x % GROUP == 0)
            bulk_wait_read<0>();
        group_sync(group);
    }
    return w;
}
/* to: where the box begins in memory (row `row` and column `col` of the matrix of the map). */
__device__ __forceinline__ void piece_out(struct way_out &w, const uint32_t (&word)[8][2], const CUtensorMap *map, int row, int col, bf16 *to, int64_t ld,
                                          int rows, int cols)
{
    int t = threadIdx.x % GROUP, warp = t / 32;
    char *box = w.boxes + w.next * BOX_BYTES, *piece = box + warp * PIECE;
    w.next ^= 1;
    if (w.whole) {
        if (t == 0)
            bulk_wait_read<1>();
        group_sync(w.group);
        words_put(piece, word);
        fence_async_proxy();
        group_sync(w.group);
        if (t == 0)
            box_store<false>(box, map, col, row, 0);
        return;
    }
    __syncwarp();
    words_put(piece, word);
    __syncwarp();
    piece_store(piece, to + warp * 16 * ld, ld, rows - warp * 16, cols);
}

template <typename F>
__device__ __forceinline__ void store_rows(const CUtensorMap *mc, const struct gmm_job &g, const struct gmm_at &at, float (&c)[F::BN / 2], int group,
                                           char *boxes)
{
    if (g.bias != NULL && at.expert < g.experts)
        add_bias<F>(c, g.bias, g.prob, at, 1, g.across, group);
    int first = group_row<F>(group), row = at.m + first;
    struct way_out w = way_out(boxes, group, at.m_valid >= first + BOX);
#pragma unroll
    for (int p = 0; p < F::BN / 64; p++) {
        int n = at.n + p * 64;
        uint32_t word[8][2];
#pragma unroll
        for (int i = 0; i < 16; i++)
            word[i / 2][i % 2] = pack2(c[32 * p + 2 * i], c[32 * p + 2 * i + 1]);
        piece_out(w, word, mc, row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, at.m_valid - first, g.across - n);
    }
}

/* 1 / (1 + 2^x) without the care for tiny numbers that costs a third of the instructions: 0 and 1 at the ends. */
__device__ __forceinline__ float sigmoid_of_log2(float minus_x)
{
    return reciprocal_fast(1.0f + exp2_fast(minus_x));
}

/* The activation and its slopes; `up` of a plain one is not read. */
template <int KIND> __device__ __forceinline__ float activate(const struct gmm_tma_job &j, float gate, float up, float *d_gate, float *d_up)
{
    constexpr bool LIMITS = KIND != GMM_GATE;
    float x = LIMITS && gate > j.limit ? j.limit : gate;
    if (KIND == GMM_RELU2) {
        float v = x > 0 ? x : (x <= 0 ? 0.0f : x); /* NaN stays NaN */
        *d_gate = gate > j.limit ? 0.0f : 2 * v;
        *d_up = 0;
        return v * v;
    }
    float s = sigmoid_of_log2(-1.44269504f * j.alpha * x), value = x * s, slope = s + value * (j.alpha - j.alpha * s);
    float factor = LIMITS ? (up > j.limit ? j.limit : up < -j.limit ? -j.limit : up) + j.offset : up;
    *d_gate = LIMITS && gate > j.limit ? 0.0f : slope * factor;
    *d_up = LIMITS && fabsf(up) > j.limit ? 0.0f : value;
    return value * factor;
}

/* Probabilities of this lane's two rows; 0 for rows of no expert. */
template <typename F> __device__ __forceinline__ void row_probs(float (&prob)[2], const struct gmm_job &g, const struct gmm_at &at, int group)
{
    int r = warp_row<F>(group) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
        prob[h] = at.expert == g.experts ? 0.0f : g.prob != NULL && r + 8 * h < at.m_valid ? g.prob[at.m + r + 8 * h] : 1.0f;
}

template <int KIND, typename F>
__device__ __forceinline__ void store_act(const struct gmm_maps &m, const struct gmm_tma_job &j, const struct gmm_at &at, float (&c)[F::BN / 2],
                                          const float (&prob)[2], int group, char *boxes)
{
    constexpr int UP = F::GATED ? F::BN / 4 : 0; /* accumulators from gate to up */
    const struct gmm_job &g = j.g;
    if (g.bias != NULL && at.expert < g.experts)
        add_bias<F>(c, g.bias, NULL, at, F::GATED ? 2 : 1, g.across, group);
    /* A box of gates that reaches past their last column would write over ups. */
    bool columns = !F::GATED || g.across - at.n >= F::NT;
    int first = group_row<F>(group), row = at.m + first, rows = at.m_valid - first;
    struct way_out w = way_out(boxes, group, columns && rows >= BOX);
#pragma unroll
    for (int p = 0; p < F::NT / 64; p++) {
        int n = at.n + p * 64, cols = g.across - n;
        bf16 *pre = j.pre + (int64_t)row * j.ldpre + n;
        uint32_t word[8][2];
#pragma unroll
        for (int i = 0; i < 16; i++)
            word[i / 2][i % 2] = pack2(c[32 * p + 2 * i], c[32 * p + 2 * i + 1]);
        piece_out(w, word, &m.pre, row, n, pre, j.ldpre, rows, cols);
        if (F::GATED) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                word[i / 2][i % 2] = pack2(c[UP + 32 * p + 2 * i], c[UP + 32 * p + 2 * i + 1]);
            piece_out(w, word, &m.pre, row, n + g.across, pre + g.across, j.ldpre, rows, cols);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float v[2], unused[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                v[e] = prob[i % 2] * activate<KIND>(j, c[32 * p + 2 * i + e], c[UP + 32 * p + 2 * i + e], &unused[0], &unused[1]);
            word[i / 2][i % 2] = pack2(v[0], v[1]);
        }
        piece_out(w, word, &m.c, row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, cols);
    }
}

/* What DACT reads of a piece, asked for before it is needed. */
struct saved {
    uint4 gate[4], up[4];
};
template <typename F>
__device__ __forceinline__ void saved_fetch(struct saved *s, const struct gmm_tma_job &j, const struct gmm_at &at, int piece, int group)
{
    int r0 = warp_row<F>(group), n0 = at.n + piece * 64;
    asm volatile("" : "+r"(n0));
    const bf16 *pre = j.pre + (int64_t)(at.m + r0) * j.ldpre + n0;
    int rows = at.expert < j.g.experts ? at.m_valid - r0 : 0;
    piece_fetch(s->gate, pre, j.ldpre, rows, j.g.across - n0);
    if (F::GATED)
        piece_fetch(s->up, pre + j.g.across, j.ldpre, rows, j.g.across - n0);
}

/* N blocks of a piece: (gate, up) become their gradients, act the activation times the probability. */
template <int KIND, int N>
__device__ __forceinline__ void dact_words(const struct gmm_tma_job &j, const float *c, const float (&prob)[2], uint32_t (&gates)[N][2],
                                           uint32_t (&ups)[N][2], uint32_t (*act)[2], float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float gate[2], up[2], v[2];
            unpack2(gates[i][h], gate);
            unpack2(ups[i][h], up);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float d_gate, d_up, own = c[4 * i + 2 * h + e], a = activate<KIND>(j, gate[e], up[e], &d_gate, &d_up);
                sum[h] += own * a;
                v[e] = prob[h] * a;
                own *= prob[h];
                gate[e] = own * d_gate;
                up[e] = own * d_up;
            }
            gates[i][h] = pack2(gate[0], gate[1]);
            ups[i][h] = pack2(up[0], up[1]);
            act[i][h] = pack2(v[0], v[1]);
        }
}

template <int KIND, typename F>
__device__ __forceinline__ void store_dact(const struct gmm_tma_job &j, const struct gmm_at &at, const float (&c)[F::BN / 2], const float (&prob)[2],
                                           struct saved *s, int group, char *boxes)
{
    constexpr int PIECES = F::NT / 64;
    const struct gmm_job &g = j.g;
    int lane = threadIdx.x % 32, r0 = warp_row<F>(group), rows = at.m_valid - r0;
    char *gates = boxes + threadIdx.x % GROUP / 32 * PIECE, *ups = gates + BOX_BYTES;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int n0 = at.n + p * 64;
        asm volatile("" : "+r"(n0)); /* addresses of one piece at a time, or they would fill the registers */
        int cols = g.across - n0;
        uint32_t act[8][2];
        __syncwarp();
        piece_fill(gates, s->gate);
        if (F::GATED)
            piece_fill(ups, s->up);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; i += 2) { /* in parts, or they would not fit beside the sums */
            uint32_t gate[2][2], up[2][2];
            words_get(gate, gates, i);
            if (F::GATED)
                words_get(up, ups, i);
            dact_words<KIND>(j, &c[32 * p + 4 * i], prob, gate, up, &act[i], sum);
            __syncwarp();
            words_put(gates, gate, i);
            if (F::GATED)
                words_put(ups, up, i);
        }
        __syncwarp();
        if (p + 1 < PIECES)
            saved_fetch<F>(s, j, at, p + 1, group);
        bf16 *dpre = (bf16 *)g.c + (int64_t)(at.m + r0) * g.ldc + n0;
        piece_store(gates, dpre, g.ldc, rows, cols);
        if (F::GATED)
            piece_store(ups, dpre + g.across, g.ldc, rows, cols);
        if (j.act != NULL) {
            __syncwarp();
            words_put(gates, act);
            __syncwarp();
            piece_store(gates, j.act + (int64_t)(at.m + r0) * j.ldact + n0, j.ldact, rows, cols);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        int r = lane / 4 + 8 * h;
        if (j.part != NULL && lane % 4 == 0 && r < rows && at.n < g.across)
            j.part[(int64_t)(at.n / F::NT) * g.rows + at.m + r0 + r] = sum[h];
    }
    __syncwarp();
}

/* A warp's 16 rows x 32 columns of fp32 sums, as bulk copies want them. Odd rows write their blocks in another order, so that no
 * bank is hit twice. */
template <typename F> __device__ __forceinline__ void sums_put(char *piece, const float (&c)[F::BN / 2], int p)
{
    int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4, odd = row & 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int d = 4 * (p * 4 + i) + 2 * h;
            float2 low = make_float2(c[d], c[d + 1]), high = make_float2(c[d + 8], c[d + 9]);
            char *line = piece + (row + 8 * h) * 128 + pair % 2 * 8;
            int first = 2 * (i + 2 * odd) + pair / 2, second = 2 * (i + 2 - 2 * odd) + pair / 2;
            *(float2 *)(line + ((first ^ row) << 4)) = odd ? high : low;
            *(float2 *)(line + ((second ^ row) << 4)) = odd ? low : high;
        }
}

/* fp32 sums: boxes of 64 rows x 32 columns through two buffers of the group, added by the copy engine. Each element is added
 * to once. */
template <bool ADD, typename F>
__device__ __forceinline__ void store_sums(const CUtensorMap *mc, const struct gmm_at &at, const float (&c)[F::BN / 2], int group, char *boxes)
{
    int t = threadIdx.x % GROUP;
#pragma unroll
    for (int p = 0; p < F::BN / 32; p++) {
        char *box = boxes + p % 2 * BOX_BYTES;
        if (t == 0)
            bulk_wait_read<1>();
        group_sync(group);
        sums_put<F>(box + t / 32 * PIECE, c, p);
        fence_async_proxy();
        group_sync(group);
        if (t == 0)
            box_store<ADD>(box, mc, at.n + p * 32, at.m + group_row<F>(group), at.expert);
    }
}

#endif /* HOPPER_CODE */

#endif
