/* Experts on several ranks (expert parallelism). Each of P ranks holds E / P experts, or of each a slice of its width,
 * as one of `etp` ranks with slices of the same ones (expert tensor parallelism); rows travel.
 *
 * Shapes: T tokens here, k choices each, buffers of cap rows for each rank, S = P cap places in all, p choices of a row
 * that travels. A token is one row for a rank, however many of its experts are there.
 *   home:     row [T, m], src [S]    places of tokens in the buffers, m at most          epdest, moeplan, epsend
 *             choices [S, p]         the experts of each place                           epchoices
 *             x [S, d], prob [S, p]  rows in buffers by destination                      permute
 *   counts    rows [P]               rows of each buffer                               all-to-all
 *   dispatch  rx [e S, d], ...       buffers as they arrive, by sender, of all e = etp   all-to-all, gather over etp
 *   arrive    x [R, d], prob [R]     sorted by local expert, then sender               moeplan, permute
 *   leave     ry [e S, d]            sums of the outputs of a row's experts, in order of k, in the senders' buffers
 *   return    y [S, d]               buffers at home again                  sum over etp, all-to-all
 * The home adds up what the ranks returned for a token in the order of ranks. Gradients take the same steps in the
 * other direction. Only the exchanges run on the communication lane; what is around them computes. Places of a buffer
 * behind its rows hold nothing that is read.
 *
 * With parallel.ep_fp8 rows travel as FP8 codes, in the forward pass only: x and rx are codes of the tokens, from which
 * `arrive` makes values; with `both` so are the sums that travel back. The gradient of rounding is taken as 1, and
 * gradients travel as they are.
 *
 * cap and R hold any routing (every token may want a rank's experts), or by parallel.ep_capacity less; then `need` and
 * `expert_need` say how much was wanted, and the trainer repeats the step with more room before anything is updated (or
 * the batch, in evaluation). */
#include "layers/moe_ep_int.h"
#include "ops/epplan/epplan.h"
#include "ops/moeplan/moeplan.h"
#include "ops/permute/permute.h"
#include "ops/row8/row8.h"

#include <math.h>

struct ep_node {
    const struct mesh *mesh; /* its groups are looked up when a step runs: a plan on paper has none */
    const char *name[3];     /* counts, dispatch, return: for the board */
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
    int size = n->mesh->ep_comm->size;
    const int64_t dim[2] = {size, n->ranks / size};
    struct tensor send = tensor_shape(DT_I32, 2, dim), recv = send, all = {0};
    send.data = c->t[COUNTS_OUT].data;
    recv.data = c->t[COUNTS_IN].data;
    return comm_all_to_all(n->mesh->ep_comm, c->lane, n->name[0], &send, &recv, &all, &all);
}

/* What travels: slot numbers of a step. Towards the experts `to` has a part for each rank that shares them, of which
 * this one's is filled and gathered; from them, `sum` is this rank's part of the sum of theirs. */
struct travel {
    int from, to, sum;
    bool whole; /* places behind the rows count, too */
};
enum { NO_SUM = -1 };

static struct tensor flat(const struct tensor *t) { return tensor_1d(t->data, t->dtype, tensor_elems(t)); }

/* Buffers [ranks, cap, ...] in memory at `from` and `to`. One rank that plays several has them one after the other. */
static int exchange(const struct step_ctx *c, const char *what, struct tensor from, struct tensor to,
                    const struct tensor *sent, const struct tensor *got)
{
    const struct ep_node *n = c->self;
    struct comm *comm = n->mesh->ep_comm;
    struct dev *d = c->lane->dev;
    struct tensor none = {0};
    int64_t width = tensor_elems(&from) / (n->ranks * n->cap);
    const int64_t dim[3] = {comm->size, n->ranks / comm->size * n->cap, width};
    struct tensor out = tensor_shape(from.dtype, 3, dim), in = tensor_shape(to.dtype, 3, dim);
    out.data = from.data;
    in.data = to.data;
    bool each = comm->size == n->ranks && sent != NULL;
    if (d->vt->record == NULL) /* a host: what is behind the rows is looked at by the search for NaN */
        TRY(d->vt->fill(d, in.data, 0, tensor_bytes(&in), c->lane->err));
    return comm_all_to_all(comm, c->lane, what, &out, &in, each ? sent : &none, each ? got : &none);
}

