/* Line charts as inline SVG; see svg_int.h. */
#include "log/svg_int.h"

#include "log/log_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- ticks ----------------------------------------------------------------------------------- */

double tick_step(double range, int count)
{
    if (!isfinite(range) || range <= 0 || count < 1)
        return 1;
    double rough = range / count, power = pow(10, floor(log10(rough)));
    double lead = rough / power;
    double step = (lead <= 1.0000001 ? 1 : lead <= 2.0000001 ? 2 : lead <= 5.0000001 ? 5 : 10) * power;
    return step > 0 && isfinite(step) ? step : range;
}

/* "2.20e-04" is shorter as "2.2e-4". */
static void tidy_exponent(char *s)
{
    char *mark = strchr(s, 'e');
    if (mark == NULL)
        return;
    int power = (int)strtol(mark + 1, NULL, 10);
    if (memchr(s, '.', (size_t)(mark - s)) != NULL)
        while (mark[-1] == '0')
            mark--;
    if (mark[-1] == '.')
        mark--;
    snprintf(mark, 8, "e%d", power); /* never longer than what was there */
}

/* Digits after the point that a multiple of step needs. */
static int decimals_of(double step)
{
    int d = 0;
    for (double v = step; d < 15 && fabs(v - rint(v)) > 1e-6 * fabs(v); d++)
        v *= 10;
    return d;
}

static const char *with_unit(double v, double step, double most, char *out, size_t size)
{
    static const char unit[] = {'k', 'M', 'G', 'T'};
    for (int i = most >= 1e12 ? 3 : most >= 1e9 ? 2 : most >= 1e6 ? 1 : 0; i >= 0; i--) {
        double scale = pow(1000, i + 1);
        int d = decimals_of(step / scale);
        if (d > 2) /* close ticks far from zero: more digits of a smaller unit */
            continue;
        snprintf(out, size, "%.*f", d, v / scale);
        size_t n = strlen(out);
        while (d-- > 0 && out[n - 1] == '0')
            n--;
        n -= out[n - 1] == '.';
        snprintf(out + n, size - n, "%c", unit[i]);
        return out;
    }
    snprintf(out, size, "%.*f", decimals_of(step), v);
    return out;
}

