/* The boundary between two sublayers on the CPU; see mhc.h. VL tokens at a time go through all stages while their
 * streams are in cache: forward reads and writes each stream once, backward reads the new streams, the old ones and
 * the incoming gradient once each and writes the complete gradient. */
#include "ops/mhc/mhc_cpu_int.h"

#include "ops/dropout/dropout_mask.h"
#include "ops/mhc/mhc_health_int.h"

#include <math.h>

/* ---- forward --------------------------------------------------------------------------------------------- */

/* h = norm(sum_i pre_i x_i); h holds the aggregate in between. Returns rstd. */
INLINE float aggregate_norm(int64_t n, int64_t d, const float *x, const float *pre, const float *gain, float one, float eps, float *h)
{
    vec square = {0};
    float tail = 0;
    int64_t c = 0;
    for (; c + VL <= d; c += VL) {
        vec a = {0};
        UNROLL
        for (int64_t i = 0; i < n; i++)
            a += vec_at(x + i * d + c) * pre[i];
        vec_put(h + c, a);
        square += a * a;
    }
    for (; c < d; c++) {
        float a = 0;
        for (int64_t i = 0; i < n; i++)
            a += x[i * d + c] * pre[i];
        h[c] = a;
        tail += a * a;
    }
    float rstd = 1.0f / sqrtf((vec_sum(square) + tail) / (float)d + eps);
#pragma omp simd
    for (c = 0; c < d; c++)
        h[c] *= gain ? rstd * (gain[c] + one) : rstd;
    return rstd;
}

static void open_row(const struct mhc_boundary_fwd_args *a, const struct tensor *stream, int64_t r)
{
    int64_t d = a->h.dim[1], logits = mhc_logits(a->rule.streams);
    const float *x = f32_row(stream, r), *pre = f32_row(&a->coef, r), *gain = a->gain.data;
    float rstd = 0, *h = f32_row(&a->h, r), one = a->zero_centered ? 1.0f : 0.0f;
#define CALL(n) rstd = aggregate_norm(n, d, x, pre, gain, one, (float)a->eps, h)
    FOR_STREAMS(a->rule.streams, CALL);
#undef CALL
    f32_row(&a->stat, r)[logits + 1] = rstd;
}

static void project_rows(const struct mhc_boundary_fwd_args *a, const struct tensor *stream, int64_t first, int64_t count)
{
    for (int64_t t = 0; t < count; t += GROUP) {
        float *p[GROUP];
        int64_t some = min_i64(GROUP, count - t);
        for (int64_t i = 0; i < some; i++)
            p[i] = f32_row(&a->stat, first + t + i);
        CPU_NAME(mhc_project_group)(stream, &a->w, first + t, some, p);
    }
}

static void forward_lanes(const struct mhc_boundary_fwd_args *a, const struct mhc_combine_fwd_args *combine, int64_t first, int64_t count)
{
    int64_t n = a->rule.streams, k = a->x.dim[1], logits = mhc_logits(n);
    bool closes = present(&a->f), maps = present(&a->h) && !a->reuse;
    const struct tensor *stream = closes ? &a->y : &a->x;
    for (int64_t r = first; r < first + count; r++) {
        const float *in = closes ? f32_row(&a->coef_in, r) : NULL;
        float square = closes ? CPU_NAME(mhc_combine_row)(combine, r, in + n, in + 2 * n) : maps ? sum_squares(f32_row(stream, r), k) : 0;
        if (maps)
            f32_row(&a->stat, r)[logits] = k > 0 ? sqrtf(square / (float)k) : 0;
    }
    if (maps) {
        project_rows(a, stream, first, count);
        CPU_NAME(mhc_coef_lanes)(a, first, count);
    }
    for (int64_t r = first; present(&a->h) && r < first + count; r++)
        open_row(a, stream, r);
}

int CPU_NAME(mhc_boundary_fwd_cpu)(struct lane *l, const struct mhc_boundary_fwd_args *a)
{
    TRY(mhc_boundary_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0];
    struct mhc_combine_fwd_args combine = {.x = a->x, .f = a->f, .bias = a->bias, .y = a->y, .rule = a->rule, .drop = a->drop};
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t first = 0; first < rows; first += VL)
        forward_lanes(a, &combine, first, min_i64(VL, rows - first));
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------------------- */

enum { RUN = DROPOUT_RUN }; /* channels worked on at once */

