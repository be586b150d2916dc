/* What every reference op includes beside its contract, which has the prototypes. It does not see the list of ops. */
#ifndef BRAID_OPS_REF_INT_H
#define BRAID_OPS_REF_INT_H

#include "ops/check.h"
#include "ops/op.h"

#endif
