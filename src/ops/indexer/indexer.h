/* indexer: which keys a query of sparse attention reads, and how the scores that decide it are trained (the lightning
 * indexer of DeepSeek-V3.2).
 *   q [B, S, H, D], k [B, Skv, D] real, w [B, S, H] wide: I[i, j] = sum_h w[i, h] f(q[i, h] . k[j]), f(x) = max(x, 0)
 *   with relu, else x. Query i sits at index s = start + i, start I64 [1] optional, else 0 (decoding with a cache,
 *   parts of sequences).
 *   doc_start I32 [B, S] optional: index of the first token f of its document, else 0. With ratio 1 it sees the keys
 *   f <= j <= s. Otherwise a key stands for `ratio` tokens, a document's keys lie from ceil(f / ratio) on (compress.h),
 *   and it sees the first (s + 1 - f) / ratio of them, rounded down.
 *
 * index_topk: idx I32 [B, S, topk]: the keys of largest I that the query sees, in ascending order, then -1. Of equal
 *   scores the smaller index is taken. A score that is not a number counts as minus infinity.
 *
 * index_loss: how far softmax(I) is from the attention that it stands for. Over the keys of idx if given, else over all
 *   keys that the query sees:
 *     t_j = sum over heads g of exp(scale mq[i, g] . mk[j, g or 0] - lse[g, i]), p = t / sum t; no gradient is taken of
 *     it kl[i] = sum_j p_j (log p_j - log softmax(score_scale I)_j)
 *   mq [B, S, MH, MD], mk [B, Skv, MG, MD] real, MH % MG == 0, lse [B, MH, S] wide optional, else that of the same
 *   keys. mass [ranks, B, S] wide optional, for ranks that have some of the heads each: sum t of every rank, of which
 *   this is `rank`. kl of a row, and with it loss and gradients, then counts mass[rank] * ranks / sum mass times (once
 *   if that sum is 0), so that the mean of the ranks' gradients is that of all heads. kl [B, S] wide optional. loss F64
 *   [1] optional (+)= coeff * mean of kl, rows in order. Gradients of scale[0] * coeff * mean kl, all three or none:
 *   dq, dk, dw (real). dk sums over queries in order. A row without keys has no loss.
 *
 * index_mass: mass [B, S] wide = sum_j t_j of index_loss; 0 of a row without keys.
 *
 * index_recall: recall F64 [1] (+)= the share of attention that the lists keep, sum_{j in idx} softmax(scale mq . mk)_j
 *   over all keys that the query sees, mean over heads and over every `every`-th query of each sequence, the last of
 *   each run (a shorter sequence: its last query). Scratch of all grows linearly with Skv. */
#ifndef BRAID_OPS_INDEXER_H
#define BRAID_OPS_INDEXER_H

#include "base/philox.h"
#include "ops/op.h"

#define INDEX_TOPK_FIELDS(T, N, S, op)                                                                                 \
    T(op, q, FIXED, REAL, "b s h d")                                                                                   \
    T(op, k, FIXED, REAL, "b skv d")                                                                                   \
    T(op, w, FIXED, WIDE, "b s h")                                                                                     \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, idx, OUT, I32, "b s topk !")                                                                                 \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, topk, 4)                                                                                            \
    N(op, int64_t, ratio, 1)                                                                                           \
    N(op, bool, relu, 1)
