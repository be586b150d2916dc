/* mhc primitives, reference; see mhc.h. */
#include "ops/ops_ref_int.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"

#include <math.h>

static double sigmoid(double v) { return 1 / (1 + exp(-v)); }
static double scalar(const struct tensor *t) { return ((const double *)t->data)[0]; }

static double rounded(const struct mhc_rule *r, double v)
{
    return r->round_bf16 ? (double)bf16_to_f32(f32_to_bf16((float)v)) : v;
}

static void zero_rows(const struct tensor *t)
{
    for (int64_t r = 0; r < t->dim[0]; r++)
        for (int64_t c = 0; c < t->dim[1]; c++)
            f64_row(t, r)[c] = 0;
}

/* ---- project --------------------------------------------------------------------------------- */

int mhc_project_fwd_ref(struct lane *l, const struct mhc_project_fwd_args *a)
{
    TRY(mhc_project_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], n = a->w.dim[0];
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r);
        double sum = 0;
        for (int64_t c = 0; c < k; c++)
            sum += x[c] * x[c];
        f64_row(&a->rho, r)[0] = sqrt((k > 0 ? sum / (double)k : 0) + a->root_eps) - mhc_root_less(a->root_eps);
        for (int64_t i = 0; i < n; i++) {
            const double *w = f64_row(&a->w, i);
            double p = 0;
            for (int64_t c = 0; c < k; c++)
                p += x[c] * w[c];
            f64_row(&a->p, r)[i] = p;
        }
    }
    return ST_OK;
}

int mhc_project_bwd_ref(struct lane *l, const struct mhc_project_bwd_args *a)
{
    TRY(mhc_project_bwd_check(a, l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], n = a->w.dim[0];
    if (present(&a->dw) && !a->acc_dw)
        zero_rows(&a->dw);
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r), *dp = f64_row(&a->dp, r);
        double *dx = f64_row(&a->dx, r), rho = f64_row(&a->rho, r)[0];
        double root = rho + mhc_root_less(a->root_eps);
        double through_rho = root == 0 ? 0 : f64_row(&a->drho, r)[0] / ((double)k * root);
        for (int64_t c = 0; c < k; c++) {
            double sum = through_rho * x[c];
            for (int64_t i = 0; i < n; i++)
                sum += dp[i] * f64_row(&a->w, i)[c];
            dx[c] = (a->acc_dx ? dx[c] : 0) + sum;
        }
        for (int64_t i = 0; present(&a->dw) && i < n; i++)
            for (int64_t c = 0; c < k; c++)
                f64_row(&a->dw, i)[c] += dp[i] * x[c];
    }
    return ST_OK;
}

/* ---- gates ----------------------------------------------------------------------------------- */

/* a_pre, a_post or a_res: which one scales logit k. */
static const struct tensor *alpha_of(const struct tensor *const a[3], int64_t n, int64_t k)
{
    return a[k < n ? 0 : k < 2 * n ? 1 : 2];
}

int mhc_gates_fwd_ref(struct lane *l, const struct mhc_gates_fwd_args *a)
{
    TRY(mhc_gates_fwd_check(a, l->err));
    const struct tensor *const alpha[3] = {&a->a_pre, &a->a_post, &a->a_res};
    int64_t n = a->rule.streams;
    for (int64_t r = 0; r < a->p.dim[0]; r++) {
        const double *p = f64_row(&a->p, r);
        double q = 1 / (f64_row(&a->rho, r)[0] + MHC_EPS);
        for (int64_t k = 0; k < mhc_logits(n); k++) {
            double z = q * p[k] * scalar(alpha_of(alpha, n, k)) + ((const double *)a->beta.data)[k];
            if (k < n)
                f64_row(&a->pre, r)[k] = rounded(&a->rule, sigmoid(z) + (a->rule.profile == MHC_D ? MHC_EPS : 0));
            else if (k < 2 * n)
                f64_row(&a->post, r)[k - n] = rounded(&a->rule, 2 * sigmoid(z));
            else
                f64_row(&a->logits, r)[k - 2 * n] = z;
        }
    }
    return ST_OK;
}

/* The gradient of logit z_k, given those of what was made of it. */
static double gate_dz(const struct mhc_gates_bwd_args *a, int64_t r, int64_t k, double z)
{
    int64_t n = a->rule.streams;
    double s = sigmoid(z);
    if (k < n)
        return present(&a->dpre) ? f64_row(&a->dpre, r)[k] * s * (1 - s) : 0;
    if (k < 2 * n)
        return present(&a->dpost) ? f64_row(&a->dpost, r)[k - n] * 2 * s * (1 - s) : 0;
    return present(&a->dlogits) ? f64_row(&a->dlogits, r)[k - 2 * n] : 0;
}

