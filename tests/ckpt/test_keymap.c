/* Key maps on files with Megatron's names (tools/golden_keys.py made them), and on files made here
 * to be refused. All dense fixtures hold the same values, so each is compared with the flat one. */
#include "support.h"

#include "ckpt/keys/keymap.h"

#include <math.h>

#define FIXTURES "tests/ckpt/fixtures/"
enum { MAX_PARAMS = 96 };

/* ---- models, as plain parameter lists -------------------------------------------------------- */

struct tiny {
    struct param p[MAX_PARAMS];
    const struct param *list[MAX_PARAMS];
    char keys[MAX_PARAMS][96];
    int n;
};

static void add(struct tiny *t, int layer, const char *key, int rank, int64_t a, int64_t b, int64_t c)
{
    assert_true(t->n < MAX_PARAMS);
    struct param *p = &t->p[t->n];
    *p = (struct param){.key = t->keys[t->n], .rank = rank, .dim = {a, b, c}, .layer = layer};
    snprintf(t->keys[t->n], sizeof t->keys[0], "%s", key);
    t->list[t->n++] = p;
}

static void add_layer(struct tiny *t, int layer, const char *where, char symbol)
{
    char key[96];
#define LEAF(name, rank, a, b, c) (snprintf(key, sizeof key, "%s" name, where), add(t, layer, key, rank, a, b, c))
    if (symbol == '*') {
        LEAF("self_attention.linear_qkv.layer_norm_weight", 1, 4, 0, 0);
        LEAF("self_attention.linear_qkv.weight", 2, 8, 4, 0);
        LEAF("self_attention.linear_proj.weight", 2, 4, 4, 0);
    } else if (symbol == '-') {
        LEAF("mlp.linear_fc1.layer_norm_weight", 1, 4, 0, 0);
        LEAF("mlp.linear_fc1.weight", 2, 6, 4, 0);
        LEAF("mlp.linear_fc2.weight", 2, 4, 3, 0);
    } else if (symbol == 'E') {
        LEAF("pre_mlp_layernorm.weight", 1, 4, 0, 0);
        LEAF("mlp.router.weight", 2, 3, 4, 0);
        LEAF("mlp.experts.linear_fc1.weight", 3, 3, 6, 4);
        LEAF("mlp.experts.linear_fc1.bias", 2, 3, 6, 0);
        LEAF("mlp.experts.linear_fc2.weight", 3, 3, 4, 3);
        LEAF("mlp.experts.linear_fc2.bias", 2, 3, 4, 0);
    } else if (symbol == 'M') {
        LEAF("mixer.in_proj.weight", 2, 14, 4, 0);
    } else {
        LEAF("self_attention.linear_kv_down_proj.weight", 2, 4, 4, 0);
    }
#undef LEAF
}

/* "*-*-": numbered one by one; "[*-][*-]": by group, with a Transformer's final norm. */
static struct tiny *model(const char *pattern)
{
    struct tiny *t = calloc(1, sizeof *t);
    char where[64];
    bool grouped = strchr(pattern, '[') != NULL, inside = false;
    int layer = 0, item = -1;
    add(t, -1, "embedding.word_embeddings.weight", 2, 5, 4, 0);
    for (const char *s = pattern; *s && *s != '/'; s++) {
        if (*s == '[' || *s == ']') {
            inside = *s == '[';
            item += inside;
            continue;
        }
        item += !inside;
        snprintf(where, sizeof where, "decoder.layers.%d.", grouped ? item : layer);
        add_layer(t, layer++, where, *s);
    }
    add(t, -1, grouped ? "decoder.final_layernorm.weight" : "decoder.final_norm.weight", 1, 4, 0, 0);
    const char *depth = strchr(pattern, '/');
    if (depth == NULL)
        return t;
    add(t, 90, "mtp.layers.0.enorm.weight", 1, 4, 0, 0);
    add(t, 90, "mtp.layers.0.hnorm.weight", 1, 4, 0, 0);
    add(t, 90, "mtp.layers.0.eh_proj.weight", 2, 4, 8, 0);
    for (int i = 0; depth[1 + i]; i++) {
        snprintf(where, sizeof where, "mtp.layers.0.mtp_model_layer.layers.%d.", i);
        add_layer(t, 91 + i, where, depth[1 + i]);
    }
    add(t, 90, "mtp.layers.0.final_layernorm.weight", 1, 4, 0, 0);
    return t;
}

