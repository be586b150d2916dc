/* Mixing coefficients on the CPU: projection, gates, Sinkhorn; see mhc.h. Gates and Sinkhorn take VL tokens at
 * once, one per vector lane: loops over a token's matrix become plain vector code without shuffles. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/mhc/mhc.h"

#include <math.h>

/* ---- projection ------------------------------------------------------------------------------ */

/* out[t][i] = x[t] . w[i], GROUP rows of x by 4 of w. soon: rows of k floats to be fetched meanwhile. */
static void dot_tile(const float *const *x, const float *const *w, int64_t k, const float *const *soon,
                     float out[GROUP][4])
{
    vec acc[GROUP][4] = {{{0}}};
    const float *soon0 = soon[0], *soon1 = soon[1];
    int64_t c = 0;
    for (; c + VL <= k; c += VL) {
        vec v[4];
        fetch(soon0 + c);
        fetch(soon1 + c);
        for (int i = 0; i < 4; i++)
            v[i] = vec_at(w[i] + c);
        for (int t = 0; t < GROUP; t++) {
            vec in = vec_at(x[t] + c);
            for (int i = 0; i < 4; i++)
                acc[t][i] += in * v[i];
        }
    }
    for (int t = 0; t < GROUP; t++) {
        quad_put(out[t], vec_sum4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]));
        for (int i = 0; i < 4; i++)
            for (int64_t at = c; at < k; at++)
                out[t][i] += x[t][at] * w[i][at];
    }
}

/* What tile number `tile` of a group fetches: a row of each wide matrix, then the rows of the thin one; where there is
 * nothing left, what is there already. */
static void choose_soon(const struct project_ahead *a, int64_t first, int64_t tile, const float *soon[2])
{
    if (a == NULL || tile > GROUP)
        return;
    int64_t r = first + a->rows + (tile < GROUP ? tile : 0);
    for (int i = 0; i < 2; i++) {
        const struct tensor *t = tile < GROUP ? a->wide[i] : i == 0 ? a->thin : NULL;
        if (t != NULL && t->data != NULL && r < t->dim[0])
            soon[i] = row_of(t, r);
    }
}

/* A tile that is not full repeats rows: the result of a token does not depend on the other tokens of its tile. */
void CPU_NAME(mhc_project_group)(const struct tensor *x, const struct tensor *w, int64_t first, int64_t count,
                                 float *const *p, const struct project_ahead *ahead)
{
    int64_t k = x->dim[1], m = w->dim[0];
    const float *in[GROUP], *with[4];
    for (int64_t t = 0; t < GROUP; t++)
        in[t] = row_of(x, first + min_i64(t, count - 1));
    for (int64_t i = 0; i < m; i += 4) {
        const float *soon[2] = {in[0], in[0]};
        float out[GROUP][4];
        for (int64_t j = 0; j < 4; j++)
            with[j] = row_of(w, min_i64(i + j, m - 1));
        choose_soon(ahead, first, i / 4, soon);
        dot_tile(in, with, k, soon, out);
        for (int64_t t = 0; t < count; t++)
            memcpy(p[t] + i, out[t], (size_t)min_i64(4, m - i) * sizeof **out);
    }
}

int CPU_NAME(mhc_project_fwd_cpu)(struct lane *l, const struct mhc_project_fwd_args *a)
{
    TRY(mhc_project_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t first = 0; first < rows; first += GROUP) {
        int64_t count = min_i64(GROUP, rows - first);
        float *p[GROUP];
        for (int64_t t = 0; t < count; t++) {
            p[t] = row_of(&a->p, first + t);
            row_of(&a->rho, first + t)[0] = root_of(row_of(&a->x, first + t), k, a->root_eps);
        }
        CPU_NAME(mhc_project_group)(&a->x, &a->w, first, count, p, NULL);
    }
    return ST_OK;
}

/* ---- gates, by lanes ------------------------------------------------------------------------- */

