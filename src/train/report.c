/* The HTML report; see report.h. The page is written in one pass, top to bottom: header, key
 * numbers, loss, panels, tables, facts. */
#include "train/report.h"

#include "train/svg_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_GROUPS = 60, MAX_LINES = 128, FEW_LINES = 6, EVAL_ROWS = 12, EVENT_ROWS = 40 };

/* What drawing needs beyond the history: room for points, the shared x range, chart numbers. */
struct page {
    struct buf *b;
    const struct history *h;
    const struct report_facts *f;
    struct xy *p, *low, *high; /* MAIN_POINTS each */
    struct xy *all;            /* points of a whole panel, for its range */
    double *scratch;
    bool *done; /* extras that have their panel */
    double x_min, x_max;
    int next_id;
};

static const char style_sheet[] =
    ":root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1d1f23;--dim:#60656d;"
    "--line:#e6e7e9;--axis:#8d929a;--c0:#0b6cb4;--c1:#cf5200;--c2:#00805a;--c3:#ad4a8a;"
    "--c4:#8a6a00;--c5:#5a57d0;--bad:#c62828;--good:#1b7f3b}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#131417;--card:#1c1e22;--ink:#e6e7ea;"
    "--dim:#9a9fa8;--line:#2d3036;--axis:#6f757e;--c0:#5eb0ef;--c1:#ff9a4d;--c2:#3fca9b;"
    "--c3:#e58fc6;--c4:#dcb83f;--c5:#a5a2ff;--bad:#ff6b6b;--good:#5fd38d}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\n"
    "main{max-width:1140px;margin:0 auto;padding:28px 20px 48px}\n"
    "h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}"
    "h2{font-size:17px;margin:0}h3{font-size:14px;margin:0;overflow-wrap:anywhere}\n"
    ".sub{color:var(--dim);margin:6px 0 20px}.badge{display:inline-block;font-size:12px;"
    "font-weight:600;border:1px solid currentColor;border-radius:99px;padding:0 10px;"
    "margin-right:8px;color:var(--c0)}.finished{color:var(--good)}.stopped{color:var(--c1)}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;"
    "margin-bottom:16px}.card{background:var(--card);border:1px solid var(--line);"
    "border-radius:10px;padding:14px 16px;margin-bottom:16px;min-width:0}\n"
    ".tiles .card{margin:0}.tiles b{display:block;font-size:22px;line-height:1.3;"
    "font-variant-numeric:tabular-nums}.tiles span{color:var(--dim);font-size:12.5px}\n"
    ".panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));"
    "gap:16px;margin-bottom:16px}.panels .card{margin:0}\n"
    ".head{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:baseline;margin-bottom:8px}"
    ".legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--dim);"
    "font-size:12.5px}.legend i{display:inline-block;width:18px;height:3px;border-radius:2px;"
    "vertical-align:middle;margin-right:6px}.legend .ramp{width:54px;height:6px}\n"
    ".note{color:var(--dim);font-size:12.5px;margin:6px 0 0}\n"
    "svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font-size:11.5px;"
    "font-variant-numeric:tabular-nums}.grid{stroke:var(--line);fill:none}"
    ".axis{stroke:var(--axis);fill:none}\n"
    ".line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}"
    ".raw{stroke:var(--c0);stroke-width:1;opacity:.38}.band{fill:var(--c0);opacity:.17}"
    ".smooth{stroke:var(--c0);stroke-width:2.1}.val{stroke:var(--c1);stroke-width:1.5}"
    ".vdot{fill:var(--c1);stroke:var(--card)}.best{fill:var(--card);stroke:var(--c1);"
    "stroke-width:2}\n"
    ".rule{fill:none;stroke:var(--dim);stroke-dasharray:4 4}.rule.bad{stroke:var(--bad);"
    "stroke-dasharray:none;opacity:.75}.mark{fill:var(--axis)}\n"
    ".seg{display:inline-flex;font-size:12.5px;color:var(--dim)}.seg label{cursor:pointer;"
    "padding:0 8px;border:1px solid var(--line)}.seg label:first-child{border-radius:6px 0 0 6px}"
    ".seg label:last-child{border-radius:0 6px 6px 0;border-left:0}\n"
    ".pick{position:absolute;opacity:0;pointer-events:none}.logx{display:none}"
    "#xlog:checked~.linx{display:none}#xlog:checked~.logx{display:block}"
    "#xlin:checked~.head label[for=xlin],#xlog:checked~.head label[for=xlog]{color:var(--ink);"
    "font-weight:600;background:var(--bg)}.pick:focus-visible~.head .seg{outline:2px solid "
    "var(--c0);border-radius:6px}\n"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{"
    "text-align:left;padding:4px 14px 4px 0;border-top:1px solid var(--line);"
    "overflow-wrap:anywhere;vertical-align:top}th{font-weight:500;color:var(--dim)}"
    "thead th{border-top:0}td.n,th.n{text-align:right}tr.top td{font-weight:600}\n"
    ".two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));"
    "gap:16px}.two>.card{margin:0 0 16px}h2+table{margin-top:8px}\n"
    "pre{margin:10px 0 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Consolas,'DejaVu Sans Mono',"
    "monospace;white-space:pre;overflow-x:auto;max-height:480px}summary{cursor:pointer;"
    "font-weight:600}\n";

/* ---- points ---------------------------------------------------------------------------------- */

static int points_of(const struct series *s, struct xy *out)
{
    for (int i = 0; i < s->count; i++) {
        const struct hist_point *p = &s->point[i];
        out[i] = (struct xy){0.5 * ((double)p->first + (double)p->last), p->n > 0 ? p->mean : NAN};
    }
    return s->count;
}

/* Mean over a window round each point: centred, so that the line does not lag behind, and narrow
 * near the start, where the loss falls fastest. Gaps stay gaps. */
static void smooth(const struct xy *p, int n, struct xy *out)
{
    double sum = 0;
    int count = 0, from = 0, to = 0; /* the window is [from, to) */
    for (int i = 0; i < n; i++) {
        int half = n / 60 < i / 3 ? n / 60 : i / 3;
        for (; to < n && to <= i + half; to++)
            if (isfinite(p[to].y))
                sum += p[to].y, count++;
        for (; from < i - half; from++)
            if (isfinite(p[from].y))
                sum -= p[from].y, count--;
        out[i] = (struct xy){p[i].x, isfinite(p[i].y) ? sum / count : NAN};
    }
}

static const char *number(double v, char *out, size_t size)
{
    if (!isfinite(v))
        snprintf(out, size, "not finite");
    else if (fabs(v) >= 1e4)
        short_count(v, out, size);
    else if (v != 0 && fabs(v) < 1e-3)
        snprintf(out, size, "%.2e", v);
    else
        snprintf(out, size, "%.4g", v);
    return out;
}

/* ---- header and key numbers ------------------------------------------------------------------ */

static void add_header(struct page *g)
{
    struct buf *b = g->b;
    const char *title = g->f->title != NULL && g->f->title[0] ? g->f->title : "Training run";
    const char *status = g->f->status != NULL ? g->f->status : "running";
    char when[64] = "";
    time_t now = (time_t)time_wall();
    struct tm tm;
    if (localtime_r(&now, &tm) != NULL)
        strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    buf_add(b, "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
               "<meta name='viewport' content='width=device-width,initial-scale=1'><title>");
    add_html(b, title);
    buf_addf(b, "</title>\n<style>%s</style></head>\n<body><main>\n<h1>", style_sheet);
    add_html(b, title);
    buf_add(b, "</h1>\n<p class='sub'><span class='badge ");
    add_html(b, status);
    buf_add(b, "'>");
    add_html(b, status);
    buf_addf(b, "</span>step %" PRId64, g->h->last_step);
    if (g->f->total_steps > 0)
        buf_addf(b, " of %" PRId64, g->f->total_steps);
    buf_addf(b, ", written %s</p>\n", when);
}

static void add_tile(struct page *g, const char *value, const char *label)
{
    buf_addf(g->b, "<div class='card'><b>%s</b><span>%s</span></div>\n", value, label);
}

static double mean_of(const struct series *s)
{
    double sum = 0, n = 0;
    for (int i = 0; i < s->count; i++) {
        sum += s->point[i].mean * s->point[i].n;
        n += s->point[i].n;
    }
    return n > 0 ? sum / n : NAN;
}

static void add_tiles(struct page *g)
{
    const struct series *m = g->h->main;
    char text[64];
    buf_add(g->b, "<div class='tiles'>\n");
    if (m[HIST_LOSS].count > 0)
        add_tile(g, number(m[HIST_LOSS].last, text, sizeof text), "last training loss");
    if (m[HIST_VAL].count > 0)
        add_tile(g, number(m[HIST_VAL].best, text, sizeof text), "best validation");
    if (m[HIST_BPB].count > 0)
        add_tile(g, number(m[HIST_BPB].best, text, sizeof text), "best bits per byte");
    add_tile(g, short_count((double)g->h->tokens, text, sizeof text), "tokens seen");
    if (m[HIST_SPEED].count > 0)
        add_tile(g, short_count(mean_of(&m[HIST_SPEED]), text, sizeof text), "tokens/s");
    if (m[HIST_MFU].count > 0) {
        snprintf(text, sizeof text, "%.1f%%", mean_of(&m[HIST_MFU]));
        add_tile(g, text, "of peak (MFU)");
    }
    add_tile(g, human_time(g->h->elapsed, text, sizeof text), "training time");
    buf_add(g->b, "</div>\n");
}

/* ---- charts ---------------------------------------------------------------------------------- */

static void add_events(struct page *g, const struct chart *c, bool checkpoints)
{
    char title[256];
    for (int i = 0; i < g->h->n_events; i++) {
        const struct hist_event *ev = &g->h->event[i];
        if (ev->kind == LOG_START)
            continue;
        snprintf(title, sizeof title, "%s at step %" PRId64 "%s%s", event_name(ev->kind), ev->step,
                 ev->text[0] ? ": " : "", ev->text);
        if (ev->kind != LOG_CHECKPOINT)
            chart_rule(g->b, c, (double)ev->step, ev->kind == LOG_NONFINITE ? "bad" : "", title);
        else if (checkpoints)
            chart_mark(g->b, c, (double)ev->step, title);
    }
    buf_add(g->b, "\n");
}

static void add_validation(struct page *g, const struct chart *c)
{
    const struct series *v = &g->h->main[HIST_VAL];
    char title[128];
    int n = points_of(v, g->p);
    chart_line(g->b, c, g->p, n, "val", "", NULL);
    if (n <= 120)
        for (int i = 0; i < n; i++) {
            snprintf(title, sizeof title, "validation %.4f at step %.0f", g->p[i].y, g->p[i].x);
            chart_dot(g->b, c, g->p[i], n > 50 ? 2.5 : 3.5, "vdot", title);
        }
    if (n > 1 && isfinite(v->best)) {
        snprintf(title, sizeof title, "best validation %.4f at step %" PRId64, v->best,
                 v->best_step);
        chart_dot(g->b, c, (struct xy){(double)v->best_step, v->best}, 4.5, "best", title);
    }
    buf_add(g->b, "\n");
}

/* Ends of the band of a thinned-out series: each point's lowest and highest value. */
static int band_of(const struct series *s, struct xy *low, struct xy *high)
{
    int n = points_of(s, low);
    points_of(s, high);
    for (int i = 0; i < n; i++)
        if (isfinite(low[i].y)) {
            low[i].y = s->point[i].low;
            high[i].y = s->point[i].high;
        }
    return n;
}

static int add_range(const struct series *s, struct xy *all)
{
    int n = band_of(s, all, all + s->count);
    return s->stride > 1 ? 2 * n : n; /* a series that is not thinned out has one value a point */
}

static void draw_loss(struct page *g, bool log_x)
{
    const struct series *s = &g->h->main[HIST_LOSS];
    struct chart c = {.width = 1100, .height = 400, .log_x = log_x, .label = "Loss by step"};
    int n = add_range(s, g->all);
    n += add_range(&g->h->main[HIST_VAL], g->all + n);
    chart_fit(&c, g->all, n, g->scratch, false);
    c.x_min = g->x_min, c.x_max = g->x_max;
    if (log_x && s->count > 0) /* decades before the first point of a thinned-out run are empty */
        c.x_min = fmax(1, 0.5 * ((double)s->point[0].first + (double)s->point[0].last));
    buf_addf(g->b, "<div class='%s'>", log_x ? "logx" : "linx");
    chart_begin(g->b, &c, g->next_id++);
    add_events(g, &c, true);
    n = points_of(s, g->p);
    if (s->stride > 1) {
        band_of(s, g->low, g->high);
        chart_band(g->b, &c, g->low, g->high, n, "band");
    }
    bool smoothed = n >= 80;
    chart_line(g->b, &c, g->p, n, smoothed ? "raw" : "smooth", "", NULL);
    if (smoothed) {
        smooth(g->p, n, g->low);
        chart_line(g->b, &c, g->low, n, "smooth", "", NULL);
    }
    add_validation(g, &c);
    chart_end(g->b);
    buf_add(g->b, "</div>\n");
}

static void add_loss(struct page *g)
{
    struct buf *b = g->b;
    const struct series *s = &g->h->main[HIST_LOSS];
    buf_add(b, "<section class='card'>"
               "<input class='pick' type='radio' name='x' id='xlin' checked>"
               "<input class='pick' type='radio' name='x' id='xlog'>"
               "<div class='head'><h2>Loss</h2><span class='seg'><label for='xlin'>linear steps"
               "</label><label for='xlog'>log steps</label></span><span class='legend'>");
    if (s->count >= 80)
        buf_addf(b,
                 "<span><i style='background:var(--c0);opacity:.38'></i>training, %s</span>"
                 "<span><i style='background:var(--c0)'></i>training, smoothed</span>",
                 s->stride > 1 ? "range and mean" : "each step");
    else
        buf_add(b, "<span><i style='background:var(--c0)'></i>training</span>");
    if (g->h->main[HIST_VAL].count > 0)
        buf_add(b, "<span><i style='background:var(--c1)'></i>validation</span>");
    buf_add(b, "</span></div>\n");
    draw_loss(g, false);
    draw_loss(g, true);
    buf_add(b, "<p class='note'>x: step (finished updates); y: nats per token.");
    if (s->count == 0)
        buf_add(b, " No step has been logged yet.");
    if (g->h->n_checkpoints > 0)
        buf_add(b, " Triangles on the axis: checkpoints.");
    if (g->h->n_nonfinite > 0)
        buf_addf(b, " Losses that were not finite (%" PRId64 ") leave gaps.", g->h->n_nonfinite);
    buf_add(b, "</p></section>\n");
}

static void open_panel(struct page *g, const char *title, size_t title_len)
{
    char name[MAX_TAG + 1];
    snprintf(name, sizeof name, "%.*s", (int)title_len, title);
    buf_add(g->b, "<section class='card'><div class='head'><h3>");
    add_html(g->b, name);
    buf_add(g->b, "</h3><span class='legend'>");
}

static struct chart panel_chart(const struct page *g, const char *label)
{
    return (struct chart){.width = 540,
                          .height = 210,
                          .small = true,
                          .label = label,
                          .x_min = g->x_min,
                          .x_max = g->x_max};
}

static double highest_of(const struct series *s)
{
    double high = -INFINITY;
    for (int i = 0; i < s->count; i++)
        if (s->point[i].n > 0)
            high = fmax(high, s->point[i].high);
    return high;
}

static void add_panel(struct page *g, const struct series *s, const char *title, const char *unit)
{
    char text[64];
    if (s->count == 0)
        return;
    struct chart c = panel_chart(g, title);
    int n = add_range(s, g->all);
    chart_fit(&c, g->all, n, g->scratch, true);
    open_panel(g, title, strlen(title));
    if (highest_of(s) > c.y_max) /* do not hide what the axis leaves out */
        buf_addf(g->b, "<span>highest %s%s</span>", number(highest_of(s), text, sizeof text), unit);
    buf_addf(g->b, "<span>last %s%s</span></span></div>\n", number(s->last, text, sizeof text),
             unit);
    chart_begin(g->b, &c, g->next_id++);
    add_events(g, &c, false);
    n = points_of(s, g->p);
    if (s->stride > 1) {
        band_of(s, g->low, g->high);
        chart_band(g->b, &c, g->low, g->high, n, "band");
    }
    chart_line(g->b, &c, g->p, n, "", "stroke:var(--c0)", NULL);
    chart_end(g->b);
    buf_add(g->b, "</section>\n");
}

/* ---- extras: one panel for all tags with the same beginning ---------------------------------- */

static size_t group_length(const char *tag)
{
    const char *slash = strrchr(tag, '/');
    return slash == NULL || slash == tag ? strlen(tag) : (size_t)(slash - tag);
}

/* Few lines get colours told apart by name; many (layers, experts) get a ramp in their order. */
static void line_colour(int i, int n, char *out, size_t size)
{
    static const int ramp[][3] = {
        {94, 79, 162}, {50, 136, 189}, {38, 166, 120}, {178, 171, 2}, {232, 93, 60}};
    if (n <= FEW_LINES) {
        snprintf(out, size, "var(--c%d)", i);
        return;
    }
    double at = (double)i / (n - 1) * (countof(ramp) - 1);
    int k = (int)at < countof(ramp) - 2 ? (int)at : countof(ramp) - 2, rgb[3];
    for (int j = 0; j < 3; j++)
        rgb[j] = (int)lrint(ramp[k][j] + (at - k) * (ramp[k + 1][j] - ramp[k][j]));
    snprintf(out, size, "rgb(%d,%d,%d)", rgb[0], rgb[1], rgb[2]);
}

static const char *line_name(const struct series *s, size_t group)
{
    return s->tag[group] == '/' ? s->tag + group + 1 : s->tag;
}

static void group_legend(struct page *g, const int *member, int n, size_t group)
{
    char colour[64], text[64];
    if (n == 1) {
        buf_addf(g->b, "<span>last %s</span>",
                 number(g->h->extra[member[0]].last, text, sizeof text));
    } else if (n > FEW_LINES) {
        buf_add(g->b, "<span>");
        add_html(g->b, line_name(&g->h->extra[member[0]], group));
        buf_add(g->b, " <i class='ramp' style='margin:0 4px;background:linear-gradient(90deg");
        for (int i = 0; i < 5; i++) {
            line_colour(i * (n - 1) / 4, n, colour, sizeof colour);
            buf_addf(g->b, ",%s", colour);
        }
        buf_add(g->b, ")'></i> ");
        add_html(g->b, line_name(&g->h->extra[member[n - 1]], group));
        buf_addf(g->b, " (%d lines)</span>", n);
    } else {
        for (int i = 0; i < n; i++) {
            line_colour(i, n, colour, sizeof colour);
            buf_addf(g->b, "<span><i style='background:%s'></i>", colour);
            add_html(g->b, line_name(&g->h->extra[member[i]], group));
            buf_add(g->b, "</span>");
        }
    }
    buf_add(g->b, "</span></div>\n");
}

static void add_group(struct page *g, int first)
{
    const char *tag = g->h->extra[first].tag;
    size_t len = group_length(tag);
    int member[MAX_LINES], n = 0, points = 0, left_out = 0;
    for (int i = first; i < g->h->n_extra; i++) {
        const struct series *s = &g->h->extra[i];
        if (g->done[i] || group_length(s->tag) != len || strncmp(s->tag, tag, len) != 0)
            continue;
        g->done[i] = true;
        if (n == MAX_LINES)
            left_out++;
        else if (s->count > 0)
            points += points_of(s, g->all + points), member[n++] = i;
    }
    if (n == 0)
        return;
    open_panel(g, tag, len);
    group_legend(g, member, n, len);
    struct chart c = panel_chart(g, tag);
    chart_fit(&c, g->all, points, g->scratch, true);
    chart_begin(g->b, &c, g->next_id++);
    add_events(g, &c, false);
    for (int i = 0; i < n; i++) {
        const struct series *s = &g->h->extra[member[i]];
        char colour[64], style[96];
        line_colour(i, n, colour, sizeof colour);
        snprintf(style, sizeof style, "stroke:%s%s", colour,
                 n > FEW_LINES ? ";stroke-width:1.2" : "");
        chart_line(g->b, &c, g->p, points_of(s, g->p), "", style, line_name(s, len));
    }
    chart_end(g->b);
    if (left_out > 0)
        buf_addf(g->b, "<p class='note'>%d more lines are in metrics.jsonl.</p>", left_out);
    buf_add(g->b, "</section>\n");
}

static void add_panels(struct page *g)
{
    const struct series *m = g->h->main;
    buf_add(g->b, "<div class='panels'>\n");
    add_panel(g, &m[HIST_LR], "Learning rate", "");
    add_panel(g, &m[HIST_NORM], "Gradient norm", "");
    add_panel(g, &m[HIST_SPEED], "Tokens per second", "");
    add_panel(g, &m[HIST_MFU], "Percent of peak FLOP/s (MFU)", "%");
    add_panel(g, &m[HIST_BPB], "Bits per byte, validation", "");
    int groups = 0, left_out = 0;
    for (int i = 0; i < g->h->n_extra; i++) {
        if (g->done[i])
            continue;
        if (groups++ < MAX_GROUPS)
            add_group(g, i);
        else
            left_out++;
    }
    buf_add(g->b, "</div>\n");
    if (left_out > 0)
        buf_addf(g->b, "<p class='note'>%d more metrics are in metrics.jsonl.</p>\n", left_out);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void add_row(struct page *g, const char *name, const char *value)
{
    buf_addf(g->b, "<tr><th>%s</th><td class='n'>%s</td></tr>\n", name, value);
}

static void add_count(struct page *g, const char *name, int64_t n)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, n);
    add_row(g, name, text);
}

