/* Times of a schedule from the times of its tasks: several ranks, each with lanes that work in order, waits within a
 * rank, messages and collectives between ranks. No event queue: a task's times follow from those before it, so lanes
 * are walked until nothing moves; what is left then waits for itself, in a cycle. */
#include "plan/plan_int.h"
#include "plan/simulate.h"

#include <stdlib.h>
#include <string.h>

int sim_open(struct sim *s, int n_ranks, struct err *e)
{
    *s = (struct sim){.n_ranks = n_ranks};
    return mem_array((void **)&s->rank, (size_t)n_ranks, sizeof *s->rank, e);
}

void sim_close(struct sim *s)
{
    for (int r = 0; s->rank != NULL && r < s->n_ranks; r++)
        free(s->rank[r].task);
    free(s->rank);
    *s = (struct sim){0};
}

int sim_add(struct sim *s, int rank, const struct sim_task *t, struct err *e)
{
    struct sim_rank *r = &s->rank[rank];
    TRY(mem_grow((void **)&r->task, &r->cap, (size_t)r->n + 1, sizeof *r->task, e));
    r->task[r->n++] = *t;
    r->n_frames = t->frame + 1 > r->n_frames ? t->frame + 1 : r->n_frames;
    return ST_OK;
}

/* ---- tasks from units and plans -------------------------------------------------------------- */

/* A message over the border before segment `border`: forward its stream, backward its gradient. */
static int64_t message_key(int border, int mb, bool backward)
{
    return ((int64_t)border * 2 + backward) << 32 | (uint32_t)mb;
}

/* border < 0 or `last`: an end of the model, no message. */
static int add_message(struct sim *s, int rank, enum sim_kind kind, int border, int last, const struct schedule_unit *u,
                       struct err *e)
{
    if (border <= 0 || border >= last)
        return ST_OK;
    const struct sim_task t = {.kind = kind,
                               .key = message_key(border, u->mb, u->backward),
                               .frame = -1,
                               .phase = u->backward ? PH_BWD : PH_FWD,
                               .name = kind == SIM_SEND ? "send" : "receive"};
    return sim_add(s, rank, &t, e);
}

static int add_receive(struct sim *s, const struct schedule_opts *o, const struct schedule_unit *u, struct err *e)
{
    int pp = o->pp > 0 ? o->pp : 1, vpp = o->vpp > 0 ? o->vpp : 1, segment = u->chunk * pp + o->pp_rank;
    return add_message(s, o->pp_rank, SIM_RECV, u->backward ? segment + 1 : segment, pp * vpp, u, e);
}

static int add_work(struct sim *s, const struct schedule_opts *o, const struct schedule_unit *u, double seconds,
                    struct err *e)
{
    int pp = o->pp > 0 ? o->pp : 1, vpp = o->vpp > 0 ? o->vpp : 1, segment = u->chunk * pp + o->pp_rank;
    const struct sim_task t = {.kind = SIM_WORK,
                               .seconds = seconds,
                               .frame = u->chunk * o->n_mb + u->mb,
                               .phase = u->backward ? PH_BWD : PH_FWD,
                               .name = u->backward ? "backward" : "forward"};
    TRY(sim_add(s, o->pp_rank, &t, e));
    return add_message(s, o->pp_rank, SIM_SEND, u->backward ? segment : segment + 1, pp * vpp, u, e);
}

int sim_add_units(struct sim *s, const struct schedule_opts *o, const struct schedule_units *units, double forward,
                  double backward, struct err *e)
{
    for (int i = 0; i < units->n; i++) {
        const struct schedule_unit *u = &units->u[i];
        bool second = i > 0 && u[-1].paired; /* its receive came with the first's */
        if (!second)
            TRY(add_receive(s, o, u, e));
        if (u->paired)
            TRY(add_receive(s, o, u + 1, e));
        TRY(add_work(s, o, u, u->backward ? backward : forward, e));
    }
    return ST_OK;
}

/* Collectives so far. */
struct meetings {
    int64_t group, line, team;
};

