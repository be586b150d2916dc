/* train/: timelines. Times that can be worked out by hand, what must not change them (brackets in a pattern), what must
 * (a slow link, overlap), pictures and traces that are well formed, and node times measured here. */
#include "train/run.h"
#include "sim/timeline.h"

#include <jansson.h>

#define MODEL                                                                                                          \
    "model.tied=off model.experts=4 model.topk=2 model.expert_ffn=12 train.micro_batch=1 train.seq=8 run.dir= "

static void open_timeline(struct timeline *tl, struct config *c, const char *options, const struct machine *m)
{
    struct err e = {0};
    tiny_config(c, options);
    assert_ok(timeline_open(tl, c, m, NULL, &e), &e);
}

static void close_timeline(struct timeline *tl, struct config *c)
{
    timeline_close(tl);
    config_release(c);
}

/* A machine on which a tiny model computes about as long as it talks. */
static struct machine slow_machine(void)
{
    return (struct machine){.flops = 1e9,
                            .attention = 1e9,
                            .attention_back = 1e9,
                            .bandwidth = 1e9,
                            .node = 1e-6,
                            .link = 0.04e9,
                            .link_delay = 2e-6,
                            .inner = 0.04e9,
                            .gpus = 8,
                            .memory = 1e9};
}

static double exposed_rows(const struct timeline *tl)
{
    double sum = 0;
    for (int r = 0; r < tl->n; r++)
        sum += tl->rank[r].exposed[KIND_DISPATCH] + tl->rank[r].exposed[KIND_COMBINE];
    return sum;
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Seconds of the first step of attention in a phase. */
static double attention_seconds(const struct timeline *tl, enum phase_id phase)
{
    const struct trainer *t = &tl->rank[0].t;
    const struct plan *p = &t->train.p;
    struct step_cost cost = step_cost_of(&tl->machine, NULL, t);
    for (int i = 0; i < p->n_steps; i++)
        if (p->steps[i].ref.phase == phase && strcmp(p->g->nodes[p->steps[i].ref.node].name, "0.attn.core") == 0)
            return step_seconds(&cost, p, i) / p->g->nodes[p->steps[i].ref.node].phase[phase].flops;
    fail_msg("there is no attention in this phase");
    return 0;
}

static void attention_has_rates_by_phase_length_and_width(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        double forward, backward; /* GFLOP/s */
    } cases[] = {
        {"model.head_dim=128 train.seq=96", 8 * 0.75, 4 * 0.75}, /* 96 of 96 + 32 tokens */
        {"model.head_dim=128 train.seq=32", 8 * 0.5, 4 * 0.5},
        {"model.head_dim=128 train.seq=96 model.attn_window=32", 8 * 0.5, 4 * 0.5},
        {"model.head_dim=8 train.seq=96", 8 * 0.75 * 0.78, 4 * 0.75 * 0.78},
    };
    struct machine m = slow_machine();
    m.node = 0;
    m.bandwidth = 1e15;
    m.attention = 8e9;
    m.attention_back = 4e9;
    m.attention_ramp = 32;
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct timeline tl;
        char options[300];
        snprintf(options, sizeof options, "model.pattern=*- train.micro_batch=1 train.global_batch=1 run.dir= %s",
                 cases[i].options);
        open_timeline(&tl, &c, options, &m);
        assert_true(fabs(attention_seconds(&tl, PH_FWD) * cases[i].forward * 1e9 - 1) < 1e-9);
        assert_true(fabs(attention_seconds(&tl, PH_BWD) * cases[i].backward * 1e9 - 1) < 1e-9);
        close_timeline(&tl, &c);
    }
}

/* ---- brackets -------------------------------------------------------------------------------- */

