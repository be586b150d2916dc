/* The run's log: what is written, what a resume keeps, what a full disk does, and the progress
 * line. */
#include "support.h"

#include "log/log_int.h"

#include <fcntl.h>
#include <jansson.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

struct run {
    char *dir;
    FILE *out;
    char *text; /* what was shown */
    size_t len;
    struct err e;
};

static int setup(void **state)
{
    struct run *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->dir = temp_dir();
    r->out = open_memstream(&r->text, &r->len);
    assert_non_null(r->out);
    *state = r;
    return 0;
}

static int teardown(void **state)
{
    struct run *r = *state;
    fclose(r->out);
    free(r->text);
    file_remove_tree(r->dir, NULL);
    free(r->dir);
    free(r);
    return 0;
}

static struct log_opts options(struct run *r)
{
    return (struct log_opts){.run_dir = r->dir,
                             .total_steps = 400,
                             .log_every = 10,
                             .out = r->out,
                             .progress = LOG_PROGRESS_PLAIN,
                             .title = "test"};
}

static char *metrics(struct run *r)
{
    char *path = path_join(r->dir, "metrics.jsonl"), *text;
    size_t n;
    assert_ok(file_read(path, 1 << 24, &text, &n, &r->e), &r->e);
    free(path);
    return text;
}

static struct step_record a_step(int64_t step)
{
    return (struct step_record){
        .step = step, .loss = 2.5, .lr = 1e-3, .grad_norm = 0.8, .tokens = step * 100, .elapsed = (double)step};
}

/* The n-th line (from 0) as JSON. */
static json_t *line_of(const char *text, int n)
{
    for (; n > 0; n--) {
        text = strchr(text, '\n');
        assert_non_null(text);
        text++;
    }
    json_error_t why;
    json_t *rec = json_loadb(text, strcspn(text, "\n"), JSON_REJECT_DUPLICATES, &why);
    if (rec == NULL)
        fail_msg("not JSON: %s: %.*s", why.text, (int)strcspn(text, "\n"), text);
    return rec;
}

static void records_are_json_and_complete(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    struct step_record s = a_step(1);
    s.tokens_per_s = 12345.6, s.mfu = 61.25;
    assert_int_equal(log_scalar(log, "expert load/layer \"0\"\n\xff", 1.5), ST_OK);
    log_step(log, &s);
    struct eval_record v = {.step = 1, .loss = 2, .bits_per_byte = 1.25};
    log_eval(log, &v);
    log_event(log, LOG_CHECKPOINT, 1, "saved \"%s\"\t\x01", "a\\b");
    assert_ok(log_close(log, &r->e), &r->e);
    char *text = metrics(r);
    json_t *start = line_of(text, 0), *step = line_of(text, 1), *eval = line_of(text, 2);
    json_t *event = line_of(text, 3);
    assert_string_equal(json_string_value(json_object_get(start, "event")), "start");
    assert_int_equal(json_integer_value(json_object_get(step, "tokens")), 100);
    assert_float_equal(json_real_value(json_object_get(step, "mfu")), 61.25, 1e-9);
    assert_float_equal(json_real_value(json_object_get(step, "lr")), 1e-3, 1e-12);
    json_t *extra = json_object_get(step, "extra");
    assert_float_equal(json_number_value(json_object_get(extra, "expert load/layer \"0\"\n\xEF\xBF\xBD")), 1.5, 0);
    assert_null(json_object_get(step, "nonfinite"));
    assert_null(json_object_get(step, "skipped"));
    assert_float_equal(json_real_value(json_object_get(eval, "ppl")), exp(2), 1e-4);
    assert_string_equal(json_string_value(json_object_get(event, "text")), "saved \"a\\b\"\t\x01");
    json_decref(start), json_decref(step), json_decref(eval), json_decref(event);
    free(text);
}