int mhc_gates_bwd_ref(struct lane *l, const struct mhc_gates_bwd_args *a)
{
    TRY(mhc_gates_bwd_check(a, l->err));
    const struct tensor *const alpha[3] = {&a->a_pre, &a->a_post, &a->a_res};
    const struct tensor *const dalpha[3] = {&a->da_pre, &a->da_post, &a->da_res};
    int64_t n = a->rule.streams, logits = mhc_logits(n);
    double *dbeta = a->dbeta.data;
    for (int i = 0; dbeta != NULL && !a->acc_dbeta && i < 3; i++)
        ((double *)dalpha[i]->data)[0] = 0;
    for (int64_t k = 0; dbeta != NULL && !a->acc_dbeta && k < logits; k++)
        dbeta[k] = 0;
    for (int64_t r = 0; r < a->p.dim[0]; r++) {
        const double *p = f64_row(&a->p, r);
        double q = 1 / (f64_row(&a->rho, r)[0] + MHC_EPS), sum = 0;
        for (int64_t k = 0; k < logits; k++) {
            double scale = scalar(alpha_of(alpha, n, k));
            double dz = gate_dz(a, r, k, q * p[k] * scale + ((const double *)a->beta.data)[k]);
            f64_row(&a->dp, r)[k] = dz * scale * q;
            if (present(&a->dz))
                f64_row(&a->dz, r)[k] = dz;
            sum += dz * scale * p[k];
            if (dbeta != NULL) {
                dbeta[k] += dz;
                ((double *)alpha_of(dalpha, n, k)->data)[0] += dz * p[k] * q;
            }
        }
        f64_row(&a->drho, r)[0] = -q * q * sum;
    }
    return ST_OK;
}

/* ---- sinkhorn -------------------------------------------------------------------------------- */

/* One division by row sums (rows true) or column sums; divisor[i] is what line i was divided by. */
static void normalise(const struct mhc_rule *r, bool rows, const double *from, double *to, double *divisor)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++)
            sum += from[rows ? i * n + j : j * n + i];
        divisor[i] = r->profile == MHC_D ? sum + MHC_EPS : fmax(sum, MHC_EPS);
        for (int64_t j = 0; j < n; j++) {
            int64_t at = rows ? i * n + j : j * n + i;
            to[at] = from[at] / divisor[i];
        }
    }
}

enum { MATRIX = MHC_MAX_STREAMS * MHC_MAX_STREAMS };
/* Every half step of the forward pass: the matrix it made and what it divided by. */
struct sinkhorn_history {
    double start[MATRIX]; /* what the iterations start from; of D, before the softmax's division */
    bool cut[MATRIX];     /* at MHC_S_LEAST */
    int64_t largest[MHC_MAX_STREAMS];
    double made[2 * MHC_MAX_ITERATIONS][MATRIX], divisor[2 * MHC_MAX_ITERATIONS][MHC_MAX_STREAMS];
};

static void sinkhorn(const struct mhc_rule *r, const double *logits, struct sinkhorn_history *h)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++) {
        int64_t largest = 0;
        for (int64_t j = 1; j < n; j++)
            largest = logits[i * n + j] > logits[i * n + largest] ? j : largest;
        double most = logits[i * n + largest];
        h->largest[i] = largest;
        for (int64_t j = 0; j < n; j++) {
            double z = logits[i * n + j] - most;
            h->cut[i * n + j] = r->profile == MHC_S && z < MHC_S_LEAST;
            h->start[i * n + j] = exp(h->cut[i * n + j] ? MHC_S_LEAST : z);
        }
    }
    for (int64_t t = 0; t < r->iterations; t++) {
        const double *from = t == 0 ? h->start : h->made[2 * t - 1];
        normalise(r, true, from, h->made[2 * t], h->divisor[2 * t]);
        for (int64_t i = 0; t == 0 && r->profile == MHC_D && i < n; i++) {
            double sum = 0; /* the softmax: no eps in the divisor, but on every entry */
            for (int64_t j = 0; j < n; j++)
                sum += from[i * n + j];
            h->divisor[0][i] = sum;
            for (int64_t j = 0; j < n; j++)
                h->made[0][i * n + j] = from[i * n + j] / sum + MHC_EPS;
        }
        normalise(r, false, h->made[2 * t], h->made[2 * t + 1], h->divisor[2 * t + 1]);
    }
}

