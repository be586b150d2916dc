/* ssd backward, CUDA, for Hopper: the gradient of the state, piece by piece from the last; see
 * ssd_scan.cu, whose reverse scan this is, and ops/cuda/walk.cuh. A block of four warps owns one
 * head of one sequence, a warp 16 columns of its state: E <- decay E + sum_i from_start_i C_i
 * dy_i^T, transposed. C comes by bulk copies, dy one piece ahead to registers. */
#include "ops/cuda/walk.cuh"
#include "ops/ssd/ssd_cuda.cuh"

enum { THREADS = 128, STAGES = 3, HALVES = SSD_ROWS / PIECE };

template <int N> struct scan_shared {
    bf16 c[STAGES][N / 64][SSD_ROWS][64]; /* as bulk copies leave them: hopper.cuh */
    float from_start[STAGES][SSD_ROWS];
    uint64_t full[STAGES];
};
struct scan_map {
    CUtensorMap c;
};

#if HOPPER_CODE

/* Step k of the walk, by one thread. */
template <int N>
__device__ __forceinline__ void bring(struct scan_shared<N> *sh, const struct ssd_scan_args &a, const scan_map &map,
                                      int b, int h, int k)
{
    int u = a.s.pieces - 1 - k, first = span_of(a.s, u).first, at = k % STAGES;
    barrier_expect(&sh->full[at], sizeof sh->c[0] + sizeof sh->from_start[0]);
#pragma unroll
    for (int i = 0; i < N / 64; i++)
        tma_load_4d(sh->c[at][i], &map.c, 64 * i, first, h / a.s.per_group, b, &sh->full[at]);
    bulk_load(sh->from_start[at], a.r.from_start + rows_at(a.s, b, u, h), sizeof sh->from_start[0], &sh->full[at]);
}

__device__ __forceinline__ void load_piece(uint2 (&values)[HALVES][TILES], const struct ssd_scan_args &a, int b, int h,
                                           int u, int col)
{
    struct span sp = span_of(a.s, max(u, 0));
    const bf16 *rows = row_of<bf16>(a.u, b, sp.first, h) + col;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
        load_columns(values[half], rows + half * PIECE * a.u.row, a.u.row, sp.n - half * PIECE, u >= 0 && col < a.s.p);
}

template <int N>
__device__ __forceinline__ void scan_step(const struct ssd_scan_args &a, const bf16 (*tile)[SSD_ROWS][64],
                                          const float *from_start, float (&e)[N / 8][4], uint2 (&values)[HALVES][TILES],
                                          int b, int h, int u, int col)
{
    uint32_t in[4], dy[SSD_ROWS / 16][4];
    bf16 *to = state_of<bf16>(a.by_piece, b, u, h) + col;
#pragma unroll
    for (int t = 0; t < HALVES * TILES; t++) {
        float2 f = row_pair(from_start, t);
        float2 upper = unpack2(transpose8(values[t / TILES][t % TILES].x)),
               lower = unpack2(transpose8(values[t / TILES][t % TILES].y));
        dy[t / 2][t % 2 * 2] = pack2(upper.x * f.x, upper.y * f.y);
        dy[t / 2][t % 2 * 2 + 1] = pack2(lower.x * f.x, lower.y * f.y);
    }
    load_piece(values, a, b, h, u - 1, col); /* as early as can be: it comes from far */
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        round_to_a(in, e[2 * n], e[2 * n + 1]);
        store_state_rows(to, a.by_piece.row, n, a.s.n, true, in);
    }
    scale_all(e, from_start[SSD_ROWS - 1]); /* the decay of the whole piece */
    uint64_t rows = wgmma_tile(tile, SSD_ROWS * 128, 1024);
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < SSD_ROWS / 16; j++)
        wgmma_left<N, 1>::run(*(float(*)[N / 2]) e, dy[j], rows + j * (2048 / 16), 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(e);
    hold(dy);
}

template <int N> __device__ __forceinline__ void walk_back(const struct ssd_scan_args &a, const scan_map &map)
{
    DYNAMIC_SHARED(char, scan_raw, 1024);
    struct scan_shared<N> *sh = (struct scan_shared<N> *)(scan_raw + (1024 - smem_address(scan_raw) % 1024) % 1024);
    int b = blockIdx.x / a.s.heads, h = blockIdx.x % a.s.heads, first = threadIdx.x / 32 * 16,
        col = first + 4 * (threadIdx.x % 4);
    float e[N / 8][4];
    uint2 values[HALVES][TILES];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(&sh->full[i], 1);
        barrier_init_done();
    }
    __syncthreads();
    for (int k = 0; threadIdx.x == 0 && k < STAGES && k < a.s.pieces; k++)
        bring<N>(sh, a, map, b, h, k);
    load_state<float, N>(e, a.first.data != NULL ? state_of<float>(a.first, b, 0, h) : NULL, a.first.row, first, a.s.n,
                         a.s.p);
    load_piece(values, a, b, h, a.s.pieces - 1, col);
    for (int k = 0; k < a.s.pieces; k++) {
        int at = k % STAGES;
        barrier_wait(&sh->full[at], k / STAGES % 2);
        scan_step<N>(a, sh->c[at], sh->from_start[at], e, values, b, h, a.s.pieces - 1 - k, col);
        __syncthreads(); /* no thread uses this stage any more */
        if (threadIdx.x == 0 && k + STAGES < a.s.pieces)
            bring<N>(sh, a, map, b, h, k + STAGES);
    }
    if (a.last.data != NULL)
        store_state<N>(e, state_of<float>(a.last, b, 0, h), a.last.row, first, a.s.n, a.s.p);
}

#endif /* HOPPER_CODE */

template <int N>
static __global__ void __launch_bounds__(THREADS, 2)
    scan_reverse_hopper(const __grid_constant__ struct ssd_scan_args a, const __grid_constant__ scan_map map)
{
#if HOPPER_CODE
    walk_back<N>(a, map);
#endif
}

/* Bulk copies know no piece that ends inside the sequence: only the last one may be short. */
bool ssd_scan_on_hopper(const struct lane *l, const struct ssd_scan_args *a)
{
    return cuda_of(l)->hopper && a->vec && a->s.p % 8 == 0 && a->piece_cols == SSD_P &&
           (a->s.piece == SSD_ROWS || a->s.pieces == 1) && a->s.pieces > 0;
}

template <int N> static int launch(struct lane *l, const struct ssd_scan_args *a, const scan_map *map)
{
    const int bytes = (int)sizeof(struct scan_shared<N>) + 1024;
    NEEDS_SMEM(l, scan_reverse_hopper<N>, bytes);
    LAUNCH(l, scan_reverse_hopper<N>, (unsigned)(a->s.batch * a->s.heads), THREADS, bytes, *a, *map);
    return ST_OK;
}

int ssd_scan_hopper(struct lane *l, const struct ssd_scan_args *a, const struct tensor *cm)
{
    scan_map map;
    TRY(tensor_map_heads(l, &map.c, cm, SSD_ROWS));
    return a->s.n <= 64 ? launch<64>(l, a, &map) : launch<128>(l, a, &map);
}
