/* One log, four sinks: the records of log.h handed to the progress line, metrics.jsonl, TensorBoard
 * and the report's history. */
#include "log/log.h"

#include "log/report_int.h"
#include "log/tensorboard_int.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_ROOM = 64 * 1024 };
static const double report_every = 5;   /* seconds: steps come faster than pages are read */
static const double report_share = 400; /* writing it takes at most one part of so many */

struct train_log {
    struct history history;
    struct progress progress;
    struct sink jsonl;
    struct tb_writer tb;
    struct buf line, html;
    struct arena texts;
    struct report_facts facts;
    struct watch watch;
    const char *report_path; /* NULL: no report */
    double report_due;       /* when it is to be written again; 0: at once */
    struct err first_failure;
    bool failing;
};

double log_perplexity(double loss) { return exp(loss > 20 ? 20 : loss); }

/* ---- failures: told once per spell, remembered for log_close --------------------------------- */

static void outcome(struct train_log *log, int st, const struct err *e)
{
    if (st == ST_OK)
        return;
    if (log->first_failure.code == ST_OK)
        log->first_failure = *e;
    if (!log->failing)
        progress_note(&log->progress, "warning: %s; training goes on, this record is lost", e->msg);
    log->failing = true;
}

static void write_line(struct train_log *log)
{
    struct err e = {0};
    buf_add(&log->line, "}\n");
    int st = buf_check(&log->line, &e);
    if (st == ST_OK)
        st = sink_write(&log->jsonl, log->line.text, log->line.len, &e);
    if (st == ST_OK)
        log->failing = false;
    outcome(log, st, &e);
}

/* ---- records --------------------------------------------------------------------------------- */

static void add_field(struct buf *b, const char *key, double v, const char *fmt, bool *nonfinite)
{
    buf_addf(b, ",\"%s\":", key);
    add_json_number(b, v, fmt);
    *nonfinite |= !isfinite(v);
}

static void add_extras(struct train_log *log, bool *nonfinite)
{
    bool any = false;
    for (int i = 0; i < log->history.n_extra; i++) {
        const struct series *s = &log->history.extra[i];
        if (!s->has_pending)
            continue;
        buf_add(&log->line, any ? "," : ",\"extra\":{");
        any = true;
        add_json_string(&log->line, s->tag);
        buf_add(&log->line, ":");
        add_json_number(&log->line, s->pending, "%.9g");
        *nonfinite |= !isfinite(s->pending);
    }
    if (any)
        buf_add(&log->line, "}");
}

static void step_to_jsonl(struct train_log *log, const struct step_record *r)
{
    struct buf *b = &log->line;
    bool nonfinite = false;
    buf_clear(b);
    buf_addf(b, "{\"step\":%" PRId64, r->step);
    add_field(b, "loss", r->loss, "%.9g", &nonfinite);
    add_field(b, "lr", r->lr, "%.9g", &nonfinite);
    if (!(r->grad_norm < 0))
        add_field(b, "grad_norm", r->grad_norm, "%.9g", &nonfinite);
    buf_addf(b, ",\"tokens\":%" PRId64, r->tokens);
    if (r->tokens_per_s > 0)
        add_field(b, "tokens_per_s", r->tokens_per_s, "%.6g", &nonfinite);
    if (r->mfu > 0)
        add_field(b, "mfu", r->mfu, "%.4g", &nonfinite);
    add_field(b, "elapsed", r->elapsed, "%.3f", &nonfinite);
    if (r->skipped)
        buf_add(b, ",\"skipped\":true");
    add_extras(log, &nonfinite);
    if (nonfinite)
        buf_add(b, ",\"nonfinite\":true");
    write_line(log);
}

