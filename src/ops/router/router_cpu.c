/* router, fast CPU version; see router.h. Rows are taken in fixed blocks: each leaves its sums in work,
 * and they are added in block order, so that threads do not change the result. */
#include "ops/ops_cpu_int.h"
#include "ops/router/router.h"

#include "ops/cpu_math.h"
#include "ops/dropout/dropout_mask.h"
#include "ops/router/router_int.h"

#include <string.h>

enum { MAX_E = ROUTER_MAX_EXPERTS, MAX_K = ROUTER_MAX_TOPK };

/* ---- rows ------------------------------------------------------------------------------------ */

static float largest(const float *z, int64_t n)
{
    float most = z[0];
#pragma omp simd reduction(max : most)
    for (int64_t e = 1; e < n; e++)
        most = z[e] > most ? z[e] : most;
    return most;
}

/* p = softmax(z); returns the log of the sum of exponentials. */
static float softmax(const float *z, int64_t n, float *p)
{
    float most = largest(z, n), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t e = 0; e < n; e++) {
        p[e] = fast_expf(z[e] - most);
        sum += p[e];
    }
    float over = 1.0f / sum;
#pragma omp simd
    for (int64_t e = 0; e < n; e++)
        p[e] *= over;
    return most + logf(sum);
}

static float root_softplus(float z) { return sqrtf(z > (float)router_threshold() ? z : log1pf(expf(z))); }

static float slope_of(enum router_score kind, float z, float s)
{
    if (kind == ROUTER_SIGMOID)
        return s * (1.0f - s);
    return (z > (float)router_threshold() ? 1.0f : fast_sigmoidf(z)) / (2.0f * s + 1e-20f);
}

static void plain_scores(enum router_score kind, const float *z, int64_t n, float *s)
{
    if (kind == ROUTER_SIGMOID) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++)
            s[e] = fast_sigmoidf(z[e]);
    } else {
        for (int64_t e = 0; e < n; e++)
            s[e] = root_softplus(z[e]);
    }
}

/* Indices of the k largest, falling, the lowest index first among equals. Most values lose against
 * the k-th best so far and cost one comparison. Values that compare with nothing (NaN) are never
 * taken; the initial entries then stay, which are valid indices. */
static void top(const float *v, int64_t n, int64_t k, int32_t *out)
{
    float best[MAX_K];
    for (int64_t j = 0; j < k; j++) {
        best[j] = -INFINITY;
        out[j] = (int32_t)min_i64(j, n - 1);
    }
    for (int64_t e = 0; e < n; e++) {
        if (!(v[e] > best[k - 1]))
            continue;
        int64_t j = k - 1;
        for (; j > 0 && v[e] > best[j - 1]; j--) {
            best[j] = best[j - 1];
            out[j] = out[j - 1];
        }
        best[j] = v[e];
        out[j] = (int32_t)e;
    }
}

static void mask_groups(const struct router_rule *r, int64_t n, int64_t k, float *v)
{
    int64_t size = n / r->groups, per = router_group_best(r, n, k);
    int32_t inside[MAX_K], best[MAX_K];
    float sum[MAX_E];
    bool keep[MAX_E];
    for (int64_t g = 0; g < r->groups; g++) {
        top(v + g * size, size, per, inside);
        sum[g] = 0;
        keep[g] = false;
        for (int64_t j = 0; j < per; j++)
            sum[g] += v[g * size + inside[j]];
    }
    top(sum, r->groups, r->group_topk, best);
    for (int64_t j = 0; j < r->group_topk; j++)
        keep[best[j]] = true;
    for (int64_t g = 0; g < r->groups; g++)
        for (int64_t e = g * size; !keep[g] && e < (g + 1) * size; e++)
            v[e] = -INFINITY;
}

static void choose(const struct router_fwd_args *a, int64_t t, const float *z, const float *s, int32_t *chosen)
{
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1], k = a->probs.dim[1];
    const float *bias = a->bias.data, *from = r->score == ROUTER_SOFTMAX && !r->pre_softmax ? z : s;
    float v[MAX_E];
    if (present(&a->table)) {
        memcpy(chosen, (const int32_t *)a->table.data + router_table_row(a, t) * k, (size_t)k * sizeof *chosen);
        return;
    }
    if (bias == NULL && r->groups == 0) {
        top(from, n, k, chosen);
        return;
    }
#pragma omp simd
    for (int64_t e = 0; e < n; e++)
        v[e] = from[e] + (bias == NULL ? 0.0f : bias[e]);
    if (r->groups > 0)
        mask_groups(r, n, k, v);
    top(v, n, k, chosen);
}

