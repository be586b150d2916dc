/* compress, reference; see compress.h. Entry by entry and channel by channel, in double. */
#include "ops/compress/compress.h"
#include "ops/ops_ref_int.h"

#include <math.h>

/* Where the tokens of an entry are: rows of x and z, or what is kept of earlier ones. */
struct source {
    const struct tensor *x, *z, *ape, *past; /* past: absent where there is none */
    int64_t start, ratio, width;             /* width: D */
    bool overlap;
};

static double at(const struct tensor *t, int64_t b, int64_t i, int64_t c)
{
    return ((const double *)t->data)[b * t->stride[0] + i * t->stride[1] + c];
}

static double value_of(const struct source *s, bool gate, int64_t b, int64_t token, int64_t c)
{
    const struct tensor *t = gate ? s->z : s->x;
    if (token >= s->start)
        return at(t, b, token - s->start, c);
    return at(s->past, b, token % s->past->dim[1], c + (gate ? t->dim[2] : 0));
}

/* Token and channel of place i of an entry, and its row of ape; places run over the window before, then the own one. */
struct place {
    int64_t token, channel, row;
};
static struct place place_of(const struct source *s, struct compress_window w, int64_t i, int64_t c)
{
    if (s->overlap && w.before && i < s->ratio)
        return (struct place){w.first - s->ratio + i, c, i};
    int64_t own = s->overlap && w.before ? i - s->ratio : i;
    return (struct place){w.first + own, s->overlap ? s->width + c : c, own};
}
static int64_t places(const struct source *s, struct compress_window w)
{
    return s->overlap && w.before ? 2 * s->ratio : s->ratio;
}

static double gate_of(const struct source *s, struct place p, int64_t b)
{
    return value_of(s, true, b, p.token, p.channel) + at(s->ape, 0, 0, p.row * s->ape->stride[0] + p.channel);
}

/* Softmax over the places of one channel: its largest gate and its sum. */
static void softmax_of(const struct source *s, struct compress_window w, int64_t b, int64_t c, double *top, double *sum)
{
    *top = -INFINITY;
    *sum = 0;
    for (int64_t i = 0; i < places(s, w); i++)
        *top = fmax(*top, gate_of(s, place_of(s, w, i, c), b));
    for (int64_t i = 0; i < places(s, w); i++)
        *sum += exp(gate_of(s, place_of(s, w, i, c), b) - *top);
}

static double entry(const struct source *s, struct compress_window w, int64_t b, int64_t c)
{
    double top, sum, y = 0;
    softmax_of(s, w, b, c, &top, &sum);
    for (int64_t i = 0; i < places(s, w); i++) {
        struct place p = place_of(s, w, i, c);
        y += exp(gate_of(s, p, b) - top) / sum * value_of(s, false, b, p.token, p.channel);
    }
    return y;
}

static const int32_t *documents(const struct tensor *doc, int64_t b)
{
    return present(doc) ? (const int32_t *)doc->data + b * doc->stride[0] : NULL;
}

int compress_fwd_ref(struct lane *l, const struct compress_fwd_args *a)
{
    TRY(compress_fwd_check(a, l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, a->start, a->ratio, a->y.dim[2], a->overlap};
    for (int64_t r = 0; r < rows_of(&a->y); r++) {
        int64_t b = r / a->y.dim[1], j = r % a->y.dim[1];
        struct compress_window w =
            compress_window_of(documents(&a->doc_start, b), a->start, a->start / a->ratio + j, a->ratio);
        for (int64_t c = 0; c < s.width; c++)
            f64_row(&a->y, r)[c] = w.first < 0 ? 0 : entry(&s, w, b, c);
        if (present(&a->at))
            ((int32_t *)a->at.data)[r] = compress_position(&a->pos, w, b, a->ratio, a->start);
    }
    return ST_OK;
}

static void gradient(const struct compress_bwd_args *a, const struct source *s, struct compress_window w, int64_t b,
                     int64_t c, double dy)
{
    double top, sum, y = entry(s, w, b, c);
    softmax_of(s, w, b, c, &top, &sum);
    for (int64_t i = 0; i < places(s, w); i++) {
        struct place p = place_of(s, w, i, c);
        double weight = exp(gate_of(s, p, b) - top) / sum;
        double dz = weight * dy * (value_of(s, false, b, p.token, p.channel) - y);
        bool own = p.token >= s->start;
        int64_t row = own ? b * a->x.dim[1] + p.token - s->start : b * a->past.dim[1] + p.token % a->past.dim[1];
        f64_row(own ? &a->dx : &a->dpast, row)[p.channel] = weight * dy;
        f64_row(own ? &a->dz : &a->dpast, row)[p.channel + (own ? 0 : a->x.dim[2])] = dz;
        f64_row(&a->dape, p.row)[p.channel] += dz;
    }
}

int compress_bwd_ref(struct lane *l, const struct compress_bwd_args *a)
{
    TRY(compress_bwd_check(a, l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, a->start, a->ratio, a->dy.dim[2], a->overlap};
    for (int64_t r = 0; r < rows_of(&a->x); r++)
        for (int64_t c = 0; c < cols_of(&a->x); c++)
            f64_row(&a->dx, r)[c] = f64_row(&a->dz, r)[c] = 0;
    for (int64_t r = 0; present(&a->dpast) && r < rows_of(&a->dpast); r++)
        for (int64_t c = 0; c < cols_of(&a->dpast); c++)
            f64_row(&a->dpast, r)[c] = 0;
    for (int64_t i = 0; !a->acc_dape && i < tensor_elems(&a->dape); i++)
        f64_row(&a->dape, i / a->ape.dim[1])[i % a->ape.dim[1]] = 0;
    for (int64_t r = 0; r < rows_of(&a->dy); r++) {
        int64_t b = r / a->dy.dim[1], j = r % a->dy.dim[1];
        struct compress_window w =
            compress_window_of(documents(&a->doc_start, b), a->start, a->start / a->ratio + j, a->ratio);
        for (int64_t c = 0; w.first >= 0 && c < s.width; c++)
            gradient(a, &s, w, b, c, f64_row(&a->dy, r)[c]);
    }
    return ST_OK;
}

int compress_step_ref(struct lane *l, const struct compress_step_args *a)
{
    TRY(compress_step_check(a, l->err));
    int64_t start = *(const int64_t *)a->start.data, n = a->x.dim[1], channels = a->x.dim[2], kept = a->past.dim[1];
    TRY(compress_start_check(start, n, l->err));
    struct source s = {&a->x, &a->z, &a->ape, &a->past, start, a->ratio, a->y.dim[2], a->overlap};
    for (int64_t r = 0; r < rows_of(&a->y); r++) {
        int64_t b = r / a->y.dim[1], j = start / a->ratio + r % a->y.dim[1];
        struct compress_window w = compress_step_window(j, a->ratio, start, n);
        for (int64_t c = 0; c < s.width; c++)
            f64_row(&a->y, r)[c] = w.first < 0 ? 0 : entry(&s, w, b, c);
        if (present(&a->at))
            ((int32_t *)a->at.data)[r] = compress_position(&a->pos, w, b, a->ratio, start);
    }
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t t = max_i64(0, n - kept); t < n; t++)
            for (int64_t c = 0; c < channels; c++) {
                double *row = f64_row(&a->past, b * kept + (start + t) % kept);
                row[c] = at(&a->x, b, t, c);
                row[channels + c] = at(&a->z, b, t, c);
            }
    return ST_OK;
}
