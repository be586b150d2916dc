/* plan/: tables of pipelines. Warm-up counts, orders, makespans and peaks are those published for 1F1B and
 * interleaved 1F1B, with and without the extra warm-up unit that overlapped expert communication needs. */
#include "plan/simulate.h"
#include "support.h"

/* "F0.1 (F1.1|B0.1) ..." : Fm.c, Bm.c */
static char *units_text(const struct schedule_opts *o)
{
    struct schedule_units s = {0};
    struct err e = {0};
    struct buf out;
    assert_ok(schedule_units(o, &s, &e), &e);
    buf_init(&out, 0);
    for (int i = 0; i < s.n; i++) {
        const struct schedule_unit *u = &s.u[i];
        bool second = i > 0 && s.u[i - 1].paired;
        buf_addf(&out, "%s%c%d.%d%s",
                 second      ? "|"
                 : u->paired ? "("
                             : "",
                 u->backward ? 'B' : 'F', u->mb, u->chunk,
                 u->paired ? ""
                 : second  ? ")"
                           : " ");
        if (u->paired) {
            assert_false(u->backward);
            assert_true(i + 1 < s.n && s.u[i + 1].backward);
        }
    }
    schedule_units_release(&s);
    return out.text;
}

static void assert_units(const struct schedule_opts *o, const char *want)
{
    char *got = units_text(o);
    assert_string_equal(got, want);
    free(got);
}

static void warm_up_counts_are_those_of_the_tables(void **state)
{
    (void)state;
    static const struct {
        int pp, vpp, group, n_mb, plain[4], overlap[4];
    } rows[] = {
        {2, 2, 2, 4, {4, 2}, {5, 3}},
        {4, 2, 4, 8, {10, 8, 6, 4}, {11, 9, 7, 5}},
        {4, 4, 4, 8, {18, 16, 14, 12}, {19, 17, 15, 13}},
    };
    for (int k = 0; k < countof(rows); k++)
        for (int r = 0; r < rows[k].pp; r++) {
            struct schedule_opts o = {
                .pp = rows[k].pp, .vpp = rows[k].vpp, .pp_rank = r, .n_mb = rows[k].n_mb, .group = rows[k].group};
            assert_int_equal(schedule_warmup(&o), rows[k].plain[r]);
            o.overlap = OVERLAP_EP;
            assert_int_equal(schedule_warmup(&o), rows[k].overlap[r]);
            o.overlap = OVERLAP_TP;
            assert_int_equal(schedule_warmup(&o), rows[k].overlap[r]);
            o.overlap = OVERLAP_DW;
            assert_int_equal(schedule_warmup(&o), rows[k].plain[r]);
        }
    for (int r = 0; r < 4; r++) { /* one chunk: stages after this one, at most all microbatches */
        assert_int_equal(schedule_warmup(&(struct schedule_opts){.pp = 4, .pp_rank = r, .n_mb = 8}), 3 - r);
        assert_int_equal(schedule_warmup(&(struct schedule_opts){.pp = 4, .pp_rank = r, .n_mb = 2}),
                         3 - r < 2 ? 3 - r : 2);
        assert_int_equal(
            schedule_warmup(&(struct schedule_opts){.pp = 4, .pp_rank = r, .n_mb = 5, .forward_only = true}), 5);
    }
}

static void orders_are_those_of_the_tables(void **state)
{
    (void)state;
    struct schedule_opts o = {.pp = 2, .vpp = 2, .group = 2, .n_mb = 4, .overlap = OVERLAP_EP};
    assert_units(&o, "F0.0 F1.0 F0.1 F1.1 F2.0 (F3.0|B0.1)(F2.1|B1.1)(F3.1|B0.0)B1.0 B2.1 B3.1 B2.0 B3.0 ");
    o.pp_rank = 1;
    assert_units(&o, "F0.0 F1.0 F0.1 (F1.1|B0.1)(F2.0|B1.1)(F3.0|B0.0)(F2.1|B1.0)(F3.1|B2.1)B3.1 B2.0 B3.0 ");
    o.overlap = OVERLAP_NONE;
    assert_units(&o, "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0 ");
    /* the last group may be shorter */
    o = (struct schedule_opts){.pp = 2, .vpp = 2, .group = 3, .n_mb = 5, .forward_only = true};
    assert_units(&o, "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 F3.1 F4.1 ");
    o = (struct schedule_opts){.pp = 3, .pp_rank = 1, .n_mb = 4};
    assert_units(&o, "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0 ");
    /* no pipeline: one after the other, or forward i against backward i - 1 */
    o = (struct schedule_opts){.pp = 1, .n_mb = 3};
    assert_units(&o, "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 ");
    o.overlap = OVERLAP_EP;
    assert_units(&o, "F0.0 (F1.0|B0.0)(F2.0|B1.0)B2.0 ");
    o.n_mb = 1;
    assert_units(&o, "F0.0 B0.0 ");
    o = (struct schedule_opts){.pp = 1, .vpp = 2, .n_mb = 2};
    assert_units(&o, "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0 ");
    o.overlap = OVERLAP_EP;
    assert_units(&o, "F0.0 F0.1 (F1.0|B0.1)(F1.1|B0.0)B1.1 B1.0 ");
}

