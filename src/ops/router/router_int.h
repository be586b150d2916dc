/* What the versions of router share. */
#ifndef BRAID_OPS_ROUTER_INT_H
#define BRAID_OPS_ROUTER_INT_H

#include "ops/check.h"
#include "ops/dropout/dropout.h"
#include "ops/router/router.h"

#include <math.h>

/* Every entry of the table rows in use names an expert, every token a row; host memory. */
int router_table_check(const struct router_fwd_args *a, struct err *e);

/* Scores of the chosen are divided by their sum. */
HOST_DEVICE static inline bool router_normalises(const struct router_rule *r, int64_t k)
{
    return r->score != ROUTER_SOFTMAX && r->norm && k > 1;
}
/* Probabilities are softmax values over all experts (else, with softmax, over the chosen). */
HOST_DEVICE static inline bool router_softmax_all(const struct router_rule *r, bool hashed)
{
    return r->score == ROUTER_SOFTMAX && (r->pre_softmax || hashed);
}
HOST_DEVICE static inline int64_t router_expert(int32_t idx) { return idx < 0 ? -1 - idx : idx; }

HOST_DEVICE static inline double router_threshold(void) { return 20; } /* above it softplus(z) is z */

HOST_DEVICE static inline double router_sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

/* Blocks of rows that never cross a sequence. */
static inline int64_t router_blocks(int64_t rows, int64_t seq) { return rows / seq * ceil_div(seq, ROUTER_BLOCK); }

/* The balance losses from F and the sums of s, both by sequence; the caller adds z. */
struct router_sums {
    int64_t experts, k, rows, seq;
    const double *load;  /* [rows / seq + 1, E] */
    const double *score; /* [rows / seq, E]: sum over the sequence's rows of s */
};
static inline void router_losses(const struct router_sums *s, double stat[ROUTER_STATS])
{
    int64_t batch = s->rows / s->seq, n = s->experts;
    double rows = (double)s->rows, seq = (double)s->seq, per_k = (double)n / (double)s->k, aux = 0, seq_aux = 0,
           global = 0;
    for (int64_t e = 0; e < n; e++) {
        double f = 0, sum = 0;
        for (int64_t b = 0; b < batch; b++) {
            f += s->load[b * n + e];
            sum += s->score[b * n + e];
            seq_aux += s->load[b * n + e] * s->score[b * n + e];
        }
        aux += f * sum;
        global += s->load[batch * n + e] * sum;
    }
    stat[ROUTER_STAT_AUX] = aux * per_k / (rows * rows);
    stat[ROUTER_STAT_GLOBAL_AUX] = global * per_k / (rows * rows);
    stat[ROUTER_STAT_SEQ_AUX] = seq_aux * per_k / (seq * seq) / (double)batch;
}

/* Gradient of loss by s of (sequence b, expert e). */
static inline double router_loss_slope(const struct router_rule *r, const double *load, int64_t batch, int64_t n,
                                       int64_t k, int64_t b, int64_t e)
{
    double rows = (double)(batch * r->seq), seq = (double)r->seq, f = 0;
    for (int64_t i = 0; r->coef.aux != 0 && i < batch; i++)
        f += load[i * n + e];
    return (double)n / (double)k *
           (r->coef.aux * f / (rows * rows) + r->coef.global_aux * load[batch * n + e] / (rows * rows) +
            r->coef.seq_aux * load[b * n + e] / (seq * seq * (double)batch));
}

/* Running mean over microbatches: row [batch] of load, and the state behind it. */
static inline void router_global_load(double *load, int64_t batch, int64_t n, double *global, bool acc)
{
    double *mean = load + batch * n;
    for (int64_t e = 0; e < n; e++) {
        double f = 0;
        for (int64_t b = 0; b < batch; b++)
            f += load[b * n + e];
        if (global != NULL)
            global[e] = (acc ? global[e] : 0) + f;
        mean[e] = global != NULL ? global[e] : f;
    }
    if (global == NULL)
        return;
    global[n] = (acc ? global[n] : 0) + 1;
    for (int64_t e = 0; e < n; e++)
        mean[e] /= global[n];
}

/* Statistics of the load after dropping. */
static inline void router_load_stats(const double *tally, int64_t n, int64_t rows, int64_t k, double stat[ROUTER_STATS])
{
    double total = 0, most = 0, entropy = 0;
    for (int64_t e = 0; e < n; e++) {
        total += tally[e];
        most = tally[e] > most ? tally[e] : most;
    }
    for (int64_t e = 0; e < n; e++)
        entropy -= tally[e] > 0 ? tally[e] / total * log(tally[e] / total) : 0;
    stat[ROUTER_STAT_LOAD_MAX] = total > 0 ? most * (double)n / total : 0;
    stat[ROUTER_STAT_LOAD_ENTROPY] = n > 1 ? entropy / log((double)n) : 1;
    stat[ROUTER_STAT_DROPPED] = rows > 0 ? 1 - total / (double)(rows * k) : 0;
}

static inline double router_weighted(const struct router_coef *c, const double stat[ROUTER_STATS])
{
    return c->aux * stat[ROUTER_STAT_AUX] + c->seq_aux * stat[ROUTER_STAT_SEQ_AUX] +
           c->global_aux * stat[ROUTER_STAT_GLOBAL_AUX] + c->z * stat[ROUTER_STAT_Z];
}

/* Four normal numbers for experts 4q .. 4q + 3 of one token. */
HOST_DEVICE static inline void router_normals(uint64_t key, int64_t step, int64_t sample, int64_t pos, int64_t q,
                                              double out[4])
{
    struct philox4 r = dropout_draw(key, step, sample, pos, 4 * q);
    for (int i = 0; i < 4; i += 2) {
        double radius = sqrt(-2 * log(u32_to_unit(r.v[i]))), turn = 6.283185307179586 * u32_to_unit(r.v[i + 1]);
        out[i] = radius * cos(turn);
        out[i + 1] = radius * sin(turn);
    }
}

#endif
