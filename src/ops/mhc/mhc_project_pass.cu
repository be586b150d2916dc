/* The projection p = x w^T with rho, and dx = dp w + (drho / (K rho)) x, for aligned bf16 streams and up to 24 rows of w: one pass over
 * the streams each, on tensor cores. Both split the fp32 matrix into bf16 halves on the way, so they need no scratch. */
#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/mhc/mhc_cuda.cuh"

enum {
    LOGITS = 24,
    WORKERS = 8,
    ROWS = 64,              /* of a block of the projection */
    BOX = ROWS * 128,       /* bytes: 64 columns of them */
    CHUNK = WORKERS * 64,   /* columns of a stage, 64 for each warp */
    STAGES = 3,
    SUMS = 28,              /* floats of a row in the reduction: projections, squares */
    DX_COLS = 128,
    DX_ROWS = 512,
};

/* Two neighbours as bf16, and what that leaves of them. */
__device__ __forceinline__ void halves(float2 v, uint32_t *high, uint32_t *low)
{
    float2 h = make_float2(rounded<bf16>(v.x), rounded<bf16>(v.y));
    *high = pack_bf16(h.x, h.y);
    *low = pack_bf16(v.x - h.x, v.y - h.y);
}

/* ---- forward: a block has 64 rows, a warp every eighth piece of 64 columns ------------------------------------------------ */

struct project_args {
    const float *w;
    float *p, *rho;
    int64_t w_stride, p_stride, rho_stride, rows, k;
    int n;
};
struct project_shared {
    char box[STAGES][WORKERS][BOX];
    uint64_t full[STAGES], empty[STAGES];
};

#if HOPPER_CODE

/* Rows 8 t + g of w, columns 2 q of each 8 of the 64 from `column` on. */
__device__ __forceinline__ void take_w(const struct project_args &a, int64_t column, int g, int q, float2 (&w)[4][3][2])
{
#pragma unroll
    for (int t = 0; t < 3; t++) {
        const float *from = a.w + (8 * t + g) * a.w_stride + column + 2 * q;
#pragma unroll
        for (int s = 0; s < 8; s++)
            w[s / 2][t][s % 2] = 8 * t + g < a.n && column + 8 * s < a.k ? *(const float2 *)(from + 8 * s) : make_float2(0, 0);
    }
}

static __device__ __forceinline__ void project_work(const struct project_args &a, struct project_shared *s)
{
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4, chunks = (int)((a.k + CHUNK - 1) / CHUNK);
    float acc[4][3][4] = {}, square[4][2] = {};
    float2 next[4][3][2];
    take_w(a, warp * 64, g, q, next);
    for (int c = 0; c < chunks; c++) {
        uint32_t high[4][3][2], low[4][3][2];
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int t = 0; t < 3; t++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    halves(next[k][t][e], &high[k][t][e], &low[k][t][e]);
        take_w(a, (int64_t)(c + 1) * CHUNK + warp * 64, g, q, next);
        barrier_wait(&s->full[c % STAGES], c / STAGES & 1);
        const char *box = s->box[c % STAGES][warp];
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                uint32_t x[4];
                int row = m * 16 + lane % 16;
                load_matrices(x, (const bf16 *)(box + row * 128 + (((2 * k + lane / 16) ^ (row % 8)) << 4)));
#pragma unroll
                for (int t = 0; t < 3; t++)
                    mma_bf16(acc[m][t], x, high[k][t][0], high[k][t][1]);
#pragma unroll
                for (int t = 0; t < 3; t++)
                    mma_bf16(acc[m][t], x, low[k][t][0], low[k][t][1]);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 v = unpack_bf16(x[e]);
                    square[m][e % 2] = fmaf(v.y, v.y, fmaf(v.x, v.x, square[m][e % 2]));
                }
            }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&s->empty[c % STAGES]);
    }
    named_barrier<1, WORKERS * 32>(); /* the boxes are used up */
    float *red = (float *)s->box + warp * ROWS * SUMS;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = m * 16 + g + e / 2 * 8;
