/* braid bench train --exposed=on, for one rank that acts as one of many (parallel.comm=loop): how much of what ranks
 * exchange is hidden. Steps over the link and over a loop without limits come in turn, so that neither has a warmer
 * device than the other; both again with a wait after every node, where nothing can hide. Nothing is captured, since a
 * captured piece keeps the rate that it was captured with. */
#include "cmd/cmd.h"

#include <stdlib.h>

enum { LINK, FREE, KINDS, WARM = 2 };

struct link_times {
    double *seconds[KINDS]; /* of each step */
    double rate, latency;   /* of the link */
    int n;
    uint64_t bits; /* of every loss and norm */
};

static int one_step(struct trainer *t, struct link_times *x, int kind, double *seconds, struct err *e)
{
    struct step_result r;
    world_loop(t->world, kind == LINK ? x->rate : 1e15, kind == LINK ? x->latency : 0);
    TRY(trainer_step(t, &r, e));
    const double said[2] = {r.loss, r.grad_norm};
    x->bits = hash64(said, sizeof said, x->bits);
    *seconds = r.seconds;
    return ST_OK;
}

/* Medians of the steps over the link and of those over a loop without limits. */
static int in_turn(struct trainer *t, struct link_times *x, bool waits, double median[KINDS], struct err *e)
{
    double unused;
    t->exec.sync = waits;
    for (int i = 0; i < WARM; i++)
        TRY(one_step(t, x, LINK, &unused, e));
    for (int i = 0; i < x->n; i++)
        for (int kind = 0; kind < KINDS; kind++)
            TRY(one_step(t, x, kind, &x->seconds[kind][i], e));
    for (int kind = 0; kind < KINDS; kind++)
        median[kind] = bench_median(x->seconds[kind], x->n) * 1e3;
    return ST_OK;
}

static int measure(struct trainer *t, struct link_times *x, struct err *e)
{
    double beside[KINDS], alone[KINDS];
    for (int kind = 0; kind < KINDS; kind++)
        TRY(mem_array((void **)&x->seconds[kind], (size_t)x->n, sizeof x->seconds[kind][0], e));
    TRY(in_turn(t, x, false, beside, e));
    TRY(in_turn(t, x, true, alone, e));
    TRY(trainer_settle(t, e));
    double exposed = beside[LINK] - beside[FREE], whole = alone[LINK] - alone[FREE];
    printf(
        "link_ms: %.2f\nfree_ms: %.2f\nexposed_ms: %.2f\nwhole_ms: %.2f\nhidden_percent: %.1f\nsteps: %d of each kind\n"
        "bits: %016llx (losses and norms of all steps)\n",
        beside[LINK], beside[FREE], exposed, whole, whole > 0 ? 100 * (1 - exposed / whole) : 0.0, x->n,
        (unsigned long long)x->bits);
    return ST_OK;
}

int bench_link(struct trainer *t, int steps, struct err *e)
{
    const struct config_parallel *c = &t->cfg->parallel;
    struct link_times x = {.rate = c->loop_gbps * 1e9, .latency = c->loop_us * 1e-6, .n = steps};
    bool sync = t->exec.sync, capture = t->exec.capture;
    t->exec.capture = false;
    int st = measure(t, &x, e);
    t->exec.sync = sync;
    t->exec.capture = capture;
    world_loop(t->world, x.rate, x.latency);
    for (int kind = 0; kind < KINDS; kind++)
        free(x.seconds[kind]);
    return st;
}
