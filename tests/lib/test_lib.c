/* libbraidk beyond its values: arguments that are wrong, structs of other versions, threads that share a handle, and
 * devices that are not there. */
#include "lib/braidk.h"
#include "support.h"

#include <omp.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 70, STREAMS = 4, CHANNELS = 24, K = STREAMS * CHANNELS, N = STREAMS * STREAMS + 2 * STREAMS };

static struct braidk *open_host(void)
{
    struct braidk *k = NULL;
    char why[256];
    assert_int_equal(braidk_open(BRAIDK_HOST, &k, why, sizeof why), BRAIDK_OK);
    assert_non_null(k);
    assert_string_equal(why, "");
    return k;
}

static struct braidk_tensor numbers(int rank, int64_t rows, int64_t columns, uint64_t key)
{
    int64_t n = rank == 2 ? rows * columns : rows;
    struct braidk_tensor t = {.rank = rank, .dtype = BRAIDK_F32};
    t.shape[0] = rows;
    t.shape[1] = rank == 2 ? columns : 0;
    t.stride[0] = rank == 2 ? columns : 1;
    t.stride[1] = rank == 2;
    float *p = malloc((size_t)n * sizeof *p);
    assert_non_null(p);
    for (int64_t i = 0; i < n; i++)
        p[i] = (float)rng_normal(key, (uint64_t)i);
    t.data = p;
    return t;
}

static struct braidk_mhc_pre_args pre_args_of(int64_t rows, int64_t channels)
{
    struct braidk_mhc_pre_args a = {.size = sizeof a,
                                    .x = numbers(2, rows, STREAMS * channels, 1),
                                    .fn = numbers(2, N, STREAMS * channels, 2),
                                    .base = numbers(1, N, 0, 3),
                                    .scale = numbers(1, 3, 0, 4),
                                    .norm_weight = numbers(1, channels, 0, 5),
                                    .h = numbers(2, rows, channels, 6),
                                    .coef = numbers(2, rows, N, 7),
                                    .stat = numbers(2, rows, N + 2, 8),
                                    .mhc = {.streams = STREAMS, .iterations = 20, .norm = 1, .norm_eps = 1e-5}};
    return a;
}

static struct braidk_mhc_pre_args pre_args(void) { return pre_args_of(ROWS, CHANNELS); }

static void drop_args(struct braidk_mhc_pre_args *a)
{
    struct braidk_tensor *all[] = {&a->x, &a->fn, &a->base, &a->scale, &a->norm_weight, &a->h, &a->coef, &a->stat};
    for (int i = 0; i < countof(all); i++)
        free(all[i]->data);
    free(a->work.data);
}

/* The call is refused with this status, and the text names what is wrong. */
static void expect_refused(struct braidk *k, const struct braidk_mhc_pre_args *a, int status, const char *text)
{
    char why[512];
    int64_t bytes = -1;
    int st = braidk_mhc_pre_work(k, a, &bytes, why, sizeof why);
    if (st == BRAIDK_OK)
        st = braidk_mhc_pre(k, a, NULL, why, sizeof why);
    assert_int_equal(st, status);
    if (strstr(why, text) == NULL)
        fail_msg("'%s' is not in '%s'", text, why);
}

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    struct braidk *k = open_host();
    struct braidk_mhc_pre_args good = pre_args(), a;
    static float three[4];
#define BAD(change, text)                                                                                              \
    do {                                                                                                               \
        a = good;                                                                                                      \
        change;                                                                                                        \
        expect_refused(k, &a, BRAIDK_INVALID, text);                                                                   \
    } while (0)
    BAD(a.x.rank = 0, "argument x is missing");
    BAD(a.x.rank = 6, "argument x has a rank");
    BAD(a.x.dtype = 77, "argument x has an unknown dtype");
    BAD(a.x.dtype = BRAIDK_BF16, "argument x is BF16, expected F32 or F64 on the host");
    BAD(a.x.shape[0] = -1, "argument x has a negative size");
    BAD((a.x.shape[0] = INT64_MAX, a.x.shape[1] = 4 * CHANNELS), "too many elements");
    BAD(a.x.stride[1] = 2, "argument x has stride 2 in its last dimension");
    BAD(a.x.data = NULL, "argument x has no data");
    BAD(a.fn.shape[0] = N - 1, "argument fn is F32 [23, 96], expected F32 [24, 96]");
    BAD(a.base.dtype = BRAIDK_F64, "argument base is F64");
    BAD(a.scale.data = (char *)three + 1, "argument scale is not aligned");
    BAD(a.norm_weight.shape[0] = 3, "argument norm_weight");
    BAD(a.mhc.norm = 0, "argument norm_weight is given, but norm is 0");
    BAD(a.h.rank = 0, "argument h is missing");
    BAD(a.coef.shape[1] = 5, "argument coef");
    BAD(a.stat.shape[1] = N, "argument stat");
    BAD(a.mhc.streams = 1, "argument streams is 1");
    BAD(a.mhc.streams = 5, "argument x must be [rows, streams * channels]");
    BAD(a.mhc.iterations = 0, "argument iterations is 0");
    BAD(a.mhc.profile = 7, "argument profile is 7");
    BAD(a.mhc.norm_eps = NAN, "not a number");
    BAD(a.mhc.root_eps = -1, "root_eps");
    BAD(a.size = 0, "args.size is 0");
    BAD(a.size = SIZE_MAX, "set it to sizeof the struct");
