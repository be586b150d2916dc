/* The small matrix products and transposes that blocked ops on the CPU are made of (attention, the state
 * space scan, the delta rule); only for *_cpu.c, compiled once per instruction set.
 *
 * In attention scores are held transposed, [key][query], so that a vector register holds one key against VL
 * queries. Then the softmax runs down the registers (no sums across lanes), K and V are read as
 * they lie in memory (one scalar, broadcast), and only Q, dO and dQ are ever transposed. */
#ifndef BRAID_OPS_CPU_TILE_H
#define BRAID_OPS_CPU_TILE_H

#include "ops/ops_cpu_int.h"

#if defined(__AVX512F__)
enum { VL = 16, TILE_ROWS = 8 };
#elif defined(__AVX__)
enum { VL = 8, TILE_ROWS = 4 };
#else
enum { VL = 4, TILE_ROWS = 4 };
#endif
enum {
    TILE_COLS = 2,          /* vectors: TILE_ROWS x TILE_COLS accumulators stay in registers */
    PANEL = TILE_COLS * VL, /* queries that go through the softmax together */
    QUERY_BLOCK = 64,
    KEY_BLOCK = 64,
    PANELS = QUERY_BLOCK / PANEL,
};

typedef float vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vec_mask __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

static inline vec vec_choose(vec_mask which, vec yes, vec no)
{
    return (vec)((which & (vec_mask)yes) | (~which & (vec_mask)no));
}
static inline vec vec_max(vec a, vec b) { return vec_choose(a > b, a, b); }

/* fast_expf of cpu_math.h in explicit vectors: loops over one panel are so short that compilers
 * unroll them before they would vectorise them. Arguments above 88 saturate, below -87.3 give
 * 1e-38; NaN stays NaN. */
static inline vec vec_exp(vec x)
{
    const vec least = (vec){0} - 87.33654f, most = (vec){0} + 88.0f;
    x = vec_choose(x < least, least, x);
    x = vec_choose(x > most, most, x);
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* round to nearest */
    vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r) + 1.0f;
    /* n is a whole number, |n| < 2^22: adding 1.5 * 2^23 leaves it in the low bits. */
    vec_mask exponent = (vec_mask)(n + 12582912.0f) - 0x4B400000 + 127;
    return p * (vec)(exponent << 23);
}

/* out[r][c] (+)= sum_i a[r * a_row + i * a_step] * b[i * b_row + c] */
struct product {
    const float *a, *b;
    float *out;
    int64_t a_row, a_step, b_row, out_row;
    int64_t rows, cols, depth;
    bool add;
};

static inline __attribute__((always_inline)) void tile(const struct product *p, int64_t row, int64_t col, int n_rows,
                                                       int n_cols)
{
    const float *a = p->a + row * p->a_row, *b = p->b + col;
    float *out = p->out + row * p->out_row + col;
    int64_t a_row = p->a_row, a_step = p->a_step, b_row = p->b_row, depth = p->depth;
    vec sum[TILE_ROWS][TILE_COLS];
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < n_cols; c++)
            sum[r][c] = p->add ? *(const vec *)(out + r * p->out_row + c * VL) : (vec){0};
    for (int64_t i = 0; i < depth; i++) {
        vec x[TILE_COLS];
        for (int c = 0; c < n_cols; c++)
            x[c] = *(const vec *)(b + c * VL);
        for (int r = 0; r < n_rows; r++)
            for (int c = 0; c < n_cols; c++)
                sum[r][c] += a[r * a_row] * x[c];
        a += a_step;
        b += b_row;
    }
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < n_cols; c++)
            *(vec *)(out + r * p->out_row + c * VL) = sum[r][c];
}

/* Columns beyond a whole vector: only heads whose width is no multiple of VL have them. */
static inline void tile_tail(const struct product *p, int64_t col)
{
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t c = col; c < p->cols; c++) {
            float sum = p->add ? p->out[r * p->out_row + c] : 0.0f;
            for (int64_t i = 0; i < p->depth; i++)
                sum += p->a[r * p->a_row + i * p->a_step] * p->b[i * p->b_row + c];
            p->out[r * p->out_row + c] = sum;
        }
}

static inline void multiply(const struct product *p)
{
    int64_t col = 0, row;
    for (; col + PANEL <= p->cols; col += PANEL) {
        for (row = 0; row + TILE_ROWS <= p->rows; row += TILE_ROWS)
            tile(p, row, col, TILE_ROWS, TILE_COLS);
        for (; row < p->rows; row++)
            tile(p, row, col, 1, TILE_COLS);
    }
    for (; col + VL <= p->cols; col += VL) {
        for (row = 0; row + TILE_ROWS <= p->rows; row += TILE_ROWS)
            tile(p, row, col, TILE_ROWS, 1);
        for (; row < p->rows; row++)
            tile(p, row, col, 1, 1);
    }
    if (col < p->cols)
        tile_tail(p, col);
}

