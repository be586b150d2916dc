/* train/: models with gated delta nets: gradients against central differences in double, and
 * schedules and recomputing bit for bit. Decoding against the full pass: test_decode.c, by the
 * pattern in tiny.h. */
#include "tiny.h"
#include "train/train.h"

#define SMALL "model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=6 model.gdn_value_dim=5 "

static const char *const models[] = {
    SMALL "model.pattern=G",
    SMALL "model.pattern=G-",
    SMALL "model.pattern=*G-",
    SMALL "model.pattern=G model.gdn_key_heads=4 model.gdn_chunk=1",
    SMALL "model.pattern=G- model.gdn_key_heads=1 model.gdn_chunk=3 data.eod=on data.eod_mask=on",
    SMALL "model.pattern=GG model.gdn_conv=1 model.norm_zero_centered=on model.tied=off",
    SMALL "model.pattern=G* model.gdn_conv=2 model.gdn_chunk=8 train.seq=9 train.micro_batch=1",
    SMALL "model.pattern=*G- model.dropout=0.2 plan.recompute=full plan.poison=on",
};

static void gradients_equal_differences(void **state)
{
    (void)state;
    for (int i = 0; i < countof(models); i++) {
        struct config c;
        struct err e = {0};
        double worst;
        tiny_config(&c, models[i]);
        assert_ok(model_gradcheck(&c, 1, NULL, NULL, &worst, &e), &e);
        if (!(worst <= 1e-6))
            fail_msg("%s: error %g", models[i], worst);
        config_release(&c);
    }
}

static int64_t gradient_bytes(const struct tiny *t) { return t->m.mem.allocated[ARENA_GRAD]; }

static void plans_do_not_change_a_bit(void **state)
{
    (void)state;
    static const char *const variants[] = {
        "plan.poison=on",
        "plan.random_lanes=1 plan.poison=on",
        "plan.random_lanes=2",
        "plan.delay_dw=on",
        "plan.recompute=gdn.qkv",
        "plan.recompute=gdn.states plan.poison=on",
        "plan.recompute=gdn.n,gdn.rstd",
        "plan.recompute=gdn.* plan.poison=on plan.random_lanes=3 plan.delay_dw=on",
        "plan.recompute=gdn",
        "plan.recompute=full plan.poison=on",
    };
    const char *model = SMALL "model.pattern=*GG- model.gdn_chunk=3 data.eod=on data.eod_mask=on model.dropout=0.1";
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        struct tiny plain;
        tiny_open(&plain, model, (enum dev_kind)kind, 1);
        tiny_run(&plain, 4);
        for (int i = 0; i < countof(variants); i++) {
            char all[512];
            struct tiny other;
            snprintf(all, sizeof all, "%s %s", model, variants[i]);
            tiny_open(&other, all, (enum dev_kind)kind, 1);
            tiny_run(&other, 4);
            assert_int_equal(gradient_bytes(&plain), gradient_bytes(&other));
            for (int k = 0; k < plain.m.params.n; k++) {
                struct tensor a = model_grad(&plain.m, k), b = model_grad(&other.m, k);
                if (memcmp(a.data, b.data, (size_t)tensor_bytes(&a)) != 0)
                    fail_msg("%s: gradient of %s", variants[i], plain.m.params.list[k].p.key);
            }
            assert_true(tiny_loss(&plain) == tiny_loss(&other));
            tiny_close(&other);
        }
        tiny_close(&plain);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_equal_differences),
        cmocka_unit_test(plans_do_not_change_a_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
