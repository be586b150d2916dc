/* What the host versions of gmm share. */
#ifndef BRAID_OPS_GMM_INT_H
#define BRAID_OPS_GMM_INT_H

#include "tensor/tensor.h"

/* Offsets rise from 0 to at most rows; host memory. */
int gmm_offset_check(const char *op, const struct tensor *offset, int64_t rows, struct err *e);

#endif
