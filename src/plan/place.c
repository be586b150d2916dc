/* Addresses. Saved slots of a microbatch are all alive when its forward half ends, so a frame is their
 * sum. Transient slots share one workspace: largest first, each at the lowest offset where it meets
 * no slot that may be alive at the same time. "May" follows happens-before, not list order. */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

/* A unit is an instance and all that are written over it in place. */
struct unit {
    int root;
    int64_t bytes, offset;
    int first_step;
    int last_pos[LANE_COUNT]; /* last position on each lane that uses it, -1: none */
};

/* Positions of the last use on each lane, per instance. */
static int last_uses(const struct builder *b, int **out)
{
    const struct plan *p = b->p;
    TRY(mem_array((void **)out, (size_t)p->n_inst * LANE_COUNT, sizeof **out, b->e));
    memset(*out, 0xFF, (size_t)p->n_inst * LANE_COUNT * sizeof **out); /* all -1 */
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        for (int u = 0; u < step_phase(p, s)->n_uses; u++)
            if (s->instance[u] >= 0)
                (*out)[s->instance[u] * LANE_COUNT + s->lane] = s->lane_pos;
    }
    return ST_OK;
}

/* Are all uses up to last[] done before step starts (or part of step itself, if own is true)? */
static bool done_before(const struct builder *b, const int *last, int step, bool own)
{
    const struct step *s = &b->p->steps[step];
    for (int l = 0; l < LANE_COUNT; l++) {
        int known = b->clock[step * LANE_COUNT + l];
        if (own && l == s->lane)
            known = s->lane_pos;
        if (last[l] > known)
            return false;
    }
    return true;
}

/* Write an output over an input that dies in the same step, where the op allows it. */
static void merge_in_place(struct builder *b, const int *last)
{
    struct plan *p = b->p;
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        const struct phase *ph = step_phase(p, s);
        for (int k = 0; k < ph->n_inplace; k++) {
            int from = s->instance[ph->inplace[k].from], to = s->instance[ph->inplace[k].to];
            if (from < 0 || to < 0 || from == to)
                continue;
            struct instance *f = &p->inst[from], *t = &p->inst[to];
            bool activations = b->g->slots[f->slot].arena < 0 && b->g->slots[t->slot].arena < 0;
            if (!activations || f->bytes != t->bytes || t->merged >= 0 || t->first_step != i ||
                t->arena == ARENA_FRAME || !done_before(b, &last[from * LANE_COUNT], i, true))
                continue;
            bool taken = false; /* one successor per buffer */
            for (int j = 0; j < p->n_inst && !taken; j++)
                taken = p->inst[j].merged == from;
            if (!taken)
                t->merged = from;
        }
    }
}

static int larger_first(const void *a, const void *b)
{
    const struct unit *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->root - y->root;
}

static int by_offset(const void *a, const void *b)
{
    const struct unit *x = *(const struct unit *const *)a, *y = *(const struct unit *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static bool may_meet(const struct builder *b, const struct unit *x, const struct unit *y)
{
    return !done_before(b, x->last_pos, y->first_step, false) && !done_before(b, y->last_pos, x->first_step, false);
}

static int64_t lowest_gap(const struct builder *b, struct unit *units, int n, struct unit **meets)
{
    int k = 0;
    for (int i = 0; i < n; i++)
        if (may_meet(b, &units[i], &units[n]))
            meets[k++] = &units[i];
    qsort(meets, (size_t)k, sizeof *meets, by_offset);
    int64_t at = 0;
    for (int i = 0; i < k; i++) {
        if (meets[i]->offset - at >= units[n].bytes)
            break;
        at = max_i64(at, meets[i]->offset + meets[i]->bytes);
    }
    return at;
}

static void add_to_unit(struct unit *u, const struct instance *inst, const int *last)
{
    u->bytes = max_i64(u->bytes, inst->bytes);
    if (u->first_step < 0 || inst->first_step < u->first_step)
        u->first_step = inst->first_step;
    for (int l = 0; l < LANE_COUNT; l++)
        u->last_pos[l] = last[l] > u->last_pos[l] ? last[l] : u->last_pos[l];
}

static int collect_units(struct builder *b, const int *last, struct unit *units, int *unit_of)
{
    struct plan *p = b->p;
    int n = 0;
    for (int i = 0; i < p->n_inst; i++)
        unit_of[i] = -1;
    for (int i = 0; i < p->n_inst; i++) {
        int root = root_of(p, i);
        if (b->g->slots[p->inst[root].slot].arena >= 0 || p->inst[root].arena == ARENA_FRAME)
            continue;
        if (unit_of[root] < 0) {
            unit_of[root] = n;
            units[n] = (struct unit){.root = root, .first_step = -1};
            memset(units[n].last_pos, 0xFF, sizeof units[n].last_pos);
            n++;
        }
        add_to_unit(&units[unit_of[root]], &p->inst[i], &last[i * LANE_COUNT]);
        p->work_unshared_bytes += p->inst[i].bytes;
    }
    return n;
}

static int place_work(struct builder *b, const int *last)
{
    struct plan *p = b->p;
    struct unit *units = NULL, **meets = NULL;
    int *unit_of = NULL, st;
    TRY_OUT(mem_array((void **)&units, (size_t)p->n_inst, sizeof *units, b->e));
    TRY_OUT(mem_array((void **)&meets, (size_t)p->n_inst, sizeof(struct unit *), b->e));
    TRY_OUT(mem_array((void **)&unit_of, (size_t)p->n_inst, sizeof *unit_of, b->e));
    int n = collect_units(b, last, units, unit_of);
    qsort(units, (size_t)n, sizeof *units, larger_first);
    for (int i = 0; i < n; i++) {
        units[i].offset = lowest_gap(b, units, i, meets);
        p->inst[units[i].root].offset = units[i].offset;
        p->work_bytes = max_i64(p->work_bytes, units[i].offset + units[i].bytes);
    }
out:
    free(units);
    free(meets);
    free(unit_of);
    return st;
}

/* Frames of all microbatches have the size of the largest; plan_bind adds a frame's own start. */
static int place_frames(struct builder *b)
{
    struct plan *p = b->p;
    int64_t *used = NULL;
    TRY(mem_array((void **)&used, (size_t)b->n_mb, sizeof *used, b->e));
    for (int i = 0; i < p->n_inst; i++) {
        struct instance *x = &p->inst[i];
        if (x->arena == ARENA_FRAME && x->merged < 0 && b->g->slots[x->slot].arena < 0) {
            x->offset = used[x->mb];
            used[x->mb] += x->bytes;
            p->frame_bytes = max_i64(p->frame_bytes, used[x->mb]);
        }
    }
    free(used);
    return ST_OK;
}

int plan_place(struct builder *b)
{
    struct plan *p = b->p;
    int *last = NULL;
    TRY(last_uses(b, &last));
    merge_in_place(b, last);
    int st = place_frames(b);
    if (st == ST_OK)
        st = place_work(b, last);
    free(last);
    for (int i = 0; st == ST_OK && i < p->n_inst; i++) {
        int root = root_of(p, i);
        p->inst[i].arena = p->inst[root].arena;
        p->inst[i].offset = p->inst[root].offset;
    }
    return st;
}
