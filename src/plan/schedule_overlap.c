/* From units to nodes, and the merge of a forward and a backward unit that hides the all-to-alls of expert parallelism.
 *
 * A chunk's nodes are cut at its all-to-alls, so brackets in a pattern make no difference:
 *
 *     pre, dispatch, experts, combine, pre, dispatch, experts, combine, ..., tail
 *
 * The all-to-alls run on the comm lane, all else (joints too) on others. Forward unit f and backward unit b of
 * different microbatches depend on different data, so one's all-to-alls can run beside the other's arithmetic:
 *
 *     comm     combine_b     | dispatch_f   dispatch_b         | combine_f
 *     compute  pre_f         | experts_b    dw of experts_b, experts_f | pre_b, dw of pre_b
 *
 * Only the order of launches is decided here. Waits come from the planner, so a wrong order could be slow, not false;
 * except for sums over microbatches, whose order is kept (see grows_with). */
#include "plan/plan_int.h"

#include <stdlib.h>

/* ---- cutting --------------------------------------------------------------------------------- */

static int add_moe(struct chunk_cut *k, struct moe_cut m, struct err *e)
{
    TRY(mem_grow((void **)&k->moe, &k->cap_moe, (size_t)k->n_moe + 1, sizeof *k->moe, e));
    k->moe[k->n_moe++] = m;
    return ST_OK;
}

/* A dispatch reaches from its first to its last node before the combine, a combine to its last before the next
 * dispatch. */
static int cut_chunk(const struct graph *g, struct chunk_cut *k, struct err *e)
{
    enum node_role last = ROLE_COMBINE;
    struct moe_cut m = {0};
    for (int i = 0; i < k->n_nodes; i++) {
        enum node_role role = g->nodes[k->nodes[i]].role;
        if (role == ROLE_DISPATCH) {
            if (last == ROLE_COMBINE && m.end > 0)
                TRY(add_moe(k, m, e));
            if (last == ROLE_COMBINE)
                m = (struct moe_cut){.dispatch = i};
            m.experts = i + 1;
            last = role;
        } else if (role == ROLE_COMBINE) {
            if (m.experts == 0)
                return err_set(e, ST_INTERNAL, "node %s combines what no node dispatched", g->nodes[k->nodes[i]].name);
            if (last == ROLE_DISPATCH)
                m.combine = i;
            m.end = i + 1;
            last = role;
        }
    }
    if (last == ROLE_DISPATCH)
        return err_set(e, ST_INTERNAL, "node %s dispatches what no node combines", g->nodes[k->nodes[m.dispatch]].name);
    return m.end > 0 ? add_moe(k, m, e) : ST_OK;
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
        TRY(cut_chunk(g, &c->chunk[v], e));
    return ST_OK;
}

