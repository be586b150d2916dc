/* What the chunked scans on the CPU share (ssd, gdn): rows in scratch memory, where documents begin, and the decay
 * between the rows of a chunk, e^(s_i - s_j), with s the running sum of the log decays; only for *_cpu.c, compiled once
 * per instruction set.
 *
 * Square matrices are held transposed, [j][i] with the later row i in the lanes, and only the blocks of BLOCK x BLOCK
 * on and beyond the diagonal are ever touched. Rows and channels are padded with zeros to whole blocks. */
#ifndef BRAID_OPS_CPU_CHUNK_H
#define BRAID_OPS_CPU_CHUNK_H

#include "ops/cpu_tile.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 16 };
_Static_assert(BLOCK % VL == 0, "a block is whole vectors");

/* Up to this many rows the recurrence itself beats a chunk padded to a block: decoding. */
enum { FEW_ROWS = 4 };

/* Copy n rows of `width` floats and clear up to `pad` rows of `wide`. */
static inline void pack_rows(float *out, int64_t out_row, const float *in, int64_t in_row, int64_t n, int64_t width,
                             int64_t pad, int64_t wide)
{
    for (int64_t i = 0; i < pad; i++) {
        int64_t have = i < n ? width : 0;
        if (have > 0)
            memcpy(out + i * out_row, in + i * in_row, (size_t)have * sizeof(float));
        memset(out + i * out_row + have, 0, (size_t)(wide - have) * sizeof(float));
    }
}

static inline void copy_rows(float *out, int64_t out_row, const float *in, int64_t in_row, int64_t rows, int64_t cols)
{
    pack_rows(out, out_row, in, in_row, rows, cols, rows, cols);
}

/* out = rows of `in`, each times its factor. */
static inline void scale_rows(float *out, const float *in, int64_t row, const float *factor, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c += VL)
            *(vec *)(out + i * row + c) = *(const vec *)(in + i * row + c) * factor[i];
}

static inline bool all_zero(const float *in, int64_t row, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < cols; c++)
            if (in[i * row + c] != 0)
                return false;
    return true;
}

static inline float lanes_sum(vec v)
{
    float sum = 0;
    for (int i = 0; i < VL; i++)
        sum += v[i];
    return sum;
}

static inline float dot(const float *a, const float *b, int64_t n)
{
    vec sum = {0};
    for (int64_t c = 0; c < n; c += VL)
        sum += *(const vec *)(a + c) * *(const vec *)(b + c);
    return lanes_sum(sum);
}

/* out[j][i] = rows[j] . columns[:, i] for the blocks on and beyond the diagonal; columns and out have rows of c_row. */
static inline void multiply_triangle(float *out, int64_t c_row, int64_t pad, const float *rows, int64_t row,
                                     const float *columns, int64_t depth)
{
    for (int64_t lane = 0; lane < pad; lane += PANEL) {
        int64_t cols = min_i64(PANEL, pad - lane);
        multiply(&(struct product){.a = rows,
                                   .a_row = row,
                                   .a_step = 1,
                                   .b = columns + lane,
                                   .b_row = c_row,
                                   .out = out + lane,
                                   .out_row = c_row,
                                   .rows = round_up(lane + cols, BLOCK),
                                   .cols = cols,
                                   .depth = depth});
    }
}

/* ---- rows of a chunk, and their decay -------------------------------------------------------- */

struct chunk_rows {
    int64_t batch, first, n, pad; /* rows, and rows padded to whole blocks */
    int32_t *low;                 /* [pad]: first row of the chunk that this row's document shares; -1: began before */
    bool documents;               /* some low is not -1 */
};

static inline void chunk_rows_set(struct chunk_rows *r, int64_t batch, int64_t index, int64_t chunk, int64_t rows,
                                  const struct tensor *doc_start)
{
    int32_t low = -1;
    r->batch = batch;
    r->first = index * chunk;
    r->n = min_i64(chunk, rows - r->first);
    r->pad = round_up(r->n, BLOCK);
    r->documents = false;
    for (int64_t i = 0; i < r->pad; i++) {
        if (i < r->n && present(doc_start)) {
            const int32_t *doc = (const int32_t *)doc_start->data + batch * doc_start->stride[0];
            if (doc[r->first + i] == r->first + i)
                low = (int32_t)i;
        }
        r->low[i] = low;
        r->documents = r->documents || low >= 0;
    }
}

