/* train/: how many collectives a step takes on each group, against numbers worked out by hand; and that every schedule
 * of one rank over a loop gives the same bits. Ranks are threads; a rank only returns, assertions are in the main
 * thread. */
#include "run.h"

enum { GROUPS = 7, MOST_RANKS = 8 };
static const char *const group_names[GROUPS] = {"all", "dp", "ep", "edp", "pp", "ends", "etp"};

struct job {
    const struct config *cfg;
    int64_t calls[MOST_RANKS][GROUPS];
};

static void read_calls(const struct mesh *m, int64_t *calls)
{
    struct comm *const groups[GROUPS] = {m->all,     m->dp_comm,   m->ep_comm, m->edp_comm,
                                         m->pp_comm, m->ends_comm, m->etp_comm};
    for (int g = 0; g < GROUPS; g++)
        calls[g] = groups[g] != NULL ? comm_stats(groups[g]).calls : 0;
}

static int count_step(struct trainer *t, void *ctx, struct err *e)
{
    struct job *j = ctx;
    struct step_result r;
    int64_t before[GROUPS], after[GROUPS];
    int rank = t->model.mesh.rank;
    TRY(trainer_step(t, &r, e));
    read_calls(&t->model.mesh, before);
    TRY(trainer_step(t, &r, e));
    read_calls(&t->model.mesh, after);
    for (int g = 0; g < GROUPS; g++)
        j->calls[rank][g] = after[g] - before[g];
    return ST_OK;
}

static int rank_main(struct world *w, void *ctx, struct err *e)
{
    return run_rank(w, ((struct job *)ctx)->cfg, count_step, ctx, e);
}

struct case_of {
    const char *options;
    int ranks, pp, vpp, ep;
    int moe[2]; /* layers with experts on the first and on the last stage */
    int layers[2];
    int reduces, gathers; /* exchanges of a unit's gradients and weights in a step */
    int ends;             /* weights that both ends hold */
    bool small;           /* messages are small, so there are more of them */
    int etp;
};

#define MODEL                                                                                                          \
    "model.tied=off model.experts=4 model.topk=2 model.expert_ffn=12 train.micro_batch=1 train.global_batch=8 "        \
    "train.seq=8 run.dir= "
static const struct case_of cases[] = {
    {MODEL "model.pattern=*E*E", 2, 1, 1, 1, {2, 2}, {4, 4}, 1, 1, 0, false, 1},
    {MODEL "model.pattern=*E*E parallel.bucket_mb=0.002", 4, 1, 1, 1, {2, 2}, {4, 4}, 1, 1, 0, true, 1},
    /* sums to all: as many */
    {MODEL "model.pattern=*E*E parallel.zero=off", 2, 1, 1, 1, {2, 2}, {4, 4}, 2, 0, 0, false, 1},
    /* after each of four microbatches */
    {MODEL "model.pattern=*E*E parallel.zero=2", 2, 1, 1, 1, {2, 2}, {4, 4}, 4, 1, 0, false, 1},
    {MODEL "model.pattern=[*E][*E] parallel.zero=2", 4, 1, 1, 1, {2, 2}, {2, 2}, 2, 1, 0, false, 1},
    {MODEL "model.pattern=*E*E parallel.ep=2", 2, 1, 1, 2, {2, 2}, {4, 4}, 1, 1, 0, false, 1},
    {MODEL "model.pattern=*E*E parallel.ep=2 parallel.overlap=ep", 2, 1, 1, 2, {2, 2}, {4, 4}, 1, 1, 0, false, 1},
    {MODEL "model.pattern=*E*E parallel.ep=2 parallel.overlap=ep plan.delay_dw=on",
     4,
     1,
     1,
     2,
     {2, 2},
     {4, 4},
     1,
     1,
     0,
     false,
     1},
    {MODEL "model.pattern=*E*E parallel.ep=2 parallel.zero=2 parallel.overlap=ep",
     4,
     1,
     1,
     2,
     {2, 2},
     {4, 4},
     2,
     1,
     0,
     false,
     1},
    {MODEL "model.pattern=*E*E parallel.ep=2 parallel.etp=2", 4, 1, 1, 2, {2, 2}, {4, 4}, 1, 1, 0, false, 2},
    {MODEL "model.pattern=*E*E parallel.etp=2", 4, 1, 1, 1, {2, 2}, {4, 4}, 1, 1, 0, false, 2},
    {MODEL "model.pattern=*E*-|*E parallel.pp=2", 2, 2, 1, 1, {1, 1}, {4, 2}, 1, 1, 0, false, 1},
    {MODEL "model.pattern=*E*-|*E*E parallel.pp=2 parallel.ep=2", 4, 2, 1, 2, {1, 2}, {4, 4}, 1, 1, 0, false, 1},
    {MODEL "model.pattern=*E|*E|*-|*E parallel.pp=2 parallel.ep=2 parallel.overlap=ep",
     4,
     2,
     2,
     2,
     {1, 2},
     {4, 4},
     1,
     1,
     0,
     false,
     1},
    {MODEL "model.pattern=*E|*E|*-|*E parallel.pp=2 model.tied=on", 2, 2, 2, 1, {1, 2}, {4, 4}, 1, 1, 1, false, 1},
};

