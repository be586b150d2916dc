/* ssd beyond the descriptor's samples: a hand-computed recurrence, chunk sizes against each other,
 * decoding against the whole, documents, the start of a text, long decays, and what it refuses. */
#include "support.h"
#include "ops/ssd/ssd.h"

#include "ops/ops.h"

enum { B = 2, S = 300, H = 4, P = 24, G = 2, N = 20 };

struct problem {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
    struct ssd_fwd_args a;
    void *memory[16];
    int n_memory;
};

static struct tensor make(struct problem *t, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor x = tensor_shape(t->ops->real, rank, dim);
    assert_non_null(x.data = calloc((size_t)tensor_elems(&x) + 1, dtype_bytes(x.dtype)));
    t->memory[t->n_memory++] = x.data;
    for (int64_t i = 0; key != 0 && i < tensor_elems(&x); i++)
        tensor_set(&x, i, (double)(float)rng_normal(key, (uint64_t)i));
    return x;
}
#define MAKE(t, key, ...)                                                                                              \
    make(t, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__}, key)

/* One sequence of random inputs; decay slow enough for memory over many rows. */
static void open_problem(struct problem *t, enum dev_kind kind)
{
    memset(t, 0, sizeof *t);
    assert_ok(dev_open(&t->dev, kind, 0, &t->e), &t->e);
    t->lane = (struct lane){.dev = &t->dev, .err = &t->e};
    t->ops = ops_for(&t->dev);
    t->a = (struct ssd_fwd_args){.x = MAKE(t, 1, B, S, H, P),
                                 .dt = MAKE(t, 2, B, S, H),
                                 .A_log = MAKE(t, 3, H),
                                 .dt_bias = MAKE(t, 4, H),
                                 .D = MAKE(t, 5, H),
                                 .Bm = MAKE(t, 6, B, S, G, N),
                                 .Cm = MAKE(t, 7, B, S, G, N),
                                 .chunk = 64};
    for (int h = 0; h < H; h++)
        tensor_set(&t->a.A_log, h, h - 5.0);
    t->a.y = MAKE(t, 0, B, S, H, P);
    t->a.work = tensor_1d(calloc(1, 1 << 23), DT_U8, 1 << 23);
    t->memory[t->n_memory++] = t->a.work.data;
}

static void close_problem(struct problem *t)
{
    for (int i = 0; i < t->n_memory; i++)
        free(t->memory[i]);
    dev_close(&t->dev);
}

/* Rows [first, first + n) of a tensor [B, S, ..]. */
static struct tensor rows_from(const struct tensor *t, int64_t first, int64_t n)
{
    struct tensor part = *t;
    part.data = (char *)t->data + first * t->stride[1] * (int64_t)dtype_bytes(t->dtype);
    part.dim[1] = n;
    return part;
}

static double worst(const struct tensor *a, const struct tensor *b)
{
    double top = 1e-9, error = 0;
    for (int64_t i = 0; i < tensor_elems(a); i++) {
        top = fmax(top, fabs(tensor_get(b, i)));
        error = fmax(error, fabs(tensor_get(a, i) - tensor_get(b, i)));
    }
    return error / top;
}

