/* epplan on the CPU: the host version; see epplan.h. */
#include "ops/ops_cpu_int.h"
#include "ops/epplan/epplan.h"

int CPU_NAME(epdest_cpu)(struct lane *l, const struct epdest_args *a) { return epdest_host(a, l->err); }
int CPU_NAME(epsend_cpu)(struct lane *l, const struct epsend_args *a) { return epsend_host(a, l->err); }
int CPU_NAME(epchoices_cpu)(struct lane *l, const struct epchoices_args *a) { return epchoices_host(a, l->err); }
