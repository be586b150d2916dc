/* data/: datasets over text and token files, and batches with and without the prefetch thread. */
#include "support.h"

#include "data/data.h"

static char *dir;
static struct tokenizer tok; /* bytes with eod */

static const char *in_dir(const char *name)
{
    static char paths[16][256];
    static int next;
    char *p = paths[next++ % 16];
    snprintf(p, 256, "%s/%s", dir, name);
    return p;
}

/* n random printable bytes: any 17 of them tell their place. */
static void write_text(const char *name, size_t n, int salt)
{
    struct err e = {0};
    char *text = malloc(n);
    for (size_t i = 0; i < n; i++)
        text[i] = (char)(33 + rng_below((uint64_t)salt, i, 89));
    assert_ok(file_write_atomic(in_dir(name), text, n, &e), &e);
    free(text);
}

static int make_dir(void **state)
{
    (void)state;
    struct err e = {0};
    dir = temp_dir();
    assert_ok(tokenizer_open(&tok, "bytes", true, &e), &e);
    assert_ok(file_make_dirs(in_dir("texts"), &e), &e);
    write_text("texts/a", 300, 1);
    write_text("texts/b", 77, 2);
    write_text("texts/c", 1000, 3);
    write_text("one.txt", 2000, 4);
    return 0;
}

static int drop_dir(void **state)
{
    (void)state;
    struct err e = {0};
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
    return 0;
}

static struct data_opts opts_for(const char *paths)
{
    return (struct data_opts){.paths = paths, .seq = 16, .seed = 1234, .vocab = 257, .tokenizer = &tok, .eod = 256};
}

static struct dataset *must_open(const struct data_opts *o)
{
    struct err e = {0};
    struct dataset *ds;
    assert_ok(dataset_open(&ds, o, &e), &e);
    return ds;
}

static void a_folder_of_text_equals_its_token_file(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenize_stats stats;
    const char *in[] = {in_dir("texts")}, *out = in_dir("tokens");
    struct tokenize_opts t = {.in = in, .n_in = 1, .out = out, .tokenizer = &tok};
    assert_ok(data_tokenize(&t, &stats, &e), &e);
    struct data_opts text = opts_for(in[0]), pair = opts_for(out);
    text.n_samples = pair.n_samples = 200; /* several epochs */
    text.split = pair.split = "2,1";
    for (int part = DATA_TRAIN; part <= DATA_VALID; part++) {
        text.part = pair.part = (enum data_part)part;
        struct dataset *a = must_open(&text), *b = must_open(&pair);
        int32_t ta[17], tb[17];
        assert_int_equal(dataset_n_samples(a), dataset_n_samples(b));
        assert_true(dataset_n_samples(a) >= 200);
        int eods = 0;
        for (int64_t i = 0; i < dataset_n_samples(a); i++) {
            assert_ok(dataset_get(a, i, ta, &e), &e);
            assert_ok(dataset_get(b, i, tb, &e), &e);
            assert_memory_equal(ta, tb, sizeof ta);
            for (int k = 0; k < 17; k++)
                eods += ta[k] == 256;
        }
        assert_true(eods > 0);
        dataset_close(a);
        dataset_close(b);
    }
}

static void one_epoch_holds_every_sample_once(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    o.eod = -1;
    struct dataset *ds = must_open(&o);
    assert_int_equal(dataset_n_samples(ds), 1999 / 16);
    assert_int_equal(dataset_tokens(ds), 2000);
    char *text;
    size_t n;
    assert_ok(file_read(in_dir("one.txt"), 3000, &text, &n, &e), &e);
    uint8_t seen[125] = {0};
    for (int64_t i = 0; i < 124; i++) {
        int32_t t[17];
        uint8_t bytes[17];
        assert_ok(dataset_get(ds, i, t, &e), &e);
        for (int k = 0; k < 17; k++)
            bytes[k] = (uint8_t)t[k];
        char *at = memmem(text, n, bytes, 17);
        assert_non_null(at);
        assert_int_equal((at - text) % 16, 0);
        assert_int_equal(seen[(at - text) / 16]++, 0);
    }
    free(text);
    dataset_close(ds);
}

