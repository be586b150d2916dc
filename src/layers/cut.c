/* A pipeline cut: the closed stream leaves one chunk and enters the next, on another rank or on this one.
 *
 *   cutN.out   forward: sends x [rows, width]            backward: receives dx
 *   cutN.in    forward: receives x                       backward: sends dx
 *
 * N is the segment in front of the cut; width is hidden, or with hyper-connections all streams. What a joint carries
 * along (a few rows for its metrics) follows x with the same tag: messages of one tag keep their order. Tags name
 * microbatch, cut and direction, so no two messages of a step can be taken for one another in any schedule. Sends keep
 * their bytes and never wait, so an order is free of deadlock if each receive follows its send in some order of all
 * ranks' steps, as every schedule here does. */
#include "layers/layer.h"

struct cut {
    const struct mesh *mesh; /* its communicator is looked up when a step runs: a plan on paper has none */
    const char *what;
    int peer, number, n_cuts;
};

enum direction { FORWARD, BACKWARD };

static int tag_of(const struct cut *m, int mb, enum direction d) { return (mb * m->n_cuts + m->number) * 2 + (int)d; }

static int no_comm(const struct step_ctx *c, const struct cut *m)
{
    return err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", m->what);
}

/* Tensors of a message: the stream (or its gradient), and forward what the joint carries along. */
enum { CUT_STREAM, CUT_CARRY, CUT_TENSORS };

static int send_all(const struct step_ctx *c, int n, enum direction d)
{
    const struct cut *m = c->self;
    if (m->mesh->pp_comm == NULL)
        return no_comm(c, m);
    for (int i = 0; i < n; i++)
        if (c->t[i].data != NULL)
            TRY(comm_send(m->mesh->pp_comm, c->lane, m->what, &c->t[i], m->peer, tag_of(m, c->mb, d)));
    return ST_OK;
}

static int receive_all(const struct step_ctx *c, int n, enum direction d)
{
    const struct cut *m = c->self;
    if (m->mesh->pp_comm == NULL)
        return no_comm(c, m);
    for (int i = 0; i < n; i++) {
        struct tensor t = c->t[i];
        if (t.data != NULL)
            TRY(comm_recv(m->mesh->pp_comm, c->lane, m->what, &t, m->peer, tag_of(m, c->mb, d)));
    }
    return ST_OK;
}

static int out_fwd(const struct step_ctx *c) { return send_all(c, CUT_TENSORS, FORWARD); }
static int out_bwd(const struct step_ctx *c) { return receive_all(c, CUT_STREAM + 1, BACKWARD); }
static int in_fwd(const struct step_ctx *c) { return receive_all(c, CUT_TENSORS, FORWARD); }
static int in_bwd(const struct step_ctx *c) { return send_all(c, CUT_STREAM + 1, BACKWARD); }

static int declare(struct build *b, const struct cut_place *at, const char *name, int peer_segment)
{
    struct cut *m = graph_own(b->g, sizeof *m);
    if (m == NULL)
        return -1;
    *m = (struct cut){
        .mesh = b->mesh, .peer = peer_segment % b->mesh->pp, .number = at->before, .n_cuts = at->n_segments - 1};
    m->what = graph_name(b->g, name);
    return graph_node(b->g, name, LANE_COMM, m);
}

static void scope(struct build *b, const struct cut_place *at)
{
    char name[32];
    snprintf(name, sizeof name, "cut%d", at->before);
    graph_scope(b->g, b->layer, name);
}

static double bytes_of(const struct build *b, slot_id s)
{
    return b->g->err.code == ST_OK && s >= 0 ? (double)tensor_bytes(&b->g->slots[s].shape) : 0;
}

int cut_out_declare(struct build *b, const struct cut_place *at, const struct sublayer *closed)
{
    struct graph *g = b->g;
    scope(b, at);
    int n = declare(b, at, "out", at->before + 1);
    graph_role(g, n, ROLE_CUT_OUT);
    GRAPH_PHASE(g, n, PH_FWD, out_fwd, [CUT_STREAM] = READS(closed->x), [CUT_CARRY] = READS(closed->aux[AUX_CARRY]));
    graph_cost(g, n, PH_FWD, 0, bytes_of(b, closed->x));
    if (training(b)) {
        GRAPH_PHASE(g, n, PH_BWD, out_bwd, [CUT_STREAM] = WRITES(closed->dx));
        graph_cost(g, n, PH_BWD, 0, bytes_of(b, closed->dx));
    }
    return g->err.code;
}

int cut_in_declare(struct build *b, const struct cut_place *at, const struct joint_kind *joint, struct sublayer *entry)
{
    struct graph *g = b->g;
    scope(b, at);
    joint->arrive(b, entry);
    int n = declare(b, at, "in", at->before);
    graph_role(g, n, ROLE_CUT_IN);
    GRAPH_PHASE(g, n, PH_FWD, in_fwd, [CUT_STREAM] = WRITES(entry->x), [CUT_CARRY] = WRITES(entry->aux[AUX_CARRY]));
    graph_cost(g, n, PH_FWD, 0, bytes_of(b, entry->x));
    if (training(b)) {
        GRAPH_PHASE(g, n, PH_BWD, in_bwd, [CUT_STREAM] = READS(entry->dx));
        graph_cost(g, n, PH_BWD, 0, bytes_of(b, entry->dx));
    }
    return g->err.code;
}
