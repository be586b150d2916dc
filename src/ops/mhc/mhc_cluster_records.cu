/* The boundary backward in clusters: what is known of a row before the pass, by a thread for each: the way back through Sinkhorn and the gates of
 * post, dz and dp of both, and all coefficients in the form in which the pass wants them. See mhc_cluster_bwd.cu. */
#include "ops/mhc/mhc_cluster_bwd.cuh"

/* The parts of a row's record that come from what the two sublayers were opened with. */
static __device__ __forceinline__ void record_coefficients(const struct record_args &a, int64_t row, float rstd, float *record)
{
    float pre[CL_N], post[CL_N], res[CL_N * CL_N], mix[CL_N * CL_N];
    load_floats(a.coef + row * a.coef_stride, pre);
    load_floats(a.coef_in + row * CL_LOGITS + CL_N, post);
    load_floats(a.coef_in + row * CL_LOGITS + 2 * CL_N, res);
#pragma unroll
    for (int i = 0; i < CL_N; i++) {
        pre[i] *= rstd;
#pragma unroll
        for (int j = 0; j < CL_N; j++)
            mix[i * CL_N + j] = a.profile_d ? res[j * CL_N + i] : res[i * CL_N + j];
    }
    store_floats(record + REC_PRE, pre);
    store_floats(record + REC_POST, post);
    store_floats(record + REC_MIX, mix);
#pragma unroll
    for (int n = 0; n < 2 * (CL_N + 1); n += 2) {
        uint2 words[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int pair = (n + e) / (CL_N + 1), j = (n + e) % (CL_N + 1);
            words[e] = j < CL_N ? split_pair(mix[2 * pair * CL_N + j % CL_N], mix[(2 * pair + 1) * CL_N + j % CL_N]) : split_pair(post[2 * pair], post[2 * pair + 1]);
        }
        store_raw(record + REC_OPERANDS + 2 * n, make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
    }
}
/* A thread for each row, and rows of zeros up to a whole tile. */
static __global__ void __launch_bounds__(64) cluster_records(const __grid_constant__ struct record_args a)
{
    int64_t row = (int64_t)blockIdx.x * 64 + threadIdx.x;
    if (row >= (a.rows + TOKENS - 1) / TOKENS * TOKENS)
        return;
    float *record = a.records + row * RECORD;
    if (row >= a.rows) {
        for (int k = 0; k < RECORD; k += 4)
            store_raw(record + k, zero_raw());
        return;
    }
    const float *p = a.stat + row * a.stat_stride, *up = a.dcoef == NULL ? NULL : a.dcoef + row * a.dcoef_stride;
    float *dz = a.dz + row * a.dz_stride, rho = p[CL_LOGITS], q = 1.0f / (rho + (float)MHC_EPS), scale[3] = {*a.a_pre, *a.a_post, *a.a_res};
    float g[CL_N * CL_N], dps[CL_LOGITS] = {}, rest = 0, slope[CL_N], base[CL_N], by_p[CL_N], post[CL_N];
    res_gradient(p + 2 * CL_N, q, scale[2], a.beta + 2 * CL_N, up == NULL ? NULL : up + 2 * CL_N, g, a.iterations, a.profile_d);
#pragma unroll
    for (int k = 0; k < CL_N; k++) {
        float sig = precise_sigmoid(q * p[k] * scale[0] + a.beta[k]);
        slope[k] = sig * (1 - sig);
        base[k] = up == NULL ? 0.0f : up[k] * slope[k];
        by_p[k] = scale[0] * p[k];
        sig = precise_sigmoid(q * p[CL_N + k] * scale[1] + a.beta[CL_N + k]);
        post[k] = up == NULL ? 0.0f : 2 * up[CL_N + k] * sig * (1 - sig);
    }
#pragma unroll
    for (int k = CL_N; k < CL_LOGITS; k++) {
        float by = scale[k < 2 * CL_N ? 1 : 2], v = k < 2 * CL_N ? post[k - CL_N] : g[k - 2 * CL_N];
        dps[k] = v * by * q;
        rest += v * by * p[k];
    }
    store_floats(dz + CL_N, post);
    store_floats(dz + 2 * CL_N, g);
    float rstd = p[CL_LOGITS + 1], row_wide[4] = {rstd, rest, rho == 0 ? 0.0f : -q * q / ((float)a.k * rho), scale[0] * q};
    record_coefficients(a, row, rstd, record);
    store_floats(record + REC_RSTD, row_wide);
    store_floats(record + REC_SLOPE, slope);
    store_floats(record + REC_BASE, base);
    store_floats(record + REC_P, by_p);
#pragma unroll
    for (int k = 0; k < CL_LOGITS; k += 4) {
        uint2 pair[2] = {split_pair(dps[k], dps[k + 1]), split_pair(dps[k + 2], dps[k + 3])};
        store_raw(record + REC_DP + k, make_uint4(pair[0].x, pair[0].y, pair[1].x, pair[1].y));
    }
}

int mhc_cluster_records(struct lane *l, const struct mhc_boundary_bwd_args *b, float *records)
{
    struct record_args a = record_args_of(b, records);
    a.coef_in = (const float *)b->coef_in.data;
    LAUNCH(l, cluster_records, (unsigned)ceil_div(round_up(a.rows, TOKENS), 64), 64, 0, a);
    return ST_OK;
}