static void brackets_take_no_time(void **state)
{
    static const struct {
        const char *flat, *grouped, *options;
    } cases[] = {
        {"*E*E*E", "[*E][*E][*E]", "parallel.ranks=2 parallel.ep=2 train.global_batch=16"},
        {"*E*E*E", "[*E][*E][*E]", "parallel.ranks=2 parallel.ep=2 parallel.overlap=ep train.global_batch=16"},
        {"*E*E*E", "[*E][*E][*E]",
         "parallel.ranks=2 parallel.ep=2 parallel.overlap=ep plan.delay_dw=on train.global_batch=16"},
        {"*E*-*E", "[*E][*-][*E]", "parallel.ranks=4 parallel.ep=2 parallel.overlap=ep train.global_batch=16"},
        {"*E|*E|*-|*E", "[*E]|[*E]|[*-]|[*E]",
         "parallel.ranks=4 parallel.pp=2 parallel.ep=2 parallel.overlap=ep train.global_batch=16"},
        {"*-*-", "[*-][*-]", "train.global_batch=4"},
    };
    struct machine m = slow_machine();
    (void)state;
    for (int i = 0; i < countof(cases); i++) {
        struct config a, b;
        struct timeline x, y;
        char options[600];
        snprintf(options, sizeof options, MODEL "model.pattern=%s %s", cases[i].flat, cases[i].options);
        open_timeline(&x, &a, options, &m);
        snprintf(options, sizeof options, MODEL "model.pattern=%s %s", cases[i].grouped, cases[i].options);
        open_timeline(&y, &b, options, &m);
        assert_true(x.seconds > 0);
        /* What is gathered and reduced at once is a bracket group, else a layer: a little of it is
         * exposed at the ends. */
        assert_true(fabs(x.seconds - y.seconds) <= 0.02 * x.seconds);
        close_timeline(&x, &a);
        close_timeline(&y, &b);
    }
}

/* ---- numbers --------------------------------------------------------------------------------- */

/* One rank without a link: the step is the sum of its nodes. */
static void one_rank_takes_the_sum_of_its_nodes(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    (void)state;
    open_timeline(&tl, &c, MODEL "model.pattern=*-E train.global_batch=3", &m);
    const struct trainer *t = &tl.rank[0].t;
    const struct step_cost cost = step_cost_of(&m, NULL, t);
    double sum = 0;
    for (int i = 0; i < t->train.p.n_steps; i++)
        sum += 3 * step_seconds(&cost, &t->train.p, i);
    for (int i = 0; i < t->optim.p.n_steps; i++)
        sum += step_seconds(&cost, &t->optim.p, i);
    assert_true(sum > 0);
    assert_true(fabs(tl.seconds - sum) < 1e-9 * sum);
    assert_true(tl.rank[0].bubble < 1e-9 * sum);
    assert_true(exposed_rows(&tl) == 0);
    close_timeline(&tl, &c);
}

/* Rows of an all-to-all: a token is one row of 4 * width bytes for each rank with experts of it, 5 of 6 tokens where
 * two of four are chosen. The other rank's half leaves at the link's rate. */
static void a_dispatch_takes_what_the_link_needs(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    (void)state;
    open_timeline(&tl, &c,
                  MODEL "model.pattern=*E parallel.ranks=2 parallel.ep=2 train.global_batch=4 parallel.ep_capacity=2",
                  &m);
    /* two choices travel with each row, and two probabilities; back the gradients of the latter */
    double rows = 8 * 2 * 5.0 / 6, there = rows * (16 + 2 + 2) * 4, back = rows * (16 + 2) * 4, bytes;
    double want = 2 /* microbatches */ * (2 * m.link_delay + (there + back) / 2 / m.inner);
    assert_int_equal(c.model.experts, 4);
    assert_int_equal(c.model.topk, 2);
    assert_true(fabs(tl.rank[0].moved[KIND_DISPATCH] - want) < 1e-6 * want);
    bytes = rows * 16 * 4;
    want = 2 * 2 * (m.link_delay + bytes / 2 / m.inner);
    assert_true(fabs(tl.rank[0].moved[KIND_COMBINE] - want) < 1e-6 * want);
    close_timeline(&tl, &c);
}

/* Ranks that divide sequences: keys and values take their time on the link, and a scan waits for that of the rank
 * before it. */
