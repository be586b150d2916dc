/* parallel.cp: ranks that divide every sequence train the model of one rank, whatever a layer needs of the other parts
 * (keys, states, rows of a convolution, labels of later tokens, balance over experts), and mistakes that other programs
 * have had, made on purpose, are found. */
#include "verify_fixture.h"

#include <stdlib.h>

/* Documents of a few bytes, so that they begin and end on either side of every border. */
static void write_documents(struct fixture *f)
{
    char folder[512];
    snprintf(folder, sizeof folder, "%s/documents", f->dir);
    assert_ok(file_make_dirs(folder, &f->e), &f->e);
    for (int i = 0; i < 60; i++) {
        char path[600], text[64];
        int n = 3 + (i * 7) % 23;
        for (int k = 0; k < n; k++)
            text[k] = (char)('a' + (i * 5 + k * k) % 26);
        snprintf(path, sizeof path, "%s/%02d", folder, i);
        assert_ok(file_write_atomic(path, text, (size_t)n, &f->e), &f->e);
    }
    assert_ok(config_set(&f->small, "data.train", folder, NULL, &f->e), &f->e);
}

static void fixture_open(struct fixture *f, const char *options)
{
    fixture_begin(f, options);
    assert_ok(verify_config(&f->small, &f->user, f->dir, &f->e), &f->e);
    write_documents(f);
    assert_ok(config_set(&f->small, "model.vocab", "260", NULL, &f->e), &f->e); /* ranks of parallel.tp share it */
    assert_ok(verify_open(&f->v, &f->small, &f->e), &f->e);
}

static struct verify_row run(struct fixture *f, const char *variant, void (*wrong)(struct trainer *t))
{
    struct verify_row row;
    struct verify_sabotage s = {.trainer = wrong};
    assert_ok(verify_run(f->v, variant_named(variant), wrong != NULL ? &s : NULL, &row, &f->e), &f->e);
    return row;
}

/* ---- everything right ------------------------------------------------------------------------ */

#define PACKED " data.eod=on data.eod_mask=on"
static const char *const models[] = {
    /* attention with all that looks at positions */
    "model.pattern=*-*-/*- model.attn_window=5 model.attn_sink=learnable model.qk_norm=on model.attn_gate=on "
    "model.attention_dropout=0.2 model.dropout=0.1" PACKED,
    "model.pattern=*-*- model.qk_norm=row model.rope=none model.attn_sink=off_by_one model.bias=on",
    "model.pattern=*-*-/*-/*- model.norm=layer model.position=learned model.rope=none model.dropout=0.1",
    /* two ranks of parallel.tp share the keys and values of a group */
    "model.pattern=*-*-/*- model.kv_heads=1 model.attn_window=5 model.qk_norm=on model.attn_gate=on "
    "model.attention_dropout=0.2 model.bias=on" PACKED,
    "model.pattern=*-*- model.kv_heads=1 model.rope=none model.attn_sink=learnable lora.rank=4",
    /* adapters: most weights are frozen, messages stay */
    "model.pattern=*-M- lora.rank=4",
    /* latent attention, with and without a latent of queries */
    "model.pattern=+-+-/+- model.attention_dropout=0.3" PACKED,
    "model.pattern=+-+- model.mla_q_rank=10 model.bias=on",
    /* sparse attention: more tokens than are selected, its loss over all keys and over the selected ones; dense */
    "model.pattern=D-D-/D- model.dropout=0.1 model.dsa_indexer_use_sparse_loss=off" PACKED,
    "model.pattern=D-D- model.mla_q_rank=10 model.dsa_indexer_use_sparse_loss=on model.mhc_streams=2 "
    "model.mhc_gating=0.7",
    "model.pattern=D-DE model.experts=8 model.topk=2 model.dsa_dense_warmup=on" PACKED,
    /* compressed attention: fewer entries selected than there are, its loss over all and over the selected ones */
    "model.pattern=W-C-H-/C- model.mla_q_rank=10 model.dropout=0.1 model.bias=on" PACKED,
    "model.pattern=C-HEC- model.mla_q_rank=10 model.dsa_indexer_use_sparse_loss=on model.experts=8 model.topk=2 "
    "model.mhc_streams=2 model.mhc_gating=0.7",
    /* recurrent layers, hyper-connections */
    "model.pattern=M*M-/M- model.dropout=0.1 model.mhc_streams=2 model.mhc_gating=0.7" PACKED,
    "model.pattern=M-M- model.mamba_conv=2 model.mamba_norm=whole model.tied=off",
    "model.pattern=G*G-/G- model.mhc_streams=4 model.mhc_gating=0.7" PACKED,
    "model.pattern=G-G- model.gdn_conv=1 model.norm_zero_centered=on",
    /* experts */
    "model.pattern=*EME model.experts=8 model.topk=2 model.aux_loss=0.1 model.seq_aux_loss=0.2 "
    "model.router_z_loss=0.01 "
    "model.router_jitter=0.1 model.shared_ffn=512" PACKED,
    "model.pattern=*EGE model.experts=8 model.topk=2 model.router_score=sigmoid model.router_bias=on "
    "model.global_aux_loss=0.1",
};

