/* Op calls of a graph: fields of an op bound to slots by name; see graph.h. */
#include "plan/graph.h"
#include "ops/ops.h"

#include <string.h>

/* While a graph is declared, the data of a tensor is (slot + 1) << SLOT_SHIFT plus the byte offset
 * of a view. */
enum { SLOT_SHIFT = 44 };
_Static_assert(sizeof(void *) == 8, "slots are told apart by the upper bits of an address");

struct tensor of(const struct graph *g, slot_id slot)
{
    if (slot < 0 || slot >= g->n_slots)
        return (struct tensor){0};
    struct tensor t = g->slots[slot].shape;
    t.data = (void *)(((uintptr_t)slot + 1) << SLOT_SHIFT);
    return t;
}

slot_id graph_slot_of(const struct tensor *t) { return (slot_id)((uintptr_t)t->data >> SLOT_SHIFT) - 1; }
static int64_t offset_of(const struct tensor *t)
{
    return (int64_t)((uintptr_t)t->data & (((uintptr_t)1 << SLOT_SHIFT) - 1));
}

static struct tensor *field_at(const struct op_arg *f, void *args) { return (struct tensor *)((char *)args + f->at); }

static void failed(struct graph *g, int node, enum phase_id ph, const char *what, const char *op, const char *field,
                   const char *other)
{
    err_set(&g->err, ST_INTERNAL, "node %s (%s): field %s of %s %s%s", g->nodes[node].name, phase_name(ph), field, op,
            what, other);
}

static bool writes(const struct op_arg *f) { return f->role == ARG_OUT || f->role == ARG_OOUT; }

/* Do two tensors of a call stand for the same memory, or for parts of a matrix that have elements in common? */
static bool share(const struct tensor *a, const struct tensor *b)
{
    if (a->data == b->data || graph_slot_of(a) != graph_slot_of(b))
        return a->data == b->data;
    int64_t size = (int64_t)dtype_bytes(a->dtype), line = a->stride[0] * size;
    if (a->rank != 2 || b->rank != 2 || a->dtype != b->dtype || a->stride[0] != b->stride[0] || line <= 0)
        return false;
    int64_t row[2] = {offset_of(a) / line, offset_of(b) / line}, first[2] = {offset_of(a) % line, offset_of(b) % line};
    return row[0] < row[1] + b->dim[0] && row[1] < row[0] + a->dim[0] && first[0] < first[1] + b->dim[1] * size &&
           first[1] < first[0] + a->dim[1] * size;
}

/* Every required field is there, and no two results go to one place. */
static bool bound_well(struct graph *g, int node, enum phase_id ph, const struct op_desc *op, void *args)
{
    for (int i = 0; i < op->n_args; i++) {
        const struct op_arg *f = &op->args[i];
        if (f->at == OP_NOWHERE)
            continue;
        const struct tensor *t = field_at(f, args);
        if (t->data == NULL && (f->role == ARG_IN || f->role == ARG_OUT)) {
            failed(g, node, ph, "is not bound to a slot", op->name, f->name, "");
            return false;
        }
        if (t->data != NULL && (graph_slot_of(t) < 0 || graph_slot_of(t) >= g->n_slots)) {
            failed(g, node, ph, "is bound to memory that is no slot of the graph", op->name, f->name, "");
            return false;
        }
        for (int k = 0; k < i; k++)
            if (t->data != NULL && writes(f) && op->args[k].at != OP_NOWHERE && writes(&op->args[k]) &&
                field_at(&op->args[k], args)->data != NULL && share(field_at(&op->args[k], args), t)) {
                failed(g, node, ph, "is bound to the same place as field ", op->name, f->name, op->args[k].name);
                return false;
            }
    }
    return true;
}

/* Scratch of the phase, large enough for this call too: its calls run one after the other. */
static void bind_work(struct graph *g, int node, enum phase_id ph, const struct op_desc *op, void *args)
{
    struct phase *p = &g->nodes[node].phase[ph];
    int64_t bytes = op->work_bytes(g->ops, args);
    char name[96];
    const char *last = strrchr(g->nodes[node].name, '.');
    for (int i = 0; i < op->n_args; i++) {
        if (op->args[i].role != ARG_WORK || bytes <= 0)
            continue;
        snprintf(name, sizeof name, "%s_%s_work", last ? last + 1 : g->nodes[node].name, phase_name(ph));
        if (p->work < 0)
            p->work = graph_slot(g, name, tensor_1d(NULL, DT_U8, bytes));
        if (p->work < 0)
            return;
        g->slots[p->work].shape = tensor_1d(NULL, DT_U8, max_i64(bytes, g->slots[p->work].shape.dim[0]));
        *field_at(&op->args[i], args) = of(g, p->work);
    }
}

