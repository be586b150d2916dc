/* gdn forward on CUDA: prepare, then one walk over the pieces that makes the output and the states; see gdn_tile.cuh
 * and gdn_scan.cuh. The walk here is for every GPU; Hopper's is in gdn_scan_hopper.cu. Shapes and types that do not
 * tile go to gdn_plain.cu. */
#include "ops/gdn/gdn_scan.cuh"
#include "ops/gdn/gdn.h"

/* One piece with the state that enters it in s: the output, and the state that leaves. */
template <int DK>
__device__ __forceinline__ void fwd_piece(const struct gdn_scan_args &a, const struct scan_stage<DK> *m,
                                          float (&s)[DK / 8][4], const bf16 *v, bf16 *o, bf16 *state, int64_t state_row,
                                          bf16 *piece_state, int n, bool valid)
{
    constexpr int LD = DK + 8;
    uint2 values[TILES];
    load_columns(values, v, a.v.s, n, valid);
    float ks[TILES][4] = {}, out[TILES][4] = {};
#pragma unroll
    for (int d = 0; d < DK / 16; d++) {
        uint32_t x[4], b[4];
        round_to_a(x, s[2 * d], s[2 * d + 1]);
        if (state != NULL)
            store_state_rows(state, state_row, d, a.g.dk, valid, x);
        if (piece_state != NULL)
            store_state_rows(piece_state, a.piece_states.n, d, a.g.dk, valid, x);
#pragma unroll
        for (int r = 0; r < PIECE / 16; r++) {
            load_b<LD>(b, m->k, 16 * r, 16 * d);
            mma_bf16(ks[2 * r], x, b[0], b[1]);
            mma_bf16(ks[2 * r + 1], x, b[2], b[3]);
            load_b<LD>(b, m->q, 16 * r, 16 * d);
            mma_bf16(out[2 * r], x, b[0], b[1]);
            mma_bf16(out[2 * r + 1], x, b[2], b[3]);
        }
    }
    /* R = V - K^ S, in two parts; out is scaled on the way */
    uint32_t high[PIECE / 16][4], low[PIECE / 16][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float2 key = row_pair(m->rows + ROW_KEY * PIECE, t), query = row_pair(m->rows + ROW_QUERY * PIECE, t);
        float2 upper = unpack2(transpose8(values[t].x)), lower = unpack2(transpose8(values[t].y));
        ks[t][0] = upper.x - key.x * ks[t][0];
        ks[t][1] = upper.y - key.y * ks[t][1];
        ks[t][2] = lower.x - key.x * ks[t][2];
        ks[t][3] = lower.y - key.y * ks[t][3];
        out[t][0] *= query.x;
        out[t][1] *= query.y;
        out[t][2] *= query.x;
        out[t][3] *= query.y;
    }
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        round_to_a(high[j], ks[2 * j], ks[2 * j + 1]);
        rest_to_a(low[j], ks[2 * j], ks[2 * j + 1], high[j]);
    }
    /* X = T R; block columns outside, so that products into the same sums lie apart */
    float x[TILES][4] = {};
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
        for (int i = j; i < PIECE / 16; i++) {
            uint32_t b[4], rest[4];
            block_b_rows(b, m->blocks + (T_HIGH + block_index(i, j)) * BLOCK_WORDS);
            block_b_rows(rest, m->blocks + (T_LOW + block_index(i, j)) * BLOCK_WORDS);
            mma_bf16(x[2 * i], low[j], b[0], b[1]);
            mma_bf16(x[2 * i + 1], low[j], b[2], b[3]);
            mma_bf16(x[2 * i], high[j], rest[0], rest[1]);
            mma_bf16(x[2 * i + 1], high[j], rest[2], rest[3]);
            mma_bf16(x[2 * i], high[j], b[0], b[1]);
            mma_bf16(x[2 * i + 1], high[j], b[2], b[3]);
        }
    /* O += P X */
    if (o != NULL) {
#pragma unroll
        for (int j = 0; j < PIECE / 16; j++)
            round_to_a(high[j], x[2 * j], x[2 * j + 1]);
#pragma unroll
        for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
            for (int i = j; i < PIECE / 16; i++) {
                uint32_t b[4];
                block_b_rows(b, m->blocks + (P_AT + block_index(i, j)) * BLOCK_WORDS);
                mma_bf16(out[2 * i], high[j], b[0], b[1]);
                mma_bf16(out[2 * i + 1], high[j], b[2], b[3]);
            }
        store_columns(o, a.o.s, n, valid, out);
    }
    float decay = m->rows[ROW_DECAY * PIECE];
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[t][e] *= decay;
    scale_to_a(high, x, m->rows + ROW_WRITE * PIECE);
    add_rows<DK>(s, high, m->k);
}

