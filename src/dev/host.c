/* Host memory beside a device; see host.h. */
#include "dev/host.h"

#include <string.h>

int dev_alloc_host(struct dev *d, int64_t bytes, void **out, struct err *e)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return cuda_alloc_host(bytes, out, e);
#endif
    return d->vt->alloc(d, bytes, out, e);
}

void dev_free_host(struct dev *d, void *p)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA) {
        cuda_free_host(p);
        return;
    }
#endif
    d->vt->free(d, p);
}

void dev_zero_host(void *p, int64_t bytes)
{
    enum { PART = 1 << 24 };
#pragma omp parallel for schedule(static) if (bytes > PART)
    for (int64_t at = 0; at < bytes; at += PART)
        memset((char *)p + at, 0, (size_t)min_i64(PART, bytes - at));
}

int dev_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return cuda_copy_on(d, lane, dst, src, bytes, e);
#endif
    (void)lane;
    return d->vt->copy_in(d, dst, src, bytes, e);
}
