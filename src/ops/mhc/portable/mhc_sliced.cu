/* The boundary's two large passes for 4 streams of aligned bf16 rows, with the products against w inside: combine with the
 * projection p = y w^T, and combine's backward with the projection's share gw = dp w of the stream's gradient. So y is not
 * read again for the one, and gw never goes to memory.
 *
 * A block owns a slice of 64 or 128 channels of all streams and keeps that part of w in shared memory, as operands of
 * mma_bf16 in the order in which lanes load them; its warps walk down a run of rows without waiting for each other. w is split
 * into bf16 halves, high + low. Sums over channels (p, squares, dres, dpost) are one partial per slice, added in order by a
 * small kernel after it.
 *
 * Spills: 20 bytes of the backward pass, 288 of the one with dropout and 28 of the forward with dropout, because two blocks to a multiprocessor leave 128 registers, and a
 * thread has the gradients of eight channels of four streams and twenty sums at once. One block would need none, but has half the loads under way. */
#include "ops/cuda/mma.cuh"
#include "ops/mhc/portable/mhc_cuda.cuh"

enum {
    N = 4,
    LOGITS = N * N + 2 * N,
    SUMS = N * N + N,
    VEC = 8,
    FWD_PASS = 32,                   /* channels a warp takes at once, of 8 rows */
    BWD_PASS = 64,                   /* of 4 rows */
    FRAGS_PER_CHANNEL = N * LOGITS * 2 * 2 / 16, /* 16-byte pieces of both halves of w */
    WARPS = MHC_THREADS / 32,
};

/* ---- operands ----------------------------------------------------------------------------------------------------- */

/* Two neighbours of the matrix [high; low] of w, 48 rows: down a column, or along a row. */
__device__ __forceinline__ float half_of(const float *w, int64_t stride, int k, int64_t column)
{
    float v = w[(k % LOGITS) * stride + column], high = rounded<bf16>(v);
    return k < LOGITS ? high : v - high;
}

/* Forward: rows are logits and halves, the depth is channels; element (m, 2 q + e) of step u is channel 8 q + 4 u + e, the
 * one 8 further is channel 8 q + 4 u + 2 + e. Backward: rows are channels, row g of tile t is channel 8 g + 2 t and row g + 8
 * the next one; the depth is logits and halves. */
template <bool FORWARD> static __global__ void operands(const float *w, int64_t stride, int64_t d, uint4 *out, int64_t count)
{
    int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count)
        return;
    int lane = (int)(index % 32), g = lane / 4, q = lane % 4;
    int64_t at = index / 32;
    uint32_t r[4];
    if constexpr (FORWARD) {
        int tile = (int)(at % 3), u = (int)(at / 3 % 2), stream = (int)(at / 6 % N);
        int64_t column = stream * d + at / (6 * N) * FWD_PASS + 8 * q + 4 * u;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int row = 16 * tile + g + (k % 2) * 8;
            int64_t c = column + k / 2 * 2;
            r[k] = pack_bf16(half_of(w, stride, row, c), half_of(w, stride, row, c + 1));
        }
    } else {
        int step = (int)(at % 3), tile = (int)(at / 3 % 4), stream = (int)(at / 12 % N);
        int64_t column = stream * d + at / (12 * N) * BWD_PASS + 8 * g + 2 * tile;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int depth = 16 * step + 2 * q + k / 2 * 8;
            int64_t c = column + k % 2;
            r[k] = pack_bf16(half_of(w, stride, depth, c), half_of(w, stride, depth + 1, c));
        }
    }
    out[index] = make_uint4(r[0], r[1], r[2], r[3]);
}

static int64_t operand_bytes(int64_t d) { return d * FRAGS_PER_CHANNEL * 16; }

static int64_t slice_width(int64_t d) { return d % 128 == 0 ? 128 : 64; }
int64_t mhc_slices(int64_t d) { return d / slice_width(d); }

/* Rows of a block: about 512 blocks, whole groups of all warps. Sums do not depend on it. */
static int64_t run_of(int64_t rows, int64_t d)
{
    int64_t runs = max_i64(512 / mhc_slices(d), 1);
    return round_up(ceil_div(rows, runs), 8 * WARPS);
}