static void step_to_tb(struct train_log *log, const struct step_record *r)
{
    if (log->tb.file.fd < 0)
        return;
    struct err e = {0};
    tb_begin(&log->tb);
    tb_add_scalar(&log->tb, "lm loss", r->loss);
    tb_add_scalar(&log->tb, "learning-rate", r->lr);
    if (!(r->grad_norm < 0))
        tb_add_scalar(&log->tb, "grad-norm", r->grad_norm);
    if (r->tokens_per_s > 0)
        tb_add_scalar(&log->tb, "tokens-per-second", r->tokens_per_s);
    if (r->mfu > 0)
        tb_add_scalar(&log->tb, "mfu-percent", r->mfu);
    for (int i = 0; i < log->history.n_extra; i++)
        if (log->history.extra[i].has_pending)
            tb_add_scalar(&log->tb, log->history.extra[i].tag, log->history.extra[i].pending);
    outcome(log, tb_end(&log->tb, r->step, time_wall(), &e), &e);
}

int log_scalar(struct train_log *log, const char *tag, double value)
{
    struct series *s = history_extra(&log->history, tag, true);
    if (s == NULL)
        return ST_INVALID;
    s->pending = value;
    s->has_pending = true;
    return ST_OK;
}

static void write_report(struct train_log *log, bool final)
{
    double now = time_now();
    if (log->report_path == NULL || (!final && now < log->report_due))
        return;
    struct err e = {0};
    buf_clear(&log->html);
    int st = report_html(&log->html, &log->history, &log->facts, &e);
    if (st == ST_OK)
        st = file_write_atomic(log->report_path, log->html.text, log->html.len, &e);
    outcome(log, st, &e);
    double end = time_now();
    log->report_due = end + fmax(report_every, report_share * (end - now));
}

void log_step(struct train_log *log, const struct step_record *r)
{
    step_to_jsonl(log, r);
    step_to_tb(log, r);
    history_step(&log->history, r);
    for (int i = 0; i < log->history.n_extra; i++) {
        struct series *s = &log->history.extra[i];
        if (s->has_pending)
            series_add(s, r->step, s->pending);
        s->has_pending = false;
    }
    progress_step(&log->progress, r);
    char news[300];
    if (watch_step(&log->watch, r, news, sizeof news))
        log_event(log, LOG_NOTE, r->step, "%s", news);
    write_report(log, false);
}

void log_eval(struct train_log *log, const struct eval_record *r)
{
    struct buf *b = &log->line;
    bool nonfinite = false;
    buf_clear(b);
    buf_addf(b, "{\"step\":%" PRId64, r->step);
    add_field(b, "val_loss", r->loss, "%.9g", &nonfinite);
    if (r->bits_per_byte != 0)
        add_field(b, "bits_per_byte", r->bits_per_byte, "%.9g", &nonfinite);
    add_field(b, "ppl", log_perplexity(r->loss), "%.6g", &nonfinite);
    if (nonfinite)
        buf_add(b, ",\"nonfinite\":true");
    write_line(log);
    if (log->tb.file.fd >= 0) {
        struct err e = {0};
        tb_begin(&log->tb);
        tb_add_scalar(&log->tb, "lm loss validation", r->loss);
        tb_add_scalar(&log->tb, "lm loss validation ppl", log_perplexity(r->loss));
        if (r->bits_per_byte != 0)
            tb_add_scalar(&log->tb, "bits per byte validation", r->bits_per_byte);
        outcome(log, tb_end(&log->tb, r->step, time_wall(), &e), &e);
    }
    history_eval(&log->history, r);
    progress_eval(&log->progress, r);
    write_report(log, false);
}

static void begin_event(struct train_log *log, const char *name, int64_t step, const char *text)
{
    buf_clear(&log->line);
    buf_addf(&log->line, "{\"event\":\"%s\",\"step\":%" PRId64 ",\"time\":%.3f,\"text\":", name, step, time_wall());
    add_json_string(&log->line, text);
}

static void record_event(struct train_log *log, enum log_event_kind kind, int64_t step, const char *text)
{
    begin_event(log, event_name(kind), step, text);
    write_line(log);
    history_event(&log->history, kind, step, text);
}

