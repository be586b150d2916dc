/* From an order to steps: every use is tied to one life ("instance") of its slot, and what the policy
 * dropped is recomputed just before the first backward step that needs it. Replays may need
 * replays; the recursion then runs a whole block in forward order. */
#include "plan/plan_int.h"

enum { BEING_MADE = -2 }; /* in rebuilt[]: its replay is being inserted; -1: none yet */

static int new_instance(struct builder *b, slot_id slot, int mb, bool rebuilt, int *out)
{
    struct plan *p = b->p;
    TRY(mem_grow((void **)&p->inst, &b->cap_inst, (size_t)p->n_inst + 1, sizeof *p->inst, b->e));
    const struct slot *s = &b->g->slots[slot];
    p->inst[p->n_inst] = (struct instance){.slot = slot,
                                           .mb = mb,
                                           .bytes = round_up(tensor_bytes(&s->shape), DEV_ALIGN),
                                           .arena = s->arena >= 0 ? (enum arena_id)s->arena
                                                    : s->host     ? ARENA_HOST
                                                                  : ARENA_WORK,
                                           .offset = s->arena >= 0 ? s->offset : -1,
                                           .first_step = -1,
                                           .last_step = -1,
                                           .merged = -1,
                                           .rebuilt = rebuilt};
    *out = p->n_inst++;
    return ST_OK;
}

static int no_writer(struct builder *b, const struct step_ref *r, slot_id slot)
{
    return err_set(b->e, ST_INTERNAL, "node %s (%s) reads slot %s, which nothing has written yet",
                   b->g->nodes[r->node].name, phase_name(r->phase), b->g->slots[slot].name);
}

static int add_step(struct builder *b, struct step_ref ref);

/* The life of a slot that this phase sees when it reads. */
static int instance_to_read(struct builder *b, const struct step_ref *r, slot_id slot, int *out)
{
    const struct slot *s = &b->g->slots[slot];
    int at = slot * b->n_mb + r->mb, *original = &b->original[at], *rebuilt = &b->rebuilt[at];
    if (s->arena >= 0) { /* persistent: one life, shared by all microbatches */
        original = &b->original[slot * b->n_mb];
        if (*original < 0)
            TRY(new_instance(b, slot, 0, false, original));
        *out = *original;
        return ST_OK;
    }
    if (*original < 0 && (r->phase == PH_FWD || !s->dropped)) /* a replay alone may make it */
        return no_writer(b, r, slot);
    if (r->phase == PH_FWD || !s->dropped) {
        *out = *original;
        return ST_OK;
    }
    if (*rebuilt == BEING_MADE)
        return err_set(b->e, ST_INTERNAL, "the replay of slot %s needs slot %s itself", s->name, s->name);
    if (*rebuilt < 0) {
        *rebuilt = BEING_MADE;
        TRY(add_step(b, (struct step_ref){.node = s->replay, .phase = PH_REPLAY, .mb = r->mb}));
    }
    *out = *rebuilt;
    return *rebuilt >= 0 ? ST_OK : no_writer(b, r, slot);
}

static int instance_to_write(struct builder *b, const struct step_ref *r, slot_id slot, enum use_mode mode, int *out)
{
    const struct slot *s = &b->g->slots[slot];
    int at = slot * b->n_mb + r->mb;
    if (s->arena >= 0)
        return instance_to_read(b, r, slot, out);
    if (r->phase == PH_REPLAY) {
        /* A kept slot that a replay also makes goes to scratch: the saved one is not touched. */
        TRY(new_instance(b, slot, r->mb, true, out));
        if (s->dropped && b->rebuilt[at] < 0)
            b->rebuilt[at] = *out;
        return ST_OK;
    }
    if (b->original[at] >= 0 && mode == USE_WRITE)
        return err_set(b->e, ST_INTERNAL, "node %s (%s) writes slot %s a second time", b->g->nodes[r->node].name,
                       phase_name(r->phase), s->name);
    if (b->original[at] < 0)
        TRY(new_instance(b, slot, r->mb, false, &b->original[at]));
    *out = b->original[at];
    return ST_OK;
}

/* A persistent slot exists once: what a microbatch wrote there and reads again must not be overwritten by another one
 * in between, as happens when microbatches that used to follow each other are interleaved. */
static int keep_owner(struct builder *b, const struct step_ref *r, const struct use *u)
{
    if (u->slot < 0 || b->g->slots[u->slot].arena < 0)
        return ST_OK;
    int *wrote = &b->rebuilt[u->slot * b->n_mb + r->mb], *owner = &b->owner[u->slot];
    if (u->mode == USE_READ && *wrote == 1 && *owner != r->mb)
        return err_set(b->e, ST_INTERNAL,
                       "node %s (%s) of microbatch %d reads slot %s, which microbatch %d has changed since: "
                       "with microbatches in flight it must not be persistent",
                       b->g->nodes[r->node].name, phase_name(r->phase), r->mb, b->g->slots[u->slot].name, *owner);
    if (u->mode != USE_READ) {
        *wrote = 1;
        *owner = r->mb;
    }
    return ST_OK;
}

static void note_use(struct builder *b, int step, int use)
{
    struct step *s = &b->p->steps[step];
    struct instance *i = &b->p->inst[s->instance[use]];
    const struct use *u = &step_phase(b->p, s)->use[use];
    /* The update of the step before may read a gradient that this plan then overwrites. */
    s->first[use] = u->mode == USE_ADD && !i->written;
    i->written |= u->mode != USE_READ;
    if (i->first_step < 0)
        i->first_step = step;
    i->last_step = step;
    i->n_uses++;
    bool written_forward = i->first_step >= 0 && b->p->steps[i->first_step].ref.phase == PH_FWD;
    if (i->arena == ARENA_WORK && written_forward && s->ref.phase != PH_FWD)
        i->arena = ARENA_FRAME; /* the backward half reads it: saved */
}

