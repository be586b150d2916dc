/* Addresses. A frame holds what one microbatch saves in one chunk: all of it is alive when that forward half ends,
 * so inside a frame slots simply lie side by side. Frames share ARENA_FRAME, transient slots share the
 * workspace, offloaded ones host memory, by one rule: largest first, each at the lowest offset where it overlaps
 * nothing that may be alive at the same time. "May" follows happens-before, not list order. */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

/* What is placed as one piece: an instance and all that are written over it, or a frame. */
struct unit {
    int number, rank; /* as collected; among equals, the lower rank is placed first */
    int64_t bytes, offset;
    int start[LANE_COUNT];    /* positions that are done on each lane whenever one of its slots is first written */
    int last_pos[LANE_COUNT]; /* last position on each lane that uses it, -1: none */
    int from, to;             /* in list order: whatever ends before `from` is done before it starts; its last use */
};
struct unit_list {
    struct unit *u;
    int n;
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

static bool covers(const int *known, const int *last)
{
    for (int l = 0; l < LANE_COUNT; l++)
        if (last[l] > known[l])
            return false;
    return true;
}

/* Are all uses up to last[] done before step starts, or part of step itself? */
static bool dies_in(const struct builder *b, const int *last, int step)
{
    const struct step *s = &b->p->steps[step];
    int known[LANE_COUNT];
    memcpy(known, &b->clock[(size_t)step * LANE_COUNT], sizeof known);
    known[s->lane] = s->lane_pos;
    return covers(known, last);
}

static bool is_activation(const struct builder *b, const struct instance *x) { return b->g->slots[x->slot].arena < 0; }

/* Write an output over an input that dies in the same step, where the op allows it. */
static int merge_in_place(struct builder *b, const int *last)
{
    struct plan *p = b->p;
    bool *taken = NULL; /* one successor per buffer */
    TRY(mem_array((void **)&taken, (size_t)p->n_inst, sizeof *taken, b->e));
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        const struct phase *ph = step_phase(p, s);
        for (int k = 0; k < ph->n_inplace; k++) {
            int from = s->instance[ph->inplace[k].from], to = s->instance[ph->inplace[k].to];
            if (from < 0 || to < 0 || from == to || taken[from])
                continue;
            struct instance *f = &p->inst[from], *t = &p->inst[to];
            if (!is_activation(b, f) || !is_activation(b, t) || f->bytes != t->bytes || t->merged >= 0 ||
                t->first_step != i || t->arena == ARENA_FRAME || !dies_in(b, &last[from * LANE_COUNT], i))
                continue;
            taken[from] = true;
            t->merged = from;
        }
    }
    free(taken);
    return ST_OK;
}

/* ---- the lowest gap -------------------------------------------------------------------------- */

/* Units already placed. Most live a few steps only and are found by the stretch of the list they may be alive in: a
 * step of many microbatches has a hundred thousand of them. Those that live long, as what the host writes for every
 * microbatch before the first step, would stand in every stretch, and ask about all of them. They are kept apart, by
 * offset; and they find the others by place: units at one place are done one after the other, so of each place only the
 * first that is not done before them matters. */
enum { BUCKET_STEPS = 64, LONG_BUCKETS = 64 };
struct entry {
    int unit, next;
};
struct spot { /* a place and its size, and the units there in the order of their lives */
    int64_t offset, bytes;
    const struct unit **units;
    int n;
    size_t cap;
};
struct index {
    int *head; /* per bucket, -1: empty */
    struct entry *entries;
    int n_entries;
    size_t cap_entries;
    int *seen; /* per unit: the last query that met it */
    const struct unit **meets;
    struct spot *spots; /* of units in the buckets, by offset, then size */
    int n_spots;
    size_t cap_spots;
    const struct unit **lasting; /* units that live long, by offset */
    int n_lasting;
};

static int index_open(struct index *x, int n_steps, int n_units, struct err *e)
{
    *x = (struct index){0};
    int buckets = n_steps / BUCKET_STEPS + 1;
    TRY(mem_array((void **)&x->head, (size_t)buckets, sizeof *x->head, e));
    TRY(mem_array((void **)&x->seen, (size_t)n_units + 1, sizeof *x->seen, e));
    TRY(mem_array((void **)&x->meets, (size_t)n_units + 1, sizeof(struct unit *), e));
    TRY(mem_array((void **)&x->lasting, (size_t)n_units + 1, sizeof(struct unit *), e));
    memset(x->head, 0xFF, (size_t)buckets * sizeof *x->head);
    memset(x->seen, 0xFF, ((size_t)n_units + 1) * sizeof *x->seen);
    return ST_OK;
}