/* To the experts. */
static int travel_out(const struct step_ctx *c, const char *what, int sent, int got, const struct travel *list, int n)
{
    const struct ep_node *self = c->self;
    const struct mesh *m = self->mesh;
    TRY(comm_group_begin(m->ep_comm, c->lane, what));
    for (int i = 0; i < n; i++) {
        struct tensor from = c->t[list[i].from], to = c->t[list[i].to];
        to.data = (char *)to.data + m->etp_rank * tensor_bytes(&from);
        TRY(exchange(c, what, from, to, list[i].whole ? NULL : &c->t[sent], &c->t[got]));
    }
    TRY(comm_group_end(m->ep_comm, c->lane));
    if (m->etp == 1)
        return ST_OK;
    TRY(comm_group_begin(m->etp_comm, c->lane, what));
    for (int i = 0; i < n; i++) {
        struct tensor all = flat(&c->t[list[i].to]);
        TRY(comm_all_gather(m->etp_comm, c->lane, what, &all, tensor_elems(&all) / m->etp));
    }
    return comm_group_end(m->etp_comm, c->lane);
}

/* From the experts; work: for the sums. */
static int travel_in(const struct step_ctx *c, const char *what, int sent, int got, const struct travel *list, int n,
                     int work)
{
    const struct ep_node *self = c->self;
    const struct mesh *m = self->mesh;
    int64_t used = 0;
    if (m->etp > 1)
        TRY(comm_group_begin(m->etp_comm, c->lane, what));
    for (int i = 0; i < n && m->etp > 1; i++) {
        struct tensor all = flat(&c->t[list[i].from]), part = flat(&c->t[list[i].sum]);
        struct piece_slice s = {.piece = tensor_elems(&part), .n = tensor_elems(&part)};
        int64_t room = comm_sum_room(m->etp, s.n, all.dtype, false);
        struct tensor scratch = tensor_1d((char *)c->t[work].data + used, DT_U8, room);
        TRY(comm_sum_pieces(m->etp_comm, c->lane, what, &all, s, &part, false, &scratch));
        used += room;
    }
    if (m->etp > 1)
        TRY(comm_group_end(m->etp_comm, c->lane));
    TRY(comm_group_begin(m->ep_comm, c->lane, what));
    for (int i = 0; i < n; i++)
        TRY(exchange(c, what, c->t[m->etp > 1 ? list[i].sum : list[i].from], c->t[list[i].to], &c->t[sent],
                     &c->t[got]));
    return comm_group_end(m->ep_comm, c->lane);
}

enum { OUT_X, OUT_PROB, OUT_CHOICES, OUT_SENT, OUT_GOT, OUT_Y, OUT_YPROB, OUT_YCHOICES };
static int dispatch_fwd(const struct step_ctx *c)
{
    static const struct travel list[] = {
        {OUT_X, OUT_Y, NO_SUM, false}, {OUT_PROB, OUT_YPROB, NO_SUM, false}, {OUT_CHOICES, OUT_YCHOICES, NO_SUM, true}};
    return travel_out(c, ((const struct ep_node *)c->self)->name[1], OUT_SENT, OUT_GOT, list, countof(list));
}

enum { GRAD_X, GRAD_PROB, GRAD_SENT, GRAD_GOT, GRAD_Y, GRAD_YPROB, GRAD_XSUM, GRAD_PSUM, GRAD_WORK };
static int dispatch_bwd(const struct step_ctx *c)
{
    static const struct travel list[] = {{GRAD_X, GRAD_Y, GRAD_XSUM, false}, {GRAD_PROB, GRAD_YPROB, GRAD_PSUM, false}};
    return travel_in(c, ((const struct ep_node *)c->self)->name[1], GRAD_SENT, GRAD_GOT, list, countof(list),
                     GRAD_WORK);
}

