/* Where fibers wait for each other: barriers of a block and of a cluster, mbarriers; and addresses in shared memory. */
#include "machine.h"

/* ---- barriers -------------------------------------------------------------------------------- */

static void wake_all(std::vector<struct fiber *> &list)
{
    for (struct fiber *f : list)
        wake(f);
    list.clear();
}

/* All threads of the block that are left. */
static bool barrier_is_full(const struct block *b, int id)
{
    const struct named *n = &b->barriers[id];
    return n->came > 0 && (n->count == 0 ? n->came >= (int)b->live : n->came >= n->count);
}
static void barrier_open(struct block *b, int id)
{
    b->barriers[id].came = 0;
    race_open(&b->barriers[id].meet);
    wake_all(b->barriers[id].waiting);
}

static void come_to_barrier(int id, int threads, bool wait)
{
    struct fiber *f = self();
    struct named *n = &f->in->barriers[id];
    if (n->came > 0 && n->count != threads)
        emu_fail("barrier %d: some threads expect %d, others %d", id, n->count, threads);
    n->count = threads;
    n->came++;
    race_arrive(f, &n->meet);
    if (barrier_is_full(f->in, id)) {
        barrier_open(f->in, id);
        if (wait)
            race_pass(f, &n->meet);
        emu_maybe_yield();
        return;
    }
    if (!wait)
        return emu_maybe_yield();
    n->waiting.push_back(f);
    wait_here(id == 0 ? "__syncthreads" : "a named barrier", n, (uint64_t)id);
    race_pass(f, &n->meet);
}

void emu_block_barrier(void)
{
    NOTE_PLACE();
    come_to_barrier(0, 0, true);
}
void emu_named_barrier(int id, int threads, bool wait)
{
    NOTE_PLACE();
    if (id < 0 || id > 15 || threads <= 0 || threads % 32 != 0 || threads > (int)self()->in->threads)
        emu_fail("barrier %d of %d threads in a block of %u", id, threads, self()->in->threads);
    come_to_barrier(id, threads, wait);
}

static void cluster_barrier_check(struct cluster *c)
{
    if (c->came > 0 && c->came >= c->live) {
        c->came = 0;
        race_open(&c->meet);
        wake_all(c->waiting);
    }
}
void emu_cluster_barrier(void)
{
    NOTE_PLACE();
    struct cluster *c = here();
    c->came++;
    race_arrive(self(), &c->meet);
    if (c->came >= c->live) {
        cluster_barrier_check(c);
        race_pass(self(), &c->meet);
        return emu_maybe_yield();
    }
    c->waiting.push_back(self());
    wait_here("the cluster's barrier", c, 0);
    race_pass(self(), &c->meet);
}
unsigned emu_cluster_rank(void) { return self()->in->rank; }
unsigned emu_cluster_size(void) { return (unsigned)here()->blocks.size(); }

/* ---- shared memory --------------------------------------------------------------------------- */

/* No further aligned than was asked for, as on the GPU nobody promises more. */
void *emu_dynamic_shared(size_t align)
{
    struct block *b = self()->in;
    return b->shared + (align >= 1024 ? 0 : align < 16 ? 16 : align);
}

static thread_local char static_anchor;
unsigned emu_shared_address(const void *p)
{
    struct block *b = self() != NULL ? self()->in : NULL;
    for (size_t r = 0; b != NULL && r < b->in->blocks.size(); r++) {
        const struct block *o = b->in->blocks[r].get();
        if ((const char *)p >= o->shared && (const char *)p < o->shared + o->shared_bytes + 1024)
            return (unsigned)(r << RANK_SHIFT) | (unsigned)(WINDOW_START + ((const char *)p - o->shared));
    }
    if (b == NULL)
        return 0;
    intptr_t from = (const char *)p - &static_anchor;
    if (from > 0x3fffffff || from < -0x40000000)
        emu_fail("%p is not in shared memory", p);
    if (b->in->blocks.size() > 1)
        emu_fail("%p: a __shared__ variable in a cluster; the emulator needs dynamic shared memory there", p);
    return STATIC_BIT | ((unsigned)from & 0x7fffffffu);
}
void *emu_shared_pointer(unsigned address)
{
    struct block *b = self()->in;
    if (address & STATIC_BIT)
        return &static_anchor + ((intptr_t)(address << 1) << 32 >> 33);
    unsigned rank = address >> RANK_SHIFT, at = address & ((1u << RANK_SHIFT) - 1);
    if (rank >= b->in->blocks.size() || at < WINDOW_START ||
        at >= WINDOW_START + b->in->blocks[rank]->shared_bytes + 1024)
        emu_fail("%#x is no address in shared memory", address);
    return b->in->blocks[rank]->shared + (at - WINDOW_START);
}
unsigned emu_shared_address_in(const void *p, unsigned rank)
{
    NOTE_PLACE();
    struct block *b = self()->in;
    if (rank >= b->in->blocks.size())
        emu_fail("block %u of a cluster of %zu", rank, b->in->blocks.size());
    if ((const char *)p < b->shared || (const char *)p >= b->shared + b->shared_bytes + 1024)
        emu_fail("%p is not in this block's dynamic shared memory", p);
    return rank << RANK_SHIFT | (unsigned)(WINDOW_START + ((const char *)p - b->shared));
}

