/* Gradients of weights on the CPU, dw = sum over rows of dp^T y with few rows of dw and many columns, and the
 * ops that need them: project's backward and the boundary's parameter gradients; see mhc.h.
 *
 * Rows go in at most MHC_MAX_PARTIALS blocks with a partial dw each, added in order: the same bits for any
 * number of threads. Within a block, a slice of rows at a time stays in cache while all of dw is updated. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/mhc/mhc.h"

#if VEC_LENGTH == 16
enum { TALL = 12, WIDE = 2 }; /* a tile of dw in registers: rows, vectors */
#else
enum { TALL = 6, WIDE = 2 };
#endif
enum { BLOCK_ROWS = 192, SLICE_MIN = 32 };

static int64_t partials(int64_t rows) { return min_i64(MHC_MAX_PARTIALS, max_i64(1, ceil_div(rows, BLOCK_ROWS))); }

int64_t CPU_NAME(mhc_outer_floats)(int64_t rows, int64_t m, int64_t k) { return partials(rows) * m * k; }

/* tall x (WIDE * VL) entries of dw += over `rows` rows; fetches as many lines from soon. */
INLINE void outer_tile(int tall, int64_t rows, const float *dp, int64_t dp_step, const float *y, int64_t y_step,
                       const float *soon, float *dw, int64_t k)
{
    vec acc[TALL][WIDE];
    for (int i = 0; i < tall; i++)
        for (int v = 0; v < WIDE; v++)
            acc[i][v] = vec_at(dw + i * k + v * VL);
    for (int64_t r = 0; r < rows; r++) {
        vec in[WIDE];
        fetch(soon + r * LINE);
        for (int v = 0; v < WIDE; v++)
            in[v] = vec_at(y + r * y_step + v * VL);
        for (int i = 0; i < tall; i++)
            for (int v = 0; v < WIDE; v++)
                acc[i][v] += in[v] * dp[r * dp_step + i];
    }
    for (int i = 0; i < tall; i++)
        for (int v = 0; v < WIDE; v++)
            vec_put(dw + i * k + v * VL, acc[i][v]);
}

static void outer_slice(const struct outer *o, int64_t first, int64_t rows, float *dw)
{
    int64_t k = o->y->dim[1], step = o->y->stride[0], c = 0;
    const float *dp = o->dp + first * o->dp_step, *y = row_of(o->y, first), *soon = y + rows * step,
                *end = soon + rows * step;
    if (first + 2 * rows > o->y->dim[0])
        soon = end = y; /* nothing as long follows */
    for (; c + WIDE * VL <= k; c += WIDE * VL) {
        int64_t i = 0;
        for (; i + TALL <= o->m; i += TALL) {
            outer_tile(TALL, rows, dp + i, o->dp_step, y + c, step, soon, dw + i * k + c, k);
            soon = soon + rows * LINE < end ? soon + rows * LINE : y;
        }
        for (; i + 4 <= o->m; i += 4) {
            outer_tile(4, rows, dp + i, o->dp_step, y + c, step, soon, dw + i * k + c, k);
            soon = soon + rows * LINE < end ? soon + rows * LINE : y;
        }
        for (; i < o->m; i++)
            outer_tile(1, rows, dp + i, o->dp_step, y + c, step, y, dw + i * k + c, k);
    }
    for (int64_t i = 0; i < o->m; i++)
        for (int64_t r = 0; r < rows; r++) {
            float v = dp[r * o->dp_step + i];
#pragma omp simd
            for (int64_t at = c; at < k; at++)
                dw[i * k + at] += v * y[r * step + at];
        }
}

/* Row i of dw: the partials in order. */
static void outer_add(const struct outer *o, int64_t i, int64_t blocks)
{
    int64_t k = o->y->dim[1];
    float *out = row_of(o->dw, i);
    if (!o->acc)
        memset(out, 0, (size_t)k * sizeof *out);
    for (int64_t b = 0; b < blocks; b++) {
        const float *in = o->partial + (b * o->m + i) * k;
#pragma omp simd
        for (int64_t c = 0; c < k; c++)
            out[c] += in[c];
    }
}

void CPU_NAME(mhc_outer)(const struct outer *o)
{
    int64_t rows = o->y->dim[0], k = o->y->dim[1], count = o->m * k, blocks = partials(rows),
            per = ceil_div(rows, blocks);
    if (count == 0)
        return;
    int64_t slice = max_i64(SLICE_MIN, BRING_ROOM / k);
#pragma omp parallel if (rows * count > 16384)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            float *dw = o->partial + b * count;
            memset(dw, 0, (size_t)count * sizeof *dw);
            int64_t end = min_i64(rows, (b + 1) * per);
            for (int64_t r = b * per; r < end; r += slice)
                outer_slice(o, r, min_i64(slice, end - r), dw);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < o->m; i++)
            outer_add(o, i, blocks);
    }
}

/* ---- project backward ------------------------------------------------------------------------ */

int64_t CPU_NAME(mhc_project_bwd_work_cpu)(const struct mhc_project_bwd_args *a)
{
    return a->dw.rank > 0 ? CPU_NAME(mhc_outer_floats)(a->x.dim[0], a->w.dim[0], a->x.dim[1]) * (int64_t)sizeof(float)
                          : 0;
}

