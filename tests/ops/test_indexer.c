/* What the op harness cannot say of the indexer and of attention over lists: ties, scores that are not numbers, errors,
 * and that a list of all keys is attention over all of them. */
#include "bench.h"
#include "ops/attention/attention.h"
#include "ops/indexer/indexer.h"
#include "ops/compress/compress.h"
#include "ops/sparse/sparse.h"
#include "ops/sparse/sparse_path.h"

#include <string.h>

enum { KEYS = 9, TOPK = 4 };

/* Scores of one query: key j scores score[j], by one head of one channel. */
static void select_keys(enum dev_kind kind, const double *score, int64_t ratio, int64_t at, int32_t idx[TOPK])
{
    struct bench d;
    open_bench(&d, kind);
    enum dtype real = d.ops->real;
    double q_d = 1, w_d = 1, k_d[KEYS];
    float q_f = 1, w_f = 1, k_f[KEYS];
    char work[4096];
    int64_t start = at;
    for (int j = 0; j < KEYS; j++) {
        k_d[j] = score[j];
        k_f[j] = (float)score[j];
    }
    bool ref = kind == DEV_REF;
    struct index_topk_args a = {.q = tensor_4d(ref ? (void *)&q_d : &q_f, real, 1, 1, 1, 1),
                                .k = tensor_3d(ref ? (void *)k_d : k_f, real, 1, KEYS, 1),
                                .w = tensor_3d(ref ? (void *)&w_d : &w_f, real, 1, 1, 1),
                                .start = tensor_1d(&start, DT_I64, 1),
                                .idx = tensor_3d(idx, DT_I32, 1, 1, TOPK),
                                .work = tensor_1d(work, DT_U8, sizeof work),
                                .topk = TOPK,
                                .ratio = ratio};
    assert_ok(d.ops->index_topk(&d.lane, &a), &d.e);
    dev_close(&d.dev);
}

static void assert_selected(const double *score, int64_t ratio, int64_t at, const int32_t want[TOPK])
{
    static const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};
    for (int k = 0; k < countof(kinds); k++) {
        int32_t idx[TOPK] = {7, 7, 7, 7};
        select_keys(kinds[k], score, ratio, at, idx);
        for (int i = 0; i < TOPK; i++)
            assert_int_equal(idx[i], want[i]);
    }
}

static void of_equal_scores_the_smaller_index_is_taken(void **state)
{
    (void)state;
    static const double equal[KEYS] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, some[KEYS] = {0, 2, 1, 2, 1, 3, 1, 2, 1},
                        zeros[KEYS] = {-0.0, 0.0, -0.0, 0.0, -1, 0.0, -0.0, 0.0, 0.0};
    assert_selected(equal, 1, KEYS - 1, (const int32_t[]){0, 1, 2, 3});
    assert_selected(some, 1, KEYS - 1, (const int32_t[]){1, 3, 5, 7});
    assert_selected(some, 1, 6, (const int32_t[]){1, 2, 3, 5});
    assert_selected(zeros, 1, KEYS - 1, (const int32_t[]){0, 1, 2, 3});
}

static void a_query_sees_no_later_key(void **state)
{
    (void)state;
    static const double rising[KEYS] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    assert_selected(rising, 1, 2, (const int32_t[]){0, 1, 2, -1});
    assert_selected(rising, 1, 5, (const int32_t[]){2, 3, 4, 5});
    assert_selected(rising, 4, 2, (const int32_t[]){-1, -1, -1, -1}); /* the first key is complete at position 3 */
    assert_selected(rising, 4, 11, (const int32_t[]){0, 1, 2, -1});
}

static void scores_that_are_not_numbers_come_last(void **state)
{
    (void)state;
    static const double some[KEYS] = {NAN, 1, NAN, -5, NAN, 2, NAN, NAN, NAN};
    assert_selected(some, 1, KEYS - 1, (const int32_t[]){0, 1, 3, 5});
    assert_selected((const double[KEYS]){NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN}, 1, KEYS - 1,
                    (const int32_t[]){0, 1, 2, 3});
}

