/* Running a plan: in list order, or, to prove that the waits suffice, in a random order that respects
 * lanes and waits only. Dead slots can be poisoned, outputs searched for NaN. */
#include "plan/exec.h"
#include "plan/plan_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void exec_init(struct exec *x, struct dev *dev)
{
    *x = (struct exec){.dev = dev, .ops = ops_for(dev)};
    for (int l = 0; l < LANE_COUNT; l++)
        x->lane[l] = (struct lane){.dev = dev, .index = l};
}

void exec_release(struct exec *x)
{
    for (int i = 0; i < x->n_captured; i++)
        x->dev->vt->capture_free(x->dev, x->captured[i].piece);
    free(x->captured);
    free(x->uses_left);
    free(x->lane_next);
    free(x->add);
    *x = (struct exec){0};
}

int exec_prepare(struct exec *x, const struct plan *p, struct err *e)
{
    TRY(mem_grow((void **)&x->uses_left, &x->cap_uses_left, (size_t)p->n_inst, sizeof *x->uses_left, e));
    size_t most = 0;
    for (int i = 0; i < p->n_steps; i++)
        most = step_phase(p, &p->steps[i])->n_uses > (int)most ? (size_t)step_phase(p, &p->steps[i])->n_uses : most;
    TRY(mem_grow((void **)&x->add, &x->cap_add, most + 1, sizeof *x->add, e));
    /* next step on the same lane, for each step; then the head of each lane; then done flags */
    return mem_grow((void **)&x->lane_next, &x->cap_lane_next, 2 * (size_t)p->n_steps + LANE_COUNT,
                    sizeof *x->lane_next, e);
}

static bool writes(enum use_mode m) { return m != USE_READ; }

static int check_finite(const struct exec *x, const struct plan *p, const struct step *s, struct err *e)
{
    const struct phase *ph = step_phase(p, s);
    int st = ST_OK;
    for (int u = 0; u < ph->n_uses && st == ST_OK; u++) {
        const struct tensor *t = &s->t[u];
        bool is_real = t->dtype == DT_F64 || t->dtype == DT_F32 || t->dtype == DT_BF16;
        if (s->instance[u] < 0 || !writes(ph->use[u].mode) || !is_real || p->g->slots[ph->use[u].slot].unwanted ||
            p->g->slots[ph->use[u].slot].host) /* a copy of what has been checked */
            continue;
        struct tensor host;
        TRY(dev_fetch(x->dev, t, &host, e));
        for (int64_t i = 0, n = tensor_elems(&host); st == ST_OK && i < n; i++) {
            double v = tensor_get(&host, i);
            if (!isfinite(v))
                st = err_set(e, ST_NONFINITE,
                             "first non-finite value: %g at element %lld of slot %s, written by node %s (%s)", v,
                             (long long)i, p->g->slots[p->inst[s->instance[u]].slot].name,
                             p->g->nodes[s->ref.node].name, phase_name(s->ref.phase));
        }
        dev_fetched(x->dev, &host);
    }
    return st;
}

static void count_uses(struct exec *x, const struct plan *p)
{
    for (int i = 0; i < p->n_inst; i++)
        x->uses_left[i] = 0;
    for (int i = 0; i < p->n_inst; i++)
        x->uses_left[root_of(p, i)] += p->inst[i].n_uses;
}

/* After the last use of an activation, its bytes become NaN. Scratch is poisoned by the same rule. */
static int poison_dead(struct exec *x, const struct plan *p, const struct step *s, struct err *e)
{
    for (int u = 0; u < step_phase(p, s)->n_uses; u++) {
        if (s->instance[u] < 0 || p->g->slots[p->inst[s->instance[u]].slot].arena >= 0)
            continue;
        int root = root_of(p, s->instance[u]);
        if (--x->uses_left[root] > 0)
            continue;
        if (p->inst[root].arena != ARENA_HOST) {
            TRY(x->dev->vt->fill(x->dev, s->t[u].data, 0xFF, tensor_bytes(&s->t[u]), e));
        } else {
            TRY(x->dev->vt->sync(x->dev, e));
            memset(s->t[u].data, 0xFF, (size_t)tensor_bytes(&s->t[u]));
        }
    }
    return ST_OK;
}

