/* data/: shuffles, sample layouts, splits and blends, against NumPy and against hand counts. */
#include "support.h"

#include "data/data_int.h"
#include "golden_shuffle.h"

/* A Megatron source in memory: token k of the whole .bin is id k (16 bits). */
struct memory_source {
    struct source src;
    uint8_t *idx;
    uint16_t *bin;
};

static void put(uint8_t **at, const void *value, size_t n)
{
    memcpy(*at, value, n);
    *at += n;
}

static void memory_source_open(struct memory_source *m, const int32_t *lengths, int n)
{
    static char name[] = "memory";
    struct err e = {0};
    uint64_t version = 1, seqs = (uint64_t)n, entries = (uint64_t)n + 1;
    uint8_t code = 8;
    size_t size = 34 + 12 * (size_t)n + 8 * (size_t)entries, total = 0;
    uint8_t *at = m->idx = malloc(size);
    put(&at, "MMIDIDX\0", 9);
    put(&at, &version, 8);
    put(&at, &code, 1);
    put(&at, &seqs, 8);
    put(&at, &entries, 8);
    put(&at, lengths, 4 * (size_t)n);
    for (int i = 0; i < n; i++) {
        int64_t offset = (int64_t)total * 2;
        put(&at, &offset, 8);
        total += (size_t)lengths[i];
    }
    for (int64_t i = 0; i <= n; i++)
        put(&at, &i, 8);
    m->bin = malloc(total * 2 + 1);
    for (size_t i = 0; i < total; i++)
        m->bin[i] = (uint16_t)i;
    m->src = (struct source){
        .path = name, .idx = {.data = m->idx, .size = size}, .bin = {.data = (uint8_t *)m->bin, .size = total * 2}};
    assert_ok(source_check_idx(&m->src, &e), &e);
    assert_int_equal(m->src.n_tokens, total);
}

static void memory_source_close(struct memory_source *m)
{
    free(m->src.lengths);
    free(m->idx);
    free(m->bin);
}

static void shuffles_equal_numpy(void **state)
{
    (void)state;
    for (int k = 0; k < countof(golden_shuffles); k++) {
        const struct golden_shuffle *g = &golden_shuffles[k];
        uint32_t *a = malloc((size_t)g->n * sizeof *a);
        for (int64_t i = 0; i < g->n; i++)
            a[i] = (uint32_t)i;
        struct mt19937 rng;
        mt_seed(&rng, g->seed);
        mt_shuffle(&rng, a, g->n);
        assert_memory_equal(a, g->want, (size_t)g->n * sizeof *a);
        free(a);
    }
    /* The permutations the specification names, typed from there. */
    static const uint32_t known[10] = {7, 2, 9, 1, 0, 8, 4, 5, 6, 3};
    assert_memory_equal(golden_shuffles[2].want, known, sizeof known);
    struct mt19937 rng;
    mt_seed(&rng, 5489); /* MT19937's published 10000th output for its default seed */
    for (int i = 0; i < 9999; i++)
        mt_next(&rng);
    assert_int_equal(mt_next(&rng), 4123659995u);
}

static void layouts_equal_the_literal_rules(void **state)
{
    (void)state;
    for (int k = 0; k < countof(golden_layouts); k++) {
        const struct golden_layout *g = &golden_layouts[k];
        struct err e = {0};
        struct memory_source m;
        struct part all;
        struct samples s;
        memory_source_open(&m, g->lengths, g->docs);
        assert_ok(part_make(&all, &m.src, NULL, DATA_TRAIN, &e), &e);
        assert_ok(samples_open(&s, &m.src, &all, g->seq, g->wanted, g->seed, &e), &e);
        assert_int_equal(s.epochs, g->epochs);
        assert_int_equal(s.separate_last, g->separate);
        assert_int_equal(s.n, g->n);
        assert_true(s.n >= g->wanted);
        assert_memory_equal(s.order, g->order, (size_t)s.n_order * sizeof *s.order);
        assert_memory_equal(s.shuffle, g->shuffle, (size_t)s.n * sizeof *s.shuffle);
        for (int64_t j = 0; j < s.n; j++) {
            struct sample_start at = samples_start(&s, j);
            if (at.doc != g->starts[2 * j] || at.offset != g->starts[2 * j + 1])
                fail_msg("layout %s, sample %d", g->name, (int)j);
        }
        samples_close(&s);
        memory_source_close(&m);
    }
}

