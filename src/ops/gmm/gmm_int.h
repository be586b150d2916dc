/* What the host versions of gmm share, and the descriptors of all ops over ranges of rows. */
#ifndef BRAID_OPS_GMM_INT_H
#define BRAID_OPS_GMM_INT_H

#include "tensor/tensor.h"

/* Offsets rise from 0 to at most rows; host memory. */
int gmm_offset_check(const char *op, const struct tensor *offset, int64_t rows, struct err *e);
/* Offsets of a sample, the last of them rows: equal ranges if balanced, else uneven ones, every third of them empty. */
void gmm_fill_offsets(struct tensor *host, int64_t rows, bool balanced, uint64_t key);

#endif
