/* Reports made from run folders: one run anew, or several side by side; see report.h. */
#include "log/report_int.h"

#include "config/config.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RUNS = 24, MAX_CONFIG = 1 << 20, TAIL_POINTS = 4 };

/* A run as its folder tells it. */
struct run {
    const char *name;  /* points into the path */
    char *config_text; /* config.ini; NULL: there is none */
    struct history *h;
    struct config cfg;
    bool has_cfg;
    struct err cfg_error; /* why not */
};

/* ---- reading --------------------------------------------------------------------------------- */

static int run_path(const char *dir, const char *file, char **out, struct err *e)
{
    *out = path_join(dir, file);
    return *out != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory");
}

static int read_metrics(struct run *r, const char *dir, struct err *e)
{
    char *path;
    int64_t ignored;
    TRY(run_path(dir, "metrics.jsonl", &path, e));
    int st = ST_OK;
    if (!file_exists(path)) {
        err_set(e, ST_INVALID, "%s does not exist", path);
        st = err_hint(e, "give the folder of a training run: what --run.dir named");
    }
    if (st == ST_OK)
        st = mem_array((void **)&r->h, 1, sizeof *r->h, e);
    if (st == ST_OK)
        st = history_init(r->h, e);
    if (st == ST_OK)
        st = history_load(r->h, path, &ignored, e);
    free(path);
    return st;
}

/* A config that is missing, or that another version wrote, leaves a gap on the page and is no
 * error. */
static int read_config(struct run *r, const char *dir, struct err *e)
{
    char *path;
    size_t n = 0;
    TRY(run_path(dir, "config.ini", &path, e));
    if (file_exists(path) && file_read(path, MAX_CONFIG, &r->config_text, &n, &r->cfg_error) == ST_OK) {
        r->has_cfg = config_init(&r->cfg, &r->cfg_error) == ST_OK &&
                     config_read_ini_text(&r->cfg, r->config_text, n, path, &r->cfg_error) == ST_OK;
    } else if (r->cfg_error.code == ST_OK) {
        err_set(&r->cfg_error, ST_INVALID, "there is no %s", path);
    }
    free(path);
    return ST_OK;
}

static const char *last_part(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    return path + n;
}

static int run_read(struct run *r, const char *dir, struct err *e)
{
    *r = (struct run){.name = last_part(dir)};
    TRY(read_metrics(r, dir, e));
    return read_config(r, dir, e);
}

static void run_release(struct run *r)
{
    if (r->h != NULL)
        history_release(r->h);
    free(r->h);
    free(r->config_text);
    config_release(&r->cfg);
    *r = (struct run){0};
}

static int64_t steps_of(const struct run *r)
{
    int64_t planned = r->h->facts.total_steps;
    return planned == 0 && r->has_cfg ? r->cfg.train.steps : planned;
}

static const char *status_of(const struct run *r)
{
    const struct history *h = r->h;
    if (steps_of(r) > 0 && h->last_step >= steps_of(r))
        return "finished";
    return h->n_events > 0 && h->event[h->n_events - 1].kind == LOG_STOP ? "stopped" : "unfinished";
}

/* ---- one run anew ---------------------------------------------------------------------------- */

int report_from_run(const char *run_dir, struct err *e)
{
    struct run r = {0};
    struct buf html;
    char *to = NULL, title[256];
    buf_init(&html, 0);
    int st = run_read(&r, run_dir, e);
    if (st == ST_OK)
        st = run_path(run_dir, "report.html", &to, e);
    if (st == ST_OK) {
        snprintf(title, sizeof title, "braid: %.200s", run_dir);
        const struct hist_facts *k = &r.h->facts;
        struct report_facts f = {.title = title,
                                 .command = k->command,
                                 .config = r.config_text,
                                 .model = k->model,
                                 .machine = k->machine,
                                 .status = status_of(&r),
                                 .total_steps = steps_of(&r),
                                 .memory_bytes = k->memory_bytes};
        st = report_html(&html, r.h, &f, e);
    }
    if (st == ST_OK)
        st = file_write_atomic(to, html.text, html.len, e);
    free(to);
    buf_release(&html);
    run_release(&r);
    return st;
}

/* ---- several runs: charts -------------------------------------------------------------------- */

struct comparison {
    struct page page;
    struct run run[MAX_RUNS];
    int n;
    struct time_unit unit;
};

static void run_style(const struct comparison *c, int i, char *out, size_t size)
{
    char colour[64];
    line_colour(i, c->n, colour, sizeof colour);
    snprintf(out, size, "stroke:%s", colour);
}

