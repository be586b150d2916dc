/* braid verify: all variants agree for a model with every kind of layer, and what is wrong on purpose is found and
 * named. */
#include "verify_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static void set(struct config *c, const char *name, const char *value)
{
    struct err e = {0};
    assert_ok(config_set(c, name, value, NULL, &e), &e);
}

static void fixture_open(struct fixture *f, const char *pattern)
{
    char options[256];
    snprintf(options, sizeof options,
             "model.pattern=%s model.experts=64 model.topk=8 model.seq_aux_loss=0.01 model.shared_ffn=512 "
             "model.dropout=0.1%s",
             pattern, strpbrk(pattern, "CHW") != NULL ? " model.mla_q_rank=10" : ""); /* which has no default there */
    fixture_begin(f, options);
}

static void fixture_run(struct fixture *f)
{
    assert_ok(verify_config(&f->small, &f->user, f->dir, &f->e), &f->e);
    assert_ok(verify_open(&f->v, &f->small, &f->e), &f->e);
}

/* ---- everything right ------------------------------------------------------------------------ */

/* Four ranks find no part each where there are two groups; two of them must. */
static bool cannot_divide(const struct verify_case *variant, const struct verify_row *row)
{
    return row->outcome == VERIFY_REFUSED &&
           ((variant->tp > 2 && strstr(row->why.msg, "groups cannot be shared by 4 ranks") != NULL) ||
            (verify_cp(variant) > 1 && strstr(row->why.msg, "share keys and values") != NULL));
}

static void run_ways(struct fixture *f, const struct verify_case *variants, int n)
{
    for (int i = 0; i < n; i++) {
        struct verify_row row;
        if (!verify_applies(&f->small, &variants[i]))
            continue;
        assert_ok(verify_run(f->v, &variants[i], NULL, &row, &f->e), &f->e);
        if (row.outcome > VERIFY_CLOSE && !cannot_divide(&variants[i], &row))
            fail_msg("%s: loss %g, norm %g, gradient %g, parameter %g in %s %s", variants[i].name, row.loss, row.norm,
                     row.grad, row.param, row.where, row.why.msg);
        if (variants[i].ranks == 1) /* one rank, whatever the schedule: the same bits */
            assert_int_equal(row.outcome, VERIFY_SAME_BITS);
    }
}

/* Those with names, and if asked for such that every pair of options is among them. */
static void every_way(const char *pattern, const char *streams, bool pairs)
{
    struct fixture f;
    struct verify_list more;
    int n;
    const struct verify_case *named = verify_cases(&n);
    fixture_open(&f, pattern);
    set(&f.user, "model.mhc_streams", streams);
    fixture_run(&f);
    run_ways(&f, named, n);
    assert_ok(verify_combinations(&more, &f.small, false, &f.e), &f.e);
    if (pairs)
        run_ways(&f, more.list, more.n);
    verify_list_release(&more);
    fixture_close(&f);
}

/* Adapters are declared with the products they belong to, after the first node of a unit; frozen weights are nobody's
 * to reduce. */
static void adapters_agree_on_every_level(void **state)
{
    static const char *const variants[] = {"DP2",
                                           "DP4, zero 0",
                                           "DP2, zero 2",
                                           "DP2, zero 3",
                                           "DP4, zero 3, lanes in random order, poisoned",
                                           "DP2 x PP2, zero 2",
                                           "TP2",
                                           "TP4",
                                           "TP2 x DP2, zero 3",
                                           "TP2 x CP2"};
    (void)state;
    /* Sections of rows, columns, weights that every rank has; one head of keys and values that ranks share. */
    static const char *const patterns[] = {"*-*-", "+-GE", "*-M-"}, *const kv_heads[] = {"4", "4", "1"};
    for (int p = 0; p < countof(patterns); p++) {
        struct fixture f;
        fixture_open(&f, patterns[p]);
        set(&f.user, "lora.rank", "4");
        set(&f.user, "model.heads", "4");
        set(&f.user, "model.kv_heads", kv_heads[p]);
        set(&f.user, "model.qkv_bias", p == 2 ? "on" : "off");
        fixture_run(&f);
        for (int i = 0; i < countof(variants); i++)
            if (p == 0 || variant_named(variants[i])->tp > 1)
                run_ways(&f, variant_named(variants[i]), 1);
        fixture_close(&f);
    }
}