static int make_operands(struct lane *l, const struct tensor *w, int64_t d, bool forward, uint4 *out)
{
    int64_t count = d * FRAGS_PER_CHANNEL;
    unsigned grid = (unsigned)ceil_div(count, 256);
    if (forward)
        LAUNCH(l, operands<true>, grid, 256, 0, floats(w), w->stride[0], d, out, count);
    else
        LAUNCH(l, operands<false>, grid, 256, 0, floats(w), w->stride[0], d, out, count);
    return ST_OK;
}

/* This block's part of the operands, into shared memory. */
__device__ __forceinline__ void take_operands(uint4 *shared, const uint4 *from, int64_t slice, int64_t width)
{
    int count = (int)width * FRAGS_PER_CHANNEL;
    for (int i = (int)threadIdx.x; i < count; i += MHC_THREADS)
        copy_async16(shared + i, from + slice * count + i, true);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
}

__device__ __forceinline__ void load_mix(const float *res, bool profile_d, float (&mix)[N * N])
{
    float r[N * N];
    load_floats(res, r);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
            mix[i * N + j] = profile_d ? r[j * N + i] : r[i * N + j];
}

/* ---- forward: combine and project ------------------------------------------------------------------------------------ */

struct slice_fwd {
    struct combine_args c;
    const uint4 *operands;
    float *p, *squares; /* [slices, rows, LOGITS], [slices, rows] */
    int64_t slices, width, run;
};

template <bool DROP> static __global__ void __launch_bounds__(MHC_THREADS, 2) combine_project(const __grid_constant__ struct slice_fwd s)
{
    DYNAMIC_SHARED(uint4, frags, 16);
    const struct combine_args &a = s.c;
    int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4, passes = (int)s.width / FWD_PASS;
    int64_t slice = blockIdx.x % s.slices, first = blockIdx.x / s.slices * s.run, end = min(first + s.run, a.rows);
    take_operands(frags, s.operands, slice, s.width);
    for (int64_t base = first + (int64_t)threadIdx.x / 32 * 8; base < end; base += WARPS * 8) {
        bool live = base + g < end;
        int64_t row = live ? base + g : end - 1;
        const bf16 *x = at<bf16>(a.x, row), *f = at<bf16>(a.f, row);
        bf16 *y = at<bf16>(a.y, row);
        struct drop_row drop = {};
        if (DROP)
            drop = drop_row_of(a.drop, row);
        float mix[N * N], post[N], acc[3][4] = {}, square = 0;
        load_mix(a.res + row * a.res_stride, a.profile_d, mix);
        load_floats(a.post + row * a.post_stride, post);
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            int64_t c = slice * s.width + pass * FWD_PASS + q * VEC;
            struct held raw[N];
            float in[N][VEC], add[VEC];
#pragma unroll
            for (int j = 0; j < N; j++)
                raw[j] = grab<bf16, VEC>(x + j * a.d + c);
            load_floats(f + c, add);
            if (a.bias != NULL) {
                float bias[VEC];
                load_floats(a.bias + c, bias);
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    add[e] += bias[e];
            }
#pragma unroll
            for (int j = 0; j < N; j++)
                spread<bf16>(raw[j], in[j]);
#pragma unroll
            for (int i = 0; i < N; i++) {
                float out[VEC], factor[VEC];
                if (DROP)
                    drop_factors(a.drop, drop, i * a.d + c, factor);
#pragma unroll
                for (int e = 0; e < VEC; e++) {
                    out[e] = __fmul_rn(mix[i * N], in[0][e]);
#pragma unroll
                    for (int j = 1; j < N; j++)
                        out[e] = fmaf(mix[i * N + j], in[j][e], out[e]);
                    out[e] = add_dropped<DROP>(out[e], post[i], add[e], DROP ? factor[e] : 1.0f);
                }
                uint4 stored = repack<bf16>(out);
                if (live)
                    store_raw(y + i * a.d + c, stored);
                unpack<bf16>(stored, out);
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    square += out[e] * out[e];
#pragma unroll
                for (int u = 0; u < 2; u++)
#pragma unroll
                    for (int t = 0; t < 3; t++) {
                        uint4 w = frags[(((pass * N + i) * 2 + u) * 3 + t) * 32 + lane];
                        mma_bf16(acc[t], &w.x, u == 0 ? stored.x : stored.z, u == 0 ? stored.y : stored.w);
                    }
            }
        }
        /* Sums 8 k + g of rows 2 q and 2 q + 1: the high halves are sums 0 to 23, the low ones 24 to 47. */
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int64_t r = base + 2 * q + e;
            if (r < end) {
                float *p = s.p + (slice * a.rows + r) * LOGITS + g;
                p[0] = acc[0][e] + acc[1][2 + e];
                p[8] = acc[0][2 + e] + acc[2][e];
                p[16] = acc[1][e] + acc[2][2 + e];
            }
        }
        square += __shfl_xor_sync(0xffffffffu, square, 1);
        square += __shfl_xor_sync(0xffffffffu, square, 2);
        if (q == 0 && live)
            s.squares[slice * a.rows + row] = square;
    }
}

