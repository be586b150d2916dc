/* train/: what each kind of layer is for, learned from sequences made by a rule. Associative recall
 * needs a layer that looks up the past by content; selective copy needs one that chooses what to
 * remember. Every batch is fresh, so nothing can be learned by heart. */
#include "tiny.h"
#include "train/train.h"

/* Untied, and one head as wide as the model: with tied embeddings or four heads of 8, attention
 * finds the lookup late, and for some seeds not in hundreds of updates. */
#define COMMON                                                                                                         \
    "model.hidden=32 model.ffn=64 model.heads=1 model.kv_heads=1 model.tied=off "                                      \
    "model.init_std=0.1 "                                                                                              \
    "model.mamba_head_dim=16 model.mamba_state=16 model.mamba_chunk=20 "                                               \
    "model.gdn_value_heads=4 model.gdn_key_heads=4 model.gdn_key_dim=16 model.gdn_value_dim=16 "                       \
    "model.gdn_chunk=16 train.micro_batch=32 "                                                                         \
    "train.schedule=constant train.warmup=20 train.lr=5e-3 train.weight_decay=0 run.seed=1 "

/* ---- the tasks ------------------------------------------------------------------------------- */

/* A row of a batch: tokens and labels of `seq` positions, -1 where there is nothing to answer. */
typedef void (*task_fn)(uint64_t key, int32_t *tokens, int32_t *labels);

static void shuffle(uint64_t key, int32_t *list, int n)
{
    for (int i = 0; i < n; i++)
        list[i] = i;
    for (int i = n - 1; i > 0; i--) {
        int k = (int)rng_below(key, (uint64_t)i, (uint64_t)i + 1);
        int32_t kept = list[i];
        list[i] = list[k];
        list[k] = kept;
    }
}

/* PAIRS keys, each followed by its value; then queries, each one of the keys, and the answer is its
 * value. The token after a query is that value, as in text. */
enum {
    PAIRS = 6,
    QUERIES = 10,
    KEYS = 16,
    VALUES = 16,
    RECALL_SEQ = 2 * (PAIRS + QUERIES),
    RECALL_VOCAB = KEYS + VALUES
};

static void recall_row(uint64_t key, int32_t *tokens, int32_t *labels)
{
    int32_t keys[KEYS];
    shuffle(rng_key(key, "keys"), keys, KEYS);
    for (int i = 0; i < PAIRS + QUERIES; i++) {
        bool query = i >= PAIRS;
        int pair = query ? (int)rng_below(rng_key(key, "queries"), (uint64_t)i, PAIRS) : i;
        int32_t value = KEYS + (int32_t)rng_below(rng_key(key, "values"), (uint64_t)pair, VALUES);
        tokens[2 * i] = keys[pair];
        tokens[2 * i + 1] = value;
        labels[2 * i] = query ? value : -1;
        labels[2 * i + 1] = -1;
    }
}

/* SLOTS symbols, COPIED of them with a mark before them; after the separator the marked ones in
 * order. Noise and copied symbols are of one alphabet: only the mark tells them apart. */
enum { SYMBOLS = 8, MARK = SYMBOLS, SEPARATOR, COPY_VOCAB, SLOTS = 12, COPIED = 4, COPY_SEQ = SLOTS + 2 * COPIED };

static void copy_row(uint64_t key, int32_t *tokens, int32_t *labels)
{
    int32_t place[SLOTS], answer[COPIED];
    int at = 0, n = 0;
    shuffle(rng_key(key, "place"), place, SLOTS);
    for (int i = 0; i < COPY_SEQ; i++)
        labels[i] = -1;
    for (int i = 0; i < SLOTS; i++) {
        int32_t symbol = (int32_t)rng_below(rng_key(key, "symbols"), (uint64_t)i, SYMBOLS);
        if (place[i] < COPIED) {
            tokens[at++] = MARK;
            answer[n++] = symbol;
        }
        tokens[at++] = symbol;
    }
    for (int i = 0; i < COPIED; i++) {
        tokens[at] = i == 0 ? SEPARATOR : answer[i - 1];
        labels[at++] = answer[i];
    }
    assert_int_equal(at, COPY_SEQ);
}

/* ---- a model that learns one of them --------------------------------------------------------- */

struct learner {
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan train, eval;
    struct optim optim;
    struct exec x;
    struct err e;
    task_fn task;
    int64_t rows, answers; /* positions in a batch, and those that count */
    int32_t *tokens, *labels, *pos, *doc;
};