/* runs: one per microbatch. */
static int run_step(struct exec *x, const struct plan *p, int index, const struct run_info *runs, struct err *e)
{
    const struct step *s = &p->steps[index];
    const struct run_info *run = &runs[s->ref.mb];
    const struct node *node = &p->g->nodes[s->ref.node];
    const struct phase *ph = &node->phase[s->ref.phase];
    bool *add = x->add;
    for (int u = 0; u < ph->n_uses; u++) {
        bool persistent = s->instance[u] >= 0 && p->g->slots[p->inst[s->instance[u]].slot].arena >= 0;
        add[u] = ph->use[u].mode == USE_ADD && !(s->first[u] && (runs[0].first_mb || !persistent));
    }
    struct lane *lane = &x->lane[s->lane];
    lane->err = e;
    const struct step_ctx c = {.ops = x->ops,
                               .lane = lane,
                               .self = node->self,
                               .t = s->t,
                               .add = add,
                               .phase = ph,
                               .run = run,
                               .mb = s->ref.mb};
    double begin = x->trace ? time_now() : 0;
    if (x->dev->vt->range_begin != NULL)
        x->dev->vt->range_begin(x->dev, node->name);
    int st = ph->fn(&c);
    if (x->dev->vt->range_end != NULL)
        x->dev->vt->range_end(x->dev);
    if (st == ST_OK && (x->sync || x->trace))
        st = x->dev->vt->sync(x->dev, e);
    if (x->trace)
        trace_add(x->trace, p, index, begin, time_now());
    if (st == ST_OK && x->find_nan)
        st = check_finite(x, p, s, e);
    if (st == ST_OK && x->poison)
        st = poison_dead(x, p, s, e);
    if (st != ST_OK && p->n_mb > 1)
        err_in(e, "node %s (%s), microbatch %d, step %lld, plan '%s'", node->name, phase_name(s->ref.phase), s->ref.mb,
               (long long)run->step, p->name);
    else if (st != ST_OK)
        err_in(e, "node %s (%s), step %lld, plan '%s'", node->name, phase_name(s->ref.phase), (long long)run->step,
               p->name);
    return st;
}

static bool may_start(const struct plan *p, int step, const int *done)
{
    for (int w = 0; w < p->steps[step].n_waits; w++)
        if (!done[p->steps[step].wait[w]])
            return false;
    return true;
}

/* One of the n lanes that are ready. In most runs one lane is late: it is chosen when no other can go on, and seldom
 * otherwise. A wait that leaves much room, as in overlapped schedules, would hardly ever be tested without that. */
static int pick_lane(struct exec *x, int *ready, int n, int late)
{
    for (int i = 0; i < n && n > 1; i++)
        if (ready[i] == late && rng_below(x->random_lanes, x->draws++, 32) != 0)
            ready[i--] = ready[--n];
    return ready[rng_below(x->random_lanes, x->draws++, (uint64_t)n)];
}

/* Lanes as queues: pick a random lane whose head has all its waits satisfied. */
static int run_random(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e)
{
    int *next = x->lane_next, *done = next + p->n_steps, *head = done + p->n_steps, tail[LANE_COUNT];
    for (int l = 0; l < LANE_COUNT; l++)
        head[l] = tail[l] = -1;
    for (int i = 0; i < p->n_steps; i++) {
        int l = p->steps[i].lane;
        next[i] = -1;
        done[i] = 0;
        if (tail[l] >= 0)
            next[tail[l]] = i;
        else
            head[l] = i;
        tail[l] = i;
    }
    int late = (int)rng_below(x->random_lanes, x->draws++, LANE_COUNT + 1); /* LANE_COUNT: none */
    for (int left = p->n_steps; left > 0; left--) {
        int ready[LANE_COUNT], n = 0;
        for (int l = 0; l < LANE_COUNT; l++)
            if (head[l] >= 0 && may_start(p, head[l], done))
                ready[n++] = l;
        if (n == 0)
            return err_set(e, ST_INTERNAL, "plan '%s' is stuck: every lane waits, %d steps left", p->name, left);
        int l = pick_lane(x, ready, n, late);
        TRY(run_step(x, p, head[l], run, e));
        done[head[l]] = 1;
        head[l] = next[head[l]];
    }
    return ST_OK;
}