/* An op that can only overwrite must be the first to contribute to a sum, one that reads it must not. */
static int may_add(struct builder *b, int step, int use)
{
    const struct step *s = &b->p->steps[step];
    const struct use *u = &step_phase(b->p, s)->use[use];
    bool too_late = u->overwrites && !s->first[use],
         too_early = u->reads && s->first[use] && b->g->slots[u->slot].arena < 0;
    if (u->mode != USE_ADD || (!too_late && !too_early))
        return ST_OK;
    return err_set(b->e, ST_INTERNAL, "node %s (%s) %s slot %s, which %s written", b->g->nodes[s->ref.node].name,
                   phase_name(s->ref.phase), too_late ? "overwrites" : "reads", b->g->slots[u->slot].name,
                   too_late ? "others have" : "nothing has yet");
}

/* A backward phase that ran twice would add its gradients twice, which a second write would reveal only sometimes. */
static int once(struct builder *b, const struct step_ref *r)
{
    bool *done = &b->done[((size_t)r->node * PH_COUNT + (size_t)r->phase) * (size_t)b->n_mb + (size_t)r->mb];
    if (*done)
        return err_set(b->e, ST_INTERNAL, "node %s (%s) of microbatch %d is in the order twice",
                       b->g->nodes[r->node].name, phase_name(r->phase), r->mb);
    *done = true;
    return ST_OK;
}

static int add_step(struct builder *b, struct step_ref ref)
{
    const struct phase *ph = &b->g->nodes[ref.node].phase[ref.phase];
    TRY(once(b, &ref));
    int *instance = arena_alloc(&b->p->lists, (size_t)(ph->n_uses + 1) * sizeof *instance);
    bool *first = arena_alloc(&b->p->lists, (size_t)(ph->n_uses + 1) * sizeof *first);
    struct tensor *t = arena_alloc(&b->p->lists, (size_t)(ph->n_uses + 1) * sizeof *t);
    if (instance == NULL || first == NULL || t == NULL)
        return err_set(b->e, ST_NOMEM, "out of memory planning node %s", b->g->nodes[ref.node].name);
    for (int pass = 0; pass < 2; pass++)
        for (int u = 0; u < ph->n_uses; u++)
            if ((ph->use[u].mode == USE_READ) == (pass == 0))
                TRY(keep_owner(b, &ref, &ph->use[u]));
    /* Reads first: they may insert replays before this step. */
    for (int pass = 0; pass < 2; pass++) {
        for (int u = 0; u < ph->n_uses; u++) {
            slot_id slot = ph->use[u].slot;
            bool reads = ph->use[u].mode == USE_READ;
            if (slot < 0)
                instance[u] = -1;
            else if (reads && pass == 0)
                TRY(instance_to_read(b, &ref, slot, &instance[u]));
            else if (!reads && pass == 1)
                TRY(instance_to_write(b, &ref, slot, ph->use[u].mode, &instance[u]));
        }
    }
    struct plan *p = b->p;
    TRY(mem_grow((void **)&p->steps, &b->cap_steps, (size_t)p->n_steps + 1, sizeof *p->steps, b->e));
    struct step *s = &p->steps[p->n_steps];
    *s = (struct step){.ref = ref,
                       .lane = (int)b->g->nodes[ref.node].lane,
                       .after = -1,
                       .after_copy = -1,
                       .instance = instance,
                       .first = first,
                       .t = t};
    int index = p->n_steps++;
    for (int u = 0; u < ph->n_uses; u++)
        if (instance[u] >= 0) {
            note_use(b, index, u);
            TRY(may_add(b, index, u));
        }
    bool fetch = ref.phase == PH_REPLAY && b->g->nodes[ref.node].role == ROLE_OFFLOAD;
    p->n_fetches += fetch;
    p->n_replays += ref.phase == PH_REPLAY && !fetch;
    return ST_OK;
}

/* A gather or a copy from the host that a replay needed earlier than the order has it is there already, and a slot that
 * a replay has made beside others need not be copied. */
static bool fetches(enum node_role r) { return r == ROLE_GATHER || r == ROLE_OFFLOAD || r == ROLE_ROWS_IN; }
static bool is_there(const struct builder *b, const struct step_ref *r)
{
    const struct node *n = &b->g->nodes[r->node];
    if (r->phase != PH_REPLAY || !fetches(n->role))
        return false;
    slot_id made = n->role == ROLE_OFFLOAD ? n->phase[PH_REPLAY].use[1].slot : NO_SLOT;
    return b->done[((size_t)r->node * PH_COUNT + (size_t)r->phase) * (size_t)b->n_mb + (size_t)r->mb] ||
           (made >= 0 && b->rebuilt[made * b->n_mb + r->mb] >= 0);
}

static int add_entry(struct builder *b, const struct order *o, int i)
{
    const struct step_ref *r = &o->list[i];
    if (is_there(b, r))
        return ST_OK;
    TRY(add_step(b, *r));
    b->step_of[i] = b->p->n_steps - 1;
    struct step *s = &b->p->steps[b->p->n_steps - 1];
    if (r->after > 0)
        s->after = b->step_of[r->after - 1];
    if (r->after_copy > 0)
        s->after_copy = b->step_of[r->after_copy - 1];
    return ST_OK;
}

int plan_expand(struct builder *b, const struct order *o)
{
    /* Host nodes depend on nothing and run before all else, of every microbatch: so they come first in the list,
     * and placement knows. */
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < o->n; i++)
            if (b->g->nodes[o->list[i].node].host == (pass == 0))
                TRY(add_entry(b, o, i));
    return ST_OK;
}