/* Columns [col, col + n) of rows [first, first + count) as lanes; lanes without a row repeat the last one. */
static void load_lanes(int64_t n, const struct tensor *t, int64_t col, int64_t first, int64_t count, vec *out)
{
    const float *row[VL];
    quad q[VL];
    for (int64_t i = 0; i < VL; i++)
        row[i] = row_of(t, first + min_i64(i, count - 1)) + col;
    for (int64_t k = 0; k < n - n % 4; k += 4) {
        for (int i = 0; i < VL; i++)
            q[i] = quad_at(row[i] + k);
        for (int i = 0; i < 4; i++)
            out[k + i] = vec_of_quads(q + i);
        vec_transpose4(out + k);
    }
    for (int64_t k = n - n % 4; k < n; k++)
        for (int i = 0; i < VL; i++)
            ((float *)&out[k])[i] = row[i][k];
}

static void store_lanes(int64_t n, const struct tensor *t, int64_t col, int64_t first, int64_t count, const vec *in)
{
    for (int64_t k = 0; k < n - n % 4; k += 4) {
        vec v[4] = {in[k], in[k + 1], in[k + 2], in[k + 3]};
        quad q[VL];
        vec_transpose4(v);
        for (int i = 0; i < 4; i++)
            vec_to_quads(v[i], q + i);
        for (int64_t i = 0; i < count; i++)
            quad_put(row_of(t, first + i) + col + k, q[i]);
    }
    for (int64_t k = n - n % 4; k < n; k++)
        for (int64_t i = 0; i < count; i++)
            row_of(t, first + i)[col + k] = ((const float *)&in[k])[i];
}

static void round_lanes(const struct mhc_rule *r, vec *v, int64_t n)
{
    for (int64_t i = 0; r->round_bf16 && i < n * VL; i++)
        ((float *)v)[i] = rounded(r, ((const float *)v)[i]);
}

/* z[k] from p and rho. */
INLINE void logits_lanes(int64_t n, const float scale[3], const float *beta, vec rho, vec *z)
{
    vec q = 1.0f / (rho + EPS);
    for (int64_t k = 0; k < n * n + 2 * n; k++)
        z[k] = z[k] * (q * scale[k < n ? 0 : k < 2 * n ? 1 : 2]) + beta[k];
}

INLINE void sigmoid_lanes(vec *v)
{
    vec e = -*v;
    vec_exp_each((float *)&e);
    *v = 1.0f / (1.0f + e);
}

/* ---- Sinkhorn, by lanes ---------------------------------------------------------------------- */

/* Divide the lines of y (step apart within a line, line_step between lines) by their sums. */
INLINE void half_step(int64_t n, bool plus_eps, int64_t line_step, int64_t step, vec *y, vec *divisor)
{
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        vec sum = y[i * line_step];
        UNROLL
        for (int64_t j = 1; j < n; j++)
            sum += y[i * line_step + j * step];
        vec d = sum + EPS;
        if (!plus_eps)
            d = vec_max(sum, vec_all(EPS));
        vec inverse = vec_inverse(d);
        UNROLL
        for (int64_t j = 0; j < n; j++)
            y[i * line_step + j * step] *= inverse;
        if (divisor != NULL)
            divisor[i] = d;
    }
}

/* y: logits in, what the iterations start from out. start (n^2) gets the exponentials, divisor (n) the softmax's sums;
 * both may be NULL. */
INLINE void sinkhorn_start(int64_t n, bool softmax, vec *y, vec *start, vec *divisor)
{
    for (int64_t i = 0; i < n; i++) {
        vec most = y[i * n], sum = {0};
        for (int64_t j = 1; j < n; j++)
            most = vec_max(most, y[i * n + j]);
        for (int64_t j = 0; j < n; j++) {
            vec e = y[i * n + j] - most;
            if (!softmax)
                e = vec_max(e, vec_all((float)MHC_S_LEAST));
            vec_exp_each((float *)&e);
            sum += e;
            y[i * n + j] = e;
            if (start != NULL)
                start[i * n + j] = e;
        }
        for (int64_t j = 0; softmax && j < n; j++)
            y[i * n + j] = y[i * n + j] / sum + EPS;
        if (softmax && divisor != NULL)
            divisor[i] = sum;
    }
}

