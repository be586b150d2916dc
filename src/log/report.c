/* The HTML report of one run; see report.h. The page is written in one pass, top to bottom: header,
 * key numbers, loss, panels, tables, texts. */
#include "log/report_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_GROUPS = 60, MAX_LINES = 128, EVAL_ROWS = 12, EVENT_ROWS = 40, TAIL_POINTS = 10, REFRESH = 10 };

/* One run on the page. */
struct run_page {
    struct page page;
    const struct history *h;
    const struct report_facts *f;
    struct time_unit unit;
    bool *done;          /* extras that have their panel */
    double x_min, x_max; /* steps */
};

/* ---- header and key numbers ------------------------------------------------------------------ */

static bool is_running(const struct report_facts *f) { return f->status == NULL || strcmp(f->status, "running") == 0; }

static void add_header(struct run_page *r)
{
    struct buf *b = r->page.b;
    const char *title = r->f->title != NULL && r->f->title[0] ? r->f->title : "Training run";
    const char *status = r->f->status != NULL ? r->f->status : "running";
    bool running = is_running(r->f);
    char when[64] = "";
    time_t now = (time_t)time_wall();
    struct tm tm;
    if (localtime_r(&now, &tm) != NULL)
        strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &tm);
    page_begin(&r->page, title, running ? REFRESH : 0);
    buf_add(b, "<p class='sub'><span class='badge ");
    add_html(b, status);
    buf_add(b, "'>");
    add_html(b, status);
    buf_addf(b, "</span>step %" PRId64, r->h->last_step);
    if (r->f->total_steps > 0)
        buf_addf(b, " of %" PRId64, r->f->total_steps);
    buf_addf(b, ", written %s", when);
    if (running)
        buf_addf(b, "; loads itself again every %d seconds", REFRESH);
    buf_add(b, "</p>\n");
}

static void add_tile(struct run_page *r, const char *value, const char *label)
{
    buf_addf(r->page.b, "<div class='card'><b>%s</b><span>%s</span></div>\n", value, label);
}

/* Three digits, so that it fits a tile. */
static const char *short_bytes(double bytes, char *out, size_t size)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int i = 0;
    for (; bytes >= 1000 && i < countof(unit) - 1; i++)
        bytes /= 1024;
    snprintf(out, size, "%.*f %s", bytes < 9.95 && i > 0 ? 1 : 0, bytes, unit[i]);
    return out;
}

static void add_tiles(struct run_page *r)
{
    const struct series *m = r->h->main;
    char text[64];
    buf_add(r->page.b, "<div class='tiles'>\n");
    if (m[HIST_LOSS].count > 0)
        add_tile(r, page_number(m[HIST_LOSS].last, text, sizeof text), "last training loss");
    if (m[HIST_VAL].count > 0)
        add_tile(r, page_number(m[HIST_VAL].best, text, sizeof text), "best validation");
    if (m[HIST_BPB].count > 0)
        add_tile(r, page_number(m[HIST_BPB].best, text, sizeof text), "best bits per byte");
    add_tile(r, short_count((double)r->h->tokens, text, sizeof text), "tokens seen");
    if (m[HIST_SPEED].count > 0)
        add_tile(r, short_count(series_mean(&m[HIST_SPEED]), text, sizeof text), "tokens/s");
    if (m[HIST_MFU].count > 0) {
        snprintf(text, sizeof text, "%.1f%%", series_mean(&m[HIST_MFU]));
        add_tile(r, text, "of peak (MFU)");
    }
    if (r->f->memory_bytes > 0)
        add_tile(r, short_bytes((double)r->f->memory_bytes, text, sizeof text), "memory planned");
    add_tile(r, human_time(r->h->elapsed, text, sizeof text), "training time");
    buf_add(r->page.b, "</div>\n");
}

/* ---- the loss, over each x axis -------------------------------------------------------------- */

static struct x_axis by_step(const struct run_page *r) { return x_axis_of(X_STEP, r->h, r->unit); }

