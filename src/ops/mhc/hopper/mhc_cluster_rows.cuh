/* What the boundary forward on Hopper makes of a token's sums: gates, 1 / rms of h, the other coefficients. For
 * mhc_cluster.cu, where they come from. */
#ifndef BRAID_OPS_MHC_CLUSTER_ROWS_CUH
#define BRAID_OPS_MHC_CLUSTER_ROWS_CUH

#include "ops/mhc/hopper/mhc_cluster.cuh"

/* Sums of a token, a record: four products for pre; the Gram matrix of its streams, entries 00, 11, 22, 33, 01, 02, 03,
 * 12, 13, 23; two zeros; the other products. */
enum {
    SENT = 16,               /* floats that h needs */
    KEPT = CL_LOGITS - CL_N, /* the others */
    RECORD = SENT + KEPT,
    FOURS = RECORD / 4,
};

struct cluster_fwd {
    const float *coef_in, *bias;
    struct view w, stat, coef;
    struct gate_params by;
    struct norm_args norm;
    float4 *kept; /* without OPEN: [tiles, parts, FOURS, TOKENS] */
    int64_t rows, d;
    /* a line: `parts` clusters of `ranks` blocks, for all channels; per: tokens of a tile that a block opens, at most
     * */
    int tiles, ranks, parts, lines, per, slot_bytes, batch;
    float eps, by_width, by_channels; /* 1 / (streams * channels), 1 / channels */
    float below, less, gate_eps;      /* rho: root of mean square + below, minus less; what is added to gates */
    struct rule_args rule;
    struct drop_rule drop;
};

/* From the Gram matrix' diagonal. */
INLINE float rho_of(const struct cluster_fwd &a, float4 diagonal)
{
    float mean = (((diagonal.x + diagonal.y) + diagonal.z) + diagonal.w) * a.by_width + a.below;
    return (mean > 0 ? mean * rsqrtf(mean) : mean) - a.less; /* what is not a number stays so */
}
/* pre of one stream, from its product. */
INLINE float gate_of(const struct cluster_fwd &a, float a_pre, float beta, float p, float rho)
{
    return maybe_bf16(a.rule.round_bf16,
                      __fdividef(1.0f, 1.0f + expf(-(__fdividef(a_pre, rho + (float)MHC_EPS) * p + beta))) +
                          a.gate_eps);
}
/* The two parts of pre^T G pre. rest: entries 01, 02, 03, 12; last: 13, 23. */
INLINE float diagonal_part(float4 pre, float4 diagonal)
{
    return pre.x * pre.x * diagonal.x + pre.y * pre.y * diagonal.y + pre.z * pre.z * diagonal.z +
           pre.w * pre.w * diagonal.w;
}
INLINE float other_part(float4 pre, float4 rest, float4 last)
{
    return 2 * (pre.x * (pre.y * rest.x + pre.z * rest.y + pre.w * rest.z) + pre.y * (pre.z * rest.w + pre.w * last.x) +
                pre.z * pre.w * last.y);
}
INLINE float rstd_of(const struct cluster_fwd &a, float square)
{
    return rsqrtf((square < 0 ? 0 : square) * a.by_channels + a.eps); /* what is not a number stays so */
}

INLINE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

/* Values of one row that h needs. */
INLINE void write_opened(const struct cluster_fwd &a, int64_t row, float4 p, float4 pre, float rho, float rstd)
{
    float *stat = at<float>(a.stat, row);
    *(float4 *)at<float>(a.coef, row) = pre;
    stat[0] = p.x;
    stat[1] = p.y;
    stat[2] = p.z;
    stat[3] = p.w;
    stat[CL_LOGITS] = rho;
    stat[CL_LOGITS + 1] = rstd;
}
/* From its products: the gates but pre, and Sinkhorn. */
INLINE void make_coefficients(const struct cluster_fwd &a, int64_t row, const float4 *product, float rho)
{
    float post[CL_N], m[CL_N * CL_N], *stat = at<float>(a.stat, row), *coef = at<float>(a.coef, row);
    float q = 1.0f / (rho + (float)MHC_EPS), by_post = q * *a.by.alpha[1], by_res = q * *a.by.alpha[2];
    UNROLLED (k, KEPT) {
        float4 four = product[k / 4];
        float p = k % 4 == 0   ? four.x
                  : k % 4 == 1 ? four.y
                  : k % 4 == 2 ? four.z
                               : four.w,
              z = (k < CL_N ? by_post : by_res) * p + a.by.beta[CL_N + k];
        stat[CL_N + k] = p;
        if (k < CL_N)
            post[k] = maybe_bf16(a.rule.round_bf16, 2 * precise_sigmoid(z));
        else
            m[k - CL_N] = z;
    }
    store_floats(coef + CL_N, post);
    sinkhorn<CL_N>(m, CL_N, a.rule.iterations, a.rule.profile_d);
    UNROLLED (k, CL_N * CL_N)
        m[k] = maybe_bf16(a.rule.round_bf16, m[k]);
    store_floats(coef + 2 * CL_N, m);
}

#endif
