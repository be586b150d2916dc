/* The boundary between two sublayers on the CPU; see mhc.h. VL tokens at a time go through all stages while their
 * streams are in cache: forward reads and writes each stream once, backward reads the new streams, the old ones and
 * the incoming gradient once each and writes the complete gradient. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/mhc/mhc.h"

#include "ops/dropout/dropout_mask.h"
#include "ops/mhc/mhc_health_int.h"

#include <math.h>

/* ---- forward --------------------------------------------------------------------------------- */

/* h = norm(sum_i pre_i x_i); h holds the aggregate in between. Returns rstd. */
INLINE float aggregate_norm(int64_t n, int64_t d, const float *x, const float *pre, const float *gain, float one,
                            float eps, float *h)
{
    vec square = {0};
    float tail = 0;
    int64_t c = 0;
    for (; c + VL <= d; c += VL) {
        vec a = {0};
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
    const float *x = row_of(stream, r), *pre = row_of(&a->coef, r), *gain = a->gain.data;
    float rstd = 0, *h = row_of(&a->h, r), one = a->zero_centered ? 1.0f : 0.0f;
    FOR_STREAMS(a->rule.streams, rstd = aggregate_norm(STREAMS, d, x, pre, gain, one, (float)a->eps, h));
    if (!a->reuse)
        row_of(&a->stat, r)[logits + 1] = rstd;
}

static void project_rows(const struct mhc_boundary_fwd_args *a, const struct tensor *stream, int64_t first,
                         int64_t count)
{
    const struct project_ahead ahead = {{&a->x, &a->y}, &a->f, VL};
    for (int64_t t = 0; t < count; t += GROUP) {
        float *p[GROUP];
        int64_t some = min_i64(GROUP, count - t);
        for (int64_t i = 0; i < some; i++)
            p[i] = row_of(&a->stat, first + t + i);
        CPU_NAME(mhc_project_group)(stream, &a->w, first + t, some, p, &ahead);
    }
}

static void forward_lanes(const struct mhc_boundary_fwd_args *a, const struct mhc_combine_fwd_args *combine,
                          int64_t first, int64_t count)
{
    int64_t n = a->rule.streams, k = a->x.dim[1], logits = mhc_logits(n);
    bool closes = present(&a->f), maps = present(&a->h) && !a->reuse;
    const struct tensor *stream = closes ? &a->y : &a->x;
    for (int64_t r = first; r < first + count; r++) {
        const float *in = closes ? row_of(&a->coef_in, r) : NULL;
        if (closes)
            CPU_NAME(mhc_combine_row)(combine, r, in + n, in + 2 * n);
        if (maps) /* the same sum whether the row was just made or given, as after a pipeline cut */
            row_of(&a->stat, r)[logits] = root_of(row_of(stream, r), k, a->rule.root_eps);
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
    if (mhc_is_first_fwd(a)) {
        struct mhc_expand_fwd_args expand = {.x = a->x, .y = a->y};
        struct mhc_boundary_fwd_args opens = *a;
        opens.x = a->y;
        opens.y = (struct tensor){0};
        TRY(CPU_NAME(mhc_expand_fwd_cpu)(l, &expand));
        return CPU_NAME(mhc_boundary_fwd_cpu)(l, &opens);
    }
    struct mhc_combine_fwd_args combine = {
        .x = a->x, .f = a->f, .bias = a->bias, .y = a->y, .rule = a->rule, .drop = a->drop};
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t first = 0; first < rows; first += VL)
        forward_lanes(a, &combine, first, min_i64(VL, rows - first));
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Rows of GROUP tokens. Streams of y and dy lie step apart, those of out RUN apart. */
struct tile {
    const float *dh[GROUP], *dy[GROUP], *y[GROUP], *pre[GROUP], *dp[GROUP];
    float rstd[GROUP], k[GROUP], through_rho[GROUP];
    int64_t step;
    float *out[GROUP];
};

/* What the two passes over the channels of VL tokens hand on. */
struct group {
    float rstd[VL], k[VL]; /* da = rstd (dh scale - a k) */
    float through_rho[VL]; /* drho / (K rho) */
    struct tile tiles[VL / GROUP];
    float dp[VL * LOGITS_MAX];                     /* [VL][N]: gradients of coefficients, then of p */
    vec sums[VL * (MATRIX_MAX + MHC_MAX_STREAMS)]; /* combine_run.sums of each token */
    vec g[MHC_MAX_STREAMS * RUN];                  /* complete gradient of the new streams, [VL][n][RUN] */
    float factor[MHC_MAX_STREAMS * RUN], mix[MATRIX_MAX];
};

/* Scratch. Made once per call, both padded with zeros to whole vectors: what the norm multiplies with, and the weight
 * in the order in which it is read, [channels / VL][N][n][VL]. Then room for partial sums. */
struct prepared {
    float *scale, *w, *partial;
};

static int64_t padded(int64_t d) { return ceil_div(d, VL) * VL; }
static int64_t prepared_floats(int64_t n, int64_t d) { return padded(d) * (1 + n * mhc_logits(n)); }

int64_t CPU_NAME(mhc_boundary_bwd_work_cpu)(const struct mhc_boundary_bwd_args *a)
{
    int64_t sums = (a->dgain.rank > 0) + (a->dbias.rank > 0), n = a->rule.streams,
            d = a->dx.dim[1] / (mhc_is_first_bwd(a) ? 1 : n);
    return (prepared_floats(n, d) + sums * ceil_div(a->dx.dim[0], MHC_BLOCK) * d) * (int64_t)sizeof(float);
}

static struct prepared prepare(const struct mhc_boundary_bwd_args *a)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1], logits = mhc_logits(n);
    if (d == 0)
        return (struct prepared){0};
    float *scratch = a->work.data;
    struct prepared p = {.scale = scratch, .w = scratch + padded(d), .partial = scratch + prepared_floats(n, d)};
    const float *gain = a->gain.data;
    for (int64_t c = 0; c < padded(d); c++)
        p.scale[c] = c >= d ? 0 : gain ? gain[c] + (a->zero_centered ? 1.0f : 0.0f) : 1.0f;
    float *out = p.w;
    for (int64_t c = 0; c < d; c += VL)
        for (int64_t k = 0; k < logits; k++)
            for (int64_t i = 0; i < n; i++, out += VL) {
                int64_t count = min_i64(VL, d - c);
                memcpy(out, row_of(&a->w, k) + i * d + c, (size_t)count * sizeof *out);
                memset(out + count, 0, (size_t)(VL - count) * sizeof *out);
            }
    return p;
}