static void values_that_are_not_finite_become_null_and_a_flag(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    struct step_record s = a_step(1);
    s.loss = NAN, s.grad_norm = INFINITY, s.skipped = true;
    log_step(log, &s);
    s = a_step(2);
    assert_int_equal(log_scalar(log, "x", -INFINITY), ST_OK);
    log_step(log, &s);
    log_step(log, &s); /* the extra belonged to one step only */
    assert_ok(log_close(log, &r->e), &r->e);
    char *text = metrics(r);
    json_t *bad = line_of(text, 1), *extra = line_of(text, 2), *good = line_of(text, 3);
    assert_true(json_is_null(json_object_get(bad, "loss")));
    assert_true(json_is_null(json_object_get(bad, "grad_norm")));
    assert_true(json_is_true(json_object_get(bad, "nonfinite")));
    assert_true(json_is_true(json_object_get(bad, "skipped")));
    assert_true(json_is_null(json_object_get(json_object_get(extra, "extra"), "x")));
    assert_true(json_is_true(json_object_get(extra, "nonfinite")));
    assert_null(json_object_get(good, "extra"));
    assert_null(json_object_get(good, "nonfinite"));
    json_decref(bad), json_decref(extra), json_decref(good);
    free(text);
}

static void load(struct run *r, struct history *h, int64_t *ignored)
{
    char *path = path_join(r->dir, "metrics.jsonl");
    assert_ok(history_init(h, &r->e), &r->e);
    assert_ok(history_load(h, path, ignored, &r->e), &r->e);
    free(path);
}

static int count_lines(struct run *r, const char *name)
{
    char *path = path_join(r->dir, name), *text;
    size_t n;
    int lines = 0;
    assert_ok(file_read(path, 1 << 20, &text, &n, &r->e), &r->e);
    for (size_t i = 0; i < n; i++)
        lines += text[i] == '\n';
    free(path);
    free(text);
    return lines;
}

static void train(struct run *r, int64_t from, int64_t to, double loss)
{
    struct log_opts o = options(r);
    struct train_log *log;
    o.resume = from > 0, o.start_step = from, o.report = o.tensorboard = true;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    for (int64_t i = from + 1; i <= to; i++) {
        struct step_record s = a_step(i);
        s.loss = loss;
        assert_int_equal(log_scalar(log, "gain/layer 0", loss), ST_OK);
        log_step(log, &s);
        struct eval_record v = {.step = i, .loss = loss + 1};
        log_eval(log, &v);
    }
    assert_ok(log_close(log, &r->e), &r->e);
}

static void a_resume_takes_back_what_came_after_its_step(void **state)
{
    struct run *r = *state;
    train(r, 0, 20, 5);
    train(r, 15, 18, 4); /* resumed at 15, stopped at 18 */
    train(r, 10, 12, 3); /* resumed once more, from an older checkpoint */
    struct history *h = calloc(1, sizeof *h);
    assert_non_null(h);
    int64_t ignored;
    load(r, h, &ignored);
    assert_int_equal(ignored, 0);
    assert_int_equal(h->main[HIST_LOSS].count, 12);
    assert_int_equal(h->main[HIST_VAL].count, 12);
    for (int i = 0; i < 12; i++) {
        assert_int_equal(h->main[HIST_LOSS].point[i].first, i + 1);
        assert_float_equal(h->main[HIST_LOSS].point[i].mean, i < 10 ? 5 : 3, 0);
    }
    assert_int_equal(history_extra(h, "gain/layer 0", false)->count, 12);
    assert_int_equal(h->last_step, 12);
    assert_int_equal(h->n_events, 2); /* start and the last resume; the first resume was taken back */
    history_release(h);
    assert_int_equal(count_lines(r, "metrics.jsonl"), 3 + 2 * 12); /* each step once; no reader needs a rule */
    train(r, 0, 3, 9); /* a new run in the same folder: the old log is set aside */
    load(r, h, &ignored);
    assert_int_equal(h->main[HIST_LOSS].count, 3);
    history_release(h);
    free(h);
    assert_int_equal(count_lines(r, "metrics.jsonl"), 1 + 2 * 3);
    assert_int_equal(count_lines(r, "metrics.1.jsonl"), 3 + 2 * 12);
    assert_non_null(strstr(r->text, "metrics.1.jsonl"));
}

