/* Fibers, their scheduler, the life of a thread, a block and a cluster: see emu.h. */
#include "machine.h"

#include <map>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
enum { STACK_BYTES = 512 << 10 };
/* What a stopped launch's threads held is lost with them. */
extern "C" const char *__asan_default_options(void);
extern "C" const char *__asan_default_options(void) { return "detect_leaks=0"; }
#else
enum { STACK_BYTES = 128 << 10 };
#endif

/* ---- switching stacks ------------------------------------------------------------------------ */

extern "C" void emu_switch(void **save, void *to);
#if defined(__x86_64__)
__asm__(".text\n.globl emu_switch\n.type emu_switch, @function\nemu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size emu_switch, .-emu_switch\n");
static void *fresh_stack(char *stack, void (*entry)(void))
{
    void **top = (void **)(stack + STACK_BYTES) - 2;
    *top = (void *)entry; /* where emu_switch returns to, with the stack as a call leaves it */
    return top - 6;
}
#elif defined(__aarch64__)
__asm__(".text\n.globl emu_switch\n.type emu_switch, %function\nemu_switch:\n"
        "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, "
        "#48]\n"
        "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n"
        ".size emu_switch, .-emu_switch\n");
static void *fresh_stack(char *stack, void (*entry)(void))
{
    char *top = stack + STACK_BYTES - 160;
    *(void **)(top + 88) = (void *)entry;
    return top;
}
#else
#error "emu_switch is written for x86-64 and aarch64"
#endif

__thread struct emu_thread *emu_self;
__thread uint3 blockDim, gridDim;
struct fiber *self(void) { return (struct fiber *)emu_self; }

#if defined(__SANITIZE_ADDRESS__)
struct stack_bounds {
    void *bottom;
    size_t size;
};
static struct stack_bounds home_bounds(void)
{
    struct stack_bounds b = {};
    pthread_attr_t attr;
    if (pthread_getattr_np(pthread_self(), &attr) == 0) {
        pthread_attr_getstack(&attr, &b.bottom, &b.size);
        pthread_attr_destroy(&attr);
    }
    return b;
}
#endif

/* Where a fiber goes when it waits, is done, or has failed: another fiber, or home (NULL). */
static void switch_to(struct cluster *c, struct fiber *from, struct fiber *to)
{
    void **save = from != NULL ? &from->sp : &c->home;
#if defined(__SANITIZE_ADDRESS__)
    static thread_local struct stack_bounds home = home_bounds();
    void *fake = NULL;
    bool last = from != NULL && from->state == FIBER_DONE;
    __sanitizer_start_switch_fiber(last ? NULL : &fake, to != NULL ? to->stack : home.bottom,
                                   to != NULL ? (size_t)STACK_BYTES : home.size);
    emu_self = to;
    emu_switch(save, to != NULL ? to->sp : c->home);
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#else
    emu_self = to;
    emu_switch(save, to != NULL ? to->sp : c->home);
#endif
}

/* ---- who runs -------------------------------------------------------------------------------- */

static void list_warp(struct cluster *c, struct warp *w)
{
    if (w->listed < 0) {
        w->listed = (int)c->ready.size();
        c->ready.push_back(w);
    }
}
static void unlist_warp(struct cluster *c, struct warp *w)
{
    struct warp *last = c->ready.back();
    c->ready[(size_t)w->listed] = last;
    last->listed = w->listed;
    c->ready.pop_back();
    w->listed = -1;
}

void wake(struct fiber *f)
{
    if (f->state != FIBER_WAITING)
        return;
    f->state = FIBER_READY;
    f->warp->ready |= 1u << f->lane;
    list_warp(f->in->in, f->warp);
}

/* The next lane of the warp, round the warp. */
static struct fiber *take_lane(struct cluster *c, struct warp *w, int after)
{
    unsigned turn = (unsigned)(after + 1) & 31, rotated = w->ready >> turn | (turn ? w->ready << (32 - turn) : 0);
    int lane = (int)(((unsigned)__builtin_ctz(rotated) + turn) & 31);
    w->ready &= ~(1u << lane);
    if (w->ready == 0)
        unlist_warp(c, w);
    return w->lane[lane];
}

