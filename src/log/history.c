/* What the report draws, in bounded memory: series that thin themselves out, events, and the reader
 * of metrics.jsonl that fills them again when a run resumes. See log_int.h. */
#include "log/log_int.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 2 * MAX_EXTRAS, MAX_LINE = 4 << 20 };

static const char *const event_names[LOG_EVENT_KINDS] = {
    [LOG_START] = "start",         [LOG_RESUME] = "resume", [LOG_CHECKPOINT] = "checkpoint",
    [LOG_NONFINITE] = "nonfinite", [LOG_STOP] = "stop",     [LOG_NOTE] = "note",
};
const char *event_name(enum log_event_kind kind)
{
    return kind >= 0 && kind < LOG_EVENT_KINDS ? event_names[kind] : "note";
}

/* ---- series ---------------------------------------------------------------------------------- */

int series_init(struct series *s, const char *tag, int cap, struct err *e)
{
    *s = (struct series){.cap = cap, .stride = 1, .last = NAN, .best = NAN};
    struct buf clean;
    buf_init(&clean, 0);
    buf_add(&clean, "");
    add_utf8(&clean, tag);
    int st = buf_check(&clean, e);
    if (st == ST_OK)
        st = mem_array((void **)&s->point, (size_t)cap, sizeof *s->point, e);
    if (st != ST_OK) {
        buf_release(&clean);
        return st;
    }
    s->tag = clean.text; /* the series owns it now */
    return ST_OK;
}

void series_release(struct series *s)
{
    free(s->tag);
    free(s->point);
    *s = (struct series){0};
}

static void join(struct hist_point *a, const struct hist_point *b)
{
    if (b->n > 0) {
        double total = (double)a->n + b->n;
        a->low = a->n > 0 ? fmin(a->low, b->low) : b->low;
        a->high = a->n > 0 ? fmax(a->high, b->high) : b->high;
        /* Weights first: a sum of two values near the largest double would overflow. */
        a->mean = a->mean * (a->n / total) + b->mean * (b->n / total);
        a->n += b->n;
    }
    a->bad += b->bad;
    a->last = b->last;
}

void series_add(struct series *s, int64_t step, double v)
{
    bool finite = isfinite(v);
    struct hist_point p = {.first = step, .last = step, .n = finite, .bad = !finite};
    p.mean = p.low = p.high = finite ? v : 0;
    s->last = v;
    s->last_step = step;
    if (finite && !(s->best <= v)) {
        s->best = v;
        s->best_step = step;
    }
    if (s->count > 0 && s->point[s->count - 1].n + s->point[s->count - 1].bad < s->stride) {
        join(&s->point[s->count - 1], &p);
        return;
    }
    if (s->count == s->cap) {
        for (int i = 0; i < s->cap / 2; i++) {
            s->point[i] = s->point[2 * i];
            join(&s->point[i], &s->point[2 * i + 1]);
        }
        s->count = s->cap / 2;
        s->stride *= 2;
    }
    s->point[s->count++] = p;
}

/* ---- history --------------------------------------------------------------------------------- */

int history_init(struct history *h, struct err *e)
{
    static const char *const tag[HIST_MAIN_COUNT] = {
        [HIST_LOSS] = "loss",          [HIST_LR] = "lr",         [HIST_NORM] = "grad_norm",
        [HIST_SPEED] = "tokens_per_s", [HIST_MFU] = "mfu",       [HIST_VAL] = "val_loss",
        [HIST_BPB] = "bits_per_byte",  [HIST_TOKENS] = "tokens", [HIST_TIME] = "elapsed",
    };
    *h = (struct history){0};
    int st = mem_array((void **)&h->extra, MAX_EXTRAS, sizeof *h->extra, e);
    if (st == ST_OK)
        st = mem_array((void **)&h->slot, SLOTS, sizeof *h->slot, e);
    for (int i = 0; i < HIST_MAIN_COUNT && st == ST_OK; i++)
        st = series_init(&h->main[i], tag[i], MAIN_POINTS, e);
    if (st != ST_OK)
        history_release(h);
    return st;
}

void history_release(struct history *h)
{
    for (int i = 0; i < HIST_MAIN_COUNT; i++)
        series_release(&h->main[i]);
    for (int i = 0; i < h->n_extra; i++)
        series_release(&h->extra[i]);
    free(h->extra);
    free(h->slot);
    free(h->facts.command);
    free(h->facts.machine);
    free(h->facts.model);
    *h = (struct history){0};
}