static void two_rows_by_hand(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        struct problem t;
        open_problem(&t, k == 0 ? DEV_REF : DEV_CPU);
        struct ssd_fwd_args a = t.a;
        double skip = 0.5, bias = 0.25, rate = -2, raw[2] = {0.3, -1}, x[2] = {3, 5}, bm[2] = {0.7, -0.2},
               cm[2] = {1.5, 2}, s = 0;
        a.x = rows_from(&a.x, 0, 2);
        a.x.dim[0] = a.x.dim[2] = a.x.dim[3] = 1;
        a.y = a.x;
        a.y.data = t.a.y.data;
        a.dt = tensor_3d(a.dt.data, a.dt.dtype, 1, 2, 1);
        a.Bm = tensor_4d(a.Bm.data, a.x.dtype, 1, 2, 1, 1);
        a.Cm = tensor_4d(a.Cm.data, a.x.dtype, 1, 2, 1, 1);
        a.A_log.dim[0] = a.dt_bias.dim[0] = a.D.dim[0] = 1;
        tensor_set(&a.A_log, 0, log(-rate));
        tensor_set(&a.dt_bias, 0, bias);
        tensor_set(&a.D, 0, skip);
        for (int i = 0; i < 2; i++) {
            tensor_set(&a.x, i, x[i]);
            tensor_set(&a.dt, i, raw[i]);
            tensor_set(&a.Bm, i, bm[i]);
            tensor_set(&a.Cm, i, cm[i]);
        }
        assert_ok(t.ops->ssd_fwd(&t.lane, &a), &t.e);
        for (int i = 0; i < 2; i++) {
            double delta = log(1 + exp(raw[i] + bias));
            s = exp(delta * rate) * s + delta * bm[i] * x[i];
            assert_true(fabs(tensor_get(&a.y, i) - (s * cm[i] + skip * x[i])) < 1e-5);
        }
        close_problem(&t);
    }
}

/* On ref the recurrence never sees the chunk; on the fast device the chunk
 * only changes rounding. */
static void every_chunk_size_gives_the_sequential_result(void **state)
{
    (void)state;
    const int64_t chunks[] = {1, 7, 64, 128, 256, 300, 5000};
    struct problem ref, cpu;
    open_problem(&ref, DEV_REF);
    open_problem(&cpu, DEV_CPU);
    assert_ok(ref.ops->ssd_fwd(&ref.lane, &ref.a), &ref.e);
    for (int i = 0; i < countof(chunks); i++) {
        cpu.a.chunk = chunks[i];
        assert_ok(cpu.ops->ssd_fwd(&cpu.lane, &cpu.a), &cpu.e);
        double error = worst(&cpu.a.y, &ref.a.y);
        if (!(error < 2e-6))
            fail_msg("chunk %lld: error %g", (long long)chunks[i], error);
    }
    close_problem(&ref);
    close_problem(&cpu);
}

/* A prompt at once, then rows one by one with the state in place, equal the whole pass. */
static void decode(enum dev_kind kind, double bound)
{
    struct problem t;
    open_problem(&t, kind);
    struct tensor whole = MAKE(&t, 0, B, S, H, P), state = MAKE(&t, 9, B, H, N, P);
    struct ssd_fwd_args a = t.a;
    a.y = whole;
    assert_ok(t.ops->ssd_fwd(&t.lane, &a), &t.e);
    int64_t start = 0;
    a.start = tensor_1d(&start, DT_I64, 1); /* the state holds rubbish, which a text that starts must not see */
    a.init = a.final = state;
    while (start < S) {
        int64_t n = start == 0 ? 201 : start < 210 ? 3 : 1;
        a.x = rows_from(&t.a.x, start, n);
        a.dt = rows_from(&t.a.dt, start, n);
        a.Bm = rows_from(&t.a.Bm, start, n);
        a.Cm = rows_from(&t.a.Cm, start, n);
        a.y = rows_from(&t.a.y, start, n);
        assert_ok(t.ops->ssd_fwd(&t.lane, &a), &t.e);
        start += n;
    }
    assert_true(worst(&t.a.y, &whole) <= bound);
    close_problem(&t);
}

static void decoding_is_bitwise_the_whole_pass_on_ref(void **state)
{
    (void)state;
    decode(DEV_REF, 0);
}

static void decoding_is_the_whole_pass_on_cpu(void **state)
{
    (void)state;
    decode(DEV_CPU, 1e-5);
}

