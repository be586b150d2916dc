/* Chrome / Perfetto trace of executed steps (the "trace event" JSON array format). */
#include "plan/plan_int.h"

#include <stdlib.h>

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
    buf_addf(out, ",\n{\"name\":\"%s %s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
             "\"args\":{\"step\":%d,\"waits\":[", ev->plan->g->nodes[s->ref.node].name, phase_name(s->ref.phase),
             ev->plan->name, s->lane, (ev->begin - t->events[0].begin) * 1e6, us, ev->step);
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
        buf_addf(&out, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%d,\"args\":{\"name\":\"%s\"}}", l, lane_name(l));
    for (int i = 0; i < t->n; i++)
        write_event(t, i, &out);
    if (t->dropped > 0)
        buf_addf(&out, ",\n{\"name\":\"%lld further steps not kept\",\"ph\":\"i\",\"pid\":0,\"tid\":0,\"ts\":%.3f,\"s\":\"g\"}",
                 (long long)t->dropped, (t->events[t->n - 1].end - t->events[0].begin) * 1e6);
    buf_add(&out, "]\n");
    int st = buf_check(&out, e);
    if (st == ST_OK)
        st = file_write_atomic(path, out.text, out.len, e);
    buf_release(&out);
    return st;
}

void trace_close(struct trace *t)
{
    if (t != NULL)
        free(t->events);
    free(t);
}
