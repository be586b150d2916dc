/* gdn, reference: the recurrence itself, and its reverse; see gdn.h. */
#include "ops/ref_scan.h"
#include "ops/gdn/gdn.h"

static double length_factor(const double *x, int64_t n)
{
    double sum = GDN_EPS;
    for (int64_t c = 0; c < n; c++)
        sum += x[c] * x[c];
    return 1 / sqrt(sum);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* The scalars of a row of a head. */
struct gates {
    double raw, g, decay, weight; /* alpha + dt_bias; log decay; e^g or 0 at a document; sigmoid(beta) */
};

static struct gates gates_of(double alpha, double beta, double bias, double a_log, bool begins)
{
    struct gates s = {.raw = alpha + bias, .weight = sigmoid(beta)};
    s.g = -exp(a_log) * (s.raw > 20 ? s.raw : log1p(exp(s.raw)));
    s.decay = begins ? 0 : exp(s.g);
    return s;
}

/* One step of the rule: `next` from `state` (which may be the same), u [dv] what is written along
 * k. */
static void step_state(double *next, const double *state, const double *k, double k_factor, const double *v,
                       struct gates s, double *u, int64_t dk, int64_t dv)
{
    for (int64_t p = 0; p < dv; p++) {
        double held = 0;
        for (int64_t n = 0; n < dk; n++)
            held += s.decay == 0 ? 0 : s.decay * state[n * dv + p] * k[n] * k_factor;
        u[p] = s.weight * (v[p] - held);
    }
    for (int64_t n = 0; n < dk; n++)
        for (int64_t p = 0; p < dv; p++)
            next[n * dv + p] = (s.decay == 0 ? 0 : s.decay * state[n * dv + p]) + k[n] * k_factor * u[p];
}

/* ---- forward --------------------------------------------------------------------------------- */

int64_t gdn_fwd_work_ref(const struct gdn_fwd_args *a)
{
    return (a->k.dim[3] + 1) * a->v.dim[3] * (int64_t)sizeof(double);
}

static void fwd_row(const struct gdn_fwd_args *a, int64_t b, int64_t h, int64_t t, double *state, double *u)
{
    int64_t dk = a->k.dim[3], dv = a->v.dim[3], kh = h / (a->v.dim[2] / a->k.dim[2]);
    const double *q = at3(&a->q, b, t, kh), *k = at3(&a->k, b, t, kh);
    double *o = at3(&a->o, b, t, h), q_factor = length_factor(q, dk);
    struct gates s = gates_of(*at3(&a->alpha, b, t, h), *at3(&a->beta, b, t, h), at1(&a->dt_bias, h), at1(&a->A_log, h),
                              begins_document(&a->doc_start, b, t));
    step_state(state, state, k, length_factor(k, dk), at3(&a->v, b, t, h), s, u, dk, dv);
    for (int64_t p = 0; p < dv; p++) {
        double sum = 0;
        for (int64_t n = 0; n < dk; n++)
            sum += state[n * dv + p] * q[n] * q_factor;
        o[p] = dk > 0 ? sum / sqrt((double)dk) : 0;
    }
}

int gdn_fwd_ref(struct lane *l, const struct gdn_fwd_args *a)
{
    TRY(gdn_fwd_check(a, l->err));
    TRY(check_work("gdn_fwd", &a->work, gdn_fwd_work_ref(a), l->err));
    int64_t dk = a->k.dim[3], dv = a->v.dim[3];
    bool fresh = present(&a->start) && *(const int64_t *)a->start.data == 0;
    double *u = a->work.data, *state = u + dv;
    size_t row = (size_t)dv * sizeof(double);
    for (int64_t b = 0; b < a->v.dim[0]; b++)
        for (int64_t h = 0; h < a->v.dim[2]; h++) {
            memset(state, 0, row * (size_t)dk);
            for (int64_t n = 0; present(&a->init) && !fresh && n < dk; n++)
                memcpy(state + n * dv, state_row(&a->init, b, h, n), row);
            for (int64_t t = 0; t < a->v.dim[1]; t++) {
                for (int64_t n = 0; present(&a->states) && t % a->chunk == 0 && n < dk; n++)
                    memcpy(chunk_row(&a->states, b, t / a->chunk, h, n), state + n * dv, row);
                fwd_row(a, b, h, t, state, u);
            }
            for (int64_t n = 0; present(&a->final) && n < dk; n++)
                memcpy(state_row(&a->final, b, h, n), state + n * dv, row);
        }
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* u and its gradient; the gradient of the running state; the states around each row of a chunk. */
int64_t gdn_bwd_work_ref(const struct gdn_bwd_args *a)
{
    int64_t size = a->k.dim[3] * a->v.dim[3];
    return (2 * a->v.dim[3] + (min_i64(a->chunk, a->v.dim[1]) + 2) * size) * (int64_t)sizeof(double);
}

struct sums {
    double a_log, dt_bias;
};
struct scratch {
    double *u, *du, *grad, *list;
};

static struct gates row_gates(const struct gdn_bwd_args *a, int64_t b, int64_t h, int64_t t)
{
    return gates_of(*at3(&a->alpha, b, t, h), *at3(&a->beta, b, t, h), at1(&a->dt_bias, h), at1(&a->A_log, h),
                    begins_document(&a->doc_start, b, t));
}

/* One row: grad is the gradient of the state after it on entry, of the state before it on return.
 * dq and dk get the gradients of the vectors of unit length. */
static void bwd_row(const struct gdn_bwd_args *a, int64_t b, int64_t h, int64_t t, const double *before,
                    const double *after, const struct scratch *w, struct sums *sums)
{
    int64_t dk_n = a->k.dim[3], dv_n = a->v.dim[3], kh = h / (a->v.dim[2] / a->k.dim[2]);
    const double *q = at3(&a->q, b, t, kh), *k = at3(&a->k, b, t, kh), *v = at3(&a->v, b, t, h),
                 *d_o = at3(&a->d_o, b, t, h);
    double *dq = at3(&a->dq, b, t, kh), *dk = at3(&a->dk, b, t, kh), *dv = at3(&a->dv, b, t, h), *grad = w->grad;
    double q_factor = length_factor(q, dk_n), k_factor = length_factor(k, dk_n), scale = 1 / sqrt((double)dk_n);
    struct gates s = row_gates(a, b, h, t);
    double d_weight = 0, d_g = 0;
    for (int64_t n = 0; n < dk_n; n++)
        for (int64_t p = 0; p < dv_n; p++) {
            grad[n * dv_n + p] += scale * q[n] * q_factor * d_o[p];
            dq[n] += scale * after[n * dv_n + p] * d_o[p];
        }
    for (int64_t p = 0; p < dv_n; p++) {
        double held = 0, du = 0;
        for (int64_t n = 0; n < dk_n; n++) {
            held += s.decay == 0 ? 0 : s.decay * before[n * dv_n + p] * k[n] * k_factor;
            du += grad[n * dv_n + p] * k[n] * k_factor;
        }
        w->u[p] = s.weight * (v[p] - held);
        w->du[p] = du;
        d_weight += du * (v[p] - held);
        dv[p] = s.weight * du;
    }
    for (int64_t n = 0; n < dk_n; n++)
        for (int64_t p = 0; p < dv_n; p++) {
            double *e = &grad[n * dv_n + p], faded = s.decay == 0 ? 0 : s.decay * before[n * dv_n + p];
            dk[n] += *e * w->u[p] - faded * s.weight * w->du[p];
            *e -= k[n] * k_factor * s.weight * w->du[p];
            d_g += *e * faded;
            *e *= s.decay;
        }
    double d_raw = d_g * -exp(at1(&a->A_log, h)) * (s.raw > 20 ? 1 : sigmoid(s.raw));
    *at3(&a->dalpha, b, t, h) = d_raw;
    *at3(&a->dbeta, b, t, h) = d_weight * s.weight * (1 - s.weight);
    sums->dt_bias += d_raw;
    sums->a_log += d_g * s.g;
}

/* The states of rows [first, first + n): list[i] is the one before row i. */
static void run_chunk(const struct gdn_bwd_args *a, int64_t b, int64_t h, int64_t first, int64_t n,
                      const struct scratch *w)
{
    int64_t dk = a->k.dim[3], dv = a->v.dim[3], kh = h / (a->v.dim[2] / a->k.dim[2]), size = dk * dv;
    for (int64_t i = 0; i < dk; i++)
        memcpy(w->list + i * dv, chunk_row(&a->states, b, first / a->chunk, h, i), (size_t)dv * sizeof(double));
    for (int64_t i = 0; i < n; i++) {
        const double *k = at3(&a->k, b, first + i, kh);
        step_state(w->list + (i + 1) * size, w->list + i * size, k, length_factor(k, dk), at3(&a->v, b, first + i, h),
                   row_gates(a, b, h, first + i), w->u, dk, dv);
    }
}

static struct sums bwd_head(const struct gdn_bwd_args *a, int64_t b, int64_t h)
{
    int64_t rows = a->v.dim[1], dk = a->k.dim[3], dv = a->v.dim[3], size = dk * dv;
    double *at = a->work.data;
    struct scratch w = {.u = at, .du = at + dv, .grad = at + 2 * dv, .list = at + 2 * dv + size};
    size_t bytes = (size_t)dv * sizeof(double);
    struct sums sums = {0};
    memset(w.grad, 0, bytes * (size_t)dk);
    for (int64_t n = 0; present(&a->dfinal) && n < dk; n++)
        memcpy(w.grad + n * dv, state_row(&a->dfinal, b, h, n), bytes);
    for (int64_t c = ceil_div(rows, a->chunk) - 1; c >= 0; c--) {
        int64_t first = c * a->chunk, n = min_i64(a->chunk, rows - first);
        run_chunk(a, b, h, first, n, &w);
        for (int64_t i = n - 1; i >= 0; i--)
            bwd_row(a, b, h, first + i, w.list + i * size, w.list + (i + 1) * size, &w, &sums);
    }
    for (int64_t n = 0; present(&a->dinit) && n < dk; n++)
        memcpy(state_row(&a->dinit, b, h, n), w.grad + n * dv, bytes);
    return sums;
}

/* From the gradient of y = x f, f = (sum x^2 + eps)^-1/2, to that of x. */
static void through_length(const struct tensor *x, const struct tensor *dx)
{
    int64_t n = cols_of(x);
    for (int64_t r = 0; r < rows_of(x); r++) {
        const double *from = f64_row(x, r);
        double *d = f64_row(dx, r), factor = length_factor(from, n), along = 0;
        for (int64_t c = 0; c < n; c++)
            along += d[c] * from[c] * factor;
        for (int64_t c = 0; c < n; c++)
            d[c] = factor * (d[c] - from[c] * factor * along);
    }
}

int gdn_bwd_ref(struct lane *l, const struct gdn_bwd_args *a)
{
    TRY(gdn_bwd_check(a, l->err));
    TRY(check_work("gdn_bwd", &a->work, gdn_bwd_work_ref(a), l->err));
    clear_rows(&a->dq);
    clear_rows(&a->dk);
    for (int64_t h = 0; h < a->v.dim[2]; h++) {
        struct sums all = {0};
        for (int64_t b = 0; b < a->v.dim[0]; b++) {
            struct sums one = bwd_head(a, b, h);
            all.a_log += one.a_log;
            all.dt_bias += one.dt_bias;
        }
        add_to(&a->dA_log, h, all.a_log, a->acc_dA_log);
        add_to(&a->ddt_bias, h, all.dt_bias, a->acc_ddt_bias);
    }
    through_length(&a->q, &a->dq);
    through_length(&a->k, &a->dk);
    return ST_OK;
}
