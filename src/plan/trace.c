/* Chrome / Perfetto trace of executed steps (the "trace event" JSON array format). */
#include "plan/exec.h"
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

struct event {
    const struct plan *plan;
    int step;
    double begin, end;
};
struct trace {
    struct event *events;
    int n, max;
    int64_t dropped;
};

int trace_open(struct trace **out, int max_events, struct err *e)
{
    TRY(mem_array((void **)out, 1, sizeof **out, e));
    (*out)->max = max_events;
    int st = mem_array((void **)&(*out)->events, (size_t)max_events, sizeof *(*out)->events, e);
    if (st != ST_OK) {
        free(*out);
        *out = NULL;
    }
    return st;
}

void trace_add(struct trace *t, const struct plan *p, int step, double begin, double end)
{
    if (t->n == t->max)
        t->dropped++;
    else
        t->events[t->n++] = (struct event){.plan = p, .step = step, .begin = begin, .end = end};
}

static void write_event(const struct trace *t, int i, struct buf *out)
{
    const struct event *ev = &t->events[i];
    const struct step *s = &ev->plan->steps[ev->step];
    const struct phase *ph = step_phase(ev->plan, s);
    double us = (ev->end - ev->begin) * 1e6;
    buf_addf(out,
             ",\n{\"name\":\"%s %s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
             "\"args\":{\"step\":%d,\"mb\":%d,\"waits\":[",
             ev->plan->g->nodes[s->ref.node].name, phase_name(s->ref.phase), ev->plan->name, s->lane,
             (ev->begin - t->events[0].begin) * 1e6, us, ev->step, s->ref.mb);
    for (int w = 0; w < s->n_waits; w++)
        buf_addf(out, "%s%d", w ? "," : "", s->wait[w]);
    buf_addf(out, "],\"gflop\":%.6g,\"gflop_per_s\":%.6g}}", ph->flops * 1e-9, us > 0 ? ph->flops * 1e-3 / us : 0.0);
}

int trace_write(const struct trace *t, const char *path, struct err *e)
{
    struct buf out;
    buf_init(&out, 0);
    buf_add(&out, "[{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"name\":\"braid\"}}");
    for (int l = 0; l < LANE_COUNT; l++)
        buf_addf(&out, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"args\":{\"name\":\"%s\"}}", l,
                 lane_name(l));
    for (int i = 0; i < t->n; i++)
        write_event(t, i, &out);
    if (t->dropped > 0)
        buf_addf(
            &out,
            ",\n{\"name\":\"%lld further steps not kept\",\"ph\":\"i\",\"pid\":0,\"tid\":0,\"ts\":%.3f,\"s\":\"g\"}",
            (long long)t->dropped, (t->events[t->n - 1].end - t->events[0].begin) * 1e6);
    buf_add(&out, "]\n");
    int st = buf_check(&out, e);
    if (st == ST_OK)
        st = file_write_atomic(path, out.text, out.len, e);
    buf_release(&out);
    return st;
}

struct row {
    const char *name; /* without the layer's number */
    enum phase_id phase;
    int calls;
    double seconds, flops, bytes;
};

static const char *without_layer(const char *name)
{
    const char *p = name;
    while (*p >= '0' && *p <= '9')
        p++;
    return p > name && *p == '.' ? p + 1 : name;
}

static int slowest_first(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

int trace_table(const struct trace *t, struct buf *out, struct err *e)
{
    struct row *rows = NULL;
    size_t cap = 0;
    int n = 0;
    double total = 0;
    for (int i = 0; i < t->n; i++) {
        const struct event *ev = &t->events[i];
        const struct step *s = &ev->plan->steps[ev->step];
        const char *name = without_layer(ev->plan->g->nodes[s->ref.node].name);
        int k = 0;
        while (k < n && (rows[k].phase != s->ref.phase || strcmp(rows[k].name, name) != 0))
            k++;
        if (k == n) {
            if (mem_grow((void **)&rows, &cap, (size_t)n + 1, sizeof *rows, e) != ST_OK) {
                free(rows);
                return e->code;
            }
            rows[n++] = (struct row){.name = name, .phase = s->ref.phase};
        }
        rows[k].calls++;
        rows[k].seconds += ev->end - ev->begin;
        rows[k].flops += step_phase(ev->plan, s)->flops;
        rows[k].bytes += step_phase(ev->plan, s)->bytes;
        total += ev->end - ev->begin;
    }
    if (n > 0)
        qsort(rows, (size_t)n, sizeof *rows, slowest_first);
    buf_addf(out, "%-28s %-7s %6s %10s %7s %9s %8s\n", "node", "phase", "calls", "ms", "share", "TFLOP/s", "TB/s");
    for (int k = 0; k < n; k++)
        buf_addf(out, "%-28s %-7s %6d %10.3f %6.1f%% %9.2f %8.3f\n", rows[k].name, phase_name(rows[k].phase),
                 rows[k].calls, rows[k].seconds * 1e3, 100 * rows[k].seconds / total,
                 rows[k].flops / rows[k].seconds * 1e-12, rows[k].bytes / rows[k].seconds * 1e-12);
    buf_addf(out, "%-28s %-7s %6s %10.3f\n", "all, one at a time", "", "", total * 1e3);
    free(rows);
    return ST_OK;
}

bool trace_get(const struct trace *t, int i, struct trace_step *out)
{
    if (i < 0 || i >= t->n)
        return false;
    *out = (struct trace_step){
        .p = t->events[i].plan, .step = t->events[i].step, .seconds = t->events[i].end - t->events[i].begin};
    return true;
}

void trace_close(struct trace *t)
{
    if (t != NULL)
        free(t->events);
    free(t);
}
