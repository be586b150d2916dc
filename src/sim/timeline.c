/* Plans of all ranks without memory, their steps as tasks of the simulator, and the results; see timeline.h. */
#include "sim/timeline.h"

#include <stdlib.h>
#include <string.h>

const char *task_kind_name(enum task_kind k)
{
    static const char *const names[] = {"forward", "backward", "dw",     "replay",  "update", "dispatch", "combine",
                                        "cut",     "reduce",   "gather", "context", "rows",   "host",     "summary"};
    return names[k];
}

/* ---- tasks ----------------------------------------------------------------------------------- */

static int half_open(struct timeline_half *h, int n, struct err *e)
{
    TRY(sim_open(&h->sim, n, e));
    TRY(mem_array((void **)&h->mark, (size_t)n, sizeof *h->mark, e));
    return mem_array((void **)&h->cap, (size_t)n, sizeof *h->cap, e);
}

static void half_close(struct timeline_half *h)
{
    for (int r = 0; h->mark != NULL && r < h->sim.n_ranks; r++)
        free(h->mark[r]);
    free(h->mark);
    free(h->cap);
    sim_close(&h->sim);
    *h = (struct timeline_half){0};
}

static int add_mark(struct timeline_half *h, int rank, int at, struct task_mark mark, struct err *e)
{
    TRY(mem_grow((void **)&h->mark[rank], &h->cap[rank], (size_t)at + 1, sizeof **h->mark, e));
    h->mark[rank][at] = mark;
    return ST_OK;
}

/* Between two runs of a plan every lane waits for all others. */
static int add_join(struct timeline_half *h, int rank, struct err *e)
{
    int last[LANE_COUNT];
    struct sim_rank *r = &h->sim.rank[rank];
    for (int l = 0; l < LANE_COUNT; l++)
        last[l] = -1;
    for (int i = 0; i < r->n; i++)
        last[r->task[i].lane] = i;
    struct sim_task join = {.lane = LANE_COMPUTE, .frame = -1, .name = "join"};
    for (int l = 0; l < LANE_COUNT; l++)
        if (l != LANE_COMPUTE && last[l] >= 0)
            join.wait[join.n_waits++] = last[l];
    int at = r->n;
    TRY(add_mark(h, rank, at, (struct task_mark){.kind = KIND_SUMMARY}, e));
    TRY(sim_add(&h->sim, rank, &join, e));
    for (int l = 0; l < LANE_COUNT; l++) {
        if (l == LANE_COMPUTE || last[l] < 0)
            continue;
        const struct sim_task go = {.lane = l, .frame = -1, .name = "join", .n_waits = 1, .wait = {at}};
        TRY(add_mark(h, rank, h->sim.rank[rank].n, (struct task_mark){.kind = KIND_SUMMARY}, e));
        TRY(sim_add(&h->sim, rank, &go, e));
    }
    return ST_OK;
}

/* One run of a plan. mb: of a plan that holds one microbatch. */
static int add_run(struct timeline *tl, struct timeline_half *h, int r, const struct plan *p, int mb, struct err *e)
{
    const struct mesh *m = &tl->rank[r].t.model.mesh;
    struct step_cost cost = step_cost_of(&tl->machine, tl->times, &tl->rank[r].t);
    const struct sim_place at = {.rank = r,
                                 .pp = m->pp,
                                 .pp_rank = m->pp_rank,
                                 .vpp = m->vpp,
                                 .group = tl->column ? -1 : m->pp_rank * m->edp + m->edp_rank,
                                 .line = (m->pp_rank * m->dp + m->dp_rank) * m->tp + m->tp_rank,
                                 .team = tl->column ? -1 : (m->pp_rank * m->dp + m->dp_rank) * m->cp + m->cp_rank};
    cost.first_mb = mb == 0;
    cost.last_mb = mb + p->n_mb >= tl->rank[r].t.n_micro;
    int first = h->sim.rank[r].n;
    TRY(sim_add_plan(&h->sim, &at, p, step_seconds, &cost, e));
    for (int i = 0; i < p->n_steps; i++) {
        struct sim_task *t = &h->sim.rank[r].task[first + i];
        const struct task_mark mark = {
            .kind = step_kind(p, i), .mb = p->steps[i].ref.mb + mb, .chunk = p->g->nodes[p->steps[i].ref.node].chunk};
        if (t->kind == SIM_GROUP) /* each run meets anew */
            t->key += (int64_t)mb << 24;
        if (t->kind == SIM_SEND || t->kind == SIM_RECV)
            t->key += mb;
        TRY(add_mark(h, r, first + i, mark, e));
    }
    return ST_OK;
}

