/* ssd, CUDA: per-row numbers (ssd_prep) and the running state over pieces (ssd_scan); see ssd_cuda.cuh. */
#include "ops/ssd/ssd_cuda.cuh"

enum { PREP_HEADS = 8, PREP_THREADS = 32 * PREP_HEADS };

/* softplus clamped, and its slope (0 where clamped). */
__device__ __forceinline__ float delta_of(const struct ssd_shape &s, float raw, float *slope)
{
    float soft = raw > 20.0f ? raw : log1pf(expf(raw));
    bool low = soft<s.dt_min, high = s.dt_max> 0 && soft > s.dt_max;
    *slope = low || high ? 0.0f : raw > 20.0f ? 1.0f : 1.0f / (1.0f + expf(-raw));
    return low ? s.dt_min : high ? s.dt_max : soft;
}

/* Lane l holds rows l R .. l R + R - 1; the sums of all rows before the lane's are added, in a fixed order. */
__device__ __forceinline__ double sum_before(double own)
{
    int lane = threadIdx.x % 32;
    double sum = own;
    for (int d = 1; d < 32; d <<= 1) {
        double other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0.0;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    return lane > 0 ? before : 0.0;
}
__device__ __forceinline__ int max_before(int own)
{
    int lane = threadIdx.x % 32, top = own;
    for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(0xffffffffu, top, d);
        top = lane >= d ? max(top, other) : top;
    }
    int before = __shfl_up_sync(0xffffffffu, top, 1);
    return lane > 0 ? before : -1;
}

/* A lane's neighbouring numbers, in one store. */
template <int R> __device__ __forceinline__ void put_numbers(float *to, const float *v)
{
    static_assert(R == 2 || R == 4, "eight or sixteen bytes");
    if (R == 4)
        *(float4 *)to = make_float4(v[0], v[1], v[R - 2], v[R - 1]);
    else
        *(float2 *)to = make_float2(v[0], v[1]);
}

/* A block: PREP_HEADS heads of one piece, a warp each. */
template <typename T, int PAD>
static __global__ void __launch_bounds__(PREP_THREADS)
    prep_kernel(struct ssd_shape s, struct rows_view dt, const float *A_log, const float *dt_bias, const int *doc_start,
                int64_t doc_stride, struct ssd_rows r)
{
    constexpr int R = PAD / 32;
    __shared__ float raw[PREP_HEADS][PAD + 1];
    int b = blockIdx.x / s.pieces, u = blockIdx.x % s.pieces, h0 = blockIdx.y * PREP_HEADS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = h0 + warp;
    struct span sp = span_of(s, u);
    constexpr int EACH = PAD * PREP_HEADS / PREP_THREADS;
    float loaded[EACH]; /* all loads are under way before the first is used */
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int i = (threadIdx.x + e * PREP_THREADS) / PREP_HEADS, k = threadIdx.x % PREP_HEADS;
        loaded[e] = i < sp.n && h0 + k < s.heads ? to_float(row_of<T>(dt, b, sp.first + i, 0)[h0 + k]) : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        raw[threadIdx.x % PREP_HEADS][(threadIdx.x + e * PREP_THREADS) / PREP_HEADS] = loaded[e];
    __syncthreads();
    if (h >= s.heads)
        return;
    float rate = -expf(A_log[h]), bias = dt_bias[h], delta[R], slope[R];
    double sum[R], total = 0;
    int low[R], top = -1;
#pragma unroll
    for (int k = 0; k < R; k++) {
        int i = lane * R + k;
        slope[k] = 0;
        delta[k] = i < sp.n ? delta_of(s, raw[warp][i] + bias, &slope[k]) : 0.0f;
        total += (double)delta[k] * (double)rate;
        sum[k] = total;
        if (doc_start != NULL && i < sp.n && doc_start[b * doc_stride + sp.first + i] == sp.first + i)
            top = i;
        low[k] = top;
    }
    double before = sum_before(total);
    int low_before = max_before(top);
#pragma unroll
    for (int k = 0; k < R; k++) {
        sum[k] += before;
        low[k] = max(low[k], low_before);
    }
    double end = __shfl_sync(0xffffffffu, sum[R - 1], 31);
    int low_end = __shfl_sync(0xffffffffu, low[R - 1], 31);
    int64_t at = rows_at(s, b, u, h), mine = at + lane * R;
    float from_start[R], to_end[R], log2_sum[R];
#pragma unroll
    for (int k = 0; k < R; k++) {
        from_start[k] = low[k] < 0 ? expf((float)sum[k]) : 0.0f;
        to_end[k] = lane * R + k >= low_end ? expf((float)(end - sum[k])) : 0.0f;
        log2_sum[k] = (float)(sum[k] * 1.4426950408889634);
        if (r.s == NULL)
            r.s_exact[mine + k] = sum[k];
        if (h == 0)
            r.low[((int64_t)b * s.pieces + u) * PAD + lane * R + k] = low[k];
    }
    put_numbers<R>(r.delta + mine, delta);
    put_numbers<R>(r.slope + mine, slope);
    put_numbers<R>(r.from_start + mine, from_start);
    put_numbers<R>(r.to_end + mine, to_end);
    if (r.s != NULL)
        put_numbers<R>(r.s + mine, log2_sum);
    if (lane == 0)
        r.decay[at / PAD] = low_end < 0 ? expf((float)end) : 0.0f;
}

