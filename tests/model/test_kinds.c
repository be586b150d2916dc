/* What a layer kind and a residual connection must say of themselves (kind/kind.h), asked of all of
 * them. */
#include "tiny.h"

static bool option_exists(const char *name)
{
    struct config c;
    struct err e = {0};
    struct buf text;
    buf_init(&text, 0);
    assert_ok(config_init(&c, &e), &e);
    bool exists = config_value_text(&c, name, &text) != NULL;
    buf_release(&text);
    config_release(&c);
    return exists;
}

static void symbols_are_unique_and_no_part_of_the_grammar(void **state)
{
    (void)state;
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    assert_true(n >= 7);
    for (int i = 0; i < n; i++) {
        assert_ptr_equal(core_find(cores[i]->symbol), cores[i]);
        assert_null(strchr("[]()|/x0123456789 ", cores[i]->symbol));
    }
    assert_null(core_find('?'));
}

static void kinds_that_are_built_are_described(void **state)
{
    (void)state;
    int n;
    const struct core_kind *const *cores = core_kinds(&n);
    for (int i = 0; i < n; i++) {
        const struct core_kind *k = cores[i];
        assert_non_null(k->name);
        assert_non_null(k->title);
        assert_non_null(k->keys.family);
        assert_true((k->excludes == NULL) == (k->excludes_message == NULL));
        assert_true(k->keys.n_splits == 0 || k->keys.part_rows != NULL);
        if (k->declare == NULL)
            continue;
        assert_non_null(k->norm_key);
        assert_non_null(k->flops);
        bool prefixed = false; /* by itself, or by another kind of the family */
        for (int j = 0; j < n; j++)
            prefixed |= core_same_family(cores[j], k) && cores[j]->keys.prefixes[0] != NULL;
        if (!prefixed)
            fail_msg("no key begins like those of %s", k->name);
    }
}

static void options_that_kinds_name_exist(void **state)
{
    (void)state;
    struct kind_at at;
    int names = 0;
    for (int i = 0; kind_at(i, &at); i++) {
        const struct kind_options *o = at.options;
        for (int k = 0; k < o->n_uses; k++, names++) {
            if (!option_exists(o->uses[k].name))
                fail_msg("kind %d reads %s, which is no option", i, o->uses[k].name);
            assert_true((o->uses[k].read == NULL) == (o->uses[k].needs == NULL));
        }
        for (int k = 0; k < KIND_MAX_REFUSED && o->refused[k] != NULL; k++, names++)
            assert_true(option_exists(o->refused[k]));
        for (int k = 0; k < o->n_tiny; k++, names++)
            assert_true(option_exists(o->tiny[k].name));
        for (int k = 0; k < o->n_rules; k++)
            for (int j = 0; j < countof(o->rules[k].options) && o->rules[k].options[j] != NULL; j++, names++)
                assert_true(option_exists(o->rules[k].options[j]));
    }
    assert_true(names > 150);
}

static void a_model_has_one_joint(void **state)
{
    (void)state;
    struct config c;
    tiny_config(&c, "");
    assert_string_equal(joint_of(&c)->name, "residual");
    config_release(&c);
    tiny_config(&c, "model.mhc_streams=4");
    assert_string_equal(joint_of(&c)->name, "mhc");
    config_release(&c);
}

/* ---- tensor parallelism ---------------------------------------------------------------------- */

static void every_parameter_says_how_it_is_split(void **state)
{
    (void)state;
    int n, seen = 0;
    const char *const *models = tiny_models(&n);
    for (int i = 0; i < n; i++) {
        struct tiny t;
        struct err e = {0};
        tiny_open(&t, models[i], DEV_CPU, 1);
        for (int k = 0; k < t.m.params.n; k++, seen++)
            if (param_split_check(&t.m.params.list[k].p, 1, &e) != ST_OK)
                fail_msg("%s: %s", models[i], e.msg);
        tiny_close(&t);
    }
    assert_true(seen > 300);
}

static const struct param *param_named(const struct tiny *t, const char *key)
{
    int k = param_find(&t->m.params, key);
    assert_true(k >= 0);
    return &t->m.params.list[k].p;
}

#define SIZES                                                                                                          \
    "model.hidden=16 model.vocab=24 model.mamba_head_dim=4 model.mamba_state=5 "                                       \
    "model.mamba_groups=2 model.mamba_chunk=3 "                                                                        \
    "model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 model.gdn_value_dim=4 "                         \
    "model.gdn_chunk=3 "                                                                                               \
    "model.qk_norm=on model.attn_gate=on model.attn_sink=learnable model.bias=on model.experts=4 "                     \
    "model.shared_ffn=8 "

