/* ssd forward, CUDA, for Hopper: one walk over the pieces of a head that makes y and the states;
 * see ops/cuda/walk.cuh and ssd_cuda.cuh. A block of four warps owns one head of one sequence, a
 * warp 16 columns of its state. Per piece of PIECE rows: M = (C B^T) L diag(delta), lower triangle,
 * to shared memory as a right operand (L_ij = e^(s_i - s_j)) y = diag(from_start) C S + M x + D x,
 * S <- decay S + (diag(to_end delta) x)^T B, both transposed x is read and y written once, and no
 * state but those that the caller keeps leaves the multiprocessor. C B^T is computed for each head
 * again: tensor cores have time for it while x and y go through memory. */
#include "ops/cuda/walk.cuh"
#include "ops/ssd/ssd_cuda.cuh"

enum { THREADS = 128, STAGES = 3, ENOUGH_BLOCKS = 64, FEW_PIECES = 16 };

struct walk_args {
    struct ssd_shape s; /* pieces of PIECE rows */
    struct ssd_rows r;
    struct rows_view x, y;
    struct state_view first, by_chunk, last;
    const int64_t *start;
    const float *d; /* NULL: absent */
};
struct walk_maps {
    CUtensorMap b, c;
};

template <int N> struct walk_tiles {
    bf16 b[N / 64][PIECE][64], c[N / 64][PIECE][64]; /* as bulk copies leave them: hopper.cuh */
};
struct walk_numbers {
    float s[PIECE], delta[PIECE], from_start[PIECE], to_end[PIECE];
    int low[PIECE];
};
/* Two blocks fit a multiprocessor. */
template <int N> struct walk_shared {
    struct walk_tiles<N> tiles[STAGES];
    struct walk_numbers numbers[STAGES];
    uint32_t m[2][BLOCKS * BLOCK_WORDS];
    uint64_t full[STAGES];
};

#if HOPPER_CODE

/* Piece u, by one thread. */
template <int N>
__device__ __forceinline__ void bring(struct walk_shared<N> *sh, const struct walk_args &a, const walk_maps &maps,
                                      int b, int h, int u)
{
    struct walk_tiles<N> *tiles = &sh->tiles[u % STAGES];
    struct walk_numbers *to = &sh->numbers[u % STAGES];
    uint64_t *full = &sh->full[u % STAGES];
    int first = span_of(a.s, u).first, group = h / a.s.per_group;
    int64_t at = rows_at(a.s, b, u, h);
    barrier_expect(full, sizeof *tiles + sizeof *to);
#pragma unroll
    for (int i = 0; i < N / 64; i++) {
        tma_load_4d(tiles->b[i], &maps.b, 64 * i, first, group, b, full);
        tma_load_4d(tiles->c[i], &maps.c, 64 * i, first, group, b, full);
    }
    bulk_load(to->s, a.r.s + at, sizeof to->s, full);
    bulk_load(to->delta, a.r.delta + at, sizeof to->s, full);
    bulk_load(to->from_start, a.r.from_start + at, sizeof to->s, full);
    bulk_load(to->to_end, a.r.to_end + at, sizeof to->s, full);
    bulk_load(to->low, a.r.low + ((int64_t)b * a.s.pieces + u) * PIECE, sizeof to->low, full);
}

/* C B^T of the warp's 16 rows becomes M, block by block up to the diagonal. */
__device__ __forceinline__ void put_m(uint32_t *m, const float (&g)[TILES][4], const struct walk_numbers *in)
{
    int warp = threadIdx.x / 32, row = warp * 16 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float s[2] = {in->s[row], in->s[row + 8]};
    int low[2] = {in->low[row], in->low[row + 8]};
    bool documents = in->low[PIECE - 1] >= 0;
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        if (j > warp)
            continue;
        float v[2][4];
        uint32_t a[4];
#pragma unroll
        for (int t = 0; t < 2; t++) {
            int col = 16 * j + 8 * t + 2 * q;
            float2 sj = *(const float2 *)(in->s + col), dj = *(const float2 *)(in->delta + col);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float d = s[e / 2] - (e % 2 ? sj.y : sj.x);
                if (j == warp || documents)
                    d = col + e % 2 <= row + e / 2 * 8 && col + e % 2 >= low[e / 2] ? d : -INFINITY;
                v[t][e] = g[2 * j + t][e] * (exp2_fast(d) * (e % 2 ? dj.y : dj.x));
            }
        }
        round_to_a(a, v[0], v[1]);
        store_block(m + block_index(warp, j) * BLOCK_WORDS, a);
    }
}

