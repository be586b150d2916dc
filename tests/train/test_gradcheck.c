/* train/: gradients of whole models against central differences in double, over the options of the
 * layers. */
#include "ops/ops.h"
#include "tiny.h"
#include "ops/gemm/gemm.h"
#include "train/train.h"

/* Each line is a model; together they switch every option that changes the maths. */
static const char *const models[] = {
    "model.pattern=*",
    "model.pattern=-",
    "model.pattern=*-*-",
    "model.pattern=[*-]-*",
    "model.tied=off",
    "model.kv_heads=1",
    "model.kv_heads=4",
    "model.kv_heads=2 model.head_dim=6",
    "model.qk_norm=on",
    "model.attn_gate=on",
    "model.qk_norm=on model.attn_gate=on model.kv_heads=1",
    "model.qkv_bias=on",
    "model.bias=on",
    "model.bias=on model.act=gelu model.tied=off",
    "model.attn_window=3",
    "model.pattern=*** model.attn_window=3 model.attn_window_skip=2",
    "model.attn_sink=off_by_one",
    "model.attn_sink=learnable",
    "model.attn_sink=learnable model.attn_window=2 model.qk_norm=on",
    "model.rope=none",
    "model.rope=none model.qk_norm=on",
    "model.rope=interleaved",
    "model.rope=interleaved model.rope_percent=0.5",
    "model.rope_percent=0.5",
    "model.rope_percent=0.5 model.qk_norm=on",
    "model.rope_base=500",
    "model.rope_scaling=linear model.rope_factor=4",
    "model.rope_scaling=llama3 model.rope_factor=8 model.rope_original=16",
    "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=8 model.rope_mscale=1 "
    "model.rope_mscale_all_dim=0.5",
    "model.pattern=**- model.no_rope_freq=2",
    "model.pattern=** model.no_rope_freq=2 model.qk_norm=on",
    "model.softmax_scale=0.7",
    "model.act=swiglu model.act_clamp=0.6 model.act_offset=1",
    "model.act=geglu",
    "model.act=geglu model.act_clamp=0.8",
    "model.act=quick_geglu model.act_alpha=1.3 model.act_clamp=0.7 model.act_offset=1",
    "model.act=gelu",
    "model.act=quick_gelu",
    "model.act=relu2",
    "model.act=silu",
    "model.dropout=0.3",
    "model.pattern=*-*- model.dropout=0.2 plan.recompute=full plan.poison=on",
    "model.norm_zero_centered=on",
    "model.norm_zero_centered=on model.qk_norm=on",
    "data.eod=on data.eod_mask=on",
    "data.eod=on data.eod_mask=on model.attn_window=2 model.attn_sink=learnable",
    "model.vocab_multiple=16",
    "train.loss_chunk=5",
    "train.z_loss=0.3 model.tied=off data.eod=on data.eod_mask=on",
    "train.micro_batch=1 train.seq=1",
    "train.micro_batch=3 train.seq=5",
    "plan.recompute=norm,mlp.act,attn.qkv plan.delay_dw=on plan.poison=on plan.random_lanes=7",
    "model.pattern=E model.experts=4 model.aux_loss=0.5 model.seq_aux_loss=0.3 "
    "model.global_aux_loss=0.2 model.router_z_loss=0.1",
    "model.pattern=*E model.router_pre_softmax=on model.topk=1 model.aux_loss=1 "
    "model.router_scale=2.5",
    "model.pattern=E model.router_score=sigmoid model.router_bias=on model.shared_ffn=10 "
    "model.seq_aux_loss=1 model.router_groups=4 model.router_group_topk=1",
    "model.pattern=E model.router_score=sqrtsoftplus model.router_bias=on model.shared_ffn=10 "
    "model.shared_gate=on model.expert_bias=on model.topk=3 model.router_z_loss=0.2",
    "model.pattern=E model.expert_bias=on model.glu_interleave=4 model.router_jitter=0.1",
    "model.pattern=E model.act=relu2 model.expert_bias=on model.router_norm=off "
    "model.router_score=sigmoid",
    "model.pattern=E model.experts=4 model.router_capacity=0.7 model.aux_loss=0.1",
    "model.pattern=E model.experts=4 model.router_capacity=0.5 model.router_drop=position "
    "model.expert_bias=on",
    "model.pattern=EE model.router_hash_layers=1 model.router_score=sqrtsoftplus model.aux_loss=0.1",
    "model.pattern=E- model.router_hash_layers=1 model.expert_ffn=6",
};

struct tally {
    int rows;
    double worst;
    char key[96];
    double magnitude;
};

static void note(void *ctx, const struct model_check_row *row)
{
    struct tally *t = ctx;
    t->rows++;
    t->magnitude += fabs(row->analytic);
    if (!(row->error <= t->worst)) {
        t->worst = row->error;
        snprintf(t->key, sizeof t->key, "%s", row->key);
    }
}

static void check_model(const char *options)
{
    struct config c;
    struct err e = {0};
    struct tally t = {0};
    double worst;
    tiny_config(&c, options);
    assert_ok(model_gradcheck(&c, 1, note, &t, &worst, &e), &e);
    if (!(worst <= 1e-6))
        fail_msg("%s: error %g in %s", options, worst, t.key);
    assert_true(t.rows >= 3 && t.magnitude > 1e-6); /* not all zero */
    config_release(&c);
}

static void gradients_equal_differences_for_every_option(void **state)
{
    (void)state;
    int n;
    const char *const *general = tiny_models(&n);
    for (int i = 0; i < n; i++)
        check_model(general[i]);
    for (int i = 0; i < countof(models); i++)
        check_model(models[i]);
}

