/* Host memory beside a device; see host.h. */
#include "base/file.h"
#include "dev/host.h"

int dev_alloc_host(struct dev *d, int64_t bytes, void **out, struct err *e)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return cuda_alloc_host(bytes, out, e);
#endif
    TRY(d->vt->alloc(d, bytes, out, e));
    return d->vt->fill(d, *out, 0, bytes, e);
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

int dev_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e)
{
#ifdef BRAID_CUDA
    if (d->kind == DEV_CUDA)
        return cuda_copy_on(d, lane, dst, src, bytes, e);
#endif
    (void)lane;
    return d->vt->copy_in(d, dst, src, bytes, e);
}

/* Copies each way, `times` of each; which: 1 in, 2 out, 3 both at once. */
static int time_copies(struct dev *d, char *there, char *here, int64_t bytes, int which, double *seconds, struct err *e)
{
    enum { TIMES = 4, LANE_IN = 3, LANE_OUT = 4 };
    TRY(d->vt->sync(d, e));
    double begin = time_now();
    for (int i = 0; i < TIMES; i++) {
        if (which & 1)
            TRY(dev_copy_on(d, LANE_IN, there, here, bytes, e));
        if (which & 2)
            TRY(dev_copy_on(d, LANE_OUT, here + bytes, there + bytes, bytes, e));
    }
    TRY(d->vt->sync(d, e));
    *seconds = (time_now() - begin) / TIMES;
    return ST_OK;
}

int dev_link_rates(struct dev *d, int64_t bytes, struct link_rates *out, struct err *e)
{
    void *there = NULL, *here = NULL;
    double seconds[4] = {0};
    int st = d->vt->alloc(d, 2 * bytes, &there, e);
    if (st == ST_OK)
        st = dev_alloc_host(d, 2 * bytes, &here, e);
    if (st == ST_OK)
        st = d->vt->fill(d, there, 0, 2 * bytes, e);
    for (int which = 0; st == ST_OK && which <= 3; which++) /* 0: the first copies warm up */
        st = time_copies(d, there, here, bytes, which == 0 ? 3 : which, &seconds[which], e);
    if (st == ST_OK)
        *out = (struct link_rates){
            .in = (double)bytes / seconds[1], .out = (double)bytes / seconds[2], .both = (double)bytes / seconds[3]};
    if (here != NULL)
        dev_free_host(d, here);
    if (there != NULL)
        d->vt->free(d, there);
    return st;
}