int mhc_sinkhorn_fwd_ref(struct lane *l, const struct mhc_sinkhorn_fwd_args *a)
{
    TRY(mhc_sinkhorn_fwd_check(a, l->err));
    int64_t n = a->rule.streams;
    struct sinkhorn_history h;
    for (int64_t r = 0; r < a->logits.dim[0]; r++) {
        sinkhorn(&a->rule, f64_row(&a->logits, r), &h);
        for (int64_t i = 0; i < n * n; i++)
            f64_row(&a->res, r)[i] = rounded(&a->rule, h.made[2 * a->rule.iterations - 1][i]);
    }
    return ST_OK;
}

/* Through one half step: g becomes the gradient of what was divided. added: eps on every entry. */
static void undo(const struct mhc_rule *r, bool rows, const double *made, const double *divisor, double added,
                 double *g)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++) {
        double kappa = 0;
        /* Where max(sum, eps) chose eps the divisor is a constant. */
        bool constant = r->profile == MHC_S && divisor[i] == MHC_EPS;
        for (int64_t j = 0; j < n && !constant; j++) {
            int64_t at = rows ? i * n + j : j * n + i;
            kappa += g[at] * (made[at] - added);
        }
        for (int64_t j = 0; j < n; j++) {
            int64_t at = rows ? i * n + j : j * n + i;
            g[at] = (g[at] - kappa) / divisor[i];
        }
    }
}

int mhc_sinkhorn_bwd_ref(struct lane *l, const struct mhc_sinkhorn_bwd_args *a)
{
    TRY(mhc_sinkhorn_bwd_check(a, l->err));
    int64_t n = a->rule.streams;
    struct sinkhorn_history h;
    for (int64_t r = 0; r < a->logits.dim[0]; r++) {
        double g[MATRIX];
        sinkhorn(&a->rule, f64_row(&a->logits, r), &h);
        for (int64_t i = 0; i < n * n; i++)
            g[i] = f64_row(&a->dres, r)[i];
        for (int64_t t = a->rule.iterations - 1; t >= 0; t--) {
            double added = t == 0 && a->rule.profile == MHC_D ? MHC_EPS : 0;
            undo(&a->rule, false, h.made[2 * t + 1], h.divisor[2 * t + 1], 0, g);
            undo(&a->rule, true, h.made[2 * t], h.divisor[2 * t], added, g);
        }
        for (int64_t i = 0; i < n; i++) {
            double cut = 0, *out = f64_row(&a->dlogits, r) + i * n;
            for (int64_t j = 0; j < n; j++) {
                out[j] = g[i * n + j] * h.start[i * n + j];
                cut += h.cut[i * n + j] ? out[j] : 0;
                out[j] = h.cut[i * n + j] ? 0 : out[j];
            }
            out[h.largest[i]] += cut;
        }
    }
    return ST_OK;
}

/* ---- aggregate ------------------------------------------------------------------------------- */

int mhc_aggregate_fwd_ref(struct lane *l, const struct mhc_aggregate_fwd_args *a)
{
    TRY(mhc_aggregate_fwd_check(a, l->err));
    int64_t n = a->pre.dim[1], d = a->a.dim[1];
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t c = 0; c < d; c++) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++)
                sum += f64_row(&a->pre, r)[i] * f64_row(&a->x, r)[i * d + c];
            f64_row(&a->a, r)[c] = sum;
        }
    return ST_OK;
}

int mhc_aggregate_bwd_ref(struct lane *l, const struct mhc_aggregate_bwd_args *a)
{
    TRY(mhc_aggregate_bwd_check(a, l->err));
    int64_t n = a->pre.dim[1], d = a->da.dim[1];
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t i = 0; i < n; i++) {
            double sum = 0, *dx = f64_row(&a->dx, r) + i * d;
            for (int64_t c = 0; c < d; c++) {
                double da = f64_row(&a->da, r)[c];
                sum += da * f64_row(&a->x, r)[i * d + c];
                dx[c] = (a->acc_dx ? dx[c] : 0) + f64_row(&a->pre, r)[i] * da;
            }
            f64_row(&a->dpre, r)[i] = sum;
        }
    return ST_OK;
}

/* ---- combine --------------------------------------------------------------------------------- */

/* Where the weight of input stream j in output stream i is. */
static int64_t mix_at(const struct mhc_rule *r, int64_t i, int64_t j)
{
    return r->profile == MHC_D ? j * r->streams + i : i * r->streams + j;
}