/* Units: the embedding, each layer or group, the head; experts of each apart. */
static void expected(const struct case_of *k, int rank, int64_t *want)
{
    int etp = k->etp, dp = k->ranks / k->pp, edp = dp / k->ep / etp, stage = rank / dp, mb = 8 / dp;
    int borders = 0, units = k->layers[stage] + (k->pp == 1 ? 2 : 1);
    for (int v = 0; v < k->vpp; v++) {
        int segment = v * k->pp + stage;
        borders += (segment > 0) + (segment < k->pp * k->vpp - 1);
    }
    want[0] = 3; /* labels, of which every rank hears; norms, losses */
    want[1] = dp > 1 ? units * (k->reduces + k->gathers) : 0;
    /* the numbers of rows; rows, probabilities and choices there, rows back; and the gradients of the latter two */
    want[2] = k->ep > 1 || etp > 1 ? (int64_t)5 * k->moe[stage] * mb : 0;
    want[6] = etp > 1 ? (int64_t)4 * k->moe[stage] * mb : 0; /* beside each of the last four */
    want[3] = edp > 1 ? k->moe[stage] * (k->reduces + k->gathers) : 0;
    want[4] = k->pp > 1 ? (int64_t)2 * borders * mb : 0; /* streams and gradients */
    want[5] = k->ends;
}

static void a_step_takes_the_collectives_it_should(void **state)
{
    struct playground pg;
    (void)state;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        struct job j = {.cfg = &c};
        const struct case_of *k = &cases[i];
        char options[600];
        snprintf(options, sizeof options, "%s parallel.ranks=%d", k->options, k->ranks);
        run_config(&c, &pg, options);
        struct world_opts o = {.kind = COMM_THREADS, .ranks = k->ranks, .timeout = 60};
        assert_ok(world_threads(&o, rank_main, &j, &e), &e);
        for (int rank = 0; rank < k->ranks; rank++) {
            int64_t want[GROUPS];
            expected(k, rank, want);
            for (int g = 0; g < GROUPS; g++)
                if (k->small && (g == 1 || g == 3) ? j.calls[rank][g] <= want[g] : j.calls[rank][g] != want[g])
                    fail_msg("%s: rank %d took %d collectives of group %s, expected %d", k->options, rank,
                             (int)j.calls[rank][g], group_names[g], (int)want[g]);
        }
        config_release(&c);
    }
    playground_close(&pg);
}

/* ---- one rank and a loop --------------------------------------------------------------------- */

struct outcome {
    double loss[3];
    struct snapshot end;
};

static int loop_steps(const struct config *c, struct outcome *out, struct err *e)
{
    struct world *w = NULL;
    struct rank_place place;
    struct trainer t = {0};
    const struct world_opts o = {.kind = COMM_LOOP,
                                 .loop_rate = c->parallel.loop_gbps * 1e9,
                                 .loop_latency = c->parallel.loop_us * 1e-6,
                                 .loop_ranks = 8};
    TRY(world_open(&w, &o, e));
    int st = place_open(&place, c, w, 0, 1, e);
    if (st == ST_OK)
        st = trainer_open_on(&t, c, &place, NULL, true, e);
    for (int i = 0; st == ST_OK && i < countof(out->loss); i++) {
        struct step_result r;
        st = trainer_step(&t, &r, e);
        out->loss[i] = r.loss;
    }
    if (st == ST_OK)
        snapshot_take(&out->end, &t);
    trainer_close(&t);
    place_close(&place);
    world_close(w);
    return st;
}

/* Over a slow or a fast loop, in any schedule. */
static void overlapped_steps_over_a_loop_have_the_plain_bits(void **state)
{
    static const char *const ways[] = {"",
                                       "parallel.loop_axis=tp",
                                       "parallel.loop_axis=tp parallel.overlap=tp",
                                       "parallel.loop_axis=tp parallel.overlap=tp parallel.loop_gbps=0.5 "
                                       "plan.poison=on",
                                       "parallel.loop_axis=tp parallel.overlap=tp plan.random_lanes=7 plan.poison=on "
                                       "plan.recompute=full",
                                       "parallel.overlap=tp plan.random_lanes=9",
                                       "parallel.loop_gbps=0.5",
                                       "parallel.overlap=ep",
                                       "parallel.overlap=ep parallel.loop_gbps=0.5 plan.poison=on",
                                       "parallel.overlap=ep plan.delay_dw=on",
                                       "parallel.overlap=ep plan.delay_dw=on plan.random_lanes=5 plan.poison=on",
                                       "parallel.overlap=dw",
                                       "plan.delay_dw=on"};
    struct playground pg;
    struct outcome first = {0};
    (void)state;
    playground_open(&pg);
    for (int i = 0; i < countof(ways); i++) {
        struct config c;
        struct err e = {0};
        struct outcome got = {0};
        char options[600];
        snprintf(options, sizeof options, MODEL "model.pattern=*E*E/*E model.hidden=24 model.shared_ffn=8 %s", ways[i]);
        run_config(&c, &pg, options);
        assert_ok(loop_steps(&c, &got, &e), &e);
        if (i == 0) {
            first = got;
        } else {
            assert_memory_equal(got.loss, first.loss, sizeof got.loss);
            assert_true(snapshot_equal(&got.end, &first.end));
            snapshot_free(&got.end);
        }
        config_release(&c);
    }
    snapshot_free(&first.end);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_takes_the_collectives_it_should),
        cmocka_unit_test(overlapped_steps_over_a_loop_have_the_plain_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