/* out[c][r] = in[r][c] * scale, for rows x cols floats. */
static inline void transpose(float *out, int64_t out_row, const float *in, int64_t in_row, int64_t rows, int64_t cols,
                             float scale)
{
    int64_t r = 0, c;
    for (; r + 4 <= rows; r += 4) {
        for (c = 0; c + 4 <= cols; c += 4) {
            const float *at = in + r * in_row + c;
            float *to = out + c * out_row + r;
            vec4 a = *(const vec4 *)at * scale, b = *(const vec4 *)(at + in_row) * scale;
            vec4 d = *(const vec4 *)(at + 2 * in_row) * scale, e = *(const vec4 *)(at + 3 * in_row) * scale;
            vec4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            vec4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            vec4 de_low = __builtin_shufflevector(d, e, 0, 4, 1, 5);
            vec4 de_high = __builtin_shufflevector(d, e, 2, 6, 3, 7);
            *(vec4 *)to = __builtin_shufflevector(ab_low, de_low, 0, 1, 4, 5);
            *(vec4 *)(to + out_row) = __builtin_shufflevector(ab_low, de_low, 2, 3, 6, 7);
            *(vec4 *)(to + 2 * out_row) = __builtin_shufflevector(ab_high, de_high, 0, 1, 4, 5);
            *(vec4 *)(to + 3 * out_row) = __builtin_shufflevector(ab_high, de_high, 2, 3, 6, 7);
        }
        for (; c < cols; c++)
            for (int k = 0; k < 4; k++)
                out[c * out_row + r + k] = in[(r + k) * in_row + c] * scale;
    }
    for (; r < rows; r++)
        for (c = 0; c < cols; c++)
            out[c * out_row + r] = in[r * in_row + c] * scale;
}

/* ---- one block of queries and the keys it sees ----------------------------------------------- */

/* What each query of the block sees: keys low..high (counted from the first of the call, inclusive). Lanes past the
 * last query repeat nothing and see everything: they compute finite values that are never read. */
struct queries {
    int64_t first, count; /* query indices */
    int32_t low[QUERY_BLOCK], high[QUERY_BLOCK];
    int32_t low_min, high_max; /* over the block; low_min > high_max: no key at all */
};

struct mask {
    const struct tensor *doc_start; /* absent: one document */
    int64_t start, window;          /* start: index of the first query, counted from the first key */
    int64_t before, keys;           /* keys in front of the first, which documents are counted from; keys of the call */
};

static inline void queries_init(struct queries *q, const struct mask *m, int64_t batch, int64_t block, int64_t n)
{
    q->first = block * QUERY_BLOCK;
    q->count = min_i64(QUERY_BLOCK, n - q->first);
    q->low_min = INT32_MAX;
    q->high_max = -1;
    const int32_t *doc = NULL;
    if (present(m->doc_start))
        doc = (const int32_t *)m->doc_start->data + batch * m->doc_start->stride[0];
    for (int64_t i = 0; i < QUERY_BLOCK; i++) {
        int64_t at = m->start + q->first + i, low = m->window > 0 ? max_i64(0, at - m->window + 1) : 0;
        if (i < q->count && doc != NULL)
            low = max_i64(low, doc[q->first + i] - m->before);
        int64_t high = min_i64(at, m->keys - 1);
        q->low[i] = i < q->count ? (int32_t)low : 0;
        q->high[i] = i < q->count ? (int32_t)high : INT32_MAX;
        if (i < q->count && low <= high) {
            q->low_min = (int32_t)min_i64(q->low_min, low);
            q->high_max = (int32_t)max_i64(q->high_max, high);
        }
    }
}

/* The keys of block [key, key + n) that a panel of queries needs, in whole tiles; `whole` when
 * every query sees every one of them, so that no mask is needed. */
struct span {
    int64_t from, to; /* relative to key; from >= to: nothing to do */
    bool whole;
};

static inline struct span panel_span(const struct queries *q, int panel, int64_t key, int64_t n)
{
    int64_t low_min = INT32_MAX, low_max = 0, high_min = INT32_MAX, high_max = -1;
    for (int64_t i = panel * PANEL; i < min_i64(q->count, (panel + 1) * PANEL); i++) {
        if (q->low[i] <= q->high[i]) {
            low_min = min_i64(low_min, q->low[i]);
            high_max = max_i64(high_max, q->high[i]);
        }
        low_max = max_i64(low_max, q->low[i]);
        high_min = min_i64(high_min, q->high[i]);
    }
    struct span s = {.from = max_i64(0, low_min - key) / TILE_ROWS * TILE_ROWS,
                     .to = min_i64(n, round_up(max_i64(0, high_max - key + 1), TILE_ROWS))};
    s.whole = low_max <= key + s.from && high_min >= key + s.to - 1;
    return s;
}

/* Which of VL queries (from `lane` on) see this key. */
static inline vec_mask sees(const struct queries *q, int64_t lane, int64_t key)
{
    vec_mask at = (vec_mask){0} + (int32_t)key;
    return (*(const vec_mask *)(q->low + lane) <= at) & (*(const vec_mask *)(q->high + lane) >= at);
}

/* Carve aligned floats out of scratch. */
static inline float *take(float **at, int64_t n)
{
    float *p = *at;
    *at += round_up(n, VL);
    return p;
}
static inline float *align_floats(void *p) { return (float *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

static inline float *head_at(const struct tensor *t, int64_t b, int64_t row, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + row * t->stride[1] + head * t->stride[2];
}

#endif
