/* ssd, reference: the recurrence itself, and its reverse; see ssd.h. */
#include "ops/ref_scan.h"
#include "ops/ssd/ssd.h"

struct step {
    double raw, delta, slope; /* dt + dt_bias; clamped softplus; d delta / d raw */
};

static struct step step_of(double dt, double bias, double lowest, double highest)
{
    struct step s = {.raw = dt + bias};
    double soft = s.raw > 20 ? s.raw : log1p(exp(s.raw));
    bool low = soft < lowest;
    bool high = highest > 0 && soft > highest;
    s.delta = low ? lowest : high ? highest : soft;
    s.slope = low || high ? 0 : s.raw > 20 ? 1 : 1 / (1 + exp(-s.raw));
    return s;
}

int64_t ssd_fwd_work_ref(const struct ssd_fwd_args *a) { return a->Bm.dim[3] * a->x.dim[3] * (int64_t)sizeof(double); }

static void fwd_row(const struct ssd_fwd_args *a, int64_t b, int64_t h, int64_t t, double *state)
{
    int64_t p_n = a->x.dim[3], n_n = a->Bm.dim[3], g = h / (a->x.dim[2] / a->Bm.dim[2]);
    const double *x = at3(&a->x, b, t, h), *bm = at3(&a->Bm, b, t, g), *cm = at3(&a->Cm, b, t, g);
    double *y = at3(&a->y, b, t, h);
    struct step s = step_of(*at3(&a->dt, b, t, h), at1(&a->dt_bias, h), a->dt_min, a->dt_max);
    double decay = begins_document(&a->doc_start, b, t) ? 0 : exp(s.delta * -exp(at1(&a->A_log, h)));
    for (int64_t p = 0; p < p_n; p++)
        y[p] = present(&a->D) ? at1(&a->D, h) * x[p] : 0;
    for (int64_t n = 0; n < n_n; n++)
        for (int64_t p = 0; p < p_n; p++) {
            double *at = &state[n * p_n + p];
            *at = (decay == 0 ? 0 : decay * *at) + s.delta * bm[n] * x[p];
            y[p] += *at * cm[n];
        }
}

int ssd_fwd_ref(struct lane *l, const struct ssd_fwd_args *a)
{
    TRY(ssd_fwd_check(a, l->err));
    TRY(check_work("ssd_fwd", &a->work, ssd_fwd_work_ref(a), l->err));
    int64_t p_n = a->x.dim[3], n_n = a->Bm.dim[3];
    bool fresh = present(&a->start) && *(const int64_t *)a->start.data == 0;
    double *state = a->work.data;
    size_t row = (size_t)p_n * sizeof(double);
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t h = 0; h < a->x.dim[2]; h++) {
            memset(state, 0, row * (size_t)n_n);
            for (int64_t n = 0; present(&a->init) && !fresh && n < n_n; n++)
                memcpy(state + n * p_n, state_row(&a->init, b, h, n), row);
            for (int64_t t = 0; t < a->x.dim[1]; t++) {
                for (int64_t n = 0; present(&a->states) && t % a->chunk == 0 && n < n_n; n++)
                    memcpy(chunk_row(&a->states, b, t / a->chunk, h, n), state + n * p_n, row);
                fwd_row(a, b, h, t, state);
            }
            for (int64_t n = 0; present(&a->final) && n < n_n; n++)
                memcpy(state_row(&a->final, b, h, n), state + n * p_n, row);
        }
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The states after each row of a chunk, the one before it, and the gradient of
 * the running state. */
int64_t ssd_bwd_work_ref(const struct ssd_bwd_args *a)
{
    return (min_i64(a->chunk, a->x.dim[1]) + 2) * a->Bm.dim[3] * a->x.dim[3] * (int64_t)sizeof(double);
}

struct sums {
    double a_log, dt_bias, d;
};

/* One row: grad is the gradient of the state after it on entry, of the state
 * before it on return. */