/* NULL: nobody can run, ever. */
static struct fiber *choose(struct cluster *c, struct fiber *from)
{
    for (;;) {
        if (c->failed)
            return NULL;
        c->tick++;
        if (c->tick >= c->next_due)
            transfers_due(c);
        struct warp *w = c->current;
        if (w != NULL && w->ready != 0 && c->draws.below(c->stay) != 0)
            return take_lane(c, w, from != NULL && from->warp == w ? from->lane : (int)c->draws.below(32));
        if (!c->ready.empty()) {
            c->current = c->ready[c->draws.below((unsigned)c->ready.size())];
            return take_lane(c, c->current, (int)c->draws.below(32));
        }
        if (!transfer_any(c)) /* what nobody waited for happens all the same */
            return NULL;
    }
}

static void leave(struct fiber *f)
{
    struct cluster *c = f->in->in;
    struct fiber *next = choose(c, f);
    if (next != f)
        switch_to(c, f, next);
}

void wait_here(const char *what, const void *on, uint64_t value)
{
    struct fiber *f = self();
    f->state = FIBER_WAITING;
    f->waits_for = what;
    f->waits_on = on;
    f->waits_value = value;
    leave(f);
    f->waits_for = NULL;
}

void emu_yield(void)
{
    struct fiber *f = self();
    f->state = FIBER_WAITING;
    wake(f);
    leave(f);
}
void emu_maybe_yield(void)
{
    struct cluster *c = here();
    if (c->draws.below(4) == 0)
        emu_yield();
}

/* ---- what went wrong ------------------------------------------------------------------------- */

void emu_place(const void *pc, char *out, size_t size)
{
    char command[128], exe[512], name[512] = "", line[512];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    snprintf(out, size, "%p", pc);
    if (n <= 0)
        return;
    exe[n] = '\0';
    /* The executable is linked at a fixed address (-no-pie), so this is the address in the file. */
    snprintf(command, sizeof command, "addr2line -Cfi -e /proc/%d/exe %p 2>/dev/null", (int)getpid(),
             (const void *)((const char *)pc - 1));
    FILE *f = popen(command, "r");
    if (f == NULL)
        return;
    std::string all;
    while (fgets(name, sizeof name, f) != NULL && fgets(line, sizeof line, f) != NULL) {
        name[strcspn(name, "\n(<")] = '\0';
        line[strcspn(line, " \n")] = '\0';
        const char *at = strstr(line, "src/"), *test = strstr(line, "tests/");
        at = at != NULL ? at : test != NULL ? test : line;
        if (strstr(at, "tests/emu/include") == NULL && strcmp(at, "??:0") != 0 && all.size() < 300)
            all += (all.empty() ? "" : ", in ") + std::string(at) + " " + name;
    }
    pclose(f);
    if (!all.empty())
        snprintf(out, size, "%s", all.c_str());
}

