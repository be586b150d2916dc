/* Shape and type checks of op arguments; see check.h. */
#include "ops/check.h"

int check_tensor(const char *op, const char *name, const struct tensor *t, enum dtype dtype, int rank,
                 const int64_t *dim, struct err *e)
{
    char have[128];
    if (t->data == NULL)
        return err_set(e, ST_INVALID, "%s: tensor %s is missing", op, name);
    bool ok = t->dtype == dtype && t->rank == rank && (rank == 0 || t->dim[rank - 1] <= 1 || t->stride[rank - 1] == 1);
    for (int i = 0; ok && i < rank; i++)
        ok = t->dim[i] >= 0 && (dim[i] < 0 || t->dim[i] == dim[i]);
    if (ok)
        return ST_OK;
    struct tensor want = tensor_shape(dtype, rank, dim);
    char need[128];
    return err_set(e, ST_INVALID, "%s: tensor %s is %s%s, expected %s (-1: any size)", op, name,
                   tensor_text(t, have, sizeof have),
                   rank > 0 && t->rank == rank && t->dim[rank - 1] > 1 && t->stride[rank - 1] != 1
                       ? " with a strided last dimension"
                       : "",
                   tensor_text(&want, need, sizeof need));
}

int check_dense(const char *op, const char *name, const struct tensor *t, struct err *e)
{
    if (tensor_is_dense(t))
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: tensor %s must be contiguous", op, name);
}

int check_work(const char *op, const struct tensor *work, int64_t need, struct err *e)
{
    if (need <= 0 || (work->data != NULL && tensor_bytes(work) >= need))
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: work has %lld bytes, %lld needed", op,
                   work->data ? (long long)tensor_bytes(work) : 0LL, (long long)need);
}

int check_same_type(const char *op, const char *name, const struct tensor *t, const char *other_name,
                    const struct tensor *other, struct err *e)
{
    if (t->data == NULL || other->data == NULL || t->dtype == other->dtype)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: %s has type %s and %s has type %s, expected one type", op, name,
                   dtype_name(t->dtype), other_name, dtype_name(other->dtype));
}