/* What a step of a plan is to the other ranks. */
static void set_kind(struct sim_task *t, const struct sim_place *at, const struct node *n, const struct step_ref *r,
                     struct meetings *meetings)
{
    int segment = n->chunk * at->pp + at->pp_rank;
    bool backward = r->phase == PH_BWD;
    if (n->role == ROLE_CUT_IN || n->role == ROLE_CUT_OUT) {
        bool in = n->role == ROLE_CUT_IN;
        t->kind = in == backward ? SIM_SEND : SIM_RECV;
        t->key = message_key(in ? segment : segment + 1, r->mb, backward);
    } else if ((n->role == ROLE_DISPATCH || n->role == ROLE_COMBINE) && at->group >= 0) {
        t->kind = SIM_GROUP;
        t->key = INT64_MIN + ((int64_t)at->group << 40) + meetings->group++;
    } else if ((n->role == ROLE_CONTEXT || n->role == ROLE_RING) && at->line >= 0) {
        int64_t number = meetings->line++;
        if (n->phase[r->phase].bytes > 0) { /* else it is between two others */
            t->kind = SIM_GROUP;
            t->key = INT64_MIN / 2 + ((int64_t)at->line << 40) + number;
        }
    } else if (role_is_shard(n->role) && at->team >= 0) {
        t->kind = SIM_GROUP;
        t->key = INT64_MIN / 4 + ((int64_t)at->team << 40) + meetings->team++;
    }
}

int sim_add_plan(struct sim *s, const struct sim_place *at, const struct plan *p, sim_seconds seconds, const void *ctx,
                 struct err *e)
{
    struct meetings meetings = {0};
    int first = s->rank[at->rank].n;
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *st = &p->steps[i];
        const struct node *n = &p->g->nodes[st->ref.node];
        struct sim_task t = {.lane = st->lane,
                             .seconds = seconds(ctx, p, i),
                             .n_waits = st->n_waits,
                             .phase = (int)st->ref.phase,
                             .frame = n->host ? -1 : n->chunk * p->n_mb + st->ref.mb,
                             .name = n->name,
                             .works = n->phase[st->ref.phase].flops > 0};
        for (int w = 0; w < st->n_waits; w++)
            t.wait[w] = first + st->wait[w];
        set_kind(&t, at, n, &st->ref, &meetings);
        TRY(sim_add(s, at->rank, &t, e));
    }
    return ST_OK;
}

/* ---- running --------------------------------------------------------------------------------- */

/* Where the tasks with a key are. */
struct meeting {
    int64_t key;
    enum sim_kind kind;
    int rank, task;
};
struct state {
    struct sim *s;
    struct meeting *m; /* sends and groups, by key */
    int n_m;
    int *next;       /* [rank * LANE_COUNT + lane] next task of a lane, n: none */
    double *free_at; /* [rank * LANE_COUNT + lane] */
    bool **done;
    struct err *e;
};

static int by_key(const void *a, const void *b)
{
    const struct meeting *x = a, *y = b;
    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->rank != y->rank ? x->rank - y->rank : x->task - y->task;
}

static int find_meetings(struct state *t)
{
    size_t cap = 0;
    for (int r = 0; r < t->s->n_ranks; r++)
        for (int i = 0; i < t->s->rank[r].n; i++) {
            const struct sim_task *k = &t->s->rank[r].task[i];
            if (k->kind != SIM_SEND && k->kind != SIM_GROUP)
                continue;
            TRY(mem_grow((void **)&t->m, &cap, (size_t)t->n_m + 1, sizeof *t->m, t->e));
            t->m[t->n_m++] = (struct meeting){.key = k->key, .kind = k->kind, .rank = r, .task = i};
        }
    if (t->n_m > 0)
        qsort(t->m, (size_t)t->n_m, sizeof *t->m, by_key);
    return ST_OK;
}