/* FP8: codes of slices, and codes of weights that are gathered for each use, are those of whole tensors. Where ranks
 * divide tokens or experts, blocks of tokens hold others, and the last bits of codes differ. */
static void codes_agree_with_those_of_one_rank(void **state)
{
    static const struct {
        const char *pattern, *variant;
        bool exact;
    } cases[] = {
        {"*-", "TP2", true}, {"*-", "DP2, zero 3", true}, {"*M", "TP2 x DP2, zero 3", true},  {"*-", "CP2", false},
        {"+-", "TP2", true}, {"*E", "TP2", false},        {"*E", "DP2 x EP2, zero 3", false},
    };
    (void)state;
    for (int i = 0; i < countof(cases); i++) {
        struct fixture f;
        struct verify_row row;
        fixture_open(&f, cases[i].pattern);
        set(&f.user, "gpu.precision", "fp8");
        set(&f.user, "model.dropout", "0");
        set(&f.user, "model.bias", i % 2 == 0 ? "on" : "off");
        fixture_run(&f);
        assert_ok(verify_run(f.v, variant_named(cases[i].variant), NULL, &row, &f.e), &f.e);
        double most = fmax(fmax(row.loss, row.norm), fmax(row.grad, row.param));
        if (row.outcome > VERIFY_CLOSE || (cases[i].exact && most > VERIFY_ALLOWED))
            fail_msg("%s on %s: loss %g, norm %g, gradient %g, parameter %g in %s %s", cases[i].pattern,
                     cases[i].variant, row.loss, row.norm, row.grad, row.param, row.where, row.why.msg);
        fixture_close(&f);
    }
}

/* What the run would divide is divided in the small model: a vocabulary with an end-of-document token is padded, and
 * rows do not travel as codes, which one rank has none of. */
static void vocabularies_and_rows_fit(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, "*E");
    set(&f.user, "data.eod", "on");
    set(&f.user, "data.eod_mask", "on");
    set(&f.user, "parallel.ep_fp8", "dispatch");
    fixture_run(&f);
    run_ways(&f, variant_named("TP2"), 1);
    run_ways(&f, variant_named("TP4"), 1);
    run_ways(&f, variant_named("EP2"), 1);
    fixture_close(&f);
}

/* The sample is small, has no variant twice, and leaves out no level of sharding on any kind of mesh. */
static void a_sample_has_every_pair(void **state)
{
    (void)state;
    struct fixture f;
    struct verify_list some, all;
    fixture_open(&f, "*E*E");
    assert_ok(verify_config(&f.small, &f.user, f.dir, &f.e), &f.e);
    assert_ok(verify_combinations(&some, &f.small, false, &f.e), &f.e);
    assert_ok(verify_combinations(&all, &f.small, true, &f.e), &f.e);
    print_message("           %d variants of %d\n", some.n, all.n);
    assert_true(some.n < 40 && all.n > 200);
    static const char *const wanted[][2] = {{"zero 3", "EP2"},        {"zero 3", "VPP2"},       {"zero 2", "PP2 "},
                                            {"zero 2", "overlap ep"}, {"zero 3", "overlap dw"}, {"zero 3", "delayed"},
                                            {"zero 3", "recomputed"}, {"PP4", "zero 2"},        {"zero 0", "EP2"},
                                            {"zero 3", "x 8,"},       {"ETP2", "EP4"},          {"ETP2", "zero 3"},
                                            {"TP2 over", "ETP2"},     {"ETP2", "overlap ep"}};
    for (int i = 0; i < countof(wanted); i++) {
        int found = 0;
        for (int k = 0; k < some.n; k++)
            found += strstr(some.list[k].name, wanted[i][0]) != NULL && strstr(some.list[k].name, wanted[i][1]) != NULL;
        if (found == 0)
            fail_msg("no variant has %s and %s", wanted[i][0], wanted[i][1]);
    }
    for (int k = 1; k < all.n; k++)
        assert_true(strcmp(all.list[k].name, all.list[k - 1].name) != 0 && all.list[k].ranks <= 8);
    verify_list_release(&some);
    verify_list_release(&all);
    fixture_close(&f);
}

static void all_ways_agree(void **state)
{
    (void)state;
    every_way("M*[ME]G-[*E]/*E", "0", true);
    every_way("[*E]M-[*E]M-/*E", "4", false);
    every_way("+-+-", "2", true);
    every_way("D-DE/D-", "2", false);
    every_way("C-HE/W-", "2", false);
}

