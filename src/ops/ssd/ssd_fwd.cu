/* ssd forward, CUDA: the choice of path, and the output kernel of the fast one of every GPU (Hopper's is
 * ssd_fwd_hopper.cu); see ssd_cuda.cuh.
 *
 * A block makes y of one piece for a few heads of one group. C B^T is made once and stays in registers; for each head
 * it is multiplied by the decays, rounded, and meets x; the incoming state adds e^s C S. The tiles of the next head are
 * copied meanwhile. Warp w owns the tiles of 16 rows w and 7 - w, which together have the same share of the triangle
 * for all w, and what it reads of x and of the state serves both. */
#include "ops/ssd/ssd_cuda.cuh"
#include "ops/ssd/ssd.h"

enum {
    OUT_THREADS = 128,
    OUT_HEADS = 4,
    HALF_BLOCKS = SSD_ROWS / 32,
    P_TILES = SSD_P / 8,
    Q_TILES = SSD_ROWS / 8,
    Q_BLOCKS = SSD_ROWS / 16
};

struct out_args {
    struct ssd_shape s;
    struct ssd_rows r;
    struct rows_view x, bm, cm, y;
    struct state_view states;
    int state_cols;
    bool state_vec;
    const float *d; /* NULL: absent */
    bool vec;
};
struct out_stage {
    bf16 x[P_TILE], state[P_TILE];
};
struct out_shared {
    bf16 c[N_TILE];
    struct out_stage stage[2]; /* the second holds B at first */
    float delta[2][SSD_ROWS], s[2][SSD_ROWS], from_start[2][SSD_ROWS];
    int low[SSD_ROWS];
};
static_assert(sizeof(struct out_stage) >= N_TILE * sizeof(bf16), "B fits");

__device__ __forceinline__ void out_load(const struct out_args &a, struct out_shared *sh, int k, int b, int u, int h,
                                         struct span sp)
{
    int64_t at = rows_at(a.s, b, u, h);
    load_tile<SSD_P, OUT_THREADS>(sh->stage[k].x, row_of<bf16>(a.x, b, sp.first, h), a.x.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_P, OUT_THREADS>(sh->stage[k].state, state_of<bf16>(a.states, b, u, h), a.states.row, a.s.n,
                                  a.state_cols, a.state_vec);
    load_numbers(sh->delta[k], a.r.delta + at, 0);
    load_numbers(sh->s[k], a.r.s + at, 32);
    load_numbers(sh->from_start[k], a.r.from_start + at, 64);
    copies_commit();
}

/* The rows of tiles lo and hi of C B^T, up to the diagonal. */
struct products {
    float lo[2 * HALF_BLOCKS][4], hi[Q_TILES][4];
};
__device__ __forceinline__ void cb_products(struct products *cb, const bf16 *c, const bf16 *bm, int lo, int n_blocks)
{
    int hi = Q_BLOCKS - 1 - lo;
#pragma unroll 1
    for (int k = 0; k < n_blocks; k++) {
        uint32_t a[4], d[4], b[4];
        frag_a(a, c + lo * 16 * N_ROW + k * 16, N_ROW);
        frag_a(d, c + hi * 16 * N_ROW + k * 16, N_ROW);
#pragma unroll
        for (int j = 0; j < Q_BLOCKS; j++)
            if (j <= hi) {
                frag_b(b, bm + j * 16 * N_ROW + k * 16, N_ROW);
                mma_bf16(cb->hi[2 * j], d, b[0], b[1]);
                mma_bf16(cb->hi[2 * j + 1], d, b[2], b[3]);
                if (j < HALF_BLOCKS && j <= lo) {
                    mma_bf16(cb->lo[2 * (j % HALF_BLOCKS)], a, b[0], b[1]);
                    mma_bf16(cb->lo[2 * (j % HALF_BLOCKS) + 1], a, b[2], b[3]);
                }
            }
    }
}

/* e^(s_i - s_j) where row i sees row j, else 0. */
__device__ __forceinline__ float decay_of(float si, float sj, bool masked, int i, int j, int low)
{
    float d = si - sj;
    if (masked)
        d = j <= i && j >= low ? d : -INFINITY;
    return exp2_fast(d);
}

/* What a lane knows of its two rows in a tile. */
struct two_rows {
    int i[2], low[2];
    float s[2];
};
__device__ __forceinline__ struct two_rows rows_in(const struct out_shared *sh, int k, int tile)
{
    struct two_rows r;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        r.i[e] = tile * 16 + threadIdx.x % 32 / 4 + 8 * e;
        r.low[e] = sh->low[r.i[e]];
        r.s[e] = sh->s[k][r.i[e]];
    }
    return r;
}

