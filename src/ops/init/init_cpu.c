/* init on the CPU: the host version; see init.h. */
#include "ops/ops_cpu_int.h"
#include "ops/init/init.h"

int CPU_NAME(init_cpu)(struct lane *l, const struct init_args *a) { return init_host(a, l->err); }
