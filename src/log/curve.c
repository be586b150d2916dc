/* The loss curve as text, for the end of a run in a terminal; see report.h. */
#include "log/report_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

enum { DOTS_X = 2, DOTS_Y = 4, MAX_ROWS = 60, MAX_COLS = 300 }; /* dots of a Braille cell */
enum { AXIS_WIDTH = 10 };                                       /* columns left of the curve, and one to its right */

struct canvas {
    int rows, cols, w, h; /* w, h in dots */
    double x0, x1, y0, y1;
    uint8_t dots[MAX_ROWS][MAX_COLS]; /* Braille pattern of a cell; ASCII: any bit */
    bool val[MAX_ROWS][MAX_COLS];
};

/* Finite, and small enough that differences are finite too. */
static bool usable(double step, double loss) { return fabs(step) < 1e30 && fabs(loss) < 1e30; }

static void widen(struct canvas *v, const double *step, const double *loss, int n)
{
    for (int i = 0; i < n; i++)
        if (usable(step[i], loss[i])) {
            v->x0 = fmin(v->x0, step[i]);
            v->x1 = fmax(v->x1, step[i]);
            v->y0 = fmin(v->y0, loss[i]);
            v->y1 = fmax(v->y1, loss[i]);
        }
}

static int dot_x(const struct canvas *v, double step)
{
    return v->x1 > v->x0 ? (int)((step - v->x0) / (v->x1 - v->x0) * (v->w - 1) + 0.5) : 0;
}

static int dot_y(const struct canvas *v, double loss) /* 0 is the top */
{
    return v->y1 > v->y0 ? (int)((v->y1 - loss) / (v->y1 - v->y0) * (v->h - 1) + 0.5) : v->h / 2;
}

static void set_dot(struct canvas *v, int x, int y, bool unicode)
{
    static const uint8_t bit[DOTS_Y][DOTS_X] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    if (unicode)
        v->dots[y / DOTS_Y][x / DOTS_X] |= bit[y % DOTS_Y][x % DOTS_X];
    else
        v->dots[y][x] = 1;
}

/* Each column of dots shows the mean of its values; columns between two values are filled in by a
 * straight line, and a steep rise by a vertical one, so that the curve never falls apart. */
static void draw(struct canvas *v, const struct curve *c)
{
    int last_x = -1, last_y = 0;
    for (int i = 0; i < c->n;) {
        if (!usable(c->step[i], c->loss[i])) {
            i++;
            continue;
        }
        int x = dot_x(v, c->step[i]), count = 0;
        double sum = 0;
        for (; i < c->n && (!usable(c->step[i], c->loss[i]) || dot_x(v, c->step[i]) == x); i++)
            if (usable(c->step[i], c->loss[i])) {
                sum += c->loss[i];
                count++;
            }
        int y = dot_y(v, sum / count), from = last_x < 0 || x <= last_x ? x : last_x + 1;
        int before = last_x < 0 ? y : last_y;
        for (int at = from; at <= x; at++) {
            double t = x > last_x && last_x >= 0 ? (double)(at - last_x) / (x - last_x) : 1;
            int here = (int)lrint(last_y * (1 - t) + y * t);
            here = last_x < 0 ? y : here;
            for (int d = before < here ? before : here; d <= (before > here ? before : here); d++)
                set_dot(v, at, d, c->unicode);
            before = here;
        }
        last_x = x;
        last_y = y;
    }
    int per_x = c->unicode ? DOTS_X : 1, per_y = c->unicode ? DOTS_Y : 1;
    for (int i = 0; i < c->n_val; i++)
        if (usable(c->val_step[i], c->val_loss[i]))
            v->val[dot_y(v, c->val_loss[i]) / per_y][dot_x(v, c->val_step[i]) / per_x] = true;
}

static void print_cell(FILE *out, const struct canvas *v, int r, int k, bool unicode)
{
    uint8_t dots = v->dots[r][k];
    if (v->val[r][k])
        fputs(unicode ? "\xE2\x97\x8F" : "o", out); /* black circle */
    else if (!unicode || dots == 0)
        fputc(dots != 0 ? '*' : ' ', out);
    else
        fprintf(out, "\xE2%c%c", 0xA0 | dots >> 6, 0x80 | (dots & 0x3F)); /* U+2800 + dots */
}

