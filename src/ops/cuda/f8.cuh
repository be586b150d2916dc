/* Tiles of 128 x 128 values to FP8 codes, in their own order and transposed; see ops/quantise. Used by the quantiser
 * and by kernels that make the values themselves (ops/act), which then never reach memory in bf16.
 *
 * A block of 256 threads holds a tile: thread 16 g + c has rows 8 g .. 8 g + 7, columns 8 c .. 8 c + 7. Largest
 * magnitudes are found as integers, where NaN counts as larger than all else. The transposed codes go through shared
 * memory: thread by thread eight rows of a column are one word of eight bytes, whose place in its line is exchanged by
 * c so that neither the words written nor the lines read meet in a bank. */
#ifndef BRAID_OPS_CUDA_F8_CUH
#define BRAID_OPS_CUDA_F8_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/quantise/quantise.h"

enum { F8_TILE = 128, F8_THREADS = 256 };

/* Where the codes of a tensor [rows, cols] go. */
struct f8_out {
    uint8_t *q, *t; /* NULL: not wanted */
    float *qs, *ts;
    int64_t rows, cols, q_stride, t_stride; /* strides of scales */
};
struct f8_shared {
    uint2 codes[F8_TILE][16];
    uint32_t amax[8][F8_TILE];
    float factor[F8_TILE];
};
enum f8_blocks { F8_ROWS, F8_SQUARE, F8_WHOLE };

/* Eight values of a row, as they lie in memory. */
template <typename T> struct f8_eight {
    uint4 raw[sizeof(T) / 2];
};
template <typename T> __device__ __forceinline__ void f8_floats(const f8_eight<T> &e, float *v)
{
    unpack<T>(e.raw[0], v);
    if (sizeof(T) == 4)
        unpack<T>(e.raw[sizeof(T) / 2 - 1], v + 4);
}
/* The lower or the upper four. */
__device__ __forceinline__ void f8_half(const f8_eight<bf16> &e, int half, float *v)
{
    unpack2(half ? e.raw[0].z : e.raw[0].x, v);
    unpack2(half ? e.raw[0].w : e.raw[0].y, v + 2);
}
__device__ __forceinline__ void f8_half(const f8_eight<float> &e, int half, float *v) { unpack<float>(e.raw[half], v); }
template <typename T> __device__ __forceinline__ f8_eight<T> f8_zeros()
{
    f8_eight<T> e;
    e.raw[0] = zero_raw();
    if (sizeof(T) == 4)
        e.raw[sizeof(T) / 2 - 1] = zero_raw();
    return e;
}
template <typename T> __device__ __forceinline__ f8_eight<T> f8_load(const T *p)
{
    f8_eight<T> e;
    e.raw[0] = load_raw(p);
    if (sizeof(T) == 4)
        e.raw[sizeof(T) / 2 - 1] = load_raw(p + 4);
    return e;
}

/* Eight values as they would be stored. */
template <typename T> __device__ __forceinline__ f8_eight<T> f8_stored(const float *v);
template <> __device__ __forceinline__ f8_eight<bf16> f8_stored<bf16>(const float *v)
{
    f8_eight<bf16> e;
    e.raw[0] = repack<bf16>(v);
    return e;
}
template <> __device__ __forceinline__ f8_eight<float> f8_stored<float>(const float *v)
{
    f8_eight<float> e;
    e.raw[0] = repack<float>(v);
    e.raw[1] = repack<float>(v + 4);
    return e;
}

