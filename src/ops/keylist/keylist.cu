/* keylist, CUDA version; see keylist.h. A thread for each place of a list. */
#include "ops/cuda/kernel.cuh"
#include "ops/keylist/keylist_int.h"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    fill_lists(int32_t *idx, const int32_t *doc, int64_t doc_batch, const int32_t *sel, int64_t sel_batch,
               int64_t sel_row, const int64_t *start, int64_t seq, int64_t total, struct keylist_rule rule)
{
    int64_t x = (int64_t)blockIdx.x * THREADS + threadIdx.x, width = rule.window + rule.most;
    if (x >= total)
        return;
    int64_t r = x / width, b = r / seq, i = r % seq;
    idx[x] = keylist_place(rule, (start != NULL ? *start : 0) + i, doc != NULL ? doc[b * doc_batch + i] : 0,
                           sel != NULL ? sel + b * sel_batch + i * sel_row : NULL, x % width);
}

extern "C" int keylist_cuda(struct lane *l, const struct keylist_args *a)
{
    TRY(keylist_check(a, l->err));
    struct keylist_rule rule = {a->window, a->most, a->base, a->entries, a->ratio, a->origin};
    int64_t total = tensor_elems(&a->idx);
    bool selected = present(&a->sel), documents = present(&a->doc_start);
    LAUNCH(l, fill_lists, (unsigned)ceil_div(total, THREADS), THREADS, 0, (int32_t *)a->idx.data,
           (const int32_t *)a->doc_start.data, documents ? a->doc_start.stride[0] : 0, (const int32_t *)a->sel.data,
           selected ? a->sel.stride[0] : 0, selected ? a->sel.stride[1] : 0, (const int64_t *)a->start.data, a->seq,
           total, rule);
    return ST_OK;
}