/* Index of the first-epoch sample with the same tokens, or -1. */
static int64_t same_in_first_epoch(const struct dataset *ds, const int32_t *tokens, struct err *e)
{
    int32_t a[17];
    for (int64_t i = 0; i < dataset_n_samples(ds); i++) {
        assert_ok(dataset_get(ds, i, a, e), e);
        if (memcmp(a, tokens, sizeof a) == 0)
            return i;
    }
    return -1;
}

static void later_epochs_are_other_permutations(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    struct dataset *ds = must_open(&o);
    int64_t n = dataset_n_samples(ds), moved = 0, differ = 0;
    char seen[3][1000] = {{0}};
    assert_true(n < 1000);
    for (int64_t i = 0; i < n; i++) {
        int64_t where[3];
        for (int epoch = 1; epoch < 3; epoch++) {
            int32_t t[17];
            assert_ok(dataset_get(ds, i + epoch * n, t, &e), &e);
            where[epoch] = same_in_first_epoch(ds, t, &e);
            assert_true(where[epoch] >= 0);
            assert_int_equal(seen[epoch][where[epoch]]++, 0); /* each sample once an epoch */
        }
        moved += where[1] != i;
        differ += where[1] != where[2];
    }
    assert_true(moved > n / 2 && differ > n / 2);
    int32_t t[17];
    assert_fails(dataset_get(ds, -1, t, &e), ST_INVALID, &e, "sample -1");
    dataset_close(ds);
}

/* One text file has too few sequences for a split, so it is cut by tokens. */
static void one_file_splits_by_tokens(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    o.eod = -1;
    o.split = "90,10";
    struct dataset *train = must_open(&o);
    o.part = DATA_VALID;
    struct dataset *valid = must_open(&o);
    assert_int_equal(dataset_tokens(train), 1800);
    assert_int_equal(dataset_tokens(valid), 200);
    assert_int_equal(dataset_n_samples(valid), 199 / 16);
    char *text;
    size_t n;
    int32_t t[17];
    assert_ok(file_read(in_dir("one.txt"), 3000, &text, &n, &e), &e);
    for (int64_t i = 0; i < dataset_n_samples(valid); i++) {
        uint8_t bytes[17];
        assert_ok(dataset_get(valid, i, t, &e), &e);
        for (int k = 0; k < 17; k++)
            bytes[k] = (uint8_t)t[k];
        assert_non_null(memmem(text + 1800, 200, bytes, 17));
    }
    struct buf b;
    buf_init(&b, 0);
    dataset_describe(valid, &b);
    assert_non_null(strstr(b.text, "valid data: "));
    assert_non_null(strstr(b.text, "split 90,10"));
    assert_non_null(strstr(b.text, "split within a sequence"));
    buf_release(&b);
    free(text);
    dataset_close(train);
    dataset_close(valid);
    o.part = DATA_TEST;
    struct dataset *none;
    assert_fails(dataset_open(&none, &o, &e), ST_INVALID, &e, "leaves nothing");
    o.part = DATA_VALID;
    o.split = "999,1"; /* 2 tokens */
    assert_fails(dataset_open(&none, &o, &e), ST_INVALID, &e, "has 2 tokens");
    assert_null(none);
}