enum { BACK_X, BACK_SENT, BACK_GOT, BACK_Y, BACK_SUM, BACK_WORK };
static int return_fwd(const struct step_ctx *c)
{
    static const struct travel list[] = {{BACK_X, BACK_Y, BACK_SUM, false}};
    return travel_in(c, ((const struct ep_node *)c->self)->name[2], BACK_SENT, BACK_GOT, list, 1, BACK_WORK);
}

static int return_bwd(const struct step_ctx *c)
{
    static const struct travel list[] = {{BACK_X, BACK_Y, NO_SUM, false}};
    return travel_out(c, ((const struct ep_node *)c->self)->name[2], BACK_SENT, BACK_GOT, list, 1);
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

double tokens_on_rank(const struct config_model *c, int64_t ranks)
{
    double none = 1, reached, experts = (double)c->experts;
    for (int64_t i = 0; i < min_i64(c->topk, c->experts); i++)
        none *= fmax(experts - experts / (double)ranks - (double)i, 0) / (experts - (double)i);
    if (c->router_group_topk == 0)
        return 1 - none;
    reached = (double)c->router_group_topk * fmax(1, (double)ranks / (double)c->router_groups);
    return fmin(1 - none, reached / (double)ranks);
}

/* Rows of a buffer, and of the experts of this rank. */
static void set_rows(const struct build *b, struct ep *ep, int64_t k, bool plays)
{
    double factor = b->cfg->parallel.ep_capacity, tokens = (double)b->rows;
    int64_t senders = ep->etp * (plays ? 1 : ep->ranks);
    ep->cap = b->rows;
    if (factor > 0)
        ep->cap = (int64_t)ceil(factor * tokens * tokens_on_rank(&b->cfg->model, ep->ranks));
    if (b->mesh->ep_rows > 0)
        ep->cap = b->mesh->ep_rows;
    ep->cap = min_i64(max_i64(ep->cap, 1), b->rows);
    ep->places = ep->ranks * ep->cap;
    int64_t any = plays ? b->rows * k : ep->etp * ep->places * ep->per;
    ep->rows = any;
    if (factor > 0)
        ep->rows = senders * (int64_t)ceil(factor * tokens * (double)k / (double)(plays ? 1 : ep->ranks));
    if (b->mesh->ep_expert_rows > 0)
        ep->rows = b->mesh->ep_expert_rows;
    /* FP8 sums over tokens in vectors of 16 codes. */
    int64_t multiple = b->cfg->gpu.precision == CFG_PRECISION_FP8 ? 16 : 1;
    ep->rows = min_i64(round_up(max_i64(ep->rows, 1), multiple), any);
}

/* What the step asked for, for the trainer: it is no number to be logged. */
static slot_id declare_need(struct build *b, const char *name, enum room_kind kind, int64_t room)
{
    struct metric_list *l = b->metrics;
    slot_id need = build_state(b, name, tensor_1d(NULL, DT_F64, 1));
    graph_sum(b->g, need);
    if (need != NO_SLOT && mem_grow((void **)&l->m, &l->cap, (size_t)l->n + 1, sizeof *l->m, &b->g->err) == ST_OK)
        l->m[l->n++] = (struct metric){.tag = name,
                                       .layer = b->layer,
                                       .n = 1,
                                       .offset = b->g->slots[need].offset,
                                       .room = room,
                                       .room_kind = kind,
                                       .eval = !training(b)};
    return need;
}

static void declare_map_slots(struct build *b, struct ep *ep, struct ep_home *home, int64_t k, int64_t local)
{
    struct graph *g = b->g;
    int64_t all = ep->etp * ep->places;
    ep->dest = graph_slot(g, "dest", tensor_2d(NULL, DT_I32, b->rows, ep->most));
    ep->dest_offset = graph_slot(g, "dest_offset", tensor_1d(NULL, DT_I32, ep->ranks + 1));
    ep->dest_row = graph_slot(g, "dest_row", tensor_2d(NULL, DT_I32, b->rows, ep->most));
    ep->dest_src = graph_slot(g, "dest_src", tensor_1d(NULL, DT_I32, b->rows * ep->most));
    home->row = graph_slot(g, "buffer_row", tensor_2d(NULL, DT_I32, b->rows, ep->most));
    home->src = graph_slot(g, "buffer_src", tensor_1d(NULL, DT_I32, ep->places));
    home->k = ep->most;
    home->prob_row = graph_slot(g, "choice_row", tensor_2d(NULL, DT_I32, b->rows, k));
    home->prob_src = graph_slot(g, "choice_src", tensor_1d(NULL, DT_I32, ep->places * ep->per));
    ep->leave = graph_slot(g, "buffer_rows", tensor_1d(NULL, DT_I32, ep->ranks));
    ep->arrive = graph_slot(g, "got_rows", tensor_1d(NULL, DT_I32, ep->ranks));
    ep->sent = graph_slot(g, "choices", tensor_2d(NULL, DT_I32, ep->places, ep->per));
    ep->got = graph_slot(g, "got_choices", tensor_2d(NULL, DT_I32, all, ep->per));
    ep->offset = graph_slot(g, "local_offset", tensor_1d(NULL, DT_I32, local + 1));
    ep->to = graph_slot(g, "got_row", tensor_2d(NULL, DT_I32, all, ep->per));
    ep->from = graph_slot(g, "got_src", tensor_1d(NULL, DT_I32, ep->rows));
}

static slot_id wide_grad(struct build *b, const char *name, struct tensor shape)
{
    return training(b) ? graph_slot(b->g, name, shape) : NO_SLOT;
}

static slot_id build_codes(struct build *b, const char *name, int64_t rows, int64_t width)
{
    return graph_slot(b->g, name, tensor_2d(NULL, DT_U8, rows, row8_bytes(width)));
}

static void declare_row_slots(struct build *b, struct ep *ep, struct ep_home *home, int64_t width)
{
    struct graph *g = b->g;
    int64_t places = ep->places, all = ep->etp * places;
    struct tensor prob = tensor_1d(NULL, b->dev->wide, places * ep->per),
                  all_prob = tensor_2d(NULL, b->dev->wide, all, ep->per);
    home->x = ep->codes_there ? build_codes(b, "sent", places, width) : build_real(b, "sent", places, width);
    home->dx = build_grad(b, "dsent", places, width);
    home->prob = graph_slot(g, "sent_prob", prob);
    home->dprob = wide_grad(b, "dsent_prob", prob);
    home->y = build_real(b, "returned", places, width);
    home->dy = build_grad(b, "dreturned", places, width);
    ep->rx = ep->codes_there ? build_codes(b, "got", all, width) : build_real(b, "got", all, width);
    ep->ry_codes = ep->codes_back ? build_codes(b, "answer_codes", all, width) : NO_SLOT;
    home->y_codes = ep->codes_back ? build_codes(b, "returned_codes", places, width) : NO_SLOT;
    ep->drx = build_grad(b, "dgot", all, width);
    ep->rprob = graph_slot(g, "got_prob", all_prob);
    ep->drprob = wide_grad(b, "dgot_prob", all_prob);
    ep->ry = build_real(b, "answer", all, width);
    ep->dry = build_grad(b, "danswer", all, width);
    ep->dx_sum = ep->dprob_sum = ep->y_sum = NO_SLOT;
    if (ep->etp == 1)
        return;
    ep->y_sum = build_real(b, "answer_sum", places, width);
    ep->dx_sum = build_grad(b, "dgot_sum", places, width);
    ep->dprob_sum = wide_grad(b, "dgot_prob_sum", prob);
}

/* One rank that acts as one of parallel.loop_ranks sends its rows in as many buffers, all to itself. */
static int64_t played_ranks(const struct build *b, int64_t experts)
{
    int64_t n = min_i64(b->cfg->parallel.loop_ranks, experts);
    while (experts % n != 0)
        n--;
    return n;
}

struct ep ep_declare_slots(struct build *b, struct ep_home *home, slot_id idx, int64_t experts, int64_t k,
                           int64_t width)
{
    const struct mesh *m = b->mesh;
    struct ep ep = {.on = b->mode != BUILD_DECODE && (m->ep > 1 || m->etp > 1 || m->ep_nodes), .idx = idx};
    if (!ep.on || b->g->err.code != ST_OK)
        return ep;
    struct graph *g = b->g;
    bool plays = m->ep_nodes && m->ep == 1;
    ep.ranks = plays ? played_ranks(b, experts) : m->ep;
    ep.etp = m->etp;
    ep.whole = plays;
    ep.codes_there = b->cfg->parallel.ep_fp8 != CFG_EP_FP8_OFF;
    ep.codes_back = b->cfg->parallel.ep_fp8 == CFG_EP_FP8_BOTH;
    ep.group = experts / ep.ranks;
    ep.per = min_i64(k, ep.group);
    ep.most = min_i64(k, ep.ranks);
    set_rows(b, &ep, k, plays);
    if (ep.etp * ep.places > INT32_MAX / ep.per)
        err_set(&g->err, ST_INVALID, "buffers of %lld rows for %lld ranks are more than 2147483647 rows",
                (long long)ep.cap, (long long)(ep.etp * ep.ranks));
    struct ep_node *n = graph_own(g, sizeof *n);
    if (n == NULL)
        return ep;
    *n = (struct ep_node){.mesh = m,
                          .ranks = ep.ranks,
                          .cap = ep.cap,
                          .name = {graph_name(g, "counts"), graph_name(g, "dispatch"), graph_name(g, "return")}};
    ep.node = n;
    declare_map_slots(b, &ep, home, k, plays ? experts : ep.group);
    declare_row_slots(b, &ep, home, width);
    ep.need = declare_need(b, "ep_need", ROOM_BUFFER, ep.cap);
    ep.expert_need = declare_need(b, "expert_need", ROOM_EXPERTS, ep.rows);
    return ep;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

void ep_declare_maps(struct build *b, const struct ep *ep, const struct ep_home *home)
{
    struct graph *g = b->g;
    int n = graph_node(g, "ep_send", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, epdest, .idx = of(g, ep->idx), .dest = of(g, ep->dest), .most = ep->most, .ranks = ep->ranks,
             .local = ep->group);
    GRAPH_OP(g, n, PH_FWD, moeplan, .idx = of(g, ep->dest), .offset = of(g, ep->dest_offset),
             .row = of(g, ep->dest_row), .src = of(g, ep->dest_src));
    GRAPH_OP(g, n, PH_FWD, epsend, .offset = of(g, ep->dest_offset), .row = of(g, ep->dest_row),
             .src = of(g, ep->dest_src), .to = of(g, home->row), .from = of(g, home->src), .rows = of(g, ep->leave),
             .need = of(g, ep->need));
    GRAPH_OP(g, n, PH_FWD, epchoices, .idx = of(g, ep->idx), .to = of(g, home->row), .from = of(g, home->src),
             .sent = of(g, ep->sent), .src = of(g, home->prob_src), .row = of(g, home->prob_row), .per = ep->per,
             .ranks = ep->ranks, .local = ep->group, .whole = ep->whole);
    n = graph_node(g, "counts", LANE_COMM, ep->node);
    GRAPH_PHASE(g, n, PH_FWD, counts_fwd, [COUNTS_OUT] = READS(ep->leave), [COUNTS_IN] = WRITES(ep->arrive));
}

void ep_declare_pack(struct build *b, int n, const struct ep *ep, const struct ep_home *home, slot_id h)
{
    struct graph *g = b->g;
    double bytes = (double)tensor_bytes(&g->slots[h].shape) + (double)tensor_bytes(&g->slots[home->x].shape);
    enum phase_id phases[] = {PH_FWD, PH_REPLAY};
    for (int i = 0; i < (training(b) ? 2 : 1); i++) {
        GRAPH_OP(g, n, phases[i], row8_pack, .x = of(g, h), .src = of(g, home->src), .q = of(g, home->x),
                 .k = ep->most);
        graph_cost(g, n, phases[i], 0, bytes);
    }
    if (training(b))
        graph_replay(g, home->x, n);
}

void ep_declare_unpack(struct build *b, int n, const struct ep_home *home)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_FWD, row8_unpack, .q = of(g, home->y_codes), .y = of(g, home->y), .k = 1);
}