/* C B^T of 16 columns times decays and delta, rounded: a left operand. */
__device__ __forceinline__ void decayed(uint32_t *a, const float (*cb)[4], const struct two_rows *r,
                                        const struct out_shared *sh, int k, int j, bool masked)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int col = j * 16 + half * 8 + 2 * t;
        float2 sj = *(const float2 *)(sh->s[k] + col), dj = *(const float2 *)(sh->delta[k] + col);
#pragma unroll
        for (int e = 0; e < 2; e++)
            a[2 * half + e] =
                pack_bf16(cb[half][2 * e] * (decay_of(r->s[e], sj.x, masked, r->i[e], col, r->low[e]) * dj.x),
                          cb[half][2 * e + 1] * (decay_of(r->s[e], sj.y, masked, r->i[e], col + 1, r->low[e]) * dj.y));
    }
}

__device__ __forceinline__ void intra(float (*acc)[P_TILES][4], const struct products *cb, const struct out_shared *sh,
                                      int k, int lo, int hi_blocks, bool documents)
{
    int hi = Q_BLOCKS - 1 - lo;
    struct two_rows rl = rows_in(sh, k, lo), rh = rows_in(sh, k, hi);
#pragma unroll
    for (int j = 0; j < Q_BLOCKS; j++) {
        bool with_lo = j < HALF_BLOCKS && j <= lo, with_hi = j < hi_blocks;
        if (with_lo || with_hi) {
            uint32_t al[4], ah[4], b[4];
            if (with_lo)
                decayed(al, cb->lo + 2 * (j % HALF_BLOCKS), &rl, sh, k, j, j == lo || documents);
            if (with_hi)
                decayed(ah, cb->hi + 2 * j, &rh, sh, k, j, j == hi || documents);
#pragma unroll
            for (int q = 0; q < P_TILES / 2; q++) {
                frag_b_t(b, sh->stage[k].x + j * 16 * P_ROW + q * 16, P_ROW);
                if (with_lo) {
                    mma_bf16(acc[0][2 * q], al, b[0], b[1]);
                    mma_bf16(acc[0][2 * q + 1], al, b[2], b[3]);
                }
                if (with_hi) {
                    mma_bf16(acc[1][2 * q], ah, b[0], b[1]);
                    mma_bf16(acc[1][2 * q + 1], ah, b[2], b[3]);
                }
            }
        }
    }
}

__device__ __forceinline__ void inter_block(float (*acc)[P_TILES][4], const bf16 *c, const bf16 *state, int lo, int n)
{
    uint32_t al[4], ah[4], b[4];
    frag_a(al, c + lo * 16 * N_ROW + n * 16, N_ROW);
    frag_a(ah, c + (Q_BLOCKS - 1 - lo) * 16 * N_ROW + n * 16, N_ROW);
#pragma unroll
    for (int q = 0; q < P_TILES / 2; q++) {
        frag_b_t(b, state + n * 16 * P_ROW + q * 16, P_ROW);
        mma_bf16(acc[0][2 * q], al, b[0], b[1]);
        mma_bf16(acc[0][2 * q + 1], al, b[2], b[3]);
        mma_bf16(acc[1][2 * q], ah, b[0], b[1]);
        mma_bf16(acc[1][2 * q + 1], ah, b[2], b[3]);
    }
}