static void parts_of_sequences_train_the_model_of_one_rank(void **state)
{
    (void)state;
    static const char *const variants[] = {"CP2",
                                           "CP4",
                                           "CP2, recomputed, lanes in random order, poisoned",
                                           "DP2 x CP2, zero 3",
                                           "CP2 x PP2",
                                           "CP4 x EP2, zero 2",
                                           "CP2, ring",
                                           "CP4, ring, recomputed, rest in host memory, lanes in random order, "
                                           "poisoned",
                                           "DP2 x CP2, ring, zero 3",
                                           "CP4 x PP2, ring, delayed",
                                           "TP2 x CP4, ring, zero 2",
                                           "TP2 x CP2",
                                           "TP2 x CP2 x EP4, zero 2"};
    int with_tp = 0; /* models that parallel.tp takes */
    for (int m = 0; m < countof(models); m++) {
        struct fixture f;
        fixture_open(&f, models[m]);
        for (int i = 0; i < countof(variants); i++) {
            if (!verify_applies(&f.small, variant_named(variants[i])))
                continue;
            struct verify_row row = run(&f, variants[i], NULL);
            bool tp = variant_named(variants[i])->tp > 1;
            if (tp && row.outcome == VERIFY_REFUSED)
                continue;
            with_tp += tp;
            if (row.outcome > VERIFY_CLOSE)
                fail_msg("%s on %s: loss %g, norm %g, gradient %g, parameter %g in %s %s", models[m], variants[i],
                         row.loss, row.norm, row.grad, row.param, row.where, row.why.msg);
        }
        fixture_close(&f);
    }
    assert_true(with_tp >= 17);
}

/* ---- wrong on purpose ------------------------------------------------------------------------ */

/* What a phase of this rank did before it was changed. Ranks are threads. */
static _Thread_local step_fn before;
static _Thread_local const struct graph *graph;

static void replace(struct trainer *t, const char *name, enum phase_id ph, step_fn fn)
{
    graph = &t->train.g;
    for (int i = 0; i < t->train.g.n_nodes; i++) {
        struct phase *p = &t->train.g.nodes[i].phase[ph];
        if (strcmp(t->train.g.nodes[i].name, name) == 0 && p->fn != NULL) {
            before = p->fn;
            p->fn = fn;
            return;
        }
    }
    fail_msg("there is no node %s", name);
}

/* The messages travel, but what came counts as zeros. */
static int and_forget(const struct step_ctx *c)
{
    TRY(before(c));
    for (int u = 0; u < c->phase->n_uses; u++)
        if (c->phase->use[u].mode == USE_WRITE && c->t[u].data != NULL)
            memset(c->t[u].data, 0, (size_t)tensor_bytes(&c->t[u]));
    return ST_OK;
}
static int only_travel(const struct step_ctx *c)
{
    (void)c;
    return ST_OK;
}

static const struct tensor *input(const struct step_ctx *c, const char *slot)
{
    for (int u = 0; u < c->phase->n_uses; u++)
        if (c->t[u].data != NULL && strcmp(graph->slots[c->phase->use[u].slot].name, slot) == 0)
            return &c->t[u];
    return NULL;
}

/* Labels of a prediction depth are shifted after the cut: the last place of a part has none. */
static int labels_cut(const struct step_ctx *c)
{
    TRY(before(c));
    const struct tensor *t = input(c, "batch.next_label0");
    if (t != NULL)
        ((int32_t *)t->data)[tensor_elems(t) - 1] = -1;
    return ST_OK;
}