/* First pass over a row: dots[i] = sum dh scale y_i, dots[n + i] = sum a y_i; dgain += dh a rstd. From them
 * follow k and dpre without da ever being stored. */
INLINE void norm_dots(int64_t n, int64_t d, const float *dh, const float *y, const float *pre, const float *scale,
                      float rstd, float *dgain, float *dots)
{
    vec acc[2 * MHC_MAX_STREAMS];
    int64_t c = 0;
    for (int64_t i = 0; i < 2 * n; i++)
        acc[i] = (vec){0};
    for (; c + VL <= d; c += VL) {
        vec in[MHC_MAX_STREAMS], a = {0}, g = vec_at(dh + c), u = g * vec_at(scale + c);
        for (int64_t i = 0; i < n; i++) {
            in[i] = vec_at(y + i * d + c);
            a += in[i] * pre[i];
        }
        for (int64_t i = 0; i < n; i++) {
            acc[i] += u * in[i];
            acc[n + i] += a * in[i];
        }
        if (dgain != NULL)
            vec_put(dgain + c, vec_at(dgain + c) + g * a * rstd);
    }
    vec_sums(acc, 2 * n, dots);
    for (; c < d; c++) {
        float a = 0, u = dh[c] * scale[c];
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

static void first_pass(const struct mhc_boundary_bwd_args *a, const struct prepared *with, int64_t r, int64_t lane,
                       struct group *g, float *dgain)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1], logits = mhc_logits(n);
    const float *pre = row_of(&a->coef, r), *dcoef = present(&a->dcoef) ? row_of(&a->dcoef, r) : NULL;
    float dots[2 * MHC_MAX_STREAMS], sum = 0, rstd = row_of(&a->stat, r)[logits + 1];
    FOR_STREAMS(n, norm_dots(STREAMS, d, row_of(&a->dh, r), row_of(&a->y, r), pre, with->scale, rstd, dgain, dots));
    for (int64_t i = 0; i < n; i++)
        sum += pre[i] * dots[i];
    float k = d > 0 ? sum * rstd * rstd / (float)d : 0;
    g->rstd[lane] = rstd;
    g->k[lane] = k;
    float *out = g->dp + lane * logits;
    if (dcoef != NULL)
        memcpy(out, dcoef, (size_t)logits * sizeof *out);
    else
        memset(out, 0, (size_t)logits * sizeof *out);
    for (int64_t i = 0; i < n; i++)
        out[i] += rstd * (dots[i] - k * dots[n + i]);
}

