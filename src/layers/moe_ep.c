/* Experts on several ranks (expert parallelism). Each of P ranks holds E / P experts; rows travel.
 *
 * Shapes: T tokens here, k choices each, buffers of cap rows for each rank, S = P cap places in all.
 *   home:     row [T, k], src [S]  places in the buffers                               epsend
 *             x [S, d], prob [S]   rows in buffers by destination                      permute
 *   counts    rcount [P, El]       rows for each local expert, by sender             all-to-all
 *   dispatch  rx [S, d], rprob     buffers as they arrive, by sender                   all-to-all
 *   arrive    x [S, d], prob       sorted by local expert, then sender               permute, k = 1
 *   leave     ry [S, d]            the experts' output, back in the senders' buffers   unpermute
 *   return    y [S, d]             buffers at home again                               all-to-all
 * Gradients take the same way in the other direction. Only the all-to-alls run on the communication lane; what is
 * around them computes. Places of a buffer behind its rows hold nothing that is read.
 *
 * cap holds any routing (every token may want a rank's experts), or by parallel.ep_capacity less; then `need` says how
 * large a buffer was wanted, and the trainer repeats the step with more room before anything is updated (or the batch,
 * in evaluation). */
#include "layers/moe_ep_int.h"
#include "ops/epplan/epplan.h"
#include "ops/permute/permute.h"

#include <math.h>

struct ep_node {
    struct comm *comm;
    const char *name[3]; /* counts, dispatch, return: for the board */
    int64_t ranks, cap;
};
struct sum_node {
    struct comm *comm;
    const char *name;
};

/* ---- steps ----------------------------------------------------------------------------------- */

enum { COUNTS_OUT, COUNTS_IN };
static int counts_fwd(const struct step_ctx *c)
{
    const struct ep_node *n = c->self;
    struct tensor recv = c->t[COUNTS_IN], all = {0};
    return comm_all_to_all(n->comm, c->lane, n->name[0], &c->t[COUNTS_OUT], &recv, &all, &all);
}

/* Slabs of rows, and of probabilities if there are any: [ranks, cap, ...]. */
static int exchange(const struct step_ctx *c, const char *what, int send, int recv, int send_rows, int recv_rows)
{
    const struct ep_node *n = c->self;
    struct dev *d = c->lane->dev;
    if (c->t[send].data == NULL)
        return ST_OK;
    int64_t width = tensor_elems(&c->t[send]) / (n->ranks * n->cap);
    const int64_t dim[3] = {n->ranks, n->cap, width};
    struct tensor from = tensor_shape(c->t[send].dtype, 3, dim), to = tensor_shape(c->t[recv].dtype, 3, dim);
    from.data = c->t[send].data;
    to.data = c->t[recv].data;
    if (d->vt->record == NULL) /* a host: what is behind the rows is looked at by the search for NaN */
        TRY(d->vt->fill(d, to.data, 0, tensor_bytes(&to), c->lane->err));
    return comm_all_to_all(n->comm, c->lane, what, &from, &to, &c->t[send_rows], &c->t[recv_rows]);
}

/* x, prob -> y, yprob; rows sent and received. The same step in both directions. */
enum { MOVE_X, MOVE_PROB, MOVE_SENT, MOVE_GOT, MOVE_Y, MOVE_YPROB };
static int move_rows(const struct step_ctx *c)
{
    const struct ep_node *n = c->self;
    TRY(exchange(c, n->name[1], MOVE_X, MOVE_Y, MOVE_SENT, MOVE_GOT));
    return exchange(c, n->name[1], MOVE_PROB, MOVE_YPROB, MOVE_SENT, MOVE_GOT);
}

enum { BACK_X, BACK_SENT, BACK_GOT, BACK_Y };
static int move_back(const struct step_ctx *c)
{
    const struct ep_node *n = c->self;
    return exchange(c, n->name[2], BACK_X, BACK_Y, BACK_SENT, BACK_GOT);
}

enum { SUM_TENSOR, SUM_WORK, SUM_USES };
static int sum_step(const struct step_ctx *c)
{
    const struct sum_node *n = c->self;
    const struct tensor *all = &c->t[SUM_TENSOR];
    struct tensor t = tensor_1d(all->data, all->dtype, tensor_elems(all)), work = c->t[SUM_WORK];
    return comm_all_reduce(n->comm, c->lane, n->name, &t, &work);
}

/* The last row of the load: what global_aux balances. */
static int load_step(const struct step_ctx *c)
{
    const struct sum_node *n = c->self;
    struct tensor last = tensor_rows(&c->t[SUM_TENSOR], c->t[SUM_TENSOR].dim[0] - 1, 1), work = c->t[SUM_WORK];
    struct tensor t = tensor_1d(last.data, last.dtype, tensor_elems(&last));
    return comm_all_reduce(n->comm, c->lane, n->name, &t, &work);
}

