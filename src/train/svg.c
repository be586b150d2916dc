/* Line charts as inline SVG; see svg_int.h. */
#include "train/svg_int.h"

#include "train/log_int.h"

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
    double step = (lead <= 1.0000001   ? 1
                   : lead <= 2.0000001 ? 2
                   : lead <= 5.0000001 ? 5
                                       : 10) *
                  power;
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

const char *tick_text(double v, double step, char *out, size_t size)
{
    static const char unit[] = {'k', 'M', 'G', 'T'};
    double most = fabs(v);
    if (most < fabs(step) * 1e-6) {
        snprintf(out, size, "0");
    } else if (most >= 1e15 || most < 1e-3 || step < 1e-5) {
        snprintf(out, size, "%.2e", v);
        tidy_exponent(out);
    } else if (most >= 1e4 || (most >= 1000 && step >= 1000)) {
        int i = most >= 1e12 ? 3 : most >= 1e9 ? 2 : most >= 1e6 ? 1 : 0;
        snprintf(out, size, "%.5g%c", v / pow(1000, i + 1), unit[i]);
    } else {
        int decimals = step < 1 ? (int)ceil(-log10(step) - 1e-9) : 0;
        snprintf(out, size, "%.*f", decimals, v);
    }
    return out;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void find_range(const struct xy *p, int n, double *scratch, bool zero, double *low,
                       double *high)
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
    /* Where a curve starts is news; a spike far above everything else would flatten all the rest.
     */
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

void chart_fit(struct chart *c, const struct xy *p, int n, double *scratch, bool zero)
{
    double low, high;
    find_range(p, n, scratch, zero, &low, &high);
    c->y_step = tick_step(high - low, c->small ? 4 : 6);
    c->y_min = floor(low / c->y_step + 1e-6) * c->y_step;
    c->y_max = ceil(high / c->y_step - 1e-6) * c->y_step;
}

/* ---- the frame ------------------------------------------------------------------------------- */

static double to_x(const struct chart *c, double x)
{
    double t = c->log_x ? log10(fmax(x, c->x_min) / c->x_min) / log10(c->x_max / c->x_min)
                        : (x - c->x_min) / (c->x_max - c->x_min);
    /* Far outside is as good as outside, and keeps coordinates short. */
    return c->left + fmin(fmax(t, -1), 2) * (c->right - c->left);
}

static double to_y(const struct chart *c, double y)
{
    double t = (y - c->y_min) / (c->y_max - c->y_min);
    return c->bottom - fmin(fmax(t, -1), 2) * (c->bottom - c->top);
}

static void y_axis(struct buf *b, const struct chart *c)
{
    char text[32];
    double step = c->y_step, first = ceil(c->y_min / step - 1e-6);
    for (int i = 0; i < 12 && (first + i) * step <= c->y_max + step * 1e-6; i++) {
        double v = (first + i) * step, y = to_y(c, v);
        buf_addf(b,
                 "<path class='grid' d='M%.0f %.1fH%.0f'/>"
                 "<text x='%.0f' y='%.1f' text-anchor='end'>%s</text>",
                 c->left, y, c->right, c->left - 7, y + 3.5, tick_text(v, step, text, sizeof text));
    }
}

static void x_tick(struct buf *b, const struct chart *c, double v, double step)
{
    char text[32];
    double x = to_x(c, v);
    buf_addf(b,
             "<path class='grid' d='M%.1f %.1fV%.0f'/>"
             "<text x='%.1f' y='%.1f' text-anchor='middle'>%s</text>",
             x, c->top, c->bottom, x, c->bottom + 16, tick_text(v, step, text, sizeof text));
}

static void x_axis(struct buf *b, const struct chart *c)
{
    if (c->log_x) {
        static const int lead[] = {1, 2, 5};
        bool few = c->x_max / c->x_min < 1000;
        for (double power = 1; power <= c->x_max; power *= 10)
            for (int i = 0; i < (few ? 3 : 1); i++)
                if (lead[i] * power >= c->x_min && lead[i] * power <= c->x_max)
                    x_tick(b, c, lead[i] * power, lead[i] * power);
        return;
    }
    double step = fmax(1, tick_step(c->x_max - c->x_min, c->small ? 5 : 10)); /* steps are whole */
    double first = ceil(c->x_min / step - 1e-6);
    for (int i = 0; i < 20 && (first + i) * step <= c->x_max * (1 + 1e-9); i++)
        x_tick(b, c, (first + i) * step, step);
}

void chart_begin(struct buf *b, struct chart *c, int id)
{
    c->left = 54;
    c->right = c->width - 14;
    c->top = 8;
    c->bottom = c->height - 24;
    c->id = id;
    if (c->log_x && c->x_min < 1)
        c->x_min = 1;
    if (!(c->x_max > c->x_min))
        c->x_max = c->x_min + 1;
    if (!(c->y_max > c->y_min))
        c->y_max = c->y_min + 1;
    buf_addf(b, "<svg viewBox='0 0 %d %d' role='img' aria-label='", c->width, c->height);
    add_html(b, c->label);
    buf_addf(b, "'><defs><clipPath id='c%d'><rect x='%.0f' y='%.0f' width='%.0f' height='%.0f'/>",
             id, c->left - 2, c->top - 4, c->right - c->left + 6, c->bottom - c->top + 6);
    buf_add(b, "</clipPath></defs>\n");
    y_axis(b, c);
    x_axis(b, c);
    buf_addf(b, "<path class='axis' d='M%.0f %.0fH%.0f'/>\n", c->left, c->bottom, c->right);
}

void chart_end(struct buf *b) { buf_add(b, "</svg>\n"); }

/* ---- what is drawn in it --------------------------------------------------------------------- */

static void add_title(struct buf *b, const char *title)
{
    if (title == NULL)
        return;
    buf_add(b, "<title>");
    add_html(b, title);
    buf_add(b, "</title>");
}

/* Path data with gaps. A point without neighbours, which a line would not show, becomes a ring so
 * small that it looks like a dot. */
static void add_path(struct buf *b, const struct chart *c, const struct xy *p, int n)
{
    bool open = false;
    for (int i = 0; i < n; i++) {
        if (!isfinite(p[i].y)) {
            open = false;
            continue;
        }
        bool alone = !open && (i + 1 == n || !isfinite(p[i + 1].y));
        buf_addf(b, "%c%.1f %.1f%s", open ? 'L' : 'M', to_x(c, p[i].x), to_y(c, p[i].y),
                 alone ? "m-1 0a1 1 0 1 0 2 0a1 1 0 1 0-2 0" : "");
        open = true;
    }
}

void chart_line(struct buf *b, const struct chart *c, const struct xy *p, int n, const char *class,
                const char *style, const char *title)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='line %s' style='%s' d='", c->id, class, style);
    add_path(b, c, p, n);
    buf_add(b, "'>");
    add_title(b, title);
    buf_add(b, "</path>\n");
}

