/* rope: frequencies and tables against hand-computed and golden values, rotation by known angles,
 * aliasing, views of a fused buffer, and every refusal. Generic checks are in test_ops.c. */
#include "bench.h"
#include "ops/rope/rope.h"

#include "golden_rope.h"
#include "ops/ops.h"

static const struct rope_config plain_32 = {.dim = 32, .base = 10000};
static const struct rope_config llama3_64 = {
    .dim = 64, .base = 500000, .scaling = ROPE_LLAMA3, .factor = 8, .original = 8192, .low = 1, .high = 4};
static const struct rope_config yarn_64 = {
    .dim = 64, .base = 10000, .scaling = ROPE_YARN, .factor = 40, .original = 4096, .beta_fast = 32, .beta_slow = 1};
static const struct rope_config yarn_32 = {
    .dim = 32, .base = 1000000, .scaling = ROPE_YARN, .factor = 4, .original = 32768, .beta_fast = 32, .beta_slow = 1};

static void near(double got, double want, double relative)
{
    if (!(fabs(got - want) <= relative * fabs(want) + 1e-300))
        fail_msg("%.17g, expected %.17g", got, want);
}

static void check_frequencies(const struct rope_config *c, const double *want)
{
    struct err e = {0};
    double freq[64];
    assert_ok(rope_config_check(c, &e), &e);
    rope_frequencies(c, freq);
    for (int64_t k = 0; k < c->dim / 2; k++)
        near(freq[k], want[k], 1e-12);
}

static void frequencies_match_the_golden_values(void **state)
{
    (void)state;
    check_frequencies(&plain_32, golden_plain_32_10000);
    check_frequencies(&llama3_64, golden_llama3_64_500000_f8_8192);
    check_frequencies(&yarn_64, golden_yarn_64_10000_f40_4096);
    check_frequencies(&yarn_32, golden_yarn_32_1000000_f4_32768);
}

static void frequencies_match_values_worked_out_by_hand(void **state)
{
    (void)state;
    double freq[4];
    struct rope_config c = {.dim = 4, .base = 100};
    assert_true(rope_frequencies(&c, freq) == 1);
    near(freq[0], 1, 1e-15);
    near(freq[1], 0.1, 1e-15);
    /* Wavelengths 6.283 (between 8/4 and 8/1: blended with t = (8/6.283 - 1)/3 = 0.0910798)
     * and 62.83 (longer than 8: divided by 2). */
    c = (struct rope_config){
        .dim = 4, .base = 100, .scaling = ROPE_LLAMA3, .factor = 2, .original = 8, .low = 1, .high = 4};
    rope_frequencies(&c, freq);
    near(freq[0], 0.5455399, 1e-6);
    near(freq[1], 0.05, 1e-15);
    /* Wavelength 6.283 is shorter than 32/4: kept; 62.83 is longer than 32. */
    c.original = 32;
    rope_frequencies(&c, freq);
    near(freq[0], 1, 1e-15);
    near(freq[1], 0.05, 1e-15);
    /* YaRN, dim 8, base 10: pair(turns) = 8 ln(100/(6.283 turns))/(2 ln 10): pair(8) = 1.195 -> 1,
     * pair(1) = 4.807 -> 5. Ramp over k = 0..3: 0, 0, 1/4, 1/2; kept 1, 1, 3/4, 1/2. */
    c = (struct rope_config){
        .dim = 8, .base = 10, .scaling = ROPE_YARN, .factor = 2, .original = 100, .beta_fast = 8, .beta_slow = 1};
    rope_frequencies(&c, freq);
    near(freq[0], 1, 1e-14);
    near(freq[1], pow(10, -0.25), 1e-14);
    near(freq[2], pow(10, -0.5) * (0.25 / 2 + 0.75), 1e-14);
    near(freq[3], pow(10, -0.75) * (0.5 / 2 + 0.5), 1e-14);
}

static void yarn_scales_cos_and_sin_by_its_concentration(void **state)
{
    (void)state;
    double freq[32];
    struct rope_config c = yarn_64; /* both mscales unset: 0.1 ln 40 + 1 */
    near(rope_frequencies(&c, freq), 1.3688879454113936, 1e-14);
    c.mscale = c.mscale_all_dim = 1;
    near(rope_frequencies(&c, freq), 1, 1e-15);
    c.mscale = 1;
    c.mscale_all_dim = 0.5; /* 1.36888794541 / 1.18444397271 */
    near(rope_frequencies(&c, freq), 1.1557219901962608, 1e-14);
    c.factor = 1;
    near(rope_frequencies(&c, freq), 1, 1e-15);
}