/* What is to be fetched next of the rows of the VL tokens after a group; a tile takes its share of each. */
struct ahead {
    const float *wide[3], *thin[2];
};

static struct ahead ahead_of(const struct mhc_boundary_bwd_args *a, int64_t first)
{
    int64_t r = min_i64(first + VL, a->y.dim[0] - 1);
    bool closes = present(&a->f);
    return (struct ahead){
        .wide = {row_of(&a->y, r), row_of(present(&a->dy) ? &a->dy : &a->y, r), row_of(closes ? &a->x : &a->y, r)},
        .thin = {row_of(&a->dh, r), row_of(closes ? &a->f : &a->dh, r)}};
}

/* out_i = dy_i + pre_i da + through_rho y_i + (dp w)_i for VL channels from c; w and scale begin there. */
INLINE void complete_tile(int64_t n, const struct tile *s, int64_t c, const float *scale, const float *w,
                          const struct ahead *next)
{
    vec acc[GROUP][MHC_MAX_STREAMS];
    for (int t = 0; t < GROUP; t++) {
        vec in[MHC_MAX_STREAMS], a = {0};
        for (int64_t i = 0; i < n; i++) {
            in[i] = vec_at(s->y[t] + i * s->step + c);
            a += in[i] * s->pre[t][i];
        }
        vec da = (vec_at(s->dh[t] + c) * vec_at(scale) - a * s->k[t]) * s->rstd[t];
        for (int64_t i = 0; i < n; i++) {
            acc[t][i] = da * s->pre[t][i] + in[i] * s->through_rho[t];
            if (s->dy[t] != NULL)
                acc[t][i] += vec_at(s->dy[t] + i * s->step + c);
        }
    }
    for (int64_t k = 0; k < n * n + 2 * n; k++, w += n * VL) {
        if (k < n * GROUP)
            for (int i = 0; i < 3; i++)
                fetch(next->wide[i] + k * VL);
        else if (k < (n + 1) * GROUP)
            for (int i = 0; i < 2; i++)
                fetch(next->thin[i] + (k - n * GROUP) * VL);
        for (int64_t i = 0; i < n; i++) {
            vec v = vec_at(w + i * VL);
            for (int t = 0; t < GROUP; t++)
                acc[t][i] += v * s->dp[t][k];
        }
    }
    for (int t = 0; t < GROUP; t++)
        for (int64_t i = 0; i < n; i++)
            vec_put(s->out[t] + i * RUN + c % RUN, acc[t][i]);
}

static void complete(int64_t n, const struct tile *s, int64_t c, const float *scale, const float *w,
                     const struct ahead *next)
{
    FOR_STREAMS(n, complete_tile(STREAMS, s, c, scale, w, next));
}