__device__ __forceinline__ uint32_t magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint32_t warp_max_u32(uint32_t x, int lanes)
{
    for (int d = 1; d < lanes; d <<= 1)
        x = max_u32(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

/* Magnitudes of eight values in words: two bf16 in each, or one float; and the larger of two such words. */
template <typename T> struct f8_words;
template <> struct f8_words<bf16> {
    enum { N = 4 };
    static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
    static __device__ __forceinline__ void of(const f8_eight<bf16> &e, uint32_t *w)
    {
        w[0] = e.raw[0].x & 0x7fff7fffu;
        w[1] = e.raw[0].y & 0x7fff7fffu;
        w[2] = e.raw[0].z & 0x7fff7fffu;
        w[3] = e.raw[0].w & 0x7fff7fffu;
    }
    /* Bits of the float whose magnitude is at this place of a word. */
    static __device__ __forceinline__ uint32_t bits(const uint32_t *w, int i)
    {
        return i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16;
    }
};
template <> struct f8_words<float> {
    enum { N = 8 };
    static __device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return max_u32(a, b); }
    static __device__ __forceinline__ void of(const f8_eight<float> &e, uint32_t *w)
    {
        const uint32_t all[] = {e.raw[0].x, e.raw[0].y, e.raw[0].z, e.raw[0].w,
                                e.raw[1].x, e.raw[1].y, e.raw[1].z, e.raw[1].w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = all[i] & 0x7fffffffu;
    }
    static __device__ __forceinline__ uint32_t bits(const uint32_t *w, int i) { return w[i]; }
};

/* Largest magnitudes of a thread's values: of each of its rows (bits of floats), and of its columns (words). */
template <typename T> struct f8_most {
    uint32_t row[8], column[f8_words<T>::N];
};
template <typename T> __device__ __forceinline__ f8_most<T> f8_thread_most(const f8_eight<T> *tile)
{
    typedef f8_words<T> W;
    f8_most<T> m;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t w[W::N], all;
        W::of(tile[i], w);
        all = w[0];
#pragma unroll
        for (int k = 0; k < W::N; k++) {
            all = k > 0 ? W::larger(all, w[k]) : all;
            m.column[k] = i == 0 ? w[k] : W::larger(m.column[k], w[k]);
        }
        m.row[i] = W::N == 4 ? max_u32(all << 16, all & 0xffff0000u) : all;
    }
    return m;
}

/* The factor of a block's values, and its inverse, from the bits of the largest magnitude. */
template <enum dtype TYPE> __device__ __forceinline__ float f8_factor(uint32_t amax, float *inverse)
{
    int k = f8_exponent(__uint_as_float(amax), TYPE);
    bool finite = amax < 0x7f800000u;
    *inverse = finite ? f8_power(-k) : __uint_as_float(0x7fc00000u);
    return finite ? f8_power(k) : 1.0f;
}

/* Codes of eight values, the lowest index in the lowest byte. */
template <enum dtype TYPE> __device__ __forceinline__ uint2 f8_word(const float *v, float factor)
{
    uint2 w;
    w.x = f8_pair<TYPE>(v[0] * factor, v[1] * factor) | f8_pair<TYPE>(v[2] * factor, v[3] * factor) << 16;
    w.y = f8_pair<TYPE>(v[4] * factor, v[5] * factor) | f8_pair<TYPE>(v[6] * factor, v[7] * factor) << 16;
    return w;
}

/* How many of the thread's rows hold values: all eight in tiles that are not the last. */
__device__ __forceinline__ int f8_valid(const struct f8_out &o, int64_t r0, int64_t c0)
{
    int64_t left = o.rows - (r0 + threadIdx.x / 16 * 8);
    return c0 + threadIdx.x % 16 * 8 >= o.cols || left <= 0 ? 0 : left < 8 ? (int)left : 8;
}

/* The thread's rows of a tensor, walked one by one: past the last that holds values it stays there, and a thread
 * without values reads the tile's first. So loads need no condition and several are under way; f8_clear then clears
 * what does not count. */
template <typename T> struct f8_walk {
    const T *at;
    int64_t stride;
    int left;
    __device__ __forceinline__ f8_walk(const void *base, int64_t row_stride, int64_t r0, int64_t c0, int valid)
    {
        at = (const T *)base + (r0 + (valid > 0 ? threadIdx.x / 16 * 8 : 0)) * row_stride + c0 +
             (valid > 0 ? threadIdx.x % 16 * 8 : 0);
        stride = row_stride;
        left = valid - 1;
    }
    __device__ __forceinline__ f8_eight<T> load(int64_t column = 0) const { return f8_load(at + column); }
    __device__ __forceinline__ void next()
    {
        at += left > 0 ? stride : 0;
        left--;
    }
};
template <typename T> __device__ __forceinline__ void f8_clear(f8_eight<T> *tile, int valid)
{
    if (valid < 8)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i >= valid)
                tile[i] = f8_zeros<T>();
}

