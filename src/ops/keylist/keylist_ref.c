/* keylist, reference; see keylist.h. */
#include "ops/keylist/keylist_int.h"
#include "ops/ops_ref_int.h"

int keylist_ref(struct lane *l, const struct keylist_args *a)
{
    TRY(keylist_check(a, l->err));
    TRY(keylist_values_check(a, l->err));
    struct keylist_rule rule = {a->window, a->most, a->base, a->entries, a->ratio, a->origin};
    int64_t start = index_start(&a->start), width = a->window + a->most;
    for (int64_t r = 0; r < a->batch * a->seq; r++) {
        int64_t b = r / a->seq, i = r % a->seq;
        int64_t doc = present(&a->doc_start) ? ((const int32_t *)a->doc_start.data)[b * a->doc_start.stride[0] + i] : 0;
        const int32_t *sel = present(&a->sel) ? (const int32_t *)a->sel.data + row_offset(&a->sel, r) : NULL;
        for (int64_t k = 0; k < width; k++)
            ((int32_t *)a->idx.data)[r * width + k] = keylist_place(rule, start + i, doc, sel, k);
    }
    return ST_OK;
}
