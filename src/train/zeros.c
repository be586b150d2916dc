/* Counting zeros among the gradients of a step; see train.h. Each rank counts the pieces whose sums it holds. */
#include "train/ranks_int.h"

#include <stdlib.h>

static double count_f32(const float *x, int64_t n)
{
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; i++)
        zeros += x[i] == 0;
    return (double)zeros;
}

static double count_f64(const double *x, int64_t n)
{
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; i++)
        zeros += x[i] == 0;
    return (double)zeros;
}

/* Adds the zeros of the part of parameter k that this rank alone is responsible for. */
static int count_one(struct trainer *t, int k, double *zeros, struct err *e)
{
    const struct param_entry *row = &t->model.params.list[k];
    bool far_end = row->p.shared_ends && t->model.mesh.pp_rank > 0; /* the first stage has the same sum */
    struct shard s = shard_of(&t->model, k);
    if (!param_trained(&row->p) || row->grad_offset < 0 || far_end || s.n == 0)
        return ST_OK;
    struct tensor host, grad = model_grad(&t->model, k);
    int64_t skip = s.first - mesh_kept(&t->model.mesh, &row->p, KEPT_GRADIENT).first;
    grad = tensor_1d((char *)grad.data + skip * (int64_t)dtype_bytes(grad.dtype), grad.dtype, s.n);
    TRY(dev_fetch(&t->dev, &grad, &host, e));
    *zeros += host.dtype == DT_F64 ? count_f64(host.data, s.n) : count_f32(host.data, s.n);
    dev_fetched(&t->dev, &host);
    return ST_OK;
}

int trainer_count_zeros(struct trainer *t, double *zeros, struct err *e)
{
    double mine = 0, *all = NULL;
    int world = t->model.mesh.world, st;
    TRY_OUT(mem_array((void **)&all, (size_t)world, sizeof *all, e));
    for (int k = 0; k < t->model.params.n; k++)
        TRY_OUT(count_one(t, k, &mine, e));
    TRY_OUT(ranks_collect(t, "zeros", &mine, (int64_t)sizeof mine, all, e));
    *zeros = 0;
    for (int r = 0; r < world; r++)
        *zeros += all[r];
out:
    free(all);
    return st;
}