static void blends_draw_by_weight_and_by_size(void **state)
{
    (void)state;
    struct err e = {0};
    char paths[700];
    int32_t t[17];
    /* Tell the two apart: upper-case only and lower-case only. */
    char text[1000];
    memset(text, 'A', sizeof text);
    assert_ok(file_write_atomic(in_dir("upper"), text, 1000, &e), &e);
    memset(text, 'a', sizeof text);
    assert_ok(file_write_atomic(in_dir("lower"), text, 500, &e), &e);
    snprintf(paths, sizeof paths, "3 %s 1 %s", in_dir("upper"), in_dir("lower"));
    struct data_opts o = opts_for(paths);
    o.eod = -1;
    o.n_samples = 400;
    struct dataset *ds = must_open(&o);
    assert_int_equal(dataset_n_samples(ds), 400);
    int upper = 0;
    for (int64_t i = 0; i < 400; i++) {
        assert_ok(dataset_get(ds, i, t, &e), &e);
        upper += t[5] == 'A';
        assert_true(abs(4 * upper - 3 * (int)(i + 1)) <= 4); /* at every moment near 3 : 1 */
    }
    assert_int_equal(upper, 300);
    dataset_close(ds);

    snprintf(paths, sizeof paths, "%s \"%s\"", in_dir("upper"), in_dir("lower"));
    o.n_samples = 0;
    ds = must_open(&o);
    assert_int_equal(dataset_n_samples(ds), 999 / 16 + 499 / 16);
    upper = 0;
    for (int64_t i = 0; i < dataset_n_samples(ds); i++) {
        assert_ok(dataset_get(ds, i, t, &e), &e);
        upper += t[5] == 'A';
    }
    assert_int_equal(upper, 999 / 16); /* each sample once */
    struct buf b;
    buf_init(&b, 0);
    dataset_describe(ds, &b);
    assert_non_null(strstr(b.text, "share 0.6"));
    buf_release(&b);
    dataset_close(ds);

    o.n_samples = 92; /* all but one: still one epoch of each, so no sample comes twice */
    ds = must_open(&o);
    buf_init(&b, 0);
    dataset_describe(ds, &b);
    assert_null(strstr(b.text, "epochs"));
    buf_release(&b);
    dataset_close(ds);

    o.n_samples = 1000; /* more than there is: further epochs, still by size */
    ds = must_open(&o);
    assert_int_equal(dataset_n_samples(ds), 1000);
    for (int64_t i = 0; i < 1000; i++)
        assert_ok(dataset_get(ds, i, t, &e), &e);
    dataset_close(ds);
}

static void bad_options_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct dataset *ds;
    const char *path = in_dir("one.txt");
    struct data_opts o = opts_for(path);
    o.seq = 0;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "sequence length 0");
    o = opts_for(path);
    o.seed = 1ll << 32;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "seed");
    o = opts_for(path);
    o.vocab = 0;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "vocabulary");
    o = opts_for(path);
    o.vocab = 256;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "end-of-document id 256");
    o = opts_for(path);
    o.n_samples = -1;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "-1 samples");
    o = opts_for(path);
    o.seq = 2001;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "needs 2002");
    o = opts_for(path);
    o.split = "x";
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "split 'x'");
    o = opts_for(NULL);
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "no data path");
    o = opts_for(path);
    o.tokenizer = NULL;
    assert_fails(dataset_open(&ds, &o, &e), ST_INVALID, &e, "is text");
}

static void an_id_beyond_the_vocabulary_is_named(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    o.eod = -1;
    o.vocab = 100; /* the text goes up to 121 */
    struct dataset *ds = must_open(&o);
    int32_t t[17];
    assert_fails(dataset_get(ds, 0, t, &e), ST_CORRUPT, &e, "outside the vocabulary of 100");
    assert_non_null(strstr(e.msg, "one.txt: token "));
    assert_non_null(strstr(e.trail, "sample 0"));
    dataset_close(ds);
}

static struct batch_opts batch_opts_for(int64_t micro, int64_t global)
{
    return (struct batch_opts){
        .micro_batch = micro, .global_batch = global, .dp_size = 1, .eod = 256, .ahead = 3, .keep = 1};
}

