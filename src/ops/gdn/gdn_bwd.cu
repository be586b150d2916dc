/* gdn backward on CUDA: prepare again, walk the pieces in reverse for dV and the gradients of the states (here), then
 * everything else piece by piece (gdn_grad.cu). Shapes and types that do not tile go to gdn_plain.cu. */
#include "ops/gdn/gdn_scan.cuh"
#include "ops/gdn/gdn.h"

/* One piece with the gradient of the state that leaves it in e: dV, and the gradient of the state that enters. */
template <int DK>
__device__ __forceinline__ void bwd_piece(const struct gdn_scan_bwd_args &a, const struct scan_stage<DK> *m,
                                          float (&e)[DK / 8][4], const bf16 *d_o, bf16 *dv, bf16 *gradient, int n,
                                          bool valid)
{
    constexpr int LD = DK + 8;
    uint2 values[TILES];
    load_columns(values, d_o, a.d_o.s, n, valid);
    float dx[TILES][4] = {};
#pragma unroll
    for (int d = 0; d < DK / 16; d++) {
        uint32_t x[4], b[4];
        round_to_a(x, e[2 * d], e[2 * d + 1]);
        store_state_rows(gradient, a.gradients.n, d, a.g.dk, valid, x);
#pragma unroll
        for (int r = 0; r < PIECE / 16; r++) {
            load_b<LD>(b, m->k, 16 * r, 16 * d);
            mma_bf16(dx[2 * r], x, b[0], b[1]);
            mma_bf16(dx[2 * r + 1], x, b[2], b[3]);
        }
    }
    uint32_t out[PIECE / 16][4], high[PIECE / 16][4], low[PIECE / 16][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float2 write = row_pair(m->rows + ROW_WRITE * PIECE, t);
        out[t / 2][t % 2 * 2] = transpose8(values[t].x);
        out[t / 2][t % 2 * 2 + 1] = transpose8(values[t].y);
        dx[t][0] *= write.x;
        dx[t][1] *= write.y;
        dx[t][2] *= write.x;
        dx[t][3] *= write.y;
    }
    /* dX += P^T dO */
#pragma unroll
    for (int i = 0; i < PIECE / 16; i++)
#pragma unroll
        for (int j = 0; j <= i; j++) {
            uint32_t b[4];
            block_b_rows(b, m->blocks + (P_AT + block_index_t(i, j)) * BLOCK_WORDS);
            mma_bf16(dx[2 * j], out[i], b[0], b[1]);
            mma_bf16(dx[2 * j + 1], out[i], b[2], b[3]);
        }
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        round_to_a(high[j], dx[2 * j], dx[2 * j + 1]);
        rest_to_a(low[j], dx[2 * j], dx[2 * j + 1], high[j]);
    }
    /* dV = T^T dX */
    float y[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < PIECE / 16; i++)
#pragma unroll
        for (int j = 0; j <= i; j++) {
            uint32_t b[4], rest[4];
            block_b_rows(b, m->blocks + (T_HIGH + block_index_t(i, j)) * BLOCK_WORDS);
            block_b_rows(rest, m->blocks + (T_LOW + block_index_t(i, j)) * BLOCK_WORDS);
            mma_bf16(y[2 * j], low[i], b[0], b[1]);
            mma_bf16(y[2 * j + 1], low[i], b[2], b[3]);
            mma_bf16(y[2 * j], high[i], rest[0], rest[1]);
            mma_bf16(y[2 * j + 1], high[i], rest[2], rest[3]);
            mma_bf16(y[2 * j], high[i], b[0], b[1]);
            mma_bf16(y[2 * j + 1], high[i], b[2], b[3]);
        }
    store_columns(dv, a.dv.s, n, valid, y);
    float decay = m->rows[ROW_DECAY * PIECE];
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            e[t][i] *= decay;
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = unpack2(out[j][i]), query = row_pair(m->rows + ROW_QUERY * PIECE, 2 * j + i / 2);
            out[j][i] = pack2(x.x * query.x, x.y * query.y);
        }
    add_rows<DK>(e, out, m->q);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[t][i] = -y[t][i];
    scale_to_a(high, y, m->rows + ROW_KEY * PIECE);
    add_rows<DK>(e, high, m->k);
}