/* Every rank counts positions from its own first token. */
static int positions_from_zero(const struct step_ctx *c)
{
    TRY(before(c));
    const struct tensor *t = input(c, "batch.pos");
    for (int64_t i = 0; i < tensor_elems(t); i++)
        ((int32_t *)t->data)[i] %= (int32_t)min_i64(tensor_elems(t), 8);
    return ST_OK;
}

/* Dropout draws by the place in the part, not in the sequence. */
static int draws_by_part(const struct step_ctx *c)
{
    TRY(before(c));
    ((int64_t *)input(c, "batch.info")->data)[2] = 0;
    return ST_OK;
}

/* Documents are told apart by the place in the part. */
static int documents_by_part(const struct step_ctx *c)
{
    TRY(before(c));
    const struct tensor *local = input(c, "batch.doc_local"), *whole = input(c, "batch.doc_start");
    memcpy(local->data, whole->data, (size_t)tensor_bytes(whole));
    return ST_OK;
}

static void lose_gradients_of_keys(struct trainer *t) { replace(t, "0.attn.kv", PH_BWD, and_forget); }
static void lose_a_block_of_keys(struct trainer *t) { replace(t, "0.attn.hop1", PH_FWD, and_forget); }
static void lose_a_block_of_keys_later(struct trainer *t) { replace(t, "0.attn.back1.hop", PH_BWD, and_forget); }
static void lose_gradients_on_the_way(struct trainer *t) { replace(t, "0.attn.back2.grad", PH_BWD, and_forget); }
static void lose_gradients_that_come_home(struct trainer *t) { replace(t, "0.attn.home0", PH_BWD, and_forget); }
static void lose_gradients_of_latent_keys(struct trainer *t) { replace(t, "0.mla.kv_rows", PH_BWD, and_forget); }
static void lose_gradients_of_sparse_keys(struct trainer *t) { replace(t, "0.dsa.key_rows", PH_BWD, and_forget); }
static void lose_gradients_of_index_keys(struct trainer *t) { replace(t, "0.dsa.index_rows", PH_BWD, and_forget); }
static void lose_gradients_of_window(struct trainer *t) { replace(t, "0.csa.kv_halo", PH_BWD, and_forget); }
static void lose_gradients_of_entries(struct trainer *t) { replace(t, "0.csa.entry_rows", PH_BWD, and_forget); }
static void lose_gradients_of_indexer_entries(struct trainer *t) { replace(t, "0.csa.index_rows", PH_BWD, and_forget); }
static void lose_the_window_before(struct trainer *t) { replace(t, "0.csa.comp_halo", PH_FWD, and_forget); }
static void lose_gradients_of_window_before(struct trainer *t) { replace(t, "0.csa.comp_halo", PH_BWD, and_forget); }
static void lose_the_state(struct trainer *t) { replace(t, "0.mamba.pass1", PH_FWD, and_forget); }
static void lose_the_gradient_of_the_state(struct trainer *t) { replace(t, "0.mamba.pass1", PH_BWD, and_forget); }
static void lose_the_state_of_gdn(struct trainer *t) { replace(t, "0.gdn.pass1", PH_FWD, and_forget); }
static void lose_the_halo(struct trainer *t) { replace(t, "0.gdn.halo", PH_FWD, and_forget); }
static void lose_the_gradient_of_the_halo(struct trainer *t) { replace(t, "0.mamba.halo", PH_BWD, and_forget); }
static void balance_parts_alone(struct trainer *t) { replace(t, "1.moe.sequence_sum", PH_FWD, only_travel); }
static void cut_labels(struct trainer *t) { replace(t, "batch.batch", PH_FWD, labels_cut); }
static void count_positions_from_zero(struct trainer *t) { replace(t, "batch.batch", PH_FWD, positions_from_zero); }
static void draw_by_part(struct trainer *t) { replace(t, "batch.batch", PH_FWD, draws_by_part); }
static void documents_of_the_part(struct trainer *t) { replace(t, "batch.batch", PH_FWD, documents_by_part); }