/* ---- loading and comparing ------------------------------------------------------------------- */

static struct key_file open_file(const char *name)
{
    struct key_file f;
    struct err e = {0};
    char path[512];
    snprintf(path, sizeof path, "%s%s", name[0] == '/' ? "" : FIXTURES, name);
    assert_ok(key_file_open(&f, path, &e), &e);
    return f;
}

struct values {
    float v[MAX_PARAMS][256];
};

static struct values *load_all(const char *name, const struct tiny *t, enum key_space space)
{
    struct values *out = calloc(1, sizeof *out);
    struct key_file f = open_file(name);
    struct keymap *m;
    struct err e = {0};
    assert_ok(keymap_open(&m, &f, space, t->list, t->n, DT_F32, &e), &e);
    assert_ok(keymap_check(m, 0, &e), &e);
    for (int i = 0; i < t->n; i++) {
        struct tensor dst = tensor_shape(DT_F32, t->p[i].rank, t->p[i].dim);
        dst.data = out->v[i];
        assert_true(keymap_has(m, i));
        assert_ok(keymap_load(m, i, &dst, &e), &e);
        assert_true(out->v[i][0] != 0);
    }
    keymap_close(m);
    key_file_close(&f);
    return out;
}

/* Both models list the same parameters in the same order, under their own names. */
static void assert_same_values(const char *file_a, const char *pattern_a, const char *file_b, const char *pattern_b,
                               enum key_space space)
{
    struct tiny *a = model(pattern_a), *b = model(pattern_b);
    struct values *x = load_all(file_a, a, space), *y = load_all(file_b, b, space);
    assert_int_equal(a->n, b->n);
    assert_memory_equal(x, y, sizeof *x);
    free(a);
    free(b);
    free(x);
    free(y);
}

/* Opening the map or checking it must fail with the text. */
static void assert_refused(const char *name, struct tiny *t, enum status status, const char *text)
{
    struct key_file f = open_file(name);
    struct keymap *m;
    struct err e = {0};
    int st = keymap_open(&m, &f, KEYS_MODEL, t->list, t->n, DT_F32, &e);
    if (st == ST_OK)
        st = keymap_check(m, 0, &e);
    assert_fails(st, status, &e, text);
    keymap_close(m);
    key_file_close(&f);
    free(t);
}

static void every_dense_layout_loads_into_every_dense_model(void **state)
{
    (void)state;
    static const char *const files[] = {"flat_hybrid.safetensors", "grouped_hybrid.safetensors",
                                        "gpt_indexed.safetensors", "gpt_stacked.safetensors"};
    static const char *const patterns[] = {"*-*-", "[*-][*-]"};
    for (int i = 0; i < countof(files); i++)
        for (int k = 0; k < countof(patterns); k++)
            assert_same_values("flat_hybrid.safetensors", "*-*-", files[i], patterns[k], KEYS_MODEL);
}

static void optimizer_state_follows_the_same_map(void **state)
{
    (void)state;
    for (int s = KEYS_EXP_AVG; s <= KEYS_EXP_AVG_SQ; s++) {
        assert_same_values("flat_hybrid.safetensors", "*-*-", "gpt_stacked.safetensors", "*-*-", (enum key_space)s);
        assert_same_values("flat_hybrid.safetensors", "*-*-", "gpt_stacked.safetensors", "[*-][*-]", (enum key_space)s);
    }
}

static void fp32_master_weights_are_loaded_in_place_of_rounded_ones(void **state)
{
    (void)state;
    struct key_file f = open_file("fp32_param.safetensors");
    struct tiny *t = model("[*-][*-]");
    struct keymap *m;
    struct err e = {0};
    float exact[256], rounded[256];
    assert_same_values("flat_hybrid.safetensors", "*-*-", "fp32_param.safetensors", "[*-][*-]", KEYS_MODEL);
    for (int i = 0; i < f.n; i++) /* without them: what the model's own keys hold, which is less exact */
        if (f.list[i].space == KEYS_FP32_PARAM)
            f.list[i--] = f.list[--f.n];
    assert_ok(keymap_open(&m, &f, KEYS_MODEL, t->list, t->n, DT_F32, &e), &e);
    assert_ok(keymap_check(m, 0, &e), &e);
    struct tensor dst = tensor_shape(DT_F32, t->p[2].rank, t->p[2].dim);
    dst.data = rounded;
    assert_ok(keymap_load(m, 2, &dst, &e), &e);
    keymap_close(m);
    key_file_close(&f);
    struct values *all = load_all("fp32_param.safetensors", t, KEYS_MODEL);
    memcpy(exact, all->v[2], sizeof exact);
    assert_true(memcmp(exact, rounded, (size_t)tensor_bytes(&dst)) != 0);
    for (int i = 0; i < tensor_elems(&dst); i++)
        assert_true(fabsf(exact[i] - rounded[i]) <= fabsf(exact[i]) / 128);
    free(all);
    free(t);
}

