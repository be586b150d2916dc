/* Races in shared memory: two threads use the same place, one writes, and nothing orders the two. What orders: barriers
 * of a block, of some of its threads, of a cluster, __syncwarp, and an mbarrier's arrivals with its waits, each for the
 * thread that arrives alone, or that asked for the copy that arrives. What does not: shuffles, votes, products of a
 * warp.
 *
 * Every thread counts what it hands over (its clock), and knows how far it has seen every other one: a clock for each
 * thread of the cluster, joined where threads meet. An access is in order with an earlier one of another thread if that
 * thread's clock at the time is one this thread has seen. For every 2 bytes the last write is kept, and the reads
 * since. The accesses come from gcc's instrumentation (watch.cc). Found under any seed, as no order of events matters,
 * only who waited for whom. */
#include "machine.h"
#pragma GCC optimize("O3") /* every access of the kernels comes here */

enum { PLACE = 2 /* bytes */, PAGE = 128, STATIC_REACH = 1 << 20 };

struct race_reads { /* by lanes of a warp, at the same clock */
    unsigned warp, lanes;
    uint32_t clock;
    const void *pc;
};
struct race_place {
    unsigned writer; /* id + 1; 0: nobody, or hardware */
    uint32_t clock;
    const void *pc;
    std::vector<struct race_reads> reads;
};
struct race_page {
    struct race_place place[PAGE];
};
struct race_notes {
    std::vector<std::unique_ptr<race_page>> dynamic;
    std::unordered_map<uintptr_t, race_page> fixed; /* __shared__ variables */
};
void race_notes_free::operator()(struct race_notes *n) const { delete n; }

/* ---- clocks ---------------------------------------------------------------------------------- */

static void join(vclock &to, const vclock &from)
{
    if (to.size() < from.size())
        to.resize(from.size());
    uint32_t *t = to.data();
    const uint32_t *f = from.data();
    for (size_t i = 0, n = from.size(); i < n; i++)
        t[i] = f[i] > t[i] ? f[i] : t[i];
}

void race_begin(struct fiber *f, unsigned threads)
{
    f->id = f->in->rank * f->in->threads + f->number;
    f->seen.clear();
    if (!f->in->in->races)
        return;
    f->seen.resize(threads);
    f->seen[f->id] = 1;
}
void race_arrive(struct fiber *f, struct race_meet *m)
{
    if (f->seen.empty())
        return;
    join(m->coming, f->seen);
    f->seen[f->id]++;
}
/* A copy or send arrives: who waits for it has seen what the one had who asked for it. */
void race_hand_over(const struct transfer *t, struct race_meet *m) { join(m->coming, t->seen); }
void race_open(struct race_meet *m) { join(m->over, m->coming); }
void race_pass(struct fiber *f, const struct race_meet *m)
{
    if (!f->seen.empty())
        join(f->seen, m->over);
}
void race_warp_meets(struct warp *w, unsigned lanes)
{
    vclock all;
    for (int l = 0; l < 32; l++)
        if (lanes >> l & 1)
            join(all, w->lane[l]->seen);
    for (int l = 0; l < 32; l++)
        if (lanes >> l & 1 && !all.empty()) {
            w->lane[l]->seen = all;
            w->lane[l]->seen[w->lane[l]->id]++;
        }
}

/* ---- accesses -------------------------------------------------------------------------------- */

static bool seen(const vclock &by, unsigned id, uint32_t clock) { return by[id] >= clock; }

/* now, pc: where this access and the other one are made. */
static void stop(const struct cluster *c, unsigned other, const void *pc, const char *what, const void *now)
{
    unsigned threads = c->blocks[0]->threads;
    const struct fiber *o = c->blocks[other / threads]->fibers[other % threads];
    char place[200] = "";
    emu_place(pc, place, sizeof place);
    self()->pc = (void *)(uintptr_t)now;
    emu_fail("a race in shared memory: %s thread (%u, %u, %u) %s, and nothing orders the two", what, o->thread.x,
             o->thread.y, o->thread.z, place);
}

