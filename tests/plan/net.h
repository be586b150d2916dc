/* A toy network for tests of whole-step schedules: segments of layers (attention `*`, MLP `-`, experts `E`) with fake
 * all-to-alls on the comm lane and cuts that send through a post office in memory, so that several ranks can run as
 * threads of one program. Values are mixed as in toy.h; nothing is learned. */
#ifndef BRAID_TESTS_PLAN_NET_H
#define BRAID_TESTS_PLAN_NET_H

#include "toy.h"

#include <pthread.h>

enum { NET_WIDTH = 8, NET_MAX_SEGMENTS = 16, NET_MAX_MB = 16 };

/* Messages by border, direction and microbatch; sending never waits. */
struct post {
    pthread_mutex_t lock;
    pthread_cond_t come;
    bool sent[NET_MAX_SEGMENTS + 1][2][NET_MAX_MB];
    double data[NET_MAX_SEGMENTS + 1][2][NET_MAX_MB][NET_WIDTH];
};
static inline void post_open(struct post *p)
{
    memset(p->sent, 0, sizeof p->sent);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->come, NULL);
}
static inline void post_close(struct post *p)
{
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->come);
}

struct net_cut {
    struct post *post;
    int border;
};
static inline int net_send(const struct step_ctx *c, bool backward)
{
    const struct net_cut *k = c->self;
    pthread_mutex_lock(&k->post->lock);
    memcpy(k->post->data[k->border][backward][c->run->step], c->t[0].data, NET_WIDTH * sizeof(double));
    k->post->sent[k->border][backward][c->run->step] = true;
    pthread_cond_broadcast(&k->post->come);
    pthread_mutex_unlock(&k->post->lock);
    return ST_OK;
}
static inline int net_recv(const struct step_ctx *c, bool backward)
{
    const struct net_cut *k = c->self;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    int late = 0;
    pthread_mutex_lock(&k->post->lock);
    while (late == 0 && !k->post->sent[k->border][backward][c->run->step])
        late = pthread_cond_timedwait(&k->post->come, &k->post->lock, &until);
    memcpy(c->t[0].data, k->post->data[k->border][backward][c->run->step], NET_WIDTH * sizeof(double));
    pthread_mutex_unlock(&k->post->lock);
    return late == 0 ? ST_OK : err_set(c->lane->err, ST_INVALID, "no message came over border %d", k->border);
}
static inline int net_send_stream(const struct step_ctx *c) { return net_send(c, false); }
static inline int net_recv_stream(const struct step_ctx *c) { return net_recv(c, false); }
static inline int net_send_grad(const struct step_ctx *c) { return net_send(c, true); }
static inline int net_recv_grad(const struct step_ctx *c) { return net_recv(c, true); }

/* A host node: values that only the microbatch decides. */
static inline int net_batch(const struct step_ctx *c)
{
    for (int o = 0; o < 2; o++)
        for (int i = 0; i < NET_WIDTH; i++)
            ((double *)c->t[o].data)[i] = 0.1 * (double)(c->run->step + 1) + 0.01 * i + 0.3 * o;
    return ST_OK;
}

struct net_opts {
    const char *segment[NET_MAX_SEGMENTS];
    int n_segments;
    int pp, pp_rank;
    bool tied;    /* head and embedding share their weight (one rank only) */
    bool drop;    /* norms and activations are recomputed */
    bool offload; /* whatever is saved waits in host memory (order_offload is the caller's) */
    bool grouped; /* layers are numbered by pairs, as brackets would */
};
/* A net and the schedule of its steps. */
struct setup {
    struct net_opts net;
    struct schedule_opts s;
};
struct net {
    struct rig r;
    const struct net_opts *o;
    struct post *post;
    slot_id x, dx, token, label, info, embed_w, embed_g;
    int layer;
};

static inline slot_id net_slot(struct net *n, const char *name) { return rig_slot(&n->r, name, NET_WIDTH); }
/* Persistent slots are found by name when ranks are compared. */
static inline slot_id net_keep(struct net *n, const char *name, enum arena_id a)
{
    return rig_keep(&n->r, name, a, NET_WIDTH);
}

