/* epplan on the GPU: every entry of a map is computed on its own; nothing is counted twice, nothing is added by
 * atomics. */
#include "ops/cuda/kernel.cuh"
#include "ops/epplan/epplan.h"

enum { THREADS = 256 };

static unsigned grid_for(int64_t n) { return (unsigned)min_i64(max_i64(ceil_div(n, THREADS), 1), 132 * 16); }

/* The rank of an expert; -1: dropped, or no expert at all. */
__device__ __forceinline__ int rank_of(int expert, int ranks, int local)
{
    return expert < 0 || expert >= ranks * local ? -1 : expert / local;
}

/* One thread for each token: the least rank above the last one, until there is none. */
__global__ void dest_of_tokens(const int32_t *idx, int64_t tokens, int k, int most, int ranks, int local, int32_t *dest)
{
    for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < tokens; t += (int64_t)gridDim.x * THREADS) {
        int last = -1;
        for (int i = 0; i < most; i++) {
            int next = ranks;
            for (int j = 0; j < k; j++) {
                int r = rank_of(idx[t * k + j], ranks, local);
                next = r > last && r < next ? r : next;
            }
            dest[t * most + i] = next < ranks ? next : -1;
            last = next;
        }
    }
}

extern "C" int epdest_cuda(struct lane *l, const struct epdest_args *a)
{
    TRY(epdest_check(a, l->err));
    int64_t tokens = a->idx.dim[0];
    if (tokens > 0)
        LAUNCH(l, dest_of_tokens, grid_for(tokens), THREADS, 0, (const int32_t *)a->idx.data, tokens,
               (int)a->idx.dim[1], (int)a->most, (int)a->ranks, (int)a->local, (int32_t *)a->dest.data);
    return ST_OK;
}

__global__ void send_counts(const int32_t *offset, int ranks, int64_t cap, int32_t *rows, double *need, bool acc)
{
    for (int r = threadIdx.x; r < ranks; r += THREADS)
        rows[r] = (int32_t)min((int64_t)(offset[r + 1] - offset[r]), cap);
    if (threadIdx.x != 0)
        return;
    double most = acc ? *need : 0;
    for (int r = 0; r < ranks; r++)
        most = fmax(most, (double)(offset[r + 1] - offset[r]));
    *need = most;
}

/* Entry i, by its row of moeplan: the rank is found by halving. */
__global__ void send_to(const int32_t *offset, const int32_t *row, int64_t n, int ranks, int64_t cap, int32_t *to)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * THREADS) {
        int r = row[i], low = 0, high = ranks;
        while (high - low > 1) {
            int mid = (low + high) / 2;
            if (offset[mid] <= r)
                low = mid;
            else
                high = mid;
        }
        int64_t at = r - offset[low];
        to[i] = r < 0 || at >= cap ? -1 : (int32_t)(low * cap + at);
    }
}

__global__ void send_from(const int32_t *offset, const int32_t *src, int ranks, int64_t cap, int32_t *from)
{
    int64_t n = ranks * cap;
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < n; at += (int64_t)gridDim.x * THREADS) {
        int r = (int)(at / cap), first = offset[r];
        int64_t i = at % cap;
        from[at] = i < offset[r + 1] - first ? src[first + i] : -1;
    }
}

extern "C" int epsend_cuda(struct lane *l, const struct epsend_args *a)
{
    TRY(epsend_check(a, l->err));
    int ranks = (int)a->rows.dim[0];
    int64_t cap = a->from.dim[0] / ranks, n = tensor_elems(&a->row);
    const int32_t *offset = (const int32_t *)a->offset.data;
    LAUNCH(l, send_counts, 1, THREADS, 0, offset, ranks, cap, (int32_t *)a->rows.data, (double *)a->need.data,
           a->acc_need);
    if (n > 0)
        LAUNCH(l, send_to, grid_for(n), THREADS, 0, offset, (const int32_t *)a->row.data, n, ranks, cap,
               (int32_t *)a->to.data);
    if (cap > 0)
        LAUNCH(l, send_from, grid_for(ranks * cap), THREADS, 0, offset, (const int32_t *)a->src.data, ranks, cap,
               (int32_t *)a->from.data);
    return ST_OK;
}

struct choice_maps {
    const int32_t *idx, *to, *from;
    int32_t *sent, *src, *row;
    int64_t tokens, places, cap;
    int k, most, per, ranks, local;
    bool whole;
};

/* One thread for each place: the choices of its token that are experts of its rank, in order. */
__global__ void choices_of_places(struct choice_maps m)
{
    for (int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x; at < m.places; at += (int64_t)gridDim.x * THREADS) {
        int rank = (int)(at / m.cap), n = 0;
        int64_t t = m.from[at] < 0 ? -1 : m.from[at] / m.most;
        for (int j = 0; t >= 0 && t < m.tokens && j < m.k && n < m.per; j++) {
            int x = m.idx[t * m.k + j];
            if (rank_of(x, m.ranks, m.local) != rank)
                continue;
            m.sent[at * m.per + n] = x - (m.whole ? 0 : rank * m.local);
            m.src[at * m.per + n++] = (int32_t)(t * m.k + j);
        }
        for (; n < m.per; n++)
            m.sent[at * m.per + n] = m.src[at * m.per + n] = -1;
    }
}

/* One thread for each choice: the place of its token on its rank, and the token's earlier choices there. */
__global__ void places_of_choices(struct choice_maps m)
{
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < m.tokens * m.k;
         i += (int64_t)gridDim.x * THREADS) {
        int64_t t = i / m.k, at = -1;
        int rank = rank_of(m.idx[i], m.ranks, m.local), n = 0;
        for (int j = 0; rank >= 0 && j < m.most; j++) {
            int64_t place = m.to[t * m.most + j];
            if (place >= 0 && place < m.places && place / m.cap == rank)
                at = place;
        }
        for (int64_t j = t * m.k; j < i; j++)
            n += rank_of(m.idx[j], m.ranks, m.local) == rank;
        m.row[i] = at < 0 || n >= m.per ? -1 : (int32_t)(at * m.per + n);
    }
}

extern "C" int epchoices_cuda(struct lane *l, const struct epchoices_args *a)
{
    TRY(epchoices_check(a, l->err));
    struct choice_maps m = {(const int32_t *)a->idx.data,
                            (const int32_t *)a->to.data,
                            (const int32_t *)a->from.data,
                            (int32_t *)a->sent.data,
                            (int32_t *)a->src.data,
                            (int32_t *)a->row.data,
                            a->idx.dim[0],
                            a->from.dim[0],
                            a->from.dim[0] / a->ranks,
                            (int)a->idx.dim[1],
                            (int)a->to.dim[1],
                            (int)a->per,
                            (int)a->ranks,
                            (int)a->local,
                            a->whole};
    if (m.places > 0)
        LAUNCH(l, choices_of_places, grid_for(m.places), THREADS, 0, m);
    if (m.tokens * m.k > 0)
        LAUNCH(l, places_of_choices, grid_for(m.tokens * m.k), THREADS, 0, m);
    return ST_OK;
}