static void parts_of_sequences_wait_for_each_other(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    double want = 0;
    (void)state;
    open_timeline(&tl, &c, MODEL "model.pattern=*- parallel.ranks=2 parallel.cp=2 train.global_batch=3", &m);
    const struct graph *g = &tl.rank[1].t.train.g;
    for (int i = 0; i < g->n_nodes; i++)
        for (enum phase_id ph = PH_FWD; g->nodes[i].role == ROLE_CONTEXT && ph <= PH_BWD; ph++)
            want += 3 * (m.link_delay + g->nodes[i].phase[ph].bytes / 2 / m.inner);
    assert_true(want > 0 && fabs(tl.rank[1].moved[KIND_CONTEXT] - want) < 1e-6 * want);
    close_timeline(&tl, &c);
    open_timeline(&tl, &c,
                  MODEL "model.pattern=M- model.mamba_head_dim=4 parallel.ranks=2 parallel.cp=2 train.global_batch=3",
                  &m);
    assert_true(tl.rank[1].moved[KIND_CONTEXT] > 0);
    assert_true(tl.rank[0].bubble + tl.rank[0].exposed[KIND_CONTEXT] > 0); /* for the gradient of its state */
    close_timeline(&tl, &c);
}

/* In a ring every hop takes its bytes from neighbour to neighbour, and the next block travels while one is computed: of
 * a link as fast as the computing, less is left to wait for than of a gather. */
static void blocks_travel_in_a_ring_beside_attention(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    double want = 0, gather;
    (void)state;
    open_timeline(&tl, &c, MODEL "model.pattern=*- parallel.ranks=4 parallel.cp=4 train.global_batch=3 train.seq=256",
                  &m);
    gather = tl.rank[3].exposed[KIND_CONTEXT];
    close_timeline(&tl, &c);
    open_timeline(&tl, &c,
                  MODEL "model.pattern=*- parallel.ranks=4 parallel.cp=4 train.global_batch=3 train.seq=256 "
                        "parallel.cp_comm=ring",
                  &m);
    const struct graph *g = &tl.rank[3].t.train.g;
    for (int i = 0; i < g->n_nodes; i++)
        for (enum phase_id ph = PH_FWD; g->nodes[i].role == ROLE_RING && ph <= PH_BWD; ph++)
            if (g->nodes[i].phase[ph].bytes > 0)
                want += 3 * (m.link_delay + g->nodes[i].phase[ph].bytes / m.inner);
    assert_true(want > 0 && fabs(tl.rank[3].moved[KIND_CONTEXT] - want) < 1e-6 * want);
    print_message("           %g s left of a gather, %g s of a ring\n", gather, tl.rank[3].exposed[KIND_CONTEXT]);
    assert_true(tl.rank[3].exposed[KIND_CONTEXT] < gather);
    close_timeline(&tl, &c);
}

/* Rows of the residual stream between tensor-parallel ranks: every gather and scatter takes its bytes over the link, in
 * each of its phases; the divided head computes, on the lane of its messages. */
static void rows_of_tensor_parallel_ranks_take_what_the_link_needs(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    double want = 0;
    int heads = 0;
    (void)state;
    open_timeline(&tl, &c, MODEL "model.pattern=*- model.vocab=24 parallel.ranks=2 parallel.tp=2 train.global_batch=3",
                  &m);
    const struct plan *p = &tl.rank[1].t.train.p;
    for (int i = 0; i < p->n_steps; i++) {
        const struct node *n = &p->g->nodes[p->steps[i].ref.node];
        const struct phase *ph = &n->phase[p->steps[i].ref.phase];
        heads += role_is_shard(n->role) && ph->flops > 0;
        if (role_is_shard(n->role) && ph->flops == 0)
            want += 3 * (m.link_delay + ph->bytes / 2 / m.inner);
    }
    assert_int_equal(heads, 1);
    assert_true(want > 0 && fabs(tl.rank[1].moved[KIND_ROWS] - want) < 1e-6 * want);
    assert_true(tl.rank[1].moved[KIND_FORWARD] == 0);
    close_timeline(&tl, &c);
}