slot_id graph_unwanted(struct graph *g, const char *name, struct tensor shape)
{
    slot_id s = graph_slot(g, name, shape);
    if (s >= 0)
        g->slots[s].sum = g->slots[s].unwanted = true;
    return s;
}

/* Optional results that nobody wants are unbound, if the op can do without. False: the call has no other results. */
static bool is_wanted(const struct graph *g, const struct op_desc *op, void *args)
{
    union {
        char bytes[OP_ARGS_BYTES];
        struct tensor align;
    } less;
    bool any = false, wanted = false;
    struct err why = {0};
    memcpy(less.bytes, args, op->args_bytes);
    for (int i = 0; i < op->n_args; i++) {
        const struct op_arg *f = &op->args[i];
        const struct tensor *t = f->at != OP_NOWHERE ? field_at(f, args) : NULL;
        if (t == NULL || t->data == NULL || !writes(f))
            continue;
        slot_id s = graph_slot_of(t);
        bool unwanted = s >= 0 && s < g->n_slots && g->slots[s].unwanted;
        any |= unwanted;
        wanted |= !unwanted;
        if (unwanted && f->role == ARG_OOUT)
            *field_at(f, less.bytes) = (struct tensor){0};
    }
    if (any && wanted && op->check(less.bytes, &why) == ST_OK)
        memcpy(args, less.bytes, op->args_bytes);
    return wanted || !any;
}

static int use_of(struct graph *g, struct phase *p, slot_id slot)
{
    for (int u = 0; u < p->n_uses; u++)
        if (p->use[u].slot == slot)
            return u;
    if (mem_grow((void **)&p->use, &p->cap_uses, (size_t)p->n_uses + 1, sizeof *p->use, &g->err) != ST_OK)
        return -1;
    p->use[p->n_uses] = (struct use){.slot = slot, .mode = USE_READ};
    return p->n_uses++;
}

/* Do two vectors of one slot have elements in common? */
static bool overlap(const struct tensor *a, const struct tensor *b)
{
    return offset_of(a) < offset_of(b) + tensor_bytes(b) && offset_of(b) < offset_of(a) + tensor_bytes(a);
}

/* Has an earlier call of the phase written where t is? Calls may fill a slot part by part. */
static bool wrote(const struct phase *p, const struct tensor *t)
{
    for (int k = 0; k < p->n_calls; k++)
        for (int i = 0; i < p->call[k].n_fields; i++) {
            const struct op_arg *f = &p->call[k].op->args[p->call[k].field[i].field];
            const struct tensor *before = field_at(f, p->call[k].args);
            if (!writes(f) || graph_slot_of(before) != graph_slot_of(t))
                continue;
            bool matrices = before->rank == 2 && t->rank == 2 && before->stride[0] == t->stride[0];
            bool vectors = before->rank == 1 && t->rank == 1;
            if (vectors ? overlap(before, t) : !matrices || share(before, t))
                return true;
        }
    return false;
}

/* How the phase uses the slot, from the role of a field and from what the phase has done with it
 * before. */
static void note_field(struct graph *g, struct phase *p, const struct op_arg *f, const struct tensor *t,
                       struct bound_field *b, bool is_new)
{
    struct use *u = &p->use[b->use];
    const struct slot *s = &g->slots[u->slot];
    bool written = u->mode != USE_READ;
    if (f->role == ARG_IN || f->role == ARG_OPT)
        return;
    b->adds = f->acc_at != 0 && wrote(p, t);
    b->sums = f->acc_at != 0 && !b->adds && s->sum;
    if (written)
        return;
    u->reads = f->in_place || !is_new;
    u->mode = s->sum || u->reads ? USE_ADD : USE_WRITE;
    u->overwrites = s->sum && f->acc_at == 0 && !u->reads;
}

static struct op_bound *add_call(struct graph *g, struct phase *p, const struct op_desc *op)
{
    if (mem_grow((void **)&p->call, &p->cap_calls, (size_t)p->n_calls + 1, sizeof *p->call, &g->err) != ST_OK)
        return NULL;
    struct op_bound *c = &p->call[p->n_calls];
    *c = (struct op_bound){
        .op = op, .args = graph_own(g, op->args_bytes), .field = graph_own(g, (size_t)op->n_args * sizeof *c->field)};
    return c->args != NULL && c->field != NULL ? c : NULL;
}

