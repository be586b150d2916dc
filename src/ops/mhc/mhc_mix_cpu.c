/* Mixing streams on the CPU: combine, aggregate, expand, contract's rows; see mhc.h. */
#include "ops/mhc/mhc_cpu_int.h"

#include "ops/dropout/dropout_mask.h"

/* Draws come four channels at a time, from a multiple of four; a stream may start between. */
void CPU_NAME(mhc_drop_factors)(const struct dropout_rule *r, int64_t t, int64_t first, int64_t count, float *factor)
{
    const int64_t *info = r->info.data;
    uint32_t bits[2 * DROPOUT_RUN], threshold = dropout_threshold(r->p);
    float kept = (float)(1 / (1 - r->p));
    int64_t skip = first % 4, sample = info[1] + t / r->seq, pos = t % r->seq;
    dropout_bits(r->key, info[0], sample, pos, first - skip, bits);
    if (skip + count > DROPOUT_RUN)
        dropout_bits(r->key, info[0], sample, pos, first - skip + DROPOUT_RUN, bits + DROPOUT_RUN);
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        factor[i] = bits[skip + i] >= threshold ? kept : 0.0f;
}

/* ---- combine forward --------------------------------------------------------------------------------- */

/* VL channels: all streams are read before any is written, so y may be x. */
INLINE vec combine_lanes(int64_t n, int64_t d, const float *x, const float *f, const float *bias, const float *factor,
                         const float *mix, const float *post, float *y)
{
    vec in[MHC_MAX_STREAMS] = {{0}}, square = {0}, v = vec_at(f);
    if (bias != NULL)
        v += vec_at(bias);
    UNROLL
    for (int64_t j = 0; j < n; j++)
        in[j] = vec_at(x + j * d);
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        vec u = v * post[i];
        if (factor != NULL)
            u *= vec_at(factor + i * DROPOUT_RUN);
        UNROLL
        for (int64_t j = 0; j < n; j++)
            u += in[j] * mix[i * n + j];
        vec_put(y + i * d, u);
        square += u * u;
    }
    return square;
}

INLINE float combine_one(int64_t n, int64_t d, const float *x, float v, const float *factor, const float *mix, const float *post,
                         float *y)
{
    float in[MHC_MAX_STREAMS], square = 0;
    for (int64_t j = 0; j < n; j++)
        in[j] = x[j * d];
    for (int64_t i = 0; i < n; i++) {
        float u = v * post[i];
        if (factor != NULL)
            u *= factor[i * DROPOUT_RUN];
        for (int64_t j = 0; j < n; j++)
            u += in[j] * mix[i * n + j];
        y[i * d] = u;
        square += u * u;
    }
    return square;
}

INLINE float combine_run(int64_t n, int64_t d, int64_t count, const float *x, const float *f, const float *bias, const float *factor,
                         const float *mix, const float *post, float *y)
{
    vec square = {0};
    float tail = 0;
    int64_t c = 0;
    for (; c + VL <= count; c += VL)
        square += combine_lanes(n, d, x + c, f + c, bias ? bias + c : NULL, factor ? factor + c : NULL, mix, post, y + c);
    for (; c < count; c++)
        tail += combine_one(n, d, x + c, bias ? f[c] + bias[c] : f[c], factor ? factor + c : NULL, mix, post, y + c);
    return vec_sum(square) + tail;
}

INLINE float combine_row(int64_t n, const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *mix)
{
    int64_t d = a->f.dim[1];
    const float *x = f32_row(&a->x, r), *f = f32_row(&a->f, r), *bias = a->bias.data;
    float *y = f32_row(&a->y, r), square = 0, factor[MHC_MAX_STREAMS * DROPOUT_RUN];
    if (a->drop.p == 0)
        return bias ? combine_run(n, d, d, x, f, bias, NULL, mix, post, y) : combine_run(n, d, d, x, f, NULL, NULL, mix, post, y);
    for (int64_t c = 0; c < d; c += DROPOUT_RUN) {
        int64_t count = min_i64(DROPOUT_RUN, d - c);
        for (int64_t i = 0; i < n; i++)
            CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, count, factor + i * DROPOUT_RUN);
        square += combine_run(n, d, count, x + c, f + c, bias ? bias + c : NULL, factor, mix, post, y + c);
    }
    return square;
}

float CPU_NAME(mhc_combine_row)(const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *res)
{
    float mix[MATRIX_MAX], square = 0;
    load_mix(&a->rule, res, mix);
#define CALL(n) square = combine_row(n, a, r, post, mix)
    FOR_STREAMS(a->rule.streams, CALL);
#undef CALL
    return square;
}

int CPU_NAME(mhc_combine_fwd_cpu)(struct lane *l, const struct mhc_combine_fwd_args *a)
{
    TRY(mhc_combine_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0];
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t r = 0; r < rows; r++)
        CPU_NAME(mhc_combine_row)(a, r, f32_row(&a->post, r), f32_row(&a->res, r));
    return ST_OK;
}

/* ---- combine backward -------------------------------------------------------------------------------- */