/* The smoothed line of a series; few points are drawn as they are, with dots. */
static int curve_of(struct comparison *c, const struct series *s, const struct x_axis *x, struct xy *out)
{
    int n = points_of(s, x, c->page.p);
    if (n < 80) {
        memcpy(out, c->page.p, (size_t)n * sizeof *out);
        return n;
    }
    smooth(c->page.p, n, out);
    return n;
}

/* All runs in one chart. from: where the x axis begins. False where too little would be seen. */
static bool draw_runs(struct comparison *c, enum hist_main what, enum x_kind kind, double from, struct chart *k)
{
    struct page *g = &c->page;
    int n_all = 0;
    k->x_min = INFINITY, k->x_max = -INFINITY;
    for (int i = 0; i < c->n; i++) {
        const struct history *h = c->run[i].h;
        struct x_axis x = x_axis_of(kind, h, c->unit);
        k->x_max = fmax(k->x_max, x_of(&x, (double)h->last_step));
        k->x_min = fmin(k->x_min, x_of(&x, from * (double)h->last_step));
    }
    for (int i = 0; i < c->n; i++) {
        struct x_axis x = x_axis_of(kind, c->run[i].h, c->unit);
        int n = curve_of(c, &c->run[i].h->main[what], &x, g->low);
        for (int j = 0; j < n; j++)
            if (g->low[j].x >= k->x_min)
                g->all[n_all++] = g->low[j];
    }
    if (n_all < (from > 0 ? TAIL_POINTS : 1) || !(k->x_max > k->x_min))
        return false;
    if (k->log_x)
        k->x_min = 1;
    chart_fit(k, g->all, n_all, g->scratch, what != HIST_LOSS && what != HIST_VAL);
    chart_begin(g->b, k, g->next_id++);
    for (int i = 0; i < c->n; i++) {
        struct x_axis x = x_axis_of(kind, c->run[i].h, c->unit);
        char style[96];
        run_style(c, i, style, sizeof style);
        int n = curve_of(c, &c->run[i].h->main[what], &x, g->low);
        chart_line(g->b, k, g->low, n, "", style, c->run[i].name);
        for (int j = 0; j < n && n <= 60; j++)
            chart_dot(g->b, k, g->low[j], "", style, NULL);
    }
    chart_end(g->b);
    return true;
}

static bool any_has(const struct comparison *c, enum hist_main what)
{
    for (int i = 0; i < c->n; i++)
        if (c->run[i].h->main[what].count > 0)
            return true;
    return false;
}

static void add_legend(struct comparison *c)
{
    char colour[64];
    buf_add(c->page.b, "<span class='legend'>");
    for (int i = 0; i < c->n; i++) {
        line_colour(i, c->n, colour, sizeof colour);
        buf_addf(c->page.b, "<span><i style='background:%s'></i>", colour);
        add_html(c->page.b, c->run[i].name);
        buf_add(c->page.b, "</span>");
    }
    buf_add(c->page.b, "</span></div>\n");
}

static void add_loss_chart(struct comparison *c, enum hist_main what, const char *title)
{
    struct buf *b = c->page.b;
    if (!any_has(c, what))
        return;
    buf_addf(b, "<section class='card'><div class='head'><h2>%s</h2>", title);
    page_x_choice(&c->page);
    add_legend(c);
    for (int k = 0; k < X_KINDS; k++) {
        enum x_kind kind = (enum x_kind)k;
        bool steps = kind == X_STEP || kind == X_LOG;
        struct chart whole = {.height = 340, .log_x = kind == X_LOG, .whole_x = steps, .label = title};
        struct chart tail = {.height = 340, .small = true, .whole_x = steps, .label = title};
        buf_addf(b, "<div class='by-%s'><div class='pair'><div><h3>whole runs, by %s%s</h3>", x_name(kind),
                 kind == X_TIME ? "time in " : "",
                 kind == X_TIME     ? c->unit.name
                 : kind == X_TOKENS ? "tokens"
                                    : "step");
        draw_runs(c, what, kind, 0, &whole);
        buf_add(b, "</div><div><h3>second half, enlarged</h3>");
        if (!draw_runs(c, what, kind == X_LOG ? X_STEP : kind, 0.5, &tail))
            buf_add(b, "<p class='note'>Too few points.</p>");
        buf_add(b, "</div></div></div>\n");
    }
    buf_add(b, "</section>\n");
}