static void a_far_rank_is_reached_over_the_link(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline near, far;
    (void)state;
    m.inner = 100 * m.link;
    open_timeline(&near, &c, MODEL "model.pattern=*E parallel.ranks=2 parallel.ep=2 train.global_batch=4", &m);
    double there = near.rank[0].moved[KIND_DISPATCH];
    close_timeline(&near, &c);
    m.gpus = 1;
    open_timeline(&far, &c, MODEL "model.pattern=*E parallel.ranks=2 parallel.ep=2 train.global_batch=4", &m);
    assert_true(far.rank[0].moved[KIND_DISPATCH] > 5 * there);
    assert_true(far.rank[0].moved[KIND_REDUCE] > 0 && far.rank[0].moved[KIND_GATHER] > 0);
    close_timeline(&far, &c);
}

static void overlap_hides_most_of_what_travels(void **state)
{
    static const char *const ways[] = {"", "parallel.overlap=ep", "parallel.overlap=ep plan.delay_dw=on"};
    struct machine m = slow_machine();
    double exposed[countof(ways)], seconds[countof(ways)];
    (void)state;
    for (int i = 0; i < countof(ways); i++) {
        struct config c;
        struct timeline tl;
        char options[600];
        snprintf(options, sizeof options,
                 MODEL
                 "model.pattern=*E*E*E parallel.ranks=2 parallel.ep=2 train.global_batch=16 parallel.ep_capacity=1 %s",
                 ways[i]);
        open_timeline(&tl, &c, options, &m);
        exposed[i] = exposed_rows(&tl);
        seconds[i] = tl.seconds;
        close_timeline(&tl, &c);
    }
    assert_true(exposed[0] > 0);
    assert_true(exposed[1] < exposed[0] / 2 && exposed[2] < exposed[0] / 2);
    assert_true(seconds[1] < seconds[0] && seconds[2] <= seconds[1] * 1.001);
}

/* Rows hide behind the other microbatch of a pair; of eight the first and the last half have none. */
static void overlap_hides_rows_of_tensor_parallel_ranks(void **state)
{
    static const char *const ways[] = {"", "parallel.overlap=ep", "parallel.overlap=tp"};
    struct machine m = slow_machine();
    double exposed[countof(ways)], seconds[countof(ways)];
    (void)state;
    m.inner = 20 * m.link;
    for (int i = 0; i < countof(ways); i++) {
        struct config c;
        struct timeline tl;
        char options[600];
        snprintf(options, sizeof options,
                 MODEL "model.pattern=*-*-*- model.vocab=24 parallel.ranks=2 parallel.tp=2 train.global_batch=8 %s",
                 ways[i]);
        open_timeline(&tl, &c, options, &m);
        exposed[i] = tl.rank[0].exposed[KIND_ROWS];
        seconds[i] = tl.seconds;
        close_timeline(&tl, &c);
    }
    print_message("           exposed %g, %g, %g s of %g\n", exposed[0], exposed[1], exposed[2], seconds[0]);
    assert_true(exposed[0] > 0 && exposed[1] == exposed[0] && seconds[1] == seconds[0]); /* no experts */
    assert_true(exposed[2] < exposed[0] / 2 && seconds[2] < seconds[0]);
}

/* Computing beside a busy link is slower by the share that is given, and by no more. */
static void a_busy_link_slows_computing(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline free_of, beside;
    (void)state;
    const char *options =
        MODEL "model.pattern=*E*E*E parallel.ranks=2 parallel.ep=2 parallel.overlap=ep train.global_batch=16";
    open_timeline(&free_of, &c, options, &m);
    double without = free_of.seconds;
    close_timeline(&free_of, &c);
    m.beside = 0.2;
    open_timeline(&beside, &c, options, &m);
    assert_true(beside.seconds > without * 1.0001 && beside.seconds < without * 1.2);
    close_timeline(&beside, &c);
}

/* ---- many ranks ------------------------------------------------------------------------------ */

/* Stages of a column take what all ranks take when their groups are alike. Gradients are reduced within twice as many
 * ranks: a link that is fast enough makes them alike in this too. */
