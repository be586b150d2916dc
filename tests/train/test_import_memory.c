/* A folder of another program is imported one tensor at a time: the memory that takes does not grow with the model. The
 * folder here has 52 MB; tools/big_hf.py makes one of 2 GB to be measured by hand. */
#include "train/run.h"

#include "train/interop.h"

#include <sys/resource.h>

enum { HIDDEN = 512, FFN = 1024, VOCAB = 64, LAYERS = 10, MOST_TENSORS = 16 };

struct shape {
    const char *name;
    int64_t rows, cols; /* cols 0: a vector */
};
static const struct shape layer[] = {
    {"input_layernorm", HIDDEN, 0},       {"self_attn.q_proj", HIDDEN, HIDDEN}, {"self_attn.k_proj", HIDDEN, HIDDEN},
    {"self_attn.v_proj", HIDDEN, HIDDEN}, {"self_attn.o_proj", HIDDEN, HIDDEN}, {"post_attention_layernorm", HIDDEN, 0},
    {"mlp.gate_proj", FFN, HIDDEN},       {"mlp.up_proj", FFN, HIDDEN},         {"mlp.down_proj", HIDDEN, FFN}};
static const struct shape ends[] = {
    {"model.embed_tokens", VOCAB, HIDDEN}, {"model.norm", HIDDEN, 0}, {"lm_head", VOCAB, HIDDEN}};

static int ones(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    uint16_t *values = ctx;
    (void)key;
    (void)e;
    host->data = values;
    return ST_OK;
}

static void write_part(const char *folder, int number, const char *prefix, const struct shape *shapes, int n,
                       uint16_t *values)
{
    struct st_item items[MOST_TENSORS];
    char names[MOST_TENSORS][96], file[64];
    struct ckpt_source source = {ones, values};
    struct err e = {0};
    for (int i = 0; i < n; i++) {
        snprintf(names[i], sizeof names[i], "%s%s.weight", prefix, shapes[i].name);
        items[i] = (struct st_item){.name = names[i],
                                    .host = shapes[i].cols ? tensor_2d(NULL, DT_BF16, shapes[i].rows, shapes[i].cols)
                                                           : tensor_1d(NULL, DT_BF16, shapes[i].rows)};
    }
    snprintf(file, sizeof file, "model-%05d-of-%05d.safetensors", number + 1, LAYERS + 1);
    char *path = path_join(folder, file);
    assert_ok(st_write_stream(path, items, n, &source, NULL, 0, &e), &e);
    free(path);
}

static void write_folder(const char *folder)
{
    static const char config[] =
        "{\"model_type\": \"llama\", \"hidden_size\": 512, \"intermediate_size\": 1024, \"num_hidden_layers\": 10,"
        "\"num_attention_heads\": 8, \"vocab_size\": 64, \"max_position_embeddings\": 32}";
    struct err e = {0};
    uint16_t *values = malloc((size_t)FFN * HIDDEN * sizeof *values);
    char prefix[64], *path = path_join(folder, "config.json");
    assert_non_null(values);
    for (int64_t i = 0; i < (int64_t)FFN * HIDDEN; i++)
        values[i] = f32_to_bf16((float)(i % 97) * 0.01f);
    assert_ok(file_make_dirs(folder, &e), &e);
    assert_ok(file_write_atomic(path, config, sizeof config - 1, &e), &e);
    for (int i = 0; i < LAYERS; i++) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.", i);
        write_part(folder, i, prefix, layer, countof(layer), values);
    }
    write_part(folder, LAYERS, "", ends, countof(ends), values);
    free(values);
    free(path);
}

static int64_t peak_kb(void)
{
    struct rusage u;
    assert_int_equal(getrusage(RUSAGE_SELF, &u), 0);
    return (int64_t)u.ru_maxrss;
}

static void import_needs_the_memory_of_a_tensor(void **state)
{
    (void)state;
    struct config c;
    struct hf_folder *f = NULL;
    struct err e = {0};
    char *dir = temp_dir(), *folder = path_join(dir, "hf"), *run = path_join(dir, "run");
    write_folder(folder);
    assert_ok(config_init(&c, &e), &e);
    assert_ok(hf_open(&f, folder, &e), &e);
    assert_ok(hf_options(f, &c, NULL, &e), &e);
    assert_int_equal(c.train.seq, 32);
    assert_ok(config_finish(&c, &e), &e);
    int64_t before = peak_kb();
    assert_ok(import_hf(f, &c, run, NULL, NULL, &e), &e);
    int64_t grown = peak_kb() - before;
#if defined(__SANITIZE_ADDRESS__)
    grown = 0; /* freed memory is kept back there */
#endif
    if (grown > 32 * 1024)
        fprintf(stderr, "import of 52 MB took %lld KiB more than before\n", (long long)grown);
    assert_true(grown <= 32 * 1024);
    hf_close(f);
    config_release(&c);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(folder);
    free(run);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(import_needs_the_memory_of_a_tensor)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