/* Reductions and gathers meet within a stage, norms everywhere. */
static void meet_in_update(struct timeline *tl, int r)
{
    const struct mesh *m = &tl->rank[r].t.model.mesh;
    struct sim_rank *rank = &tl->update.sim.rank[r];
    int64_t met = 0;
    for (int i = 0; i < rank->n; i++) {
        struct sim_task *t = &rank->task[i];
        enum task_kind kind = tl->update.mark[r][i].kind;
        t->frame = -1;
        bool all = t->name != NULL && strcmp(t->name, "update.clip.share") == 0;
        if (all || (!tl->column && (kind == KIND_REDUCE || kind == KIND_GATHER))) {
            t->kind = SIM_GROUP;
            t->key = all ? INT64_MAX : ((int64_t)1 << 60) + ((int64_t)m->pp_rank << 32) + met++;
        }
    }
}

/* ---- what is found --------------------------------------------------------------------------- */

struct span {
    double begin, end;
};

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* A head that ranks share computes on the lane of its messages. */
static bool computes(const struct sim_task *t)
{
    return (t->works || t->lane == LANE_COMPUTE || t->lane == LANE_SIDE) && t->end > t->start;
}
static bool moves(const struct sim_task *t)
{
    return !t->works && t->lane != LANE_COMPUTE && t->lane != LANE_SIDE && t->end > t->start;
}

/* Sorted, disjoint spans of the tasks that pass; returns their number. */
static int spans_of(const struct sim_rank *r, bool (*pass)(const struct sim_task *), struct span *out)
{
    int n = 0, k = 0;
    for (int i = 0; i < r->n; i++)
        if (pass(&r->task[i]))
            out[n++] = (struct span){r->task[i].start, r->task[i].end};
    if (n > 0)
        qsort(out, (size_t)n, sizeof *out, by_begin);
    for (int i = 0; i < n; i++)
        if (k > 0 && out[i].begin <= out[k - 1].end)
            out[k - 1].end = out[k - 1].end > out[i].end ? out[k - 1].end : out[i].end;
        else
            out[k++] = out[i];
    return k;
}

/* Time of the task that the spans cover. */
static double covered(const struct span *s, int n, const struct sim_task *t)
{
    int lo = 0, hi = n;
    double sum = 0;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (s[mid].end <= t->start)
            lo = mid + 1;
        else
            hi = mid;
    }
    for (int i = lo; i < n && s[i].begin < t->end; i++) {
        double a = s[i].begin > t->start ? s[i].begin : t->start, b = s[i].end < t->end ? s[i].end : t->end;
        sum += b - a;
    }
    return sum;
}

/* What computing beside a busy link loses; times of the last run decide how much of a task was beside it. */
static void slow_down(struct sim_rank *r, double beside, struct span *spans)
{
    int n = spans_of(r, moves, spans);
    for (int i = 0; i < r->n; i++) {
        struct sim_task *t = &r->task[i];
        if (computes(t))
            t->seconds += beside * covered(spans, n, t);
    }
}

static void find_exposed(struct timeline_rank *out, const struct timeline_half *h, int r, struct span *spans)
{
    const struct sim_rank *rank = &h->sim.rank[r];
    int n = spans_of(rank, computes, spans);
    for (int i = 0; i < rank->n; i++) {
        const struct sim_task *t = &rank->task[i];
        if (!moves(t))
            continue;
        out->moved[h->mark[r][i].kind] += t->end - t->start;
        out->exposed[h->mark[r][i].kind] += t->end - t->start - covered(spans, n, t);
    }
    out->bubble += rank->idle;
}

