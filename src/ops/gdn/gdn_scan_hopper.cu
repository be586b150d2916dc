/* gdn on CUDA, both walks over the pieces for Hopper; see gdn_scan.cuh, whose arrangement this is:
 * a warp owns 16 columns of the state, and a result is the left operand of the next product without
 * leaving the warp. Four warps multiply together by wgmma, so the right operands are read from
 * shared memory once for 64 columns and not by each warp. They come by bulk copies, STAGES deep; a
 * row of V, dO, or of a result goes between memory and registers, V and dO one piece ahead. */
#include "ops/cuda/hopper.cuh"
#include "ops/gdn/gdn_scan.cuh"

enum { STAGES = 3, GROUP = 128, COLUMNS = 64 }; /* threads and columns of a warpgroup */

struct scan_maps {
    CUtensorMap q, k;
};

#if HOPPER_CODE

template <int DK> struct walk_stage {
    bf16 k[DK / 64][PIECE][64], q[DK / 64][PIECE][64]; /* as bulk copies leave them: hopper.cuh */
    uint32_t blocks[UNIT_BLOCKS * BLOCK_WORDS];
    float rows[SCAN_ROWS * PIECE];
};
template <int DK> struct walk_shared {
    struct walk_stage<DK> stage[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

template <int DK> __device__ __forceinline__ walk_shared<DK> *walk_memory(void)
{
    DYNAMIC_SHARED(char, walk_raw, 1024);
    return (struct walk_shared<DK> *)(walk_raw + (1024 - smem_address(walk_raw) % 1024) % 1024);
}
template <int DK> __device__ __forceinline__ void walk_begin(struct walk_shared<DK> *m)
{
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&m->full[i], 1);
            barrier_init(&m->empty[i], blockDim.x);
        }
        barrier_init_done();
    }
    __syncthreads();
}

/* Step n of the walk, piece `index`, by one thread. */
template <int DK>
__device__ __forceinline__ void bring(struct walk_shared<DK> *m, const struct gdn_geom &g, const scan_maps &maps,
                                      const uint32_t *blocks, const float *factors, int b, int h, int n, int index)
{
    struct walk_stage<DK> *to = &m->stage[n % STAGES];
    uint64_t *full = &m->full[n % STAGES];
    int first = piece_at(g, index).first, kh = h / g.per_key;
    int64_t unit = unit_of(g, b, index, h);
    if (n >= STAGES)
        barrier_wait(&m->empty[n % STAGES], (n / STAGES - 1) % 2);
    barrier_expect(full, sizeof *to);
#pragma unroll
    for (int i = 0; i < DK / 64; i++) {
        tma_load_4d(to->k[i], &maps.k, 64 * i, first, kh, b, full);
        tma_load_4d(to->q[i], &maps.q, 64 * i, first, kh, b, full);
    }
    bulk_load(to->blocks, blocks + unit * (UNIT_BLOCKS * BLOCK_WORDS), sizeof to->blocks, full);
    bulk_load(to->rows, factors + unit * (UNIT_ROWS * PIECE), sizeof to->rows, full);
}

/* The accuracy of 16 bits: both factors in two parts. */
template <int J>
__device__ __forceinline__ void by_column_split(float (&c)[TILES][4], const uint32_t (&high)[4],
                                                const uint32_t (&low)[4], const uint32_t *blocks)
{
    by_column<J>(c, low, blocks + T_HIGH * BLOCK_WORDS, J == 0);
    by_column<J>(c, high, blocks + T_LOW * BLOCK_WORDS, 0);
    by_column<J>(c, high, blocks + T_HIGH * BLOCK_WORDS, 0);
}
template <int I>
__device__ __forceinline__ void by_row_split(float (&c)[TILES][4], const uint32_t (&high)[4], const uint32_t (&low)[4],
                                             const uint32_t *blocks)
{
    by_row<I>(c, low, blocks + T_HIGH * BLOCK_WORDS, I == 3);
    by_row<I>(c, high, blocks + T_LOW * BLOCK_WORDS, 0);
    by_row<I>(c, high, blocks + T_HIGH * BLOCK_WORDS, 0);
}

