/* Op calls of a graph: what a field's role makes of the slot bound to it, views, scratch, and what
 * is refused, by name. */
#include "ops/addnorm/addnorm.h"
#include "ops/colsum/colsum.h"
#include "ops/gate/gate.h"
#include "ops/gemm/gemm.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "toy.h"

#include <math.h>

static slot_id matrix(struct rig *r, const char *name, int64_t rows, int64_t cols)
{
    return graph_slot(&r->g, name, tensor_2d(NULL, DT_F64, rows, cols));
}

static slot_id param(struct rig *r, const char *name, enum arena_id arena, int64_t rows, int64_t cols)
{
    struct tensor t = tensor_2d(NULL, DT_F64, rows, cols);
    return graph_persistent(&r->g, name, t, arena, memory_reserve(&r->m, arena, tensor_bytes(&t)));
}

static const struct use *use_of(const struct rig *r, int node, enum phase_id ph, slot_id slot)
{
    const struct phase *p = &r->g.nodes[node].phase[ph];
    for (int u = 0; u < p->n_uses; u++)
        if (p->use[u].slot == slot)
            return &p->use[u];
    fail_msg("slot %s is not used", r->g.slots[slot].name);
    return NULL;
}

/* Halves of one slot as the two inputs of an op; the result of the first call is the input of the
 * second. */
static void views_and_calls_in_a_row_give_what_the_ops_give(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id both = param(&r, "both", ARENA_PARAM, 3, 8), y = matrix(&r, "y", 3, 4),
            out = param(&r, "out", ARENA_GRAD, 1, 4);
    struct tensor t = of(g, both), row = of(g, out);
    int n = graph_node(g, "node", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = tensor_cols(&t, 0, 4), .g = tensor_cols(&t, 4, 4), .y = of(g, y));
    GRAPH_OP(g, n, PH_FWD, colsum, .x = of(g, y), .out = tensor_1d(row.data, row.dtype, 4));
    rig_make(&r);
    assert_int_equal(use_of(&r, n, PH_FWD, both)->mode, USE_READ);
    assert_int_equal(use_of(&r, n, PH_FWD, y)->mode, USE_WRITE);
    assert_int_equal(use_of(&r, n, PH_FWD, out)->mode, USE_ADD);
    rig_run(&r, true);
    rig_run(&r, false); /* a second microbatch adds */
    const double *in = (const double *)(const void *)r.m.base[ARENA_PARAM],
                 *sum = (const double *)(const void *)r.m.base[ARENA_GRAD];
    for (int c = 0; c < 4; c++) {
        double want = 0;
        for (int k = 0; k < 3; k++)
            want += in[8 * k + c] / (1 + exp(-in[8 * k + 4 + c]));
        assert_true(fabs(sum[c] - 2 * want) < 1e-12);
    }
    rig_release(&r);
}

/* Two products fill rows of a matrix, two sums halves of a vector: the first microbatch of a step overwrites all of it,
 * whatever is there, and a second one adds. */
static void calls_fill_a_slot_part_by_part(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id x = param(&r, "x", ARENA_PARAM, 3, 4), out = param(&r, "out", ARENA_GRAD, 4, 4),
            sums = param(&r, "sums", ARENA_GRAD, 1, 8);
    struct tensor in = of(g, x), t = of(g, out), v = of(g, sums);
    v = tensor_1d(v.data, v.dtype, 8);
    int n = graph_node(g, "node", LANE_COMPUTE, NULL);
    for (int k = 0; k < 2; k++) {
        GRAPH_OP(g, n, PH_FWD, gemm, .a = tensor_cols(&in, 2 * k, 2), .b = in, .c = tensor_rows(&t, 2 * k, 2),
                 .trans_a = true, .alpha = 1);
        GRAPH_OP(g, n, PH_FWD, colsum, .x = in, .out = tensor_rows(&v, 4 * k, 4));
    }
    rig_make(&r);
    rig_run(&r, true);
    rig_run(&r, true);
    rig_run(&r, false);
    const double *a = (const double *)(const void *)r.m.base[ARENA_PARAM],
                 *grad = (const double *)(const void *)(r.m.base[ARENA_GRAD] + g->slots[out].offset),
                 *sum = (const double *)(const void *)(r.m.base[ARENA_GRAD] + g->slots[sums].offset);
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < 4; c++) {
            double want = 0, column = 0;
            for (int k = 0; k < 3; k++) {
                want += a[4 * k + i] * a[4 * k + c];
                column += a[4 * k + c];
            }
            assert_true(fabs(grad[4 * i + c] - 2 * want) < 1e-12);
            assert_true(fabs(sum[c] - 2 * column) < 1e-12 && fabs(sum[4 + c] - 2 * column) < 1e-12);
        }
    rig_release(&r);
}