/* ---- balance over a step --------------------------------------------------------------------- */

static int no_sum(const struct step_ctx *c)
{
    (void)c;
    return ST_OK;
}

static void without_load_sum(struct trainer *t)
{
    struct graph *g = &t->train.g;
    int found = 0;
    for (int i = 0; i < g->n_nodes; i++)
        if (strstr(g->nodes[i].name, "load_sum") != NULL) {
            g->nodes[i].phase[PH_FWD].fn = no_sum;
            found++;
        }
    assert_true(found > 0);
}

/* Its running mean depends on how many microbatches are known at once; what must be equal is, on every mesh. */
static void balance_over_a_step_agrees(void **state)
{
    (void)state;
    struct fixture f;
    int n;
    const struct verify_case *all = verify_cases(&n);
    fixture_open(&f, "*E-E/*E");
    set(&f.user, "model.global_aux_loss", "0.1");
    set(&f.user, "model.aux_loss", "0.1");
    set(&f.user, "model.router_capacity", "1.1");
    fixture_run(&f);
    for (int i = 0; i < n; i++) {
        struct verify_row row;
        assert_ok(verify_run(f.v, &all[i], NULL, &row, &f.e), &f.e);
        bool dropping =
            row.outcome == VERIFY_REFUSED && all[i].tp > 1 && strstr(row.why.msg, "router_capacity") != NULL;
        if (row.outcome > VERIFY_CLOSE && !dropping)
            fail_msg("%s: loss %g, norm %g, gradient %g, parameter %g in %s %s", all[i].name, row.loss, row.norm,
                     row.grad, row.param, row.where, row.why.msg);
    }
    struct verify_row wrong;
    assert_ok(
        verify_run(f.v, variant_named("DP2"), &(struct verify_sabotage){.trainer = without_load_sum}, &wrong, &f.e),
        &f.e);
    assert_int_equal(wrong.outcome, VERIFY_DIFFERS);
    fixture_close(&f);
}

/* ---- wrong on purpose ------------------------------------------------------------------------ */

static void expect_found(const char *pattern, const char *variant, const struct verify_sabotage *wrong,
                         const char *where)
{
    struct fixture f;
    struct verify_row row;
    fixture_open(&f, pattern);
    fixture_run(&f);
    assert_ok(verify_run(f.v, variant_named(variant), NULL, &row, &f.e), &f.e);
    assert_true(row.outcome <= VERIFY_CLOSE);
    assert_ok(verify_run(f.v, variant_named(variant), wrong, &row, &f.e), &f.e);
    assert_int_equal(row.outcome, VERIFY_DIFFERS);
    if (strstr(row.where, where) == NULL)
        fail_msg("the difference is in %s, not in %s", row.where, where);
    fixture_close(&f);
}

static int do_nothing(const struct step_ctx *c)
{
    (void)c;
    return ST_OK;
}

/* The first sum of gradients over ranks that reads a parameter of experts, or one that does not, is left out on all
 * ranks. */
static void leave_out(struct trainer *t, const char *what)
{
    struct graph *g = &t->train.g;
    for (int i = 0; i < g->n_nodes; i++)
        if (strstr(g->nodes[i].name, what) != NULL) {
            for (enum phase_id ph = 0; ph < PH_COUNT; ph++)
                if (g->nodes[i].phase[ph].fn != NULL)
                    g->nodes[i].phase[ph].fn = do_nothing;
            return;
        }
    fail_msg("training has no node like %s", what);
}
static void no_reduction(struct trainer *t) { leave_out(t, "reduce"); }
static void no_gather(struct trainer *t) { leave_out(t, "gather"); }

static void missing_reduction_is_found(void **state)
{
    (void)state;
    expect_found("*-*-", "DP2", &(struct verify_sabotage){.trainer = no_reduction}, "weight, rank");
    expect_found("*E*E", "DP2 x EP2", &(struct verify_sabotage){.trainer = no_reduction}, "weight, rank");
    expect_found("*-*-", "DP4", &(struct verify_sabotage){.trainer = no_gather}, "weight, rank");
}

/* ---- mistakes that other programs have had, made on purpose ---------------------------------- */

/* What a node of this rank did before it was changed. Ranks are threads. */
static _Thread_local struct {
    step_fn fn;
    const struct model *m;
} before;