static void two_ranks_can_share_a_model_of_even_sizes(void **state)
{
    (void)state;
    static const char *const patterns[] = {
        SIZES "model.pattern=*-MGE",
        "model.pattern=+- model.vocab=24 model.bias=on model.mla_q_rank=6 model.mla_kv_rank=8 "
        "model.mla_nope=4 model.mla_rope=4 model.mla_v=4",
        SIZES "model.pattern=*- model.mhc_streams=2", SIZES "model.pattern=*-/*-"};
    for (int i = 0; i < countof(patterns); i++) {
        struct tiny t;
        struct err e = {0};
        tiny_open(&t, patterns[i], DEV_CPU, 1);
        for (int k = 0; k < t.m.params.n; k++)
            assert_ok(param_split_check(&t.m.params.list[k].p, 2, &e), &e);
        tiny_close(&t);
    }
}

static void units_that_ranks_cannot_share_are_named(void **state)
{
    (void)state;
    struct tiny t;
    struct err e = {0};
    tiny_open(&t, "model.pattern=*- model.kv_heads=1", DEV_CPU, 1);
    const struct param *qkv = param_named(&t, "decoder.layers.0.self_attention.linear_qkv.weight");
    assert_ok(param_split_check(qkv, 1, &e), &e);
    assert_fails(param_split_check(qkv, 2, &e), ST_USAGE, &e, "");
    assert_non_null(strstr(e.msg, "decoder.layers.0.self_attention.linear_qkv.weight"));
    assert_non_null(strstr(e.msg, "1 groups"));
    struct param odd = *qkv;
    odd.split.section[0].size--;
    assert_int_equal(param_split_check(&odd, 1, &e), ST_INTERNAL);
    odd = *qkv;
    odd.split.n_sections--;
    assert_int_equal(param_split_check(&odd, 1, &e), ST_INTERNAL);
    odd.split.how = SPLIT_UNKNOWN;
    assert_int_equal(param_split_check(&odd, 1, &e), ST_INTERNAL);
    tiny_close(&t);
}

/* The two classes of replicated parameters must not be confused: what is summed twice or not at all
 * is silent. */
static void partial_gradients_are_of_the_class_the_layer_has(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        enum split_how how;
        enum split_grad grad;
        int dim;
    } rows[] = {
        {"0.self_attention.q_layernorm.weight", SPLIT_NONE, GRAD_OVER_HEADS, 0},
        {"0.self_attention.linear_proj.weight", SPLIT_DIM, GRAD_COMPLETE, 1},
        {"0.self_attention.linear_proj.bias", SPLIT_NONE, GRAD_OVER_TOKENS, 0},
        {"1.mlp.linear_fc1.layer_norm_weight", SPLIT_NONE, GRAD_OVER_TOKENS, 0},
        {"1.mlp.linear_fc2.weight", SPLIT_DIM, GRAD_COMPLETE, 1},
        {"2.mixer.norm.weight", SPLIT_DIM, GRAD_COMPLETE, 0},
        {"3.self_attention.out_norm.weight", SPLIT_NONE, GRAD_OVER_HEADS, 0},
        {"4.mlp.router.weight", SPLIT_NONE, GRAD_OVER_TOKENS, 0},
        {"4.mlp.experts.linear_fc1.weight", SPLIT_DIM, GRAD_OVER_TOKENS, 1},
        {"4.mlp.experts.linear_fc2.weight", SPLIT_DIM, GRAD_OVER_TOKENS, 2},
    };
    struct tiny t;
    tiny_open(&t, SIZES "model.pattern=*-MGE", DEV_CPU, 1);
    for (int i = 0; i < countof(rows); i++) {
        char key[128];
        snprintf(key, sizeof key, "decoder.layers.%s", rows[i].key);
        const struct param_split *s = &param_named(&t, key)->split;
        if (s->how != rows[i].how || s->grad != rows[i].grad || s->dim != rows[i].dim)
            fail_msg("%s: how %d, gradient %d, dimension %d", key, s->how, s->grad, s->dim);
    }
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(symbols_are_unique_and_no_part_of_the_grammar),
        cmocka_unit_test(kinds_that_are_built_are_described),
        cmocka_unit_test(options_that_kinds_name_exist),
        cmocka_unit_test(a_model_has_one_joint),
        cmocka_unit_test(every_parameter_says_how_it_is_split),
        cmocka_unit_test(two_ranks_can_share_a_model_of_even_sizes),
        cmocka_unit_test(units_that_ranks_cannot_share_are_named),
        cmocka_unit_test(partial_gradients_are_of_the_class_the_layer_has),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