#pragma unroll
            for (int t = 0; t < 3; t++)
                red[row * SUMS + 8 * t + 2 * q + e % 2] = acc[m][t][e];
            if (e % 2 == 0) {
                float sum = square[m][e / 2];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (q == 0)
                    red[row * SUMS + LOGITS] = sum;
            }
        }
    named_barrier<1, WORKERS * 32>();
    const float *all = (const float *)s->box;
    for (int v = (int)threadIdx.x; v < ROWS * (LOGITS + 1); v += WORKERS * 32) {
        int row = v / (LOGITS + 1), i = v % (LOGITS + 1);
        int64_t at = (int64_t)blockIdx.x * ROWS + row;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WORKERS; w++)
            sum += all[(w * ROWS + row) * SUMS + i];
        if (at >= a.rows)
            continue;
        if (i == LOGITS)
            a.rho[at * a.rho_stride] = sqrtf(sum / (float)a.k);
        else if (i < a.n)
            a.p[at * a.p_stride + i] = sum;
    }
}

#endif

static __global__ void __launch_bounds__(WORKERS * 32 + 32, 1) project_pass(const __grid_constant__ CUtensorMap x, const __grid_constant__ struct project_args a)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, shared, 1024);
    struct project_shared *s = (struct project_shared *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s->full[i], 1);
            barrier_init(&s->empty[i], WORKERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < WORKERS * 32) {
        project_work(a, s);
    } else if (threadIdx.x == WORKERS * 32) {
        int chunks = (int)((a.k + CHUNK - 1) / CHUNK);
        for (int c = 0; c < chunks; c++) {
            if (c >= STAGES)
                barrier_wait(&s->empty[c % STAGES], (c / STAGES - 1) & 1);
            barrier_expect(&s->full[c % STAGES], WORKERS * BOX);
            for (int b = 0; b < WORKERS; b++) /* columns behind the end come as zeros */
                tma_load_2d(s->box[c % STAGES][b], &x, c * CHUNK + b * 64, (int)blockIdx.x * ROWS, &s->full[c % STAGES]);
        }
    }
#endif
}

/* bf16, at most 24 rows of w, whole vectors, something to do. */
bool mhc_project_passes(const struct lane *l, const struct mhc_project_fwd_args *b)
{
    return cuda_of(l)->hopper && b->x.dtype == DT_BF16 && b->w.dim[0] <= LOGITS && b->x.dim[0] > 0 && b->x.dim[1] >= 64 && aligned16(&b->x) && aligned16(&b->w);
}

int mhc_project_pass(struct lane *l, const struct mhc_project_fwd_args *b)
{
    CUtensorMap x;
    struct project_args a = {(const float *)b->w.data, (float *)b->p.data, (float *)b->rho.data, b->w.stride[0], b->p.stride[0], b->rho.stride[0],
                             b->x.dim[0], b->x.dim[1], (int)b->w.dim[0]};
    TRY(tensor_map_2d(l, &x, b->x.data, a.rows, a.k, b->x.stride[0], ROWS));
    NEEDS_SMEM(l, project_pass, sizeof(struct project_shared));
    LAUNCH(l, project_pass, (unsigned)ceil_div(a.rows, ROWS), WORKERS * 32 + 32, sizeof(struct project_shared), x, a);
    return ST_OK;
}

/* ---- dx: a block has 128 columns and keeps w of them as operands; a warp takes 16 rows at a time -------------------------------- */

