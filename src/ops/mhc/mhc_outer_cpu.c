/* Gradients of weights on the CPU, dw = sum over rows of dp^T y with few rows of dw and many columns, and the
 * ops that need them: project's backward and the boundary's parameter gradients; see mhc.h.
 *
 * Rows go in at most MHC_MAX_PARTIALS blocks with a partial dw each, added in order: the same bits for any
 * number of threads. Within a block, SLICE rows at a time stay in cache while all of dw is updated. */
#include "ops/mhc/mhc_cpu_int.h"

enum { SLICE = 32, TILE = 8, BLOCK_ROWS = 192 };

static int64_t partials(int64_t rows) { return min_i64(MHC_MAX_PARTIALS, max_i64(1, ceil_div(rows, BLOCK_ROWS))); }

int64_t CPU_NAME(mhc_outer_floats)(int64_t rows, int64_t m, int64_t k) { return partials(rows) * m * k; }

/* tile x (vecs * VL) entries of dw += over `rows` rows. */
INLINE void outer_tile(int tile, int vecs, int64_t rows, const float *dp, int64_t dp_step, const float *y, int64_t y_step, float *dw,
                       int64_t k)
{
    vec acc[TILE][2];
    UNROLL
    for (int i = 0; i < tile; i++) {
        UNROLL
        for (int v = 0; v < vecs; v++)
            acc[i][v] = vec_at(dw + i * k + v * VL);
    }
    for (int64_t r = 0; r < rows; r++) {
        vec in[2];
        UNROLL
        for (int v = 0; v < vecs; v++)
            in[v] = vec_at(y + r * y_step + v * VL);
        UNROLL
        for (int i = 0; i < tile; i++) {
            UNROLL
            for (int v = 0; v < vecs; v++)
                acc[i][v] += in[v] * dp[r * dp_step + i];
        }
    }
    UNROLL
    for (int i = 0; i < tile; i++) {
        UNROLL
        for (int v = 0; v < vecs; v++)
            vec_put(dw + i * k + v * VL, acc[i][v]);
    }
}

static void outer_slice(const struct outer *o, int64_t first, int64_t rows, float *dw)
{
    int64_t k = o->y->dim[1], step = o->y->stride[0], c = 0;
    const float *dp = o->dp + first * o->dp_step, *y = f32_row(o->y, first);
    for (; c + 2 * VL <= k; c += 2 * VL) {
        int64_t i = 0;
        for (; i + TILE <= o->m; i += TILE)
            outer_tile(TILE, 2, rows, dp + i, o->dp_step, y + c, step, dw + i * k + c, k);
        for (; i < o->m; i++)
            outer_tile(1, 2, rows, dp + i, o->dp_step, y + c, step, dw + i * k + c, k);
    }
    for (int64_t i = 0; i < o->m; i++)
        for (int64_t r = 0; r < rows; r++) {
            float v = dp[r * o->dp_step + i];
#pragma omp simd
            for (int64_t at = c; at < k; at++)
                dw[i * k + at] += v * y[r * step + at];
        }
}

void CPU_NAME(mhc_outer)(const struct outer *o)
{
    int64_t rows = o->y->dim[0], count = o->m * o->y->dim[1], blocks = partials(rows), per = ceil_div(rows, blocks);
    if (count == 0)
        return;
#pragma omp parallel for schedule(static) if (rows * count > 16384)
    for (int64_t b = 0; b < blocks; b++) {
        float *dw = o->partial + b * count;
        memset(dw, 0, (size_t)count * sizeof *dw);
        int64_t end = min_i64(rows, (b + 1) * per);
        for (int64_t r = b * per; r < end; r += SLICE)
            outer_slice(o, r, min_i64(SLICE, end - r), dw);
    }
    for (int64_t i = 0; i < o->m; i++)
        CPU_NAME(mhc_add_partials)(f32_row(o->dw, i), o->acc, o->partial + i * o->y->dim[1], count, blocks, o->y->dim[1]);
}

/* ---- project backward -------------------------------------------------------------------------------- */

int64_t CPU_NAME(mhc_project_bwd_work_cpu)(const struct mhc_project_bwd_args *a)
{
    return a->dw.rank > 0 ? CPU_NAME(mhc_outer_floats)(a->x.dim[0], a->w.dim[0], a->x.dim[1]) * (int64_t)sizeof(float) : 0;
}

