/* init: initial values of a parameter, a pure function of key and position.
 *   y [n] wide dense, or I32 for INIT_HASH; copy [n] real optional: the same, rounded.
 *   first: y starts at this element of the whole parameter, of which a rank may hold a part.
 *   kind, a, b as in enum init_kind (tensor.h); row: length of a row, for INIT_HASH; n_values likewise.
 * Every value is computed in double and rounded to fp32, on every device, so that all start from the same numbers (a GPU's
 * logarithm and cosine may differ in the last bit of a double, hence a few of a billion values in the last of a float). */
#ifndef BRAID_OPS_INIT_H
#define BRAID_OPS_INIT_H

#include "dev/dev.h"

struct init_args {
    struct tensor y, copy;
    enum init_kind kind;
    double a, b;
    int64_t row, n_values, first;
    uint64_t key;
};
int init_check(const struct init_args *a, struct err *e);
/* Host versions are one: there is nothing to choose between slow and fast. */
int init_host(const struct init_args *a, struct err *e);

#endif