void emu_fail(const char *format, ...)
{
    struct fiber *f = self();
    struct cluster *c = f->in->in;
    char text[512], place[400], kernel[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    emu_place(f->pc != NULL ? f->pc : __builtin_return_address(0), place, sizeof place);
    emu_place((const char *)c->launch->kernel + 1, kernel, sizeof kernel);
    fprintf(stderr, "emu: %s\n  block (%u, %u, %u), thread (%u, %u, %u)\n  at %s\n  kernel %s\n", text, f->block.x,
            f->block.y, f->block.z, f->thread.x, f->thread.y, f->thread.z, place, kernel);
    c->failed = true;
    snprintf(c->why, sizeof c->why, "%.159s", text);
    switch_to(c, f, NULL);
    abort(); /* nobody comes back */
}

/* Who waits where: fibers of a block that wait for the same thing at the same place are one line. */
static void report_deadlock(struct cluster *c)
{
    char kernel[400], place[400];
    emu_place((const char *)c->launch->kernel + 1, kernel, sizeof kernel);
    fprintf(stderr, "emu: deadlock: nobody can run (seed %llu)\n  kernel %s\n", (unsigned long long)emu_seed(), kernel);
    int lines = 0;
    for (auto &b : c->blocks) {
        std::map<std::pair<const void *, const void *>, std::vector<struct fiber *>> by;
        for (struct fiber *f : b->fibers)
            if (f->state != FIBER_DONE)
                by[{f->pc, f->waits_on}].push_back(f);
        for (auto &g : by) {
            struct fiber *f = g.second[0];
            if (lines++ >= 40)
                continue;
            emu_place(f->pc, place, sizeof place);
            fprintf(stderr,
                    "  block (%u, %u, %u)%s: %zu threads, the first (%u, %u, %u), the last (%u, %u, %u), wait for %s",
                    b->index.x, b->index.y, b->index.z, c->blocks.size() > 1 ? " of the cluster" : "", g.second.size(),
                    f->thread.x, f->thread.y, f->thread.z, g.second.back()->thread.x, g.second.back()->thread.y,
                    g.second.back()->thread.z, f->waits_for);
            if (strcmp(f->waits_for, "an mbarrier") == 0) {
                const struct mbarrier *m = mbarrier_find(b.get(), (const uint64_t *)f->waits_on);
                if (m != NULL)
                    fprintf(stderr,
                            " at %#x of shared memory, parity %llu; its phase is %llu, %u of %u arrivals and %lld "
                            "bytes are missing",
                            emu_shared_address(m->at) & 0xffffff, (unsigned long long)f->waits_value,
                            (unsigned long long)m->phase, m->pending, m->expected, (long long)m->bytes);
            } else if (f->waits_value != 0) {
                fprintf(stderr, " (%llu)", (unsigned long long)f->waits_value);
            }
            fprintf(stderr, "\n    at %s\n", place);
        }
    }
    if (lines > 40)
        fprintf(stderr, "  and %d more lines\n", lines - 40);
}

/* ---- a thread's life ------------------------------------------------------------------------- */

[[noreturn]] static void finish(void)
{
    struct fiber *f = self();
    struct cluster *c = f->in->in;
    f->pc = NULL;
    transfers_at_exit(f);
    f->state = FIBER_DONE;
    f->warp->gone |= 1u << f->lane;
    f->in->live--;
    c->live--;
    meetings_at_exit(f);
    barriers_at_exit(f);
    struct fiber *next = choose(c, f);
    switch_to(c, f, next);
    abort();
}

static void enter(void)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    const struct emu_launch *l = here()->launch;
    l->run(l->call);
    finish();
}

/* ---- a cluster's life ------------------------------------------------------------------------ */

/* Stacks and fibers outlive clusters: they belong to an OS thread. */
static struct fiber *fiber_get(struct pool *p, size_t i)
{
    while (p->fibers.size() <= i) {
        struct fiber *f = new fiber();
        f->stack = (char *)mmap(NULL, STACK_BYTES + 4096, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f->stack == MAP_FAILED) {
            perror("emu: no memory for stacks");
            abort();
        }
        mprotect(f->stack, 4096, PROT_NONE); /* an overflow is a fault, not a surprise */
        f->stack += 4096;
        p->fibers.push_back(f);
    }
    return p->fibers[i];
}

static void shared_memory_make(struct block *b, size_t bytes)
{
    b->shared_bytes = bytes;
    b->room_bytes = (bytes + 2047) / 1024 * 1024 + 1024;
    b->room = (char *)aligned_alloc(1024, b->room_bytes);
    b->notes = (uint64_t *)calloc(b->room_bytes / 4 + 1, sizeof *b->notes);
    if (b->room == NULL || b->notes == NULL)
        abort();
    b->shared = b->room;
    memset(b->room, 0xff, b->room_bytes); /* not a number, in any type */
}

