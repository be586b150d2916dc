/* compress: one key-value entry for every window of `ratio` tokens, a gated mean of each channel (the compressors of
 * DeepSeek-V4's attention).
 *   x, z [B, S, C] real, strided: values and gates; ape [ratio, C] wide: added to the gates by place in the window.
 *   D = C, or with overlap C / 2: then an entry also takes from the window before its own, whose tokens have their
 *   share in the first D channels and the entry's own tokens in the last D.
 *     y[j, c] = sum_i p_i x[i, c'],  p = softmax over i of z[i, c'] + ape[place of i, c']
 *   over the tokens of the window before (overlap, c' = c), then of the own window (c' = c, with overlap D + c).
 *   A document's windows begin at its first token; what does not fill a window is in no entry. doc_start I32 [B, S]
 *   optional: index of the first token of this token's document; absent: one document. Nothing crosses documents.
 *   Entry j, j < E = S / ratio rounded down, is that of the window whose last token is one of ratio j .. ratio (j + 1)
 *   - 1, where there is one (never two; without documents always); else y is 0. So the entries of a document that
 *   begins at token f lie one after the other from ceil(f / ratio) on: index_visible() of ops/indexer says which of
 *   them a query sees.
 *   pos I32 [B, S] optional: positions of tokens; at I32 [B, E]: that of a window's first token, 0 where there is none.
 *   A part of a sequence: x, z are the tokens from `start` on, a multiple of ratio, doc_start counts tokens of the
 *   whole sequence, and past [B, W, 2 C] real, which start > 0 needs, holds [x | z] of the W = ratio (with overlap 2
 *   ratio) tokens before, token t in row t % W. Row k of y is entry start / ratio + k. Positions of a window follow
 *   each other.
 * backward: dx = p dy, dz = p dy (x - y), dape = the sum of dz over windows, in blocks of compress_block() entries in
 *   order. Tokens of no entry get 0. dpast [B, W, 2 C] = [dx | dz] of the tokens before. No aliasing.
 *
 * compress_step: the same while decoding: x, z are the tokens from start[0] on, and past [B, W, 2 C] real holds [x | z]
 *   of the last W = ratio (with overlap 2 ratio) tokens, token t in row t % W; it is updated. Row k of y, k < ceil(S /
 *   ratio), is entry start / ratio + k, 0 while its window is not complete. One document. */
#ifndef BRAID_OPS_COMPRESS_H
#define BRAID_OPS_COMPRESS_H

#include "ops/op.h"

#define COMPRESS_FWD_FIELDS(T, N, S, op)                                                                               \
    T(op, x, IN, REAL, "b s c")                                                                                        \
    T(op, z, IN, REAL, "b s c")                                                                                        \
    T(op, ape, IN, WIDE, "ratio c")                                                                                    \
    T(op, pos, OPT_FIXED, I32, "b s")                                                                                  \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, past, OPT, REAL, "b kept 2*c")                                                                               \
    T(op, y, OUT, REAL, "b e d")                                                                                       \
    T(op, at, OPT_SAVED, I32, "b e ! @pos")                                                                            \
    N(op, int64_t, start, 0)                                                                                           \
    N(op, int64_t, ratio, 4)                                                                                           \
    N(op, bool, overlap, 1)
OP_ARGS(compress_fwd, COMPRESS_FWD_FIELDS);
#define COMPRESS_BWD_FIELDS(T, N, S, op)                                                                               \
    T(op, dy, IN, REAL, "b e d")                                                                                       \
    T(op, x, IN, REAL, "b s c")                                                                                        \
    T(op, z, IN, REAL, "b s c")                                                                                        \
    T(op, ape, IN, WIDE, "ratio c")                                                                                    \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, past, OPT, REAL, "b kept 2*c")                                                                               \
    T(op, dx, OUT, REAL, "b s c")                                                                                      \
    T(op, dz, OUT, REAL, "b s c")                                                                                      \
    T(op, dpast, OPT_OUT, REAL, "b kept 2*c @past")                                                                    \
    T(op, dape, SUM, WIDE, "ratio c")                                                                                  \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, start, 0)                                                                                           \
    N(op, int64_t, ratio, 4)                                                                                           \
    N(op, bool, overlap, 1)
OP_ARGS(compress_bwd, COMPRESS_BWD_FIELDS);
#define COMPRESS_STEP_FIELDS(T, N, S, op)                                                                              \
    T(op, x, IN, REAL, "b s c")                                                                                        \
    T(op, z, IN, REAL, "b s c")                                                                                        \
    T(op, ape, IN, WIDE, "ratio c")                                                                                    \
    T(op, pos, OPT_FIXED, I32, "b s")                                                                                  \
    T(op, start, FIXED, I64, "1")                                                                                      \
    T(op, past, STATE, REAL, "b kept 2*c")                                                                             \
    T(op, y, OUT, REAL, "b e d")                                                                                       \
    T(op, at, OPT_SAVED, I32, "b e ! @pos")                                                                            \
    N(op, int64_t, ratio, 4)                                                                                           \
    N(op, bool, overlap, 1)
OP_ARGS(compress_step, COMPRESS_STEP_FIELDS);

/* The window of an entry: its tokens are first .. first + ratio - 1; first -1: there is none. */
struct compress_window {
    int64_t first;
    bool before; /* the window before it is of the same document */
};
/* doc: doc_start of the tokens from `start` on, or NULL; j: counted over the whole sequence. Of the tokens ratio j ..
 * ratio (j + 1) - 1 only the document of the first can end a window: a later one is too short by then. */
HOST_DEVICE static inline struct compress_window compress_window_of(const int32_t *doc, int64_t start, int64_t j,
                                                                    int64_t ratio)
{
    int64_t t = j * ratio, at = doc == NULL ? 0 : doc[t - start], begin = at < 0 ? 0 : at < t ? at : t;
    int64_t first = t - (t - begin) % ratio, last = first + ratio - 1;
    struct compress_window w = {first, first - ratio >= begin};
    if (doc != NULL && (doc[last - start] < 0 ? 0 : doc[last - start]) != begin)
        w.first = -1;
    return w;
}
/* The same while decoding n tokens from `start` on. */
HOST_DEVICE static inline struct compress_window compress_step_window(int64_t j, int64_t ratio, int64_t start,
                                                                      int64_t n)
{
    struct compress_window w = {j * ratio + ratio <= start + n ? j * ratio : -1, j > 0};
    return w;
}
/* The position of a window's first token, counted from its last, which is one of the tokens of the call; host memory.
 * */
static inline int32_t compress_position(const struct tensor *pos, struct compress_window w, int64_t b, int64_t ratio,
                                        int64_t start)
{
    if (w.first < 0)
        return 0;
    int64_t last = w.first + ratio - 1 - start;
    return (int32_t)(((const int32_t *)pos->data)[b * pos->stride[0] + last] - (ratio - 1));
}
/* An error if tokens from start[0] on cannot be counted; host memory. */
int compress_start_check(int64_t start, int64_t n, struct err *e);
/* Entries whose share of dape one block adds up. */
HOST_DEVICE static inline int64_t compress_block(int64_t ratio) { return ratio >= 32 ? 4 : 128 / ratio; }

#endif
