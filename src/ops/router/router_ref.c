/* router, reference; see router.h. */
#include "ops/ops_ref_int.h"
#include "ops/dropout/dropout.h"
#include "ops/router/router.h"
#include "ops/router/router_int.h"

enum { MAX_E = ROUTER_MAX_EXPERTS };

static double score(enum router_score kind, double z)
{
    if (kind == ROUTER_SIGMOID)
        return 1 / (1 + exp(-z));
    return sqrt(z > router_threshold() ? z : log1p(exp(z)));
}

static double score_slope(enum router_score kind, double z, double s)
{
    if (kind == ROUTER_SIGMOID)
        return s * (1 - s);
    return (z > router_threshold() ? 1 : 1 / (1 + exp(-z))) / (2 * s + 1e-20);
}

static double log_sum_exp(const double *z, int64_t n)
{
    double most = z[0], sum = 0;
    for (int64_t e = 1; e < n; e++)
        most = z[e] > most ? z[e] : most;
    for (int64_t e = 0; e < n; e++)
        sum += exp(z[e] - most);
    return most + log(sum);
}

static void scores(enum router_score kind, const double *z, int64_t n, double *s)
{
    double lse = kind == ROUTER_SOFTMAX ? log_sum_exp(z, n) : 0;
    for (int64_t e = 0; e < n; e++)
        s[e] = kind == ROUTER_SOFTMAX ? exp(z[e] - lse) : score(kind, z[e]);
}

/* Indices of the k largest, falling; the lowest index wins among equals. */
static void top(const double *v, int64_t n, int64_t k, int64_t *out)
{
    bool taken[MAX_E] = {0};
    for (int64_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || v[e] > v[best]))
                best = e;
        taken[best] = true;
        out[j] = best;
    }
}

static void mask_groups(const struct router_rule *r, int64_t n, int64_t k, double *v)
{
    int64_t size = n / r->groups, m = router_group_best(r, n, k), inside[ROUTER_MAX_TOPK], best[MAX_E];
    double sum[MAX_E];
    bool keep[MAX_E] = {0};
    for (int64_t g = 0; g < r->groups; g++) {
        top(v + g * size, size, m, inside);
        sum[g] = 0;
        for (int64_t j = 0; j < m; j++)
            sum[g] += v[g * size + inside[j]];
    }
    top(sum, r->groups, r->group_topk, best);
    for (int64_t j = 0; j < r->group_topk; j++)
        keep[best[j]] = true;
    for (int64_t e = 0; e < n; e++)
        v[e] = keep[e / size] ? v[e] : -INFINITY;
}

static void choose(const struct router_fwd_args *a, int64_t t, const double *z, const double *s, int64_t *chosen)
{
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1], k = a->probs.dim[1];
    const double *bias = a->bias.data;
    double v[MAX_E];
    if (present(&a->table)) {
        int64_t token = router_table_row(a, t);
        for (int64_t j = 0; j < k; j++)
            chosen[j] = ((const int32_t *)a->table.data)[token * k + j];
        return;
    }
    for (int64_t e = 0; e < n; e++)
        v[e] = (r->score == ROUTER_SOFTMAX && !r->pre_softmax ? z[e] : s[e]) + (bias ? bias[e] : 0);
    if (r->groups > 0)
        mask_groups(r, n, k, v);
    top(v, n, k, chosen);
}

static void probabilities(const struct router_rule *r, bool hashed, const double *z, const double *s,
                          const int64_t *chosen, int64_t k, double *p)
{
    double sum = 0, picked[ROUTER_MAX_TOPK];
    for (int64_t j = 0; j < k; j++) {
        picked[j] = z[chosen[j]];
        sum += s[chosen[j]];
    }
    bool post = r->score == ROUTER_SOFTMAX && !router_softmax_all(r, hashed);
    double lse = post && k > 0 ? log_sum_exp(picked, k) : 0;
    for (int64_t j = 0; j < k; j++)
        p[j] = r->scale * (post                      ? exp(picked[j] - lse)
                           : router_normalises(r, k) ? s[chosen[j]] / (sum + 1e-20)
                                                     : s[chosen[j]]);
}

/* How many of the tokens that chose expert e come before choice (t, j). */
static int64_t rank_in_expert(const struct router_fwd_args *a, int64_t t, int64_t j, int64_t e)
{
    int64_t rows = a->logits.dim[0], k = a->probs.dim[1], rank = 0;
    const double *p = a->probs.data;
    const int32_t *idx = a->idx.data;
    for (int64_t i = 0; i < rows * k; i++) {
        bool early = i < t * k + j, same = router_expert(idx[i]) == e && i != t * k + j;
        bool before = router_rank(i / k, rows, a->rule.seq) < router_rank(t, rows, a->rule.seq);
        rank += same && (a->rule.drop_late ? before : p[i] > p[t * k + j] || (p[i] == p[t * k + j] && early));
    }
    return rank;
}