/* A warp per row: p and rho from the slices. */
static __global__ void __launch_bounds__(256) sum_projections(const float *p, const float *squares, int64_t slices, int64_t rows, int64_t k, float *stat, int64_t stride)
{
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= rows || lane > LOGITS)
        return;
    float sum = 0;
#pragma unroll 4
    for (int64_t s = 0; s < slices; s++)
        sum += lane < LOGITS ? p[(s * rows + row) * LOGITS + lane] : squares[s * rows + row];
    stat[row * stride + lane] = lane < LOGITS ? sum : sqrtf(sum / (float)k);
}

int64_t mhc_combine_project_bytes(int64_t rows, int64_t d)
{
    struct carve c = {};
    carve_bytes(&c, operand_bytes(d));
    carve_floats(&c, mhc_slices(d) * rows * LOGITS);
    carve_floats(&c, mhc_slices(d) * rows);
    return c.used;
}

int mhc_combine_project(struct lane *l, const struct combine_args *a, const struct tensor *w, const struct tensor *stat, void *work)
{
    struct carve c = {(char *)work, 0};
    struct slice_fwd s = {};
    uint4 *operands_at = (uint4 *)carve_bytes(&c, operand_bytes(a->d));
    s.c = *a;
    s.operands = operands_at;
    s.slices = mhc_slices(a->d);
    s.width = slice_width(a->d);
    s.run = run_of(a->rows, a->d);
    s.p = carve_floats(&c, s.slices * a->rows * LOGITS);
    s.squares = carve_floats(&c, s.slices * a->rows);
    TRY(make_operands(l, w, a->d, true, operands_at));
    unsigned grid = (unsigned)(s.slices * ceil_div(a->rows, s.run));
    size_t smem = (size_t)(s.width * FRAGS_PER_CHANNEL * 16);
    if (a->drop.info != NULL)
        LAUNCH(l, combine_project<true>, grid, MHC_THREADS, smem, s);
    else
        LAUNCH(l, combine_project<false>, grid, MHC_THREADS, smem, s);
    LAUNCH(l, sum_projections, (unsigned)ceil_div(a->rows, 8), 256, 0, s.p, s.squares, s.slices, a->rows, N * a->d, floats(stat), stat->stride[0]);
    return ST_OK;
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

struct slice_bwd {
    struct mix_bwd_args b;
    const uint4 *operands;
    const bf16 *dp; /* [rows, 3 LOGITS]: high, low, high */
    float *sums;    /* [slices, rows, SUMS] */
    int64_t slices, width, run;
};

/* Column g of the operand is dp of row g / 2: even columns the high halves, against both halves of w; odd ones the low halves,
 * against the high half of w. A lane finds both sums of its row, lane % 4, in neighbouring registers. */
__device__ __forceinline__ void load_dp(const bf16 *dp, int64_t base, int64_t end, int g, int q, uint32_t (&b)[3][2])
{
    int64_t row = min(base + g / 2, end - 1);
    bool low = g % 2 != 0;
    const bf16 *from = dp + row * 3 * LOGITS + (low ? LOGITS : 0) + 2 * q;
#pragma unroll
    for (int piece = 0; piece < 3; piece++) {
        uint32_t v = *(const uint32_t *)(from + 8 * piece);
        b[piece / 2][piece % 2] = v;                                /* depth 8 piece */
        b[(piece + 3) / 2][(piece + 3) % 2] = low ? 0u : v;          /* depth 24 + 8 piece */
    }
}

/* The share of stream i of pass `pass`, channels 8 g to 8 g + 7. */
__device__ __forceinline__ void share_of_w(const uint4 *frags, int pass, int i, int lane, const uint32_t (&b)[3][2], float (&out)[VEC])
{
#pragma unroll
    for (int t = 0; t < 4; t++) {
        float acc[4] = {};
#pragma unroll
        for (int step = 0; step < 3; step++) {
            uint4 w = frags[(((pass * N + i) * 4 + t) * 3 + step) * 32 + lane];
            mma_bf16(acc, &w.x, b[step][0], b[step][1]);
        }
        out[2 * t] = acc[0] + acc[1];
        out[2 * t + 1] = acc[2] + acc[3];
    }
}

template <bool DROP> static __global__ void __launch_bounds__(MHC_THREADS, 2) mix_bwd_slices(const __grid_constant__ struct slice_bwd s)
{
    DYNAMIC_SHARED(uint4, frags, 16);
    const struct mix_bwd_args &a = s.b;
    int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4, passes = (int)s.width / BWD_PASS;
    int64_t slice = blockIdx.x % s.slices, first = blockIdx.x / s.slices * s.run, end = min(first + s.run, a.rows);
    take_operands(frags, s.operands, slice, s.width);
    for (int64_t base = first + (int64_t)threadIdx.x / 32 * 4; base < end; base += WARPS * 4) {
        bool live = base + q < end;
        int64_t row = live ? base + q : end - 1;
        uint32_t dp[3][2];
        load_dp(s.dp, base, end, g, q, dp);
        float rstd = a.rstd[row * a.rstd_stride], m = a.m[row], scale = a.row_scale[row];
        float with_x[N * N] = {}, with_f[N] = {};
        struct drop_row drop = {};
        if (DROP)
            drop = drop_row_of(a.drop, row);
#pragma unroll 1
        for (int pass = 0; pass < passes; pass++) {
            int64_t c = slice * s.width + pass * BWD_PASS + g * VEC;
            float grad[N][VEC], da[VEC] = {};
            {
                struct held y[N];
                float pre[N], gain[VEC], u[VEC];
#pragma unroll
                for (int i = 0; i < N; i++)
                    y[i] = grab<bf16, VEC>(at<bf16>(a.y, row) + i * a.d + c);
                load_floats(at<bf16>(a.dh, row) + c, u);
                load_floats(a.pre + row * a.pre_stride, pre);
                if (a.gain != NULL)
                    load_floats(a.gain + c, gain);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    spread<bf16>(y[i], grad[i]);
#pragma unroll
                    for (int e = 0; e < VEC; e++)
                        da[e] += pre[i] * grad[i][e];
                }
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    da[e] = rstd * (u[e] * (a.gain != NULL ? gain[e] + a.one : 1.0f) - da[e] * m);
                __syncwarp(); /* loads that come later stay behind it: registers are few */
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float w[VEC], v[VEC];
                    struct held dy = {};
                    if (a.dy.data != NULL)
                        dy = grab<bf16, VEC>(at<bf16>(a.dy, row) + i * a.d + c);
                    share_of_w(frags, pass, i, lane, dp, w);
                    spread<bf16>(dy, v);
                    __syncwarp();
#pragma unroll
                    for (int e = 0; e < VEC; e++)
                        grad[i][e] = v[e] + pre[i] * da[e] + w[e] + scale * grad[i][e];
                }
            }
            __syncwarp();
            struct held x[N];
            float f[VEC], df[VEC] = {}, post[N];
#pragma unroll
            for (int j = 0; j < N; j++)
                x[j] = grab<bf16, VEC>(at<bf16>(a.x, row) + j * a.d + c);
            load_floats(at<bf16>(a.f, row) + c, f);
            load_floats(a.post + row * a.post_stride, post);
            if (a.bias != NULL) {
                float bias[VEC];
                load_floats(a.bias + c, bias);
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    f[e] += bias[e];
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                float factor[VEC];
                if (DROP)
                    drop_factors(a.drop, drop, i * a.d + c, factor);
#pragma unroll
                for (int e = 0; e < VEC; e++) {
                    float dropped = DROP ? grad[i][e] * factor[e] : grad[i][e];
                    df[e] += post[i] * dropped;
                    with_f[i] += dropped * f[e];
                }
            }
            if (live)
                store_floats(at<bf16>(a.df, row) + c, df);
#pragma unroll
            for (int j = 0; j < N; j++) {
                float v[VEC], out[VEC] = {}, mix[N]; /* of this stream alone: registers are few */
                spread<bf16>(x[j], v);
#pragma unroll
                for (int i = 0; i < N; i++)
                    mix[i] = a.res[row * a.res_stride + mix_at(a.profile_d, N, i, j)];
#pragma unroll
                for (int i = 0; i < N; i++)
#pragma unroll
                    for (int e = 0; e < VEC; e++) {
                        with_x[i * N + j] += grad[i][e] * v[e];
                        out[e] += mix[i] * grad[i][e];
                    }
                if (live)
                    store_floats(at<bf16>(a.dx, row) + j * a.d + c, out);
            }
        }
        /* Sums over the 8 lanes of a row. */
        fold_sums<N * N / 2, 2>(with_x);
        fold_sums<N / 2, 1>(with_f);
        with_f[0] += __shfl_xor_sync(0xffffffffu, with_f[0], 4);
        if (live) {
            float *to = s.sums + (slice * a.rows + row) * SUMS;
            *(float2 *)(to + 2 * g) = make_float2(with_x[0], with_x[1]);
            if (g % 2 == 0)
                to[N * N + g / 2] = with_f[0];
        }
    }
}