template <int DK>
__global__ __launch_bounds__(SCAN_WARPS * 32, 1) void scan_fwd_kernel(const __grid_constant__ struct gdn_scan_args a)
{
    struct scan_stage<DK> *stage = (struct scan_stage<DK> *)shared_memory();
    int warp = threadIdx.x / 32, q = threadIdx.x % 4;
    int h = (int)(blockIdx.x % a.g.heads), b = (int)(blockIdx.x / a.g.heads);
    int first = (int)(blockIdx.y * (blockDim.x / 32) + warp) * 16; /* of this warp's columns */
    int col = first + 4 * q;
    bool valid = col < a.g.dv;
    float s[DK / 8][4];
    bool fresh = a.init.data == NULL || (a.start != NULL && *a.start == 0);
    load_state<float, DK>(s, fresh ? NULL : state_at(a.init, b, 0, h), a.init.n, first, a.g.dk, a.g.dv);
    if (a.g.n_pieces > 0)
        load_stage<DK>(stage, a.g, a.q, a.k, a.blocks, a.factors, b, h, 0);
    for (int c = 0; c < a.g.n_pieces; c++) {
        copies_wait<0>();
        __syncthreads();
        if (c + 1 < a.g.n_pieces)
            load_stage<DK>(stage + (c + 1) % 2, a.g, a.q, a.k, a.blocks, a.factors, b, h, c + 1);
        struct piece p = piece_at(a.g, c);
        bool begins = c % a.g.per_chunk == 0;
        if (begins && a.given)
            load_state<bf16, DK>(s, state_at(a.states, b, c / a.g.per_chunk, h), a.states.n, first, a.g.dk, a.g.dv);
        bf16 *state = begins && !a.given && a.states.data ? state_at(a.states, b, c / a.g.per_chunk, h) + col : NULL;
        bf16 *piece_state = a.piece_states.data ? state_at(a.piece_states, b, c, h) + col : NULL;
        fwd_piece<DK>(a, stage + c % 2, s, view_at(a.v, b, p.first, h) + col,
                      a.o.data ? view_at(a.o, b, p.first, h) + col : NULL, state, a.states.n, piece_state, p.n, valid);
    }
    if (a.final.data != NULL)
        store_state<DK>(s, state_at(a.final, b, 0, h), a.final.n, first, a.g.dk, a.g.dv);
}

template <int DK> static int launch_scan(struct lane *l, const struct gdn_scan_args *a)
{
    const int bytes = 2 * (int)sizeof(struct scan_stage<DK>), warps = scan_warps(&a->g);
    NEEDS_SMEM(l, scan_fwd_kernel<DK>, bytes);
    LAUNCH(l, scan_fwd_kernel<DK>, dim3((unsigned)(a->g.batch * a->g.heads), (unsigned)ceil_div(a->g.dv, warps * 16)),
           warps * 32, bytes, *a);
    return ST_OK;
}

int gdn_scan(struct lane *l, const struct gdn_scan_args *a)
{
    if (gdn_scan_on_hopper(l, &a->g))
        return gdn_scan_hopper(l, a);
    return a->g.dk <= 64 ? launch_scan<64>(l, a) : launch_scan<128>(l, a);
}

bool gdn_scan_fits(const struct lane *l, const struct gdn_geom *g)
{
    int64_t stage = (int64_t)(g->dk <= 64 ? sizeof(struct scan_stage<64>) : sizeof(struct scan_stage<128>));
    return 2 * stage <= cuda_of(l)->smem_per_block;
}

extern "C" int64_t gdn_fwd_work_cuda(const struct gdn_fwd_args *a)
{
    struct gdn_geom g = geom_of(&a->k, &a->v, a->chunk);
    int64_t plain = gdn_fwd_plain_work(&g);
    return geom_tiles(&g, a->v.dtype) ? max_i64(plain, blocks_bytes(&g) + factors_bytes(&g)) : plain;
}

static int gdn_fwd_tiles(struct lane *l, const struct gdn_fwd_args *a, const struct gdn_geom *g)
{
    struct gdn_scan_args s = {};
    uint32_t *blocks = (uint32_t *)a->work.data;
    float *factors = (float *)((char *)a->work.data + blocks_bytes(g));
    gdn_gates<bf16> gates = gates_of<bf16>(a);
    s.g = *g;
    s.q = view_of<const bf16>(&a->q);
    s.k = view_of<const bf16>(&a->k);
    s.v = view_of<const bf16>(&a->v);
    s.o = view_of<bf16>(&a->o);
    s.blocks = blocks;
    s.factors = factors;
    s.init = state_of(&a->init);
    s.final = state_of(&a->final);
    s.start = (const int64_t *)a->start.data;
    s.states = chunk_states_of<bf16>(&a->states);
    TRY(gdn_prepare(l, g, s.q, s.k, &gates, blocks, factors, false));
    return gdn_scan(l, &s);
}

extern "C" int gdn_fwd_cuda(struct lane *l, const struct gdn_fwd_args *a)
{
    TRY(gdn_fwd_check(a, l->err));
    TRY(check_work("gdn_fwd", &a->work, gdn_fwd_work_cuda(a), l->err));
    struct gdn_geom g = geom_of(&a->k, &a->v, a->chunk);
    if (geom_tiles(&g, a->v.dtype) && aligned16(&a->q) && aligned16(&a->k) && aligned16(&a->v) && aligned16(&a->o) &&
        absent_or_aligned16(&a->states) && gdn_scan_fits(l, &g))
        return gdn_fwd_tiles(l, a, &g);
    return gdn_fwd_plain(l, a);
}