/* What the passes over a token's channels hand on. */
struct token {
    float rstd, k;          /* da = rstd (dh gain - a k) */
    float through_rho;      /* drho / (K rho) */
    float mix[MATRIX_MAX];  /* of the sublayer that closed */
};
struct group {
    struct token t[VL];
    vec dcoef[LOGITS_MAX];                      /* by lanes: gradients of coefficients, then dz */
    float dp[VL][LOGITS_MAX];
    vec sums[VL][MATRIX_MAX + MHC_MAX_STREAMS]; /* combine_run.sums */
    float g[GROUP][MHC_MAX_STREAMS * RUN];      /* complete gradient of the new streams */
    float factor[MHC_MAX_STREAMS * RUN];
};

int64_t CPU_NAME(mhc_boundary_bwd_work_cpu)(const struct mhc_boundary_bwd_args *a)
{
    int64_t sums = (a->dgain.rank > 0) + (a->dbias.rank > 0);
    return sums * ceil_div(a->dx.dim[0], MHC_BLOCK) * (a->dx.dim[1] / a->rule.streams) * (int64_t)sizeof(float);
}

/* First pass over a row: dots[i] = sum dh gain y_i, dots[n + i] = sum a y_i; dgain += dh a rstd. From them
 * follow k and dpre without da ever being stored. */
INLINE void norm_dots(int64_t n, int64_t d, const float *dh, const float *y, const float *pre, const float *gain, float one,
                      float rstd, float *dgain, float *dots)
{
    vec acc[2 * MHC_MAX_STREAMS];
    int64_t c = 0;
    UNROLL
    for (int64_t i = 0; i < 2 * n; i++)
        acc[i] = (vec){0};
    for (; c + VL <= d; c += VL) {
        vec in[MHC_MAX_STREAMS] = {{0}}, a = {0}, g = vec_at(dh + c), u = g;
        if (gain != NULL)
            u *= vec_at(gain + c) + one;
        UNROLL
        for (int64_t i = 0; i < n; i++) {
            in[i] = vec_at(y + i * d + c);
            a += in[i] * pre[i];
        }
        UNROLL
        for (int64_t i = 0; i < n; i++) {
            acc[i] += u * in[i];
            acc[n + i] += a * in[i];
        }
        if (dgain != NULL)
            vec_put(dgain + c, vec_at(dgain + c) + g * a * rstd);
    }
    UNROLL
    for (int64_t i = 0; i < 2 * n; i++)
        dots[i] = vec_sum(acc[i]);
    for (; c < d; c++) {
        float a = 0, u = gain ? dh[c] * (gain[c] + one) : dh[c];
        for (int64_t i = 0; i < n; i++)
            a += y[i * d + c] * pre[i];
        for (int64_t i = 0; i < n; i++) {
            dots[i] += u * y[i * d + c];
            dots[n + i] += a * y[i * d + c];
        }
        if (dgain != NULL)
            dgain[c] += dh[c] * a * rstd;
    }
}

static void first_pass(const struct mhc_boundary_bwd_args *a, int64_t r, int64_t lane, struct group *g, float *dgain)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1], logits = mhc_logits(n);
    const float *pre = f32_row(&a->coef, r), *dcoef = present(&a->dcoef) ? f32_row(&a->dcoef, r) : NULL;
    struct token *t = &g->t[lane];
    float dots[2 * MHC_MAX_STREAMS], sum = 0, one = a->zero_centered ? 1.0f : 0.0f;
    t->rstd = f32_row(&a->stat, r)[logits + 1];
#define CALL(n) norm_dots(n, d, f32_row(&a->dh, r), f32_row(&a->y, r), pre, a->gain.data, one, t->rstd, dgain, dots)
    FOR_STREAMS(n, CALL);
#undef CALL
    for (int64_t i = 0; i < n; i++)
        sum += pre[i] * dots[i];
    t->k = d > 0 ? sum * t->rstd * t->rstd / (float)d : 0;
    for (int64_t i = 0; i < logits; i++) {
        float v = dcoef ? dcoef[i] : 0;
        ((float *)&g->dcoef[i])[lane] = i < n ? v + t->rstd * (dots[i] - t->k * dots[n + i]) : v;
    }
}

/* dz is in place: dp = dz A q per token, and drho. */
static void through_gates(const struct mhc_boundary_bwd_args *a, int64_t r, int64_t lane, struct group *g)
{
    int64_t n = a->rule.streams, logits = mhc_logits(n);
    const float *stat = f32_row(&a->stat, r), *dz = f32_row(&a->dz, r);
    const float scale[3] = {scalar_of(&a->a_pre), scalar_of(&a->a_post), scalar_of(&a->a_res)};
    float rho = stat[logits], q = 1.0f / (rho + EPS), sum = 0;
    for (int64_t i = 0; i < logits; i++) {
        float v = dz[i] * scale[i < n ? 0 : i < 2 * n ? 1 : 2];
        sum += v * stat[i];
        g->dp[lane][i] = v * q;
    }
    g->t[lane].through_rho = rho == 0 ? 0 : -q * q * sum / ((float)a->dx.dim[1] * rho);
}