/* Unscaled; returns the sum that chosen scores were divided by (1 where none was). */
static float probabilities(const struct router_rule *r, bool hashed, const float *z, const float *s,
                           const int32_t *chosen, int64_t k, float *p)
{
    if (r->score == ROUTER_SOFTMAX && !router_softmax_all(r, hashed)) {
        for (int64_t j = 0; j < k; j++)
            p[j] = z[chosen[j]];
        softmax(p, k, p);
        return 1;
    }
    float sum = 1e-20f;
    for (int64_t j = 0; j < k; j++) {
        p[j] = s[chosen[j]];
        sum += p[j];
    }
    if (!router_normalises(r, k))
        return 1;
    for (int64_t j = 0; j < k; j++)
        p[j] /= sum;
    return sum;
}

/* ---- work ------------------------------------------------------------------------------------ */

/* Carved from work: 8-byte things first. */
struct scratch {
    double *by_seq; /* [sequences, E] sums of s */
    double *z;      /* [blocks] sums of squared log-sum-exp */
    float *sums;    /* [blocks, E] of s */
    int32_t *hits;  /* [blocks, E] in the plain top k */
    int32_t *list;  /* [T k] choices by expert, then [E + 1] where each begins: capacity only */
};

static int64_t carve(const struct router_fwd_args *a, struct scratch *s, char *base)
{
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1],
            blocks = router_blocks(rows, a->rule.seq);
    int64_t at[5], size = 0,
                   want[5] = {rows / a->rule.seq * n * 8, blocks * 8, blocks * n * 4, blocks * n * 4,
                              a->rule.capacity > 0 ? (rows * k + n + 1) * 4 : 0};
    for (int i = 0; i < 5; i++) {
        at[i] = size;
        size += round_up(want[i], 64);
    }
    if (base != NULL)
        *s = (struct scratch){(double *)(void *)(base + at[0]), (double *)(void *)(base + at[1]),
                              (float *)(void *)(base + at[2]), (int32_t *)(void *)(base + at[3]),
                              (int32_t *)(void *)(base + at[4])};
    return size;
}

int64_t CPU_NAME(router_fwd_work_cpu)(const struct router_fwd_args *a) { return carve(a, NULL, NULL); }

/* ---- forward --------------------------------------------------------------------------------- */

struct forward {
    const struct router_fwd_args *a;
    struct scratch s;
    bool balance, wants_z; /* what of the losses is asked for */
};

static void add_balance(const struct forward *f, const float *z, const float *s, const int32_t *chosen, float *sums,
                        int32_t *hits)
{
    const struct router_fwd_args *a = f->a;
    int64_t n = a->logits.dim[1], k = a->probs.dim[1];
    float sum = 0, over = 1.0f;
    int32_t plain[MAX_K];
    if (a->rule.score != ROUTER_SOFTMAX) {
#pragma omp simd reduction(+ : sum)
        for (int64_t e = 0; e < n; e++)
            sum += s[e];
        over = 1.0f / (sum + 1e-20f);
    }
#pragma omp simd
    for (int64_t e = 0; e < n; e++)
        sums[e] += s[e] * over;
    bool same = a->rule.score == ROUTER_SOFTMAX && !a->rule.pre_softmax && a->rule.groups == 0 && !present(&a->bias) &&
                !present(&a->table);
    if (!same)
        top(z, n, k, plain);
    for (int64_t j = 0; j < k; j++)
        hits[same ? chosen[j] : plain[j]]++;
}

static void forward_block(const struct forward *f, int64_t block)
{
    const struct router_fwd_args *a = f->a;
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1], k = a->probs.dim[1], per_seq = ceil_div(r->seq, ROUTER_BLOCK);
    int64_t seq = block / per_seq, first = seq * r->seq + block % per_seq * ROUTER_BLOCK;
    int64_t end = min_i64(first + ROUTER_BLOCK, (seq + 1) * r->seq);
    float s[MAX_E], soft[MAX_E], *sums = f->s.sums + block * n, scale = (float)r->scale;
    int32_t *hits = f->s.hits + block * n;
    bool hashed = present(&a->token);
    bool wants_soft = f->wants_z || (r->score == ROUTER_SOFTMAX && (f->balance || router_softmax_all(r, hashed)));
    double z_sum = 0;
    memset(sums, 0, (size_t)n * sizeof *sums);
    memset(hits, 0, (size_t)n * sizeof *hits);
    for (int64_t t = first; t < end; t++) {
        const float *z = f32_row(&a->logits, t);
        float *p = (float *)a->probs.data + t * k, lse = wants_soft ? softmax(z, n, soft) : 0;
        int32_t *chosen = (int32_t *)a->idx.data + t * k;
        if (r->score != ROUTER_SOFTMAX)
            plain_scores(r->score, z, n, s);
        const float *use = r->score == ROUTER_SOFTMAX ? soft : s;
        choose(a, t, z, use, chosen);
        probabilities(r, hashed, z, use, chosen, k, p);
        for (int64_t j = 0; j < k; j++)
            p[j] *= scale;
        z_sum += (double)lse * lse;
        if (f->balance)
            add_balance(f, z, use, chosen, sums, hits);
    }
    f->s.z[block] = z_sum;
}

