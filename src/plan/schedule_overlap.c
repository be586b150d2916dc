/* From units to nodes, and the merge of a forward and a backward unit that hides what ranks exchange around a layer.
 *
 * A chunk's nodes are cut at these exchanges, so brackets in a pattern make no difference:
 *
 *     pre, in, core, out, pre, in, core, out, ..., tail
 *
 * "in" are the all-to-alls that bring rows to experts (dispatch), or the gather of a tensor-parallel layer's rows;
 * "out" those that bring them back (combine), or the sum and scatter. They run on the comm lane, all else (joints too)
 * on others. Forward unit f and backward unit b of different microbatches depend on different data, so one's
 * exchanges can run beside the other's arithmetic. Around experts there is much of it (overlap=ep):
 *
 *     comm     out_b         | in_f         in_b               | out_f
 *     compute  pre_f         | core_b       dw of core_b, core_f | pre_b, dw of pre_b
 *
 * Around tensor-parallel layers are joints only, so exchanges hide behind the layers themselves (overlap=tp):
 *
 *     comm     out_b         | out_f        | in_b, in of the next f
 *     compute  core_f        | core_b       | pre of the next f, dw of core_b | pre_b
 *
 * Only the order of launches is decided here. Waits come from the planner, so a wrong order could be slow, not false;
 * except for sums over microbatches, whose order is kept (see grows_with). */
#include "plan/plan_int.h"

#include <stdlib.h>

/* ---- cutting --------------------------------------------------------------------------------- */

static int add_cut(struct chunk_cut *k, struct layer_cut m, struct err *e)
{
    TRY(mem_grow((void **)&k->cut, &k->cap_cuts, (size_t)k->n_cuts + 1, sizeof *k->cut, e));
    k->cut[k->n_cuts++] = m;
    return ST_OK;
}

static bool opens(enum node_role role, enum overlap_kind o)
{
    return role == ROLE_DISPATCH || (role == ROLE_ROWS_IN && o == OVERLAP_TP);
}
static bool closes(enum node_role role, enum overlap_kind o)
{
    return role == ROLE_COMBINE || (role == ROLE_ROWS_OUT && o == OVERLAP_TP);
}

/* "in" reaches from its first to its last node before "out", which reaches to its last before the next "in". */
static int cut_chunk(const struct graph *g, struct chunk_cut *k, enum overlap_kind o, struct err *e)
{
    bool open = false; /* the last of these nodes was an "in" */
    struct layer_cut m = {0};
    for (int i = 0; i < k->n_nodes; i++) {
        const struct node *n = &g->nodes[k->nodes[i]];
        if (opens(n->role, o)) {
            if (!open && m.end > 0)
                TRY(add_cut(k, m, e));
            if (!open)
                m = (struct layer_cut){.in = i};
            m.core = i + 1;
            open = true;
        } else if (closes(n->role, o)) {
            if (m.core == 0)
                return err_set(e, ST_INTERNAL, "node %s brings back what no node sent", n->name);
            if (open)
                m.out = i;
            m.end = i + 1;
            open = false;
        }
    }
    if (open)
        return err_set(e, ST_INTERNAL, "node %s sends what no node brings back", g->nodes[k->nodes[m.in]].name);
    return m.end > 0 ? add_cut(k, m, e) : ST_OK;
}

int cutter_open(struct cutter *c, const struct graph *g, const struct schedule_opts *o, struct order *out,
                struct err *e)
{
    *c = (struct cutter){.g = g, .o = *o, .out = out, .e = e};
    TRY(mem_array((void **)&c->chunk, (size_t)o->vpp, sizeof *c->chunk, e));
    TRY(mem_array((void **)&c->grown, (size_t)g->n_slots + 1, sizeof *c->grown, e));
    for (int n = 0; n < g->n_nodes; n++) {
        struct chunk_cut *k = &c->chunk[g->nodes[n].chunk];
        if (g->nodes[n].host)
            continue;
        TRY(mem_grow((void **)&k->nodes, &k->cap_nodes, (size_t)k->n_nodes + 1, sizeof *k->nodes, e));
        k->nodes[k->n_nodes++] = n;
    }
    for (int v = 0; v < o->vpp && o->overlap != OVERLAP_NONE; v++)
        TRY(cut_chunk(g, &c->chunk[v], o->overlap, e));
    return ST_OK;
}

