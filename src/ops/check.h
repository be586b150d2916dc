/* Shape and type checks shared by all op contracts: one line per tensor, one clear message. */
#ifndef BRAID_OPS_CHECK_H
#define BRAID_OPS_CHECK_H

#include "tensor/tensor.h"

/* t must be present, of this dtype and rank, with dims as given (-1: any) and unit last stride. */
int check_tensor(const char *op, const char *name, const struct tensor *t, enum dtype dtype, int rank,
                 const int64_t *dim, struct err *e);
#define CHECK_T(op, name, t, dtype, rank, ...)                                                                         \
    TRY(check_tensor(op, name, t, dtype, rank, (const int64_t[]){__VA_ARGS__}, e))
/* Same, but absent is fine. */
#define CHECK_OPT(op, name, t, dtype, rank, ...)                                                                       \
    do {                                                                                                               \
        if ((t)->data != NULL)                                                                                         \
            CHECK_T(op, name, t, dtype, rank, __VA_ARGS__);                                                            \
    } while (0)
int check_dense(const char *op, const char *name, const struct tensor *t, struct err *e);
/* Both are of one type, or one is absent. */
int check_same_type(const char *op, const char *name, const struct tensor *t, const char *other_name,
                    const struct tensor *other, struct err *e);
int check_work(const char *op, const struct tensor *work, int64_t need, struct err *e);

static inline bool present(const struct tensor *t) { return t->data != NULL; }
static inline int64_t rows_of(const struct tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank - 1; i++)
        n *= t->dim[i];
    return n;
}
static inline int64_t cols_of(const struct tensor *t) { return t->dim[t->rank - 1]; }
/* Element offset of row r (flat over all dims but the last) of a strided tensor. */
static inline int64_t row_offset(const struct tensor *t, int64_t r)
{
    int64_t at = 0;
    for (int i = t->rank - 2; i > 0; i--) {
        at += r % t->dim[i] * t->stride[i];
        r /= t->dim[i];
    }
    return t->rank >= 2 ? at + r * t->stride[0] : at;
}
static inline double *f64_row(const struct tensor *t, int64_t r) { return (double *)t->data + row_offset(t, r); }
static inline float *f32_row(const struct tensor *t, int64_t r) { return (float *)t->data + row_offset(t, r); }

#endif
