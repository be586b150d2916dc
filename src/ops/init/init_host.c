/* init on host devices; see init.h. */
#include "ops/check.h"
#include "ops/init/init.h"
#include "ops/ops_cpu_int.h"
#include "ops/ops_ref_int.h"

#include <math.h>

int init_check(const struct init_args *a, struct err *e)
{
    bool integers = a->kind == INIT_HASH;
    if (!integers && a->y.dtype != DT_F64 && a->y.dtype != DT_F32)
        return err_set(e, ST_INVALID, "init: y is %s, expected F32 or F64", dtype_name(a->y.dtype));
    CHECK_T("init", "y", &a->y, integers ? DT_I32 : a->y.dtype, 1, -1);
    CHECK_OPT("init", "copy", &a->copy, a->copy.dtype, 1, a->y.dim[0]);
    if (integers && (a->row < 1 || a->n_values < 1))
        return err_set(e, ST_INVALID, "init: a table needs a row length and a number of values, not %lld and %lld",
                       (long long)a->row, (long long)a->n_values);
    return ST_OK;
}

static double draw(const struct init_args *a, int64_t i)
{
    double u;
    switch (a->kind) {
    case INIT_ZERO: return 0;
    case INIT_ONE: return 1;
    case INIT_CONST: return a->a;
    case INIT_NORMAL: return a->a * rng_normal(a->key, (uint64_t)i);
    case INIT_UNIFORM: return a->a + (a->b - a->a) * rng_uniform(a->key, (uint64_t)i);
    case INIT_LOG_UNIFORM: return log(a->a + (a->b - a->a) * rng_uniform(a->key, (uint64_t)i));
    case INIT_DT_BIAS:
        u = exp(log(a->a) + (log(a->b) - log(a->a)) * rng_uniform(a->key, (uint64_t)i));
        u = u < 1e-4 ? 1e-4 : u;
        return u + log(-expm1(-u));
    case INIT_HASH: return (double)((i / a->row + i % a->row) % a->n_values);
    }
    return 0;
}

static void put(const struct init_args *a, int64_t i, double drawn)
{
    double v = (double)(float)drawn;
    if (a->y.dtype == DT_F32)
        ((float *)a->y.data)[i] = (float)v;
    else if (a->y.dtype == DT_F64)
        ((double *)a->y.data)[i] = v;
    else
        ((int32_t *)a->y.data)[i] = (int32_t)v;
    if (present(&a->copy))
        tensor_set(&a->copy, i, v);
}

/* Values 2 * pair and 2 * pair + 1 of rng_normal, which come from one draw, to the bit. */
static void normal_pair(uint64_t key, int64_t pair, double z[2])
{
    const double two_pi = 6.283185307179586;
    struct philox4 r = philox(key, (uint32_t)pair, (uint32_t)((uint64_t)pair >> 32), 0, 0);
    for (int k = 0; k < 2; k++)
        z[k] = sqrt(-2.0 * log(u32_to_unit(r.v[2 * k]))) * cos(two_pi * u32_to_unit(r.v[2 * k + 1]));
}

/* Two values of a draw at a time, whichever of them belong to y. */
static void fill_normal(const struct init_args *a)
{
    int64_t end = a->first + a->y.dim[0];
#pragma omp parallel for schedule(static)
    for (int64_t pair = a->first / 2; pair < (end + 1) / 2; pair++) {
        double z[2];
        normal_pair(a->key, pair, z);
        for (int k = 0; k < 2; k++)
            if (2 * pair + k >= a->first && 2 * pair + k < end)
                put(a, 2 * pair + k - a->first, a->a * z[k]);
    }
}

int init_host(const struct init_args *a, struct err *e)
{
    TRY(init_check(a, e));
    if (a->kind == INIT_NORMAL) {
        fill_normal(a);
        return ST_OK;
    }
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < a->y.dim[0]; i++)
        put(a, i, draw(a, a->first + i));
    return ST_OK;
}

int init_ref(struct lane *l, const struct init_args *a) { return init_host(a, l->err); }
