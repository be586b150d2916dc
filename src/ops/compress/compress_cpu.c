/* compress, fast CPU version; see compress.h. A unit is an entry (backward: a block of entries) times a tile of
 * channels, whose largest gates and sums stay in registers and the cache. */
#include "ops/compress/compress.h"
#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"

#include <math.h>
#include <string.h>

enum { TILE = 64 };

/* Where the tokens of an entry are: rows of x and z, or what is kept of earlier ones. */
struct source {
    const struct tensor *x, *z, *ape, *past; /* past: absent where there is none */
    int64_t start, ratio, width;             /* width: D */
    bool overlap;
};

/* Place i of an entry: its token, the first of its channels of this tile, its row of ape. */
struct place {
    int64_t token, channel, row;
};

static inline struct place place_of(const struct source *s, struct compress_window w, int64_t i, int64_t c)
{
    if (s->overlap && w.before && i < s->ratio)
        return (struct place){w.first - s->ratio + i, c, i};
    int64_t own = s->overlap && w.before ? i - s->ratio : i;
    return (struct place){w.first + own, s->overlap ? s->width + c : c, own};
}
static inline int64_t places(const struct source *s, struct compress_window w)
{
    return s->overlap && w.before ? 2 * s->ratio : s->ratio;
}

static inline const float *token_row(const struct source *s, bool gate, int64_t b, struct place p)
{
    const struct tensor *t = gate ? s->z : s->x;
    if (p.token >= s->start)
        return (const float *)t->data + b * t->stride[0] + (p.token - s->start) * t->stride[1] + p.channel;
    return f32_row(s->past, b * s->past->dim[1] + p.token % s->past->dim[1]) + (gate ? t->dim[2] : 0) + p.channel;
}
static inline const float *ape_row(const struct source *s, struct place p)
{
    return (const float *)s->ape->data + p.row * s->ape->stride[0] + p.channel;
}

/* Statistics of the softmaxes of a tile. */
struct tile {
    float top[TILE], sum[TILE], y[TILE];
};

static void raise_top(float *restrict top, const float *restrict z, const float *restrict ape, int64_t n)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
        float v = z[c] + ape[c];
        top[c] = v > top[c] || v != v ? v : top[c]; /* not a number stays one */
    }
}

static void add_place(struct tile *restrict t, const float *restrict x, const float *restrict z,
                      const float *restrict ape, int64_t n)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
        float d = z[c] + ape[c] - t->top[c], p = d != d ? d : fast_expf(d);
        t->sum[c] += p;
        t->y[c] += p * x[c];
    }
}

/* y of n channels from channel c on, with the statistics that weights are made of. */
static void entry_tile(const struct source *s, struct compress_window w, int64_t b, int64_t c, int64_t n,
                       struct tile *t)
{
    for (int64_t i = 0; i < TILE; i++) {
        t->top[i] = -INFINITY;
        t->sum[i] = t->y[i] = 0;
    }
    int64_t count = places(s, w);
    for (int64_t i = 0; i < count; i++) {
        struct place p = place_of(s, w, i, c);
        raise_top(t->top, token_row(s, true, b, p), ape_row(s, p), n);
    }
    for (int64_t i = 0; i < count; i++) {
        struct place p = place_of(s, w, i, c);
        add_place(t, token_row(s, false, b, p), token_row(s, true, b, p), ape_row(s, p), n);
    }
    for (int64_t i = 0; i < n; i++)
        t->y[i] /= t->sum[i];
}

static void entry_row(const struct source *s, struct compress_window w, int64_t b, float *y)
{
    struct tile t;
    for (int64_t c = 0; w.first >= 0 && c < s->width; c += TILE) {
        int64_t n = min_i64(TILE, s->width - c);
        entry_tile(s, w, b, c, n, &t);
        memcpy(y + c, t.y, (size_t)n * sizeof *y);
    }
    if (w.first < 0)
        memset(y, 0, (size_t)s->width * sizeof *y);
}

static const int32_t *documents(const struct tensor *doc, int64_t b)
{
    return present(doc) ? (const int32_t *)doc->data + b * doc->stride[0] : NULL;
}

int CPU_NAME(compress_fwd_cpu)(struct lane *l, const struct compress_fwd_args *a)
{
    TRY(compress_fwd_check(a, l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, a->start, a->ratio, a->y.dim[2], a->overlap};
#pragma omp parallel for schedule(static) if (tensor_elems(&a->x) > 8192)
    for (int64_t r = 0; r < rows_of(&a->y); r++) {
        int64_t b = r / a->y.dim[1], j = r % a->y.dim[1];
        struct compress_window w =
            compress_window_of(documents(&a->doc_start, b), a->start, a->start / a->ratio + j, a->ratio);
        entry_row(&s, w, b, f32_row(&a->y, r));
        if (present(&a->at))
            ((int32_t *)a->at.data)[r] = compress_position(&a->pos, w, b, a->ratio, a->start);
    }
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static int64_t blocks_of(const struct compress_bwd_args *a)
{
    return ceil_div(a->x.dim[0] * (a->x.dim[1] / max_i64(1, a->ratio)), compress_block(max_i64(1, a->ratio)));
}

int64_t CPU_NAME(compress_bwd_work_cpu)(const struct compress_bwd_args *a)
{
    return blocks_of(a) * max_i64(0, a->ratio) * a->x.dim[2] * (int64_t)sizeof(float);
}

static void place_gradient(const struct tile *restrict t, const float *restrict dy, const float *restrict x,
                           const float *restrict z, const float *restrict ape, float *restrict dx, float *restrict dz,
                           float *restrict dape, int64_t n)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
        float d = z[c] + ape[c] - t->top[c], p = (d != d ? d : fast_expf(d)) / t->sum[c] * dy[c];
        float g = p * (x[c] - t->y[c]);
        dx[c] = p;
        dz[c] = g;
        dape[c] += g;
    }
}

