/* Mixing streams on the CPU: combine, aggregate, expand, contract's rows; see mhc.h. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"

#include "ops/dropout/dropout_mask.h"

/* Draws come four channels at a time, from a multiple of four; a stream may start between. count <= DROPOUT_RUN. */
static void drop_factors(const struct dropout_rule *r, int64_t t, int64_t first, int64_t count, float *factor)
{
    struct draw_place at = dropout_place(r->info.data, t + r->first, r->seq);
    uint32_t bits[2 * DROPOUT_RUN], threshold = dropout_threshold(r->p);
    float kept = (float)(1 / (1 - r->p));
    int64_t skip = first % 4;
    dropout_bits(r->key, at.step, at.sample, at.pos, first - skip, bits);
    if (skip + count > DROPOUT_RUN)
        dropout_bits(r->key, at.step, at.sample, at.pos, first - skip + DROPOUT_RUN, bits + DROPOUT_RUN);
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        factor[i] = bits[skip + i] >= threshold ? kept : 0.0f;
}

void CPU_NAME(mhc_drop_factors)(const struct dropout_rule *r, int64_t t, int64_t first, int64_t count, float *factor)
{
    for (int64_t i = 0; i < count; i += DROPOUT_RUN)
        drop_factors(r, t, first + i, min_i64(DROPOUT_RUN, count - i), factor + i);
}

/* ---- combine forward ------------------------------------------------------------------------- */

/* VL channels: all streams are read before any is written, so y may be x. */
INLINE void combine_lanes(int64_t n, int64_t d, const float *x, const float *f, const float *bias, const float *factor,
                          const float *mix, const float *post, float *y)
{
    vec in[MHC_MAX_STREAMS], v = vec_at(f);
    if (bias != NULL)
        v += vec_at(bias);
    for (int64_t j = 0; j < n; j++)
        in[j] = vec_at(x + j * d);
    for (int64_t i = 0; i < n; i++) {
        vec u = v * post[i];
        if (factor != NULL)
            u *= vec_at(factor + i * RUN);
        for (int64_t j = 0; j < n; j++)
            u += in[j] * mix[i * n + j];
        vec_put(y + i * d, u);
    }
}

INLINE void combine_one(int64_t n, int64_t d, const float *x, float v, const float *factor, const float *mix,
                        const float *post, float *y)
{
    float in[MHC_MAX_STREAMS];
    for (int64_t j = 0; j < n; j++)
        in[j] = x[j * d];
    for (int64_t i = 0; i < n; i++) {
        float u = v * post[i];
        if (factor != NULL)
            u *= factor[i * RUN];
        for (int64_t j = 0; j < n; j++)
            u += in[j] * mix[i * n + j];
        y[i * d] = u;
    }
}

INLINE void combine_run(int64_t n, int64_t d, int64_t count, const float *x, const float *f, const float *bias,
                        const float *factor, const float *mix, const float *post, float *y)
{
    int64_t c = 0;
    for (; c + VL <= count; c += VL)
        combine_lanes(n, d, x + c, f + c, bias ? bias + c : NULL, factor ? factor + c : NULL, mix, post, y + c);
    for (; c < count; c++)
        combine_one(n, d, x + c, bias ? f[c] + bias[c] : f[c], factor ? factor + c : NULL, mix, post, y + c);
}

INLINE void combine_row(int64_t n, const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *mix)
{
    int64_t d = a->f.dim[1];
    const float *x = row_of(&a->x, r), *f = row_of(&a->f, r), *bias = a->bias.data;
    float *y = row_of(&a->y, r), factor[MHC_MAX_STREAMS * RUN];
    if (a->drop.p == 0 && bias != NULL)
        combine_run(n, d, d, x, f, bias, NULL, mix, post, y);
    else if (a->drop.p == 0)
        combine_run(n, d, d, x, f, NULL, NULL, mix, post, y);
    for (int64_t c = 0; a->drop.p > 0 && c < d; c += RUN) {
        int64_t count = min_i64(RUN, d - c);
        for (int64_t i = 0; i < n; i++)
            CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, count, factor + i * RUN);
        combine_run(n, d, count, x + c, f + c, bias ? bias + c : NULL, factor, mix, post, y + c);
    }
}

void CPU_NAME(mhc_combine_row)(const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *res)
{
    float mix[MATRIX_MAX];
    load_mix(&a->rule, res, mix);
    FOR_STREAMS(a->rule.streams, combine_row(STREAMS, a, r, post, mix));
}