static void replace(struct graph *g, const char *name, step_fn fn)
{
    for (int i = 0; i < g->n_nodes; i++)
        for (enum phase_id ph = 0; strcmp(g->nodes[i].name, name) == 0 && ph < PH_COUNT; ph++)
            if (g->nodes[i].phase[ph].fn != NULL) {
                before.fn = g->nodes[i].phase[ph].fn;
                g->nodes[i].phase[ph].fn = fn;
                return;
            }
    fail_msg("there is no node %s", name);
}

/* Sums of squares are in the order of the table; those of experts become nothing. */
static int norm_without_experts(const struct step_ctx *c)
{
    int at = 0;
    TRY(before.fn(c));
    for (int k = 0; k < before.m->params.n; k++) {
        const struct param *p = &before.m->params.list[k].p;
        if (p->buffer || shard_of(before.m, k).n == 0)
            continue;
        if (p->expert)
            ((double *)c->t[1].data)[at] = 0;
        at++;
    }
    return ST_OK;
}
static void leave_experts_out_of_the_norm(struct trainer *t)
{
    before.m = &t->model;
    replace(&t->optim.g, "update.norm", norm_without_experts);
}

/* A scatter that takes this rank's rows of its own part, without the parts of the others. */
static int take_own_rows(const struct step_ctx *c)
{
    enum { ALL, PART };
    int64_t bytes = tensor_bytes(&c->t[PART]);
    const struct model *m = before.m;
    memcpy(c->t[PART].data, (char *)c->t[ALL].data + m->mesh.tp_rank * bytes, (size_t)bytes);
    return ST_OK;
}

/* Gradients of experts are counted once for each rank of their group too often. */
static int reduce_twice(const struct step_ctx *c)
{
    TRY(before.fn(c));
    TRY(before.fn(c)); /* the own piece is a sum already, and is summed again with the others' */
    return ST_OK;
}
static void count_experts_twice(struct trainer *t) { replace(&t->train.g, "1.unit.reduce_experts", reduce_twice); }

/* The unit of the router and of the norm in front of it. */
static void leave_out_the_router(struct trainer *t) { replace(&t->train.g, "1.unit.reduce", do_nothing); }

/* The second gather of a unit, for its backward pass, brings nothing. */
static int gather_forward_only(const struct step_ctx *c)
{
    for (int u = 1; c->phase->n_uses > u; u += 2)
        memset(c->t[u].data, 0, (size_t)tensor_bytes(&c->t[u]));
    return ST_OK;
}
static void forget_the_second_gather(struct trainer *t)
{
    struct graph *g = &t->train.g;
    for (int i = 0; i < g->n_nodes; i++)
        if (strcmp(g->nodes[i].name, "2.unit.gather") == 0)
            g->nodes[i].phase[PH_REPLAY].fn = gather_forward_only;
}

/* What tensor-parallel ranks have in common: gains of norms, routers, the gate of a shared expert. */
static void replicated_reduction_lost(struct trainer *t)
{
    replace(&t->train.g, "0.unit.reduce_replicated", do_nothing);
}
static void replicated_reduction_of_experts_lost(struct trainer *t)
{
    replace(&t->train.g, "1.unit.reduce_replicated", do_nothing);
}

/* A layer's output is what this rank's channels give. */
static void rows_are_not_summed(struct trainer *t)
{
    before.m = &t->model;
    replace(&t->train.g, "1.tp.scattered", take_own_rows);
}

/* The gradient of the input is that of a rank's own heads. */
static void input_gradient_is_not_summed(struct trainer *t)
{
    struct graph *g = &t->train.g;
    before.m = &t->model;
    for (int i = 0; i < g->n_nodes; i++)
        if (strcmp(g->nodes[i].name, "0.tp.gathered") == 0) {
            g->nodes[i].phase[PH_BWD].fn = take_own_rows;
            return;
        }
    fail_msg("attention gathers nothing");
}

/* Each of the ranks that share an expert has the rows of its own tokens only. */
static int keep_own_rows(const struct step_ctx *c)
{
    enum { Y = 5 }; /* what arrives */
    const struct mesh *m = &before.m->mesh;
    int64_t part = tensor_bytes(&c->t[Y]) / m->etp;
    TRY(before.fn(c));
    for (int r = 0; r < m->etp; r++)
        if (r != m->etp_rank)
            memset((char *)c->t[Y].data + r * part, 0, (size_t)part);
    return ST_OK;
}
static void rows_are_not_gathered_over_etp(struct trainer *t)
{
    before.m = &t->model;
    replace(&t->train.g, "1.moe.dispatch", keep_own_rows);
}

