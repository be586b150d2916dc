/* Dropout of attention weights on the host: which of a block are kept; see attention.h. */
#ifndef BRAID_OPS_ATTENTION_DROP_INT_H
#define BRAID_OPS_ATTENTION_DROP_INT_H

#include "ops/attention/attention.h"
#include "ops/dropout/dropout_mask.h"

/* One head of one sequence. */
struct attention_drop {
    uint64_t key;
    int64_t step, sample, first; /* first: position of query 0 */
    uint32_t threshold;
    double kept; /* 1 / (1 - p); 0: nothing is dropped */
};
static inline struct attention_drop attention_drop_of(const struct dropout_rule *r, int64_t batch, int64_t head)
{
    const int64_t *info = r->info.data;
    if (r->p == 0)
        return (struct attention_drop){0};
    return (struct attention_drop){.key = attention_drop_key(r->key, head),
                                   .step = info[0],
                                   .sample = draw_after(info[1], batch),
                                   .first = info[2],
                                   .threshold = dropout_threshold(r->p),
                                   .kept = 1 / (1 - r->p)};
}

/* What the weight of key j in the sum of query i is multiplied with. */
static inline double attention_drop_factor(const struct attention_drop *d, int64_t i, int64_t j)
{
    if (d->kept == 0)
        return 1;
    return dropout_keep(d->key, d->threshold, d->step, d->sample, draw_after(d->first, i), j) ? d->kept : 0;
}

/* Weights of keys first + [from, to) for n queries from i on, w[key][query] with rows of `row` values; first is a
 * multiple of 4, and to is at most DROPOUT_RUN. */
static inline void attention_drop_block(const struct attention_drop *d, int64_t i, int64_t n, int64_t first,
                                        int64_t from, int64_t to, float *w, int64_t row)
{
    uint32_t bits[DROPOUT_RUN];
    float kept = (float)d->kept;
    for (int64_t q = 0; q < n; q++) {
        dropout_bits(d->key, d->step, d->sample, draw_after(d->first, i + q), first, bits);
        for (int64_t k = from; k < to; k++)
            w[k * row + q] *= bits[k] >= d->threshold ? kept : 0.0f;
    }
}

#endif