/* ---- capacity -------------------------------------------------------------------------------- */

/* The bits of a non-negative float, which order like the float. */
static uint32_t order_of(float p)
{
    uint32_t bits;
    memcpy(&bits, &p, sizeof bits);
    return bits;
}

/* What choice i is kept by: larger first. */
static uint32_t drop_key(const struct router_fwd_args *a, int32_t i)
{
    int64_t rows = a->logits.dim[0], k = a->probs.dim[1];
    return a->rule.drop_late ? (uint32_t)(rows - router_rank(i / k, rows, a->rule.seq))
                             : order_of(((const float *)a->probs.data)[i]);
}

/* The choices of one expert, in order of tokens; all but `capacity` of them are marked. */
static void drop_expert(const struct router_fwd_args *a, const int32_t *list, int64_t n, int64_t capacity)
{
    float *p = a->probs.data;
    int32_t *idx = a->idx.data;
    int64_t kept = 0, above = 0;
    uint32_t low = 0, high = 0x80000001u; /* the capacity-th largest lies in [low, high) */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        int64_t count = 0;
        for (int64_t i = 0; i < n; i++)
            count += drop_key(a, list[i]) >= middle;
        if (count >= capacity)
            low = middle;
        else
            high = middle;
    }
    for (int64_t i = 0; i < n; i++)
        above += drop_key(a, list[i]) > low;
    for (int64_t i = 0; i < n; i++) {
        uint32_t v = drop_key(a, list[i]);
        bool stays = v > low || (v == low && kept < capacity - above);
        kept += stays && v == low;
        if (!stays) {
            idx[list[i]] = -1 - idx[list[i]];
            p[list[i]] = 0;
        }
    }
}

static void drop(const struct router_fwd_args *a, int32_t *list, int64_t capacity)
{
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1];
    int32_t *idx = a->idx.data, *end = list + rows * k;
    memset(end, 0, (size_t)(n + 1) * sizeof *end);
    for (int64_t i = 0; i < rows * k; i++)
        end[idx[i] + 1]++;
    for (int64_t e = 0; e < n; e++)
        end[e + 1] += end[e];
    for (int64_t i = 0; i < rows * k; i++) /* end[e] walks from where e begins to where it ends */
        list[end[idx[i]]++] = (int32_t)i;
#pragma omp parallel for schedule(dynamic)
    for (int64_t e = 0; e < n; e++) {
        int64_t begin = e == 0 ? 0 : end[e - 1];
        if (end[e] - begin > capacity)
            drop_expert(a, list + begin, end[e] - begin, capacity);
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void gather_balance(const struct forward *f, double stat[ROUTER_STATS])
{
    const struct router_fwd_args *a = f->a;
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1], seq = a->rule.seq;
    int64_t batch = rows / seq, per_seq = ceil_div(seq, ROUTER_BLOCK);
    double *load = a->load.data;
    for (int64_t b = 0; b < batch; b++) {
        for (int64_t e = 0; e < n; e++) {
            double sum = 0;
            int64_t hits = 0;
            for (int64_t i = b * per_seq; i < (b + 1) * per_seq; i++) {
                sum += f->s.sums[i * n + e];
                hits += f->s.hits[i * n + e];
            }
            f->s.by_seq[b * n + e] = sum;
            load[b * n + e] = (double)hits;
        }
    }
    router_global_load(load, batch, n, a->global.data, a->acc_global);
    struct router_sums all = {.experts = n, .k = k, .rows = rows, .seq = seq, .load = load, .score = f->s.by_seq};
    if (rows > 0)
        router_losses(&all, stat);
}