template <int DK>
__global__ __launch_bounds__(SCAN_WARPS * 32,
                             1) void scan_bwd_kernel(const __grid_constant__ struct gdn_scan_bwd_args a)
{
    struct scan_stage<DK> *stage = (struct scan_stage<DK> *)shared_memory();
    int warp = threadIdx.x / 32, q = threadIdx.x % 4;
    int h = (int)(blockIdx.x % a.g.heads), b = (int)(blockIdx.x / a.g.heads);
    int first = (int)(blockIdx.y * (blockDim.x / 32) + warp) * 16, col = first + 4 * q, last = a.g.n_pieces - 1;
    bool valid = col < a.g.dv;
    float e[DK / 8][4];
    load_state<float, DK>(e, a.dfinal.data ? state_at(a.dfinal, b, 0, h) : NULL, a.dfinal.n, first, a.g.dk, a.g.dv);
    load_stage<DK>(stage + last % 2, a.g, a.q, a.k, a.blocks, a.factors, b, h, last);
    for (int c = last; c >= 0; c--) {
        copies_wait<0>();
        __syncthreads();
        if (c > 0)
            load_stage<DK>(stage + (c - 1) % 2, a.g, a.q, a.k, a.blocks, a.factors, b, h, c - 1);
        struct piece p = piece_at(a.g, c);
        bwd_piece<DK>(a, stage + c % 2, e, view_at(a.d_o, b, p.first, h) + col, view_at(a.dv, b, p.first, h) + col,
                      state_at(a.gradients, b, c, h) + col, p.n, valid);
    }
    if (a.dinit.data != NULL)
        store_state<DK>(e, state_at(a.dinit, b, 0, h), a.dinit.n, first, a.g.dk, a.g.dv);
}

template <int DK> static int launch_scan(struct lane *l, const struct gdn_scan_bwd_args *a)
{
    const int bytes = 2 * (int)sizeof(struct scan_stage<DK>), warps = scan_warps(&a->g);
    NEEDS_SMEM(l, scan_bwd_kernel<DK>, bytes);
    LAUNCH(l, scan_bwd_kernel<DK>, dim3((unsigned)(a->g.batch * a->g.heads), (unsigned)ceil_div(a->g.dv, warps * 16)),
           warps * 32, bytes, *a);
    return ST_OK;
}

static int scan_bwd(struct lane *l, const struct gdn_scan_bwd_args *a)
{
    if (gdn_scan_on_hopper(l, &a->g))
        return gdn_scan_bwd_hopper(l, a);
    return a->g.dk <= 64 ? launch_scan<64>(l, a) : launch_scan<128>(l, a);
}

/* ---- the head's scalars ---------------------------------------------------------------------- */

/* One warp per head; lane i adds entries i, i + 32, ... from the last, then the lanes are added. */
__global__ void add_sums_kernel(const float *sums, int64_t n, int heads, float *dA_log, float *ddt_bias, bool acc_A,
                                bool acc_bias)
{
    int h = (int)blockIdx.x, lane = threadIdx.x;
    float rate = 0, bias = 0;
    for (int64_t i = n - 1 - lane; i >= 0; i -= 32) {
        rate += sums[(i * heads + h) * 2];
        bias += sums[(i * heads + h) * 2 + 1];
    }
    rate = warp_sum(rate);
    bias = warp_sum(bias);
    if (lane == 0) {
        dA_log[h] = rate + (acc_A ? dA_log[h] : 0.0f);
        ddt_bias[h] = bias + (acc_bias ? ddt_bias[h] : 0.0f);
    }
}

int gdn_add_sums(struct lane *l, const struct gdn_bwd_args *a, const float *sums, int64_t n, int heads)
{
    LAUNCH(l, add_sums_kernel, (unsigned)heads, 32, 0, sums, n, heads, (float *)a->dA_log.data,
           (float *)a->ddt_bias.data, a->acc_dA_log, a->acc_ddt_bias);
    return ST_OK;
}

/* ---- work space and the call ----------------------------------------------------------------- */

struct bwd_work {
    uint32_t *blocks;
    float *factors, *sums;
    bf16 *gradients, *piece_states; /* states of the pieces, where a chunk has several */
};

static int64_t bwd_work_take(struct bwd_work *w, const struct gdn_geom *g, char *at)
{
    int64_t states = round_up(geom_units(g) * g->dk * g->dv * (int64_t)sizeof(bf16), 128), n = 0;
    w->blocks = (uint32_t *)(at + n), n += blocks_bytes(g);
    w->factors = (float *)(at + n), n += factors_bytes(g);
    w->gradients = (bf16 *)(at + n), n += states;
    w->piece_states = (bf16 *)(at + n), n += g->per_chunk > 1 ? states : 0;
    w->sums = (float *)(at + n), n += round_up(geom_units(g) * 2 * (int64_t)sizeof(float), 128);
    return n;
}

