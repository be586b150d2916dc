/* Every registered op: gradients in double, cpu against ref, the same bits with 1, 2 and 3 threads, all on
 * the awkward shapes its descriptor lists. Argument: only ops whose name starts with it. */
#include "ops/ops.h"
#include "support.h"

#include "ops/opcheck.h"

#include <omp.h>

static const char *filter = "";

static bool wanted(const struct op_desc *d) { return d != NULL && str_starts(d->name, filter); }

static void gradients_match_central_differences(void **state)
{
    (void)state;
    struct err e = {0};
    int n, checked = 0;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++) {
        for (int s = 0; wanted(all[i]) && s < all[i]->n_samples; s++) {
            struct op_check_result r;
            if (op_sample_flag(&all[i]->samples[s], "gpu"))
                continue;
            assert_ok(op_gradcheck(all[i], &all[i]->samples[s], 11, &r, &e), &e);
            if (r.worst > 1e-6)
                fail_msg("%s '%s': relative error %g at %s", all[i]->name, all[i]->samples[s].text, r.worst, r.where);
            checked += r.compared;
        }
    }
    if (filter[0] == '\0')
        assert_true(checked > 100);
}

/* On every instruction set this processor runs. */
static void cpu_agrees_with_the_reference(void **state)
{
    (void)state;
    struct err e = {0};
    struct dev dev;
    int n;
    const struct op_desc *const *all = op_registry(&n);
    assert_ok(dev_open(&dev, DEV_CPU, 0, &e), &e);
    for (int i = 0; i < n; i++) {
        for (int s = 0; wanted(all[i]) && s < all[i]->n_samples; s++) {
            const struct ops *ops;
            if (op_sample_flag(&all[i]->samples[s], "gpu"))
                continue;
            for (int v = 0; (ops = ops_cpu_variant(v)) != NULL; v++) {
                struct op_check_result r;
                assert_ok(op_compare(all[i], &all[i]->samples[s], &dev, ops, 5, &r, &e), &e);
                if (!(r.worst <= all[i]->tolerance))
                    fail_msg("%s '%s', variant %d: error %g at %s, allowed %g", all[i]->name, all[i]->samples[s].text,
                             v, r.worst, r.where, all[i]->tolerance);
                assert_true(r.compared > 0);
            }
        }
    }
    dev_close(&dev);
}

/* Promise 3: the order of every sum depends on shapes only. */
/* Ops that hand a whole product to OpenBLAS. It divides it by the number of threads, and some of its kernels
 * (Haswell's) round the rows and columns at the end of a part differently. */
static bool of_the_library(const struct op_desc *op)
{
    static const char *const names[] = {"gemm", "gemm8", "headmm_fwd", "headmm_bwd", "headmm_dw", "xent_bwd"};
    for (int i = 0; i < countof(names); i++)
        if (strcmp(op->name, names[i]) == 0)
            return true;
    return false;
}

static bool same_result(const struct op_desc *op, const struct tensor *x, const struct tensor *y)
{
    double most = 0, apart = 0;
    if (memcmp(x->data, y->data, (size_t)tensor_bytes(x)) == 0)
        return true;
    for (int64_t i = 0; i < tensor_elems(x); i++) {
        most = fmax(most, fabs(tensor_get(x, i)));
        apart = fmax(apart, fabs(tensor_get(x, i) - tensor_get(y, i)));
    }
    return of_the_library(op) && apart <= 1e-6 * most;
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    struct err e = {0};
    struct dev dev;
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++) {
        for (int s = 0; wanted(all[i]) && s < all[i]->n_samples; s++) {
            struct op_call c[3];
            struct op_block b[3];
            if (op_sample_flag(&all[i]->samples[s], "gpu"))
                continue;
            for (int t = 0; t < 3; t++) {
                assert_ok(dev_open(&dev, DEV_CPU, t + 1, &e), &e);
                struct lane lane = {.dev = &dev, .err = &e};
                assert_ok(op_call_sample(&c[t], all[i], &all[i]->samples[s], ops_for(&dev), &e), &e);
                assert_ok(op_call_alloc(&c[t], &b[t], 3, false, &e), &e);
                assert_ok(op_call_run(ops_for(&dev), &lane, &c[t]), &e);
                for (int a = 0; t > 0 && a < all[i]->n_args; a++) {
                    enum arg_role role = all[i]->args[a].role;
                    if ((role == ARG_OUT || role == ARG_OOUT) && c[t].t[a].data != NULL &&
                        !same_result(all[i], &c[0].t[a], &c[t].t[a]))
                        fail_msg("%s '%s': %s differs between 1 and %d threads", all[i]->name, all[i]->samples[s].text,
                                 all[i]->args[a].name, t + 1);
                }
                dev_close(&dev);
            }
            for (int t = 0; t < 3; t++)
                op_call_free(&b[t]);
        }
    }
}

/* A sample may only name what the op or its partner knows; a typing error would test nothing. */
static void samples_name_known_settings(void **state)
{
    (void)state;
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++) {
        for (int s = 0; wanted(all[i]) && s < all[i]->n_samples + all[i]->n_bench; s++) {
            const char *text =
                s < all[i]->n_samples ? all[i]->samples[s].text : all[i]->bench[s - all[i]->n_samples].text;
            char copy[256], *save = NULL;
            snprintf(copy, sizeof copy, "%s", text);
            for (char *w = strtok_r(copy, " ", &save); w != NULL; w = strtok_r(NULL, " ", &save)) {
                w[strcspn(w, "=")] = '\0';
                bool known = strcmp(w, "strided") == 0 || strcmp(w, "gpu") == 0;
                for (int j = 0; j < n && !known; j++) {
                    struct op_call c = {.desc = all[j]};
                    if (all[j] != NULL && all[j]->samples == all[i]->samples)
                        known = op_call_set(&c, w, 0) || (str_starts(w, "no_") && op_arg_index(all[j], w + 3) >= 0);
                }
                if (!known)
                    fail_msg("%s: sample '%s' names '%s'", all[i]->name, text, w);
            }
        }
    }
}

static void costs_are_positive(void **state)
{
    (void)state;
    struct err e = {0};
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++) {
        if (!wanted(all[i]))
            continue;
        assert_non_null(all[i]->summary);
        assert_true(all[i]->n_bench > 0);
        for (int s = 0; s < all[i]->n_bench; s++) {
            struct op_call c;
            struct op_cost cost = {0};
            assert_ok(op_call_sample(&c, all[i], &all[i]->bench[s], &ops_ref, &e), &e);
            all[i]->cost(&c, &cost);
            assert_true(cost.bytes > 0 && cost.flops >= 0);
        }
    }
}

int main(int argc, char **argv)
{
    filter = argc > 1 ? argv[1] : "";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_central_differences),
        cmocka_unit_test(cpu_agrees_with_the_reference),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(samples_name_known_settings),
        cmocka_unit_test(costs_are_positive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
