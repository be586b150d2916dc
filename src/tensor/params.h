/* The parameter table: every weight of the model by its canonical key, with where it lives. Optimizer,
 * checkpoint and init walk over it; nobody indexes weights by number. */
#ifndef BRAID_TENSOR_PARAMS_H
#define BRAID_TENSOR_PARAMS_H

#include "tensor/tensor.h"

struct param_entry {
    struct param p;
    int64_t offset;       /* bytes into the parameter and the gradient arena */
    int64_t optim_offset; /* bytes into the optimizer arena: first moment, then second */
};
struct param_table {
    struct arena text;
    struct param_entry *list;
    int n;
    size_t cap;
};
void param_table_init(struct param_table *t);
void param_table_release(struct param_table *t);
int param_find(const struct param_table *t, const char *key); /* -1 if absent */
/* Adds a copy, or finds the row of that key; a second declaration must have the same shape. */
int param_add(struct param_table *t, const struct param *p, int *index, bool *is_new, struct err *e);
int64_t param_table_elems(const struct param_table *t);

#endif
