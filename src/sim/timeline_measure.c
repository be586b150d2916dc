/* Times of nodes on this machine, from a few traced steps of one rank; see timeline.h. */
#include "sim/timeline.h"

#include <stdlib.h>
#include <string.h>

/* The quickest run seen of what has this name and phase: others were disturbed. */
struct node_time {
    char *name;
    enum phase_id phase;
    double seconds, flops, bytes;
};
struct node_times {
    struct node_time *list;
    int n;
    size_t cap;
};

/* Buckets of an update are numbered as they happen to be cut: one name for all. */
static int name_length(const char *name)
{
    size_t whole = strlen(name), n = whole;
    if (strncmp(name, "update.", 7) != 0)
        return (int)whole;
    while (n > 0 && name[n - 1] >= '0' && name[n - 1] <= '9')
        n--;
    return (int)(n < whole && n > 0 && name[n - 1] == '.' ? n - 1 : whole);
}

static int compare(const struct node_time *x, const char *name, int length, enum phase_id phase)
{
    int d = strncmp(x->name, name, (size_t)length);
    if (d == 0 && x->name[length] != '\0')
        d = 1;
    return d != 0 ? d : (int)x->phase - (int)phase;
}

/* Where it is or would be. */
static int find(const struct node_times *t, const char *name, int length, enum phase_id phase)
{
    int lo = 0, hi = t->n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (compare(&t->list[mid], name, length, phase) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static const struct phase *phase_at(const struct plan *p, int step, const char **name)
{
    const struct step_ref *r = &p->steps[step].ref;
    *name = p->g->nodes[r->node].name;
    return &p->g->nodes[r->node].phase[r->phase];
}

/* How much work is b beside a? */
static double ratio(double a_flops, double a_bytes, double b_flops, double b_bytes)
{
    if (a_flops > 0 && b_flops > 0)
        return b_flops / a_flops;
    return a_bytes > 0 && b_bytes > 0 ? b_bytes / a_bytes : 1;
}

static int keep(struct node_times *t, const struct trace_step *s, struct err *e)
{
    const char *name;
    const struct phase *ph = phase_at(s->p, s->step, &name);
    int length = name_length(name), at = find(t, name, length, s->p->steps[s->step].ref.phase);
    struct node_time new = {
        .phase = s->p->steps[s->step].ref.phase, .seconds = s->seconds, .flops = ph->flops, .bytes = ph->bytes};
    if (at < t->n && compare(&t->list[at], name, length, new.phase) == 0) {
        struct node_time *old = &t->list[at];
        if (s->seconds < old->seconds * ratio(old->flops, old->bytes, ph->flops, ph->bytes)) {
            new.name = old->name;
            *old = new;
        }
        return ST_OK;
    }
    TRY(mem_grow((void **)&t->list, &t->cap, (size_t)t->n + 1, sizeof *t->list, e));
    new.name = strndup(name, (size_t)length);
    if (new.name == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    memmove(t->list + at + 1, t->list + at, (size_t)(t->n - at) * sizeof *t->list);
    t->list[at] = new;
    t->n++;
    return ST_OK;
}

bool node_times_get(const struct node_times *t, const struct plan *p, int step, double share, double *seconds)
{
    const char *name;
    const struct phase *ph = phase_at(p, step, &name);
    int length = name_length(name), at = find(t, name, length, p->steps[step].ref.phase);
    if (at >= t->n || compare(&t->list[at], name, length, p->steps[step].ref.phase) != 0)
        return false;
    const struct node_time *x = &t->list[at];
    *seconds = x->seconds * ratio(x->flops, x->bytes, share * ph->flops, share * ph->bytes);
    return true;
}

static int trace_steps(struct trainer *t, struct trace *trace, struct node_times *out, struct err *e)
{
    enum { STEPS = 3 };
    struct step_result r;
    struct trace_step s;
    TRY(trainer_step(t, &r, e)); /* libraries choose their algorithms */
    t->exec.trace = trace;
    for (int i = 0; i < STEPS; i++)
        TRY(trainer_step(t, &r, e));
    for (int i = 0; trace_get(trace, i, &s); i++)
        TRY(keep(out, &s, e));
    return ST_OK;
}

static int measure_on(struct node_times *out, const struct config *alone, struct world *w, struct err *e)
{
    struct rank_place place = place_alone();
    struct trainer t = {0};
    struct trace *trace = NULL;
    int st;
    TRY_OUT(place_open(&place, alone, w, 0, 1, e));
    TRY_OUT(trainer_open_on(&t, alone, &place, NULL, true, e));
    TRY_OUT(trace_open(
        &trace, (int)min_i64(4 * (t.n_micro * t.train.p.n_steps + t.optim.p.n_steps + t.optim.apply.n_steps), 1000000),
        e));
    TRY_OUT(trace_steps(&t, trace, out, e));
out:
    t.exec.trace = NULL;
    trace_close(trace);
    trainer_close(&t);
    place_close(&place);
    return st;
}

int node_times_measure(struct node_times **out, const struct config *alone, struct err *e)
{
    struct world *w = NULL;
    const struct world_opts o = {.kind = COMM_LOOP, .loop_rate = 1e15, .loop_ranks = 1};
    TRY(mem_array((void **)out, 1, sizeof **out, e));
    int st = world_open(&w, &o, e);
    if (st == ST_OK)
        st = measure_on(*out, alone, w, e);
    world_close(w);
    return st;
}

void node_times_close(struct node_times *t)
{
    for (int i = 0; t != NULL && i < t->n; i++)
        free(t->list[i].name);
    if (t != NULL)
        free(t->list);
    free(t);
}
