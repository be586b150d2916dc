/* The inside of the emulator: fibers, warps, blocks and clusters, shared by the .cc files. */
#ifndef BRAID_EMU_MACHINE_H
#define BRAID_EMU_MACHINE_H

#include "cuda_runtime.h"

#include <cuda.h>

#include <deque>
#include <memory>
#include <stdint.h>
#include <unordered_map>
#include <vector>

/* Shared memory of a block begins here in its window, as the first KB belongs to the system. Above: blocks of a cluster
 * by rank. */
enum { WINDOW_START = 1024, RANK_SHIFT = 24, STATIC_BIT = 1u << 31 };

struct draws { /* splitmix64 */
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = (state += 0x9E3779B97F4A7C15ull);
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }
    unsigned below(unsigned n) { return (unsigned)((next() >> 32) * n >> 32); }
};

struct fiber;
struct block;
struct cluster;

/* race.cc: how far each thread of a cluster has come; a place where threads meet, with what those hand over who come to
 * it, and those who came in rounds that are over. */
typedef std::vector<uint32_t> vclock;
enum { RACE_THREADS = 2048 /* of a cluster, at most: work for each access of shared memory grows with them */ };
struct race_meet {
    vclock coming, over;
};
struct race_notes;
struct race_notes_free {
    void operator()(struct race_notes *n) const;
};

/* A copy that hardware makes. */
enum transfer_kind { COPY_ASYNC, BULK_LOAD, BULK_STORE, SEND, WGMMA };
struct transfer {
    enum transfer_kind kind;
    uint64_t due;
    bool read, done;  /* its source was read; all of it has happened */
    struct block *in; /* where the shared memory is */
    char *shared;
    char *global;
    unsigned bytes, valid;
    bool tensor, add;
    CUtensorMap map; /* tensor */
    int at[4];
    uint64_t *bar;
    std::vector<unsigned char> held; /* what was read */
    const void *pc;                  /* where it was asked for */
    vclock seen;                     /* by the one who asked, then */
    /* wgmma */
    struct group *group;
    std::vector<float *> d;
    std::vector<const uint32_t *> left; /* operand A in registers: by thread; else empty */
    int n, came;
    uint64_t a, b;
    bool a_mn, b_mn, first;
    bool codes, a_e5m2; /* FP8 */
};
typedef std::shared_ptr<transfer> transfer_ref;

/* Groups of transfers that a thread commits and waits for. */
struct commits {
    std::vector<transfer_ref> open;
    std::deque<std::vector<transfer_ref>> groups;
    void clear()
    {
        open.clear();
        groups.clear();
    }
};

enum fiber_state { FIBER_READY, FIBER_WAITING, FIBER_DONE };
struct warp;
struct fiber : emu_thread {
    void *sp;
    char *stack;
    struct block *in;
    struct warp *warp;
    enum fiber_state state;
    unsigned number, id;               /* in the block; in the cluster */
    vclock seen;                       /* empty: races are not looked for */
    uint64_t fenced;                   /* when it last called fence_async_proxy, by the cluster's clock */
    struct emu_meeting *meeting;       /* still read from */
    struct commits copies, bulk;       /* cp.async; bulk stores */
    std::deque<uint64_t> wgmma_groups; /* number of the last wgmma of each */
    uint64_t wgmmas;                   /* asked for */
    /* While it waits */
    const char *waits_for;
    const void *waits_on;
    uint64_t waits_value;
    void *pc;
};

struct warp {
    struct fiber *lane[32];
    unsigned exist, ready, gone;
    int listed; /* place in cluster.ready, -1: not there */
    std::vector<emu_meeting *> open;
    struct group *group;
};
/* Four warps that multiply together. */
struct group {
    std::deque<transfer_ref> queue; /* not yet done, in order */
    uint64_t first, done;           /* number of the first of the queue; how many are done */
    std::vector<struct fiber *> waiting;
};

struct mbarrier {
    uint64_t *at;
    unsigned expected, pending;
    int64_t bytes;
    uint64_t phase;
    std::vector<struct fiber *> waiting;
    struct race_meet meet;
};
struct named {
    int count, came; /* threads */
    std::vector<struct fiber *> waiting;
    struct race_meet meet;
};

struct block {
    struct cluster *in;
    uint3 index;
    unsigned rank, threads, live;
    char *room, *shared; /* allocated; shared memory, at a multiple of 1024 */
    size_t room_bytes, shared_bytes;
    uint64_t *notes; /* who wrote which 4 bytes (watch.cc) */
    std::unique_ptr<race_notes, race_notes_free> races;
    std::vector<mbarrier> mbarriers;
    struct named barriers[16];
    std::vector<warp> warps;
    std::vector<group> groups;
    std::vector<struct fiber *> fibers;
};

struct cluster {
    const struct emu_launch *launch;
    std::vector<std::unique_ptr<block>> blocks;
    std::vector<struct warp *> ready;
    std::vector<transfer_ref> queue; /* a heap: the first to happen on top; may hold some that are done */
    uint64_t next_due, tick, clock;  /* clock: counts fences */
    unsigned live, came;
    std::vector<struct fiber *> waiting; /* at the cluster's barrier */
    struct race_meet meet;
    bool races; /* are looked for */
    struct warp *current;
    struct draws draws;
    unsigned stay, delay; /* how long a warp is kept running, how long transfers take: drawn */
    void *home;           /* the OS thread's own stack */
    bool failed;
    char why[160];
};

struct fiber *self(void);
static inline struct cluster *here(void) { return self()->in->in; }

/* The running fiber waits until someone calls wake() for it. */
void wait_here(const char *what, const void *on, uint64_t value);
void wake(struct fiber *f);
/* Place of the caller's caller in the kernel, for messages. */
#define NOTE_PLACE() (self()->pc = __builtin_return_address(0))

struct block *block_of_address(unsigned address);
void mbarrier_complete(const struct transfer *t);
struct mbarrier *mbarrier_find(struct block *b, const uint64_t *bar);
void transfers_at_exit(struct fiber *f);
/* Those that are due; or one, whatever it is. False: there is none. */
void transfers_due(struct cluster *c);
bool transfer_any(struct cluster *c);

/* watch.cc: writes of threads; writes of hardware; what hardware will read. */
void watch_write(struct fiber *f, const void *p, size_t bytes);
void watch_clear(struct block *b, const void *p, size_t bytes);
void watch_async_read(const void *p, size_t bytes, const char *what);

/* race.cc. A thread comes to a place; its round is over; a thread goes on from there. Lanes that __syncwarp brings
 * together. */
void race_begin(struct fiber *f, unsigned threads);
void race_arrive(struct fiber *f, struct race_meet *m);
void race_hand_over(const struct transfer *t, struct race_meet *m);
void race_open(struct race_meet *m);
void race_pass(struct fiber *f, const struct race_meet *m);
void race_warp_meets(struct warp *w, unsigned lanes);
void race_access(struct fiber *f, const void *p, size_t bytes, bool write, const void *pc);
void race_copy(const struct transfer *t);

void meetings_at_exit(struct fiber *f);
void barriers_at_exit(struct fiber *f);

struct pool { /* of an OS thread */
    std::vector<struct fiber *> fibers;
};
/* The cluster whose first block has this number in the grid. False: the launch is stopped, a message was written. */
bool run_cluster(const struct emu_launch *l, uint64_t first_block, uint64_t draw, bool races, struct pool *p);

uint64_t emu_seed(void);
/* "file:line in function" of an address, by addr2line. */
void emu_place(const void *pc, char *out, size_t size);

#endif