/* Where the gradients of a place go: to a token of the call, or to one before it. */
static inline void gradient_rows(const struct compress_bwd_args *a, int64_t b, struct place p, float **dx, float **dz)
{
    if (p.token >= a->start) {
        *dx = f32_row(&a->dx, b * a->x.dim[1] + p.token - a->start) + p.channel;
        *dz = f32_row(&a->dz, b * a->x.dim[1] + p.token - a->start) + p.channel;
        return;
    }
    *dx = f32_row(&a->dpast, b * a->past.dim[1] + p.token % a->past.dim[1]) + p.channel;
    *dz = *dx + a->x.dim[2];
}

static void entry_gradient(const struct compress_bwd_args *a, const struct source *s, struct compress_window w,
                           int64_t b, const float *dy, float *dape)
{
    struct tile t;
    int64_t channels = a->x.dim[2];
    for (int64_t c = 0; c < s->width; c += TILE) {
        int64_t n = min_i64(TILE, s->width - c), count = places(s, w);
        entry_tile(s, w, b, c, n, &t);
        for (int64_t i = 0; i < count; i++) {
            struct place p = place_of(s, w, i, c);
            float *dx, *dz;
            gradient_rows(a, b, p, &dx, &dz);
            place_gradient(&t, dy + c, token_row(s, false, b, p), token_row(s, true, b, p), ape_row(s, p), dx, dz,
                           dape + p.row * channels + p.channel, n);
        }
    }
}

static void sum_blocks(const struct compress_bwd_args *a, const float *partial, int64_t blocks)
{
    int64_t n = tensor_elems(&a->dape), channels = a->dape.dim[1];
#pragma omp parallel for schedule(static) if (n * blocks > 8192)
    for (int64_t i = 0; i < n; i++) {
        float *dape = f32_row(&a->dape, i / channels) + i % channels, sum = a->acc_dape ? *dape : 0;
        for (int64_t k = 0; k < blocks; k++)
            sum += partial[k * n + i];
        *dape = sum;
    }
}

int CPU_NAME(compress_bwd_cpu)(struct lane *l, const struct compress_bwd_args *a)
{
    TRY(compress_bwd_check(a, l->err));
    TRY(check_work("compress_bwd", &a->work, CPU_NAME(compress_bwd_work_cpu)(a), l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, a->start, a->ratio, a->dy.dim[2], a->overlap};
    int64_t channels = a->x.dim[2], blocks = blocks_of(a), entries = rows_of(&a->dy), size = a->ratio * channels;
    bool small = tensor_elems(&a->x) < 8192;
#pragma omp parallel for schedule(static) if (!small)
    for (int64_t r = 0; r < rows_of(&a->x); r++) {
        memset(f32_row(&a->dx, r), 0, (size_t)channels * sizeof(float));
        memset(f32_row(&a->dz, r), 0, (size_t)channels * sizeof(float));
    }
    for (int64_t r = 0; present(&a->dpast) && r < rows_of(&a->dpast); r++)
        memset(f32_row(&a->dpast, r), 0, (size_t)(2 * channels) * sizeof(float));
#pragma omp parallel for schedule(static) if (!small)
    for (int64_t k = 0; k < blocks; k++) {
        float *dape = (float *)a->work.data + k * size;
        int64_t first = k * compress_block(a->ratio), end = min_i64(entries, first + compress_block(a->ratio));
        memset(dape, 0, (size_t)size * sizeof *dape);
        for (int64_t r = first; r < end; r++) {
            int64_t b = r / a->dy.dim[1], j = r % a->dy.dim[1];
            struct compress_window w =
                compress_window_of(documents(&a->doc_start, b), a->start, a->start / a->ratio + j, a->ratio);
            if (w.first >= 0)
                entry_gradient(a, &s, w, b, f32_row(&a->dy, r), dape);
        }
    }
    sum_blocks(a, a->work.data, blocks);
    return ST_OK;
}

/* ---- decoding -------------------------------------------------------------------------------- */

int CPU_NAME(compress_step_cpu)(struct lane *l, const struct compress_step_args *a)
{
    TRY(compress_step_check(a, l->err));
    int64_t start = *(const int64_t *)a->start.data, n = a->x.dim[1], channels = a->x.dim[2], kept = a->past.dim[1];
    TRY(compress_start_check(start, n, l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, start, a->ratio, a->y.dim[2], a->overlap};
    for (int64_t r = 0; r < rows_of(&a->y); r++) {
        int64_t b = r / a->y.dim[1], j = start / a->ratio + r % a->y.dim[1];
        struct compress_window w = compress_step_window(j, a->ratio, start, n);
        entry_row(&s, w, b, f32_row(&a->y, r));
        if (present(&a->at))
            ((int32_t *)a->at.data)[r] = compress_position(&a->pos, w, b, a->ratio, start);
    }
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t t = max_i64(0, n - kept); t < n; t++) {
            float *row = f32_row(&a->past, b * kept + (start + t) % kept);
            memcpy(row, f32_row(&a->x, b * n + t), (size_t)channels * sizeof *row);
            memcpy(row + channels, f32_row(&a->z, b * n + t), (size_t)channels * sizeof *row);
        }
    return ST_OK;
}