static void a_required_field_that_is_not_bound_is_named(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id x = matrix(&r, "x", 3, 4), y = matrix(&r, "y", 3, 4);
    graph_scope(g, 2, "core");
    int n = graph_node(g, "gate", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, x), .y = of(g, y));
    assert_fails(graph_check(g, &r.e), ST_INTERNAL, &r.e,
                 "node 2.core.gate (fwd): field g of gate_fwd is not bound to a slot");
    rig_release(&r);
}

static void two_results_in_one_place_are_named(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id x = matrix(&r, "x", 3, 4), d = matrix(&r, "d", 3, 4);
    int n = graph_node(g, "gate", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, x), .x = of(g, x), .g = of(g, x), .dx = of(g, d), .dg = of(g, d));
    assert_fails(graph_check(g, &r.e), ST_INTERNAL, &r.e,
                 "field dg of gate_bwd is bound to the same place as field dx");
    rig_release(&r);
}

/* Columns of one slot may be results of one call, but not the same column twice. */
static void a_part_of_a_slot_that_is_bound_twice_is_named(void **state)
{
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        struct rig r;
        rig_init(&r);
        struct graph *g = &r.g;
        slot_id x = matrix(&r, "x", 3, 4), d = matrix(&r, "d", 3, 8);
        struct tensor both = of(g, d);
        int n = graph_node(g, "gate", LANE_COMPUTE, NULL);
        GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, x), .x = of(g, x), .g = of(g, x), .dx = tensor_cols(&both, 0, 4),
                 .dg = tensor_cols(&both, apart ? 4 : 3, 4));
        if (apart)
            assert_ok(r.g.err.code, &r.g.err);
        else
            assert_fails(graph_check(g, &r.e), ST_INTERNAL, &r.e,
                         "field dg of gate_bwd is bound to the same place as field dx");
        rig_release(&r);
    }
}

/* What a phase was declared with can be asked for by the op's names. */
static void the_call_of_a_phase_is_found_by_its_op(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id both = matrix(&r, "both", 3, 8), y = matrix(&r, "y", 3, 4);
    struct tensor t = of(g, both);
    int n = graph_node(g, "node", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = tensor_cols(&t, 0, 4), .g = tensor_cols(&t, 4, 4), .y = of(g, y));
    const struct gate_fwd_args *a = graph_call(g, n, PH_FWD, &gate_fwd_desc);
    assert_non_null(a);
    assert_int_equal(graph_slot_of(&a->g), both);
    assert_int_equal(graph_slot_of(&a->y), y);
    assert_null(graph_call(g, n, PH_FWD, &gemm_desc));
    assert_null(graph_call(g, n, PH_BWD, &gate_fwd_desc));
    assert_null(graph_call(g, -1, PH_FWD, &gate_fwd_desc));
    assert_int_equal(graph_slot_of(&(struct tensor){0}), NO_SLOT);
    rig_release(&r);
}

static void wrong_shapes_and_foreign_memory_are_refused_when_declared(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id x = matrix(&r, "x", 3, 4), y = matrix(&r, "y", 3, 5);
    int n = graph_node(g, "gate", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, x), .g = of(g, x), .y = of(g, y));
    assert_fails(graph_check(g, &r.e), ST_INVALID, &r.e, "tensor y");
    rig_release(&r);

    double memory[12];
    rig_init(&r);
    x = matrix(&r, "x", 3, 4);
    n = graph_node(g, "gate", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, x), .g = of(g, x), .y = tensor_2d(memory, DT_F64, 3, 4));
    assert_fails(graph_check(g, &r.e), ST_INTERNAL, &r.e, "field y of gate_fwd is bound to memory that is no slot");
    rig_release(&r);
}

