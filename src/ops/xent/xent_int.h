/* What the host versions of xent share. */
#ifndef BRAID_OPS_XENT_INT_H
#define BRAID_OPS_XENT_INT_H

#include "ops/xent/xent.h"

/* Every label in [-1, vocab), or an error naming the first that is not. Host memory. */
int xent_label_check(const struct xent_args *a, struct err *e);
/* Rows per chunk for these args: a->chunk or the op's choice, at most the number of rows. */
int64_t xent_rows_at_once(const struct xent_args *a);

#endif