/* What dropout multiplies channel c of token t with: 0 or 1 / (1 - p). */
static double drop_factor(const struct dropout_rule *r, int64_t t, int64_t c)
{
    if (r->p == 0)
        return 1;
    struct draw_place at = dropout_place(r->info.data, t + r->first, r->seq);
    bool keep = dropout_keep(r->key, dropout_threshold(r->p), at.step, at.sample, at.pos, c);
    return keep ? 1 / (1 - r->p) : 0;
}

static double biased(const struct tensor *f, const struct tensor *bias, int64_t r, int64_t c)
{
    return f64_row(f, r)[c] + (present(bias) ? ((const double *)bias->data)[c] : 0);
}

int mhc_combine_fwd_ref(struct lane *l, const struct mhc_combine_fwd_args *a)
{
    TRY(mhc_combine_fwd_check(a, l->err));
    int64_t n = a->rule.streams, d = a->f.dim[1];
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        const double *x = f64_row(&a->x, r), *res = f64_row(&a->res, r), *post = f64_row(&a->post, r);
        for (int64_t c = 0; c < d; c++) {
            double y[MHC_MAX_STREAMS];
            for (int64_t i = 0; i < n; i++) {
                y[i] = 0;
                for (int64_t j = 0; j < n; j++)
                    y[i] += res[mix_at(&a->rule, i, j)] * x[j * d + c];
                y[i] += post[i] * biased(&a->f, &a->bias, r, c) * drop_factor(&a->drop, r, i * d + c);
            }
            for (int64_t i = 0; i < n; i++)
                f64_row(&a->y, r)[i * d + c] = y[i];
        }
    }
    return ST_OK;
}

/* Channel c of row r, whose incoming gradients are g. */
static void combine_bwd_channel(const struct mhc_combine_bwd_args *a, int64_t r, int64_t c, const double *g)
{
    int64_t n = a->rule.streams, d = a->f.dim[1];
    const double *x = f64_row(&a->x, r), *res = f64_row(&a->res, r), *post = f64_row(&a->post, r);
    double df = 0, f = biased(&a->f, &a->bias, r, c);
    for (int64_t i = 0; i < n; i++) {
        double dropped = g[i] * drop_factor(&a->drop, r, i * d + c);
        df += post[i] * dropped;
        f64_row(&a->dpost, r)[i] += dropped * f;
        for (int64_t j = 0; j < n; j++)
            f64_row(&a->dres, r)[mix_at(&a->rule, i, j)] += g[i] * x[j * d + c];
    }
    for (int64_t j = 0; j < n; j++) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += res[mix_at(&a->rule, i, j)] * g[i];
        f64_row(&a->dx, r)[j * d + c] = sum;
    }
    f64_row(&a->df, r)[c] = df;
    if (present(&a->dbias))
        ((double *)a->dbias.data)[c] += df;
}

int mhc_combine_bwd_ref(struct lane *l, const struct mhc_combine_bwd_args *a)
{
    TRY(mhc_combine_bwd_check(a, l->err));
    int64_t n = a->rule.streams, d = a->f.dim[1];
    for (int64_t c = 0; present(&a->dbias) && !a->acc_dbias && c < d; c++)
        ((double *)a->dbias.data)[c] = 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        for (int64_t i = 0; i < n; i++)
            f64_row(&a->dpost, r)[i] = 0;
        for (int64_t i = 0; present(&a->dpre) && i < n; i++)
            f64_row(&a->dpre, r)[i] = 0;
        for (int64_t i = 0; i < n * n; i++)
            f64_row(&a->dres, r)[i] = 0;
        for (int64_t c = 0; c < d; c++) {
            double g[MHC_MAX_STREAMS]; /* dx may be dy */
            for (int64_t i = 0; i < n; i++)
                g[i] = f64_row(&a->dy, r)[i * d + c];
            combine_bwd_channel(a, r, c, g);
        }
    }
    return ST_OK;
}

/* ---- expand, contract ------------------------------------------------------------------------ */

int mhc_expand_fwd_ref(struct lane *l, const struct mhc_expand_fwd_args *a)
{
    TRY(mhc_expand_fwd_check(a, l->err));
    int64_t d = a->x.dim[1];
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t c = 0; c < a->y.dim[1]; c++)
            f64_row(&a->y, r)[c] = f64_row(&a->x, r)[c % d];
    return ST_OK;
}

