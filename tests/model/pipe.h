/* A model over several thread ranks, a few steps of plain gradient descent, and everything it said: what the pipeline
 * tests compare with one rank. */
#ifndef BRAID_TESTS_MODEL_PIPE_H
#define BRAID_TESTS_MODEL_PIPE_H

#include "tiny.h"

enum { PIPE_MAX_RANKS = 4, PIPE_MAX_STEPS = 3, PIPE_MAX_MICRO = 8, PIPE_MAX_ROWS = 4096 };

/* A named tensor of one step, copied. */
struct pipe_value {
    char name[160];
    enum dtype dtype;
    int64_t n;
    void *data;
};
struct pipe_rank {
    struct pipe_value v[PIPE_MAX_ROWS];
    int n;
    int at_once; /* microbatches of one run of the plan */
};
struct pipe_place;
struct pipe_run {
    const char *options;
    enum dev_kind kind;
    int pp, vpp; /* 0: one rank without any communication */
    int n_micro, steps;
    bool by_microbatch; /* one plan per microbatch, as without a pipeline */
    bool eval;          /* also the eval plan, after the last step */
    /* of the training graph, before it is planned again: what a mutant does */
    int (*patch)(struct pipe_place *p, struct err *e);
    struct config c;
    struct tiny_batch batch[PIPE_MAX_STEPS][PIPE_MAX_MICRO];
    struct pipe_rank *rank[PIPE_MAX_RANKS];
    int n_ranks;
};

/* What one rank holds while it runs. */
struct pipe_place {
    struct pipe_run *r;
    struct pipe_rank *out;
    struct dev dev;
    struct model m;
    struct model_plan train, eval;
    struct exec x;
};

