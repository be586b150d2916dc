/* router forward on the GPU. choose_experts: a block for each ROUTER_BLOCK rows of a sequence, a warp for each token at
 * a time; it leaves the choices, and for the losses and statistics the sums of its rows. drop_choices keeps an expert
 * within its capacity. gather_blocks adds blocks to sequences, finish makes losses and statistics of them. All sums
 * over tokens go by shapes: rows of a warp, warps of a block, blocks in eight even runs. */
#include "ops/router/router_row.cuh"
#include "ops/router/router.h"

/* ---- work ------------------------------------------------------------------------------------ */

struct router_sums_at {
    double *by_seq;     /* [sequences, E] sums of s */
    double *z;          /* [blocks] sums of squared log-sum-exp */
    float *sums;        /* [blocks, E] of s */
    int32_t *hits;      /* [blocks, E] in the plain top k */
    int32_t *picks;     /* [blocks, E] chosen */
    int32_t *seq_picks; /* [sequences, E] */
};

static int64_t carve(const struct router_fwd_args *a, struct router_sums_at *s)
{
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], batch = rows / a->rule.seq,
            blocks = router_blocks(rows, a->rule.seq);
    int64_t want[6] = {batch * n * 8, blocks * 8, blocks * n * 4, blocks * n * 4, blocks * n * 4, batch * n * 4},
            size = 0;
    char *at[6];
    for (int i = 0; i < 6; i++) {
        at[i] = (char *)a->work.data + size;
        size += round_up(want[i], 128);
    }
    if (s != NULL) {
        struct router_sums_at all = {(double *)at[0],  (double *)at[1],  (float *)at[2],
                                     (int32_t *)at[3], (int32_t *)at[4], (int32_t *)at[5]};
        *s = all;
    }
    return size;
}

extern "C" int64_t router_fwd_work_cuda(const struct router_fwd_args *a) { return carve(a, NULL); }

/* ---- choices --------------------------------------------------------------------------------- */

struct choose_job {
    struct router_mode mode;
    const float *logits, *bias;
    int64_t stride, vocab;
    const int32_t *token, *table;
    float *probs;
    int32_t *idx;
    struct router_sums_at at;
    int groups, group_topk, per_group, group_lanes; /* lanes that look at one group together */
    bool by_score;                                  /* selection looks at scores, not logits */
    bool balance, wants_z, counts;                  /* sums of s and hits; of z; picks */
    bool plain;                                     /* the choice is the plain top k */
};

/* Sum of the `per` largest of v[0..n), in falling order, by `lanes` neighbouring lanes (a power of two, and n a
 * multiple of it), which all get it. turn: where this group of lanes begins, so that groups do not meet in the same
 * banks. */
__device__ float sum_of_largest(const float *v, int n, int per, int lanes, int turn)
{
    int mine = threadIdx.x % lanes, rounds = n / lanes, last_at = -1;
    float sum = 0, last = INFINITY;
    for (int j = 0; j < per; j++) {
        float best = -INFINITY;
        int at = n;
        for (int i = 0; i < rounds; i++) {
            int e = mine + lanes * ((i + turn) % rounds);
            bool after = v[e] < last || (v[e] == last && e > last_at);
            if (after && (v[e] > best || (v[e] == best && e < at))) {
                best = v[e];
                at = e;
            }
        }
        for (int d = 1; d < lanes; d *= 2) {
            float other = __shfl_xor_sync(0xffffffffu, best, d);
            int other_at = __shfl_xor_sync(0xffffffffu, at, d);
            bool better = other > best || (other == best && other_at < at);
            best = better ? other : best;
            at = better ? other_at : at;
        }
        sum += at == n ? 0.0f : best;
        last = best;
        last_at = at;
    }
    return sum;
}

/* keep[g] = 1 for the group_topk best of the groups, else 0. v [n] and keep [groups]: this warp's shared memory. */
__device__ void best_groups(const struct choose_job &p, const float *v, float *keep)
{
    int lane = threadIdx.x % 32, size = p.mode.n / p.groups, lanes = p.group_lanes, at_once = 32 / lanes;
    unsigned kept = 0;
    for (int g0 = 0; g0 < p.groups; g0 += at_once) {
        int g = min(g0 + lane / lanes, p.groups - 1);
        float sum = sum_of_largest(v + g * size, size, p.per_group, lanes, lane / lanes);
        keep[g] = sum;
    }
    __syncwarp();
    for (int g = lane, bit = 0; g < p.groups; g += 32, bit++) {
        int better = 0;
        for (int o = 0; o < p.groups; o++)
            better += keep[o] > keep[g] || (keep[o] == keep[g] && o < g);
        kept |= better < p.group_topk ? 1u << bit : 0u;
    }
    __syncwarp();
    for (int g = lane, bit = 0; g < p.groups; g += 32, bit++)
        keep[g] = (float)(kept >> bit & 1u);
    __syncwarp();
}

