/* The report: sound HTML at every size, nothing from outside, text escaped;
 * ticks; the text curve. */
#include "support.h"

#include "log/report_int.h"

static const struct report_facts facts = {.title = "a <b> & \"c\"",
                                          .command = "braid train '<x>'",
                                          .machine = "host <h>",
                                          .memory_bytes = 3 << 20,
                                          .config = "x = '<script>alert(1)</script>'\n",
                                          .model = "model \xff text",
                                          .status = "running",
                                          .total_steps = 100};

static struct history *new_history(void)
{
    struct err e = {0};
    struct history *h = calloc(1, sizeof *h);
    assert_non_null(h);
    assert_ok(history_init(h, &e), &e);
    return h;
}

static void free_history(struct history *h)
{
    history_release(h);
    free(h);
}

/* Every element is closed in order, attributes are quoted, and no number is missing. */
static void assert_well_formed(const char *html)
{
    char open[64][16];
    int depth = 0;
    assert_null(strstr(html, "nan"));
    assert_null(strstr(html, "inf "));
    assert_null(strstr(html, "<script"));
    assert_null(strstr(html, "http:"));
    assert_null(strstr(html, "https:"));
    assert_null(strstr(html, "src="));
    assert_null(strstr(html, "@import"));
    for (const char *at = strchr(html, '<'); at != NULL; at = strchr(at, '<')) {
        bool close = at[1] == '/';
        char name[16];
        size_t n = strspn(at + 1 + close, "abcdefghijklmnopqrstuvwxyzPCS123");
        const char *end = strchr(at, '>');
        assert_non_null(end);
        assert_true(n < sizeof name);
        snprintf(name, sizeof name, "%.*s", (int)n, at + 1 + close);
        bool single = at[1] == '!' || end[-1] == '/' || strcmp(name, "meta") == 0 || strcmp(name, "input") == 0;
        int quotes = 0;
        for (const char *c = at; c < end; c++)
            quotes += *c == '\'';
        assert_int_equal(quotes % 2, 0);
        if (close) {
            assert_true(depth > 0);
            assert_string_equal(open[--depth], name);
        } else if (!single) {
            assert_true(depth < countof(open));
            snprintf(open[depth++], sizeof open[0], "%s", name);
        }
        at = end;
    }
    assert_int_equal(depth, 0);
}

static char *render(const struct history *h)
{
    struct err e = {0};
    struct buf b;
    buf_init(&b, 8 << 20);
    assert_ok(report_html(&b, h, &facts, &e), &e);
    assert_well_formed(b.text);
    return b.text;
}

static void add_steps(struct history *h, int64_t from, int64_t to)
{
    for (int64_t i = from; i <= to; i++) {
        struct step_record r = {.step = i,
                                .loss = i % 97 == 5 ? NAN : 2 + 4 / (1 + (double)i * 0.1),
                                .lr = 1e-3,
                                .grad_norm = i % 51 == 3 ? INFINITY : 1,
                                .tokens = i * 10,
                                .tokens_per_s = 1000,
                                .mfu = 50,
                                .elapsed = (double)i};
        history_step(h, &r);
        if (i % 10 == 0) {
            struct eval_record v = {.step = i, .loss = 3, .bits_per_byte = 1.1};
            history_eval(h, &v);
        }
    }
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)) != NULL; at += strlen(what))
        n++;
    return n;
}

static void an_empty_run_has_a_report(void **state)
{
    (void)state;
    struct history *h = new_history();
    char *html = render(h);
    assert_non_null(strstr(html, "No step has been logged yet"));
    assert_int_equal(count(html, "<svg"), 4); /* loss, by step, log step, tokens and time */
    free(html);
    free_history(h);
}

static void text_from_outside_is_escaped(void **state)
{
    (void)state;
    struct history *h = new_history();
    add_steps(h, 1, 3);
    history_event(h, LOG_NONFINITE, 2, "<img onerror='x'>");
    history_event(h, LOG_CHECKPOINT, 3, "\"quoted\"");
    series_add(history_extra(h, "<g>&'/layer <0>", true), 1, 1);
    series_add(history_extra(h, "<g>&'/layer <1>", true), 1, 2);
    char *html = render(h);
    assert_non_null(strstr(html, "<h1>a &lt;b&gt; &amp; &quot;c&quot;</h1>"));
    assert_non_null(strstr(html, "&lt;script&gt;alert(1)"));
    assert_non_null(strstr(html, "model \xEF\xBF\xBD text"));
    assert_non_null(strstr(html, "<h3>&lt;g&gt;&amp;&#39;</h3>"));
    assert_non_null(strstr(html, "layer &lt;1&gt;"));
    assert_null(strstr(html, "<img"));
    free(html);
    free_history(h);
}

