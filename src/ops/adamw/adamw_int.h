/* What the host versions of adamw share. */
#ifndef BRAID_OPS_ADAMW_INT_H
#define BRAID_OPS_ADAMW_INT_H

#include "ops/adamw/adamw.h"

/* The numbers in hyper and scale must be usable, or an update would destroy the parameter without a
 * word. Host memory. */
int adamw_value_check(const struct adamw_args *a, struct err *e);

#endif