static void add_events(struct run_page *r, const struct chart *c, const struct x_axis *x, bool checkpoints)
{
    char title[256];
    for (int i = 0; i < r->h->n_events; i++) {
        const struct hist_event *ev = &r->h->event[i];
        double at = x_of(x, (double)ev->step);
        if (ev->kind == LOG_START || at < c->x_min || at > c->x_max)
            continue;
        snprintf(title, sizeof title, "%s at step %" PRId64 "%s%s", event_name(ev->kind), ev->step,
                 ev->text[0] ? ": " : "", ev->text);
        if (ev->kind != LOG_CHECKPOINT)
            chart_rule(r->page.b, c, at, ev->kind == LOG_NONFINITE ? "bad" : "", title);
        else if (checkpoints)
            chart_mark(r->page.b, c, at, title);
    }
}

static void add_validation(struct run_page *r, const struct chart *c, const struct x_axis *x)
{
    const struct series *v = &r->h->main[HIST_VAL];
    struct page *g = &r->page;
    char title[128];
    int n = points_of(v, x, g->p);
    chart_line(g->b, c, g->p, n, "val", "", NULL);
    for (int i = 0; i < n && n <= 120; i++) {
        snprintf(title, sizeof title, "validation %.4f at step %" PRId64, g->p[i].y, v->point[i].last);
        chart_dot(g->b, c, g->p[i], "vdot", n > 50 ? "stroke-width:4" : "", title);
    }
    if (n > 1 && isfinite(v->best)) {
        struct xy best = {x_of(x, (double)v->best_step), v->best};
        snprintf(title, sizeof title, "best validation %.4f at step %" PRId64, v->best, v->best_step);
        chart_dot(g->b, c, best, "best", "", NULL);
        chart_dot(g->b, c, best, "hole", "", title);
    }
}

static void draw_curves(struct run_page *r, const struct chart *c, const struct x_axis *x)
{
    struct page *g = &r->page;
    const struct series *s = &r->h->main[HIST_LOSS];
    add_events(r, c, x, true);
    int n = points_of(s, x, g->p);
    if (s->stride > 1) {
        band_of(s, x, g->low, g->high);
        chart_band(g->b, c, g->low, g->high, n, "band");
    }
    bool smoothed = n >= 80;
    chart_line(g->b, c, g->p, n, smoothed ? "raw" : "smooth", "", NULL);
    if (smoothed) {
        smooth(g->p, n, g->low);
        chart_line(g->b, c, g->low, n, "smooth", "", NULL);
    }
    add_validation(r, c, x);
}

/* The points of the range that lie at or behind x_min move to the front; how many there are. */
static int keep_tail(struct xy *p, int n, double x_min)
{
    int kept = 0;
    for (int i = 0; i < n; i++)
        if (p[i].x >= x_min)
            p[kept++] = p[i];
    return kept;
}

/* The second half by itself: where a run is decided, the fall of the first steps leaves no room on
 * the axis. */
static void draw_tail(struct run_page *r, const struct x_axis *x, int n)
{
    struct page *g = &r->page;
    struct chart c = {.height = 340, .small = true, .whole_x = x->by == NULL, .label = "Loss, second half"};
    c.x_max = x_of(x, r->x_max);
    c.x_min = x_of(x, r->x_max / 2);
    n = keep_tail(g->all, n, c.x_min);
    if (n < TAIL_POINTS || !(c.x_max > c.x_min))
        return;
    chart_fit(&c, g->all, n, g->scratch, false);
    buf_add(g->b, "<div><h3>second half, enlarged</h3>");
    chart_begin(g->b, &c, g->next_id++);
    draw_curves(r, &c, x);
    chart_end(g->b);
    buf_add(g->b, "</div>");
}