void cutter_close(struct cutter *c)
{
    for (int v = 0; c->chunk != NULL && v < c->o.vpp; v++) {
        free(c->chunk[v].nodes);
        free(c->chunk[v].cut);
    }
    free(c->chunk);
    free(c->grown);
    *c = (struct cutter){0};
}

/* ---- stretches of nodes ---------------------------------------------------------------------- */

/* Nodes [from, to) of a chunk, for one microbatch. */
struct stretch {
    const struct chunk_cut *k;
    int from, to, mb;
};

static int emit(struct cutter *c, int node, enum phase_id ph, int mb)
{
    return c->g->nodes[node].phase[ph].fn != NULL ? order_add(c->out, node, ph, mb, c->e) : ST_OK;
}

static int emit_forward(struct cutter *c, struct stretch s)
{
    for (int i = s.from; i < s.to; i++)
        TRY(emit(c, s.k->nodes[i], PH_FWD, s.mb));
    return ST_OK;
}

/* Backward; with_dw: each weight gradient right after. */
static int emit_backward(struct cutter *c, struct stretch s, bool with_dw)
{
    for (int i = s.to - 1; i >= s.from; i--) {
        TRY(emit(c, s.k->nodes[i], PH_BWD, s.mb));
        if (with_dw)
            TRY(emit(c, s.k->nodes[i], PH_DW, s.mb));
    }
    return ST_OK;
}

static int emit_dw(struct cutter *c, struct stretch s)
{
    for (int i = s.to - 1; i >= s.from; i--)
        TRY(emit(c, s.k->nodes[i], PH_DW, s.mb));
    return ST_OK;
}

static struct stretch whole(const struct cutter *c, const struct schedule_unit *u)
{
    const struct chunk_cut *k = &c->chunk[u->chunk];
    return (struct stretch){.k = k, .to = k->n_nodes, .mb = u->mb};
}

static struct stretch part(struct stretch s, int from, int to)
{
    s.from = from;
    s.to = to;
    return s;
}

/* What lies between the exchanges of cut m (which may be one past the last: the tail) and those before. */
static struct stretch pre_of(struct stretch s, int m)
{
    const struct chunk_cut *k = s.k;
    return part(s, m > 0 ? k->cut[m - 1].end : 0, m < k->n_cuts ? k->cut[m].in : k->n_nodes);
}
static struct stretch in_of(struct stretch s, int m) { return part(s, s.k->cut[m].in, s.k->cut[m].core); }
static struct stretch core_of(struct stretch s, int m) { return part(s, s.k->cut[m].core, s.k->cut[m].out); }
static struct stretch out_of(struct stretch s, int m) { return part(s, s.k->cut[m].out, s.k->cut[m].end); }

/* Part i of n, cut where layers meet. */
static struct stretch layers_of(const struct cutter *c, struct stretch s, int i, int n)
{
    int layers = s.to > s.from, at = 0, from = s.to, to = s.to;
    for (int k = s.from + 1; k < s.to; k++)
        layers += c->g->nodes[s.k->nodes[k]].layer != c->g->nodes[s.k->nodes[k - 1]].layer;
    for (int k = s.from; k < s.to; k++) {
        at += k > s.from && c->g->nodes[s.k->nodes[k]].layer != c->g->nodes[s.k->nodes[k - 1]].layer;
        if (at >= layers * i / n && k < from)
            from = k;
        if (at >= layers * (i + 1) / n && k < to)
            to = k;
    }
    return part(s, from < to ? from : to, to);
}