struct block *block_of_address(unsigned address)
{
    struct cluster *c = here();
    unsigned rank = address & STATIC_BIT ? self()->in->rank : address >> RANK_SHIFT;
    if (rank >= c->blocks.size())
        emu_fail("%#x is no address in shared memory", address);
    return c->blocks[rank].get();
}

/* ---- mbarrier -------------------------------------------------------------------------------- */

/* The word itself holds the place in the block's list and a sign that it is one. */
static const uint64_t SIGN = 0x6d62617200000000ull;

struct mbarrier *mbarrier_find(struct block *b, const uint64_t *bar)
{
    uint64_t word;
    memcpy(&word, bar, sizeof word);
    size_t i = (size_t)(word & 0xffffffffu);
    return (word & 0xffffffff00000000ull) == SIGN && i < b->mbarriers.size() && b->mbarriers[i].at == bar
               ? &b->mbarriers[i]
               : NULL;
}
static struct mbarrier *mbarrier_of(struct block *b, const uint64_t *bar)
{
    struct mbarrier *m = mbarrier_find(b, bar);
    if (m == NULL)
        emu_fail("mbarrier at %#x of shared memory: never initialised, or overwritten",
                 emu_shared_address(bar) & 0xffffff);
    return m;
}

void emu_mbarrier_init(uint64_t *bar, unsigned arrivals)
{
    NOTE_PLACE();
    struct block *b = self()->in;
    (void)emu_shared_address(bar);
    if ((uintptr_t)bar % 8 != 0 || arrivals == 0 || arrivals >= 1u << 20)
        emu_fail("mbarrier at %p with %u arrivals", (void *)bar, arrivals);
    struct mbarrier *m = mbarrier_find(b, bar);
    if (m != NULL && !m->waiting.empty())
        emu_fail("mbarrier initialised while %zu threads wait for it", m->waiting.size());
    if (m == NULL) {
        uint64_t word = SIGN | b->mbarriers.size();
        b->mbarriers.push_back({});
        m = &b->mbarriers.back();
        memcpy(bar, &word, sizeof word);
    }
    m->at = bar;
    m->expected = m->pending = arrivals;
    m->bytes = 0;
    m->phase = 0;
    m->meet = {};
}

static void mbarrier_check(struct mbarrier *m)
{
    if (m->pending != 0 || m->bytes != 0)
        return;
    m->phase++;
    m->pending = m->expected;
    race_open(&m->meet);
    wake_all(m->waiting);
}

void mbarrier_complete(const struct transfer *t)
{
    struct mbarrier *m = mbarrier_of(t->in, t->bar);
    m->bytes -= t->bytes;
    race_hand_over(t, &m->meet);
    if (m->bytes < -((1 << 20) - 1))
        emu_fail("mbarrier: %lld bytes more than were expected", (long long)-m->bytes);
    mbarrier_check(m);
}

static void arrive(struct block *b, uint64_t *bar, unsigned count, int64_t expect_bytes)
{
    struct mbarrier *m = mbarrier_of(b, bar);
    if (count > m->pending)
        emu_fail("mbarrier at %#x of shared memory: more than %u arrivals in phase %llu",
                 emu_shared_address(bar) & 0xffffff, m->expected, (unsigned long long)m->phase);
    m->bytes += expect_bytes;
    if (m->bytes > (1 << 20) - 1)
        emu_fail("mbarrier: %lld bytes are expected, 2^20 - 1 is the most", (long long)m->bytes);
    m->pending -= count;
    race_arrive(self(), &m->meet);
    mbarrier_check(m);
    emu_maybe_yield();
}
void emu_mbarrier_arrive(uint64_t *bar, unsigned count, int64_t expect_bytes)
{
    NOTE_PLACE();
    arrive(self()->in, bar, count, expect_bytes);
}
void emu_mbarrier_arrive_at(unsigned bar, unsigned count, int64_t expect_bytes)
{
    NOTE_PLACE();
    struct block *b = block_of_address(bar);
    if (b->live == 0)
        emu_fail("an arrival at an mbarrier of block %u of the cluster, which has ended", b->rank);
    arrive(b, (uint64_t *)emu_shared_pointer(bar), count, expect_bytes);
}

bool emu_mbarrier_test(uint64_t *bar, unsigned parity)
{
    NOTE_PLACE();
    struct mbarrier *m = mbarrier_of(self()->in, bar);
    if ((m->phase & 1) == (parity & 1)) {
        emu_yield();
        m = mbarrier_of(self()->in, bar);
        if ((m->phase & 1) == (parity & 1))
            return false;
    }
    race_pass(self(), &m->meet);
    return true;
}

void emu_mbarrier_wait(uint64_t *bar, unsigned parity)
{
    NOTE_PLACE();
    struct block *b = self()->in;
    if (parity > 1)
        emu_fail("parity %u of an mbarrier", parity);
    for (;;) {
        struct mbarrier *m = mbarrier_of(b, bar);
        if ((m->phase & 1) != parity)
            return race_pass(self(), &m->meet);
        m->waiting.push_back(self());
        wait_here("an mbarrier", bar, parity);
    }
}

/* Those that wait for all that are left. */
void barriers_at_exit(struct fiber *f)
{
    for (int i = 0; i < 16; i++)
        if (f->in->barriers[i].count == 0 && barrier_is_full(f->in, i))
            barrier_open(f->in, i);
    cluster_barrier_check(f->in->in);
}
