/* What the op harness cannot say of compressed entries: decoding in steps of any length gives the entries of the whole
 * text bit for bit, known values, and errors. */
#include "bench.h"
#include "ops/compress/compress.h"
#include "ops/keylist/keylist.h"

enum { SEQ = 37, BATCH = 2, CHANNELS = 6 };

/* Numbers of the device's type. */
struct reals {
    enum dtype type;
    double d[BATCH * SEQ * 2 * CHANNELS];
    float f[BATCH * SEQ * 2 * CHANNELS];
};
static void *data_of(struct reals *r) { return r->type == DT_F64 ? (void *)r->d : (void *)r->f; }
static void fill(struct reals *r, enum dtype type, uint64_t key)
{
    r->type = type;
    for (int i = 0; i < countof(r->d); i++) {
        r->d[i] = rng_normal(key, (uint64_t)i);
        r->f[i] = (float)r->d[i];
    }
}
static struct tensor part(struct reals *r, int64_t first, int64_t n, int64_t channels)
{
    struct tensor t = tensor_3d(data_of(r), r->type, BATCH, SEQ, channels);
    t.data = (char *)t.data + first * channels * (int64_t)dtype_bytes(r->type);
    t.dim[1] = n;
    return t;
}

static void check_steps(enum dev_kind kind, int64_t ratio, bool overlap, int64_t step)
{
    struct bench d;
    open_bench(&d, kind);
    static struct reals x, z, ape, past, whole, entry;
    int32_t pos[BATCH * SEQ], at[BATCH * SEQ], whole_at[BATCH * SEQ];
    enum dtype type = kind == DEV_REF ? DT_F64 : DT_F32;
    fill(&x, type, 1);
    fill(&z, type, 2);
    fill(&ape, type, 3);
    fill(&past, type, 4);
    fill(&whole, type, 5);
    fill(&entry, type, 6);
    for (int i = 0; i < BATCH * SEQ; i++)
        pos[i] = i % SEQ;
    int64_t width = overlap ? CHANNELS / 2 : CHANNELS, entries = SEQ / ratio, kept = (overlap ? 2 : 1) * ratio;
    struct compress_fwd_args a = {.x = part(&x, 0, SEQ, CHANNELS),
                                  .z = part(&z, 0, SEQ, CHANNELS),
                                  .ape = tensor_2d(data_of(&ape), type, ratio, CHANNELS),
                                  .pos = tensor_2d(pos, DT_I32, BATCH, SEQ),
                                  .y = tensor_3d(data_of(&whole), type, BATCH, entries, width),
                                  .at = tensor_2d(whole_at, DT_I32, BATCH, entries),
                                  .ratio = ratio,
                                  .overlap = overlap};
    assert_ok(d.ops->compress_fwd(&d.lane, &a), &d.e);
    for (int64_t start = 0, n; start < SEQ; start += n) {
        n = min_i64(step, SEQ - start);
        struct compress_step_args s = {.x = part(&x, start, n, CHANNELS),
                                       .z = part(&z, start, n, CHANNELS),
                                       .ape = a.ape,
                                       .start = tensor_1d(&start, DT_I64, 1),
                                       .past = tensor_3d(data_of(&past), type, BATCH, kept, 2 * CHANNELS),
                                       .y = tensor_3d(data_of(&entry), type, BATCH, ceil_div(n, ratio), width),
                                       .at = tensor_2d(at, DT_I32, BATCH, ceil_div(n, ratio)),
                                       .ratio = ratio,
                                       .overlap = overlap};
        s.pos = a.pos;
        s.pos.data = pos + start;
        s.pos.dim[1] = n;
        assert_ok(d.ops->compress_step(&d.lane, &s), &d.e);
        for (int64_t r = 0; r < BATCH * s.y.dim[1]; r++) {
            int64_t b = r / s.y.dim[1], j = start / ratio + r % s.y.dim[1];
            bool complete = j * ratio + ratio <= start + n;
            for (int64_t c = 0; c < width; c++)
                assert_true(tensor_get(&s.y, r * width + c) ==
                            (complete ? tensor_get(&a.y, (b * entries + j) * width + c) : 0));
            assert_int_equal(at[r], complete ? whole_at[b * entries + j] : 0);
        }
    }
    dev_close(&d.dev);
}