static void master_weights_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct key_file f = open_file("fp32_param.safetensors");
    struct tiny *t = model("[*-][*-]");
    struct keymap *m;
    struct err e = {0};
    int k = 0;
    while (f.list[k].space != KEYS_FP32_PARAM || !str_ends(f.list[k].key, "layers.1.mlp.linear_fc1.weight"))
        k++;
    const char *key = f.list[k].key;
    f.list[k].key = "decoder.layers.1.mlp.linear_fc3.weight";
    assert_ok(keymap_open(&m, &f, KEYS_MODEL, t->list, t->n, DT_F32, &e), &e);
    assert_fails(keymap_check(m, 0, &e), ST_CONFLICT, &e, "fp32_param");
    assert_ok(keymap_check(m, CKPT_ALLOW_UNEXPECTED, &e), &e);
    keymap_close(m);
    f.list[k].key = key;
    f.list[k].view.dim[0] = 3;
    assert_fails(keymap_open(&m, &f, KEYS_MODEL, t->list, t->n, DT_F32, &e), ST_CONFLICT, &e, "of the model needs");
    key_file_close(&f);
    free(t);
}

static void add_hyper(struct tiny *t, int layer, const char *name)
{
    char key[96];
    snprintf(key, sizeof key, "decoder.layers.%d.%s.mapping_proj.weight", layer, name);
    add(t, layer, key, 2, 8, 8, 0);
    static const char *const alphas[] = {"alpha_pre", "alpha_post", "alpha_res", "bias"};
    for (int i = 0; i < countof(alphas); i++) {
        snprintf(key, sizeof key, "decoder.layers.%d.%s.%s", layer, name, alphas[i]);
        add(t, layer, key, 1, i == 3 ? 8 : 1, 0, 0);
    }
}

static void hyper_connections_of_a_hybrid_stack_are_read(void **state)
{
    (void)state;
    struct tiny *t = model("*M-");
    add_hyper(t, 0, "self_attention_hyper_connection");
    add_hyper(t, 1, "hyper_connection");
    add_hyper(t, 2, "mlp_hyper_connection");
    struct values *own = load_all("hyper_own.safetensors", t, KEYS_MODEL);
    struct values *hybrid = load_all("hyper_hybrid.safetensors", t, KEYS_MODEL);
    assert_memory_equal(own, hybrid, sizeof *own);
    free(own);
    free(hybrid);
    free(t);
}

static void a_transformer_fills_a_hybrid_in_any_order(void **state)
{
    (void)state;
    struct tiny *plain = model("*-*-"), *late = model("**--");
    struct values *x = load_all("gpt_stacked.safetensors", plain, KEYS_MODEL),
                  *y = load_all("gpt_indexed.safetensors", late, KEYS_MODEL);
    assert_memory_equal(x->v[1], y->v[1], 3 * sizeof x->v[0]);   /* first attention */
    assert_memory_equal(x->v[7], y->v[4], 3 * sizeof x->v[0]);   /* second attention */
    assert_memory_equal(x->v[4], y->v[7], 3 * sizeof x->v[0]);   /* first MLP */
    assert_memory_equal(x->v[10], y->v[10], 3 * sizeof x->v[0]); /* second MLP */
    free(plain);
    free(late);
    free(x);
    free(y);
    /* A flat hybrid is no Transformer: its order is its own. */
    assert_refused("flat_hybrid.safetensors", model("**--"), ST_CONFLICT, "another order");
    assert_refused("mtp_gpt.safetensors", model("**--/*-"), ST_CONFLICT, "another order");
}

