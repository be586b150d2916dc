/* Tensor maps for bulk copies, made on the host; see hopper.cuh. The encoder lives in the driver and is found at run
 * time. */
#include "ops/cuda/hopper.cuh"

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static int encode(struct lane *l, CUtensorMap *map, const void *data, cuuint32_t rank, const cuuint64_t *dims,
                  const cuuint64_t *strides, const cuuint32_t *box, CUtensorMapL2promotion promotion)
{
    void *entry = NULL;
    TRY(cuda_tensor_maps(l, &entry));
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    CUresult code = ((encode_fn)entry)(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void *)data, dims, strides, box,
                                       steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? ST_OK
                                : err_set(l->err, ST_INTERNAL,
                                          "tensor map of %u dimensions, [.., %llu, %llu], stride of %llu bytes, box of "
                                          "%u x %u: driver error %d",
                                          rank, (unsigned long long)dims[1], (unsigned long long)dims[0],
                                          (unsigned long long)strides[0], box[1], box[0], (int)code);
}

int tensor_map_2d(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int64_t stride,
                  int box_rows)
{
    const cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)stride * 2};
    const cuuint32_t box[2] = {64, (cuuint32_t)box_rows};
    return encode(l, map, data, 2, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

int tensor_map_blocks(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols)
{
    const cuuint64_t dims[4] = {64, (cuuint64_t)rows, (cuuint64_t)parts, (cuuint64_t)cols / 64},
                     strides[3] = {(cuuint64_t)stride * 2, (cuuint64_t)cols * 2, 128};
    const cuuint32_t box[4] = {64, (cuuint32_t)box_rows, (cuuint32_t)parts, (cuuint32_t)box_cols / 64};
    return encode(l, map, data, 4, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

int tensor_map_slices(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols)
{
    const cuuint64_t dims[4] = {64, (cuuint64_t)cols / 64, (cuuint64_t)rows, (cuuint64_t)parts},
                     strides[3] = {128, (cuuint64_t)stride * 2, (cuuint64_t)cols * 2};
    const cuuint32_t box[4] = {64, (cuuint32_t)box_cols / 64, (cuuint32_t)box_rows, (cuuint32_t)parts};
    /* whole rows come anyway; 1.5 % faster than with 256 bytes */
    return encode(l, map, data, 4, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

int tensor_map_heads(struct lane *l, CUtensorMap *map, const struct tensor *t, int box_rows)
{
    const cuuint64_t dims[4] = {(cuuint64_t)t->dim[3], (cuuint64_t)t->dim[1], (cuuint64_t)t->dim[2],
                                (cuuint64_t)t->dim[0]};
    const cuuint64_t strides[3] = {(cuuint64_t)t->stride[1] * 2, (cuuint64_t)t->stride[2] * 2,
                                   (cuuint64_t)t->stride[0] * 2};
    const cuuint32_t box[4] = {64, (cuuint32_t)box_rows, 1, 1};
    return encode(l, map, t->data, 4, dims, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}
