/* shift, CUDA version; see shift.h. */
#include "ops/cuda/kernel.cuh"
#include "ops/shift/shift.h"

static __global__ void __launch_bounds__(256)
    shift_ids(const int32_t *x, const int32_t *doc, int32_t *y, int64_t total, int64_t n, int32_t fill)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= total)
        return;
    bool ends = i % n == n - 1 || (doc != NULL && doc[i + 1] != doc[i]);
    y[i] = ends ? fill : x[i + 1];
}

extern "C" int shift_cuda(struct lane *l, const struct shift_args *a)
{
    TRY(shift_check(a, l->err));
    int64_t total = tensor_elems(&a->x);
    LAUNCH(l, shift_ids, (unsigned)ceil_div(total, 256), 256, 0, (const int32_t *)a->x.data,
           (const int32_t *)a->doc_start.data, (int32_t *)a->y.data, total, a->x.dim[1], (int32_t)a->fill);
    return ST_OK;
}