static void one_rank_of_each_stage_stands_for_all(void **state)
{
    struct machine m = slow_machine();
    struct config a, b;
    struct timeline all, column;
    (void)state;
    m.inner = m.link = 1e18;
    const char *model =
        MODEL "model.pattern=*E|*E|*-|*E parallel.pp=2 parallel.ep=4 parallel.overlap=ep parallel.zero=off";
    char options[600];
    snprintf(options, sizeof options, "%s parallel.ranks=16 train.global_batch=32", model);
    open_timeline(&all, &a, options, &m);
    snprintf(options, sizeof options, "%s parallel.ranks=32 train.global_batch=64", model);
    open_timeline(&column, &b, options, &m);
    assert_int_equal(all.n, 16);
    assert_int_equal(column.n, 2);
    assert_true(column.column && !all.column);
    assert_true(fabs(all.train.sim.makespan - column.train.sim.makespan) < 1e-9 * all.train.sim.makespan);
    close_timeline(&all, &a);
    close_timeline(&column, &b);
}

/* Parts of a sequence have different work, so all of them are shown. */
static void one_rank_of_each_part_stands_for_all(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    (void)state;
    open_timeline(&tl, &c,
                  MODEL "model.pattern=*-|M- model.mamba_head_dim=4 parallel.pp=2 parallel.cp=2 parallel.ranks=32 "
                        "train.global_batch=16",
                  &m);
    assert_int_equal(tl.n, 4);
    for (int r = 0; r < 4; r++) {
        const struct mesh *at = &tl.rank[r].t.model.mesh;
        assert_true(at->pp_rank == r / 2 && at->cp_rank == r % 2 && at->dp_rank == 0);
        assert_true(tl.rank[r].moved[KIND_CONTEXT] > 0);
    }
    close_timeline(&tl, &c);
}

/* ---- cutting --------------------------------------------------------------------------------- */

static void patterns_are_cut_evenly(void **state)
{
    static const struct {
        const char *pattern;
        int pp, vpp;
    } cases[] = {{"[*E][*E][*E][*E][*E][*E][*E]/*E", 2, 2},
                 {"*-*-*-*-*-*-", 4, 1},
                 {"[*-][*E][*E][*E][*E][*E][*E][*E][*E][*E][*E][*E][*E][*E]/*E", 4, 2}};
    (void)state;
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        struct buf cut, joined;
        struct pattern p;
        char options[400];
        snprintf(options, sizeof options, MODEL "model.pattern=%s", cases[i].pattern);
        tiny_config(&c, options);
        buf_init(&cut, 0);
        buf_init(&joined, 0);
        assert_ok(timeline_cut_pattern(&c, cases[i].pp, cases[i].vpp, 0, &cut, &e), &e);
        assert_ok(pattern_parse(&p, cut.text, &e), &e);
        assert_int_equal(p.n_segments, cases[i].pp * cases[i].vpp);
        for (const char *at = cut.text; *at != '\0'; at++)
            if (*at != '|')
                buf_addf(&joined, "%c", *at);
        assert_string_equal(joined.text, cases[i].pattern);
        for (int s = 0; s < p.n_segments - 1; s++)
            assert_true(p.segments[s].n_items > 0);
        buf_release(&cut);
        buf_release(&joined);
        config_release(&c);
    }
    struct config c;
    struct err e = {0};
    struct buf cut;
    buf_init(&cut, 0);
    tiny_config(&c, MODEL "model.pattern=[*E][*E]");
    assert_fails(timeline_cut_pattern(&c, 2, 2, 0, &cut, &e), ST_USAGE, &e, "too few");
    buf_release(&cut);
    config_release(&c);
}

/* ---- showing --------------------------------------------------------------------------------- */

static int count_of(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)) != NULL; p++)
        n++;
    return n;
}