__device__ __forceinline__ void split(uint32_t (&high)[PIECE / 16][4], uint32_t (&low)[PIECE / 16][4],
                                      const float (&c)[TILES][4])
{
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        round_to_a(high[j], c[2 * j], c[2 * j + 1]);
        rest_to_a(low[j], c[2 * j], c[2 * j + 1], high[j]);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* What a piece reads and writes in memory, at this lane's first column. */
struct fwd_rows {
    const bf16 *v_next; /* of the next piece; NULL: there is none */
    bf16 *o, *state;    /* NULL: not wanted */
    int64_t state_row;
    int n, n_next;
    bool valid;
};

/* One piece with the state that enters it in s and V in `values`, which leaves
 * with V of the next. */
template <int DK>
__device__ __forceinline__ void fwd_step(const struct gdn_scan_args &a, const struct walk_stage<DK> *m,
                                         float (&s)[DK / 8][4], uint2 (&values)[TILES], const struct fwd_rows &at)
{
    uint32_t in[DK / 16][4], high[PIECE / 16][4], low[PIECE / 16][4];
    float ks[TILES][4], out[TILES][4], x[TILES][4];
#pragma unroll
    for (int d = 0; d < DK / 16; d++)
        round_to_a(in[d], s[2 * d], s[2 * d + 1]);
    wgmma_begin();
    by_rows<DK>(ks, in, m->k);
    wgmma_commit();
    by_rows<DK>(out, in, m->q);
    wgmma_commit();
#pragma unroll
    for (int d = 0; d < DK / 16; d++)
        store_state_rows(at.state, at.state_row, d, a.g.dk, at.valid && at.state != NULL, in[d]);
    wgmma_wait<1>();
    hold(ks);
    scale_by_rows(ks, m->rows + ROW_KEY * PIECE);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float2 upper = unpack2(transpose8(values[t].x)), lower = unpack2(transpose8(values[t].y));
        ks[t][0] = upper.x - ks[t][0];
        ks[t][1] = upper.y - ks[t][1];
        ks[t][2] = lower.x - ks[t][2];
        ks[t][3] = lower.y - ks[t][3];
    }
    split(high, low, ks);
    wgmma_begin();
    by_column_split<0>(x, high[0], low[0], m->blocks);
    by_column_split<1>(x, high[1], low[1], m->blocks);
    by_column_split<2>(x, high[2], low[2], m->blocks);
    by_column_split<3>(x, high[3], low[3], m->blocks);
    wgmma_commit();
    load_columns(values, at.v_next, a.v.s, at.n_next, at.valid && at.v_next != NULL);
    wgmma_wait<1>();
    hold(out);
    hold(in);
    scale_by_rows(out, m->rows + ROW_QUERY * PIECE);
    scale_all(s, m->rows[ROW_DECAY * PIECE]);
    wgmma_wait<0>();
    hold(x);
    hold(high);
    hold(low);
    in_order(ks, x);
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
        round_to_a(high[j], ks[2 * j], ks[2 * j + 1]);
    scale_to_a(low, ks, m->rows + ROW_WRITE * PIECE);
    const uint32_t *p = m->blocks + P_AT * BLOCK_WORDS;
    wgmma_begin();
    by_column<0>(x, high[0], p, 1);
    by_column<1>(x, high[1], p, 0);
    by_column<2>(x, high[2], p, 0);
    by_column<3>(x, high[3], p, 0);
    wgmma_commit();
    add_rows_wgmma<DK>(s, low, m->k);
    wgmma_commit();
    wgmma_wait<1>();
    hold(x);
    hold(high);
    add_in_order(out, x);
    store_columns(at.o, a.o.s, at.n, at.valid && at.o != NULL, out);
    wgmma_wait<0>();
    hold(s);
    hold(low);
}

