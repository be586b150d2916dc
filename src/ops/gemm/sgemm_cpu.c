/* Matrix products in register tiles, on one thread; see ops/cpu_gemm.h, which decides when they are used.
 *
 * C is computed in tiles of TILE_ROWS x TILE_COLS sums that stay in registers. B is packed, one panel of
 * TILE_COLS columns and at most PANEL_DEPTH rows at a time, on the stack: it is read once for every tile of
 * rows, and in order. A is not packed: a tile reads its rows (or, transposed, its columns) where they lie, and
 * prefetches ahead, which beats a packed copy at the shapes of layers. Blocks of ROW_BLOCK rows let the rows
 * of A stay in the second-level cache from one panel to the next.
 *
 * Every element is the sum over k in order, cut into blocks that depend on k alone; each lane of each kind of
 * tile adds in that same order. So neither the cut into threads nor the place in a tile changes a bit. */
#include "ops/cpu_gemm.h"

#if SGEMM_TILES

#include <stdalign.h>
#include <string.h>

#if defined(__AVX512F__)
enum { VL = 16, TILE_ROWS = 8 }; /* 12 or 14 rows fill more registers but measured slower */
#else
enum { VL = 8, TILE_ROWS = 6 };
#endif
enum {
    TILE_COLS = 2 * VL,
    PANEL_DEPTH = 384,
    ROW_BLOCK = TILE_ROWS * 128,
    LINE = 16,        /* floats of a cache line */
    STEPS_AHEAD = 16, /* of prefetches along a transposed A */
};

typedef float vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

/* Unrolled loops over sums[][]: a loop left rolled would put the sums into memory. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

/* One tile: c[r][j] = alpha * sum_i a[r * a_row + i * a_step] * panel[i][j] + beta * c[r][j] */
struct tile {
    const float *a, *panel;
    int64_t a_row, a_step, depth;
    float *c;
    int64_t ldc;
    float alpha, beta;
};

INLINE void store(const struct tile *t, vec sums[TILE_ROWS][2], int rows)
{
    float *c = t->c;
    int64_t ldc = t->ldc;
    float alpha = t->alpha, beta = t->beta;
    if (beta == 0) { /* C may hold anything, so it is not read */
        UNROLL for (int r = 0; r < rows; r++)
        {
            *(vec *)(c + r * ldc) = alpha * sums[r][0];
            *(vec *)(c + r * ldc + VL) = alpha * sums[r][1];
        }
        return;
    }
    UNROLL for (int r = 0; r < rows; r++)
    {
        vec *low = (vec *)(c + r * ldc), *high = (vec *)(c + r * ldc + VL);
        *low = alpha * sums[r][0] + beta * *low;
        *high = alpha * sums[r][1] + beta * *high;
    }
}

/* Prefetches run past the matrix at its end: they never fault. By rows, a cache line lasts LINE steps and the
 * next tile's lines are asked for; by columns every step begins a line, so the same columns further on. */
INLINE void compute(const struct tile *t, int64_t a_row, int64_t a_step, int rows)
{
    const float *a = t->a, *b = t->panel;
    vec sums[TILE_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++)
    {
        sums[r][0] = sums[r][1] = (vec){0};
        __builtin_prefetch(t->c + r * t->ldc, 1);
        __builtin_prefetch(t->c + r * t->ldc + TILE_COLS - 1, 1);
    }
    for (int64_t from = 0; from < t->depth; from += LINE) {
        int64_t n = min_i64(LINE, t->depth - from);
        if (a_step == 1) {
            UNROLL for (int r = 0; r < rows; r++) __builtin_prefetch(a + (r + TILE_ROWS) * a_row, 0, 2);
        }
        for (int64_t i = 0; i < n; i++) {
            if (a_step != 1)
                __builtin_prefetch(a + STEPS_AHEAD * a_step);
            vec low = *(const vec *)b, high = *(const vec *)(b + VL);
            UNROLL for (int r = 0; r < rows; r++)
            {
                sums[r][0] += a[r * a_row] * low;
                sums[r][1] += a[r * a_row] * high;
            }
            a += a_step;
            b += TILE_COLS;
        }
    }
    store(t, sums, rows);
}

/* Functions of their own, not inlined: with the loops around them compilers run out of registers. */
static __attribute__((noinline)) void tile_by_rows(const struct tile *t) { compute(t, t->a_row, 1, TILE_ROWS); }
static __attribute__((noinline)) void tile_by_cols(const struct tile *t) { compute(t, 1, t->a_step, TILE_ROWS); }
static __attribute__((noinline)) void tile_of_4(const struct tile *t) { compute(t, t->a_row, t->a_step, 4); }
static __attribute__((noinline)) void tile_of_1(const struct tile *t) { compute(t, t->a_row, t->a_step, 1); }

static void tile_of(const struct tile *whole, int64_t rows)
{
    struct tile t = *whole;
    if (rows == TILE_ROWS) {
        if (t.a_step == 1)
            tile_by_rows(&t);
        else
            tile_by_cols(&t);
        return;
    }
    while (rows > 0) {
        int64_t n = rows >= 4 ? 4 : 1;
        if (n == 4)
            tile_of_4(&t);
        else
            tile_of_1(&t);
        t.a += n * t.a_row;
        t.c += n * t.ldc;
        rows -= n;
    }
}