/* Documents of 3, 5 and 4 tokens in the order the seed gives, cut into samples of 4 by hand. */
static void a_small_layout_follows_by_hand(void **state)
{
    (void)state;
    static const int32_t lengths[] = {3, 5, 4};
    static const int32_t first_id[] = {0, 3, 8};
    struct err e = {0};
    struct memory_source m;
    struct part all;
    struct samples s;
    memory_source_open(&m, lengths, 3);
    assert_ok(part_make(&all, &m.src, NULL, DATA_TRAIN, &e), &e);
    assert_ok(samples_open(&s, &m.src, &all, 4, 0, 1, &e), &e);
    assert_int_equal(s.n, 2); /* (12 - 1) / 4 */
    int32_t stream[12], tokens[5];
    int at = 0;
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < lengths[s.order[d]]; i++)
            stream[at++] = first_id[s.order[d]] + i;
    for (int i = 0; i < 2; i++) {
        assert_ok(samples_get(&s, i, 100, tokens, NULL, &e), &e);
        assert_memory_equal(tokens, stream + 4 * s.shuffle[i], sizeof tokens);
    }
    samples_close(&s);
    memory_source_close(&m);
}

static void consecutive_samples_share_one_token(void **state)
{
    (void)state;
    static const int32_t lengths[] = {2, 1, 3, 1, 1, 2, 40, 1, 1, 3, 2, 2, 17};
    struct err e = {0};
    struct memory_source m;
    struct part all;
    struct samples s;
    memory_source_open(&m, lengths, countof(lengths));
    assert_ok(part_make(&all, &m.src, NULL, DATA_TRAIN, &e), &e);
    assert_ok(samples_open(&s, &m.src, &all, 3, 60, 4, &e), &e);
    assert_true(s.epochs > 2);
    for (int64_t i = 0; i < s.n; i++)
        s.shuffle[i] = (uint32_t)i;
    int32_t before[4], now[4];
    assert_ok(samples_get(&s, 0, 100, before, NULL, &e), &e);
    for (int64_t i = 1; i < s.n; i++) {
        assert_ok(samples_get(&s, i, 100, now, NULL, &e), &e);
        assert_int_equal(before[3], now[0]);
        memcpy(before, now, sizeof now);
    }
    samples_close(&s);
    memory_source_close(&m);
}

static void too_short_data_is_refused(void **state)
{
    (void)state;
    static const int32_t lengths[] = {3, 2};
    struct err e = {0};
    struct memory_source m;
    struct part all;
    struct samples s;
    memory_source_open(&m, lengths, 2);
    assert_ok(part_make(&all, &m.src, NULL, DATA_TRAIN, &e), &e);
    assert_fails(samples_open(&s, &m.src, &all, 5, 0, 1, &e), ST_INVALID, &e, "needs 6");
    assert_ok(samples_open(&s, &m.src, &all, 4, 0, 1, &e), &e);
    assert_int_equal(s.n, 1);
    samples_close(&s);
    assert_fails(samples_open(&s, &m.src, &all, 4, INT64_MAX / 2, 1, &e), ST_INVALID, &e, "counted");
    assert_fails(samples_open(&s, &m.src, &all, 4, 1ll << 40, 1, &e), ST_UNSUPPORTED, &e, "2^32-1");
    memory_source_close(&m);
}

static void splits_parse_and_round_as_python(void **state)
{
    (void)state;
    struct err e = {0};
    double f[3];
    int64_t from, to;
    assert_ok(split_parse("99, 1,0", f, &e), &e);
    split_range(f, 0, 1000, &from, &to);
    assert_true(from == 0 && to == 990);
    split_range(f, 1, 1000, &from, &to);
    assert_true(from == 990 && to == 1000);
    split_range(f, 2, 1000, &from, &to);
    assert_true(from == 1000 && to == 1000);
    assert_ok(split_parse("50,50", f, &e), &e);
    split_range(f, 0, 5, &from, &to); /* 2.5 rounds to the even 2 */
    assert_int_equal(to, 2);
    split_range(f, 1, 5, &from, &to);
    assert_true(from == 2 && to == 5);
    split_range(f, 0, 7, &from, &to); /* 3.5 to 4 */
    assert_int_equal(to, 4);
    split_range(f, 1, 7, &from, &to);
    assert_true(from == 4 && to == 7);
    static const char *const bad[] = {"", "a", "1,,1", "1,2,3,4", "0,0,0", "-1,2", "1,", "1e400", "nan"};
    for (int i = 0; i < countof(bad); i++)
        assert_fails(split_parse(bad[i], f, &e), ST_INVALID, &e, "split");
}

