/* What the host versions of vocab share: labels are looked at before anything is written. */
#ifndef BRAID_OPS_VOCAB_INT_H
#define BRAID_OPS_VOCAB_INT_H

#include "tensor/tensor.h"

/* Every label in [-1, vocab), or an error naming the first that is not. label is host memory. */
int vocab_label_check(const char *op, const struct tensor *label, int64_t vocab, struct err *e);

#endif
