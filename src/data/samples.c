/* Samples of one source, in Megatron's order: documents shuffled over epochs and laid end to end,
 * cut every seq tokens (neighbours share one token), then the samples shuffled. */
#include "data/data_int.h"

#include <stdlib.h>

/* Epochs so that `wanted` samples exist, and whether the last one is shuffled apart: it is when
 * less than 80% of it is needed, lest the samples of a hardly used epoch spread over the run. */
static int plan_epochs(struct samples *s, int64_t wanted, struct err *e)
{
    int64_t need, total, tokens = s->part.tokens;
    if (!i64_mul(wanted, s->seq, &need) || need > INT64_MAX / 2)
        return err_set(e, ST_INVALID, "%lld samples of %lld tokens are more than can be counted", (long long)wanted,
                       (long long)s->seq);
    s->epochs = wanted > 0 ? max_i64(1, ceil_div(need + 1, tokens)) : 1;
    if (!i64_mul(s->epochs, tokens, &total) || !i64_mul(s->epochs, s->part.n, &s->n_order))
        return err_set(e, ST_INVALID, "%lld epochs of %s are more than can be counted", (long long)s->epochs,
                       s->src->path);
    s->n = (total - 1) / s->seq;
    s->n_first = s->n;
    if (s->n > UINT32_MAX || s->part.n > UINT32_MAX)
        return err_set(e, ST_UNSUPPORTED, "%s: %lld samples and %lld documents, of each at most 2^32-1 are supported",
                       s->src->path, (long long)s->n, (long long)s->part.n);
    if (s->epochs > 1) {
        int64_t before = ((s->epochs - 1) * tokens - 1) / s->seq;
        int64_t per_epoch = (tokens - 1) / s->seq;
        s->separate_last = wanted - before < (int64_t)(0.8 * (double)per_epoch);
        if (s->separate_last)
            s->n_first = before;
    }
    return ST_OK;
}

static void order_documents(struct samples *s, struct mt19937 *rng)
{
    int64_t docs = s->part.n, first = s->separate_last ? s->n_order - docs : s->n_order;
    for (int64_t i = 0; i < s->n_order; i++)
        s->order[i] = (uint32_t)(i % docs);
    mt_shuffle(rng, s->order, first);
    mt_shuffle(rng, s->order + first, s->n_order - first);
}

static void shuffle_samples(struct samples *s, struct mt19937 *rng)
{
    for (int64_t i = 0; i < s->n; i++)
        s->shuffle[i] = (uint32_t)i;
    mt_shuffle(rng, s->shuffle, s->n_first);
    mt_shuffle(rng, s->shuffle + s->n_first, s->n - s->n_first);
}

static int64_t ordered_len(const struct samples *s, int64_t at) { return part_doc_len(&s->part, s->src, s->order[at]); }

/* Start k is token k * START_STRIDE * seq of the order. */
static void find_starts(struct samples *s, int64_t n_starts)
{
    int64_t at = 0, k = 0, step = START_STRIDE * s->seq;
    for (int64_t doc = 0; doc < s->n_order && k < n_starts; doc++) {
        int64_t len = ordered_len(s, doc);
        for (; k < n_starts && k * step < at + len; k++)
            s->starts[k] = (struct sample_start){.doc = doc, .offset = k * step - at};
        at += len;
    }
}

int samples_open(struct samples *s, const struct source *src, const struct part *part, int64_t seq, int64_t wanted,
                 uint32_t seed, struct err *e)
{
    *s = (struct samples){.src = src, .part = *part, .seq = seq, .whole = src->loss_path != NULL};
    if (s->whole)
        return samples_open_whole(s, wanted, seed, e);
    if (part->tokens < seq + 1) {
        err_set(e, ST_INVALID, "%s has %lld tokens here, one sample needs %lld", src->path, (long long)part->tokens,
                (long long)seq + 1);
        return err_hint(e, "use more data, a larger share of the split, or a shorter sequence");
    }
    TRY(plan_epochs(s, wanted, e));
    int64_t n_starts = ceil_div(s->n, START_STRIDE);
    struct mt19937 rng;
    int st;
    TRY_OUT(mem_array((void **)&s->order, (size_t)s->n_order, sizeof *s->order, e));
    TRY_OUT(mem_array((void **)&s->starts, (size_t)n_starts, sizeof *s->starts, e));
    TRY_OUT(mem_array((void **)&s->shuffle, (size_t)s->n, sizeof *s->shuffle, e));
    mt_seed(&rng, seed);
    order_documents(s, &rng);
    find_starts(s, n_starts);
    shuffle_samples(s, &rng);
    return ST_OK;
out:
    samples_close(s);
    err_hint(e, "the index of %lld samples needs too much memory; ask for fewer epochs", (long long)s->n);
    return st;
}

void samples_close(struct samples *s)
{
    free(s->order);
    free(s->starts);
    free(s->shuffle);
    s->order = s->shuffle = NULL;
    s->starts = NULL;
}

struct sample_start samples_start(const struct samples *s, int64_t j)
{
    struct sample_start at = s->starts[j / START_STRIDE];
    at.offset += (j % START_STRIDE) * s->seq;
    for (int64_t len; at.offset >= (len = ordered_len(s, at.doc)); at.doc++)
        at.offset -= len;
    return at;
}

int samples_get(const struct samples *s, int64_t i, int64_t vocab, int32_t *tokens, uint8_t *marks, struct err *e)
{
    if (s->whole)
        return samples_get_whole(s, i, vocab, tokens, marks, e);
    for (int64_t k = 0; marks != NULL && k <= s->seq; k++)
        marks[k] = MARK_LOSS;
    struct sample_start at = samples_start(s, s->shuffle[i]);
    for (int64_t left = s->seq + 1; left > 0; at.doc++, at.offset = 0) {
        int64_t take = min_i64(left, ordered_len(s, at.doc) - at.offset);
        int64_t head = s->order[at.doc] == 0 ? s->part.head : 0;
        TRY(source_read(s->src, s->part.first + s->order[at.doc], head + at.offset, take, vocab, tokens, e));
        tokens += take;
        left -= take;
    }
    return ST_OK;
}