/* The first record of this process, with what a report needs to know beside the numbers. */
static void record_start(struct train_log *log, const struct log_opts *o)
{
    const struct {
        const char *key, *text;
    } texts[] = {{"command", o->command}, {"machine", o->machine}, {"model", o->model}};
    enum log_event_kind kind = o->resume ? LOG_RESUME : LOG_START;
    begin_event(log, event_name(kind), o->start_step, "");
    for (int i = 0; i < countof(texts); i++)
        if (texts[i].text != NULL) {
            buf_addf(&log->line, ",\"%s\":", texts[i].key);
            add_json_string(&log->line, texts[i].text);
        }
    buf_addf(&log->line, ",\"total_steps\":%" PRId64 ",\"memory_bytes\":%" PRId64, o->total_steps, o->memory_bytes);
    write_line(log);
    history_event(&log->history, kind, o->start_step, "");
}

void log_sample(struct train_log *log, int64_t step, const char *text)
{
    begin_event(log, "sample", step, text);
    write_line(log);
    history_sample(&log->history, step, text);
    write_report(log, false);
}

void log_record(struct train_log *log, enum log_event_kind kind, int64_t step, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    record_event(log, kind, step, text);
    if (kind != LOG_NOTE)
        write_report(log, false);
}

/* The texts are whole sentences, which name the step where it matters. */
void log_event(struct train_log *log, enum log_event_kind kind, int64_t step, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    log_record(log, kind, step, "%s", text);
    progress_note(&log->progress, "%s%s", kind == LOG_NOTE ? "note: " : "", text[0] ? text : event_name(kind));
}

/* The last value of a series, or the mean of its last points: single losses jump about. */
static double last_of(const struct series *s) { return s->count > 0 ? s->last : NAN; }

static double recent_mean(const struct series *s, int64_t steps)
{
    double sum = 0, n = 0;
    for (int i = s->count - 1; i >= 0 && s->point[i].last > s->last_step - steps; i--) {
        sum += s->point[i].mean * s->point[i].n;
        n += s->point[i].n;
    }
    return n > 0 ? sum / n : NAN;
}

struct log_result log_result(const struct train_log *log)
{
    const struct history *h = &log->history;
    const struct series *loss = &h->main[HIST_LOSS];
    return (struct log_result){.steps = h->last_step,
                               .tokens = h->tokens,
                               .skipped = h->n_skipped,
                               .seconds = h->elapsed,
                               .first_loss = log->watch.first_loss,
                               .loss = recent_mean(loss, max_i64(1, min_i64(20, h->last_step / 20))),
                               .val_loss = last_of(&h->main[HIST_VAL]),
                               .bits_per_byte = last_of(&h->main[HIST_BPB])};
}

void log_break(struct train_log *log) { progress_break(&log->progress); }

void log_print_curve(const struct train_log *log, FILE *out, bool unicode)
{
    report_history_curve(out, &log->history, unicode);
}

/* ---- open and close -------------------------------------------------------------------------- */

static int open_tensorboard(struct train_log *log, const char *dir, const struct log_opts *o, struct err *e)
{
    double wall = time_wall();
    TRY(tb_open(&log->tb, dir, wall, e));
    /* Readers drop steps >= the one named, and the record of start_step itself still holds. */
    if (log->tb.had_files)
        TRY(tb_restart_at(&log->tb, o->resume ? o->start_step + 1 : 0, wall, e));
    const struct {
        const char *tag, *text;
    } texts[] = {{"config", o->config}, {"model", o->model}, {"machine", o->machine}, {"command", o->command}};
    for (int i = 0; i < countof(texts); i++)
        if (texts[i].text != NULL && texts[i].text[0] != '\0')
            TRY(tb_text(&log->tb, texts[i].tag, texts[i].text, o->start_step, wall, e));
    return ST_OK;
}

