/* epplan with moeplan: where tokens go when experts live on several ranks. Every token is in the buffer of each rank
 * that has experts of it exactly once, with exactly those choices; buffers that are too small say so. */
#include "bench.h"
#include "ops/epplan/epplan.h"
#include "ops/moeplan/moeplan.h"

enum { T = 41, K = 4, P = 3, L = 5, E = P * L, MOST = P, PER = K, BIG = T };

struct maps {
    int32_t idx[T * K], dest[T * MOST], offset[P + 1], order[T * MOST], back[T * MOST];
    int32_t to[T * MOST], from[P * BIG], rows[P], sent[P * BIG * PER], src[P * BIG * PER], row[T * K];
    double need;
};

/* Distinct experts for each token; every ninth choice is dropped. */
static void route(struct maps *m)
{
    for (int t = 0; t < T; t++) {
        int first = (int)rng_below(11, (uint64_t)t, E), step = 1 + (int)rng_below(12, (uint64_t)t, 3);
        for (int j = 0; j < K; j++)
            m->idx[t * K + j] = (t * K + j) % 9 == 4 ? -1 : (first + j * step) % E;
    }
}

static void plan(struct bench *b, struct maps *m, int64_t cap, bool whole)
{
    struct tensor idx = tensor_2d(m->idx, DT_I32, T, K), dest = tensor_2d(m->dest, DT_I32, T, MOST),
                  order = tensor_2d(m->order, DT_I32, T, MOST), back = tensor_1d(m->back, DT_I32, T * MOST),
                  offset = tensor_1d(m->offset, DT_I32, P + 1), to = tensor_2d(m->to, DT_I32, T, MOST),
                  from = tensor_1d(m->from, DT_I32, P * cap);
    assert_ok(
        b->ops->epdest(&b->lane, &(struct epdest_args){.idx = idx, .dest = dest, .most = MOST, .ranks = P, .local = L}),
        &b->e);
    assert_ok(
        b->ops->moeplan(&b->lane, &(struct moeplan_args){.idx = dest, .offset = offset, .row = order, .src = back}),
        &b->e);
    assert_ok(b->ops->epsend(&b->lane, &(struct epsend_args){.offset = offset,
                                                             .row = order,
                                                             .src = back,
                                                             .to = to,
                                                             .from = from,
                                                             .rows = tensor_1d(m->rows, DT_I32, P),
                                                             .need = tensor_1d(&m->need, DT_F64, 1)}),
              &b->e);
    assert_ok(b->ops->epchoices(&b->lane, &(struct epchoices_args){.idx = idx,
                                                                   .to = to,
                                                                   .from = from,
                                                                   .sent = tensor_2d(m->sent, DT_I32, P * cap, PER),
                                                                   .src = tensor_1d(m->src, DT_I32, P * cap * PER),
                                                                   .row = tensor_2d(m->row, DT_I32, T, K),
                                                                   .per = PER,
                                                                   .ranks = P,
                                                                   .local = L,
                                                                   .whole = whole}),
              &b->e);
}

static int choices_on(const struct maps *m, int t, int rank)
{
    int n = 0;
    for (int j = 0; j < K; j++)
        n += m->idx[t * K + j] >= 0 && m->idx[t * K + j] / L == rank;
    return n;
}

static void a_token_is_once_in_the_buffer_of_each_of_its_ranks(void **state)
{
    struct bench *b = *state;
    for (int whole = 0; whole < 2; whole++) {
        struct maps m;
        int seen[T][P] = {{0}}, most = 0;
        route(&m);
        plan(b, &m, BIG, whole);
        for (int at = 0; at < P * BIG; at++) {
            int rank = at / BIG, t = m.from[at] / MOST, n = 0, last = -1;
            assert_int_equal(m.from[at] >= 0, at % BIG < m.rows[rank]);
            for (int c = 0; c < PER; c++) {
                int choice = m.src[at * PER + c];
                assert_int_equal(choice >= 0, m.sent[at * PER + c] >= 0);
                if (choice < 0)
                    continue;
                assert_int_equal(choice / K, t);
                assert_true(choice > last); /* in order of k */
                assert_int_equal(m.row[choice], at * PER + c);
                assert_int_equal(m.sent[at * PER + c] + (whole ? 0 : rank * L), m.idx[choice]);
                last = choice;
                n++;
            }
            if (m.from[at] < 0) {
                assert_int_equal(n, 0);
                continue;
            }
            assert_int_equal(m.to[m.from[at]], at);
            assert_int_equal(n, choices_on(&m, t, rank));
            seen[t][rank]++;
        }
        for (int t = 0; t < T; t++)
            for (int r = 0; r < P; r++)
                assert_int_equal(seen[t][r], choices_on(&m, t, r) > 0);
        for (int r = 0; r < P; r++)
            most = m.rows[r] > most ? m.rows[r] : most;
        assert_int_equal((int)m.need, most);
    }
}

