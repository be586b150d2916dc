/* Opening a device of any kind; see dev.h. */
#include "dev/dev.h"

int dev_open(struct dev *d, enum dev_kind kind, int threads, struct err *e)
{
    *d = (struct dev){.kind = kind, .n_threads = threads};
    switch (kind) {
    case DEV_REF:
        d->real = DT_F64;
        return dev_open_host(d, e);
    case DEV_CPU:
        d->real = DT_F32;
        return dev_open_host(d, e);
    case DEV_CUDA:
        err_set(e, ST_UNSUPPORTED, "this braid was built without CUDA");
        return err_hint(e, "use run.device=cpu");
    }
    return err_set(e, ST_INTERNAL, "unknown device kind %d", (int)kind);
}

void dev_close(struct dev *d)
{
    if (d->vt != NULL)
        d->vt->close(d);
    *d = (struct dev){0};
}