int ssd_prep(struct lane *l, const struct ssd_shape *s, const struct ssd_inputs *in, const struct ssd_rows *r)
{
    struct rows_view dt = rows_view_of(in->dt);
    const int *doc = (const int *)in->doc_start->data;
    dim3 grid((unsigned)(s->batch * s->pieces), (unsigned)ceil_div(s->heads, PREP_HEADS));
    const float *A_log = (const float *)in->A_log->data, *dt_bias = (const float *)in->dt_bias->data;
    BY_REAL(in->dt->dtype, T, {
        if (s->pad == SSD_ROWS)
            LAUNCH(l, (prep_kernel<T, SSD_ROWS>), grid, PREP_THREADS, 0, *s, dt, A_log, dt_bias, doc,
                   in->doc_start->stride[0], *r);
        else
            LAUNCH(l, (prep_kernel<T, SSD_PLAIN_ROWS>), grid, PREP_THREADS, 0, *s, dt, A_log, dt_bias, doc,
                   in->doc_start->stride[0], *r);
    });
    return ST_OK;
}

/* ---- the running state ----------------------------------------------------------------------- */

/* A block owns one head of one sequence; warp w holds two tiles of 16 rows of the state from row 32w, all their
 * columns, so that what it reads of u serves both. */
enum { SCAN_THREADS = 128, SCAN_TILES = 2, P_TILES = SSD_P / 8 };
struct scan_stage {
    bf16 u[P_TILE], v[N_TILE];
    float weight[SSD_ROWS], delta[SSD_ROWS];
};

template <bool REVERSE>
__device__ __forceinline__ void scan_load(const struct ssd_scan_args &a, struct scan_stage *to, int b, int h, int u)
{
    struct span sp = span_of(a.s, u);
    int64_t at = rows_at(a.s, b, u, h);
    load_tile<SSD_P, SCAN_THREADS>(to->u, row_of<bf16>(a.u, b, sp.first, h), a.u.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_N, SCAN_THREADS>(to->v, row_of<bf16>(a.v, b, sp.first, h / a.s.per_group), a.v.row, sp.n, a.s.n,
                                   a.vec);
    load_numbers(to->weight, (REVERSE ? a.r.from_start : a.r.to_end) + at, 0);
    if (!REVERSE)
        load_numbers(to->delta, a.r.delta + at, 32);
    copies_commit();
}

template <typename T>
__device__ __forceinline__ void state_read(float (*acc)[4], const T *state, int64_t stride, int first, int n, int p)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < P_TILES; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = first + g + e / 2 * 8, c = k * 8 + 2 * t + e % 2;
            acc[k][e] = row < n && c < p ? to_float(state[row * stride + c]) : 0.0f;
        }
}
__device__ __forceinline__ void state_store(const float (*acc)[4], const struct state_view &v, int b, int u, int h,
                                            int row, int n, int cols, bool vec)
{
    bf16 *to = state_of<bf16>(v, b, u, h) + row * v.row;
    store_rows<P_TILES>(acc, row < n ? to : NULL, row + 8 < n ? to + 8 * v.row : NULL, cols, vec);
}

template <bool REVERSE>
__device__ __forceinline__ void scan_block(float (*acc)[P_TILES][4], const struct scan_stage *in, int first, int k)
{
    int t = threadIdx.x % 4;
    uint32_t a[SCAN_TILES][4], b[4];
    float2 w0 = *(const float2 *)(in->weight + k * 16 + 2 * t), w1 = *(const float2 *)(in->weight + k * 16 + 2 * t + 8);
    if (!REVERSE) {
        float2 d0 = *(const float2 *)(in->delta + k * 16 + 2 * t),
               d1 = *(const float2 *)(in->delta + k * 16 + 2 * t + 8);
        w0 = make_float2(w0.x * d0.x, w0.y * d0.y);
        w1 = make_float2(w1.x * d1.x, w1.y * d1.y);
    }
#pragma unroll
    for (int m = 0; m < SCAN_TILES; m++) {
        frag_a_t(a[m], in->v + k * 16 * N_ROW + first + m * 16, N_ROW);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 v = unpack_bf16(a[m][e]), w = e < 2 ? w0 : w1;
            a[m][e] = pack_bf16(v.x * w.x, v.y * w.y);
        }
    }