static void batches_take_the_samples_megatron_takes(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    struct dataset *ds = must_open(&o);
    struct batch b;
    int32_t t[17];
    assert_ok(batch_alloc(&b, 2, 16, &e), &e);
    struct batch_opts bo = batch_opts_for(2, 12);
    bo.dp_size = 3;
    assert_int_equal(batch_micros_per_step(&bo), 2);
    uint8_t seen[48] = {0};
    for (int64_t step = 0; step < 4; step++)
        for (int64_t micro = 0; micro < 2; micro++)
            for (bo.dp_rank = 0; bo.dp_rank < 3; bo.dp_rank++) {
                assert_ok(batch_fill(&b, ds, &bo, step, micro, &e), &e);
                assert_int_equal(b.first_sample, step * 12 + micro * 6 + bo.dp_rank * 2);
                for (int64_t row = 0; row < 2; row++) {
                    seen[b.first_sample + row]++;
                    assert_ok(dataset_get(ds, b.first_sample + row, t, &e), &e);
                    assert_memory_equal(b.tokens + row * 16, t, 16 * sizeof *t);
                    assert_memory_equal(b.labels + row * 16, t + 1, 16 * sizeof *t);
                    for (int32_t i = 0; i < 16; i++) {
                        assert_int_equal(b.pos[row * 16 + i], i);
                        assert_int_equal(b.doc_start[row * 16 + i], 0);
                    }
                }
            }
    for (int i = 0; i < 48; i++)
        assert_int_equal(seen[i], 1);
    bo.dp_rank = 0;
    assert_fails(batch_fill(&b, ds, &bo, 0, 2, &e), ST_INVALID, &e, "no microbatch 2");
    assert_fails(batch_fill(&b, ds, &bo, INT64_MAX / 2, 0, &e), ST_INVALID, &e, "of step");
    bo.micro_batch = 1;
    assert_fails(batch_fill(&b, ds, &bo, 0, 0, &e), ST_INVALID, &e, "batch buffers");
    batch_release(&b);
    dataset_close(ds);
}

/* "ab" eod "cde" eod "f...": positions and starts by hand. */
static void documents_are_told_apart(void **state)
{
    (void)state;
    struct err e = {0};
    assert_ok(file_make_dirs(in_dir("d"), &e), &e);
    assert_ok(file_write_atomic(in_dir("d/1"), "ab", 2, &e), &e);
    assert_ok(file_write_atomic(in_dir("d/2"), "cde", 3, &e), &e);
    struct data_opts o = opts_for(in_dir("d"));
    o.seq = 6; /* 7 tokens: one sample */
    struct dataset *ds = must_open(&o);
    assert_int_equal(dataset_n_samples(ds), 1);
    struct batch_opts bo = batch_opts_for(1, 1);
    bo.eod_mask = bo.eod_mask_loss = true;
    struct batch b;
    assert_ok(batch_alloc(&b, 1, 6, &e), &e);
    assert_ok(batch_fill(&b, ds, &bo, 0, 0, &e), &e);
    static const int32_t ab_first[4][6] = {
        {'a', 'b', 256, 'c', 'd', 'e'}, {'b', 256, -1, 'd', 'e', 256}, {0, 1, 2, 0, 1, 2}, {0, 0, 0, 3, 3, 3}};
    static const int32_t cde_first[4][6] = {
        {'c', 'd', 'e', 256, 'a', 'b'}, {'d', 'e', 256, -1, 'b', 256}, {0, 1, 2, 3, 0, 1}, {0, 0, 0, 0, 4, 4}};
    const int32_t(*want)[6] = b.tokens[0] == 'a' ? ab_first : cde_first;
    assert_memory_equal(b.tokens, want[0], sizeof want[0]);
    assert_memory_equal(b.labels, want[1], sizeof want[1]);
    assert_memory_equal(b.pos, want[2], sizeof want[2]);
    assert_memory_equal(b.doc_start, want[3], sizeof want[3]);
    bo.eod = -1;
    assert_fails(batch_check_opts(&bo, &e), ST_INVALID, &e, "end-of-document");
    batch_release(&b);
    dataset_close(ds);
}