static void draw_loss(struct run_page *r, enum x_kind kind)
{
    struct page *g = &r->page;
    const struct series *s = &r->h->main[HIST_LOSS];
    struct x_axis x = x_axis_of(kind, r->h, r->unit);
    struct chart c = {.height = 340, .log_x = kind == X_LOG, .whole_x = x.by == NULL, .label = "Loss, whole run"};
    int n = add_range(s, &x, g->all);
    n += add_range(&r->h->main[HIST_VAL], &x, g->all + n);
    chart_fit(&c, g->all, n, g->scratch, false);
    c.x_min = x_of(&x, r->x_min), c.x_max = x_of(&x, r->x_max);
    if (c.log_x && s->count > 0) /* decades before the first point of a thinned-out run are empty */
        c.x_min = fmax(1, 0.5 * ((double)s->point[0].first + (double)s->point[0].last));
    bool wide = r->h->last_step < 2 * TAIL_POINTS; /* no second half to speak of */
    const char *unit = kind == X_TIME ? r->unit.name : kind == X_TOKENS ? "tokens" : "step";
    buf_addf(g->b, "<div class='by-%s'><div class='%s'><div><h3>%s, by %s%s</h3>", x_name(kind), wide ? "wide" : "pair",
             wide ? "loss" : "whole run", kind == X_TIME ? "time in " : "", unit);
    chart_begin(g->b, &c, g->next_id++);
    draw_curves(r, &c, &x);
    chart_end(g->b);
    buf_add(g->b, "</div>");
    if (!wide)
        draw_tail(r, &x, n);
    buf_add(g->b, "</div></div>\n");
}

static void add_loss(struct run_page *r)
{
    struct buf *b = r->page.b;
    const struct series *s = &r->h->main[HIST_LOSS];
    buf_add(b, "<section class='card'><div class='head'><h2>Loss</h2>");
    page_x_choice(&r->page);
    buf_add(b, "<span class='legend'>");
    if (s->count >= 80)
        buf_addf(b,
                 "<span><i style='background:var(--c0);opacity:.38'></i>training, %s</span>"
                 "<span><i style='background:var(--c0)'></i>training, smoothed</span>",
                 s->stride > 1 ? "range and mean" : "each step");
    else
        buf_add(b, "<span><i style='background:var(--c0)'></i>training</span>");
    if (r->h->main[HIST_VAL].count > 0)
        buf_add(b, "<span><i style='background:var(--c1)'></i>validation</span>");
    buf_add(b, "</span></div>\n");
    for (int k = 0; k < X_KINDS; k++)
        draw_loss(r, (enum x_kind)k);
    buf_add(b, "<p class='note'>y: nats per token.");
    if (s->count == 0)
        buf_add(b, " No step has been logged yet.");
    if (r->h->n_checkpoints > 0)
        buf_add(b, " Short bars on the axis: checkpoints.");
    if (r->h->n_nonfinite > 0)
        buf_addf(b, " Losses that were not finite (%" PRId64 ") leave gaps.", r->h->n_nonfinite);
    buf_add(b, "</p></section>\n");
}

/* ---- panels ---------------------------------------------------------------------------------- */

static void open_panel(struct run_page *r, const char *title, size_t title_len)
{
    char name[MAX_TAG + 1];
    snprintf(name, sizeof name, "%.*s", (int)title_len, title);
    buf_add(r->page.b, "<section class='card'><div class='head'><h3>");
    add_html(r->page.b, name);
    buf_add(r->page.b, "</h3><span class='legend'>");
}

static struct chart panel_chart(const struct run_page *r, const char *label)
{
    return (struct chart){
        .height = 180, .small = true, .whole_x = true, .label = label, .x_min = r->x_min, .x_max = r->x_max};
}

static double highest_of(const struct series *s)
{
    double high = -INFINITY;
    for (int i = 0; i < s->count; i++)
        if (s->point[i].n > 0)
            high = fmax(high, s->point[i].high);
    return high;
}

static void add_panel(struct run_page *r, const struct series *s, const char *title, const char *unit)
{
    char text[64];
    struct x_axis x = by_step(r);
    if (s->count == 0)
        return;
    struct chart c = panel_chart(r, title);
    int n = add_range(s, &x, r->page.all);
    chart_fit(&c, r->page.all, n, r->page.scratch, true);
    open_panel(r, title, strlen(title));
    if (highest_of(s) > c.y_max) /* do not hide what the axis leaves out */
        buf_addf(r->page.b, "<span>highest %s%s</span>", page_number(highest_of(s), text, sizeof text), unit);
    buf_addf(r->page.b, "<span>last %s%s</span></span></div>\n", page_number(s->last, text, sizeof text), unit);
    chart_begin(r->page.b, &c, r->page.next_id++);
    add_events(r, &c, &x, false);
    n = points_of(s, &x, r->page.p);
    if (s->stride > 1) {
        band_of(s, &x, r->page.low, r->page.high);
        chart_band(r->page.b, &c, r->page.low, r->page.high, n, "band");
    }
    chart_line(r->page.b, &c, r->page.p, n, "", "stroke:var(--c0)", NULL);
    chart_end(r->page.b);
    buf_add(r->page.b, "</section>\n");
}

