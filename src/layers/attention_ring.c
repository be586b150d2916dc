/* Ring attention (parallel.cp_comm=ring): keys and values of the ranks before travel from rank to rank, one block (a
 * rank's tokens) at a time, instead of being gathered.
 *
 * Block i of a rank is that of the rank i before it; block 0 is its own. n = rank: so many of other ranks it sees, with
 * a window only those that the window reaches, and `hops` of all ranks, so that every rank has the same messages.
 *   forward    kv_own = k, v; hop i: kv_i of every rank to the next (kv_0 = kv_own)
 *              block i: o_i, lse_i = attention(q, kv_i); merged in order of i: o, lse (ops/ring)
 *   backward   the hops again; block i: dq_i, dkv_i with the o and lse of all blocks. dq = sum in order of i. dkv of a
 *              block goes along with it to the next rank, which adds its own part, and from the last one that sees it
 *              home: the sum of rank + 1, rank + 2, ..., then of its own.
 * While block i is computed, hop i + 1 and the gradients of block i - 1 travel. A hop waits until the block two before
 * is done, so that there are two blocks of other ranks at a time.
 * Nodes: kv_own, hop<i>, core, ring<i>.core; backward also again, back<i>.hop, back<i>.core, back<i>.grad, back<i>.add,
 * home<rank>. */
#include "layers/attention_int.h"
#include "ops/attention/attention.h"
#include "ops/dropout/dropout.h"
#include "ops/gate/gate.h"
#include "ops/ring/ring.h"
#include "ops/rope/rope.h"

#include <string.h>

/* ---- messages -------------------------------------------------------------------------------- */

struct ring_message {
    const struct mesh *mesh; /* its group is looked up when a step runs: a plan on paper has none */
    const char *what;
    int from, to; /* home: ranks of the group */
};

static int comm_of(const struct step_ctx *c, struct comm **out)
{
    const struct ring_message *m = c->self;
    *out = m->mesh->cp_comm;
    return *out != NULL
               ? ST_OK
               : err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", m->what);
}

enum { HOP_SEND, HOP_RECV, HOP_AFTER };
static int hop_step(const struct step_ctx *c)
{
    const struct ring_message *m = c->self;
    struct tensor recv = c->t[HOP_RECV];
    struct comm *comm;
    TRY(comm_of(c, &comm));
    return comm_shift(comm, c->lane, m->what, &c->t[HOP_SEND], &recv, false);
}

static int home_step(const struct step_ctx *c)
{
    const struct ring_message *m = c->self;
    struct comm *comm;
    TRY(comm_of(c, &comm));
    return comm_hop(comm, c->lane, m->what, &c->t[comm->rank == m->from ? HOP_SEND : HOP_RECV], m->from, m->to);
}

/* after: a slot of what must be done first, so that its memory is free; NO_SLOT: nothing. */
static void message(struct build *b, enum phase_id ph, step_fn fn, const char *name, struct ring_message ends,
                    slot_id send, slot_id recv, slot_id after)
{
    struct graph *g = b->g;
    struct ring_message *self = graph_own(g, sizeof *self);
    slot_id some = send != NO_SLOT ? send : recv;
    if (self == NULL || g->err.code != ST_OK)
        return;
    *self = ends;
    self->mesh = b->mesh;
    self->what = graph_name(g, name);
    int n = graph_node(g, name, LANE_COMM, self);
    graph_role(g, n, ROLE_RING);
    GRAPH_PHASE(g, n, ph, fn, [HOP_SEND] = READS(send), [HOP_RECV] = WRITES(recv), [HOP_AFTER] = READS(after));
    graph_cost(g, n, ph, 0, some != NO_SLOT ? (double)tensor_bytes(&g->slots[some].shape) : 0);
}

/* ---- sizes and slots ------------------------------------------------------------------------- */