static int first_with(const struct state *t, int64_t key)
{
    int lo = 0, hi = t->n_m;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (t->m[mid].key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static int lane_of(const struct state *t, const struct sim_task *k) { return t->s->in_list_order ? 0 : k->lane; }

/* Can the task start as far as its own rank is concerned? Then its ready time is set. */
static bool is_ready(const struct state *t, int rank, int task)
{
    struct sim_rank *r = &t->s->rank[rank];
    struct sim_task *k = &r->task[task];
    int lane = lane_of(t, k);
    if (t->next[rank * LANE_COUNT + lane] != task)
        return false;
    k->ready = t->free_at[rank * LANE_COUNT + lane];
    for (int w = 0; w < k->n_waits; w++) {
        if (!t->done[rank][k->wait[w]])
            return false;
        k->ready = k->ready > r->task[k->wait[w]].end ? k->ready : r->task[k->wait[w]].end;
    }
    return true;
}

/* Whether other ranks allow the task to start; false: not yet. */
static bool may_start(const struct state *t, const struct sim_task *k, double *start)
{
    *start = k->ready;
    if (k->kind != SIM_RECV && k->kind != SIM_GROUP)
        return true;
    int m = first_with(t, k->key), met = 0;
    for (; m < t->n_m && t->m[m].key == k->key; m++, met++) {
        const struct sim_task *other = &t->s->rank[t->m[m].rank].task[t->m[m].task];
        if (k->kind == SIM_RECV ? !t->done[t->m[m].rank][t->m[m].task]
                                : !t->done[t->m[m].rank][t->m[m].task] && !is_ready(t, t->m[m].rank, t->m[m].task))
            return false;
        double then = k->kind == SIM_RECV ? other->end : other->ready;
        *start = *start > then ? *start : then;
    }
    return met > 0;
}

static bool advance(struct state *t, int rank, int lane)
{
    struct sim_rank *r = &t->s->rank[rank];
    int *next = &t->next[rank * LANE_COUNT + lane];
    bool moved = false;
    double start;
    while (*next < r->n && is_ready(t, rank, *next) && may_start(t, &r->task[*next], &start)) {
        struct sim_task *k = &r->task[*next];
        k->start = start;
        k->end = start + k->seconds;
        t->free_at[rank * LANE_COUNT + lane] = k->end;
        t->done[rank][*next] = moved = true;
        t->s->makespan = t->s->makespan > k->end ? t->s->makespan : k->end;
        do
            ++*next;
        while (*next < r->n && lane_of(t, &r->task[*next]) != lane);
    }
    return moved;
}

static int stuck(const struct state *t)
{
    struct buf who;
    buf_init(&who, 300);
    for (int r = 0; r < t->s->n_ranks; r++)
        for (int l = 0; l < LANE_COUNT; l++) {
            int i = t->next[r * LANE_COUNT + l];
            if (i < t->s->rank[r].n)
                buf_addf(&who, "%srank %d, lane %s, task %d (%s)", who.len > 0 ? "; " : "", r, lane_name(l), i,
                         t->s->rank[r].task[i].name ? t->s->rank[r].task[i].name : "?");
        }
    err_set(t->e, ST_INVALID, "the schedule is stuck: %s", who.text ? who.text : "?");
    buf_release(&who);
    return ST_INVALID;
}

static int run(struct state *t)
{
    struct sim *s = t->s;
    TRY(find_meetings(t));
    TRY(mem_array((void **)&t->next, (size_t)s->n_ranks * LANE_COUNT, sizeof *t->next, t->e));
    TRY(mem_array((void **)&t->free_at, (size_t)s->n_ranks * LANE_COUNT, sizeof *t->free_at, t->e));
    TRY(mem_array((void **)&t->done, (size_t)s->n_ranks, sizeof *t->done, t->e));
    for (int r = 0; r < s->n_ranks; r++) {
        TRY(mem_array((void **)&t->done[r], (size_t)s->rank[r].n + 1, sizeof *t->done[r], t->e));
        for (int l = 0; l < LANE_COUNT; l++) {
            int *next = &t->next[r * LANE_COUNT + l];
            while (*next < s->rank[r].n && lane_of(t, &s->rank[r].task[*next]) != l)
                ++*next;
        }
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < s->n_ranks; r++)
            for (int l = 0; l < LANE_COUNT; l++)
                moved |= advance(t, r, l);
    }
    for (int i = 0; i < s->n_ranks * LANE_COUNT; i++)
        if (t->next[i] < s->rank[i / LANE_COUNT].n)
            return stuck(t);
    return ST_OK;
}

/* ---- what it means --------------------------------------------------------------------------- */

struct span {
    double begin, end;
    int phase; /* -1: computed */
};

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Time of [begin, end) that none of the n sorted spans covers; *at: where the search may start next time. */
static double uncovered(const struct span *spans, int n, int *at, double begin, double end)
{
    double open = 0;
    while (*at < n && spans[*at].end <= begin)
        ++*at;
    for (int i = *at; i < n && spans[i].begin < end && begin < end; i++) {
        if (spans[i].begin > begin)
            open += spans[i].begin - begin;
        begin = begin > spans[i].end ? begin : spans[i].end;
    }
    return open + (end > begin ? end - begin : 0);
}

/* Sorted spans made disjoint. */
static int join_spans(struct span *spans, int n)
{
    int k = 0;
    if (n > 0)
        qsort(spans, (size_t)n, sizeof *spans, by_begin);
    for (int i = 0; i < n; i++) {
        if (k > 0 && spans[i].begin <= spans[k - 1].end)
            spans[k - 1].end = spans[k - 1].end > spans[i].end ? spans[k - 1].end : spans[i].end;
        else
            spans[k++] = spans[i];
    }
    return k;
}

static void measure_lanes(struct sim *s, struct sim_rank *r, struct span *computed, struct span *moved)
{
    int n = 0, m = 0, at = 0;
    for (int i = 0; i < r->n; i++) {
        const struct sim_task *k = &r->task[i];
        r->busy[k->lane] += k->end - k->start;
        if (k->end <= k->start)
            continue;
        struct span span = {.begin = k->start, .end = k->end, .phase = k->phase};
        if ((k->lane == LANE_COMM || k->lane == LANE_COPY || k->lane == LANE_UPDATE) && !k->works)
            moved[m++] = span;
        else
            computed[n++] = span;
    }
    n = join_spans(computed, n);
    if (m > 0)
        qsort(moved, (size_t)m, sizeof *moved, by_begin); /* of two lanes */
    for (int i = 0; i < m; i++)
        r->exposed[moved[i].phase] += uncovered(computed, n, &at, moved[i].begin, moved[i].end);
    for (int i = 0; i < m; i++)
        computed[n++] = moved[i];
    n = join_spans(computed, n);
    at = 0;
    r->idle = uncovered(computed, n, &at, 0, s->makespan);
}

/* A frame lives from the start of its first task to the end of its last. */
static void count_frames(struct sim_rank *r, struct span *frames)
{
    for (int f = 0; f < r->n_frames; f++)
        frames[f] = (struct span){.begin = -1};
    for (int i = 0; i < r->n; i++) {
        const struct sim_task *k = &r->task[i];
        if (k->frame < 0)
            continue;
        struct span *f = &frames[k->frame];
        f->begin = f->begin < 0 || k->start < f->begin ? k->start : f->begin;
        f->end = k->end > f->end ? k->end : f->end;
    }
    for (int f = 0; f < r->n_frames; f++) {
        int alive = 0; /* when f begins */
        for (int k = 0; k < r->n_frames; k++)
            alive += frames[k].begin >= 0 && frames[k].begin <= frames[f].begin && frames[f].begin < frames[k].end;
        r->peak_frames = alive > r->peak_frames ? alive : r->peak_frames;
    }
}

static int measure(struct sim *s, struct err *e)
{
    for (int i = 0; i < s->n_ranks; i++) {
        struct sim_rank *r = &s->rank[i];
        struct span *a = NULL, *b = NULL, *f = NULL;
        int st;
        TRY_OUT(mem_array((void **)&a, 2 * (size_t)r->n + 1, sizeof *a, e));
        TRY_OUT(mem_array((void **)&b, (size_t)r->n + 1, sizeof *b, e));
        TRY_OUT(mem_array((void **)&f, (size_t)r->n_frames + 1, sizeof *f, e));
        measure_lanes(s, r, a, b);
        count_frames(r, f);
    out:
        free(a);
        free(b);
        free(f);
        TRY(st);
    }
    return ST_OK;
}

int sim_run(struct sim *s, struct err *e)
{
    struct state t = {.s = s, .e = e};
    s->makespan = 0;
    int st = run(&t);
    for (int r = 0; t.done != NULL && r < s->n_ranks; r++)
        free(t.done[r]);
    free(t.done);
    free(t.m);
    free(t.next);
    free(t.free_at);
    return st == ST_OK ? measure(s, e) : st;
}
