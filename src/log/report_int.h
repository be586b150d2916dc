/* Private to log/: what the page of one run and the page that compares runs have in common. */
#ifndef BRAID_REPORT_INT_H
#define BRAID_REPORT_INT_H

#include "log/log_int.h"
#include "log/report.h"
#include "log/svg_int.h"

struct report_facts {
    const char *title, *command, *config, *model, *machine; /* each may be NULL */
    const char *status;   /* "running" (the page then loads itself again), "finished", "stopped",
                             "unfinished" */
    int64_t total_steps;  /* 0: not known */
    int64_t memory_bytes; /* planned; 0: not known */
};

int report_html(struct buf *out, const struct history *h, const struct report_facts *f, struct err *e);

/* ---- curve.c: the loss as text for a terminal */
struct curve {
    const double *step, *loss; /* rising steps; values that are not finite are left out */
    int n;
    const double *val_step, *val_loss;
    int n_val;
    int rows, cols; /* of the plotting area; 0: 12 by 72 */
    bool unicode;   /* Braille dots instead of asterisks */
};
void report_terminal_curve(FILE *out, const struct curve *c);
void report_history_curve(FILE *out, const struct history *h, bool unicode);

/* What the loss is drawn over. The page holds a chart for each; a link
 * chooses, without a script. */
enum x_kind { X_STEP, X_LOG, X_TOKENS, X_TIME, X_KINDS };

struct x_axis {
    enum x_kind kind;
    const struct series *by; /* tokens or seconds by step; NULL: steps themselves */
    double scale;            /* of the numbers in `by` */
};
/* The unit of the time axis follows the longest run. */
struct time_unit {
    double seconds;
    const char *name;
};
struct time_unit time_unit_of(double longest);
struct x_axis x_axis_of(enum x_kind kind, const struct history *h, struct time_unit unit);
double x_of(const struct x_axis *a, double step);
const char *x_name(enum x_kind kind); /* in ids and classes: "step", "log", "tokens", "time" */

/* Room for drawing, and chart numbers. */
struct page {
    struct buf *b;
    struct xy *p, *low, *high; /* MAIN_POINTS each */
    struct xy *all;            /* points of a whole chart, for its range */
    double *scratch;           /* as many numbers as `all` has points */
    int next_id;
};
int page_init(struct page *g, struct buf *b, size_t all, struct err *e);
void page_release(struct page *g);

/* From the doctype to <main>. refresh: seconds until the page loads itself again; 0: never. */
void page_begin(struct page *g, const char *title, int refresh);
void page_end(struct page *g);
void page_x_choice(struct page *g);
const char *page_number(double v, char *out, size_t size);
void page_pre(struct page *g, const char *name, const char *text, bool open); /* NULL, "": nothing */
/* Few lines get colours told apart by name; many (layers, experts) get a ramp in their order. */
enum { FEW_LINES = 6 };
void line_colour(int i, int n, char *out, size_t size);

int points_of(const struct series *s, const struct x_axis *a, struct xy *out);
/* Lowest and highest value of each point. */
int band_of(const struct series *s, const struct x_axis *a, struct xy *low, struct xy *high);
/* What the range of a chart must cover; at most 2 * s->count points. */
int add_range(const struct series *s, const struct x_axis *a, struct xy *all);
/* Mean over a window around each point, narrow near the start, where the loss falls fastest. Gaps
 * stay gaps. */
void smooth(const struct xy *p, int n, struct xy *out);
double series_mean(const struct series *s);

#endif
