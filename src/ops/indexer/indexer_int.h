/* What reference and fast CPU version of the indexer share: which keys a row goes over. */
#ifndef BRAID_OPS_INDEXER_INT_H
#define BRAID_OPS_INDEXER_INT_H

#include "ops/check.h"
#include "ops/indexer/indexer.h"

/* The keys of a row: entry n of a list, or key first + n. */
struct index_row {
    const int32_t *list; /* NULL: a range */
    int64_t first, count;
};

/* The keys that query i of sequence b, at index s, sees. */
static inline struct index_range index_seen(const struct tensor *doc_start, int64_t ratio, int64_t n_keys, int64_t b,
                                            int64_t i, int64_t s)
{
    int64_t doc = present(doc_start) ? ((const int32_t *)doc_start->data)[b * doc_start->stride[0] + i] : 0;
    return index_visible(s, doc, ratio, n_keys);
}

/* start: the index of query 0. */
static inline struct index_row index_row_of(const struct tensor *idx, const struct tensor *doc_start, int64_t start,
                                            int64_t ratio, int64_t n_keys, int64_t b, int64_t i)
{
    if (present(idx))
        return (struct index_row){.list = (const int32_t *)idx->data + b * idx->stride[0] + i * idx->stride[1],
                                  .count = idx->dim[2]};
    struct index_range seen = index_seen(doc_start, ratio, n_keys, b, i, start + i);
    return (struct index_row){.first = seen.first, .count = max_i64(0, seen.end - seen.first)};
}
/* Negative: no key. */
static inline int64_t index_key(const struct index_row *r, int64_t n)
{
    return r->list != NULL ? r->list[n] : r->first + n;
}
/* Most keys that a row can have; from shapes alone. */
static inline int64_t index_most(const struct tensor *idx, int64_t n_keys)
{
    return idx->rank > 0 ? idx->dim[2] : n_keys;
}

#endif