static void one_point_is_visible(void **state)
{
    (void)state;
    struct history *h = new_history();
    add_steps(h, 1, 1);
    char *html = render(h);
    assert_int_equal(count(html, "h0'"), 4 + 4); /* loss on each axis; lr, norm, speed, MFU */
    assert_non_null(strstr(html, "step 1 of 100"));
    free(html);
    free_history(h);
}

static void gaps_break_the_line(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 0);
    struct xy p[] = {{0, 1}, {1, 2}, {2, NAN}, {3, 1}, {4, INFINITY}, {5, 1}, {6, 2}};
    double scratch[countof(p)];
    struct chart c = {.height = 100, .x_max = 6, .label = "x"};
    chart_fit(&c, p, countof(p), scratch, false);
    assert_float_equal(c.y_min, 0.96, 1e-12);
    assert_float_equal(c.y_max, 2.04, 1e-12);
    chart_begin(&b, &c, 0);
    buf_clear(&b);
    chart_line(&b, &c, p, countof(p), "k", "", NULL);
    assert_int_equal(count(b.text, "M"), 3);
    assert_int_equal(count(b.text, "L"), 2);
    assert_int_equal(count(b.text, "h0"), 1); /* the lone point */
    buf_release(&b);
}

static void a_long_run_stays_small(void **state)
{
    (void)state;
    struct history *h = new_history();
    add_steps(h, 1, 100000);
    for (int k = 0; k < 200; k++) {
        char tag[32];
        snprintf(tag, sizeof tag, "load/layer %d", k);
        struct series *s = history_extra(h, tag, true);
        for (int i = 1; i <= 1000; i++)
            series_add(s, i * 100, k + i * 0.001);
    }
    char *html = render(h);
    assert_true(strlen(html) < (2u << 20));
    assert_non_null(strstr(html, "72 more lines are in metrics.jsonl"));
    assert_non_null(strstr(html, "class='band'"));
    free(html);
    free_history(h);
}

static void absurd_numbers_do_no_harm(void **state)
{
    (void)state;
    struct history *h = new_history();
    static const double v[] = {1e308, -1e308, 5e-324, 0, -0.0, 1e-300, NAN, INFINITY, 1e30};
    for (int i = 0; i < countof(v); i++) {
        struct step_record r = {.step = i == 4   ? INT64_MAX
                                        : i == 5 ? 0
                                                 : i,
                                .loss = v[i],
                                .lr = v[i],
                                .grad_norm = v[i],
                                .tokens = INT64_MIN,
                                .tokens_per_s = v[i],
                                .mfu = v[i],
                                .elapsed = v[i]};
        history_step(h, &r);
        struct eval_record e = {.step = i, .loss = v[i], .bits_per_byte = v[i]};
        history_eval(h, &e);
        series_add(history_extra(h, "x", true), i, v[i]);
    }
    struct err e = {0};
    struct buf b;
    buf_init(&b, 0);
    assert_ok(report_html(&b, h, &facts, &e), &e);
    buf_release(&b);
    FILE *nowhere = fopen("/dev/null", "w");
    assert_non_null(nowhere);
    report_history_curve(nowhere, h, true);
    report_history_curve(nowhere, h, false);
    fclose(nowhere);
    free_history(h);
}

static void ticks_are_round_and_short(void **state)
{
    (void)state;
    assert_float_equal(tick_step(10, 5), 2, 1e-12);
    assert_float_equal(tick_step(0.03, 5), 0.01, 1e-12);
    assert_float_equal(tick_step(7, 6), 2, 1e-12);
    assert_float_equal(tick_step(0, 6), 1, 0);
    assert_float_equal(tick_step(INFINITY, 6), 1, 0);
    static const struct {
        double v, step;
        const char *want;
    } cases[] = {
        {0, 0.1, "0"},
        {1e-17, 0.1, "0"},
        {0.3, 0.1, "0.3"},
        {2.5, 0.25, "2.50"},
        {2, 0.5, "2.0"},
        {2000, 500, "2000"},
        {2000, 1000, "2k"},
        {12500, 2500, "12.5k"},
        {1e5, 2e4, "100k"},
        {2.5e6, 5e5, "2.5M"},
        {2e-4, 1e-4, "2e-4"},
        {2.2e-4, 1e-5, "2.2e-4"},
        {-3, 1, "-3"},
        {3e20, 1e20, "3e20"},
        {1e-300, 1e-300, "1e-300"},
        {1.000002, 1e-6, "1.000002"},
        {1234567, 1, "1234567"},
        {0.999997, 1e-6, "0.999997"},
    };
    char text[32];
    for (int i = 0; i < countof(cases); i++)
        assert_string_equal(tick_text(cases[i].v, cases[i].step, text, sizeof text), cases[i].want);
}

