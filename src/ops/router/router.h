/* router: which k of E experts each token goes to, and with what weight.
 *   logits [T, E] wide, strided; k = probs.dim[1] <= ROUTER_MAX_TOPK, E <= ROUTER_MAX_EXPERTS.
 *   probs [T, k] wide, idx I32 [T, k]: chosen experts by falling selection value, lowest index
 * first among equals. A choice that capacity dropped has probability 0 and idx -1 - expert.
 *
 *   score            selection value             probability, before scale
 *   softmax          logit                       softmax over the k chosen logits
 *   softmax, pre     softmax over all E          that value, not normalised again
 *   sigmoid          sigmoid(logit) + bias       sigmoid / (sum of the chosen + 1e-20) if norm and
 * k > 1 sqrtsoftplus     sqrt(softplus) + bias       likewise
 *
 *   bias [E] wide optional: selects only, never part of a probability.
 *   groups > 0: experts are cut into that many equal runs; a run scores the sum of its group_best (0: k /
 * group_topk, at least 1) largest selection values, and only experts of the group_topk best runs
 * may be chosen. token I32 [T] with table I32 [vocab, k]: experts come from the table instead (hash
 * routing); softmax then means the softmax over all E. table I32 [T, k] without token: row t goes to the
 * experts of its row t (the choices of another run); all else is as if they had been chosen. capacity f > 0: an expert
 * keeps at most ceil(T k / E * f) tokens: those of largest probability, where ties keep the earlier row, or with
 * drop_late those of the smallest router_rank: earliest position first, and at one position the earlier sequence.
 *
 * Losses are computed from the logits alone, whatever bias, groups, capacity and scale do: s =
 * softmax, or the score over its row sum; F = how often an expert is in the plain top k; N tokens:
 *   aux = E / (k N^2) sum_e F_e sum_t s_te; seq_aux the same per sequence (rows are `seq` long),
 * mean over sequences; global_aux as aux with F the mean over the microbatches of the step so far;
 * z = mean (log sum exp logits)^2. F has no gradient. loss [1] wide = coef.aux * aux + ...:
 * optional; its gradient is dloss. load F64 [T / seq + 1, E]: F by sequence, then the F of
 * global_aux; needed iff a balance coef is not 0. global F64 [E + 1] optional state (needed iff
 * coef global_aux): sums of F, and of microbatches. tally F64 [E] optional: tokens of each expert
 * after dropping.  stat F64 [ROUTER_STATS] optional. acc_global, acc_tally, acc_stat add to them.
 * backward: dlogits [T, E] real from dprobs [T, k] wide and dloss F64 [1] (optional: no losses); may
 * be logits where both have one type. Sums over tokens go by blocks of ROUTER_BLOCK rows that never cross a sequence,
 * in block order. Host versions refuse a table entry or token out of range; a GPU takes expert 0 for it.
 *
 * router_noise: logits (wide) = N(0, 1), a function of (key, step, sample, position, expert): balanced
 * load for benchmarks. router_jitter: y (+)= x * U(1 - eps, 1 + eps), drawn likewise; its own
 * backward. info I64 [4] as in dropout.h. router_bias: bias_e (wide) += rate * sign(mean tally - tally_e),
 * the balance without a loss. */
#ifndef BRAID_OPS_ROUTER_H
#define BRAID_OPS_ROUTER_H

#include "ops/op.h"

enum { ROUTER_MAX_EXPERTS = 1024, ROUTER_MAX_TOPK = 64, ROUTER_BLOCK = 64 };

enum router_score { ROUTER_SOFTMAX, ROUTER_SIGMOID, ROUTER_SQRTSOFTPLUS };

/* What stat holds; losses are without their coefficients, except the first. */
enum router_stat {
    ROUTER_STAT_LOSS, /* the weighted sum: what is added to the objective */
    ROUTER_STAT_AUX,
    ROUTER_STAT_SEQ_AUX,
    ROUTER_STAT_GLOBAL_AUX,
    ROUTER_STAT_Z,
    ROUTER_STAT_LOAD_MAX,     /* tokens of the busiest expert over the mean */
    ROUTER_STAT_LOAD_ENTROPY, /* of the load, in units of ln E: 1 is perfect balance */
    ROUTER_STAT_DROPPED,      /* share of choices lost to capacity */
    ROUTER_STATS,
};