static void tables_hold_the_angles_of_every_position(void **state)
{
    (void)state;
    enum { POSITIONS = 9, PAIRS = 16 };
    static double cos64[POSITIONS * PAIRS], sin64[POSITIONS * PAIRS];
    static float cos32[POSITIONS * PAIRS], sin32[POSITIONS * PAIRS];
    struct rope_config configs[] = {plain_32, plain_32, yarn_32};
    configs[1].scaling = ROPE_LINEAR;
    configs[1].factor = 4;
    for (int i = 0; i < countof(configs); i++) {
        const struct rope_config *c = &configs[i];
        double freq[PAIRS], gain = rope_frequencies(c, freq), stretch = i == 1 ? 4 : 1;
        struct tensor tc = tensor_2d(cos64, DT_F64, POSITIONS, PAIRS), ts = tensor_2d(sin64, DT_F64, POSITIONS, PAIRS);
        rope_tables(c, &tc, &ts);
        tc = tensor_2d(cos32, DT_F32, POSITIONS, PAIRS);
        ts = tensor_2d(sin32, DT_F32, POSITIONS, PAIRS);
        rope_tables(c, &tc, &ts);
        for (int p = 0; p < POSITIONS; p++)
            for (int k = 0; k < PAIRS; k++) {
                double angle = p * freq[k] / stretch;
                assert_true(fabs(cos64[p * PAIRS + k] - gain * cos(angle)) < 1e-14);
                assert_true(fabs(sin64[p * PAIRS + k] - gain * sin(angle)) < 1e-14);
                assert_true(cos32[p * PAIRS + k] == (float)cos64[p * PAIRS + k]);
                assert_true(sin32[p * PAIRS + k] == (float)sin64[p * PAIRS + k]);
            }
    }
    assert_true(configs[2].factor == 4);
    near(cos64[0], 1.1386294361119891, 1e-14); /* yarn at position 0: 0.1 ln 4 + 1 */
}

static void bad_configs_are_refused_with_their_values(void **state)
{
    (void)state;
    struct err e = {0};
    struct rope_config c = plain_32;
    c.dim = 7;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "dim is 7");
    c.dim = 0;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "dim is 0");
    c = plain_32;
    c.base = 1;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "base is 1");
    c.base = NAN;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "base");
    c = plain_32;
    c.scaling = ROPE_LINEAR;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "factor is 0");
    c = llama3_64;
    c.original = 0;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "original");
    c = llama3_64;
    c.high = 1;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "low < high");
    c = yarn_64;
    c.beta_slow = 32;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "slow < fast");
    c = yarn_64;
    c.mscale = -1;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "mscale");
    c = plain_32;
    c.scaling = (enum rope_scaling)9;
    assert_fails(rope_config_check(&c, &e), ST_INVALID, &e, "9");
}

/* ---- the op ---------------------------------------------------------------------------------- */

static int forward(struct bed *b, int which, const struct rope_fwd_args *a)
{
    struct lane l = {.dev = &b->dev[which], .err = &b->e};
    return ops_for(&b->dev[which])->rope_fwd(&l, a);
}

static int backward(struct bed *b, int which, const struct rope_bwd_args *a)
{
    struct lane l = {.dev = &b->dev[which], .err = &b->e};
    return ops_for(&b->dev[which])->rope_bwd(&l, a);
}

static void a_quarter_turn_moves_x_to_y(void **state)
{
    (void)state;
    struct bed b;
    open_bed(&b);
    /* Two pairs; position 1 turns the first by 90 degrees and the second by
     * 180; channel 4 passes. */
    double cosines[] = {1, 1, 0, -1}, sines[] = {0, 0, 1, 0};
    double x[] = {1, 2, 3, 4, 5}, y[5];
    double half[] = {-3, -2, 1, -4, 5}, pairs[] = {-2, 1, -3, -4, 5};
    int32_t pos[] = {1};
    struct rope_fwd_args a = {.x = tensor_3d(x, DT_F64, 1, 1, 5),
                              .y = tensor_3d(y, DT_F64, 1, 1, 5),
                              .cos = tensor_2d(cosines, DT_F64, 2, 2),
                              .sin = tensor_2d(sines, DT_F64, 2, 2),
                              .pos = tensor_1d(pos, DT_I32, 1)};
    assert_ok(forward(&b, 0, &a), &b.e);
    assert_memory_equal(y, half, sizeof y);
    a.interleaved = true;
    assert_ok(forward(&b, 0, &a), &b.e);
    assert_memory_equal(y, pairs, sizeof y);
    pos[0] = 0;
    assert_ok(forward(&b, 0, &a), &b.e);
    assert_memory_equal(y, x, sizeof y);
    close_bed(&b);
}

enum { TOKENS = 70, HEADS = 3, D = 24, RD = 16, POSITIONS = 80, N = TOKENS * HEADS * D };