/* Every forward once, every backward once and after its forward, no pair of one microbatch and chunk. */
static void check_table(const struct schedule_opts *o)
{
    struct schedule_units s = {0};
    struct err e = {0};
    assert_ok(schedule_units(o, &s, &e), &e);
    assert_int_equal(s.n, 2 * o->n_mb * o->vpp);
    bool done[2][8][64] = {{{false}}};
    int open = 0, last_mb[2][8];
    memset(last_mb, 0xFF, sizeof last_mb);
    for (int i = 0; i < s.n; i++) {
        const struct schedule_unit *u = &s.u[i];
        assert_true(u->chunk >= 0 && u->chunk < o->vpp && u->mb >= 0 && u->mb < o->n_mb);
        assert_false(done[u->backward][u->chunk][u->mb]);
        done[u->backward][u->chunk][u->mb] = true;
        if (u->backward)
            assert_true(done[0][u->chunk][u->mb]);
        if (u->paired)
            assert_true(u->mb != s.u[i + 1].mb || u->chunk < s.u[i + 1].chunk);
        /* gradients of a chunk are added in the order of microbatches, as without a pipeline */
        assert_int_equal(u->mb, last_mb[u->backward][u->chunk] + 1);
        last_mb[u->backward][u->chunk] = u->mb;
        open += u->backward ? -1 : 1;
        assert_true(open >= 0);
    }
    assert_int_equal(open, 0);
    schedule_units_release(&s);
}

static void every_table_is_complete(void **state)
{
    (void)state;
    static const int pipes[][2] = {{1, 1}, {2, 2}, {2, 4}, {4, 4}, {4, 5}, {8, 9}, {8, 11}, {2, 3}, {4, 6}};
    static const int chunks[] = {1, 2, 4, 8}, micros[] = {8, 32};
    int tables = 0, refused = 0;
    for (int k = 0; k < countof(pipes); k++)
        for (int v = 0; v < countof(chunks); v++)
            for (int m = 0; m < countof(micros); m++)
                for (int overlap = OVERLAP_NONE; overlap <= OVERLAP_TP; overlap++)
                    for (int r = 0; r < pipes[k][0]; r++) {
                        struct schedule_opts o = {.pp = pipes[k][0],
                                                  .vpp = chunks[v],
                                                  .pp_rank = r,
                                                  .n_mb = micros[m],
                                                  .group = pipes[k][1],
                                                  .overlap = (enum overlap_kind)overlap};
                        bool group_fits =
                            o.vpp == 1 || (o.group <= o.n_mb && (o.n_mb % o.group == 0 || o.n_mb % o.group >= o.pp));
                        if (group_fits && !(o.pp > 1 && o.vpp == 1 && overlap_pairs(o.overlap))) {
                            check_table(&o);
                            tables++;
                        } else {
                            struct schedule_units s = {0};
                            struct err e = {0};
                            assert_int_equal(schedule_units(&o, &s, &e), ST_USAGE);
                            assert_int_equal(s.n, 0);
                            schedule_units_release(&s);
                            refused++;
                        }
                    }
    print_message("           %d tables, %d refused\n", tables, refused);
    assert_true(tables > 400 && refused > 50);
}

static void numbers_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    static const struct {
        struct schedule_opts o;
        const char *text;
    } cases[] = {
        {{.pp = 4, .vpp = 2, .group = 4, .n_mb = 7}, "leave a last group of 3, fewer than the 4 stages"},
        {{.pp = 4, .vpp = 2, .group = 3, .n_mb = 8},
         "parallel.pp_group=3 must lie between parallel.pp=4 and the 8 microbatches"},
        {{.pp = 4, .vpp = 2, .n_mb = 2}, "and the 2 microbatches"},
        {{.pp = 2, .vpp = 2, .group = 5, .n_mb = 4}, "parallel.pp_group=5"},
        {{.pp = 4, .vpp = 1, .n_mb = 8, .overlap = OVERLAP_EP},
         "parallel.overlap=ep with parallel.pp=4 needs parallel.vpp of at least 2"},
        {{.pp = 4, .vpp = 1, .n_mb = 8, .overlap = OVERLAP_TP},
         "parallel.overlap=tp with parallel.pp=4 needs parallel.vpp of at least 2"},
        {{.pp = 4, .vpp = 1, .n_mb = 8, .overlap = OVERLAP_EP}, "backward of the same microbatch"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct schedule_units s = {0};
        struct err e = {0};
        assert_fails(schedule_units(&cases[i].o, &s, &e), ST_USAGE, &e, cases[i].text);
    }
}

