/* Toy graphs for planner tests: step functions that mix small vectors, so that every wrong address,
 * missing wait or changed order of additions shows in the last bit. No machine learning. */
#ifndef BRAID_TESTS_PLAN_TOY_H
#define BRAID_TESTS_PLAN_TOY_H

#include "ops/ops.h"
#include "plan/exec.h"
#include "support.h"

/* ---- step functions -------------------------------------------------------------------------- */

/* Uses of a toy phase: inputs first, then outputs. */
struct toy_phase {
    int n_in, n_out;
    double salt;
};
struct toy {
    struct toy_phase ph[PH_COUNT];
};

static inline int64_t toy_len(const struct tensor *t) { return t->data ? tensor_elems(t) : 0; }

/* Element i of every output is a function of element i of every input; all of an element's inputs
 * are read before its outputs are written, so equal lengths may be worked on in place. */
static inline int toy_run(const struct step_ctx *c, const struct toy_phase *ph)
{
    int64_t longest = 0;
    for (int o = ph->n_in; o < ph->n_in + ph->n_out; o++)
        longest = max_i64(longest, toy_len(&c->t[o]));
    for (int64_t i = 0; i < longest; i++) {
        double x = ph->salt;
        for (int u = 0; u < ph->n_in; u++)
            if (c->t[u].data != NULL)
                x = 0.5 * x + (0.3 + 0.07 * u) * ((const double *)c->t[u].data)[i % toy_len(&c->t[u])];
        for (int o = ph->n_in; o < ph->n_in + ph->n_out; o++) {
            double *out = c->t[o].data, value = x * (1 + 0.31 * (o - ph->n_in)) + 0.001 * (double)i;
            if (i < toy_len(&c->t[o]))
                out[i] = c->add[o] ? out[i] + value : value;
        }
    }
    return ST_OK;
}
static inline int toy_fwd(const struct step_ctx *c) { return toy_run(c, &((const struct toy *)c->self)->ph[PH_FWD]); }
static inline int toy_bwd(const struct step_ctx *c) { return toy_run(c, &((const struct toy *)c->self)->ph[PH_BWD]); }
static inline int toy_dw(const struct step_ctx *c) { return toy_run(c, &((const struct toy *)c->self)->ph[PH_DW]); }

/* ---- a graph, its plan, its memory ----------------------------------------------------------- */

enum { TOY_MAX_MB = 64 };
struct rig {
    struct graph g;
    struct order o;
    struct plan p;
    struct memory m;
    struct dev dev;
    struct exec x;
    struct err e;
};

static inline void rig_init(struct rig *r)
{
    *r = (struct rig){0};
    graph_init(&r->g, &ops_ref);
    assert_ok(dev_open(&r->dev, DEV_REF, 1, &r->e), &r->e);
}

static inline void rig_release(struct rig *r)
{
    exec_release(&r->x);
    order_release(&r->o);
    plan_release(&r->p);
    memory_release(&r->m);
    graph_release(&r->g);
    dev_close(&r->dev);
}

static inline slot_id rig_slot(struct rig *r, const char *name, int64_t n)
{
    return graph_slot(&r->g, name, tensor_1d(NULL, DT_F64, n));
}

static inline slot_id rig_keep(struct rig *r, const char *name, enum arena_id a, int64_t n)
{
    struct tensor t = tensor_1d(NULL, DT_F64, n);
    return graph_persistent(&r->g, name, t, a, memory_reserve(&r->m, a, tensor_bytes(&t)));
}

static inline int rig_node(struct rig *r, const char *name, enum lane_id lane)
{
    return graph_node(&r->g, name, lane, graph_own(&r->g, sizeof(struct toy)));
}

