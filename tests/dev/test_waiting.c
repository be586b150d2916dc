/* dev/: threads that wait spin while the cores are theirs, and sleep soon beside other programs. */
#include "support.h"

#include "dev/dev.h"
#include "dev/waiting_int.h"

#include <omp.h>
#include <sys/resource.h>
#include <time.h>

static void preemptions_decide(void **state)
{
    (void)state;
    struct waiting *w = waiting_open(cpu_count() > 1 ? cpu_count() : 2);
    assert_non_null(w);
    waiting_decide(w, 0, 0);
    assert_false(waiting_is_short(w));
    waiting_decide(w, 5, 1); /* an idle machine has as many */
    assert_false(waiting_is_short(w));
    waiting_decide(w, 1000, 0.05); /* our own threads preempt each other */
    assert_false(waiting_is_short(w));
    waiting_decide(w, 200, 0.7);
    assert_true(waiting_is_short(w));
    waiting_decide(w, 0, 0); /* not at once: it may come back */
    assert_true(waiting_is_short(w));
    waiting_close(w);
}

static void one_thread_or_spare_cores_need_nothing(void **state)
{
    (void)state;
    assert_null(waiting_open(1));
    waiting_look(NULL);
    assert_false(waiting_is_short(NULL));
    waiting_close(NULL);
}

/* The reason for it all: processor time that threads use while one of them is late. */
static double time_of_a_late_thread(int rounds)
{
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (int i = 0; i < rounds; i++) {
#pragma omp parallel num_threads(2)
        if (omp_get_thread_num() == 0)
            usleep(1000);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    return (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
}

static void waiting_threads_sleep_beside_other_programs(void **state)
{
    (void)state;
    enum { ROUNDS = 100 };
    int n = cpu_count() > 1 ? cpu_count() : 2;
    struct waiting *w = waiting_open(n);
    omp_set_num_threads(n);
#pragma omp parallel
    (void)omp_get_thread_num();
    assert_non_null(w);
    time_of_a_late_thread(ROUNDS);
    double spinning = time_of_a_late_thread(ROUNDS);
    waiting_decide(w, 1000, 1);
    time_of_a_late_thread(ROUNDS);
    double sleeping = time_of_a_late_thread(ROUNDS);
    print_message("           processor time of %d waits of 1 ms: %.1f ms, then %.1f ms\n", ROUNDS, 1e3 * spinning,
                  1e3 * sleeping);
    assert_true(sleeping < 0.5e-3 * ROUNDS); /* less than half of the time that was waited */
    waiting_close(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(preemptions_decide),
        cmocka_unit_test(one_thread_or_spare_cores_need_nothing),
        cmocka_unit_test(waiting_threads_sleep_beside_other_programs),
    };
    return cmocka_run_group_tests_name("dev: waiting", tests, NULL, NULL);
}