static void a_spike_does_not_flatten_the_rest(void **state)
{
    (void)state;
    static struct xy p[1000];
    static double scratch[1000];
    for (int i = 0; i < 1000; i++)
        p[i] = (struct xy){i, 2 + 3 * exp(-i / 100.0)};
    p[500].y = 1e6;
    struct chart c = {.height = 100};
    chart_fit(&c, p, 1000, scratch, false);
    assert_true(c.y_max >= 5 && c.y_max <= 10); /* the start is shown, the spike is not */
    assert_true(c.y_min <= 2 && c.y_min >= 1);
    for (int i = 0; i < 1000; i++)
        p[i].y = 7;
    chart_fit(&c, p, 1000, scratch, false);
    assert_true(c.y_min < 7 && c.y_max > 7);
    chart_fit(&c, p, 0, scratch, false);
    assert_true(c.y_min < c.y_max);
}

/* Every text between '>' and '<' of the spans with the class, in order; at most max of them. */
static int labels_of(const char *html, const char *class, char (*out)[48], int max)
{
    char open[32];
    int n = 0;
    snprintf(open, sizeof open, "<span class='%s", class);
    for (const char *at = html; n < max && (at = strstr(at, open)) != NULL; n++) {
        at = strchr(at, '>') + 1;
        snprintf(out[n], sizeof out[0], "%.*s", (int)strcspn(at, "<"), at);
    }
    return n;
}

static void ticks_of_an_axis_differ(void **state)
{
    (void)state;
    for (int scale = -12; scale <= 14; scale++)
        for (int spread = -9; spread <= 3; spread++) {
            double middle = pow(10, scale) * 1.37, range = middle * pow(10, spread), scratch[2];
            struct xy p[] = {{0, middle}, {range, middle + range}};
            struct chart c = {.height = 100, .x_min = middle, .x_max = middle + range, .label = "x"};
            struct buf b;
            char text[32][48];
            buf_init(&b, 0);
            chart_fit(&c, p, 2, scratch, false);
            chart_begin(&b, &c, 0);
            for (int axis = 0; axis < 2; axis++) {
                int n = labels_of(b.text, axis == 0 ? "y'" : "x", text, countof(text));
                assert_true(n >= 2);
                for (int i = 0; i < n; i++)
                    for (int j = 0; j < i; j++)
                        assert_string_not_equal(text[i], text[j]);
            }
            buf_release(&b);
        }
}

/* The y axis follows the data, and the second half of a run gets an axis of its own. */
static void the_end_of_a_run_is_enlarged(void **state)
{
    (void)state;
    struct history *h = new_history();
    for (int i = 1; i <= 200; i++) {
        struct step_record r = {.step = i,
                                .loss = i < 100 ? 9 - i * 0.05 : 4 + 0.0005 * (i % 7),
                                .lr = 1,
                                .tokens = i * 1000,
                                .elapsed = i * 60.0};
        history_step(h, &r);
    }
    char *html = render(h), text[64][48];
    const char *by_step = strstr(html, "class='by-step'"), *tail = strstr(by_step, "second half");
    assert_non_null(tail);
    int n = labels_of(tail, "y'", text, 4);
    assert_int_equal(n, 4);
    for (int i = 0; i < n; i++)
        assert_true(strncmp(text[i], "4.00", 4) == 0 || strncmp(text[i], "3.99", 4) == 0);
    assert_int_equal(labels_of(by_step, "y'", text, 2), 2);
    assert_true(strtod(text[0], NULL) >= 3.5); /* not from 0 */
    const char *by_tokens = strstr(html, "class='by-tokens'"), *by_time = strstr(html, "class='by-time'");
    assert_non_null(by_tokens);
    assert_non_null(by_time);
    assert_non_null(strstr(by_tokens, ">100k<")); /* tokens at half of the run */
    assert_non_null(strstr(by_time, "time in hours"));
    free(html);
    free_history(h);
}

