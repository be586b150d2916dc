/* Opening a device of any kind; see dev.h. */
#include "dev/cuda.h"
#include "dev/gpus.h"

int dev_open(struct dev *d, enum dev_kind kind, int threads, struct err *e)
{
    *d = (struct dev){.kind = kind, .n_threads = threads};
    switch (kind) {
    case DEV_REF: d->real = d->wide = DT_F64; return dev_open_host(d, e);
    case DEV_CPU: d->real = d->wide = DT_F32; return dev_open_host(d, e);
    case DEV_CUDA: return dev_open_gpu(d, &(struct dev_gpu){0}, threads, e);
    }
    return err_set(e, ST_INTERNAL, "unknown device kind %d", (int)kind);
}

int dev_open_gpu(struct dev *d, const struct dev_gpu *gpu, int threads, struct err *e)
{
#ifdef BRAID_CUDA
    return dev_open_cuda(d, gpu, threads, e);
#else
    *d = (struct dev){.kind = DEV_CUDA, .n_threads = threads, .real = gpu->fp32 ? DT_F32 : DT_BF16, .wide = DT_F32};
    err_set(e, ST_UNSUPPORTED, "this braid was built without CUDA");
    return err_hint(
        e, "use run.device=cpu, or install the CUDA toolkit and `make CUDA=yes`; `braid plan` then needs no GPU");
#endif
}

#ifndef BRAID_CUDA
int gpus_visible(void) { return 0; }
#endif