/* y = op(x, w) with all phases; dx is written, or added to. */
static inline slot_id net_linear(struct net *n, const char *name, slot_id x, slot_id dx, bool adds, slot_id *dy)
{
    char text[32];
    struct rig *r = &n->r;
    snprintf(text, sizeof text, "%s.w", name);
    slot_id w = net_keep(n, text, ARENA_PARAM);
    snprintf(text, sizeof text, "%s.g", name);
    slot_id g = net_keep(n, text, ARENA_GRAD);
    slot_id y = net_slot(n, name);
    snprintf(text, sizeof text, "d_%s", name);
    *dy = net_slot(n, text);
    int k = rig_node(r, name, LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.1, READS(x), READS(w), WRITES(y));
    RIG_USES(r, k, PH_REPLAY, 0.1, READS(x), READS(w), WRITES(y));
    graph_replay(&r->g, y, k);
    const struct use back[] = {READS(*dy), READS(w), {.slot = dx, .mode = adds ? USE_ADD : USE_WRITE}};
    rig_uses(r, k, PH_BWD, back, countof(back), 0.2);
    RIG_USES(r, k, PH_DW, 0.3, READS(*dy), READS(x), ADDS(g));
    graph_cost(&r->g, k, PH_FWD, 1, 0);
    graph_cost(&r->g, k, PH_BWD, 1, 0);
    graph_cost(&r->g, k, PH_DW, 1, 0);
    return y;
}

/* An all-to-all: y on the comm lane. */
static inline slot_id net_exchange(struct net *n, const char *name, enum node_role role, slot_id x, slot_id dx,
                                   slot_id meta, slot_id *dy)
{
    char text[32];
    struct rig *r = &n->r;
    slot_id y = net_slot(n, name);
    snprintf(text, sizeof text, "d_%s", name);
    *dy = net_slot(n, text);
    int k = rig_node(r, name, LANE_COMM);
    graph_role(&r->g, k, role);
    RIG_USES(r, k, PH_FWD, 0.4, READS(x), READS(meta), WRITES(y));
    RIG_USES(r, k, PH_BWD, 0.5, READS(*dy), READS(meta), WRITES(dx));
    return y;
}

static inline slot_id net_experts(struct net *n, slot_id h, slot_id dh, slot_id *df)
{
    struct rig *r = &n->r;
    slot_id d_shared, perm = net_slot(n, "perm"), dperm = net_slot(n, "d_perm"), prob = net_slot(n, "prob"),
                      dprob = net_slot(n, "d_prob"), meta = net_slot(n, "meta"),
                      tally = net_keep(n, "tally", ARENA_STATE), ddisp, dfc1, dfc2, dcomb;
    slot_id shared = net_linear(n, "shared", h, dh, true, &d_shared);
    int k = rig_node(r, "router", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.6, READS(h), WRITES(perm), WRITES(prob), WRITES(meta), ADDS(tally));
    RIG_USES(r, k, PH_BWD, 0.7, READS(dperm), READS(dprob), READS(prob), ADDS(dh));
    slot_id disp = net_exchange(n, "dispatch", ROLE_DISPATCH, perm, dperm, meta, &ddisp);
    slot_id fc1 = net_linear(n, "fc1", disp, ddisp, false, &dfc1);
    slot_id fc2 = net_linear(n, "fc2", fc1, dfc1, false, &dfc2);
    slot_id comb = net_exchange(n, "combine", ROLE_COMBINE, fc2, dfc2, meta, &dcomb), f = net_slot(n, "f");
    *df = net_slot(n, "d_f");
    k = rig_node(r, "unpermute", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.8, READS(comb), READS(prob), READS(shared), WRITES(f));
    RIG_USES(r, k, PH_BWD, 0.9, READS(*df), READS(prob), READS(comb), WRITES(dcomb), WRITES(dprob), WRITES(d_shared));
    return f;
}