/* NULL: not shared memory. */
static struct race_place *place_at(struct block *b, const void *p)
{
    static thread_local char anchor;
    size_t at = (size_t)((const char *)p - b->shared);
    intptr_t from = (const char *)p - &anchor;
    bool dynamic = at < b->room_bytes;
    if (!dynamic && (from > STATIC_REACH || from < -STATIC_REACH))
        return NULL;
    if (b->races == NULL)
        b->races.reset(new race_notes());
    if (!dynamic)
        return &b->races->fixed[(uintptr_t)p / (PAGE * PLACE)].place[(uintptr_t)p / PLACE % PAGE];
    auto &pages = b->races->dynamic;
    if (pages.empty())
        pages.resize(b->room_bytes / (PAGE * PLACE) + 1);
    auto &page = pages[at / (PAGE * PLACE)];
    if (page == NULL)
        page.reset(new race_page());
    return &page->place[at / PLACE % PAGE];
}

/* Lanes that write the same place in one instruction are allowed to: one of them wins. */
static void note_write(struct fiber *f, struct race_place *p, const void *pc)
{
    if (p->writer != 0 && p->writer - 1 != f->id && !seen(f->seen, p->writer - 1, p->clock) &&
        !((p->writer - 1) / 32 == f->id / 32 && p->pc == pc))
        stop(f->in->in, p->writer - 1, p->pc, "a write after one by", pc);
    for (const struct race_reads &r : p->reads)
        for (unsigned left = r.lanes; left != 0; left &= left - 1) {
            unsigned id = r.warp * 32 + (unsigned)__builtin_ctz(left);
            if (id != f->id && !seen(f->seen, id, r.clock))
                stop(f->in->in, id, r.pc, "a write after a read by", pc);
        }
    p->reads.clear();
    p->writer = f->id + 1;
    p->clock = f->seen[f->id];
    p->pc = pc;
}
static void note_read(struct fiber *f, struct race_place *p, const void *pc)
{
    unsigned warp = f->id / 32, lane = 1u << f->id % 32;
    uint32_t clock = f->seen[f->id];
    if (p->writer != 0 && p->writer - 1 != f->id && !seen(f->seen, p->writer - 1, p->clock))
        stop(f->in->in, p->writer - 1, p->pc, "a read after a write by", pc);
    struct race_reads *free = NULL;
    for (struct race_reads &r : p->reads) {
        if (r.warp != warp)
            continue;
        if (r.clock == clock) {
            r.lanes |= lane;
            return;
        }
        r.lanes &= ~lane; /* what it read earlier comes before this */
        free = r.lanes == 0 ? &r : free;
    }
    if (free != NULL)
        *free = {warp, lane, clock, pc};
    else
        p->reads.push_back({warp, lane, clock, pc});
}

void race_access(struct fiber *f, const void *p, size_t bytes, bool write, const void *pc)
{
    if (f->seen.empty() || bytes == 0)
        return;
    struct race_place *at = place_at(f->in, p);
    for (uintptr_t i = (uintptr_t)p / PLACE, end = ((uintptr_t)p + bytes - 1) / PLACE; at != NULL && i <= end; i++) {
        write ? note_write(f, at, pc) : note_read(f, at, pc);
        at = (i + 1) % PAGE != 0 && i < end ? at + 1
             : i < end                      ? place_at(f->in, (const void *)((i + 1) * PLACE))
                                            : NULL;
    }
}

/* Hardware writes what a thread has asked for, whenever it likes from then on: in order with whatever that thread had
 * seen. Who reads it without waiting is found by wrong numbers. */
void race_copy(const struct transfer *t)
{
    struct block *b = t->in;
    size_t at = (size_t)(t->shared - b->shared);
    if (t->seen.empty() || at >= b->room_bytes || t->bytes == 0)
        return;
    for (size_t i = at / PLACE; i <= (at + t->bytes - 1) / PLACE; i++) {
        struct race_place *p = place_at(b, b->shared + i * PLACE);
        unsigned other = p->writer;
        const void *pc = p->pc;
        if (other != 0 && seen(t->seen, other - 1, p->clock))
            other = 0;
        for (const struct race_reads &r : p->reads)
            for (unsigned left = r.lanes; left != 0 && other == 0; left &= left - 1) {
                unsigned id = r.warp * 32 + (unsigned)__builtin_ctz(left);
                if (!seen(t->seen, id, r.clock)) {
                    other = id + 1;
                    pc = r.pc;
                }
            }
        if (other != 0)
            stop(b->in, other - 1, pc, "a copy to where there was an access by", t->pc);
        p->writer = 0;
        p->reads.clear();
    }
}