/* A warp per row: dres and dpost from the slices, zeros for pre. */
static __global__ void __launch_bounds__(256) sum_mixes(const __grid_constant__ struct slice_bwd s)
{
    const struct mix_bwd_args &a = s.b;
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    if (row >= a.rows || lane >= SUMS)
        return;
    float sum = 0;
#pragma unroll 4
    for (int64_t k = 0; k < s.slices; k++)
        sum += s.sums[(k * a.rows + row) * SUMS + lane];
    if (lane < N * N) {
        a.dres[row * a.dres_stride + mix_at(a.profile_d, N, lane / N, lane % N)] = sum;
    } else {
        a.dpost[row * a.dpost_stride + lane - N * N] = sum;
        if (a.dpre != NULL)
            a.dpre[row * a.dpre_stride + lane - N * N] = 0;
    }
}

int64_t mhc_mix_bwd_sliced_bytes(int64_t rows, int64_t d)
{
    struct carve c = {};
    carve_bytes(&c, operand_bytes(d));
    carve_floats(&c, mhc_slices(d) * rows * SUMS);
    return c.used;
}

int mhc_mix_bwd_sliced(struct lane *l, const struct mix_bwd_args *a, const struct tensor *w, const bf16 *dp, void *work)
{
    struct carve c = {(char *)work, 0};
    struct slice_bwd s = {};
    uint4 *operands_at = (uint4 *)carve_bytes(&c, operand_bytes(a->d));
    s.b = *a;
    s.operands = operands_at;
    s.dp = dp;
    s.slices = mhc_slices(a->d);
    s.width = slice_width(a->d);
    s.run = run_of(a->rows, a->d);
    s.sums = carve_floats(&c, s.slices * a->rows * SUMS);
    TRY(make_operands(l, w, a->d, false, operands_at));
    unsigned grid = (unsigned)(s.slices * ceil_div(a->rows, s.run));
    size_t smem = (size_t)(s.width * FRAGS_PER_CHANNEL * 16);
    if (a->drop.info != NULL)
        LAUNCH(l, mix_bwd_slices<true>, grid, MHC_THREADS, smem, s);
    else
        LAUNCH(l, mix_bwd_slices<false>, grid, MHC_THREADS, smem, s);
    LAUNCH(l, sum_mixes, (unsigned)ceil_div(a->rows, 8), 256, 0, s);
    return ST_OK;
}