/* Slabs -> rows by expert. prob and yprob may be NO_SLOT. */
static void declare_sort(struct graph *g, int n, enum phase_id ph, const struct ep *ep, slot_id x, slot_id prob,
                         slot_id y, slot_id yprob)
{
    GRAPH_OP(g, n, ph, permute, .x = of(g, x), .src = of(g, ep->from), .row = of(g, ep->to), .prob = of(g, prob),
             .y = of(g, y), .yprob = of(g, yprob), .k = ep->per);
}

/* Rows by expert -> buffers: a row's experts are added up in order of k. */
static void declare_unsort(struct graph *g, int n, enum phase_id ph, const struct ep *ep, slot_id x, slot_id prob,
                           slot_id y, slot_id yprob)
{
    GRAPH_OP(g, n, ph, unpermute, .x = of(g, x), .row = of(g, ep->to), .xprob = of(g, prob), .y = of(g, y),
             .yprob = of(g, yprob));
}

/* What arrived, as the experts' rows; prob NO_SLOT: without their probabilities. */
static void declare_values(struct graph *g, int n, enum phase_id ph, const struct ep *ep, slot_id x, slot_id prob)
{
    slot_id from = prob != NO_SLOT ? ep->rprob : NO_SLOT;
    if (!ep->codes_there) {
        declare_sort(g, n, ph, ep, ep->rx, from, x, prob);
        return;
    }
    GRAPH_OP(g, n, ph, row8_unpack, .q = of(g, ep->rx), .src = of(g, ep->from), .y = of(g, x), .k = ep->per);
    if (prob != NO_SLOT)
        declare_sort(g, n, ph, ep, NO_SLOT, from, NO_SLOT, prob);
}

