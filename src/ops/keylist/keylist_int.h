/* What all versions of keylist share: one place of a list. */
#ifndef BRAID_OPS_KEYLIST_INT_H
#define BRAID_OPS_KEYLIST_INT_H

#include "ops/indexer/indexer.h"
#include "ops/keylist/keylist.h"

/* What a list depends on, beside its query's document and sel. */
struct keylist_rule {
    int64_t window, most, base, entries, ratio, origin;
};

/* Place k of the list of the query at token s; doc: first token of its document; sel: its selected entries or NULL. */
HOST_DEVICE static inline int32_t keylist_place(struct keylist_rule r, int64_t s, int64_t doc, const int32_t *sel,
                                                int64_t k)
{
    int64_t from = doc > 0 ? doc : 0;
    if (k < r.window) {
        int64_t first = s - r.window + 1 > from ? s - r.window + 1 : from;
        return first + k <= s && first + k >= r.origin ? (int32_t)(first + k - r.origin) : -1;
    }
    if (sel != NULL)
        return sel[k - r.window] < 0 ? -1 : (int32_t)(r.base + sel[k - r.window]);
    if (r.ratio == 0)
        return -1;
    struct index_range seen = index_visible(s, doc, r.ratio, r.entries);
    int64_t j = seen.first + k - r.window;
    return j < seen.end ? (int32_t)(r.base + j) : -1;
}

#endif