static int open_files(struct train_log *log, const struct log_opts *o, struct err *e)
{
    TRY(file_make_dirs(o->run_dir, e));
    char *jsonl = arena_printf(&log->texts, "%s/metrics.jsonl", o->run_dir);
    char *tb = arena_printf(&log->texts, "%s/tb", o->run_dir);
    char *report = arena_printf(&log->texts, "%s/report.html", o->run_dir);
    if (jsonl == NULL || tb == NULL || report == NULL)
        return err_set(e, ST_NOMEM, "no memory for the paths of the log");
    log->report_path = o->report ? report : NULL;
    int64_t taken_back = 0;
    char aside[4096] = "";
    TRY(o->resume ? metrics_trim(jsonl, o->start_step, &taken_back, e)
                  : metrics_set_aside(jsonl, aside, sizeof aside, e));
    if (aside[0] != '\0')
        progress_note(&log->progress, "note: the log of an earlier start is now %s", aside);
    TRY(sink_open(&log->jsonl, jsonl, 0, e));
    record_start(log, o);
    if (log->first_failure.code != ST_OK) { /* at the start, a log that cannot be written is an error */
        if (e != NULL)
            *e = log->first_failure;
        return (int)log->first_failure.code;
    }
    if (o->resume) { /* the record just written is part of what is read back */
        log->history.n_events = 0;
        int64_t ignored;
        TRY(history_load(&log->history, jsonl, &ignored, e));
        if (ignored > 0)
            progress_note(&log->progress, "note: %" PRId64 " damaged lines in %s were left out", ignored, jsonl);
    }
    return o->tensorboard ? open_tensorboard(log, tb, o, e) : ST_OK;
}

static int copy_facts(struct train_log *log, const struct log_opts *o, struct err *e)
{
    const char *const from[] = {o->title, o->command, o->config, o->model, o->machine};
    const char **const to[] = {&log->facts.title, &log->facts.command, &log->facts.config, &log->facts.model,
                               &log->facts.machine};
    for (int i = 0; i < countof(from); i++)
        if (from[i] != NULL && (*to[i] = arena_strdup(&log->texts, from[i])) == NULL)
            return err_set(e, ST_NOMEM, "no memory for the texts of the log");
    log->facts.status = "running";
    log->facts.total_steps = o->total_steps;
    log->facts.memory_bytes = o->memory_bytes;
    return ST_OK;
}

static void log_free(struct train_log *log)
{
    tb_close(&log->tb, NULL);
    sink_close(&log->jsonl, NULL);
    history_release(&log->history);
    buf_release(&log->line);
    buf_release(&log->html);
    arena_release(&log->texts);
    free(log);
}

int log_open(struct train_log **out, const struct log_opts *o, struct err *e)
{
    *out = NULL;
    if (o->total_steps < 0 || o->start_step < 0)
        return err_set(e, ST_INVALID, "log: steps %" PRId64 " of %" PRId64 " are negative", o->start_step,
                       o->total_steps);
    struct train_log *log;
    TRY(mem_array((void **)&log, 1, sizeof *log, e));
    log->jsonl.fd = log->tb.file.fd = -1;
    arena_init(&log->texts);
    buf_init(&log->line, 0);
    buf_init(&log->html, 0);
    progress_init(&log->progress, o);
    for (int i = 0; i < LINE_ROOM / 16; i++) /* room now, so that steps need not ask for it */
        buf_add(&log->line, "................");
    int st = buf_check(&log->line, e);
    if (st == ST_OK)
        st = history_init(&log->history, e);
    if (st == ST_OK)
        st = copy_facts(log, o, e);
    if (st == ST_OK && o->run_dir != NULL)
        st = open_files(log, o, e);
    if (st != ST_OK) {
        log_free(log);
        return st;
    }
    log->history.last_step = max_i64(log->history.last_step, o->start_step);
    const struct series *loss = &log->history.main[HIST_LOSS];
    watch_start(&log->watch, loss->count > 0 && loss->point[0].n > 0 ? loss->point[0].high : NAN);
    *out = log;
    return ST_OK;
}

int log_close(struct train_log *log, struct err *e)
{
    if (log == NULL)
        return ST_OK;
    progress_break(&log->progress);
    bool complete = log->facts.total_steps > 0 && log->history.last_step >= log->facts.total_steps;
    log->facts.status = complete ? "finished" : "stopped";
    write_report(log, true);
    struct err late = {0};
    outcome(log, sink_close(&log->jsonl, &late), &late);
    outcome(log, tb_close(&log->tb, &late), &late);
    int st = (int)log->first_failure.code;
    if (st != ST_OK && e != NULL) {
        *e = log->first_failure;
        err_in(e, "logging the run");
    }
    log_free(log);
    return st;
}