/* VL channels at offset at. dx may be g: all of g is read first. */
INLINE void bwd_lanes(int64_t n, const struct combine_run *c, const float *g_in, int64_t g_step, const float *x_in, int64_t x_step,
                      vec f, const float *factor, float *dx, int64_t dx_step, float *df)
{
    vec g[MHC_MAX_STREAMS] = {{0}}, x[MHC_MAX_STREAMS] = {{0}}, sum = {0}, *sums = c->sums;
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        g[i] = vec_at(g_in + i * g_step);
        x[i] = vec_at(x_in + i * x_step);
    }
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        UNROLL
        for (int64_t j = 0; j < n; j++)
            sums[i * n + j] += g[i] * x[j];
    }
    UNROLL
    for (int64_t j = 0; j < n; j++) {
        vec u = {0};
        UNROLL
        for (int64_t i = 0; i < n; i++)
            u += g[i] * c->mix[i * n + j];
        vec_put(dx + j * dx_step, u);
    }
    UNROLL
    for (int64_t i = 0; i < n; i++) {
        vec u = g[i];
        if (factor != NULL)
            u *= vec_at(factor + i * DROPOUT_RUN);
        sum += u * c->post[i];
        sums[n * n + i] += u * f;
    }
    vec_put(df, sum);
}

/* Fewer than VL channels: through copies padded with zeros. */
INLINE void bwd_tail(int64_t n, const struct combine_run *c, int64_t at, int64_t count)
{
    float g[MHC_MAX_STREAMS * VL] = {0}, x[MHC_MAX_STREAMS * VL] = {0}, factor[MHC_MAX_STREAMS * DROPOUT_RUN] = {0};
    float dx[MHC_MAX_STREAMS * VL], df[VL], f[VL] = {0};
    for (int64_t k = 0; k < count; k++) {
        f[k] = c->f[at + k] + (c->bias ? c->bias[at + k] : 0);
        for (int64_t i = 0; i < n; i++) {
            g[i * VL + k] = c->g[i * c->g_step + at + k];
            x[i * VL + k] = c->x[i * c->d + at + k];
            if (c->factor)
                factor[i * DROPOUT_RUN + k] = c->factor[i * DROPOUT_RUN + at + k];
        }
    }
    bwd_lanes(n, c, g, VL, x, VL, vec_at(f), c->factor ? factor : NULL, dx, VL, df);
    for (int64_t k = 0; k < count; k++) {
        c->df[at + k] = df[k];
        for (int64_t i = 0; i < n; i++)
            c->dx[i * c->d + at + k] = dx[i * VL + k];
    }
}

INLINE void bwd_run(int64_t n, const struct combine_run *outer)
{
    struct combine_run c = *outer;
    vec sums[MATRIX_MAX + MHC_MAX_STREAMS];
    UNROLL
    for (int64_t i = 0; i < n * n + n; i++)
        sums[i] = outer->sums[i];
    c.sums = sums;
    int64_t at = 0;
    for (; at + VL <= c.count; at += VL) {
        vec f = vec_at(c.f + at);
        if (c.bias != NULL)
            f += vec_at(c.bias + at);
        bwd_lanes(n, &c, c.g + at, c.g_step, c.x + at, c.d, f, c.factor ? c.factor + at : NULL, c.dx + at, c.d, c.df + at);
    }
    if (at < c.count)
        bwd_tail(n, &c, at, c.count - at);
    UNROLL
    for (int64_t i = 0; i < n * n + n; i++)
        outer->sums[i] = sums[i];
}

void CPU_NAME(mhc_combine_bwd_run)(const struct combine_run *c)
{
#define CALL(n) bwd_run(n, c)
    FOR_STREAMS(c->n, CALL);
#undef CALL
}

void CPU_NAME(mhc_combine_bwd_finish)(const struct mhc_rule *r, const vec *sums, float *dpost, float *dres)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++) {
        dpost[i] = vec_sum(sums[n * n + i]);
        for (int64_t j = 0; j < n; j++)
            dres[r->profile == MHC_D ? j * n + i : i * n + j] = vec_sum(sums[i * n + j]);
    }
}

void CPU_NAME(mhc_add_partials)(float *out, bool acc, const float *partial, int64_t partial_step, int64_t blocks, int64_t count)
{
    enum { STRIP = 512 };
#pragma omp parallel for schedule(static) if (blocks * count > 16384)
    for (int64_t first = 0; first < count; first += STRIP) {
        int64_t end = min_i64(count, first + STRIP);
        if (!acc)
            memset(out + first, 0, (size_t)(end - first) * sizeof *out);
        for (int64_t b = 0; b < blocks; b++) {
#pragma omp simd
            for (int64_t c = first; c < end; c++)
                out[c] += partial[b * partial_step + c];
        }
    }
}

int64_t CPU_NAME(mhc_combine_bwd_work_cpu)(const struct mhc_combine_bwd_args *a)
{
    return a->dbias.rank > 0 ? ceil_div(a->x.dim[0], MHC_BLOCK) * a->f.dim[1] * (int64_t)sizeof(float) : 0;
}