static void mamba_layers_may_be_new(void **state)
{
    (void)state;
    struct tiny *t = model("M*-M*-");
    struct key_file f = open_file("gpt_stacked.safetensors");
    struct keymap *m;
    struct err e = {0};
    assert_ok(keymap_open(&m, &f, KEYS_MODEL, t->list, t->n, DT_F32, &e), &e);
    assert_int_equal(keymap_missing(m), 2);
    assert_int_equal(keymap_unexpected(m), 0);
    assert_fails(keymap_check(m, 0, &e), ST_CONFLICT, &e,
                 "2 missing: decoder.layers.0.mixer.in_proj.weight, decoder.layers.3.");
    assert_fails(keymap_check(m, CKPT_ALLOW_UNEXPECTED, &e), ST_CONFLICT, &e, "2 missing");
    assert_ok(keymap_check(m, CKPT_ALLOW_MISSING, &e), &e);
    float x[56];
    struct tensor dst = tensor_2d(x, DT_F32, 14, 4);
    assert_false(keymap_has(m, 1));
    assert_fails(keymap_load(m, 1, &dst, &e), ST_CONFLICT, &e, "no model tensor for decoder.layers.0.mixer");
    keymap_close(m);
    key_file_close(&f);
    free(t);
}

static void experts_load_from_every_layout(void **state)
{
    (void)state;
    static const char *const files[] = {"experts_indexed.safetensors", "experts_distributed.safetensors",
                                        "experts_sequential.safetensors", "experts_packed.safetensors"};
    for (int i = 0; i < countof(files); i++) {
        assert_same_values("experts_grouped.safetensors", "[*E]", files[i], "[*E]", KEYS_MODEL);
        assert_same_values("experts_grouped.safetensors", "[*E]", files[i], "*E", KEYS_MODEL);
    }
}

static void single_experts_load_from_one_tensor(void **state)
{
    (void)state;
    static const char *const files[] = {"experts_grouped.safetensors", "experts_packed.safetensors",
                                        "experts_indexed.safetensors"};
    float all[3][24], one[24];
    struct tiny whole = {0}, single = {0};
    struct err e = {0};
    add(&whole, 0, "decoder.layers.0.self_attention.linear_proj.weight", 2, 4, 4, 0);
    add(&single, 0, "decoder.layers.0.self_attention.linear_proj.weight", 2, 4, 4, 0);
    add(&whole, 1, "decoder.layers.0.mlp.experts.linear_fc1.weight", 3, 3, 6, 4);
    for (int k = 0; k < 3; k++) {
        char key[96];
        snprintf(key, sizeof key, "decoder.layers.0.mlp.experts.linear_fc1.weight%d", k);
        add(&single, 1, key, 2, 6, 4, 0);
    }
    for (int i = 0; i < countof(files); i++) {
        struct key_file f = open_file(files[i]);
        struct keymap *a, *b;
        struct tensor ta = tensor_3d(all, DT_F32, 3, 6, 4), tb = tensor_2d(one, DT_F32, 6, 4);
        assert_ok(keymap_open(&a, &f, KEYS_MODEL, whole.list, 2, DT_F32, &e), &e);
        assert_ok(keymap_open(&b, &f, KEYS_MODEL, single.list, 4, DT_F32, &e), &e);
        assert_ok(keymap_load(a, 1, &ta, &e), &e);
        for (int k = 0; k < 3; k++) {
            assert_ok(keymap_load(b, 1 + k, &tb, &e), &e);
            assert_memory_equal(one, all[k], sizeof one);
        }
        keymap_close(a);
        keymap_close(b);
        key_file_close(&f);
    }
}

static void prediction_depths_load_from_a_transformer(void **state)
{
    (void)state;
    assert_same_values("mtp_hybrid.safetensors", "[*-][*-]/*-", "mtp_gpt.safetensors", "[*-][*-]/*-", KEYS_MODEL);
    assert_same_values("mtp_hybrid.safetensors", "[*-][*-]/*-", "mtp_gpt.safetensors", "*-*-/*-", KEYS_MODEL);
    assert_refused("mtp_gpt.safetensors", model("[*-][*-]/**-"), ST_CONFLICT, "the model's has 2 with self_attention");
    assert_refused("mtp_gpt.safetensors", model("[*-][*-]"), ST_CONFLICT, "10 unexpected: mtp.layers.0.");
}