const char *tick_text(double v, double step, char *out, size_t size)
{
    double most = fabs(v);
    if (most < fabs(step) * 1e-6) {
        snprintf(out, size, "0");
    } else if (most >= 1e15 || (step < 1e-3 && most < 1e-2) || step < 1e-9) {
        double digits = floor(log10(most) + 1e-9) - floor(log10(step) + 1e-9);
        snprintf(out, size, "%.*e",
                 (int)fmin(fmax(digits, 0) + decimals_of(step / pow(10, floor(log10(step) + 1e-9))), 16), v);
        tidy_exponent(out);
    } else if (most >= 1e4 || (most >= 1000 && step >= 1000)) {
        return with_unit(v, step, most, out, size);
    } else {
        snprintf(out, size, "%.*f", decimals_of(step), v);
    }
    return out;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void find_range(const struct xy *p, int n, double *scratch, bool zero, double *low, double *high)
{
    int count = 0;
    double first = NAN;
    for (int i = 0; i < n; i++)
        if (isfinite(p[i].y)) {
            scratch[count++] = p[i].y;
            first = isnan(first) ? p[i].y : first;
        }
    *low = 0, *high = 1;
    if (count == 0)
        return;
    qsort(scratch, (size_t)count, sizeof *scratch, compare_doubles);
    *low = scratch[0];
    *high = scratch[count - 1];
    /* Where a curve starts is news; a spike far above everything else would
     * flatten all the rest. */
    double q1 = scratch[count / 100], q99 = scratch[count - 1 - count / 100];
    double cap = fmax(first, q99 + (q99 - q1));
    if (count >= 100 && *high > cap && first < q99 + 20 * (q99 - q1))
        *high = cap;
    if (zero && *low >= 0 && *low < 0.35 * *high)
        *low = 0;
    if (*high - *low < 1e-9 * fmax(fabs(*high), fabs(*low)) || *high == *low) {
        double room = *high != 0 ? 0.1 * fabs(*high) : 1;
        *low -= *low > 0 && *low < room ? *low : room;
        *high += room;
    }
}

/* Ticks so far apart that about `count` fit, but no fewer than three. */
static double axis_step(double low, double high, int count)
{
    double step = tick_step(high - low, count);
    for (int n = count; n < 4 * count && floor(high / step) - ceil(low / step) < 2; n++)
        step = tick_step(high - low, n);
    return step;
}

void chart_fit(struct chart *c, const struct xy *p, int n, double *scratch, bool zero)
{
    double low, high;
    find_range(p, n, scratch, zero, &low, &high);
    double room = 0.04 * (high - low); /* lines stay clear of the frame */
    c->y_min = low == 0 && zero ? 0 : low - room;
    c->y_max = high + room;
    c->y_step = axis_step(c->y_min, c->y_max, c->small ? 4 : 6);
}

/* ---- the frame ------------------------------------------------------------------------------- */

enum { SIDE = 1000, MAX_TICKS = 24, TICK_TEXT = 40 };

struct ticks {
    double at[MAX_TICKS], step[MAX_TICKS];
    int n;
};

static void add_tick(struct ticks *t, double at, double step)
{
    if (t->n < MAX_TICKS) {
        t->at[t->n] = at;
        t->step[t->n++] = step;
    }
}

static double to_x(const struct chart *c, double x)
{
    double t = c->log_x ? log10(fmax(x, c->x_min) / c->x_min) / log10(c->x_max / c->x_min)
                        : (x - c->x_min) / (c->x_max - c->x_min);
    /* Far outside is as good as outside, and keeps coordinates short. */
    return fmin(fmax(t, -1), 2) * SIDE;
}

static double to_y(const struct chart *c, double y)
{
    double t = (y - c->y_min) / (c->y_max - c->y_min);
    return (1 - fmin(fmax(t, -1), 2)) * SIDE;
}

static void y_ticks(const struct chart *c, struct ticks *t)
{
    double step = c->y_step, first = ceil(c->y_min / step - 1e-6);
    for (int i = 0; i < 12 && (first + i) * step <= c->y_max + step * 1e-6; i++)
        add_tick(t, (first + i) * step, step);
}

static void x_ticks(const struct chart *c, struct ticks *t)
{
    if (c->log_x) {
        static const int lead[] = {1, 2, 5};
        bool few = c->x_max / c->x_min < 1000;
        for (double power = 1; power <= c->x_max; power *= 10)
            for (int i = 0; i < (few ? 3 : 1); i++)
                if (lead[i] * power >= c->x_min && lead[i] * power <= c->x_max)
                    add_tick(t, lead[i] * power, lead[i] * power);
        return;
    }
    double step = axis_step(c->x_min, c->x_max, c->small ? 5 : 10);
    step = c->whole_x ? fmax(1, step) : step;
    double first = ceil(c->x_min / step - 1e-6);
    for (int i = 0; i < 20 && (first + i) * step <= c->x_max * (1 + 1e-9); i++)
        add_tick(t, (first + i) * step, step);
}

static void add_labels(struct buf *b, const struct chart *c, const struct ticks *x, const struct ticks *y)
{
    char text[TICK_TEXT];
    for (int i = 0; i < y->n; i++)
        buf_addf(b, "<span class='y' style='top:%.2f%%'>%s</span>", to_y(c, y->at[i]) / 10,
                 tick_text(y->at[i], y->step[i], text, sizeof text));
    buf_add(b, "\n");
    for (int i = 0; i < x->n; i++)
        buf_addf(b, "<span class='x%s' style='left:%.2f%%'>%s</span>", i % 2 == 1 ? " odd" : "", to_x(c, x->at[i]) / 10,
                 tick_text(x->at[i], x->step[i], text, sizeof text));
    buf_add(b, "\n");
}

void chart_begin(struct buf *b, struct chart *c, int id)
{
    struct ticks x = {0}, y = {0};
    char text[TICK_TEXT];
    size_t widest = 1;
    c->id = id;
    if (c->log_x && c->x_min < 1)
        c->x_min = 1;
    if (!(c->x_max > c->x_min))
        c->x_max = c->x_min + 1;
    if (!(c->y_max > c->y_min))
        c->y_max = c->y_min + 1;
    y_ticks(c, &y);
    x_ticks(c, &x);
    for (int i = 0; i < y.n; i++) {
        size_t n = strlen(tick_text(y.at[i], y.step[i], text, sizeof text));
        widest = n > widest ? n : widest;
    }
    buf_addf(b, "<div class='chart' role='img' style='height:%dpx;margin-left:%dpx' aria-label='", c->height,
             12 + 7 * (int)widest);
    add_html(b, c->label);
    buf_add(b, "'>");
    add_labels(b, c, &x, &y);
    buf_addf(b,
             "<svg viewBox='0 0 1000 1000' preserveAspectRatio='none'><defs><clipPath id='c%d'>"
             "<rect x='-8' y='-12' width='1016' height='1024'/></clipPath></defs>"
             "<path class='grid' d='",
             id);
    for (int i = 0; i < y.n; i++)
        buf_addf(b, "M0 %.1fH1000", to_y(c, y.at[i]));
    for (int i = 0; i < x.n; i++)
        buf_addf(b, "M%.1f 0V1000", to_x(c, x.at[i]));
    buf_add(b, "'/><path class='axis' d='M0 1000H1000'/>\n");
}

void chart_end(struct buf *b) { buf_add(b, "</svg></div>\n"); }

/* ---- what is drawn in it --------------------------------------------------------------------- */

static void end_path(struct buf *b, const char *title)
{
    if (title == NULL) {
        buf_add(b, "'/>\n");
        return;
    }
    buf_add(b, "'><title>");
    add_html(b, title);
    buf_add(b, "</title></path>\n");
}

/* Path data with gaps. A point without neighbours becomes a line of no length, whose round ends
 * make a dot. */
static void add_path(struct buf *b, const struct chart *c, const struct xy *p, int n)
{
    bool open = false;
    for (int i = 0; i < n; i++) {
        if (!isfinite(p[i].y)) {
            open = false;
            continue;
        }
        bool alone = !open && (i + 1 == n || !isfinite(p[i + 1].y));
        buf_addf(b, "%c%.1f %.1f%s", open ? 'L' : 'M', to_x(c, p[i].x), to_y(c, p[i].y), alone ? "h0" : "");
        open = true;
    }
}

void chart_line(struct buf *b, const struct chart *c, const struct xy *p, int n, const char *class, const char *style,
                const char *title)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='line %s' style='%s' d='", c->id, class, style);
    add_path(b, c, p, n);
    end_path(b, title);
}