/* Events: one per step, then one at the start and one per lane at the end. */
static int event_start(const struct plan *p) { return p->n_steps; }
static int event_end(const struct plan *p, int lane) { return p->n_steps + 1 + lane; }

/* Lane 0 is the lane of the caller: the others start after what it has done so far, and it goes on after them. */
static int fork_lanes(struct exec *x, const struct plan *p, struct err *e)
{
    const struct dev_vt *vt = x->dev->vt;
    if (vt->record == NULL)
        return ST_OK;
    TRY(vt->record(x->dev, 0, event_start(p), e));
    for (int l = 1; l < LANE_COUNT; l++)
        if (p->uses_lane[l])
            TRY(vt->wait(x->dev, l, event_start(p), e));
    return ST_OK;
}

static int join_lanes(struct exec *x, const struct plan *p, struct err *e)
{
    const struct dev_vt *vt = x->dev->vt;
    for (int l = 1; vt->record != NULL && l < LANE_COUNT; l++) {
        if (!p->uses_lane[l])
            continue;
        TRY(vt->record(x->dev, l, event_end(p, l), e));
        TRY(vt->wait(x->dev, 0, event_end(p, l), e));
    }
    return ST_OK;
}

static bool from_host(const struct plan *p, int step) { return p->g->nodes[p->steps[step].ref.node].host; }

static int run_list(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e)
{
    const struct dev_vt *vt = x->dev->vt;
    TRY(fork_lanes(x, p, e));
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        if (from_host(p, i))
            continue;
        for (int w = 0; vt->wait != NULL && w < s->n_waits; w++)
            if (!from_host(p, s->wait[w])) /* those were done before the lanes parted */
                TRY(vt->wait(x->dev, s->lane, s->wait[w], e));
        TRY(run_step(x, p, i, run, e));
        if (s->waited && vt->record != NULL)
            TRY(vt->record(x->dev, s->lane, i, e));
    }
    return join_lanes(x, p, e);
}

static int find_captured(struct exec *x, const struct plan *p, const struct run_info *run, struct captured **out,
                         bool *is_new, struct err *e)
{
    bool first_mb = run->first_mb, last_mb = run->last_mb;
    *is_new = false;
    for (int i = 0; i < x->n_captured; i++)
        if (x->captured[i].p == p && x->captured[i].first_mb == first_mb && x->captured[i].last_mb == last_mb) {
            *out = &x->captured[i];
            return ST_OK;
        }
    TRY(mem_grow((void **)&x->captured, &x->cap_captured, (size_t)x->n_captured + 1, sizeof *x->captured, e));
    *out = &x->captured[x->n_captured++];
    **out = (struct captured){.p = p, .first_mb = first_mb, .last_mb = last_mb};
    *is_new = true;
    return ST_OK;
}

/* The first run goes step by step (libraries choose their algorithms), the second is captured. */
static int run_captured(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e)
{
    struct captured *c;
    bool is_new;
    TRY(find_captured(x, p, run, &c, &is_new, e));
    if (is_new)
        return run_list(x, p, run, e);
    if (c->piece == NULL) {
        TRY(x->dev->vt->capture_begin(x->dev, e));
        int st = run_list(x, p, run, e);
        struct err second = {0};
        int ended = x->dev->vt->capture_end(x->dev, &c->piece, st == ST_OK ? e : &second);
        TRY(st != ST_OK ? st : ended);
    }
    return x->dev->vt->capture_run(x->dev, c->piece, e);
}

int exec_run(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e)
{
    dev_between_runs(x->dev);
    if (x->poison)
        count_uses(x, p);
    if (x->random_lanes != 0)
        return run_random(x, p, run, e);
    for (int i = 0; i < p->n_steps; i++)
        if (from_host(p, i))
            TRY(run_step(x, p, i, run, e));
    bool watched = x->poison || x->find_nan || x->sync || x->trace != NULL;
    if (x->capture && !watched && x->dev->vt->capture_begin != NULL)
        return run_captured(x, p, run, e);
    return run_list(x, p, run, e);
}