static void gather_stats(const struct forward *f, int64_t blocks, double stat[ROUTER_STATS])
{
    const struct router_fwd_args *a = f->a;
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1];
    double tally[MAX_E] = {0};
    for (int64_t i = 0; i < rows * k; i++)
        if (((const int32_t *)a->idx.data)[i] >= 0)
            tally[((const int32_t *)a->idx.data)[i]] += 1;
    for (int64_t b = 0; b < blocks; b++)
        stat[ROUTER_STAT_Z] += f->s.z[b] / (double)rows;
    router_load_stats(tally, n, rows, k, stat);
    stat[ROUTER_STAT_LOSS] = router_weighted(&a->rule.coef, stat);
    for (int64_t e = 0; present(&a->tally) && e < n; e++)
        ((double *)a->tally.data)[e] = (a->acc_tally ? ((double *)a->tally.data)[e] : 0) + tally[e];
    for (int i = 0; present(&a->stat) && i < ROUTER_STATS; i++)
        ((double *)a->stat.data)[i] = (a->acc_stat ? ((double *)a->stat.data)[i] : 0) + stat[i];
    if (present(&a->loss))
        *(float *)a->loss.data = (float)stat[ROUTER_STAT_LOSS];
}

int CPU_NAME(router_fwd_cpu)(struct lane *l, const struct router_fwd_args *a)
{
    TRY(router_fwd_check(a, l->err));
    TRY(router_table_check(a, l->err));
    TRY(check_work("router_fwd", &a->work, carve(a, NULL, NULL), l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], blocks = router_blocks(rows, a->rule.seq);
    struct forward f = {.a = a, .balance = present(&a->load), .wants_z = present(&a->stat) || present(&a->loss)};
    double stat[ROUTER_STATS] = {0};
    carve(a, &f.s, a->work.data);
#pragma omp parallel for schedule(static) if (rows * n > 4096)
    for (int64_t b = 0; b < blocks; b++)
        forward_block(&f, b);
    int64_t capacity = router_capacity(&a->rule, rows, n, a->probs.dim[1]);
    if (capacity < rows)
        drop(a, f.s.list, capacity);
    if (f.balance)
        gather_balance(&f, stat);
    if (f.wants_z || present(&a->tally))
        gather_stats(&f, blocks, stat);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

struct backward {
    const struct router_bwd_args *a;
    float balance[MAX_E]; /* gradient of the losses by s, of the sequence at hand */
    float z;              /* 2 coef dloss / rows */
    bool balances, hashed;
};

static void through_probs(const struct backward *b, int64_t t, const float *z, const float *s, float *dz)
{
    const struct router_bwd_args *a = b->a;
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1], k = a->idx.dim[1];
    const int32_t *idx = (const int32_t *)a->idx.data + t * k;
    const float *dprobs = f32_row(&a->dprobs, t);
    float g[MAX_K], p[MAX_K], dot = 0;
    int32_t at[MAX_K];
    for (int64_t j = 0; j < k; j++) {
        at[j] = (int32_t)router_expert(idx[j]);
        g[j] = idx[j] < 0 ? 0 : (float)r->scale * dprobs[j];
    }
    float sum = probabilities(r, b->hashed, z, s, at, k, p);
    for (int64_t j = 0; j < k; j++)
        dot += g[j] * p[j];
    bool all = router_softmax_all(r, b->hashed), divides = router_normalises(r, k);
    if (all) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++)
            dz[e] -= s[e] * dot;
    }
    for (int64_t j = 0; j < k; j++) {
        if (all)
            dz[at[j]] += p[j] * g[j];
        else if (r->score == ROUTER_SOFTMAX)
            dz[at[j]] += p[j] * (g[j] - dot);
        else
            dz[at[j]] += (divides ? (g[j] - dot) / sum : g[j]) * slope_of(r->score, z[at[j]], s[at[j]]);
    }
}

static void through_balance(const struct backward *b, const float *z, const float *s, float *dz)
{
    int64_t n = b->a->logits.dim[1];
    enum router_score kind = b->a->rule.score;
    const float *w = b->balance;
    float dot = 0, sum = 0;
#pragma omp simd reduction(+ : dot, sum)
    for (int64_t e = 0; e < n; e++) {
        dot += w[e] * s[e];
        sum += s[e];
    }
    if (kind == ROUTER_SOFTMAX) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++)
            dz[e] += s[e] * (w[e] - dot);
        return;
    }
    float over = 1.0f / (sum + 1e-20f);
    for (int64_t e = 0; e < n; e++)
        dz[e] += (w[e] - dot * over) * over * slope_of(kind, z[e], s[e]);
}