static void add_panel(struct comparison *c, enum hist_main what, const char *title)
{
    if (!any_has(c, what))
        return;
    struct chart k = {.height = 180, .small = true, .whole_x = true, .label = title};
    buf_addf(c->page.b, "<section class='card'><div class='head'><h3>%s</h3></div>\n", title);
    draw_runs(c, what, X_STEP, 0, &k);
    buf_add(c->page.b, "</section>\n");
}

/* ---- several runs: tables -------------------------------------------------------------------- */

static void add_cell(struct buf *b, const char *text)
{
    buf_add(b, "<td class='n'>");
    add_html(b, text);
    buf_add(b, "</td>");
}

static void add_loss_cell(struct buf *b, const struct series *s, double v)
{
    char text[64];
    snprintf(text, sizeof text, fabs(v) < 1000 ? "%.4f" : "%.4g", v);
    add_cell(b, s->count > 0 && isfinite(v) ? text : "");
}

static void add_key_numbers(struct comparison *c)
{
    struct buf *b = c->page.b;
    char text[64];
    buf_add(b, "<section class='card'><h2>Key numbers</h2><div "
               "class='scroll'><table><thead><tr><th>run</th><th>state</th>"
               "<th class='n'>steps</th><th class='n'>tokens</th><th class='n'>time</th><th "
               "class='n'>last loss</th>"
               "<th class='n'>best validation</th><th class='n'>at step</th><th class='n'>bits per "
               "byte</th>"
               "<th class='n'>tokens/s</th><th class='n'>memory</th></tr></thead><tbody>\n");
    for (int i = 0; i < c->n; i++) {
        const struct history *h = c->run[i].h;
        const struct series *m = h->main;
        line_colour(i, c->n, text, sizeof text);
        buf_addf(b, "<tr><th><i style='background:%s'></i>", text);
        add_html(b, c->run[i].name);
        buf_addf(b, "</th><td>%s</td><td class='n'>%" PRId64 "</td>", status_of(&c->run[i]), h->last_step);
        add_cell(b, short_count((double)h->tokens, text, sizeof text));
        add_cell(b, human_time(h->elapsed, text, sizeof text));
        add_loss_cell(b, &m[HIST_LOSS], m[HIST_LOSS].last);
        add_loss_cell(b, &m[HIST_VAL], m[HIST_VAL].best);
        snprintf(text, sizeof text, "%" PRId64, m[HIST_VAL].best_step);
        add_cell(b, m[HIST_VAL].count > 0 ? text : "");
        add_loss_cell(b, &m[HIST_BPB], m[HIST_BPB].best);
        add_cell(b, m[HIST_SPEED].count > 0 ? page_number(series_mean(&m[HIST_SPEED]), text, sizeof text) : "");
        add_cell(b, h->facts.memory_bytes > 0 ? human_bytes((double)h->facts.memory_bytes, text, sizeof text) : "");
        buf_add(b, "</tr>\n");
    }
    buf_add(b, "</tbody></table></div></section>\n");
}

/* The values of one option in all runs, end to end in `text`; differs says whether they are not all
 * equal. */
static int option_values(const struct comparison *c, const char *name, struct buf *text, size_t *at, bool *differs)
{
    const char *first = NULL;
    buf_clear(text);
    *differs = false;
    struct buf one;
    buf_init(&one, 0);
    for (int i = 0; i < c->n; i++) {
        buf_clear(&one);
        at[i] = text->len;
        const char *v = c->run[i].has_cfg ? config_value_text(&c->run[i].cfg, name, &one) : NULL;
        if (v != NULL)
            buf_add(text, v);
        buf_add_n(text, "", 1);
    }
    buf_release(&one);
    TRY(buf_check(text, NULL));
    for (int i = 0; i < c->n; i++)
        if (c->run[i].has_cfg) {
            first = first == NULL ? text->text + at[i] : first;
            *differs |= strcmp(first, text->text + at[i]) != 0;
        }
    return ST_OK;
}