/* Two products add to one slot; an op that cannot add comes first, or is refused. */
static void sums_are_started_and_added_to(void **state)
{
    (void)state;
    for (int late = 0; late < 2; late++) {
        struct rig r;
        rig_init(&r);
        struct graph *g = &r.g;
        slot_id w = param(&r, "w", ARENA_PARAM, 4, 4), sum = matrix(&r, "sum", 4, 4),
                out = param(&r, "out", ARENA_GRAD, 4, 4);
        graph_sum(g, sum);
        int nodes[3];
        for (int k = 0; k < 3; k++) {
            nodes[k] = graph_node(g, "n", LANE_COMPUTE, NULL);
            if (k == (late ? 2 : 0))
                GRAPH_OP(g, nodes[k], PH_FWD, gate_fwd, .x = of(g, w), .g = of(g, w), .y = of(g, sum));
            else
                GRAPH_OP(g, nodes[k], PH_FWD, gemm, .a = of(g, w), .b = of(g, w), .c = of(g, sum), .alpha = 1);
        }
        int last = graph_node(g, "last", LANE_COMPUTE, NULL);
        GRAPH_OP(g, last, PH_FWD, gemm, .a = of(g, sum), .b = of(g, w), .c = of(g, out), .alpha = 1);
        if (late)
            assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "overwrites slot sum, which others have written");
        else
            assert_ok(rig_plan(&r), &r.e);
        for (int k = 0; k < 3; k++)
            assert_int_equal(use_of(&r, nodes[k], PH_FWD, sum)->mode, USE_ADD);
        rig_release(&r);
    }
}

static void an_op_that_reads_what_it_adds_to_must_not_come_first(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct graph *g = &r.g;
    slot_id x = param(&r, "x", ARENA_PARAM, 3, 4), dx = matrix(&r, "dx", 3, 4);
    slot_id rstd =
        graph_persistent(g, "rstd", tensor_1d(NULL, DT_F64, 3), ARENA_PARAM, memory_reserve(&r.m, ARENA_PARAM, 24));
    graph_sum(g, dx);
    int n = graph_node(g, "norm", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, rmsnorm_bwd, .dy = of(g, x), .x = of(g, x), .rstd = of(g, rstd), .dres = of(g, dx),
             .dx = of(g, dx));
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "reads slot dx, which nothing has yet written");
    rig_release(&r);
}

/* A norm whose result is optional: with a reader it is made, without one only the statistics are. */
static void an_optional_result_is_made_for_readers_only(void **state)
{
    (void)state;
    for (int read = 0; read < 2; read++) {
        struct rig r;
        rig_init(&r);
        struct graph *g = &r.g;
        slot_id x = param(&r, "x", ARENA_PARAM, 3, 4), y = matrix(&r, "y", 3, 4),
                rstd = graph_persistent(g, "rstd", tensor_1d(NULL, DT_F64, 3), ARENA_GRAD,
                                        memory_reserve(&r.m, ARENA_GRAD, 24)),
                out = param(&r, "out", ARENA_GRAD, 1, 4);
        struct tensor row = of(g, out);
        int n = graph_node(g, "norm", LANE_COMPUTE, NULL);
        GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, x), .y = of(g, y), .rstd = of(g, rstd), .eps = 1e-5);
        graph_optional(g, y);
        if (read)
            GRAPH_OP(g, graph_node(g, "sum", LANE_COMPUTE, NULL), PH_FWD, colsum, .x = of(g, y),
                     .out = tensor_1d(row.data, row.dtype, 4));
        graph_trim(g);
        const struct addnorm_fwd_args *a = graph_call(g, n, PH_FWD, &addnorm_fwd_desc);
        assert_non_null(a);
        assert_int_equal(a->y.data != NULL, read);
        rig_make(&r);
        assert_int_equal(r.p.work_bytes > 0, read);
        rig_run(&r, true);
        const double *in = (const double *)(const void *)r.m.base[ARENA_PARAM],
                     *got = (const double *)(const void *)r.m.base[ARENA_GRAD];
        for (int k = 0; k < 3; k++) {
            double sum = 0;
            for (int c = 0; c < 4; c++)
                sum += in[4 * k + c] * in[4 * k + c];
            assert_true(fabs(got[k] - 1 / sqrt(sum / 4 + 1e-5)) < 1e-12);
        }
        rig_release(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(views_and_calls_in_a_row_give_what_the_ops_give),
        cmocka_unit_test(calls_fill_a_slot_part_by_part),
        cmocka_unit_test(a_required_field_that_is_not_bound_is_named),
        cmocka_unit_test(two_results_in_one_place_are_named),
        cmocka_unit_test(a_part_of_a_slot_that_is_bound_twice_is_named),
        cmocka_unit_test(the_call_of_a_phase_is_found_by_its_op),
        cmocka_unit_test(wrong_shapes_and_foreign_memory_are_refused_when_declared),
        cmocka_unit_test(sums_are_started_and_added_to),
        cmocka_unit_test(an_op_that_reads_what_it_adds_to_must_not_come_first),
        cmocka_unit_test(an_optional_result_is_made_for_readers_only),
    };
    return cmocka_run_group_tests_name("bind", tests, NULL, NULL);
}