/* In registers: y is n^2 vectors of the caller, put back at the end. d_form: the first row division is made already. */
INLINE void sinkhorn_iterate(int64_t n, bool d_form, int64_t iterations, vec *out, vec *divisor)
{
    vec y[MATRIX_MAX];
    UNROLL_COPY
    for (int64_t i = 0; i < n * n; i++)
        y[i] = out[i];
    for (int64_t t = 0; t < iterations; t++) {
        vec *row = divisor ? divisor + 2 * t * n : NULL, *column = divisor ? row + n : NULL;
        if (t > 0 || !d_form)
            half_step(n, d_form, n, 1, y, row);
        half_step(n, d_form, 1, n, y, column);
    }
    UNROLL_COPY
    for (int64_t i = 0; i < n * n; i++)
        out[i] = y[i];
}

/* y: logits in, doubly stochastic out. divisor (2 T n): what each half step divided by. */
INLINE void sinkhorn_lanes(int64_t n, const struct mhc_rule *r, vec *y, vec *start, vec *divisor)
{
    sinkhorn_start(n, r->profile == MHC_D, y, start, divisor);
    if (r->profile == MHC_D)
        sinkhorn_iterate(n, true, r->iterations, y, divisor);
    else
        sinkhorn_iterate(n, false, r->iterations, y, divisor);
}

/* Back through one half step. gamma is gradient times value: that of what was divided is gamma - y sum(gamma) over
 * a line, without a division, and y times the divisor is what was divided: no iterate is stored. */
INLINE void undo_half_step(int64_t n, bool clamped, int64_t line_step, int64_t step, const vec *divisor, vec *y,
                           vec *gamma)
{
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        vec d = divisor[i], kappa = gamma[i * line_step];
        UNROLL
        for (int64_t j = 1; j < n; j++)
            kappa += gamma[i * line_step + j * step];
        if (clamped) /* where max(sum, eps) chose eps the divisor is a constant */
            kappa = vec_choose(d > vec_all(EPS), kappa, (vec){0});
        UNROLL
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * line_step + j * step;
            gamma[at] -= kappa * y[at];
            y[at] *= d;
        }
    }
}

/* Back through all of them, in registers: y, the result, becomes what the iterations started from, g its gamma. */
INLINE void sinkhorn_undo(int64_t n, bool d_form, int64_t iterations, const vec *divisor, vec *y_out, vec *g_out)
{
    vec y[MATRIX_MAX], gamma[MATRIX_MAX];
    UNROLL_COPY
    for (int64_t i = 0; i < n * n; i++) {
        y[i] = y_out[i];
        gamma[i] = g_out[i] * y[i];
    }
    for (int64_t t = iterations - 1; t >= 0; t--) {
        const vec *row = divisor + 2 * t * n;
        undo_half_step(n, !d_form, 1, n, row + n, y, gamma);
        if (t > 0 || !d_form)
            undo_half_step(n, !d_form, n, 1, row, y, gamma);
    }
    UNROLL_COPY
    for (int64_t i = 0; i < n * n; i++) {
        y_out[i] = y[i];
        g_out[i] = gamma[i];
    }
}

/* Back through D's softmax, which has eps on every entry. g: gamma in, gradient of the logits out. */
INLINE void undo_softmax(int64_t n, const vec *start, const vec *divisor, const vec *y, vec *g)
{
    for (int64_t i = 0; i < n; i++) {
        vec inverse = 1.0f / divisor[i], kappa = {0};
        for (int64_t j = i * n; j < (i + 1) * n; j++) {
            g[j] = g[j] / y[j];
            kappa += g[j] * start[j] * inverse;
        }
        for (int64_t j = i * n; j < (i + 1) * n; j++)
            g[j] = (g[j] - kappa) * start[j] * inverse;
    }
}