int CPU_NAME(mhc_project_bwd_cpu)(struct lane *l, const struct mhc_project_bwd_args *a)
{
    TRY(mhc_project_bwd_check(a, l->err));
    TRY(check_work("mhc_project_bwd", &a->work, CPU_NAME(mhc_project_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], m = a->w.dim[0];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r), *dp = f32_row(&a->dp, r);
        float *dx = f32_row(&a->dx, r), rho = f32_row(&a->rho, r)[0];
        float through_rho = rho == 0 ? 0 : f32_row(&a->drho, r)[0] / ((float)k * rho);
#pragma omp simd
        for (int64_t c = 0; c < k; c++)
            dx[c] = (a->acc_dx ? dx[c] : 0) + through_rho * x[c];
        for (int64_t i = 0; i < m; i++) {
            const float *w = f32_row(&a->w, i);
#pragma omp simd
            for (int64_t c = 0; c < k; c++)
                dx[c] += dp[i] * w[c];
        }
    }
    if (present(&a->dw)) {
        struct outer o = {.dp = a->dp.data, .dp_step = a->dp.stride[0], .m = m, .y = &a->x, .dw = &a->dw,
                          .partial = a->work.data, .acc = a->acc_dw};
        CPU_NAME(mhc_outer)(&o);
    }
    return ST_OK;
}

/* ---- the boundary's parameters ------------------------------------------------------------------------- */

int64_t CPU_NAME(mhc_boundary_dw_work_cpu)(const struct mhc_boundary_dw_args *a)
{
    int64_t rows = a->y.dim[0], m = mhc_logits(a->rule.streams);
    return (CPU_NAME(mhc_outer_floats)(rows, m, a->y.dim[1]) + rows * m) * (int64_t)sizeof(float);
}

/* dp = dz A q into dp; dbeta and the gradients of the three scales, in double and row order. */
static void small_sums(const struct mhc_boundary_dw_args *a, float *dp)
{
    int64_t rows = a->y.dim[0], n = a->rule.streams, m = mhc_logits(n);
    const float scale[3] = {scalar_of(&a->a_pre), scalar_of(&a->a_post), scalar_of(&a->a_res)};
    double beta[LOGITS_MAX] = {0}, alpha[LOGITS_MAX] = {0}, group[3] = {0};
    for (int64_t r = 0; r < rows; r++) {
        const float *dz = f32_row(&a->dz, r), *stat = f32_row(&a->stat, r);
        float q = 1.0f / (stat[m] + EPS);
#pragma omp simd
        for (int64_t k = 0; k < m; k++) {
            dp[r * m + k] = dz[k] * q * scale[k < n ? 0 : k < 2 * n ? 1 : 2];
            beta[k] += (double)dz[k];
            alpha[k] += (double)(dz[k] * stat[k] * q);
        }
    }
    float *const dalpha[3] = {a->da_pre.data, a->da_post.data, a->da_res.data}, *dbeta = a->dbeta.data;
    for (int64_t k = 0; k < m; k++) {
        dbeta[k] = (a->acc_params ? dbeta[k] : 0) + (float)beta[k];
        group[k < n ? 0 : k < 2 * n ? 1 : 2] += alpha[k];
    }
    for (int g = 0; g < 3; g++)
        dalpha[g][0] = (a->acc_params ? dalpha[g][0] : 0) + (float)group[g];
}

int CPU_NAME(mhc_boundary_dw_cpu)(struct lane *l, const struct mhc_boundary_dw_args *a)
{
    TRY(mhc_boundary_dw_check(a, l->err));
    TRY(check_work("mhc_boundary_dw", &a->work, CPU_NAME(mhc_boundary_dw_work_cpu)(a), l->err));
    int64_t rows = a->y.dim[0], m = mhc_logits(a->rule.streams);
    float *dp = a->work.data;
    small_sums(a, dp);
    struct outer o = {.dp = dp, .dp_step = m, .m = m, .y = &a->y, .dw = &a->dw, .partial = dp + rows * m, .acc = a->acc_dw};
    CPU_NAME(mhc_outer)(&o);
    return ST_OK;
}