struct series *history_extra(struct history *h, const char *tag, bool make)
{
    /* A tag is stored as clean UTF-8; one that is not is looked up by what it becomes. */
    uint64_t at = hash64_str(tag, 0) % SLOTS;
    while (h->slot[at] != 0) {
        struct series *s = &h->extra[h->slot[at] - 1];
        if (strcmp(s->tag, tag) == 0)
            return s;
        at = (at + 1) % SLOTS;
    }
    if (!make || tag[0] == '\0' || strlen(tag) > MAX_TAG || h->n_extra == MAX_EXTRAS)
        return NULL;
    struct series *s = &h->extra[h->n_extra];
    if (series_init(s, tag, EXTRA_POINTS, NULL) != ST_OK)
        return NULL;
    if (strcmp(s->tag, tag) != 0) {
        char *clean = s->tag;
        s->tag = NULL;
        series_release(s);
        /* Cleaning can lengthen a tag, at most threefold. */
        struct series *found = strlen(clean) <= MAX_TAG ? history_extra(h, clean, true) : NULL;
        free(clean);
        return found;
    }
    h->slot[at] = (uint16_t)++h->n_extra;
    return s;
}

void history_step(struct history *h, const struct step_record *r)
{
    series_add(&h->main[HIST_LOSS], r->step, r->loss);
    series_add(&h->main[HIST_LR], r->step, r->lr);
    if (!(r->grad_norm < 0))
        series_add(&h->main[HIST_NORM], r->step, r->grad_norm);
    if (r->tokens_per_s > 0)
        series_add(&h->main[HIST_SPEED], r->step, r->tokens_per_s);
    if (r->mfu > 0)
        series_add(&h->main[HIST_MFU], r->step, r->mfu);
    series_add(&h->main[HIST_TOKENS], r->step, (double)r->tokens);
    series_add(&h->main[HIST_TIME], r->step, r->elapsed);
    h->last_step = r->step;
    h->tokens = r->tokens;
    h->elapsed = r->elapsed;
    h->n_skipped += r->skipped;
    h->n_nonfinite += !isfinite(r->loss);
}

void history_eval(struct history *h, const struct eval_record *r)
{
    series_add(&h->main[HIST_VAL], r->step, r->loss);
    if (r->bits_per_byte != 0)
        series_add(&h->main[HIST_BPB], r->step, r->bits_per_byte);
}

/* Checkpoints are the many; the others are what a reader looks for, so they stay longest. */
static int event_to_drop(const struct history *h)
{
    for (int i = 0; i < h->n_events; i++)
        if (h->event[i].kind == LOG_CHECKPOINT)
            return i;
    return 0;
}

void history_event(struct history *h, enum log_event_kind kind, int64_t step, const char *text)
{
    h->n_checkpoints += kind == LOG_CHECKPOINT;
    if (h->n_events == MAX_EVENTS) {
        int drop = event_to_drop(h);
        memmove(&h->event[drop], &h->event[drop + 1], (size_t)(MAX_EVENTS - 1 - drop) * sizeof h->event[0]);
        h->n_events--;
    }
    struct hist_event *ev = &h->event[h->n_events++];
    ev->kind = kind;
    ev->step = step;
    snprintf(ev->text, sizeof ev->text, "%s", text);
}

void history_sample(struct history *h, int64_t step, const char *text)
{
    if (h->n_samples == MAX_SAMPLES) {
        memmove(&h->sample[0], &h->sample[1], (MAX_SAMPLES - 1) * sizeof h->sample[0]);
        h->n_samples--;
    }
    struct hist_sample *s = &h->sample[h->n_samples++];
    s->step = step;
    snprintf(s->text, sizeof s->text, "%s", text);
}

/* ---- metrics.jsonl --------------------------------------------------------------------------- */

/* From line `line` backwards, records beyond `step` were taken back by a resume. */
struct reset {
    int64_t line, step;
};
struct loader {
    struct history *h;
    struct reset *reset;
    size_t n_resets, cap;
    int64_t ignored;
};

static bool get_step(const json_t *rec, int64_t *step)
{
    const json_t *v = json_object_get(rec, "step");
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *step = json_integer_value(v);
    return true;
}

static double get_number(const json_t *rec, const char *key, double absent)
{
    const json_t *v = json_object_get(rec, key);
    return v == NULL ? absent : json_is_number(v) ? json_number_value(v) : NAN;
}

static void load_step(struct history *h, const json_t *rec, int64_t step)
{
    struct step_record r = {
        .step = step,
        .loss = get_number(rec, "loss", NAN),
        .lr = get_number(rec, "lr", NAN),
        .grad_norm = get_number(rec, "grad_norm", -1),
        .tokens = json_integer_value(json_object_get(rec, "tokens")),
        .tokens_per_s = get_number(rec, "tokens_per_s", 0),
        .mfu = get_number(rec, "mfu", 0),
        .elapsed = get_number(rec, "elapsed", 0),
        .skipped = json_is_true(json_object_get(rec, "skipped")),
    };
    history_step(h, &r);
    const char *tag;
    json_t *v;
    json_t *extra = json_object_get(rec, "extra");
    json_object_foreach(extra, tag, v)
    {
        struct series *s = history_extra(h, tag, true);
        if (s != NULL)
            series_add(s, step, json_is_number(v) ? json_number_value(v) : NAN);
    }
}