static void backward_rows(struct backward *b, int64_t first, int64_t end)
{
    const struct router_bwd_args *a = b->a;
    const struct router_rule *r = &a->rule;
    int64_t n = a->logits.dim[1];
    float s[MAX_E], soft[MAX_E], dz[MAX_E];
    bool wants_soft = b->z != 0 || (r->score == ROUTER_SOFTMAX && (b->balances || router_softmax_all(r, b->hashed)));
    for (int64_t t = first; t < end; t++) {
        const float *z = f32_row(&a->logits, t);
        float lse = wants_soft ? softmax(z, n, soft) : 0;
        if (r->score != ROUTER_SOFTMAX)
            plain_scores(r->score, z, n, s);
        const float *use = r->score == ROUTER_SOFTMAX ? soft : s;
        memset(dz, 0, (size_t)n * sizeof *dz);
        through_probs(b, t, z, use, dz);
        if (b->balances)
            through_balance(b, z, use, dz);
        if (b->z != 0) {
            float factor = b->z * lse;
#pragma omp simd
            for (int64_t e = 0; e < n; e++)
                dz[e] += factor * soft[e];
        }
        memcpy(f32_row(&a->dlogits, t), dz, (size_t)n * sizeof *dz);
    }
}

int CPU_NAME(router_bwd_cpu)(struct lane *l, const struct router_bwd_args *a)
{
    TRY(router_bwd_check(a, l->err));
    const struct router_rule *r = &a->rule;
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->idx.dim[1], blocks = router_blocks(rows, r->seq);
    int64_t per_seq = ceil_div(r->seq, ROUTER_BLOCK), batch = rows / r->seq;
    double dloss = present(&a->dloss) ? *(const double *)a->dloss.data : 0;
#pragma omp parallel for schedule(static) if (rows * n > 4096)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t seq = block / per_seq, first = seq * r->seq + block % per_seq * ROUTER_BLOCK;
        struct backward b = {.a = a,
                             .balances = router_balances(r) && dloss != 0,
                             .hashed = a->hashed,
                             .z = (float)(2 * r->coef.z * dloss / (double)rows)};
        for (int64_t e = 0; b.balances && e < n; e++)
            b.balance[e] = (float)(dloss * router_loss_slope(r, a->load.data, batch, n, k, seq, e));
        backward_rows(&b, first, min_i64(first + ROUTER_BLOCK, (seq + 1) * r->seq));
    }
    return ST_OK;
}

/* ---- noise, jitter, bias --------------------------------------------------------------------- */

int CPU_NAME(router_noise_cpu)(struct lane *l, const struct router_noise_args *a)
{
    TRY(router_noise_check(a, l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1];
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        float *z = f32_row(&a->logits, t);
        struct draw_place at = dropout_place(a->info.data, t, a->seq);
        for (int64_t e = 0; e < n; e += 4) {
            double v[4];
            router_normals(a->key, at.step, at.sample, at.pos, e / 4, v);
            for (int64_t i = 0; i < min_i64(4, n - e); i++)
                z[e + i] = (float)v[i];
        }
    }
    return ST_OK;
}

int CPU_NAME(router_jitter_cpu)(struct lane *l, const struct router_jitter_args *a)
{
    TRY(router_jitter_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    const float eps = (float)a->eps, unit = 2.0f / 4294967296.0f;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < rows; t++) {
        const float *x = f32_row(&a->x, t);
        float *y = f32_row(&a->y, t), keep = a->acc_y ? 1.0f : 0.0f;
        struct draw_place at = dropout_place(a->info.data, t, a->seq);
        for (int64_t c = 0; c < d; c += DROPOUT_RUN) {
            uint32_t bits[DROPOUT_RUN];
            int64_t m = min_i64(DROPOUT_RUN, d - c);
            dropout_bits(a->key, at.step, at.sample, at.pos, c, bits);
#pragma omp simd
            for (int64_t i = 0; i < m; i++) {
                float factor = 1.0f + eps * ((float)bits[i] * unit - 1.0f), old = keep == 0.0f ? 0.0f : y[c + i];
                y[c + i] = old + x[c + i] * factor;
            }
        }
    }
    return ST_OK;
}

int CPU_NAME(router_bias_cpu)(struct lane *l, const struct router_bias_args *a)
{
    TRY(router_bias_check(a, l->err));
    const double *tally = a->tally.data;
    int64_t n = a->bias.dim[0];
    double sum = 0;
    for (int64_t e = 0; e < n; e++)
        sum += tally[e];
    for (int64_t e = 0; e < n; e++)
        ((float *)a->bias.data)[e] += (float)(a->rate * router_sign(sum - tally[e] * (double)n));
    return ST_OK;
}
