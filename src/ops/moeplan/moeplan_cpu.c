/* moeplan, CPU version: the host one; see moeplan.h. */
#include "ops/ops_cpu_int.h"
#include "ops/moeplan/moeplan.h"

int CPU_NAME(moeplan_cpu)(struct lane *l, const struct moeplan_args *a) { return moeplan_host(a, l->err); }