/* Fewer than VL channels: through copies padded with zeros. */
static void complete_rest(int64_t n, const struct tile *s, int64_t c, int64_t count, const float *scale, const float *w,
                          const struct ahead *next)
{
    float dh[GROUP][VL] = {{0}}, dy[GROUP][MHC_MAX_STREAMS * VL] = {{0}}, y[GROUP][MHC_MAX_STREAMS * VL] = {{0}};
    struct tile copy = *s;
    for (int t = 0; t < GROUP; t++) {
        memcpy(dh[t], s->dh[t] + c, (size_t)count * sizeof **dh);
        for (int64_t i = 0; i < n; i++) {
            memcpy(y[t] + i * VL, s->y[t] + i * s->step + c, (size_t)count * sizeof **y);
            if (s->dy[t] != NULL)
                memcpy(dy[t] + i * VL, s->dy[t] + i * s->step + c, (size_t)count * sizeof **dy);
        }
        copy.dh[t] = dh[t];
        copy.dy[t] = dy[t];
        copy.y[t] = y[t];
        copy.out[t] += c % RUN;
    }
    copy.step = VL;
    complete(n, &copy, 0, scale, w, next);
}

/* Tokens that the last tile lacks are the last one again. */
static void fill_tiles(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t tokens, struct group *g)
{
    int64_t n = a->rule.streams;
    for (int64_t i = 0; i < VL; i++) {
        int64_t at = min_i64(i, tokens - 1), r = first + at, t = i % GROUP;
        struct tile *s = &g->tiles[i / GROUP];
        s->step = a->dh.dim[1];
        s->dh[t] = row_of(&a->dh, r);
        s->dy[t] = present(&a->dy) ? row_of(&a->dy, r) : NULL;
        s->y[t] = row_of(&a->y, r);
        s->pre[t] = row_of(&a->coef, r);
        s->dp[t] = g->dp + at * mhc_logits(n);
        s->rstd[t] = g->rstd[at];
        s->k[t] = g->k[at];
        s->through_rho[t] = g->through_rho[at];
        s->out[t] = (float *)g->g + i * n * RUN;
    }
}

/* The complete gradient of a run of channels of all tokens of a group. */
static void complete_run(int64_t n, const struct prepared *with, int64_t tokens, int64_t begin, int64_t end,
                         struct group *g, struct ahead *next)
{
    for (int64_t c = begin; c < end; c += VL)
        for (int64_t t = 0; t < tokens; t += GROUP) {
            const float *scale = with->scale + c, *w = with->w + c * n * mhc_logits(n);
            if (c + VL <= end)
                complete(n, &g->tiles[t / GROUP], c, scale, w, next);
            else
                complete_rest(n, &g->tiles[t / GROUP], c, end - c, scale, w, next);
            for (int i = 0; i < 3; i++)
                next->wide[i] += n * GROUP * VL;
            for (int i = 0; i < 2; i++)
                next->thin[i] += GROUP * VL;
        }
}

/* The complete gradient of the new streams goes back through combine, or out if nothing closed. */
static void finish_run(const struct mhc_boundary_bwd_args *a, int64_t r, int64_t lane, int64_t c, int64_t count,
                       struct group *g, float *dbias)
{
    int64_t n = a->rule.streams, d = a->dh.dim[1];
    const float *run = (const float *)g->g + lane * n * RUN, *bias = a->bias.data;
    if (mhc_is_first_bwd(a)) {
        float *dx = row_of(&a->dx, r) + c;
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < count; k++)
                dx[k] = (i > 0 ? dx[k] : 0) + run[i * RUN + k];
        return;
    }
    if (!present(&a->f)) {
        for (int64_t i = 0; i < n; i++)
            memcpy(row_of(&a->dx, r) + i * d + c, run + i * RUN, (size_t)count * sizeof *run);
        return;
    }
    load_mix(&a->rule, row_of(&a->coef_in, r) + 2 * n, g->mix);
    struct combine_run back = {.n = n,
                               .count = count,
                               .g_step = RUN,
                               .d = d,
                               .g = run,
                               .x = row_of(&a->x, r) + c,
                               .f = row_of(&a->f, r) + c,
                               .bias = bias ? bias + c : NULL,
                               .factor = a->drop.p > 0 ? g->factor : NULL,
                               .mix = g->mix,
                               .post = row_of(&a->coef_in, r) + n,
                               .dx = row_of(&a->dx, r) + c,
                               .df = row_of(&a->df, r) + c,
                               .sums = g->sums + lane * (n * n + n),
                               .fresh = c == 0};
    for (int64_t i = 0; a->drop.p > 0 && i < n; i++)
        CPU_NAME(mhc_drop_factors)(&a->drop, r, i * d + c, count, g->factor + i * RUN);
    CPU_NAME(mhc_combine_bwd_run)(&back);
    for (int64_t k = 0; dbias != NULL && k < count; k++)
        dbias[c + k] += back.df[k];
}