/* Parts put together are the whole, and ids for prediction depths are shifted before the sample is cut. */
static void parts_of_a_sample_see_across_their_borders(void **state)
{
    (void)state;
    enum { ROWS = 2, SEQ = 12, DEPTHS = 2 };
    struct err e = {0};
    for (int64_t parts = 1; parts <= 4; parts++)
        for (int64_t which = 0; which < parts; which++) {
            struct batch b;
            assert_ok(batch_alloc(&b, ROWS, SEQ, &e), &e);
            assert_ok(batch_divide(&b, parts, which, DEPTHS, &e), &e);
            for (int32_t i = 0; i < ROWS * SEQ; i++) {
                int32_t start = i % SEQ < 5 ? 0 : 5;
                b.tokens[i] = 100 + i;
                b.labels[i] = i % 7 == 3 ? -1 : 200 + i;
                b.pos[i] = i % SEQ - start;
                b.doc_start[i] = start;
            }
            batch_cut(&b);
            int64_t n = SEQ / parts;
            assert_true(b.part.seq == n && b.part.first == which * n);
            for (int64_t row = 0; row < ROWS; row++)
                for (int64_t t = 0; t < n; t++) {
                    int64_t i = which * n + t, at = row * SEQ + i, to = row * n + t;
                    assert_int_equal(b.part.tokens[to], b.tokens[at]);
                    assert_int_equal(b.part.labels[to], b.labels[at]);
                    assert_int_equal(b.part.pos[to], b.pos[at]);
                    assert_int_equal(b.part.doc_start[to], b.doc_start[at]);
                    assert_int_equal(b.part.doc_local[to], b.doc_start[at] - which * n);
                    for (int64_t k = 0; parts > 1 && k < DEPTHS; k++) {
                        bool inside = i + k + 1 < SEQ && (i < 5) == (i + k + 1 < 5);
                        int64_t out = k * ROWS * n + to;
                        assert_int_equal(b.part.next_tokens[out], inside ? b.tokens[at + k + 1] : 0);
                        assert_int_equal(b.part.next_labels[out], inside ? b.labels[at + k + 1] : -1);
                        assert_int_equal(b.part.next_pos[out], inside ? b.pos[at + k + 1] : 0);
                    }
                }
            batch_release(&b);
        }
    struct batch b;
    assert_ok(batch_alloc(&b, ROWS, SEQ, &e), &e);
    assert_fails(batch_divide(&b, 5, 0, 0, &e), ST_INVALID, &e, "part 0 of 5 of a sample of 12 tokens");
    batch_release(&b);
}

static void bad_batch_options_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    struct dataset *ds = must_open(&o);
    struct batcher *b;
    struct batch_opts bo = batch_opts_for(3, 8);
    assert_fails(batcher_open(&b, ds, &bo, 0, &e), ST_INVALID, &e, "not a multiple");
    bo = batch_opts_for(0, 8);
    assert_fails(batcher_open(&b, ds, &bo, 0, &e), ST_INVALID, &e, ">= 1");
    bo = batch_opts_for(INT64_MAX / 2, 8);
    bo.dp_size = 3;
    assert_fails(batcher_open(&b, ds, &bo, 0, &e), ST_INVALID, &e, "not a multiple");
    bo = batch_opts_for(2, 8);
    bo.dp_rank = 1;
    assert_fails(batcher_open(&b, ds, &bo, 0, &e), ST_INVALID, &e, "rank 1 of 1");
    bo = batch_opts_for(2, 8);
    bo.ahead = 0;
    assert_fails(batcher_open(&b, ds, &bo, 0, &e), ST_INVALID, &e, "ahead");
    bo = batch_opts_for(2, 8);
    assert_fails(batcher_open(&b, ds, &bo, -1, &e), ST_INVALID, &e, "first step");
    assert_null(b);
    dataset_close(ds);
}

static void assert_same_batch(const struct batch *a, const struct batch *b)
{
    size_t bytes = (size_t)(a->rows * a->seq) * sizeof(int32_t);
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->micro, b->micro);
    assert_int_equal(a->first_sample, b->first_sample);
    assert_memory_equal(a->tokens, b->tokens, bytes);
    assert_memory_equal(a->labels, b->labels, bytes);
    assert_memory_equal(a->pos, b->pos, bytes);
    assert_memory_equal(a->doc_start, b->doc_start, bytes);
}

