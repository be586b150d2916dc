/* Shape texts of field lists: what they accept, what they refuse and in which words, what they infer. */
#include "ops/conv1d/conv1d.h"
#include "ops/embed/embed.h"
#include "ops/epplan/epplan.h"
#include "ops/gate/gate.h"
#include "ops/opshape.h"
#include "ops/permute/permute.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/ssd/ssd.h"
#include "support.h"

static char memory[8]; /* checks look at shapes only */

static struct tensor t1(enum dtype d, int64_t a) { return tensor_1d(memory, d, a); }
static struct tensor t2(enum dtype d, int64_t a, int64_t b) { return tensor_2d(memory, d, a, b); }
static struct tensor t3(enum dtype d, int64_t a, int64_t b, int64_t c) { return tensor_3d(memory, d, a, b, c); }

static void leading_dimensions_and_their_product(void **state)
{
    (void)state;
    struct err e = {0};
    struct rmsnorm_fwd_args a = {.x = t3(DT_F32, 5, 2, 8), .y = t3(DT_F32, 5, 2, 8), .rstd = t1(DT_F32, 10)};
    assert_ok(rmsnorm_fwd_check(&a, &e), &e);
    a.y = t3(DT_F32, 2, 5, 8);
    assert_fails(rmsnorm_fwd_check(&a, &e), ST_INVALID, &e,
                 "rmsnorm_fwd: tensor y is F32 [2, 5, 8], expected F32 [5, 2, 8]");
    a.y = a.x;
    a.rstd = t1(DT_F32, 5);
    assert_fails(rmsnorm_fwd_check(&a, &e), ST_INVALID, &e, "tensor rstd is F32 [5], expected F32 [10]");
    a.rstd = t1(DT_F64, 10);
    assert_fails(rmsnorm_fwd_check(&a, &e), ST_INVALID, &e, "tensor rstd is F64 [10], expected F32 [10]");
    a.x = a.y = t3(DT_I32, 5, 2, 8);
    assert_fails(rmsnorm_fwd_check(&a, &e), ST_INVALID, &e, "expected real numbers");
}

static void sums_differences_and_quotients(void **state)
{
    (void)state;
    struct err e = {0};
    struct conv1d_fwd_args c = {
        .x = t3(DT_F32, 2, 7, 3), .y = t3(DT_F32, 2, 7, 3), .w = t2(DT_F32, 3, 4), .init = t3(DT_F32, 2, 3, 3)};
    assert_ok(conv1d_fwd_check(&c, &e), &e);
    c.init = t3(DT_F32, 2, 4, 3);
    assert_fails(conv1d_fwd_check(&c, &e), ST_INVALID, &e, "tensor init is F32 [2, 4, 3], expected F32 [2, 3, 3]");

    const int64_t states[] = {1, 3, 2, 4, 5}, too_few[] = {1, 2, 2, 4, 5};
    struct tensor x = tensor_4d(memory, DT_F32, 1, 17, 2, 5), b = tensor_4d(memory, DT_F32, 1, 17, 1, 4);
    struct ssd_fwd_args s = {.x = x,
                             .y = x,
                             .dt = t3(DT_F32, 1, 17, 2),
                             .A_log = t1(DT_F32, 2),
                             .dt_bias = t1(DT_F32, 2),
                             .Bm = b,
                             .Cm = b,
                             .states = tensor_shape(DT_F32, 5, states),
                             .chunk = 8};
    s.states.data = memory;
    assert_ok(ssd_fwd_check(&s, &e), &e); /* 17 rows are three chunks of 8 */
    s.states = tensor_shape(DT_F32, 5, too_few);
    s.states.data = memory;
    assert_fails(ssd_fwd_check(&s, &e), ST_INVALID, &e, "expected F32 [1, 3, 2, 4, 5]");
}

/* offset is ranks+1, so ranks are known from it, for rows, which stands behind; from is ranks*cap, whatever cap is. */
static void sizes_are_learnt_from_sums_and_products(void **state)
{
    (void)state;
    struct err e = {0};
    struct epsend_args a = {.offset = t1(DT_I32, 3),
                            .row = t2(DT_I32, 4, 2),
                            .src = t1(DT_I32, 8),
                            .to = t2(DT_I32, 4, 2),
                            .from = t1(DT_I32, 10),
                            .rows = t1(DT_I32, 2),
                            .need = t1(DT_F64, 1)};
    assert_ok(epsend_check(&a, &e), &e);
    a.offset = t1(DT_I32, 6);
    assert_fails(epsend_check(&a, &e), ST_INVALID, &e, "tensor rows is I32 [2], expected I32 [5]");
    a.offset = t1(DT_I32, 3);
    a.from = t1(DT_I32, 11);
    assert_fails(epsend_check(&a, &e), ST_INVALID, &e, "11");
}

static void alternatives_presence_and_contiguity(void **state)
{
    (void)state;
    struct err e = {0};
    struct gate_fwd_args g = {.x = t2(DT_F32, 3, 4), .g = t2(DT_F32, 3, 1), .y = t2(DT_F32, 3, 4)};
    assert_ok(gate_fwd_check(&g, &e), &e);
    g.g = t2(DT_F32, 3, 2);
    assert_fails(gate_fwd_check(&g, &e), ST_INVALID, &e, "tensor g is F32 [3, 2], expected F32 [3, 4]");

    struct permute_args p = {.x = t2(DT_F32, 3, 4),
                             .src = t1(DT_I32, 6),
                             .y = t2(DT_F32, 6, 4),
                             .prob = t2(DT_F32, 3, 2),
                             .yprob = t1(DT_F32, 6),
                             .k = 2};
    assert_ok(permute_check(&p, &e), &e);
    p.yprob = (struct tensor){0};
    assert_fails(permute_check(&p, &e), ST_INVALID, &e, "prob is given without yprob");

    struct embed_fwd_args w = {.token = t1(DT_I32, 3), .w = t2(DT_F32, 9, 4), .y = t2(DT_F32, 3, 4)};
    assert_ok(embed_fwd_check(&w, &e), &e);
    w.w.stride[0] = 5;
    assert_fails(embed_fwd_check(&w, &e), ST_INVALID, &e, "tensor w must be contiguous");
}

/* Outputs of a call from its inputs: gradients of absent inputs are not made, what cannot be told is an error. */
static void outputs_are_inferred(void **state)
{
    (void)state;
    struct err e = {0};
    struct op_call c;
    assert_ok(op_call_sample(&c, &conv1d_bwd_desc, &(struct op_sample){"b=2 s=6 c=3 taps=4 no_bias=1"}, &ops_ref, &e),
              &e);
    const struct tensor *dinit = &c.t[op_arg_index(c.desc, "dinit")];
    assert_int_equal(dinit->dim[1], 3);
    assert_int_equal(c.t[op_arg_index(c.desc, "dbias")].rank, 0);
    assert_fails(op_call_sample(&c, &epsend_desc, &(struct op_sample){"cap=-1"}, &ops_ref, &e), ST_INVALID, &e,
                 "epsend: dimension 0 of from cannot be told from the inputs");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leading_dimensions_and_their_product),
        cmocka_unit_test(sums_differences_and_quotients),
        cmocka_unit_test(sizes_are_learnt_from_sums_and_products),
        cmocka_unit_test(alternatives_presence_and_contiguity),
        cmocka_unit_test(outputs_are_inferred),
    };
    return cmocka_run_group_tests_name("opshape", tests, NULL, NULL);
}