static void backward_lanes(const struct mhc_boundary_bwd_args *a, const struct prepared *with, int64_t first,
                           int64_t count, float *dgain, float *dbias)
{
    struct group g; /* on the stack: half a MB at most streams, a few tens of KB of it used at 4 */
    int64_t n = a->rule.streams, d = a->dh.dim[1];
    if (d == 0)
        memset(g.sums, 0, (size_t)(VL * (n * n + n)) * sizeof g.sums[0]);
    for (int64_t t = 0; t < count; t++)
        first_pass(a, with, first + t, t, &g, dgain);
    CPU_NAME(mhc_coef_bwd_lanes)(a, first, count, g.dp, g.through_rho);
    fill_tiles(a, first, count, &g);
    struct ahead next = ahead_of(a, first);
    for (int64_t begin = 0; begin < d; begin += RUN) {
        int64_t end = min_i64(d, begin + RUN);
        complete_run(n, with, count, begin, end, &g, &next);
        for (int64_t t = 0; t < count; t++)
            finish_run(a, first + t, t, begin, end - begin, &g, dbias);
    }
    for (int64_t t = 0; present(&a->f) && t < count; t++) {
        float *out = row_of(&a->dcoef_in, first + t);
        memset(out, 0, (size_t)n * sizeof *out);
        CPU_NAME(mhc_combine_bwd_finish)(&a->rule, g.sums + t * (n * n + n), out + n, out + 2 * n);
    }
}

int CPU_NAME(mhc_boundary_bwd_cpu)(struct lane *l, const struct mhc_boundary_bwd_args *a)
{
    TRY(mhc_boundary_bwd_check(a, l->err));
    TRY(check_work("mhc_boundary_bwd", &a->work, CPU_NAME(mhc_boundary_bwd_work_cpu)(a), l->err));
    int64_t rows = a->dx.dim[0], d = a->dh.dim[1], blocks = ceil_div(rows, MHC_BLOCK);
    struct prepared with = prepare(a);
    float *gains = present(&a->dgain) ? with.partial : NULL, *biases = NULL;
    if (present(&a->dbias) && d > 0)
        biases = with.partial + (gains ? blocks * d : 0);
#pragma omp parallel for schedule(static) if (rows * d > 1024)
    for (int64_t b = 0; b < blocks; b++) {
        float *dgain = gains ? gains + b * d : NULL, *dbias = biases ? biases + b * d : NULL;
        if (dgain != NULL)
            memset(dgain, 0, (size_t)d * sizeof *dgain);
        if (dbias != NULL)
            memset(dbias, 0, (size_t)d * sizeof *dbias);
        int64_t end = min_i64(rows, (b + 1) * MHC_BLOCK);
        for (int64_t first = b * MHC_BLOCK; first < end; first += VL)
            backward_lanes(a, &with, first, min_i64(VL, end - first), dgain, dbias);
    }
    if (present(&a->dgain))
        CPU_NAME(mhc_add_partials)(a->dgain.data, a->acc_dgain, gains, d, blocks, d);
    if (present(&a->dbias))
        CPU_NAME(mhc_add_partials)(a->dbias.data, a->acc_dbias, biases, d, blocks, d);
    return ST_OK;
}

static double health_dot(const void *p, const void *q, int64_t d) { return (double)dot_of(p, q, d); }

int CPU_NAME(mhc_health_cpu)(struct lane *l, const struct mhc_health_args *a)
{
    TRY(mhc_health_check(a, l->err));
    mhc_health(a, health_dot);
    return ST_OK;
}