/* ---- extras: one panel for all tags with the same beginning ---------------------------------- */

static size_t group_length(const char *tag)
{
    const char *slash = strrchr(tag, '/');
    return slash == NULL || slash == tag ? strlen(tag) : (size_t)(slash - tag);
}

static const char *line_name(const struct series *s, size_t group)
{
    return s->tag[group] == '/' ? s->tag + group + 1 : s->tag;
}

static void group_legend(struct run_page *r, const int *member, int n, size_t group)
{
    char colour[64], text[64];
    if (n == 1) {
        buf_addf(r->page.b, "<span>last %s</span>", page_number(r->h->extra[member[0]].last, text, sizeof text));
    } else if (n > FEW_LINES) {
        buf_add(r->page.b, "<span>");
        add_html(r->page.b, line_name(&r->h->extra[member[0]], group));
        buf_add(r->page.b, " <i class='ramp' style='margin:0 4px;background:linear-gradient(90deg");
        for (int i = 0; i < 5; i++) {
            line_colour(i * (n - 1) / 4, n, colour, sizeof colour);
            buf_addf(r->page.b, ",%s", colour);
        }
        buf_add(r->page.b, ")'></i> ");
        add_html(r->page.b, line_name(&r->h->extra[member[n - 1]], group));
        buf_addf(r->page.b, " (%d lines)</span>", n);
    } else {
        for (int i = 0; i < n; i++) {
            line_colour(i, n, colour, sizeof colour);
            buf_addf(r->page.b, "<span><i style='background:%s'></i>", colour);
            add_html(r->page.b, line_name(&r->h->extra[member[i]], group));
            buf_add(r->page.b, "</span>");
        }
    }
    buf_add(r->page.b, "</span></div>\n");
}

static void add_group(struct run_page *r, int first)
{
    const char *tag = r->h->extra[first].tag;
    size_t len = group_length(tag);
    struct x_axis x = by_step(r);
    int member[MAX_LINES], n = 0, points = 0, left_out = 0;
    for (int i = first; i < r->h->n_extra; i++) {
        const struct series *s = &r->h->extra[i];
        if (r->done[i] || group_length(s->tag) != len || strncmp(s->tag, tag, len) != 0)
            continue;
        r->done[i] = true;
        if (n == MAX_LINES)
            left_out++;
        else if (s->count > 0)
            points += points_of(s, &x, r->page.all + points), member[n++] = i;
    }
    if (n == 0)
        return;
    open_panel(r, tag, len);
    group_legend(r, member, n, len);
    struct chart c = panel_chart(r, tag);
    chart_fit(&c, r->page.all, points, r->page.scratch, true);
    chart_begin(r->page.b, &c, r->page.next_id++);
    add_events(r, &c, &x, false);
    for (int i = 0; i < n; i++) {
        const struct series *s = &r->h->extra[member[i]];
        char colour[64], style[96];
        line_colour(i, n, colour, sizeof colour);
        snprintf(style, sizeof style, "stroke:%s%s", colour, n > FEW_LINES ? ";stroke-width:1.2" : "");
        chart_line(r->page.b, &c, r->page.p, points_of(s, &x, r->page.p), "", style, line_name(s, len));
    }
    chart_end(r->page.b);
    if (left_out > 0)
        buf_addf(r->page.b, "<p class='note'>%d more lines are in metrics.jsonl.</p>", left_out);
    buf_add(r->page.b, "</section>\n");
}