static void add_best(struct page *g, const struct series *s, const char *name)
{
    char text[96];
    if (s->count == 0 || !isfinite(s->best))
        return;
    snprintf(text, sizeof text, "%.4f at step %" PRId64, s->best, s->best_step);
    add_row(g, name, text);
}

static void add_summary(struct page *g)
{
    const struct series *m = g->h->main;
    char text[64];
    buf_add(g->b, "<section class='card'><h2>Summary</h2><table><tbody>\n");
    add_count(g, "steps", g->h->last_step);
    add_count(g, "tokens", g->h->tokens);
    add_row(g, "training time", human_time(g->h->elapsed, text, sizeof text));
    if (m[HIST_LOSS].count > 0)
        add_row(g, "last training loss", number(m[HIST_LOSS].last, text, sizeof text));
    add_best(g, &m[HIST_LOSS], "lowest training loss");
    if (m[HIST_VAL].count > 0)
        add_row(g, "last validation loss", number(m[HIST_VAL].last, text, sizeof text));
    add_best(g, &m[HIST_VAL], "best validation");
    add_best(g, &m[HIST_BPB], "best bits per byte");
    if (m[HIST_SPEED].count > 0)
        add_row(g, "mean tokens per second", number(mean_of(&m[HIST_SPEED]), text, sizeof text));
    add_count(g, "checkpoints", g->h->n_checkpoints);
    add_count(g, "skipped updates", g->h->n_skipped);
    add_count(g, "losses not finite", g->h->n_nonfinite);
    buf_add(g->b, "</tbody></table></section>\n");
}