static void parts_do_not_overlap_and_cover_everything(void **state)
{
    (void)state;
    static const int32_t many[] = {4, 4, 4, 4, 4, 4, 4, 4, 4, 4}, one[] = {100}, few[] = {30, 0, 70};
    static const struct {
        const int32_t *lengths;
        int n;
        const char *split;
        int64_t tokens[3];
    } cases[] = {
        {many, 10, "80,10,10", {32, 4, 4}},
        {one, 1, "90,10", {90, 10, 0}},
        {few, 3, "50,30,20", {50, 30, 20}}, /* by sequences 2, 0, 1: one would be empty */
        {few, 3, "33,0,67", {30, 0, 70}},   /* by sequences 1, 0, 2 */
    };
    for (int c = 0; c < countof(cases); c++) {
        struct err e = {0};
        struct memory_source m;
        memory_source_open(&m, cases[c].lengths, cases[c].n);
        uint8_t seen[128] = {0};
        for (int w = 0; w < 3; w++) {
            struct part p;
            if (cases[c].tokens[w] == 0) {
                assert_fails(part_make(&p, &m.src, cases[c].split, (enum data_part)w, &e), ST_INVALID, &e,
                             "leaves nothing");
                continue;
            }
            assert_ok(part_make(&p, &m.src, cases[c].split, (enum data_part)w, &e), &e);
            assert_int_equal(p.tokens, cases[c].tokens[w]);
            for (int64_t d = 0; d < p.n; d++) {
                int32_t ids[128];
                int64_t len = part_doc_len(&p, &m.src, d);
                assert_ok(source_read(&m.src, p.first + d, d == 0 ? p.head : 0, len, 1000, ids, &e), &e);
                for (int64_t i = 0; i < len; i++)
                    assert_int_equal(seen[ids[i]]++, 0);
            }
        }
        for (int64_t i = 0; i < m.src.n_tokens; i++)
            assert_int_equal(seen[i], 1);
        memory_source_close(&m);
    }
}

static void blends_equal_the_literal_rules(void **state)
{
    (void)state;
    struct err e = {0};
    for (int k = 0; k < countof(golden_blends); k++) {
        const struct golden_blend *g = &golden_blends[k];
        uint16_t which[64];
        uint32_t sample[64];
        assert_ok(blend_fill(g->weights, g->counts, g->k, which, sample, g->n, &e), &e);
        for (int64_t i = 0; i < g->n; i++) {
            assert_int_equal(which[i], g->want[2 * i]);
            assert_int_equal(sample[i], g->want[2 * i + 1]);
        }
    }
    assert_int_equal(blend_need(100, 0.7), 71);       /* ceil(70 * 1.005) */
    assert_int_equal(blend_need(1000, 1.0 / 3), 336); /* ceil(334 * 1.005 = 335.67) */
    static const double half[] = {0.5, 0.5};
    static const int64_t counts[] = {1, 1};
    uint16_t which[3];
    uint32_t sample[3];
    assert_fails(blend_fill(half, counts, 2, which, sample, 3, &e), ST_INTERNAL, &e, "ran out");
}

static void blend_strings_parse(void **state)
{
    (void)state;
    struct err e = {0};
    struct blend_spec b;
    assert_ok(blend_parse(&b, " 3 a/b  1 'c d' ", &e), &e);
    assert_int_equal(b.n, 2);
    assert_string_equal(b.paths[0], "a/b");
    assert_string_equal(b.paths[1], "c d");
    assert_true(b.weights[0] == 0.75 && b.weights[1] == 0.25);
    blend_spec_release(&b);
    assert_ok(blend_parse(&b, "x y \"z\"", &e), &e);
    assert_true(b.n == 3 && b.weights == NULL);
    blend_spec_release(&b);
    assert_ok(blend_parse(&b, "7", &e), &e); /* one word is a path, even this one */
    assert_true(b.n == 1 && b.weights == NULL);
    blend_spec_release(&b);
    assert_fails(blend_parse(&b, "  ", &e), ST_INVALID, &e, "no data path");
    assert_fails(blend_parse(&b, "1 a 2", &e), ST_INVALID, &e, "pairs");
    assert_fails(blend_parse(&b, "1 a b c", &e), ST_INVALID, &e, "not a weight");
    assert_fails(blend_parse(&b, "1 a 0 c", &e), ST_INVALID, &e, "not a weight");
    assert_fails(blend_parse(&b, "1 a -2 c", &e), ST_INVALID, &e, "not a weight");
    assert_fails(blend_parse(&b, "1 'a", &e), ST_INVALID, &e, "not closed");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shuffles_equal_numpy),
        cmocka_unit_test(layouts_equal_the_literal_rules),
        cmocka_unit_test(a_small_layout_follows_by_hand),
        cmocka_unit_test(consecutive_samples_share_one_token),
        cmocka_unit_test(too_short_data_is_refused),
        cmocka_unit_test(splits_parse_and_round_as_python),
        cmocka_unit_test(parts_do_not_overlap_and_cover_everything),
        cmocka_unit_test(blends_equal_the_literal_rules),
        cmocka_unit_test(blend_strings_parse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
