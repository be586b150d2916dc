/* What needs no particular device: fetching a tensor, closing, the instruction set of the processor. Apart from
 * opening, so that a program or library that opens devices itself links none of what opening brings in. */
#include "dev/dev.h"

#include <stdlib.h>

const char *cpu_isa(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return "avx2";
#endif
    return "base";
}

int dev_fetch(struct dev *d, const struct tensor *t, struct tensor *host, struct err *e)
{
    *host = *t;
    if (d->kind != DEV_CUDA || t->data == NULL)
        return ST_OK;
    if (!tensor_is_dense(t))
        return err_set(e, ST_INTERNAL, "only dense tensors can be fetched from a GPU");
    int64_t bytes = tensor_bytes(t);
    TRY(mem_aligned(&host->data, (size_t)max_i64(bytes, 1), DEV_ALIGN, e));
    int st = d->vt->copy_out(d, host->data, t->data, bytes, e);
    if (st != ST_OK)
        dev_fetched(d, host);
    return st;
}

void dev_fetched(struct dev *d, struct tensor *host)
{
    if (d->kind == DEV_CUDA)
        free(host->data);
    host->data = NULL;
}

void dev_close(struct dev *d)
{
    if (d->vt != NULL)
        d->vt->close(d);
    *d = (struct dev){0};
}