static void add_panels(struct run_page *r)
{
    const struct series *m = r->h->main;
    buf_add(r->page.b, "<div class='panels'>\n");
    add_panel(r, &m[HIST_LR], "Learning rate", "");
    add_panel(r, &m[HIST_NORM], "Gradient norm", "");
    add_panel(r, &m[HIST_SPEED], "Tokens per second", "");
    add_panel(r, &m[HIST_MFU], "Percent of peak FLOP/s (MFU)", "%");
    add_panel(r, &m[HIST_BPB], "Bits per byte, validation", "");
    int groups = 0, left_out = 0;
    for (int i = 0; i < r->h->n_extra; i++) {
        if (r->done[i])
            continue;
        if (groups++ < MAX_GROUPS)
            add_group(r, i);
        else
            left_out++;
    }
    buf_add(r->page.b, "</div>\n");
    if (left_out > 0)
        buf_addf(r->page.b, "<p class='note'>%d more metrics are in metrics.jsonl.</p>\n", left_out);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void add_row(struct run_page *r, const char *name, const char *value)
{
    buf_addf(r->page.b, "<tr><th>%s</th><td class='n'>%s</td></tr>\n", name, value);
}

static void add_count(struct run_page *r, const char *name, int64_t n)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRId64, n);
    add_row(r, name, text);
}

static void add_best(struct run_page *r, const struct series *s, const char *name)
{
    char text[96];
    if (s->count == 0 || !isfinite(s->best))
        return;
    snprintf(text, sizeof text, "%.4f at step %" PRId64, s->best, s->best_step);
    add_row(r, name, text);
}

static void add_summary(struct run_page *r)
{
    const struct series *m = r->h->main;
    char text[64];
    buf_add(r->page.b, "<section class='card'><h2>Summary</h2><table><tbody>\n");
    add_count(r, "steps", r->h->last_step);
    add_count(r, "tokens", r->h->tokens);
    add_row(r, "training time", human_time(r->h->elapsed, text, sizeof text));
    if (m[HIST_LOSS].count > 0)
        add_row(r, "last training loss", page_number(m[HIST_LOSS].last, text, sizeof text));
    add_best(r, &m[HIST_LOSS], "lowest training loss");
    if (m[HIST_VAL].count > 0)
        add_row(r, "last validation loss", page_number(m[HIST_VAL].last, text, sizeof text));
    add_best(r, &m[HIST_VAL], "best validation");
    add_best(r, &m[HIST_BPB], "best bits per byte");
    if (m[HIST_SPEED].count > 0)
        add_row(r, "mean tokens per second", page_number(series_mean(&m[HIST_SPEED]), text, sizeof text));
    add_count(r, "checkpoints", r->h->n_checkpoints);
    add_count(r, "skipped updates", r->h->n_skipped);
    add_count(r, "losses not finite", r->h->n_nonfinite);
    buf_add(r->page.b, "</tbody></table></section>\n");
}

static void add_evals(struct run_page *r)
{
    const struct series *v = &r->h->main[HIST_VAL], *bpb = &r->h->main[HIST_BPB];
    if (v->count == 0)
        return;
    buf_add(r->page.b, "<section class='card'><h2>Latest evaluations</h2><table><thead><tr><th>step</th>"
                       "<th class='n'>loss</th><th class='n'>perplexity</th>");
    buf_addf(r->page.b, "%s</tr></thead><tbody>\n", bpb->count > 0 ? "<th class='n'>bits per byte</th>" : "");
    for (int i = v->count - 1; i >= 0 && i >= v->count - EVAL_ROWS; i--) {
        const struct hist_point *p = &v->point[i];
        double loss = p->n > 0 ? p->mean : NAN;
        bool best = p->first <= v->best_step && v->best_step <= p->last;
        buf_addf(r->page.b, "<tr%s><td>%" PRId64 "%s</td>", best ? " class='top'" : "", p->last, best ? " (best)" : "");
        buf_addf(r->page.b, "<td class='n'>%.4f</td><td class='n'>%.2f</td>", loss, log_perplexity(loss));
        if (bpb->count > 0) {
            const struct hist_point *q = NULL;
            for (int j = bpb->count - 1; j >= 0 && q == NULL; j--)
                if (bpb->point[j].last == p->last && bpb->point[j].n > 0)
                    q = &bpb->point[j];
            if (q != NULL)
                buf_addf(r->page.b, "<td class='n'>%.4f</td>", q->mean);
            else
                buf_add(r->page.b, "<td></td>");
        }
        buf_add(r->page.b, "</tr>\n");
    }
    buf_add(r->page.b, "</tbody></table></section>\n");
}