template <int PER>
__device__ __forceinline__ void choose(const struct choose_job &p, int64_t t, const float z[PER], const float s[PER],
                                       float *v, float *keep, int chosen[ROUTER_CHOICES])
{
    int lane = threadIdx.x % 32, n = p.mode.n;
    if (p.table != NULL) {
        int64_t token = p.token != NULL ? p.token[t] : t;
#pragma unroll
        for (int c = 0; c < ROUTER_CHOICES; c++) {
            int j = lane + 32 * c,
                e = j < p.mode.k && token >= 0 && token < p.vocab ? p.table[token * p.mode.k + j] : 0;
            chosen[c] = j < p.mode.k ? (e >= 0 && e < n ? e : 0) : -1;
        }
        return;
    }
    unsigned key[PER];
    float value[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = lane + 32 * i;
        value[i] = (p.by_score ? s[i] : z[i]) + (p.bias != NULL && e < n ? p.bias[e] : 0.0f);
    }
    if (p.groups > 0) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane + 32 * i < n)
                v[lane + 32 * i] = value[i];
        __syncwarp();
        best_groups(p, v, keep);
        int size = n / p.groups;
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (lane + 32 * i < n && keep[(lane + 32 * i) / size] == 0)
                value[i] = -INFINITY;
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        key[i] = lane + 32 * i < n ? router_key(value[i]) : 0;
    router_top<PER>(key, n, p.mode.k, chosen);
}

/* Shared: floats [WARPS][n] (values for groups, later sums by warp), [WARPS][groups]; ints hits [n], picks [n]. */
template <int PER, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, PER <= 2 ? 2 : 1) choose_experts(struct choose_job p)
{
    DYNAMIC_SHARED(float, shared, 4);
    __shared__ double z_by_warp[WARPS];
    int n = p.mode.n, k = p.mode.k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *v = shared + warp * n, *keep = shared + WARPS * n + warp * p.groups;
    int *hits = (int *)(shared + WARPS * (n + p.groups)), *picks = hits + n;
    for (int e = threadIdx.x; e < 2 * n; e += 32 * WARPS)
        hits[e] = 0;
    __syncthreads();
    struct router_span span = router_span_of(p.mode, blockIdx.x);
    float sums[PER];
    double z_sum = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        sums[i] = 0;
    bool wants_soft = p.wants_z || (p.mode.score == ROUTER_SOFTMAX && (p.balance || p.mode.softmax_all));
    bool wants_scores = p.by_score || p.balance;
    for (int64_t t = span.first + warp; t < span.end; t += WARPS) {
        const float *row = p.logits + t * p.stride;
        float z[PER], s[PER];
        struct router_soft soft = {0, 1};
        struct router_chosen c;
        router_load<PER>(row, n, z);
        if (wants_soft)
            soft = router_softmax<PER>(z);
#pragma unroll
        for (int i = 0; i < PER; i++)
            s[i] = wants_scores ? router_score_of(p.mode.score, soft, z[i]) : 0.0f;
        choose<PER>(p, t, z, s, v, keep, c.e);
        router_probabilities(p.mode, row, soft, &c);
#pragma unroll
        for (int i = 0; i < ROUTER_CHOICES; i++)
            if (c.e[i] >= 0) {
                p.probs[t * k + lane + 32 * i] = p.mode.scale * c.p[i];
                p.idx[t * k + lane + 32 * i] = c.e[i];
                if (p.counts)
                    atomicAdd(&picks[c.e[i]], 1);
            }
        if (p.wants_z) {
            float lse = soft.most + logf(soft.sum);
            z_sum += (double)lse * lse;
        }
        if (!p.balance)
            continue;
        float all = 0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            all += s[i];
        float over = p.mode.score == ROUTER_SOFTMAX ? 1.0f : 1.0f / (warp_sum(all) + 1e-20f);
#pragma unroll
        for (int i = 0; i < PER; i++)
            sums[i] += s[i] * over;
        if (!p.plain) {
            unsigned key[PER];
#pragma unroll
            for (int i = 0; i < PER; i++)
                key[i] = lane + 32 * i < n ? router_key(z[i]) : 0;
            router_top<PER>(key, n, k, c.e);
        }
#pragma unroll
        for (int i = 0; i < ROUTER_CHOICES; i++)
            if (c.e[i] >= 0)
                atomicAdd(&hits[c.e[i]], 1);
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        if (lane + 32 * i < n)
            v[lane + 32 * i] = sums[i];
    if (lane == 0)
        z_by_warp[warp] = z_sum;
    __syncthreads();
    int64_t out = (int64_t)blockIdx.x * n;
    for (int e = threadIdx.x; e < n; e += 32 * WARPS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += shared[w * n + e];
        p.at.sums[out + e] = sum;
        p.at.hits[out + e] = hits[e];
        p.at.picks[out + e] = picks[e];
    }
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += z_by_warp[w];
        p.at.z[blockIdx.x] = sum;
    }
}