void graph_op(struct graph *g, int node, enum phase_id ph, const struct op_desc *op, const void *args)
{
    if (g->err.code != ST_OK || node < 0)
        return;
    struct phase *p = &g->nodes[node].phase[ph];
    if (p->fn != NULL && p->fn != graph_run_ops) {
        err_set(&g->err, ST_INTERNAL, "node %s, %s: declared twice", g->nodes[node].name, phase_name(ph));
        return;
    }
    if (p->fn == NULL)
        p->work = NO_SLOT;
    struct op_bound *c = add_call(g, p, op);
    if (c == NULL)
        return;
    memcpy(c->args, args, op->args_bytes);
    if (g->ops == NULL || op->there == NULL || !op->there(g->ops)) {
        err_set(&g->err, ST_UNSUPPORTED, "node %s (%s): device '%s' has no op %s", g->nodes[node].name, phase_name(ph),
                g->ops ? g->ops->name : "none", op->name);
        return;
    }
    if (!bound_well(g, node, ph, op, c->args) || !is_wanted(g, op, c->args))
        return;
    bind_work(g, node, ph, op, c->args);
    if (g->err.code != ST_OK)
        return;
    if (op->check(c->args, &g->err) != ST_OK) {
        err_in(&g->err, "node %s (%s)", g->nodes[node].name, phase_name(ph));
        return;
    }
    /* Within a call all reads come before all writes. */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < op->n_args; i++) {
            const struct op_arg *f = &op->args[i];
            if (f->at == OP_NOWHERE)
                continue;
            const struct tensor *t = field_at(f, c->args);
            bool reads = f->role == ARG_IN || f->role == ARG_OPT;
            if (t->data == NULL || reads != (pass == 0))
                continue;
            struct bound_field *b = &c->field[c->n_fields++];
            int known = p->n_uses;
            *b = (struct bound_field){.field = i, .use = use_of(g, p, graph_slot_of(t)), .offset = offset_of(t)};
            if (b->use < 0)
                return;
            note_field(g, p, f, t, b, b->use == known);
        }
    p->n_calls++;
    p->fn = graph_run_ops;
}

const void *graph_call(const struct graph *g, int node, enum phase_id ph, const struct op_desc *op)
{
    const struct phase *p = node >= 0 ? &g->nodes[node].phase[ph] : NULL;
    return p != NULL && p->n_calls == 1 && p->call[0].op == op ? p->call[0].args : NULL;
}

void graph_sum(struct graph *g, slot_id slot)
{
    if (g->err.code == ST_OK && slot >= 0)
        g->slots[slot].sum = true;
}

void graph_again(struct graph *g, int node, slot_id slot)
{
    if (g->err.code != ST_OK || node < 0 || slot < 0)
        return;
    struct phase *from = &g->nodes[node].phase[PH_FWD], *to = &g->nodes[node].phase[PH_REPLAY];
    if (to->fn == NULL) {
        graph_phase(g, node, PH_REPLAY, from->fn, from->use, from->n_uses);
        if (mem_grow((void **)&to->call, &to->cap_calls, (size_t)from->n_calls, sizeof *to->call, &g->err) != ST_OK)
            return;
        if (from->n_calls > 0)
            memcpy(to->call, from->call, (size_t)from->n_calls * sizeof *to->call);
        to->n_calls = from->n_calls;
        to->work = from->work;
        graph_cost(g, node, PH_REPLAY, from->flops, from->bytes);
    }
    graph_replay(g, slot, node);
}

int graph_run_ops(const struct step_ctx *c)
{
    union {
        char bytes[OP_ARGS_BYTES];
        struct tensor align;
    } args;
    for (int k = 0; k < c->phase->n_calls; k++) {
        const struct op_bound *call = &c->phase->call[k];
        memcpy(args.bytes, call->args, call->op->args_bytes);
        for (int i = 0; i < call->n_fields; i++) {
            const struct bound_field *b = &call->field[i];
            const struct op_arg *f = &call->op->args[b->field];
            field_at(f, args.bytes)->data = (char *)c->t[b->use].data + b->offset;
            bool adds = b->adds || (b->sums && c->add[b->use]);
            if (f->acc_at != 0)
                memcpy(args.bytes + f->acc_at, &adds, sizeof adds);
        }
        TRY(call->op->call(c->ops, c->lane, args.bytes));
    }
    return ST_OK;
}
