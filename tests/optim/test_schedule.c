/* Learning-rate schedules: values at every border, and settings that make no sense. */
#include "support.h"

#include "optim/schedule.h"

#define assert_rate(s, step, want) assert_float_equal(lr_at((s), (step)), (want), 1e-12)

static void warm_up_reaches_the_maximum_on_its_last_update(void **state)
{
    (void)state;
    struct lr_schedule s = {.kind = LR_CONSTANT, .max = 1e-2, .warmup = 10};
    assert_rate(&s, 0, 1e-3); /* not 0: the first update is not wasted */
    assert_rate(&s, 4, 5e-3);
    assert_rate(&s, 9, 1e-2);
    assert_rate(&s, 10, 1e-2);
    s.init = 2e-3;
    assert_rate(&s, 0, 2.8e-3);
    assert_rate(&s, 9, 1e-2);
    assert_rate(&s, -5, 2.8e-3); /* before the beginning is the beginning */
}

static void constant_ignores_decay_and_minimum(void **state)
{
    (void)state;
    struct lr_schedule s = {.kind = LR_CONSTANT, .max = 3e-4, .min = 1e-5, .decay = 100};
    assert_rate(&s, 0, 3e-4);
    assert_rate(&s, 100, 3e-4);
    assert_rate(&s, INT64_MAX, 3e-4);
}

static void linear_and_cosine_go_from_max_to_min(void **state)
{
    (void)state;
    struct lr_schedule s = {.kind = LR_LINEAR, .max = 1.0, .min = 0.2, .warmup = 20, .decay = 120};
    assert_rate(&s, 19, 1.0);
    assert_rate(&s, 20, 1.0);
    assert_rate(&s, 45, 0.2 + 0.75 * 0.8);
    assert_rate(&s, 119, 0.2 + 0.01 * 0.8);
    assert_rate(&s, 120, 0.2);
    assert_rate(&s, 121, 0.2);
    assert_rate(&s, INT64_MAX, 0.2);
    s.kind = LR_COSINE;
    assert_rate(&s, 20, 1.0);
    assert_rate(&s, 45, 0.2 + 0.8 * 0.5 * (1 + sqrt(0.5)));
    assert_rate(&s, 70, 0.6);
    assert_rate(&s, 120, 0.2);
    assert_rate(&s, 1000, 0.2);
}

static void wsd_is_flat_and_then_follows_its_style(void **state)
{
    (void)state;
    struct lr_schedule s = {.kind = LR_WSD, .max = 1.0, .min = 0.1, .warmup = 10, .decay = 100, .wsd = 20};
    static const struct {
        enum lr_wsd_style style;
        double quarter, half; /* coefficients after 5 and 10 of the 20 updates */
    } want[] = {
        {LR_WSD_LINEAR, 0.75, 0.5},
        {LR_WSD_COSINE, 0.853553390593273762, 0.5},
        {LR_WSD_EXPONENTIAL, 0.681792830507429086, 0.414213562373095049},
        {LR_WSD_MINUS_SQRT, 0.5, 0.292893218813452475},
    };
    for (int i = 0; i < countof(want); i++) {
        s.wsd_style = want[i].style;
        assert_rate(&s, 9, 1.0);
        assert_rate(&s, 10, 1.0);
        assert_rate(&s, 79, 1.0);
        assert_rate(&s, 80, 1.0);
        assert_true(lr_at(&s, 81) < 1.0);
        assert_rate(&s, 85, 0.1 + 0.9 * want[i].quarter);
        assert_rate(&s, 90, 0.1 + 0.9 * want[i].half);
        assert_true(lr_at(&s, 99) > 0.1);
        assert_rate(&s, 100, 0.1);
        assert_rate(&s, 101, 0.1);
    }
}

static void rates_never_rise_after_the_warm_up(void **state)
{
    (void)state;
    struct lr_schedule s = {.max = 1.0, .min = 0.05, .warmup = 7, .decay = 50, .wsd = 13};
    for (int kind = LR_CONSTANT; kind <= LR_WSD; kind++)
        for (int style = LR_WSD_LINEAR; style <= LR_WSD_MINUS_SQRT; style++) {
            s.kind = (enum lr_kind)kind;
            s.wsd_style = (enum lr_wsd_style)style;
            for (int64_t step = 0; step < 60; step++) {
                double now = lr_at(&s, step), next = lr_at(&s, step + 1);
                assert_true(step < 6 ? next > now : next <= now);
                assert_true(now <= s.max && (step < 7 || now >= s.min));
            }
        }
}

static void senseless_settings_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct lr_schedule good = {.kind = LR_WSD, .max = 1, .min = 0.1, .warmup = 10, .decay = 100, .wsd = 90};
    assert_ok(lr_schedule_check(&good, &e), &e);
    struct lr_schedule s = good;
    s.max = NAN;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "finite");
    s = good, s.min = 2;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "min <= max");
    s = good, s.init = -1;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "out of order");
    s = good, s.warmup = -1;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "negative");
    s = good, s.warmup = 100;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "warm-up of 100");
    s = good, s.wsd = 91;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "WSD tail of 91");
    s = good, s.wsd = 0;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "20%");
    s = good, s.kind = (enum lr_kind)9;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "kind 9");
    s = good, s.wsd_style = (enum lr_wsd_style)9;
    assert_fails(lr_schedule_check(&s, &e), ST_INVALID, &e, "style 9");
    s = good, s.kind = LR_CONSTANT, s.decay = 0, s.wsd = 0;
    assert_ok(lr_schedule_check(&s, &e), &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(warm_up_reaches_the_maximum_on_its_last_update),
        cmocka_unit_test(constant_ignores_decay_and_minimum),
        cmocka_unit_test(linear_and_cosine_go_from_max_to_min),
        cmocka_unit_test(wsd_is_flat_and_then_follows_its_style),
        cmocka_unit_test(rates_never_rise_after_the_warm_up),
        cmocka_unit_test(senseless_settings_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