/* The last columns go through a whole tile aside: the same operations, so the same bits, as inside. */
static void tile_at_edge(const struct tile *whole, int64_t rows, int64_t cols)
{
    alignas(64) float aside[TILE_ROWS * TILE_COLS] = {0};
    struct tile t = *whole;
    t.c = aside;
    t.ldc = TILE_COLS;
    for (int64_t r = 0; whole->beta != 0 && r < rows; r++)
        memcpy(aside + r * TILE_COLS, whole->c + r * whole->ldc, (size_t)cols * sizeof *aside);
    tile_of(&t, rows);
    for (int64_t r = 0; r < rows; r++)
        memcpy(whole->c + r * whole->ldc, aside + r * TILE_COLS, (size_t)cols * sizeof *aside);
}

/* ---- packing --------------------------------------------------------------------------------- */

/* panel[i][j] = in[i][j]. The next panel lies beside this one: it is asked for now. */
static void pack_rows(float *panel, const float *in, int64_t ld, int64_t depth, int64_t cols)
{
    for (int64_t i = 0; i < depth; i++, in += ld, panel += TILE_COLS) {
        for (int64_t j = 0; j < TILE_COLS; j += LINE)
            __builtin_prefetch(in + TILE_COLS + j, 0, 2);
        if (cols == TILE_COLS)
            memcpy(panel, in, TILE_COLS * sizeof *panel);
        else
            memcpy(panel, in, (size_t)cols * sizeof *panel);
    }
}

INLINE void transpose_4x4(float *to, const float *at, int64_t ld)
{
    vec4 a = *(const vec4 *)at, b = *(const vec4 *)(at + ld);
    vec4 c = *(const vec4 *)(at + 2 * ld), d = *(const vec4 *)(at + 3 * ld);
    vec4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    vec4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(vec4 *)to = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
    *(vec4 *)(to + TILE_COLS) = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
    *(vec4 *)(to + 2 * TILE_COLS) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
    *(vec4 *)(to + 3 * TILE_COLS) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/* panel[i][j] = in[j][i] */
static void pack_cols(float *panel, const float *in, int64_t ld, int64_t depth, int64_t cols)
{
    int64_t j = 0, i;
    for (; j + 4 <= cols; j += 4) {
        for (i = 0; i + 4 <= depth; i += 4)
            transpose_4x4(panel + i * TILE_COLS + j, in + j * ld + i, ld);
        for (; i < depth; i++)
            for (int64_t k = j; k < j + 4; k++)
                panel[i * TILE_COLS + k] = in[k * ld + i];
    }
    for (; j < cols; j++)
        for (i = 0; i < depth; i++)
            panel[i * TILE_COLS + j] = in[j * ld + i];
}

static void pack(float *panel, const struct sgemm *g, int64_t row, int64_t col, int64_t depth, int64_t cols)
{
    if (cols < TILE_COLS) /* sums of the columns that are not there are thrown away, but must not be slow */
        memset(panel, 0, (size_t)(depth * TILE_COLS) * sizeof *panel);
    if (g->trans_b)
        pack_cols(panel, g->b + col * g->ldb + row, g->ldb, depth, cols);
    else
        pack_rows(panel, g->b + row * g->ldb + col, g->ldb, depth, cols);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Rows first .. first + rows, and depth steps from `at` on, into C. */
static void multiply_block(const struct sgemm *g, int64_t first, int64_t rows, int64_t at, int64_t depth)
{
    alignas(64) float panel[PANEL_DEPTH * TILE_COLS];
    int64_t a_row = g->trans_a ? 1 : g->lda, a_step = g->trans_a ? g->lda : 1;
    for (int64_t j = 0; j < g->n; j += TILE_COLS) {
        int64_t cols = min_i64(TILE_COLS, g->n - j);
        pack(panel, g, at, j, depth, cols);
        struct tile t = {.panel = panel,
                         .a_row = a_row,
                         .a_step = a_step,
                         .depth = depth,
                         .ldc = g->ldc,
                         .alpha = g->alpha,
                         .beta = at == 0 ? g->beta : 1};
        for (int64_t i = first; i < first + rows; i += TILE_ROWS) {
            int64_t n = min_i64(TILE_ROWS, first + rows - i);
            t.a = g->a + i * a_row + at * a_step;
            t.c = g->c + i * g->ldc + j;
            if (cols == TILE_COLS)
                tile_of(&t, n);
            else
                tile_at_edge(&t, n, cols);
        }
    }
}

void CPU_NAME(sgemm_tiles)(const struct sgemm *g)
{
    /* Even blocks: a short last one would pay for a whole pass over C. */
    int64_t depth = round_up(ceil_div(g->k, ceil_div(g->k, PANEL_DEPTH)), 4);
    int64_t rows = round_up(ceil_div(g->m, ceil_div(g->m, ROW_BLOCK)), TILE_ROWS);
    for (int64_t i = 0; i < g->m; i += rows)
        for (int64_t at = 0; at < g->k; at += depth)
            multiply_block(g, i, min_i64(rows, g->m - i), at, min_i64(depth, g->k - at));
}

#else

void CPU_NAME(sgemm_tiles)(const struct sgemm *g) { sgemm_blas(g); }

#endif