/* ---- one unit alone -------------------------------------------------------------------------- */

/* Does the backward half of a layer read what its node of "in" would gather again? */
static bool read_again(const struct cutter *c, struct stretch core, slot_id slot)
{
    for (int i = core.from; i < core.to; i++)
        for (int ph = PH_BWD; ph <= PH_DW; ph++) {
            const struct phase *p = &c->g->nodes[core.k->nodes[i]].phase[ph];
            for (int u = 0; p->fn != NULL && u < p->n_uses; u++)
                if (p->use[u].slot == slot)
                    return true;
        }
    return false;
}

/* A layer's rows, which weight gradients need again, are asked for before its backward pass: the comm lane takes
 * exchanges in this order. */
static int gather_again(struct cutter *c, struct stretch s, int m)
{
    struct stretch in = in_of(s, m), core = core_of(s, m);
    for (int i = in.from; i < in.to; i++) {
        const struct node *n = &c->g->nodes[s.k->nodes[i]];
        const struct phase *p = &n->phase[PH_REPLAY];
        bool wanted = false;
        for (int u = 0; n->role == ROLE_ROWS_IN && p->fn != NULL && u < p->n_uses; u++)
            wanted |= p->use[u].mode != USE_READ && read_again(c, core, p->use[u].slot);
        if (wanted)
            TRY(emit(c, s.k->nodes[i], PH_REPLAY, s.mb));
    }
    return ST_OK;
}

int cutter_forward(struct cutter *c, const struct schedule_unit *u) { return emit_forward(c, whole(c, u)); }

/* Weight gradients at once, or after their layer: as schedule_plain has it. */
static int plain_backward(struct cutter *c, struct stretch s)
{
    if (!c->o.delay_dw)
        return emit_backward(c, s, true);
    for (int end = s.to; end > s.from;) {
        int first = end - 1;
        while (first > s.from && c->g->nodes[s.k->nodes[first - 1]].layer == c->g->nodes[s.k->nodes[first]].layer)
            first--;
        TRY(emit_backward(c, part(s, first, end), false));
        TRY(emit_dw(c, part(s, first, end)));
        end = first;
    }
    return ST_OK;
}

/* The backward pass of cut m up to its weight gradients: those of "core" wait until "in" is under way, where it hides
 * behind them. dw: of what came before, while "out" is under way. */
static int core_backward(struct cutter *c, struct stretch b, int m, struct stretch dw)
{
    bool late = c->o.delay_dw || c->o.overlap != OVERLAP_EP;
    TRY(emit_backward(c, out_of(b, m), true));
    TRY(gather_again(c, b, m));
    TRY(emit_dw(c, dw));
    TRY(emit_backward(c, core_of(b, m), !late));
    TRY(emit_backward(c, in_of(b, m), true));
    return late ? emit_dw(c, core_of(b, m)) : ST_OK;
}

int cutter_backward(struct cutter *c, const struct schedule_unit *u)
{
    struct stretch b = whole(c, u);
    if (c->o.overlap == OVERLAP_NONE)
        return plain_backward(c, b);
    bool late = c->o.delay_dw;
    for (int m = b.k->n_cuts; m >= 0; m--) {
        if (m < b.k->n_cuts)
            TRY(core_backward(c, b, m, late ? pre_of(b, m + 1) : part(b, 0, 0)));
        TRY(emit_backward(c, pre_of(b, m), !late));
    }
    return late ? emit_dw(c, pre_of(b, 0)) : ST_OK;
}

/* ---- two units together ---------------------------------------------------------------------- */

/* Slots that the backward half of a chunk adds to. */
static void mark_sums(struct cutter *c, const struct chunk_cut *k, bool mark)
{
    for (int i = 0; i < k->n_nodes; i++)
        for (int ph = PH_BWD; ph <= PH_DW; ph++) {
            const struct phase *p = &c->g->nodes[k->nodes[i]].phase[ph];
            for (int u = 0; p->fn != NULL && u < p->n_uses; u++)
                if (p->use[u].slot >= 0 && p->use[u].mode == USE_ADD && c->g->slots[p->use[u].slot].arena >= 0)
                    c->grown[p->use[u].slot] = mark;
        }
}