template <int DK> __device__ __forceinline__ void walk_forward(const struct gdn_scan_args &a, const scan_maps &maps)
{
    struct walk_shared<DK> *m = walk_memory<DK>();
    int h = (int)(blockIdx.x % a.g.heads), b = (int)(blockIdx.x / a.g.heads), n = a.g.n_pieces;
    int first = (int)(blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 16, col = first + 4 * (threadIdx.x % 4);
    bool fresh = a.init.data == NULL || (a.start != NULL && *a.start == 0);
    float s[DK / 8][4];
    uint2 values[TILES];
    struct fwd_rows at = {NULL, NULL, NULL, a.given ? a.piece_states.n : a.states.n, 0, 0, col < a.g.dv};
    walk_begin(m);
    for (int c = 0; threadIdx.x == 0 && c < STAGES - 1 && c < n; c++)
        bring<DK>(m, a.g, maps, a.blocks, a.factors, b, h, c, c);
    load_state<float, DK>(s, fresh ? NULL : state_at(a.init, b, 0, h), a.init.n, first, a.g.dk, a.g.dv);
    load_columns(values, view_at(a.v, b, 0, h) + col, a.v.s, piece_at(a.g, 0).n, at.valid);
    for (int c = 0; c < n; c++) {
        struct piece p = piece_at(a.g, c), next = piece_at(a.g, c + 1);
        bool begins = c % a.g.per_chunk == 0;
        if (threadIdx.x == 0 && c + STAGES - 1 < n)
            bring<DK>(m, a.g, maps, a.blocks, a.factors, b, h, c + STAGES - 1, c + STAGES - 1);
        if (begins && a.given)
            load_state<bf16, DK>(s, state_at(a.states, b, c / a.g.per_chunk, h), a.states.n, first, a.g.dk, a.g.dv);
        at.n = p.n;
        at.n_next = next.n;
        at.v_next = c + 1 < n ? view_at(a.v, b, next.first, h) + col : NULL;
        at.o = a.o.data ? view_at(a.o, b, p.first, h) + col : NULL;
        at.state = begins && !a.given && a.states.data ? state_at(a.states, b, c / a.g.per_chunk, h) + col : NULL;
        if (a.given)
            at.state = state_at(a.piece_states, b, c, h) + col;
        barrier_wait(&m->full[c % STAGES], c / STAGES % 2);
        fwd_step<DK>(a, &m->stage[c % STAGES], s, values, at);
        barrier_arrive(&m->empty[c % STAGES]);
    }
    if (a.final.data != NULL)
        store_state<DK>(s, state_at(a.final, b, 0, h), a.final.n, first, a.g.dk, a.g.dv);
}

/* ---- backward -------------------------------------------------------------------------------- */

struct bwd_rows {
    const bf16 *d_o_next; /* of the piece before; NULL: there is none */
    bf16 *dv, *gradient;
    int n, n_next;
    bool valid;
};

/* One piece with the gradient of the state that leaves it in e and dO in `values`, which leaves
 * with dO of the piece before. */
template <int DK>
__device__ __forceinline__ void bwd_step(const struct gdn_scan_bwd_args &a, const struct walk_stage<DK> *m,
                                         float (&e)[DK / 8][4], uint2 (&values)[TILES], const struct bwd_rows &at)
{
    uint32_t in[DK / 16][4], out[PIECE / 16][4], high[PIECE / 16][4], low[PIECE / 16][4];
    float dx[TILES][4], through[TILES][4];
#pragma unroll
    for (int d = 0; d < DK / 16; d++)
        round_to_a(in[d], e[2 * d], e[2 * d + 1]);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        out[t / 2][t % 2 * 2] = transpose8(values[t].x);
        out[t / 2][t % 2 * 2 + 1] = transpose8(values[t].y);
    }
    const uint32_t *p = m->blocks + P_AT * BLOCK_WORDS;
    wgmma_begin();
    by_rows<DK>(dx, in, m->k);
    by_row<3>(through, out[3], p, 1);
    by_row<2>(through, out[2], p, 0);
    by_row<1>(through, out[1], p, 0);
    by_row<0>(through, out[0], p, 0);
    wgmma_commit();
    load_columns(values, at.d_o_next, a.d_o.s, at.n_next, at.valid && at.d_o_next != NULL);
#pragma unroll
    for (int d = 0; d < DK / 16; d++)
        store_state_rows(at.gradient, a.gradients.n, d, a.g.dk, at.valid, in[d]);
    scale_all(e, m->rows[ROW_DECAY * PIECE]);
    wgmma_wait<0>();
    hold(dx);
    hold(through);
    hold(in);
    hold(out);
    scale_by_rows(dx, m->rows + ROW_WRITE * PIECE);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            dx[t][i] += through[t][i];
    split(high, low, dx);
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = unpack2(out[j][i]), query = row_pair(m->rows + ROW_QUERY * PIECE, 2 * j + i / 2);
            out[j][i] = pack2(x.x * query.x, x.y * query.y);
        }
    wgmma_begin();
    by_row_split<3>(dx, high[3], low[3], m->blocks);
    by_row_split<2>(dx, high[2], low[2], m->blocks);
    by_row_split<1>(dx, high[1], low[1], m->blocks);
    by_row_split<0>(dx, high[0], low[0], m->blocks);
    wgmma_commit();
    add_rows_wgmma<DK>(e, out, m->q);
    wgmma_commit();
    wgmma_wait<1>();
    hold(dx);
    hold(high);
    hold(low);
    store_columns(at.dv, a.dv.s, at.n, at.valid, dx);
    scale_all(dx, -1.0f);
    scale_to_a(high, dx, m->rows + ROW_KEY * PIECE);
    wgmma_begin();
    add_rows_wgmma<DK>(e, high, m->k);
    wgmma_commit();
    wgmma_wait<0>();
    hold(e);
    hold(out);
    hold(high);
}

