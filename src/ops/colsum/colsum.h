/* colsum: out[c] (+)= sum over rows of x[row, c]; the gradient of a bias.
 *   x [rows, n] real, out [n] wide. Blocks of COLSUM_BLOCK rows, then blocks in order. */
#ifndef BRAID_OPS_COLSUM_H
#define BRAID_OPS_COLSUM_H

#include "dev/dev.h"

enum { COLSUM_BLOCK = 64 };

struct colsum_args {
    struct tensor x, out, work;
    bool acc_out;
};
int colsum_check(const struct colsum_args *a, struct err *e);

#endif
