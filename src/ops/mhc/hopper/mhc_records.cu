/* The small kernels round the boundary's large backward pass (mhc_pass_bwd.cu), which deal with rows: coefficients and
 * their gradients before it, sums over blocks of channels after it. */
#include "ops/mhc/hopper/mhc_reduce.cuh"

enum {
    ROW_THREADS = 128,
    KEPT = 32, /* iterations of Sinkhorn whose divisors are kept for the backward pass */
};

/* What the records of rows are made from. */
struct record_args {
    struct view stat, coef, dcoef, dz;
    struct gate_params by;
    int64_t rows, k;
    float *records;
    const float *dz_ready; /* [rows, N]: dz of post and res, if they were made before; or NULL */
    struct rule_args rule;
};
static struct record_args record_args_of(const struct mhc_boundary_bwd_args *b, float *records)
{
    return {.stat = view_of(&b->stat),
            .coef = view_of(&b->coef),
            .dcoef = view_of(&b->dcoef),
            .dz = view_of(&b->dz),
            .by = gate_params_of(b),
            .rows = b->dx.dim[0],
            .k = b->dx.dim[1],
            .records = records,
            .rule = rule_of(b->rule)};
}

/* Blocks of the small kernels for so many items. */
__host__ __device__ __forceinline__ int64_t blocks_for(int64_t items)
{
    return (items + ROW_THREADS - 1) / ROW_THREADS;
}

/* w as the left operand of dp w, 16 channels in MHC_FRAG bytes; item: lane, tile of 16, stream,
 * block of 64 channels. */
static __device__ void backward_operand(const struct view &w, int64_t d, char *out, int64_t item)
{
    int lane = (int)(item % 32), g = lane / 4, q = lane % 4, t = (int)(item / 32 % 4),
        stream = (int)(item / 128 % CL_N);
    int64_t stride = w.stride;
    const float *from = (const float *)w.data + stream * d + item / 512 * 64 + 8 * piece_of(g) + 2 * t;
    uint32_t r[6];
    UNROLLED (k, 6) {
        const float *at = from + (8 * (k / 2) + 2 * q) * stride + k % 2;
        r[k] = pack_bf16(at[0], at[stride]);
    }
    char *to = out + item / 32 * MHC_FRAG;
    *(uint4 *)(to + lane * 16) = make_uint4(r[0], r[1], r[2], r[3]);
    *(uint2 *)(to + 512 + lane * 8) = make_uint2(r[4], r[5]);
}

INLINE float4 scaled4(float4 v, float by) { return make_float4(v.x * by, v.y * by, v.z * by, v.w * by); }
/* What does not wait for the reduction pass, by four lanes a row: all but m, scale and pre's dz and dp. The sum
 * that scale comes from is left in its place. */
static __device__ void row_record(const struct record_args &a, int64_t item, float2 *kept)
{
    int64_t row = min(item / 4, a.rows - 1);
    int lane = (int)(item % 4);
    const float *p = at<float>(a.stat, row), *up = a.dcoef.data == NULL ? NULL : at<float>(a.dcoef, row);
    float q = 1.0f / (p[CL_LOGITS] + (float)MHC_EPS), by_post = *a.by.alpha[1], by_res = *a.by.alpha[2], z[CL_N],
          g[CL_N] = {}, post = 0, sum = 0;
    if (up != NULL) {
        float sig = precise_sigmoid(q * p[CL_N + lane] * by_post + a.by.beta[CL_N + lane]);
        post = 2 * up[CL_N + lane] * sig * (1 - sig);
        UNROLLED (j, CL_N) {
            int k = 2 * CL_N + CL_N * lane + j;
            z[j] = q * p[k] * by_res + a.by.beta[k];
            g[j] = up[k];
        }
        quad_gradient(z, g, lane, a.rule.iterations, a.rule.profile_d, kept, ROW_THREADS, KEPT);
    }
    UNROLLED (j, CL_N)
        sum += g[j] * by_res * p[2 * CL_N + CL_N * lane + j];
    sum = quad_sum(sum + post * by_post * p[CL_N + lane]);
    if (item / 4 >= a.rows)
        return;
    float *record = a.records + row * MHC_RECORD, *dz = at<float>(a.dz, row);
    bf16 *dp = (bf16 *)(record + REC_DP);
    uint2 first = split_pair(g[0] * by_res * q, g[1] * by_res * q),
          second = split_pair(g[2] * by_res * q, g[3] * by_res * q), one = split_pair(post * by_post * q, 0);
    dz[CL_N + lane] = post;
    *(float4 *)(dz + 2 * CL_N + CL_N * lane) = make_float4(g[0], g[1], g[2], g[3]);
    *(uint2 *)(dp + 2 * CL_N + CL_N * lane) = make_uint2(first.x, second.x);
    *(uint2 *)(dp + CL_LOGITS + 2 * CL_N + CL_N * lane) = make_uint2(first.y, second.y);
    ((uint16_t *)dp)[CL_N + lane] = (uint16_t)one.x;
    ((uint16_t *)dp)[CL_LOGITS + CL_N + lane] = (uint16_t)one.y;
    if (lane < 2) /* of pre, for the time being */
        *(uint2 *)(dp + lane * CL_LOGITS) = make_uint2(0, 0);
    else if (lane == 2)
        *(float4 *)(record + REC_PRE) = scaled4(*(const float4 *)at<float>(a.coef, row), p[CL_LOGITS + 1]);
    else
        *(float4 *)(record + REC_RSTD) = make_float4(p[CL_LOGITS + 1], 0, sum, 0);
}