struct ring_block {
    slot_id kv, o, lse;              /* forward; kv of block 0 is what the rank sends; o, lse: where there are others */
    slot_id again, dq, dkv, arrived; /* backward: kv once more, gradients, those that came with it */
};
struct ring {
    int rank, size, hops, n; /* n: blocks of other ranks that this one sees */
    bool sends;              /* some rank sees this one's block */
    struct ring_block *block;
    slot_id sum, dq_sum, dgate, home;
};

/* So many blocks back a window reaches from the first query of a part of seq tokens. */
static int64_t blocks_reached(const struct attention *m)
{
    if (m->window == 0)
        return INT32_MAX;
    return m->window == 1 ? 0 : (m->window - 2) / m->seq + 1;
}

static slot_id numbered(struct build *b, bool wanted, const char *name, int i, int64_t cols)
{
    char text[32];
    snprintf(text, sizeof text, "%s%d", name, i);
    return wanted ? build_real(b, text, b->rows, cols) : NO_SLOT;
}

static void forward_slots(struct build *b, const struct attention *m, struct attention_slots *s, struct ring *r)
{
    int64_t width = m->heads * m->dim, kv = 2 * m->kv_heads * m->dim;
    char name[32];
    for (int i = 0; i <= r->n; i++) {
        struct ring_block *k = &r->block[i];
        k->kv = numbered(b, i > 0 || r->sends, "kv_", i, kv);
        k->o = numbered(b, r->n > 0, "o_", i, width);
        snprintf(name, sizeof name, "lse_%d", i);
        k->lse = r->n > 0 ? graph_slot(b->g, name, b->g->slots[s->lse].shape) : NO_SLOT;
    }
    if (r->n == 0)
        return;
    graph_sum(b->g, s->lse);
    bool narrow = b->dev->wide != b->dev->real;
    r->sum = narrow ? build_wide(b, "o_sum", b->rows, width) : s->o;
    graph_sum(b->g, r->sum);
}

static void backward_slots(struct build *b, const struct attention *m, struct ring *r)
{
    int64_t width = m->heads * m->dim, kv = 2 * m->kv_heads * m->dim;
    for (int i = 0; i <= r->n; i++) {
        struct ring_block *k = &r->block[i];
        k->again = numbered(b, i > 0 || r->sends, "kv_again_", i, kv);
        k->dq = numbered(b, true, "dq_", i, width);
        k->dkv = numbered(b, true, "dkv_", i, kv);
        k->arrived = numbered(b, i > 1, "dkv_came_", i, kv);
        if (i == 0 ? r->sends : i > 1)
            graph_sum(b->g, k->dkv);
    }
    r->home = r->sends ? build_real(b, "dkv_home", b->rows, kv) : NO_SLOT;
    r->dgate = m->gate_at >= 0 ? build_real(b, "dgate", b->rows, width) : NO_SLOT;
    r->dq_sum = r->n > 0 ? build_wide(b, "dq_sum", b->rows, width) : r->block[0].dq;
    if (r->n > 0)
        graph_sum(b->g, r->dq_sum);
}

static int ring_of(struct build *b, const struct attention *m, struct attention_slots *s, struct ring *r)
{
    *r = (struct ring){.rank = b->mesh->cp_rank, .size = b->mesh->cp, .sum = NO_SLOT};
    r->hops = (int)min_i64(r->size - 1, blocks_reached(m));
    r->n = r->rank < r->hops ? r->rank : r->hops;
    r->sends = r->hops > 0 && r->rank < r->size - 1;
    r->block = graph_own(b->g, (size_t)(r->hops + 1) * sizeof *r->block);
    if (r->block == NULL)
        return ST_NOMEM;
    for (int i = 0; i <= r->hops; i++)
        r->block[i] = (struct ring_block){NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT, NO_SLOT};
    forward_slots(b, m, s, r);
    if (training(b))
        backward_slots(b, m, r);
    return b->g->err.code;
}

/* ---- views ----------------------------------------------------------------------------------- */