/* norm, core, residual */
static inline void net_layer(struct net *n, char kind)
{
    struct rig *r = &n->r;
    graph_scope(&r->g, n->o->grouped ? n->layer / 2 : n->layer, n->o->grouped && n->layer % 2 ? "b" : "a");
    n->layer++;
    slot_id h = net_slot(n, "norm"), dh = net_slot(n, "d_norm"), df, f;
    int k = rig_node(r, "norm", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.15, READS(n->x), WRITES(h));
    RIG_USES(r, k, PH_REPLAY, 0.15, READS(n->x), WRITES(h));
    graph_replay(&r->g, h, k);
    RIG_USES(r, k, PH_BWD, 0.25, READS(dh), READS(n->x), ADDS(n->dx));
    if (kind == 'E') {
        f = net_experts(n, h, dh, &df);
    } else {
        slot_id mid = NO_SLOT, dmid;
        mid = net_linear(n, kind == '*' ? "qkv" : "up", h, dh, false, &dmid);
        f = net_linear(n, kind == '*' ? "out" : "down", mid, dmid, false, &df);
    }
    slot_id y = net_slot(n, "x"), dy = net_slot(n, "d_x");
    k = rig_node(r, "add", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.35, READS(n->x), READS(f), WRITES(y));
    RIG_USES(r, k, PH_BWD, 0.45, READS(dy), WRITES(df), ADDS(n->dx));
    n->x = y;
    n->dx = dy;
}

static inline void net_cut(struct net *n, const char *name, int border, bool in)
{
    struct rig *r = &n->r;
    struct net_cut *c = graph_own(&r->g, sizeof *c);
    *c = (struct net_cut){.post = n->post, .border = border};
    graph_scope(&r->g, border, "cut");
    int k = graph_node(&r->g, name, LANE_COMM, c);
    graph_role(&r->g, k, in ? ROLE_CUT_IN : ROLE_CUT_OUT);
    if (in) {
        n->x = net_slot(n, "x");
        n->dx = net_slot(n, "d_x");
        GRAPH_PHASE(&r->g, k, PH_FWD, net_recv_stream, WRITES(n->x));
        GRAPH_PHASE(&r->g, k, PH_BWD, net_send_grad, READS(n->dx));
    } else {
        GRAPH_PHASE(&r->g, k, PH_FWD, net_send_stream, READS(n->x));
        GRAPH_PHASE(&r->g, k, PH_BWD, net_recv_grad, WRITES(n->dx));
    }
}

static inline void net_embed(struct net *n)
{
    struct rig *r = &n->r;
    graph_scope(&r->g, -1, "embed");
    n->embed_w = net_keep(n, "w", ARENA_PARAM);
    n->embed_g = net_keep(n, "g", ARENA_GRAD);
    n->x = net_slot(n, "x");
    n->dx = net_slot(n, "d_x");
    int k = rig_node(r, "look_up", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.55, READS(n->token), READS(n->embed_w), WRITES(n->x));
    RIG_USES(r, k, PH_DW, 0.65, READS(n->token), READS(n->dx), ADDS(n->embed_g));
}

/* Makes its gradients with the loss, in the forward phase, as the chunked loss does. */
static inline void net_head(struct net *n)
{
    struct rig *r = &n->r;
    graph_scope(&r->g, -1, "head");
    slot_id w = n->o->tied ? n->embed_w : net_keep(n, "w", ARENA_PARAM),
            g = n->o->tied ? n->embed_g : net_keep(n, "g", ARENA_GRAD), loss = net_keep(n, "loss", ARENA_STATE);
    int k = rig_node(r, "loss", LANE_COMPUTE);
    RIG_USES(r, k, PH_FWD, 0.75, READS(n->x), READS(w), READS(n->label), WRITES(n->dx), ADDS(g), ADDS(loss));
}