/* ---- capacity -------------------------------------------------------------------------------- */

enum { DROP_THREADS = 1024, DROP_RUN = 8, DIGIT_BINS = 2048 };

struct drop_job {
    float *probs;
    int32_t *idx;
    int n, capacity; /* n choices in all */
    bool late;
    int k, rows, seq;
};

/* What an expert's choices are kept by: larger first, never 0. */
__device__ __forceinline__ unsigned drop_key(const struct drop_job &p, int i)
{
    return p.late ? (unsigned)(p.rows - router_rank(i / p.k, p.rows, p.seq)) : router_key(p.probs[i]);
}

/* Warp 0: the digit at which the count from the top reaches *need, which becomes what is still needed inside it.
 * Returns the digit, or -1 if there are not that many. *inside: how many have that digit. */
__device__ int digit_of_rank(const int *hist, int *need, int *inside)
{
    int lane = threadIdx.x, per = DIGIT_BINS / 32, top = DIGIT_BINS - lane * per, own = 0, sum, found = -1, rest = 0,
        here = 0;
    for (int i = 1; i <= per; i++)
        own += hist[top - i];
    sum = own;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    if (sum >= *need && sum - own < *need) {
        int left = *need - (sum - own);
        for (int i = 1; i <= per && found < 0; i++) {
            if (left <= hist[top - i]) {
                found = top - i;
                rest = left;
                here = hist[top - i];
            }
            left -= hist[top - i];
        }
    }
    unsigned owner = __ballot_sync(0xffffffffu, found >= 0);
    int from = owner == 0 ? 0 : __ffs(owner) - 1;
    *need = __shfl_sync(0xffffffffu, rest, from);
    *inside = __shfl_sync(0xffffffffu, here, from);
    return owner == 0 ? -1 : __shfl_sync(0xffffffffu, found, from);
}

/* How many of the block's flags come before this thread's. */
__device__ int count_before(int own, int *by_warp, int *all)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = own, before = 0, total = 0;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    if (lane == 31)
        by_warp[warp] = sum;
    __syncthreads();
    for (int w = 0; w < DROP_THREADS / 32; w++) {
        before += w < warp ? by_warp[w] : 0;
        total += by_warp[w];
    }
    __syncthreads();
    *all = total;
    return before + sum - own;
}

/* One block for each expert: a radix search for the smallest key that stays, then one pass that marks the others. Other
 * blocks change only choices of other experts, which this one never looks at again. */