struct data {
    double x64[N], y64[N], w64[D], cos64[POSITIONS * RD / 2], sin64[POSITIONS * RD / 2], rstd64[TOKENS * HEADS];
    float x32[N], y32[N], w32[D], cos32[POSITIONS * RD / 2], sin32[POSITIONS * RD / 2], rstd32[TOKENS * HEADS];
    int32_t pos[TOKENS];
    struct rope_fwd_args a64, a32;
};

static void make_data(struct data *m)
{
    struct rope_config c = {.dim = RD, .base = 10000};
    for (int i = 0; i < N; i++)
        m->x64[i] = m->x32[i] = (float)rng_normal(1, (uint64_t)i);
    for (int i = 0; i < D; i++)
        m->w64[i] = m->w32[i] = (float)rng_normal(2, (uint64_t)i);
    for (int i = 0; i < TOKENS; i++)
        m->pos[i] = i;
    m->a64 = (struct rope_fwd_args){.x = tensor_3d(m->x64, DT_F64, TOKENS, HEADS, D),
                                    .y = tensor_3d(m->y64, DT_F64, TOKENS, HEADS, D),
                                    .w = tensor_1d(m->w64, DT_F64, D),
                                    .rstd = tensor_2d(m->rstd64, DT_F64, TOKENS, HEADS),
                                    .cos = tensor_2d(m->cos64, DT_F64, POSITIONS, RD / 2),
                                    .sin = tensor_2d(m->sin64, DT_F64, POSITIONS, RD / 2),
                                    .pos = tensor_1d(m->pos, DT_I32, TOKENS),
                                    .eps = 1e-6};
    m->a32 = m->a64;
    m->a32.x = tensor_3d(m->x32, DT_F32, TOKENS, HEADS, D);
    m->a32.y = tensor_3d(m->y32, DT_F32, TOKENS, HEADS, D);
    m->a32.w = tensor_1d(m->w32, DT_F32, D);
    m->a32.rstd = tensor_2d(m->rstd32, DT_F32, TOKENS, HEADS);
    m->a32.cos = tensor_2d(m->cos32, DT_F32, POSITIONS, RD / 2);
    m->a32.sin = tensor_2d(m->sin32, DT_F32, POSITIONS, RD / 2);
    rope_tables(&c, &m->a64.cos, &m->a64.sin);
    rope_tables(&c, &m->a32.cos, &m->a32.sin);
}

static void in_place_gives_the_same_bits(void **state)
{
    (void)state;
    static struct data m;
    struct bed b;
    open_bed(&b);
    for (int norm = 0; norm < 2; norm++)
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            make_data(&m);
            m.a64.interleaved = m.a32.interleaved = interleaved != 0;
            if (!norm)
                m.a64.w = m.a64.rstd = m.a32.w = m.a32.rstd = (struct tensor){0};
            assert_ok(forward(&b, 0, &m.a64), &b.e);
            assert_ok(forward(&b, 1, &m.a32), &b.e);
            m.a64.y = m.a64.x;
            m.a32.y = m.a32.x;
            assert_ok(forward(&b, 0, &m.a64), &b.e);
            assert_ok(forward(&b, 1, &m.a32), &b.e);
            assert_memory_equal(m.x64, m.y64, sizeof m.x64);
            assert_memory_equal(m.x32, m.y32, sizeof m.x32);
        }
    close_bed(&b);
}

static void backward_undoes_a_rotation_and_may_work_in_place(void **state)
{
    (void)state;
    static struct data m;
    struct bed b;
    open_bed(&b);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        make_data(&m);
        m.a64.w = m.a64.rstd = m.a32.w = m.a32.rstd = (struct tensor){0};
        m.a64.interleaved = m.a32.interleaved = interleaved != 0;
        assert_ok(forward(&b, 0, &m.a64), &b.e);
        assert_ok(forward(&b, 1, &m.a32), &b.e);
        struct rope_bwd_args r64 = {.dy = m.a64.y,
                                    .dx = m.a64.y,
                                    .cos = m.a64.cos,
                                    .sin = m.a64.sin,
                                    .pos = m.a64.pos,
                                    .interleaved = interleaved != 0};
        struct rope_bwd_args r32 = {.dy = m.a32.y,
                                    .dx = m.a32.y,
                                    .cos = m.a32.cos,
                                    .sin = m.a32.sin,
                                    .pos = m.a32.pos,
                                    .interleaved = interleaved != 0};
        assert_ok(backward(&b, 0, &r64), &b.e);
        assert_ok(backward(&b, 1, &r32), &b.e);
        for (int i = 0; i < N; i++) {
            assert_true(fabs(m.y64[i] - m.x64[i]) < 1e-13);
            assert_true(fabsf(m.y32[i] - m.x32[i]) < 2e-6f);
        }
    }
    close_bed(&b);
}