#pragma unroll
    for (int q = 0; q < P_TILES / 2; q++) {
        frag_b_t(b, in->u + k * 16 * P_ROW + q * 16, P_ROW);
#pragma unroll
        for (int m = 0; m < SCAN_TILES; m++) {
            mma_bf16(acc[m][2 * q], a[m], b[0], b[1]);
            mma_bf16(acc[m][2 * q + 1], a[m], b[2], b[3]);
        }
    }
}

/* A full piece is unrolled, so that loads of the next block overlap the products of one. */
template <bool REVERSE>
__device__ __forceinline__ void scan_products(float (*acc)[P_TILES][4], const struct scan_stage *in, int first,
                                              int blocks)
{
    if (blocks == SSD_ROWS / 16) {
#pragma unroll
        for (int k = 0; k < SSD_ROWS / 16; k++)
            scan_block<REVERSE>(acc, in, first, k);
    } else {
#pragma unroll 1
        for (int k = 0; k < blocks; k++)
            scan_block<REVERSE>(acc, in, first, k);
    }
}

template <bool REVERSE>
static __global__ void __launch_bounds__(SCAN_THREADS, 2) scan_kernel(const __grid_constant__ struct ssd_scan_args a)
{
    DYNAMIC_SHARED(char, shared, 16);
    struct scan_stage *stage = (struct scan_stage *)shared;
    int b = blockIdx.x / a.s.heads, h = blockIdx.x % a.s.heads, first = threadIdx.x / 32 * 16 * SCAN_TILES;
    int row = first + threadIdx.x % 32 / 4;
    bool mine = first < a.s.n;
    float acc[SCAN_TILES][P_TILES][4] = {};
    if (a.first.data != NULL && !(a.start != NULL && *a.start == 0)) {
#pragma unroll
        for (int m = 0; m < SCAN_TILES; m++)
            state_read(acc[m], state_of<float>(a.first, b, 0, h), a.first.row, first + m * 16, a.s.n, a.s.p);
    }
    float decay = 0, next_decay = 0;
    const float *decays = a.r.decay + ((int64_t)b * a.s.heads + h) * a.s.pieces;
    int last_piece = REVERSE ? 0 : a.s.pieces - 1, step = REVERSE ? -1 : 1;
    if (a.s.pieces > 0) {
        scan_load<REVERSE>(a, &stage[0], b, h, a.s.pieces - 1 - last_piece);
        next_decay = decays[a.s.pieces - 1 - last_piece];
    }
    for (int k = 0; k < a.s.pieces; k++) {
        int u = REVERSE ? a.s.pieces - 1 - k : k;
        copies_wait<0>();
        __syncthreads(); /* this stage is there, and no thread reads the other any more */
        decay = next_decay;
        if (u != last_piece) {
            scan_load<REVERSE>(a, &stage[(k + 1) % 2], b, h, u + step);
            next_decay = decays[u + step];
        }
        if (mine) {
            bool opens = u % a.s.per_chunk == 0;
#pragma unroll
            for (int m = 0; m < SCAN_TILES; m++) {
                int c = u / a.s.per_chunk;
                if (a.given.data != NULL && opens)
                    state_read(acc[m], state_of<bf16>(a.given, b, c, h), a.given.row, first + m * 16, a.s.n, a.s.p);
                if (a.by_piece.data != NULL)
                    state_store(acc[m], a.by_piece, b, u, h, row + m * 16, a.s.n, a.piece_cols, a.piece_vec);
                if (a.by_chunk.data != NULL && opens)
                    state_store(acc[m], a.by_chunk, b, c, h, row + m * 16, a.s.n, a.s.p, a.vec);
#pragma unroll
                for (int q = 0; q < P_TILES; q++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        acc[m][q][e] = decay == 0.0f ? 0.0f : acc[m][q][e] * decay;
            }
            scan_products<REVERSE>(acc, &stage[k % 2], first, (span_of(a.s, u).n + 15) / 16);
        }
    }
    if (a.last.data == NULL)
        return;
    float *last = state_of<float>(a.last, b, 0, h);
#pragma unroll
    for (int m = 0; m < SCAN_TILES; m++)
#pragma unroll
        for (int q = 0; q < P_TILES; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int n = row + m * 16 + e / 2 * 8, c = q * 8 + 2 * (threadIdx.x % 4) + e % 2;
                if (n < a.s.n && c < a.s.p)
                    last[n * a.last.row + c] = acc[m][q][e];
            }
}

int ssd_scan(struct lane *l, const struct ssd_scan_args *a, bool reverse)
{
    int bytes = 2 * (int)sizeof(struct scan_stage);
    dim3 grid((unsigned)(a->s.batch * a->s.heads));
    if (reverse) {
        NEEDS_SMEM(l, scan_kernel<true>, bytes);
        LAUNCH(l, scan_kernel<true>, grid, SCAN_THREADS, bytes, *a);
    } else {
        NEEDS_SMEM(l, scan_kernel<false>, bytes);
        LAUNCH(l, scan_kernel<false>, grid, SCAN_THREADS, bytes, *a);
    }
    return ST_OK;
}