static void projections_in_parts_are_joined(void **state)
{
    (void)state;
    struct tiny t = {0};
    add(&t, 0, "decoder.layers.0.mixer.in_proj.weight", 2, 14, 4, 0);
    struct values *x = load_all("mamba_whole.safetensors", &t, KEYS_MODEL),
                  *y = load_all("mamba_split.safetensors", &t, KEYS_MODEL);
    assert_memory_equal(x, y, sizeof *x);
    free(x);
    /* The order of rows in memory is that of the whole, not of its parts. */
    t.p[0].rows = (struct row_layout){.n_sections = 2, .groups = 2, .rows = {4, 3}};
    x = load_all("mamba_split.safetensors", &t, KEYS_MODEL);
    assert_memory_not_equal(x, y, sizeof *x);
    for (int r = 0; r < 14; r++)
        assert_memory_equal(&x->v[0][4 * param_row_from_disk(&t.p[0], r)], &y->v[0][4 * r], 4 * sizeof(float));
    free(x);
    free(y);
    t.p[0].rows = (struct row_layout){0};
    t.p[0].dim[0] = 15;
    struct key_file f = open_file("mamba_split.safetensors");
    struct keymap *m;
    struct err e = {0};
    assert_fails(keymap_open(&m, &f, KEYS_MODEL, t.list, 1, DT_F32, &e), ST_CONFLICT, &e,
                 "14 rows together, the model needs 15");
    key_file_close(&f);
}

static void rows_are_brought_into_the_order_of_memory(void **state)
{
    (void)state;
    struct tiny *t = model("*-*-");
    struct values *disk = load_all("gpt_stacked.safetensors", t, KEYS_MODEL);
    t->p[2].rows = (struct row_layout){.n_sections = 2, .groups = 2, .rows = {3, 1}};
    struct values *mem = load_all("gpt_stacked.safetensors", t, KEYS_MODEL);
    for (int r = 0; r < 8; r++)
        assert_memory_equal(&mem->v[2][4 * param_row_from_disk(&t->p[2], r)], &disk->v[2][4 * r], 4 * sizeof(float));
    assert_memory_not_equal(mem->v[2], disk->v[2], 32 * sizeof(float));
    free(t);
    free(disk);
    free(mem);
}

/* ---- refusals -------------------------------------------------------------------------------- */

struct made {
    char *dir, *path;
};
/* A file of the named F32 tensors, all of the same shape. */
static struct made make_file(const char *const *keys, int n, int rank, const int64_t *dim)
{
    static float zeros[256];
    struct made m = {.dir = temp_dir()};
    struct st_item items[16];
    struct err e = {0};
    m.path = path_join(m.dir, "made.safetensors");
    for (int i = 0; i < n; i++) {
        items[i] = (struct st_item){.name = keys[i], .host = tensor_shape(DT_F32, rank, dim)};
        items[i].host.data = zeros;
    }
    assert_ok(st_write_file(m.path, items, n, NULL, 0, &e), &e);
    return m;
}

static void discard(struct made *m)
{
    file_remove_tree(m->dir, NULL);
    free(m->dir);
    free(m->path);
}

static void a_second_source_for_a_key_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *a, *b, *want;
        int rank;
        int64_t dim[3];
        const char *text;
    } cases[] = {
        {"decoder.final_norm.weight",
         "decoder.final_layernorm.weight",
         "decoder.final_norm.weight",
         1,
         {4},
         "are names of the same tensor"},
        {"module.embedding.word_embeddings.weight",
         "embedding.word_embeddings.weight",
         "embedding.word_embeddings.weight",
         2,
         {5, 4},
         "are names of the same tensor"},
        {"decoder.layers.0.mlp.linear_fc2.weight",
         "decoder.layers.mlp.linear_fc2.weight",
         "decoder.layers.0.mlp.linear_fc2.weight",
         2,
         {4, 3},
         "could come from"},
        {"decoder.layers.0.mlp.experts.linear_fc2.weight",
         "decoder.layers.0.mlp.experts.linear_fc2.weight0",
         "decoder.layers.0.mlp.experts.linear_fc2.weight",
         3,
         {3, 4, 3},
         "could come from"},
        {"decoder.layers.0.mlp.experts.linear_fc2.weight0",
         "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight",
         "decoder.layers.0.mlp.experts.linear_fc2.weight",
         2,
         {4, 3},
         "are names of the same tensor"},
        {"mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
         "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc2.weight",
         "mtp.layers.0.mtp_model_layer.layers.1.mlp.linear_fc2.weight",
         2,
         {4, 3},
         "could come from"},
    };
    for (int i = 0; i < countof(cases); i++) {
        const char *keys[] = {cases[i].a, cases[i].b};
        struct made file = make_file(keys, 2, cases[i].rank, cases[i].dim);
        struct tiny *t = calloc(1, sizeof *t);
        add(t, 0, cases[i].want, cases[i].rank, cases[i].dim[0], cases[i].dim[1], cases[i].dim[2]);
        assert_refused(file.path, t, ST_CONFLICT, cases[i].text);
        discard(&file);
    }
}