enum { SEQ = 6, HEADS = 2, WIDTH = 5, VALUES = 3 };

/* Lists of all keys in ascending order: the reference's bits are those of dense attention. */
static void a_list_of_all_keys_is_dense_attention(void **state)
{
    (void)state;
    struct bench d;
    open_bench(&d, DEV_REF);
    double q[SEQ * HEADS * WIDTH], kv[SEQ * WIDTH], sparse[SEQ * HEADS * VALUES], dense[SEQ * HEADS * VALUES],
        lse[2][HEADS * SEQ];
    int32_t idx[SEQ * SEQ];
    for (int i = 0; i < countof(q); i++)
        q[i] = rng_normal(1, (uint64_t)i);
    for (int i = 0; i < countof(kv); i++)
        kv[i] = rng_normal(2, (uint64_t)i);
    for (int i = 0; i < SEQ * SEQ; i++)
        idx[i] = i % SEQ <= i / SEQ ? i % SEQ : -1;
    struct tensor k4 = tensor_4d(kv, DT_F64, 1, SEQ, 1, WIDTH);
    struct sparse_fwd_args s = {.q = tensor_4d(q, DT_F64, 1, SEQ, HEADS, WIDTH),
                                .kv = tensor_3d(kv, DT_F64, 1, SEQ, WIDTH),
                                .idx = tensor_3d(idx, DT_I32, 1, SEQ, SEQ),
                                .o = tensor_4d(sparse, DT_F64, 1, SEQ, HEADS, VALUES),
                                .lse = tensor_3d(lse[0], DT_F64, 1, HEADS, SEQ),
                                .scale = 0.4,
                                .dv = VALUES};
    struct attention_fwd_args a = {.q = s.q,
                                   .k = k4,
                                   .v = tensor_cols(&k4, 0, VALUES),
                                   .o = tensor_4d(dense, DT_F64, 1, SEQ, HEADS, VALUES),
                                   .lse = tensor_3d(lse[1], DT_F64, 1, HEADS, SEQ),
                                   .scale = 0.4};
    assert_ok(d.ops->sparse_fwd(&d.lane, &s), &d.e);
    assert_ok(d.ops->attention_fwd(&d.lane, &a), &d.e);
    assert_memory_equal(sparse, dense, sizeof dense);
    assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
    idx[3] = SEQ;
    assert_fails(d.ops->sparse_fwd(&d.lane, &s), ST_INVALID, &d.e, "idx[0, 3] is 6, there are 6 keys");
    dev_close(&d.dev);
}

static void wrong_shapes_are_refused(void **state)
{
    (void)state;
    struct bench d;
    open_bench(&d, DEV_REF);
    double x[64] = {0};
    int32_t idx[8] = {0};
    struct index_recall_args a = {.mq = tensor_4d(x, DT_F64, 1, 2, 3, 2),
                                  .mk = tensor_4d(x, DT_F64, 1, 2, 2, 2),
                                  .idx = tensor_3d(idx, DT_I32, 1, 2, 1),
                                  .recall = tensor_1d(x, DT_F64, 1),
                                  .ratio = 1,
                                  .every = 1};
    assert_fails(d.ops->index_recall(&d.lane, &a), ST_INVALID, &d.e, "3 query heads cannot share 2 key heads evenly");
    a.mk = tensor_4d(x, DT_F64, 1, 2, 1, 2);
    a.ratio = 0;
    assert_fails(d.ops->index_recall(&d.lane, &a), ST_INVALID, &d.e, "ratio is 0");
    dev_close(&d.dev);
}

/* What compress says of its entries and what queries see of them agree: an entry is seen from its window's last token
 * on, by its own document alone. */