int CPU_NAME(mhc_combine_fwd_cpu)(struct lane *l, const struct mhc_combine_fwd_args *a)
{
    TRY(mhc_combine_fwd_check(a, l->err));
    const struct bring bring = {{&a->x, &a->f, &a->y}};
    int64_t rows = a->x.dim[0], at_once = bring_count(&bring);
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t b = 0; b < rows; b += MHC_BLOCK)
        for (int64_t r = b; r < min_i64(rows, b + MHC_BLOCK); r++) {
            bring_at(&bring, r, at_once);
            CPU_NAME(mhc_combine_row)(a, r, row_of(&a->post, r), row_of(&a->res, r));
        }
    return ST_OK;
}

/* ---- combine backward ------------------------------------------------------------------------ */

/* `count` channels, a multiple of VL. dx may be g: all of g is read first. */
INLINE void bwd_lanes(int64_t n, const struct combine_run *c, int64_t count)
{
    int64_t d = c->d, g_step = c->g_step;
    const float *g_in = c->g, *x_in = c->x, *f_in = c->f, *bias = c->bias, *factor = c->factor, *mix = c->mix,
                *post = c->post;
    float *dx = c->dx, *df = c->df;
    vec sums[MATRIX_MAX + MHC_MAX_STREAMS], *out = c->sums;
    UNROLL_COPY
    for (int64_t i = 0; i < n * n + n; i++)
        sums[i] = c->fresh ? (vec){0} : out[i];
    for (int64_t at = 0; at < count; at += VL) {
        vec g[MHC_MAX_STREAMS], x[MHC_MAX_STREAMS], sum = {0}, f = vec_at(f_in + at);
        if (bias != NULL)
            f += vec_at(bias + at);
        for (int64_t i = 0; i < n; i++) {
            g[i] = vec_at(g_in + i * g_step + at);
            x[i] = vec_at(x_in + i * d + at);
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                sums[i * n + j] += g[i] * x[j];
        for (int64_t j = 0; j < n; j++) {
            vec u = g[0] * mix[j];
            for (int64_t i = 1; i < n; i++)
                u += g[i] * mix[i * n + j];
            vec_put(dx + j * d + at, u);
        }
        for (int64_t i = 0; i < n; i++) {
            vec u = g[i];
            if (factor != NULL)
                u *= vec_at(factor + i * RUN + at);
            sum += u * post[i];
            sums[n * n + i] += u * f;
        }
        vec_put(df + at, sum);
    }
    UNROLL_COPY
    for (int64_t i = 0; i < n * n + n; i++)
        out[i] = sums[i];
}

static void bwd_whole(const struct combine_run *c, int64_t count) { FOR_STREAMS(c->n, bwd_lanes(STREAMS, c, count)); }

/* Fewer than VL channels, from at: through copies padded with zeros. */
static void bwd_tail(const struct combine_run *c, int64_t at, int64_t count)
{
    float g[MHC_MAX_STREAMS * VL] = {0}, x[MHC_MAX_STREAMS * VL] = {0}, factor[MHC_MAX_STREAMS * RUN] = {0};
    float dx[MHC_MAX_STREAMS * VL], df[VL], f[VL] = {0};
    struct combine_run copy = *c;
    for (int64_t k = 0; k < count; k++)
        f[k] = c->f[at + k] + (c->bias ? c->bias[at + k] : 0);
    for (int64_t i = 0; i < c->n; i++)
        for (int64_t k = 0; k < count; k++) {
            g[i * VL + k] = c->g[i * c->g_step + at + k];
            x[i * VL + k] = c->x[i * c->d + at + k];
            factor[i * RUN + k] = c->factor ? c->factor[i * RUN + at + k] : 0;
        }
    copy.g_step = copy.d = VL;
    copy.g = g;
    copy.x = x;
    copy.f = f;
    copy.bias = NULL;
    copy.fresh = false;
    copy.factor = c->factor ? factor : NULL;
    copy.dx = dx;
    copy.df = df;
    bwd_whole(&copy, VL);
    memcpy(c->df + at, df, (size_t)count * sizeof *df);
    for (int64_t i = 0; i < c->n; i++)
        memcpy(c->dx + i * c->d + at, dx + i * VL, (size_t)count * sizeof *dx);
}

void CPU_NAME(mhc_combine_bwd_run)(const struct combine_run *c)
{
    int64_t whole = c->count / VL * VL;
    bwd_whole(c, whole); /* even of nothing: it may have to clear the sums */
    if (whole < c->count)
        bwd_tail(c, whole, c->count - whole);
}

void CPU_NAME(mhc_combine_bwd_finish)(const struct mhc_rule *r, const vec *sums, float *dpost, float *dres)
{
    int64_t n = r->streams;
    float dmix[MATRIX_MAX];
    vec_sums(sums, n * n, dmix);
    vec_sums(sums + n * n, n, dpost);
    load_mix(r, dmix, dres); /* a transpose is its own inverse */
}

void CPU_NAME(mhc_add_partials)(float *out, bool acc, const float *partial, int64_t partial_step, int64_t blocks,
                                int64_t count)
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
    float mix[MATRIX_MAX], factor[MHC_MAX_STREAMS * RUN];
    vec sums[MATRIX_MAX + MHC_MAX_STREAMS];
    const float *bias = a->bias.data;
    load_mix(&a->rule, row_of(&a->res, r), mix);
    if (d == 0)
        memset(sums, 0, (size_t)(n * n + n) * sizeof *sums);
    for (int64_t c = 0; c < d; c += RUN) {
        struct combine_run run = {.n = n,
                                  .count = min_i64(RUN, d - c),
                                  .g_step = d,
                                  .d = d,
                                  .g = row_of(&a->dy, r) + c,
                                  .x = row_of(&a->x, r) + c,
                                  .f = row_of(&a->f, r) + c,
                                  .bias = bias ? bias + c : NULL,
                                  .factor = a->drop.p > 0 ? factor : NULL,
                                  .mix = mix,
                                  .post = row_of(&a->post, r),
                                  .dx = row_of(&a->dx, r) + c,
                                  .df = row_of(&a->df, r) + c,
                                  .sums = sums,
                                  .fresh = c == 0};
        for (int64_t i = 0; a->drop.p > 0 && i < n; i++)
            CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, run.count, factor + i * RUN);
        CPU_NAME(mhc_combine_bwd_run)(&run);
        for (int64_t k = 0; dbias != NULL && k < run.count; k++)
            dbias[c + k] += run.df[k];
    }
    CPU_NAME(mhc_combine_bwd_finish)(&a->rule, sums, row_of(&a->dpost, r), row_of(&a->dres, r));
    if (present(&a->dpre))
        memset(row_of(&a->dpre, r), 0, (size_t)n * sizeof(float));
}