static void combine_bwd_row(const struct mhc_combine_bwd_args *a, int64_t r, float *dbias)
{
    int64_t n = a->rule.streams, d = a->f.dim[1];
    float mix[MATRIX_MAX], factor[MHC_MAX_STREAMS * DROPOUT_RUN];
    vec sums[MATRIX_MAX + MHC_MAX_STREAMS];
    const float *bias = a->bias.data;
    load_mix(&a->rule, f32_row(&a->res, r), mix);
    memset(sums, 0, (size_t)(n * n + n) * sizeof *sums);
    for (int64_t c = 0; c < d; c += DROPOUT_RUN) {
        struct combine_run run = {.n = n, .count = min_i64(DROPOUT_RUN, d - c), .g_step = d, .d = d, .g = f32_row(&a->dy, r) + c,
                                  .x = f32_row(&a->x, r) + c, .f = f32_row(&a->f, r) + c, .bias = bias ? bias + c : NULL,
                                  .factor = a->drop.p > 0 ? factor : NULL, .mix = mix, .post = f32_row(&a->post, r),
                                  .dx = f32_row(&a->dx, r) + c, .df = f32_row(&a->df, r) + c, .sums = sums};
        for (int64_t i = 0; a->drop.p > 0 && i < n; i++)
            CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, run.count, factor + i * DROPOUT_RUN);
        CPU_NAME(mhc_combine_bwd_run)(&run);
        for (int64_t k = 0; dbias != NULL && k < run.count; k++)
            dbias[c + k] += run.df[k];
    }
    CPU_NAME(mhc_combine_bwd_finish)(&a->rule, sums, f32_row(&a->dpost, r), f32_row(&a->dres, r));
}

int CPU_NAME(mhc_combine_bwd_cpu)(struct lane *l, const struct mhc_combine_bwd_args *a)
{
    TRY(mhc_combine_bwd_check(a, l->err));
    TRY(check_work("mhc_combine_bwd", &a->work, CPU_NAME(mhc_combine_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], d = a->f.dim[1], blocks = ceil_div(rows, MHC_BLOCK);
    float *partial = a->work.data;
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t b = 0; b < blocks; b++) {
        float *dbias = present(&a->dbias) ? partial + b * d : NULL;
        if (dbias != NULL)
            memset(dbias, 0, (size_t)d * sizeof *dbias);
        for (int64_t r = b * MHC_BLOCK; r < min_i64(rows, (b + 1) * MHC_BLOCK); r++)
            combine_bwd_row(a, r, dbias);
    }
    if (present(&a->dbias))
        CPU_NAME(mhc_add_partials)(a->dbias.data, a->acc_dbias, partial, d, blocks, d);
    return ST_OK;
}

/* ---- aggregate, expand --------------------------------------------------------------------------------- */

int CPU_NAME(mhc_aggregate_fwd_cpu)(struct lane *l, const struct mhc_aggregate_fwd_args *a)
{
    TRY(mhc_aggregate_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->pre.dim[1], d = a->a.dim[1];
#pragma omp parallel for schedule(static) if (rows * n * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r), *pre = f32_row(&a->pre, r);
        float *out = f32_row(&a->a, r);
        for (int64_t i = 0; i < n; i++) {
#pragma omp simd
            for (int64_t c = 0; c < d; c++)
                out[c] = (i > 0 ? out[c] : 0) + pre[i] * x[i * d + c];
        }
    }
    return ST_OK;
}

int CPU_NAME(mhc_aggregate_bwd_cpu)(struct lane *l, const struct mhc_aggregate_bwd_args *a)
{
    TRY(mhc_aggregate_bwd_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->pre.dim[1], d = a->da.dim[1];
#pragma omp parallel for schedule(static) if (rows * n * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *da = f32_row(&a->da, r), *pre = f32_row(&a->pre, r);
        for (int64_t i = 0; i < n; i++) {
            const float *x = f32_row(&a->x, r) + i * d;
            float *dx = f32_row(&a->dx, r) + i * d, sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < d; c++) {
                sum += da[c] * x[c];
                dx[c] = (a->acc_dx ? dx[c] : 0) + pre[i] * da[c];
            }
            f32_row(&a->dpre, r)[i] = sum;
        }
    }
    return ST_OK;
}

int CPU_NAME(mhc_expand_fwd_cpu)(struct lane *l, const struct mhc_expand_fwd_args *a)
{
    TRY(mhc_expand_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1], k = a->y.dim[1];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < k; at += d)
            memcpy(f32_row(&a->y, r) + at, f32_row(&a->x, r), (size_t)d * sizeof(float));
    return ST_OK;
}

int CPU_NAME(mhc_expand_bwd_cpu)(struct lane *l, const struct mhc_expand_bwd_args *a)
{
    TRY(mhc_expand_bwd_check(a, l->err));
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1], k = a->dy.dim[1];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *dy = f32_row(&a->dy, r);
        float *dx = f32_row(&a->dx, r);
        for (int64_t at = 0; at < k; at += d) {
#pragma omp simd
            for (int64_t c = 0; c < d; c++)
                dx[c] = (at > 0 ? dx[c] : 0) + dy[at + c];
        }
    }
    return ST_OK;
}