static void drop(const struct router_fwd_args *a, int64_t capacity)
{
    int64_t rows = a->logits.dim[0], k = a->probs.dim[1];
    double *p = a->probs.data;
    int32_t *idx = a->idx.data;
    /* Marked first and zeroed after: ranks compare the probabilities before dropping. */
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < k; j++)
            if (rank_in_expert(a, t, j, router_expert(idx[t * k + j])) >= capacity)
                idx[t * k + j] = -1 - idx[t * k + j];
    for (int64_t i = 0; i < rows * k; i++)
        p[i] = idx[i] < 0 ? 0 : p[i];
}

int64_t router_fwd_work_ref(const struct router_fwd_args *a)
{
    int64_t n = a->logits.dim[1];
    return (a->logits.dim[0] / a->rule.seq + 1) * n * (int64_t)sizeof(double);
}

/* F and the sums of s by sequence, and the mean of z. */
static void balance(const struct router_fwd_args *a, double *sums, double stat[ROUTER_STATS])
{
    const struct router_rule *r = &a->rule;
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1], batch = rows / r->seq,
            plain[ROUTER_MAX_TOPK];
    double s[MAX_E], *load = a->load.data;
    for (int64_t i = 0; i < (batch + 1) * n; i++)
        sums[i] = load[i] = 0;
    for (int64_t t = 0; t < rows; t++) {
        const double *z = f64_row(&a->logits, t);
        double sum = 1e-20;
        scores(r->score, z, n, s);
        for (int64_t e = 0; e < n; e++)
            sum += s[e];
        for (int64_t e = 0; e < n; e++)
            sums[t / r->seq * n + e] += r->score == ROUTER_SOFTMAX ? s[e] : s[e] / sum;
        top(z, n, k, plain);
        for (int64_t j = 0; j < k; j++)
            load[t / r->seq * n + plain[j]] += 1;
    }
    router_global_load(load, batch, n, a->global.data, a->acc_global);
    struct router_sums all = {.experts = n, .k = k, .rows = rows, .seq = r->seq, .load = load, .score = sums};
    if (rows > 0)
        router_losses(&all, stat);
}

static void statistics(const struct router_fwd_args *a, double stat[ROUTER_STATS])
{
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1];
    double tally[MAX_E] = {0};
    for (int64_t i = 0; i < rows * k; i++)
        if (((const int32_t *)a->idx.data)[i] >= 0)
            tally[((const int32_t *)a->idx.data)[i]] += 1;
    for (int64_t t = 0; t < rows; t++) {
        double lse = log_sum_exp(f64_row(&a->logits, t), n);
        stat[ROUTER_STAT_Z] += lse * lse / (double)rows;
    }
    router_load_stats(tally, n, rows, k, stat);
    stat[ROUTER_STAT_LOSS] = router_weighted(&a->rule.coef, stat);
    for (int64_t e = 0; present(&a->tally) && e < n; e++)
        ((double *)a->tally.data)[e] = (a->acc_tally ? ((double *)a->tally.data)[e] : 0) + tally[e];
    for (int i = 0; present(&a->stat) && i < ROUTER_STATS; i++)
        ((double *)a->stat.data)[i] = (a->acc_stat ? ((double *)a->stat.data)[i] : 0) + stat[i];
    if (present(&a->loss))
        *(double *)a->loss.data = stat[ROUTER_STAT_LOSS];
}

int router_fwd_ref(struct lane *l, const struct router_fwd_args *a)
{
    TRY(router_fwd_check(a, l->err));
    TRY(router_table_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1], chosen[ROUTER_MAX_TOPK];
    double s[MAX_E], stat[ROUTER_STATS] = {0};
    TRY(check_work("router_fwd", &a->work, router_fwd_work_ref(a), l->err));
    for (int64_t t = 0; t < rows; t++) {
        const double *z = f64_row(&a->logits, t);
        scores(a->rule.score, z, n, s);
        choose(a, t, z, s, chosen);
        probabilities(&a->rule, present(&a->token), z, s, chosen, k, (double *)a->probs.data + t * k);
        for (int64_t j = 0; j < k; j++)
            ((int32_t *)a->idx.data)[t * k + j] = (int32_t)chosen[j];
    }
    int64_t capacity = router_capacity(&a->rule, rows, n, k);
    if (capacity < rows)
        drop(a, capacity);
    if (present(&a->load))
        balance(a, a->work.data, stat);
    statistics(a, stat);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dz from the gradients of the probabilities. */
static void through_probs(const struct router_bwd_args *a, int64_t t, const double *z, const double *s, double *dz)
{
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1], k = a->idx.dim[1], at[ROUTER_MAX_TOPK];
    double g[ROUTER_MAX_TOPK], p[ROUTER_MAX_TOPK], dot = 0, sum = 1e-20;
    struct router_rule unscaled = *r;
    unscaled.scale = 1;
    for (int64_t j = 0; j < k; j++) {
        int32_t idx = ((const int32_t *)a->idx.data)[t * k + j];
        at[j] = router_expert(idx);
        g[j] = idx < 0 ? 0 : r->scale * f64_row(&a->dprobs, t)[j];
        sum += s[at[j]];
    }
    probabilities(&unscaled, a->hashed, z, s, at, k, p);
    for (int64_t j = 0; j < k; j++)
        dot += g[j] * p[j];
    for (int64_t e = 0; router_softmax_all(r, a->hashed) && e < n; e++)
        dz[e] -= s[e] * dot;
    for (int64_t j = 0; j < k; j++) {
        if (router_softmax_all(r, a->hashed))
            dz[at[j]] += p[j] * g[j];
        else if (r->score == ROUTER_SOFTMAX)
            dz[at[j]] += p[j] * (g[j] - dot);
        else
            dz[at[j]] +=
                (router_normalises(r, k) ? (g[j] - dot) / sum : g[j]) * score_slope(r->score, z[at[j]], s[at[j]]);
    }
}