/* Row codes under a factor for each row (ROWS), or the same for all. */
template <typename T, enum dtype TYPE, int BLOCKS>
__device__ __forceinline__ void f8_rows(const f8_eight<T> *tile, const f8_most<T> &most, const struct f8_out &o,
                                        int64_t r0, int64_t c0, float common)
{
    int g = threadIdx.x / 16, c = threadIdx.x % 16, valid = f8_valid(o, r0, c0);
    int64_t row0 = r0 + 8 * g;
    uint8_t *q = o.q + row0 * o.cols + c0 + 8 * c;
    float inverse[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v[8], own = common;
        f8_floats(tile[i], v);
        if (BLOCKS == F8_ROWS)
            own = f8_factor<TYPE>(warp_max_u32(most.row[i], 16), &inverse[i]);
        if (i < valid)
            *(uint2 *)q = f8_word<TYPE>(v, own);
        q += o.cols;
    }
    if (BLOCKS != F8_ROWS || c != 0)
        return;
    float *qs = o.qs + c0 / F8_TILE * o.q_stride + row0; /* rows in fours: the stride is a multiple of that */
#pragma unroll
    for (int i = 0; i < 8; i += 4)
        if (row0 + i < o.q_stride)
            *(float4 *)(qs + i) =
                make_float4(i < valid ? inverse[i] : 0.0f, i + 1 < valid ? inverse[i + 1] : 0.0f,
                            i + 2 < valid ? inverse[i + 2] : 0.0f, i + 3 < valid ? inverse[i + 3] : 0.0f);
}

/* Factors of the tile's columns into s->factor, and their scales. */
template <typename T, enum dtype TYPE>
__device__ __forceinline__ void f8_column_factors(const f8_most<T> &most, const struct f8_out &o, int64_t r0,
                                                  int64_t c0, struct f8_shared *s)
{
    typedef f8_words<T> W;
    int c = threadIdx.x % 16, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t w[W::N];
#pragma unroll
    for (int k = 0; k < W::N; k++)
        w[k] = W::larger(most.column[k], __shfl_xor_sync(0xffffffffu, most.column[k], 16));
    if (lane < 16)
#pragma unroll
        for (int k = 0; k < W::N; k += 4)
            *(uint4 *)&s->amax[warp][W::N * c + k] = make_uint4(w[k], w[k + 1], w[k + 2], w[k + 3]);
    __syncthreads();
    if (threadIdx.x < F8_TILE) {
        int at = (int)threadIdx.x * W::N / 8;
        uint32_t all = s->amax[0][at];
        float inverse;
#pragma unroll
        for (int k = 1; k < 8; k++)
            all = W::larger(all, s->amax[k][at]);
        s->factor[threadIdx.x] = f8_factor<TYPE>(W::N == 4 ? W::bits(&all, (int)threadIdx.x % 2) : all, &inverse);
        int64_t col = c0 + threadIdx.x;
        if (col < o.t_stride)
            o.ts[r0 / F8_TILE * o.t_stride + col] = col < o.cols ? inverse : 0.0f;
    }
    __syncthreads();
}

/* Which columns of a tile a thread has: eight side by side, or (SPLIT) four in each half of the tile, so that loads and
 * stores of fp32 are contiguous over threads. Element e of either four of thread c, and the thread of a column. */
template <bool SPLIT> __device__ __forceinline__ int f8_column(int c, int half, int e)
{
    return SPLIT ? F8_TILE / 2 * half + 4 * c + e : 8 * c + 4 * half + e;
}
template <bool SPLIT> __device__ __forceinline__ int f8_owner(int column)
{
    return SPLIT ? column % (F8_TILE / 2) / 4 : column / 8;
}