template <int DK>
__device__ __forceinline__ void walk_backward(const struct gdn_scan_bwd_args &a, const scan_maps &maps)
{
    struct walk_shared<DK> *m = walk_memory<DK>();
    int h = (int)(blockIdx.x % a.g.heads), b = (int)(blockIdx.x / a.g.heads), n = a.g.n_pieces;
    int first = (int)(blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 16, col = first + 4 * (threadIdx.x % 4);
    float e[DK / 8][4];
    uint2 values[TILES];
    struct bwd_rows at = {NULL, NULL, NULL, 0, 0, col < a.g.dv};
    struct piece p = piece_at(a.g, n - 1);
    walk_begin(m);
    for (int c = 0; threadIdx.x == 0 && c < STAGES - 1 && c < n; c++)
        bring<DK>(m, a.g, maps, a.blocks, a.factors, b, h, c, n - 1 - c);
    load_state<float, DK>(e, a.dfinal.data ? state_at(a.dfinal, b, 0, h) : NULL, a.dfinal.n, first, a.g.dk, a.g.dv);
    load_columns(values, view_at(a.d_o, b, p.first, h) + col, a.d_o.s, p.n, at.valid);
    for (int c = 0; c < n; c++) {
        int index = n - 1 - c;
        struct piece before = piece_at(a.g, index > 0 ? index - 1 : 0);
        p = piece_at(a.g, index);
        if (threadIdx.x == 0 && c + STAGES - 1 < n)
            bring<DK>(m, a.g, maps, a.blocks, a.factors, b, h, c + STAGES - 1, index - (STAGES - 1));
        at.n = p.n;
        at.n_next = before.n;
        at.d_o_next = index > 0 ? view_at(a.d_o, b, before.first, h) + col : NULL;
        at.dv = view_at(a.dv, b, p.first, h) + col;
        at.gradient = state_at(a.gradients, b, index, h) + col;
        barrier_wait(&m->full[c % STAGES], c / STAGES % 2);
        bwd_step<DK>(a, &m->stage[c % STAGES], e, values, at);
        barrier_arrive(&m->empty[c % STAGES]);
    }
    if (a.dinit.data != NULL)
        store_state<DK>(e, state_at(a.dinit, b, 0, h), a.dinit.n, first, a.g.dk, a.g.dv);
}

#endif /* HOPPER_CODE */

template <int DK>
__global__ void __launch_bounds__(2 * GROUP, 1)
    scan_fwd_hopper(const __grid_constant__ struct gdn_scan_args a, const __grid_constant__ scan_maps maps)
{
#if HOPPER_CODE
    walk_forward<DK>(a, maps);
#endif
}
template <int DK>
__global__ void __launch_bounds__(2 * GROUP, 1)
    scan_bwd_hopper(const __grid_constant__ struct gdn_scan_bwd_args a, const __grid_constant__ scan_maps maps)
{
#if HOPPER_CODE
    walk_backward<DK>(a, maps);
#endif
}

/* ---- host side ------------------------------------------------------------------------------- */

/* The shared memory of walk_shared, and what aligning it takes. */
static int64_t walk_bytes(int dk)
{
    int64_t stage = 2 * PIECE * dk * 2 + UNIT_BLOCKS * BLOCK_WORDS * 4 + SCAN_ROWS * PIECE * 4;
    return STAGES * stage + 2 * STAGES * 8 + 1024;
}

/* Bulk copies know no piece that ends inside the sequence: only the last one may be short. */
bool gdn_scan_on_hopper(const struct lane *l, const struct gdn_geom *g)
{
    return cuda_of(l)->hopper && (g->chunk % PIECE == 0 || g->rows <= g->chunk) && g->n_pieces > 0;
}

static int heads_map(struct lane *l, CUtensorMap *map, const struct gdn_geom *g, const gdn_view<const bf16> &v)
{
    struct tensor t = {};
    t.data = (void *)v.data;
    t.dtype = DT_BF16;
    t.rank = 4;
    const int64_t dim[4] = {g->batch, g->rows, g->key_heads, g->dk}, stride[4] = {v.b, v.s, v.h, 1};
    for (int i = 0; i < 4; i++) {
        t.dim[i] = dim[i];
        t.stride[i] = stride[i];
    }
    return tensor_map_heads(l, map, &t, PIECE);
}

template <typename ARGS> static int launch_walk(struct lane *l, const ARGS *a, void (*kernel)(ARGS, scan_maps), int dk)
{
    enum { ENOUGH_BLOCKS = 128 };
    const struct gdn_geom *g = &a->g;
    int64_t heads = (int64_t)g->batch * g->heads, need = ceil_div(g->dv, COLUMNS);
    int64_t groups =
        need > 1 && heads >= ENOUGH_BLOCKS ? 2 : 1; /* few heads: a group a block, over more multiprocessors */
    scan_maps maps;
    TRY(heads_map(l, &maps.q, g, a->q));
    TRY(heads_map(l, &maps.k, g, a->k));
    NEEDS_SMEM(l, kernel, walk_bytes(dk));
    LAUNCH(l, kernel, dim3((unsigned)heads, (unsigned)ceil_div(need, groups)), (unsigned)(groups * GROUP),
           (size_t)walk_bytes(dk), *a, maps);
    return ST_OK;
}

int gdn_scan_hopper(struct lane *l, const struct gdn_scan_args *a)
{
    return a->g.dk <= 64 ? launch_walk(l, a, scan_fwd_hopper<64>, 64) : launch_walk(l, a, scan_fwd_hopper<128>, 128);
}

int gdn_scan_bwd_hopper(struct lane *l, const struct gdn_scan_bwd_args *a)
{
    return a->g.dk <= 64 ? launch_walk(l, a, scan_bwd_hopper<64>, 64) : launch_walk(l, a, scan_bwd_hopper<128>, 128);
}