static void a_query_sees_the_complete_windows_of_its_document(void **state)
{
    (void)state;
    enum { LONG = 41 };
    for (int64_t ratio = 1; ratio <= 7; ratio++)
        for (int64_t split = 0; split < LONG; split++) {
            int32_t doc[LONG];
            for (int64_t t = 0; t < LONG; t++)
                doc[t] = t < split ? 0 : t < split + 11 ? (int32_t)split : (int32_t)split + 11;
            for (int64_t t = 0; t < LONG; t++) {
                struct index_range seen = index_visible(t, doc[t], ratio, LONG / ratio);
                for (int64_t j = 0; j < LONG / ratio; j++) {
                    struct compress_window w = compress_window_of(doc, 0, j, ratio);
                    bool complete = w.first >= 0 && w.first + ratio - 1 <= t && doc[w.first] == doc[t];
                    assert_int_equal(j >= seen.first && j < seen.end, complete);
                    if (w.first >= 0)
                        assert_int_equal(w.before, w.first - ratio >= doc[w.first]);
                }
            }
        }
}

static void kernels_are_chosen_by_shape_and_device(void **state)
{
    (void)state;
    enum { BIG = 227 * 1024 };
    static const struct {
        struct sparse_shape shape;
        struct sparse_device gpu;
        enum sparse_path path;
        const char *why; /* NULL: no reason */
    } cases[] = {
        {{DT_BF16, 128, 576, 512, true}, {true, BIG}, SPARSE_PATH_HOPPER, NULL},
        {{DT_BF16, 64, 512, 512, true}, {true, BIG}, SPARSE_PATH_HOPPER, NULL},
        {{DT_BF16, 128, 576, 512, true}, {false, BIG}, SPARSE_PATH_CORES, "not a Hopper GPU"},
        {{DT_BF16, 129, 576, 512, true}, {true, BIG}, SPARSE_PATH_CORES, "up to 128 heads"},
        {{DT_BF16, 128, 160, 128, true}, {true, BIG}, SPARSE_PATH_CORES, "the same keys"},
        {{DT_BF16, 128, 576, 512, false}, {true, BIG}, SPARSE_PATH_PLAIN, "aligned to 16 bytes"},
        {{DT_BF16, 128, 576, 256, true}, {true, BIG}, SPARSE_PATH_PLAIN, "keys of 512 channels"},
        {{DT_F32, 128, 576, 512, true}, {true, BIG}, SPARSE_PATH_PLAIN, "take bf16"},
        {{DT_BF16, 128, 576, 512, true}, {false, 163 * 1024}, SPARSE_PATH_PLAIN, "shared memory"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct sparse_choice c = sparse_path_of(&cases[i].shape, &cases[i].gpu);
        assert_int_equal(c.path, cases[i].path);
        assert_true(cases[i].why == NULL ? c.why == NULL : c.why != NULL && strstr(c.why, cases[i].why) != NULL);
    }
    const struct sparse_device hopper = {true, BIG}, other = {false, BIG};
    struct index_shape s = {DT_BF16, 64, 128, true, false};
    assert_int_equal(index_path_of(&s, &hopper).path, SPARSE_PATH_HOPPER);
    assert_int_equal(index_path_of(&s, &other).path, SPARSE_PATH_CORES);
    s.lists = true;
    assert_int_equal(index_path_of(&s, &hopper).path, SPARSE_PATH_CORES);
    s.heads = 65;
    assert_int_equal(index_path_of(&s, &hopper).path, SPARSE_PATH_PLAIN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_query_sees_the_complete_windows_of_its_document),
        cmocka_unit_test(of_equal_scores_the_smaller_index_is_taken),
        cmocka_unit_test(a_query_sees_no_later_key),
        cmocka_unit_test(scores_that_are_not_numbers_come_last),
        cmocka_unit_test(a_list_of_all_keys_is_dense_attention),
        cmocka_unit_test(wrong_shapes_are_refused),
        cmocka_unit_test(kernels_are_chosen_by_shape_and_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