/* Transposed codes: factors of columns in s->factor (ROWS), or one for all. */
template <typename T, enum dtype TYPE, int BLOCKS, bool SPLIT = false>
__device__ __forceinline__ void f8_columns(const f8_eight<T> *tile, const struct f8_out &o, int64_t r0, int64_t c0,
                                           float common, struct f8_shared *s)
{
    int g = threadIdx.x / 16, c = threadIdx.x % 16;
#pragma unroll
    for (int half = 0; half < 2; half++) { /* four columns at a time: fewer registers */
        uint32_t word[4][2];
        float4 f = BLOCKS == F8_ROWS ? *(const float4 *)&s->factor[f8_column<SPLIT>(c, half, 0)]
                                     : make_float4(common, common, common, common);
        const float factor[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
        for (int i = 0; i < 8; i += 2) { /* two rows at a time: a pair of codes of each column */
            float a[4], b[4];
            f8_half(tile[i], half, a);
            f8_half(tile[i + 1], half, b);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t two = f8_pair<TYPE>(a[e] * factor[e], b[e] * factor[e]);
                word[e][i / 4] = i % 4 == 0 ? two : word[e][i / 4] | two << 16;
            }
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            s->codes[f8_column<SPLIT>(c, half, e)][g ^ c] = make_uint2(word[e][0], word[e][1]);
    }
    __syncthreads();
    /* Sixteen rows of a column at a time; 32 columns further with each turn. */
    int pair = threadIdx.x % 8, col = threadIdx.x / 8;
    int64_t row = r0 + 16 * pair;
    uint8_t *t = o.t + (c0 + col) * o.rows + row;
#pragma unroll
    for (int k = 0; k < F8_TILE / 32; k++, col += 32, t += 32 * o.rows) {
        int swap = f8_owner<SPLIT>(col);
        uint4 v = *(const uint4 *)&s->codes[col][(2 * pair) ^ (swap & ~1)];
        if (swap & 1)
            v = make_uint4(v.z, v.w, v.x, v.y);
        if (c0 + col < o.cols && row < o.rows)
            *(uint4 *)t = v;
    }
}

/* One factor for the tile, and its scales. */
template <typename T, enum dtype TYPE>
__device__ __forceinline__ float f8_square_factor(const f8_most<T> &m, const struct f8_out &o, int64_t r0, int64_t c0,
                                                  struct f8_shared *s)
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        most = max_u32(most, m.row[i]);
    most = warp_max_u32(most, 32);
    if (threadIdx.x % 32 == 0)
        s->amax[threadIdx.x / 32][0] = most;
    __syncthreads();
    float inverse, factor;
#pragma unroll
    for (int w = 0; w < 8; w++)
        most = max_u32(most, s->amax[w][0]);
    factor = f8_factor<TYPE>(most, &inverse);
    int64_t rb = r0 / F8_TILE, cb = c0 / F8_TILE, row_blocks = (o.rows + F8_TILE - 1) / F8_TILE,
            col_blocks = (o.cols + F8_TILE - 1) / F8_TILE;
    if (o.q != NULL && threadIdx.x < 4 && (threadIdx.x == 0 || (cb == col_blocks - 1 && cb + threadIdx.x < o.q_stride)))
        o.qs[rb * o.q_stride + cb + threadIdx.x] = threadIdx.x == 0 ? inverse : 0.0f;
    if (o.t != NULL && threadIdx.x < 4 && (threadIdx.x == 0 || (rb == row_blocks - 1 && rb + threadIdx.x < o.t_stride)))
        o.ts[cb * o.t_stride + rb + threadIdx.x] = threadIdx.x == 0 ? inverse : 0.0f;
    return factor;
}

/* All of a tile that begins at [r0, c0]; values outside of the tensor are zeros. common: the factor, where blocks are
 * WHOLE. */
template <typename T, enum dtype TYPE, int BLOCKS>
__device__ __forceinline__ void f8_quantise_tile(const f8_eight<T> *tile, const struct f8_out &o, int64_t r0,
                                                 int64_t c0, float common, struct f8_shared *s)
{
    f8_most<T> most = f8_thread_most<T>(tile);
    if (BLOCKS == F8_SQUARE)
        common = f8_square_factor<T, TYPE>(most, o, r0, c0, s);
    if (BLOCKS == F8_ROWS && o.t != NULL)
        f8_column_factors<T, TYPE>(most, o, r0, c0, s);
    if (o.q != NULL)
        f8_rows<T, TYPE, BLOCKS>(tile, most, o, r0, c0, common);
    if (o.t == NULL)
        return;
    f8_columns<T, TYPE, BLOCKS>(tile, o, r0, c0, common, s);
}

/* Whether codes of this shape can be stored in tiles: whole vectors of columns, and of rows where there is a
 * transpose. */
static inline bool f8_tiles_fit(int64_t rows, int64_t cols, const void *q, const void *t)
{
    return cols % 8 == 0 && (t == NULL || rows % 16 == 0) && (uintptr_t)q % 8 == 0 && (uintptr_t)t % 16 == 0;
}
static inline struct f8_out f8_out_of(const struct tensor *q, const struct tensor *qs, const struct tensor *t,
                                      const struct tensor *ts, int64_t rows, int64_t cols, int64_t block, bool square)
{
    struct f8_out o = {};
    o.q = (uint8_t *)q->data;
    o.t = (uint8_t *)t->data;
    o.qs = (float *)qs->data;
    o.ts = (float *)ts->data;
    o.rows = rows;
    o.cols = cols;
    o.q_stride = f8_scale_stride(rows, cols, block, square);
    o.t_stride = f8_scale_stride(cols, rows, block, square);
    return o;
}

#endif