static void two_parameters_with_one_key_are_refused(void **state)
{
    (void)state;
    assert_refused("grouped_hybrid.safetensors", model("[**-][*-]"), ST_CONFLICT,
                   "two parameters of the model have the key decoder.layers.0.self_attention.");
}

static void structures_that_differ_are_refused(void **state)
{
    (void)state;
    assert_refused("gpt_stacked.safetensors", model("*-*-*-"), ST_CONFLICT,
                   "it has 2 attention layers, the model has 3");
    assert_refused("gpt_stacked.safetensors", model("*E*E"), ST_CONFLICT, "it has 2 MLP layers, the model has 0");
    assert_refused("gpt_stacked.safetensors", model("[*-]"), ST_CONFLICT, "unexpected: decoder.layers.mlp.");
    assert_refused("gpt_stacked.safetensors", model("[*-][*-][*-]"), ST_CONFLICT,
                   "6 missing: decoder.layers.2.self_attention.");
    assert_refused("flat_hybrid.safetensors", model("*-"), ST_CONFLICT, "unexpected: decoder.layers.2.");
    assert_refused("flat_hybrid.safetensors", model("-*-*"), ST_CONFLICT, "another order");
    assert_refused("gpt_indexed.safetensors", model("++--"), ST_CONFLICT, "another order");
}

static void shapes_that_differ_are_refused_with_both(void **state)
{
    (void)state;
    struct tiny *t = model("*-*-");
    t->p[3].dim[1] = 5;
    assert_refused("gpt_stacked.safetensors", t, ST_CONFLICT,
                   "'decoder.layers.self_attention.linear_proj.weight' is F32 [4, 4] but "
                   "decoder.layers.0.self_attention."
                   "linear_proj.weight of the model needs F32 [4, 5]");
    t = model("[*E]");
    t->p[6].dim[0] = 4;
    assert_refused("experts_indexed.safetensors", t, ST_CONFLICT, "has 3 experts from 0 to 2, the model has 4");
    t = calloc(1, sizeof *t);
    add(t, 0, "decoder.layers.0.self_attention.linear_proj.weight", 2, 4, 4, 0);
    for (int k = 0; k < 4; k++) {
        char key[96];
        snprintf(key, sizeof key, "decoder.layers.0.mlp.experts.linear_fc2.bias%d", k);
        add(t, 1, key, 1, 4, 0, 0);
    }
    assert_refused("experts_grouped.safetensors", t, ST_CONFLICT, "Cannot split checkpoint tensor");
    t = calloc(1, sizeof *t);
    add(t, -1, "decoder.layers.0.mlp.linear_fc2.weight", 2, 4, 3, 0);
    assert_refused("flat_hybrid.safetensors", t, ST_INVALID, "names no layer");
}

static void odd_stacks_are_refused(void **state)
{
    (void)state;
    static const char *const keys[] = {"decoder.layers.mlp.linear_fc2.weight"};
    struct made flat = make_file(keys, 1, 0, NULL);
    assert_refused(flat.path, model("*-"), ST_CONFLICT, "no layer axis");
    discard(&flat);
    static const char *const strange[] = {"decoder.layers.99999999999.mlp.linear_fc2.weight",
                                          "decoder.layers.01.mlp.linear_fc2.weight",
                                          "decoder.layers.",
                                          "mtp.layers.x.enorm.weight",
                                          "module.",
                                          "decoder.layers.0.mlp.experts.local_experts.x.weight",
                                          "decoder.layers.0.mlp.experts.linear_fc1.weight0x"};
    const int64_t dim[] = {4, 3};
    struct made odd = make_file(strange, countof(strange), 2, dim);
    struct tiny *t = calloc(1, sizeof *t);
    add(t, -1, "embedding.word_embeddings.weight", 2, 4, 3, 0);
    assert_refused(odd.path, t, ST_CONFLICT, "7 unexpected");
    discard(&odd);
}

/* ---- converting ------------------------------------------------------------------------------ */