/* Gradients of what is cut off at MHC_S_LEAST go to the largest logit of the row, of which it is 1. */
INLINE void move_cut(int64_t n, const vec *start, vec *g)
{
    vec least = vec_all(fast_expf((float)MHC_S_LEAST)), cut = {0};
    for (int64_t j = 0; j < n; j++) {
        cut += vec_choose(start[j] > least, (vec){0}, g[j]);
        g[j] = vec_choose(start[j] > least, g[j], (vec){0});
    }
    for (int64_t j = 0; j < n; j++) {
        vec_mask largest = start[j] >= vec_all(1);
        g[j] += vec_choose(largest, cut, (vec){0});
        cut = vec_choose(largest, (vec){0}, cut);
    }
}

/* g: gradient of the result in, of the logits out. */
INLINE void sinkhorn_bwd_lanes(int64_t n, const struct mhc_rule *r, vec *logits, vec *g)
{
    vec start[MATRIX_MAX], divisor[2 * MHC_MAX_ITERATIONS * MHC_MAX_STREAMS];
    sinkhorn_lanes(n, r, logits, start, divisor);
    if (r->profile == MHC_S) {
        sinkhorn_undo(n, false, r->iterations, divisor, logits, g);
        for (int64_t i = 0; i < n; i++)
            move_cut(n, start + i * n, g + i * n);
        return;
    }
    sinkhorn_undo(n, true, r->iterations, divisor, logits, g);
    undo_softmax(n, start, divisor, logits, g);
}

/* ---- both together, for the boundary --------------------------------------------------------- */

struct mapping {
    float scale[3];
    const float *beta;
};

static struct mapping mapping_of(const struct tensor *pre, const struct tensor *post, const struct tensor *res,
                                 const struct tensor *beta)
{
    return (struct mapping){.scale = {scalar_of(pre), scalar_of(post), scalar_of(res)}, .beta = beta->data};
}

/* z in, coefficients out. */
INLINE void finish_gates(int64_t n, const struct mhc_rule *r, vec *z)
{
    for (int64_t k = 0; k < 2 * n; k++) {
        sigmoid_lanes(&z[k]);
        if (k >= n)
            z[k] = z[k] * 2.0f;
        else if (r->profile == MHC_D)
            z[k] = z[k] + EPS;
    }
}

INLINE void coef_lanes(int64_t n, const struct mhc_boundary_fwd_args *a, int64_t first, int64_t count)
{
    int64_t logits = n * n + 2 * n;
    struct mapping m = mapping_of(&a->a_pre, &a->a_post, &a->a_res, &a->beta);
    vec z[LOGITS_MAX + 1];
    load_lanes(logits + 1, &a->stat, 0, first, count, z);
    logits_lanes(n, m.scale, m.beta, z[logits], z);
    finish_gates(n, &a->rule, z);
    sinkhorn_lanes(n, &a->rule, z + 2 * n, NULL, NULL);
    round_lanes(&a->rule, z, logits);
    store_lanes(logits, &a->coef, 0, first, count, z);
}

void CPU_NAME(mhc_coef_lanes)(const struct mhc_boundary_fwd_args *a, int64_t first, int64_t count)
{
    FOR_STREAMS(a->rule.streams, coef_lanes(STREAMS, a, first, count));
}

/* dcoef in, dz out. */
INLINE void gates_bwd_lanes(int64_t n, vec *z, vec *dcoef)
{
    for (int64_t k = 0; k < 2 * n; k++) {
        sigmoid_lanes(&z[k]);
        vec slope = z[k] * (1.0f - z[k]);
        dcoef[k] *= slope * (k < n ? 1.0f : 2.0f);
    }
}