__device__ __forceinline__ void inter(float (*acc)[P_TILES][4], const struct out_shared *sh, int k, int lo,
                                      int n_blocks)
{
    if (n_blocks == SSD_N / 16) {
#pragma unroll 4
        for (int n = 0; n < SSD_N / 16; n++)
            inter_block(acc, sh->c, sh->stage[k].state, lo, n);
    } else {
#pragma unroll 1
        for (int n = 0; n < n_blocks; n++)
            inter_block(acc, sh->c, sh->stage[k].state, lo, n);
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
        int i = (which ? Q_BLOCKS - 1 - lo : lo) * 16 + threadIdx.x % 32 / 4;
        float f0 = sh->from_start[k][i], f1 = sh->from_start[k][i + 8];
#pragma unroll
        for (int q = 0; q < P_TILES; q++) {
            acc[which][q][0] *= f0;
            acc[which][q][1] *= f0;
            acc[which][q][2] *= f1;
            acc[which][q][3] *= f1;
        }
    }
}

__device__ __forceinline__ void skip(float (*acc)[4], const bf16 *x, float d, int tile)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bf16 *x0 = x + (tile * 16 + g) * P_ROW + 2 * t, *x1 = x0 + 8 * P_ROW;
#pragma unroll
    for (int q = 0; q < P_TILES; q++) {
        float2 v0 = unpack_bf16(*(const uint32_t *)(x0 + q * 8)), v1 = unpack_bf16(*(const uint32_t *)(x1 + q * 8));
        acc[q][0] += d * v0.x;
        acc[q][1] += d * v0.y;
        acc[q][2] += d * v1.x;
        acc[q][3] += d * v1.y;
    }
}