static void learner_open(struct learner *l, const char *options, task_fn task)
{
    *l = (struct learner){.task = task};
    struct err *e = &l->e;
    struct config *c = &l->c;
    tiny_config(c, options);
    l->rows = c->train.micro_batch * c->train.seq;
    struct model_plan *plans[] = {&l->train, &l->eval};
    struct model_plan_opts train = {
        .name = "train", .mode = BUILD_TRAIN, .batch = c->train.micro_batch, .seq = c->train.seq};
    struct model_plan_opts eval = train;
    eval.name = "eval";
    eval.mode = BUILD_EVAL;
    eval.want_logits = true;
    assert_ok(dev_open(&l->dev, DEV_CPU, 1, e), e);
    assert_ok(model_init(&l->m, c, &l->dev, e), e);
    assert_ok(model_plan_build(&l->m, &l->train, &train, e), e);
    assert_ok(model_plan_build(&l->m, &l->eval, &eval, e), e);
    assert_ok(optim_build(&l->optim, &l->m, &l->train, e), e);
    assert_ok(model_commit(&l->m, plans, countof(plans), e), e);
    assert_ok(plan_bind(&l->optim.p, &l->m.mem, e), e);
    tiny_exec(&l->x, &l->dev, c);
    assert_ok(exec_prepare(&l->x, &l->train.p, e), e);
    assert_ok(exec_prepare(&l->x, &l->eval.p, e), e);
    assert_ok(exec_prepare(&l->x, &l->optim.p, e), e);
    assert_ok(model_init_params(&l->m, e), e);
    int32_t **all[] = {&l->tokens, &l->labels, &l->pos, &l->doc};
    for (int i = 0; i < countof(all); i++)
        assert_non_null(*all[i] = calloc((size_t)l->rows, sizeof(int32_t)));
    for (int64_t i = 0; i < l->rows; i++)
        l->pos[i] = (int32_t)(i % c->train.seq);
}

static void learner_close(struct learner *l)
{
    exec_release(&l->x);
    optim_release(&l->optim);
    model_plan_release(&l->train);
    model_plan_release(&l->eval);
    model_release(&l->m);
    dev_close(&l->dev);
    config_release(&l->c);
    free(l->tokens);
    free(l->labels);
    free(l->pos);
    free(l->doc);
}

/* Runs a plan on batch number `batch` of the stream `name`. */
static void run_batch(struct learner *l, const struct model_plan *plan, const char *name, int64_t batch)
{
    int64_t seq = l->c.train.seq, n = l->c.train.micro_batch;
    uint64_t stream = rng_key(1, name);
    for (int64_t i = 0; i < n; i++)
        l->task(rng_key(stream + (uint64_t)(batch * n + i), "row"), l->tokens + i * seq, l->labels + i * seq);
    l->answers = 0;
    for (int64_t i = 0; i < l->rows; i++)
        l->answers += l->labels[i] >= 0;
    struct run_info run = {.step = batch,
                           .first_sample = batch * n,
                           .first_mb = true,
                           .scale = 1.0 / (double)l->answers,
                           .mb_share = 1,
                           .tokens = l->tokens,
                           .labels = l->labels,
                           .pos = l->pos,
                           .doc_start = l->doc};
    assert_ok(exec_run(&l->x, &plan->p, &run, &l->e), &l->e);
}

static void learn(struct learner *l, int64_t from, int64_t until)
{
    double hyper[HYPER_COUNT];
    for (int64_t step = from; step < until; step++) {
        run_batch(l, &l->train, "train", step);
        optim_hyper(&l->optim, step, hyper);
        struct run_info run = {.step = step, .first_mb = true, .hyper = hyper};
        assert_ok(exec_run(&l->x, &l->optim.p, &run, &l->e), &l->e);
    }
}

/* Share of the answers whose largest logit is the right one, on sequences that
 * are not trained on. */
static double accuracy(struct learner *l)
{
    enum { BATCHES = 8 };
    int64_t right = 0, asked = 0;
    for (int64_t b = 0; b < BATCHES; b++) {
        run_batch(l, &l->eval, "held out", b);
        struct tensor logits = model_slot(&l->m, &l->eval, l->eval.logits);
        int64_t wide = logits.dim[1];
        for (int64_t i = 0; i < l->rows; i++) {
            int64_t best = 0;
            if (l->labels[i] < 0)
                continue;
            for (int64_t v = 1; v < l->c.model.vocab; v++)
                if (tensor_get(&logits, i * wide + v) > tensor_get(&logits, i * wide + best))
                    best = v;
            right += best == l->labels[i];
            asked++;
        }
    }
    return (double)right / (double)asked;
}