int mhc_expand_bwd_ref(struct lane *l, const struct mhc_expand_bwd_args *a)
{
    TRY(mhc_expand_bwd_check(a, l->err));
    int64_t d = a->dx.dim[1];
    for (int64_t r = 0; r < a->dx.dim[0]; r++)
        for (int64_t c = 0; c < d; c++) {
            double sum = 0;
            for (int64_t at = c; at < a->dy.dim[1]; at += d)
                sum += f64_row(&a->dy, r)[at];
            f64_row(&a->dx, r)[c] = sum;
        }
    return ST_OK;
}

int mhc_contract_fwd_ref(struct lane *l, const struct mhc_contract_fwd_args *a)
{
    TRY(mhc_contract_fwd_check(a, l->err));
    int64_t d = a->y.dim[1], k = a->x.dim[1], n = d > 0 ? k / d : 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        const double *x = f64_row(&a->x, r);
        double gate[MHC_MAX_STREAMS], sum = 0;
        for (int64_t c = 0; c < k; c++)
            sum += x[c] * x[c];
        double rstd = 1 / sqrt((k > 0 ? sum / (double)k : 0) + a->eps);
        for (int64_t i = 0; present(&a->w) && i < a->w.dim[0]; i++) {
            double m = 0;
            for (int64_t c = 0; c < k; c++)
                m += f64_row(&a->w, i)[c] * x[c];
            gate[i] = sigmoid(m * rstd * scalar(&a->scale) + ((const double *)a->base.data)[i]) + a->eps;
            f64_row(&a->m, r)[i] = m;
            f64_row(&a->rstd, r)[0] = rstd;
        }
        for (int64_t c = 0; c < d; c++) {
            double y = 0;
            for (int64_t i = 0; i < n; i++)
                y += (present(&a->w) ? gate[i] : 1.0 / (double)n) * x[i * d + c];
            f64_row(&a->y, r)[c] = y;
        }
    }
    return ST_OK;
}

/* The learned gates of row r: their gradient goes to the parameters and, through m and rstd, to x. */
static void contract_bwd_row(const struct mhc_contract_bwd_args *a, int64_t r)
{
    int64_t d = a->dy.dim[1], k = a->dx.dim[1], n = a->w.dim[0];
    const double *x = f64_row(&a->x, r), *dy = f64_row(&a->dy, r), *m = f64_row(&a->m, r);
    double rstd = f64_row(&a->rstd, r)[0], scale = scalar(&a->scale), drstd = 0, gate[MHC_MAX_STREAMS],
           dm[MHC_MAX_STREAMS];
    for (int64_t i = 0; i < n; i++) {
        double s = sigmoid(m[i] * rstd * scale + ((const double *)a->base.data)[i]), dgate = 0;
        for (int64_t c = 0; c < d; c++)
            dgate += dy[c] * x[i * d + c];
        double dv = dgate * s * (1 - s);
        gate[i] = s + a->eps;
        dm[i] = dv * scale * rstd;
        drstd += dv * scale * m[i];
        if (!present(&a->dw))
            continue;
        ((double *)a->dbase.data)[i] += dv;
        ((double *)a->dscale.data)[0] += dv * m[i] * rstd;
        for (int64_t c = 0; c < k; c++)
            f64_row(&a->dw, i)[c] += dm[i] * x[c];
    }
    for (int64_t c = 0; c < k; c++) {
        double sum = gate[c / d] * dy[c % d] - drstd * rstd * rstd * rstd * x[c] / (double)k;
        for (int64_t i = 0; i < n; i++)
            sum += dm[i] * f64_row(&a->w, i)[c];
        f64_row(&a->dx, r)[c] = sum + (a->acc_dx ? f64_row(&a->dx, r)[c] : 0);
    }
}

int mhc_contract_bwd_ref(struct lane *l, const struct mhc_contract_bwd_args *a)
{
    TRY(mhc_contract_bwd_check(a, l->err));
    int64_t d = a->dy.dim[1], k = a->dx.dim[1], n = present(&a->w) ? a->w.dim[0] : 0;
    bool clear = present(&a->dw) && !mhc_contract_adds(a);
    if (clear)
        zero_rows(&a->dw);
    for (int64_t i = 0; clear && i < n; i++)
        ((double *)a->dbase.data)[i] = ((double *)a->dscale.data)[0] = 0;
    for (int64_t r = 0; r < a->dx.dim[0]; r++) {
        if (n > 0)
            contract_bwd_row(a, r);
        for (int64_t c = 0; n == 0 && c < k; c++)
            f64_row(&a->dx, r)[c] =
                f64_row(&a->dy, r)[c % d] * (double)d / (double)k + (a->acc_dx ? f64_row(&a->dx, r)[c] : 0);
    }
    return ST_OK;
}