/* Does the node's forward phase add to one of them? A head that makes its weight's gradient with the loss, on an
 * embedding's weight, does: it must wait until the earlier microbatch has added to it. */
static bool grows_with(const struct cutter *c, int node)
{
    const struct phase *p = &c->g->nodes[node].phase[PH_FWD];
    for (int u = 0; p->fn != NULL && u < p->n_uses; u++)
        if (p->use[u].slot >= 0 && p->use[u].mode == USE_ADD && c->grown[p->use[u].slot])
            return true;
    return false;
}

/* How much of the forward unit may come before the end of the backward one. */
static int free_nodes(struct cutter *c, struct stretch f, struct stretch b)
{
    int i = 0;
    mark_sums(c, b.k, true);
    while (i < f.to && !grows_with(c, f.k->nodes[i]))
        i++;
    mark_sums(c, b.k, false);
    return i;
}

/* A forward unit that runs against a backward one. */
struct pair {
    struct stretch f, b, loose; /* loose: of f's tail, what may come before b's end */
    int n_f, n_b;               /* cuts of f that may come before b's end; cuts of b */
    int begun;                  /* nodes of f that have been launched */
    int extra;                  /* cuts that f has more than b */
};

static bool has_role(const struct cutter *c, struct stretch s, int i, enum node_role role)
{
    return i >= s.from && i < s.to && c->g->nodes[s.k->nodes[i]].role == role;
}

/* The pre part of a cut without what was launched already. */
static struct stretch rest_of(struct stretch pre, int begun)
{
    pre.from = pre.from > begun ? pre.from : begun;
    pre.to = pre.to > pre.from ? pre.to : pre.from;
    return pre;
}

/* What f does before its cut m; where b has more cuts, layers of f's tail go between those. */
static struct stretch ahead_of(const struct cutter *c, const struct pair *p, int m)
{
    if (m < p->n_f)
        return rest_of(pre_of(p->f, m), p->begun);
    return m < p->n_b ? layers_of(c, p->loose, m - p->n_f, p->n_b - p->n_f) : part(p->f, 0, 0);
}

/* The cuts that f has more than b: layers of b's tail, which starts without exchanges, go behind them. */
static int pair_extra(struct cutter *c, const struct pair *p)
{
    struct stretch tail = pre_of(p->b, p->n_b);
    for (int m = 0; m < p->extra; m++) {
        TRY(emit_forward(c, rest_of(pre_of(p->f, m), p->begun)));
        TRY(emit_forward(c, in_of(p->f, m)));
        TRY(emit_backward(c, layers_of(c, tail, 2 * (p->extra - m) - 1, 2 * p->extra), true));
        TRY(emit_forward(c, core_of(p->f, m)));
        TRY(emit_forward(c, out_of(p->f, m)));
        TRY(emit_backward(c, layers_of(c, tail, 2 * (p->extra - m) - 2, 2 * p->extra), true));
    }
    return ST_OK;
}

/* Backward cut m against forward cut fm and what comes before that. dw_left: weight gradients of what the backward
 * half did before this are still to be done. */
static int pair_experts(struct cutter *c, const struct pair *p, int m, int fm, bool dw_left)
{
    struct stretch f = p->f, b = p->b;
    bool late = c->o.delay_dw, with_f = fm < p->n_f;
    TRY(emit_backward(c, out_of(b, m), true));
    if (dw_left)
        TRY(emit_dw(c, pre_of(b, m + 1)));
    TRY(emit_forward(c, ahead_of(c, p, fm)));
    TRY(emit_backward(c, core_of(b, m), !late));
    if (with_f)
        TRY(emit_forward(c, in_of(f, fm)));
    TRY(emit_backward(c, in_of(b, m), true));
    if (late)
        TRY(emit_dw(c, core_of(b, m)));
    if (with_f) {
        TRY(emit_forward(c, core_of(f, fm)));
        TRY(emit_forward(c, out_of(f, fm)));
    }
    return emit_backward(c, pre_of(b, m), !late);
}