static void bwd_row(const struct ssd_bwd_args *a, int64_t b, int64_t h, int64_t t, const double *before,
                    const double *after, double *grad, struct sums *sums)
{
    int64_t p_n = a->x.dim[3], n_n = a->Bm.dim[3], g = h / (a->x.dim[2] / a->Bm.dim[2]);
    const double *x = at3(&a->x, b, t, h), *bm = at3(&a->Bm, b, t, g), *cm = at3(&a->Cm, b, t, g),
                 *dy = at3(&a->dy, b, t, h);
    double *dx = at3(&a->dx, b, t, h), *dbm = at3(&a->dBm, b, t, g), *dcm = at3(&a->dCm, b, t, g);
    struct step s = step_of(*at3(&a->dt, b, t, h), at1(&a->dt_bias, h), a->dt_min, a->dt_max);
    double rate = -exp(at1(&a->A_log, h)), d_delta = 0, d_exponent = 0;
    double decay = begins_document(&a->doc_start, b, t) ? 0 : exp(s.delta * rate);
    for (int64_t p = 0; p < p_n; p++) {
        dx[p] = present(&a->D) ? at1(&a->D, h) * dy[p] : 0;
        sums->d += dy[p] * x[p];
    }
    for (int64_t n = 0; n < n_n; n++)
        for (int64_t p = 0; p < p_n; p++) {
            double *e = &grad[n * p_n + p];
            *e += dy[p] * cm[n];
            dcm[n] += after[n * p_n + p] * dy[p];
            dx[p] += s.delta * *e * bm[n];
            dbm[n] += s.delta * *e * x[p];
            d_delta += *e * x[p] * bm[n];
            if (decay != 0)
                d_exponent += decay * *e * before[n * p_n + p];
            *e *= decay;
        }
    double d_raw = (d_delta + rate * d_exponent) * s.slope;
    *at3(&a->ddt, b, t, h) = d_raw;
    sums->dt_bias += d_raw;
    sums->a_log += rate * d_exponent * s.delta;
}

/* The states of rows [first, first + n): list[i] is the one before row i. */
static void run_chunk(const struct ssd_bwd_args *a, int64_t b, int64_t h, int64_t first, int64_t n, double *list)
{
    int64_t p_n = a->x.dim[3], n_n = a->Bm.dim[3], g = h / (a->x.dim[2] / a->Bm.dim[2]), size = p_n * n_n;
    for (int64_t k = 0; k < n_n; k++)
        memcpy(list + k * p_n, chunk_row(&a->states, b, first / a->chunk, h, k), (size_t)p_n * sizeof(double));
    for (int64_t i = 0; i < n; i++) {
        const double *x = at3(&a->x, b, first + i, h), *bm = at3(&a->Bm, b, first + i, g);
        struct step s = step_of(*at3(&a->dt, b, first + i, h), at1(&a->dt_bias, h), a->dt_min, a->dt_max);
        double decay = begins_document(&a->doc_start, b, first + i) ? 0 : exp(s.delta * -exp(at1(&a->A_log, h)));
        for (int64_t k = 0; k < size; k++)
            list[(i + 1) * size + k] =
                (decay == 0 ? 0 : decay * list[i * size + k]) + s.delta * bm[k / p_n] * x[k % p_n];
    }
}

static struct sums bwd_head(const struct ssd_bwd_args *a, int64_t b, int64_t h)
{
    int64_t rows = a->x.dim[1], p_n = a->x.dim[3], n_n = a->Bm.dim[3], size = p_n * n_n;
    double *grad = a->work.data, *list = grad + size;
    size_t bytes = (size_t)p_n * sizeof(double);
    struct sums sums = {0};
    memset(grad, 0, bytes * (size_t)n_n);
    for (int64_t n = 0; present(&a->dfinal) && n < n_n; n++)
        memcpy(grad + n * p_n, state_row(&a->dfinal, b, h, n), bytes);
    for (int64_t c = ceil_div(rows, a->chunk) - 1; c >= 0; c--) {
        int64_t first = c * a->chunk, n = min_i64(a->chunk, rows - first);
        run_chunk(a, b, h, first, n, list);
        for (int64_t i = n - 1; i >= 0; i--)
            bwd_row(a, b, h, first + i, list + i * size, list + (i + 1) * size, grad, &sums);
    }
    for (int64_t n = 0; present(&a->dinit) && n < n_n; n++)
        memcpy(state_row(&a->dinit, b, h, n), grad + n * p_n, bytes);
    return sums;
}

int ssd_bwd_ref(struct lane *l, const struct ssd_bwd_args *a)
{
    TRY(ssd_bwd_check(a, l->err));
    TRY(check_work("ssd_bwd", &a->work, ssd_bwd_work_ref(a), l->err));
    clear_rows(&a->dBm);
    clear_rows(&a->dCm);
    for (int64_t h = 0; h < a->x.dim[2]; h++) {
        struct sums all = {0};
        for (int64_t b = 0; b < a->x.dim[0]; b++) {
            struct sums one = bwd_head(a, b, h);
            all.a_log += one.a_log;
            all.dt_bias += one.dt_bias;
            all.d += one.d;
        }
        add_to(&a->dA_log, h, all.a_log, a->acc_dA_log);
        add_to(&a->ddt_bias, h, all.dt_bias, a->acc_ddt_bias);
        add_to(&a->dD, h, all.d, a->acc_dD);
    }
    return ST_OK;
}