extern "C" int64_t gdn_bwd_work_cuda(const struct gdn_bwd_args *a)
{
    struct gdn_geom g = geom_of(&a->k, &a->v, a->chunk);
    struct bwd_work w;
    int64_t plain = gdn_bwd_plain_work(&g);
    return geom_tiles(&g, a->v.dtype) ? max_i64(plain, bwd_work_take(&w, &g, NULL)) : plain;
}

static gdn_states<bf16> dense_states(bf16 *data, const struct gdn_geom *g)
{
    int64_t size = (int64_t)g->dk * g->dv;
    gdn_states<bf16> s = {data, g->n_pieces * g->heads * size, g->heads * size, size, g->dv};
    return s;
}

/* The states that enter the pieces: given, or computed from those that enter the chunks, for which T and P are
 * prepared as the walk forward wants them. */
static int piece_states(struct lane *l, const struct gdn_bwd_args *a, const struct gdn_geom *g,
                        const struct bwd_work *w, gdn_states<bf16> *out)
{
    *out = chunk_states_of<bf16>(&a->states);
    if (g->per_chunk == 1)
        return ST_OK;
    struct gdn_scan_args s = {};
    gdn_gates<bf16> gates = gates_of<bf16>(a);
    s.g = *g;
    s.q = view_of<const bf16>(&a->q);
    s.k = view_of<const bf16>(&a->k);
    s.v = view_of<const bf16>(&a->v);
    s.blocks = w->blocks;
    s.factors = w->factors;
    s.states = *out;
    s.given = true;
    s.piece_states = *out = dense_states(w->piece_states, g);
    TRY(gdn_prepare(l, g, s.q, s.k, &gates, w->blocks, w->factors, false));
    return gdn_scan(l, &s);
}

static int gdn_bwd_tiles(struct lane *l, const struct gdn_bwd_args *a, const struct gdn_geom *g)
{
    struct bwd_work w;
    bwd_work_take(&w, g, (char *)a->work.data);
    gdn_gates<bf16> gates = gates_of<bf16>(a);
    struct gdn_scan_bwd_args s = {};
    s.g = *g;
    s.q = view_of<const bf16>(&a->q);
    s.k = view_of<const bf16>(&a->k);
    s.d_o = view_of<const bf16>(&a->d_o);
    s.dv = view_of<bf16>(&a->dv);
    s.blocks = w.blocks;
    s.factors = w.factors;
    s.dfinal = state_of(&a->dfinal);
    s.dinit = state_of(&a->dinit);
    s.gradients = dense_states(w.gradients, g);
    struct gdn_grad_args d = {};
    TRY(piece_states(l, a, g, &w, &d.piece_states));
    TRY(gdn_prepare(l, g, s.q, s.k, &gates, w.blocks, w.factors, true));
    TRY(scan_bwd(l, &s));
    d.g = *g;
    d.q = s.q;
    d.k = s.k;
    d.v = view_of<const bf16>(&a->v);
    d.d_o = s.d_o;
    d.dv = view_of<const bf16>(&a->dv);
    d.dq = view_of<bf16>(&a->dq);
    d.dk = view_of<bf16>(&a->dk);
    d.dalpha = view_of<bf16>(&a->dalpha);
    d.dbeta = view_of<bf16>(&a->dbeta);
    d.blocks = w.blocks;
    d.factors = w.factors;
    d.gradients = s.gradients;
    d.sums = w.sums;
    TRY(gdn_grad(l, &d));
    return gdn_add_sums(l, a, w.sums, (int64_t)g->batch * g->n_pieces, g->heads);
}

extern "C" int gdn_bwd_cuda(struct lane *l, const struct gdn_bwd_args *a)
{
    TRY(gdn_bwd_check(a, l->err));
    TRY(check_work("gdn_bwd", &a->work, gdn_bwd_work_cuda(a), l->err));
    struct gdn_geom g = geom_of(&a->k, &a->v, a->chunk);
    const struct tensor *tiled[] = {&a->d_o, &a->q, &a->k, &a->v, &a->states, &a->dq, &a->dk, &a->dv};
    bool tiles = geom_tiles(&g, a->v.dtype) && gdn_scan_fits(l, &g) && gdn_grad_fits(l, &g);
    for (int i = 0; i < (int)(sizeof tiled / sizeof *tiled); i++)
        tiles = tiles && aligned16(tiled[i]);
    return tiles ? gdn_bwd_tiles(l, a, &g) : gdn_bwd_plain(l, a);
}