static double slot_bytes(const struct graph *g, slot_id s) { return (double)tensor_bytes(&g->slots[s].shape); }

/* Scratch for sums over the ranks that share each expert; b may be NO_SLOT. */
static slot_id sum_work(struct build *b, const struct ep *ep, const char *name, slot_id x, slot_id y)
{
    int64_t bytes = 0;
    for (int i = 0; i < 2 && ep->etp > 1; i++) {
        slot_id s = i == 0 ? x : y;
        const struct tensor *t = s != NO_SLOT ? &b->g->slots[s].shape : NULL;
        bytes += t != NULL ? comm_sum_room((int)ep->etp, tensor_elems(t), t->dtype, false) : 0;
    }
    return build_work(b, name, bytes);
}

static void declare_travel(struct build *b, const struct ep *ep, const struct ep_home *home)
{
    struct graph *g = b->g;
    double bytes = slot_bytes(g, home->x) + slot_bytes(g, home->prob) + slot_bytes(g, ep->sent);
    int n = graph_node(g, "dispatch", LANE_COMM, ep->node);
    graph_role(g, n, ROLE_DISPATCH);
    GRAPH_PHASE(g, n, PH_FWD, dispatch_fwd, [OUT_X] = READS(home->x), [OUT_PROB] = READS(home->prob),
                [OUT_CHOICES] = READS(ep->sent), [OUT_SENT] = READS(ep->leave), [OUT_GOT] = READS(ep->arrive),
                [OUT_Y] = WRITES(ep->rx), [OUT_YPROB] = WRITES(ep->rprob), [OUT_YCHOICES] = WRITES(ep->got));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    slot_id work = sum_work(b, ep, "dgot_sums", ep->dx_sum, ep->dprob_sum);
    GRAPH_PHASE(
        g, n, PH_BWD,
        dispatch_bwd, [GRAD_X] = READS(ep->drx), [GRAD_PROB] = READS(ep->drprob), [GRAD_SENT] = READS(ep->arrive),
        [GRAD_GOT] = READS(ep->leave), [GRAD_Y] = WRITES(home->dx), [GRAD_YPROB] = WRITES(home->dprob),
        [GRAD_XSUM] = WRITES(ep->dx_sum), [GRAD_PSUM] = WRITES(ep->dprob_sum), [GRAD_WORK] = WRITES(work));
    graph_cost(g, n, PH_BWD, 0, slot_bytes(g, home->dx) + slot_bytes(g, home->dprob));
}