void chart_band(struct buf *b, const struct chart *c, const struct xy *low, const struct xy *high,
                int n, const char *class)
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
    buf_add(b, "'/>\n");
}

void chart_dot(struct buf *b, const struct chart *c, struct xy p, double radius, const char *class,
               const char *title)
{
    if (!isfinite(p.y))
        return;
    buf_addf(b, "<circle clip-path='url(#c%d)' class='%s' cx='%.1f' cy='%.1f' r='%.1f'>", c->id,
             class, to_x(c, p.x), to_y(c, p.y), radius);
    add_title(b, title);
    buf_add(b, "</circle>");
}

void chart_rule(struct buf *b, const struct chart *c, double x, const char *class,
                const char *title)
{
    buf_addf(b, "<path clip-path='url(#c%d)' class='rule %s' d='M%.1f %.0fV%.0f'>", c->id, class,
             to_x(c, x), c->top, c->bottom);
    add_title(b, title);
    buf_add(b, "</path>");
}

void chart_mark(struct buf *b, const struct chart *c, double x, const char *title)
{
    double at = to_x(c, x);
    buf_addf(b, "<path class='mark' d='M%.1f %.1fl-4 -7h8z'>", at, c->bottom);
    add_title(b, title);
    buf_add(b, "</path>");
}
