/* Running a plan: in list order, or, to prove that the waits suffice, in a random order that respects
 * lanes and waits only. Dead slots can be poisoned, outputs searched for NaN. */
#include "plan/plan_int.h"

#include <math.h>
#include <stdlib.h>

void exec_init(struct exec *x, struct dev *dev)
{
    *x = (struct exec){.dev = dev, .ops = ops_for(dev)};
    for (int l = 0; l < LANE_COUNT; l++)
        x->lane[l] = (struct lane){.dev = dev, .index = l};
}

void exec_release(struct exec *x)
{
    free(x->uses_left);
    free(x->lane_next);
    *x = (struct exec){0};
}

int exec_prepare(struct exec *x, const struct plan *p, struct err *e)
{
    TRY(mem_grow((void **)&x->uses_left, &x->cap_uses_left, (size_t)p->n_inst, sizeof *x->uses_left, e));
    /* next step on the same lane, for each step; then the head of each lane; then done flags */
    return mem_grow((void **)&x->lane_next, &x->cap_lane_next, 2 * (size_t)p->n_steps + LANE_COUNT, sizeof *x->lane_next, e);
}

static bool writes(enum use_mode m) { return m != USE_READ; }

static int check_finite(const struct exec *x, const struct plan *p, const struct step *s, struct err *e)
{
    const struct phase *ph = step_phase(p, s);
    for (int u = 0; u < ph->n_uses; u++) {
        const struct tensor *t = &s->t[u];
        bool is_real = t->dtype == DT_F64 || t->dtype == DT_F32 || t->dtype == DT_BF16;
        if (s->instance[u] < 0 || !writes(ph->use[u].mode) || !is_real || x->dev->kind == DEV_CUDA)
            continue;
        for (int64_t i = 0, n = tensor_elems(t); i < n; i++) {
            double v = tensor_get(t, i);
            if (!isfinite(v))
                return err_set(e, ST_NONFINITE, "first non-finite value: %g at element %lld of slot %s, written by node %s (%s)",
                               v, (long long)i, p->g->slots[p->inst[s->instance[u]].slot].name,
                               p->g->nodes[s->ref.node].name, phase_name(s->ref.phase));
        }
    }
    return ST_OK;
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
        if (--x->uses_left[root] == 0)
            TRY(x->dev->vt->fill(x->dev, s->t[u].data, 0xFF, tensor_bytes(&s->t[u]), e));
    }
    return ST_OK;
}

static int run_step(struct exec *x, const struct plan *p, int index, const struct run_info *run, struct err *e)
{
    const struct step *s = &p->steps[index];
    const struct node *node = &p->g->nodes[s->ref.node];
    const struct phase *ph = &node->phase[s->ref.phase];
    bool add[NODE_MAX_USES];
    for (int u = 0; u < ph->n_uses; u++) {
        bool persistent = s->instance[u] >= 0 && p->g->slots[p->inst[s->instance[u]].slot].arena >= 0;
        add[u] = ph->use[u].mode == USE_ADD && !(s->first[u] && (run->first_mb || !persistent));
    }
    struct lane *lane = &x->lane[s->lane];
    lane->err = e;
    const struct step_ctx c = {.ops = x->ops, .lane = lane, .self = node->self, .t = s->t, .add = add, .run = run};
    double begin = x->trace ? time_now() : 0;
    int st = ph->fn(&c);
    if (st == ST_OK && (x->sync || x->trace))
        st = x->dev->vt->sync(x->dev, e);
    if (x->trace)
        trace_add(x->trace, p, index, begin, time_now());
    if (st == ST_OK && x->find_nan)
        st = check_finite(x, p, s, e);
    if (st == ST_OK && x->poison)
        st = poison_dead(x, p, s, e);
    if (st != ST_OK)
        err_in(e, "node %s (%s), step %lld, plan '%s'", node->name, phase_name(s->ref.phase), (long long)run->step, p->name);
    return st;
}

static bool may_start(const struct plan *p, int step, const int *done)
{
    for (int w = 0; w < p->steps[step].n_waits; w++)
        if (!done[p->steps[step].wait[w]])
            return false;
    return true;
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
    for (int left = p->n_steps; left > 0; left--) {
        int ready[LANE_COUNT], n = 0;
        for (int l = 0; l < LANE_COUNT; l++)
            if (head[l] >= 0 && may_start(p, head[l], done))
                ready[n++] = l;
        if (n == 0)
            return err_set(e, ST_INTERNAL, "plan '%s' is stuck: every lane waits, %d steps left", p->name, left);
        int l = ready[rng_below(x->random_lanes, x->draws++, (uint64_t)n)];
        TRY(run_step(x, p, head[l], run, e));
        done[head[l]] = 1;
        head[l] = next[head[l]];
    }
    return ST_OK;
}

int exec_run(struct exec *x, const struct plan *p, const struct run_info *run, struct err *e)
{
    if (x->poison)
        count_uses(x, p);
    if (x->random_lanes != 0)
        return run_random(x, p, run, e);
    for (int i = 0; i < p->n_steps; i++)
        TRY(run_step(x, p, i, run, e));
    return ST_OK;
}