static void tokens_and_time_follow_the_steps(void **state)
{
    (void)state;
    struct history *h = new_history();
    for (int i = 1; i <= 10000; i++) { /* thinned out; the second half is ten times slower */
        struct step_record r = {
            .step = i, .loss = 1, .tokens = i * 8, .elapsed = i <= 5000 ? i : 5000 + (i - 5000) * 10.0};
        history_step(h, &r);
    }
    struct time_unit unit = {.seconds = 1, .name = "s"};
    struct x_axis tokens = x_axis_of(X_TOKENS, h, unit), time = x_axis_of(X_TIME, h, unit),
                  step = x_axis_of(X_STEP, h, unit);
    static const double at[] = {0, 1, 777, 5000, 7500, 10000};
    static const double seconds[] = {0, 1, 777, 5000, 30000, 55000};
    for (int i = 0; i < countof(at); i++) {
        assert_true(fabs(x_of(&tokens, at[i]) - 8 * at[i]) < 1e-6);
        assert_true(fabs(x_of(&time, at[i]) - seconds[i]) <
                    40); /* points hold eight steps, and the rate changes within one */
        assert_true(x_of(&step, at[i]) == at[i]);
    }
    free_history(h);
}

static void a_running_page_reloads_itself(void **state)
{
    (void)state;
    struct history *h = new_history();
    add_steps(h, 1, 3);
    char *html = render(h);
    assert_non_null(strstr(html, "http-equiv='refresh'"));
    assert_non_null(strstr(html, "braid train &#39;&lt;x&gt;&#39;"));
    assert_non_null(strstr(html, "host &lt;h&gt;"));
    assert_non_null(strstr(html, "<b>3.0 MiB</b>"));
    free(html);
    struct report_facts done = facts;
    struct err e = {0};
    struct buf b;
    done.status = "finished";
    buf_init(&b, 0);
    assert_ok(report_html(&b, h, &done, &e), &e);
    assert_null(strstr(b.text, "http-equiv='refresh'"));
    buf_release(&b);
    free_history(h);
}

static void samples_are_shown_newest_first(void **state)
{
    (void)state;
    struct history *h = new_history();
    for (int i = 1; i <= 9; i++) {
        char text[32];
        snprintf(text, sizeof text, "<%d> & more", i);
        history_sample(h, i * 10, text);
    }
    char *html = render(h);
    assert_non_null(strstr(html, "<summary>step 90</summary><pre class='wrap'>&lt;9&gt; &amp; more"));
    assert_true(strstr(html, "step 90</summary>") < strstr(html, "step 80</summary>"));
    assert_null(strstr(html, "step 30</summary>")); /* the newest six stay */
    free(html);
    free_history(h);
}

/* ---- from run folders ------------------------------------------------------------------------ */

static char *make_run(const char *dir, const char *name, const char *metrics, const char *config)
{
    struct err e = {0};
    char *run = path_join(dir, name);
    assert_ok(file_make_dirs(run, &e), &e);
    char *from = path_join(run, "metrics.jsonl"), *ini = path_join(run, "config.ini");
    assert_ok(file_write_atomic(from, metrics, strlen(metrics), &e), &e);
    if (config != NULL)
        assert_ok(file_write_atomic(ini, config, strlen(config), &e), &e);
    free(from);
    free(ini);
    return run;
}

static char *read_page(const char *dir, const char *name)
{
    struct err e = {0};
    char *path = path_join(dir, name), *html;
    size_t n;
    assert_ok(file_read(path, 4 << 20, &html, &n, &e), &e);
    assert_well_formed(html);
    free(path);
    return html;
}

