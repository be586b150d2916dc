/* adamw of matrices that have FP8 codes: one kernel updates a tile of 128 x 128 and writes its codes in both
 * orientations, so that the new value is not read again. A thread has eight rows of four columns in each half of the
 * tile; the tile's new values stay in its registers until the largest magnitude of all is known. */
#include "ops/adamw/adamw.cuh"
#include "ops/cuda/f8.cuh"

enum { CODED_PARTS = 64 }; /* parameters that a launch takes */

struct coded_part {
    float *p, *m, *v;
    const float *g;
    struct f8_out o;
    float decay, rate;
    uint32_t first_block;
};
struct coded_call {
    struct coded_part part[CODED_PARTS];
    int parts;
    struct adamw_common common;
};

/* Four elements as they lie in memory. */
struct four {
    uint4 g, p, m, v;
};
__device__ __forceinline__ struct four load_four(const struct coded_part &at, int64_t i)
{
    return {load_raw(at.g + i), load_raw(at.p + i), load_raw(at.m + i), load_raw(at.v + i)};
}
/* Their update, in memory; their new values. */
__device__ __forceinline__ uint4 update_four(const struct rates &r, const struct coded_part &at, int64_t i,
                                             const struct four &x)
{
    float g[4], p[4], m[4], v[4];
    unpack<float>(x.g, g);
    unpack<float>(x.p, p);
    unpack<float>(x.m, m);
    unpack<float>(x.v, v);
#pragma unroll
    for (int e = 0; e < 4; e++)
        update(r, g[e], &p[e], &m[e], &v[e]);
    store_floats(at.p + i, p);
    store_floats(at.m + i, m);
    store_floats(at.v + i, v);
    return repack<float>(p);
}

/* A row of a thread: four elements in each half of the tile, or nothing outside of the matrix. */
struct two_fours {
    struct four low, high;
};
template <bool FULL>
__device__ __forceinline__ struct two_fours load_row(const struct coded_part &at, int64_t row, int64_t col)
{
    struct two_fours x = {};
    if (FULL || (row < at.o.rows && col < at.o.cols))
        x.low = load_four(at, row * at.o.cols + col);
    if (FULL || (row < at.o.rows && col + F8_TILE / 2 < at.o.cols))
        x.high = load_four(at, row * at.o.cols + col + F8_TILE / 2);
    return x;
}

/* FULL: no part of the tile is outside of the matrix, so that loads need no condition. The next row is on its way while
 * this one is updated: its loads come before the stores, which the compiler would not exchange. */
template <bool FULL>
__device__ __forceinline__ void update_tile(const struct rates &r, const struct coded_part &at, int64_t r0, int64_t c0,
                                            f8_eight<float> *tile)
{
    int64_t row = r0 + threadIdx.x / 16 * 8, col = c0 + f8_column<true>(threadIdx.x % 16, 0, 0);
    constexpr int AHEAD = 6; /* rows after which registers for two are no longer free */
    struct two_fours now = load_row<FULL>(at, row, col), next = {};
#pragma unroll
    for (int i = 0; i < 8; i++, row++) {
        int64_t here = row * at.o.cols + col;
        if (i < AHEAD)
            next = load_row<FULL>(at, row + 1, col);
        bool low = FULL || (row < at.o.rows && col < at.o.cols),
             high = FULL || (row < at.o.rows && col + F8_TILE / 2 < at.o.cols);
        tile[i].raw[0] = low ? update_four(r, at, here, now.low) : zero_raw();
        tile[i].raw[1] = high ? update_four(r, at, here + F8_TILE / 2, now.high) : zero_raw();
        now = i < AHEAD ? next : i < 7 ? load_row<FULL>(at, row + 1, col) : now;
    }
}