OP_ARGS(index_topk, INDEX_TOPK_FIELDS);
#define INDEX_LOSS_FIELDS(T, N, S, op)                                                                                 \
    T(op, q, IN, REAL, "b s h d")                                                                                      \
    T(op, k, IN, REAL, "b skv d")                                                                                      \
    T(op, w, IN, WIDE, "b s h")                                                                                        \
    T(op, mq, FIXED, REAL, "b s mh md")                                                                                \
    T(op, mk, FIXED, REAL, "b skv mg md")                                                                              \
    T(op, lse, OPT_FIXED, WIDE, "b mh s")                                                                              \
    T(op, mass, OPT_FIXED, WIDE, "ranks b s !")                                                                        \
    T(op, idx, OPT_FIXED, I32, "b s topk")                                                                             \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, scale, OPT, F64, "1 +dq")                                                                                    \
    T(op, loss, OPT_SUM, F64, "1")                                                                                     \
    T(op, kl, OPT_OUT, WIDE, "b s !")                                                                                  \
    T(op, dq, OPT_OUT, REAL, "b s h d")                                                                                \
    T(op, dk, OPT_OUT, REAL, "b skv d @dq")                                                                            \
    T(op, dw, OPT_OUT, REAL, "b s h @dq")                                                                              \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, coeff, 1)                                                                                            \
    N(op, double, score_scale, 0.5)                                                                                    \
    N(op, double, softmax_scale, 0.3)                                                                                  \
    N(op, int64_t, ratio, 1)                                                                                           \
    N(op, int64_t, ranks, 2)                                                                                           \
    N(op, int64_t, rank, 0)                                                                                            \
    N(op, bool, relu, 1)
OP_ARGS(index_loss, INDEX_LOSS_FIELDS);
#define INDEX_MASS_FIELDS(T, N, S, op)                                                                                 \
    T(op, mq, FIXED, REAL, "b s mh md")                                                                                \
    T(op, mk, FIXED, REAL, "b skv mg md")                                                                              \
    T(op, lse, FIXED, WIDE, "b mh s")                                                                                  \
    T(op, idx, OPT_FIXED, I32, "b s topk")                                                                             \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, mass, OUT, WIDE, "b s !")                                                                                    \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, softmax_scale, 0.3)                                                                                  \
    N(op, int64_t, ratio, 1)
OP_ARGS(index_mass, INDEX_MASS_FIELDS);
#define INDEX_RECALL_FIELDS(T, N, S, op)                                                                               \
    T(op, mq, FIXED, REAL, "b s mh md")                                                                                \
    T(op, mk, FIXED, REAL, "b skv mg md")                                                                              \
    T(op, idx, FIXED, I32, "b s topk")                                                                                 \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, recall, SUM, F64, "1")                                                                                       \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, double, softmax_scale, 0.3)                                                                                  \
    N(op, int64_t, ratio, 1)                                                                                           \
    N(op, int64_t, every, 4)
OP_ARGS(index_recall, INDEX_RECALL_FIELDS);

/* Keys that the query at index s of a document from token `doc` on sees: [first, end), end >= first unless the keys end
 * before. */
struct index_range {
    int64_t first, end;
};
HOST_DEVICE static inline struct index_range index_visible(int64_t s, int64_t doc, int64_t ratio, int64_t n_keys)
{
    int64_t from = doc > 0 ? doc : 0, first = (from + ratio - 1) / ratio,
            end = s < from ? first : first + (s + 1 - from) / ratio;
    struct index_range r = {first, end < n_keys ? end : n_keys};
    return r;
}
/* How often row r of `rows` counts, in fp32: its share of the mass of all ranks, times their number. */
HOST_DEVICE static inline float index_share(const float *mass, int64_t rows, int64_t ranks, int64_t rank, int64_t r)
{
    float all = 0;
    for (int64_t k = 0; mass != NULL && k < ranks; k++)
        all += mass[k * rows + r];
    return all == 0 ? 1 : mass[rank * rows + r] / all * (float)ranks;
}
/* Queries of a sequence of n that index_recall looks at. Sizes of work are asked for before `every` is checked. */
HOST_DEVICE static inline int64_t index_sampled(int64_t n, int64_t every)
{
    return n >= every && every > 0 ? n / every : n > 0;
}
HOST_DEVICE static inline int64_t index_sample_row(int64_t n, int64_t every, int64_t i)
{
    return n >= every ? (i + 1) * every - 1 : n - 1;
}
/* The index of the first query, from host memory. Beyond the bounds queries see all keys, or none. */
static inline int64_t index_start(const struct tensor *start)
{
    const int64_t most = (int64_t)1 << 52; /* queries, keys and ratio are below 2^31, 2^31 and 2^20 */
    int64_t at = start->data != NULL ? ((const int64_t *)start->data)[0] : 0;
    return at < -most ? -most : at > most ? most : at;
}

#endif