struct prepare {
    struct record_args record;
    struct view w;
    char *operands;
    int64_t d, count; /* of lanes of operands */
};
/* Rows first: they take longer. */
static __global__ void __launch_bounds__(ROW_THREADS) prepare_rows(const __grid_constant__ struct prepare a)
{
    __shared__ float2 kept[KEPT][ROW_THREADS];
    int64_t blocks = blocks_for(4 * a.record.rows), item = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if ((int64_t)blockIdx.x < blocks)
        row_record(a.record, item, &kept[0][threadIdx.x]);
    else if ((item -= blocks * ROW_THREADS) < a.count)
        backward_operand(a.w, a.d, a.operands, item);
}

/* The rest, from the dots of all blocks of channels, by four lanes a row, each for one logit of pre. */
static __global__ void __launch_bounds__(ROW_THREADS)
    close_records(const __grid_constant__ struct record_args a, const float *dots, int ranks)
{
    int64_t item = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x, row = min(item / 4, a.rows - 1);
    int lane = (int)(item % 4);
    const float *p = at<float>(a.stat, row);
    float *record = a.records + row * MHC_RECORD;
    float rho = p[CL_LOGITS], q = 1.0f / (rho + (float)MHC_EPS), rstd = record[REC_RSTD], pre = record[REC_PRE + lane],
          rest = record[REC_SCALE], by = *a.by.alpha[0];
    float above = number_or_zero(a.dcoef, row, lane), sig = precise_sigmoid(q * p[lane] * by + a.by.beta[lane]),
          with_u = 0, with_a = 0;
#pragma unroll 8
    for (int r = 0; r < ranks; r++) {
        const float *from = dots + (r * a.rows + row) * MHC_REDUCE_DOTS + lane;
        with_u += from[0];
        with_a += from[CL_N];
    }
    float m = quad_sum(pre * with_u) / (float)(a.k / CL_N);
    float v = (above + rstd * (with_u - m * with_a)) * sig * (1 - sig), sum = rest + quad_sum(v * by * p[lane]);
    if (item / 4 >= a.rows)
        return;
    uint2 dp = split_pair(v * by * q, 0);
    uint16_t *to = (uint16_t *)(record + REC_DP) + lane;
    to[0] = (uint16_t)dp.x;
    to[CL_LOGITS] = (uint16_t)dp.y;
    float *dz = at<float>(a.dz, row);
    dz[lane] = v;
    if (a.dz_ready != NULL) {
        const float *from = a.dz_ready + row * CL_LOGITS;
        dz[CL_N + lane] = from[CL_N + lane];
        *(float4 *)(dz + 2 * CL_N + CL_N * lane) = *(const float4 *)(from + 2 * CL_N + CL_N * lane);
    }
    if (lane == 0)
        record[REC_M] = m;
    if (lane == 1)
        record[REC_SCALE] = rho + a.rule.root_less == 0 ? 0.0f : -q * q * sum / ((float)a.k * (rho + a.rule.root_less));
}

/* dcoef_in: zeros for pre, then the sums over blocks in order; an item is 4 numbers. */
INLINE void sum_ranks(const struct mhc_after_pass &a, int64_t item)
{
    int64_t row = item / 6;
    int v = (int)(item % 6);
    if (row >= a.rows)
        return;
    float4 sum = make_float4(0, 0, 0, 0);
    if (v > 0) {
#pragma unroll 8
        for (int r = 0; r < a.ranks; r++)
            sum = add4(sum, *(const float4 *)(a.mixes + (r * a.rows + row) * MHC_MIXES + (v - 1) * 4));
    }
    *(float4 *)(at<float>(a.dcoef, row) + v * 4) = sum;
}
/* Blocks for dcoef_in, then for dw's rows of pre, then one for sums over rows. */
static __global__ void __launch_bounds__(ROW_THREADS) finish_pass(const __grid_constant__ struct mhc_after_pass a)
{
    int64_t blocks = blocks_for(6 * a.rows), item = (int64_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if ((int64_t)blockIdx.x < blocks) {
        sum_ranks(a, item);
    } else if ((item -= blocks * ROW_THREADS) < CL_N * a.k) {
        at<float>(a.products, item / a.k)[item % a.k] = sum_of(a.dw_parts + item, a.lines, CL_N * a.k);
    } else if ((item -= CL_N * a.k) < 2 * CL_LOGITS) {
        double sum = 0;
        for (int i = 0; i < MHC_SPARE; i++)
            sum += a.row_parts[i * 2 * CL_LOGITS + item];
        at<float>(a.products, CL_LOGITS)[item] = (float)sum;
    }
}

int mhc_prepare_rows(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records, uint4 *operands,
                     struct view dz)
{
    struct prepare p = {.record = record_args_of(b, records),
                        .w = view_of(&b->w),
                        .operands = (char *)operands,
                        .d = b->dx.dim[1] / CL_N,
                        .count = b->dx.dim[1] / 64 * 128};
    p.record.dz = dz;
    LAUNCH(l, prepare_rows, (unsigned)(blocks_for(4 * p.record.rows) + blocks_for(p.count)), ROW_THREADS, 0, p);
    return ST_OK;
}
int mhc_close_records(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records, const float *dots,
                      const float *dz_ready)
{
    struct record_args a = record_args_of(b, records);
    a.dz_ready = dz_ready;
    LAUNCH(l, close_records, (unsigned)blocks_for(4 * a.rows), ROW_THREADS, 0, a, dots, (int)(a.k / CL_N / CL_COLS));
    return ST_OK;
}
int mhc_finish_pass(struct lane *l, const struct mhc_after_pass *a)
{
    LAUNCH(l, finish_pass,
           (unsigned)(blocks_for(6 * a->rows) + (a->dw_parts == NULL ? 0 : blocks_for(CL_N * a->k) + 1)), ROW_THREADS,
           0, *a);
    return ST_OK;
}