static char *convert_to(const char *dir, const char *from, const char *name, enum key_layout layout,
                        const struct key_layers *l)
{
    struct key_file f = open_file(from);
    struct key_output out;
    struct err e = {0};
    char *path = path_join(dir, name);
    assert_ok(key_convert(&out, &f, KEYS_MODEL, &(struct key_target){.layout = layout, .layers = l}, &e), &e);
    assert_ok(st_write_file(path, out.items, out.n, NULL, 0, &e), &e);
    key_output_release(&out);
    key_file_close(&f);
    return path;
}

/* The same keys, shapes, types and bits. */
static void assert_same_file(const char *path_a, const char *path_b)
{
    struct key_file a = open_file(path_a), b = open_file(path_b);
    int n = 0;
    for (int i = 0; i < a.n; i++) {
        if (a.list[i].space != KEYS_MODEL || strstr(a.list[i].key, "_extra_state"))
            continue;
        n++;
        int k = 0;
        while (k < b.n && strcmp(a.list[i].stored, b.list[k].stored) != 0)
            k++;
        if (k == b.n)
            fail_msg("%s is not in %s", a.list[i].stored, path_b);
        assert_true(tensor_same_shape(&a.list[i].view, &b.list[k].view));
        assert_int_equal(a.list[i].view.dtype, b.list[k].view.dtype);
        assert_memory_equal(a.list[i].view.data, b.list[k].view.data, (size_t)tensor_bytes(&a.list[i].view));
    }
    assert_int_equal(n, b.n);
    key_file_close(&a);
    key_file_close(&b);
}

static void layouts_convert_into_each_other_and_back(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
        enum key_layout layout, back;
    } cases[] = {
        {"flat_hybrid.safetensors", "grouped_hybrid.safetensors", KEYS_LOGICAL, KEYS_FLAT},
        {"grouped_hybrid.safetensors", "gpt_stacked.safetensors", KEYS_STACKED, KEYS_LOGICAL},
        {"gpt_stacked.safetensors", "flat_hybrid.safetensors", KEYS_FLAT, KEYS_STACKED},
        {"experts_grouped.safetensors", "experts_indexed.safetensors", KEYS_INDEXED, KEYS_GROUPED},
        {"mtp_gpt.safetensors", "mtp_hybrid.safetensors", KEYS_LOGICAL, KEYS_LOGICAL},
    };
    for (int i = 0; i < countof(cases); i++) {
        char *dir = temp_dir();
        char *there = convert_to(dir, cases[i].from, "there.safetensors", cases[i].layout, NULL);
        char *back = convert_to(dir, there, "back.safetensors", cases[i].back, NULL);
        assert_same_file(cases[i].to, there);
        assert_same_file(i == 4 ? cases[i].to : cases[i].from, back);
        file_remove_tree(dir, NULL);
        free(dir);
        free(there);
        free(back);
    }
}

static void packed_experts_are_split_by_the_routers_count(void **state)
{
    (void)state;
    char *dir = temp_dir();
    char *there = convert_to(dir, "experts_packed.safetensors", "there.safetensors", KEYS_INDEXED, NULL);
    assert_same_file("experts_indexed.safetensors", there);
    char *same = convert_to(dir, "experts_sequential.safetensors", "same.safetensors", KEYS_GROUPED, NULL);
    assert_same_file("experts_grouped.safetensors", same);
    char *stack = convert_to(dir, "experts_indexed.safetensors", "stack.safetensors", KEYS_STACKED, NULL);
    assert_same_values("experts_grouped.safetensors", "[*E]", stack, "*E", KEYS_MODEL);
    file_remove_tree(dir, NULL);
    free(dir);
    free(there);
    free(same);
    free(stack);
}