static void through_losses(const struct router_bwd_args *a, int64_t t, const double *z, const double *s, double *dz)
{
    const struct router_rule *r = &a->rule;
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->idx.dim[1], batch = rows / r->seq;
    double dloss = *(const double *)a->dloss.data, slope[MAX_E], dot = 0, sum = 1e-20;
    for (int64_t e = 0; e < n; e++)
        sum += s[e];
    double over = r->score == ROUTER_SOFTMAX ? 1 : sum;
    for (int64_t e = 0; router_balances(r) && e < n; e++) {
        slope[e] = dloss * router_loss_slope(r, a->load.data, batch, n, k, t / r->seq, e);
        dot += slope[e] * s[e] / over;
    }
    for (int64_t e = 0; router_balances(r) && e < n; e++)
        dz[e] += r->score == ROUTER_SOFTMAX ? s[e] * (slope[e] - dot)
                                            : (slope[e] - dot) / over * score_slope(r->score, z[e], s[e]);
    double lse = log_sum_exp(z, n);
    for (int64_t e = 0; e < n; e++)
        dz[e] += 2 * r->coef.z * dloss * lse * exp(z[e] - lse) / (double)rows;
}

int router_bwd_ref(struct lane *l, const struct router_bwd_args *a)
{
    TRY(router_bwd_check(a, l->err));
    int64_t n = a->logits.dim[1];
    double s[MAX_E], dz[MAX_E];
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        const double *z = f64_row(&a->logits, t);
        scores(a->rule.score, z, n, s);
        for (int64_t e = 0; e < n; e++)
            dz[e] = 0;
        through_probs(a, t, z, s, dz);
        if (present(&a->dloss))
            through_losses(a, t, z, s, dz);
        for (int64_t e = 0; e < n; e++)
            f64_row(&a->dlogits, t)[e] = dz[e];
    }
    return ST_OK;
}

/* ---- noise, jitter, bias --------------------------------------------------------------------- */

int router_noise_ref(struct lane *l, const struct router_noise_args *a)
{
    TRY(router_noise_check(a, l->err));
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        double v[4] = {0};
        struct draw_place at = dropout_place(a->info.data, t, a->seq);
        for (int64_t e = 0; e < a->logits.dim[1]; e++) {
            if (e % 4 == 0)
                router_normals(a->key, at.step, at.sample, at.pos, e / 4, v);
            f64_row(&a->logits, t)[e] = v[e % 4];
        }
    }
    return ST_OK;
}

int router_jitter_ref(struct lane *l, const struct router_jitter_args *a)
{
    TRY(router_jitter_check(a, l->err));
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        struct draw_place at = dropout_place(a->info.data, t, a->seq);
        for (int64_t c = 0; c < a->x.dim[1]; c++) {
            struct philox4 r = dropout_draw(a->key, at.step, at.sample, at.pos, c);
            double *y = f64_row(&a->y, t) + c, factor = 1 + a->eps * (2 * u32_to_unit(r.v[c % 4]) - 1);
            *y = (a->acc_y ? *y : 0) + f64_row(&a->x, t)[c] * factor;
        }
    }
    return ST_OK;
}

int router_bias_ref(struct lane *l, const struct router_bias_args *a)
{
    TRY(router_bias_check(a, l->err));
    const double *tally = a->tally.data;
    int64_t n = a->bias.dim[0];
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += tally[e];
    for (int64_t e = 0; e < n; e++) /* counts are whole numbers, so the comparison with the mean is exact */
        ((double *)a->bias.data)[e] += a->rate * router_sign(sum - tally[e] * (double)n);
    return ST_OK;
}