static void add_evals(struct page *g)
{
    const struct series *v = &g->h->main[HIST_VAL], *bpb = &g->h->main[HIST_BPB];
    if (v->count == 0)
        return;
    buf_add(g->b, "<section class='card'><h2>Latest evaluations</h2><table><thead><tr><th>step</th>"
                  "<th class='n'>loss</th><th class='n'>perplexity</th>");
    buf_addf(g->b, "%s</tr></thead><tbody>\n",
             bpb->count > 0 ? "<th class='n'>bits per byte</th>" : "");
    for (int i = v->count - 1; i >= 0 && i >= v->count - EVAL_ROWS; i--) {
        const struct hist_point *p = &v->point[i];
        double loss = p->n > 0 ? p->mean : NAN;
        bool best = p->first <= v->best_step && v->best_step <= p->last;
        buf_addf(g->b, "<tr%s><td>%" PRId64 "%s</td>", best ? " class='top'" : "", p->last,
                 best ? " (best)" : "");
        buf_addf(g->b, "<td class='n'>%.4f</td><td class='n'>%.2f</td>", loss,
                 log_perplexity(loss));
        if (bpb->count > 0) {
            const struct hist_point *q = NULL;
            for (int j = bpb->count - 1; j >= 0 && q == NULL; j--)
                if (bpb->point[j].last == p->last && bpb->point[j].n > 0)
                    q = &bpb->point[j];
            if (q != NULL)
                buf_addf(g->b, "<td class='n'>%.4f</td>", q->mean);
            else
                buf_add(g->b, "<td></td>");
        }
        buf_add(g->b, "</tr>\n");
    }
    buf_add(g->b, "</tbody></table></section>\n");
}