static void steps_of_any_length_give_the_same_entries(void **state)
{
    (void)state;
    static const int64_t steps[] = {1, 2, 3, 7, 16, SEQ};
    for (int kind = 0; kind < 2; kind++)
        for (int64_t ratio = 1; ratio <= 8; ratio++)
            for (int i = 0; i < countof(steps); i++)
                for (int overlap = 0; overlap < 2; overlap++)
                    check_steps(kind == 0 ? DEV_REF : DEV_CPU, ratio, overlap == 1, steps[i]);
}

/* Two windows of two tokens, gates that are equal: means. With overlap the second entry has the first window's other
 * half. */
static void equal_gates_give_means(void **state)
{
    (void)state;
    struct bench d;
    open_bench(&d, DEV_REF);
    double x[] = {1, 10, 3, 30, 5, 50, 7, 70}, z[8] = {0}, ape[4] = {0}, y[4];
    struct compress_fwd_args a = {.x = tensor_3d(x, DT_F64, 1, 4, 2),
                                  .z = tensor_3d(z, DT_F64, 1, 4, 2),
                                  .ape = tensor_2d(ape, DT_F64, 2, 2),
                                  .y = tensor_3d(y, DT_F64, 1, 2, 2),
                                  .ratio = 2};
    assert_ok(d.ops->compress_fwd(&d.lane, &a), &d.e);
    assert_true(y[0] == 2 && y[1] == 20 && y[2] == 6 && y[3] == 60);
    a.overlap = true;
    a.y = tensor_3d(y, DT_F64, 1, 2, 1);
    assert_ok(d.ops->compress_fwd(&d.lane, &a), &d.e);
    assert_true(y[0] == 20 && y[1] == (1 + 3 + 50 + 70) / 4.0);
    /* The last three tokens are a document: its window begins with it, and nothing is there before it. */
    int32_t doc[] = {0, 1, 1, 1};
    a.doc_start = tensor_2d(doc, DT_I32, 1, 4);
    assert_ok(d.ops->compress_fwd(&d.lane, &a), &d.e);
    assert_true(y[0] == 0 && y[1] == 40);
    dev_close(&d.dev);
}

static void wrong_calls_are_refused(void **state)
{
    (void)state;
    struct bench d;
    open_bench(&d, DEV_REF);
    double x[12] = {0}, y[12];
    struct compress_fwd_args a = {.x = tensor_3d(x, DT_F64, 1, 4, 3),
                                  .z = tensor_3d(x, DT_F64, 1, 4, 3),
                                  .ape = tensor_2d(x, DT_F64, 2, 3),
                                  .y = tensor_3d(y, DT_F64, 1, 2, 1),
                                  .ratio = 2,
                                  .overlap = true};
    assert_fails(d.ops->compress_fwd(&d.lane, &a), ST_INVALID, &d.e, "x has 3 channels, with overlap");
    int64_t start = -1;
    double past[16];
    struct compress_step_args s = {.x = tensor_3d(x, DT_F64, 1, 1, 2),
                                   .z = tensor_3d(x, DT_F64, 1, 1, 2),
                                   .ape = tensor_2d(x, DT_F64, 2, 2),
                                   .start = tensor_1d(&start, DT_I64, 1),
                                   .past = tensor_3d(past, DT_F64, 1, 2, 4),
                                   .y = tensor_3d(y, DT_F64, 1, 1, 2),
                                   .ratio = 2};
    assert_fails(d.ops->compress_step(&d.lane, &s), ST_INVALID, &d.e, "start is -1");
    int32_t idx[8], sel[2] = {0, 2};
    struct keylist_args k = {.sel = tensor_3d(sel, DT_I32, 1, 2, 1),
                             .idx = tensor_3d(idx, DT_I32, 1, 2, 3),
                             .batch = 1,
                             .seq = 2,
                             .window = 2,
                             .most = 1,
                             .base = 2,
                             .entries = 2,
                             .ratio = 1};
    assert_fails(d.ops->keylist(&d.lane, &k), ST_INVALID, &d.e, "sel[1, 0] is 2, there are 2 entries");
    sel[1] = 1;
    assert_ok(d.ops->keylist(&d.lane, &k), &d.e);
    static const int32_t want[] = {0, -1, 2, 0, 1, 3};
    assert_memory_equal(idx, want, sizeof want);
    k.base = 1;
    assert_fails(d.ops->keylist(&d.lane, &k), ST_INVALID, &d.e, "beyond the 1 tokens among the keys");
    dev_close(&d.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_of_any_length_give_the_same_entries),
        cmocka_unit_test(equal_gates_give_means),
        cmocka_unit_test(wrong_calls_are_refused),
    };
    return cmocka_run_group_tests_name("compress", tests, NULL, NULL);
}
