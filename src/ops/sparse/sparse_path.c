/* The choice between kernels of sparse attention and of its indexer; see sparse_path.h. */
#include "ops/sparse/sparse_path.h"

enum {
    CORES_SMEM = 220 * 1024, /* bytes that the tensor-core kernels of sparse attention take */
};
static const char cores[] = "own kernels on tensor cores", plain[] = "own kernels without tensor cores",
                  hopper[] = "own kernels for Hopper";

const struct sparse_device sparse_some_hopper = {.hopper = true, .smem_per_block = 227 * 1024};

/* Why the kernels on tensor cores do not take a shape; NULL: they do. */
static const char *not_cores(const struct sparse_shape *s, const struct sparse_device *d)
{
    bool known = (s->width == 576 || s->width == 512) && s->values == 512;
    if (s->real != DT_BF16)
        return "tensor cores take bf16";
    if (!known && !(s->width == 160 && s->values == 128))
        return "tensor cores take keys of 512 channels and 64 rotary ones or none (model.mla_kv_rank, model.mla_rope)";
    if (!s->aligned)
        return "tensor cores take rows that are aligned to 16 bytes";
    return d->smem_per_block < CORES_SMEM ? "tensor cores need the shared memory of a Hopper GPU" : NULL;
}

/* The same of those for Hopper. */
static const char *not_hopper(const struct sparse_shape *s, const struct sparse_device *d)
{
    bool known = (s->width == 576 || s->width == 512) && s->values == 512;
    if (!d->hopper)
        return "not a Hopper GPU, or gpu.portable";
    if (s->real != DT_BF16 || !s->aligned || (!known && !(s->width == 192 && s->values == 128)))
        return "those for Hopper take the same keys of bf16, aligned to 16 bytes";
    return s->heads > 128 ? "those for Hopper take up to 128 heads" : NULL;
}

struct sparse_choice sparse_path_of(const struct sparse_shape *s, const struct sparse_device *d)
{
    const char *no_hopper = not_hopper(s, d), *no_cores = not_cores(s, d);
    if (no_hopper == NULL)
        return (struct sparse_choice){SPARSE_PATH_HOPPER, hopper, NULL};
    if (no_cores == NULL)
        return (struct sparse_choice){SPARSE_PATH_CORES, cores, no_hopper};
    return (struct sparse_choice){SPARSE_PATH_PLAIN, plain, no_cores};
}

struct sparse_choice index_path_of(const struct index_shape *s, const struct sparse_device *d)
{
    const char *why = s->real != DT_BF16                  ? "tensor cores take bf16"
                      : s->width != 64 && s->width != 128 ? "tensor cores take indexer heads of 64 or 128 channels"
                      : s->heads > 64                     ? "tensor cores take up to 64 indexer heads"
                      : !s->aligned                       ? "tensor cores take rows that are aligned to 16 bytes"
                                                          : NULL;
    if (why != NULL)
        return (struct sparse_choice){SPARSE_PATH_PLAIN, plain, why};
    why = !d->hopper ? "not a Hopper GPU, or gpu.portable"
          : s->lists ? "those for Hopper score all keys that a query sees"
                     : NULL;
    if (why != NULL)
        return (struct sparse_choice){SPARSE_PATH_CORES, cores, why};
    return (struct sparse_choice){SPARSE_PATH_HOPPER, hopper, NULL};
}