static void scores_depend_on_distance_only(void **state)
{
    (void)state;
    static struct data m;
    struct bed b;
    open_bed(&b);
    make_data(&m);
    m.a64.w = m.a64.rstd = (struct tensor){0};
    for (int i = 0; i < N; i++) /* the same q (head 0) and k (head 1) at every position */
        m.x64[i] = m.x64[i % (HEADS * D)];
    assert_ok(forward(&b, 0, &m.a64), &b.e);
    double first = 0;
    for (int t = 5; t < TOKENS; t++) {
        double sum = 0;
        for (int c = 0; c < D; c++)
            sum += m.y64[t * HEADS * D + c] * m.y64[(t - 5) * HEADS * D + D + c];
        first = t == 5 ? sum : first;
        assert_true(fabs(sum - first) < 1e-12);
    }
    close_bed(&b);
}

static void heads_of_a_fused_row_are_rotated_in_place_and_the_rest_is_left_alone(void **state)
{
    (void)state;
    static struct data m;
    static float fused[TOKENS * (HEADS + 2) * D];
    struct bed b;
    open_bed(&b);
    make_data(&m);
    assert_ok(forward(&b, 1, &m.a32), &b.e);
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < (HEADS + 2) * D; c++)
            fused[t * (HEADS + 2) * D + c] = c < HEADS * D ? m.x32[t * HEADS * D + c] : 777.0f;
    struct tensor rows = tensor_2d(fused, DT_F32, TOKENS, (HEADS + 2) * D), part = tensor_cols(&rows, 0, HEADS * D);
    m.a32.x = m.a32.y = tensor_split_last(&part, HEADS, D);
    assert_ok(forward(&b, 1, &m.a32), &b.e);
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < (HEADS + 2) * D; c++)
            assert_true(fused[t * (HEADS + 2) * D + c] == (c < HEADS * D ? m.y32[t * HEADS * D + c] : 777.0f));
    close_bed(&b);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    static struct data m;
    struct bed b;
    open_bed(&b);
    make_data(&m);
    struct rope_fwd_args a;
    for (int which = 0; which < 2; which++) {
        const struct rope_fwd_args *good = which ? &m.a32 : &m.a64;
        m.pos[3] = POSITIONS;
        assert_fails(forward(&b, which, good), ST_INVALID, &b.e, "pos[3] is 80");
        m.pos[3] = -1;
        assert_fails(forward(&b, which, good), ST_INVALID, &b.e, "pos[3] is -1");
        struct rope_bwd_args r = {.dy = good->x, .dx = good->y, .cos = good->cos, .sin = good->sin, .pos = good->pos};
        assert_fails(backward(&b, which, &r), ST_INVALID, &b.e, "rope_bwd: pos[3]");
        m.pos[3] = 3;
        a = *good;
        a.sin = (struct tensor){0};
        assert_fails(forward(&b, which, &a), ST_INVALID, &b.e, "sin is missing");
        a = *good;
        a.pos.dim[0] = 1;
        assert_fails(forward(&b, which, &a), ST_INVALID, &b.e, "pos");
        a = *good;
        a.x.dim[2] = a.y.dim[2] = a.w.dim[0] = 8;
        assert_fails(forward(&b, which, &a), ST_INVALID, &b.e, "rotate 16 channels but a head has 8");
        a = *good;
        a.rstd = (struct tensor){0};
        assert_fails(forward(&b, which, &a), ST_INVALID, &b.e, "rstd is missing");
        a = *good;
        a.y.dtype = DT_BF16;
        assert_fails(forward(&b, which, &a), ST_INVALID, &b.e, "tensor y");
    }
    float dw[D];
    struct rope_bwd_args r = {
        .dy = m.a32.x, .x = m.a32.x, .w = m.a32.w, .rstd = m.a32.rstd, .dx = m.a32.y, .dw = tensor_1d(dw, DT_F32, D)};
    assert_fails(backward(&b, 1, &r), ST_INVALID, &b.e, "work has 0 bytes");
    r.dw.data = NULL;
    assert_fails(backward(&b, 1, &r), ST_INVALID, &b.e, "dw is missing");
    close_bed(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_match_the_golden_values),
        cmocka_unit_test(frequencies_match_values_worked_out_by_hand),
        cmocka_unit_test(yarn_scales_cos_and_sin_by_its_concentration),
        cmocka_unit_test(tables_hold_the_angles_of_every_position),
        cmocka_unit_test(bad_configs_are_refused_with_their_values),
        cmocka_unit_test(a_quarter_turn_moves_x_to_y),
        cmocka_unit_test(in_place_gives_the_same_bits),
        cmocka_unit_test(backward_undoes_a_rotation_and_may_work_in_place),
        cmocka_unit_test(scores_depend_on_distance_only),
        cmocka_unit_test(heads_of_a_fused_row_are_rotated_in_place_and_the_rest_is_left_alone),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