/* A phase of a toy node; replays run the forward function. */
static inline void rig_uses(struct rig *r, int node, enum phase_id ph, const struct use *uses, int n, double salt)
{
    static const step_fn fn[PH_COUNT] = {
        [PH_FWD] = toy_fwd, [PH_BWD] = toy_bwd, [PH_DW] = toy_dw, [PH_REPLAY] = toy_fwd};
    union {
        const void *in;
        struct toy *out;
    } self = {.in = r->g.nodes[node].self};
    int n_in = 0;
    while (n_in < n && uses[n_in].mode == USE_READ)
        n_in++;
    self.out->ph[ph] = (struct toy_phase){.n_in = n_in, .n_out = n - n_in, .salt = salt};
    graph_phase(&r->g, node, ph, fn[ph], uses, n);
}
#define RIG_USES(r, node, ph, salt, ...)                                                                               \
    rig_uses(r, node, ph, (const struct use[]){__VA_ARGS__},                                                           \
             (int)(sizeof((const struct use[]){__VA_ARGS__}) / sizeof(struct use)), salt)

static inline int rig_plan(struct rig *r)
{
    if (r->o.n == 0)
        assert_ok(schedule_plain(&r->g, false, &r->o, &r->e), &r->e);
    return plan_build(&r->p, "toy", &r->g, &r->o, &r->e);
}

static inline void rig_commit(struct rig *r)
{
    memory_reserve_max(&r->m, ARENA_FRAME, r->p.frame_bytes);
    memory_reserve_max(&r->m, ARENA_WORK, r->p.work_bytes);
    memory_reserve_max(&r->m, ARENA_HOST, r->p.host_bytes);
    assert_ok(memory_commit(&r->m, &r->dev, &r->e), &r->e);
    assert_ok(plan_bind(&r->p, &r->m, &r->e), &r->e);
    exec_init(&r->x, &r->dev);
    assert_ok(exec_prepare(&r->x, &r->p, &r->e), &r->e);
    for (int64_t i = 0; i < r->m.allocated[ARENA_PARAM] / 8; i++)
        ((double *)(void *)r->m.base[ARENA_PARAM])[i] = 0.25 + 0.125 * (double)(i % 11);
}

static inline void rig_make(struct rig *r)
{
    assert_ok(rig_plan(r), &r->e);
    rig_commit(r);
}

/* One run from gradients of zero and activations of NaN. */
static inline void rig_run(struct rig *r, bool first_mb)
{
    static const enum arena_id rubbish[] = {ARENA_FRAME, ARENA_WORK, ARENA_HOST};
    for (int k = 0; k < countof(rubbish); k++)
        if (r->m.base[rubbish[k]])
            memset(r->m.base[rubbish[k]], 0xFF, (size_t)r->m.allocated[rubbish[k]]);
    struct run_info run[TOY_MAX_MB] = {{.first_mb = first_mb}};
    assert_true(r->p.n_mb <= TOY_MAX_MB);
    for (int mb = 1; mb < r->p.n_mb; mb++)
        run[mb].step = mb;
    assert_ok(exec_run(&r->x, &r->p, run, &r->e), &r->e);
}

/* What a run left in the gradient arena. */
static inline uint64_t rig_result(const struct rig *r)
{
    return hash64(r->m.base[ARENA_GRAD], (size_t)r->m.allocated[ARENA_GRAD], 0);
}

/* ---- looking at a plan ----------------------------------------------------------------------- */

static inline int find_step(const struct plan *p, int node, enum phase_id ph)
{
    for (int i = 0; i < p->n_steps; i++)
        if (p->steps[i].ref.node == node && p->steps[i].ref.phase == ph)
            return i;
    return -1;
}

static inline int count_steps(const struct plan *p, int node, enum phase_id ph)
{
    int n = 0;
    for (int i = 0; i < p->n_steps; i++)
        n += p->steps[i].ref.node == node && p->steps[i].ref.phase == ph;
    return n;
}

/* The life of a slot; rebuilt: the one made by a replay. NULL if there is none. */
static inline const struct instance *find_life(const struct plan *p, slot_id slot, bool rebuilt)
{
    for (int i = 0; i < p->n_inst; i++)
        if (p->inst[i].slot == slot && p->inst[i].rebuilt == rebuilt)
            return &p->inst[i];
    return NULL;
}

#endif