/* Slices of experts are taken for copies: their gradients are added up. */
static int reduce_over_slices(const struct step_ctx *c)
{
    struct mesh *m = (struct mesh *)(uintptr_t)&before.m->mesh;
    struct comm *copies = m->edp_comm;
    m->edp_comm = m->etp_comm;
    int st = before.fn(c);
    m->edp_comm = copies;
    return st;
}
static void slices_are_reduced_as_copies(struct trainer *t)
{
    before.m = &t->model;
    replace(&t->train.g, "1.unit.reduce_experts", reduce_over_slices);
}

/* Loads of routers are those of a rank's own rows. */
static void batch_load_is_not_summed(struct trainer *t) { replace(&t->train.g, "1.moe.sequence_sum", do_nothing); }

/* Every rank's heads count the same, whatever their share of entries. */
static int forget_shares(const struct step_ctx *c)
{
    TRY(before.fn(c));
    for (int u = 0; u < c->phase->n_uses; u++)
        if (c->phase->use[u].mode == USE_WRITE)
            memset(c->t[u].data, 0, (size_t)tensor_bytes(&c->t[u]));
    return ST_OK;
}
static void shares_are_not_collected(struct trainer *t) { replace(&t->train.g, "0.csa.index_masses", forget_shares); }

static void mistakes_of_other_programs_are_found(void **state)
{
    static const struct {
        const char *name, *pattern, *variant, *where;
        void (*trainer)(struct trainer *t);
    } cases[] = {
        /* NVIDIA/Megatron-LM 7452, finding 11: the gain of GDN's norm, which heads of several ranks share, is not
         * summed */
        {"gdn_out_norm_not_summed_over_tp", "G-G-", "TP2", "layers.0.", replicated_reduction_lost},
        /* the same for the norms of queries and keys, and for what is replicated in front of any layer */
        {"norm_not_summed_over_tp", "*-*-", "TP2", "layer_norm_weight", replicated_reduction_lost},
        /* torchtitan 4054, 1878: the router and all below it lose their sum over tp when EP is off, and when it is on
         * */
        {"router_not_summed_over_tp_without_ep", "*E*E", "TP2", "layers.1.", replicated_reduction_of_experts_lost},
        {"router_not_summed_over_tp_with_ep", "*E*E", "TP2 x EP2", "layers.1.", replicated_reduction_of_experts_lost},
        {"router_loss_of_own_rows_only", "*E*E", "TP2", "", batch_load_is_not_summed},
        /* NVIDIA/Megatron-LM 5916 with EP > 1 and TP > 1 */
        {"expert_norm_left_out_under_tp", "*E*E", "TP2 x EP2", "", leave_experts_out_of_the_norm},
        {"expert_norm_left_out_under_etp", "*E*E", "ETP2", "", leave_experts_out_of_the_norm},
        {"rows_not_gathered_over_etp", "*E*E", "ETP2 x EP2", "", rows_are_not_gathered_over_etp},
        /* the same: gradients of experts are mixed with EP = 1 and ETP != TP */
        {"slices_of_experts_taken_for_copies", "*E*E", "ETP2 x 2 copies, zero 2", "mlp.experts",
         slices_are_reduced_as_copies},
        {"layer_output_not_summed_over_tp", "*-*-", "TP2", "", rows_are_not_summed},
        {"input_gradient_not_summed_over_tp", "*-*-", "TP2", "", input_gradient_is_not_summed},
        /* sparse attention: the indexer learns from the heads of one rank */
        {"indexer_not_summed_over_tp", "D-D-", "TP2", "layers.0.", replicated_reduction_lost},
        /* compressed attention: entries get another share of every rank's attention */
        {"indexer_without_shares", "C-C-", "TP2", "indexer", shares_are_not_collected},
        /* NVIDIA/Megatron-LM 5916: the norm, and with it clipping, leaves out experts with EP > 1 */
        {"expert_norm_left_out", "*E*E", "EP2", "", leave_experts_out_of_the_norm},
        /* pytorch 160285: gradients of experts are too large by a factor when they are shared */
        {"expert_gradients_counted_twice", "*E*E", "DP2 x EP2", "mlp.experts", count_experts_twice},
        /* torchtitan 4054: the router loses its reduction when EP is off */
        {"router_reduction_lost_without_ep", "*E*E", "DP2", "layers.1.", leave_out_the_router},
        /* the same mistake for every sharded form */
        {"zero2_reduction_lost", "*-*-", "DP2, zero 2", "", no_reduction},
        {"zero3_gather_lost", "*-*-", "DP2, zero 3", "", forget_the_second_gather},
    };
    (void)state;
    for (int i = 0; i < countof(cases); i++) {
        print_message("           %s\n", cases[i].name);
        expect_found(cases[i].pattern, cases[i].variant, &(struct verify_sabotage){.trainer = cases[i].trainer},
                     cases[i].where);
    }
}