struct task {
    task_fn row;
    const char *sizes;
};
static const struct task recall = {recall_row, "train.seq=32 model.vocab=32"};
static const struct task copying = {copy_row, "train.seq=20 model.vocab=10"};

/* Heads of the gated delta net start by keeping 98 % or more of their memory at each token. At the
 * usual start, A in 1 .. 16, it is gone before the query comes, and 1000 updates get to 40 %. */
static void remember_longer(struct learner *l)
{
    for (int k = 0; k < l->m.params.n; k++) {
        struct tensor p = model_param(&l->m, k);
        if (strstr(l->m.params.list[k].p.key, "A_log") == NULL)
            continue;
        for (int64_t i = 0; i < tensor_elems(&p); i++)
            tensor_set(&p, i, -4 - 0.5 * (double)i);
    }
}

/* Accuracy after `steps` updates, or as soon as it is beyond doubt. */
static double learned(const struct task *task, const char *pattern, int64_t steps)
{
    enum { EVERY = 100 };
    char options[640];
    struct learner l;
    double share = 0;
    snprintf(options, sizeof options, COMMON "%s model.pattern=%s", task->sizes, pattern);
    learner_open(&l, options, task->row);
    if (strchr(pattern, 'G') != NULL)
        remember_longer(&l);
    for (int64_t step = 0; step < steps && share < 0.98; step += EVERY) {
        learn(&l, step, step + EVERY);
        share = accuracy(&l);
        print_message("%s after %d updates: %.1f %% right\n", pattern, (int)step + EVERY, 100 * share);
    }
    learner_close(&l);
    return share;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void tasks_fill_their_sequences(void **state)
{
    (void)state;
    int32_t tokens[RECALL_SEQ], labels[RECALL_SEQ];
    for (uint64_t key = 0; key < 50; key++) {
        int answers = 0;
        recall_row(key, tokens, labels);
        for (int i = 0; i < RECALL_SEQ; i++) {
            assert_in_range(tokens[i], i % 2 ? KEYS : 0, i % 2 ? RECALL_VOCAB - 1 : KEYS - 1);
            if (labels[i] < 0)
                continue;
            int first = 0; /* the key's first place is followed by its value */
            while (tokens[first] != tokens[i])
                first++;
            assert_true(first < 2 * PAIRS && tokens[first + 1] == labels[i]);
            answers++;
        }
        assert_int_equal(answers, QUERIES);
        answers = 0;
        copy_row(key, tokens, labels);
        for (int i = 0; i < COPY_SEQ - COPIED; i++)
            if (tokens[i] == MARK)
                assert_int_equal(tokens[i + 1], labels[COPY_SEQ - COPIED + answers++]);
        assert_int_equal(answers, COPIED);
        assert_int_equal(tokens[COPY_SEQ - COPIED], SEPARATOR);
    }
}

static void attention_recalls_the_value_of_a_key(void **state)
{
    (void)state;
    assert_true(learned(&recall, "*-*-", 1000) >= 0.95);
}

static void a_gated_delta_net_recalls_the_value_of_a_key(void **state)
{
    (void)state;
    assert_true(learned(&recall, "G-G-", 1000) >= 0.95);
}

/* It sees the key and nothing else: a sixteenth of the answers is chance. */
static void mlp_alone_cannot_recall(void **state)
{
    (void)state;
    assert_true(learned(&recall, "----", 1000) < 0.3);
}

static void mamba_copies_what_is_marked(void **state)
{
    (void)state;
    assert_true(learned(&copying, "M-M-", 1500) >= 0.95);
}

static void mlp_alone_cannot_copy(void **state)
{
    (void)state;
    assert_true(learned(&copying, "----", 500) < 0.3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tasks_fill_their_sequences),
        cmocka_unit_test(attention_recalls_the_value_of_a_key),
        cmocka_unit_test(a_gated_delta_net_recalls_the_value_of_a_key),
        cmocka_unit_test(mlp_alone_cannot_recall),
        cmocka_unit_test(mamba_copies_what_is_marked),
        cmocka_unit_test(mlp_alone_cannot_copy),
    };
    return cmocka_run_group_tests_name("synthetic", tests, NULL, NULL);
}