__global__ void __launch_bounds__(DROP_THREADS) drop_choices(struct drop_job p)
{
    __shared__ int hist[DIGIT_BINS], by_warp[DROP_THREADS / 32], state[3]; /* digit, need, inside */
    int expert = blockIdx.x, need = p.capacity, inside = 0;
    unsigned prefix = 0, known = 0; /* bits of the threshold found so far, and which */
    for (int pass = 0; pass < 3; pass++) {
        int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        for (int b = threadIdx.x; b < DIGIT_BINS; b += DROP_THREADS)
            hist[b] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < p.n; i += DROP_THREADS) {
            unsigned key = p.idx[i] == expert ? drop_key(p, i) : 0;
            if (key != 0 && (key & known) == prefix)
                atomicAdd(&hist[key >> shift & (pass == 2 ? 1023u : 2047u)], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            int digit = digit_of_rank(hist, &need, &inside);
            if (threadIdx.x == 0) {
                state[0] = digit;
                state[1] = need;
                state[2] = inside;
            }
        }
        __syncthreads();
        int digit = state[0];
        need = state[1];
        inside = state[2];
        if (digit < 0)
            return; /* fewer choices than the capacity */
        prefix |= (unsigned)digit << shift;
        known |= (pass == 2 ? 1023u : 2047u) << shift;
        __syncthreads();
    }
    int equal_seen = 0;
    for (int64_t first = 0; first < p.n; first += DROP_THREADS * DROP_RUN) {
        int at = (int)first + threadIdx.x * DROP_RUN, equal = 0, all = 0;
        unsigned key[DROP_RUN];
#pragma unroll
        for (int i = 0; i < DROP_RUN; i++) {
            bool mine = (int64_t)at + i < p.n && p.idx[at + i] == expert;
            key[i] = mine ? drop_key(p, at + i) : 0;
            equal += key[i] == prefix;
        }
        int rank = inside > need ? equal_seen + count_before(equal, by_warp, &all) : 0;
        equal_seen += all;
#pragma unroll
        for (int i = 0; i < DROP_RUN; i++) {
            bool same = key[i] == prefix;
            if (key[i] != 0 && (key[i] < prefix || (same && inside > need && rank >= need))) {
                p.idx[at + i] = -1 - expert;
                p.probs[at + i] = 0;
            }
            rank += same;
        }
    }
}

/* ---- losses and statistics ------------------------------------------------------------------- */

struct finish_job {
    struct router_sums_at at;
    struct router_coef coef;
    double *load, *stat, *tally, *global;
    float *loss;
    int64_t rows, batch, blocks;
    int n, k, seq, per_seq, capacity;
    bool balance, counts, acc_stat, acc_tally, acc_global;
};

enum { GATHER_SLICES = 8 };

/* Blocks of a sequence to the sequence: 32 experts, in GATHER_SLICES even runs of blocks. */
__global__ void __launch_bounds__(32 * GATHER_SLICES) gather_blocks(struct finish_job p)
{
    __shared__ double sum_of[GATHER_SLICES][32];
    __shared__ int hits_of[GATHER_SLICES][32], picks_of[GATHER_SLICES][32];
    int chunks = (p.n + 31) / 32, lane = threadIdx.x % 32, slice = threadIdx.x / 32,
        e = (int)(blockIdx.x % chunks) * 32 + lane;
    int64_t b = blockIdx.x / chunks;
    int run = (p.per_seq + GATHER_SLICES - 1) / GATHER_SLICES, hits = 0, picks = 0;
    double sum = 0;
    if (e < p.n) {
        int64_t end = min(p.per_seq, (slice + 1) * run);
#pragma unroll 4
        for (int64_t i = slice * run; i < end; i++) {
            int64_t at = (b * p.per_seq + i) * p.n + e;
            sum += (double)p.at.sums[at];
            hits += p.at.hits[at];
            picks += p.at.picks[at];
        }
    }
    sum_of[slice][lane] = sum;
    hits_of[slice][lane] = hits;
    picks_of[slice][lane] = picks;
    __syncthreads();
    if (slice > 0 || e >= p.n)
        return;
    for (int s = 1; s < GATHER_SLICES; s++) {
        sum += sum_of[s][lane];
        hits += hits_of[s][lane];
        picks += picks_of[s][lane];
    }
    if (p.balance) {
        p.at.by_seq[b * p.n + e] = sum;
        p.load[b * p.n + e] = (double)hits;
    }
    p.at.seq_picks[b * p.n + e] = picks;
}

enum { FINISH_THREADS = 1024 };

/* Sums over the block (of the last one, `most`, the largest); all threads get them. */
enum finish_sum { SUM_AUX, SUM_GLOBAL, SUM_SEQ, SUM_Z, SUM_TALLY, SUM_MOST, FINISH_SUMS };
__device__ __forceinline__ void over_block(double x[FINISH_SUMS], double scratch[][FINISH_SUMS])
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
#pragma unroll
        for (int i = 0; i < FINISH_SUMS; i++) {
            double other = __shfl_xor_sync(0xffffffffu, x[i], d);
            x[i] = i == SUM_MOST ? fmax(x[i], other) : x[i] + other;
        }