/* The file is replaced whole: where that fails, the old one is as it was. */
static void a_log_that_cannot_be_trimmed_is_left_alone(void **state)
{
    struct run *r = *state;
    static const char old[] = "{\"event\":\"start\",\"step\":0}\n{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":3}\n"
                              "{\"event\":\"note\",\"step\":2}\n{\"event\":\"sample\",\"step\":2}\n";
    char *path = path_join(r->dir, "metrics.jsonl"), *part = path_join(r->dir, "metrics.jsonl.tmp");
    int64_t removed;
    assert_ok(file_write_atomic(path, old, sizeof old - 1, &r->e), &r->e);
    assert_ok(file_make_dirs(part, &r->e), &r->e); /* in the way of the new file */
    assert_fails(metrics_trim(path, 1, &removed, &r->e), ST_IO, &r->e, "metrics.jsonl.tmp");
    assert_int_equal(file_size(path), sizeof old - 1);
    assert_ok(file_remove_tree(part, &r->e), &r->e);
    assert_ok(metrics_trim(path, 1, &removed, &r->e), &r->e);
    assert_int_equal(removed, 2); /* a sample of text belongs to its step */
    assert_int_equal(count_lines(r, "metrics.jsonl"), 3);
    assert_ok(metrics_trim(path, 1, &removed, &r->e), &r->e);
    assert_int_equal(removed, 0);
    free(path);
    free(part);
}

/* Divergence and dead gradients are told once per spell. */
static void a_run_that_learns_nothing_is_told(void **state)
{
    (void)state;
    struct watch w;
    char text[300];
    int told = 0;
    watch_start(&w, NAN);
    for (int i = 1; i <= 40; i++) {
        struct step_record s = a_step(i);
        s.loss = i == 1 ? 5.5 : i == 3 ? 9 : i < 20 ? 5 : 7; /* one bad batch at 3 is no divergence */
        if (watch_step(&w, &s, text, sizeof text)) {
            assert_non_null(strstr(text, "diverged: at step 29"));
            told++;
        }
    }
    assert_int_equal(told, 1);
    for (int i = 41; i <= 60; i++) { /* it recovers, and diverges again */
        struct step_record s = a_step(i);
        s.loss = i == 41 ? 5 : 8;
        told += watch_step(&w, &s, text, sizeof text);
    }
    assert_int_equal(told, 2);
    watch_start(&w, NAN);
    for (int i = 1; i <= 6; i++) {
        struct step_record s = a_step(i);
        s.grad_norm = i == 3 || i == 4 || i == 6 ? 0 : 1;
        bool news = watch_step(&w, &s, text, sizeof text);
        assert_int_equal(news, i == 3 || i == 6);
        if (news)
            assert_non_null(strstr(text, "are zero"));
    }
}

static void damaged_lines_are_left_out_and_not_glued_to_new_ones(void **state)
{
    struct run *r = *state;
    static const char old[] = "{\"event\":\"start\",\"step\":0}\n{\"step\":1,\"loss\":3,\"lr\":1}\n"
                              "[1]\nnonsense\n{\"step\":-4,\"loss\":1}\n{\"step\":1.5,\"loss\":1}\n"
                              "{\"step\":2,\"step\":3,\"loss\":1}\n{\"step\":2,\"lo";
    char *path = path_join(r->dir, "metrics.jsonl");
    assert_ok(file_write_atomic(path, old, sizeof old - 1, &r->e), &r->e);
    free(path);
    train(r, 1, 2, 4);
    struct history *h = calloc(1, sizeof *h);
    assert_non_null(h);
    int64_t ignored;
    load(r, h, &ignored);
    assert_int_equal(ignored, 5); /* the half line at the end is cut off */
    assert_int_equal(h->main[HIST_LOSS].count, 2);
    assert_float_equal(h->main[HIST_LOSS].last, 4, 0);
    history_release(h);
    free(h);
    fflush(r->out);
    assert_non_null(strstr(r->text, "5 damaged lines"));
}