INLINE void coef_bwd_lanes(int64_t n, const struct mhc_boundary_bwd_args *a, int64_t first, int64_t count, float *dp,
                           float *through_rho)
{
    int64_t logits = n * n + 2 * n;
    struct mapping m = mapping_of(&a->a_pre, &a->a_post, &a->a_res, &a->beta);
    struct tensor rows = tensor_2d(dp, DT_F32, VL, logits);
    vec p[LOGITS_MAX + 1], z[LOGITS_MAX], dz[LOGITS_MAX], sum = {0};
    load_lanes(logits, &rows, 0, 0, count, dz);
    load_lanes(logits + 1, &a->stat, 0, first, count, p);
    for (int64_t k = 0; k < logits; k++)
        z[k] = p[k];
    vec rho = p[logits], q = 1.0f / (rho + EPS), root = rho + (float)mhc_root_less(a->rule.root_eps);
    logits_lanes(n, m.scale, m.beta, rho, z);
    gates_bwd_lanes(n, z, dz);
    if (present(&a->dcoef))
        sinkhorn_bwd_lanes(n, &a->rule, z + 2 * n, dz + 2 * n);
    store_lanes(logits, &a->dz, 0, first, count, dz);
    for (int64_t k = 0; k < logits; k++) {
        dz[k] *= m.scale[k < n ? 0 : k < 2 * n ? 1 : 2];
        sum += dz[k] * p[k];
        dz[k] *= q;
    }
    store_lanes(logits, &rows, 0, 0, VL, dz);
    sum = -sum * q * q / ((float)a->y.dim[1] * root);
    vec_put(through_rho, vec_choose(root > 0, sum, (vec){0}));
}

void CPU_NAME(mhc_coef_bwd_lanes)(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t count, float *dp,
                                  float *through_rho)
{
    FOR_STREAMS(a->rule.streams, coef_bwd_lanes(STREAMS, a, first, count, dp, through_rho));
}

/* ---- the primitives -------------------------------------------------------------------------- */

int CPU_NAME(mhc_gates_fwd_cpu)(struct lane *l, const struct mhc_gates_fwd_args *a)
{
    TRY(mhc_gates_fwd_check(a, l->err));
    int64_t rows = a->p.dim[0], n = a->rule.streams;
    struct mapping m = mapping_of(&a->a_pre, &a->a_post, &a->a_res, &a->beta);
#pragma omp parallel for schedule(static) if (rows > 256)
    for (int64_t first = 0; first < rows; first += VL) {
        int64_t count = min_i64(VL, rows - first);
        vec z[LOGITS_MAX], rho;
        load_lanes(mhc_logits(n), &a->p, 0, first, count, z);
        load_lanes(1, &a->rho, 0, first, count, &rho);
        logits_lanes(n, m.scale, m.beta, rho, z);
        finish_gates(n, &a->rule, z);
        round_lanes(&a->rule, z, 2 * n);
        store_lanes(n, &a->pre, 0, first, count, z);
        store_lanes(n, &a->post, 0, first, count, z + n);
        store_lanes(n * n, &a->logits, 0, first, count, z + 2 * n);
    }
    return ST_OK;
}

INLINE void optional_lanes(int64_t n, const struct tensor *t, int64_t first, int64_t count, vec *out)
{
    if (present(t))
        load_lanes(n, t, 0, first, count, out);
    else
        memset(out, 0, (size_t)n * sizeof *out);
}

static void gates_bwd_rows(const struct mhc_gates_bwd_args *a, const struct mapping *m, int64_t first, int64_t count)
{
    int64_t n = a->rule.streams, logits = mhc_logits(n);
    vec z[LOGITS_MAX], p[LOGITS_MAX], dz[LOGITS_MAX], rho, sum = {0};
    load_lanes(logits, &a->p, 0, first, count, p);
    load_lanes(1, &a->rho, 0, first, count, &rho);
    memcpy(z, p, (size_t)logits * sizeof *z);
    logits_lanes(n, m->scale, m->beta, rho, z);
    optional_lanes(n, &a->dpre, first, count, dz);
    optional_lanes(n, &a->dpost, first, count, dz + n);
    optional_lanes(n * n, &a->dlogits, first, count, dz + 2 * n);
    gates_bwd_lanes(n, z, dz);
    if (present(&a->dz))
        store_lanes(logits, &a->dz, 0, first, count, dz);
    vec q = 1.0f / (rho + EPS);
    for (int64_t k = 0; k < logits; k++) {
        dz[k] *= m->scale[k < n ? 0 : k < 2 * n ? 1 : 2];
        sum += dz[k] * p[k];
        dz[k] *= q;
    }
    sum = -sum * q * q;
    store_lanes(logits, &a->dp, 0, first, count, dz);
    store_lanes(1, &a->drho, 0, first, count, &sum);
}