void cutter_close(struct cutter *c)
{
    for (int v = 0; c->chunk != NULL && v < c->o.vpp; v++) {
        free(c->chunk[v].nodes);
        free(c->chunk[v].moe);
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

/* What lies between the all-to-alls of MoE m (which may be one past the last: the tail) and those before. */
static struct stretch pre_of(struct stretch s, int m)
{
    const struct chunk_cut *k = s.k;
    return part(s, m > 0 ? k->moe[m - 1].end : 0, m < k->n_moe ? k->moe[m].dispatch : k->n_nodes);
}
static struct stretch dispatch_of(struct stretch s, int m)
{
    return part(s, s.k->moe[m].dispatch, s.k->moe[m].experts);
}
static struct stretch experts_of(struct stretch s, int m) { return part(s, s.k->moe[m].experts, s.k->moe[m].combine); }
static struct stretch combine_of(struct stretch s, int m) { return part(s, s.k->moe[m].combine, s.k->moe[m].end); }

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

/* Weight gradients of experts wait until the backward of their dispatch is under way, those of what lies between until
 * that of the next combine is (if delayed). */
int cutter_backward(struct cutter *c, const struct schedule_unit *u)
{
    struct stretch b = whole(c, u);
    if (c->o.overlap == OVERLAP_NONE)
        return plain_backward(c, b);
    bool late = c->o.delay_dw, late_experts = late || c->o.overlap == OVERLAP_DW;
    for (int m = b.k->n_moe; m >= 0; m--) {
        if (m < b.k->n_moe) {
            TRY(emit_backward(c, combine_of(b, m), true));
            if (late)
                TRY(emit_dw(c, pre_of(b, m + 1)));
            TRY(emit_backward(c, experts_of(b, m), !late_experts));
            TRY(emit_backward(c, dispatch_of(b, m), true));
            if (late_experts)
                TRY(emit_dw(c, experts_of(b, m)));
        }
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

/* Backward MoE m against forward MoE fm (-1: none) and what comes before that. dw_left: weight gradients of what the
 * backward half did before this are still to be done. */
static int pair_moe(struct cutter *c, struct stretch b, int m, bool dw_left, struct stretch f, int fm,
                    struct stretch pre)
{
    bool late = c->o.delay_dw;
    TRY(emit_backward(c, combine_of(b, m), true));
    if (dw_left)
        TRY(emit_dw(c, pre_of(b, m + 1)));
    TRY(emit_forward(c, pre));
    TRY(emit_backward(c, experts_of(b, m), !late));
    if (fm >= 0)
        TRY(emit_forward(c, dispatch_of(f, fm)));
    TRY(emit_backward(c, dispatch_of(b, m), true));
    if (late)
        TRY(emit_dw(c, experts_of(b, m)));
    if (fm >= 0) {
        TRY(emit_forward(c, experts_of(f, fm)));
        TRY(emit_forward(c, combine_of(f, fm)));
    }
    return emit_backward(c, pre_of(b, m), !late);
}

static bool has_role(const struct cutter *c, struct stretch s, int i, enum node_role role)
{
    return i >= s.from && i < s.to && c->g->nodes[s.k->nodes[i]].role == role;
}

/* The pre part of MoE m without what was launched already. */
static struct stretch rest_of(struct stretch pre, int begun)
{
    pre.from = pre.from > begun ? pre.from : begun;
    pre.to = pre.to > pre.from ? pre.to : pre.from;
    return pre;
}

int cutter_pair(struct cutter *c, const struct schedule_unit *fu, const struct schedule_unit *bu)
{
    struct stretch f = whole(c, fu), b = whole(c, bu), tail = pre_of(b, b.k->n_moe);
    int free_to = free_nodes(c, f, b), n_f = 0, n_b = b.k->n_moe;
    while (n_f < f.k->n_moe && f.k->moe[n_f].end <= free_to)
        n_f++;
    /* The receive of f's stream first: it was sent before that of b's gradient. */
    int begun = has_role(c, f, 0, ROLE_CUT_IN) ? 1 : 0, extra = n_f > n_b ? n_f - n_b : 0;
    TRY(emit_forward(c, part(f, 0, begun)));
    /* b starts without all-to-alls; where f has more of them than b, layers of that start go behind the first ones. */
    for (int m = 0; m < extra; m++) {
        TRY(emit_forward(c, rest_of(pre_of(f, m), begun)));
        TRY(emit_forward(c, dispatch_of(f, m)));
        TRY(emit_backward(c, layers_of(c, tail, 2 * (extra - m) - 1, 2 * extra), true));
        TRY(emit_forward(c, experts_of(f, m)));
        TRY(emit_forward(c, combine_of(f, m)));
        TRY(emit_backward(c, layers_of(c, tail, 2 * (extra - m) - 2, 2 * extra), true));
    }
    if (extra == 0)
        TRY(emit_backward(c, tail, !c->o.delay_dw));
    /* Where b has more, layers of f's tail go between them. */
    int spread = n_b - n_f;
    struct stretch end = pre_of(f, n_f),
                   loose = rest_of(part(end, end.from, end.to < free_to ? end.to : free_to), begun);
    for (int k = 0; k < n_b; k++) {
        int m = n_b - 1 - k, fm = extra + k;
        struct stretch pre = fm < n_f ? rest_of(pre_of(f, fm), begun) : layers_of(c, loose, fm - n_f, spread);
        TRY(pair_moe(c, b, m, c->o.delay_dw && (k > 0 || extra == 0), f, fm < n_f ? fm : -1, pre));
    }
    int at = spread > 0 ? loose.to : rest_of(end, begun).from;
    bool sends = f.to > 0 && has_role(c, f, f.to - 1, ROLE_CUT_OUT) && free_to == f.to && n_f == f.k->n_moe;
    if (sends) /* the next stage waits for it; weight gradients can come later */
        TRY(emit_forward(c, part(f, at, f.to)));
    if (c->o.delay_dw && (n_b > 0 || extra == 0))
        TRY(emit_dw(c, pre_of(b, 0)));
    return sends ? ST_OK : emit_forward(c, part(f, at, f.to));
}
