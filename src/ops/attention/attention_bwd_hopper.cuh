/* What the backward pass for Hopper shares between its files: the job, what tiles need by row, and which tiles see
 * which blocks of keys; see attention_bwd_hopper.cu. */
#ifndef BRAID_OPS_ATTENTION_BWD_HOPPER_CUH
#define BRAID_OPS_ATTENTION_BWD_HOPPER_CUH

#include "ops/attention/attention.h"
#include "ops/attention/attention_cuda.cuh"
#include "ops/cuda/ptx.cuh"

enum { KEYS = 128 /* of a block of keys */ };

/* Rows of a tile: 128 for heads of up to 64 channels, 64 for wider ones. */
template <int D> constexpr int TILE_ROWS = D == 64 ? 128 : 64;

/* What a tile needs by row, as one bulk copy. Rows beyond the last have an infinite logarithm: their probabilities are
 * 0. */
template <int ROWS> struct row_record {
    float log2_sum[ROWS], delta[ROWS];
    int lo[ROWS]; /* first key seen */
    int most_lo, pad[3];
};

struct bwd_job {
    attn_call<bf16> c;
    void *records; /* [batch][head][tile] row_record */
    float *dq_sum; /* [batch][head][tile][DQ_FLOATS], in the order of registers */
    int *turn;     /* [batch][head][tile] */
    float *kv_sum; /* where the heads of a group are shared out: [batch][group][block][dk, dv][DQ_FLOATS * D / 64] */
    int *kv_turn;  /* [batch][group][block] */
    int *ticket;
    float *dsink_part;        /* [batch][tile][head] */
    int *tile_lo, *last_tile; /* with documents: [batch][tile] first key block of a tile, [batch][block] last tile of a
                                 key block */
    int tiles, blocks, items, rows_of_tile;
    int each, shares; /* query heads of a block; blocks that share the heads of a group */
    int sets; /* units of (batch, group, share) are taken in so many sets, one after the other, so that what a set uses
                 fits the cache */
};

/* ---- which tiles see which blocks of keys ---------------------------------------------------- */

__device__ __forceinline__ int first_query(const bwd_job &j) { return j.c.keys - j.c.rows; }
/* First and last key block of a tile. */
__device__ __forceinline__ int first_block(const bwd_job &j, int b, int m)
{
    if (j.tile_lo != NULL)
        return __ldg(&j.tile_lo[(int64_t)b * j.tiles + m]);
    return j.c.window > 0 ? max(first_query(j) + m * j.rows_of_tile - j.c.window + 1, 0) / KEYS : 0;
}
__device__ __forceinline__ int last_block(const bwd_job &j, int m)
{
    return (first_query(j) + min(j.c.rows, (m + 1) * j.rows_of_tile) - 1) / KEYS;
}

/* A block of keys, the first of its query heads and the tiles that see it: last .. first. */
struct place {
    int b, g, share, n, first, last;
    __device__ __forceinline__ bool empty() const { return last < first; }
};
__device__ __forceinline__ place place_of(const bwd_job &j, int item)
{
    place p;
    int units = j.c.batch * j.c.groups * j.shares, set = (int)((((int64_t)(item / j.blocks) + 1) * j.sets - 1) / units);
    int start = (int)((int64_t)set * units / j.sets), width = (int)((int64_t)(set + 1) * units / j.sets) - start,
        rest = item - start * j.blocks;
    int unit = start + rest % width;
    p.n = rest / width;
    p.share = unit % j.shares;
    p.g = unit / j.shares % j.c.groups;
    p.b = unit / j.shares / j.c.groups;
    p.first = max(0, p.n * KEYS - first_query(j)) / j.rows_of_tile;
    p.last = j.tiles - 1;
    if (j.last_tile != NULL)
        p.last = __ldg(&j.last_tile[(int64_t)p.b * j.blocks + p.n]);
    else if (j.c.window > 0) {
        int64_t row = (int64_t)(p.n + 1) * KEYS + j.c.window - 2 - first_query(j);
        p.last = row < 0 ? -1 : (int)min((int64_t)p.last, row / j.rows_of_tile);
    }
    return p;
}
/* Walks over the tiles of a place, for each of its query heads. All heads of a tile in turn, so that blocks stay near
 * each other; with a window, where blocks are apart anyway, a head after the other, so that less
 * is in use at a time. */
struct walk {
    int h, m, left; /* left: heads after this one */
    __device__ __forceinline__ void next(const bwd_job &j, const place &p)
    {
        if (j.c.window > 0) {
            if (m-- == p.first) {
                m = p.last;
                h++;
            }
        } else if (left-- > 0) {
            h++;
        } else {
            left = j.each - 1;
            h -= left;
            m--;
        }
    }
};
__device__ __forceinline__ walk walk_from(const bwd_job &j, const place &p)
{
    walk w = {p.g * j.c.per_group + p.share * j.each, p.last, j.each - 1};
    return w;
}
__device__ __forceinline__ int steps_of(const bwd_job &j, const place &p)
{
    return max(p.last - p.first + 1, 0) * j.each;
}
__device__ __forceinline__ int tile_index(const bwd_job &j, int b, int h, int m)
{
    return (b * j.c.heads + h) * j.tiles + m;
}

/* Before the kernel: records, turns and ticket; dsink; ranges of documents. */
int attention_bwd_prepare(struct lane *l, const struct attention_bwd_args *a, const bwd_job &j);

#endif