static int add_options(struct comparison *c, struct err *e)
{
    struct buf *b = c->page.b, text;
    size_t at[MAX_RUNS];
    int shown = 0;
    buf_init(&text, 0);
    buf_add(b, "<section class='card'><h2>Options that differ</h2><div "
               "class='scroll'><table><thead><tr><th>option</th>");
    for (int i = 0; i < c->n; i++) {
        buf_add(b, "<th>");
        add_html(b, c->run[i].name);
        buf_add(b, "</th>");
    }
    buf_add(b, "</tr></thead><tbody>\n");
    for (int k = 0; k < config_option_count(); k++) {
        const char *name = config_option_name(k);
        bool differs;
        if (option_values(c, name, &text, at, &differs) != ST_OK) {
            buf_release(&text);
            return err_set(e, ST_NOMEM, "no memory for the options of %d runs", c->n);
        }
        if (!differs || strcmp(name, "run.dir") == 0)
            continue;
        buf_addf(b, "<tr><th>%s</th>", name);
        for (int i = 0; i < c->n; i++) {
            buf_add(b, "<td>");
            add_html(b, c->run[i].has_cfg ? text.text + at[i] : "not known");
            buf_add(b, "</td>");
        }
        buf_add(b, "</tr>\n");
        shown++;
    }
    buf_addf(b, "</tbody></table></div>%s", shown == 0 ? "<p class='note'>None, run.dir aside.</p>" : "");
    for (int i = 0; i < c->n; i++)
        if (!c->run[i].has_cfg) {
            buf_add(b, "<p class='note'>");
            add_html(b, c->run[i].name);
            buf_add(b, ": options are not known: ");
            add_html(b, c->run[i].cfg_error.msg);
            buf_add(b, "</p>");
        }
    buf_add(b, "</section>\n");
    buf_release(&text);
    return ST_OK;
}

static void add_texts(struct comparison *c)
{
    struct buf *b = c->page.b;
    for (int i = 0; i < c->n; i++) {
        const struct history *h = c->run[i].h;
        buf_add(b, "<details class='card'><summary>");
        add_html(b, c->run[i].name);
        buf_add(b, ": command line and machine</summary><pre class='wrap'>");
        add_html(b, h->facts.command != NULL ? h->facts.command : "The run did not record its command line.");
        buf_add(b, "</pre><pre>");
        add_html(b, h->facts.machine != NULL ? h->facts.machine : "");
        buf_add(b, "</pre>");
        if (h->n_samples > 0) {
            buf_addf(b, "<p class='note'>Text of step %" PRId64 ":</p><pre class='wrap'>",
                     h->sample[h->n_samples - 1].step);
            add_html(b, h->sample[h->n_samples - 1].text);
            buf_add(b, "</pre>");
        }
        buf_add(b, "</details>\n");
    }
}

/* ---- several runs: the page ------------------------------------------------------------------ */

static int compare_page(struct comparison *c, struct err *e)
{
    char title[64];
    snprintf(title, sizeof title, "braid: %d runs compared", c->n);
    page_begin(&c->page, title, 0);
    buf_add(c->page.b, "<p class='sub'></p>\n");
    add_key_numbers(c);
    add_loss_chart(c, HIST_VAL, "Validation loss");
    add_loss_chart(c, HIST_LOSS, "Training loss, smoothed");
    TRY(add_options(c, e));
    buf_add(c->page.b, "<div class='panels'>\n");
    add_panel(c, HIST_LR, "Learning rate");
    add_panel(c, HIST_NORM, "Gradient norm");
    add_panel(c, HIST_SPEED, "Tokens per second");
    add_panel(c, HIST_MFU, "Percent of peak FLOP/s (MFU)");
    buf_add(c->page.b, "</div>\n");
    add_texts(c);
    page_end(&c->page);
    return buf_check(c->page.b, e);
}

/* Runs whose folders have the same name are told apart by their whole path. */
static void name_runs(struct comparison *c, const char *const *dir)
{
    for (int i = 0; i < c->n; i++)
        for (int j = 0; j < c->n; j++)
            if (i != j && strcmp(last_part(dir[i]), last_part(dir[j])) == 0)
                c->run[i].name = dir[i];
}

int report_compare(const char *const *run_dir, int n, const char *out_path, struct err *e)
{
    if (n < 1 || n > MAX_RUNS)
        return err_set(e, ST_USAGE, "%d runs to compare; from 1 to %d fit on a page", n, MAX_RUNS);
    struct comparison *c;
    struct buf html;
    buf_init(&html, 0);
    TRY(mem_array((void **)&c, 1, sizeof *c, e));
    int st = page_init(&c->page, &html, (size_t)MAX_RUNS * MAIN_POINTS, e);
    double longest = 0;
    for (; st == ST_OK && c->n < n; c->n++) {
        st = run_read(&c->run[c->n], run_dir[c->n], e);
        if (st == ST_OK)
            longest = fmax(longest, c->run[c->n].h->elapsed);
    }
    if (st == ST_OK) {
        name_runs(c, run_dir);
        c->unit = time_unit_of(longest);
        st = compare_page(c, e);
    }
    if (st == ST_OK)
        st = file_write_atomic(out_path, html.text, html.len, e);
    for (int i = 0; i < n; i++)
        run_release(&c->run[i]);
    page_release(&c->page);
    buf_release(&html);
    free(c);
    return st;
}
