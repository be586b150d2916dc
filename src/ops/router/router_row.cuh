/* What the router's kernels share: one warp holds the logits of one token, expert e in lane e % 32, place e / 32, and
 * at most ROUTER_MAX_TOPK = 64 choices, choice j in lane j % 32, place j / 32. */
#ifndef BRAID_OPS_ROUTER_ROW_CUH
#define BRAID_OPS_ROUTER_ROW_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/router/router.h"
extern "C" {
#include "ops/router/router_int.h"
}

enum { ROUTER_CHOICES = ROUTER_MAX_TOPK / 32 };

/* What both directions need of the rule. */
struct router_mode {
    enum router_score score;
    bool softmax_all, normalises;
    int n, k, seq, per_seq; /* per_seq: blocks of rows in a sequence */
    float scale;
};

/* Rows [first, end) of a block, all of sequence seq. */
struct router_span {
    int64_t seq, first, end;
};
__device__ __forceinline__ struct router_span router_span_of(const struct router_mode &m, int64_t block)
{
    int64_t seq = block / m.per_seq, first = seq * m.seq + block % m.per_seq * ROUTER_BLOCK;
    struct router_span s = {seq, first, min(first + ROUTER_BLOCK, (seq + 1) * m.seq)};
    return s;
}

static inline struct router_mode router_mode_of(const struct router_rule *r, bool hashed, int64_t n, int64_t k)
{
    struct router_mode m = {r->score,    router_softmax_all(r, hashed),       router_normalises(r, k), (int)n, (int)k,
                            (int)r->seq, (int)ceil_div(r->seq, ROUTER_BLOCK), (float)r->scale};
    return m;
}

/* Absent experts are -infinity, which every score turns into 0. */
template <int PER> __device__ __forceinline__ void router_load(const float *row, int n, float z[PER])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PER; i++)
        z[i] = lane + 32 * i < n ? row[lane + 32 * i] : -INFINITY;
}

/* The parts of a softmax: the largest logit and the sum of the exponentials below it. */
struct router_soft {
    float most, sum;
};
template <int PER> __device__ __forceinline__ struct router_soft router_softmax(const float z[PER])
{
    struct router_soft s = {-INFINITY, 0};
#pragma unroll
    for (int i = 0; i < PER; i++)
        s.most = fmaxf(s.most, z[i]);
    s.most = warp_max(s.most);
#pragma unroll
    for (int i = 0; i < PER; i++)
        s.sum += expf(z[i] - s.most);
    s.sum = warp_sum(s.sum);
    return s;
}

__device__ __forceinline__ float router_score_of(enum router_score kind, const struct router_soft &soft, float z)
{
    if (kind == ROUTER_SOFTMAX)
        return expf(z - soft.most) / soft.sum;
    if (kind == ROUTER_SIGMOID)
        return 1.0f / (1.0f + expf(-z));
    return sqrtf(z > (float)router_threshold() ? z : log1pf(expf(z)));
}

__device__ __forceinline__ float router_slope_of(enum router_score kind, float z, float s)
{
    if (kind == ROUTER_SIGMOID)
        return s * (1.0f - s);
    return (z > (float)router_threshold() ? 1.0f : 1.0f / (1.0f + expf(-z))) / (2.0f * s + 1e-20f);
}

/* The chosen experts of a token with what is known of them; places past k hold expert -1. */
struct router_chosen {
    int e[ROUTER_CHOICES];
    float z[ROUTER_CHOICES], s[ROUTER_CHOICES], p[ROUTER_CHOICES]; /* logit, score, probability before scale */
    float sum; /* of the chosen scores, where they are divided by it */
};

/* From the experts to the rest. row: the logits of the token. */
__device__ __forceinline__ void router_probabilities(const struct router_mode &m, const float *row,
                                                     const struct router_soft &soft, struct router_chosen *c)
{
    bool post = m.score == ROUTER_SOFTMAX && !m.softmax_all;
    struct router_soft among = {-INFINITY, 0};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++) {
        c->z[i] = c->e[i] >= 0 ? row[c->e[i]] : -INFINITY;
        among.most = fmaxf(among.most, c->z[i]);
    }
    if (post) {
        among.most = warp_max(among.most);
#pragma unroll
        for (int i = 0; i < ROUTER_CHOICES; i++)
            among.sum += c->e[i] >= 0 ? expf(c->z[i] - among.most) : 0.0f;
        among.sum = warp_sum(among.sum);
    }
    among.most = post ? among.most : soft.most;
    among.sum = post ? among.sum : soft.sum;
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++) {
        c->s[i] = c->e[i] >= 0 ? router_score_of(m.score, among, c->z[i]) : 0.0f;
        sum += c->s[i];
    }
    c->sum = m.normalises ? warp_sum(sum) + 1e-20f : 1.0f;
#pragma unroll
    for (int i = 0; i < ROUTER_CHOICES; i++)
        c->p[i] = m.normalises ? c->s[i] / c->sum : c->s[i];
}

/* Unsigned keys that order like the floats: above 1. NaN is 1, below every number; 0 is free for "gone". */
__device__ __forceinline__ unsigned router_key(float v)
{
    unsigned bits = __float_as_uint(v + 0.0f); /* -0 becomes 0 */
    return v != v ? 1u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k largest keys in falling order, the lowest expert first among equals. Keys are used up. */
template <int PER>
__device__ __forceinline__ void router_top(unsigned key[PER], int n, int k, int chosen[ROUTER_CHOICES])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < ROUTER_CHOICES; c++)
        chosen[c] = -1;
    for (int j = 0; j < k; j++) {
        unsigned best = key[0], at = lane;
#pragma unroll
        for (int i = 1; i < PER; i++) {
            at = key[i] > best ? lane + 32 * i : at;
            best = max(best, key[i]);
        }
        unsigned most = __reduce_max_sync(0xffffffffu, best);
        unsigned winner = min(__reduce_min_sync(0xffffffffu, best == most ? at : 0xffffffffu), (unsigned)n - 1);
#pragma unroll
        for (int i = 0; i < PER; i++)
            key[i] = winner == (unsigned)(lane + 32 * i) ? 0 : key[i];
#pragma unroll
        for (int c = 0; c < ROUTER_CHOICES; c++)
            chosen[c] = lane + 32 * c == j ? (int)winner : chosen[c];
    }
}

/* Run the statement with PER, the fewest places of a lane that hold n experts, and WARPS, the warps of a block. */
#define ROUTER_BY_EXPERTS(n_, PER, WARPS, ...)                                                                         \
    do {                                                                                                               \
        if ((n_) <= 32) {                                                                                              \
            constexpr int PER = 1, WARPS = 16;                                                                         \
            __VA_ARGS__;                                                                                               \
        } else if ((n_) <= 64) {                                                                                       \
            constexpr int PER = 2, WARPS = 16;                                                                         \
            __VA_ARGS__;                                                                                               \
        } else if ((n_) <= 128) {                                                                                      \
            constexpr int PER = 4, WARPS = 16;                                                                         \
            __VA_ARGS__;                                                                                               \
        } else if ((n_) <= 256) {                                                                                      \
            constexpr int PER = 8, WARPS = 16;                                                                         \
            __VA_ARGS__;                                                                                               \
        } else if ((n_) <= 512) {                                                                                      \
            constexpr int PER = 16, WARPS = 8;                                                                         \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            constexpr int PER = 32, WARPS = 8;                                                                         \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

#endif
