/* keylist: which keys a query of DeepSeek-V4's attention reads, as a list for `sparse`: a window of tokens, then
 * compressed entries. Keys are one array: `base` rows of tokens, then the entries (ops/compress).
 *   idx I32 [batch, seq, window + most]. Query i sits at token s = start + i; start I64 [1] optional, else 0.
 *   places 0 .. window - 1: the tokens max(0, s - window + 1, doc_start) .. s, ascending;
 *   then base + the entries that it sees, ascending: those of sel [batch, seq, most] I32 if given (index_topk,
 *   negative:
 *   none), else all (index_visible() with n_keys = entries; the first `most` of them). The rest of either part is -1.
 *   A part of a sequence may keep fewer tokens: row 0 is token `origin`, which is not above start - window + 1 (or 0).
 *   doc_start I32 [batch, seq] optional: index of the first token of this token's document. ratio 0: no entries. */
#ifndef BRAID_OPS_KEYLIST_H
#define BRAID_OPS_KEYLIST_H

#include "ops/op.h"

#define KEYLIST_FIELDS(T, N, S, op)                                                                                    \
    T(op, doc_start, OPT, I32, "batch seq")                                                                            \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, sel, OPT_FIXED, I32, "batch seq most")                                                                       \
    T(op, idx, OUT, I32, "batch seq window+most !")                                                                    \
    N(op, int64_t, batch, 2)                                                                                           \
    N(op, int64_t, seq, 13)                                                                                            \
    N(op, int64_t, window, 4)                                                                                          \
    N(op, int64_t, most, 3)                                                                                            \
    N(op, int64_t, base, 13)                                                                                           \
    N(op, int64_t, origin, 0)                                                                                          \
    N(op, int64_t, entries, 3)                                                                                         \
    N(op, int64_t, ratio, 4)
OP_ARGS(keylist, KEYLIST_FIELDS);
/* An error if queries are no tokens among the keys or sel names no entry; host memory. A GPU, which cannot refuse,
 * writes lists that `sparse` takes for none. */
int keylist_values_check(const struct keylist_args *a, struct err *e);

#endif