/* Keys (0) or values (1) of the rows of a block: [T, G, D], and by sequence. */
static struct tensor half(const struct attention *m, struct tensor kv, int which)
{
    return attn_heads_of(m, kv, which * m->kv_heads * m->dim, m->kv_heads);
}
static struct tensor half_of(const struct attention *m, struct tensor kv, int which)
{
    return attn_batched(m, half(m, kv, which));
}

/* k, v -> the rows that travel. */
static void copy_own(struct graph *g, int n, enum phase_id ph, const struct attention *m,
                     const struct attention_slots *s, slot_id to)
{
    GRAPH_OP(g, n, ph, rope_fwd, .x = attn_keys(g, m, s), .y = half(m, of(g, to), 0)); /* copies */
    GRAPH_OP(g, n, ph, rope_fwd, .x = attn_heads_of(m, attn_kv_row(g, m, s), m->v_at, m->kv_heads),
             .y = half(m, of(g, to), 1));
}

/* Tokens in front of block i of a rank, and from its end to that of the rank's own block. */
static int64_t tokens_before(const struct attention *m, const struct ring *r, int i) { return (r->rank - i) * m->seq; }
static int64_t tokens_after(const struct attention *m, int i) { return i * m->seq; }

/* As attention.c counts: two FLOPs for each of the two products of a pair, of the own block the causal half. */
static double block_flops(const struct build *b, const struct attention *m, int i)
{
    double pairs = (double)(b->batch * m->seq) * (double)(i == 0 ? m->seq : 2 * m->seq);
    return 2.0 * pairs * (double)(m->heads * m->dim);
}
static double block_bytes(const struct build *b, const struct attention *m)
{
    return (double)dtype_bytes(b->dev->real) * (double)b->rows * (double)(2 * (m->heads + m->kv_heads) * m->dim);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* The sink takes part in the softmax once: with the own block. */
static void block_forward(struct build *b, const struct attention *m, const struct attention_slots *s,
                          const struct ring *r, int i)
{
    struct graph *g = b->g;
    const struct ring_block *k = &r->block[i];
    bool own = i == 0, only = r->n == 0;
    char name[32];
    snprintf(name, sizeof name, "ring%d.core", i);
    int n = graph_node(g, own ? "core" : name, LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, attention_fwd, .q = attn_batched(m, attn_query(g, m, s)),
             .k = own ? attn_batched(m, attn_keys(g, m, s)) : half_of(m, of(g, k->kv), 0),
             .v = own ? attn_values(m, attn_kv_row(g, m, s)) : half_of(m, of(g, k->kv), 1),
             .o = attn_heads(m, of(g, only ? s->o : k->o)), .lse = of(g, only ? s->lse : k->lse),
             .sink = own ? of(g, s->sink.w) : (struct tensor){0}, .doc_start = attn_doc_view(g, m, s->doc_start),
             .scale = m->scale, .window = m->window, .before = tokens_before(m, r, i), .after = tokens_after(m, i),
             .sink_zero = own && m->sink_zero, .drop = attention_dropout(b));
    if (!only) {
        bool rounds = i == r->n && r->sum != s->o;
        GRAPH_OP(g, n, PH_FWD, ring_merge, .o = attn_heads(m, of(g, k->o)), .lse = of(g, k->lse),
                 .sum = attn_heads(m, of(g, r->sum)), .total = of(g, s->lse),
                 .y = rounds ? attn_heads(m, of(g, s->o)) : (struct tensor){0});
    }
    if (i == r->n && m->gate_at >= 0)
        GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, s->o), .g = attn_gate(m, of(g, s->qkv)), .y = of(g, s->og));
    graph_cost(g, n, PH_FWD, block_flops(b, m, i), block_bytes(b, m));
}

static bool has_block(const struct ring *r, int i) { return i >= 0 && i <= r->n; }
/* Does this rank pass on what it had as block i, in the next hop? */
static bool passes(const struct ring *r, int i) { return has_block(r, i) && i < r->hops && r->rank < r->size - 1; }