struct router_coef {
    double aux, seq_aux, global_aux, z;
};
struct router_rule {
    enum router_score score;
    bool pre_softmax, norm;
    int64_t groups, group_topk; /* 0: no groups */
    int64_t group_best;         /* experts whose sum is a group's score; 0: k / group_topk */
    double scale;               /* of the probabilities */
    double capacity;            /* 0: none */
    bool drop_late;
    struct router_coef coef;
    int64_t seq; /* rows of one sequence */
};
#define ROUTER_FWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, logits, IN, WIDE, "rows experts")                                                                            \
    T(op, bias, OPT_FIXED, WIDE, "experts")                                                                            \
    T(op, token, OPT, I32, "rows &table")                                                                              \
    T(op, table, OPT, I32, "entries k !")                                                                              \
    T(op, probs, OUT, WIDE, "rows k !")                                                                                \
    T(op, idx, OUT, I32, "rows k !")                                                                                   \
    T(op, load, OPT_OUT, F64, "rows/seq+1 experts !")                                                                  \
    T(op, loss, OPT_OUT, WIDE, "1")                                                                                    \
    T(op, stat, OPT_SUM, F64, "8")                                                                                     \
    T(op, tally, OPT_SUM, F64, "experts")                                                                              \
    T(op, global, OPT_SUM, F64, "experts+1")                                                                           \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct router_rule rule)
OP_ARGS(router_fwd, ROUTER_FWD_FIELDS);
#define ROUTER_BWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, dprobs, IN, WIDE, "rows k")                                                                                  \
    T(op, dloss, OPT, F64, "1")                                                                                        \
    T(op, logits, IN, WIDE, "rows experts")                                                                            \
    T(op, idx, IN, I32, "rows k !")                                                                                    \
    T(op, load, OPT, F64, "rows/seq+1 experts !")                                                                      \
    T(op, dlogits, OUT, REAL, "rows experts")                                                                          \
    N(op, bool, hashed, 0)                                                                                             \
    S(op, struct router_rule rule)
OP_ARGS(router_bwd, ROUTER_BWD_FIELDS);
#define ROUTER_NOISE_FIELDS(T, N, S, op)                                                                               \
    T(op, info, IN, I64, "4")                                                                                          \
    T(op, logits, OUT, WIDE, "rows d")                                                                                 \
    N(op, uint64_t, key, 12345)                                                                                        \
    N(op, int64_t, seq, 4)
OP_ARGS(router_noise, ROUTER_NOISE_FIELDS);
#define ROUTER_JITTER_FIELDS(T, N, S, op)                                                                              \
    T(op, x, IN, REAL, "rows d")                                                                                       \
    T(op, info, IN, I64, "4")                                                                                          \
    T(op, y, SUM, REAL, "rows d")                                                                                      \
    N(op, double, eps, 0.1)                                                                                            \
    N(op, uint64_t, key, 12345)                                                                                        \
    N(op, int64_t, seq, 4)
OP_ARGS(router_jitter, ROUTER_JITTER_FIELDS);
#define ROUTER_BIAS_FIELDS(T, N, S, op)                                                                                \
    T(op, tally, IN, F64, "experts")                                                                                   \
    T(op, bias, STATE, WIDE, "experts")                                                                                \
    N(op, double, rate, 0.001)
OP_ARGS(router_bias, ROUTER_BIAS_FIELDS);

/* Experts of a group of n / groups whose selection values are summed up to its score. */
static inline int64_t router_group_best(const struct router_rule *r, int64_t n, int64_t k)
{
    return min_i64(n / r->groups, r->group_best > 0 ? r->group_best : max_i64(1, k / r->group_topk));
}

static inline bool router_balances(const struct router_rule *r)
{
    return r->coef.aux != 0 || r->coef.seq_aux != 0 || r->coef.global_aux != 0;
}
/* The row of the table that holds the experts of row t. */
static inline int64_t router_table_row(const struct router_fwd_args *a, int64_t t)
{
    return a->token.data != NULL ? ((const int32_t *)a->token.data)[t] : t;
}
/* Where row t stands when positions of all sequences alternate (Megatron's order of tokens, s B + b). */
HOST_DEVICE static inline int64_t router_rank(int64_t t, int64_t rows, int64_t seq)
{
    return t % seq * (rows / seq) + t / seq;
}
/* Tokens one expert may keep; T when nothing can be dropped. */
OP_C int64_t router_capacity(const struct router_rule *r, int64_t tokens, int64_t experts, int64_t k);

#endif
