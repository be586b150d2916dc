/* train/: what is planned is what is allocated, and after its first step a trainer allocates
 * nothing, in any thread. The allocator of this program is replaced by one that counts. Sanitizers
 * bring an allocator of their own, and the OpenMP runtime of clang allocates at every parallel
 * region: then it is skipped. */
#include "run.h"

#include <errno.h>
#include <stdatomic.h>

#if defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTED 1
#else
#define COUNTED 0
#endif

#if COUNTED
static atomic_long allocations;

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

void *malloc(size_t n)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(p, n);
}

void *aligned_alloc(size_t align, size_t n)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(align, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
    atomic_fetch_add(&allocations, 1);
    *out = __libc_memalign(align, n);
    return *out == NULL ? ENOMEM : 0;
}
#endif

static void steps_after_the_first_allocate_nothing(void **state)
{
    (void)state;
#if COUNTED
    static const char *const cases[] = {
        "",
        "run.threads=2 model.dropout=0.1 model.qk_norm=on model.attn_gate=on model.bias=on "
        "model.attn_sink=learnable",
        "run.device=ref plan.recompute=full",
        "gpu.precision=fp8 plan.recompute=mlp.act",
        "plan.random_lanes=3 plan.poison=on plan.find_nan=on",
        "train.micro_batch=1 train.global_batch=4 data.eod=on data.eod_mask=on model.vocab=257",
    };
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        struct trainer t;
        run_config(&c, &pg, cases[i]);
        long at_start = atomic_load(&allocations);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        assert_true(atomic_load(&allocations) > at_start); /* the counter counts */
        run_steps(&t, 1, NULL);
        /* On a machine whose cores others use too, a team of threads is made at some step (dev/waiting.c), once. */
        long made = 0;
        for (int round = 0; round < 4 && (round == 0 || made > 0); round++) {
            long before = atomic_load(&allocations);
            run_steps(&t, 9, NULL);
            made = atomic_load(&allocations) - before;
        }
        if (made > 0)
            fail_msg("'%s': %ld allocations in nine steps after the first", cases[i], made);
        trainer_close(&t);
        config_release(&c);
    }
    playground_close(&pg);
#else
    skip();
#endif
}

static void planned_bytes_are_allocated_bytes(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t, dry;
    playground_open(&pg);
    run_config(&c, &pg, "");
    assert_ok(trainer_plan(&dry, &c, false, &e), &e);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    for (int a = 0; a < ARENA_COUNT; a++) {
        assert_null(dry.model.mem.base[a]); /* a dry run takes nothing */
        assert_int_equal(dry.model.mem.planned[a], t.model.mem.planned[a]);
        assert_int_equal(t.model.mem.allocated[a], t.model.mem.planned[a]);
        /* On a host device layers work with the trained values themselves: there are no master weights,
         * and without FP8 no codes. */
        assert_int_equal(t.model.mem.planned[a] > 0, a != ARENA_MASTER && a != ARENA_CODE);
    }
    trainer_close(&t);
    trainer_close(&dry);
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planned_bytes_are_allocated_bytes),
        cmocka_unit_test(steps_after_the_first_allocate_nothing),
    };
    return cmocka_run_group_tests_name("allocations", tests, NULL, NULL);
}