/* g_i = dy_i + pre_i da + through_rho y_i over a run of channels of one token. */
INLINE void start_run(int64_t n, int64_t d, int64_t count, const struct token *t, const float *dh, const float *dy, const float *y,
                      const float *pre, const float *gain, float one, float *g)
{
    int64_t c = 0;
    for (; c + VL <= count; c += VL) {
        vec in[MHC_MAX_STREAMS] = {{0}}, a = {0}, u = vec_at(dh + c);
        if (gain != NULL)
            u *= vec_at(gain + c) + one;
        UNROLL
        for (int64_t i = 0; i < n; i++) {
            in[i] = vec_at(y + i * d + c);
            a += in[i] * pre[i];
        }
        vec da = (u - a * t->k) * t->rstd;
        UNROLL
        for (int64_t i = 0; i < n; i++) {
            vec v = da * pre[i] + in[i] * t->through_rho;
            if (dy != NULL)
                v += vec_at(dy + i * d + c);
            vec_put(g + i * RUN + c, v);
        }
    }
    for (; c < count; c++) {
        float a = 0, u = gain ? dh[c] * (gain[c] + one) : dh[c];
        for (int64_t i = 0; i < n; i++)
            a += y[i * d + c] * pre[i];
        float da = (u - a * t->k) * t->rstd;
        for (int64_t i = 0; i < n; i++)
            g[i * RUN + c] = da * pre[i] + y[i * d + c] * t->through_rho + (dy ? dy[i * d + c] : 0);
    }
}

/* g[t] += dp[t] w over a run of channels of one stream, for `tokens` tokens. */
INLINE void add_projection(int tokens, int64_t logits, int64_t count, const float *const *dp, const float *w, int64_t w_step, float *const *g)
{
    int64_t c = 0;
    for (; c + 2 * VL <= count; c += 2 * VL) {
        vec acc[GROUP][2];
        UNROLL
        for (int t = 0; t < tokens; t++) {
            acc[t][0] = vec_at(g[t] + c);
            acc[t][1] = vec_at(g[t] + c + VL);
        }
        for (int64_t i = 0; i < logits; i++) {
            vec w0 = vec_at(w + i * w_step + c), w1 = vec_at(w + i * w_step + c + VL);
            UNROLL
            for (int t = 0; t < tokens; t++) {
                acc[t][0] += w0 * dp[t][i];
                acc[t][1] += w1 * dp[t][i];
            }
        }
        UNROLL
        for (int t = 0; t < tokens; t++) {
            vec_put(g[t] + c, acc[t][0]);
            vec_put(g[t] + c + VL, acc[t][1]);
        }
    }
    for (int t = 0; c < count && t < tokens; t++)
        for (int64_t i = 0; i < logits; i++) {
#pragma omp simd
            for (int64_t at = c; at < count; at++)
                g[t][at] += dp[t][i] * w[i * w_step + at];
        }
}

/* The complete gradient of the new streams goes back through combine, or out if nothing closed. */
static void finish_run(const struct mhc_boundary_bwd_args *a, int64_t r, int64_t lane, int64_t c, int64_t count, float *run, struct group *g,
                       float *dbias)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1];
    if (!present(&a->f)) {
        for (int64_t i = 0; i < n; i++)
            memcpy(f32_row(&a->dx, r) + i * d + c, run + i * RUN, (size_t)count * sizeof *run);
        return;
    }
    const float *bias = a->bias.data;
    struct combine_run back = {.n = n, .count = count, .g_step = RUN, .d = d, .g = run, .x = f32_row(&a->x, r) + c,
                               .f = f32_row(&a->f, r) + c, .bias = bias ? bias + c : NULL, .factor = a->drop.p > 0 ? g->factor : NULL,
                               .mix = g->t[lane].mix, .post = f32_row(&a->coef_in, r) + n, .dx = f32_row(&a->dx, r) + c,
                               .df = f32_row(&a->df, r) + c, .sums = g->sums[lane]};
    for (int64_t i = 0; a->drop.p > 0 && i < n; i++)
        CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, count, g->factor + i * RUN);
    CPU_NAME(mhc_combine_bwd_run)(&back);
    for (int64_t k = 0; dbias != NULL && k < count; k++)
        dbias[c + k] += back.df[k];
}