/* The part of an adapter that every tensor-parallel rank has: its gradient is a part of a sum. */
static void an_adapter_that_is_not_summed_is_found(void **state)
{
    (void)state;
    struct fixture f;
    struct verify_row row;
    fixture_open(&f, "*-*-");
    set(&f.user, "lora.rank", "4");
    fixture_run(&f);
    assert_ok(verify_run(f.v, variant_named("TP2"), &(struct verify_sabotage){.trainer = replicated_reduction_lost},
                         &row, &f.e),
              &f.e);
    assert_int_equal(row.outcome, VERIFY_DIFFERS);
    assert_non_null(strstr(row.where, "adapter"));
    fixture_close(&f);
}

/* One rank scales its second loss twice as much. */
static void scale_twice(struct config *c, int rank)
{
    if (rank == 1)
        set(c, "model.mtp_scale", "0.6");
}

static void wrong_scale_is_found(void **state)
{
    (void)state;
    expect_found("*-*-/*-", "DP2", &(struct verify_sabotage){.config = scale_twice}, "mtp.layers.0");
}

/* Stage 0 builds what stage 1 should, and the other way round. */
static void swap_segments(struct config *c, int rank)
{
    char text[64];
    (void)rank;
    const char *bar = strchr(c->model.pattern, '|');
    assert_non_null(bar);
    snprintf(text, sizeof text, "%s|%.*s", bar + 1, (int)(bar - c->model.pattern), c->model.pattern);
    set(c, "model.pattern", text);
}

static void swapped_segment_is_found(void **state)
{
    (void)state;
    expect_found("*-M-", "PP2", &(struct verify_sabotage){.config = swap_segments}, "decoder.layers.");
}

/* Ranks answer for other slices than they hold, as a checkpoint of experts that are all written as those of rank 0. */
static void answer_for_the_first_slice(struct trainer *t)
{
    for (int k = 0; k < t->model.params.n; k++)
        t->model.params.list[k].p.shard.first = 0;
}

static void a_wrong_checkpoint_is_found(void **state)
{
    (void)state;
    struct fixture f;
    struct verify_row row;
    fixture_open(&f, "*E*E");
    fixture_run(&f);
    assert_ok(verify_run(f.v, variant_named("EP2"), NULL, &row, &f.e), &f.e);
    assert_true(row.outcome <= VERIFY_CLOSE && row.saved <= VERIFY_ALLOWED);
    assert_ok(verify_run(f.v, variant_named("EP2"), &(struct verify_sabotage){.trainer = answer_for_the_first_slice},
                         &row, &f.e),
              &f.e);
    assert_int_equal(row.outcome, VERIFY_DIFFERS);
    assert_true(row.saved > VERIFY_ALLOWED);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(balance_over_a_step_agrees),
        cmocka_unit_test(vocabularies_and_rows_fit),
        cmocka_unit_test(a_sample_has_every_pair),
        cmocka_unit_test(codes_agree_with_those_of_one_rank),
        cmocka_unit_test(adapters_agree_on_every_level),
        cmocka_unit_test(all_ways_agree),
        cmocka_unit_test(missing_reduction_is_found),
        cmocka_unit_test(wrong_scale_is_found),
        cmocka_unit_test(mistakes_of_other_programs_are_found),
        cmocka_unit_test(swapped_segment_is_found),
        cmocka_unit_test(a_wrong_checkpoint_is_found),
        cmocka_unit_test(an_adapter_that_is_not_summed_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