#pragma unroll
    for (int i = 0; i < FINISH_SUMS; i++)
        if (threadIdx.x % 32 == 0)
            scratch[threadIdx.x / 32][i] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FINISH_SUMS; i++) {
        x[i] = scratch[0][i];
        for (int w = 1; w < (int)blockDim.x / 32; w++)
            x[i] = i == SUM_MOST ? fmax(x[i], scratch[w][i]) : x[i] + scratch[w][i];
    }
    __syncthreads();
}

/* One block, a thread for each expert. */
__global__ void __launch_bounds__(FINISH_THREADS) finish(struct finish_job p)
{
    __shared__ double scratch[FINISH_THREADS / 32][FINISH_SUMS];
    int e = threadIdx.x;
    double stat[ROUTER_STATS] = {0}, f = 0, sum = 0, seq_aux = 0, tally = 0, mean = 0, z = 0;
    bool mine = e < p.n;
#pragma unroll 4
    for (int64_t b = 0; b < p.batch; b++) {
        if (!mine)
            break;
        int64_t at = b * p.n + e;
        tally += (double)p.at.seq_picks[at];
        if (p.balance) {
            f += p.load[at];
            sum += p.at.by_seq[at];
            seq_aux += p.load[at] * p.at.by_seq[at];
        }
    }
    tally = fmin(tally, (double)p.capacity);
    if (p.balance) {
        mean = f;
        if (p.global != NULL) {
            double batches = (p.acc_global ? p.global[p.n] : 0) + 1;
            if (mine) {
                mean = (p.acc_global ? p.global[e] : 0) + f;
                p.global[e] = mean;
            }
            mean /= batches;
            __syncthreads();
            if (e == 0)
                p.global[p.n] = batches;
        }
        if (mine)
            p.load[p.batch * p.n + e] = mean;
    }
    if (!p.counts)
        return;
#pragma unroll 4
    for (int64_t b = e; b < p.blocks; b += blockDim.x)
        z += p.at.z[b];
    double own = mine ? tally : 0, all[FINISH_SUMS] = {f * sum, mean * sum, seq_aux, z, own, own};
    over_block(all, scratch);
    double rows = (double)p.rows, seq = (double)p.seq, per_k = (double)p.n / (double)p.k, total = all[SUM_TALLY];
    if (p.balance && p.rows > 0) {
        stat[ROUTER_STAT_AUX] = all[SUM_AUX] * per_k / (rows * rows);
        stat[ROUTER_STAT_GLOBAL_AUX] = all[SUM_GLOBAL] * per_k / (rows * rows);
        stat[ROUTER_STAT_SEQ_AUX] = all[SUM_SEQ] * per_k / (seq * seq) / (double)p.batch;
    }
    double most = all[SUM_MOST], parts[FINISH_SUMS] = {mine && tally > 0 ? tally / total * log(tally / total) : 0};
    over_block(parts, scratch);
    double entropy = -parts[0];
    if (p.tally != NULL && mine)
        p.tally[e] = (p.acc_tally ? p.tally[e] : 0) + tally;
    if (e > 0)
        return;
    stat[ROUTER_STAT_Z] = p.rows > 0 ? all[SUM_Z] / rows : 0;
    stat[ROUTER_STAT_LOAD_MAX] = total > 0 ? most * (double)p.n / total : 0;
    stat[ROUTER_STAT_LOAD_ENTROPY] = p.n > 1 ? entropy / log((double)p.n) : 1;
    stat[ROUTER_STAT_DROPPED] = p.rows > 0 ? 1 - total / (double)(p.rows * p.k) : 0;
    stat[ROUTER_STAT_LOSS] = p.coef.aux * stat[ROUTER_STAT_AUX] + p.coef.seq_aux * stat[ROUTER_STAT_SEQ_AUX] +
                             p.coef.global_aux * stat[ROUTER_STAT_GLOBAL_AUX] + p.coef.z * stat[ROUTER_STAT_Z];
    for (int i = 0; p.stat != NULL && i < ROUTER_STATS; i++)
        p.stat[i] = (p.acc_stat ? p.stat[i] : 0) + stat[i];
    if (p.loss != NULL)
        *p.loss = (float)stat[ROUTER_STAT_LOSS];
}

/* ---- launch ---------------------------------------------------------------------------------- */