static void pictures_and_traces_are_whole(void **state)
{
    struct machine m = slow_machine();
    struct config c;
    struct timeline tl;
    struct buf svg, trace, table;
    json_error_t why;
    (void)state;
    open_timeline(&tl, &c,
                  MODEL "model.pattern=*E|*E|*-|*E parallel.ranks=4 parallel.pp=2 parallel.ep=2 parallel.overlap=ep "
                        "train.global_batch=8",
                  &m);
    buf_init(&svg, 0);
    buf_init(&trace, 0);
    buf_init(&table, 0);
    timeline_svg(&tl, &svg);
    timeline_trace(&tl, &trace);
    timeline_print(&tl, &table);
    assert_int_equal(count_of(svg.text, "<title>"), count_of(svg.text, "</title>"));
    assert_int_equal(count_of(svg.text, "<text"), count_of(svg.text, "</text>"));
    assert_int_equal(count_of(svg.text, ">rank "), 4);
    assert_non_null(strstr(svg.text, "Predicted"));
    assert_non_null(strstr(svg.text, "prefers-color-scheme:dark"));
    assert_non_null(strstr(table.text, "PREDICTED"));
    json_t *j = json_loads(trace.text, 0, &why);
    if (j == NULL)
        fail_msg("trace, line %d: %s", why.line, why.text);
    int events = 0;
    double end = 0;
    for (size_t i = 0; i < json_array_size(j); i++) {
        const json_t *ev = json_array_get(j, i);
        if (strcmp(json_string_value(json_object_get(ev, "ph")), "X") != 0)
            continue;
        double t = json_number_value(json_object_get(ev, "ts")) + json_number_value(json_object_get(ev, "dur"));
        end = t > end ? t : end;
        events++;
    }
    assert_true(events > 4 * 50);
    assert_true(fabs(end - tl.seconds * 1e6) < 0.01);
    json_decref(j);
    buf_release(&svg);
    buf_release(&trace);
    buf_release(&table);
    close_timeline(&tl, &c);
}

/* ---- measured -------------------------------------------------------------------------------- */

/* Steps that compute and have no time; closing a stream at a cut, and a norm's own share, are things one rank does not
 * do. */
static int without_time(const struct plan *p, const struct node_times *times)
{
    int n = 0;
    for (int i = 0; i < p->n_steps; i++) {
        const struct node *node = &p->g->nodes[p->steps[i].ref.node];
        double seconds;
        bool known = node_times_get(times, p, i, 1, &seconds) && seconds > 0;
        n += !known && p->steps[i].lane == LANE_COMPUTE && strstr(node->name, ".close") == NULL &&
             strcmp(node->name, "update.clip.own") != 0;
    }
    return n;
}

static void times_of_nodes_are_measured(void **state)
{
    struct playground pg;
    struct config alone, many;
    struct err e = {0};
    struct node_times *times = NULL;
    struct timeline tl;
    struct machine m = slow_machine();
    (void)state;
    playground_open(&pg);
    run_config(&alone, &pg, MODEL "model.pattern=*E*-*E train.global_batch=1");
    assert_ok(node_times_measure(&times, &alone, &e), &e);
    run_config(&many, &pg,
               MODEL "model.pattern=*E|*-|*E parallel.ranks=6 parallel.pp=3 parallel.ep=2 parallel.bucket_mb=0.002 "
                     "train.global_batch=8");
    assert_ok(timeline_open(&tl, &many, &m, times, &e), &e);
    for (int r = 0; r < tl.n; r++)
        assert_int_equal(without_time(&tl.rank[r].t.train.p, times) + without_time(&tl.rank[r].t.optim.p, times), 0);
    assert_true(tl.seconds > 0 && tl.seconds < 20);
    close_timeline(&tl, &many);
    node_times_close(times);
    config_release(&alone);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_has_rates_by_phase_length_and_width),
        cmocka_unit_test(brackets_take_no_time),
        cmocka_unit_test(one_rank_takes_the_sum_of_its_nodes),
        cmocka_unit_test(a_dispatch_takes_what_the_link_needs),
        cmocka_unit_test(parts_of_sequences_wait_for_each_other),
        cmocka_unit_test(blocks_travel_in_a_ring_beside_attention),
        cmocka_unit_test(rows_of_tensor_parallel_ranks_take_what_the_link_needs),
        cmocka_unit_test(a_far_rank_is_reached_over_the_link),
        cmocka_unit_test(overlap_hides_most_of_what_travels),
        cmocka_unit_test(overlap_hides_rows_of_tensor_parallel_ranks),
        cmocka_unit_test(a_busy_link_slows_computing),
        cmocka_unit_test(one_rank_of_each_stage_stands_for_all),
        cmocka_unit_test(one_rank_of_each_part_stands_for_all),
        cmocka_unit_test(patterns_are_cut_evenly),
        cmocka_unit_test(pictures_and_traces_are_whole),
        cmocka_unit_test(times_of_nodes_are_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