static void index_close(struct index *x)
{
    for (int i = 0; i < x->n_spots; i++)
        free((void *)x->spots[i].units);
    free(x->spots);
    free(x->head);
    free(x->entries);
    free(x->seen);
    free((void *)x->meets);
    free((void *)x->lasting);
}

static bool lives_long(const struct unit *u) { return u->to / BUCKET_STEPS - u->from / BUCKET_STEPS > LONG_BUCKETS; }

static void add_lasting(struct index *x, const struct unit *u)
{
    int low = 0, high = x->n_lasting;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (x->lasting[middle]->offset <= u->offset)
            low = middle + 1;
        else
            high = middle;
    }
    memmove((void *)(x->lasting + low + 1), (const void *)(x->lasting + low),
            (size_t)(x->n_lasting - low) * sizeof *x->lasting);
    x->lasting[low] = u;
    x->n_lasting++;
}

static int add_to_spot(struct index *x, const struct unit *u, struct err *e)
{
    int low = 0, high = x->n_spots;
    while (low < high) {
        int middle = low + (high - low) / 2;
        const struct spot *s = &x->spots[middle];
        if (s->offset < u->offset || (s->offset == u->offset && s->bytes < u->bytes))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == x->n_spots || x->spots[low].offset != u->offset || x->spots[low].bytes != u->bytes) {
        TRY(mem_grow((void **)&x->spots, &x->cap_spots, (size_t)x->n_spots + 1, sizeof *x->spots, e));
        memmove(x->spots + low + 1, x->spots + low, (size_t)(x->n_spots - low) * sizeof *x->spots);
        x->spots[low] = (struct spot){.offset = u->offset, .bytes = u->bytes};
        x->n_spots++;
    }
    struct spot *s = &x->spots[low];
    TRY(mem_grow((void **)&s->units, &s->cap, (size_t)s->n + 1, sizeof(struct unit *), e));
    s->units[s->n++] = u;
    return ST_OK;
}