/* One run of channels, GROUP tokens. */
static void run_tokens(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t lane, int64_t tokens, int64_t c, int64_t count,
                       struct group *g, float *dbias)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1];
    const float *gain = a->gain.data, *dp[GROUP];
    float one = a->zero_centered ? 1.0f : 0.0f;
    for (int64_t t = 0; t < tokens; t++) {
        int64_t r = first + lane + t;
        const float *dy = present(&a->dy) ? f32_row(&a->dy, r) + c : NULL;
        dp[t] = g->dp[lane + t];
#define CALL(n)                                                                                                                         \
    start_run(n, d, count, &g->t[lane + t], f32_row(&a->dh, r) + c, dy, f32_row(&a->y, r) + c, f32_row(&a->coef, r), gain ? gain + c : NULL, \
              one, g->g[t])
        FOR_STREAMS(n, CALL);
#undef CALL
    }
    for (int64_t i = 0; i < n; i++) {
        float *out[GROUP];
        const float *w = (const float *)a->w.data + i * d + c;
        for (int64_t t = 0; t < tokens; t++)
            out[t] = g->g[t] + i * RUN;
        if (tokens == GROUP)
            add_projection(GROUP, mhc_logits(n), count, dp, w, a->w.stride[0], out);
        else
            for (int64_t t = 0; t < tokens; t++)
                add_projection(1, mhc_logits(n), count, dp + t, w, a->w.stride[0], out + t);
    }
    for (int64_t t = 0; t < tokens; t++)
        finish_run(a, first + lane + t, lane + t, c, count, g->g[t], g, dbias);
}

static void backward_lanes(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t count, float *dgain, float *dbias)
{
    struct group g; /* on the stack: some hundred KB at most streams, a few tens at 4 */
    int64_t n = a->rule.streams, d = a->dh.dim[1];
    bool closes = present(&a->f);
    memset(g.dcoef, 0, (size_t)mhc_logits(n) * sizeof g.dcoef[0]);
    for (int64_t t = 0; t < count; t++)
        first_pass(a, first + t, t, &g, dgain);
    CPU_NAME(mhc_coef_bwd_lanes)(a, first, count, g.dcoef);
    for (int64_t t = 0; t < count; t++) {
        through_gates(a, first + t, t, &g);
        memset(g.sums[t], 0, (size_t)(n * n + n) * sizeof(vec));
        if (closes)
            load_mix(&a->rule, f32_row(&a->coef_in, first + t) + 2 * n, g.t[t].mix);
    }
    for (int64_t c = 0; c < d; c += RUN)
        for (int64_t t = 0; t < count; t += GROUP)
            run_tokens(a, first, t, min_i64(GROUP, count - t), c, min_i64(RUN, d - c), &g, dbias);
    for (int64_t t = 0; closes && t < count; t++) {
        float *out = f32_row(&a->dcoef_in, first + t);
        memset(out, 0, (size_t)n * sizeof *out);
        CPU_NAME(mhc_combine_bwd_finish)(&a->rule, g.sums[t], out + n, out + 2 * n);
    }
}

int CPU_NAME(mhc_boundary_bwd_cpu)(struct lane *l, const struct mhc_boundary_bwd_args *a)
{
    TRY(mhc_boundary_bwd_check(a, l->err));
    TRY(check_work("mhc_boundary_bwd", &a->work, CPU_NAME(mhc_boundary_bwd_work_cpu)(a), l->err));
    int64_t rows = a->dx.dim[0], d = a->dh.dim[1], blocks = ceil_div(rows, MHC_BLOCK);
    float *gains = present(&a->dgain) ? a->work.data : NULL, *biases = NULL;
    if (present(&a->dbias) && a->work.data != NULL)
        biases = (float *)a->work.data + (gains ? blocks * d : 0);
#pragma omp parallel for schedule(static) if (rows * d > 1024)
    for (int64_t b = 0; b < blocks; b++) {
        float *dgain = gains ? gains + b * d : NULL, *dbias = biases ? biases + b * d : NULL;
        if (dgain != NULL)
            memset(dgain, 0, (size_t)d * sizeof *dgain);
        if (dbias != NULL)
            memset(dbias, 0, (size_t)d * sizeof *dbias);
        int64_t end = min_i64(rows, (b + 1) * MHC_BLOCK);
        for (int64_t first = b * MHC_BLOCK; first < end; first += VL)
            backward_lanes(a, first, min_i64(VL, end - first), dgain, dbias);
    }
    if (present(&a->dgain))
        CPU_NAME(mhc_add_partials)(a->dgain.data, a->acc_dgain, gains, d, blocks, d);
    if (present(&a->dbias))
        CPU_NAME(mhc_add_partials)(a->dbias.data, a->acc_dbias, biases, d, blocks, d);
    return ST_OK;
}

int CPU_NAME(mhc_health_cpu)(struct lane *l, const struct mhc_health_args *a)
{
    TRY(mhc_health_check(a, l->err));
    mhc_health(a);
    return ST_OK;
}