void chart_band(struct buf *b, const struct chart *c, const struct xy *low, const struct xy *high, int n,
                const char *class)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='%s' d='", c->id, class);
    for (int from = 0; from < n;) {
        int to = from;
        while (to < n && isfinite(low[to].y) && isfinite(high[to].y))
            to++;
        if (to > from) {
            add_path(b, c, high + from, to - from);
            for (int i = to; i-- > from;)
                buf_addf(b, "L%.1f %.1f", to_x(c, low[i].x), to_y(c, low[i].y));
            buf_add(b, "Z");
        }
        from = to + 1;
    }
    end_path(b, NULL);
}

void chart_dot(struct buf *b, const struct chart *c, struct xy p, const char *class, const char *style,
               const char *title)
{
    if (!isfinite(p.y))
        return;
    buf_addf(b, "<path clip-path='url(#c%d)' class='dot %s' style='%s' d='M%.1f %.1fh0", c->id, class, style,
             to_x(c, p.x), to_y(c, p.y));
    end_path(b, title);
}

void chart_rule(struct buf *b, const struct chart *c, double x, const char *class, const char *title)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='rule %s' d='M%.1f 0V1000", c->id, class, to_x(c, x));
    end_path(b, title);
}

void chart_mark(struct buf *b, const struct chart *c, double x, const char *title)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='mark' d='M%.1f 1000v-22", c->id, to_x(c, x));
    end_path(b, title);
}