static int index_add(struct index *x, const struct unit *u, int unit, struct err *e)
{
    if (lives_long(u)) {
        add_lasting(x, u);
        return ST_OK;
    }
    TRY(add_to_spot(x, u, e));
    for (int k = u->from / BUCKET_STEPS; k <= u->to / BUCKET_STEPS; k++) {
        TRY(mem_grow((void **)&x->entries, &x->cap_entries, (size_t)x->n_entries + 1, sizeof *x->entries, e));
        x->entries[x->n_entries] = (struct entry){.unit = unit, .next = x->head[k]};
        x->head[k] = x->n_entries++;
    }
    return ST_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct unit *x = *(const struct unit *const *)a, *y = *(const struct unit *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static bool may_meet(const struct unit *x, const struct unit *y)
{
    return !covers(y->start, x->last_pos) && !covers(x->start, y->last_pos);
}

/* Those of the buckets that a unit of short life may meet, by offset; returns their number. */
static int meets_by_time(struct index *x, const struct unit_list *l, int which)
{
    const struct unit *u = &l->u[which];
    int k = 0;
    for (int bucket = u->from / BUCKET_STEPS; bucket <= u->to / BUCKET_STEPS; bucket++)
        for (int at = x->head[bucket]; at >= 0; at = x->entries[at].next) {
            int other = x->entries[at].unit;
            if (x->seen[other] == which)
                continue;
            x->seen[other] = which;
            if (may_meet(&l->u[other], u))
                x->meets[k++] = &l->u[other];
        }
    qsort((void *)x->meets, (size_t)k, sizeof *x->meets, by_offset);
    return k;
}

/* The same for one of long life: at most one unit of each spot. "Done before" is transitive, so those of a spot that
 * are done before u come first. */
static int meets_by_place(struct index *x, const struct unit *u)
{
    int k = 0;
    for (int i = 0; i < x->n_spots; i++) {
        const struct spot *s = &x->spots[i];
        int low = 0, high = s->n;
        while (low < high) {
            int middle = low + (high - low) / 2;
            if (covers(u->start, s->units[middle]->last_pos))
                low = middle + 1;
            else
                high = middle;
        }
        if (low < s->n && !covers(s->units[low]->start, u->last_pos))
            x->meets[k++] = s->units[low];
    }
    return k;
}

static int64_t lowest_gap(struct index *x, const struct unit_list *l, int which)
{
    const struct unit *u = &l->u[which];
    int n = lives_long(u) ? meets_by_place(x, u) : meets_by_time(x, l, which), i = 0, k = 0;
    int64_t at = 0;
    for (;;) {
        while (k < x->n_lasting && (x->lasting[k]->offset + x->lasting[k]->bytes <= at || !may_meet(x->lasting[k], u)))
            k++;
        const struct unit *a = i < n ? x->meets[i] : NULL, *b = k < x->n_lasting ? x->lasting[k] : NULL;
        const struct unit *next = b == NULL || (a != NULL && a->offset <= b->offset) ? a : b;
        if (next == NULL || next->offset - at >= u->bytes)
            return at;
        at = max_i64(at, next->offset + next->bytes);
        i += next == a;
        k += next == b;
    }
}

/* Equal frames come in the order they begin, which packs them best; equal slots in the order they were first used. */
static int larger_first(const void *a, const void *b)
{
    const struct unit *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->rank - y->rank;
}

/* Steps of each lane by position, host steps (which come first) counted apart. */
struct lanes {
    int *step; /* [lane * n_steps + position]: index in the list */
    int count[LANE_COUNT], hosts[LANE_COUNT];
};

/* A unit whose last use is not proven done before another starts has that use at or after the other's `from`. Host
 * steps may be passed over: their readers, if proven done, prove them; what is never read is kept to the end. */
static void list_range(const struct builder *b, const struct lanes *at, struct unit *u)
{
    const struct plan *p = b->p;
    u->from = p->n_steps - 1;
    for (int l = 0; l < LANE_COUNT; l++) {
        int open = u->start[l] + 1 > at->hosts[l] ? u->start[l] + 1 : at->hosts[l];
        if (open < at->count[l]) {
            int step = at->step[(size_t)l * (size_t)p->n_steps + (size_t)open];
            u->from = step < u->from ? step : u->from;
        }
    }
    if (b->g->nodes[p->steps[u->to].ref.node].host)
        u->to = p->n_steps - 1;
    u->from = u->from < u->to ? u->from : u->to;
}

static int find_ranges(const struct builder *b, struct unit_list *l)
{
    const struct plan *p = b->p;
    struct lanes at = {0};
    TRY(mem_array((void **)&at.step, (size_t)p->n_steps * LANE_COUNT, sizeof *at.step, b->e));
    for (int i = 0; i < p->n_steps; i++) {
        int lane = p->steps[i].lane;
        at.step[(size_t)lane * (size_t)p->n_steps + (size_t)at.count[lane]++] = i;
        at.hosts[lane] += b->g->nodes[p->steps[i].ref.node].host;
    }
    for (int i = 0; i < l->n; i++)
        list_range(b, &at, &l->u[i]);
    free(at.step);
    return ST_OK;
}

static int place_units(const struct builder *b, struct unit_list *l, int64_t *bytes)
{
    struct index x = {0};
    int st;
    TRY(find_ranges(b, l));
    qsort(l->u, (size_t)l->n, sizeof *l->u, larger_first);
    TRY_OUT(index_open(&x, b->p->n_steps, l->n, b->e));
    for (int i = 0; i < l->n; i++) {
        l->u[i].offset = lowest_gap(&x, l, i);
        *bytes = max_i64(*bytes, l->u[i].offset + l->u[i].bytes);
        TRY_OUT(index_add(&x, &l->u[i], i, b->e));
    }
out:
    index_close(&x);
    return st;
}

/* ---- what belongs together ------------------------------------------------------------------- */

static struct unit empty_unit(int number, int rank)
{
    struct unit u = {.number = number, .rank = rank, .to = -1};
    memset(u.last_pos, 0xFF, sizeof u.last_pos);
    for (int l = 0; l < LANE_COUNT; l++)
        u.start[l] = INT32_MAX;
    return u;
}

/* Lives in one unit may begin on different lanes: the unit starts with what all of them know to be done. */
static void add_life(const struct builder *b, struct unit *u, const struct instance *x, const int *last)
{
    const int *clock = &b->clock[(size_t)x->first_step * LANE_COUNT];
    for (int l = 0; l < LANE_COUNT; l++) {
        u->start[l] = clock[l] < u->start[l] ? clock[l] : u->start[l];
        u->last_pos[l] = last[l] > u->last_pos[l] ? last[l] : u->last_pos[l];
    }
    u->to = x->last_step > u->to ? x->last_step : u->to;
}

static int n_chunks(const struct graph *g)
{
    int n = 1;
    for (int i = 0; i < g->n_nodes; i++)
        n = g->nodes[i].chunk + 1 > n ? g->nodes[i].chunk + 1 : n;
    return n;
}

/* The frame a saved slot lies in, -1: a unit of its own. Host nodes of all microbatches run before the rest: in a
 * frame, what they write would keep every frame alive from the start. */
static int frame_of(const struct builder *b, const struct instance *x)
{
    const struct node *writer = &b->g->nodes[b->p->steps[x->first_step].ref.node];
    return writer->host && b->n_mb > 1 ? -1 : writer->chunk * b->n_mb + x->mb;
}

/* Units of an arena. unit_of[]: per root instance; of_frame[]: per frame. Inside a frame slots get
 * their offset here. */
static void collect_units(const struct builder *b, const int *last, enum arena_id arena, struct unit_list *l,
                          int *unit_of, int *of_frame)
{
    struct plan *p = b->p;
    for (int i = 0; i < p->n_inst; i++) {
        int root = root_of(p, i);
        struct instance *r = &p->inst[root];
        if (!is_activation(b, r) || r->arena != arena)
            continue;
        int frame = arena == ARENA_FRAME ? frame_of(b, r) : -1, *known = frame >= 0 ? &of_frame[frame] : &unit_of[root];
        if (*known < 0) {
            *known = l->n;
            l->u[l->n] = empty_unit(l->n, arena == ARENA_FRAME ? r->first_step : root);
            l->n++;
        }
        unit_of[root] = *known;
        struct unit *u = &l->u[*known];
        if (i == root) {
            r->offset = frame >= 0 ? u->bytes : 0;
            u->bytes = frame >= 0 ? u->bytes + r->bytes : r->bytes;
        }
        add_life(b, u, &p->inst[i], &last[(size_t)i * LANE_COUNT]);
    }
}

/* All instances of an arena get their place; bytes: what they need together. */
static int place_arena(struct builder *b, const int *last, enum arena_id arena, int64_t *bytes)
{
    struct plan *p = b->p;
    struct unit_list l = {0};
    int *unit_of = NULL, *of_frame = NULL, st;
    int64_t *offset = NULL;
    size_t n = (size_t)p->n_inst, frames = (size_t)n_chunks(b->g) * (size_t)b->n_mb;
    TRY_OUT(mem_array((void **)&l.u, n, sizeof *l.u, b->e));
    TRY_OUT(mem_array((void **)&offset, n, sizeof *offset, b->e));
    TRY_OUT(mem_array((void **)&unit_of, n, sizeof *unit_of, b->e));
    TRY_OUT(mem_array((void **)&of_frame, frames, sizeof *of_frame, b->e));
    memset(unit_of, 0xFF, n * sizeof *unit_of);
    memset(of_frame, 0xFF, frames * sizeof *of_frame);
    collect_units(b, last, arena, &l, unit_of, of_frame);
    TRY_OUT(place_units(b, &l, bytes));
    for (int i = 0; i < l.n; i++)
        offset[l.u[i].number] = l.u[i].offset;
    for (int i = 0; i < p->n_inst; i++)
        if (unit_of[i] >= 0)
            p->inst[i].offset += offset[unit_of[i]];
    for (size_t f = 0; arena == ARENA_FRAME && f < frames; f++)
        p->n_frames += of_frame[f] >= 0;
out:
    free(l.u);
    free(offset);
    free(unit_of);
    free(of_frame);
    return st;
}

/* Every offset and every sum below is at most the sum of all instances. */
static int check_sum(const struct builder *b)
{
    double sum = 0;
    for (int i = 0; i < b->p->n_inst; i++)
        sum += (double)b->p->inst[i].bytes;
    if (sum <= 0x1p62)
        return ST_OK;
    err_set(b->e, ST_INVALID, "the activations of one step would need %.3g bytes, which is more than can be counted",
            sum);
    return err_hint(b->e, "a smaller train.micro_batch or train.seq, or fewer microbatches (train.global_batch)");
}

int plan_place(struct builder *b)
{
    struct plan *p = b->p;
    int *last = NULL, st;
    TRY(check_sum(b));
    TRY(last_uses(b, &last));
    TRY_OUT(merge_in_place(b, last));
    TRY_OUT(place_arena(b, last, ARENA_FRAME, &p->frame_bytes));
    TRY_OUT(place_arena(b, last, ARENA_WORK, &p->work_bytes));
    TRY_OUT(place_arena(b, last, ARENA_HOST, &p->host_bytes));
    for (int i = 0; i < p->n_inst; i++) {
        const struct instance *root = &p->inst[root_of(p, i)];
        p->inst[i].arena = root->arena;
        p->inst[i].offset = root->offset;
        if (root->arena == ARENA_WORK && is_activation(b, root))
            p->work_unshared_bytes += p->inst[i].bytes;
    }
out:
    free(last);
    return st;
}