/* ---- time ------------------------------------------------------------------------------------ */

static void simulate(struct sim *s, struct schedule_opts o, double forward, double backward)
{
    struct err e = {0};
    assert_ok(sim_open(s, o.pp, &e), &e);
    for (o.pp_rank = 0; o.pp_rank < o.pp; o.pp_rank++) {
        struct schedule_units u = {0};
        assert_ok(schedule_units(&o, &u, &e), &e);
        assert_ok(sim_add_units(s, &o, &u, forward, backward, &e), &e);
        schedule_units_release(&u);
    }
    assert_ok(sim_run(s, &e), &e);
}

/* Without the extra warm-up unit the last stage's first pair would be forward and backward of one microbatch. */
static void the_extra_unit_keeps_pairs_independent(void **state)
{
    (void)state;
    for (int overlap = 0; overlap < 2; overlap++) {
        struct schedule_opts o = {
            .pp = 2, .vpp = 2, .pp_rank = 1, .n_mb = 4, .overlap = overlap ? OVERLAP_EP : OVERLAP_NONE};
        struct schedule_units u = {0};
        struct err e = {0};
        assert_ok(schedule_units(&o, &u, &e), &e);
        const struct schedule_unit *first = &u.u[schedule_warmup(&o)];
        assert_true(!first->backward && first[1].backward);
        assert_int_equal(first->mb == first[1].mb && first->chunk == first[1].chunk, !overlap);
        schedule_units_release(&u);
    }
}

static void makespans_and_peaks_are_those_published(void **state)
{
    (void)state;
    static const struct {
        int pp, vpp, n_mb, makespan, peak[4];
    } rows[] = {
        {2, 2, 4, 27, {5, 3}},
        {4, 2, 8, 57, {11, 9, 7, 5}},
        {4, 4, 16, 201, {19, 17, 15, 13}},
        {8, 2, 32, 213, {0}},
    };
    for (int k = 0; k < countof(rows); k++)
        for (int overlap = 0; overlap < 2; overlap++) {
            struct sim s;
            simulate(&s,
                     (struct schedule_opts){.pp = rows[k].pp,
                                            .vpp = rows[k].vpp,
                                            .n_mb = rows[k].n_mb,
                                            .overlap = overlap ? OVERLAP_EP : OVERLAP_NONE},
                     1, 2);
            print_message("           P%d V%d M%d%s: %g, peaks", rows[k].pp, rows[k].vpp, rows[k].n_mb,
                          overlap ? " overlap" : "", s.makespan);
            for (int r = 0; r < rows[k].pp; r++)
                print_message(" %d", s.rank[r].peak_frames);
            print_message("\n");
            assert_int_equal((int)s.makespan, rows[k].makespan);
            for (int r = 0; r < rows[k].pp && rows[k].peak[0] > 0; r++) {
                assert_int_equal(s.rank[r].peak_frames, rows[k].peak[r] + overlap);
                assert_int_equal((int)s.rank[r].idle, (rows[k].pp - 1) * 3); /* the bubble */
            }
            sim_close(&s);
        }
}

/* 1F1B: (M + P - 1) (tF + tB), at most P - r microbatches in flight. */
static void one_chunk_per_stage_takes_what_it_should(void **state)
{
    (void)state;
    for (int pp = 1; pp <= 8; pp *= 2)
        for (int n_mb = pp; n_mb <= 32; n_mb += 5) {
            struct sim s;
            simulate(&s, (struct schedule_opts){.pp = pp, .n_mb = n_mb}, 1, 2);
            assert_int_equal((int)s.makespan, (n_mb + pp - 1) * 3);
            for (int r = 0; r < pp; r++)
                assert_int_equal(s.rank[r].peak_frames, pp - r);
            sim_close(&s);
        }
}

