/* Ordinary writes to shared memory, watched: bulk stores and wgmma read through another proxy, and see what threads
 * wrote only behind a fence_async_proxy. The kernels are compiled with gcc's instrumentation for threads
 * (-fsanitize=thread), whose calls end here instead of in its library: every write of a thread is noted with a time,
 * every fence sets the thread's time, and a copy or product that reads what nobody has fenced stops the launch. Reads
 * and writes also go to race.cc. */
#include "machine.h"

/* A note for every 4 bytes: the thread that wrote them (number in the block + 1) and when. 0: nobody, or hardware. */
static uint64_t note_of(const struct fiber *f) { return f->in->in->clock << 16 | (f->number + 1); }

static inline void mark(struct fiber *f, const void *p, size_t bytes)
{
    struct block *b = f->in;
    size_t at = (size_t)((const char *)p - b->shared);
    if (at >= b->room_bytes)
        return;
    uint64_t note = note_of(f);
    for (size_t i = at / 4; i <= (at + bytes - 1) / 4; i++)
        b->notes[i] = note;
}
void watch_write(struct fiber *f, const void *p, size_t bytes)
{
    mark(f, p, bytes);
    race_access(f, p, bytes, true, f->pc);
}

void watch_clear(struct block *b, const void *p, size_t bytes)
{
    size_t at = (size_t)((const char *)p - b->shared);
    if (at >= b->room_bytes || bytes == 0)
        return;
    memset(&b->notes[at / 4], 0, ((at + bytes - 1) / 4 - at / 4 + 1) * sizeof *b->notes);
}

void watch_async_read(const void *p, size_t bytes, const char *what)
{
    struct fiber *f = self();
    struct block *b = f->in;
    size_t at = (size_t)((const char *)p - b->shared);
    if (at >= b->room_bytes)
        return;
    for (size_t i = at / 4; i <= (at + bytes - 1) / 4; i++) {
        uint64_t note = b->notes[i];
        if (note == 0)
            continue;
        const struct fiber *by = b->fibers[(note & 0xffff) - 1];
        if (by->fenced <= note >> 16 && f->fenced <= note >> 16)
            emu_fail("%s reads %#zx of shared memory, which thread (%u, %u, %u) wrote without fence_async_proxy", what,
                     WINDOW_START + i * 4, by->thread.x, by->thread.y, by->thread.z);
    }
}

void emu_fence_async(void)
{
    struct fiber *f = self();
    f->fenced = ++f->in->in->clock;
    emu_maybe_yield();
}

/* ---- what instrumented code calls ------------------------------------------------------------ */

#define NOTHING(name, ...)                                                                                             \
    extern "C" void name(__VA_ARGS__);                                                                                 \
    extern "C" void name(__VA_ARGS__) {}
NOTHING(__tsan_init, void)
NOTHING(__tsan_func_entry, void *)
NOTHING(__tsan_func_exit, void)
NOTHING(__tsan_vptr_read, void *)
NOTHING(__tsan_vptr_update, void *, void *)

static inline void is_read(const void *p, size_t bytes, const void *pc)
{
    if (emu_self != NULL)
        race_access(self(), p, bytes, false, pc);
}
static inline void is_written(const void *p, size_t bytes, const void *pc)
{
    if (emu_self == NULL || bytes == 0)
        return;
    mark(self(), p, bytes);
    race_access(self(), p, bytes, true, pc);
}
#define ACCESS(name, used, bytes)                                                                                      \
    extern "C" void name(void *p);                                                                                     \
    extern "C" void name(void *p) { used(p, bytes, __builtin_return_address(0)); }
#define ACCESSES(kind, used)                                                                                           \
    ACCESS(__tsan_##kind##1, used, 1)                                                                                  \
    ACCESS(__tsan_##kind##2, used, 2)                                                                                  \
    ACCESS(__tsan_##kind##4, used, 4)                                                                                  \
    ACCESS(__tsan_##kind##8, used, 8)                                                                                  \
    ACCESS(__tsan_##kind##16, used, 16)                                                                                \
    ACCESS(__tsan_unaligned_##kind##2, used, 2)                                                                        \
    ACCESS(__tsan_unaligned_##kind##4, used, 4)                                                                        \
    ACCESS(__tsan_unaligned_##kind##8, used, 8)                                                                        \
    ACCESS(__tsan_unaligned_##kind##16, used, 16)                                                                      \
    extern "C" void __tsan_##kind##_range(void *p, size_t bytes);                                                      \
    extern "C" void __tsan_##kind##_range(void *p, size_t bytes) { used(p, bytes, __builtin_return_address(0)); }
ACCESSES(read, is_read)
ACCESSES(write, is_written)

#define ATOMIC(bits, type)                                                                                             \
    extern "C" type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int order);                              \
    extern "C" type __tsan_atomic##bits##_fetch_add(volatile type *p, type v, int)                                     \
    {                                                                                                                  \
        return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                             \
    }                                                                                                                  \
    extern "C" type __tsan_atomic##bits##_load(const volatile type *p, int order);                                     \
    extern "C" type __tsan_atomic##bits##_load(const volatile type *p, int)                                            \
    {                                                                                                                  \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                   \
    }                                                                                                                  \
    extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *expected, type v, int order,  \
                                                                 int failed);                                          \
    extern "C" int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *expected, type v, int, int)   \
    {                                                                                                                  \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
    }
ATOMIC(32, int)
ATOMIC(64, long)
NOTHING(__tsan_atomic_thread_fence, int)