static void tokens_beyond_a_buffer_are_left_out_and_reported(void **state)
{
    struct bench *b = *state;
    struct maps all, few;
    enum { CAP = 7 };
    route(&all);
    route(&few);
    plan(b, &all, BIG, false);
    plan(b, &few, CAP, false);
    assert_true(few.need == all.need && few.need > CAP);
    for (int r = 0; r < P; r++) {
        assert_int_equal(few.rows[r], CAP);
        assert_memory_equal(few.from + r * CAP, all.from + r * BIG, CAP * sizeof(int32_t));
    }
    for (int i = 0; i < T * K; i++) { /* a choice is sent with its token, or not at all */
        int at = all.row[i] < 0 ? -1 : all.row[i] / PER % BIG;
        assert_int_equal(few.row[i] >= 0, at >= 0 && at < CAP);
    }
}

/* The receiver's rows: those beyond its room are left out, and what was wanted is reported. */
static void moeplan_leaves_out_rows_beyond_its_room(void **state)
{
    struct bench *b = *state;
    struct maps m;
    enum { CUT = T * K - 50 };
    int32_t offset[2][E + 1], row[2][T * K], src[2][T * K];
    double need[2] = {1000, 0};
    route(&m);
    for (int i = 0; i < 2; i++) {
        int64_t cut = i == 1 ? CUT : 0;
        assert_ok(b->ops->moeplan(&b->lane, &(struct moeplan_args){.idx = tensor_2d(m.idx, DT_I32, T, K),
                                                                   .offset = tensor_1d(offset[i], DT_I32, E + 1),
                                                                   .row = tensor_2d(row[i], DT_I32, T, K),
                                                                   .src = tensor_1d(src[i], DT_I32, T * K - cut),
                                                                   .need = tensor_1d(&need[i], DT_F64, 1),
                                                                   .acc_need = i == 0,
                                                                   .cut = cut}),
                  &b->e);
    }
    assert_true(need[0] == 1000);
    assert_true(need[1] == offset[0][E] && need[1] > 50);
    assert_memory_equal(src[0], src[1], 50 * sizeof(int32_t));
    for (int x = 0; x <= E; x++)
        assert_int_equal(offset[1][x], offset[0][x] < 50 ? offset[0][x] : 50);
    for (int i = 0; i < T * K; i++)
        assert_int_equal(row[1][i], row[0][i] < 50 ? row[0][i] : -1);
    struct moeplan_args a = {.idx = tensor_2d(m.idx, DT_I32, T, K),
                             .offset = tensor_1d(offset[0], DT_I32, E + 1),
                             .row = tensor_2d(row[0], DT_I32, T, K),
                             .src = tensor_1d(src[0], DT_I32, T * K - 1),
                             .cut = 1};
    assert_fails(b->ops->moeplan(&b->lane, &a), ST_INVALID, &b->e, "without need");
}

static void wrong_experts_and_maps_are_refused(void **state)
{
    struct bench *b = *state;
    struct maps m;
    route(&m);
    m.idx[3] = E;
    struct epdest_args d = {.idx = tensor_2d(m.idx, DT_I32, T, K),
                            .dest = tensor_2d(m.dest, DT_I32, T, MOST),
                            .most = MOST,
                            .ranks = P,
                            .local = L};
    assert_fails(b->ops->epdest(&b->lane, &d), ST_INVALID, &b->e, "choice 3 is expert 15 of 15");
    d.ranks = 0;
    assert_fails(b->ops->epdest(&b->lane, &d), ST_INVALID, &b->e, "0 ranks");
    m.idx[3] = -1;
    plan(b, &m, BIG, false);
    m.to[5] = P * BIG;
    struct epchoices_args c = {.idx = tensor_2d(m.idx, DT_I32, T, K),
                               .to = tensor_2d(m.to, DT_I32, T, MOST),
                               .from = tensor_1d(m.from, DT_I32, P * BIG),
                               .sent = tensor_2d(m.sent, DT_I32, P * BIG, PER),
                               .src = tensor_1d(m.src, DT_I32, P * BIG * PER),
                               .row = tensor_2d(m.row, DT_I32, T, K),
                               .per = PER,
                               .ranks = P,
                               .local = L};
    assert_fails(b->ops->epchoices(&b->lane, &c), ST_INVALID, &b->e, "to[5]");
    m.to[5] = -1;
    m.from[2] = T * MOST;
    assert_fails(b->ops->epchoices(&b->lane, &c), ST_INVALID, &b->e, "from[2]");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_token_is_once_in_the_buffer_of_each_of_its_ranks),
        TEST(tokens_beyond_a_buffer_are_left_out_and_reported),
        TEST(moeplan_leaves_out_rows_beyond_its_room),
        TEST(wrong_experts_and_maps_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
