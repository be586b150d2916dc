/* vocab, reference; see vocab.h. */
#include "ops/vocab/vocab.h"
#include "ops/ops_ref_int.h"
#include "ops/vocab/vocab_int.h"

#include <math.h>

int vocab_stats_ref(struct lane *l, const struct vocab_stats_args *a)
{
    TRY(vocab_stats_check(a, l->err));
    TRY(vocab_label_check("vocab_stats", &a->label, a->vocab, l->err));
    const int32_t *label = a->label.data;
    int64_t n = a->z.dim[1];
    for (int64_t r = 0; r < a->z.dim[0]; r++) {
        const double *z = f64_row(&a->z, r);
        double *out = f64_row(&a->stats, r), max = -INFINITY, sum = 0;
        for (int64_t v = 0; v < n; v++)
            max = z[v] > max || isnan(z[v]) ? z[v] : max;
        for (int64_t v = 0; v < n; v++)
            sum += exp(z[v] - max);
        int64_t at = label[r] - a->first;
        out[VOCAB_MAX] = max;
        out[VOCAB_SUM] = sum;
        out[VOCAB_TARGET] = label[r] >= 0 && at >= 0 && at < n ? z[at] : 0;
    }
    return ST_OK;
}

/* Over all ranks: the logarithm of the sum of exponentials, and how far the label's logit lies below it. */
static double row_loss(const struct vocab_loss_args *a, int64_t r, double *lse)
{
    int64_t ranks = a->all.dim[0], rows = a->all.dim[1];
    const double *all = a->all.data;
    double max = -INFINITY, sum = 0, target = 0;
    for (int64_t k = 0; k < ranks; k++)
        max = fmax(max, all[(k * rows + r) * VOCAB_STATS + VOCAB_MAX]);
    for (int64_t k = 0; k < ranks; k++) {
        const double *s = all + (k * rows + r) * VOCAB_STATS;
        sum += s[VOCAB_SUM] * exp(s[VOCAB_MAX] - max);
        target += s[VOCAB_TARGET];
    }
    *lse = max + log(sum);
    return max - target + log(sum);
}

int vocab_loss_ref(struct lane *l, const struct vocab_loss_args *a)
{
    TRY(vocab_loss_check(a, l->err));
    TRY(vocab_label_check("vocab_loss", &a->label, a->vocab, l->err));
    const int32_t *label = a->label.data;
    double total = 0, count = 0, *loss = a->loss.data;
    for (int64_t r = 0; r < a->z.dim[0]; r++) {
        bool counts = label[r] >= 0;
        double lse = 0, nll = counts ? row_loss(a, r, &lse) : 0;
        double scale = present(&a->dz) && counts ? ((const double *)a->scale.data)[0] : 0;
        for (int64_t v = 0; present(&a->dz) && v < a->z.dim[1]; v++) {
            double softmax = counts ? exp(f64_row(&a->z, r)[v] - lse) : 0;
            f64_row(&a->dz, r)[v] = scale * (softmax * (1 + 2 * a->z_loss * lse) - (v + a->first == label[r]));
        }
        total += nll;
        count += counts;
    }
    loss[0] = (a->acc_loss ? loss[0] : 0) + total;
    loss[1] = (a->acc_loss ? loss[1] : 0) + count;
    return ST_OK;
}