/* What f does before its cut m, and the exchange that begins it. */
static int open_rows(struct cutter *c, const struct pair *p, int m)
{
    TRY(emit_forward(c, ahead_of(c, p, m)));
    return m < p->n_f ? emit_forward(c, in_of(p->f, m)) : ST_OK;
}

/* The same with the exchanges of cut fm and of the next one behind layers: "in" of fm is under way already. */
static int pair_rows(struct cutter *c, const struct pair *p, int m, int fm)
{
    struct stretch b = p->b;
    TRY(emit_backward(c, out_of(b, m), true));
    TRY(gather_again(c, b, m));
    if (fm < p->n_f) {
        TRY(emit_forward(c, core_of(p->f, fm)));
        TRY(emit_forward(c, out_of(p->f, fm)));
    }
    TRY(emit_backward(c, core_of(b, m), false));
    TRY(emit_backward(c, in_of(b, m), true));
    TRY(open_rows(c, p, fm + 1));
    TRY(emit_dw(c, core_of(b, m)));
    return emit_backward(c, pre_of(b, m), true);
}

/* Where cuts of both meet. */
static int pair_cuts(struct cutter *c, const struct pair *p)
{
    bool rows = c->o.overlap == OVERLAP_TP, late = c->o.delay_dw && !rows;
    struct stretch tail = pre_of(p->b, p->n_b);
    if (rows && p->n_b > 0)
        TRY(open_rows(c, p, p->extra));
    if (p->extra == 0)
        TRY(emit_backward(c, tail, !late));
    for (int k = 0; k < p->n_b; k++) {
        int m = p->n_b - 1 - k, fm = p->extra + k;
        TRY(rows ? pair_rows(c, p, m, fm) : pair_experts(c, p, m, fm, late && (k > 0 || p->extra == 0)));
    }
    return ST_OK;
}

int cutter_pair(struct cutter *c, const struct schedule_unit *fu, const struct schedule_unit *bu)
{
    struct pair p = {.f = whole(c, fu), .b = whole(c, bu)};
    struct stretch f = p.f;
    int free_to = free_nodes(c, f, p.b);
    p.n_b = p.b.k->n_cuts;
    while (p.n_f < f.k->n_cuts && f.k->cut[p.n_f].end <= free_to)
        p.n_f++;
    /* The receive of f's stream first: it was sent before that of b's gradient. */
    p.begun = has_role(c, f, 0, ROLE_CUT_IN) ? 1 : 0;
    p.extra = p.n_f > p.n_b ? p.n_f - p.n_b : 0;
    struct stretch end = pre_of(f, p.n_f);
    p.loose = rest_of(part(end, end.from, end.to < free_to ? end.to : free_to), p.begun);
    TRY(emit_forward(c, part(f, 0, p.begun)));
    TRY(pair_extra(c, &p));
    TRY(pair_cuts(c, &p));
    int at = p.n_b > p.n_f ? p.loose.to : rest_of(end, p.begun).from;
    bool sends = f.to > 0 && has_role(c, f, f.to - 1, ROLE_CUT_OUT) && free_to == f.to && p.n_f == f.k->n_cuts;
    if (sends) /* the next stage waits for it; weight gradients can come later */
        TRY(emit_forward(c, part(f, at, f.to)));
    if (c->o.delay_dw && c->o.overlap == OVERLAP_EP && (p.n_b > 0 || p.extra == 0))
        TRY(emit_dw(c, pre_of(p.b, 0)));
    return sends ? ST_OK : emit_forward(c, part(f, at, f.to));
}