static void load_text(const json_t *rec, const char *key, char **to)
{
    const char *text = json_string_value(json_object_get(rec, key));
    char *copy = text != NULL ? strdup(text) : NULL;
    if (copy == NULL)
        return;
    free(*to);
    *to = copy;
}

static void load_event(struct history *h, const json_t *rec, const char *name, int64_t step)
{
    const char *text = json_string_value(json_object_get(rec, "text"));
    text = text != NULL ? text : "";
    if (strcmp(name, "sample") == 0) {
        history_sample(h, step, text);
        return;
    }
    int kind = 0;
    while (kind < LOG_NOTE && strcmp(event_names[kind], name) != 0)
        kind++;
    history_event(h, (enum log_event_kind)kind, step, text);
    if (kind != LOG_START && kind != LOG_RESUME)
        return;
    load_text(rec, "command", &h->facts.command);
    load_text(rec, "machine", &h->facts.machine);
    load_text(rec, "model", &h->facts.model);
    h->facts.total_steps = max_i64(json_integer_value(json_object_get(rec, "total_steps")), 0);
    h->facts.memory_bytes = max_i64(json_integer_value(json_object_get(rec, "memory_bytes")), 0);
}

static void load_record(struct loader *l, const json_t *rec, int64_t line, size_t *next_reset)
{
    int64_t step;
    if (!get_step(rec, &step)) {
        l->ignored++;
        return;
    }
    while (*next_reset < l->n_resets && l->reset[*next_reset].line <= line)
        (*next_reset)++;
    if (*next_reset < l->n_resets && step > l->reset[*next_reset].step)
        return;
    const char *name = json_string_value(json_object_get(rec, "event"));
    if (name != NULL) {
        load_event(l->h, rec, name, step);
    } else if (json_object_get(rec, "val_loss") != NULL) {
        struct eval_record r = {.step = step,
                                .loss = get_number(rec, "val_loss", NAN),
                                .bits_per_byte = get_number(rec, "bits_per_byte", 0)};
        history_eval(l->h, &r);
    } else if (json_object_get(rec, "loss") != NULL) {
        load_step(l->h, rec, step);
    } else {
        l->ignored++;
    }
}

/* First pass: where the run started anew or went back. A start takes back everything before it. */
static int note_reset(struct loader *l, const json_t *rec, int64_t line, struct err *e)
{
    const char *name = json_string_value(json_object_get(rec, "event"));
    bool start = name != NULL && strcmp(name, "start") == 0;
    int64_t step;
    if (name == NULL || !get_step(rec, &step) || (!start && strcmp(name, "resume") != 0))
        return ST_OK;
    TRY(mem_grow((void **)&l->reset, &l->cap, l->n_resets + 1, sizeof *l->reset, e));
    l->reset[l->n_resets++] = (struct reset){line, start ? -1 : step};
    return ST_OK;
}

static json_t *parse_line(const char *text, size_t n)
{
    if (n > MAX_LINE)
        return NULL;
    json_t *rec = json_loadb(text, n, JSON_REJECT_DUPLICATES, NULL);
    if (rec != NULL && !json_is_object(rec)) {
        json_decref(rec);
        return NULL;
    }
    return rec;
}

static int load_pass(struct loader *l, const struct file_map *m, bool resets_only, struct err *e)
{
    const char *at = (const char *)m->data, *end = at + m->size;
    size_t next_reset = 0;
    for (int64_t line = 0; at < end; line++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((stop != NULL ? stop : end) - at);
        const char *text = at;
        at += n + (stop != NULL);
        if (n == 0 || (resets_only && memmem(text, n, "\"event\"", 7) == NULL))
            continue;
        json_t *rec = parse_line(text, n);
        if (rec == NULL) {
            l->ignored += !resets_only;
            continue;
        }
        int st = ST_OK;
        if (resets_only)
            st = note_reset(l, rec, line, e);
        else
            load_record(l, rec, line, &next_reset);
        json_decref(rec);
        TRY(st);
    }
    return ST_OK;
}

int history_load(struct history *h, const char *path, int64_t *ignored, struct err *e)
{
    *ignored = 0;
    if (!file_exists(path))
        return ST_OK;
    struct file_map m;
    TRY(file_map_open(&m, path, e));
    struct loader l = {.h = h};
    int st = ST_OK;
    if (m.size > 0) {
        TRY_OUT(load_pass(&l, &m, true, e));
        for (size_t i = l.n_resets; i-- > 1;) /* a later, deeper return reaches through earlier ones */
            l.reset[i - 1].step = min_i64(l.reset[i - 1].step, l.reset[i].step);
        TRY_OUT(load_pass(&l, &m, false, e));
    }
    *ignored = l.ignored;
out:
    free(l.reset);
    file_map_close(&m);
    return st;
}