static void print_axis(FILE *out, const struct canvas *v, const struct curve *c)
{
    char left[32], right[32];
    int n_left = snprintf(left, sizeof left, "%.0f", v->x0);
    int n_right = snprintf(right, sizeof right, "%.0f", v->x1);
    fprintf(out, "%8s%s", "", c->unicode ? "\xE2\x94\x94" : "+");
    for (int k = 0; k < v->cols; k++)
        fputs(c->unicode ? "\xE2\x94\x80" : "-", out);
    if (v->x1 > v->x0 && n_left + n_right + 6 < v->cols)
        fprintf(out, "\n%9s%s%*s%s\n", "", left, v->cols - n_left - n_right, "step ", right);
    else
        fprintf(out, "\n%9sstep %s\n", "", left);
}

static void print_canvas(FILE *out, const struct canvas *v, const struct curve *c)
{
    fprintf(out, "    loss  %s training", c->unicode ? "\xE2\xA0\xA4\xE2\xA0\xA4" : "**");
    if (c->n_val > 0)
        fprintf(out, "   %s validation", c->unicode ? "\xE2\x97\x8F" : "o");
    fputc('\n', out);
    for (int r = 0; r < v->rows; r++) {
        bool label = r % 3 == 0 || r == v->rows - 1;
        int per_y = c->unicode ? DOTS_Y : 1;
        double y = v->y1 - (v->y1 - v->y0) * (r * per_y + 0.5 * (per_y - 1)) / (v->h - 1);
        if (label)
            fprintf(out, "%7.*f ", fabs(y) < 1000 ? 3 : 0, y);
        else
            fprintf(out, "%8s", "");
        fputs(c->unicode ? (label ? "\xE2\x94\xA4" : "\xE2\x94\x82") : (label ? "+" : "|"), out);
        int end = v->cols;
        while (end > 0 && v->dots[r][end - 1] == 0 && !v->val[r][end - 1])
            end--; /* no blanks at the end of a line */
        for (int k = 0; k < end; k++)
            print_cell(out, v, r, k, c->unicode);
        fputc('\n', out);
    }
    print_axis(out, v, c);
}

void report_terminal_curve(FILE *out, const struct curve *c)
{
    struct canvas *v = calloc(1, sizeof *v);
    if (v == NULL)
        return; /* a picture is not worth an error */
    int rows = c->rows > 0 ? c->rows : 12, cols = c->cols > 0 ? c->cols : 72;
    v->rows = rows < 3 ? 3 : rows > MAX_ROWS ? MAX_ROWS : rows;
    v->cols = cols < 20 ? 20 : cols > MAX_COLS ? MAX_COLS : cols;
    v->w = v->cols * (c->unicode ? DOTS_X : 1);
    v->h = v->rows * (c->unicode ? DOTS_Y : 1);
    v->x0 = v->y0 = INFINITY;
    v->x1 = v->y1 = -INFINITY;
    widen(v, c->step, c->loss, c->n);
    widen(v, c->val_step, c->val_loss, c->n_val);
    if (v->x0 > v->x1) {
        fputs("    no loss to draw yet\n", out);
    } else {
        draw(v, c);
        print_canvas(out, v, c);
    }
    free(v);
}

static int unpack(const struct series *s, double *step, double *loss)
{
    for (int i = 0; i < s->count; i++) {
        step[i] = 0.5 * ((double)s->point[i].first + (double)s->point[i].last);
        loss[i] = s->point[i].n > 0 ? s->point[i].mean : NAN;
    }
    return s->count;
}

void report_history_curve(FILE *out, const struct history *h, bool unicode)
{
    double *room;
    if (mem_array((void **)&room, 4 * MAIN_POINTS, sizeof *room, NULL) != ST_OK)
        return;
    double *loss = room + MAIN_POINTS, *vx = loss + MAIN_POINTS, *vy = vx + MAIN_POINTS;
    struct curve c = {.step = room, .loss = loss, .val_step = vx, .val_loss = vy, .unicode = unicode};
    struct winsize w;
    if (fileno(out) >= 0 && ioctl(fileno(out), TIOCGWINSZ, &w) == 0 && w.ws_col > AXIS_WIDTH)
        c.cols = w.ws_col - AXIS_WIDTH;
    c.n = unpack(&h->main[HIST_LOSS], room, loss);
    c.n_val = unpack(&h->main[HIST_VAL], vx, vy);
    report_terminal_curve(out, &c);
    free(room);
}
