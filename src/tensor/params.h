/* The parameter table: every weight of the model by its canonical key, with its place in memory. Optimizer,
 * checkpoint and initialisation iterate over it; weights are never indexed by number. */
#ifndef BRAID_TENSOR_PARAMS_H
#define BRAID_TENSOR_PARAMS_H

#include "tensor/tensor.h"

struct param_entry {
    struct param p;
    int64_t offset;      /* bytes into the parameter arena: the copy that layers work with */
    int64_t grad_offset; /* bytes into the gradient arena; -1: not trained by any plan so far */
    /* bytes into the arena of fp32 master weights, where the copy is narrower than what is trained; else -1 */
    int64_t master_offset;
    int64_t optim_offset; /* bytes into the optimizer arena: first moment, then second */
    /* FP8 codes and inverse scales of the matrix, then of its transpose, and scratch to make them: bytes into the arena
     * of codes, -1: not there. */
    int64_t code_offset[4], code_work;
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
/* Declaring how tensor parallelism divides a parameter: not at all; one dimension as a whole; or the next section of
 * one. */
void param_replicate(struct param *p, enum split_grad grad);
void param_split(struct param *p, int dim, enum split_unit unit, int64_t units);
void param_split_section(struct param *p, int dim, int64_t size, enum split_unit unit, int64_t units);
const char *split_unit_name(enum split_unit unit); /* "heads" */
/* An error that names the parameter if its split is not declared, does not add up to its shape, or if a section has a
 * number of units that this many ranks cannot share. */
int param_split_check(const struct param *p, int64_t ranks, struct err *e);
/* Rows of the codes of a parameter, whose matrices lie one below the other. */
static inline int64_t param_code_rows(const struct param *p)
{
    return p->rank == 3 ? p->dim[0] * p->dim[1] : p->dim[0];
}
/* Reduces a whole parameter to the part that one of `ranks` ranks holds; does nothing where it is not divided. */
int param_cut(struct param *p, int ranks, int rank, struct err *e);
/* The elements of this rank's part, from `local` on, that are contiguous in the whole parameter as well. */
struct param_run {
    int64_t whole, n; /* first element in the whole parameter, and how many follow */
};
struct param_run param_run_from(const struct param *p, int64_t local);
/* Elements that count as parameters; tables of integers do not. */
static inline int64_t param_reals(const struct param *p) { return p->n_values > 0 ? 0 : param_elems(p); }
int64_t param_table_elems(const struct param_table *t); /* of all, by that count */

#endif