static void fiber_make(struct fiber *f, struct block *b, unsigned t, const struct emu_launch *l)
{
    unsigned x = l->block.x, y = l->block.y;
#if defined(__SANITIZE_ADDRESS__)
    /* frames that were never left: of finish, or of a launch that was stopped */
    size_t marked = f->state == FIBER_DONE ? 16 << 10 : STACK_BYTES;
    __asan_unpoison_memory_region(f->stack + STACK_BYTES - marked, marked);
#endif
    f->thread = {t % x, t / x % y, t / x / y};
    f->block = b->index;
    f->lane = (int)(t % 32);
    f->number = t;
    f->fenced = 0;
    f->in = b;
    race_begin(f, l->cluster * b->threads);
    f->warp = &b->warps[t / 32];
    f->warp->lane[f->lane] = f;
    f->warp->exist |= 1u << f->lane;
    f->state = FIBER_WAITING;
    f->meeting = NULL;
    f->copies.clear();
    f->bulk.clear();
    f->wgmma_groups.clear();
    f->wgmmas = 0;
    f->waits_for = "its start";
    f->pc = NULL;
    f->sp = fresh_stack(f->stack, enter);
}

static void block_make(struct cluster *c, struct block *b, struct pool *p, size_t *used)
{
    const struct emu_launch *l = c->launch;
    b->in = c;
    b->threads = b->live = l->block.x * l->block.y * l->block.z;
    b->warps.resize((b->threads + 31) / 32);
    b->groups.resize((b->threads + 127) / 128);
    b->mbarriers.reserve(256);
    for (size_t w = 0; w < b->warps.size(); w++) {
        b->warps[w].listed = -1;
        b->warps[w].group = &b->groups[w / 4];
    }
    shared_memory_make(b, l->shared);
    for (unsigned t = 0; t < b->threads; t++) {
        struct fiber *f = fiber_get(p, (*used)++);
        fiber_make(f, b, t, l);
        b->fibers.push_back(f);
    }
    for (struct fiber *f : b->fibers) {
        f->warp_mask = f->warp->exist;
        wake(f);
    }
}

static void cluster_free(struct cluster *c)
{
    for (auto &b : c->blocks) {
        for (struct warp &w : b->warps)
            for (emu_meeting *m : w.open)
                delete m;
        for (struct fiber *f : b->fibers) {
            f->copies.clear();
            f->bulk.clear();
        }
        free(b->room);
        free(b->notes);
    }
}

bool run_cluster(const struct emu_launch *l, uint64_t first_block, uint64_t draw, bool races, struct pool *p)
{
    struct cluster c = {};
    c.launch = l;
    c.draws.state = draw;
    c.next_due = UINT64_MAX;
    c.clock = 1;
    c.races = races && l->cluster * l->block.x * l->block.y * l->block.z <= RACE_THREADS;
    static const unsigned stays[] = {2, 8, 64, 1000}, delays[] = {1, 16, 200, 5000};
    c.stay = stays[c.draws.below(4)];
    c.delay = delays[c.draws.below(4)];
    size_t used = 0;
    for (unsigned r = 0; r < l->cluster; r++) {
        uint64_t at = first_block + r;
        c.blocks.emplace_back(new block());
        struct block *b = c.blocks.back().get();
        b->rank = r;
        b->index = {(unsigned)(at % l->grid.x), (unsigned)(at / l->grid.x % l->grid.y),
                    (unsigned)(at / l->grid.x / l->grid.y)};
        block_make(&c, b, p, &used);
        c.live += b->threads;
    }
    struct fiber *first = choose(&c, NULL);
    switch_to(&c, NULL, first);
    if (!c.failed && c.live > 0) {
        report_deadlock(&c);
        c.failed = true;
    }
    emu_self = NULL;
    cluster_free(&c);
    return !c.failed;
}
