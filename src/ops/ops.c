/* Which table serves a device. */
#include "ops/ops.h"

#include <string.h>

extern const struct ops ops_cpu_base;
#if defined(__x86_64__)
extern const struct ops ops_cpu_avx2, ops_cpu_avx512;
#endif

const struct ops *ops_for(const struct dev *d)
{
    if (d->kind == DEV_REF)
        return &ops_ref;
#if defined(__x86_64__)
    const char *isa = cpu_isa();
    if (strcmp(isa, "avx512") == 0)
        return &ops_cpu_avx512;
    if (strcmp(isa, "avx2") == 0)
        return &ops_cpu_avx2;
#endif
    return d->kind == DEV_CPU ? &ops_cpu_base : NULL;
}