static void a_full_disk_is_told_once_and_leaves_whole_records(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old, small.rlim_cur = 500;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (int i = 1; i <= 20; i++) {
        struct step_record s = a_step(i);
        log_step(log, &s);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    struct step_record s = a_step(21);
    log_step(log, &s); /* there is room again */
    assert_int_equal(log_close(log, &r->e), ST_IO);
    assert_non_null(strstr(r->e.msg, "metrics.jsonl"));
    assert_non_null(strstr(r->e.trail, "logging the run"));
    fflush(r->out);
    const char *warning = strstr(r->text, "warning: ");
    assert_non_null(warning);
    assert_null(strstr(warning + 1, "warning: "));
    struct history *h = calloc(1, sizeof *h);
    assert_non_null(h);
    int64_t ignored;
    load(r, h, &ignored);
    assert_int_equal(ignored, 0);
    assert_int_equal(h->main[HIST_LOSS].last_step, 21);
    assert_in_range(h->main[HIST_LOSS].count, 3, 10);
    history_release(h);
    free(h);
}

static void opening_fails_with_a_reason(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    o.run_dir = "/dev/null/run";
    assert_int_equal(log_open(&log, &o, &r->e), ST_IO);
    assert_null(log);
    o = options(r), o.start_step = -1;
    assert_fails(log_open(&log, &o, &r->e), ST_INVALID, &r->e, "negative");
    assert_ok(log_close(NULL, &r->e), &r->e);
}

static void bad_tags_are_refused(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    char tag[300];
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    memset(tag, 'x', sizeof tag);
    tag[MAX_TAG + 1] = '\0';
    assert_int_equal(log_scalar(log, tag, 1), ST_INVALID);
    tag[MAX_TAG] = '\0';
    assert_int_equal(log_scalar(log, tag, 1), ST_OK);
    memset(tag, 0xff, MAX_TAG); /* grows when made UTF-8 */
    assert_int_equal(log_scalar(log, tag, 1), ST_INVALID);
    assert_int_equal(log_scalar(log, "", 1), ST_INVALID);
    for (int i = 1; i < MAX_EXTRAS; i++) {
        snprintf(tag, sizeof tag, "t/%d", i);
        assert_int_equal(log_scalar(log, tag, i), ST_OK);
    }
    assert_int_equal(log_scalar(log, "one too many", 1), ST_INVALID);
    assert_int_equal(log_scalar(log, "t/77", 1), ST_OK);
    assert_ok(log_close(log, &r->e), &r->e);
}

static void steps_allocate_nothing(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    FILE *nowhere = fopen("/dev/null", "w");
    assert_non_null(nowhere);
    o.out = nowhere, o.tensorboard = true, o.log_every = 1;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    size_t before = 0;
    for (int i = 1; i <= 5000; i++) { /* long enough for the history to thin itself out */
        struct step_record s = a_step(i);
        for (int k = 0; k < 20; k++) {
            char tag[32];
            snprintf(tag, sizeof tag, "gain/layer %d", k);
            assert_int_equal(log_scalar(log, tag, k), ST_OK);
        }
        log_step(log, &s);
        if (i == 2)
            before = mallinfo2().uordblks;
    }
    assert_int_equal(mallinfo2().uordblks, before);
    assert_ok(log_close(log, &r->e), &r->e);
    fclose(nowhere);
}

static void series_thin_out_without_losing_extremes(void **state)
{
    (void)state;
    struct err e = {0};
    struct series s;
    assert_ok(series_init(&s, "x", 100, &e), &e);
    for (int i = 1; i <= 100000; i++)
        series_add(&s, i, i == 777 ? 1e6 : i == 50000 ? NAN : 2);
    assert_in_range(s.count, 50, 100);
    int64_t values = 0, bad = 0, next = 1;
    double high = 0;
    for (int i = 0; i < s.count; i++) {
        assert_int_equal(s.point[i].first, next); /* no step is lost */
        next = s.point[i].last + 1;
        values += s.point[i].n, bad += s.point[i].bad;
        high = fmax(high, s.point[i].high);
        assert_true(s.point[i].low == 2);
    }
    assert_int_equal(next, 100001);
    assert_int_equal(values, 99999);
    assert_int_equal(bad, 1);
    assert_float_equal(high, 1e6, 0);
    assert_float_equal(s.best, 2, 0);
    series_release(&s);
}

static void many_events_keep_the_telling_ones(void **state)
{
    (void)state;
    struct err e = {0};
    struct history *h = calloc(1, sizeof *h);
    assert_non_null(h);
    assert_ok(history_init(h, &e), &e);
    history_event(h, LOG_START, 0, "");
    for (int i = 1; i <= 5000; i++)
        history_event(h, i == 100 ? LOG_NONFINITE : LOG_CHECKPOINT, i, "x");
    assert_int_equal(h->n_events, MAX_EVENTS);
    assert_int_equal(h->n_checkpoints, 4999);
    assert_int_equal(h->event[0].kind, LOG_START);
    assert_int_equal(h->event[1].kind, LOG_NONFINITE);
    assert_int_equal(h->event[MAX_EVENTS - 1].step, 5000);
    history_release(h);
    free(h);
}

static void the_line_reads_as_documented(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct progress p;
    char line[256];
    progress_init(&p, &o);
    struct step_record s = {
        .step = 119, .loss = 2.4, .lr = 1.9e-3, .grad_norm = 0.83, .tokens_per_s = 12345, .mfu = 61.2, .elapsed = 100};
    progress_text(&p, &s, line, sizeof line);
    assert_string_equal(line, "step 119/400 | loss 2.4000 | lr 1.9e-03 | norm 0.83 | 12.3k tok/s | 61% peak");
    progress_step(&p, &s); /* starts the clock */
    s.step = 120, s.loss = 2.34564, s.elapsed = 100.25;
    p.val = 2.41;
    progress_step(&p, &s);
    progress_text(&p, &s, line, sizeof line);
    assert_string_equal(line, "step 120/400 | loss 2.3456 | val 2.4100 | lr 1.9e-03 | norm 0.83 | "
                              "12.3k tok/s | 61% peak | ETA 1m10s");
    s.skipped = true, s.grad_norm = -1, s.tokens_per_s = s.mfu = 0, s.step = 400;
    progress_text(&p, &s, line, sizeof line);
    assert_string_equal(line, "step 400/400 | loss 2.3456 | val 2.4100 | lr 1.9e-03 | SKIPPED | 1m40s");
}

static void plain_lines_come_at_the_interval(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct progress p;
    o.total_steps = 35;
    progress_init(&p, &o);
    for (int i = 1; i <= 35; i++) {
        struct step_record s = a_step(i);
        if (i == 7)
            s.loss = NAN;
        progress_step(&p, &s);
    }
    fflush(r->out);
    static const char *const want[] = {"step  1/35", "step  7/35", "step 10/35",
                                       "step 20/35", "step 30/35", "step 35/35"};
    const char *at = r->text;
    for (int i = 0; i < countof(want); i++) {
        assert_true(str_starts(at, want[i]));
        at = strchr(at, '\n') + 1;
    }
    assert_int_equal(*at, '\0');
    assert_null(strchr(r->text, '\r'));
}

static void the_line_in_place_makes_room_for_notes(void **state)
{
    struct run *r = *state;
    struct log_opts o = options(r);
    struct train_log *log;
    o.progress = LOG_PROGRESS_LINE, o.run_dir = NULL;
    assert_ok(log_open(&log, &o, &r->e), &r->e);
    struct step_record s = a_step(1);
    log_step(log, &s);
    log_event(log, LOG_NOTE, 1, "hello");
    s = a_step(400);
    log_step(log, &s);
    assert_ok(log_close(log, &r->e), &r->e);
    fflush(r->out);
    assert_string_equal(r->text, "\rstep   1/400 | loss 2.5000 | lr 1.0e-03 | norm 0.80\033[K\r\033[K"
                                 "note: hello\n"
                                 "\rstep 400/400 | loss 2.5000 | lr 1.0e-03 | norm 0.80 | 6m40s\033[K\n");
}

static void counts_are_short(void **state)
{
    (void)state;
    static const struct {
        double n;
        const char *want;
    } cases[] = {{0, "0"},         {12.34, "12.3"},   {999, "999"},    {999.6, "1.00k"},  {12345, "12.3k"},
                 {123456, "123k"}, {999600, "1.00M"}, {9996, "10.0k"}, {1.234e9, "1.23G"}};
    char text[32];
    for (int i = 0; i < countof(cases); i++)
        assert_string_equal(short_count(cases[i].n, text, sizeof text), cases[i].want);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(records_are_json_and_complete),
        TEST(values_that_are_not_finite_become_null_and_a_flag),
        TEST(a_resume_takes_back_what_came_after_its_step),
        TEST(a_log_that_cannot_be_trimmed_is_left_alone),
        TEST(a_run_that_learns_nothing_is_told),
        TEST(damaged_lines_are_left_out_and_not_glued_to_new_ones),
        TEST(a_full_disk_is_told_once_and_leaves_whole_records),
        TEST(opening_fails_with_a_reason),
        TEST(bad_tags_are_refused),
        TEST(steps_allocate_nothing),
        cmocka_unit_test(series_thin_out_without_losing_extremes),
        cmocka_unit_test(many_events_keep_the_telling_ones),
        TEST(the_line_reads_as_documented),
        TEST(plain_lines_come_at_the_interval),
        TEST(the_line_in_place_makes_room_for_notes),
        cmocka_unit_test(counts_are_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
