/* Room for OpenBLAS's buffers; see blas.c. */
#ifndef BRAID_DEV_BLAS_INT_H
#define BRAID_DEV_BLAS_INT_H

#include "base/err.h"

/* Before the first product: an error where OpenBLAS would wait for memory that cannot come. */
int blas_reserve(int threads, struct err *e);

#endif
