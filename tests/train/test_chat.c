/* train/: models trained on conversations: no gradient goes from one conversation's loss to another's tokens, whatever
 * layers there are; losses follow the roles. */
#include "run.h"

static const char lines[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"ABC\"},{\"role\":\"assistant\",\"content\":\"DEF\"}]}\n"
    "{\"messages\":[{\"role\":\"user\",\"content\":\"abc\"},{\"role\":\"assistant\",\"content\":\"def\"}]}\n";
static const char own_template[] = "user = \"U{content}\\n\"\nassistant = \"V{content}\\n\"\nstop = \"\\n\"\n";

static const char *const models[] = {
    "model.pattern=*-*-",
    "model.pattern=+- model.mla_kv_rank=8 model.mla_nope=4 model.mla_rope=2 model.mla_v=4",
    "model.pattern=M-M- model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 model.mamba_chunk=3",
    "model.pattern=G-G- model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 model.gdn_value_dim=4 "
    "model.gdn_chunk=3",
    "model.pattern=[M-][*E]/*- model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 model.mamba_chunk=3 "
    "model.experts=4 "
    "model.aux_loss=0 model.topk=2 model.mhc_streams=2",
};

enum { SEQ = 24 };

/* Both conversations in one row: [0, *cut) and from *cut on. */
static void one_row(const char *dir, struct batch *b, int64_t *cut)
{
    struct err e = {0};
    struct tokenizer tok;
    struct chat_template chat;
    struct dataset *ds;
    char *path = path_join(dir, "c.jsonl"), *form = path_join(dir, "own.template");
    assert_ok(file_write_atomic(path, lines, sizeof lines - 1, &e), &e);
    assert_ok(file_write_atomic(form, own_template, sizeof own_template - 1, &e), &e);
    assert_ok(tokenizer_open(&tok, "bytes", false, &e), &e);
    assert_ok(chat_template_open(&chat, form, &tok, &e), &e);
    struct data_opts o = {.paths = path,
                          .seq = SEQ,
                          .vocab = 256,
                          .tokenizer = &tok,
                          .eod = -1,
                          .chat = &chat,
                          .loss_roles = "assistant",
                          .cache_dir = dir};
    struct batch_opts how = {.micro_batch = 1, .global_batch = 1, .dp_size = 1, .eod = -1, .ahead = 1, .keep = 1};
    assert_ok(dataset_open(&ds, &o, &e), &e);
    assert_int_equal(dataset_n_samples(ds), 1);
    assert_ok(batch_alloc(b, 1, SEQ, &e), &e);
    assert_ok(batch_fill(b, ds, &how, 0, 0, &e), &e);
    for (*cut = 1; b->doc_start[*cut] == 0; ++*cut)
        ;
    dataset_close(ds);
    chat_template_close(&chat);
    tokenizer_close(&tok);
    free(path);
    free(form);
}

/* Largest gradient of the embedding of a token that only one of the two conversations holds. */
static double embedding_gradient(struct tiny *t, const struct batch *b, int64_t from, int64_t to)
{
    int k = param_find(&t->m.params, "embedding.word_embeddings.weight");
    assert_true(k >= 0);
    struct tensor g = model_grad(&t->m, k);
    double most = 0;
    for (int64_t i = from; i < to; i++) {
        bool letter = (b->tokens[i] >= 'A' && b->tokens[i] <= 'F') || (b->tokens[i] >= 'a' && b->tokens[i] <= 'f');
        for (int64_t h = 0; letter && h < t->c.model.hidden; h++)
            most = fmax(most, fabs(tensor_get(&g, b->tokens[i] * t->c.model.hidden + h)));
    }
    return most;
}

static void no_gradient_goes_from_one_conversation_to_another(void **state)
{
    (void)state;
    static const double mtp_scale[MTP_MAX_DEPTHS] = {1, 1};
    char *dir = temp_dir();
    struct err e = {0};
    struct batch b;
    int64_t cut;
    one_row(dir, &b, &cut);
    assert_int_equal(cut, 10); /* U A B C \n V D E F \n */
    for (int64_t i = 0; i < SEQ; i++) {
        bool reply = i == 5 || i == 6 || i == 7 || i == 8 || i == 15 || i == 16 || i == 17 || i == 18;
        assert_int_equal(b.labels[i] >= 0, reply); /* the reply and what ends it */
        if (i < cut)
            b.labels[i] = -1; /* the loss is the second conversation's alone */
    }
    for (int k = 0; k < countof(models); k++)
        for (int separate = 0; separate < 2; separate++) {
            struct tiny t;
            char options[1024];
            int32_t doc[SEQ] = {0}, pos[SEQ];
            snprintf(options, sizeof options, "train.seq=%d train.micro_batch=1 model.vocab=256 model.tied=off %s %s",
                     SEQ, models[k], separate ? "data.chat=chatml" : "");
            for (int i = 0; i < SEQ; i++)
                pos[i] = i;
            tiny_open(&t, options, DEV_REF, 1);
            struct run_info run = {.first_mb = true,
                                   .scale = 1,
                                   .mtp_scale = mtp_scale,
                                   .tokens = b.tokens,
                                   .labels = b.labels,
                                   .pos = separate ? b.pos : pos,
                                   .doc_start = separate ? b.doc_start : doc};
            assert_ok(exec_run(&t.x, &t.train.p, &run, &t.e), &t.e);
            double first = embedding_gradient(&t, &b, 0, cut), second = embedding_gradient(&t, &b, cut, SEQ);
            if (separate ? first != 0 : first == 0)
                fail_msg("%s: the first conversation's gradient is %g, %s", models[k], first,
                         separate ? "a leak" : "the test is blind");
            assert_true(second > 0);
            tiny_close(&t);
        }
    batch_release(&b);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

/* Labels of a step are those of the replies, and its loss is their mean. */
static void the_loss_counts_replies_alone(void **state)
{
    (void)state;
    static const char *const roles[] = {"assistant", "user", "all"};
    static const int64_t learned[] = {4, 4, 8}; /* tokens of a conversation: three letters and what ends them */
    struct playground pg;
    struct err e = {0};
    playground_open(&pg);
    char *path = path_join(pg.dir, "c.jsonl"), *form = path_join(pg.dir, "own.template"), options[512];
    assert_ok(file_write_atomic(path, lines, sizeof lines - 1, &e), &e);
    assert_ok(file_write_atomic(form, own_template, sizeof own_template - 1, &e), &e);
    for (int k = 0; k < countof(roles); k++) {
        struct config c;
        struct trainer t;
        struct step_result r;
        snprintf(options, sizeof options, "data.train=%s data.chat=%s data.loss_roles=%s train.seq=%d run.save_every=0",
                 path, form, roles[k], SEQ);
        run_config(&c, &pg, options);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        assert_ok(trainer_step(&t, &r, &e), &e);
        assert_int_equal(t.labels[0], 4 * 2 * learned[k]); /* four samples of two conversations */
        assert_true(fabs(r.loss - log(256)) < 0.5);
        trainer_close(&t);
        config_release(&c);
    }
    free(path);
    free(form);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_gradient_goes_from_one_conversation_to_another),
                                       cmocka_unit_test(the_loss_counts_replies_alone)};
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
