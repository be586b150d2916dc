/* What the host versions of embed share: the last line of defence against bad token ids. */
#ifndef BRAID_OPS_EMBED_INT_H
#define BRAID_OPS_EMBED_INT_H

#include "tensor/tensor.h"

/* Every id in [0, vocab), or an error naming the first that is not; of a part of a table any id from 0 on is right.
 * token is host memory. */
int embed_token_check(const char *op, const struct tensor *token, int64_t vocab, bool part, struct err *e);

#endif