struct project_dx_args {
    struct view dp, drho, x, rho, dx;
    const float *w;
    int64_t w_stride, rows, k;
    int n;
    bool acc;
};
/* Column 2 q' + e of tile t of a group of 32 is channel 8 q' + 2 t + e, so that a lane finds 8 neighbours in its results. */
static __global__ void __launch_bounds__(256) project_dx_pass(const __grid_constant__ struct project_dx_args a)
{
    __shared__ uint32_t frags[DX_COLS / 32][4][6][32];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int64_t first = (int64_t)blockIdx.x * DX_COLS, end = min((int64_t)(blockIdx.y + 1) * DX_ROWS, a.rows);
    for (int i = warp; i < DX_COLS / 32 * 4; i += 8) {
        int64_t c = first + i / 4 * 32 + g / 2 * 8 + i % 4 * 2 + g % 2;
#pragma unroll
        for (int k = 0; k < 3; k++) {
            int row = 8 * k + 2 * q;
            float2 v = make_float2(c < a.k && row < a.n ? a.w[row * a.w_stride + c] : 0.0f, c < a.k && row + 1 < a.n ? a.w[(row + 1) * a.w_stride + c] : 0.0f);
            halves(v, &frags[i / 4][i % 4][k][lane], &frags[i / 4][i % 4][3 + k][lane]);
        }
    }
    __syncthreads();
    for (int64_t base = (int64_t)blockIdx.y * DX_ROWS + warp * 16; base < end; base += 8 * 16) {
        uint32_t high[6], low[6];
        float scale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t row = min(base + g + 8 * half, a.rows - 1);
            const float *dp = at<float>(a.dp, row);
            float rho = *at<float>(a.rho, row);
            scale[half] = rho == 0 ? 0.0f : *at<float>(a.drho, row) / ((float)a.k * rho);
#pragma unroll
            for (int k = 0; k < 3; k++) {
                int i = 8 * k + 2 * q;
                halves(make_float2(i < a.n ? dp[i] : 0.0f, i + 1 < a.n ? dp[i + 1] : 0.0f), &high[2 * k + half], &low[2 * k + half]);
            }
        }
#pragma unroll 2
        for (int c = 0; c < DX_COLS / 32; c++) {
            float acc[4][4] = {};
            int64_t col = first + c * 32 + q * 8;
            bool live[2] = {base + g < end && col < a.k, base + g + 8 < end && col < a.k};
            uint4 x[2], old[2] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                x[half] = live[half] ? load_raw(at<bf16>(a.x, base + g + 8 * half) + col) : zero_raw();
                if (a.acc && live[half])
                    old[half] = load_raw(at<bf16>(a.dx, base + g + 8 * half) + col);
            }
#pragma unroll
            for (int part = 0; part < 3; part++) /* high high, low high, high low */
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    const uint32_t *d = part == 1 ? low : high;
                    const uint32_t(*w)[32] = frags[c][t] + (part == 2 ? 3 : 0);
                    mma_bf16(acc[t], d, w[0][lane], w[1][lane]);
                    mma_bf16_k8(acc[t], d[4], d[5], w[2][lane]);
                }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float v[8], out[8];
                unpack<bf16>(x[half], v);
                unpack<bf16>(old[half], out);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    out[e] += acc[e / 2][2 * half + e % 2] + scale[half] * v[e];
                if (live[half])
                    store_raw(at<bf16>(a.dx, base + g + 8 * half) + col, repack<bf16>(out));
            }
        }
    }
}

bool mhc_project_dx_passes(const struct mhc_project_bwd_args *b)
{
    return b->x.dtype == DT_BF16 && b->w.dim[0] <= LOGITS && aligned16(&b->x) && aligned16(&b->dx);
}

int mhc_project_dx_pass(struct lane *l, const struct mhc_project_bwd_args *b)
{
    struct project_dx_args a = {view_of(&b->dp), view_of(&b->drho), view_of(&b->x), view_of(&b->rho), view_of(&b->dx), (const float *)b->w.data,
                                b->w.stride[0], b->x.dim[0], b->x.dim[1], (int)b->w.dim[0], b->acc_dx};
    LAUNCH(l, project_dx_pass, dim3((unsigned)ceil_div(a.k, DX_COLS), (unsigned)ceil_div(a.rows, DX_ROWS)), 256, 0, a);
    return ST_OK;
}