static void add_event_table(struct run_page *r)
{
    int shown = 0;
    buf_add(r->page.b, "<section class='card'><h2>Latest events</h2><table><thead><tr><th>step</th>"
                       "<th>event</th><th></th></tr></thead><tbody>\n");
    for (int i = r->h->n_events - 1; i >= 0 && shown < EVENT_ROWS; i--, shown++) {
        const struct hist_event *ev = &r->h->event[i];
        buf_addf(r->page.b, "<tr><td>%" PRId64 "</td><td>%s</td><td>", ev->step, event_name(ev->kind));
        add_html(r->page.b, ev->text);
        buf_add(r->page.b, "</td></tr>\n");
    }
    buf_add(r->page.b, "</tbody></table></section>\n");
}

/* ---- texts ----------------------------------------------------------------------------------- */

static void add_samples(struct run_page *r)
{
    struct buf *b = r->page.b;
    if (r->h->n_samples == 0)
        return;
    buf_add(b, "<section class='card'><h2>What the model writes</h2>\n");
    for (int i = r->h->n_samples - 1; i >= 0; i--) {
        buf_addf(b, "<details%s><summary>step %" PRId64 "</summary><pre class='wrap'>",
                 i == r->h->n_samples - 1 ? " open" : "", r->h->sample[i].step);
        add_html(b, r->h->sample[i].text);
        buf_add(b, "</pre></details>\n");
    }
    buf_add(b, "</section>\n");
}

static void add_command(struct run_page *r)
{
    if (r->f->command == NULL || r->f->command[0] == '\0')
        return;
    buf_add(r->page.b, "<section class='card'><h2>Command line</h2><pre class='wrap'>");
    add_html(r->page.b, r->f->command);
    buf_add(r->page.b, "</pre></section>\n");
}

/* ---- the whole ------------------------------------------------------------------------------- */

static void find_x_range(struct run_page *r)
{
    const struct series *loss = &r->h->main[HIST_LOSS], *val = &r->h->main[HIST_VAL];
    double first = INFINITY, last = 0;
    const struct series *const both[] = {loss, val};
    for (int k = 0; k < countof(both); k++)
        for (int i = 0; i < both[k]->count; i++) {
            first = fmin(first, (double)both[k]->point[i].first);
            last = fmax(last, (double)both[k]->point[i].last);
        }
    r->x_max = last > 0 ? last : 1;
    r->x_min = first < 0.2 * r->x_max || first >= r->x_max ? 0 : first;
}

static void add_all(struct run_page *r)
{
    struct page *g = &r->page;
    add_header(r);
    add_tiles(r);
    add_loss(r);
    add_samples(r);
    add_panels(r);
    buf_add(g->b, "<div class='two'>\n");
    add_summary(r);
    add_evals(r);
    buf_add(g->b, "</div>\n");
    add_event_table(r);
    add_command(r);
    page_pre(g, "Machine and memory", r->f->machine, true);
    page_pre(g, "Model", r->f->model, true);
    page_pre(g, "Configuration", r->f->config, false);
    page_end(g);
}

int report_html(struct buf *out, const struct history *h, const struct report_facts *f, struct err *e)
{
    struct run_page r = {.h = h, .f = f, .unit = time_unit_of(h->elapsed)};
    /* The largest user of `all` is a panel of MAX_LINES extras, or loss and validation with both
     * ends of each. */
    int st = page_init(&r.page, out, (size_t)max_i64(MAX_LINES * EXTRA_POINTS, 4 * MAIN_POINTS), e);
    if (st == ST_OK)
        st = mem_array((void **)&r.done, (size_t)h->n_extra, sizeof *r.done, e);
    if (st == ST_OK) {
        find_x_range(&r);
        add_all(&r);
        st = buf_check(out, e);
    }
    free(r.done);
    page_release(&r.page);
    return st;
}
