/* ssd backward, CUDA: the choice of path, the order of the fast one's kernels, and its last, ddt; see ssd_cuda.cuh. */
#include "ops/ssd/ssd_cuda.cuh"
#include "ops/ssd/ssd.h"

enum { DDT_HEADS = 8, THREADS = 32 * DDT_HEADS, R = SSD_ROWS / 32 };

/* Sums of the lanes below (or above) this one. */
template <bool ABOVE> __device__ __forceinline__ double others(double own)
{
    int lane = threadIdx.x % 32, place = ABOVE ? 31 - lane : lane;
    double sum = own;
    for (int d = 1; d < 32; d <<= 1) {
        double next = ABOVE ? __shfl_down_sync(0xffffffffu, sum, d) : __shfl_up_sync(0xffffffffu, sum, d);
        sum += place >= d ? next : 0.0;
    }
    double rest = ABOVE ? __shfl_down_sync(0xffffffffu, sum, 1) : __shfl_up_sync(0xffffffffu, sum, 1);
    return place > 0 ? rest : 0.0;
}
__device__ __forceinline__ double warp_sum_f64(double x)
{
    for (int d = 16; d > 0; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

/* A warp has one head of one piece; a lane R neighbouring rows. */
__device__ __forceinline__ void ddt_head(const struct ssd_grads &a, float *out, int piece, int h, int rows)
{
    int lane = threadIdx.x % 32, b = piece / a.s.pieces, u = piece % a.s.pieces;
    int64_t at = rows_at(a.s, b, u, h);
    double later[R], earlier[R], down = 0, up = 0;
#pragma unroll
    for (int k = R - 1; k >= 0; k--) {
        int i = lane * R + k;
        down += i < rows ? (double)a.diff[at + i] + (double)a.pass[at + i] : 0.0;
        later[k] = down;
    }
#pragma unroll
    for (int k = 0; k < R; k++) {
        int i = lane * R + k;
        earlier[k] = up;
        up += i < rows ? (double)a.wx_leaving[at + i] * (double)a.r.delta[at + i] : 0.0;
    }
    double rest = others<true>(down) + others<false>(up) + (double)a.through[(int64_t)piece * a.s.heads + h];
    double rate = -(double)expf(a.A_log[h]), d_rate = 0, d_bias = 0;
#pragma unroll
    for (int k = 0; k < R; k++) {
        int i = lane * R + k;
        if (i >= rows)
            continue;
        bool begins = a.r.low[(int64_t)piece * SSD_ROWS + i] == i;
        double da = begins ? 0.0 : later[k] + earlier[k] + rest;
        double d = ((double)a.wx[at + i] + (double)a.wx_leaving[at + i] + rate * da) * (double)a.r.slope[at + i];
        out[i] = (float)d;
        d_bias += d;
        d_rate += da * (double)a.r.delta[at + i];
    }
    d_bias = warp_sum_f64(d_bias);
    d_rate = warp_sum_f64(d_rate);
    if (lane == 0) {
        a.sums.a_log[(int64_t)piece * a.s.heads + h] = (float)(rate * d_rate);
        a.sums.dt_bias[(int64_t)piece * a.s.heads + h] = (float)d_bias;
    }
}

static __global__ void __launch_bounds__(THREADS) ddt_kernel(const __grid_constant__ struct ssd_grads a)
{
    __shared__ float out[DDT_HEADS][SSD_ROWS + 1];
    int piece = blockIdx.x, h0 = blockIdx.y * DDT_HEADS, warp = threadIdx.x / 32;
    struct span sp = span_of(a.s, piece % a.s.pieces);
    if (h0 + warp < a.s.heads)
        ddt_head(a, out[warp], piece, h0 + warp, sp.n);
    __syncthreads();
    for (int at = threadIdx.x; at < sp.n * DDT_HEADS; at += THREADS) {
        int i = at / DDT_HEADS, k = at % DDT_HEADS;
        if (h0 + k < a.s.heads)
            row_of<bf16>(a.ddt, piece / a.s.pieces, sp.first + i, 0)[h0 + k] = from_float<bf16>(out[k][i]);
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

static struct ssd_grads grads_of(struct parts *at, const struct ssd_bwd_args *a)
{
    struct ssd_grads g = {};
    struct ssd_shape s = ssd_shape_of(&a->x, &a->Bm, a->chunk, a->dt_min, a->dt_max, SSD_ROWS);
    int64_t states = (int64_t)s.batch * s.pieces * s.heads * s.n * SSD_P * (int64_t)sizeof(bf16);
    int64_t numbers = ssd_row_count(&s) * (int64_t)sizeof(float);
    g.s = s;
    g.blocks = (int)ceil_div(s.per_group, SSD_HEADS);
    g.r = ssd_rows_take(at, &s, false);
    g.e = pieces_view(part(at, states), &s, SSD_P);
    g.states = s.per_chunk > 1 ? pieces_view(part(at, states), &s, SSD_P) : state_view_of(&a->states);
    g.state_cols = s.per_chunk > 1 ? SSD_P : s.p;
    g.dg = (bf16 *)part(at, (int64_t)s.batch * s.pieces * s.groups * g.blocks * SSD_ROWS * SSD_ROWS *
                                (int64_t)sizeof(bf16));
    g.wx = (float *)part(at, numbers);
    g.diff = (float *)part(at, numbers);
    g.pass = (float *)part(at, numbers);
    g.wx_leaving = (float *)part(at, numbers);
    g.through = (float *)part(at, numbers / s.pad);
    g.sums = ssd_sums_take(at, &s);
    return g;
}

extern "C" int64_t ssd_bwd_work_cuda(const struct ssd_bwd_args *a)
{
    if (!ssd_is_fast(&a->x, &a->Bm))
        return ssd_plain_bwd_work(a);
    struct parts at = {NULL, 0};
    grads_of(&at, a);
    return at.used;
}

/* The states of all pieces of a chunk, where it has several, from the one that enters it. */
static int states_of_pieces(struct lane *l, const struct ssd_grads *g, const struct ssd_bwd_args *a)
{
    struct ssd_scan_args c = {};
    c.s = g->s;
    c.r = g->r;
    c.u = g->x;
    c.v = g->bm;
    c.given = state_view_of(&a->states);
    c.by_piece = g->states;
    c.piece_cols = SSD_P;
    c.piece_vec = true;
    c.vec = g->vec;
    return ssd_scan(l, &c, false);
}

static int fast_bwd(struct lane *l, const struct ssd_bwd_args *a)
{
    struct parts at = {(char *)a->work.data, 0};
    struct ssd_grads g = grads_of(&at, a);
    struct ssd_inputs in = {&a->dt, &a->A_log, &a->dt_bias, &a->doc_start};
    g.vec = aligned16(&a->x) && aligned16(&a->dy) && aligned16(&a->Bm) && aligned16(&a->Cm) && aligned16(&a->states) &&
            aligned16(&a->dx) && aligned16(&a->dBm) && aligned16(&a->dCm);
    g.state_vec = g.s.per_chunk > 1 || g.vec;
    g.x = rows_view_of(&a->x);
    g.dy = rows_view_of(&a->dy);
    g.bm = rows_view_of(&a->Bm);
    g.cm = rows_view_of(&a->Cm);
    g.dx = rows_view_of(&a->dx);
    g.ddt = rows_view_of(&a->ddt);
    g.db = rows_view_of(&a->dBm);
    g.dc = rows_view_of(&a->dCm);
    g.A_log = (const float *)a->A_log.data;
    g.d = (const float *)a->D.data;
    TRY(ssd_prep(l, &g.s, &in, &g.r));
    if (g.s.per_chunk > 1)
        TRY(states_of_pieces(l, &g, a));
    struct ssd_scan_args c = {};
    c.s = g.s;
    c.r = g.r;
    c.u = g.dy;
    c.v = g.cm;
    c.first = state_view_of(&a->dfinal);
    c.by_piece = g.e;
    c.piece_cols = SSD_P;
    c.piece_vec = true;
    c.last = state_view_of(&a->dinit);
    c.vec = g.vec;
    TRY(ssd_scan_on_hopper(l, &c) ? ssd_scan_hopper(l, &c, &a->Cm) : ssd_scan(l, &c, true));
    TRY(ssd_dx(l, &g));
    TRY(ssd_dbc(l, &g));
    dim3 grid((unsigned)(g.s.batch * g.s.pieces), (unsigned)ceil_div(g.s.heads, DDT_HEADS));
    LAUNCH(l, ddt_kernel, grid, THREADS, 0, g);
    return ssd_add_sums(l, &g.s, &g.sums, a);
}

extern "C" int ssd_bwd_cuda(struct lane *l, const struct ssd_bwd_args *a)
{
    TRY(ssd_bwd_check(a, l->err));
    TRY(check_work("ssd_bwd", &a->work, ssd_bwd_work_cuda(a), l->err));
    return ssd_is_fast(&a->x, &a->Bm) ? fast_bwd(l, a) : ssd_plain_bwd(l, a);
}