/* What a piece writes to memory, at this lane's first column, and what it reads for the next. */
struct walk_rows {
    const bf16 *x_next; /* NULL: there is none */
    bf16 *y, *state;    /* state NULL: not wanted */
    int n, n_next;
    bool valid;
};

/* One piece with the state that enters it in s and x in `values`, which leaves
 * with x of the next. */
template <int N>
__device__ __forceinline__ void walk_step(const struct walk_args &a, struct walk_shared<N> *sh, int u, float skip,
                                          float (&s)[N / 8][4], uint2 (&values)[TILES], const struct walk_rows &at)
{
    const struct walk_tiles<N> *tiles = &sh->tiles[u % STAGES];
    const struct walk_numbers *in = &sh->numbers[u % STAGES];
    uint32_t *m = sh->m[u % 2], left[N / 16][4], x[PIECE / 16][4], weighted[PIECE / 16][4];
    float g[TILES][4], out[TILES][4];
    uint64_t bt = wgmma_tile(tiles->b, 1024, 1024), ct = wgmma_tile(tiles->c, 1024, 1024);
#pragma unroll
    for (int n = 0; n < N / 16; n++)
        round_to_a(left[n], s[2 * n], s[2 * n + 1]);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        int step = n / 4 * (PIECE * 128 / 16) + n % 4 * 2;
        wgmma<PIECE, 0, 0>::run(*(float(*)[4 * TILES]) g, ct + step, bt + step, n == 0);
    }
    wgmma_commit();
    by_rows<N>(out, left, tiles->c);
    wgmma_commit();
    if (at.state != NULL) {
#pragma unroll
        for (int n = 0; n < N / 16; n++)
            store_state_rows(at.state, a.by_chunk.row, n, a.s.n, at.valid, left[n]);
    }
    wgmma_wait<1>();
    hold(g);
    put_m(m, g, in);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        x[t / 2][t % 2 * 2] = transpose8(values[t].x);
        x[t / 2][t % 2 * 2 + 1] = transpose8(values[t].y);
    }
    load_columns(values, at.x_next, a.x.row, at.n_next, at.valid && at.x_next != NULL);
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 v = unpack2(x[j][i]), w = row_pair(in->to_end, 2 * j + i / 2),
                   d = row_pair(in->delta, 2 * j + i / 2);
            weighted[j][i] = pack2(v.x * w.x * d.x, v.y * w.y * d.y);
        }
    float decay = in->from_start[PIECE - 1];
    scale_all(s, decay);
    fence_async_proxy();
    wgmma_wait<0>();
    hold(out);
    hold(left);
    __syncthreads(); /* M is complete, and no thread uses the previous stage any more */
    wgmma_begin();
    by_column<0>(g, x[0], m, 1);
    by_column<1>(g, x[1], m, 0);
    by_column<2>(g, x[2], m, 0);
    by_column<3>(g, x[3], m, 0);
    wgmma_commit();
    add_rows_wgmma<N>(s, weighted, tiles->b);
    wgmma_commit();
    scale_by_rows(out, in->from_start);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float2 upper = unpack2(x[t / 2][t % 2 * 2]), lower = unpack2(x[t / 2][t % 2 * 2 + 1]);
        out[t][0] += skip * upper.x;
        out[t][1] += skip * upper.y;
        out[t][2] += skip * lower.x;
        out[t][3] += skip * lower.y;
    }
    wgmma_wait<1>();
    hold(g);
    hold(x);
    add_in_order(out, g);
    store_columns(at.y, a.y.row, at.n, at.valid, out);
    wgmma_wait<0>();
    hold(s);
    hold(weighted);
}