/* The loss of an indexer is smaller than that of the model by orders of magnitude, whose rounding would hide it. */
static void indexers_are_checked_as_closely_as_the_rest(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    double worst;
    tiny_config(&c,
                "model.pattern=D- model.hidden=32 model.mla_kv_rank=16 model.mla_nope=8 model.mla_rope=8 model.mla_v=8 "
                "model.dsa_indexer_n_heads=4 model.dsa_indexer_head_dim=16 model.dsa_indexer_topk=24 "
                "model.dsa_indexer_use_sparse_loss=on train.seq=48 train.micro_batch=1");
    assert_ok(model_gradcheck(&c, 1, NULL, NULL, &worst, &e), &e);
    if (!(worst <= 1e-7))
        fail_msg("worst error %g", worst);
    config_release(&c);
}

/* Stacks of several kinds, with dropout, biases and the losses of routers at once. */
static void gradients_of_hybrid_stacks_equal_differences(void **state)
{
    (void)state;
#define MAMBA "model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 model.mamba_chunk=3 "
#define DELTA                                                                                                          \
    "model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 model.gdn_value_dim=4 model.gdn_chunk=3 "
#define LATENT "model.mla_kv_rank=12 model.mla_q_rank=10 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 "
#define EXPERTS                                                                                                        \
    "model.experts=4 model.expert_bias=on model.aux_loss=0.3 model.seq_aux_loss=0.2 model.global_aux_loss=0.1 "        \
    "model.router_z_loss=0.1 "
#define ALL "model.bias=on model.dropout=0.2 "
    static const char *const stacks[] = {
        "model.pattern=M*- " MAMBA ALL,
        "model.pattern=GE " DELTA EXPERTS ALL,
        "model.pattern=+E " LATENT EXPERTS ALL,
        "model.pattern=[M*E]M-/*E model.mtp_scale=0.5 " MAMBA EXPERTS ALL,
        "model.pattern=[M*E]M-/*E model.mtp_scale=0.5 model.router_score=sigmoid model.router_bias=on "
        "model.shared_ffn=8 "
        "data.eod=on data.eod_mask=on " MAMBA EXPERTS ALL,
        "model.pattern=[GE]|[+E]/+E/+E model.mtp_scale=0.7 model.router_pre_softmax=on " DELTA LATENT EXPERTS ALL,
    };
#undef MAMBA
#undef DELTA
#undef LATENT
#undef EXPERTS
#undef ALL
    for (int i = 0; i < countof(stacks); i++)
        check_model(stacks[i]);
}

/* Hyper-connections over every core, both profiles, several numbers of streams, dropout and biases; with prediction
 * depths, which read the streams before their contraction. The gating factor is the initial alpha: small ones have
 * gradients so near 0 that a difference in double cannot tell them. */
static void gradients_of_streams_equal_differences_over_every_core(void **state)
{
    (void)state;
    static const char *const stacks[] = {
        "model.pattern=M*G-E model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 "
        "model.mamba_chunk=3 model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 "
        "model.gdn_value_dim=4 model.gdn_chunk=3",
        "model.pattern=+E- model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5",
        "model.pattern=*-/*- model.mtp_scale=0.5",
        "model.pattern=-*/*-/*- model.mtp_scale=0.5",
    };
    static const int streams[] = {2, 3, 4, 8};
    for (int i = 0; i < countof(stacks) * countof(streams) * 2; i++) {
        char options[640];
        snprintf(options, sizeof options,
                 "%s model.mhc_streams=%d model.mhc_profile=%c model.mhc_gating=1 model.experts=4 "
                 "model.dropout=0.1 model.bias=on model.expert_bias=on",
                 stacks[i / 8], streams[i / 2 % 4], i % 2 ? 's' : 'd');
        check_model(options);
    }
}

/* The check must be able to fail: a plan whose weight gradient lacks one contribution is wrong. */
static int wrong_dw(const struct step_ctx *c)
{
    enum { DY, X, DW };
    struct gemm_args a = {
        .a = c->t[DY], .b = c->t[X], .c = c->t[DW], .trans_a = true, .alpha = 1.001, .acc_c = c->add[DW]};
    return c->ops->gemm(c->lane, &a);
}

static void a_wrong_gradient_shows(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=-", DEV_REF, 1);
    int n = 0, k = param_find(&t.m.params, "decoder.layers.0.mlp.linear_fc2.weight");
    while (strcmp(t.train.g.nodes[n].name, "0.mlp.fc2") != 0)
        n++;
    struct tensor p = model_param(&t.m, k), g = model_grad(&t.m, k);
    double diff[2];
    for (int wrong = 0; wrong < 2; wrong++) {
        if (wrong)
            t.train.g.nodes[n].phase[PH_DW].fn = wrong_dw;
        const double h = 1e-5;
        double up, down, *at = (double *)p.data + 5;
        tiny_run(&t, 2);
        double analytic = ((const double *)g.data)[5] * 32; /* tiny_run scales by 1/32 */
        *at += h;
        tiny_run(&t, 2);
        up = tiny_loss(&t);
        *at -= 2 * h;
        tiny_run(&t, 2);
        down = tiny_loss(&t);
        *at += h;
        diff[wrong] = fabs((up - down) / (2 * h) - analytic) / fabs(analytic);
    }
    assert_true(diff[0] < 1e-6 && diff[1] > 5e-4);
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_equal_differences_for_every_option),
        cmocka_unit_test(indexers_are_checked_as_closely_as_the_rest),
        cmocka_unit_test(gradients_of_hybrid_stacks_equal_differences),
        cmocka_unit_test(gradients_of_streams_equal_differences_over_every_core),
        cmocka_unit_test(a_wrong_gradient_shows),
    };
    return cmocka_run_group_tests_name("gradcheck", tests, NULL, NULL);
}