/* This rank's segments as chunks 0, 1, ...; numbers of layers are those of the whole net. */
static inline void net_declare(struct net *n, const struct net_opts *o, struct post *post)
{
    *n = (struct net){.o = o, .post = post};
    struct rig *r = &n->r;
    rig_init(r);
    graph_scope(&r->g, -1, "batch");
    n->token = net_slot(n, "token");
    n->label = net_slot(n, "label");
    int k = graph_node(&r->g, "batch", LANE_COPY, NULL);
    graph_host(&r->g, k);
    GRAPH_PHASE(&r->g, k, PH_FWD, net_batch, WRITES(n->token), WRITES(n->label));
    for (int s = 0; s < o->n_segments; s++) {
        if (s % o->pp != o->pp_rank) {
            n->layer += (int)strlen(o->segment[s]);
            continue;
        }
        r->g.chunk = s / o->pp;
        if (s == 0)
            net_embed(n);
        else
            net_cut(n, "in", s, true);
        for (const char *kind = o->segment[s]; *kind; kind++)
            net_layer(n, *kind);
        if (s + 1 == o->n_segments)
            net_head(n);
        else
            net_cut(n, "out", s + 1, false);
    }
    if (o->offload)
        assert_true(graph_offload(&r->g, "*", NULL, INT64_MAX) > 0);
    static const char *const dropped[] = {"norm", "fc1", "qkv", "up"};
    for (int s = 0; o->drop && s < r->g.n_slots; s++)
        for (int d = 0; d < countof(dropped); d++)
            r->g.slots[s].dropped |=
                r->g.slots[s].replay >= 0 && strcmp(strrchr(r->g.slots[s].name, '.') + 1, dropped[d]) == 0;
}

/* rig_commit with parameters that depend on names, so that every rank has the same. */
static inline void net_commit(struct net *n)
{
    rig_commit(&n->r);
    for (int s = 0; s < n->r.g.n_slots; s++) {
        const struct slot *slot = &n->r.g.slots[s];
        if (slot->arena != ARENA_PARAM)
            continue;
        double *w = (double *)(void *)(n->r.m.base[ARENA_PARAM] + slot->offset),
               v = (double)(hash64_str(slot->name, 1) % 97) / 97;
        for (int i = 0; i < NET_WIDTH; i++)
            w[i] = v + 0.125 * i;
    }
}

static inline void net_rubbish(struct net *n)
{
    static const enum arena_id rubbish[] = {ARENA_FRAME, ARENA_WORK, ARENA_HOST};
    for (int k = 0; k < countof(rubbish); k++)
        if (n->r.m.base[rubbish[k]])
            memset(n->r.m.base[rubbish[k]], 0xFF, (size_t)n->r.m.allocated[rubbish[k]]);
}

/* One step of n_mb microbatches: in one run, or one run each when the plan has one. */
static inline int net_run(struct net *n, int n_mb, struct err *e)
{
    struct run_info run[NET_MAX_MB];
    for (int mb = 0; mb < n_mb; mb++)
        run[mb] = (struct run_info){.first_mb = mb == 0, .step = mb};
    net_rubbish(n);
    if (n->r.p.n_mb == n_mb)
        return exec_run(&n->r.x, &n->r.p, run, e);
    for (int mb = 0; mb < n_mb; mb++)
        TRY(exec_run(&n->r.x, &n->r.p, &run[mb], e));
    return ST_OK;
}

/* Gradients and state of `n` against those of the same names in `want`; NULL: equal. */
static inline const char *net_difference(const struct net *n, const struct net *want)
{
    for (int s = 0; s < n->r.g.n_slots; s++) {
        const struct slot *a = &n->r.g.slots[s];
        if (a->arena != ARENA_GRAD && a->arena != ARENA_STATE)
            continue;
        const char *found = a->name;
        for (int t = 0; t < want->r.g.n_slots && found != NULL; t++) {
            const struct slot *b = &want->r.g.slots[t];
            if (b->arena == a->arena && strcmp(a->name, b->name) == 0 &&
                memcmp(n->r.m.base[a->arena] + a->offset, want->r.m.base[b->arena] + b->offset,
                       NET_WIDTH * sizeof(double)) == 0)
                found = NULL;
        }
        if (found != NULL)
            return found;
    }
    return NULL;
}

#endif
