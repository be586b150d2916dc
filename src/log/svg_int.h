/* Private to log/: line charts as HTML with inline SVG. Lines are drawn in a square of 1000 by
 * 1000 that is stretched over the plotting area; tick labels are text beside it. So a chart takes
 * any width, and its text keeps its size. Without scripts; colours come from the page's style
 * sheet. */
#ifndef BRAID_SVG_INT_H
#define BRAID_SVG_INT_H

#include "base/base.h"

struct xy {
    double x, y; /* y NaN: a gap in the line */
};

struct chart {
    int height; /* pixels; the width follows the page */
    double x_min, x_max;
    bool log_x;
    bool whole_x;                /* ticks between whole numbers mean nothing (steps) */
    bool small;                  /* fewer ticks */
    const char *label;           /* for screen readers */
    double y_min, y_max, y_step; /* set by chart_fit */
    int id;                      /* set by chart_begin */
};

/* Chooses a y axis that shows the values well: sparse far outliers above are left out (they are
 * clipped), a lone or constant value gets room, and with zero set the axis starts at 0 when that is
 * near. n may be 0. scratch holds n numbers. */
void chart_fit(struct chart *c, const struct xy *p, int n, double *scratch, bool zero);
/* Frame, grid and tick labels. id must be unique in the page (it names the clip path). */
void chart_begin(struct buf *b, struct chart *c, int id);
/* class and style are trusted text; title (may be NULL) is escaped and shown on hover. */
void chart_line(struct buf *b, const struct chart *c, const struct xy *p, int n, const char *class, const char *style,
                const char *title);
/* The area between two lines with the same x and the same gaps. */
void chart_band(struct buf *b, const struct chart *c, const struct xy *low, const struct xy *high, int n,
                const char *class);
/* The style sheet gives the size, as the width of a round stroke. */
void chart_dot(struct buf *b, const struct chart *c, struct xy p, const char *class, const char *style,
               const char *title);
void chart_rule(struct buf *b, const struct chart *c, double x, const char *class, const char *title);
void chart_mark(struct buf *b, const struct chart *c, double x, const char *title); /* on the axis */
void chart_end(struct buf *b);

/* 1, 2 or 5 times a power of ten, so that about `count` steps span the range. */
double tick_step(double range, int count);
/* The label of the tick v on an axis with ticks `step` apart: neighbours never
 * have the same text. */
const char *tick_text(double v, double step, char *out, size_t size);

#endif