struct decay {
    float *s, *s_rest; /* [pad]: running sum of log decays as a high and a low part: their differences stay exact */
    float *from_start; /* [pad]: e^(s_i), how much of the incoming state row i sees; 0 if a document began */
    float *to_end;     /* [pad]: e^(s_end - s_i), how much of row i the outgoing state holds; 0 if one begins */
    float whole;       /* e^(s_end) */
};
enum { DECAY_ARRAYS = 4 };

static inline void decay_take(struct decay *d, int64_t rows, float **at)
{
    d->s = take(at, rows);
    d->s_rest = take(at, rows);
    d->from_start = take(at, rows);
    d->to_end = take(at, rows);
}

/* From s to the ends of the chunk. */
static inline void decay_ends(struct decay *d, const struct chunk_rows *r)
{
    int32_t last = r->low[r->pad - 1];
    float end = d->s[r->pad - 1], end_rest = d->s_rest[r->pad - 1];
    for (int64_t i = 0; i < r->pad; i += VL) {
        vec s = *(const vec *)(d->s + i), rest = *(const vec *)(d->s_rest + i);
        *(vec *)(d->from_start + i) = vec_exp(s + rest);
        *(vec *)(d->to_end + i) = vec_exp((end - s) + (end_rest - rest));
    }
    for (int64_t i = 0; r->documents && i < r->pad; i++) {
        d->from_start[i] = r->low[i] < 0 ? d->from_start[i] : 0.0f;
        d->to_end[i] = i >= last ? d->to_end[i] : 0.0f;
    }
    d->whole = last < 0 ? expf(end + end_rest) : 0.0f;
}

/* Lanes i .. i+VL-1 of row j: e^(s_i - s_j) where row i sees row j, else 0. */
static inline vec decay_lanes(const struct decay *d, const struct chunk_rows *r, int64_t j, int64_t i)
{
    vec s = (*(const vec *)(d->s + i) - d->s[j]) + (*(const vec *)(d->s_rest + i) - d->s_rest[j]);
    vec e = vec_exp(vec_choose(s < (vec){0}, s, (vec){0}));
    if (i < j) { /* the vector that crosses the diagonal */
        vec_mask lane;
        for (int v = 0; v < VL; v++)
            lane[v] = (int32_t)(i + v);
        e = vec_choose(lane >= (vec_mask){0} + (int32_t)j, e, (vec){0});
    }
    if (r->documents)
        e = vec_choose(*(const vec_mask *)(r->low + i) <= (vec_mask){0} + (int32_t)j, e, (vec){0});
    return e;
}

/* ---- states and sums ------------------------------------------------------------------------- */

/* The state of (batch, head) in a tensor [B, H, rows, cols]. */
static inline float *state_at(const struct tensor *t, int64_t b, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + head * t->stride[1];
}
/* The state that enters a chunk, in a tensor [B, chunks, H, rows, cols]. */
static inline float *entering(const struct tensor *t, int64_t b, int64_t index, int64_t head)
{
    return (float *)t->data + b * t->stride[0] + index * t->stride[1] + head * t->stride[2];
}

/* out[head] = (out[head] +) the sums of [batch][heads][n] at `which`, over the batch in order. */
static inline void add_batches(const struct tensor *out, const float *sums, int64_t batch, int64_t heads, int n,
                               int which, bool add)
{
    for (int64_t h = 0; present(out) && h < heads; h++) {
        float sum = add ? ((float *)out->data)[h] : 0.0f;
        for (int64_t b = 0; b < batch; b++)
            sum += sums[(b * heads + h) * n + which];
        ((float *)out->data)[h] = sum;
    }
}

#endif
