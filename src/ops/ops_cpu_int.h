/* What every fast CPU op includes beside its contract, which has the prototypes. It does not see the list of ops:
 * adding one compiles nothing here. */
#ifndef BRAID_OPS_CPU_INT_H
#define BRAID_OPS_CPU_INT_H

#include "ops/check.h"
#include "ops/op.h"

#endif