static void ring_forward(struct build *b, const struct attention *m, const struct attention_slots *s,
                         const struct ring *r)
{
    char name[32];
    for (int i = 0; i <= r->hops; i++) {
        snprintf(name, sizeof name, "hop%d", i + 1);
        if (i < r->hops)
            message(b, PH_FWD, hop_step, name, (struct ring_message){0}, passes(r, i) ? r->block[i].kv : NO_SLOT,
                    has_block(r, i + 1) ? r->block[i + 1].kv : NO_SLOT,
                    i > 1 && has_block(r, i - 1) ? r->block[i - 1].lse : NO_SLOT);
        if (has_block(r, i))
            block_forward(b, m, s, r, i);
    }
}

/* ---- backward: nodes are declared last first ------------------------------------------------- */

static void block_backward(struct build *b, const struct attention *m, const struct attention_slots *s,
                           const struct ring *r, int i)
{
    struct graph *g = b->g;
    const struct ring_block *k = &r->block[i];
    bool own = i == 0;
    char name[32];
    snprintf(name, sizeof name, "back%d.core", i);
    int n = graph_node(g, name, LANE_COMPUTE, NULL);
    if (own && m->gate_at >= 0)
        GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, s->dog), .x = of(g, s->o), .g = attn_gate(m, of(g, s->qkv)),
                 .dx = of(g, s->dout), .dg = of(g, r->dgate));
    GRAPH_OP(g, n, PH_BWD, attention_bwd, .d_o = attn_heads(m, of(g, m->gate_at >= 0 ? s->dout : s->dog)),
             .q = attn_batched(m, attn_query(g, m, s)),
             .k = own ? attn_batched(m, attn_keys(g, m, s)) : half_of(m, of(g, k->again), 0),
             .v = own ? attn_values(m, attn_kv_row(g, m, s)) : half_of(m, of(g, k->again), 1),
             .o = attn_heads(m, of(g, s->o)), .lse = of(g, s->lse), .sink = own ? of(g, s->sink.w) : (struct tensor){0},
             .doc_start = attn_doc_view(g, m, s->doc_start), .dq = attn_heads(m, of(g, k->dq)),
             .dk = half_of(m, of(g, k->dkv), 0), .dv = half_of(m, of(g, k->dkv), 1),
             .dsink = own ? of(g, s->sink.dw) : (struct tensor){0}, .scale = m->scale, .window = m->window,
             .before = tokens_before(m, r, i), .after = tokens_after(m, i), .sink_zero = own && m->sink_zero,
             .drop = attention_dropout(b));
    if (r->n > 0)
        GRAPH_OP(g, n, PH_BWD, ring_add, .x = of(g, k->dq), .y = of(g, r->dq_sum));
    graph_cost(g, n, PH_BWD, 2.5 * block_flops(b, m, i), 3 * block_bytes(b, m));
}

/* What came with block i joins this rank's part. */
static void add_arrived(struct build *b, const struct ring *r, int i)
{
    struct graph *g = b->g;
    char name[32];
    snprintf(name, sizeof name, "back%d.add", i);
    int n = graph_node(g, name, LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_BWD, ring_add, .x = of(g, r->block[i].arrived), .y = of(g, r->block[i].dkv));
    graph_cost(g, n, PH_BWD, 0, 3 * (double)tensor_bytes(&g->slots[r->block[i].dkv].shape));
}

/* Gradients of the blocks that nobody sees after step i go to their owners. */
static void go_home(struct build *b, const struct ring *r, int i)
{
    char name[32];
    for (int owner = r->size - 2; owner >= 0; owner--) {
        int last = (int)min_i64(owner + r->hops, r->size - 1);
        if (last - owner != i)
            continue;
        snprintf(name, sizeof name, "home%d", owner);
        message(b, PH_BWD, home_step, name, (struct ring_message){.from = last, .to = owner},
                r->rank == last ? r->block[i].dkv : NO_SLOT, r->rank == owner ? r->home : NO_SLOT, NO_SLOT);
    }
}