static void add_event_table(struct page *g)
{
    int shown = 0;
    buf_add(g->b, "<section class='card'><h2>Latest events</h2><table><thead><tr><th>step</th>"
                  "<th>event</th><th></th></tr></thead><tbody>\n");
    for (int i = g->h->n_events - 1; i >= 0 && shown < EVENT_ROWS; i--, shown++) {
        const struct hist_event *ev = &g->h->event[i];
        buf_addf(g->b, "<tr><td>%" PRId64 "</td><td>%s</td><td>", ev->step, event_name(ev->kind));
        add_html(g->b, ev->text);
        buf_add(g->b, "</td></tr>\n");
    }
    buf_add(g->b, "</tbody></table></section>\n");
}

static void add_fact(struct page *g, const char *name, const char *text)
{
    if (text == NULL || text[0] == '\0')
        return;
    buf_addf(g->b, "<details class='card' open><summary>%s</summary><pre>", name);
    add_html(g->b, text);
    buf_add(g->b, "</pre></details>\n");
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void find_x_range(struct page *g)
{
    const struct series *loss = &g->h->main[HIST_LOSS], *val = &g->h->main[HIST_VAL];
    double first = INFINITY, last = 0;
    const struct series *const both[] = {loss, val};
    for (int k = 0; k < countof(both); k++)
        for (int i = 0; i < both[k]->count; i++) {
            first = fmin(first, (double)both[k]->point[i].first);
            last = fmax(last, (double)both[k]->point[i].last);
        }
    g->x_max = last > 0 ? last : 1;
    g->x_min = first < 0.2 * g->x_max || first >= g->x_max ? 0 : first;
}

static int page_init(struct page *g, struct err *e)
{
    /* The largest user of `all` is a panel of MAX_LINES extras. */
    size_t all = (size_t)MAX_LINES * EXTRA_POINTS;
    if (all < 4 * MAIN_POINTS) /* loss and validation, both ends of each */
        all = 4 * MAIN_POINTS;
    TRY(mem_array((void **)&g->p, MAIN_POINTS, sizeof *g->p, e));
    TRY(mem_array((void **)&g->low, MAIN_POINTS, sizeof *g->low, e));
    TRY(mem_array((void **)&g->high, MAIN_POINTS, sizeof *g->high, e));
    TRY(mem_array((void **)&g->all, all, sizeof *g->all, e));
    TRY(mem_array((void **)&g->scratch, all, sizeof *g->scratch, e));
    TRY(mem_array((void **)&g->done, (size_t)g->h->n_extra, sizeof *g->done, e));
    find_x_range(g);
    return ST_OK;
}

int report_html(struct buf *out, const struct history *h, const struct report_facts *f,
                struct err *e)
{
    struct page g = {.b = out, .h = h, .f = f};
    int st = page_init(&g, e);
    if (st == ST_OK) {
        add_header(&g);
        add_tiles(&g);
        add_loss(&g);
        add_panels(&g);
        buf_add(out, "<div class='two'>\n");
        add_summary(&g);
        add_evals(&g);
        buf_add(out, "</div>\n");
        add_event_table(&g);
        add_fact(&g, "Model", f->model);
        add_fact(&g, "Configuration", f->config);
        add_fact(&g, "Machine", f->machine);
        buf_add(out, "</main></body></html>\n");
        st = buf_check(out, e);
    }
    free(g.p);
    free(g.low);
    free(g.high);
    free(g.all);
    free(g.scratch);
    free(g.done);
    return st;
}

int report_from_run(const char *run_dir, const struct report_facts *f, struct err *e)
{
    char from[4096], to[4096];
    if (snprintf(from, sizeof from, "%s/metrics.jsonl", run_dir) >= (int)sizeof from ||
        snprintf(to, sizeof to, "%s/report.html", run_dir) >= (int)sizeof to)
        return err_set(e, ST_INVALID, "path too long: %.200s...", run_dir);
    if (!file_exists(from)) {
        err_set(e, ST_INVALID, "%s does not exist", from);
        return err_hint(e, "give the folder a training run wrote to");
    }
    struct history *h;
    TRY(mem_array((void **)&h, 1, sizeof *h, e));
    struct buf html;
    buf_init(&html, 0);
    int64_t ignored;
    int st = history_init(h, e);
    if (st == ST_OK) {
        TRY_OUT(history_load(h, from, &ignored, e));
        TRY_OUT(report_html(&html, h, f, e));
        TRY_OUT(file_write_atomic(to, html.text, html.len, e));
    }
out:
    buf_release(&html);
    history_release(h);
    free(h);
    return st;
}