static void mistakes_of_other_programs_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *name, *options;
        void (*wrong)(struct trainer *t);
        const char *variant;
    } cases[] = {
        /* NVIDIA/Megatron-LM 1464, 1465 and TransformerEngine 1557: gradients of attention are wrong under CP */
        {"cp_gradients_of_keys_lost", "model.pattern=*-*-", lose_gradients_of_keys, "CP2"},
        {"cp_gradients_of_latent_keys_lost", "model.pattern=+-+-", lose_gradients_of_latent_keys, "CP2"},
        /* Megatron-LM 5809: gradients of the indexer are zero under CP */
        {"cp_gradients_of_sparse_keys_lost", "model.pattern=D-D-", lose_gradients_of_sparse_keys, "CP2"},
        {"cp_gradients_of_index_keys_lost", "model.pattern=D-D-", lose_gradients_of_index_keys, "CP2"},
        /* the same of compressed attention, and what its entries are made of */
        {"cp_gradients_of_window_lost", "model.pattern=W-W- model.mla_q_rank=10", lose_gradients_of_window, "CP2"},
        {"cp_gradients_of_entries_lost", "model.pattern=H-H- model.mla_q_rank=10", lose_gradients_of_entries, "CP2"},
        {"cp_gradients_of_indexer_entries_lost", "model.pattern=C-C- model.mla_q_rank=10",
         lose_gradients_of_indexer_entries, "CP2"},
        {"cp_window_before_missing", "model.pattern=C-C- model.mla_q_rank=10", lose_the_window_before, "CP2"},
        {"cp_gradients_of_window_before_lost", "model.pattern=H-H- model.mla_q_rank=10" PACKED,
         lose_gradients_of_window_before, "CP2"},
        /* Megatron-LM 5706: prediction depths with contiguous chunks */
        {"cp_labels_shifted_after_the_cut", "model.pattern=*-*-/*-", cut_labels, "CP2"},
        {"cp_positions_from_zero", "model.pattern=*-*-", count_positions_from_zero, "CP2"},
        {"cp_dropout_by_part", "model.pattern=*-*- model.dropout=0.2", draw_by_part, "CP2"},
        {"cp_attention_dropout_by_part", "model.pattern=*-*- model.attention_dropout=0.2", draw_by_part, "CP2"},
        {"cp_balance_of_parts_alone", "model.pattern=*E*E model.experts=8 model.seq_aux_loss=0.3", balance_parts_alone,
         "CP2"},
        {"cp_state_not_passed", "model.pattern=M-M-", lose_the_state, "CP2"},
        {"cp_gradient_of_state_not_passed", "model.pattern=M-M-", lose_the_gradient_of_the_state, "CP2"},
        {"cp_state_of_delta_net_not_passed", "model.pattern=G-G-", lose_the_state_of_gdn, "CP2"},
        {"cp_halo_missing", "model.pattern=G-G-", lose_the_halo, "CP2"},
        {"cp_gradient_of_halo_missing", "model.pattern=M-M-", lose_the_gradient_of_the_halo, "CP2"},
        {"cp_documents_by_part", "model.pattern=M-M-" PACKED, documents_of_the_part, "CP2"},
        /* a ring: a block that does not come, forward or backward; its gradients lost on the way, or at the end of it
         * */
        {"ring_block_lost", "model.pattern=*-*-", lose_a_block_of_keys, "CP2, ring"},
        {"ring_block_lost_backward", "model.pattern=*-*-", lose_a_block_of_keys_later, "CP2, ring"},
        {"ring_gradients_lost_on_the_way", "model.pattern=*-*-", lose_gradients_on_the_way,
         "CP4, ring, recomputed, rest in host memory, lanes in random order, poisoned"},
        {"ring_gradients_lost_at_home", "model.pattern=*-*-", lose_gradients_that_come_home, "CP2, ring"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct fixture f;
        print_message("           %s\n", cases[i].name);
        fixture_open(&f, cases[i].options);
        assert_true(run(&f, cases[i].variant, NULL).outcome <= VERIFY_CLOSE);
        assert_int_equal(run(&f, cases[i].variant, cases[i].wrong).outcome, VERIFY_DIFFERS);
        fixture_close(&f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_sequences_train_the_model_of_one_rank),
        cmocka_unit_test(mistakes_of_other_programs_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