/* A document inside a packed row gives what it gives alone, forward and backward. */
static void documents_do_not_see_each_other(void **state)
{
    (void)state;
    const int64_t cuts[] = {0, 1, 70, 128, 131, S};
    for (int k = 0; k < 2; k++) {
        struct problem t;
        open_problem(&t, k == 0 ? DEV_REF : DEV_CPU);
        struct tensor packed = MAKE(&t, 0, B, S, H, P);
        int32_t doc[B * S];
        for (int c = 0; c + 1 < countof(cuts); c++)
            for (int64_t i = cuts[c]; i < cuts[c + 1]; i++)
                doc[i] = doc[S + i] = (int32_t)cuts[c];
        struct ssd_fwd_args a = t.a;
        a.doc_start = tensor_2d(doc, DT_I32, B, S);
        a.y = packed;
        assert_ok(t.ops->ssd_fwd(&t.lane, &a), &t.e);
        a.doc_start = (struct tensor){0};
        for (int c = 0; c + 1 < countof(cuts); c++) {
            int64_t n = cuts[c + 1] - cuts[c];
            a.x = rows_from(&t.a.x, cuts[c], n);
            a.dt = rows_from(&t.a.dt, cuts[c], n);
            a.Bm = rows_from(&t.a.Bm, cuts[c], n);
            a.Cm = rows_from(&t.a.Cm, cuts[c], n);
            a.y = rows_from(&t.a.y, cuts[c], n);
            assert_ok(t.ops->ssd_fwd(&t.lane, &a), &t.e);
        }
        assert_true(worst(&packed, &t.a.y) <= (k == 0 ? 0 : 2e-6));
        close_problem(&t);
    }
}

/* Steps of hundreds: exponents far below what a float holds must give zeros, not NaN. */
static void violent_decay_stays_finite(void **state)
{
    (void)state;
    struct problem ref, cpu;
    open_problem(&ref, DEV_REF);
    open_problem(&cpu, DEV_CPU);
    for (struct problem *t = &ref; t != NULL; t = t == &ref ? &cpu : NULL) {
        for (int h = 0; h < H; h++)
            tensor_set(&t->a.A_log, h, 3);
        for (int64_t i = 0; i < B * S * H; i++)
            tensor_set(&t->a.dt, i, i % 3 == 0 ? 300 : i % 3 == 1 ? -60 : 1);
        assert_ok(t->ops->ssd_fwd(&t->lane, &t->a), &t->e);
    }
    assert_true(worst(&cpu.a.y, &ref.a.y) < 2e-6);
    close_problem(&ref);
    close_problem(&cpu);
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    struct problem t;
    open_problem(&t, DEV_CPU);
    struct ssd_fwd_args a = t.a;
    a.chunk = 0;
    assert_fails(t.ops->ssd_fwd(&t.lane, &a), ST_INVALID, &t.e, "chunk is 0");
    a = t.a;
    a.Bm.dim[2] = a.Cm.dim[2] = 3;
    assert_fails(t.ops->ssd_fwd(&t.lane, &a), ST_INVALID, &t.e, "4 heads are no multiple of 3 groups");
    a = t.a;
    a.dt_min = 2;
    a.dt_max = 1;
    assert_fails(t.ops->ssd_fwd(&t.lane, &a), ST_INVALID, &t.e, "range of delta");
    a = t.a;
    a.dt.dim[2] = 5;
    assert_fails(t.ops->ssd_fwd(&t.lane, &a), ST_INVALID, &t.e, "dt");
    a = t.a;
    a.work = tensor_1d(t.a.work.data, DT_U8, 64);
    assert_fails(t.ops->ssd_fwd(&t.lane, &a), ST_INVALID, &t.e, "work");
    close_problem(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_rows_by_hand),
        cmocka_unit_test(every_chunk_size_gives_the_sequential_result),
        cmocka_unit_test(decoding_is_bitwise_the_whole_pass_on_ref),
        cmocka_unit_test(decoding_is_the_whole_pass_on_cpu),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(violent_decay_stays_finite),
        cmocka_unit_test(bad_arguments_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