/* In reverse: hop i + 1 and the gradients of block i - 1, then block i, then what came with it, then home. */
static void ring_backward(struct build *b, const struct attention *m, const struct attention_slots *s,
                          const struct ring *r)
{
    char name[32];
    for (int i = r->hops; i >= 0; i--) {
        if (i > 0)
            go_home(b, r, i);
        if (i > 1 && has_block(r, i))
            add_arrived(b, r, i);
        if (has_block(r, i))
            block_backward(b, m, s, r, i);
        snprintf(name, sizeof name, "back%d.grad", i);
        if (i > 1)
            message(b, PH_BWD, hop_step, name, (struct ring_message){0},
                    passes(r, i - 1) ? r->block[i - 1].dkv : NO_SLOT, has_block(r, i) ? r->block[i].arrived : NO_SLOT,
                    NO_SLOT);
        snprintf(name, sizeof name, "back%d.hop", i + 1);
        if (i < r->hops)
            message(b, PH_BWD, hop_step, name, (struct ring_message){0}, passes(r, i) ? r->block[i].again : NO_SLOT,
                    has_block(r, i + 1) ? r->block[i + 1].again : NO_SLOT,
                    i > 1 && has_block(r, i - 1) ? r->block[i - 1].dkv : NO_SLOT);
    }
    if (!r->sends)
        return;
    int n = graph_node(b->g, "again", LANE_COMPUTE, NULL);
    copy_own(b->g, n, PH_BWD, m, s, r->block[0].again);
    graph_cost(b->g, n, PH_BWD, 0, 2 * (double)tensor_bytes(&b->g->slots[r->block[0].again].shape));
}

/* The row of dqkv, from the sums. */
static void row_gradient(struct build *b, int n, const struct attention *m, const struct attention_slots *s,
                         const struct ring *r)
{
    struct graph *g = b->g;
    struct tensor qkv = of(g, s->qkv), dqkv = of(g, s->dqkv), drow = attn_dkv_row(g, m, s),
                  dkv = of(g, r->block[0].dkv), dq = of(g, r->dq_sum);
    int64_t kv = m->kv_heads * m->dim;
    if (dq.dtype != b->dev->real) {
        dq = of(g, s->dq);
        GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, r->dq_sum), .y = dq);
    }
    if (r->sends)
        GRAPH_OP(g, n, PH_BWD, ring_add, .x = of(g, r->home), .y = dkv);
    attention_unrotate(g, n, m, s, attn_heads_of(m, dq, 0, m->heads), attn_raw_query(m, dqkv), attn_raw_query(m, qkv),
                       &s->q_norm, s->rstd_q);
    attention_unrotate(g, n, m, s, half(m, dkv, 0), attn_raw_keys(m, drow), attn_raw_keys(m, attn_kv_row(g, m, s)),
                       &s->k_norm, s->rstd_k);
    GRAPH_OP(g, n, PH_BWD, dropout, .x = tensor_cols(&dkv, kv, kv), .y = tensor_cols(&drow, m->v_at, kv));
    if (m->gate_at >= 0)
        GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, r->dgate), .y = attn_gate(m, dqkv));
    graph_cost(g, n, PH_BWD, 0, 2 * (double)dtype_bytes(b->dev->real) * (double)b->rows * (double)m->width);
}

int attention_ring(struct build *b, const struct attention *m, struct attention_slots *s)
{
    struct graph *g = b->g;
    struct ring r;
    TRY(ring_of(b, m, s, &r));
    int n = graph_node(g, "kv_own", LANE_COMPUTE, NULL);
    if (r.sends) {
        copy_own(g, n, PH_FWD, m, s, r.block[0].kv);
        graph_cost(g, n, PH_FWD, 0, 2 * (double)tensor_bytes(&g->slots[r.block[0].kv].shape));
    }
    if (training(b)) {
        row_gradient(b, n, m, s, &r);
        ring_backward(b, m, s, &r);
    }
    ring_forward(b, m, s, &r);
    return g->err.code;
}
