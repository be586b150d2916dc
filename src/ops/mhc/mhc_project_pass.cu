/* dx (+)= dp w + (drho / (K rho)) x for aligned bf16 streams and up to 24 rows of w, where mhc_project_back.cu cannot (another GPU than Hopper, or dx is added
 * to): one pass over the streams on tensor cores, which splits the fp32 matrices into bf16 halves on the way. */
#include "ops/cuda/mma.cuh"
#include "ops/mhc/mhc_cuda.cuh"

enum {
    LOGITS = 24,
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

/* ---- a block has 128 columns and keeps w of them as operands; a warp takes 16 rows at a time -------------------------------- */

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