static int run_half(struct timeline *tl, struct timeline_half *h, struct err *e)
{
    struct span *spans = NULL;
    int most = 0, st;
    for (int r = 0; r < tl->n; r++)
        most = h->sim.rank[r].n > most ? h->sim.rank[r].n : most;
    TRY(mem_array((void **)&spans, (size_t)most + 1, sizeof *spans, e));
    TRY_OUT(sim_run(&h->sim, e));
    for (int r = 0; r < tl->n; r++) {
        struct sim_rank *k = &h->sim.rank[r];
        slow_down(k, tl->machine.beside, spans);
        memset(k->busy, 0, sizeof k->busy);
        memset(k->exposed, 0, sizeof k->exposed);
        k->idle = 0;
        k->peak_frames = 0;
    }
    TRY_OUT(sim_run(&h->sim, e));
    for (int r = 0; r < tl->n; r++)
        find_exposed(&tl->rank[r], h, r, spans);
out:
    free(spans);
    return st;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static int plan_rank(struct timeline *tl, int r, int rank, struct err *e)
{
    struct timeline_rank *k = &tl->rank[r];
    struct rank_place place;
    TRY(place_on_paper(&place, tl->cfg, rank, e));
    TRY(trainer_plan_on(&k->t, tl->cfg, &place, true, e));
    for (int a = 0; a < ARENA_FRAME; a++)
        k->persistent += memory_on_host(&k->t.model.mem, a) ? 0 : k->t.model.mem.planned[a];
    const struct optim *o = &k->t.optim;
    k->working =
        max_i64(max_i64(k->t.train.p.frame_bytes, o->p.frame_bytes), o->beside.frame_bytes) +
        max_i64(max_i64(k->t.train.p.work_bytes, o->beside.work_bytes), max_i64(o->p.work_bytes, o->apply.work_bytes));
    k->host = memory_total(&k->t.model.mem, k->t.model.mem.planned, true);
    return ST_OK;
}

static int add_train(struct timeline *tl, int r, struct err *e)
{
    const struct trainer *t = &tl->rank[r].t;
    for (int64_t k = 0; k < t->n_micro; k += t->train.n_micro) {
        if (k > 0)
            TRY(add_join(&tl->train, r, e));
        TRY(add_run(tl, &tl->train, r, k == 0 ? trainer_first_plan(t, true) : &t->train.p, (int)k, e));
    }
    return ST_OK;
}

/* Few ranks are all shown; of many, the first of each stage, and with parallel.cp the ranks that divide its sequences:
 * they do not have the same work. */
static int open_ranks(struct timeline *tl, struct err *e)
{
    enum { FEW = 16 };
    struct rank_place first;
    TRY(place_on_paper(&first, tl->cfg, 0, e));
    tl->column = first.mesh.world > FEW;
    int stage = first.mesh.stage, cp = first.mesh.cp;
    tl->n = tl->column ? first.mesh.pp * cp : first.mesh.world;
    TRY(mem_array((void **)&tl->rank, (size_t)tl->n, sizeof *tl->rank, e));
    TRY(half_open(&tl->train, tl->n, e));
    TRY(half_open(&tl->update, tl->n, e));
    for (int r = 0; r < tl->n; r++)
        TRY(plan_rank(tl, r, tl->column ? r / cp * stage + r % cp * first.mesh.tp : r, e));
    return ST_OK;
}

static int add_update(struct timeline *tl, struct err *e)
{
    for (int r = 0; r < tl->n; r++) {
        const struct optim *o = &tl->rank[r].t.optim;
        TRY(add_run(tl, &tl->update, r, &o->p, 0, e));
        if (o->n_buckets > 0 && o->beside.name == NULL) {
            TRY(add_join(&tl->update, r, e));
            TRY(add_run(tl, &tl->update, r, &o->apply, 0, e));
        }
        meet_in_update(tl, r);
    }
    return run_half(tl, &tl->update, e);
}

static int add_micros(struct timeline *tl, struct err *e)
{
    for (int r = 0; r < tl->n; r++)
        TRY(add_train(tl, r, e));
    return run_half(tl, &tl->train, e);
}

static int fill(struct timeline *tl, struct err *e)
{
    const struct config *c = tl->cfg;
    TRY(open_ranks(tl, e));
    TRY(add_micros(tl, e));
    TRY(add_update(tl, e));
    tl->seconds = tl->train.sim.makespan + tl->update.sim.makespan;
    double flops = 3 * model_flops_per_token(c, &tl->rank[0].t.model.pattern, c->train.seq) *
                   (double)(c->train.global_batch * c->train.seq);
    tl->tflops = flops / tl->seconds / tl->rank[0].t.model.mesh.world * 1e-12;
    return ST_OK;
}

int timeline_open(struct timeline *tl, const struct config *cfg, const struct machine *m,
                  const struct node_times *times, struct err *e)
{
    *tl = (struct timeline){.cfg = cfg, .machine = *m, .times = times};
    return fill(tl, e);
}

int timeline_open_train(struct timeline *tl, const struct config *cfg, const struct machine *m, struct err *e)
{
    *tl = (struct timeline){.cfg = cfg, .machine = *m};
    TRY(open_ranks(tl, e));
    TRY(add_micros(tl, e));
    tl->seconds = tl->train.sim.makespan;
    return ST_OK;
}

int timeline_open_update(struct timeline *tl, const struct config *cfg, const struct machine *m, struct err *e)
{
    *tl = (struct timeline){.cfg = cfg, .machine = *m};
    TRY(open_ranks(tl, e));
    TRY(add_update(tl, e));
    tl->seconds = tl->update.sim.makespan;
    return ST_OK;
}

void timeline_close(struct timeline *tl)
{
    half_close(&tl->train);
    half_close(&tl->update);
    for (int r = 0; tl->rank != NULL && r < tl->n; r++)
        trainer_close(&tl->rank[r].t);
    free(tl->rank);
    *tl = (struct timeline){0};
}

/* ---- cutting a pattern ----------------------------------------------------------------------- */

struct cutting {
    const struct config *cfg;
    const struct pattern *p;
    int pp, vpp;
    double extra;
};

static double item_work(const struct cutting *c, int i)
{
    double work = 0;
    for (int k = 0; k < c->p->items[i].n; k++) {
        char symbol = c->p->symbols[c->p->items[i].first + k];
        work += model_layer_flops(c->cfg, symbol, c->cfg->train.seq) + (symbol == 'E' ? c->extra : 0);
    }
    return work;
}

/* What follows the last layer: head, and prediction depths with heads of their own. */
static double end_work(const struct cutting *c)
{
    const struct config *cfg = c->cfg;
    const struct pattern *p = c->p;
    double depth = model_mtp_flops(cfg);
    for (int k = 0; k < p->n_mtp_layers; k++)
        depth += model_layer_flops(cfg, p->mtp_symbols[k], cfg->train.seq);
    return model_head_flops(cfg) + p->n_mtp_depths * depth;
}

static void write_items(struct buf *out, const struct pattern *p, int from, int to)
{
    for (int i = from; i < to; i++)
        buf_addf(out, p->items[i].grouped ? "[%.*s]" : "%.*s", (int)p->items[i].n, p->symbols + p->items[i].first);
}

/* Distributes items from the front so that no stage has more than `most` work, a stage's segments alike; writes them
 * where out is given. False: they do not fit. Every segment but the last gets an item. */
static bool deal(const struct cutting *c, double most, struct buf *out)
{
    const struct pattern *p = c->p;
    int n = c->pp * c->vpp, at = 0;
    bool fits = true;
    for (int s = 0; s < n; s++) {
        bool last_stage = s % c->pp == c->pp - 1;
        double room = (most - (last_stage ? end_work(c) : 0)) / c->vpp, load = 0;
        int first = at, keep = n - 2 - s; /* for those that must have one */
        while (p->n_items - at > (keep > 0 ? keep : 0) &&
               (load + item_work(c, at) <= room || (at == first && s < n - 1)))
            load += item_work(c, at++);
        fits &= load <= room || (at == first + 1 && load <= most - (last_stage ? end_work(c) : 0));
        if (out != NULL) {
            buf_add(out, s > 0 ? "|" : "");
            write_items(out, p, first, at);
        }
    }
    return fits && at == p->n_items;
}

int timeline_cut_pattern(const struct config *cfg, int pp, int vpp, double extra, struct buf *out, struct err *e)
{
    struct pattern p;
    const struct cutting c = {.cfg = cfg, .p = &p, .pp = pp, .vpp = vpp, .extra = extra};
    TRY(pattern_parse(&p, cfg->model.pattern, e));
    if (p.n_items < pp * vpp) {
        err_set(e, ST_USAGE, "%d items of model.pattern are too few for %d stages of %d segments", p.n_items, pp, vpp);
        return err_hint(e, "fewer pipeline or virtual stages");
    }
    double low = 0, high = end_work(&c);
    for (int i = 0; i < p.n_items; i++)
        high += vpp * item_work(&c, i);
    for (int tries = 0; tries < 60; tries++) {
        double mid = (low + high) / 2;
        *(deal(&c, mid, NULL) ? &high : &low) = mid;
    }
    if (!deal(&c, high, out))
        return err_set(e, ST_USAGE, "model.pattern cannot be distributed over %d stages of %d segments", pp, vpp);
    for (int k = 0; k < p.n_mtp_depths; k++)
        buf_addf(out, "/%.*s", p.n_mtp_layers, p.mtp_symbols);
    return buf_check(out, e);
}