static inline int pipe_keep(struct pipe_place *p, int step, const char *kind, const char *name, const struct tensor *t,
                            struct err *e)
{
    struct pipe_rank *o = p->out;
    if (o->n == PIPE_MAX_ROWS)
        return err_set(e, ST_INTERNAL, "too many values to keep");
    struct pipe_value *v = &o->v[o->n++];
    snprintf(v->name, sizeof v->name, "step %d, %s %s", step, kind, name);
    v->dtype = t->dtype;
    v->n = tensor_elems(t);
    v->data = malloc((size_t)tensor_bytes(t));
    if (v->data == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    memcpy(v->data, t->data, (size_t)tensor_bytes(t));
    return ST_OK;
}

static inline struct run_info pipe_info(const struct pipe_run *r, int step, int k)
{
    static const double mtp_scale[MTP_MAX_DEPTHS] = {1.0 / 48, 1.0 / 56, 1.0 / 64, 1.0 / 72};
    const struct tiny_batch *b = &r->batch[step][k];
    return (struct run_info){.step = step,
                             .first_sample = (step * r->n_micro + k) * r->c.train.micro_batch,
                             .first_mb = k == 0,
                             .scale = 1.0 / 32,
                             .mtp_scale = mtp_scale,
                             .mb_share = 1.0 / r->n_micro,
                             .tokens = b->tokens,
                             .labels = b->labels,
                             .pos = b->pos,
                             .doc_start = b->doc};
}

/* Copies of one parameter on both ends get the sum of their gradients, as the trainer's update does. */
static inline int pipe_sum_shared(struct pipe_place *p, struct err *e)
{
    for (int k = 0; k < p->m.params.n; k++) {
        if (!p->m.params.list[k].p.shared_ends)
            continue;
        struct tensor g = model_grad(&p->m, k), work = tensor_1d(NULL, DT_U8, 2 * tensor_bytes(&g));
        struct lane lane = {.dev = &p->dev, .err = e};
        if (p->m.mesh.ends_comm == NULL)
            return err_set(e, ST_INTERNAL, "a shared parameter between the ends");
        TRY(mem_aligned(&work.data, (size_t)work.dim[0], DEV_ALIGN, e));
        int st = comm_all_reduce(p->m.mesh.ends_comm, &lane, "shared", &g, &work);
        free(work.data);
        TRY(st);
    }
    return ST_OK;
}

static inline int pipe_update(struct pipe_place *p, int step, struct err *e)
{
    TRY(pipe_sum_shared(p, e));
    for (int k = 0; k < p->m.params.n; k++) {
        if (p->m.params.list[k].p.buffer)
            continue;
        struct tensor w = model_param(&p->m, k), g = model_grad(&p->m, k);
        TRY(pipe_keep(p, step, "gradient of", p->m.params.list[k].p.key, &g, e));
        for (int64_t i = 0, n = tensor_elems(&w); i < n; i++)
            tensor_set(&w, i, tensor_get(&w, i) - 0.01 * tensor_get(&g, i));
    }
    return ST_OK;
}

static inline int pipe_report(struct pipe_place *p, int step, struct err *e)
{
    char name[96];
    struct tensor loss = model_slot(&p->m, &p->train, p->train.loss);
    if (loss.data != NULL)
        TRY(pipe_keep(p, step, "loss", "main", &loss, e));
    for (int k = 0; k < p->train.n_mtp; k++) {
        loss = model_slot(&p->m, &p->train, p->train.mtp_loss[k]);
        snprintf(name, sizeof name, "depth %d", k);
        if (loss.data != NULL)
            TRY(pipe_keep(p, step, "loss", name, &loss, e));
    }
    for (int k = 0; k < p->m.metrics.n; k++) {
        const struct metric *q = &p->m.metrics.m[k];
        struct tensor t = tensor_1d(p->m.mem.base[ARENA_STATE] + q->offset, DT_F64, q->n);
        snprintf(name, sizeof name, "%s/%d", q->tag, q->layer);
        TRY(pipe_keep(p, step, "metric", name, &t, e));
    }
    return ST_OK;
}

static inline int pipe_step(struct pipe_place *p, int step, struct err *e)
{
    struct pipe_run *r = p->r;
    struct run_info run[PIPE_MAX_MICRO];
    for (int k = 0; k < r->n_micro; k++)
        run[k] = pipe_info(r, step, k);
    for (int k = 0; k < r->n_micro; k += p->train.n_micro)
        TRY(exec_run(&p->x, &p->train.p, &run[k], e));
    TRY(pipe_report(p, step, e));
    return pipe_update(p, step, e);
}

/* Plans the training graph anew, one microbatch in the plain order. */
static inline int pipe_replan(struct pipe_place *p, struct err *e)
{
    struct order order = {0};
    plan_release(&p->train.p);
    int st = schedule_plain(&p->train.g, false, &order, e);
    if (st == ST_OK)
        st = plan_build(&p->train.p, "mutant", &p->train.g, &order, e);
    order_release(&order);
    memory_reserve_max(&p->m.mem, ARENA_FRAME, p->train.p.frame_bytes);
    memory_reserve_max(&p->m.mem, ARENA_WORK, p->train.p.work_bytes);
    memory_reserve_max(&p->m.mem, ARENA_HOST, p->train.p.host_bytes);
    return st;
}

static inline int pipe_open(struct pipe_place *p, const struct mesh *mesh, struct err *e)
{
    struct pipe_run *r = p->r;
    const struct config *c = &r->c;
    struct model_plan *plans[] = {&p->train, &p->eval};
    struct model_plan_opts o = {.name = "train",
                                .mode = BUILD_TRAIN,
                                .batch = c->train.micro_batch,
                                .seq = c->train.seq,
                                .n_micro = r->by_microbatch ? 1 : r->n_micro};
    TRY(dev_open(&p->dev, r->kind, 1, e));
    TRY(model_init(&p->m, c, &p->dev, e));
    p->m.mesh = *mesh;
    TRY(model_plan_build(&p->m, &p->train, &o, e));
    o.name = "eval";
    o.mode = BUILD_EVAL;
    TRY(model_plan_build(&p->m, &p->eval, &o, e));
    if (r->patch != NULL)
        TRY(r->patch(p, e));
    TRY(model_commit(&p->m, plans, 2, e));
    TRY(model_init_params(&p->m, e));
    if (p->m.mem.base[ARENA_FRAME] != NULL)
        memset(p->m.mem.base[ARENA_FRAME], 0xFF, (size_t)p->m.mem.allocated[ARENA_FRAME]);
    memset(p->m.mem.base[ARENA_WORK], 0xFF, (size_t)p->m.mem.allocated[ARENA_WORK]);
    tiny_exec(&p->x, &p->dev, c);
    TRY(exec_prepare(&p->x, &p->train.p, e));
    return exec_prepare(&p->x, &p->eval.p, e);
}

static inline int pipe_go(struct pipe_place *p, const struct mesh *mesh, struct err *e)
{
    struct pipe_run *r = p->r;
    TRY(pipe_open(p, mesh, e));
    p->out->at_once = p->train.n_micro;
    for (int s = 0; s < r->steps; s++)
        TRY(pipe_step(p, s, e));
    for (int k = 0; r->eval && k < r->n_micro; k++) {
        struct run_info run = pipe_info(r, 0, k);
        TRY(exec_run(&p->x, &p->eval.p, &run, e));
    }
    struct tensor loss = model_slot(&p->m, &p->eval, p->eval.loss);
    return r->eval && loss.data != NULL ? pipe_keep(p, r->steps, "loss", "eval", &loss, e) : ST_OK;
}

static inline int pipe_rank_on(struct pipe_run *r, const struct mesh *mesh, struct err *e)
{
    struct pipe_place p = {.r = r, .out = r->rank[mesh->rank]};
    int st = pipe_go(&p, mesh, e);
    exec_release(&p.x);
    model_plan_release(&p.train);
    model_plan_release(&p.eval);
    model_release(&p.m);
    dev_close(&p.dev);
    return st;
}

static inline int pipe_thread(struct world *w, void *ctx, struct err *e)
{
    struct pipe_run *r = ctx;
    struct mesh mesh;
    TRY(mesh_open(&mesh, &(struct mesh_sizes){.pp = r->pp, .vpp = r->vpp, .ep = 1}, w, e));
    int st = pipe_rank_on(r, &mesh, e);
    mesh_close(&mesh);
    return st;
}

static inline int pipe_start(struct pipe_run *r, struct err *e)
{
    tiny_config(&r->c, r->options);
    r->n_ranks = r->pp > 0 ? r->pp : 1;
    assert_true(r->n_ranks <= PIPE_MAX_RANKS && r->steps <= PIPE_MAX_STEPS && r->n_micro <= PIPE_MAX_MICRO);
    for (int k = 0; k < r->n_ranks; k++)
        assert_non_null(r->rank[k] = calloc(1, sizeof *r->rank[k]));
    for (int s = 0; s < r->steps; s++)
        for (int k = 0; k < r->n_micro; k++)
            tiny_batch_fill(&r->batch[s][k], &r->c, (s * r->n_micro + k) * r->c.train.micro_batch,
                            r->c.train.micro_batch);
    struct mesh alone = mesh_alone();
    struct world_opts o = {.kind = COMM_THREADS, .ranks = r->n_ranks, .timeout = 60};
    return r->pp > 0 ? world_threads(&o, pipe_thread, r, e) : pipe_rank_on(r, &alone, e);
}

static inline void pipe_end(struct pipe_run *r)
{
    for (int k = 0; k < r->n_ranks; k++) {
        for (int i = 0; i < r->rank[k]->n; i++)
            free(r->rank[k]->v[i].data);
        free(r->rank[k]);
    }
    for (int s = 0; s < r->steps; s++)
        for (int k = 0; k < r->n_micro; k++)
            tiny_batch_release(&r->batch[s][k]);
    config_release(&r->c);
}

static inline const struct pipe_value *pipe_find(const struct pipe_rank *r, const char *name)
{
    for (int i = 0; i < r->n; i++)
        if (strcmp(r->v[i].name, name) == 0)
            return &r->v[i];
    return NULL;
}

/* Differences are relative to at least this: a gradient that is 0 but for rounding (a mix of streams that are alike,
 * say) must not be compared with itself, nor a metric that is an error. Gradients here reach from 0.01 to 10. */
static inline double pipe_floor(const char *name)
{
    return strstr(name, "gradient") != NULL ? 1e-2 : strstr(name, "metric") != NULL ? 1 : 0;
}

/* Difference of two values, relative to the largest; 0 for equal bits. */
static inline double pipe_gap(const struct pipe_value *a, const struct pipe_value *b)
{
    double worst = 0, top = pipe_floor(a->name);
    if (a->n != b->n || a->dtype != b->dtype)
        return INFINITY;
    if (memcmp(a->data, b->data, (size_t)a->n * dtype_bytes(a->dtype)) == 0)
        return 0;
    struct tensor x = tensor_1d(a->data, a->dtype, a->n), y = tensor_1d(b->data, b->dtype, b->n);
    for (int64_t i = 0; i < a->n; i++) {
        double gap = fabs(tensor_get(&x, i) - tensor_get(&y, i));
        worst = gap > worst || isnan(gap) ? gap : worst;
        top = fmax(top, fabs(tensor_get(&x, i)));
    }
    return isnan(worst) ? INFINITY : top > 0 ? worst / top : worst;
}

/* The largest difference of anything `one` said from what the ranks of `many` said, and its name. Every value must be
 * said by some rank, and none may say a thing that `one` did not. */
static inline double pipe_compare(const struct pipe_run *one, const struct pipe_run *many, const char **where)
{
    double worst = 0;
    *where = "";
    for (int i = 0; i < one->rank[0]->n; i++) {
        const struct pipe_value *a = &one->rank[0]->v[i];
        int found = 0;
        for (int k = 0; k < many->n_ranks; k++) {
            const struct pipe_value *b = pipe_find(many->rank[k], a->name);
            double gap = b != NULL ? pipe_gap(a, b) : 0;
            found += b != NULL;
            *where = gap > worst ? a->name : *where;
            worst = fmax(worst, gap);
        }
        if (found == 0) {
            *where = a->name;
            return INFINITY;
        }
    }
    for (int k = 0; k < many->n_ranks; k++)
        for (int i = 0; i < many->rank[k]->n; i++)
            if (pipe_find(one->rank[0], many->rank[k]->v[i].name) == NULL) {
                *where = many->rank[k]->v[i].name;
                return INFINITY;
            }
    return worst;
}

#endif