/* Whatever fits runs to its end, in list order on every rank, the receives of a pair both at its start. */
static void no_schedule_gets_stuck(void **state)
{
    (void)state;
    int runs = 0;
    for (int pp = 1; pp <= 5; pp++)
        for (int vpp = 1; vpp <= 4; vpp++)
            for (int n_mb = pp; n_mb <= 12; n_mb++)
                for (int group = pp; group <= n_mb; group++)
                    for (int overlap = 0; overlap < 2; overlap++) {
                        struct schedule_opts o = {.pp = pp,
                                                  .vpp = vpp,
                                                  .n_mb = n_mb,
                                                  .group = group,
                                                  .overlap = overlap ? OVERLAP_EP : OVERLAP_NONE};
                        struct schedule_units u = {0};
                        struct err e = {0};
                        bool fits = schedule_units(&o, &u, &e) == ST_OK;
                        schedule_units_release(&u);
                        if (!fits)
                            continue;
                        struct sim s;
                        simulate(&s, o, 1, 2);
                        sim_close(&s);
                        runs++;
                    }
    assert_true(runs > 500);
}

static void ranks_that_wait_for_each_other_are_named(void **state)
{
    (void)state;
    struct sim s;
    struct err e = {0};
    assert_ok(sim_open(&s, 2, &e), &e);
    for (int r = 0; r < 2; r++) {
        assert_ok(sim_add(&s, r, &(struct sim_task){.kind = SIM_RECV, .key = 1 - r, .frame = -1, .name = "take"}, &e),
                  &e);
        assert_ok(sim_add(&s, r, &(struct sim_task){.kind = SIM_SEND, .key = r, .frame = -1, .name = "give"}, &e), &e);
    }
    assert_fails(sim_run(&s, &e), ST_INVALID, &e, "rank 1, lane compute, task 0 (take)");
    sim_close(&s);
}

/* Lanes, waits, collectives: 0: compute 3, comm 2 after it, compute 4 beside it; 1: the same collective, ready at 5. */
static void lanes_and_collectives_take_their_time(void **state)
{
    (void)state;
    struct sim s;
    struct err e = {0};
    assert_ok(sim_open(&s, 2, &e), &e);
    const struct sim_task rank0[] = {
        {.lane = LANE_COMPUTE, .seconds = 3, .frame = 0},
        {.lane = LANE_COMM,
         .kind = SIM_GROUP,
         .key = 7,
         .seconds = 2,
         .n_waits = 1,
         .wait = {0},
         .phase = PH_FWD,
         .frame = 0},
        {.lane = LANE_COMPUTE, .seconds = 3, .frame = 1},
        {.lane = LANE_COMPUTE, .seconds = 1, .n_waits = 1, .wait = {1}, .frame = 1},
    };
    const struct sim_task rank1[] = {
        {.lane = LANE_COMPUTE, .seconds = 5, .frame = -1},
        {.lane = LANE_COMM,
         .kind = SIM_GROUP,
         .key = 7,
         .seconds = 2,
         .n_waits = 1,
         .wait = {0},
         .phase = PH_BWD,
         .frame = -1},
    };
    for (int i = 0; i < countof(rank0); i++)
        assert_ok(sim_add(&s, 0, &rank0[i], &e), &e);
    for (int i = 0; i < countof(rank1); i++)
        assert_ok(sim_add(&s, 1, &rank1[i], &e), &e);
    assert_ok(sim_run(&s, &e), &e);
    const struct sim_task *t = s.rank[0].task;
    assert_true(t[1].ready == 3 && t[1].start == 5 && t[1].end == 7);
    assert_true(t[2].start == 3 && t[2].end == 6);
    assert_true(t[3].start == 7 && t[3].end == 8 && s.makespan == 8);
    assert_true(s.rank[0].exposed[PH_FWD] == 1 && s.rank[1].exposed[PH_BWD] == 2);
    assert_true(s.rank[0].idle == 0 && s.rank[1].idle == 1);
    assert_int_equal(s.rank[0].peak_frames, 2);
    sim_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_up_counts_are_those_of_the_tables),
        cmocka_unit_test(orders_are_those_of_the_tables),
        cmocka_unit_test(every_table_is_complete),
        cmocka_unit_test(numbers_that_do_not_fit_are_refused),
        cmocka_unit_test(makespans_and_peaks_are_those_published),
        cmocka_unit_test(the_extra_unit_keeps_pairs_independent),
        cmocka_unit_test(one_chunk_per_stage_takes_what_it_should),
        cmocka_unit_test(no_schedule_gets_stuck),
        cmocka_unit_test(ranks_that_wait_for_each_other_are_named),
        cmocka_unit_test(lanes_and_collectives_take_their_time),
    };
    return cmocka_run_group_tests_name("plan: schedules", tests, NULL, NULL);
}
