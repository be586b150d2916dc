/* The host devices: ref (double) and cpu (fp32). Memory is plain aligned memory. */
#include "dev/blas_int.h"
#include "dev/dev.h"
#include "dev/waiting_int.h"

#include <cblas.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int host_alloc(struct dev *d, int64_t bytes, void **out, struct err *e)
{
    (void)d;
    /* Huge pages for the large arenas: first touch of a gigabyte is then 512 times fewer faults. */
    size_t huge = 1 << 21, align = (size_t)bytes >= huge ? huge : 4096;
    TRY(mem_aligned(out, (size_t)bytes, align, e));
    if (align == huge)
        madvise(*out, (size_t)bytes, MADV_HUGEPAGE); /* a wish: refusal costs only time */
    return ST_OK;
}

static void host_free(struct dev *d, void *p)
{
    (void)d;
    free(p);
}

static int host_copy(struct dev *d, void *dst, const void *src, int64_t bytes, struct err *e)
{
    (void)d;
    (void)e;
    if (bytes > 0)
        memcpy(dst, src, (size_t)bytes);
    return ST_OK;
}

static int host_fill(struct dev *d, void *dst, int byte, int64_t bytes, struct err *e)
{
    (void)d;
    (void)e;
    enum { PART = 1 << 21 };
#pragma omp parallel for schedule(static) if (bytes > PART)
    for (int64_t at = 0; at < bytes; at += PART)
        memset((char *)dst + at, byte, (size_t)min_i64(PART, bytes - at));
    return ST_OK;
}

static int host_sync(struct dev *d, struct err *e)
{
    (void)d;
    (void)e;
    return ST_OK;
}

static void host_close(struct dev *d) { waiting_close(d->impl); }

void dev_between_runs(struct dev *d)
{
    if (d->kind != DEV_CUDA)
        waiting_look(d->impl);
}

static const struct dev_vt host_vt = {
    .alloc = host_alloc,
    .free = host_free,
    .copy_in = host_copy,
    .copy_out = host_copy,
    .fill = host_fill,
    .sync = host_sync,
    .close = host_close,
};

int dev_open_host(struct dev *d, struct err *e)
{
    int cores = cpu_count();
    if (d->n_threads <= 0)
        d->n_threads = cores;
    if (d->n_threads > 1024)
        return err_set(e, ST_INVALID, "run.threads is %d, more than 1024", d->n_threads);
    TRY(blas_reserve(d->n_threads, e));
    omp_set_num_threads(d->n_threads);
    openblas_set_num_threads(d->n_threads);
    d->vt = &host_vt;
    d->impl = waiting_open(d->n_threads);
    if (d->kind == DEV_REF)
        snprintf(d->name, sizeof d->name, "reference (double precision)");
    else
        snprintf(d->name, sizeof d->name, "cpu: %d thread%s, %s, OpenBLAS %s", d->n_threads,
                 d->n_threads == 1 ? "" : "s", cpu_isa(), openblas_get_corename());
    return ST_OK;
}