/* All rows but the last: the load of each sequence. */
static int sequences_step(const struct step_ctx *c)
{
    const struct sum_node *n = c->self;
    const struct tensor *load = &c->t[SUM_TENSOR];
    struct tensor t = tensor_1d(load->data, load->dtype, (load->dim[0] - 1) * load->dim[1]), work = c->t[SUM_WORK];
    return comm_all_reduce(n->comm, c->lane, n->name, &t, &work);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static int64_t buffer_rows(const struct build *b, int64_t local, int64_t k)
{
    int64_t ranks = b->mesh->ep, any = b->rows * min_i64(k, local);
    double factor = b->cfg->parallel.ep_capacity;
    if (factor == 0 && b->mesh->ep_rows == 0)
        return any;
    int64_t wanted =
        b->mesh->ep_rows > 0 ? b->mesh->ep_rows : (int64_t)ceil(factor * (double)(b->rows * k) / (double)ranks);
    /* FP8 sums over tokens in vectors of 16 codes. */
    return min_i64(round_up(max_i64(wanted, 1), b->cfg->gpu.precision == CFG_PRECISION_FP8 ? 16 : 1), any);
}

/* The largest buffer asked for, for the trainer: it is no number to be logged. */
static slot_id declare_need(struct build *b, int64_t cap)
{
    struct metric_list *l = b->metrics;
    slot_id need = build_state(b, "ep_need", tensor_1d(NULL, DT_F64, 1));
    graph_sum(b->g, need);
    if (need != NO_SLOT && mem_grow((void **)&l->m, &l->cap, (size_t)l->n + 1, sizeof *l->m, &b->g->err) == ST_OK)
        l->m[l->n++] = (struct metric){.tag = "buffer rows",
                                       .layer = b->layer,
                                       .n = 1,
                                       .offset = b->g->slots[need].offset,
                                       .room = cap,
                                       .eval = !training(b)};
    return need;
}

struct ep ep_declare_slots(struct build *b, struct ep_home *home, int64_t experts, int64_t k, int64_t width)
{
    struct ep ep = {.on = b->mode != BUILD_DECODE && (b->mesh->ep > 1 || b->mesh->ep_nodes)};
    if (!ep.on || b->g->err.code != ST_OK)
        return ep;
    struct graph *g = b->g;
    enum dtype wide = b->dev->wide;
    int64_t ranks = ep.ranks = b->mesh->ep;
    ep.local = experts / ranks;
    ep.cap = buffer_rows(b, ep.local, k);
    int64_t places = ranks * ep.cap;
    if (places > INT32_MAX)
        err_set(&g->err, ST_INVALID, "buffers of %lld rows for %lld ranks are more than 2147483647 rows",
                (long long)ep.cap, (long long)ranks);
    struct ep_node *n = graph_own(g, sizeof *n);
    if (n == NULL)
        return ep;
    *n = (struct ep_node){.comm = b->mesh->ep_comm,
                          .ranks = ranks,
                          .cap = ep.cap,
                          .name = {graph_name(g, "counts"), graph_name(g, "dispatch"), graph_name(g, "return")}};
    ep.node = n;
    ep.sorted_row = home->row;
    ep.sorted_src = home->src;
    home->row = graph_slot(g, "buffer_row", tensor_2d(NULL, DT_I32, b->rows, k));
    home->src = graph_slot(g, "buffer_src", tensor_1d(NULL, DT_I32, places));
    ep.count = graph_slot(g, "count", tensor_2d(NULL, DT_I32, ranks, ep.local));
    ep.rows = graph_slot(g, "buffer_rows", tensor_1d(NULL, DT_I32, ranks));
    ep.rcount = graph_slot(g, "got_count", tensor_2d(NULL, DT_I32, ranks, ep.local));
    ep.rrows = graph_slot(g, "got_rows", tensor_1d(NULL, DT_I32, ranks));
    ep.offset = graph_slot(g, "local_offset", tensor_1d(NULL, DT_I32, ep.local + 1));
    ep.from = graph_slot(g, "got_src", tensor_1d(NULL, DT_I32, places));
    ep.to = graph_slot(g, "got_row", tensor_2d(NULL, DT_I32, places, 1));
    home->x = build_real(b, "sent", places, width);
    home->dx = build_grad(b, "dsent", places, width);
    home->prob = graph_slot(g, "sent_prob", tensor_1d(NULL, wide, places));
    home->dprob = training(b) ? graph_slot(g, "dsent_prob", tensor_1d(NULL, wide, places)) : NO_SLOT;
    home->y = build_real(b, "returned", places, width);
    home->dy = build_grad(b, "dreturned", places, width);
    ep.rx = build_real(b, "got", places, width);
    ep.drx = build_grad(b, "dgot", places, width);
    ep.rprob = graph_slot(g, "got_prob", tensor_1d(NULL, wide, places));
    ep.drprob = training(b) ? graph_slot(g, "dgot_prob", tensor_1d(NULL, wide, places)) : NO_SLOT;
    ep.ry = build_real(b, "answer", places, width);
    ep.dry = build_grad(b, "danswer", places, width);
    ep.need = declare_need(b, ep.cap);
    return ep;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

void ep_declare_maps(struct build *b, const struct ep *ep, const struct ep_home *home)
{
    struct graph *g = b->g;
    int n = graph_node(g, "ep_send", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, epsend, .offset = of(g, home->offset), .row = of(g, ep->sorted_row),
             .src = of(g, ep->sorted_src), .to = of(g, home->row), .from = of(g, home->src), .count = of(g, ep->count),
             .rows = of(g, ep->rows), .need = of(g, ep->need));
    n = graph_node(g, "counts", LANE_COMM, ep->node);
    GRAPH_PHASE(g, n, PH_FWD, counts_fwd, [COUNTS_OUT] = READS(ep->count), [COUNTS_IN] = WRITES(ep->rcount));
    n = graph_node(g, "ep_recv", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, eprecv, .count = of(g, ep->rcount), .offset = of(g, ep->offset), .from = of(g, ep->from),
             .to = of(g, ep->to), .rows = of(g, ep->rrows));
}

static struct tensor column(struct tensor t) { return t.data == NULL ? t : tensor_2d(t.data, t.dtype, t.dim[0], 1); }

/* Slabs -> rows by expert. prob and yprob may be NO_SLOT. */
static void declare_sort(struct graph *g, int n, enum phase_id ph, const struct ep *ep, slot_id x, slot_id prob,
                         slot_id y, slot_id yprob)
{
    GRAPH_OP(g, n, ph, permute, .x = of(g, x), .src = of(g, ep->from), .row = of(g, ep->to),
             .prob = column(of(g, prob)), .y = of(g, y), .yprob = of(g, yprob), .k = 1);
}

/* Rows by expert -> buffers. */
static void declare_unsort(struct graph *g, int n, enum phase_id ph, const struct ep *ep, slot_id x, slot_id prob,
                           slot_id y, slot_id yprob)
{
    GRAPH_OP(g, n, ph, unpermute, .x = of(g, x), .row = of(g, ep->to), .xprob = of(g, prob), .y = of(g, y),
             .yprob = column(of(g, yprob)));
}

void ep_declare_dispatch(struct build *b, const struct ep *ep, const struct ep_home *home, const struct ep_rows *rows)
{
    struct graph *g = b->g;
    double bytes = (double)tensor_bytes(&g->slots[home->x].shape) + (double)tensor_bytes(&g->slots[home->prob].shape);
    int n = graph_node(g, "dispatch", LANE_COMM, ep->node);
    graph_role(g, n, ROLE_DISPATCH);
    GRAPH_PHASE(g, n, PH_FWD,
                move_rows, [MOVE_X] = READS(home->x), [MOVE_PROB] = READS(home->prob), [MOVE_SENT] = READS(ep->rows),
                [MOVE_GOT] = READS(ep->rrows), [MOVE_Y] = WRITES(ep->rx), [MOVE_YPROB] = WRITES(ep->rprob));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (training(b)) {
        GRAPH_PHASE(
            g, n, PH_BWD,
            move_rows, [MOVE_X] = READS(ep->drx), [MOVE_PROB] = READS(ep->drprob), [MOVE_SENT] = READS(ep->rrows),
            [MOVE_GOT] = READS(ep->rows), [MOVE_Y] = WRITES(home->dx), [MOVE_YPROB] = WRITES(home->dprob));
        graph_cost(g, n, PH_BWD, 0, bytes);
    }
    n = graph_node(g, "arrive", LANE_COMPUTE, NULL);
    declare_sort(g, n, PH_FWD, ep, ep->rx, ep->rprob, rows->x, rows->prob);
    graph_cost(g, n, PH_FWD, 0, 2 * bytes);
    if (!training(b))
        return;
    declare_sort(g, n, PH_REPLAY, ep, ep->rx, NO_SLOT, rows->x, NO_SLOT);
    graph_replay(g, rows->x, n);
    declare_unsort(g, n, PH_BWD, ep, rows->dx, rows->dprob, ep->drx, ep->drprob);
    graph_cost(g, n, PH_BWD, 0, 2 * bytes);
}

void ep_declare_return(struct build *b, const struct ep *ep, const struct ep_home *home, slot_id y, slot_id dy)
{
    struct graph *g = b->g;
    double bytes = (double)tensor_bytes(&g->slots[home->y].shape);
    int n = graph_node(g, "leave", LANE_COMPUTE, NULL);
    declare_unsort(g, n, PH_FWD, ep, y, NO_SLOT, ep->ry, NO_SLOT);
    graph_cost(g, n, PH_FWD, 0, 2 * bytes);
    if (training(b)) {
        declare_sort(g, n, PH_BWD, ep, ep->dry, NO_SLOT, dy, NO_SLOT);
        graph_cost(g, n, PH_BWD, 0, 2 * bytes);
    }
    n = graph_node(g, "return", LANE_COMM, ep->node);
    graph_role(g, n, ROLE_COMBINE);
    GRAPH_PHASE(g, n, PH_FWD, move_back, [BACK_X] = READS(ep->ry), [BACK_SENT] = READS(ep->rrows),
                [BACK_GOT] = READS(ep->rows), [BACK_Y] = WRITES(home->y));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (training(b)) {
        GRAPH_PHASE(g, n, PH_BWD, move_back, [BACK_X] = READS(home->dy), [BACK_SENT] = READS(ep->rows),
                    [BACK_GOT] = READS(ep->rrows), [BACK_Y] = WRITES(ep->dry));
        graph_cost(g, n, PH_BWD, 0, bytes);
    }
}

static struct sum_node *sum_over(struct build *b, struct comm *comm, const char *name)
{
    struct sum_node *n = graph_own(b->g, sizeof *n);
    if (n != NULL)
        *n = (struct sum_node){.comm = comm, .name = graph_name(b->g, name)};
    return n;
}

void ep_declare_load_sum(struct build *b, slot_id load)
{
    struct graph *g = b->g;
    if (load == NO_SLOT || b->mesh->stage == 1)
        return;
    int64_t experts = g->slots[load].shape.dim[1];
    struct sum_node *self = sum_over(b, b->mesh->stage_comm, "load_sum");
    slot_id work = graph_slot(g, "load_work", tensor_1d(NULL, DT_F64, b->mesh->stage * experts));
    int n = graph_node(g, "load_sum", LANE_COMM, self);
    GRAPH_PHASE(g, n, PH_FWD, load_step, [SUM_TENSOR] = ADDS(load), [SUM_WORK] = WRITES(work));
}

void ep_declare_sequence_sum(struct build *b, slot_id load, bool rows)
{
    struct graph *g = b->g;
    const struct mesh *m = b->mesh;
    bool divided = rows && m->tp > 1;
    int ranks = divided ? m->tp * m->cp : m->cp;
    if (load == NO_SLOT || ranks == 1)
        return;
    const struct tensor *shape = &g->slots[load].shape;
    struct sum_node *self = sum_over(b, divided ? m->batch_comm : m->cp_comm, "sequence_sum");
    slot_id work = graph_slot(g, "sequence_work", tensor_1d(NULL, DT_F64, ranks * (shape->dim[0] - 1) * shape->dim[1]));
    int n = graph_node(g, "sequence_sum", LANE_COMM, self);
    GRAPH_PHASE(g, n, PH_FWD, sequences_step, [SUM_TENSOR] = ADDS(load), [SUM_WORK] = WRITES(work));
}

void ep_declare_tally_sum(struct build *b, slot_id tally)
{
    if (tally == NO_SLOT || b->mesh->stage == 1 || b->g->err.code != ST_OK)
        return;
    struct sum_node *self = sum_over(b, b->mesh->stage_comm, "tally_sum");
    struct tensor shape = b->g->slots[tally].shape,
                  all = tensor_1d(NULL, DT_F64, b->mesh->stage * tensor_elems(&shape));
    slot_id work = build_state(b, "tally_work", all);
    if (self == NULL || work == NO_SLOT)
        return;
    build_update(b,
                 &(struct update_decl){.name = self->name,
                                       .lane = LANE_COMM,
                                       .fn = sum_step,
                                       .self = self,
                                       .n_uses = SUM_USES,
                                       .use = {[SUM_TENSOR] = {shape, ARENA_STATE, b->g->slots[tally].offset, USE_ADD},
                                               [SUM_WORK] = {all, ARENA_STATE, b->g->slots[work].offset, USE_WRITE}}});
}