int CPU_NAME(mhc_combine_bwd_cpu)(struct lane *l, const struct mhc_combine_bwd_args *a)
{
    TRY(mhc_combine_bwd_check(a, l->err));
    TRY(check_work("mhc_combine_bwd", &a->work, CPU_NAME(mhc_combine_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], d = a->f.dim[1], blocks = ceil_div(rows, MHC_BLOCK);
    const struct bring bring = {{&a->dy, &a->x, &a->f}};
    int64_t at_once = bring_count(&bring);
    float *partial = a->work.data;
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t b = 0; b < blocks; b++) {
        float *dbias = present(&a->dbias) ? partial + b * d : NULL;
        if (dbias != NULL)
            memset(dbias, 0, (size_t)d * sizeof *dbias);
        for (int64_t r = b * MHC_BLOCK; r < min_i64(rows, (b + 1) * MHC_BLOCK); r++) {
            bring_at(&bring, r, at_once);
            combine_bwd_row(a, r, dbias);
        }
    }
    if (present(&a->dbias))
        CPU_NAME(mhc_add_partials)(a->dbias.data, a->acc_dbias, partial, d, blocks, d);
    return ST_OK;
}

/* ---- aggregate, expand ----------------------------------------------------------------------- */

int CPU_NAME(mhc_aggregate_fwd_cpu)(struct lane *l, const struct mhc_aggregate_fwd_args *a)
{
    TRY(mhc_aggregate_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->pre.dim[1], d = a->a.dim[1];
#pragma omp parallel for schedule(static) if (rows * n * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = row_of(&a->x, r), *pre = row_of(&a->pre, r);
        float *out = row_of(&a->a, r);
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
        const float *da = row_of(&a->da, r), *pre = row_of(&a->pre, r);
        for (int64_t i = 0; i < n; i++) {
            const float *x = row_of(&a->x, r) + i * d;
            float *dx = row_of(&a->dx, r) + i * d, sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < d; c++) {
                sum += da[c] * x[c];
                dx[c] = (a->acc_dx ? dx[c] : 0) + pre[i] * da[c];
            }
            row_of(&a->dpre, r)[i] = sum;
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
            memcpy(row_of(&a->y, r) + at, row_of(&a->x, r), (size_t)d * sizeof(float));
    return ST_OK;
}

int CPU_NAME(mhc_expand_bwd_cpu)(struct lane *l, const struct mhc_expand_bwd_args *a)
{
    TRY(mhc_expand_bwd_check(a, l->err));
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1], k = a->dy.dim[1];
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *dy = row_of(&a->dy, r);
        float *dx = row_of(&a->dx, r);
        for (int64_t at = 0; at < k; at += d) {
#pragma omp simd
            for (int64_t c = 0; c < d; c++)
                dx[c] = (at > 0 ? dx[c] : 0) + dy[at + c];
        }
    }
    return ST_OK;
}