template <int N> __device__ __forceinline__ void walk(const struct walk_args &a, const walk_maps &maps)
{
    DYNAMIC_SHARED(char, walk_raw, 1024);
    struct walk_shared<N> *sh = (struct walk_shared<N> *)(walk_raw + (1024 - smem_address(walk_raw) % 1024) % 1024);
    int b = blockIdx.x / a.s.heads, h = blockIdx.x % a.s.heads, first = threadIdx.x / 32 * 16,
        col = first + 4 * (threadIdx.x % 4);
    bool fresh = a.first.data == NULL || (a.start != NULL && *a.start == 0);
    float s[N / 8][4], skip = a.d != NULL ? a.d[h] : 0.0f;
    uint2 values[TILES];
    struct walk_rows at = {NULL, NULL, NULL, 0, 0, col < a.s.p};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(&sh->full[i], 1);
        barrier_init_done();
    }
    __syncthreads();
    for (int u = 0; threadIdx.x == 0 && u < STAGES - 1 && u < a.s.pieces; u++)
        bring<N>(sh, a, maps, b, h, u);
    load_state<float, N>(s, fresh ? NULL : state_of<float>(a.first, b, 0, h), a.first.row, first, a.s.n, a.s.p);
    load_columns(values, row_of<bf16>(a.x, b, 0, h) + col, a.x.row, span_of(a.s, 0).n, at.valid);
    for (int u = 0; u < a.s.pieces; u++) {
        struct span sp = span_of(a.s, u), next = span_of(a.s, u + 1);
        bool opens = u % a.s.per_chunk == 0 && a.by_chunk.data != NULL;
        at.n = sp.n;
        at.n_next = next.n;
        at.x_next = u + 1 < a.s.pieces ? row_of<bf16>(a.x, b, next.first, h) + col : NULL;
        at.y = row_of<bf16>(a.y, b, sp.first, h) + col;
        at.state = opens ? state_of<bf16>(a.by_chunk, b, u / a.s.per_chunk, h) + col : NULL;
        barrier_wait(&sh->full[u % STAGES], u / STAGES % 2);
        walk_step<N>(a, sh, u, skip, s, values, at);
        if (threadIdx.x == 0 && u + STAGES - 1 < a.s.pieces)
            bring<N>(sh, a, maps, b, h, u + STAGES - 1);
    }
    if (a.last.data != NULL)
        store_state<N>(s, state_of<float>(a.last, b, 0, h), a.last.row, first, a.s.n, a.s.p);
}

#endif /* HOPPER_CODE */

template <int N>
static __global__ void __launch_bounds__(THREADS, 2)
    walk_kernel(const __grid_constant__ struct walk_args a, const __grid_constant__ walk_maps maps)
{
#if HOPPER_CODE
    walk<N>(a, maps);
#endif
}

/* ---- launchers ------------------------------------------------------------------------------- */

static struct ssd_shape walk_shape(const struct ssd_fwd_args *a)
{
    return ssd_shape_of(&a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, PIECE);
}

/* Bulk copies know no piece that ends inside the sequence: only the last one may be short. A long
 * walk of few heads leaves most of the multiprocessors idle: 32 heads of 4096 rows take 189 us this
 * way and 152 by ssd_scan and the output kernel (H200). */
bool ssd_fwd_on_hopper(const struct lane *l, const struct ssd_fwd_args *a)
{
    struct ssd_shape s = walk_shape(a);
    return cuda_of(l)->hopper && ssd_is_fast(&a->x, &a->Bm) &&
           (s.batch * s.heads >= ENOUGH_BLOCKS || s.pieces <= FEW_PIECES) && s.p % 8 == 0 &&
           (s.piece == PIECE || s.pieces == 1) && aligned16(&a->x) && aligned16(&a->Bm) && aligned16(&a->Cm) &&
           aligned16(&a->y) && absent_or_aligned16(&a->states);
}

int64_t ssd_fwd_hopper_work(const struct ssd_fwd_args *a)
{
    struct ssd_shape s = walk_shape(a);
    struct parts at = {NULL, 0};
    ssd_rows_take(&at, &s, false);
    return at.used;
}

template <int N> static int launch(struct lane *l, const struct walk_args *a, const walk_maps *maps)
{
    const int bytes = (int)sizeof(struct walk_shared<N>) + 1024;
    NEEDS_SMEM(l, walk_kernel<N>, bytes);
    LAUNCH(l, walk_kernel<N>, (unsigned)(a->s.batch * a->s.heads), THREADS, bytes, *a, *maps);
    return ST_OK;
}

int ssd_fwd_hopper(struct lane *l, const struct ssd_fwd_args *a)
{
    struct ssd_shape s = walk_shape(a);
    struct parts at = {(char *)a->work.data, 0};
    struct ssd_inputs in = {&a->dt, &a->A_log, &a->dt_bias, &a->doc_start};
    struct walk_args w = {s,
                          ssd_rows_take(&at, &s, false),
                          rows_view_of(&a->x),
                          rows_view_of(&a->y),
                          state_view_of(&a->init),
                          state_view_of(&a->states),
                          state_view_of(&a->final),
                          (const int64_t *)a->start.data,
                          (const float *)a->D.data};
    walk_maps maps;
    TRY(ssd_prep(l, &s, &in, &w.r));
    TRY(tensor_map_heads(l, &maps.b, &a->Bm, PIECE));
    TRY(tensor_map_heads(l, &maps.c, &a->Cm, PIECE));
    return s.n <= 64 ? launch<64>(l, &w, &maps) : launch<128>(l, &w, &maps);
}