int CPU_NAME(mhc_project_bwd_cpu)(struct lane *l, const struct mhc_project_bwd_args *a)
{
    TRY(mhc_project_bwd_check(a, l->err));
    TRY(check_work("mhc_project_bwd", &a->work, CPU_NAME(mhc_project_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], m = a->w.dim[0];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = row_of(&a->x, r), *dp = row_of(&a->dp, r);
        float *dx = row_of(&a->dx, r), root = row_of(&a->rho, r)[0] + (float)mhc_root_less(a->root_eps);
        float through_rho = root == 0 ? 0 : row_of(&a->drho, r)[0] / ((float)k * root);
#pragma omp simd
        for (int64_t c = 0; c < k; c++)
            dx[c] = (a->acc_dx ? dx[c] : 0) + through_rho * x[c];
        for (int64_t i = 0; i < m; i++) {
            const float *w = row_of(&a->w, i);
#pragma omp simd
            for (int64_t c = 0; c < k; c++)
                dx[c] += dp[i] * w[c];
        }
    }
    if (present(&a->dw)) {
        struct outer o = {.dp = a->dp.data,
                          .dp_step = a->dp.stride[0],
                          .m = m,
                          .y = &a->x,
                          .dw = &a->dw,
                          .partial = a->work.data,
                          .acc = a->acc_dw};
        CPU_NAME(mhc_outer)(&o);
    }
    return ST_OK;
}

/* ---- the boundary's parameters --------------------------------------------------------------- */

/* Scratch: per block of rows the sums of dz and of dz p q in double, then dp [rows, N], then mhc_outer's. */
int64_t CPU_NAME(mhc_boundary_dw_work_cpu)(const struct mhc_boundary_dw_args *a)
{
    int64_t rows = a->y.dim[0], m = mhc_logits(a->rule.streams);
    return partials(rows) * 2 * m * (int64_t)sizeof(double) +
           (CPU_NAME(mhc_outer_floats)(rows, m, a->y.dim[1]) + rows * m) * (int64_t)sizeof(float);
}

static int group_of(int64_t n, int64_t k) { return k < n ? 0 : k < 2 * n ? 1 : 2; }

/* dp = dz A q for rows [first, end), and their sums, in row order. */
static void block_sums(const struct mhc_boundary_dw_args *a, int64_t first, int64_t end, float *dp, double *beta,
                       double *alpha)
{
    int64_t n = a->rule.streams, m = mhc_logits(n);
    const float scale[3] = {scalar_of(&a->a_pre), scalar_of(&a->a_post), scalar_of(&a->a_res)};
    memset(beta, 0, (size_t)m * sizeof *beta);
    memset(alpha, 0, (size_t)m * sizeof *alpha);
    for (int64_t r = first; r < end; r++) {
        const float *dz = row_of(&a->dz, r), *stat = row_of(&a->stat, r);
        float q = 1.0f / (stat[m] + EPS);
#pragma omp simd
        for (int64_t k = 0; k < m; k++) {
            dp[r * m + k] = dz[k] * q * scale[k < n ? 0 : k < 2 * n ? 1 : 2];
            beta[k] += (double)dz[k];
            alpha[k] += (double)(dz[k] * stat[k] * q);
        }
    }
}

static void small_sums(const struct mhc_boundary_dw_args *a, double *sums, float *dp)
{
    int64_t rows = a->y.dim[0], n = a->rule.streams, m = mhc_logits(n), blocks = partials(rows),
            per = ceil_div(rows, blocks);
#pragma omp parallel for schedule(static) if (rows * m > 4096)
    for (int64_t b = 0; b < blocks; b++)
        block_sums(a, b * per, min_i64(rows, (b + 1) * per), dp, sums + b * 2 * m, sums + (b * 2 + 1) * m);
    float *const dalpha[3] = {a->da_pre.data, a->da_post.data, a->da_res.data}, *dbeta = a->dbeta.data;
    double group[3] = {0};
    for (int64_t k = 0; k < m; k++) {
        double beta = 0;
        for (int64_t b = 0; b < blocks; b++) {
            beta += sums[b * 2 * m + k];
            group[group_of(n, k)] += sums[(b * 2 + 1) * m + k];
        }
        dbeta[k] = (mhc_boundary_adds(a) ? dbeta[k] : 0) + (float)beta;
    }
    for (int g = 0; g < 3; g++)
        dalpha[g][0] = (mhc_boundary_adds(a) ? dalpha[g][0] : 0) + (float)group[g];
}

int CPU_NAME(mhc_boundary_dw_cpu)(struct lane *l, const struct mhc_boundary_dw_args *a)
{
    TRY(mhc_boundary_dw_check(a, l->err));
    TRY(check_work("mhc_boundary_dw", &a->work, CPU_NAME(mhc_boundary_dw_work_cpu)(a), l->err));
    int64_t rows = a->y.dim[0], m = mhc_logits(a->rule.streams);
    double *sums = a->work.data;
    float *dp = (float *)(sums + partials(rows) * 2 * m);
    small_sums(a, sums, dp);
    struct outer o = {
        .dp = dp, .dp_step = m, .m = m, .y = &a->y, .dw = &a->dw, .partial = dp + rows * m, .acc = a->acc_dw};
    CPU_NAME(mhc_outer)(&o);
    return ST_OK;
}