static __global__ void __launch_bounds__(OUT_THREADS, 2) out_kernel(const __grid_constant__ struct out_args a)
{
    DYNAMIC_SHARED(char, shared, 16);
    struct out_shared *sh = (struct out_shared *)shared;
    int blocks = (a.s.per_group + OUT_HEADS - 1) / OUT_HEADS, at = blockIdx.x;
    int block = at % blocks, group = at / blocks % a.s.groups, piece = at / blocks / a.s.groups;
    int b = piece / a.s.pieces, u = piece % a.s.pieces, lo = threadIdx.x / 32;
    int h0 = group * a.s.per_group + block * OUT_HEADS, heads = min(OUT_HEADS, a.s.per_group - block * OUT_HEADS);
    struct span sp = span_of(a.s, u);
    int n_blocks = (a.s.n + 15) / 16, q_blocks = (sp.n + 15) / 16, hi = Q_BLOCKS - 1 - lo;
    bf16 *bm = (bf16 *)&sh->stage[1];
    load_tile<SSD_N, OUT_THREADS>(sh->c, row_of<bf16>(a.cm, b, sp.first, group), a.cm.row, sp.n, a.s.n, a.vec);
    load_tile<SSD_N, OUT_THREADS>(bm, row_of<bf16>(a.bm, b, sp.first, group), a.bm.row, sp.n, a.s.n, a.vec);
    load_numbers(sh->low, a.r.low + (int64_t)piece * SSD_ROWS, 0);
    copies_commit();
    out_load(a, sh, 0, b, u, h0, sp);
    copies_wait<1>();
    __syncthreads();
    bool documents = sh->low[SSD_ROWS - 1] >= 0;
    struct products cb = {};
    cb_products(&cb, sh->c, bm, lo, n_blocks);
    for (int k = 0; k < heads; k++) {
        copies_wait<0>();
        __syncthreads(); /* this head's tiles are there, and no thread reads the other stage any more */
        if (k + 1 < heads)
            out_load(a, sh, (k + 1) % 2, b, u, h0 + k + 1, sp);
        float acc[2][P_TILES][4] = {};
        inter(acc, sh, k % 2, lo, n_blocks);
        intra(acc, &cb, sh, k % 2, lo, hi < q_blocks ? hi + 1 : 0, documents);
#pragma unroll
        for (int which = 0; which < 2; which++) {
            int tile = which ? hi : lo, i = tile * 16 + threadIdx.x % 32 / 4;
            if (a.d != NULL)
                skip(acc[which], sh->stage[k % 2].x, a.d[h0 + k], tile);
            bf16 *y = row_of<bf16>(a.y, b, sp.first + i, h0 + k);
            store_rows<P_TILES>(acc[which], i < sp.n ? y : NULL, i + 8 < sp.n ? y + 8 * a.y.row : NULL, a.s.p, a.vec);
        }
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

struct fwd_parts {
    struct ssd_rows r;
    bf16 *states; /* before each piece: [batch, pieces, heads, N, SSD_P] */
};
static struct fwd_parts fwd_take(struct parts *at, const struct ssd_shape *s)
{
    struct fwd_parts f;
    f.r = ssd_rows_take(at, s, false);
    f.states = (bf16 *)part(at, (int64_t)s->batch * s->pieces * s->heads * s->n * SSD_P * (int64_t)sizeof(bf16));
    return f;
}
static struct ssd_shape fwd_shape(const struct ssd_fwd_args *a)
{
    return ssd_shape_of(&a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, SSD_ROWS);
}

extern "C" int64_t ssd_fwd_work_cuda(const struct ssd_fwd_args *a)
{
    if (!ssd_is_fast(&a->x, &a->Bm))
        return ssd_plain_fwd_work(a);
    struct ssd_shape s = fwd_shape(a);
    struct parts at = {NULL, 0};
    fwd_take(&at, &s);
    return max_i64(at.used, ssd_fwd_hopper_work(a));
}

static int fast_fwd(struct lane *l, const struct ssd_fwd_args *a)
{
    struct ssd_shape s = fwd_shape(a);
    struct parts at = {(char *)a->work.data, 0};
    struct fwd_parts f = fwd_take(&at, &s);
    struct ssd_inputs in = {&a->dt, &a->A_log, &a->dt_bias, &a->doc_start};
    bool vec = aligned16(&a->x) && aligned16(&a->Bm) && aligned16(&a->Cm) && aligned16(&a->y) &&
               absent_or_aligned16(&a->states);
    bool direct = present(&a->states) && s.per_chunk == 1; /* what the caller keeps serves the output kernel too */
    TRY(ssd_prep(l, &s, &in, &f.r));
    struct ssd_scan_args c = {};
    c.s = s;
    c.r = f.r;
    c.u = rows_view_of(&a->x);
    c.v = rows_view_of(&a->Bm);
    c.first = state_view_of(&a->init);
    c.start = (const int64_t *)a->start.data;
    c.by_piece = direct ? state_view_of(&a->states) : pieces_view(f.states, &s, SSD_P);
    c.piece_cols = direct ? s.p : SSD_P;
    c.piece_vec = !direct || vec;
    if (!direct)
        c.by_chunk = state_view_of(&a->states);
    c.last = state_view_of(&a->final);
    c.vec = vec;
    TRY(ssd_scan(l, &c, false));
    struct out_args o = {s,
                         f.r,
                         rows_view_of(&a->x),
                         rows_view_of(&a->Bm),
                         rows_view_of(&a->Cm),
                         rows_view_of(&a->y),
                         c.by_piece,
                         c.piece_cols,
                         c.piece_vec,
                         (const float *)a->D.data,
                         vec};
    int64_t blocks = (int64_t)s.batch * s.pieces * s.groups * ceil_div(s.per_group, OUT_HEADS);
    NEEDS_SMEM(l, out_kernel, sizeof(struct out_shared));
    LAUNCH(l, out_kernel, dim3((unsigned)blocks), OUT_THREADS, sizeof(struct out_shared), o);
    return ST_OK;
}

extern "C" int ssd_fwd_cuda(struct lane *l, const struct ssd_fwd_args *a)
{
    TRY(ssd_fwd_check(a, l->err));
    TRY(check_work("ssd_fwd", &a->work, ssd_fwd_work_cuda(a), l->err));
    if (ssd_fwd_on_hopper(l, a))
        return ssd_fwd_hopper(l, a);
    return ssd_is_fast(&a->x, &a->Bm) ? fast_fwd(l, a) : ssd_plain_fwd(l, a);
}