static struct choose_job choose_job_of(const struct router_fwd_args *a)
{
    const struct router_rule *r = &a->rule;
    bool hashed = present(&a->token), given = present(&a->table);
    int64_t n = a->logits.dim[1], k = a->probs.dim[1];
    struct choose_job p = {};
    p.mode = router_mode_of(r, hashed, n, k);
    p.logits = (const float *)a->logits.data;
    p.bias = (const float *)a->bias.data;
    p.stride = a->logits.stride[0];
    p.vocab = given ? a->table.dim[0] : 0;
    p.token = (const int32_t *)a->token.data;
    p.table = (const int32_t *)a->table.data;
    p.probs = (float *)a->probs.data;
    p.idx = (int32_t *)a->idx.data;
    p.groups = given ? 0 : (int)r->groups;
    p.group_topk = (int)r->group_topk;
    p.per_group = p.groups > 0 ? (int)router_group_best(r, n, k) : 0;
    p.group_lanes = 1;
    for (int lanes = 2; p.groups > 0 && lanes * r->groups <= 32 && n / r->groups % lanes == 0; lanes *= 2)
        p.group_lanes = lanes;
    p.by_score = !(r->score == ROUTER_SOFTMAX && !r->pre_softmax);
    p.balance = present(&a->load);
    p.wants_z = present(&a->stat) || present(&a->loss);
    p.counts = p.wants_z || present(&a->tally);
    p.plain = r->score == ROUTER_SOFTMAX && !r->pre_softmax && r->groups == 0 && !present(&a->bias) && !given;
    carve(a, &p.at);
    return p;
}

static struct finish_job finish_job_of(const struct router_fwd_args *a, const struct choose_job *c, int64_t capacity)
{
    struct finish_job f = {};
    f.at = c->at;
    f.coef = a->rule.coef;
    f.load = (double *)a->load.data;
    f.stat = (double *)a->stat.data;
    f.tally = (double *)a->tally.data;
    f.global = (double *)a->global.data;
    f.loss = (float *)a->loss.data;
    f.rows = a->logits.dim[0];
    f.batch = f.rows / a->rule.seq;
    f.blocks = router_blocks(f.rows, a->rule.seq);
    f.n = c->mode.n;
    f.k = c->mode.k;
    f.seq = c->mode.seq;
    f.per_seq = c->mode.per_seq;
    f.capacity = capacity < f.rows ? (int)capacity : INT32_MAX;
    f.balance = c->balance;
    f.counts = c->counts;
    f.acc_stat = a->acc_stat;
    f.acc_tally = a->acc_tally;
    f.acc_global = a->acc_global;
    return f;
}

extern "C" int router_fwd_cuda(struct lane *l, const struct router_fwd_args *a)
{
    TRY(router_fwd_check(a, l->err));
    TRY(check_work("router_fwd", &a->work, carve(a, NULL), l->err));
    int64_t rows = a->logits.dim[0], n = a->logits.dim[1], k = a->probs.dim[1];
    if (rows * k > INT32_MAX)
        return err_set(l->err, ST_INVALID, "router_fwd: %lld rows with %lld choices each are more than 2147483647",
                       (long long)rows, (long long)k);
    struct choose_job p = choose_job_of(a);
    ROUTER_BY_EXPERTS(n, PER, WARPS, {
        size_t shared = (size_t)(WARPS * (n + p.groups) + 2 * n) * sizeof(float);
        if (shared > 40 * 1024)
            NEEDS_SMEM(l, (choose_experts<PER, WARPS>), shared);
        LAUNCH(l, (choose_experts<PER, WARPS>), (unsigned)router_blocks(rows, a->rule.seq), 32 * WARPS, shared, p);
    });
    int64_t capacity = router_capacity(&a->rule, rows, n, k);
    if (capacity < rows) {
        struct drop_job d = {p.probs,           p.idx,  (int)(rows * k), (int)capacity,
                             a->rule.drop_late, (int)k, (int)rows,       (int)a->rule.seq};
        LAUNCH(l, drop_choices, (unsigned)n, DROP_THREADS, 0, d);
    }
    if (!p.balance && !p.counts)
        return ST_OK;
    struct finish_job f = finish_job_of(a, &p, capacity);
    LAUNCH(l, gather_blocks, (unsigned)(f.batch * ceil_div(n, 32)), 32 * GATHER_SLICES, 0, f);
    LAUNCH(l, finish, 1, (unsigned)round_up(n, 32), 0, f);
    return ST_OK;
}