static void groups_come_from_a_pattern_where_keys_do_not_say(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "decoder.layers.0.mixer.in_proj.weight", "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.linear_fc1.weight", "decoder.layers.2.mlp_hyper_connection.bias"};
    static const uint16_t item[] = {0, 0, 0}, apart[] = {0, 1, 1};
    const int64_t dim[] = {4, 3};
    struct made file = make_file(keys, countof(keys), 2, dim);
    struct key_layers pattern = {.n = 3, .symbols = "M*-", .item = item};
    struct key_file f = open_file(file.path), g;
    struct key_output out;
    struct err e = {0};
    assert_fails(key_convert(&out, &f, KEYS_MODEL, &(struct key_target){.layout = KEYS_LOGICAL}, &e), ST_CONFLICT, &e,
                 "--pattern");
    char *there = convert_to(file.dir, file.path, "there.safetensors", KEYS_LOGICAL, &pattern);
    char *back = convert_to(file.dir, there, "back.safetensors", KEYS_FLAT, &pattern);
    assert_same_file(file.path, back);
    g = open_file(there);
    assert_int_equal(g.n, 4);
    for (int i = 0; i < g.n; i++)
        assert_true(str_starts(g.list[i].key, "decoder.layers.0."));
    assert_fails(key_convert(&out, &g, KEYS_MODEL, &(struct key_target){.layout = KEYS_FLAT}, &e), ST_CONFLICT, &e,
                 "attention and Mamba and MLP");
    pattern.item = apart;
    assert_fails(key_convert(&out, &g, KEYS_MODEL, &(struct key_target){.layout = KEYS_FLAT, .layers = &pattern}, &e),
                 ST_CONFLICT, &e, "pattern differs");
    pattern.symbols = "M-*";
    assert_fails(
        key_convert(&out, &f, KEYS_MODEL, &(struct key_target){.layout = KEYS_LOGICAL, .layers = &pattern}, &e),
        ST_CONFLICT, &e, "pattern differs");
    pattern.n = 2;
    pattern.item = item;
    assert_fails(
        key_convert(&out, &f, KEYS_MODEL, &(struct key_target){.layout = KEYS_LOGICAL, .layers = &pattern}, &e),
        ST_CONFLICT, &e, "pattern differs");
    key_file_close(&f);
    key_file_close(&g);
    free(there);
    free(back);
    discard(&file);
}

static void only_layers_that_are_alike_are_stacked(void **state)
{
    (void)state;
    static const char *const keys[] = {
        "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.router.weight"};
    const int64_t dim[] = {4, 3};
    struct made file = make_file(keys, countof(keys), 2, dim);
    struct key_file f = open_file(file.path), g = open_file("experts_indexed.safetensors");
    struct key_output out;
    struct err e = {0};
    assert_ok(key_convert(&out, &f, KEYS_MODEL, &(struct key_target){.layout = KEYS_STACKED}, &e), &e);
    assert_non_null(out.note);
    assert_non_null(strstr(out.note, "layer 1 has no 'mlp.linear_fc1.weight'"));
    assert_int_equal(out.n, countof(keys));
    for (int i = 0; i < countof(keys); i++) { /* sorted as they were */
        int k = 0;
        while (k < out.n && strcmp(out.items[k].name, keys[i]) != 0)
            k++;
        assert_true(k < out.n);
    }
    key_output_release(&out);
    for (int i = 0; i < g.n; i++)
        if (str_ends(g.list[i].key, "linear_fc1.weight1"))
            g.list[i] = g.list[--g.n];
    assert_fails(key_convert(&out, &g, KEYS_MODEL, &(struct key_target){.layout = KEYS_GROUPED}, &e), ST_CONFLICT, &e,
                 "not all experts");
    key_file_close(&f);
    key_file_close(&g);
    discard(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dense_layout_loads_into_every_dense_model),
        cmocka_unit_test(optimizer_state_follows_the_same_map),
        cmocka_unit_test(fp32_master_weights_are_loaded_in_place_of_rounded_ones),
        cmocka_unit_test(master_weights_that_do_not_fit_are_refused),
        cmocka_unit_test(hyper_connections_of_a_hybrid_stack_are_read),
        cmocka_unit_test(a_transformer_fills_a_hybrid_in_any_order),
        cmocka_unit_test(mamba_layers_may_be_new),
        cmocka_unit_test(experts_load_from_every_layout),
        cmocka_unit_test(single_experts_load_from_one_tensor),
        cmocka_unit_test(prediction_depths_load_from_a_transformer),
        cmocka_unit_test(projections_in_parts_are_joined),
        cmocka_unit_test(rows_are_brought_into_the_order_of_memory),
        cmocka_unit_test(a_second_source_for_a_key_is_refused),
        cmocka_unit_test(two_parameters_with_one_key_are_refused),
        cmocka_unit_test(structures_that_differ_are_refused),
        cmocka_unit_test(shapes_that_differ_are_refused_with_both),
        cmocka_unit_test(odd_stacks_are_refused),
        cmocka_unit_test(layouts_convert_into_each_other_and_back),
        cmocka_unit_test(packed_experts_are_split_by_the_routers_count),
        cmocka_unit_test(groups_come_from_a_pattern_where_keys_do_not_say),
        cmocka_unit_test(only_layers_that_are_alike_are_stacked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
