/* The report: sound HTML at every size, nothing from outside, text escaped; ticks; the text curve.
 */
#include "support.h"

#include "train/report.h"
#include "train/svg_int.h"

static const struct report_facts facts = {.title = "a <b> & \"c\"",
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
    assert_null(strstr(html, "http"));
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
        bool single = at[1] == '!' || end[-1] == '/' || strcmp(name, "meta") == 0 ||
                      strcmp(name, "input") == 0;
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
    assert_int_equal(count(html, "<svg"), 2); /* loss, by steps and by log steps */
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
    assert_int_equal(count(html, "a1 1 0 1 0 2 0"), 2 + 4); /* loss twice, lr, norm, speed, MFU */
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
    struct chart c = {.width = 300, .height = 100, .x_max = 6, .label = "x"};
    chart_fit(&c, p, countof(p), scratch, false);
    assert_float_equal(c.y_min, 1, 1e-12);
    assert_float_equal(c.y_max, 2, 1e-12);
    chart_begin(&b, &c, 0);
    buf_clear(&b);
    chart_line(&b, &c, p, countof(p), "k", "", NULL);
    assert_int_equal(count(b.text, "M"), 3);
    assert_int_equal(count(b.text, "L"), 2);
    assert_int_equal(count(b.text, "a1 1"), 2); /* the lone point, drawn as two arcs */
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
        {0, 0.1, "0"},        {1e-17, 0.1, "0"},      {0.3, 0.1, "0.3"},
        {2.5, 0.25, "2.5"},   {2, 0.5, "2.0"},        {2000, 500, "2000"},
        {2000, 1000, "2k"},   {12500, 2500, "12.5k"}, {1e5, 2e4, "100k"},
        {2.5e6, 5e5, "2.5M"}, {2e-4, 1e-4, "2e-4"},   {2.2e-4, 1e-5, "2.2e-4"},
        {-3, 1, "-3"},        {3e20, 1e20, "3e20"},   {1e-300, 1e-300, "1e-300"},
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
    struct chart c = {.width = 300, .height = 100};
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

static void the_report_is_rebuilt_from_the_run_folder(void **state)
{
    (void)state;
    struct err e = {0};
    char *dir = temp_dir();
    assert_fails(report_from_run(dir, &facts, &e), ST_INVALID, &e, "does not exist");
    char *from = path_join(dir, "metrics.jsonl"), *to = path_join(dir, "report.html"), *html;
    static const char lines[] = "{\"step\":7,\"loss\":1.625,\"lr\":0.1}\n";
    assert_ok(file_write_atomic(from, lines, sizeof lines - 1, &e), &e);
    assert_ok(report_from_run(dir, &facts, &e), &e);
    size_t n;
    assert_ok(file_read(to, 1 << 20, &html, &n, &e), &e);
    assert_non_null(strstr(html, "<b>1.625</b>"));
    assert_non_null(strstr(html, "step 7 of 100"));
    free(html);
    free(from);
    free(to);
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
    struct curve c = {.step = step,
                      .loss = loss,
                      .n = 4,
                      .val_step = val_step,
                      .val_loss = val,
                      .n_val = 1,
                      .rows = 4,
                      .cols = 31};
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
        cmocka_unit_test(the_report_is_rebuilt_from_the_run_folder),
        cmocka_unit_test(the_text_curve_follows_the_loss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