/* The gradient of z again, from that of p: dbeta and the three scales in double and row order. */
static void gates_sums(const struct mhc_gates_bwd_args *a, const struct mapping *m)
{
    int64_t rows = a->p.dim[0], n = a->rule.streams, logits = mhc_logits(n);
    double beta[LOGITS_MAX] = {0}, group[3] = {0};
    for (int64_t r = 0; r < rows; r++) {
        const float *p = row_of(&a->p, r);
        float q = 1.0f / (row_of(&a->rho, r)[0] + EPS);
        for (int64_t k = 0; k < logits; k++) {
            int g = k < n ? 0 : k < 2 * n ? 1 : 2;
            float dz = 0;
            if (k >= 2 * n)
                dz = present(&a->dlogits) ? row_of(&a->dlogits, r)[k - 2 * n] : 0;
            else if (present(k < n ? &a->dpre : &a->dpost)) {
                float s = fast_sigmoidf(p[k] * q * m->scale[g] + m->beta[k]);
                dz = (k < n ? row_of(&a->dpre, r)[k] : 2 * row_of(&a->dpost, r)[k - n]) * s * (1 - s);
            }
            beta[k] += (double)dz;
            group[g] += (double)(dz * p[k] * q);
        }
    }
    float *const dalpha[3] = {a->da_pre.data, a->da_post.data, a->da_res.data}, *dbeta = a->dbeta.data;
    for (int64_t k = 0; k < logits; k++)
        dbeta[k] = (a->acc_dbeta ? dbeta[k] : 0) + (float)beta[k];
    for (int g = 0; g < 3; g++)
        dalpha[g][0] = (a->acc_dbeta ? dalpha[g][0] : 0) + (float)group[g];
}

int CPU_NAME(mhc_gates_bwd_cpu)(struct lane *l, const struct mhc_gates_bwd_args *a)
{
    TRY(mhc_gates_bwd_check(a, l->err));
    int64_t rows = a->p.dim[0];
    struct mapping m = mapping_of(&a->a_pre, &a->a_post, &a->a_res, &a->beta);
    if (present(&a->dbeta))
        gates_sums(a, &m);
#pragma omp parallel for schedule(static) if (rows > 256)
    for (int64_t first = 0; first < rows; first += VL)
        gates_bwd_rows(a, &m, first, min_i64(VL, rows - first));
    return ST_OK;
}

int CPU_NAME(mhc_sinkhorn_fwd_cpu)(struct lane *l, const struct mhc_sinkhorn_fwd_args *a)
{
    TRY(mhc_sinkhorn_fwd_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->rule.streams;
#pragma omp parallel for schedule(static) if (rows > 64)
    for (int64_t first = 0; first < rows; first += VL) {
        int64_t count = min_i64(VL, rows - first);
        vec y[MATRIX_MAX];
        load_lanes(n * n, &a->logits, 0, first, count, y);
        FOR_STREAMS(n, sinkhorn_lanes(STREAMS, &a->rule, y, NULL, NULL));
        round_lanes(&a->rule, y, n * n);
        store_lanes(n * n, &a->res, 0, first, count, y);
    }
    return ST_OK;
}

int CPU_NAME(mhc_sinkhorn_bwd_cpu)(struct lane *l, const struct mhc_sinkhorn_bwd_args *a)
{
    TRY(mhc_sinkhorn_bwd_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->rule.streams;
#pragma omp parallel for schedule(static) if (rows > 64)
    for (int64_t first = 0; first < rows; first += VL) {
        int64_t count = min_i64(VL, rows - first);
        vec y[MATRIX_MAX], g[MATRIX_MAX];
        load_lanes(n * n, &a->logits, 0, first, count, y);
        load_lanes(n * n, &a->dres, 0, first, count, g);
        FOR_STREAMS(n, sinkhorn_bwd_lanes(STREAMS, &a->rule, y, g));
        store_lanes(n * n, &a->dlogits, 0, first, count, g);
    }
    return ST_OK;
}
