/* The frame of a report: style sheet, head, choice of the x axis, and series as points; see
 * report_int.h. */
#include "log/report_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Two halves, as compilers need not take longer strings. */
static const char style_page[] =
    ":root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--ink:#1d1f23;--dim:#60656d;"
    "--line:#e6e7e9;--axis:#8d929a;--c0:#0b6cb4;--c1:#cf5200;--c2:#00805a;--c3:#ad4a8a;"
    "--c4:#8a6a00;--c5:#5a57d0;--bad:#c62828;--good:#1b7f3b}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#131417;--card:#1c1e22;--ink:#e6e7ea;"
    "--dim:#9a9fa8;--line:#2d3036;--axis:#6f757e;--c0:#5eb0ef;--c1:#ff9a4d;--c2:#3fca9b;"
    "--c3:#e58fc6;--c4:#dcb83f;--c5:#a5a2ff;--bad:#ff6b6b;--good:#5fd38d}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\n"
    "main{max-width:1180px;margin:0 auto;padding:28px 20px 48px}\n"
    "h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}"
    "h2{font-size:17px;margin:0}h3{font-size:14px;margin:0;overflow-wrap:anywhere}\n"
    ".sub{color:var(--dim);margin:6px 0 20px}.badge{display:inline-block;font-size:12px;"
    "font-weight:600;border:1px solid currentColor;border-radius:99px;padding:0 10px;"
    "margin-right:8px;color:var(--c0)}.finished{color:var(--good)}.stopped,.unfinished{color:var(--"
    "c1)}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px;"
    "margin-bottom:16px}.card{background:var(--card);border:1px solid var(--line);"
    "border-radius:10px;padding:14px 16px;margin-bottom:16px;min-width:0}\n"
    ".tiles .card{margin:0}.tiles "
    "b{display:block;font-size:21px;line-height:1.3;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}.tiles span{color:var(--dim);font-size:12.5px}\n"
    ".panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));"
    "gap:16px;margin-bottom:16px}.panels .card{margin:0}\n"
    ".pair{display:grid;grid-template-columns:3fr 2fr;gap:8px 20px}.pair>div{min-width:0}"
    ".pair h3,.wide h3{color:var(--dim);font-weight:500;font-size:12.5px;margin:4px 0 8px}\n"
    ".head{display:flex;flex-wrap:wrap;gap:4px 18px;align-items:baseline;margin-bottom:8px}"
    ".legend{margin-left:auto;display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--dim);"
    "font-size:12.5px}.legend i,th i{display:inline-block;width:18px;height:3px;border-radius:2px;"
    "vertical-align:middle;margin-right:6px}.legend .ramp{width:54px;height:6px}\n"
    ".note{color:var(--dim);font-size:12.5px;margin:6px 0 0}\n";