/* Codes by rows: four bytes in each half of the tile. */
template <bool FULL>
__device__ __forceinline__ void store_rows(const f8_eight<float> *tile, const struct f8_out &o, int64_t r0, int64_t c0,
                                           float factor)
{
    int64_t row = r0 + threadIdx.x / 16 * 8, col = c0 + f8_column<true>(threadIdx.x % 16, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v[8];
        f8_floats(tile[i], v);
        uint2 w = f8_word<DT_F8_E4M3>(v, factor);
        uint8_t *q = o.q + (row + i) * o.cols + col;
        if (FULL || (row + i < o.rows && col < o.cols))
            *(uint32_t *)q = w.x;
        if (FULL || (row + i < o.rows && col + F8_TILE / 2 < o.cols))
            *(uint32_t *)(q + F8_TILE / 2) = w.y;
    }
}

static __global__ void __launch_bounds__(F8_THREADS, 2) adamw_tiles(const __grid_constant__ struct coded_call a)
{
    __shared__ struct f8_shared s;
    if (a.common.scale[2] != 0)
        return;
    const struct coded_part &at = a.part[part_of_block(a.part, a.parts, blockIdx.x)];
    struct rates r = rates_of(a.common, at.rate, at.decay);
    uint32_t tile_index = blockIdx.x - at.first_block, across = (uint32_t)((at.o.cols + F8_TILE - 1) / F8_TILE);
    int64_t r0 = (int64_t)(tile_index / across) * F8_TILE, c0 = (int64_t)(tile_index % across) * F8_TILE;
    bool full = r0 + F8_TILE <= at.o.rows && c0 + F8_TILE <= at.o.cols;
    f8_eight<float> tile[8];
    if (full)
        update_tile<true>(r, at, r0, c0, tile);
    else
        update_tile<false>(r, at, r0, c0, tile);
    float factor = f8_square_factor<float, DT_F8_E4M3>(f8_thread_most<float>(tile), at.o, r0, c0, &s);
    if (full)
        store_rows<true>(tile, at.o, r0, c0, factor);
    else
        store_rows<false>(tile, at.o, r0, c0, factor);
    if (at.o.t != NULL)
        f8_columns<float, DT_F8_E4M3, F8_SQUARE, true>(tile, at.o, r0, c0, factor, &s);
}

bool adamw_in_tiles(const struct adamw_part *p)
{
    int64_t rows = p->q.dim[0], cols = p->q.dim[1];
    return present(&p->q) && !present(&p->copy) && rows > 0 && cols > 0 &&
           f8_tiles_fit(rows, cols, p->q.data, p->t.data) && pointer16(p->p.data) && pointer16(p->g.data) &&
           pointer16(p->m.data) && pointer16(p->v.data);
}

int adamw_coded(struct lane *l, const struct adamw_args *a, const struct adamw_common *common)
{
    struct coded_call c = {};
    int64_t blocks = 0;
    c.common = *common;
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part p = adamw_part_at(a, k);
        if (!adamw_in_tiles(&p))
            continue;
        int64_t rows = p.q.dim[0], cols = p.q.dim[1], tiles = ceil_div(rows, F8_TILE) * ceil_div(cols, F8_TILE);
        if (tiles > INT32_MAX)
            return err_set(l->err, ST_UNSUPPORTED, "adamw: a matrix of %lld x %lld is more than one launch takes",
                           (long long)rows, (long long)cols);
        if (c.parts == CODED_PARTS || blocks + tiles > INT32_MAX) {
            LAUNCH(l, adamw_tiles, (unsigned)blocks, F8_THREADS, 0, c);
            c.parts = 0;
            blocks = 0;
        }
        struct coded_part *to = &c.part[c.parts++];
        to->p = (float *)p.p.data;
        to->m = (float *)p.m.data;
        to->v = (float *)p.v.data;
        to->g = (const float *)p.g.data;
        to->o = f8_out_of(&p.q, &p.qs, &p.t, &p.ts, rows, cols, ADAMW_SQUARE, true);
        to->decay = (float)p.decay;
        to->rate = (float)p.rate;
        to->first_block = (uint32_t)blocks;
        blocks += tiles;
    }
    if (c.parts > 0)
        LAUNCH(l, adamw_tiles, (unsigned)blocks, F8_THREADS, 0, c);
    return ST_OK;
}