#undef BAD
    char why[64];
    int64_t bytes;
    assert_int_equal(braidk_mhc_pre(NULL, &good, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_int_equal(braidk_mhc_pre(k, NULL, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_int_equal(braidk_mhc_pre_work(k, &good, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_int_equal(braidk_mhc_pre_work(k, &good, &bytes, NULL, 0), BRAIDK_OK);
    a = good;
    a.fn.rank = 0;
    assert_int_equal(braidk_mhc_pre(k, &a, NULL, NULL, 0), BRAIDK_INVALID); /* no text wanted */
    char tiny[8] = "xxxxxxx";
    assert_int_equal(braidk_mhc_pre(k, &a, NULL, tiny, sizeof tiny), BRAIDK_INVALID);
    assert_int_equal(strlen(tiny), sizeof tiny - 1);
    drop_args(&good);
    braidk_close(k);
}

static void work_that_is_too_small_is_refused(void **state)
{
    (void)state;
    struct braidk *k = open_host();
    char why[256];
    struct braidk_tensor x = numbers(2, ROWS, K, 1), f = numbers(2, ROWS, CHANNELS, 2), c = numbers(2, ROWS, N, 3);
    struct braidk_mhc_post_bwd_args a = {.size = sizeof a,
                                         .dy = x,
                                         .x = x,
                                         .f = f,
                                         .coef = c,
                                         .bias = numbers(1, CHANNELS, 0, 9),
                                         .dx = numbers(2, ROWS, K, 4),
                                         .df = numbers(2, ROWS, CHANNELS, 5),
                                         .dcoef = numbers(2, ROWS, N, 6),
                                         .dbias = numbers(1, CHANNELS, 0, 9),
                                         .mhc = {.streams = STREAMS}};
    int64_t bytes = 0;
    assert_int_equal(braidk_mhc_post_bwd_work(k, &a, &bytes, why, sizeof why), BRAIDK_OK);
    assert_true(bytes > 0);
    assert_int_equal(braidk_mhc_post_bwd(k, &a, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_non_null(strstr(why, "argument work has 0 bytes"));
    char *room = aligned_alloc(256, (size_t)bytes + 512);
    assert_non_null(room);
    a.work.data = room + 8;
    a.work.bytes = bytes;
    assert_int_equal(braidk_mhc_post_bwd(k, &a, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_non_null(strstr(why, "argument work is not aligned"));
    a.work.data = room;
    a.work.bytes = bytes - 1;
    assert_int_equal(braidk_mhc_post_bwd(k, &a, NULL, why, sizeof why), BRAIDK_INVALID);
    a.work.bytes = bytes;
    assert_int_equal(braidk_mhc_post_bwd(k, &a, NULL, why, sizeof why), BRAIDK_OK);
    void *all[] = {x.data, f.data, c.data, a.bias.data, a.dx.data, a.df.data, a.dcoef.data, a.dbias.data, room};
    for (int i = 0; i < countof(all); i++)
        free(all[i]);
    braidk_close(k);
}

/* A caller with a newer header may pass more, as long as it is zero; one with an older header passes less. */
static void structs_may_grow(void **state)
{
    (void)state;
    struct braidk *k = open_host();
    struct {
        struct braidk_mhc_pre_args a;
        int64_t more[4];
    } newer = {.a = pre_args()};
    char why[256];
    newer.a.size = sizeof newer;
    assert_int_equal(braidk_mhc_pre(k, &newer.a, NULL, why, sizeof why), BRAIDK_OK);
    newer.more[2] = 1;
    assert_int_equal(braidk_mhc_pre(k, &newer.a, NULL, why, sizeof why), BRAIDK_UNSUPPORTED);
    assert_non_null(strstr(why, "does not know"));
    newer.a.size = offsetof(struct braidk_mhc_pre_args, work);
    assert_int_equal(braidk_mhc_pre(k, &newer.a, NULL, why, sizeof why), BRAIDK_OK);
    newer.a.size = offsetof(struct braidk_mhc_pre_args, mhc);
    assert_int_equal(braidk_mhc_pre(k, &newer.a, NULL, why, sizeof why), BRAIDK_INVALID);
    assert_true(braidk_args_bytes("mhc_pre") == sizeof(struct braidk_mhc_pre_args));
    assert_true(braidk_args_bytes("mhc") == 0 && braidk_args_bytes(NULL) == 0);
    drop_args(&newer.a);
    braidk_close(k);
}

static void no_rows_are_fine(void **state)
{
    (void)state;
    struct braidk *k = open_host();
    struct braidk_mhc_pre_args a = pre_args(), none = a;
    char why[256];
    none.x.shape[0] = none.h.shape[0] = none.coef.shape[0] = none.stat.shape[0] = 0;
    none.x.data = none.h.data = none.coef.data = none.stat.data = NULL;
    assert_int_equal(braidk_mhc_pre(k, &none, NULL, why, sizeof why), BRAIDK_OK);
    drop_args(&a);
    braidk_close(k);
}

struct job {
    struct braidk *k;
    struct braidk_mhc_pre_args a;
    bool fine;
};
static void *run_job(void *p)
{
    struct job *j = p;
    j->fine = true;
    for (int i = 0; i < 50 && j->fine; i++)
        j->fine = braidk_mhc_pre(j->k, &j->a, NULL, NULL, 0) == BRAIDK_OK;
    return NULL;
}

static void threads_share_a_handle_and_get_the_same_bits(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    struct braidk *k = open_host();
    struct job job[THREADS];
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++)
        job[i] = (struct job){.k = k, .a = pre_args()};
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, run_job, &job[i]), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(thread[i], NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_true(job[i].fine);
        assert_memory_equal(job[i].a.h.data, job[0].a.h.data, ROWS * CHANNELS * sizeof(float));
        assert_memory_equal(job[i].a.coef.data, job[0].a.coef.data, ROWS * N * sizeof(float));
    }
    for (int i = 0; i < THREADS; i++)
        drop_args(&job[i].a);
    braidk_close(k);
}

/* Workers of data loaders are forks of a process that has computed with several threads. */
static void a_forked_process_computes_the_same(void **state)
{
    (void)state;
    enum { MANY = 1024, WIDE = 64 }; /* enough for several threads */
    static float first[MANY * WIDE];
    int threads = omp_get_max_threads(), status = -1;
    struct braidk *k = open_host();
    struct braidk_mhc_pre_args a = pre_args_of(MANY, WIDE);
    omp_set_num_threads(2);
    assert_int_equal(braidk_mhc_pre(k, &a, NULL, NULL, 0), BRAIDK_OK);
    memcpy(first, a.h.data, sizeof first);
    pid_t child = fork();
    if (child == 0) {
        alarm(100); /* instead of waiting for ever */
        bool fine = braidk_mhc_pre(k, &a, NULL, NULL, 0) == BRAIDK_OK;
        _exit(fine && memcmp(first, a.h.data, sizeof first) == 0 ? 0 : 1);
    }
    omp_set_num_threads(threads);
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    drop_args(&a);
    braidk_close(k);
}

static void devices_that_are_not_there_are_refused(void **state)
{
    (void)state;
    struct braidk *k = (struct braidk *)1;
    char why[256];
    assert_int_equal(braidk_open(-2, &k, why, sizeof why), BRAIDK_INVALID);
    assert_null(k);
    assert_int_equal(braidk_open(BRAIDK_HOST, NULL, why, sizeof why), BRAIDK_INVALID);
    int st = braidk_open(4095, &k, why, sizeof why);
    assert_true(st == BRAIDK_UNSUPPORTED || st == BRAIDK_INVALID);
    assert_null(k);
    assert_true(strlen(why) > 10);
    braidk_close(NULL);
}

static void it_says_what_it_is(void **state)
{
    (void)state;
    struct braidk *k = open_host();
    struct braidk_mhc_pre_args a = pre_args();
    char why[256];
    assert_int_equal(braidk_version(), BRAIDK_VERSION);
    assert_non_null(strchr(braidk_build(), (char)40)); /* version (compiler, devices) */
    assert_non_null(strstr(braidk_device(k), "kernels"));
    assert_int_equal(braidk_mhc_pre_supported(k, &a, why, sizeof why), BRAIDK_OK);
    assert_non_null(strstr(why, "kernels"));
    a.mhc.streams = 17;
    assert_int_equal(braidk_mhc_pre_supported(k, &a, why, sizeof why), BRAIDK_INVALID);
    assert_non_null(strstr(why, "streams is 17"));
    drop_args(&a);
    braidk_close(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_arguments_are_named),
        cmocka_unit_test(work_that_is_too_small_is_refused),
        cmocka_unit_test(structs_may_grow),
        cmocka_unit_test(no_rows_are_fine),
        cmocka_unit_test(threads_share_a_handle_and_get_the_same_bits),
        cmocka_unit_test(a_forked_process_computes_the_same),
        cmocka_unit_test(devices_that_are_not_there_are_refused),
        cmocka_unit_test(it_says_what_it_is),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