/* Every view is compared when it comes, and when it is the oldest still valid one. */
static void prefetch_gives_the_same_batches(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("texts"));
    o.n_samples = 300;
    struct dataset *ds = must_open(&o);
    struct batch_opts bo = batch_opts_for(2, 8);
    bo.eod_mask = true;
    struct batch direct;
    assert_ok(batch_alloc(&direct, 2, 16, &e), &e);
    for (bo.ahead = 1; bo.ahead <= 5; bo.ahead += 2) {
        struct batcher *b;
        const struct batch *views[60];
        bo.keep = 6 - bo.ahead; /* 5, 3, 1 */
        assert_ok(batcher_open(&b, ds, &bo, 7, &e), &e);
        for (int k = 0; k < 60; k++) {
            assert_ok(batcher_next(b, &views[k], &e), &e);
            assert_ok(batch_fill(&direct, ds, &bo, 7 + k / 4, k % 4, &e), &e);
            assert_same_batch(views[k], &direct);
            if (k % 7 == 0)
                usleep(3000); /* let the thread run into the end of its ring */
            int old = k - bo.keep + 1;
            if (old >= 0) {
                assert_ok(batch_fill(&direct, ds, &bo, 7 + old / 4, old % 4, &e), &e);
                assert_same_batch(views[old], &direct);
            }
        }
        batcher_close(b);
    }
    batch_release(&direct);
    dataset_close(ds);
}

static void closing_at_once_and_early_is_fine(void **state)
{
    (void)state;
    struct err e = {0};
    struct data_opts o = opts_for(in_dir("one.txt"));
    struct dataset *ds = must_open(&o);
    struct batch_opts bo = batch_opts_for(4, 8);
    for (int i = 0; i < 50; i++) {
        struct batcher *b;
        const struct batch *view;
        assert_ok(batcher_open(&b, ds, &bo, 0, &e), &e);
        if (i % 2)
            assert_ok(batcher_next(b, &view, &e), &e);
        batcher_close(b);
    }
    batcher_close(NULL);
    dataset_close(ds);
}

/* The bad id lies in one sample; batches before it arrive, and the error stays after it. */
static void an_error_in_the_thread_arrives_at_its_batch(void **state)
{
    (void)state;
    struct err e = {0};
    char text[400];
    memset(text, 'a', sizeof text);
    text[200] = '~';
    assert_ok(file_write_atomic(in_dir("bad"), text, sizeof text, &e), &e);
    struct data_opts o = opts_for(in_dir("bad"));
    o.vocab = '~';
    o.eod = -1;
    struct dataset *ds = must_open(&o);
    struct batch_opts bo = batch_opts_for(1, 1);
    bo.eod = -1;
    int64_t bad = 0;
    int32_t t[17];
    while (dataset_get(ds, bad, t, &e) == ST_OK)
        bad++;
    assert_true(bad < dataset_n_samples(ds));
    struct batcher *b;
    const struct batch *view;
    assert_ok(batcher_open(&b, ds, &bo, 0, &e), &e);
    for (int64_t i = 0; i < bad; i++) {
        assert_ok(batcher_next(b, &view, &e), &e);
        assert_int_equal(view->first_sample, i);
    }
    for (int i = 0; i < 3; i++) {
        err_clear(&e);
        assert_fails(batcher_next(b, &view, &e), ST_CORRUPT, &e, "token 200 of sequence 0 is id 126");
        assert_null(view);
    }
    batcher_close(b);
    dataset_close(ds);
}

int main(void)
{
#define WITH_DIR(f) cmocka_unit_test_setup_teardown(f, make_dir, drop_dir)
    const struct CMUnitTest tests[] = {
        WITH_DIR(a_folder_of_text_equals_its_token_file),
        WITH_DIR(one_epoch_holds_every_sample_once),
        WITH_DIR(later_epochs_are_other_permutations),
        WITH_DIR(one_file_splits_by_tokens),
        WITH_DIR(blends_draw_by_weight_and_by_size),
        WITH_DIR(bad_options_are_refused),
        WITH_DIR(an_id_beyond_the_vocabulary_is_named),
        WITH_DIR(batches_take_the_samples_megatron_takes),
        WITH_DIR(documents_are_told_apart),
        WITH_DIR(parts_of_a_sample_see_across_their_borders),
        WITH_DIR(bad_batch_options_are_refused),
        WITH_DIR(prefetch_gives_the_same_batches),
        WITH_DIR(closing_at_once_and_early_is_fine),
        WITH_DIR(an_error_in_the_thread_arrives_at_its_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