static const char style_chart[] =
    ".chart{position:relative;margin:6px 16px 26px 60px}.chart span{position:absolute;"
    "color:var(--dim);font-size:11.5px;line-height:1;white-space:nowrap;font-variant-numeric:"
    "tabular-nums}"
    ".chart .y{right:100%;margin-right:7px;transform:translateY(-50%)}.chart .x{top:100%;"
    "margin-top:7px;transform:translateX(-50%)}\n"
    "svg{position:absolute;display:block;width:100%;height:100%;overflow:visible}"
    "svg path{vector-effect:non-scaling-stroke}.grid{stroke:var(--line);fill:none}"
    ".axis{stroke:var(--axis);fill:none}\n"
    ".line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}"
    ".raw{stroke:var(--c0);stroke-width:1;opacity:.38}.band{fill:var(--c0);opacity:.17}"
    ".smooth{stroke:var(--c0);stroke-width:2.1}.val{stroke:var(--c1);stroke-width:1.5}"
    ".dot{fill:none;stroke-linecap:round;stroke-width:6}.vdot{stroke:var(--c1)}.best{stroke:"
    "var(--c1);stroke-width:11}.hole{stroke:var(--card);stroke-width:6}\n"
    ".rule{fill:none;stroke:var(--dim);stroke-dasharray:4 4}.rule.bad{stroke:var(--bad);"
    "stroke-dasharray:none;opacity:.75}.mark{fill:none;stroke:var(--axis);stroke-width:3}\n"
    ".seg{display:inline-flex;font-size:12.5px}.seg a{color:var(--dim);text-decoration:none;"
    "padding:0 9px;border:1px solid var(--line);border-left-width:0}.seg a:first-child{"
    "border-left-width:1px;border-radius:6px 0 0 6px}.seg a:last-child{border-radius:0 6px 6px 0}"
    ".seg a:hover{color:var(--ink)}.seg a:focus-visible{outline:2px solid var(--c0)}\n"
    ".pick{position:fixed;top:0}.by-log,.by-tokens,.by-time{display:none}"
    "#x-log:target~main .by-step,#x-tokens:target~main .by-step,#x-time:target~main .by-step{"
    "display:none}#x-log:target~main .by-log,#x-tokens:target~main .by-tokens,"
    "#x-time:target~main .by-time{display:block}\n"
    "main a[href='#x-step'],#x-log:target~main a[href='#x-log'],#x-tokens:target~main "
    "a[href='#x-tokens'],#x-time:target~main a[href='#x-time']{color:var(--ink);font-weight:600;"
    "background:var(--bg)}#x-log:target~main a[href='#x-step'],#x-tokens:target~main "
    "a[href='#x-step'],#x-time:target~main a[href='#x-step']{color:var(--dim);font-weight:400;"
    "background:none}\n"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{"
    "text-align:left;padding:4px 14px 4px 0;border-top:1px solid var(--line);"
    "overflow-wrap:anywhere;vertical-align:top}th{font-weight:500;color:var(--dim)}"
    "thead th{border-top:0}td.n,th.n{text-align:right}tr.top td{font-weight:600}"
    ".scroll{overflow-x:auto}.scroll th,.scroll td{overflow-wrap:normal}.scroll tbody "
    "th{white-space:nowrap}\n"
    ".two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));"
    "gap:0 16px}h2+table,h2+.scroll{margin-top:8px}\n"
    "pre{margin:10px 0 0;font:12.5px/1.5 ui-monospace,SFMono-Regular,Consolas,'DejaVu Sans Mono',"
    "monospace;white-space:pre;overflow:auto;max-height:480px}pre.wrap{white-space:pre-wrap;"
    "overflow-wrap:anywhere}summary{cursor:pointer;font-weight:600}\n"
    "@media(max-width:760px){main{padding:18px 12px "
    "32px}.card{padding:12px}.pair{grid-template-columns:1fr}"
    ".legend{margin-left:0}.tiles{grid-template-columns:repeat(auto-fit,minmax(104px,1fr));gap:8px}"
    ".tiles b{font-size:17px}.chart{max-height:240px}.chart "
    ".odd{display:none}h1{font-size:22px}}\n";

/* ---- the x axis ------------------------------------------------------------------------------ */

struct time_unit time_unit_of(double longest)
{
    if (!(longest >= 300))
        return (struct time_unit){1, "seconds"};
    if (longest < 2 * 3600)
        return (struct time_unit){60, "minutes"};
    return longest < 4 * 86400 ? (struct time_unit){3600, "hours"} : (struct time_unit){86400, "days"};
}

struct x_axis x_axis_of(enum x_kind kind, const struct history *h, struct time_unit unit)
{
    struct x_axis a = {.kind = kind, .scale = 1};
    if (kind == X_TOKENS)
        a.by = &h->main[HIST_TOKENS];
    if (kind == X_TIME) {
        a.by = &h->main[HIST_TIME];
        a.scale = 1 / unit.seconds;
    }
    return a;
}

static double middle(const struct hist_point *p) { return 0.5 * ((double)p->first + (double)p->last); }

/* Between two points a straight line; before the first one from nothing at step 0, and behind the
 * last one on as before. */
double x_of(const struct x_axis *a, double step)
{
    if (a->by == NULL)
        return step;
    const struct series *s = a->by;
    if (s->count == 0)
        return 0;
    int low = 0, high = s->count - 1; /* the first point at or behind the step, or the last one */
    while (low < high) {
        int k = (low + high) / 2;
        if (middle(&s->point[k]) < step)
            low = k + 1;
        else
            high = k;
    }
    const struct hist_point none = {0}, *to = &s->point[low];
    const struct hist_point *from = low > 0 ? &s->point[low - 1] : &none;
    double x0 = middle(from), x1 = middle(to);
    double t = x1 > x0 ? (step - x0) / (x1 - x0) : 1;
    return a->scale * (from->mean + t * (to->mean - from->mean));
}

const char *x_name(enum x_kind kind)
{
    static const char *const names[X_KINDS] = {"step", "log", "tokens", "time"};
    return names[kind];
}

void page_x_choice(struct page *g)
{
    static const char *const text[X_KINDS] = {"step", "log step", "tokens", "time"};
    buf_add(g->b, "<nav class='seg' aria-label='x axis'>");
    for (int k = 0; k < X_KINDS; k++)
        buf_addf(g->b, "<a href='#x-%s'>%s</a>", x_name((enum x_kind)k), text[k]);
    buf_add(g->b, "</nav>");
}

/* ---- the page -------------------------------------------------------------------------------- */

int page_init(struct page *g, struct buf *b, size_t all, struct err *e)
{
    *g = (struct page){.b = b};
    TRY(mem_array((void **)&g->p, MAIN_POINTS, sizeof *g->p, e));
    TRY(mem_array((void **)&g->low, MAIN_POINTS, sizeof *g->low, e));
    TRY(mem_array((void **)&g->high, MAIN_POINTS, sizeof *g->high, e));
    TRY(mem_array((void **)&g->all, all, sizeof *g->all, e));
    return mem_array((void **)&g->scratch, all, sizeof *g->scratch, e);
}

void page_release(struct page *g)
{
    free(g->p);
    free(g->low);
    free(g->high);
    free(g->all);
    free(g->scratch);
    *g = (struct page){0};
}

void page_begin(struct page *g, const char *title, int refresh)
{
    struct buf *b = g->b;
    buf_add(b, "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
               "<meta name='viewport' content='width=device-width,initial-scale=1'>");
    if (refresh > 0)
        buf_addf(b, "<meta http-equiv='refresh' content='%d'>", refresh);
    buf_add(b, "<title>");
    add_html(b, title);
    buf_addf(b, "</title>\n<style>%s%s</style></head>\n<body>", style_page, style_chart);
    /* The choice of the x axis is the fragment of the address: it outlives a reload. */
    for (int k = 0; k < X_KINDS; k++)
        buf_addf(b, "<span class='pick' id='x-%s'></span>", x_name((enum x_kind)k));
    buf_add(b, "<main>\n<h1>");
    add_html(b, title);
    buf_add(b, "</h1>\n");
}

void page_end(struct page *g) { buf_add(g->b, "</main></body></html>\n"); }

void page_pre(struct page *g, const char *name, const char *text, bool open)
{
    if (text == NULL || text[0] == '\0')
        return;
    buf_addf(g->b, "<details class='card'%s><summary>%s</summary><pre>", open ? " open" : "", name);
    add_html(g->b, text);
    buf_add(g->b, "</pre></details>\n");
}

const char *page_number(double v, char *out, size_t size)
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

void line_colour(int i, int n, char *out, size_t size)
{
    static const int ramp[][3] = {{94, 79, 162}, {50, 136, 189}, {38, 166, 120}, {178, 171, 2}, {232, 93, 60}};
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

/* ---- points ---------------------------------------------------------------------------------- */

int points_of(const struct series *s, const struct x_axis *a, struct xy *out)
{
    for (int i = 0; i < s->count; i++) {
        const struct hist_point *p = &s->point[i];
        out[i] = (struct xy){x_of(a, middle(p)), p->n > 0 ? p->mean : NAN};
    }
    return s->count;
}

int band_of(const struct series *s, const struct x_axis *a, struct xy *low, struct xy *high)
{
    int n = points_of(s, a, low);
    for (int i = 0; i < n; i++) {
        high[i] = low[i];
        if (isfinite(low[i].y)) {
            low[i].y = s->point[i].low;
            high[i].y = s->point[i].high;
        }
    }
    return n;
}

int add_range(const struct series *s, const struct x_axis *a, struct xy *all)
{
    int n = band_of(s, a, all, all + s->count);
    return s->stride > 1 ? 2 * n : n; /* a series that is not thinned out has one value a point */
}

void smooth(const struct xy *p, int n, struct xy *out)
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

double series_mean(const struct series *s)
{
    double sum = 0, n = 0;
    for (int i = 0; i < s->count; i++) {
        sum += s->point[i].mean * s->point[i].n;
        n += s->point[i].n;
    }
    return n > 0 ? sum / n : NAN;
}