static void the_report_is_rebuilt_from_the_run_folder(void **state)
{
    (void)state;
    struct err e = {0};
    char *dir = temp_dir();
    assert_fails(report_from_run(dir, &e), ST_INVALID, &e, "does not exist");
    char *run = make_run(dir, "a",
                         "{\"event\":\"start\",\"step\":0,\"time\":1,\"text\":\"\",\"command\":"
                         "\"braid train x\",\"machine\":\"m1\","
                         "\"model\":\"m2\",\"total_steps\":100,\"memory_bytes\":1048576}\n"
                         "{\"step\":7,\"loss\":1.625,\"lr\":0.1,\"tokens\":70,\"elapsed\":3}\n"
                         "{\"event\":\"sample\",\"step\":7,\"time\":1,\"text\":\"once upon\"}\n",
                         "[model]\nhidden = 48\n");
    assert_ok(report_from_run(run, &e), &e);
    char *html = read_page(run, "report.html");
    static const char *const wanted[] = {"<b>1.625</b>", "step 7 of 100", "unfinished", "braid train x", "m1",
                                         "m2",           "1.0 MiB",       "once upon",  "hidden = 48"};
    for (int i = 0; i < countof(wanted); i++)
        assert_non_null(strstr(html, wanted[i]));
    free(html);
    free(run);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

static void runs_are_compared_on_one_page(void **state)
{
    (void)state;
    struct err e = {0};
    char *dir = temp_dir(), line[128], *out = path_join(dir, "c.html");
    struct buf metrics;
    buf_init(&metrics, 0);
    for (int i = 1; i <= 40; i++) {
        snprintf(line, sizeof line, "{\"step\":%d,\"loss\":%g,\"lr\":0.1,\"tokens\":%d,\"elapsed\":%d}\n", i, 5.0 / i,
                 i * 100, i * 2);
        buf_add(&metrics, line);
    }
    buf_add(&metrics, "{\"step\":40,\"val_loss\":1.23456,\"bits_per_byte\":1.7}\n");
    char *a = make_run(dir, "a<1>", metrics.text, "[model]\nhidden = 48\n[train]\nsteps = 40\nlr = 0.5\n");
    char *b = make_run(dir, "b", metrics.text, "[model]\nhidden = 96\n[train]\nsteps = 80\nlr = 0.5\n");
    char *c = make_run(dir, "c", metrics.text, "[model]\nno_such = 1\n");
    const char *const three[] = {a, b, c};
    assert_ok(report_compare(three, 3, out, &e), &e);
    char *html = read_page(dir, "c.html");
    static const char *const wanted[] = {"3 runs compared",
                                         "a&lt;1&gt;",
                                         "<th>model.hidden</th><td>48</td><td>96</td><td>not known</td>",
                                         "class='by-tokens'",
                                         "class='by-time'",
                                         "Validation loss",
                                         "1.2346",
                                         "finished",
                                         "no_such"};
    for (int i = 0; i < countof(wanted); i++)
        assert_non_null(strstr(html, wanted[i]));
    assert_null(strstr(html, "<th>train.lr</th>")); /* the same in all */
    free(html);
    const char *const missing[] = {a, dir};
    assert_fails(report_compare(missing, 2, out, &e), ST_INVALID, &e, "does not exist");
    assert_fails(report_compare(three, 25, out, &e), ST_USAGE, &e, "25 runs");
    buf_release(&metrics);
    free(a);
    free(b);
    free(c);
    free(out);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

static char *draw_curve(const struct curve *c)
{
    char *text;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    assert_non_null(out);
    report_terminal_curve(out, c);
    fclose(out);
    return text;
}

static void the_text_curve_follows_the_loss(void **state)
{
    (void)state;
    static const double step[] = {0, 10, 20, 30}, loss[] = {4, 3, NAN, 1};
    static const double val_step[] = {10}, val[] = {3};
    struct curve c = {
        .step = step, .loss = loss, .n = 4, .val_step = val_step, .val_loss = val, .n_val = 1, .rows = 4, .cols = 31};
    char *text = draw_curve(&c);
    assert_string_equal(text, "    loss  ** training   o validation\n"
                              "  4.000 +*******\n"
                              "        |      ****o*****\n"
                              "        |               ************\n"
                              "  1.000 +                          *****\n"
                              "        +-------------------------------\n"
                              "         0                       step 30\n");
    free(text);
    c.unicode = true;
    text = draw_curve(&c);
    assert_non_null(strstr(text, "\xE2\x97\x8F"));
    free(text);
    c.n = c.n_val = 0;
    text = draw_curve(&c);
    assert_string_equal(text, "    no loss to draw yet\n");
    free(text);
    c.n = 1, c.unicode = false;
    text = draw_curve(&c);
    assert_int_equal(count(text, "*"), 3); /* one point, and two in the legend */
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_run_has_a_report),
        cmocka_unit_test(text_from_outside_is_escaped),
        cmocka_unit_test(one_point_is_visible),
        cmocka_unit_test(gaps_break_the_line),
        cmocka_unit_test(a_long_run_stays_small),
        cmocka_unit_test(absurd_numbers_do_no_harm),
        cmocka_unit_test(ticks_are_round_and_short),
        cmocka_unit_test(a_spike_does_not_flatten_the_rest),
        cmocka_unit_test(ticks_of_an_axis_differ),
        cmocka_unit_test(the_end_of_a_run_is_enlarged),
        cmocka_unit_test(tokens_and_time_follow_the_steps),
        cmocka_unit_test(a_running_page_reloads_itself),
        cmocka_unit_test(samples_are_shown_newest_first),
        cmocka_unit_test(the_report_is_rebuilt_from_the_run_folder),
        cmocka_unit_test(runs_are_compared_on_one_page),
        cmocka_unit_test(the_text_curve_follows_the_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