void ep_declare_dispatch(struct build *b, const struct ep *ep, const struct ep_home *home, const struct ep_rows *rows)
{
    struct graph *g = b->g;
    declare_travel(b, ep, home);
    double bytes = slot_bytes(g, ep->rx) + slot_bytes(g, rows->x);
    int n = graph_node(g, "arrive", LANE_COMPUTE, NULL);
    int64_t all = ep->etp * ep->places * ep->per;
    GRAPH_OP(g, n, PH_FWD, moeplan, .idx = of(g, ep->got), .offset = of(g, ep->offset), .row = of(g, ep->to),
             .src = of(g, ep->from), .need = of(g, ep->expert_need), .cut = all - ep->rows);
    declare_values(g, n, PH_FWD, ep, rows->x, rows->prob);
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    declare_values(g, n, PH_REPLAY, ep, rows->x, NO_SLOT);
    graph_replay(g, rows->x, n);
    graph_cost(g, n, PH_REPLAY, 0, bytes);
    declare_unsort(g, n, PH_BWD, ep, rows->dx, rows->dprob, ep->drx, ep->drprob);
    graph_cost(g, n, PH_BWD, 0, bytes);
}

void ep_declare_return(struct build *b, const struct ep *ep, const struct ep_home *home, slot_id y, slot_id dy)
{
    struct graph *g = b->g;
    slot_id out = ep->codes_back ? ep->ry_codes : ep->ry, in = ep->codes_back ? home->y_codes : home->y;
    double around = slot_bytes(g, ep->ry) + slot_bytes(g, y);
    int n = graph_node(g, "leave", LANE_COMPUTE, NULL);
    declare_unsort(g, n, PH_FWD, ep, y, NO_SLOT, ep->ry, NO_SLOT);
    if (ep->codes_back)
        GRAPH_OP(g, n, PH_FWD, row8_pack, .x = of(g, ep->ry), .q = of(g, ep->ry_codes), .k = 1);
    graph_cost(g, n, PH_FWD, 0, around);
    if (training(b)) {
        declare_sort(g, n, PH_BWD, ep, ep->dry, NO_SLOT, dy, NO_SLOT);
        graph_cost(g, n, PH_BWD, 0, around);
    }
    n = graph_node(g, "return", LANE_COMM, ep->node);
    graph_role(g, n, ROLE_COMBINE);
    slot_id work = sum_work(b, ep, "answer_sums", ep->y_sum, NO_SLOT);
    GRAPH_PHASE(g, n, PH_FWD,
                return_fwd, [BACK_X] = READS(out), [BACK_SENT] = READS(ep->arrive), [BACK_GOT] = READS(ep->leave),
                [BACK_Y] = WRITES(in), [BACK_SUM] = WRITES(ep->y_sum), [BACK_WORK] = WRITES(work));
    graph_cost(g, n, PH_FWD, 0, slot_bytes(g, in));
    if (training(b)) {
        GRAPH_PHASE(g, n, PH_BWD, return_bwd, [BACK_X] = READS(home->dy), [BACK_SENT] = READS(ep->leave),
                    [BACK_GOT] = READS(ep->arrive), [BACK_Y] = WRITES(ep->dry));
        graph_cost(g, n, PH_BWD, 0, slot_bytes(g, home->dy));
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
